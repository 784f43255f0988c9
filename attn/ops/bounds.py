"""Finds integers, equal in all lanes, that are clamped between two bounds, so that renderers can keep clang from using vector registers."""
from __future__ import annotations
from attn.ops.operation import Call
from attn.tinygrad_compat import Ops, UOp, dtypes

# If clang knows the bounds 0 and n, it compiles min(max(x, 0), n) to one vector instruction, v_med3_i32, even if x is equal in all lanes. A scalar
# med3 does not exist. Every number computed from the result then lies in a vector register too. A load that needs such a number as its address or
# size reads the vector register lane by lane, in a loop. If clang does not know the outer bound n, it compiles a scalar maximum and a scalar
# minimum. So attn hides the outer bound from clang. Hiding the inner bound 0 instead would fail if clang knows x, as in a loop of one iteration:
# clang would compile v_med3_i32 from the hidden number and the two numbers that it knows, x and n. If clang knows both x and 0, max(x, 0) is a
# constant and costs no instruction.

def _hidden(name:str, sign:str) -> str:
  return f"""static inline __attribute__((device, always_inline)) int {name}(int x, int bound) {{
  asm("" : "+s"(bound));
  return x {sign} bound ? bound : x;
}}"""

HELD = {name: _hidden(name, sign) for name, sign in (("not_below", "<"), ("not_above", ">"))}     # functions that hide a bound from clang
UNIFORM = ("uniform", "opaque_uniform", "ticket", "ticket_of_all")      # operations whose result is equal in all lanes for any operands
OF_LANES = (Ops.LOAD, Ops.CUSTOM, Ops.CUSTOMI)         # UOps whose result may differ between lanes even if the operands are equal

def uniform_numbers(uops:list[UOp]) -> set[UOp]:
  """Returns the UOps that are known to have the same value in all threads of a workgroup."""
  found = set[UOp]()
  for u in uops:
    if u.op is Ops.SPECIAL: same = u.arg.startswith("g")
    elif u.op in OF_LANES: same = isinstance(u.arg, Call) and u.arg.name in UNIFORM
    else: same = all(x in found for x in u.src[:1 if u.op is Ops.RANGE else None])      # the other sources of a RANGE only order it
    if same: found.add(u)
  return found

def is_constant(u:UOp) -> bool: return u.op is Ops.CAST and u.src[0].op is Ops.CONST

def is_maximum(u:UOp) -> bool:
  """Tells whether u is max(x, n) of an integer x and a constant n, which the renderer receives as the UOp x < n ? n : x."""
  if u.op is not Ops.WHERE or u.dtype != dtypes.int or u.src[0].op is not Ops.CMPLT or not is_constant(u.src[1]): return False
  return u.src[0].src[0] is u.src[2] and u.src[0].src[1] is u.src[1]

def is_minimum(u:UOp) -> bool:
  """Returns whether u, max(y, c), belongs to a minimum: the renderer receives min(x, n) as ~max(~x, ~n)."""
  y = u.src[2]
  # y = ~x shows a minimum, unless this ~ belongs to another minimum: in max(min(x, a), n) y is min(x, a), which begins with ~. In a minimum of a
  # minimum two ~ cancel, and the answer is False, too.
  return y.op is Ops.XOR and not (is_maximum(y.src[0]) and is_minimum(y.src[0]))

def second_bounds(uops:list[UOp]) -> set[UOp]:
  """Returns the maxima and minima that clamp a number again, e.g. the outer one in max(min(i, 7), 0), if the number is equal in all threads."""
  found, uniform = set[UOp](), uniform_numbers(uops)
  for outer in filter(is_maximum, uops):
    inner = outer.src[2]
    while inner.op in (Ops.ADD, Ops.MUL, Ops.XOR) and is_constant(inner.src[1]): inner = inner.src[0]
    # a minimum is written as ~max(~x, ~n), so it is found as a maximum
    if is_maximum(inner) and inner in uniform: found.add(outer)
  return found
