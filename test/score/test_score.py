"""Tests of score terms (softcap, ALiBi, bias, score_mod). A term's derivative agrees with differences of its value, and kernels compute both
correctly. The gradient of a term without a derivative is refused."""
from __future__ import annotations
from dataclasses import replace
from typing import Any
import numpy as np
import pytest
import attn
from attn.functions.trace import SCORE_FUNCTION, trace
from attn.ops import common as ops
from attn.ops.plain import plain
from attn.problem import EXTRAS, OF_TERMS, TENSORS_OF_TERMS, Problem
from attn.reference import Options, exact, exact_backward
from attn.score import terms
from attn.score.term import BASE2, NATURAL, Fragment, Row, ScoreTerm, ScoreUnit, one, raw_unit
from attn.score.places import Walk
from attn.score.terms import TERMS
from attn.tinygrad_compat import AxisType, KernelInfo, Tensor, UOp, dtypes
from api_cases import emulated, floats
from cases import problem

pytestmark = pytest.mark.usefixtures("not_unrolled")

N = 64     # scores; each thread handles four keys
OPTIONS: dict[str, dict[str, Any]] = {
  "softcap": dict(softcap=1.5), "alibi": dict(extras={"alibi_slopes": np.float32([0.25, 0.5])}), "bias": dict(extras={"bias": floats(1, 2, 5, N)}),
  "score_mod": dict(score_mod=trace(SCORE_FUNCTION, lambda score, b, h, i, j: (score*0.5).tanh()*score + (i - j).cast(dtypes.float)*0.01, ()))}

def test_the_fields_of_a_problem_are_the_terms() -> None:
  assert tuple(term.name for term in TERMS) == OF_TERMS == tuple(OPTIONS)
  declared = {name: x.name for name, x in TENSORS_OF_TERMS.items()}
  assert {term.name: tensor.name for term in TERMS for tensor in term.tensors} == declared and EXTRAS[:len(declared)] == tuple(declared.values())

@pytest.mark.parametrize("name, value, message", (
    ("alibi", True, "alibi=True: must be None, or a tuple with True .* for each dimension of alibi_slopes, 1 to 2"),
    ("alibi", (), r"alibi=\(\): must be None"), ("bias", (1,)*4, r"bias=\(1, 1, 1, 1\)"),
    ("bias", (True,)*3, r"bias=\(True, True, True\): must be None, or a tuple with True .* for each dimension of bias, 4 to 4")))
def test_dimensions_that_a_tensor_cannot_have(name:str, value:Any, message:str) -> None:
  with pytest.raises(ValueError, match=message): replace(problem(), **{name: value})

