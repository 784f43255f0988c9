"""Tests of attention inside a function that is decorated with tinygrad's `@function`: results and gradients are the same as outside."""
from __future__ import annotations
import itertools, warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
import numpy as np
import pytest
from tinygrad import TinyJit, function
import attn
from attn.flash_attn import flash_attn_func
from attn.tinygrad_compat import Context, Ops, Tensor, dtypes
from attn.tinygrad_compat.caches import schedule
from api_cases import draw, emulated, whole

pytestmark = pytest.mark.usefixtures("not_unrolled")

TWO = ("EMU:0", "EMU:1")
WAYS: dict[str, dict[str, bool]] = {"inlined": {}, "compiled apart": dict(precompile=True, precompile_backward=True),
                                    "backward apart": dict(precompile_backward=True), "implicit": dict(precompile=True, allow_implicit=True)}
Layer = Callable[..., tuple[Tensor, ...]]

@dataclass(frozen=True)
class Call:
  # A call of attention that the tests make inside a tinygrad `@function`.
  # `layer` makes the call, of 16-bit tensors with these shapes and of the other arguments. Every argument gets a gradient, except integers.
  layer: Layer
  shapes: tuple[tuple[int, ...], ...] = ((1, 2, 24, 32), (1, 1, 24, 32), (1, 1, 24, 32))
  others: tuple[np.ndarray, ...] = ()
  axis: int|None = None      # axis along which the arguments with four axes are sharded over two devices; None: one device
  whole_q: bool = False      # whether each device has all of q although k and v are sharded

def causal(q:Tensor, k:Tensor, v:Tensor, **options:Any) -> tuple[Tensor, ...]: return (attn.attention(q*1.5, k, v, causal=True, **options),)
def terms(q:Tensor, k:Tensor, v:Tensor, bias:Tensor, sinks:Tensor) -> tuple[Tensor, ...]:
  return attn.attention(q, k, v, window=(9, 0), softcap=20.0, bias=bias, sinks=sinks, return_lse=True)
def sloped(q:Tensor, k:Tensor, v:Tensor, slopes:Tensor) -> tuple[Tensor, ...]: return (attn.attention(q, k, v, alibi_slopes=slopes),)
def packed(q:Tensor, k:Tensor, v:Tensor, cu:Tensor) -> tuple[Tensor, ...]:
  return (attn.attention(q, k, v, layout="thd", causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=20, max_seqlen_k=20),)
def dropped(q:Tensor, k:Tensor, v:Tensor) -> tuple[Tensor, ...]: return causal(q, k, v, dropout_p=0.25)
def sdpa(q:Tensor, k:Tensor, v:Tensor, mask:Tensor) -> tuple[Tensor, ...]:
  return (q.scaled_dot_product_attention(k, v, attn_mask=mask, dropout_p=0.25, enable_gqa=True),)
def of_fa(q:Tensor, k:Tensor, v:Tensor) -> tuple[Tensor, ...]: return (flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=True),)
def twice(q:Tensor, k:Tensor, v:Tensor) -> tuple[Tensor, ...]:
  first, = causal(q, k, v)
  return (*causal(first, k, v), first)
def nested(q:Tensor, k:Tensor, v:Tensor) -> tuple[Tensor, ...]: return causal(function(causal)(q, k, v)[0], k, v)
def nested_apart(q:Tensor, k:Tensor, v:Tensor) -> tuple[Tensor, ...]:
  # Calls attention twice through a function that tinygrad compiles on its own (`@function(precompile=True)`).
  # A test puts this function inside another `@function`, which tinygrad alone cannot compile.
  layer = function(causal, precompile=True, precompile_backward=True)
  return layer(layer(q, k, v)[0], k, v)
def part(q:Tensor, k:Tensor, v:Tensor) -> tuple[Tensor, ...]:
  # Calls attention with kv_lengths on a K that is a slice of a buffer and does not begin at a multiple of 16 bytes.
  return (attn.attention(q, k.flatten()[3:3 + 24*32].reshape(v.shape), v, kv_lengths=20),)
