"""Compares attn's decoding with PyTorch's (FlashAttention-2 and cuDNN) on the same NVIDIA GPU, and times attention of a chunk of a prompt over a
cache. `DEV=CUDA python -m attn.measure.decode [WORD ...]` prints a line for each problem whose name contains every WORD. A word NAME=NUMBER changes
this number in every problem: B=8 keys=32768 page=16.

`TUNE=1 DEV=CUDA python -m attn.measure.decode 576` instead times every tile that the kernels of latent attention may have, and keeps the fastest in
the user's cache, where later calls find it, like TUNE=1 of bench.py."""
from __future__ import annotations
import dataclasses, math, os, sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
import numpy as np
from attn.api.checked_call import CheckedCall, prepare
from attn.api.launch import launch_kernels
from attn.cache import tuned
from attn.calls.options import options_of
from attn.calls.quantized import GivenRows, QuantizedLatent, QuantizedRows, quantize_kv
from attn.choose import splits
from attn.choose.dispatch import Work
from attn.choose.mla_tiles import ENTRY
from attn.kernels.tiles.amd import MlaTile
from attn.kernels.tiles.mma import MlaMmaTile
from attn.kernels.tiles.wgmma import MlaWgmmaTile
from attn.measure.machine import need
from attn.measure.peers import OURS, torch_peers
from attn.measure.rounds import ROUNDS, in_turn
from attn.measure.rows import heads_text, line_of_row
from attn.problem import BYTES, Problem
from attn.search.latent import latent_space
from attn.tinygrad_compat import Tensor, compiled, cuda_graph_seconds, device_seconds, foreign_cuda_context

# Times are device times of one step, measured by events around a graph of 100 steps that run one after another. Each time is a median over rounds. In
# a round attn and each peer are timed once, one after another. The rate is the bytes of K and V, each read once, per second. PyTorch has no kernels
# for latent attention (problems with 576), and is not timed with pages and with chunks of prompts either. With TUNE=1 each tile is timed with the
# number of key ranges (KV splits) that attn would choose for it.

STEPS = 100
REPEATED = 2**24     # K and V repeat at most this many random numbers

@dataclass(frozen=True)
class DecodeStep:
  """Decode step of B sequences, or a chunk of a prompt: the last `queries` tokens of each sequence under a causal mask."""
  B: int
  H: int
  Hkv: int
  keys: int  # of each sequence
  D: int = 128
  page: int = 0  # rows in a page of the cache; 0: no pages
  v_dim: int = 0  # V is the first v_dim columns of K; 0: a tensor of its own
  bits: int = 16  # 16 for a cache of float16, 8 for int8 with float32 scales
  queries: int = 1
  def __str__(self) -> str:
    width = f"{self.D}/{self.v_dim}" if self.v_dim else f"{self.D}"
    return f"({self.B}, {heads_text(self.H, self.Hkv)}, {self.queries} x {self.keys}, {width})" + f" pages of {self.page}"*(self.page > 0) \
           + " int8"*(self.bits == 8)
  @property
  def bytes_read(self) -> int:
    """Bytes of K and V with their scales, each counted once."""
    stored = 0 if self.bits == 16 else self.v_dim or self.D      # elements of a row that have 8 bits
    of_row = stored + 2*(self.D - stored) + (BYTES["float32"] if stored else 0)
    return self.B*self.Hkv*self.keys*of_row*(1 if self.v_dim else 2)
  @property
  def flops(self) -> int:
    """FLOPs of the scores that no mask hides."""
    # Each query sees one key more than the query before it, and the last one sees all keys.
    scores = self.queries*self.keys - self.queries*(self.queries - 1)//2
    return 2*self.B*self.H*scores*(self.D + (self.v_dim or self.D))

LARGE_CACHES = DecodeStep(64, 32, 8, 4096), DecodeStep(1, 32, 8, 131072)
OF_LATENT = tuple(DecodeStep(B, heads, 1, 4096, 576, page, v_dim=512) for B, heads, page in ((64, 128, 0), (64, 128, 64), (64, 16, 0), (1, 128, 0)))
CHUNKS = tuple(DecodeStep(B, 32, 8, keys, D, queries=queries) for B, queries, keys, D in (
  (4, 512, 4096, 64), (4, 512, 4096, 128), (4, 512, 4096, 256), (4, 128, 4096, 128), (16, 64, 4096, 128), (1, 2048, 8192, 128), (1, 512, 32768, 128)))
