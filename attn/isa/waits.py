"""Waits of an iteration of the hot loop: which memory accesses each wait is for, and which accesses are still incomplete at each barrier."""
from __future__ import annotations
import re
from dataclasses import dataclass
from collections.abc import Sequence
from attn.chips import Chip
from attn.chips.family import Counters
from attn.isa.flow import Block, Loop, way_inside
from attn.isa.instruction import Instruction

# A counter counts the accesses that a wave has issued and that are not complete. Accesses complete in the order of issue, and a wait for n lasts
# until at most n of them are left. Scalar loads may complete in another order; while they are under way, code waits until 0 accesses are left. AMD's
# ISA documents, "Data Dependency Resolution", and LLVM, lib/Target/AMDGPU/SIInsertWaitcnts.cpp, say which accesses each counter counts. A wait for
# the vector ALU (depctr) is listed without what it waits for.

def counters_in(number:int, counters:Counters) -> dict[str, int]:
  """Decodes the number in s_waitcnt: returns {counter: number of accesses that may still be incomplete after the wait}."""
  found = {}
  for name, fields in counters.number.items():
    value = shift = 0
    for first, bits in fields: value, shift = value | (number >> first & (1 << bits) - 1) << shift, shift + bits
    if value < counters.most(name): found[name] = value
  return found

@dataclass(frozen=True)
class Awaited:
  """Memory accesses that a wait instruction waits for: their number, and facts about the last one."""
  accesses: int                 # number of accesses
  last: str                     # text of the instruction of the last access
  kind: str                     # kind of that instruction
  instructions: int             # instructions from the issue of the last access to the wait
  matrix: int                   # matrix instructions among these

@dataclass(frozen=True)
class Stop:
  """A barrier, or a wait instruction for one counter such as vmcnt, in an iteration of the hot loop."""
  at: int                       # index among the instructions of the iteration
  matrix: int                   # matrix instructions of the iteration before it
  what: str                     # such as "vmcnt(4)", "s_barrier", or the text of a wait for the vector ALU
  awaited: Awaited|None         # None: a barrier, or a wait for accesses that are done already
  under_way: dict[str, int]     # counter -> accesses that are still under way after it

_NO_ACCESS = ("buffer_inv", "buffer_gl", "global_inv", "global_wb", "s_dcache")    # instructions on caches
_WITH_RESULT = re.compile(r"\b(glc|sc0|TH_ATOMIC_RETURN)\b")

def raised_by(x:Instruction, counters:Counters) -> set[str]:
  """Returns the counters of memory accesses, such as vmcnt, that an instruction increments."""
  if x.op.startswith(_NO_ACCESS): return set()
  if x.kind.startswith("lds_"): return {counters.lds}
  if x.kind == "scalar_load": return {counters.scalar}
  if x.kind not in ("load", "load_to_lds", "store", "scratch", "memory_other"): return set()
  stores = "store" in x.op or (x.kind == "memory_other" and _WITH_RESULT.search(x.args) is None)
  return {counters.store if stores else counters.load} | ({counters.lds} if x.op.startswith("flat_") else set())

def waited_for(x:Instruction, counters:Counters) -> dict[str, int]:
  """Returns {counter: number of accesses that may still be incomplete after the instruction's wait}; empty for a wait for the vector ALU."""
  named = {name: int(n) for name, n in re.findall(r"(\w+cnt)\((\d+)\)", x.args)}
  number = re.search(r"(?:^|\s)(0x[0-9a-f]+|\d+)$", x.args)
  if named or number is None: return named
  value = int(number[1], 0)
  if x.op == "s_waitcnt": return counters_in(value, counters)
  if (both := re.fullmatch(r"s_wait_(\w+cnt)_dscnt", x.op)) is not None: return {both[1]: value >> 8 & 63, "dscnt": value & 63}
  one = re.fullmatch(r"s_wait(?:cnt)?_(\w+cnt)", x.op)
  return {one[1]: value} if one is not None else {}

def path_of_waits(blocks:Sequence[Block], loop:Loop, usual:Sequence[int]) -> list[int]:
  """Returns the basic blocks of an iteration that can have waits: those of the path `usual`, and those that waves without active lanes skip."""
  path = []
  for b, after in zip(usual, [*usual[1:], loop.header]):
    path.append(b)
    # blocks beside it: those that an s_cbranch_execz on the path skips only for waves without active lanes
    jumps = bool(blocks[b].instructions) and blocks[b].instructions[-1].op == "s_cbranch_execz"
    if jumps and b + 1 in loop.body and b + 1 != after: path += way_inside(blocks, loop, b + 1, after)
  return path

TRIPS = 3      # iterations until each further one begins with the same accesses under way, if no access lasts more than two iterations

@dataclass(frozen=True)
class _Access:
  issued: Instruction
  at: int
  matrix: int

def _awaited(accesses:Sequence[_Access], now:int, matrix:int) -> Awaited:
  last = accesses[-1]
  return Awaited(len(accesses), last.issued.text, last.issued.kind, now - last.at, matrix - last.matrix)

def waits_of(trip:Sequence[Instruction], chip:Chip) -> list[Stop]:
  """Returns the waits and barriers of a loop iteration in the steady state."""
  counters, stops = chip.counters, list[Stop]()
  # accesses of earlier iterations may still be under way when the iteration begins
  under_way = {name: list[_Access]() for name in (counters.load, counters.store, counters.lds, counters.scalar)}
  now = matrix = 0
  for _ in range(TRIPS):
    stops, begin, matrix_before = [], now, matrix
    for x in trip:
      for name in raised_by(x, counters): under_way[name].append(_Access(x, now, matrix))
      done = {}
      for name, most in (waited_for(x, counters) if x.kind == "wait" else {}).items():
        pending = under_way.get(name, [])
        left = max(0, len(pending) - most)
        done[f"{name}({most})"], under_way[name] = pending[:left], pending[left:]
      if x.kind in ("wait", "barrier"):
        still = {name: len(left) for name, left in under_way.items() if left}
        for what, accesses in (done or {x.text: []}).items():
          awaited = _awaited(accesses, now, matrix) if accesses else None
          stops.append(Stop(now - begin, matrix - matrix_before, what, awaited, still))
      now, matrix = now + 1, matrix + (x.kind == "matrix")
  return stops

def time_of_loads(stops:Sequence[Stop]) -> int|None:
  """Returns the smallest number of matrix instructions between a load from memory and the wait for it; None if nothing waits for a load."""
  return min((x.awaited.matrix for x in stops if x.awaited is not None and x.awaited.kind in ("load", "load_to_lds")), default=None)