def splits(q:Tensor, k:Tensor, v:Tensor) -> tuple[Tensor, ...]: return (attn.attention(q[:, :, :1], k, v, num_splits=2),)
def by_tinygrad(q:Tensor, k:Tensor, v:Tensor) -> tuple[Tensor, ...]: return (attn.attention(q, k, v),)
def dealt(q:Tensor, k:Tensor, v:Tensor, bias:Tensor, sinks:Tensor) -> tuple[Tensor, ...]:
  # Calls attention on 13 rows in the order "zigzag", followed by padding rows, with sinks, softcap, and a bias that gets a gradient.
  return (attn.attention(q, k, v, causal=True, softcap=20.0, bias=bias, sinks=sinks, sequence_order="zigzag", sequence_lengths=(13, 13)),)
def sunk(q:Tensor, k:Tensor, v:Tensor, sinks:Tensor) -> tuple[Tensor, ...]: return (attn.attention(q, k, v, causal=True, sinks=sinks),)

LOWER, SLOPES = np.tril(np.ones((24, 24), np.bool_)), np.array([0.5, 0.25], np.float32)
FOUR = ((2, 4, 16, 32), (2, 2, 16, 32), (2, 2, 16, 32))
CALLS = {"causal": Call(causal), "terms": Call(terms, (*Call(causal).shapes, (1, 1, 24, 24), (2,))), "sloped": Call(sloped, others=(SLOPES,)),
         "packed": Call(packed, ((24, 2, 32), (24, 1, 32), (24, 1, 32)), (np.array([0, 4, 24], np.int32),)), "dropped": Call(dropped),
         "sdpa": Call(sdpa, others=(LOWER,)), "FlashAttention": Call(of_fa), "twice": Call(twice), "nested": Call(nested),
         "nested apart": Call(nested_apart, FOUR, axis=1),
         "part": Call(part, ((1, 2, 24, 32), (1, 1, 25, 32), (1, 1, 24, 32))), "splits": Call(splits),
         "by tinygrad": Call(by_tinygrad, ((1, 1, 4, 520),)*3), "batch": Call(dropped, FOUR, axis=0),
         "heads": Call(sunk, (*FOUR, (4,)), axis=1), "rows": Call(sunk, (*FOUR, (4,)), axis=2),
         "keys": Call(sunk, (*FOUR, (4,)), axis=2, whole_q=True),
         "padded rows": Call(dealt, (*FOUR, (13, 13), (4,)), axis=2)}
QUICK = {("terms", "compiled apart", False), ("nested", "inlined", False), ("nested apart", "inlined", False), ("rows", "compiled apart", False)}
ARCHS = ("gfx942", "gfx1100", "sm_80", "sm_90")
ALL = [pytest.param(name, way, jit, ARCHS[(i + j + 2*k) % len(ARCHS)], marks=() if (name, way, jit) in QUICK else pytest.mark.thorough)
       for (i, name), (j, way), (k, jit) in itertools.product(enumerate(CALLS), enumerate(WAYS), enumerate((False, True)))]   # each call on each chip

def arguments(call:Call) -> list[Tensor]:
  drawn = [draw(*shape, seed=i) for i, shape in enumerate(call.shapes)] + [Tensor(x, device="EMU").realize() for x in call.others]
  if call.axis is None: return drawn
  return [t.shard(TWO, call.axis if t.ndim == 4 and not (call.whole_q and i == 0) else None).realize() for i, t in enumerate(drawn)]

def results(call:Call, layer:Layer, jit:bool) -> list[np.ndarray]:
  # Returns the outputs of `layer` on the arguments of `call`, and the gradients of a loss that depends on two calls of `layer`.
  tensors = arguments(call)
  def step(*given:Tensor) -> tuple[Tensor, ...]:
    first, second = layer(*given), layer(given[0]*0.5, *given[1:])
    loss = sum(((o.float()*o.float()).sum() for o in first[1:] + second), start=first[0].float().sum())
    taken = [t for t in given if dtypes.is_float(t.dtype)]
    found = (*(whole(o) for o in first), *(whole(g) for g in loss.gradient(*taken)))     # type: ignore[union-attr]
    Tensor.realize(*found)
    return found
  Tensor.manual_seed(3)
  with attn.installed(), Context(TRAINING=1):
    run = TinyJit(step) if jit else step
    for _ in range(3 if jit else 1): found = run(*tensors)
  return [t.numpy() for t in found]

