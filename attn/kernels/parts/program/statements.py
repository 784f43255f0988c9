"""Statements of a kernel (operations with side effects) in their order, and base classes for a kernel's state."""
from __future__ import annotations
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, Self
from attn.kernels.parts.program.allocator import Allocator
from attn.ops import common as ops
from attn.tinygrad_compat import Ops, UOp, dtypes, new_uop

class Carried:
  """Base class of a kernel's states: dataclasses of the values (registers, tiles in LDS) that one step of the kernel passes to the next."""
  # every field has a method `after`
  def after(self, *deps:UOp) -> Self:
    """Returns this state with values that may be used only after the operations `deps`."""
    self_: Any = self
    return type(self)(*[getattr(self, f.name).after(*deps) for f in fields(self_)])

@dataclass(frozen=True)
class Optional:
  """A field of a state, such as an array of registers, that is None in kernels that do not need it."""
  value: UOp|None = None   # None in the other kernels
  def after(self, *deps:UOp) -> Optional: return Optional(None if self.value is None else self.value.after(*deps))

@dataclass(frozen=True)
class Statements:
  """The statements that a program has so far: operations with side effects, such as barriers."""
  # tinygrad keeps only operations whose value is stored. A statement's value, 0, is therefore stored to a register that has no other use. tinygrad
  # orders two operations only if one is computed from the other. So a statement comes after its operands. A value that is read after the statement's
  # store (`value.after(store)`) comes after the statement.
  register: UOp
  effects: tuple[UOp, ...] = ()  # stores that something must still wait for, at the latest the end of the loop around them
  latest: UOp|None = None        # the register, after what `done` waits for; None before the first statement
  @staticmethod
  def of(allocator:Allocator) -> Statements: return Statements(allocator.registers(1))
  def after(self, *deps:UOp) -> Statements: return replace(self, latest=(self.register if self.latest is None else self.latest).after(*deps))
  def do(self, statement:UOp, *after:UOp) -> UOp:
    """Returns a store that puts the UOp `statement` into the program, where it is executed after the operations `after`."""
    # `ran` makes later statements wait
    return (self.register.after(*after) if after else self.register)[0].store(statement)
  @property
  def first(self) -> UOp:
    """A store of 0 with which a kernel begins: to the register that all later statements use, so that they stay in order."""
    # `done` may load the register before a statement has stored to it
    return self.do(UOp.const(0.0, dtypes.float))
  def begin(self, statement:UOp) -> Statements:
    """Returns these statements, with `statement` as a new last one."""
    # other values of the kernel do not wait for the statement
    return self.ran(self.do(statement))
  def ran(self, stored:UOp) -> Statements:
    """Returns these statements with `stored`, a result of `do`, as a new last one: later statements come after it."""
    return replace(self, effects=(*self.effects, stored), latest=self.register.after(stored))
  def note(self, *effects:UOp) -> Statements: return replace(self, effects=(*self.effects, *effects))
  @property
  def done(self) -> UOp:
    """A value that is loaded after all these statements: an operation that takes it as operand comes after them, too."""
    return (self.register if self.latest is None else self.latest)[0].load()
  @property
  def before(self) -> tuple[UOp, ...]:
    """Operands that make a new statement come after all these statements; an empty tuple if there are none."""
    return (self.done,) if self.latest is not None else ()

class InOrder(Carried):
  """Base class of states whose statements (operations with side effects) run in the order in which they are added."""
  statements: Statements
  @property
  def done(self) -> UOp: return self.statements.done
  def do(self, *statements:UOp) -> Self:
    """Adds `statements`, in any order, and returns the state after all of them."""
    return self.after(UOp.group(*map(self.statements.do, statements)))
  def store(self, *stores:Iterable[UOp]) -> Self:
    """Adds `stores`, in any order, and returns the state after all of them."""
    return self.after(UOp.group(*[x for xs in stores for x in xs]))
  def after_barrier(self) -> Self:
    """Returns the state after a barrier at which all threads of the workgroup wait for each other."""
    return self.after(workgroup_barrier(self.done))
  def after(self, *deps:UOp) -> Self:
    """Returns this state with values that may be used only after the operations `deps`."""
    # If `deps` come after everything that a value already waits for, these older waits of the value (tinygrad's AFTER) are removed, because they say
    # nothing new. This leaves fewer UOps to lower.
    self_: Any = self
    carried = [getattr(self, f.name) for f in fields(self_)]
    said = {awaited: comes_after(deps, awaited) for awaited in set(map(awaited_by, carried))}
    return type(self)(*[(bare_of(x) if said[awaited_by(x)] else x).after(*deps) for x in carried])

def bare_of(x:Any) -> Any:
  """Returns `x`, a value of a kernel's state, without tinygrad's AFTER UOps around it."""
  # `Statements` must keep waiting: only through them does the kernel use the stores that end a loop, and tinygrad drops a loop that nothing uses
  while isinstance(x, UOp) and x.op is Ops.AFTER: x = x.src[0]
  return x

def awaited_by(x:Any) -> frozenset[UOp]:
  """Returns the operations that `x`, a value of a kernel's state, waits for (those in the AFTER UOps around it)."""
  found, u = set[UOp](), x
  while isinstance(u, UOp) and u.op is Ops.AFTER:
    found.update(u.src[1:])
    u = u.src[0]
  return frozenset(found)

def comes_after(xs:tuple[UOp, ...], deps:frozenset[UOp]) -> bool:
  """Returns whether one of the UOps `xs` waits for all of the operations `deps`, by itself or through its operands."""
  # The search goes from `xs` to their operands, and stops at each UOp that waits for something itself (tinygrad's AFTER).
  stack, seen = list(xs), set[UOp]()
  while stack and deps:
    if (u := stack.pop()) in seen: continue
    seen.add(u)
    if u.op is not Ops.AFTER: stack += u.src
    elif deps <= awaited_by(u): return True
  return not deps

def store_all(to:UOp, values:Iterable[UOp]) -> list[UOp]:
  """Returns the stores of `values` to the first elements of `to`, such as an array of registers."""
  return [to[i].store(x) for i, x in enumerate(values)]

def add_all(to:UOp, values:Iterable[UOp], places:Iterable[int]|None=None) -> list[UOp]:
  """Returns the stores that add `values` to the elements `places` of `to`, by default to the first ones."""
  return [to[i].store(ops.add(to[i].load(), x)) for i, x in zip(itertools.count() if places is None else places, values)]

def load_all(x:UOp) -> list[UOp]:
  """Returns all elements of `x`, such as an array of registers."""
  return [x[i].load() for i in range(x.max_numel())]

def workgroup_barrier(after:UOp) -> UOp:
  """Returns a workgroup barrier that comes after the operation `after`."""
  # tinygrad inserts its own barriers only where it sees stores to LOCAL memory
  return new_uop(Ops.BARRIER, (after,), dtypes.void)
