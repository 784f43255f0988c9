"""Keys and values that are stored in 8 bits: the types, checks, and the conversion in tensor operations."""
from __future__ import annotations
from dataclasses import dataclass
from typing import Any, NamedTuple
from attn import values
from attn.calls.checked_kernel import arch_of
from attn.calls.options import check_out_dtype
from attn.chips import CHIPS
from attn.ops.formats import FORMATS, SCALES, Format, sizes_of
from attn.tinygrad_compat import DType, Tensor, dtypes
from attn.values import FLOATS, static_shape

class QuantizedRows(NamedTuple):
  """Keys or values stored in 8 bits, with a scale for each row: an element is the stored number times the scale of its row. A cache of 8-bit numbers
  holds almost twice as many tokens as a cache of 16-bit numbers. Give one QuantizedRows for K and one for V: as k_cache and v_cache, or as k and v of
  `attention` with kv_lengths or a block_table.

    values   int8, or the bytes of fp8 (uint8), in the chip's format e4m3: a cache such as (B, Hkv, capacity, D), or pages
    scales   float32 or float16, one number for each row: such as (B, Hkv, capacity), the shape of `values` without the last axis. If several rows
             have a scale in common, such as all rows of a head, scales may have any shape that broadcasts to this shape

  A row with a scale of NaN is a row of NaN. Both tensors may be views of larger buffers. TinyJit takes QuantizedRows as it takes a Tensor."""
  values: Tensor
  scales: Tensor

class QuantizedLatent(NamedTuple):
  """Keys of latent attention (MLA) whose first columns are stored in 8 bits. These columns are also V. The last columns, which get the rotary
  embedding, keep 16 bits. A QuantizedLatent is given as k_cache (v_cache is None), or as k (v is None); v_dim is the number of columns of `values`.

    values, scales   as in QuantizedRows: (B, 1, capacity, 512) and (B, 1, capacity) in DeepSeek's models, or pages
    rotary           the last columns, in the dtype of q: (B, 1, capacity, 64). Except for the last axis, rotary has the shape of `values`"""
  values: Tensor
  scales: Tensor
  rotary: Tensor

GivenRows = Tensor|QuantizedRows|QuantizedLatent     # what may be a cache

# ***** formats *****

def own_fp8(name:str, device:str|tuple[str, ...]) -> Format:
  """Returns the format of 8-bit floats that the chip of a device converts by instructions, or raises NotImplementedError if it has none."""
  chip = arch_of(device if isinstance(device, str) else device[0])
  if chip is not None and chip.fp8: return FORMATS[chip.fp8]
  able = ", ".join(x for x, known in CHIPS.items() if known.fp8)
  raise NotImplementedError(f"{name}: {device if chip is None else chip.name} has no instructions that convert 8-bit floats, without which a "
                            f"cache of them is slower than one of 16 bits; int8 is supported everywhere, fp8 on {able}")

def eight_bits(name:str, x:Any, device:str|tuple[str, ...]) -> Format|None:
  """Returns the format of 8 bits that the dtype `x` names, or None if `x` names no such format."""
  called = values.dtype_text(x) if isinstance(x, DType) else x
  if not isinstance(called, str) or called not in FORMATS: return None
  if not FORMATS[called].bias: return FORMATS[called]
  # "fp8e4m3" stands for the chip's format e4m3: OCP's e4m3, or fp8e4m3fnuz on gfx942.
  own = own_fp8(f"{name}={called!r}", device)
  if called in ("fp8e4m3", own.name): return own
  raise NotImplementedError(f"{name}={called!r}: must be {own.name!r}, the 8-bit floats of {device}, or 'int8'")

def check_format(name:str, x:Any, device:str|tuple[str, ...]) -> Format:
  if (found := eight_bits(name, x, device)) is not None: return found
  raise values.wrong(name, x, "'int8', or 'fp8e4m3' for the 8-bit floats of the chip")

def check_scale_dtype(name:str, x:Any) -> DType:
  if (dtype := check_out_dtype(name, x)) in SCALES: return dtype
  raise NotImplementedError(f"{name}={values.dtype_text(dtype)}: must be one of {', '.join(map(values.dtype_text, SCALES))}")

# ***** checks *****

@dataclass(frozen=True)
class Quantized:
  """Checked keys or values of a cache in 8 bits, with one scale for each row."""
  stored: Tensor  # the 8-bit numbers
  scales: Tensor
  format: Format
  rotary: Tensor|None = None     # columns of 16 bits
  shared: bool = False           # whether rows share scales
  @property
  def width(self) -> int:
    """Number of elements of a row, with the rotary columns."""
    return int(self.stored.shape[-1]) + (0 if self.rotary is None else int(self.rotary.shape[-1]))
  @property
  def dtypes_of_new(self) -> tuple[str, ...]:
    """Names of the dtypes that rows may have when they are appended to this cache."""
    # The rotary columns of latent attention are copied to the cache without a conversion.
    return tuple(FLOATS) if self.rotary is None else (values.dtype_text(self.rotary.dtype),)
  @property
  def kind(self) -> str: return f"{self.format.name} with {values.dtype_text(self.scales.dtype)} scales"

