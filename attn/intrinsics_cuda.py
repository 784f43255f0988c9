"""The operations of NVIDIA's mma.sync kernels that tinygrad has no UOp for: CUDA text and numpy meaning side by side, as attn/intrinsics.py has
them for AMD. What both have is listed in attn/operations.py.

Sections are those of the PTX ISA 8.7. A value is a CUDA vector: a C fragment is a float4, what belongs to the two rows of a lane a float2, an A
fragment a uint4, and a uint4 holds the B fragments of two neighbouring tiles. Where several instructions make one operation, a lambda holds them
(NVRTC knows no statement expressions), `$0` standing for the first source. Statements give 0.0f: store it to order what follows.

The emulator takes asynchronous copies strictly: from its start until the thread has waited for it nobody may touch a copy's destination.
"""
from __future__ import annotations
import re
from typing import Any, Callable
import numpy as np
from attn.intrinsics import (_2LOG2E, _NEAR, _TANH, Array, Intrinsic, Lanes, _any_lane, _bits, _buffer_load, _exp2, _fma, _log2, _pack, _rcp,
                             _softcap, _widen, _xor_lane, express)
from attn.intrinsics import declare as declare, length as length   # the same for both vendors
from attn.tinygrad_compat import DType, UOp, dtypes, vector_dtype

F2, F4, U4 = vector_dtype("float32", 2), vector_dtype("float32", 4), vector_dtype("uint32", 4)
ROWS = 2             # rows of C (and of A) that a lane has a part in: g and g + 8
LARGE = 2.0**14      # exponents from a reference beyond it are taken by a difference and not by one fma, whose rounding would show
NOTHING = -float(np.finfo(np.float32).max)    # the reference of a row that has seen no key: below every score, and finite
def first_bias(scale:float) -> float:
  """exp2(s*scale + bias) of a row that has seen no key: inf for a score, 0 for -inf."""
  return -NOTHING*min(scale, 1.0)
WARP = "0xffffffffu"

def _code(body:str) -> str:
  """Statements that end in a return, as one expression."""
  return "[&]{{ " + re.sub(r"\$(\d+)", r"{\1}", body.replace("{", "{{").replace("}", "}}")) + " }}()"

# 9.7.3.24 ex2
_EX2 = 'auto ex2_ = [](float x_) { float y_; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y_) : "f"(x_)); return y_; };'
_CVT = {"float16": "cvt.rn.f16x2.f32", "bfloat16": "cvt.rn.bf16x2.f32"}    # 9.7.9.21: high half first

_ONES = {"float16": 0x3c003c00, "bfloat16": 0x3f803f80}

def f32(n:int) -> DType: return dtypes.float if n == 1 else vector_dtype("float32", n)
def u32(n:int) -> DType: return dtypes.uint if n == 1 else vector_dtype("uint32", n)

def _make(kind:str, xs:list[str]) -> str: return xs[0] if len(xs) == 1 else f"make_{kind}{len(xs)}({', '.join(xs)})"

def _at(name:str, n:int, i:int) -> str:
  """Element i of a value of n."""
  return name if n == 1 else f"{name}.{'xyzw'[i]}"

def _each(expression:str, prelude:str="") -> Callable[..., str]:
  """An expression of the elements of the sources, `@0` of the first, for every element; scalars are the same for all. `#` is the element's number in
  `offsets`."""
  def text(out:DType, lengths:tuple[int, ...], offsets:tuple[int, ...]=(), **static:Any) -> str:
    values = []
    for i in range(max(lengths)):
      value = expression.replace("#", str(offsets[i]) if offsets else "")
      for k, n in enumerate(lengths): value = value.replace(f"@{k}", _at(f"v{k}_", n, i))
      values.append(value)
    return _code(" ".join([prelude, *(f"auto v{k}_ = ${k};" for k in range(len(lengths))), f"return {_make('float', values)};"]))
  return text

def _elementwise(name:str, *srcs:UOp, **static:Any) -> UOp:
  lengths = tuple(length(x) for x in srcs)
  return express(TABLE[name], f32(max(lengths)), *srcs, lengths=lengths, **static)

