"""Operations that tinygrad has no UOp for: how they appear in a kernel, in the rendered source and in the emulator.

In a kernel an operation is one `Ops.CUSTOM` whose argument is a `Call`: the operation's name and its static parameters. The renderer gets the text
from the `Operation` of that name. The emulator gets its `meaning`: a numpy function that computes the operation. There are two kinds of operations:
- a compound operation is one Python function over a few primitives (attn/ops/language.py). Running it gives the HIP text, the CUDA text or the result
in numpy;
- an instruction has its text and its numpy function written out, side by side (attn/ops/amd.py, nvidia.py, hopper.py).

A statement is an operation that is executed for its effect (see `statement`).

`emit` avoids these traps of `Ops.CUSTOM` in tinygrad 0.14.0. A CUSTOM needs an explicit dtype and at least one operand (the shape of the CUSTOM is
the shape of its operands). An operand that indexes a buffer is rendered as a pointer. So an operand in memory is passed as the UOp that indexes it,
and every other operand is passed as a loaded value. tinygrad drops a CUSTOM of dtype void."""
from __future__ import annotations
import functools
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Callable, Protocol
import numpy as np
from numpy.typing import NDArray
from attn.tinygrad_compat import DType, GroupOp, Ops, UOp, VectorDType, dtypes, new_uop

Array = NDArray[Any]
Value = Any            # value in a definition: an array, a Term of the rendered text, or Elements (UOps)

class LocalVariable:
  """Local variable in the definition of an operation. A branch of the definition may assign a new value to it."""
  def __init__(self, value:Value): self.value = value

