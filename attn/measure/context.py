"""Times attention over sequences whose rows are sharded over GPUs, and compares the times with one GPU. `DEV=CUDA python -m attn.measure.context
[WORD ...]` prints a line for each problem whose name contains every WORD. DEVICES=4 uses four devices instead of two. With DEV=EMU and SMALL=1 the
program runs without a GPU, and its times mean nothing."""
from __future__ import annotations
import math, os, statistics, sys, time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
import attn
from attn.measure.decode import normal as repeated_numbers
from attn.measure.machine import need
from attn.measure.rows import heads_text
from attn.tinygrad_compat import Device, GlobalCounters, Ops, Tensor, TinyJit, UOp, compiled, run_alone

# A line shows the wall time of one call under TinyJit, on each device by itself and on all devices together. The line also shows the host's time to
# launch one call, the bytes that each device uses, and a timeline. The wall time is the median of rounds of at least a quarter of a second. For the
# timeline each kernel and each copy of the call runs with nothing beside it. These times are added up in two ways: as if all copies ran beside
# kernels, and as if no copy did. The measured time should lie between the two sums. In some problems the heads are sharded over the devices instead
# of the rows. Such a problem needs no copies, and shows the highest speed that the devices can have together.

MEASURED_SECONDS, MEASURED_ROUNDS = .25, 5     # long rounds measure a sustained rate: a device that was idle is faster for a while

@dataclass(frozen=True)
class SharedProblem:
  """A problem to time, whose tensors are sharded over devices along rows, keys or heads."""
  shared: str  # what is divided: "rows", "keys" or "heads"
  H: int
  Hkv: int
  Sq: int
  Sk: int
  D: int = 128
  causal: bool = False
  backward: bool = False  # the call also computes dq, dk and dv
  def __str__(self) -> str:
    sizes = f"(1, {heads_text(self.H, self.Hkv)}, {self.Sq} x {self.Sk}, {self.D})"
    mask = "causal" if self.causal else "full"
    return f"{sizes} {mask}{' with gradients'*self.backward}, {self.shared} shared"

LONG_ROWS = SharedProblem("rows", 32, 32, 32768, 32768)
CONTEXTS = (*(replace(LONG_ROWS, Hkv=heads, causal=causal) for heads in (32, 8) for causal in (True, False)),
            *(replace(LONG_ROWS, shared="heads", causal=causal) for causal in (True, False)),
            *(replace(LONG_ROWS, Hkv=8, Sq=16384, Sk=16384, causal=True, backward=True, shared=shared) for shared in ("rows", "heads")),
            SharedProblem("keys", 32, 8, 1, 2097152), *(SharedProblem(shared, 32, 8, 1, 524288) for shared in ("keys", "heads")))

def small(row:SharedProblem) -> SharedProblem:
  """Returns a problem like `row`, with sizes that are small enough for the emulator."""
  return replace(row, H=4, Hkv=4 if row.Hkv == row.H else 1, Sq=min(row.Sq, 64), Sk=128 if row.Sq == 1 else 64, D=16)

def inputs_of(row:SharedProblem, devices:tuple[str, ...]) -> list[Tensor]:
  """Returns q, k and v with the sizes of `row`, sharded over the devices as `row` says, or whole if there is one device."""
  shapes = (1, row.H, row.Sq, row.D), *[(1, row.Hkv, row.Sk, row.D)]*2
  def placed(x:Tensor, is_q:bool) -> Tensor:
    if len(devices) == 1: return x.to(devices[0])
    if row.shared == "heads": return x.shard(devices, 1)
    return x.shard(devices) if is_q and row.shared == "keys" else attn.shard_sequence(x, devices, 2, order_of(row))
  return [placed(repeated_numbers(*shape), i == 0).realize() for i, shape in enumerate(shapes)]

def order_of(row:SharedProblem) -> str: return "zigzag" if row.shared == "rows" and row.causal else "contiguous"

def computes(row:SharedProblem, devices:tuple[str, ...]) -> Callable[..., list[Tensor]]:
  """Returns a function of q, k and v that calls attention with the options of `row` and returns lazy results."""
  options: dict[str, Any] = {"causal": row.causal}
  if len(devices) > 1: options["sequence_order"] = order_of(row)
  def call(q:Tensor, k:Tensor, v:Tensor) -> list[Tensor]:
    o = attn.attention(q, k, v, **options)
    return list(o.float().square().sum().gradient(q, k, v)) if row.backward else [o]
  return call

def synchronize(devices:tuple[str, ...]) -> None:
  for name in devices: Device[name].synchronize()

def used(devices:tuple[str, ...]) -> list[int]: return [GlobalCounters.mem_used_per_device[Device.canonicalize(name)] for name in devices]

@dataclass(frozen=True)
class MeasuredCall:
  """Time and memory of a call of attention."""
  ms: float
  launch_ms: float  # the host's time to launch the call
  inputs: list[int]  # bytes of the inputs on each device
  besides: list[int]  # bytes of everything else, after TinyJit has captured the call

