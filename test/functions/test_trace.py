"""Tests of attn/functions/trace.py, and of what `attention` does with a score_mod or mask_mod before a kernel runs: which functions and tensors it
refuses and with which message, which UOps it makes of the others, and when it calls the function or compiles a kernel again."""
from __future__ import annotations
import functools, itertools, random, types
from collections import namedtuple
from collections.abc import Callable
from typing import Any
import numpy as np
import pytest
import attn
from attn.api.attention import choice_of
from attn.emulator.device import UOpCompiler
from attn.functions import trace as module
from attn.functions.symbols import BATCH, KEY, QUERY, QUERY_HEAD, SCORE, tensor_symbol
from attn.functions.trace import MASK_FUNCTION, SCORE_FUNCTION, Traced, trace
from attn.tinygrad_compat import Ops, Tensor, UOp, committed, dtypes, equality_as_uops
from api_cases import emulated

KINDS = (((2, 5), "float32"),)
TABLE = tensor_symbol(0, *KINDS[0])

def on_emulator(shape:tuple[int, ...]=(2, 5), dtype:Any=dtypes.float, device:str="EMU") -> Tensor:
  return Tensor.ones(*shape, dtype=dtype, device=device).contiguous().realize()

def call(*tensors:Any, score:Any=None, mask:Any=None) -> Any:
  # Checks the arguments of a call of `attention` with this score_mod and mask_mod, and returns dispatch's choice of a kernel.
  q = on_emulator((1, 2, 5, 32), dtypes.half)
  return choice_of(q, q, q, arch="gfx942", score_mod=score, mask_mod=mask, mod_tensors=tensors)

def scored(function:Any) -> UOp:
  found = trace(SCORE_FUNCTION, function, KINDS)
  return SCORE if found is None else found.value

def masked(function:Any) -> UOp:
  found = trace(MASK_FUNCTION, function, ())
  assert found is not None
  return found.value

# ***** what is refused *****

def mod(function:Callable[..., Any]) -> Callable[..., Any]:
  # Makes a score_mod of one tensor from `function(score, h, i, j, tensor)`: the argument b is left out.
  return lambda s, b, h, i, j, t: function(s, h, i, j, t)

RETURNED = {"None": None, "True": True, "1.0": 1.0, "3": 3, "'x'": "x", r"\(1,\)": (1,), "nan": float("nan")}

@pytest.mark.parametrize("text", RETURNED)
def test_a_result_that_is_no_uop(text:str) -> None:
  score, mask = (lambda s, b, h, i, j: RETURNED[text]), (lambda b, h, i, j: RETURNED[text])
  what = rf"=<lambda> \(.*test_trace.py:\d+\) returned {text}: must return a scalar UOp"
  with pytest.raises(ValueError, match=rf"^score_mod{what}, score_mod\(score, b, h, i, j, \*tensors\) -> float32"): call(score=score)
  with pytest.raises(ValueError, match=rf"^mask_mod{what}, mask_mod\(b, h, i, j, \*tensors\) -> bool"): call(mask=mask)

def test_a_result_that_is_a_tensor() -> None:
  with pytest.raises(ValueError, match=r"returned Tensor of shape \(2, 5\) and dtype dtypes.float: must return a scalar UOp"):
    call(score=lambda s, b, h, i, j: on_emulator())
  for function in (lambda b, h, i, j: CLOSED == i, lambda b, h, i, j: i == CLOSED):     # noqa: SIM300
    with pytest.raises(ValueError, match=r"returned Tensor of shape \(4,\) and dtype dtypes.bool: must return a scalar UOp"): call(mask=function)

