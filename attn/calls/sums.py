"""Gradients of the tensors that a score_mod reads, made of sums of dS (the gradients of scores) that the kernel `backward_dbias` computes."""
from __future__ import annotations
import functools, operator
from attn.functions.indices import simple_index
from attn.functions.symbols import tensor_of
from attn.kernels.parts.program.counts import ceildiv
from attn.kernels.parts.program.diagonals import Diagonals
from attn.problem import Problem
from attn.score.own import float_elements
from attn.score.sums import sum_over_scores
from attn.tinygrad_compat import Tensor

def gradient_of_element(p:Problem, sums:Tensor, block_m:int, block_n:int) -> Tensor:
  """Returns the fp32 gradient of a tensor that score_mod reads by an expression such as table[i - j]; `sums` are sums of dS, made by a kernel."""
  # If score_mod reads the tensor in several expressions, as in table[i - j] + table[h], the caller adds the gradients. `p.by_element` is the number
  # of the expression. `sums` come from the kernel `backward_dbias`, whose workgroup owns block_m queries and block_n keys.
  assert p.by_element is not None
  element = float_elements(p)[p.by_element]
  index, shape = simple_index(element), [int(n) for n in tensor_of(element).shape]
  assert index is not None
  firsts, names = {"b": 0, "h": 0, "i": p.offset, "j": 0, "i - j": p.offset - p.Sk + 1}, ["b", "h", "i", "j"]
  if sum_over_scores(p).diagonals: sums, names = sums_of_distances(sums, Diagonals(p.Sq, p.Sk, block_m, block_n)), ["b", "h", "i - j"]
  axes = [names.index(x.what) for x in index if x.what is not None]
  sums = sums.permute(*axes, *[n for n in range(sums.ndim) if n not in axes]).reshape([sums.shape[n] for n in axes])
  places = list[tuple[int, int]]()
  for axis, (x, size) in enumerate(zip(index, shape)):
    if x.what is None: sums, first = sums.unsqueeze(axis), x.plus
    elif x.sign > 0: first = firsts[x.what] + x.plus
    else: sums, first = sums.flip(axis), x.plus - firsts[x.what] - int(sums.shape[axis]) + 1
    places.append((first, size - first - int(sums.shape[axis])))
  return within_tensor(sums, places)

def within_tensor(x:Tensor, places:list[tuple[int, int]]) -> Tensor:
  """Pads each axis of x with zeros by the pair (before, after) in `places`; a negative number cuts elements off."""
  sizes = [int(n) for n in x.shape]
  kept = tuple((min(max(-before, 0), n), max(n - max(-after, 0), min(max(-before, 0), n))) for n, (before, after) in zip(sizes, places))
  return x.shrink(kept).pad(tuple((max(before, 0), max(after, 0)) for before, after in places))

def sums_of_distances(sums:Tensor, of:Diagonals) -> Tensor:
  """Returns, for each distance i - j of a query i and a key j, the sum of the gradients of all scores with this distance."""
  # `sums` (B, H, diagonals*block_m, block_n) has one tile for each diagonal of tiles: the sum of all tiles on this diagonal, element by element. The
  # result is (B, H, Sq + Sk - 1).
  batches, heads = (int(n) for n in sums.shape[:2])
  m, n = of.block_m, of.block_n
  width = m + n - 1                               # number of distances in one tile: row x and column y have the distance x - y + n - 1
  of_tiles = sums.reshape(batches, heads, of.phases, of.offsets, m, n).flip(-1).pad((None, None, None, None, None, (0, m)))
  skewed = of_tiles.flatten(4)[..., :m*width].reshape(batches, heads, of.phases, of.offsets, m, width).sum(4)
  pieces = ceildiv(width, n)                      # each has n distances
  skewed = skewed.pad((None, None, None, None, (0, pieces*n - width))).reshape(batches, heads, of.phases, of.offsets, pieces, n).flip(3)
  # tile t of a diagonal lies t*n keys further on: its piece k has the distances of piece k - 1 of tile t - 1
  total = of.offsets + pieces - 1
  rows = functools.reduce(operator.add, [skewed[:, :, :, :, k].pad((None, None, None, (k, total - of.offsets - k), None)) for k in range(pieces)])
  of_phases, further = rows.flatten(3), (of.phases - 1)*m
  found = functools.reduce(operator.add, [of_phases[:, :, u].pad((None, None, (u*m, further - u*m))) for u in range(of.phases)])
  # the first distance belongs to the last tile: x - y - (offsets - 1 - offset_0)*n
  first = -(n - 1) - (of.offsets - 1 - of.offset_0)*n
  return within_tensor(found, [(0, 0), (0, 0), (first - (1 - of.keys), of.queries - 1 - first - (int(found.shape[-1]) - 1))])
