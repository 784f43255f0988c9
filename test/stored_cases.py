"""Checks for tests of kernels over keys and values that are stored in 8 bits with a scale for each row."""
from __future__ import annotations
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
import numpy as np
from attn.accuracy import judge, law_of
from attn.choose.dispatch import WIDENING, Choice, Work, choose_tile
from attn.choose.preparation import widened_tile
from attn.problem import STORED, Pages, Problem, Strided, problem_of
from attn.reference import Options, arrange, rounded
from attn.tinygrad_compat import Context, Tensor

from cases import SCORE_OPTIONS, chip, dropped, numbers_of_rows, outputs_of_launches, tensor

@dataclass(frozen=True)
class Stored:
  # Inputs with keys and values of 8 bits, and one scale for each of their rows.
  # q is (B, H, Sq, D), k and v are (B, Hkv, Sk, D), the scales (B, Hkv, Sk).
  q: np.ndarray
  k: np.ndarray
  v: np.ndarray
  k_scales: np.ndarray
  v_scales: np.ndarray
  rotary: np.ndarray|None = None     # latent attention: the last columns of K, in 16 bits. k is then v

def float_of(byte:int, kind:str) -> float:
  # Returns the number for which a byte stands in `kind`, an 8-bit float format e4m3.
  # Sources: OCP 8-bit Floating Point Specification, and the CDNA3 ISA document for fp8e4m3fnuz.
  bias, exponent, mantissa = {"fp8e4m3": 7, "fp8e4m3fnuz": 8}[kind], byte >> 3 & 15, byte & 7
  if (byte == 0x80 and kind == "fp8e4m3fnuz") or (byte & 0x7f == 0x7f and kind == "fp8e4m3"): return math.nan
  size = mantissa*2.0**(-2 - bias) if exponent == 0 else (8 + mantissa)*2.0**(exponent - bias - 3)
  return -size if byte & 0x80 else size

def numbers_of(stored:np.ndarray, kind:str) -> np.ndarray:
  # Returns the numbers for which stored bytes of the format `kind` stand, as float64, not multiplied by their scales.
  return stored.astype(np.float64) if kind == "int8" else np.array([float_of(i, kind) for i in range(256)])[stored]

def quantised(x:np.ndarray, kind:str) -> tuple[np.ndarray, np.ndarray]:
  # Rounds the rows of x to the 8-bit format `kind`; returns the stored bytes and the scale of each row.
  # A row with NaN or inf gets the scale NaN and numbers 0.
  largest = np.abs(x).max(-1)
  scales = (np.where(np.isfinite(largest), largest, np.nan)/{"int8": 127, "fp8e4m3": 448, "fp8e4m3fnuz": 240}[kind]).astype(np.float32)
  with np.errstate(all="ignore"): y = np.nan_to_num(x/scales[..., None], nan=0, posinf=0, neginf=0)
  if kind == "int8": return np.rint(y).astype(np.int8), scales
  sizes = numbers_of(np.arange(0x80), kind)
  count = int(np.isfinite(sizes).sum())
  nearest = np.searchsorted((sizes[1:count] + sizes[:count - 1])/2, np.abs(y))
  return (nearest + np.where((y < 0) & (nearest > 0), 0x80, 0)).astype(np.uint8), scales

def normal_rows(p:Problem, seed:int=0) -> Stored:
  # Makes normally distributed inputs and rounds k and v to 8 bits.
  rng = np.random.default_rng(seed)
  # Each row of k and v has its own standard deviation, from 0.1 to 10.
  k, v = (rng.standard_normal((p.B, p.Hkv, p.Sk, width))*np.exp(rng.uniform(-2.3, 2.3, (p.B, p.Hkv, p.Sk, 1))) for width in (p.D, p.Dv))
  rotary = rounded(k[..., p.Dv:].astype(np.float32), p.dtype) if p.v_in_k else None
  if p.v_in_k: k = v
  (k, k_scales), (v, v_scales) = quantised(k, p.stored), quantised(v, p.stored)
  rows = (p.B, p.H, p.Sq, p.D) if not p.varlen else (1, p.H, p.total_q, p.D)
  return Stored(rounded(rng.standard_normal(rows, dtype=np.float32)*0.5, p.dtype), k, v, k_scales, v_scales, rotary)

def in_pages(x:np.ndarray, p:Problem, table:np.ndarray) -> np.ndarray:
  # Copies rows (B, Hkv, Sk, ...) into pages (pages, page_size, Hkv, ...), to the pages that the block table names.
  assert p.pages is not None
  pages = np.zeros((p.pages.count, p.pages.size, p.Hkv, *x.shape[3:]), x.dtype)
  for b, row in enumerate(table):
    for n, page in enumerate(row): pages[page] = x[b, :, n*p.pages.size:(n + 1)*p.pages.size].swapaxes(0, 1)
  return pages

