"""How tiles of rows lie in LDS, which CUDA calls shared memory."""
from __future__ import annotations
from dataclasses import dataclass, replace
from attn.kernels.parts.tiles import ceildiv
from attn.ops import common as ops
from attn.tinygrad_compat import AddrSpace, UOp

@dataclass(frozen=True)
class LdsTile:
  """A tile of rows of 16-byte units in LDS, or several of them. The row stride is an odd number of units, so that eight neighbouring rows lie in
  different banks; after every 16 rows there may be a gap of `skew` units."""
  buffer: UOp
  rows: int
  units: int
  skew: int = 0
  base: UOp|int = 0
  @staticmethod
  def size(rows:int, units:int, skew:int=0) -> int: return rows*(units | 1) + ceildiv(rows, 16)*skew
  @staticmethod
  def create(rows:int, units:int, slot:int, buffers:int=1, skew:int=0) -> LdsTile:
    return LdsTile(UOp.placeholder((buffers*LdsTile.size(rows, units, skew),), ops.u32(4), slot, AddrSpace.LOCAL), rows, units, skew)

  def after(self, *deps:UOp) -> LdsTile: return replace(self, buffer=self.buffer.after(*deps))
  def number(self, i:UOp) -> LdsTile: return replace(self, base=i*LdsTile.size(self.rows, self.units, self.skew))
  def place(self, row:UOp) -> UOp: return self.base + row*(self.units | 1) + row//16*self.skew
  def load(self, row:UOp, unit:UOp) -> UOp: return self.buffer[self.place(row) + unit].load()
  def store(self, row:UOp, unit:UOp, value:UOp, gate:UOp) -> UOp: return self.buffer[(self.place(row) + unit).valid(gate)].store(value)
  def store_half(self, row:UOp, half:UOp, value:UOp, gate:UOp) -> UOp:
    """Stores 8 bytes at the `half`-th half unit of a row."""
    return self.buffer.bitcast(ops.u32(2))[(self.place(row)*2 + half).valid(gate)].store(value)