def measured(row:SharedProblem, devices:tuple[str, ...]) -> MeasuredCall:
  """Times one call of attention on the devices, for the problem `row`."""
  before = used(devices)
  tensors, call = inputs_of(row, devices), computes(row, devices)
  synchronize(devices)
  after = used(devices)
  @TinyJit
  def step(q:Tensor, k:Tensor, v:Tensor) -> list[Tensor]: return [x.realize() for x in call(q, k, v)]
  for _ in range(3): step(*tensors)
  def timed(calls:int) -> tuple[float, float]:
    # Calls attention `calls` times; returns the mean seconds of a call until the devices are done, and the host's seconds to launch the first call.
    synchronize(devices)
    start = time.perf_counter()
    step(*tensors)
    launched = time.perf_counter()
    for _ in range(calls - 1): step(*tensors)
    synchronize(devices)
    return (time.perf_counter() - start)/calls, launched - start
  calls = max(1, math.ceil(MEASURED_SECONDS/timed(1)[0]))
  times, launches = zip(*(timed(calls) for _ in range(MEASURED_ROUNDS)))
  end = used(devices)
  inputs, besides = ([y - x for x, y in zip(*both)] for both in ((before, after), (after, end)))
  return MeasuredCall(1e3*statistics.median(times), 1e3*statistics.median(launches), inputs, besides)

@dataclass(frozen=True)
class TimedPiece:
  """A kernel, or a copy to a device, with the time that it takes if nothing else runs."""
  device: str
  name: str
  ms: float
  copied: bool

def pieces_alone(row:SharedProblem, devices:tuple[str, ...]) -> list[TimedPiece]:
  """Times each kernel and each copy of a call of attention, in order, with nothing running beside it: the fastest of three runs."""
  schedule, found = compiled(*computes(row, devices)(*inputs_of(row, devices))), []
  for call in schedule.src:
    times = []
    for _ in range(3):
      synchronize(devices)
      start = time.perf_counter()
      run_alone(call)
      synchronize(devices)
      times.append(time.perf_counter() - start)
    to = call.src[1].device
    found.append(TimedPiece(to if isinstance(to, str) else " ".join(to), piece_name(call), 1e3*min(times), call.src[0].op is Ops.COPY))
  return found

def piece_name(call:UOp) -> str: return f"copy from {call.src[2].device}" if call.src[0].op is Ops.COPY else str(call.src[0].arg.function_name)

def timeline(row:SharedProblem, devices:tuple[str, ...], ms:float) -> list[str]:
  """Returns lines to print: the time of each kernel and copy alone, and two sums of these times, between which the measured time `ms` should lie."""
  pieces = pieces_alone(row, devices)
  def total(device:str, copied:bool) -> float:
    return sum(x.ms for x in pieces if x.copied == copied and Device.canonicalize(device) in x.device.split())
  kernels, copies = ([total(device, copied) for device in devices] for copied in (False, True))
  beside, after = max(map(max, zip(kernels, copies))), max(map(sum, zip(kernels, copies)))
  return [*(f"    {x.device:10s} {x.ms:9.3f} ms  {x.name}" for x in pieces),
          f"    alone: kernels at most {max(kernels):.3f} ms a device, copies {max(copies):.3f}; copies beside kernels {beside:.3f}, "
          f"one after another {after:.3f}; measured {ms:.3f}"]

def measure_row(row:SharedProblem, devices:tuple[str, ...]) -> None:
  alone, all_ = [measured(row, (device,)) for device in devices], measured(row, devices)
  one = min(alone, key=lambda found: found.ms)
  def bytes_of(found:list[int]) -> str: return ", ".join(f"{n:,}".replace(",", " ") for n in found)
  print(f"{row}: one {', '.join(f'{found.ms:.3f}' for found in alone)} ms, by itself, {len(devices)} devices {all_.ms:.3f} ms, "
        f"{one.ms/all_.ms:.2f} times as fast as the faster of them; launched by the host in {all_.launch_ms:.3f} ms")
  for what, of_one, of_all in (("inputs", one.inputs, all_.inputs), ("besides", one.besides, all_.besides)):
    print(f"    bytes, {what}: {bytes_of(of_one)} on one, {bytes_of(of_all)} on each")
  print("\n".join(timeline(row, devices, all_.ms)), flush=True)

def main(words:list[str]) -> None:
  count = int(os.getenv("DEVICES", "2"))
  devices = tuple(f"{Device.DEFAULT.split(':')[0]}:{i}" for i in range(count))
  for row in CONTEXTS:
    if all(word in str(row) for word in words): measure_row(small(row) if os.getenv("SMALL") else row, devices)

if __name__ == "__main__":
  need("python -m attn.measure.context")
  main(sys.argv[1:])
