"""Finds buffer instructions that add an immediate number to a register which may be negative. No document says what the memory unit does then
(attn/emulator/offsets.py)."""
from __future__ import annotations
import functools, re
from collections.abc import Callable, Sequence
from attn.emulator.ranges import Range
from attn.isa.active_lanes import whole_waves
from attn.isa.flow import Block
from attn.isa.instruction import Instruction
from attn.isa.operands import issued_together, registers, uses, written_operands

# The check follows the registers of a function as ranges of unsigned numbers. A register becomes unknown if its value comes from memory, from an
# instruction that this module does not know, or from an instruction whose result may wrap around. An instruction is a finding if the ranges do not
# prove that the sum of register and number fits into 32 bits, even if the register is never negative. If an instruction may switch lanes on, the
# ranges also include the values that these lanes held while they were off.

Known = dict[str, Range]     # range of each known register

LARGEST_WORD, POSITIVE = 0xffffffff, 0x7fffffff
UNKNOWN: Range = (0, LARGEST_WORD)
OFTEN = 3                    # after this many visits of a block, a register whose range still changes there becomes unknown

# ***** instructions *****

def _bits(*xs:Range) -> Range: return 0, (1 << max(x[1] for x in xs).bit_length()) - 1
def _hull(*xs:Range) -> Range: return min(x[0] for x in xs), max(x[1] for x in xs)
def _add(*xs:Range) -> Range: return sum(x[0] for x in xs), sum(x[1] for x in xs)
def _sub(x:Range, y:Range) -> Range: return x[0] - y[1], x[1] - y[0]
def _mul(x:Range, y:Range) -> Range: return x[0]*y[0], x[1]*y[1]
def _high(x:Range, y:Range) -> Range: return x[0]*y[0] >> 32, x[1]*y[1] >> 32
def _up(x:Range, by:Range) -> Range: return (x[0] << by[0], x[1] << by[1]) if by[1] < 32 else UNKNOWN
def _down(x:Range, by:Range) -> Range: return (x[0] >> by[1], x[1] >> by[0]) if by[1] < 32 else UNKNOWN
def _and(x:Range, y:Range) -> Range: return 0, min(x[1], y[1])
def _or(*xs:Range) -> Range: return max(x[0] for x in xs), _bits(*xs)[1]
def _field(x:Range, first:Range, width:Range) -> Range: return _and(_down(x, first), (0, (1 << min(width[1], 32)) - 1))
def _scalar_field(x:Range, at:Range) -> Range:
  return _field(x, (at[0] & 31,)*2, (at[0] >> 16 & 127,)*2) if at[0] == at[1] else UNKNOWN
def _least(*xs:Range) -> Range: return min(x[0] for x in xs), min(x[1] for x in xs)
def _most(*xs:Range) -> Range: return max(x[0] for x in xs), max(x[1] for x in xs)
def _below(limit:int, fn:Callable[..., Range]) -> Callable[..., Range]:
  # If an operand may be larger than `limit`, the instruction would read it as a negative number, or read only some of its bits: `fn` is not its rule.
  return lambda *xs: fn(*xs) if max(x[1] for x in xs[:2]) <= limit else UNKNOWN
def _most_signed(*xs:Range) -> Range:
  known = [x for x in xs if x[1] <= POSITIVE]
  return _most(*xs) if len(known) == len(xs) else (known[0][0], POSITIVE) if known else UNKNOWN
def _middle_signed(*xs:Range) -> Range:
  # two operands that are known to be nonnegative bound the median, because it lies between any two of the three numbers
  known = [x for x in xs if x[1] <= POSITIVE]
  return _hull(*known) if len(known) > 1 else UNKNOWN
def _same(x:Range) -> Range: return x

