"""The operations of NVIDIA's mma.sync kernels that tinygrad has no UOp for: CUDA text and numpy meaning side by side, as attn/intrinsics.py has
them for AMD.

Sections are those of the PTX ISA 8.7. A value is a CUDA vector: a C fragment is a float4, what belongs to the two rows of a lane a float2, an A
fragment a uint4, and a uint4 holds the B fragments of two neighbouring tiles. Where several instructions make one operation, a lambda holds them
(NVRTC knows no statement expressions), `$0` standing for the first source. Statements give 0.0f: store it to order what follows.

The emulator takes asynchronous copies strictly: from its start until the thread has waited for it a copy's destination holds garbage.
"""
from __future__ import annotations
import re, weakref
from typing import Any
import numpy as np
from attn.intrinsics import Array, Intrinsic, Lanes, _any_lane, _exp2, _fma, _pack, _xor_lane, express
from attn.tinygrad_compat import UOp, dtypes, vector_dtype

F2, F4, U4 = vector_dtype("float32", 2, cuda=True), vector_dtype("float32", 4, cuda=True), vector_dtype("uint32", 4, cuda=True)
ROWS = 2             # rows of C (and of A) that a lane has a part in: g and g + 8
LARGE = 2.0**14      # exponents from a reference beyond it are taken by a difference and not by one fma, whose rounding would show
WARP = "0xffffffffu"

def _code(body:str) -> str:
  """Statements that end in a return, as one expression."""
  return "[&]{{ " + re.sub(r"\$(\d+)", r"{\1}", body.replace("{", "{{").replace("}", "}}")) + " }}()"

# 9.7.3.24 ex2
_EX2 = 'auto ex2_ = [](float x_) { float y_; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y_) : "f"(x_)); return y_; };'
_CVT = {"float16": "cvt.rn.f16x2.f32", "bfloat16": "cvt.rn.bf16x2.f32"}    # 9.7.9.21: high half first

_ONES = {"float16": 0x3c003c00, "bfloat16": 0x3f803f80}

def _pack_function(dtype:str) -> str:
  return f'auto pack_ = [](float l_, float h_) {{ unsigned d_; asm("{_CVT[dtype]} %0, %1, %2;" : "=r"(d_) : "f"(h_), "f"(l_)); return d_; }};'

def _list(template:str, n:int) -> str: return ", ".join(template.replace("@", "xyzw"[i]) for i in range(n))
def _operands(kind:str, name:str) -> str: return _list(f'"{kind}"({name}.@)', 4)    # of inline assembly

# ***** asynchronous copies: 9.7.9.25.3 *****

class AsyncCopies:
  """The copies that the threads of a launch have under way: which of its groups each thread has committed it to, and what will arrive."""
  def __init__(self, threads:int):
    self.group = np.zeros(threads, np.int64)
    self.pending: list[tuple[Any, Array, Array, Array, Array]] = []    # (destination and offset, bytes, threads, group of each)

  def start(self, lanes:Lanes, to:Any, offset:Array, data:Array, gate:Array) -> None:
    lanes.store_bytes(to, offset, np.full_like(data, 0xff), gate)
    self.pending.append((to, offset, data, gate, self.group))

  def commit(self, active:Array) -> None: self.group = self.group + active

  def wait(self, lanes:Lanes, but:int) -> None:
    left = []
    for to, offset, data, gate, group in self.pending:
      arrived = gate & lanes.active & (group < self.group - but)
      if arrived.any(): lanes.store_bytes(to, offset, data, arrived)
      if (gate := gate & ~arrived).any(): left.append((to, offset, data, gate, group))
    self.pending = left

_copies: weakref.WeakKeyDictionary[Any, AsyncCopies] = weakref.WeakKeyDictionary()

def _copies_of(lanes:Lanes) -> AsyncCopies:
  if lanes not in _copies: _copies[lanes] = AsyncCopies(len(lanes.active))
  return _copies[lanes]

