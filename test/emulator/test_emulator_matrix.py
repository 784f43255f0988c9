"""Tests of the emulator's matrix instructions. The results agree with formulas from the ISA documents, which say which lane holds which element of A,
B and C, and with tinygrad's own scalar emulation. Denormals and rounding follow the hardware."""
import numpy as np
import pytest
from tinygrad import Context, Tensor, dtypes
from tinygrad.uop.ops import AxisType, KernelInfo, UOp
from attn.emulator.alu import float_to_bf16
from attn.emulator.checks import EmulatorError
from attn.emulator.device import register
from attn.emulator.chips import INSTRUCTIONS
from attn.emulator.matrix import MatrixUnit
from eight_bits import numbers_of

register()

# Formulas of the ISA documents, written out: lane and register element that hold (row i of A, k), (k, column j of B) and (i, j) of C.
def mfma(size, per_lane):
  return (lambda i, k: (i + size*(k//per_lane), k % per_lane), lambda k, j: (j + size*(k//per_lane), k % per_lane),
          (lambda i, j: (j + 32*(i//4 % 2), 4*(i//8) + i % 4)) if size == 32 else (lambda i, j: (j + 16*(i//4), i % 4)))
def mma(K):
  return (lambda i, k: (i % 8*4 + k % 8//2, k % 2 + 2*(i//8) + 4*(k//8)), lambda k, j: (j*4 + k % 8//2, k % 2 + 2*(k//8)),
          lambda i, j: (i % 8*4 + j//2, j % 2 + 2*(i//8)))
FORMULAS = {
  "mfma_f32_32x32x8f16": mfma(32, 4), "mfma_f32_32x32x8bf16_1k": mfma(32, 4),
  "mfma_f32_16x16x16f16": mfma(16, 4), "mfma_f32_16x16x16bf16_1k": mfma(16, 4),
  "mfma_f32_32x32x16_f16": mfma(32, 8), "mfma_f32_32x32x16_bf16": mfma(32, 8),
  "mfma_f32_16x16x32_f16": mfma(16, 8), "mfma_f32_16x16x32_bf16": mfma(16, 8),
  "wmma_f32_16x16x16_f16_w32": (lambda i, k: (i, k), lambda k, j: (j, k), lambda i, j: (j + 16*(i % 2), i//2)),
  "wmma_f32_16x16x16_f16_w32_gfx12": (lambda i, k: (i + 16*(k//8), k % 8), lambda k, j: (j + 16*(k//8), k % 8), lambda i, j: (j + 16*(i//8), i % 8)),
  "mma_m16n8k16_f16": mma(16), "mma_m16n8k16_bf16": mma(16),
  "mfma_f32_32x32x16_fp8_fp8": mfma(32, 8), "mfma_f32_16x16x32_fp8_fp8": mfma(16, 8), "mfma_scale_f32_32x32x64_f8f6f4": mfma(32, 32),
  "mma_m16n8k32_e4m3": (lambda i, k: (i % 8*4 + k % 16//4, k % 4 + 4*(i//8) + 8*(k//16)), lambda k, j: (j*4 + k % 16//4, k % 4 + 4*(k//16)),
                        lambda i, j: (i % 8*4 + j//2, j % 2 + 2*(i//8))),
}
FORMULAS["wmma_f32_16x16x16_bf16_w32"] = FORMULAS["wmma_f32_16x16x16_f16_w32"]
FORMULAS["wmma_f32_16x16x16_fp8_fp8_w32_gfx12"] = FORMULAS["wmma_f32_16x16x16_bf16_w32_gfx12"] = FORMULAS["wmma_f32_16x16x16_f16_w32_gfx12"]

def unit_of(name):
  family = INSTRUCTIONS[name].families[-1]
  return MatrixUnit(family, family), 64 if family.startswith("cdna") else 32

def bits16(x, dtype): return x.astype(np.float16).view(np.uint16) if dtype == "float16" else float_to_bf16(x)

def place(m, where, elements, lanes, dtype=np.float32):
  # returns matrices (waves, rows, columns) as registers (elements, waves*lanes), where `where` maps (row, column) to (lane, element)
  out = np.zeros((elements, m.shape[0], lanes), dtype)
  for r in range(m.shape[1]):
    for c in range(m.shape[2]):
      lane, e = where(r, c)
      out[e, :, lane] = m[:, r, c]
  return out.reshape(elements, -1)

def pack(elements):
  # packs numbers of 8 or 16 bits (elements, lanes) into 32-bit registers
  return np.ascontiguousarray(elements.T).view(np.uint32).T.copy()

def bits(x, dtype): return bits16(x, dtype) if "float16" in dtype else bytes_of(dtype, x)
def bytes_of(dtype, x):
  # the bytes of numbers that the 8-bit float format `dtype` holds exactly
  numbers = numbers_of(dtype)
  order = np.argsort(np.where(np.arange(256) == 128, np.nan, numbers))
  found = order[np.searchsorted(numbers[order][:254], x)].astype(np.uint8)
  return np.where(np.isnan(x), 0x80 if dtype == "fp8e4m3fnuz" else 0x7f, found).astype(np.uint8)

def operands(name, a, b, c):
  # a (waves, M, K), b (waves, K, N) and c (waves, M, N) as registers for the matrix instruction `name`
  i, (fa, fb, fc) = INSTRUCTIONS[name], FORMULAS[name]
  _, lanes = unit_of(name)
  kind = np.uint16 if "float16" in i.dtype else np.uint8
  images = [place(bits(x, i.dtype), f, layout.elements, lanes, kind) for x, f, layout in ((a, fa, i.a), (b, fb, i.b))]
  if lanes == 32 and i.families == ("rdna3",):
    for x in images: x.reshape(x.shape[0], -1, 32)[..., 16:] = x.reshape(x.shape[0], -1, 32)[..., :16]
  return *map(pack, images), place(c, fc, i.c.elements, lanes)

def matrices(name, waves=3, seed=0):
  N, M, K = INSTRUCTIONS[name].dims
  rng = np.random.default_rng(seed)
  return [rng.integers(-8, 9, (waves, *s)).astype(np.float32) for s in ((M, K), (K, N), (M, N))]   # small integers are exact in each format and order

@pytest.mark.parametrize("name", FORMULAS)
def test_layout(name):
  a, b, c = matrices(name)
  unit, lanes = unit_of(name)
  got = unit.instruction(name, *operands(name, a, b, c))
  np.testing.assert_array_equal(got, place(a @ b + c, FORMULAS[name][2], INSTRUCTIONS[name].c.elements, lanes))

@pytest.mark.parametrize("name", ["mfma_f32_32x32x8f16", "wmma_f32_16x16x16_bf16_w32_gfx12", "mma_m16n8k16_f16"])
def test_nan_and_inf_stay_in_their_row_and_column(name):
  a, b, c = matrices(name)
  a[1, 3, 2], b[2, 1, 5] = np.nan, np.inf
  unit, lanes = unit_of(name)
  with np.errstate(invalid="ignore"):
    got, want = unit.instruction(name, *operands(name, a, b, c)), place(a @ b + c, FORMULAS[name][2], INSTRUCTIONS[name].c.elements, lanes)
  np.testing.assert_array_equal(got, want)
  assert np.isnan(want).sum() > 0 and np.isfinite(want[:, :lanes]).all()

OF_8_BITS = [name for name in FORMULAS if "fp8" in INSTRUCTIONS[name].dtype]

@pytest.mark.parametrize("name", OF_8_BITS)
def test_every_8_bit_float_is_multiplied(name):
  # The matrix instructions for 8-bit floats read each of the 256 bytes as the right number, or as NaN.
  unit, lanes = unit_of(name)
  numbers = numbers_of(INSTRUCTIONS[name].dtype)
  a, b, c = [np.zeros_like(x) for x in matrices(name, waves=8)]
  rows = a.shape[1]
  some = np.resize(numbers, 8*rows)
  some[np.isnan(some)] = 0
  a[:, :, 0], b[:, 0] = some.reshape(8, rows), 1
  got = unit.instruction(name, *operands(name, a, b, c))
  np.testing.assert_array_equal(got, place(np.broadcast_to(a[:, :, :1], c.shape), FORMULAS[name][2], INSTRUCTIONS[name].c.elements, lanes))
  a[1, 2, 3] = np.nan
  got = unit.instruction(name, *operands(name, a, b, c))
  assert np.isnan(got).sum() == c.shape[2]

def test_short_sums():
  # The matrix units of sm_89 and sm_90 drop the bits of each 8-bit product below 2^-13 times the largest product, before they add the products. The
  # matrix unit of sm_120 adds them in fp32. sm_80 has no such instruction.
  name = "mma_m16n8k32_e4m3"
  def total(arch, c, *products):
    a, b, C = [np.zeros_like(x) for x in matrices(name)]
    a[:, 0, :len(products)], b[:, :len(products), 0], C[:, 0, 0] = products, 1, c
    return MatrixUnit("nvidia", arch).instruction(name, *operands(name, a, b, C))[0, 0]
  for arch in ("sm_89", "sm_90"):
    assert total(arch, 0, 64, 2.0**-7) == 64 + 2.0**-7            # 2^6 and a multiple of 2^(6 - 13)
    assert total(arch, 0, 64, 2.0**-8, 2.0**-8, -2.0**-8) == 64    # each is cut off by itself
    assert total(arch, 8192, 0.5, 0.5) == 8192 and total(arch, -8192, -0.5) == -8192
    assert total(arch, 8192, 1.5, 1.5) == 8194                    # each becomes 1, not 2
    assert total(arch, 0, 448, 448, 448, 448) == 1792 and np.isnan(total(arch, 0, np.nan, 1))
    assert total(arch, 2.0**-20, 0) == 2.0**-20
  assert total("sm_120", 8192, 0.5, 0.25) == 8192.75
  with pytest.raises(EmulatorError, match="sm_80 has no matrix instruction 'mma_m16n8k32_e4m3'"): total("sm_80", 0, 1)

def test_accumulates_in_fp32():
  name = "mfma_f32_32x32x8f16"
  a, b, c = [np.zeros_like(x) for x in matrices(name)]
  a[:, :, :2], b[:, 0], b[:, 1], c[:] = 1, 2048, 1, 0.25   # 2048 + 1 does not fit into the 11 bits of fp16
  assert (unit_of(name)[0].instruction(name, *operands(name, a, b, c)) == 2049.25).all()

DENORMAL = {"mfma_f32_32x32x8f16": 2.0**-15, "mfma_f32_32x32x8bf16_1k": 2.0**-127}   # half of the lowest normal number

@pytest.mark.parametrize("name", DENORMAL)
def test_cdna2_takes_denormals_for_zero(name):
  # CDNA2 treats denormals in A, B, C and D as zero, as AMD documents for MI200; CDNA3 does not.
  small, least = DENORMAL[name], 2*DENORMAL[name]
  def product(family, a, b, c=0.0):
    A, B, C = [np.zeros_like(x) for x in matrices(name)]
    A[:, 5, 2], B[:, 2, 7], C[:, 5, 7] = a, b, c
    out = MatrixUnit(family, family).instruction(name, *operands(name, A, B, C))
    assert np.isfinite(out).all() and (out != 0).sum() <= A.shape[0]
    return np.abs(out).max()*np.sign(out.sum())
  for a, b, c, cdna3, cdna2 in ((small, 4, 0, 4*small, 0), (4, -small, 0, -4*small, 0), (least, 4, 0, 4*least, 4*least), (-small, 1, 3, 3 - small, 3),
                                (0, 0, 2.0**-130, 2.0**-130, 0), (0, 0, 2.0**-126, 2.0**-126, 2.0**-126)):
    assert (product("cdna3", a, b, c), product("cdna2", a, b, c)) == (np.float32(cdna3), np.float32(cdna2)), (a, b, c)
  if name.endswith("bf16_1k"):    # a product of normal numbers that is denormal in fp32
    assert (product("cdna3", 2.0**-70, 2.0**-60), product("cdna2", 2.0**-70, 2.0**-60)) == (np.float32(2.0**-130), 0)
    assert [product(f, 2.0**-63, 2.0**-63, 2.0**-127) for f in ("cdna3", "cdna2")] == [np.float32(1.5*2.0**-126), np.float32(2.0**-126)]   # only C

def test_rdna3_wants_duplicated_halves():
  name = "wmma_f32_16x16x16_f16_w32"
  a, b, c = operands(name, *matrices(name))
  b[0, 33 + 16] ^= 1
  with pytest.raises(EmulatorError, match=r"lanes 16-31.*wave 1"): unit_of(name)[0].instruction(name, a, b, c)

def test_instruction_of_another_chip():
  name = "mfma_f32_32x32x16_f16"
  with pytest.raises(EmulatorError, match=r"gfx942 has no matrix instruction 'mfma_f32_32x32x16_f16'.*mfma_f32_32x32x8f16"):
    MatrixUnit("cdna3", "gfx942").instruction(name, *operands(name, *matrices(name)))

def test_wrong_operand_length():
  name = "mfma_f32_32x32x8f16"
  a, b, c = operands(name, *matrices(name))
  with pytest.raises(EmulatorError, match="has 8 elements a lane, the instruction wants 4"):
    unit_of(name)[0].instruction(name, np.concatenate([a, a]), b, c)
  with pytest.raises(EmulatorError, match="accumulator has 8 elements"): unit_of(name)[0].instruction(name, a, b, c[:8])

# ***** against tinygrad's runtime/ops_python.py: the same Ops.WMMA on the same registers *****

TINYGRAD = [("gfx942", (16, 16, 16), 64, (4, 4, 4), "AMD"), ("gfx950", (16, 16, 32), 64, (8, 8, 4), "AMD"),
            ("gfx1100", (16, 16, 16), 32, (16, 16, 8), "AMD"), ("gfx1201", (16, 16, 16), 32, (8, 8, 8), "AMD"),
            ("sm_80", (8, 16, 16), 32, (8, 4, 4), "CUDA")]

@pytest.mark.parametrize("arch,dims,lanes,sizes,device", TINYGRAD, ids=[x[0] for x in TINYGRAD])
def test_agrees_with_tinygrad(arch, dims, lanes, sizes, device):
  rng = np.random.default_rng(1)
  a, b, c = [rng.integers(-8, 9, (lanes, n)).astype(np.float32) for n in sizes]
  if arch == "gfx1100": a[16:], b[16:] = a[:16], b[:16]
  def kernel(o, a, b, c):
    lane = UOp.range(lanes, 0, AxisType.WARP)
    x, y, z = [u.reshape(lanes, n)[lane].load() for u, n in zip((a, b, c), sizes)]
    out = UOp.wmma(x.cast(dtypes.bfloat16), y.cast(dtypes.bfloat16), z, dims, device, lanes)
    return o.reshape(lanes, sizes[2])[lane].store(out).end(lane).sink(arg=KernelInfo("one_wmma", opts_to_apply=()))
  def on(dev):
    with Context(DEV=f"{dev}::{arch}"):
      o = Tensor.empty(lanes*sizes[2], device=dev)
      return o.custom_kernel(*[Tensor(x.ravel(), device=dev).realize() for x in (a, b, c)], fxn=kernel)[0].numpy()
  got, theirs = on("EMU"), on("PYTHON")
  np.testing.assert_array_equal(got, theirs)
  assert np.abs(got).max() > 0
