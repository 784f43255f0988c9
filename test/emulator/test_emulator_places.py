"""Tests of `probe`, which collects or prints values inside an emulated kernel, and of the place that an error of the emulator names: a line of Python
and a statement of the rendered source."""
from __future__ import annotations
import re
from pathlib import Path
import numpy as np
import pytest
from tinygrad import Context, Tensor, dtypes
from tinygrad.dtype import AddrSpace
from tinygrad.uop.ops import AxisType, KernelInfo, Ops, UOp
import attn.emulator as emulator
from attn import flash_attention_fn
from attn.emulator import checks, listing
from attn.emulator.device import UOpCompiler
from attn.kernels.parts.program import trips
from attn.ops import amd, common
from attn.ops.operation import OPERATIONS, Operation, emit
from attn.ops.renderers import OperationsHIPCCRenderer, render
from attn.tinygrad_compat import Target, lower, statements
from cases import EVERY_ARCH

X = np.arange(256, dtype=np.float32)

@pytest.fixture(autouse=True)
def _device():
  with Context(DEV="EMU::gfx942"): yield

def sink(name, *stores, ranges=()): return UOp.group(*stores).end(*ranges).sink(arg=KernelInfo(name, opts_to_apply=()))
def threads(n, groups=1): return UOp.range(groups, 0, AxisType.GLOBAL), UOp.range(n, 1, AxisType.WARP)
def run(fxn, *inputs, out=(64,)): return Tensor.empty(*out).custom_kernel(*[Tensor(x).realize() for x in inputs], fxn=fxn)[0].numpy()

def line_of(text:str) -> int:
  # the number of the line of this file that ends in the comment `text`
  return next(i for i, line in enumerate(Path(__file__).read_text().splitlines(), 1) if line.endswith(f"# {text}"))

def places(e:pytest.ExceptionInfo[BaseException]) -> list[str]: return str(e.value).splitlines()[1:]

# ***** the line of Python and the statement *****

def shifted(shift:int):
  def kernel(o, x):
    g, t = threads(64)
    at = t + shift
    value = common.exp2(x[at].load())      # the load
    return sink("shifted", o[t].store(value), ranges=(g, t))
  return kernel

def test_an_error_names_the_line_of_python_and_the_statement() -> None:
  with pytest.raises(checks.OutOfBounds) as e: run(shifted(1), X[:64])
  python, statement = places(e)
  assert python == f"  test/emulator/test_emulator_places.py:{line_of('the load')}: value = common.exp2(x[at].load()) # the load"
  number, text = re.fullmatch(r"  line (\d+) of the source: (.*)", statement).groups()
  assert text == "float val0 = (*(data1_64+(lidx0+1)));"
  source = next(s for s in reversed(UOpCompiler.printed) if "shifted" in s)
  assert source.splitlines()[int(number) - 1].strip() == text

def test_what_an_operation_of_ours_emits_belongs_to_its_caller() -> None:
  # An error in an operation of attn/ops/amd.py names the line of the kernel that calls the operation.
  def kernel(o, x):
    g, t = threads(64)
    r = UOp.range(t % 2 + 1, 2, AxisType.LOOP)
    order = UOp.placeholder((1,), dtypes.float, 0, AddrSpace.REG)
    step = order.after(r)[0].store(amd.barrier(x[t].load() + r.cast(dtypes.float)))    # the barrier
    return sink("uneven", o[t].store(order.after(step.end(r))[0].load()), ranges=(g, t))
  with pytest.raises(checks.DivergentBarrier) as e: run(kernel, X[:64])
  assert places(e)[0].startswith(f"  test/emulator/test_emulator_places.py:{line_of('the barrier')}: ")
  assert "ordered_barrier()" in places(e)[1]

