"""Traces a caller's score_mod or mask_mod: calls the Python function on UOps in place of numbers, and checks that a kernel can compute the UOp that
the function returns. Begin with `trace`."""
from __future__ import annotations
import inspect, math, sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any
from attn import values
from attn.functions.bounds import NO_BOUNDS, mask_bounds
from attn.functions.symbols import BATCH, QUERY_HEAD, KEY, QUERY, SCORE, SYMBOLS, is_element, tensor_symbol
from attn.tinygrad_compat import DType, GroupOp, Ops, UOp, committed, dtypes, equality_as_uops, flat_element

MOST_TENSORS = 8      # most tensors in mod_tensors

@dataclass(frozen=True)
class Traced:
  """A traced score_mod or mask_mod: the UOp that the function returned; functions that compute the same are equal."""
  value: UOp  # what the function returned for the UOps in attn/functions/symbols.py
  told: str = field(default="", compare=False)  # the function's name, file and line, for error messages
  @cached_property
  def huge(self) -> bool:
    """Whether a score_mod may return finite numbers that are too large for fp32 once they are multiplied by log2(e)."""
    # An example is the lowest number of fp32, which callers use as a mask.
    return may_be_huge(self.value)
  def __repr__(self) -> str: return self.told

@dataclass(frozen=True)
class FunctionForm:
  """Form that a caller's score_mod or mask_mod must have: the function's arguments, and the dtype of its result."""
  name: str                    # "score_mod" or "mask_mod"
  symbols: tuple[UOp, ...]     # symbols of its first arguments; the tensors follow
  parameters: str
  returns: DType
  @property
  def form(self) -> str: return f"{self.name}({self.parameters}, *tensors) -> {values.dtype_text(self.returns)}"

SCORE_FUNCTION = FunctionForm("score_mod", SYMBOLS, "score, b, h, i, j", dtypes.float)
MASK_FUNCTION = FunctionForm("mask_mod", (BATCH, QUERY_HEAD, QUERY, KEY), "b, h, i, j", dtypes.bool)

TensorKind = tuple[tuple[int, ...], str]     # shape and name of the dtype of a tensor in mod_tensors
TensorKinds = tuple[TensorKind, ...]

def described(function:Callable[..., Any]) -> str:
  """Returns a function's name, file and first line, for error messages."""
  code = getattr(inspect.unwrap(function), "__code__", None)
  return values.shown(function) if code is None else f"{function.__name__} ({code.co_filename}:{code.co_firstlineno})"

def trace(signature:FunctionForm, function:Any, tensors:TensorKinds) -> Traced|None:
  """Returns the UOp of the result of a caller's function, or None if the function changes nothing."""
  # A score_mod changes nothing if it returns the score, a mask_mod if it returns True. Raises ValueError if the function does not take the arguments
  # that `signature` names, returns something other than a scalar UOp of the right dtype, or returns different UOps in two calls. Raises
  # NotImplementedError, with the name of the operation, for a UOp that a kernel cannot compute.
  if not callable(function): raise values.wrong(signature.name, function, f"a function {signature.form}")
  key = identity(function)
  # If a function with the same code and the same values in its closure was traced before, the function is not called, and the result comes from a
  # cache.
  found = call_twice(signature, function, tensors) if key is None else traced_or_cached(key, signature, Held(function), tensors)
  return None if found.value in (SCORE, UOp.const(True, dtypes.bool)) else found

@dataclass(frozen=True)
class Held:
  """Holds score_mod or mask_mod for an argument that `lru_cache` ignores: all objects of this class are equal."""
  function: Callable[..., Any] = field(compare=False)

@lru_cache(256)
def traced_or_cached(key:Hashable, signature:FunctionForm, held:Held, tensors:TensorKinds) -> Traced:
  """Traces the function in `held`, or returns the earlier result of a function with an equal `key` (see `identity`)."""
  return call_twice(signature, held.function, tensors)

