"""Base class for rendering compound operations, which are defined by Python functions, as C++ text; interpret_hip.py and interpret_cuda.py extend
it."""
from __future__ import annotations
import functools, math, re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar
from attn.ops.operation import Value, LocalVariable

PRINTED_WIDTH = 120            # columns of a rendered line, if it can be broken

# ***** layout of the text *****

def float_literal(x:float) -> str:
  if math.isinf(x) or math.isnan(x): raise ValueError(f"{x}: a definition must use c.inf or c.nan for it")
  return f"{float(x)!r}f"

def bare(text:str) -> str:
  """Returns a C++ expression without the parentheses that enclose the whole expression, if there are any."""
  if not (text.startswith("(") and text.endswith(")")): return text
  depth = 0
  for x in re.finditer(r"[()]", text):
    depth += 1 if x[0] == "(" else -1
    if not depth: return text[1:-1] if x.end() == len(text) else text
  return text

def wrapped(text:str, indent:str) -> str:
  """Returns the text with line breaks after commas, where a line would exceed PRINTED_WIDTH. New lines begin with `indent`."""
  lines, line = [], ""
  for piece in re.split(r"(?<=, )", text):
    if line and len(line) + len(piece) > PRINTED_WIDTH:
      lines.append(line.rstrip())
      line = indent
    line += piece
  return "\n".join([*lines, line])

def returned(expression:str) -> str: return wrapped(f"  return {expression};", " "*6)

# ***** values *****

@functools.cache
def length_of(ctype:str) -> int:
  """Returns the number of elements in a value of this C type."""
  return int(found[1]) if (found := re.fullmatch(r"[a-z]+(\d+)", ctype)) is not None else 1

def element_of(ctype:str) -> str: return {"uint": "unsigned"}.get(name := ctype.rstrip("0123456789"), name)
def vector_of(element:str, n:int) -> str: return element if n == 1 else f"{'uint' if element == 'unsigned' else element}{n}"

@dataclass(frozen=True)
class Term:
  """C++ expression (a text) and its C type. Python's operators make new expressions of it."""
  printer: Printer
  text: str
  type: str
  # texts of the single elements from which a vector was built
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
  """Operand of a compound operation that is an array of registers, with a record of the elements that the operation reads and writes."""
  text: str
  type: str      # type of an element
  # elements that a definition reads
  used: set[int] = field(default_factory=set)
  # elements that a definition writes
  stored: set[int] = field(default_factory=set)
  apart: bool = False    # each element is a separate parameter of the function
  @property
  def size(self) -> int: return max(self.used | self.stored) + 1

@dataclass(frozen=True)
class Signature:
  """Parameters and result of a generated C++ function that takes register arrays."""
  parameters: Sequence[str]
  declaration: str = ""  # declaration of a struct that the function takes and returns
  type: str = ""         # type of the result, if not the operation's own
  result: str = ""       # expression that is returned, if not the operation's value

