"""Finds the LDS addresses that a wave's lanes use, by following integer instructions, and the cycles that the LDS banks need for them."""
from __future__ import annotations
import functools, re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
import numpy as np
from numpy.typing import NDArray
from attn.chips import Chip
from attn.emulator.banks import BankCounter
from attn.isa.instruction import Instruction, access_bytes
from attn.isa.operands import issued_together, registers, uses, written_operands

# Each instruction is followed for all lanes of a wave at once. A value is unknown if it comes from memory, from an instruction that this module does
# not know, or from an unknown value. An unknown scalar counts as 0: if it is added to every lane's address, it only rotates the banks.

LaneValues = NDArray[Any]
_WORD = 0xffffffff

def _signed(x:LaneValues, bits:int=32) -> LaneValues:
  # the low `bits` bits as a signed number
  return (x & ((1 << bits) - 1) ^ 1 << bits - 1) - (1 << bits - 1)
def _reversed(x:LaneValues) -> LaneValues:
  # bit i becomes bit 31 - i
  found = x*0
  for i in range(32): found = found | (x >> i & 1) << 31 - i
  return found
def _field(x:LaneValues, first:LaneValues, width:LaneValues) -> LaneValues: return x >> (first & 31) & ((1 << (width & 31)) - 1)
def _perm(a:LaneValues, b:LaneValues, select:LaneValues) -> LaneValues:
  both, found = a << 32 | b, np.zeros_like(a + b + select)
  for i in range(4): found = found | (both >> 8*np.minimum(select >> 8*i & 255, 7) & 255) << 8*i
  return found

# integer operations of scalar and vector instructions, by mnemonic without encoding. An operation whose result depends on the sign of its operands
# stands with its type; of the others, the 32-bit type is left out. Operations on 16 or 64 bits are not known
INTEGER_OPERATIONS: dict[str, Callable[..., LaneValues]] = {
  "mov": lambda a: a, "add": lambda a, b: a + b, "add_nc": lambda a, b: a + b, "sub": lambda a, b: a - b, "sub_nc": lambda a, b: a - b,
  "subrev": lambda a, b: b - a, "subrev_nc": lambda a, b: b - a, "add_co": lambda a, b: a + b,
  "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b, "not": lambda a: ~a, "xnor": lambda a, b: ~(a ^ b),
  "lshlrev": lambda a, b: b << (a & 31), "lshrrev": lambda a, b: b >> (a & 31), "ashrrev": lambda a, b: _signed(b) >> (a & 31),
  "lshl": lambda a, b: a << (b & 31), "lshr": lambda a, b: a >> (b & 31), "ashr": lambda a, b: _signed(a) >> (b & 31),
  "lshl_add": lambda a, b, c: (a << (b & 31)) + c, "add_lshl": lambda a, b, c: a + b << (c & 31), "lshl_or": lambda a, b, c: a << (b & 31) | c,
  "and_or": lambda a, b, c: a & b | c, "or3": lambda a, b, c: a | b | c, "add3": lambda a, b, c: a + b + c, "xad": lambda a, b, c: (a ^ b) + c,
  "xor3": lambda a, b, c: a ^ b ^ c, "bfe_u32": _field, "bfi": lambda a, b, c: a & b | ~a & c, "perm": _perm,
  "mul_u32_u24": lambda a, b: (a & 0xffffff)*(b & 0xffffff), "mul_i32_i24": lambda a, b: _signed(a, 24)*_signed(b, 24), "mul_lo": lambda a, b: a*b,
  "mad_u32_u24": lambda a, b, c: (a & 0xffffff)*(b & 0xffffff) + c, "mul": lambda a, b: a*b, "mulk": lambda a, b: a*_signed(b, 16),
  "min_u32": np.minimum, "min_i32": lambda a, b: np.minimum(_signed(a), _signed(b)),
  "max_u32": np.maximum, "max_i32": lambda a, b: np.maximum(_signed(a), _signed(b)), "andn2": lambda a, b: a & ~b,
  "and_not1": lambda a, b: a & ~b, "bfrev": _reversed, "movk": lambda a: _signed(a, 16),
  "lshl1_add": lambda a, b: (a << 1) + b, "lshl2_add": lambda a, b: (a << 2) + b, "lshl3_add": lambda a, b: (a << 3) + b,
}
COMPARISONS: dict[str, Callable[[LaneValues, LaneValues], LaneValues]] = {
  "lt": np.less, "gt": np.greater, "le": np.less_equal, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal, "lg": np.not_equal}