def call_twice(signature:FunctionForm, function:Callable[..., Any], tensors:TensorKinds) -> Traced:
  arguments = (*signature.symbols, *(tensor_argument(n, *kind) for n, kind in enumerate(tensors)))
  found, again = (checked(signature, function, arguments, called(signature, function, arguments)) for _ in range(2))
  if found is not again:
    raise ValueError(f"{signature.name}={described(function)} returned another expression when it was called a second time: it must compute the same "
                     "each time, and read changing numbers from mod_tensors")
  return Traced(found, described(function))

def tensor_argument(number:int, shape:tuple[int, ...], dtype:str) -> UOp:
  """Returns the UOp that a caller's function gets for the tensor mod_tensors[number]: the tensor, or its only element if it has no axes."""
  return tensor_symbol(number, shape, dtype) if shape else tensor_symbol(number, (1,), dtype)[0]

def called(signature:FunctionForm, function:Callable[..., Any], arguments:tuple[UOp, ...]) -> Any:
  """Calls a caller's function on UOps, or raises ValueError if the function does not take them or raises an error."""
  try: inspect.signature(function).bind(*arguments)
  except (TypeError, ValueError) as e:
    raise ValueError(f"{signature.name}={described(function)} cannot be called with {len(arguments)} arguments, {signature.parameters} and "
                     f"{len(arguments) - len(signature.symbols)} of mod_tensors: {e}; it must be {signature.form}") from None
  try:
    with equality_as_uops(): return function(*arguments)
  except Exception as e:
    raise ValueError(f"{signature.name}={described(function)} raised {type(e).__name__}: {e}. It is called with UOps for numbers: use & | ~ and "
                     ".where() in place of and, or, not, if and chained comparisons, Python numbers in place of numpy's, and tensors only from "
                     "mod_tensors") from e

ALLOWED = GroupOp.ALU - {Ops.THREEFRY} | {Ops.CAST, Ops.BITCAST, Ops.CONST, Ops.INDEX}
NO_ARGUMENT = "a tensor or a variable that is not one of its arguments (give tensors as mod_tensors)"
REASONS = {Ops.BUFFER: NO_ARGUMENT, Ops.PARAM: NO_ARGUMENT, Ops.RANGE: "a loop", Ops.REDUCE: "a sum or maximum over an axis",
           Ops.STORE: "a store", Ops.PAD: "a padded tensor"}

def checked(signature:FunctionForm, function:Callable[..., Any], arguments:tuple[UOp, ...], x:Any) -> UOp:
  """Returns the result `x` of a caller's function without LOADs, after checks that a kernel can compute `x`."""
  what = f"{signature.name}={described(function)}"
  if not isinstance(x, UOp): raise ValueError(f"{what} returned {values.shown(x)}: must return a scalar UOp, {signature.form}")
  if x.op is Ops.CONST and signature.returns == dtypes.float and x.dtype == dtypes.weakfloat: x = UOp.const(x.val, dtypes.float)
  try: parts = [*x.toposort()]
  except AttributeError: raise ValueError(f"{what} computes with an operand that is no UOp, such as an index of a tensor that is a float") from None
  if x._shape != (): raise ValueError(f"{what} returned a UOp of shape {values.shown_shape(x._shape or ())}: must be a scalar, {signature.form}; "
                                      "index every axis of a tensor")
  if x.dtype != signature.returns:
    raise ValueError(f"{what} returned a UOp of dtype {values.dtype_text(x.dtype)}: must be {values.dtype_text(signature.returns)}, {signature.form}")
  given = {u for argument in arguments for u in argument.toposort()}
  made = dict[UOp, UOp]()
  for u in parts:
    if u.op in REASONS and u not in given: raise unable(what, REASONS[u.op])
    if u.dtype in dtypes.fp8s: raise unable(what, f"the dtype {u.dtype.name}, which not every chip has")
    if u._shape != () or u.op is Ops.STACK: continue     # tensors, and their shapes
    if u in signature.symbols: made[u] = u
    # A tensor's element becomes tinygrad's UOp INDEX, without a LOAD (a read from memory) around it.
    elif u.op is Ops.LOAD and u.src[0] in made: made[u] = made[u.src[0]]
    elif u.op is Ops.INDEX: made[u] = element(what, u, made)
    elif u.op in ALLOWED: made[u] = u.replace(src=tuple(made[s] for s in u.src)) if u.src else u
    else: raise unable(what, f"the operation {u.op.name}")
  return plainer(committed(made[x]))

