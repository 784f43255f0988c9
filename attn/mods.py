"""Well-known functions for `mask_mod` and `score_mod` of `attn.attention`, to use or to copy. docs/functions.md shows them and says the rules.

  attn.attention(q, k, v, mask_mod=attn.mods.sliding_window(128))
  attn.attention(q, k, v, score_mod=attn.mods.alibi_bias, mod_tensors=(slopes,))

The position i of a query and the position j of a key count from the first key of the sequence, b is the batch and h the query head. A tensor among a
function's arguments is one of `mod_tensors`. To combine masks, write a function of your own that calls the masks and joins their results by & or
|."""
from __future__ import annotations
from collections.abc import Callable
from attn.tinygrad_compat import UOp

# ***** masks: whether the query at i sees the key at j *****

def causal(b:UOp, h:UOp, i:UOp, j:UOp) -> UOp:
  """Causal mask: the query at i sees the keys j <= i."""
  return i >= j

def sliding_window(size:int) -> Callable[..., UOp]:
  """Makes a causal mask with a window: the query at i sees the last `size` keys, i - size < j <= i (Longformer, arXiv 2004.05150; Mistral, arXiv
  2310.06825)."""
  return lambda b, h, i, j: (i >= j) & (i - j < size)

def dilated_window(size:int, step:int) -> Callable[..., UOp]:
  """Makes a causal mask with a window that has gaps: of the keys i - size < j <= i, the query at i sees every `step`-th key, counted back from i
  (LongNet, arXiv 2307.02486)."""
  return lambda b, h, i, j: (i >= j) & (i - j < size) & ((i - j) % step == 0)

def sinks_and_window(sinks:int, size:int) -> Callable[..., UOp]:
  """Makes a causal mask that always shows the first keys: of the keys j <= i, the query at i sees the first `sinks` keys and the last `size` keys
  (StreamingLLM, arXiv 2309.17453)."""
  return lambda b, h, i, j: (i >= j) & ((j < sinks) | (i - j < size))

def prefix_lm(length:int) -> Callable[..., UOp]:
  """Makes a causal mask with a prefix that all queries see: the query at i sees the keys j <= i and the keys j < length (T5, arXiv 1910.10683)."""
  return lambda b, h, i, j: (i >= j) | (j < length)

def documents(b:UOp, h:UOp, i:UOp, j:UOp, numbers:UOp) -> UOp:
  """Mask for several documents in one sequence: a query sees only the keys of its own document, numbers[b, i] == numbers[b, j]. `numbers` is int (B,
  Sk): the index of the document at each position."""
  return numbers[b, i] == numbers[b, j]

def sliding_tile(width:int, radius:int, tile:int=1) -> Callable[..., UOp]:
  """Makes a mask for an image of `width` columns, in tiles of tile x tile pixels. A pixel sees a square of 2*radius + 1 by 2*radius + 1 tiles, with
  the pixel's own tile in the middle (sliding tile attention, arXiv 2502.04507; neighbourhood attention, arXiv 2204.07143, has tile=1)."""
  def near(b:UOp, h:UOp, i:UOp, j:UOp) -> UOp:
    rows, columns = i//width//tile - j//width//tile, i % width//tile - j % width//tile
    return (rows.abs() <= radius) & (columns.abs() <= radius)
  return near

# ***** scores *****

def alibi_bias(score:UOp, b:UOp, h:UOp, i:UOp, j:UOp, slopes:UOp) -> UOp:
  """Lowers each score in proportion to the distance of query and key: score - slopes[h] * |i - j|. `slopes`: float (H) (ALiBi, arXiv 2108.12409)."""
  return score - slopes[h]*(i - j).abs()

def relative_bias(longest:int) -> Callable[..., UOp]:
  """Makes a score_mod that adds a learned number for each distance i - j between a query and a key: score + table[h, i - j + longest - 1]. A sequence
  may have at most `longest` queries and keys. `table` is float (H, 2*longest - 1) (Shaw et al., arXiv 1803.02155). T5 (arXiv 1910.10683) learns a
  number for each of a few buckets, ranges of distances. For T5, fill `table` so that each distance has the learned number of its bucket."""
  return lambda score, b, h, i, j, table: score + table[h, i - j + longest - 1]

def tanh_softcap(cap:float) -> Callable[..., UOp]:
  """Makes a score_mod that keeps scores between -cap and cap: cap * tanh(score/cap) (Gemma 2, arXiv 2408.00118)."""
  return lambda score, b, h, i, j: (score/cap).tanh()*cap

def tanh_gate(score:UOp, b:UOp, h:UOp, i:UOp, j:UOp, gates:UOp) -> UOp:
  """Multiplies the scores of each head by a learned gate: score * tanh(gates[h]). `gates` is float (H). If gates[h] is 0, all scores of head h are 0,
  and each query gets the mean of V over the keys that the query sees. Flamingo (arXiv 2204.14198) multiplies the output of an attention layer by such
  a gate."""
  return score*gates[h].tanh()

def head_scale(score:UOp, b:UOp, h:UOp, i:UOp, j:UOp, scales:UOp) -> UOp:
  """Multiplies the scores of each head by a factor: score * scales[h]. `scales`: float (H)."""
  return score*scales[h]
