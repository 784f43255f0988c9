"""Finds instructions that need every lane of a wave to be active, in code that a wave may run with inactive lanes. Begin with `across_lanes`."""
from __future__ import annotations
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from attn.isa.flow import Block
from attn.isa.instruction import Instruction

# To know this, the check follows the mask of active lanes (EXEC) through the function. An instruction that reads other lanes gets no value from a
# lane that is switched off: v_permlane16_swap_b32 leaves that lane's register unchanged, ds_bpermute_b32 gives 0, and a matrix instruction of RDNA
# needs EXEC to be all ones (RDNA3 ISA section 7.9). clang may move such an instruction into a branch that only some lanes take. Then the result
# lacks the values of the other lanes. The kernels use these instructions for whole waves only. So each such instruction under a partial EXEC is a
# finding, even if its result is right.
#
# What is known at a point of the code is a set of facts. A fact is a set of scalar registers: every lane has its bit set in at least one of these
# registers. The fact {exec_lo} means that all lanes are active. The fact {s4, exec_lo} means that each lane that is switched off has its bit set in
# s4; then `s_or_b32 exec_lo, exec_lo, s4` switches all lanes on. The halves of a 64-lane mask are separate registers. At the beginning of a function
# all lanes are active. Where paths meet, a fact holds if it holds on every path.

Fact = frozenset[str]
Facts = frozenset[Fact]

LARGEST = 8      # most registers of a fact: EXEC, and one register for each of the branches around a place
EXEC = ("exec_lo", "exec_hi")
NEED_ALL_LANES = re.compile(r"v_(permlane|mfma|smfmac|wmma|swmmac)|ds_(b?permute|swizzle|read_b\d+_tr|load_tr)|global_load_(b\d+_)?tr")

# scalar instruction with operands a and b -> pairs (x, y): the result has each bit that all operands in x have and no operand in y has
_RULES = {"mov": [("a", "")], "not": [("", "a")], "and": [("ab", "")], "or": [("a", ""), ("b", "")], "xor": [("a", "b"), ("b", "a")],
          "nand": [("", "a"), ("", "b")], "nor": [("", "ab")], "xnor": [("", "ab"), ("ab", "")],
          "andn2": [("a", "b")], "orn2": [("a", ""), ("", "b")], "andn1": [("b", "a")], "orn1": [("b", ""), ("", "a")]}
_RULES |= {f"{op}_not{i}": _RULES[f"{op}n{i + 1}"] for op in ("and", "or") for i in (0, 1)}      # RDNA3 and later use these names
_SCALAR = re.compile(rf"s_({'|'.join(_RULES)})(_saveexec|_wrexec)?_b(32|64)")

def _least(facts:Iterable[Fact]) -> Facts:
  # A fact follows from a fact about a part of its registers. Facts about more than LARGEST registers are dropped, too.
  found = {f for f in facts if len(f) <= LARGEST}
  return frozenset(f for f in found if not any(g < f for g in found))

def _meet(a:Facts, b:Facts) -> Facts: return a if a == b else _least(f | g for f, g in product(a, b))

def _dwords(operand:str) -> tuple[str, ...]:
  # the 32-bit registers of an operand such as vcc or s[4:5]
  if operand in ("vcc", "exec"): return f"{operand}_lo", f"{operand}_hi"
  if (m := re.fullmatch(r"(s|ttmp)\[(\d+):(\d+)\]", operand)) is not None: return tuple(f"{m[1]}{i}" for i in range(int(m[2]), int(m[3]) + 1))
  return (operand,)

def _operands(x:Instruction) -> list[str]: return [a.strip() for a in x.args.split(",")]

def _without(facts:Facts, registers:Iterable[str]) -> Facts: return frozenset(f for f in facts if f.isdisjoint(registers))

def _define(facts:Facts, out:str, rules:Sequence[tuple[str, str]], **operands:str) -> Facts:
  """Returns the facts about lane masks (registers with a bit per lane) after an operation writes `out`. `rules` say how the bits of `out` follow from
  `operands`."""
  # "" names the new value of `out` here, because facts about the old value are still needed
  # A rule (all_of, none_of) says which bits the operation sets: those that are set in all operands of `all_of` and clear in all operands of
  # `none_of`. Both are strings of letters. `operands` maps each letter to a register.
  known = {f - {"0"} for f in facts} | ({frozenset({"-1"})} if "-1" in operands.values() else set())
  def made_by(all_of:str, none_of:str) -> Iterator[frozenset[str]]:
    for chosen in product(*([f for f in known if operands[x] in f] for x in all_of)):      # a fact about each operand
      others = [f - {operands[x]} for x, f in zip(all_of, chosen)]
      yield frozenset({""}).union(*others, (operands[x] for x in none_of)) - {"0"}
  while True:
    made = {f for rule in rules for f in made_by(*rule)}
    if not (new := {f for f in made if len(f) <= LARGEST and not any(g <= f for g in known)}): break
    known |= new
  return _least(frozenset(out if x == "" else x for x in f) for f in _without(frozenset(known), {out, "-1"}))

