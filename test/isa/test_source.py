"""Tests that the rendered source of attn's kernels is readable, with short lines and short in total, and how attn renders integers with known bounds.
"""
from __future__ import annotations
import re
from collections.abc import Callable
from typing import Any
import numpy as np
import pytest
from attn.chips import SEARCHED, get_chip
from attn.choose.dispatch import single_kernel
from attn.compilers.clang import assembly
from attn.isa.source import MASKS, Spec, text_of
from attn.kernels.parts.grid.tensors import arguments
from attn.kernels.parts.program.allocator import Allocator
from attn.kernels.parts.program.blocks import trip_count
from attn.kernels.parts.weights.epilogue import OPTIMISED
from attn.ops.renderers import render
from attn.tinygrad_compat import AxisType, KernelInfo, UOp, dtypes
from cases import TYPES, in_turn, problem

LONGEST = 200                                      # characters in a line
SHORT = {"gfx942": 35000, "sm_80": 110000}         # characters in the kernel for D = 128, fp16, all keys
CHIPS = (*SEARCHED, "sm_80", "sm_90")              # one chip of each family
OPTIONS:dict[str, dict[str, Any]] = {
  "softcap and slopes": dict(softcap=30.0, causal=True, extras=dict(alibi_slopes=np.ones((1, 32), np.float32))),
  "bias in a window": dict(window=(100, 20), extras=dict(bias=np.zeros((1, 32, 1024, 1024), np.float32)))}

def test_a_range_stays_the_same_in_what_is_simplified() -> None:
  # A loop whose bound attn hides from tinygrad keeps its range UOp: an expression of the loop's index still contains this UOp after tinygrad has
  # simplified the expression. In an earlier version it contained a range with another end, and a kernel could not be lowered.
  bound = trip_count(UOp.const(1))
  assert bound is not None
  loop = Allocator().range(bound, AxisType.LOOP)
  assert loop in (loop*2 + 1 < 7).simplify().toposort()

def longest(text:str) -> int: return max(map(len, text.splitlines()))

@pytest.mark.sample(4)
@in_turn("chip, D", CHIPS, (128, 64, 256))
def test_lines(chip:str, D:int) -> None:
  for mask in MASKS: assert longest(text_of(Spec(chip, D, "bfloat16", mask))) <= LONGEST

@pytest.mark.sample(4)
@in_turn("chip, option", CHIPS, list(OPTIONS))
def test_lines_with_options(chip:str, option:str) -> None:
  p = problem(H=32, Sq=1024, D=128, **OPTIONS[option])
  kernel, _ = single_kernel(p, get_chip(chip))
  tensors = [UOp.placeholder(shape, TYPES[dtype], i) for i, (shape, dtype) in enumerate(arguments(p).values())]
  assert longest(render(kernel(*tensors), chip)) <= LONGEST

@pytest.mark.parametrize("chip", SHORT)
def test_size(chip:str) -> None: assert len(text_of(Spec(chip, 128))) <= SHORT[chip]

# ***** integers between two bounds *****

def printed_bounds(x:UOp, name:str, value:Callable[[UOp], UOp]) -> str:
  # Returns the source of a kernel called `name` that stores, in a loop over x, the integer that `value` makes from x.
  store = UOp.placeholder((64,), dtypes.int, 0)[x].store(value(x).cast(dtypes.int))
  return render(store.end(x).sink(arg=KernelInfo(name, opts_to_apply=()), tag=OPTIMISED), "gfx942")

@pytest.mark.parametrize(("name", "axis", "held"), (("attn_clamped", AxisType.GLOBAL, True), ("attn_clamped", AxisType.WARP, False),
                                                    ("clamped", AxisType.GLOBAL, False)))
def test_the_second_of_two_bounds_is_hidden(name:str, axis:AxisType, held:bool) -> None:
  # If an attn kernel clamps an integer between two bounds, and the integer is the same in all lanes, attn's renderer hides the second bound from
  # clang. clang then computes the integer in scalar registers. Bounds of other integers are not hidden.
  x = UOp.range(64, 0, axis)
  text = printed_bounds(x, name, lambda x: (x*3 - 5).maximum(0).minimum(100))
  assert ("= ~not_above(" in text) == held and "?0:" in text
  text = printed_bounds(x, name, lambda x: (x*3 - 5).minimum(100).maximum(0))
  assert ("= not_below(" in text) == held and "?-101:" in text      # clang knows the other bound: ~100

BOUNDED: list[tuple[Callable[[Any], Any], Callable[[int], int]]] = [
  (lambda x: (x*3 - 5).maximum(0).minimum(100), lambda n: min(max(n*3 - 5, 0), 100)),
  (lambda x: (x*3 - 5).minimum(100).maximum(0), lambda n: max(min(n*3 - 5, 100), 0)),
  (lambda x: (x*3 - 5).maximum(0).minimum(100).maximum(7), lambda n: max(min(max(n*3 - 5, 0), 100), 7)),
  (lambda x: ((x*3 - 5).maximum(0)*-7 + 60).maximum(-90), lambda n: max(max(n*3 - 5, 0)*-7 + 60, -90))]

@pytest.mark.parametrize("value, known", BOUNDED)
def test_hidden_bounds_hold(value:Callable[[UOp], UOp], known:Callable[[int], int]) -> None:
  # attn's renderer hides bounds of some integers from clang. The rendered expressions still give the right value.
  text = printed_bounds(UOp.range(64, 0, AxisType.GLOBAL), "attn_clamped", value)
  statements = [re.sub(r"\(\((.*?)<(.*?)\)\?(.*?):(.*?)\)", r"(\3 if \1<\2 else \4)", x) for x in re.findall(r"(alu\d+ = .*|= .*alu\d.*);", text)]
  assert re.search(r"= ~?not_(above|below)\(", text)
  for n in range(64):
    names: dict[str, Any] = {"gidx0": n, "not_above": min, "not_below": max}
    for x in statements: exec(f"result {x}" if x.startswith("=") else x, names)
    assert names["result"] == known(n)

def test_where_a_number_is_known_the_second_bound_is_not() -> None:
  # If clang knows the value of an integer that is clamped between two bounds, it computes the first bound at compile time. The second bound is hidden
  # from clang, so it still takes an instruction.
  text = printed_bounds(UOp.range(64, 0, AxisType.GLOBAL), "attn_clamped", BOUNDED[0][0])
  code = assembly(re.sub(r"alu0 = .*;", "alu0 = 17;", text), "gfx1201")
  assert "s_min_i32" in code and "v_med3" not in code
