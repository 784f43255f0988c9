"""Finds the registers that an instruction reads and writes, from the instruction's text."""
from __future__ import annotations
import functools, re
from collections.abc import Iterator
from attn.isa.instruction import Instruction

_REGISTER = re.compile(r"\b(ttmp|[vas])\[(\d+)(?::(\d+))?\]|\b([vas])(\d+)\b|\b(vcc|exec|m0|scc)(?:_lo|_hi)?\b", re.I)

@functools.lru_cache(maxsize=8192)
def registers(operand:str) -> tuple[str, ...]:
  """Returns the registers that an operand names. For example, v[2:3] names v2 and v3."""
  found = list[str]()
  for m in _REGISTER.finditer(operand):
    if m[6]: found.append(m[6].lower())
    elif m[4]: found.append(m[4] + m[5])
    else: found += [f"{m[1]}{i}" for i in range(int(m[2]), int(m[3] or m[2]) + 1)]
  return tuple(found)

def written_operands(args:str) -> list[str]:
  """Returns the text of each operand, split at commas outside brackets."""
  return [x.strip() for x in re.split(r",(?![^\[\(]*[\]\)])", args)] if args else []

_READS_TOO = re.compile(r"v_(fmac|dot\w*c_|dot2acc|pk_fmac|mac_|smfmac|swmmac|mad\w*c_|cvt_sr|cvt_scalef32_sr|accvgpr_mov)|_sdwa|v_writelane|d16_hi|"
                        r"row_|quad_perm")
_NO_SCC = ("s_mov", "s_load", "s_mul", "s_cbranch", "s_branch", "s_nop", "s_cselect", "s_pack", "s_getpc", "s_buffer", "s_set", "s_barrier", "s_wait",
           "s_delay", "s_clause")    # scalar instructions that don't write scc
_SWAPS = re.compile(r"v_(swap|permlane\d+_swap)")
_TWO_RESULTS = re.compile(r"v_(add|sub|subrev|addc|subb)\w*_co_|v_mad_(co_)?[ui]64|v_div_scale")
_NO_RESULT = re.compile(r"s_(cmp|bitcmp|cbranch|branch|wait|barrier|nop|setprio|sched|sleep|endpgm|delay|clause|set|icache|dcache|code_end|trap)|"
                        r"ds_(write|store)|(buffer|global|flat|scratch)_(store|atomic)|(buffer|global)_(inv|wb|gl)")

def _half_uses(op:str, args:str) -> tuple[list[str], list[str]]:
  operands = [registers(x) for x in written_operands(args)]
  if _NO_RESULT.match(op): writes, reads = list[str](), [r for x in operands for r in x]
  elif "v_cmpx" in op: writes, reads = ["exec"], [r for x in operands for r in x]
  else:
    results = 2 if _SWAPS.match(op) or _TWO_RESULTS.match(op) else 1
    writes = [r for x in operands[:results] for r in x]
    reads = [r for x in operands[results:] for r in x]
    if _SWAPS.match(op) or _READS_TOO.search(op) or _READS_TOO.search(args): reads += writes
    if op.startswith("v_cmp") and op.endswith("_e32") and "vcc" not in writes: writes, reads = ["vcc"], reads + writes
  if op.startswith("s_") and not op.startswith(_NO_SCC): writes.append("scc")
  if re.match(r"s_(cbranch_scc|cselect|addc|subb|cmov)", op): reads.append("scc")
  if op.startswith("s_cbranch_vcc"): reads.append("vcc")
  if op.startswith("s_cbranch_exec"): reads.append("exec")
  if "saveexec" in op: writes.append("exec")
  return writes, reads

def issued_together(text:str) -> Iterator[tuple[str, str]]:
  """Yields (mnemonic, operands) of an instruction, or of both instructions of a pair that issues together."""
  for half in text.split("::"):
    op, _, args = half.strip().replace("v_dual_", "v_", 1).partition(" ")
    yield op, args.strip()

@functools.lru_cache(maxsize=16384)
def uses(x:Instruction) -> tuple[tuple[str, ...], tuple[str, ...]]:
  """Returns (registers that an instruction writes, registers that it reads); for a pair of instructions that issue together, the registers of
  both."""
  found = [_half_uses(op, args) for op, args in issued_together(x.text)]
  return tuple(r for writes, _ in found for r in writes), tuple(r for _, reads in found for r in reads)
