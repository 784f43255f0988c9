"""Random calls of the whole public API, each compared with float64: on every emulated chip, on a CPU, through OpenCL, on a GPU.

    python test/night.py --forward 2000 --backward 1000 [--jobs 2] [--seconds 3600] [--chips gfx942,sm_90] [--first 0]
    python test/night.py --seed 12345 [--device CUDA]

The first command runs a night: it takes seeds from --first on until it has the wanted number of calls. It prints a table of the calls that were
right, were refused and failed, with the seed of each failure. The second command repeats the call of one seed, and prints it as a script to paste
(run the script with PYTHONPATH=.:test). attn may refuse a call with ValueError or NotImplementedError; anything else that is no right result is a
failure. A worker process runs one call at a time, for at most --limit seconds, so a crash or a hanging call can be traced to its seed. A failed call
runs once more in a new process, to show whether it also fails alone.

Calls on the CPU are compiled by CC=test/clang_with_checks.sh, which finds accesses outside of an array, and have buffers between protected pages
(test/guarded.py): a kernel that leaves an array or a buffer crashes its process. Calls through OpenCL are skipped if there is no driver
(docs/plain.md)."""
from __future__ import annotations
import multiprocessing, os, re, sys, tempfile, threading, time, traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
import click
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = {"PARALLEL": "0", "DEV": "CPU", "OPENBLAS_NUM_THREADS": "1", "CC": str(ROOT/"test/clang_with_checks.sh"),
            "CACHEDB": f"{tempfile.gettempdir()}/tinygrad_with_checks.db"}     # a cache for this CC alone: tinygrad's key does not name the compiler
if __name__ == "__main__":      # before any import of tinygrad and numpy
  for setting, value in SETTINGS.items(): os.environ.setdefault(setting, value)
sys.path[:0] = [str(ROOT), str(ROOT/"test")]
from night_draw import CHIPS, MACHINE, Call, drawn     # noqa: E402

CALLS_OF_A_WORKER = 60      # then a new process takes over, because memory that lowering used is never freed

@dataclass(frozen=True)
class Outcome:
  # The outcome of a random call: "right", "refused" or "failed", and why.
  seed: int
  state: str
  why: str = ""
  seconds: float = 0.0  # processor time of the call

# ***** one call *****

def in_attn(error:BaseException) -> bool:
  # Returns whether attn raised an error.
  last = traceback.extract_tb(error.__traceback__)[-1]
  # An error of `by_attn` (night_script.py) counts, too: it says that attn has left a call to tinygrad.
  return last.filename.startswith(str(ROOT/"attn")) or last.name == "by_attn"

def run(call:Call) -> Outcome:
  from night_oracle import hold
  begin, found = time.process_time(), dict[str, Any]()
  def outcome(state:str, why:str="") -> Outcome: return Outcome(call.seed, state, why, time.process_time() - begin)
  try: exec(compile(call.script, f"seed {call.seed}", "exec"), found)
  except (ValueError, NotImplementedError) as e:
    return outcome("refused" if in_attn(e) else "failed", str(e) if in_attn(e) else f"{type(e).__name__} of a stranger: {e}")
  except Exception as e: return outcome("failed", f"{type(e).__name__}: {e}")
  wrong = [f"turn {turn}: {why}" for turn, (x, results) in enumerate(found["got"]) for why in hold(x, call.facts, results)]
  return outcome("failed" if wrong else "right", "; ".join(wrong))

def work(pipe:Connection, does:Callable[[Call], Outcome]) -> None:
  # Receives calls through the pipe, does each, and sends the outcome back, without end.
  import gc
  gc.disable()
  while True:
    seed, on = pipe.recv()
    pipe.send(does(drawn(seed, on)))

class Worker:
  # Process that runs calls; if it crashes, hangs, or has run many calls, a new process takes its place.
  def __init__(self, limit:float, does:Callable[[Call], Outcome]=run) -> None:
    self.limit, self.does, self.ran = limit, does, list[int]()
    self.process: Any = None
  def start(self) -> None:
    context = multiprocessing.get_context("spawn")
    self.pipe, theirs = context.Pipe()
    self.process, self.ran = context.Process(target=work, args=(theirs, self.does), daemon=True), []
    self.process.start()
    theirs.close()
  def stop(self) -> None:
    if self.process is None: return
    self.process.kill()
    self.process.join()
    self.process = None
  def run(self, seed:int, on:str) -> Outcome:
    if len(self.ran) >= CALLS_OF_A_WORKER: self.stop()
    if self.process is None: self.start()
    self.ran.append(seed)
    try:
      self.pipe.send((seed, on))
      if self.pipe.poll(self.limit): return self.pipe.recv()
      why = f"no end after {self.limit:.0f} s"
    except (EOFError, OSError):
      self.process.join()
      why = f"the process ended with {self.process.exitcode}"
    self.stop()
    return Outcome(seed, "failed", why, self.limit)

# ***** a night *****

def opens(device:str) -> bool:
  # Opens the device in another process.
  import subprocess
  script = f"from tinygrad import Tensor; Tensor([1.0], device={device!r}).realize()"
  return subprocess.run([sys.executable, "-c", script], capture_output=True, env={**os.environ, "DEV": device}).returncode == 0

