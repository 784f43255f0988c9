"""Sources of kernels that one process keeps for the next: the first process lowers and renders a kernel (makes CUDA or HIP source from UOps), and
later processes read the source."""
from __future__ import annotations
import functools, hashlib, json
from pathlib import Path
from attn.ops.renderers import OperationsPrinter
from attn.tinygrad_compat import (CCACHE, DEBUG, VIZ, Ops, Renderer, ToProgram, UOp, launch_of, program_key, program_of_launch, programs_through,
                                  tinygrad_folder)
from attn.cache.user_cache import is_kept, kept

# The user's cache directory holds the source and the launch parameters of each kernel. The compilers keep the machine code themselves. The key of an
# entry covers everything that a source depends on: the kernel's AST and tinygrad's settings, as in tinygrad's own cache within a process; the source
# files by which attn renders operations; and the files of tinygrad that lower and render kernels. Only attn's kernels for CUDA and AMD are kept, and
# no kernel with a Variable.

KEPT_ON = ("CUDA", "AMD")
PRINTING = ("chips", "compilers", "ops", "tinygrad_compat", "cache/kept_programs.py")    # files and folders of attn
LOWERING = ("codegen", "dtype.py", "renderer", "uop")                                    # files and folders of tinygrad

def files(folder:Path, names:tuple[str, ...]) -> list[Path]:
  """Returns the paths of the Python files `names` in a folder; a name of a subfolder stands for all Python files below it."""
  return [path for name in names for path in sorted((folder/name).rglob("*.py") if (folder/name).is_dir() else [folder/name])]

@functools.cache
def printed_by() -> str:
  """Returns a hash of all source files of attn and tinygrad on which the rendered source of a kernel depends."""
  # Of attn's files the contents count, of tinygrad's files the names, sizes and times.
  digest = hashlib.sha256()
  for path in files(Path(__file__).parent.parent, PRINTING): digest.update(path.read_bytes())
  for path in files(Path(tinygrad_folder), LOWERING): digest.update(f"{path} {(found := path.stat()).st_size} {found.st_mtime_ns}".encode())
  return digest.hexdigest()

def key_of(ast:UOp, renderer:Renderer) -> tuple[str, ...]|None:
  """Returns the key of a kernel in the cache of kernel sources, or None if the cache does not keep this kernel's source."""
  ours = ast.op is Ops.SINK and ast.arg.name.startswith("attn_") and isinstance(renderer, OperationsPrinter) and renderer.target.device in KEPT_ON
  # VIZ, and DEBUG of at least 3, show how a kernel is lowered. CCACHE=0 switches caches off.
  return (printed_by(), *program_key(ast, renderer)) if ours and CCACHE and not VIZ and DEBUG < 3 and not ast.variables() else None

def kept_program(make_program:ToProgram, ast:UOp, renderer:Renderer) -> UOp:
  """Returns a compiled kernel (PROGRAM): from its kept source if the cache has one, otherwise by tinygrad's function `make_program`."""
  if (key := key_of(ast, renderer)) is None: return make_program(ast, renderer)
  made = list[UOp]()
  def make() -> bytes:
    made.append(make_program(ast, renderer))
    return json.dumps(launch_of(made[0])).encode()
  launch = json.loads(kept("program", key, make))
  if made: return made[0]
  return make_program(ast if launch is None else program_of_launch(launch, ast, renderer), renderer)

def has_program(ast:UOp, renderer:Renderer) -> bool:
  """Returns whether an earlier process has kept this kernel's source."""
  return (key := key_of(ast, renderer)) is not None and is_kept("program", key)

@functools.cache
def keep_programs() -> None:
  """Makes tinygrad read the sources of kernels from the user's cache directory and keep new sources there, for the rest of the process."""
  programs_through(kept_program)
