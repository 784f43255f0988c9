"""Runs flash attention on a GPU, or on the emulator if there is none: checks the result and prints its time. Settings come from the environment.

  DEV=EMU::gfx950 B=2 H=8 HKV=2 N=300 D=64 CAUSAL=1 DTYPE=bf16 python bench.py

DEV        AMD, CUDA, CL, CPU, EMU::...  B, H, HKV  batch, query heads, key/value heads   N, SK    queries, keys     D, DV  head dimensions
DTYPE      float16, bfloat16, float32    OUT_DTYPE  as DTYPE, or float32                  LAYOUT   bhsd, bshd, nsd   LSE    1: with lse
CAUSAL     0, 1, bottom-right, top-left  WINDOW     left,right: keys seen, -1 for all     CNT      timed runs        SEED   of the inputs
VERIFY     0: no check, 1: checks a sample of the rows of large problems, 2: checks every row
SWEEP      1: runs the problems of a list (SWEEP, below), each with settings of its own; the environment has the other settings
ISA        1: prints bounds and a prediction of the kernel's speed, from its machine code
CSV        file into which the printed table is written, too
TUNE       1: on a device, times every tile description that the kernel may have (with BWD=1 those of both backward kernels), and keeps the fastest in
           the user's cache directory, where later calls find it. For AMD's kernels, and kernels of plain UOps (float32, D above 256, DEV=CL, DEV=CPU)
COMPARE    1: on an NVIDIA GPU, also times PyTorch's SDPA (FlashAttention-2, cuDNN; for float32 its memory-efficient kernel) and tinygrad's. SWEEP=1
           then has a list of its own, and another one for DTYPE=float32
PLOT       with COMPARE=1: file for a picture of the results (needs matplotlib)
BWD        1: times the gradients of q, k and v. TFLOP/s counts 2.5 times the operations of forward, the five products that gradients need. A second
           rate counts all seven products that the kernels compute
FIGURES    1: prints the README's figures about the emulator's speed, and does nothing else"""
from __future__ import annotations
import csv, importlib, os, statistics, subprocess, sys, time
from dataclasses import dataclass, replace
from typing import Any, Callable, Mapping, Sequence
from tinygrad import Context, Device, Tensor, getenv
from attn.api.custom_kernel import flash_attention_fn
from attn.cache import tuned
from attn.calls.checked_kernel import PLAIN_DEVICES, default_arch, device_arch
from attn.chips import Chip
from attn.chips.matrix import contraction
from attn.choose.backward import choose_backward
from attn.choose.dispatch import single_kernel
from attn.compilers.choice import in_use
from attn.compilers.found import NoCompiler
from attn.emulator.checks import EmulatorError
from attn.extras import needs
from attn.kernels.parts.program.counts import round_up
from attn.kernels.tiles.amd import Tile
from attn.kernels.tiles.plain import TiledTile
from attn.measure.gradients import Backward, backward_of
from attn.measure.inputs import random_operands, shapes, to_array
from attn.measure.verdicts import SAMPLE, verdict_text, verify, verify_backward
from attn.problem import Problem, problem_of
from attn.reference import restore
from attn.tinygrad_compat import UOp, compiled, device_seconds
with needs("bench", "bench.py", __name__):
  from rich.console import Console
  from rich.table import Table
  from tqdm import tqdm
  from attn.measure.tiles_by_time import (BackwardSeconds, Seconds, TimedBackwardTile, assembly_of, backward_launch, backward_tiles_to_tune,
                                          time_backward, time_forward)

NAMES = {"half": "float16", "fp16": "float16", "float16": "float16", "bf16": "bfloat16", "bfloat16": "bfloat16",
         "float": "float32", "fp32": "float32", "float32": "float32"}
LAYOUTS = {name: name for name in ("bhsd", "bshd", "nsd")}
MASKS: dict[str, bool|str] = {"0": False, "1": True, "bottom-right": "bottom-right", "top-left": "top-left"}
ON_THE_EMULATOR = {"B": 1, "H": 8, "N": 256, "D": 128, "CNT": 1}
ON_A_GPU = {"B": 4, "H": 16, "N": 4096, "D": 128, "CNT": 20}
SWEEP: list[dict[str, Any]] = [
  {"D": 64}, {"D": 128}, {"D": 256}, {"D": 80}, {"CAUSAL": "1"}, {"CAUSAL": "top-left", "N": 100, "SK": 333}, {"N": 1, "SK": 777},
  {"H": 8, "HKV": 2}, {"H": 7, "HKV": 1, "CAUSAL": "1"}, {"WINDOW": "64,0"}, {"LAYOUT": "bshd"}, {"DTYPE": "bfloat16"},
  {"DTYPE": "bfloat16", "OUT_DTYPE": "float32"}]
