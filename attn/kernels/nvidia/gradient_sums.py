"""The fp32 accumulator of dQ in memory, to which all blocks that own keys add, and two small kernels. One runs before the blocks add: it computes
delta and sets the accumulator to 0. The other runs after them: it turns the accumulator into dq.

The accumulator lies in tiles of 64 queries. A tile has four rows of C fragments, one for each 16 queries. The four numbers that a lane holds of a
fragment lie side by side, and the numbers of the next lane follow. So a warp adds its fragments to consecutive numbers."""
from __future__ import annotations
from collections.abc import Callable
from dataclasses import dataclass
from attn.chips import Chip
from attn.chips.matrix import MMA, Mma
from attn.kernels.nvidia.warp_gradients import WarpRows
from attn.kernels.nvidia.warps import Warps
from attn.kernels.parts.backward.turns import first_turns
from attn.kernels.parts.grid.tensors import QUERIES_OF_SUMS, Shapes, delta_arguments, dq_sums, finish_arguments
from attn.kernels.parts.grid.workgroup import Workgroup
from attn.kernels.parts.memory.layouts import SwizzledRows
from attn.kernels.tiles.mma import MmaBackwardTile, fragments
from attn.ops import nvidia as nv
from attn.ops.common import flat
from attn.problem import Problem
from attn.tinygrad_compat import UOp

def place_in_sums(group:Workgroup, mat:Mma, head:UOp, first_query:UOp, warp:UOp, fragment:UOp|int) -> UOp:
  """Returns the index, in the fp32 accumulator of dQ, of the first element of a C fragment of 16 queries and 8 columns. `first_query` is the first
  query of the tile, `warp` says which 16 queries of the tile, and `fragment` which columns."""
  p = group.p
  tile = (group.batch*p.H + head)*dq_sums(p)[0][1] + first_query//QUERIES_OF_SUMS
  row = tile*(QUERIES_OF_SUMS//mat.M) + warp
  return (row*fragments(p.D, mat) + fragment)*(mat.M*mat.N)

@dataclass(frozen=True)
class QueriesOfSums:
  """The 64 queries for which a block reads or writes the fp32 accumulator of dQ in memory. Each of the block's four warps has 16 of them."""
  rows: WarpRows[SwizzledRows]

  @staticmethod
  def of(p:Problem, arch:Chip, shapes:Shapes, args:tuple[UOp, ...]) -> QueriesOfSums:
    tile = MmaBackwardTile(1, MMA[p.dtype].K, MMA[p.dtype].K, QUERIES_OF_SUMS//MMA[p.dtype].M, matrix=MMA[p.dtype])
    warps = Warps.of(p, arch, tile, tile.matrix, args, shapes)
    return QueriesOfSums(WarpRows(warps, tile, (), warps.group.first_head))

  @property
  def group(self) -> Workgroup: return self.rows.warps.group
  def sums(self) -> list[UOp]:
    """Returns UOps that index the fp32 accumulator of dQ, at the sums that belong to this lane. Each is a vector of four sums; there is one vector
    for every 8 columns."""
    group, at, mat = self.group, self.rows.warps.at, self.rows.mat
    first = place_in_sums(group, mat, group.first_head, group.first_row, at.wave, 0)//4 + at.lane
    return [flat(group.given["dq_sums"]).bitcast(nv.F4)[first + i*(mat.M*mat.N//4)] for i in range(fragments(group.p.D, mat))]

def delta_kernel(p:Problem, arch:Chip, dlse:bool=False) -> Callable[..., UOp]:
  """Returns the kernel that computes delta and sets the fp32 accumulator of dQ to 0. The kernel takes the tensors of `tensors.delta_arguments(p,
  dlse)`, in this order. `dlse` says whether lse has a gradient."""
  def kernel(*args:UOp) -> UOp:
    x = QueriesOfSums.of(p, arch, delta_arguments(p, dlse), args)
    stores = [*x.rows.kept_deltas(), *[at.store(nv.zero(UOp.const(0))) for at in x.sums()], *first_turns(x.group, x.rows.warps.at.thread)]
    return x.group.gradient_kernel("backward_delta_wgmma", ("delta",), stores, 2*p.rows*p.Dv)
  return kernel

def finish_kernel(p:Problem, arch:Chip) -> Callable[..., UOp]:
  """Returns the kernel that turns the fp32 accumulator of dQ into dq: multiplies it by softmax_scale and rounds it. The kernel takes the tensors of
  `tensors.finish_arguments(p)`, in this order."""
  def kernel(*args:UOp) -> UOp:
    x = QueriesOfSums.of(p, arch, finish_arguments(p), args)
    sums, scale = [at.load() for at in x.sums()], UOp.const(p.softmax_scale)
    stores = [store for r, row in enumerate(x.rows.of_lane[0]) for store in x.group.gradient("dq", row, x.rows.warps.columns(sums, r, scale, None))]
    return x.group.gradient_kernel("backward_finish_wgmma", ("dq",), stores, p.rows*p.D)
  return kernel
