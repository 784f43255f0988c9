"""Kernels of matrix instructions alone. They measure the rate that a card's matrix units sustain, which no attention kernel can exceed."""
from __future__ import annotations
import functools, itertools
from collections.abc import Callable
from dataclasses import dataclass
import numpy as np
from attn.calls.checked_kernel import CheckedKernel
from attn.chips import Chip
from attn.chips.matrix import MMA, UNIT_BYTES, Matrix, Mma
from attn.kernels.parts.memory.lanes import Lane, MmaLane
from attn.kernels.parts.memory.layouts import SwizzledPanels
from attn.kernels.parts.program.allocator import Allocator
from attn.kernels.parts.program.statements import InOrder, Statements, load_all, store_all, workgroup_barrier
from attn.kernels.parts.weights.epilogue import OPTIMISED
from attn.ops import amd, common as ops, hopper as wgmma, nvidia as nv
from attn.ops.common import flat
from attn.tinygrad_compat import AxisType, KernelInfo, Tensor, UOp, dynamic_shared_name
from attn.values import FLOATS

# A wave loads operands of normally distributed numbers once. Then it adds their products to several independent accumulators, again and again, so no
# instruction waits for the one before it. (A warpgroup waits for its wgmma, but another one works meanwhile.) Nothing is read from memory in the
# loop; wgmma reads one operand from shared memory. A GEMM also loads, computes addresses and waits at barriers, so it is slower.

LOOP_STEPS = 2              # operands that each accumulator gets in an iteration
REGISTERS = 64         # registers of a lane for accumulators
LOOP_WAVES = 4              # waves of a workgroup, except for wgmma
WORKGROUPS = 4         # workgroups of a compute unit
WGMMA_WAVES, WGMMA_KEYS, WGMMA_COLUMNS = 8, 128, 256
EVERYONE = UOp.const(True)

@dataclass(frozen=True)
class MatrixLoop:
  """A kernel that only executes matrix instructions in a loop, to measure their rate."""
  what: str                # the instruction
  # kernel(groups, trips): for `groups` workgroups and `trips` iterations, a function of the tensors (results, operands)
  kernel: Callable[[int, int], Callable[..., UOp]]
  # floating-point operations of one workgroup in one iteration
  flops: int
  results: int             # float32 numbers that a workgroup writes
  operands: int            # 16-bit numbers that all workgroups read
  workgroups: int = WORKGROUPS

  def outputs(self, groups:int, trips:int, dtype:str) -> Tensor:
    """Returns a lazy Tensor with the final accumulators of every lane, for `groups` workgroups and `trips` iterations on random operands."""
    data = Tensor(np.random.default_rng(0).standard_normal(self.operands, np.float32)).cast(FLOATS[dtype]).realize()
    made = self.kernel(groups, trips)
    def fxn(*placeholders:UOp) -> CheckedKernel: return CheckedKernel(made(*placeholders), ("results",))
    return Tensor.custom_kernel(Tensor.empty(groups*self.results), data, fxn=fxn)[0]

def matrix_loop(arch:Chip, dtype:str) -> MatrixLoop|None:
  """Returns the kernel that measures the rate of a chip's matrix instructions, or None if attn knows no matrix instruction of the chip."""
  if arch.wgmma: return wgmma_loop(dtype)
  if arch.unit.mma: return register_loop(arch.unit.mma[dtype], dtype)
  return register_loop(arch.matrix[dtype][0], dtype) if arch.matrix.get(dtype) else None

# ***** operands in registers: MFMA, WMMA, mma.sync *****

