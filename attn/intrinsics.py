"""Every operation that tinygrad has no UOp for: its HIP text, its CUDA text and its meaning in numpy, side by side, one entry each.

An intrinsic becomes one `Ops.CUSTOM` whose text the renderer prints as it stands; the emulator finds the meaning again by that text (`MEANING`).
Values are per lane: a scalar is an array (T,) over all T threads of the grid, a vector of n elements an array (n, T); threads of a workgroup are
adjacent, the lanes of a wave too. See `tinygrad_compat.vector_dtype` for why a fragment is one value of a vector type.

Traps of `Ops.CUSTOM` in tinygrad 0.14.0, all dealt with in `emit`: it needs an explicit dtype and at least one source (its shape is that of its
sources); an INDEX source prints as a pointer, so memory operands are passed as INDEX and everything else must be `.load()`ed; a void one vanishes.
"""
from __future__ import annotations
import functools, math, re
from dataclasses import dataclass
from typing import Any, Callable, Protocol
import numpy as np
from numpy.typing import NDArray
from attn.chips.families import FAMILIES
from attn.tinygrad_compat import VECTORS, DType, Ops, UOp, dtypes, vector_dtype

Array = NDArray[Any]

class Lanes(Protocol):
  """What an intrinsic's numpy meaning may ask of the emulator that runs it."""
  wave: int                 # lanes of a wave
  active: Array             # (T,) bool: the threads that execute this operation
  def load_bytes(self, pointer:Any, offset:Array, nbytes:int, gate:Array) -> Array:
    """uint8 (nbytes, T) from `pointer` + `offset` bytes, per thread; bounds-checked where `gate` holds, zero where it does not."""
  def store_bytes(self, pointer:Any, offset:Array, data:Array, gate:Array) -> None:
    """uint8 (nbytes, T) to `pointer` + `offset` bytes, per thread, where `gate` holds; bounds-checked."""
  def load_register(self, pointer:Any, i:int) -> Array:
    """The i-th element of a register array from `pointer` on."""
  def store_register(self, pointer:Any, i:int, value:Array, gate:Array) -> None:
    """Sets that element in the threads where `gate` holds."""
  def check_extent(self, pointer:Any, nbytes:Array) -> None:
    """Raises where the `nbytes` from `pointer` on (a buffer descriptor's range) are not all inside the buffer."""
  def barrier(self, gate:Array) -> Array:
    """The waves of the threads where `gate` holds reach a barrier; zeros."""
  def start_store(self, pointer:Any, offset:Array, data:Array, gate:Array) -> Array:
    """`store_bytes` to LDS that is under way until the thread has waited for it: until then nobody may touch what it writes; zeros."""
  def commit_stores(self) -> Array:
    """The stores that each active thread has started since it last did this make a group; zeros."""
  def wait_stores(self, but:int) -> Array:
    """The active threads wait for all their groups but the last so many; zeros."""
  def arrive(self) -> Array:
    """The workgroups of the active threads arrive at the next phase of their mbarrier, with the stores that they have started; zeros."""
  def await_arrivals(self, parity:Array) -> Array:
    """They wait for the next phase that they have not waited for, which must have this parity; zeros."""
  def warpgroup_operand(self, a:Array) -> Array:
    """The fragments of A of a warpgroup's wgmma, uint32 (registers, T), as bits (warpgroups, 64, k)."""
  def start_product(self, acc:Any, count:int, a:Callable[[], Array], b:Callable[[], Array], dtype:str, more:bool) -> Array:
    """Starts a wgmma on the `count` C fragments from `acc` on: A B^T, with `more` added to them. `a` and `b` read the operands, as bits of `dtype`
    (warpgroups, 64, k) and (warpgroups, n, k). Until the thread has waited for it nobody may touch the fragments, nor write what was read; zeros."""
  def wait_products(self) -> Array:
    """The active threads wait for all the products that they have started; zeros."""
  def check_alignment(self, pointer:Any, nbytes:int) -> None:
    """Raises where `pointer` is no multiple of `nbytes` from the begin of its buffer."""
  def probe(self, name:str, x:Array) -> Array:
    """Shows or collects x of the active threads under that name; x."""
  def matrix(self, name:str, a:Array, b:Array, c:Array) -> Array:
    """The matrix instruction `name` (of `attn.chips.matrix.Matrix.name`), on register images as the ISA lays them out."""

@dataclass(frozen=True)
class Intrinsic:
  # HIP (or CUDA) with {0}, {1} for the sources; or a function of the result dtype and the static parameters that gives it
  text: str|Callable[..., str]
  meaning: Callable[..., Array]   # (lanes, *sources, **static parameters) -> value

LARGE = 2.0**14   # a reference of more, in powers of two, has a rounding error that shows in exp2

MEANING: dict[str, Callable[..., Array]] = {} # printed text -> meaning (lanes, *sources)

def _bits(x:Array, dtype:str) -> Array: return np.ascontiguousarray(x).view(dtype)

# ***** numpy meanings *****

def round_bf16(x:Array) -> Array:
  """fp32 -> the bits (uint32, low 16) of the nearest bf16, ties to even; a NaN stays one."""
  u = _bits(x.astype(np.float32), "uint32").astype(np.uint64)
  r = ((u + 0x7fff + ((u >> 16) & 1)) >> 16).astype(np.uint32) & 0xffff
  return np.where(np.isnan(x), np.uint32(0x7fc0), r)

def round_fp16(x:Array) -> Array:
  """fp32 -> the bits (uint32, low 16) of the nearest fp16, ties to even."""
  with np.errstate(over="ignore", invalid="ignore"): return _bits(x.astype(np.float16), "uint16").astype(np.uint32)

