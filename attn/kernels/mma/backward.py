"""Backward with NVIDIA's mma.sync (sm_80 and later): each tile's scores, P and dS, and the sums of dQ, dK and dV. Begin with `MmaTrip`."""
from __future__ import annotations
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from attn.chips import Chip
from attn.chips.matrix import UNIT_BYTES, Mma
from attn.kernels.nvidia.ring import CopyGroups
from attn.kernels.nvidia.warp_gradients import Lse, OwnQueryValues, WarpRows, WarpTrip
from attn.kernels.nvidia.warps import Warps
from attn.kernels.parts.backward.gradients import (WEIGHTED, Normaliser, dp_start, gradients_of_passes, kinds_of_normalisers, less_delta,
                                                   shared_query_values)
from attn.kernels.parts.grid.tensors import Shapes
from attn.kernels.parts.grid.workgroup import Workgroup
from attn.kernels.parts.memory.layouts import SwizzledRows
from attn.kernels.parts.program.blocks import Blocks
from attn.kernels.parts.program.statements import Statements, store_all
from attn.kernels.parts.program.trips import over_tiles
from attn.kernels.tiles.common import query_value_names
from attn.kernels.tiles.mma import MmaBackwardTile, fragments
from attn.ops import nvidia as nv
from attn.problem import Problem
from attn.tinygrad_compat import AxisType, UOp, dtypes

# A thread block owns queries and loops over tiles of keys, or owns keys and loops over tiles of queries. Each of its warps owns 16 or 32 of these
# rows, the own rows. The rows of the tiles are the walked rows. Shared memory holds Q and dO of the queries, and K and V of the keys. The own rows
# stay there. The tiles of walked rows are copied by cp.async into a ring buffer, with one barrier in each iteration. A tile in shared memory is read
# in two ways: as operand B of products that sum over the elements of its rows, and, transposed by ldmatrix, as operand B of products that sum over
# its rows. A row of P and dS belongs to an own row; if the own rows are keys, these matrices are P^T and dS^T. P and dS are operand A of the
# gradients' products and never leave their lanes. If the own rows are keys, the lse and delta of queries belong to columns of the scores: they are
# copied to shared memory with the tile.

