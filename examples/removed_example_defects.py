"""Plants three defects in a small kernel, one at a time, and prints a table: which check of attn finds each defect.

tinygrad once had an example kernel, extra/gemm/amd_flash_attention.py. The test of this kernel was: inputs uniform in [0, 1), mean squared error
below 1e-2. Versions of the kernel (1) multiplied by V transposed inside each 64x64 tile, (2) did not scale P by exp(m_tile - m_new), and (3) let a
fast wave store V over the K that a slow wave still read. Kernels with these defects pass that test; attn's checks stop each one. Needs the extra
bench (pip install '.[bench]')."""
import os
os.environ.setdefault("DEV", "EMU::gfx942")
import inspect
from typing import Any, Callable
import numpy as np
from tinygrad import Tensor, UOp, dtypes
from attn.emulator.checks import LdsRace
from attn.extras import needs
from attn.kernels import textbook
from attn.accuracy import Verdict, judge, law_of
from attn.reference import exact
from attn.tinygrad_compat import AddrSpace, AxisType, KernelInfo
with needs("bench", "examples/removed_example_defects.py", __name__):
  from rich.console import Console
  from rich.table import Table

N, D = 128, 16   # keys and queries; the head dimension, which is also the keys of a tile, so that a tile of V can be transposed
SCALE = D**-0.5

# A defect: one line of the textbook kernel, and the same line in a wrong kernel.
DEFECTS = {
  "1: V transposed in its tile": (
    "values = [[v[b, kv_head, row, d].float() for row in rows] for d in range(p.Dv)]",
    "values = [[v[b, kv_head, tile*block_n + d, j].float() for j in range(block_n)] for d in range(p.Dv)]"),
  "2: P not scaled": (
    "total([w*x for w, x in zip(weights, values[d])])",
    "total([(score - functools.reduce(UOp.maximum, s)).exp()*x for score, x in zip(s, values[d])])"),
}

def planted(right:str, wrong:str) -> Callable[..., UOp]:
  """Returns the kernel of attn/kernels/textbook.py with a defect: `right`, one piece of the kernel's source text, is replaced by `wrong`."""
  source = inspect.getsource(textbook)
  assert source.count(right) == 1, f"{right!r} is not one line of the textbook kernel"
  module: dict[str, Any] = {"__name__": "planted"}
  exec(compile(source.replace(right, wrong), "textbook with a defect", "exec"), module)
  return module["textbook"](block_n=D)

KERNELS = {"right": textbook.textbook(block_n=D)} | {name: planted(*defect) for name, defect in DEFECTS.items()}

def two_tiles(barrier:bool) -> Callable[..., UOp]:
  """Makes a kernel for a workgroup of two waves, in which K and then V use the same LDS. Each wave reads what the other wave stored: o[t] =
  k[t']*v[t'], where t' is the thread of the other wave. Without `barrier`, V may be stored before the other wave has read K."""
  def kernel(o:UOp, k:UOp, v:UOp) -> UOp:
    t = UOp.range(N, 0, AxisType.LOCAL)
    lds, kept = UOp.placeholder((N,), dtypes.float, 0, AddrSpace.LOCAL), UOp.placeholder((1,), dtypes.float, 1, AddrSpace.REG)
    k_tile = lds.after(lds[t].store(k[t]))                          # tinygrad puts a barrier between the stores and the loads that depend on them
    read = kept[0].store(k_tile[(t + N//2) % N])
    after_k = lds.after(UOp.barrier(read) if barrier else read)     # defect 3: nothing waits for the other wave's reads of K
    v_tile = lds.after(after_k[t].store(v[t]))
    return o[t].store(kept.after(read)[0]*v_tile[(t + N//2) % N]).end(t).sink(arg=KernelInfo("two_tiles", opts_to_apply=()))
  return kernel

def run(fxn:Callable[..., UOp], *inputs:np.ndarray) -> np.ndarray:
  return Tensor.empty(*inputs[0].shape, dtype=dtypes.float).custom_kernel(*map(Tensor, inputs), fxn=fxn)[0].numpy()

def mean_square(fxn:Callable[..., UOp]) -> float:
  """Returns the mean squared error of a kernel's output against float64, for inputs uniform in [0, 1). The test of tinygrad's example kernel, which
  tinygrad has removed, measured this error."""
  q, k, v = np.random.default_rng(0).random((3, 1, 1, N, D)).astype(np.float16)
  return float(((run(fxn, q, k, v) - exact(q, k, v, SCALE)[0])**2).mean())

def verdict(fxn:Callable[..., UOp]) -> Verdict:
  """Runs a kernel on normally distributed inputs, and compares the output with float64. The result says whether the error of an element is above the
  element's limit (docs/contract.md)."""
  q, k, v = np.random.default_rng(0).standard_normal((3, 1, 1, N, D)).astype(np.float16)
  return judge(run(fxn, q, k, v), law_of(q, k, v, SCALE, dtype="float16", out_dtype="float32")[0])

def main() -> None:
  table = Table("kernel", "its test: mean square < 1e-2", "the law", "the emulator")
  for name, fxn in KERNELS.items():
    error, found = mean_square(fxn), verdict(fxn)
    assert error < 1e-2 and found.ok == (name == "right"), name
    table.add_row(name, f"passes: {error:.1e}", f"{'passes' if found.ok else 'fails'}: {found}", "nothing to say")
  k, v = (np.random.default_rng(i).standard_normal(N).astype(np.float32) for i in range(2))
  right = np.roll(k*v, -N//2)
  assert (run(two_tiles(barrier=True), k, v) == right).all()
  try: run(two_tiles(barrier=False), k, v)
  except LdsRace as e: race = f"LdsRace: {e}"
  else: raise AssertionError("the race was not seen")
  os.environ["ATTN_EMU_CHECKS"] = "0"   # the emulator's waves run in step: the result is right, as it often is on hardware
  assert (run(two_tiles(barrier=False), k, v) == right).all()
  table.add_row("3: no barrier between K and V", "passes when waves run in step", "passes when waves run in step", f"stops it: {race}")
  Console(width=150).print(table)

if __name__ == "__main__": main()
