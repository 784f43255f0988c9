"""AMD's fp32 sums of dQ in memory, and two kernels: one computes delta and sets these sums to 0, the other turns them into dq."""
from __future__ import annotations
from collections.abc import Callable
from attn.chips import Chip
from attn.chips.matrix import Int, Matrix, contraction
from attn.kernels.parts.backward.turns import first_turns
from attn.kernels.parts.grid.tensors import Shapes, delta_arguments, finish_arguments
from attn.kernels.parts.grid.workgroup import Workgroup, head_fastest
from attn.kernels.parts.memory.lanes import Lane, element_sum, sum_over_groups, units_of
from attn.kernels.parts.weights.epilogue import place_of_row
from attn.kernels.tiles.amd import BackwardTile, matrix_of_dq
from attn.kernels.tiles.common import QUERIES_OF_SUMS
from attn.ops import common as ops
from attn.ops.common import flat
from attn.problem import Problem
from attn.score.term import Row
from attn.tinygrad_compat import UOp

# Between these two kernels, workgroups that own keys add what their keys contribute to dQ. The accumulator is stored in matrix tiles, row by row of
# tiles. A wave adds a C fragment to a matrix tile, one register at a time. So a matrix tile lies in memory as follows: first the numbers that the
# first registers of all lanes add to, then those of the second registers, and so on. Neighbouring lanes then add to neighbouring numbers.

NUMBERS_OF_PIECE = 4      # neighbouring elements of a row of dQ that a thread reads or writes

def place_of_tile(group:Workgroup, mat:Matrix, head:UOp, first_query:UOp, column:Int) -> UOp:
  """Returns the index in dq_sums, the fp32 sums of dQ in memory, at which a matrix tile of query head `head` begins."""
  # `first_query`, the tile's first query, is a multiple of mat.M; `column` is the index of the tile in its row of tiles
  return (group.first_sums(head)*QUERIES_OF_SUMS + first_query)*group.p.D + column*(mat.M*mat.N)

def delta_of_row(group:Workgroup, tile:BackwardTile, in_block:UOp, row:Row, together:list[list[UOp]], fence:Callable[[UOp], list[UOp]]) -> UOp:
  """Returns delta of the query `row`: the sum of dO * O over all columns, minus the gradient of the query's lse, if there is one."""
  # `in_block` is the query's index in the workgroup's block. `together` lists the lane's 16-byte units of dO in groups; the units of a group are
  # loaded at the same time. `fence` takes the sum over the groups so far, and returns the operations that must be done before the next group is
  # loaded.
  mat = tile.matrix
  rows, total = ((group.rows_of("o"), group.p.out_dtype), (group.operand_rows("do"), group.p.dtype)), ops.splat(0.0, mat.unit)
  for some in together:
    before = fence(total)
    for u in some:
      o, do = (x.after(*before).load_floats(group.first_row, tile.block_m, in_block, u, mat.unit, dtype) for x, dtype in rows)
      total = ops.add(total, ops.mul(o, do))
  total = element_sum(total)
  if not mat.duplicated: total = sum_over_groups(total, mat)
  return ops.sub(total, group.query_value("dlse", row)) if "dlse" in group.given else total

def of_queries(p:Problem, arch:Chip, shapes:Shapes, args:tuple[UOp, ...]) -> tuple[Workgroup, BackwardTile, Lane]:
  """Returns (workgroup, its tile description, this thread's position in a matrix tile) for kernels whose workgroups own queries."""
  # the kernels that compute delta and finish dQ; `shapes` has the names, shapes and dtypes of the tensors `args`, in the same order
  mat = arch.matrix[p.dtype][0]
  tile = BackwardTile(QUERIES_OF_SUMS//mat.N, mat.least_keys, matrix=mat)
  grid = head_fastest(p, tile, mat, arch)
  at = Lane(grid.lane, grid.wave, mat)
  return Workgroup.of(p, arch, tile, args, grid, at, shapes), tile, at

def pieces(group:Workgroup, tile:BackwardTile) -> list[tuple[UOp, UOp]]:
  """Returns (row, first column) of each group of four neighbouring elements of dQ that this thread loads or stores."""
  across = group.p.D//NUMBERS_OF_PIECE
  numbers = [group.thread + i*tile.threads for i in range(QUERIES_OF_SUMS*across//tile.threads)]
  return [(i//across, i%across*NUMBERS_OF_PIECE) for i in numbers]

def sums_at(group:Workgroup, mat:Matrix, row:UOp, column:UOp) -> UOp:
  """Returns four neighbouring elements of row `row`, from column `column` on, in dq_sums (fp32 sums of dQ), to load from or store to."""
  # `row` is counted from the workgroup's first query
  tile = place_of_tile(group, mat, group.first_head, group.first_row + row//mat.M*mat.M, column//mat.N)
  in_lane = mat.column_of(row%mat.M)
  element, h = in_lane%mat.accumulator, in_lane//mat.accumulator
  return flat(group.given["dq_sums"]).bitcast(ops.f32(NUMBERS_OF_PIECE))[(tile + element*mat.wave + h*mat.N + column%mat.N)//NUMBERS_OF_PIECE]

def amd_delta_kernel(p:Problem, arch:Chip, dlse:bool=False) -> Callable[..., UOp]:
  """Returns the kernel that computes delta and sets dq_sums, the fp32 sums of dQ in memory, to 0."""
  # it takes the tensors of `tensors.delta_arguments(p, dlse)`, in this order; `dlse`: whether lse has a gradient
  def kernel(*args:UOp) -> UOp:
    group, tile, at = of_queries(p, arch, delta_arguments(p, dlse), args)
    in_block = at.wave*tile.matrix.N + at.n
    row = group.row(in_block)
    delta = delta_of_row(group, tile, in_block, row, [units_of(tile.matrix, contraction(tile.matrix, p.Dv), at.h)], lambda _: [])
    number = place_of_row(p, group.sequence, row)[0]
    stores = [flat(group.given["delta"])[number.valid(row.there & at.h.eq(0))].store(delta)]
    stores += [sums_at(group, matrix_of_dq(p, arch), *piece).store(ops.splat(0.0, NUMBERS_OF_PIECE)) for piece in pieces(group, tile)]
    stores += first_turns(group, at.thread)
    return group.gradient_kernel("backward_delta", ("delta",), stores, 2*p.rows*p.Dv)
  return kernel

def amd_finish_kernel(p:Problem, arch:Chip) -> Callable[..., UOp]:
  """Returns the kernel that turns dq_sums, the fp32 sums of dQ in memory, into dq: multiplies by softmax_scale and rounds."""
  # it takes the tensors of `tensors.finish_arguments(p)`, in this order
  def kernel(*args:UOp) -> UOp:
    group, tile, _ = of_queries(p, arch, finish_arguments(p), args)
    sums = [(row, column, sums_at(group, matrix_of_dq(p, arch), row, column).load()) for row, column in pieces(group, tile)]
    stores = [x for row, column, values in sums for x in group.gradient("dq", group.row(row), [(column, ops.mul(values, p.softmax_scale))])]
    return group.gradient_kernel("backward_finish", ("dq",), stores, p.rows*p.D)
  return kernel