MOST_SCORES = 1 << 26     # most scores of one key head for which gradients are checked: all of them are in memory, in float64

class BadSetting(Exception): pass

# ***** settings *****

@dataclass(frozen=True)
class Settings:
  problem: Problem
  causal: bool|str
  window: tuple[int, int]
  count: int
  seed: int
  verify: int
  backward: bool = False

def number(name:str, default:int, least:int=1) -> int:
  try: value = int(text := getenv(name, str(default)))
  except ValueError: raise BadSetting(f"{name}={text!r}: must be a whole number, at least {least}") from None
  if value < least: raise BadSetting(f"{name}={value}: must be at least {least}")
  return value

def choice(name:str, default:str, values:Mapping[str, Any]) -> Any:
  if (text := getenv(name, default)) not in values: raise BadSetting(f"{name}={text!r}: must be one of {', '.join(values)}")
  return values[text]

def flag(name:str) -> bool: return choice(name, "0", {"0": False, "1": True})

def pair(name:str, default:str) -> tuple[int, int]:
  try: left, right = map(int, (text := getenv(name, default)).split(","))
  except ValueError:
    raise BadSetting(f"{name}={text!r}: must be left,right, such as 128,0; -1 for all keys on that side") from None
  return left, right

def settings(default:Mapping[str, Any]) -> Settings:
  """Reads the problem from the environment variables; `default` has the values of variables that are not set."""
  B, H, N, D = (number(name, default[name]) for name in ("B", "H", "N", "D"))
  HKV, SK, DV = number("HKV", default.get("HKV", H)), number("SK", default.get("SK", N)), number("DV", default.get("DV", D))
  dtype = choice("DTYPE", default.get("DTYPE", "float16"), NAMES)
  out = choice("OUT_DTYPE", default.get("OUT_DTYPE", dtype), NAMES)
  layout = choice("LAYOUT", default.get("LAYOUT", "bhsd"), LAYOUTS)
  causal, window = choice("CAUSAL", default.get("CAUSAL", "0"), MASKS), pair("WINDOW", default.get("WINDOW", "-1,-1"))
  lse = flag("LSE")
  if H % HKV: raise BadSetting(f"HKV={HKV}: must divide H={H}")
  q, k, v, o, lse_shape = shapes(B, H, HKV, N, SK, D, DV, layout)
  p = problem_of(o, q, k, v, dtypes=[out, *[dtype]*3, "float32"], lse=lse_shape if lse else None, causal=causal, window=window,
                 layout=layout)
  found = Settings(replace(p, B=B, H=H, Hkv=HKV), causal, window, number("CNT", default["CNT"]), number("SEED", 0, 0),
                   choice("VERIFY", "1", {"0": 0, "1": 1, "2": 2}), flag("BWD"))
  if found.backward and lse: raise BadSetting("LSE=1 with BWD=1: the gradient is that of o, which needs lse in any case; leave LSE unset")
  return found

