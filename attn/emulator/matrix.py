"""The matrix instructions: how each lays its tiles out over (element, lane), written down from the vendors' documents and not from attn/fragment.py.

Sources: AMD Instinct MI300 ISA section 7.1.4 and CDNA4 ISA section 7.1.4 (dense MFMA, register layouts), RDNA3 ISA section 7.9 and RDNA4 ISA section 7.12
(WMMA), PTX ISA section 9.7.14 (mma.m16n8k8, mma.m16n8k16), AMD Matrix Instruction Calculator.

A layout is data: the element index of a lane and the lane index are each split into named factors, the major one first, and the row and column of the
matrix are the concatenations of such factors. The layout of C in MFMA 32x32 is "ab hn -> ahb n": element r = 4a+b, lane = 32h+n, row = 8a+4h+b, column = n.

Arithmetic: products of 16-bit floats are exact in fp32 and are summed in fp32, in an order that the ISA does not promise; then C is added, once rounded.
Hardware sums in its own order, and on CDNA3 flushes nothing; a kernel must not depend on the last bit. NaN and inf go where a dot product takes them.
"""
from __future__ import annotations
from dataclasses import dataclass, field
from typing import Any, Callable
import functools, re
import numpy as np
from numpy.typing import NDArray
from attn.emulator.alu import bf16_to_float, float_to_bf16
from attn.emulator.checks import EmulatorError

Array = NDArray[Any]

