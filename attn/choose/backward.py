"""Choice of what computes the gradients of a problem on a chip: the backward kernels, or tinygrad from `three_pass` (attention in plain tensor
operations). Begin with `choose_backward`."""
from __future__ import annotations
import itertools, math
from dataclasses import dataclass, replace
from typing import Callable
from attn.chips import Chip
from attn.choose import splits
from attn.choose.backward_tiles import AnyBackwardTile, AtOnceTile
from attn.choose.dispatch import asked_for
from attn.choose.forced import BY_TINYGRAD, UNITS, WAYS
from attn.choose.gradient_kernels import AT_ONCE_KERNELS, AtOnce, BACKWARD_KERNELS, BIAS_KERNEL, FEW_KERNEL, GRADIENT_KERNELS, Tiles
from attn.choose.refusals import NO_UNIT, Refusal, lacks_nothing, most_telling, no_tiles
from attn.functions.symbols import number_of_tensor
from attn.kernels.parts.backward.bias_share import BiasShare
from attn.kernels.parts.grid.tensors import dbias_arguments, dkdv_arguments, dq_arguments, dq_sums, dq_turns
from attn.kernels.parts.program.counts import ceildiv
from attn.kernels.tiles.amd import BackwardTile
from attn.kernels.tiles.mma import MmaBackwardTile
from attn.kernels.tiles.wgmma import WgmmaFewQueriesTile
from attn.problem import MAX_SPLITS, Problem
from attn.score.own import float_elements
from attn.score.sums import problems_of_sums, sum_over_scores, why_not_summed
from attn.tinygrad_compat import UOp
from attn.values import FLOATS, INTS, cache_of_kernels

def dq_of(p:Problem, arch:Chip, tile:AnyBackwardTile, dlse:bool=False, parts:int=0) -> Callable[..., UOp]:
  """Returns the function that builds the kernel for dq and delta."""
  # With `dlse` lse has a gradient, too. With `parts` above 0 the kernel stores this number of fp32 partial results in place of dq.
  return GRADIENT_KERNELS[tile.suffix].dq(p, arch, tile, dlse, parts)

def dkdv_of(p:Problem, arch:Chip, tile:AnyBackwardTile, parts:int=0) -> Callable[..., UOp]:
  """Returns the function that builds the kernel for dk and dv."""
  # With `parts` above 0 the kernel stores this number of fp32 partial results in place of dk, and as many in place of dv.
  return GRADIENT_KERNELS[tile.suffix].dkdv(p, arch, tile, parts)

def kernels_at_once(tile:AnyBackwardTile) -> AtOnce:
  found = GRADIENT_KERNELS[tile.suffix].at_once
  assert found is not None
  return found

def delta_of(p:Problem, arch:Chip, tile:AnyBackwardTile, dlse:bool=False) -> Callable[..., UOp]:
  """Returns the function that builds the first of three backward kernels: it computes delta and sets the fp32 sum of dQ to 0."""
  return kernels_at_once(tile).delta(p, arch, dlse)
def all_of(p:Problem, arch:Chip, tile:AnyBackwardTile, parts:int=0) -> Callable[..., UOp]:
  """Returns the function that builds the second of three backward kernels: it stores dk and dv, and adds dQ to an fp32 sum in memory."""
  # With `parts` above 0 the kernel stores this number of fp32 partial results in place of dk, and as many in place of dv.
  return kernels_at_once(tile).all(p, arch, tile, parts)
def few_of(p:Problem, arch:Chip, tile:AnyBackwardTile, dlse:bool=False, parts:int=0, key_parts:int=0) -> Callable[..., UOp]:
  """Returns the function that builds the kernel that computes dq, dk, dv and delta of a problem with few queries."""
  # With `parts` above 0 the kernel stores this number of fp32 partial results in place of dq. With key_parts=1 it stores dk and dv in fp32.
  found = GRADIENT_KERNELS[tile.suffix].few
  assert found is not None
  return found.program(p, arch, tile, dlse, parts, key_parts)
def finish_of(p:Problem, arch:Chip, tile:AnyBackwardTile) -> Callable[..., UOp]:
  """Returns the function that builds the last of three backward kernels: it multiplies the fp32 sum of dQ by softmax_scale and stores it as dq."""
  return kernels_at_once(tile).finish(p, arch, tile)

