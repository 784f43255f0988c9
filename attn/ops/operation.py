"""How an operation that tinygrad has no UOp for gets into a kernel, to the printed source, and into the emulator.

In a kernel it is one `Ops.CUSTOM` whose argument is a `Call`: the operation's name, the C types of its operands and its static parameters. The
renderer asks the `Operation` of that name for its text, the emulator for its meaning in numpy. There are two kinds:
- a compound operation is one Python function over a few primitives (attn/ops/language.py), which is run to get the HIP text, the CUDA text and the
  meaning;
- an instruction has its text and its meaning written out, side by side (attn/ops/amd.py, nvidia.py, hopper.py).

Traps of `Ops.CUSTOM` in tinygrad 0.14.0, all dealt with in `emit`: it needs an explicit dtype and at least one source (its shape is that of its
sources); an INDEX source prints as a pointer, so memory operands are passed as INDEX and everything else must be `.load()`ed; a void one vanishes.
"""
from __future__ import annotations
import functools
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Callable, Protocol
import numpy as np
from numpy.typing import NDArray
from attn.tinygrad_compat import DType, GroupOp, Ops, UOp, VectorDType, dtypes, new_uop

Array = NDArray[Any]
Value = Any            # what a definition computes with: an array, or a Term of the printed text

class Variable:
  """A number that a branch of a definition may change."""
  def __init__(self, value:Value): self.value = value

class Lanes(Protocol):
  """What a meaning in numpy may ask of the emulator that runs it."""
  wave: int                 # lanes of a wave
  @property
  def active(self) -> Array: """(T,) bool: the threads that execute this operation."""
  def load_bytes(self, pointer:Any, offset:Array, nbytes:int, gate:Array) -> Array:
    """uint8 (nbytes, T) from `pointer` + `offset` bytes, per thread; bounds-checked where `gate` holds, zero where it does not."""
  def store_bytes(self, pointer:Any, offset:Array, data:Array, gate:Array) -> None:
    """uint8 (nbytes, T) to `pointer` + `offset` bytes, per thread, where `gate` holds; bounds-checked."""
  def load_register(self, pointer:Any, i:int) -> Array:
    """The i-th element of a register array from `pointer` on."""
  def store_register(self, pointer:Any, i:int, value:Array, gate:Array) -> None:
    """Sets that element in the threads where `gate` holds."""
  def check_extent(self, pointer:Any, nbytes:Array) -> None:
    """Raises where the `nbytes` from `pointer` on (a buffer descriptor's range) are not all inside the buffer."""
  def check_numbers(self, name:str, x:Array, gate:Array, count:int) -> None:
    """Raises where one of the numbers x is not in 0..count-1 though `gate` holds."""
  def check_alone(self, name:str, x:Array, gate:Array) -> None:
    """Raises where two of the numbers x of which `gate` holds are the same."""
  def barrier(self, gate:Array) -> Array:
    """The waves of the threads where `gate` holds reach a barrier; zeros."""
  def start_store(self, pointer:Any, offset:Array, data:Array, gate:Array) -> Array:
    """`store_bytes` to LDS that is under way until the thread has waited for it: until then nobody may touch what it writes; zeros."""
  def commit_stores(self) -> Array:
    """The stores that each active thread has started since it last did this make a group; zeros."""
  def wait_stores(self, but:int) -> Array:
    """The active threads wait for all their groups but the last so many; zeros."""
  def arrive(self) -> Array:
    """The workgroups of the active threads arrive at the next phase of their mbarrier, with the stores that they have started; zeros."""
  def await_arrivals(self, parity:Array) -> Array:
    """They wait for the next phase that they have not waited for, which must have this parity; zeros."""
  def only(self, gate:Array) -> AbstractContextManager[None]:
    """Within it those of the active threads where `gate` holds are the active ones."""
  def warpgroup_operand(self, a:Array) -> Array:
    """The fragments of A of a warpgroup's wgmma, uint32 (registers, T), as bits (warpgroups, 64, k)."""
  def start_product(self, acc:Any, count:int, a:Callable[[], Array], b:Callable[[], Array], dtype:str, more:bool) -> Array:
    """Starts a wgmma on the `count` C fragments from `acc` on: A B^T, with `more` added to them. `a` and `b` read the operands, as bits of `dtype`
    (warpgroups, 64, k) and (warpgroups, n, k). Until the thread has waited for it nobody may touch the fragments, nor write what was read; zeros."""
  def wait_products(self, but:int) -> Array:
    """The active threads wait for all the products that they have started but the last so many; zeros."""
  def check_alignment(self, pointer:Any, nbytes:int) -> None:
    """Raises where `pointer` is no multiple of `nbytes` from the begin of its buffer."""
  def probe(self, name:str, x:Array) -> Array:
    """Shows or collects x of the active threads under that name; x."""
  def dot(self, a:Array, b:Array, c:Array, dtype:str) -> Array:
    """c + the dot product of two dwords of two numbers of `dtype` each, by AMD's v_dot2_f32_f16 or v_dot2_f32_bf16."""
  def matrix(self, name:str, a:Array, b:Array, c:Array) -> Array:
    """The matrix instruction `name` (of `attn.chips.matrix.Matrix.name`), on register images as the ISA lays them out."""