def unable(what:str, uses:str) -> NotImplementedError:
  return NotImplementedError(f"{what} uses {uses}: a function is computed for each score by itself, from scalars and elements of mod_tensors")

def plainer(value:UOp) -> UOp:
  """Rewrites each absolute value in an expression, which tinygrad writes as x times its sign, as max(x, -x)."""
  # tinygrad writes x times the sign of x. If an absolute value of an int is cast to fp32, x is cast first: on fp32 numbers a GPU computes max(x, -x)
  # in one instruction.
  made = dict[UOp, UOp]()
  for u in value.toposort():
    new = u.replace(src=tuple(made[s] for s in u.src)) if u.src else u
    if is_absolute(new): new = greater_of_signs(new.src[0])
    elif new.op is Ops.CAST and new.dtype == dtypes.float and (x := new.src[0]).op is Ops.MAX and x is greater_of_signs(x.src[0]):
      new = greater_of_signs(x.src[0].cast(new.dtype))
    made[u] = new
  return made[value]

def is_absolute(u:UOp) -> bool:
  """Returns whether a UOp is x times the sign of x, as UOp.abs writes the absolute value."""
  return u.op is Ops.MUL and u.src[1] in (u.src[0].sign(), committed(u.src[0].sign()))

def greater_of_signs(x:UOp) -> UOp: return committed(x.maximum(-x))

def element(what:str, u:UOp, rewritten:dict[UOp, UOp]) -> UOp:
  """Rewrites `u`, an element of a tensor or of a view of one, as an element of the tensor itself with an int32 index for each axis."""
  # If a view was first permuted or sliced, and then reshaped, the result has one index into the flattened tensor. `rewritten` maps UOps of the
  # caller's function to their new forms. `what` names the function in error messages.
  u = unmoved(u)
  plain = u.src[0].op is Ops.PARAM or (u.src[0].op is Ops.RESHAPE and u.src[0].src[0].op is Ops.PARAM)
  if not plain or len(u.src) - 1 != len(u.src[0].shape):
    if (found := flat_element(u)) is None:
      raise NotImplementedError(f"{what} reads an element of {values.shown(u.src[0])}, which is no tensor of mod_tensors: read the element first, "
                                "then compute with it")
    u = found
  tensor, indices = u.src[0], []
  for axis, (index, size) in enumerate(zip(u.src[1:], tensor.shape)):
    if not dtypes.is_int(index.dtype) and index.dtype != dtypes.weakint:
      raise ValueError(f"{what} indexes axis {axis} of a tensor by a UOp of dtype {values.dtype_text(index.dtype)}: must be an int")
    index = without_loads(index, rewritten)
    if index.vmax < 0 or index.vmin >= size:
      raise ValueError(f"{what} reads index {index.vmin if index.vmin == index.vmax else values.shown(index)} of axis {axis} of a tensor of shape "
                       f"{values.shown_shape(tensor.shape)}: must lie in 0..{size - 1}")
    indices.append(index.cast(dtypes.int))
  return tensor.index(*indices)

