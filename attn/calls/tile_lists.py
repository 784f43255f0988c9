"""Makes, on the device, the lists of tiles that kernels loop over. attn/kernels/tile_lists.py describes the lists and has the kernels that make
lists."""
from __future__ import annotations
import functools
from collections.abc import Callable, Mapping
from attn.calls.checked_kernel import CheckedKernel, KernelFunction
from attn.calls.placement import empty
from attn.functions.symbols import elements_of
from attn.kernels.tile_lists import ListedBlocks, list_kernels
from attn.problem import Shapes
from attn.tinygrad_compat import Tensor, UOp, ast_of, capturing, inside_function
from attn.values import INTS, cache_of_kernels

MOST_KEPT = 64     # most results of `kept_lists` that a process keeps

@cache_of_kernels
def list_launches(x:ListedBlocks) -> list[tuple[KernelFunction, Shapes]]:
  """Returns the kernels that make lists of tiles on the device, each with the (shape, dtype) of its tensors by name. A list names the tiles in which
  a mask_mod leaves scores visible. Each workgroup of an attention kernel loops over the tiles of its list, and so skips the hidden tiles between
  them. `x` describes the lists. Equal arguments return identical objects, because tinygrad's schedule cache compares by identity."""
  def checked(program:Callable[..., UOp], names:tuple[str, ...]) -> KernelFunction:
    return lambda *placeholders: CheckedKernel(ast_of(program, *placeholders), names[:1], small=True)
  return [(checked(program, tuple(shapes)), shapes) for program, shapes in list_kernels(x)]

def tile_lists(x:ListedBlocks, device:str, given:Mapping[str, Tensor]) -> Tensor:
  """Returns the tensor with the lists of tiles that `x` describes. `given` has the tensors that the mask reads. If the mask reads no tensor, the
  lists are made once and kept for later calls."""
  mask = x.p.mask_mod
  assert mask is not None
  return new_lists(x, device, given) if elements_of(mask.value) or capturing or inside_function() else kept_lists(x, device)

@functools.lru_cache(MOST_KEPT)
def kept_lists(x:ListedBlocks, device:str) -> Tensor: return new_lists(x, device, {}).realize()

def new_lists(x:ListedBlocks, device:str, given:Mapping[str, Tensor]) -> Tensor:
  """Makes new lists of visible tiles, as `x` describes. Returns a tensor that is not realized yet: an expression of the tensors `given`, which the
  mask reads."""
  t = dict(given)
  for kernel, shapes in list_launches(x):
    for name, (shape, dtype) in shapes.items():
      if name not in t: t[name] = empty(shape, INTS[dtype], device, None)
    t[next(iter(shapes))] = Tensor.custom_kernel(*[t[name] for name in shapes], fxn=kernel)[0]
  return t["tile_list"]
