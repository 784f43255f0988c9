"""Choice of the backward kernels' tile descriptions for a problem on a chip: the first row that fits, of a table of tile shapes of the chip's
family."""
from __future__ import annotations
from dataclasses import dataclass, replace
from attn.cache import tuned
from attn.chips import Chip
from attn.chips.matrix import MMA
from attn.chips.nvidia import (AT_ONCE_WGMMA, DBIAS_MMA, DKDV_MMA, DKDV_WGMMA, DQ_MMA, DQ_WGMMA, FEW_QUERIES_WGMMA, LONG_AT_ONCE_WGMMA,
                               HALVES_WGMMA)
from attn.chips.shapes import BOTH, BackwardShape, Burden, MmaBackwardShape, UpTo, WgmmaBackwardShape, cautious_backward
from attn.choose.refusals import wgmma_refuses
from attn.choose.rows import PLAIN_LLVM, burden, fitting, plain_rows, rows_for
from attn.functions.spans import classes_of
from attn.kernels.parts.grid.workgroup import HEADS_IN_ORDER
from attn.kernels.parts.program.counts import ceildiv
from attn.kernels.tiles.amd import BackwardTile, at_once_tile
from attn.kernels.tiles.mma import MmaBackwardTile
from attn.kernels.tiles.plain import TiledBackwardTile
from attn.kernels.tiles.wgmma import WgmmaHalvesTile, WgmmaBackwardTile, WgmmaFewQueriesTile
from attn.ops import hopper as wgmma
from attn.problem import Problem
from attn.score.masks import hiding, scattered
from attn.score.sums import has_sum, sum_over_scores
from attn.score.terms import varies

# The shapes in AMD's tables were chosen by the number of registers that clang 22 needs, and on CDNA3 and CDNA4 also by the predicted time of a
# problem (`python -m attn.tune --near`). The shapes for mma.sync were chosen by the number of registers that nvcc 13 needs. The speed of these shapes
# was not measured.

AnyBackwardTile = BackwardTile|MmaBackwardTile|WgmmaBackwardTile|TiledBackwardTile
AtOnceTile = BackwardTile|WgmmaBackwardTile      # of a kernel that computes dq, dk and dv at once

MOST_OF_BOTH = 128     # largest head dimension with which a warpgroup on wgmma has registers for dK and dV of 64 keys

# ***** tiles of the kernel of dq, which owns queries, and with `keys` of the kernel of dk and dv, which owns keys *****

def amd_backward_tile(p:Problem, arch:Chip, keys:bool) -> BackwardTile:
  if keys: return _chosen("backward_dkdv", p, arch, arch.unit.dkdv, True, arch.unit.plain_dkdv)
  return _chosen("backward_dq", p, arch, arch.unit.dq, False, arch.unit.plain_dq)

def amd_bias_tile(p:Problem, arch:Chip) -> BackwardTile:
  """Chooses the tile description of AMD's kernel for dbias."""
  # Without a table of its own, the kernel uses the table of the kernel for dq.
  return _chosen("backward_dq", p, arch, arch.unit.dbias or arch.unit.dq, False)

def mma_backward_tile(p:Problem, arch:Chip, keys:bool) -> MmaBackwardTile:
  if keys: return _chosen_mma("backward_dkdv_mma", p, arch, DKDV_MMA, p.Sk, True)
  return _chosen_mma("backward_dq_mma", p, arch, DQ_MMA, p.Sq, False)

def mma_bias_tile(p:Problem, arch:Chip) -> MmaBackwardTile: return _chosen_mma("backward_dbias_mma", p, arch, DBIAS_MMA, p.Sq, False)

