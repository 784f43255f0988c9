"""Check that the machine has everything that a measurement needs: if not, one sentence tells the user what is missing."""
from __future__ import annotations
import importlib.util
from attn.compilers.renderer import missing_c_compiler
from attn.tinygrad_compat import Device, device_of

GPU, ANY = "a GPU (DEV=CUDA or DEV=AMD)", "a device (DEV=CUDA, DEV=AMD or DEV=EMU::gfx942)"

def need(program:str, *packages:str, device:str|None=None, kind:str=GPU) -> None:
  """Raises SystemExit with a sentence for the user of `program` if one of `packages` is not installed or `device` does not open."""
  # `device` None is tinygrad's default device. `kind` says which devices the program can use.
  if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
    raise SystemExit(f"{program}: needs {' and '.join(missing)}, and an NVIDIA GPU: it times PyTorch's attention beside attn's")
  try: device_of(name := device or Device.DEFAULT)
  except Exception as e: raise SystemExit(f"{program}: needs {kind}, but {device or 'the default device'} does not open ({e})") from None
  if (missing_compiler := missing_c_compiler(name)) is not None: raise SystemExit(f"{program}: needs {kind}; {missing_compiler}")
