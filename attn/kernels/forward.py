"""Flash attention forward, whatever computes the products: O = softmax(S) V and lse = log(sum(exp(S))), with S = Q K^T.

A workgroup owns some queries and walks over the keys in tiles, with the online softmax (Milakov and Gimelshein 2018, arXiv 1805.02867;
FlashAttention-2, arXiv 2307.08691, algorithm 1). `online_softmax` is the algorithm. A `ForwardUnit` does its steps: it knows how tiles are loaded and
when, and how its matrix unit multiplies. attn/kernels/textbook.py takes the same steps one number at a time.
"""
from __future__ import annotations
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar
from attn.chips import Chip
from attn.kernels.parts.grid.tensors import check_problem
from attn.kernels.parts.program.trips import TileLoop
from attn.problem import Problem
from attn.tinygrad_compat import UOp

State = TypeVar("State")

class ForwardUnit(Protocol[State]):
  """The steps of the algorithm by one kind of matrix unit, for one workgroup, as one thread sees them. A state holds what crosses the steps:
  registers with m, the reference of exponents, l, the sum of P, and O; and tiles in LDS."""
  @property
  def parts(self) -> Iterable[Any]: """Parts of a tile of keys whose P is computed and used one after another."""
  def begin(self) -> State:
    """No key was seen: m is the lowest number, l and O are 0. Q is there or on its way."""
  def loops(self) -> Iterable[TileLoop[Any]]:
    """Loops over the tiles of keys that the queries see: K and V of a tile are there when a trip begins, or `scores` waits for them."""
  def scores(self, s:State, t:UOp, masked:bool) -> tuple[State, Any]:
    """S = Q K^T of tile t, as terms and masks leave it; None where the state has it, under way perhaps."""
  def weigh(self, s:State, x:Any, t:UOp, part:Any, masked:bool) -> tuple[State, Any]:
    """P = exp(S - m) of a part, of what `scores` returned; None where the state has it. l += sum(P). Where S has outgrown m, m rises, and O and l
    shrink accordingly."""
  def add_to_o(self, s:State, p:Any, t:UOp, part:Any, masked:bool) -> UOp:
    """O += P V of a part, of what `weigh` returned."""
  def kernel(self, s:State) -> UOp:
    """O = O / l and lse = m + log(l), and their stores."""

def online_softmax(unit:ForwardUnit[Any]) -> UOp:
  """The algorithm."""
  s = unit.begin()                                       # m, l and O; Q
  for loop in unit.loops():                              # over tiles of keys: with masks, without, and with masks again
    s, t = loop.begin(s)                                 # K and V of tile t
    s, x = unit.scores(s, t, loop.masked)                # S = Q K^T
    for part in unit.parts:
      s, p = unit.weigh(s, x, t, part, loop.masked)      # P = exp(S - m), l += sum(P)
      done = unit.add_to_o(s, p, t, part, loop.masked)   # O += P V
      s = s.after(done)
    s = loop.end(done)
  return unit.kernel(s)                                  # O / l, m + log(l)

KernelOf = Callable[[Problem, Chip, Any], Callable[..., UOp]]     # of a problem, a chip and a tile: the kernel as a function of its placeholders

def forward(unit:Callable[[Problem, Chip, Any, tuple[UOp, ...]], ForwardUnit[Any]]) -> KernelOf:
  """The forward kernel whose steps `unit` makes of a problem, a chip, a tile and the kernel's placeholders.

  The placeholders are those of `tensors.arguments(p)` in that order: (o, q, k, v), (o, lse, q, k, v) when p.return_lse,
  (o_partial, lse_partial, q, k, v) when p.num_splits > 1; then the optional tensors there are, in the order of `problem.EXTRAS`. With
  p.num_splits = G > 1 each workgroup takes one of G key ranges and writes the O and LSE of those keys alone, which `combine.combine` merges. With
  p.sk_variable the kernel has that Variable as a further parameter: `kernel(*placeholders).call(*tensors, variable.bind(n))`. Raises ValueError
  where p.num_splits is still 0, and NotImplementedError for tensors beyond what a buffer descriptor addresses.
  """
  def kernel_of(p:Problem, arch:Chip, tile:Any) -> Callable[..., UOp]:
    check_problem(p, tile)
    return lambda *args: online_softmax(unit(p, arch, tile, args))
  return kernel_of
