"""Tests of `attention`: each option on each kernel that supports it, tensors on one and on several devices, TinyJit, dispatch, and refused calls."""
import itertools
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from tinygrad import TinyJit, Variable
import attn
from attn import flash_attn
from attn.accuracy import judge, law_of
from attn.api import launch
from attn.calls import gradient
from attn.api.attention import choice_of
from attn.choose import dispatch
from attn.problem import Problem
from attn.tinygrad_compat import GlobalCounters, Ops, Tensor, dtypes
from attn.tinygrad_compat.caches import codegen, realize, schedule
from attn.values import MOST_KERNELS
from api_cases import check_attention, draw, emulated, floats, int32
from cases import ARCHS, EVERY_ARCH, Inputs, array, drawn, in_turn, normal, on_two

pytestmark = pytest.mark.usefixtures("not_unrolled")

KERNELS = ("forward", "forward_mma", "forward_wgmma", "split_kv", "tiled", "three_pass")
SPLITS = {"split_kv": {"num_splits": 2}}
DEVICES = ("EMU:0", "EMU:1")

def arch_of(kernel): return {"forward_mma": "sm_80", "forward_wgmma": "sm_90", "tiled": "gfx1030"}.get(kernel, "gfx942")
def on_kernel(kernel, arch="", **parameters): return check_attention(arch or arch_of(kernel), kernel, **SPLITS.get(kernel, {}), **parameters)

# ***** options *****

OPTIONS = {
  "causal": {"causal": True}, "top-left": {"causal": "top-left"}, "window": {"window": (20, 7)}, "softcap": {"softcap": 2.0},
  "scale": {"softmax_scale": .3},
  "alibi": {"extras": {"alibi_slopes": np.float32([.5, .25, .1, .03])}}, "alibi of batches": {"extras": {"alibi_slopes": np.abs(floats(2, 4))}},
  "bias": {"extras": {"bias": floats(2, 4, 20, 150)}}, "bias of heads": {"extras": {"bias": floats(1, 4, 1, 150)}},
  "sinks": {"extras": {"sinks": floats(4)}},
  "lengths": {"extras": {"kv_lengths": int32(40, 150)}, "causal": True},
}

@pytest.mark.sample(5)
@in_turn("name, kernel", OPTIONS, KERNELS)
def test_options(name, kernel): on_kernel(kernel, B=2, H=4, Hkv=2, Sq=20, Sk=150, D=32, **OPTIONS[name])

@pytest.mark.sample(2)
@pytest.mark.parametrize("on", [*itertools.product(ARCHS[1:], ("forward", "split_kv")), ("sm_80", "forward_mma"),
                               ("sm_86", "split_kv"), ("sm_90", "split_kv")])
def test_all_options_on_every_chip(on):
  arch, kernel = on
  on_kernel(kernel, arch, B=2, H=4, Hkv=2, Sq=3, Sk=150, D=32, causal=True, window=(70, -1), softcap=2.0, dtype="bfloat16",
            extras={"alibi_slopes": np.float32([.5, .25, .1, .03]), "bias": floats(2, 1, 3, 150), "sinks": floats(4), "kv_lengths": int32(101, 150)})

@pytest.mark.sample(3)
@in_turn("layout, kernel", ("bshd", "nsd"), KERNELS, among=2)
def test_layouts(layout, kernel): on_kernel(kernel, B=2, H=4, Sq=20, Sk=150, D=32, layout=layout, causal=True, out_dtype="float32")

# ***** errors of other implementations *****

@pytest.mark.parametrize("kernel", ("forward", "forward_mma", "three_pass"))
def test_more_queries_than_keys(kernel):
  # Causal attention with Sq=5 and Sk=2: rows 0 to 2 see no key and must be 0 with lse -inf.
  o, lse = on_kernel(kernel, Sq=5, Sk=2, causal=True)
  assert (o[:, :, :3] == 0).all() and np.isneginf(lse[:, :, :3]).all() and np.isfinite(lse[:, :, 3:]).all()

