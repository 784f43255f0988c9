"""Upper bound on TFLOP/s for a problem, a tile description and a chip, and the rates that others measured. The bound is computed, not measured.

  bound = roofline(problem, tile, *RATED["MI300X"], overlap=report.loop.overlap)"""
from __future__ import annotations
from dataclasses import dataclass
from collections.abc import Iterable
from attn.chips import CHIPS, Card, Chip
from attn.chips.matrix import contraction
from attn.kernels.parts.program.counts import ceildiv, round_up
from attn.kernels.tiles.amd import Tile
from attn.problem import Problem

# The time of a problem is at least as long as each of two times. The time of computing is work/(peak*use): `work` is the operations of the busiest
# compute unit, including masked and padded parts of its tiles; `peak` is the dense rate of a compute unit; `use` is the largest use of the matrix
# unit that the hot loop allows. The time of memory is bytes/bandwidth, where each tensor is moved once. The bound is useful operations divided by
# the longer time. Not modelled: caches, latency, prologue and epilogue, power and clocks under load.

RATED: dict[str, tuple[Chip, Card]] = {card.name: (chip, card) for chip in CHIPS.values() for card in chip.cards if card.ghz}

def rated(arch:str) -> list[tuple[Chip, Card]]:
  """Returns the cards with this chip whose clock and bandwidth are known."""
  return [(chip, card) for chip, card in RATED.values() if chip.name == arch.split(":")[0]]

@dataclass(frozen=True)
class Roofline:
  chip: Chip
  card: Card
  balance: float         # mean load of the compute units / load of the busiest compute unit: below 1 if some are idle at the end of the grid
  useful: float          # visible scores / computed scores, times the same ratio for head dimensions
  compute_seconds: float
  memory_seconds: float
  tflops: float          # the bound
  @property
  def limit(self) -> str: return "memory" if self.memory_seconds > self.compute_seconds else "compute"