NOT_THESE: dict[str, tuple[Callable[..., Any], str]] = {     # a mod of one tensor of shape (2, 5), and why it is refused
  "whole tensor": (mod(lambda s, h, i, j, t: t), r"a UOp of shape \(2, 5\): must be a scalar.*index every axis of a tensor"),
  "row": (mod(lambda s, h, i, j, t: t[h]), r"a UOp of shape \(5,\): must be a scalar"),
  "slice": (mod(lambda s, h, i, j, t: t[0:1, 0]), r"a UOp of shape \(1,\): must be a scalar"),
  "axis": (mod(lambda s, h, i, j, t: s.reshape((1,))), r"a UOp of shape \(1,\): must be a scalar"),
  "half": (mod(lambda s, h, i, j, t: s.cast(dtypes.half)), "a UOp of dtype float16: must be float32"),
  "double": (mod(lambda s, h, i, j, t: s.cast(dtypes.double)), "a UOp of dtype double: must be float32"),
  "int": (mod(lambda s, h, i, j, t: i), "a UOp of dtype int32: must be float32"),
  "bool": (mod(lambda s, h, i, j, t: i > j), "a UOp of dtype bool: must be float32"),
  "stored": (mod(lambda s, h, i, j, t: t[h, 0].store(s)), "a UOp of dtype void: must be float32"),
  "float index": (mod(lambda s, h, i, j, t: s + t[h, s]), "indexes axis 1 of a tensor by a UOp of dtype float32: must be an int"),
  "bool index": (mod(lambda s, h, i, j, t: s + t[h, i > j]), "indexes axis 1 of a tensor by a UOp of dtype bool: must be an int"),
  "float number": (mod(lambda s, h, i, j, t: s + t[0, 1.0]), "an operand that is no UOp, such as an index of a tensor that is a float"),
  "beyond": (mod(lambda s, h, i, j, t: s + t[2, 0]), r"reads index 2 of axis 0 of a tensor of shape \(2, 5\): must lie in 0..1"),
  "below": (mod(lambda s, h, i, j, t: s + t[0, -1]), r"reads index -1 of axis 1 of a tensor of shape \(2, 5\): must lie in 0..4"),
  "always beyond": (mod(lambda s, h, i, j, t: s + t[h, j + 5]), r"reads index UOp \(j\+5\) of axis 1 of a tensor of shape .*: must lie in 0..4"),
  "never inside": (mod(lambda s, h, i, j, t: s + t[h, -1 - j]), r"reads index UOp .* of axis 1 of a tensor of shape \(2, 5\): must lie in 0..4"),
  "three indices": (mod(lambda s, h, i, j, t: s + t[h, 0, 0]), r"raised IndexError: too many indices \(3\) for 2D")}

@pytest.mark.parametrize("name", NOT_THESE)
def test_a_result_or_an_index_that_is_wrong(name:str) -> None:
  function, why = NOT_THESE[name]
  with pytest.raises(ValueError, match=rf"^score_mod=<lambda> \(.*test_trace.py:\d+\) .*{why}"): call(on_emulator(), score=function)

def test_a_mask_that_is_not_bool() -> None:
  for function, dtype in ((lambda b, h, i, j: i*0.5, "weakfloat"), (lambda b, h, i, j: i - j, "int32"), (lambda b, h, i, j: UOp.const(1), "weakint")):
    with pytest.raises(ValueError, match=f"mask_mod=<lambda> .* returned a UOp of dtype {dtype}: must be bool, mask_mod"): call(mask=function)

CLOSED = on_emulator((4,))
THREEFRY = mod(lambda s, h, i, j, t: s + h.cast(dtypes.ulong).alu(Ops.THREEFRY, h.cast(dtypes.ulong)).cast(dtypes.float))
NO_ARGUMENT = r"a tensor or a variable that is not one of its arguments \(give tensors as mod_tensors\)"
NOT_IN_A_KERNEL: dict[str, tuple[Callable[..., Any], str]] = {
  "range": (mod(lambda s, h, i, j, t: s + UOp.range(4, 0).cast(dtypes.float)), "a loop"),
  "sum": (mod(lambda s, h, i, j, t: s + t.sum()), "a sum or maximum over an axis"),
  "sum of a row": (mod(lambda s, h, i, j, t: s + t[h].sum()), "a sum or maximum over an axis"),
  "maximum of columns": (mod(lambda s, h, i, j, t: s + t.max(0)[h]), "a sum or maximum over an axis"),
  "store": (mod(lambda s, h, i, j, t: s + t.after(t[h, 0].store(s))[h, 0]), "a store"),
  "buffer": (mod(lambda s, h, i, j, t: s + CLOSED.uop[h]), NO_ARGUMENT),
  "element of a buffer": (mod(lambda s, h, i, j, t: s + CLOSED[0].uop.cast(dtypes.float)), NO_ARGUMENT),
  "variable": (mod(lambda s, h, i, j, t: s + UOp.variable("n", 0, 4).cast(dtypes.float)), NO_ARGUMENT),
  "bound variable": (mod(lambda s, h, i, j, t: s + UOp.variable("n", 0, 4).bind(3).cast(dtypes.float)), NO_ARGUMENT),
  "parameter": (mod(lambda s, h, i, j, t: s + UOp.variable("n", 0, 4, dtypes.int, param=True).cast(dtypes.float)), NO_ARGUMENT),
  "tensor of no call": (mod(lambda s, h, i, j, t: s + UOp.placeholder((4,), dtypes.float, slot=3)[h]), NO_ARGUMENT),
  "thread": (mod(lambda s, h, i, j, t: s + UOp.special(4, "lidx0").cast(dtypes.float)), "the operation SPECIAL"),
  "random bits": (THREEFRY, "the operation THREEFRY"),
  "text": (mod(lambda s, h, i, j, t: UOp(Ops.CUSTOMI, dtypes.float, (s,), arg="sin({0})")), "the operation CUSTOMI"),
  "padding": (mod(lambda s, h, i, j, t: s + t.pad(((0, 1), (0, 0)))[h, 0]), "a padded tensor"),
  "fp8": (mod(lambda s, h, i, j, t: s.cast(dtypes.fp8e4m3).cast(dtypes.float)), "the dtype float8_e4m3, which not every chip has")}

