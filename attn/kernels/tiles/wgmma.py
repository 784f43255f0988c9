"""Tile descriptions of the kernels on Hopper's wgmma: how many rows a block owns and loops over, how many warpgroups it has, and how rows lie in
shared memory."""
from __future__ import annotations
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar
from attn.chips.matrix import MMA, MMA_OF_8_BITS, UNIT_BYTES, Mma
from attn.chips.shapes import MlaWgmmaShape, WgmmaBackwardShape, WgmmaShape
from attn.kernels.parts.memory.layouts import LINE, LongPanels, SwizzledPanels, SwizzledRows
from attn.kernels.parts.program.counts import ceildiv, round_up
from attn.kernels.tiles.common import OF_KEYS, OF_QUERIES, TURNS_OF_SUMS, units_of_query_values
from attn.ops import hopper as wgmma
from attn.problem import KINDS_OF_SCALES, STORED, Problem

WGMMA = MMA | MMA_OF_8_BITS     # layouts of the fragments, by the dtype of the inputs
STAGES = 3      # K and V tiles in shared memory, at most
SCALE_STAGES = 4      # tiles whose scales are in shared memory at the same time: a warpgroup may read those of a tile three iterations before another
ONES_ROWS = 8   # rows of ones below each transposed tile of V of 8 bits: wgmma then computes the row sums of P as further columns of P V
GIVEN_STAGES = 2     # tiles of V of 8 bits that are in shared memory before they are transposed
MOST_SHARED = 232448     # bytes of shared memory of a block on Hopper
MOST_OF_PART = 25    # C fragments of P V that are computed together, at most: those of 192 columns and of the row sums
LATENT_GROUPS = 2     # warpgroups of the latent kernel: O has too many columns for the registers of one
PANEL_COLUMNS = LINE*MMA["float16"].unit     # columns of 16 bits in a panel
RING = 3        # tiles of walked rows in shared memory, in a backward kernel

