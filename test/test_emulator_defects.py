"""The two wrong results of tinygrad's removed extra/gemm/amd_flash_attention.py, each in a small attention kernel of our own, and why its test let
them pass. The third defect, a race, is test_lds_race_v_stored_over_k in test_emulator_checks.py."""
import numpy as np
import pytest
from tinygrad import Context, Tensor, dtypes
from tinygrad.dtype import AddrSpace
from tinygrad.uop.ops import AxisType, KernelInfo, UOp
from attn.emulator.device import register

register()
D, QUERIES, KEYS = 8, 64, 64   # a tile is D keys, so that it may be transposed
LOG2E, SCALE = 1.4426950408889634, D**-0.5

def attention(v_transposed=False, p_unscaled=False):
  """Online softmax over tiles of D keys; a thread is a query."""
  def kernel(o, q, k, v):
    t, r = UOp.range(QUERIES, 0, AxisType.WARP), UOp.range(KEYS//D, 1, AxisType.LOOP)
    state = UOp.placeholder((2 + D,), dtypes.float, 0, AddrSpace.REG)   # m, l, acc
    state = state.after(UOp.group(*[state[i].store(float("-inf") if i == 0 else 0.0) for i in range(2 + D)]))
    s = state.after(r)
    m, l, acc = s[0].load(), s[1].load(), [s[2 + d].load() for d in range(D)]
    scores = []
    for j in range(D):
      products = [q[t*D + d].load()*k[(r*D + j)*D + d].load() for d in range(D)]
      scores.append(sum(products[1:], products[0])*SCALE)
    m_tile = scores[0]
    for x in scores[1:]: m_tile = m_tile.maximum(x)
    m_new = m.maximum(m_tile)
    p = [((x - m_tile)*LOG2E).exp2() for x in scores]
    to_new = ((m_tile - m_new)*LOG2E).exp2()
    weights = p if p_unscaled else [x*to_new for x in p]
    old = ((m - m_new)*LOG2E).exp2()
    stores = [s[0].store(m_new), s[1].store(l*old + sum(p[1:], p[0])*to_new)]
    for d in range(D):
      value = [v[(r*D + (d if v_transposed else j))*D + (j if v_transposed else d)].load() for j in range(D)]
      stores.append(s[2 + d].store(acc[d]*old + sum((w*x for w, x in zip(weights[1:], value[1:])), weights[0]*value[0])))
    done = state.after(UOp.group(*stores).end(r))
    out = UOp.group(*[o[t*D + d].store(done[2 + d].load()/done[1].load()) for d in range(D)])
    return out.end(t).sink(arg=KernelInfo("small_attention", opts_to_apply=()))
  return kernel

def error(inputs, **defect):
  """Output minus float64 attention."""
  with Context(DEV="EMU::gfx942"):
    tensors = [Tensor(x.ravel()).realize() for x in inputs]
    got = Tensor.empty(QUERIES*D).custom_kernel(*tensors, fxn=attention(**defect))[0].numpy().reshape(QUERIES, D)
  q, k, v = [x.astype(np.float64) for x in inputs]
  s = q @ k.T*SCALE
  p = np.exp(s - s.max(1, keepdims=True))
  return got - p @ v/p.sum(1, keepdims=True)

def normal(): return [np.random.default_rng(0).standard_normal((3, 64, D)).astype(np.float32)[i] for i in range(3)]
def uniform(): return [np.random.default_rng(0).random((3, 64, D)).astype(np.float32)[i] for i in range(3)]

def test_without_defects():
  assert np.abs(error(normal())).max() < 1e-5

@pytest.mark.parametrize("defect", ["v_transposed", "p_unscaled"])
def test_defect_shows_on_normal_inputs_and_hides_on_uniform_ones(defect):
  assert np.abs(error(normal(), **{defect: True})).max() > 0.5
  assert np.square(error(uniform(), **{defect: True})).mean() < 1e-2   # uniform inputs in [0, 1) and a threshold on the mean square: passes
