"""Times first calls: `DEV=CUDA python -m attn.measure.latency [WORD ...]` prints a line for each problem whose name contains every WORD.

Each time is the host's seconds in a new process, from the call until the result is computed. `first` is a call with empty caches of tinygrad, attn
and the driver. `second` is a call in a later process with the same caches."""
from __future__ import annotations
import contextlib, json, math, os, statistics, subprocess, sys, tempfile, time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
import numpy as np
from attn.api.attention import attention
from attn.measure.functions import FUNCTION_ROWS, HEAD_DIMENSION, HEADS, ROWS_OF_ALL, arrays_of_functions
from attn.measure.machine import need
from attn.measure.rows import MeasuredRow, line_of_row
from attn.ops.renderers import adapt
from attn.tinygrad_compat import Context, Device, Tensor, device_of

# Before the call, imports are done, the device is open and the inputs are on the device. For the first call the table also shows the time of
# compiling in the same process. This time is not complete if there are several kernels to compile, because tinygrad then compiles in other processes
# too.

RUNS = 3
DRAWN_ONCE = 2**20     # inputs repeat at most this many random numbers

@dataclass(frozen=True)
class FirstCall(MeasuredRow):
  """First call of attention in float16 in a new process, which is timed."""
  backward: bool = False  # the call also computes the gradients of q, k and v
  function: str = ""      # name of a row of attn.measure.functions, whose score_mod and mask_mod the call has
  alone: bool = False     # the output is computed before, so that only the gradients are timed
  def __str__(self) -> str:
    rows = f"{self.Sq}" if self.Sq == self.Sk else f"{self.Sq} x {self.Sk}"
    words = [*["causal"]*self.causal, *[f"{self.function} by functions"]*bool(self.function), *["backward"]*self.backward, *["alone"]*self.alone]
    return " ".join([f"({self.B}, {self.heads}, {rows}, {self.D})", *words])
  def options(self) -> dict[str, Any]:
    """Returns the options of the call; tensors among them are on the device."""
    row = next((x for x in FUNCTION_ROWS if x.name == self.function), None)
    if row is None: return {"causal": self.causal}
    tensors = tuple(Tensor(arrays_of_functions()[name]).realize() for name in row.tensors)
    return {"score_mod": row.score_mod, "mask_mod": row.mask_mod, "mod_tensors": tensors}

def calls_of_functions() -> Iterator[FirstCall]:
  """Yields first calls without and with functions: of forward, and of the gradients alone."""
  sizes = (1, HEADS, HEADS, ROWS_OF_ALL, ROWS_OF_ALL, HEAD_DIMENSION)
  for causal, function in ((False, ""), (True, ""), *((False, name) for name in ("documents", "neighbours", "dilated", "prefix", "softcap"))):
    for backward in (False, True): yield FirstCall(*sizes, causal, backward, function, backward)

FIRST_CALLS = (FirstCall(4, 16, 16, 4096, 4096, 128), FirstCall(4, 16, 16, 4096, 4096, 128, True), FirstCall(4, 32, 32, 4096, 4096, 64),
               FirstCall(4, 32, 32, 4096, 4096, 64, True), FirstCall(2, 16, 16, 4096, 4096, 256, True), FirstCall(2, 10, 10, 4096, 77, 64),
               FirstCall(64, 16, 16, 256, 256, 64, True), FirstCall(1, 32, 8, 1, 16384, 128), FirstCall(1, 32, 8, 1, 2048, 128),
               FirstCall(4, 16, 16, 4096, 4096, 128, True, True), *calls_of_functions())

def repeated(*shape:int) -> Tensor:
  """Returns a tensor of random numbers on the device, in which the same DRAWN_ONCE numbers come again and again."""
  # No kernel runs to make the tensor.
  drawn = np.random.default_rng(0).standard_normal(min(math.prod(shape), DRAWN_ONCE), np.float32).astype(np.float16)
  return Tensor(np.resize(drawn, shape)).realize()

@contextlib.contextmanager
def compiler_timed(compiler:Any) -> Iterator[list[float]]:
  """Context that yields a list, to which the seconds of each compilation by `compiler` are appended."""
  seconds, own = list[float](), compiler.compile
  def timed(source:str) -> bytes:
    begin = time.perf_counter()
    try: return bytes(own(source))
    finally: seconds.append(time.perf_counter() - begin)
  compiler.compile = timed
  try: yield seconds
  finally: del compiler.compile

def first_call(row:FirstCall) -> dict[str, float]:
  """Makes the call `row` in this process, and returns the seconds of the whole call and the seconds that the compiler took."""
  device = device_of(Device.DEFAULT)
  q, k, v, do = (repeated(row.B, h, n, row.D) for h, n in ((row.H, row.Sq), (row.Hkv, row.Sk), (row.Hkv, row.Sk), (row.H, row.Sq)))
  adapt(Device.DEFAULT)
  options = row.options()
  def output() -> Tensor: return attention(q, k, v, **options)
  with Context(TRAINING=int(row.alone)): done = output().realize() if row.alone else None
  with compiler_timed(device.renderer.compiler) as compiling:
    device.synchronize()
    begin = time.perf_counter()
    o = output() if done is None else done
    Tensor.realize(*([o] if not row.backward else o.gradient(q, k, v, gradient=do)))
    device.synchronize()
    return {"seconds": time.perf_counter() - begin, "compiling": sum(compiling)}

def in_new_process(row:FirstCall, caches:Path) -> dict[str, float]:
  """Runs `first_call` in a new process, which keeps all caches in the directory `caches`."""
  kept = {"XDG_CACHE_HOME": str(caches), "CACHEDB": str(caches/"tinygrad.db"), "CUDA_CACHE_PATH": str(caches/"driver")}
  command = [sys.executable, "-m", "attn.measure.latency", "--here", json.dumps(asdict(row))]
  done = subprocess.run(command, capture_output=True, text=True, env=os.environ | kept)
  if done.returncode: raise RuntimeError(f"{row}: {done.stderr[-2000:]}")
  found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
  return found

def latency(row:FirstCall, runs:int=RUNS) -> dict[str, Any]:
  """Measures the first and the second call of a problem in several runs; returns the medians and each run's times, in seconds."""
  found = []
  for _ in range(runs):
    with tempfile.TemporaryDirectory() as caches: found.append([in_new_process(row, Path(caches)) for _ in range(2)])
  first, second = ([run[i]["seconds"] for run in found] for i in range(2))
  return {"row": str(row), "first s": statistics.median(first), "compiling s": statistics.median(run[0]["compiling"] for run in found),
          "second s": statistics.median(second), "first": first, "second": second}

def main(words:list[str]) -> None:
  if words[:1] == ["--here"]:
    print(json.dumps(first_call(FirstCall(**json.loads(words[1])))))
    return
  for row in FIRST_CALLS:
    if all(word in str(row) for word in words):
      print(line_of_row(latency(row), digits=3), flush=True)

if __name__ == "__main__":
  need("python -m attn.measure.latency")
  main(sys.argv[1:])
