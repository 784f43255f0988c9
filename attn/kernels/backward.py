"""Flash attention backward, whatever computes the products: the gradients of q, of k and v, and of a bias.

With P = exp(S - lse), dP = dO V^T, delta = rowsum(dO * O) - dLSE and dS = P * (dP - delta): dV = P^T dO, dQ = softmax_scale * dS K and
dK = softmax_scale * dS^T Q (FlashAttention-2, arXiv 2307.08691, algorithm 2). Every score is computed anew, in registers: no score goes to memory.

Each algorithm is one function. A `BackwardUnit` knows what a workgroup owns, and how tiles of what it walks over are loaded and when. A
`BackwardTrip` does the steps on one of those tiles, by one kind of matrix unit. No sum crosses workgroups: the result is the same in every run.
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
  """The steps of the algorithms on one tile of what a workgroup walks over, as one thread sees them: its own rows are queries and the tile has keys,
  or the other way round. A state holds what crosses the steps: the sums in registers, and tiles in LDS."""
  def start(self, s:Carry) -> Carry: """S and dP get under way, where products are asynchronous. Elsewhere nothing happens."""
  def lse(self, s:Carry) -> Any: """The lse of the queries."""
  def scores(self, s:Carry) -> tuple[Carry, Any]: """S = Q K^T."""
  def weights(self, scores:Any, lse:Any) -> Any: """P = exp(S - lse) of S as terms and masks leave it, and the derivatives of the terms."""
  def dp(self, s:Carry) -> tuple[Carry, Any]: """dP - delta, where dP = dO V^T. What dropout takes from P it takes from dP."""
  def ds(self, weights:Any, dp:Any, added:ScoreTerm|None=None) -> Any:
    """dS = P * (dP - delta) of S as the product leaves it, less softmax_scale; or of what the term `added` adds."""
  def kept(self, weights:Any) -> Any: """P as an operand, rounded to the inputs' dtype: what dropout keeps of it."""
  def rounded(self, ds:Any) -> Any: """dS as an operand."""
  def add(self, s:Carry, name:str, weights:Any) -> Carry: """Adds to a gradient: P or dS times the rows of the tile."""

class OwnUnit(Protocol[Carry]):
  """What a workgroup owns, and its way over the rest."""
  @property
  def group(self) -> Workgroup: """The workgroup's part of the problem."""
  def walk(self, s:Carry, work:Callable[[Carry, Any], Carry]) -> Carry:
    """Goes over the tiles that its rows see, or that see them, of one head after another. On each, when it is there, it does `work(state, trip)`,
    which returns the state that the trip ends with."""
  def kernel(self, name:str, cleared:tuple[str, ...], stores:list[UOp], count:int) -> UOp:
    """The kernel of so many operations that ends in these stores, and in those of 0 to rows of no sequence of the tensors `cleared`."""

class BackwardUnit(OwnUnit[Carry], Protocol[Carry]):
  """A workgroup that owns queries, or keys."""
  @property
  def wanted(self) -> tuple[str, ...]: """The gradients that are summed, in this order."""
  def begin(self, s:Carry|None=None, stores:list[UOp]|None=None) -> Carry:
    """The sums are 0. Own rows are there or on their way; in a second pass all that the first one left, `s`, is done, and so are its `stores`."""
  def gradient(self, s:Carry, name:str) -> list[UOp]: """The stores of a gradient."""

class QueriesUnit(BackwardUnit[Carry], Protocol[Carry]):
  """A workgroup that owns queries."""
  def deltas(self, s:Carry) -> list[UOp]: """The stores of delta, which this kernel computes and the others read."""

class BiasUnit(OwnUnit[Carry], Protocol[Carry]):
  """A workgroup that owns a block of a bias, or what is left of it where rows or keys share one number, and walks over all that shares it."""
  def begin(self) -> Carry: """The sums are 0."""
  def sum(self, s:Carry, ds:Any, tile:Any) -> Carry: """Adds dS to the block; or stores it, where no two scores share a number of the bias."""
  def sums(self, s:Carry) -> list[UOp]: """The stores of the block."""

