"""Tests of attn/functions/derivative.py, which differentiates functions of scores. The derivatives are computed in numpy and compared with known
formulas, with differences of the function's values, and with tinygrad's differentiation. In float32 they contain no NaN, also where parts of the
function overflow."""
from __future__ import annotations
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from tinygrad.mixin.gradient import compute_gradient
from attn.functions import derivative as module
from attn.functions.derivative import derivative, derivative_or_reason, is_additive, why_no_derivative
from attn.functions.symbols import BATCH, KEY, QUERY, QUERY_HEAD, SCORE, tensor_symbol
from attn.tinygrad_compat import Ops, UOp, committed, dtypes

Array = np.ndarray
Real = type[np.floating[Any]]
Given = Mapping[UOp, Any]      # numbers for symbols and elements

# ***** values of expressions *****

OPERATIONS: dict[Ops, Callable[..., Any]] = {
  Ops.ADD: np.add, Ops.MUL: np.multiply, Ops.MAX: np.maximum, Ops.EXP2: np.exp2, Ops.LOG2: np.log2, Ops.SIN: np.sin, Ops.SQRT: np.sqrt,
  Ops.RECIPROCAL: np.reciprocal, Ops.TRUNC: np.trunc, Ops.POW: np.power, Ops.CMPLT: np.less, Ops.CMPNE: np.not_equal, Ops.WHERE: np.where,
  Ops.AND: np.bitwise_and, Ops.OR: np.bitwise_or, Ops.XOR: np.bitwise_xor, Ops.FLOORDIV: np.floor_divide, Ops.FLOORMOD: np.mod}

def as_dtype(x:Any, u:UOp, real:Real) -> Any:
  # Converts x to a numpy array of the dtype of the UOp `u`, except that any float dtype becomes `real`.
  return np.asarray(x).astype(real if dtypes.is_float(u.dtype) else bool if u.dtype == dtypes.bool else np.int64)

def computed(value:UOp, numbers:Given, real:Real) -> Array:
  # Computes the UOp `value` in numpy, with floats of the type `real`, from the values of its symbols.
  found = {u: as_dtype(x, u, real) for u, x in numbers.items()}
  with np.errstate(all="ignore"):
    for u in value.toposort(lambda u: u not in numbers):
      match u.op:
        case Ops.CONST: found[u] = as_dtype(u.val, u, real)
        case Ops.CAST: found[u] = as_dtype(found[u.src[0]], u, real)
        case Ops.BITCAST: found[u] = found[u.src[0]].astype(np.float32).view(np.int32).astype(np.int64)
        case _: found[u] = as_dtype(OPERATIONS[u.op](*(found[x] for x in u.src)), u, real)
  return np.broadcast_to(found[value], np.broadcast(*(found[u] for u in numbers), found[value]).shape)

def differences(value:UOp, of:UOp, numbers:Given) -> tuple[Array, Array]:
  # Computes the derivative of `value` by the symbol `of` from central differences, and where the function is smooth.
  def over(step:float) -> Array:
    h = np.longdouble(step)
    after, before = (computed(value, {**numbers, of: np.asarray(numbers[of], np.longdouble) + x}, np.longdouble) for x in (h, -h))
    with np.errstate(all="ignore"): return (after - before)/(2*h)
  # The function is smooth where differences over two distances agree.
  wide, narrow = over(2**-13), over(2**-15)
  with np.errstate(all="ignore"): return narrow + (narrow - wide)/15, np.abs(narrow - wide) <= 1e-6*(1 + np.abs(narrow))

def hold_near(found:Array, expected:Array, tolerance:float) -> None:
  np.testing.assert_array_less(np.abs(found - expected), tolerance*(1 + np.abs(expected)))

@contextmanager
def exact_constants() -> Iterator[None]:
  # Context in which constants in derivatives stay Python numbers. Otherwise they are rounded to float32.
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(module, "committed", lambda u: u)
    derivative_or_reason.cache_clear()
    yield
  derivative_or_reason.cache_clear()

