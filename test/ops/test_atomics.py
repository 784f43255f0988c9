"""Tests of the operations by which workgroups add to sums in global memory: atomic additions, tickets and turns. The machine code is tested for each
chip, and the result on the emulator."""
import re, shutil, subprocess
import numpy as np
import pytest
from tinygrad import Context, Tensor, dtypes
from tinygrad.dtype import AddrSpace
from tinygrad.uop.ops import AxisType, KernelInfo, UOp
from attn.compilers.clang import assembly
from attn.emulator import checks
from attn.emulator.device import register
from attn.ops.atomics import atomic_add, await_turn, pass_turn, settle, ticket
from attn.ops.common import build
from attn.ops.renderers import render
from attn.tinygrad_compat import CompileError

register()
GROUPS, WIDTH = 4, 256
AMD = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")

def in_turn(o, x, counters):
  # kernel in which workgroups add the rows of x (GROUPS, WIDTH) to o in turns, in the order of their tickets
  # counters[0] gives the tickets, counters[1] says whose turn it is
  g, t = UOp.range(GROUPS, 0, AxisType.GLOBAL), UOp.range(WIDTH, 1, AxisType.LOCAL)
  first, lds, done = t.eq(0), UOp.placeholder((1,), dtypes.int, 0, AddrSpace.LOCAL), UOp.placeholder((1,), dtypes.float, 1, AddrSpace.REG)
  drawn = ticket(counters[0], g, first, lds=lds[0])
  row = x[drawn*WIDTH + t].load()
  done = done.after(done[0].store(await_turn(counters[1], drawn, first)))
  done = done.after(UOp.barrier(done))
  done = done.after(done[0].store(atomic_add(o[t], row, done[0].load())))
  done = done.after(done[0].store(settle(done[0].load())))
  done = done.after(UOp.barrier(done))
  return done[0].store(pass_turn(counters[1], first, done[0].load())).end(g, t).sink(arg=KernelInfo("in_turn", opts_to_apply=()))

def text_of(kernel, arch, *sizes):
  placeholders = [UOp.placeholder((n,), dtype, i) for i, (n, dtype) in enumerate(sizes)]
  return render(kernel(*placeholders), arch)

SUMS = (WIDTH, dtypes.float), (GROUPS*WIDTH, dtypes.float), (2, dtypes.int)

# ***** machine code *****

def instructions(text, arch, name):
  # compiles HIP source, and returns the instructions of the kernel `name` that access memory or LDS, wait, or are barriers
  asm = assembly(text, arch)
  lines = [line.split("//")[0].strip() for line in asm[asm.index(f"\n{name}:"):asm.index("s_endpgm")].splitlines()]
  return [x for x in lines if re.match(r"(global|flat|buffer|ds|s_barrier|s_wait|s_sleep)", x)]

def appear_in_order(found, *patterns):
  # whether `found` contains instructions that match the patterns, in this order
  at = iter(found)
  return all(any(re.match(p, x) for x in at) for p in patterns)

DRAINED = {"gfx1100": r"s_waitcnt_vscnt null, 0x0", "gfx1201": "s_wait_storecnt 0x0"}
INVALIDATED = {"gfx90a": "buffer_wbinvl1_vol", "gfx1100": "buffer_gl0_inv", "gfx1201": "global_inv scope:SCOPE_DEV"}
COHERENT = {"gfx90a": "glc", "gfx1100": "glc", "gfx1201": "scope:SCOPE_DEV"}      # a load that finds what another part of the chip has written

@pytest.mark.parametrize("arch", AMD)
def test_machine_code_of_turns(arch):
  found = instructions(text_of(in_turn, arch, *SUMS), arch, "in_turn")
  assert [x for x in found if "cmpswap" in x or x.startswith("flat")] == []
  assert sum(x.startswith("global_atomic_add_f32") for x in found) == 1
  drained, poll = DRAINED.get(arch, r"s_waitcnt vmcnt\(0\)"), rf"global_load.*offset:4 {COHERENT.get(arch, 'sc1')}"
  assert appear_in_order(found, "global_atomic_add", "ds_(write|store)", "s_barrier", "ds_(read|load)", poll, "s_sleep", poll, "s_wait",
               INVALIDATED.get(arch, "buffer_inv sc1"), "s_barrier", "global_atomic_add_f32", drained, "s_barrier", "global_atomic_add")
  if arch == "gfx1201": assert all("scope:SCOPE_DEV" in x for x in found if "atomic" in x)
  last = found[-1 - [x.startswith("s_barrier") for x in found[::-1]].index(True):]      # from the last barrier on: the turn is passed
  if arch in ("gfx942", "gfx950"): assert appear_in_order(last, "buffer_wbl2 sc1", r"s_waitcnt vmcnt\(0\)", "global_atomic_add")