class Lanes(Protocol):
  """The methods by which the numpy function of an operation uses the emulator. Arrays have one column per thread. A method that only has an effect
  returns zeros of shape (threads,), or None."""
  wave: int                 # lanes of a wave
  saturates: bool           # whether conversions to 8-bit floats give the largest number for a number beyond it, or else NaN
  @property
  def active(self) -> Array: """Threads that execute this operation, as bool (threads,)."""
  def load_bytes(self, pointer:Any, offset:Array, nbytes:int, gate:Array) -> Array:
    """Returns `nbytes` bytes per thread, loaded from `pointer` + `offset` bytes, as uint8 (nbytes, threads). Checks the bounds of the buffer where
    `gate` is true; returns zeros where `gate` is false."""
  def store_bytes(self, pointer:Any, offset:Array, data:Array, gate:Array) -> None:
    """Stores `data`, uint8 (nbytes, threads), to `pointer` + `offset` bytes, for each thread where `gate` is true. Checks the bounds of the buffer.
    """
  def load_register(self, pointer:Any, i:int) -> Array:
    """Returns element i of a register array, counted from `pointer`."""
  def store_register(self, pointer:Any, i:int, value:Array, gate:Array) -> None:
    """Writes `value` to element i of a register array, counted from `pointer`, in the threads where `gate` is true."""
  def check_extent(self, pointer:Any, nbytes:Array) -> None:
    """Raises an error unless the `nbytes` bytes from `pointer` on, which are the range of a buffer descriptor, are all inside the buffer."""
  def check_numbers(self, name:str, x:Array, gate:Array, count:int) -> None:
    """Raises an error if the number x is not in 0..count-1 in a thread where `gate` is true. The message calls the number `name`."""
  def check_alone(self, name:str, x:Array, gate:Array) -> None:
    """Raises an error if two threads where `gate` is true have the same number x. The message calls the number `name`."""
  def barrier(self, gate:Array) -> Array:
    """Executes a barrier in the waves of the threads where `gate` is true. Returns zeros."""
  def start_store(self, pointer:Any, offset:Array, data:Array, gate:Array) -> Array:
    """Starts an asynchronous store of `data`, uint8 (nbytes, threads), to LDS at `pointer` + `offset` bytes, for each thread where `gate` is true.
    Before the thread has waited for the store, an access to the bytes that the store writes is an error. Returns zeros."""
  def commit_stores(self) -> Array:
    """Puts the stores that each active thread has started since its last `commit_stores` into one group, for which the thread can wait. Returns
    zeros."""
  def wait_stores(self, but:int) -> Array:
    """Makes the active threads wait for their groups of stores, except the last `but` groups. Returns zeros."""
  def arrive(self, with_copies:bool=True) -> Array:
    """Makes the active threads arrive at the next phase of their workgroup's mbarrier. A thread that has waited for this phase sees what these
    threads have stored. With `with_copies` the arrival counts only once the asynchronous stores that these threads have started are complete; then
    the waiting thread sees these stores, too. Returns zeros."""
  def await_arrivals(self, parity:Array) -> Array:
    """Makes the active threads wait for the earliest phase of their mbarrier that they have not yet waited for. `parity` must be the parity of this
    phase's number. Returns zeros."""
  def only(self, gate:Array) -> AbstractContextManager[None]:
    """Context manager in which an active thread stays active only if `gate` is true."""
  def warpgroup_operand(self, a:Array, dtype:str) -> Array:
    """Returns operand A of a wgmma as matrices, given the registers of its threads. `a` has the dtype uint32 and the shape (registers, threads). The
    result has the shape (warpgroups, 64, k) and holds the bits of numbers of `dtype`."""
  def start_product(self, acc:Any, count:int, a:Callable[[], Array], b:Callable[[], Array], dtype:str, more:bool) -> Array:
    """Starts a wgmma that computes A B^T into the `count` C fragments from `acc` on. With `more` the product is added to the fragments. `a` and `b`
    are functions that read the operands as bits of `dtype`, in the shapes (warpgroups, 64, k) and (warpgroups, n, k). Before the thread has waited
    for the product, an access to the fragments or a write to the operands is an error. Returns zeros."""
  def start_nothing(self, acc:Any) -> None:
    """Starts an empty group of products for the C fragments from `acc` on. A warpgroup that skips a product calls this instead, so that
    `wait_products` counts the same in all warpgroups."""
  def wait_products(self, but:int) -> Array:
    """Makes the active threads wait for the products that they have started, except the last `but` products. Returns zeros."""
  def atomic_add(self, pointer:Any, steps:Sequence[int], x:Array, gate:Array, sent:bool=False, sets:Array|None=None) -> None:
    """Adds float32 x (instructions, elements, threads) to global memory where `gate` is true, in any order. The elements of instruction i are added
    to neighbouring numbers, which begin `steps[i]` elements after `pointer`. `sent` says that the copy engine (TMA) adds them: then only the method
    `sent` waits for them. Where `sets` is true, x replaces the numbers instead."""
  def sent(self) -> Array:
    """Makes the active waves wait until the additions that they have sent to the copy engine (TMA) are complete. Returns zeros."""
  def fetch_add(self, pointer:Any, gate:Array) -> Array:
    """Adds 1 to the int32 in global memory at `pointer` for each thread where `gate` is true, in any order. Returns an array (threads,) with the
    number that each thread found before its addition."""
  def await_turn(self, pointer:Any, number:Array, gate:Array) -> None:
    """Waits until a turn begins (the period in which a workgroup may add to shared sums): until the int32 in global memory at `pointer` is equal to
    `number`, in the threads where `gate` is true."""
  def settle(self) -> None:
    """Makes the active waves wait until their additions and stores to global memory are complete."""
  def pass_turn(self, pointer:Any, gate:Array) -> None:
    """Ends a turn (the period in which a workgroup may add to shared sums): adds 1 to the int32 in global memory at `pointer` for each thread where
    `gate` is true. A thread that waits for the new number then sees everything that this wave has done before."""
  def check_alignment(self, pointer:Any, nbytes:int) -> None:
    """Raises an error if the distance of `pointer` from the start of its buffer is not a multiple of `nbytes` bytes."""
  def probe(self, name:str, x:Array) -> Array:
    """Prints the values x of the active threads under the name `name`, or collects them if the caller is inside `probes()`. Returns x."""
  def dot(self, a:Array, b:Array, c:Array, dtype:str) -> Array:
    """Returns c + a . b as AMD's dot product instructions compute it. A dword of a and of b holds two numbers of a 16-bit `dtype` (v_dot2_f32_f16,
    v_dot2_f32_bf16) or four of an 8-bit `dtype` (v_dot4_f32_fp8_fp8)."""
  def matrix(self, name:str, a:Array, b:Array, c:Array) -> Array:
    """Returns the result of the matrix instruction called `name` (see `attn.chips.matrix.Matrix.name`): c + A B. The operands and the result lie as
    the registers hold them, in the layout of the ISA."""

