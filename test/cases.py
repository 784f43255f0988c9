"""Inputs and checks that the kernel tests share."""
from __future__ import annotations
from dataclasses import dataclass
from typing import Any, Callable
import numpy as np
from attn import flash_attention_fn
from attn.problem import Problem, problem_of
from attn.reference import exact, judge, rounded, same
from attn.tinygrad_compat import DEV, Context, Device, Tensor, dtypes

ARCHS = ("gfx942", "gfx950", "gfx1100", "gfx1201")       # one of each matrix unit
DTYPES = {"float16": dtypes.half, "bfloat16": dtypes.bfloat16, "float32": dtypes.float}

@dataclass(frozen=True)
class Inputs:
  q: np.ndarray
  k: np.ndarray
  v: np.ndarray

def normal(p:Problem, seed:int=0) -> Inputs:
  rng = np.random.default_rng(seed)
  draw = lambda *shape: rounded(rng.standard_normal(shape, dtype=np.float32), p.dtype)
  return Inputs(draw(p.B, p.H, p.Sq, p.D), draw(p.B, p.Hkv, p.Sk, p.D), draw(p.B, p.Hkv, p.Sk, p.Dv))

def arrange(x:np.ndarray, layout:str) -> np.ndarray:
  """(B, H, S, D) -> `layout`."""
  return x if layout == "bhsd" else x.swapaxes(1, 2) if layout == "bshd" else x.reshape(-1, *x.shape[2:])

def restore(x:np.ndarray, layout:str, shape:tuple[int, ...]) -> np.ndarray: return x.swapaxes(1, 2) if layout == "bshd" else x.reshape(shape)

def tensor(x:np.ndarray, dtype:str, device:str="EMU") -> Tensor:
  if dtype == "bfloat16": return Tensor((np.ascontiguousarray(x, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16), device=device).bitcast(dtypes.bfloat16)
  return Tensor(np.ascontiguousarray(x.astype({"float16": np.float16, "float32": np.float32}[dtype])), device=device)

def array(t:Tensor) -> np.ndarray:
  if t.dtype != dtypes.bfloat16: return t.numpy().astype(np.float32)
  return (t.bitcast(dtypes.ushort).numpy().astype(np.uint32) << 16).view(np.float32)

def problem(B:int=1, H:int=2, Hkv:int|None=None, Sq:int=64, Sk:int|None=None, D:int=64, Dv:int|None=None, dtype:str="float16", out_dtype:str|None=None,
            layout:str="bhsd", lse:bool=True, **options:Any) -> Problem:
  Hkv, Sk, Dv = Hkv or H, Sk or Sq, Dv or D
  shape = lambda h, s, d: (B*h, s, d) if layout == "nsd" else (B, s, h, d) if layout == "bshd" else (B, h, s, d)
  return problem_of(shape(H, Sq, Dv), shape(H, Sq, D), shape(Hkv, Sk, D), shape(Hkv, Sk, Dv), dtypes=[out_dtype or dtype, dtype, dtype, dtype, "float32"],
                    lse=((B*H, Sq) if layout == "nsd" else (B, H, Sq)) if lse else None, layout=layout, **options)

def run(p:Problem, x:Inputs, arch:str, **options:Any) -> tuple[np.ndarray, np.ndarray|None]:
  """o (B, H, Sq, Dv) and lse of the kernel under test, on the emulator."""
  with Context(DEV=f"EMU::{arch}"):
    q, k, v = (tensor(arrange(a, p.layout), p.dtype).realize() for a in (x.q, x.k, x.v))
    shape = arrange(np.empty((p.B, p.H, p.Sq, p.Dv), np.bool_), p.layout).shape
    outs = [Tensor.empty(*shape, dtype=DTYPES[p.out_dtype], device="EMU")]
    if p.return_lse: outs.append(Tensor.empty(*((p.B*p.H, p.Sq) if p.layout == "nsd" else (p.B, p.H, p.Sq)), dtype=dtypes.float, device="EMU"))
    fxn = flash_attention_fn(layout=p.layout, softmax_scale=p.softmax_scale, return_lse=p.return_lse, arch=arch, **options)
    results = Tensor.custom_kernel(*outs, q, k, v, fxn=fxn)[:len(outs)]
    Tensor.realize(*results)
    o = restore(array(results[0]), p.layout, (p.B, p.H, p.Sq, p.Dv))
    return o, results[1].numpy().reshape(p.B, p.H, p.Sq) if p.return_lse else None

def check(arch:str, make:Callable[[Problem], Inputs]=normal, **parameters:Any) -> None:
  """Poses the problem, runs the kernel, and holds o and lse to the contract."""
  p = problem(**parameters)
  options = {name: parameters[name] for name in ("causal", "window") if name in parameters}
  x = make(p)
  o, lse = run(p, x, arch, **options)
  want, want_lse = exact(x.q, x.k, x.v, p.softmax_scale, p.window, p.offset)
  text, text_lse = same(x.q, x.k, x.v, p.softmax_scale, p.window, p.offset, dtype=p.dtype, out_dtype=p.out_dtype)
  assert (verdict := judge(o, want, text)).ok, f"o: {verdict}"
  if lse is not None: assert (verdict := judge(lse, want_lse, text_lse)).ok, f"lse: {verdict}"