_OF_MASKS = ("s_and_b", "s_or_b", "s_andn2_b", "s_and_not1_b", "s_mov_b", "s_xor_b")

def _name(op:str) -> str:
  name = re.sub(r"^[vs]_", "", re.sub(r"_(e32|e64|vi|gfx\w+)$", "", op))
  return name if name in INTEGER_OPERATIONS else re.sub(r"_(lo_)?[ubi]32$", "", name)

@dataclass(frozen=True)
class _Followed:
  """A parsed instruction, with the function that computes its result from known register values."""
  # each line of assembly is parsed only once for all waves
  instruction: Instruction
  operands: tuple[str, ...]                       # operands as written
  writes: tuple[str, ...]                         # registers that it writes
  operation: Callable[..., LaneValues]|None       # its operation on integers, if known

@functools.lru_cache(maxsize=16384)
def _followed(text:str) -> tuple[_Followed, ...]:
  """Returns the parsed form of a line of assembly: one instruction, or a pair of instructions that issue together."""
  def half(op:str, args:str) -> _Followed:
    x = Instruction(op, args, f"{op} {args}")
    return _Followed(x, tuple(written_operands(args)), uses(x)[0], INTEGER_OPERATIONS.get(_name(op)) if op[0] in "vs" else None)
  return tuple(half(op, args) for op, args in issued_together(text))

