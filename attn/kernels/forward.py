"""Flash attention forward for every matrix unit: O = softmax(S) V and lse = log(sum(exp(S))), with S = Q K^T.

A workgroup owns a block of queries and walks over the keys, one tile after another, with the online softmax (Milakov and Gimelshein 2018, arXiv
1805.02867; FlashAttention-2, arXiv 2307.08691, algorithm 1). `online_softmax` is the algorithm. A `ForwardUnit` implements its steps for one kind of
matrix unit: it loads the tiles, decides when, and multiplies them. attn/kernels/textbook.py does the same steps one number at a time.
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
  """The steps of the algorithm on one kind of matrix unit, for one workgroup, as one thread sees them. A state holds what one step leaves to the
  next: m (the reference of the exponents), l (the sum of P) and O in registers, and tiles in LDS."""
  @property
  def parts(self) -> Iterable[Any]: """The parts of a tile of keys. `weigh` and `add_to_o` run for one part after another."""
  def begin(self) -> State:
    """Returns the state before the first key: m is the lowest number, l and O are 0. Q is loaded, or its load has started."""
  def loops(self) -> Iterable[TileLoop[Any]]:
    """Returns the loops over the tiles of keys that the queries see. When a trip begins, K and V of its tile are loaded, or `scores` waits for
    them."""
  def scores(self, s:State, t:UOp, masked:bool) -> tuple[State, Any]:
    """Returns S = Q K^T of tile t with terms and masks applied, or None if the state holds S. An asynchronous matrix unit only starts the product
    here."""
  def weigh(self, s:State, x:Any, t:UOp, part:Any, masked:bool) -> tuple[State, Any]:
    """Computes P = exp(S - m) of one part from what `scores` returned, and adds sum(P) to l. Where S has outgrown m, raises m and scales O and l down
    accordingly. Returns P, or None if the state holds P."""
  def add_to_o(self, s:State, p:Any, t:UOp, part:Any, masked:bool) -> UOp:
    """Adds P V of one part to O. `p` is what `weigh` returned."""
  def kernel(self, s:State) -> UOp:
    """Returns the kernel. It ends with the stores of O / l and of lse = m + log(l)."""

def online_softmax(unit:ForwardUnit[Any]) -> UOp:
  """Attention forward for one workgroup, by the online softmax: one walk over the tiles of keys."""
  s = unit.begin()                                       # m lowest, l = 0, O = 0; Q
  for loop in unit.loops():                              # over tiles of keys: with masks, without, and with masks again
    s, t = loop.begin(s)                                 # K and V of tile t
    s, x = unit.scores(s, t, loop.masked)                # S = Q K^T
    for part in unit.parts:
      s, p = unit.weigh(s, x, t, part, loop.masked)      # P = exp(S - m), l += sum(P)
      done = unit.add_to_o(s, p, t, part, loop.masked)   # O += P V
      s = s.after(done)
    s = loop.end(done)
  return unit.kernel(s)                                  # O / l, m + log(l)

KernelOf = Callable[[Problem, Chip, Any], Callable[..., UOp]]     # from a problem, a chip and a tile: the kernel, a function of its placeholders

def forward(unit:Callable[[Problem, Chip, Any, tuple[UOp, ...]], ForwardUnit[Any]]) -> KernelOf:
  """Returns the maker of a forward kernel. `unit` makes the steps from a problem, a chip, a tile and the kernel's placeholders.

  The placeholders have the order of `tensors.arguments(p)`: (o, q, k, v); with p.return_lse (o, lse, q, k, v); with p.num_splits > 1 (o_partial,
  lse_partial, q, k, v). The optional tensors that the problem has follow, in the order of `problem.EXTRAS`. With p.num_splits = G > 1 each workgroup
  takes one of G key ranges and writes O and LSE of those keys alone; `combine.combine` merges them. With p.sk_variable the kernel has that Variable
  as one more parameter: `kernel(*placeholders).call(*tensors, variable.bind(n))`. Raises ValueError if p.num_splits is still 0, and
  NotImplementedError for a tensor that is larger than a buffer descriptor can address.
  """
  def kernel_of(p:Problem, arch:Chip, tile:Any) -> Callable[..., UOp]:
    check_problem(p, tile)
    return lambda *args: online_softmax(unit(p, arch, tile, args))
  return kernel_of
