"""Tests of the API with latent attention (MLA) over 8-bit caches: caches that grow, pages, views, several devices, and calls that are refused."""
from __future__ import annotations
from typing import Any
import numpy as np
import pytest
from tinygrad import TinyJit, Variable
import attn
from attn import QuantizedLatent, QuantizedRows
from attn.tinygrad_compat import Context, Tensor, dtypes
from api_cases import draw, emulated, run_on_a_cpu, whole
from cases import array, in_turn, tensor
from test_quantized import DEVICES, FORMAT_OF, format_of, int32
from test_quantized_attention import close, drawn, given, near, rows_in, stale

pytestmark = pytest.mark.usefixtures("not_unrolled")

B, H, V, R, CAPACITY = 2, 16, 32, 16, 70
UNITS = ("gfx942", "gfx1100", "gfx1201", "gfx950", "sm_80", "sm_90", "gfx1030")

def stale_latent(dtype:str="int8", shape:tuple[int, ...]=(B, 1, CAPACITY), device:str="EMU", of_rotary:str="float16") -> QuantizedLatent:
  # Makes an 8-bit latent cache as if from old memory, with NaN, infinity or large numbers as scales and in the rotary columns.
  # `of_rotary` is the dtype of the rotary columns.
  rotary = np.random.default_rng(3).choice(np.array([np.nan, np.inf, 9], np.float32), (*shape, R))
  return QuantizedLatent(*stale(dtype, (*shape, V), device)[0], tensor(rotary, of_rotary, device).realize())

def latent_rows(cache:QuantizedLatent, format:str="int8") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  # Returns the keys, the values and the scales of the rows that a latent cache holds, in float64.
  # The keys are latent and rotary columns, the values latent columns.
  v, scales = rows_in(QuantizedRows(*cache[:2]), format)
  return np.concatenate([v, array(whole(cache.rotary)).astype(np.float64)], -1), v, scales

def check_step(o:np.ndarray, q:np.ndarray, cache:tuple[np.ndarray, np.ndarray, np.ndarray], n:int, dtype:str="float16") -> None:
  k, v, scales = cache
  close(o, q, (k, scales), (v, scales), n, dtype)

def inputs(n:int=60) -> list[np.ndarray]: return drawn(n, (H, 1), width=V + R)

def check_appended(cache:tuple[np.ndarray, np.ndarray, np.ndarray], x:np.ndarray, format:str="int8") -> None:
  # Checks that the first rows of a latent cache equal x: in the latent columns up to rounding, in the rotary columns exactly.
  near((cache[1], cache[2]), x[..., :V], format)
  np.testing.assert_array_equal(cache[0][:, :, :x.shape[2], V:], x[..., V:])

def check_growing_cache(cache:QuantizedLatent, device:str, format:str) -> None:
  # Checks attention over an 8-bit latent cache while it grows by a prompt, by a chunk and by single rows under TinyJit.
  x = inputs()
  def step(q:Tensor, new:Tensor, n:Any) -> Tensor: return attn.attention_with_kv_cache(q, new, None, cache, None, n, v_dim=V).realize()
  jitted, n = TinyJit(step), Variable("n", 0, CAPACITY - 1)
  for i, j in ((0, 40), (40, 56), (56, 57), (57, 58), (58, 59), (59, 60)):
    new = given(x, i, j, device=device)
    got = array(step(*new, i) if j - i > 1 else jitted(*new, n.bind(i)))
    check_step(got, x[0][:, :, i:j], latent_rows(cache, format), j)
  check_appended(latent_rows(cache, format), x[1], format)

@pytest.mark.sample(3)
@in_turn("dtype, arch", ("int8", "fp8e4m3"), UNITS, among=3)
def test_decoding(arch:str, dtype:str) -> None:
  if dtype != "int8" and arch not in FORMAT_OF: pytest.skip(f"{arch} has no fp8")
  with emulated(arch): check_growing_cache(stale_latent(dtype), "EMU", format_of(dtype, arch))

