"""Recipes: records of how an expression of tinygrad is made from its inputs. A recipe makes the same expression from other inputs, without the code
that made it first."""
from __future__ import annotations
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from tinygrad.uop.ops import Ops, UOp
from attn.tinygrad_compat.uops import begins_at, new_uop

PARTS_OF_VIEW = (Ops.RESHAPE, Ops.UNSHARD, Ops.AFTER)
STANDING_FOR_MEMORY = (Ops.BUFFER, Ops.CONTIGUOUS)
OF_SHAPE = vars(UOp)["_shape"].nm     # under this name a UOp keeps its shape

@dataclass(frozen=True)
class DividedInputs:
  """Inputs of an expression in two groups: `changing`, the UOps that differ from call to call, and `form`, what is equal in all calls."""
  changing: tuple[UOp, ...]  # buffers of the inputs, and calls and stores after which these have their values; each once
  form: tuple[Any, ...]  # inputs of equal form differ in nothing but `changing`

def divided_inputs(tensors:Iterable[UOp]) -> DividedInputs|None:
  """Divides an expression's inputs into UOps that differ from call to call, and all that stays equal; None if an input is neither a buffer nor a
  stored value."""
  # An input must be a buffer, or the `contiguous()` of an expression, and may be reshaped, sharded, or wait for calls.
  changing, form = dict[UOp, int](), list[Any]()
  for u in tensors:
    while u.op in PARTS_OF_VIEW:
      after = [changing.setdefault(x, len(changing)) for x in u.src[1:]] if u.op is Ops.AFTER else u.src[1:]
      form.append((u.op, u.arg, u.tag, *after))
      u = u.src[0]
    if u.op not in STANDING_FOR_MEMORY: return None
    more = (u.arg.name, u.arg.vmin_vmax) if u.op is Ops.BUFFER else (begins_at(u),)
    form.append((u.op, u.dtype, u.shape, u.device, u.axis, u.tag, *more, changing.setdefault(u, len(changing))))
  return DividedInputs(tuple(changing), tuple(form))

@dataclass(frozen=True)
class RecipeStep:
  """Record of one UOp of an expression: its fields, and the indices of its sources in a list of values."""
  # `src` has indices of values: of the UOps that change, then of the constant parts of the expression, then of the steps so far.
  op: Ops
  dtype: Any
  src: tuple[int, ...]
  arg: Any
  tag: Any
  shape: tuple[int, ...]|None
  def made(self, values:Sequence[UOp]) -> UOp:
    """Makes the recorded UOp with sources from `values`; a recorded BUFFER becomes another buffer of the same size."""
    arg = replace(self.arg, slot=next(UOp.unique_num)) if self.op is Ops.BUFFER else self.arg
    u = new_uop(self.op, tuple([values[i] for i in self.src]), self.dtype, arg)
    if self.tag is not None: u = u.rtag(self.tag)
    u.__dict__[OF_SHAPE] = self.shape     # tinygrad would compute it from the shapes of all sources
    return u

@dataclass(frozen=True)
class Recipe:
  """Record of an expression's UOps, from which the same expression is built on the buffers of another call."""
  constant: tuple[UOp, ...]  # parts that don't depend on these UOps, such as kernels
  steps: tuple[RecipeStep, ...]  # make the rest
  results: tuple[int, ...]  # indices of the results among all values
  def made(self, changing:Sequence[UOp]) -> Iterator[UOp]:
    """Builds the recorded expression on the UOps `changing`, with newly made buffers inside the expression; yields the expression's results."""
    values = [*changing, *self.constant]
    for step in self.steps: values.append(step.made(values))
    return (values[i] for i in self.results)

def next_buffer() -> int:
  """Returns tinygrad's next number for a buffer; buffers that are made later have greater numbers."""
  return int(next(UOp.unique_num))

def recipe_of(results:Iterable[UOp], changing:tuple[UOp, ...], first:int) -> Recipe|None:
  """Records how `results` are computed from the UOps `changing`; returns None if they need another buffer numbered below `first`, or a symbolic
  shape."""
  results, known = tuple(results), frozenset(changing)
  *nodes, _ = UOp.sink(*results).toposort(gate=lambda u: u not in known, enter_calls=False)
  # Buffers with numbers from `first` on belong to the expression. Any other buffer may be another one in the next call. A shape must have no
  # Variables.
  if any((u.op is Ops.BUFFER and u.arg.slot < first) or not all(isinstance(n, int) for n in u._shape or ()) for u in nodes): return None
  varying = dict.fromkeys(changing)
  for u in nodes:
    if u.op is Ops.BUFFER or any(x in varying for x in u.src): varying[u] = None
  made = list(varying)[len(changing):]
  constant = dict.fromkeys(x for x in itertools.chain(results, *(u.src for u in made)) if x not in varying)
  place = {u: i for i, u in enumerate((*changing, *constant, *made))}
  steps = tuple(RecipeStep(u.op, u.dtype, tuple(place[x] for x in u.src), u.arg, u.tag, u._shape) for u in made)
  return Recipe(tuple(constant), steps, tuple(place[u] for u in results))
