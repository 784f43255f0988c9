"""File of the fastest tile descriptions (tiles) in the user's cache directory. bench.py with TUNE=1 measures and writes the file. The emulator
doesn't use it."""
from __future__ import annotations
import functools, importlib.metadata, itertools, json, warnings
from collections.abc import Callable
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any
from attn import values
from attn.cache import user_cache
from attn.chips import Chip
from attn.chips.shapes import AnyShape, BackwardShape, ForwardShape, MlaMmaShape, MlaShape, UpTo
from attn.kernels.tiles.plain import QUAD, TiledBackwardTile, TiledTile
from attn.problem import Problem
from attn.score.masks import hiding
from attn.tinygrad_compat import TINYGRAD_VERSION, Device, device_of

# The file has this form: {chip: {entry: {"tile": ..., "seconds": ..., "stamp": ...}}}. An entry is for one kernel and one problem class: problems of
# the same dtype and mask, and of about the same sizes, use the same tile. The name of an entry is the name of the class; for a backward kernel the
# name of the class, a space, and the name of the kernel. "tile" has the sizes, by name, and "matrix": the index of a matrix instruction in the chip's
# list of matrix instructions. "tile" is null if no tile was faster than the tile of attn's tables. "seconds" is the tile's time, "stamp" the versions
# of attn, tinygrad and the compiler in this measurement. The file is untrusted input: an entry that is invalid, or measured with other versions, is
# ignored with one warning that names the file.

CLASSES = (64, 128, 192, 256)   # the largest head dimension of each class

def head_class(p:Problem) -> int:
  """Returns the head dimension by which problems are grouped in the file: the smallest number in CLASSES that is at least D and Dv."""
  # Beyond CLASSES it is the larger of D and Dv.
  return next((x for x in CLASSES if max(p.D, p.Dv) <= x), max(p.D, p.Dv))

OPTIONS_OF_A_CACHE = ("v_in_k", "k_view", "kv_lengths", "pages")     # if v is part of k, problems with and without these options share a class

def problem_class(p:Problem) -> str|None:
  """Returns the name of the group of similar problems to which `p` belongs; all problems of a group use one tile. None if `p` has options that are
  not tuned."""
  # TUNE=1 does not measure tiles for options such as a bias or dropout.
  if any(x not in OPTIONS_OF_A_CACHE or not p.v_in_k for x in p.options): return None
  hidden = hiding(p)
  mask = "window" if hidden.before else "causal" if hidden.after else "full"
  # Lengths and numbers of heads are rounded up to a power of two, and head dimensions to one of CLASSES.
  heads, queries, keys = (1 << (n - 1).bit_length() for n in (p.all_heads, p.Sq, p.Sk))
  width = f"D{p.D} with Dv{p.Dv} in it" if p.v_in_k else f"D{head_class(p)}"
  return f"{p.dtype} {width} {mask} {heads} heads of {p.H//p.Hkv} to one of K, {queries}x{keys}"

def path() -> Path:
  """Returns the path of the file of fastest tiles."""
  return user_cache.directory()/"tune.json"

# ***** valid content of the file *****

@functools.cache
def stamp() -> dict[str, str]:
  """Returns the versions on which a measured time depends: attn, tinygrad, and the compiler of tinygrad's default device."""
  try: own = importlib.metadata.version("attn")
  except importlib.metadata.PackageNotFoundError: own = "not installed"
  compiler = device_of(Device.DEFAULT).renderer.compiler
  return {"attn": own, "tinygrad": TINYGRAD_VERSION, "compiler": str(getattr(compiler, "version", type(compiler).__name__))}

Limits = dict[str, tuple[Any, ...]]

RECTANGLES: Limits = {
  "down": (1, 2, 4, 8, 16, 32), "across": (1, 2, 4, 8, 16, 32), "walked": (4, 8, 16), "own": (4, 8, 16), "depth": (0, 4, 8, 16, 32, 64, 128),
  "values": (0, 4, 8, 16, 32, 64, 128), "keeps_own": (False, True), "ahead": (False, True), "asynchronous": (False, True), "parts": (1, 2, 4, 8, 16),
  "columns": (0, 4, 8, 16), "steps_at_once": (1, 2, 4, 8, 16)}
