"""Choice of a row from a table of tile shapes, for a problem on a chip: the first row whose conditions hold and whose tiles fit into LDS and
registers."""
from __future__ import annotations
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar
from attn.cache.tuned import head_class
from attn.chips import Chip
from attn.chips.shapes import AnyShape, Burden, UpTo
from attn.choose.splits import workgroups
from attn.kernels.parts.program.counts import ceildiv
from attn.kernels.tiles.amd import BackwardTile, Tile
from attn.kernels.tiles.common import BlockTile
from attn.problem import Problem
from attn.score.masks import hiding
from attn.score.term import TermRegisters
from attn.score.terms import crowded, heaviest

def burden(p:Problem) -> Burden:
  """Returns the property of the problem, such as a mask or a bias, that takes the most registers in the kernel's loop."""
  if crowded(p): return Burden.BIAS
  if heaviest(p) == TermRegisters.COLUMNS: return Burden.ALIBI
  if p.options or p.writes_lse: return Burden.OPTIONS
  return Burden.MASK if any(hiding(p)) else Burden.PLAIN

def in_units(p:Problem, unit:int) -> bool:
  """Returns whether the rows of K and V consist of whole 16-byte units, each of `unit` elements."""
  return p.D % unit == 0 and p.Dv % unit == 0

@functools.cache
def rows_for(table:tuple[UpTo[AnyShape], ...], llvm:int) -> tuple[UpTo[AnyShape], ...]:
  """Returns those rows of a table of tile shapes that are meant for machine code of the LLVM release `llvm`."""
  # `row.llvm` is the newest release that a row is for. Of several rows for the same head dimensions, those of the oldest such release are kept.
  rows = [row for row in table if row.llvm >= llvm]
  oldest = {up_to: min(row.llvm for row in rows if row.up_to == up_to) for up_to in {row.up_to for row in rows}}
  return tuple(row for row in rows if row.llvm == oldest[row.up_to])

def misfit(p:Problem, arch:Chip, row:UpTo[Any], tile:Any, load:Burden=Burden.PLAIN) -> str|None:
  """Returns the reason why the tile description `tile`, made from the table row `row`, does not fit a problem on a chip; None if it fits."""
  # `load` says what in the problem needs the most registers (`burden`).
  if isinstance(tile, BackwardTile) and tile.torn: return f"tile {tile}: fenced={tile.fenced} is less than the number of units in one operand"
  if max(p.D, p.Dv) > row.up_to: return f"tile {tile} is for D and Dv up to {row.up_to}"
  if load > row.burden or arch.name in row.spills_on:
    return f"tile {tile} would need too many registers on {arch.name} with this problem's masks and options"
  if row.pages and (p.pages is None or p.pages.size > row.pages): return f"tile {tile} is for keys in pages of at most {row.pages} rows"
  if (rows := p.Sq*(p.H//p.Hkv)) <= row.beyond: return f"tile {tile} is for more than {row.beyond} rows, there are {rows}"
  if (wanted := max(row.fills, arch.cus*row.large)) and (blocks := workgroups(p, tile)) < wanted:
    return f"tile {tile} makes {blocks} workgroups, {wanted} are wanted to fill the chip"
  if row.whole and not in_units(p, tile.matrix.unit): return f"tile {tile} needs D and Dv to be multiples of {tile.matrix.unit}"
  if row.whole and tile.waves < row.shape.waves: return f"tile {tile} has enough registers only with {row.shape.waves} waves"
  if (need := tile.lds_bytes(p)*row.at_once) > arch.lds:
    return f"tile {tile} needs {need} bytes of LDS{f' for {row.at_once} workgroups'*(row.at_once > 1)}, {arch.name} has {arch.lds}"
  return None

T = TypeVar("T", bound=BlockTile)

PLAIN_LLVM = 22      # tables for plain problems are chosen from the code of this release of LLVM: its predicted time, and its registers
FEWEST_WAVES = 2     # fewest waves of a workgroup in these tables: such a tile is for small grids as well

def plain_rows(p:Problem, arch:Chip, table:Iterable[UpTo[Any]], tile_of:Callable[[UpTo[Any]], Tile|BackwardTile]) -> Iterator[UpTo[Any]]:
  """Yields the rows of `table` that fit `p`. The table serves problems whose rows of K and V are whole units of 16 bytes, with at most one option."""
  # Such a row is for a class of head dimensions, and for no option or one of the row's `options`. Rows of K and V must be whole 16-byte units, the
  # queries of a head must fill a tile, and there must be enough workgroups to fill the chip.
  if arch.llvm < PLAIN_LLVM: return
  option = "".join(p.options) or "window"*bool(hiding(p).before)
  for row in (x for x in table if x.up_to == head_class(p) and option in x.options):
    tile, waves = tile_of(row), row.shape.waves
    owned, heads = (p.Sk, p.Hkv) if isinstance(tile, BackwardTile) and tile.keys else (p.Sq, p.H)
    filled = waves <= ceildiv(owned, tile.block_m//tile.waves)
    busy = p.B*heads*ceildiv(owned, tile.block_m) >= arch.cus or waves == FEWEST_WAVES
    if in_units(p, tile.matrix.unit) and filled and busy: yield row

def fitting(kernel:str, p:Problem, arch:Chip, rows:Iterable[UpTo[AnyShape]], tile_of:Callable[[UpTo[AnyShape]], T],
            load:Burden=Burden.PLAIN) -> Iterator[T]:
  """Yields the tile descriptions that fit the problem, from the rows of a tile table in their order; raises NotImplementedError, with all reasons, if
  none fits."""
  # `load` says what in the problem needs the most registers (`burden`). `kernel` is the kernel's name in the message.
  reasons, found = [], False
  for row in rows:
    if (reason := misfit(p, arch, row, tile := tile_of(row), load)) is not None: reasons.append(reason)
    else:
      found = True
      yield tile
  if not found: raise NotImplementedError(f"no tile of {kernel} fits D={p.D}, Dv={p.Dv} on {arch}: {'; '.join(reasons)}")
