"""C++ stand-ins for a GPU's builtins and instructions, so that test_ops.py can compile operations' HIP and CUDA source for this machine."""

# the lanes of a wave run one after another: `in_lockstep` runs them all again until every lane has read the right values of the other lanes
EXCHANGES = 40     # maximum number of exchanges between a wave's lanes in one operation

# ***** common: lanes that exchange values *****

LOCKSTEP = r"""
typedef unsigned u32;
typedef unsigned long long u64;
extern "C" { float exp2f(float); float log2f(float); void* memcpy(void*, const void*, unsigned long); }
static float ex2(float x) { float y = exp2f(x); return y < 1.17549435e-38f ? 0.0f : y; }

// rounds to an 8-bit float e4m3: nearest, ties to even. `most` is its largest number's byte; beyond it the result is `beyond`
static u32 to_e4m3(float x, int bias, u32 most, u32 beyond, u32 nan) {
  if (x != x) return nan;
  float size = x < 0 ? -x : x;
  u32 bits = __builtin_bit_cast(u32, size), code;
  if (bits >> 23 < (u32)(128 - bias)) code = __builtin_bit_cast(u32, size*__builtin_bit_cast(float, (u32)(129 + bias) << 23) + 8388608.0f) & 0x7fffff;
  else code = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - ((127 - bias) << 3);
  if (code > most) return beyond | (x < 0 && beyond == most ? 0x80 : 0);
  return code | (x < 0 && code ? 0x80 : 0);
}

// what the lanes of a wave gave in each exchange: in the run before, and in this run
const int WORDS = 10;
static u32 known[EXCHANGES + 1][64][WORDS], fresh[EXCHANGES + 1][64][WORDS];
static int this_lane, wave, exchanges, most;

template<class T> static const u32 (*offer(T x))[WORDS] {
  int k = exchanges < EXCHANGES ? exchanges++ : EXCHANGES;
  static_assert(sizeof(x) <= sizeof(fresh[0][0]), "");
  memcpy(fresh[k][this_lane], &x, sizeof(x));
  return known[k];
}
static u32 from(u32 x, int other) { return offer(x)[other][0]; }
static u64 vote(bool x) {
  const u32 (*all)[WORDS] = offer((u32)x);
  u64 bits = 0;
  for (int i = 0; i < wave; i++) bits |= (u64)all[i][0] << i;
  return bits;
}
// An exchange is right once all exchanges before it are right: after one run more than there are exchanges.
template<class F> static void in_lockstep(F run) {
  for (int again = 0; again <= EXCHANGES; again++) {
    for (this_lane = 0; this_lane < wave; this_lane++) {
      exchanges = 0;
      run(this_lane, again == EXCHANGES);
      if (exchanges > most) most = exchanges;
    }
    memcpy(known, fresh, sizeof(known));
  }
}
"""

# ***** HIP *****

