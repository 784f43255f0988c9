"""The source that is printed of our kernels can be read: its lines are short, and so is all of it."""
from __future__ import annotations
from typing import Any
import numpy as np
import pytest
from attn.chips import SEARCHED, get_chip
from attn.choose.dispatch import single_kernel
from attn.isa.source import MASKS, Spec, text_of
from attn.kernels.parts.allocator import Allocator
from attn.kernels.parts.blocks import trip_count
from attn.kernels.parts.epilogue import OPTIMISED
from attn.kernels.parts.tensors import arguments
from attn.ops.renderers import render
from attn.tinygrad_compat import AxisType, KernelInfo, UOp, dtypes
from cases import TYPES, in_turn, problem

LONGEST = 200                                      # characters of a line
SHORT = {"gfx942": 35000, "sm_80": 110000}         # characters of the kernel for D = 128, fp16, all keys
CHIPS = (*SEARCHED, "sm_80", "sm_90")              # one of each family
OPTIONS:dict[str, dict[str, Any]] = {
  "softcap and slopes": dict(softcap=30.0, causal=True, extras=dict(alibi_slopes=np.ones((1, 32), np.float32))),
  "bias in a window": dict(window=(100, 20), extras=dict(bias=np.zeros((1, 32, 1024, 1024), np.float32)))}

def test_a_range_stays_the_same_in_what_is_simplified() -> None:
  """Of a loop whose bound is hidden, too: its end would be that of another one, and no kernel of gfx1201 for D=256, Dv=98 and 33 keys lowered."""
  bound = trip_count(UOp.const(1))
  assert bound is not None
  loop = Allocator().range(bound, AxisType.LOOP)
  assert loop in (loop*2 + 1 < 7).simplify().toposort()

def longest(text:str) -> int: return max(map(len, text.splitlines()))

@in_turn("chip, D", CHIPS, (128, 64, 256))
def test_lines(chip:str, D:int) -> None:
  for mask in MASKS: assert longest(text_of(Spec(chip, D, "bfloat16", mask))) <= LONGEST

@in_turn("chip, option", CHIPS, list(OPTIONS))
def test_lines_with_options(chip:str, option:str) -> None:
  p = problem(H=32, Sq=1024, D=128, **OPTIONS[option])
  kernel, _ = single_kernel(p, get_chip(chip))
  tensors = [UOp.placeholder(shape, TYPES[dtype], i) for i, (shape, dtype) in enumerate(arguments(p).values())]
  assert longest(render(kernel(*tensors), chip)) <= LONGEST

@pytest.mark.parametrize("chip", SHORT)
def test_size(chip:str) -> None: assert len(text_of(Spec(chip, 128))) <= SHORT[chip]

# ***** integers between two bounds *****

@pytest.mark.parametrize(("name", "axis", "held"), (("attn_clamped", AxisType.GLOBAL, True), ("attn_clamped", AxisType.WARP, False),
                                                    ("clamped", AxisType.GLOBAL, False)))
def test_the_lower_of_two_bounds_is_hidden(name:str, axis:AxisType, held:bool) -> None:
  """Of a number that all lanes of a kernel of ours have, so that clang computes it in scalar registers; of no other."""
  x, out = UOp.range(64, 0, axis), UOp.placeholder((64,), dtypes.int, 0)
  store = out[x].store((x*3 - 5).maximum(0).minimum(100).cast(dtypes.int))
  text = render(store.end(x).sink(arg=KernelInfo(name, opts_to_apply=()), tag=OPTIMISED), "gfx942")
  assert ("not_below(" in text) == held and "?-101:" in text      # the other bound is known: ~100
