"""Tests of three_pass, the fallback in tinygrad's tensor operations, with every kind of length, dtype, head dimension and option."""
import numpy as np
import pytest
import attn
from attn.problem import Problem
from attn.tinygrad_compat import Tensor, dtypes
from api_cases import check_attention, draw, emulated, floats, int32
from cases import Inputs, in_turn, normal

pytestmark = pytest.mark.usefixtures("not_unrolled")

def check(**parameters): return check_attention("gfx942", "three_pass", **parameters)

@pytest.mark.sample(10)
@pytest.mark.parametrize("Sk", [1, 3, 5, 7, 8, 31, 33])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_key_lengths(Sk, dtype): check(B=1, H=2, Hkv=1, Sq=4, Sk=Sk, D=24, dtype=dtype)

@pytest.mark.parametrize("D, Dv", [(300, 300), (257, 31), (1, 1), (40, 333)])
def test_head_dimensions(D, Dv): check(Sq=9, Sk=11, D=D, Dv=Dv, dtype="float32")

@pytest.mark.parametrize("layout", ["bhsd", "bshd", "nsd"])
def test_layouts(layout): check(B=2, H=2, Sq=6, Sk=9, D=16, layout=layout, causal=True)

OPTIONS = {
  "causal": {"causal": True}, "top-left": {"causal": "top-left"}, "window": {"window": (3, 1)}, "left": {"window": (2, -1)},
  "softcap": {"softcap": 1.5},
  "alibi": {"extras": {"alibi_slopes": np.float32([.5, .25])}}, "alibi of batches": {"extras": {"alibi_slopes": np.abs(floats(2, 2))}},
  "bias": {"extras": {"bias": floats(2, 2, 9, 13)}}, "bias of keys": {"extras": {"bias": floats(1, 1, 1, 13)}},
  "sinks": {"extras": {"sinks": floats(2)}},
  "lengths": {"extras": {"kv_lengths": int32(4, 13)}}, "no keys": {"extras": {"kv_lengths": int32(0, 2)}},
  "all": {"causal": True, "window": (6, -1), "softcap": 2.0, "extras": {
    "alibi_slopes": np.float32([.5, .25]), "bias": floats(2, 1, 9, 13), "sinks": floats(2), "kv_lengths": int32(5, 11)}},
  "top-left lengths": {"causal": "top-left", "extras": {"kv_lengths": int32(4, 13)}},
}

@pytest.mark.sample(14)
@in_turn("name, dtype", OPTIONS, ["float16", "float32"])
def test_options(name, dtype): check(B=2, H=2, Sq=9, Sk=13, D=16, dtype=dtype, **OPTIONS[name])

@pytest.mark.parametrize("more", [{}, {"causal": True}, {"causal": "top-left"}, {"window": (2, 1)}, {"alibi": True}])
def test_sequences(more):
  # three_pass, attention in tinygrad's tensor operations, is right for packed sequences of which some have no queries or no keys. NaN in one sequence
  # does not reach another.
  alibi, more = {"alibi_slopes": np.abs(floats(5, 2))} if "alibi" in more else {}, {name: x for name, x in more.items() if name != "alibi"}
  extras = alibi | {"cu_seqlens_q": int32(0, 0, 4, 4, 9, 11), "cu_seqlens_k": int32(0, 3, 3, 5, 13, 16)}
  check(H=2, Sq=11, Sk=16, D=8, layout="thd", dtype="float32", extras=extras, **more)
  def poisoned(p:Problem) -> Inputs:
    x = normal(p)
    x.k[:, :, 14], x.v[:, :, 15] = np.nan, np.nan     # rows of the last sequence
    return x
  if not alibi and not more:
    o, _ = check(H=2, Sq=11, Sk=16, D=8, layout="thd", dtype="float32", extras=extras, make=poisoned)
    assert np.isnan(o[:, :, 9:]).all() and not np.isnan(o[:, :, :9]).any()

def test_rows_beyond_the_last_sequence_give_zero():
  with emulated("gfx942", "three_pass"):
    q, k = draw(6, 2, 8, dtype="float32"), draw(7, 2, 8, dtype="float32")
    cu_q, cu_k = (Tensor([0, n], dtype=dtypes.int) for n in (4, 5))
    o, lse = attn.attention(q, k, k, layout="thd", cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, return_lse=True)
    assert (o.numpy()[4:] == 0).all() and np.isneginf(lse.numpy()[:, 4:]).all() and np.isfinite(lse.numpy()[:, :4]).all()

def test_the_gradient_is_that_of_tinygrads_own():
  with emulated("gfx942", "three_pass"):
    q, k, v = (draw(1, 2, 8, 16, dtype="float32", seed=i) for i in range(3))
    ours = attn.attention(q, k, v, causal=True).square().sum().gradient(q, k, v)
    theirs = q.scaled_dot_product_attention(k, v, is_causal=True).square().sum().gradient(q, k, v)
    for a, b in zip(ours, theirs): np.testing.assert_allclose(a.numpy(), b.numpy(), atol=1e-5)