def test_an_error_in_a_kernel_of_ours(monkeypatch) -> None:
  # An error in a large kernel of attn names lines of the kernel's files, and not lines of attn/ops, although tinygrad has lowered the kernel.
  monkeypatch.setattr(trips, "workgroup_barrier", lambda after: after)
  q, k, v = [Tensor(np.random.default_rng(i).standard_normal((1, 1, 150, 64)).astype(np.float16)).realize() for i in range(3)]
  o = Tensor.empty(1, 1, 150, 64, dtype="half")
  with Context(DEV="EMU::gfx1100"), pytest.raises(checks.LdsRace) as e: o.custom_kernel(q, k, v, fxn=flash_attention_fn())[0].numpy()
  assert re.match(r"  attn/kernels/[\w/]+\.py:\d+: ", places(e)[0]) and re.match(r"  line \d+ of the source: ", places(e)[1])

def test_a_kernel_that_tinygrad_makes_has_a_statement_alone() -> None:
  def first(o, x):
    g, t = threads(64)
    return sink("first", o[t.valid(t < 48)].store(x[t]), ranges=(g, t))
  half = Tensor.empty(64).custom_kernel(Tensor(X).realize(), fxn=first)[0].realize()
  with pytest.raises(checks.UninitialisedRead) as e: (half + 1).realize()
  assert len(places(e)) == 1 and "of the source" in places(e)[0]

def test_a_kernel_that_is_made_otherwise_the_second_time_has_no_line_of_python() -> None:
  # The emulator builds a faulty kernel a second time to find the line of Python that made the faulty operation. If the second program differs from
  # the first, the error names no line: it would be a guess.
  shift = iter(range(1, 100))
  def kernel(o, x): return shifted(next(shift))(o, x).replace(arg=KernelInfo("otherwise", opts_to_apply=()))
  with pytest.raises(checks.OutOfBounds) as e: run(kernel, X[:64])
  assert len(places(e)) == 1 and "(lidx0+1)" in places(e)[0]

def test_another_error_within_an_operation_has_the_place_as_a_note(monkeypatch) -> None:
  def meaning(lanes, x): raise KeyError("broken")
  monkeypatch.setitem(OPERATIONS, "test_broken", Operation(meaning, "test_broken({0})"))
  def kernel(o, x):
    g, t = threads(64)
    return sink("noted", o[t].store(emit("test_broken", dtypes.float, x[t].load())), ranges=(g, t))    # broken
  with pytest.raises(KeyError) as e: run(kernel, X[:64])
  note, = e.value.__notes__
  assert "in noted, step" in note and f"test_emulator_places.py:{line_of('broken')}" in note and "test_broken(val0)" in note

def test_a_value_out_of_scope_names_both_ends() -> None:
  import test_emulator_checks as t
  with pytest.raises(checks.OutOfScope) as e: run(t.at_most_once(lambda g: 1 - g), X[:64], out=(128,))
  assert [x.split(":")[0].strip() for x in places(e)[::2]] == ["test/emulator/test_emulator_checks.py"]*2

def test_statements() -> None:
  # `statements` renders a lowered program, and maps each of its UOps to the line of the source with the UOp's declaration or statement.
  tensors = [UOp.placeholder((1, 2, 64, 64), dtypes.half, i) for i in range(4)]
  renderer = OperationsHIPCCRenderer(Target("AMD", "HIPCC", "gfx942"))
  uops = lower(flash_attention_fn(arch="gfx942")(*tensors).sink, renderer)
  source, lines = statements(renderer, uops)
  assert source == renderer.render(uops)
  text = source.splitlines()
  kinds = {Ops.STORE: r" = .*(;|\(\{)$", Ops.RANGE: r"^\s*for \(", Ops.END: r"^\s*}$", Ops.CUSTOM: r"\w+ = |;$", Ops.BUFFER: r"\[\d+\];"}
  for op, pattern in kinds.items():
    of_kind = [u for u in uops if u.op is op]
    assert of_kind and all(re.search(pattern, text[lines[u]]) for u in of_kind), op
  own = [u for u in uops if u.op in (Ops.STORE, Ops.RANGE, Ops.CUSTOM)]
  assert len({lines[u] for u in own}) == len(own) and sorted(lines[u] for u in own) == [lines[u] for u in own]

