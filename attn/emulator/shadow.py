"""The shadow of LDS: who wrote and who read each location, and what is wrong with an access to it."""
from __future__ import annotations
from dataclasses import dataclass
from typing import Any
import numpy as np
from numpy.typing import NDArray
from attn.emulator.checks import Finding, LdsRace, NotWaitedFor, Span, UninitialisedRead
from attn.emulator.threads import Operand, Product, Threads

Array = NDArray[Any]
UNDER_WAY = 2**30   # tags of writes that have not arrived begin here: later than every interval

class Spans:
  """Where some buffer was accessed: the spans, each with the last interval in which a wave did it."""
  def __init__(self) -> None: self.last, self.latest = dict[Span, int](), 0
  def add(self, span:Span, interval:int) -> None: self.last[span] = self.latest = interval
  def clear(self) -> None: self.last, self.latest = {}, 0
  def meet(self, span:Span, since:int) -> bool:
    """Whether one of them, of interval `since` or later, has a location of `span`."""
    low, high = span
    return self.latest >= since and any(n >= since and a < high and low < b for (a, b), n in self.last.items())

PENDING = 64   # reads that are kept as they are before they go to the planes

class LdsShadow:
  """Who wrote and who read each location of a LOCAL buffer since the last barrier. A location is `unit` bytes: the narrowest access in the kernel.

  `writer` holds interval * stride + wave of the last write (0: never written), `reader` one plane per wave with the interval of its last read.
  Intervals are counted per wave: a barrier that only some reach ends the interval of those alone. A wave that is an interval ahead comes to a place
  in the program later than the others do, so what it did in its interval n happens along with what they do in theirs: an access is safe only after a
  barrier, that is in a later interval, whatever the order in which the program has them.

  A write that is under way has the number of its operation in place of the interval, from `UNDER_WAY` on.

  Locations are looked at only where it may matter: each access has its span, and two whose spans have nothing in common don't meet. So most reads
  never get to the planes of `reader`: they wait, in their order, until a write meets one, and those before the last barrier are dropped."""
  def __init__(self, f:Threads, unit:int, locations:int):
    self.f, self.unit, self.waves = f, unit, f.waves
    self.total = locations * f.workgroups
    self.writer = np.zeros(self.total, np.int32)
    self.reader = np.zeros(self.total * self.waves, np.int32) if self.waves > 1 else None
    self.plane = f.wave_of.astype(np.int64) * self.total
    self.written_at, self.read_at = Spans(), Spans()      # since the last barrier
    self.pending: list[tuple[Array, int, Array|None, Any, int]] = []   # reads: at, per, active, the interval, the last one
    self.complete = False               # no location is unwritten
    self.full: set[Span] = set()      # spans that are written in all workgroups,
    self.looked: dict[Span, int] = {} # and when others were last looked at
    self.arriving = list[Span]()        # what copies under way write
    self.holding = list[tuple[Product, LdsOperand]]()    # what products under way read
    self.first = UNDER_WAY//f.stride    # the number of operation 0, as an interval

  def barrier(self, everyone:bool) -> None:
    if not self.complete and self.written_at.latest: self.complete = bool(self.writer.all())
    if everyone:
      self.written_at.clear()
      self.read_at.clear()
      self.pending.clear()

  def all_written(self, span:Span) -> bool:
    """Whether every workgroup has written these locations; False where nobody has looked since the last barrier."""
    if self.complete or span in self.full: return True
    if self.looked.get(span) == self.f.since: return False
    self.looked[span] = self.f.since
    if (full := bool(self.writer.reshape(self.f.workgroups, -1)[:, span[0]:span[1]].all())): self.full.add(span)
    return full
  def coming(self, span:Span) -> bool:
    """Whether a copy under way writes to one of these locations."""
    return any(_overlap(x, span) for x in self.arriving)
  def kept(self, span:Span) -> bool:
    """Whether a product under way reads one of them."""
    return any(_overlap(x.span, span) for _, x in self.holding)

  def foreign(self, tag:Array) -> Array:
    """Where the last write, by another wave, need not have been done."""
    f, late = self.f, tag >= self.f.tag_floor
    return late & (tag != f.tag) if f.settled else late & (tag % f.stride != f.wave_of)

  # ***** operations that are under way *****

  def send(self, at:Array, by:Array, operation:int) -> None:
    """A store that threads `by` have started: nobody may touch those locations until it arrives, not even their own wave."""
    self.writer[at] = (self.first + operation)*self.f.stride + self.f.wave_of[by]
  def arrive(self, at:Array, by:Array, span:Span) -> None:
    self.writer[at] = self.f.tag[by]
    self.written_at.add(span, self.f.last_interval)
  def held(self, at:Array) -> Array:
    """The number + 1 of a product under way that reads the locations `at`; 0 for none. Nobody may write those until the product is waited for."""
    held = np.zeros(self.total, np.int32)
    for product, x in self.holding:
      by = product.threads if x.active is None else product.threads & x.active
      chunks(held, x.per)[x.at[by]] = _repeated(np.array([product.number + 1]), x.per)[0]
    return held[at]

  def _unfinished(self, tag:Array, active:Array|None) -> Finding|None:
    if not self.arriving or (bad := _some(tag >= self.first*self.f.stride, active)) is None: return None
    return Finding(NotWaitedFor, bad, tag//self.f.stride - self.first, "writes")

  # ***** accesses *****
  # Each of the locations of an access is looked at by itself where something may be wrong with one; else all of them at once, as one chunk of as many
  # int32: numpy gathers and scatters chunks as fast as numbers.

  def clean_read(self, at:Array, per:int, active:Array|None, span:Span) -> bool:
    """Notes the read of `per` neighbouring locations from `at*per` on (T,), unless something may be wrong with it."""
    meets = self.waves > 1 and self.written_at.meet(span, self.f.since)
    if (coming := self.coming(span)) or meets or not self.all_written(span):
      tag = chunks(self.writer, per).take(at).view(np.int32).reshape(-1, per)
      if not self.complete and not tag.all(): return False
      if (coming and self._unfinished(tag, None) is not None) or (meets and not self._settled(tag)): return False
    self.note_read(at, per, active, span)
    return True

  def clean_write(self, at:Array, per:int, active:Array|None, span:Span) -> bool:
    """Notes the write of such locations likewise."""
    f, writer = self.f, chunks(self.writer, per)
    if self.kept(span): return False
    meets = self.waves > 1 and self.written_at.meet(span, f.since)
    if (coming := self.coming(span)) or meets:
      tag = writer.take(at).view(np.int32).reshape(-1, per)
      if (coming and self._unfinished(tag, None) is not None) or (meets and not self._settled(tag)): return False
    if (reader := self.readers(span)) is not None:
      planes = chunks(reader, per).reshape(self.waves, -1)
      for wave in range(self.waves):
        seen = planes[wave].take(at).view(np.int32).reshape(-1, per).max(axis=1) >= f.seen_of
        if seen.any() and (seen & (f.wave_of != wave)).any(): return False
    self.written_at.add(span, f.last_interval)
    to, tags = (at, f.tag) if active is None else (at[active], f.tag[active])
    writer[to] = _repeated(tags, per)
    return self.waves == 1 or bool((writer.take(to).view(np.int32).reshape(-1, per) == tags[:, None]).all())

  def _settled(self, tag:Array) -> bool:
    """Whether the last writes of (T, locations) need not be looked at: all are done, or the wave's own."""
    f, floor = self.f, np.broadcast_to(self.f.tag_floor, self.f.T)[:, None]
    if not (late := tag >= floor).any(): return True
    return not (late & (tag % f.stride != f.wave_of[:, None])).any()

  def on_read(self, at:Array, active:Array|None, span:Span) -> Finding|None:
    """Notes the read of locations `at` (T,); returns what is wrong with it."""
    f, meets = self.f, self.waves > 1 and self.written_at.meet(span, self.f.since)
    if (coming := self.coming(span)) or meets or not self.complete:
      tag = self.writer[at]
      if not self.complete and (bad := _some(tag == 0, active)) is not None: return Finding(UninitialisedRead, bad)
      if coming and (wrong := self._unfinished(tag, active)) is not None: return wrong
      if meets and (bad := _some(self.foreign(tag), active)) is not None: return Finding(LdsRace, bad, tag % f.stride, "written")
    self.note_read(at, 1, active, span)
    return None

  def note_read(self, at:Array, per:int, active:Array|None, span:Span) -> None:
    """Notes the read of `per` neighbouring locations from `at*per` on."""
    if self.reader is None: return
    self.read_at.add(span, self.f.last_interval)
    self.pending.append((at, per, active, self.f.interval_of, self.f.last_interval))
    if len(self.pending) >= PENDING: self._settle_reads()

  def readers(self, span:Span) -> Array|None:
    """The planes that say when each wave has read each location, if a read that matters meets the span."""
    if self.reader is None or not self.read_at.meet(span, self.f.since): return None
    self._settle_reads()
    return self.reader

  def _settle_reads(self) -> None:
    """Reads that have waited go to the planes, but for those that are over."""
    assert self.reader is not None
    for at, per, active, interval, last in self.pending:
      if last < self.f.since: continue
      to, intervals = self.plane//per + at, _repeated(np.broadcast_to(interval, self.f.T), per)
      if active is None: chunks(self.reader, per)[to] = intervals
      else: chunks(self.reader, per)[to[active]] = intervals[active]
    self.pending.clear()

  def on_write(self, at:Array, active:Array|None, span:Span) -> Finding|None:
    f, meets = self.f, self.waves > 1 and self.written_at.meet(span, self.f.since)
    if (coming := self.coming(span)) or meets:
      tag = self.writer[at]
      if coming and (wrong := self._unfinished(tag, active)) is not None: return wrong
      if meets and (bad := _some(self.foreign(tag), active)) is not None: return Finding(LdsRace, bad, tag % f.stride, "written")
    if (reader := self.readers(span)) is not None:
      for wave in range(self.waves):
        seen = reader[wave*self.total + at] >= f.seen_of
        if seen.any() and (bad := _some(seen & (f.wave_of != wave), active)) is not None:
          return Finding(LdsRace, bad, np.full_like(f.wave_of, wave), "read")
    if self.kept(span) and (bad := _some((held := self.held(at)) > 0, active)) is not None: return Finding(NotWaitedFor, bad, held - 1, "reads")
    self.written_at.add(span, f.last_interval)
    if active is None: self.writer[at] = f.tag
    else: self.writer[at[active]] = f.tag[active]
    if self.waves > 1 and (bad := _some(self.writer[at] != f.tag, active)) is not None:
      return Finding(LdsRace, bad, self.writer[at] % f.stride, "written")
    return None

@dataclass
class LdsOperand(Operand):
  """Locations of LDS that a product reads: `per` neighbouring ones from `at*per` on, in the active threads."""
  shadow: LdsShadow
  at: Array
  per: int
  active: Array|None
  span: Span
  def hold(self, product:Product) -> None: self.shadow.holding.append((product, self))
  def release(self, product:Product) -> None: self.shadow.holding = [x for x in self.shadow.holding if x[0] is not product]
  def read_until_now(self, threads:Array) -> None:
    """Who writes next has to be a barrier later."""
    self.shadow.note_read(self.at, self.per, threads if self.active is None else threads & self.active, self.span)

def chunks(x:Array, per:int) -> Array:
  """int32 as chunks of `per` of them, copied and never interpreted."""
  return x.view({1: np.int32, 2: np.uint64, 4: np.complex128}[per])
def _repeated(x:Array, per:int) -> Array:
  """Each number of x as a chunk of `per` of them."""
  return chunks(np.repeat(x.astype(np.int32, copy=False), per), per)

def _some(bad:Array, active:Array|None) -> Array|None:
  """`bad` restricted to the active threads, or None if that leaves nobody."""
  if not bad.any(): return None
  if active is not None: bad = bad & active
  return bad if bad.any() else None

def _overlap(a:Span, b:Span) -> bool: return a[0] < b[1] and b[0] < a[1]
