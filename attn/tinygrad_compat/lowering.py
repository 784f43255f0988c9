"""Lowering of kernels, with or without a device: from a kernel's AST to the list of UOps that a renderer turns into source. For the emulator also the
place of each operation in Python and in the source."""
from __future__ import annotations
import contextlib, gc, os, re, sys
from collections.abc import Callable, Iterator
from typing import Any
import tinygrad
from tinygrad.codegen import full_rewrite_to_sink, line_rewrite, pm_linearize_cleanups
from tinygrad.codegen.late.linearizer import linearize
from tinygrad.helpers import Context
from tinygrad.renderer import Renderer
from tinygrad.uop.ops import RewriteContext, UOp, UOpMetaClass
from attn.tinygrad_compat.caches import ast_of

@contextlib.contextmanager
def without_collections() -> Iterator[None]:
  """Context in which Python's garbage collector does not run."""
  # UOps form no cycles, and the search took a sixth of the time of a kernel's lowering.
  enabled = gc.isenabled()
  gc.disable()
  try: yield
  finally:
    if enabled: gc.enable()

def lower(sink:UOp, renderer:Renderer) -> list[UOp]:
  """Makes from a kernel's AST the list of UOps that `renderer` turns into source, by the steps of tinygrad's own `to_program`."""
  with Context(ALLOW_DEVICE_USAGE=0), without_collections():
    return line_rewrite(linearize(full_rewrite_to_sink(sink, renderer, optimize=sink.tag is None)), pm_linearize_cleanups)

# **** places of operations ****
tinygrad_folder = os.path.dirname(os.path.abspath(tinygrad.__file__)) + os.sep

Places = dict[UOp, "tuple[str, int]|None"]   # UOp -> file and line that it comes from

@contextlib.contextmanager
def with_attributes(owner:Any, **new:Any) -> Iterator[None]:
  """Context in which the attributes `new` of the object `owner` have other values."""
  old = {name: getattr(owner, name) for name in new}
  for name, value in new.items(): setattr(owner, name, value)
  try: yield
  finally:
    for name, value in old.items(): setattr(owner, name, value)

def made_with_places(make:Callable[[], Any], internal:Callable[[str], bool]) -> tuple[Any, Places]:
  """Returns (result of `make`, {UOp: (file, line) of the Python code that made it}); code in files that `internal` accepts does not count."""
  # UOps of a cached AST would not be made again.
  ast_of.cache_clear()
  places, create = Places(), UOpMetaClass.__call__
  # The place is that of the innermost function on Python's stack whose file is not `internal`.
  def here() -> tuple[str, int]|None:
    frame: Any = sys._getframe(2)
    while frame is not None and internal(frame.f_code.co_filename): frame = frame.f_back
    return (frame.f_code.co_filename, frame.f_lineno) if frame is not None else None
  def noted(cls:Any, *args:Any, **kwargs:Any) -> UOp:
    if (made := create(cls, *args, **kwargs)) not in places: places[made] = here()
    return made
  with with_attributes(UOpMetaClass, __call__=noted): return make(), places

def lowered_with_places(sink:UOp, renderer:Renderer, places:Places) -> list[UOp]:
  """Lowers a kernel as `lower` does. In `places`, a UOp that replaces an older UOp gets the (file, line) of the older UOp."""
  unified, walk, replace = RewriteContext.unified_rewrite, RewriteContext.walk_rewrite, UOp.replace
  # A UOp that replaces another one gets its place.
  def inherit(new:UOp, old:UOp) -> UOp:
    if places.get(new) is None and (place := places.get(old)) is not None: places[new] = place
    return new
  def noted(rewrite:Callable[..., UOp]) -> Callable[..., UOp]:
    def run(self:RewriteContext, root:UOp) -> UOp:
      result = rewrite(self, root)
      for old, new in self.replace.items(): inherit(new, old)
      return result
    return run
  with (with_attributes(RewriteContext, unified_rewrite=noted(unified), walk_rewrite=noted(walk)),
        with_attributes(UOp, replace=lambda self, **kwargs: inherit(replace(self, **kwargs), self))):
    return lower(sink, renderer)

def statements(renderer:Any, uops:list[UOp]) -> tuple[str, dict[UOp, int]]:
  """Returns the source that a renderer makes of a program, and for each UOp its line in the source, counted from 0."""
  # This is the line of the UOp's own statement, or of the statement of the first UOp that uses it in an expression.
  printed: list[tuple[UOp, str]] = []
  rules = renderer.string_rewrite
  class Noted:
    def rewrite(self, u:UOp, ctx:Any=None) -> str|None:
      if (text := rules.rewrite(u, ctx)) is not None: printed.append((u, text))
      return text
  renderer.string_rewrite = Noted()
  try: name, kernel, buffers = renderer._render(uops)
  finally: renderer.string_rewrite = rules
  source, at, lines = renderer.render_kernel(name, kernel, buffers, uops), 0, dict[UOp, int]()
  line = source[:source.index("\n".join(kernel))].count("\n")
  for u, text in printed:
    if at == len(kernel): break
    statement = " ".join(kernel[at].split())     # `render_kernel` may have broken long lines
    own = " ".join(text.split())
    if statement == own or re.fullmatch(rf"[\w ]+ \w+ = {re.escape(own)};?", statement):     # a statement, or a declaration of the value
      lines[u] = line
      line, at = line + kernel[at].count("\n") + 1, at + 1
  stated = set(lines)
  for u in reversed(uops):                # uses of a value come after it, and already have their lines
    if u in lines: lines |= {s: lines[u] for s in u.src if s not in stated}
  return source, lines
