"""An intrinsic's two forms agree: its HIP or CUDA text, compiled for this machine with one-lane stand-ins for the GPU's builtins and instructions,
and its meaning in numpy.

The emulator runs meanings and hardware runs texts. Every lane of a wave gets the same values here, so an exchange between lanes gives back one's own
and what is tested is all the rest: operand order, selectors, constants, rounding, branches.
"""
from __future__ import annotations
import ctypes, re, subprocess, sys
from pathlib import Path
import numpy as np
import pytest
from attn import intrinsics as hw, intrinsics_cuda as cuda, intrinsics_wgmma as wgmma
from attn.chips.families import CDNA3, FAMILIES
from attn.chips.matrix import MMA
from attn.intrinsics import MEANING, widen
from attn.tinygrad_compat import VECTOR_ELEMENTS, VECTORS, AddrSpace, Ops, UOp, dtypes

STAND_INS = r"""
typedef unsigned u32;
extern "C" { float exp2f(float); float log2f(float); float fmaf(float, float, float); }
static float bits_f(u32 x) { return __builtin_bit_cast(float, x); }
#define __builtin_amdgcn_exp2f(x) exp2f(x)
#define __builtin_amdgcn_logf(x) log2f(x)
#define __builtin_amdgcn_rcpf(x) (1.0f/(x))
#define __builtin_amdgcn_ballot_w64(x) ((x) ? 1ull : 0ull)
#define __builtin_amdgcn_ballot_w32(x) ((x) ? 1u : 0u)
#define __builtin_amdgcn_readfirstlane(x) (x)
#define __builtin_amdgcn_mbcnt_lo(a, b) 0u
#define __builtin_amdgcn_mbcnt_hi(a, b) 0u
#define __builtin_amdgcn_ds_bpermute(lane, x) (x)
#define __builtin_amdgcn_permlane32_swap(x, y, a, b) ((uint2){x, y})
#define __builtin_amdgcn_permlane16_swap(x, y, a, b) ((uint2){x, y})
#define __builtin_amdgcn_permlanex16(old, x, a, b, c, d) (x)
static u32 __builtin_amdgcn_perm(u32 hi, u32 lo, u32 selector) {
  unsigned long long both = ((unsigned long long)hi << 32) | lo; u32 r = 0;
  for (int i = 0; i < 4; i++) r |= (u32)((both >> (8*((selector >> 8*i) & 7))) & 255) << 8*i;
  return r;
}

#define INFINITY __builtin_inff()
#define fmaxf __builtin_fmaxf
#define fabsf __builtin_fabsf
#define __fdividef(x, y) ((x)/(y))
#define __uint_as_float bits_f
#define __int_as_float(x) bits_f((u32)(x))
#define __shfl_sync(mask, x, lane) (x)
#define __shfl_xor_sync(mask, x, step) (x)
#define __any_sync(mask, x) (x)
static float ex2(float x) { float y = exp2f(x); return y < 1.17549435e-38f ? 0.0f : y; }
static float half(u32 h) { return (float)__builtin_bit_cast(_Float16, (unsigned short)h); }
static u32 pack_f16(float h, float l) {
  return __builtin_bit_cast(unsigned short, (_Float16)l) | (u32)__builtin_bit_cast(unsigned short, (_Float16)h) << 16; }
static u32 round_bf16(float x) { u32 u = __builtin_bit_cast(u32, x); return x != x ? 0x7fc0u : (u + 0x7fffu + ((u >> 16) & 1u)) >> 16; }
static u32 pack_bf16(float h, float l) { return round_bf16(l) | round_bf16(h) << 16; }
"""
# the vector types of CUDA, and those of clang
STRUCTS = r"""
struct uint2 { u32 x, y; }; struct uint4 { u32 x, y, z, w; };
struct float2 { float x, y; }; struct alignas(16) float4 { float x, y, z, w; };
static uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static float sum(u32 a, u32 b) { return half(a) + half(a >> 16) + half(b) + half(b >> 16); }
// a row is in four lanes, which are all alike here, and B is all ones
static float4 times_ones(uint4 a, float4 c) {
  float x = 4*sum(a.x, a.z), y = 4*sum(a.y, a.w); return {c.x + x, c.y + x, c.z + y, c.w + y}; }
"""
EXT_VECTORS = "".join(f"typedef {VECTOR_ELEMENTS[element]} {element}{n} __attribute__((ext_vector_type({n})));\n"
                      for element in VECTOR_ELEMENTS for n in (2, 4, 8, 16))
