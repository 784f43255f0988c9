"""Tests that an operation's HIP and CUDA source, compiled for this machine with stand-ins for the GPU's builtins, agrees with its numpy function,
which the emulator runs."""
from __future__ import annotations
import ctypes, functools, itertools, re, subprocess, sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
import numpy as np
import pytest
from attn.chips import get_chip
from attn.chips.matrix import MMA
from attn.emulator.chips import EMULATED, SATURATING
from attn.emulator.matrix import MatrixUnit
from attn.functions.symbols import KEY, QUERY
from attn.kernels.parts.weights.softmax import Sums
from attn.ops import amd, common as ops, dropout, numerics, nvidia as nv
from attn.ops.branches import ACROSS_LANES
from attn.ops.language import KernelText
from attn.ops.operation import Call
from attn.ops.pairs import PairOperands, keep_seen, pair_condition
from attn.ops.renderers import C_NAMES, OperationsHIPCCRenderer, OperationsNVCCRenderer, c_type, vector_types
from attn.kernels.tiles.wgmma import WGMMA
from attn.ops.numerics import IN_A_DWORD
from attn.ops.softmax import (LANE, LOWEST, ONES, UNPACKED, UNSCALED, RowLanes, correct, lane_sum, raised, rescale, rounded_sum, scaled_weights,
                              sum_without_scales, weigh, weights_from)
from attn.ops.stored import scale_in_range, widen_all, widen_pair, zero_or_nan
from attn.score.alibi import alibi
from attn.score.softcap import softcap
from attn.tinygrad_compat import VECTORS, AddrSpace, Ops, Target, UOp, dtypes
from gpu_stand_ins import ASSEMBLY, CUDA, EXCHANGES, HIP, LOCKSTEP

# Compound operations are tested, too: from a single definition, attn/ops/language.py makes their HIP and CUDA source, numpy function, and plain
# UOps. Each lane has its own operands, so the result is wrong if an operation takes a value from a wrong lane.

WAVES = 8     # waves in each test
NUMPY = {dtypes.float: np.float32, dtypes.uint: np.uint32, dtypes.int: np.int32, dtypes.bool: np.bool_}

# ***** the cases *****

def value(dtype, slot:int) -> UOp:
  # an operand in a register; each operand of an operation needs another `slot`
  return UOp.placeholder((1,), dtype, slot, AddrSpace.REG)[0].load()

def f(n:int=1, slot:int=0) -> UOp: return value(ops.f32(n), slot)
def u(n:int=1, slot:int=0) -> UOp: return value(ops.u32(n), slot)
def i(slot:int=0) -> UOp: return value(dtypes.int, slot)

def array(count:int, n:int, slot:int) -> UOp:
  # an operand that is a register array of `count` vectors of n fp32 elements; each operand needs another `slot`
  return UOp.placeholder((count,), ops.f32(n), slot, AddrSpace.REG)

AMD, RDNA, NATIVE, NVIDIA = "gfx942", "gfx1201", "gfx950", "sm_80"     # NATIVE has an instruction that rounds to bf16
HIPS, ALL = (AMD, RDNA), (AMD, RDNA, NVIDIA)
OFFSETS = (0, 1, 2, 3, 8, 9, 10, 11)

