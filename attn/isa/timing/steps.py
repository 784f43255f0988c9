"""Converts each instruction of a loop iteration to a step of the simulation: which unit it occupies, what it waits for, and when its result is ready.
Begin with `trip_steps`."""
from __future__ import annotations
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from attn.chips import Chip
from attn.chips.machine import Machine
from attn.isa.instruction import Instruction, access_bytes, matrix_shape, speed_of_products
from attn.isa.operands import registers, uses, written_operands
from attn.isa.waits import raised_by, waited_for

# An iteration of the loop is straight-line code that repeats. So an instruction always uses the result of the instruction that lies a fixed number
# of instructions before it, in this iteration or in the iteration before. The instruction issues at least a fixed number of cycles after that
# earlier instruction. Only s_waitcnt waits for the result of a load, as on the machine.

class Pipe(IntEnum):
  """Execution unit of a SIMD or compute unit."""
  # On CDNA the SIMDs of a compute unit issue instructions one after another, each SIMD in every fourth cycle. On RDNA each SIMD issues in every
  # cycle. In such a cycle each execution unit of the SIMD can start at most one instruction.
  VECTOR, MATRIX, TRANSCENDENTAL, SCALAR, LDS, MEMORY, BRANCH, NONE = range(8)

_UNIT_OF_KIND = {
  "matrix": Pipe.MATRIX, "exp": Pipe.TRANSCENDENTAL, "transcendental": Pipe.TRANSCENDENTAL, "valu": Pipe.VECTOR, "packed": Pipe.VECTOR,
  "dual": Pipe.VECTOR, "acc_move": Pipe.VECTOR, "lane": Pipe.VECTOR, "salu": Pipe.SCALAR, "scalar_load": Pipe.SCALAR, "hint": Pipe.NONE,
  "lds_read": Pipe.LDS, "lds_write": Pipe.LDS, "lds_permute": Pipe.LDS, "lds_other": Pipe.LDS, "load": Pipe.MEMORY, "store": Pipe.MEMORY,
  "load_to_lds": Pipe.MEMORY, "scratch": Pipe.MEMORY, "memory_other": Pipe.MEMORY, "branch": Pipe.BRANCH, "wait": Pipe.NONE, "barrier": Pipe.NONE,
  "nop": Pipe.NONE, "other": Pipe.NONE}

@dataclass(frozen=True)
class Dependence:
  """A wait of one instruction for the result of another, which stands `back` instructions before it."""
  back: int       # distance of the earlier instruction, in instructions
  latency: int    # least number of cycles from the issue of the earlier instruction
  register: str   # one of the registers waited for

@dataclass
class TripStep:
  """One instruction of a loop iteration, with the numbers from which its time is simulated."""
  instruction: Instruction
  unit: Pipe
  hold: int = 0                    # cycles for which the instruction holds vector issue, or its unit
  matrix: int = 0                  # cycles for which it holds the matrix unit
  alone: bool = False              # packed fp32 on a chip where packed fp32 and matrix instructions exclude each other
  needs: list[Dependence] = field(default_factory=list)
  awaits: list[int] = field(default_factory=list)      # accesses that have to be done, as distances in instructions
  pause: int = 1                   # cycles until the wave's next instruction
  transfer: int = 0                # cycles of an LDS port, or of the path to memory
  banks: int = 0                   # cycles of the LDS banks
  latency: int = 0                 # cycles of an access beyond its transfer
  priority: int|None = None        # priority that s_setprio sets
  arrives: bool = False            # arrives at a barrier
  waits_for_all: bool = False      # waits at a barrier for all waves

# ***** latencies *****

_SLOW = re.compile(r"v_(mul_lo_[ui]32|mul_hi_[ui]32|mad_[ui]64|mul_[ui]32$|mul_f64|fma_f64|add_f64)")
_PACKED_FP32 = re.compile(r"v_pk_(fma|mul|add)_f32")
_DOT = re.compile(r"v_dot")

def _is_slow(x:Instruction) -> bool: return _SLOW.match(x.op) is not None