@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ("int8", "fp8e4m3"))
def test_decoding_on_a_gpu(dtype:str) -> None:
  with Context(DEV="CUDA"): check_growing_cache(stale_latent(dtype, device="CUDA"), "CUDA", dtype)

@pytest.mark.sample(2)
@pytest.mark.parametrize("arch, page", (("gfx942", 16), ("sm_90", 7), ("gfx1030", 4)))
def test_pages(arch:str, page:int) -> None:
  # Attention over a paged latent cache is right. The pages are views of tensors that hold two layers, and the two sequences have different lengths.
  lengths, most, x = (33, 9), -(-40//page), inputs(40)
  count = 2*most + 3
  table = np.random.default_rng(2).permutation(count)[:2*most].reshape(2, most).astype(np.int32)
  with emulated(arch):
    both, at = stale_latent(shape=(2, count, page, 1)), int32(table)
    cache = QuantizedLatent(*(t[1] for t in both))
    attn.append_kv(*given(x[1:], 0, 33), None, cache, None, 0, block_table=at)
    o = array(attn.attention_with_kv_cache(*given(x, 34, 37), None, cache, None, int32(lengths), block_table=at, v_dim=V))
    rows = [a[table].reshape(2, most*page, 1, -1).swapaxes(1, 2) for a in latent_rows(cache)]
    for b, n in enumerate(lengths):
      k, v, scales = (a[b:b + 1] for a in rows)
      check_step(o[b:b + 1], x[0][b:b + 1, :, 34:37], (k, v, scales[..., 0]), n + 3)

@pytest.mark.parametrize("layout", ("bhsd", "bshd"))
def test_empty_caches(layout:str) -> None:
  # An empty 8-bit latent cache has the shapes that are asked for. With DeepSeek's sizes it holds 1.7 times as many tokens as a 16-bit cache in the
  # same memory.
  with emulated("gfx942"):
    cache, none = attn.empty_kv_cache(1, 1, 100, 576, dtype="int8", v_dim=512, rotary_dtype="bfloat16", layout=layout)
    assert none is None and isinstance(cache, QuantizedLatent) and cache.rotary.dtype == dtypes.bfloat16
    assert [t.shape for t in cache] == [(*((1, 1, 100) if layout == "bhsd" else (1, 100, 1)), *width) for width in ((512,), (), (64,))]
    pages, none = attn.empty_paged_cache(5, 20, 1, 576, dtype="int8", v_dim=512)
    assert none is None and [t.shape for t in pages] == [(5, 20, 1, 512), (5, 20, 1), (5, 20, 1, 64)]
    of_16 = attn.empty_paged_cache(5, 20, 1, 576, v_dim=512)[0]
    assert of_16.shape == (5, 20, 1, 576)
    assert 1.7*sum(t.uop.buffer.nbytes for t in pages) <= of_16.uop.buffer.nbytes*1.0 or sum(t.uop.buffer.nbytes for t in pages)/100 == 512 + 4 + 128

def test_on_two_devices() -> None:
  # Attention is right if the batches of a latent cache are sharded over two devices, or if each device has the whole cache and half of the query
  # heads.
  with emulated("gfx942"):
    x = inputs(20)
    for axis in (0, None):
      cache = QuantizedLatent(*(t.shard(DEVICES, axis).realize() for t in stale_latent(device="EMU:0")))
      for i, j in ((0, 19), (19, 20)):
        q = tensor(x[0][:, :, i:j], "float16").shard(DEVICES, 1 if axis is None else 0).realize()
        new = tensor(x[1][:, :, i:j], "float16").shard(DEVICES, axis).realize()
        got = array(whole(attn.attention_with_kv_cache(q, new, None, cache, None, i, v_dim=V)))
        check_step(got, x[0][:, :, i:j], latent_rows(cache), j)

def test_a_row_of_nan_reaches_only_the_rows_that_see_it() -> None:
  for arch in ("gfx1100", "sm_90", "gfx1030"):
    with emulated(arch):
      x, cache = inputs(30), stale_latent()
      x[1][0, 0, 11, 3], x[1][1, 0, 20, V + 2] = np.inf, np.nan      # a latent column, and a rotary one
      o, lse = attn.attention_with_kv_cache(*given(x, 0, 30), None, cache, None, 0, v_dim=V, return_lse=True)
      seen = np.zeros((B, H, 30), bool)
      seen[0, :, 11:] = seen[1, :, 20:] = True
      np.testing.assert_array_equal(np.isnan(lse.numpy()), seen)
      np.testing.assert_array_equal(np.isnan(array(o)), np.broadcast_to(seen[..., None], o.shape))

def test_a_tensor_and_back() -> None:
  with emulated("gfx942"):
    k = draw(B, 1, 20, V + R)
    made = QuantizedLatent(*attn.quantize_kv(k[..., :V]), k[..., V:])
    back = attn.dequantize_kv(made).numpy()
    np.testing.assert_array_equal(back[..., V:], k.numpy()[..., V:])
    np.testing.assert_allclose(back[..., :V], k.numpy()[..., :V], atol=0.03)

@pytest.mark.thorough
def test_on_a_cpu() -> None:
  script = "import attn, test_quantized_latent as t\n" \
    "x, cache = t.inputs(20), t.stale_latent(device='CPU', of_rotary='float32')\n" \
    "for i, j in ((0, 19), (19, 20)):\n" \
    "  q, new = [t.Tensor(a[:, :, i:j].astype('float32'), device='CPU').realize() for a in x]\n" \
    "  got = attn.attention_with_kv_cache(q, new, None, cache, None, i, v_dim=t.V).numpy()\n" \
    "  t.check_step(got, x[0][:, :, i:j], t.latent_rows(cache), j, 'float32')\n"
  run_on_a_cpu(script)

def test_refused() -> None:
  with emulated("gfx942"):
    cache, q, new = stale_latent(), draw(B, H, 3, V + R), draw(B, 1, 3, V + R)
    def step(q:Tensor=q, new:Tensor=new, cache:Any=cache, v:Any=None, v_new:Any=None, **options:Any) -> Any:
      return lambda: attn.attention_with_kv_cache(q, new, v_new, cache, v, 0, **{"v_dim": V, **options})
    values, scales, rotary = cache
    for call, text in (
      (step(v_dim=V - 8), "v_dim=24 with k.values of 32 columns: must be 32"),
      (step(v_dim=V + 8), "v_dim=40: must lie in 1..32"),
      (step(cache=QuantizedRows(values, scales)), "k_cache is QuantizedRows and v_cache None: latent attention .MLA. takes QuantizedLatent"),
      (step(v=QuantizedRows(values, scales), v_new=new), "k_cache is QuantizedLatent, and v_cache is not None"),
      (step(q=q.cast(dtypes.bfloat16)), "k.rotary has dtype float16: must be that of q, bfloat16"),
      (step(new=new.cast(dtypes.bfloat16)), "k_new has dtype bfloat16: must be float16"),
      (step(new=new[..., :-1]), r"k_new has shape \(2, 1, 3, 47\): must be that of k_cache, \(2, 1, 70, 48\)"),
      (step(cache=QuantizedLatent(values, scales, rotary[:1])), r"k_cache.rotary has shape \(1, 1, 70, 16\): must be that of values"),
      (step(cache=QuantizedLatent(values, scales, rotary.cast(dtypes.int))), "k_cache.rotary has dtype int32"),
      (step(cache=QuantizedLatent(values, scales, rotary.to("EMU:1"))), "k_cache.rotary is on EMU:1"),
      (step(q=draw(B, H, 3, V)), "k_cache has width 48: must be that of q, 32"),
      (lambda: attn.empty_kv_cache(1, 1, 8, 48, dtype="int8", v_dim=48), "v_dim=48: must be None, or a whole number from 1 to 47"),
      (lambda: attn.empty_paged_cache(1, 1, 8, 48, 32, v_dim=32), "v_dim=32 with Dv=32")):
      with pytest.raises((ValueError, NotImplementedError), match=text): call()
    with emulated("gfx942", "three_pass"), pytest.raises(NotImplementedError, match="ATTN_KERNEL=three_pass: stored='int8'"): step()()