_RULES:list[tuple[str, Callable[..., Range]]] = [
  (r"[vs]_mov_b32|v_readfirstlane_b32|v_accvgpr_(read|write|mov)(_b32)?", _same), (r"s_movk_i32", _below(0x7fff, _same)),
  (r"[vs]_add(_nc|_co)?_[ui]32|v_add3_u32", _add), (r"[vs]_sub(_nc|_co)?_[ui]32", _sub), (r"v_subrev(_nc|_co)?_[ui]32", lambda x, y: _sub(y, x)),
  (r"[vs]_mul_lo_[ui]32|s_mul_i32", _mul), (r"[vs]_mul_hi_u32", _high),
  (r"v_mul_u32_u24", _below(0xffffff, _mul)), (r"v_mad_u32_u24", _below(0xffffff, lambda x, y, z: _add(_mul(x, y), z))),
  (r"v_mul_i32_i24", _below(0x7fffff, _mul)), (r"v_mad_i32_i24", _below(0x7fffff, lambda x, y, z: _add(_mul(x, y), z))),
  (r"[vs]_and_b32", _and), (r"s_andn2_b32|s_and_not1_b32", lambda x, y: (0, x[1])), (r"v_and_or_b32", lambda x, y, z: _or(_and(x, y), z)),
  (r"[vs]_or_b32|v_or3_b32", _or), (r"[vs]_xor_b32|v_xor3_b32", _bits), (r"v_xad_u32", lambda x, y, z: _add(_bits(x, y), z)),
  (r"v_bfi_b32", lambda x, y, z: _bits(y, z)), (r"v_bfe_u32", _field), (r"s_bfe_u32", _scalar_field),
  (r"v_lshlrev_b32", lambda by, x: _up(x, by)), (r"v_lshrrev_b32", lambda by, x: _down(x, by)), (r"s_lshl_b32", _up), (r"s_lshr_b32", _down),
  (r"v_ashrrev_i32", lambda by, x: _below(POSITIVE, _down)(x, by)), (r"s_ashr_i32", _below(POSITIVE, _down)),
  (r"v_lshl_add_u32", lambda x, by, y: _add(_up(x, by), y)), (r"v_add_lshl_u32", lambda x, y, by: _up(_add(x, y), by)),
  (r"v_lshl_or_b32", lambda x, by, y: _or(_up(x, by), y)),
  *((rf"s_lshl{n}_add_u32", lambda x, y, n=n: _add(_up(x, (n, n)), y)) for n in (1, 2, 3, 4)),
  (r"v_cndmask_b32", lambda no, yes, *_: _hull(no, yes)), (r"s_cselect_b32", _hull), (r"v_mbcnt_(lo|hi)_u32_b32", lambda _, x: _add(x, (0, 32))),
  (r"v_min3?_u32|s_min_u32", _least), (r"v_max3?_u32|s_max_u32", _most), (r"[vs]_min_i32", _below(POSITIVE, _least)),
  (r"[vs]_max_i32", _most_signed), (r"v_med3_i32", _middle_signed)]

@functools.cache
def _rule(op:str) -> Callable[..., Range]|None:
  name = re.sub(r"_(e32|e64)$", "", op)
  return next((fn for pattern, fn in _RULES if re.fullmatch(pattern, name)), None)

def _range(operand:str, known:Known) -> Range:
  """Returns the range (least, largest) of an operand's value; `known` has the ranges of registers."""
  # a register with a minus sign or an absolute value holds a float
  if named := registers(operand): return known.get(named[0], UNKNOWN) if len(named) == 1 and re.search(r"[-|(]", operand) is None else UNKNOWN
  try: number = int(operand, 0) & LARGEST_WORD
  except ValueError: return UNKNOWN
  return number, number

def _results(op:str, args:str, known:Known) -> dict[str, Range]:
  """Returns the registers that an instruction writes, each with its range afterwards; `known` has the ranges before."""
  x, parts = Instruction(op, args, f"{op} {args}"), written_operands(args)
  found = dict.fromkeys(() if x.kind == "load_to_lds" else uses(x)[0], UNKNOWN)
  if re.match(r"v_mad_(co_)?u64_u32", op):      # the low half of the result does not depend on the upper half of the number that is added
    (low, high), (added, *above) = registers(parts[0]), registers(parts[4]) or (parts[4],)
    total = _add(_mul(*(_range(x, known) for x in parts[2:4])), _range(added, known))
    if total[1] <= LARGEST_WORD: found.update({low: total, high: (0, 0) if all(known.get(r) == (0, 0) for r in above) else UNKNOWN})
    return found
  if (rule := _rule(op)) is None or not found: return found
  result = rule(*(_range(x, known) for x in parts[2 if re.match(r"v_\w*_co_", op) else 1:]))
  return {**found, registers(parts[0])[0]: result if result[0] >= 0 and result[1] <= LARGEST_WORD else UNKNOWN}

