"""Small language for compound operations: a Python function defines one, and gives HIP text, CUDA text, numpy results or UOps. Begin with
`compound`."""
from __future__ import annotations
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from attn.ops.interpret_cuda import Cuda
from attn.ops.interpret_hip import Hip
from attn.ops.interpret_numpy import Numbers
from attn.ops.operation import OPERATIONS, Body, Call, Lanes, Operation
from attn.ops.printer import Printer, RegisterArray, Term, bare, returned, wrapped

# A definition is a Python function `f(c, x, y, ...)`: `c` is the interpreter, and the operands x, y, ... are values of this interpreter. Values have
# Python's operators: + - * for numbers, < > <= == for comparisons, & | ~ for conditions. `c` provides everything else: `c.fma(x, y, z)`,
# `c.select(condition, x, y)`, registers, branches, exchanges between lanes, and `c.let("m", x)`, which gives a value a name in the text. A vector of
# n numbers is one value. An operation on a vector and a scalar applies the scalar to every element. interpret_numpy.py computes numbers;
# interpret_hip.py and interpret_cuda.py render text, with printer.py as their base; interpret_uops.py makes UOps, for devices whose renderer does
# not know attn's operations (attn/ops/plain.py).

LANGUAGES: dict[str, type[Printer]] = {"hip": Hip, "cuda": Cuda}

@dataclass
class KernelText:
  """C++ text that a kernel needs for operations of attn: expressions that call the operations, and the C++ functions that are called."""
  language: str
  arch: str
  functions: dict[str, str] = field(default_factory=dict)                          # by name and types; a function stands after its callees
  compounds: dict[Any, tuple[str, list[Any]]] = field(default_factory=dict)        # functions and operands of the compound operations rendered so far
  def printer(self) -> Printer: return LANGUAGES[self.language](self.arch, self.functions)

  def call(self, call:Call, out:str, types:Sequence[str], sources:Sequence[str]) -> str:
    """Returns the C++ expression that computes the operation `call` from operands, given as texts (`sources`) and their C types (`types`)."""
    operation, printer = call.operation, self.printer()
    if operation.inline: return inlined(operation, call.parameters, printer, types, sources)
    if operation.definition is not None: return self.compound(call, operation.definition, out, types, sources)
    found: Any = operation.hip if self.language == "hip" else operation.cuda
    if found is None: raise NotImplementedError(f"{call.name} is not an operation of {self.arch}")
    if callable(found): found = found(printer, out, **call.parameters)
    if isinstance(found, str): return found.format(*sources)
    return function_text(call.name, found, printer, out, types, sources)

  def compound(self, call:Call, definition:Callable[..., Any], out:str, types:Sequence[str], sources:Sequence[str]) -> str:
    """Returns the C++ expression that calls the function of a compound operation. The function is rendered once for each combination of types."""
    names = operands_of(definition)
    types, sources = types[:len(names)], [bare(x) for x in sources[:len(names)]]     # further sources only order the call after other statements
    key = (call, out, *types)
    if key not in self.compounds: self.compounds[key] = compound_function(call, definition, self.printer(), out, dict(zip(names, types)))
    function, operands = self.compounds[key]
    return self.printer().registers_call(function, dict(zip(names, sources)), operands)

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
  """Returns the names of a compound operation's operands: the positional parameters of its Python function, except the first, the interpreter."""
  # keyword-only parameters are constants (static parameters), not operands
  return [name for name, p in inspect.signature(definition).parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD][1:]

def inlined(operation:Operation, static:dict[str, Any], printer:Printer, types:Sequence[str], sources:Sequence[str]) -> str:
  assert operation.definition is not None
  return bare(printer.term(operation.definition(printer, *[Term(printer, x, t) for x, t in zip(sources, types)], **static)).text)

def compound_function(call:Call, definition:Callable[..., Any], printer:Printer, out:str, types:dict[str, str]) -> tuple[str, list[Any]]:
  """Declares the C++ function of a compound operation for operands of the C types `types`, {name: type}; returns (its name, its operands)."""
  static, name = call.parameters, call.name + call.operation.suffix.format(**call.parameters)
  operands = [RegisterArray(x, t[:-1]) if t.endswith("*") else Term(printer, x, t) for x, t in types.items()]
  registers = [x for x in operands if isinstance(x, RegisterArray)]
  if registers:      # a first run records which elements of the arrays are read and written
    definition(type(printer)(printer.arch, {}), *operands, **static)
  printer.names.update(types.keys())
  signature = printer.registers_signature(call.name, registers)
  result = printer.term(definition(printer, *operands, **static))
  parameters = ", ".join([*signature.parameters, *(f"{x.type} {x.text}" for x in operands if isinstance(x, Term))])
  body = "\n".join([*printer.lines, returned(signature.result or bare(result.text))])
  head = wrapped(f"{printer.header}{signature.type or out} {name}({parameters}) {{", " "*6)
  printer.declare(f"{name}({', '.join(types.values())})", f"{signature.declaration}{head}\n{body}\n}}")
  return name, operands

def compound(name:str, inline:bool=False, suffix:str="") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
  """Decorator that registers the compound operation `name`: the decorated Python function defines what it computes."""
  # If the text depends on static parameters, `suffix` must be a format string of them, such as "_{dtype}": it ends the C++ function's name.
  def define(definition:Callable[..., Any]) -> Callable[..., Any]:
    taken = None if inline else len(operands_of(definition))
    def meaning(lanes:Lanes, *sources:Any, **static:Any) -> Any: return definition(Numbers(lanes), *sources[:taken], **static)
    OPERATIONS[name] = Operation(meaning, definition=definition, inline=inline, suffix=suffix)
    return definition
  return define

def instruction(name:str, meaning:Callable[..., Any], hip:Any=None, cuda:Any=None, *, atomic:bool=False) -> None:
  """Registers `name`, an operation of one instruction: `meaning` computes it in numpy; `hip` and `cuda` are texts, or functions that return texts."""
  # A text is an expression with {0} and {1} for the operands, a Body, or a function (printer, C type of the result, **static) that returns one of
  # these; None if the language has no such instruction.
  OPERATIONS[name] = Operation(meaning, hip, cuda, atomic=atomic)