HIP = r"""
extern "C" __bf16 __truncsfbf2(float x) {
  u32 u = __builtin_bit_cast(u32, x);
  return __builtin_bit_cast(__bf16, (unsigned short)(x != x ? 0x7fc0u : (u + 0x7fffu + ((u >> 16) & 1u)) >> 16));
}
#define __builtin_amdgcn_exp2f ex2
#define __builtin_amdgcn_logf log2f
#define __builtin_amdgcn_rcpf(x) (1.0f/(x))
#define __builtin_amdgcn_ballot_w64(x) vote(x)
#define __builtin_amdgcn_ballot_w32(x) (u32)vote(x)
static bool lanes_of(u32 bits) { return bits >> this_lane & 1; }
#define __builtin_amdgcn_readfirstlane(x) (x)
#define __builtin_amdgcn_mbcnt_lo(a, b) 0u
#define __builtin_amdgcn_mbcnt_hi(a, b) (u32)this_lane
#define __builtin_amdgcn_ds_bpermute(byte, x) (int)from((u32)(x), (byte) >> 2)
// swaps the odd rows of `step` lanes of x with the even rows of y
static uint2 swap(u32 x, u32 y, int step) {
  u32 of_x = from(x, this_lane ^ step), of_y = from(y, this_lane ^ step);
  return this_lane/step % 2 ? (uint2){of_y, y} : (uint2){x, of_x};
}
#define __builtin_amdgcn_permlane32_swap(x, y, a, b) swap(x, y, 32)
#define __builtin_amdgcn_permlane16_swap(x, y, a, b) swap(x, y, 16)
static float __builtin_amdgcn_fdot2(half2 a, half2 b, float c, bool clamp) { return c + (float)a[0]*(float)b[0] + (float)a[1]*(float)b[1]; }
static float __builtin_amdgcn_fdot2_f32_bf16(bfloat2 a, bfloat2 b, float c, bool clamp) {
  return c + (float)a[0]*(float)b[0] + (float)a[1]*(float)b[1];
}
// sixteen blocks of four lanes: a lane holds a row of A, and a column of B and of D (AMD Matrix Instruction Calculator)
static float of_half(u32 bits) { return (float)__builtin_bit_cast(_Float16, (unsigned short)bits); }
static float of_bfloat(u32 bits) { return __builtin_bit_cast(float, bits << 16); }
static float4 blocks(const u32 (*all)[WORDS], float (*widen)(u32), float4 c) {
  for (int row = 0; row < 4; row++) {
    double sum = 0;
    for (int k = 0; k < 4; k++) {
      u32 a = all[this_lane/4*4 + row][k/2] >> 16*(k % 2) & 0xffff, b = all[this_lane][2 + k/2] >> 16*(k % 2) & 0xffff;
      sum += (double)widen(a)*widen(b);
    }
    c[row] = (float)(c[row] + sum);
  }
  return c;
}
static float4 __builtin_amdgcn_mfma_f32_4x4x4bf16_1k(short4 a, short4 b, float4 c, int, int, int) {
  return blocks(offer(__builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7)), of_bfloat, c);
}
static float4 __builtin_amdgcn_mfma_f32_4x4x4f16(half4 a, half4 b, float4 c, int, int, int) {
  return blocks(offer(__builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7)), of_half, c);
}
// four bits for each lane of 16 select one of the other 16 lanes, from which it takes its value
static u32 __builtin_amdgcn_permlanex16(u32 old, u32 x, u32 low, u32 high, bool a, bool b) {
  u64 selector = (u64)high << 32 | low;
  return from(x, (this_lane & ~15 ^ 16) | (int)(selector >> 4*(this_lane & 15) & 15));
}
// conversions of pairs of CDNA3's 8-bit floats, e4m3fnuz
static int __builtin_amdgcn_cvt_pk_fp8_f32(float x, float y, int old, bool high) {
  u32 pair = to_e4m3(x, 8, 0x7f, 0x80, 0x80) | to_e4m3(y, 8, 0x7f, 0x80, 0x80) << 8;
  return high ? (old & 0xffff) | pair << 16 : (old & 0xffff0000) | pair;
}
typedef float pair_of_floats __attribute__((ext_vector_type(2)));
static float of_e4m3fnuz(u32 x) {
  float size = x & 0x78 ? __builtin_bit_cast(float, ((x & 0x7f) << 20) + (119u << 23)) : (x & 7)*__builtin_bit_cast(float, 117u << 23);
  return x == 0x80 ? __builtin_nanf("") : x & 0x80 ? -size : size;
}
static pair_of_floats __builtin_amdgcn_cvt_pk_f32_fp8(int word, bool high) {
  u32 pair = (u32)word >> 16*high;
  return (pair_of_floats){of_e4m3fnuz(pair & 255), of_e4m3fnuz(pair >> 8 & 255)};
}
// selectors 8 to 11 are the signs of the halves
static u32 __builtin_amdgcn_perm(u32 hi, u32 lo, u32 selector) {
  u64 both = ((u64)hi << 32) | lo; u32 r = 0;
  for (int i = 0; i < 4; i++) {
    u32 at = selector >> 8*i & 255;
    r |= (at < 8 ? (u32)(both >> 8*at & 255) : (both >> (16*(at - 8) + 15) & 1 ? 255u : 0u)) << 8*i;
  }
  return r;
}
#define __builtin_amdgcn_mov_dpp(x, control, rows, banks, bound) (int)from((u32)(x), (this_lane & ~3) | ((control) >> 2*(this_lane & 3) & 3))
// the mode with masks: (lane & and | or) ^ xor, within 32 lanes
#define __builtin_amdgcn_ds_swizzle(x, m) (int)from((u32)(x), ((this_lane & (m) & 31 | (m) >> 5 & 31) ^ ((m) >> 10 & 31)) | (this_lane & ~31))
"""

