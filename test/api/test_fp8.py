"""Tests of attention calls with q, k and v of 8-bit floats."""
from __future__ import annotations
from typing import Any
import numpy as np
import pytest
import attn
from attn.accuracy import judge, law_of
from attn.ops.eight_bits import numbers, rounded_bytes
from attn.reference import Options
from attn.tinygrad_compat import Tensor, TinyJit, dtypes
from api_cases import emulated

B, H, HKV, SQ, SK, D = 2, 4, 2, 20, 40, 32
KINDS = {"gfx942": "fp8e4m3fnuz", "sm_120": "fp8e4m3"}

def drawn(kind:str, *shape:int, seed:int=0, device:Any="EMU") -> tuple[Tensor, np.ndarray]:
  # Returns random numbers of the 8-bit float format `kind`, as a tensor and in float64.
  stored = rounded_bytes(np.random.default_rng(seed).standard_normal(shape).astype(np.float32), kind, True)
  return Tensor(stored, device=device).bitcast(getattr(dtypes, kind)), numbers(stored, kind).astype(np.float64)

def inputs(kind:str) -> tuple[list[Tensor], list[np.ndarray]]:
  found = [drawn(kind, *shape, seed=i) for i, shape in enumerate(((B, H, SQ, D), (B, HKV, SK, D), (B, HKV, SK, D)))]
  return [t for t, _ in found], [x for _, x in found]

