"""python -m attn.isa: the machine code of kernels and what it costs. docs/isa.md explains every figure."""
from __future__ import annotations
import json, re
from pathlib import Path
from typing import Any
from attn.compilers import clang
from attn.compilers.choice import in_use
from attn.compilers.releases import OLDER, toolchain_of
from attn.extras import needs
from attn.isa import sass, source
from attn.chips import MODELLED
from attn.compilers.disassemble import disassemble
from attn.isa.report import LoopProducts, Report, analyse
from attn.tinygrad_compat import CompileError
with needs("isa", "python -m attn.isa", __name__):
  import click
  from click.core import ParameterSource
  from rich.console import Console
  from attn.isa import check, costs, table
  from attn.isa.timing import control, costs_file, decoding, drawing, kernels, orders, published, tables

class ReportByDefault(click.Group):
  """Group of commands in which `python -m attn.isa WHAT` means `python -m attn.isa report WHAT`."""
  def parse_args(self, ctx:click.Context, args:list[str]) -> list[str]:
    if args and args[0] not in self.commands and args[0] not in ("--help", "--version"): args = ["report", *args]
    return super().parse_args(ctx, args)
  def format_commands(self, ctx:click.Context, formatter:click.HelpFormatter) -> None:
    """Lists the commands, and below each command its options."""
    super().format_commands(ctx, formatter)
    for name, command in self.commands.items():
      sub = click.Context(command, info_name=name, parent=ctx)
      records = [found for x in command.params if (found := x.get_help_record(sub)) is not None]
      if not records: continue
      with formatter.section(f"Options of {name}" + (", the command where none is named" if name == "report" else "")): formatter.write_dl(records)

def _text_of(path:Path) -> str:
  data = path.read_bytes()
  return disassemble(data) if data[:4] == b"\x7fELF" else data.decode(errors="replace")

class NewFile(click.Path):
  """Option type: path of a file to write, in a folder that exists."""
  def __init__(self) -> None: super().__init__(dir_okay=False, path_type=Path)
  def convert(self, value:Any, param:click.Parameter|None, ctx:click.Context|None) -> Path:
    path = Path(str(super().convert(value, param, ctx)))
    if not path.parent.is_dir(): self.fail(f"there is no folder {str(path.parent)!r}", param, ctx)
    return path

OF_FILES = ("dv", "kernel", "queries", "lds", "threads", "products", "behind")

def check_options_of_files(word:str) -> None:
  """Raises UsageError if an option that only describes code in a file, such as --queries, is given with the kernel of attn `word`."""
  # attn knows these numbers for its own kernels
  given = click.get_current_context()
  for name in OF_FILES:
    if given.get_parameter_source(name) is ParameterSource.COMMANDLINE: raise click.UsageError(f"--{name} is for files: {word} is a kernel of attn")

def _report(word:str, arch:str|None, d:int|None, options:dict[str, Any]) -> Report:
  """Returns the report on the file `word`, or on the kernel of attn named `word`. `options` are further arguments of `analyse`."""
  path, amd = Path(word), f"reports are only for AMD's chips, {', '.join(MODELLED)}"
  if path.is_file() and arch is not None and arch not in MODELLED: raise ValueError(f"--arch {arch}: {amd}")
  if path.is_file(): return analyse(_text_of(path), arch, d, title=path.name, **options)
  if "/" not in word: raise ValueError(f"{word}: no such file")
  spec = source.Spec.parse(word)
  if spec.arch not in MODELLED: raise ValueError(f"{word}: {amd}; `asm {word}` prints the kernel")
  check_options_of_files(word)
  return costs.report_of(spec, options["rank"], options["every_block"])

def _products(text:str) -> LoopProducts:
  found = re.fullmatch(r"([1-9]),(\d)", text)
  if found is None: raise click.BadParameter(f"{text!r}: must be two numbers, of products with dimension D and with dimension Dv: 2,1 for S, dQ; dP")
  return (int(found[1]), int(found[2])),

