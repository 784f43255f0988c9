"""Tests of emulated kernels whose workgroups add to the same sums in global memory, by tickets and turns. For each fault there are two kernels, one
with this fault alone and one without it."""
import dataclasses
import numpy as np
import pytest
from tinygrad import Context, Tensor, dtypes
from tinygrad.dtype import AddrSpace
from tinygrad.uop.ops import AxisType, KernelInfo, UOp
from attn.emulator import checks
from attn.emulator.device import register
from attn.ops.atomics import atomic_add, await_turn, pass_turn, settle, ticket
from attn.ops.operation import OPERATIONS

register()
# A ticket is a number that each workgroup gets from an atomic counter. Workgroups take turns: each waits until a second counter reaches its ticket,
# adds, and raises the counter. The emulator runs few or many workgroups at the same time.

GROUPS, WIDTH = 6, 128       # workgroups, and threads of two waves each

class Steps:
  def __init__(self):
    self.register = UOp.placeholder((1,), dtypes.float, 9, AddrSpace.REG)
    self.latest = self.register.after(self.register[0].store(UOp.const(0.0, dtypes.float)))
  @property
  def done(self): return self.latest[0].load()
  def do(self, statement): self.store(self.latest[0], statement)
  def barrier(self): self.latest = self.latest.after(UOp.barrier(self.latest))
  def store(self, at, x): self.latest = self.latest.after(at.store(x))
  def end(self, name, *ranges): return self.latest.end(*ranges).sink(arg=KernelInfo(name, opts_to_apply=()))

def begin(counters):
  # Begins a kernel with tickets from counters[0]. Returns workgroup, thread, whether the thread is the first, the ticket, and an empty list of steps.
  g, t = UOp.range(GROUPS, 0, AxisType.GLOBAL), UOp.range(WIDTH, 1, AxisType.WARP)
  steps, lds = Steps(), UOp.placeholder((1,), dtypes.int, 0, AddrSpace.LOCAL)
  return g, t, t.eq(0), ticket(counters[0], g, t.eq(0), lds=lds[0]), steps

def run(kernel, *tensors, arch="gfx942"):
  # runs a kernel on the emulator with `tensors` as arguments, and returns the value of the first tensor after the run
  with Context(DEV=f"EMU::{arch}"):
    found = Tensor(tensors[0]).realize().custom_kernel(*[Tensor(x).realize() for x in tensors[1:]], fxn=kernel)
    Tensor.realize(*found)
    return found[0].numpy()

@pytest.fixture
def emulated(monkeypatch):
  # a function that runs a kernel on the emulator, with a choice of order and of resident workgroups
  def emulate(kernel, *tensors, order=0, resident=0, arch="gfx942"):
    monkeypatch.setenv("ATTN_EMU_ORDER", str(order))
    monkeypatch.setenv("ATTN_EMU_RESIDENT", str(resident))
    return run(kernel, *tensors, arch=arch)
  return emulate

def says(error, *patterns): return pytest.raises(error, match="".join(f"(?=.*{p})" for p in patterns))

X = np.random.default_rng(1).standard_normal(GROUPS*WIDTH, dtype=np.float32)
SUMS, COUNTERS = np.zeros(WIDTH, np.float32), np.zeros(8, np.int32)
ORDERS, RESIDENTS = range(6), (1, 2, GROUPS - 1, GROUPS, 0)

# ***** sums *****

def summed(*without, number=lambda g, drawn: drawn, twice=False):
  # a kernel whose workgroups add rows to the same sums in turns, without the steps named in `without`
  # `number` computes the number of a workgroup's turn from its index and its ticket; with `twice` one workgroup passes its turn on twice
  def kernel(o, x, counters):
    g, t, first, drawn, steps = begin(counters)
    turn = number(g, drawn)
    value = x[turn*WIDTH + t].load()
    if "await" not in without: steps.do(await_turn(counters[1], turn, first, steps.done))
    if "barrier after" not in without: steps.barrier()
    steps.do(atomic_add(o[t], value, steps.done))
    if "settle" not in without: steps.do(settle(steps.done))
    if "barrier before" not in without: steps.barrier()
    if "pass" not in without: steps.do(pass_turn(counters[1], first, steps.done))
    if twice: steps.do(pass_turn(counters[1], first & turn.eq(2), steps.done))
    return steps.end("summed", g, t)
  return kernel