@pytest.mark.parametrize("name", NOT_IN_A_KERNEL)
def test_an_operation_that_no_kernel_can_compute(name:str) -> None:
  function, uses = NOT_IN_A_KERNEL[name]
  with pytest.raises(NotImplementedError, match=rf"^score_mod=<lambda> \(.*test_trace.py:\d+\) uses {uses}: a function is computed for each score"):
    call(on_emulator(), score=function)

def test_a_tensor_that_was_computed_with() -> None:
  for function in (lambda s, b, h, i, j, t: s + (t*2)[h, 0], lambda s, b, h, i, j, t: s + (t > 0).where(t, 0)[h, j]):
    with pytest.raises(NotImplementedError, match=r"score_mod=<lambda> .* reads an element of .*, which is no tensor of mod_tensors"):
      call(on_emulator(), score=function)

def test_a_mask_cannot_see_the_score() -> None:
  with pytest.raises(NotImplementedError, match=f"mask_mod=<lambda> .* uses {NO_ARGUMENT}"): call(mask=lambda b, h, i, j: SCORE > 0)

def branches(b:UOp, h:UOp, i:UOp, j:UOp) -> UOp:
  if i > j: return i >= j
  return i < j

PYTHON: dict[str, Callable[..., Any]] = {
  "if": branches, "and": lambda b, h, i, j: i >= j and j > 3, "or": lambda b, h, i, j: i >= j or j < 3, "not": lambda b, h, i, j: not i >= j,
  "chain": lambda b, h, i, j: 0 <= i - j < 4, "choice": lambda b, h, i, j: i < j if i == j else i > j, "in": lambda b, h, i, j: j in (0, 5),
  "index of a list": lambda b, h, i, j: i - j < [1, 2][h], "int": lambda b, h, i, j: int(i) < j, "max": lambda b, h, i, j: max(i, j) < 5,
  "float": lambda b, h, i, j: float(i) < j, "key": lambda b, h, i, j: i < {0: 1}[h], "numpy": lambda b, h, i, j: i < np.int64(3),
  "equal numpy": lambda b, h, i, j: i == np.int64(3), "numpy array": lambda b, h, i, j: i < np.zeros(4)[h], "own error": lambda b, h, i, j: 1//0,
  "closed tensor": lambda b, h, i, j: h.cast(dtypes.float)*CLOSED < 3}

@pytest.mark.parametrize("name", PYTHON)
def test_python_that_needs_a_number(name:str) -> None:
  advice = r"It is called with UOps for numbers: use & \| ~ and .where\(\) in place of and, or, not, if and chained comparisons"
  with pytest.raises(ValueError, match=rf"(?s)^mask_mod=\S+ \(.*test_trace.py:\d+\) raised \w+: .*{advice}"): call(mask=PYTHON[name])

class Scaled:
  # A score_mod that is an object: it multiplies the score by `factor`, which tests change after a first call.
  def __init__(self, factor:float) -> None: self.factor = factor
  def __call__(self, s:UOp, b:UOp, h:UOp, i:UOp, j:UOp) -> UOp: return s*self.factor

@pytest.mark.parametrize("function, tensors", [
  (lambda s, b: s, 0), (lambda s, b, h, i, j, t: s, 0), (lambda s, b, h, i, j: s, 1), (lambda s, b, h, i, j, *, x: s, 0), (Scaled, 0), (abs, 0),
  (functools.partial(lambda x, s, b, h, i: s*x, 2.0), 0)])
