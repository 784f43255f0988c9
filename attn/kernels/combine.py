"""Split-KV: key ranges of one head go to workgroups of their own, which leave partial results; one more kernel makes the result of them.

Where B*H heads of Sq queries make fewer workgroups than the chip has compute units, as in decoding, dividing the keys fills it (Flash-Decoding,
pytorch.org/blog/flash-decoding; the merge is that of FlashAttention-2, arXiv 2307.08691, section 2.3.1):

  p = resolve(p, arch, tile)                                        # chooses p.num_splits, G
  forward(p, arch, tile)(o_partial, lse_partial, q, k, v, ...)      # forward.arguments(p): normalised O and natural-log LSE of each range
  combine(p, arch, p.num_splits)(o, [lse,] o_partial, lse_partial, [sinks])

An empty range gives O = 0 and LSE = -inf, and so weighs nothing.
"""
from __future__ import annotations
import math
from dataclasses import replace
from typing import Callable
from attn.arch import Arch
from attn.kernels.blocks import strides
from attn.kernels import forward, forward_mma, forward_wgmma
from attn.kernels.forward import OPTIMISED, arguments, store_row
from attn.kernels.forward_mma import MmaTile
from attn.kernels.forward_wgmma import WgmmaTile
from attn.kernels.scores import LN2, LOG2E, NEG_INF
from attn.kernels.tiles import Tile, ceildiv, flat
from attn.operations import operations
from attn.problem import MAX_SPLITS, Problem
from attn.tinygrad_compat import AddrSpace, AxisType, Estimates, KernelInfo, UOp, dtypes

THREADS = 256       # of a workgroup of `combine`, at most
PROLOGUE = 1280     # what a workgroup does besides its trips (loads Q, waits for its first K and V, stores O): as long as it takes over so many keys
COMBINE = 320       # launching `combine`, likewise
COMBINE_BYTES = 2**14   # scratch that the whole chip writes and reads again while a workgroup gets over one key

AnyTile = Tile|MmaTile|WgmmaTile
LDS_BYTES: dict[type, Callable[..., int]] = {Tile: forward.lds_bytes, MmaTile: forward_mma.lds_bytes, WgmmaTile: forward_wgmma.lds_bytes}

# ***** how many *****

def key_tiles(p:Problem, tile:AnyTile) -> int: return ceildiv(p.Sk, tile.block_n)

def workgroups(p:Problem, tile:AnyTile) -> int:
  """Workgroups of the forward kernel without splits."""
  heads = p.H//p.Hkv if tile.pack_gqa else 1
  return p.B*p.H//heads*ceildiv(p.Sq*heads, tile.block_m)