def widen(bits:Array, dtype:str) -> Array:
  """The fp32 values of fp16 ("float16") or bf16 ("bfloat16") bits held in the low 16 bits of uint32."""
  if dtype == "float16": return _bits((bits & 0xffff).astype(np.uint16), "float16").astype(np.float32)
  return _bits((bits & 0xffff).astype(np.uint32) << np.uint32(16), "float32")

def _pack(x:Array, dtype:str) -> Array:
  r = round_fp16(x) if dtype == "float16" else round_bf16(x)
  return r[0::2] | (r[1::2] << np.uint32(16))

def _fma(x:Array, y:Array, z:Array) -> Array:   # one rounding: a product of two fp32 is exact in fp64
  with np.errstate(over="ignore", invalid="ignore"): return (x.astype(np.float64)*y + z).astype(np.float32)

def _exp2(x:Array) -> Array:   # v_exp_f32: 1 ulp, denormal inputs and outputs flushed to zero
  with np.errstate(over="ignore", under="ignore"): r = np.exp2(x.astype(np.float64)).astype(np.float32)
  return np.where(np.abs(r) < np.finfo(np.float32).tiny, np.float32(0), r)

def _log2(x:Array) -> Array:
  with np.errstate(divide="ignore", invalid="ignore"): return np.log2(x.astype(np.float64)).astype(np.float32)

def _rcp(x:Array) -> Array:
  with np.errstate(divide="ignore", invalid="ignore"): return (1/x.astype(np.float64)).astype(np.float32)

def _from_lane(lanes:Lanes, x:Array, source:Array) -> Array:
  """Each lane takes x from lane `source` (T,) of its own wave."""
  base = np.arange(x.shape[-1]) // lanes.wave * lanes.wave
  return x[..., base + source % lanes.wave]

def _xor_lane(lanes:Lanes, x:Array, mask:int) -> Array: return _from_lane(lanes, x, np.arange(x.shape[-1]) ^ mask)

def _byte_perm(lanes:Lanes, hi:Array, lo:Array, selector:Array) -> Array:
  """v_perm_b32: bytes 0-3 of the selector, the same in all lanes, take from lo, 4-7 from hi."""
  picks = int(selector[0])
  if (selector != picks).any() or picks & 0xf8f8f8f8: raise NotImplementedError("byte_perm by another selector in each lane, or of constant bytes")
  out = np.zeros_like(lo)
  for i in range(4):
    word, byte = (lo, hi)[picks >> 8*i + 2 & 1], picks >> 8*i & 3
    out |= (word >> np.uint32(8*byte) & np.uint32(0xff)) << np.uint32(8*i)
  return out