DECODES = (DecodeStep(1, 32, 8, 16384), DecodeStep(1, 32, 8, 2048), DecodeStep(1, 32, 32, 16384), DecodeStep(128, 16, 1, 2048), *LARGE_CACHES,
           *(replace(row, page=page) for row in LARGE_CACHES for page in (16, 64)), *OF_LATENT,
           *(replace(row, page=page, bits=8) for row in LARGE_CACHES for page in (0, 16)),
           *(replace(row, bits=8) for row in OF_LATENT),
           *(DecodeStep(1, 32, 8, keys, bits=bits) for keys in (4096, 8192, 16384) for bits in (16, 8)),
           *(replace(row, bits=bits) for row in CHUNKS for bits in (16, 8)))

def normal(*shape:int) -> Tensor:
  """Returns a tensor of normally distributed random numbers, in which the same REPEATED numbers come again and again."""
  count = math.prod(shape)
  drawn = np.random.default_rng(0).standard_normal(min(count, REPEATED), np.float32).astype(np.float16)
  x = Tensor(drawn)
  return (x if count <= REPEATED else x.expand(count//REPEATED, REPEATED)).reshape(shape).contiguous().realize()

def call_of(row:DecodeStep) -> CheckedCall:
  """Returns the checked call of `attention` for the decode step `row`, on random numbers."""
  q, blocks, options = normal(row.B, row.H, row.queries, row.D), row.keys//row.page if row.page else 0, dict[str, Any]()
  shape = (row.B*blocks, row.page, row.Hkv, row.D) if row.page else (row.B, row.Hkv, row.keys, row.D)
  if row.page:
    # The pages are in random order.
    order = np.random.default_rng(1).permutation(row.B*blocks).astype(np.int32).reshape(row.B, blocks)
    options |= {"block_table": Tensor(order).realize(), "kv_lengths": Tensor(np.full(row.B, row.keys, np.int32)).realize()}
  if row.queries > 1: options["causal"] = True
  if row.v_dim:
    return prepare(q, latent_of_bits(normal(*shape), row.v_dim, row.bits), None, options_of("attention", {**options, "v_dim": row.v_dim}))
  k, v = (cache_of_bits(normal(*shape), row.bits) for _ in range(2))
  return prepare(q, k, v, options_of("attention", options))

def cache_of_bits(rows:Tensor, bits:int) -> GivenRows:
  """Returns rows of a cache unchanged if `bits` is 16; if `bits` is 8, as int8 numbers with a scale for each row."""
  return rows if bits == 16 else QuantizedRows(*(t.contiguous().realize() for t in quantize_kv(rows)))

def latent_of_bits(rows:Tensor, v_dim:int, bits:int) -> GivenRows:
  """Returns rows of a latent cache unchanged if `bits` is 16; if `bits` is 8, with the first `v_dim` columns rounded to int8."""
  if bits == 16: return rows
  return QuantizedLatent(*(t.contiguous().realize() for t in (*quantize_kv(rows[..., :v_dim]), rows[..., v_dim:])))

def our_timer(call:CheckedCall, work:Work|None=None) -> Callable[[], float]:
  """Returns a timer of one decode step: a function that returns seconds; `work` has the tiles and key ranges, by default those that attn chooses."""
  choice = call.choice()
  o, = launch_kernels(call, choice if work is None else replace(choice, work=work))
  schedule = compiled(o)
  device_seconds(schedule)
  return cuda_graph_seconds(schedule, STEPS) if str(call.at.device).startswith("CUDA") else lambda: device_seconds(schedule)

def torch_graph_timer(run:Callable[[], Any]) -> Callable[[], float]:
  """Returns a timer of one call of `run`: a function that launches a CUDA graph of STEPS calls and returns the mean seconds of a call."""
  import torch
  for _ in range(3): run()
  torch.cuda.synchronize()
  graph = torch.cuda.CUDAGraph()
  with torch.cuda.graph(graph):
    for _ in range(STEPS): run()
  def seconds() -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))*1e-3/STEPS
  seconds()
  return seconds

def peer_timers(row:DecodeStep) -> dict[str, Callable[[], float]]:
  """Returns {backend name: timer of a decode step by PyTorch, a function that returns seconds}, without backends that cannot compute the step."""
  import torch
  if row.page or row.v_dim or row.queries > 1: return {}
  q, k, v = (torch.randn(row.B, h, n, row.D, device="cuda", dtype=torch.float16) for h, n in ((row.H, 1), (row.Hkv, row.keys), (row.Hkv, row.keys)))
  p = Problem(row.B, row.H, row.Hkv, 1, row.keys, row.D, row.D, softmax_scale=row.D**-.5)
  return {name: torch_graph_timer(run) for name, (run, _) in torch_peers(p, False, q, k, v).items()}