def split_heuristic(p:Problem, arch:Arch, tile:AnyTile) -> int:
  """The number of splits, a power of two, by an occupancy model.

  A chip of `arch.cus` compute units works on that many workgroups at a time, more only where a workgroup has fewer waves than keep a compute unit
  busy and its LDS has the room: the workgroups of a full unit share its matrix unit and memory bandwidth. G splits make G times the workgroups, each
  of 1/G of the trips, so in units of a key

    time(G) = ceil(workgroups*G / places) * (ceil(trips/G)*tile.block_n + PROLOGUE) + (COMBINE + scratch(G) / COMBINE_BYTES if G > 1)

  and the smallest G with the least time is taken, no larger than the number of key tiles. A grid that fills the chip many times over gets no split.
  """
  places = arch.cus*max(1, min(arch.busy_waves//tile.waves, arch.lds//LDS_BYTES[type(tile)](p, tile)))
  trips = max(1, ceildiv(p.flops//(2*p.B*p.H*p.Sq*(p.D + p.Dv)), tile.block_n))    # of an average query's block
  def time(splits:int) -> float:
    merge = COMBINE + 4*splits*p.rows*(p.Dv + 1)/COMBINE_BYTES if splits > 1 else 0
    return ceildiv(workgroups(p, tile)*splits, places)*(ceildiv(trips, splits)*tile.block_n + PROLOGUE) + merge
  choices = [2**i for i in range(MAX_SPLITS.bit_length()) if 2**i <= key_tiles(p, tile)]
  return min(choices or [1], key=lambda splits: (time(splits), splits))

def resolve(p:Problem, arch:Arch, tile:AnyTile) -> Problem:
  """`p` with the number of splits it is computed with: num_splits=0 is chosen by `split_heuristic`, a larger one held to the number of key tiles."""
  return replace(p, num_splits=min(p.num_splits or split_heuristic(p, arch, tile), key_tiles(p, tile)))

# ***** many into one *****

def combine_arguments(p:Problem) -> dict[str, tuple[tuple[int, ...], str]]:
  """(shape, dtype) of the tensors that `combine` takes, by name and in order."""
  shapes = {**p.shapes, **arguments(p)}
  return {name: shapes[name] for name in ("o", "lse", "o_partial", "lse_partial", "sinks") if name in shapes}

def combine(p:Problem, arch:Arch, splits:int) -> Callable[..., UOp]:
  """The kernel that merges `splits` partial results: (o, [lse,] o_partial, lse_partial, [sinks]), the tensors of `combine_arguments(p)`.

    o = sum_g exp(lse_g - lse) o_g,   lse = ln(sum_g exp(lse_g) + exp(sink))

  with the largest exponent taken out. o is in the layout and dtype of the problem; a row without keys gives 0 and -inf. Raises ValueError where
  `splits` is not what p says.
  """
  if splits != p.num_splits or splits < 2:
    raise ValueError(f"splits={splits}: the problem's num_splits is {p.num_splits}, and there must be two at least to combine")
  hw, names, vec = operations(arch.family), combine_arguments(p), math.gcd(p.Dv, 4)
  columns = p.Dv//vec                       # threads of a row, each with `vec` neighbouring elements
  per = max(1, THREADS//columns)            # rows of a workgroup

  def kernel(*args:UOp) -> UOp:
    if len(args) != len(names): raise ValueError(f"{len(args)} tensors given: this kernel takes ({', '.join(names)})")
    given = {name: flat(x) for name, x in zip(names, args)}

    # ***** ranges: one row of the output a `columns` threads *****
    block = UOp.range(ceildiv(p.rows, per), 0, AxisType.GLOBAL)
    thread = UOp.range(per*columns, 1, AxisType.WARP)
    row, column = block*per + thread//columns, thread%columns*vec
    there, row = row < p.rows, row.minimum(p.rows - 1)
    length = p.total_q if p.varlen else p.Sq
    batch, head, query = row//(p.H*length), row//length%p.H, row%length
    parts = given["o_partial"].bitcast(hw.f32(vec)) if vec > 1 else given["o_partial"]
    def registers(slot:int, lanes:int=1) -> UOp: return UOp.placeholder((1,), hw.f32(lanes), slot, AddrSpace.REG)
    top, total, acc = registers(0), registers(1), registers(2, vec)
    def lse_of(g:UOp) -> UOp: return given["lse_partial"][g*p.rows + row].load()

    # ***** the largest LSE *****
    sink = given["sinks"][head].load() if "sinks" in given else None
    start = UOp.group(top[0].store(UOp.const(NEG_INF, dtypes.float) if sink is None else sink), total[0].store(UOp.const(0.0, dtypes.float)),
                      acc[0].store(hw.splat(0.0, vec)))
    g = UOp.range(splits, 2, AxisType.LOOP)
    before = top.after(start, g)
    largest = top.after(before[0].store(hw.max_(before[0].load(), lse_of(g))).end(g))[0].load()
    reference = largest.eq(NEG_INF).where(0.0, largest)
    def weight(x:UOp) -> UOp: return hw.exp2(hw.mul(hw.sub(x, reference), LOG2E))   # the difference first: it is exact where it matters

    # ***** sums *****
    g = UOp.range(splits, 3, AxisType.LOOP)
    acc_now, total_now = acc.after(start, g), total.after(start, g)
    w, part = weight(lse_of(g)), parts[((g*p.rows + row)*p.Dv + column)//vec].load()
    sums = UOp.group(acc_now[0].store(hw.add(acc_now[0].load(), hw.mul(part, w))), total_now[0].store(hw.add(total_now[0].load(), w))).end(g)
    weights, values = total.after(sums)[0].load(), acc.after(sums)[0].load()
    if sink is not None: weights = hw.add(weights, weight(sink))

    # ***** O and LSE *****
    values = hw.mul(values, weights.eq(0.0).where(0.0, hw.rcp(weights)))
    if p.out_dtype != "float32": values = hw.declare(values, given["o"].dtype)
    sb, sh, ss = strides(p.layout, p.H, length, p.Dv)
    outputs = store_row(arch, given["o"], p.out_dtype, p.Dv, batch*sb + head*sh + query*ss, column, values, there)
    if "lse" in given:
      log_sum = weights.eq(0.0).where(NEG_INF, hw.add(reference, hw.mul(hw.log2(weights), LN2)))
      outputs.append(given["lse"][row.valid(there & column.eq(0))].store(log_sum))
    size = 4*p.rows*(p.Dv + 1)*splits
    estimates = Estimates(ops=2*p.rows*p.Dv*splits, lds=size, mem=size)
    info = KernelInfo(f"attn_combine_{arch.name}_{p.out_dtype}_{splits}x{p.Dv}", opts_to_apply=(), estimates=estimates)
    return UOp.group(*outputs).end(block, thread).sink(arg=info, tag=OPTIMISED)
  return kernel
