"""Tests of matrix operands with elements of one byte: functions of the forward kernel on their own, with gfx942's matrix instruction for 8-bit
floats."""
from __future__ import annotations
import numpy as np
import pytest
from attn.chips.cdna3 import CDNA3
from attn.chips.cdna4 import CDNA4
from attn.chips.matrix import Matrix, contraction
from attn.chips.rdna3 import RDNA3
from attn.compilers.clang import assembly
from attn.emulator.matrix import MatrixUnit, to_float32
from attn.kernels.amd.staging import Staging
from attn.kernels.parts.memory.lanes import Lane, operands, units_of
from attn.kernels.parts.memory.layouts import LdsTile, PaddedRows
from attn.kernels.parts.memory.rows import GlobalRows
from attn.kernels.parts.program.allocator import Allocator
from attn.kernels.parts.weights.epilogue import OPTIMISED
from attn.ops.amd import shaped_wmma
from attn.ops.common import extract, flat, splat
from attn.ops.renderers import render
from attn.tinygrad_compat import AxisType, Context, KernelInfo, Tensor, UOp, dtypes

FP8 = Matrix("mfma_f32_32x32x16_fp8_fp8", 32, 32, 16, 64, 8, 4, "long", "{a}, {b}, {c}, 0, 0, 0", size=1)

def encoded(x:np.ndarray) -> np.ndarray:
  # encodes whole numbers up to 15 as CDNA3's 8-bit floats: a sign bit, the exponent plus 8, three bits of mantissa
  exponent = np.floor(np.log2(np.maximum(np.abs(x), 1)))
  bits = (exponent + 8)*8 + (np.abs(x)/2.0**exponent - 1)*8 + 128*(x < 0)
  return np.where(x == 0, 0, bits).astype(np.uint8)

def whole(*shape:int, seed:int=0) -> np.ndarray: return np.random.default_rng(seed).integers(-15, 16, shape).astype(np.float32)

def test_values_of_fp8() -> None:
  bits = np.array([0x00, 0x01, 0x07, 0x08, 0x40, 0xc0, 0x7f, 0xff, 0x80], np.uint8)
  np.testing.assert_array_equal(to_float32(bits, "fp8e4m3fnuz"), [0, 2.0**-10, 7*2.0**-10, 2.0**-7, 1, -1, 240, -240, np.nan])
  np.testing.assert_array_equal(to_float32(encoded(whole(500)), "fp8e4m3fnuz"), whole(500))

@pytest.mark.parametrize(("name", "M", "K"), [("mfma_f32_32x32x16_fp8_fp8", 32, 16), ("mfma_f32_16x16x32_fp8_fp8", 16, 32)])
def test_the_emulators_matrix_unit(name:str, M:int, K:int) -> None:
  # The emulator's FP8 matrix instructions follow AMD's Matrix Instruction Calculator: A[i][k] is in lane i + M*(k//8), byte k%4 of register k//4%2.
  # B[k][j] is in lane j + M*(k//8), with the byte and register of A[i][k].
  a, b, c = whole(M, K), whole(K, M, seed=1), whole(M, M, seed=2)
  images = np.zeros((2, 2, 64, 4), np.uint8)
  for i in range(M):
    for k in range(K):
      for image, x in zip(images, (a[i, k], b[k, i]), strict=True): image[k//4%2, i + M*(k//8), k%4] = encoded(x)
  def row(lane:int, e:int) -> int: return e//4*8 + lane//32*4 + e%4 if M == 32 else lane//16*4 + e
  registers = np.array([[c[row(lane, e), lane%M] for lane in range(64)] for e in range(M*M//64)], np.float32)
  got = MatrixUnit("cdna3", "gfx942").instruction(name, *(x.view(np.uint32)[..., 0] for x in images), registers)
  want = a @ b + c
  np.testing.assert_array_equal(got, [[want[row(lane, e), lane%M] for lane in range(64)] for e in range(M*M//64)])

def scores(width:int):
  # makes a kernel of one wave that computes S^T = K Q^T for 32 keys and 32 queries of `width` bytes
  depth = contraction(FP8, width)
  def kernel(s:UOp, k:UOp, q:UOp) -> UOp:
    lane, wave = UOp.range(64, 0, AxisType.WARP), UOp.range(1, 1, AxisType.WARP)
    at, first = Lane(lane, wave, FP8), UOp.const(0)
    k_rows, q_rows = (GlobalRows(flat(x), UOp.const(0), width, 32, width, FP8.size, True) for x in (k, q))
    layout = PaddedRows(32, depth//FP8.unit)
    stage, k_lds = Staging(32, layout.units, 64, at.thread), LdsTile(Allocator().lds(layout.size), layout)
    parts = stage.items
    k_lds = k_lds.after(UOp.group(*[k_lds.store(row, unit, k_rows.load_units(first, 32, row, unit, gate), gate) for row, unit, gate in parts]))
    units = units_of(FP8, depth, at.h)
    acc = splat(0.0, FP8.accumulator)
    for a, b in zip(operands(FP8, [k_lds.load(at.n, u) for u in units]), operands(FP8, [q_rows.load_units(first, 32, at.n, u) for u in units]),
                    strict=True): acc = shaped_wmma(FP8, a, b, acc)
    stores = [flat(s)[FP8.c_row(at.h, i)*32 + at.n].store(extract(acc, i)) for i in range(FP8.accumulator)]
    return UOp.group(*stores).end(lane, wave).sink(arg=KernelInfo(f"fp8_scores_{width}", opts_to_apply=()), tag=OPTIMISED)
  return kernel

@pytest.mark.parametrize("width", (64, 48, 41))   # whole units in each lane group; a part of a unit; rows that are unaligned, read byte by byte
def test_a_product_of_fp8_rows(width:int) -> None:
  k, q = whole(32, width), whole(32, width, seed=1)
  with Context(DEV="EMU::gfx942"):
    given = [Tensor(encoded(x), device="EMU").realize() for x in (k, q)]
    s = Tensor.empty(32, 32, dtype=dtypes.float, device="EMU").custom_kernel(*given, fxn=scores(width))[0].numpy()
  np.testing.assert_array_equal(s, k @ q.T)

def test_it_compiles_to_the_instruction() -> None:
  tensors = [UOp.placeholder((32, n), dtype, i) for i, (n, dtype) in enumerate(((32, dtypes.float), (48, dtypes.uchar), (48, dtypes.uchar)))]
  text = assembly(render(scores(48)(*tensors), "gfx942"), "gfx942")
  assert text.count("v_mfma_f32_32x32x16_fp8_fp8") == contraction(FP8, 48)//FP8.K and "scratch_" not in text

def test_sizes_follow_from_the_bytes_of_an_element() -> None:
  for matrix, unit, words in ((FP8, 16, 2), (CDNA3.matrix["float16"][0], 8, 2), (CDNA4.matrix["bfloat16"][0], 8, 4),
                              (RDNA3.matrix["float16"][0], 8, 8)):
    assert (matrix.unit, matrix.operand_words) == (unit, words)
    assert contraction(matrix, 1) == unit*2 and contraction(matrix, 4*unit + 1) == 6*unit
  # Rows of A and C do not depend on the size of an element: they are a permutation of the keys of a tile and of the columns of V.
  wide = CDNA3.matrix["float16"][0]
  assert [FP8.row_of(d) for d in range(64)] == [wide.row_of(d) for d in range(64)]
  assert sorted(FP8.key_of(h, n) for h in range(2) for n in range(32)) == list(range(64))
