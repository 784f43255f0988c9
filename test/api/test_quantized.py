"""Tests of 8-bit keys and values: conversion of whole tensors, caches, rows that are appended to caches, and calls that are refused."""
from __future__ import annotations
from typing import Any
import numpy as np
import pytest
from tinygrad import TinyJit, Variable
import attn
from attn import QuantizedRows
from attn.ops.formats import FORMATS
from attn.tinygrad_compat import Tensor, dtypes
from api_cases import draw, emulated, run_on_a_cpu, whole
from cases import EVERY_ARCH, arrange, restore, tensor
from eight_bits import MOST, numbers_of, rounded_rows, scales_of

pytestmark = pytest.mark.usefixtures("not_unrolled")

B, HKV, D, CAPACITY = 2, 2, 40, 12
FORMAT_OF = {"gfx942": "fp8e4m3fnuz", "gfx950": "fp8e4m3", "gfx1201": "fp8e4m3", "sm_90": "fp8e4m3"}     # the chips' own fp8
KINDS = [("int8", "gfx1100", "float32"), ("int8", "sm_80", "float16"), ("fp8e4m3", "gfx942", "float32"), ("fp8e4m3", "sm_90", "float16")]
DEVICES = ("EMU:0", "EMU:1")

def int32(x:Any, device:str="EMU") -> Tensor: return Tensor(np.array(x, np.int32), device=device).realize()

def format_of(dtype:str, arch:str) -> str: return "int8" if dtype == "int8" else FORMAT_OF[arch]