def common(n:int) -> dict[str, Callable[[], UOp]]:
  # test cases by name: for each operation that all vendors' kernels use, a function that makes its UOp on vectors of n elements
  offsets = OFFSETS[:n]
  return {
    "splat": lambda: ops.splat(1.5, n), "splat of a value": lambda: ops.splat(f(), n), "build": lambda: ops.build(f(1, 0), f(1, 1)),
    "build of dwords": lambda: ops.build(u(1, 0), u(1, 1)), "extract": lambda: ops.extract(f(n), n//2 + 1),
    "slice": lambda: ops.slice_(f(n), n//2, n//2), "concat": lambda: ops.concat(f(n//2, 0), f(n//2, 1)),
    "concat of dwords": lambda: ops.concat(u(n//2, 0), u(n//2, 1)),
    "add": lambda: ops.add(f(n, 0), f(n, 1)), "sub": lambda: ops.sub(f(n, 0), f(n, 1)), "sub of scalars": lambda: ops.sub(f(1, 0), f(1, 1)),
    "sub by a scalar": lambda: ops.sub(f(n, 0), f(1, 1)), "sub from a scalar": lambda: ops.sub(f(1, 0), f(n, 1)),
    "mul": lambda: ops.mul(f(n), 0.37), "mul by a scalar": lambda: ops.mul(f(n, 0), f(1, 1)), "mul of vectors": lambda: ops.mul(f(n, 0), f(n, 1)),
    "exp2": lambda: ops.exp2(f(n)), "exp2 of a scalar": lambda: ops.exp2(f()), "log2": lambda: ops.log2(f()), "rcp": lambda: ops.rcp(f()),
    "rcp of a vector": lambda: ops.rcp(f(n)), "max": lambda: ops.max_(f(1, 0), f(1, 1)), "max of vectors": lambda: ops.max_(f(n, 0), f(n, 1)),
    "add_product": lambda: ops.add_product(f(n, 0), f(n, 1), f(4), 2), "fma": lambda: ops.fma(f(n, 0), 0.3, f(n, 1)),
    "as_float": lambda: ops.as_float(u(n)), "as_float of one": lambda: ops.as_float(u()),
    "pack to fp16": lambda: ops.pack(f(n), "float16"), "pack to bf16": lambda: ops.pack(f(n), "bfloat16"),
    "pack a pair to fp16": lambda: ops.pack(f(2), "float16"), "pack a pair to bf16": lambda: ops.pack(f(2), "bfloat16"),
    **{f"pack P to {dtype}": lambda dtype=dtype: ops.pack_weights(ops.max_(f(n), ops.splat(-1.0, n)), dtype) for dtype in ("float16", "bfloat16")},
    **{f"widen {m} {dtype}": lambda m=m, dtype=dtype: ops.widen_to_float(u(max(m//2, 1)), m, dtype)
       for m in (1, 2, 4) for dtype in ("float16", "bfloat16")},
    "softcap": lambda: softcap(f(n), 0.05, 30.0, 0), "softcap that hardly bends": lambda: softcap(f(n), 0.0005, 3000.0, 4),
    "softcap for fp32": lambda: softcap(f(n), 0.05, 30.0, 10),
    "alibi": lambda: alibi(f(n, 0), f(1, 1), i(2), offsets), "alibi further on": lambda: alibi(f(2, 0), f(1, 1), i(2), (8, 9)),
    "mask_above": lambda: ops.mask_above(f(n, 0), i(1), offsets), "mask_beyond": lambda: ops.mask_beyond(f(n, 0), i(1), i(2), offsets),
    "clear_beyond": lambda: ops.clear_beyond(f(n, 0), i(1), i(2), offsets),
    "mask_above further on": lambda: ops.mask_above(f(2, 0), i(1), (4, 5)),
    "mask_beyond further on": lambda: ops.mask_beyond(f(2, 0), i(1), i(2), (4, 5)),
    "weights": lambda: ops.weights(f(n, 0), f(1, 1), 0.18), "weights of two rows": lambda: ops.weights(f(4, 0), f(2, 1), 0.18),
    "weights_from": lambda: weights_from(f(n, 0), f(1, 1), 0.18), "weights_from of two rows": lambda: weights_from(f(4, 0), f(2, 1), 0.18),
    "raised": lambda: raised(f(1, 0), f(1, 1), 0.18, 0.5), "raised of two rows": lambda: raised(f(2, 0), f(2, 1), 0.18, 0.5),
    "rescale": lambda: rescale(array(4, n, 0), array(2, 1, 1)), "rescale of two rows": lambda: rescale(array(4, 4, 0), array(2, 2, 1)),
    "lane_sum": lambda: lane_sum(f(2, 0), f(n, 1), 1), "lane_sum of two rows": lambda: lane_sum(f(2, 0), f(4, 1), 2),
    "uniform": lambda: ops.uniform(i()),
  }

def of_dropout(n:int) -> dict[str, Callable[[], UOp]]:
  # test cases by name: for each operation of dropout, a function that makes its UOp on vectors of n elements
  return {
    "kept_octet": lambda: dropout.kept_octet((u(1, 0), u(1, 1)), *[u(1, slot) for slot in range(2, 6)], 0.3),
    "drop_packed": lambda: dropout.drop_packed(u(n//2, 0), u(2, 1), tuple((j % 2, 3*j) for j in range(n//2)), 0),
    "drop_numbers": lambda: dropout.drop_numbers(f(n, 0), u(1, 1), tuple((0, 4*j + 1) for j in range(n)), 0),
    **{f"lane_bits{' alternate'*odd}": lambda odd=odd: dropout.lane_bits(u(), UOp.const(5, dtypes.uint), odd) for odd in (False, True)},
  }

def of_scales(n:int) -> dict[str, Callable[[], UOp]]:
  # test cases by name: for each operation on scales of 8-bit rows, a function that makes its UOp on vectors of n elements
  return {
    "scale_in_range": lambda: scale_in_range(f(n)), "zero_or_nan": lambda: zero_or_nan(f(n)),
    "scaled_weights": lambda: scaled_weights(f(n, 0), f(n, 1)), "scaled_weights of two rows": lambda: scaled_weights(f(4, 0), f(2, 1), 2),
    **{f"sum_without_scales, {dtype}": lambda dtype=dtype: sum_without_scales(f(1, 0), u(n//2, 1), f(n, 2), f(n, 3), dtype)
       for dtype in ("float16", "bfloat16")},
    "sum_without_scales of two rows": lambda: sum_without_scales(f(2, 0), u(2, 1), f(4, 2), f(2, 3), "float16"),
  }

def corrected(rows:RowLanes, tiles:int, shapes:dict[str, tuple[int, int]], matrix:Any=None, **options:Any) -> UOp:
  # the operation `correct` as a UOp to be tested, on `tiles` tiles of scores, with operands of the sizes `shapes`
  # `shapes` has for each operand the number of vectors in a tile, and of elements in a vector. `matrix` is the matrix instruction that sums P, or
  # None.
  def place(slot:int, name:str) -> UOp:
    count, n = shapes[name]
    return UOp.placeholder((count*tiles,), ops.u32(n) if name == "p" else ops.f32(n), slot, AddrSpace.REG)
  operands = {name: place(slot, name) for slot, name in enumerate(shapes)}
  if (scales := operands.pop("scales", None)) is not None: options["scales"] = scales
  return correct(*operands.values(), rows=rows, matrix=matrix, **options)

def sum_of(arch:str, dtype:str) -> tuple[str, Any]:
  # how kernels for an AMD chip sum the rounded P: the kind of sum, and its matrix instruction (None: dot products)
  sums = Sums.of(get_chip(arch), dtype, False)
  return sums.kinds[0], sums.matrix

def by_columns(arch:str, tiles:int, above:float, dtype:str, scale:float=0.18, lse:bool=True, scaled:bool=False) -> UOp:
  # the operation `correct` as a UOp to be tested, as AMD's kernels use it: all scores of a lane belong to one row
  # With above=0, P is computed again if a score exceeds the reference. `tiles` is the number of tiles of queries. With `lse`, the unrounded P is
  # summed, too. With `scaled`, packed P includes the scales of V's rows.
  matrix = get_chip(arch).matrix[dtype][0]
  n, (kind, sums) = matrix.accumulator, sum_of(arch, dtype)
  kinds = (kind, *[UNSCALED]*scaled, *[LANE]*lse)
  shapes = dict(reference=(1, 1), bias=(1, 1), l=(len(kinds), 1), acc=(2, n), p=(2, n//IN_A_DWORD[dtype]), scores=(2, n), part=(len(kinds), 1))
  if scaled: shapes |= {"scales": (2, n)}
  rows = RowLanes(1, matrix.group_steps, matrix.exchange)
  return corrected(rows, tiles, shapes, sums, dtype=dtype, sums=kinds, scale=scale, above=above)

def by_rows(sums:tuple[str, ...], dtype:str="float16", scale:float=0.18, above:float=8.0, tiles:int=2, **part:int) -> UOp:
  # the operation `correct` as a UOp to be tested, as NVIDIA's kernels use it: a lane has scores of two rows
  # two tiles of scores become one tile of P; `sums` names the sums of P
  kinds = len(sums)
  shapes = dict(reference=(1, 2), bias=(1, 2), l=(kinds, 2), acc=(3, 4), p=(4//IN_A_DWORD[dtype], 4), scores=(4, 4), part=(kinds, 2))
  if UNSCALED in sums: shapes |= {"scales": (4, 2)}
  return corrected(nv.ROW_LANES, tiles, shapes, WGMMA[dtype], dtype=dtype, sums=sums, scale=scale, above=above, **part)

def weighed(sums:tuple[str, ...], dtype:str) -> UOp:
  # the operation `weigh` as a UOp to be tested, as the wgmma kernel uses it
  # a lane has elements of two rows, and two tiles of scores become one tile of P
  shapes = dict(reference=(1, 2), bias=(1, 2), p=(4//IN_A_DWORD[dtype], 4), scores=(4, 4), part=(len(sums), 2))
  registers = [UOp.placeholder((2*count,), ops.u32(n) if name == "p" else ops.f32(n), slot, AddrSpace.REG)
               for slot, (name, (count, n)) in enumerate(shapes.items())]
  return weigh(*registers, rows=nv.ROW_LANES, dtype=dtype, sums=sums, matrix=WGMMA[dtype], scale=0.18)

PAIRS = {     # conditions of a query i and a key j, where the key is the column
  "neighbourhood": lambda i, j: (i//16 - j//16).abs() + (i%24 - j%24).abs() < 5,
  "steps": lambda i, j: ((i - j) % 3).eq(0) | ((i + j)//4).eq(1) | ((i - j)//3).ne(j % 4),
  "choice": lambda i, j: (j < 6).where(i.eq(j), (i ^ j) < 4) & (i > 0)}

def pairs_of(name:str, limited:tuple[str, ...]) -> PairOperands:
  """Makes operands of an operation on pairs, for a condition of PAIRS. Each number of a row is drawn by itself."""
  found = pair_condition(PAIRS[name](QUERY, KEY), KEY)
  assert found is not None
  slots = itertools.count(2)
  numbers = [[i(next(slots)) for _ in of] for _ in range(nv.ROWS) for of in (found.rows, limited)]
  distances = tuple(8*n + column for n in range(3) for column in (4, 5))     # columns are drawn from -4 on, and no key lies before 0
  return PairOperands(found, i(next(slots)), (numbers[0], numbers[2]), (numbers[1], numbers[3]), limited, [], distances)

MIDDLE = dict(first=2, count=2)
CASES:dict[tuple[str, str], Callable[[], UOp]] = {
  **{(arch, name): make for arch in HIPS for name, make in common(8).items()},
  **{(NVIDIA, name): make for name, make in common(4).items()},
  **{(NATIVE, name): common(8)[name] for name in ("pack to bf16", "pack a pair to bf16", "pack to fp16")},
  **{(arch, "byte_perm"): lambda: amd.byte_perm(u(1, 0), u(1, 1), 0x07060302) for arch in HIPS},
  **{(arch, "byte_perm of low halves"): lambda: amd.byte_perm(u(1, 0), u(1, 1), 0x05040100) for arch in HIPS},
  **{(arch, "concat of halves of 16"): lambda: ops.concat(ops.slice_(f(16), 8, 8), ops.slice_(f(16), 0, 8)) for arch in HIPS},
  ("gfx1100", "share_halves"): lambda: amd.share_halves(u(4, 0), value(dtypes.bool, 1)), ("gfx1100", "low_lanes"): lambda: amd.low_lanes(u(4)),
  ("gfx1100", "side_by_side"): lambda: amd.side_by_side(f(8)),
  **{(arch, f"pair by {matrix.exchange} over {step} lanes"): lambda matrix=matrix, step=step: amd.pair(f(), step, matrix)
     for arch in (AMD, NATIVE, "gfx1100", RDNA) for row in get_chip(arch).matrix.values() for matrix in row for step in matrix.group_steps},
  **{(arch, f"correct, {tiles} tiles, above {above:g}, {dtype}"): functools.partial(by_columns, arch, tiles, above, dtype)
     for arch in (AMD, NATIVE, RDNA) for tiles in (1, 2) for above in (0.0, 2.0) for dtype in ("float16", "bfloat16")},
  **{(arch, f"correct without an lse, {dtype}"): functools.partial(by_columns, arch, 2, 2.0, dtype, lse=False)
     for arch in (AMD, NATIVE) for dtype in ("float16", "bfloat16")},
  **{(arch, f"rounded_sum, {dtype}"): lambda arch=arch, dtype=dtype: rounded_sum([u(4, 0), u(4, 1)], *sum_of(arch, dtype), dtype, 1)
     for arch in ("gfx90a", AMD, NATIVE, RDNA) for dtype in ("float16", "bfloat16")},
  (AMD, "correct, huge scores"): functools.partial(by_columns, AMD, 1, 2.0, "float16", 4e4),
  (NVIDIA, "correct, exact sums"): functools.partial(by_rows, (ONES, LANE), scale=1.5),
  (NVIDIA, "correct, exact sums, in the middle"): functools.partial(by_rows, (ONES, LANE), **MIDDLE),
  (NVIDIA, "correct, sums of ones, in the middle"): functools.partial(by_rows, (ONES,), **MIDDLE),
  (NVIDIA, "correct, sums of ones, bf16"): functools.partial(by_rows, (ONES,), "bfloat16", tiles=1),
  (NVIDIA, "correct, sums of ones, huge scores"): functools.partial(by_rows, (ONES,), scale=4e4),
  (NVIDIA, "weigh, exact sums"): functools.partial(weighed, (ONES, LANE), "float16"),
  (NVIDIA, "weigh, a lane's sums, bf16"): functools.partial(weighed, (LANE,), "bfloat16"),
  (NVIDIA, "correct, a lane's sums"): functools.partial(by_rows, (LANE,), tiles=1),
  (NVIDIA, "correct, a lane's sums, bf16, huge scores"): functools.partial(by_rows, (LANE,), "bfloat16", 4e4, tiles=1),
  **{(NVIDIA, f"rounded_sum, {dtype}"): lambda dtype=dtype: rounded_sum([u(4, 0), u(4, 1)], ONES, MMA[dtype], dtype, nv.ROWS) for dtype in MMA},
  **{(NVIDIA, f"mma, {dtype}, half {half}"): lambda dtype=dtype, half=half: nv.mma(MMA[dtype], u(4, 0), u(4, 1), half, f(4, 2))
     for dtype in MMA for half in range(2)},
  **{(NVIDIA, f"pack_a, {dtype}"): lambda dtype=dtype: nv.pack_a([f(4, 0), f(4, 1)], dtype) for dtype in MMA},
  (AMD, "pack to fp8"): lambda: ops.pack(f(8), "fp8e4m3fnuz"), (NVIDIA, "pack to fp8"): lambda: ops.pack(f(4), "fp8e4m3"),
  (NVIDIA, "pack_a, fp8"): lambda: nv.pack_a([f(4, i) for i in range(4)], "fp8e4m3"), (NVIDIA, "columns_apart"): lambda: nv.columns_apart(u(4)),
  (AMD, "rounded_sum, fp8"): lambda: rounded_sum([u(4, 0), u(4, 1)], UNPACKED, None, "fp8e4m3fnuz", 1),
  (AMD, "correct, fp8"): functools.partial(by_columns, AMD, 2, 8.0, "fp8e4m3fnuz"),
  (NVIDIA, "correct, fp8"): functools.partial(by_rows, (LANE,), "fp8e4m3"),
  (NVIDIA, "weigh, fp8"): functools.partial(weighed, (LANE,), "fp8e4m3"),
  (NVIDIA, "zero"): lambda: nv.zero(f()), (NVIDIA, "clear"): lambda: nv.clear(array(3, 4, 0)),
  **{(NVIDIA, f"row_unit, {dtype}, row {row}"): lambda dtype=dtype, row=row: nv.row_unit([f(4, slot) for slot in range(4)], row, f(1, 4), dtype)
     for dtype in MMA for row in range(nv.ROWS)},
  **{(arch, f"mask_rows {side}"): lambda n=n, side=side: ops.mask_rows(array(3, n, 0), [i(1), i(2)], side, tuple(range(n//2)), 2)
     for arch, n in ((AMD, 8), (NVIDIA, 4)) for side in ("above", "below")},
  **{(NVIDIA, f"keep_seen, {name}"): lambda name=name, limited=limited: keep_seen(
      array(3, 4, 0), value(dtypes.bool, 1), pairs_of(name, limited), f(1, 99)) for name, limited in zip(PAIRS, (("first", "last"), (), ("last",)))},
  **{(NVIDIA, f"xor_lane {mask}"): lambda mask=mask: nv.xor_lane(f(), mask) for mask in (1, 2, 16)},
  (NVIDIA, "opaque_uniform"): lambda: ops.opaque_uniform(i()),
  **{(arch, name): make for arch, n in ((AMD, 8), (RDNA, 8), (NVIDIA, 4)) for name, make in of_dropout(n).items()},
  **{(arch, f"together over {steps} by {how}"): lambda steps=steps, how=how: dropout.together(u(), UOp.const(3, dtypes.uint), steps, how)
     for arch, steps, how in ((AMD, (32,), "bpermute"), (NATIVE, (16, 32), "permlane_swap"), (RDNA, (16,), "permlanex16"),
                              (NVIDIA, (1, 2), "shuffle"))},
  **{(arch, f"transposed_bits by {how}"): lambda steps=steps, how=how: dropout.transposed_bits(u(1, 0), u(1, 1), steps, how)
     for arch, steps, how in ((AMD, (1, 2, 4), "neighbours"), (RDNA, (1, 2, 4), "neighbours"), (NVIDIA, (4, 8, 16), "shuffle"))},
  **{(arch, name): make for arch, n in ((AMD, 8), (RDNA, 8), (NVIDIA, 4)) for name, make in of_scales(n).items()},
  **{(arch, f"correct with scales, {dtype}"): functools.partial(by_columns, arch, 1, 2.0, dtype, scaled=True)
     for arch in (AMD, RDNA) for dtype in ("float16", "bfloat16")},
  (NVIDIA, "correct with scales"): functools.partial(by_rows, (ONES, UNSCALED, LANE)),
  (NVIDIA, "correct with scales, in the middle"): functools.partial(by_rows, (ONES, UNSCALED), "bfloat16", **MIDDLE),
  **{(arch, f"widen int8 to {dtype}"): lambda dtype=dtype: widen_all(u(2), "int8", dtype) for arch in HIPS for dtype in MMA},
  **{(NVIDIA, f"widen bytes {places} of int8 to {dtype}"): lambda places=places, dtype=dtype: widen_pair(u(), places, "int8", dtype)
     for places in ((0, 1), (2, 3), (0, 2), (1, 3)) for dtype in MMA},
}

# ***** operands *****

def parts(x:UOp) -> bool:
  # whether a UOp belongs to the operation under test, and is not one of its operands
  return isinstance(x.arg, Call) or (x.op in (Ops.ADD, Ops.SUB, Ops.MUL) and x.dtype not in (dtypes.int, dtypes.weakint))

def operands(x:UOp) -> Iterator[UOp]:
  # yields the operands of an operation under test, given as a UOp, in order
  seen = dict[UOp, None]()
  def visit(y:UOp) -> None:
    if not parts(y): seen[y] = None
    else:
      for s in y.src: visit(s)
  visit(x)
  return iter(seen)

def constant(x:UOp) -> float|None:
  # the value of an operand that is a constant, or None
  while x.op is Ops.CAST: x = x.src[0]
  return x.arg if x.op is Ops.CONST else None

@dataclass(frozen=True)
class Registers:
  # array of registers, from its element `first` on, in the form in which the emulator passes registers to an operation
  elements: list[np.ndarray]
  first: int

class Wave:
  # stand-in for the object (`Lanes`) through which operations use the emulator
  def __init__(self, arch:str):
    self.wave, self.unit = EMULATED[arch].wave, MatrixUnit(EMULATED[arch].family, arch)
    self.active, self.saturates = np.ones(WAVES*self.wave, np.bool_), EMULATED[arch].family in SATURATING
  def load_register(self, pointer:Registers, i:int) -> np.ndarray: return pointer.elements[pointer.first + i]
  def store_register(self, pointer:Registers, i:int, value:np.ndarray, gate:np.ndarray) -> None:
    pointer.elements[pointer.first + i] = np.where(gate, value, pointer.elements[pointer.first + i])
  def matrix(self, name:str, a:np.ndarray, b:np.ndarray, c:np.ndarray) -> np.ndarray: return self.unit.instruction(name, a, b, c)
  def dot(self, a:np.ndarray, b:np.ndarray, c:np.ndarray, dtype:str) -> np.ndarray: return self.unit.dot(a, b, c, dtype)

def size(dtype) -> int: return VECTORS[dtype][1] if dtype in VECTORS else 1
def numpy_type(dtype) -> np.dtype: return np.dtype(VECTORS[dtype][0] if dtype in VECTORS else NUMPY[dtype])

def draw(dtype, wave:int, rng:np.random.Generator) -> np.ndarray:
  # random values (threads, elements)
  n, threads = size(dtype), WAVES*wave
  if dtype is dtypes.bool: return rng.integers(0, 2, (threads, 1)).astype(np.bool_)
  if dtype is dtypes.int: return rng.integers(-4, 14, (threads, 1), dtype=np.int32)
  if numpy_type(dtype) == np.uint32: return rng.standard_normal((threads, 2*n)).astype(np.float16).view(np.uint32)   # pairs of 16-bit floats
  # each wave has numbers of another magnitude; later waves also have the special values that occur in a softmax
  x = (rng.standard_normal((threads, n))*np.repeat([0.01, 0.1, 1, 40, 1, 1, 1, 40], wave)[:, None]).astype(np.float32)
  later = x[4*wave:]
  for special in (-np.inf, 0, 65504, 1 + 2.0**-8, 1 + 3*2.0**-8, LOWEST):     # 1 + 2^-8 is a tie between two bf16 numbers
    later[rng.integers(len(later), size=2), rng.integers(n, size=2)] = special
  x[6*wave + 3, 0] = x[7*wave + 5, -1] = np.nan
  return x

def given(x:UOp, place:int, arch:str, rng:np.random.Generator) -> np.ndarray:
  # random values of an operand: (threads, elements), or (threads, count, elements) for an array of registers
  wave = EMULATED[arch].wave
  if (number := constant(x)) is not None: return np.full((WAVES*wave, 1), number, numpy_type(x.dtype))
  if x.op is not Ops.INDEX: return draw(x.dtype, wave, rng)
  drawn = np.stack([draw(x.dtype, wave, rng) for _ in range(x.src[0].max_numel())], 1)
  if place == 0: drawn[:wave] = 50     # no score of this wave exceeds the reference
  return np.ascontiguousarray(drawn)

def columns(x:np.ndarray) -> np.ndarray:
  # transposes (threads, elements) to (elements, threads), the form that an operation's numpy function takes
  return x.T.copy() if x.shape[1] > 1 else x[:, 0].copy()

def rows(x:np.ndarray, n:int, threads:int) -> np.ndarray: return np.broadcast_to(x, (n, threads)).T if n > 1 else np.broadcast_to(x, threads)[:, None]

def meaning(x:UOp, lanes:Wave, values:dict[UOp, Any]) -> Any:
  if x in values: return values[x]
  sources = [meaning(s, lanes, values) for s in x.src]
  if isinstance(x.arg, Call): return x.arg.meaning(lanes, *sources)
  with np.errstate(all="ignore"): return {Ops.ADD: np.add, Ops.SUB: np.subtract, Ops.MUL: np.multiply}[x.op](*sources)

# ***** the libraries *****

def language(arch:str) -> str: return "cuda" if arch.startswith("sm_") else "hip"

def ctype(dtype) -> str: return C_NAMES.get(dtype, dtype.name)

def function(number:int, arch:str, x:UOp) -> str:
  # the text of a C++ function that computes the operation x in every thread, from its HIP or CUDA source
  # the text is a namespace of its own, so that the functions of different operations do not clash
  if language(arch) == "cuda": renderer:Any = OperationsNVCCRenderer(Target("CUDA", "NVCC", arch))
  else: renderer = OperationsHIPCCRenderer(Target("AMD", "HIPCC", arch))
  renderer.operations, renderer.r = KernelText(language(arch), arch), {}
  copies, back, parameters = [], [], []
  for j, s in enumerate(operands(x)):
    name, kind = f"a{j}", c_type(s).rstrip("*")
    parameters.append(f"{kind}* {name}")
    if s.op is not Ops.INDEX: renderer.r[s] = f"{name}[at]"
    else:
      count = s.src[0].max_numel()
      renderer.r[s] = f"(r{j}+{constant(s.src[1])})"
      copies.append(f"{kind} r{j}[{count}]; memcpy(r{j}, {name} + at*{count}, sizeof(r{j}));")
      back.append(f"memcpy({name} + at*{count}, r{j}, sizeof(r{j}));")
  def text(y:UOp) -> str:
    if y not in renderer.r:
      for s in y.src: text(s)
      renderer.r[y] = renderer.string_rewrite.rewrite(y, ctx=renderer)
    return renderer.r[y]
  code, out = text(x), ctype(x.dtype)
  functions = "\n".join(renderer.operations.functions.values())
  for assembly, stand_in in ASSEMBLY: functions = re.sub(assembly, stand_in, functions)
  return f"""namespace n{number} {{
{functions}
extern "C" int f{number}({", ".join([*parameters, f"{out}* out"])}) {{
  most = 0; wave = {EMULATED[arch].wave};
  for (int first = 0; first < {WAVES}*wave; first += wave) in_lockstep([&](int i, bool last) {{
    int at = first + i;
    {" ".join(copies)}
    {out} result = {code};
    if (last) {{ out[at] = result; {" ".join(back)} }}
  }});
  return most;
}}
}}"""

@pytest.fixture(scope="module")
def library(tmp_path_factory) -> tuple[dict[str, ctypes.CDLL], dict[tuple[str, str], UOp]]:
  # compiled libraries by language, with the operations of all cases as functions f0, f1 and so on; and these operations as UOps
  pytest.importorskip("ziglang")
  made = {case: make() for case, make in CASES.items()}
  texts:dict[str, list[str]] = {"hip": [], "cuda": []}
  for number, ((arch, _), x) in enumerate(made.items()): texts[language(arch)].append(function(number, arch, x))
  begin = f"const int EXCHANGES = {EXCHANGES};\n{LOCKSTEP}"
  texts["hip"] = [begin, *vector_types(HIP + "\n".join(texts["hip"]), []), HIP, *texts["hip"]]
  texts["cuda"] = [begin, CUDA, *texts["cuda"]]
  folder:Path = tmp_path_factory.mktemp("operations")
  # HIP and CUDA have different vector types of the same names
  libraries = {}
  for kind, text in texts.items():
    (folder/f"{kind}.cpp").write_text("\n".join(text))
    # compiled without optimization, which takes a fifth of the time; linked with -O1, because zig would otherwise build its own runtime again
    of_cpp = ["-x", "c++", "-std=c++17", "-O0", "-c", "-fPIC", "-fno-sanitize=all", "-ffp-contract=off", "-Wno-everything"]
    for options in ([*of_cpp, f"{kind}.cpp", "-o", f"{kind}.o"], ["-O1", "-shared", "-nostdlib++", f"{kind}.o", "-o", f"{kind}.so"]):
      done = subprocess.run([sys.executable, "-m", "ziglang", "cc", *options], capture_output=True, text=True, cwd=folder)
      assert done.returncode == 0, done.stderr[:4000]
    libraries[kind] = ctypes.CDLL(str(folder/f"{kind}.so"))
  return libraries, made

# ***** the tests *****

def test_operations_in_which_lanes_meet_are_known() -> None:
  # ACROSS_LANES names exactly the operations whose source exchanges values between lanes. Kernels compute such operations before a branch, also if
  # only the branch uses the result.
  found = set()
  for (arch, _), make in CASES.items():
    for x in make().toposort() if language(arch) == "hip" else ():
      if not isinstance(x.arg, Call): continue
      printed = KernelText("hip", arch)
      types = [c_type(s) for s in x.src]
      expression = printed.call(x.arg, C_NAMES.get(x.dtype, x.dtype.name), types, [f"x{i}{'+0'*t.endswith('*')}" for i, t in enumerate(types)])
      if re.search("permlane|bpermute|swizzle|dpp|wmma|mfma", "\n".join([expression, *printed.functions.values()])): found.add(x.arg.name)
  assert found == set(ACROSS_LANES) - {"matrix"}      # the tests of kernels cover this operation

@pytest.mark.sample(150)
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_text_and_meaning_agree(library, case:tuple[str, str]) -> None:
  libraries, made = library
  (arch, name), x, number = case, made[case], list(CASES).index(case)
  rng, lanes = np.random.default_rng(number), Wave(arch)
  memory, values = [], dict[UOp, Any]()
  for place, s in enumerate(operands(x)):
    drawn = given(s, place, arch, rng)
    if "with scales" in name and s is list(operands(x))[-1]:     # powers of two, whose logarithms are exact
      drawn = np.exp2(np.clip(np.round(np.nan_to_num(drawn)), -20, 20))
    memory.append(aligned(drawn))
    is_array = s.op is Ops.INDEX
    values[s] = Registers([columns(drawn[:, k]) for k in range(drawn.shape[1])], constant(s.src[1])) if is_array else columns(drawn)
  n, threads = size(x.dtype), len(lanes.active)
  out = aligned(np.zeros((threads, n), numpy_type(x.dtype)))
  exchanges = getattr(libraries[language(arch)], f"f{number}")(*[ctypes.c_void_p(a.ctypes.data) for a in (*memory, out)])
  assert exchanges < EXCHANGES
  kind = name.split(",")[0]
  close(out, rows(meaning(x, lanes, values), n, threads), ABSOLUTE.get(kind, 2e-38), RELATIVE.get(kind, TWO_UNITS))
  for s, a in zip(operands(x), memory, strict=True):
    if s.op is Ops.INDEX:      # also compares what was stored through the pointer
      for k, y in enumerate(values[s].elements): close(a[:, k], rows(y, size(s.dtype), threads), relative=RELATIVE.get(kind, TWO_UNITS))

# softcap is exact relative to the cap, not to the value; the 16 terms of a product, each up to about 10, are added in another order
TWO_UNITS = 3e-7      # relative error of two units in the last place, for exp2 and log2 of libm
RELATIVE = {"correct": 5e-7, "correct with scales": 5e-7, "weigh": 5e-7}      # two more roundings: after exp2 it multiplies and adds
ABSOLUTE = {"softcap": 30*4e-7, "mma": 16*10*2.0**-24, "rounded_sum": 16*10*2.0**-24}

def aligned(x:np.ndarray) -> np.ndarray:
  # a copy of an array that is aligned for the widest vector
  room = np.zeros(x.nbytes + 64, np.uint8)
  start = -room.ctypes.data % 64
  copy = room[start:start + x.nbytes].view(x.dtype).reshape(x.shape)
  copy[...] = x
  return copy

def close(a:np.ndarray, b:np.ndarray, absolute:float=2e-38, relative:float=TWO_UNITS) -> None:
  # compares two arrays: NaN equals NaN, and fp32 numbers may differ by the errors of the C math library
  if a.dtype == np.float32: np.testing.assert_allclose(a, b, rtol=relative, atol=absolute)
  else: np.testing.assert_array_equal(a, b)

# ***** definitions that produce the texts and the meaning *****

def evaluated(x:UOp, *values:Any) -> np.ndarray: return np.asarray(meaning(x, Wave(NVIDIA), dict(zip(operands(x), values, strict=True))))

@pytest.mark.parametrize("offsets", ((0, 1, 2, 3), (5, 6, 9, 10)))
def test_masks(offsets:tuple[int, ...]) -> None:
  threads = WAVES*32
  scores, last, first = np.ones((4, threads), np.float32), *((np.arange(threads)//n % 9 - 3).astype(np.int32) for n in (1, 9))
  keys = np.array(offsets)[:, None] - offsets[0]      # the operand is the limit's distance from the first key
  np.testing.assert_array_equal(evaluated(ops.mask_above(f(4, 0), i(1), offsets), scores, last), np.where(keys > last, -np.inf, 1))
  seen = (keys >= first) & (keys <= last)
  np.testing.assert_array_equal(evaluated(ops.mask_beyond(f(4, 0), i(1), i(2), offsets), scores, first, last), np.where(seen, 1, -np.inf))
  np.testing.assert_array_equal(evaluated(ops.clear_beyond(f(4, 0), i(1), i(2), offsets), scores, first, last), np.where(seen, 1, 0))

@pytest.mark.parametrize("side", ("above", "below"))
def test_masks_of_registers(side:str) -> None:
  # `mask_rows` sets the scores of the right keys to -inf. Vector i of three vectors has the keys 8*i and 8*i + 1 of two rows.
  threads = WAVES*32
  scores = Registers([np.ones((4, threads), np.float32) for _ in range(3)], 0)
  limits = np.stack([np.arange(threads) % 19 - 1, np.arange(threads) % 5 + 7]).astype(np.int32)
  evaluated(ops.mask_rows(array(3, 4, 0), [i(1), i(2)], side, (0, 1), 8), scores, *limits)
  for k, (row, of_row) in itertools.product(range(3), enumerate(limits)):
    for offset in range(2):
      gone = 8*k + offset > of_row if side == "above" else 8*k + offset < of_row
      np.testing.assert_array_equal(scores.elements[k][2*row + offset], np.where(gone, -np.inf, 1))

def test_transposed_bits() -> None:
  # `transposed_bits` transposes four 8x8 matrices of bits at once, across eight lanes. Before, the 32-bit word of lane i holds row i of each matrix;
  # afterwards, column i. The bits of matrix m have the places 4m to 4m+3, in the lower half of the word for even columns and in the upper half for
  # odd columns.
  rng, threads = np.random.default_rng(0), WAVES*32
  rows = rng.integers(0, 2, (threads//8, 8, 4, 8))                        # groups of eight lanes: lane, matrix, column
  def words(bits:np.ndarray) -> np.ndarray:
    places = 4*np.arange(4)[:, None] + np.arange(8)//2 + np.arange(8) % 2*16
    return (bits.astype(np.uint32) << places.astype(np.uint32)).sum((-1, -2), dtype=np.uint32).reshape(-1)
  got = evaluated(dropout.transposed_bits(u(1, 0), u(1, 1), (1, 2, 4), "neighbours"), words(rows), (np.arange(threads) % 8).astype(np.uint32))
  np.testing.assert_array_equal(got, words(rows.transpose(0, 3, 2, 1)))

def test_correction_of_rows() -> None:
  # `correct` raises the number that the softmax subtracts from a row's scores to the row's maximum, and makes the accumulators and P relative to the
  # new number. Here two rows are shared by four lanes.
  rng, lanes, scale = np.random.default_rng(0), Wave(NVIDIA), 0.18
  threads, x = len(lanes.active), by_rows((LANE,), tiles=1, scale=scale)
  names = ("reference", "bias", "l", "acc", "p", "scores", "part")
  def vectors(s:UOp) -> Registers:
    return Registers([rng.normal(0, 20, (size(s.dtype), threads)).astype(numpy_type(s.dtype)) for _ in range(s.src[0].max_numel())], 0)
  values = {s: Registers([np.zeros((4, threads), np.uint32)]*2, 0) if name == "p" else vectors(s)
            for name, s in zip(names, operands(x), strict=True)}
  given = dict(zip(names, values.values(), strict=True))
  given["part"].elements[0][...] = 2.0**20      # more than any reference allows
  old, bias, l, acc = (given[name].elements[0].copy() for name in ("reference", "bias", "l", "acc"))
  meaning(x, lanes, values)
  scores = np.stack(given["scores"].elements).reshape(4, 2, 2, threads)            # tile, row, column, lane
  top = np.maximum(old, scores.max((0, 2))).reshape(2, -1, 4).max(2).repeat(4, 1)   # the four lanes start with different references
  p = np.exp2((scores - top[:, None])*scale)
  np.testing.assert_array_equal(given["reference"].elements[0], top)
  np.testing.assert_allclose(given["bias"].elements[0], np.where(top == old, bias, -top*scale), rtol=1e-6)
  np.testing.assert_allclose(given["l"].elements[0], l*np.exp2((old - top)*scale), rtol=2e-6)
  np.testing.assert_allclose(given["acc"].elements[0], (acc.reshape(2, 2, -1)*np.exp2((old - top)*scale)[:, None]).reshape(4, -1), rtol=2e-6)
  np.testing.assert_allclose(given["part"].elements[0], p.sum((0, 2)), rtol=2e-6)
  got = np.ascontiguousarray(np.concatenate(given["p"].elements)).astype("<u4").T.copy().view(np.float16).reshape(threads, 4, 2, 2)
  np.testing.assert_allclose(got.transpose(1, 2, 3, 0), p, rtol=1e-3, atol=1e-7)

def test_splitting_rounds_to_nearest_even() -> None:
  # P is rounded to the nearest bf16 number, ties to even, also on chips without an instruction for this. The test tries every upper half of a normal
  # fp32 number, with lower halves at both ends and around ties. Some of them carry into the next power of two.
  largest = numerics.bits_as(np.array([numerics.LARGEST_WEIGHT], np.float32), "uint32")[0] >> 16
  upper, lower = np.r_[0, 1 << 7:largest].astype(np.uint32), np.r_[:2, 0x7ffe:0x8002, 0xff00:0xff04, 0xfffc:0x10000].astype(np.uint32)
  x = (upper[:, None] << np.uint32(16) | lower).view(np.float32)
  x[0] = 0
  rounded = numerics.fused_multiply_add(x, np.float32(numerics.SPLITTING), x*np.float32(1 - numerics.SPLITTING))
  np.testing.assert_array_equal(rounded.view(np.uint32), numerics.round_bf16(x) << np.uint32(16))