def _pack_function(dtype:str) -> str:
  return f'auto pack_ = [](float l_, float h_) {{ unsigned d_; asm("{_CVT[dtype]} %0, %1, %2;" : "=r"(d_) : "f"(h_), "f"(l_)); return d_; }};'

def _list(template:str, n:int) -> str: return ", ".join(template.replace("@", "xyzw"[i]) for i in range(n))
def _operands(kind:str, name:str) -> str: return _list(f'"{kind}"({name}.@)', 4)    # of inline assembly

# ***** asynchronous copies: 9.7.9.25.3 *****

def _copy(lanes:Lanes, to:Any, source:Any, nbytes:Array, gate:Array, step:tuple[int, int], asynchronous:bool) -> Array:
  data, gate = np.zeros((16, len(gate)), np.uint8), gate & lanes.active
  here, there = (np.full(len(gate), x, np.int64) for x in step)
  size = 16 if asynchronous else 2      # bytes of an access
  for i in range(0, 16, size): data[i:i + size] = lanes.load_bytes(source, there + i, size, gate & (nbytes > i))
  if asynchronous: return lanes.start_store(to, here, data, gate)
  lanes.store_bytes(to, here, data, gate)
  return np.zeros(len(gate), np.float32)

def _copy_text(out:Any, step:tuple[int, int], asynchronous:bool) -> str:
  if asynchronous:
    return _code(f'if ($3) asm volatile("cp.async.cg.shared.global.L2::128B [%0+{step[0]}], [%1+{step[1]}], 16, %2;" :: '
                 '"r"((unsigned)__cvta_generic_to_shared($0)), "l"($1), "r"($2)); return 0.0f;')
  halves = [f"({2*i} < n_ ? (unsigned)s_[{i}] : 0u)" for i in range(8)]
  words = ", ".join(f"{lo} | {hi} << 16" for lo, hi in zip(halves[0::2], halves[1::2]))
  return _code(f"if ($3) {{ const unsigned short* s_ = (const unsigned short*)($1) + {step[1]//2}; int n_ = $2; "
               f"($0)[{step[0]//16}] = make_uint4({words}); }} return 0.0f;")