@dataclass(frozen=True)
class MmaBackwardState(CopyGroups):
  """The values that the loop over tiles carries from iteration to iteration: contents of shared memory, sums of gradients, lse and delta."""
  shared: UOp
  acc: UOp            # accumulators of the gradients
  query_values: UOp   # lse and delta of the next tile's queries, until they are stored to shared memory
  statements: Statements

  @staticmethod
  def of(warps:Warps, tile:MmaBackwardTile, accs:int) -> MmaBackwardState:
    """Makes the state, with `accs` accumulators for each 16 rows that a warp owns."""
    new = warps.group.grid.allocator
    return MmaBackwardState(new.lds(tile.lds_bytes(warps.group.p)//UNIT_BYTES), new.registers(tile.row_tiles*accs, nv.F4),
                            new.registers(len(query_value_names(warps.group.p))*tile.carried), Statements.of(new))

MmaWork = Callable[[MmaBackwardState, "MmaTrip"], MmaBackwardState]

@dataclass(frozen=True)
class MmaBackward:
  """Builder of a backward kernel with mma.sync for one problem: its methods return the UOps of the kernel's steps, as one thread runs them."""
  # if the kernel loops over the tiles twice (two passes), there is one object for each pass; no field changes during the loop over the tiles of one
  # head
  warp_rows: WarpRows[SwizzledRows]
  tile: MmaBackwardTile
  state: MmaBackwardState      # before the first iteration
  known: OwnQueryValues|None = None      # lse and delta of the own queries; None if keys are owned

  @staticmethod
  def of_queries(p:Problem, arch:Chip, tile:MmaBackwardTile, args:tuple[UOp, ...], shapes:Shapes, parts:int) -> MmaBackward:
    warps = Warps.of(p, arch, tile, tile.matrix, args, shapes, parts)
    state = MmaBackwardState.of(warps, tile, fragments(p.D, tile.matrix))
    rows: WarpRows[SwizzledRows] = WarpRows(warps, tile, ("dq",), warps.group.first_head)
    return MmaBackward(rows, tile, state, OwnQueryValues(rows.normalisers, rows.deltas))

  @staticmethod
  def of_keys(p:Problem, arch:Chip, tile:MmaBackwardTile, args:tuple[UOp, ...], shapes:Shapes, parts:int) -> list[MmaBackward]:
    # Two passes use the same accumulators.
    warps, passes = Warps.of_keys(p, arch, tile, tile.matrix, args, shapes, parts), gradients_of_passes(tile.passes)
    accs = {name: fragments(width, tile.matrix) for name, width in (("dk", p.D), ("dv", p.Dv))}
    state = MmaBackwardState.of(warps, tile, max(sum(accs[name] for name in wanted) for wanted in passes))
    return [MmaBackward(WarpRows(warps, tile, wanted, warps.group.first_head), tile, state) for wanted in passes]

  # ***** rows *****
  @property
  def group(self) -> Workgroup: return self.warp_rows.warps.group
  @property
  def wanted(self) -> tuple[str, ...]: return self.warp_rows.wanted

  # ***** shared memory *****
  def stage(self, t:UOp) -> UOp: return t%self.tile.stages*self.tile.stage(self.group.p) + self.warp_rows.size
  def walked(self, name:str, t:UOp) -> SwizzledRows:
    """Returns the layout, in the ring buffer, of the rows of tensor `name` in tile t of the loop."""
    return self.warp_rows.layout_of(name, self.tile.block_n, self.stage(t))
  def place_of_query_values(self, t:UOp) -> UOp:
    """Returns the index of the 16-byte unit of shared memory at which lse and delta of the queries of tile t begin."""
    return self.stage(t) + sum(x.size for x in self.tile.layouts(self.group.p, self.tile.block_n))

  # ***** the loop over tiles *****
  def cleared(self, s:MmaBackwardState) -> MmaBackwardState:
    return s.store([s.statements.first], store_all(s.acc, [nv.zero(UOp.const(0.0, dtypes.float))]*s.acc.max_numel()))

  def begin(self, s:MmaBackwardState|None=None, stores:list[UOp]|None=None) -> MmaBackwardState:
    if s is not None: return self.cleared(s.after(UOp.group(*(stores or []))))
    s = self.cleared(self.state)
    return s.started(self.warp_rows.copies(s.shared))

  def walk(self, s:MmaBackwardState, work:MmaWork) -> MmaBackwardState:
    def over_head(one:MmaBackward, s:MmaBackwardState) -> MmaBackwardState:
      s = one.over_tiles(s, self.group.walked, work)
      return s.arrived(0) if self.tile.keys else s      # the next head begins when all copies and reads of this head are done
    if (heads := self.group.walked_heads) == 1: return over_head(self, s)
    r = self.group.grid.allocator.range(heads, AxisType.LOOP)
    of_head = replace(self, warp_rows=self.warp_rows.of_head(self.group.first_head + r))
    return s.after(over_head(of_head, s.after(r)).done.end(r))

  def over_tiles(self, s:MmaBackwardState, tiles:Blocks, work:MmaWork) -> MmaBackwardState:
    for i in range(self.tile.stages - 1): s = self.settle(self.fetch(s, tiles.begin + i), tiles.begin + i)
    def trip(s:MmaBackwardState, t:UOp, masked:bool) -> UOp:
      ahead = t + self.tile.stages - 1
      s = self.fetch(s.arrived(self.tile.stages - 2), ahead)
      return self.settle(self.over_parts(s, t, masked, work), ahead).done
    return over_tiles(s, tiles, self.group.grid.allocator, trip)

  def over_parts(self, s:MmaBackwardState, t:UOp, masked:bool, work:MmaWork) -> MmaBackwardState:
    """Calls `work(state, steps)` for each part of tile t, one after another to save registers, and returns the last state."""
    # `trip` has the operations on a part; parts take fewer registers than a whole tile; `masked`: whether masks may hide scores of the tile
    parts, score = self.tile.block_n//self.tile.part_n, replace(self.warp_rows.scores, block_n=self.tile.part_n)
    for part in range(parts): s = work(s, MmaTrip(self.warp_rows, score, t*parts + part, masked, self, t, part))
    return s

  def fetch(self, s:MmaBackwardState, t:UOp) -> MmaBackwardState:
    """Starts the copies of tile t, with lse and delta of its queries, and returns the state."""
    group, n, head = self.group, self.tile.block_n, self.warp_rows.head
    first = group.scores.row(t*n)
    # lse and delta come to registers first (`settle`)
    if self.tile.keys:
      numbers = [[group.query_value_rows(name, head).load_number(first, n, i, i < n) for i in self.carried] for name in query_value_names(group.p)]
      found = zip(*[shared_query_values(group.p, *of_query) for of_query in zip(*numbers)])
      s = s.store(store_all(s.query_values, [x for kind in found for x in kind]))
    of_tile = {name: self.warp_rows.walked_rows(name, head, group.walked_end) for name in self.warp_rows.walked}
    return s.started([x for name, rows in of_tile.items() for x in self.warp_rows.warps.copies(rows, s.shared, first, self.walked(name, t))])

  def settle(self, s:MmaBackwardState, t:UOp) -> MmaBackwardState:
    """Stores lse and delta of the queries of tile t from registers to shared memory, and returns the state."""
    if not self.tile.keys: return s
    to, n = s.shared.bitcast(dtypes.float), self.tile.block_n
    places = [(kind*n + i, i < n) for kind in range(len(query_value_names(self.group.p))) for i in self.carried]
    return s.do(*[nv.put(to[self.place_of_query_values(t)*4 + place], s.query_values[j].load(), there) for j, (place, there) in enumerate(places)])

  @property
  def carried(self) -> list[UOp]:
    """Indices, in a tile of queries, of the queries whose lse and delta this thread copies to shared memory."""
    return [self.warp_rows.warps.at.thread + i*self.tile.threads for i in range(self.tile.carried)]

  # ***** gradients, and the kernel *****
  def gradient(self, s:MmaBackwardState, name:str) -> list[UOp]: return self.warp_rows.gradient(s.acc, name)
  def deltas(self, s:MmaBackwardState) -> list[UOp]: return self.warp_rows.kept_deltas()
  def kernel(self, name:str, cleared:tuple[str, ...], stores:list[UOp], count:int) -> UOp:
    return self.group.gradient_kernel(f"backward_{name}_mma", cleared, stores, count, self.tile.lds_bytes(self.group.p))

@dataclass(frozen=True)
class MmaTrip(WarpTrip[SwizzledRows]):
  """The steps of a backward kernel on one part of tile `t`: on `part_n` of its rows."""
  # parts take fewer registers than a whole tile
  of: MmaBackward
  t: UOp
  part: int

  @property
  def mat(self) -> Mma: return self.of.tile.matrix
  def query_values(self, s:MmaBackwardState, kind:int) -> list[UOp]:
    """Loads a number for each query in this part of a tile, as vectors for C fragments: -delta for `kind` 1, one of two numbers made from lse for 0
    or 2."""
    # The numbers lie in shared memory. 1 is -delta. The others are the two numbers of the query's `Normaliser`, which turns scores into P: 0 is
    # `low`, and 2 is `high`, which only some problems have.
    pairs, tile = s.shared.bitcast(nv.F2), self.of.tile
    first = self.of.place_of_query_values(self.t)*2 + (kind*tile.block_n + self.part*tile.part_n)//2 + self.warp_rows.warps.at.h
    return [pairs[first + n*self.mat.N//2].load() for n in self.columns]

  def product(self, s:MmaBackwardState, which:int, start:list[list[UOp]]) -> list[list[UOp]]:
    """Returns `start` + A B as C fragments, where A B is S (`which` 0) or dP (1)."""
    # A is the rows that the block owns, and B the rows of this iteration's part of a tile, transposed. `start` and the result have a list of C
    # fragments for each tile of own rows.
    mat, tiles, first, row_tiles = self.mat, [list(row) for row in start], self.part*self.of.tile.part_n, range(self.of.tile.row_tiles)
    own, tile = self.warp_rows.kept(self.warp_rows.own[which]), self.of.walked(self.warp_rows.walked[which], self.t)
    (a_row, a_unit), (b_row, b_unit) = mat.a_address(self.warp_rows.warps.at.lane), mat.b_address(self.warp_rows.warps.at.lane)
    for step in range(own.units*mat.unit//mat.K):
      a = [s.read(own, self.warp_rows.in_block[0] + a_row, a_unit, i*mat.M, 2*step) for i in row_tiles]
      for pair in range(self.of.tile.part_n//mat.K):
        b = s.read(tile, b_row, b_unit, first + pair*mat.K, 2*step)
        for i, half in itertools.product(row_tiles, range(2)):
          tiles[i][2*pair + half] = nv.mma(mat, a[i], b, half, tiles[i][2*pair + half])
    return tiles

  # ***** the steps that WarpTrip does not define *****
  def start(self, s:MmaBackwardState) -> MmaBackwardState: return s
  def lse(self, s:MmaBackwardState) -> Lse:
    if self.of.known is not None: return self.lse_of_own(self.of.known)
    return self.lse_of_walked([Normaliser(*xs) for xs in zip(*[self.query_values(s, kind) for kind in kinds_of_normalisers(self.warp_rows.p)])])
  def scores(self, s:MmaBackwardState) -> tuple[MmaBackwardState, list[list[UOp]]]:
    return s, self.product(s, 0, [[nv.zero(s.done)]*len(self.columns) for _ in self.warp_rows.of_lane])
  def dp(self, s:MmaBackwardState) -> tuple[MmaBackwardState, list[list[UOp]]]:
    known = self.of.known
    minus_delta = self.minus_delta_of_own(known) if known is not None else self.minus_delta_of_walked(self.query_values(s, 1))
    dp = self.product(s, 1, [dp_start(x, left) for x, left in zip(minus_delta, self.left)])
    return s, [less_delta(x, left, delta) for x, left, delta in zip(dp, self.left, minus_delta)]

  def add(self, s:MmaBackwardState, name:str, p_or_ds:list[list[UOp]]) -> MmaBackwardState:
    mat, first, row_tiles = self.mat, self.part*self.of.tile.part_n, range(self.of.tile.row_tiles)
    tile, (row, unit) = self.of.walked(WEIGHTED[name][0], self.t), mat.b_transposed_address(self.warp_rows.warps.at.lane)
    accs = [[s.acc[j].load() for j in self.warp_rows.accumulators(name, i)] for i in row_tiles]
    for step, pair in itertools.product(range(self.of.tile.part_n//mat.K), range(self.warp_rows.accs(name)//2)):
      b = s.read(tile, row, unit, first + step*mat.K, 2*pair, transposed=True)
      for i, half in itertools.product(row_tiles, range(2)):
        accs[i][2*pair + half] = nv.mma(mat, p_or_ds[i][step], b, half, accs[i][2*pair + half])
    return s.store([s.acc[j].store(x) for i, xs in enumerate(accs) for j, x in zip(self.warp_rows.accumulators(name, i), xs)])
