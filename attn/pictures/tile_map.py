"""Draws the map of a mask_mod: for each block of rows, which tiles a kernel skips, which it computes with the mask, and which without."""
from __future__ import annotations
import argparse, ast, importlib, importlib.util, itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
import numpy as np
from attn import mods
from attn.calls.tile_shares import NO_MASK, SKIPPED, WITH_MASK, NotCounted, columns_of_trip, shares_of, visited_tiles
from attn.chips import Chip, get_chip
from attn.choose.backward import choose_backward
from attn.choose.dispatch import choose
from attn.emulator.checks import EmulatorError
from attn.functions.symbols import FUNCTION_TENSOR_DTYPES
from attn.functions.trace import functions_of
from attn.kernels.parts.grid.tensors import of_backward
from attn.kernels.tiles.common import BlockTile
from attn.pictures.svg import EMPTY, FAINT, INK, TINTS, Drawing
from attn.problem import MOD_TENSORS, Problem, problem_of
from attn.reference import Array
from attn.tinygrad_compat import Tensor

# the map shows the key ranges and the lists of visible tiles that the kernel uses
MAP_TOP, LONGER_SIDE = 82, 480.0       # pixels
MOST_CELLS = 2**16        # largest number of tiles in a map
FILLS_OF_MAP = {SKIPPED: (EMPTY, "skipped"), WITH_MASK: (TINTS[1], "masked"), NO_MASK: (TINTS[0], "without a mask")}
KERNELS_OF_MAP = ("forward", "dq", "dkdv")

# ***** the map *****

@dataclass(frozen=True)
class Sizes:
  """Sizes of a problem without options: `sq` queries, `sk` keys, head dimension `d`."""
  batch: int = 1
  heads: int = 32
  kv_heads: int = 32
  sq: int = 1024
  sk: int = 1024
  d: int = 128

def problem_with(mask:Callable[..., Any], tensors:Sequence[Array], x:Sizes) -> Problem:
  kinds = tuple((t.shape, str(t.dtype)) for t in tensors)
  for n, (_, dtype) in enumerate(kinds):
    if dtype not in FUNCTION_TENSOR_DTYPES: raise ValueError(f"tensor {n} has dtype {dtype}: must be one of {', '.join(FUNCTION_TENSOR_DTYPES)}")
  q, k = (x.batch, x.heads, x.sq, x.d), (x.batch, x.kv_heads, x.sk, x.d)
  return problem_of(q, q, k, k, dtypes=["float16"]*4, extras=dict(zip(MOD_TENSORS, kinds)), **functions_of(None, mask, kinds))

def kernel_of_map(p:Problem, chip:Chip, kernel:str) -> tuple[str, Problem, BlockTile]:
  """Returns (name, problem, tile description) of the kernel that dispatch chooses for `p`; `kernel` is "forward", "dq" or "dkdv"."""
  choice = choose(p, chip)
  if choice.work.tile is None: raise ValueError(f"{choice.kernel} on {chip.name}: tensor operations have no tiles")
  if kernel == "forward": return choice.kernel, p, choice.work.tile
  # backward kernels need lse, so the returned problem asks for it
  gradients = choose_backward(p := of_backward(p), chip, choice.kernel)
  if not gradients.chosen: raise ValueError(f"{kernel} on {chip.name}: {gradients.refused}")
  chosen = gradients.chosen[KERNELS_OF_MAP.index(kernel) - 1]
  assert chosen.tile is not None
  return chosen.name, p, chosen.tile

def tile_map(title:str, mask:Callable[..., Any], tensors:Sequence[Array]=(), sizes:Sizes=Sizes(), arch:str="gfx942", kernel:str="forward") -> Drawing:
  """Draws which tiles of the queries x keys matrix a kernel skips, masks, or computes without a mask, for the mask function `mask`."""
  chip, over = get_chip(arch), "queries" if kernel == "dkdv" else "keys"
  name, p, tile = kernel_of_map(problem_with(mask, tensors, sizes), chip, kernel)
  device = f"EMU::{chip.name}"
  given = {tensor: Tensor(x, device=device).realize() for tensor, x in zip(MOD_TENSORS, tensors)}
  try: found = visited_tiles(name, p, chip, tile, over, device, given)
  except NotCounted as e: raise ValueError(str(e)) from None
  if (blocks := found.visited.shape[-1])*found.tiles > MOST_CELLS:
    raise ValueError(f"sq={p.Sq}, sk={p.Sk}: {blocks} blocks of {found.tiles} tiles; a map shows at most {MOST_CELLS} tiles")
  rows, columns = (p.Sq, p.Sk) if over == "keys" else (p.Sk, p.Sq)
  scale = LONGER_SIDE/max(p.Sq, p.Sk)
  heights, widths = (sizes_of_parts(n, part, scale) for n, part in ((rows, tile.block_m), (columns, columns_of_trip(name, tile))))
  # in the first batch and head; beside the picture stands the share of each kind in all batches and heads
  kinds = found.kinds()[0, 0]
  if over == "queries": kinds, heights, widths = kinds.T, widths, heights
  d = Drawing(700, MAP_TOP + 20 + max(p.Sq*scale, 70), title)
  d.text(20, 24, title, 16, bold=True)
  d.text(20, 45, f"{name} on {chip.name}, tile {tile}", fill=FAINT)
  d.text(20, 61, f"{p.Sq} queries from top to bottom, {p.Sk} keys from left to right", fill=FAINT)
  draw_cells(d, kinds, heights, widths)
  d.box(20, MAP_TOP, p.Sk*scale, p.Sq*scale, "none", INK, 0.8)
  shares = shares_of(over, found)
  for n, (count, (fill, words)) in enumerate(zip((shares.skipped, shares.masked, shares.plain), FILLS_OF_MAP.values())):
    d.box(LONGER_SIDE + 40, MAP_TOP + 4 + 20*n, 12, 12, fill)
    d.text(LONGER_SIDE + 58, MAP_TOP + 10 + 20*n, f"{words}: {shares.part(count)}")
  return d