def in_order(rows):
  total = np.zeros(WIDTH, np.float32)
  for row in rows: total = total + row
  return total

@pytest.mark.parametrize("resident", RESIDENTS)
def test_sums_in_turn_have_the_same_bits_in_every_order(emulated, resident):
  for order in ORDERS:
    np.testing.assert_array_equal(emulated(summed(), SUMS, X, COUNTERS, order=order, resident=resident), in_order(X.reshape(GROUPS, WIDTH)))

def test_sums_in_no_order_have_varied_bits(emulated):
  # Atomic additions happen in a random order on the emulator if nothing makes them wait for each other, whether few or all workgroups run at the same
  # time: the bits of the sums differ between runs. Runs with the same `order` give the same bits.
  kernel = summed("await", "barrier after", "settle", "barrier before", "pass", number=lambda g, drawn: g)
  for resident in (0, 2):
    found = [emulated(kernel, SUMS, X, COUNTERS, order=order, resident=resident) for order in ORDERS]
    for x in found: np.testing.assert_allclose(x, X.astype(np.float64).reshape(GROUPS, WIDTH).sum(0), atol=1e-5)
    assert len({x.tobytes() for x in found}) >= 4
    np.testing.assert_array_equal(emulated(kernel, SUMS, X, COUNTERS, order=3, resident=resident), found[3])

def test_waves_of_a_workgroup_add_in_varied_order(emulated):
  # Two waves of one workgroup that add to the same elements in the same turn add in a random order on the emulator, and the bits of the sums differ
  # between runs.
  def kernel(o, x, counters):
    g, t, first, drawn, steps = begin(counters)
    steps.do(await_turn(counters[1], drawn, first, steps.done))
    steps.barrier()
    for i in range(3): steps.do(atomic_add(o[t % 64], x[(drawn*WIDTH + t*5 + i) % X.size].load(), steps.done))
    steps.do(settle(steps.done))
    steps.barrier()
    steps.do(pass_turn(counters[1], first, steps.done))
    return steps.end("waves", g, t)
  assert len({emulated(kernel, SUMS, X, COUNTERS, order=order).tobytes() for order in ORDERS}) >= 4

# ***** turns *****

def test_deadlock(emulated):
  # The emulator reports a deadlock if a workgroup never raises the counter for which the others wait, or raises it twice. The report names workgroup,
  # counter and line.
  with says(checks.Deadlock, r"summed: waits until data2\[1\] is 1, and it is 0; resident workgroups: 2, all of them waiting; not started: 3",
            r"; workgroup \(2, 0, 0\) waits until data2\[1\] is 2, and it is 0", r"workgroup \(1, 0, 0\), wave 0, lane 0 ",
            "(?s:.)*test_meeting.py:.*await_turn"):
    emulated(summed("pass"), SUMS, X, COUNTERS, resident=2)
  with says(checks.Deadlock, r"waits until data2\[1\] is 3, and it is 6; resident workgroups: 1, all of them waiting; not started: 0"):
    emulated(summed(twice=True), SUMS, X, COUNTERS)

def test_block_numbers_promise_nothing(emulated):
  # Each workgroup of this kernel waits for the workgroups with lower block numbers. The kernel ends if workgroups start in the order of their
  # numbers, or if all run at the same time. If they start in another order and run one at a time, the emulator reports a deadlock.
  kernel = summed(number=lambda g, drawn: g)
  for order, resident in ((0, 1), (0, 2), (1, 0), (2, 0), (3, GROUPS)):
    np.testing.assert_array_equal(emulated(kernel, SUMS, X, COUNTERS, order=order, resident=resident), in_order(X.reshape(GROUPS, WIDTH)))
  with says(checks.Deadlock, "summed"): emulated(kernel, SUMS, X, COUNTERS, order=1, resident=1)

def test_higher_tickets_may_not_be_there(emulated):
  kernel = summed(number=lambda g, drawn: GROUPS - 1 - drawn)
  for order in ORDERS:
    np.testing.assert_array_equal(emulated(kernel, SUMS, X, COUNTERS, order=order), in_order(X.reshape(GROUPS, WIDTH)))
    with says(checks.Deadlock, f"resident workgroups: {GROUPS - 1}, all of them waiting; not started: 1"):
      emulated(kernel, SUMS, X, COUNTERS, order=order, resident=GROUPS - 1)

