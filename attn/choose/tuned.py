"""The tiles that TUNE=1 of bench.py found fastest by time, kept in the user's cache directory. Dispatch asks here on real devices only.

The file is {chip: {problem class: {"tile": fields of a Candidate, or null where no tile beat what dispatch does without, "seconds": its time}}}.
"""
from __future__ import annotations
import json, os
from dataclasses import asdict
from pathlib import Path
from typing import Any
from attn.arch import Arch
from attn.choose.candidates import Candidate
from attn.problem import Problem

CLASSES = (64, 128, 192, 256)   # head dimensions: a class goes up to its number

def head_class(p:Problem) -> int:
  """The class of a problem's head dimensions, the larger one where they differ."""
  return next((x for x in CLASSES if max(p.D, p.Dv) <= x), max(p.D, p.Dv))

def problem_class(p:Problem) -> str|None:
  """Problems of one class share a tile: the same but for lengths and heads, and those up to the next power of two. None for problems with an option
  that takes registers of its own: they are not timed."""
  if p.options: return None
  mask = "window" if p.window[0] >= 0 else "causal" if p.window[1] >= 0 else "full"
  heads, queries, keys = (1 << (n - 1).bit_length() for n in (p.B*p.H, p.Sq, p.Sk))
  return f"{p.dtype} D{head_class(p)} {mask} {heads} heads of {p.H//p.Hkv} to one of K, {queries}x{keys}"

def path() -> Path|None:
  """Where the winners are kept; None where platformdirs, which knows the place, is not installed."""
  try: import platformdirs
  except ImportError: return None
  return Path(platformdirs.user_cache_dir("attn"))/"tune.json"

def load() -> dict[str, Any]:
  """The whole file; a cache that is missing or damaged is an empty one."""
  if (file := path()) is None: return {}
  try: found = json.loads(file.read_text())
  except (OSError, ValueError): return {}
  return found if isinstance(found, dict) else {}

def winner(p:Problem, arch:Arch) -> Candidate|None:
  """The tile that was fastest for the class of `p` on this chip, if it is known and `arch` is a real device's."""
  if not arch.tuned or (kind := problem_class(p)) is None: return None
  try: return Candidate(**load()[arch.name][kind]["tile"])
  except (KeyError, TypeError): return None

def store(p:Problem, arch:Arch, tile:Candidate|None, seconds:float) -> Path:
  """Keeps the winner of the class of `p`, None being the table's own choice. Raises ValueError where there is no place or no class for it."""
  file, kind = path(), problem_class(p)
  if file is None: raise ValueError("no place to keep the winner: platformdirs is not installed, pip install -e '.[bench]' brings it")
  if kind is None: raise ValueError(f"a problem with {', '.join(p.options)} belongs to no class of which a winner is kept")
  found = load()
  found[arch.name] = {**found.get(arch.name, {}), kind: {"tile": asdict(tile) if tile is not None else None, "seconds": seconds}}
  file.parent.mkdir(parents=True, exist_ok=True)
  written = file.with_name(f"{file.name}.{os.getpid()}")
  written.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
  os.replace(written, file)
  return file
