"""What a run has started and not waited for: copies to LDS, and products of a warpgroup. Their state is the emulator's alone; an operation's meaning
starts, commits and waits through `Lanes`.

Both are taken as strictly as the documents allow: from the start until its own thread has waited for it, what an operation writes may not be touched
and what it reads may not be written. The shadow of LDS and the register arrays know the operation by its number, and the error says which it was.
"""
from __future__ import annotations
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
import numpy as np
from numpy.typing import NDArray
if TYPE_CHECKING:
  from attn.emulator.checks import Span, LdsShadow
  from attn.emulator.machine import Frame
  from attn.emulator.memory import Registers

Array = NDArray[Any]

@dataclass
class Copy:
  """One store to LDS that threads have started: where it writes, and the group that each of them has committed it to."""
  shadow: LdsShadow
  at: Array        # locations: (of a thread, threads)
  by: Array        # threads
  group: Array     # of each
  span: Span

  def split(self, arrived:Array) -> tuple[Copy, Copy]:
    """What has arrived, and what has not."""
    return tuple(Copy(self.shadow, self.at[:, x], self.by[x], self.group[x], self.span) for x in (arrived, ~arrived))   # type: ignore[return-value]

@dataclass
class LdsOperand:
  """Locations of LDS that a product reads: `per` neighbouring ones from `at*per` on, in the active threads."""
  shadow: LdsShadow
  at: Array
  per: int
  active: Array|None
  span: Span

@dataclass
class Operands:
  """What a product reads: of LDS, and of register arrays these elements."""
  lds: list[LdsOperand] = field(default_factory=list)
  registers: list[tuple[Registers, int]] = field(default_factory=list)

@dataclass(eq=False)
class Product:
  """One product that warpgroups have started."""
  number: int
  accumulators: Registers
  results: dict[int, Array]      # element of the accumulators -> what it will be
  operands: Operands
  threads: Array                 # those that have not waited for it

class UnderWay:
  def __init__(self, f:Frame):
    self.f = f
    self.started: list[int] = []                    # the step that started operation 0, 1, ...
    self.copies: list[Copy] = []
    self.products: list[Product] = []
    self.group = np.zeros(f.T, np.int32)            # of each thread: the group that its next copy belongs to
    self.operands: Operands|None = None             # while a product reads them

  def start(self) -> int:
    """The number of an operation that begins here."""
    self.started.append(self.f.pc)
    return len(self.started) - 1

  # ***** copies *****

  def copy(self, shadow:LdsShadow, at:Array, by:Array, span:Span) -> None:
    shadow.send(at, by, self.start())
    shadow.arriving += 1
    self.copies.append(Copy(shadow, at, by, self.group[by], span))

  def writes(self, shadow:LdsShadow, span:Span) -> bool:
    """Whether a copy does, to one of these locations."""
    return any(x.shadow is shadow and _meet(x.span, span) for x in self.copies)

  def reads(self, shadow:LdsShadow, span:Span) -> bool:
    """Whether a product does, one of these locations."""
    return any(x.shadow is shadow and _meet(x.span, span) for product in self.products for x in product.operands.lds)

  def commit(self) -> None: self.group = self.group + self.f.active

  def wait_copies(self, but:int) -> None:
    """The active threads wait for all their groups but the last so many."""
    left, active = [], self.f.active
    for copy in self.copies:
      arrived = active[copy.by] & (copy.group < self.group[copy.by] - but)
      if not arrived.any():
        left.append(copy)
        continue
      done, rest = (copy, None) if arrived.all() else copy.split(arrived)
      done.shadow.arrive(done.at, done.by, done.span)
      if rest is not None: left.append(rest)
      else: copy.shadow.arriving -= 1
    self.copies = left

  # ***** products *****

  def product(self, accumulators:Registers, results:dict[int, Array], operands:Operands) -> None:
    product = Product(self.start(), accumulators, results, operands, self.f.active)
    self.products.append(product)
    accumulators.coming |= dict.fromkeys(results, product)
    for x in operands.lds: x.shadow.holding += 1
    for registers, i in operands.registers: registers.held[i] = product

  def wait_products(self, but:int) -> None:
    """The active threads wait for all that they have started, the last so many of each excepted."""
    left, active, later = [], self.f.active, np.zeros(self.f.T, np.int32)     # how many of them a thread has started since
    waited:list[Array] = []
    for product in reversed(self.products):
      waited.append(product.threads & active & (later >= but))
      later += product.threads
    for product, done in zip(self.products, reversed(waited)):
      product.threads = product.threads & ~done
      if done.any(): self._finish(product, done)
      if product.threads.any(): left.append(product)
      else: self._release(product)
    self.products = left

  def _finish(self, product:Product, done:Array) -> None:
    """It is done for these threads."""
    for i, value in product.results.items(): product.accumulators.put(i, value, done)
    for x in product.operands.lds:               # it may have read up to now: who writes next has to be a barrier later
      x.shadow.note_read(x.at, x.per, done if x.active is None else done & x.active, x.span)

  def _release(self, product:Product) -> None:
    """It is done for all."""
    for i in product.results:
      if product.accumulators.coming.get(i) is product: del product.accumulators.coming[i]
    for registers, i in product.operands.registers:
      if registers.held.get(i) is product: del registers.held[i]
    for x in product.operands.lds: x.shadow.holding -= 1

def _meet(a:Span, b:Span) -> bool: return a[0] < b[1] and b[0] < a[1]
