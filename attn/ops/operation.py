"""Operations of attn's kernels for which tinygrad has no UOp: how they stand in a kernel, in the rendered source and in the emulator. Begin with
`Operation` and `emit`."""
from __future__ import annotations
import functools
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Callable, Protocol
import numpy as np
from numpy.typing import NDArray
from attn.tinygrad_compat import DType, GroupOp, Ops, UOp, VectorDType, dtypes, new_uop

# In a kernel an operation is one `Ops.CUSTOM` whose argument is a `Call`: the operation's name and its static parameters. The renderer gets the text
# from the `Operation` of that name. The emulator gets its `meaning`, a numpy function that computes the operation. A compound operation is one
# Python function over a few primitives (attn/ops/language.py): running the function gives the HIP text, the CUDA text or the result in numpy. An
# instruction has its text and its numpy function written side by side (attn/ops/amd.py, nvidia.py, hopper.py).

Array = NDArray[Any]
Value = Any            # value in a definition: an array, a Term of the rendered text, or Elements (UOps)

class LocalVariable:
  """Variable of the Python function that defines a compound operation. The function may assign to it, also in a branch."""
  def __init__(self, value:Value): self.value = value

class Lanes(Protocol):
  """Methods of the emulator that the numpy functions of operations may call, e.g. to access memory."""
  # Arrays have one column per thread. A method that only has an effect returns zeros of shape (threads,), or None.
  wave: int                 # lanes of a wave
  saturates: bool           # whether conversions to 8-bit floats give the largest number for a number beyond it, or else NaN
  @property
  def active(self) -> Array: """Bool (threads,): True for threads that execute this operation."""
  def load_bytes(self, pointer:Any, offset:Array, nbytes:int, gate:Array) -> Array:
    """Returns `nbytes` bytes per thread from `pointer` + `offset` bytes, as uint8 (nbytes, threads): zeros where `gate` is false."""
  def store_bytes(self, pointer:Any, offset:Array, data:Array, gate:Array) -> None:
    """Stores uint8 `data` (nbytes, threads) to `pointer` + `offset` bytes, for each thread where `gate` is true."""
  def load_register(self, pointer:Any, i:int) -> Array:
    """Returns element i of a register array, counted from `pointer`."""
  def store_register(self, pointer:Any, i:int, value:Array, gate:Array) -> None:
    """Writes `value` to element i of a register array, counted from `pointer`, in the threads where `gate` is true."""
  def check_extent(self, pointer:Any, nbytes:Array) -> None:
    """Raises an error unless the `nbytes` bytes from `pointer` on are all inside the buffer."""
  def check_numbers(self, name:str, x:Array, gate:Array, count:int) -> None:
    """Raises an error if x is not in 0..count-1 in a thread where `gate` is true; the message calls x `name`."""
  def check_alone(self, name:str, x:Array, gate:Array) -> None:
    """Raises an error if two threads where `gate` is true have equal x; the message calls x `name`."""
  def barrier(self, gate:Array) -> Array:
    """Executes a barrier in the waves of the threads where `gate` is true, and returns zeros."""
  def start_store(self, pointer:Any, offset:Array, data:Array, gate:Array) -> Array:
    """Starts an asynchronous store of uint8 `data` (nbytes, threads) to LDS at `pointer` + `offset` bytes, where `gate` is true. Returns zeros."""
  def commit_stores(self) -> Array:
    """Puts the stores that each active thread has started since its last `commit_stores` into one group, and returns zeros."""
  def wait_stores(self, but:int) -> Array:
    """Makes each active thread wait for its groups of stores, except the last `but` groups. Returns zeros."""
  def arrive(self, with_copies:bool=True) -> Array:
    """Makes the active threads arrive at their workgroup's mbarrier, if `with_copies` only when a thread's stores are complete. Returns zeros."""
  def await_arrivals(self, parity:Array) -> Array:
    """Makes the active threads wait for the end of the mbarrier's next phase, whose number is even or odd as `parity` says. Returns zeros."""
  def only(self, gate:Array) -> AbstractContextManager[None]:
    """Context manager in which an active thread stays active only if `gate` is true."""
  def warpgroup_operand(self, a:Array, dtype:str) -> Array:
    """Returns operand A of a wgmma, (warpgroups, 64, k) numbers of `dtype` as bits, from the threads' registers `a`, uint32 (registers, threads)."""
  def start_product(self, acc:Any, count:int, a:Callable[[], Array], b:Callable[[], Array], dtype:str, more:bool) -> Array:
    """Starts a wgmma that sets `count` C fragments, from `acc` on, to A B^T, or with `more` adds A B^T to them. Returns zeros."""
  def start_nothing(self, acc:Any) -> None:
    """Starts an empty group of wgmma products in the active threads, for a warpgroup that skips a product into `acc`."""
  def wait_products(self, but:int) -> Array:
    """Makes each active thread wait for the wgmma products that the thread has started, except the last `but` products. Returns zeros."""
  def atomic_add(self, pointer:Any, steps:Sequence[int], x:Array, gate:Array, sent:bool=False, sets:Array|None=None) -> None:
    """Adds the float32 numbers x (instructions, elements, threads) to global memory, instruction i at steps[i] elements after `pointer`."""
  def sent(self) -> Array:
    """Makes the active waves wait until their additions through the copy engine (TMA) are complete. Returns zeros."""
  def fetch_add(self, pointer:Any, gate:Array) -> Array:
    """Adds 1 to the int32 at `pointer` for each thread where `gate` is true. Returns the number that each thread found there (threads,)."""
  def await_turn(self, pointer:Any, number:Array, gate:Array) -> None:
    """Waits, in the threads where `gate` is true, until the int32 in global memory at `pointer` is equal to `number`."""
  def settle(self) -> None:
    """Makes the active waves wait until their additions and stores to global memory are complete."""
  def pass_turn(self, pointer:Any, gate:Array) -> None:
    """Ends a turn: adds 1 to the int32 in global memory at `pointer`, for each thread where `gate` is true."""
  def check_alignment(self, pointer:Any, nbytes:int) -> None:
    """Raises an error if the distance of `pointer` from the start of its buffer is not a multiple of `nbytes` bytes."""
  def probe(self, name:str, x:Array) -> Array:
    """Prints the values x of the active threads under the name `name`, or collects them inside `probes()`. Returns x."""
  def dot(self, a:Array, b:Array, c:Array, dtype:str) -> Array:
    """Returns c + a . b as AMD's dot product instructions compute it: each dword of a and b holds two or four numbers of `dtype`."""
  def matrix(self, name:str, a:Array, b:Array, c:Array) -> Array:
    """Returns c + A B, computed by the matrix instruction `name`; a, b and c are (registers, threads), as lanes hold the matrices."""