# inline assembly -> the stand-ins
ASSEMBLY = (
  (r'asm\("ex2\.approx\.ftz\.f32 %0, %1;" : "=f"\((\w+)\) : "f"\((\w+)\)\)', r"\1 = ex2(\2)"),
  (r'asm\("cvt\.rn\.(b?f16)x2\.f32 %0, %1, %2;" : "=r"\((\w+)\) : "f"\((\w+)\), "f"\((\w+)\)\)', r"\2 = pack_\1(\3, \4)"),
  (r'asm\("cvt\.f32\.f16 %0, %1;" : "=f"\((\w+)\) : "h"\(([^;]*)\)\)', r"\1 = half(\2)"),
  (r'asm\("mma\.sync[^"]*" : "=f"\((\w+)\.x\)[^:]*: "r"\((\w+)\.x\).*?"r"\(one_\), "r"\(one_\), "f"\((\w+)\.x\)[^;]*\);',
   r"\1 = times_ones(\2, \3);"),
)
NUMPY = {dtypes.float: np.float32, dtypes.uint: np.uint32, dtypes.int: np.int32, dtypes.bool: np.bool_}
C = {dtypes.float: "float", dtypes.uint: "unsigned", dtypes.int: "int", dtypes.bool: "bool"}
SAMPLES = 48

def value(dtype, slot:int) -> UOp:
  """An operand: an element of a register array, loaded."""
  return UOp.placeholder((1,), dtype, slot, AddrSpace.REG)[0].load()

def f(n:int=1, slot:int=0) -> UOp: return value(hw.f32(n), slot)
def u(n:int=1, slot:int=0) -> UOp: return value(hw.u32(n), slot)
def i(slot:int=0) -> UOp: return value(dtypes.int, slot)
def register(n:int, slot:int, count:int=1) -> UOp: return UOp.placeholder((count,), hw.f32(n), slot, AddrSpace.REG)[0]

def correction(above:float, dtype:str, native_bf16:bool) -> UOp:
  """Two query tiles, of one vector of scores each."""
  place = lambda n, slot, count, kind=hw.f32: UOp.placeholder((count,), kind(n), slot, AddrSpace.REG)
  return hw.correct(place(1, 1, 2), place(1, 2, 2), place(2, 3, 2), place(16, 4, 4), place(8, 5, 2, hw.u32), [f(2, 6), f(2, 7)],
                    [[f(16, 8)], [f(16, 9)]], CDNA3.matrix["float16"][0], 0.18, above, dtype, native_bf16)

OFFSETS = (0, 1, 2, 3, 8, 9, 10, 11)
CASES = {
  "splat": lambda: hw.splat(1.5, 4), "build": lambda: hw.build(f(1, 0), f(1, 1)), "extract": lambda: hw.extract(f(8), 5),
  "concat": lambda: hw.concat(u(4, 0), u(4, 1)),
  "slice": lambda: hw.slice_(f(16), 8, 4), "add": lambda: hw.add(f(8, 0), f(8, 1)), "sub by a scalar": lambda: hw.sub(f(8, 0), f(1, 1)),
  "mul": lambda: hw.mul(f(8), 0.37),
  "exp2": lambda: hw.exp2(f(8)), "log2": lambda: hw.log2(f()), "rcp": lambda: hw.rcp(f()), "max": lambda: hw.max_(f(1, 0), f(1, 1)),
  "fma": lambda: hw.fma(f(4, 0), 0.3, f(4, 1)), "exponent": lambda: hw.exponent(f(8, 0), 0.18, f(1, 1)),
  "mask_above": lambda: hw.mask_above(f(8, 0), i(1), OFFSETS), "mask_below": lambda: hw.mask_below(f(8, 0), i(1), OFFSETS),
  "softcap": lambda: hw.softcap(f(8), 0.05, 30.0, False), "softcap that hardly bends": lambda: hw.softcap(f(8), 0.0005, 3000.0, True),
  "alibi": lambda: hw.alibi(f(8, 0), f(1, 1), i(2), OFFSETS),
  "pack to fp16": lambda: hw.pack(f(8), "float16", False), "pack to bf16": lambda: hw.pack(f(8), "bfloat16", False),
  "pack a pair": lambda: hw.pack(f(2), "bfloat16", False),
  "widen fp16": lambda: hw.widen_to_float(u(2), 4, "float16"), "widen one bf16": lambda: hw.widen_to_float(u(), 1, "bfloat16"),
  "as_float": lambda: hw.as_float(u(4)),
  "byte_perm": lambda: hw.byte_perm(u(1, 0), u(1, 1), 0x07060302), "byte_perm of low halves": lambda: hw.byte_perm(u(1, 0), u(1, 1), 0x05040100),
  "share_halves": lambda: hw.share_halves(u(4, 0), value(dtypes.bool, 1)),
  "uniform": lambda: hw.uniform(i()),
  **{f"pair by {mat.exchange} over {step} lanes": lambda mat=mat, step=step: hw.pair(f(), step, mat)
     for family in FAMILIES.values() for row in family.matrix.values() for mat in row for step in mat.group_steps},
  "correct": lambda: correction(2.0, "float16", False), "correct at once": lambda: correction(0.0, "float16", False),
  "correct bf16": lambda: correction(2.0, "bfloat16", False),
}

