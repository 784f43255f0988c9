"""The primitives that compound operations are written in, and their three interpretations: HIP text, CUDA text, and numbers in numpy.

A definition is a Python function `f(c, x, y, ...)`: `c` is the interpreter, the operands are its values. Values have Python's operators: + - * for
numbers, < > <= == between them, & | ~ for conditions. `c` has the rest: `c.fma(x, y, z)`, `c.select(condition, x, y)`, registers, branches, exchanges
between lanes, and `c.let("m", x)`, which gives a value a name in the text. A vector of n numbers is one value; an operation of a vector and a scalar
takes the scalar for every element.

`Printer` builds C++; what HIP and CUDA spell differently are the methods of `Hip` and `Cuda`. `Numbers` computes, on arrays with a column a thread.
"""
from __future__ import annotations
import inspect, math, re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
import numpy as np
from attn.chips import get_chip
from attn.ops import numerics
from attn.ops.numerics import Array
from attn.ops.operation import OPERATIONS, Body, Call, Lanes, Operation

Value = Any            # a Term of the text, or an array
PRINTED_WIDTH = 120            # columns of a printed line, where what is in it can be broken

# ***** numbers *****

class Variable:
  """A number that a branch may change."""
  def __init__(self, value:Value): self.value = value

class Numbers:
  """Runs a definition on numpy arrays: a scalar is (T,), a vector (n, T), a register array what the emulator's `load_register` takes."""
  inf, nan = np.float32(np.inf), np.float32(np.nan)
  def __init__(self, lanes:Lanes): self.lanes, self.gate = lanes, lanes.active

  # naming and control
  def let(self, name:str, x:Value) -> Value: return x
  def variable(self, name:str, x:Value) -> Variable: return Variable(x)
  def assign(self, v:Variable, x:Value) -> None: v.value = np.where(self.gate, x, v.value)
  def when(self, condition:Array, body:Callable[[], None]) -> None:
    outside, self.gate = self.gate, self.gate & condition
    if self.gate.any(): body()
    self.gate = outside
  # arithmetic
  def fma(self, x:Value, y:Value, z:Value) -> Value: return numerics.fused_multiply_add(x, np.asarray(y, np.float32), np.asarray(z, np.float32))
  def exp2(self, x:Value) -> Value: return numerics.power_of_two(x)
  def log2(self, x:Value) -> Value: return numerics.logarithm(x)
  def rcp(self, x:Value) -> Value: return numerics.reciprocal(x)
  def abs(self, x:Value) -> Value: return np.abs(x)
  def max(self, x:Value, y:Value) -> Value: return np.fmax(x, y)
  def select(self, condition:Value, x:Value, y:Value) -> Value: return np.where(condition, np.asarray(x, np.float32), np.asarray(y, np.float32))
  def number(self, x:float) -> Value: return np.float32(x)
  def masked(self, x:Value, offsets:Sequence[int], operator:str, limit:Value) -> Value:
    """-inf in the elements of x whose offset is above (>) or below (<) the limit."""
    beyond = {">": np.greater, "<": np.less}[operator](np.array(offsets)[:, None], limit)
    return np.where(beyond, -self.inf, x)
  def to_float(self, x:Value) -> Value: return x.astype(np.float32)
  # vectors
  def length(self, x:Value) -> int: return x.shape[0] if x.ndim > 1 else 1
  def element(self, x:Value, i:int) -> Value: return x[i] if x.ndim > 1 else x
  def part(self, x:Value, start:int, n:int) -> Value: return x[start] if n == 1 else x[start:start + n]
  def vector(self, *xs:Value) -> Value: return np.stack(np.broadcast_arrays(*xs)) if len(xs) > 1 else xs[0]
  def join(self, *xs:Value) -> Value: return np.concatenate([x if x.ndim > 1 else x[None] for x in xs])
  def splat(self, x:Value, n:int) -> Value: return np.broadcast_to(x, (n, len(self.gate))) if n > 1 else x
  def constants(self, xs:Sequence[float]) -> Value: return np.array(xs, np.float32)[:, None]
  # bits
  def as_float(self, x:Value) -> Value: return numerics.bits_as(x, "float32")
  def pack(self, x:Value, dtype:str) -> Value:
    packed = numerics.pack_pairs(x, dtype)
    return packed if len(packed) > 1 else packed[0]
  def widen(self, bits:Value, dtype:str) -> Value: return numerics.widen(bits, dtype)
  def high_half(self, x:Value) -> Value: return x >> np.uint32(16)
  def word(self, n:int) -> Value: return np.uint32(n)
  def wide_product(self, x:Value, y:int) -> tuple[Value, Value]:
    """The low and the high dword of a product of dwords."""
    product = np.asarray(x).astype(np.uint64)*np.uint64(y)
    return product.astype(np.uint32), (product >> np.uint64(32)).astype(np.uint32)
  def at_least(self, x:Value, least:int) -> Value:
    """1 in each half of a dword that is no less than `least`, which is not 0; else 0."""
    low, high = ((half >= least).astype(np.uint32) for half in (x & np.uint32(0xffff), x >> np.uint32(16)))
    return low | high << np.uint32(16)
  def sign_halves(self, x:Value) -> Value:
    """All bits of each half of a dword as its highest one is."""
    halves = np.ascontiguousarray(x, np.uint32).view(np.int16) >> np.int16(15)
    return halves.view(np.uint32)
  def where_bit(self, word:Value, bit:int, x:Value) -> Value:
    """x where that bit of a dword is set, else 0."""
    return np.where(word >> np.uint32(bit) & np.uint32(1), x, np.float32(0))
  # registers: arrays of vectors
  def load(self, registers:Any, i:int) -> Value: return self.lanes.load_register(registers, i)
  def store(self, registers:Any, i:int, x:Value) -> None: self.lanes.store_register(registers, i, x, self.gate)
  # lanes
  def any_lane(self, condition:Value) -> Value:
    wave = self.lanes.wave
    return np.repeat((condition & self.lanes.active).reshape(-1, wave).any(1), wave)
  def exchange(self, x:Value, step:int, how:str) -> tuple[Value, Value]:
    """x of this lane and of one that is `step` lanes away, in whatever order: for an operation that does not mind it."""
    wave, lane = self.lanes.wave, np.arange(x.shape[-1])
    if how == "bpermute": return x, numerics.from_lane(x, lane + step, wave)
    other = numerics.from_xor_lane(x, step, wave)
    if how != "permlane_swap": return x, other
    odd = lane//step % 2 == 1     # the odd rows (of `step` lanes) of the first operand change places with the even ones of the second
    return np.where(odd, other, x), np.where(odd, x, other)
  def whole(self, x:Value) -> None:
    """x is in its registers at this point: no more than a hint to a compiler."""
  def dot_ones(self, x:Value, c:Value, dtype:str) -> Value:
    """c + the two numbers in a dword."""
    return self.lanes.dot(x, np.full(x.shape, TWO_ONES[dtype], np.uint32), c, dtype)
  def times_ones(self, matrix:Any, p:Value, c:Value, dtype:str) -> Value:
    """c + the product of P and a matrix of ones: sums of P, see `with_ones` of the matrix instruction."""
    ones = np.full((2, p.shape[-1]), TWO_ONES[dtype], np.uint32)
    a, b = matrix.with_ones(p, ones)
    return self.lanes.matrix(matrix.name, a, b, c)

