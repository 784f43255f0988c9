"""Tests of attention that a model writes out in operations of Tensor: `attn.installed()` recognizes it, and does not mistake other operations for
attention."""
from __future__ import annotations
import math
from collections.abc import Callable
import numpy as np
import pytest
from tinygrad import Variable
import attn
from attn.api.written_out import stored_in_its_dtype
from attn.tinygrad_compat import Context, Ops, Tensor, UOp, dtypes
from api_cases import draw, emulated
from cases import array, in_turn

pytestmark = pytest.mark.usefixtures("not_unrolled")

ROWS, KEYS, D = 6, 9, 16

def mask() -> Tensor: return draw(1, 1, ROWS, KEYS, dtype="float32", seed=4)

def in_place(q:Tensor, k:Tensor, v:Tensor) -> Tensor:
  scores = q.matmul(k.transpose(2, 3))
  scores += mask().cast(q.dtype)
  return scores.softmax() @ v

def shown() -> Tensor: return mask() > -0.5
def per_head() -> Tensor: return draw(2, 4, 1, KEYS, dtype="float32", seed=6)
def hiding(seen:Tensor) -> Tensor: return seen.where(0.0, -math.inf)
def sinks() -> Tensor: return draw(4, dtype="float32", seed=5)

def over_sinks(scores:Tensor, sink:Tensor, m:Tensor) -> Tensor:
  # Computes the softmax weights of `scores` with a sink, an extra score in each row that has no key.
  # `m` is subtracted before the exponential. The operations are those of tinygrad's examples/mlperf/models/gpt_oss.py.
  e = (scores - m).exp()
  return e/(e.sum(-1, keepdim=True) + (sink - m).exp())

def with_sinks(q:Tensor, k:Tensor, v:Tensor) -> Tensor:
  scores, sink = (q @ k.transpose(-1, -2)).float()*0.3 + mask(), sinks().reshape(1, 4, 1, 1)
  return over_sinks(scores, sink, scores.max(-1, keepdim=True).maximum(sink)).cast(v.dtype) @ v

def with_groups(q:Tensor, k:Tensor, v:Tensor) -> Tensor:
  # Computes attention with sinks for four query heads, two for each key/value head.
  # q is reshaped to (batch, key/value head, 2, row, D). k and v get an axis of size 1 in the place of the 2, along which they broadcast.
  q, k, v = q.reshape(2, 2, 2, ROWS, D), k[:, :2].unsqueeze(2), v[:, :2].unsqueeze(2)
  scores, sink = (q @ k.transpose(-1, -2)).float()*0.3 + hiding(shown()).unsqueeze(0), sinks().reshape(2, 2, 1, 1)
  return (over_sinks(scores, sink, scores.max(-1, keepdim=True)) @ v.float()).cast(q.dtype).reshape(2, 4, ROWS, D)

def in_bands(q:Tensor, k:Tensor, v:Tensor) -> Tensor:
  # Computes attention with sinks in two bands: the first three queries see some of the first six keys, the last three some of the last six.
  q, seen = q.reshape(2, 4, 2, 3, D), shown()[0, 0, :, :6].reshape(2, 3, 6)
  k, v = (x[:, :, :6].stack(x[:, :, 3:], dim=2) for x in (k, v))
  scores, sink = seen.where((q.float() @ k.float().transpose(-1, -2))*0.3, -math.inf), sinks().reshape(1, 4, 1, 1, 1)
  return (over_sinks(scores, sink, scores.max(-1, keepdim=True).maximum(sink)).cast(v.dtype) @ v).reshape(2, 4, ROWS, D)

FORMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
  "bare": lambda q, k, v: (q @ k.transpose(-1, -2)).softmax(-1) @ v,
  "scale": lambda q, k, v: (q @ k.transpose(-1, -2)*0.3).softmax(-1) @ v,
  "scale first": lambda q, k, v: (0.3*(q @ k.transpose(-1, -2))).softmax(-1).matmul(v),
  "divided": lambda q, k, v: (q @ k.transpose(-1, -2)/math.sqrt(D)).softmax(-1) @ v,
  "mask": lambda q, k, v: (q @ k.transpose(-1, -2)*0.3 + mask()).softmax(-1) @ v,
  "two masks": lambda q, k, v: (mask() + q @ k.transpose(-1, -2)*0.3 + mask()[:, :, :1]).softmax(3) @ v,
  "float32": lambda q, k, v: (q @ k.transpose(-1, -2)*0.3 + mask().half()).float().softmax(-1).cast(dtypes.half) @ v,
  "in place": in_place,
  "a mask that hides": lambda q, k, v: (q @ k.transpose(-1, -2) + hiding(shown() & (mask() < 1))).softmax(-1) @ v,
  "where": lambda q, k, v: shown().where(q @ k.transpose(-1, -2)*0.3, -math.inf).softmax(-1) @ v,
  "where, one row for all": lambda q, k, v: shown()[:, :, :1].where((q @ k.transpose(-1, -2)).float(), -math.inf).softmax(-1).half() @ v,
  "masked_fill twice": lambda q, k, v: (q @ k.transpose(-1, -2) + mask()).masked_fill(~shown(), -math.inf).masked_fill(per_head() > 1, -math.inf)
    .softmax(-1) @ v,
  "groups without sinks": lambda q, k, v: ((q.reshape(2, 2, 2, ROWS, D) @ k[:, :2].unsqueeze(2).transpose(-1, -2)).softmax(-1)
                                           @ v[:, :2].unsqueeze(2)).reshape(2, 4, ROWS, D),
  "sinks": with_sinks, "sinks and groups": with_groups, "sinks and bands": in_bands,
}

@pytest.mark.sample(3)
@in_turn("form, arch", FORMS, ("gfx942", "gfx1100", "sm_80"), among=9)
def test_attention_is_recognised(form:str, arch:str) -> None:
  # Attention that a model writes out in operations of Tensor, in many forms, becomes a call of a kernel under `attn.installed()`. The result keeps
  # its dtype, and its error against float32 is at most twice the error of the model's own operations.
  with emulated(arch):
    x = draw(2, 4, ROWS, D), draw(2, 4, KEYS, D, seed=1), draw(2, 4, KEYS, D, seed=2)
    exact, own = array(FORMS[form](*(t.float() for t in x))), FORMS[form](*x)
    with attn.installed() as decisions:
      decisions.clear()
      ours = FORMS[form](*x)
      assert [d.kernel is not None for d in decisions] == [True] and ours.dtype == own.dtype
      assert np.abs(array(ours) - exact).max() <= 2*np.abs(array(own) - exact).max()

def other_scores(q:Tensor, k:Tensor, v:Tensor) -> Tensor:
  scores = q @ k.transpose(-1, -2)
  return (scores*scores).softmax(-1) @ v

def with_sinks_at(q:Tensor, k:Tensor, v:Tensor, sink:Tensor, shift:float=0.0, square:bool=False) -> Tensor:
  # Writes out attention with sinks in tensor operations, or (with `shift` or `square`) a formula that is not attention.
  scores = (q @ k.transpose(-1, -2)).float()
  # attn must not take the formula for attention: `shift` subtracts more from the sink than from the scores, and with `square` the denominator sums
  # the squares of the exponentials.
  m = scores.max(-1, keepdim=True)
  e = (scores - m).exp()
  return (e/((e*e if square else e).sum(-1, keepdim=True) + (sink - (m + shift if shift else m)).exp())).cast(v.dtype) @ v

NOT_ATTENTION: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
  "another axis": lambda q, k, v: (q @ k.transpose(-1, -2)).softmax(-2) @ v,
  "a scale after the mask": lambda q, k, v: ((q @ k.transpose(-1, -2) + mask())*0.3).softmax(-1) @ v,
  "a scale for each key": lambda q, k, v: (q @ k.transpose(-1, -2)*mask()).softmax(-1) @ v,
  "weights changed": lambda q, k, v: ((q @ k.transpose(-1, -2)).softmax(-1)*2) @ v,
  "squares": other_scores,
  "no product": lambda q, k, v: mask().expand(2, 4, ROWS, KEYS).softmax(-1) @ v,
  "another number where nothing is seen": lambda q, k, v: shown().where(q @ k.transpose(-1, -2), -4.0).softmax(-1) @ v,
  "a mask in place of hidden scores": lambda q, k, v: shown().where(q @ k.transpose(-1, -2), hiding(mask() < 1)).softmax(-1) @ v,
  "a mask after where": lambda q, k, v: (shown().where(q @ k.transpose(-1, -2), -math.inf) + mask()).softmax(-1) @ v,
  "a scale after where": lambda q, k, v: (shown().where(q @ k.transpose(-1, -2), -math.inf)*0.3).softmax(-1) @ v,
  "scores on both sides of where": lambda q, k, v: shown().where(q @ k.transpose(-1, -2), (q @ k.transpose(-1, -2))*2).softmax(-1) @ v,
  "a sink for each row": lambda q, k, v: with_sinks_at(q, k, v, mask()[:, :, :, :1]),
  "a sink with another shift": lambda q, k, v: with_sinks_at(q, k, v, sinks().reshape(4, 1, 1), 0.5),
  "another sum": lambda q, k, v: with_sinks_at(q, k, v, sinks().reshape(4, 1, 1), square=True),
  "a clip": lambda q, k, v: (q @ k.transpose(-1, -2)).maximum(0).softmax(-1) @ v,
}

