"""Table of all masks, and questions about the masks of a problem."""
from __future__ import annotations
import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple
from attn.functions.interval import Interval
from attn.problem import Problem
from attn.score.count import COUNT
from attn.score.mask import Mask, both_hold
from attn.score.own import MASK_MOD
from attn.score.places import Positions, Walk
from attn.score.term import Fragment
from attn.score.terms import goes_by_distance, score_terms
from attn.score.window import WINDOW_MASK
from attn.tinygrad_compat import Tensor, UOp

SCORE_MASKS: tuple[Mask, ...] = (WINDOW_MASK, MASK_MOD, COUNT)

def intervals(walk:Walk, row:UOp) -> list[Interval]:
  """Returns, for each mask of the problem, the interval of columns that a row of the score matrix sees, both ends included."""
  # The row is a query and the columns are keys, or the reverse, as `walk` says.
  return [mask.seen(walk, row) for mask in SCORE_MASKS]

def as_index(x:int|UOp) -> UOp: return x if isinstance(x, UOp) else UOp.const(x)

def first_seen(walk:Walk, row:UOp) -> UOp|None:
  """Returns the first column that a row of the score matrix sees, or None if no mask hides the first columns of rows."""
  found = [as_index(x.first) for x in intervals(walk, row) if x.first is not None]
  return functools.reduce(UOp.maximum, found) if found else None

def lasts(walk:Walk, row:UOp) -> list[UOp]:
  """Returns, for each mask that hides the last columns of a row of the score matrix, the last column that remains visible."""
  # The list is never empty, because the end of the sequence counts as a mask, too (COUNT).
  return [as_index(x.last) for x in intervals(walk, row) if x.last is not None]

def last_seen(walk:Walk, row:UOp) -> UOp: return functools.reduce(UOp.minimum, lasts(walk, row))

def seen_up_to(walk:Walk, row:UOp) -> UOp:
  """Returns the index of the column after the last column that a row of the score matrix sees."""
  return functools.reduce(UOp.minimum, [(x + 1).maximum(0) for x in lasts(walk, row)])

def nearest_first(walk:Walk) -> bool:
  """Returns whether the forward kernel loops over keys from the last to the first."""
  # It does so if the last key that a query sees depends on the query, as under a causal mask, and scores depend on the distance, as with ALiBi. Such
  # scores mostly fall with the distance.
  row = UOp.variable("row", 0, 2**31 - 1)
  fixed = walk.p.v_in_k or walk.p.batch_invariant      # kernels with an order of their own
  return goes_by_distance(walk.p) and not fixed and row in last_seen(walk, row).toposort()

def cuts_some(walk:Walk, columns:int) -> bool:
  """Returns whether the interval of columns that a row of the score matrix sees may begin or end inside a tile of `columns` columns."""
  return any(x.first is not None or (x.last is not None and (isinstance(x.last, UOp) or (x.last + 1) % columns > 0))
             for x in intervals(walk, UOp.const(0)))

def hides_some(walk:Walk, columns:int) -> bool:
  """Returns whether a mask may hide scores inside a tile of `columns` columns."""
  return bool(scattered(walk.p)) or cuts_some(walk, columns)

def scattered(p:Problem) -> tuple[Mask, ...]:
  """Returns the masks of a problem, such as mask_mod, that may hide a key between two visible keys."""
  return tuple(mask for mask in SCORE_MASKS if mask.each is not None and getattr(p, mask.name) is not None)

def seen_each(at:Fragment) -> list[list[UOp]]|None:
  """Returns for each score that a lane holds whether the masks of `scattered` leave it visible; None if there are no such masks."""
  found = [mask.each(at) for mask in scattered(at.p) if mask.each is not None]
  if not found: return None
  return [[functools.reduce(UOp.__and__, conditions) for conditions in zip(*vectors)] for vectors in zip(*found)]

class Hiding(NamedTuple):
  """Masks of a problem in two groups: `before` hide keys ahead of a query's first visible key, `after` hide keys behind the last one."""
  # COUNT, the mask beyond the last key of a sequence, is in neither group.
  before: tuple[Mask, ...]
  after: tuple[Mask, ...]

def hiding(p:Problem) -> Hiding:
  walk, row = Walk(p, "keys", p.offset, p.Sk, p.Sq), UOp.const(0)
  found = {mask: mask.seen(walk, row) for mask in SCORE_MASKS}
  before = tuple(mask for mask, seen in found.items() if seen.first is not None)
  return Hiding(before, tuple(mask for mask, seen in found.items() if isinstance(seen.last, UOp)))

def options_of_masks(p:Problem, masks:tuple[Mask, ...]) -> str:
  """Returns the options behind the given masks as a text for messages, such as "window=(128, 0), kv_lengths=True"."""
  return ", ".join(f"{mask.name}={getattr(p, mask.name)}" for mask in masks)

def fixed_in_sequence(p:Problem) -> tuple[str, ...]:
  """Returns the names of a problem's score terms and masks that need the positions of query and key in the whole sequence."""
  walk, row, each = Walk(p, "keys", p.offset, p.Sk, p.Sq), UOp.const(0), scattered(p)
  def hides(mask:Mask) -> bool: return mask in each or any(x is not None for x in mask.seen(walk, row))
  masks = [mask.name for mask in SCORE_MASKS if not mask.moves and hides(mask)]
  return (*[term.name for term in score_terms(p) if not term.moves], *masks)

def check_moves(p:Problem) -> None:
  """Raises NotImplementedError for a score term or mask that needs positions in the whole sequence: a device with a shard of the keys lacks them."""
  # Keys are sharded over devices here and not gathered, so a device does not know these positions.
  if names := fixed_in_sequence(p):
    raise NotImplementedError(f"{' and '.join(names)} with k and v sharded along their rows: needs the positions of keys in the whole sequence, but "
                              "here a device counts keys from the first one that it holds; shard q along its rows, too, or q, k and v along batch "
                              "or heads")

def plain_masks(p:Problem, given:Mapping[str, Tensor]) -> Callable[[Positions], Tensor|None]:
  """Returns a function that computes, in tensor operations, which query sees which key under all masks of a problem (None: every key)."""
  # `given` has the tensors that masks read, by name.
  return lambda at: functools.reduce(both_hold, [mask.plain(p, at, given) for mask in SCORE_MASKS])
