"""Compares score_mod and mask_mod with PyTorch's compiled flex_attention on the same NVIDIA GPU, in one process and on the same inputs, forward and
backward. If attn has a built-in option that computes the same result, the option is timed as well.

`DEV=CUDA [CSV=functions.csv] python -m attn.measure.functions [NAME ...]` prints all rows, or the rows with these names, and writes them to a CSV."""
from __future__ import annotations
import functools, os, sys, time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
import numpy as np
from attn.api.attention import attention
from attn.measure.backward import graph_timer, torch_seconds
from attn.measure.machine import need
from attn.measure.peers import OURS, as_tensor, on_the_host, random_inputs
from attn.measure.rounds import in_turn
from attn.measure.rows import line_of_row, write_rows
from attn.problem import Problem
from attn.tinygrad_compat import Context, Tensor, UOp, dtypes, foreign_cuda_context

# Times are device times, measured by events. Each time is a median over rounds. In a round attn and PyTorch are timed once, one after the other.
# Backward computes dq, dk and dv from the outputs of forward. PyTorch's block mask is made before these measurements; its time is in a separate
# column. If the mask reads a tensor, attn makes its lists of visible tiles in each call, and attn's times include this.

HEADS, ROWS_OF_ALL, HEAD_DIMENSION = 32, 16384, 128
NEAR, PREFIX, DOCUMENT, COLUMNS, RADIUS = 1024, 4096, 1024, 128, 6
FLEX, BUILT_IN = "flex_attention", "built in"

def as_number(x:UOp) -> UOp: return x.cast(dtypes.float)

Tensors = dict[str, Any]     # PyTorch's tensors that functions read, by name

@dataclass(frozen=True)
class FunctionRow:
  """A problem to time, with the same score_mod and mask_mod for attn and for PyTorch."""
  name: str
  mask_mod: Callable[..., UOp]
  torch_mask: Callable[[Tensors], Callable[..., Any]]
  score_mod: Callable[..., UOp]|None = None
  torch_score: Callable[[Tensors], Callable[..., Any]]|None = None
  tensors: tuple[str, ...] = ()  # names of the tensors that the functions read
  built_in: dict[str, Any] = field(default_factory=dict)  # options of attn that compute the same without functions
  packed: bool = False  # these options are for packed sequences, in the layout thd

