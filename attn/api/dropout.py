"""Dropout of attention as users meet it: its seed, and which elements of P are kept."""
from __future__ import annotations
from typing import Any
from attn import values
from attn.calls.placement import Placement
from attn.ops.dropout import STEPS_OF_P, kept_elements
from attn.problem import Problem, check_dropout_p
from attn.tinygrad_compat import Tensor, dtypes
from attn.values import static_shape

def check_seed(name:str, x:Any) -> Tensor:
  """A seed: uint32 (2). Raises ValueError for another shape and NotImplementedError for another dtype."""
  values.dtype_name(name, values.tensor(name, x).dtype, ("uint32",))
  if (shape := static_shape(name, x.shape)) != (2,): raise ValueError(f"{name} has shape {shape}: must be (2,)")
  return x

def drawn_seed(at:Placement) -> Tensor:
  """A seed from tinygrad's generator, on the first of the devices: of halves, which fp32 holds exactly."""
  halves = (Tensor.rand(2, 2, device=at.device if isinstance(at.device, str) else at.device[0])*STEPS_OF_P).cast(dtypes.uint)
  return (halves[0]*STEPS_OF_P + halves[1]).contiguous()

def first_of_each(at:Placement, p:Problem) -> Tensor:
  """The first batch and the first head of the whole tensors that each device has: uint32 (2) on each, where `p` is what one of them has to do."""
  batch, head = (p.B, 0) if at.shared == "batch" else (0, p.H)
  firsts = [n for i in range(at.count) for n in (i*batch, i*head)]
  return Tensor(firsts, dtype=dtypes.uint, device=at.device[0]).shard(tuple(at.device), 0)

def dropout_mask(seed:Tensor, p:float, B:int, H:int, Sq:int, Sk:int, batch_start:int=0, head_start:int=0) -> Tensor:
  """bool (B, H, Sq, Sk), on the seed's device: True for the elements of P that `attention` keeps with dropout_p=p and this dropout_seed, uint32 (2),
  those of batches and heads counted from `batch_start` and `head_start` on. In layout "thd" a batch is a sequence.

  Element (b, h, i, j) goes by half j % 2 of word j % 8 // 2 of Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") of
  the counter (i, j // 8, h, b) and the key `seed`: it is kept where that number of 16 bits is at least p * 2^16, rounded.
  Raises ValueError or NotImplementedError for arguments that are none of that.
  """
  check_seed("seed", seed)
  p = check_dropout_p("p", p)
  sizes = [values.whole_number(name, n, 1, 2**31 - 1, "a whole number, at least 1") for name, n in (("B", B), ("H", H), ("Sq", Sq), ("Sk", Sk))]
  starts = [values.whole_number(name, n, 0, 2**31 - 1, "a whole number, at least 0")
            for name, n in (("batch_start", batch_start), ("head_start", head_start))]
  def along(axis:int, n:int, start:int) -> Tensor: return (Tensor.arange(n) + start).reshape(*[n if i == axis else 1 for i in range(4)])
  return kept_elements(seed, p, *[along(axis, n, start) for axis, (n, start) in enumerate(zip(sizes, (*starts, 0, 0)))])
