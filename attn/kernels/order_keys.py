"""Puts the rows of k or v that a device holds of a sequence where it gathers those of all devices, in the order of the sequence."""
from __future__ import annotations
import math
from attn.kernels.parts.memory.rows import strides
from attn.ops.common import flat
from attn.problem import DealtRows, Problem
from attn.tinygrad_compat import AxisType, KernelInfo, UOp

ROWS_OF_A_THREAD, ELEMENTS_OF_A_THREAD = 4, 8     # at most, of a copy by multiprocessors: so much is on its way at a time

def order_keys(p:Problem, held:int, keys:DealtRows, width:int, gathered:UOp, shard:UOp) -> UOp:
  """The kernel of its placeholders: gathered (rows, heads, width), shard with `held` rows a head in the layout of `p`. `keys` says which key/value
  heads over batches, and of the rows that are held how many there are and where in `gathered` each belongs. tinygrad chooses the threads."""
  (first, heads), to, held_rows = keys.heads, flat(gathered), flat(shard)
  each = math.gcd(keys.queries, ROWS_OF_A_THREAD), math.gcd(width, ELEMENTS_OF_A_THREAD)
  block, head, part = (UOp.range(n, i) for i, n in enumerate((keys.queries//each[0], heads, width//each[1])))
  of_block, of_part = (UOp.range(n, 3 + i, AxisType.UPCAST) for i, n in enumerate(each))
  row, column, number = block*each[0] + of_block, part*each[1] + of_part, first + head
  sb, sh, ss = strides(p.layout, p.Hkv, held, width)
  value = held_rows[number//p.Hkv*sb + number%p.Hkv*sh + row*ss + column].load()
  stored = to[(keys.place(row)*heads + head)*width + column].store(value)
  return stored.end(block, head, part, of_block, of_part).sink(arg=KernelInfo(f"attn_in_order_{heads}_{width}"))