LIMITS: dict[type, Limits] = {
  ForwardShape: {"matrix": (0, 1), "waves": (1, 2, 4, 8), "q_tiles": (1, 2), "block_n": (16, 32, 64, 128), "q_in_lds": (False, True),
                 "fenced": (False, True), "prefetch": (0, 1, 2)},
  BackwardShape: {"matrix": (0, 1), "waves": (1, 2, 4, 8), "block_n": (16, 32, 64), "own_in_lds": tuple(itertools.product((False, True), repeat=2)),
                  "fenced": (0, 2, 4, 8), "prefetch": (0, 1, 2), "sparing": (False, True), "passes": (1, 2), "by_item": (False, True),
                  "turning": (False,), "ahead": (0,), "read_ahead": (0, 1, 3)},      # only the kernel for all gradients has other values of the two
  MlaShape: {"matrix": (0, 1), "row_tiles": (4, 2, 1), "block_n": (32, 64), "key_parts": (1, 2, 4), "q_reloaded": (False, True), "fenced": (8,),
             "weight_parts": (1, 2), "prefetch": (1, 0)},
  MlaMmaShape: {"matrix": (0,), "row_tiles": (4, 2, 1), "block_n": (64, 32), "key_parts": (2, 1, 4, 8), "stages": (2, 3)},
  TiledTile: RECTANGLES, TiledBackwardTile: {**RECTANGLES, "ahead": (False,), "asynchronous": (False,), "keys": (False, True)}}

def fields_of(row:UpTo[Any]) -> dict[str, Any]:
  """Returns the fields of a tile shape by name, as the file of fastest tiles stores them."""
  return {**asdict(row.shape), **({"matrix": row.matrix} if "matrix" in LIMITS[type(row.shape)] else {})}

def row_in_entry(found:Any, kind:type[AnyShape], up_to:int) -> UpTo[AnyShape]|None:
  """Reads the tile shape, of type `kind`, in an entry of the file of fastest tiles; None if the entry says that attn's default choice is fastest."""
  # Raises ValueError if the entry has no valid tile.
  if not isinstance(found, dict) or "tile" not in found: raise ValueError("an entry without a tile: needs the field 'tile'")
  if (tile := found["tile"]) is None: return None
  limits, needed = LIMITS[kind], {f.name for f in fields(kind) if f.default is MISSING}         # type: ignore[arg-type]
  if not isinstance(tile, dict): raise ValueError(f"tile={values.shown(tile)}: must be null, or the fields of a tile")
  if unknown := tile.keys() - limits.keys(): raise ValueError(f"{min(unknown)}: a tile has no such field")
  if missing := [name for name in limits if name in needed - tile.keys()]: raise ValueError(f"a tile without {missing[0]}: needs that field")
  tile = {name: tuple(x) if isinstance(x, list) else x for name, x in tile.items()}      # JSON has no tuples
  for name, value in tile.items():
    if type(value) is not type(limits[name][0]) or value not in limits[name]:
      raise ValueError(f"{name}={values.shown(value)}: must be one of {', '.join(map(str, limits[name][:9]))}")
  matrix = tile.pop("matrix", 0)
  return UpTo(up_to, kind(**tile), matrix=matrix)

RowCheck = Callable[[UpTo[Any], Chip, Problem], object]     # raises ValueError if a row has no valid tile for a problem on a chip

def check_matrix(row:UpTo[Any], arch:Chip, p:Problem) -> None:
  """Raises ValueError unless a kernel that uses the chip's matrix unit can run with the tile shape in `row`."""
  if row.matrix >= len(matrices := arch.matrix.get(p.dtype, ())):
    raise ValueError(f"matrix={row.matrix}: {arch.name} has {len(matrices)} matrix instructions for {p.dtype}")
  mat, block_n = matrices[row.matrix], row.shape.block_n
  if block_n % mat.M or block_n % mat.span: raise ValueError(f"block_n={block_n}: must be a multiple of {mat.M} and of {mat.span} keys")