TABLE, NARROW = tensor_symbol(0, (8,), "float32"), tensor_symbol(1, (8, 100), "bfloat16")
ELEMENT, HALF = TABLE[QUERY_HEAD], NARROW[QUERY_HEAD, QUERY - KEY + 50]
NUMBERS: dict[UOp, Any] = {BATCH: 1, QUERY_HEAD: 3, QUERY: 7, KEY: 5, ELEMENT: 1.5, HALF: -0.75}
SCORES = np.array([-30.5, -7.25, -2.0, -1.0, -0.3, 0.4, 1.0, 1.7, 2.5, 6.0, 11.0, 40.0])
HUGE = np.array([1e-30, 1e-6, 20.0, 100.0, 1e4, 1e10, 1e19, 1e20, 1e30, 3e38])
EXTREME = np.concatenate([-HUGE[::-1], [0.0], HUGE])

# ***** functions that users write *****

def sigmoid(x:Array) -> Array: return 1/(1 + np.exp(-x))
def tanh_gelu_slope(x:Array) -> Array:
  y, c = np.sqrt(2/np.pi)*(x + 0.044715*x**3), np.sqrt(2/np.pi)
  return 0.5*(1 + np.tanh(y)) + 0.5*x*(1 - np.tanh(y)**2)*c*(1 + 3*0.044715*x**2)

CLOSED: dict[str, tuple[Callable[[UOp], UOp], Callable[[Array], Array]]] = {
  "identity": (lambda x: x, np.ones_like),
  "scaled": (lambda x: x*ELEMENT - 3.0, lambda x: np.full_like(x, 1.5)),
  "quotient": (lambda x: x/(QUERY - KEY + 1), lambda x: np.full_like(x, 1/3)),
  "reciprocal": (lambda x: 5.0/x, lambda x: -5/x**2),
  "polynomial": (lambda x: x*x*x*0.25 - x*x + 2.0*x, lambda x: 0.75*x**2 - 2*x + 2),
  "tanh": (lambda x: x.tanh(), lambda x: 1/np.cosh(x)**2),
  "sigmoid": (lambda x: x.sigmoid(), lambda x: sigmoid(x)*sigmoid(-x)),
  "softcap": (lambda x: (x/20).tanh()*20, lambda x: 1/np.cosh(x/20)**2),
  "softcap of a head": (lambda x: (x/ELEMENT).tanh()*ELEMENT, lambda x: 1/np.cosh(x/1.5)**2),
  "exp": (lambda x: x.exp(), np.exp),
  "2^x": (lambda x: 2.0**x, lambda x: np.log(2)*2**x),
  "gauss": (lambda x: (-x*x).exp(), lambda x: -2*x*np.exp(-x*x)),
  "log": (lambda x: (x*x + 1).log(), lambda x: 2*x/(x*x + 1)),
  "sqrt": (lambda x: (x*x + 1).sqrt(), lambda x: x/np.sqrt(x*x + 1)),
  "x^4": (lambda x: x**4, lambda x: 4*x**3),
  "x^-2": (lambda x: x**-2, lambda x: -2*x**-3.0),
  "x^2.6": (lambda x: (x*x)**1.3, lambda x: 2.6*np.sign(x)*np.abs(x)**1.6),
  "x^tanh(x)": (lambda x: x.abs()**x.tanh(), lambda x: np.abs(x)**np.tanh(x)*(np.log(np.abs(x))/np.cosh(x)**2 + np.tanh(x)/x)),
  "sin": (lambda x: x.sin(), np.cos),
  "cos": (lambda x: (2*x).cos(), lambda x: -2*np.sin(2*x)),
  "abs": (lambda x: x.abs(), np.sign),
  "clamp": (lambda x: x.clamp(-1.5, 2), lambda x: np.where((x > -1.5) & (x < 2), 1.0, 0.0)),
  "minimum": (lambda x: x.minimum(3*x - 1), lambda x: np.where(x > 3*x - 1, 3.0, 1.0)),
  "relu": (lambda x: x.relu(), lambda x: np.where(x > 0, 1.0, 0.0)),
  "leaky relu": (lambda x: x.leaky_relu(0.125), lambda x: np.where(x > 0, 1.0, 0.125)),
  "silu": (lambda x: x.silu(), lambda x: sigmoid(x)*(1 + x*sigmoid(-x))),
  "gelu": (lambda x: x.gelu(), tanh_gelu_slope),
  "softplus": (lambda x: x.softplus(), sigmoid),
  "softsign": (lambda x: x.softsign(), lambda x: (1 + np.abs(x))**-2),
  "least integer": (lambda x: x*QUERY.minimum(KEY), lambda x: np.full_like(x, 5.0)),
  "remainder": (lambda x: x % 3.0, np.ones_like),
  "floor": (lambda x: x.floor(), np.zeros_like),
  "integer": (lambda x: x.cast(dtypes.int)*0.5, np.zeros_like),
  "no score": (lambda x: ELEMENT*2, np.zeros_like),
  "sign": (lambda x: (x.bitcast(dtypes.int) < 0).where(2*x, x), lambda x: np.where(x < 0, 2.0, 1.0)),
  "lowest bit": (lambda x: (x.bitcast(dtypes.int) & 1).cast(dtypes.bool).where(x, x*1.0), np.ones_like)}

