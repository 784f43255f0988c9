"""Times later calls on the host: `python -m attn.measure.later_calls [WORD ...]` prints a line for each call whose name contains every WORD. No
kernel of attention is launched; with DEV=EMU::gfx942 the command runs without a GPU.

Each time is the median of the host's milliseconds from the second call on, outside TinyJit. `call` ends when the call returns its result, which is
not computed yet. `scheduled` ends when tinygrad has also made the list of launches."""
from __future__ import annotations
import statistics, sys, time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
import numpy as np
from attn.api.attention import attention
from attn.calls.placement import AXES, empty
from attn.measure.machine import ANY, need
from attn.tinygrad_compat import Context, Device, Tensor, UOp, device_of, dtypes, realize_counters

# The times with gradients include the gradients of q, k and v. The line also has the times of tinygrad's own attention, if it has the options of the
# call.

CALLS = 21       # calls of each median

@dataclass(frozen=True)
class LaterCall:
  """Call of attention in float16 whose time on the host is measured."""
  name: str
  q: tuple[int, ...] = (2, 8, 512, 64)  # shape of q
  kv: tuple[int, ...] = (2, 8, 512, 64)  # shape of k and v
  options: dict[str, Any] = field(default_factory=dict)  # plain values of options, by name
  # Functions that make the values of options, by name: those of `tensors` run once for all calls, those of `made_each_call` in each call.
  tensors: dict[str, Callable[[], Any]] = field(default_factory=dict)
  made_each_call: dict[str, Callable[[], Any]] = field(default_factory=dict)
  differentiable: bool = True  # the call is also timed with gradients
  order: str|None = None  # how rows are divided among two devices; None: one device
  in_tinygrad: bool = False     # tinygrad's own attention has these options

def float_tensor(*shape:int) -> Tensor: return Tensor.empty(*shape, dtype=dtypes.float).realize()
def int_tensor(values:Any) -> Tensor: return Tensor(np.array(values, np.int32)).realize()

PACKED: dict[str, Any] = {"layout": "thd", "max_seqlen_q": 412, "max_seqlen_k": 412}

LATER_CALLS = (
  LaterCall("full", in_tinygrad=True),
  LaterCall("causal", options={"causal": "top-left"}, in_tinygrad=True),
  LaterCall("window, softcap, sinks", options={"window": (100, 0), "softcap": 20.0}, tensors={"sinks": lambda: float_tensor(8)}),
  LaterCall("bias", tensors={"bias": lambda: float_tensor(1, 8, 512, 512)}),
  LaterCall("dropout", options={"dropout_p": 0.1}),
  LaterCall("packed", (512, 8, 64), (512, 8, 64), PACKED,
            {name: lambda: int_tensor([0, 100, 512]) for name in ("cu_seqlens_q", "cu_seqlens_k")}),
  LaterCall("score_mod and mask_mod", tensors={"mod_tensors": lambda: (float_tensor(8),)},
            made_each_call={"score_mod": lambda: lambda s, b, h, i, j, t: s*t[h], "mask_mod": lambda: lambda b, h, i, j, t: i >= j}),
  LaterCall("mask_mod with a list of tiles", made_each_call={"mask_mod": lambda: lambda b, h, i, j: (i//32 - j//32) % 3 < 1}),
  LaterCall("decode", (2, 8, 1, 64), (2, 2, 4096, 64), tensors={"kv_lengths": lambda: int_tensor([100, 4000])}),
  LaterCall("decode, Variable", (1, 8, 1, 64), (1, 2, 4096, 64), made_each_call={"kv_lengths": lambda: UOp.variable("keys", 1, 4096).bind(300)},
            differentiable=False),
  LaterCall("decode, pages", (2, 8, 1, 64), (64, 16, 2, 64), differentiable=False,
            tensors={"kv_lengths": lambda: int_tensor([100, 400]), "block_table": lambda: int_tensor(np.arange(64).reshape(2, 32))}),
  LaterCall("rows on two devices", order="contiguous", options={"causal": "top-left"}),
  LaterCall("rows on two devices, zigzag", order="zigzag", options={"causal": "top-left", "sequence_order": "zigzag"}))

def two_devices() -> tuple[str, str]: return f"{Device.DEFAULT}:0", f"{Device.DEFAULT}:1"

def not_here(row:LaterCall) -> str|None:
  """Returns why the call cannot be timed on this machine, or None if it can."""
  if row.order is None: return None
  try: device_of(two_devices()[1])
  except Exception as e: return f"{two_devices()[1]} does not open: {e}"      # each backend raises another exception
  return None

def empty_input(row:LaterCall, shape:tuple[int, ...]) -> Tensor:
  if row.order is None: return Tensor.empty(*shape, dtype=dtypes.half).realize()
  batch, heads, rows, width = shape
  return empty((batch, heads, rows//2, width), dtypes.half, two_devices(), AXES["bhsd"].index("rows"))

def milliseconds(call:Callable[[], Any], calls:int=CALLS) -> float:
  """Returns the host's milliseconds for a call: the median of `calls` calls after a first one."""
  seconds = list[float]()
  for _ in range(calls + 1):
    begin = time.perf_counter()
    call()
    seconds.append(time.perf_counter() - begin)
    realize_counters()
  return 1e3*statistics.median(seconds[1:])

def times(attend:Callable[..., Tensor], row:LaterCall, calls:int=CALLS) -> dict[str, float]:
  """Times the calls of `row`, made by the function `attend`; returns {column of the table: milliseconds}."""
  q, k, v = (empty_input(row, shape) for shape in (row.q, row.kv, row.kv))
  kept = row.options | {name: make() for name, make in row.tensors.items()}
  def forward() -> Tensor: return attend(q, k, v, **kept, **{name: make() for name, make in row.made_each_call.items()})
  def gradients() -> list[Tensor]:
    with Context(TRAINING=1): o = forward()
    return o.gradient(q, k, v, gradient=q)
  found = {"call": milliseconds(forward, calls), "scheduled": milliseconds(lambda: forward().linear_with_vars(), calls)}
  if not row.differentiable: return found
  return found | {"call with gradients": milliseconds(gradients, calls),
                  "scheduled with gradients": milliseconds(lambda: Tensor.linear_with_vars(*gradients()), calls)}

def tinygrad_attention(q:Tensor, k:Tensor, v:Tensor, causal:Any=False) -> Tensor: return q.scaled_dot_product_attention(k, v, is_causal=bool(causal))

def later_call(row:LaterCall, calls:int=CALLS) -> dict[str, float]:
  """Times the later calls of `row` on the host, also by tinygrad's own attention if it has the options."""
  found = times(attention, row, calls)
  if row.in_tinygrad: found |= {f"tinygrad's {name}": x for name, x in times(tinygrad_attention, row, calls).items()}
  return found

def main(words:list[str]) -> None:
  need("python -m attn.measure.later_calls", kind=ANY)
  for row in LATER_CALLS:
    if all(word in row.name for word in words):
      if (reason := not_here(row)) is not None: print(f"{row.name}: not timed, {reason}", flush=True)
      else: print(f"{row.name}: " + ", ".join(f"{name} {x:.2f} ms" for name, x in later_call(row).items()), flush=True)

if __name__ == "__main__": main(sys.argv[1:])
