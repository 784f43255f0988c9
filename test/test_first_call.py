"""What the first call of a kernel takes on the way to the device, where no device is needed to see it. `python -m attn.measure.latency` measures it."""
from __future__ import annotations
from types import SimpleNamespace
from typing import Any
import pytest
from tinygrad.helpers import Target
from attn.ops.renderers import OperationsCUDARenderer, OperationsNVCCRenderer
from attn.tinygrad_compat import DEBUG, Context, TinyELF, dynamic_shared_program

@pytest.mark.parametrize("renderer", (OperationsCUDARenderer, OperationsNVCCRenderer))
@pytest.mark.parametrize(("arch", "named"), (("sm_80", "sm_80"), ("sm_90", "sm_90a")))
def test_machine_code(renderer:Any, arch:str, named:str, monkeypatch) -> None:
  """The compiler gives machine code for the chip itself, under a key of tinygrad's disk cache that PTX never had; the renderer keeps its target."""
  from tinygrad.runtime.autogen import nvrtc
  monkeypatch.setattr(nvrtc, "nvrtcVersion", lambda major, minor: 0)       # the library may not be there
  made = renderer(Target("CUDA", "", arch))
  assert (made.compiler.arch, made.compiler.ptx, made.target.arch) == (named, False, arch)
  assert made.compiler.cachekey not in (None, type(made.compiler)(named, ptx=True, cache_key="cuda").cachekey)

@pytest.mark.parametrize(("lib", "shown"), ((b"\x7fELF\x02\x80\xff", 4), (b".version 9.0", 5)))
def test_debug_takes_machine_code(lib:bytes, shown:int, monkeypatch) -> None:
  """With DEBUG=5 tinygrad decodes what it loads as text, and ours is none; PTX it still prints."""
  from tinygrad.runtime import ops_cuda
  monkeypatch.setattr(ops_cuda, "CUDAProgram", lambda dev, obj, smem: (DEBUG.value, smem))
  with Context(DEBUG=5):
    assert dynamic_shared_program(SimpleNamespace(), TinyELF(lib, "attn_smem65536", Target("CUDA", "", "sm_90"), ())) == (shown, 65536)
    assert DEBUG.value == 5
