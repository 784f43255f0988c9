"""Random numbers by tinygrad's generator, without building tinygrad's expressions again for each call."""
from __future__ import annotations
import functools, math
from collections.abc import Callable
from tinygrad import Tensor
from tinygrad.device import canonicalize_device
from tinygrad.dtype import dtypes
from tinygrad.uop.ops import Ops
from attn.tinygrad_compat.recipes import Recipe, next_buffer, recipe_of

STAND_IN = "stand-in of attn"     # stands for a device among tinygrad's generators

@functools.cache
def _recipe(device:str, shape:tuple[int, ...], then:Callable[[Tensor], Tensor]) -> Recipe:
  """Records how `then(Tensor.rand(*shape))` and the generator's next counter are computed from the generator's key and counter."""
  first, (key, counter) = next_buffer(), (Tensor.empty(2, dtype=dtypes.uint32, device=device) for _ in range(2))
  before, keys, counters = counter.uop, Tensor._device_seeds, Tensor._device_rng_counters
  keys[STAND_IN], counters[STAND_IN] = key, counter
  try: drawn = Tensor._rand(*Tensor._next_counter(STAND_IN, math.prod(shape)), shape, dtypes.float)
  finally: del keys[STAND_IN], counters[STAND_IN]
  found = recipe_of((then(drawn).uop, counter.uop), (key.uop, before), first)
  assert found is not None
  return found

def rand_then(shape:tuple[int, ...], device:str, then:Callable[[Tensor], Tensor]) -> Tensor:
  """Returns `then(Tensor.rand(*shape))` with other random numbers in each call; only the first call builds the expression."""
  # tinygrad takes 5 ms to build the expressions of a draw. They differ from draw to draw only in the generator's counter, so they are built once, and
  # then get the current counter. `then` must be the identical object in each call.
  device = str(canonicalize_device(device))
  counter = Tensor._device_rng_counters.get(device)
  if counter is None or counter.uop.op not in (Ops.BUFFER, Ops.AFTER): return then(Tensor.rand(*shape, device=device, dtype=dtypes.float))
  drawn, counter.uop = _recipe(device, shape, then).made((Tensor._device_seeds[device].uop, counter.uop))
  return Tensor(drawn)

def realize_counters() -> None:
  """Computes the counters of tinygrad's random generators, because the lazy expression of a counter grows with each use of the generator."""
  # Until then, the expressions of each draw contain those of all earlier ones.
  for counter in Tensor._device_rng_counters.values(): counter.realize()