def register_loop(mat:Matrix|Mma, dtype:str) -> MatrixLoop:
  """Returns a kernel that repeats one matrix instruction in a loop, with all operands and accumulators in registers."""
  on_amd = isinstance(mat, Matrix)
  words = mat.M*mat.N//mat.wave                          # registers of an accumulator
  count = max(4, REGISTERS//words)
  rows = 1 << count.bit_length()//2
  columns = count//rows
  operand = mat.operand*mat.size if isinstance(mat, Matrix) else UNIT_BYTES     # bytes of a lane. mma.sync: A, or B of two neighbouring tiles
  fragments = LOOP_STEPS*(rows + (columns if on_amd else columns//2))
  flops = 2*mat.M*mat.N*mat.K*count*LOOP_STEPS*LOOP_WAVES

  def kernel(groups:int, trips:int) -> Callable[..., UOp]:
    def program(results:UOp, data:UOp) -> UOp:
      new = Allocator()
      group, lane, wave = new.range(groups, AxisType.GLOBAL), new.range(mat.wave, AxisType.WARP), new.range(LOOP_WAVES, AxisType.WARP)
      read, multiply = amd_steps(mat, lane, data, operand) if isinstance(mat, Matrix) else mma_steps(mat, lane, data, operand)
      def by_step(first:int, each:int) -> list[list[UOp]]:
        # Reads, for each step of the loop's body, a list of `each` fragments, the first of all being fragment number `first`.
        return [[read(first + step*each + i) for i in range(each)] for step in range(LOOP_STEPS)]
      of_a, of_b = by_step(0, rows), by_step(LOOP_STEPS*rows, fragments//LOOP_STEPS - rows)
      acc = new.registers(count, ops.f32(words))
      start, trip = UOp.group(*store_all(acc, [ops.splat(0.0, words)]*count)), new.range(trips, AxisType.LOOP)
      sums = load_all(acc.after(start, trip))
      for step, (row, column) in itertools.product(range(LOOP_STEPS), itertools.product(range(rows), range(columns))):
        sums[row*columns + column] = multiply(of_a[step][row], of_b[step], column, sums[row*columns + column])
      held = acc.after(UOp.group(*store_all(acc, sums)).end(trip))
      total = functools.reduce(ops.add, load_all(held))
      return finished(f"attn_products_{mat.M}x{mat.N}x{mat.K}_{dtype}", results, (group, lane, wave), (wave*mat.wave + lane), LOOP_WAVES*mat.wave,
                      [total], words)
    return program
  return MatrixLoop(instruction_name(mat, dtype), kernel, flops, LOOP_WAVES*mat.wave*words, fragments*mat.wave*operand//mat.size)

def instruction_name(mat:Matrix|Mma, dtype:str) -> str:
  return f"{mat.name} on {dtype}" if isinstance(mat, Matrix) else f"mma.sync.m{mat.M}n{mat.N}k{mat.K} on {dtype}"

def amd_steps(mat:Matrix, lane:UOp, data:UOp, nbytes:int) -> tuple[Callable[[int], UOp], Callable[..., UOp]]:
  """Returns two functions: one loads operand number n; the other multiplies two operands and adds the product to an accumulator."""
  at = Lane(lane, UOp.const(0), mat)
  # lanes that must hold the same operands load the same data
  source = at.n if mat.duplicated else lane
  def read(n:int) -> UOp: return loaded_operand(data, (n*mat.wave + source)*(nbytes//mat.size), nbytes, mat.size)
  def multiply(a:UOp, b:list[UOp], column:int, c:UOp) -> UOp: return amd.shaped_wmma(mat, a, b[column], c)
  return read, multiply

def mma_steps(mat:Mma, lane:UOp, data:UOp, nbytes:int) -> tuple[Callable[[int], UOp], Callable[..., UOp]]:
  def read(n:int) -> UOp: return loaded_operand(data, (n*mat.wave + lane)*(nbytes//mat.size), nbytes, mat.size)
  def multiply(a:UOp, b:list[UOp], column:int, c:UOp) -> UOp: return nv.mma(mat, a, b[column//2], column % 2, c)
  return read, multiply

def loaded_operand(data:UOp, first:UOp, nbytes:int, size:int) -> UOp:
  """Loads `nbytes` bytes for each lane from the buffer `data`, beginning at the index `first`, as a vector of dwords."""
  width = min(nbytes, UNIT_BYTES)
  return functools.reduce(ops.concat, [ops.load_where(flat(data)[first + i//size], EVERYONE, width) for i in range(0, nbytes, width)])

def finished(name:str, results:UOp, ranges:tuple[UOp, ...], thread:UOp, threads:int, values:list[UOp], words:int) -> UOp:
  """Returns a kernel's program, in which each thread at the end stores its `values`, vectors of `words` numbers, to `results`."""
  # `ranges` are the loops and axes of the kernel, `thread` is the index of the thread among `threads`
  first = (ranges[0]*threads + thread)*(len(values)*words)
  stores = [flat(results)[first + i*words + e].store(ops.extract(x, e)) for i, x in enumerate(values) for e in range(words)]
  return UOp.group(*stores).end(*ranges).sink(arg=KernelInfo(name, opts_to_apply=()), tag=OPTIMISED)

# ***** one operand in shared memory: wgmma *****

@dataclass(frozen=True)
class WgmmaSums(InOrder):
  """State of the kernel that measures wgmma: operand B in shared memory, the accumulators `acc`, and operand `a` in registers."""
  shared: UOp
  acc: UOp
  a: UOp
  statements: Statements

def wgmma_loop(dtype:str) -> MatrixLoop:
  """Returns a kernel that repeats wgmma in a loop, in two warpgroups."""
  # Each warpgroup multiplies 64 rows in registers by 128 rows of 256 columns in shared memory, adds the product to its accumulators, and waits.
  # Meanwhile the tensor cores work for the other warpgroup.
  mat, threads = MMA[dtype], WGMMA_WAVES*32
  layout = SwizzledPanels(WGMMA_KEYS, WGMMA_COLUMNS*mat.size//UNIT_BYTES)
  accs, steps = WGMMA_COLUMNS//mat.N, WGMMA_KEYS//mat.K
  of_b = layout.size*UNIT_BYTES//mat.size      # elements
  def kernel(groups:int, trips:int) -> Callable[..., UOp]:
    def program(results:UOp, data:UOp) -> UOp:
      new = Allocator()
      group, lane, wave = new.range(groups, AxisType.GLOBAL), new.range(32, AxisType.WARP), new.range(WGMMA_WAVES, AxisType.WARP)
      at = MmaLane(lane, wave, mat)
      s = WgmmaSums(new.lds(layout.size), new.registers(accs, nv.F4), new.registers(steps, nv.U4), Statements.of(new))
      units = [at.thread + i*threads for i in range(layout.size//threads)]
      s = s.store([s.statements.first], store_all(s.a, [loaded_operand(data, of_b + (i*threads + at.thread)*mat.unit, UNIT_BYTES, mat.size)
                                                        for i in range(steps)]))
      s = s.do(nv.clear(s.acc, s.done))
      s = s.do(*[nv.put(s.shared[u], loaded_operand(data, u*mat.unit, UNIT_BYTES, mat.size), EVERYONE) for u in units])
      s = s.do(wgmma.publish(s.done))
      s = s.after(workgroup_barrier(s.done))
      trip = new.range(trips, AxisType.LOOP)
      inside = s.after(trip)
      inside = inside.do(wgmma.output(inside.acc, inside.a, inside.shared[0], inside.done, UNIT_BYTES*layout.panel, dtype))
      inside = inside.do(wgmma.wait_products(inside.acc, inside.done))
      s = s.after(inside.done.end(trip))
      name = dynamic_shared_name(f"attn_products_wgmma_{dtype}", layout.size*UNIT_BYTES)
      return finished(name, results, (group, lane, wave), at.thread, threads, [s.acc[i].load() for i in range(accs)], 4)
    return program
  flops = 2*wgmma.M*WGMMA_COLUMNS*WGMMA_KEYS*(WGMMA_WAVES//4)
  return MatrixLoop(f"wgmma.m64n{WGMMA_COLUMNS}k16 on {dtype}, A in registers", kernel, flops, threads*accs*4,
                    of_b + steps*threads*mat.unit, workgroups=1)
