"""Flash attention forward for every matrix unit: O = softmax(S) V and lse = log(sum(exp(S))), with S = Q K^T. Begin with `online_softmax`."""
from __future__ import annotations
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar
from attn.chips import Chip
from attn.kernels.parts.grid.tensors import check_problem
from attn.kernels.parts.program.trips import TileLoop
from attn.problem import Problem
from attn.tinygrad_compat import UOp

# A workgroup owns a block of queries and loops over the keys, one tile after another, with the online softmax (Milakov and Gimelshein 2018, arXiv
# 1805.02867; FlashAttention-2, arXiv 2307.08691, algorithm 1). `online_softmax` is the algorithm. A `ForwardUnit` implements the steps of the
# algorithm for one kind of matrix unit: it decides when tiles are loaded, loads them and multiplies them. attn/kernels/textbook.py does the steps of
# this algorithm one number at a time.

State = TypeVar("State")

class ForwardUnit(Protocol[State]):
  """The steps of the forward algorithm on one kind of matrix unit: each method emits UOps for one thread of a workgroup."""
  # The state `s` holds what operations pass on to later ones: m (the number that the softmax subtracts from the scores of a row), l (the sum of P)
  # and O in registers, and tiles in LDS. `masked` is true for a tile of keys in which masks may hide scores.
  @property
  def parts(self) -> Iterable[Any]: """Parts of a tile of keys, computed one after another: `weigh` and `add_to_o` are called once for each part."""
  def begin(self) -> State: """Returns the state before the first key: m is the lowest number, and l and O are 0."""
  def loops(self) -> Iterable[TileLoop[Any]]:
    """Returns the loops over the tiles of keys that the queries see. Each iteration begins with its tile loaded, or with the copy started."""
  def scores(self, s:State, t:UOp, masked:bool) -> tuple[State, Any]:
    """Computes S = Q K^T of tile t, after score terms and masks; returns (state, S, or None if the state holds S)."""
  def weigh(self, s:State, x:Any, t:UOp, part:Any, masked:bool) -> tuple[State, Any]:
    """Computes P = exp(S - m) of one part of tile t, adds its row sums to l; returns (state, P)."""
  def add_to_o(self, s:State, p:Any, t:UOp, part:Any, masked:bool) -> UOp:
    """Adds P V of one part of tile t to O, and returns the last operation of this addition."""
  def kernel(self, s:State) -> UOp: """Returns the kernel, which ends with the stores of O / l and of lse = m + log(l)."""

def online_softmax(unit:ForwardUnit[Any]) -> UOp:
  """Returns the forward kernel, which computes O and lse in a single loop over the tiles of keys."""
  s = unit.begin()                                       # m lowest, l = 0, O = 0; Q
  for loop in unit.loops():                              # loops over tiles of keys: masked tiles, full tiles, masked tiles
    s, t = loop.begin(s)                                 # K and V of tile t
    s, x = unit.scores(s, t, loop.masked)                # S = Q K^T
    for part in unit.parts:
      s, p = unit.weigh(s, x, t, part, loop.masked)      # P = exp(S - m), l += sum(P)
      done = unit.add_to_o(s, p, t, part, loop.masked)   # O += P V
      s = s.after(done)
    s = loop.end(done)
  return unit.kernel(s)                                  # O / l, m + log(l)

KernelOf = Callable[[Problem, Chip, Any], Callable[..., UOp]]     # from a problem, a chip and a tile: the kernel, a function of its tensors

def forward(unit:Callable[[Problem, Chip, Any, tuple[UOp, ...]], ForwardUnit[Any]]) -> KernelOf:
  """Returns a function of a problem, a chip and a tile. This function makes the forward kernel from the steps of the object that `unit` returns."""
  # The kernel takes the tensors of `tensors.arguments(p)`, in this order: (o, q, k, v); with p.return_lse (o, lse, q, k, v); with p.num_splits > 1
  # (o_partial, lse_partial, q, k, v). After v come the optional tensors of the problem, in the order of `problem.EXTRAS`. With p.num_splits = G > 1
  # the keys are divided into G ranges, and each workgroup computes O and LSE of one range; `combine.combine` merges the results. With p.sk_variable
  # the kernel has this Variable as a further parameter: `kernel(*placeholders).call(*tensors, variable.bind(n))`.
  def kernel_of(p:Problem, arch:Chip, tile:Any) -> Callable[..., UOp]:
    check_problem(p, tile)
    return lambda *args: online_softmax(unit(p, arch, tile, args))
  return kernel_of
