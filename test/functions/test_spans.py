"""Tests of attn/functions/spans.py, which derives whether a mask is true for all pairs of a tile, or for none, from the lowest and the highest value
of the mask's parts. The derived answer must agree with the mask, which numpy computes for each pair of the tile."""
from __future__ import annotations
import itertools
from collections.abc import Callable
from typing import Any
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from attn.functions.spans import LEAST_INT, MOST_INT, ORDERED, Extremes, may_be_whole, one_sided_expressions, span_of
from attn.functions.symbols import KEY, QUERY, depends, number_of_tensor, tensor_symbol
from attn.functions.trace import functions_of
from attn.reference import Array
from attn.tinygrad_compat import Ops, UOp, dtypes

LENGTH, BLOCK = 48, 16
GENERATOR = np.random.default_rng(1)
TENSORS: dict[str, Array] = {
  "sorted": np.sort(GENERATOR.integers(-3, 3, LENGTH)).astype(np.int32), "random": GENERATOR.integers(-2, 3, LENGTH).astype(np.int32),
  "same": np.full(LENGTH, 7, np.int32), "blocks": (np.arange(LENGTH)//BLOCK).astype(np.int32), "extreme": np.where(np.arange(LENGTH) < 20, MOST_INT,
  LEAST_INT).astype(np.int32), "small": np.arange(LENGTH).astype(np.uint8), "flags": np.arange(LENGTH) % 40 < 25,
  "floats": np.where(np.arange(LENGTH) % 30 == 5, np.nan, np.arange(LENGTH)//10).astype(np.float32),
  "ends": np.where(np.arange(LENGTH) < 20, np.inf, -np.inf).astype(np.float32)}
Mask = Callable[..., Any]

# ***** numpy's value of a traced mask, with the arithmetic of int32 *****

RULES: dict[Ops, Callable[..., Any]] = {
  Ops.ADD: np.add, Ops.MUL: np.multiply, Ops.MAX: np.maximum, Ops.XOR: np.bitwise_xor, Ops.AND: np.bitwise_and, Ops.OR: np.bitwise_or,
  Ops.CMPLT: np.less, Ops.CMPNE: np.not_equal, Ops.CMPEQ: np.equal, Ops.WHERE: np.where, Ops.FLOORDIV: np.floor_divide, Ops.FLOORMOD: np.mod}
NUMPY = {dtypes.int: np.int32, dtypes.bool: np.bool_, dtypes.float: np.float32, dtypes.uchar: np.uint8}

def value(u:UOp, tensors:list[Array], i:Array, j:Array) -> Array:
  # Computes a mask function, given as the UOp `u`, in numpy for queries with the indices i and keys with the indices j.
  found: dict[UOp, Array] = {QUERY: i, KEY: j}
  for x in u.toposort():
    if x in found or x._shape != () or x.op is Ops.STACK: continue
    if x.op is Ops.CONST: found[x] = np.asarray(x.val, NUMPY.get(x.dtype, np.int32))
    elif x.op is Ops.CAST: found[x] = found[x.src[0]].astype(NUMPY[x.dtype])
    elif x.op is Ops.INDEX: found[x] = tensors[number_of_tensor(x)][found[x.src[1]]]
    else: found[x] = np.asarray(RULES[x.op](*(found[s] for s in x.src))).astype(NUMPY.get(x.dtype, np.int32))
  return found[u]

def limits_on(mask:UOp, tensors:list[Array], i:Array, j:Array) -> tuple[bool, bool]:
  # Returns what attn derives about a mask on queries i and keys j: whether all pairs are visible, and whether some may be.
  # The lowest and highest values of the mask's parts come from numpy.
  def limits(u:UOp) -> Extremes:
    x = value(u, tensors, i, j)
    low, high = (-np.inf, np.inf) if np.issubdtype(x.dtype, np.floating) and np.isnan(x).any() else (x.min(), x.max())
    return Extremes(*(UOp.const(n.item() if isinstance(n, np.generic) else n, ORDERED.get(u.dtype, dtypes.bool)) for n in (low, high)))
  found = [x.simplify() for x in span_of(mask, limits)]
  assert all(x.op is Ops.CONST for x in found), found
  return bool(found[0].val), bool(found[1].val)

BLOCKS = list(itertools.product(range(0, LENGTH, BLOCK), repeat=2))

def known(function:Mask, *names:str) -> list[tuple[bool, bool]]:
  # Returns what attn derives about a mask function for each test block of queries and keys, and fails if an answer is wrong.
  # An answer is a pair of bools: whether the mask is true for all pairs of the block, and whether it may be true for any. `names` selects the tensors
  # that the mask reads.
  tensors, found = [TENSORS[name] for name in names], []
  traced = functions_of(None, function, tuple((x.shape, x.dtype.name) for x in tensors)).get("mask_mod")
  if traced is None: return []
  for first_i, first_j in BLOCKS:
    i, j = (np.arange(first, first + BLOCK, dtype=np.int32) for first in (first_i, first_j))
    with np.errstate(over="ignore"):
      always, possibly = limits_on(traced.value, tensors, i[:, None], j[None])
      want = np.broadcast_to(value(traced.value, tensors, i[:, None], j[None]), (BLOCK, BLOCK))
    assert not always or want.all(), (first_i, first_j)
    assert possibly or not want.any(), (first_i, first_j)
    found.append((bool(always), bool(possibly)))
  return found

# masks, the tensors that they read, and whether spans decide all blocks, some or none
DECIDED: dict[str, tuple[Mask, tuple[str, ...], str]] = {
  "same documents": (lambda b, h, i, j, d: d[i].eq(d[j]), ("blocks",), "all"),
  "other documents": (lambda b, h, i, j, d: d[i].ne(d[j]), ("blocks",), "all"),
  "documents of any length": (lambda b, h, i, j, d: d[i].eq(d[j]), ("sorted",), "some"),
  "random documents": (lambda b, h, i, j, d: d[i].eq(d[j]), ("random",), "none"),
  "a document beside another": (lambda b, h, i, j, d: (d[i].cast(dtypes.int) - d[j].cast(dtypes.int)).abs() < 2, ("small",), "some"),
  "no document": (lambda b, h, i, j, d: d[i].eq(d[j] + 1), ("same",), "all"),
  "two tensors": (lambda b, h, i, j, d, e: d[i].eq(e[j]) | (d[i] < e[j]), ("sorted", "blocks"), "some"),
  "part of the ids": (lambda b, h, i, j, d: (d[i]//2).eq(d[j]//2) & (d[j] >= 0), ("sorted",), "some"),
  "ids that overflow": (lambda b, h, i, j, d: d[i] + 1 < d[j], ("extreme",), "some"),
  "a difference that overflows": (lambda b, h, i, j, d: d[i] - d[j] < 0, ("extreme",), "none"),
  "flags of keys": (lambda b, h, i, j, d, f: f[j] & d[i].eq(d[j]), ("blocks", "flags"), "some"),
  "flags that differ": (lambda b, h, i, j, f: f[i].ne(f[j]), ("flags",), "some"),
  "numbers that are not there": (lambda b, h, i, j, x: x[i] < x[j], ("floats",), "none"),
  "not less": (lambda b, h, i, j, x: (x[i] < x[j]).logical_not(), ("ends",), "some"),
  "squares": (lambda b, h, i, j: ((i//16)%2).eq((j//16)%2), (), "all"),
  "a neighbourhood": (lambda b, h, i, j: (i//8%3 - j//8%3).abs()*2 <= 1, (), "none"),
  "a choice": (lambda b, h, i, j, d: d[i].eq(d[j]).where((i//16).eq(j//16), (i%5).eq(j%3)), ("blocks",), "some"),
  "a chosen number": (lambda b, h, i, j, d: d[i].eq(d[j]).where(d[i], i - j) < 1, ("blocks",), "some")}

@pytest.mark.parametrize("name", DECIDED)
def test_spans_are_true_and_decide(name:str) -> None:
  function, names, want = DECIDED[name]
  found = known(function, *names)
  decided = [always or not possibly for always, possibly in found]
  assert found and {"all": all(decided), "some": any(decided), "none": not any(decided)}[want], decided

def test_parts_depend_on_one_side() -> None:
  # attn finds the parts of a mask that depend on the query alone or on the key alone. These parts are as large as possible.
  d = tensor_symbol(0, (8,), "int32")
  one, two = d[QUERY]//2 + 1, (d[KEY]*2).maximum(3)
  assert one_sided_expressions(one.eq(two) & (KEY < 5)) == [one, two, KEY < 5]
  assert not [u for u in one_sided_expressions((one + two) % 3 < 2) if depends(u, QUERY) and depends(u, KEY)]

# ***** random masks *****

NAMES = ("sorted", "random", "blocks", "small", "flags", "floats", "extreme")
Expression = Callable[..., Any]

def number(names:tuple[str, ...]) -> st.SearchStrategy[Expression]:
  def of(leaf:int, sign:int, plus:int, over:int) -> Expression:
    def made(i:Any, j:Any, *t:Any) -> Any:
      x = (i, j, t[0][i], t[0][j], t[1][i], t[1][j], t[2][j].cast(dtypes.int), i//5, j%7)[leaf]
      return (x*sign + plus)//over if over > 1 else x*sign + plus
    return made
  return st.builds(of, st.integers(0, 8), st.sampled_from((1, -1, 3)), st.integers(-5, 5), st.sampled_from((1, 2, 4)))

def joined(x:Expression, y:Expression, how:int) -> Expression:
  def made(*a:Any) -> Any:
    p, q = x(*a), y(*a)
    return (p + q, p.maximum(q), p - q, (p < q).where(p, q))[how]
  return made

def compared(x:Expression, y:Expression, how:int) -> Expression:
  def made(*a:Any) -> Any:
    p, q = x(*a), y(*a)
    return (p < q, p.eq(q), p.ne(q), p <= q)[how]
  return made

def combined(x:Expression, y:Expression, how:int) -> Expression:
  def made(*a:Any) -> Any:
    p, q = x(*a), y(*a)
    return (p & q, p | q, p ^ q, p.where(q, q.logical_not()), p.logical_not())[how]
  return made

numbers = st.recursive(number(NAMES), lambda x: st.builds(joined, x, x, st.integers(0, 3)), max_leaves=4)
masks = st.recursive(st.builds(compared, numbers, numbers, st.integers(0, 3)), lambda x: st.builds(combined, x, x, st.integers(0, 4)), max_leaves=4)

@settings(max_examples=60, deadline=None, derandomize=True)
@given(mask=masks, extreme=st.booleans())
def test_spans_of_random_masks_are_true(mask:Expression, extreme:bool) -> None:
  known(lambda b, h, i, j, *t: mask(i, j, *t), "extreme" if extreme else "sorted", "random", "small")

@pytest.mark.parametrize("mask, whole", (
  (lambda b, h, i, j, t: t[i].eq(t[j]), True), (lambda b, h, i, j, t: (i % 128 - j % 128).abs() <= 6, True),
  (lambda b, h, i, j, t: t[i].cast(dtypes.float) < 2.5, True), (lambda b, h, i, j, t: ((i - j) % 4).eq(0), False),
  (lambda b, h, i, j, t: t[i].eq(t[j]) & ((i - j) % 4).eq(0), False)))
def test_masks_that_may_hide_nothing_of_a_tile(mask:Mask, whole:bool) -> None:
  # Lowest and highest values of a mask's parts prove nothing about a remainder that depends on both query and key.
  traced = functions_of(None, mask, (((64,), "int32"),))["mask_mod"]
  assert may_be_whole(traced.value) is whole