@pytest.mark.parametrize("form", NOT_ATTENTION)
def test_other_products_are_left_alone(form:str) -> None:
  with emulated("gfx942"):
    x = draw(2, 4, ROWS, D), draw(2, 4, KEYS, D, seed=1), draw(2, 4, KEYS, D, seed=2)
    with attn.installed() as decisions:
      decisions.clear()
      NOT_ATTENTION[form](*x)
      assert not decisions

def test_written_out_sinks_are_recognised() -> None:
  # A model writes out attention with sinks in tensor operations. Under `attn.installed()` a kernel computes it. Two changed formulas, which are not
  # attention, stay tensor operations.
  with emulated("gfx942"), attn.installed() as decisions:
    decisions.clear()
    with_sinks_at(*(draw(2, 4, n, D) for n in (ROWS, KEYS, KEYS)), sinks().reshape(4, 1, 1))
    assert [d.kernel is not None for d in decisions] == [True]

@pytest.mark.thorough
@pytest.mark.parametrize("form", ("scale", "where", "masked_fill twice"))
def test_gradients_go_through(form:str) -> None:
  with emulated("gfx942"), Context(TRAINING=1):
    x = draw(2, 4, ROWS, D), draw(2, 4, KEYS, D, seed=1), draw(2, 4, KEYS, D, seed=2)
    def gradients(*x:Tensor) -> list[np.ndarray]: return [array(g) for g in FORMS[form](*x).float().square().sum().gradient(*x)]
    exact = gradients(*(t.float() for t in x))
    with attn.installed() as decisions:
      decisions.clear()
      ours = gradients(*x)
      assert [d.kernel is not None for d in decisions] == [True]
    for g, want in zip(ours, exact): np.testing.assert_allclose(g, want, atol=4e-3*np.abs(want).max())

def test_rows_are_cast_to_the_dtype_of_their_cache() -> None:
  # Rows that a model stores into a cache of another dtype are cast first: in the graph, no STORE has a value of another dtype than its buffer. GPU
  # compilers refuse such a STORE of vectors.
  def attended() -> Tensor:
    cache, new = draw(1, 1, 32, 24, seed=1), draw(1, 1, ROWS, 24, dtype="float32", seed=2)
    k = Tensor(cache.uop.after(cache[:, :, 3:3 + ROWS].uop.store(new.uop)))[:, :, :KEYS]
    return (draw(1, 4, ROWS, 24) @ k.transpose(-1, -2)*0.3).softmax(-1) @ k[..., :16]
  def uneven(o:Tensor) -> list[UOp]: return [u for u in o.uop.toposort() if u.op is Ops.STORE and u.src[0].dtype != u.src[1].dtype]
  with emulated("gfx942"):
    own = attended()
    assert uneven(own)
    with attn.installed() as decisions:
      decisions.clear()
      ours = attended()
    assert [d.kernel is not None for d in decisions] == [True] and not uneven(ours)
    np.testing.assert_allclose(array(ours), array(own), atol=2**-9)

