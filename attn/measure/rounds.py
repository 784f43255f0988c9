"""Rounds of measurements: each lasts long enough for the clock of a busy chip to settle, and a time is a median over rounds."""
from __future__ import annotations
import functools, statistics
from collections.abc import Callable, Mapping
from typing import Any
from attn.tinygrad_compat import Ops, UOp, cuda_graph_seconds, device_seconds

ROUNDS, ROUND_SECONDS = 5, 0.25     # in shorter rounds cuDNN is faster than in long ones: docs/nvidia.md

def runs_of_a_round(seconds:Callable[[], float]) -> int:
  """Returns how many runs take about ROUND_SECONDS, at least 1; `seconds` makes one run and returns its time."""
  return max(1, round(ROUND_SECONDS/min(seconds() for _ in range(3))))

def in_turn(timers:Mapping[str, Callable[[], float]]) -> dict[str, float]:
  """Calls the timers one after another in each of several rounds; returns the median of each timer's results, by name."""
  names, found = list(timers), []
  # Every round runs the timers in a different order, because a kernel runs on a cooler chip if the kernel before it used little power.
  for i in range(ROUNDS):
    order = names[i % len(names):] + names[:i % len(names)]
    found.append({name: timers[name]() for name in (order if i % 2 == 0 else order[::-1])})
  return {name: statistics.median(times[name] for times in found) for name in names}

GRAPH_LAUNCHES = 100     # runs in a CUDA graph. A graph of fewer runs of a short kernel would time the host

def repeater(schedule:UOp) -> Callable[[int], float]:
  """Returns a function of `count` that runs a compiled schedule `count` times and returns the mean seconds of one run."""
  # On a CUDA device this measures events around graphs of runs; on other devices it adds up the time of each launch, as the device measured it.
  call: Any = next(u for u in schedule.src if u.op is Ops.CALL)
  if not str(call.src[1].buffer.device).startswith("CUDA"): return lambda count: sum(device_seconds(schedule) for _ in range(count))/count
  graph = functools.cache(lambda count: cuda_graph_seconds(schedule, count))
  def seconds(count:int) -> float:
    together = min(count, GRAPH_LAUNCHES)
    return statistics.mean(graph(together)() for _ in range(round(count/together)))
  return seconds

def timed_rounds(seconds:Callable[[int], float]) -> tuple[int, tuple[float, ...]]:
  """Returns (number of runs in a round, mean seconds of one run in each round); `seconds(count)` measures `count` runs."""
  # There is only one round if a single run takes longer than a round.
  if (once := seconds(1)) > ROUND_SECONDS: return 1, (once,)
  runs = runs_of_a_round(lambda: seconds(1))
  return runs, tuple(seconds(runs) for _ in range(ROUNDS))
