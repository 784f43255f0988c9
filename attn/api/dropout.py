"""Dropout for users of `attention`: the random seed, and the mask that says which attention weights dropout keeps."""
from __future__ import annotations
from typing import Any
from attn import values
from attn.calls.placement import Placement
from attn.ops.dropout import STEPS_OF_P, kept_elements
from attn.problem import Problem, check_dropout_p
from attn.tinygrad_compat import Tensor, dtypes, rand_then
from attn.values import static_shape

def check_seed(name:str, x:Any) -> Tensor:
  """Returns the dropout seed `x`, or raises ValueError if it is no uint32 Tensor of shape (2,)."""
  values.dtype_name(name, values.tensor(name, x).dtype, ("uint32",))
  if (shape := static_shape(name, x.shape)) != (2,): raise ValueError(f"{name} has shape {shape}: must be (2,)")
  return x

def seed_from(x:Tensor) -> Tensor:
  """Makes a dropout seed, uint32 (2), from four random fp32 numbers in 0..1."""
  halves = (x*STEPS_OF_P).cast(dtypes.uint)
  return (halves[0]*STEPS_OF_P + halves[1]).contiguous()

def drawn_seed(at:Placement) -> Tensor:
  """Makes a random dropout seed, uint32 (2), with tinygrad's generator of random numbers."""
  # The generator gives fp32 numbers, each with only 16 usable random bits, so each uint32 is made of two of them.
  return rand_then((2, 2), at.device if isinstance(at.device, str) else at.device[0], seed_from)

def first_of_each(at:Placement, p:Problem) -> Tensor:
  """Returns a tensor sharded over the devices. A device's shard, uint32 (2), has the index of the device's first batch and of its first head."""
  # For example, with 8 heads sharded over 2 devices, device 1 gets (0, 4). `p` is the problem of one device.
  batch, head = (p.B, 0) if at.shared == "batch" else (0, p.H)
  firsts = [n for i in range(at.count) for n in (i*batch, i*head)]
  return Tensor(firsts, dtype=dtypes.uint, device=at.device[0]).shard(tuple(at.device), 0)

@values.names_itself
def dropout_mask(seed:Tensor, p:float, B:int, H:int, Sq:int, Sk:int, batch_start:int=0, head_start:int=0) -> Tensor:
  """Shows which attention weights (elements of P, the softmax of the scores) `attention` keeps with dropout_p=p and dropout_seed=seed. Returns bool
  (B, H, Sq, Sk) on the seed's device, True for kept.

    seed                     uint32 (2)
    p                        probability that an element becomes 0
    B, H, Sq, Sk             shape of the scores; in layout "thd" a batch is a sequence
    batch_start, head_start  index of the first batch and of the first head, for a part of the mask

  Element (b, h, i, j) is kept if a 16-bit random number for this element is at least p * 2^16, rounded. The random number is half j % 2 of word
  j % 8 // 2 of the result of the generator Philox4x32-7 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") with the counter
  (i, j // 8, h, b) and the key `seed`.
  Raises ValueError or NotImplementedError for other shapes, dtypes or numbers."""
  check_seed("seed", seed)
  p = check_dropout_p("p", p)
  sizes = [values.whole_number(name, n, 1, 2**31 - 1, "a whole number, at least 1") for name, n in (("B", B), ("H", H), ("Sq", Sq), ("Sk", Sk))]
  starts = [values.whole_number(name, n, 0, 2**31 - 1, "a whole number, at least 0")
            for name, n in (("batch_start", batch_start), ("head_start", head_start))]
  def along(axis:int, n:int, start:int) -> Tensor: return (Tensor.arange(n) + start).reshape(*[n if i == axis else 1 for i in range(4)])
  return kept_elements(seed, p, *[along(axis, n, start) for axis, (n, start) in enumerate(zip(sizes, (*starts, 0, 0)))])
