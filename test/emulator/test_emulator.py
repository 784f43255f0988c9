"""Tests of the device EMU: every kernel that tinygrad schedules runs on every architecture and gives the result of numpy."""
import gc, os, subprocess, sys
import numpy as np
import pytest
from tinygrad import Context, Tensor, TinyJit, Variable, dtypes
from tinygrad.device import Device
from tinygrad.dtype import AddrSpace
from tinygrad.uop.ops import AxisType, KernelInfo, Ops, UOp
from attn.emulator.alu import bf16_to_float, float_to_bf16
from attn.emulator.device import register
from attn.emulator.chips import EMULATED
from attn.ops.operation import OPERATIONS, Operation, emit
from attn.tinygrad_compat import vector_dtype
from cases import check

register()
SAMPLED = ["gfx942", "gfx950", "gfx1100", "gfx1201", "sm_80", "sm_89"]

@pytest.fixture(params=SAMPLED)
def arch(request):
  with Context(DEV=f"EMU::{request.param}"): yield request.param

@pytest.fixture
def emu():
  with Context(DEV="EMU::gfx942"): yield

rng = np.random.default_rng(0)
A, B = rng.standard_normal((33, 47)).astype(np.float32), rng.standard_normal((47, 29)).astype(np.float32)

def close(got, want, rtol=1e-6, atol=1e-6): np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=rtol, atol=atol)

# ***** ordinary kernels *****

def test_elementwise_and_reductions(arch):
  t = Tensor(A)
  close((t*2 + 1).relu().numpy(), np.maximum(A*2 + 1, 0))
  close(t.sum(0).numpy(), A.sum(0), 1e-4, 1e-5)
  close(t.max(1).numpy(), A.max(1))
  np.testing.assert_array_equal(t.argmax(1).numpy(), A.argmax(1))
  e = np.exp(A - A.max(1, keepdims=True))
  close(t.softmax().numpy(), e/e.sum(1, keepdims=True), 1e-5)
  close(t.std(1).numpy(), A.std(1, ddof=1), 1e-5)
  close(t.cumsum(1).numpy(), A.cumsum(1), 1e-4, 1e-5)
  close(t.pad(((1, 2), (3, 0)))[:, 1:].numpy(), np.pad(A, ((1, 2), (3, 0)))[:, 1:])
  close(t.permute(1, 0).flip(0).contiguous().numpy(), A.T[::-1])
  close((t.sin() + t.exp2() + (t.abs() + 1).log2() + t.sqrt().isnan().where(0, t.sqrt())).numpy(),
        np.sin(A) + np.exp2(A) + np.log2(np.abs(A) + 1) + np.sqrt(np.maximum(A, 0)), 1e-5, 1e-5)

ROUND = {"float32": lambda x: x, "float16": lambda x: x.astype(np.float16), "bfloat16": lambda x: bf16_to_float(float_to_bf16(x))}

@pytest.mark.sample(5)
@pytest.mark.parametrize("dtype", ROUND)
def test_matmul(arch, dtype):
  # tinygrad's matrix product is right on the emulator, with sizes for which tinygrad uses the tensor cores and with other sizes. With other sizes
  # tinygrad rounds each product to the dtype.
  for M, N, K in ((64, 64, 64), (33, 29, 47)):
    a, b = rng.standard_normal((M, K)).astype(np.float32), rng.standard_normal((K, N)).astype(np.float32)
    x, y = [Tensor(m).cast(dtype).realize() for m in (a, b)]
    products = x.float().numpy()[:, :, None]*y.float().numpy()
    close(x.matmul(y, dtype=dtypes.float).numpy(), (products if M == 64 else ROUND[dtype](products)).sum(1, dtype=np.float64), 1e-4, 1e-4)

def test_tensor_cores_are_used(arch):
  from attn.emulator import matrix
  seen, real = [], matrix.MatrixUnit.wmma
  with pytest.MonkeyPatch.context() as m:
    m.setattr(matrix.MatrixUnit, "wmma", lambda self, dims, *args: (seen.append(dims), real(self, dims, *args))[1])
    a = rng.standard_normal((64, 64)).astype(np.float16)
    close(Tensor(a).matmul(Tensor(a) + 0, dtype=dtypes.float).numpy(), a.astype(np.float64) @ a.astype(np.float64), 1e-4, 1e-4)
  assert seen

