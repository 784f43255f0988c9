"""Tests of the emulator's checks: the emulator stops a kernel with each kind of fault, and runs the corrected kernel."""
import dataclasses
import numpy as np
import pytest
from tinygrad import Context, Tensor, dtypes
from tinygrad.dtype import AddrSpace
from tinygrad.uop.ops import AxisType, KernelInfo, Ops, UOp
from attn.emulator import checks, last_run
from attn.emulator.device import register
from attn.ops import hopper, nvidia
from attn.ops.common import OUT_OF_RANGE, buffer_load, build, exp2, opaque_uniform, splat
from attn.ops.operation import OPERATIONS, Operation, emit
from attn.tinygrad_compat import Estimates, vector_dtype

register()

@pytest.fixture(autouse=True)
def _device():
  with Context(DEV="EMU::gfx942"): yield

@pytest.fixture(autouse=True)
def _operations():
  # removes the operations that a test has defined, when the test ends
  before = dict(OPERATIONS)
  yield
  OPERATIONS.clear()
  OPERATIONS.update(before)

def define(name, meaning):
  # defines the operation `name` for the emulator, with the numpy function `meaning`
  OPERATIONS[name] = Operation(meaning, f"{name}()", f"{name}()")

def sink(name, *stores, ranges=()):
  return UOp.group(*stores).end(*ranges).sink(arg=KernelInfo(name, opts_to_apply=()))

def threads(n, groups=1):
  return UOp.range(groups, 0, AxisType.GLOBAL), UOp.range(n, 1, AxisType.WARP)

def lds(n, dtype=dtypes.float, slot=0): return UOp.placeholder((n,), dtype, slot, AddrSpace.LOCAL)
def reg(n, dtype=dtypes.float, slot=1): return UOp.placeholder((n,), dtype, slot, AddrSpace.REG)

def run(fxn, out, *inputs):
  o = Tensor.empty(*out, dtype=dtypes.float)
  return o.custom_kernel(*[Tensor(x).realize() for x in inputs], fxn=fxn)[0].numpy()

def says(error, *patterns):
  # expects an exception of the class `error` whose text matches every pattern, in any order
  return pytest.raises(error, match="".join(f"(?=.*{p})" for p in patterns))

X = np.arange(256, dtype=np.float32)

# ***** out of bounds *****

def gather(shift):
  def kernel(o, x, idx):
    g, t = threads(128, 2)
    i = g*128 + t
    return sink("gather", o[i].store(x[idx[i].load() + shift]), ranges=(g, t))
  return kernel

def test_global_load_out_of_bounds():
  idx = np.arange(256, dtype=np.int32)
  np.testing.assert_array_equal(run(gather(0), (256,), X, idx), X)
  with says(checks.OutOfBounds, "gather", r"data1\[256\]", r"256 elements", r"workgroup \(1, 0, 0\), wave 1, lane 63"): run(gather(1), (256,), X, idx)
  with says(checks.OutOfBounds, r"data1\[-1\]", r"workgroup \(0, 0, 0\), wave 0, lane 0"): run(gather(-1), (256,), X, idx)

def test_gated_load_may_be_out_of_bounds():
  def kernel(o, x, idx):
    g, t = threads(128, 2)
    i = g*128 + t
    return sink("gated", o[i].store(x[(idx[i].load() + 100).valid(idx[i].load() + 100 < 256)]), ranges=(g, t))
  np.testing.assert_array_equal(run(kernel, (256,), X, np.arange(256, dtype=np.int32)), np.where(X + 100 < 256, X + 100, 0))

def test_global_store_out_of_bounds():
  def kernel(shift):
    def kernel(o, idx):
      g, t = threads(128, 2)
      return sink("scatter", o[idx[g*128 + t].load() + shift].store(1.0), ranges=(g, t))
    return kernel
  assert run(kernel(0), (256,), np.arange(256, dtype=np.int32)).sum() == 256
  with says(checks.OutOfBounds, "scatter", r"store to data0\[256\]", "lane 63"): run(kernel(1), (256,), np.arange(256, dtype=np.int32))

