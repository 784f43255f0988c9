"""Small attention loops in HIP, one for each matrix unit, for tests of the compiler and of the reports on machine code."""
from dataclasses import dataclass
from attn.chips import CHIPS, MODELLED
from attn.chips.matrix import Matrix

# Kernels in which clang keeps up to four values in accumulation registers and counts them as spilled. These registers are as fast as others, and
# nothing goes to memory.
# A loop has the structure of a real kernel (K and V through LDS, S^T = K Q^T, softmax over registers, O^T = V^T P^T, a rare rescaling behind a
# branch), but does not compute attention.

PARKED = {(arch, 256, "bfloat16") for arch in ("gfx90a", "gfx942")}

@dataclass(frozen=True)
class Unit:
  m: int           # rows and columns of a tile
  k: int           # depth of a tile
  operand: str     # vector type of A and B
  lanes: int       # elements of A and B per lane
  acc: int         # fp32 elements of C per lane
  wave: int
  call: str

def _unit(x:Matrix) -> Unit:
  return Unit(x.M, x.K, "half", x.operand, x.accumulator, x.wave, x.call("{a}", "{b}", "{c}"))

UNITS = {name: _unit(CHIPS[name].matrix["float16"][0]) for name in MODELLED}
KEYS, WAVES = 64, 4
BARRIER = ('    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");__builtin_amdgcn_s_barrier();'
           '__builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");')

def sample(arch:str, d:int=64, exp:str="__builtin_amdgcn_exp2f", maximum:str="__builtin_fmaxf(x, y)") -> str:
  # Returns the HIP source of a kernel with a small attention loop over tiles of keys, in the form in which tinygrad renders kernels.
  # `exp` is the C function for 2^x, and `maximum` the C expression for the larger of x and y
  u = UNITS[arch]
  tiles, steps, parts, key_steps = KEYS//u.m, d//u.k, d//u.m, KEYS//u.k
  step = u.lanes if u.lanes*u.wave == u.m*u.k else 0   # on gfx11 both half-waves hold the same elements
  def fragment(at:str) -> str: return f"*(opnd*)({at})"
  lines = ["#define half _Float16", "typedef long unsigned int size_t;",
           *(f'extern "C" __attribute__((device, const)) size_t __ockl_get_{x}(unsigned int);' for x in ("local_id", "group_id", "local_size")),
           'extern "C" __attribute__((device, pure)) float __ocml_exp2_f32(float);',
           f"typedef half opnd __attribute__((ext_vector_type({u.lanes})));", f"typedef float accum __attribute__((ext_vector_type({u.acc})));",
           "typedef half half8 __attribute__((ext_vector_type(8)));",
           f"static inline __attribute__((device)) float larger(float x, float y) {{ return {maximum}; }}",
           f'extern "C" __attribute__((global)) void __attribute__((amdgpu_flat_work_group_size(1, {WAVES*u.wave}))) sample'
           "(half* o, half* q, half* k, half* v, const int n) {",
           f"  __attribute__((shared, aligned(16))) half ks[{KEYS*(d+8)}], vs[{d*(KEYS+8)}];",
           f"  int t = __ockl_get_local_id(0), g = __ockl_get_group_id(0), lane = t%{u.wave}, row = lane%{u.m}, col = (lane/{u.m})*{step};",
           f"  accum acc[{parts}] = {{}}, zero = {{}}; float m = -1e30f, l = 0.0f; opnd qf[{steps}];",
           f"  half* mine = q + ((size_t)g*{WAVES*u.m} + (t/{u.wave})*{u.m} + row)*{d};",
           *(f"  qf[{i}] = {fragment(f'mine + {i*u.k} + col')};" for i in range(steps)),
           "  for (int j = 0; j < n; j++) {",
           f"    for (int i = t; i < {KEYS*d//8}; i += {WAVES*u.wave}) {{",
           f"      *(half8*)(ks + i/{d//8}*{d+8} + i%{d//8}*8) = *(half8*)(k + (size_t)j*{KEYS*d} + i*8);",
           f"      *(half8*)(vs + i/{KEYS//8}*{KEYS+8} + i%{KEYS//8}*8) = *(half8*)(v + (size_t)j*{KEYS*d} + i*8); }}",
           BARRIER,
           f"    accum s[{tiles}] = {{}};"]
  for i in range(tiles):
    for e in range(steps):
      lines.append(f"    s[{i}] = {u.call.format(a=fragment(f'ks + ({i*u.m} + row)*{d+8} + {e*u.k} + col'), b=f'qf[{e}]', c=f's[{i}]')};")
  lines += [f"    float top = m; _Pragma(\"unroll\") for (int i = 0; i < {tiles*u.acc}; i++) top = larger(top, s[i/{u.acc}][i%{u.acc}]);",
            f"    top = larger(top, __builtin_bit_cast(float, __builtin_amdgcn_ds_bpermute((lane^{u.wave//2})*4, __builtin_bit_cast(int, top))));",
            f"    if (__builtin_amdgcn_ballot_w{u.wave}(top > m + 8.0f)) {{ float f = {exp}(m - top); l *= f; m = top;",
            f"      _Pragma(\"unroll\") for (int i = 0; i < {parts}; i++) acc[i] *= f; }}",
            f"    opnd p[{key_steps}];",
            f"    _Pragma(\"unroll\") for (int i = 0; i < {tiles*u.acc}; i++) {{ float x = {exp}(s[i/{u.acc}][i%{u.acc}] - m); l += x;",
            f"      _Pragma(\"unroll\") for (int c = 0; c < {key_steps*u.lanes//(tiles*u.acc)}; c++) "
            f"p[(i+c*{tiles*u.acc})/{u.lanes}][(i+c*{tiles*u.acc})%{u.lanes}] = x; }}"]
  for i in range(parts):
    for e in range(key_steps):
      lines.append(f"    acc[{i}] = {u.call.format(a=fragment(f'vs + ({i*u.m} + row)*{KEYS+8} + {e*u.k} + col'), b=f'p[{e}]', c=f'acc[{i}]')};")
  lines += [BARRIER,
            "  }", "  float r = __builtin_amdgcn_rcpf(l);",
            f"  _Pragma(\"unroll\") for (int i = 0; i < {parts*u.acc}; i++)",
            f"    o[((size_t)g*{WAVES} + t/{u.wave})*{u.m*d} + i*{u.wave} + lane] = acc[i/{u.acc}][i%{u.acc}]*r;", "}"]
  return "\n".join(lines)