def _specs(arch:str|None, d:int|None, dtype:str, causal:bool, decode:bool, gradient:str|None) -> list[str]:
  if decode and gradient is not None: raise click.UsageError("--decode with --gradient: give only one of them")
  kernel = source.DECODE if decode else gradient or source.FORWARD
  return [str(source.Spec(arch, d, dtype, source.MASKS[causal], kernel))] if arch is not None and d is not None else []

KERNEL_OPTIONS = [
  click.option("--arch", type=click.Choice(source.KNOWN), help="The chip of a kernel of attn, or of a disassembly that doesn't name its chip."),
  click.option("--d", type=int, help="Head dimension."),
  click.option("--dtype", type=click.Choice(source.DTYPES_OF_KERNELS), default="float16", show_default=True),
  click.option("--causal/--full", default=False, help="The mask. [default: full]"),
  click.option("--decode", is_flag=True, help="The forward kernel of one query for each sequence, against a long cache."),
  click.option("--gradient", type=click.Choice((*source.BACKWARD, source.ALL)), help="The backward kernel that computes it. [default: forward]"),
]
FILE_OPTIONS = [
  click.option("--dv", type=int, help="Head dimension of V in a file, if it is not --d."),
  click.option("--kernel", help="The kernel in a file whose name contains this. [default: the one with the most matrix instructions]"),
  click.option("--queries", type=int, help="Queries of a wave, for a file; `time` needs them to predict a problem."),
  click.option("--lds", type=int, help="LDS bytes given at launch, for a file."),
  click.option("--threads", type=int, help="Threads of a workgroup, for a file."),
  click.option("--products", default="1,1", show_default=True, callback=lambda _, __, text: _products(text),
               help="Matrix products in the hot loop of a file: how many have a dimension D, how many Dv. Forward has 1,1, backward up to 3,2."),
]
def with_options(command:Any, options:list[Any]) -> Any:
  for option in reversed(options): command = option(command)
  return command
def kernel_options(command:Any) -> Any: return with_options(command, KERNEL_OPTIONS)
def file_options(command:Any) -> Any: return with_options(command, FILE_OPTIONS)

@click.group(cls=ReportByDefault)
@click.version_option(package_name="attn")
def main() -> None:
  """The machine code of kernels, without a GPU and without ROCm.

  A kernel of attn is named by options or by a word, ARCH/D[/DTYPE[/MASK[+OPTION][/KERNEL]]]. `--arch gfx942 --d 128 --causal` is
  gfx942/128/float16/causal. With `--gradient dkdv` it is gfx942/128/float16/causal/dkdv: backward takes two kernels, dq and dkdv. `--decode` is
  one query against a long cache, gfx942/128/float16/full/decode."""

@main.command()
@click.argument("what", nargs=-1)
@kernel_options
@file_options
@click.option("--loop", type=click.IntRange(0), default=0, help="Which loop, 0 for the one with the most matrix work.")
@click.option("--every-block", is_flag=True, help="Count every block of the loop, not only its usual path.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--brief", is_flag=True, help="One line a kernel.")
@click.option("--diff", is_flag=True, help="Compare two.")
def report(what:tuple[str, ...], arch:str|None, d:int|None, dtype:str, causal:bool, decode:bool, gradient:str|None, dv:int|None, kernel:str|None,
           queries:int|None, lds:int|None, threads:int|None, products:LoopProducts, loop:int, every_block:bool, as_json:bool, brief:bool,
           diff:bool) -> None:
  """Report registers, the hot loop, and upper bounds on its use of the matrix unit. WHAT: .s files, llvm-objdump output, code objects, or kernels of
  attn."""
  words = list(what) or _specs(arch, d, dtype, causal, decode, gradient)
  if not words: raise click.UsageError("name a file, a kernel such as gfx942/128/float16/causal, or --arch and --d")
  if diff and len(words) != 2: raise click.UsageError(f"--diff compares two kernels or files, not {len(words)}")
  options = {"dv": dv, "kernel_name": kernel, "queries": queries, "lds": lds, "threads": threads, "rank": loop, "every_block": every_block,
             "products": products}
  reports = [_report(w, arch, d, options) for w in words]
  if as_json: click.echo(json.dumps([r.json() for r in reports], indent=1))
  else:
    tables = [table.brief(reports)] if brief else [table.full(reports, change=diff), *([] if diff else map(table.waits, reports))]
    Console(width=None if Console().is_terminal else 200).print(*tables)