def _buffer_load(lanes:Lanes, pointer:Any, records:Array, offset:Array, width:int) -> Array:
  """Raw buffer load: `width` bytes at `pointer` + `offset`, all zero where the range check fails (offset + width > records, unsigned)."""
  records, offset = records.astype(np.int64) & 0xffffffff, offset.astype(np.int64) & 0xffffffff
  lanes.check_extent(pointer, records)
  raw = lanes.load_bytes(pointer, offset, width, lanes.active & (offset + width <= records))
  if width < 4: return np.asarray(sum(byte.astype(np.uint32) << np.uint32(8*i) for i, byte in enumerate(raw)), np.uint32)
  words = np.ascontiguousarray(raw.reshape(width//4, 4, -1).transpose(0, 2, 1)).view(np.uint32)[..., 0]
  return words if width > 4 else words[0]

# ***** the table *****

def _vec(element:str, n:int) -> str: return f"{element}{n}"   # see tinygrad_compat.VECTOR_ELEMENTS

def _each(fn:str) -> Callable[..., str]:
  """A scalar function applied to each element of a vector, written out: an indexed loop over a vector would go through memory."""
  return lambda out, n: f"({{{{ {out.name} v_ = {{0}}; ({out.name}){{{{{', '.join(fn.replace('@', f'v_[{i}]') for i in range(n))}}}}}; }}}})"

def _build(out:DType, n:int) -> str: return f"(({out.name}){{{{{', '.join(f'{{{i}}}' for i in range(n))}}}}})"

def _mask(out:DType, offsets:tuple[int, ...], op:str) -> str:
  """Elements whose key offset is beyond the limit become -inf; a select and not an addition, so that a NaN score there disappears too."""
  i = _vec("int", n := len(offsets))
  return f"({{{{ {i} i_ = {{{{{', '.join(map(str, offsets))}}}}}; (i_ {op} ({i})({{1}})) ? ({_vec('float', n)})(-__builtin_inff()) : {{0}}; }}}})"

def _softcap_text(out:DType, n:int, series:bool) -> str:
  """tanh(u) = 1 - 2/(1 + exp2(2*log2(e)*u)), which is 1 and -1 at the ends. Near 0 that cancels: the first terms of its series, where it matters."""
  far = ", ".join(f"1.0f - 2.0f*__builtin_amdgcn_rcpf(1.0f + __builtin_amdgcn_exp2f(u_[{i}]))" for i in range(n))
  if not series: return f"({{{{ {out.name} u_ = {{0}}*(({{1}})*{_2LOG2E!r}f); ({out.name}){{{{{far}}}}}*({{2}}); }}}})"
  near = f"({out.name})({_TANH[-1]!r}f)"
  for c in _TANH[-2::-1]: near = f"__builtin_elementwise_fma(z_, {near}, ({out.name})({c!r}f))"
  return (f"({{{{ {out.name} y_ = {{0}}*({{1}}), z_ = y_*y_, u_ = y_*{_2LOG2E!r}f, e_ = ({out.name}){{{{{far}}}}}; "
          f"((z_ < {_NEAR!r}f) ? y_*{near} : e_)*({{2}}); }}}})")

_TANH, _NEAR, _2LOG2E = (1.0, -1/3, 2/15, -17/315), 0.04, 2*math.log2(math.e)

def _softcap(lanes:Lanes, x:Array, inner:Array, outer:Array, n:int, series:bool) -> Array:
  with np.errstate(over="ignore", invalid="ignore"):
    u = x*inner
    far = np.float32(1) - np.float32(2)*_rcp(np.float32(1) + _exp2(u*np.float32(_2LOG2E)))
    if not series: return far*outer
    near = np.full_like(u, _TANH[-1])
    for c in _TANH[-2::-1]: near = _fma(u*u, near, np.full_like(u, c))
    return np.where(u*u < np.float32(_NEAR), u*near, far)*outer

def _alibi_text(out:DType, offsets:tuple[int, ...]) -> str:
  away = f"__builtin_elementwise_abs(({out.name})((float)({{2}})) - ({out.name}){{{{{', '.join(f'{x}.0f' for x in offsets)}}}}})"
  return f"__builtin_elementwise_fma(({out.name})({{1}}), {away}, {{0}})"

def _widen_text(out:DType, n:int, dtype:str) -> str:
  """n 16-bit floats, in the low half of a dword where there is but one."""
  if n == 1: return "__builtin_bit_cast(float, {0} << 16)" if dtype == "bfloat16" else "((float)__builtin_bit_cast(_Float16, (unsigned short)({0})))"
  return f"__builtin_convertvector(__builtin_bit_cast({_vec(_H16[dtype], n)}, {{0}}), {out.name})"

def _widen(bits:Array, n:int, dtype:str) -> Array:
  if n == 1: return widen(bits, dtype)
  words = bits if bits.ndim > 1 else bits[None]
  return np.stack([widen(words[i//2] >> np.uint32(16*(i % 2)), dtype) for i in range(n)])

_H16 = {"float16": "half", "bfloat16": "bfloat"}

def _pack_text(out:DType, n:int, dtype:str, native:bool) -> str:
  """Without a conversion instruction for bf16: add half an ulp (and the odd bit, for ties) to the fp32 pattern and keep its upper half."""
  if dtype == "float16": return f"__builtin_bit_cast({out.name}, __builtin_convertvector({{0}}, {_vec(_H16[dtype], n)}))"
  if native:   # pair by pair: of a whole vector clang makes copies
    pairs = [f"({_vec('float', 2)}){{{{x_[{i}], x_[{i+1}]}}}}" for i in range(0, n, 2)]
    words = ", ".join(f"__builtin_bit_cast(unsigned, __builtin_convertvector({pair}, {_vec('bfloat', 2)}))" for pair in pairs)
    return f"({{{{ {_vec('float', n)} x_ = {{0}}; " + (f"({out.name}){{{{{words}}}}}" if n > 2 else words) + "; }})"
  u = _vec("uint", n)
  words = ", ".join(f"__builtin_amdgcn_perm(u_[{i+1}], u_[{i}], 0x07060302u)" for i in range(0, n, 2))
  body = f"({out.name}){{{{{words}}}}}" if n > 2 else words
  return f"({{{{ {u} u_ = __builtin_bit_cast({u}, {{0}}); u_ += 0x7fffu + ((u_ >> 16) & 1u); {body}; }}}})"

def _buffer_load_text(out:DType, width:int, family:str) -> str:
  buffer = f"__builtin_amdgcn_make_buffer_rsrc((void*)({{0}}), 0, {{1}}, 0x{FAMILIES[family].descriptor:08x})"
  load = f"__builtin_amdgcn_raw_buffer_load_b{8*width}({buffer}, {{2}}, 0, 0)"
  return f"(({out.name}){load})" if width < 4 else f"__builtin_bit_cast({out.name}, {load})"

_SWAP16 = "__builtin_amdgcn_permlanex16({0}, {0}, 0x76543210u, 0xfedcba98u, false, false)"

_F2 = _vec("float", 2)

def _pair_text(x:str, step:int, exchange:str) -> str:
  """x of two lanes `step` apart, the lower one's first where the instruction (matrix.Matrix.exchange) tells which that is."""
  bits = f"__builtin_bit_cast(unsigned, {x})"
  if exchange == "permlane_swap":
    return f"__builtin_bit_cast({_F2}, __builtin_amdgcn_permlane{step}_swap({bits}, {bits}, false, false))"
  lane = f"(__builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0u)) + {step}u) & 63u"
  other = _SWAP16.replace("{0}", bits) if exchange == "permlanex16" else f"__builtin_amdgcn_ds_bpermute(({lane}) << 2, __builtin_bit_cast(int, {x}))"
  return f"({_F2}){{{{{x}, __builtin_bit_cast(float, {other})}}}}"

def _pair(lanes:Lanes, x:Array, step:int, exchange:str) -> Array:
  if exchange == "permlanex16": return np.stack([x, _xor_lane(lanes, x, step)])
  lane = np.arange(x.shape[-1])
  if exchange == "bpermute": return np.stack([x, _from_lane(lanes, x, lane + step)])
  # v_permlane16_swap_b32, v_permlane32_swap_b32: the odd rows (of `step` lanes) of the first operand change places with the even ones of the second
  odd = lane//step % 2 == 1
  return np.stack([np.where(odd, _xor_lane(lanes, x, step), x), np.where(odd, x, _xor_lane(lanes, x, step))])

def _code(text:str, **names:Any) -> str:
  """C with its braces doubled, for `str.format`, and then `$name` replaced by what `names` has for it."""
  return re.sub(r"\$(\w+)", lambda found: str(names[found[1]]), text.replace("{", "{{").replace("}", "}}"))

def _correct_text(out:DType, tiles:int, vectors:int, n:int, accs:int, wave:int, steps:tuple[int, ...], exchange:str, scale:float, above:float,
                  dtype:str, native:bool) -> str:
  m, bias, l, acc, p, *sources = (f"{{{i}}}" for i in range(5 + tiles*(1 + vectors)))
  sums, scores = sources[:tiles], [sources[tiles + t*vectors:tiles + (t + 1)*vectors] for t in range(tiles)]
  def highest(t:int) -> str:   # clang makes three-operand maxima of pairs
    return functools.reduce(lambda x, y: f"__builtin_fmaxf({x}, {y})", [f"{x}[{i}]" for x in scores[t] for i in range(n)], f"{m}[{t}]")
  def outgrown(t:int) -> str:
    if above: return f"!(t{t}_[0] + t{t}_[1] <= {2**above!r}f)"
    return f"!(t{t}_[0] + t{t}_[1] < __builtin_inff()) | ({highest(t)} > {m}[{t}])"
  def weigh(t:int, k:int) -> str:
    return _code(" { $V x_ = __builtin_elementwise_fma($x - d_, ($V)($c), ($V)(e_)), v_ = {$exp};$sum $p = $packed; }", V=_vec("float", n),
                 x=scores[t][k], c=f"{scale!r}f", exp=", ".join(f"__builtin_amdgcn_exp2f(x_[{i}])" for i in range(n)),
                 sum="".join(f" t{t}_ += __builtin_shufflevector(v_, v_, {i}, {i + 1});" for i in range(0, n, 2)),
                 p=f"{p}[{t*vectors + k}]", packed=_pack_text(vector_dtype("uint32", n//2) if n > 2 else dtypes.uint, n, dtype, native)
                 .replace("{0}", "v_"))
  meet = "".join(_code(" { $F2 y_ = $pair; n_ = __builtin_fmaxf(y_[0], y_[1]); }", F2=_F2, pair=_pair_text("n_", step, exchange)) for step in steps)
  correct = "".join(_code(
    " { float o_ = $m, n_ = $highest;$meet float b_ = -n_*$c, a_ = __builtin_amdgcn_exp2f((o_ - n_)*$c); bool w_ = !(__builtin_fabsf(b_) <= $large);"
    " float d_ = w_ ? n_ : 0.0f, e_ = w_ ? 0.0f : b_; $bias = n_ == o_ ? $bias : w_ ? $nan : b_; $m = n_; $l *= a_;$accs t$t_ = ($F2)(0.0f);$weigh }",
    m=f"{m}[{t}]", bias=f"{bias}[{t}]", l=f"{l}[{t}]", highest=highest(t), meet=meet, c=f"{scale!r}f", large=f"{LARGE!r}f",
    nan='__builtin_nanf("")', accs="".join(f" {acc}[{i}] *= a_;" for i in range(t*accs, (t + 1)*accs)), t_=f"{t}_", F2=_F2,
    weigh="".join(weigh(t, k) for k in range(vectors)))
    for t in range(tiles))
  return _code("({$sums if (__builtin_expect(__builtin_amdgcn_ballot_w$wave($outgrown) != 0, 0)) {$correct }$add 0.0f; })", wave=wave,
               correct=correct, sums="".join(f" {_F2} t{t}_ = {x};" for t, x in enumerate(sums)),
               outgrown=" | ".join(outgrown(t) for t in range(tiles)),
               add="".join(f" {l}[{t}] += t{t}_;" for t in range(tiles)))

def _correct(lanes:Lanes, reference:Any, bias:Any, l:Any, acc:Any, p:Any, *rest:Array, tiles:int, vectors:int, n:int, accs:int, wave:int,
             steps:tuple[int, ...], exchange:str, scale:float, above:float, dtype:str, native:bool) -> Array:
  c, sums = np.float32(scale), list(rest[:tiles])
  with np.errstate(all="ignore"):
    olds = [lanes.load_register(reference, t) for t in range(tiles)]
    scores = [np.stack(rest[tiles + t*vectors:tiles + (t + 1)*vectors]) for t in range(tiles)]
    maxima = [np.fmax(o, np.fmax.reduce(x, axis=(0, 1))) for o, x in zip(olds, scores)]
    if above: outgrown = [~(x[0] + x[1] <= np.float32(2**above)) for x in sums]
    else: outgrown = [~(x[0] + x[1] < np.float32(np.inf)) | (m > o) for x, m, o in zip(sums, maxima, olds)]
    gate = lanes.active & _any_lane(lanes, np.logical_or.reduce(outgrown), wave)
    for t in range(tiles) if gate.any() else ():
      old, m = olds[t], maxima[t]
      for step in steps: m = np.fmax(*_pair(lanes, m, step, exchange))
      b, alpha = -m*c, _exp2((old - m)*c)
      large = ~(np.abs(b) <= LARGE)
      lanes.store_register(bias, t, np.where(m == old, lanes.load_register(bias, t), np.where(large, np.float32(np.nan), b)), gate)
      lanes.store_register(reference, t, m, gate)
      lanes.store_register(l, t, lanes.load_register(l, t)*alpha, gate)
      for i in range(t*accs, (t + 1)*accs): lanes.store_register(acc, i, lanes.load_register(acc, i)*alpha, gate)
      total = np.zeros_like(sums[t])
      for k, x in enumerate(scores[t]):
        v = _exp2(_fma(x - np.where(large, m, np.float32(0)), np.array(c), np.where(large, np.float32(0), b)))
        for i in range(0, n, 2): total = total + v[i:i+2]
        packed = _pack(v, dtype)
        lanes.store_register(p, t*vectors + k, packed if n > 2 else packed[0], gate)
      sums[t] = np.where(gate, total, sums[t])
    for t, x in enumerate(sums): lanes.store_register(l, t, lanes.load_register(l, t) + x, lanes.active)
  return np.zeros(len(gate), np.float32)

def _any_lane(lanes:Lanes, x:Array, wave:int) -> Array: return np.repeat((x & lanes.active).reshape(-1, wave).any(1), wave)

def _load_to_lds_text(out:DType, family:str) -> str:
  """The instruction by its LLVM name: clang 20 has no builtin for it."""
  return _code("({ __attribute__((device)) "
               "void load_lds(__amdgpu_buffer_rsrc_t, __attribute__((address_space(3))) void*, unsigned, int, int, int, int)"
               ' __asm("llvm.amdgcn.raw.ptr.buffer.load.lds"); load_lds(__builtin_amdgcn_make_buffer_rsrc((void*)($p), 0, $records, $flags), '
               "(__attribute__((address_space(3))) void*)($lds), 16, $offset, 0, 0, 0); 0.0f; })",
               p="{0}", records="{1}", offset="{2}", lds="{3}", flags=f"0x{FAMILIES[family].descriptor:08x}")

def _load_to_lds(lanes:Lanes, pointer:Any, records:Array, offset:Array, lds:Any) -> Array:
  records, offset = records.astype(np.int64) & 0xffffffff, offset.astype(np.int64) & 0xffffffff
  lanes.check_extent(pointer, records)
  raw = lanes.load_bytes(pointer, offset, 16, lanes.active & (offset + 16 <= records))
  lanes.start_store(lds, np.arange(raw.shape[1]) % lanes.wave * 16, raw, lanes.active)
  return lanes.commit_stores()    # s_waitcnt counts each load by itself

def _load_transposed(lanes:Lanes, pointer:Any) -> Array:
  loaded = lanes.load_bytes(pointer, np.zeros(lanes.active.shape, np.int64), 8, lanes.active)
  raw = np.ascontiguousarray(loaded.T).view(np.uint16).astype(np.uint32)   # (T, 4)
  lane = np.arange(raw.shape[0])
  got = [raw[lane // 16 * 16 + 4*e + lane % 16 // 4, lane % 4] for e in range(4)]
  return np.stack([got[0] | got[1] << np.uint32(16), got[2] | got[3] << np.uint32(16)])

def _share_halves_text(out:DType, n:int) -> str:
  u, other = _vec("uint", n), ", ".join(_SWAP16.replace("{0}", f"v_[{i}]") for i in range(n))
  pick = [f"__builtin_shufflevector({a}, {b}, {', '.join(map(str, range(2*n)))})" for a, b in (("v_", "o_"), ("o_", "v_"))]
  return f"({{{{ {u} v_ = {{0}}; {u} o_ = {{{{{other}}}}}; ({{1}}) ? {pick[0]} : {pick[1]}; }}}})"

def _matrix_text(out:DType, matrix:Any) -> str:
  kind = matrix.operand_type if matrix.operand_type == "long" else _vec(matrix.operand_type, matrix.operand)
  a, b = (f"__builtin_bit_cast({kind}, {{{i}}})" for i in range(2))
  return f"__builtin_amdgcn_{matrix.name}({a}, {b}, {{2}}{matrix.tail})"

TABLE: dict[str, Intrinsic] = {
  # vectors
  "splat": Intrinsic(lambda out, n: f"(({out.name})({{0}}))", lambda lanes, x, n: np.broadcast_to(x, (n,) + x.shape)),
  "build": Intrinsic(_build, lambda lanes, *xs, n: np.stack(xs)),
  "extract": Intrinsic(lambda out, i: f"{{0}}[{i}]", lambda lanes, x, i: x[i]),
  "concat": Intrinsic(lambda out, n: f"__builtin_shufflevector({{0}}, {{1}}, {', '.join(map(str, range(n)))})",
                      lambda lanes, x, y, n: np.concatenate([x, y])),
  "slice": Intrinsic(lambda out, start, n: f"__builtin_shufflevector({{0}}, {{0}}, {', '.join(str(start+i) for i in range(n))})",
                     lambda lanes, x, start, n: x[start:start+n]),
  # fp32 arithmetic, on vectors or scalars
  "add": Intrinsic("({0} + {1})", lambda lanes, x, y: x + y),
  "sub": Intrinsic("({0} - {1})", lambda lanes, x, y: x - y),
  "mul": Intrinsic("({0} * {1})", lambda lanes, x, y: x * y),
  "fma": Intrinsic("__builtin_elementwise_fma({0}, {1}, {2})", lambda lanes, x, y, z: _fma(x, y, z)),
  "exponent": Intrinsic(lambda out: f"__builtin_elementwise_fma({{0}}, ({out.name})({{1}}), ({out.name})({{2}}))",
                        lambda lanes, x, scale, bias: _fma(x, scale, bias)),
  "exp2": Intrinsic("__builtin_amdgcn_exp2f({0})", lambda lanes, x: _exp2(x)),
  "exp2_each": Intrinsic(_each("__builtin_amdgcn_exp2f(@)"), lambda lanes, x, n: _exp2(x)),
  "log2": Intrinsic("__builtin_amdgcn_logf({0})", lambda lanes, x: _log2(x)),
  "rcp": Intrinsic("__builtin_amdgcn_rcpf({0})", lambda lanes, x: _rcp(x)),
  "max": Intrinsic("__builtin_fmaxf({0}, {1})", lambda lanes, x, y: np.fmax(x, y)),
  "mask_above": Intrinsic(lambda out, offsets: _mask(out, offsets, ">"),
                          lambda lanes, x, limit, offsets: np.where(np.array(offsets)[:, None] > limit, np.float32(-np.inf), x)),
  "mask_below": Intrinsic(lambda out, offsets: _mask(out, offsets, "<"),
                          lambda lanes, x, limit, offsets: np.where(np.array(offsets)[:, None] < limit, np.float32(-np.inf), x)),
  "softcap": Intrinsic(_softcap_text, _softcap),
  "alibi": Intrinsic(_alibi_text, lambda lanes, x, slope, distance, offsets:
                     _fma(slope, np.abs(distance.astype(np.float32) - np.array(offsets, np.float32)[:, None]), x)),
  # conversion of n fp32 to n/2 dwords of two 16-bit floats, to nearest even
  "pack": Intrinsic(_pack_text, lambda lanes, x, n, dtype, native: _pack(x, dtype)[0] if n == 2 else _pack(x, dtype)),
  "widen": Intrinsic(_widen_text, lambda lanes, bits, n, dtype: _widen(bits, n, dtype)),
  "as_float": Intrinsic(lambda out: f"__builtin_bit_cast({out.name}, {{0}})", lambda lanes, bits: _bits(bits, "float32")),
  # across lanes
  "pair": Intrinsic(lambda out, step, exchange: _pair_text("{0}", step, exchange), _pair),
  "share_halves": Intrinsic(_share_halves_text, lambda lanes, x, low, n: np.concatenate([np.where(low, x, other := _xor_lane(lanes, x, 16)),
                                                                                         np.where(low, other, x)])),
  "uniform": Intrinsic("__builtin_amdgcn_readfirstlane({0})", lambda lanes, x: x),
  "correct": Intrinsic(_correct_text, _correct),
  # order; further sources only say what comes before
  "barrier": Intrinsic('({{ __builtin_amdgcn_sched_barrier(0); __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup", "local"); '
                       '__builtin_amdgcn_s_barrier(); '
                       '__builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup", "local"); __builtin_amdgcn_sched_barrier(0); 0.0f; }})',
                       lambda lanes, *_: lanes.barrier(lanes.active)),
  "barrier_of": Intrinsic("({{ if (__builtin_amdgcn_readfirstlane({0})) __builtin_amdgcn_s_barrier(); 0.0f; }})",
                          lambda lanes, waves, *_: lanes.barrier(lanes.active & (waves != 0))),
  "wait_loads": Intrinsic(lambda out, n: f"({{{{ __builtin_amdgcn_s_waitcnt({0x0f70 | n & 15 | n >> 4 << 14}); 0.0f; }}}})",
                          lambda lanes, *_, n: lanes.wait_stores(n)),
  "priority": Intrinsic(lambda out, level: f"({{{{ __builtin_amdgcn_s_setprio({level}); 0.0f; }}}})",
                        lambda lanes, *_, level: np.zeros(lanes.active.shape, np.float32)),
  "opaque_uniform": Intrinsic('({{ int v_ = {0}; asm volatile("" : "+s"(v_)); v_; }})', lambda lanes, x: x),
  "opaque": Intrinsic('({{ int v_ = {0}; asm volatile("" : "+v"(v_)); v_; }})', lambda lanes, x, _: x),
  "sched_barrier": Intrinsic("({{ __builtin_amdgcn_sched_barrier(0); 0.0f; }})", lambda lanes, x, *_: np.zeros(x.shape[-1], np.float32)),
  "settle": Intrinsic(lambda out, n: _code("({$pins 0.0f; })", pins="".join(f' asm volatile("" :: "v"(({{{i}}})[0]));' for i in range(n))),
                      lambda lanes, *_, n: np.zeros(lanes.active.shape, np.float32)),
  "declare": Intrinsic("{0}", lambda lanes, x, _: x),
  # bits
  "byte_perm": Intrinsic("__builtin_amdgcn_perm({0}, {1}, {2})", _byte_perm),
  # memory; the last source only makes the renderer declare the buffer's element type, which it does for computed values alone
  "buffer_load": Intrinsic(_buffer_load_text,
                           lambda lanes, pointer, records, offset, _, width, family: _buffer_load(lanes, pointer, records, offset, width)),
  "load_to_lds": Intrinsic(_load_to_lds_text,
                           lambda lanes, pointer, records, offset, lds, *_, family: _load_to_lds(lanes, pointer, records, offset, lds)),
  "load_transposed": Intrinsic(lambda out: f"__builtin_bit_cast({out.name}, __builtin_amdgcn_ds_read_tr16_b64_v4i16("
                               "(__attribute__((address_space(3))) __typeof__(short __attribute__((vector_size(8))))*)({0})))", _load_transposed),
  # matrix unit
  "matrix": Intrinsic(_matrix_text, lambda lanes, a, b, c, matrix: lanes.matrix(matrix.name, a, b, c)),
}

# ***** emission *****

def emit(name:str, out:DType, *srcs:UOp, **static:Any) -> UOp: return express(TABLE[name], out, *srcs, **static)

def express(entry:Intrinsic, out:DType, *srcs:UOp, **static:Any) -> UOp:
  """One CUSTOM UOp for an intrinsic with result dtype `out`; `static` are its compile-time parameters (they end up in the text)."""
  text = entry.text if isinstance(entry.text, str) else entry.text(out=out, **static)
  MEANING.setdefault(text, functools.partial(entry.meaning, **static))
  return UOp(Ops.CUSTOM, out, srcs, text)

def f32(n:int) -> DType: return dtypes.float if n == 1 else vector_dtype("float32", n)
def u32(n:int) -> DType: return dtypes.uint if n == 1 else vector_dtype("uint32", n)
def length(x:UOp) -> int: return VECTORS[x.dtype][1] if x.dtype in VECTORS else 1

def splat(x:float, n:int) -> UOp: return UOp.const(x, dtypes.float) if n == 1 else emit("splat", f32(n), UOp.const(x, dtypes.float), n=n)
def build(*xs:UOp) -> UOp: return emit("build", u32(len(xs)) if xs[0].dtype == dtypes.uint else f32(len(xs)), *xs, n=len(xs))
def extract(x:UOp, i:int) -> UOp:
  return emit("extract", dtypes.uint if VECTORS[x.dtype][0] == "uint32" else dtypes.float, x, i=i) if length(x) > 1 else x
def concat(x:UOp, y:UOp) -> UOp: return emit("concat", vector_dtype(VECTORS[x.dtype][0], 2*length(x)), x, y, n=2*length(x))
def slice_(x:UOp, start:int, n:int) -> UOp:
  if n == 1: return extract(x, start)
  return x if n == length(x) else emit("slice", vector_dtype(VECTORS[x.dtype][0], n), x, start=start, n=n)

def add(x:UOp, y:UOp) -> UOp: return emit("add", x.dtype, x, y)
def sub(x:UOp, y:UOp) -> UOp: return emit("sub", x.dtype, x, y)
def mul(x:UOp, y:UOp|float) -> UOp: return emit("mul", x.dtype, x, y if isinstance(y, UOp) else UOp.const(y, dtypes.float))
def exp2(x:UOp) -> UOp: return emit("exp2", x.dtype, x) if length(x) == 1 else emit("exp2_each", x.dtype, x, n=length(x))
def log2(x:UOp) -> UOp: return emit("log2", x.dtype, x)
def fma(x:UOp, y:float, z:UOp) -> UOp: return emit("fma", z.dtype, x, splat(y, length(z)), z)
def rcp(x:UOp) -> UOp: return emit("rcp", x.dtype, x)
def max_(x:UOp, y:UOp) -> UOp: return emit("max", x.dtype, x, y)
def exponent(x:UOp, scale:float, bias:UOp) -> UOp:
  """x*scale + bias, of a vector and two scalars."""
  return emit("exponent", x.dtype, x, UOp.const(scale, dtypes.float), bias)
def correct(reference:UOp, bias:UOp, l:UOp, acc:UOp, p:UOp, sums:list[UOp], scores:list[list[UOp]], matrix:Any, scale:float, above:float, dtype:str,
            native_bf16:bool, *done:UOp) -> UOp:
  """The online softmax's correction, as one statement (tinygrad has no branch around stores to registers), and l += sums.

  `p` holds the weights P = exp2(scores*scale + bias) of a trip, packed to `dtype`, and `sums` their sums in this lane, the even and the odd ones.
  No weight is negative: a sum of at most 2^above shows that none exceeds it. Where it is larger, or inf or NaN, in any lane of the wave, the
  reference of every row becomes the maximum of its scores so far, over the lane groups, l and the accumulators are scaled to it, and the weights and
  sums are taken anew. bias = -reference*scale; NaN where that is LARGE: then its rounding would show in one fma, so each trip comes here, where the
  difference is taken first. The same goes for each trip in which a score is NaN or +inf: right, but slow. With above = 0 the reference follows every
  maximum that has grown, for which scores are compared.

  reference, bias, l, acc and p are placeholders, with as many elements for each query tile; the value means nothing: store it to order what
  follows."""
  tiles = len(scores)
  return emit("correct", dtypes.float, *[x[0] for x in (reference, bias, l, acc, p)], *sums, *[x for xs in scores for x in xs], *done, tiles=tiles,
              vectors=len(scores[0]), n=length(scores[0][0]),
              accs=acc.max_numel()//tiles, wave=matrix.wave, steps=matrix.group_steps, exchange=matrix.exchange,
              scale=scale, above=above, dtype=dtype, native=native_bf16)
def opaque(x:UOp, trip:UOp) -> UOp:
  """The integer x, in a way that the compiler can't tell: what is loaded from there is loaded anew in every `trip` and not kept in registers."""
  return emit("opaque", dtypes.int, x.cast(dtypes.int), trip if trip.dtype == dtypes.float else trip.cast(dtypes.int))
def opaque_uniform(x:UOp) -> UOp:
  """The integer x, the same in the whole workgroup, in a way that neither tinygrad nor the compiler can tell."""
  return emit("opaque_uniform", dtypes.int, x.cast(dtypes.int))
def barrier(*done:UOp) -> UOp:
  """A workgroup barrier by hand, with nothing scheduled or moved in LDS across it, once the values `done` are there. A statement."""
  return emit("barrier", dtypes.float, *done)
def barrier_of(waves:UOp, *done:UOp) -> UOp:
  """A barrier that only the waves for which `waves` is not zero execute: from then on the others are a barrier behind. A statement."""
  return emit("barrier_of", dtypes.float, waves.cast(dtypes.int), *done)
def wait_loads(n:int, *done:UOp) -> UOp:
  """Waits until at most `n` of this wave's loads to LDS are under way (s_waitcnt vmcnt). A statement."""
  return emit("wait_loads", dtypes.float, *done, n=n)
def priority(level:int, *done:UOp) -> UOp:
  """This wave's priority among those of its SIMD from here on, 0 to 3 (s_setprio). A statement."""
  return emit("priority", dtypes.float, *done, level=level)
def load_to_lds(base:UOp, records:UOp, offset:UOp, lds:UOp, family:str, *done:UOp) -> UOp:
  """`buffer_load` of 16 bytes straight to LDS: lane l's go to `lds` (an INDEX: wave-uniform) + 16*l. Under way until `wait_loads`. A statement."""
  return emit("load_to_lds", dtypes.float, base, records.cast(dtypes.int), offset.cast(dtypes.uint), lds, UOp.const(0.0, base.dtype), *done,
              family=family)
def load_transposed(lds:UOp) -> UOp:
  """ds_read_b64_tr_b16: the 16 lanes of a group each name 4 consecutive 16-bit elements, lane l those of row l//4, columns 4*(l%4) on, of a 4 x 16
  matrix; lane l gets its column l (CDNA4 ISA section 11.4)."""
  return emit("load_transposed", u32(2), lds)
def sched_barrier(*done:UOp) -> UOp:
  """Nothing is scheduled across the point at which all of `done` are known: keeps loads from being started long before their use. A statement, like
  `correct`."""
  return emit("sched_barrier", dtypes.float, *done)
def settle(*values:UOp) -> UOp:
  """What makes the vectors `values` is done: the compiler may put work off into a later branch, beyond a barrier. A statement."""
  return emit("settle", dtypes.float, *values, n=len(values))
def softcap(x:UOp, inner:float, outer:float, series:bool) -> UOp:
  """outer * tanh(x * inner), to 1e-7 * outer; with `series` also to a few units in the last place of the value."""
  return emit("softcap", x.dtype, x, UOp.const(inner, dtypes.float), UOp.const(outer, dtypes.float), n=length(x), series=series)
def alibi(x:UOp, slope:UOp, distance:UOp, offsets:tuple[int, ...]) -> UOp:
  """x + slope*|distance - offset|, with an offset per element."""
  return emit("alibi", x.dtype, x, slope, distance.cast(dtypes.int), offsets=offsets)
def declare(x:UOp, dtype:DType) -> UOp:
  """x itself. The renderer declares a 16-bit type where a value of it is computed, which storing dwords to a buffer of that type is not."""
  return emit("declare", x.dtype, x, UOp.const(0.0, dtype))
def mask_above(x:UOp, limit:UOp, offsets:tuple[int, ...]) -> UOp: return emit("mask_above", x.dtype, x, limit.cast(dtypes.int), offsets=offsets)
def mask_below(x:UOp, limit:UOp, offsets:tuple[int, ...]) -> UOp: return emit("mask_below", x.dtype, x, limit.cast(dtypes.int), offsets=offsets)

def pack(x:UOp, dtype:str, native_bf16:bool) -> UOp:
  """n fp32 -> n/2 dwords of `dtype`, rounded to nearest even."""
  return emit("pack", u32(length(x)//2), x, n=length(x), dtype=dtype, native=native_bf16)

def widen_to_float(x:UOp, n:int, dtype:str) -> UOp:
  """n 16-bit floats, two a dword (a single one in the low half), as fp32."""
  return emit("widen", f32(n), x, n=n, dtype=dtype)
def as_float(x:UOp) -> UOp:
  """Dwords as the fp32 they are."""
  return emit("as_float", f32(length(x)), x)
def uniform(x:UOp) -> UOp:
  """The integer x, which all lanes hold, told to the compiler to be uniform (v_readfirstlane_b32): it goes to a scalar register."""
  return emit("uniform", dtypes.int, x.cast(dtypes.int))

def pair(x:UOp, step:int, matrix:Any) -> UOp:
  """x of this lane and of one that is `step` lanes away, in whatever order: for an operation that does not mind it, over all `matrix.group_steps`. By
  v_permlane16_swap_b32 and v_permlane32_swap_b32 (CDNA4 ISA section 12), v_permlanex16_b32 or ds_bpermute_b32, as matrix.exchange says."""
  return emit("pair", f32(2), x, step=step, exchange=matrix.exchange)
def share_halves(x:UOp, low:UOp) -> UOp:
  """Lanes l and l+16 both get lane l's vector followed by lane l+16's; `low` holds in lanes 0-15."""
  return emit("share_halves", u32(2*length(x)), x, low, n=length(x))

def byte_perm(hi:UOp, lo:UOp, selector:int) -> UOp:
  """Four bytes picked from the eight of (hi, lo): byte value 0-3 of `selector` takes from lo, 4-7 from hi (v_perm_b32)."""
  return emit("byte_perm", dtypes.uint, hi, lo, UOp.const(selector, dtypes.uint))

OUT_OF_RANGE = 0x80000000   # an offset beyond any descriptor's range, which is at most 0x7ffffffe

def buffer_load(base:UOp, records:UOp, offset:UOp, width:int, family:str) -> UOp:
  """`width` (1, 2, 4, 8 or 16) bytes at `base` (an INDEX: wave-uniform) + `offset` bytes, zero where offset + width exceeds `records`: the memory
  unit checks the range, so a masked lane costs no branch. One or two bytes come in the low end of a dword."""
  declare = UOp.const(0.0, base.dtype) if base.dtype in (dtypes.half, dtypes.bfloat16) else UOp.const(0, dtypes.int)
  return emit("buffer_load", u32(max(1, width//4)), base, records.cast(dtypes.int), offset.cast(dtypes.uint), declare, width=width, family=family)

def shaped_wmma(matrix:Any, a:UOp, b:UOp, acc:UOp) -> UOp:
  """acc + A B by one matrix instruction, a `chips.matrix.Matrix`; a and b are register images.

  This is tinygrad's SHAPED_WMMA (`UOp.wmma` in 0.14.0) with the shape in the value's type instead of in the UOp's: an `Ops.WMMA` wants shaped
  operands, which the devectorizer takes apart element by element, and names builtins that do not exist for the 32x32 shapes."""
  return emit("matrix", acc.dtype, a, b, acc, matrix=matrix)
