"""Operations for NVIDIA that set scores to -inf where mask_mod hides a key. A branch skips mask_mod in tiles in which mask_mod hides nothing."""
from __future__ import annotations
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
import numpy as np
from attn.functions.symbols import depends, indices_of, is_element
from attn.ops.common import loaded_within
from attn.ops.language import instruction
from attn.ops.operation import Array, Body, statement
from attn.tinygrad_compat import Ops, UOp, dtypes

# As UOps the mask would be computed for every tile, because tinygrad has no branch. With these operations one loop over tiles suffices, where a
# kernel would need a loop with the mask and a loop without, and twice the code.
#
# A mask is divided (`PairCondition`). UOps compute before the loop what depends on the row alone, such as i//64 in i//64 == j//64. The operation
# computes the rest, for each column.

# ***** conditions *****

class PairValue(NamedTuple):
  """An operand of a mask: number n of the values that depend on the row alone ("row"), number n of the loaded values ("loaded"), or the column
  index."""
  of: str
  number: int = 0

PairExpression = Any     # a PairValue, an int, or a tuple of the name of a function in PAIR_FUNCTIONS and its operands, which are PairExpressions

class PairFunction(NamedTuple):
  """A function of int32 numbers and bools, such as a sum or a comparison, as CUDA text and in numpy."""
  text: str
  meaning: Callable[..., Array]

PAIR_FUNCTIONS = {
  "ADD": PairFunction("({} + {})", np.add), "MUL": PairFunction("({} * {})", np.multiply), "MAX": PairFunction("max({}, {})", np.maximum),
  "AND": PairFunction("({} & {})", np.bitwise_and), "OR": PairFunction("({} | {})", np.bitwise_or), "XOR": PairFunction("({} ^ {})", np.bitwise_xor),
  "CMPLT": PairFunction("({} < {})", np.less), "CMPNE": PairFunction("({} != {})", np.not_equal), "CMPEQ": PairFunction("({} == {})", np.equal),
  "WHERE": PairFunction("({} ? {} : {})", np.where), "CAST": PairFunction("(int){}", lambda x: x.astype(np.int32)),
  "SHR": PairFunction("({} >> {})", np.right_shift),
  # rounded down, by a positive constant; the second pair is for numbers that are never negative
  "FLOORDIV": PairFunction("[](int x) {{ return x / {1} - (x % {1} < 0); }}({0})", np.floor_divide),
  "FLOORMOD": PairFunction("[](int x) {{ return x % {1} + (x % {1} < 0 ? {1} : 0); }}({0})", np.mod),
  "QUOTIENT": PairFunction("(int)((unsigned){} / {})", np.floor_divide), "REMAINDER": PairFunction("(int)((unsigned){} % {})", np.mod)}
TAKE_CONDITIONS = ("AND", "OR", "XOR", "CMPLT", "CMPNE", "CMPEQ", "WHERE")     # the functions among them that may have conditions as operands

@dataclass(frozen=True)
class PairCondition:
  """A traced mask_mod, divided into expressions that depend on the row alone, loaded tensor elements, and an expression that combines them."""
  expression: PairExpression     # how the mask follows from the column, the numbers of the row and the loaded numbers
  rows: tuple[UOp, ...]          # expressions that depend on the row alone, or on neither row nor column
  loaded: tuple[UOp, ...]        # int32 elements of tensors, such that neighbouring columns load neighbouring elements

class NotInOperations(Exception):
  """Raised for an expression that the operations of this module do not have."""