@main.command()
@click.argument("what", required=False)
@kernel_options
@click.option("--hip", "--cuda", "source_alone", is_flag=True, help="The source alone: HIP, or CUDA for sm_xx.")
def asm(what:str|None, arch:str|None, d:int|None, dtype:str, causal:bool, decode:bool, gradient:str|None, source_alone:bool) -> None:
  """Print the machine code of WHAT, a kernel of attn such as gfx942/128/float16/causal. If WHAT is a HIP file, print its assembly for --arch.

  For sm_xx print the CUDA source. Print the SASS after it if a CUDA toolkit is installed (nvcc, and cuobjdump or nvdisasm)."""
  if what is not None and Path(what).is_file():
    if arch is None: raise click.UsageError(f"--arch is missing: the chip to compile the file for, one of {', '.join(MODELLED)}")
    if arch not in MODELLED: raise click.UsageError(f"a file is compiled as HIP: --arch is one of {', '.join(MODELLED)}")
    click.echo(clang.assembly(Path(what).read_text(), arch))
    return
  words = [what] if what is not None else _specs(arch, d, dtype, causal, decode, gradient)
  if not words: raise click.UsageError("name a kernel, such as gfx942/128/float16/causal, or --arch and --d")
  spec = source.Spec.parse(words[0])
  if spec.arch in MODELLED:
    text = source.kernel_source(spec).text
    click.echo(text if source_alone else clang.assembly(text, spec.arch))
    return
  click.echo(text := source.text_of(spec))
  if source_alone: return
  if (lacking := sass.missing()) is not None: click.echo(f"only the source is printed, because there is {lacking}", err=True)
  else: click.echo(sass.sass(text, spec.arch))

@main.command("time")
@click.argument("what", nargs=-1)
@kernel_options
@file_options
@click.option("--behind", type=click.IntRange(0), help="Waves of a workgroup that begin the loop one barrier behind. [default: found in the text]")
@click.option("--b", "batch", type=click.IntRange(1), default=4, show_default=True, help="Batch of the problem.")
@click.option("--h", "heads", type=click.IntRange(1), default=16, show_default=True, help="Query heads.")
@click.option("--hkv", type=click.IntRange(1), help="Key/value heads. [default: as many]")
@click.option("--n", "length", type=click.IntRange(1), default=8192, show_default=True, help="Queries and keys; for decode the keys.")
@click.option("--card", help="Only this card. [default: every card of the chip whose clock is known]")
@click.option("--ghz", type=click.FloatRange(0.01), help="Its clock. [default: the rated one, and the one that GEMMs sustain]")
@click.option("--top", type=click.IntRange(0), default=12, show_default=True, help="Waits that are listed.")
@click.option("--lines/--no-lines", default=True, help="The lines of Python behind them, for a kernel of attn.")
@click.option("--svg", type=NewFile(), help="Draw the picture into this file.")
@click.option("--png", type=NewFile(), help="Draw the picture into this PNG file; needs matplotlib.")
@click.option("--trips", type=click.IntRange(1), default=1, show_default=True, help="Loop iterations in the picture.")
@click.option("--machine", is_flag=True, help="The model's figures of the chip, with their sources.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def time_command(what:tuple[str, ...], arch:str|None, d:int|None, dtype:str, causal:bool, decode:bool, gradient:str|None, dv:int|None,
                 kernel:str|None, queries:int|None, lds:int|None, threads:int|None, products:LoopProducts, behind:int|None, batch:int, heads:int,
                 hkv:int|None, length:int, card:str|None, ghz:float|None, top:int, lines:bool, svg:Path|None, png:Path|None, trips:int, machine:bool,
                 as_json:bool) -> None:
  """Predict the time of the hot loop of WHAT: a .s file, a code object, or a kernel of attn. This is a prediction, not a measurement."""
  words = list(what) or _specs(arch, d, dtype, causal, decode, gradient)
  if len(words) != 1: raise click.UsageError("name one file, one kernel such as gfx942/128/float16/causal, or --arch and --d")
  problem = source.Shape(batch, heads, hkv or heads, length)
  if Path(words[0]).is_file():
    if arch is not None and arch not in MODELLED: raise ValueError(f"--arch {arch}: the model is only for AMD's chips, {', '.join(MODELLED)}")
    found = kernels.of_text(_text_of(Path(words[0])), problem, arch, d, dtype=dtype, causal=causal, dv=dv, kernel_name=kernel, queries=queries,
                            lds=lds, threads=threads, title=Path(words[0]).name, products=products, behind=behind)
  else:
    if "/" not in words[0]: raise ValueError(f"{words[0]}: no such file")
    check_options_of_files(words[0])
    found = kernels.predicted_kernel(source.Spec.parse(words[0]), problem, lines)
  predictions = found.on_cards(card, ghz)
  for path, draw in ((svg, drawing.draw_svg), (png, drawing.draw_png)):
    if path is not None: draw(found.timing, found.timing.loops[0], path, trips)
  if as_json:
    click.echo(json.dumps(tables.timing_json(found.timing, predictions, found.lines), indent=1))
    return
  shown = [tables.trips_table(found.timing), *([tables.problem_table(found.title, predictions)] if predictions else []),
           *(tables.stalls_table(x, top, found.lines) for x in found.timing.loops if top),
           *([tables.machine_table(found.timing.chip)] if machine else [])]
  Console(width=None if Console().is_terminal else 200).print(*shown)
  for line in found.timing.unknown: click.echo(line, err=True)

