"""Flash attention on one screen, in plain UOps: where to begin reading. The kernel is right on every device and fast on no device."""
from __future__ import annotations
import functools, math
from typing import Callable
from attn.problem import problem_of
from attn.tinygrad_compat import AddrSpace, AxisType, KernelInfo, UOp, dtypes

# The whole score matrix never exists: a thread owns one query, loops over the keys in tiles, and keeps only what the softmax of the keys so far needs
# (Milakov and Gimelshein 2018, arXiv 1805.02867; FlashAttention-2, arXiv 2307.08691, algorithm 1). The other forward kernels of this folder do these
# steps too, with matrix instructions and with tiles in LDS: see docs/algorithm.md.

def total(xs:list[UOp]) -> UOp: return functools.reduce(UOp.add, xs)

@functools.cache
def textbook(causal:bool|str=False, block_n:int=16) -> Callable[..., UOp]:
  """Returns the kernel for `Tensor.empty(B, H, Sq, Dv).custom_kernel(q, k, v, fxn=textbook())[0]`, with tiles of `block_n` keys."""
  # q (B, H, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv), float16, bfloat16 or float32; for `causal` see `attn.attention`
  def kernel(o:UOp, q:UOp, k:UOp, v:UOp) -> UOp:
    shapes = [[int(n) for n in x.shape] for x in (o, q, k, v)]
    p = problem_of(*shapes, dtypes=["float32"]*4, causal=causal)   # the tensors' elements are converted to float32

    # 1. A thread computes one query of a head, and loops over tiles of keys.
    b, h, i = (UOp.range(n, axis, AxisType.GLOBAL) for axis, n in enumerate((p.B, p.H, p.Sq)))
    tile, kv_head = UOp.range(-(-p.Sk//block_n), 3, AxisType.LOOP), h//(p.H//p.Hkv)

    # 2. From tile to tile the thread keeps three things in registers: the largest score m so far, the sum l of exp(score - m), and acc, the sum of
    #    exp(score - m)*V.
    acc, m, l = (UOp.placeholder((n,), dtypes.float, slot, AddrSpace.REG) for slot, n in enumerate((p.Dv, 1, 1)))
    start = UOp.group(*[acc[d].store(0.0) for d in range(p.Dv)], m[0].store(-math.inf), l[0].store(0.0))
    acc_old, m_old, l_old = (x.after(start, tile) for x in (acc, m, l))

    # 3. S = Q K^T. A score is -inf if its key does not exist, or if a mask hides it.
    keys = [tile*block_n + j for j in range(block_n)]
    rows = [key.minimum(p.Sk - 1) for key in keys]   # a key beyond the last key reads the last key
    seen = [key < (p.Sk if not causal else (i + p.offset + 1).minimum(p.Sk)) for key in keys]
    s = [total([q[b, h, i, d].float()*k[b, kv_head, row, d].float() for d in range(p.D)])*p.softmax_scale for row in rows]
    s = [there.where(x, -math.inf) for there, x in zip(seen, s)]

    # 4. The new maximum is -inf if the query has seen no key so far. In that case 0 is subtracted instead, because -inf - -inf is NaN.
    m_new = functools.reduce(UOp.maximum, s, m_old[0])
    reference = m_new.eq(-math.inf).where(0.0, m_new)

    # 5. P = exp(S - m) of this tile, and the factor that rescales l and acc from the old maximum to the new maximum.
    weights = [(x - reference).exp() for x in s]
    rescale = (m_old[0] - reference).exp()

    # 6. Rescale l and acc, and add P and P V of this tile.
    values = [[v[b, kv_head, row, d].float() for row in rows] for d in range(p.Dv)]
    sums = [acc[d].store(acc_old[d]*rescale + total([w*x for w, x in zip(weights, values[d])])) for d in range(p.Dv)]
    done = UOp.group(*sums, l[0].store(l_old[0]*rescale + total(weights)), m[0].store(m_new)).end(tile)

    # 7. O = acc / l, or 0 for a query that sees no key.
    inverse = l.after(done)[0].eq(0.0).where(0.0, l.after(done)[0].reciprocal())
    out = [o[b, h, i, d].store((acc.after(done)[d]*inverse).cast(o.dtype)) for d in range(p.Dv)]
    return UOp.group(*out).end(b, h, i).sink(arg=KernelInfo("attn_textbook", opts_to_apply=()))
  return kernel
