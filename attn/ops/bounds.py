"""Integers between two bounds, which clang would compute in vector registers.

clang makes one vector instruction of min(max(x, 0), n) where it knows 0 and n (v_med3_i32), also where x is the same in all lanes: there is no scalar
one. What follows from the result then lies in vector registers as well, the addresses and sizes of loads among it, and each load takes those lane by
lane, in a loop. Of a bound that clang does not know it makes a scalar maximum or minimum. It is the bound that comes second which must not be known:
where clang knows x, as in a loop of one trip, it has the first one in no instruction, and has two known ones again if the first one was hidden.
"""
from __future__ import annotations
from attn.ops.operation import Call
from attn.tinygrad_compat import Ops, UOp, dtypes

def _hidden(name:str, sign:str) -> str:
  return f"""static inline __attribute__((device, always_inline)) int {name}(int x, int bound) {{
  asm("" : "+s"(bound));
  return x {sign} bound ? bound : x;
}}"""

HELD = {name: _hidden(name, sign) for name, sign in (("not_below", "<"), ("not_above", ">"))}     # the functions that hide a bound
UNIFORM = ("uniform", "opaque_uniform")                # operations whose result all lanes have, whatever they are given
OF_LANES = (Ops.LOAD, Ops.CUSTOM, Ops.CUSTOMI)         # of which each lane may have another result, though all are given the same

def uniform_numbers(uops:list[UOp]) -> set[UOp]:
  """The numbers that are the same in all threads of a workgroup, as far as that follows from what they are made of."""
  found = set[UOp]()
  for u in uops:
    if u.op is Ops.SPECIAL: same = u.arg.startswith("g")
    elif u.op in OF_LANES: same = isinstance(u.arg, Call) and u.arg.name in UNIFORM
    else: same = all(x in found for x in u.src[:1 if u.op is Ops.RANGE else None])      # a range's other sources only come before it
    if same: found.add(u)
  return found

def is_constant(u:UOp) -> bool: return u.op is Ops.CAST and u.src[0].op is Ops.CONST

def is_maximum(u:UOp) -> bool:
  """Whether u is max(x, n) of an integer and a constant, as tinygrad hands it to renderers: x < n ? n : x. A minimum is ~max(~x, ~n)."""
  if u.op is not Ops.WHERE or u.dtype != dtypes.int or u.src[0].op is not Ops.CMPLT or not is_constant(u.src[1]): return False
  return u.src[0].src[0] is u.src[2] and u.src[0].src[1] is u.src[1]

def is_minimum(u:UOp) -> bool:
  """Whether u, which is of a maximum's form, is of ~x, a minimum of x. Where x is of a minimum itself, one ~ undoes the other."""
  y = u.src[2]
  return y.op is Ops.XOR and not (is_maximum(y.src[0]) and is_minimum(y.src[0]))

def second_bounds(uops:list[UOp]) -> set[UOp]:
  """The second bounds of uniform numbers that have two: of each the node that is of a maximum's form."""
  found, uniform = set[UOp](), uniform_numbers(uops)
  for outer in filter(is_maximum, uops):
    inner = outer.src[2]
    while inner.op in (Ops.ADD, Ops.MUL, Ops.XOR) and is_constant(inner.src[1]): inner = inner.src[0]
    if is_maximum(inner) and inner in uniform: found.add(outer)
  return found