def test_nothing_stays_changed_after_a_kernel_has_been_made_again() -> None:
  from tinygrad.uop import ops
  now = lambda: (ops.UOpMetaClass.__call__, ops.RewriteContext.unified_rewrite, ops.RewriteContext.walk_rewrite, ops.UOp.replace)
  before = now()
  test_an_error_names_the_line_of_python_and_the_statement()
  assert before == now()

def test_few_kernels_are_remembered() -> None:
  for i in range(listing.REMEMBERED + 5): listing.remember(UOp.sink(arg=KernelInfo(f"kernel{i}")), lambda: None)
  assert len(listing._built) == listing.REMEMBERED

@pytest.mark.sample(3)
@pytest.mark.parametrize("arch", EVERY_ARCH)
def test_the_emulator_prints_what_hardware_gets(arch:str) -> None:
  # The emulator renders the same source as the renderer for hardware. In kernels for the emulator, the root of the AST also lists the outputs, so
  # that the emulator finds outputs without a store. This must not change the source.
  tensors = [UOp.placeholder((1, 2, 64, 32), dtypes.half, i) for i in range(4)]
  fxn = flash_attention_fn(arch=arch)
  with Context(DEV=f"EMU::{arch}"):
    q, k, v = [Tensor(np.zeros((1, 2, 64, 32), np.float16)).realize() for _ in range(3)]
    Tensor.empty(1, 2, 64, 32, dtype="half").custom_kernel(q, k, v, fxn=fxn)[0].realize()
  assert render(fxn(*tensors).sink, arch) in UOpCompiler.printed

# ***** an output whose stores fold away *****

@pytest.mark.parametrize("other", (False, True))
def test_an_output_whose_store_is_simplified_away(other:bool) -> None:
  # An output raises UnwrittenOutput when it is read, if lowering has removed its only store because the store's condition is never true. This is so
  # with and without a second output that the kernel writes.
  def kernel(o, *more):
    g, t = threads(64)
    stores = [o[t.valid(t >= 64)].store(more[-1][t])]
    return sink("folded", *stores, *([more[0][t].store(more[-1][t])] if other else []), ranges=(g, t))
  outputs = [Tensor.empty(64) for _ in range(2)][:1 + other]
  results = Tensor.custom_kernel(*outputs, Tensor(X[:64]).realize(), fxn=kernel)
  if other: np.testing.assert_array_equal(results[1].numpy(), X[:64])
  with pytest.raises(checks.UnwrittenOutput, match=r"folded: output element data0\[0\].*64 of 64 in all.*every store to it was simplified away"):
    results[0].numpy()

def test_an_output_that_was_written_before_may_be_left_as_it_is() -> None:
  def kernel(o, x):
    g, t = threads(64)
    return sink("untouched", o[t.valid(t >= 64)].store(x[t]), ranges=(g, t))
  o = Tensor(X[:64]).realize()
  np.testing.assert_array_equal(o.custom_kernel(Tensor(X[64:128]).realize(), fxn=kernel)[0].numpy(), X[:64])

# ***** probes *****

def probed(o, x):
  # kernel with two workgroups of 70 threads each: a full wave of 64 lanes and a wave of 6 lanes
  g, t = threads(70, 2)
  i = emulator.probe("index", g*70 + t)
  pair = common.build(x[t].load(), x[t].load() + 1.0)
  pair = emulator.probe("pair", pair)
  return sink("probed", o[g*70 + t].store(common.extract(pair, 1) + i.cast(dtypes.float)), ranges=(g, t))