@pytest.mark.parametrize("release", (19, 20, 22))
def test_clang_19_is_refused_for_rdna4(release):
  # clang 19 stops with an error at the source of atomic additions for RDNA4, because it would add with the scope of one compute unit only. The
  # sources for other chips do not test clang's version.
  text = text_of(in_turn, "gfx1201", *SUMS).replace("__clang_major__", str(release))
  if release >= 20: assert assembly(text, "gfx1201")
  else:
    with pytest.raises(CompileError, match="gfx1201 needs clang 20 to add to global memory and to pass a turn"): assembly(text, "gfx1201")
  assert "__clang_major__" not in text_of(in_turn, "gfx1100", *SUMS) + text_of(in_turn, "gfx942", *SUMS)

def four(o, x):
  # kernel in which one atomic addition of each lane adds to four elements that are 64 elements apart
  t = UOp.range(64, 0, AxisType.WARP)
  values = build(*[x[t*4 + i].load() for i in range(4)])
  r = UOp.placeholder((1,), dtypes.float, 1, AddrSpace.REG)
  return r[0].store(atomic_add(o[t], values, steps=(0, 64, 128, 192), gate=t < 60)).end(t).sink(arg=KernelInfo("four", opts_to_apply=()))

FOUR = (256, dtypes.float), (256, dtypes.float)

@pytest.mark.parametrize("arch", AMD)
def test_constant_distances_are_in_the_instruction(arch):
  found = [x for x in instructions(text_of(four, arch, *FOUR), arch, "four") if "atomic" in x]
  assert [re.search(r"offset:(\d+)", x)[1] if "offset" in x else "0" for x in found] == ["0", "256", "512", "768"]
  assert all(x.startswith("global_atomic_add_f32 ") and "glc" not in x and "sc0" not in x and "RETURN" not in x for x in found)

def backwards(o, x):
  # kernel in which one atomic addition of each lane adds to two elements: at an index, and 64 elements before this index
  t, r = UOp.range(64, 0, AxisType.WARP), UOp.placeholder((1,), dtypes.float, 1, AddrSpace.REG)
  both = build(x[t].load(), x[t + 64].load())
  return r[0].store(atomic_add(o[t + 64], both, steps=(-64, 0))).end(t).sink(arg=KernelInfo("backwards", opts_to_apply=()))

def test_a_distance_may_be_negative():
  np.testing.assert_array_equal(run(backwards, "gfx942", np.zeros(256, np.float32), X[:256])[0][:128], X[:128])
  found = [x for x in instructions(text_of(backwards, "gfx942", *FOUR), "gfx942", "backwards") if "atomic" in x]
  assert sorted("offset:256" in x for x in found) == [False, True]
  assert "[%0+-256]" in text_of(backwards, "sm_80", *FOUR)

def neighbours(together, shift=0):
  # a kernel in which each lane adds to four neighbouring elements, `together` of them by one instruction
  # `shift` is the index of the first element of lane 0
  def kernel(o, x):
    g, t = UOp.range(2, 0, AxisType.GLOBAL), UOp.range(32, 1, AxisType.WARP)
    values = build(*[x[(g*32 + t)*4 + i].load() for i in range(4)])
    r = UOp.placeholder((1,), dtypes.float, 1, AddrSpace.REG)
    return r[0].store(atomic_add(o[t*4 + shift], values, together=together)).end(g, t).sink(arg=KernelInfo("neighbours", opts_to_apply=()))
  return kernel

NEIGHBOURS = (132, dtypes.float), (256, dtypes.float)

@pytest.mark.parametrize("arch", ("sm_80", "sm_90"))
def test_text_for_nvidia(arch, tmp_path):
  # nvcc compiles the CUDA source of atomic additions. On sm_90 one instruction adds two or four neighbouring elements.
  texts = [text_of(in_turn, arch, *SUMS), text_of(four, arch, *FOUR)]
  texts += [text_of(neighbours(n), arch, *NEIGHBOURS) for n in ((1, 2, 4) if arch == "sm_90" else (1,))]
  texts.append(text_of(backwards, arch, *FOUR))
  assert "ld.acquire.gpu.global.s32" in texts[0] and "red.release.gpu.global.add.s32" in texts[0] and "volatile int" not in texts[0]
  assert texts[1].count("red.relaxed.gpu.global.add.f32 ") == texts[2].count("red.relaxed.gpu.global.add.f32 ") == 4
  for text, n in zip(texts[3:-1], (2, 4)): assert text.count(f"red.relaxed.gpu.global.add.v{n}.f32 ") == 4//n and ".add.f32 " not in text
  if shutil.which("nvcc") is None: pytest.skip("needs nvcc")
  for i, text in enumerate(texts):
    (tmp_path/f"{i}.cu").write_text(text)
    command = ["nvcc", f"-arch={arch.replace('90', '90a')}", "-cubin", "-o", str(tmp_path/"kernel.cubin"), str(tmp_path/f"{i}.cu")]
    assert subprocess.run(command, capture_output=True, text=True, check=False).returncode == 0