def at_once(p:Problem, arch:Chip) -> AtOnceTile|str|None:
  """Returns the tile description of the single kernel for dq, dk and dv, or the reason why attn uses two kernels, or None if the matrix unit has no
  such kernel."""
  found = GRADIENT_KERNELS[tiles_of(p, arch)[0].suffix].at_once
  return None if found is None else found.tile(p, arch)

def few_queries(p:Problem, arch:Chip) -> WgmmaFewQueriesTile|str|None:
  """Returns the tile description of the single kernel for all gradients of few queries, or the reason why attn uses others, or None if there is
  none."""
  found = GRADIENT_KERNELS[tiles_of(p, arch)[0].suffix].few
  return None if found is None else found.tile(p, arch)

def instead_of_two(p:Problem, arch:Chip) -> AtOnceTile|None:
  """Returns the tile description of the single kernel for dq, dk and dv if attn chooses it, or None if attn chooses two kernels."""
  return next((tile for choose in (few_queries, at_once) if isinstance(tile := choose(p, arch), AtOnceTile)), None)

def choose_bias_tile(p:Problem, arch:Chip) -> BackwardTile|MmaBackwardTile:
  """Returns the tile description of the kernel that computes dbias, or raises NotImplementedError if the chip has no such kernel."""
  for gradient in GRADIENT_KERNELS.values():
    if gradient.bias is not None and gradient.lacks(arch) is None: return gradient.bias.tile(p, arch)
  raise NotImplementedError(no_tiles(arch))

def dbias_of(p:Problem, arch:Chip, tile:BackwardTile|MmaBackwardTile, parts:int=0) -> Callable[..., UOp]:
  """Returns the function that builds the kernel for dbias."""
  # With `parts` above 0 the kernel stores this number of fp32 partial results in place of dbias.
  bias = GRADIENT_KERNELS[tile.suffix].bias
  assert bias is not None
  return bias.program(p, arch, tile, parts)

@dataclass(frozen=True)
class ChosenKernel:
  """A kernel that attn chose to compute some or all of a problem's gradients, with its tile description."""
  name: str
  # `tile` is None if the kernel leaves nothing to choose. `over` says what the kernel loops over, "keys" or "queries", and is "" if `attn.explain`
  # does not count the kernel's tiles. The kernel stores `parts` fp32 partial results of each gradient (0: the gradient itself). `tensor` names the
  # tensor whose gradient `backward_dbias` sums ("" for other kernels).
  tile: AnyBackwardTile|None = None
  over: str = ""
  parts: int = 0
  tensor: str = ""
  def __str__(self) -> str:
    of_tile = [] if self.tile is None else [f"tile {self.tile}", *[self.tile.options]*bool(self.tile.options)]
    return " ".join([self.name, *[f"for {self.tensor}"]*bool(self.tensor), *of_tile, *[f"in {self.parts} parts"]*(self.parts > 1)])

@dataclass(frozen=True)
class BackwardChoice:
  """What computes the gradients of a problem: the kernels `chosen`, or tinygrad if `chosen` is empty."""
  chosen: tuple[ChosenKernel, ...]  # in the order in which they run
  arch: Chip|None
  refused: str|None = None  # why the backward kernels do not compute the gradients
  memory: int = 0  # bytes of the tensors that the kernels need besides inputs and outputs
  others: tuple[tuple[str, str], ...] = ()  # (names of kernels that attn would prefer, why not)
  by_tinygrad: tuple[tuple[str, str], ...] = ()  # (tensor that score_mod reads, why no kernel computes its gradient)
  def why_not(self, kernel:str) -> str|None:
    """Returns why attn did not choose the backward kernel named `kernel`, such as "backward_dq_mma"; None if no reason is recorded."""
    return next((reason for names, reason in self.others if kernel in names.split(", ")), None)
  @property
  def kernels(self) -> tuple[str, ...]: return tuple(x.name for x in self.chosen)
  @property
  def tiles(self) -> tuple[AnyBackwardTile, ...]|None:
    """Tile descriptions of the chosen backward kernels; None if tinygrad computes the gradients."""
    return tuple(x.tile for x in self.chosen if x.tile is not None) or None
  @property
  def parts(self) -> tuple[int, ...]:
    """Number of fp32 partial results of each gradient, one entry for each of `tiles`; 0 if the kernel stores whole gradients."""
    return tuple(x.parts for x in self.chosen if x.tile is not None)
  @property
  def at_once(self) -> bool:
    """Whether one kernel computes dq, dk and dv."""
    return any(x.name.startswith((AT_ONCE_KERNELS[1], FEW_KERNEL)) for x in self.chosen)
  def __str__(self) -> str:
    where = "any device" if self.arch is None else str(self.arch)
    if not self.chosen:
      return (f"gradient on {where}: three_pass, computed again and differentiated by tinygrad, with its score matrix in memory\n"
              f"  not {' and '.join(BACKWARD_KERNELS)}: {self.refused}")
    lines = [f"gradient on {where}: {', '.join(map(str, self.chosen))}", *(f"  not {names}: {reason}" for names, reason in self.others)]
    lines += [f"  gradient of {name}: three_pass, with its score matrix in memory: {reason}" for name, reason in self.by_tinygrad]
    return "\n".join([*lines, f"  memory beside inputs and outputs: {self.memory} bytes"])

