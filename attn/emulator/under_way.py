"""Asynchronous operations that threads have started and not yet waited for: copies to LDS, and matrix products of warpgroups."""
from __future__ import annotations
from dataclasses import dataclass
from typing import Any
import numpy as np
from numpy.typing import NDArray
from attn.emulator.checks import Span
from attn.emulator.memory import Registers
from attn.emulator.shadow import LdsShadow
from attn.emulator.threads import Operand, Product, Threads

# The operations of kernels (attn/ops) use an object of the class `Lanes`, whose methods start a copy or product, close a group of copies (commit),
# or wait. The checks are as strict as the documents of the hardware allow. Before the thread that started an operation has waited for it, no thread
# may access the data that the operation writes, or write the data that it reads. The shadow of LDS and the register arrays store the index of the
# operation, so that an error can name it.

Array = NDArray[Any]

@dataclass
class Copy:
  """Asynchronous copy to LDS that threads have started, and for each thread the group of copies to which it belongs."""
  shadow: LdsShadow
  at: Array        # locations: (locations of a thread, threads)
  by: Array        # threads
  group: Array     # group of each thread
  span: Span

  def split(self, arrived:Array) -> tuple[Copy, Copy]:
    """Divides this copy in two: (the copies of threads where `arrived` is true, the copies of the other threads)."""
    return tuple(Copy(self.shadow, self.at[:, x], self.by[x], self.group[x], self.span) for x in (arrived, ~arrived))   # type: ignore[return-value]

@dataclass(eq=False)
class Running:
  """Asynchronous matrix product (wgmma) for which some threads have not yet waited, with its accumulators and operands."""
  product: Product
  accumulators: Registers
  operands: list[Operand]

class UnderWay:
  def __init__(self, f:Threads):
    self.f = f
    self.copies: list[Copy] = []
    self.products: list[Running] = []
    self.group = np.zeros(f.T, np.int32)            # for each thread, the group of its next copy

  # ***** copies *****

  def copy(self, shadow:LdsShadow, at:Array, by:Array, span:Span) -> None:
    shadow.send(at, by, self.f.start())
    shadow.arriving.append(span)
    self.copies.append(Copy(shadow, at, by, self.group[by], span))

  def commit(self) -> None: self.group = self.group + self.f.active

  def wait_copies(self, but:int) -> None:
    """Makes the active threads wait for their asynchronous copies, except for the copies in each thread's last `but` groups of copies."""
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
    """Makes the active threads wait for the asynchronous products that they have started, except each thread's last `but` products."""
    left, active, later = [], self.f.active, np.zeros(self.f.T, np.int32)     # later: number of products that a thread has started since
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
    for i, value in running.product.results.items(): running.accumulators.put(i, value, done)
    for x in running.operands: x.read_until_now(done)

  def _release(self, running:Running) -> None:
    """Frees the accumulators and operands of a matrix product, after all its threads have waited for it."""
    for i in running.product.results:
      if running.accumulators.coming.get(i) is running.product: del running.accumulators.coming[i]
    for x in running.operands: x.release(running.product)