def cf(n:int=1, slot:int=0) -> UOp: return value(cuda.f32(n), slot)
def cu(n:int=1, slot:int=0) -> UOp: return value(cuda.u32(n), slot)
def array(n:int, dtype, slot:int) -> UOp: return UOp.placeholder((n,), dtype, slot, AddrSpace.REG)
def settle(kinds:int, scale:float) -> UOp:
  """Of two query tiles, the second half of their four score tiles."""
  arrays = [array(n, dtype, i) for i, (n, dtype) in enumerate(((2, cuda.F2), (2, cuda.F2), (2*kinds, cuda.F2), (2*kinds, cuda.F2), (6, cuda.F4),
                                                               (8, cuda.F4), (4, cuda.U4)))]
  return cuda.settle(*arrays, MMA["float16"], "float16", 4, 2, 2, scale, 8.0)

def wgmma_correct(dtype:str, scale:float) -> UOp:
  """Of four score tiles."""
  arrays = [array(n, dtype, i) for i, (n, dtype) in enumerate(((1, cuda.F2), (1, cuda.F2), (1, cuda.F2), (3, cuda.F4), (2, cuda.U4), (4, cuda.F4)))]
  return wgmma.correct(*arrays, cf(2, 6), dtype, scale, 8.0)

CASES |= {
  "wgmma correct": lambda: wgmma_correct("float16", 0.18), "wgmma correct of huge scores": lambda: wgmma_correct("bfloat16", 4e4),
  "cuda splat": lambda: cuda.splat(1.5, 4), "cuda build": lambda: cuda.build(cf(1, 0), cf(1, 1)), "cuda extract": lambda: cuda.extract(cf(4), 2),
  "cuda build of dwords": lambda: cuda.build(cu(1, 0), cu(1, 1)), "cuda slice": lambda: cuda.slice_(cf(4), 2, 2),
  "cuda concat": lambda: cuda.concat(cf(2, 0), cf(2, 1)), "cuda add": lambda: cuda.add(cf(4, 0), cf(4, 1)),
  "cuda sub": lambda: cuda.sub(cf(), cf(1, 1)), "cuda mul by a scalar": lambda: cuda.mul(cf(4, 0), cf(1, 1)),
  "cuda fma": lambda: cuda.fma(cf(4, 0), 0.3, cf(4, 1)), "cuda exp2": lambda: cuda.exp2(cf(4)),
  "cuda log2": lambda: cuda.log2(cf()), "cuda rcp": lambda: cuda.rcp(cf()), "cuda max": lambda: cuda.max_(cf(1, 0), cf(1, 1)),
  "cuda mask_above": lambda: cuda.mask_above(cf(2, 0), i(1), (0, 1)), "cuda mask_below": lambda: cuda.mask_below(cf(2, 0), i(1), (8, 9)),
  "cuda softcap": lambda: cuda.softcap(cf(2), 0.05, 30.0, False), "cuda softcap that hardly bends": lambda: cuda.softcap(cf(2), 0.0005, 3000.0, True),
  "cuda alibi": lambda: cuda.alibi(cf(2, 0), cf(1, 1), i(2), (8, 9)), "cuda row_sum": lambda: cuda.row_sum(cf(4, 0), cf(2, 1)),
  "cuda sums": lambda: cuda.sums(cf(4)), "cuda weights": lambda: cuda.weights(cf(4, 0), cf(2, 1), 0.18),
  "cuda pack_a": lambda: cuda.pack_a(cf(4, 0), cf(4, 1), "float16"), "cuda pack to fp16": lambda: cuda.pack(cf(4), "float16"),
  "cuda pack to bf16": lambda: cuda.pack(cf(4), "bfloat16"), "cuda pack a pair": lambda: cuda.pack(cf(2), "bfloat16"),
  "cuda widen fp16": lambda: cuda.widen_to_float(cu(), 2, "float16"), "cuda widen bf16": lambda: cuda.widen_to_float(cu(), 2, "bfloat16"),
  "cuda widen one bf16": lambda: cuda.widen_to_float(cu(), 1, "bfloat16"), "cuda as_float": lambda: cuda.as_float(cu(2)),
  "cuda settle": lambda: settle(1, 0.18), "cuda settle with exact sums": lambda: settle(2, 1.5), "cuda settle of huge scores": lambda: settle(1, 4e4),
}

