"""Renders compound operations, which are defined by Python functions, as CUDA text."""
from __future__ import annotations
from collections.abc import Sequence
from typing import Any, ClassVar
from attn.ops.numerics import IN_A_DWORD, ONES_OF
from attn.ops.operation import Value
from attn.ops.printer import Printer, Term, bare, length_of, returned, vector_of

class Cuda(Printer):
  """Renders a compound operation, which is defined by a Python function, as CUDA text."""
  # CUDA's vectors have named elements but no arithmetic, so the text computes element by element.
  header = "static __device__ __forceinline__ "
  functions_of_numbers: ClassVar[dict[str, str]] = {"log2": "log2f({0})", "max": "fmaxf({0}, {1})"}
  infinity, not_a_number = "INFINITY", "__int_as_float(0x7fc00000)"
  def at(self, text:str, ctype:str, i:int) -> str: return text if length_of(ctype) == 1 else f"{text}.{'xyzw'[i]}"
  def vector_text(self, out:str, values:Sequence[str]) -> str: return f"make_{out}({', '.join(values)})"
  def operation(self, operator:str, x:Value, y:Value, type:str|None=None) -> Term:
    n = max(length_of(t.type) if isinstance(t, Term) else 1 for t in (x, y))
    if n == 1: return super().operation(operator, x, y, type)
    each = [self.elements(self.term(t), n) for t in (x, y)]
    return self.vector(*[self.operation(operator, a, b, type) for a, b in zip(*each)])
  def elements(self, t:Term, n:int) -> list[Value]: return [self.element(t, i) if length_of(t.type) > 1 else t for i in range(n)]
  def elementwise(self, name:str, scalar:str, *xs:Value) -> Term:
    terms = [self.term(x) for x in xs]
    n = max(length_of(t.type) for t in terms)
    if n == 1: return Term(self, scalar.format(*[bare(t.text) for t in terms]), "float")
    return self.vector(*[self.elementwise(name, scalar, *of) for of in zip(*[self.elements(t, n) for t in terms])])
  def vector_operator(self, operator:str, x:str, y:str) -> None:
    """Declares a C++ operator between vectors of types x and y."""
    # tinygrad renders such operators for its own UOps
    out, n = max((x, y), key=length_of), max(length_of(x), length_of(y))
    values = [f"{self.at('x', x, i)} {operator} {self.at('y', y, i)}" for i in range(n)]
    self.declare(f"operator{operator}({x}, {y})",
                 f"{self.header}{out} operator{operator}({x} x, {y} y) {{\n{returned(self.vector_text(out, values))}\n}}")
  def approximate(self, name:str, instruction:str, x:Value) -> Value:
    """Renders a call of the C++ function `name` for each element of x. Also declares the function, which executes the PTX `instruction`."""
    self.declare(f"{name}(float)", f'{self.header}float {name}(float x) {{\n  float y;\n  asm("{instruction} %0, %1;" : "=f"(y) : "f"(x));\n'
                                   "  return y;\n}")
    return self.elementwise(name, f"{name}({{0}})", x)
  def exp2(self, x:Value) -> Value:
    """Renders 2^x as ex2.approx (PTX ISA 9.7.3.24)."""
    return self.approximate("exp2_of", "ex2.approx.ftz.f32", x)
  def rough_log2(self, x:Value) -> Value:
    """Renders log2 x as lg2.approx (PTX ISA 9.7.3.22). Its error near x = 1 is 2^-22, too much for a result."""
    return self.approximate("rough_log2_of", "lg2.approx.ftz.f32", x)
  def rcp(self, x:Value) -> Value:
    """Renders 1/x as rcp.approx, which is accurate to 1 unit in the last place, as AMD's v_rcp_f32 is."""
    # a division would call a function for extreme operands, and ptxas spills registers around such a call
    return self.approximate("rcp_of", "rcp.approx.ftz.f32", x)
  def fma(self, x:Value, y:Value, z:Value) -> Value: return self.elementwise("fma_of", "fmaf({0}, {1}, {2})", x, y, z)
  def abs(self, x:Value) -> Value: return self.elementwise("abs_of", "fabsf({0})", x)
  def select(self, condition:Value, x:Value, y:Value) -> Value:
    x, y = self.term(x), self.term(y)
    return Term(self, f"({condition.text} ? {x.text} : {y.text})", x.type)
  def splat(self, x:Value, n:int) -> Value:
    if n == 1: return x
    out = vector_of("float", n)
    self.declare(f"splat{n}(float)", f"{self.header}{out} splat{n}(float x) {{\n{returned(self.vector_text(out, ['x']*n))}\n}}")
    return Term(self, f"splat{n}({bare(self.term(x).text)})", out, (self.term(x).text,)*n)
  def masked(self, x:Value, offsets:Sequence[int], operator:str, limit:Value, instead:Value) -> Value:
    def element(i:int, key:int) -> Value:
      beyond = self.operation(operator, Term(self, str(key), "int"), limit, "bool")
      return self.select(beyond, instead, self.element(x, i))
    return self.vector(*[element(i, key) for i, key in enumerate(offsets)])
  def as_float(self, x:Value) -> Value: return self.elementwise("as_float", "__uint_as_float({0})", x)
  def widen(self, bits:Value, dtype:str) -> Value:
    """Renders the conversion of a 16-bit float to fp32 (PTX ISA 9.7.9.21)."""
    # a bf16 is the upper half of an fp32
    if dtype == "bfloat16": return Term(self, f"__uint_as_float({bits.text} << 16)", "float")
    self.declare("widen_half(unsigned)", f'{self.header}float widen_half(unsigned x) {{\n  float y;\n'
                                         '  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"((unsigned short)x));\n  return y;\n}')
    return self.call("widen_half", "float", bits)
  def pack(self, x:Value, dtype:str) -> Value:
    """Renders the rounding of fp32 numbers to 16 or 8 bits, packed into dwords (PTX ISA 9.7.9.21)."""
    if IN_A_DWORD[dtype] == 4: return self.vector(*[self.pack_four(x, i) for i in range(0, length_of(x.type), 4)])
    name, ptx = {"float16": ("pack_half", "f16x2"), "bfloat16": ("pack_bfloat", "bf16x2")}[dtype]
    self.declare(f"{name}(float, float)", f'{self.header}unsigned {name}(float low, float high) {{\n  unsigned y;\n'
                                          # cvt puts its first operand into the high half, so the odd element of a pair is its first operand
                                          f'  asm("cvt.rn.{ptx}.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));\n  return y;\n}}')
    pairs = [self.call(name, "unsigned", self.element(x, i), self.element(x, i + 1)) for i in range(0, length_of(x.type), 2)]
    return self.vector(*pairs)
  def pack_four(self, x:Value, first:int) -> Value:
    """Renders the rounding of elements `first` to `first` + 3 of x to one dword of 8-bit floats (PTX ISA 9.7.9.21)."""
    self.declare("pack_fp8(float, float, float, float)",
                 f"{self.header}unsigned pack_fp8(float x, float y, float z, float w) {{\n  unsigned packed;\n"
                 '  asm("{\\n.reg .b16 low, high;\\ncvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\\n"\n'
                 '      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\\nmov.b32 %0, {low, high};\\n}"\n'
                 '      : "=r"(packed) : "f"(x), "f"(y), "f"(z), "f"(w));\n  return packed;\n}')
    return self.call("pack_fp8", "unsigned", *[self.element(x, first + i) for i in range(4)])
  def add_pairs(self, x:Value, y:Value, dtype:str) -> Value:
    """Renders the sum of two pairs of 16-bit floats, as add.f16x2 or add.bf16x2 (PTX ISA 9.7.4.1; sm_90 and later)."""
    name, ptx = {"float16": ("add_halves", "f16x2"), "bfloat16": ("add_bfloats", "bf16x2")}[dtype]
    self.declare(f"{name}(unsigned, unsigned)", f'{self.header}unsigned {name}(unsigned x, unsigned y) {{\n  unsigned z;\n'
                                                f'  asm("add.{ptx} %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));\n  return z;\n}}')
    return self.call(name, "unsigned", x, y)
  def pack_weights(self, x:Value, dtype:str) -> Value: return self.pack(x, dtype)
  def at_least(self, x:Value, least:int) -> Value:
    low, high = (f"({bits} >= {least << 16}u ? {one}u : 0u)" for bits, one in ((f"{x.text} << 16", 1), (x.text, 1 << 16)))
    return Term(self, f"({low} | {high})", "unsigned")
  def sign_halves(self, x:Value) -> Value:
    """Renders a dword in which each 16-bit half has all its bits equal to the highest bit of this half of x, by prmt (PTX ISA 9.7.9.7)."""
    # in prmt a selector with its highest bit set replicates a byte's sign
    self.declare("sign_halves(unsigned)", f"{self.header}unsigned sign_halves(unsigned x) {{\n  unsigned y;\n"
                                          '  asm("prmt.b32 %0, %1, %1, 0xbb99;" : "=r"(y) : "r"(x));\n  return y;\n}')
    return self.call("sign_halves", "unsigned", x)
  def where_bit(self, word:Value, bit:int, x:Value) -> Value: return Term(self, f"({word.text} & {1 << bit}u ? {x.text} : 0.0f)", "float")
  # lanes
  def any_lane(self, condition:Value) -> Value: return Term(self, f"__any_sync({WARP}, {bare(condition.text)})", "bool")
  def exchange(self, x:Value, step:int, how:str) -> tuple[Value, Value]:
    x = self.term(x)
    return x, Term(self, f"__shfl_xor_sync({WARP}, {x.text}, {step})", x.type)
  def times_ones(self, matrix:Any, p:Value, c:Value, dtype:str) -> Value:
    ones = f"0x{ONES_OF[dtype]:08x}u"
    return self.call(declare_mma(self, matrix), "float4", p, Term(self, ones, "unsigned"), Term(self, ones, "unsigned"), c)

WARP = "0xffffffffu"

def declare_mma(printer:Printer, matrix:Any) -> str:
  """Declares the C++ function of the mma.sync instruction `matrix` (PTX ISA 9.7.14.5.8), and returns the function's name."""
  c, a = ", ".join(f"%{i}" for i in range(4)), ", ".join(f"%{i}" for i in range(4, 8))
  results, operands = (", ".join(f'"{kind}"({name}.{e})' for e in "xyzw") for kind, name in (("+f", "c"), ("r", "a")))
  # the function takes a, the two registers of b, and c; it returns c + A B
  printer.declare(f"mma_{matrix.ptx}", f"{printer.header}float4 mma_{matrix.ptx}(uint4 a, unsigned b0, unsigned b1, float4 c) {{\n"
                  f'  asm("mma.sync.aligned.m16n8k{matrix.K}.row.col.f32.{matrix.ptx}.{matrix.ptx}.f32 "\n'
                  f'      "{{{c}}}, {{{a}}}, {{%8, %9}}, {{{c}}};"\n'
                  f'      : {results}\n      : {operands}, "r"(b0), "r"(b1));\n  return c;\n}}')
  return f"mma_{matrix.ptx}"