def test_a_wrong_number_of_parameters(function:Any, tensors:int) -> None:
  with pytest.raises(ValueError, match=rf"^score_mod=.* cannot be called with {5 + tensors} arguments, score, b, h, i, j and {tensors} of "
                                       r"mod_tensors: .*; it must be score_mod\(score, b, h, i, j, \*tensors\) -> float32"):
    call(*[on_emulator()]*tensors, score=function)
  with pytest.raises(ValueError, match=r"^mask_mod=.* cannot be called with 4 arguments, b, h, i, j and 0 of mod_tensors"):
    call(mask=lambda i, j: i >= j)

def test_no_function() -> None:
  for x, text in ((3, "3"), ("causal", "'causal'"), (on_emulator(), r"Tensor of shape \(2, 5\) and dtype dtypes.float")):
    with pytest.raises(ValueError, match=f"^score_mod={text}: must be a function of UOps"): call(score=x)
    with pytest.raises(ValueError, match=f"^mask_mod={text}: must be a function of UOps"): call(mask=x)

COUNT = itertools.count()

@pytest.mark.parametrize("function", [
  lambda s, b, h, i, j: s + random.random(), lambda s, b, h, i, j: s + float(next(COUNT)),
  lambda s, b, h, i, j: s*UOp.const(float(np.random.default_rng().random()), dtypes.float)])
def test_another_expression_each_time(function:Any) -> None:
  with pytest.raises(ValueError, match=r"score_mod=<lambda> \(.*test_trace.py:\d+\) returned another expression when it was called a second time: it "
                                       "must compute the same each time, and read changing numbers from mod_tensors"): call(score=function)

# ***** tensors *****

def test_tensors_that_are_refused() -> None:
  def score(s:UOp, b:UOp, h:UOp, i:UOp, j:UOp, *tensors:UOp) -> UOp: return s
  def add(s:UOp, b:UOp, h:UOp, i:UOp, j:UOp, t:UOp, u:UOp) -> UOp: return s + t[h, 0]
  good, other = on_emulator(), Tensor.zeros(2, 5, device="CPU")
  q = on_emulator((1, 2, 5, 32), dtypes.half)
  with pytest.raises(ValueError, match=r"^mod_tensors has 1 tensors: they need score_mod or mask_mod"): call(good)
  with pytest.raises(NotImplementedError, match=r"^mod_tensors has 9 tensors: at most 8 are supported"): call(*[good]*9, score=score)
  with pytest.raises(ValueError, match=r"^mod_tensors\[1\]=ndarray of shape \(3,\) and dtype float64: must be a Tensor"):
    call(good, np.zeros(3), score=score)
  with pytest.raises(ValueError, match=r"^mod_tensors\[0\]=None: must be a Tensor"): call(None, score=score)
  with pytest.raises(ValueError, match=r"^attention: mod_tensors=Tensor of shape \(2, 5\) and dtype dtypes.float: must be a tuple of Tensors"):
    attn.attention(q, q, q, score_mod=score, mod_tensors=good)
  with pytest.raises(ValueError, match=r"^mod_tensors\[1\] is on CPU but q on EMU: all tensors must be on the same device"):
    call(good, other, score=add)
  with pytest.raises(ValueError, match=r"^mod_tensors\[1\] has shape \(2, 0\): must have at least one element"):
    call(good, on_emulator((2, 0)), score=add)
  for dtype, name in ((dtypes.double, "double"), (dtypes.fp8e4m3, "fp8e4m3"), (dtypes.ulong, "ulong")):
    with pytest.raises(NotImplementedError, match=rf"^mod_tensors\[1\] has dtype {name}: must be one of float16, bfloat16, float32, bool, int8, "
                                                  "uint8, int16, uint16, int32, uint32, int64"):
      call(good, Tensor.zeros(2, dtype=dtype, device="EMU"), score=score)
  with pytest.raises(NotImplementedError, match=r"^mod_tensors\[0\] has the symbolic shape \(n, 5\): shapes must be integers"):
    call(good[:UOp.variable("n", 1, 2).bind(1)], score=score)