@dataclass(frozen=True)
class Body:
  """Body of a C++ function: its statements, one per line. The last statement is a return."""
  statements: str
  parameters: str                            # names of the parameters, separated by spaces
  template: tuple[tuple[str, int], ...] = () # template parameters (name, value): numbers that must be compile-time constants
  name: str = ""                             # name of the function, if not the operation's own

Text = str|Body             # text of an operation: an expression with {0}, {1} for the sources, or a function

@dataclass(frozen=True)
class Call:
  """Argument of a CUSTOM UOp: the name of an operation and its static parameters."""
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
    """Returns the result of the operation, computed in numpy from the values of its operands `sources`. A scalar has the shape (threads,), a vector
    of n elements (n, threads)."""
    with np.errstate(all="ignore"): return self.operation.meaning(lanes, *sources, **self.parameters)
  def format(self, *sources:str) -> str:
    raise NotImplementedError(f"this device's renderer can't print {self.name}, an operation of attn: import attn before the device is opened")

@dataclass(frozen=True)
class Operation:
  """Definition of an operation. An instruction has a `meaning` (lanes, *operands, **static), which is the numpy function that computes the
  instruction, and a text for each language, HIP or CUDA, that can express the instruction. A compound operation has a `definition` (language,
  *operands, **static), from which the numpy function and the texts are made. An `inline` operation is rendered as an expression where it is used, and
  not as a function."""
  meaning: Callable[..., Any]
  hip: Callable[..., Text]|Text|None = None
  cuda: Callable[..., Text]|Text|None = None
  definition: Callable[..., Any]|None = None
  inline: bool = False
  suffix: str = ""
  atomic: bool = False     # works on global memory that workgroups share

OPERATIONS: dict[str, Operation] = {}

def is_ours(name:str, uops:Iterable[UOp]) -> bool:
  """Tells whether a kernel is a kernel of attn: whether its name begins with "attn_", or its UOps contain an operation or a vector type of attn."""
  return name.startswith("attn_") or any(isinstance(u.dtype, VectorDType) or isinstance(u.arg, Call) for u in uops)

def integer(x:UOp) -> UOp:
  """Returns the index x as an int32. Numbers inside the expression of x may be larger, as in x = i % 16 with i >= 2^31. There x.cast(int32) would be
  wrong, because tinygrad would compute i in 32 bits, too. So the parts of such an expression are first made 64 bits wide."""
  parts = x.toposort(gate=lambda u: u.dtype == dtypes.weakint and u.op in GroupOp.ALU)
  if not any(s.overflows(dtypes.int) for u in parts for s in u.src if s.dtype == dtypes.weakint): return x.cast(dtypes.int)
  wide = dict[UOp, UOp]()
  def widened(u:UOp) -> UOp: return wide.get(u, u.cast(dtypes.long) if u.dtype == dtypes.weakint and u.op is not Ops.CONST else u)
  for u in parts: wide[u] = new_uop(u.op, tuple(map(widened, u.src)), arg=u.arg)
  return wide[x].cast(dtypes.int)

def emit(name:str, out:DType, /, *sources:UOp, **static:Any) -> UOp:
  """Returns the UOp of the operation `name` on the operands `sources`. `out` is the type of the result, and `static` are the operation's compile-time
  parameters."""
  return new_uop(Ops.CUSTOM, sources, out, Call(name, tuple(static.items())))

def statement(name:str, /, *sources:UOp, **static:Any) -> UOp:
  """Returns the UOp of the statement `name` on the operands `sources`: an operation that is executed for its effect. The value of the UOp is 0 and
  must be stored somewhere. The store gives the operation its place in the order of statements."""
  return new_uop(Ops.CUSTOMI, sources, dtypes.float, Call(name, tuple(static.items())))
