"""Tests of the API over 8-bit keys and values: caches that grow, pages, views, several devices, scales that rows share, and rows with NaN."""
from __future__ import annotations
from typing import Any
import numpy as np
import pytest
from tinygrad import TinyJit, Variable
import attn
from attn import QuantizedRows, flash_attn
from attn.accuracy import judge, law_of
from attn.choose import refusals
from attn.tinygrad_compat import AddrSpace, Context, Ops, Tensor, dtypes
from api_cases import computed_on, draw, emulated, run_on_a_cpu, whole
from cases import array, arrange, restore, tensor
from eight_bits import numbers_of
from test_quantized import DEVICES, FORMAT_OF, format_of, int32

pytestmark = pytest.mark.usefixtures("not_unrolled")

B, H, HKV, D, CAPACITY = 2, 4, 2, 32, 80
UNITS = ("gfx942", "gfx1100", "gfx1201", "sm_80", "sm_90")

def stale(dtype:str="int8", shape:tuple[int, ...]=(B, HKV, CAPACITY, D), device:Any="EMU", scale_dtype:str="float32") -> list[QuantizedRows]:
  # Makes an 8-bit key cache and an 8-bit value cache as if from old memory: random numbers, with scales that are NaN, infinity or 1e4.
  rng = np.random.default_rng(7)
  def made() -> QuantizedRows:
    stored = rng.integers(0, 256, shape).astype(np.uint8)
    scales = rng.choice(np.array([np.nan, np.inf, 1e4], np.float32), shape[:-1])
    numbers = Tensor(stored.view(np.int8) if dtype == "int8" else stored, device=device).realize()
    return QuantizedRows(numbers, tensor(scales, scale_dtype, device).realize())
  return [made(), made()]

def rows_in(cache:QuantizedRows, format:str="int8") -> tuple[np.ndarray, np.ndarray]:
  # Returns the rows of an 8-bit cache in float64, multiplied by their scales, and the scales.
  scales = array(whole(cache.scales)).astype(np.float64)
  with np.errstate(invalid="ignore"): return numbers_of(format)[whole(cache.values).numpy().view(np.uint8)]*scales[..., None], scales

def close(got:np.ndarray, q:np.ndarray, k:tuple[np.ndarray, np.ndarray], v:tuple[np.ndarray, np.ndarray], n:int, dtype:str="float16") -> None:
  # Checks that each element of `got`, causal attention of `q` to the first `n` keys, is within its error limit (docs/contract.md).
  # k and v are pairs: the rows in float64, already multiplied by their scales, and the scales (B, Hkv, capacity).
  law = law_of(q.astype(np.float32), k[0][:, :, :n], v[0][:, :, :n], q.shape[-1]**-.5, (-1, 0), n - q.shape[2], dtype=dtype, out_dtype=dtype,
               v_scales=v[1][:, :, :n])[0]
  assert (verdict := judge(got, law)).ok, verdict

def near(cache:tuple[np.ndarray, np.ndarray], x:np.ndarray, format:str="int8") -> None:
  # Checks that the first rows of an 8-bit cache, given in float64 with their scales, equal x up to rounding.
  n = x.shape[2]
  # The error may be half a scale in int8. In fp8 it may be 1/16 of the number, or 1/1000 of the scale if that is more.
  most = 0.5001*cache[1][:, :, :n, None] if format == "int8" else np.maximum(np.abs(x)/15.9, cache[1][:, :, :n, None]/1000)
  assert (np.abs(cache[0][:, :, :n] - x) <= most).all()

def drawn(n:int, heads:tuple[int, ...]=(H, HKV, HKV), batch:int=B, width:int=D) -> list[np.ndarray]:
  return [np.random.default_rng(i).standard_normal((batch, h, n, width)).astype(np.float16) for i, h in enumerate(heads)]

def given(xs:list[np.ndarray], i:int, j:int, layout:str="bhsd", dtype:str="float16", device:str="EMU") -> list[Tensor]:
  return [tensor(arrange(x[:, :, i:j], layout), dtype, device).realize() for x in xs]