def check_threads(row:UpTo[Any], arch:Chip, p:Problem) -> None:
  """Raises ValueError unless a kernel that uses no matrix unit can run with the tile shape in `row`."""
  tile = row.shape
  if tile.alone == bool(arch.lds): raise ValueError(f"tile {tile}: a workgroup of {arch.name} has {arch.lds} bytes of local memory")
  if tile.alone: whole = tile.keeps_own and not tile.ahead and tile.columns
  else: whole = tile.depth and tile.values and tile.parts == 1 and not tile.columns and tile.block_n % tile.values == 0
  if tile.asynchronous: whole = whole and tile.keeps_own and not tile.ahead and tile.steps_at_once % QUAD == 0
  if not whole: raise ValueError(f"tile {tile}: its sizes contradict each other")

def check_stamp(found:Any) -> None:
  """Raises ValueError unless an entry's "stamp" has the present versions of attn, tinygrad and the compiler."""
  for name, now in stamp().items():
    then = found.get(name) if isinstance(found, dict) else None
    if then != now: raise ValueError(f"was made with {name} {values.shown(then)}, this is {now!r}")

@functools.cache
def warn(file:str, reason:str) -> None:
  """Warns, once for each reason, that the file of fastest tiles or an entry of it is ignored."""
  warnings.warn(f"{file}: {reason}. It is ignored; TUNE=1 of bench.py writes it again", stacklevel=2)

def load() -> dict[str, Any]:
  """Reads the file of fastest tiles; a missing file counts as empty, and so does a damaged one, after a warning."""
  file = path()
  try: text = user_cache.content_of(file).decode()
  except FileNotFoundError: return {}
  except (OSError, ValueError) as e:
    warn(str(file), f"cannot be read: {e}")
    return {}
  try: found = json.loads(text)
  except (ValueError, RecursionError) as e:
    warn(str(file), f"is not valid JSON: {e}")
    return {}
  if not isinstance(found, dict) or not all(isinstance(x, dict) for x in found.values()):
    warn(str(file), "is not what TUNE=1 writes")
    return {}
  return found

def kept_rows(p:Problem, arch:Chip, kernel:str, kind:type[AnyShape], check:RowCheck) -> list[UpTo[AnyShape]]:
  """Returns a list with a kernel's fastest measured tile description for problems like `p`, or an empty list if none is known."""
  # `kernel` is the kernel's name ("" for forward), and `check` raises ValueError for a row that the kernel cannot use. Dispatch tries the row before
  # the rows of attn's tables. On the emulator no tile counts.
  if not arch.tuned or (name := entry_of(p, kernel)) is None: return []
  if (entry := load().get(arch.name, {}).get(name)) is None: return []
  try:
    if (row := row_in_entry(entry, kind, head_class(p))) is not None: check(row, arch, p)
    check_stamp(entry.get("stamp"))
  except ValueError as e:
    warn(str(path()), f"{arch.name}, {name}: {e}")
    return []
  return [row] if row is not None else []

def winner(p:Problem, arch:Chip) -> list[UpTo[ForwardShape]]:
  """Returns a list with the fastest measured tile description of AMD's forward kernel for problems like `p`, or an empty list."""
  return kept_rows(p, arch, "", ForwardShape, check_matrix)

def entry_of(p:Problem, kernel:str) -> str|None:
  """Returns the name of the entry in the file of fastest tiles for problems like `p`; `kernel` is "" for forward. None if the problem is not
  tuned."""
  return None if (kind := problem_class(p)) is None else f"{kind} {kernel}".rstrip()

def store(p:Problem, arch:Chip, row:UpTo[Any]|None, seconds:float, kernel:str="") -> Path:
  """Writes the fastest tile description for problems like `p`, with its time in seconds, to the file of fastest tiles; returns the file's path."""
  # `row` has the tile, which took `seconds`; None: attn's own choice is fastest. Raises ValueError if `p` belongs to no class, OSError if the file
  # can't be written.
  file, kind = path(), entry_of(p, kernel)
  if kind is None:
    raise ValueError(f"{', '.join(p.options)}: TUNE=1 times tiles only for problems without these options")
  entry = {"tile": fields_of(row) if row is not None else None, "seconds": seconds, "stamp": stamp()}
  with user_cache.only_one(file):         # so that processes that tune at the same time don't overwrite each other's tiles
    found = load()
    found[arch.name] = {**found.get(arch.name, {}), kind: entry}
    user_cache.write(file, (json.dumps(found, indent=1, sort_keys=True) + "\n").encode())
  return file