def through_lds(shift, size=128):
  def kernel(o, x, idx):
    g, t = threads(128)
    tile = lds(size)
    tile = tile.after(tile[t].store(x[t]))
    return sink("through_lds", o[t].store(tile[idx[t].load() + shift]), ranges=(g, t))
  return kernel

def test_lds_out_of_bounds():
  idx = np.arange(128, dtype=np.int32)
  np.testing.assert_array_equal(run(through_lds(0), (128,), X, idx), X[:128])
  with says(checks.OutOfBounds, r"lds0\[128\]", "LDS", "wave 1, lane 63"): run(through_lds(1), (128,), X, idx)

def register_array(shift):
  def kernel(o, idx):
    g, t = threads(64)
    r = reg(4)
    r = r.after(UOp.group(*[r[i].store(float(i)) for i in range(4)]))
    return sink("register_array", o[t].store(r[idx[t].load() + shift]), ranges=(g, t))
  return kernel

def test_register_out_of_bounds():
  idx = np.arange(64, dtype=np.int32) % 4
  np.testing.assert_array_equal(run(register_array(0), (64,), idx), idx)
  with says(checks.OutOfBounds, r"reg1\[4\]", "lane 3"): run(register_array(1), (64,), idx)

# ***** never written *****

def test_uninitialised_lds():
  with says(checks.UninitialisedRead, "lds0", "element 128", "wave 1, lane 63"): run(through_lds(1, 129), (128,), X, np.arange(128, dtype=np.int32))

def test_uninitialised_register():
  def kernel(written):
    def kernel(o, x):
      g, t = threads(64)
      r = reg(2)
      r = r.after(UOp.group(*[r[i].store(x[t]) for i in written]))
      return sink("registers", o[t].store(r[0] + r[1]), ranges=(g, t))
    return kernel
  np.testing.assert_array_equal(run(kernel((0, 1)), (64,), X), 2*X[:64])
  with says(checks.UninitialisedRead, r"reg1\[1\]", "registers"): run(kernel((0,)), (64,), X)

def test_unwritten_output():
  def kernel(n):
    def kernel(o, x):
      g, t = threads(64)
      return sink("partial", o[t.valid(t < n)].store(x[t]), ranges=(g, t))
    return kernel
  np.testing.assert_array_equal(run(kernel(64), (64,), X), X[:64])
  with says(checks.UnwrittenOutput, "partial", r"data0\[48\]", "16 of 64"): run(kernel(48), (64,), X)

def test_uninitialised_global_read():
  def first(o, x):
    g, t = threads(64)
    return sink("first", o[t.valid(t < 48)].store(x[t]), ranges=(g, t))
  def second(o, x):
    g, t = threads(64)
    return sink("second", o[t].store(x[t] + 1), ranges=(g, t))
  half = Tensor.empty(64).custom_kernel(Tensor(X).realize(), fxn=first)[0].realize()
  with says(checks.UninitialisedRead, "second", r"data1\[48\]"): Tensor.empty(64).custom_kernel(half, fxn=second)[0].realize()

def test_transfers_take_the_flags_along():
  def first(o, x):
    g, t = threads(64)
    return sink("first", o[t.valid(t < 48)].store(x[t]), ranges=(g, t))
  half = Tensor.empty(64).custom_kernel(Tensor(X).realize(), fxn=first)[0].to("EMU:1").realize()
  with says(checks.UninitialisedRead, r"data1\[12\] \(elements of 16 bytes\)"): (half + 1).realize()
  np.testing.assert_array_equal((half[:48] + 1).numpy(), X[:48] + 1)

def test_untouched_buffer_reads_as_nan():
  assert np.isnan((Tensor.empty(64).realize() + 1).numpy()).all()

# ***** races *****

def rotate(barrier):
  # a kernel in which each thread stores a value to LDS and reads a value of the other wave
  def kernel(o, x):
    g, t = threads(128)
    tile = lds(128)
    store = tile[t].store(x[t])
    read = (tile.after(store) if barrier else tile)[(t + 64) % 128]
    return sink("rotate", o[t].store(read), *([] if barrier else [store]), ranges=(g, t))
  return kernel

