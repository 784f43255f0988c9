"""Tests of how attn splits a mask function into an interval of keys for each query (or of queries for each key) and a remaining condition: together
they must give the mask for each pair of a query and a key."""
from __future__ import annotations
import functools, itertools, operator
from collections.abc import Callable
from typing import Any
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from attn.functions.bounds import Bounds, mask_bounds
from attn.functions.interval import Interval
from attn.functions.symbols import FAR, QUERY_HEAD, KEY, QUERY, tensor_symbol
from attn.reference import Array
from attn.tinygrad_compat import Ops, Tensor, UOp, dtypes

# The expected mask comes from a plain Python function, or from the mask's UOps, computed in numpy.

I, J = np.arange(-20, 61)[:, None], np.arange(61)[None, :]
TABLES = {0: np.array([3, 1, 4, 1, 5, 9, 2, 6]), 1: np.array([True, False, False, True, True, False, True, False])}
WORDS, FLAGS = tensor_symbol(0, (8,), "int32"), tensor_symbol(1, (8,), "bool")

# ***** numpy's value of a traced function *****

VALUES: dict[Ops, Callable[..., Any]] = {
  Ops.ADD: np.add, Ops.MUL: np.multiply, Ops.MAX: np.maximum, Ops.XOR: np.bitwise_xor, Ops.AND: np.bitwise_and, Ops.OR: np.bitwise_or,
  Ops.CMPLT: np.less, Ops.CMPNE: np.not_equal, Ops.CMPEQ: np.equal, Ops.WHERE: np.where, Ops.FLOORDIV: np.floor_divide, Ops.FLOORMOD: np.mod,
  Ops.SHL: np.left_shift, Ops.SHR: np.right_shift, Ops.CDIV: lambda x, y: np.trunc(x/y).astype(np.int64)}

def value(u:UOp, i:Array, j:Array) -> Array:
  # Computes a mask function, given as the UOp `u`, in numpy for queries with the indices i and keys with the indices j, for head 2.
  found: dict[UOp, Array] = {QUERY: i, KEY: j, QUERY_HEAD: np.array(2)}
  for x in u.toposort():
    if x in found: continue
    if x.op is Ops.CONST: found[x] = np.array(x.arg)
    elif x.op is Ops.CAST: found[x] = found[x.src[0]].astype(np.int64)
    elif x.op is Ops.INDEX: found[x] = TABLES[0 if x.src[0] is WORDS else 1][found[x.src[1]]]
    elif x.op in VALUES: found[x] = VALUES[x.op](*(found[v] for v in x.src))
  return found[u]

# ***** what is checked of each mask *****

def columns_shown(interval:Callable[[int], Interval], rows:Array, columns:Array) -> Array:
  # Returns a bool table (rows, columns): whether a column lies in the interval of a row.
  found = [interval(int(row)) for row in rows]
  # Neither end of the interval may decrease from one row to the next.
  for numbers in zip(*found):
    assert all(x is None for x in numbers) or all(x <= y for x, y in itertools.pairwise(numbers)), numbers
  return np.stack([(columns >= (-FAR if first is None else first)) & (columns <= (FAR if last is None else last)) for first, last in found])

def check_split(mask:UOp, want:Array) -> Bounds:
  # Checks that the intervals and the remaining condition into which attn splits a mask give the mask `want`; returns the split mask.
  found = mask_bounds(mask)
  rest = np.broadcast_to(True if found.rest is None else value(found.rest, I, J), want.shape)
  np.testing.assert_array_equal(columns_shown(found.keys_of, I[:, 0], J[0]) & rest, want)
  np.testing.assert_array_equal(columns_shown(found.queries_of, J[0], I[:, 0]).T & rest, want)
  return found

# ***** masks with names *****