def gradient_of_q(unit:QueriesUnit[Any]) -> UOp:
  """A workgroup owns queries and walks over the keys."""
  def work(s:Any, tile:BackwardTrip[Any]) -> Any:
    s = tile.start(s)                                        # S and dP, under way perhaps
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
  """A workgroup owns keys and walks over the queries of one after another of the heads that share them: once, or where registers are short twice, for
  dV and then for dK."""
  s, stores = None, list[UOp]()
  for unit in passes:
    def work(s:Any, tile:BackwardTrip[Any], wanted:tuple[str, ...]=unit.wanted) -> Any:
      s = tile.start(s)                                      # S and dP, under way perhaps
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
  """A workgroup owns a block of the bias and walks over all that shares it, always in the same order: batches, heads, queries and keys."""
  p = unit.group.p
  def work(s:Any, tile:BackwardTrip[Any]) -> Any:
    s = tile.start(s)                                        # S and dP, under way perhaps
    lse = tile.lse(s)
    s, scores = tile.scores(s)                               # S = Q K^T
    weights = tile.weights(scores, lse)                      # P = exp(S - lse)
    s, dp = tile.dp(s)                                       # dP - delta, dP = dO V^T
    ds = tile.ds(weights, dp, summed_term(p))                # dS = P * (dP - delta), of what the bias is added to
    return unit.sum(s, ds, tile)                             # dbias += dS
  s = unit.walk(unit.begin(), work)
  return unit.kernel("dbias", (), unit.sums(s), p.flops)

# ***** kernels: of a problem, a chip and a tile, as functions of their placeholders *****

class UnitOf(Protocol):
  def __call__(self, p:Problem, arch:Chip, tile:Any, args:tuple[UOp, ...], names:Shapes, parts:int) -> Any:
    """What a workgroup owns, given the kernel's placeholders and the names of their tensors."""

def backward_dq(unit:UnitOf) -> Callable[..., Callable[..., UOp]]:
  """The kernel that computes dq, and delta for the others. Its placeholders are those of `tensors.dq_arguments(p, dlse, parts)` in that order. A
  query that sees no key gets dq = 0, and so does a row of no sequence, with delta = 0. With `parts` > 0 the keys are divided into so many parts,
  whose fp32 dq is left to be added. Raises NotImplementedError for what `tensors.check_backward` names."""
  def kernel_of(p:Problem, arch:Chip, tile:Any, dlse:bool=False, parts:int=0) -> Callable[..., UOp]:
    check_backward(p, tile)
    return lambda *args: gradient_of_q(unit(p, arch, tile, args, dq_arguments(p, dlse, parts), parts))
  return kernel_of

def backward_dkdv(passes:UnitOf) -> Callable[..., Callable[..., UOp]]:
  """The kernel that computes dk and dv, given delta. Its placeholders are those of `tensors.dkdv_arguments(p, parts)` in that order. A key that no
  query sees gets 0, and so does one beyond kv_lengths, or of no sequence. With `parts` > 0 the query heads that share keys, and their queries, are
  divided into so many parts, whose fp32 dk and dv are left to be added. Raises NotImplementedError for what `tensors.check_backward` names."""
  def kernel_of(p:Problem, arch:Chip, tile:Any, parts:int=0) -> Callable[..., UOp]:
    check_backward(p, tile)
    return lambda *args: gradients_of_kv(passes(p, arch, tile, args, dkdv_arguments(p, parts), parts))
  return kernel_of

def backward_dbias(unit:UnitOf) -> Callable[..., Callable[..., UOp]]:
  """The kernel that computes dbias, given delta. Its placeholders are those of `tensors.dbias_arguments(p, parts)` in that order. With `parts` > 0
  what is summed is divided into so many parts, whose fp32 sums are left to be added. Raises NotImplementedError for what `tensors.check_backward`
  names, and ValueError for more parts than there are trips to sum over."""
  def kernel_of(p:Problem, arch:Chip, tile:Any, parts:int=0) -> Callable[..., UOp]:
    check_backward(p, tile)
    BiasShare(p, tile.block_m, tile.block_n).check_parts(parts)
    return lambda *args: gradient_of_bias(unit(p, arch, tile, args, dbias_arguments(p, parts), parts))
  return kernel_of