def test_chips_without_the_instruction():
  with pytest.raises(NotImplementedError, match="sm_80 has no instruction that adds 2 float32"): text_of(neighbours(2), "sm_80", *NEIGHBOURS)
  with pytest.raises(NotImplementedError, match="gfx942 has no instruction that adds 4 float32"): text_of(neighbours(4), "gfx942", *NEIGHBOURS)
  with pytest.raises(NotImplementedError, match="gfx1030 has no instruction"): text_of(neighbours(1), "gfx1030", *NEIGHBOURS)

def test_wrong_operands():
  sums, numbers, x = UOp.placeholder((64,), dtypes.float, 0), UOp.placeholder((64,), dtypes.int, 1), UOp.const(1.0, dtypes.float)
  with pytest.raises(ValueError, match="together=3: must be 1, 2 or 4"): atomic_add(sums[0], build(x, x, x), together=3)
  with pytest.raises(ValueError, match=r"together=4: .*divide the 2 elements"): atomic_add(sums[0], build(x, x), together=4)
  with pytest.raises(ValueError, match=r"steps=\(0, 4, 8\): must be 2 distances"): atomic_add(sums[0], build(x, x), steps=(0, 4, 8))
  with pytest.raises(ValueError, match="at: must be an INDEX of float in global memory, not INDEX of int"): atomic_add(numbers[0], x)
  with pytest.raises(ValueError, match=r"at: .*REG"): atomic_add(UOp.placeholder((1,), dtypes.float, 2, AddrSpace.REG)[0], x)
  with pytest.raises(ValueError, match="counter: must be an INDEX of int in global memory"): pass_turn(sums[0], UOp.const(True))

# ***** meaning *****

def run(kernel, arch, *tensors):
  with Context(DEV=f"EMU::{arch}"):
    first, *rest = [Tensor(x).realize() for x in tensors]
    found = first.custom_kernel(*rest, fxn=kernel)
    Tensor.realize(*found)
    return [x.numpy() for x in found]

RNG = np.random.default_rng(0)
X = RNG.standard_normal(GROUPS*WIDTH, dtype=np.float32)

def test_meaning_of_sums():
  start = RNG.standard_normal(256, dtype=np.float32)
  rows = X[:256].reshape(64, 4).T
  np.testing.assert_array_equal(run(four, "gfx942", start, X[:256])[0].reshape(4, 64)[:, :60], (start.reshape(4, 64) + rows)[:, :60])
  np.testing.assert_array_equal(run(four, "gfx942", start, X[:256])[0].reshape(4, 64)[:, 60:], start.reshape(4, 64)[:, 60:])

@pytest.mark.parametrize("together", (1, 2, 4))
def test_meaning_of_neighbours(together):
  zeros = np.zeros(132, np.float32)
  expected = X[:128] + X[128:256]
  np.testing.assert_array_equal(run(neighbours(together), "sm_90", zeros, X[:256])[0][:128], expected)
  if together == 1: np.testing.assert_array_equal(run(neighbours(together, 1), "sm_90", zeros, X[:256])[0][1:129], expected)
  else:
    with pytest.raises(checks.Misaligned, match=f"{4*together} bytes of data0 at once"): run(neighbours(together, 1), "sm_90", zeros, X[:256])
  with pytest.raises(checks.OutOfBounds, match=rf"adds to data0\[{132//together}\] is out of bounds"):
    run(neighbours(together, 8), "sm_90", zeros, X[:256])

def tickets(width):
  def kernel(o, counter):
    # kernel in which each workgroup gets a ticket and writes it
    g, t = UOp.range(8, 0, AxisType.GLOBAL), UOp.range(width, 1, AxisType.LOCAL)
    lds = UOp.placeholder((1,), dtypes.int, 0, AddrSpace.LOCAL)
    drawn = ticket(counter[0], g, t.eq(0), lds=lds[0] if width > 64 else None)
    return o[g*width + t].store(drawn).end(g, t).sink(arg=KernelInfo("tickets", opts_to_apply=()))
  return kernel

@pytest.mark.parametrize("width", (64, 256))
def test_meaning_of_tickets(width):
  # `ticket` gives each workgroup a number of its own, the value of an atomic counter before its addition. All lanes of the workgroup get this number.
  found, counter = run(tickets(width), "gfx942", np.full(8*width, -1, np.int32), np.array([5], np.int32))
  found = found.reshape(8, width)
  assert (found == found[:, :1]).all() and sorted(found[:, 0]) == list(range(5, 13)) and counter[0] == 13