def check_quantized(name:str, x:QuantizedRows|QuantizedLatent) -> Quantized:
  """Checks shapes, dtypes and devices of keys or values stored in 8 bits, called `name` in error messages, and returns the checked record."""
  stored, scales = values.tensor(f"{name}.values", x.values), values.tensor(f"{name}.scales", x.scales)
  of_bytes = {format.dtype for format in FORMATS.values()}
  if stored.dtype not in of_bytes:
    raise NotImplementedError(f"{name}.values has dtype {values.dtype_text(stored.dtype)}: must be int8, or uint8 for the bytes of fp8")
  if stored.device is None: raise ValueError(f"{name}.values is a constant without a device: call .contiguous() on a device first")
  format = FORMATS["int8"] if stored.dtype == dtypes.char else own_fp8(f"{name}.values has dtype uint8, the bytes of fp8", stored.device)
  values.dtype_name(f"{name}.scales", scales.dtype, map(values.dtype_text, SCALES))
  shape, given = (static_shape(f"{name}.{part}", t.shape) for part, t in (("values", stored), ("scales", scales)))
  if len(given) >= len(shape) or any(n not in (1, full) for n, full in zip(given[::-1], shape[-2::-1])):
    raise ValueError(f"{name}.scales has shape {given}: must be {shape[:-1]}, one for each row of values, or broadcast to that")
  if scales.device != stored.device:
    raise ValueError(f"{name}.scales is on {scales.device} but values on {stored.device}: both must be on the same device, or the same devices")
  if given == shape[:-1]:
    if scales.uop.axis != stored.uop.axis:
      raise ValueError(f"{name}.scales is sharded along axis {scales.uop.axis}: must be as values, along axis {stored.uop.axis}")
    return Quantized(stored, scales, format, check_rotary(name, x, stored))
  if not isinstance(stored.device, str):
    raise NotImplementedError(f"{name}.scales has shape {given} on several devices: must be {shape[:-1]} there, one for each row of values")
  expanded = scales.reshape(*[1]*(len(shape) - 1 - len(given)), *given).expand(*shape[:-1])
  return Quantized(stored, expanded, format, check_rotary(name, x, stored), shared=True)

def check_rotary(name:str, x:QuantizedRows|QuantizedLatent, stored:Tensor) -> Tensor|None:
  """Checks and returns the rotary columns of a cache for latent attention; returns None for a cache without rotary columns (QuantizedRows)."""
  if isinstance(x, QuantizedRows): return None
  t, want = values.tensor(f"{name}.rotary", x.rotary), static_shape(f"{name}.values", stored.shape)
  values.dtype_name(f"{name}.rotary", t.dtype, FLOATS)
  got = static_shape(f"{name}.rotary", t.shape)
  if got[:-1] != want[:-1] or not got or not got[-1]:
    raise ValueError(f"{name}.rotary has shape {got}: must be that of values, {want}, but for the last axis, which must be at least 1")
  if (t.device, t.uop.axis) != (stored.device, stored.uop.axis):
    raise ValueError(f"{name}.rotary is on {t.device}, sharded along axis {t.uop.axis}: must be as values, on {stored.device}, along axis "
                     f"{stored.uop.axis}")
  return t

def stored_rows(name:str, x:GivenRows) -> Tensor:
  """Returns the tensor in which a cache, called `name` in error messages, stores its rows."""
  return values.tensor(f"{name}.values", x.values) if isinstance(x, (QuantizedRows, QuantizedLatent)) else values.tensor(name, x)

def check_pair(names:tuple[str, str], k:GivenRows, v:GivenRows|None) -> None:
  """Raises ValueError unless the two caches k and v both store 8-bit numbers in one format, or neither does."""
  if v is None:
    if isinstance(k, QuantizedRows):
      raise ValueError(f"{names[0]} is QuantizedRows and {names[1]} None: latent attention (MLA) takes QuantizedLatent, whose rotary columns keep "
                       "16 bits")
    return
  for name, x in zip(names, (k, v)):
    if isinstance(x, QuantizedLatent):
      raise ValueError(f"{name} is QuantizedLatent, and {names[1]} is not None: it holds keys and values, so {names[1]} must be None, with v_dim")
  kinds = [check_quantized(name, x).kind if isinstance(x, QuantizedRows) else values.dtype_text(values.tensor(name, x).dtype)
           for name, x in zip(names, (k, v))]
  if isinstance(k, QuantizedRows) | isinstance(v, QuantizedRows) and kinds[0] != kinds[1]:
    raise ValueError(f"{names[0]} is {kinds[0]} and {names[1]} {kinds[1]}: both must be QuantizedRows of the same format, with scales of one dtype")

