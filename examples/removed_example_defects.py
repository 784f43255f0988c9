"""Three ways in which a flash attention kernel was wrong and passed its test, each in a small kernel of our own, and what finds them.

tinygrad carried an example kernel, extra/gemm/amd_flash_attention.py, whose test was: inputs uniform in [0, 1), mean squared error below 1e-2.
Versions of it (1) multiplied by V transposed inside each 64x64 tile, (2) did not scale P by exp(m_tile - m_new), and (3) let a fast wave store V over
the K that a slow wave still reads. Kernels with these defects pass that test; attn's checks stop each one.
It prints a table, for which it needs the extra attn[bench].
"""
import os
os.environ.setdefault("DEV", "EMU::gfx942")
import functools
from typing import Callable
import numpy as np
from tinygrad import Tensor, UOp, dtypes
from attn.emulator.checks import LdsRace
from attn.extras import needs
from attn.reference import Verdict, exact, judge, same
from attn.tinygrad_compat import AddrSpace, AxisType, KernelInfo
with needs("bench", "examples/removed_example_defects.py", __name__):
  from rich.console import Console
  from rich.table import Table

N, D = 128, 16   # keys and queries; head dimension, which is also the keys of a tile
SCALE = D**-0.5

def total(xs:list[UOp]) -> UOp: return functools.reduce(UOp.add, xs)

def attention(transposed:bool=False, unscaled:bool=False) -> Callable[..., UOp]:
  """The online softmax over tiles of D keys, one query a workgroup."""
  def kernel(o:UOp, q:UOp, k:UOp, v:UOp) -> UOp:
    row, tile = UOp.range(N, 0, AxisType.GLOBAL), UOp.range(N//D, 1, AxisType.LOOP)
    acc, m, l = (UOp.placeholder((n,), dtypes.float, slot, AddrSpace.REG) for slot, n in enumerate((D, 1, 1)))
    start = UOp.group(*[acc[d].store(0.0) for d in range(D)], m[0].store(-np.inf), l[0].store(0.0))
    acc_in, m_in, l_in = (x.after(start).after(tile) for x in (acc, m, l))

    s = [total([q[row, d].float()*k[tile*D + j, d].float() for d in range(D)])*SCALE for j in range(D)]
    m_tile = functools.reduce(UOp.maximum, s)
    m_new = m_in[0].maximum(m_tile)
    alpha, beta = (m_in[0] - m_new).exp(), (m_tile - m_new).exp()
    p = [(x - m_tile).exp() for x in s]

    def pv(d:int) -> UOp:   # defect 1: the tile of V with its axes swapped; defect 2: P relative to the tile's maximum, not to the running one
      products = [p[j]*(v[tile*D + d, j] if transposed else v[tile*D + j, d]).float() for j in range(D)]
      return total(products)*(1.0 if unscaled else beta)
    stores = [acc[d].store(acc_in[d]*alpha + pv(d)) for d in range(D)]
    done = UOp.group(*stores, l[0].store(l_in[0]*alpha + total(p)*beta), m[0].store(m_new)).end(tile)
    out = [o[row, d].store((acc.after(done)[d]/l.after(done)[0]).cast(o.dtype)) for d in range(D)]
    return UOp.group(*out).end(row).sink(arg=KernelInfo("small_attention", opts_to_apply=()))
  return kernel

def two_tiles(barrier:bool) -> Callable[..., UOp]:
  """K and then V through the same LDS, in a workgroup of two waves that read what the other stored: o[t] = k[t']*v[t'], t' a wave further."""
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

def verdicts(fxn:Callable[..., UOp]) -> tuple[float, Verdict]:
  """The mean squared error on uniform inputs, and the contract's verdict on normal ones."""
  rng = np.random.default_rng(0)
  q, k, v = (rng.random((1, N, D)).astype(np.float16) for _ in range(3))
  mean_square = float(((run(fxn, q[0], k[0], v[0]) - exact(q, k, v, SCALE)[0][0])**2).mean())
  q, k, v = (rng.standard_normal((1, N, D)).astype(np.float16) for _ in range(3))
  o = run(fxn, q[0], k[0], v[0])[None]
  return mean_square, judge(o, exact(q, k, v, SCALE)[0], same(q, k, v, SCALE, dtype="float16", out_dtype="float32")[0])

def main() -> None:
  table = Table("kernel", "its test: mean square < 1e-2", "the contract", "the emulator")
  kernels: dict[str, dict[str, bool]] = {"right": {}, "1: V transposed in its tile": {"transposed": True}, "2: P not scaled": {"unscaled": True}}
  for name, options in kernels.items():
    mean_square, verdict = verdicts(attention(**options))
    assert mean_square < 1e-2 and verdict.ok == (not options), name
    table.add_row(name, f"passes: {mean_square:.1e}", f"{'passes' if verdict.ok else 'fails'}: {verdict}", "nothing to say")
  k, v = (np.random.default_rng(i).standard_normal(N).astype(np.float32) for i in range(2))
  right = np.roll(k*v, -N//2)
  assert (run(two_tiles(barrier=True), k, v) == right).all()
  try: run(two_tiles(barrier=False), k, v)
  except LdsRace as e: found = str(e)
  else: raise AssertionError("the race was not seen")
  os.environ["ATTN_EMU_CHECKS"] = "0"   # the emulator's waves run in step: the result is right, as it often is on hardware
  assert (run(two_tiles(barrier=False), k, v) == right).all()
  table.add_row("3: no barrier between K and V", "passes when waves run in step", "passes when waves run in step", f"stops it: {found}")
  Console(width=150).print(table)

if __name__ == "__main__": main()
