"""NVIDIA's fp32 sums of dQ in memory, and two kernels: one computes delta and sets these sums to 0, the other turns them into dq."""
from __future__ import annotations
from collections.abc import Callable
from dataclasses import dataclass
from attn.chips import Chip
from attn.chips.matrix import MMA, Mma
from attn.kernels.nvidia.warp_gradients import WarpRows
from attn.kernels.nvidia.warps import Warps
from attn.kernels.parts.backward.turns import first_turns, some_turn_ended
from attn.kernels.parts.grid.tensors import Shapes, delta_arguments, finish_arguments, set_by_first
from attn.kernels.parts.grid.workgroup import Workgroup
from attn.kernels.parts.memory.layouts import SwizzledRows
from attn.kernels.tiles.common import QUERIES_OF_SUMS, BlockTile
from attn.kernels.tiles.mma import MmaBackwardTile, fragments
from attn.ops import common as ops, nvidia as nv
from attn.ops.common import flat
from attn.problem import Problem
from attn.tinygrad_compat import Ops, UOp

# Between these two kernels, all blocks that own keys add to the accumulator. It lies in tiles of 64 queries. A tile has four rows of C fragments, one
# for each 16 queries. The four numbers that a lane holds of a fragment lie side by side, and the numbers of the next lane follow. So a warp adds its
# fragments to consecutive numbers.

def place_in_sums(group:Workgroup, mat:Mma, head:UOp, first_query:UOp, warp:UOp, fragment:UOp|int) -> UOp:
  """Returns the index in dq_sums, the fp32 sums of dQ in global memory, at which a warp's C fragment begins."""
  # `first_query` is the first query of the 64 that lie together in the accumulator, `warp` says which 16 of these queries, and `fragment` which 8
  # columns
  row = (group.first_sums(head) + first_query//QUERIES_OF_SUMS)*(QUERIES_OF_SUMS//mat.M) + warp
  return (row*fragments(group.p.D, mat) + fragment)*(mat.M*mat.N)

@dataclass(frozen=True)
class QueriesOfSums:
  """The fp32 sums of dQ of 64 queries that one block owns, 16 queries for each of four warps."""
  rows: WarpRows[SwizzledRows]

  @staticmethod
  def of(p:Problem, arch:Chip, shapes:Shapes, args:tuple[UOp, ...]) -> QueriesOfSums:
    tile = MmaBackwardTile(1, MMA[p.dtype].K, MMA[p.dtype].K, QUERIES_OF_SUMS//MMA[p.dtype].M, matrix=MMA[p.dtype])
    warps = Warps.of(p, arch, tile, tile.matrix, args, shapes)
    return QueriesOfSums(WarpRows(warps, tile, (), warps.group.first_head))

  @property
  def group(self) -> Workgroup: return self.rows.warps.group
  def places(self) -> list[UOp]:
    """Returns, for every 8 columns, the index in dq_sums (fp32 sums of dQ) of this lane's four elements, counted in vectors of four."""
    group, at, mat = self.group, self.rows.warps.at, self.rows.mat
    first = place_in_sums(group, mat, group.first_head, group.first_row, at.wave, 0)//4 + at.lane
    return [first + i*(mat.M*mat.N//4) for i in range(fragments(group.p.D, mat))]
  @property
  def sums(self) -> UOp:
    """dq_sums, the fp32 sums of dQ in memory, as vectors of four elements."""
    return flat(self.group.given["dq_sums"]).bitcast(nv.F4)
  def cleared(self) -> list[UOp]:
    """Returns the stores of 0 to this lane's elements of dq_sums, the fp32 sums of dQ in memory."""
    return [self.sums[i.valid(self.group.has_sums)].store(nv.zero(UOp.const(0))) for i in self.places()]
  def load(self, tile:BlockTile) -> list[UOp]:
    """Loads this lane's elements of dq_sums, the fp32 sums of dQ in memory: one vector of four for every 8 columns."""
    # All are 0 if the queries lie beyond the end of a packed sequence, or if no block has set the sums of these queries. `tile` describes the kernel
    # whose blocks add to the accumulator.
    group, there = self.group, self.group.has_sums
    if set_by_first(group.p): there = there & some_turn_ended(group, tile)
    if there.op is Ops.CONST: return [self.sums[i].load() for i in self.places()]
    return [ops.as_float(ops.load_where(self.sums[i], there, 16)) for i in self.places()]

def delta_kernel(p:Problem, arch:Chip, dlse:bool=False) -> Callable[..., UOp]:
  """Returns the kernel that computes delta and sets dq_sums, the fp32 sums of dQ in memory, to 0."""
  # it takes the tensors of `tensors.delta_arguments(p, dlse)`, in this order; `dlse`: whether lse has a gradient
  def kernel(*args:UOp) -> UOp:
    x = QueriesOfSums.of(p, arch, delta_arguments(p, dlse), args)
    # the first block that adds to sums may set them instead
    cleared = [] if set_by_first(p) else x.cleared()
    stores = [*x.rows.kept_deltas(), *cleared, *first_turns(x.group, x.rows.warps.at.thread)]
    return x.group.gradient_kernel("backward_delta_wgmma", ("delta",), stores, 2*p.rows*p.Dv)
  return kernel

def finish_kernel(p:Problem, arch:Chip, tile:BlockTile) -> Callable[..., UOp]:
  """Returns the kernel that turns dq_sums, the fp32 sums of dQ in memory, into dq: multiplies by softmax_scale and rounds."""
  # it takes the tensors of `tensors.finish_arguments(p)`, in this order; `tile` describes the kernel whose blocks add to the accumulator
  def kernel(*args:UOp) -> UOp:
    x = QueriesOfSums.of(p, arch, finish_arguments(p), args)
    sums, scale = x.load(tile), UOp.const(p.softmax_scale)
    stores = [store for r, row in enumerate(x.rows.of_lane[0]) for store in x.group.gradient("dq", row, x.rows.warps.columns(sums, r, scale, None))]
    return x.group.gradient_kernel("backward_finish_wgmma", ("dq",), stores, p.rows*p.D)
  return kernel
