"""Runs NVIDIA's compute-sanitizer over the kernels for NVIDIA GPUs. `python -m attn.measure.sanitize [WORD ...]` runs the calls whose name has each
WORD, on the first CUDA device.

Each tool of compute-sanitizer (racecheck, memcheck, initcheck, synccheck) checks every kernel, in small calls. Kernels with a planted fault show that
a tool would report a fault. The exit code is 0 if there are no findings and all planted faults are reported, 2 if the machine lacks compute-sanitizer
or a CUDA device, and otherwise 1."""
from __future__ import annotations
import contextlib, json, os, re, subprocess, sys, time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch
import numpy as np
from attn.api.attention import attention
from attn.api.cache import attention_with_kv_cache
from attn.calls.quantized import QuantizedRows, quantize_kv
from attn.choose import backward_tiles, preparation, tile_lists
from attn.isa.sass import toolkit_program
from attn.kernels.mma import forward as mma_forward
from attn.kernels.parts.grid import workgroup
from attn.tinygrad_compat import Context, Tensor, UOp, compiled, device_of, device_seconds, dtypes
from attn.values import FLOATS

PROGRAM = "python -m attn.measure.sanitize"
# Tools, with their arguments. racecheck (2025.3) reports the hazard of the kernel that lacks a barrier only with the argument `hazard`.
TOOLS = {"racecheck": ("--racecheck-report", "hazard"), "memcheck": (), "initcheck": (), "synccheck": ()}
PARTS = 4                                            # processes of each tool
CALLED_WITH = FLOATS | {"fp8e4m3": dtypes.fp8e4m3}
UNFORCED, FORCED_MMA = "", "forward_mma,backward_dq_mma"      # values of ATTN_KERNEL: UNFORCED makes dispatch choose wgmma on sm_90

# ***** the calls *****

@dataclass(frozen=True)
class SmallCall:
  """Call of attention with small tensors, which compute-sanitizer checks."""
  name: str
  q: tuple[int, ...] = (1, 2, 100, 64)
  kv: tuple[int, ...]|None = (1, 1, 130, 64)  # shape of k and v; None: the shape of q
  kernel: str = UNFORCED  # value of ATTN_KERNEL, which forces kernels
  dtype: str = "float16"
  options: dict[str, Any] = field(default_factory=dict)  # options that are not tensors
  tensors: dict[str, Any] = field(default_factory=dict)  # options that are tensors, as arrays; floats become float32
  stored: str = ""  # dtype of 8-bit rows to which k and v are converted before; "": none
  gradients: bool = True  # whether to compute also the gradients of all float inputs
  # If not 0, `attention_with_kv_cache` is called: k and v are a KV cache, and `new` keys per sequence are appended to it.
  new: int = 0

  def outputs(self) -> list[Tensor]:
    """Returns the outputs and gradients of the call as lazy tensors, for random inputs on the default device."""
    rng = np.random.default_rng(0)
    def made(shape:tuple[int, ...], dtype:str) -> Tensor: return Tensor(rng.standard_normal(shape, np.float32)).cast(CALLED_WITH[dtype]).contiguous()
    def given(x:Any) -> Any:
      if isinstance(x, tuple): return [given(y) for y in x]
      return Tensor(x) if x.dtype.kind in "iu" else Tensor(x.astype(np.float32))
    shape = self.kv or self.q
    q, k = made(self.q, self.dtype), made(shape, self.dtype)
    v = None if "v_dim" in self.options else made(shape, self.dtype)
    tensors = {name: given(x) for name, x in self.tensors.items()}
    flat = [y for x in (q, k, v, *tensors.values()) if x is not None for y in (x if isinstance(x, list) else [x])]
    Tensor.realize(*flat)
    if self.stored: return self.outputs_of_stored(q, *(quantize_kv(x, self.stored) for x in (k, v) if x is not None))
    if self.new:
      heads = shape[2 if "block_table" in tensors else 1]
      k_new, v_new = (made((self.q[0], heads, self.new, shape[-1]), self.dtype).realize() for _ in range(2))
      return [attention_with_kv_cache(q, k_new, v_new, k, v, tensors.pop("kv_lengths"), **tensors)]
    with Context(TRAINING=int(self.gradients)): o, lse = attention(q, k, v, return_lse=True, **self.options, **tensors)
    if not self.gradients: return [o, lse]
    wanted = [x for x in flat if dtypes.is_float(x.dtype)]
    do = made(o.shape, self.dtype).realize()
    return [o, lse, *(o*do).sum().gradient(*wanted)]

  def outputs_of_stored(self, q:Tensor, *rows:QuantizedRows) -> list[Tensor]:
    """Returns o and lse, as lazy tensors, of attention over `rows`: keys and values stored in 8 bits."""
    Tensor.realize(*(x for each in rows for x in (each.values, each.scales)))
    return list(attention(q, *rows, return_lse=True, **self.options))