# ***** caches that grow *****

def grow(device:str, dtype:str, format:str, width:int=D, scale_dtype:str="float32") -> None:
  # Checks attention over 8-bit caches while they grow: by a prompt, by 16 rows, and by single rows under TinyJit.
  # The rest of the caches holds random numbers and bad scales, which must have no effect. Each step is checked twice. The cached rows must equal the
  # appended rows up to rounding to the 8-bit format `format`. The output must agree with float64 attention over the cached rows, within its error
  # limits.
  x, (k, v) = drawn(60, width=width), stale(dtype, (B, HKV, CAPACITY, width), device, scale_dtype)
  def step(q:Tensor, k_new:Tensor, v_new:Tensor, n:Any) -> Tensor: return attn.attention_with_kv_cache(q, k_new, v_new, k, v, n).realize()
  jitted, n = TinyJit(step), Variable("n", 0, CAPACITY - 1)
  for i, j in ((0, 40), (40, 56), (56, 57), (57, 58), (58, 59), (59, 60)):
    new = given(x, i, j, device=device)
    got = array(step(*new, i) if j - i > 1 else jitted(*new, n.bind(i)))
    of_k, of_v = rows_in(k, format), rows_in(v, format)
    close(got, x[0][:, :, i:j], of_k, of_v, j)
  near(of_k, x[1], format)
  near(of_v, x[2], format)

EIGHT_BITS = [name for name in ("int8", "fp8e4m3") if name in refusals.CONVERTED]

@pytest.mark.sample(2)
@pytest.mark.parametrize("arch", UNITS)
@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_decoding(arch:str, dtype:str) -> None:
  if dtype != "int8" and arch not in FORMAT_OF: pytest.skip(f"{arch} has no fp8")
  with emulated(arch): grow("EMU", dtype, format_of(dtype, arch))

@pytest.mark.gpu
@pytest.mark.parametrize("width, scale_dtype", ((128, "float32"), (64, "float16"), (40, "float32")))
@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_decoding_on_a_gpu(dtype:str, width:int, scale_dtype:str) -> None:
  with computed_on("CUDA"): grow("CUDA", dtype, dtype, width, scale_dtype)

@pytest.mark.sample(2)
@pytest.mark.parametrize("arch, layout, scale_dtype, dtype", [
  ("gfx942", "bshd", "float16", "bfloat16"), ("sm_90", "nsd", "float32", "float16"), ("gfx1030", "bhsd", "float32", "float16")])
def test_caches_as_inputs_of_tinyjit(arch:str, layout:str, scale_dtype:str, dtype:str) -> None:
  # A function under TinyJit takes caches of 8 bits (QuantizedRows) as arguments, and its output is right in four calls with different caches. The
  # lengths are a tensor with a number for each batch.
  with emulated(arch):
    x, ends = drawn(9), (4, 4) if layout == "nsd" else (4, 7)
    shape = {"bhsd": (B, HKV, CAPACITY, D), "bshd": (B, CAPACITY, HKV, D), "nsd": (B*HKV, CAPACITY, D)}[layout]
    def step(q:Tensor, k_new:Tensor, v_new:Tensor, k:QuantizedRows, v:QuantizedRows, n:Tensor) -> Tensor:
      o = attn.attention_with_kv_cache(q, k_new, v_new, k, v, n, layout=layout)
      return o.realize(*k, *v)
    jitted = TinyJit(step)
    def row(i:int) -> list[Tensor]: return given(x, i, i + 1, layout, dtype)
    for caches in (stale(shape=shape, scale_dtype=scale_dtype) for _ in range(4)):
      start = [0] if layout == "nsd" else [0, 0]
      attn.append_kv(*given([a[:, :, :7] for a in x[1:]], 0, 7, layout, dtype), *caches, int32(start), layout=layout).realize(*caches[0], *caches[1])
      got = restore(array(jitted(*row(8), *caches, int32(ends[:len(start)]))), layout, (B, H, 1, D))
      of_k, of_v = ([restore(a if a.ndim == len(shape) else a[..., None], layout, (B, HKV, CAPACITY, a.shape[-1] if a.ndim == len(shape) else 1))
                     for a in rows_in(cache)] for cache in caches)
      for b, n in enumerate(ends):
        one = [(a[0][b:b + 1], a[1][b:b + 1, ..., 0]) for a in (of_k, of_v)]
        close(got[b:b + 1], x[0][b:b + 1, :, 8:9], *one, n + 1, dtype)

