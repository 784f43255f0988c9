"""What a run has started and not waited for: copies to LDS, and products of a warpgroup. Their state is the emulator's alone; an operation's meaning
starts, commits and waits through `Lanes`.

Both are taken as strictly as the documents allow: from the start until its own thread has waited for it, what an operation writes may not be touched
and what it reads may not be written. The shadow of LDS and the register arrays know the operation by its number, and the error says which it was.
"""
from __future__ import annotations
from dataclasses import dataclass
from typing import Any
import numpy as np
from numpy.typing import NDArray
from attn.emulator.checks import Span
from attn.emulator.memory import Registers
from attn.emulator.shadow import LdsShadow
from attn.emulator.threads import Operand, Product, Threads

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

@dataclass(eq=False)
class Running:
  """A product that warpgroups have started, with what it writes and reads."""
  product: Product
  accumulators: Registers
  operands: list[Operand]

class UnderWay:
  def __init__(self, f:Threads):
    self.f = f
    self.copies: list[Copy] = []
    self.products: list[Running] = []
    self.group = np.zeros(f.T, np.int32)            # of each thread: the group that its next copy belongs to

  # ***** copies *****

  def copy(self, shadow:LdsShadow, at:Array, by:Array, span:Span) -> None:
    shadow.send(at, by, self.f.start())
    shadow.arriving.append(span)
    self.copies.append(Copy(shadow, at, by, self.group[by], span))

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
      else: copy.shadow.arriving.remove(copy.span)
    self.copies = left

  # ***** products *****

  def product(self, accumulators:Registers, results:dict[int, Array], operands:list[Operand]) -> None:
    product = Product(self.f.start(), results, self.f.active)
    self.products.append(Running(product, accumulators, operands))
    accumulators.coming |= dict.fromkeys(results, product)
    for x in operands: x.hold(product)

  def wait_products(self, but:int) -> None:
    """The active threads wait for all that they have started, the last so many of each excepted."""
    left, active, later = [], self.f.active, np.zeros(self.f.T, np.int32)     # how many of them a thread has started since
    waited:list[Array] = []
    for running in reversed(self.products):
      waited.append(running.product.threads & active & (later >= but))
      later += running.product.threads
    for running, done in zip(self.products, reversed(waited)):
      product = running.product
      product.threads = product.threads & ~done
      if done.any(): self._finish(running, done)
      if product.threads.any(): left.append(running)
      else: self._release(running)
    self.products = left

  def _finish(self, running:Running, done:Array) -> None:
    """It is done for these threads."""
    for i, value in running.product.results.items(): running.accumulators.put(i, value, done)
    for x in running.operands: x.read_until_now(done)

  def _release(self, running:Running) -> None:
    """It is done for all."""
    for i in running.product.results:
      if running.accumulators.coming.get(i) is running.product: del running.accumulators.coming[i]
    for x in running.operands: x.release(running.product)