def _latency(producer:Instruction, cycles:int, consumer:Instruction, as_sum:bool, m:Machine) -> int:
  """Returns the cycles from the issue of `producer` to the issue of `consumer`, which reads the producer's result. `producer` occupies the matrix
  unit for `cycles`."""
  # `as_sum`: `consumer` uses the result only as its accumulator operand C
  unit, user = _UNIT_OF_KIND[producer.kind], _UNIT_OF_KIND[consumer.kind]
  if unit == Pipe.MATRIX:
    if user == Pipe.MATRIX and as_sum: return cycles + (m.matrix_sum.value if cycles <= 8 else 0)
    return cycles + m.matrix.value
  if unit == Pipe.SCALAR: return m.scalar.value
  if unit not in (Pipe.VECTOR, Pipe.TRANSCENDENTAL): return 0
  if user in (Pipe.SCALAR, Pipe.BRANCH): return m.vector_to_scalar.value
  if unit == Pipe.TRANSCENDENTAL: return m.transcendental.value
  if _DOT.match(producer.op) and not (as_sum and _DOT.match(consumer.op)): return m.dot.value
  if user == Pipe.MATRIX: return m.vector_to_matrix.value
  return m.vector.value + (m.slow.value - 4//m.turn.value if _is_slow(producer) and m.turn.value == 1 else 0)

def matrix_cycles_of(x:Instruction, chip:Chip) -> int:
  """Returns the number of cycles for which an instruction occupies the matrix unit."""
  shape, flops = matrix_shape(x.op)
  # a shape that is not in the chip's table is assumed to run at the peak rate
  return chip.pipes.matrix.get(shape, max(1, round(flops*chip.pipes.simds/(chip.pipes.flops*speed_of_products(x.op)))))

def dependences(trip:Sequence[Instruction], chip:Chip) -> list[list[Dependence]]:
  """Returns, for each instruction of a loop iteration, the results of earlier instructions that it waits for."""
  # for each register that an instruction reads: the last instruction that wrote it, in the same iteration or in the iteration before
  machine, written = chip.latencies, dict[str, int]()
  found: list[list[Dependence]] = []
  used = [uses(x) for x in trip]
  for now in range(2*len(trip)):
    x, (writes, reads) = trip[now % len(trip)], used[now % len(trip)]
    last = set(registers(written_operands(x.args)[3])) if x.kind == "matrix" and len(written_operands(x.args)) > 3 else set()
    if _DOT.match(x.op): last = set(writes) if "dot2c" in x.op or "acc" in x.op else set(registers((written_operands(x.args) + [""]*4)[3]))
    needs: dict[int, Dependence] = {}
    for r in reads:
      if (at := written.get(r)) is None: continue
      producer = trip[at % len(trip)]
      cycles = matrix_cycles_of(producer, chip) if producer.kind == "matrix" else 0
      latency = _latency(producer, cycles, x, r in last, machine)
      if latency and (at not in needs or needs[at].latency < latency): needs[at] = Dependence(now - at, latency, r)
    if now >= len(trip): found.append(list(needs.values()))
    for r in writes: written[r] = now
  return found

# ***** accesses *****

def awaited(trip:Sequence[Instruction], chip:Chip) -> list[list[int]]:
  """Returns, for each instruction of a loop iteration, the memory accesses that it waits for: 3 stands for the access 3 instructions before it."""
  # The iteration is one in the steady state, not one of the first. The number in s_waitcnt says how many of the latest accesses need not be
  # complete: the instruction waits for all accesses before these. A memory access waits for earlier accesses if its counter would overflow
  # otherwise.
  counters, found = chip.counters, list[list[int]]()
  under_way: dict[str, list[int]] = {}
  for now in range(3*len(trip)):
    x, waits = trip[now % len(trip)], list[int]()
    limits = waited_for(x, counters) if x.kind == "wait" else {name: counters.most(name) - 1 for name in raised_by(x, counters)}
    for name, most in limits.items():
      pending = under_way.get(name, [])
      left = max(0, len(pending) - most)
      waits += pending[:left]
      under_way[name] = pending[left:]
    for name in raised_by(x, counters): under_way.setdefault(name, []).append(now)
    if now >= 2*len(trip): found.append([now - at for at in waits])
  return found

# ***** the steps of an iteration *****

def _pause_of_nop(x:Instruction, step:int) -> int:
  number = int(m[0], 0) if (m := re.match(r"(0x)?[0-9a-f]+", x.args)) is not None else 0
  if x.op == "s_nop": return (number + 1)*step
  return 64*number + step if x.op == "s_sleep" else step

def _step(x:Instruction, chip:Chip, m:Machine, bank_cycles:int|None) -> TripStep:
  cu, kind = chip.pipes, x.kind
  step = TripStep(x, _UNIT_OF_KIND[kind], pause=m.step.value)
  if step.unit == Pipe.MATRIX:
    step.matrix = matrix_cycles_of(x, chip)
    step.hold = cu.matrix_issue if cu.coissue else step.matrix
  elif step.unit == Pipe.TRANSCENDENTAL: step.hold = cu.trans
  elif step.unit == Pipe.VECTOR:
    step.hold = m.slow.value if _is_slow(x) else cu.valu
    step.alone = bool(m.packed_alone.value) and _PACKED_FP32.match(x.op) is not None
  elif step.unit == Pipe.LDS:
    moved, ports = max(4, access_bytes(x.op))*chip.wave, m.lds_ports.value
    writes = kind == "lds_write"
    rate = (cu.lds_write if writes else cu.lds_read)//ports
    least = -(-moved//(cu.lds_write if writes else cu.lds_read))
    step.banks = bank_cycles if bank_cycles is not None else least
    step.transfer = max(-(-moved//rate) + (m.lds_address.value if writes or kind == "lds_permute" else 0), step.banks)
    step.latency = m.permute.value if kind == "lds_permute" else m.lds.value
  elif step.unit == Pipe.MEMORY:
    step.transfer = -(-access_bytes(x.op)*chip.wave//m.memory_bytes.value)
    step.latency = m.memory.value + (m.lds_load.value if kind == "load_to_lds" else 0)
    if kind == "load_to_lds": step.banks = -(-access_bytes(x.op)*chip.wave//cu.lds_write)
    if kind == "memory_other": step.transfer = step.latency = 1
  elif kind == "scalar_load": step.latency = m.scalar_load.value
  elif kind == "nop": step.pause = _pause_of_nop(x, m.step.value)
  elif kind == "barrier":
    step.arrives, step.waits_for_all = not x.op.startswith("s_barrier_wait"), "signal" not in x.op
  elif x.op == "s_setprio": step.priority = int(x.args or "0", 0)     # a disassembly omits the operand 0
  return step

def trip_steps(trip:Sequence[Instruction], chip:Chip, bank_cycles:Sequence[int|None], taken:Sequence[bool]) -> list[TripStep]:
  """Returns a step of the simulation for each instruction of a loop iteration, given its LDS bank cycles and whether it is a taken branch."""
  # None in `bank_cycles`: the addresses of the access are not known
  machine, steps = chip.latencies, list[TripStep]()
  for x, needs, waits, banks, jumps in zip(trip, dependences(trip, chip), awaited(trip, chip), bank_cycles, taken, strict=True):
    step = _step(x, chip, machine, banks)
    step.needs, step.awaits = needs, waits
    if step.unit == Pipe.BRANCH: step.pause = machine.taken.value if jumps else machine.passed.value
    steps.append(step)
  return steps

_KNOWN = re.compile(r"[vs]_|ds_|buffer_|global_|flat_|scratch_")

def unknown(trip:Sequence[Instruction], chip:Chip) -> Iterator[str]:
  """Yields a line for each instruction whose cycles the timing model does not know, with the cycles that the model assumes."""
  for (op, kind), n in Counter((x.op, x.kind) for x in trip).items():
    if not _KNOWN.match(op) or kind == "other": yield f"{op} ({n}): not known, counted as an instruction that only takes its place in the order"
    elif kind == "matrix" and matrix_shape(op)[0] not in chip.pipes.matrix:
      yield f"{op} ({n}): a shape without published cycles, counted at the chip's peak rate"
    elif kind in ("lds_other", "memory_other"): yield f"{op} ({n}): counted as an access of {access_bytes(op)} bytes per lane"
