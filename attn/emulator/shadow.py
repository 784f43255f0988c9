"""Shadow memory of LDS: it records which waves wrote and read each location, and finds faulty accesses. Begin with `LdsShadow`."""
from __future__ import annotations
from dataclasses import dataclass
from typing import Any
import numpy as np
from numpy.typing import NDArray
from attn.emulator.checks import Finding, LdsRace, NotWaitedFor, Span, UninitialisedRead
from attn.emulator.threads import Operand, Product, Threads

Array = NDArray[Any]
UNDER_WAY = 2**30   # tags of writes that have not arrived begin here, above the tags of all intervals

class Spans:
  """Record of the accessed ranges of a buffer, with the interval of the last access to each."""
  # for each span: the last interval (time between two barriers) in which a wave accessed the span
  def __init__(self) -> None: self.last, self.latest = dict[Span, int](), 0
  def add(self, span:Span, interval:int) -> None: self.last[span] = self.latest = interval
  def clear(self) -> None: self.last, self.latest = {}, 0
  def meet(self, span:Span, since:int) -> bool:
    """Returns whether any access in interval `since` or later overlaps `span`, a range of locations. An interval is the time between two barriers."""
    low, high = span
    return self.latest >= since and any(n >= since and a < high and low < b for (a, b), n in self.last.items())

PENDING = 64   # number of reads that are kept in a list before they are written to the planes