def pair_condition(mask:UOp, column:UOp) -> PairCondition|None:
  """Divides a traced mask_mod into a `PairCondition`; `column` is the symbol for the column index. Returns None if no operation computes a part of
  the mask."""
  # The operations have int32 arithmetic, conditions, and elements of tensors that lie side by side.
  found: dict[str, dict[UOp, PairValue]] = {"row": {}, "loaded": {}}
  def rest(u:UOp, of:str) -> PairValue: return found[of].setdefault(u, PairValue(of, len(found[of])))
  def of(u:UOp) -> PairExpression:
    if u.op is Ops.CONST and u.dtype != dtypes.float: return int(u.val)
    if u.dtype not in (dtypes.int, dtypes.bool): raise NotInOperations
    if not depends(u, column): return rest(u, "row")
    if u is column: return PairValue("column")
    if is_element(u):
      *others, last = indices_of(u)
      if u.dtype != dtypes.int or last is not column or any(depends(x, column) for x in others): raise NotInOperations
      return rest(u, "loaded")
    name, conditions = u.op.name, any(x.dtype == dtypes.bool for x in u.src)
    if name in ("FLOORDIV", "FLOORMOD", "CDIV", "CMOD"): return quotient_or_remainder(u, of(u.src[0]))
    if name not in PAIR_FUNCTIONS or (conditions and name not in TAKE_CONDITIONS and name != "CAST"): raise NotInOperations
    return (name, *map(of, u.src))
  try: return PairCondition(of(mask), tuple(found["row"]), tuple(found["loaded"]))
  except NotInOperations: return None

def quotient_or_remainder(u:UOp, x:PairExpression) -> PairExpression:
  """Converts `u`, a quotient or a remainder, to a PairExpression; `x` is the dividend."""
  # only a quotient by a positive constant, rounded down
  by, of, is_quotient = u.src[1], u.src[0], u.op in (Ops.FLOORDIV, Ops.CDIV)
  if by.op is not Ops.CONST or (n := int(by.val)) <= 0 or (of.vmin < 0 and u.op in (Ops.CDIV, Ops.CMOD)): raise NotInOperations
  if not n & (n - 1): return ("SHR", x, n.bit_length() - 1) if is_quotient else ("AND", x, n - 1)
  if of.vmin < 0: return (u.op.name, x, n)
  return ("QUOTIENT" if is_quotient else "REMAINDER", x, n)

def pair_expression_text(x:PairExpression) -> str:
  if isinstance(x, PairValue): return x.of if x.of == "column" else f"{x.of}_{x.number}"
  return str(x) if isinstance(x, int) else PAIR_FUNCTIONS[x[0]].text.format(*map(pair_expression_text, x[1:]))

def pair_expression_value(x:PairExpression, values:dict[PairValue, Array]) -> Any:
  if isinstance(x, PairValue): return values[x]
  return np.int32(x) if isinstance(x, int) else PAIR_FUNCTIONS[x[0]].meaning(*(pair_expression_value(y, values) for y in x[1:]))

# ***** operands *****

@dataclass(frozen=True)
class PairOperands:
  """Operands of an operation that needs to know which rows and columns a lane's scores have: two rows, and some columns of each."""
  condition: PairCondition                 # which pairs are visible
  column: UOp                              # the column symbol's value at the lane's first column
  rows: tuple[list[UOp], list[UOp]]        # for each row the values of `PairCondition.rows`
  limits: tuple[list[UOp], list[UOp]]      # for each row the columns that `limited` names, counted from the lane's first column
  limited: tuple[str, ...]                 # "first" and "last", the row's first and last visible column, if they hide something
  loaded: list[UOp]                        # loads of the elements of `PairCondition.loaded` at the lane's first column, by `ops.buffer_load`
  distances: tuple[int, ...]               # how many columns after the first one each of the lane's columns lies
  @property
  def operands(self) -> list[UOp]:
    each = [x for row, limits in zip(self.rows, self.limits) for x in (*row, *limits)]
    return [self.column, *each, *[x for load in self.loaded for x in load.src[:3]]]
  @property
  def static(self) -> dict[str, Any]:
    counts = len(self.condition.rows), len(self.condition.loaded)
    return {"condition": self.condition.expression, "counts": counts, "limited": self.limited, "distances": self.distances}

TWO_ROWS = ("low", "high")

def in_fragments(distances:tuple[int, ...], pair:Callable[[int, int], Any]) -> list[list[Any]]:
  """Returns a list for each C fragment of a lane, with `pair(row, distance)` for each element: `distance` counts from the lane's first column."""
  # a fragment has two columns of each of the two rows
  return [[pair(row, n) for row in range(len(TWO_ROWS)) for n in columns] for columns in zip(distances[::2], distances[1::2])]