@pytest.mark.sample(1)
@pytest.mark.parametrize("name, way, jit, arch", ALL)
def test_same_as_outside(name:str, way:str, jit:bool, arch:str) -> None:
  # Results and gradients of attention are the same inside a tinygrad `@function` as outside. Only the last bit of sums that tinygrad's own kernels
  # compute may differ, because tinygrad may add in another order.
  call = CALLS[name]
  with emulated(arch):
    found, right = results(call, function(call.layer, **WAYS[way]), jit), results(call, call.layer, jit)
  for x, y in zip(found, right, strict=True): np.testing.assert_allclose(x, y, rtol=2**-10, atol=2**-11*np.abs(y).max())

@pytest.mark.parametrize("axis", [pytest.param(None, marks=pytest.mark.thorough), 2])
def test_rows_on_devices_under_installed(axis:int|None) -> None:
  # Tensor.scaled_dot_product_attention is right inside a tinygrad `@function` and under `attn.installed()` if two devices each hold half of the
  # sequence of k and v, or of q, k and v. attn's kernels compute the call. With dropout, tinygrad's own implementation computes the call, with a
  # warning.
  q, k, v = (draw(1, 2, 16, 32, seed=i).shard(TWO, a).realize() for i, a in enumerate((axis, 2, 2)))
  def layer(q:Tensor, k:Tensor, v:Tensor) -> tuple[Tensor, ...]: return (q.scaled_dot_product_attention(k, v, is_causal=True),)
  def dropping(q:Tensor, k:Tensor, v:Tensor) -> tuple[Tensor, ...]: return (q.scaled_dot_product_attention(k, v, dropout_p=0.5),)
  with emulated("gfx942"):
    right = layer(*(whole(t) for t in (q, k, v)))[0].numpy()
    with attn.installed() as decisions, warnings.catch_warnings():
      warnings.simplefilter("error")
      decisions.clear()
      found = whole(function(layer, precompile=True)(q, k, v)[0]).numpy()
      assert [d.kernel is None for d in decisions] == [False]
      with Context(TRAINING=1), pytest.warns(UserWarning, match="goes to tinygrad's own: dropout_p=0.5 with"): function(dropping)(q, k, v)
  np.testing.assert_allclose(found, right, rtol=2**-9, atol=2**-10*np.abs(right).max())

def test_gradient_through_a_function_of_an_output_that_was_computed() -> None:
  # Gradients are right if a `@function` takes the output of attention as its argument and the loss is realized before the gradients are taken.
  # Backward must still find the inputs of attention.
  def gradients(layer:Layer, read:bool) -> list[np.ndarray]:
    q, k, v = arguments(CALLS["causal"])
    loss = layer(causal(q, k, v)[0], k)[0].float().square().sum()
    if read: loss.item()
    loss.backward()
    assert q.grad is not None and k.grad is not None and v.grad is not None
    return [t.numpy() for t in (q.grad, k.grad, v.grad)]
  def layer(o:Tensor, k:Tensor) -> tuple[Tensor, ...]: return (o*(1 + 0.01*k.mean()),)
  with emulated("gfx942"):
    for x, y in zip(gradients(function(layer), True), gradients(layer, False), strict=True):
      np.testing.assert_allclose(x, y, rtol=2**-10, atol=2**-11*np.abs(y).max())

def test_equal_steps_are_scheduled_once() -> None:
  # tinygrad schedules the first of two equal training steps and finds the schedule of the second in its cache. This works only if each step gives the
  # same slot numbers (`BUFFER.arg.slot`) to the buffers that attn makes inside a `@function` and in its gradient.
  layer = function(causal, precompile=True, precompile_backward=True)
  def step() -> None:
    q, k, v = arguments(CALLS["causal"])
    o, = layer(q, k, v)
    own = [u for u in o.uop.src[0].src[0].toposort(enter_calls=False) if u.op is Ops.BUFFER]
    assert own and all(u.arg.slot < 0 for u in own)
    Tensor.realize(*o.float().square().sum().gradient(q, k, v))
  with emulated("gfx942"):
    step()
    scheduled = len(schedule.schedule_cache)
    step()
  assert len(schedule.schedule_cache) == scheduled