class Printer:
  """Runs the Python function that defines a compound operation, and collects the C++ statements that it stands for."""
  header: str           # first words of every function's declaration
  functions_of_numbers: ClassVar[dict[str, str]]      # the language's expressions for functions of scalars, with {0} and {1} for the operands
  infinity: ClassVar[str]
  not_a_number: ClassVar[str]
  def __init__(self, arch:str, functions:dict[str, str]):
    self.arch, self.functions, self.lines, self.depth, self.names = arch, functions, list[str](), 1, Counter[str]()

  # naming and control
  def say(self, line:str) -> None:
    indent = "  "*self.depth
    self.lines.append(wrapped(indent + line, indent + " "*4))
  def fresh(self, name:str) -> str:
    """Returns a name that is not used yet: `name`, with a number appended if `name` is taken."""
    self.names[name] += 1
    return name if self.names[name] == 1 else f"{name}{self.names[name]}"
  def let(self, name:str, x:Value) -> Value:
    x, name = self.term(x), self.fresh(name)
    self.say(f"{x.type} {name} = {bare(x.text)};")
    return Term(self, name, x.type)
  def variable(self, name:str, x:Value) -> LocalVariable: return LocalVariable(self.let(name, x))
  def assign(self, v:LocalVariable, x:Value) -> None: self.say(f"{v.value.text} = {bare(self.term(x).text)};")
  def when(self, condition:Value, body:Callable[[], None]) -> None:
    self.say(f"if ({self.rarely(condition.text)}) {{")
    self.depth += 1
    body()
    self.depth -= 1
    self.say("}")
  def rarely(self, condition:str) -> str: return bare(condition)
  # expressions
  @property
  def inf(self) -> Term: return Term(self, self.infinity, "float")
  @property
  def nan(self) -> Term: return Term(self, self.not_a_number, "float")
  def term(self, x:Value) -> Term: return x if isinstance(x, Term) else Term(self, float_literal(x), "float")
  def number(self, x:float) -> Value: return self.term(x)
  def named(self, name:str, ctype:str) -> Term: return Term(self, name, ctype)
  def operation(self, operator:str, x:Value, y:Value, type:str|None=None) -> Term:
    integer = next((t.type for t in (x, y) if isinstance(t, Term) and t.type in ("int", "unsigned")), None)
    def operand(t:Value) -> Term: return Term(self, str(t), integer) if integer and isinstance(t, int) else self.term(t)
    x, y = operand(x), operand(y)
    wide = x.type if length_of(x.type) >= length_of(y.type) else y.type
    if length_of(wide) > 1: self.vector_operator(operator, x.type, y.type)
    return Term(self, f"({x.text} {operator} {y.text})", type or wide)
  def vector_operator(self, operator:str, x:str, y:str) -> None:
    """Declares a C++ operator between operands of types x and y, if the language does not have it."""
  def call(self, name:str, out:str, *xs:Value) -> Term: return Term(self, f"{name}({', '.join(bare(self.term(x).text) for x in xs)})", out)
  def elementwise(self, name:str, scalar:str, *xs:Value) -> Term:
    """Renders a call of the C++ function `name`, and declares this function, which computes the text `scalar`, e.g. "{0} + {1}", for each element."""
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
    """Declares the C++ function `text` before the kernel, unless a function with the same `key` (name and parameter types) is declared already."""
    # different functions with one key are a mistake in the text of an operation
    if self.functions.setdefault(key, text) != text: raise ValueError(f"two different functions {key}:\n{self.functions[key]}\n{text}")
  def log2(self, x:Value) -> Value: return self.elementwise("log2_of", self.functions_of_numbers["log2"], x)
  def rough_log2(self, x:Value) -> Value: return self.log2(x)
  def rcp(self, x:Value) -> Value: return self.elementwise("rcp_of", self.functions_of_numbers["rcp"], x)
  def max(self, x:Value, y:Value) -> Value: return self.elementwise("max_of", self.functions_of_numbers["max"], x, y)
  def masked(self, x:Value, offsets:Sequence[int], operator:str, limit:Value, instead:Value) -> Value: raise NotImplementedError
  def beyond(self, x:Value, offsets:Sequence[int], first:Value, last:Value, instead:Value) -> Value:
    return self.masked(self.masked(x, offsets, ">", last, instead), offsets, "<", first, instead)
  def high_half(self, x:Value) -> Value: return Term(self, f"({x.text} >> 16)", "unsigned")
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
  def read(self, pointer:Any, i:int, n:int) -> Value:
    kind = vector_of("float", n)
    return Term(self, f"((const {kind}*){pointer.text})[{i}]", kind)
  def registers_signature(self, name:str, registers:list[RegisterArray]) -> Signature:
    """Returns the parameters and result of a C++ function that gets each array in `registers` as a pointer."""
    return Signature([f"{x.type}* {x.text}" for x in registers])
  def registers_call(self, name:str, sources:dict[str, str], operands:list[Any]) -> str: return f"{name}({', '.join(sources.values())})"