def seen_pairs(lanes:Any, operands:Sequence[Any], condition:PairExpression, counts:tuple[int, int], limited:tuple[str, ...],
               distances:tuple[int, ...]) -> list[list[Array]]:
  """Returns for each element of a lane's C fragments whether the query sees the key, in one list for each fragment."""
  # `operands` are the values of `PairOperands.operands`, the other parameters `PairOperands.static`
  take = iter(operands)
  column, (of_row, loads) = next(take), counts
  rows = [([next(take) for _ in range(of_row)], {name: next(take) for name in limited}) for _ in TWO_ROWS]
  loaded = [[next(take) for _ in range(3)] for _ in range(loads)]
  def pair(row:int, n:int) -> Array:
    numbers, limits = rows[row]
    elements = [loaded_within(lanes, base, records, offset + 4*n, 4).view(np.int32) for base, records, offset in loaded]
    values = {PairValue("column"): column + np.int32(n)}
    for of, xs in (("row", numbers), ("loaded", elements)): values |= {PairValue(of, i): x for i, x in enumerate(xs)}
    seen = pair_expression_value(condition, values).astype(bool) & (n <= limits.get("last", n)) & (n >= limits.get("first", n))
    return np.broadcast_to(seen, lanes.active.shape)
  return in_fragments(distances, pair)

@dataclass(frozen=True)
class PairText:
  """CUDA text that is common to the operations on pairs."""
  parameters: str           # names of the parameters that get `PairOperands.operands`
  statements: list[str]     # the statements before the first condition
  seen: list[list[str]]     # the condition of each pair, in the form of `in_fragments`

def pair_text(condition:PairExpression, counts:tuple[int, int], limited:tuple[str, ...], distances:tuple[int, ...]) -> PairText:
  of_row, loads = range(counts[0]), range(counts[1])
  def own(row:str) -> list[str]: return [f"{row}_{i}" for i in of_row]
  parameters = [x for row in TWO_ROWS for x in (*own(row), *(f"{name}_of_{row}" for name in limited))]
  parameters += [f"{name}_{i}" for i in loads for name in ("base", "records", "offset")]
  arguments = ", ".join(["int column", *(f"int row_{i}" for i in of_row), *(f"int loaded_{i}" for i in loads)])
  lines = [f"auto seen = []({arguments}) {{ return (bool){pair_expression_text(condition)}; }};"]
  lines += [f"int of_{i}_{n} = offset_{i} + {4*n + 4}u > (unsigned)records_{i} ? 0 : *(const int*)((const char*)base_{i} + offset_{i} + {4*n}u);"
            for n in distances for i in loads]
  def pair(row:int, n:int) -> str:
    limits = [f"({n} {'<=' if name == 'last' else '>='} {name}_of_{TWO_ROWS[row]})" for name in limited]
    given = ", ".join([f"column + {n}", *own(TWO_ROWS[row]), *(f"of_{i}_{n}" for i in loads)])
    return " & ".join([*limits, f"seen({given})"])
  return PairText(" ".join(["column", *parameters]), lines, in_fragments(distances, pair))

# ***** operations *****

def _keep_seen(lanes:Any, acc:Any, gate:Array, *operands:Any, **static:Any) -> Array:
  for i, seen in enumerate(seen_pairs(lanes, operands, **static)):
    lanes.store_register(acc, i, np.where(np.stack(seen), lanes.load_register(acc, i), np.float32(-np.inf)), lanes.active & gate)
  return np.zeros(len(lanes.active), np.float32)

def _keep_seen_text(printer:Any, out:str, **static:Any) -> Body:
  text = pair_text(**static)
  lines = ["if (!gate) return 0.0f;", *text.statements]
  for i, seen in enumerate(text.seen):
    lines.append(f"acc[{i}] = make_float4({', '.join(f'{x} ? acc[{i}].{e} : -INFINITY' for e, x in zip('xyzw', seen))});")
  return Body("\n".join([*lines, "return 0.0f;"]), f"acc gate {text.parameters}", name=f"keep_seen_{len(text.seen)}")

instruction("keep_seen", _keep_seen, cuda=_keep_seen_text)

def keep_seen(acc:UOp, gate:UOp, pairs:PairOperands, after:UOp) -> UOp:
  """Returns a statement that sets the scores of hidden pairs in the C fragments `acc` to -inf, where `gate` is true."""
  return statement("keep_seen", acc[0], gate, *pairs.operands, after, **pairs.static)
