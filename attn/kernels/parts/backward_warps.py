"""What the backward kernels for NVIDIA's matrix units share: what a warp's own rows have, queries or keys, and the stores of their gradients."""
from __future__ import annotations
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar
from attn.chips import Chip
from attn.chips.matrix import Mma
from attn.kernels.parts.counts import below, round_up
from attn.kernels.parts.epilogue import place_of_row
from attn.kernels.parts.gradients import PASSES, Exponent, exponent_of, scaled_delta, where_known
from attn.kernels.parts.lanes import element_sum
from attn.kernels.parts.layouts import CopiedLayout
from attn.kernels.parts.scores import Scores
from attn.kernels.parts.tensors import dkdv_arguments, dq_arguments
from attn.kernels.parts.warps import Warps, sum_over_quad
from attn.kernels.tiles.common import BlockTile
from attn.kernels.tiles.mma import fragments
from attn.ops import common as ops, nvidia as nv
from attn.ops.common import flat
from attn.problem import Problem
from attn.score.term import Row
from attn.tinygrad_compat import UOp

L = TypeVar("L", bound=CopiedLayout)
L_co = TypeVar("L_co", bound=CopiedLayout, covariant=True)

class WarpsTile(BlockTile, Protocol[L_co]):
  """What such a kernel's tile says besides."""
  @property
  def matrix(self) -> Mma: """Whose fragments a warp has."""
  @property
  def row_tiles(self) -> int: """Tiles of 16 rows of a warp."""
  @property
  def passes(self) -> int: """Over the queries, of a kernel that owns keys."""
  def layouts(self, p:Problem, rows:int) -> tuple[L_co, L_co]: """So many rows in shared memory, of q or k, and of do or v."""

@dataclass(frozen=True)
class WarpsBackward(Generic[L]):
  """A backward kernel of one problem, as a thread sees it: what is the same in all trips. `wanted`: what it accumulates, in this order."""
  warps: Warps
  tile: WarpsTile[L]
  state: Any      # at the start
  wanted: tuple[str, ...]
  new_state: ClassVar[Callable[..., Any]]      # of Warps, a tile and a number of accumulators
  own_tensors: ClassVar[tuple[str, str]]       # whose rows are the own ones

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

  # ***** shared memory: own rows, then tiles of those that are walked over *****
  def lies(self, name:str, rows:int, first:UOp|int) -> L:
    """So many rows of this tensor, where those of both that are alike begin with unit `first`."""
    of_d, of_dv = self.tile.layouts(self.p, rows)
    return of_d.at(first) if name in ("q", "k") else of_dv.at(first + of_d.size)
  def own(self, name:str) -> L:
    """Own rows of this tensor."""
    return self.lies(name, self.tile.block_m, 0)
  @property
  def own_size(self) -> int:
    """Units of all own rows."""
    return sum(x.size for x in self.tile.layouts(self.p, self.tile.block_m))
  def copies_of_own(self, s:Any) -> list[UOp]:
    group = self.warps.group
    return [x for name in self.own_tensors for x in self.warps.copies(group.operand_rows(name), s.shared, group.first_row, self.own(name))]

  def gradient(self, acc:UOp, name:str, rows:list[list[Row]], scale:float) -> list[UOp]:
    """The stores of a gradient, `scale` times what is in `acc`: 0 of keys beyond kv_lengths."""
    group, stores = self.warps.group, list[UOp]()
    for i, own in enumerate(rows):
      for r, row in enumerate(own):
        known = row.index < group.sequence.n_k if name != "dq" and self.p.kv_lengths else None
        parts = [where_known(known, ops.slice_(acc[j].load(), 2*r, 2), scale) for j in self.place(name, i)]
        columns = [(self.warps.at.h*self.mat.block + n*self.mat.N, part) for n, part in enumerate(parts)]
        stores += group.gradient(name, row, columns)
    return stores

