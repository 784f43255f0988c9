"""Checks of argument values. A check takes an argument's name and value, and returns the value as a plain Python object, or raises ValueError with
the name, the value and what is supported."""
from __future__ import annotations
import functools, math, numbers
from collections.abc import Callable, Iterable
from dataclasses import field
from typing import Any, TypeVar
import numpy as np
from attn.tinygrad_compat import DType, Tensor, UOp, dtypes, strong_dtype

FLOATS = {"float16": dtypes.half, "bfloat16": dtypes.bfloat16, "float32": dtypes.float}
INTS = {"int8": dtypes.char, "uint8": dtypes.uchar, "int16": dtypes.short, "uint16": dtypes.ushort, "int32": dtypes.int, "uint32": dtypes.uint,
        "int64": dtypes.long}
DTYPE_NAMES = {dtype: name for name, dtype in (FLOATS | INTS).items()}
LOG2E, LN2 = math.log2(math.e), math.log(2)
SHOWN_MOST = 60                                              # most characters of a value that an error shows
FP32_LEAST, FP32_MOST = 2.0**-126, (2 - 2.0**-23)*2.0**127   # the smallest and the largest positive normal number of fp32

MOST_KERNELS = 512      # number of problems whose kernels a process keeps, the latest problems; a kernel and its data take about 1 MB
cache_of_kernels = functools.lru_cache(MOST_KERNELS)      # decorator for functions of a problem, whose results tinygrad's caches look up by identity

Check = Callable[[str, Any], Any]
Public = TypeVar("Public", bound=Callable[..., Any])

def names_itself(function:Public) -> Public:
  """Decorator of a public function: a ValueError or RuntimeError raised in it begins with the function's name."""
  @functools.wraps(function)
  def called(*args:Any, **kwargs:Any) -> Any:
    try: return function(*args, **kwargs)
    except (ValueError, RuntimeError) as e:      # NotImplementedError is a RuntimeError
      text = e.__dict__.setdefault("without_name", str(e))
      e.args = (f"{function.__name__}: {text}",)
      raise
  return called     # type: ignore[return-value]

def option(default:Any, check:Check, meaning:str) -> Any:
  """Makes a dataclass field for an option: with default value, check of a given value, and meaning."""
  # `check` checks the option's value. `meaning` is the option's text in the table of options in docs.
  return field(default=default, metadata={"check": check, "meaning": meaning})

def shown(x:Any) -> str:
  """Returns a value as text for an error message, such as a tensor's type, shape and dtype, cut off if long."""
  if isinstance(x, (Tensor, np.ndarray)): return f"{type(x).__name__} of shape {shown_shape(x.shape)} and dtype {x.dtype}"
  if isinstance(x, UOp): return f"UOp {x.render()[:SHOWN_MOST]}"
  text = repr(x)
  return text if len(text) <= SHOWN_MOST else f"{text[:SHOWN_MOST]}... ({type(x).__name__})"

def static_shape(name:str, shape:tuple[Any, ...]) -> tuple[int, ...]:
  if all(isinstance(s, int) for s in shape): return tuple(map(int, shape))
  raise NotImplementedError(f"{name} has the symbolic shape {shown_shape(shape)}: shapes must be integers; pass a variable number of keys as "
                            "kv_lengths")

def shown_shape(shape:Iterable[Any]) -> str:
  """Returns a shape as text for an error message, with a symbolic size by its name."""
  sizes = [s.render() if isinstance(s, UOp) else str(s) for s in shape]
  return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"

def wrong(name:str, x:Any, supported:str) -> ValueError: return ValueError(f"{name}={shown(x)}: must be {supported}")

def is_whole(x:Any) -> bool: return isinstance(x, numbers.Integral) and not isinstance(x, (bool, np.bool_))

def whole_number(name:str, x:Any, least:int, most:int|None, supported:str) -> int:
  """Returns x as an int if x is a whole number in least..most (None: no upper limit), otherwise raises ValueError."""
  if not is_whole(x) or x < least or (most is not None and x > most): raise wrong(name, x, supported)
  return int(x)

def real_number(name:str, x:Any, least:float, most:float, supported:str) -> float:
  """Returns x as a float if x is a number in least..most, otherwise raises ValueError."""
  if isinstance(x, (bool, np.bool_)) or not isinstance(x, numbers.Real): raise wrong(name, x, supported)
  try: value = float(x)
  except OverflowError: value = math.inf
  if not least <= value <= most: raise wrong(name, x, supported)
  return value

def truth(name:str, x:Any) -> bool:
  """Returns x as a bool if x is a bool, 0 or 1, otherwise raises ValueError."""
  if isinstance(x, (bool, np.bool_)) or (is_whole(x) and x in (0, 1)): return bool(x)
  raise wrong(name, x, "True or False")

def word(name:str, x:Any, known:Iterable[str], supported:str="") -> str:
  """Returns x if x is one of the `known` strings, otherwise raises ValueError."""
  known = tuple(known)
  if isinstance(x, str) and x in known: return str(x)
  raise wrong(name, x, supported or f"one of {', '.join(map(repr, known))}")

def strong(x:Tensor) -> Tensor:
  """Casts a tensor of a weak dtype, such as that of Tensor(1.5), to the ordinary dtype in which tinygrad stores it."""
  # A weak dtype yields to the dtype of the other operand. Examples are the dtypes of Tensor(1.5) and, for an int tensor `mask`, of (1.0 -
  # mask)*-10000.0.
  return x.cast(strong_dtype(x.dtype)) if x.dtype in dtypes.weaks else x

def tensor(name:str, x:Any) -> Tensor:
  if isinstance(x, Tensor): return strong(x)
  raise wrong(name, x, f"a Tensor, such as Tensor({name})" if isinstance(x, np.ndarray) else "a Tensor")

def tensor_or_none(name:str, x:Any) -> Tensor|None:
  if x is None: return None
  if isinstance(x, Tensor): return strong(x)
  raise wrong(name, x, "a Tensor or None")

def dtype_text(dtype:Any) -> str:
  """Returns the name of a dtype: numpy's name if numpy has this dtype, else tinygrad's."""
  return DTYPE_NAMES.get(dtype, str(dtype).removeprefix("dtypes."))

def dtype_name(name:str, dtype:DType, supported:Iterable[str]) -> str:
  """Returns the name of a tensor's dtype; raises NotImplementedError (ValueError if `supported` has a single dtype) for a dtype not in
  `supported`."""
  if (found := dtype_text(strong_dtype(dtype))) in (supported := tuple(supported)): return found
  several = len(supported) > 1
  raise (NotImplementedError if several else ValueError)(f"{name} has dtype {found}: must be {'one of ' if several else ''}{', '.join(supported)}")
