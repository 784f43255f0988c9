"""Predicts the time of a kernel's hot loop in cycles, from its assembly text. Begin with `timing_of`."""
from __future__ import annotations
import math, re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from attn.chips import Chip, modelled
from attn.isa.flow import Block, Loop, blocks_of, loops_of, matrix_loops, usual_path, way_inside
from attn.isa.instruction import Instruction, access_bytes, matrix_shape
from attn.isa.parse import Kernel, parse
from attn.isa.report import PRODUCTS, LoopProducts, Resources, flops_of_score, loops_with_part, pick_kernel, resources_of
from attn.isa.timing.addresses import WaveState, bank_cycles_of
from attn.isa.timing.steps import Pipe, TripStep, trip_steps, unknown
from attn.isa.timing.waves import Run, Wave, step_waves

# a simulation steps the waves of a compute unit through several iterations of the loop; the prediction is the simulated time of one iteration
WARM, MEASURED = 2, 4      # simulated iterations before the timed ones, and timed iterations
MOST_ISSUES = 60000        # rough limit of instructions to step: a long loop is stepped through fewer iterations

@dataclass(frozen=True)
class Stall:
  """Mean time per iteration that waves wait at one instruction of the simulated loop."""
  step: TripStep
  cycles: float      # cycles from the earliest cycle that the instruction before allowed until the issue
  idle: float        # part of these cycles in which the SIMD's matrix unit was idle
  why: str           # main cause: "access", "result", "unit", "barrier"

@dataclass(frozen=True)
class LoopTiming:
  """Predicted time of one iteration of a loop."""
  label: str
  cycles: float                    # cycles in which all waves make one iteration
  matrix_use: float                # share of these cycles in which the matrix unit is in use
  scores: float|None               # scores that a wave computes in an iteration, None if the head dimension is not known
  flops: int                       # operations of the matrix instructions of a wave's iteration
  steps: tuple[TripStep, ...]          # steps of an iteration of the first wave
  stalls: tuple[Stall, ...]        # waits, the costliest first
  run: Run
  conflicts: int                   # cycles that bank conflicts add to an iteration of the waves of a workgroup
  unknown_addresses: int           # LDS accesses of a wave's iteration with unknown addresses, which count as free of conflicts

@dataclass(frozen=True)
class Timing:
  """Predicted time of a kernel's hot loops, and the workgroups that run on a compute unit at the same time."""
  name: str
  chip: Chip
  resources: Resources
  waves: int                       # waves of a workgroup
  groups: int                      # workgroups on a compute unit
  whole_processor: bool            # RDNA: a workgroup runs on both compute units of a pair
  behind: int                      # waves of a workgroup that begin the loop one barrier behind the others
  loops: tuple[LoopTiming, ...]
  edges: int                       # cycles of a workgroup before and after its loops
  unknown: tuple[str, ...] = field(default=())
  @property
  def cycles(self) -> float:
    """Cycles of one iteration of every loop, added up."""
    return sum(x.cycles for x in self.loops)
  @property
  def matrix_use(self) -> float: return sum(x.matrix_use*x.cycles for x in self.loops)/self.cycles
  @property
  def share(self) -> float:
    """Matrix operations of the loops divided by those that the chip could do in the same cycles at its dense 16-bit peak rate."""
    rate = self.chip.pipes.flops*(2 if self.whole_processor else 1)
    return sum(x.flops for x in self.loops)*self.waves*self.groups/(self.cycles*rate)

# ***** paths *****

def _way(blocks:Sequence[Block], first:int, last:int, avoid:set[int]) -> list[int]:
  """Returns the basic blocks of a path from block `first` to just before block `last`, without blocks in `avoid`; empty if there is no such path."""
  def reaches(b:int, seen:set[int]) -> bool:
    stack, seen = [b], set(seen)
    while stack:
      if (x := stack.pop()) == last: return True
      if x in seen or x in avoid: continue
      seen.add(x)
      stack += blocks[x].successors
    return False
  way, b = list[int](), first
  while b != last:
    if b in way or b in avoid: return []
    way.append(b)
    # at each branch the path falls through if it can
    onward = sorted(blocks[b].successors, key=lambda s: s != b + 1)
    following = next((s for s in onward if reaches(s, set(way))), None)
    if following is None: return []
    b = following
  return way

