"""The gradients of q, k and v in plain UOps: for every device that tinygrad renders for, as `tiled` is.

With P = exp(S - lse), dP = dO V^T, delta = rowsum(dO * O) - dLSE and dS = P * (dP - delta): dV = P^T dO, dQ = softmax_scale * dS K,
dK = softmax_scale * dS^T Q (FlashAttention-2, arXiv 2307.08691, algorithm 2). Of two kernels one owns queries and walks over the keys, and the other
owns keys and walks over the queries, of one after another of the heads that share the keys. To threads in a rectangle (parts/rectangle.py) both are
the same: scores are products of what is walked over with the own rows, so are the dP, and what is wanted is summed with P or with dS as weights.
Nothing is summed across workgroups: the result is the same in every run.
"""
from __future__ import annotations
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from attn.chips import Chip
from attn.kernels.parts.blocks import trip_count
from attn.kernels.parts.counts import ceildiv
from attn.kernels.parts.dropout import kept_here
from attn.kernels.parts.epilogue import place_of_row
from attn.kernels.parts.gradients import (OF_KEYS, OF_QUERIES, WEIGHTED, Exponent, exact_exponent, exact_weights, gradients_of, less_delta,
                                          scaled_delta, where_known)
from attn.kernels.parts.lanes import element_sum
from attn.kernels.parts.rectangle import Portion, Rectangle, beyond_registers, grid_of
from attn.kernels.parts.rows import GlobalRows
from attn.kernels.parts.scores import Scores
from attn.kernels.parts.tensors import check_backward, dkdv_arguments, dq_arguments, log_sums
from attn.kernels.parts.workgroup import Workgroup
from attn.kernels.tiles.common import numbers_of_queries
from attn.kernels.tiles.plain import KEPT, QUAD, TiledBackwardTile
from attn.ops import common as ops
from attn.ops.common import flat
from attn.ops.plain import plain
from attn.problem import Problem, Shapes
from attn.score.term import Row
from attn.tinygrad_compat import AxisType, UOp, dtypes
from attn.values import FLOATS


def backward_dq_tiled(p:Problem, arch:Chip, tile:TiledBackwardTile, dlse:bool=False, parts:int=0) -> Callable[..., UOp]:
  """The kernel that computes dq, and delta for `backward_dkdv_tiled`, as a function of its placeholders: see `backward_dq.backward_dq`.

  Raises NotImplementedError for what `tensors.check_backward` names, and for rows of more than MAX_WIDTH elements."""
  return _program(p, arch, tile, ("dq",), dq_arguments(p, dlse, parts), parts)

def backward_dkdv_tiled(p:Problem, arch:Chip, tile:TiledBackwardTile, parts:int=0) -> Callable[..., UOp]:
  """The kernel that computes dk and dv, given that delta, as a function of its placeholders: see `backward_dkdv.backward_dkdv`.

  Raises as `backward_dq_tiled` does."""
  return _program(p, arch, tile, ("dk", "dv"), dkdv_arguments(p, parts), parts)

def _program(p:Problem, arch:Chip, tile:TiledBackwardTile, wanted:tuple[str, ...], names:Shapes, parts:int) -> Callable[..., UOp]:
  check_backward(p, tile)
  if (reason := beyond_registers(p)) is not None: raise NotImplementedError(reason)
  return functools.cache(lambda *args: plain(TiledBackward.of(p, arch, tile, args, wanted, names, parts).program()))