def ring(members):
  # a kernel in which groups of `members` workgroups with consecutive tickets add their rows to the group's `members` sums
  # first to its own sum, then to the next, so that no two workgroups need the same sum at the same time
  def kernel(o, x, counters):
    g, t, first, drawn, steps = begin(counters)
    value, me, base = x[drawn*WIDTH + t].load(), drawn % members, drawn - drawn % members
    for step in range(members):
      block = base + (me + step) % members
      steps.do(await_turn(counters[1 + block], UOp.const(step, dtypes.int), first, steps.done))
      steps.barrier()
      steps.do(atomic_add(o[block*WIDTH + t], value, steps.done))
      steps.do(settle(steps.done))
      steps.barrier()
      steps.do(pass_turn(counters[1 + block], first, steps.done))
    return steps.end("ring", g, t)
  return kernel

@pytest.mark.parametrize("members", (2, 3, 6))
def test_a_ring_needs_all_its_members(emulated, members):
  rows = X.reshape(GROUPS, WIDTH)
  expected = np.stack([in_order(rows[b - b % members + (b % members - np.arange(members)) % members]) for b in range(GROUPS)])
  for order in ORDERS:
    for resident in (members, members + 1, 0):
      found = emulated(ring(members), np.zeros(GROUPS*WIDTH, np.float32), X, COUNTERS, order=order, resident=resident)
      np.testing.assert_array_equal(found.reshape(GROUPS, WIDTH), expected)
    with says(checks.Deadlock, "ring: waits until", f"resident workgroups: {members - 1}, all of them waiting"):
      emulated(ring(members), np.zeros(GROUPS*WIDTH, np.float32), X, COUNTERS, order=order, resident=members - 1)

@pytest.mark.parametrize("order", (0, 1))
def test_a_turn_of_several_waves(emulated, order):
  # Workgroups of several waves add to the same sums in turns. The emulator reports an error if a step is missing: the barrier after the wait for the
  # turn, each wave's wait for its own additions (on AMD), or the barrier before the next workgroup gets its turn.
  line = "(?s:.)*test_meeting.py:"
  with says(checks.AtomicRace, r"adds to data0, where wave 1 of workgroup .* has added in an earlier turn",
            "wave 0 has waited for this turn, but no barrier has followed", line): emulated(summed("barrier after"), SUMS, X, COUNTERS, order=order)
  for missing in ("settle", "barrier before"):
    with says(checks.NotWaitedFor, "passes a turn, but additions by wave 1, started at test/emulator/test_meeting.py:.*, may not be complete", line):
      emulated(summed(missing), SUMS, X, COUNTERS, order=order)
  emulated(summed("settle"), SUMS, X, COUNTERS, order=order, arch="sm_90")     # a barrier is enough on NVIDIA