def test_tensors_that_are_taken() -> None:
  # mod_tensors, the tensors that a score_mod or mask_mod reads, may be unrealised tensors, views, constants and single numbers, of every supported
  # dtype.
  rng = np.random.default_rng(0)
  x, table = rng.standard_normal((1, 2, 5, 32)).astype(np.float16), rng.standard_normal((2, 5)).astype(np.float32)
  scores = x.astype(np.float64)@x.astype(np.float64).swapaxes(-1, -2)/np.sqrt(32)
  def expected(s:np.ndarray) -> np.ndarray:
    p = np.exp(s - s.max(-1, keepdims=True))
    return p/p.sum(-1, keepdims=True)@x.astype(np.float64)
  with emulated("gfx942"):
    q, t = Tensor(x, device="EMU").realize(), Tensor(table, device="EMU").realize()
    def check(add:Any, function:Any, *tensors:Tensor) -> None:
      o = attn.attention(q, q, q, score_mod=function, mod_tensors=tensors).numpy()
      np.testing.assert_allclose(o, expected(scores + add), atol=4e-3)
    rows = table[:, None, :]
    check(rows*2 + 1, lambda s, b, h, i, j, t: s + t[h, j], t*2 + 1)
    check(rows, lambda s, b, h, i, j, t: s + t[j, h], t.T)
    check(np.arange(5)*3, lambda s, b, h, i, j, c, x: s + c*x.cast(dtypes.float)*j.cast(dtypes.float), Tensor(1.5, device="EMU"), Tensor.full((), 2))
    check(rows[..., ::-1], lambda s, b, h, i, j, t: s + t[h, 4 - j], t)
    for view in (lambda h, i, j, t: t[h][j], lambda h, i, j, t: t.permute((1, 0))[j, h], lambda h, i, j, t: t.flip((0, 1))[1 - h, 4 - j],
                 lambda h, i, j, t: t[None, h, j], lambda h, i, j, t: t.flatten()[h*5 + j], lambda h, i, j, t: t.permute((1, 0)).flatten()[j*2 + h],
                 lambda h, i, j, t: t.reshape((2, 1, 5)).expand((2, 3, 5))[h, i % 3, j], lambda h, i, j, t: t[:, 1:][h, (j - 1).maximum(0)] + (
                   j.eq(0)).where(t[h, 0] - t[h, 1], 0.0)):
      check(rows, mod(lambda s, h, i, j, t, view=view: s + view(h, i, j, t)), t)

def test_a_view_of_a_tensor_is_checked_like_the_tensor() -> None:
  # An index beyond the end of a flipped or permuted tensor is an error, and does not read another element of the tensor's buffer.
  for function, axis in ((lambda s, b, h, i, j, t: s + t.permute((1, 0))[0, 2], 0), (lambda s, b, h, i, j, t: s + t.flip((1,))[0, 5], 1)):
    with pytest.raises(ValueError, match=f"reads index -?[12] of axis {axis} of a tensor of shape"): call(on_emulator(), score=function)
  assert scored(lambda s, b, h, i, j, t: s + t.permute((1, 0))[j, h]) is scored(lambda s, b, h, i, j, t: s + t[h][j])

# ***** equality of UOps inside a function *****

def test_equality() -> None:
  equal = QUERY.eq(KEY)
  assert masked(lambda b, h, i, j: i == j) is equal and masked(lambda b, h, i, j: ~(i != j)) is equal
  assert masked(lambda b, h, i, j: 1 == i) is masked(lambda b, h, i, j: i == 1) is committed(QUERY.eq(1))     # noqa: SIM300
  assert masked(lambda b, h, i, j: (i == j) | (h == b)) is (equal | QUERY_HEAD.eq(BATCH))
  assert scored(lambda s, b, h, i, j, t: (s == 0.5).where(s, t[h, 0])) is scored(
    lambda s, b, h, i, j, t: s.eq(0.5).where(s, t[h, 0]))
  assert masked(lambda b, h, i, j: (i >= j) if (b == None) is False else i < j) is (QUERY >= KEY)     # noqa: E711

def test_equality_outside_a_function_is_identity() -> None:
  own = UOp.__eq__
  def raising(b:UOp, h:UOp, i:UOp, j:UOp) -> UOp: raise RuntimeError("own")
  with pytest.raises(ValueError, match="raised RuntimeError: own"): masked(raising)
  assert UOp.__eq__ is own and (QUERY == KEY) is False and (QUERY == QUERY) is True
  masked(lambda b, h, i, j: i == j)
  assert UOp.__eq__ is own
  with equality_as_uops():
    x = UOp.variable("x", 0, 9)
    assert (x*2 + x*3).simplify() is (x*5).simplify()                        # tinygrad itself compares UOps by identity
    assert {QUERY: 1, KEY: 2}[KEY] == 2 and (QUERY, KEY).index(QUERY) == 0
  assert UOp.__eq__ is own