FULL_GRIDS = 4    # most workgroups that parts may add to a kernel's own, counted in grids that fill the chip

@dataclass(frozen=True)
class Parts:
  """Number of fp32 partial results of each gradient that each backward kernel stores, to be added later; 0 if the kernel stores the whole
  gradient."""
  # With partial results, several workgroups share the work of one. A further kernel adds the partial results, always in the same order.
  dq: int
  dkdv: int
  sums: tuple[int, ...] = ()  # for each sum that `backward_dbias` computes

def choose_parts(p:Problem, arch:Chip) -> Parts:
  """Chooses how many partial results each backward kernel stores of each gradient, so that enough workgroups fill the chip."""
  return parts_with_tiles(p, arch, *tiles_of(p, arch))

@cache_of_kernels
def parts_with_tiles(p:Problem, arch:Chip, dq:AnyBackwardTile, dkdv:AnyBackwardTile) -> Parts:
  """Chooses how many partial results the backward kernels with the tile descriptions `dq` and `dkdv` store of each gradient."""
  if arch.serial or not arch.cus: return Parts(0, 0, (0,)*len(kernel_sums(p, arch)))      # nothing is known of such a device
  return Parts(parts_of_kernel(p, arch, dq, "keys"), parts_of_kernel(p, arch, dkdv, "queries"),
               tuple(parts_of_sum(x, arch) for x in kernel_sums(p, arch)))