def _buffer_load_text(out:DType, width:int) -> str:
  kind = {2: "unsigned short", 4: "unsigned", 8: "uint2", 16: "uint4"}[width]
  nothing = _make("uint", ["0u"]*max(1, width//4))
  return _code(f"unsigned o_ = $2; return o_ + {width}u <= (unsigned)$1 ? *(const {kind}*)((const char*)($0) + o_) : {nothing};"
               .replace("*(const unsigned short*)", "(unsigned)*(const unsigned short*)"))

def _pack_text(out:DType, n:int, dtype:str) -> str:
  words = [f"pack_(x_.{'xyzw'[i]}, x_.{'xyzw'[i+1]})" for i in range(0, n, 2)]
  return _code(f"{_pack_function(dtype)} auto x_ = $0; return {_make('uint', words)};")

def _widen_text(out:DType, n:int, dtype:str) -> str:
  """fp16 by the conversion instruction, bf16 as the upper half of an fp32."""
  to_float = {"float16": 'float f_; asm("cvt.f32.f16 %0, %1;" : "=f"(f_) : "h"((unsigned short)u_)); return f_;',
              "bfloat16": "return __uint_as_float(u_ << 16);"}[dtype]
  words = [f"to_float_({_at('w_', (n + 1)//2, i//2)} >> {16*(i % 2)})" for i in range(n)]
  return _code(f"auto to_float_ = [](unsigned u_) {{ {to_float} }}; auto w_ = $0; return {_make('float', words)};")

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

def _mma_assembly(matrix:Any, a:str, b0:str, b1:str, c:str, d:str) -> str:
  return (f'asm("mma.sync.aligned.m16n8k16.row.col.f32.{matrix.ptx}.{matrix.ptx}.f32 {{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, {{%8, %9}}, '
          f'{{%10, %11, %12, %13}};" : {_operands("=f", d)} : {_operands("r", a)}, "r"({b0}), "r"({b1}), {_operands("f", c)});')

def _mma_text(out:Any, matrix:Any, half:int) -> str:
  b = "xyzw"[2*half:2*half + 2]
  return _code(f"uint4 a_ = $0, b_ = $1; float4 c_ = $2, d_; {_mma_assembly(matrix, 'a_', f'b_.{b[0]}', f'b_.{b[1]}', 'c_', 'd_')} return d_;")

# ***** the online softmax *****

def _mask(op:Callable[[Array, Array], Array]) -> Callable[..., Array]:
  return lambda lanes, s, limit, offsets, lengths: np.where(op(np.array(offsets)[:, None], limit), np.float32(-np.inf), s)

# near 0 tanh is its series, where it matters: see attn/intrinsics.py
_CAP = (f"{_EX2} auto far_ = [&](float y_) {{ return 1.0f - __fdividef(2.0f, 1.0f + ex2_(y_*{_2LOG2E!r}f)); }};"
        " auto near_ = [](float y_) { float z_ = y_*y_; return y_*"
        + "fmaf(z_, "*(len(_TANH) - 1) + f"{_TANH[-1]!r}f" + "".join(f", {c!r}f)" for c in _TANH[-2::-1]) + "; };")

def _settle_text(out:DType, matrix:Any, dtype:str, tiles:int, kinds:int, accs:int, scores:int, first:int, count:int, scale:float,
                 above:float) -> str:
  x, rows, text = f"{scale!r}f", range(ROWS), f"{_EX2} {_pack_function(dtype)} unsigned one_ = 0x{_ONES[dtype]:08x}u; "
  outgrown = " | ".join(f"!($3[{t}].{'xy'[r]} <= {2.0**above!r}f)" for t in range(tiles) for r in rows)    # no branches
  def pair(template:str) -> str: return f"make_float2({_list(template, ROWS)})"
  for t in range(tiles):
    s = [f"$5[{t*scores + i}]" for i in range(first, first + count)]
    text += f"{{ float2 o_ = $0[{t}], n_ = o_, e_ = make_float2(0.0f, 0.0f); float4 c_ = make_float4(0.0f, 0.0f, 0.0f, 0.0f); "
    text += "".join(f"n_.{r} = fmaxf(n_.{r}, fmaxf({y}.{e[0]}, {y}.{e[1]})); " for y in s for r, e in (("x", "xy"), ("y", "zw")))
    text += "".join(f"n_.{r} = fmaxf(n_.{r}, __shfl_xor_sync({WARP}, n_.{r}, {step})); " for step in (1, 2) for r in "xy")
    text += f"float2 a_ = {pair(f'ex2_((o_.@ - n_.@)*{x})')}, d_ = {pair(f'n_.@ > {NOTHING!r}f & fabsf(n_.@*{x}) > {LARGE!r}f ? n_.@ : 0.0f')}; "
    text += f"float2 b_ = {pair(f'n_.@ == {NOTHING!r}f ? {first_bias(scale)!r}f : d_.@ == 0.0f ? -n_.@*{x} : 0.0f')}; "
    text += f"$0[{t}] = n_; $1[{t}] = {pair('d_.@ == 0.0f ? b_.@ : __int_as_float(0x7fc00000)')}; "
    text += "".join(f"$2[{k*tiles + t}].{r} *= a_.{r}; " for k in range(kinds) for r in "xy")
    text += "".join(f"$4[{i}].{e} *= a_.{r}; " for i in range(t*accs, (t + 1)*accs) for e, r in zip("xyzw", "xxyy"))
    for j in range(0, count, 2):
      weights = [[f"ex2_(fmaf({y}.{e} - d_.{r}, {x}, b_.{r}))" for e, r in zip("xyzw", "xxyy")] for y in s[j:j + 2]]
      text += "".join(f"float4 {name} = make_float4({', '.join(w)}); " for name, w in zip((f"p{j}_", f"q{j}_"), weights))
      text += f"uint4 w{j}_ = make_uint4({', '.join(f'pack_({v}{j}_.{e[0]}, {v}{j}_.{e[1]})' for v in 'pq' for e in ('xy', 'zw'))}); "
      text += f"$6[{(t*scores + first + j)//2}] = w{j}_; {_mma_assembly(matrix, f'w{j}_', 'one_', 'one_', 'c_', 'c_')} "
      if kinds > 1: text += "".join(f"e_.{r} += {v}{j}_.{e[0]} + {v}{j}_.{e[1]}; " for v in "pq" for r, e in (("x", "xy"), ("y", "zw")))
    text += f"$3[{t}] = make_float2(c_.x, c_.z); " + (f"$3[{tiles + t}] = e_; " if kinds > 1 else "") + "} "
  return _code(f"if (__any_sync({WARP}, {outgrown})) {{ {text}}} return 0.0f;")

def _settle(lanes:Lanes, reference:Any, bias:Any, l:Any, part:Any, acc:Any, s:Any, p:Any, *, matrix:Any, dtype:str, tiles:int, kinds:int, accs:int,
            scores:int, first:int, count:int, scale:float, above:float) -> Array:
  x, nothing, get = np.float32(scale), np.float32(NOTHING), lanes.load_register
  with np.errstate(invalid="ignore", over="ignore"):
    outgrown = np.logical_or.reduce([~(get(part, t) <= np.float32(2.0**above)) for t in range(tiles)]).any(0)
    if not (gate := lanes.active & _any_lane(lanes, outgrown, lanes.wave)).any(): return np.zeros(len(gate), np.float32)
    def put(to:Any, i:int, value:Array) -> None: lanes.store_register(to, i, value, gate)
    for t in range(tiles):
      ys, old = [get(s, t*scores + i) for i in range(first, first + count)], get(reference, t)
      new = np.fmax.reduce([old] + [np.fmax(y[0::2], y[1::2]) for y in ys])
      for step in (1, 2): new = np.fmax(new, _xor_lane(lanes, new, step))
      alpha, shift = _exp2((old - new)*x), np.where((new > nothing) & (np.abs(new*x) > LARGE), new, np.float32(0))
      start = np.where(new == nothing, np.float32(first_bias(scale)), np.where(shift == 0, -new*x, np.float32(0)))
      put(reference, t, new)
      put(bias, t, np.where(shift == 0, start, np.float32(np.nan)))
      for k in range(kinds): put(l, k*tiles + t, get(l, k*tiles + t)*alpha)
      for i in range(t*accs, (t + 1)*accs): put(acc, i, get(acc, i)*np.repeat(alpha, 2, 0))
      c, exact = np.zeros((4, len(gate)), np.float32), np.zeros((ROWS, len(gate)), np.float32)
      for j in range(0, count, 2):
        weights = [_exp2(_fma(y - np.repeat(shift, 2, 0), np.array(x), np.repeat(start, 2, 0))) for y in ys[j:j + 2]]
        words = np.concatenate([_pack(w, dtype) for w in weights])
        put(p, (t*scores + first + j)//2, words)
        c = lanes.matrix(matrix.name, words, np.full((2, len(gate)), _ONES[dtype], np.uint32), c)
        for w in weights: exact = exact + (w[0::2] + w[1::2])
      put(part, t, c[0::2])
      if kinds > 1: put(part, tiles + t, exact)
  return np.zeros(len(gate), np.float32)

# ***** the table *****

TABLE: dict[str, Intrinsic] = {
  # vectors
  "zero": Intrinsic("make_float4(0.0f, 0.0f, 0.0f, 0.0f)", lambda lanes, _: np.zeros((4, len(lanes.active)), np.float32)),
  "ones": Intrinsic(lambda out, dtype: _code(f"unsigned x_ = 0x{_ONES[dtype]:08x}u; return make_uint4(x_, x_, x_, x_);"),
                    lambda lanes, _, dtype: np.full((4, len(lanes.active)), _ONES[dtype], np.uint32)),
  "splat": Intrinsic(lambda out, n: _code(f"float x_ = $0; return {_make('float', ['x_']*n)};"),
                     lambda lanes, x, n: np.broadcast_to(x, (n,) + x.shape)),
  "build": Intrinsic(lambda out, kind, n: _make(kind, [f"{{{i}}}" for i in range(n)]), lambda lanes, *xs, kind, n: np.stack(xs)),
  "extract": Intrinsic(lambda out, i: f"{{0}}.{'xyzw'[i]}", lambda lanes, x, i: x[i]),
  "slice": Intrinsic(lambda out, kind, start, n: _code(f"auto x_ = $0; return {_make(kind, [f'x_.{e}' for e in 'xyzw'[start:start + n]])};"),
                     lambda lanes, x, kind, start, n: x[start:start + n]),
  "concat": Intrinsic(_code("float2 x_ = $0, y_ = $1; return make_float4(x_.x, x_.y, y_.x, y_.y);"), lambda lanes, x, y: np.concatenate([x, y])),
  # fp32 arithmetic, on vectors or scalars
  "add": Intrinsic(_each("@0 + @1"), lambda lanes, x, y, lengths: x + y),
  "sub": Intrinsic(_each("@0 - @1"), lambda lanes, x, y, lengths: x - y),
  "mul": Intrinsic(_each("@0 * @1"), lambda lanes, x, y, lengths: x * y),
  "fma": Intrinsic(_each("fmaf(@0, @1, @2)"), lambda lanes, x, y, z, lengths: _fma(x, y, z)),
  "exp2": Intrinsic(_each("ex2_(@0)", _EX2), lambda lanes, x, lengths: _exp2(x)),
  "log2": Intrinsic(_each("log2f(@0)"), lambda lanes, x, lengths: _log2(x)),
  "rcp": Intrinsic(_each("1.0f/@0"), lambda lanes, x, lengths: _rcp(x)),
  "max": Intrinsic(_each("fmaxf(@0, @1)"), lambda lanes, x, y, lengths: np.fmax(x, y)),
  "as_float": Intrinsic(_each("__uint_as_float(@0)"), lambda lanes, bits, lengths: _bits(bits, "float32")),
  # memory
  "copy": Intrinsic(_copy_text, lambda lanes, to, source, nbytes, gate, _, **static: _copy(lanes, to, source, nbytes, gate, **static)),
  "commit": Intrinsic(_code('asm volatile("cp.async.commit_group;" ::: "memory"); return 0.0f;'), lambda lanes, _: lanes.commit_stores()),
  "wait": Intrinsic(lambda out, but: _code(f'asm volatile("cp.async.wait_group {but};" ::: "memory"); return 0.0f;'),
                    lambda lanes, _, but: lanes.wait_stores(but)),
  "ldmatrix": Intrinsic(_ldmatrix_text, _ldmatrix),
  # matrix unit
  "mma": Intrinsic(_mma_text, lambda lanes, a, b, c, matrix, half: lanes.matrix(matrix.name, a, b[2*half:2*half + 2], c)),
  # softmax, on the scores of a lane's two rows
  "sums": Intrinsic(_code("float4 c_ = $0; return make_float2(c_.x, c_.z);"), lambda lanes, c: c[0::2]),
  "row_sum": Intrinsic(_code("float4 p_ = $0; float2 l_ = $1; return make_float2(l_.x + (p_.x + p_.y), l_.y + (p_.z + p_.w));"),
                       lambda lanes, p, l: l + (p[0::2] + p[1::2])),
  "softcap": Intrinsic(_each("far_(@0*@1)*@2", _CAP), lambda lanes, x, inner, outer, lengths: _softcap(lanes, x, inner, outer, 0, False)),
  "softcap_series": Intrinsic(_each(f"(@0*@1*(@0*@1) < {_NEAR!r}f ? near_(@0*@1) : far_(@0*@1))*@2", _CAP),
                              lambda lanes, x, inner, outer, lengths: _softcap(lanes, x, inner, outer, 0, True)),
  "alibi": Intrinsic(_each("fmaf(@1, fabsf((float)@2 - #.0f), @0)"), lambda lanes, x, slope, distance, offsets, lengths:
                     _fma(slope, np.abs(distance.astype(np.float32) - np.array(offsets, np.float32)[:, None]), x)),
  "mask_above": Intrinsic(_each("# > @1 ? -INFINITY : @0"), _mask(np.greater)),
  "mask_below": Intrinsic(_each("# < @1 ? -INFINITY : @0"), _mask(np.less)),
  "settle": Intrinsic(_settle_text, _settle),
  "weights": Intrinsic(lambda out, scale: _code(f"{_EX2} float4 s_ = $0; float2 b_ = $1; return make_float4("
                                                + ", ".join(f"ex2_(fmaf(s_.{e}, {scale!r}f, b_.{r}))" for e, r in zip("xyzw", "xxyy")) + ");"),
                       lambda lanes, s, bias, scale: _exp2(_fma(s, np.array(scale, np.float32), np.repeat(bias, 2, 0)))),
  "pack_a": Intrinsic(lambda out, dtype: _code(f"{_pack_function(dtype)} float4 p_ = $0, q_ = $1; "
                                               "return make_uint4(pack_(p_.x, p_.y), pack_(p_.z, p_.w), pack_(q_.x, q_.y), pack_(q_.z, q_.w));"),
                      lambda lanes, p, q, dtype: np.concatenate([_pack(p, dtype), _pack(q, dtype)])),
  "pack": Intrinsic(_pack_text, lambda lanes, x, n, dtype: _pack(x, dtype)[0] if n == 2 else _pack(x, dtype)),
  "widen": Intrinsic(_widen_text, lambda lanes, bits, n, dtype: _widen(bits, n, dtype)),
  "buffer_load": Intrinsic(_buffer_load_text, lambda lanes, pointer, records, offset, _, width: _buffer_load(lanes, pointer, records, offset, width)),
  "xor_lane": Intrinsic(lambda out, mask: f"__shfl_xor_sync({WARP}, {{0}}, {mask})", _xor_lane),
  "uniform": Intrinsic(f"__shfl_sync({WARP}, {{0}}, 0)", lambda lanes, x: x),
  "opaque_uniform": Intrinsic(_code('int v_ = $0; asm volatile("" : "+r"(v_)); return v_;'), lambda lanes, x: x),
}

def zero(order:UOp) -> UOp: return express(TABLE["zero"], F4, order)
def ones(dtype:str) -> UOp: return express(TABLE["ones"], U4, UOp.const(0, dtypes.int), dtype=dtype)
def splat(x:float, n:int) -> UOp:
  return UOp.const(x, dtypes.float) if n == 1 else express(TABLE["splat"], f32(n), UOp.const(x, dtypes.float), n=n)
def _kind(x:UOp) -> tuple[str, Callable[[int], DType]]: return ("uint", u32) if x.dtype in (dtypes.uint, u32(2), u32(4)) else ("float", f32)
def build(*xs:UOp) -> UOp:
  kind, dtype = _kind(xs[0])
  return express(TABLE["build"], dtype(len(xs)), *xs, kind=kind, n=len(xs))
def extract(x:UOp, i:int) -> UOp: return express(TABLE["extract"], _kind(x)[1](1), x, i=i) if length(x) > 1 else x
def slice_(x:UOp, start:int, n:int) -> UOp:
  if n == length(x): return x
  if n == 1: return extract(x, start)
  kind, dtype = _kind(x)
  return express(TABLE["slice"], dtype(n), x, kind=kind, start=start, n=n)
def concat(x:UOp, y:UOp) -> UOp:
  """Two pairs -> four numbers."""
  return express(TABLE["concat"], F4, x, y)

def add(x:UOp, y:UOp) -> UOp: return _elementwise("add", x, y)
def sub(x:UOp, y:UOp) -> UOp: return _elementwise("sub", x, y)
def mul(x:UOp, y:UOp|float) -> UOp: return _elementwise("mul", x, y if isinstance(y, UOp) else UOp.const(y, dtypes.float))
def fma(x:UOp, y:float, z:UOp) -> UOp: return _elementwise("fma", x, UOp.const(y, dtypes.float), z)
def exp2(x:UOp) -> UOp: return _elementwise("exp2", x)
def log2(x:UOp) -> UOp: return _elementwise("log2", x)
def rcp(x:UOp) -> UOp: return _elementwise("rcp", x)
def max_(x:UOp, y:UOp) -> UOp: return _elementwise("max", x, y)

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
def sums(c:UOp) -> UOp:
  """Of P times a B of ones: the row sums, over all four lanes."""
  return express(TABLE["sums"], F2, c)
def row_sum(p:UOp, l:UOp) -> UOp: return express(TABLE["row_sum"], F2, p, l)
def softcap(x:UOp, inner:float, outer:float, series:bool) -> UOp:
  """outer * tanh(x * inner), to 1e-7 * outer; with `series` also to a few units in the last place of the value."""
  return _elementwise("softcap_series" if series else "softcap", x, UOp.const(inner, dtypes.float), UOp.const(outer, dtypes.float))
def alibi(x:UOp, slope:UOp, distance:UOp, offsets:tuple[int, ...]) -> UOp:
  """x + slope*|distance - offset|, with an offset per element."""
  return _elementwise("alibi", x, slope, distance.cast(dtypes.int), offsets=offsets)
def mask_above(x:UOp, limit:UOp, offsets:tuple[int, ...]) -> UOp: return _elementwise("mask_above", x, limit.cast(dtypes.int), offsets=offsets)
def mask_below(x:UOp, limit:UOp, offsets:tuple[int, ...]) -> UOp: return _elementwise("mask_below", x, limit.cast(dtypes.int), offsets=offsets)
def settle(reference:UOp, bias:UOp, l:UOp, part:UOp, acc:UOp, s:UOp, p:UOp, matrix:Any, dtype:str, scores:int, first:int, count:int, scale:float,
           above:float) -> UOp:
  """The online softmax's correction, as one statement: tinygrad has no branch around stores to registers.

  `p` holds exp2(s*scale + bias), rounded, of `count` of the `scores` C fragments of each query tile, from `first` on, and `part` the row sums of it,
  as `weights` and `sums` give them. P >= 0, so a sum of at most 2^above says that no P is more. Where one is more, or not a number, in any lane of
  the warp, the reference of each row becomes the maximum of it and these scores, l and the accumulators are scaled to it, and p and part computed
  anew.
  A row without a key has the reference NOTHING, and `first_bias`. bias = -reference*scale, but NaN where that is LARGE: then every trip comes here,
  and takes the difference of score and reference first. l and part: pairs of rows by query tile, then again (where there are so many) of the sums as
  not rounded. The operands are placeholders."""
  tiles = reference.max_numel()
  return express(TABLE["settle"], dtypes.float, *[x[0] for x in (reference, bias, l, part, acc, s, p)], matrix=matrix, dtype=dtype, tiles=tiles,
                 kinds=l.max_numel()//tiles, accs=acc.max_numel()//tiles, scores=scores, first=first, count=count, scale=scale, above=above)
def weights(s:UOp, bias:UOp, scale:float) -> UOp:
  """exp2(s*scale + bias)."""
  return express(TABLE["weights"], F4, s, bias, scale=scale)
def pack_a(p:UOp, q:UOp, dtype:str) -> UOp:
  """The C fragments of two neighbouring tiles -> the A fragment of 16 columns, rounded to nearest even."""
  return express(TABLE["pack_a"], U4, p, q, dtype=dtype)
def pack(x:UOp, dtype:str, native_bf16:bool=True) -> UOp:
  """n fp32 -> n/2 dwords of `dtype`, rounded to nearest even."""
  return express(TABLE["pack"], u32(length(x)//2), x, n=length(x), dtype=dtype)
def as_float(x:UOp) -> UOp:
  """Dwords as the fp32 they are."""
  return _elementwise("as_float", x)
def widen_to_float(x:UOp, n:int, dtype:str) -> UOp:
  """n 16-bit floats, two a dword (a single one in the low half), as fp32."""
  return express(TABLE["widen"], f32(n), x, n=n, dtype=dtype)
def buffer_load(base:UOp, records:UOp, offset:UOp, width:int, family:str) -> UOp:
  """`width` (2, 4, 8 or 16) bytes at `base` (an INDEX) + `offset` bytes, zero where offset + width exceeds `records` bytes."""
  type_known = UOp.const(0.0, base.dtype) if base.dtype in (dtypes.half, dtypes.bfloat16) else UOp.const(0, dtypes.int)
  return express(TABLE["buffer_load"], u32(max(1, width//4)), base, records.cast(dtypes.int), offset.cast(dtypes.uint), type_known, width=width)
def xor_lane(x:UOp, mask:int) -> UOp:
  """x of the lane whose number differs in the bits of `mask` (shfl.sync.bfly)."""
  return express(TABLE["xor_lane"], dtypes.float, x, mask=mask)
def uniform(x:UOp) -> UOp:
  """The integer x, which all lanes hold."""
  return express(TABLE["uniform"], dtypes.int, x.cast(dtypes.int))
def opaque_uniform(x:UOp) -> UOp:
  """The integer x, the same in the whole block, in a way that neither tinygrad nor the compiler can tell."""
  return express(TABLE["opaque_uniform"], dtypes.int, x.cast(dtypes.int))
