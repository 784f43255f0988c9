"""Functions that the tests of the API share: they call `attention` on the emulator and compare the results with float64."""
from __future__ import annotations
import contextlib, os, shutil, subprocess, sys
from pathlib import Path
from typing import Any, Callable, Iterator
import numpy as np
import pytest
import attn
from attn.calls.options import DEFAULTS
from attn.choose import tile_lists
from attn.problem import Problem
from attn.tinygrad_compat import Context, Tensor
from cases import DTYPES, Inputs, arrange, array, hold, normal, problem, restore, tensor

ROOT = Path(__file__).resolve().parent.parent
CLANG_OF_ZIG = str(ROOT/"examples/clang_of_zig.sh")

@contextlib.contextmanager
def computed_on(device:str, kernel:str="") -> Iterator[None]:
  # Context in which tinygrad's device is `device`, and ATTN_KERNEL is `kernel`.
  with Context(DEV=device), pytest.MonkeyPatch.context() as patch:
    patch.setenv("ATTN_KERNEL", kernel)
    # Without a clang, the clang of the package ziglang compiles.
    if device == "CPU" and shutil.which("clang") is None: patch.setenv("CC", CLANG_OF_ZIG)
    yield

def run_on_a_cpu(script:str, timeout:int=300) -> None:
  # Runs a Python script in a new process with DEV=CPU and the clang of the package ziglang; the script must end without an error.
  pytest.importorskip("ziglang")
  # The script may import test modules of the API and of functions.
  environment = {**os.environ, "DEV": "CPU", "CC": CLANG_OF_ZIG, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                 "PYTHONPATH": os.pathsep.join(str(ROOT/folder) for folder in ("", "test", "test/api", "test/functions"))}
  done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=timeout)
  assert done.returncode == 0, done.stderr[-2000:]

def emulated(arch:str, kernel:str="") -> contextlib.AbstractContextManager[None]:
  # Context in which tinygrad's device is the emulator of the chip `arch`, and ATTN_KERNEL is `kernel`.
  return computed_on(f"EMU::{arch}", kernel)

@contextlib.contextmanager
def lists(wanted:bool) -> Iterator[None]:
  # Context in which every kernel that can loop over a list of visible tiles does so, or (unless `wanted`) none does.
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(tile_lists, "LEAST_TILES", 0 if wanted else 2**62)
    patch.setattr(tile_lists, "LEAST_HEADS", 1)
    yield

def draw(*shape:int, dtype:str="float16", seed:int=0) -> Tensor:
  return tensor(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32), dtype).realize()

def whole(t:Tensor) -> Tensor:
  # Gathers a tensor that may be divided over devices onto the first device.
  # Reading a divided tensor directly would make tinygrad move it to the CPU.
  return t.to(t.device[0]).contiguous() if isinstance(t.device, tuple) else t

def extra(name:str, x:np.ndarray, bias_dtype:str="float32") -> Tensor:
  return Tensor(x, device="EMU") if x.dtype in (np.int32, np.uint32) else tensor(x, bias_dtype if name == "bias" else "float32")

def check_attention(arch:str="gfx942", kernel:str="", make:Callable[[Problem], Inputs]=normal, *, extras:dict[str, np.ndarray]|None=None,
                    place:Callable[[str, Tensor], Tensor]=lambda _, t: t, **parameters:Any) -> tuple[np.ndarray, np.ndarray]:
  # Runs `attention` and checks that each element of o and lse is within its error limit (docs/contract.md); returns o and lse.
  # `parameters` are the arguments of `problem`, `make` draws q, k and v, and `extras` holds optional tensors such as a bias by name. `kernel` is the
  # name of the kernel to run; "" leaves the choice to dispatch. `place` receives each tensor with its name, and may move it to other devices. o is
  # returned as (B, H, Sq, Dv), lse as (B, H, Sq).
  extras = extras or {}
  p = problem(extras=extras, **parameters)
  x, call = make(p), {name: value for name, value in parameters.items() if name in DEFAULTS and name != "out_dtype"}
  with emulated(arch, kernel):
    q, k, v = (place(name, tensor(arrange(a, p.layout), p.dtype)) for name, a in (("q", x.q), ("k", x.k), ("v", x.v)))
    o, lse = attn.attention(q, k, v, return_lse=True, out_dtype=DTYPES[p.out_dtype], **call,
                            **{name: place(name, extra(name, a, p.bias_dtype)) for name, a in extras.items()})
    assert (o.device, o.uop.axis) == (q.device, q.uop.axis) and o.dtype == DTYPES[p.out_dtype]
    o, lse = whole(o), whole(lse)
    Tensor.realize(o, lse)
    B, length = (1, p.total_q) if p.varlen else (p.B, p.Sq)
    got, got_lse = restore(array(o), p.layout, (B, p.H, length, p.Dv)), lse.numpy().reshape(B, p.H, length)
  hold(p, x, extras, got, got_lse)
  return got, got_lse

def int32(*values:int) -> np.ndarray: return np.array(values, np.int32)
def floats(*shape:int, seed:int=1) -> np.ndarray: return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
