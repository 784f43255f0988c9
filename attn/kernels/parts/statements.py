"""What a kernel does besides computing values: statements in their order, and what is carried from one step to the next."""
from __future__ import annotations
from dataclasses import fields
from typing import Any, Self
from attn.tinygrad_compat import Ops, UOp, dtypes

class Carried:
  """A dataclass of what a kernel carries from one step to the next: values that have `after`."""
  def after(self, *deps:UOp) -> Self:
    self_: Any = self
    return type(self)(*[getattr(self, f.name).after(*deps) for f in fields(self_)])

def workgroup_barrier(after:UOp) -> UOp:
  """A workgroup barrier; tinygrad's own ones go by LOCAL stores that it sees."""
  return UOp(Ops.BARRIER, dtypes.void, (after,))
