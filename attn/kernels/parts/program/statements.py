"""Statements of a kernel and their order, and the values that a kernel carries from one step to the next."""
from __future__ import annotations
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, Self
from attn.kernels.parts.program.allocator import Allocator
from attn.tinygrad_compat import Ops, UOp, dtypes, new_uop

class Carried:
  """Base of dataclasses that hold what a kernel carries from one step to the next. Every field has a method `after`."""
  def after(self, *deps:UOp) -> Self:
    self_: Any = self
    return type(self)(*[getattr(self, f.name).after(*deps) for f in fields(self_)])

@dataclass(frozen=True)
class Statements:
  """Statements: operations that are executed for their effect, not for a value. tinygrad keeps only operations whose value is stored. The value of a
  statement, 0, is therefore stored to a register that serves nothing else. Only values order statements: a statement comes after all that its
  operands need, and whatever is `after` its store comes after it. A statement that takes `done` as an operand comes after the statements before
  it."""
  register: UOp
  effects: tuple[UOp, ...] = ()  # stores that something must still wait for, at the latest the end of the loop around them
  latest: UOp|None = None        # the register, after what `done` waits for; None before the first statement
  @staticmethod
  def of(allocator:Allocator) -> Statements: return Statements(allocator.registers(1))
  def after(self, *deps:UOp) -> Statements: return replace(self, latest=(self.register if self.latest is None else self.latest).after(*deps))
  def do(self, statement:UOp, *after:UOp) -> UOp:
    """Executes a statement after `after` are done, and returns the store of its value."""
    return (self.register.after(*after) if after else self.register)[0].store(statement)
  @property
  def first(self) -> UOp:
    """Store of a statement that does nothing. Without it `done` has no value before the first statement."""
    return self.do(UOp.const(0.0, dtypes.float))
  def begin(self, statement:UOp) -> Statements:
    """Executes a statement that takes `done` as an operand. Only further statements come after it."""
    return self.ran(self.do(statement))
  def ran(self, stored:UOp) -> Statements:
    """Adds a statement that is already in the program, given the store that `do` returned. Later statements come after it."""
    return replace(self, effects=(*self.effects, stored), latest=self.register.after(stored))
  def note(self, *effects:UOp) -> Statements: return replace(self, effects=(*self.effects, *effects))
  @property
  def done(self) -> UOp:
    """A value that exists once everything that these statements are `after` is done. A statement that takes it as an operand comes later."""
    return (self.register if self.latest is None else self.latest)[0].load()
  @property
  def before(self) -> tuple[UOp, ...]:
    """`done` in a tuple, or an empty tuple where no statement has been executed yet."""
    return (self.done,) if self.latest is not None else ()

class InOrder(Carried):
  """State of a kernel whose steps follow one another: each statement comes after the statements before it."""
  statements: Statements
  @property
  def done(self) -> UOp: return self.statements.done
  def do(self, *statements:UOp) -> Self:
    """Returns the state after these statements, which have no order among themselves."""
    return self.after(UOp.group(*map(self.statements.do, statements)))
  def store(self, *stores:Iterable[UOp]) -> Self:
    """Returns the state after these stores."""
    return self.after(UOp.group(*[x for xs in stores for x in xs]))
  def after(self, *deps:UOp) -> Self:
    """Returns the state after `deps`. Where `deps` already come after everything that a value waits for, the value waits for `deps` alone: fewer UOps
    to lower."""
    self_: Any = self
    carried = [getattr(self, f.name) for f in fields(self_)]
    said = {awaited: comes_after(deps, awaited) for awaited in set(map(awaited_by, carried))}
    return type(self)(*[(bare_of(x) if said[awaited_by(x)] else x).after(*deps) for x in carried])

def bare_of(x:Any) -> Any:
  """Removes what a carried value waits for. Returns anything but a UOp unchanged. `Statements` stay unchanged because tinygrad would drop their
  register, and the loop that it ends, if the stores to it were only implied."""
  while isinstance(x, UOp) and x.op is Ops.AFTER: x = x.src[0]
  return x

def awaited_by(x:Any) -> frozenset[UOp]:
  """Returns everything that a carried value is `after`."""
  found, u = set[UOp](), x
  while isinstance(u, UOp) and u.op is Ops.AFTER:
    found.update(u.src[1:])
    u = u.src[0]
  return frozenset(found)

def comes_after(xs:tuple[UOp, ...], deps:frozenset[UOp]) -> bool:
  """Says whether something that one of `xs` is made of is `after` all of `deps`. The search through the sources of `xs` does not go beyond a UOp that
  is `after` anything."""
  stack, seen = list(xs), set[UOp]()
  while stack and deps:
    if (u := stack.pop()) in seen: continue
    seen.add(u)
    if u.op is not Ops.AFTER: stack += u.src
    elif deps <= awaited_by(u): return True
  return not deps

def store_all(to:UOp, values:Iterable[UOp]) -> list[UOp]:
  """Returns the stores of values to a placeholder, element by element."""
  return [to[i].store(x) for i, x in enumerate(values)]

def workgroup_barrier(after:UOp) -> UOp:
  """Returns a workgroup barrier after `after`. tinygrad places its own barriers only where it sees LOCAL stores."""
  return new_uop(Ops.BARRIER, (after,), dtypes.void)
