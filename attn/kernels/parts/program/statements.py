"""What a kernel does besides computing values: statements in their order, and what is carried from one step to the next."""
from __future__ import annotations
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, Self
from attn.kernels.parts.program.allocator import Allocator
from attn.tinygrad_compat import Ops, UOp, dtypes, new_uop

class Carried:
  """A dataclass of what a kernel carries from one step to the next: values that have `after`."""
  def after(self, *deps:UOp) -> Self:
    self_: Any = self
    return type(self)(*[getattr(self, f.name).after(*deps) for f in fields(self_)])

@dataclass(frozen=True)
class Statements:
  """Operations that are there for what they do. tinygrad keeps an operation whose value is stored: that of a statement, 0, goes to a register that is
  there for nothing else. Only values order statements: one comes after all that its operands need, and what is `after` its store comes after it. A
  statement that is given `done` among its operands comes after those before it."""
  register: UOp
  effects: tuple[UOp, ...] = ()  # stores that are still to be waited for: by the end of the loop around at the latest
  latest: UOp|None = None        # the register after what `done` waits for
  @staticmethod
  def of(allocator:Allocator) -> Statements: return Statements(allocator.registers(1))
  def after(self, *deps:UOp) -> Statements: return replace(self, latest=(self.register if self.latest is None else self.latest).after(*deps))
  def do(self, statement:UOp, *after:UOp) -> UOp:
    """Executes a statement, when these are done: its store."""
    return (self.register.after(*after) if after else self.register)[0].store(statement)
  @property
  def first(self) -> UOp:
    """The store of one that does nothing: from then on there is a `done`."""
    return self.do(UOp.const(0.0, dtypes.float))
  def begin(self, statement:UOp) -> Statements:
    """Executes a statement that is given `done`, and that only further statements come after."""
    return self.ran(self.do(statement))
  def ran(self, stored:UOp) -> Statements:
    """The statements after one more was executed, `stored` being its store."""
    return replace(self, effects=(*self.effects, stored), latest=self.register.after(stored))
  def note(self, *effects:UOp) -> Statements: return replace(self, effects=(*self.effects, *effects))
  @property
  def done(self) -> UOp:
    """A value that is there when all that this is `after` is done. A statement that is given it comes later."""
    return (self.register if self.latest is None else self.latest)[0].load()
  @property
  def before(self) -> tuple[UOp, ...]:
    """The value `done`, or nothing where no statement has been executed yet."""
    return (self.done,) if self.latest is not None else ()

class InOrder(Carried):
  """What is carried in a kernel whose steps follow one another: each statement comes after those before."""
  statements: Statements
  @property
  def done(self) -> UOp: return self.statements.done
  def do(self, *statements:UOp) -> Self:
    """When these statements are done, which any order may have among them."""
    return self.after(UOp.group(*map(self.statements.do, statements)))
  def store(self, *stores:Iterable[UOp]) -> Self:
    """When these are stored."""
    return self.after(UOp.group(*[x for xs in stores for x in xs]))
  def after(self, *deps:UOp) -> Self:
    """What is done last mostly comes after all that a value is after, which then need not be said again: fewer UOps to lower."""
    self_: Any = self
    carried = [getattr(self, f.name) for f in fields(self_)]
    said = {awaited: comes_after(deps, awaited) for awaited in set(map(awaited_by, carried))}
    return type(self)(*[(bare_of(x) if said[awaited_by(x)] else x).after(*deps) for x in carried])

def bare_of(x:Any) -> Any:
  """A value that is carried, after nothing; what is no value as it is: a register of statements whose own stores are only implied would be dropped by
  tinygrad, and with it the loop that it ends."""
  while isinstance(x, UOp) and x.op is Ops.AFTER: x = x.src[0]
  return x

def awaited_by(x:Any) -> frozenset[UOp]:
  """What a value that is carried is `after`."""
  found, u = set[UOp](), x
  while isinstance(u, UOp) and u.op is Ops.AFTER:
    found.update(u.src[1:])
    u = u.src[0]
  return frozenset(found)

def comes_after(xs:tuple[UOp, ...], deps:frozenset[UOp]) -> bool:
  """Whether something that one of xs is made of is `after` all of these. It is looked for as far as the next things that are after anything."""
  stack, seen = list(xs), set[UOp]()
  while stack and deps:
    if (u := stack.pop()) in seen: continue
    seen.add(u)
    if u.op is not Ops.AFTER: stack += u.src
    elif deps <= awaited_by(u): return True
  return not deps

def store_all(to:UOp, values:Iterable[UOp]) -> list[UOp]:
  """The stores of values to a placeholder, element by element."""
  return [to[i].store(x) for i, x in enumerate(values)]

def workgroup_barrier(after:UOp) -> UOp:
  """A workgroup barrier; tinygrad's own ones go by LOCAL stores that it sees."""
  return new_uop(Ops.BARRIER, (after,), dtypes.void)