@dataclass(frozen=True)
class TiledBackward(Rectangle):
  """The kernel of one problem, as a thread sees it, of the queries of `head`. What it sums is in `sums`, in the order of `wanted`."""
  keys: bool           # whether its own rows are keys
  s: UOp               # S^T of some keys, or S of some queries
  dp: UOp              # dP of the same
  exponents: tuple[UOp, ...]      # of own queries: `high`, and of wide scores `low`
  minus_deltas: UOp
  sums: tuple[UOp, ...]
  wanted: tuple[str, ...]
  head: UOp

  @staticmethod
  def of(p:Problem, arch:Chip, tile:TiledBackwardTile, args:tuple[UOp, ...], wanted:tuple[str, ...], names:Shapes, parts:int) -> TiledBackward:
    rows, heads = (p.Sk, p.Hkv) if tile.keys else (p.Sq, p.H)
    grid, at = grid_of(p, arch, tile, ceildiv(rows, tile.block_m), p.B*heads)
    new, floats, quads = grid.allocator, tile.sections(p).floats, tile.own//QUAD
    memory = new.registers(floats) if tile.alone else new.lds(floats, dtypes.float)
    group = (Workgroup.of_keys if tile.keys else Workgroup.of)(p, arch, tile, args, grid, at, names, parts)
    columns = [tile.width(p.Dv if name == "dv" else p.D)//tile.down for name in wanted]
    group = replace(group, scores=replace(group.scores, natural=True))
    apart, some, s, dp, high, deltas, *sums = (new.registers(n*quads, ops.f32(QUAD))
                                               for n in (tile.walked, tile.columns, tile.walked, tile.walked, 1, 1, *columns))
    exponents = (high, new.registers(quads, ops.f32(QUAD))) if p.wide_scores else (high,)
    return TiledBackward(tile, new, group, at, memory, apart, some, tile.keys, s, dp, exponents, deltas, tuple(sums), wanted, group.first_head)

  # ***** whose rows *****
  @property
  def own(self) -> tuple[str, str]: return OF_KEYS if self.keys else OF_QUERIES
  @property
  def walked(self) -> tuple[str, str]: return OF_QUERIES if self.keys else OF_KEYS
  @property
  def part_scores(self) -> Scores: return super().part_scores.of_head(self.head) if self.keys else super().part_scores
  def rows(self, tensor:str) -> GlobalRows: return self.group.rows(tensor, self.head if self.keys and tensor in OF_QUERIES else None)
  def converted(self, tensor:str) -> Callable[[UOp], UOp]:
    """dO as the textbook has it, rounded to the inputs' dtype."""
    return lambda x: (x.cast(FLOATS[self.p.dtype]) if tensor == "do" else x).cast(dtypes.float)

  @functools.cached_property
  def own_rows(self) -> list[Row]:
    group, x = self.group, self.group.sequence
    numbers = [self.in_block(j) + i for j in self.quads for i in range(QUAD)]
    if not self.keys: return [group.row(n) for n in numbers]
    keys = [group.first_row + n for n in numbers]
    return [Row(group.batch, self.head, key, key < (x.n_k if self.p.varlen else self.p.Sk)) for key in keys]

  # ***** the algorithm *****
  def program(self) -> UOp:
    group, tile, items = self.group, self.tile, self.items
    began, ready, stores = [self.cleared(acc.after(*items)) for acc in self.sums], items, list[UOp]()
    if tile.keeps_own:
      kept = [self.carried(Portion(*x, group.first_row, UOp.const(0), tile.block_m), items) for x in zip(KEPT, self.own)]
      ready = [*ready, self.barrier(*kept)]
    if not self.keys:
      known, stores, ready = self.known(ready)
      began.append(known)
    done = self.after(*began).over_heads(ready)
    stores += [x for acc, name in zip(done.sums, done.wanted) for x in done.gradient(name, acc)]
    kind, names = ("backward_dkdv_tiled", ("dk", "dv")) if self.keys else ("backward_dq_tiled", ("dq", "delta"))
    flops = 2*self.p.flops if self.keys else self.p.flops//(self.p.D + self.p.Dv)*(2*self.p.D + self.p.Dv)
    return group.gradient_kernel(kind, names, stores, flops, tile.lds_bytes(self.p) if group.arch.unit.says_lds else 0)

  def after(self, *deps:UOp) -> TiledBackward:
    sums, exponents = (tuple(x.after(*deps) for x in registers) for registers in (self.sums, self.exponents))
    return replace(self, sums=sums, exponents=exponents, minus_deltas=self.minus_deltas.after(*deps))

  def over_heads(self, ready:list[UOp]) -> TiledBackward:
    """All that is walked over, of all heads that share the keys."""
    group = self.group
    if (count := trip_count(group.walked.end - group.walked.begin)) is None: return self
    r, heads = self.loop(group.walked_heads)
    of_head = replace(self.after(*heads), head=group.first_head + r) if heads else self
    trip = self.new.range(count, AxisType.LOOP)
    return self.after(of_head.after(trip).trip(group.walked.begin + trip, [*ready, *heads, trip]).end(trip).end(*heads))

  def trip(self, t:UOp, ready:list[UOp]) -> UOp:
    """What a tile adds to the sums."""
    done = self.weighed(t, ready)
    for acc, name in zip(self.sums, self.wanted): done = self.summed(acc, *WEIGHTED[name], t, [*ready, met := self.barrier(done)], [met])
    return done

  def weighed(self, t:UOp, ready:list[UOp]) -> UOp:
    """P and dS of a tile, to local memory."""
    tile, (part, loop) = self.tile, self.loop(self.tile.parts)
    t, ready = t*tile.parts + part, [*ready, *loop]
    s = self.product(self.s, self.walked[0], self.own[0], KEPT[0], t, ready)
    dp = self.product(self.dp, self.walked[1], self.own[1], KEPT[1], t, [*ready, self.barrier(s)])
    found, stores = self.weights([self.by_own_row([[x[i*len(self.quads) + j].load() for j in self.quads] for i in range(tile.walked)])
                                  for x in (s, dp)], t), list[UOp]()
    for name, columns in found.items():
      to = self.section(name, *ready, *loop)
      stores += [x for i, row in enumerate(self.by_walked_row(columns)) for j, y in enumerate(row)
                 for x in to.store_quad(part*tile.walked + self.own_row(i), self.in_block(j), y)]
    return UOp.group(*stores).end(*loop)

  def weights(self, found:list[list[list[UOp]]], t:UOp) -> dict[str, list[list[UOp]]]:
    """P, where it is wanted, and dS, of S and dP: for each own row vectors of what is walked over."""
    firsts = [t*self.part_scores.block_n + self.own_row(i) for i in range(0, self.tile.walked, QUAD)]
    left = [x for j in self.quads for x in kept_here(self.part_scores, self.own_rows[j*QUAD:(j + 1)*QUAD], firsts)]
    weights: dict[str, list[list[UOp]]] = {"p": [], "ds": []}
    of_walked = self.numbers_of_walked(firsts) if self.keys else None
    for i, (row, s, dp, kept) in enumerate(zip(self.own_rows, *found, left)):
      exponents, minus_delta = of_walked or self.numbers_of_own(i, len(firsts))
      p = exact_weights(self.part_scores, s, exponents, row, t, self.masked)
      if not kept.words: dp = [ops.add(x, y) for x, y in zip(dp, minus_delta)]
      weights["p"].append(kept.numbers(p.p))
      weights["ds"].append(gradients_of(p, less_delta(dp, kept, minus_delta)))
    return weights if self.keys else {"ds": weights["ds"]}

  def gradient(self, name:str, acc:UOp) -> list[UOp]:
    """The stores of a gradient: 0 of keys beyond kv_lengths."""
    n, (block, loop) = len(self.quads), self.loop(self.blocks(acc))
    part, stores = self.part(acc.after(*loop), block), list[UOp]()
    columns = self.by_own_row([[part[i*n + j].load() for j in self.quads] for i in range(len(part)//n)])
    for row, column in zip(self.own_rows, columns):
      known = row.index < self.group.sequence.n_k if self.keys and self.p.kv_lengths else None
      factor = 1.0 if name == "dv" else self.p.softmax_scale
      stores += self.group.gradient(name, row, [(block*self.tile.columns + self.own_row(k*QUAD), where_known(known, x, factor))
                                                for k, x in enumerate(column)])
    return [UOp.group(*stores).end(*loop)]

  # ***** the numbers of queries *****
  def numbers_of_own(self, i:int, vectors:int) -> tuple[list[Exponent], list[UOp]]:
    """(exponents, -delta) for the scores of the i-th own query."""
    delta, high, *low = (ops.splat(ops.extract(x[i//QUAD].load(), i%QUAD), QUAD) for x in (self.minus_deltas, *self.exponents))
    return [Exponent(low[0] if low else None, high)]*vectors, [delta]*vectors

  def numbers_of_walked(self, firsts:list[UOp]) -> tuple[list[Exponent], list[UOp]]:
    """The same for the scores of any own key, of quads of queries that begin with these."""
    def of_queries(name:str) -> list[list[UOp]]:
      rows = self.group.numbers(name, self.head)
      return [[rows.buffer[(rows.base + first + e).valid(first + e < rows.count)].load() for e in range(QUAD)] for first in firsts]
    of_lse, of_delta, *of_rest = map(of_queries, numbers_of_queries(self.p))
    exponents = [Exponent.joined([exact_exponent(self.p, *numbers) for numbers in zip(*quads)], ops.build) for quads in zip(of_lse, *of_rest)]
    return exponents, [ops.build(*[scaled_delta(x, self.p) for x in quad]) for quad in of_delta]

  def known(self, ready:list[UOp]) -> tuple[UOp, list[UOp], list[UOp]]:
    """Of own queries: the stores of their numbers to registers, those of delta to where it is kept, and what comes after that."""
    group, p, deltas = self.group, self.p, self.minus_deltas
    column, loop = self.loop(ceildiv(p.Dv, QUAD*self.tile.down))
    sums = deltas.after(self.zeroed(deltas.after(*ready)), *loop)
    first = (column*self.tile.down + self.at.h)*QUAD
    added = [x.store(ops.add(x.load(), ops.build(*[self.times(row, first) for row in self.own_rows[j*QUAD:(j + 1)*QUAD]])))
             for j, x in enumerate(self.each(sums))]
    done = UOp.group(*added).end(*loop)
    totals, ready = self.over_threads([x.load() for x in self.each(deltas.after(done))], ops.add, ready, done)
    delta = [ops.extract(totals[i//QUAD], i%QUAD) for i in range(len(self.own_rows))]
    if "dlse" in group.given: delta = [ops.sub(x, group.number("dlse", row)) for x, row in zip(delta, self.own_rows)]
    exponents = [exact_exponent(p, *[group.number(name, row) for name in log_sums(group.given)]).numbers for row in self.own_rows]
    numbers = dict(zip(self.exponents, zip(*exponents))) | {deltas: tuple(scaled_delta(x, p) for x in delta)}
    registers = [to.after(*ready)[j].store(ops.build(*x[j*QUAD:(j + 1)*QUAD])) for to, x in numbers.items() for j in self.quads]
    mine = self.at.h.eq(0) & group.is_first_part
    stores = [flat(group.given["delta"])[place_of_row(p, group.sequence, row)[0].valid(row.there & mine)].store(x)
              for row, x in zip(self.own_rows, delta)]
    return UOp.group(*registers), stores, ready

  def times(self, row:Row, first:UOp) -> UOp:
    """The part of rowsum(dO * O) that four elements of a query have; of dO as dP is made of it."""
    def elements(tensor:str) -> UOp:
      rows, convert = self.rows(tensor), self.converted(tensor)
      begin, inside = rows.start(UOp.const(0), row.index) + first, [first + (0 if rows.width % QUAD == 0 else i) < rows.width for i in range(QUAD)]
      return ops.build(*[convert(rows.buffer[(begin + i).valid(row.there & inside[i])].load()) for i in range(QUAD)])
    return element_sum(ops.mul(elements("o"), elements("do")))