def parts_of_kernel(p:Problem, arch:Chip, tile:AnyBackwardTile, over:str) -> int:
  """Chooses how many partial results of each gradient a backward kernel stores; 0 means the gradient itself."""
  visible = p.flops//(2*p.B*p.H*(p.D + p.Dv))      # scores of a head that a mask leaves
  rows, keys = (p.total_q, p.total_k) if p.varlen else (p.B*p.Sq, p.B*p.Sk)
  # `over` says what a workgroup loops over, "keys" or "queries"; the workgroup owns rows of the other kind.
  own, heads, walked, numbers = (p.Sq, p.H, p.Sk, rows*p.H*p.D) if over == "keys" else (p.Sk, p.Hkv, p.Sq, keys*p.Hkv*(p.D + p.Dv))
  shared = p.H//heads
  trips, longest = (shared*ceildiv(seen, tile.block_n) for seen in (visible//own, most_seen(p, over)))
  workgroups, places = p.B*heads*ceildiv(own, tile.block_m), splits.places_of(p, arch, tile)
  # The memory of partial results is limited: they add at most FULL_GRIDS times as many workgroups as fill the chip.
  most = min(ceildiv(walked, tile.block_n)*shared, 1 + FULL_GRIDS*places//workgroups)
  choices = [2**i for i in range(MAX_SPLITS.bit_length()) if 2**i <= most]
  found = splits.quickest(choices, workgroups, max(1, trips), tile.block_n, places, numbers, longest)
  return found if found > 1 else 0

def parts_of_chosen(p:Problem, arch:Chip) -> Parts:
  """Chooses how many partial results the kernels that attn chooses for `p` store of each gradient."""
  # The kernel for few queries counts as a kernel of dq.
  parts, few = choose_parts(p, arch), few_queries(p, arch)
  return replace(parts, dq=parts_of_kernel(p, arch, few, "keys"), dkdv=0) if isinstance(few, WgmmaFewQueriesTile) else parts

def most_seen(p:Problem, over:str) -> int:
  """Returns the most keys that one query sees (`over`="keys"), or the most queries that see one key (`over`="queries")."""
  # Only the window (p.window, which includes a causal mask) is considered.
  (left, right), rows, columns, offset = (p.window, p.Sq, p.Sk, p.offset) if over == "keys" else (p.window[::-1], p.Sk, p.Sq, -p.offset)
  # The row whose column on the diagonal is `center` sees the columns from center - left to center + right. The next row has the next column.
  best = left if min(left, right) >= 0 else 0 if right < 0 else columns
  center = min(max(best, offset), rows - 1 + offset)
  first, last = 0 if left < 0 else max(0, center - left), columns - 1 if right < 0 else min(columns - 1, center + right)
  return max(0, last - first + 1)

def parts_of_sum(x:KernelSum, arch:Chip) -> int:
  """Chooses how many partial results one run of `backward_dbias`, described by `x`, stores; 0 means that the kernel stores the whole sum."""
  share = BiasShare(x.p, x.tile.block_m, x.tile.block_n)
  if share.summed.diagonals: return 0
  found = share.trips if share.uneven else min(share.trips, arch.cus//share.workgroups)
  return found if found > 1 else 0

@dataclass(frozen=True)
class KernelSum:
  """The problem and tile description of a run of `backward_dbias`, which sums dS (the gradient of the scores) to the gradient of a tensor such as a
  bias."""
  p: Problem  # problem for which the kernel is made
  tile: BackwardTile|MmaBackwardTile
  @property
  def tensor(self) -> str:
    """Name of the tensor whose gradient the kernel computes, such as "bias"."""
    return sum_over_scores(self.p).name

@cache_of_kernels
def kernel_sums(p:Problem, arch:Chip) -> tuple[KernelSum, ...]:
  """Returns a `KernelSum` for each run of `backward_dbias` that the gradients of `p` need; () if the chip has no such kernel."""
  if (bias := GRADIENT_KERNELS[tiles_of(p, arch)[0].suffix].bias) is None: return ()
  found = list[KernelSum]()
  for x in problems_of_sums(p):
    try: tile = bias.tile(x, arch)
    except NotImplementedError: continue
    if tile.lds_bytes(x) <= arch.lds: found.append(KernelSum(x, tile))
  return tuple(found)

def tensors_by_tinygrad(p:Problem, arch:Chip) -> dict[str, str]:
  """Returns {name: why no kernel computes the gradient} for those tensors that score_mod reads whose gradient tinygrad computes."""
  # A name is "mod_tensor" followed by a number.
  by_kernel = {x.tensor for x in kernel_sums(p, arch)}
  numbers = {} if p.score_mod is None else dict.fromkeys(number_of_tensor(u) for u in float_elements(p))
  return {f"mod_tensor{n}": why_not_summed(p, n) or f"no kernel of this unit sums it on {arch.name}" for n in numbers
          if f"mod_tensor{n}" not in by_kernel}

def memory_of(p:Problem, arch:Chip, parts:Parts) -> int:
  """Returns the bytes of memory that the backward kernels need besides inputs and outputs."""
  # This memory holds partial results, sums of dS from which gradients of score_mod's tensors are made, and lse and delta of each query (8 bytes).
  divided = [dq_arguments(p, parts=parts.dq)["dq"]]*bool(parts.dq)
  if parts.dkdv: divided += [dkdv_arguments(p, parts.dkdv)[name] for name in ("dk", "dv")]
  for x, number in zip(kernel_sums(p, arch), parts.sums):
    if number or x.p.by_element is not None: divided.append(dbias_arguments(x.p, number, x.tile)[f"d{x.tensor}"])
  return 8*p.rows + sum(map(nbytes, divided))

def nbytes(tensor:tuple[tuple[int, ...], str]) -> int: return (FLOATS | INTS)[tensor[1]].itemsize*math.prod(tensor[0])

def tiles_of(p:Problem, arch:Chip) -> Tiles:
  """Returns (tile description of the kernel for dq, tile description of the kernel for dk and dv) for a problem that the backward kernels can
  compute."""
  found = can_differentiate(p, arch)
  assert not isinstance(found, str)
  return found

def can_differentiate(p:Problem, arch:Chip|None) -> Tiles|str:
  """Returns (tile description of the kernel for dq, tile description of the kernel for dk and dv), or the reason why attn uses neither kernel."""
  # Raises NotImplementedError if ATTN_KERNEL asks for backward kernels that cannot compute the gradients.
  if (asked := asked_for()).backward == BY_TINYGRAD: return f"ATTN_KERNEL={BY_TINYGRAD} asks for another kernel"
  if isinstance(found := kernel_tiles(p, arch, asked.units), str): check_not_forced(found)
  return found

def check_not_forced(reason:str) -> None:
  """Raises NotImplementedError with the given reason if the environment variable ATTN_KERNEL demands the backward kernels."""
  if (wanted := asked_for().backward) in WAYS: raise NotImplementedError(f"ATTN_KERNEL={wanted}: {reason}")

@cache_of_kernels
def kernel_tiles(p:Problem, arch:Chip|None, units:tuple[str, ...]=UNITS) -> Tiles|str:
  """Returns (tile description of the best kernel for dq, tile description of the best kernel for dk and dv), or the reasons why no backward kernel
  can run."""
  # `units` has the endings of the names of the kernels that may be chosen.
  if arch is None: return NO_UNIT
  if p.of_8_bits: return f"q, k and v are {p.dtype}: attention of 8-bit floats has no gradient"
  p, reasons = replace(p, num_splits=1), []
  # Kernels for a matrix unit come before kernels of plain UOps, which run everywhere.
  for everywhere in (False, True):
    refusals = []
    for suffix, gradient in GRADIENT_KERNELS.items():
      if (gradient.lacks is lacks_nothing) != everywhere or suffix not in units: continue
      if not isinstance(found := gradient.tiles(p, arch), str): return found
      refusals.append(Refusal(gradient.lacks(arch) is None, gradient.general, found))
    if refusals: reasons.append(most_telling(refusals))
  return "; ".join(dict.fromkeys(reasons))

def by_tinygrad(arch:Chip|None, reason:str) -> BackwardChoice:
  """Returns the choice that tinygrad computes the gradients; raises NotImplementedError if ATTN_KERNEL demands the backward kernels."""
  check_not_forced(reason)
  return BackwardChoice((), arch, reason)

def choose_backward(p:Problem, arch:Chip|None, forward:str) -> BackwardChoice:
  """Chooses what computes the gradients of `p`, after the kernel named `forward` computed the output."""
  if forward == "three_pass": return by_tinygrad(arch, "forward is three_pass, which tinygrad differentiates")
  found = can_differentiate(p, arch)
  if isinstance(found, str) or arch is None: return BackwardChoice((), arch, str(found))
  suffix = found[0].suffix
  parts, others, few, one = parts_of_chosen(p, arch), others_of(p, arch, suffix), few_queries(p, arch), at_once(p, arch)
  if isinstance(few, WgmmaFewQueriesTile):
    return BackwardChoice((ChosenKernel(FEW_KERNEL + suffix, few, "keys", parts.dq),), arch, None, memory_of(p, arch, parts), others)
  if few is not None: others = (*others, (f"{FEW_KERNEL}{suffix}", few))
  if isinstance(one, AtOnceTile):
    delta, whole, finish = (name + suffix for name in AT_ONCE_KERNELS)
    chosen = ChosenKernel(delta), ChosenKernel(whole, one, "queries", parts.dkdv), ChosenKernel(finish)
    memory = memory_of(p, arch, replace(parts, dq=0)) + sum(map(nbytes, (dq_sums(p), *dq_turns(p).values())))
    return BackwardChoice(chosen, arch, None, memory, others)
  if one is not None: others = (*others, (f"{AT_ONCE_KERNELS[1]}{suffix}", one))
  (dq, dkdv), (dq_tile, dkdv_tile) = BACKWARD_KERNELS, found
  kernels = ChosenKernel(dq + suffix, dq_tile, "keys", parts.dq), ChosenKernel(dkdv + suffix, dkdv_tile, "queries", parts.dkdv)
  sums = [ChosenKernel(BIAS_KERNEL + x.tile.suffix, x.tile, "", number, x.tensor) for x, number in zip(kernel_sums(p, arch), parts.sums)]
  return BackwardChoice((*kernels, *sums), arch, None, memory_of(p, arch, parts), others, tuple(tensors_by_tinygrad(p, arch).items()))

def others_of(p:Problem, arch:Chip, chosen:str) -> tuple[tuple[str, str], ...]:
  """Returns (names of kernels, reason why not chosen) for each matrix unit that attn would prefer to the unit `chosen`."""
  asked, p, found = asked_for(), replace(p, num_splits=1), []
  for suffix, gradient in itertools.takewhile(lambda x: x[0] != chosen, GRADIENT_KERNELS.items()):
    if not isinstance(reason := gradient.tiles(p, arch), str): reason = f"ATTN_KERNEL={asked.backward} asks for another kernel"
    found.append((", ".join(name + suffix for name in BACKWARD_KERNELS), reason))
  return tuple(found)
