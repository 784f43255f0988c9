"""The fallback for problems that no other kernel supports: attention in three passes over a score matrix in memory, S = Q K^T, P = softmax(S), O = P
V, all in fp32."""
from __future__ import annotations
from collections.abc import Callable
from attn.kernels.parts.weights.scores import NEG_INF
from attn.ops.dropout import kept_elements
from attn.score.places import Positions
from attn.tinygrad_compat import Tensor

# The fallback consists of tensor operations, for which tinygrad makes its own kernels. The fallback works for any dtype, head dimension, length and
# device, for every option, and for sharded tensors. The scores take B*H*Sq*Sk*4 bytes of memory. The other kernels never store the scores to memory.

def _lengths(B:int, head:Tensor, Sq:int, Sk:int, top_left:bool, offset:int, kv_lengths:Tensor|None, kv_starts:Tensor|None) -> Positions:
  """Returns the positions of queries and keys, and which keys exist, if each batch is one sequence."""
  # `head` has the indices of the query heads. The keys of batch b are rows kv_starts[b] to kv_lengths[b] - 1 of k, or all rows if no lengths are
  # given. `top_left` and `offset` say at which position query i stands: see `three_pass`.
  i, j = Tensor.arange(Sq).reshape(Sq, 1), Tensor.arange(Sk).reshape(1, Sk)
  counted = Tensor.arange(B).reshape(-1, 1, 1, 1, 1), i, j
  if kv_lengths is None: return Positions(None, i + offset, j, counted, head)
  n = kv_lengths.reshape(-1, 1, 1, 1, 1).maximum(0).minimum(Sk)
  if kv_starts is None: return Positions(j < n, i if top_left else i + n - Sq, j, counted, head)
  first = kv_starts.reshape(-1, 1, 1, 1, 1).maximum(0).minimum(Sk)
  return Positions((j >= first) & (j < n), i + first if top_left else i + n.maximum(first) - Sq, j, (*counted[:2], j - first),
                   head)

def _sequences(head:Tensor, Sq:int, Sk:int, top_left:bool, cu_q:Tensor, cu_k:Tensor, longest:tuple[int, int]) -> Positions:
  """Returns the positions of queries and keys, and the sequence to which each belongs, if a single batch holds packed sequences."""
  # A query sees only keys of its own sequence. `head` has the indices of the query heads. `longest` is (most queries, most keys) of one sequence. If
  # a sequence is longer, its further tokens belong to no sequence, as do tokens outside of all sequences.
  def rows_of_each(cu:Tensor, most:int) -> Tensor: return (cu[1:] - cu[:-1]).maximum(0).minimum(most)
  rows_q, rows_k = rows_of_each(cu_q, longest[0]), rows_of_each(cu_k, longest[1])
  def inside(cu:Tensor, rows:Tensor, n:int) -> Tensor:
    t = Tensor.arange(n).reshape(1, n)
    return (t >= cu[:-1].reshape(-1, 1)) & (t < (cu[:-1] + rows).reshape(-1, 1))     # (sequences, tokens)
  def each(of:Tensor, values:Tensor) -> Tensor: return of.where(values.reshape(-1, 1), 0).sum(0)
  in_q, in_k = inside(cu_q, rows_q, Sq), inside(cu_k, rows_k, Sk)
  number_q, number_k = (each(of, Tensor.arange(1, of.shape[0] + 1)) for of in (in_q, in_k))
  shift = each(in_q, rows_k - rows_q) if not top_left else 0
  i = Tensor.arange(Sq) - each(in_q, cu_q[:-1])
  j = Tensor.arange(Sk) - each(in_k, cu_k[:-1])
  counted = (number_q - 1).maximum(0).reshape(Sq, 1), i.reshape(Sq, 1), j.reshape(1, Sk)
  belongs = (number_q.reshape(Sq, 1) == number_k.reshape(1, Sk)) & (number_q.reshape(Sq, 1) > 0)
  return Positions(belongs, (i + shift).reshape(Sq, 1), j.reshape(1, Sk), counted, head, in_q)

def for_each_query(rows:Tensor, sees:Tensor|None) -> Tensor:
  """Returns the rows of k or v, repeated for each query, with 0 in place of rows that the query does not see (`sees`)."""
  # `rows` is (B, Hkv, Sk, width); the result broadcasts to (B, Hkv, query heads per key/value head, Sq, Sk, width). `sees` says which query sees
  # which key; None: all see all. Without the zeros, inf or NaN in a hidden row times the weight 0 would be NaN, also in the gradients.
  rows = rows.float().unsqueeze(2).unsqueeze(3)
  return rows if sees is None else sees.unsqueeze(-1).where(rows, 0.0)

