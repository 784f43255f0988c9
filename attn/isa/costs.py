"""The cost of every kernel of ours on every chip, one line each, and what no kernel's machine code may hold.

    python -m attn.isa costs --write docs/costs.txt    rewrites the file that is checked in
    compare(text_of_the_file, lines_of(SPECS))         the lines that changed, as a test shows them
"""
from __future__ import annotations
import os, re
from concurrent.futures import ThreadPoolExecutor
from collections.abc import Iterator, Sequence
from attn.chips import MODELLED
from attn.compilers.clang import assembly
from attn.isa import source
from attn.isa.instruction import Instruction
from attn.isa.parse import Kernel
from attn.isa.report import Report, analyse
from attn.choose.dispatch import MATRIX_DTYPES
from attn.isa.source import MASKS, Spec
from attn.isa.table import BRIEF, brief_cells

HEAD_DIMENSIONS = (64, 128, 256)
SPECS = [Spec(arch, d, dtype, mask) for arch in MODELLED for d in HEAD_DIMENSIONS for dtype in MATRIX_DTYPES for mask in MASKS]
COLUMNS = ("kernel", *BRIEF)
HEADER = "# The costs of our kernels: bounds from their machine code, not measurements. Rewritten by: python -m attn.isa costs --write docs/costs.txt"

def report_of(spec:Spec) -> Report:
  """The report on a kernel of ours."""
  kernel = source.kernel_source(spec)
  return analyse(assembly(kernel.text, spec.arch), spec.arch, kernel.d, kernel.dv, queries=kernel.queries, title=str(spec))

def reports_of(specs:Sequence[Spec]) -> list[Report]:
  """Renders here, one after the other (tinygrad's lowering is Python), while clang compiles on every core."""
  kernels = [(spec, source.kernel_source(spec)) for spec in specs]
  with ThreadPoolExecutor(os.cpu_count()) as pool: list(pool.map(lambda x: assembly(x[1].text, x[0].arch), kernels))
  return [analyse(assembly(k.text, spec.arch), spec.arch, k.d, k.dv, queries=k.queries, title=str(spec)) for spec, k in kernels]

def line_of(report:Report) -> str: return " | ".join([report.name, *brief_cells(report)])

def lines_of(specs:Sequence[Spec]) -> list[str]: return [line_of(r) for r in reports_of(specs)]

def file_text(lines:Sequence[str]) -> str:
  """The file: a header and aligned columns, the kernels in the order of SPECS."""
  place = {str(spec): i for i, spec in enumerate(SPECS)}
  rows = [list(COLUMNS), *sorted((line.split(" | ") for line in lines), key=lambda row: place.get(row[0], len(place)))]
  widths = [max(len(r[i]) for r in rows) for i in range(len(COLUMNS))]
  return "\n".join([HEADER, *(" | ".join(cell.ljust(w) for cell, w in zip(r, widths, strict=True)).rstrip() for r in rows)]) + "\n"

def _parse(lines:Sequence[str]) -> dict[str, list[str]]:
  rows = [[cell.strip() for cell in line.split("|")] for line in lines if line.strip() and not line.startswith("#")]
  return {r[0]: r[1:] for r in rows if r[0] != COLUMNS[0]}

def lines_of_others(text:str, archs:Sequence[str]) -> list[str]:
  """The lines of a file's text that are not of `archs`."""
  return [" | ".join([name, *cells]) for name, cells in _parse(text.splitlines()).items() if name.split("/")[0] not in archs]

def compare(text:str, lines:Sequence[str]) -> list[str]:
  """What differs between a file of costs and current lines, of the kernels that `lines` has."""
  old, changes = _parse(text.splitlines()), []
  for name, cells in _parse(lines).items():
    if name not in old: changes.append(f"{name}: not in the file")
    else: changes += [f"{name}: {column} was {a}, is {b}" for column, a, b in zip(COLUMNS[1:], old[name], cells, strict=True) if a != b]
  return changes

# ***** what no kernel should hold *****

def _halves(x:Instruction) -> list[tuple[str, list[str]]]:
  """(mnemonic, operands) of an instruction, or of the two that a dual-issue one pairs; operands without modifiers."""
  parts = [part.strip().replace("v_dual_", "v_", 1).partition(" ") for part in x.text.split("::")]
  return [(op, [re.sub(r"[|\-]|\b(abs|neg)\b|[()]", "", a).strip().replace("vcc_lo", "vcc") for a in args.split(",")]) for op, _, args in parts]

def _overwrites(operand:str, register:str) -> bool:
  """Whether writing `operand` (v3, or v[2:5]) changes `register`."""
  if (m:=re.fullmatch(r"([vas])\[(\d+):(\d+)\]", operand)) is None: return operand == register
  return register[0] == m[1] and register[1:].isdigit() and int(m[2]) <= int(register[1:]) <= int(m[3])

def _uses(code:Sequence[tuple[str, list[str]]], register:str) -> Iterator[tuple[str, list[str]]]:
  """The instructions up to the one, included, that overwrites `register`."""
  for op, operands in code:
    yield op, operands
    if "store" not in op and "write" not in op and _overwrites(operands[0], register): return

def defects(kernel:Kernel) -> list[str]:
  """The slow idioms in a kernel: calls into the device library, an exp2 that v_ldexp repairs for denormals, a maximum of compare and select."""
  code, found = [half for x in kernel.instructions for half in _halves(x)], []
  for i, (op, operands) in enumerate(code):
    text = f"{op} {', '.join(operands)}"
    if op.startswith("s_swappc") or any("__oc" in a for a in operands): found.append(f"a call: {text}")
    if op.startswith("v_exp_"):
      found += [f"v_ldexp after an exp: {text}; {y} {', '.join(a)}" for y, a in _uses(code[i+1:], operands[0])
                if y.startswith("v_ldexp") and operands[0] in a[1:]]
    if re.match(r"v_cmp_(n?[lg][te]|[ou])_f32", op) is not None:
      condition, *compared = operands if len(operands) == 3 else ["vcc", *operands]
      found += [f"compare and select for a maximum: {text}; {y} {', '.join(a)}" for y, a in _uses(code[i+1:], condition)
                if y.startswith("v_cndmask_b32") and condition in (a[3:] or ["vcc"]) and set(a[1:3]) == set(compared)]
  return found
