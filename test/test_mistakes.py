"""Regression tests through public names only: inputs that once gave wrong results silently, crashed, or got a misleading message."""
from __future__ import annotations
import itertools, os, re, subprocess, sys
from pathlib import Path
from typing import Any, Callable
import numpy as np
import pytest
from tinygrad import TinyJit
import attn
from attn import flash_attn
from attn.accuracy import judge, law_of
from attn.problem import Problem
from attn.tinygrad_compat import GlobalCounters, Tensor, dtypes
from api_cases import draw, emulated
from cases import array, in_turn

pytestmark = pytest.mark.usefixtures("not_unrolled")

ROOT = Path(__file__).resolve().parent.parent
REFUSALS = (ValueError, NotImplementedError)
KERNELS = (("gfx942", "forward"), ("gfx1100", "forward"), ("sm_80", "forward_mma"), ("sm_90", "forward_wgmma"), ("gfx942", "split_kv"),
           ("sm_90", "split_kv"), ("gfx942", "three_pass"))
ON_EVERY_KERNEL = pytest.mark.parametrize("arch, kernel", KERNELS)

def int32(*values:int) -> Tensor: return Tensor(np.array(values, np.int32), device="EMU")
def half(*shape:int) -> Tensor: return Tensor.empty(*shape, dtype=dtypes.half, device="EMU")
def check_output(q:Tensor, k:Tensor, v:Tensor, o:Tensor, **options:Any) -> None:
  # Checks that each element of o is within its error limit (docs/contract.md).
  x = [array(t) for t in (q, k, v)]
  args = (x[0].shape[-1]**-.5, options.get("window", (-1, -1)), options.get("offset", 0))
  assert (verdict := judge(array(o), law_of(*x, *args, dtype="float16", out_dtype="float16")[0])).ok, verdict

# ***** packed sequences *****

ROWS = 200     # two key tiles or more in every kernel

def check_packed(arch:str, kernel:str, ends:tuple[int, ...], longest:int|None, sinks:bool) -> None:
  # Runs packed sequences that begin and end at rows `ends`, and compares each with a call of this sequence alone.
  # Rows that belong to no sequence must be 0 with lse -inf, also if the output buffer held other numbers before. `longest` is max_seqlen_q. With
  # `sinks`, the call has sinks.
  with emulated(arch, kernel):
    more: dict[str, Any] = {"num_splits": 2} if kernel == "split_kv" else {}
    if sinks: more["sinks"] = draw(2, dtype="float32")
    out = Tensor.full((ROWS, 2, 32), float("nan"), dtype=dtypes.half, device="EMU").contiguous().realize()
    q, k, v = (draw(ROWS, 2, 32, seed=i) for i in range(3))
    seen = Tensor.zeros(1, device="EMU", dtype=dtypes.int).contiguous() + int32(*ends)      # the host does not know these values
    o, lse = attn.attention(q, k, v, layout="thd", cu_seqlens_q=seen, cu_seqlens_k=seen, max_seqlen_q=longest, causal=True, return_lse=True, out=out,
                            **more)
    Tensor.realize(o, lse)
    got, got_lse, outside = array(o), lse.numpy(), np.ones(ROWS, bool)
    for a, b in itertools.pairwise(ends):
      rows = slice(a, b if longest is None else min(b, a + longest))
      outside[rows] = False
      if b > a and longest is None and not sinks:
        one = int32(0, b - a)
        with emulated("gfx942"):
          parts = (t[a:b].contiguous().realize() for t in (q, k, v))
          own = array(attn.attention(*parts, layout="thd", cu_seqlens_q=one, cu_seqlens_k=one, causal=True))
        np.testing.assert_allclose(got[rows], own, atol=2e-3)
    assert outside.any() and (got[outside] == 0).all() and np.isneginf(got_lse[:, outside]).all()
    assert np.isfinite(got[~outside]).all() and np.isfinite(got_lse[:, ~outside]).all()

@pytest.mark.sample(4)
@in_turn("where, ends", KERNELS, ((5, 20, 20, 70), (0, 64), (30, 200), (0, 0, 3)))
def test_rows_of_no_sequence_are_zero(where:tuple[str, str], ends:tuple[int, ...]) -> None: check_packed(*where, ends, None, False)

@pytest.mark.sample(4)
@ON_EVERY_KERNEL
def test_rows_of_no_sequence_have_no_sink(arch:str, kernel:str) -> None: check_packed(arch, kernel, (5, 20, 70), None, True)