def unmoved(u:UOp) -> UOp:
  """Rewrites an element of a view of a tensor as an element of the tensor itself."""
  # The view may be indexed in steps (t[x][y]), permuted, sliced, flipped or expanded.
  while True:
    x, indices = u.src[0], u.src[1:]
    if x.op is not Ops.INDEX and len(indices) != len(x.shape): return u
    match x.op:
      case Ops.INDEX: indices = (*x.src[1:], *indices)     # t[x][y] is t[x, y]
      case Ops.PERMUTE: indices = tuple(indices[x.marg.index(axis)] for axis in range(len(indices)))
      case Ops.SHRINK: indices = tuple(index + first for index, (first, _) in zip(indices, x.marg))
      case Ops.FLIP: indices = tuple(size - 1 - index if flipped else index for index, size, flipped in zip(indices, x.shape, x.marg))
      case Ops.EXPAND: indices = indices[len(indices) - len(x.src[0].shape):]     # new axes come first
      case _: return u
    u = x.src[0].index(*indices)

def without_loads(u:UOp, rewritten:dict[UOp, UOp]) -> UOp:
  """Removes LOADs (reads from memory) from an index of a tensor, which may be computed from elements of tensors."""
  # `rewritten` maps UOps of the caller's function to their new forms, as far as they are rewritten already.
  return u.substitute({old: new for old, new in rewritten.items() if old is not new}) if u not in rewritten else rewritten[u]

# ***** recognising a function *****

SIMPLE = (int, float, str, bytes, bool, type(None), DType, type(dtypes))
BY_NAME = frozenset(("__dict__", "__import__", "eval", "exec", "getattr", "globals", "import_module", "vars"))     # these read what a text names

def identity(function:Any) -> Hashable|None:
  """Returns a key for a Python function: two functions with equal keys compute the same. None if something that the function reads may change
  unnoticed."""
  # The key is made of the function's code, and of the values that the code reads from closures, defaults, globals and modules. An object, a class or
  # a list may change unnoticed.
  try: return of_value(function, (), ())
  except TypeError: return None

Names = tuple[str, ...]
Holders = tuple[tuple[Any, Names], ...]     # functions and modules whose keys are being made, the outermost first, with the names that are read

def of_value(x:Any, names:Names, within:Holders) -> Hashable:
  """Returns a hashable key that identifies a value which a function's code reads, or raises TypeError if the value may change unnoticed."""
  # `names` are the names of globals and attributes in the code. `within` are the functions and modules through which x was reached, the outermost
  # first. If x is one of them, as in a recursive function, its key is its index in `within`.
  if type(x) in SIMPLE: return type(x), repr(x) if isinstance(x, float) else x     # 1, 1.0 and True are equal, and -0.0 and 0.0
  if type(x) is tuple: return tuple(of_value(y, names, within) for y in x)     # a named tuple with other names may be equal
  if isinstance(x, UOp): return x
  if isinstance(x, FunctionType): names = ()     # its code has names of its own
  for depth, (holder, read) in enumerate(within):
    if x is holder and names == read: return "holder", depth     # a function that calls itself, a module that imports itself
  within = (*within, (x, names))
  if isinstance(x, ModuleType):
    of_tinygrad = x.__name__.split(".")[0] == "tinygrad"
    return x, () if of_tinygrad else tuple((name, of_value(getattr(x, name), names, within)) for name in names if hasattr(x, name))
  if isinstance(x, type) and x.__module__.split(".")[0] == "tinygrad": return x
  if isinstance(x, BuiltinFunctionType) and isinstance(x.__self__, ModuleType): return x
  if isinstance(x, partial): return partial, of_value((x.func, x.args, *x.keywords.items()), names, within)
  if isinstance(x, FunctionType): return of_function(x, within)
  raise TypeError(f"{type(x)} may change unnoticed")

def of_function(function:FunctionType, within:Holders) -> Hashable:
  names = names_in(function.__code__)
  if used := BY_NAME.intersection(names): raise TypeError(f"{used} may read anything")
  closure = tuple(of_value(cell.cell_contents, names, within) if is_filled(cell) else None for cell in function.__closure__ or ())
  places = function.__globals__, sys.modules     # code may import modules
  others = tuple((name, of_value(place[name], names, within)) for name in names for place in places if name in place)
  kept = of_value((function.__defaults__, *(function.__kwdefaults__ or {}).items(), *vars(function).items()), names, within)
  return function.__code__, closure, kept, others

