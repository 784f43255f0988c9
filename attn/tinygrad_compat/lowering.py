"""Lowering of kernels, with or without a device, and where in Python and in the printed source each operation stands (attn/emulator)."""
from __future__ import annotations
import contextlib, gc, os, re, sys
from collections.abc import Callable, Iterator
from typing import Any
import tinygrad
from tinygrad.codegen import full_rewrite_to_sink, line_rewrite, pm_linearize_cleanups, to_program
from tinygrad.codegen.late.linearizer import linearize
from tinygrad.helpers import Context
from tinygrad.renderer import Renderer
from tinygrad.uop.ops import RewriteContext, UOp, UOpMetaClass
from attn.tinygrad_compat.devices import device_of

@contextlib.contextmanager
def without_collections() -> Iterator[None]:
  """Within, Python does not look for cycles of objects: UOps are in none, and walking over all of them took a sixth of a kernel's lowering."""
  enabled = gc.isenabled()
  gc.disable()
  try: yield
  finally:
    if enabled: gc.enable()

def lower(sink:UOp, renderer:Renderer) -> list[UOp]:
  """A kernel's AST (a SINK) -> the linear list of UOps that `renderer` prints, by the steps of tinygrad's own `to_program`."""
  with Context(ALLOW_DEVICE_USAGE=0), without_collections():
    return line_rewrite(linearize(full_rewrite_to_sink(sink, renderer, optimize=sink.tag is None)), pm_linearize_cleanups)

def compile_at_once(kernel:UOp, device:str) -> None:
  """Lowers and compiles the kernel of a CALL now, in this process. tinygrad starts worker processes, which takes longer than a small kernel does,
  where a schedule has more than one to compile."""
  to_program(kernel.src[0], device_of(device).renderer)

# **** where an operation comes from ****
tinygrad_folder = os.path.dirname(os.path.abspath(tinygrad.__file__)) + os.sep

Places = dict[UOp, "tuple[str, int]|None"]   # the file and line that a UOp comes from

@contextlib.contextmanager
def _changed(owner:Any, **new:Any) -> Iterator[None]:
  """Within, attributes of tinygrad's are others."""
  old = {name: getattr(owner, name) for name in new}
  for name, value in new.items(): setattr(owner, name, value)
  try: yield
  finally:
    for name, value in old.items(): setattr(owner, name, value)

def made_with_places(make:Callable[[], Any], internal:Callable[[str], bool]) -> tuple[Any, Places]:
  """What `make` gives, and for each UOp made meanwhile the innermost line of Python that is in no `internal` file."""
  places, create = Places(), UOpMetaClass.__call__
  def here() -> tuple[str, int]|None:
    frame: Any = sys._getframe(2)
    while frame is not None and internal(frame.f_code.co_filename): frame = frame.f_back
    return (frame.f_code.co_filename, frame.f_lineno) if frame is not None else None
  def noted(cls:Any, *args:Any, **kwargs:Any) -> UOp:
    if (made := create(cls, *args, **kwargs)) not in places: places[made] = here()
    return made
  with _changed(UOpMetaClass, __call__=noted): return make(), places

def lowered_with_places(sink:UOp, renderer:Renderer, places:Places) -> list[UOp]:
  """`lower`, with the places of what each pass puts in the place of other UOps added."""
  unified, walk, replace = RewriteContext.unified_rewrite, RewriteContext.walk_rewrite, UOp.replace
  def inherit(new:UOp, old:UOp) -> UOp:
    if places.get(new) is None and (place := places.get(old)) is not None: places[new] = place
    return new
  def noted(rewrite:Callable[..., UOp]) -> Callable[..., UOp]:
    def run(self:RewriteContext, root:UOp) -> UOp:
      result = rewrite(self, root)
      for old, new in self.replace.items(): inherit(new, old)
      return result
    return run
  with (_changed(RewriteContext, unified_rewrite=noted(unified), walk_rewrite=noted(walk)),
        _changed(UOp, replace=lambda self, **kwargs: inherit(replace(self, **kwargs), self))):
    return lower(sink, renderer)

def statements(renderer:Any, uops:list[UOp]) -> tuple[str, dict[UOp, int]]:
  """The source that `renderer` prints for a program, and for each UOp the line of it (from 0) that it is printed in: its own statement, or the one of
  the first UOp that takes it as part of an expression."""
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
    statement = " ".join(kernel[at].split())     # long lines may have been broken since
    own = " ".join(text.split())
    if statement == own or re.fullmatch(rf"[\w ]+ \w+ = {re.escape(own)};?", statement):     # the UOp itself, or a declaration of its value
      lines[u] = line
      line, at = line + kernel[at].count("\n") + 1, at + 1
  stated = set(lines)
  for u in reversed(uops):                # what uses a value comes after it, and has its line by now
    if u in lines: lines |= {s: lines[u] for s in u.src if s not in stated}
  return source, lines
