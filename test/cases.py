"""Functions that tests of kernels share: they make problems and inputs, run kernels, and compare results with float64."""
from __future__ import annotations
import inspect, zlib
from dataclasses import dataclass, replace
from typing import Any, Callable, Container, Iterable, Sequence
import numpy as np
import pytest
from attn import flash_attention_fn
from attn.accuracy import Law, ShortSums, judge, law_of, law_of_gradients, without_error
from attn.api.launch import kernels, launched, tensors_of
from attn.calls.checked_kernel import CheckedKernel, device_arch
from attn.chips import Chip, get_chip
from attn.choose import backward_tiles, dispatch
from attn.choose.backward_tiles import FasterAtOnce, FasterInOrder
from attn.choose.dispatch import KERNELS, Choice, Work, choose_tile
from attn.choose.gradient_kernels import GRADIENT_KERNELS
from attn.emulator.machine import Frame
from attn.kernels.tiles.amd import Tile
from attn.kernels.tiles.mma import MmaTile
from attn.ops.eight_bits import rounded_bytes
from attn.ops.hopper import GROUP
from attn.problem import OF_8_BITS, OF_MASKS, OF_TERMS, Problem, problem_of
from attn.reference import Options, arrange, restore, rounded
from attn.score.terms import TERM_TENSORS
from attn.tinygrad_compat import Context, Tensor, UOp, dtypes
from attn.values import FLOATS as DTYPES, INTS

ARCHS = ("gfx942", "gfx950", "gfx1100", "gfx1201")       # one chip for each of AMD's matrix units
EVERY_ARCH = (*ARCHS, "sm_80")                           # and one chip for NVIDIA's mma.sync
GPU = pytest.param("CUDA", marks=pytest.mark.gpu)
WIDTHS = (64, 80, 96, 128, 192, 256)                     # head dimensions for which NVIDIA's kernels have a tile of their own
DTYPES_AND_MASKS = (("bfloat16", True), ("float16", "top-left"), ("float16", False))

