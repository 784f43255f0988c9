"""Numbers of tiles that kernels skip, mask, or compute without a mask, counted on the host from the intervals and lists of tiles that the kernels
use."""
from __future__ import annotations
from collections.abc import Mapping
from dataclasses import dataclass, replace
import numpy as np
from attn.calls.checked_kernel import arch_of
from attn.calls.tile_lists import tile_lists
from attn.chips import Chip
from attn.choose.tile_lists import lists_or_reason, listing
from attn.emulator.alu import ALU, Array
from attn.functions.symbols import FAR
from attn.kernels import dual_wave
from attn.kernels.parts.program.blocks import blocks_seen, extent, over_keys, over_queries
from attn.kernels.parts.program.counts import ceildiv
from attn.kernels.tile_lists import ListedBlocks
from attn.kernels.tiles.common import BlockTile, heads_of
from attn.kernels.tiles.plain import RectangleTile
from attn.ops.common import flat
from attn.ops.operation import Call
from attn.problem import Problem, Shapes
from attn.score.masks import hiding, scattered
from attn.tinygrad_compat import Ops, Tensor, UOp, capturing
from attn.values import INTS

# ***** tiles of every block *****

SKIPPED, WITH_MASK, NO_MASK = range(3)     # what a kernel does in a tile: nothing, everything, or everything but masks

@dataclass(frozen=True)
class Neighbours:
  """The interval of tiles that each workgroup visits, as arrays (sequences, blocks of rows): one workgroup for each block."""
  tiles: int  # number of all tiles, visited or not
  begin: Array  # the workgroup computes the tiles from `begin` up to `end`
  full_begin: Array  # no mask is computed in the tiles from `full_begin` up to `full_end`
  full_end: Array
  end: Array
  @property
  def visited(self) -> Array: return self.end - self.begin
  @property
  def plain(self) -> Array: return self.full_end - self.full_begin
  def all_masked(self) -> Neighbours:
    """Returns a copy of these intervals in which every visited tile counts as masked."""
    return replace(self, full_end=self.full_begin)
  def kinds(self) -> Array:
    """Returns a number for each tile, SKIPPED, WITH_MASK or NO_MASK, as an array (sequences, 1, blocks of queries or keys, tiles)."""
    def inside(first:Array, end:Array) -> Array: return (first[..., None] <= (n := np.arange(self.tiles))) & (n < end[..., None])
    return (inside(self.begin, self.end).astype(np.int8) + inside(self.full_begin, self.full_end))[:, None]

@dataclass(frozen=True)
class Listed:
  """The list of tiles that each workgroup visits, for kernels that loop over lists (attn/kernels/tile_lists.py)."""
  tiles: int  # number of all tiles, visited or not
  # Shape (batches, heads, blocks, length). A list has the number of tiles that need a mask, the number of all tiles in the list, and the tiles: first
  # all that need a mask.
  lists: Array
  @property
  def visited(self) -> Array: return self.lists[..., 1]
  @property
  def plain(self) -> Array: return self.lists[..., 1] - self.lists[..., 0]
  def all_masked(self) -> Listed:
    """Returns a copy of these lists in which every visited tile counts as masked."""
    return replace(self, lists=np.concatenate([self.lists[..., 1:2], self.lists[..., 1:]], -1))
  def kinds(self) -> Array:
    """Returns a number for each tile, SKIPPED, WITH_MASK or NO_MASK, as an array (batches, heads, blocks of queries or keys, tiles)."""
    found = np.full((*self.lists.shape[:-1], self.tiles), SKIPPED, np.int8)
    for place in np.ndindex(*found.shape[:-1]):
      partly, count, *order = self.lists[place]
      found[place][order[:partly]], found[place][order[partly:count]] = WITH_MASK, NO_MASK
    return found

TILES_OF = {"keys": "key", "queries": "query"}

@dataclass(frozen=True)
class Shares:
  """Numbers of tiles that all workgroups of a kernel together skip, compute with a mask (`masked`), and compute without one (`plain`)."""
  over: str  # tiles of "keys" or of "queries"
  skipped: int
  masked: int
  plain: int
  def part(self, n:int) -> str: return f"{100*n/(self.skipped + self.masked + self.plain):.1f} %"
  def __str__(self) -> str:
    return f"{TILES_OF[self.over]} tiles: {self.part(self.skipped)} skipped, {self.part(self.masked)} masked, {self.part(self.plain)} without a mask"

def shares_of(over:str, x:Neighbours|Listed) -> Shares:
  visited, plain = int(x.visited.sum()), int(x.plain.sum())
  return Shares(over, x.visited.size*x.tiles - visited, visited - plain, plain)

# ***** tiles of intervals *****

FIRST_ROW, LAST_ROW, SEQUENCE = (UOp.variable(name, 0, FAR, param=True) for name in ("first_row", "last_row", "sequence"))
LENGTH_TENSORS = ("kv_lengths", "kv_starts", "cu_seqlens_q", "cu_seqlens_k")      # tensors that say which queries and keys exist

def on_host(value:UOp, given:Mapping[UOp, Array]) -> Array:
  """Evaluates an integer expression of a kernel in numpy."""
  # `given` has the values of symbols, and the contents of the tensors from which the expression loads.
  rules = ALU | {Ops.MAX: np.maximum, Ops.FLOORDIV: np.floor_divide, Ops.FLOORMOD: np.mod, Ops.CAST: np.asarray, Ops.LOAD: np.asarray}
  found = dict(given)
  for u in value.toposort(lambda u: u not in given):
    if u in found: continue
    if u.op is Ops.CONST: found[u] = np.asarray(u.val)
    elif u.op is Ops.INDEX: found[u] = found[u.src[0]][found[u.src[1]]]
    elif isinstance(u.arg, Call) and u.arg.name == "uniform": found[u] = found[u.src[0]]
    elif u.op in rules: found[u] = rules[u.op](*(found[x] for x in u.src))
  return found[value]

