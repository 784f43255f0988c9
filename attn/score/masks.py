"""Table of all masks, and questions about the masks of a problem."""
from __future__ import annotations
import functools
from collections.abc import Callable
from typing import NamedTuple
from attn.problem import Problem
from attn.score.count import COUNT
from attn.score.mask import Interval, Mask, Walk, both_hold
from attn.score.term import Positions
from attn.score.window import WINDOW_MASK
from attn.tinygrad_compat import Tensor, UOp

SCORE_MASKS: tuple[Mask, ...] = (WINDOW_MASK, COUNT)

def intervals(walk:Walk, row:UOp) -> list[Interval]:
  """Returns the interval of columns that each mask leaves to a row."""
  return [mask.seen(walk, row) for mask in SCORE_MASKS]

def as_index(x:int|UOp) -> UOp: return x if isinstance(x, UOp) else UOp.const(x)

def first_seen(walk:Walk, row:UOp) -> UOp|None:
  """Returns the first column that a row sees, or None if no mask hides columns at the beginning."""
  found = [as_index(x.first) for x in intervals(walk, row) if x.first is not None]
  return functools.reduce(UOp.maximum, found) if found else None

def lasts(walk:Walk, row:UOp) -> list[UOp]:
  """Returns the last column that each mask leaves to a row. The list is never empty, because the mask COUNT always has a last column."""
  return [as_index(x.last) for x in intervals(walk, row) if x.last is not None]

def last_seen(walk:Walk, row:UOp) -> UOp: return functools.reduce(UOp.minimum, lasts(walk, row))

def seen_up_to(walk:Walk, row:UOp) -> UOp:
  """Returns the number of columns up to and including the last one that a row sees."""
  return functools.reduce(UOp.minimum, [(x + 1).maximum(0) for x in lasts(walk, row)])

def hides_some(walk:Walk, columns:int) -> bool:
  """Whether a mask may hide scores of a tile of `columns` columns."""
  return any(x.first is not None or (x.last is not None and (isinstance(x.last, UOp) or (x.last + 1) % columns > 0))
             for x in intervals(walk, UOp.const(0)))

class Hiding(NamedTuple):
  """Masks that hide keys before the first key that a query sees, and masks that hide keys after the last key that a query sees. COUNT, the end of the
  keys, does not count as a mask here."""
  before: tuple[Mask, ...]
  after: tuple[Mask, ...]

def hiding(p:Problem) -> Hiding:
  walk, row = Walk(p, "keys", p.offset, p.Sk, p.Sq), UOp.const(0)
  found = {mask: mask.seen(walk, row) for mask in SCORE_MASKS}
  return Hiding(tuple(mask for mask, x in found.items() if x.first is not None), tuple(mask for mask, x in found.items() if isinstance(x.last, UOp)))

def told(p:Problem, masks:tuple[Mask, ...]) -> str:
  """Returns a text with the fields of a problem that the given masks read, and the values of these fields."""
  return ", ".join(f"{mask.name}={getattr(p, mask.name)}" for mask in masks)

def check_moves(p:Problem) -> None:
  """Raises NotImplementedError for a mask that depends on more than the distance of query and key. Devices that share rows cannot compute such a
  mask."""
  if fixed := tuple(mask for masks in hiding(p) for mask in masks if not mask.moves):
    raise NotImplementedError(f"{told(p, fixed[:1])} with rows that devices share: each device counts keys from its own first one, and the "
                              "mask needs their places in the whole sequence; shard q, k and v along batch or heads instead")

def plain_masks(p:Problem) -> Callable[[Positions], Tensor|None]:
  """Returns a function that applies all masks of a problem in tensor operations. The function says whether a query sees a key; None: every query sees
  every key."""
  return lambda at: functools.reduce(both_hold, [mask.plain(p, at) for mask in SCORE_MASKS])