@pytest.mark.sample(4)
@pytest.mark.parametrize("name", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_integers_of_all_widths(emu, name):
  info = np.iinfo(name)
  x = np.concatenate([rng.integers(info.min, info.max, 61, dtype=name), np.array([info.min, info.max, 1], name)])
  y = np.concatenate([rng.integers(1, 100, 61), [3, 7, 5]]).astype(name)
  s = (y % 7).astype(name)
  t, u = Tensor(x), Tensor(y)
  with np.errstate(over="ignore"):
    for got, want in ((t + u, x + y), (t*u, x*y), (t - u, x - y), (t // u, x // y), (t % u, x % y), (t ^ u, x ^ y), (t & u, x & y),
                      (t | u, x | y),
                      (t << Tensor(s), x << s), (t >> Tensor(s), x >> s), (t < u, x < y), (t == u, x == y),
                      ((t < u).where(t, u), np.where(x < y, x, y)), (-t, -x), (t.sum().cast(name), x.sum(dtype=name)), (t.max(), x.max())):
      np.testing.assert_array_equal(got.numpy(), want)

def test_truncating_division(emu):
  x, y = np.array([7, -7, 7, -7, 0], np.int32), np.array([2, 2, -2, -2, 3], np.int32)
  np.testing.assert_array_equal(Tensor(x).div(Tensor(y), rounding_mode="trunc").numpy(), [3, -3, -3, 3, 0])
  np.testing.assert_array_equal((Tensor(x) % Tensor(y)).numpy(), x % y)

def test_casts(emu):
  x = np.array([0.0, -0.0, 1.5, -1.5, 2.5, 255.7, -3.99, 65504, 1e-8, 100.0], np.float32)
  for name in ("float16", "float64", "int8", "int32", "int64", "bool"):
    inside = x if name not in ("int8",) else np.clip(x, -128, 127)
    np.testing.assert_array_equal(Tensor(inside).cast(name).numpy(), inside.astype(name))
  np.testing.assert_array_equal(Tensor(np.array([3, 200], np.uint8)).cast("int8").numpy(), [3, -56])
  np.testing.assert_array_equal(Tensor(np.array([2**24 + 1, 2**31 - 1], np.int32)).cast("float32").numpy(), np.array([2**24, 2**31], np.float32))
  # saturation and NaN as in v_cvt_i32_f32
  np.testing.assert_array_equal(Tensor(np.array([1e20, -1e20, np.nan, np.inf], np.float32)).cast("int32").numpy(), [2**31 - 1, -2**31, 0, 2**31 - 1])

def test_rounding(arch):
  # The emulator's casts fp32 -> fp16 and fp32 -> bf16 -> fp32 round ties to even, overflow to inf, and keep denormals and NaN.
  x = np.array([1 + 2**-11, 1 + 3*2**-11, 65520, 65519, 2**-25, 3*2**-25, 2**-14/3, np.inf, -np.inf, np.nan, -0.0], np.float32)
  with np.errstate(over="ignore"): np.testing.assert_array_equal(Tensor(x).half().numpy(), x.astype(np.float16))
  y = np.array([1 + 2**-8, 1 + 3*2**-8, 1 + 2**-8 + 2**-20, 3.4e38, -1e-40, np.inf, -np.inf, np.nan, -0.0], np.float32)
  bits = y.view(np.uint32).astype(np.uint64)
  want = (((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) << 16).astype(np.uint32).view(np.float32)
  got = Tensor(y).bfloat16().float().numpy()
  np.testing.assert_array_equal(np.isnan(got), np.isnan(y))
  np.testing.assert_array_equal(np.where(np.isnan(y), 0, got), np.where(np.isnan(y), 0, want))

def test_half_arithmetic_rounds_each_operation(emu):
  a, b = [rng.standard_normal(257).astype(np.float16) for _ in range(2)]
  np.testing.assert_array_equal((Tensor(a)*Tensor(b) + Tensor(a)).numpy(), a*b + a)

def test_bitcast(emu):
  x = rng.standard_normal(64).astype(np.float32)
  np.testing.assert_array_equal(Tensor(x).bitcast("uint32").numpy(), x.view(np.uint32))
  np.testing.assert_array_equal(Tensor(x).bitcast("uint8").numpy(), x.view(np.uint8))
  np.testing.assert_array_equal(Tensor(x.view(np.uint16)).bitcast("uint32").numpy(), x.view(np.uint32))

def test_double_and_long(emu):
  x = rng.standard_normal(100)
  close((Tensor(x)*3 + Tensor(x).exp()).numpy(), x*3 + np.exp(x), 1e-6, 1e-9)
  assert Tensor(np.array([2**40], np.int64)).mul(2**20).item() == 2**60

def test_random(arch):
  Tensor.manual_seed(1)
  x, y, z = Tensor.rand(2000).numpy(), Tensor.randn(2000).numpy(), Tensor.randint(2000, low=-3, high=4).numpy()
  assert x.min() >= 0 and x.max() < 1 and abs(x.mean() - 0.5) < 0.05 and abs(y.std() - 1) < 0.1 and set(z) == set(range(-3, 4))
  Tensor.manual_seed(1)
  np.testing.assert_array_equal(Tensor.rand(2000).numpy(), x)

def test_creation_and_assignment(emu):
  np.testing.assert_array_equal(Tensor.zeros(5, 3).contiguous().numpy(), np.zeros((5, 3)))
  np.testing.assert_array_equal(Tensor.empty(10).assign(Tensor(A.ravel()[:10])).numpy(), A.ravel()[:10])
  t = Tensor.zeros(8, 4).contiguous().realize()
  t[2:5].assign(Tensor.ones(3, 4)).realize()
  np.testing.assert_array_equal(t.numpy().sum(1), [0, 0, 4, 4, 4, 0, 0, 0])
  t += 1
  assert t.numpy().sum() == 44
  np.testing.assert_array_equal(Tensor(A)[Tensor([3, 1, 3])].numpy(), A[[3, 1, 3]])

def test_conv_and_backward(emu):
  x, w = Tensor(A[:8, :8]), Tensor(A[8:16, :8])
  y = Tensor(A[:1, :8*3].reshape(1, 3, 2, 4)).conv2d(Tensor(B[:4, :24].reshape(4, 3, 2, 4)))
  close(y.numpy().ravel(), (A[0, :24] * B[:4, :24]).sum(1), 1e-4, 1e-5)
  g, = (x.matmul(w)).sum().gradient(x)
  close(g.numpy(), np.tile(A[8:16, :8].sum(1), (8, 1)), 1e-4, 1e-5)

def test_without_locals_and_optimizations(emu):
  with Context(NOLOCALS=1):   # tinygrad times candidates on buffers that no kernel has written
    close((Tensor(A) @ Tensor(B)).numpy(), A @ B, 1e-4, 1e-4)
    x = Tensor(A).contiguous().realize()
    x += 1
    close(x.numpy(), A + 1)
  with Context(NOOPT=1): close((Tensor(A) @ Tensor(B)).numpy(), A @ B, 1e-4, 1e-4)

def test_beam(emu):
  with Context(BEAM=1, PARALLEL=0, IGNORE_BEAM_CACHE=1): close((Tensor(A[:16, :16]) + Tensor(B[:16, :16])).numpy(), A[:16, :16] + B[:16, :16])

# ***** devices *****

def test_arch_names():
  def result(arch):
    with Context(DEV=f"EMU::{arch}"): return (Tensor([1.0, 2.0]) + 1).tolist()
  for arch in EMULATED: assert result(arch) == [2, 3]
  for wrong in ("gfx906", "sm_70", "GFX942", "x"):
    with pytest.raises(ValueError, match=f"does not emulate '{wrong}'.*gfx942, gfx950, gfx1100.*sm_90"): result(wrong)

def in_process(code, **env):
  p = subprocess.run([sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True, timeout=120)
  return p.returncode, p.stdout, p.stderr

def test_environment_variable():
  code = "import attn; from tinygrad import Tensor, Device; print((Tensor([1.0])+1).item(), Device['EMU'].renderer.target.arch)"
  assert in_process(code, DEV="EMU::gfx1100")[1] == "2.0 gfx1100\n"
  assert in_process(code, DEV="EMU")[1] == "2.0 gfx942\n"
  code, _, err = in_process(code, DEV="EMU::gfx803")
  assert code != 0 and "ValueError: EMU does not emulate 'gfx803'" in err

def test_lds_limits_of_the_chips():
  for arch, limit in (("gfx942", 65536), ("gfx950", 163840), ("gfx1201", 65536)):
    with Context(DEV=f"EMU::{arch}"): assert Device["EMU"].renderer.shared_max == limit

def test_several_devices(emu):
  x = Tensor(A, device="EMU:1").realize()
  close(((x + 1).to("EMU:2") * 2).to("EMU").numpy(), (A + 1)*2)
  a = rng.standard_normal((8, 16)).astype(np.float32)
  s = Tensor(a).shard(("EMU:0", "EMU:1"), axis=0)
  close((s.softmax() @ Tensor(a.T.copy()).shard(("EMU:0", "EMU:1"))).to("EMU").numpy(),
        np.exp(a)/np.exp(a).sum(1, keepdims=True) @ a.T, 1e-5, 1e-5)
  close(s.sum(0).to("EMU").numpy(), a.sum(0), 1e-5, 1e-5)

def test_jit_with_variables(emu):
  @TinyJit
  def step(x, n): return (x[:n].sum(0) + n).realize()
  x = Tensor(A).realize()
  for n in range(1, 8):
    v = Variable("n", 1, 33).bind(n)
    close(step(x, v).numpy(), A[:n].sum(0) + n, 1e-5, 1e-5)

def test_jit_across_devices_and_memory_planner(emu):
  @TinyJit
  def step(x): return ((x.to("EMU:1") @ x.to("EMU:1").T).relu().contiguous() + 1).contiguous().softmax().to("EMU").realize()
  for i in range(4):
    a = A[i:i+8]
    m = np.maximum(a @ a.T, 0) + 1
    e = np.exp(m - m.max(1, keepdims=True))
    close(step(Tensor(a).realize()).numpy(), e/e.sum(1, keepdims=True), 1e-4, 1e-5)

def test_kernels_lowered_by_worker_processes():
  code = """
import attn.emulator.device as d; d.register()
import numpy as np
from tinygrad import Tensor, engine
from tinygrad.engine import worker
a = np.random.default_rng(0).standard_normal((32, 32)).astype(np.float16)
t = Tensor(a).realize()
outs = [(t @ t).contiguous(), t.softmax().contiguous(), (t.float().sum(0)*3).contiguous(), (t.bfloat16() + 1).float().contiguous()]
Tensor.realize(*outs)
assert worker.worker_pool is not None, "the pool was not used"
f = a.astype(np.float64)
assert np.abs(outs[0].numpy() - f @ f).max() < 0.1
assert np.abs(outs[2].numpy() - f.sum(0)*3).max() < 1e-3
print("fine")
worker.terminate_worker_pool()
"""
  rc, out, err = in_process(code, DEV="EMU::gfx942", PARALLEL="2")
  assert rc == 0 and out == "fine\n", err[-2000:]

def test_source_is_plain_hip(emu, capsys):
  with Context(DEBUG=4): (Tensor([1.0, 2.0]).realize()*5).realize()
  out = capsys.readouterr().out
  assert 'extern "C" __attribute__((global))' in out and "pickle" not in out

# ***** constructs of kernels *****

def sink(name, *stores, ranges=()): return UOp.group(*stores).end(*ranges).sink(arg=KernelInfo(name, opts_to_apply=()))

def test_loop_bounds_that_differ_between_workgroups_and_threads(emu):
  def kernel(o, x):
    g, t = UOp.range(5, 0, AxisType.GLOBAL), UOp.range(96, 1, AxisType.WARP)
    acc = UOp.placeholder((1,), dtypes.float, 0, AddrSpace.REG)
    acc = acc.after(acc[0].store(0.0))
    r = UOp.range(g*2 + t % 3, 2, AxisType.LOOP)
    done = acc.after(acc.after(r)[0].store(acc.after(r)[0] + x[r]).end(r))
    return sink("triangle", o[g*96 + t].store(done[0]), ranges=(g, t))
  x = np.arange(1, 20, dtype=np.float32)
  got = Tensor.empty(5*96).custom_kernel(Tensor(x).realize(), fxn=kernel)[0].numpy().reshape(5, 96)
  np.testing.assert_array_equal(got, [[x[:g*2 + t % 3].sum() for t in range(96)] for g in range(5)])

def test_conditional_loop(emu):
  # The emulator runs a loop with a condition at its end, for (;;) { ... if (!c) break; }, the right number of times for each thread. The loop here
  # counts Collatz steps.
  def kernel(o, x):
    t = UOp.range(64, 0, AxisType.WARP)
    state = UOp.placeholder((2,), dtypes.int, 0, AddrSpace.REG)
    state = state.after(UOp.group(state[0].store(x[t].load()), state[1].store(0)))
    loop = UOp.loop(1)
    s = state.after(loop)
    n, more = s[0].load(), s[0].load() > 1
    nxt = (n % 2).eq(0).where(n//2, 3*n + 1)
    body = UOp.group(s[0].store(more.where(nxt, n)), s[1].store(s[1].load() + more.cast(dtypes.int)))
    s = state.after(body.end(loop, state.after(body)[0].load() > 1))
    return sink("collatz", o[t].store(s[1].load()), ranges=(t,))
  def steps(n): return 0 if n == 1 else 1 + steps(n//2 if n % 2 == 0 else 3*n + 1)
  x = np.arange(1, 65, dtype=np.int32)
  got = Tensor.empty(64, dtype=dtypes.int).custom_kernel(Tensor(x).realize(), fxn=kernel)[0].numpy()
  np.testing.assert_array_equal(got, [steps(int(n)) for n in x])

def test_vector_types_in_memory(emu):
  # A kernel can access fp16 buffers as 16-byte vectors, and can declare LDS as an array of such vectors.
  u32x4 = vector_dtype("uint32", 4)
  def kernel(o, x):
    t = UOp.range(128, 0, AxisType.WARP)
    tile = UOp.placeholder((128,), u32x4, 0, AddrSpace.LOCAL)
    tile = tile.after(tile[t].store(x.bitcast(u32x4)[t].load()))
    keep = UOp.placeholder((1,), u32x4, 1, AddrSpace.REG)
    keep = keep.after(keep[0].store(tile[127 - t].load()))
    return sink("vectors", o.bitcast(u32x4)[t].store(keep[0].load()), ranges=(t,))
  x = rng.standard_normal(1024).astype(np.float16)
  got = Tensor.empty(1024, dtype=dtypes.half).custom_kernel(Tensor(x).realize(), fxn=kernel)[0].numpy()
  np.testing.assert_array_equal(got, x.reshape(128, 8)[::-1].ravel())

def test_custom_text(emu, monkeypatch):
  # The emulator refuses an operation that exists only as source text, because it cannot tell what the text computes. It runs an operation that also
  # has a numpy function.
  def kernel(value):
    def kernel(o, x):
      t = UOp.range(64, 0, AxisType.WARP)
      return sink("custom", o[t].store(value(x[t].load())), ranges=(t,))
    return kernel
  x = np.arange(64, dtype=np.float32)
  def go(value): return Tensor.empty(64).custom_kernel(Tensor(x).realize(), fxn=kernel(value))[0].numpy()
  with pytest.raises(NotImplementedError, match=r"my_builtin\(\{0\}\).*attn.ops.operation.emit"):
    go(lambda x: UOp(Ops.CUSTOM, dtypes.float, (x,), arg="my_builtin({0})"))
  monkeypatch.setitem(OPERATIONS, "my_builtin", Operation(lambda lanes, x: x + lanes.wave, "my_builtin({0})", "my_builtin({0})"))
  np.testing.assert_array_equal(go(lambda x: emit("my_builtin", dtypes.float, x)), x + 64)

def test_chunks_of_the_grid_change_nothing(emu, monkeypatch):
  from attn.emulator import launch
  a = rng.standard_normal((256, 64)).astype(np.float32)
  whole = (Tensor(a) @ Tensor(a.T.copy())).softmax().numpy()
  monkeypatch.setattr(launch, "WORKING_SET", 1 << 16)
  np.testing.assert_array_equal((Tensor(a) @ Tensor(a.T.copy())).softmax().numpy(), whole)

# ***** memory after a run *****

def test_lowering_and_a_run_leave_no_cycles() -> None:
  # The memory of a kernel's values and LDS is freed at once after a run. Python's cycle collector is not needed.
  gc.freeze()     # the test ignores objects that existed before
  try:
    gc.set_debug(gc.DEBUG_SAVEALL)
    check("sm_90", Sq=33, D=16)
    gc.collect()
    assert not [type(x).__name__ for x in gc.garbage if type(x).__module__.startswith("attn.")]
  finally:
    gc.set_debug(0)
    gc.garbage.clear()
    gc.unfreeze()