@pytest.mark.parametrize("name", CLOSED)
def test_closed_forms(name:str) -> None:
  function, slope = CLOSED[name]
  with np.errstate(all="ignore"): expected = slope(SCORES)
  found = derivative(function(SCORE), SCORE)
  assert found.dtype == dtypes.float and not [u for u in found.toposort(lambda u: u.op is not Ops.INDEX) if u.dtype in dtypes.weaks]
  np.testing.assert_allclose(computed(found, {**NUMBERS, SCORE: SCORES}, np.float64), expected, rtol=1e-6, atol=1e-7)
  np.testing.assert_allclose(computed(found, {**NUMBERS, SCORE: SCORES}, np.float32), expected, rtol=1e-5, atol=1e-6)

@pytest.mark.parametrize("name", CLOSED)
def test_no_nan_where_the_value_is_finite(name:str) -> None:
  # The derivative in float32 is not NaN wherever the function is finite, for scores of every size and for -inf.
  value = CLOSED[name][0](SCORE)
  numbers = {**NUMBERS, SCORE: np.append(EXTREME, -np.inf)}
  finite = np.isfinite(computed(value, numbers, np.float32))
  assert finite.any() and not np.isnan(computed(derivative(value, SCORE), numbers, np.float32)[finite]).any()

Point = tuple[Callable[[UOp], UOp], float, float]     # a function, a score, the derivative at this score
ZERO = (QUERY - 7).cast(dtypes.float)                 # 0 in NUMBERS
OVERFLOWS: dict[str, Point] = {
  "1/(1 + x^4)": (lambda x: 1/(1 + x*x*x*x), 1e12, 0.0),
  "1/(3 + exp(x))": (lambda x: 1/(3 + x.exp()), 200.0, 0.0),
  "exp(-x^4)": (lambda x: (-x*x*x*x).exp(), 1e15, 0.0),
  "exp(-x^2)": (lambda x: (-x*x).exp(), -math.inf, 0.0),
  "exp(-1/x^2)": (lambda x: (-1/(x*x)).exp(), 0.0, 0.0),
  "tanh(x^3)": (lambda x: (x*x*x).tanh(), -1e20, 0.0),
  "tanh(1/x)": (lambda x: (1/x).tanh(), 0.0, 0.0),
  "softcap of 0": (lambda x: (x/ZERO).tanh()*ZERO, 3.0, 0.0),
  "sqrt(x^2)": (lambda x: (x*x).sqrt(), 0.0, 0.0),
  "x sqrt(x)": (lambda x: x*x.sqrt(), 0.0, 0.0),
  "x(3 + 2 sqrt(x))": (lambda x: x*(2*x.sqrt() + 3), 0.0, 3.0),
  "sqrt(x)^4": (lambda x: x.sqrt()**4, 0.0, 0.0),
  "(x^2)^0.3": (lambda x: (x*x)**0.3, 0.0, 0.0),
  "x x^0.3": (lambda x: x*x**0.3, 0.0, 0.0),
  "x^0": (lambda x: x**ZERO, 0.0, 0.0),
  "0^x": (lambda x: ZERO**x, 2.0, 0.0),
  "0^x at 0": (lambda x: ZERO**x, 0.0, 0.0)}