def _after_scalar(facts:Facts, m:re.Match[str], operands:list[str]) -> Facts:
  """Returns the facts about lane masks after a bitwise scalar instruction, such as s_and_b64; `m` is the match of its mnemonic."""
  # An instruction with _saveexec or _wrexec combines its operand with EXEC and stores the result in EXEC. The result register gets the old value of
  # EXEC (_saveexec) or the new value (_wrexec).
  def halves(operand:str) -> tuple[str, ...]: return (_dwords(operand)*2)[:int(m[3])//32]
  out, *sources = map(halves, operands)
  for i, register in enumerate(out):
    if m[2] is None: facts = _define(facts, register, _RULES[m[1]], **{x: source[i] for x, source in zip("ab", sources)})
    else:
      facts = _define(facts, "old", _RULES["mov"], a=EXEC[i])
      facts = _define(facts, EXEC[i], _RULES[m[1]], a=sources[0][i], b="old")
      facts = _define(facts, register, _RULES["mov"], a="old" if m[2] == "_saveexec" else EXEC[i])
      facts = _without(facts, {"old"})
  return facts

def _written(x:Instruction, operands:list[str]) -> Iterator[str]:
  # The mnemonic decides which operands are written.
  if re.match(r"s_(cmp|bitcmp|branch|cbranch|wait|barrier|set|nop|sleep|delay|clause|store|endpgm)", x.op): return
  for operand in operands[:2 if re.search(r"_co_|_div_scale|_mad_[ui]64", x.op) else 1]: yield from _dwords(operand)
  if x.op.startswith("v_cmpx"): yield from EXEC

def _after(facts:Facts, x:Instruction) -> Facts:
  if not x.op.startswith(("s_", "v_cmp", "v_readlane", "v_writelane", "v_readfirstlane")) and not re.search(r"_co_|_div_scale|_mad_[ui]64", x.op):
    return facts
  operands = _operands(x)
  if (m := _SCALAR.fullmatch(x.op)) is not None: return _after_scalar(facts, m, operands)
  # Scalar registers may be spilled to lanes of a vector register. Each such lane counts as a register here.
  if x.op.startswith("v_writelane"): return _define(facts, f"{operands[0]}[{operands[2]}]", _RULES["mov"], a=operands[1])
  if x.op.startswith("v_readlane"): return _define(facts, operands[0], _RULES["mov"], a=f"{operands[1]}[{operands[2]}]")
  return _without(facts, set(_written(x, operands)))

def _on_edge(facts:Facts, block:Block, taken:bool) -> Facts:
  """Returns the facts about lane masks after the branch at the end of `block`, where the branch is `taken` or where it is not."""
  last = block.instructions[-1].op if block.instructions else ""
  # If the branch tests EXEC, no lane is active on one of the paths. There the result contains the empty fact, which can never hold: it marks a path
  # that no wave takes.
  return _least(f - set(EXEC) for f in facts) if last == ("s_cbranch_execz" if taken else "s_cbranch_execnz") else facts

def facts_of(blocks:Sequence[Block], entry:Facts) -> list[Facts|None]:
  """Returns the facts about lane masks at the beginning of each basic block, None for a block that no path reaches. `entry` has the facts for block
  0."""
  known: list[Facts|None] = [None]*len(blocks)
  known[0], waiting = entry, [0]
  while waiting:
    at = waiting.pop()
    facts = known[at]
    assert facts is not None
    for x in blocks[at].instructions: facts = _after(facts, x)
    for s in blocks[at].successors:
      # both sides of a conditional branch to the next block lead there, so nothing is known about the condition
      there = facts if len(blocks[at].successors) == 1 else _on_edge(facts, blocks[at], s != at + 1)
      if frozenset() in there: continue
      before = known[s]
      if (now := there if before is None else _meet(before, there)) != before:
        known[s] = now
        waiting.append(s)
  return known

def whole_waves(blocks:Sequence[Block], wave:int) -> list[list[bool]|None]:
  """Returns, for each instruction of each basic block, whether all lanes are certainly active; None for a block that no path reaches."""
  whole = frozenset(frozenset({half}) for half in EXEC[:wave//32])
  found = list[list[bool]|None]()
  for block, facts in zip(blocks, facts_of(blocks, whole)):
    each = None if facts is None else list[bool]()
    for x in block.instructions:
      if facts is None or each is None: break
      each.append(whole <= facts)
      facts = _after(facts, x)
    found.append(each)
  return found

def across_lanes(blocks:Sequence[Block], wave:int) -> list[str]:
  """Returns a line for each instruction that needs every lane of a wave to be active, and that a wave may run with inactive lanes."""
  found, label = [], "the entry"
  for block, whole in zip(blocks, whole_waves(blocks, wave)):
    label = block.labels[-1] if block.labels else label
    found += [f"behind {label}, where lanes may be off: {x.text}" for x, all_active in zip(block.instructions, whole or ())
              if (NEED_ALL_LANES.match(x.op) or x.dpp) and not all_active]
  return found
