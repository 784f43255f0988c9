"""Tests of the graphs of calls that attn keeps: a later call gives what a first call gives, and what is kept is bounded and holds no input."""
from __future__ import annotations
import gc, weakref
from collections.abc import Callable
from typing import Any
import numpy as np
import pytest
from tinygrad import Variable
import attn
from attn.api import launch
from attn.calls import gradient
from attn.calls.kept_graphs import MOST_GRAPHS, recipes
from attn.parallel import context_gradient
from attn.tinygrad_compat import Context, Tensor, dtypes, recipes as compat_recipes
from api_cases import draw, emulated, lists, whole

DEVICES = ("EMU:0", "EMU:1")
Call = Callable[[Tensor, Tensor, Tensor], Any]

def in_order(order:str) -> Call: return lambda q, k, v: attn.attention(q, k, v, causal="top-left", sequence_order=order)

CALLS: dict[str, Call] = {
  "full": lambda q, k, v: attn.attention(q, k, v),
  "computed inputs": lambda q, k, v: attn.attention(q*2, k + 1, v.permute(0, 1, 3, 2).contiguous().permute(0, 1, 3, 2)),
  "lists": lambda q, k, v: attn.attention(q, k, v, mask_mod=lambda b, h, i, j: (i//8 - j//8) % 3 < 1),
  "lse alone": lambda q, k, v: attn.attention(q, k, v, return_lse=True)[1],
  "splits, sinks": lambda q, k, v: attn.attention(q, k, v, num_splits=2, sinks=v[0, :, 0, 0].float().contiguous()),
  "bias": lambda q, k, v: attn.attention(q, k, v, bias=draw(1, 2, 32, 32, dtype="float32", seed=int(k.numpy()[0, 0, 0, 0]*100) % 7)),
  "dropout": lambda q, k, v: attn.attention(q, k, v, dropout_p=0.5, dropout_seed=v[0, 0, 0, :2].cast(dtypes.uint).contiguous()),
  "slopes, by tinygrad": lambda q, k, v: attn.attention(q, k, v, alibi_slopes=v[0, :, 0, 0].float().contiguous()),
  "batches on two devices": lambda q, k, v: attn.attention(q, k, v),
  "rows on two devices": in_order("contiguous"),
  "rows on two devices, zigzag": in_order("zigzag"),
  "rows on two devices, computed inputs": lambda q, k, v: in_order("zigzag")(q*2, k + 1, v)}

def placed(name:str, x:Tensor) -> Tensor:
  # Returns an input of the call `name`, divided over two devices if the name says so.
  if name.startswith("batches"): return x.shard(DEVICES, 0).realize()
  return attn.shard_sequence(x, DEVICES, 2, "zigzag" if "rows on two devices," in name else "contiguous").realize() if "rows" in name else x

def numbers(name:str, seed:int) -> list[np.ndarray]:
  # Returns the result of a call and the gradients of q, k and v, for random inputs of the seed.
  q, k, v = (placed(name, draw(2, 2, 32, 16, seed=10*seed + i)) for i in range(3))
  with Context(TRAINING=1): o = CALLS[name](q, k, v)
  found = [o, *o.float().square().sum().gradient(q, k, v)]
  Tensor.realize(*found)
  return [whole(x).numpy() for x in found]

def check_later(call:Callable[[int], list[np.ndarray]]) -> None:
  # Checks that the second call gives the bits that a first call with the same inputs gives, for seeds of the inputs.
  before, later = call(1), call(2)
  recipes.cache_clear()
  first = call(2)
  assert all((x == y).all() for x, y in zip(later, first)) and not (before[0] == first[0]).all()

@pytest.fixture
def made(monkeypatch:pytest.MonkeyPatch) -> list[str]:
  # Returns a list to which a name is added for each graph of a call or a gradient that attn makes without a recipe.
  found = list[str]()
  def noted(name:str, own:Callable[..., Any]) -> Callable[..., Any]: return lambda *args: found.append(name) or own(*args)     # type: ignore[func-returns-value]
  for module, name in ((launch, "kernels_launched"), (launch, "run_shared_rows"), (gradient, "kernel_gradients"), (context_gradient, "by_kernels")):
    monkeypatch.setattr(module, name, noted(name, getattr(module, name)))
  return found

@pytest.mark.parametrize("name", CALLS)
def test_a_later_call_gives_the_same_bits_by_recipes(name:str, made:list[str]) -> None:
  with emulated("gfx942"):
    numbers(name, 1)
    first = made.copy()
    check_later(lambda seed: numbers(name, seed))
    assert first and made == 2*first      # `check_later` clears the recipes once

def test_later_gradients_over_lists_of_tiles() -> None:
  # A list of a mask without tensors is kept by itself, and is no buffer of the graph.
  with lists(True), emulated("sm_90"): check_later(lambda seed: numbers("lists", seed))

@pytest.mark.parametrize("keys", [3, 20])
def test_a_later_call_with_a_variable(keys:int, made:list[str]) -> None:
  # The value of a Variable is not in the recipe.
  found = []
  with emulated("gfx942"):
    for n in (11, keys):
      q, k, v = (draw(2, 2, 32, 16, seed=i) for i in range(3))
      found.append(attn.attention(q, k, v, kv_lengths=Variable("keys", 1, 32).bind(n)).numpy())
    assert made.count("kernels_launched") == 1
    q, k, v = (draw(2, 2, 32, 16, seed=i) for i in range(3))
    expected = attn.attention(q, k[:, :, :keys].contiguous(), v[:, :, :keys].contiguous()).numpy()
  np.testing.assert_allclose(found[1], expected, atol=2e-3)

def test_a_buffer_for_the_output(made:list[str]) -> None:
  with emulated("gfx942"):
    outs = [Tensor.empty(2, 2, 32, 16, dtype=dtypes.half) for _ in range(2)]
    found = [attn.attention(*[draw(2, 2, 32, 16, seed=3*n + i) for i in range(3)], out=out) for n, out in enumerate(outs)]
    assert made == ["kernels_launched"]
    for n, (o, out) in enumerate(zip(found, outs)):
      expected = attn.attention(*[draw(2, 2, 32, 16, seed=3*n + i) for i in range(3)]).numpy()
      assert (o.numpy() == expected).all() and (out.numpy() == expected).all()

def test_results_of_two_calls_have_buffers_of_their_own(monkeypatch:pytest.MonkeyPatch) -> None:
  # Two results that are computed together are right. A recipe that does not make new buffers is caught.
  def both() -> bool:
    inputs = [[draw(2, 2, 32, 16, seed=3*n + i) for i in range(3)] for n in range(3)]
    together = [attn.attention(*x) for x in inputs]
    Tensor.realize(*together)
    apart = [attn.attention(*x).numpy() for x in inputs]
    return all((x.numpy() == y).all() for x, y in zip(together, apart))
  with emulated("gfx942"):
    assert both()
    own = compat_recipes.RecipeStep.made
    first: dict[Any, Any] = {}
    monkeypatch.setattr(compat_recipes.RecipeStep, "made", lambda self, values: first.setdefault(self, own(self, values)) if not self.src[1:] and
                        self.op is compat_recipes.Ops.BUFFER else own(self, values))
    with pytest.raises(RuntimeError, match="cycle"): both()

def test_another_environment_has_another_graph(made:list[str]) -> None:
  for kernel in ("", "three_pass", "backward_three_pass"):
    with emulated("gfx942", kernel): numbers("full", 1)
  assert made.count("kernels_launched") == 2 and made.count("kernel_gradients") == 1

def test_graphs_are_bounded_and_hold_no_input() -> None:
  with emulated("gfx942"):
    for n in range(MOST_GRAPHS + 4): attn.attention(*[draw(1, 1, 16, 16) for _ in range(3)], softmax_scale=1 + n/1024)
    assert recipes.cache_info().currsize == MOST_GRAPHS
    for _ in range(2):     # the emulator keeps the tensors of the first call, to explain errors
      q, k, v = (draw(2, 2, 32, 16, seed=i) for i in range(3))
      o = attn.attention(q, k, v)
    buffers = [weakref.ref(x.uop.buf_uop) for x in (q, k, v, o)]
    del q, k, v, o
    gc.collect()
    assert all(x() is None for x in buffers)

def test_inputs_that_are_one_buffer_are_another_form() -> None:
  # Two inputs in one buffer, and inputs in two buffers, don't share a recipe.
  with emulated("gfx942"):
    q, k, v = (draw(2, 2, 32, 16, seed=i) for i in range(3))
    attn.attention(q, k, v).realize()
    same = attn.attention(q, k, k).numpy()
    recipes.cache_clear()
    assert (same == attn.attention(q, k, k).numpy()).all()
    assert (attn.attention(q, k, v).numpy() != same).any()
