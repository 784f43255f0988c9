"""Which stored values have to be made before the branch that stores them.

A store under a condition is a branch of its own, which the lanes that store take and the others do not. clang may move into that branch what makes
the value. But an operation in which lanes meet needs them all, and LLVM does not know that of each such instruction: of v_permlane16_swap_b32,
v_permlane32_swap_b32 and v_permlanex16_b32 from release 21 on, of matrix instructions not yet in 22. So a value that follows from one is taken by an
assembly text without an instruction in front of the branch (ops.renderers). Any other value, as a tile on its way from memory to LDS, may be made in
the branch: a wave that has nothing to store skips that. python -m attn.isa check looks for what this forgets.
"""
from __future__ import annotations
from collections.abc import Iterator
from attn.ops.operation import Call
from attn.tinygrad_compat import AddrSpace, Ops, UOp, new_uop

ACROSS_LANES = ("matrix", "pair", "share_halves", "together", "turned", "correct", "first_sum", "rounded_sum")    # operations in which lanes meet
FROM_MEMORY = ("buffer_load", "load_where", "load_column", "load_transposed")     # and those whose result follows from no other value

def _made_of(u:UOp) -> tuple[UOp, ...]:
  """Operands that a value follows from. A value that is loaded follows from the array, and of arrays only registers are ever looked at."""
  if u.op in (Ops.LOAD, Ops.INDEX, Ops.AFTER): return u.src[:1]
  return () if isinstance(u.arg, Call) and u.arg.name in FROM_MEMORY else u.src

def _written(u:UOp) -> Iterator[UOp]:
  """Registers that a store writes, or that an operation may write: any that it is given."""
  for s in u.src[:1] if u.op is Ops.STORE else u.src if isinstance(u.arg, Call) else ():
    if s.op is Ops.INDEX and s.addrspace is AddrSpace.REG: yield s.buf_uop

def from_all_lanes(uops:list[UOp]) -> set[UOp]:
  """The values of a program, and the registers, that follow from an operation across lanes."""
  found, before = set[UOp](), -1
  while len(found) > before:      # registers carry values from one trip of a loop to the next
    before = len(found)
    for u in uops:
      across = isinstance(u.arg, Call) and u.arg.name in ACROSS_LANES
      if across or not found.isdisjoint(_made_of(u)): found.update((u, *_written(u)))
  return found

def made_before_branches(uops:list[UOp]) -> dict[UOp, dict[UOp, None]]:
  """Stored values that have to be made before a branch, by its IF. Where branches follow one another the first has those of all: clang makes one
  branch of those under one condition, with nothing between them."""
  made, found, first = from_all_lanes(uops), dict[UOp, dict[UOp, None]](), new_uop(Ops.NOOP)
  for before, u, store in zip([first, *uops], uops, uops[1:]):
    if u.op is not Ops.IF: continue
    if before.op is not Ops.ENDIF: first = u
    if store.op is Ops.STORE and store.src[1] in made: found.setdefault(first, {})[store.src[1]] = None
  return found
