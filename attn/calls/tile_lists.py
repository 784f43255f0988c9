"""Lists of visible tiles, made on the device. attn/kernels/tile_lists.py describes the lists and has the kernels that make them."""
from __future__ import annotations
import contextlib, functools, threading
from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar
from attn.calls.checked_kernel import CheckedKernel, KernelFunction
from attn.calls.placement import empty
from attn.kernels.tile_lists import ListedBlocks, list_kernels
from attn.problem import Shapes
from attn.tinygrad_compat import Tensor, UOp, ast_of, capturing, inside_function
from attn.values import INTS, cache_of_kernels

Devices = str|tuple[str, ...]     # a device, or several that divide the batches or heads: then each makes its own lists
MOST_KEPT = 64     # most results of `kept_lists` that a process keeps

@cache_of_kernels
def list_launches(x:ListedBlocks) -> list[tuple[KernelFunction, Shapes]]:
  """Returns the launches that make lists of visible tiles: for each the kernel, and (shape, dtype) of its tensors by name."""
  # A list names the tiles in which a mask_mod leaves scores visible. Each workgroup of an attention kernel loops over the tiles of its list. Equal
  # arguments return identical objects, because tinygrad's schedule cache compares by identity.
  def checked(program:Callable[..., UOp], names:tuple[str, ...]) -> KernelFunction:
    return lambda *placeholders: CheckedKernel(ast_of(program, *placeholders), names[:1], small=True)
  return [(checked(program, tuple(shapes)), shapes) for program, shapes in list_kernels(x)]

def tile_lists(x:ListedBlocks, device:Devices, given:Mapping[str, Tensor]) -> Tensor:
  """Returns the tensor with the lists of visible tiles that `x` describes; `given` has the tensors on which the lists depend."""
  # Lists that depend on no tensor are made once and kept for later calls.
  return new_lists(x, device, given) if x.read or capturing or inside_function() else kept_lists(x, device)

class KeptLists:
  """Lists of visible tiles that are computed once and stay in memory for later calls of the process."""
  # `waiting` has functions that fill buffers which `kept_lists` has already returned. The functions run when the outermost context `lists_made_last`
  # ends; `delays` such contexts are open.
  lock = threading.RLock()
  waiting: ClassVar[list[Callable[[], object]]] = []
  delays = 0
  @staticmethod
  def make() -> None:
    try:
      while KeptLists.waiting: KeptLists.waiting.pop()()
    except BaseException:      # no later call may find a buffer without its lists
      KeptLists.waiting.clear()
      kept_lists.cache_clear()
      raise

@contextlib.contextmanager
def lists_made_last() -> Iterator[None]:
  """Context at whose end the waiting lists of visible tiles are computed, instead of at once."""
  # So code in the context can start to compile the kernels that read the lists before the kernels that make the lists.
  with KeptLists.lock:
    KeptLists.delays += 1
    try: yield
    finally:
      KeptLists.delays -= 1
      if not KeptLists.delays: KeptLists.make()

@functools.lru_cache(MOST_KEPT)
def kept_lists(x:ListedBlocks, device:Devices) -> Tensor:
  """Returns a buffer for the lists of visible tiles that `x` describes, the same buffer in every call."""
  found = empty(x.shape, INTS["int32"], device, None)
  KeptLists.waiting.append(lambda: new_lists(x, device, {"tile_list": found}).realize())
  # The lists are made at once, or at the end of `lists_made_last`.
  if not KeptLists.delays: KeptLists.make()
  return found

def new_lists(x:ListedBlocks, device:Devices, given:Mapping[str, Tensor]) -> Tensor:
  """Makes the lists of visible tiles that `x` describes, as a tensor that is not realized yet."""
  # `given` has the tensors that the mask reads. If it has the buffer "tile_list", the lists are written there.
  t = dict(given)
  for kernel, shapes in list_launches(x):
    for name, (shape, dtype) in shapes.items():
      if name not in t: t[name] = empty(shape, INTS[dtype], device, None)
    t[next(iter(shapes))] = Tensor.custom_kernel(*[t[name] for name in shapes], fxn=kernel)[0]
  return t["tile_list"]
