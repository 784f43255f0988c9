"""Tests of what a later call of attention costs on the host: it builds no kernel's UOps and no expressions of random numbers again, and computes no
gradient that nobody wants."""
from __future__ import annotations
from collections.abc import Callable
from typing import Any
import numpy as np
import pytest
from tinygrad import Variable
import attn
from attn.api.dropout import drawn_seed
from attn.calls import gradient
from attn.calls.placement import Placement
from attn.choose.backward import parts_with_tiles
from attn.kernels.parts.grid.tensors import of_backward, split_into
from attn.calls.views import places_of_view
from attn.tinygrad_compat import Context, Ops, Tensor, ast_of, dtypes
from attn.tinygrad_compat.functions import path_to_targets
from attn.tinygrad_compat.uops import MOST_ASTS, _with_params_of, output_params
from api_cases import emulated

def half(*shape:int) -> Tensor: return Tensor.empty(*shape, dtype=dtypes.half)
def whole(numbers:object) -> Tensor: return Tensor(np.array(numbers, np.int32))
def number(*shape:int) -> Tensor: return Tensor.empty(*shape, dtype=dtypes.float)

Call = Callable[[Tensor, Tensor, Tensor], Tensor]

CALLS: dict[str, Call] = {
  "causal": lambda q, k, v: attn.attention(q, k, v, causal=True),
  "options": lambda q, k, v: attn.attention(q, k, v, window=(20, 0), softcap=20.0, alibi_slopes=number(2), sinks=number(2)),
  "bias": lambda q, k, v: attn.attention(q, k, v, bias=number(1, 2, 40, 40)),
  "dropout": lambda q, k, v: attn.attention(q, k, v, dropout_p=0.1),
  "functions": lambda q, k, v: attn.attention(q, k, v, score_mod=lambda s, b, h, i, j, t: s*t[h], mask_mod=lambda b, h, i, j, t: i >= j,
                                              mod_tensors=(number(2),)),
  "num_splits": lambda q, k, v: attn.attention(q, k, v, num_splits=2)}

CACHED: dict[str, Call] = {
  "kv_lengths": lambda q, k, v: attn.attention(q, k, v, kv_lengths=whole([7, 30])),
  "Variable": lambda q, k, v: attn.attention(q, k, v, kv_lengths=Variable("keys", 1, 40).bind(int(np.random.default_rng().integers(1, 40)))),
  "pages": lambda q, k, v: attn.attention(q, half(10, 8, 2, 16), half(10, 8, 2, 16), block_table=whole(np.arange(10).reshape(2, 5)),
                                          kv_lengths=whole([7, 30]))}

def made_by(call:Callable[[], object]) -> int:
  # Calls a function, and returns for how many kernels it builds the UOps.
  before = ast_of.cache_info().misses
  call()
  return ast_of.cache_info().misses - before

@pytest.mark.parametrize("name", [*CALLS, *CACHED])
def test_a_later_call_makes_no_ast(name:str) -> None:
  # The first call with certain shapes and options builds the UOps of its kernels. A later call builds none, even with other tensors, another value of
  # a Variable, or a new score_mod or mask_mod that computes the same.
  call = (CALLS | CACHED)[name]
  with emulated("gfx942"):
    first, later = (made_by(lambda: call(*[half(2, 2, 40, 16) for _ in range(3)])) for _ in range(2))
  assert first and not later

@pytest.mark.parametrize("name", CALLS)
def test_a_later_gradient_makes_no_ast(name:str) -> None:
  def step() -> None:
    q, k, v = (half(2, 2, 40, 16) for _ in range(3))
    with Context(TRAINING=1): CALLS[name](q, k, v).gradient(q, k, v, gradient=half(2, 2, 40, 16))
  with emulated("gfx942"): first, later = made_by(step), made_by(step)
  assert first > 1 and not later

