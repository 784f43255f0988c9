"""Flash attention forward for CDNA whose waves take turns: one half of the waves multiplies while the other half computes weights."""
from __future__ import annotations
from dataclasses import dataclass
from typing import Callable
from attn.chips import Chip
from attn.kernels.amd.forward import AmdForward, ForwardState
from attn.kernels.parts.grid.tensors import check_problem
from attn.kernels.parts.program.statements import Statements, load_all, store_all, workgroup_barrier
from attn.kernels.parts.program.trips import StagedTrips, over_tiles
from attn.kernels.parts.weights.dropout import Kept
from attn.kernels.tiles.amd import Tile
from attn.ops import amd, common as ops
from attn.problem import Problem
from attn.tinygrad_compat import UOp, dtypes

# This kernel does the steps of attn/kernels/amd/forward.py in another order. A workgroup has eight waves of 32 queries. The second four waves run one
# barrier behind the first four. Each SIMD runs one wave of each group: while one wave is in the first half of its loop iteration, the other wave is
# in the second half. K(t) and V(t) are the rows of tile t of keys, and S(t) and P(t) are the scores and weights of these keys:
#
#   weigh     turns S(t) into P(t) on the vector unit; stores K(t+2) and V(t+1) from registers to LDS; starts the loads of K(t+3) and V(t+2) from
#             global memory to registers
#   multiply  O += V(t) P(t) and S(t+1) = K(t+1) Q^T on the matrix unit
#
# A barrier ends each half. LDS holds three tiles of K and three of V. Both groups read a stored tile at least one barrier after its store. A store
# overwrites a tile at least one barrier after the last read of that tile. The kernel has no packed fp32 instructions: they would stop the matrix unit
# while the other half of the waves uses it (docs/tried.md).

TURN_WAVES, TURN_KEYS, BUFFERS = 8, 32, 3     # waves of a workgroup, keys of an iteration, tiles of K and of V in LDS
K_READ_AFTER = 1      # K is read from LDS after the product of this matrix tile of O: until then, reads of V use the ports of LDS

def staggered(p:Problem, arch:Chip, tile:Tile) -> Callable[..., UOp]:
  """Returns the kernel of problem `p` as a function of its tensors: (o, q, k, v), or with p.return_lse (o, lse, q, k, v)."""
  # for the problems for which `dispatch.staggered_refuses` returns None
  check_problem(p, tile)
  return lambda *args: Staggered.of(p, arch, tile, args).program()

@dataclass(frozen=True)
class StaggeredState(ForwardState):
  """What the kernel carries from one half of an iteration to the next: scores, the softmax, and registers with tiles that LDS gets next."""
  s: UOp            # S^T of the tile whose softmax comes next
  on_the_way: UOp   # parts of K and V tiles that are loaded to registers but not yet stored to LDS

