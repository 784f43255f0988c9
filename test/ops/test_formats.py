"""Tests of 8-bit formats: all numbers of a format, rounding to the nearest one, and the scales of rows."""
from __future__ import annotations
import math
import numpy as np
import pytest
from attn.ops.formats import FORMATS, SCALES, as_fp16, sizes_of
from attn.tinygrad_compat import Context, Tensor, dtypes
from eight_bits import nearest, numbers_of

def drawn(name:str) -> np.ndarray:
  # numbers of all sizes: random ones, all numbers of the format `name`, midpoints between neighbours, and numbers out of range
  known = np.unique(numbers_of(name)[np.isfinite(numbers_of(name))])
  known, rng = known[np.abs(known) <= FORMATS[name].most], np.random.default_rng(0)
  some = [rng.standard_normal(500)*size for size in (1e-4, 1e-2, 1.0, 30.0, 200.0)]
  return np.concatenate([*some, known, (known[1:] + known[:-1])/2, [0.0, -0.0, 1e30, -1e30]]).astype(np.float32)

@pytest.mark.parametrize("name", FORMATS)
def test_numbers_are_rounded_to_the_nearest_one(name:str) -> None:
  x, format = drawn(name), FORMATS[name]
  with Context(DEV="EMU::gfx942"):
    stored = format.encode(Tensor(x))
    assert stored.dtype == format.dtype
    np.testing.assert_array_equal(format.decode(stored).numpy(), nearest(name, x))
    assert not (stored.numpy().view(np.uint8) == 0x80).any()     # the NaN of fp8e4m3fnuz, or -0

@pytest.mark.parametrize("name", FORMATS)
def test_every_byte_is_read(name:str) -> None:
  byte = np.arange(256).astype(np.uint8)
  with Context(DEV="EMU::gfx942"):
    got = FORMATS[name].decode(Tensor(byte.view(np.int8) if name == "int8" else byte)).numpy()
  np.testing.assert_array_equal(got, numbers_of(name))

@pytest.mark.parametrize("name", FORMATS)
def test_scales_of_rows(name:str) -> None:
  # Rows of zeros get the scale 0. So do rows whose scale would be below the normal fp32 numbers. Rows with NaN or infinity get the scale NaN, and so
  # do rows whose scale is too large for float16. All these rows are stored as zeros.
  format = FORMATS[name]
  rows = np.array([[0, 0], [1, -2], [math.nan, 1], [1, -math.inf], [1e-38, 0], [3e38, -3e38], [70000*format.most, 1], [1e-7, 1e-9]], np.float32)
  with Context(DEV="EMU::gfx942"):
    for dtype in SCALES:
      x = Tensor(rows)
      scale = format.scale_of(sizes_of(x).max(-1, keepdim=True), dtype)
      got, stored, wide = scale.numpy()[:, 0], format.decode(format.stored(x, scale)).numpy(), dtype == dtypes.float
      np.testing.assert_array_equal(got, scale.cast(dtype).numpy()[:, 0])
      assert got[0] == got[4] == 0 and np.isnan(got[2:4]).all() and (np.isnan(got[5:7]) != wide).all()
      kept = [1, 5, 6, 7] if wide else [1, 7]
      np.testing.assert_allclose(got[kept], np.abs(rows[kept]).max(1)/format.most, rtol=2e-7 if wide else 2.0**-11, atol=0 if wide else 2.0**-25)
      assert not stored[[i for i in range(len(rows)) if i not in kept]].any()
      assert (np.abs(stored[kept[:-1]]).max(1) == format.most).all()

def test_scales_of_fp16_are_rounded_to_nearest() -> None:
  # as_fp16 rounds as numpy does: normal and denormal numbers, midpoints, and numbers below the first midpoint.
  half = np.arange(0x7c00).astype(np.uint16).view(np.float16).astype(np.float32)
  x = np.concatenate([half, (half[1:] + half[:-1])/2, np.random.default_rng(0).lognormal(-9, 4, 5000).astype(np.float32)])
  with Context(DEV="EMU::gfx942"): got = as_fp16(Tensor(x)).numpy()
  np.testing.assert_array_equal(got[x < 65520], x[x < 65520].astype(np.float16).astype(np.float32))
  assert (got[x >= 65520] >= 65536).all()