def ctype(dtype) -> str: return dtype.name if dtype in VECTORS else C[dtype]

def draw(dtype, rng:np.random.Generator) -> np.ndarray:
  """(SAMPLES, lanes) of every size, with the values in it that a softmax meets."""
  n = VECTORS[dtype][1] if dtype in VECTORS else 1
  if dtype is dtypes.bool: return rng.integers(0, 2, (SAMPLES, 1)).astype(np.bool_)
  if dtype is dtypes.int: return rng.integers(-4, 14, (SAMPLES, 1), dtype=np.int32)
  if dtype is dtypes.uint or VECTORS.get(dtype, ("",))[0] == "uint32":   # pairs of ordinary 16-bit floats
    h = rng.standard_normal((SAMPLES, 2*n)).astype(np.float16)
    return h.view(np.uint32)
  x = (rng.standard_normal((SAMPLES, n))*rng.choice([0.01, 1, 40], (SAMPLES, 1))).astype(np.float32)
  x[3, 0], x[5, -1], x[7, 0] = -np.inf, 0, 65504
  x[9] = np.float32(1 + 2.0**-8)   # a tie between two bf16
  x[11, 0] = x[12, -1] = np.nan
  x[13] = x[15, 0] = cuda.NOTHING
  return x

class OneLane:
  """Lanes that all hold the same: `Lanes` for the meanings, T = SAMPLES*64."""
  wave = 64
  active = np.ones(SAMPLES*64, np.bool_)
  def load_register(self, pointer, i): return pointer[i]
  def store_register(self, pointer, i, value, gate): pointer[i] = np.where(gate, value, pointer[i])
  def matrix(self, name, a, b, c):
    """mma.sync of a B of ones, where the four lanes of a row are alike."""
    low, high = (widen(a, "float16"), widen(a >> np.uint32(16), "float16"))
    pairs = [np.float32(4)*(low[r] + high[r] + low[r + 2] + high[r + 2]) for r in range(2)]
    return c + np.stack([pairs[0], pairs[0], pairs[1], pairs[1]])

def lanes(x:np.ndarray) -> np.ndarray:
  """(SAMPLES, n) -> (T,) or (n, T), every sample in all 64 lanes of a wave."""
  wide = np.repeat(x, 64, axis=0).T
  return wide if x.shape[1] > 1 else wide[0]

def samples(x:np.ndarray) -> np.ndarray: return np.atleast_2d(x)[:, ::64].T