@dataclass(frozen=True)
class Staggered:
  """Builder of the kernel that `staggered` returns: its methods make the UOps of half an iteration, as one thread runs them."""
  # no field changes during the loop over tiles of keys
  tile: Tile
  state: StaggeredState      # before the first iteration
  common: AmdForward         # the steps from which the two halves are built

  @staticmethod
  def of(p:Problem, arch:Chip, tile:Tile, args:tuple[UOp, ...]) -> Staggered:
    one = AmdForward.of(p, arch, tile, args)
    x, new = one.state, one.new
    parts = len(x.k.items) + 4*len(x.v.items)
    state = StaggeredState(x.softmax, x.k, x.v, new.registers(one.k_tiles, ops.f32(one.mat.accumulator)), new.registers(parts, ops.u32(4)))
    return Staggered(tile, state, one)

  @property
  def statements(self) -> Statements: return self.common.statements
  @property
  def trips(self) -> StagedTrips[ForwardState]: return self.common.trips

  # ***** the algorithm *****
  def program(self) -> UOp:
    group, second = self.common.group, ops.uniform(self.common.at.wave.cast(dtypes.int))//(TURN_WAVES//2)
    apart, start = self.statements.do(amd.fp32_apart()), self.state.softmax.start(group.scores)
    s = self.first_tiles(self.state.after(apart, start), group.walked.begin)
    s = s.after(self.statements.do(amd.barrier_of(second, s.s[0].load())))                    # only the second group waits: it is now one behind
    s = over_tiles(s, group.walked, self.common.new, self.trip)
    s = s.after(self.statements.do(amd.barrier_of(1 - second, s.softmax.acc[0].load())))
    return group.kernel("staggered", self.common.outputs(s.softmax))

  def first_tiles(self, s:StaggeredState, begin:UOp) -> StaggeredState:
    """Brings the first tiles of K and V to LDS, computes the scores of tile `begin`, and returns the state."""
    # two tiles of K and one of V; then the loads of the third tile of K and the second tile of V start
    rows = self.trips.loaded
    stores = [x for name, t in (("k", begin), ("k", begin + 1), ("v", begin))
              for x in self.trips.in_lds(s, t, name).store(getattr(s, name).fetch(rows[name], t))]
    s = s.after(workgroup_barrier(UOp.group(*stores)))
    return s.after(self.load(s, begin), UOp.group(*store_all(s.s, self.common.raw_scores(s, begin)[0])))

  def trip(self, s:StaggeredState, t:UOp, masked:bool) -> UOp:
    s, first = self.weigh(s, t, masked)
    return self.multiply(s, t, first, renewed=not masked)

  # ***** the two halves of an iteration *****
  def weigh(self, s:StaggeredState, t:UOp, masked:bool) -> tuple[StaggeredState, list[UOp]]:
    """Computes P of tile t, the first half of iteration t; returns (state, the first columns of V as operand A)."""
    # Also stores the tiles of K and V that are in registers to LDS, and starts the loads of the tiles after them. Before the barrier that ends this
    # half, the columns of V of tile t for the first matrix tile of O are read from LDS.
    one = self.common
    raw = load_all(s.s)
    softmax = one.weighed(s.softmax, [one.group.scores.finished(raw, [one.queries[0]], t, masked)])
    stores = self.store(s, t)
    following = self.load(s.after(self.statements.do(amd.sched_barrier(), *stores)), t + 1)
    first = one.products.column_operands(self.trips.in_lds(s, t, "v").column_tile, self.tile.block_n, 0)
    done = self.statements.do(amd.made_here(*load_all(softmax.p)))
    halfway = workgroup_barrier(UOp.group(done, *stores, following, self.statements.do(amd.sched_barrier(*first))))
    return StaggeredState(softmax, s.k, s.v, s.s, s.on_the_way).after(halfway), first

  def multiply(self, s:StaggeredState, t:UOp, first:list[UOp], renewed:bool) -> UOp:
    """Adds V P of tile t to O and computes the scores of tile t+1, the second half of iteration t; returns the last operation."""
    # `first` holds the columns of V for the first matrix tile of O, which `weigh` has read; `renewed`: see `fragment_operands`
    one = self.common
    weights = s.softmax.operands(one.at, 0, one.k_tiles, Kept(one.at), renewed)
    accs = [s.softmax.acc[i].load() for i in range(one.d_tiles)]
    o_tiles = one.products.with_columns(self.trips.in_lds(s, t, "v").column_tile, self.tile.block_n, [weights], [accs], first)[0]
    fence = self.statements.do(amd.sched_barrier(o_tiles[min(K_READ_AFTER, len(o_tiles) - 1)]))
    scores = one.raw_scores(s.lds_after(fence), t + 1)[0]
    made = self.statements.do(amd.made_here(*o_tiles, *scores))
    return workgroup_barrier(UOp.group(made, *store_all(s.softmax.acc, o_tiles), *store_all(s.s, scores)))

  # ***** tiles, from global memory to LDS *****
  def load(self, s:StaggeredState, t:UOp) -> UOp:
    """Starts the loads of K of tile t+2 and of V of tile t+1 from global memory to registers, and returns the last operation."""
    parts = [*s.k.fetch(self.trips.loaded["k"], t + 2), *s.v.fetch(self.trips.loaded["v"], t + 1)]
    return UOp.group(self.statements.do(amd.sched_barrier(*parts)), *[s.on_the_way[i].store(x) for i, x in enumerate(parts)])

  def store(self, s:StaggeredState, t:UOp) -> list[UOp]:
    """Returns the stores of K of tile t+2 and of V of tile t+1 from registers to LDS."""
    parts, of_k = load_all(s.on_the_way), len(s.k.items)
    return [*self.trips.in_lds(s, t + 2, "k").store(parts[:of_k]), *self.trips.in_lds(s, t + 1, "v").store(parts[of_k:])]