ANY_INT = UOp.const(1).dtype
i, j = QUERY, KEY
Plain = Callable[[Any, Any], Any]
EDGES: dict[str, tuple[UOp, Plain]] = {     # masks that are intervals
  "all": (i >= i, lambda i, j: (i == i) & (j == j)),
  "none": (i < i, lambda i, j: (i != i) & (j == j)),
  "causal": (i >= j, lambda i, j: j <= i),
  "strictly causal": (i > j, lambda i, j: j < i),
  "anti-causal": ((i >= j).logical_not(), lambda i, j: j > i),
  "diagonal": (i.eq(j), lambda i, j: i == j),
  "window": ((i >= j) & (i - j < 5), lambda i, j: (j <= i) & (j > i - 5)),
  "window by a product": ((i >= j)*(i - j < 5), lambda i, j: (j <= i) & (j > i - 5)),
  "distance": ((i - j).abs() <= 6, lambda i, j: abs(i - j) <= 6),
  "double distance": ((i*2 - j*2).abs().simplify() < 7, lambda i, j: abs(i - j) <= 3),
  "prefix": ((i >= j) | (j < 7), lambda i, j: (j <= i) | (j < 7)),
  "window and prefix": (((i >= j) | (j < 7)) & (i - j < 12) & (j < 50), lambda i, j: ((j <= i) | (j < 7)) & (i - j < 12) & (j < 50)),
  "clipped": ((i - j).clip(-4, 4) < 2, lambda i, j: i - j < 2),
  "chunks": ((i//4).eq(j//4), lambda i, j: i//4 == j//4),
  "chunks by shifts": ((i >> 2).eq(j >> 2), lambda i, j: i//4 == j//4),
  "chunks by remainders": ((i - i % 4 <= j) & (j < i - i % 4 + (i.const_like(1) << 2)), lambda i, j: i//4 == j//4),
  "causal chunks": ((i//5).eq(j//5) & (i >= j), lambda i, j: (i//5 == j//5) & (j <= i)),
  "previous chunk": ((j//4 - i//4).abs() <= 1, lambda i, j: abs(i//4 - j//4) <= 1),
  "other chunks": (i//3 >= j//5 + 1, lambda i, j: i//3 > j//5),
  "compressed": (i >= j*4 + 3, lambda i, j: j*4 + 3 <= i),
  "rounded up": (-(-i//4) >= j, lambda i, j: -(-i//4) >= j),
  "rounded to 0": (j.alu(Ops.CDIV, j.const_like(3)) <= i, lambda i, j: j//3 <= i),
  "slope": (i*3 >= j*7 - 2, lambda i, j: i*3 >= j*7 - 2),
  "divided distance": ((i - j)//3 < 2, lambda i, j: (i - j)//3 < 2),
  "later queries": (((i >= 3) | (j <= i - 5)) & (i < 20), lambda i, j: ((i >= 3) | (j <= i - 5)) & (i < 20)),
  "both from 3 on": (i.minimum(j) >= 3, lambda i, j: (i >= 3) & (j >= 3)),
  "one from 3 on": (i.maximum(-j) >= 3, lambda i, j: (i >= 3) & (j >= 0)),
  "chosen": ((i >= 9).where(i >= j, i >= j + 4), lambda i, j: ((i >= 9) & (j <= i)) | (j <= i - 4)),
  "not beyond a prefix": (((i < j) & (j >= 7)).logical_not(), lambda i, j: (j <= i) | (j < 7)),
  "first key": ((j < 1) & (i >= i), lambda i, j: (j == 0) & (i == i)),
  "no first key": ((j > 0) & (i >= i), lambda i, j: (j > 0) & (i == i)),
  "steep": ((j <= i*100) & (j >= i*100 - 999), lambda i, j: (j <= i*100) & (j >= i*100 - 999)),
  "twice a divided distance": ((i - j)//3*2 >= 3, lambda i, j: i - j >= 6),
  "one case is out": ((i >= j + 5) & ((i - j < 5) | (j < 9)), lambda i, j: (i >= j + 5) & (j < 9)),
  "exclusive": ((i >= j) ^ (j < 5), lambda i, j: (j <= i) != (j < 5)),
  "of a number": ((i < j).cast(dtypes.int) < 1, lambda i, j: j <= i),
  "long": (i.cast(dtypes.long) - j.cast(dtypes.long) < 4, lambda i, j: i - j < 4),
  "far": ((i - j < 2**31 - 1) & (j - i < 2**30) & (i > -FAR), lambda i, j: (i == i) & (j == j))}

MIXED: dict[str, tuple[UOp, Plain, UOp|None]] = {     # masks that hide keys inside an interval, too, and the mask of the interval alone
  "sinks and window": ((i >= j) & ((j < 4) | (i - j < 9)), lambda i, j: (j <= i) & ((j < 4) | (i - j < 9)), i >= j),
  "dilated window": ((i >= j) & (i - j < 20) & ((i - j) % 4).eq(0), lambda i, j: (j <= i) & (i - j < 20) & ((i - j) % 4 == 0),
                     (i >= j) & (i - j < 20)),
  "documents": ((i >= j) & WORDS[i & 7].eq(WORDS[j & 7]), lambda i, j: (j <= i) & (TABLES[0][i & 7] == TABLES[0][j & 7]), i >= j),
  "flags": (FLAGS[j & 7] & (i - j < 3), lambda i, j: TABLES[1][j & 7] & (i - j < 3), i - j < 3),
  "flag chooses": (FLAGS[i & 7].where(i >= j, i >= j + 5), lambda i, j: np.where(TABLES[1][i & 7], j <= i, j <= i - 5), i >= j),
  "flag or prefix": ((FLAGS[i & 7] & (i >= j)) | ((j < 5) & (i - j < 30)), lambda i, j: (TABLES[1][i & 7] & (j <= i)) | ((j < 5) & (i - j < 30)),
                     (i >= j) | (j < 5)),
  "neighbourhood": ((i//8 - j//8).abs().maximum((i % 8 - j % 8).abs()) <= 2, lambda i, j: (abs(i//8 - j//8) <= 2) & (abs(i % 8 - j % 8) <= 2),
                    (i//8 - j//8).abs() <= 2),
  "window of a head": ((i >= j) & (i - j < QUERY_HEAD*4), lambda i, j: (j <= i) & (i - j < 8), i >= j),
  "one case is nearly out": ((i >= j + 3) & ((i - j <= 4) | FLAGS[j & 7]), lambda i, j: (i >= j + 3) & ((i - j <= 4) | TABLES[1][j & 7]), i >= j + 3),
  "rounded to 0 below 0": (i.alu(Ops.CDIV, i.const_like(3)) >= j, lambda i, j: np.trunc(i/3) >= j, None),
  "not the diagonal": (i.ne(j), lambda i, j: i != j, None),
  "sum": (i + j < 30, lambda i, j: i + j < 30, None),
  "too steep": (j <= i*1000//999, lambda i, j: j <= i*1000//999, None)}

@pytest.mark.parametrize("simplified", (False, True), ids=("traced", "simplified"))
@pytest.mark.parametrize("name", EDGES)
def test_intervals_are_the_mask(name:str, simplified:bool) -> None:
  mask, plain = EDGES[name]
  found = check_split(mask.simplify() if simplified else mask, plain(I, J))
  assert found.rest is None

@pytest.mark.parametrize("name", MIXED)
def test_intervals_and_rest_are_the_mask(name:str) -> None:
  mask, plain, said = MIXED[name]
  found = check_split(mask, plain(I, J))
  hull = Bounds((), (), None) if said is None else mask_bounds(said)
  assert found.rest is not None and hull.rest is None
  assert (found.before, found.after) == (hull.before, hull.after)

@pytest.mark.parametrize("name", EDGES)
def test_far_places(name:str) -> None:
  # The interval of keys that a query sees, and the interval of queries that see a key, follow from the mask function also at the smallest and the
  # largest indices that are allowed.
  mask, plain = EDGES[name]
  found = mask_bounds(mask)
  for place in (-FAR + 1, -FAR//7, -12345678, FAR//16, 123456789, FAR - 2):
    for row, interval, least, sees in ((place, found.keys_of, 0, plain), (abs(place), found.queries_of, -FAR + 1, lambda row, x: plain(x, row))):
      first, last = interval(row)
      for end in (row, *(x for x in (first, last) if x is not None)):
        for x in (min(max(x, least), FAR - 1) for x in (end - 1, end, end + 1)):
          assert ((first is None or x >= first) and (last is None or x <= last)) == sees(row, x), (row, x)

@pytest.mark.parametrize("name", EDGES)
def test_numbers_of_kernels_fit_in_int32(name:str) -> None:
  # A kernel computes the first and the last visible column of a row from integers of at most 3*2^29 in magnitude. So they still fit in int32 after
  # the kernel has added Sk - Sq, the shift of the diagonal.
  found = mask_bounds(EDGES[name][0])
  for end in (*found.keys_of(QUERY), *found.queries_of(KEY)):
    if isinstance(end, UOp): assert all(max(-x.vmin, x.vmax) <= 3*2**29 for x in end.toposort() if x.dtype in (dtypes.int, ANY_INT))

# ***** one code for numbers, UOps and tensors *****

@pytest.mark.parametrize("name", EDGES)
def test_uops_and_tensors_give_the_same_intervals(name:str) -> None:
  found, rows = mask_bounds(EDGES[name][0]), [0, 3, 8, 9, 20, 57]
  for interval in (found.keys_of, found.queries_of):
    of_tensor = interval(Tensor(rows, device="PYTHON"))
    for side, want in enumerate(zip(*map(interval, rows))):
      kernel = [interval(UOp.const(row))[side] for row in rows]
      assert [int(x.simplify().arg) if isinstance(x, UOp) else x for x in kernel] == list(want)
      ends = of_tensor[side]
      assert (ends.numpy().tolist() if isinstance(ends, Tensor) else [ends]*len(rows)) == list(want)

def test_an_end_of_all_rows_is_a_number() -> None:
  assert mask_bounds(j < 30).keys_of(QUERY) == Interval(None, 29)
  assert mask_bounds((i >= 5) & (i < 40)).queries_of(KEY) == Interval(5, 39)

# ***** masks that are written in different ways *****

SAME: dict[str, tuple[UOp, ...]] = {
  "causal": (i >= j, j <= i, (i < j).logical_not(), i - j >= 0, i*3 - j*3 > -3, (i >= j) | (i >= j + 4), (i >= j) & ((i >= j) | (j < 3)),
             (i >= j).where(i >= j - 2, False), (i >= j) & (i - j >= -1)),
  "window": ((i - j).abs() < 8, (i - j < 8) & (j - i <= 7), (i < j).where(j - i, i - j) < 8, (i - j).maximum(j - i) < 8,
             ((i - j < 8).logical_not() | (j - i > 7)).logical_not()),
  "prefix": ((i >= j) | (j < 7), (j < 7) | (i >= j), ((i < j) & (j > 6)).logical_not()),
  "prefix and end": (((i >= j) | (j < 7)) & (j < 50), (j < 50) & ((j < 7) | (i >= j))),
  "chunks": ((i//4).eq(j//4), (i >> 2).eq(j >> 2), (i//4 - j//4).eq(0), ((i//2)//2).eq(j//4), (i//4*8).eq(j//4*8))}

@pytest.mark.parametrize("name", SAME)
def test_the_same_mask_has_the_same_bounds(name:str) -> None:
  first, *others = map(mask_bounds, SAME[name])
  assert first.rest is None and all(x == first and hash(x) == hash(first) for x in others)

# ***** masks without an end *****

def test_a_mask_of_many_clauses_stays_a_condition() -> None:
  many = functools.reduce(operator.or_, [(i >= 3*n).logical_not() & (j >= 2*n) & FLAGS[(i + n) & 7] for n in range(30)])
  assert check_split(many & (i - j < 40), value(many & (i - j < 40), I, J)).rest is many
  odd = functools.reduce(operator.xor, [FLAGS[(i + j*n) & 7] for n in range(12)])
  assert check_split(odd & (i >= j), value(odd & (i >= j), I, J)).rest is odd
  steps = functools.reduce(operator.add, [(i >= n).where(2, 0) for n in range(20)])
  assert check_split((steps > 3) & (i >= j), value((steps > 3) & (i >= j), I, J)).after == mask_bounds(i >= j).after

# ***** random masks *****

NUMBERS = st.integers(-9, 40)
LEAVES = st.sampled_from((i, j, i - j, i, j)) | NUMBERS.map(i.const_like)
DIVISORS = st.integers(1, 6)

def integers(x:st.SearchStrategy[UOp]) -> st.SearchStrategy[UOp]:
  return st.one_of(st.builds(operator.add, x, x), st.builds(operator.sub, x, x), st.builds(operator.mul, x, st.integers(-3, 3)),
                   st.builds(operator.floordiv, x, DIVISORS), st.builds(operator.mod, x, DIVISORS), x.map(UOp.abs), st.builds(UOp.maximum, x, x),
                   st.builds(UOp.minimum, x, x), x.map(lambda u: WORDS[u & 7]), st.builds(lambda c, a, b: (c < 5).where(a, b), x, x, x))

INTEGERS = st.recursive(LEAVES, integers, max_leaves=4)
ATOMS = st.one_of(*(st.builds(compare, INTEGERS, INTEGERS) for compare in (operator.lt, operator.ge, operator.gt, UOp.eq, UOp.ne)),
                  st.builds(operator.ge, st.just(i - j), NUMBERS), st.builds(operator.le, st.just(i - j), NUMBERS),
                  INTEGERS.map(lambda u: FLAGS[u & 7]))

def conditions(x:st.SearchStrategy[UOp]) -> st.SearchStrategy[UOp]:
  return st.one_of(st.builds(operator.and_, x, x), st.builds(operator.or_, x, x), st.builds(operator.xor, x, x), x.map(UOp.logical_not),
                   st.builds(UOp.where, x, x, x), st.builds(UOp.eq, x, x), st.builds(operator.mul, x, x))

@given(st.recursive(ATOMS, conditions, max_leaves=6))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_random_masks(mask:UOp) -> None:
  want = np.broadcast_to(value(mask, I, J), (len(I), J.shape[1]))
  check_split(mask, want)
  check_split(mask.simplify(), want)