def barrier(*after): return UOp(Ops.BARRIER, src=after)

def no_barriers(fxn):
  # calls `fxn`, which runs a kernel, without the barriers that tinygrad inserts
  from tinygrad.codegen import pm_implicit_barriers
  from tinygrad.uop.ops import PatternMatcher
  import tinygrad.codegen
  tinygrad.codegen.pm_implicit_barriers = PatternMatcher([])
  try: return fxn()
  finally: tinygrad.codegen.pm_implicit_barriers = pm_implicit_barriers

def test_lds_race_store_then_load():
  np.testing.assert_array_equal(run(rotate(True), (128,), X), np.roll(X[:128], 64))
  def again(o, x): return rotate(True)(o, x).replace(arg=KernelInfo("racy", opts_to_apply=()))
  with says(checks.LdsRace, "racy", "reads lds0 at byte 256", "wave 1", "wave 0, lane 0"): no_barriers(lambda: run(again, (128,), X))

def test_lds_of_one_wave_needs_no_barrier():
  def kernel(o, x):
    g, t = threads(64)
    tile = lds(64)
    return sink("one_wave", o[t].store(tile.after(tile[t].store(x[t]))[63 - t]), ranges=(g, t))
  np.testing.assert_array_equal(no_barriers(lambda: run(kernel, (64,), X)), X[:64][::-1])

def test_lds_race_of_two_stores():
  def kernel(o, x):
    g, t = threads(128)
    tile = lds(64)
    tile = tile.after(tile[t % 64].store(x[t]))
    return sink("two_stores", o[t].store(tile[t % 64]), ranges=(g, t))
  with says(checks.LdsRace, "two_stores", "writes lds0 at byte 0", "wave"): run(kernel, (128,), X)

def tile_over_tile(waits):
  # a kernel that stores V to the LDS in which K was; with `waits`, a barrier comes before
  # Without the barrier a fast wave stores V while a slow wave still reads K. tinygrad's former amd_flash_attention.py had this fault.
  def kernel(o, k, v):
    g, t = threads(128)
    tile = lds(128)
    with_k = tile.after(barrier(tile[t].store(k[t])))                  # all rows of K are in LDS
    score = reg(1).after(reg(1)[0].store(with_k[127 - t].load()))
    with_v = tile.after(barrier(score) if waits else score)
    with_v = tile.after(barrier(with_v[t].store(v[t].load())))
    return sink("v_over_k", o[t].store(score[0]*with_v[127 - t]), ranges=(g, t))
  return kernel

def test_lds_race_v_stored_over_k():
  k, v = X[:128], X[128:]
  np.testing.assert_array_equal(no_barriers(lambda: run(tile_over_tile(True), (128,), k, v)), (k*v)[::-1])
  with says(checks.LdsRace, "v_over_k", "writes lds0 at byte 256", "wave 0 has read with no barrier", "wave 1, lane 0"):
    no_barriers(lambda: run(tile_over_tile(False), (128,), k, v))

# ***** barriers *****