@dataclass(frozen=True)
class QueriesOfWarps(WarpsBackward[L]):
  """Whose own rows are queries."""
  own_tensors = ("q", "do")

  @classmethod
  def of_dq(cls, p:Problem, arch:Chip, tile:WarpsTile[L], args:tuple[UOp, ...], dlse:bool, parts:int) -> Self:
    """A kernel of dq and delta."""
    warps = Warps.of(p, arch, tile, tile.matrix, args, dq_arguments(p, dlse, parts), parts)
    return cls(warps, tile, cls.new_state(warps, tile, fragments(p.D, tile.matrix)), ("dq",))

  def dq_kernel(self, kind:str, acc:UOp) -> UOp:
    """The kernel that ends in the stores of dq and delta."""
    p, stores = self.p, [*self.kept_deltas(), *self.gradient(acc, "dq", self.queries, self.p.softmax_scale)]
    return self.warps.group.gradient_kernel(kind, ("dq", "delta"), stores, p.flops//(p.D + p.Dv)*(2*p.D + p.Dv), self.tile.lds_bytes(p))

  @functools.cached_property
  def queries(self) -> list[list[Row]]:
    """A lane's, of each tile."""
    return [self.warps.queries(first) for first in self.in_block]

  @functools.cached_property
  def exponents(self) -> list[list[Exponent]]:
    return [[exponent_of(self.warps.group, row) for row in own] for own in self.queries]

  @functools.cached_property
  def deltas(self) -> list[list[UOp]]:
    return [[self.delta(first + self.mat.c_row(self.warps.at.lane, r), row) for r, row in enumerate(own)]
            for first, own in zip(self.in_block, self.queries)]

  def delta(self, in_block:UOp, row:Row) -> UOp:
    """rowsum(dO * O) - dLSE, over the lanes that share a query; of dO as dP is made of it, rounded to the inputs' dtype."""
    group, mat = self.warps.group, self.mat
    rows = (group.rows("o"), self.p.out_dtype), (group.operand_rows("do"), self.p.dtype)
    total = ops.splat(0.0, 4)
    for first in range(0, round_up(self.p.Dv, mat.K)//mat.unit, mat.groups):
      quads = [x.load_quads(group.first_row, self.tile.block_m, in_block, first + self.warps.at.h, dtype) for x, dtype in rows]
      for o, do in zip(*quads): total = ops.add(total, ops.mul(o, do))
    total = sum_over_quad(element_sum(total))
    return ops.sub(total, group.number("dlse", row)) if "dlse" in group.given else total

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
class KeysOfWarps(WarpsBackward[L]):
  """Whose own rows are keys, in a walk over the queries of `head`: a pass of the kernel."""
  head: UOp
  own_tensors = ("k", "v")

  @classmethod
  def passes(cls, p:Problem, arch:Chip, tile:WarpsTile[L], args:tuple[UOp, ...], parts:int) -> list[Self]:
    """Those of a kernel of dk and dv, which take turns in the same accumulators."""
    warps, of_passes = Warps.of_keys(p, arch, tile, tile.matrix, args, dkdv_arguments(p, parts), parts), PASSES[tile.passes]
    accs = {name: fragments(width, tile.matrix) for name, width in (("dk", p.D), ("dv", p.Dv))}
    state = cls.new_state(warps, tile, max(sum(accs[name] for name in names) for names in of_passes))
    return [cls(warps, tile, state, names, warps.group.first_head) for names in of_passes]

  @functools.cached_property
  def keys(self) -> list[list[Row]]:
    """A lane's, of each tile."""
    group = self.warps.group
    there = group.sequence.n_k if self.p.varlen else self.p.Sk
    numbers = [[group.first_row + first + self.mat.c_row(self.warps.at.lane, r) for r in range(nv.ROWS)] for first in self.in_block]
    return [[Row(group.batch, self.head, key, below(key, there)) for key in own] for own in numbers]

  @property
  def scores(self) -> Scores:
    """Those of the head's queries."""
    return self.warps.group.scores.of_head(self.head)

  def gradients(self, acc:UOp) -> list[UOp]:
    """The stores of what is wanted."""
    return [x for name in self.wanted for x in self.gradient(acc, name, self.keys, self.p.softmax_scale if name == "dk" else 1.0)]