def check(o:Tensor, numbers_of:list[np.ndarray], scales:list[Any], kind:str, causal:bool=True) -> None:
  # Checks that each element of o, float32 (B, H, Sq, D), is within its error limit (docs/contract.md).
  # `numbers_of` has q, k and v as float64 numbers of the 8-bit format `kind`, and `scales` their scales, each of a shape that broadcasts to (B, Hkv).
  def scaled(x:np.ndarray, s:Any) -> np.ndarray:
    return x*np.repeat(np.broadcast_to(np.asarray(s, np.float64), (B, HKV)), x.shape[1]//HKV, 1)[..., None, None]
  q, k, v = map(scaled, numbers_of, scales)
  law, _ = law_of(q, k, v, D**-0.5, (-1, 0) if causal else (-1, -1), SK - SQ, Options(), dtype=kind, out_dtype="float32")
  assert (verdict := judge(o.numpy(), law)).ok, verdict

@pytest.mark.parametrize("arch", KINDS)
def test_scales(arch:str) -> None:
  # Calls accept scales of q, k and v as a single number, or as one number for each batch and key/value head. Each scale may be left out.
  of_heads = np.random.default_rng(5).uniform(0.3, 3, (B, HKV)).astype(np.float32)
  with emulated(arch):
    (q, k, v), known = inputs(kind := KINDS[arch])
    def call(**scales:Any) -> Tensor:
      return attn.attention(q, k, v, causal=True, out_dtype="float32", **{name: Tensor(np.asarray(x), device="EMU") for name, x in scales.items()})
    check(call(), known, [1, 1, 1], kind)
    check(call(q_scale=np.float32(2)), known, [2, 1, 1], kind)
    check(call(q_scale=of_heads, k_scale=of_heads[::-1].copy(), v_scale=of_heads.T.copy()), known, [of_heads, of_heads[::-1], of_heads.T], kind)
    check(call(k_scale=np.ones((1, 1, 1), np.float32)*3, v_scale=-of_heads), known, [1, 3, -of_heads], kind)

def test_dtypes_of_the_output() -> None:
  with emulated("sm_120"):
    (q, k, v), _ = inputs("fp8e4m3")
    assert attn.attention(q, k, v).dtype == dtypes.bfloat16 and attn.attention(q, k, v, out_dtype="half").dtype == dtypes.half
    out = Tensor.empty(B, H, SQ, D, dtype="float32", device="EMU").contiguous().realize()
    assert attn.attention(q, k, v, out=out).dtype == dtypes.float

def test_layouts_views_and_jit() -> None:
  kind = "fp8e4m3"
  with emulated("gfx950"):
    (q, k, v), known = inputs(kind)
    scale = Tensor(np.float32([[0.5, 2], [1, 3]]), device="EMU")
    turned = [t.transpose(1, 2) for t in (q, k, v)]     # views, which the call copies; denormal numbers must survive the copy
    o = attn.attention(*turned, layout="bshd", causal=True, k_scale=scale, out_dtype="float32")
    check(o.transpose(1, 2), known, [1, scale.numpy(), 1], kind)
    dtype, bits = q.dtype, [t.bitcast(dtypes.uchar).contiguous().realize() for t in (q, k, v)]
    call = TinyJit(lambda q, k, v, s: attn.attention(*(t.bitcast(dtype) for t in (q, k, v)), causal=True, v_scale=s, out_dtype="float32").realize())
    for factor in (1.0, 2.0, 4.0):
      check(call(*bits, Tensor(np.float32([factor]), device="EMU").realize()), known, [1, 1, factor], kind)

@pytest.mark.parametrize("axis", (0, 1))
def test_shards(axis:int) -> None:
  # Tensors of 8-bit floats may be divided over devices along batch or heads. Scales of heads are divided in the same way.
  of_heads = np.float32([[0.5, 2], [1, 3]])
  with emulated("sm_120"):
    (q, k, v), known = inputs("fp8e4m3")
    devices = ("EMU:0", "EMU:1")
    q, k, v = (t.bitcast(dtypes.uchar).contiguous().realize().shard(devices, axis).bitcast(dtypes.fp8e4m3) for t in (q, k, v))
    scale = Tensor(of_heads, device="EMU").to("EMU:0").shard(devices, None)
    o = attn.attention(q, k, v, causal=True, k_scale=scale, v_scale=scale, out_dtype="float32")
    check(o.to("EMU"), known, [1, of_heads, of_heads], "fp8e4m3")

@pytest.mark.parametrize("axis", (None, 0, 1))
def test_another_kernel_transposes_v(axis:int|None, capsys:pytest.CaptureFixture[str]) -> None:
  # On sm_90 another kernel may transpose V before attention, also if tensors are divided over devices along batch or heads. `explain` says so, and
  # how many bytes the transposed V takes.
  of_heads = np.float32([[0.5, 2], [1, 3]])
  with emulated("sm_90", "turned_wgmma"):
    (q, k, v), known = inputs("fp8e4m3")
    scale = Tensor(of_heads, device="EMU").realize()
    if axis is not None:
      devices = ("EMU:0", "EMU:1")
      q, k, v = (t.bitcast(dtypes.uchar).contiguous().realize().shard(devices, axis).bitcast(dtypes.fp8e4m3) for t in (q, k, v))
      scale = scale.to("EMU:0").shard(devices, None)
    o = attn.attention(q, k, v, causal=True, k_scale=scale, v_scale=scale, out_dtype="float32")
    check(o.to("EMU"), known, [1, of_heads, of_heads], "fp8e4m3")
    told = attn.explain(q, k, v, causal=True)
    assert "V transposed by another kernel" in capsys.readouterr().out
    batch, heads = (1 if axis == i else n for i, n in enumerate((B, HKV)))
    assert dict(told.memory)[told.kernel] == batch*heads*D*128      # one tile of 128 keys on each device

def test_what_explain_says(capsys:pytest.CaptureFixture[str]) -> None:
  with emulated("sm_89"):
    (q, k, v), _ = inputs("fp8e4m3")
    attn.explain(q, k, v, v_scale=Tensor([2.0], device="EMU"))
    assert "q, k and v: fp8e4m3, v_scale; sums in float32, after each 128 products of about 14 bits" in capsys.readouterr().out
    attn.explain(q, k, v, fast_accumulate=True)
    assert "q, k and v: fp8e4m3, without scales; sums in about 14 bits (fast_accumulate)" in capsys.readouterr().out

@pytest.mark.parametrize(("change", "message"), (
  ({"q_scale": lambda: Tensor.ones(3, device="EMU")}, r"q_scale has shape \(3,\): must be one number, or \(2, 2\), one for each batch and key/"),
  ({"k_scale": lambda: Tensor.ones(1, dtype="half", device="EMU")}, "k_scale has dtype float16: must be float32"),
  ({"k": lambda: Tensor.ones(B, HKV, SK, D, dtype="half", device="EMU")}, "q, k and v have dtypes fp8e4m3, float16, fp8e4m3: all three must be"),
  ({"dropout_p": lambda: 0.5}, "dropout_p=0.5 with fp8e4m3"), ({"v": lambda: None, "v_dim": lambda: 16}, "v_dim with q of fp8e4m3"),
  ({"block_table": lambda: Tensor([[0]], device="EMU")}, "block_table with q of fp8e4m3")))
def test_refusals_name_the_argument(change:dict[str, Any], message:str) -> None:
  with emulated("sm_120"):
    given = dict(zip("qkv", inputs("fp8e4m3")[0])) | {name: make() for name, make in change.items()}
    with pytest.raises((ValueError, NotImplementedError), match=message): attn.attention(**given)

def test_scales_are_for_8_bits() -> None:
  with emulated("sm_120"):
    q = Tensor.ones(1, 1, 4, 16, dtype="half", device="EMU")
    with pytest.raises(ValueError, match="v_scale with q of float16: it is for fp8e4m3 and fp8e4m3fnuz only"):
      attn.attention(q, q, q, v_scale=Tensor([2.0], device="EMU"))
    with pytest.raises(ValueError, match="fast_accumulate=True with q, k and v of float16"): attn.attention(q, q, q, fast_accumulate=True)

def test_there_is_no_gradient() -> None:
  with emulated("sm_120"):
    q, k, v = inputs("fp8e4m3")[0]
    weight = Tensor.ones(1, device="EMU").contiguous().realize()
    o = attn.attention(q, k, v, v_scale=weight, out_dtype="float32")
    with pytest.raises(NotImplementedError, match="q, k and v are fp8e4m3: attention of 8-bit floats has no gradient"): o.sum().gradient(weight)
    with pytest.raises(NotImplementedError, match="q, k and v are fp8e4m3: attention of 8-bit floats has no gradient"):
      attn.explain(q, k, v, backward=True)