def _dropped(p:Tensor, at:Positions, dropout_p:float, seed:Tensor) -> Tensor:
  # p: (B, Hkv, query heads of each key/value head, Sq, Sk)
  batch, i, j = at.counted
  mask = kept_elements(seed, dropout_p, batch, at.head, i, j).contiguous()     # stored in memory, like the mask of tinygrad's own dropout
  return mask.where(p*(1/(1 - dropout_p)), 0.0)

def unchanged(s:Tensor, at:Positions) -> Tensor: return s

def three_pass(q:Tensor, k:Tensor, v:Tensor, *, softmax_scale:float, masks:Callable[[Positions], Tensor|None], top_left:bool=False, offset:int=0,
               terms:Callable[[Tensor, Positions], Tensor]=unchanged, sinks:Tensor|None=None, kv_lengths:Tensor|None=None, kv_starts:Tensor|None=None,
               cu_seqlens_q:Tensor|None=None, cu_seqlens_k:Tensor|None=None, longest:tuple[int, int]|None=None,
               dropout_p:float=0.0, dropout_seed:Tensor|None=None, first_batch_and_head:Tensor|None=None) -> tuple[Tensor, Tensor, Tensor]:
  """Computes attention in tensor operations, and returns (o, lse, lse_rest: what rounding lost of lse), all float32."""
  # o (B, H, Sq, Dv), lse (B, H, Sq) in natural logarithm, and lse_rest, the part of lse that rounding to float32 removed. A query that sees no key
  # gives o = 0 and lse = -inf.
  #
  # q is (B, H, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv). Query i stands at position i + `offset`. If lengths are given, `offset` is not used:
  # with `top_left` query i stands at position i, otherwise the last query stands at the position of the last key. A score is scaled first. Then the
  # `terms` change the score, and the score becomes -inf where the `masks` hide the key (attn/score defines terms and masks). `sinks` (H) are the
  # scores of an additional key without a value; lse includes them. `longest` is (most queries, most keys) of a packed sequence. Dropout is applied to
  # P after the sum of P is computed: see attn.problem.Problem. `first_batch_and_head` (2) is given if the tensors are a part of larger ones: dropout,
  # score_mod and mask_mod then count batches and heads from these two numbers on.
  B, H, Sq, _ = map(int, q.shape)
  Hkv, Sk, Dv = int(k.shape[1]), int(k.shape[2]), int(v.shape[3])
  grouped = (B, Hkv, H//Hkv)                               # query heads that share keys lie side by side
  def per_head(x:Tensor) -> Tensor:
    # from (H) or (B, H) to a shape that broadcasts to the scores
    return x.float().reshape(-1, Hkv, H//Hkv, 1, 1)
  head = Tensor.arange(H).reshape(Hkv, H//Hkv, 1, 1)
  if cu_seqlens_q is None or cu_seqlens_k is None: at = _lengths(B, head, Sq, Sk, top_left, offset, kv_lengths, kv_starts)
  else: at = _sequences(head, Sq, Sk, top_left, cu_seqlens_q, cu_seqlens_k, longest or (Sq, Sk))
  if first_batch_and_head is not None: at = at.counted_from(first_batch_and_head)

  sees = masks(at)

  # ***** S *****
  s = terms((q.float().reshape(*grouped, Sq, 1, -1)*for_each_query(k, sees)).sum(-1)*softmax_scale, at)
  if sees is not None: s = sees.where(s, NEG_INF)

  # ***** P *****
  m = s.max(-1, keepdim=True)
  if sinks is not None: m = m.maximum(per_head(sinks))
  m = (m == NEG_INF).where(0.0, m).detach()     # the result does not depend on m: no gradient goes through m
  p = (s - m).exp()
  total = p.sum(-1, keepdim=True)
  if sinks is not None: total = total + (per_head(sinks) - m).exp()
  if at.member is not None: total = at.member.any(0).reshape(Sq, 1).where(total, 0.0)     # a row of no sequence has no sink

  if dropout_seed is not None: p = _dropped(p, at, dropout_p, dropout_seed)

  # ***** O *****
  o = (p.unsqueeze(-1)*for_each_query(v, sees)).sum(-2)
  empty, some = total == 0, (total == 0).where(1.0, total)     # division by 0 would make the gradient NaN, even where `where` drops the quotient
  o = empty.where(0.0, o/some)
  found = m + some.log()
  lse, rest = empty.where(NEG_INF, found), some.log() - (found - m)
  return o.reshape(B, H, Sq, Dv), lse.reshape(B, H, Sq), rest.reshape(B, H, Sq)