# ***** whole tensors *****

def device_of_rows(name:str, x:Tensor) -> str|tuple[str, ...]:
  """Returns the devices of a tensor called `name`, or raises ValueError if the tensor has no rows or no device, or is no float."""
  values.dtype_name(name, values.tensor(name, x).dtype, FLOATS)
  if not x.ndim or 0 in x.shape:
    raise ValueError(f"{name} has shape {values.shown_shape(x.shape)}: must have at least one axis, the elements of a row, and no axis of size 0")
  if x.device is None: raise ValueError(f"{name} is a constant without a device: call .contiguous() on a device first")
  return x.device

@values.names_itself
def quantize_kv(x:Tensor, dtype:DType|str="int8", *, scale_dtype:DType|str=dtypes.float) -> QuantizedRows:
  """Converts keys or values to 8 bits, by tensor operations. Each row (the elements along the last axis) gets a scale.

    rows = attn.quantize_kv(k)                 # rows.values*rows.scales.unsqueeze(-1) is k, except for rounding errors

    x            a tensor of float16, bfloat16 or float32, of any shape (..., D)
    dtype        "int8", or "fp8e4m3": the 8-bit floats of the device's chip, OCP's e4m3, or e4m3fnuz on gfx942
    scale_dtype  dtype of the scales: float32, or float16, which takes half the memory

  The scale of a row is the largest absolute value in the row, divided by the largest number of the format (127 for int8, 448 for e4m3, 240 for
  e4m3fnuz). A stored number is the element divided by the scale, rounded to the nearest number of the format, ties to even. A row of zeros has the
  scale 0. A row with NaN or infinity has the scale NaN, and so has a row whose scale is too large for float16. float16 rounds scales below 6.1e-5
  more coarsely."""
  format, x = check_format("dtype", dtype, device_of_rows("x", x)), x.cast(dtypes.float)
  scales = format.scale_of(sizes_of(x).max(-1, keepdim=True), of_scales := check_scale_dtype("scale_dtype", scale_dtype))
  return QuantizedRows(format.stored(x, scales), scales.squeeze(-1).cast(of_scales))

@values.names_itself
def dequantize_kv(rows:QuantizedRows|QuantizedLatent, dtype:DType|str=dtypes.half) -> Tensor:
  """Converts keys or values stored in 8 bits back to a tensor of `dtype` (float16, bfloat16 or float32), by tensor operations: each stored number
  times the scale of the row. This function is for tests and for moving a cache: kernels read 8-bit numbers without this conversion."""
  if not isinstance(rows, (QuantizedRows, QuantizedLatent)): raise values.wrong("rows", rows, "QuantizedRows or QuantizedLatent")
  x, dtype = check_quantized("rows", rows), check_out_dtype("dtype", dtype)
  found = (x.format.decode(x.stored)*x.scales.cast(dtypes.float).unsqueeze(-1)).cast(dtype)
  return found if x.rotary is None else found.cat(x.rotary.cast(dtype), dim=-1)

@values.names_itself
def rotate(x:Tensor) -> Tensor:
  """Rotates each row (the elements along the last axis) of q or k by a Hadamard matrix, by tensor operations. Scores of rotated queries and rotated
  keys equal the scores before the rotation, except for rounding errors. The rotation spreads a large element over the whole row, so keys with a few
  large columns lose less in int8.

    q, k_new = attn.rotate(q), attn.rotate(k_new)      # before each call of attention_with_kv_cache with a cache of int8

  Rows whose length is not a power of two are rotated in parts. Rotate either all queries and keys or none. fp8 gains nothing (docs/serving.md)."""
  device = device_of_rows("x", x)
  part = (width := static_shape("x", x.shape)[-1]) & -width
  i = Tensor.arange(part, dtype=dtypes.int)
  common = i.reshape(-1, 1) & i
  for shift in (16, 8, 4, 2, 1): common = common ^ (common >> shift)     # its last bit says whether the number of common bits is odd
  sign = (1 - 2*(common & 1)).cast(x.dtype).clone(device if isinstance(device, str) else device[0]).to(device)
  return (x.reshape(*x.shape[:-1], -1, part).matmul(sign, dtype=dtypes.float)*part**-.5).reshape(*x.shape).cast(x.dtype)