@dataclass(frozen=True)
class Body:
  """A function in C++: the statements in it, one a line, which end in a return."""
  statements: str
  parameters: str                            # their names
  template: tuple[tuple[str, int], ...] = () # static numbers that must be constants where they are used, by name
  name: str = ""                             # where the operation's own does not say all

Text = str|Body             # an expression with {0}, {1} for the sources, or a function

@dataclass(frozen=True)
class Call:
  """The argument of a CUSTOM: which operation, with which static parameters."""
  name: str
  static: tuple[tuple[str, Any], ...]
  @functools.cached_property
  def order(self) -> str: return f"{self.static} {self.name}"
  def __lt__(self, other:Call) -> bool: return self.order < other.order     # the linearizer sorts what may stand in any order
  @property
  def operation(self) -> Operation: return OPERATIONS[self.name]
  @property
  def parameters(self) -> dict[str, Any]: return dict(self.static)
  def meaning(self, lanes:Lanes, *sources:Any) -> Any:
    """The value, (T,) or (n, T), on these sources."""
    with np.errstate(all="ignore"): return self.operation.meaning(lanes, *sources, **self.parameters)
  def format(self, *sources:str) -> str:
    raise NotImplementedError(f"a renderer that does not know attn's operations was asked to print {self.name}: "
                              "import attn before the device is opened")

@dataclass(frozen=True)
class Operation:
  """An instruction, which has its meaning (lanes, *sources, **static) and its texts for the languages that have it, or a compound operation, whose
  `definition` (language, *sources, **static) is all of these; an inline one is an expression, printed where it is used and not as a function."""
  meaning: Callable[..., Any]
  hip: Callable[..., Text]|Text|None = None
  cuda: Callable[..., Text]|Text|None = None
  definition: Callable[..., Any]|None = None
  inline: bool = False
  suffix: str = ""

OPERATIONS: dict[str, Operation] = {}

def is_ours(name:str, uops:Iterable[UOp]) -> bool:
  """Whether a kernel is one of ours, as its name or its vector types tell."""
  return name.startswith("attn_") or any(isinstance(u.dtype, VectorDType) or isinstance(u.arg, Call) for u in uops)

def integer(x:UOp) -> UOp:
  """An index as an int32, which holds it. What it is a minimum, a quotient or a remainder of may be more. tinygrad would compute that in 32 bits too,
  unless the numbers in it are 64 bits wide already: (x % 16).cast(int32) is wrong where x is 2^31 or more."""
  parts = x.toposort(gate=lambda u: u.dtype == dtypes.weakint and u.op in GroupOp.ALU)
  if not any(s.overflows(dtypes.int) for u in parts for s in u.src if s.dtype == dtypes.weakint): return x.cast(dtypes.int)
  wide = dict[UOp, UOp]()
  def widened(u:UOp) -> UOp: return wide.get(u, u.cast(dtypes.long) if u.dtype == dtypes.weakint and u.op is not Ops.CONST else u)
  for u in parts: wide[u] = u.replace(dtype=None, src=tuple(map(widened, u.src)))
  return wide[x].cast(dtypes.int)

def emit(name:str, out:DType, /, *sources:UOp, **static:Any) -> UOp:
  """An operation as one UOp with result type `out`; `static` are its compile-time parameters."""
  return new_uop(Ops.CUSTOM, sources, out, Call(name, tuple(static.items())))

def statement(name:str, /, *sources:UOp, **static:Any) -> UOp:
  """An operation that is there for what it does. Its value, 0, is to be stored somewhere: that is what orders it among others."""
  return new_uop(Ops.CUSTOMI, sources, dtypes.float, Call(name, tuple(static.items())))