def floats(*shape:int) -> np.ndarray: return np.random.default_rng(1).standard_normal(shape).astype(np.float32)
def ints(*values:Any) -> np.ndarray: return np.array(values, np.int32)
SEED = np.array([3, 5], np.uint32)

def by_table(s:UOp, b:UOp, h:UOp, i:UOp, j:UOp, t:UOp) -> UOp: return s*t[h]
def in_blocks(b:UOp, h:UOp, i:UOp, j:UOp) -> UOp: return (i//32 - j//32) % 3 < 2
def of_document(b:UOp, h:UOp, i:UOp, j:UOp, d:UOp) -> UOp: return d[i] == d[j]

PACKED_CALL: dict[str, Any] = {"q": (130, 2, 64), "kv": (190, 1, 64),
                               "options": {"layout": "thd", "causal": True, "max_seqlen_q": 90, "max_seqlen_k": 139},
                               "tensors": {"cu_seqlens_q": ints(0, 20, 20, 110), "cu_seqlens_k": ints(0, 30, 41, 180)}}

EACH_OPTION: dict[str, dict[str, Any]] = {
  "full": {}, "causal": {"options": {"causal": True}}, "window": {"options": {"window": (40, 20)}},
  "softcap": {"options": {"softcap": 20.0, "causal": "top-left"}}, "ALiBi": {"tensors": {"alibi_slopes": floats(2)**2}, "options": {"causal": True}},
  "sinks": {"tensors": {"sinks": floats(2)}}, "dropout": {"options": {"dropout_p": 0.2}, "tensors": {"dropout_seed": SEED}},
  "lengths": {"tensors": {"kv_lengths": ints(40)}}, "packed": PACKED_CALL,
  "functions": {"options": {"mask_mod": in_blocks}},
  "documents": {"options": {"mask_mod": of_document}, "tensors": {"mod_tensors": (np.arange(130, dtype=np.int32)//50,)}},
  "D=128": {"q": (1, 2, 100, 128), "kv": (1, 1, 130, 128), "options": {"causal": True}, "dtype": "bfloat16"},
  "D=256": {"q": (1, 2, 100, 256), "kv": (1, 1, 130, 256)}}
OF_TENSORS: dict[str, dict[str, Any]] = {      # tinygrad or `backward_dbias` also computes the gradients of these tensors
  "bias": {"tensors": {"bias": floats(1, 2, 100, 130)}}, "bias of keys": {"tensors": {"bias": floats(1, 1, 1, 130)}},
  "score_mod": {"options": {"score_mod": by_table}, "tensors": {"mod_tensors": (floats(2),)}}}
OF_FLOAT32 = ("full", "causal", "dropout", "lengths", "packed", "sinks")
ONE_QUERY: dict[str, Any] = {"q": (2, 8, 1, 64), "kv": (2, 2, 300, 64), "tensors": {"kv_lengths": ints(40, 300)}, "gradients": False}
PAGED_CALL: dict[str, Any] = {"q": (2, 8, 1, 64), "kv": (20, 16, 2, 64), "gradients": False,
                         "tensors": {"kv_lengths": ints(33, 150), "block_table": np.arange(20, dtype=np.int32).reshape(2, 10)}}
FEW_AT_ONCE: dict[str, Any] = {"q": (1, 2, 200, 128), "kv": (1, 1, 256, 128)}

SMALL_CALLS = (
  *(SmallCall(f"wgmma {name}", **x) for name, x in (EACH_OPTION | OF_TENSORS).items()),
  *(SmallCall(f"mma {name}", kernel=FORCED_MMA, **x) for name, x in (EACH_OPTION | OF_TENSORS).items()),
  *(SmallCall(f"float32 {name}", **x | {"dtype": "float32"}) for name, x in EACH_OPTION.items() if name in OF_FLOAT32),
  SmallCall("at once full", **FEW_AT_ONCE, options={"deterministic": False}),
  SmallCall("at once causal", **FEW_AT_ONCE, options={"deterministic": False, "causal": True}),
  SmallCall("few queries", (1, 2, 64, 128), (1, 2, 200, 128), options={"causal": True}),
  SmallCall("decode", **ONE_QUERY | {"options": {"num_splits": 1}}), SmallCall("decode in splits", **ONE_QUERY | {"options": {"num_splits": 3}}),
  SmallCall("int8", stored="int8", gradients=False), SmallCall("int8 causal", stored="int8", options={"causal": True}, gradients=False),
  SmallCall("8-bit floats", dtype="fp8e4m3", options={"causal": True}, gradients=False),
  SmallCall("8-bit floats, one kernel", dtype="fp8e4m3", kernel="forward_wgmma", gradients=False),
  SmallCall("wgmma in splits", gradients=False, options={"num_splits": 2}),
  SmallCall("pages", **PAGED_CALL), SmallCall("append to pages", **PAGED_CALL, new=3),
  SmallCall("append", (2, 8, 1, 64), (2, 2, 300, 64), tensors={"kv_lengths": ints(40, 100)}, gradients=False, new=1),
  SmallCall("MLA", (1, 16, 1, 576), (1, 1, 100, 576), options={"v_dim": 512}, gradients=False),
  SmallCall("MLA, 64 heads", (1, 64, 2, 576), (1, 1, 200, 576), options={"v_dim": 512, "causal": True, "num_splits": 2}, gradients=False))

@contextlib.contextmanager
def at_any_size() -> Iterator[None]:
  """Context in which small problems get kernels that dispatch usually chooses only for large problems."""
  # These are kernels that loop over lists of visible tiles, that compute all gradients at once, or that prepare k or v for another kernel. Each
  # tensor gets separate memory, so that compute-sanitizer sees accesses outside of the tensor.
  with (patch.object(tile_lists, "LEAST_TILES", 0), patch.object(tile_lists, "LEAST_HEADS", 0), patch.object(backward_tiles, "LEAST_QUERIES", 0),
        patch.object(backward_tiles, "LEAST_KEYS", 0), patch.object(backward_tiles, "too_few_blocks", lambda p, arch, tile, parts=1: None),
        patch.object(backward_tiles, "FEW_QUERIES_KEYS", 0), patch.object(preparation.Preparation, "slower", lambda self, p, tile: None),
        Context(NO_MEMORY_PLANNER=1, LRU=0)): yield

@contextlib.contextmanager
def with_kernel(kernel:str) -> Iterator[None]:
  with patch.dict(os.environ, {"ATTN_KERNEL": kernel}): yield

def kernels_in(schedule:UOp) -> list[str]:
  """Returns the names of attn's kernels in a schedule."""
  names = [getattr(call.src[0].arg, "name", "") or getattr(getattr(call.src[0].src[0], "arg", None), "name", "") for call in schedule.src if call.src
           and call.src[0].src]
  return [name for name in names if name.startswith("attn_")]

def run_call(call:SmallCall) -> list[str]:
  """Runs a call of attention on the default device, and returns the names of attn's kernels that ran."""
  with with_kernel(call.kernel):
    schedule = compiled(*call.outputs())
    device_seconds(schedule)
  return kernels_in(schedule)

# ***** planted faults *****

@dataclass(frozen=True)
class Fault:
  """Planted fault in a kernel, which one tool of compute-sanitizer must report."""
  tool: str
  call: SmallCall
  planted: Callable[[], contextlib.AbstractContextManager[Any]]  # makes a context in which the kernel of `call` has the fault

def without_barrier() -> contextlib.AbstractContextManager[Any]:
  """Makes a context in which the mma kernel of forward lacks a barrier."""
  # Warps exchange partial results through shared memory: without this barrier, a warp may load a result before another warp has stored it.
  return patch.object(mma_forward.MmaState, "after_barrier", lambda state: state)

def out_of_bounds() -> contextlib.AbstractContextManager[Any]:
  """Makes a context in which kernels store each row of O behind the end of the buffer."""
  own = workgroup.store_row
  def moved(arch:Any, o:UOp, dtype:str, length:int, begin:UOp, *rest:Any) -> list[UOp]:
    return own(arch, o, dtype, length, begin + o.max_numel(), *rest)
  return patch.object(workgroup, "store_row", moved)

FAULTS = {"a barrier less": Fault("racecheck", SmallCall("", (1, 4, 1, 64), (1, 1, 203, 64), options={"num_splits": 1}, gradients=False),
                                  without_barrier),
          "a store out of bounds": Fault("memcheck", SmallCall("", (1, 2, 77, 64), kernel=FORCED_MMA, gradients=False), out_of_bounds)}

def with_fault(name:str) -> list[str]:
  """Runs the kernel with the planted fault `name`, and returns the names of attn's kernels that ran."""
  with FAULTS[name].planted(): return run_call(FAULTS[name].call)

# ***** the tools' output *****

EQUALS, LAUNCHED = "=========", "kernels run: "
HEADER, SUMMARY, KERNEL = re.compile(r"COMPUTE-SANITIZER$"), re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)"), re.compile(r"\battn_\w+")

@dataclass(frozen=True)
class ToolReport:
  """One finding in the output of compute-sanitizer: its first line, and the name of the kernel ("" if the output names none)."""
  text: str
  kernel: str
  def __str__(self) -> str: return f"{self.text}, in {self.kernel}" if self.kernel else self.text

def reports_in(output:str) -> list[ToolReport]:
  """Reads the findings in the output of compute-sanitizer; raises ValueError if the output has no summary or contradicts it."""
  found, count, ended = list[list[str]](), 0, False
  for line in output.splitlines():
    if not line.startswith(EQUALS) or not (text := line.removeprefix(EQUALS)).strip() or HEADER.match(text.strip()): continue
    if (summary := SUMMARY.match(text.strip())) is not None: count, ended = count + int(summary[1]), True
    # A finding is a line and the indented lines after it.
    elif text.startswith("  ") and found: found[-1].append(text)
    else: found.append([text])
  if not ended: raise ValueError("compute-sanitizer printed no summary")
  if count and not found: raise ValueError(f"compute-sanitizer counted {count} findings, but printed none")
  return [ToolReport(lines[0].strip(), next((match[0] for line in lines if (match := KERNEL.search(line)) is not None), "")) for lines in found]

# ***** processes *****

@dataclass(frozen=True)
class ToolRun:
  """What a tool of compute-sanitizer found in one process, and which of attn's kernels ran in it."""
  findings: list[ToolReport]
  kernels: list[str]  # names of attn's kernels that ran
  seconds: float
  failure: str = ""  # error message if the process ended early

def in_process(sanitizer:str, tool:str, names:Sequence[str]) -> ToolRun:
  """Runs the calls and planted faults `names` in a new process under a tool of compute-sanitizer, or without a tool if `tool` is ""."""
  command, begin = [sys.executable, "-m", "attn.measure.sanitize", "--here", json.dumps(list(names))], time.perf_counter()
  env = os.environ | {"DEV": "CUDA", "PARALLEL": "0"}
  done = subprocess.run([*([sanitizer, "--tool", tool, *TOOLS[tool]] if tool else []), *command], capture_output=True, text=True, env=env)
  seconds, kernels = time.perf_counter() - begin, list[str]()
  for line in done.stdout.splitlines():
    if line.startswith(LAUNCHED): kernels += json.loads(line.removeprefix(LAUNCHED))
  failure = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
  try: found = reports_in(done.stdout) if tool else []
  except ValueError as e: return ToolRun([], kernels, seconds, str(e))
  return ToolRun(found, kernels, seconds, "" if not done.returncode else f"exit code {done.returncode}: {''.join(failure)}")

def here(names:list[str]) -> None:
  """Runs the calls and planted faults `names` in this process, and prints the names of attn's kernels that ran."""
  with at_any_size():
    for name in names:
      ran = with_fault(name) if name in FAULTS else run_call(next(call for call in SMALL_CALLS if call.name == name))
      print(LAUNCHED + json.dumps(ran), flush=True)

def compute_sanitizer() -> str|None:
  """Returns the path of compute-sanitizer, or None if it is not installed."""
  # It is looked for in PATH, in a CUDA toolkit and in the package nvidia-cuda-sanitizer-api.
  return toolkit_program("compute-sanitizer", also=[f"{x}/nvidia/cu13/bin" for x in sys.path if x])

def lacking(sanitizer:str|None) -> str|None:
  """Returns a sentence that says what the machine lacks for a run of compute-sanitizer, or None if it lacks nothing."""
  if sanitizer is None:
    return "needs NVIDIA's compute-sanitizer, which is part of the CUDA toolkit and of the package nvidia-cuda-sanitizer-api, and an NVIDIA GPU"
  try: device_of("CUDA")
  except Exception as e: return f"needs an NVIDIA GPU, but CUDA does not open ({e})"
  return None

def sanitized(sanitizer:str, calls:list[SmallCall], jobs:int) -> bool:
  """Runs each tool of compute-sanitizer over all calls and planted faults, and prints the tables."""
  parts = [x for i in range(PARTS) if (x := [call.name for call in calls[i::PARTS]])]
  with ThreadPoolExecutor(jobs) as pool:
    begin = time.perf_counter()
    compiled_first = list(pool.map(lambda name: in_process(sanitizer, "", [name]), [x.name for x in calls]))      # fills tinygrad's and attn's caches
    failures = [f"without a tool: {run.failure}" for run in compiled_first if run.failure]
    print(f"{sum(len(run.kernels) for run in compiled_first)} kernels compiled, and run without a tool, in {time.perf_counter() - begin:.0f} s",
          flush=True)
    runs = {tool: [pool.submit(in_process, sanitizer, tool, part) for part in parts] for tool in TOOLS}
    faults = {name: pool.submit(in_process, sanitizer, fault.tool, [name]) for name, fault in FAULTS.items()}
    print(f"{'tool':<12}{'kernels':>9}{'findings':>10}{'seconds':>9}")
    for tool, futures in runs.items():
      done = [future.result() for future in futures]
      found = [x for run in done for x in run.findings]
      print(f"{tool:<12}{sum(len(run.kernels) for run in done):>9}{len(found):>10}{max(run.seconds for run in done):>9.0f}", flush=True)
      failures += [f"{tool}: {x}" for x in (*found, *(run.failure for run in done if run.failure))]
    for name, future in faults.items():
      reported = future.result().findings
      print(f"planted: {name}: " + (f"{FAULTS[name].tool} reports {reported[0]}" if reported else "not reported"), flush=True)
      if not reported: failures.append(f"{FAULTS[name].tool} does not report the planted fault, {name}: {future.result().failure}")
  for text in dict.fromkeys(failures): print(text)
  # True if the tools report every planted fault and nothing else, and no process failed.
  return not failures

def main(words:list[str]) -> int:
  if words[:1] == ["--here"]:
    here(json.loads(words[1]))
    return 0
  sanitizer = compute_sanitizer()
  if (lacks := lacking(sanitizer)) is not None or sanitizer is None:
    print(f"{PROGRAM}: {lacks}", file=sys.stderr)
    return 2
  calls = [call for call in SMALL_CALLS if all(word in call.name for word in words)]
  return int(not sanitized(sanitizer, calls, os.cpu_count() or 1))

if __name__ == "__main__": sys.exit(main(sys.argv[1:]))