@main.command("decoding")
@click.option("--write", type=NewFile(), help="Write the table to this file.")
def decoding_command(write:Path|None) -> None:
  """Print predicted times of decoding over caches of 16 and of 8 bits on AMD's chips."""
  text = decoding.decoding_table()
  if write is None: click.echo(text, nl=False)
  else: write.write_text(text)

@main.command("orders")
@click.option("--card", "cards", multiple=True, type=click.Choice(tuple(orders.CARDS_OF_ORDERS)), help="Only these cards. [default: all of these]")
@click.option("--write", type=NewFile(), help="Write the table to this file.")
def orders_command(cards:tuple[str, ...], write:Path|None) -> None:
  """Print predicted times of forward and backward kernels with other orders of heads in the grid."""
  text = orders.order_table(cards or tuple(orders.CARDS_OF_ORDERS))
  if write is None: click.echo(text, nl=False)
  else: write.write_text(text)

TABLES = Path(__file__).resolve().parents[2]/"docs"/"data"

@main.command("published")
@click.option("--tables", type=click.Path(exists=True, file_okay=False, path_type=Path), default=TABLES,
              help="Folder of timing_published.csv and timing_kernels.csv. [default: docs/data]")
@click.option("--code", type=click.Path(exists=True, file_okay=False, path_type=Path),
              help="Step the machine code in this folder again: the files that the column `code` of timing_kernels.csv names.")
@click.option("--write", is_flag=True, help="Write timing_predicted.csv into the folder, and with --code also timing_kernels.csv.")
def published_command(tables:Path, code:Path|None, write:bool) -> None:
  """Predict kernels of other projects beside their published speeds."""
  peers = published.peer_kernels_in((tables/"timing_kernels.csv").read_text())
  if code is not None: peers = published.restepped(peers, code, _text_of)
  rows = published.predicted_rows((tables/"timing_published.csv").read_text(), peers)
  if write:
    (tables/"timing_predicted.csv").write_text(published.text_of_rows(rows))
    if code is not None: (tables/"timing_kernels.csv").write_text(published.text_of_kernels(peers))
  else: click.echo(published.text_of_rows(rows), nl=False)
  for share in (0.15, 0.3):
    found = published.predictions_within(rows, share)
    click.echo(f"within {share:.0%} of the published figure: {found['sustained']} of {found['all']} at the sustained clock, {found['rated']} at the "
               "rated clock", err=True)

@main.command("control")
@click.option("--tables", type=click.Path(exists=True, file_okay=False, path_type=Path), default=TABLES,
              help="Folder of nvidia_order_of_heads.csv. [default: docs/data]")
