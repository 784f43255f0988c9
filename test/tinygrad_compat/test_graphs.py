"""Tests of GPU graphs that tinygrad makes under TinyJit: for which other kernels a kernel waits, and which tensors it gets."""
from __future__ import annotations
import inspect
import numpy as np
import pytest
import attn
from attn.tinygrad_compat import Context, Device, Ops, Tensor, TinyJit, UOp, with_selected_inputs
from tinygrad.engine.jit import MultiGraphRunner
from api_cases import draw, emulated
from cases import array, compute_all_gradients_at_once
from stand_in_graph import StandInGraph

@pytest.mark.parametrize("mended", (True, pytest.param(False, marks=pytest.mark.thorough)))
def test_a_graph_passes_the_tensors_that_a_program_has(monkeypatch:pytest.MonkeyPatch, mended:bool) -> None:
  # A graph passes only the tensors that a kernel still has as parameters. Here the kernel multiplies a tensor by 0 alone, and tinygrad removes the
  # parameter when it has unrolled a loop. tinygrad's own graphs pass the tensor all the same; the case `mended=False` shows this.
  if not mended: monkeypatch.setattr(MultiGraphRunner, "__init__", inspect.unwrap(MultiGraphRunner.__init__))
  with emulated("gfx942"), Context(NOOPT=0):
    monkeypatch.setattr(Device["EMU"], "graph", StandInGraph)
    @TinyJit
    def step(x:Tensor, unused:Tensor) -> Tensor:
      distance = Tensor.arange(5).float() - 4
      return (distance < 0).where(0.0, unused*distance + (x*2).contiguous()).sum(1).realize()
    def results() -> list[list[float]]:
      columns = [[Tensor(np.float32([[n], [n + 9]]), device="EMU").realize() for n in (of, of + 3)] for of in range(4)]
      return [step(*x).numpy().tolist() for x in columns]
    if mended: assert results() == [[2.0*n, 2.0*n + 18] for n in range(4)]
    else:
      with pytest.raises(RuntimeError, match="3 tensors for 2 parameters"): results()

@pytest.mark.parametrize("mended", (True, pytest.param(False, marks=pytest.mark.thorough)))
def test_a_graph_of_a_grid_that_depends_on_a_variable(mended:bool) -> None:
  # tinygrad makes a CUDA graph with all Variables set to 0. A grid whose size is a Variable then has no thread blocks, and CUDA refuses it; the case
  # `mended=False` shows this. attn gives such a grid one block while the graph is made.
  made = list[tuple[int, ...]]()
  class Made(StandInGraph):
    def __init__(self, linear:UOp, input_uops:tuple[UOp, ...]=()) -> None:
      super().__init__(linear, input_uops)
      made.extend(ast.arg.launch_dims({v: 0 for v in self.vars})[0] for _, ast, _, _ in self.calls if ast.op is Ops.PROGRAM)
    def __call__(self, input_uops:tuple[UOp, ...], var_vals:dict[str, int], wait:bool=False) -> float|None: return None
  n = UOp.variable("n", 1, 64)
  with emulated("gfx942"), Context(NOOPT=0), pytest.MonkeyPatch.context() as patch:
    patch.setattr(Device["EMU"], "graph", with_selected_inputs(Made, lambda *_: None) if mended else Made)
    whole = Tensor(np.arange(64*32, dtype=np.float32).reshape(64, 32), device="EMU").realize()
    step = TinyJit(lambda x, i: ((x[:i]*2).contiguous() + 1).contiguous().sum().realize())
    for rows in (3, 5, 64): step(whole, n.bind(rows))
  assert made and all(all(blocks) for blocks in made) == mended

@pytest.mark.sample(1)
@pytest.mark.parametrize("deterministic", (False, True))
def test_a_graph_finishes_dq_after_all_sums(monkeypatch:pytest.MonkeyPatch, deterministic:bool) -> None:
  # One kernel adds to fp32 sums of dQ, and another turns the sums into dq. tinygrad does not see these additions, so attn makes the second kernel
  # wait for the first in a graph. The stand-in for the graph runs a kernel as early as it may: without this wait dq would be 0. With
  # deterministic=True workgroups add in a fixed order, given by counters. Then the first kernel also waits for the kernel that sets the counters to
  # 0, and all replays give the same bits.
  compute_all_gradients_at_once(monkeypatch)
  with emulated("sm_90"):
    monkeypatch.setattr(Device["EMU"], "graph", StandInGraph)
    x = [draw(1, 2, rows, 128, seed=n) for n, rows in enumerate((80, 256, 256))]
    @TinyJit
    def gradients(q:Tensor, k:Tensor, v:Tensor) -> tuple[Tensor, ...]:
      found = attn.attention(q, k, v, deterministic=deterministic).float().square().sum().gradient(q, k, v)
      Tensor.realize(*found)
      return tuple(found)
    assert attn.explain(*x, deterministic=deterministic, backward=True).at_once
    first, *others = [[array(g) for g in gradients(*x)] for _ in range(4)]
    for other in others:
      for got, want in zip(other, first): np.testing.assert_allclose(got, want, rtol=0, atol=0 if deterministic else 1e-2*np.abs(want).max())
