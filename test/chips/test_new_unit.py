"""Tests of a matrix unit that no chip of attn has: RDNA4's WMMA with 32 columns instead of 16, in the layout and with the arguments of gfx1250."""
from __future__ import annotations
from dataclasses import replace
import pytest
from attn.chips import CHIPS, get_chip
from attn.chips.family import Card, Chip, Family
from attn.chips.matrix import Matrix, contraction
from attn.chips.rdna import wmma
from attn.choose.backward import choose_backward
from attn.choose.dispatch import choose, single_kernel
from attn.emulator.chips import EMULATED, INSTRUCTIONS, EmulatedChip, Layout, MatrixInstruction
from attn.kernels.parts.grid.tensors import arguments
from attn.kernels.parts.memory.lanes import operands
from attn.ops import common as ops
from attn.ops.renderers import render
from attn.tinygrad_compat import UOp, dtypes
from backward_cases import check_backward_kernels
from cases import TYPES, check, problem

# Two table rows add it, one in attn's table of chips and one in the emulator's. The new chip has no dot products and no table of tiles, so dispatch
# must choose tiles without a table.

ARCH, LDS = "gfx1250", 327680

def deep(dtype:str, element:str) -> Matrix: return wmma(dtype, element, 8, K=32, arguments="false, {a}, false, {b}, (short)0, {c}, false, false")

DEEP = Family("deep", wave=32, vgprs=256, busy_waves=2, bf16_pack=True, descriptor=0x31004000,
              matrix={"float16": (deep("f16", "half"),), "bfloat16": (deep("bf16", "bfloat"),)})

@pytest.fixture(autouse=True)
def with_unit(monkeypatch:pytest.MonkeyPatch) -> None:
  # Adds a chip with a new matrix unit to attn's table of chips and to the emulator's table.
  # Half h of a wave's lanes holds the elements k = 16d + 8h + e of A and B (d = 0, 1; e = 0 to 7), and the rows 8h + r of C.
  ab, c = Layout("de hi -> i dhe", d=2, e=8, h=2, i=16), Layout("r hn -> hr n", r=8, h=2, n=16)
  monkeypatch.setitem(CHIPS, ARCH, Chip(ARCH, DEEP, LDS, (Card("of this test", 256),), registers=1024, granule=16))
  monkeypatch.setitem(EMULATED, ARCH, EmulatedChip("deep", 32, LDS))
  for dtype, matrix in DEEP.matrix.items(): monkeypatch.setitem(INSTRUCTIONS, matrix[0].name, MatrixInstruction(ab, ab, c, dtype, ("deep",)))

@pytest.mark.sample(1)
@pytest.mark.parametrize("D, dtype", [(40, "float16"), (80, "bfloat16"), *[pytest.param(*x, marks=pytest.mark.thorough) for x in (
  (64, "float16"), (128, "float16"), (40, "bfloat16"), (64, "bfloat16"), (128, "bfloat16"))]])
def test_forward_and_backward(D:int, dtype:str) -> None:
  # Forward and backward on a chip with a new matrix unit use the kernels for matrix units, and not the slow kernels of plain UOps. Results are within
  # their error limits.
  shape = {"H": 2, "Sq": 100, "Sk": 150, "D": D, "dtype": dtype, "causal": True}
  p, chip = problem(**shape), get_chip(ARCH)
  assert choose(p, chip).kernel == "forward" and choose_backward(p, chip, "forward").kernels == ("backward_dq", "backward_dkdv")
  check(ARCH, **shape)
  check_backward_kernels(ARCH, **shape)

def test_every_kernel_has_a_cautious_tile() -> None:
  latent = problem(B=4, H=64, Hkv=1, Sq=2, Sk=4096, D=576, Dv=512, v_in_k=True, causal=True)
  assert choose(replace(latent, num_splits=1), get_chip(ARCH)).kernel == "mla"
  for D in (1, 96, 192, 256):
    p = problem(Sq=100, Sk=150, D=D)
    assert choose(p, get_chip(ARCH)).kernel == "forward" and choose_backward(p, get_chip(ARCH), "forward").tiles is not None, D

def test_the_depth_counts() -> None:
  mat = DEEP.matrix["float16"][0]
  assert [contraction(mat, n) for n in (1, 32, 33, 80)] == [32, 32, 64, 96]
  units = [ops.build(*[UOp.const(i, dtypes.uint) for i in range(4)])]*3
  with pytest.raises(ValueError, match="zip"): operands(mat, units)
  assert len(operands(mat, units[:2])) == 1

def test_the_text_has_all_arguments() -> None:
  kernel, _ = single_kernel(p := problem(Sq=100, Sk=150, D=64, dtype="float16"), get_chip(ARCH))
  text = render(kernel(*[UOp.placeholder(shape, TYPES[dtype], i) for i, (shape, dtype) in enumerate(arguments(p).values())]), ARCH)
  assert "__builtin_amdgcn_wmma_f32_16x16x32_f16(false, (half16)" in text and ", (short)0, " in text and "fdot2" not in text
