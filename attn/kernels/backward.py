"""Flash attention backward for every matrix unit: the gradients of q, of k and v, and of a bias.

With P = exp(S - lse), dP = dO V^T, delta = rowsum(dO * O) - dLSE and dS = P * (dP - delta): dV = P^T dO, dQ = softmax_scale * dS K and
dK = softmax_scale * dS^T Q (FlashAttention-2, arXiv 2307.08691, algorithm 2). Each kernel computes the scores again, in registers: no score goes to
memory.

Each algorithm is one function: `gradient_of_q`, `gradients_of_kv`, `gradient_of_bias`. A workgroup owns some rows, queries or keys, and walks over
the rows of the other kind in tiles. A `BackwardUnit` knows which rows the workgroup owns, and loads the tiles. A `BackwardTrip` does the steps on one
tile, for one kind of matrix unit. No sum crosses workgroups, so every run gives the same result.
"""
from __future__ import annotations
from collections.abc import Callable
from typing import Any, Protocol, TypeVar
from attn.chips import Chip
from attn.kernels.parts.backward.bias_share import BiasShare
from attn.kernels.parts.grid.tensors import Shapes, check_backward, dbias_arguments, dkdv_arguments, dq_arguments
from attn.kernels.parts.grid.workgroup import Workgroup
from attn.problem import Problem
from attn.score.term import ScoreTerm
from attn.score.terms import summed_term
from attn.tinygrad_compat import UOp

Carry = TypeVar("Carry")

class BackwardTrip(Protocol[Carry]):
  """The steps of the algorithms on one tile, as one thread sees them. The workgroup's own rows are queries and the tile has keys, or the other way
  round. A state holds what one step leaves to the next: the sums in registers, and tiles in LDS."""
  def start(self, s:Carry) -> Carry: """Starts the products S and dP, if products are asynchronous. Otherwise does nothing."""
  def lse(self, s:Carry) -> Any: """Returns the lse of the queries."""
  def scores(self, s:Carry) -> tuple[Carry, Any]: """Computes S = Q K^T."""
  def weights(self, scores:Any, lse:Any) -> Any: """Computes P = exp(S - lse), with terms and masks applied to S, and the derivatives of the terms."""
  def dp(self, s:Carry) -> tuple[Carry, Any]: """Computes dP - delta, with dP = dO V^T. Dropout takes from dP what it takes from P."""
  def ds(self, weights:Any, dp:Any, added:ScoreTerm|None=None) -> Any:
    """Computes dS = P * (dP - delta), the gradient of the product Q K^T without the factor softmax_scale. With `added`, computes the gradient of the
    numbers that this term adds to the scores."""
  def kept(self, weights:Any) -> Any: """Returns what dropout keeps of P, as an operand that is rounded to the inputs' dtype."""
  def rounded(self, ds:Any) -> Any: """Returns dS as an operand."""
  def add(self, s:Carry, name:str, weights:Any) -> Carry: """Adds the product of P or dS with the tile's rows to the gradient `name`."""

class OwnUnit(Protocol[Carry]):
  """What a workgroup owns, and its walk over the other rows."""
  @property
  def group(self) -> Workgroup: """The workgroup's part of the problem."""
  def walk(self, s:Carry, work:Callable[[Carry, Any], Carry]) -> Carry:
    """Walks over the tiles that the own rows see, or that see the own rows, one head after another. When a tile is loaded, does `work(state, trip)`,
    which returns the state after the trip."""
  def kernel(self, name:str, cleared:tuple[str, ...], stores:list[UOp], count:int) -> UOp:
    """Returns the kernel, which does `count` operations and ends with `stores`. It also stores 0 to the rows of the tensors `cleared` that belong to
    no sequence."""

class BackwardUnit(OwnUnit[Carry], Protocol[Carry]):
  """A workgroup that owns queries, or keys."""
  @property
  def wanted(self) -> tuple[str, ...]: """Names of the gradients that the workgroup sums, in the order of their accumulators."""
  def begin(self, s:Carry|None=None, stores:list[UOp]|None=None) -> Carry:
    """Returns the state with all sums 0. The own rows are loaded, or their loads have started. A second pass begins after everything that the first
    one left: its state `s` and its `stores`."""
  def gradient(self, s:Carry, name:str) -> list[UOp]: """Returns the stores of a gradient."""

class QueriesUnit(BackwardUnit[Carry], Protocol[Carry]):
  """A workgroup that owns queries."""
  def deltas(self, s:Carry) -> list[UOp]: """Returns the stores of delta. This kernel computes delta, and the other kernels read it."""

class BiasUnit(OwnUnit[Carry], Protocol[Carry]):
  """A workgroup that owns a block of a bias and walks over all scores that the block is added to. Where all rows share one number of the bias the
  block is one row, and where all keys share one number it is one column."""
  def begin(self) -> Carry: """Returns the state with all sums 0."""
  def sum(self, s:Carry, ds:Any, tile:Any) -> Carry: """Adds dS to the block. Stores dS instead if no two scores share a number of the bias."""
  def sums(self, s:Carry) -> list[UOp]: """Returns the stores of the block."""

