"""Rows of K and V that are stored in 8 bits: copies of their scales to shared memory, and their conversion to 16-bit operands."""
from __future__ import annotations
from collections.abc import Mapping
from dataclasses import dataclass, replace
from attn.chips.matrix import UNIT_BYTES
from attn.kernels.nvidia.warps import Warps
from attn.kernels.parts.grid.workgroup import scale_as_float
from attn.kernels.parts.memory.layouts import SharedLayout, SwizzledRows
from attn.kernels.parts.program.counts import ceildiv
from attn.ops import common as ops, nvidia as nv
from attn.ops.stored import scale_in_range, widen_pair, zero_or_nan
from attn.problem import BYTES, KINDS_OF_SCALES
from attn.tinygrad_compat import UOp, dtypes

# wgmma reads operands from shared memory. So these rows are loaded to registers in 8 bits, converted, and stored to shared memory in 16 bits. mla_mma
# (latent attention) does the same if several warps read the same rows, but copies the rows to shared memory in 8 bits first, because its registers
# are full. In other kernels with mma.sync, each warp converts the rows in registers, after ldmatrix.
#
# ldmatrix moves pairs of bytes as 16-bit numbers. A pair holds two neighbouring columns of a row. So a lane gets other columns than with 16-bit rows:
# of K, four neighbouring columns of a key (the product sums over columns, in any order: `q_operand` reads Q in the same order); of V, transposed, two
# neighbouring columns of two keys (the even columns make one fragment, the odd ones another: `Warps.alternating_columns`).

# The scales of a tile in shared memory, kind after kind. The last two are only in kernels that check scales (`checked_scales`).
OF_K, OF_V, OF_V_WITHOUT_NANS, FACTORS_OF_K = range(KINDS_OF_SCALES)

def kinds_of_scales(to_log2:float, of_k:UOp, of_v:UOp) -> list[UOp]:
  """Returns [scale of K, scale of V, scale of V without NaN, scale of K times `to_log2`] of a key; V's scales are clamped to a safe range."""
  # the scale of V becomes a scale in range; the last number is the factor by which all scores of the key are multiplied
  kept = scale_in_range(of_v)
  return [of_k, ops.add(kept, zero_or_nan(of_v)), kept, ops.mul(of_k, to_log2)]