# ***** a function *****

HALVES = ("vcc", "exec")      # names that stand for two registers each
_FEWER_LANES = re.compile(r"v_cmpx|s_and_saveexec|s_and(n2|_not1)?_b\d+ exec(_lo)?, exec(_lo)?,")      # any other write to EXEC may switch lanes on

class KnownRegisters:
  """Range of values that each register can have: `active` in the active lanes, `every` in all lanes."""
  def __init__(self, active:Known, every:Known): self.active, self.every = active, every
  def copy(self) -> KnownRegisters: return KnownRegisters(dict(self.active), dict(self.every))

  def follow(self, x:Instruction, whole:bool) -> None:
    """Updates the ranges of registers by the effect of one instruction. If `whole`, all lanes are active."""
    read = self.every if x.op.startswith("v_readfirstlane") and not whole else self.active      # if no lane is active, it reads an inactive lane
    results = {r: found for op, args in issued_together(x.text) for r, found in _results(op, args, read).items()}
    for r, found in results.items():
      in_every = found if whole or r[0] == "s" else _hull(found, self.every.get(r, UNKNOWN))
      for known, value in ((self.active, found), (self.every, in_every)):
        known.pop(r, None)
        if value != UNKNOWN and r not in HALVES: known[r] = value
    if "exec" in results and not _FEWER_LANES.match(x.text): self.active = dict(self.every)

  def meet(self, other:KnownRegisters, often:bool) -> bool:
    """Widens each register's range to include its range in `other`, from another path to the same code. If `often`, a range that changes becomes
    unknown. Returns whether any range changed."""
    changed = False
    for known, more in ((self.active, other.active), (self.every, other.every)):
      for r, before in list(known.items()):
        if (after := _hull(before, more.get(r, UNKNOWN))) == before: continue
        changed = True
        # a register that keeps changing becomes unknown, so that the search ends
        if often or after == UNKNOWN: del known[r]
        else: known[r] = after
    return changed

def registers_of(blocks:Sequence[Block], whole:Sequence[Sequence[bool]|None], work_items:Range) -> list[KnownRegisters|None]:
  """Returns the known ranges of registers at the beginning of each basic block, None for a block that no path leads to."""
  # `whole` says for each instruction of each block whether all lanes are known to be active. At the beginning v0, a thread's position in its
  # workgroup, lies within `work_items`.
  known, came, waiting = [None]*len(blocks), [0]*len(blocks), [0]     # type: tuple[list[KnownRegisters|None], list[int], list[int]]
  known[0] = KnownRegisters({"v0": work_items}, {"v0": work_items})
  while waiting:
    at = waiting.pop()
    state = known[at]
    assert state is not None
    state = state.copy()
    for x, all_active in zip(blocks[at].instructions, whole[at] or ()): state.follow(x, all_active)
    for s in blocks[at].successors:
      came[s] += 1
      if (before := known[s]) is None: known[s] = state.copy()
      elif not before.meet(state, came[s] > OFTEN): continue
      if s not in waiting: waiting.append(s)
  return known

def not_shown_to_fit(blocks:Sequence[Block], wave:int, dimensions:int=3) -> list[str]:
  """Returns a line for each buffer instruction whose sum of register and immediate number may exceed 32 bits."""
  # at the beginning v0 holds a thread's position in its workgroup: `dimensions` numbers of ten bits each
  whole, found = whole_waves(blocks, wave), list[str]()
  for block, state, each in zip(blocks, registers_of(blocks, whole, (0, (1 << 10*dimensions) - 1)), whole):
    if state is None or each is None: continue
    for x, all_active in zip(block.instructions, each):
      number = re.search(r"\boffset:(\w+)", x.args)
      if x.op.startswith("buffer_") and number is not None and "offen" in x.args:
        parts = written_operands(x.args)
        register = parts[next(i for i, part in enumerate(parts) if re.match(r"(s|ttmp)\[", part)) - 1]
        if _range(register, state.active)[1] + int(number[1], 0) > LARGEST_WORD: found.append(f"{register} may be below 0, or is unknown: {x.text}")
      state.follow(x, all_active)
  return found