# ***** CUDA *****

CUDA = r"""
#define __device__
#define __forceinline__
#define INFINITY __builtin_inff()
#define fmaxf __builtin_fmaxf
#define fabsf __builtin_fabsf
#define fmaf __builtin_fmaf
static float __uint_as_float(u32 x) { return __builtin_bit_cast(float, x); }
static float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
#define __shfl_sync(mask, x, source) (x)
static u32 __shfl_xor_sync(u32 mask, u32 x, int step) { return from(x, this_lane ^ step); }
// prmt (PTX ISA 9.7.9.7) of a dword with itself: a selector with its highest bit set gives the sign of a byte
static u32 permuted(u32 x, u32 selector) {
  u32 r = 0;
  for (int i = 0; i < 4; i++) {
    u32 at = selector >> 4*i & 15, byte = x >> 8*(at & 3) & 255;
    r |= (at & 8 ? (byte >> 7)*255 : byte) << 8*i;
  }
  return r;
}
static float __shfl_xor_sync(u32 mask, float x, int step) { return __uint_as_float(from(__builtin_bit_cast(u32, x), this_lane ^ step)); }
#define __any_sync(mask, x) (vote(x) != 0)
static float of_f16(u32 h) { return (float)__builtin_bit_cast(_Float16, (unsigned short)h); }
static float of_bf16(u32 h) { return __uint_as_float(h << 16); }
static u32 pack_f16(float h, float l) {
  return __builtin_bit_cast(unsigned short, (_Float16)l) | (u32)__builtin_bit_cast(unsigned short, (_Float16)h) << 16; }
static u32 round_bf16(float x) { u32 u = __builtin_bit_cast(u32, x); return x != x ? 0x7fc0u : (u + 0x7fffu + ((u >> 16) & 1u)) >> 16; }
static u32 pack_bf16(float h, float l) { return round_bf16(l) | round_bf16(h) << 16; }
struct uint2 { u32 x, y; }; struct alignas(16) uint4 { u32 x, y, z, w; };
struct float2 { float x, y; }; struct alignas(16) float4 { float x, y, z, w; };
static uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static u32 __byte_perm(u32 x, u32 y, u32 selector) {
  unsigned long long both = (unsigned long long)y << 32 | x;
  u32 r = 0;
  for (int i = 0; i < 4; i++) r |= (u32)(both >> (selector >> 4*i & 7)*8 & 0xff) << 8*i;
  return r;
}
static u32 pack_e4m3(float x, float y, float z, float w) {
  u32 r = 0; float all[4] = {x, y, z, w};
  for (int i = 0; i < 4; i++) r |= to_e4m3(all[i], 7, 0x7e, 0x7e, 0x7f) << 8*i;
  return r;
}
static u32 sub_f16x2(u32 x, u32 y) { return pack_f16(of_f16(x >> 16) - of_f16(y >> 16), of_f16(x) - of_f16(y)); }
static u32 fma_bf16x2(u32 x, u32 y, u32 z) {
  return pack_bf16(of_bf16(x >> 16)*of_bf16(y >> 16) + of_bf16(z >> 16), of_bf16(x & 0xffff)*of_bf16(y & 0xffff) + of_bf16(z & 0xffff)); }
// mma.m16n8k16 (PTX ISA 9.7.14.5.8): lane l holds columns 2*(l%4), +1, +8 and +9 of rows l/4 and l/4 + 8 of A, and these of column l/4 of B
struct Operands { u32 a[4], b[2]; };
template<float (*widen)(u32)> static float4 product(uint4 a, u32 b0, u32 b1, float4 c) {
  const u32 (*all)[WORDS] = offer(Operands{{a.x, a.y, a.z, a.w}, {b0, b1}});
  double sums[2][2] = {};
  for (int row = 0; row < 2; row++)
    for (int column = 0; column < 2; column++)
      for (int k = 0; k < 16; k++) {
        const u32 *of_a = all[this_lane/4*4 + k % 8/2], *of_b = all[(this_lane % 4*2 + column)*4 + k % 8/2];
        sums[row][column] += (double)widen(of_a[row + k/8*2] >> k % 2*16 & 0xffff)*widen(of_b[4 + k/8] >> k % 2*16 & 0xffff);
      }
  return {(float)(c.x + sums[0][0]), (float)(c.y + sums[0][1]), (float)(c.z + sums[1][0]), (float)(c.w + sums[1][1])};
}
#define product_f16 product<of_f16>
#define product_bf16 product<of_bf16>
"""
# Replaces inline assembly by the stand-ins.
ASSEMBLY = (
  (r'asm\("\{\\n\.reg \.b16 low, high;\\ncvt\.rn\.satfinite\.e4m3x2\.f32 low, %2, %1;\\n"\s*"cvt\.rn\.satfinite\.e4m3x2\.f32 high, %4, %3;'
   r'\\nmov\.b32 %0, \{low, high\};\\n\}"\s*: "=r"\(packed\) : "f"\(x\), "f"\(y\), "f"\(z\), "f"\(w\)\);', "packed = pack_e4m3(x, y, z, w);"),
  (r'asm\("rcp\.approx\.ftz\.f32 %0, %1;" : "=f"\((\w+)\) : "f"\((\w+)\)\)', r"\1 = 1.0f/\2"),
  (r'asm\("ex2\.approx\.ftz\.f32 %0, %1;" : "=f"\((\w+)\) : "f"\((\w+)\)\)', r"\1 = ex2(\2)"),
  (r'asm\("lg2\.approx\.ftz\.f32 %0, %1;" : "=f"\((\w+)\) : "f"\((\w+)\)\)', r"\1 = log2f(\2)"),
  (r'asm\("cvt\.rn\.(b?f16)x2\.f32 %0, %1, %2;" : "=r"\((\w+)\) : "f"\((\w+)\), "f"\((\w+)\)\)', r"\2 = pack_\1(\3, \4)"),
  (r'asm( volatile)?\("" :( "\+[sv]"\(\w+\))? ?(: "v"\([^;]*\))?\);', ""),
  (r'__attribute__\(\(device\)\) bool lanes_of\(unsigned\) __asm\("llvm.amdgcn.inverse.ballot.i32"\);', ""),
  (r'asm\("prmt\.b32 %0, %1, %1, 0xbb99;" : "=r"\((\w+)\) : "r"\((\w+)\)\)', r"\1 = permuted(\2, 0xbb99)"),
  (r'asm\("sub\.f16x2 %0, %1, %2;" : "=r"\((\w+)\) : "r"\(([^,]*)\), "r"\(([^,]*)\)\)', r"\1 = sub_f16x2(\2, \3)"),
  (r'asm\("fma\.rn\.bf16x2 %0, %1, %2, %3;" : "=r"\((\w+)\)\s*: "r"\(([^,]*)\), "r"\(([^,]*)\), "r"\(([^,]*)\)\)',
   r"\1 = fma_bf16x2(\2, \3, \4)"),
  (r'asm\("cvt\.f32\.f16 %0, %1;" : "=f"\((\w+)\) : "h"\(([^;]*)\)\)', r"\1 = of_f16(\2)"),
  (r'asm\("mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(\w+)\.\1\.f32 "\s*"\{%0, %1, %2, %3\}, \{%4, %5, %6, %7\}, \{%8, %9\}, \{%0, %1, %2, %3\};"'
   r'\s*: "\+f"\(c\.x\), "\+f"\(c\.y\), "\+f"\(c\.z\), "\+f"\(c\.w\)'
   r'\s*: "r"\(a\.x\), "r"\(a\.y\), "r"\(a\.z\), "r"\(a\.w\), "r"\(b0\), "r"\(b1\)\);', r"c = product_\1(a, b0, b1, c);"),
)