def _copy(lanes:Lanes, to:Any, source:Any, nbytes:Array, gate:Array, step:tuple[int, int], asynchronous:bool) -> Array:
  data, gate = np.zeros((16, len(gate)), np.uint8), gate & lanes.active
  here, there = (np.full(len(gate), x, np.int64) for x in step)
  size = 16 if asynchronous else 2      # bytes of an access
  for i in range(0, 16, size): data[i:i + size] = lanes.load_bytes(source, there + i, size, gate & (nbytes > i))
  if asynchronous: _copies_of(lanes).start(lanes, to, here, data, gate)
  else: lanes.store_bytes(to, here, data, gate)
  return np.zeros(len(gate), np.float32)

def _commit(lanes:Lanes) -> Array:
  _copies_of(lanes).commit(lanes.active)
  return np.zeros(len(lanes.active), np.float32)

def _wait(lanes:Lanes, but:int) -> Array:
  _copies_of(lanes).wait(lanes, but)
  return np.zeros(len(lanes.active), np.float32)

def _copy_text(out:Any, step:tuple[int, int], asynchronous:bool) -> str:
  if asynchronous:
    return _code(f'if ($3) asm volatile("cp.async.cg.shared.global.L2::128B [%0+{step[0]}], [%1+{step[1]}], 16, %2;" :: '
                 '"r"((unsigned)__cvta_generic_to_shared($0)), "l"($1), "r"($2)); return 0.0f;')
  halves = [f"({2*i} < n_ ? (unsigned)s_[{i}] : 0u)" for i in range(8)]
  words = ", ".join(f"{lo} | {hi} << 16" for lo, hi in zip(halves[0::2], halves[1::2]))
  return _code(f"if ($3) {{ const unsigned short* s_ = (const unsigned short*)($1) + {step[1]//2}; int n_ = $2; "
               f"($0)[{step[0]//16}] = make_uint4({words}); }} return 0.0f;")

# ***** fragments: 9.7.14.5.8 (mma.m16n8k16), 9.7.14.5.15 (ldmatrix) *****

def _ldmatrix(lanes:Lanes, pointer:Any, step:int, transposed:bool) -> Array:
  """Lane l gives the address of row l%8 of 8x8 matrix l//8, and gets two neighbours of each matrix."""
  raw = lanes.load_bytes(pointer, np.full(len(lanes.active), step, np.int64), 16, lanes.active)
  m = np.ascontiguousarray(raw.T).view(np.uint16).reshape(-1, 4, 8, 8)                    # warp, matrix, row, column
  if transposed: m = m.swapaxes(2, 3)
  pairs = np.ascontiguousarray(m).view(np.uint32)                                         # lane l: row l//4, columns 2*(l%4) and + 1
  return np.ascontiguousarray(pairs.transpose(1, 0, 2, 3)).reshape(4, -1)

def _ldmatrix_text(out:Any, step:int, transposed:bool) -> str:
  trans = ".trans" if transposed else ""
  return _code(f'uint4 v_; asm volatile("ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%0, %1, %2, %3}}, [%4+{step}];" : '
               f'{_operands("=r", "v_")} : "r"((unsigned)__cvta_generic_to_shared($0))); return v_;')

def _mma_text(out:Any, matrix:Any, half:int) -> str:
  b = "xyzw"[2*half:2*half + 2]
  return _code(f'uint4 a_ = $0, b_ = $1; float4 c_ = $2, d_; asm("mma.sync.aligned.m16n8k16.row.col.f32.{matrix.ptx}.{matrix.ptx}.f32 '
               f'{{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, {{%8, %9}}, {{%10, %11, %12, %13}};" : {_operands("=f", "d_")} : {_operands("r", "a_")}, '
               f'"r"(b_.{b[0]}), "r"(b_.{b[1]}), {_operands("f", "c_")}); return d_;')

# ***** the online softmax *****

def _row_max(lanes:Lanes, s:Array, m:Array) -> Array: return np.fmax(m, np.fmax(s[0::2], s[1::2]))

def _mask_text(out:Any, column:int, op:str) -> str:
  kept = ", ".join(f"{column + i%2} {op} {'$1' if i < 2 else '$2'} ? -INFINITY : s_.{'xyzw'[i]}" for i in range(4))
  return _code(f"float4 s_ = $0; return make_float4({kept});")

def _mask(lanes:Lanes, s:Array, low:Array, high:Array, column:int, op:str) -> Array:
  keys, limits = np.array([column, column + 1]*ROWS)[:, None], np.stack([low, low, high, high])
  return np.where(keys > limits if op == ">" else keys < limits, np.float32(-np.inf), s)