def _path_of_wave(blocks:Sequence[Block], loop:Loop, usual:Sequence[int], state:WaveState) -> list[int]:
  """Returns the basic blocks that a wave runs in one iteration; updates `state`, the values of the wave's registers, by their instructions."""
  path = list[int]()
  for b, after in zip(usual, [*usual[1:], loop.header]):
    path.append(b)
    for x in blocks[b].instructions: state.follow(x)
    # on the path `usual` each branch s_cbranch_execz skips some blocks, as it does for waves without active lanes: a wave with an active lane runs
    # them
    jumps = bool(blocks[b].instructions) and blocks[b].instructions[-1].op == "s_cbranch_execz"
    if jumps and b + 1 in loop.body and b + 1 != after and state.known_active:
      for side in way_inside(blocks, loop, b + 1, after):
        path.append(side)
        for x in blocks[side].instructions: state.follow(x)
  return path

def _instructions(blocks:Sequence[Block], path:Sequence[int]) -> list[Instruction]: return [x for b in path for x in blocks[b].instructions]

def _taken(blocks:Sequence[Block], path:Sequence[int], closed:bool) -> list[bool]:
  """Returns, for each instruction in the basic blocks `path`, whether it is a taken branch; `closed`: the first block follows the last one."""
  found = list[bool]()
  for b, after in zip(path, [*path[1:], path[0] if closed else -1]):
    found += [False]*len(blocks[b].instructions)
    if found and blocks[b].instructions and after != -1 and after != b + 1: found[-1] = True
  return found

# ***** workgroups *****