def test_an_empty_split_weighs_nothing():
  o, _ = on_kernel("split_kv", Sq=300, Sk=130, causal=True)
  assert (o[:, :, :170] == 0).all()

@on_two("kernel", KERNELS)
def test_nan_beyond_the_lengths(kernel):
  # NaN in the cache beyond the length of each batch (32, 64, 96 and 48 of 128 keys) does not reach the output.
  def poisoned(p:Problem) -> Inputs:
    x = normal(p)
    for b, n in enumerate((32, 64, 96, 48)): x.k[b, :, n:], x.v[b, :, n:] = np.nan, np.nan
    return x
  on_kernel(kernel, B=4, H=2, Sq=1, Sk=128, D=64, make=poisoned, extras={"kv_lengths": int32(32, 64, 96, 48)})

@on_two("kernel", KERNELS)
def test_window_counts_the_diagonal(kernel):
  # window=(W-1, 0) lets a query see W keys: the key at the query's own position and W-1 keys before it. window=(-1, 0) has no limit on the left and
  # equals causal=True. Here one query sees W=128 of 256 keys.
  with emulated(arch_of(kernel), kernel):
    q, k, v = draw(1, 2, 1, 64), draw(1, 2, 256, 64, seed=1), draw(1, 2, 256, 64, seed=2)
    more = SPLITS.get(kernel, {})
    o = array(attn.attention(q, k, v, window=(127, 0), **more))
    np.testing.assert_array_equal(o, array(attn.attention(q, k, v, window=(127, -1), causal=True, **more)))
    np.testing.assert_allclose(o, array(attn.attention(q, k[:, :, 128:], v[:, :, 128:], **more)), atol=1e-3)
    np.testing.assert_array_equal(array(attn.attention(q, k, v, causal=True, **more)), array(attn.attention(q, k, v, window=(-1, 0), **more)))

@pytest.mark.sample(3)
@in_turn("causal, kernel", (False, True), KERNELS, among=2)
def test_empty_sequences(kernel, causal):
  # Results are right if a batch of packed sequences contains sequences without queries, without keys, or without both: as the first, a middle and the
  # last sequence.
  on_kernel(kernel, H=2, Sq=50, Sk=170, D=32, layout="thd", causal=causal,
            extras={"cu_seqlens_q": int32(0, 0, 20, 20, 30, 50, 50), "cu_seqlens_k": int32(0, 10, 10, 30, 150, 170, 170)})

@on_two("kernel", KERNELS)
def test_a_bias_row_of_minus_infinity(kernel):
  bias = floats(1, 1, 9, 150)
  bias[..., 4, :], bias[..., 5, :149] = -np.inf, -np.inf
  o, lse = on_kernel(kernel, Sq=9, Sk=150, D=32, extras={"bias": bias})
  assert (o[:, :, 4] == 0).all() and np.isneginf(lse[:, :, 4]).all()

@on_two("kernel", KERNELS)
def test_a_sink_counts_once(kernel):
  on_kernel(kernel, Sq=4, Sk=300, D=32, extras={"sinks": np.float32([6.0, -2.0])})

@on_two("kernel", KERNELS)
def test_low_scores_are_not_taken_for_masked_ones(kernel):
  # A key that a query sees keeps its weight if its score is below -5e4: a kernel must not treat such a score as masked.
  def low(p:Problem) -> Inputs:
    x = normal(p)
    x.q[:] = 64*np.sign(x.q[:, :, :1])
    x.k[:] = np.float32(.25)*np.round(x.k) - np.sign(x.q[:, :, :1])*16
    return x
  o, lse = on_kernel(kernel, Sq=8, Sk=150, D=64, softmax_scale=1.0, causal=True, make=low)
  assert (lse < -5e4).all() and (o != 0).any()

