"""Kernel that copies the rows of k or v that one device holds into a buffer for the rows of all devices, in the order of the sequence."""
from __future__ import annotations
import math
from attn.kernels.parts.memory.rows import strides
from attn.ops.common import flat
from attn.problem import DealtRows, Problem
from attn.tinygrad_compat import AxisType, KernelInfo, UOp

ROWS_OF_A_THREAD, ELEMENTS_OF_A_THREAD = 4, 8     # at most: the loads of a thread all run at the same time

def order_keys(p:Problem, held:int, keys:DealtRows, width:int, gathered:UOp, shard:UOp) -> UOp:
  """Returns the kernel that copies one device's rows of k or v, `shard`, to where they belong in the whole sequence, `gathered`."""
  # `held`: rows of each head on this device. `keys`: which rows to copy: a range of the B*Hkv key/value heads, the number of rows, and the place of
  # each row in the sequence. `width`: elements of a row. `gathered`: (rows, heads, width). `shard`: in the layout of `p`. tinygrad divides the
  # copying among threads.
  (first, heads), to, held_rows = keys.heads, flat(gathered), flat(shard)
  each = math.gcd(keys.queries, ROWS_OF_A_THREAD), math.gcd(width, ELEMENTS_OF_A_THREAD)
  block, head, part = (UOp.range(n, i) for i, n in enumerate((keys.queries//each[0], heads, width//each[1])))
  of_block, of_part = (UOp.range(n, 3 + i, AxisType.UPCAST) for i, n in enumerate(each))
  row, column, number = block*each[0] + of_block, part*each[1] + of_part, first + head
  sb, sh, ss = strides(p.layout, p.Hkv, held, width)
  value = held_rows[number//p.Hkv*sb + number%p.Hkv*sh + row*ss + column].load()
  stored = to[(keys.place(row)*heads + head)*width + column].store(value)
  return stored.end(block, head, part, of_block, of_part).sink(arg=KernelInfo(f"attn_in_order_{heads}_{width}"))
