"""Finds, for an operation, the line of Python that emitted the operation, and its line in the rendered source."""
from __future__ import annotations
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable
import linecache, os
from attn.tinygrad_compat import Ops, Places, UOp, lowered_with_places, made_with_places, statements, tinygrad_folder

# The UOps of a program contain neither line, and nothing is recorded while a kernel is made and run. The device only remembers, for the latest
# kernels of `Tensor.custom_kernel`, a function that makes the kernel's AST a second time. When a kernel fails, its AST is made and lowered again,
# and the place of each UOp is recorded. If the result equals the failing program, UOp by UOp, the places are valid. To find the places takes about
# as long as making and lowering the kernel did.

PACKAGE = Path(__file__).resolve().parent.parent
# Files that emit operations on behalf of a kernel. The place of such an operation is the line of the kernel that called the file's function.
OURS_INSIDE = ("ops/", "kernels/parts/program/statements.py", "kernels/parts/memory/layouts.py", "tinygrad_compat/", "emulator/")
INTERNAL = (tinygrad_folder, *(str(PACKAGE/name) for name in OURS_INSIDE))
WIDTH = 160             # characters of a statement that an error shows
REMEMBERED = 64         # number of kernels that are remembered

_built: dict[UOp, Callable[[], Any]] = {}    # AST -> function that makes the AST again, the newest last

def remember(ast:UOp, again:Callable[[], Any]) -> None:
  """Remembers a kernel's AST together with the function `again`, which makes the same AST a second time."""
  _built.pop(ast, None)
  _built[ast] = again
  while len(_built) > REMEMBERED: del _built[next(iter(_built))]

def _internal(path:str) -> bool: return path.startswith(INTERNAL) or path.startswith("<")

def _short(text:str) -> str:
  text = " ".join(text.split())
  return text if len(text) <= WIDTH else text[:WIDTH - 1] + "…"

def _relative(path:str) -> str:
  """Returns a file's path relative to the folder that contains `attn`, or relative to the current folder, or unchanged if it is in neither."""
  for root in (str(PACKAGE.parent), os.getcwd()):
    if path.startswith(root + os.sep): return os.path.relpath(path, root)
  return path

@dataclass(frozen=True)
class Place:
  python: tuple[str, int]|None     # file and line
  line: int|None                   # line of the source, from 1
  statement: str

  def __str__(self) -> str:
    """Text for an error message: the line of Python that emitted the operation, and its line in the rendered source, as far as they are known."""
    found = []
    if self.python is not None:
      file, line = self.python
      found.append(f"{_relative(file)}:{line}: {_short(linecache.getline(file, line))}")
    if self.line is not None: found.append(f"line {self.line} of the source: {_short(self.statement)}")
    return "".join(f"\n  {x}" for x in found)

  @property
  def name(self) -> str:
    """Short text such as "attn/kernels/forward.py:31", the line of Python that emitted the operation; empty if the line is not known."""
    if self.python is not None: return f"{_relative(self.python[0])}:{self.python[1]}"
    return f"line {self.line} of the source" if self.line is not None else ""

NOWHERE = Place(None, None, "")

def _stores(ast:UOp) -> tuple[UOp, ...]:
  # the operands of a SINK that are no PARAMs
  return tuple(u for u in ast.src if u.op is not Ops.PARAM)

class Listing:
  """Lines of Python and of the rendered source: for each UOp of a program, the lines that emitted and render it."""
  def __init__(self, uops:list[UOp], name:str, renderer:Any):
    self.source, self.lines = statements(renderer, uops)
    self.python = self._python(uops, name, renderer)

  @classmethod
  def of(cls, make:Callable[[], UOp], renderer:Any) -> Listing:
    """Returns the lines of Python and of the rendered source for the kernel whose AST `make` returns, lowered and rendered by `renderer`."""
    made, places = made_with_places(make, _internal)
    listing = cls.__new__(cls)
    listing.source, listing.lines = statements(renderer, lowered_with_places(made, renderer, places))
    listing.python = places
    return listing

  def python_lines(self) -> dict[int, tuple[str, int]]:
    """Returns {line number in the rendered source, from 1: (file, line) of the Python code that emitted the line}."""
    found: dict[int, tuple[str, int]] = {}
    for u, line in self.lines.items():
      if line + 1 not in found and (place := self._from(u)) is not None: found[line + 1] = (_relative(place[0]), place[1])
    return found

  @staticmethod
  def _python(uops:list[UOp], name:str, renderer:Any) -> Places:
    for ast, again in reversed(_built.items()):
      if ast.arg.function_name != name: continue
      try:
        made, places = made_with_places(again, _internal)
        if _stores(made if isinstance(made, UOp) else made.sink) != _stores(ast): continue
        same = lowered_with_places(ast, renderer, places)
      except Exception: continue     # making the kernel again may fail now; the user must see the kernel's own error instead
      if len(same) == len(uops) and all(a is b for a, b in zip(same, uops)): return places
    return {}

  def place(self, u:UOp) -> Place:
    line = self.lines.get(u)
    statement = "" if line is None else self.source.splitlines()[line]
    return Place(self._from(u), None if line is None else line + 1, statement)

  def _from(self, u:UOp) -> tuple[str, int]|None:
    """Returns the (file, line) of Python that `u` comes from, or None if no line is known."""
    # for a UOp that a pass of tinygrad inserted: the line of the nearest source UOp whose line is known
    seen, level = {u}, [u]
    while level:
      if (found := next((self.python[x] for x in level if self.python.get(x) is not None), None)) is not None: return found
      below = dict.fromkeys(s for x in level for s in x.src)
      level = [s for s in below if s not in seen and s.op not in _NO_PLACE]
      seen |= set(level)
    return None

_NO_PLACE = (Ops.CONST, Ops.PARAM, Ops.BUFFER, Ops.SPECIAL)