def wgmma_backward_tile(p:Problem, arch:Chip, keys:bool) -> WgmmaBackwardTile:
  """Returns the tile description of the wgmma kernel of dk and dv if `keys` is true, otherwise of the kernel of dq."""
  if keys and (shape := in_halves(p)) is not None: return WgmmaHalvesTile(**vars(shape), matrix=MMA[p.dtype])
  queries, rows = (p.Sq*(p.H//p.Hkv), p.Sk) if keys else (p.Sq, p.Sq)
  table = DKDV_WGMMA if keys else DQ_WGMMA
  # The first row for the problem's head dimensions is taken. There is such a row for every problem that the wgmma kernels can compute.
  found = next(row for row in table if max(p.D, p.Dv) <= row.up_to and (row.varied or not varies(p)) and
               (row.few_queries is None or queries <= row.few_queries)).shape
  return WgmmaBackwardTile(**vars(replace(found, groups=min(found.groups, ceildiv(rows, wgmma.M)))), matrix=MMA[p.dtype], keys=keys)

def in_halves(p:Problem) -> WgmmaBackwardShape|None:
  """Returns the tile shape of the kernel in which two warpgroups share P to compute dk and dv, or None if another kernel computes `p`."""
  # The second warpgroup has no S, so it cannot compute a derivative that depends on S, and it does not know what dropout drops.
  if p.D <= MOST_OF_BOTH or p.Dv != p.D or varies(p) or p.dropout_p or p.wide_scores: return None
  return next(row.shape for row in HALVES_WGMMA if row.up_to >= p.D)

def wgmma_backward_refuses(p:Problem, arch:Chip) -> str|None:
  """Returns the reason why the wgmma kernels do not compute the gradients of `p`, or None if they do."""
  if (reason := wgmma_refuses(p, arch)) is not None: return reason
  if p.out_dtype != p.dtype: return f"out_dtype {p.out_dtype}: the dtype of dO must be that of q, k and v, {p.dtype}"
  rows = wgmma.M
  return f"Sq={p.Sq}, Sk={p.Sk}: a warpgroup has {rows} rows; mma.sync, with smaller tiles, is faster" if min(p.Sq, p.Sk) < rows else None

FULL_WINDOW, CAUSAL_WINDOW, NO_WINDOW = (-1, -1), (-1, 0), (-2, -2)      # windows; the last stands for those of which no table has a row
# One kernel for all gradients has enough registers on wgmma with any window and these options, also together: it spills none, and ptxas makes no
# product wait for the one before it.
WGMMA_AT_ONCE = ("sinks", "kv_lengths", "varlen")
# With each of the next options it has enough registers for these windows (None: any window), if no option beside sinks is added and rows fill whole
# blocks. With D up to 64 it has enough for any window and any rows.
ROOMY = 64     # largest head dimension with which it has registers to spare
WGMMA_ALONE_AT_ONCE: dict[str, tuple[tuple[int, int], ...]|None] = {
  "alibi": (FULL_WINDOW, CAUSAL_WINDOW), "dropout_p": (FULL_WINDOW, CAUSAL_WINDOW), "softcap": (FULL_WINDOW, CAUSAL_WINDOW), "mask_mod": None}
USED_AT_ONCE = ("sinks", "kv_lengths", "alibi")     # options that hardly change the time of a kernel for all gradients
REGISTERS_AT_ONCE = 512     # of a wave on AMD: it keeps dK, dV and its parts of K and V

@dataclass(frozen=True)
class FasterInOrder:
  """Condition under which one kernel that adds to dq in a fixed order was measured to be faster than two: this window, and enough keys and blocks of
  keys."""
  window: tuple[int, int]
  keys: int = 2048       # least number of keys, and of queries
  blocks: int = 2048     # least number of blocks of keys, in all batches and heads

@dataclass(frozen=True)
class FasterAtOnce:
  """Problems for which one kernel for all gradients was measured to be faster than two: a row of the table FASTER_ON_WGMMA."""
  # The row's key in the table is (head dimension, option): its problems have this head dimension, and no option besides this one ("": none) and those
  # in USED_AT_ONCE. One kernel is faster with the values `windows` of `Problem.window` if workgroups add to dq in any order, and for the problems
  # `in_order` if they add in a fixed order (deterministic=True). With any other window and in any order, it is faster if a query sees `window_keys`
  # keys on average; None: with no other window.
  windows: tuple[tuple[int, int], ...] = ()
  in_order: tuple[FasterInOrder, ...] = ()
  window_keys: int|None = None
  shape: WgmmaBackwardShape = AT_ONCE_WGMMA  # tile shape with which one kernel is faster

# By head dimension and option ("": no option). Times on an H100: docs/data/nvidia_backward_ways.csv and nvidia_backward_options.csv. In a fixed order
# without options, two kernels take 1.04 to 1.10 times as long from 2048 blocks and 2048 keys on, and 0.98 times as long with 1024 keys or with 512
# blocks. With causal=True at D = 128 on an H200 they take 0.96 times as long with 2048 keys, 1.06 with 4096 and 1.01 with 8192 (docs/nvidia.md).
FASTER_ON_WGMMA = {
  (128, ""): FasterAtOnce((FULL_WINDOW, CAUSAL_WINDOW), (FasterInOrder(FULL_WINDOW), FasterInOrder(CAUSAL_WINDOW, 4096)), window_keys=3500),
  (128, "dropout_p"): FasterAtOnce((FULL_WINDOW, CAUSAL_WINDOW), (FasterInOrder(FULL_WINDOW), FasterInOrder(CAUSAL_WINDOW))),
  (128, "softcap"): FasterAtOnce((FULL_WINDOW, CAUSAL_WINDOW), (FasterInOrder(FULL_WINDOW),)),
  (128, "varlen"): FasterAtOnce((FULL_WINDOW, CAUSAL_WINDOW)),
  (128, "mask_mod"): FasterAtOnce((FULL_WINDOW,), (FasterInOrder(FULL_WINDOW),)),
  (64, ""): FasterAtOnce((FULL_WINDOW, CAUSAL_WINDOW), (FasterInOrder(FULL_WINDOW, 4096, 4096),), shape=LONG_AT_ONCE_WGMMA),
  (64, "varlen"): FasterAtOnce((CAUSAL_WINDOW,), shape=LONG_AT_ONCE_WGMMA),
  (64, "dropout_p"): FasterAtOnce((FULL_WINDOW, CAUSAL_WINDOW), (FasterInOrder(FULL_WINDOW, 2048, 1024), FasterInOrder(CAUSAL_WINDOW, 2048, 1024)),
                                  shape=LONG_AT_ONCE_WGMMA),
  (64, "softcap"): FasterAtOnce((FULL_WINDOW, CAUSAL_WINDOW))}
# The kernel for few queries: its head dimensions, the least number of keys that a query sees on average, and its options, with which it has enough
# registers. On an H200 it takes 0.44 to 0.77 times as long as two kernels (docs/nvidia.md).
FEW_QUERIES_D, FEW_QUERIES_KEYS = (64, 128), 1024
FEW_QUERIES_OPTIONS = ("sinks", "kv_lengths", "alibi", "dropout_p")
IN_ORDER_MFMA = FasterAtOnce()     # no prediction for MFMA includes what a turn costs
LEAST_QUERIES = 1024     # of all heads that share keys: no smaller number was tried for MFMA
# Least number of keys that a query sees on average. One kernel on wgmma saves time for each score, but spends time for each query to clear and to
# read the sums of dq. On an H100 it is 1.07 times as fast with 1024 keys; by docs/data/nvidia_backward_ways.csv the times are equal at about 670.
LEAST_KEYS = 768

def wgmma_at_once(p:Problem, arch:Chip) -> WgmmaBackwardTile|str:
  """Returns the tile description of the wgmma kernel that computes dq, dk and dv at once, or the reason why two kernels are used."""
  if p.D not in (widths := sorted({D for D, _ in FASTER_ON_WGMMA})) or p.Dv > p.D:
    return f"D={p.D}, Dv={p.Dv}: it has enough registers only with D {' and '.join(map(str, widths))}, and Dv no larger"
  faster = faster_at_once(p)
  tile = WgmmaBackwardTile(**vars(faster.shape), matrix=MMA[p.dtype], keys=True, adds_dq=True)
  if has_sum(p): return f"{sum_over_scores(p).name}: a kernel of its own computes its gradient, beside two kernels"
  if (reason := short_of_registers(p, tile)) is not None: return reason
  if (reason := not_faster_at_once(p, tile, faster)) is not None: return reason
  if (keys := keys_of_query(p)) < LEAST_KEYS: return f"a query sees {keys} keys on average: faster only from {LEAST_KEYS} on"
  # Without a mask it was measured to be faster also with 64 queries, and with 32 blocks of keys that 32 heads share: then several workgroups share a
  # block of keys.
  parts = p.H//p.Hkv if p.window == FULL_WINDOW else 1
  return not_in_order(p, tile, faster) or too_few_blocks(p, arch, tile, parts) or not_in_lds(p, arch, tile) or tile

def wgmma_few_queries(p:Problem, arch:Chip) -> WgmmaFewQueriesTile|str:
  """Returns the tile description of the wgmma kernel for all gradients of few queries, or the reason why other kernels are used."""
  tile = WgmmaFewQueriesTile(**vars(FEW_QUERIES_WGMMA), matrix=MMA[p.dtype])
  if p.Sq > tile.block_n: return f"Sq={p.Sq}: a workgroup holds all queries of a head, at most {tile.block_n}"
  if p.D not in FEW_QUERIES_D or p.Dv != p.D:
    return f"D={p.D}, Dv={p.Dv}: it was measured only with D {' and '.join(map(str, FEW_QUERIES_D))}, and Dv as large"
  if p.Hkv != p.H: return f"{p.H} heads, {p.Hkv} key/value heads: it cannot add the dk and dv of several heads"
  if (options := [x for x in p.options if x not in FEW_QUERIES_OPTIONS]): return f"{options[0]}: other kernels compute the gradients with this option"
  if p.window not in (FULL_WINDOW, CAUSAL_WINDOW): return f"window={p.window}: it loops over all keys"
  if (keys := keys_of_query(p)) < FEW_QUERIES_KEYS: return f"a query sees {keys} keys on average: measured only from {FEW_QUERIES_KEYS} on"
  return tile

def short_of_registers(p:Problem, tile:WgmmaBackwardTile) -> str|None:
  """Returns the reason why the wgmma kernel for all gradients has too few registers for a problem, or None if it has enough."""
  crowding = [x for x in p.options if x not in WGMMA_AT_ONCE]
  if not crowding: return None
  option, why, windows = crowding[0], "it would have too few registers", WGMMA_ALONE_AT_ONCE.get(crowding[0], ())
  if windows == (): return f"{option}: {why}"
  if (others := [x for x in p.options if x not in (option, "sinks")]): return f"{option} with {others[0]}: {why}"
  if p.D <= ROOMY: return None
  if windows is not None and p.window not in windows: return f"{option} with window={p.window}: {why}"
  if p.Sk % tile.block_m or p.Sq % tile.block_n: return f"{option}: {why} if Sq or Sk is no multiple of {tile.block_n} or {tile.block_m}"
  return None

def slowing_options(p:Problem) -> list[str]:
  """Returns the names of the options of `p` with which a kernel for all gradients was not measured, or is slower."""
  return [x for x in p.options if x not in USED_AT_ONCE]

def faster_at_once(p:Problem) -> FasterAtOnce:
  """Returns the row of FASTER_ON_WGMMA for D and the options of `p`; if the table has none, a row that says "never faster"."""
  return FASTER_ON_WGMMA.get((p.D, " with ".join(slowing_options(p))), FasterAtOnce())

def not_faster_at_once(p:Problem, tile:WgmmaBackwardTile, faster:FasterAtOnce) -> str|None:
  """Returns why one kernel for all gradients of `p` is not known to be faster than two kernels; None if it was measured to be faster."""
  options, hidden, not_faster = slowing_options(p), hiding(p), "right, but was not measured to be faster than two kernels"
  if not faster.windows: return f"{' with '.join((*options, f'D={p.D}'))}: {not_faster}"
  window, mask = p.window, " with ".join((f"window={p.window}", *options))
  # A mask_mod that hides the last keys of a query counts as a causal mask. One that hides the first keys counts as a window that no row contains.
  if p.mask_bounds is not None and any(hidden):
    window, mask = NO_WINDOW if hidden.before else CAUSAL_WINDOW, f"a mask_mod that hides the {'first' if hidden.before else 'last'} keys of a query"
  enough = faster.window_keys is not None and p.mask_bounds is None and keys_of_query(p) >= faster.window_keys
  if window not in faster.windows and not enough: return f"{mask}: {not_faster}"
  if options and p.Sk % tile.block_m: return f"Sk={p.Sk}, no multiple of {tile.block_m}, with {options[0]}: {not_faster}"
  return None

def keys_of_query(p:Problem) -> int:
  """Returns how many keys a query sees on average."""
  # Only the window (p.window) is considered, and all sequences count as long as the longest one.
  return p.flops//(2*p.B*p.H*(p.D + p.Dv)*p.Sq)

def amd_at_once(p:Problem, arch:Chip) -> BackwardTile|str:
  """Returns the tile description of the MFMA kernel that computes dq, dk and dv at once, or the reason why two kernels are used."""
  if arch.vgprs < REGISTERS_AT_ONCE: return f"a wave of {arch.name} has {arch.vgprs} registers: too few for it"
  if not (shapes := arch.unit.at_once): return f"{arch.name}: it is not predicted to be much faster there"
  if (rows := shapes.get(p.D)) is None or p.Dv != p.D:
    return f"D={p.D}, Dv={p.Dv}: predicted to be much faster only with D {', '.join(map(str, shapes))}, and Dv as large"
  if not (usable := [x.shape for x in rows if set(p.options) <= set(x.options)]):
    options = [x for x in p.options if x not in rows[-1].options]
    return f"{' with '.join(options or p.options)}: it spills registers with D={p.D}, or is not predicted to be faster"
  if p.dropout_p and p.alibi is not None: return "dropout_p with alibi_slopes: scalar registers would spill in its loops"
  if arch.llvm < PLAIN_LLVM: return f"clang {arch.llvm}: predicted to be faster only with clang {PLAIN_LLVM}"
  tile = at_once_tile(p, arch, usable[0])
  if (queries := p.Sq*(p.H//p.Hkv)) < LEAST_QUERIES: return f"{queries} queries share keys: faster only from {LEAST_QUERIES} on"
  if p.deterministic and not IN_ORDER_MFMA.in_order:
    return f"deterministic=True: no prediction for {arch.name} includes the time in which workgroups wait for turns to add to dq in a fixed order"
  return not_in_order(p, tile, IN_ORDER_MFMA) or too_few_blocks(p, arch, tile) or not_in_lds(p, arch, tile) or tile

def not_in_order(p:Problem, tile:AtOnceTile, faster:FasterAtOnce) -> str|None:
  """Returns why attn does not use one kernel for all gradients of `p` with deterministic=True, or None if attn may use it."""
  # One kernel would have to add to dq in a fixed order (attn/kernels/parts/backward/turns.py), which is faster only for the problems of `faster`.
  if not p.deterministic: return None
  order = "deterministic=True: adding to dq in a fixed order"
  classes = p.mask_mod is not None and not any(hiding(p)) and classes_of(p.mask_mod.value) is not None
  found = next((x for x in faster.in_order if x.window == p.window), None)
  if found is None or (p.mask_bounds is not None and not classes) or p.Hkv != p.H:
    return f"{order} was not measured to be faster with this mask, these options and these heads"
  if classes and (heads := p.B*p.H) < HEADS_IN_ORDER:
    return f"{order} is faster with this mask from {HEADS_IN_ORDER} heads in all batches on, here {heads}"
  if p.Sk % tile.block_m: return f"{order} was not measured with Sk={p.Sk}, no multiple of {tile.block_m}"
  if p.Sq < found.keys: return f"{order} is faster from {found.keys} queries on, here {p.Sq}"
  if (blocks := blocks_of_keys(p, tile)) < found.blocks or p.Sk < found.keys:
    return f"{order} is faster from {found.keys} keys and {found.blocks} blocks of keys on, here {p.Sk} and {blocks}"
  return None

def blocks_of_keys(p:Problem, tile:AtOnceTile) -> int: return p.B*p.Hkv*ceildiv(p.Sk, tile.block_m)

def too_few_blocks(p:Problem, arch:Chip, tile:AtOnceTile, parts:int=1) -> str|None:
  """Returns why one kernel for all gradients has too few workgroups to keep all compute units busy, or None if it has enough."""
  # Up to `parts` workgroups may share a block of keys.
  if (blocks := blocks_of_keys(p, tile))*parts >= arch.cus: return None
  return f"{blocks} blocks of {tile.block_m} keys: fewer than the {arch.cus} compute units of {arch.name}"

def not_in_lds(p:Problem, arch:Chip, tile:AtOnceTile) -> str|None:
  """Returns a message if this tile description needs more LDS than a workgroup of the chip has, otherwise None."""
  need = tile.lds_bytes(p)
  return f"{need} bytes of LDS: a workgroup of {arch.name} has {arch.lds}" if need > arch.lds else None

def _chosen_mma(kernel:str, p:Problem, arch:Chip, table:tuple[UpTo[MmaBackwardShape], ...], rows:int, keys:bool) -> MmaBackwardTile:
  mat = MMA[p.dtype]
  def tile(row:UpTo[MmaBackwardShape]) -> MmaBackwardTile:
    row_tiles = min(row.shape.row_tiles, ceildiv(rows, mat.M))
    waves = min(row.shape.waves, ceildiv(rows, row_tiles*mat.M))
    return MmaBackwardTile(**vars(replace(row.shape, row_tiles=row_tiles, waves=waves)), matrix=mat, keys=keys)
  load = Burden.BIAS if p.dropout_p else burden(replace(p, return_lse=False))      # dropout takes as many registers as a bias; no lse is written
  return next(fitting(kernel, p, arch, table, tile, load))

def backward_tile(p:Problem, arch:Chip, row:UpTo[BackwardShape], keys:bool) -> BackwardTile:
  """Makes a backward kernel's tile description for the problem `p` from `row`, a row of the table of tile shapes."""
  mat, c = arch.matrix[p.dtype][row.matrix], row.shape
  # A workgroup has no more waves than its own rows need: keys with `keys`, otherwise queries.
  waves = max(1, min(c.waves, ceildiv(p.Sk if keys else p.Sq, mat.N)))
  # dropout, what lse lost to rounding, or a mask that is computed for every score, takes the registers of a prefetched tile
  crowded = p.dropout_p or (keys and (p.wide_scores or scattered(p)))
  prefetch = 0 if crowded and c.own_in_lds == BOTH else c.prefetch
  return BackwardTile(**vars(replace(c, waves=waves, prefetch=prefetch)), matrix=mat, keys=keys)

def _chosen(kernel:str, p:Problem, arch:Chip, table:tuple[UpTo[BackwardShape], ...], keys:bool,
            plain:tuple[UpTo[BackwardShape], ...]=()) -> BackwardTile:
  def tile(row:UpTo[BackwardShape]) -> BackwardTile: return backward_tile(p, arch, row, keys)
  kept = tuned.kept_rows(p, arch, kernel, BackwardShape, tuned.check_matrix)
  rows = (*kept, *plain_rows(p, arch, plain, tile), *(rows_for(table, arch.llvm) or cautious_backward(arch.matrix[p.dtype][0], keys)))
  return next(fitting(kernel, p, arch, rows, tile))
