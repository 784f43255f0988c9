"""Renders compound operations, which are defined by Python functions, as HIP text for clang."""
from __future__ import annotations
from collections.abc import Sequence
from typing import Any, ClassVar
from attn.chips import get_chip
from attn.ops import numerics
from attn.ops.numerics import IN_A_DWORD, ONES_OF
from attn.ops.operation import Value
from attn.ops.printer import Printer, RegisterArray, Signature, Term, bare, element_of, float_literal, length_of, returned, vector_of, wrapped

class Hip(Printer):
  """Renders a compound operation, which is defined by a Python function, as HIP text for clang."""
  # clang's vector types have arithmetic and access to elements
  header = "static inline __attribute__((device, always_inline)) "
  functions_of_numbers: ClassVar[dict[str, str]] = {
    "log2": "__builtin_amdgcn_logf({0})", "rcp": "__builtin_amdgcn_rcpf({0})", "max": "__builtin_fmaxf({0}, {1})"}
  infinity, not_a_number = "__builtin_inff()", '__builtin_nanf("")'
  def rarely(self, condition:str) -> str: return f"__builtin_expect({bare(condition)}, 0)"
  def at(self, text:str, ctype:str, i:int) -> str: return text if length_of(ctype) == 1 else f"{text}[{i}]"
  def vector_text(self, out:str, values:Sequence[str]) -> str: return f"({out}){{{', '.join(values)}}}"
  def same(self, *xs:Value) -> tuple[str, list[Term]]:
    """Returns (widest C type among the operands `xs`, the operands converted to this type)."""
    # clang's elementwise builtins need operands of one type
    terms = [self.term(x) for x in xs]
    wide = max((t.type for t in terms), key=length_of)
    return wide, [t if t.type == wide else Term(self, f"({wide})({bare(t.text)})", wide) for t in terms]
  def fma(self, x:Value, y:Value, z:Value) -> Value:
    wide, terms = self.same(x, y, z)
    return self.call("__builtin_elementwise_fma", wide, *terms)
  def abs(self, x:Value) -> Value: return self.call("__builtin_elementwise_abs", self.term(x).type, x)
  def masked(self, x:Value, offsets:Sequence[int], operator:str, limit:Value, instead:Value) -> Value:
    """Renders x with `instead` in place of x[i] if offsets[i] is above `limit` (`operator` ">") or below `limit` ("<")."""
    # one comparison of vectors: of single comparisons clang would keep all results in scalar registers, of which there are too few
    n = len(offsets)
    keys = self.let("keys", Term(self, f"(int{n}){{{', '.join(map(str, offsets))}}}", f"int{n}"))
    return Term(self, f"(({keys.text} {operator} (int{n})({bare(limit.text)})) ? (float{n})({bare(self.term(instead).text)}) : {x.text})", x.type)
  def beyond(self, x:Value, offsets:Sequence[int], first:Value, last:Value, instead:Value) -> Value:
    """Renders x with `instead` in place of x[i] if offsets[i], a column, is not in `first`..`last`."""
    # In a wave of 64 lanes the result of a comparison takes two scalar registers. So the text makes one comparison instead of two, of unsigned
    # distances from `first`: an index below `first` has a huge distance.
    if get_chip(self.arch).wave == 32: return super().beyond(x, offsets, first, last, instead)
    n = len(offsets)
    count = self.let("count", Term(self, f"({last.text} < {first.text} ? 0u : {last.text} - {first.text} + 1u)", "unsigned"))
    away = self.let("away", Term(self, f"((uint{n}){{{', '.join(map(str, offsets))}}} - (uint{n})({bare(first.text)}))", f"uint{n}"))
    return Term(self, f"(({away.text} >= (uint{n})({count.text})) ? (float{n})({bare(self.term(instead).text)}) : {x.text})", x.type)
  def exp2(self, x:Value) -> Value: return self.elementwise("exp2_of", "__builtin_amdgcn_exp2f({0})", x)
  def select(self, condition:Value, x:Value, y:Value) -> Value:
    x, y = self.term(x), self.term(y)
    return Term(self, f"({condition.text} ? {x.text} : {y.text})", max((x.type, y.type), key=length_of))
  def splat(self, x:Value, n:int) -> Value:
    out = vector_of("float", n)
    return x if n == 1 else Term(self, f"(({out})({bare(self.term(x).text)}))", out)
  def part(self, x:Value, start:int, n:int) -> Value:
    if n == 1 or n == length_of(x.type): return super().part(x, start, n)
    at = ", ".join(str(start + i) for i in range(n))
    return Term(self, f"__builtin_shufflevector({x.text}, {x.text}, {at})", vector_of(element_of(x.type), n))
  def join(self, *xs:Value) -> Value:
    if len(xs) != 2 or length_of(xs[0].type) == 1: return super().join(*xs)
    n = 2*length_of(xs[0].type)
    return Term(self, f"__builtin_shufflevector({xs[0].text}, {xs[1].text}, {', '.join(map(str, range(n)))})", vector_of(element_of(xs[0].type), n))
  # A function gets registers by value and returns them as its result: clang makes worse code for arrays whose address is taken, even if it inlines
  # the function.
  def registers_signature(self, name:str, registers:list[RegisterArray]) -> Signature:
    if not registers: return Signature([])
    kept, kind = [x for x in registers if x.stored], name.capitalize()
    members = "".join(f"  {x.type} {x.text}[{x.size}];\n" for x in kept)
    parameters = [f"{kind} now"]
    for x in registers:
      if x.stored: x.text = f"now.{x.text}"
      else:
        x.apart = True
        parameters += [f"{x.type} {x.text}{i}" for i in sorted(x.used)]
    return Signature(parameters, f"struct {kind} {{\n{members}}};\n", kind, "now")
  def registers_call(self, name:str, sources:dict[str, str], operands:list[Any]) -> str:
    registers = [x for x in operands if isinstance(x, RegisterArray)]
    if not registers: return super().registers_call(name, sources, operands)
    def at(x:RegisterArray, i:int) -> str:
      base, offset = sources[x.text.removeprefix("now.")].rsplit("+", 1)
      return f"{base}[{int(offset) + i}]"
    kept = [x for x in registers if x.stored]
    now = ", ".join("{" + ", ".join(at(x, i) for i in range(x.size)) + "}" for x in kept)
    rest = [at(x, i) for x in registers if x.apart for i in sorted(x.used)] + [sources[x.text] for x in operands if isinstance(x, Term)]
    lines = ["({", wrapped(f"  auto now = {name}({', '.join([f'{{{now}}}', *rest])});", " "*6)]
    lines += [f"  {at(x, i)} = {x.text}[{i}];" for x in kept for i in sorted(x.stored)]
    return "\n".join([*lines, "  0.0f;", "})"])
  def as_float(self, x:Value) -> Value:
    out = vector_of("float", length_of(x.type))
    return Term(self, f"__builtin_bit_cast({out}, {bare(x.text)})", out)
  def widen(self, bits:Value, dtype:str) -> Value:
    if dtype == "bfloat16": return Term(self, f"__builtin_bit_cast(float, {bits.text} << 16)", "float")
    return Term(self, f"(float)__builtin_bit_cast(_Float16, (unsigned short)({bare(bits.text)}))", "float")
  def widen_four(self, word:Value, dtype:str) -> Value:
    """Renders the conversion of the four 8-bit floats of a dword to fp32, by v_cvt_pk_f32_fp8."""
    self.declare("widen_four(unsigned)", f"{self.header}float4 widen_four(unsigned word) {{\n"
                 "  auto low = __builtin_amdgcn_cvt_pk_f32_fp8((int)word, false), high = __builtin_amdgcn_cvt_pk_f32_fp8((int)word, true);\n"
                 "  return (float4){low[0], low[1], high[0], high[1]};\n}")
    return self.call("widen_four", "float4", word)
  def pack(self, x:Value, dtype:str) -> Value:
    """Renders the rounding of fp32 numbers to 16 or 8 bits, packed into dwords."""
    n = length_of(x.type)
    if IN_A_DWORD[dtype] == 4:
      def pair(i:int, before:str, high:str) -> str: return f"__builtin_amdgcn_cvt_pk_fp8_f32(x[{i}], x[{i + 1}], {before}, {high})"
      return self._words("pack_fp8", x, [f"(unsigned){pair(i + 2, pair(i, '0', 'false'), 'true')}" for i in range(0, n, 4)])
    if dtype == "float16":
      out = vector_of("unsigned", n//2)
      return Term(self, f"__builtin_bit_cast({out}, __builtin_convertvector({x.text}, half{n}))", out)
    if not get_chip(self.arch).bf16_pack:
      # no instruction converts to bf16: add half a unit of bf16's last place to the fp32 bits (and the odd bit, for ties), and keep the upper half
      return self._upper_halves("pack_bfloat", x, f"  uint{n} u = __builtin_bit_cast(uint{n}, x);\n  u += 0x7fffu + ((u >> 16) & 1u);\n")
    # pair by pair: for a whole vector clang makes copies
    return self._words("pack_bfloat", x, [f"__builtin_bit_cast(unsigned, __builtin_convertvector((float2){{x[{i}], x[{i + 1}]}}, bfloat2))"
                                          for i in range(0, n, 2)])
  def pack_weights(self, x:Value, dtype:str) -> Value:
    """Renders the rounding of P to 16 or 8 bits, packed into dwords."""
    if dtype != "bfloat16" or get_chip(self.arch).bf16_pack: return self.pack(x, dtype)
    # No instruction converts to bf16: two fp32 operations round x to the 8 significant bits of bf16, to nearest even: less = x*(1 - 2^16), and then
    # the fma x*2^16 + less. CDNA executes each of them for two elements at a time, and RDNA issues two of them together. x*2^16 has to be finite.
    n, factor = length_of(x.type), numerics.SPLITTING
    rounded = f"__builtin_elementwise_fma(x, ({x.type})({float_literal(factor)}), less)"
    return self._upper_halves("pack_weights", x, f"  {x.type} less = x*{float_literal(1 - factor)};\n"
                              f"  uint{n} u = __builtin_bit_cast(uint{n}, {rounded});\n")
  def _upper_halves(self, name:str, x:Value, rounded:str) -> Value:
    # the lines `rounded` compute the dwords u from x; each v_perm packs the upper halves of two of them
    return self._words(name, x, [f"__builtin_amdgcn_perm(u[{i + 1}], u[{i}], 0x07060302u)" for i in range(0, length_of(x.type), 2)], rounded)
  def _words(self, name:str, x:Value, words:list[str], before:str="") -> Value:
    """Renders a call f(x), and declares f as a C++ function `name` that executes the lines `before` and returns the vector of expressions `words`."""
    out = vector_of("unsigned", len(words))
    result = returned(self.vector_text(out, words) if len(words) > 1 else words[0])
    self.declare(f"{name}({x.type})", f"{self.header}{out} {name}({x.type} x) {{\n{before}{result}\n}}")
    return self.call(name, out, x)
  def at_least(self, x:Value, least:int) -> Value:
    """Renders a dword in which each 16-bit half is 1 if the same half of x is at least `least`, otherwise 0."""
    # The text subtracts least - 1, saturated at 0 (v_pk_sub_u16 with clamp), and limits the difference to 1 (v_pk_min_u16). The 1 is hidden from
    # clang, which would otherwise compare the halves one by one.
    self.declare(f"at_least_{least}(unsigned)", f"{self.header}unsigned at_least_{least}(unsigned x) {{\n"
                 '  unsigned ones = 0x00010001u;\n  asm("" : "+s"(ones));\n'
                 f"  ushort2 above = __builtin_elementwise_sub_sat(__builtin_bit_cast(ushort2, x), (ushort2)({least - 1}));\n"
                 "  return __builtin_bit_cast(unsigned, __builtin_elementwise_min(above, __builtin_bit_cast(ushort2, ones)));\n}")
    return self.call(f"at_least_{least}", "unsigned", x)
  def sign_halves(self, x:Value) -> Value:
    """Renders a dword in which each 16-bit half has all its bits equal to the highest bit of this half of x, by v_perm_b32."""
    # the selectors 8 and 9 of v_perm_b32 give the signs of the two halves of its second operand
    return Term(self, f"__builtin_amdgcn_perm({x.text}, {x.text}, 0x09090808u)", "unsigned")
  def where_bit(self, word:Value, bit:int, x:Value) -> Value:
    """Renders x where bit `bit` of the dword `word` is 1, and 0 elsewhere."""
    # An AND of x and the sign-extended bit (v_bfe_i32). The function takes a scalar, because clang's __builtin_bit_cast of an element of a vector
    # such as v[1] wrongly takes v[0].
    self.declare("masked(int, float)", f"{self.header}float masked(int mask, float x) {{\n"
                 "  return __builtin_bit_cast(float, __builtin_bit_cast(int, x) & mask);\n}")
    return self.call("masked", "float", Term(self, f"((int)({word.text} << {31 - bit}) >> 31)", "int"), x)
  # lanes
  def any_lane(self, condition:Value) -> Value:
    return Term(self, f"__builtin_amdgcn_ballot_w{get_chip(self.arch).wave}({bare(condition.text)}) != 0", "bool")
  def exchange(self, x:Value, step:int, how:str) -> tuple[Value, Value]:
    """Renders an exchange of x between lanes `step` apart by the instruction `how`. Returns x of both lanes, in the instruction's order."""
    x = self.term(x)
    bits, pair = f"__builtin_bit_cast(unsigned, {x.text})", vector_of(x.type, 2)
    # v_permlane16_swap_b32 or v_permlane32_swap_b32 (CDNA4 ISA section 12)
    if how == "permlane_swap":
      both = f"__builtin_amdgcn_permlane{step}_swap({bits}, {bits}, false, false)"
      swapped = self.let("pair", Term(self, f"__builtin_bit_cast({pair}, {both})", pair))
      return self.element(swapped, 0), self.element(swapped, 1)
    if how == "permlanex16": other = exchange_rows(bits)
    elif how == "neighbours": other = exchange_neighbours(bits, step)
    else:
      lane = self.let("lane", Term(self, f"(__builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0u)) + {step}u) & 63u", "unsigned"))
      other = f"__builtin_amdgcn_ds_bpermute({lane.text} << 2, __builtin_bit_cast(int, {x.text}))"
    return x, self.let("other", Term(self, f"__builtin_bit_cast({x.type}, {other})", x.type))
  # sums of packed numbers
  def whole(self, x:Value) -> None:
    """Renders inline assembly that keeps the packed x in registers, on chips for which clang would otherwise pack x again at each use."""
    # on these chips clang would pack a dword again at each use; on other chips the hint would cost registers
    if get_chip(self.arch).unit.packs_again: self.say(f'asm volatile("" :: "v"({self.term(x).text}));')
  def dot_ones(self, x:Value, c:Value, dtype:str) -> Value:
    """Renders c plus the sum of all numbers of `dtype` in the dword x, by a dot product with ones."""
    if IN_A_DWORD[dtype] == 4: return self.call("__builtin_amdgcn_dot4_f32_fp8_fp8", "float", x, self.word(ONES_OF[dtype]), c)
    # The function takes the dword as a scalar, because clang's __builtin_bit_cast of an element of a vector such as v[1] wrongly takes v[0].
    name, pair = {"float16": ("fdot2", "half2"), "bfloat16": ("fdot2_f32_bf16", "bfloat2")}[dtype]
    p, ones = (f"__builtin_bit_cast({pair}, {bits})" for bits in ("word", f"0x{ONES_OF[dtype]:08x}u"))
    self.declare(f"dot_ones({pair})", f"{self.header}float dot_ones(unsigned word, float sum) {{\n"
                                      f"  return __builtin_amdgcn_{name}({p}, {ones}, sum, false);\n}}")
    return self.call("dot_ones", "float", x, c)
  def times_ones(self, matrix:Any, p:Value, c:Value, dtype:str) -> Value:
    kind, n = f"{matrix.operand_type}{2*matrix.operand_words}", matrix.operand_words
    ones = self.vector(*[Term(self, f"0x{ONES_OF[dtype]:08x}u", "unsigned")]*n)
    a, b = (f"__builtin_bit_cast({kind}, {bare(x.text)})" for x in matrix.with_ones(p, ones))
    return Term(self, matrix.call(a, b, bare(self.term(c).text)), "float4")

QUAD_PERM = {1: 0xb1, 2: 0x4e}     # controls of v_mov_b32_dpp, by the bit in which the lane numbers differ, within four lanes

def exchange_neighbours(bits:str, step:int) -> str:
  """Returns HIP text for the dword `bits` of another lane, whose index is this lane's index xor `step` (1, 2 or 4)."""
  if step in QUAD_PERM: return f"__builtin_amdgcn_mov_dpp((int){bits}, {QUAD_PERM[step]}, 15, 15, true)"
  # the mask mode of ds_swizzle_b32
  return f"__builtin_amdgcn_ds_swizzle((int){bits}, {step << 10 | 0x1f})"

def exchange_rows(bits:str) -> str:
  """Returns HIP text for the dword `bits` of another lane, whose index is this lane's index xor 16, by v_permlanex16_b32."""
  # "true" permits reads of inactive lanes. No lane is inactive here; without the permission clang would copy a register first, the one whose value
  # an inactive lane would keep.
  return f"__builtin_amdgcn_permlanex16({bits}, {bits}, 0x76543210u, 0xfedcba98u, true, false)"