TWO_ONES = {"float16": 0x3c003c00, "bfloat16": 0x3f803f80}    # two of them in a dword

# ***** text *****

def length_of(ctype:str) -> int:
  """Elements of a value of this C type."""
  return int(found[1]) if (found := re.fullmatch(r"[a-z]+(\d+)", ctype)) is not None else 1

def element_of(ctype:str) -> str: return {"uint": "unsigned"}.get(name := ctype.rstrip("0123456789"), name)
def vector_of(element:str, n:int) -> str: return element if n == 1 else f"{'uint' if element == 'unsigned' else element}{n}"

@dataclass(frozen=True)
class Term:
  """An expression of the text; of a vector that is put together from its elements, these as well."""
  printer: Printer
  text: str
  type: str
  elements: tuple[str, ...] = ()
  def _with(self, operator:str, other:Value, swap:bool=False, type:str|None=None) -> Term:
    return self.printer.operation(operator, other, self, type) if swap else self.printer.operation(operator, self, other, type)
  def __add__(self, y:Value) -> Term: return self._with("+", y)
  def __radd__(self, y:Value) -> Term: return self._with("+", y, True)
  def __sub__(self, y:Value) -> Term: return self._with("-", y)
  def __rsub__(self, y:Value) -> Term: return self._with("-", y, True)
  def __mul__(self, y:Value) -> Term: return self._with("*", y)
  def __rmul__(self, y:Value) -> Term: return self._with("*", y, True)
  def __neg__(self) -> Term: return Term(self.printer, f"-{self.text}", self.type)
  def __lt__(self, y:Value) -> Term: return self._with("<", y, type="bool")
  def __gt__(self, y:Value) -> Term: return self._with(">", y, type="bool")
  def __le__(self, y:Value) -> Term: return self._with("<=", y, type="bool")
  def __eq__(self, y:Value) -> Term: return self._with("==", y, type="bool")     # type: ignore[override]
  def __and__(self, y:Value) -> Term: return self._with("&", y)
  def __or__(self, y:Value) -> Term: return self._with("|", y)
  def __xor__(self, y:Value) -> Term: return self._with("^", y)
  def __lshift__(self, y:Value) -> Term: return self._with("<<", y)
  def __rshift__(self, y:Value) -> Term: return self._with(">>", y)
  def __invert__(self) -> Term: return Term(self.printer, f"!{self.text}", "bool")

