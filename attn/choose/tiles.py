"""Choice of a forward kernel's tile description for a problem on a chip."""
from __future__ import annotations
import functools, itertools, math
from dataclasses import dataclass, replace
from enum import Flag, auto
from attn.cache import tuned
from attn.chips import Chip
from attn.chips.matrix import MMA, MMA_OF_8_BITS, Matrix, row_registers
from attn.chips.nvidia import (FEW_QUERIES, FEW_QUERIES_OF_BYTES, FEW_QUERIES_OF_STORED, FORWARD_MMA, FORWARD_OF_BYTES,
                               FEW_QUERIES_WGMMA_STORED, FORWARD_WGMMA, FORWARD_WGMMA_OF_BYTES, FORWARD_WGMMA_STORED, FORWARD_WGMMA_WIDENED)
from attn.chips.shapes import ForwardShape, MmaShape, RatedUpTo, UpTo, WgmmaShape, cautious
from attn.choose.rows import burden, fitting, in_units, misfit, plain_rows, rows_for
from attn.functions.symbols import elements_of
from attn.kernels import dual_wave, staggered
from attn.kernels.parts.program.counts import ceildiv, round_up
from attn.kernels.tiles.amd import Tile
from attn.kernels.tiles.mma import MmaTile
from attn.kernels.tiles.wgmma import WgmmaTile
from attn.ops import hopper as wgmma
from attn.problem import WIDENED, Problem
from attn.score.masks import hiding, scattered
from attn.score.terms import crowded, score_terms

# ***** AMD *****

# head dimensions
SHORT = 64     # up to this head dimension a wave has registers to spare
LONG = 128     # beyond this head dimension O takes a good part of the registers of RDNA
WIDE = 192     # beyond this head dimension O takes most of the registers of a wave that shares its SIMD

class Economy(Flag):
  """Ways to save registers in the loop of a forward kernel, such as no prefetch; values may be combined."""
  NONE = 0
  FENCED = auto()         # the work on one tile is done before the next one is read from LDS
  NO_PREFETCH = auto()    # no tile is being loaded during the work on another tile
  SPARING = auto()        # K and V are loaded one after the other
  NEW_ADDRESSES = auto()  # each iteration computes the addresses of pieces of rows, instead of keeping them in registers
  FOUR_WAVES = auto()     # workgroups of four waves: one on each SIMD, with all its registers
  SHORT_TRIPS = auto()    # iterations of half as many keys, and so of half as many scores

CROWDED = Economy.FENCED | Economy.NO_PREFETCH
IN_PIECES = Economy.SPARING | Economy.NEW_ADDRESSES

# burdens: what takes registers besides matrix tiles and accumulators
FEW_ROWS = "few queries"       # each wave loads more of K and V
WINDOW = "window"              # a loop with masks on both sides
PIECES = "pieces"              # rows that are not made of whole units: each piece has an address of its own
LSE = "lse"                    # a second sum of P
ANY_OPTION = "options"         # any option
EVERY_SCORE = "every score"    # an option that computes something for every score
OWN_MASK = "own mask"          # a mask_mod that is computed for every score
DROPOUT = "dropout"            # bits of a random number for every score
STORED_ROWS = "stored rows"         # the scales of a tile's keys, and another sum of P
OPERANDS_TWICE = "repeated operands"    # one wave loads all stored rows, on a chip whose lanes 16-31 hold the operands of lanes 0-15 once more
TWO_ON_A_SIMD = "two on a SIMD"  # two waves on a SIMD, each with half of the registers

@dataclass(frozen=True)
class Shortage:
  """Condition under which a forward kernel saves registers: the problem has all properties in `burdens`, and D or Dv is above `beyond`. `means` says
  how."""
  beyond: int
  burdens: tuple[str, ...]  # properties that need registers, such as "window"
  means: Economy  # ways in which the loop saves registers