def trips(p:Problem, tile:Tile) -> list[int]:
  """Returns the number of key tiles over which each block of queries of one head loops."""
  left, right = p.window
  found = []
  for first in range(0, p.Sq, tile.block_m):
    last = min(first + tile.block_m, p.Sq) - 1
    begin = max(0, first + p.offset - left) if left >= 0 else 0
    end = min(p.Sk, last + p.offset + right + 1) if right >= 0 else p.Sk
    found.append(max(0, ceildiv(end, tile.block_n) - begin//tile.block_n))
  return found

def makespan(sizes:Iterable[int], copies:int, machines:int) -> int:
  """Returns a lower bound on the time in which `machines` compute units run all jobs: `copies` jobs of each duration in `sizes`."""
  jobs = sorted(sizes, reverse=True)
  count, total = len(jobs)*copies, sum(jobs)*copies
  # The bound is the largest of several. One is the mean time of the units. The others follow from the longest jobs: of 2*machines + 1 jobs, some
  # unit gets at least three, so its time is at least the sum of the three shortest of these jobs. The same holds for other multiples of `machines`.
  found = ceildiv(total, machines)
  for k in range((count - 1)//machines + 1):
    last = machines*k
    found = max(found, sum(jobs[(last - i)//copies] for i in range(k + 1)))
  return found

def roofline(p:Problem, tile:Tile, chip:Chip, card:Card, overlap:float=1.0) -> Roofline:
  """Returns an upper bound on the speed (TFLOP/s) of the problem `p` on a card whose clock is known."""
  # `overlap` is the largest possible use of the matrix unit in the hot loop: HotLoop.overlap, or HotLoop.serial for a loop in which nothing overlaps.
  #
  # if a workgroup has fewer waves than SIMDs, other workgroups run beside it at full speed
  beside = max(1, chip.pipes.simds//tile.waves)
  blocks, machines = trips(p, tile), card.cus*beside
  depth, width = contraction(tile.matrix, p.D), round_up(p.Dv, tile.matrix.M)
  per_trip = 2*tile.block_m*tile.block_n*(depth + width)
  total, busiest = sum(blocks)*p.B*p.H, makespan(blocks, p.B*p.H, machines)
  compute = busiest*per_trip/(chip.peak(card)*1e12/machines*overlap)
  size, out_size = p.itemsize, p.out_itemsize
  moved = p.B*(p.H*p.Sq*(p.D*size + p.Dv*out_size) + p.Hkv*p.Sk*p.key_bytes)
  memory = moved/(card.gbs*1e9)
  return Roofline(chip, card, total/(busiest*machines) if busiest else 1.0, p.flops/(total*per_trip) if total else 0.0, compute, memory,
                  p.flops/max(compute, memory)/1e12)

# ***** what others measured *****

@dataclass(frozen=True)
class Published:
  """Published speed of another project's forward kernel."""
  card: str
  kernel: str
  tflops: float
  # None: the source does not state the field, or states one speed for all of its values
  causal: bool
  d: int|None
  s: int|None
  dtype: str|None = None
  b: int|None = None
  h: int|None = None
  hkv: int|None = None

def _series(card:str, figures:dict[str, tuple[float|None, float|None]], d:int|None, s:int|None, dtype:str|None=None, b:int|None=None, h:int|None=None,
            hkv:int|None=None) -> list[Published]:
  """Returns a `Published` record for each number in `figures`, {kernel: (TFLOP/s without a mask, TFLOP/s with a causal mask)}."""
  # None: not measured; for a field of the problem: not stated
  return [Published(card, kernel, value, causal, d, s, dtype, b, h, hkv) for kernel, pair in figures.items()
          for causal, value in zip((False, True), pair, strict=True) if value is not None]

PUBLISHED: list[Published] = [
  *_series("MI355X", {"HipKittens": (1304, 1188), "AITER": (1283, 1247)}, 128, 16384, "bfloat16", 16, 16),
  *_series("MI355X", {"AITER assembly": (1390, 1278)}, 128, 8192, "bfloat16", 4, 64, 8),
  *_series("MI355X", {"FlyDSL dual-wave": (None, 1134), "OPUS": (None, 1135), "AITER assembly": (None, 1185)}, 128, 8192, "bfloat16", 16, 64),
  *_series("MI355X", {"FlyDSL dual-wave": (None, 1237)}, 128, 8192, "bfloat16", 16, 64, 8),
  *_series("MI355X", {"HipKittens": (969, 862), "AITER": (777, 596)}, 64, 16384, "bfloat16"),
  *_series("MI355X", {"Composable Kernel": (908, 903), "Triton": (988, 750), "PyTorch": (873, 762)}, 128, 16384),
  *_series("MI300X", {"AITER assembly, RNE": (480, None), "AITER assembly, RTNA": (501, None), "AITER assembly, RTZ": (544, None),
                      "MoonMath, RNE": (564, None), "MoonMath, RTNA": (574, None), "MoonMath, RTZ": (584, None), "Modular MAX": (399, None)},
           128, 16384, "bfloat16", 4, 16),
  *_series("MI325X", {"AITER assembly": (None, 639), "Composable Kernel": (None, 420), "FlyDSL": (None, 391)}, 128, 8192, "float16", 1, 64),
  *_series("RX 9070 XT", {"hand assembly": (103, None), "AITER FlyDSL": (100, None), "PyTorch SDPA": (51, None)}, 128, 4096, h=24),
  *_series("RX 7900 XTX", {"ROCm FlashAttention-2 port": (48, None)}, 64, 2048, b=8),
]

def published(p:Problem, card:str) -> list[Published]:
  """Returns the rates that others measured on `card` for problems with the shape of `p`, the highest first."""
  causal = p.window == (-1, 0)
  if p.Sq != p.Sk or p.Dv != p.D or not (causal or p.window == (-1, -1)): return []
  asked = {"d": p.D, "s": p.Sq, "dtype": p.dtype, "b": p.B, "h": p.H, "hkv": p.Hkv}
  def fits(x:Published) -> bool:
    # if a source states only the number of query heads, there are equally many key/value heads
    stated = {**{k: getattr(x, k) for k in asked}, "hkv": x.hkv if x.hkv is not None else x.h}
    return x.card == card and x.causal == causal and all(v is None or v == asked[k] for k, v in stated.items())
  # a rate whose source does not state a dimension, such as the batch, matches every value of it
  return sorted((x for x in PUBLISHED if fits(x)), key=lambda x: -x.tflops)
