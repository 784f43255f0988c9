"""Tests of random score_mods and mask_mods, forward and backward, on five chips with a matrix unit and one without, against float64. The expected
values come from the function's UOps, computed in numpy, and the expected derivatives from attn/functions/derivative.py, which other tests check."""
from __future__ import annotations
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
import numpy as np
import pytest
import attn
from attn.functions.derivative import derivative
from attn.functions.symbols import BATCH, KEY, QUERY, QUERY_HEAD, SCORE, elements_of, indices_of, is_element, number_of_tensor, tensor_of
from attn.functions.trace import MASK_FUNCTION, SCORE_FUNCTION, trace
from attn.tinygrad_compat import Ops, Tensor, UOp, dtypes
from api_cases import emulated
from cases import array, tensor

Array = np.ndarray
Given = Mapping[UOp, Any]

# ***** values in float64 *****

OPERATIONS: dict[Ops, Callable[..., Any]] = {
  Ops.ADD: np.add, Ops.MUL: np.multiply, Ops.MAX: np.maximum, Ops.EXP2: np.exp2, Ops.LOG2: np.log2, Ops.SIN: np.sin, Ops.SQRT: np.sqrt,
  Ops.RECIPROCAL: np.reciprocal, Ops.TRUNC: np.trunc, Ops.CMPLT: np.less, Ops.CMPNE: np.not_equal, Ops.WHERE: np.where, Ops.AND: np.bitwise_and,
  Ops.OR: np.bitwise_or, Ops.XOR: np.bitwise_xor, Ops.FLOORDIV: np.floor_divide, Ops.FLOORMOD: np.mod}

def as_dtype(x:Any, u:UOp) -> Any:
  return np.asarray(x).astype(np.float64 if dtypes.is_float(u.dtype) else bool if u.dtype == dtypes.bool else np.int64)

def computed(value:UOp, places:Given, tensors:list[Array]) -> Array:
  # Computes a score_mod or mask_mod, given as the UOp `value`, in numpy for all pairs of a query and a key.
  # `places` has the values of the function's symbols, such as the indices.
  found = {u: as_dtype(x, u) for u, x in places.items()}
  with np.errstate(all="ignore"):
    for u in value.toposort(lambda u: u not in places):
      if u in found or u._shape != () or u.op is Ops.STACK: continue
      if is_element(u): found[u] = as_dtype(tensors[number_of_tensor(u)].reshape(tensor_of(u).shape)[element_at(u, found)], u)
      elif u.op is Ops.CONST: found[u] = as_dtype(u.val, u)
      elif u.op is Ops.CAST: found[u] = as_dtype(found[u.src[0]], u)
      else: found[u] = as_dtype(OPERATIONS[u.op](*(found[x] for x in u.src)), u)
  return found[value]

def element_at(u:UOp, found:dict[UOp, Any]) -> tuple[Array, ...]:
  # Returns which element of a tensor the UOp `u` reads, for each pair of a query and a key: indices for each axis.
  # `found` has the values of all UOps. For a pair that the mask hides, an index may lie outside of its axis; it is moved to the nearest index in the
  # axis.
  return tuple(np.clip(found[x], 0, size - 1) for x, size in zip(indices_of(u), tensor_of(u).shape))

# ***** one call *****

EPSILON = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-20}

