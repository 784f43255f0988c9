"""Measures speeds of a card that do not depend on attn's attention kernels: matrix instructions alone, tinygrad's GEMM, and a copy in memory."""
from __future__ import annotations
from collections.abc import Callable, Iterator
from dataclasses import dataclass
import numpy as np
from attn.calls.checked_kernel import CheckedKernel
from attn.chips import Chip
from attn.chips.matrix import UNIT_BYTES
from attn.kernels.parts.program.allocator import Allocator
from attn.kernels.parts.weights.epilogue import OPTIMISED
from attn.measure.rounds import repeater, timed_rounds
from attn.ops import common as ops
from attn.ops.common import flat
from attn.report.matrix_loop import matrix_loop
from attn.report.schema import GBS, TFLOPS, MeasuredRate
from attn.report.shapes import BF16, FP16
from attn.report.system import FoundCard, first_line, median_reading, sampled
from attn.tinygrad_compat import AxisType, KernelInfo, Tensor, UOp, compiled, device_seconds, dtypes
from attn.values import FLOATS

# iterations of the matrix loop, side of the GEMM's matrices, bytes of the copied tensor
SIZES_OF_RATES = {"full": (8192, 4096, 1 << 28), "small": (16, 256, 1 << 20)}
OF_A_UNIT = {TFLOPS: 1e12, GBS: 1e9}
UNITS_UNKNOWN = 64     # compute units that get workgroups of the matrix loop if their number is not known

class WrongProducts(RuntimeError):
  """Error: the kernel that measures matrix instructions has returned wrong sums, so the rate that was measured is not valid."""

@dataclass(frozen=True)
class RateToMeasure:
  """A speed to measure, such as TFLOP/s of matrix instructions or GB/s of a copy, and the function that measures it."""
  what: str
  unit: str
  # operations or bytes of one run
  work: float
  # returns a function that runs the work `count` times and returns the seconds of one run
  timer: Callable[[], Callable[[int], float]]

def loop_rate(arch:Chip, dtype:str, trips:int, compute_units:int) -> RateToMeasure|None:
  """Prepares the measurement of how fast a chip executes matrix instructions alone; None if attn knows no matrix instruction of the chip."""
  if (loop := matrix_loop(arch, dtype)) is None: return None
  # `trips` is the number of loop iterations of a wave, and `compute_units` says how many compute units get workgroups
  groups = compute_units*loop.workgroups
  def timer() -> Callable[[int], float]:
    few, many = (loop.outputs(groups, n, dtype) for n in (trips//4, trips))
    seconds = repeater(compiled(many))
    seconds(1)
    x, y = few.numpy(), many.numpy()
    # four times as many iterations must give sums that are four times as large
    if not np.isfinite(y).all() or np.abs(y - 4*x).max() > 0.01*np.abs(y).max(): raise WrongProducts("the matrix loop returned wrong sums")
    return seconds
  return RateToMeasure(f"matrix instructions alone: {loop.what}", TFLOPS, loop.flops*trips*groups, timer)

def gemm_rate(n:int, dtype:str) -> RateToMeasure:
  def timer() -> Callable[[int], float]:
    a, b = (Tensor(np.random.default_rng(i).standard_normal((n, n), np.float32)).cast(FLOATS[dtype]).realize() for i in range(2))
    return ran_once(a.matmul(b, dtype=dtypes.float).cast(FLOATS[dtype]))
  return RateToMeasure(f"tinygrad's GEMM ({n} x {n} x {n}, {dtype}, fp32 sums, as tinygrad schedules it, no search)", TFLOPS, 2*n**3, timer)

def copy_rate(nbytes:int, by_attn:bool) -> RateToMeasure:
  """Prepares the measurement of how fast the card copies `nbytes` bytes in memory, by a kernel of attn or by tinygrad."""
  # `nbytes` should be more than every cache holds; tinygrad computes x + 1
  def timer() -> Callable[[int], float]:
    x = Tensor.ones(nbytes//4).contiguous().realize()
    return ran_once(Tensor.custom_kernel(Tensor.empty(nbytes//4), x, fxn=copied_by_threads)[0] if by_attn else x + 1)
  return RateToMeasure(f"copy of {nbytes >> 20} MiB{'' if by_attn else ', x + 1 by tinygrad'}, read and written bytes", GBS, 2*nbytes, timer)

COPY_THREADS, COPY_UNITS = 256, 4     # threads of a workgroup; units of 16 bytes that each of them copies

def copied_by_threads(to:UOp, source:UOp) -> CheckedKernel:
  """Kernel that copies float32 numbers in pieces of 16 bytes; neighbouring threads copy neighbouring pieces."""
  new, unit = Allocator(), ops.f32(UNIT_BYTES//4)
  group = new.range(to.max_numel()*4//(UNIT_BYTES*COPY_THREADS*COPY_UNITS), AxisType.GLOBAL)
  thread = new.range(COPY_THREADS, AxisType.WARP)
  places = [(group*COPY_UNITS + i)*COPY_THREADS + thread for i in range(COPY_UNITS)]
  values = [flat(source).bitcast(unit)[place].load() for place in places]
  stores = [flat(to).bitcast(unit)[place].store(x) for place, x in zip(places, values)]
  return CheckedKernel(UOp.group(*stores).end(group, thread).sink(arg=KernelInfo("attn_copy", opts_to_apply=()), tag=OPTIMISED), ("to",))

def ran_once(output:Tensor) -> Callable[[int], float]:
  schedule = compiled(output)
  device_seconds(schedule)
  return repeater(schedule)

def rates_of(arch:Chip, units:int, sizes:str) -> Iterator[RateToMeasure]:
  trips, side, nbytes = SIZES_OF_RATES[sizes]
  for dtype in (FP16, BF16):
    if (rate := loop_rate(arch, dtype, trips, units)) is not None: yield rate
  yield gemm_rate(side, FP16)
  yield copy_rate(nbytes, by_attn=matrix_loop(arch, FP16) is not None)

def measured_rates(arch:Chip, card:FoundCard, sizes:str) -> tuple[tuple[MeasuredRate, ...], list[str]]:
  """Returns the measured rates of a card, and a text for each rate that could not be measured."""
  found, failed = list[MeasuredRate](), list[str]()
  for x in rates_of(arch, card.text.compute_units or UNITS_UNKNOWN, sizes):
    try:
      seconds = x.timer()
      with sampled(card.sensors) as readings: _, rounds = timed_rounds(seconds)
    except Exception as e: failed.append(f"not measured: {x.what}: {first_line(e)}")
    else:
      rates = tuple(x.work/each/OF_A_UNIT[x.unit] for each in rounds)
      found.append(MeasuredRate(x.what, x.unit, rates, median_reading(readings)))
  return tuple(found), failed