def compare(row:DecodeStep) -> dict[str, Any]:
  """Times a decode step with attn's kernel and with PyTorch's kernels, and returns a row of the printed table."""
  import torch
  torch.cuda.init()
  torch.zeros(1, device="cuda")
  theirs = peer_timers(row)
  with foreign_cuda_context() as in_theirs:
    call = call_of(row)
    timers = {OURS: our_timer(call), **{name: in_theirs(timer) for name, timer in theirs.items()}}
    for timer in timers.values(): timer()
    times = in_turn(timers)
  work = call.choice().work
  best = min((t for name, t in times.items() if name != OURS), default=None)
  return {"row": str(row), "tile": str(work.tile), "splits": work.splits, **{f"us {name}": t*1e6 for name, t in times.items()},
          "TB/s": row.bytes_read/times[OURS]/1e12, "TFLOP/s": row.flops/times[OURS]/1e12, "x best": best/times[OURS] if best else ""}

Timer = Callable[[CheckedCall, Work], float]

def fastest_step(call:CheckedCall, work:Work) -> float:
  """Returns the seconds of a decode step with the tiles and key ranges of `work`: the least of several rounds."""
  seconds = our_timer(call, work)
  return min(seconds() for _ in range(ROUNDS))

def tune(row:DecodeStep, seconds:Timer=fastest_step) -> list[dict[str, Any]]:
  """Times a decode step with every possible tile by the function `seconds`, keeps the fastest tile, and returns rows for printing, fastest first."""
  call = call_of(row)
  if call.arch is None or not row.v_dim: raise ValueError(f"TUNE=1 of {row}: it is for latent attention (v_dim); bench.py tunes other kernels")
  p, arch = call.problem, dataclasses.replace(call.arch, tuned=False)
  own = dataclasses.replace(call, arch=arch).choice().work.tile
  rows:dict[Any, Any] = latent_space(p, arch)
  if not isinstance(own, MlaTile|MlaMmaTile|MlaWgmmaTile):
    raise ValueError(f"TUNE=1 of {row}: {arch.name} has no kernel of latent attention for it")
  timed = []
  for tile in dict.fromkeys((own, *rows)):
    work = Work(tile, splits.resolve(p, arch, tile).num_splits)
    timed.append((seconds(call, work), tile, work.splits))
  timed.sort(key=lambda x: x[0])
  least, best, _ = timed[0]
  tuned.store(p, arch, rows[best] if best != own else None, least, ENTRY)
  return [{"row": str(row), "tile": str(tile), "options": getattr(tile, "options", ""), "splits": parts, "us": 1e6*x,
           "chosen by": "the table" if tile == own else ""} for x, tile, parts in timed]

def decode_steps(words:list[str]) -> list[DecodeStep]:
  """Returns the decode steps whose name contains every word; a word NAME=NUMBER changes this number in each step instead."""
  # Raises ValueError for a word with an unknown NAME or a wrong NUMBER.
  names, changes = [f.name for f in dataclasses.fields(DecodeStep)], dict[str, int]()
  for word in words:
    name, equals, number = word.partition("=")
    if not equals: continue
    if name not in names: raise ValueError(f"{word}: must be NAME=NUMBER, NAME one of {', '.join(names)}")
    changes[name] = int(number) if number.isdecimal() else -1
    if changes[name] < (name not in ("page", "v_dim")): raise ValueError(f"{word}: must be a whole number, at least 1")
    if name == "bits" and changes[name] not in (8, 16): raise ValueError(f"{word}: must be bits=16 or bits=8")
  rows = [row for row in DECODES if all(word in str(row) for word in words if "=" not in word)]
  return list(dict.fromkeys(replace(row, **changes) for row in rows))

def main(words:list[str]) -> None:
  measure = tune if os.environ.get("TUNE") == "1" else lambda row: [compare(row)]
  for row in decode_steps(words):
    for found in measure(row):
      print(line_of_row(found), flush=True)

if __name__ == "__main__":
  need("python -m attn.measure.decode", "torch", device="CUDA")
  try: main(sys.argv[1:])
  except ValueError as e: raise SystemExit(f"python -m attn.measure.decode: {e}") from None