@pytest.fixture(scope="module")
def library(tmp_path_factory) -> tuple[dict[str, ctypes.CDLL], dict[str, UOp]]:
  """The functions f0, f1 ... of the cases, in a library for each language: their vector types have the same names."""
  pytest.importorskip("ziglang")
  made = {name: make() for name, make in CASES.items()}
  texts = {"hip": [EXT_VECTORS, STAND_INS], "cuda": [STAND_INS.replace("(uint2)", "uint2"), STRUCTS]}
  for k, (name, op) in enumerate(made.items()):
    pointers = [s.op is Ops.INDEX for s in op.src]
    parameters = ", ".join(f"{ctype(s.dtype)} *a{j}" for j, s in enumerate(op.src))
    counts = [s.src[0].max_numel() if p else 1 for s, p in zip(op.src, pointers, strict=True)]
    sources = [f"(a{j} + {n}*i)" if p else f"a{j}[i]" for j, (n, p) in enumerate(zip(counts, pointers, strict=True))]
    code = op.arg.format(*sources)
    for assembly, stand_in in ASSEMBLY: code = re.sub(assembly, stand_in, code)
    loop = f"for (int i = 0; i < {SAMPLES}; i++) out[i] = {code};"
    texts[language(name)].append(f'extern "C" void f{k}({parameters}, {ctype(op.dtype)} *out) {{ {loop} }}')
  folder:Path = tmp_path_factory.mktemp("intrinsics")
  libraries = {}
  for kind, text in texts.items():
    (folder/f"{kind}.cpp").write_text("\n".join(text))
    command = [sys.executable, "-m", "ziglang", "cc", "-x", "c++", "-std=c++17", "-nostdlib++", "-O1", "-shared", "-fPIC", "-fno-sanitize=all",
               "-ffp-contract=off", "-Wno-everything", str(folder/f"{kind}.cpp"), "-o", str(folder/f"{kind}.so")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    libraries[kind] = ctypes.CDLL(str(folder/f"{kind}.so"))
  return libraries, made

def language(name:str) -> str: return "cuda" if name.startswith(("cuda", "wgmma")) else "hip"

@pytest.mark.parametrize("name", CASES)
def test_text_and_meaning_agree(library, name:str) -> None:
  libraries, made = library
  op, rng = made[name], np.random.default_rng(list(CASES).index(name))
  inputs, given, args = [], [], []
  for s in op.src:
    if s.op is Ops.INDEX:     # a pointer to registers: `count` of them per sample
      count = s.src[0].max_numel()
      x = [draw(s.dtype, rng) for _ in range(count)]
      given.append([lanes(y) for y in x])
      memory = np.ascontiguousarray(np.stack(x, 1))
    else:
      constant = s if s.op is Ops.CONST else s.src[0] if s.op is Ops.CAST and s.src[0].op is Ops.CONST else None
      x = draw(s.dtype, rng) if constant is None else np.full((SAMPLES, 1), constant.arg, NUMPY[s.dtype])
      given.append(lanes(x))
      memory = np.ascontiguousarray(x)
    inputs.append(memory)
    args.append(aligned(memory))
  n = VECTORS[op.dtype][1] if op.dtype in VECTORS else 1
  kind = np.dtype(VECTORS[op.dtype][0]) if op.dtype in VECTORS else np.dtype(NUMPY[op.dtype])
  out = aligned(np.zeros((SAMPLES, n), kind))
  getattr(libraries[language(name)], f"f{list(CASES).index(name)}")(*[ctypes.c_void_p(a.ctypes.data) for a in args], ctypes.c_void_p(out.ctypes.data))
  with np.errstate(all="ignore"): meant = MEANING[op.arg](OneLane(), *given)
  close(out, samples(np.broadcast_to(meant, (n, SAMPLES*64) if n > 1 else (SAMPLES*64,))), ABSOLUTE.get(name, 2e-38))
  for s, a, g in zip(op.src, args, given, strict=True):
    if s.op is Ops.INDEX: close(a, np.stack([samples(y) for y in g], 1))   # what was stored through the pointer

def aligned(x:np.ndarray) -> np.ndarray:
  """A copy that starts where the widest vector may."""
  room = np.zeros(x.nbytes + 64, np.uint8)
  start = -room.ctypes.data % 64
  copy = room[start:start + x.nbytes].view(x.dtype).reshape(x.shape)
  copy[...] = x
  return copy

ABSOLUTE = {"softcap": 30*4e-7, "cuda softcap": 30*4e-7}   # it promises a share of the cap, not of the value

def close(a:np.ndarray, b:np.ndarray, absolute:float=2e-38) -> None:
  """Equal, NaN for NaN; fp32 to two units in the last place, for libm's exp2 and log2."""
  if a.dtype == np.float32: np.testing.assert_allclose(a, b, rtol=3e-7, atol=absolute)
  else: np.testing.assert_array_equal(a, b)
