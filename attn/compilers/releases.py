"""The clangs of other releases of LLVM, beside the one that is installed: what users' compilers make of the kernels is told by trying.

Each is that of a version of the PyPI package `ziglang`. pip gets it into a directory of its own in the user's cache directory, where it is kept.
"""
from __future__ import annotations
import os, shutil, subprocess, sys, tempfile
from pathlib import Path
from attn.cache import user_cache
from attn.compilers.clang import Toolchain, inspected, packaged
from attn.compilers.found import NoCompiler

ZIGLANG = {19: "0.14.1", 20: "0.15.2", 21: "0.16.0", 22: "0.17.1"}    # release of LLVM -> version of ziglang
OLDER = tuple(release for release in ZIGLANG if release < max(ZIGLANG))

def _get(version:str) -> Path:
  """The directory of `ziglang` of this version. Raises NoCompiler, with pip's words, where it can't be had."""
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
      try: os.replace(unpacked, place)      # at once: another process sees all of it or none
      except OSError:
        if not place.is_dir(): raise          # else another process was faster
  except OSError as e: raise NoCompiler(f"no room for ziglang {version} in {place.parent}: {e}") from None
  return place

def toolchain_of(llvm:int) -> Toolchain:
  """The clang of this release of LLVM: the packaged one, else one that pip gets. Raises ValueError for a release that is not in ZIGLANG,
  and NoCompiler where it can't be had."""
  if llvm not in ZIGLANG: raise ValueError(f"llvm={llvm}: must be one of {', '.join(map(str, ZIGLANG))}")
  if isinstance(own := packaged(), Toolchain) and own.llvm == llvm: return own
  version = ZIGLANG[llvm]
  zig = shutil.which("zig", path=str(_get(version)/"ziglang"))
  if zig is None: raise NoCompiler(f"ziglang {version} in {_get(version)} has no zig that can be run: remove that directory")
  found = inspected((zig, "clang"), f"ziglang {version}")
  if isinstance(found, str): raise NoCompiler(f"ziglang {version} is {found}")
  return found