def seeds(first:int, wanted:dict[str, int], chips:tuple[str, ...], device:str) -> Iterator[Call]:
  # Yields calls of the seeds from `first` on that run on one of `chips`, until each direction has the wanted number of calls.
  left, seed = dict(wanted), first
  while any(left.values()):
    call = drawn(seed, device)
    seed += 1
    if call.on not in chips or not left[call.direction]: continue
    left[call.direction] -= 1
    yield call

def night(calls:list[Call], jobs:int, limit:float, until:float) -> Iterator[tuple[Call, Outcome]]:
  # Runs calls in `jobs` threads, each call for at most `limit` seconds, and yields each call with its outcome.
  # No call begins after the time `until`. Each device of this machine has worker processes of its own, because drivers conflict within one process.
  own = threading.local()
  def worker(call:Call) -> Worker:
    workers = own.__dict__.setdefault("workers", {})
    return workers.setdefault(call.on if call.on in MACHINE else "EMU", Worker(limit))
  def one(call:Call) -> tuple[Call, Outcome]:
    if time.time() > until: return call, Outcome(call.seed, "left")
    outcome = worker(call).run(call.seed, call.on)
    if outcome.state != "failed": return call, outcome
    before = worker(call).ran[:-1]
    worker(call).stop()
    again = worker(call).run(call.seed, call.on)
    worker(call).stop()
    if again.state == "failed": return call, outcome
    return call, Outcome(call.seed, "failed", f"after {' '.join(map(str, before))}, not alone: {outcome.why}", outcome.seconds)
  with ThreadPoolExecutor(jobs) as pool: yield from pool.map(one, calls)

def reason(why:str) -> str:
  # Shortens the message of a refusal, with # in place of numbers, so that equal reasons can be counted.
  # If several kernels refused the call, the reason of `tiled` is taken: it supports the most problems.
  return re.sub(r"-?\d+(\.\d+)?(e[-+]\d+)?", "#", why[max(why.find("tiled: "), 0):])[:170]

def table(done:list[tuple[Call, Outcome]]) -> str:
  # Makes the table of the calls that were right, were refused and failed, by chip and by kind of call.
  lines = []
  for title, of in (("chip", lambda c: c.on), ("kind", lambda c: f"{c.kind} {c.direction}")):
    lines.append(f"{title:24}{'run':>8}{'right':>8}{'refused':>8}{'failed':>8}{'seconds':>9}")
    for name in sorted({of(call) for call, _ in done}):
      here = [outcome for call, outcome in done if of(call) == name]
      states = Counter(outcome.state for outcome in here)
      lines.append(f"{name:24}{len(here):8}{states['right']:8}{states['refused']:8}{states['failed']:8}{sum(x.seconds for x in here):9.0f}")
  for why, count in Counter(reason(outcome.why) for _, outcome in done if outcome.state == "refused").most_common():
    lines.append(f"refused {count:5}: {why}")
  failed = [(call, outcome) for call, outcome in done if outcome.state == "failed"]
  lines += [f"failed: --seed {call.seed} ({call.on}, {call.kind} {call.direction}): {outcome.why.splitlines()[0][:300]}" for call, outcome in failed]
  states = Counter(f"{call.direction} {outcome.state}" for call, outcome in done)
  return "\n".join([*lines, "in all: " + ", ".join(f"{count} {state}" for state, count in sorted(states.items()))])

@click.command(help=__doc__)
@click.option("--forward", default=0, help="Forward calls to run.")
@click.option("--backward", default=0, help="Calls with gradients to run.")
@click.option("--first", default=0, help="First seed.")
@click.option("--seed", type=int, help="Repeat only the call of this seed.")
@click.option("--chips", default="", help="Run only calls for these chips and devices, separated by commas.")
@click.option("--device", default="", help="Run every call on this chip or device (CPU, CL, CUDA) instead of the one that its seed draws.")
@click.option("--jobs", default=1, help="Calls that run in parallel.")
@click.option("--seconds", default=0.0, help="Begin no call after this many seconds; 0 for no limit.")
@click.option("--log", type=click.Path(), help="File that gets one line for each call: its seed, state, seconds and reason.")
@click.option("--limit", default=600.0, help="Time limit of one call, in seconds.")
def main(forward:int, backward:int, first:int, seed:int|None, chips:str, device:str, jobs:int, seconds:float, log:str|None, limit:float) -> None:
  if seed is not None:
    call = drawn(seed, device)
    print(call.script)
    print(call.facts)
    print(outcome := run(call))
    sys.exit(outcome.state == "failed")
  here = {name for name in (*CHIPS, *MACHINE) if name in CHIPS or opens(name)}
  wanted = {name for name in chips.split(",") if name} or here
  calls = list(seeds(first, {"forward": forward, "backward": backward}, tuple(here & wanted), device))
  done = []
  for call, outcome in tqdm(night(calls, jobs, limit, time.time() + seconds if seconds else float("inf")), total=len(calls)):
    if outcome.state == "left": continue
    done.append((call, outcome))
    if log is not None:
      with open(log, "a") as f: f.write(f"{call.seed} {call.on} {call.kind} {call.direction} {outcome.state} {outcome.seconds:.2f} {outcome.why!r}\n")
    if outcome.state == "failed":
      tqdm.write(f"--seed {call.seed} ({call.on}, {call.kind} {call.direction}): {outcome.why[:300]}", file=sys.stderr)
  print(table(done))
  sys.exit(any(outcome.state == "failed" for _, outcome in done))

if __name__ == "__main__": main()