class WaveState:
  """Values of a wave's registers, as far as known: an array over the lanes for a vector register or a mask, a number for a scalar register."""
  def __init__(self, chip:Chip, wave:int, two_dimensional:bool):
    self.chip, lanes = chip, np.arange(chip.wave, dtype=np.int64)
    # v0 is the thread's index in its workgroup: one number, or (lane, wave) packed with ten bits each
    self.values: dict[str, LaneValues] = {"v0": lanes | wave << 10 if two_dimensional else lanes + wave*chip.wave}
    self.masks: dict[str, LaneValues] = {"exec": np.ones(chip.wave, bool)}

  def copy(self) -> WaveState:
    other = WaveState.__new__(WaveState)
    other.chip, other.values, other.masks = self.chip, dict(self.values), dict(self.masks)
    return other

  def _operand(self, text:str) -> LaneValues|None:
    named = registers(text)
    if named: return self.values.get(named[0]) if named[0][0] == "v" and named[0] != "vcc" else self.values.get(named[0], np.asarray(0))
    try: return np.asarray(int(text, 0) & _WORD)
    except ValueError: return None

  def _mask(self, text:str) -> LaneValues|None:
    if text == "-1": return np.ones(self.chip.wave, bool)
    return self.masks.get(named[0]) if (named := registers(text)) else None

  def follow(self, x:Instruction) -> None:
    """Updates the known registers for the effect of one instruction."""
    for half in _followed(x.text): self._follow(half)

  def _follow(self, half:_Followed) -> None:
    x, parts, result, mask = half.instruction, half.operands, None, None
    if "saveexec" in x.op: return self._saveexec(x, parts)
    if x.op.startswith("v_cmp"): mask = self._comparison(x, parts)
    elif x.op.startswith(_OF_MASKS) and any(self._mask(p) is not None for p in parts[1:]):
      mask = self._mask_operation(x.op, parts[1:])
    elif x.op.startswith("v_cndmask"): result = self._select(parts)
    elif x.op.startswith("v_bitop3_b32"): result = self._bits_of_three(x, parts)
    elif x.op.startswith("v_mbcnt"): result = self._lanes_below(x.op, parts)
    elif x.op.startswith("v_readfirstlane") and (value := self._operand(parts[1])) is not None: result = np.asarray(np.ravel(value)[0])
    elif half.operation is not None: result = self._integer(half)
    for r in half.writes:
      self.values.pop(r, None)
      self.masks.pop(r, None)
    if not half.writes: return None
    if mask is not None: self.masks[half.writes[0]] = mask
    elif result is not None: self.values[half.writes[0]] = result
    return None

  def _integer(self, half:_Followed) -> LaneValues|None:
    x, parts = half.instruction, half.operands
    values = [self._operand(p) for p in parts[(2 if "_co_" in x.op else 1):]]
    if x.op.startswith(("s_mulk", "s_addk")): values = [self._operand(parts[0]), *values]
    if half.operation is None or any(v is None for v in values): return None
    try: return half.operation(*values) & _WORD
    except (TypeError, ValueError): return None

  def _comparison(self, x:Instruction, parts:Sequence[str]) -> LaneValues|None:
    m = re.match(r"v_cmpx?_(\w\w)_([ui])(?:16|32)", x.op)
    named = len(parts) == 3
    values = [self._operand(p) for p in (parts[1:] if named else parts)]
    if m is None or m[1] not in COMPARISONS or any(v is None for v in values): return None
    a, b = (_signed(np.asarray(v)) if m[2] == "i" else np.asarray(v) for v in values)
    return np.broadcast_to(COMPARISONS[m[1]](a, b), self.chip.wave)

  def _saveexec(self, x:Instruction, parts:Sequence[str]) -> None:
    before, given = self.masks.get("exec"), self._mask(parts[1])
    for r in registers(parts[0]): self.values.pop(r, None)
    if before is not None: self.masks[registers(parts[0])[0]] = before
    after = before & given if before is not None and given is not None and x.op.startswith("s_and_save") else None
    if after is not None: self.masks["exec"] = after
    else: self.masks.pop("exec", None)

  def _mask_operation(self, op:str, parts:Sequence[str]) -> LaneValues|None:
    found = [self._mask(p) for p in parts]
    if op.startswith("s_mov"): return found[0]
    a, b = found
    if op.startswith("s_or"):      # switches on the lanes that were switched off in exec
      if a is None or b is None: return b if a is None else a
      return a | b
    if a is None or b is None: return None
    return a & b if op.startswith("s_and_b") else a ^ b if op.startswith("s_xor") else a & ~b

  def _select(self, parts:Sequence[str]) -> LaneValues|None:
    no, yes, mask = self._operand(parts[1]), self._operand(parts[2]), self._mask(parts[3] if len(parts) > 3 else "vcc")
    return None if no is None or yes is None or mask is None else np.where(mask, yes, no)

  def _bits_of_three(self, x:Instruction, parts:Sequence[str]) -> LaneValues|None:
    """Returns the result of v_bitop3, whose operands have the texts `parts`, or None if an operand is not known."""
    a, b, c = (self._operand(p.split()[0]) for p in parts[1:4])
    found = re.search(r"bitop3:(\w+)", x.args)
    if a is None or b is None or c is None or found is None: return None
    # each bit of the result is bit number 4a + 2b + c of the table, where a, b and c are the bits of the three operands at the same position
    result, table = a & b & c & 0, int(found[1], 0)
    for i in (i for i in range(8) if table >> i & 1):
      result = result | (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return result & _WORD

  def _lanes_below(self, op:str, parts:Sequence[str]) -> LaneValues|None:
    before = self._operand(parts[2])
    lanes, half = np.arange(self.chip.wave), self.chip.wave > 32 and "_hi_" in op
    if before is None or parts[1] != "-1": return None
    if half: return before + np.maximum(lanes - 32, 0)
    if self.chip.wave > 32: return before + np.minimum(lanes, 32)
    return before + (lanes if "_lo_" in op else 0)

  @property
  def known_active(self) -> bool:
    """True if at least one lane is known to be active."""
    return (mask := self.masks.get("exec")) is not None and bool(mask.any())

  def bank_cycles(self, x:Instruction) -> int|None:
    """Returns the cycles that the LDS banks need for an access; None for other instructions, or if an address is not known."""
    if x.kind not in ("lds_read", "lds_write"): return None
    parts = _followed(x.text)[0].operands
    address = self._operand(parts[0 if x.kind == "lds_write" else 1].split()[0])
    if address is None: return None
    offsets = {name: int(number, 0) for name, number in re.findall(r"(offset[01]?):(\w+)", x.args)}
    nbytes, twice = access_bytes(x.op), re.search(r"read2|write2|_2addr", x.op) is not None
    each = nbytes//2 if twice else nbytes
    scale = (64 if "st64" in x.op or "stride64" in x.op else 1)*each
    starts = [scale*offsets.get("offset0", 0), scale*offsets.get("offset1", 0)] if twice else [offsets.get("offset", 0)]
    counter = BankCounter(self.chip.family, self.chip.wave)
    lanes = np.broadcast_to(address, self.chip.wave)
    active = self.masks.get("exec")
    for start in starts: counter.count("", x.kind == "lds_read", lanes + start, each, None if active is None or not active.any() else active)
    return sum(use.cycles for use in counter.uses.values())

def bank_cycles_of(trip:Sequence[Instruction], state:WaveState) -> list[int|None]:
  """Returns the cycles that the LDS banks need for each instruction of a loop iteration, None where no addresses are known."""
  # `state` has the values of registers at the beginning of the iteration
  found = []
  for x in trip:
    found.append(state.bank_cycles(x))
    state.follow(x)
  return found