class LdsShadow:
  """Shadow of an LDS buffer: for each location, the wave that wrote it last, and when each wave read it last."""
  # A location is `unit` bytes, which is the narrowest access in the kernel. An interval is the time between two barriers. Intervals are counted per
  # wave: a barrier that only some waves reach ends the interval of those waves only. Accesses of two waves in intervals of the same number may
  # happen at the same time, even if the waves are at different points of the program. So an access is safe only if a barrier lies between it and the
  # other wave's access, so that the later access is in a later interval.
  #
  # `writer` holds a tag for each location: interval * stride + wave of the last write, or 0 for a location that was never written. If the last write
  # is an asynchronous copy that is not complete, the tag has the index of this operation, counted from `UNDER_WAY` on, in place of the interval.
  # `reader` holds for each wave an array, called a plane, with the interval in which the wave last read each location.
  #
  # Locations are checked only if a conflict is possible: each access has a span, and accesses whose spans don't overlap can't conflict. So most
  # reads are never recorded in the planes of `reader`. A read is first kept in a list. When a write overlaps a read in the list, all reads of the
  # list are recorded in the planes, in order. Reads from before the last barrier are dropped.
  def __init__(self, f:Threads, unit:int, locations:int):
    self.f, self.unit, self.waves = f, unit, f.waves
    self.total = locations * f.workgroups
    self.writer = np.zeros(self.total, np.int32)
    self.reader = np.zeros(self.total * self.waves, np.int32) if self.waves > 1 else None
    self.plane = f.wave_of.astype(np.int64) * self.total
    self.written_at, self.read_at = Spans(), Spans()      # since the last barrier
    self.pending: list[tuple[Array, int, Array|None, Any, int]] = []   # list of reads: at, per, active, intervals of the waves, the last interval
    self.complete = False               # every location has been written
    self.full: set[Span] = set()        # spans that all workgroups have written
    self.looked: dict[Span, int] = {}   # other spans, with the interval in which they were last checked
    self.arriving = list[Span]()        # spans that copies under way write
    self.holding = list[tuple[Product, LdsOperand]]()    # operands that products under way read
    self.first = UNDER_WAY//f.stride    # interval that stands for operation 0

  def barrier(self, everyone:bool) -> None:
    if not self.complete and self.written_at.latest: self.complete = bool(self.writer.all())
    if everyone:
      self.written_at.clear()
      self.read_at.clear()
      self.pending.clear()

  def all_written(self, span:Span) -> bool:
    """Returns True only if every workgroup has written all locations of `span`, a range (first, end). A False may be out of date until the next
    barrier."""
    if self.complete or span in self.full: return True
    # to save time, a span is looked at only once between two barriers: until the next one the answer stays False
    if self.looked.get(span) == self.f.since: return False
    self.looked[span] = self.f.since
    if (full := bool(self.writer.reshape(self.f.workgroups, -1)[:, span[0]:span[1]].all())): self.full.add(span)
    return full
  def coming(self, span:Span) -> bool:
    """Returns whether an asynchronous copy that is not complete writes to any location of `span`, a range (first, end) of locations."""
    return any(_overlap(x, span) for x in self.arriving)
  def kept(self, span:Span) -> bool:
    """Returns whether an asynchronous matrix product that is not complete reads any location of `span`, a range (first, end) of locations."""
    return any(_overlap(x.span, span) for _, x in self.holding)

  def foreign(self, tag:Array) -> Array:
    """Returns a bool for each thread: whether another wave wrote the thread's location last, with no barrier since then. `tag` says who wrote, and
    when."""
    # `tag` (threads,) says when and by which wave each thread's location was last written: interval * stride + wave
    f, late = self.f, tag >= self.f.tag_floor
    return late & (tag != f.tag) if f.settled else late & (tag % f.stride != f.wave_of)

  # ***** operations that are under way *****

  def send(self, at:Array, by:Array, operation:int) -> None:
    """Records that an asynchronous store, number `operation`, will write to the locations `at`; the threads `by` have started it."""
    # until the store is complete, an access to these locations is an error, even by the wave that started the store
    self.writer[at] = (self.first + operation)*self.f.stride + self.f.wave_of[by]
  def arrive(self, at:Array, by:Array, span:Span) -> None:
    self.writer[at] = self.f.tag[by]
    self.written_at.add(span, self.f.last_interval)
  def held(self, at:Array) -> Array:
    """Returns an int for each location `at`: 0, or 1 plus the number of an asynchronous matrix product that still reads the location."""
    # before the product is waited for, a write to such a location is an error
    held = np.zeros(self.total, np.int32)
    for product, x in self.holding:
      by = product.threads if x.active is None else product.threads & x.active
      chunks(held, x.per)[x.at[by]] = _repeated(np.array([product.number + 1]), x.per)[0]
    return held[at]

  def _unfinished(self, tag:Array, active:Array|None) -> Finding|None:
    if not self.arriving or (bad := _some(tag >= self.first*self.f.stride, active)) is None: return None
    return Finding(NotWaitedFor, bad, tag//self.f.stride - self.first, "writes")

  # ***** accesses *****
  # The `clean_` methods check all locations of a thread's access at once: they read its int32 tags as one chunk, because numpy gathers and scatters a
  # chunk as fast as a number. If an access may be faulty, the `on_` methods check each location separately.

  def clean_read(self, at:Array, per:int, active:Array|None, span:Span) -> bool:
    """Records a read by each active thread of `per` locations, from `at*per` on. Returns False, and records nothing, if the read may be faulty."""
    # `span` is the range of locations that all the threads read; a read that may be faulty is not recorded
    meets = self.waves > 1 and self.written_at.meet(span, self.f.since)
    if (coming := self.coming(span)) or meets or not self.all_written(span):
      tag = chunks(self.writer, per).take(at).view(np.int32).reshape(-1, per)
      if not self.complete and not tag.all(): return False
      if (coming and self._unfinished(tag, None) is not None) or (meets and not self._settled(tag)): return False
    self.note_read(at, per, active, span)
    return True

  def clean_write(self, at:Array, per:int, active:Array|None, span:Span) -> bool:
    """Records a write by each active thread to `per` locations, from `at*per` on. Returns False if the write may be faulty."""
    # `span` is the range of locations that all the threads write. A write that may be faulty is not recorded, except one in which two waves write the
    # same location: recording it is what shows the fault.
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
    """Returns whether every thread's locations were last written before the last barrier or by the thread's own wave; `tag` says when and by which
    wave."""
    # `tag` (threads, locations) says when and by which wave each location was written
    f, floor = self.f, np.broadcast_to(self.f.tag_floor, self.f.T)[:, None]
    if not (late := tag >= floor).any(): return True
    return not (late & (tag % f.stride != f.wave_of[:, None])).any()

  def on_read(self, at:Array, active:Array|None, span:Span) -> Finding|None:
    """Records a read by each active thread of the location `at`. Returns a Finding if the read is faulty, otherwise None."""
    f, meets = self.f, self.waves > 1 and self.written_at.meet(span, self.f.since)
    if (coming := self.coming(span)) or meets or not self.complete:
      tag = self.writer[at]
      if not self.complete and (bad := _some(tag == 0, active)) is not None: return Finding(UninitialisedRead, bad)
      if coming and (wrong := self._unfinished(tag, active)) is not None: return wrong
      if meets and (bad := _some(self.foreign(tag), active)) is not None: return Finding(LdsRace, bad, tag % f.stride, "written")
    self.note_read(at, 1, active, span)
    return None

  def note_read(self, at:Array, per:int, active:Array|None, span:Span) -> None:
    """Records a read by each active thread of `per` locations, from `at*per` on, without a check."""
    if self.reader is None: return
    self.read_at.add(span, self.f.last_interval)
    self.pending.append((at, per, active, self.f.interval_of, self.f.last_interval))
    if len(self.pending) >= PENDING: self._settle_reads()

  def readers(self, span:Span) -> Array|None:
    """Returns, for each wave and location, the interval (time between barriers) of the wave's last read; None if no read of `span` is recent."""
    if self.reader is None or not self.read_at.meet(span, self.f.since): return None
    self._settle_reads()
    return self.reader

  def _settle_reads(self) -> None:
    """Updates `reader`, the array with the time of each wave's last read of each location, by the reads listed in `pending`."""
    assert self.reader is not None
    for at, per, active, interval, last in self.pending:
      # reads from before the last barrier are left out
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
  """Locations of LDS that an asynchronous matrix product reads: for each active thread, `per` locations from `at*per` on."""
  shadow: LdsShadow
  at: Array
  per: int
  active: Array|None
  span: Span
  def hold(self, product:Product) -> None: self.shadow.holding.append((product, self))
  def release(self, product:Product) -> None: self.shadow.holding = [x for x in self.shadow.holding if x[0] is not product]
  def read_until_now(self, threads:Array) -> None:
    """Records that the matrix product read these locations until `threads` had waited for the end of the product, which is now."""
    # without a barrier after that, a write to these locations by another wave is an error
    self.shadow.note_read(self.at, self.per, threads if self.active is None else threads & self.active, self.span)

def chunks(x:Array, per:int) -> Array:
  """Returns the int32 array x viewed as wider elements, each of `per` numbers, so that numpy copies `per` numbers as one element."""
  # the dtype only serves to copy whole chunks
  return x.view({1: np.int32, 2: np.uint64, 4: np.complex128}[per])
def _repeated(x:Array, per:int) -> Array: return chunks(np.repeat(x.astype(np.int32, copy=False), per), per)

def _some(bad:Array, active:Array|None) -> Array|None:
  # None says that no active thread is bad
  if not bad.any(): return None
  if active is not None: bad = bad & active
  return bad if bad.any() else None

def _overlap(a:Span, b:Span) -> bool: return a[0] < b[1] and b[0] < a[1]
