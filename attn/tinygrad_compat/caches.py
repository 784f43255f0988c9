"""tinygrad's caches of kernels, and the description by which another process can use a compiled kernel (a PROGRAM)."""
from __future__ import annotations
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from tinygrad import codegen, schedule
from tinygrad.codegen import to_program_key
from tinygrad.engine import realize
from tinygrad.renderer import Estimates, Renderer
from tinygrad.uop.ops import Ops, ProgramInfo, UOp
from attn.tinygrad_compat.devices import device_of
from attn.tinygrad_compat.uops import MOST_ASTS, new_uop

@functools.lru_cache(MOST_ASTS)
def ast_of(make:Callable[..., UOp], *args:Any) -> UOp:
  """Returns `make(*args)`, a kernel's AST; the ASTs of the latest calls come from a cache."""
  # Making an AST takes 10 to 150 ms, and tinygrad asks for it in each call of `Tensor.custom_kernel`. `make` must be the identical object for the
  # same kernel.
  return make(*args)

def forget_oldest_kernels(prefix:str, most:int) -> None:
  """Drops the oldest kernels whose names begin with `prefix` from tinygrad's caches, until `most`//2 are left, if there are more than `most`."""
  # tinygrad itself would keep every kernel forever. A kernel that a TinyJit or another object has captured stays in use there.
  if len(codegen.to_program_cache) <= most: return
  ours = [key for key, program in codegen.to_program_cache.items() if program.src[0].arg.name.startswith(prefix)]
  if len(ours) <= most: return
  # Half of `most` are left.
  oldest = ours[:len(ours) - most//2]
  programs, asts = {codegen.to_program_cache.pop(key).key for key in oldest}, {key[0] for key in oldest}
  loaded = [key for key in realize.runtime_cache if key[0] in programs]
  for device in {device for _, device in loaded}: device_of(device).synchronize()      # so that no dropped kernel is still running
  for key in loaded: del realize.runtime_cache[key]
  launched = [key for key, linear in schedule.schedule_cache.items() if any(call.src[0].key in asts for call in linear.src)]
  for schedule_key in launched: del schedule.schedule_cache[schedule_key]

def program_key(ast:UOp, renderer:Renderer) -> tuple[str, ...]:
  """Returns a key for the kernel that `renderer` compiles from an AST, the same in every process."""
  # The key contains everything that tinygrad's own key contains.
  key, kind, *rest = to_program_key(ast, renderer)
  return (key.hex(), f"{kind.__module__}.{kind.__qualname__}", *map(str, rest))

def launch_of(program:UOp) -> dict[str, Any]|None:
  """Returns source and launch sizes of a compiled kernel (PROGRAM) as values that JSON can store, or None if that is impossible."""
  info, own = program.arg, program.src[0].arg
  estimates, sizes = own.estimates, (info.global_size, info.local_size)
  numbers = (*info.global_size, *(info.local_size or ()), estimates.ops, estimates.lds, estimates.mem)
  # This is so if a size is a Variable.
  if info.vars or not all(isinstance(n, int) for n in numbers): return None
  return {"name": own.name, "source": program.src[2].arg, "estimates": [estimates.ops, estimates.lds, estimates.mem], "sizes": sizes,
          "slots": [u.arg.slot for u in program.src[1].src if u.op is Ops.PARAM], "globals": info.globals, "outs": info.outs, "ins": info.ins}

def program_of_launch(launch:dict[str, Any], ast:UOp, renderer:Renderer) -> UOp:
  """Makes a PROGRAM, with source but without machine code, from a kernel's AST and the values that `launch_of` returned in an earlier process."""
  params = {u.arg.slot: u for u in ast.toposort() if u.op is Ops.PARAM}
  sink = new_uop(Ops.SINK, arg=replace(ast.arg, name=launch["name"], estimates=Estimates(*launch["estimates"])))
  linear = new_uop(Ops.LINEAR, tuple(params[slot] for slot in launch["slots"]))
  global_size, local_size = (tuple(size) if size is not None else None for size in launch["sizes"])
  takes = {name: tuple(launch[name]) for name in ("globals", "outs", "ins")}
  info = ProgramInfo(launch["name"], global_size or (), local_size, **takes, target=renderer.target)
  return new_uop(Ops.PROGRAM, (sink, linear, new_uop(Ops.SOURCE, arg=launch["source"])), arg=info)