@dataclass(frozen=True)
class Layout:
  """`spec` = "element-factors lane-factors -> row-factors column-factors"; a lane factor that is named neither in row nor column is a duplicate."""
  spec: str
  sizes: tuple[tuple[str, int], ...]
  @functools.cached_property
  def parts(self) -> tuple[str, str, str, str]:
    e, l, r, c = re.fullmatch(r"(\w*) (\w*) -> (\w*) (\w*)", self.spec).groups()   # type: ignore[union-attr]
    return e, l, r, c
  def size(self, factors:str) -> int: return int(np.prod([dict(self.sizes)[x] for x in factors], dtype=int))
  @property
  def elements(self) -> int: return self.size(self.parts[0])
  @property
  def lanes(self) -> int: return self.size(self.parts[1])
  @property
  def duplicate(self) -> str: return "".join(x for x in self.parts[1] if x not in self.parts[2] + self.parts[3])
  @functools.cached_property
  def _split(self) -> tuple[int, ...]: return tuple(dict(self.sizes)[x] for x in self.parts[0]), tuple(dict(self.sizes)[x] for x in self.parts[1])  # type: ignore[return-value]
  @functools.cached_property
  def _axes(self) -> tuple[int, ...]:
    e, l, r, c = self.parts
    place = {x: i for i, x in enumerate(e)} | {x: len(e)+1+i for i, x in enumerate(l)}   # axis len(e) is the wave
    return (len(e), *[place[x] for x in self.duplicate + r + c])

  def to_matrices(self, x:Array) -> Array:
    """(elements, T) -> (waves, rows, columns); duplicates must agree (RDNA3: lanes 16-31 of A and B repeat lanes 0-15)."""
    e, l = self._split
    m = x.reshape(*e, -1, *l).transpose(self._axes)
    if self.duplicate:
      if not np.array_equal(m[:, 0], m[:, 1]): raise EmulatorError(_duplicates(m))
      m = m[:, 0]
    return np.ascontiguousarray(m).reshape(m.shape[0], self.size(self.parts[2]), self.size(self.parts[3]))

  def add_matrices(self, c:Array, m:Array) -> Array:
    """c (elements, T) + the elements of m (waves, rows, columns)."""
    e, l = self._split
    _, _, r, cl = self.parts
    m = m.reshape(-1, *[dict(self.sizes)[x] for x in r + cl]).transpose(np.argsort(self._axes))
    out = np.empty((self.elements, m.size//self.elements), np.result_type(c, m))
    np.add(c.reshape(*e, -1, *l), m, out=out.reshape(*e, -1, *l))
    return out

def _duplicates(m:Array) -> str:
  wave = int(np.argwhere(m[:, 0] != m[:, 1])[0][0])
  return f"WMMA on RDNA3 wants lanes 16-31 of A and B to repeat lanes 0-15 (RDNA3 ISA section 7.9.1), but wave {wave} of those that run has other values there"

def _layout(spec:str, **sizes:int) -> Layout: return Layout(spec, tuple(sizes.items()))

@dataclass(frozen=True)
class Instruction:
  """D = A B + C on one wave; a is M x K, b is given transposed (N x K) so that both put the contraction last."""
  a: Layout
  b: Layout
  c: Layout
  dtype: str                       # of A and B: float16, bfloat16, int8, tfloat32
  families: tuple[str, ...]
  wmma: bool = True                # reachable from Ops.WMMA
  @property
  def dims(self) -> tuple[int, int, int]:   # (N, M, K), as in the arg of Ops.WMMA
    return self.c.size(self.c.parts[3]), self.c.size(self.c.parts[2]), self.a.size(self.a.parts[3])

def _mfma(M:int, E:int, dtype:str, *families:str) -> Instruction:
  """Lane (h, i) holds row i of A, k = E*h + e; D: blocks of 4 rows dealt to the lane groups in turn."""
  groups = 64//M
  ab = _layout("e hi -> i he", e=E, h=groups, i=M)
  return Instruction(ab, ab, _layout("ab hn -> ahb n", a=M*M//64//4, b=4, h=groups, n=M), dtype, families)

def _wmma3(dtype:str) -> Instruction:
  """A lane holds all 16 k of a row of A, lanes 16-31 repeat it; D: even rows in lanes 0-15, odd rows in lanes 16-31."""
  ab = _layout("k di -> i k", k=16, d=2, i=16)
  return Instruction(ab, ab, _layout("r hn -> rh n", r=8, h=2, n=16), dtype, ("rdna3",))

def _wmma4(dtype:str) -> Instruction:
  """Lane half h holds k = 8h + e (e < 8) of A and B, and rows 8h + r of D."""
  ab = _layout("e hi -> i he", e=8, h=2, i=16)
  return Instruction(ab, ab, _layout("r hn -> hr n", r=8, h=2, n=16), dtype, ("rdna4",))

def _mma(K:int, pack:int, dtype:str) -> Instruction:
  """PTX fragments of m16n8: groupID g = lane/4, t = lane%4; A element = (c, r, p): row 8r+g, k = (c, t, p); B: column g; C: (r, p): row 8r+g, column 2t+p."""
  c = K//(4*pack)
  return Instruction(_layout("crp gt -> rg ctp", c=c, r=2, p=pack, g=8, t=4), _layout("cp gt -> g ctp", c=c, p=pack, g=8, t=4),
                     _layout("rp gt -> rg tp", r=2, p=2, g=8, t=4), dtype, ("nvidia",))

INSTRUCTIONS: dict[str, Instruction] = {
  "mfma_f32_32x32x8f16": _mfma(32, 4, "float16", "cdna3", "cdna4"), "mfma_f32_32x32x8bf16_1k": _mfma(32, 4, "bfloat16", "cdna3", "cdna4"),
  "mfma_f32_16x16x16f16": _mfma(16, 4, "float16", "cdna3", "cdna4"), "mfma_f32_16x16x16bf16_1k": _mfma(16, 4, "bfloat16", "cdna3", "cdna4"),
  "mfma_f32_32x32x16_f16": _mfma(32, 8, "float16", "cdna4"), "mfma_f32_32x32x16_bf16": _mfma(32, 8, "bfloat16", "cdna4"),
  "mfma_f32_16x16x32_f16": _mfma(16, 8, "float16", "cdna4"), "mfma_f32_16x16x32_bf16": _mfma(16, 8, "bfloat16", "cdna4"),
  "wmma_f32_16x16x16_f16_w32": _wmma3("float16"), "wmma_f32_16x16x16_bf16_w32": _wmma3("bfloat16"), "wmma_i32_16x16x16_iu8_w32": _wmma3("int8"),
  "wmma_f32_16x16x16_f16_w32_gfx12": _wmma4("float16"), "wmma_f32_16x16x16_bf16_w32_gfx12": _wmma4("bfloat16"),
  "mma_m16n8k16_f16": _mma(16, 2, "float16"), "mma_m16n8k16_bf16": _mma(16, 2, "bfloat16"), "mma_m16n8k8_f16": _mma(8, 2, "float16"),
  "mma_m16n8k8_tf32": _mma(8, 1, "tfloat32"),
}

_HALF = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)   # every fp16 value

_WIDEN: dict[str, Callable[[Array], Array]] = {
  "float16": lambda x: _HALF.take(x.view(np.uint16)), "bfloat16": bf16_to_float,
  "int8": lambda x: x.astype(np.float64),                                            # exact: 16 products below 2^14
  "tfloat32": lambda x: (x.view(np.uint32) & np.uint32(0xffffe000)).view(np.float32),  # mma.tf32 reads the upper 19 bits
}

def _unpack(x:Array) -> Array:
  """uint32 (registers, T) -> uint16 (elements, T), the low half first."""
  halves = np.ascontiguousarray(x).view(np.uint16).reshape(x.shape[0], -1, 2)
  return np.ascontiguousarray(halves.transpose(0, 2, 1)).reshape(2*x.shape[0], -1)

@dataclass
class MatrixUnit:
  """The matrix unit of one architecture family. Operands that come again (Q in a loop over keys, P for each slice of V) are widened only once."""
  family: str
  arch: str
  _recent: dict[tuple[int, int], tuple[Array, Array]] = field(default_factory=dict)

  def _operand(self, x:Array, layout:Layout, dtype:str, packed:bool) -> Array:
    if (hit := self._recent.get(key := (id(x), id(layout)))) is not None: return hit[1]
    raw = _unpack(x) if packed else x
    if raw.shape[0] != layout.elements: raise EmulatorError(f"a matrix operand has {raw.shape[0]} elements a lane, the instruction wants {layout.elements}")
    m = _WIDEN[dtype](layout.to_matrices(raw))
    while len(self._recent) >= 64: self._recent.pop(next(iter(self._recent)))
    self._recent[key] = x, m
    return m

  def _run(self, i:Instruction, a:Array, b:Array, c:Array, packed:bool) -> Array:
    if c.shape[0] != i.c.elements: raise EmulatorError(f"a matrix accumulator has {c.shape[0]} elements a lane, the instruction wants {i.c.elements}")
    product = self._operand(a, i.a, i.dtype, packed) @ self._operand(b, i.b, i.dtype, packed).transpose(0, 2, 1)
    return i.c.add_matrices(c, product)

  def instruction(self, name:str, a:Array, b:Array, c:Array) -> Array:
    """The instruction by its builtin's stem, on packed register images: a and b uint32 (registers, T), c fp32 (registers, T)."""
    i = INSTRUCTIONS.get(name)
    if i is None or self.family not in i.families:
      have = ", ".join(n for n, x in INSTRUCTIONS.items() if self.family in x.families)
      raise EmulatorError(f"{self.arch} has no matrix instruction {name!r}; it has {have}")
    return self._run(i, a, b, c, True)

  def wmma(self, dims:tuple[int, int, int], dtype:str, a:Array, b:Array, c:Array, out:str) -> Array:
    """Ops.WMMA: dims (N, M, K), operands with one array row per element; `out` is the type of C and D."""
    i = next((x for x in INSTRUCTIONS.values() if self.family in x.families and x.dims == tuple(dims) and x.dtype == dtype), None)
    if i is None: raise EmulatorError(f"{self.arch} has no matrix instruction for (N, M, K) = {dims} on {dtype}")
    wide = {"bfloat16": bf16_to_float, "float16": lambda x: x.astype(np.float32), "int32": lambda x: x.astype(np.float64)}.get(out, lambda x: x)
    narrow = {"bfloat16": float_to_bf16, "float16": lambda x: x.astype(np.float16), "int32": lambda x: x.astype(np.int64).astype(np.int32)}.get(out, lambda x: x)
    return narrow(self._run(i, a, b, wide(c), False))