def _rescale_text(out:Any, tiles:int, accs:int, scores:int, scale:float, above:float) -> str:
  x, both = f"{scale!r}f", [(t, r) for t in range(tiles) for r in "xy"]
  load = " ".join(f"float2 n{t}_ = ${5 + t}, o{t}_ = $0[{t}];" for t in range(tiles))
  grown = " | ".join(f"((n{t}_.{r} - o{t}_.{r})*{x} > {above!r}f) | !(fabsf(o{t}_.{r}*{x}) <= {LARGE!r}f)" for t, r in both)    # no branches
  exchange = " ".join(f"n{t}_.{r} = fmaxf(n{t}_.{r}, __shfl_xor_sync({WARP}, n{t}_.{r}, {step}));" for step in (1, 2) for t, r in both)
  correct = ""
  for t in range(tiles):
    n, o, a, d = (f"{name}{t}_" for name in "noad")
    correct += (f"float2 r{t}_ = make_float2({_list(f'{n}.@ == -INFINITY ? 0.0f : {n}.@', 2)}), "
                f"{a} = make_float2({_list(f'ex2_(({o}.@ - r{t}_.@)*{x})', 2)}); "
                f"float2 {d} = make_float2({_list(f'fabsf(r{t}_.@*{x}) > {LARGE!r}f ? r{t}_.@ : 0.0f', 2)}); $0[{t}] = {n}; "
                f"$1[{t}] = make_float2({_list(f'{d}.@ == 0.0f ? -r{t}_.@*{x} : 0.0f', 2)}); $2[{t}].x *= {a}.x; $2[{t}].y *= {a}.y; ")
    for e, r in zip("xyzw", "xxyy"):
      correct += " ".join(f"$3[{i}].{e} *= {a}.{r};" for i in range(t*accs, (t + 1)*accs)) + " "
      correct += " ".join(f"$4[{i}].{e} -= {d}.{r};" for i in range(t*scores, (t + 1)*scores)) + " "
  return _code(f"{load} if (__any_sync({WARP}, {grown})) {{ {_EX2} {exchange} {correct}}} return 0.0f;")

def _rescale(lanes:Lanes, reference:Any, bias:Any, l:Any, acc:Any, s:Any, *maxima:Array, tiles:int, accs:int, scores:int, scale:float,
             above:float) -> Array:
  x, old = np.float32(scale), [lanes.load_register(reference, t) for t in range(tiles)]
  with np.errstate(invalid="ignore", over="ignore"):
    grown = [(((m - o)*x > np.float32(above)) | ~(np.abs(o*x) <= LARGE)).any(0) for m, o in zip(maxima, old)]
    if not (gate := lanes.active & _any_lane(lanes, np.logical_or.reduce(grown), lanes.wave)).any(): return np.zeros(len(gate), np.float32)
    for t, m in enumerate(maxima):
      for step in (1, 2): m = np.fmax(m, _xor_lane(lanes, m, step))
      safe = np.where(m == -np.inf, np.float32(0), m)
      alpha, shift = _exp2((old[t] - safe)*x), np.where(np.abs(safe*x) > LARGE, safe, np.float32(0))
      lanes.store_register(reference, t, m, gate)
      lanes.store_register(bias, t, np.where(shift == 0, -safe*x, np.float32(0)), gate)
      lanes.store_register(l, t, lanes.load_register(l, t)*alpha, gate)
      for i in range(t*accs, (t + 1)*accs): lanes.store_register(acc, i, lanes.load_register(acc, i)*np.repeat(alpha, 2, 0), gate)
      for i in range(t*scores, (t + 1)*scores): lanes.store_register(s, i, lanes.load_register(s, i) - np.repeat(shift, 2, 0), gate)
  return np.zeros(len(gate), np.float32)

# ***** the table *****