def tiles_of_intervals(p:Problem, tile:BlockTile, width:int, over:str, lengths:Mapping[str, Array]) -> Neighbours:
  """Returns the interval of tiles that each workgroup visits; a tile is `width` keys if `over` is "keys", or `width` queries if `over` is
  "queries"."""
  # `lengths` has the contents of the tensors that say which queries and keys exist (LENGTH_TENSORS).
  shapes: Shapes = {name: p.extras[name] for name in lengths}
  tensors = {name: UOp.placeholder(shape, INTS[dtype], slot) for slot, (name, (shape, dtype)) in enumerate(shapes.items())}
  x = extent(p, SEQUENCE, tensors)
  walk, heads = (over_keys(p, x), heads_of(p, tile)) if over == "keys" else (over_queries(p, x), 1)
  rows, columns = (p.Sq*heads, p.Sk) if over == "keys" else (p.Sk, p.Sq)
  blocks = blocks_seen(walk, FIRST_ROW, LAST_ROW, width)
  first = np.arange(ceildiv(rows, tile.block_m))*tile.block_m
  given = {FIRST_ROW: first//heads, LAST_ROW: (first + tile.block_m - 1)//heads, SEQUENCE: np.arange(p.B)[:, None]}
  given |= {flat(tensors[name]): lengths[name] for name in tensors}
  shape = (p.B if lengths else 1, len(first))
  return Neighbours(ceildiv(columns, width), *[np.broadcast_to(on_host(n, given), shape)
                                               for n in (blocks.begin, blocks.full_begin, blocks.full_end, blocks.end)])

# ***** tiles of a call *****

MOST_PAIRS = 2**26     # most pairs of a query and a key, over all lists, for which the emulator makes lists: this takes some seconds

class NotCounted(Exception):
  """Raised if tiles can't be counted; the message says why."""
  # `least` has lower bounds of the skipped tiles, or is None: a workgroup skips at least all tiles before the first key, and after the last key, that
  # its queries may see.
  def __init__(self, reason:str, least:Shares|None=None) -> None:
    super().__init__(reason)
    self.least = least

def check_realized(name:str, t:Tensor) -> Tensor:
  if not isinstance(t.device, str): raise NotCounted(f"{name} lies on several devices")
  if not t.uop.is_realized or capturing: raise NotCounted(f"{name} has no numbers yet")
  return t

def lists_of_tiles(x:ListedBlocks, arch:Chip, device:str, given:Mapping[str, Tensor]) -> Array:
  """Returns the lists of tiles over which workgroups loop as a numpy array, or raises NotCounted if a tensor is not computed yet."""
  here, read = arch_of(device), {name: check_realized(name, given[name]) for name in x.read}
  # On a device with the chip `arch`, kernels make the lists, and calls of `attention` use these lists, too.
  if here is not None and here.name == arch.name: return tile_lists(x, device, read).numpy()
  # The emulator makes the lists for any other chip.
  if (pairs := x.lists*x.heads[1]*x.rows*x.columns) > MOST_PAIRS: raise NotCounted(f"{pairs} pairs are too many for the emulator of {arch.name}")
  return tile_lists(x, on := f"EMU::{arch.name}", {name: t.to(on).realize() for name, t in read.items()}).numpy()

def columns_of_trip(kernel:str, tile:BlockTile) -> int:
  """Returns how many keys, or queries, one iteration of a kernel's loop computes."""
  return dual_wave.TRIP_KEYS if kernel == "dual_wave" else tile.block_n

def visited_tiles(kernel:str, p:Problem, arch:Chip, tile:BlockTile, over:str, device:str|tuple[str, ...],
                  given:Mapping[str, Tensor]) -> Neighbours|Listed:
  """Returns which tiles each workgroup of a kernel visits (tiles of keys, or of queries: `over`); raises NotCounted if this is not known yet."""
  # `device` and `given` are the device and the optional tensors of a call.
  if p.dealt is not None: raise NotCounted("devices share the rows of a sequence")
  if p.sk_variable is not None: raise NotCounted("Variables say how many keys there are")
  lengths = {name: check_realized(name, given[name]).numpy() for name in LENGTH_TENSORS if name in p.extras}
  found: Neighbours|Listed = tiles_of_intervals(p, tile, columns_of_trip(kernel, tile), over, lengths)
  if (lists := listing(p, arch, tile, over)) is not None:
    if not isinstance(device, str): raise NotCounted("each of several devices makes lists", shares_of(over, found))
    try: found = Listed(lists.tiles, lists_of_tiles(lists, arch, device, given))
    except NotCounted as e: raise NotCounted(str(e), shares_of(over, found)) from None
  return found.all_masked() if isinstance(tile, RectangleTile) else found

def shares_told(kernel:str, p:Problem, arch:Chip|None, tile:BlockTile|None, over:str, device:str|tuple[str, ...],
                given:Mapping[str, Tensor]) -> str:
  """Returns a text for `explain`: which percentages of tiles a kernel skips, masks, and computes without a mask; "" if nothing is masked."""
  if arch is None or tile is None or not (any(hiding(p)) or scattered(p)): return ""
  listed = lists_or_reason(p, arch, tile, over)
  why = f"; no list of tiles: {listed}" if isinstance(listed, str) and scattered(p) else ""
  try: return str(shares_of(over, visited_tiles(kernel, p, arch, tile, over, device, given))) + why
  except NotCounted as e:
    known = f"at least {e.least.part(e.least.skipped)} skipped, others " if e.least is not None and e.least.skipped else ""
    return f"{TILES_OF[over]} tiles: {known}not counted: {e}{why}"