@dataclass
class RegisterArray:
  """An operand that is an array of registers, and which of its elements a definition uses."""
  text: str
  type: str      # of an element
  used: set[int] = field(default_factory=set)
  stored: set[int] = field(default_factory=set)
  apart: bool = False    # its elements are parameters of their own
  @property
  def size(self) -> int: return max(self.used | self.stored) + 1

@dataclass(frozen=True)
class Signature:
  """How a function takes register arrays, and gives them back."""
  parameters: Sequence[str]
  declaration: str = ""
  type: str = ""         # of the result, where it is not the operation's own
  result: str = ""

class Printer:
  """Runs a definition to get the statements of a C++ function, and the functions that those call."""
  header: str           # what a function begins with
  inf: Any
  nan: Any
  def __init__(self, arch:str, functions:dict[str, str]):
    self.arch, self.functions, self.lines, self.depth, self.names = arch, functions, list[str](), 1, Counter[str]()

  # naming and control
  def say(self, line:str) -> None:
    indent = "  "*self.depth
    self.lines.append(wrapped(indent + line, indent + " "*4))
  def fresh(self, name:str) -> str:
    """A name like this one that nothing has yet."""
    self.names[name] += 1
    return name if self.names[name] == 1 else f"{name}{self.names[name]}"
  def let(self, name:str, x:Value) -> Value:
    x, name = self.term(x), self.fresh(name)
    self.say(f"{x.type} {name} = {bare(x.text)};")
    return Term(self, name, x.type)
  def variable(self, name:str, x:Value) -> Variable: return Variable(self.let(name, x))
  def assign(self, v:Variable, x:Value) -> None: self.say(f"{v.value.text} = {bare(self.term(x).text)};")
  def when(self, condition:Value, body:Callable[[], None]) -> None:
    self.say(f"if ({self.rarely(condition.text)}) {{")
    self.depth += 1
    body()
    self.depth -= 1
    self.say("}")
  def rarely(self, condition:str) -> str: return bare(condition)
  # expressions
  def term(self, x:Value) -> Term: return x if isinstance(x, Term) else Term(self, float_literal(x), "float")
  def number(self, x:float) -> Value: return self.term(x)
  def named(self, name:str, ctype:str) -> Term: return Term(self, name, ctype)
  def operation(self, operator:str, x:Value, y:Value, type:str|None=None) -> Term:
    integer = next((t.type for t in (x, y) if isinstance(t, Term) and t.type in ("int", "unsigned")), None)
    x, y = (t if isinstance(t, Term) else Term(self, str(t), integer) if integer and isinstance(t, int) else self.term(t) for t in (x, y))
    wide = x.type if length_of(x.type) >= length_of(y.type) else y.type
    if length_of(wide) > 1: self.vector_operator(operator, x.type, y.type)
    return Term(self, f"({x.text} {operator} {y.text})", type or wide)
  def vector_operator(self, operator:str, x:str, y:str) -> None:
    """Sees to it that the language has this operator on these types."""
  def call(self, name:str, out:str, *xs:Value) -> Term: return Term(self, f"{name}({', '.join(bare(self.term(x).text) for x in xs)})", out)
  def elementwise(self, name:str, scalar:str, *xs:Value) -> Term:
    """The scalar expression, {0} and {1} being its operands, for each element of vectors: by a function of that name."""
    terms = [self.term(x) for x in xs]
    n = max(length_of(t.type) for t in terms)
    if n == 1: return Term(self, scalar.format(*[bare(t.text) for t in terms]), "float")
    values = [scalar.format(*[self.at(p, t.type, i) for p, t in zip("xyz", terms)]) for i in range(n)]
    parameters = ", ".join(f"{t.type} {p}" for p, t in zip("xyz", terms))
    out = vector_of("float", n)
    result = returned(self.vector_text(out, values))
    self.declare(f"{name}({', '.join(t.type for t in terms)})", f"{self.header}{out} {name}({parameters}) {{\n{result}\n}}")
    return self.call(name, out, *terms)
  def declare(self, key:str, text:str) -> None:
    """Adds a function, after those it calls. Two different ones of the same name and types are a mistake in an operation's text."""
    if self.functions.setdefault(key, text) != text: raise ValueError(f"two functions {key}:\n{self.functions[key]}\n{text}")
  # vectors
  def length(self, x:Value) -> int: return length_of(x.type)
  def at(self, text:str, ctype:str, i:int) -> str: raise NotImplementedError
  def vector_text(self, out:str, values:Sequence[str]) -> str: raise NotImplementedError
  def element(self, x:Value, i:int) -> Value:
    return Term(self, x.elements[i] if x.elements else self.at(x.text, x.type, i), element_of(x.type))
  def part(self, x:Value, start:int, n:int) -> Value:
    return x if n == length_of(x.type) else self.vector(*[self.element(x, start + i) for i in range(n)])
  def vector(self, *xs:Value) -> Value:
    terms = [self.term(x) for x in xs]
    if len(xs) == 1: return terms[0]
    out = vector_of(element_of(terms[0].type), len(xs))
    return Term(self, self.vector_text(out, [bare(t.text) for t in terms]), out, tuple(t.text for t in terms))
  def join(self, *xs:Value) -> Value:
    if len(xs) == 1: return xs[0]
    return self.vector(*[self.element(x, i) for x in xs for i in range(length_of(x.type))])
  def splat(self, x:Value, n:int) -> Value: return x if n == 1 else self.vector(*[x]*n)
  def constants(self, xs:Sequence[float]) -> Value: return self.vector(*xs)
  # bits
  def word(self, n:int) -> Value: return Term(self, f"{n}u", "unsigned")
  def wide_product(self, x:Value, y:int) -> tuple[Value, Value]:
    product = self.let("product", Term(self, f"(unsigned long long){x.text} * {y}u", "unsigned long long"))
    return Term(self, f"(unsigned){product.text}", "unsigned"), Term(self, f"(unsigned)({product.text} >> 32)", "unsigned")
  # registers
  def load(self, registers:Any, i:int) -> Value:
    registers.used.add(i)
    return Term(self, f"{registers.text}{i}" if registers.apart else f"{registers.text}[{i}]", registers.type)
  def store(self, registers:Any, i:int, x:Value) -> None:
    registers.stored.add(i)
    self.say(f"{registers.text}[{i}] = {bare(self.term(x).text)};")
  def registers_signature(self, name:str, registers:list[RegisterArray]) -> Signature:
    """As pointers."""
    return Signature([f"{x.type}* {x.text}" for x in registers])
  def registers_call(self, name:str, sources:dict[str, str], operands:list[Any]) -> str: return f"{name}({', '.join(sources.values())})"

