"""The cost of every kernel of attn on every chip, one line each: registers, spills, bounds. Also finds slow instruction sequences that no kernel may
contain."""
from __future__ import annotations
import os, re
from concurrent.futures import ThreadPoolExecutor
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from attn.chips import MODELLED, SEARCHED, get_chip
from attn.compilers.clang import Toolchain, assembly, toolchain
from attn.compilers.found import oldest_for
from attn.isa import source
from attn.isa.instruction import Instruction
from attn.isa.parse import Kernel
from attn.isa.report import Report, analyse
from attn.choose.refusals import MATRIX_DTYPES
from attn.isa.source import ALL, BACKWARD, FORWARD, LATENT, MASKS, Source, Spec, chosen
from attn.isa.table import BRIEF, brief_cells

# python -m attn.isa costs --write docs/costs.txt                           rewrites the file in the repository
# python -m attn.isa costs --compilers --write docs/costs_compilers.txt     registers and spills of forward kernels under older releases of clang
#
# A test compares the file with the kernels by `Costs.compare`, which returns the changed lines.

HEAD_DIMENSIONS = (64, 128, 256)
COSTED_OPTIONS = ("softcap", "alibi", "bias", "dropout")
SPECS = [Spec(arch, d, dtype, mask, kernel) for arch in MODELLED for d in HEAD_DIMENSIONS for dtype in MATRIX_DTYPES for mask in MASKS
         for kernel in (FORWARD, *BACKWARD, *[ALL]*(d in get_chip(arch).unit.at_once))]
SPECS += [Spec(arch, d, chip.fp8, mask) for arch, chip in ((arch, get_chip(arch)) for arch in MODELLED) if chip.fp8 in chip.matrix
          for d in HEAD_DIMENSIONS for mask in MASKS]
SPECS += [Spec(arch, 576, dtype, MASKS[0], LATENT) for arch in MODELLED for dtype in MATRIX_DTYPES]
SPECS += [Spec(arch, 128, "bfloat16", "causal", kernel, option) for arch in SEARCHED for kernel in (FORWARD, *BACKWARD) for option in COSTED_OPTIONS]

def report_of_text(spec:Spec, kernel:Source, text:str, rank:int=0, every_block:bool=False) -> Report:
  """Returns a report on one loop of a kernel of attn, given the kernel's source `kernel` and machine code `text`."""
  # Rank 0 is the loop with the most matrix work (the hot loop). The usual path through the loop is counted, or with `every_block` all instructions.
  # The figure `useful`, the share of the matrix unit's peak rate in useful products, is for this kernel alone.
  return analyse(text, spec.arch, kernel.d, kernel.dv, queries=kernel.queries, title=str(spec), products=kernel.products, rank=rank,
                 every_block=every_block)

def _report(spec:Spec, kernel:Source, tools:Toolchain) -> Report: return report_of_text(spec, kernel, assembly(kernel.text, spec.arch, tools=tools))

def report_of(spec:Spec, rank:int=0, every_block:bool=False) -> Report:
  """Compiles a kernel of attn, and returns a report on its hot loop; `rank` 1, 2, ... chooses a loop with less matrix work."""
  # Without `rank` and `every_block` the figure `useful` covers all kernels that work together, such as both backward kernels. It is the rate of
  # useful matrix products, as a share of the matrix unit's peak rate; a product that is computed a second time is not useful.
  if not rank and not every_block: return reports_of([spec])[0]
  kernel = source.kernel_source(spec, llvm=toolchain().llvm)
  return report_of_text(spec, kernel, assembly(kernel.text, spec.arch), rank, every_block)

def reports_of(specs:Sequence[Spec], tools:Toolchain|None=None) -> list[Report]:
  """Compiles kernels of attn by the compiler `tools`, and returns reports on their machine code."""
  tools = tools or toolchain()
  # kernels are rendered one after another, because tinygrad's lowering is Python, while clang compiles on every core
  with ThreadPoolExecutor(os.cpu_count()) as pool:
    jobs = {spec: pool.submit(_report, spec, source.kernel_source(spec, llvm=tools.llvm), tools)
            for spec in dict.fromkeys(x for spec in specs for x in spec.together)}
    found = {spec: job.result() for spec, job in jobs.items()}
  return [with_useful(found[spec], [found[x] for x in spec.together]) for spec in specs]

def with_useful(report:Report, together:Sequence[Report]) -> Report:
  """Returns `report` with a new field `useful`: the share of the matrix units' peak rate that all reports `together` use for useful products."""
  # `useful` is the share of the matrix unit's peak rate that goes to useful products; the kernels run one after another, so their times are added
  shares = [r.loop.useful for r in together if r.loop is not None and r.loop.useful]
  if report.loop is None or len(shares) < len(together): return report
  return replace(report, loop=replace(report.loop, useful=1/sum(1/x for x in shares)))

# ***** files *****

COMMAND = "python -m attn.isa costs"

@dataclass(frozen=True)
class Costs:
  """Format of a file with one line of costs for each kernel, such as docs/costs.txt: header, columns, and the function that makes the lines."""
  header: str
  # the first column names the kernel
  columns: tuple[str, ...]
  lines_of: Callable[[Sequence[Spec]], list[str]]

  def text(self, lines:Sequence[str]) -> str:
    """Returns the text of the file of costs: the header, and the lines in aligned columns, in the order of SPECS."""
    place = {str(spec): i for i, spec in enumerate(SPECS)}
    rows = [list(self.columns), *sorted((line.split(" | ") for line in lines), key=lambda row: place.get(row[0], len(place)))]
    widths = [max(len(r[i]) for r in rows) for i in range(len(self.columns))]
    return "\n".join([self.header, *(" | ".join(cell.ljust(w) for cell, w in zip(r, widths, strict=True)).rstrip() for r in rows)]) + "\n"

  def compare(self, text:str, lines:Sequence[str]) -> list[str]:
    """Returns the differences between `text`, a file of costs, and the current `lines`. Only the kernels in `lines` are compared."""
    if (found := text.partition("\n")[0]) != self.header: return [f"the file begins {found!r}, now it would {self.header!r}"]
    old, changes = _parse(text.splitlines()), []
    for name, cells in _parse(lines).items():
      if name not in old: changes.append(f"{name}: not in the file")
      else: changes += [f"{name}: {column} was {a}, is {b}" for column, a, b in zip(self.columns[1:], old[name], cells, strict=True) if a != b]
    return changes