TABLE: dict[str, Intrinsic] = {
  # vectors
  "zero": Intrinsic("make_float4(0.0f, 0.0f, 0.0f, 0.0f)", lambda lanes, _: np.zeros((4, len(lanes.active)), np.float32)),
  "ones": Intrinsic(lambda out, dtype: _code(f"unsigned x_ = 0x{_ONES[dtype]:08x}u; return make_uint4(x_, x_, x_, x_);"),
                    lambda lanes, _, dtype: np.full((4, len(lanes.active)), _ONES[dtype], np.uint32)),
  "rows": Intrinsic("make_float2({0}, {0})", lambda lanes, x: np.stack([x, x])),
  "element": Intrinsic(lambda out, i: f"{{0}}.{'xyzw'[i]}", lambda lanes, x, i: x[i]),
  # memory
  "copy": Intrinsic(_copy_text, lambda lanes, to, source, nbytes, gate, _, **static: _copy(lanes, to, source, nbytes, gate, **static)),
  "commit": Intrinsic(_code('asm volatile("cp.async.commit_group;" ::: "memory"); return 0.0f;'), lambda lanes, _: _commit(lanes)),
  "wait": Intrinsic(lambda out, but: _code(f'asm volatile("cp.async.wait_group {but};" ::: "memory"); return 0.0f;'),
                    lambda lanes, _, but: _wait(lanes, but)),
  "ldmatrix": Intrinsic(_ldmatrix_text, _ldmatrix),
  # matrix unit
  "mma": Intrinsic(_mma_text, lambda lanes, a, b, c, matrix, half: lanes.matrix(matrix.name, a, b[2*half:2*half + 2], c)),
  # softmax, on the scores of a lane's two rows
  "row_max": Intrinsic(_code("float4 s_ = $0; float2 m_ = $1; return make_float2(fmaxf(m_.x, fmaxf(s_.x, s_.y)), fmaxf(m_.y, fmaxf(s_.z, s_.w)));"),
                       _row_max),
  "row_sum": Intrinsic(_code("float4 p_ = $0; float2 l_ = $1; return make_float2(l_.x + (p_.x + p_.y), l_.y + (p_.z + p_.w));"),
                       lambda lanes, p, l: l + (p[0::2] + p[1::2])),
  "mask": Intrinsic(_mask_text, _mask),
  "rescale": Intrinsic(_rescale_text, _rescale),
  "weights": Intrinsic(lambda out, scale: _code(f"{_EX2} float4 s_ = $0; float2 b_ = $1; return make_float4("
                                                + ", ".join(f"ex2_(fmaf(s_.{e}, {scale!r}f, b_.{r}))" for e, r in zip("xyzw", "xxyy")) + ");"),
                       lambda lanes, s, bias, scale: _exp2(_fma(s, np.array(scale, np.float32), np.repeat(bias, 2, 0)))),
  "pack_a": Intrinsic(lambda out, dtype: _code(f"{_pack_function(dtype)} float4 p_ = $0, q_ = $1; "
                                               "return make_uint4(pack_(p_.x, p_.y), pack_(p_.z, p_.w), pack_(q_.x, q_.y), pack_(q_.z, q_.w));"),
                      lambda lanes, p, q, dtype: np.concatenate([_pack(p, dtype), _pack(q, dtype)])),
  "pack": Intrinsic(lambda out, dtype: _code(f"{_pack_function(dtype)} return pack_($0, $1);"),
                    lambda lanes, x, y, _, dtype: _pack(np.stack([x, y]), dtype)[0]),
  "xor_lane": Intrinsic(lambda out, mask: f"__shfl_xor_sync({WARP}, {{0}}, {mask})", _xor_lane),
  "opaque": Intrinsic(_code('int v_ = $0; asm volatile("" : "+r"(v_)); return v_;'), lambda lanes, x: x),
}

def zero(order:UOp) -> UOp: return express(TABLE["zero"], F4, order)
def ones(dtype:str) -> UOp: return express(TABLE["ones"], U4, UOp.const(0, dtypes.int), dtype=dtype)
def rows(x:float) -> UOp: return express(TABLE["rows"], F2, UOp.const(x, dtypes.float))
def element(x:UOp, i:int) -> UOp: return express(TABLE["element"], dtypes.float, x, i=i)