@pytest.mark.parametrize("arch", ("gfx942", "sm_80"))
def test_a_key_hidden_by_where_may_be_nan(arch:str) -> None:
  # A key that a `where` on the scores hides has no effect, even if the key is NaN or infinite, with and without sinks.
  def hidden(k:Tensor) -> list[Tensor]:
    scores = seen.where(q @ k.transpose(-1, -2), -math.inf)
    return [scores.softmax(-1) @ v, over_sinks(scores, sink, scores.max(-1, keepdim=True)) @ v]
  with emulated(arch), attn.installed() as decisions:
    decisions.clear()
    number = Tensor(np.arange(KEYS), device="EMU").realize()
    seen, sink = (number != 4) & (number != 7), draw(2, 1, 1, seed=5)
    q, k, v = draw(1, 2, ROWS, D), draw(1, 2, KEYS, D, seed=1), draw(1, 2, KEYS, D, seed=2)
    row = number.reshape(KEYS, 1)
    bad = (row == 4).where(math.nan, (row == 7).where(math.inf, k)).realize()
    for ours, right in zip(hidden(bad), hidden(k)): np.testing.assert_array_equal(array(ours), array(right))
    assert [d.kernel is not None for d in decisions] == [True]*4

def test_sinks_beside_a_length_that_is_a_variable() -> None:
  # A model writes out attention with sinks, over a slice of a cache, in tensor operations, and attn recognizes it. The result is the same whether the
  # slice's length is a Variable or an int. With a Variable, two kinds of calls stay tinygrad's own attention: calls with a mask that `where` applies,
  # and calls with sinks that differ between batches.
  cache, n = [(2, 12, 4, D, seed) for seed in (1, 2)], Variable("n", 1, 12)
  def attended(q:Tensor, k:Tensor, v:Tensor, rows:int|UOp, sink:Tensor, mask:Tensor|None=None) -> Tensor:
    k, v = (x[:, :rows].transpose(1, 2) for x in (k, v))
    scores = q @ k.transpose(-1, -2)*0.3
    if mask is not None: scores = mask[:, :, :, :rows].where(scores, -math.inf)
    return over_sinks(scores, sink, scores.max(-1, keepdim=True).maximum(sink)) @ v
  with emulated("gfx942"):
    k, v = (draw(*shape, seed=seed) for *shape, seed in cache)
    q, sink = draw(2, 4, 1, D), draw(4, 1, 1, seed=5)
    with attn.installed() as decisions:
      for rows in (3, 12):
        decisions.clear()
        ours, right = (array(attended(q, k, v, x, sink)) for x in (n.bind(rows), rows))
        np.testing.assert_allclose(ours, right, atol=2**-9)
        assert [d.kernel is not None for d in decisions] == [True]*2
      for given, told in (((sink, draw(2, 4, 1, 12, seed=6) > 0), "masked by `where`"), ((draw(2, 4, 1, 1, seed=7),), "one number for each head")):
        decisions.clear()
        with pytest.warns(UserWarning, match=told): attended(q, k, v, n.bind(3), *given)
        assert [d.kernel for d in decisions] == [None]

def test_a_kernels_output_keeps_its_tag_as_keys() -> None:
  # `stored_in_its_dtype` returns the output of an attn kernel, or its transpose, as the same UOp. (This function casts rows that a model stores into
  # a cache.) The UOp has a tag, which a new UOp would lose. Without the tag tinygrad may mistake a later write to the same buffer for the kernel's
  # output.
  with emulated("gfx942"), attn.installed():
    q = draw(1, 2, ROWS, D)
    k = attn.attention(q, q, q)
    assert stored_in_its_dtype(k) is k and stored_in_its_dtype(k.transpose(-1, -2)).uop is k.transpose(-1, -2).uop

def test_tinygrads_own_attention_is_decided_once() -> None:
  # The list that `attn.installed()` returns gets one entry for a call that attn leaves to tinygrad's own attention. That attention consists of tensor
  # operations, which attn would otherwise recognize as attention and list as a second call.
  dot, softmax = Tensor.dot, Tensor.softmax
  with emulated("gfx942"):
    q = draw(1, 2, 4, 600)
    with attn.installed() as decisions, pytest.warns(UserWarning, match="goes to tinygrad's own"):
      decisions.clear()
      attn.api.sdpa.installation.said.clear()
      q.scaled_dot_product_attention(q, q)
      assert [d.kernel for d in decisions] == [None]
      FORMS["bare"](q, q, q)
      assert [d.kernel for d in decisions] == [None]*2
    decisions.clear()
    FORMS["bare"](q, q, q)
    assert not decisions and Tensor.dot is dot and Tensor.softmax is softmax