def stored_problem(B:int=1, H:int=4, Hkv:int=2, Sq:int=20, Sk:int=150, D:int=64, Dv:int|None=None, dtype:str="float16", out_dtype:str|None=None,
                   page_size:int=0, scale_dtype:str="float32", lse:bool=True, extras:dict[str, np.ndarray]|None=None, bias_dtype:str="float32",
                   stored:str="int8", **options:Any) -> Problem:
  # Builds a problem with keys and values of the 8-bit format `stored`, in pages of `page_size` rows unless this is 0.
  Dv, pages = Dv or D, Pages(page_size, B*Sk//page_size, Sk//page_size) if page_size else None
  def view(width:int) -> Strided:
    if pages is None: return Strided(B*Hkv*Sk*width, 0, Hkv*Sk*width, Sk*width, width)
    return Strided(B*Sk*Hkv*width, 0, page_size*Hkv*width, width, Hkv*width)
  of_extras = {n: (x.shape, bias_dtype if n == "bias" else str(x.dtype)) for n, x in (extras or {}).items()}
  layout = options.pop("layout", "bhsd")
  of_q = {"bhsd": (B, H, Sq), "bshd": (B, Sq, H), "thd": (Sq, H)}[layout]
  of_keys = (B, Sk, Hkv) if layout == "bshd" and not pages else (B, Hkv, Sk)
  of_lse, latent = (H, Sq) if layout == "thd" else (B, H, Sq), options.get("v_in_k", False)
  of_v = {} if latent else {"v_scale_view": view(1)}
  if latent and Dv < D: of_v["k_rotary_view"] = view(D - Dv)
  return problem_of((*of_q, Dv), (*of_q, D), (*of_keys, D), (*of_keys, Dv), dtypes=[out_dtype or dtype, dtype, *[STORED[stored]]*2, "float32"],
                    lse=of_lse if lse else None, layout=layout,
                    views=(view(Dv if latent else D), view(Dv)), pages=pages, stored=stored, scale_dtype=scale_dtype, k_scale_view=view(1),
                    extras=of_extras, **of_v, **options)

def run_stored(p:Problem, x:Stored, arch:str, extras:dict[str, np.ndarray], tile:Any=None,
               widened:bool=False) -> tuple[np.ndarray, np.ndarray|None]:
  # Runs the forward kernel, and `combine` if p has splits, on 8-bit keys and values; returns o (B, H, Sq, Dv) and lse.
  # By default dispatch chooses the tile. With `widened`, another kernel converts k and v before.
  tile, device = tile or (widened_tile if widened else choose_tile)(p, chip(arch)), "CUDA" if arch == "CUDA" else "EMU"
  choice = Choice(WIDENING if widened else "tiled" if tile.kernel == "tiled" else "split_kv", Work(tile, p.num_splits), chip(arch), ())
  place = (lambda a: in_pages(a, p, extras["block_table"])) if p.pages is not None else (lambda a: a)
  with Context(DEV=device if device == "CUDA" else f"EMU::{arch}"):
    done = {"q": tensor(arrange(x.q, p.layout), p.dtype, device)}
    for n in ("k", "v"): done[n] = Tensor(np.ascontiguousarray(place(getattr(x, n))).reshape(-1), device=device)
    for n in ("k_scales", "v_scales"): done[n] = tensor(place(getattr(x, n)).reshape(-1), p.scale_dtype, device)
    if x.rotary is not None: done["k_rotary"] = tensor(place(x.rotary).reshape(-1), p.dtype, device)
    return outputs_of_launches(p, choice, done, extras, device)

def dequantised(x:Stored, kind:str) -> tuple[np.ndarray, np.ndarray]:
  # Returns k and v in float64: the 8-bit numbers times the scales of their rows.
  with np.errstate(all="ignore"):
    k, v = (numbers_of(a, kind)*s[..., None].astype(np.float64) for a, s in ((x.k, x.k_scales), (x.v, x.v_scales)))
  return k if x.rotary is None else np.concatenate([k, x.rotary.astype(np.float64)], axis=-1), v

def hold_stored(p:Problem, x:Stored, extras:dict[str, np.ndarray], o:np.ndarray, lse:np.ndarray|None,
                flushes:bool=False) -> None:
  # Checks that a kernel's o and lse, for dequantised rows, are within their error limits (docs/contract.md).
  # `flushes` says that the chip treats 16-bit denormals as zero.
  (k, v), options = dequantised(x, p.stored), {n: extras[n] for n in SCORE_OPTIONS if n in extras} | dropped(p, extras) | numbers_of_rows(p)
  law, of_lse = law_of(x.q, k, v, p.softmax_scale, p.window, p.offset, Options(top_left=p.top_left, **options), dtype=p.dtype, out_dtype=p.out_dtype,
                       v_scales=x.v_scales, flushes=flushes)
  assert (verdict := judge(o, law)).ok, f"o: {verdict}"
  if lse is not None: assert (verdict := judge(lse, of_lse)).ok, f"lse: {verdict}"

def check_stored(arch:str, make:Callable[[Problem], Stored]=normal_rows, *, tile:Callable[[Any], Any]|None=None,
                 extras:dict[str, np.ndarray]|None=None, widened:bool=False, **parameters:Any) -> tuple[np.ndarray, np.ndarray|None]:
  # Runs the kernels for 8-bit caches on drawn inputs, and checks that o and lse are within their error limits; returns both.
  # `parameters` are the arguments of `stored_problem`. `tile` maps the problem to the tile that is used.
  extras = dict(extras or {})
  if parameters.get("page_size"):
    B, pages = parameters.get("B", 1), parameters["Sk"]//parameters["page_size"]
    extras["block_table"] = np.random.default_rng(1).permutation(B*pages).reshape(B, pages).astype(np.int32)
    extras.setdefault("kv_lengths", np.full(B, parameters["Sk"], np.int32))
  p = stored_problem(extras=extras, **parameters)
  x = make(p)
  if p.scale_dtype == "float16": x = replace(x, k_scales=rounded(x.k_scales, "float16"), v_scales=rounded(x.v_scales, "float16"))
  if "bias" in extras: extras["bias"] = rounded(extras["bias"], p.bias_dtype)
  o, lse = run_stored(p, x, arch, extras, None if tile is None else tile(p), widened)
  hold_stored(p, x, extras, o, lse, flushes=arch == "gfx90a")
  return o, lse