@pytest.mark.parametrize("name", OVERFLOWS)
def test_zero_wins_over_infinity(name:str) -> None:
  function, score, expected = OVERFLOWS[name]
  numbers = {**NUMBERS, SCORE: score}
  assert np.isfinite(computed(function(SCORE), numbers, np.float32))
  np.testing.assert_allclose(computed(derivative(function(SCORE), SCORE), numbers, np.float32), expected, atol=1e-6)

BRANCHES: dict[str, Point] = {
  "1/x": (lambda x: x.ne(0).where(1/x, 2*x), 0.0, 2.0),
  "log at 0": (lambda x: (x > 0).where(x.log(), 0), 0.0, 0.0),
  "log below 0": (lambda x: (x > 0).where(x.log(), x), -1.0, 1.0),
  "square of a log": (lambda x: (x > 0).where(x.log(), 0)**2, 0.0, 0.0),
  "exp of a sqrt": (lambda x: (x > 0).where(x.sqrt(), 0).exp(), -2.0, 0.0),
  "exp": (lambda x: (x < 5).where(x.exp(), x*x), 1000.0, 2000.0),
  "maximum": (lambda x: (x*x).log().maximum(-3.0), 0.0, 0.0),
  "sigmoid of a log": (lambda x: (x < 1).where(0.5, x.log().sigmoid()), 0.0, 0.0),
  "distance": (lambda x: x/(ZERO.ne(0).where(ZERO, 1)), 3.0, 1.0)}

@pytest.mark.parametrize("name", BRANCHES)
def test_a_branch_that_is_not_taken_does_not_count(name:str) -> None:
  function, score, expected = BRANCHES[name]
  assert float(computed(derivative(function(SCORE), SCORE), {**NUMBERS, SCORE: score}, np.float32)) == pytest.approx(expected)

def test_ties_count_half() -> None:
  value = SCORE.maximum(3*SCORE - 4) + SCORE.minimum(2.0)*10
  np.testing.assert_array_equal(computed(derivative(value, SCORE), {SCORE: [1.0, 2.0, 3.0]}, np.float32), [11.0, 7.0, 3.0])

def test_an_infinite_derivative_is_infinite() -> None:
  assert computed(derivative(SCORE.sqrt(), SCORE), {SCORE: 0.0}, np.float32) == np.inf
  assert computed(derivative(SCORE**0.3, SCORE), {SCORE: 0.0}, np.float32) == np.inf

# ***** what a kernel computes *****

def test_a_function_that_adds_to_the_score() -> None:
  mask = QUERY >= KEY
  for value in (SCORE, SCORE + (KEY - QUERY)*0.5, 2*SCORE - SCORE + HALF, mask.where(SCORE, -math.inf), SCORE + mask.where(0, -math.inf),
                (mask & (KEY > 3)).where(SCORE, -math.inf) + ELEMENT, mask.where((KEY < 9).where(-math.inf, SCORE + HALF), -math.inf)):
    assert derivative(value, SCORE) is UOp.const(1.0, dtypes.float) and is_additive(value), value
  for value in (ELEMENT + 0.0, SCORE*2, mask.where(SCORE, -1e9), mask.where(SCORE, -math.inf).exp(), mask.where(SCORE, -math.inf).maximum(0.0),
                SCORE + SCORE.bitcast(dtypes.int).bitcast(dtypes.float)): assert not is_additive(value), value

def test_a_hidden_score_that_comes_back_is_not_hidden() -> None:
  # A score_mod may make a score -inf where a condition (tinygrad's WHERE) holds. The score is hidden there, with derivative 0, only if the function
  # then does nothing but add and choose by other conditions. This function takes exp of the -inf, which gives 0, and adds the score again: the score
  # is visible, and its derivative counts.
  hidden = (KEY < 3).where(SCORE, -math.inf)
  value = (QUERY < 5).where(hidden, hidden.exp() + SCORE)
  found = computed(derivative(value, SCORE), {QUERY: [7, 7, 3], KEY: [5, 1, 1], SCORE: 0.5}, np.float64)
  np.testing.assert_allclose(found, [1.0, 1 + math.exp(0.5), 1.0], rtol=1e-6)

