"""Decode: one query (and a few) over long keys of any length, split over workgroups, the query heads of a key head packed into one tile."""
from __future__ import annotations
import attn
from attn.reference import exact, judge, same
from attn.tinygrad_compat import Context
from cases import array, in_turn, normal, problem, tensor

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
  want, _ = exact(x.q, x.k, x.v, p.softmax_scale, p.window, p.offset)
  text, _ = same(x.q, x.k, x.v, p.softmax_scale, p.window, p.offset, dtype=p.dtype, out_dtype=p.out_dtype)
  assert (verdict := judge(o, want, text)).ok, str(verdict)
