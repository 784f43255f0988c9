"""Provides the clang of other LLVM releases than the installed one, to look at the machine code that these clangs make of attn's kernels."""
from __future__ import annotations
import os, shutil, subprocess, sys, tempfile
from pathlib import Path
from attn.cache import user_cache
from attn.compilers.clang import Toolchain, inspected, packaged
from attn.compilers.found import NoCompiler

# Each release comes from a version of the PyPI package `ziglang`. pip installs it into a separate directory of the user's cache directory, where it
# stays.

ZIGLANG = {19: "0.14.1", 20: "0.15.2", 21: "0.16.0", 22: "0.17.1"}    # release of LLVM -> version of ziglang
OLDER = tuple(release for release in ZIGLANG if release < max(ZIGLANG))

def _get(version:str) -> Path:
  """Returns the directory with a version of the package `ziglang`, which pip installs there if it is missing."""
  place = user_cache.directory()/"clangs"/f"ziglang-{version}"
  if place.is_dir(): return place
  try:
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as folder:
      done = subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--target",
                             unpacked := os.path.join(folder, "unpacked"), f"ziglang=={version}"], capture_output=True, text=True, check=False)
      if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.strip().splitlines() or ["nothing"]
        raise NoCompiler(f"pip could not get ziglang {version}: {said[-1]}")
      try: os.replace(unpacked, place)      # in one step: another process sees the whole directory or nothing
      except OSError:
        if not place.is_dir(): raise          # otherwise another process was faster
  except OSError as e: raise NoCompiler(f"ziglang {version} can't be stored in {place.parent}: {e}") from None
  return place

def toolchain_of(llvm:int) -> Toolchain:
  """Returns the clang of the LLVM release `llvm`, which pip installs if it is not the installed package's."""
  if llvm not in ZIGLANG: raise ValueError(f"llvm={llvm}: must be one of {', '.join(map(str, ZIGLANG))}")
  if isinstance(own := packaged(), Toolchain) and own.llvm == llvm: return own
  version = ZIGLANG[llvm]
  zig = shutil.which("zig", path=str(_get(version)/"ziglang"))
  if zig is None: raise NoCompiler(f"ziglang {version} in {_get(version)} has no zig that can be run: remove that directory to install it again")
  found = inspected((zig, "clang"), f"ziglang {version}")
  if isinstance(found, str): raise NoCompiler(f"ziglang {version} is {found}")
  return found