def check_verified(s:Settings) -> None:
  """Raises BadSetting if a check of the gradients would need too much memory, because a key head has too many scores."""
  p = s.problem
  if s.backward and s.verify and (scores := p.H//p.Hkv*p.Sq*p.Sk) > MOST_SCORES:
    raise BadSetting(f"VERIFY={s.verify} with BWD=1: a key head has {scores} scores, and at most {MOST_SCORES} can be checked; "
                     "VERIFY=0 checks none")

def find_device() -> str:
  """Returns the device DEV, or without DEV an AMD GPU if there is one, else the emulator; raises BadSetting for a wrong DEV."""
  if not (device := getenv("DEV", "")):
    try: return Device["AMD"].device
    except Exception:   # a missing GPU raises another exception on each system
      print("no DEV is set and no AMD GPU was found: emulating one, DEV=EMU::gfx942")
    return "EMU::gfx942"
  if Device.DEFAULT not in PLAIN_DEVICES:
    raise BadSetting(f"DEV={device!r}: must be one of {', '.join(PLAIN_DEVICES)}; EMU::<arch> to emulate, such as EMU::gfx942")
  try: Device[Device.DEFAULT]
  except ValueError: raise
  except Exception as e:
    reasons = "; ".join(map(str, getattr(e, "exceptions", [e])))
    raise BadSetting(f"DEV={device!r}: it does not open: {reasons}") from None
  return device

# ***** one problem *****

def bench(s:Settings) -> dict[str, Any]:
  """Times the forward kernel of one problem and checks its result; returns a row of the printed table as {column: value}."""
  p, arch, (inputs, tensors, outs) = s.problem, device_arch(), random_operands(s.problem, s.seed)
  start = time.perf_counter()
  fxn = flash_attention_fn(causal=s.causal, layout=p.layout, window=s.window, return_lse=p.return_lse)
  results = Tensor.custom_kernel(*outs, *tensors, fxn=fxn)[:len(outs)]
  schedule = compiled(*results)
  lowering, tile = time.perf_counter() - start, single_kernel(p, arch)[1]
  row: dict[str, Any] = {"shape": describe(s), "arch": arch.name, "tile": str(tile), "lowering s": lowering}
  emulated, times = Device.DEFAULT == "EMU", []
  for _ in range(s.count):
    start = time.perf_counter()
    seconds = device_seconds(schedule)
    times.append(time.perf_counter() - start if emulated else seconds)
  best, median = min(times), statistics.median(times)
  if emulated: row["emulated s"] = median
  else: row |= {"ms best": best*1e3, "median": median*1e3, "TFLOP/s best": p.flops/best/1e12, "of median": p.flops/median/1e12}
  if s.verify == 0: return row
  o, *lse = (to_array(t) for t in results)
  outputs = [restore(o, p.layout, (p.B, p.H, p.Sq, p.Dv)), *(x.reshape(p.B, p.H, p.Sq) for x in lse)]
  verdict, part = verify(p, inputs, outputs, None if s.verify > 1 else SAMPLE)
  return row | {"error": verdict.error, "limit": verdict.limit, "rows checked": f"{100*part:.0f}%", "verdict": verdict_text(verdict)}

# ***** the gradients of one problem *****

def prepared_backward(s:Settings, arch:Chip) -> Backward:
  """Returns the backward kernels of a problem, ready to run on random inputs, or raises BadSetting if no kernel computes the gradients."""
  try: return backward_of(s.problem, arch, s.seed)
  except NotImplementedError as e: raise BadSetting(f"BWD=1: {describe(s)}: {e}") from None

def bench_backward(s:Settings) -> dict[str, Any]:
  """Times both backward kernels of one problem and checks the gradients; returns a row of the printed table as {column: value}."""
  p, arch, emulated = s.problem, device_arch(), Device.DEFAULT == "EMU"
  call, start, seconds, lowering = prepared_backward(s, arch), time.perf_counter(), dict[str, float](), 0.0
  for name in ("dq", "dkdv"):
    start = time.perf_counter()
    outputs = call.run(name)
    schedule = compiled(*outputs.values())
    lowering += time.perf_counter() - start
    times = []
    for _ in range(s.count):
      start = time.perf_counter()
      on_device = device_seconds(schedule)
      times.append(time.perf_counter() - start if emulated else on_device)
    seconds[name] = statistics.median(times)
    call.tensors.update({n: t.realize() for n, t in outputs.items()})
  choice, total = choose_backward(p, arch, "forward"), sum(seconds.values())
  tiles = "; ".join(map(str, choice.tiles or ()))
  row: dict[str, Any] = {"shape": describe(s), "arch": arch.name, "tiles": tiles, "lowering s": lowering}
  if emulated: row["emulated s"] = total
  else:
    row |= {f"ms {name}": 1e3*x for name, x in seconds.items()}
    row |= {"TFLOP/s": 2.5*p.flops/total/1e12, "of seven products": 3.5*p.flops/total/1e12}
  if s.verify == 0: return row
  sizes = {"dq": (p.H, p.Sq, p.D), "dk": (p.Hkv, p.Sk, p.D), "dv": (p.Hkv, p.Sk, p.Dv)}
  gradients = [restore(to_array(call.tensors[n]), p.layout, (p.B, *size)) for n, size in sizes.items()]
  verdict, part = verify_backward(p, call.arrays, gradients, None if s.verify > 1 else SAMPLE)
  return row | {"error": verdict.error, "limit": verdict.limit, "heads checked": f"{100*part:.0f}%", "verdict": verdict_text(verdict)}

def describe(s:Settings) -> str:
  p = s.problem
  heads, width = (f"{a}" if a == b else f"{a}/{b}" for a, b in ((p.H, p.Hkv), (p.D, p.Dv)))
  mask = {False: "", "top-left": " causal top-left"}.get(s.causal, " causal")
  if s.window != (-1, -1): mask += f" window {s.window[0]},{s.window[1]}"
  types = p.dtype if p.dtype == p.out_dtype else f"{p.dtype}->{p.out_dtype}"
  return f"B{p.B} H{heads} {p.Sq}x{p.Sk} D{width} {types} {p.layout}{mask}{' lse' if p.return_lse else ''}"

def show(title:str, rows:Sequence[Mapping[str, Any]]) -> None:
  table = Table(*rows[0], title=title, title_justify="left")
  def cell(x:Any) -> str:
    if not isinstance(x, float): return str(x)
    return f"{x:.0f}" if x >= 1000 else f"{x:.3g}"
  for row in rows: table.add_row(*map(cell, row.values()))
  console().print(table)

def console() -> Console: return Console(width=None if sys.stdout.isatty() else 200)

# ***** bounds *****

def show_bounds(s:Settings) -> None:
  """Prints bounds of the forward kernel's speed, from its machine code and the chip's data sheet, and a prediction of the speed."""
  from attn.isa import report, roofline, table
  from attn.isa.timing.predict import Division, predict
  from attn.isa.timing.trips import timing_of
  p, arch = s.problem, device_arch()
  program, tile = single_kernel(p, arch)
  assert isinstance(tile, Tile)
  text, contracted, columns = assembly_of(program, p.shapes, arch), contraction(tile.matrix, p.D), round_up(p.Dv, tile.matrix.M)
  found = report.analyse(text, arch.name, contracted, columns, queries=tile.q_tiles*tile.matrix.N)
  console().print(table.brief([found]))
  keys = found.loop.keys if found.loop is not None else None
  timing = timing_of(text, arch.name, contracted, columns) if keys is not None else None
  use = (found.loop.overlap, found.loop.serial) if found.loop else (1.0, 1.0)
  rows = []
  for chip, card in roofline.rated(arch.name):
    overlapped, serial = (roofline.roofline(p, tile, chip, card, x) for x in use)
    others = ", ".join(f"{x.kernel} {x.tflops:g}" for x in roofline.published(p, card.name)[:3])
    predicted = predict(p, timing, Division(tile.block_m, keys), card).tflops if timing is not None and keys is not None else "-"
    rows.append({"chip": card.name, "peak": chip.peak(card), "overlapped": overlapped.tflops, "serial": serial.tflops,
                 "limited by": overlapped.limit, "predicted": predicted,
                 "CUs busy": f"{100*overlapped.balance:.0f}%", "measured by others": others or "nothing for this shape"})
  show("bound, not measured, and predicted (TFLOP/s)", rows)

# ***** tuning by time *****

def device_timer(s:Settings) -> Seconds:
  """Returns a function that runs a forward kernel with a given tile description, and returns the seconds of the fastest run."""
  _, tensors, outs = random_operands(s.problem, s.seed)
  def seconds(program:Callable[..., UOp], tile:Tile|TiledTile) -> float:
    schedule = compiled(*Tensor.custom_kernel(*outs, *tensors, fxn=program)[:len(outs)])
    return min(device_seconds(schedule) for _ in range(s.count))
  return seconds

def backward_timer(s:Settings, arch:Chip) -> BackwardSeconds:
  """Returns a function that runs a backward kernel ("dq" or "dkdv") with a given tile description, and returns the seconds of the fastest run."""
  # A gradient is never a sum of several workgroups' partial sums here, because their number would depend on the tile description.
  call = prepared_backward(s, arch)
  call.tensors["delta"], p = call.run("dq")["delta"].realize(), s.problem
  def seconds(name:str, tile:TimedBackwardTile) -> float:
    given = {n: t for n, t in call.tensors.items() if (name, n) != ("dq", "delta")}
    schedule = compiled(*Backward([], given, {name: backward_launch(p, arch, name, tile)}).run(name).values())
    return min(device_seconds(schedule) for _ in range(s.count))
  return seconds

def tune_all(todo:Sequence[Settings]) -> None:
  if Device.DEFAULT == "EMU":
    raise BadSetting("TUNE=1: needs a GPU, because times on the emulator say nothing about a GPU; the tiles in use come from a search over bounds "
                     "(python -m attn.tune)")
  arch = device_arch()
  for s in todo:
    if s.backward: backward_tiles_to_tune(s.problem, arch)
  for s in todo:
    kept = f"{describe(s)} on {arch.name}: the first is kept in {tuned.path()}"
    if not s.backward: show(kept, time_forward(s.problem, arch, device_timer(s)))
    else:
      timer = backward_timer(s, arch)
      for name in ("dq", "dkdv"): show(kept, time_backward(s.problem, arch, name, timer))

# ***** the README's figures *****

FIRST_CALL = """
import numpy as np
from tinygrad import Tensor, dtypes
from attn import flash_attention
q, k, v = (Tensor(np.random.default_rng(i).standard_normal((1, 2, 256, 64)).astype(np.float16)) for i in range(3))
Tensor.empty(1, 2, 256, 64, dtype=dtypes.half).custom_kernel(q, k, v, fxn=flash_attention)[0].numpy()
"""

def show_figures() -> None:
  start = time.perf_counter()
  subprocess.run([sys.executable, "-c", FIRST_CALL], env={**os.environ, "DEV": "EMU::gfx942"}, check=True)
  first = time.perf_counter() - start
  with Context(DEV="EMU::gfx942"): row = bench(settings({**ON_THE_EMULATOR, "N": 1024}))
  print(f"measured on this machine, {os.cpu_count()} CPUs:")
  print(f"  emulation, checks on     {row['emulated s']:.2f} s   {row['shape']} on {row['arch']}: {row['verdict']}")
  print(f"  lowering of the same     {row['lowering s']:.2f} s")
  print(f"  first call with imports  {first:.2f} s   a new process, B1 H2 256x256 D64 float16")

def compare_all(x:Task) -> list[dict[str, Any]]:
  """Times attn, PyTorch and tinygrad's own attention on each problem (COMPARE=1), and returns the rows of the printed table."""
  if Device.DEFAULT != "CUDA": raise BadSetting(f"COMPARE=1 on {Device.DEFAULT}: it is for DEV=CUDA only")
  try: import torch
  except ImportError: raise BadSetting("COMPARE=1 needs PyTorch, which is not installed") from None
  if not torch.cuda.is_available(): raise BadSetting("COMPARE=1 needs a PyTorch with CUDA")
  if x.plot: importable("PLOT", "matplotlib", "pip install matplotlib")
  from attn.measure import peers
  if x.backward: return compare_all_backward(x, torch.cuda.get_device_name())
  dtype = choice("DTYPE", "float16", NAMES)
  todo = [settings({**ON_A_GPU, **sizes}) for sizes in (peers.sweep(dtype) if x.sweep else [{}])]
  for s in todo:
    p = s.problem
    if p.layout != "bhsd" or p.Sq != p.Sk or p.Dv != p.D or s.window != (-1, -1) or p.return_lse or p.dtype != p.out_dtype:
      raise BadSetting(f"COMPARE=1 of {describe(s)}: the peers need LAYOUT=bhsd, N = SK, D = DV and no WINDOW, LSE or OUT_DTYPE")
  rows = []
  for s in tqdm(todo, unit="shape", disable=not x.sweep):
    p = s.problem
    heads = f"{p.H}/{p.Hkv}" if p.H//p.Hkv > 1 else f"{p.H}"
    rows.append(peers.compare_problem(p, bool(s.causal), s.seed, f"B{p.B} H{heads} {p.Sq} D{p.D}"))
  if x.plot: peers.plot(rows, x.plot, f"attention forward on one {torch.cuda.get_device_name()}")
  return rows

def compare_all_backward(x:Task, card:str) -> list[dict[str, Any]]:
  """Times the gradients of attn and of PyTorch on each problem (COMPARE=1 with BWD=1), and returns the rows of the printed table."""
  from attn.measure import backward, peers
  if x.sweep: todo = backward.problems(["float32"]*(choice("DTYPE", "float16", NAMES) == "float32"))
  else:
    s = settings(ON_A_GPU)
    if s.problem.layout != "bhsd" or s.problem.Dv != s.problem.D or s.window != (-1, -1) or s.problem.dtype != s.problem.out_dtype:
      raise BadSetting(f"COMPARE=1 BWD=1 of {describe(s)}: the peers need LAYOUT=bhsd, D = DV and no WINDOW or OUT_DTYPE")
    if s.causal and s.problem.Sq != s.problem.Sk:
      raise BadSetting(f"COMPARE=1 BWD=1 of {describe(s)}: the peers' CAUSAL needs N = SK")
    todo = [(replace(s.problem, top_left=bool(s.causal), num_splits=1, return_lse=True), bool(s.causal))]
  rows = [backward.compare_backward(p, causal) for p, causal in tqdm(todo, unit="shape", disable=not x.sweep)]
  if x.plot: peers.plot(rows, x.plot, f"attention backward on one {card}, 2.5 times the operations of forward")
  return rows

# ***** what to do *****

@dataclass(frozen=True)
class Task:
  """What one run of bench.py does besides timing attn, such as tuning or a comparison, and the files that it writes."""
  figures: bool
  sweep: bool
  tune: bool
  compare: bool
  isa: bool
  csv: str
  plot: str
  backward: bool

def task() -> Task:
  """Reads from the environment what bench.py is to do; raises BadSetting if the settings contradict each other."""
  x = Task(flag("FIGURES"), flag("SWEEP"), flag("TUNE"), flag("COMPARE"), flag("ISA"), file_for("CSV"), file_for("PLOT"), flag("BWD"))
  chosen = [name for name in ("FIGURES", "TUNE", "COMPARE", "ISA") if getattr(x, name.lower())]
  if len(chosen) > 1: raise BadSetting(f"{' and '.join(f'{name}=1' for name in chosen)}: only one of them may be set")
  if x.backward and (x.figures or x.isa):
    raise BadSetting(f"BWD=1 with {chosen[0]}=1: it is for forward only; python -m attn.isa has bounds of the backward kernels")
  if x.plot and not x.compare: raise BadSetting(f"PLOT={x.plot!r}: needs COMPARE=1, whose results it draws")
  if x.csv and chosen and chosen[0] in ("FIGURES", "TUNE"):
    raise BadSetting(f"CSV={x.csv!r} with {chosen[0]}=1: {chosen[0]}=1 has no table to write; CSV must not be set")
  if x.isa: importable("ISA=1", "attn.isa.table", "the extra isa has it: run pip install '.[isa]' in a clone of attn")
  return x

def file_for(name:str) -> str:
  """Returns the file path in the environment variable `name`, or "" without it; raises BadSetting if the file can't be written."""
  if not (path := getenv(name, "")): return ""
  folder = os.path.dirname(os.path.abspath(path))
  if os.path.isdir(path) or not os.access(path if os.path.exists(path) else folder, os.W_OK):
    raise BadSetting(f"{name}={path!r}: must be a file in a directory that can be written to")
  return path

def importable(name:str, module:str, cure:str) -> None:
  try: importlib.import_module(module)
  except ImportError as e: raise BadSetting(f"{name}: needs {e.name}; {cure}") from None

def main() -> int:
  todo_with = task()
  if todo_with.figures:
    show_figures()
    return 0
  with Context(DEV=(device := find_device())):
    default = ON_THE_EMULATOR if Device.DEFAULT == "EMU" else ON_A_GPU
    shapes_of = [] if todo_with.compare else SWEEP if todo_with.sweep else [{}]      # COMPARE=1 has shapes of its own
    todo = [settings({**default, **x}) for x in shapes_of]
    for s in todo: check_verified(s)
    if todo_with.isa and device_arch().unit.mma:
      raise BadSetting(f"ISA=1: there are bounds for AMD's chips, and none for {device_arch().name}")
    if todo_with.tune:
      tune_all(todo)
      return 0
    measured = bench_backward if todo_with.backward else bench
    if todo_with.compare: rows = compare_all(todo_with)
    else: rows = [measured(x) for x in tqdm(todo, unit="shape", disable=not todo_with.sweep)]
    compiled_by = f", {in_use(default_arch())}" if Device.DEFAULT == "AMD" else ""
    show(f"flash attention {'backward' if todo_with.backward else 'forward'}, DEV={device}{compiled_by}", rows)
    for s in todo if todo_with.isa else []: show_bounds(s)
  if todo_with.csv:
    with open(todo_with.csv, "w", newline="") as f:
      writer = csv.DictWriter(f, list(dict.fromkeys(name for row in rows for name in row)))     # a row has no field for a peer that refused the shape
      writer.writeheader()
      writer.writerows(rows)
  return int(any(row.get("verdict", "ok") != "ok" for row in rows))

if __name__ == "__main__":
  try: sys.exit(main())
  except EmulatorError as e: sys.exit(f"bench.py: the emulator stopped the kernel: {e}")
  except (BadSetting, NoCompiler, ValueError, NotImplementedError) as e:
    print(f"bench.py: {e}", file=sys.stderr)
    sys.exit(2)