def barrier_in_loop(uniform):
  def kernel(o, x):
    g, t = threads(128, 2)
    r = UOp.range((g if uniform else t//64) + 2, 2, AxisType.LOOP)
    tile, acc = lds(128), reg(1)
    acc = acc.after(acc[0].store(0.0))
    tile_r = tile.after(r)
    full = tile_r.after(tile_r[t].store(x[g*128 + t]))
    step = acc.after(r)[0].store(acc.after(r)[0] + full[127 - t])
    return sink("barrier_in_loop", o[g*128 + t].store(acc.after(step.end(r))[0]), ranges=(g, t))
  return kernel

def test_divergent_barrier():
  expected = np.concatenate([2*X[:128][::-1], 3*X[128:][::-1]])
  np.testing.assert_array_equal(run(barrier_in_loop(True), (256,), X), expected)
  with says(checks.DivergentBarrier, "barrier_in_loop", "wave 0, lane 0"): run(barrier_in_loop(False), (256,), X)

def matrix_in_loop(uniform):
  # a kernel with one MFMA in each iteration of a loop, which lanes leave together if `uniform`
  def kernel(o, x):
    g, t = threads(64)
    r = UOp.range(2 if uniform else t % 2 + 1, 2, AxisType.LOOP)
    acc = UOp.placeholder((1,), vector_dtype("float32", 4), 1, AddrSpace.REG)
    acc = acc.after(acc[0].store(splat(0.0, 4)))
    ab = x.bitcast(vector_dtype("uint32", 2))[t].load()
    name = "mfma_f32_16x16x16f16"
    define(f"test_{name}", lambda lanes, ab, c: lanes.matrix(name, ab, ab, c))
    d = emit(f"test_{name}", acc.dtype, ab, acc.after(r)[0].load())
    done = acc.after(acc.after(r)[0].store(d).end(r))
    return sink("matrix_in_loop", o.bitcast(acc.dtype)[t].store(done[0].load()), ranges=(g, t))
  return kernel

def test_divergent_matrix_instruction():
  a = np.random.default_rng(0).integers(-3, 4, (16, 16)).astype(np.float16)   # lane 16h+i holds A[i, 4h:4h+4] and B[4h:4h+4, i]
  lanes = a.reshape(16, 4, 4).transpose(1, 0, 2).ravel()
  got = run(matrix_in_loop(True), (256,), lanes).reshape(4, 16, 4)
  np.testing.assert_array_equal(got.transpose(0, 2, 1).reshape(16, 16), 2*(a @ a.T))
  with says(checks.DivergentMatrix, "matrix_in_loop", "wave 0, lane 0"): run(matrix_in_loop(False), (256,), lanes)

# ***** pointers as operands of operations *****

def through_pointer(name, meaning):
  define(name, meaning)
  def kernel(o, x):
    g, t = threads(64)
    return sink("pointer", o[t].store(emit(name, dtypes.uint, x[t]).bitcast(dtypes.float)), ranges=(g, t))
  return run(kernel, (64,), X[:64])

def dword(lanes, pointer, offset):
  return np.ascontiguousarray(lanes.load_bytes(pointer, np.full(64, offset), 4, lanes.active).T).view(np.uint32)[:, 0]

def test_pointers():
  np.testing.assert_array_equal(through_pointer("dword", lambda lanes, p: dword(lanes, p, 0)), X[:64])
  with says(checks.OutOfBounds, "pointer", r"data1\[64\]", "lane 63"): through_pointer("dword_after", lambda lanes, p: dword(lanes, p, 4))
  with says(checks.Misaligned, "pointer", "at byte 2 of data1 is not aligned to 4", "lane 0"):
    through_pointer("dword_between", lambda lanes, p: dword(lanes, p, 2))
  def descriptor(lanes, p):
    lanes.check_extent(p, np.full(64, 256))
    return dword(lanes, p, 0)
  with says(checks.OutOfBounds, "descriptor of 256 bytes from byte 4", "lane 1"): through_pointer("descriptor", descriptor)

def test_buffers_that_begin_between_units():
  # The emulator checks the alignment of an access by its address and not by its index, because tinygrad passes a slice in place, at any offset in its
  # buffer.
  def kernel(o, x):
    g, t = threads(64)
    return sink("slice", o[t].store(buffer_load(x[0], UOp.const(256), t*4, 4).bitcast(dtypes.float)), ranges=(g, t))
  def of_slice(first:int) -> Tensor:
    x = Tensor(np.zeros(128 + first, np.float16), device="EMU").realize()[first:].contiguous()
    return Tensor.empty(64, device="EMU").custom_kernel(x, fxn=kernel)[0].realize()
  of_slice(2)
  with says(checks.Misaligned, "slice", "4 bytes of data1, which begins at byte 2 of its memory", "lane 0"): of_slice(1)

# ***** parts of offsets *****

def loaded_at(offset):
  # the numbers that AMD's buffer instruction loads from x, at the byte offset that `offset` computes from the thread's number
  def kernel(o, x):
    g, t = threads(64)
    return sink("loaded_at", o[t].store(buffer_load(x[0], UOp.const(256), offset(t), 4).bitcast(dtypes.float)), ranges=(g, t))
  return run(kernel, (64,), X[:64])

def test_part_of_an_offset_below_zero():
  # The offset of a buffer instruction is a sum of terms. A negative term is an error even if the sum is right. The emulator also finds such a term
  # inside a product or a conditional expression.
  np.testing.assert_array_equal(loaded_at(lambda t: t*4), X[:64])
  np.testing.assert_array_equal(loaded_at(lambda t: (t < 60).where(t*4 + 16, OUT_OF_RANGE)), np.where(X[:64] < 60, X[:64] + 4, 0))
  with says(checks.NegativeTerm, "is -1:", "lane 1"): loaded_at(lambda t: (63 - t)*(t % 2*4))
  for offset in (lambda t: t*-4 + 252, lambda t: (63 - t)*4, lambda t: (t < 60).where(252 + t*-4, OUT_OF_RANGE)):
    with says(checks.NegativeTerm, "loaded_at", "a term of the offset of a buffer_load is -4:", "wave 0, lane 1"): loaded_at(offset)
    with Context(DEV="EMU::sm_80"): assert loaded_at(offset)[1] == X[62]     # on this chip the operand is a pointer

# ***** limits *****

def test_lds_limit():
  def kernel(n):
    def kernel(o, x):
      g, t = threads(64)
      tile = lds(n)
      return sink("big", o[t].store(tile.after(tile[t].store(x[t]))[t]), ranges=(g, t))
    return kernel
  run(kernel(16384), (64,), X)
  assert last_run().lds == 65536
  with says(checks.LdsLimit, "69632", "gfx942 has 65536"): run(kernel(17408), (64,), X)
  with Context(DEV="EMU::gfx950"): run(kernel(17408), (64,), X)
  with Context(DEV="EMU::gfx1201"), says(checks.LdsLimit, "69632", "gfx1201 has 65536"): run(kernel(17408), (64,), X)

def test_launch_limit():
  def kernel(o, x):
    g, t = UOp.special(1, "gidx0"), UOp.special(2048, "lidx0")
    return sink("big_workgroup", o[g*2048 + t].store(1.0))
  with says(checks.LaunchLimit, "big_workgroup", "1024"): run(kernel, (2048,), X)

def test_errors_are_one_family():
  assert all(issubclass(e, checks.EmulatorError) for e in vars(checks).values() if isinstance(e, type) and issubclass(e, RuntimeError))

@pytest.mark.parametrize("word", ("0", "false", "off", "No"))
def test_checks_can_be_turned_off(monkeypatch, word):
  monkeypatch.setenv("ATTN_EMU_CHECKS", word)
  no_barriers(lambda: run(tile_over_tile(False), (128,), X[:128], X[128:]))

# ***** bank conflicts *****

def test_bank_conflicts(monkeypatch):
  # The emulator counts bank conflicts. Where a wave reads a column of a 64 x 32 tile of 4-byte elements, all lanes access one bank. Where rows are 4
  # bytes longer, there is no conflict.
  def kernel(row):
    def kernel(o, x):
      g, t = threads(64)
      tile = lds(64*row)
      tile = tile.after(tile[t*row].store(x[t]))
      return sink("column", o[t].store(tile[t*row]), ranges=(g, t))
    return kernel
  monkeypatch.setenv("ATTN_EMU_BANKS", "1")
  for row, cycles in ((32, 64), (33, 2)):
    run(kernel(row), (64,), X)
    for use in last_run().bank_conflicts: assert (use.buffer, use.nbytes, use.phases, use.cycles, use.conflicts) == ("lds0", 4, 2, cycles, cycles - 2)
    assert [use.verb for use in last_run().bank_conflicts] == ["write", "read"]
  monkeypatch.delenv("ATTN_EMU_BANKS")
  run(kernel(32), (64,), X)
  assert last_run().bank_conflicts == []

# ***** values out of their scope *****

def at_most_once(bound):
  # a kernel that uses exp2(x) in a loop of `bound` iterations, and once more after the loop
  def kernel(o, x):
    g, t = threads(64, 2)
    # if tinygrad can prove that `bound` is 0 or 1, it computes exp2 inside the loop: the use after the loop is then a fault
    total, r = reg(1), UOp.range(bound(g), 2, AxisType.LOOP)
    value = exp2(x[t].load())
    zero = total[0].store(UOp.const(0.0, dtypes.float))
    inside = total.after(zero, r)
    done = total.after(inside[0].store(inside[0].load() + value).end(r))
    ast = sink("at_most_once", o[g*64 + t].store(done[0].load() + value), ranges=(g, t))
    return ast.replace(arg=dataclasses.replace(ast.arg, estimates=Estimates()), tag="as it is")   # tinygrad cannot estimate such a bound
  return kernel

def test_value_used_after_its_loop():
  want = np.exp2(np.arange(64, dtype=np.float32)/16)
  x = np.log2(want)
  np.testing.assert_allclose(run(at_most_once(lambda g: opaque_uniform(1 - g)), (128,), x), np.concatenate([2*want, want]), rtol=1e-6)
  with says(checks.OutOfScope, "at_most_once", "CUSTOM computed inside a loop"): run(at_most_once(lambda g: 1 - g), (128,), x)

# ***** unfinished operations *****

def ones(): return build(*[UOp.const(0x3c003c00, dtypes.uint)]*4)

def multiplied(*steps):
  # the accumulator of one warpgroup of sm_90 whose matrix operands are all ones, after the operations `steps`
  # Before `steps` the kernel computes acc = Q K^T over 16 columns, and acc += P V over 16 keys. A step is a function with the keyword arguments acc,
  # p, tile, thread and order. It adds operations that run after the UOp `order`, and returns the UOp after which the next step runs.
  def kernel(o, x):
    g, t = threads(128)
    tile, acc, p, order = lds(512, nvidia.U4), reg(1, nvidia.F4, 1), reg(1, nvidia.U4, 2), reg(1, slot=3)
    full = tile.after(UOp.group(*[tile[128*i + t].store(ones()) for i in range(4)]))
    p = p.after(p[0].store(ones()))
    at = hopper.scores(acc, full[0], full[0], UOp.const(0.0, dtypes.float), 1, (8192, 8192), "float16")
    at = hopper.output(acc, p, full[0], at, 8192, "float16")
    for step in steps: at = step(acc=acc, p=p, tile=full, thread=t, order=at)
    done = acc.after(order[0].store(at))
    return sink("multiplied", o.bitcast(acc.dtype)[t].store(done[0].load()), ranges=(g, t))
  with Context(DEV="EMU::sm_90"): return run(kernel, (512,), X[:128])

def wait(acc, order, **_): return hopper.wait_products(acc, order)
def ordered(slot, order, store):
  # puts a store after the UOp `order`, and returns a UOp after which later steps can be put
  # `store` builds the store, given a function that makes a buffer depend on `order`; no other code uses the registers `slot` and `slot` + 1
  before, after = reg(1, slot=slot), reg(1, slot=slot + 1)
  return after.after(after[0].store(0.0), store(lambda buffer: buffer.after(before[0].store(order))))[0].load()
def overwrite_accumulator(acc, order, **_): return ordered(4, order, lambda then: then(acc)[0].store(nvidia.zero(order)))
def overwrite_fragment(p, order, **_): return ordered(4, order, lambda then: then(p)[0].store(ones()))
def overwrite_tile(tile, thread, order, **_):
  return ordered(4, order, lambda then: tile.after(barrier(then(tile))).after(then(tile))[thread].store(ones()))

def test_products_that_follow_each_other_and_are_waited_for():
  np.testing.assert_array_equal(multiplied(wait), 32)    # needs no wait between the products: they run in order

@pytest.mark.parametrize("steps, text", [
  ((), r"reads the accumulator reg1\[0\], which the operation started at test/emulator/test_emulator_checks.py:\d+ still writes"),
  ((overwrite_accumulator, wait), r"stores to the accumulator reg1\[0\], which the operation started at .* still writes"),
  ((overwrite_fragment, wait), r"stores to reg2\[0\], which the operation started at .* still reads"),
  ((overwrite_tile, wait), r"writes lds0 at byte 0 .*, which the operation started at .* still reads")],
  ids=("read", "accumulator", "fragment", "tile"))
def test_products_under_way(steps, text):
  with says(checks.NotWaitedFor, "multiplied", text): multiplied(*steps)

@pytest.mark.parametrize("step", (overwrite_accumulator, overwrite_fragment, overwrite_tile))
def test_what_a_product_had_may_be_changed_after_the_wait(step): multiplied(wait, step)

def copied(n, but):
  # returns what n threads on sm_80 read: 16 bytes that another thread copied asynchronously into a tile full of ones
  def kernel(o, x):
    g, t = threads(n)
    tile, order = lds(n, nvidia.U4), reg(1)
    full = tile.after(barrier(tile[t].store(ones())))
    at = nvidia.copy(full[t], x[4*t], (0, 0), UOp.const(16, dtypes.int), t < n, 16)
    at = nvidia.commit(at)
    # waits until at most `but` groups of copies are pending
    if but is not None: at = nvidia.wait_copies(at, but)
    there = full.after(barrier(order[0].store(at)))
    return sink("copied", o.bitcast(nvidia.U4)[t].store(there[n - 1 - t].load()), ranges=(g, t))
  with Context(DEV="EMU::sm_80"): return run(kernel, (4*n,), np.arange(4*n, dtype=np.float32))

@pytest.mark.parametrize("n", (32, 64))    # also with one wave: a barrier does not replace the wait
def test_a_copy_is_under_way_until_its_own_thread_has_waited(n):
  np.testing.assert_array_equal(copied(n, 0), np.arange(4*n).reshape(n, 4)[::-1].ravel())
  for but in (None, 1):
    started = r"started at test/emulator/test_emulator_checks.py:\d+ still writes"
    with says(checks.NotWaitedFor, "copied", "reads lds0 at byte", started): copied(n, but)

def test_a_copy_that_was_waited_for_is_no_more_than_a_store():
  # An asynchronous copy that a thread has waited for counts as a store by this thread: another wave may read it only after a barrier that follows the
  # wait.
  def kernel(o, x):
    g, t = threads(64)
    tile, before, after = lds(64, nvidia.U4), reg(1, slot=1), reg(1, slot=2)
    full = tile.after(barrier(tile[t].store(ones())))
    at = nvidia.commit(nvidia.copy(full[t], x[4*t], (0, 0), UOp.const(16, dtypes.int), t < 64, 16))
    met = before.after(barrier(before[0].store(at)))[0].load()
    there = full.after(after[0].store(nvidia.wait_copies(met, 0)))
    return sink("no_barrier", o.bitcast(nvidia.U4)[t].store(there[63 - t].load()), ranges=(g, t))
  with Context(DEV="EMU::sm_80"), says(checks.LdsRace, "no_barrier", "reads lds0", "wave 1 has written with no barrier"):
    run(kernel, (256,), X)

# ***** integers that overflow their type *****

def far(name, factor):
  # a kernel that reads x at a loaded index, multiplied and divided by `factor` in 32 bits
  def kernel(o, x, idx):
    g, t = threads(32)
    # the product may overflow; the result is limited to the size of x
    at = idx[t].load()*factor
    return sink(name, o[t].store(x[(at//factor).maximum(0).minimum(255)]), ranges=(g, t))
  return kernel

def test_an_integer_that_overflows():
  # The emulator stops an attn kernel in which a 32-bit product with a loaded number overflows. Other kernels run, because they may rely on the
  # overflow.
  numbers = np.full(32, 2**20, np.int32)
  np.testing.assert_array_equal(run(far("attn_far", 2**10), (32,), X, numbers), X[255])
  numbers[17] = 2**22
  with says(checks.Overflow, "attn_far", rf"an integer is {2**32}, but int holds only -2147483648..2147483647", "lane 17"):
    run(far("attn_far", 2**10), (32,), X, numbers)
  run(far("far", 2**10), (32,), X, numbers)