def test_turns_of_single_waves_need_no_barriers(emulated):
  # Workgroups add to the same sums in turns, given by counters. Where the waves of a workgroup each use a counter of their own, the sums are right
  # without barriers.
  def kernel(o, x, counters):
    g, t, _, drawn, steps = begin(counters)
    first, counter, value = (t % 64).eq(0), counters[1 + t//64], x[drawn*WIDTH + t].load()
    steps.do(await_turn(counter, drawn, first, steps.done))
    steps.do(atomic_add(o[t], value, steps.done))
    steps.do(pass_turn(counter, first, steps.done))
    return steps.end("each_wave", g, t)
  for order in ORDERS:
    for resident in (1, 3, 0):
      np.testing.assert_array_equal(emulated(kernel, SUMS, X, COUNTERS, order=order, resident=resident), in_order(X.reshape(GROUPS, WIDTH)))

# ***** atomic operations beside others *****

def zeroed(ordered, also_settled=True):
  # a kernel in which the workgroup with ticket 0 sets the sums to zero; if `ordered`, before the others add
  def kernel(o, x, counters):
    g, t, first, drawn, steps = begin(counters)
    value = x[drawn*WIDTH + t].load()
    steps.store(o[t.valid(drawn.eq(0))], UOp.const(0.0, dtypes.float))
    # otherwise this workgroup lets the others add before its own stores are complete
    if also_settled: steps.do(settle(steps.done))
    steps.barrier()
    steps.do(pass_turn(counters[1], first & drawn.eq(0), steps.done))
    if ordered: steps.do(await_turn(counters[1], UOp.const(1, dtypes.int), first, steps.done))
    steps.barrier()
    steps.do(atomic_add(o[(t + 64) % WIDTH], value, steps.done))
    return steps.end("zeroed", g, t)
  return kernel

def test_plain_stores_beside_additions(emulated):
  junk, expected = np.full(WIDTH, 7, np.float32), np.roll(X.astype(np.float64).reshape(GROUPS, WIDTH).sum(0), 64)
  for order in ORDERS:
    for resident in (1, 3, 0):
      np.testing.assert_allclose(emulated(zeroed(True), junk, X, COUNTERS, order=order, resident=resident), expected, atol=1e-5)
  with says(checks.AtomicRace, r"zeroed: adds to data0\[\d+\] \(elements of 4 bytes\), which wave \d of workgroup \(0, 0, 0\) writes at test",
            "an atomic and another access, with no defined order; workgroup .1, 0, 0., wave"): emulated(zeroed(False), junk, X, COUNTERS)
  for order in (1, 2):
    with says(checks.AtomicRace, r"data0"): emulated(zeroed(False), junk, X, COUNTERS, order=order)
  with says(checks.AtomicRace, r"adds to data0", r"workgroup \(0, 0, 0\), wave 0"):      # the other wave's stores may not be complete
    emulated(zeroed(True, also_settled=False), junk, X, COUNTERS)

def rounded(waits):
  # a kernel in which all workgroups add to sums, and the one with the last ticket writes the result
  def kernel(o, sums, x, counters):
    g, t, first, drawn, steps = begin(counters)
    steps.do(atomic_add(sums[t], x[drawn*WIDTH + t].load(), steps.done))
    steps.do(settle(steps.done))
    steps.barrier()
    steps.do(pass_turn(counters[1], first, steps.done))
    last = drawn.eq(GROUPS - 1)
    # without the wait for all others this is a fault
    if waits: steps.do(await_turn(counters[1], UOp.const(GROUPS, dtypes.int), first & last, steps.done))
    steps.barrier()
    steps.store(o[t.valid(last)], sums.after(steps.latest)[t.valid(last)].load()*2.0)
    return steps.end("rounded", g, t)
  return kernel

def test_plain_loads_beside_additions(emulated):
  for order in ORDERS:
    for resident in (1, 2, 0):
      found = emulated(rounded(True), np.zeros(WIDTH, np.float32), SUMS, X, COUNTERS, order=order, resident=resident)
      np.testing.assert_allclose(found, 2*X.astype(np.float64).reshape(GROUPS, WIDTH).sum(0), atol=1e-5)
    with says(checks.AtomicRace, r"rounded: reads data1\[\d+\].*, which wave \d of workgroup \(\d, 0, 0\) adds to at"):
      emulated(rounded(False), np.zeros(WIDTH, np.float32), SUMS, X, COUNTERS, order=order)

def test_an_operation_must_say_that_it_is_atomic(monkeypatch):
  monkeypatch.setitem(OPERATIONS, "atomic_add", dataclasses.replace(OPERATIONS["atomic_add"], atomic=False))
  def kernel(o):
    t, steps = UOp.range(WIDTH, 0, AxisType.WARP), Steps()
    steps.do(atomic_add(o[t], UOp.const(1.0, dtypes.float), steps.done))
    return steps.end("unnoticed", t)
  with pytest.raises(ValueError, match="the operation atomic_add works on global memory that workgroups share: it must be defined with atomic=True"):
    run(kernel, SUMS)

# ***** settings *****

def test_settings(emulated, monkeypatch):
  with pytest.raises(ValueError, match=r"ATTN_EMU_ORDER='x': must be a whole number from 0 on"): emulated(summed(), SUMS, X, COUNTERS, order="x")
  with pytest.raises(ValueError, match="ATTN_EMU_RESIDENT='-1'"): emulated(summed(), SUMS, X, COUNTERS, resident=-1)
  monkeypatch.setenv("ATTN_EMU_CHECKS", "0")
  np.testing.assert_array_equal(emulated(summed("settle", "barrier after"), SUMS, X, COUNTERS), in_order(X.reshape(GROUPS, WIDTH)))