ANYWHERE = (Shortage(0, (FEW_ROWS,), Economy.FENCED),)
# a wave that is alone on its SIMD may have all of its registers
WHERE_A_WAVE_HAS_ALL = (
  *ANYWHERE,
  Shortage(WIDE, (WINDOW,), CROWDED),
  *(Shortage(WIDE, (x,), Economy.FOUR_WAVES) for x in (WINDOW, PIECES, EVERY_SCORE, OWN_MASK)),
  *(Shortage(LONG, x, Economy.FOUR_WAVES) for x in itertools.combinations((WINDOW, PIECES, EVERY_SCORE), 2)),
  Shortage(WIDE, (PIECES, FEW_ROWS), Economy.NO_PREFETCH | IN_PIECES),
  Shortage(0, (PIECES, TWO_ON_A_SIMD), Economy.NO_PREFETCH),
  Shortage(0, (PIECES, EVERY_SCORE, TWO_ON_A_SIMD), Economy.SHORT_TRIPS),
  Shortage(0, (DROPOUT, TWO_ON_A_SIMD), Economy.FOUR_WAVES | Economy.SHORT_TRIPS),
  Shortage(0, (STORED_ROWS,), Economy.SHORT_TRIPS),
  Shortage(SHORT, (STORED_ROWS, TWO_ON_A_SIMD), Economy.FOUR_WAVES))
# no wave has more than a part of a SIMD's registers
WHERE_A_WAVE_HAS_A_PART = (
  *ANYWHERE,
  *(Shortage(WIDE, (x,), CROWDED) for x in (WINDOW, FEW_ROWS, LSE, OWN_MASK)),
  *(Shortage(0, (PIECES, x), Economy.NO_PREFETCH) for x in (FEW_ROWS, LSE, ANY_OPTION)),
  Shortage(SHORT, (PIECES,), Economy.SHORT_TRIPS),
  Shortage(LONG, (PIECES,), Economy.NO_PREFETCH),
  Shortage(WIDE, (PIECES,), IN_PIECES),
  Shortage(LONG, (PIECES, DROPOUT), Economy.SPARING),
  Shortage(SHORT, (STORED_ROWS,), Economy.SHORT_TRIPS),
  Shortage(SHORT, (OPERANDS_TWICE,), Economy.NO_PREFETCH | Economy.SPARING))

def burdens_of(p:Problem, mat:Matrix, waves:int, few_queries:bool) -> set[str]:
  found = {FEW_ROWS: few_queries, WINDOW: bool(hiding(p).before), PIECES: not in_units(p, mat.unit), LSE: p.writes_lse, ANY_OPTION: bool(p.options),
           EVERY_SCORE: bool(score_terms(p)) or p.dropout_p > 0, OWN_MASK: bool(scattered(p)), DROPOUT: bool(p.dropout_p),
           STORED_ROWS: bool(p.stored), OPERANDS_TWICE: bool(p.stored) and waves == 1 and mat.duplicated,
           TWO_ON_A_SIMD: waves > 4}
  return {name for name, there in found.items() if there}

def economy_of(p:Problem, arch:Chip, mat:Matrix, waves:int, few_queries:bool) -> Economy:
  """Returns in which ways the kernel's loop must save registers, so that all its values fit into the chip's registers."""
  # With `few_queries` a workgroup has fewer waves than its table row says, because the problem has few queries. Each wave then loads more of K and V.
  table = WHERE_A_WAVE_HAS_ALL if arch.vgprs == arch.registers else WHERE_A_WAVE_HAS_A_PART
  burdens, longest = burdens_of(p, mat, waves, few_queries), max(p.D, p.Dv)
  return functools.reduce(Economy.__or__, (x.means for x in table if longest > x.beyond and burdens.issuperset(x.burdens)), Economy.NONE)