@dataclass(frozen=True)
class Body:
  """Body of a generated C++ function, as text with one statement a line and a return at the end, and the names of the function's parameters."""
  statements: str
  parameters: str                            # names of the parameters, separated by spaces
  template: tuple[tuple[str, int], ...] = () # template parameters (name, value): numbers that must be compile-time constants
  name: str = ""                             # name of the function, if not the operation's own

Text = str|Body             # text of an operation: an expression with {0}, {1} for the sources, or a function

@dataclass(frozen=True)
class Call:
  """Argument of a CUSTOM UOp, by which a kernel calls an operation of attn: the operation's name and compile-time parameters."""
  name: str
  static: tuple[tuple[str, Any], ...]
  @functools.cached_property
  def order(self) -> str: return f"{self.static} {self.name}"
  def __lt__(self, other:Call) -> bool: return self.order < other.order     # the linearizer sorts UOps whose order is free, by their arguments too
  @property
  def operation(self) -> Operation: return OPERATIONS[self.name]
  @property
  def parameters(self) -> dict[str, Any]: return dict(self.static)
  def meaning(self, lanes:Lanes, *sources:Any) -> Any:
    """Returns the operation's result, computed in numpy: (threads,) for a scalar, (n, threads) for a vector of n elements."""
    with np.errstate(all="ignore"): return self.operation.meaning(lanes, *sources, **self.parameters)
  def format(self, *sources:str) -> str:
    raise NotImplementedError(f"this device's renderer can't print {self.name}, an operation of attn: import attn before the device is opened")

@dataclass(frozen=True)
class Operation:
  """Definition of an operation: a numpy function that computes the result, and HIP and CUDA texts, or functions that make these texts."""
  # meaning(lanes, *operands, **static) computes the operation in numpy
  meaning: Callable[..., Any]
  # hip, cuda: the texts of an instruction; None if the language cannot express the instruction
  hip: Callable[..., Text]|Text|None = None
  cuda: Callable[..., Text]|Text|None = None
  # definition(language, *operands, **static) of a compound operation: the numpy function and the texts are made from it
  definition: Callable[..., Any]|None = None
  # whether the operation is rendered as an expression where it is used, and not as a function
  inline: bool = False
  suffix: str = ""
  atomic: bool = False     # works on global memory that workgroups share

OPERATIONS: dict[str, Operation] = {}

def is_ours(name:str, uops:Iterable[UOp]) -> bool:
  """Returns whether a kernel is from attn: its name begins with "attn_", or its UOps contain an operation or vector type of attn."""
  return name.startswith("attn_") or any(isinstance(u.dtype, VectorDType) or isinstance(u.arg, Call) for u in uops)

def integer(x:UOp) -> UOp:
  """Returns the index x as an int32, even if parts of the expression x exceed 32 bits, as in x = i % 16 with i >= 2^31."""
  parts = x.toposort(gate=lambda u: u.dtype == dtypes.weakint and u.op in GroupOp.ALU)
  # x.cast(int32) would be wrong if a part of x overflows, because tinygrad would compute that part in 32 bits, too. So the parts become 64 bits wide
  # first.
  if not any(s.overflows(dtypes.int) for u in parts for s in u.src if s.dtype == dtypes.weakint): return x.cast(dtypes.int)
  wide = dict[UOp, UOp]()
  def widened(u:UOp) -> UOp: return wide.get(u, u.cast(dtypes.long) if u.dtype == dtypes.weakint and u.op is not Ops.CONST else u)
  for u in parts: wide[u] = new_uop(u.op, tuple(map(widened, u.src)), arg=u.arg)
  return wide[x].cast(dtypes.int)

def emit(name:str, out:DType, /, *sources:UOp, **static:Any) -> UOp:
  """Returns the UOp of the operation `name` on `sources`, with a result of type `out` and the compile-time parameters `static`."""
  # Traps of `Ops.CUSTOM` in tinygrad 0.14.0: a CUSTOM needs an explicit dtype and at least one operand (its shape is the shape of the operands). An
  # operand that indexes a buffer is rendered as a pointer: so an operand in memory is passed as the UOp that indexes it, and every other operand as
  # a loaded value. tinygrad drops a CUSTOM of dtype void.
  return new_uop(Ops.CUSTOM, sources, out, Call(name, tuple(static.items())))

def statement(name:str, /, *sources:UOp, **static:Any) -> UOp:
  """Returns the UOp of the statement `name`, an operation that is executed for its effect. The UOp's value is 0."""
  # The value must be stored somewhere: the store gives the operation its place in the order of statements.
  return new_uop(Ops.CUSTOMI, sources, dtypes.float, Call(name, tuple(static.items())))
