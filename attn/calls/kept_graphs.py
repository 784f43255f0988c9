"""Records of the UOps of a call. In the first call attn's code makes these UOps; in later calls a record (`Recipe`) makes the same UOps in a fraction
of the time."""
from __future__ import annotations
import functools
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any
from attn.tinygrad_compat import Recipe, UOp, capturing, divided_inputs, inside_function, next_buffer, recipe_of

MOST_GRAPHS = 128     # graphs that are kept, the latest; their kernels are in tinygrad's caches, too

Graph = Mapping[str, UOp]     # UOps by name

@dataclass
class KeptGraph:
  """Record of the UOps that one kind of call makes. From the record, later calls make the same UOps on other inputs."""
  names: tuple[str, ...]|None = None  # of its results; None before the first call
  recipe: Recipe|None = None  # makes an equal graph; None if no recipe is possible

@functools.lru_cache(MOST_GRAPHS)
def recipes(key:Hashable, names:tuple[str, ...], form:tuple[Any, ...]) -> KeptGraph:
  """Returns the record of UOps for calls that compute `key` from inputs called `names` of this `form` (shapes, dtypes, devices); before the first
  call it is empty."""
  # `key` says what the graph computes, `names` are the names of its inputs, and `form` is everything about the inputs that does not change from call
  # to call.
  return KeptGraph()

def kept_graph(key:Hashable, inputs:Graph, make:Callable[[Graph], dict[str, UOp]]) -> dict[str, UOp]:
  """Returns the results of `make(inputs)`, {name: UOp}. After the first call with this `key` they are built from a record, which is faster."""
  # `make` must depend on nothing but `key` and the form of its inputs.
  # No recipe is possible inside tinygrad's `@function`, for inputs that are views of buffers, and for a graph that reads other buffers than those of
  # its inputs.
  if inside_function() or (given := divided_inputs(inputs.values())) is None: return make(inputs)
  kept = recipes((key, bool(capturing)), tuple(inputs), given.form)
  if kept.names is None:
    first, found = next_buffer(), make(inputs)
    kept.names, kept.recipe = tuple(found), recipe_of(found.values(), given.changing, first)
    return found
  return make(inputs) if kept.recipe is None else dict(zip(kept.names, kept.recipe.made(given.changing)))
