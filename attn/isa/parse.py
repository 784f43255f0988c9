"""Reads the functions of an assembly text: .s files of clang, LLVM and most hand-written kernels, and the output of llvm-objdump -d."""
from __future__ import annotations
import re
from dataclasses import dataclass, field
from attn.isa.instruction import Instruction

@dataclass
class Kernel:
  name: str
  arch: str|None
  metadata: dict[str, int] = field(default_factory=dict)                      # .amdhsa_* directives and the entries of the YAML metadata
  code: list[str|Instruction] = field(default_factory=list)                   # labels and instructions in order

  @property
  def instructions(self) -> list[Instruction]: return [x for x in self.code if isinstance(x, Instruction)]
  @property
  def matrix_count(self) -> int: return sum(x.kind == "matrix" for x in self.instructions)

_TARGET = re.compile(r"\.amdgcn_target\s+\"[^\"]*--(gfx\w+)|-mcpu=(gfx\w+)|amdhsa\.target:.*--(gfx\w+)")
_LABEL = re.compile(r"\s*([A-Za-z_.$][\w.$@]*):")
_DUMP_LABEL = re.compile(r"\s*[0-9a-f]{8,16} <([^>]+)>:")
_DUMP_LINE = re.compile(r"\s*(\S.*?)\s*//\s*([0-9A-F]+):(.*)")
_LOCAL = (".L", "BB", "$", "L")
_COUNTS = ("vgpr_count", "agpr_count", "sgpr_count", "vgpr_spill_count", "sgpr_spill_count", "group_segment_fixed_size", "private_segment_fixed_size",
           "max_flat_workgroup_size", "wavefront_size", "workgroup_processor_mode", "kernarg_segment_size", "accum_offset")

def _metadata(text:str) -> dict[str, dict[str, int]]:
  """Returns, for each kernel name, the kernel's directives (`amdhsa_...`) and the counts in its metadata, such as spills."""
  found: dict[str, dict[str, int]] = {}
  for m in re.finditer(r"\.amdhsa_kernel\s+(\S+)(.*?)\.end_amdhsa_kernel", text, re.S):
    found[m[1]] = {k: int(v) for k, v in re.findall(r"\.(amdhsa_\w+)\s+(\d+)\s*$", m[2], re.M)}
  yaml = text[i:] if (i:=text.find("amdhsa.kernels")) >= 0 else ""
  for part in re.split(r"(?m)^  - ", yaml)[1:]:
    if (symbol:=re.search(r"\.symbol:\s+['\"]?([^\s'\"]+)\.kd", part)) is None: continue
    found.setdefault(symbol[1], {}).update({k: int(v[1]) for k in _COUNTS if (v:=re.search(rf"\.{k}:\s+(\d+)", part)) is not None})
  return found

def _instruction(text:str, line:int|None=None) -> Instruction:
  op, _, args = text.partition(" ")
  return Instruction(op, args.strip(), text, line)

def _source_line(text:str) -> int|None:
  """Returns the source's line number in the comment of a .loc directive."""
  places = re.findall(r":(\d+):\d+", text.partition(";")[2])
  # if functions are inlined, the outermost call, which the comment names last
  return int(places[-1]) if places else None

def _read_assembly(lines:list[str], starts:set[str]) -> dict[str, list[str|Instruction]]:
  functions: dict[str, list[str|Instruction]] = {}
  current: list[str|Instruction]|None = None
  place: int|None = None
  for line in lines:
    if line.startswith(("\t.loc", ".Ltmp")):           # a .loc directive, or the label of a .loc directive
      place = _source_line(line) if line.startswith("\t") else place
      continue
    text = re.split(r";|//", line, maxsplit=1)[0].strip().replace("\t", " ")
    if (m:=_LABEL.match(text)) is not None:
      if m[1] in starts or (not starts and not m[1].startswith(_LOCAL)): current = functions.setdefault(m[1], [])
      if current is not None: current.append(m[1])
    elif current is not None and re.match(r"[a-z]", text): current.append(_instruction(text, place))
  return functions

def _read_dump(lines:list[str]) -> dict[str, list[str|Instruction]]:
  """Returns {name: instructions and labels} of an objdump text. Each address to which a branch jumps becomes a label A<address>."""
  rows: dict[str, list[tuple[int, Instruction]]] = {}
  current: list[tuple[int, Instruction]]|None = None
  targets: set[int] = set()
  for line in lines:
    if (label:=_DUMP_LABEL.match(line)) is not None:
      if current is None or not label[1].startswith(_LOCAL): current = rows.setdefault(label[1], [])
    elif current is not None and (row:=_DUMP_LINE.match(line)) is not None:
      address, ins = int(row[2], 16), _instruction(row[1].replace("\t", " "))
      if ins.kind == "branch" and (target:=_branch_target(ins, address, row[3], current[0][0] if current else address)) is not None:
        targets.add(target)
        ins = Instruction(ins.op, f"A{target:x}", ins.text)
      current.append((address, ins))
  def with_label(address:int, ins:Instruction) -> tuple[str|Instruction, ...]: return (f"A{address:x}", ins) if address in targets else (ins,)
  return {name: [x for place in found for x in with_label(*place)] for name, found in rows.items()}

def _branch_target(ins:Instruction, address:int, comment:str, start:int) -> int|None:
  if (m:=re.search(r"<[^>]+?(?:\+0x([0-9a-f]+))?>\s*$", comment)) is not None: return start + int(m[1] or "0", 16)
  if not ins.op.startswith(("s_branch", "s_cbranch")) or (m:=re.match(r"-?\w+", ins.args)) is None: return None
  try: offset = int(m[0], 0)
  except ValueError: return None
  return address + 4 + 4*(offset - 65536 if offset >= 32768 else offset)

def parse(text:str, arch:str|None=None) -> list[Kernel]:
  """Returns the functions of an assembly text, those with more matrix instructions first. `arch` is used if the text names no chip."""
  lines = text.splitlines()
  found = next((g for m in _TARGET.finditer(text) for g in m.groups() if g), None)
  metadata = _metadata(text)
  dump = ".amdhsa_kernel" not in text and any(_DUMP_LABEL.match(x) for x in lines)
  functions = _read_dump(lines) if dump else _read_assembly(lines, set(metadata) | set(re.findall(r"\.type\s+([\w.$@]+)\s*,\s*@function", text)))
  kernels = [Kernel(name, arch or found, metadata.get(name, {}), code) for name, code in functions.items()]
  return sorted((k for k in kernels if k.instructions), key=lambda k: -k.matrix_count)