def _parse(lines:Sequence[str]) -> dict[str, list[str]]:
  rows = [[cell.strip() for cell in line.split("|")] for line in lines if line.strip() and not line.startswith("#")]
  return {r[0]: r[1:] for r in rows if r[0] != "kernel"}

def lines_of_others(text:str, archs:Sequence[str]) -> list[str]:
  """Returns the lines of a file of costs for the chips that are not in `archs`."""
  return [" | ".join([name, *cells]) for name, cells in _parse(text.splitlines()).items() if name.split("/")[0] not in archs]

def short_version(tools:Toolchain) -> str:
  """Returns a toolchain's version in short form, for example "clang 22.1.8"."""
  return "clang " + tools.version.split("clang version ")[1].split()[0]

# ***** costs under other compilers *****

CELLS = ("tile", "regs", "spill", "waves")

def knows(tools:Toolchain, arch:str) -> bool:
  """Returns whether the LLVM release of a compiler supports the chip."""
  return tools.llvm >= oldest_for(arch)

def _cells_under(specs:Sequence[Spec], tools:Toolchain) -> dict[Spec, list[str]]:
  """Returns, for each kernel whose chip the compiler `tools` supports, its values for the columns CELLS, such as registers and spills."""
  # block sizes (queries x keys), registers, spills, and the waves per SIMD that registers allow
  found = [spec for spec in specs if knows(tools, spec.arch)]
  cells = {}
  for spec, report in zip(found, reports_of(found, tools), strict=True):
    _, tile = chosen(spec, tools.llvm)
    shown = dict(zip(BRIEF, brief_cells(report), strict=True))
    cells[spec] = [f"{tile.block_m}x{tile.block_n}", *(shown[name] for name in CELLS[1:])]
  return cells

def costs_under(compilers:Sequence[Toolchain]) -> Costs:
  """Returns the format of docs/costs_compilers.txt: registers, spills and waves of kernels under each of several compilers."""
  header = (f"# Registers, spills and waves of the default tiles under {', '.join(map(short_version, compilers))}: of machine code, not measured. "
            f"Rewritten by: {COMMAND} --compilers --write docs/costs_compilers.txt")
  # of the kernels that dispatch chooses under each compiler
  def lines_of(specs:Sequence[Spec]) -> list[str]:
    columns = [_cells_under(specs, tools) for tools in compilers]
    return [" | ".join([str(spec), *(cell for cells in columns for cell in cells.get(spec, ["-"]*len(CELLS)))]) for spec in specs]
  return Costs(header, ("kernel", *(f"{name} {tools.llvm}" for tools in compilers for name in CELLS)), lines_of)

# ***** slow idioms *****

def _halves(x:Instruction) -> list[tuple[str, list[str]]]:
  """Returns (mnemonic, operands without modifiers) of an instruction, or of both instructions of a dual issue."""
  parts = [part.strip().replace("v_dual_", "v_", 1).partition(" ") for part in x.text.split("::")]
  return [(op, [re.sub(r"[|\-]|\b(abs|neg)\b|[()]", "", a).strip().replace("vcc_lo", "vcc") for a in args.split(",")]) for op, _, args in parts]

def _overwrites(operand:str, register:str) -> bool:
  # whether the result operand, such as v3 or v[2:5], contains the register
  if (m:=re.fullmatch(r"([vas])\[(\d+):(\d+)\]", operand)) is None: return operand == register
  return register[0] == m[1] and register[1:].isdigit() and int(m[2]) <= int(register[1:]) <= int(m[3])

def _uses(code:Sequence[tuple[str, list[str]]], register:str) -> Iterator[tuple[str, list[str]]]:
  """Yields the instructions of `code` up to and including the first instruction that overwrites `register`."""
  for op, operands in code:
    yield op, operands
    if "store" not in op and "write" not in op and _overwrites(operands[0], register): return

def defects(kernel:Kernel) -> list[str]:
  """Returns a line for each slow instruction sequence in a kernel."""
  code, found = [half for x in kernel.instructions for half in _halves(x)], []
  for i, (op, operands) in enumerate(code):
    text = f"{op} {', '.join(operands)}"
    # a call into the device library
    if op.startswith("s_swappc") or any("__oc" in a for a in operands): found.append(f"a call: {text}")
    if op.startswith("v_exp_"):
      # a v_ldexp that corrects the result of an exp2 for denormals
      found += [f"v_ldexp after an exp: {text}; {y} {', '.join(a)}" for y, a in _uses(code[i+1:], operands[0])
                if y.startswith("v_ldexp") and operands[0] in a[1:]]
    if re.match(r"v_cmp_(n?[lg][te]|[ou])_f32", op) is not None:
      condition, *compared = operands if len(operands) == 3 else ["vcc", *operands]
      # a maximum computed by compare and select
      found += [f"compare and select for a maximum: {text}; {y} {', '.join(a)}" for y, a in _uses(code[i+1:], condition)
                if y.startswith("v_cndmask_b32") and condition in (a[3:] or ["vcc"]) and set(a[1:3]) == set(compared)]
  return found
