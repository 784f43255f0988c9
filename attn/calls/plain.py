"""Attention in plain tensor operations of tinygrad, for all layouts and dtypes: `plain_attention` calls `three_pass`, which takes tensors (B, H, S,
D)."""
from __future__ import annotations
from typing import Any
from attn.kernels.three_pass import three_pass
from attn.problem import EXTRAS, MOD_TENSORS, Problem
from attn.score.masks import plain_masks
from attn.score.terms import TERM_TENSORS, check_differentiable, plain_terms, score_terms
from attn.tinygrad_compat import Tensor, UOp
from attn.values import FLOATS

BATCHED = ("bhsd", "bshd")               # layouts with lse (B, H, S)

def bhsd(x:Tensor, layout:str) -> Tensor:
  """Rearranges a tensor of the given `layout` to (B, H, S, D)."""
  if layout == "thd": return x.transpose(0, 1).unsqueeze(0)
  return x.transpose(1, 2) if layout == "bshd" else x.unsqueeze(0) if layout == "nsd" else x

def from_bhsd(x:Tensor, layout:str) -> Tensor:
  if layout == "thd": return x.squeeze(0).transpose(0, 1)
  return x.transpose(1, 2) if layout == "bshd" else x.squeeze(0) if layout == "nsd" else x

def from_bhs(lse:Tensor, layout:str) -> Tensor: return lse if layout in BATCHED else lse.squeeze(0)

def plain_attention(p:Problem, t:dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
  """Computes a problem by `three_pass` (attention in plain tensor operations). Returns (o, lse, what rounding removed from lse)."""
  # `t` has q, k, v and the optional tensors by name. lse_rest is the part of lse that rounding to fp32 lost. With sharded tensors, `p` is the problem
  # of one device, but the tensors in `t` are whole: dropout and the caller's own functions get indices of batch and head that count from 0 in the
  # whole tensors.
  given = {name: t[name] for name in EXTRAS if name in t and (name != "first_batch_and_head" or t[name].uop.axis is None)}
  others = {name: x for name, x in given.items() if name not in (*TERM_TENSORS, *MOD_TENSORS)}
  tensors = t | ({"v": t["k"][..., :p.Dv]} if p.v_in_k else {})
  o, *log_sums = three_pass(*(bhsd(tensors[name], p.layout) for name in ("q", "k", "v")), softmax_scale=p.softmax_scale, masks=plain_masks(p, given),
                      top_left=p.top_left, offset=p.offset, terms=plain_terms(p, given), longest=(p.Sq, p.Sk) if p.varlen else None,
                      dropout_p=p.dropout_p, **others)
  lse, rest = (from_bhs(x, p.layout) for x in log_sums)
  o = from_bhsd(o, p.layout).cast(FLOATS[p.out_dtype])
  if not all(term.differentiable for term in score_terms(p)): o, lse = refusing(p, o, lse, [tensors[name] for name in ("q", "k", "v")])
  return o, lse, rest

def refusing(p:Problem, o:Tensor, lse:Tensor, inputs:list[Tensor]) -> tuple[Tensor, Tensor]:
  """Returns copies of o and lse whose gradient raises NotImplementedError, naming the score term that has no derivative."""
  def refuse(*args:UOp, **kwargs:Any) -> Any: check_differentiable(p)
  outputs = [x.detach().contiguous().uop for x in (o, lse)]
  call = UOp.sink().call(*outputs, *(x.uop for x in inputs), grad_fxn=refuse)     # an empty call, which only carries the gradient
  return Tensor(outputs[0].after(call)), Tensor(outputs[1].after(call))
