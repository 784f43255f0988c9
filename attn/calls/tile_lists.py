"""Lists of visible tiles, made on the device. attn/kernels/tile_lists.py describes the lists and has the kernels that make them."""
from __future__ import annotations
import contextlib, functools, threading
from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar
from attn.calls.checked_kernel import CheckedKernel, KernelFunction
from attn.calls.placement import empty
from attn.kernels.tile_lists import IN_TILES, ListedBlocks, SeenTiles, list_arguments, seen_in_tiles, table_arguments, tiles_in_order
from attn.problem import Shapes
from attn.tinygrad_compat import Tensor, UOp, ast_of, capturing, inside_function
from attn.values import INTS, cache_of_kernels

Devices = str|tuple[str, ...]     # a device, or several that divide the batches or heads: then each makes its own lists
MOST_KEPT = 64     # most results of `kept_lists` that a process keeps

Tables = dict[SeenTiles, Tensor]           # tables from which lists are made

@cache_of_kernels
def kernel_of_lists(program:Callable[..., UOp], names:tuple[str, ...]) -> KernelFunction:
  """Returns, as a kernel function, a `program` that makes lists of visible tiles; `names` are the names of its tensors. The program writes the first
  tensor."""
  # equal arguments return identical objects, because tinygrad's schedule cache compares by identity
  return lambda *placeholders: CheckedKernel(ast_of(program, *placeholders), names[:1], small=True)

def made_by_kernel(program:Callable[..., UOp], shapes:Shapes, device:Devices, given:Mapping[str, Tensor]) -> Tensor:
  """Runs a kernel on tensors with these `shapes`, and returns the first tensor, which the kernel writes."""
  # a tensor that is not in `given` gets a new buffer
  tensors = [given[name] if name in given else empty(shape, INTS[dtype], device, None) for name, (shape, dtype) in shapes.items()]
  return Tensor.custom_kernel(*tensors, fxn=kernel_of_lists(program, tuple(shapes)))[0]

def tile_lists(x:ListedBlocks, device:Devices, given:Mapping[str, Tensor], tables:Tables|None=None) -> Tensor:
  """Returns the tensor with the lists of visible tiles that `x` describes; `given` has the tensors on which the lists depend."""
  # Lists that depend on no tensor are made once and kept for later calls. `tables` has the tables that this call has made; a new one is added.
  return new_lists(x, device, given, {} if tables is None else tables) if x.read or capturing or inside_function() else kept_lists(x, device)

class KeptLists:
  """Lists of visible tiles that are computed once and stay in memory for later calls of the process."""
  # `waiting` describes lists that are not made yet, with their devices and the buffers that `kept_lists` has already returned. They are made when the
  # outermost context `lists_made_last` ends; `delays` such contexts are open.
  lock = threading.RLock()
  waiting: ClassVar[list[tuple[ListedBlocks, Devices, Tensor]]] = []
  delays = 0
  @staticmethod
  def make() -> None:
    if not (waiting := KeptLists.waiting.copy()): return
    KeptLists.waiting.clear()
    tables: dict[Devices, Tables] = {}
    try: Tensor.realize(*[new_lists(x, device, {"tile_list": to}, tables.setdefault(device, {})) for x, device, to in waiting])
    except BaseException:      # no later call may find a buffer without its lists
      kept_lists.cache_clear()
      raise

@contextlib.contextmanager
def lists_made_last() -> Iterator[None]:
  """Context that delays the kernels that compute lists of visible tiles for later calls until the end of the context."""
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
  KeptLists.waiting.append((x, device, found))
  if not KeptLists.delays: KeptLists.make()
  return found

def new_lists(x:ListedBlocks, device:Devices, given:Mapping[str, Tensor], tables:Tables) -> Tensor:
  """Makes the lists of visible tiles that `x` describes, as a tensor that is not realized yet."""
  # `given` has the tensors that the mask reads. If it has the buffer "tile_list", the lists are written there. The table is in `tables`, or added.
  if x.table not in tables: tables[x.table] = made_by_kernel(seen_in_tiles(x.table), table_arguments(x.table), device, given)
  return made_by_kernel(tiles_in_order(x), list_arguments(x), device, {**given, IN_TILES: tables[x.table]})
