"""Where an operation of a program comes from: the line of Python that emitted it, and its statement in the source that the renderer prints.

A program is a list of UOps that says neither. Nothing is recorded when a kernel is made and run: tinygrad's device only remembers, for the kernels
that `Tensor.custom_kernel` was given last, how to make their ASTs anew. When one of them has failed, its AST is made and lowered again with the place
of each UOp noted, and if the result is the failing program, UOp by UOp, these are the places. That takes about as long as making and lowering it did.
"""
from __future__ import annotations
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable
import linecache, os
from attn.tinygrad_compat import Ops, Places, UOp, lowered_with_places, made_with_places, statements, tinygrad_folder

PACKAGE = Path(__file__).resolve().parent.parent
# what emits operations on behalf of the kernel that is to be named
OURS_INSIDE = ("ops/", "kernels/parts/statements.py", "kernels/parts/layouts.py", "tinygrad_compat/", "emulator/")
INTERNAL = (tinygrad_folder, *(str(PACKAGE/name) for name in OURS_INSIDE))
WIDTH = 160             # characters of a statement that are shown
REMEMBERED = 64         # kernels

_built: dict[UOp, Callable[[], Any]] = {}    # an AST -> what makes it anew, the newest last

def remember(ast:UOp, again:Callable[[], Any]) -> None:
  """A kernel was made, by a function that makes it anew."""
  _built.pop(ast, None)
  _built[ast] = again
  while len(_built) > REMEMBERED: del _built[next(iter(_built))]

def _internal(path:str) -> bool: return path.startswith(INTERNAL) or path.startswith("<")

def _short(text:str) -> str:
  text = " ".join(text.split())
  return text if len(text) <= WIDTH else text[:WIDTH - 1] + "…"

def _relative(path:str) -> str:
  """As short a name of a file as is still found: from the folder of `attn`, or from the current one."""
  for root in (str(PACKAGE.parent), os.getcwd()):
    if path.startswith(root + os.sep): return os.path.relpath(path, root)
  return path

@dataclass(frozen=True)
class Place:
  python: tuple[str, int]|None     # file and line
  line: int|None                   # of the source, from 1
  statement: str

  def __str__(self) -> str:
    """Two lines, of which one is left out where it is not known."""
    found = []
    if self.python is not None:
      file, line = self.python
      found.append(f"{_relative(file)}:{line}: {_short(linecache.getline(file, line))}")
    if self.line is not None: found.append(f"line {self.line} of the source: {_short(self.statement)}")
    return "".join(f"\n  {x}" for x in found)

  @property
  def name(self) -> str:
    """The place in a few words, or nothing."""
    if self.python is not None: return f"{_relative(self.python[0])}:{self.python[1]}"
    return f"line {self.line} of the source" if self.line is not None else ""

NOWHERE = Place(None, None, "")

def _stores(ast:UOp) -> tuple[UOp, ...]:
  """What an AST does, without the parameters that it is only to have."""
  return tuple(u for u in ast.src if u.op is not Ops.PARAM)

class Listing:
  """The places of a program's UOps."""
  def __init__(self, uops:list[UOp], name:str, renderer:Any):
    self.source, self.lines = statements(renderer, uops)
    self.python = self._python(uops, name, renderer)

  @classmethod
  def of(cls, make:Callable[[], UOp], renderer:Any) -> Listing:
    """The places of a program that `make` gives the AST of, which is made and lowered here."""
    made, places = made_with_places(make, _internal)
    listing = cls.__new__(cls)
    listing.source, listing.lines = statements(renderer, lowered_with_places(made, renderer, places))
    listing.python = places
    return listing

  def python_lines(self) -> dict[int, tuple[str, int]]:
    """For each line of the source, from 1, the line of Python that it comes from, where that is known."""
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
      except Exception: continue     # it is being made in other circumstances, and what failed has its own error to show
      if len(same) == len(uops) and all(a is b for a, b in zip(same, uops)): return places
    return {}

  def place(self, u:UOp) -> Place:
    line = self.lines.get(u)
    statement = "" if line is None else self.source.splitlines()[line]
    return Place(self._from(u), None if line is None else line + 1, statement)

  def _from(self, u:UOp) -> tuple[str, int]|None:
    """The line that `u` comes from, or, of one that a pass has put in, the nearest of its sources that has one."""
    seen, level = {u}, [u]
    while level:
      if (found := next((self.python[x] for x in level if self.python.get(x) is not None), None)) is not None: return found
      level = [s for s in dict.fromkeys(s for x in level for s in x.src) if s not in seen and s.op not in _NO_PLACE]
      seen |= set(level)
    return None

_NO_PLACE = (Ops.CONST, Ops.PARAM, Ops.BUFFER, Ops.SPECIAL)