def on_two(name:str, on:Sequence[Any], always:Sequence[Any]=()) -> Callable[[Any], Any]:
  # Decorator: runs a test on the chips `on`; by default on two of them and on all chips of `always`.
  # The test's name decides on which two. The other chips get pytest's mark `thorough`.
  def parametrized(test:Any) -> Any:
    first = zlib.crc32(test.__name__.encode()) % len(on)
    chosen = {first, (first + len(on)//2) % len(on)}
    found = [pytest.param(x, marks=() if i in chosen else pytest.mark.thorough) for i, x in enumerate(on)]
    return pytest.mark.parametrize(name, [*found, *always])(test)
  return parametrized

every_arch = on_two("arch", EVERY_ARCH, [GPU])
on_the_emulator = on_two("arch", EVERY_ARCH)
def in_turn(names:str, cases:Iterable[Any], on:Sequence[Any], always:Sequence[Any]=(), turn:int=0, among:int=0,
            besides:Container[Any]=()) -> Any:
  # Decorator: runs a test for every pair of a case and a chip; by default each case runs on one chip, and the chips take turns.
  # All other pairs get pytest's mark `thorough`. Case i runs by default on chip k if (i - k) % n is `turn`. n is `among`, or the number of chips if
  # `among` is 0. Every case also runs on the chips of `always`, and the cases of `besides` also on the last chip of `on`.
  def label(x:Any) -> str: return " ".join(map(label, x)) if isinstance(x, tuple) else getattr(x, "__name__", None) or str(x)
  found = []
  for i, case in enumerate(cases):
    runs = [(i - k) % (among or len(on)) == turn or (case in besides and k == len(on) - 1) for k in range(len(on))]
    marked = [(x, () if here else pytest.mark.thorough) for x, here in zip(on, runs)]
    marked += [(x.values[0], x.marks) for x in always]
    found += [pytest.param(case, x, marks=marks, id=f"{label(case)}-{label(x)}") for x, marks in marked]
  return pytest.mark.parametrize(names, found)

def drawn(test:Any) -> Any:
  # Decorator: gives a test the argument `draws`, the number of random problems: 6 by default, 100 with pytest's mark `thorough`.
  return pytest.mark.parametrize("draws", (6, pytest.param(100, marks=pytest.mark.thorough)))(test)

# Runs each case on one of the matrix units.
def amd_in_turn(name:str, cases:Iterable[Any]) -> Any: return in_turn(f"{name}, arch", cases, ARCHS)
def chips_in_turn(name:str, cases:Iterable[Any], by_mma:Container[Any]=()) -> Any:
  return in_turn(f"{name}, arch", cases, EVERY_ARCH, [GPU], besides=by_mma)

TYPES = {**DTYPES, "int32": dtypes.int, "uint32": dtypes.uint}

def floats(*shape:int, seed:int=7) -> np.ndarray: return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
def ints(*values:int) -> np.ndarray: return np.array(values, np.int32)

@dataclass(frozen=True)
class Inputs:
  q: np.ndarray
  k: np.ndarray
  v: np.ndarray

def normal(p:Problem, seed:int=0) -> Inputs:
  rng = np.random.default_rng(seed)
  draw = lambda *shape: rounded(rng.standard_normal(shape, dtype=np.float32), p.dtype)
  if p.varlen: return Inputs(draw(1, p.H, p.total_q, p.D), draw(1, p.Hkv, p.total_k, p.D), draw(1, p.Hkv, p.total_k, p.Dv))
  return Inputs(draw(p.B, p.H, p.Sq, p.D), draw(p.B, p.Hkv, p.Sk, p.D), draw(p.B, p.Hkv, p.Sk, p.Dv))

def tensor(x:np.ndarray, dtype:str, device:str="EMU") -> Tensor:
  if dtype == "bfloat16":
    bits = (np.ascontiguousarray(x, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return Tensor(bits, device=device).bitcast(dtypes.bfloat16)
  if dtype in OF_8_BITS: return Tensor(rounded_bytes(x, dtype, True), device=device)
  return Tensor(np.ascontiguousarray(x.astype({"float16": np.float16, "float32": np.float32}[dtype])), device=device)

def array(t:Tensor) -> np.ndarray:
  if t.dtype != dtypes.bfloat16: return t.numpy().astype(np.float32)
  return (t.bitcast(dtypes.ushort).numpy().astype(np.uint32) << 16).view(np.float32)

def problem(B:int=1, H:int=2, Hkv:int|None=None, Sq:int=64, Sk:int|None=None, D:int=32, Dv:int|None=None, dtype:str="float16",
            out_dtype:str|None=None, layout:str="bhsd", lse:bool=True, extras:dict[str, np.ndarray]|None=None, bias_dtype:str="float32",
            **options:Any) -> Problem:
  # Builds a Problem (sizes and options of a call).
  # `extras` holds the optional tensors by name. With layout "thd" (packed sequences), Sq and Sk count the rows of all sequences. D is small by
  # default, because the time to lower a kernel grows with D.
  Hkv, Sk, Dv = Hkv or H, Sk or Sq, Dv or D
  shape = lambda h, s, d: {"nsd": (B*h, s, d), "bshd": (B, s, h, d), "thd": (s, h, d)}.get(layout, (B, h, s, d))
  return problem_of(shape(H, Sq, Dv), shape(H, Sq, D), shape(Hkv, Sk, D), shape(Hkv, Sk, Dv),
                    dtypes=[out_dtype or dtype, dtype, dtype, dtype, "float32"],
                    lse={"nsd": (B*H, Sq), "thd": (H, Sq)}.get(layout, (B, H, Sq)) if lse else None, layout=layout, **options,
                    extras={n: (x.shape, bias_dtype if n == "bias" else str(x.dtype)) for n, x in (extras or {}).items()})

def run(p:Problem, x:Inputs, arch:str, **options:Any) -> tuple[np.ndarray, np.ndarray|None]:
  # Runs the kernel that `flash_attention_fn(**options)` returns; returns o (B, H, Sq, Dv) and lse (None if p asks for none).
  # The kernel runs on the emulator, or on the GPU if `arch` is "CUDA".
  device = "CUDA" if arch == "CUDA" else "EMU"
  with Context(DEV=device if device == "CUDA" else f"EMU::{arch}"):
    q, k, v = (tensor(arrange(a, p.layout), p.dtype, device).realize() for a in (x.q, x.k, x.v))
    shape = arrange(np.empty((p.B, p.H, p.Sq, p.Dv), np.bool_), p.layout).shape
    outs = [Tensor.empty(*shape, dtype=DTYPES[p.out_dtype], device=device)]
    if p.return_lse: outs.append(Tensor.empty(*((p.B*p.H, p.Sq) if p.layout == "nsd" else (p.B, p.H, p.Sq)), dtype=dtypes.float, device=device))
    chip = arch if device == "EMU" else None
    fxn = flash_attention_fn(layout=p.layout, softmax_scale=p.softmax_scale, return_lse=p.return_lse, arch=chip, **options)
    results = Tensor.custom_kernel(*outs, q, k, v, fxn=fxn)[:len(outs)]
    Tensor.realize(*results)
    o = restore(array(results[0]), p.layout, (p.B, p.H, p.Sq, p.Dv))
    return o, results[1].numpy().reshape(p.B, p.H, p.Sq) if p.return_lse else None

# ***** kernels without the API, with every option *****

def change_kernel(monkeypatch:pytest.MonkeyPatch, name:str, **fields:Any) -> None:
  # Replaces fields, such as `lacks`, in the row of the forward kernel `name` in dispatch's table, until the test ends.
  monkeypatch.setitem(KERNELS, name, replace(KERNELS[name], **fields))
  monkeypatch.setattr(dispatch, "_choose", inspect.unwrap(dispatch._choose))

def count_products(monkeypatch:pytest.MonkeyPatch) -> list[int]:
  # Makes the emulator count products by wgmma: returns a list that gets the number of warpgroups of each product that starts.
  started, start = list[int](), Frame.start_product
  def counted(frame:Frame, *args:Any) -> np.ndarray:
    started.append(int(frame.active.reshape(-1, GROUP).any(axis=1).sum()))
    return start(frame, *args)
  monkeypatch.setattr(Frame, "start_product", counted)
  return started

def compute_all_gradients_at_once(monkeypatch:pytest.MonkeyPatch, suffix:str="_wgmma") -> None:
  # Makes dispatch choose a kernel for all gradients at once, also for small problems and with deterministic=True.
  # This holds for kernels whose names end with `suffix`: "_wgmma", or "" for the kernels of AMD's matrix units.
  for name in ("LEAST_QUERIES", "LEAST_KEYS"): monkeypatch.setattr(backward_tiles, name, 64)
  windows = (-1, -1), (-1, 0)
  everywhere = FasterAtOnce(windows, tuple(FasterInOrder(window, 0, 0) for window in windows))
  monkeypatch.setattr(backward_tiles, "IN_ORDER_MFMA", everywhere)
  for D in (64, 128): monkeypatch.setitem(backward_tiles.FASTER_ON_WGMMA, (D, ""), everywhere)
  row = GRADIENT_KERNELS[suffix]
  assert row.at_once is not None
  tile = row.at_once.tile
  at_once = replace(row.at_once, tile=lambda p, arch: tile(replace(p, B=99), arch))
  monkeypatch.setitem(GRADIENT_KERNELS, suffix, replace(row, at_once=at_once))

def chip(arch:str) -> Chip:
  # Returns the chip `arch`, or the GPU of this machine if `arch` is "CUDA".
  if arch != "CUDA": return get_chip(arch)
  with Context(DEV=arch): return device_arch()

def outputs_of_launches(p:Problem, choice:Choice, inputs:dict[str, Tensor], extras:dict[str, np.ndarray],
                        device:str) -> tuple[np.ndarray, np.ndarray|None]:
  # Runs the forward kernels of `choice`; returns o (B, H, Sq, Dv) and lse (None if p asks for none).
  # With packed sequences o is (1, H, total_q, Dv). `inputs` holds q, k and v by name, and `extras` the optional tensors.
  done = dict(inputs)
  for n, a in extras.items():
    done[n] = Tensor(a, device=device) if a.dtype in (np.int32, np.uint32) else tensor(a, p.bias_dtype if n == "bias" else "float32", device)
  for t in done.values(): t.realize()
  shapes = tensors_of(p, choice)
  for names, fxn in zip(launched(p, choice), kernels(p, choice)):
    given = [done[n] if n in done else Tensor.empty(*shapes[n][0], dtype=(DTYPES | INTS)[shapes[n][1]], device=device) for n in names]
    done |= zip(names, Tensor.custom_kernel(*given, fxn=fxn))
  Tensor.realize(done["o"], *[done[n] for n in ("lse",) if n in done])
  B, length = (1, p.total_q) if p.varlen else (p.B, p.Sq)
  o = restore(array(done["o"]), p.layout, (B, p.H, length, p.Dv))
  return o, done["lse"].numpy().reshape(B, p.H, length) if p.return_lse else None

def run_kernels(p:Problem, x:Inputs, arch:str, extras:dict[str, np.ndarray], tile:Tile|MmaTile|None=None,
                kernel:str="split_kv") -> tuple[np.ndarray, np.ndarray|None]:
  # Runs the forward kernel `kernel` with the tile `tile`, and `combine` if p has splits; returns o (B, H, Sq, Dv) and lse.
  # By default dispatch chooses the tile. The kernels run on the emulator, or on the GPU if `arch` is "CUDA".
  tile, device = tile or choose_tile(p, chip(arch)), "CUDA" if arch == "CUDA" else "EMU"
  choice = Choice(kernel, Work(tile, p.num_splits), chip(arch), ())
  with Context(DEV=device if device == "CUDA" else f"EMU::{arch}"):
    done = {n: tensor(arrange(a, p.layout), p.dtype, device) for n, a in (("q", x.q), ("k", x.k), ("v", x.v))}
    return outputs_of_launches(p, choice, done, extras, device)

def check_kernel(kernel:Callable[..., UOp], p:Problem, x:Inputs, arch:str) -> None:
  # Runs a forward kernel without options on the emulator, and checks that o and lse are within their error limits (docs/contract.md).
  with Context(DEV=f"EMU::{arch}"):
    q, k, v = (tensor(arrange(a, p.layout), p.dtype).realize() for a in (x.q, x.k, x.v))
    o = Tensor.empty(*arrange(np.empty((p.B, p.H, p.Sq, p.Dv), np.bool_), p.layout).shape, dtype=DTYPES[p.out_dtype], device="EMU")
    lse = Tensor.empty(p.B, p.H, p.Sq, dtype=dtypes.float, device="EMU")
    outs = Tensor.custom_kernel(o, lse, q, k, v, fxn=lambda *placeholders: CheckedKernel(kernel(*placeholders), ("o", "lse")))[:2]
    Tensor.realize(*outs)
    got, got_lse = restore(array(outs[0]), p.layout, (p.B, p.H, p.Sq, p.Dv)), outs[1].numpy()
  hold(p, x, {}, got, got_lse)

# ***** options *****

# By the option's name in Problem.options, for a head with 150 queries and 200 keys. The tables for plain problems have rows for these options.
ONE_OPTION: dict[str, dict[str, Any]] = {
  "": {}, "window": dict(window=(70, -1)), "softcap": dict(softcap=3.0), "alibi": dict(extras=dict(alibi_slopes=floats(1)**2)),
  "bias": dict(extras=dict(bias=floats(1, 1, 150, 200))),
  "dropout_p": dict(dropout_p=0.1, extras=dict(dropout_seed=np.array([7, 9], np.uint32)))}

# ***** dropout *****

def philox4x32(counter:Sequence[Any], key:Sequence[int]) -> list[np.ndarray]:
  # Computes Philox4x32 with 7 rounds by the definition of its authors (Random123, philox.h).
  low32 = 0xffffffff
  x, (k0, k1) = [np.asarray(c, np.uint64) for c in counter], key
  for _ in range(7):
    product0, product1 = x[0]*np.uint64(0xd2511f53), x[2]*np.uint64(0xcd9e8d57)
    x = [product1 >> 32 ^ x[1] ^ k0, product1 & low32, product0 >> 32 ^ x[3] ^ k1, product0 & low32]
    k0, k1 = (k0 + 0x9e3779b9) & low32, (k1 + 0xbb67ae85) & low32
  return x

def kept_mask(seed:Sequence[int], p:float, B:int, H:int, Sq:int, Sk:int, batch:int=0, head:int=0) -> np.ndarray:
  # Returns the elements of P that dropout keeps, bool (B, H, Sq, Sk).
  # Philox with the key `seed` gives four 32-bit words for the counter (i, j//8, head, batch), which are eight 16-bit numbers. Dropout keeps key j of
  # query i if number j%8 is at least p*2^16.
  b, h, i, j = np.meshgrid(np.arange(B) + batch, np.arange(H) + head, np.arange(Sq), np.arange(Sk), indexing="ij")
  words = np.stack(philox4x32((i, j//8, h, b), [int(x) for x in seed]))
  word = np.take_along_axis(words, (j % 8//2)[None], 0)[0]
  return (word >> (j % 2*16).astype(np.uint64) & 0xffff) >= round(p*65536)

def dropped(p:Problem, extras:dict[str, np.ndarray], sequence:int|None=None, Sq:int=0, Sk:int=0) -> dict[str, Any]:
  # Returns the dropout options, of the whole problem or of one packed sequence, in the form that attn/reference.py takes.
  if not p.dropout_p: return {}
  batch, head = map(int, extras.get("first_batch_and_head", (0, 0)))
  B, Sq, Sk = (p.B, p.Sq, p.Sk) if sequence is None else (1, Sq, Sk)
  return {"dropout_p": p.dropout_p, "kept": kept_mask(extras["dropout_seed"], p.dropout_p, B, p.H, Sq, Sk, batch + (sequence or 0), head)}

SCORE_OPTIONS = (*TERM_TENSORS, "sinks", "kv_lengths")

def numbers_of_rows(p:Problem) -> dict[str, float]:
  # Returns the options of score terms and masks that are single numbers, such as softcap, in the form that attn/reference.py takes.
  return {name: x for name in (*OF_TERMS, *OF_MASKS) if isinstance(x := getattr(p, name), int|float) and not isinstance(x, bool)}

def hold(p:Problem, x:Inputs, extras:dict[str, np.ndarray], o:np.ndarray, lse:np.ndarray|None, short:ShortSums|None=None) -> None:
  # Checks that each element of a kernel's o and lse is within its error limit (docs/contract.md).
  # `short` describes how the matrix unit adds, if it does not add in fp32.
  law, of_lse = expected(p, x, extras, short)
  assert (verdict := judge(o, law)).ok, f"o: {verdict}"
  if lse is not None: assert (verdict := judge(lse, of_lse)).ok, f"lse: {verdict}"

def with_input_scales(p:Problem, x:Inputs, extras:dict[str, np.ndarray]) -> Inputs:
  # Multiplies q, k and v of 8 bits by their scales, which are in `extras`, in float64.
  def scaled(a:np.ndarray, name:str) -> np.ndarray:
    if name not in extras: return a
    factors = np.broadcast_to(extras[name].astype(np.float64), (p.B, p.Hkv))
    return a*np.repeat(factors, a.shape[1]//p.Hkv, axis=1)[..., None, None]
  return Inputs(*(scaled(a, name) for a, name in ((x.q, "q_scale"), (x.k, "k_scale"), (x.v, "v_scale"))))

def expected(p:Problem, x:Inputs, extras:dict[str, np.ndarray], short:ShortSums|None=None) -> tuple[Law, Law]:
  # Computes o and lse in float64: returns for each the exact values and the error limit of each element.
  # `short` describes how the matrix unit adds, if it does not add in fp32. Packed sequences are computed one at a time. Rows that belong to no
  # sequence have o 0 and lse -inf.
  options: dict[str, Any] = {n: extras[n] for n in SCORE_OPTIONS if n in extras} | dropped(p, extras)
  def law(q:np.ndarray, k:np.ndarray, v:np.ndarray, offset:int, **more:Any) -> tuple[Law, Law]:
    o = Options(top_left=p.top_left, **numbers_of_rows(p), **{**options, **more})
    return law_of(q, k, v, p.softmax_scale, p.window, offset, o, dtype=p.dtype, out_dtype=p.out_dtype, short=short)
  x = with_input_scales(p, x, extras)
  if not p.varlen: return law(x.q, x.k, x.v, p.offset)
  found = without_error((*x.q.shape[:-1], x.v.shape[-1])), without_error(x.q.shape[:-1], -np.inf)
  for b, (rows, keys) in enumerate(packed_sequences(p, extras)):
    q, k, v = x.q[:, :, rows], x.k[:, :, keys], x.v[:, :, keys]
    slopes = {"alibi_slopes": extras["alibi_slopes"][b]} if p.alibi_batched else {}
    laws = law(q, k, v, 0 if p.top_left else k.shape[2] - q.shape[2], **slopes, **dropped(p, extras, b, q.shape[2], k.shape[2]))
    for of, part in zip(found, laws): of.put((slice(None), slice(None), rows), part)
  return found

def packed_sequences(p:Problem, extras:dict[str, np.ndarray]) -> list[tuple[slice, slice]]:
  # Returns, for each sequence, the range of its rows in q and the range of its rows in k.
  if not p.varlen: return [(slice(None), slice(None))]
  q_ends, k_ends = extras["cu_seqlens_q"], extras["cu_seqlens_k"]
  return [(slice(*q_ends[b:b+2]), slice(*k_ends[b:b+2])) for b in range(p.B)]

def expected_gradients(p:Problem, x:Inputs, extras:dict[str, np.ndarray], do:np.ndarray|None, dlse:np.ndarray|None) -> dict[str, Law]:
  # Computes the gradients of all inputs in float64: returns for each the exact values and the error limit of each element.
  # `do` and `dlse` are the gradients of o and lse: (B, H, Sq, Dv) and (B, H, Sq), or (1, H, total_q, ...) for packed sequences. Packed sequences are
  # computed one at a time. Rows that belong to no sequence get gradient 0.
  def laws(q:np.ndarray, k:np.ndarray, v:np.ndarray, rows:slice, offset:int, **more:Any) -> dict[str, Law]:
    o = Options(top_left=p.top_left, **numbers_of_rows(p), **{**{n: extras[n] for n in SCORE_OPTIONS if n in extras}, **dropped(p, extras), **more})
    at = (None if do is None else rounded(do[:, :, rows], p.dtype), None if dlse is None else dlse[:, :, rows], p.softmax_scale, p.window, offset, o)
    found = law_of_gradients(q, k, v, *at, dtype=p.dtype, out_dtype=p.out_dtype, bias_dtype=p.bias_dtype)
    return {n: law for n, law in vars(found).items() if law is not None}
  if not p.varlen: return laws(x.q, x.k, x.v, slice(None), p.offset)
  total = {n: without_error(a.shape) for n, a in (*vars(x).items(), *((n, extras[n]) for n in ("sinks", "alibi_slopes") if n in extras))}
  for b, (rows, keys) in enumerate(packed_sequences(p, extras)):
    q, k, v = x.q[:, :, rows], x.k[:, :, keys], x.v[:, :, keys]
    slopes = {"alibi_slopes": extras["alibi_slopes"][b]} if p.alibi_batched else {}
    found = laws(q, k, v, rows, 0 if p.top_left else k.shape[2] - q.shape[2], **slopes, **dropped(p, extras, b, q.shape[2], k.shape[2]))
    places = {"q": (slice(None), slice(None), rows), "k": (slice(None), slice(None), keys), "v": (slice(None), slice(None), keys)}
    for n, law in found.items(): total[n].add(places.get(n, (b,) if n == "alibi_slopes" and p.alibi_batched else (Ellipsis,)), law)
  return total

def check_kernels(arch:str, make:Callable[[Problem], Inputs]=normal, *, tile:Callable[[Any], Any]|None=None, extras:dict[str, np.ndarray]|None=None,
                  **parameters:Any) -> tuple[np.ndarray, np.ndarray|None]:
  # Runs the forward kernels on drawn inputs, and checks that o and lse are within their error limits (docs/contract.md); returns both.
  # `parameters` are the arguments of `problem`. `tile` maps the tile that dispatch chooses to the tile that is used.
  p, extras = problem(extras=extras, **parameters), dict(extras or {})
  if "bias" in extras: extras["bias"] = rounded(extras["bias"], p.bias_dtype)
  chosen = choose_tile(p, chip(arch))
  if tile is not None: chosen = tile(chosen)
  x = make(p)
  o, lse = run_kernels(p, x, arch, extras, chosen)
  hold(p, x, extras, o, lse)
  return o, lse

def check(arch:str, make:Callable[[Problem], Inputs]=normal, **parameters:Any) -> None:
  # Runs the kernel of `flash_attention_fn` on drawn inputs, and checks that o and lse are within their error limits (docs/contract.md).
  p = problem(**parameters)
  options = {name: parameters[name] for name in ("causal", "window") if name in parameters}
  x = make(p)
  o, lse = run(p, x, arch, **options)
  hold(p, x, {}, o, lse)
