"""Flash attention backward for every matrix unit: the gradients of q, of k and v, and of a bias. Begin with `gradient_of_q`."""
from __future__ import annotations
from collections.abc import Callable, Collection
from typing import Any, Protocol, TypeVar
from attn.chips import Chip
from attn.kernels.parts.backward.bias_share import BiasShare
from attn.kernels.parts.grid.tensors import Shapes, all_arguments, check_backward, dbias_arguments, dkdv_arguments, dq_arguments, few_arguments
from attn.kernels.parts.grid.workgroup import Workgroup
from attn.problem import Problem
from attn.score.sums import sum_over_scores
from attn.tinygrad_compat import UOp

# With P = exp(S - lse), dP = dO V^T, delta = rowsum(dO * O) - dLSE and dS = P * (dP - delta): dV = P^T dO, dQ = softmax_scale * dS K and dK =
# softmax_scale * dS^T Q (FlashAttention-2, arXiv 2307.08691, algorithm 2). Each kernel computes the scores again, in registers: no score is stored to
# memory.
#
# Each algorithm is one function: `gradient_of_q`, `gradients_of_kv`, `gradients_of_few_queries`, `gradient_of_bias`. A workgroup owns some queries
# and loops over the keys in tiles, or owns some keys and loops over the queries in tiles. A `BackwardUnit` says which rows the workgroup owns, and
# loads the tiles. A `BackwardTrip` does the steps of the algorithm on one tile. Each kind of matrix unit has its own `BackwardUnit` and
# `BackwardTrip`. Each sum is computed by one workgroup, in a fixed order: every run gives the same result. The exception is dQ if `gradients_of_kv`
# also computes dQ: then all workgroups add to its sums in memory, in no order, or one after another in a fixed order
# (attn/kernels/parts/backward/turns.py).

Carry = TypeVar("Carry")

class BackwardTrip(Protocol[Carry]):
  """The steps of the backward algorithms on one tile: each method emits UOps for one thread."""
  # Either the workgroup owns queries and the tile holds keys, or the workgroup owns keys and the tile holds queries. The state `s` holds what
  # operations pass on to later ones: sums in registers, and tiles in LDS.
  def start(self, s:Carry) -> Carry: """Starts the products for S and dP, if the matrix unit works asynchronously, and returns the state."""
  def lse(self, s:Carry) -> Any: """Returns the lse of the queries whose scores this iteration computes."""
  def scores(self, s:Carry) -> tuple[Carry, Any]:
    """Computes S = Q K^T of the rows that the workgroup owns and of the iteration's tile; returns (state, S)."""
  def weights(self, scores:Any, lse:Any) -> Any:
    """Applies score terms (bias, softcap, ...) and masks to S, and returns P = exp(S - lse) and the derivatives of the terms."""
  def dp(self, s:Carry) -> tuple[Carry, Any]: """Computes dP - delta, with dP = dO V^T after dropout; returns (state, dP - delta)."""
  def ds(self, weights:Any, dp:Any, derivatives:Collection[str]|None=None) -> Any:
    """Returns dS = P * (dP - delta) * derivatives of the score terms: of all terms, or only of those named in `derivatives`."""
  def kept(self, weights:Any) -> Any:
    """Returns P as an operand of the product P^T dO: rounded to the inputs' dtype, with 0 where dropout drops a weight."""
  def rounded(self, ds:Any) -> Any: """Returns dS, rounded to the inputs' dtype, as an operand of the products that give dQ and dK."""
  def add(self, s:Carry, name:str, p_or_ds:Any) -> Carry:
    """Adds the product P^T dO, dS^T Q or dS K of this iteration's tile to the gradient `name`, and returns the state."""