def sizes_of_parts(n:int, part:int, scale:float) -> list[float]:
  """Divides n rows into parts of `part` rows (the last may be smaller), and returns the size of each part in pixels."""
  return [scale*min(part, n - first) for first in range(0, n, part)]

def draw_cells(d:Drawing, kinds:Array, heights:list[float], widths:list[float]) -> None:
  top, left = (list(itertools.accumulate(x, initial=0.0)) for x in (heights, widths))
  d.cells((20 + left[j], MAP_TOP + top[i], widths[j], heights[i], FILLS_OF_MAP[int(kinds[i, j])][0]) for i, j in np.ndindex(*kinds.shape))

@cache
def of_tile_map() -> dict[str, Drawing]:
  """Returns the picture tile_map.svg of docs/functions.md: the map of one mask function of attn.mods."""
  # the page also shows the command that draws it
  return {"tile_map": tile_map("attn.mods:sinks_and_window(64, 400)", mods.sinks_and_window(64, 400))}

# ***** the command *****

def function_named(word:str, arguments:Sequence[Any]) -> Callable[..., Any]:
  """Returns the function that "package.module:name" or "file.py:name" names, or its result for `arguments` if there are any."""
  place, _, name = word.rpartition(":")
  if not place or not name: raise ValueError(f"{word!r} names no function: must be package.module:name or file.py:name")
  try:
    if not place.endswith(".py"): module = importlib.import_module(place)
    else:
      if not Path(place).is_file(): raise ValueError(f"there is no file {place}")
      spec = importlib.util.spec_from_file_location(Path(place).stem, place)
      assert spec is not None and spec.loader is not None
      spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
  except (ImportError, SyntaxError) as e: raise ValueError(f"{place} cannot be imported: {e}") from None
  if not hasattr(module, name): raise ValueError(f"{place} has no {name!r}")
  found: Any = getattr(module, name)
  if not arguments: return found
  try: return found(*arguments)
  except Exception as e: raise ValueError(f"{word} with the arguments {', '.join(map(repr, arguments))} raised {type(e).__name__}: {e}") from None

def number_or_word(text:str) -> Any:
  """Returns the value of a Python literal, such as a number, or the text itself if it is not a literal."""
  try: return ast.literal_eval(text)
  except (ValueError, SyntaxError): return text

def map_command(arguments:Sequence[str]) -> int:
  """Runs the command `python -m attn.pictures map` with the command-line arguments `arguments`, and returns its exit code 0."""
  parser = argparse.ArgumentParser("python -m attn.pictures map", description="Draws which tiles a kernel skips, masks, and computes without a mask "
                                   "for your own mask_mod. It needs no GPU: an emulator makes lists of tiles.")
  parser.add_argument("function", help="your mask_mod, as package.module:name or file.py:name")
  parser.add_argument("--arguments", nargs="+", type=number_or_word, default=[], help="call the function with these to get the mask_mod")
  parser.add_argument("--tensors", nargs="+", type=Path, default=[], help="files .npy with mod_tensors, in order")
  for name, size in vars(Sizes()).items():
    parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=None if name == "kv_heads" else size, help=f"by default {size}")
  parser.add_argument("--arch", default="gfx942", help="chip, by default gfx942")
  parser.add_argument("--kernel", choices=KERNELS_OF_MAP, default="forward", help="dq and dkdv compute gradients")
  parser.add_argument("--out", type=Path, required=True, help="file for the map, as SVG")
  x = parser.parse_args(arguments)
  sizes = Sizes(**{name: getattr(x, name) for name in vars(Sizes()) if getattr(x, name) is not None} | {"kv_heads": x.kv_heads or x.heads})
  title = f"{x.function}({', '.join(map(repr, x.arguments))})" if x.arguments else x.function
  try:
    tensors = [np.load(path, allow_pickle=False) for path in x.tensors]
    drawing = tile_map(title, function_named(x.function, x.arguments), tensors, sizes, x.arch, x.kernel)
    x.out.write_text(drawing.svg(), encoding="utf-8")
  except (ValueError, NotImplementedError, OSError, EmulatorError) as e: parser.error(str(e))
  return 0
