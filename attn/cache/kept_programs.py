"""Kernels that this machine has lowered and printed once are not again in the next process: the source of each, and how it is launched, is kept in
the user's cache directory. Its machine code is kept by who compiles it.

What is found goes by all that a source is made of: the kernel's AST and tinygrad's settings, as in tinygrad's own cache within a process; the text of
attn's operations; and the files of tinygrad that lower and print. Kernels of ours for CUDA and AMD are kept, but not those that take a Variable.
"""
from __future__ import annotations
import functools, hashlib, json
from pathlib import Path
from attn.ops.renderers import OperationsPrinter
from attn.tinygrad_compat import (CCACHE, DEBUG, VIZ, Ops, Renderer, ToProgram, UOp, launch_of, program_key, program_of_launch, programs_through,
                                  tinygrad_folder)
from attn.cache.user_cache import is_kept, kept

KEPT_ON = ("CUDA", "AMD")
PRINTING = ("chips", "compilers", "ops", "tinygrad_compat", "cache/kept_programs.py")    # of attn
LOWERING = ("codegen", "dtype.py", "renderer", "uop")                                 # of tinygrad

def files(folder:Path, names:tuple[str, ...]) -> list[Path]:
  """The modules that these are or have in them."""
  return [path for name in names for path in sorted((folder/name).rglob("*.py") if (folder/name).is_dir() else [folder/name])]

@functools.cache
def printed_by() -> str:
  """A digest of the files of attn that say how a kernel is printed, and of names, sizes and times of tinygrad's that lower it."""
  digest = hashlib.sha256()
  for path in files(Path(__file__).parent.parent, PRINTING): digest.update(path.read_bytes())
  for path in files(Path(tinygrad_folder), LOWERING): digest.update(f"{path} {(found := path.stat()).st_size} {found.st_mtime_ns}".encode())
  return digest.hexdigest()

def key_of(ast:UOp, renderer:Renderer) -> tuple[str, ...]|None:
  """What a kernel is kept by; None for one that is not. DEBUG and VIZ show how a kernel is lowered, and CCACHE=0 asks for no caches."""
  ours = ast.op is Ops.SINK and ast.arg.name.startswith("attn_") and isinstance(renderer, OperationsPrinter) and renderer.target.device in KEPT_ON
  return (printed_by(), *program_key(ast, renderer)) if ours and CCACHE and not VIZ and DEBUG < 3 and not ast.variables() else None

def kept_program(lowered:ToProgram, ast:UOp, renderer:Renderer) -> UOp:
  """The compiled PROGRAM of a kernel, lowered by `lowered` where no process before has done it."""
  if (key := key_of(ast, renderer)) is None: return lowered(ast, renderer)
  made = list[UOp]()
  def make() -> bytes:
    made.append(lowered(ast, renderer))
    return json.dumps(launch_of(made[0])).encode()
  launch = json.loads(kept("program", key, make))
  if made: return made[0]
  return lowered(ast if launch is None else program_of_launch(launch, ast, renderer), renderer)

def has_program(ast:UOp, renderer:Renderer) -> bool:
  """Whether a process before has lowered this kernel."""
  return (key := key_of(ast, renderer)) is not None and is_kept("program", key)

@functools.cache
def keep_programs() -> None:
  """From now on tinygrad finds what is kept."""
  programs_through(kept_program)