def rows(*shape:int, seed:int=0) -> np.ndarray:
  # Returns random float16 numbers whose rows (the last axis) differ in magnitude by factors of up to 2^16.
  rng = np.random.default_rng(seed)
  x = (rng.standard_normal(shape)*2.0**rng.integers(-8, 9, (*shape[:-1], 1))).astype(np.float16)
  # The first row is 0, the second contains a NaN, and the third contains -inf.
  some = x.reshape(-1, shape[-1])
  some[0], some[1, -1], some[2, shape[-1]//2] = 0, np.nan, -np.inf
  return x

def numbers(x:QuantizedRows, format:str) -> np.ndarray:
  # Returns the 8-bit numbers of `x`, of the 8-bit format `format`, in float64, without the scales of the rows.
  return numbers_of(format)[whole(x.values).numpy().view(np.uint8)]

def check_rounded_rows(got:np.ndarray, scales:np.ndarray, x:np.ndarray, format:str) -> None:
  # Checks that the rows x were rounded correctly to the 8-bit numbers `got` with `scales`.
  # Each number times its scale must be as near to x as the nearest number of the format. Rows with NaN or inf must be stored as zeros.
  want = scales_of(format, x, str(scales.dtype))
  np.testing.assert_allclose(scales, want, rtol=2e-7 if scales.dtype == np.float32 else 2.0**-10)
  there, exact, wide = np.isfinite(want), x.astype(np.float64), scales[..., None].astype(np.float64)
  error, best = (np.abs(stored*wide - exact)[there] for stored in (got, rounded_rows(format, exact, scales)))
  assert (error <= best + 1e-6*np.abs(exact[there])).all()
  assert not got[~there].any()

# ***** whole tensors *****

@pytest.mark.parametrize("dtype, arch, scale_dtype", KINDS)
def test_a_tensor_and_back(dtype:str, arch:str, scale_dtype:str) -> None:
  x, format = rows(2, 3, 5, D), format_of(dtype, arch)
  with emulated(arch):
    made = attn.quantize_kv(tensor(x, "float16"), dtype, scale_dtype=scale_dtype)
    assert made.values.shape == x.shape and made.scales.shape == x.shape[:-1] and made.values.dtype == FORMATS[format].dtype
    got, scales = numbers(made, format), made.scales.numpy()
    check_rounded_rows(got, scales, x, format)
    back = attn.dequantize_kv(made, "float32").numpy()
    np.testing.assert_array_equal(back, got.astype(np.float32)*scales.astype(np.float32)[..., None])

# ***** caches *****

@pytest.mark.sample(6)
@pytest.mark.parametrize("dtype, arch, scale_dtype", KINDS)
@pytest.mark.parametrize("layout", ("bhsd", "bshd", "nsd"))
def test_appended_rows(dtype:str, arch:str, scale_dtype:str, layout:str) -> None:
  # Appending under TinyJit, at an offset that a Variable gives, writes rows and scales to the right places in the caches. Nothing else in the caches
  # changes.
  format, new = format_of(dtype, arch), [rows(B, HKV, 3, D, seed=i) for i in range(2)]
  with emulated(arch):
    caches = attn.empty_kv_cache(B, HKV, CAPACITY, D, dtype=dtype, scale_dtype=scale_dtype, layout="bshd" if layout == "bshd" else "bhsd")
    if layout == "nsd": caches = [QuantizedRows(*(t.reshape(B*HKV, *t.shape[2:]) for t in cache)) for cache in caches]
    step = TinyJit(lambda k, v, n: attn.append_kv(k, v, *caches, n, layout=layout).realize(*caches[0], *caches[1]))
    n = Variable("n", 0, CAPACITY - 1)
    for start in (0, 3, 8): step(*(tensor(arrange(x, layout), "float16").realize() for x in new), n.bind(start))
    for x, cache in zip(new, caches):
      got, scales = numbers(cache, format), cache.scales.numpy()
      got, scales = (restore(a, layout, (B, HKV, CAPACITY, a.shape[-1])) for a in (got, scales[..., None]))
      for start in (0, 3, 8): check_rounded_rows(got[:, :, start:start + 3], scales[:, :, start:start + 3, 0], x, format)
      assert not got[:, :, [6, 7, 11]].any() and not scales[:, :, [6, 7, 11]].any()

@pytest.mark.sample(1)
@pytest.mark.parametrize("arch", [a for a in EVERY_ARCH if a not in ("gfx942", "gfx1100", "sm_80")])
def test_appended_rows_on_every_unit(arch:str) -> None:
  with emulated(arch):
    cache = attn.empty_kv_cache(1, 1, 8, 72, dtype="int8")[0]
    x = rows(1, 1, 5, 72)
    lengths = attn.append_kv(*[tensor(x, "float16")]*2, cache, attn.empty_kv_cache(1, 1, 8, 72, dtype="int8")[1], int32([5]))
    assert lengths.tolist() == [8]
    check_rounded_rows(numbers(cache, "int8")[:, :, 5:], cache.scales.numpy()[:, :, 5:], x[:, :, :3], "int8")
    assert not cache.scales.numpy()[:, :, :5].any()

@pytest.mark.parametrize("dtype, arch, scale_dtype", KINDS[1:3])
def test_rows_appended_to_pages(dtype:str, arch:str, scale_dtype:str) -> None:
  # Rows appended to a cache of 8 bits go to the pages that the block table names. The pages are views of one tensor for both caches and two layers.
  format, new = format_of(dtype, arch), [rows(2, HKV, 3, D, seed=i) for i in range(2)]
  with emulated(arch):
    stored = Tensor.zeros(2, 6, 4, 2, HKV, D, dtype=FORMATS[format].dtype, device="EMU").contiguous().realize()
    scales = Tensor.zeros(2, 6, 4, 2, HKV, dtype=scale_dtype.replace("float16", "half"), device="EMU").contiguous().realize()
    caches = [QuantizedRows(stored[1, :, :, i], scales[1, :, :, i]) for i in range(2)]
    table = int32([[4, 1], [5, 2]])
    attn.append_kv(*(tensor(x, "float16") for x in new), *caches, int32([2, 6]), block_table=table)
    for i, x in enumerate(new):
      of, got = scales.numpy()[1, :, :, i], numbers(QuantizedRows(stored, scales), format)[1, :, :, i]     # reading the scales appends
      for b, places in enumerate(([(4, 2), (4, 3), (1, 0)], [(2, 2), (2, 3)])):
        for j, place in enumerate(places): check_rounded_rows(got[place], of[place], x[b, :, j], format)
    assert np.count_nonzero(scales.numpy()[0]) == 0 and np.count_nonzero(scales.numpy()[1].any(-1)) == 2*5

@pytest.mark.parametrize("axis", (0, 1))
def test_a_cache_on_two_devices(axis:int) -> None:
  with emulated("gfx942"):
    x = rows(2, 2, 3, D)
    made = attn.empty_kv_cache(2, 2, 8, D, dtype="int8", device="EMU")
    caches = [QuantizedRows(*(t.shard(DEVICES, axis).realize() for t in cache)) for cache in made]
    new = tensor(x, "float16").shard(DEVICES, axis).realize()
    assert whole(attn.append_kv(new, new, *caches, 4)).tolist() == [7, 7]
    for cache in caches: check_rounded_rows(numbers(cache, "int8")[:, :, 4:7], whole(cache.scales).numpy()[:, :, 4:7], x, "int8")

@pytest.mark.thorough
def test_rows_appended_on_a_cpu() -> None:
  # `append_kv` stores the same 8-bit rows on a CPU, whose kernels have no threads, as on a GPU.
  script = "import numpy as np, attn, test_quantized as t\n" \
    "x, caches = t.rows(2, 2, 3, 40), attn.empty_kv_cache(2, 2, 8, 40, dtype='int8')\n" \
    "attn.append_kv(*[t.Tensor(x)]*2, *caches, 5)\n" \
    "for c in caches: t.check_rounded_rows(c.values.numpy()[:, :, 5:].astype(float), c.scales.numpy()[:, :, 5:], x, 'int8')\n"
  run_on_a_cpu(script)

# ***** memory *****

def nbytes(cache:Any) -> int: return sum(t.uop.buffer.nbytes for t in (cache if isinstance(cache, QuantizedRows) else (cache,)))

@pytest.mark.parametrize("width, scale_dtype", ((128, "float32"), (256, "float32"), (64, "float16")))
def test_tokens_in_the_same_memory(width:int, scale_dtype:str) -> None:
  # An 8-bit cache holds 1.9 times as many tokens as a 16-bit cache in the same memory. Rows of 64 elements reach this only with float16 scales.
  with emulated("gfx942"):
    of_16 = sum(map(nbytes, attn.empty_kv_cache(1, 2, 100, width)))
    for dtype in ("int8", "fp8e4m3"):
      assert sum(map(nbytes, attn.empty_kv_cache(1, 2, 190, width, dtype=dtype, scale_dtype=scale_dtype))) <= of_16
      assert sum(map(nbytes, attn.empty_paged_cache(19, 10, 2, width, dtype=dtype, scale_dtype=scale_dtype))) <= of_16
    assert sum(map(nbytes, attn.empty_kv_cache(1, 2, 190, 64, dtype="int8"))) > sum(map(nbytes, attn.empty_kv_cache(1, 2, 100, 64)))

# ***** refused calls *****

def test_refused() -> None:
  with emulated("gfx942"):
    k, v = attn.empty_kv_cache(B, HKV, 8, D, dtype="int8")
    half, new, x = attn.empty_kv_cache(B, HKV, 8, D)[0], draw(B, HKV, 1, D), draw(B, HKV, 3, D)
    fp8 = attn.empty_kv_cache(B, HKV, 8, D, dtype="fp8e4m3")[0]
    def append(k:Any=k, v:Any=v, new:Tensor=new) -> Any: return lambda: attn.append_kv(new, new, k, v, 0)
    for call, text in (
      (lambda: attn.quantize_kv(x, "int4"), "dtype='int4': must be 'int8', or 'fp8e4m3'"), (lambda: attn.quantize_kv(x, dtypes.half), "dtype="),
      (lambda: attn.quantize_kv(x.cast(dtypes.int)), "x has dtype int32: must be one of float16, bfloat16, float32"),
      (lambda: attn.quantize_kv(x, scale_dtype="bfloat16"), "scale_dtype=bfloat16: must be one of float32, float16"),
      (lambda: attn.quantize_kv(x.numpy()), "x=ndarray of shape .* must be a Tensor"),     # type: ignore[arg-type]
      (lambda: attn.dequantize_kv(x), "rows=Tensor of shape .* must be QuantizedRows"),     # type: ignore[arg-type]
      (lambda: attn.dequantize_kv(k, "int8"), "dtype=int8|dtype='int8'"),
      (lambda: attn.empty_kv_cache(1, 1, 8, 8, dtype="int4"), "dtype='int4': must be .*; or int8 or fp8e4m3, for rows of 8 bits"),
      (lambda: attn.empty_paged_cache(1, 1, 8, 8, dtype="int8", scale_dtype="int8"), "scale_dtype='int8'|scale_dtype=int8"),
      (append(v=half), "k_cache is int8 with float32 scales and v_cache float16: both must be QuantizedRows of the same format"),
      (append(k=half), "k_cache is float16 and v_cache int8 with float32 scales: both"),
      (append(v=fp8), "k_cache is int8 with float32 scales and v_cache fp8e4m3fnuz with float32 scales: both"),
      (append(k=QuantizedRows(k.values, k.scales.half())), "k_cache is int8 with float16 scales and v_cache int8 with float32 scales"),
      (append(k=QuantizedRows(half, k.scales)), "k_cache.values has dtype float16: must be int8, or uint8 for the bytes of fp8"),
      (append(k=QuantizedRows(k.values, k.scales.cast(dtypes.bfloat16))), "k_cache.scales has dtype bfloat16: must be one of float32, float16"),
      (append(k=QuantizedRows(k.values, k.scales[:, :, :7])), r"k_cache.scales has shape \(2, 2, 7\): must be \(2, 2, 8\), one for each row"),
      (append(k=QuantizedRows(k.values, k.scales.to("EMU:1"))), "k_cache.scales is on EMU:1 but values on EMU"),
      (append(k=QuantizedRows(k.values, k.scales[:1, :, :1].clone().realize())), "k_cache.scales has fewer numbers than the cache has rows"),
      (append(k=QuantizedRows(k.values, k.scales*2)), "k_cache.scales is a computed value"),
      (append(k=QuantizedRows(v.values, k.scales)), "k_cache and v_cache overlap"), (append(v=QuantizedRows(v.values, k.scales)), "overlap"),
      (append(new=draw(B, HKV, 1, 8)), r"k_new has shape \(2, 2, 1, 8\): must be that of k_cache"),
      (append(new=new.cast(dtypes.int)), "k_new has dtype int32: must be one of float16, bfloat16, float32"),
      (lambda: attn.append_kv(new, None, k, None, 0), "k_cache is QuantizedRows and v_cache None"),
      (lambda: attn.attention_with_kv_cache(k, new, new, k, v, 0), "q=QuantizedRows.*: must be a Tensor"),     # type: ignore[arg-type]
    ):
      with pytest.raises((ValueError, NotImplementedError), match=text): call()
    assert not k.scales.numpy().any() and not v.scales.numpy().any()
    shared = QuantizedRows(k.values.shard(DEVICES, 1), k.scales.shard(DEVICES, 0))
    with pytest.raises(ValueError, match=r"k_cache\.scales is sharded along axis 0: must be as values, along axis 1"): append(shared, shared)()
    with pytest.raises(NotImplementedError, match=r"k_cache.scales has shape \(1,\) on several devices"):
      append(*[QuantizedRows(shared.values, k.scales[0, 0, :1].to(DEVICES))]*2)()

@pytest.mark.parametrize("arch", ("gfx90a", "gfx1100", "sm_80", "gfx1030"))
def test_fp8_where_the_chip_does_not_convert_it(arch:str) -> None:
  with emulated(arch):
    for call in (lambda: attn.empty_kv_cache(1, 1, 8, 8, dtype="fp8e4m3"), lambda: attn.quantize_kv(draw(1, 1, 8, 8), "fp8e4m3"),
                 lambda: attn.dequantize_kv(QuantizedRows(draw(1, 8).cast(dtypes.uchar), draw(1, dtype="float32")))):
      with pytest.raises(NotImplementedError, match=f"{arch} has no instructions that convert 8-bit floats.*int8 is supported everywhere"): call()
  with emulated("gfx950"), pytest.raises(NotImplementedError, match="dtype='fp8e4m3fnuz': must be 'fp8e4m3', the 8-bit floats of EMU, or 'int8'"):
    attn.empty_kv_cache(1, 1, 8, 8, dtype="fp8e4m3fnuz")

def test_formats_of_the_tests_are_those_of_the_package() -> None: assert {name: x.most for name, x in FORMATS.items()} == MOST