@pytest.mark.sample(4)
@ON_EVERY_KERNEL
def test_rows_beyond_the_longest_sequence_are_zero(arch:str, kernel:str) -> None: check_packed(arch, kernel, (5, 20, 70, 72), 11, False)

def test_padding_under_jit() -> None:
  # Rows of the output beyond the last packed sequence are 0 after every call under TinyJit. None keeps a number that an earlier call wrote.
  with emulated("gfx942"):
    @TinyJit
    def step(q:Tensor, ends:Tensor) -> Tensor:
      return attn.attention(q, q, q, layout="thd", cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=64, max_seqlen_k=64).realize()
    for n in (64, 40, 40, 7, 64):
      o = array(step(draw(64, 1, 32), int32(0, n//2, n).realize()))
      assert (o[n:] == 0).all() and (abs(o[:n]).sum(-1) > 0).all(), n

@pytest.mark.parametrize("ends, longest, text", [
  ((0, 50, 100), 30, "max_seqlen_q=30: cu_seqlens_q has a sequence of 50 rows"),
  ((0, 50, 20), None, r"cu_seqlens_q=\[0, 50, 20\]: must not decrease"),
  ((0, 101), None, r"cu_seqlens_q=\[0, 101\]: must not decrease, and must lie in 0\.\.100"), ((-1, 9), None, r"cu_seqlens_q=\[-1, 9\]")])
def test_the_emulator_names_what_is_wrong_with_sequences(ends:tuple[int, ...], longest:int|None, text:str) -> None:
  with emulated("gfx942"):
    q, seen = half(100, 1, 16), int32(*ends).realize()
    with pytest.raises(ValueError, match=text): attn.attention(q, q, q, layout="thd", cu_seqlens_q=seen, cu_seqlens_k=seen, max_seqlen_q=longest)

# ***** extreme numbers *****

@pytest.mark.sample(9)
@pytest.mark.parametrize("window", ((2**31, 2**31), (2**40, 0), (-1, 2**33), (3, 2**31 - 1), (2**31 - 1, 2), (10**30, 10**30)), ids=str)
@pytest.mark.parametrize("kernel", ("forward", "three_pass", "split_kv"))
def test_bounds_beyond_the_lengths_are_none(kernel:str, window:tuple[int, int]) -> None:
  with emulated("gfx942", kernel):
    q, k, v = draw(1, 2, 40, 32), draw(1, 2, 90, 32, seed=1), draw(1, 2, 90, 32, seed=2)
    o = attn.attention(q, k, v, window=window, num_splits=2 if kernel == "split_kv" else 0)
    check_output(q, k, v, o, window=tuple(-1 if n > 1000 else n for n in window), offset=50)

def test_window_bounds_that_hide_nothing_are_dropped() -> None:
  # attn drops a bound of a window if it hides no key from any query, and only then. This is tested for many offsets between the first query and the
  # first key.
  def cut(window:tuple[int, int], offset:int, Sq:int=40, Sk:int=90) -> tuple[int, int]:
    return Problem(1, 1, 1, Sq, Sk, 16, 16, window=window, offset=offset, softmax_scale=1.0).window
  def seen(window:tuple[int, int], offset:int, Sq:int, Sk:int) -> np.ndarray:
    i, j = np.arange(Sq)[:, None] + offset, np.arange(Sk)[None]
    left = j >= i - window[0] if window[0] >= 0 else j >= np.full_like(i, 0)
    return left & (j <= i + window[1]) if window[1] >= 0 else left
  for offset in (-200, -41, -1, 0, 50, 89, 300):
    for bound in (0, 1, 39, 40, 49, 50, 88, 89, 90, 128, 129, 130, 400):
      for window in ((bound, -1), (-1, bound), (bound, bound)):
        np.testing.assert_array_equal(seen(window, offset, 40, 90), seen(cut(window, offset), offset, 40, 90), err_msg=str((window, offset)))
  assert cut((89, -1), 50) == (-1, -1) and cut((88, -1), 50) == (88, -1) and cut((-1, 39), 50) == (-1, -1) and cut((-1, 38), 50) == (-1, 38)

@pytest.mark.parametrize("kernel", ("forward", "three_pass"))
@pytest.mark.parametrize("options", ({"softcap": 2.0**100}, {"softcap": 1e-30}, {"softmax_scale": 1e30}, {"softmax_scale": 1.2e-38},
                                     {"softcap": 1e20, "softmax_scale": 1e-10}), ids=str)
def test_scales_that_fp32_holds(kernel:str, options:dict[str, float]) -> None:
  # Results are right, and never NaN, for very small and very large values of softmax_scale and softcap.
  from attn.reference import Options
  with emulated("gfx942", kernel):
    q, k, v = (draw(1, 1, 20, 32, seed=i) for i in range(3))
    x, scale = [array(t) for t in (q, k, v)], options.get("softmax_scale", 32**-.5)
    o = array(attn.attention(q, k, v, **options))
    law, _ = law_of(*x, scale, (-1, -1), 0, Options(softcap=options.get("softcap", 0.0)), dtype="float16", out_dtype="float16")
    assert np.isfinite(o).all() and (verdict := judge(o, law)).ok, verdict

@pytest.mark.parametrize("name, value", [("softcap", 1e308), ("softcap", 1e31), ("softcap", 1e-40), ("softmax_scale", 1e300), ("softmax_scale", 3e38),
                                         ("softmax_scale", 1e-45), ("softmax_scale", 10**400)])
def test_scales_that_fp32_does_not_hold(name:str, value:float) -> None:
  with emulated("gfx942"):
    q = half(1, 1, 8, 16)
    with pytest.raises(ValueError, match=f"{name}=.*: must be .*1.2e-38"): attn.attention(q, q, q, **{name: value})

# ***** the cache *****

def test_a_length_near_the_largest_int_is_the_capacity() -> None:
  with emulated("gfx942"):
    k, v = attn.empty_kv_cache(3, 1, 8, 16)
    new = draw(3, 1, 2, 16)
    assert attn.append_kv(new, new, k, v, int32(2**31 - 1, 2**31 - 2, -2**31)).tolist() == [8, 8, 0]
    assert (array(k) == 0).all() and (array(v) == 0).all()

def test_caches_that_overlap() -> None:
  with emulated("gfx942"):
    new, both = draw(1, 2, 1, 16), Tensor.zeros(2, 1, 2, 8, 16, dtype=dtypes.half, device="EMU").contiguous().realize()
    k, _ = attn.empty_kv_cache(1, 2, 8, 16)
    part = lambda i: both[i].contiguous()
    for pair in ((k, k), (part(0), part(0)), (k, k.reshape(1, 2, 8, 16))):
      with pytest.raises(ValueError, match="k_cache and v_cache overlap"): attn.append_kv(new, new, *pair, 0)
      with pytest.raises(ValueError, match="k_cache and v_cache overlap"): attn.attention_with_kv_cache(new, new, new, *pair, 0)
    assert attn.append_kv(new, new*2, part(0), part(1), 3).tolist() == [4]

def test_parts_of_one_buffer_are_caches() -> None:
  with emulated("gfx942"):
    both = Tensor.zeros(2, 1, 2, 8, 16, dtype=dtypes.half, device="EMU").contiguous().realize()
    k, v, new = both[0].contiguous().realize(), both[1].contiguous().realize(), draw(1, 2, 1, 16)
    attn.append_kv(new, new*2, k, v, 3).realize()
    for cache, factor in ((k, 1), (v, 2)): np.testing.assert_array_equal(array(cache)[:, :, 3], array(new)[:, :, 0]*factor)
    np.testing.assert_array_equal(array(both)[1, :, :, 3], array(new)[:, :, 0]*2)

def test_a_refused_call_appends_nothing() -> None:
  with emulated("gfx942"):
    k, v = attn.empty_kv_cache(1, 2, 8, 16)
    new = draw(1, 2, 1, 16)
    for wrong in ({"foo": 1}, {"softcap": -1}, {"out": half(1, 2, 2, 16)}, {"arch": "gfx950"}, {"num_splits": "2"}, {"bias": draw(3, 3)}):
      with pytest.raises(REFUSALS, match=next(iter(wrong))): attn.attention_with_kv_cache(new, new, new, k, v, 3, **wrong)
    assert (array(k) == 0).all() and (array(v) == 0).all()

def clang(folder:Path) -> str:
  # Returns a value for PATH with which the command `clang` runs the clang of the PyPI package ziglang.
  pytest.importorskip("ziglang")
  (script := folder/"clang").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ziglang clang "$@"\n')
  script.chmod(0o755)
  return f"{folder}{os.pathsep}{os.environ['PATH']}"

# The three steps run eagerly, captured, and replayed.
CACHE_ON_THE_CPU = """
import numpy as np
from tinygrad import Tensor, TinyJit, Variable
import attn
from attn.accuracy import judge, law_of
rng, caches = np.random.default_rng(0), attn.empty_kv_cache(1, 2, 128, 16, layout="bshd")
q, k, v = (rng.standard_normal((1, 3, heads, 16)).astype(np.float16) for heads in (4, 2, 2))
step = TinyJit(lambda q, k, v, position: attn.attention_with_kv_cache(q, k, v, *caches, position, layout="bshd").realize())
for i in range(3):
  got = step(*(Tensor(x[:, i:i + 1]).realize() for x in (q, k, v)), Variable("position", 0, 127).bind(i)).numpy()
  work = (*(np.moveaxis(x, 1, 2) for x in (q[:, i:i + 1], k[:, :i + 1], v[:, :i + 1])), 16**-0.5, (-1, -1), 0)
  verdict = judge(np.moveaxis(got, 1, 2), law_of(*work, dtype="float16", out_dtype="float16")[0])
  assert verdict.ok, verdict
"""

@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in for clang is a shell script")
def test_the_cache_on_the_cpu(tmp_path:Path) -> None:
  environment = {k: v for k, v in os.environ.items() if k not in ("DEV", "CC")} | {"DEV": "CPU", "PATH": clang(tmp_path), "PYTHONPATH": str(ROOT)}
  done = subprocess.run([sys.executable, "-c", CACHE_ON_THE_CPU], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=240)
  assert done.returncode == 0, done.stderr[-2000:]

# ***** gradients, and other libraries *****

@pytest.mark.parametrize("causal", (True, "top-left"))
def test_the_gradient_of_rows_that_see_no_key(causal:bool|str) -> None:
  with emulated("gfx942", "three_pass"):
    q, k, v = draw(1, 1, 90, 16, dtype="float32"), draw(1, 1, 40, 16, dtype="float32", seed=1), draw(1, 1, 40, 16, dtype="float32", seed=2)
    o, _ = attn.attention(q, k, v, causal=causal, return_lse=True)
    weight = draw(1, 1, 90, 16, dtype="float32", seed=3)
    gradients = [array(g) for g in (o*weight).sum().gradient(q, k, v)]
    assert all(np.isfinite(g).all() for g in gradients)
    x, scale, w = [array(t).astype(np.float64)[0, 0] for t in (q, k, v)], 16**-.5, array(weight).astype(np.float64)[0, 0]
    offset = -50 if causal is True else 0
    seen = np.arange(40) <= np.arange(90)[:, None] + offset
    s = np.where(seen, x[0] @ x[1].T*scale, -np.inf)
    p = np.where(seen, np.exp(s - np.where(seen.any(1, keepdims=True), s.max(1, keepdims=True), 0)), 0)
    p /= np.where(p.sum(1, keepdims=True) == 0, 1, p.sum(1, keepdims=True))
    dp = w @ x[2].T
    ds = p*(dp - (p*dp).sum(1, keepdims=True))*scale
    for got, want in zip(gradients, (ds @ x[1], ds.T @ x[0], p.T @ w)): np.testing.assert_allclose(got[0, 0], want, atol=1e-5)

def test_another_librarys_method_comes_back() -> None:
  name, calls = "scaled_dot_product_attention", []
  stored, own = vars(Tensor).get(name), Tensor.scaled_dot_product_attention
  def theirs(self:Tensor, *args:Any, **kwargs:Any) -> Tensor:
    calls.append(1)
    return own(self, *args, **kwargs)
  try:
    setattr(Tensor, name, theirs)
    with attn.installed(): assert Tensor.scaled_dot_product_attention is not theirs
    assert Tensor.scaled_dot_product_attention is theirs
    with emulated("gfx942"), attn.installed():
      q = draw(1, 1, 4, 520)                            # no kernel of attn takes rows this wide
      q.scaled_dot_product_attention(q, q)
      assert calls
    with attn.installed():                              # a method that replaced attn's method stays, and still works, after attn's method is removed
      ours = Tensor.scaled_dot_product_attention
      over = lambda self, *args, **kwargs: ours(self, *args, **kwargs)
      setattr(Tensor, name, over)
    assert Tensor.scaled_dot_product_attention is over
    with emulated("gfx942"): assert q.scaled_dot_product_attention(q, q).shape == q.shape
  finally:
    if stored is None: delattr(Tensor, name)
    else: setattr(Tensor, name, stored)

# ***** a refused call leaves no trace *****

@pytest.mark.parametrize("right, wrong", [({"num_splits": 2}, {"num_splits": 2.0}), ({"num_splits": 1}, {"num_splits": True}),
                                          ({"window": (3, 1)}, {"window": (3.0, 1.0)}), ({"causal": True}, {"causal": 1.0})], ids=str)
def test_a_refused_call_leaves_no_trace(right:dict[str, Any], wrong:dict[str, Any]) -> None:
  with emulated("gfx942"):
    q, k = draw(1, 1, 12, 48), draw(1, 1, 130, 48)
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}="): attn.attention(q, k, k, **wrong).realize()
    assert np.isfinite(array(attn.attention(q, k, k, **right))).all()

def test_a_refused_call_with_sequences_leaves_no_trace() -> None:
  with emulated("gfx942"):
    q, ends = draw(38, 1, 16), int32(0, 20, 38)
    for name in ("max_seqlen_q", "max_seqlen_k"):
      with pytest.raises(ValueError, match=f"{name}=38.0: must be"):
        attn.attention(q, q, q, layout="thd", cu_seqlens_q=ends, cu_seqlens_k=ends, **{name: 38.0})
      assert np.isfinite(array(attn.attention(q, q, q, layout="thd", cu_seqlens_q=ends, cu_seqlens_k=ends, **{name: 38}))).all()

def test_a_refused_kernel_leaves_no_trace() -> None:
  with emulated("gfx942"):
    with pytest.raises(ValueError, match=r"window=\(3.5, 1\)"): attn.flash_attention_fn(window=(3.5, 1))
    assert attn.flash_attention_fn(causal=np.bool_(True)) is attn.flash_attention_fn(causal=True)
    assert attn.flash_attention_fn(window=[np.int64(3), 1]) is attn.flash_attention_fn(window=(3, 1))

def test_numbers_of_numpy_and_lists_are_accepted() -> None:
  with emulated("gfx942"):
    q, k = draw(1, 2, 12, 32), draw(1, 2, 70, 32)
    for plain, other in (({"num_splits": 2}, {"num_splits": np.int64(2)}), ({"window": (4, 3)}, {"window": [np.int32(4), 3]}),
                         ({"softcap": 2.0}, {"softcap": np.float32(2)}), ({"softmax_scale": .25}, {"softmax_scale": np.float64(.25)}),
                         ({"kv_lengths": 30}, {"kv_lengths": np.int64(30)}), ({"out_dtype": dtypes.float}, {"out_dtype": "float32"}),
                         ({"causal": True}, {"causal": np.bool_(True)})):
      np.testing.assert_array_equal(array(attn.attention(q, k, k, **plain)), array(attn.attention(q, k, k, **other)))

# ***** error messages *****

def refusal(call:Callable[[], Any]) -> str:
  # Returns the error message of a call that attn refuses before any kernel; the message must be short and contain no UOps.
  before = GlobalCounters.kernel_count
  with pytest.raises(REFUSALS) as e: call()
  assert GlobalCounters.kernel_count == before and "UOp(" not in str(e.value) and "<UOp" not in str(e.value) and len(str(e.value)) < 500, str(e.value)
  return str(e.value)

def test_error_messages() -> None:
  from tinygrad import Variable
  with emulated("gfx942"):
    q, k = half(1, 2, 4, 64), half(1, 2, 8, 64)
    thd, ends = half(9, 2, 64), int32(0, 9)
    n = Variable("n", 1, 8).bind(3)
    caches = [Tensor.zeros(1, 2, 8, 64, dtype=dtypes.half, device="EMU").contiguous() for _ in range(2)]
    rows = half(1, 8, 2, 64)
    def call(*args:Tensor, **options:Any) -> Callable[[], Any]: return lambda: attn.attention(*(args or (q, k, k)), **options)
    for words, refused in (
      ("cu_seqlens_q has dtype int64: must be int32", call(thd, thd, thd, layout="thd", cu_seqlens_q=ends.cast(dtypes.long), cu_seqlens_k=ends)),
      ("kv_lengths=3 with layout='thd': packed sequences take their lengths from cu_seqlens_k",
       call(thd, thd, thd, layout="thd", cu_seqlens_q=ends, cu_seqlens_k=ends, kv_lengths=3)),
      ("bias=ndarray of shape (4, 8) and dtype float32: must be a Tensor or None", call(bias=np.zeros((4, 8), np.float32))),
      ("q=ndarray of shape (1, 2, 4, 64) and dtype float64: must be a Tensor", call(np.zeros((1, 2, 4, 64)), k, k)),     # type: ignore[arg-type]
      ("k has the symbolic shape (1, 2, n, 64)", call(q, k[:, :, :n], k)),
      ("D=0: must be a whole number", call(half(1, 2, 4, 0), half(1, 2, 8, 0), half(1, 2, 8, 0))),
      ("arch='gfx1100': must be 'gfx942'", call(arch="gfx1100")), ("arch=3: must be the name of a chip", call(arch=3)),
      ("out_dtype='int8': must be one of float16", call(out_dtype="int8")),
      ("cache_seqlens=9: must lie in 0..8", lambda: flash_attn.flash_attn_with_kvcache(rows[:, :1], rows, rows, cache_seqlens=9)),
      ("cache_seqlens=1.5: must be an int", lambda: flash_attn.flash_attn_with_kvcache(rows[:, :1], rows, rows, cache_seqlens=1.5)),  # type: ignore[arg-type]
      ("cache_seqlens has dtype int64: must be int32",
       lambda: flash_attn.flash_attn_with_kvcache(rows[:, :1], rows, rows, cache_seqlens=int32(3).cast(dtypes.long))),
      ("cache_seqlens has dtype int64: must be int32",
       lambda: attn.attention_with_kv_cache(q[:, :, :1], q[:, :, :1], q[:, :, :1], *caches, int32(3).cast(dtypes.long))),
      ("window_size=3: must be (left, right)", lambda: flash_attn.flash_attn_func(rows, rows, rows, window_size=3)),    # type: ignore[arg-type]
      ("attn_mask has shape (3, 8): must broadcast", lambda: attn.scaled_dot_product_attention(q, k, k, attn_mask=half(3, 8))),
      ("scale='x': must be", lambda: attn.scaled_dot_product_attention(q, k, k, scale="x")),        # type: ignore[arg-type]
      ("query=3: must be a Tensor", lambda: attn.scaled_dot_product_attention(3, k, k)),      # type: ignore[arg-type]
      ("key has shape (1, 2, 8, 32): its head dimension", lambda: attn.scaled_dot_product_attention(q, half(1, 2, 8, 32), k)),
    ): assert words in refusal(refused), words

def test_a_kernel_for_another_chip_is_not_launched() -> None:
  with emulated("gfx942"):
    q = half(1, 2, 4, 64)
    assert "arch='gfx1100': must be 'gfx942'" in refusal(
      lambda: half(1, 2, 4, 64).custom_kernel(q, q, q, fxn=attn.flash_attention_fn(arch="gfx1100")))
    assert attn.explain(q, q, q, arch="gfx950").arch.name == "gfx950"      # `explain` for another chip is allowed: it launches nothing

def test_a_grid_beyond_the_chip_is_named() -> None:
  with emulated("gfx942"):
    q = half(65536, 65536, 1, 8)
    assert re.search(r"attn_forward_gfx942\w* needs 4294967296 workgroups: gfx942 has 2147483647", refusal(lambda: attn.attention(q, q, q)))

# ***** other settings *****

def script(text:str, **environment:str) -> subprocess.CompletedProcess[str]:
  clean = {k: v for k, v in os.environ.items() if not k.startswith("ATTN_")}
  return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, cwd=ROOT, timeout=240,
                        env=clean | {"PYTHONPATH": str(ROOT), "DEV": "EMU::gfx942"} | environment)

FIRST = """
from tinygrad import Tensor, dtypes
from attn import flash_attention
q = Tensor.ones(1, 1, 32, 32, dtype=dtypes.half).contiguous()
print(Tensor.empty(1, 1, 32, 32, dtype=dtypes.half).custom_kernel(q, q, q, fxn=flash_attention)[0].numpy().sum() == 1024)
"""

def test_tinygrads_own_checks() -> None:
  assert (done := script(FIRST, SPEC="2")).stdout == "True\n", done.stderr[-1500:]

def test_switches_of_the_emulator() -> None:
  assert "ATTN_EMU_CHECKS='perhaps': must be one of 0, false" in script(FIRST, ATTN_EMU_CHECKS="perhaps").stderr
  counted = script(FIRST, ATTN_EMU_BANKS="1").stderr
  assert re.search(r"attn_forward_gfx942\w* on gfx942: lds\d+: (reads|writes) of 16 bytes take \d+ cycles, 0 of them for bank conflicts", counted)