def applied(term:ScoreTerm, p:Problem, unit:ScoreUnit, to:ScoreUnit, given:dict[str, np.ndarray], x:np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  # Applies a score term to the scores x of one query; returns the scores in base e, and the term's derivative at each score.
  # `given` has the tensors that the term reads, by name. `unit` is the unit of x, such as base-2 logarithms, and `to` is the unit of the scores that
  # the term returns.
  def kernel(out:UOp, scores:UOp, *tensors:UOp) -> UOp:
    r, zero = UOp.range(N//4, 0, AxisType.GLOBAL), UOp.const(0)
    row, first = (Row(zero, UOp.const(1), i, UOp.const(True)) for i in (UOp.const(3), zero))
    walk = Walk(p, "keys", 37, N, p.Sq)
    at = Fragment(p, dict(zip(given, tensors)), row, first, walk, r, 4, zero, 4, [(0, 1, 2, 3)], 4, to, (None, UOp.const(N - 1)))
    before = [ops.build(*[scores[r*4 + i].load() for i in range(4)])]
    after = term.value(before, at, unit)
    assert term.derivative is not None
    stores = [out[kind*N + r*4 + i].store(ops.extract(y, i)) for kind, y in enumerate((after[0], term.derivative(before, after, at, unit)[0]))
              for i in range(4)]
    return plain(UOp.group(*stores).end(r).sink(arg=KernelInfo("term")))
  with emulated("gfx942"):
    inputs = [Tensor(a, device="EMU").contiguous() for a in (x.astype(np.float32), *(a.reshape(-1) for a in given.values()))]
    out = Tensor.empty(2*N, device="EMU").custom_kernel(*inputs, fxn=kernel)[0].numpy().astype(np.float64)
  return out[:N]*to.natural, out[N:]

@pytest.mark.parametrize("to", (BASE2, NATURAL), ids=("base2", "natural"))
@pytest.mark.parametrize("raw", (True, False))
@pytest.mark.parametrize("term", TERMS, ids=lambda term: term.name)
def test_a_derivative_is_that_of_the_value(term:ScoreTerm, raw:bool, to:ScoreUnit) -> None:
  p = problem(H=2, Sq=5, Sk=N, dtype="float32", softmax_scale=0.7, **OPTIONS[term.name])
  unit, given = raw_unit(p) if raw else to, {name: a for name, a in OPTIONS[term.name].get("extras", {}).items()}
  x, step = np.linspace(-4, 4, N)/unit.natural, 0.02/unit.natural
  (low, _), (_, slope), (high, _) = (applied(term, p, unit, to, given, a) for a in (x - step, x, x + step))
  np.testing.assert_allclose(slope, (high - low)/(2*step*unit.natural), atol=3e-4)
  assert (term.derivative is one) == (np.abs(slope - 1).max() == 0)

# ***** a term without a derivative *****

SIZE, SCALE = (1, 2, 8, 16), 0.25

def replaced(m:pytest.MonkeyPatch, **changes:Any) -> None:
  # Changes fields of softcap's row in the table of score terms, until the test ends.
  # Each test needs its own softcap value, because attn caches its choices for a problem.
  m.setattr(terms, "TERMS", tuple(replace(term, **changes) if term.name == "softcap" else term for term in TERMS))

def loss_of(device:Any, **options:Any) -> tuple[list[Tensor], Tensor]:
  x = [floats(*SIZE, seed=seed) for seed in range(3)]
  given = [Tensor(a.astype(np.float16), device="EMU") for a in x]
  return given, attn.attention(*(device(t) for t in given), softmax_scale=SCALE, **options)

def by_book(given:list[Tensor], softcap:float) -> tuple[np.ndarray, list[np.ndarray]]:
  q, k, v = (t.numpy().astype(np.float64) for t in given)
  o, _ = exact(q, k, v, SCALE, options=Options(softcap=softcap))
  found = exact_backward(q, k, v, np.ones_like(o), None, SCALE, options=Options(softcap=softcap))
  return o, [found.q, found.k, found.v]

@pytest.mark.parametrize("kernel", ("", "three_pass"))
def test_a_term_without_a_derivative_refuses_a_gradient(monkeypatch:pytest.MonkeyPatch, kernel:str) -> None:
  # If a score term has no derivative, a request for gradients raises an error that names the term, before a kernel runs. Forward still works.
  softcap = 2.125 + len(kernel)
  replaced(monkeypatch, derivative=None, differentiable=False)
  with emulated("gfx942", kernel):
    given, o = loss_of(lambda t: t, softcap=softcap)
    np.testing.assert_allclose(o.numpy(), by_book(given, softcap)[0], atol=3e-3)
    given, o = loss_of(lambda t: t, softcap=softcap)
    why = f"softcap={softcap}: it has no derivative"
    with pytest.raises(NotImplementedError, match=why): o.sum().gradient(*given)
    with pytest.raises(NotImplementedError, match=why): attn.explain(*given, softcap=softcap, backward=True)

def test_devices_that_share_rows_refuse_it(monkeypatch:pytest.MonkeyPatch) -> None:
  replaced(monkeypatch, derivative=None, differentiable=False)
  with emulated("gfx942"):
    given, o = loss_of(lambda t: attn.shard_sequence(t, ("EMU:0", "EMU:1"), 2, "contiguous"), softcap=2.375)
    with pytest.raises(NotImplementedError, match=r"softcap=2\.375: it has no derivative"): o.sum().gradient(*given)

def test_a_derivative_that_kernels_lack_is_tinygrads(monkeypatch:pytest.MonkeyPatch) -> None:
  replaced(monkeypatch, derivative=None)
  with emulated("gfx942"):
    given, o = loss_of(lambda t: t, softcap=2.625)
    choice = attn.explain(*given, softcap=2.625, backward=True)
    assert choice.kernels == () and choice.refused is not None
    assert "softcap=2.625: the backward kernels cannot compute its derivative" in choice.refused
    for got, want in zip(o.sum().gradient(*given), by_book(given, 2.625)[1]): np.testing.assert_allclose(got.numpy(), want, atol=4e-3)