@pytest.mark.sample(2)
@pytest.mark.parametrize("arch, page, dtype", (
  ("gfx1100", 16, "int8"), ("sm_80", 7, "int8"), ("gfx942", 64, "fp8e4m3"), ("gfx1030", 4, "int8"), ("sm_90", 16, "fp8e4m3")))
def test_pages(arch:str, page:int, dtype:str) -> None:
  # Attention over a paged 8-bit cache is right, with and without a split of the keys into ranges. The caches of K and V are views of one tensor that
  # holds two layers. Only the device knows the lengths of the sequences. Pages that belong to no sequence hold random numbers and bad scales. A call
  # that appends no row gives the same output.
  lengths, count = (33, 9), 2*-(-40//page) + 3
  most, x = -(-40//page), drawn(40)
  table = np.random.default_rng(2).permutation(count)[:2*most].reshape(2, most).astype(np.int32)
  with emulated(arch):
    (both, _), at, format = stale(dtype, (2, count, page, 2, HKV, D)), int32(table), format_of(dtype, arch)
    k, v = (QuantizedRows(both.values[1, :, :, i], both.scales[1, :, :, i]) for i in range(2))
    def gathered(x:np.ndarray) -> np.ndarray: return x[table].reshape(2, -1, *x.shape[2:]).swapaxes(1, 2)
    attn.append_kv(*given(x[1:], 0, 33), k, v, 0, block_table=at)
    for options in ({}, {"num_splits": 2}) if arch != "gfx1030" else ({},):
      o = array(attn.attention_with_kv_cache(*given(x, 34, 37), k, v, int32(lengths), block_table=at, **options))
      for b, n in enumerate(lengths):
        one = [tuple(gathered(a)[b:b + 1] for a in rows_in(cache, format)) for cache in (k, v)]
        close(o[b:b + 1], x[0][b:b + 1, :, 34:37], *one, n + 3)
    again = attn.attention(given(x, 34, 37)[0], k, v, block_table=at, kv_lengths=int32([n + 3 for n in lengths]), causal=True)
    np.testing.assert_allclose(array(again), o, atol=2e-3)

def test_a_chunk_of_a_prompt_by_wgmma() -> None:
  with emulated("sm_90"):
    x, (k, v) = drawn(80), stale()
    for i, j in ((0, 10), (10, 80)): got = array(attn.attention_with_kv_cache(*given(x, i, j), k, v, i))
    close(got, x[0][:, :, 10:], rows_in(k), rows_in(v), 80)
    told = attn.explain(given(x, 10, 80)[0], k, v, kv_lengths=int32([80, 80]), causal=True)
    assert "forward_wgmma on sm_90" in str(told)

def buffers_of(o:Tensor, *known:Tensor) -> int:
  # Returns the bytes of all buffers that a call with the result `o` uses, without those of `o` and of the tensors `known`.
  found = {u for u in o.uop.toposort() if u.op is Ops.BUFFER and u.addrspace is AddrSpace.GLOBAL} - {t.uop.buf_uop for t in (o, *known)}
  return sum(u.max_numel()*u.dtype.itemsize for u in found)

def test_rows_that_another_kernel_converts(capsys:pytest.CaptureFixture[str]) -> None:
  # Results are right, also at a place that a Variable gives under TinyJit. `explain` names the conversion, and how many bytes the converted rows
  # take: as many as the call allocates.
  with emulated("sm_90", "widened_wgmma"):
    x, (k, v), n = drawn(80), stale(), Variable("n", 0, CAPACITY - 1)
    attn.append_kv(*given(x[1:], 0, 80), k, v, 0)
    for c in (k, v): Tensor.realize(c.values, c.scales)
    step = TinyJit(lambda q, k_new, v_new, n: attn.attention_with_kv_cache(q, k_new, v_new, k, v, n).realize())
    for i in (0, 3, 7, 10, 5): close(array(step(*given(x, i, i + 70), n.bind(i))), x[0][:, :, i:i + 70], rows_in(k), rows_in(v), i + 70)
    q, (k, v) = given(x, 0, 80)[0], stale()
    told = attn.explain(q, k, v, causal=True)
    assert "k and v: int8, with float32 scales, converted by another kernel, once for all blocks of queries" in capsys.readouterr().out
    allocated = buffers_of(attn.attention(q, k, v, causal=True), q, *k, *v)
    assert dict(told.memory)[told.kernel] == allocated == B*HKV*CAPACITY*(2*2*D + 4*4)

@pytest.mark.sample(2)
@pytest.mark.parametrize("axis, arch, kernel", ((0, "gfx942", ""), (1, "sm_90", ""), (0, "sm_90", "widened_wgmma"), (1, "sm_90", "widened_wgmma")))
def test_on_two_devices(axis:int, arch:str, kernel:str) -> None:
  # Attention is right over 8-bit caches whose batches or heads are divided over two devices. With divided heads, a paged cache gives the same output.
  with emulated(arch, kernel):
    x, (k, v) = drawn(20), stale(device="EMU:0")
    k, v = (QuantizedRows(*(t.shard(DEVICES, axis).realize() for t in cache)) for cache in (k, v))
    def shard(i:int, j:int) -> list[Tensor]: return [tensor(a[:, :, i:j], "float16").shard(DEVICES, axis).realize() for a in x]
    for i, j, n in ((0, 19, 0), (19, 20, int32([19, 19]))):
      got = array(whole(attn.attention_with_kv_cache(*shard(i, j), k, v, n)))
      close(got, x[0][:, :, i:j], rows_in(k), rows_in(v), j)
    near(rows_in(k), x[1])
    if axis == 1:
      pages, table = attn.empty_paged_cache(6, 8, HKV, D, dtype="int8", device=DEVICES), int32([[4, 1, 0], [5, 2, 3]], DEVICES[0])
      assert [t.uop.axis for t in pages[0]] == [2, 2]
      for i, j in ((0, 19), (19, 20)): o = whole(attn.attention_with_kv_cache(*shard(i, j), *pages, i, block_table=table))
      np.testing.assert_allclose(array(o), got, atol=2e-3)

@pytest.mark.parametrize("arch, shape", (("gfx1201", ()), ("sm_80", (HKV, 1)), ("gfx942", (1, HKV, 1))))
def test_scales_that_rows_share(arch:str, shape:tuple[int, ...]) -> None:
  # Attention is right over an int8 cache that another program has filled, with one scale for all rows or one scale for each head.
  with emulated(arch):
    x = drawn(50)
    scales = [np.abs(a.astype(np.float64)).max((0, 2, 3) if shape else None).reshape(shape)/127 for a in x[1:]]
    stored = [np.rint(a/(s[..., None] if shape else s)).astype(np.int8) for a, s in zip(x[1:], scales)]
    k, v = (QuantizedRows(Tensor(a, device="EMU").realize(), tensor(s.astype(np.float32), "float32").realize()) for a, s in zip(stored, scales))
    got = array(attn.attention(given(x, 0, 50)[0], k, v, causal=True, kv_lengths=50))
    full = [np.broadcast_to(c.scales.numpy().astype(np.float64), (B, HKV, 50)) for c in (k, v)]
    close(got, x[0], *[(a*s[..., None], s) for a, s in zip(stored, full)], 50)

@pytest.mark.sample(2)
@pytest.mark.parametrize("form", ("more batches than q", "cache_batch_idx", "a scale for each head"))
def test_flash_attn_with_kvcache(form:str) -> None:
  # FlashAttention's function `flash_attn_with_kvcache` gives right results for 8-bit caches, in three forms: the cache has more batches than q;
  # cache_batch_idx selects batches of the cache; each head has a single scale.
  with emulated("gfx942"):
    x, (k, v) = drawn(30), stale(shape=(B + 1, CAPACITY, HKV, D))
    q = given(x, 20, 23, "bshd")[0]
    chosen = [2, 0] if form == "cache_batch_idx" else [0, 1]
    if form == "a scale for each head":
      k, v = (QuantizedRows(c.values, tensor(np.array([0.01, 0.02], np.float32), "float32").realize()) for c in (k, v))
      got = flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=23, causal=True)
    else:
      indices = int32(chosen) if form == "cache_batch_idx" else None
      for i, j in ((0, 20), (20, 23)):
        new = given(x, i, j, "bshd")
        got = flash_attn.flash_attn_with_kvcache(*new[:1], k, v, *new[1:], cache_seqlens=int32([i, i]), cache_batch_idx=indices, causal=True)
    got = restore(array(got), "bshd", (B, H, 3, D))
    (of_k, k_scales), (of_v, v_scales) = (rows_in(c) for c in (k, v))
    scales = [np.broadcast_to(s, a.shape[:-1]) for s, a in ((k_scales, of_k), (v_scales, of_v))]
    one = [(a[chosen].swapaxes(1, 2), s[chosen].swapaxes(1, 2)) for a, s in zip((of_k, of_v), scales)]
    close(got, x[0][:, :, 20:23], *one, 23)

# ***** rows that are not finite *****

@pytest.mark.sample(2)
@pytest.mark.parametrize("arch, dtype", (("gfx1100", "int8"), ("sm_90", "int8"), ("gfx1030", "int8"), ("gfx1201", "fp8e4m3")))
def test_a_row_of_nan_reaches_only_the_rows_that_see_it(arch:str, dtype:str) -> None:
  with emulated(arch):
    x, (k, v) = drawn(30), stale(dtype)
    x[1][0, 0, 11, 3], x[2][1, 1, 20, 5] = np.nan, -np.inf       # of K, and of V
    o, lse = attn.attention_with_kv_cache(*given(x, 0, 30), k, v, 0, return_lse=True)
    o, lse = array(o), lse.numpy()
    seen = np.zeros((B, H, 30), bool)
    seen[0, :2, 11:] = True
    np.testing.assert_array_equal(np.isnan(lse), seen)
    seen[1, 2:, 20:] = True
    np.testing.assert_array_equal(np.isnan(o), np.broadcast_to(seen[..., None], o.shape))

# ***** a CPU *****

@pytest.mark.thorough
def test_on_a_cpu() -> None:
  script = "import attn, test_quantized_attention as t\n" \
    "x, (k, v) = t.drawn(20), t.stale(device='CPU')\n" \
    "for i, j in ((0, 19), (19, 20)):\n" \
    "  new = [t.Tensor(a[:, :, i:j].astype('float32'), device='CPU').cast('float').realize() for a in x]\n" \
    "  got = attn.attention_with_kv_cache(*new, k, v, i).numpy()\n" \
    "  t.close(got, x[0][:, :, i:j], t.rows_in(k), t.rows_in(v), j, 'float32')\n"
  run_on_a_cpu(script)

# ***** refused calls *****

def test_refused() -> None:
  with emulated("gfx942"):
    k, v = attn.empty_kv_cache(B, HKV, 40, D, dtype="int8")
    half, q, new = attn.empty_kv_cache(B, HKV, 40, D)[0], draw(B, H, 3, D), draw(B, HKV, 3, D)
    def attend(q:Tensor=q, k:Any=k, v:Any=v, **options:Any) -> Any: return lambda: attn.attention(q, k, v, **{"kv_lengths": 9, **options})
    def step(q:Tensor=q, k:Any=k, v:Any=v, **options:Any) -> Any: return lambda: attn.attention_with_kv_cache(q, new, new, k, v, 0, **options)
    packed = [QuantizedRows(x.values[0].transpose(0, 1), x.scales[0].transpose(0, 1)) for x in (k, v)]
    ends = int32([0, 3])
    for call, text in (
      (attend(v=half), "k is int8 with float32 scales and v float16: both must be QuantizedRows of the same format"),
      (step(v=half), "k_cache is int8 with float32 scales and v_cache float16: both"),
      (attend(v=None, v_dim=16), "k is QuantizedRows and v None: latent attention .MLA. takes QuantizedLatent"),
      (attend(q=draw(B, H, 3, 16)), r"k has shape \(2, 2, 40, 32\): its head dimension is 32 but the head dimension of q is 16"),
      (attend(q=q.cast(dtypes.int)), "q has dtype int32"), (attend(kv_lengths=41), r"kv_lengths=41: must lie in 0\.\.40"),
      (step(q=draw(B, H, 3, D).to("EMU:1")), "k_cache is on EMU but q on EMU:1"),
      (attend(k=QuantizedRows(k.values, k.scales[:, :, :3])), r"k.scales has shape \(2, 2, 3\): must be \(2, 2, 40\)"),
      (attend(q=draw(3, H, D), k=packed[0], v=packed[1], layout="thd", cu_seqlens_q=ends, cu_seqlens_k=ends, kv_lengths=None),
       "k and v are QuantizedRows with layout='thd': packed keys are not a cache"),
      (lambda: flash_attn.flash_attn_with_kvcache(draw(B, 3, H, D), k, half, cache_seqlens=3), "k is int8 with float32 scales and v float16")):
      with pytest.raises((ValueError, NotImplementedError), match=text): call()
    with emulated("gfx942", "three_pass"), pytest.raises(NotImplementedError, match="ATTN_KERNEL=three_pass: stored='int8'"): attend()()
    shared = [QuantizedRows(*(t.shard(DEVICES, 2) for t in x)) for x in (k, v)]
    with pytest.raises(NotImplementedError, match="k and v are QuantizedRows sharded along their rows"):
      attend(q=draw(B, H, 3, D).to(DEVICES), k=shared[0], v=shared[1], kv_lengths=None)()
    assert not k.scales.numpy().any()

def test_a_format_that_no_kernel_converts(monkeypatch:pytest.MonkeyPatch) -> None:
  # `attention_with_kv_cache` refuses a cache in an 8-bit format that the chip's kernels cannot convert. It does so before it appends a row.
  monkeypatch.setattr(refusals, "CONVERTED", ("int8",))
  with emulated("gfx942"):
    k, v = attn.empty_kv_cache(B, HKV, 40, D, dtype="fp8e4m3")
    with pytest.raises(NotImplementedError, match="forward: stored='fp8e4m3fnuz': gfx942 converts int8"):
      attn.attention_with_kv_cache(draw(B, H, 3, D), *[draw(B, HKV, 3, D)]*2, k, v, 0)
    assert not k.scales.numpy().any()

def test_gradients_are_refused() -> None:
  with emulated("gfx942"):
    k, v = (attn.quantize_kv(draw(1, 2, 20, 32, seed=i)) for i in range(2))
    for training in (0, 1):
      with Context(TRAINING=training):
        q = draw(1, 2, 4, 32)
        with pytest.raises(NotImplementedError, match="k and v are QuantizedRows: rows of 8 bits have no gradient"):
          attn.attention(q, k, v).float().sum().gradient(q)

def test_explain_names_the_format(capsys:pytest.CaptureFixture[str]) -> None:
  with emulated("gfx942"):
    k, v = attn.empty_kv_cache(1, 2, 40, D, dtype="int8", scale_dtype="float16")
    attn.explain(draw(1, 2, 1, D), k, v, kv_lengths=9)
    assert "k and v: int8, with float16 scales, converted by the kernel" in capsys.readouterr().out
    attn.explain(draw(1, 2, 1, D), QuantizedRows(k.values.flip(2), k.scales.flip(2)), v, kv_lengths=9)
    assert "k is a view whose rows don't lie a constant stride apart: every call copies it" in capsys.readouterr().out