SELECTIONS = {"tanh": 0, "softcap": 0, "sigmoid": 0, "exp": 0, "silu": 0, "polynomial": 0, "x^4": 0, "reciprocal": 0, "gauss": 1, "gelu": 1}

@pytest.mark.parametrize("name", SELECTIONS)
def test_selections_only_where_a_factor_can_be_infinite(name:str) -> None:
  found = derivative(CLOSED[name][0](SCORE), SCORE)
  assert sum(u.op is Ops.WHERE for u in found.toposort()) == SELECTIONS[name]

def test_a_softcap_takes_its_derivative_from_its_value() -> None:
  # A kernel computes the derivative of a softcap from values that it has already computed for the softcap itself, with only four more operations.
  value = (SCORE/30).tanh()*30
  there = set(committed(value.simplify()).toposort())
  added = [u for u in derivative(value, SCORE).toposort() if u not in there and u.op is not Ops.CONST]
  # With r = 1/(1 + 2^y) of the value: r*r, its product with -1 (a part of a fused multiply-add), r - r*r, and one product.
  assert [u.op for u in added] == [Ops.MUL, Ops.MUL, Ops.ADD, Ops.MUL] and added[-1].src[1].val == 4.0

def test_the_same_function_has_the_same_derivative() -> None:
  value = (SCORE*ELEMENT).tanh() + SCORE.exp()
  found = derivative(value, SCORE)
  derivative_or_reason.cache_clear()
  assert derivative(value, SCORE) is found
  assert ELEMENT in found.toposort() and HALF in derivative(SCORE.exp()*HALF, SCORE).toposort()     # the elements that the function reads

def test_a_long_function() -> None:
  value = SCORE
  for n in range(2000): value = value + SCORE*(n % 3)
  assert computed(derivative(value, SCORE), {SCORE: 0.0}, np.float64) == 1 + sum(n % 3 for n in range(2000))

# ***** elements of tensors *****

def test_elements() -> None:
  value = SCORE*HALF + HALF*HALF*2 + ELEMENT.exp() + TABLE[KEY]
  numbers = {**NUMBERS, SCORE: SCORES, TABLE[KEY]: 9.0}
  for of, expected in ((HALF, SCORES - 3), (ELEMENT, np.exp(1.5)), (TABLE[KEY], 1.0), (SCORE, -0.75), (TABLE[QUERY], 0.0)):
    found = derivative(value, of)
    assert {u.dtype for u in found.toposort(lambda u: u.op is not Ops.INDEX) if dtypes.is_float(u.dtype)} == {dtypes.float}
    np.testing.assert_allclose(computed(found, numbers, np.float64), np.broadcast_to(expected, SCORES.shape), rtol=1e-6)

def test_an_element_that_multiplies_a_score_that_overflows() -> None:
  value = (-ELEMENT*(SCORE*SCORE).maximum(1.0)).exp()
  np.testing.assert_allclose(computed(derivative(value, ELEMENT), {**NUMBERS, SCORE: [0.5, 1e30]}, np.float32), [-math.exp(-1.5), 0.0], rtol=1e-6)

def test_an_index_has_no_slope() -> None:
  for index in ((SCORE*2).cast(dtypes.int), SCORE.bitcast(dtypes.int) & 7):
    assert is_additive(SCORE + TABLE[index]) and derivative(TABLE[index]*3.0, TABLE[index]).val == 3.0

# ***** functions without a derivative *****

def test_why_there_is_no_derivative() -> None:
  bits = (SCORE.bitcast(dtypes.int) ^ 1).bitcast(dtypes.float)
  assert why_no_derivative(SCORE + bits*0.5, SCORE) == "the bits of a number (BITCAST)"
  with pytest.raises(NotImplementedError, match=r"the bits of a number \(BITCAST\) has no derivative"): derivative(bits, SCORE)
  assert why_no_derivative(SCORE.alu(Ops.FLOORMOD, ELEMENT), ELEMENT) == "the operation FLOORMOD"
  assert why_no_derivative(bits + ELEMENT, ELEMENT) is None and why_no_derivative(SCORE.floor() % 2.0, SCORE) is None

# ***** random functions *****

