"""Tests of `scaled_dot_product_attention` as a replacement for the method of tinygrad's Tensor. Its results agree with PyTorch's definition in
float64, in direct calls and when attn is installed under a transformer."""
import os, subprocess, sys
import numpy as np
import pytest
from tinygrad import TinyJit
import attn
from attn.accuracy import judge, law_of
from attn.api import sdpa
from attn.reference import Options
from attn.tinygrad_compat import Context, Tensor, UOp, dtypes
from api_cases import draw, emulated
from cases import EVERY_ARCH, array, in_turn, tensor

pytestmark = pytest.mark.usefixtures("not_unrolled")

def law(q, k, v, mask=None, is_causal=False, scale=None, dtype=""):
  # Computes scaled_dot_product_attention by PyTorch's definition in float64, with the error limit of each element.
  # Axes before the last two may broadcast. A row that sees no key gives 0.
  if q.ndim > 2 and k.shape[-3] not in (1, q.shape[-3]): k, v = (np.repeat(x, q.shape[-3]//x.shape[-3], -3) for x in (k, v))
  lead = np.broadcast_shapes(q.shape[:-2], k.shape[:-2], () if mask is None else mask.shape[:-2])
  flat = lambda x, *last: np.broadcast_to(x, (*lead, *(last or x.shape[-2:]))).reshape(-1, 1, *(last or x.shape[-2:]))
  if is_causal: mask = np.tril(np.ones((q.shape[-2], k.shape[-2]), bool))
  if mask is not None and mask.dtype == bool: mask = np.where(mask, 0, -np.inf)
  bias = None if mask is None else flat(mask, q.shape[-2], k.shape[-2])
  found, _ = law_of(flat(q), flat(k), flat(v), q.shape[-1]**-.5 if scale is None else scale, options=Options(bias=bias), dtype=dtype, out_dtype=dtype)
  return found.of(lambda x: x.reshape(*lead, *x.shape[-2:]))

rng = np.random.default_rng(5)
MASKS = {"2d": rng.random((20, 40)) > .3, "4d": rng.random((2, 1, 20, 40)) > .3, "keys": rng.random((2, 1, 1, 40)) > .3,
         "added": rng.standard_normal((4, 20, 40)).astype(np.float32), "a row that sees nothing": np.arange(20)[:, None].repeat(40, 1) != 3}
CALLS = {
  "plain": {}, "causal": {"is_causal": True}, "gqa": {"enable_gqa": True, "kv_heads": 2}, "scale": {"scale": .5},
  "gqa causal": {"enable_gqa": True, "is_causal": True, "kv_heads": 1}, **{f"mask {name}": {"attn_mask": mask} for name, mask in MASKS.items()},
}

@pytest.mark.sample(5)
@in_turn("name, dtype", CALLS, ("float16", "bfloat16", "float32"))
def test_arguments(name, dtype):
  call = dict(CALLS[name])
  kv_heads, mask = call.pop("kv_heads", 4), call.pop("attn_mask", None)
  with emulated("gfx942"):
    q, k, v = draw(2, 4, 20, 32, dtype=dtype), draw(2, kv_heads, 40, 32, dtype=dtype, seed=1), draw(2, kv_heads, 40, 32, dtype=dtype, seed=2)
    o = attn.scaled_dot_product_attention(q, k, v, None if mask is None else Tensor(mask), **call)
    x = [array(t) for t in (q, k, v)]
    call.pop("enable_gqa", None)
    assert o.dtype == q.dtype
    verdict = judge(array(o), law(*x, mask, dtype=dtype, **call))
    assert verdict.ok, verdict

@pytest.mark.parametrize("q, k, mask", [((20, 32), (40, 32), None), ((3, 20, 32), (3, 40, 32), None), ((2, 3, 2, 20, 32), (2, 3, 2, 40, 32), None),
                                        ((2, 3, 20, 32), (1, 1, 40, 32), None), ((3, 20, 32), (2, 3, 40, 32), None),
                                        ((2, 3, 2, 20, 32), (2, 3, 2, 40, 32), (2, 1, 1, 20, 40)), ((3, 20, 32), (3, 40, 32), (3, 1, 40))])
def test_shapes(q, k, mask):
  with emulated("gfx942"):
    q, k = draw(*q), draw(*k, seed=1)
    m = None if mask is None else floats(mask)
    o = attn.scaled_dot_product_attention(q, k, k, None if m is None else Tensor(m))
    assert (verdict := judge(array(o), law(array(q), array(k), array(k), m, dtype="float16"))).ok, verdict

def floats(shape): return np.random.default_rng(3).standard_normal(shape).astype(np.float32)

def test_refused():
  with emulated("gfx942"):
    q, k = draw(2, 4, 20, 32), draw(2, 2, 40, 32)
    with pytest.raises(ValueError, match=r"dropout_p=1\.5: must be a probability"):
      attn.scaled_dot_product_attention(q, q, q, None, 1.5)
    with pytest.raises(ValueError, match="attn_mask is on EMU:1 but query on EMU"):
      attn.scaled_dot_product_attention(q, q, q, Tensor(MASKS["2d"], device="EMU:1"))
    with pytest.raises(RuntimeError, match="attn_mask with is_causal=True"):
      attn.scaled_dot_product_attention(q, q, q, Tensor(MASKS["2d"]), is_causal=True)
    with pytest.raises(ValueError, match=r"key has batch and head dimensions \(2, 2\): must broadcast to \(2, 4\); enable_gqa=True lets"):
      attn.scaled_dot_product_attention(q, k, k)
    with pytest.raises(ValueError, match="enable_gqa=True with 4 query heads: must be a multiple of the 3"):
      attn.scaled_dot_product_attention(q, draw(2, 3, 40, 32), draw(2, 3, 40, 32), enable_gqa=True)
    with pytest.raises(ValueError, match=r"query has shape \(3,\)"): attn.scaled_dot_product_attention(draw(3), k, k)

@pytest.mark.parametrize("arch", ["gfx942", "sm_80"])
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_a_bool_mask_is_added(arch, number):
  # Where a bool mask is False, -inf is added to the score, as in tinygrad's own function. So the NaN score of a key with a NaN or an infinity stays
  # NaN, although the mask hides the key.
  with emulated(arch):
    q, v = draw(1, 2, 5, 32), draw(1, 2, 40, 32, seed=1)
    key, mask = array(draw(1, 2, 40, 32, seed=2)), np.random.default_rng(0).random((1, 1, 5, 40)) < .8
    key[:, 0, 7], mask[..., 7] = number, False
    k, mask = tensor(key, "float16"), Tensor(mask, device="EMU")
    own, ours = (array(f(q, k, v, mask)) for f in (Tensor.scaled_dot_product_attention, attn.scaled_dot_product_attention))
  assert np.isnan(own[:, 0]).all() and not np.isnan(own[:, 1]).any()
  np.testing.assert_array_equal(np.isnan(ours), np.isnan(own))

# ***** in place of tinygrad's own method *****

class Block:
  # A layer of a transformer with grouped queries, written as a user of tinygrad would write it.
  def __init__(self, width=64, heads=4, kv_heads=2, dtype=dtypes.half):
    self.heads, self.kv_heads, self.head = heads, kv_heads, width//heads
    draw = lambda out, inp, seed: np.random.default_rng(seed).standard_normal((out, inp), np.float32)/inp**.5
    weight = lambda *arguments: tensor(draw(*arguments), "float16").cast(dtype).realize()
    self.qkv, self.out = weight(self.head*(heads + 2*kv_heads), width, 1), weight(width, width, 2)
    self.up, self.down = weight(2*width, width, 3), weight(width, 2*width, 4)
  def __call__(self, x, **how):
    b, n, width = x.shape
    qkv = x.layernorm().cast(x.dtype).linear(self.qkv.T).reshape(b, n, -1, self.head).transpose(1, 2)
    q, k, v = qkv[:, :self.heads], qkv[:, self.heads:self.heads + self.kv_heads], qkv[:, self.heads + self.kv_heads:]
    a = q.scaled_dot_product_attention(k, v, enable_gqa=True, **how)
    x = x + a.transpose(1, 2).reshape(b, n, width).linear(self.out.T)
    return x + x.layernorm().cast(x.dtype).linear(self.up.T).gelu().linear(self.down.T)

def network(x, **how):
  for block in (Block(dtype=x.dtype), Block(dtype=x.dtype)): x = block(x, **how)
  return x

HOW = {"causal": {"is_causal": True}, "mask": {"attn_mask": np.random.default_rng(1).random((2, 1, 24, 24)) > .2}, "plain": {}}

@pytest.mark.parametrize(("name", "arch"), [pytest.param(name, arch, marks=() if how and k == 2*i else pytest.mark.thorough)
                                            for i, (name, how) in enumerate(HOW.items()) for k, arch in enumerate(EVERY_ARCH)])
def test_a_transformer_both_ways(name, arch):
  # A transformer in half precision differs from its fp32 results by at most twice as much with attn's attention as with tinygrad's.
  with emulated(arch):
    x = draw(2, 24, 64)
    how = {option: Tensor(x) if isinstance(x, np.ndarray) else x for option, x in HOW[name].items()}
    exact, own = array(network(x.float(), **how)), array(network(x, **how))
    with attn.installed() as decisions:
      before = len(decisions)
      ours = array(network(x, **how))
      assert [d.kernel for d in list(decisions)[before:]] == ["forward_mma" if arch.startswith("sm_") else "forward"]*2
    assert np.abs(ours - exact).max() <= 2*np.abs(own - exact).max() + 1e-5
    assert np.abs(ours - own).max() > 0     # different kernels round differently

def goes_through_ours(method=None) -> bool:
  # Returns whether a call of tinygrad's method, or of the reference `method` to it, reaches attn.
  with emulated("gfx942"):
    q, before = draw(1, 1, 4, 16), len(sdpa.decisions)
    (method or Tensor.scaled_dot_product_attention)(q, q, q)
    return len(sdpa.decisions) > before

def test_install_and_uninstall():
  assert not goes_through_ours()
  attn.install()
  try:
    assert goes_through_ours() and attn.install() is sdpa.decisions
    with attn.installed(): pass
    assert goes_through_ours()     # leaving the inner `installed` keeps the outer installation
  finally: attn.uninstall()
  assert not goes_through_ours()
  attn.uninstall()
  with pytest.raises(KeyError), attn.installed(): raise KeyError
  assert not goes_through_ours()

BOUND_EARLY = Tensor.scaled_dot_product_attention      # as extra/models/unet.py binds it when it is imported

def test_what_was_bound_before_is_ours_too():
  with attn.installed():
    assert goes_through_ours(BOUND_EARLY)
    with emulated("gfx942"):
      q = draw(1, 2, 20, 16)
      np.testing.assert_array_equal(array(BOUND_EARLY(q, q, q, is_causal=True)), array(attn.attention(q, q, q, causal="top-left")))
  assert not goes_through_ours(BOUND_EARLY)

def test_another_library_in_its_place(monkeypatch):
  # attn can be installed after another library has replaced tinygrad's method by its own function, which calls tinygrad's method. A call that attn
  # does not compute goes to the library's function. The call inside this function then reaches tinygrad's own method and not attn.
  calls = []
  def others(*args, **kwargs):
    calls.append(args)
    return BOUND_EARLY(*args, **kwargs)
  monkeypatch.setattr(Tensor, "scaled_dot_product_attention", others)
  with emulated("gfx942"), attn.installed() as decisions:
    long, before = draw(1, 1, 4, 600), len(decisions)
    assert array(long.scaled_dot_product_attention(long, long)).shape == (1, 1, 4, 600)
    assert len(calls) == 1 and [x.kernel for x in list(decisions)[before:]] == [None]
    assert goes_through_ours() and len(calls) == 1
  assert Tensor.scaled_dot_product_attention is others and not goes_through_ours()

def test_without_wrapped_methods():
  # tinygrad does not wrap its methods if TRACEMETA=0. A reference to a method that was taken before `import attn` still reaches attn while attn is
  # installed.
  script = ("from tinygrad import Tensor; early = Tensor.scaled_dot_product_attention; import attn; q = Tensor.empty(1, 1, 4, 16, dtype='half')\n"
            "with attn.installed() as decisions: early(q, q, q)\nassert len(decisions) == 1; early(q, q, q); assert len(decisions) == 1")
  subprocess.run([sys.executable, "-c", script], env={**os.environ, "TRACEMETA": "0", "DEV": "EMU::gfx942"}, check=True)

# ***** weak dtypes *****

@pytest.mark.parametrize("arch", ("gfx942", "sm_80"))
def test_a_mask_of_a_weak_dtype(arch):
  # The mask of tinygrad's BERT, (1.0 - mask)*-10000.0, works as attn_mask and as bias. The mask has the dtype weakfloat, which takes the dtype of the
  # tensor that it is added to; attn treats it as float32.
  with emulated(arch):
    q, seen = draw(2, 2, 24, 16), Tensor(np.random.default_rng(5).integers(0, 2, (2, 1, 1, 24)).astype(np.int32))
    mask = (1.0 - seen)*-10000.0
    assert mask.dtype == dtypes.weakfloat
    with attn.installed() as decisions: got = array(q.scaled_dot_product_attention(q, q, attn_mask=mask))
    assert decisions[-1].kernel in ("forward", "forward_mma")
    np.testing.assert_array_equal(got, array(attn.attention(q, q, q, bias=mask.cast(dtypes.float))))
    np.testing.assert_array_equal(array(attn.attention(q, q, q, bias=mask)), got)

WEAK = {"bias": lambda: Tensor(1.5), "sinks": lambda: Tensor([1, 2])*1.0, "alibi_slopes": lambda: Tensor([1, 2])*0.5}

@pytest.mark.parametrize("option, weak", WEAK.items())
def test_options_of_a_weak_dtype(option, weak):
  with emulated("gfx942"):
    q = draw(1, 2, 20, 16)
    got, want = (array(attn.attention(q, q, q, **{option: x})) for x in (weak(), weak().cast(dtypes.float)))
    np.testing.assert_array_equal(got, want)
    assert not np.array_equal(got, array(attn.attention(q, q, q))) or option == "bias"     # a bias that is the same number everywhere changes nothing

@pytest.mark.parametrize("q, call, reason", [
  (lambda: draw(1, 2, 8, 520, dtype="float32"), {}, "forward: dtype float32"), (lambda: draw(1, 2, 8, 600), {}, "tiled: D=600"),
  (lambda: draw(1, 2, 8, 32, dtype="float32").cast(dtypes.double), {}, "has dtype double"),
])
def test_tinygrads_own_where_dispatch_says_no(q, call, reason):
  with emulated("gfx942"):
    q = q()
    want = q.scaled_dot_product_attention(q, q, **call).numpy()
    sdpa.installation.said.clear()
    with attn.installed() as decisions, pytest.warns(UserWarning, match="goes to tinygrad's own") as said:
      got = q.scaled_dot_product_attention(q, q, **call).numpy()
    assert [x.filename for x in said] == [__file__]      # the warning names the caller's line
    assert decisions[-1].kernel is None and reason in decisions[-1].reason
    np.testing.assert_array_equal(got, want)

def test_training_with_dropout():
  # Training with dropout uses attn's kernels, except for dropout_p=1.0, which drops all of P: there tinygrad's own method computes the result.
  with emulated("gfx942"), Context(TRAINING=1), attn.installed() as decisions:
    q = draw(1, 2, 8, 32)
    assert np.isfinite(q.scaled_dot_product_attention(q, q, dropout_p=.5).float().sum().gradient(q)[0].numpy()).all()
    assert decisions[-1].kernel == "forward"
    assert not q.scaled_dot_product_attention(q, q, dropout_p=1.0).numpy().any()
    assert decisions[-1].kernel is None and "dropout_p=1.0" in decisions[-1].reason

def test_dropout_does_nothing_outside_training():
  with emulated("gfx942"), attn.installed() as decisions:
    q = draw(1, 2, 8, 32)
    np.testing.assert_array_equal(array(q.scaled_dot_product_attention(q, q, dropout_p=.5)), array(q.scaled_dot_product_attention(q, q)))
    assert decisions[-1].kernel == "forward"
    np.testing.assert_array_equal(array(q.scaled_dot_product_attention(q, q, dropout_p=1)), array(q.scaled_dot_product_attention(q, q)))

@pytest.mark.parametrize("keys", [5, UOp.variable("keys", 1, 5).bind(3)])
@pytest.mark.filterwarnings("ignore:scaled_dot_product_attention goes to tinygrad's own")
def test_no_probability_is_refused_outside_training(keys):
  with emulated("gfx942"):
    q, k = draw(1, 2, 3, 16), draw(1, 2, 5, 16).contiguous().realize()[:, :, :keys]
    with pytest.raises(ValueError, match=r"^scaled_dot_product_attention: dropout_p=2\.0: must be a probability"):
      attn.scaled_dot_product_attention(q, k, k, dropout_p=2.0)
    with attn.installed(), pytest.raises(ValueError, match=r"2\.0 is out of range"): q.scaled_dot_product_attention(k, k, dropout_p=2.0)

def test_scale_reaches_tinygrads_own():
  with emulated("gfx942"), attn.installed():
    q = draw(1, 2, 8, 32, dtype="float32")
    np.testing.assert_allclose(q.scaled_dot_product_attention(q, q, scale=.5).numpy(), law(*[array(q)]*3, scale=.5, dtype="float32").exact, atol=1e-5)

def test_a_jitted_layer():
  with emulated("gfx942"), attn.installed():
    step = TinyJit(lambda x: network(x, is_causal=True).realize())
    for seed in range(3):
      x = draw(1, 16, 64, seed=seed)
      got = array(step(x))
      np.testing.assert_array_equal(got, array(network(x, is_causal=True)))