# ***** when a function is called again *****

@pytest.fixture
def calls(monkeypatch:pytest.MonkeyPatch) -> list[str]:
  # Returns a list to which a function's kind is added whenever attn calls a score_mod or mask_mod to trace it.
  found: list[str] = []
  own = module.call_twice
  def counted(signature:Any, function:Any, tensors:Any) -> Traced:
    found.append(signature.name)
    return own(signature, function, tensors)
  monkeypatch.setattr(module, "call_twice", counted)
  return found

def window(width:Any) -> Callable[..., UOp]: return lambda b, h, i, j: i - j < width
def both(f:Callable[..., UOp], g:Callable[..., UOp]) -> Callable[..., UOp]: return lambda b, h, i, j: f(b, h, i, j) & g(b, h, i, j)
def nearer(width:Any) -> UOp: return committed((QUERY - KEY) < width)     # noqa: SIM300

def test_the_same_function_given_anew_is_not_called(calls:list[str]) -> None:
  first = masked(window(1001))
  assert len(calls) == 1 and masked(window(1001)) is first and len(calls) == 1
  masked(both(window(1001), window(7)))
  masked(both(window(1001), window(7)))
  masked(functools.partial(lambda n, b, h, i, j: i - j < n, 1002))
  masked(functools.partial(lambda n, b, h, i, j: i - j < n, 1002))
  assert len(calls) == 4       # two lambdas on two lines are two functions
  again = [masked(functools.partial(f, 1003)) for f in [lambda n, b, h, i, j: i - j < n] for _ in range(2)]
  assert again[0] is again[1] and len(calls) == 5
  trace(MASK_FUNCTION, window(1001), KINDS[:0])
  with pytest.raises(ValueError): trace(MASK_FUNCTION, window(1001), KINDS)     # another number of tensors

def test_another_closure_is_another_function() -> None:
  for width in (3, 4, 4.0, True, 2**40): assert masked(window(width)) is nearer(width), width
  assert masked(both(window(9), window(2))) is not masked(both(window(9), window(3)))     # two closures of one code
  assert masked(both(window(9), window(3))) is (nearer(9) & nearer(3))
  found = []
  for n in range(3): found.append(lambda b, h, i, j: i - j < n)
  assert [masked(f) for f in found] == [nearer(2)]*3
  default = [lambda b, h, i, j, n=n: i - j < n for n in range(3)]
  assert [masked(f) for f in default] == [nearer(n) for n in range(3)]

WIDTH = 11
SETTINGS = types.ModuleType("settings")
class Widths:
  least = 21
  @staticmethod
  def of_itself() -> int: return Widths.least
def from_a_global(b:UOp, h:UOp, i:UOp, j:UOp) -> UOp: return i - j < WIDTH
def through_a_global(b:UOp, h:UOp, i:UOp, j:UOp) -> UOp: return from_a_global(b, h, i, j) & (j >= 0)
def from_a_module(b:UOp, h:UOp, i:UOp, j:UOp) -> UOp: return i - j < SETTINGS.width
def from_a_class(b:UOp, h:UOp, i:UOp, j:UOp) -> UOp: return i - j < Widths.least
def from_itself(b:UOp, h:UOp, i:UOp, j:UOp, depth:int=0) -> UOp: return i - j < WIDTH if depth else from_itself(b, h, i, j, 1)
def from_an_attribute(b:UOp, h:UOp, i:UOp, j:UOp) -> UOp: return i - j < from_an_attribute.width      # type: ignore[attr-defined]
class Made:
  def __init__(self) -> None: self.least = WIDTH
class Widened(int):
  more: int
  def __new__(cls, more:int) -> Widened:
    x = super().__new__(cls, 1)
    x.more = more
    return x