LEAVES = (SCORE, SCORE, SCORE, ELEMENT, HALF.cast(dtypes.float), (QUERY - KEY).cast(dtypes.float), UOp.const(0.5), UOp.const(-2.0), UOp.const(3.0))
ONE_ARGUMENT: tuple[Callable[[UOp], UOp], ...] = (
  UOp.tanh, UOp.sigmoid, UOp.sin, UOp.abs, UOp.relu, UOp.square, UOp.silu, UOp.softplus, UOp.floor, lambda x: (x*0.25).exp(),
  lambda x: (-x*x).exp(), lambda x: x*0.125, lambda x: (x*x + 0.5).sqrt(), lambda x: (x.abs() + 0.25).log(), lambda x: 1/(x*x + 1),
  lambda x: x.clamp(-1, 2), lambda x: x.leaky_relu(0.5), lambda x: (x > 0).where(x.log(), x), lambda x: x.ne(0).where(1/x, 0.0),
  lambda x: (x < 0).where(0.25, x.sqrt()), lambda x: x**3, lambda x: x.abs()**1.5)
TWO_ARGUMENTS: tuple[Callable[[UOp, UOp], UOp], ...] = (
  UOp.add, UOp.sub, UOp.mul, UOp.maximum, UOp.minimum, lambda x, y: x/(y.abs() + 1), lambda x, y: (x < y).where(x, y*0.5),
  lambda x, y: (QUERY < KEY).where(x, y), lambda x, y: (x.abs() + 1)**y.tanh())

def larger(inner:st.SearchStrategy[UOp]) -> st.SearchStrategy[UOp]:
  # Returns a hypothesis strategy for an operation whose operands are functions that `inner` makes.
  return st.one_of(st.builds(lambda f, x: f(x), st.sampled_from(ONE_ARGUMENT), inner),
                   st.builds(lambda f, x, y: f(x, y), st.sampled_from(TWO_ARGUMENTS), inner, inner))

FUNCTIONS = st.recursive(st.sampled_from(LEAVES), larger, max_leaves=8).map(lambda x: (x + SCORE*0.0625).cast(dtypes.float))

RANDOM:dict[UOp, Any] = {**NUMBERS, ELEMENT: 1.4371, HALF: -0.7613, SCORE: SCORES/4 + 0.0123}     # numbers at which few functions have a tie

def random_functions(check:Callable[[UOp], None]) -> None:
  # Runs `check` with 150 random functions, which are the same in each run.
  @settings(max_examples=150, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
  @given(FUNCTIONS)
  def checked(value:UOp) -> None: check(value)
  checked()

def test_random_functions_have_the_slope_of_their_values() -> None:
  compared = 0
  def check(value:UOp) -> None:
    nonlocal compared
    for of in (SCORE, ELEMENT):
      found, (expected, smooth) = computed(derivative(value, of), RANDOM, np.longdouble), differences(value, of, RANDOM)
      smooth = smooth & (np.abs(expected) < 1e6) & np.isfinite(computed(value, RANDOM, np.longdouble))
      hold_near(found[smooth], expected[smooth], 2e-6)
      compared += int(smooth.sum())
  with exact_constants(): random_functions(check)
  assert compared > 3000

def test_random_functions_agree_with_tinygrad() -> None:
  # The derivative of a random function equals tinygrad's wherever tinygrad's is finite. Both are computed in numpy's longdouble, which does not
  # overflow here. In float32 the derivative is no NaN there.
  compared = 0
  def check(value:UOp) -> None:
    nonlocal compared
    numbers = {**RANDOM, SCORE: np.concatenate([RANDOM[SCORE], EXTREME[np.abs(EXTREME) > 1e-7]])}
    reference = computed(compute_gradient(value, UOp.const(1.0, dtypes.float), {SCORE})[SCORE], numbers, np.longdouble)
    found = computed(derivative(value, SCORE), numbers, np.longdouble)
    finite = np.isfinite(reference) & (np.abs(reference) < 1e6) & np.isfinite(computed(value, numbers, np.float32))
    hold_near(found[finite], reference[finite], 1e-5)
    assert not np.isnan(computed(derivative(value, SCORE), numbers, np.float32)[finite]).any()
    compared += int(finite.sum())
  with exact_constants(): random_functions(check)
  assert compared > 3000
