"""Tests of decoding: one query or a few for each head, over keys of any length that several workgroups share."""
from __future__ import annotations
from dataclasses import replace
import pytest
import attn
from attn.measure.decode import DECODES, OF_LATENT, DecodeStep, call_of
from attn.tinygrad_compat import Context
from cases import array, hold, in_turn, normal, problem, tensor

@pytest.mark.sample(2)
@in_turn("where, Sk", (("gfx942", 1), ("gfx1201", 3), ("sm_90", 1), ("sm_80", 3)), (16384, 16385, 20000))
def test_long_keys(where:tuple[str, int], Sk:int) -> None:
  arch, Sq = where
  p = problem(H=4, Hkv=1, Sq=Sq, Sk=Sk, D=64, causal=True)
  x = normal(p)
  with Context(DEV=f"EMU::{arch}"):
    q, k, v = (tensor(a, p.dtype).realize() for a in (x.q, x.k, x.v))
    choice = attn.explain(q, k, v, causal=True)
    assert choice.kernel == "split_kv" and choice.work.splits > 1 and choice.work.tile is not None and choice.work.tile.pack_gqa
    o = array(attn.attention(q, k, v, causal=True).realize())
  hold(p, x, {}, o, None)

@pytest.mark.parametrize("row, kernel, text", (
  (DecodeStep(2, 16, 1, 128, 576, v_dim=512), "mla_mma", "(2, 16 on 1, 1 x 128, 576/512)"),
  (DecodeStep(2, 16, 1, 128, 576, 16, v_dim=512), "mla_mma", "(2, 16 on 1, 1 x 128, 576/512) pages of 16"),
  (DecodeStep(2, 4, 2, 256, 64, queries=70), "forward_wgmma", "(2, 4 on 2, 70 x 256, 64)"),
  (DecodeStep(1, 4, 2, 4096, 64), "split_kv", "(1, 4 on 2, 1 x 4096, 64)")))
def test_what_the_measurement_asks_for(row:DecodeStep, kernel:str, text:str) -> None:
  # Dispatch chooses the expected kernel for each problem that `python -m attn.measure.decode` times on a GPU.
  with Context(DEV="EMU::sm_90"): call = call_of(row)
  p, choice = call.problem, call.choice()
  assert str(row) == text and (p.v_in_k, p.Dv) == (row.v_dim > 0, row.v_dim or row.D) and (p.pages is not None) == (row.page > 0)
  assert choice.kernel == kernel and row.flops == p.flops
  assert [x for x in DECODES if "576" in str(x)] == [*OF_LATENT, *(replace(x, bits=8) for x in OF_LATENT)]
  assert row.bytes_read == sum(t.nbytes() for name, t in call.tensors.items() if name in ("k", "v"))