def _waves_of_a_group(resources:Resources, chip:Chip) -> int:
  if resources.threads is None: raise ValueError("the text doesn't say how many threads a workgroup has: give the number with --threads")
  return -(-resources.threads//chip.wave)

def _groups_of_a_unit(resources:Resources, chip:Chip, waves:int, simds:int) -> int:
  limits = [x for x in (resources.waves_by_registers, resources.waves_by_lds) if x is not None]
  room = math.floor(min(limits, default=chip.pipes.max_waves)*simds + 1e-9)
  return max(1, room//waves)

def _behind(blocks:Sequence[Block], prologue:Sequence[int], waves:int) -> int:
  """Returns how many waves of a workgroup pass an additional barrier before they enter the loop."""
  # if one of these blocks can jump over a block with nothing but a barrier, half of the waves are assumed to take the barrier
  return waves//2 if any(len(blocks[b].successors) == 2 and b + 1 < len(blocks) and _only_a_barrier(blocks[b + 1]) and
                         b + 1 in blocks[b].successors for b in prologue) else 0

def _only_a_barrier(block:Block) -> bool:
  kinds = [x.kind for x in block.instructions]
  return "barrier" in kinds and all(k in ("barrier", "wait", "hint", "nop", "branch") for k in kinds)

# ***** timing *****

def _stalls(found:Run, steps:Sequence[TripStep]) -> tuple[Stall, ...]:
  """Returns the time that waves wait at each instruction, as means over all waves that take the same path as the first wave."""
  same = [i for i, w in enumerate(found.waves) if w.steps is found.waves[0].steps or len(w.steps) == len(steps)]
  sums: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
  reasons: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
  busy = [_Busy(x) for x in found.matrix]
  trips = max(1, sum(x.step == 0 and x.wave in same for x in found.issues))
  for x in found.issues:
    if x.wave not in same or x.at <= x.since: continue
    sums[x.step][0] += x.at - x.since
    sums[x.step][1] += busy[found.waves[x.wave].simd].idle(x.since, x.at)
    reasons[x.step][x.why] += x.at - x.since
  rows = [Stall(steps[i], a/trips, b/trips, max(reasons[i], key=lambda r: reasons[i][r])) for i, (a, b) in sums.items()]
  return tuple(sorted(rows, key=lambda s: (-s.idle, -s.cycles)))

class _Busy:
  """Intervals of cycles in which a unit is in use. `idle(a, b)` returns how many of the cycles from a up to b the unit is free."""
  def __init__(self, intervals:Sequence[tuple[int, int]]):
    self.starts, self.ends, self.sums = list[int](), list[int](), [0]
    for a, b in intervals:
      if self.ends and a < self.ends[-1]: a = self.ends[-1]
      if b <= a: continue
      self.starts.append(a)
      self.ends.append(b)
      self.sums.append(self.sums[-1] + b - a)
  def _until(self, t:int) -> int:
    i = bisect_right(self.starts, t)
    return self.sums[i] - max(0, self.ends[i - 1] - t) if i else 0
  def idle(self, a:int, b:int) -> int: return b - a - (self._until(b) - self._until(a))

def _use(found:Run) -> float:
  """Returns the share of the simulation's recorded cycles in which the matrix units work."""
  used = [_Busy(x) for x in found.matrix]
  return sum(1 - u.idle(found.begin, found.end)/(found.end - found.begin) for u in used)/len(used)

def _beside(blocks:Sequence[Block], loops:Sequence[Loop], loop:Loop) -> Loop:
  """Returns the loop that half of a workgroup's waves runs while the other half runs `loop`; `loop` itself if all waves run it."""
  # such a loop has the same matrix work and the same number of barriers, and no wave runs both loops in one iteration of an outer loop
  def traits(x:Loop) -> tuple[int, int]:
    return sum(blocks[b].flops for b in x.body), sum(i.kind == "barrier" for b in x.body for i in blocks[b].instructions)
  def leads(a:Loop, b:Loop) -> bool:
    around = {x.header for x in loops_of(blocks) if {a.header, b.header} <= x.body}
    return b.header in _reachable(blocks, a.header, around)
  others = (x for x in loops if x is not loop and traits(x) == traits(loop) and traits(x)[1] and not leads(x, loop) and not leads(loop, x))
  return next(others, loop)

def _reachable(blocks:Sequence[Block], first:int, avoid:set[int]) -> set[int]:
  """Returns the basic blocks that can be reached from block `first` on paths that avoid the blocks `avoid`."""
  found, stack = set[int](), [first]
  while stack:
    if (b := stack.pop()) not in found:
      found.add(b)
      stack += [s for s in blocks[b].successors if s not in avoid]
  return found

def _loop_timing(blocks:Sequence[Block], pair:tuple[Loop, Loop], products:tuple[int, int], kernel:Kernel, chip:Chip, shape:tuple[int, int, int, int],
                 d:int|None, dv:int|None) -> LoopTiming:
  """Predicts the time of one iteration, while half of a workgroup's waves run pair[0] and the other half pair[1] (often the same loop)."""
  # In most kernels both loops are the same. `products`: two numbers of matrix products in an iteration, those with d (the head dimension) as one of
  # their three dimensions, and those with dv. `shape`: workgroups on a compute unit, waves of a workgroup, SIMDs, and waves of a workgroup that
  # begin the loop one barrier behind the others.
  groups, waves, simds, behind = shape
  per_exp = float(flops_of_score(products, d, dv))*chip.wave if d else 0.0
  two = bool(kernel.metadata.get("amdhsa_system_vgpr_workitem_id", 0))
  usual = {x.header: usual_path(blocks, x, per_exp) for x in pair}
  before = {x.header: _instructions(blocks, _way(blocks, 0, x.header, set())) for x in pair}
  programs: dict[tuple[tuple[int, ...], tuple[int|None, ...]], list[TripStep]] = {}
  mine, conflicts, unknowns = list[list[TripStep]](), 0, 0
  for wave in range(waves):
    loop = pair[2*wave >= waves]
    state = WaveState(chip, wave, two)
    for x in before[loop.header]: state.follow(x)
    again = state.copy()
    path = tuple(_path_of_wave(blocks, loop, usual[loop.header], state))
    trip = _instructions(blocks, path)
    banks = tuple(bank_cycles_of(trip, again))
    if (path, banks) not in programs: programs[path, banks] = trip_steps(trip, chip, banks, _taken(blocks, path, True))
    mine.append(programs[path, banks])
    without = _without_conflicts(trip, chip)
    conflicts += sum(b - free for b, free in zip(banks, without) if b is not None and free is not None)
    if wave == 0: unknowns = sum(x.unit == Pipe.LDS and b is None and x.instruction.kind != "lds_permute" for x, b in zip(mine[0], banks))
  all_waves = [Wave(g, (g*waves + i) % simds, mine[i], behind=behind > 0 and i >= waves - behind) for g in range(groups) for i in range(waves)]
  longest = sum(len(w.steps) for w in all_waves)
  measured = max(1, min(MEASURED, MOST_ISSUES//longest - WARM))
  warm = WARM if longest*(WARM + measured) <= MOST_ISSUES else 1
  apart = sum(x.hold for x in mine[0])//groups if groups > 1 else 0
  found = step_waves(all_waves, chip, warm + measured, warm, apart)
  steps = tuple(mine[0])
  flops = sum(matrix_shape(x.instruction.op)[1] for x in steps if x.instruction.kind == "matrix")
  scores = flops/flops_of_score(products, d, dv) if d else None
  label = " and ".join(dict.fromkeys(" ".join(blocks[x.header].labels) for x in pair))
  return LoopTiming(label, found.cycles, _use(found), scores, flops, steps, _stalls(found, steps), found, conflicts, unknowns)

def _without_conflicts(trip:Sequence[Instruction], chip:Chip) -> list[int|None]:
  # the bank cycles of an access to LDS without bank conflicts; None for other instructions
  rate = {"lds_read": chip.pipes.lds_read, "lds_write": chip.pipes.lds_write}
  return [-(-max(4, access_bytes(x.op))*chip.wave//rate[x.kind]) if x.kind in rate else None for x in trip]

def _edges(blocks:Sequence[Block], loops:Sequence[Loop], chip:Chip, waves:int, simds:int) -> int:
  """Returns the cycles that a workgroup alone on its compute unit takes for the code before its first loop and after its last loop."""
  first, last = loops[0], loops[-1]
  out = next((s for b in sorted(last.body) for s in blocks[b].successors if s not in last.body), None)
  ends = [i for i, b in enumerate(blocks) if b.instructions and b.instructions[-1].op.startswith("s_endpgm")]
  parts = [_way(blocks, 0, first.header, set())]
  if out is not None:
    after = [w + [e] for e in ends if (w := _way(blocks, out, e, last.body)) or out == e]
    parts += sorted(after, key=len)[-1:]
  total = 0
  for path in parts:
    trip = _instructions(blocks, path)
    if not trip: continue
    steps = trip_steps(trip, chip, [None]*len(trip), _taken(blocks, path, False))
    total += step_waves([Wave(0, i % simds, steps) for i in range(waves)], chip, 1, every=True).end
  return total

def timing_of(text:str, arch:str|None=None, d:int|None=None, dv:int|None=None, kernel_name:str|None=None, lds:int|None=None, threads:int|None=None,
              title:str|None=None, products:LoopProducts=PRODUCTS, behind:int|None=None, rank:int=0, grid:int|None=None) -> Timing:
  """Predicts the time of the hot loops of a kernel from its assembly text."""
  # d, dv     head dimensions as the kernel computes them: rounded up to whole matrix tiles
  # products  for each hot loop, a pair: how many matrix products have d as one of their three dimensions (such as S = Q K^T), and how many have dv
  #           (such as O = P V)
  # behind    number of waves of a workgroup that begin the loop one barrier behind the others; by default found in the text
  # rank      which loop is timed: 0 is the loop with the most matrix work, 1 the next one, and so on
  # grid      number of workgroups. If it is small, a compute unit of the chip's largest card runs fewer workgroups than it has room for
  kernel = pick_kernel(parse(text, arch), kernel_name)
  if kernel.arch is None: raise ValueError("the text doesn't name its chip: give arch, such as gfx942")
  chip = modelled(re.split(r"[:+-]", kernel.arch)[0])
  blocks = blocks_of(kernel.code)
  loops = matrix_loops(blocks)
  if len(loops) <= rank: raise ValueError(f"{kernel.name}: there is no loop with matrix instructions in it" + (f" of rank {rank}" if rank else ""))
  resources = resources_of(kernel, chip, lds, threads)
  waves = _waves_of_a_group(resources, chip)
  modes = (kernel.metadata.get(name, 0) for name in ("workgroup_processor_mode", "amdhsa_workgroup_processor_mode"))
  whole = any(modes) and not chip.pipes.coissue
  simds = chip.pipes.simds*(2 if whole else 1)
  groups = _groups_of_a_unit(resources, chip, waves, simds)
  if grid is not None: groups = min(groups, -(-grid//max(1, chip.cus*chip.pipes.simds//simds)))
  if len(products) == 1: chosen = [loops[rank]]
  else: chosen = [loops_with_part(blocks, loops, *(flops_of_score(x, d or 1, dv) for x in (one, max(products))))[rank] for one in products]
  if behind is not None and not 0 <= behind <= waves: raise ValueError(f"behind={behind}: a workgroup of {kernel.name} has only {waves} waves")
  lag = behind if behind is not None else _behind(blocks, _way(blocks, 0, chosen[0].header, set()), waves)
  shape = (groups, waves, simds, lag)
  timed = tuple(_loop_timing(blocks, (x, _beside(blocks, loops, x)), one, kernel, chip, shape, d, dv) for x, one in zip(chosen, products))
  names = tuple(dict.fromkeys(line for x in timed for line in unknown([s.instruction for s in x.steps], chip)))
  return Timing(title or kernel.name, chip, resources, waves, groups, whole, lag, timed, _edges(blocks, chosen, chip, waves, simds), names)
