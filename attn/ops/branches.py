"""Finds values that must be computed before the branch that stores them, because all lanes must take part in computing them."""
from __future__ import annotations
from collections.abc import Iterator
from attn.ops.operation import Call
from attn.tinygrad_compat import AddrSpace, Ops, UOp, new_uop

# A store under a condition becomes a branch that only the storing lanes take. clang may move the computation of the value into that branch. But an
# operation across lanes needs all lanes, and LLVM does not know this for every instruction. For v_permlane16_swap_b32, v_permlane32_swap_b32 and
# v_permlanex16_b32 LLVM knows it from release 21 on; for matrix instructions, release 22 does not know it yet. So the renderer (ops.renderers)
# renders an empty assembly text before the branch. The assembly text reads every stored value that depends on such an operation, so clang must
# compute the value before the branch. Any other value, such as a tile on its way from memory to LDS, may be computed in the branch: a wave that has
# nothing to store then skips the computation. `python -m attn.isa check` finds operations that this analysis misses.

ACROSS_LANES = ("matrix", "pair", "share_halves", "together", "transposed_bits", "correct", "correct_scaled", "first_sum", "rounded_sum")
FROM_MEMORY = ("buffer_load", "load_where", "load_column", "load_transposed")     # operations whose result depends on memory only

def _made_of(u:UOp) -> tuple[UOp, ...]:
  # The operands on which the value of u depends. A loaded value depends on the array and not on the index; what an operation loads from memory
  # depends on no operand, because `from_all_lanes` follows values through register arrays only.
  if u.op in (Ops.LOAD, Ops.INDEX, Ops.AFTER): return u.src[:1]
  return () if isinstance(u.arg, Call) and u.arg.name in FROM_MEMORY else u.src

def _written(u:UOp) -> Iterator[UOp]:
  # The register arrays that u may write: a store writes its destination, an operation any array among its operands.
  for s in u.src[:1] if u.op is Ops.STORE else u.src if isinstance(u.arg, Call) else ():
    if s.op is Ops.INDEX and s.addrspace is AddrSpace.REG: yield s.buf_uop

def from_all_lanes(uops:list[UOp]) -> set[UOp]:
  """Returns the values and register arrays that depend on numbers from other lanes, e.g. on a lane exchange."""
  found, before = set[UOp](), -1
  while len(found) > before:      # registers carry values from one iteration of a loop to the next
    before = len(found)
    for u in uops:
      across = isinstance(u.arg, Call) and u.arg.name in ACROSS_LANES
      if across or not found.isdisjoint(_made_of(u)): found.update((u, *_written(u)))
  return found

def made_before_branches(uops:list[UOp]) -> dict[UOp, dict[UOp, None]]:
  """Returns {IF: values that are stored in the branch but must be computed before the branch}, because their computation needs all lanes."""
  made, found, first = from_all_lanes(uops), dict[UOp, dict[UOp, None]](), new_uop(Ops.NOOP)
  for before, u, store in zip([first, *uops], uops, uops[1:]):
    if u.op is not Ops.IF: continue
    # if branches follow one another directly, the first IF gets the values of all: clang merges neighbouring branches with the same condition
    if before.op is not Ops.ENDIF: first = u
    if store.op is Ops.STORE and store.src[1] in made: found.setdefault(first, {})[store.src[1]] = None
  return found