@pytest.mark.parametrize("kernel", ("forward", "forward_mma", "three_pass"))
def test_huge_scores(kernel):
  # Scores of 1.7e10 in bfloat16, scaled by 0.25, give finite results. The kernel split_kv is left out: split_kv merges partial results by their fp32
  # lse, and an fp32 number of this size is a multiple of 256, so its result is finite but inexact.
  def huge(p:Problem) -> Inputs:
    x = normal(p)
    x.q[:], x.k[:] = 16384.0, 16384.0
    x.k[:, :, ::3] = 16256.0
    return x
  o, _ = on_kernel(kernel, Sq=8, Sk=150, D=64, dtype="bfloat16", softmax_scale=.25, make=huge)
  assert np.isfinite(o).all()

# ***** random problems *****

@st.composite
def problems(d):
  Hkv, group = d(st.integers(1, 2)), d(st.sampled_from((1, 2, 3)))
  B, H, Sq, Sk, D = d(st.integers(1, 2)), Hkv*group, d(st.sampled_from((1, 2, 5, 33))), d(st.integers(1, 140)), d(st.sampled_from((8, 33, 64)))
  causal = d(st.sampled_from((False, True, "top-left")))
  extras = {}
  if d(st.booleans()): extras["alibi_slopes"] = np.abs(floats(*(B, H)[d(st.integers(0, 1)):]))
  if d(st.booleans()):
    bias = floats(*(n if d(st.booleans()) else 1 for n in (B, H, Sq, Sk)))
    extras["bias"] = np.where(np.random.default_rng(0).random(bias.shape) < .2, np.float32(-np.inf), bias)
  if d(st.booleans()): extras["sinks"] = floats(H)
  if d(st.booleans()): extras["kv_lengths"] = np.array([d(st.integers(0, Sk)) for _ in range(B)], np.int32)
  return {"B": B, "H": H, "Hkv": Hkv, "Sq": Sq, "Sk": Sk, "D": D, "causal": causal, "extras": extras,
          "dtype": d(st.sampled_from(("float16", "bfloat16"))),
          "window": (d(st.sampled_from((-1, 0, 5, 200))), -1 if causal else d(st.sampled_from((-1, 0, 9)))),
          "softcap": d(st.sampled_from((0.0, 1.5))),
          "layout": d(st.sampled_from(("bhsd", "bshd"))), "num_splits": d(st.sampled_from((0, 1, 2, 5)))}