class Hip(Printer):
  """HIP: clang's vectors have arithmetic and elements of their own."""
  header = "static inline __attribute__((device, always_inline)) "
  def __init__(self, arch:str, functions:dict[str, str]):
    super().__init__(arch, functions)
    self.inf, self.nan = Term(self, "__builtin_inff()", "float"), Term(self, '__builtin_nanf("")', "float")
  def rarely(self, condition:str) -> str: return f"__builtin_expect({bare(condition)}, 0)"
  def at(self, text:str, ctype:str, i:int) -> str: return text if length_of(ctype) == 1 else f"{text}[{i}]"
  def vector_text(self, out:str, values:Sequence[str]) -> str: return f"({out}){{{', '.join(values)}}}"
  def same(self, *xs:Value) -> tuple[str, list[Term]]:
    """The operands as values of one type, which clang's elementwise builtins want."""
    terms = [self.term(x) for x in xs]
    wide = max((t.type for t in terms), key=length_of)
    return wide, [t if t.type == wide else Term(self, f"({wide})({bare(t.text)})", wide) for t in terms]
  def fma(self, x:Value, y:Value, z:Value) -> Value:
    wide, terms = self.same(x, y, z)
    return self.call("__builtin_elementwise_fma", wide, *terms)
  def abs(self, x:Value) -> Value: return self.call("__builtin_elementwise_abs", self.term(x).type, x)
  def masked(self, x:Value, offsets:Sequence[int], operator:str, limit:Value) -> Value:
    """By one comparison of vectors: of many clang keeps the results, in scalar registers that it hasn't got."""
    n = len(offsets)
    keys = self.let("keys", Term(self, f"(int{n}){{{', '.join(map(str, offsets))}}}", f"int{n}"))
    return Term(self, f"(({keys.text} {operator} (int{n})({bare(limit.text)})) ? (float{n})(-__builtin_inff()) : {x.text})", x.type)
  def exp2(self, x:Value) -> Value: return self.elementwise("exp2_of", "__builtin_amdgcn_exp2f({0})", x)
  def log2(self, x:Value) -> Value: return self.elementwise("log2_of", "__builtin_amdgcn_logf({0})", x)
  def rcp(self, x:Value) -> Value: return self.elementwise("rcp_of", "__builtin_amdgcn_rcpf({0})", x)
  def max(self, x:Value, y:Value) -> Value: return self.elementwise("max_of", "__builtin_fmaxf({0}, {1})", x, y)
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
  # Registers go to a function by value and come back as its result: of arrays whose address is taken clang makes worse code, though it inlines all.
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
  def to_float(self, x:Value) -> Value: return Term(self, f"(float)({bare(x.text)})", "float")
  def as_float(self, x:Value) -> Value:
    out = vector_of("float", length_of(x.type))
    return Term(self, f"__builtin_bit_cast({out}, {bare(x.text)})", out)
  def high_half(self, x:Value) -> Value: return Term(self, f"({x.text} >> 16)", "unsigned")
  def widen(self, bits:Value, dtype:str) -> Value:
    if dtype == "bfloat16": return Term(self, f"__builtin_bit_cast(float, {bits.text} << 16)", "float")
    return Term(self, f"(float)__builtin_bit_cast(_Float16, (unsigned short)({bare(bits.text)}))", "float")
  def pack(self, x:Value, dtype:str) -> Value:
    """Without a conversion instruction for bf16: add half an ulp (and the odd bit, for ties) to the fp32 pattern and keep its upper half."""
    n = length_of(x.type)
    out, pairs = vector_of("unsigned", n//2), [(f"x[{i}]", f"x[{i + 1}]") for i in range(0, n, 2)]
    if dtype == "float16": return Term(self, f"__builtin_bit_cast({out}, __builtin_convertvector({x.text}, half{n}))", out)
    if get_chip(self.arch).bf16_pack:   # pair by pair: of a whole vector clang makes copies
      words = [f"__builtin_bit_cast(unsigned, __builtin_convertvector((float2){{{low}, {high}}}, bfloat2))" for low, high in pairs]
      body = ""
    else:
      words = [f"__builtin_amdgcn_perm(u[{2*i + 1}], u[{2*i}], 0x07060302u)" for i in range(n//2)]
      body = f"  uint{n} u = __builtin_bit_cast(uint{n}, x);\n  u += 0x7fffu + ((u >> 16) & 1u);\n"
    result = returned(self.vector_text(out, words) if n > 2 else words[0])
    self.declare(f"pack_bfloat({x.type})", f"{self.header}{out} pack_bfloat({x.type} x) {{\n{body}{result}\n}}")
    return self.call("pack_bfloat", out, x)
  def at_least(self, x:Value, least:int) -> Value:
    """A difference that saturates at 0 (v_pk_sub_u16 with clamp), held to 1 (v_pk_min_u16). Of a 1 that it knows clang would make comparisons of the
    halves, one by one."""
    self.declare(f"at_least_{least}(unsigned)", f"{self.header}unsigned at_least_{least}(unsigned x) {{\n"
                 '  unsigned ones = 0x00010001u;\n  asm("" : "+s"(ones));\n'
                 f"  ushort2 above = __builtin_elementwise_sub_sat(__builtin_bit_cast(ushort2, x), (ushort2)({least - 1}));\n"
                 "  return __builtin_bit_cast(unsigned, __builtin_elementwise_min(above, __builtin_bit_cast(ushort2, ones)));\n}")
    return self.call(f"at_least_{least}", "unsigned", x)
  def sign_halves(self, x:Value) -> Value:
    """Selectors 8 and 9 of v_perm_b32 are the signs of the two halves of its second operand."""
    return Term(self, f"__builtin_amdgcn_perm({x.text}, {x.text}, 0x09090808u)", "unsigned")
  def where_bit(self, word:Value, bit:int, x:Value) -> Value:
    """By a mask that is the bit extended (v_bfe_i32). The number is an argument of a function, as that of `dot_ones`."""
    self.declare("masked(int, float)", f"{self.header}float masked(int mask, float x) {{\n"
                 "  return __builtin_bit_cast(float, __builtin_bit_cast(int, x) & mask);\n}")
    return self.call("masked", "float", Term(self, f"((int)({word.text} << {31 - bit}) >> 31)", "int"), x)
  # lanes
  def any_lane(self, condition:Value) -> Value:
    return Term(self, f"__builtin_amdgcn_ballot_w{get_chip(self.arch).wave}({bare(condition.text)}) != 0", "bool")
  def exchange(self, x:Value, step:int, how:str) -> tuple[Value, Value]:
    """By v_permlane16_swap_b32 and v_permlane32_swap_b32 (CDNA4 ISA section 12), v_permlanex16_b32 or ds_bpermute_b32; among eight neighbours by
    DPP or ds_swizzle_b32."""
    x = self.term(x)
    bits, pair = f"__builtin_bit_cast(unsigned, {x.text})", vector_of(x.type, 2)
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
    """Where dwords of x have other uses, clang packs those of RDNA4 once more for each, by an instruction of their own. (Elsewhere the hint costs
    registers.)"""
    if get_chip(self.arch).family == "rdna4": self.say(f'asm volatile("" :: "v"({self.term(x).text}));')
  def dot_ones(self, x:Value, c:Value, dtype:str) -> Value:
    """By a function, whose argument is a number: of an element v[1] of a vector clang's __builtin_bit_cast takes v[0]."""
    name, pair = {"float16": ("fdot2", "half2"), "bfloat16": ("fdot2_f32_bf16", "bfloat2")}[dtype]
    p, ones = (f"__builtin_bit_cast({pair}, {bits})" for bits in ("word", f"0x{TWO_ONES[dtype]:08x}u"))
    self.declare(f"dot_ones({pair})", f"{self.header}float dot_ones(unsigned word, float sum) {{\n"
                                      f"  return __builtin_amdgcn_{name}({p}, {ones}, sum, false);\n}}")
    return self.call("dot_ones", "float", x, c)
  def times_ones(self, matrix:Any, p:Value, c:Value, dtype:str) -> Value:
    kind, n = f"{matrix.operand_type}{2*matrix.operand_words}", matrix.operand_words
    ones = self.vector(*[Term(self, f"0x{TWO_ONES[dtype]:08x}u", "unsigned")]*n)
    a, b = (f"__builtin_bit_cast({kind}, {bare(x.text)})" for x in matrix.with_ones(p, ones))
    return Term(self, f"__builtin_amdgcn_{matrix.name}({a}, {b}, {bare(self.term(c).text)}{matrix.tail})", "float4")

QUAD_PERM = {1: 0xb1, 2: 0x4e}     # of v_mov_b32_dpp: within four lanes, those whose number differs by this

def exchange_neighbours(bits:str, step:int) -> str:
  """The dword of the lane whose number differs in the bit `step`, of 1, 2 and 4: by v_mov_b32_dpp, or ds_swizzle_b32 in its mode of masks."""
  if step in QUAD_PERM: return f"__builtin_amdgcn_mov_dpp((int){bits}, {QUAD_PERM[step]}, 15, 15, true)"
  return f"__builtin_amdgcn_ds_swizzle((int){bits}, {step << 10 | 0x1f})"

def exchange_rows(bits:str) -> str:
  """v_permlanex16_b32: the dword of the lane whose number differs by 16. It may fetch from lanes that are not active (there are none), so that clang
  needs no copy of what the result replaces."""
  return f"__builtin_amdgcn_permlanex16({bits}, {bits}, 0x76543210u, 0xfedcba98u, true, false)"

class Cuda(Printer):
  """CUDA: its vectors have names for their elements and nothing else, so that all is done element by element."""
  header = "static __device__ __forceinline__ "
  def __init__(self, arch:str, functions:dict[str, str]):
    super().__init__(arch, functions)
    self.inf, self.nan = Term(self, "INFINITY", "float"), Term(self, "__int_as_float(0x7fc00000)", "float")
  def at(self, text:str, ctype:str, i:int) -> str: return text if length_of(ctype) == 1 else f"{text}.{'xyzw'[i]}"
  def vector_text(self, out:str, values:Sequence[str]) -> str: return f"make_{out}({', '.join(values)})"
  def operation(self, operator:str, x:Value, y:Value, type:str|None=None) -> Term:
    n = max(length_of(t.type) if isinstance(t, Term) else 1 for t in (x, y))
    if n == 1: return super().operation(operator, x, y, type)
    each = [[self.element(t, i) if length_of(t.type) > 1 else t for i in range(n)] for t in (self.term(x), self.term(y))]
    return self.vector(*[self.operation(operator, a, b, type) for a, b in zip(*each)])
  def elementwise(self, name:str, scalar:str, *xs:Value) -> Term:
    terms = [self.term(x) for x in xs]
    n = max(length_of(t.type) for t in terms)
    if n == 1: return Term(self, scalar.format(*[bare(t.text) for t in terms]), "float")
    return self.vector(*[self.elementwise(name, scalar, *[self.element(t, i) if length_of(t.type) > 1 else t for t in terms]) for i in range(n)])
  def vector_operator(self, operator:str, x:str, y:str) -> None:
    """Declares it for whoever prints it: tinygrad, of its own UOps."""
    out, n = max((x, y), key=length_of), max(length_of(x), length_of(y))
    values = [f"{self.at('x', x, i)} {operator} {self.at('y', y, i)}" for i in range(n)]
    self.declare(f"operator{operator}({x}, {y})",
                 f"{self.header}{out} operator{operator}({x} x, {y} y) {{\n{returned(self.vector_text(out, values))}\n}}")
  def exp2(self, x:Value) -> Value:
    """9.7.3.24 of the PTX ISA."""
    self.declare("exp2_of(float)", f'{self.header}float exp2_of(float x) {{\n  float y;\n  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));\n'
                                   "  return y;\n}")
    return self.elementwise("exp2_of", "exp2_of({0})", x)
  def fma(self, x:Value, y:Value, z:Value) -> Value: return self.elementwise("fma_of", "fmaf({0}, {1}, {2})", x, y, z)
  def abs(self, x:Value) -> Value: return self.elementwise("abs_of", "fabsf({0})", x)
  def log2(self, x:Value) -> Value: return self.elementwise("log2_of", "log2f({0})", x)
  def rcp(self, x:Value) -> Value: return self.elementwise("rcp_of", "1.0f/{0}", x)
  def max(self, x:Value, y:Value) -> Value: return self.elementwise("max_of", "fmaxf({0}, {1})", x, y)
  def select(self, condition:Value, x:Value, y:Value) -> Value:
    x, y = self.term(x), self.term(y)
    return Term(self, f"({condition.text} ? {x.text} : {y.text})", x.type)
  def splat(self, x:Value, n:int) -> Value:
    if n == 1: return x
    out = vector_of("float", n)
    self.declare(f"splat{n}(float)", f"{self.header}{out} splat{n}(float x) {{\n{returned(self.vector_text(out, ['x']*n))}\n}}")
    return Term(self, f"splat{n}({bare(self.term(x).text)})", out, (self.term(x).text,)*n)
  def masked(self, x:Value, offsets:Sequence[int], operator:str, limit:Value) -> Value:
    def element(i:int, key:int) -> Value:
      beyond = self.operation(operator, Term(self, str(key), "int"), limit, "bool")
      return self.select(beyond, -self.inf, self.element(x, i))
    return self.vector(*[element(i, key) for i, key in enumerate(offsets)])
  def to_float(self, x:Value) -> Value: return Term(self, f"(float)({bare(x.text)})", "float")
  def as_float(self, x:Value) -> Value: return self.elementwise("as_float", "__uint_as_float({0})", x)
  def high_half(self, x:Value) -> Value: return Term(self, f"({x.text} >> 16)", "unsigned")
  def widen(self, bits:Value, dtype:str) -> Value:
    """9.7.9.21 of the PTX ISA for fp16; bf16 is the upper half of an fp32."""
    if dtype == "bfloat16": return Term(self, f"__uint_as_float({bits.text} << 16)", "float")
    self.declare("widen_half(unsigned)", f'{self.header}float widen_half(unsigned x) {{\n  float y;\n'
                                         '  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"((unsigned short)x));\n  return y;\n}')
    return self.call("widen_half", "float", bits)
  def pack(self, x:Value, dtype:str) -> Value:
    """9.7.9.21 of the PTX ISA: the high half comes first."""
    name, ptx = {"float16": ("pack_half", "f16x2"), "bfloat16": ("pack_bfloat", "bf16x2")}[dtype]
    self.declare(f"{name}(float, float)", f'{self.header}unsigned {name}(float low, float high) {{\n  unsigned y;\n'
                                          f'  asm("cvt.rn.{ptx}.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));\n  return y;\n}}')
    pairs = [self.call(name, "unsigned", self.element(x, i), self.element(x, i + 1)) for i in range(0, length_of(x.type), 2)]
    return self.vector(*pairs)
  def at_least(self, x:Value, least:int) -> Value:
    low, high = (f"({bits} >= {least << 16}u ? {one}u : 0u)" for bits, one in ((f"{x.text} << 16", 1), (x.text, 1 << 16)))
    return Term(self, f"({low} | {high})", "unsigned")
  def sign_halves(self, x:Value) -> Value:
    """9.7.9.7 of the PTX ISA: with its highest bit set a selector gives a byte's sign."""
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
    ones = f"0x{TWO_ONES[dtype]:08x}u"
    return self.call(declare_mma(self, matrix), "float4", p, Term(self, ones, "unsigned"), Term(self, ones, "unsigned"), c)

WARP = "0xffffffffu"

def declare_mma(printer:Printer, matrix:Any) -> str:
  """The function for mma.sync (PTX ISA 9.7.14.5.8), by name: (a, the two registers of b, c) -> c + A B."""
  c, a = ", ".join(f"%{i}" for i in range(4)), ", ".join(f"%{i}" for i in range(4, 8))
  results, operands = (", ".join(f'"{kind}"({name}.{e})' for e in "xyzw") for kind, name in (("+f", "c"), ("r", "a")))
  printer.declare(f"mma_{matrix.ptx}", f"{printer.header}float4 mma_{matrix.ptx}(uint4 a, unsigned b0, unsigned b1, float4 c) {{\n"
                  f'  asm("mma.sync.aligned.m16n8k16.row.col.f32.{matrix.ptx}.{matrix.ptx}.f32 "\n'
                  f'      "{{{c}}}, {{{a}}}, {{%8, %9}}, {{{c}}};"\n'
                  f'      : {results}\n      : {operands}, "r"(b0), "r"(b1));\n  return c;\n}}')
  return f"mma_{matrix.ptx}"

# ***** layout of the text *****

def float_literal(x:float) -> str:
  """An fp32 constant."""
  if math.isinf(x) or math.isnan(x): raise ValueError(f"{x}: a definition takes c.inf and c.nan")
  return f"{float(x)!r}f"

def bare(text:str) -> str:
  """The expression without the parentheses around all of it."""
  if not (text.startswith("(") and text.endswith(")")): return text
  depth = 0
  for i, letter in enumerate(text):
    depth += (letter == "(") - (letter == ")")
    if not depth: return text[1:-1] if i == len(text) - 1 else text
  return text

def wrapped(text:str, indent:str) -> str:
  """The text, broken after commas where a line would be longer than PRINTED_WIDTH."""
  lines, line = [], ""
  for piece in re.split(r"(?<=, )", text):
    if line and len(line) + len(piece) > PRINTED_WIDTH:
      lines.append(line.rstrip())
      line = indent
    line += piece
  return "\n".join([*lines, line])

def returned(expression:str) -> str: return wrapped(f"  return {expression};", " "*6)

LANGUAGES: dict[str, type[Printer]] = {"hip": Hip, "cuda": Cuda}
PARAMETERS = "abcdefghijklmnopqrstuvwxyz"

def text_of_call(call:Call, language:str, arch:str, out:str, types:Sequence[str], sources:Sequence[str], functions:dict[str, str]) -> str:
  """The expression for a call in a kernel, of operands with these C types (a pointer's ends in *) and texts. What functions it needs, it adds."""
  operation, printer = call.operation, LANGUAGES[language](arch, functions)
  if operation.definition is not None: return compound_text(call, operation, printer, out, types, sources)
  found: Any = operation.hip if language == "hip" else operation.cuda
  if found is None: raise NotImplementedError(f"{call.name} is no operation of {arch}")
  if callable(found): found = found(printer, out, **call.parameters)
  if isinstance(found, str): return found.format(*sources)
  return function_text(call.name, found, printer, out, types, sources)

def function_text(name:str, body:Body, printer:Printer, out:str, types:Sequence[str], sources:Sequence[str]) -> str:
  name, count = body.name or name, len(body.parameters.split())
  parameters = ", ".join(f"{t} {p}" for t, p in zip(types, body.parameters.split()))
  numbers, head = ", ".join(f"int {n}" for n, _ in body.template), f"{out} {name}"
  statements = "\n".join(f"  {line}" for line in body.statements.strip("\n").split("\n"))
  text = (f"template<{numbers}>\n" if numbers else "") + wrapped(f"{printer.header}{head}({parameters}) {{", " "*6) + f"\n{statements}\n}}"
  printer.declare(f"{name}({', '.join(types[:count])})", text)
  given = f"<{', '.join(str(x) for _, x in body.template)}>" if body.template else ""
  return f"{name}{given}({', '.join(bare(x) for x in sources[:count])})"

def operands_of(definition:Callable[..., Any]) -> list[str]:
  """The names of a definition's operands."""
  return [name for name, p in inspect.signature(definition).parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD][1:]

def compound_text(call:Call, operation:Operation, printer:Printer, out:str, types:Sequence[str], sources:Sequence[str]) -> str:
  definition, static = operation.definition, call.parameters
  assert definition is not None
  if operation.inline:
    return bare(printer.term(definition(printer, *[Term(printer, x, t) for x, t in zip(sources, types)], **static)).text)
  names = operands_of(definition)
  types, sources = types[:len(names)], [bare(x) for x in sources[:len(names)]]     # what else there is only says what comes before
  operands = [RegisterArray(name, t[:-1]) if t.endswith("*") else Term(printer, name, t) for name, t in zip(names, types)]
  registers = [x for x in operands if isinstance(x, RegisterArray)]
  if registers:      # a first run tells which of their elements are used, and how
    definition(type(printer)(printer.arch, {}), *operands, **static)
  printer.names.update(names)
  signature = printer.registers_signature(call.name, registers)
  result = printer.term(definition(printer, *operands, **static))
  name = call.name + operation.suffix.format(**static)
  parameters = ", ".join([*signature.parameters, *(f"{x.type} {x.text}" for x in operands if isinstance(x, Term))])
  body = "\n".join([*printer.lines, returned(signature.result or bare(result.text))])
  head = wrapped(f"{printer.header}{signature.type or out} {name}({parameters}) {{", " "*6)
  printer.declare(f"{name}({', '.join(types)})", f"{signature.declaration}{head}\n{body}\n}}")
  return printer.registers_call(name, dict(zip(names, sources)), operands)

def compound(name:str, inline:bool=False, suffix:str="") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
  """Makes the function below it the definition of the operation `name`; `suffix`, of static parameters, tells functions of the same types apart."""
  def define(definition:Callable[..., Any]) -> Callable[..., Any]:
    taken = None if inline else len(operands_of(definition))
    def meaning(lanes:Lanes, *sources:Any, **static:Any) -> Any: return definition(Numbers(lanes), *sources[:taken], **static)
    OPERATIONS[name] = Operation(meaning, definition=definition, inline=inline, suffix=suffix)
    return definition
  return define

def instruction(name:str, meaning:Callable[..., Any], hip:Any=None, cuda:Any=None) -> None:
  """An operation without parts. `meaning` (lanes, *sources, **static) is what it computes, in numpy. `hip` and `cuda` are its text for the languages
  that have it, or a function (printer, C type of the result, **static) that gives the text. A text is an expression with {0} and {1} for the sources,
  or a Body."""
  OPERATIONS[name] = Operation(meaning, hip, cuda)