class SharingTrip(BackwardTrip[Carry], Protocol[Carry]):
  """The steps of `gradients_of_kv` on one tile of queries, in kernels whose workgroups own keys and also add to dQ."""
  # each workgroup computes the part of dQ that comes from its own keys, and adds this part to the fp32 accumulator of dQ in memory
  def start_dq(self, s:Carry, ds:Any) -> Carry:
    """Starts the product dS K for the queries of this iteration's tile, and returns the state; `ds` is dS, rounded."""
  def add_dq(self, s:Carry) -> Carry: """Adds the product that `start_dq` started to dQ, fp32 sums in memory, and returns the state."""

class HalfTrip(Protocol[Carry]):
  """The steps of `gradients_of_kv_in_halves` on one tile of queries: each method emits UOps for one thread."""
  def start(self, s:Carry) -> Carry:
    """Starts the product S in the first half of the workgroup, and the product dP in the second half; returns the state."""
  def numbers(self, s:Carry) -> Any:
    """Returns a number of each query in the tile: lse in the first half of the workgroup, delta in the second half."""
  def products(self, s:Carry) -> tuple[Carry, Any]:
    """Waits for the product that `start` started; returns (state, S in the first half of the workgroup, dP in the second half)."""
  def weights_of_half(self, products:Any, numbers:Any) -> Any:
    """Applies score terms and masks to S, and returns P = exp(S - lse). The second half of the workgroup does not use the result."""
  def share(self, s:Carry, weights:Any) -> tuple[Carry, Any]:
    """Sends P from the first half of the workgroup to the second half; returns (state, P), in both halves."""
  def operand(self, weights:Any, products:Any, numbers:Any) -> Any:
    """Returns an operand of the next product, rounded to the inputs' dtype: P in the first half, dS = P * (dP - delta) in the second half."""
  def add_half(self, s:Carry, operand:Any) -> Carry:
    """Adds P^T dO to dV in the first half of the workgroup, and dS^T Q to dK in the second half; returns the state."""

class FewQueriesTrip(BackwardTrip[Carry], Protocol[Carry]):
  """The steps of `gradients_of_few_queries` on one tile of keys, whose workgroup holds all queries that see these keys."""
  def start_dq(self, s:Carry, ds:Any) -> Carry:
    """Starts to add dS K, summed over the tile's keys, to dQ, and returns the state; `ds` is dS, rounded."""
  def finish_keys(self, s:Carry) -> Carry: """Stores dK and dV of the tile's keys to memory, and returns the state."""

class OwnUnit(Protocol[Carry]):
  """A workgroup: the rows (or the block of a bias) that it owns, and its loop over tiles."""
  @property
  def group(self) -> Workgroup: """The workgroup that owns the rows: its head, its tensors, and its position in the grid."""
  def walk(self, s:Carry, work:Callable[[Carry, Any], Carry]) -> Carry:
    """Loops over the tiles. The body `work(state, trip)` returns the new state; `walk` returns the state after the last tile."""
  def kernel(self, name:str, cleared:tuple[str, ...], stores:list[UOp], count:int) -> UOp:
    """Returns the kernel, which ends with `stores`. It also sets to 0 the rows of the tensors `cleared` that belong to no sequence."""

class BackwardUnit(OwnUnit[Carry], Protocol[Carry]):
  """A workgroup that owns queries or keys, and computes the gradients that belong to these rows."""
  @property
  def wanted(self) -> tuple[str, ...]: """Names of the gradients that the workgroup computes (dq, dk, dv), in the order of their accumulators."""
  def begin(self, s:Carry|None=None, stores:list[UOp]|None=None) -> Carry:
    """Returns the state before the first tile of a loop over all tiles. In a second loop, `s` and `stores` are the results of the first."""
  def gradient(self, s:Carry, name:str) -> list[UOp]:
    """Returns the stores of the gradient `name` ("dq", "dk" or "dv") of the rows that the workgroup owns."""

class FewQueriesUnit(OwnUnit[Carry], Protocol[Carry]):
  """A workgroup that holds all queries of a head, and loops over all keys or a part of them."""
  def begin(self) -> Carry: """Returns the state before the first tile: dQ is 0, the queries are on their way, and delta is stored."""
  def gradient(self, s:Carry, name:str) -> list[UOp]: """Returns the stores of the gradient `name`, always "dq", to memory."""