LeastFirst, LeastLast = namedtuple("LeastFirst", "least most"), namedtuple("LeastLast", "most least")
def from_a_static_method(b:UOp, h:UOp, i:UOp, j:UOp) -> UOp: return i - j < Widths.of_itself()
def from_an_instance(b:UOp, h:UOp, i:UOp, j:UOp) -> UOp: return i - j < Made().least
def by_a_text(b:UOp, h:UOp, i:UOp, j:UOp, name:str="width") -> UOp: return i - j < getattr(SETTINGS, name)
def by_globals(b:UOp, h:UOp, i:UOp, j:UOp) -> UOp: return i - j < globals()["WIDTH"]
def through_two_modules(b:UOp, h:UOp, i:UOp, j:UOp) -> UOp: return i - j < SETTINGS.width_of_other()
TABLE_OF_WIDTHS = {0: 31}
def from_a_dict(b:UOp, h:UOp, i:UOp, j:UOp) -> UOp: return i - j < TABLE_OF_WIDTHS[0]

def test_a_changed_value_is_another_function(monkeypatch:pytest.MonkeyPatch) -> None:
  for width in (12, 13):
    monkeypatch.setitem(globals(), "WIDTH", width)
    monkeypatch.setattr(SETTINGS, "width", width, raising=False)
    monkeypatch.setattr(Widths, "least", width)
    monkeypatch.setattr(from_an_attribute, "width", width, raising=False)
    monkeypatch.setitem(TABLE_OF_WIDTHS, 0, width)
    monkeypatch.setattr(SETTINGS, "width_of_other", lambda: SETTINGS.width, raising=False)
    for function in (from_a_global, from_a_module, from_a_class, from_itself, from_an_attribute, from_a_dict, from_a_static_method, from_an_instance,
                     by_a_text, by_globals, through_two_modules):
      assert masked(function) is nearer(width), function
    assert masked(through_a_global) is (nearer(width) & committed(KEY >= 0))

def test_values_that_are_equal_but_read_by_other_names() -> None:
  def least(x:Any) -> Callable[..., UOp]: return lambda b, h, i, j: i - j < x.least
  def more(x:Any) -> Callable[..., UOp]: return lambda b, h, i, j: i - j < x.more
  assert [masked(least(x)) for x in (LeastFirst(3, 4), LeastLast(3, 4))] == [nearer(3), nearer(4)]
  assert [masked(more(Widened(n))) for n in (5, 6)] == [nearer(5), nearer(6)]

def test_function_objects() -> None:
  def factor(function:Any) -> Any:
    found = trace(SCORE_FUNCTION, function, ())
    assert found is not None and found.value.op is Ops.MUL and found.value.src[0] is SCORE
    return found.value.src[1].val
  scaled = Scaled(2.0)
  assert factor(scaled) == 2.0
  scaled.factor = 3.0
  assert factor(scaled) == factor(scaled.__call__) == 3.0
  assert factor(functools.partial(lambda x, s, b, h, i, j: s*x, 4.0)) == 4.0

def test_an_identity_is_no_function() -> None:
  assert trace(SCORE_FUNCTION, lambda s, b, h, i, j: s, ()) is None
  assert trace(MASK_FUNCTION, lambda b, h, i, j: UOp.const(True, dtypes.bool), ()) is None
  assert scored(lambda s, b, h, i, j, t: UOp.const(1.0)) is UOp.const(1.0, dtypes.float)

# ***** when a kernel is compiled again *****

def test_the_same_function_and_other_tensors_compile_nothing(monkeypatch:pytest.MonkeyPatch, calls:list[str]) -> None:
  compiled:list[str] = []
  own = UOpCompiler.compile
  def counted(self:UOpCompiler, src:str) -> bytes:
    compiled.append(src)
    return own(self, src)
  monkeypatch.setattr(UOpCompiler, "compile", counted)
  def run(width:int, of:float) -> np.ndarray:
    q, table = Tensor(np.ones((1, 2, 5, 32), np.float16), device="EMU").realize(), Tensor(np.full((2, 5), of, np.float32), device="EMU").realize()
    o = attn.attention(q, q, q*1.0, score_mod=lambda s, b, h, i, j, t: s + t[h, j], mask_mod=lambda b, h, i, j, t: (i - j < width) & (t[h, j] > 0),
                       mod_tensors=(table,))
    return o.numpy()
  with emulated("gfx942"):
    first = run(11, 1.0)
    assert (first == 1).all()
    compiled.clear()
    calls.clear()
    assert (run(11, -1.0) == 0).all() and (run(11, 2.0) == 1).all()
    assert not compiled and not calls
    run(3, 1.0)
    assert len(compiled) == 1 and len(calls) == 1
