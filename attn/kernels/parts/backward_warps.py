"""What the backward kernels for NVIDIA's matrix units share: what a warp's own rows have, queries or keys, and the stores of their gradients."""
from __future__ import annotations
import functools
from dataclasses import dataclass, replace
from typing import Any, Protocol
from attn.chips.matrix import Mma
from attn.kernels.parts.counts import round_up
from attn.kernels.parts.epilogue import place_of_row
from attn.kernels.parts.gradients import exponent, scaled_delta, where_known
from attn.kernels.parts.rows import flat
from attn.kernels.parts.scores import Row, Scores
from attn.kernels.parts.tiles import BlockTile
from attn.kernels.parts.warps import Warps, total_of
from attn.ops import common as ops, nvidia as nv
from attn.problem import Problem
from attn.tinygrad_compat import UOp

class WarpsTile(BlockTile, Protocol):
  """What such a kernel's tile says besides."""
  @property
  def matrix(self) -> Mma: """Whose fragments a warp has."""
  @property
  def row_tiles(self) -> int: """Tiles of 16 rows of a warp."""

def fragments(width:int, mat:Mma) -> int:
  """C fragments of a tile of rows that are so wide."""
  return round_up(width, mat.K)//mat.N

@dataclass(frozen=True)
class WarpsBackward:
  """A backward kernel of one problem, as a thread sees it: what is the same in all trips. `wanted`: what it accumulates, in this order."""
  warps: Warps
  tile: WarpsTile
  state: Any      # at the start
  wanted: tuple[str, ...]

  @property
  def mat(self) -> Mma: return self.tile.matrix
  @property
  def p(self) -> Problem: return self.warps.group.p
  @functools.cached_property
  def in_block(self) -> list[UOp]:
    """The first rows of the warp's tiles."""
    return [(self.warps.at.wave*self.tile.row_tiles + i)*self.mat.M for i in range(self.tile.row_tiles)]
  def accs(self, name:str) -> int:
    """Accumulators of a gradient, of a tile of rows."""
    return fragments(self.warps.group.rows(name).width, self.mat)
  def place(self, name:str, i:int=0) -> range:
    """Where those of the i-th tile are."""
    before = sum(map(self.accs, self.wanted[:self.wanted.index(name)]))
    first = i*sum(map(self.accs, self.wanted)) + before
    return range(first, first + self.accs(name))

  def gradient(self, acc:UOp, name:str, rows:list[list[Row]], scale:float) -> list[UOp]:
    """The stores of a gradient, `scale` times what is in `acc`: 0 of keys beyond kv_lengths."""
    group, stores = self.warps.group, list[UOp]()
    for i, own in enumerate(rows):
      for r, row in enumerate(own):
        known = row.index < group.sequence.n_k if name != "dq" and self.p.kv_lengths else None
        parts = [where_known(known, ops.slice_(acc[j].load(), 2*r, 2), scale) for j in self.place(name, i)]
        columns = [(n*self.mat.N + self.warps.at.h*self.mat.block, part) for n, part in enumerate(parts)]
        stores += group.gradient(name, row, columns)
    return stores

@dataclass(frozen=True)
class QueriesOfWarps(WarpsBackward):
  """Whose own rows are queries."""
  @functools.cached_property
  def queries(self) -> list[list[Row]]:
    """A lane's, of each tile."""
    return [self.warps.queries(first) for first in self.in_block]

  def number(self, name:str, row:Row) -> UOp:
    """Of lse or its like."""
    rows = self.warps.group.numbers(name, row.head)
    return rows.buffer[(rows.base + row.index).valid(row.there)].load()

  @functools.cached_property
  def exponents(self) -> list[list[UOp]]: return [[exponent(self.number("lse", row), self.p) for row in own] for own in self.queries]

  @functools.cached_property
  def deltas(self) -> list[list[UOp]]:
    return [[self.delta(first + self.mat.c_row(self.warps.at.lane, r), row) for r, row in enumerate(own)]
            for first, own in zip(self.in_block, self.queries)]

  def delta(self, in_block:UOp, row:Row) -> UOp:
    """rowsum(dO * O) - dLSE, over the lanes that share a query."""
    group, mat = self.warps.group, self.mat
    def quads(name:str, unit:UOp) -> list[UOp]:
      return group.rows(name).load_quads(group.first_row, self.tile.block_m, in_block, unit, group.p.out_dtype)
    total = ops.splat(0.0, 4)
    for first in range(0, round_up(self.p.Dv, mat.K)//mat.unit, mat.groups):
      for o, do in zip(*[quads(name, first + self.warps.at.h) for name in ("o", "do")]): total = ops.add(total, ops.mul(o, do))
    while (n := ops.length(total)) > 1: total = ops.add(ops.slice_(total, 0, n//2), ops.slice_(total, n//2, n//2))
    total = total_of(total, 0)
    return ops.sub(total, self.number("dlse", row)) if "dlse" in group.given else total

  def minus_deltas(self, i:int, columns:int) -> list[UOp]:
    """`scaled_delta` of the queries of the i-th tile, as so many C fragments."""
    return [ops.concat(*[ops.splat(scaled_delta(x, self.p), nv.ROWS) for x in self.deltas[i]])]*columns

  def kept_deltas(self) -> list[UOp]:
    """Their stores."""
    group = self.warps.group
    to, x, first = flat(group.given["delta"]), group.sequence, self.warps.at.h.eq(0) & group.is_first_part
    both = [pair for own, deltas in zip(self.queries, self.deltas) for pair in zip(own, deltas)]
    return [to[place_of_row(self.p, x, row)[0].valid(row.there & first)].store(delta) for row, delta in both]

@dataclass(frozen=True)
class KeysOfWarps(WarpsBackward):
  """Whose own rows are keys, in a walk over the queries of `head`."""
  head: UOp

  @functools.cached_property
  def keys(self) -> list[list[Row]]:
    """A lane's, of each tile."""
    group = self.warps.group
    there = group.sequence.n_k if self.p.varlen else self.p.Sk
    numbers = [[group.first_row + first + self.mat.c_row(self.warps.at.lane, r) for r in range(nv.ROWS)] for first in self.in_block]
    return [[Row(group.batch, self.head, key, key < there) for key in own] for own in numbers]

  @property
  def scores(self) -> Scores:
    """Those of the head's queries."""
    return replace(self.warps.group.scores, first=replace(self.warps.group.scores.first, head=self.head))

  def gradients(self, acc:UOp) -> list[UOp]:
    """The stores of what is wanted."""
    return [x for name in self.wanted for x in self.gradient(acc, name, self.keys, self.p.softmax_scale if name == "dk" else 1.0)]