@dataclass(frozen=True)
class Case:
  # One random call of attention: its inputs, rounded to their dtypes, with a score_mod or mask_mod or both.
  dtype: str
  q: Array
  k: Array
  v: Array
  do: Array
  tensors: list[Array]
  score: Callable[..., UOp]|None
  mask: Callable[..., UOp]|None

  @functools.cached_property
  def kinds(self) -> tuple[tuple[tuple[int, ...], str], ...]: return tuple((x.shape, str(x.dtype)) for x in self.tensors)
  @functools.cached_property
  def value(self) -> UOp:
    # The score_mod as a UOp, or the symbol of the score if there is no score_mod.
    found = None if self.score is None else trace(SCORE_FUNCTION, self.score, self.kinds)
    return SCORE if found is None else found.value
  @functools.cached_property
  def elements(self) -> dict[int, list[UOp]]:
    # The elements of float tensors that the score_mod reads, as UOps: a list for each tensor, by the tensor's number.
    of_floats = [u for u in elements_of(self.value) if dtypes.is_float(u.dtype)]
    return {n: [u for u in of_floats if number_of_tensor(u) == n] for n in sorted({number_of_tensor(u) for u in of_floats})}

  def run(self, arch:str, kernel:str="") -> list[Array]:
    # Computes o and the gradients of q, k and v and of the float tensors that the score_mod reads, on the emulator of `arch`.
    with emulated(arch, kernel):
      q, k, v, do = (tensor(x, self.dtype).realize() for x in (self.q, self.k, self.v, self.do))
      given = [Tensor(x, device="EMU").realize() for x in self.tensors]
      o = attn.attention(q, k, v, score_mod=self.score, mask_mod=self.mask, mod_tensors=given)
      return [array(x) for x in (o, *o.gradient(q, k, v, *[given[n] for n in self.elements], gradient=do))]

  def check(self, arch:str, kernel:str="") -> None:
    names = ("o", "dq", "dk", "dv", *[f"gradient of mod_tensors[{n}]" for n in self.elements])
    for name, got, (expected, most) in zip(names, self.run(arch, kernel), self.expected(), strict=True):
      assert np.isfinite(expected).all() and np.isfinite(got).all(), name
      worst = np.max(np.abs(got - expected)/most)
      assert worst <= 1, f"{name} on {arch}: {worst} of what is allowed"

  def expected(self) -> list[tuple[Array, Array]]:
    # Returns o and the gradients in float64, as pairs (values, largest errors that the test allows).
    # These errors follow from errors of single steps: P, dS and each result may be off by 4 times the roundoff of the dtype, and a score by 2^-17
    # times (1 + the sum of the magnitudes of its products q k). For a tensor that the score_mod reads, the allowed errors of dS are summed like dS
    # itself.
    q, k, v, do = (x.astype(np.float64) for x in (self.q, self.k, self.v, self.do))
    (B, H, Sq, D), (Hkv, Sk) = q.shape, k.shape[1:3]
    scale, e = D**-.5, 4*EPSILON[self.dtype]
    k, v = (np.repeat(x, H//Hkv, 1) for x in (k, v))
    s = q@k.swapaxes(-1, -2)*scale
    places = {SCORE: s, BATCH: np.arange(B)[:, None, None, None], QUERY_HEAD: np.arange(H)[:, None, None],
              QUERY: (np.arange(Sq) + Sk - Sq)[:, None], KEY: np.arange(Sk)}
    def at_pairs(value:UOp) -> Array: return np.broadcast_to(computed(value, places, self.tensors), s.shape)
    x, slope, noise = at_pairs(self.value), at_pairs(derivative(self.value, SCORE)), 2.0**-17*(1 + np.abs(q)@np.abs(k).swapaxes(-1, -2)*scale)
    seen = np.ones(s.shape, bool)
    if self.mask is not None and (shown := trace(MASK_FUNCTION, self.mask, self.kinds)) is not None: seen = at_pairs(shown.value)
    x = np.where(seen, x, -np.inf)
    noise = np.where(seen & np.isfinite(x), noise*np.abs(slope) + 2.0**-17*np.abs(np.where(np.isfinite(x), x, 0)), 0)
    m = x.max(-1, keepdims=True)
    p = np.exp(x - np.where(m == -np.inf, 0, m))
    total = p.sum(-1, keepdims=True)
    p = p/np.where(total == 0, 1, total)
    o, dp = p@v, do@v.swapaxes(-1, -2)
    delta = (do*o).sum(-1, keepdims=True)
    # relative errors of P, including the error of the sum of its row
    wrong = e + noise + (p*noise).sum(-1, keepdims=True)
    wrong_o = (p*wrong)@np.abs(v) + e*np.abs(o)
    wrong_delta = (np.abs(do)*wrong_o).sum(-1, keepdims=True)
    apart = p*np.abs(dp - delta)*(wrong + e + 2.0**-12) + p*(wrong_delta + e*np.abs(do)@np.abs(v).swapaxes(-1, -2))
    def of_slope(slope:Array) -> tuple[Array, Array]:
      # Returns P*(dP - delta)*slope and its largest error, for a derivative `slope` of the score_mod.
      slope = np.where(p > 0, slope, 0)
      return p*(dp - delta)*slope, apart*np.abs(slope)
    ds, wrong_ds = of_slope(slope)
    of_tensors = []
    for n, elements in self.elements.items():
      sums = np.zeros((2, *self.tensors[n].shape))
      for u in elements:
        places_of_element = tuple(np.clip(at_pairs(index), 0, size - 1) for index, size in zip(indices_of(u), self.tensors[n].shape))
        for total, part in zip(sums, of_slope(at_pairs(derivative(self.value, u)))): np.add.at(total, places_of_element, part)
      of_tensors.append((sums[0], sums[1] + EPSILON[str(self.tensors[n].dtype)]*np.abs(sums[0])))
    def of_group(a:Array) -> Array: return a.reshape(B, Hkv, H//Hkv, *a.shape[2:]).sum(2)
    dv, wrong_dv = of_group(p.swapaxes(-1, -2)@do), of_group((p*wrong).swapaxes(-1, -2)@np.abs(do))
    dk, wrong_dk = of_group(scale*ds.swapaxes(-1, -2)@q), of_group(scale*wrong_ds.swapaxes(-1, -2)@np.abs(q))
    dq, wrong_dq = scale*ds@k, scale*wrong_ds@np.abs(k)
    return [(a, w + e*np.abs(a) + 2.0**-17) for a, w in ((o, wrong_o), (dq, wrong_dq), (dk, wrong_dk), (dv, wrong_dv), *of_tensors)]

# ***** random functions *****

@dataclass
class Draw:
  # Draws random score_mods and mask_mods: Python functions of (score, b, h, i, j) and four tensors.
  rng: np.random.Generator
  B: int
  H: int
  Sq: int
  Sk: int
  def one_of(self, *choices:Any) -> Any: return choices[self.rng.integers(len(choices))]
  def number(self) -> float: return float(np.float32(self.rng.uniform(-1, 1)))
  def axes(self) -> list[str]: return [self.one_of("b", "h", "i", "j", "i - j", "0") for _ in range(self.rng.integers(1, 4))]

  def tensors(self) -> list[tuple[list[str], Array]]:
    # Tensors of four dtypes, each with the names of the indices that select an element, such as "h" or "i - j".
    sizes = {"b": self.B, "h": self.H, "i": self.Sq + self.Sk, "j": self.Sk, "i - j": self.Sq + 2*self.Sk, "0": 3}
    axes = [self.axes() for _ in range(4)]
    shapes = [tuple(sizes[x] for x in each) for each in axes]
    made = [self.rng.standard_normal(shapes[0]).astype(np.float32), self.rng.standard_normal(shapes[1]).astype(np.float16),
            self.rng.integers(-3, 4, shapes[2]).astype(np.int32), self.rng.random(shapes[3]) < 0.7]
    return list(zip(axes, made))

  def element(self, n:int, axes:list[str]) -> Callable[..., UOp]:
    # Returns a function (score, b, h, i, j, *tensors) that reads an element of tensor number n.
    # `axes` names the index along each axis, such as "h" or "i - j".
    def of(s:Any, b:UOp, h:UOp, i:UOp, j:UOp, *t:UOp) -> UOp:
      places = {"b": b, "h": h, "i": i + self.Sq, "j": j, "i - j": i - j + self.Sq + self.Sk, "0": UOp.const(2)}
      return t[n][tuple(places[x] for x in axes)]
    return of

  def condition(self, elements:list[Callable[..., UOp]], with_score:bool, depth:int=0) -> Callable[..., UOp]:
    n, width, least = int(self.rng.integers(2, 7)), int(self.rng.integers(3, 40)), self.number()
    choices: list[Callable[..., UOp]] = [
      lambda s, b, h, i, j, *t: i >= j, lambda s, b, h, i, j, *t: (i - j) % n < 2, lambda s, b, h, i, j, *t: i//n == j//n,
      lambda s, b, h, i, j, *t: (i - j).abs() < width, lambda s, b, h, i, j, *t: (h == 1) | (j < width), elements[3],
      lambda *a: elements[2](*a) > 0, lambda s, b, h, i, j, *t: (j + b) % n != 1]
    if with_score: choices += [lambda s, *a: s > least, lambda *a: elements[0](*a) < 0.3]
    if depth < 2 and self.rng.random() < 0.6:
      x, y = (self.condition(elements, with_score, depth + 1) for _ in range(2))
      return self.one_of(lambda *a: x(*a) & y(*a), lambda *a: x(*a) | y(*a), lambda *a: x(*a) | ~y(*a))
    return self.one_of(*choices)

  def factor(self, elements:list[Callable[..., UOp]]) -> Callable[..., UOp]:
    # Returns a random function (score, b, h, i, j, *tensors) whose value does not depend on the score.
    # `elements` has for each of the four tensors a function that reads an element.
    c = self.number()
    return self.one_of(elements[0], lambda *a: elements[1](*a).cast(dtypes.float), lambda *a: elements[2](*a).cast(dtypes.float)*c,
                       lambda s, b, h, i, j, *t: (i - j).cast(dtypes.float)*(c/32), lambda s, b, h, i, j, *t: (h + 2*b).cast(dtypes.float)*c + 0.5,
                       lambda *a: elements[0](*a).sin()*c, lambda *a: elements[3](*a).where(c, elements[0](*a)), lambda s, b, h, i, j, *t:
                       1/((i - j).abs() + 1).cast(dtypes.float), lambda *a: UOp.const(c, dtypes.float))

  def score(self, elements:list[Callable[..., UOp]], depth:int=0) -> Callable[..., UOp]:
    if depth == 3: return self.one_of(lambda s, *a: s, lambda s, *a: s*0.5)
    x, y = self.score(elements, depth + 1), self.score(elements, depth + 2 if depth < 2 else 3)
    e, f, of, c = self.factor(elements), self.factor(elements), self.condition(elements, True, 1), abs(self.number()) + 0.5
    hidden = [lambda *a: of(*a).where(x(*a), -float("inf"))]*(depth == 0)      # inside another operation, -inf could make a NaN
    return self.one_of(*hidden, lambda *a: x(*a) + e(*a), lambda *a: x(*a)*e(*a) + f(*a), lambda *a: (x(*a)/c).tanh()*c,
                       lambda *a: of(*a).where(x(*a), y(*a)),
                       lambda *a: of(*a).where(x(*a) + e(*a), -1.5), lambda *a: x(*a).maximum(e(*a)), lambda *a: x(*a).abs()*c - y(*a)*0.5,
                       lambda *a: x(*a).sigmoid()*e(*a) + y(*a), lambda *a: (x(*a).tanh()*0.5).exp()*e(*a) + y(*a),
                       lambda *a: x(*a).minimum(y(*a) + c),
                       lambda *a: x(*a)*x(*a)*0.125 + e(*a))

UNITS = ("gfx942", "gfx1100", "gfx950", "sm_80", "sm_90", "gfx1030")     # gfx1030 has no matrix unit: tiled

def rounded(x:Array, dtype:str) -> Array:
  # Rounds numbers to `dtype`, and returns them as float32.
  # For bfloat16 the lower 16 bits of float32 are cut off.
  if dtype == "bfloat16": return (x.astype(np.float32).view(np.uint32) & 0xffff0000).view(np.float32)
  return x.astype(dtype).astype(np.float32)

def random_case(n:int) -> Case:
  rng = np.random.default_rng(n)
  B, Hkv = int(rng.integers(1, 3)), int(rng.integers(1, 3))
  Sq, Sk, D, H = int(rng.integers(17, 71)), int(rng.integers(17, 91)), int(rng.choice([32, 64])), 2
  dtype = ("float16", "bfloat16", "float32")[n//len(UNITS) % 3]
  draw = Draw(rng, B, H, Sq, Sk)
  given = draw.tensors()
  elements = [draw.element(m, axes) for m, (axes, _) in enumerate(given)]
  mask, score = draw.condition(elements, False), draw.score(elements)
  q, k, v, do = (rounded(rng.standard_normal(shape), dtype) for shape in ((B, H, Sq, D), (B, Hkv, Sk, D), (B, Hkv, Sk, D), (B, H, Sq, D)))
  return Case(dtype, q, k, v, do, [x for _, x in given], score if n % 4 != 3 else None, (lambda *a: mask(None, *a)) if n % 4 else None)

BY_DEFAULT = (0, 14, 28)

@pytest.mark.sample(2)
@pytest.mark.usefixtures("not_unrolled")
@pytest.mark.parametrize("n", [pytest.param(n, marks=() if n in BY_DEFAULT else pytest.mark.thorough) for n in range(40)])
def test_a_random_function(n:int) -> None:
  random_case(n).check(UNITS[n % len(UNITS)])