def test_probes_collect() -> None:
  with emulator.probes() as found: got = run(probed, X, out=(140,))
  t = np.tile(np.arange(70), 2)
  np.testing.assert_array_equal(got, t + 1 + np.arange(140))
  assert sorted(found) == ["index", "pair"] and [len(x) for x in found.values()] == [1, 1]
  index, pair = found["index"][0], found["pair"][0]
  np.testing.assert_array_equal(index["values"], np.arange(140))
  np.testing.assert_array_equal(pair["values"], np.stack([t, t + 1], 1))
  for rows in (index, pair):
    np.testing.assert_array_equal(rows["workgroup"], np.repeat([[0, 0, 0], [1, 0, 0]], 70, 0))
    np.testing.assert_array_equal(rows["wave"], t//64)
    np.testing.assert_array_equal(rows["lane"], t % 64)

def test_a_probe_in_a_loop_has_an_array_for_each_trip_and_only_active_threads() -> None:
  def kernel(o, x):
    g, t = threads(64)
    r = UOp.range(t//32 + 1, 2, AxisType.LOOP)
    total = UOp.placeholder((1,), dtypes.float, 0, AddrSpace.REG)
    total = total.after(total[0].store(0.0))
    step = total.after(r)[0].store(total.after(r)[0] + emulator.probe("trip", x[t].load() + r.cast(dtypes.float)))
    return sink("trips", o[t].store(total.after(step.end(r))[0]), ranges=(g, t))
  with emulator.probes() as found: run(kernel, X[:64])
  first, second = found["trip"]
  assert list(first["lane"]) == list(range(64)) and list(second["lane"]) == list(range(32, 64))
  np.testing.assert_array_equal(second["values"], np.arange(32, 64) + 1)

def test_probes_print_where_nothing_collects(capsys) -> None:
  run(probed, X, out=(140,))
  out = capsys.readouterr().out.splitlines()
  assert "pair: workgroup (1, 0, 0), wave 1" in out and out[out.index("pair: workgroup (1, 0, 0), wave 1") + 6] == "  lane  5: 69. 70."

def test_collecting_ends_with_its_block(capsys) -> None:
  with emulator.probes() as found: pass
  run(probed, X, out=(140,))
  assert not found and "pair: workgroup" in capsys.readouterr().out

@pytest.mark.parametrize("name", ("", "two words", "a*/b", "{0}", 3))
def test_names_of_probes(name) -> None:
  with pytest.raises(ValueError, match="name="): emulator.probe(name, UOp.const(1.0, dtypes.float))

def test_a_probe_of_an_address() -> None:
  with pytest.raises(ValueError, match=r"'x' is given an address: \.load\(\) the value"):
    emulator.probe("x", UOp.placeholder((4,), dtypes.float, 0)[0])

def test_a_probe_costs_nothing_on_hardware() -> None:
  # A kernel has the same machine code with and without a `probe`, an operation that collects values on the emulator.
  from attn.compilers.clang import assembly
  def code(with_probe:bool) -> list[str]:
    def kernel(o, x):
      g, t = threads(64)
      v = common.build(x[t].load(), x[t].load() + 1.0)
      if with_probe: v = emulator.probe("v", v)
      return sink("kernel", o[t].store(common.extract(v, 0)*common.extract(v, 1)), ranges=(g, t))
    text = assembly(render(kernel(*[UOp.placeholder((64,), dtypes.float, i) for i in range(2)]), "gfx1100"), "gfx1100")
    return [line.split(";")[0].strip() for line in text.splitlines() if line.startswith("\t") and not line.startswith("\t.")]
  assert code(True) == code(False) and any("v_mul_f32" in x or "v_fma" in x or "v_add_f32" in x for x in code(True))

# ***** the manual *****

def test_every_error_is_in_the_manual() -> None:
  text = (Path(__file__).parent.parent.parent/"docs/emulator.md").read_text()
  errors = [e for e in vars(checks).values() if isinstance(e, type) and issubclass(e, checks.EmulatorError)]
  assert len(errors) > 15
  for e in errors:
    assert f"`{e.__name__}`" in text and f"`{e.__name__}`" in checks.__doc__ + "`EmulatorError`" and getattr(emulator, e.__name__) is e