@pytest.mark.parametrize("name", CALLS)
def test_a_later_gradient_makes_no_problem_and_chooses_no_parts(name:str) -> None:
  # The third call with gradients computes nothing again that the first two calls have cached: the problems of its kernels, the numbers of partial
  # results, and the kernels' ASTs with parameters for their tensors. The caches are bounded.
  kept = (of_backward, split_into, parts_with_tiles, _with_params_of)
  def misses() -> list[int]: return [x.cache_info().misses for x in kept]
  seen = []
  with emulated("gfx942"):
    for _ in range(3):
      q, k, v = (half(2, 2, 40, 16) for _ in range(3))
      with Context(TRAINING=1): CALLS[name](q, k, v).gradient(q, k, v, gradient=half(2, 2, 40, 16))
      seen.append(misses())
  assert seen[1] == seen[2] and all(x.cache_info().maxsize for x in kept)

def test_a_gradient_is_not_sought_inside_kernels() -> None:
  with emulated("gfx942"):
    q, k, v = (half(2, 2, 40, 16) for _ in range(3))
    with Context(TRAINING=1): o = attn.attention(q, k, v)
    path, on_path = path_to_targets(o.uop, {q.uop})
  assert {u.op for u in path} >= {Ops.CALL, Ops.AFTER} and Ops.SINK not in {u.op for u in on_path}

@pytest.mark.parametrize("name", CACHED)
def test_a_later_call_looks_at_no_kernel_and_at_no_view(name:str) -> None:
  # The third call of attention with equal shapes does not look through the kernel for its outputs, or through views for the positions of their rows:
  # earlier calls have cached both.
  def looks() -> int: return output_params.cache_info().misses + places_of_view.cache_info().misses
  with emulated("gfx942"):
    seen = []
    for _ in range(3):
      CACHED[name](*[half(2, 2, 40, 16) for _ in range(3)])
      seen.append(looks())
  assert seen[1] == seen[2]

def test_a_later_seed_of_dropout_builds_no_expression(monkeypatch:pytest.MonkeyPatch) -> None:
  # The first call with dropout builds tinygrad's expressions for random numbers. A later call builds only the UOps that depend on the generator's
  # counter, and makes no Tensor for them.
  made = []
  def counted(own:Callable[..., Any]) -> Callable[..., Any]: return lambda *args, **kwargs: made.append(1) or own(*args, **kwargs)
  with emulated("gfx942"):
    for name in ("rand", "_next_counter", "_rand"): monkeypatch.setattr(Tensor, name, staticmethod(counted(getattr(Tensor, name))))
    Tensor.manual_seed(0)
    seen = []
    for _ in range(4):
      drawn_seed(Placement("EMU"))
      seen.append(len(made))
  assert seen[0] > 0 and seen[3] == seen[1]

def test_another_problem_has_another_ast() -> None:
  with emulated("gfx942"):
    scales = [made_by(lambda: attn.attention(*[half(2, 2, 40, 16) for _ in range(3)], softmax_scale=scale)) for scale in (0.25, 0.5, 0.25)]
  assert scales == [1, 1, 0]

def test_few_asts_are_kept() -> None:
  with emulated("gfx942"):
    for n in range(MOST_ASTS + 8): attn.attention(*[half(1, 1, 16, 16) for _ in range(3)], num_splits=1, softmax_scale=1 + n/1024)
  assert ast_of.cache_info().currsize == MOST_ASTS

@pytest.mark.parametrize("wanted", ["q", "alibi_slopes"])
def test_only_wanted_gradients_are_computed_by_tensor_operations(wanted:str, monkeypatch:pytest.MonkeyPatch) -> None:
  # No kernel computes the gradient of ALiBi's slopes. tinygrad's tensor operations compute it, and only if it is wanted. A gradient has the same bits
  # whether it is wanted alone or together with all others.
  asked, own = [], gradient.plain_gradients
  monkeypatch.setattr(gradient, "plain_gradients", lambda *args: asked.append(1) or own(*args))     # type: ignore[func-returns-value]
  rng = np.random.default_rng(3)
  with emulated("gfx942"):
    t = {name: Tensor(rng.standard_normal((1, 2, 20, 16), np.float32)).half() for name in ("q", "k", "v")}
    t["alibi_slopes"] = Tensor(np.array([0.5, 0.25], np.float32))
    with Context(TRAINING=1): o = attn.attention(**t)
    alone = o.float().sum().gradient(t[wanted])[0].numpy()
    assert len(asked) == (wanted == "alibi_slopes")
    together = o.float().sum().gradient(*t.values())[list(t).index(wanted)].numpy()
  assert np.abs(alone).max() > 0 and (alone == together).all()
