"""Finds uniform integers that are clamped between two bounds. Without help clang would compute them in vector registers.

If clang knows 0 and n, it makes one vector instruction of min(max(x, 0), n), v_med3_i32, even if x is equal in all lanes; a scalar med3 does not
exist. Every number computed from the result then lies in a vector register too. If the address or the size of a load is such a number, the load reads
it lane by lane, in a loop. If clang does not know a bound, it makes a scalar maximum or minimum. attn hides the second bound. If clang knows x, as in
a loop of one iteration, applying the first bound takes no instruction. If the first bound were hidden instead, clang would know x and the second
bound, which are then two known bounds of the hidden number.
"""
from __future__ import annotations
from attn.ops.operation import Call
from attn.tinygrad_compat import Ops, UOp, dtypes

def _hidden(name:str, sign:str) -> str:
  return f"""static inline __attribute__((device, always_inline)) int {name}(int x, int bound) {{
  asm("" : "+s"(bound));
  return x {sign} bound ? bound : x;
}}"""

HELD = {name: _hidden(name, sign) for name, sign in (("not_below", "<"), ("not_above", ">"))}     # functions that hide a bound from clang
UNIFORM = ("uniform", "opaque_uniform", "ticket", "ticket_of_all")      # operations whose result is equal in all lanes for any operands
OF_LANES = (Ops.LOAD, Ops.CUSTOM, Ops.CUSTOMI)         # UOps whose result may differ between lanes even if the operands are equal

def uniform_numbers(uops:list[UOp]) -> set[UOp]:
  """Returns the numbers that are equal in all threads of a workgroup, as far as their operands show it."""
  found = set[UOp]()
  for u in uops:
    if u.op is Ops.SPECIAL: same = u.arg.startswith("g")
    elif u.op in OF_LANES: same = isinstance(u.arg, Call) and u.arg.name in UNIFORM
    else: same = all(x in found for x in u.src[:1 if u.op is Ops.RANGE else None])      # the other sources of a RANGE only order it
    if same: found.add(u)
  return found

def is_constant(u:UOp) -> bool: return u.op is Ops.CAST and u.src[0].op is Ops.CONST

def is_maximum(u:UOp) -> bool:
  """Tells whether u is max(x, n) of an integer and a constant, in the form that renderers get: x < n ? n : x. A minimum has the form ~max(~x, ~n)."""
  if u.op is not Ops.WHERE or u.dtype != dtypes.int or u.src[0].op is not Ops.CMPLT or not is_constant(u.src[1]): return False
  return u.src[0].src[0] is u.src[2] and u.src[0].src[1] is u.src[1]

def is_minimum(u:UOp) -> bool:
  """Tells whether u, which has the form of a maximum, computes a minimum: the minimum of x is written as ~max(~x, ...). If x is itself such a
  minimum, the two ~ cancel, and the answer is False."""
  y = u.src[2]
  return y.op is Ops.XOR and not (is_maximum(y.src[0]) and is_minimum(y.src[0]))

def second_bounds(uops:list[UOp]) -> set[UOp]:
  """Returns the UOps that clamp a uniform number by the second of two bounds. Each such UOp is a maximum (a minimum is written as ~max(~x, ~n))."""
  found, uniform = set[UOp](), uniform_numbers(uops)
  for outer in filter(is_maximum, uops):
    inner = outer.src[2]
    while inner.op in (Ops.ADD, Ops.MUL, Ops.XOR) and is_constant(inner.src[1]): inner = inner.src[0]
    if is_maximum(inner) and inner in uniform: found.add(outer)
  return found