@click.option("--write", is_flag=True, help="Write the predictions into the file.")
def control_command(tables:Path, write:bool) -> None:
  """Predict times that were measured on an H100, without machine code. This checks how the model orders workgroups and treats memory."""
  path = tables/"nvidia_order_of_heads.csv"
  text = control.text_of_control(control.control_table(path.read_text()))
  if write: path.write_text(text)
  else: click.echo(text, nl=False)

@main.command("costs")
@click.option("--compilers", is_flag=True, help=f"Under clang {', '.join(map(str, OLDER))}, which pip gets once, instead of the one in use.")
@click.option("--write", type=NewFile(), help="Rewrite this file; with --arch only the lines of those chips.")
@click.option("--check", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Compare with this file; fail if a line differs.")
@click.option("--arch", multiple=True, type=click.Choice(MODELLED), help="Only these chips.")
def costs_command(compilers:bool, write:Path|None, check:Path|None, arch:tuple[str, ...]) -> None:
  """Print a line of costs for each of attn's kernels on each chip, or with --compilers for each forward kernel under other compilers."""
  file = costs.costs_under([toolchain_of(llvm) for llvm in OLDER]) if compilers else costs_file.costs()
  lines = file.lines_of([s for s in costs.SPECS if (not arch or s.arch in arch) and (not compilers or (s.kernel == source.FORWARD and not s.option))])
  if write is not None:
    others = costs.lines_of_others(write.read_text(), arch) if arch and write.exists() else []
    write.write_text(file.text([*lines, *others]))
  elif check is not None:
    if changes:=file.compare(check.read_text(), lines): raise click.ClickException("costs changed:\n" + "\n".join(changes))
  else: click.echo(file.text(lines), nl=False)

@main.command("check")
@click.argument("what", nargs=-1)
@click.option("--arch", multiple=True, type=click.Choice(MODELLED), help="Only kernels of these chips; for a disassembly, its chip.")
@click.option("--compilers", is_flag=True, help=f"Under clang {', '.join(map(str, OLDER))}, which pip gets once, instead of the one in use.")
def check_command(what:tuple[str, ...], arch:tuple[str, ...], compilers:bool) -> None:
  """Look for mistakes in the machine code of WHAT: kernels of attn such as gfx942/128/float16/causal, or files. [default: every kernel of
  docs/costs.txt]

  Each kernel of attn is compiled twice: for a problem of whole tiles, and for numbers of queries and keys that are no powers of two."""
  files = [word for word in what if Path(word).is_file()]
  found = [f"{word}: {x}" for word in files for x in check.findings(_text_of(Path(word)), *arch[:1])]
  words = [word for word in what if word not in files]
  specs = [s for s in (map(source.Spec.parse, words) if what else costs.SPECS) if not arch or s.arch in arch]
  if other := next((s for s in specs if s.arch not in MODELLED), None):
    raise ValueError(f"{other}: checks are only for AMD's chips, {', '.join(MODELLED)}")
  for tools in [toolchain_of(llvm) for llvm in OLDER] if compilers else [clang.toolchain()]:
    known = [s for s in specs if costs.knows(tools, s.arch)]
    found += [f"{kernel}: {x}" for kernel, lines in check.findings_of(known, tools) for x in lines]
  for line in found: click.echo(line)
  if found: raise SystemExit(1)

@main.command()
@click.option("--arch", type=click.Choice(list(MODELLED)), default="gfx942", show_default=True, help="The chip of DEV=AMD.")
def version(arch:str) -> None:
  """Show which compiler makes the machine code for these commands, and which compiler compiles attn's kernels with DEV=AMD."""
  click.echo(f"reports: {clang.toolchain().version}")
  click.echo(f"DEV=AMD: {in_use(arch)}")

if __name__ == "__main__":
  try: main(prog_name="python -m attn.isa")
  except (ValueError, RuntimeError, OSError, NotImplementedError, CompileError, ModuleNotFoundError) as e:
    raise SystemExit(f"python -m attn.isa: {e}") from None