def gradient_of_q(unit:QueriesUnit[Any]) -> UOp:
  """The gradient of q: a workgroup owns queries and walks over the keys."""
  def work(s:Any, tile:BackwardTrip[Any]) -> Any:
    s = tile.start(s)                                        # starts S and dP, if they are asynchronous
    lse = tile.lse(s)
    s, scores = tile.scores(s)                               # S = Q K^T
    weights = tile.weights(scores, lse)                      # P = exp(S - lse)
    s, dp = tile.dp(s)                                       # dP - delta, dP = dO V^T
    ds = tile.ds(weights, dp)                                # dS = P * (dP - delta)
    return tile.add(s, "dq", tile.rounded(ds))               # dQ += dS K
  p = unit.group.p
  s = unit.walk(unit.begin(), work)
  return unit.kernel("dq", ("dq", "delta"), [*unit.deltas(s), *unit.gradient(s, "dq")], p.flops//(p.D + p.Dv)*(2*p.D + p.Dv))

def gradients_of_kv(passes:list[BackwardUnit[Any]]) -> UOp:
  """The gradients of k and v: a workgroup owns keys and walks over the queries of all heads that share them, one head after another. It walks once,
  or where registers are short twice: for dV and then for dK."""
  s, stores = None, list[UOp]()
  for unit in passes:
    def work(s:Any, tile:BackwardTrip[Any], wanted:tuple[str, ...]=unit.wanted) -> Any:
      s = tile.start(s)                                      # starts S and dP, if they are asynchronous
      lse = tile.lse(s)
      s, scores = tile.scores(s)                             # S = Q K^T
      weights = tile.weights(scores, lse)                    # P = exp(S - lse)
      if "dv" in wanted:
        s = tile.add(s, "dv", tile.kept(weights))            # dV += P^T dO
      if "dk" in wanted:
        s, dp = tile.dp(s)                                   # dP - delta, dP = dO V^T
        ds = tile.ds(weights, dp)                            # dS = P * (dP - delta)
        s = tile.add(s, "dk", tile.rounded(ds))              # dK += dS^T Q
      return s
    s = unit.walk(unit.begin(s, stores), work)
    stores = [*stores, *[x for name in unit.wanted for x in unit.gradient(s, name)]]
  return passes[0].kernel("dkdv", ("dk", "dv"), stores, 2*passes[0].group.p.flops)

def gradient_of_bias(unit:BiasUnit[Any]) -> UOp:
  """The gradient of a bias: a workgroup owns a block of the bias and walks over all scores that share it. The order is always the same: batches,
  heads, queries and keys."""
  p = unit.group.p
  def work(s:Any, tile:BackwardTrip[Any]) -> Any:
    s = tile.start(s)                                        # starts S and dP, if they are asynchronous
    lse = tile.lse(s)
    s, scores = tile.scores(s)                               # S = Q K^T
    weights = tile.weights(scores, lse)                      # P = exp(S - lse)
    s, dp = tile.dp(s)                                       # dP - delta, dP = dO V^T
    ds = tile.ds(weights, dp, summed_term(p))                # dS = P * (dP - delta), where the bias is added
    return unit.sum(s, ds, tile)                             # dbias += dS
  s = unit.walk(unit.begin(), work)
  return unit.kernel("dbias", (), unit.sums(s), p.flops)

# ***** makers of kernels: from a problem, a chip and a tile they make the kernel, a function of its placeholders *****

class UnitOf(Protocol):
  def __call__(self, p:Problem, arch:Chip, tile:Any, args:tuple[UOp, ...], names:Shapes, parts:int) -> Any:
    """Returns what a workgroup owns. `args` are the kernel's placeholders, and `names` has their shapes and dtypes, by name."""

def backward_dq(unit:UnitOf) -> Callable[..., Callable[..., UOp]]:
  """Returns the maker of the kernel that computes dq, and delta for the other kernels. Its placeholders have the order of
  `tensors.dq_arguments(p, dlse, parts)`. A query that sees no key gets dq = 0. A row of no sequence gets dq = 0 and delta = 0. With `parts` > 0 the
  keys are divided into `parts` parts; each leaves its own fp32 dq, and the caller adds them. Raises NotImplementedError for what
  `tensors.check_backward` names."""
  def kernel_of(p:Problem, arch:Chip, tile:Any, dlse:bool=False, parts:int=0) -> Callable[..., UOp]:
    check_backward(p, tile)
    return lambda *args: gradient_of_q(unit(p, arch, tile, args, dq_arguments(p, dlse, parts), parts))
  return kernel_of

def backward_dkdv(passes:UnitOf) -> Callable[..., Callable[..., UOp]]:
  """Returns the maker of the kernel that computes dk and dv, given delta. Its placeholders have the order of `tensors.dkdv_arguments(p, parts)`. A
  key gets 0 if no query sees it, if it lies beyond kv_lengths, or if it belongs to no sequence. With `parts` > 0 the query heads that share keys, and
  their queries, are divided into `parts` parts; each leaves its own fp32 dk and dv, and the caller adds them. Raises NotImplementedError for what
  `tensors.check_backward` names."""
  def kernel_of(p:Problem, arch:Chip, tile:Any, parts:int=0) -> Callable[..., UOp]:
    check_backward(p, tile)
    return lambda *args: gradients_of_kv(passes(p, arch, tile, args, dkdv_arguments(p, parts), parts))
  return kernel_of

def backward_dbias(unit:UnitOf) -> Callable[..., Callable[..., UOp]]:
  """Returns the maker of the kernel that computes dbias, given delta. Its placeholders have the order of `tensors.dbias_arguments(p, parts)`. With
  `parts` > 0 the sum is divided into `parts` parts; each leaves its own fp32 sums, and the caller adds them. Raises NotImplementedError for what
  `tensors.check_backward` names, and ValueError for more parts than there are trips to sum over."""
  def kernel_of(p:Problem, arch:Chip, tile:Any, parts:int=0) -> Callable[..., UOp]:
    check_backward(p, tile)
    BiasShare(p, tile.block_m, tile.block_n).check_parts(parts)
    return lambda *args: gradient_of_bias(unit(p, arch, tile, args, dbias_arguments(p, parts), parts))
  return kernel_of