@drawn
def test_any_problem(draws):
  @settings(max_examples=draws, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
  @given(problems(), st.sampled_from(EVERY_ARCH))
  def each(parameters, arch): check_attention(arch, **parameters)
  each()

# ***** tensors *****

def test_views_are_copied():
  with emulated("gfx942"):
    qkv = draw(2, 40, 3, 4, 64)
    q, k, v = (qkv[:, :, i].transpose(1, 2) for i in range(3))
    want = array(attn.attention(*(t.contiguous().realize() for t in (q, k, v))))
    np.testing.assert_array_equal(array(attn.attention(q, k, v)), want)
    np.testing.assert_array_equal(array(attn.attention(q*1, k.pad(((0, 0), (0, 0), (0, 3), (0, 0)))[:, :, :40], v)), want)

@on_two("kernel", KERNELS)
def test_out(kernel):
  with emulated(arch_of(kernel), kernel):
    q, k, out = draw(1, 2, 8, 64), draw(1, 2, 130, 64), Tensor.empty(1, 2, 8, 64, dtype=dtypes.half, device="EMU").realize()
    more = SPLITS.get(kernel, {})
    memory = out.uop.buffer
    assert attn.attention(q, k, k, out=out, **more) is out
    np.testing.assert_array_equal(array(out), array(attn.attention(q, k, k, **more)))
    assert out.uop.buffer is memory

@on_two("kernel", KERNELS)
def test_jit(kernel):
  with emulated(arch_of(kernel), kernel):
    @TinyJit
    def step(q, k, v): return attn.attention(q, k, v, causal=True, **SPLITS.get(kernel, {})).realize()
    for seed in range(4):
      q, k, v = (draw(1, 2, n, 32, seed=seed + i) for i, n in enumerate((8, 130, 130)))
      got = array(step(q, k, v))
      x = [array(t) for t in (q, k, v)]
      args = (32**-.5, (-1, 0), 122)
      assert judge(got, law_of(*x, *args, dtype="float16", out_dtype="float16")[0]).ok

@on_two("kernel", KERNELS)
def test_a_variable_number_of_keys_is_one_kernel(kernel):
  with emulated(arch_of(kernel), kernel):
    q, k, v = draw(1, 4, 1, 32), draw(1, 2, 200, 32, seed=1), draw(1, 2, 200, 32, seed=2)
    captured = []
    @TinyJit
    def step(q, n):
      captured.append(n)
      return attn.attention(q, k, v, kv_lengths=n, **SPLITS.get(kernel, {})).realize()
    n = Variable("n", 0, 200)
    for count in (200, 1, 64, 65, 0, 199):
      got, x = array(step(q, n.bind(count))), [array(t) for t in (q, k[:, :, :max(count, 1)], v[:, :, :max(count, 1)])]
      law, _ = law_of(*x, 32**-.5, dtype="float16", out_dtype="float16")
      assert judge(got, law).ok if count else (got == 0).all(), count
    assert len(captured) == 2      # the first call runs eagerly, the second is captured

# ***** several devices *****

@pytest.mark.sample(3)
@in_turn("layout_axis, kernel", [("bhsd", 0), ("bhsd", 1), ("bshd", 0), ("bshd", 2), ("nsd", 0)], KERNELS)
def test_shards_of_batch_and_heads(layout_axis, kernel):
  layout, axis = layout_axis
  B = 1 if layout == "nsd" else 2
  slopes = np.float32([.5, .25, .1, .03])
  extras = {"alibi_slopes": slopes, "bias": floats(B, 4, 1, 130), "sinks": floats(4), "kv_lengths": int32(*(129, 70)[:B])}
  on_kernel(kernel, B=B, H=4, Hkv=2 if layout != "nsd" else 4, Sq=3, Sk=130, D=32, layout=layout, causal=True, extras=extras,
            place=lambda name, t: t.shard(DEVICES, axis) if name in ("q", "k", "v") else t)

@pytest.mark.parametrize("axis", (0, 1))
def test_shards_of_batch_and_heads_communicate_nothing(axis):
  with emulated("gfx942"):
    q, k, v = (draw(2, 2, n, 32, seed=n).shard(DEVICES, axis).realize() for n in (16, 20, 20))
    calls = attn.attention(q, k, v).schedule_linear().src
    assert len(calls) == 1 and all(u.op.name != "COPY" for u in calls[0].toposort())

def test_one_key_value_head_for_query_heads_of_several_devices():
  on_kernel("forward", H=4, Hkv=1, Sq=20, Sk=30, D=32, place=lambda name, t: t.shard(DEVICES, 1 if name == "q" else None))

@pytest.mark.sample(4)
@in_turn("name, kernel", ("full", "causal", "window", "alibi", "sinks", "bias", "more queries than keys"), KERNELS)
def test_shards_of_keys(name, kernel):
  more = {"full": {}, "causal": {"causal": True}, "window": {"window": (30, -1), "causal": True},
          "alibi": {"extras": {"alibi_slopes": np.float32([.5, .25])}},
          "sinks": {"extras": {"sinks": np.float32([3, -1])}}, "bias": {"extras": {"bias": floats(1, 2, 40, 260)}},
          "more queries than keys": {"Sq": 300, "causal": True}}[name]
  on_kernel(kernel, **({"H": 2, "Sq": 40, "Sk": 260, "D": 32, "place": lambda n, t: t.shard(DEVICES, 2 if n in ("k", "v") else None)} | more))

# ***** which kernel *****

def test_explain(capsys):
  with emulated("gfx942"):
    q, k = draw(1, 8, 1, 64), draw(1, 1, 4096, 64)
    choice = attn.explain(q, k, k)
    assert choice.kernel == "split_kv" and choice.work.splits > 1 and choice.work.tile.pack_gqa and not choice.refused
    assert str(choice) == capsys.readouterr().out.rstrip() and "GQA packed" in str(choice) and f"{choice.work.splits} splits" in str(choice)
    choice = attn.explain(q, k, k, num_splits=1)
    assert choice.kernel == "forward" and choice.why_not("split_kv") == "num_splits=1 asks for no split"
    tile = choice.work.tile
    padding = f"padding: {100 - 800/tile.block_m:.0f} % of the rows, 0 % of the keys"
    assert f"\n  workgroups: 1 x {tile.waves} waves on 304 compute units; {padding}\n" in str(choice)
    wide = draw(1, 1, 4, 300)
    assert attn.explain(wide, wide, wide).why_not("forward") == "D=300: this kernel supports at most 256"
    single = draw(1, 1, 4, 64, dtype="float32")
    choice = attn.explain(single, single, single)
    assert choice.kernel == "tiled" and choice.why_not("forward").startswith("dtype float32")
    assert dict(choice.memory) == {"tiled": 0, "three_pass": 4*4*4} and "bytes beside inputs and outputs: tiled 0, three_pass 64" in str(choice)
    choice = attn.explain(*[draw(1, 1, 4, 520)]*3)
    assert choice.kernel == "three_pass" and choice.work.tile is None and choice.why_not("tiled").startswith("D=520: this kernel supports at most")
    with pytest.raises(ValueError, match=r"scale=2: attention has no such option; it has causal, softmax_scale"): attn.explain(q, k, k, scale=2)

def test_explain_on_nvidia():
  # Dispatch on NVIDIA chooses mma.sync kernels also for calls with a score option, a length or a split, and not three_pass, which computes attention
  # in tinygrad's tensor operations.
  for arch in ("sm_80", "sm_90"):
    with emulated(arch):
      q, k = draw(1, 8, 1, 64), draw(1, 1, 4096, 64)
      choice = attn.explain(q, k, k, kv_lengths=4000, softcap=2.0)
      assert choice.kernel == "split_kv" and choice.work.splits > 1 and choice.work.tile.pack_gqa and not choice.refused
      choice = attn.explain(q, k, k, num_splits=1, bias=draw(4096, dtype="float32"), sinks=draw(8, dtype="float32"))
      assert choice.kernel == "forward_mma" and choice.why_not("split_kv") == "num_splits=1 asks for no split"
      assert choice.why_not("forward").startswith(f"{arch}: AMD's kernels have no tile for its matrix unit")
      wide, single = draw(1, 1, 4, 300), draw(1, 1, 4, 64, dtype="float32")
      assert attn.explain(wide, wide, wide).why_not("forward_mma") == "D=300: this kernel supports at most 256"
      assert attn.explain(single, single, single).why_not("split_kv") == "dtype float32: mma.sync takes float16 and bfloat16"

def test_forced(monkeypatch):
  with emulated("gfx942"):
    q = draw(1, 1, 4, 64, dtype="float32")
    monkeypatch.setenv("ATTN_KERNEL", "forward")
    with pytest.raises(NotImplementedError, match=r"ATTN_KERNEL=forward: dtype float32: the matrix instructions take float16 and bfloat16"):
      attn.attention(q, q, q)
    monkeypatch.setenv("ATTN_KERNEL", "fast")
    with pytest.raises(ValueError, match=r"ATTN_KERNEL='fast': must be one of split_kv,.* forward,.* three_pass"): attn.attention(q, q, q)
    monkeypatch.setenv("ATTN_KERNEL", "three_pass")
    half = draw(1, 1, 4, 64)
    assert attn.explain(half, half, half).why_not("forward") == "ATTN_KERNEL=three_pass asks for another kernel"

FORCED = [("gfx950", "dual_wave", {"D": 128}, "blocks of 256 queries leave some of the 256 compute units idle"),
          ("gfx942", "split_kv", {}, "no split is the fastest"), ("sm_90", "forward_wgmma", {}, "a warpgroup has 64 queries"),
          ("sm_90", "forward_mma", {"Sq": 70}, None), ("gfx950", "forward", {"D": 128}, None)]

@pytest.mark.sample(3)
@pytest.mark.parametrize("arch, kernel, sizes, slower", FORCED)
def test_a_kernel_that_would_be_slower_can_be_forced(arch, kernel, sizes, slower):
  # The environment variable ATTN_KERNEL runs a kernel that dispatch would not choose, and `explain` says why another kernel is faster.
  problem = {"H": 2, "Sq": 20, "Sk": 150, "D": 64, "causal": True} | sizes
  with emulated(arch):
    q, k = draw(1, 2, problem["Sq"], problem["D"]), draw(1, 2, 150, problem["D"])
    choice = choice_of(q, k, k, causal=True)
    assert choice.kernel != kernel or slower is None
    if slower is not None: assert slower in choice.why_not(kernel)
  with emulated(arch, kernel):
    work = choice_of(q, k, k, causal=True)
    assert work.kernel == kernel and (work.work.splits == 2) == (kernel == "split_kv")
  check_attention(arch, kernel, **problem)

def test_a_kernel_that_cannot_compute_a_problem_is_not_forced():
  for arch, kernel, sizes, text in (("gfx942", "dual_wave", {"D": 128}, "gfx942 has no direct loads"), ("gfx950", "dual_wave", {}, "D=64, Dv=64"),
                                    ("gfx942", "split_kv", {"Sk": 9}, "no split is possible: .* 1 key tiles"),
                                    ("gfx942", "split_kv", {"num_splits": 1}, "num_splits=1 asks for no split"),
                                    ("sm_80", "forward_wgmma", {}, "sm_80 has no wgmma"), ("sm_90", "forward_wgmma", {"D": 20}, "D=20: must be")):
    with pytest.raises(NotImplementedError, match=f"ATTN_KERNEL={kernel}: {text}"):
      check_attention(arch, kernel, **{"H": 2, "Sq": 20, "Sk": 150, "D": 64} | sizes)

def test_splits_are_held_to_the_key_tiles():
  with emulated("gfx942"):
    q, k = draw(1, 1, 4, 64), draw(1, 1, 130, 64)
    work = attn.explain(q, k, k, num_splits=64).work
    assert work.splits == -(-130//work.tile.block_n) > 1
    assert attn.explain(q, k[:, :, :9], k[:, :, :9], num_splits=64).kernel == "forward"

# ***** refused calls *****

T = lambda *shape, dtype=dtypes.half: Tensor.empty(*shape, dtype=dtype, device="EMU")
Q = lambda: {"q": T(1, 2, 4, 64), "k": T(1, 2, 8, 64), "v": T(1, 2, 8, 64)}
REFUSED = [
  ({"q": 3}, r"q=3: must be a Tensor"),
  ({"bias": 3}, r"bias=3: must be a Tensor or None"),
  ({"layout": "dhsb"}, r"layout='dhsb': must be one of 'bhsd'"),
  ({"q": T(2, 4, 64)}, r"q has shape \(2, 4, 64\); layout='bhsd' needs"),
  ({"v": T(1, 2, 9, 64)}, r"v has shape \(1, 2, 9, 64\): its sequence length"),
  ({"q": T(1, 3, 4, 64)}, "H=3 query heads are not a multiple of Hkv=2"),
  ({"q": T(1, 2, 4, 64, dtype=dtypes.int)}, r"q has dtype int32: must be one of float16, bfloat16, float32"),
  ({"q": T(1, 2, 4, 64, dtype=dtypes.double)}, r"q has dtype double: must be one of float16, bfloat16, float32"),
  ({"q": T(1, 2, 4, 64, dtype=dtypes.float)}, r"q, k and v have dtypes float32, float16, float16: all three must be the same"),
  ({"causal": 2}, r"causal=2: must be one of"),
  ({"window": (1,)}, r"window=\(1,\): must be \(left, right\)"),
  ({"window": (-2, 0)}, r"window=\(-2, 0\)"),
  ({"causal": True, "window": (1, 1)}, r"causal=True with window=\(1, 1\)"),
  ({"softcap": -1.0}, "softcap=-1.0"),
  ({"softmax_scale": 0.0}, "softmax_scale=0.0"),
  ({"num_splits": -1}, r"num_splits=-1: must be 0 \(chosen by a heuristic\), 1 \(no split\) or the number of splits, at most 256"),
  ({"num_splits": 1000}, "num_splits=1000: must be 0 .* at most 256"),
  ({"alibi_slopes": T(3, dtype=dtypes.float)}, r"alibi_slopes has shape \(3,\)"),
  ({"sinks": T(3, dtype=dtypes.float)}, r"sinks has shape \(3,\)"),
  ({"bias": T(3, 8, dtype=dtypes.float)}, r"bias has shape \(1, 1, 3, 8\): must have 4 dimensions that broadcast to \(B, H, Sq, Sk\)"),
  ({"bias": T(4, 8, dtype=dtypes.bool)}, r"bias has dtype bool: must be numbers.*scaled_dot_product_attention takes"),
  ({"bias": T(1, 1, 1, 4, 8)}, r"bias has shape \(1, 1, 1, 4, 8\)"),
  ({"kv_lengths": 9}, r"kv_lengths=9: must lie in 0..8"),
  ({"kv_lengths": -1}, "kv_lengths=-1"),
  ({"kv_lengths": 1.5}, "kv_lengths=1.5: must be an int"),
  ({"kv_lengths": Tensor([3, 4], dtype=dtypes.int, device="EMU")}, r"kv_lengths has shape \(2,\)"),
  ({"kv_lengths": Tensor([3], dtype=dtypes.long, device="EMU")}, r"kv_lengths has dtype int64: must be int32"),
  ({"cu_seqlens_q": Tensor([0, 4], dtype=dtypes.int, device="EMU")}, r"cu_seqlens_q with layout='bhsd'"),
  ({"max_seqlen_q": 4}, "max_seqlen_q=4"),
  ({"layout": "thd", "q": T(4, 2, 64), "k": T(8, 2, 64), "v": T(8, 2, 64)}, "layout='thd' needs cu_seqlens_q"),
  ({"out": T(1, 2, 5, 64)}, r"out has shape \(1, 2, 5, 64\): must be \(1, 2, 4, 64\)"),
  ({"out": T(2, 2, 4, 64)[1:]}, "out is a view"),
  ({"out": T(1, 2, 4, 64), "out_dtype": dtypes.float}, "out_dtype=float32 but out has dtype float16"),
  ({"out_dtype": dtypes.int}, "out_dtype=int32: must be one of float16, bfloat16, float32"),
  ({"arch": "gfx803"}, r"arch='gfx803'"),
  ({"k": Tensor.empty(1, 2, 8, 64, dtype=dtypes.half, device="EMU:1")}, "k is on EMU:1 but q on EMU"),
  ({"sinks": Tensor.empty(2, dtype=dtypes.float, device="EMU:1")}, "sinks is on EMU:1 but q on EMU"),
]

@pytest.mark.parametrize("more, text", REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_refused(more, text):
  with emulated("gfx942"):
    arguments = Q() | more
    before = GlobalCounters.kernel_count
    with pytest.raises((ValueError, NotImplementedError), match=text): attn.attention(**arguments)
    assert GlobalCounters.kernel_count == before

def test_shards_that_do_not_go_together():
  with emulated("gfx942"):
    q, k = T(2, 2, 4, 64), T(2, 2, 8, 64)
    whole, batch, heads, rows = (k.shard(DEVICES, axis) for axis in (None, 0, 1, 2))
    for other in ((batch, heads), (rows, heads), (rows, whole)):
      with pytest.raises(ValueError, match="are sharded along q:"): attn.attention(q.shard(DEVICES, 0), *other)
    with pytest.raises(ValueError, match="are sharded along q: rows"): attn.attention(q.shard(DEVICES, 2), whole, whole)
    with pytest.raises(ValueError, match="are sharded along q: heads, k: None"): attn.attention(q.shard(DEVICES, 1), whole, whole)
    with pytest.raises(ValueError, match="kv_lengths=3 with k and v sharded along their rows: sequence_lengths says how many"):
      attn.attention(q.shard(DEVICES), rows, rows, kv_lengths=3)

def test_a_split_that_no_kernel_makes_is_refused():
  with emulated("gfx942"):
    q = T(1, 2, 4, 600, dtype=dtypes.float)
    with pytest.raises(NotImplementedError, match=r"no kernel takes this problem: .*three_pass: num_splits=2: three_pass supports no key ranges"):
      attn.attention(q, q, q, num_splits=2)

# ***** FlashAttention's names *****

def test_flash_attn_names():
  with emulated("gfx942"):
    q, k, v = draw(2, 20, 4, 32), draw(2, 30, 2, 32, seed=1), draw(2, 30, 2, 32, seed=2)
    want = array(attn.attention(q, k, v, causal=True, layout="bshd", window=(9, -1)))
    o, lse, mask = flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(9, -1), return_attn_probs=True)
    np.testing.assert_array_equal(array(o), want)
    assert lse.shape == (2, 4, 20) and mask is None
    np.testing.assert_array_equal(array(flash_attn.flash_attn_kvpacked_func(q, k.stack(v, dim=2), causal=True, window_size=(9, -1))), want)
    cu_q, cu_k = Tensor([0, 20, 40], dtype=dtypes.int), Tensor([0, 30, 60], dtype=dtypes.int)
    o, lse, _ = flash_attn.flash_attn_varlen_func(q.reshape(40, 4, 32), k.reshape(60, 2, 32), v.reshape(60, 2, 32), cu_q, cu_k, 20, 30, causal=True,
                                                  window_size=(9, -1), return_attn_probs=True)
    np.testing.assert_allclose(array(o).reshape(2, 20, 4, 32), want, atol=1e-3)
    assert lse.shape == (4, 40)
    with pytest.raises(ValueError, match=r"dropout_p=1\.5: must be a probability"): flash_attn.flash_attn_func(q, k, v, dropout_p=1.5)

# ***** caches of a process *****

def test_old_kernels_are_forgotten(monkeypatch) -> None:
  # attn limits how many of its kernels tinygrad's caches keep. If there are more, the oldest are dropped until half of the limit remains. TinyJit
  # still replays calls that it captured earlier, and a new call builds a dropped kernel again.
  most, scale, before = 4, 0.25, set(schedule.schedule_cache)
  monkeypatch.setattr(launch, "MOST_KERNELS", most)
  with emulated("gfx942"):
    q, k, v = (draw(1, 1, 16, 16, seed=i) for i in range(3))
    captured = TinyJit(lambda q, k, v: attn.attention(q, k, v, softmax_scale=scale).realize())
    first = [array(captured(*(t.clone().realize() for t in (q, k, v)))) for _ in range(3)][-1]
    for i in range(2*most): attn.attention(q, k, v, softmax_scale=scale + (1 + i)/64).realize()
    ours = {key: x for key, x in codegen.to_program_cache.items() if x.src[0].arg.name.startswith("attn_")}
    asts, programs = {key[0] for key in ours}, {x.key for x in ours.values()}
    launched = [call.src[0] for key, linear in schedule.schedule_cache.items() if key not in before for call in linear.src]
    of_ours = [x for x in launched if x.op is Ops.SINK and x.arg is not None and x.arg.name.startswith("attn_")]
    assert 1 <= len(ours) <= most + 1 and {x.key for x in of_ours} <= asts      # one more kernel is cached after the cache's size is checked
    assert sum(key[0] in programs for key in realize.runtime_cache) <= most + 1
    np.testing.assert_array_equal(array(captured(*(t.clone().realize() for t in (q, k, v)))), first)
    np.testing.assert_array_equal(array(attn.attention(q, k, v, softmax_scale=scale)), first)

def test_what_is_remembered_of_problems_is_bounded() -> None:
  for remembering in (launch.kernels, gradient.gradient_of, dispatch._choose): assert remembering.cache_parameters()["maxsize"] == MOST_KERNELS
