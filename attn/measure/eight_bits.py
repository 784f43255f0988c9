"""Times attention of 8-bit floats beside attention in bfloat16 on the same NVIDIA GPU, and the conversion from bfloat16 to 8-bit floats. `DEV=CUDA
python -m attn.measure.eight_bits [WORD ...]` prints a line for each problem whose name contains every WORD."""
from __future__ import annotations
import statistics, sys
from collections.abc import Callable
from dataclasses import dataclass
import numpy as np
from attn.measure.inputs import to_tensor
from attn.measure.machine import need
from attn.measure.rounds import in_turn, runs_of_a_round
from attn.measure.short import jit_timer, timer_of_jit
from attn.ops.eight_bits import rounded_bytes
from attn.reference import rounded
from attn.tinygrad_compat import Tensor, TinyJit, dtypes

# A time is the device time of one launch, as a median over rounds of a quarter of a second. In each round each kind of attention is timed once.

B, H, N, IN_A_GRAPH = 1, 16, 12288, 10      # batch, heads, queries and keys of every problem; launches in a TinyJit
FORMAT_OF_8_BITS, MOST_OF_FORMAT = "fp8e4m3", 448.0
NUMBERS_OF_TENSOR = 2**20 - 3      # random numbers of a tensor, which repeat. A prime: where they repeat, rows begin elsewhere

@dataclass(frozen=True)
class EightBitRow:
  """A problem: its head dimension, and whether it has a causal mask."""
  d: int
  causal: bool
  def __str__(self) -> str: return f"D {self.d} {'causal' if self.causal else 'full'}"
  @property
  def operations(self) -> float: return 4*B*H*N*N*self.d/(2 if self.causal else 1)

EIGHT_BIT_ROWS = [EightBitRow(d, causal) for d in (64, 128, 192, 256) for causal in (False, True)]

def long_enough(seconds:Callable[[], float]) -> Callable[[], float]:
  """Returns a timer that calls the timer `seconds` for about a quarter of a second, and returns the mean of its results."""
  runs = runs_of_a_round(lambda: IN_A_GRAPH*seconds())
  return lambda: statistics.mean(seconds() for _ in range(runs))

def compared(row:EightBitRow) -> str:
  """Times a problem in bfloat16, in 8-bit floats and in 8-bit floats with scales, and returns a line of text."""
  q, k, v = (np.random.default_rng(i).standard_normal(NUMBERS_OF_TENSOR, np.float32) for i in range(3))
  def repeated(x:np.ndarray) -> np.ndarray: return np.resize(x, (B, H, N, row.d))
  def of_bytes(x:np.ndarray) -> Tensor: return Tensor(repeated(rounded_bytes(x, FORMAT_OF_8_BITS, True))).realize().bitcast(dtypes.fp8e4m3)
  q8, k8, v8, one = of_bytes(q), of_bytes(k), of_bytes(v), Tensor([1.0]).contiguous().realize()
  in_16 = [to_tensor(repeated(rounded(x, "bfloat16")), "bfloat16") for x in (q, k, v)]
  timers = {"bfloat16": jit_timer(in_16[0], in_16[1], in_16[2], row.causal, IN_A_GRAPH)[0],
            FORMAT_OF_8_BITS: jit_timer(q8, k8, v8, row.causal, IN_A_GRAPH, "bfloat16")[0],
            "with scales": jit_timer(q8, k8, v8, row.causal, IN_A_GRAPH, "bfloat16", q_scale=one, k_scale=one, v_scale=one)[0]}
  times = in_turn({name: long_enough(timer) for name, timer in timers.items()})
  told = [f"{name} {1e6*t:.0f} us, {row.operations/t/1e12:.0f} TFLOP/s" for name, t in times.items()]
  return f"{row}: {'; '.join(told)}; {times['bfloat16']/times[FORMAT_OF_8_BITS]:.2f} and {times['bfloat16']/times['with scales']:.2f} times as fast"

def converted(d:int) -> str:
  """Times the conversion of q from bfloat16 to 8-bit floats by tinygrad's own operations, and returns a line of text."""
  numbers = rounded(np.random.default_rng(0).standard_normal(NUMBERS_OF_TENSOR, np.float32), "bfloat16")
  xs = [to_tensor(np.resize(numbers, (B, H, N, d)), "bfloat16") for _ in range(IN_A_GRAPH)]
  known = Tensor([0.01]).contiguous().realize()
  def found(x:Tensor) -> Tensor: return (x.abs().max().float()/MOST_OF_FORMAT).contiguous()
  def seconds(scale:Callable[[Tensor], Tensor]) -> float:
    @TinyJit
    def steps() -> list[Tensor]:
      made = [(x.float()*(1/scale(x))).cast(dtypes.fp8e4m3).contiguous() for x in xs]
      Tensor.realize(*made)
      return made
    timer = timer_of_jit(steps, str(xs[0].device), IN_A_GRAPH)
    return min(timer() for _ in range(5))
  return (f"one tensor of ({B}, {H}, {N}, {d}) from bfloat16 to {FORMAT_OF_8_BITS}: {1e6*seconds(lambda x: known):.0f} us with a known scale, "
          f"{1e6*seconds(found):.0f} us with a scale from its largest number")

def main() -> None:
  need("python -m attn.measure.eight_bits", device="CUDA")
  for row in [x for x in EIGHT_BIT_ROWS if all(word in str(x).split() for word in sys.argv[1:])]: print(compared(row), flush=True)
  if not sys.argv[1:] or "convert" in sys.argv[1:]: print(converted(128), flush=True)

if __name__ == "__main__": main()