@dataclass(frozen=True)
class WgmmaTile(WgmmaShape):
  """Tile description of the forward kernel on wgmma."""
  _: KW_ONLY
  rescale_above: float = 8.0   # accumulators are rescaled when a lane's P of one iteration add up to more than 2 to this power

  kernel: ClassVar[str] = "forward_wgmma"

  pack_gqa: ClassVar[bool] = False
  @property
  def waves(self) -> int: return self.groups*4
  @property
  def block_m(self) -> int: return self.groups*wgmma.M
  @property
  def threads(self) -> int: return self.groups*wgmma.GROUP
  def layouts(self, p:Problem) -> tuple[SwizzledPanels, SwizzledPanels, SwizzledPanels]:
    """Returns (layout of Q, layout of K, layout of V) in shared memory."""
    mat = WGMMA[p.dtype]
    k_units, columns = round_up(p.D, mat.K)//mat.unit, round_up(p.Dv, mat.K)
    # if the inputs are 8-bit floats, V lies there transposed, with rows of ones below it
    of_v = SwizzledPanels(columns + ONES_ROWS, self.block_n//mat.unit) if p.of_8_bits else SwizzledPanels(self.block_n, columns//mat.unit)
    return SwizzledPanels(self.block_m, k_units), SwizzledPanels(self.block_n, k_units), of_v
  def transposes(self, p:Problem) -> bool:
    """Whether the kernel transposes V. wgmma can read 8-bit floats only with the keys of a column side by side."""
    return p.of_8_bits and not p.turned
  def given_v(self, p:Problem) -> SwizzledRows:
    """Returns the layout in which 8-bit floats of V arrive in shared memory, before the kernel transposes them there."""
    return SwizzledRows(self.block_n, round_up(p.Dv, WGMMA[p.dtype].K)//WGMMA[p.dtype].unit)
  def converts(self, p:Problem) -> bool:
    """Whether the kernel converts k and v from 8 to 16 bits."""
    return p.stored in STORED
  def stages(self, p:Problem) -> int:
    """Returns how many tiles of K, and how many of V, fit into shared memory at the same time."""
    return STAGES if self.converts(p) or self.transposes(p) else min(STAGES, ceildiv(p.Sk, self.block_n))
  def scale_stages(self, p:Problem) -> int:
    """Returns for how many tiles shared memory has room for the scales at the same time."""
    return SCALE_STAGES if self.converts(p) else self.stages(p)
  def ahead(self, p:Problem) -> bool:
    """Whether the copy of each tile of 8-bit floats to shared memory starts two iterations before its use, instead of one."""
    # if shared memory has room for it
    return self.transposes(p) and self.bytes_with(p, True) <= MOST_SHARED
  def key_stages(self, p:Problem) -> int: return self.stages(p) + self.ahead(p)
  def given_stages(self, p:Problem) -> int: return GIVEN_STAGES + self.ahead(p)
  def first_v(self, p:Problem) -> int:
    """Returns the 16-byte unit of shared memory at which the tiles of V begin."""
    q, k, _ = self.layouts(p)
    return q.size + self.key_stages(p)*k.size
  def pieces(self, p:Problem) -> int:
    """Returns how many 16-byte units of a tile of K and V each thread converts from 8 to 16 bits."""
    return sum(ceildiv(self.block_n*width//UNIT_BYTES, self.threads) for width in (p.D, p.Dv)) if self.converts(p) else 0
  def scales(self, p:Problem) -> int:
    """Returns the number of 16-byte units of shared memory for the scales of a tile's 8-bit rows."""
    # of all kinds (`StoredKeys.checked_scales`)
    return KINDS_OF_SCALES*self.block_n*4//UNIT_BYTES if p.stored else 0
  def lds_bytes(self, p:Problem) -> int:
    return self.bytes_with(p, self.ahead(p))
  def bytes_with(self, p:Problem, ahead:bool) -> int:
    """Returns how many bytes of shared memory a block needs. `ahead`: whether a tile's copy starts two iterations before its use."""
    q, k, v = self.layouts(p)
    given = (GIVEN_STAGES + ahead)*self.given_v(p).size if self.transposes(p) else 0
    units = q.size + (self.stages(p) + ahead)*k.size + self.stages(p)*v.size + given + self.scale_stages(p)*self.scales(p)
    return UNIT_BYTES*(units + 1)   # 1: mbarrier
  def __str__(self) -> str: return f"{self.block_m}x{self.block_n} {self.waves} waves m64n{self.block_n}"

@dataclass(frozen=True)
class MlaWgmmaTile(MlaWgmmaShape):
  """Tile description of the kernel of latent attention on wgmma, whose blocks own 64 rows."""
  # the warpgroups of a block divide the columns of O
  _: KW_ONLY
  matrix: Mma
  stages: int = 2              # tiles of K in shared memory
  rescale_above: float = 8.0   # accumulators are rescaled when a lane's P of one iteration add up to more than 2 to this power

  kernel: ClassVar[str] = "mla_wgmma"
  pack_gqa: ClassVar[bool] = True
  block_m: ClassVar[int] = wgmma.M
  threads: ClassVar[int] = LATENT_GROUPS*wgmma.GROUP
  waves: ClassVar[int] = LATENT_GROUPS*4
  handed: ClassVar[int] = wgmma.GROUP     # 16-byte units of shared memory for the numbers that each thread of a warpgroup hands over

  def columns(self, p:Problem) -> int:
    """Returns how many columns of O each warpgroup computes, a multiple of the columns that fit into 128 bytes."""
    return ceildiv(p.Dv, PANEL_COLUMNS*LATENT_GROUPS)*PANEL_COLUMNS
  def layouts(self, p:Problem) -> tuple[LongPanels, LongPanels, SwizzledPanels]:
    """Returns (layout of Q, layout of K, layout of P) in shared memory."""
    units = round_up(p.D, PANEL_COLUMNS)//self.matrix.unit
    return LongPanels(self.block_m, units), LongPanels(self.block_n, units), SwizzledPanels(self.block_m, self.block_n//self.matrix.unit)
  def weights(self, p:Problem) -> SwizzledPanels:
    """Returns the layout of P in shared memory, behind Q and the tiles of K."""
    q, k, weights = self.layouts(p)
    return weights.moved_to(q.size + self.stages*k.size)
  def factors_at(self, p:Problem) -> int:
    """Returns the 16-byte unit of shared memory at which the factors that rescale O begin."""
    weights = self.weights(p)
    return int(weights.base) + weights.size
  def lds_bytes(self, p:Problem) -> int: return UNIT_BYTES*(self.factors_at(p) + self.handed + 1)      # 1: mbarrier
  def __str__(self) -> str: return f"{self.block_m}x{self.block_n} {self.waves} waves m64n{self.block_n} {self.stages} stages"

@dataclass(frozen=True)
class WgmmaBackwardTile(WgmmaBackwardShape):
  """Tile description of a backward kernel on wgmma: each warpgroup owns 64 rows, and the block loops over tiles of `block_n` rows."""
  # own rows: queries in backward_dq_wgmma, keys in backward_dkdv_wgmma; walked rows: of the other kind
  _: KW_ONLY
  matrix: Mma
  keys: bool = False       # the own rows are keys
  adds_dq: bool = False    # the own rows are keys, and the block also adds their part of dQ to memory

  suffix: ClassVar[str] = "_wgmma"

  pack_gqa: ClassVar[bool] = False
  row_tiles: ClassVar[int] = 1
  ring: ClassVar[int] = RING            # tiles of rows in shared memory that pass through the ring buffer
  keeps_dq: ClassVar[bool] = False      # whether dQ stays in registers during the loop, and dK and dV of a tile of keys are finished in one iteration
  @property
  def options(self) -> str: return f"passes={self.passes}"*(self.passes > 1)
  @property
  def waves(self) -> int: return self.groups*4
  @property
  def block_m(self) -> int: return self.groups*wgmma.M
  @property
  def threads(self) -> int: return self.groups*wgmma.GROUP
  def layouts(self, p:Problem, rows:int) -> tuple[SwizzledPanels, SwizzledPanels]:
    """Returns (layout for rows of q or k, layout for rows of do or v) in shared memory, each for `rows` rows."""
    of_d, of_dv = (SwizzledPanels(rows, round_up(d, wgmma.K)//self.matrix.unit) for d in (p.D, p.Dv))
    return of_d, of_dv
  @property
  def stay(self) -> tuple[str, ...]:
    """Names of the tensors whose rows stay in shared memory during the whole loop, e.g. ("k", "v") if the block owns keys."""
    # the rows of the other tensors pass through the ring buffer
    return OF_KEYS if self.keys else OF_QUERIES
  @property
  def stay_rows(self) -> int: return self.block_m
  @property
  def passing_rows(self) -> int: return self.block_n
  def stay_size(self, p:Problem) -> int:
    """Returns how many 16-byte units of shared memory the rows that stay there during the loop take."""
    return sum(x.size for x in self.layouts(p, self.stay_rows))
  def stage(self, p:Problem) -> int:
    """Returns the size, in 16-byte units, of one stage of the ring buffer: one tile of the rows over which the block loops."""
    # without lse and delta of queries (`units_of_query_values`)
    return sum(x.size for x in self.layouts(p, self.passing_rows))
  @property
  def stages_of_query_values(self) -> int:
    """Number of tiles whose lse and delta lie in shared memory at the same time."""
    # if the block adds to dQ, two are enough: its warpgroups wait for each other in each iteration, after they have read these numbers
    return 2 if self.adds_dq else RING
  def units_of_query_values(self, p:Problem) -> int:
    """Returns the number of 16-byte units of shared memory for lse, delta (and lse_rest) of a tile's queries."""
    return units_of_query_values(p, self.block_n) if self.keys else 0
  @property
  def ds(self) -> SwizzledPanels:
    """Layout, in shared memory, of dS of a tile: a row for each key of the block, a column for each query of the tile."""
    return SwizzledPanels(self.block_m, self.block_n//self.matrix.unit)
  @property
  def ds_size(self) -> int:
    """Number of 16-byte units of shared memory for dS of two tiles."""
    # two, because warpgroups may still read dS of one tile while dS of the next is stored
    return 2*self.ds.size
  @property
  def dq_panels(self) -> int:
    """Number of groups of 64 queries in a tile of queries. One or more warpgroups compute dQ of each group."""
    # a part has as many queries as a product of wgmma has rows; the warpgroups share the parts equally; if there are fewer parts than warpgroups, the
    # warpgroups of a part share its columns
    return self.block_n//wgmma.M
  def dq_columns(self, p:Problem) -> int:
    """Returns the number of columns of dQ that each warpgroup computes."""
    return p.D*self.dq_panels//self.groups
  def cannot_add_dq(self, p:Problem) -> str|None:
    """Returns the reason why a block of this shape cannot compute dQ beside dK and dV, or None if it can."""
    shape = f"{self.groups} warpgroups with tiles of {self.block_n} queries"
    if self.block_n % wgmma.M: return f"{shape}: the product dQ = dS K has whole {wgmma.M} queries"
    if self.groups % self.dq_panels: return f"{shape}: the warpgroups cannot share {self.dq_panels} times {wgmma.M} queries of dQ equally"
    columns, panel = self.dq_columns(p), LINE*self.matrix.unit
    if p.D*self.dq_panels % self.groups or columns % self.matrix.N or (columns % panel and panel % columns):
      supported = f"supported are {self.matrix.N}, 16, 32 and whole {panel}"
      return f"{shape}: each computes {p.D*self.dq_panels/self.groups:g} of the D={p.D} columns of dQ; {supported}"
    if self.waves > TURNS_OF_SUMS*self.dq_panels: return f"{shape}: there are counters of turns for {TURNS_OF_SUMS*self.dq_panels} warps"
    return None
  def sent(self, p:Problem) -> int:
    """Returns how many 16-byte units of shared memory hold one warp's part of dQ until it is added to global memory."""
    return self.matrix.M*self.dq_columns(p)*4//UNIT_BYTES
  def shared_dq(self, p:Problem) -> int:
    """Returns how many 16-byte units of shared memory a block needs for dS and dQ if it adds to dQ, otherwise 0."""
    # for dS, and for dQ of a tile of queries
    return self.ds_size + self.waves*self.sent(p) if self.adds_dq else 0
  def lds_bytes(self, p:Problem) -> int:
    values = self.stages_of_query_values*self.units_of_query_values(p)
    return UNIT_BYTES*(self.after_ring(p) + values + self.shared_dq(p) + 1)      # the last unit is for the mbarrier
  def after_ring(self, p:Problem) -> int:
    """Returns the index of the first 16-byte unit of shared memory after the ring buffer."""
    return self.stay_size(p) + self.ring*self.stage(p)
  def __str__(self) -> str: return f"{self.block_m}x{self.block_n} {self.waves} waves m64n{self.block_n}k16 {self.ring} stages"

@dataclass(frozen=True)
class WgmmaHalvesTile(WgmmaBackwardTile):
  """Tile description of the kernel of dk and dv whose two warpgroups own the same 64 keys: one computes dV, the other dK."""
  keys: bool = True

  @property
  def options(self) -> str: return "P in shared memory"
  @property
  def block_m(self) -> int: return wgmma.M
  def weights_at(self, p:Problem) -> int:
    """Returns the index of the 16-byte unit of shared memory at which P of a tile begins."""
    return self.after_ring(p)
  def shared_dq(self, p:Problem) -> int: return self.block_m*self.block_n*4//UNIT_BYTES

@dataclass(frozen=True)
class WgmmaFewQueriesTile(WgmmaBackwardTile):
  """Tile description of the kernel that computes all gradients of a problem with few queries (backward_few_wgmma)."""
  # a block holds all queries of a head, `block_n` at most, and loops over tiles of `block_m` keys
  keys: bool = True

  keeps_dq: ClassVar[bool] = True
  ring: ClassVar[int] = 2      # a barrier in each iteration tells that the tile of the iteration before is no longer read
  @property
  def stay(self) -> tuple[str, ...]: return OF_QUERIES
  @property
  def stay_rows(self) -> int: return self.block_n
  @property
  def passing_rows(self) -> int: return self.block_m
  @property
  def stages_of_query_values(self) -> int: return 1
  def shared_dq(self, p:Problem) -> int: return self.ds_size