def amd_tile(p:Problem, arch:Chip, row:UpTo[ForwardShape]) -> Tile:
  """Makes the tile description of AMD's forward kernel for a problem from `row`, a row of a tile table."""
  # The sizes are smaller than those of the row if the problem has few queries or keys, or score terms (bias, softcap, ...) that need registers.
  mat, c = arch.matrix[p.dtype][row.matrix], row.shape
  least = mat.least_keys
  pack = p.Hkv < p.H and p.Sq < mat.N                     # the queries of one head don't fill a matrix tile: it takes those of all heads of a group
  rows = p.Sq*(p.H//p.Hkv if pack else 1)
  alone = bool(p.stored) and rows <= mat.N     # few queries over stored rows: one wave, with the least padding, is predicted to be fastest
  if alone: mat = min((x for x in arch.matrix[p.dtype] if rows <= x.N), key=lambda x: x.N)
  q_tiles = c.q_tiles if rows > mat.N and not crowded(p) else 1
  needed = waves = ceildiv(rows, mat.N*q_tiles)
  block_n = max(least, min(c.block_n, 32) if crowded(p) else c.block_n)
  if waves == 1: block_n = max(least, min(block_n, 32))                # small workgroups: a compute unit needs LDS for several of them
  if p.Sk < 2*block_n and round_up(p.Sk, least) < round_up(p.Sk, block_n): block_n = least     # few keys: smaller tiles have less padding
  staged = ceildiv(block_n*(p.D + p.Dv)*mat.size, 4*mat.wave)          # registers of a lane to load K and V in one wave
  of_q = 0 if c.q_in_lds else row_registers(mat, p.D)
  full = q_tiles*(round_up(p.Dv, mat.M)//mat.groups + of_q) > arch.vgprs//2            # O and Q fill half
  if not alone: waves = min(c.waves, max(waves, ceildiv(staged, arch.vgprs//(16 if full else 8))))   # waves without queries only help to load
  few = needed < c.waves
  means = economy_of(p, arch, mat, waves, few and not alone)
  if Economy.SHORT_TRIPS in means: block_n = max(least, block_n//2)
  # few queries wait for memory anyway: so rescale_above=0, which makes the largest weight of each row exactly 1 as in the textbook, costs no time
  shape = replace(c, waves=min(waves, 4) if Economy.FOUR_WAVES in means else waves, q_tiles=q_tiles, block_n=block_n,
                  fenced=(c.fenced and not alone) or Economy.FENCED in means, prefetch=0 if Economy.NO_PREFETCH in means else c.prefetch)
  return Tile(**vars(shape), matrix=mat, pack_gqa=pack, sparing=Economy.SPARING in means, rescale_above=0.0 if few and not p.stored else 8.0,
              new_addresses=Economy.NEW_ADDRESSES in means)

def choose_amd_tile(p:Problem, arch:Chip) -> Tile:
  """Chooses the tile description of AMD's forward kernel."""
  def tile(row:UpTo[ForwardShape]) -> Tile: return amd_tile(p, arch, row)
  plain, table = ((), arch.unit.forward_of_bytes) if p.of_8_bits else (arch.unit.plain_forward, arch.unit.forward)
  # A tile found by a search (TUNE=1) comes first; the first row that fits is taken.
  rows = (*tuned.winner(p, arch), *plain_rows(p, arch, plain, tile), *(rows_for(table, arch.llvm) or cautious(arch.matrix[p.dtype][0])))
  return next(fitting("the forward kernel", p, arch, rows, tile))

def dual_wave_tile(p:Problem, arch:Chip) -> Tile: return Tile(dual_wave.WAVES, 1, dual_wave.BLOCK_N, matrix=arch.matrix[p.dtype][0])

def staggered_tile(p:Problem, arch:Chip) -> Tile:
  return Tile(staggered.TURN_WAVES, 1, staggered.TURN_KEYS, prefetch=staggered.BUFFERS, matrix=arch.matrix[p.dtype][0])

# ***** NVIDIA *****

WARPS = 4     # warps of a block of forward_mma: two or three blocks share a multiprocessor, and one computes while another waits

BLOCK_LDS = 1024  # bytes of shared memory that CUDA takes for itself in each block (CUDA C++ Programming Guide, compute capability 8.0 and later)

def blocks_in_lds(p:Problem, arch:Chip, tile:MmaTile|WgmmaTile) -> int:
  """Returns how many workgroups with this tile description fit into the shared memory of a multiprocessor at the same time."""
  return (arch.lds + BLOCK_LDS)//(tile.lds_bytes(p) + BLOCK_LDS)

def mma_tile(p:Problem, arch:Chip) -> MmaTile:
  """Chooses the tile description of `forward_mma`, NVIDIA's forward kernel with mma.sync."""
  mat = (MMA | MMA_OF_8_BITS)[p.dtype]
  group = p.H//p.Hkv if p.Sq < mat.M else 1     # the queries of one head don't fill a matrix tile: it takes those of all heads of a group
  rows = p.Sq*group
  needed = ceildiv(rows, mat.M)
  of_few, of_all = (FEW_QUERIES_OF_BYTES, FORWARD_OF_BYTES) if p.of_8_bits else (FEW_QUERIES_OF_STORED if p.stored else FEW_QUERIES, FORWARD_MMA)
  # With at most 32 query rows, several warps get the same queries and divide the keys.
  for few in of_few if needed <= WARPS//2 else ():
    tile = MmaTile(**vars(few.shape), matrix=mat, waves=WARPS, pack_gqa=group > 1, key_waves=WARPS//needed)
    if misfit(p, arch, few, tile) is None: return tile
  def of_all_keys(row:UpTo[MmaShape]) -> MmaTile:
    q_tiles = row.shape.q_tiles if rows > mat.M else 1
    return MmaTile(**vars(replace(row.shape, q_tiles=q_tiles)), matrix=mat, waves=min(WARPS, ceildiv(rows, q_tiles*mat.M)), pack_gqa=group > 1)
  # The first row that leaves room for a second block on the multiprocessor is best. A block gets no more warps and matrix tiles than its queries
  # need.
  found = list(fitting("forward_mma", p, arch, of_all, of_all_keys, burden(p)))
  return next((tile for tile in found if blocks_in_lds(p, arch, tile) > 1), found[0])

CROWDED_KEYS = 64    # most keys of a tile if a term takes as many registers as the scores
OF_DROPOUT = 16   # keys by which a tile is smaller if three warpgroups share the registers with the bits of dropout

# head dimension of rows of the table -> most warpgroups if mask_mod reads tensors. A smaller block of queries meets fewer documents at once, and more
# of its tiles need no mask. 16 documents in 16384 rows, D = 128, took 0.80 of the time of 3 warpgroups if they were equally long, 0.97 if not.
OF_DOCUMENTS = {LONG: 2}

BY_ITSELF = 0.7   # least time of a block that is alone on a multiprocessor, as a share of the time of all blocks that fit there together
LAST = 0.8       # time of the longest block beside blocks that end before it, as a share of its time beside blocks that do not

def stored_wgmma_tile(p:Problem, row:UpTo[WgmmaShape]) -> WgmmaTile:
  """Makes the tile description of the wgmma forward kernel for K and V stored in 8 bits from `row`, a row of a tile table."""
  # A tile has at most as many keys as the problem, rounded up to whole matrix instructions.
  return WgmmaTile(**vars(replace(row.shape, block_n=min(row.shape.block_n, round_up(p.Sk, MMA[p.dtype].K)))))

def wgmma_tile(p:Problem, arch:Chip) -> WgmmaTile:
  """Chooses the tile description of the wgmma forward kernel with the least estimated time."""
  if p.stored:
    rows = FORWARD_WGMMA_WIDENED if p.stored == WIDENED else FEW_QUERIES_WGMMA_STORED if p.Sq <= wgmma.M else FORWARD_WGMMA_STORED
    return next(fitting("forward_wgmma", p, arch, rows, lambda row: stored_wgmma_tile(p, row)))
  table, mat = FORWARD_WGMMA_OF_BYTES if p.of_8_bits else FORWARD_WGMMA, (MMA | MMA_OF_8_BITS)[p.dtype]
  up_to = min(row.up_to for row in table if max(p.D, p.Dv) <= row.up_to)
  causal = bool(hiding(p).after) and not hiding(p).before
  reads = p.mask_mod is not None and bool(elements_of(p.mask_mod.value))
  # A tile has at most as many keys as the problem, rounded up to whole matrix instructions.
  def tile(row:RatedUpTo) -> WgmmaTile:
    crowded = bool(p.dropout_p) and row.shape.groups == 3 and row.up_to > SHORT
    return WgmmaTile(**vars(replace(row.shape, block_n=min(row.shape.block_n - OF_DROPOUT*crowded, round_up(p.Sk, mat.K)))))
  def fits(row:RatedUpTo) -> bool:
    if row.up_to != up_to or (row.few_keys and p.Sk > row.shape.block_n): return False
    if reads and row.shape.groups > OF_DOCUMENTS.get(up_to, row.shape.groups): return False
    return misfit(p, arch, row, tile(row)) is None and (not crowded(p) or tile(row).block_n <= CROWDED_KEYS)
  # The time grows with the number of blocks that a multiprocessor computes and with the number of scores in a block, padding included. It is divided
  # by the speed that was measured with this tile description.
  def time(row:RatedUpTo) -> float:
    t, splits = tile(row), max(1, p.num_splits)
    resident = min(row.resident, blocks_in_lds(p, arch, t))
    blocks = splits*p.all_heads*ceildiv(p.Sq, t.block_m)/arch.cus         # blocks of a multiprocessor
    keys = round_up(ceildiv(p.Sk, splits), t.block_n)
    together = max(BY_ITSELF*resident, min(resident, math.ceil(blocks)))
    each = t.block_m*together/min(resident, math.ceil(blocks))        # a block takes the time of this many rows
    if not causal: return each*math.ceil(blocks)*(keys + row.prologue)/row.full
    # Under a causal mask, late blocks loop over more keys than early ones: the average number of keys counts, but at least the time of the block with
    # the most keys.
    return max(each*blocks*((keys + t.block_m)/2 + row.prologue), LAST*t.block_m*together*(keys + row.prologue))/row.causal
  return tile(min(filter(fits, table), key=time))