def is_filled(cell:Any) -> bool:
  """Returns whether a variable of a closure, given as Python's cell, has a value yet."""
  try: return cell.cell_contents is not cell
  except ValueError: return False

def names_in(code:CodeType) -> Names:
  """Returns the names of globals and attributes that a function, and functions defined inside it, may use."""
  inner = [x for x in code.co_consts if isinstance(x, CodeType)]
  return tuple(sorted({*code.co_names, *(name for x in inner for name in names_in(x))}))

# ***** how large a function's numbers may be *****

MODERATE = 2.0**64     # constants up to this cannot make a score too large for fp32 in base 2

def may_be_huge(value:UOp) -> bool:
  """Returns whether a score_mod may return finite numbers that overflow fp32 once they are multiplied by log2(e)."""
  # An example is the lowest fp32 number, which callers use as a mask. Elements of float32 and bfloat16 tensors count as that large if the function
  # adds them to a score, or returns them in place of one. A factor of a score is assumed to be moderate.
  parts = [u for u in value.toposort() if dtypes.is_float(u.dtype)]
  bounded = {x for u in parts if is_sigmoid(u) for x in (u, *u.src, *u.src[0].src)}
  chosen, seen = [value], set[UOp]()
  while chosen:
    if (u := chosen.pop()) in seen: continue
    seen.add(u)
    if is_element(u) and u.dtype in (dtypes.float, dtypes.bfloat16): return True
    if u.op in (Ops.ADD, Ops.MAX, Ops.CAST) or (u.op is Ops.MUL and any(s.op is Ops.CONST for s in u.src)): chosen += u.src
    if u.op is Ops.WHERE: chosen += u.src[1:]
  return any(is_large(u) for u in parts if u not in bounded)

def is_large(u:UOp) -> bool:
  """Returns whether a UOp is a very large constant, or an operation that may turn moderate numbers into very large ones."""
  if u.op is Ops.CONST: return MODERATE < abs(u.val) < math.inf
  return u.op in (Ops.RECIPROCAL, Ops.EXP2, Ops.POW, Ops.BITCAST)

def is_sigmoid(u:UOp) -> bool:
  """Returns whether a UOp is 1/(1 + exp2(x)), which lies in 0..1."""
  if u.op is not Ops.RECIPROCAL or u.src[0].op is not Ops.ADD: return False
  one, power = sorted(u.src[0].src, key=lambda x: x.op is Ops.EXP2)
  return one.op is Ops.CONST and one.val == 1 and power.op is Ops.EXP2

# ***** the functions of a call *****

def functions_of(score_mod:Any, mask_mod:Any, tensors:TensorKinds) -> dict[str, Any]:
  """Traces the score_mod and the mask_mod of a call, and returns the fields score_mod, mask_mod and mask_bounds of its Problem."""
  if tensors and score_mod is None and mask_mod is None: raise ValueError(f"mod_tensors has {len(tensors)} tensors: they need score_mod or mask_mod")
  for n, (shape, _) in enumerate(tensors):
    if 0 in shape: raise ValueError(f"mod_tensors[{n}] has shape {values.shown_shape(shape)}: must have at least one element")
  if len(tensors) > MOST_TENSORS: raise NotImplementedError(f"mod_tensors has {len(tensors)} tensors: at most {MOST_TENSORS} are supported")
  # A function that changes nothing has no field.
  found: dict[str, Any] = {}
  if score_mod is not None: found["score_mod"] = trace(SCORE_FUNCTION, score_mod, tensors)
  if mask_mod is not None and (mask := trace(MASK_FUNCTION, mask_mod, tensors)) is not None and (bounds := mask_bounds(mask.value)) != NO_BOUNDS:
    found["mask_bounds"] = bounds
    if bounds.rest is not None: found["mask_mod"] = replace(mask, value=bounds.rest)
  return found