def copy(to:UOp, source:UOp, step:tuple[int, int], nbytes:UOp, gate:UOp, asynchronous:bool) -> UOp:
  """Copies `nbytes` (0..16, even) from `source` to `to`, 16 bytes of shared memory of which the rest becomes zero, where `gate` holds. Both are
  INDEXes, each `step` bytes further: as in `ldmatrix`, many addresses then need but one register. With `asynchronous`, nbytes is 0 or 16, both
  addresses are aligned to 16 and the data are there after `wait`. A statement."""
  declare = UOp.const(0.0, source.dtype)    # the renderer declares the types of computed values alone
  return express(TABLE["copy"], dtypes.float, to, source, nbytes.cast(dtypes.int), gate, declare, step=step, asynchronous=asynchronous)
def commit(order:UOp) -> UOp:
  """The copies started since the last one make a group. A statement."""
  return express(TABLE["commit"], dtypes.float, order)
def wait(order:UOp, but:int) -> UOp:
  """Waits for this thread's copies, the last `but` groups excepted: a barrier must follow before other threads read them. A statement."""
  return express(TABLE["wait"], dtypes.float, order, but=but)
def ldmatrix(row:UOp, step:int, transposed:bool=False) -> UOp:
  """Four 8x8 matrices of 16-bit elements; lane l's `row` is an INDEX, `step` units before row l%8 of matrix l//8."""
  return express(TABLE["ldmatrix"], U4, row, step=16*step, transposed=transposed)
def mma(matrix:Any, a:UOp, b:UOp, half:int, c:UOp) -> UOp:
  """c + A B by one mma.sync; `half` says which of the two B fragments in `b`."""
  return express(TABLE["mma"], F4, a, b, c, matrix=matrix, half=half)
def row_max(s:UOp, m:UOp) -> UOp: return express(TABLE["row_max"], F2, s, m)
def row_sum(p:UOp, l:UOp) -> UOp: return express(TABLE["row_sum"], F2, p, l)
def mask_above(s:UOp, limits:tuple[UOp, UOp], column:int) -> UOp:
  """-inf where `column` or the one after it, in which a lane's elements stand, is beyond the row's limit."""
  return express(TABLE["mask"], F4, s, *[x.cast(dtypes.int) for x in limits], column=column, op=">")
def mask_below(s:UOp, limits:tuple[UOp, UOp], column:int) -> UOp:
  return express(TABLE["mask"], F4, s, *[x.cast(dtypes.int) for x in limits], column=column, op="<")
def rescale(maxima:list[UOp], reference:UOp, bias:UOp, l:UOp, acc:UOp, s:UOp, scores:int, scale:float, above:float) -> UOp:
  """The online softmax's correction, as one statement: tinygrad has no branch around stores to registers. Where a row maximum (one pair for each
  query tile) exceeds the `reference` by more than `above` (times `scale`: in powers of two) in any lane of the warp, the reference of each row
  becomes the maximum over its four lanes, and l and the accumulators are scaled to it. bias = -reference*scale, for `weights`; where that is LARGE
  the difference is taken in the scores `s`, of which there are `scores` a query tile, and bias is 0. The register operands are placeholders."""
  tiles = len(maxima)
  return express(TABLE["rescale"], dtypes.float, *[x[0] for x in (reference, bias, l, acc, s)], *maxima, tiles=tiles, accs=acc.max_numel()//tiles,
                 scores=scores, scale=scale, above=above)
def weights(s:UOp, bias:UOp, scale:float) -> UOp:
  """exp2(s*scale + bias)."""
  return express(TABLE["weights"], F4, s, bias, scale=scale)
def pack_a(p:UOp, q:UOp, dtype:str) -> UOp:
  """The C fragments of two neighbouring tiles -> the A fragment of 16 columns, rounded to nearest even."""
  return express(TABLE["pack_a"], U4, p, q, dtype=dtype)
def pack(x:UOp, y:UOp, dtype:str, declare:UOp) -> UOp:
  """Two numbers as a word of `dtype`; `declare` makes the renderer declare the type of the buffer for which it is."""
  return express(TABLE["pack"], dtypes.uint, x, y, declare, dtype=dtype)
def xor_lane(x:UOp, mask:int) -> UOp:
  """x of the lane whose number differs in the bits of `mask` (shfl.sync.bfly)."""
  return express(TABLE["xor_lane"], dtypes.float, x, mask=mask)
def opaque(x:UOp) -> UOp:
  """The integer x, in a way that neither tinygrad nor the compiler can tell."""
  return express(TABLE["opaque"], dtypes.int, x.cast(dtypes.int))