def not_after(b:Any, h:Any, i:Any, j:Any, *tensors:Any) -> Any: return i >= j
def of_causal(t:Tensors) -> Callable[..., Any]: return not_after
def near(b:Any, h:Any, i:Any, j:Any) -> Any: return (i >= j) & (i - j < NEAR)
def prefix_or_before(b:Any, h:Any, i:Any, j:Any) -> Any: return (i >= j) | (j < PREFIX)
def dilated(b:Any, h:Any, i:Any, j:Any) -> Any: return (i >= j) & ((i - j) % 4 == 0)
def first_or_near(b:Any, h:Any, i:Any, j:Any) -> Any: return (i >= j) & ((i - j < NEAR) | (j < 4))
def neighbours(b:Any, h:Any, i:Any, j:Any) -> Any:
  return ((i//COLUMNS - j//COLUMNS).abs() <= RADIUS) & ((i % COLUMNS - j % COLUMNS).abs() <= RADIUS)

def torch_documents(t:Tensors) -> Callable[..., Any]: return lambda b, h, i, j: t["documents"][i] == t["documents"][j]
def torch_table(t:Tensors) -> Callable[..., Any]: return lambda s, b, h, i, j: s + t["table"][h, i - j + ROWS_OF_ALL]
def torch_alibi(t:Tensors) -> Callable[..., Any]: return lambda s, b, h, i, j: s - t["slopes"][h]*(i - j)
def torch_softcap(t:Tensors) -> Callable[..., Any]:
  import torch
  return lambda s, b, h, i, j: 30*torch.tanh(s/30)

FUNCTION_ROWS = (
  FunctionRow("causal", not_after, of_causal, built_in={"causal": True}),
  FunctionRow("window", near, lambda t: near, built_in={"window": (NEAR - 1, 0)}),
  FunctionRow("prefix", prefix_or_before, lambda t: prefix_or_before),
  FunctionRow("documents", lambda b, h, i, j, n: n[i] == n[j], torch_documents, tensors=("documents",),
              built_in={"cu_seqlens_q": "starts", "cu_seqlens_k": "starts", "max_seqlen_q": DOCUMENT, "max_seqlen_k": DOCUMENT}, packed=True),
  FunctionRow("dilated", dilated, lambda t: dilated),
  FunctionRow("neighbours", neighbours, lambda t: neighbours),
  FunctionRow("sinks and window", first_or_near, lambda t: first_or_near),
  FunctionRow("table", not_after, of_causal, lambda s, b, h, i, j, t: s + t[h, i - j + ROWS_OF_ALL], torch_table, ("table",)),
  FunctionRow("ALiBi", not_after, of_causal, lambda s, b, h, i, j, t: s - t[h]*as_number(i - j), torch_alibi, ("slopes",),
              {"causal": True, "alibi_slopes": "slopes"}),
  FunctionRow("softcap", not_after, of_causal, lambda s, b, h, i, j: (s/30).tanh()*30, torch_softcap, built_in={"causal": True, "softcap": 30.0}))

def arrays_of_functions() -> dict[str, np.ndarray]:
  """Returns {name: array} for the tensors that score_mods and mask_mods read, and for "starts", the first row of each packed document."""
  places, heads = np.arange(ROWS_OF_ALL, dtype=np.int32), np.arange(HEADS, dtype=np.float32)
  return {"table": np.random.default_rng(1).standard_normal((HEADS, 2*ROWS_OF_ALL), np.float32), "documents": places//DOCUMENT,
          "starts": np.arange(0, ROWS_OF_ALL + 1, DOCUMENT, dtype=np.int32), "slopes": 2.0**(-8*(heads + 1)/HEADS)}

def tensors_of_functions() -> Tensors:
  import torch
  return {name: torch.from_numpy(x).cuda() for name, x in arrays_of_functions().items()}

def seconds_of(run:Callable[[], Any], wait:Callable[[], Any]) -> float:
  """Returns the seconds that one call of `run` takes until everything that it starts on the device is done; `wait` waits for the device."""
  # `wait` waits for the device in the CUDA context of `run`.
  begin = time.perf_counter()
  run()
  wait()
  return time.perf_counter() - begin

def our_timers(inputs:list[Tensor], **options:Any) -> tuple[dict[str, Callable[[], float]], Tensor]:
  """Returns (timers of attn's "forward" and "backward", the output)."""
  q, k, v, do = inputs
  with Context(TRAINING=1):
    o = attention(q, k, v, **options).realize()
    return {"forward": graph_timer(attention(q, k, v, **options)), "backward": graph_timer(*o.gradient(q, k, v, gradient=do))}, o

def in_thd(x:Tensor) -> Tensor:
  """Converts a tensor (1, H, S, D) to the layout thd, (S, H, D)."""
  return x[0].permute(1, 0, 2).contiguous().realize()

def flex_forward(inputs:list[Any], mask:Callable[..., Any], score:Callable[..., Any]|None=None) -> Callable[[], Any]:
  """Returns a function that computes attention of `inputs` (q, k, v) by PyTorch's compiled flex_attention."""
  import torch
  from torch.nn.attention.flex_attention import create_block_mask, flex_attention
  # The block mask is made here, before the returned function is called.
  flex, blocks = torch.compile(flex_attention), create_block_mask(mask, None, None, *[x.shape[2] for x in inputs[:2]], device="cuda")
  return lambda: flex(*inputs, score_mod=score, block_mask=blocks)

@functools.cache
def inputs_of_both(dtype:str) -> tuple[list[Any], list[np.ndarray]]:
  """Returns q, k, v and dO of every row, as PyTorch's tensors and as arrays on the host."""
  sizes = (1, HEADS, HEADS, ROWS_OF_ALL, ROWS_OF_ALL, HEAD_DIMENSION, HEAD_DIMENSION)
  found = random_inputs(Problem(*sizes, dtype=dtype, out_dtype=dtype, softmax_scale=HEAD_DIMENSION**-0.5), 0, *[(HEADS, ROWS_OF_ALL)]*4)
  return list(found), [on_the_host(x) for x in found]

def compare_functions(row:FunctionRow) -> dict[str, Any]:
  """Times attention with the functions of `row`, by attn and by PyTorch's flex_attention, and returns a row of the printed table."""
  import torch
  from torch.nn.attention.flex_attention import create_block_mask
  torch.cuda.init()
  torch._dynamo.reset()
  dtype, t = "bfloat16", tensors_of_functions()
  (q, k, v, do), arrays = inputs_of_both(dtype)
  mask, score = row.torch_mask(t), None if row.torch_score is None else row.torch_score(t)
  create_block_mask(mask, None, None, ROWS_OF_ALL, ROWS_OF_ALL, device="cuda")
  of_mask = seconds_of(lambda: create_block_mask(mask, None, None, ROWS_OF_ALL, ROWS_OF_ALL, device="cuda"), torch.cuda.synchronize)
  inputs = [x.requires_grad_(True) for x in (q, k, v)]
  forward = flex_forward(inputs, mask, score)
  o = forward()
  def backward() -> Any: return torch.autograd.grad(o, inputs, do, retain_graph=True)
  theirs_timers = {"forward": torch_seconds(forward), "backward": torch_seconds(backward)}
  expected, given = o.detach().float().cpu().numpy(), arrays_of_functions()
  with foreign_cuda_context() as theirs:
    ours_inputs, tensors = [as_tensor(x, dtype) for x in arrays], {x: Tensor(a).realize() for x, a in given.items()}
    options = {"score_mod": row.score_mod, "mask_mod": row.mask_mod, "mod_tensors": tuple(tensors[x] for x in row.tensors)}
    ours, out = our_timers(ours_inputs, **options)
    timers = {f"{OURS} {way}": timer for way, timer in ours.items()} | {f"{FLEX} {way}": theirs(timer) for way, timer in theirs_timers.items()}
    if row.built_in:
      same = {name: tensors[x] if isinstance(x, str) else x for name, x in row.built_in.items()}
      if row.packed: same["layout"], ours_inputs = "thd", [in_thd(x) for x in ours_inputs]
      timers |= {f"{BUILT_IN} {way}": timer for way, timer in our_timers(ours_inputs, **same)[0].items()}
    times = in_turn(timers)
    apart = float(np.abs(out.float().numpy() - expected).max())
  found: dict[str, Any] = {"row": row.name} | {f"ms {name}": 1e3*seconds for name, seconds in times.items()}
  found |= {f"x {way}": times[f"{FLEX} {way}"]/times[f"{OURS} {way}"] for way in ours}
  return found | {"ms block mask": 1e3*of_mask, "apart": apart}

def main(names:list[str], path:str) -> None:
  rows: list[dict[str, Any]] = []
  for row in FUNCTION_ROWS:
    if names and row.name not in names: continue
    rows.append({name: f"{x:.4g}" if isinstance(x, float) else x for name, x in compare_functions(row).items()})
    print(line_of_row(rows[-1]), flush=True)
    if path: write_rows(rows, path)

if __name__ == "__main__":
  need("python -m attn.measure.functions", "torch", device="CUDA")
  main(sys.argv[1:], os.environ.get("CSV", ""))