@dataclass(frozen=True)
class StoredKeys:
  """What one thread does with 8-bit rows of K and V: copies parts of tiles, converts them, and loads the rows' scales."""
  warps: Warps

  def widened(self, *pairs:tuple[UOp, tuple[int, int]]) -> UOp:
    """Returns a vector of 16-bit numbers converted from 8 bits. Each of `pairs` is (dword, indices of two of its bytes to convert)."""
    # each of `pairs` is a dword with four stored numbers, and the indices of the two numbers that are converted
    p = self.warps.group.p
    return ops.build(*[widen_pair(word, places, p.stored, p.dtype) for word, places in pairs])

  def widened_unit(self, words:UOp) -> UOp:
    """Converts eight numbers stored in 8 bits (two dwords) to eight 16-bit numbers in the same order (four dwords)."""
    return self.widened(*[(ops.extract(words, word), places) for word in range(2) for places in ((0, 1), (2, 3))])

  # ***** operands *****
  def q_operand(self, shared:UOp, rows:SwizzledRows, first:UOp, step:int) -> UOp:
    """Returns operand A of S = Q K^T, read from the rows of Q in shared memory: step `step` (16 columns)."""
    # Each lane gets four neighbouring columns, the columns that it also has in `k_operand`. The rows belong to the matrix tile that begins at row
    # `first`; they lie in the layout `rows`.
    at, halves = self.warps.at, shared.bitcast(ops.u32(2))
    apart = at.matrix.M//nv.ROWS
    places = [rows.further(first + at.matrix.c_row(at.lane, 0), at.h//2, r*apart, 2*step) for r in range(nv.ROWS)]
    of_rows = [halves[place*2 + at.h%2 + constant*2].load() for place, constant in places]
    return ops.build(*[ops.extract(x, i) for i in range(2) for x in of_rows])

  def k_operand(self, words:UOp, step:int) -> UOp:
    """Returns operand B of S = Q K^T for 16 keys and step `step` (16 columns), converted from the 8-bit numbers `words`."""
    # `words` are what ldmatrix returned for two steps: this one, and its neighbour
    return self.widened(*[(ops.extract(words, step%2 + 2*tile), places) for tile in range(2) for places in ((0, 1), (2, 3))])

  def v_operand(self, words:UOp, pair:int) -> UOp:
    """Returns operand B of O += P V for 16 keys and columns 16*`pair` to 16*`pair` + 15, converted from the 8-bit numbers `words`."""
    # for one C fragment of the even columns, and one of the odd columns; `words` are what ldmatrix returned, transposed, for 32 columns
    return self.widened(*[(ops.extract(words, 2*(pair%2) + half), places) for places in ((0, 2), (1, 3)) for half in range(2)])

  # ***** conversion in shared memory *****
  def pieces(self, to:Mapping[str, SharedLayout]) -> list[tuple[str, UOp, UOp, UOp]]:
    """Returns (tensor, row, index of 16 bytes in the row, whether they exist) for each 16 bytes of a tile that this thread converts to 16 bits."""
    # `to` has the layouts, in 16 bits, of the tensors that are converted. Eight neighbouring threads take four pieces of each of two rows: what they
    # store at the same time lies in different banks.
    group, found = self.warps.group, list[tuple[str, UOp, UOp, UOp]]()
    for name, layout in to.items():
      across, threads = layout.units//2, group.tile.threads
      regular = threads % (2*across) == 0       # then a thread's pieces are the same piece of several rows
      for j in range(ceildiv(layout.rows*across, threads)):
        i = self.warps.at.thread + (0 if regular else j*threads)
        row, piece = (i//across, i%across) if across % 4 else (i//(2*across)*2 + i//4%2, i%4 + i//8%(across//4)*4)
        moved = j*threads//across if regular else 0
        found.append((name, row + moved, piece, row + moved < layout.rows))
    return found

  def staged(self, shared:UOp, t:UOp, to:Mapping[str, SharedLayout], base:int) -> list[UOp]:
    """Returns asynchronous copies to shared memory, from 16-byte unit `base` on, of the 8-bit pieces of tile t that this thread will convert."""
    # `base` counts units of 16 bytes; a thread copies the pieces that it later converts (`widened_stores`, with the same `to`); rows and columns that
    # do not exist become zeros
    return [nv.copy(shared[self.staging(base, number)], at, (0, 0), there.where(UNIT_BYTES, 0), UOp.const(True), UNIT_BYTES if whole else 1)
            for number, (whole, at, there) in enumerate(self.places(t, to))]

  def places(self, t:UOp, to:Mapping[str, SharedLayout]) -> list[tuple[bool, UOp, UOp]]:
    """Returns (whether aligned to 16 bytes, index in global memory, whether it exists) of each 16-byte piece of tile t that this thread converts."""
    group, first, found = self.warps.group, self.warps.group.scores.row(t*self.warps.group.tile.block_n), list[tuple[bool, UOp, UOp]]()
    for name, row, piece, inside in self.pieces(to):
      rows = replace(group.rows_of(name), count=group.walked_end)
      there = inside & (first + row < rows.count) & (piece < rows.width//UNIT_BYTES)
      found.append((rows.in_units, rows.buffer[rows.start(first, row) + piece*UNIT_BYTES], there))
    return found

  def loaded(self, t:UOp, to:Mapping[str, SharedLayout]) -> list[UOp]:
    """Loads from global memory the 16-byte pieces of tile t, in 8 bits, that this thread will convert."""
    # rows and columns that do not exist are zeros
    return [ops.load_where(at, there, UNIT_BYTES) for _, at, there in self.places(t, to)]

  def staging(self, base:int, number:int) -> UOp: return base + number*self.warps.group.tile.threads + self.warps.at.thread

  def copied(self, shared:UOp, to:Mapping[str, SharedLayout], base:int) -> list[UOp]:
    """Loads from shared memory the 16-byte pieces that `staged` copied there for this thread."""
    return [shared[self.staging(base, number)].load() for number, _ in enumerate(self.pieces(to))]

  def widened_stores(self, shared:UOp, to:Mapping[str, SharedLayout], pieces:list[UOp]) -> list[UOp]:
    """Returns the stores of `pieces`, this thread's 8-bit numbers of a tile, converted to 16 bits, to shared memory in the layouts `to`."""
    # `pieces` comes from `loaded` or `copied`
    found = list[UOp]()
    for words, (name, row, piece, inside) in zip(pieces, self.pieces(to)):
      for half in range(2):
        wide = self.widened_unit(ops.slice_(words, 2*half, 2))
        found.append(nv.put(shared[to[name].place(row, piece*2 + half)], wide, inside))
    return found

  # ***** scales *****
  def copies(self, shared:UOp, t:UOp, base:UOp) -> list[UOp]:
    """Returns asynchronous copies of the scales of K and V in tile t to shared memory, from the float with index `base` on."""
    # first the scales of K's rows, then those of V's rows; rows that do not exist get scales of 0
    group, floats, found = self.warps.group, shared.bitcast(dtypes.float), list[UOp]()
    n, threads, size, first = group.tile.block_n, group.tile.threads, BYTES[group.p.scale_dtype], group.scores.row(t*group.tile.block_n)
    for kind, name in enumerate(name for name, view in group.p.scale_views.items() if view is not None):
      rows = replace(group.rows_of(name, unit_bytes=size), count=group.walked_end)
      for row in [self.warps.at.thread + i*threads for i in range(ceildiv(n, threads))]:
        to, inside = floats[base + kind*n + row], row < n
        if size == 4: found.append(nv.copy_number(to, rows.buffer[rows.start(first, row)], first + row < rows.count, inside))
        else: found.append(nv.put(to, scale_as_float(rows.load_units(first, n, row, UOp.const(0), inside), size), inside))
    return found

  def checked_scales(self, shared:UOp, base:UOp, to_log2:float) -> list[UOp]:
    """Returns stores that replace the scales that this thread copied to shared memory by the scales that `kinds_of_scales` returns."""
    # so each scale is checked once, and not by each lane that uses it (`kinds_of_scales`)
    n, threads, floats, found = self.warps.group.tile.block_n, self.warps.group.tile.threads, shared.bitcast(dtypes.float), list[UOp]()
    for row in [self.warps.at.thread + i*threads for i in range(ceildiv(n, threads))]:
      inside = row < n
      given = [ops.as_float(ops.load_where(floats[base + kind*n + row], inside, 4)) for kind in (OF_K, OF_V)]
      found += [nv.put(floats[base + kind*n + row], x, inside) for kind, x in enumerate(kinds_of_scales(to_log2, *given)) if kind != OF_K]
    return found

  def checked_copies(self, shared:UOp, t:UOp, base:UOp, gate:UOp) -> list[UOp]:
    """Returns asynchronous copies of tile t's scales to shared memory. An earlier kernel stored all kinds of scales that `kinds_of_scales` lists."""
    # the earlier kernel is attn/kernels/nvidia/widen.py; rows that do not exist get zeros; where `gate` is false, nothing is copied
    group, floats, found = self.warps.group, shared.bitcast(dtypes.float), list[UOp]()
    n, threads, first = group.tile.block_n, group.tile.threads, group.scores.row(t*group.tile.block_n)
    rows = replace(group.rows_of("k_scales", unit_bytes=BYTES[group.p.scale_dtype]), count=group.walked_end)
    for item in [self.warps.at.thread + i*threads for i in range(ceildiv(KINDS_OF_SCALES*n, threads))]:
      kind, row = item//n, item%n
      source = rows.buffer[rows.start(first, row) + kind*group.p.Sk]
      found.append(nv.copy_number(floats[base + item], source, first + row < rows.count, (item < KINDS_OF_SCALES*n) & gate))
    return found

  def scales(self, shared:UOp, base:UOp, kind:int, first_key:UOp, keys:int) -> list[UOp]:
    """Loads scales of one kind (OF_K, OF_V, ...) of `keys` keys from key `first_key` on: two for each C fragment of scores."""
    # A vector has the scales of the two keys whose scores this lane holds. `kind` is OF_K or OF_V, or one of the kinds that `checked_scales` stores.
    # `base` is the first float of the tile's scales in shared memory.
    pairs, first = shared.bitcast(nv.F2), self.first_scales(base, kind, first_key)
    return [pairs[first + i*self.apart].load() for i in range(keys//self.warps.at.matrix.N)]

  @property
  def apart(self) -> int:
    """Distance in shared memory, counted in pairs of scales, between the scales for neighbouring C fragments."""
    return self.warps.at.matrix.N//2
  def first_scales(self, base:UOp, kind:int, first_key:UOp) -> UOp:
    """Returns the index in shared memory, counted in pairs of scales, at which this lane's scales of one kind (OF_K, OF_V, ...) begin."""
    # the parameters as in `scales`
    return (base + kind*self.warps.group.tile.block_n + first_key)//2 + self.warps.at.h