class QueriesUnit(BackwardUnit[Carry], Protocol[Carry]):
  def deltas(self, s:Carry) -> list[UOp]: """Returns the stores of delta to memory, from where the other kernels read it."""

class BiasUnit(OwnUnit[Carry], Protocol[Carry]):
  """A workgroup that owns a block of a bias, and loops over all scores to which elements of the block are added."""
  # if all queries share the elements of the bias, the block is one row; if all keys share them, one column
  def begin(self) -> Carry: """Returns the state before the first tile: all sums are 0."""
  def sum(self, s:Carry, ds:Any, tile:Any) -> Carry:
    """Adds dS to the sums, or stores dS itself if each element of the bias belongs to one score; returns the state."""
  def sums(self, s:Carry) -> list[UOp]: """Returns the stores of the sums, the gradient of the workgroup's block of the bias, to memory."""

def gradient_of_q(unit:QueriesUnit[Any]) -> UOp:
  """Returns the kernel for the gradient of q: a workgroup owns queries and loops over the keys."""
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
  """Returns the kernel for the gradients of k and v: a workgroup owns keys and loops over the queries."""
  # The loop is over the queries of all heads that share these keys, one head after another. `passes` has one object for each loop over all these
  # queries: a single pass for both gradients, or, if registers are short, one pass for dV and one for dK. If dQ is among the gradients that a pass
  # computes, the workgroup adds its part of dQ to sums in memory.
  s, stores = None, list[UOp]()
  for unit in passes:
    def work(s:Any, tile:Any, wanted:tuple[str, ...]=unit.wanted) -> Any:
      s = tile.start(s)                                      # starts S and dP, if they are asynchronous
      lse = tile.lse(s)
      s, scores = tile.scores(s)                             # S = Q K^T
      weights = tile.weights(scores, lse)                    # P = exp(S - lse)
      if "dv" in wanted:
        s = tile.add(s, "dv", tile.kept(weights))            # dV += P^T dO
      if "dk" in wanted:
        s, dp = tile.dp(s)                                   # dP - delta, dP = dO V^T
        ds = tile.rounded(tile.ds(weights, dp))              # dS = P * (dP - delta)
        if "dq" in wanted: s = tile.start_dq(s, ds)          # starts dS K, if it is asynchronous
        s = tile.add(s, "dk", ds)                            # dK += dS^T Q
        if "dq" in wanted: s = tile.add_dq(s)                # dQ += dS K, in memory
      return s
    s = unit.walk(unit.begin(s, stores), work)
    stores = [*stores, *[x for name in unit.wanted for x in unit.gradient(s, name)]]
  p, together = passes[0].group.p, "dq" in passes[0].wanted
  return passes[0].kernel("all" if together else "dkdv", ("dk", "dv"), stores, p.flops*5//2 if together else 2*p.flops)

def gradients_of_kv_in_halves(unit:BackwardUnit[Any]) -> UOp:
  """Returns the kernel for the gradients of k and v in which two halves of a workgroup own the same keys: one computes dV, the other dK."""
  # Each line says what the first half does, and after the semicolon what the second half does.
  def work(s:Any, tile:HalfTrip[Any]) -> Any:
    s = tile.start(s)                                        # starts S; or dP
    numbers = tile.numbers(s)                                # lse; or delta
    s, products = tile.products(s)                           # S = K Q^T; or dP = V dO^T
    weights = tile.weights_of_half(products, numbers)        # P = exp(S - lse); the second half does not use the result
    s, weights = tile.share(s, weights)                      # P, in both halves
    return tile.add_half(s, tile.operand(weights, products, numbers))      # dV += P^T dO; or dK += (P * (dP - delta))^T Q
  p = unit.group.p
  s = unit.walk(unit.begin(), work)
  return unit.kernel("dkdv", ("dk", "dv"), [x for name in unit.wanted for x in unit.gradient(s, name)], 2*p.flops)

def gradients_of_few_queries(unit:FewQueriesUnit[Any]) -> UOp:
  """Returns the kernel for all gradients of a problem with few queries, all of which a workgroup holds while it loops over keys."""
  # An iteration finishes dK and dV of its tile of keys, because it has all queries that see these keys. dQ is summed over the iterations.
  def work(s:Any, tile:FewQueriesTrip[Any]) -> Any:
    s = tile.start(s)                                        # starts S and dP, if they are asynchronous
    lse = tile.lse(s)
    s, scores = tile.scores(s)                               # S = Q K^T
    weights = tile.weights(scores, lse)                      # P = exp(S - lse)
    s = tile.add(s, "dv", tile.kept(weights))                # dV = P^T dO
    s, dp = tile.dp(s)                                       # dP - delta, dP = dO V^T
    ds = tile.rounded(tile.ds(weights, dp))                  # dS = P * (dP - delta)
    s = tile.start_dq(s, ds)                                 # dQ += dS K
    s = tile.add(s, "dk", ds)                                # dK = dS^T Q
    return tile.finish_keys(s)
  p = unit.group.p
  s = unit.walk(unit.begin(), work)
  return unit.kernel("few", (), unit.gradient(s, "dq"), p.flops*5//2)

def gradient_of_bias(unit:BiasUnit[Any]) -> UOp:
  """Returns the kernel for the gradient of a bias: a workgroup owns a block of the bias and loops over its scores."""
  # all scores to which the block is added, in a fixed order: batches, heads, queries, keys
  p, derivatives = unit.group.p, sum_over_scores(unit.group.p).derivatives
  def work(s:Any, tile:BackwardTrip[Any]) -> Any:
    s = tile.start(s)                                        # starts S and dP, if they are asynchronous
    lse = tile.lse(s)
    s, scores = tile.scores(s)                               # S = Q K^T
    weights = tile.weights(scores, lse)                      # P = exp(S - lse)
    s, dp = tile.dp(s)                                       # dP - delta, dP = dO V^T
    ds = tile.ds(weights, dp, derivatives)                   # dS = P * (dP - delta), of the value that is summed
    return unit.sum(s, ds, tile)                             # dbias += dS
  s = unit.walk(unit.begin(), work)
  return unit.kernel("dbias", (), unit.sums(s), p.flops)

# ***** makers of kernels: from a problem, a chip and a tile they make the kernel, a function of its tensors *****

class UnitOf(Protocol):
  def __call__(self, p:Problem, arch:Chip, tile:Any, args:tuple[UOp, ...], shapes:Shapes, parts:int) -> Any:
    """Makes a `BackwardUnit`, the object with the steps of a backward kernel, or a list with one for each pass over the queries."""

def backward_dq(unit:UnitOf) -> Callable[..., Callable[..., UOp]]:
  """Returns a function of a problem, a chip and a tile. The function makes the kernel that writes dq, and delta, which the other kernels read."""
  # The kernel takes the tensors of `tensors.dq_arguments(p, dlse, parts)`, in this order. `dlse` says whether lse has a gradient. dq of a query that
  # sees no key is 0. dq and delta of a row that belongs to no sequence are 0. If `parts` is above 0, the keys are divided into `parts` parts: the
  # kernel stores an fp32 dq for each part, and the caller adds them up.
  def kernel_of(p:Problem, arch:Chip, tile:Any, dlse:bool=False, parts:int=0) -> Callable[..., UOp]:
    check_backward(p, tile)
    return lambda *args: gradient_of_q(unit(p, arch, tile, args, dq_arguments(p, dlse, parts), parts))
  return kernel_of

def backward_dkdv(passes:UnitOf) -> Callable[..., Callable[..., UOp]]:
  """Returns a function of a problem, a chip and a tile. The function makes the kernel that reads delta and writes dk and dv."""
  # The kernel takes the tensors of `tensors.dkdv_arguments(p, parts)`, in this order. dk and dv of a key are 0 if no query sees the key, if the key
  # lies beyond kv_lengths, or if the key belongs to no sequence. If `parts` is above 0, the loop over the queries of all heads that share keys is
  # divided into `parts` parts, first by heads, then by queries: the kernel stores an fp32 dk and dv for each part, and the caller adds them up.
  def kernel_of(p:Problem, arch:Chip, tile:Any, parts:int=0) -> Callable[..., UOp]:
    check_backward(p, tile)
    return lambda *args: gradients_of_kv(passes(p, arch, tile, args, dkdv_arguments(p, parts), parts))
  return kernel_of

def backward_dkdv_in_halves(unit:UnitOf) -> Callable[..., Callable[..., UOp]]:
  """Returns a function of a problem, a chip and a tile. The function makes the kernel of `gradients_of_kv_in_halves`."""
  def kernel_of(p:Problem, arch:Chip, tile:Any, parts:int=0) -> Callable[..., UOp]:
    check_backward(p, tile)
    return lambda *args: gradients_of_kv_in_halves(unit(p, arch, tile, args, dkdv_arguments(p, parts), parts))
  return kernel_of

def backward_all(passes:UnitOf) -> Callable[..., Callable[..., UOp]]:
  """Returns a function of a problem, a chip and a tile. The function makes the kernel that writes dk and dv and adds to the sums of dq."""
  # The kernel takes the tensors of `tensors.all_arguments(p, parts)`, in this order. Many workgroups add to each sum of dq. If p.deterministic is
  # true, they add one after another in a fixed order. Otherwise they add in any order, and the last bits of dq differ from run to run. If `parts` is
  # above 0, the kernel stores an fp32 dk and dv for each part of the queries, and the caller adds them up. The sums of dq are fp32 numbers in memory,
  # without the factor softmax_scale.
  def kernel_of(p:Problem, arch:Chip, tile:Any, parts:int=0) -> Callable[..., UOp]:
    check_backward(p, tile)
    return lambda *args: gradients_of_kv(passes(p, arch, tile, args, all_arguments(p, parts), parts))
  return kernel_of

def backward_few(unit:UnitOf) -> Callable[..., Callable[..., UOp]]:
  """Returns a function of a problem, a chip and a tile. The function makes the kernel that writes all gradients of few queries."""
  # The kernel takes the tensors of `tensors.few_arguments(p, dlse, parts, key_parts)`, in this order. All gradients are the same in every run. If
  # `parts` is above 0, the keys are divided into `parts` parts: the kernel stores an fp32 dq for each part, and the caller adds them up. The kernel
  # also writes delta.
  def kernel_of(p:Problem, arch:Chip, tile:Any, dlse:bool=False, parts:int=0, key_parts:int=0) -> Callable[..., UOp]:
    check_backward(p, tile)
    return lambda *args: gradients_of_few_queries(unit(p, arch, tile, args, few_arguments(p, dlse, parts, key_parts), parts))
  return kernel_of

def backward_dbias(unit:UnitOf) -> Callable[..., Callable[..., UOp]]:
  """Returns a function of a problem, a chip and a tile. The function makes the kernel that writes the gradient of a bias."""
  # The kernel takes the tensors of `tensors.dbias_arguments(p, parts)`, in this order; delta is one of them. A workgroup owns a block of the bias. It
  # sums dS over all batches, heads and blocks of queries that use this block. If `parts` is above 0, this loop is divided into `parts` parts: the
  # kernel stores fp32 sums for each part, and the caller adds them up.
  def kernel_of(p:Problem, arch:Chip, tile:Any, parts:int=0) -> Callable[..., UOp]:
    check_backward(p, tile)
    BiasShare(p, tile.block_m, tile.block_n).check_parts(parts)
    return lambda *args: gradient_of_bias(unit(p, arch, tile, args, dbias_arguments(p, parts, tile), parts))
  return kernel_of
