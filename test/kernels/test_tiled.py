"""Tests of `tiled`, the forward kernel of plain UOps, in every dtype, with many threads and with one, on the emulator and on real devices of this
machine."""
from __future__ import annotations
import contextlib, functools, os, subprocess, sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
import numpy as np
import pytest
import attn
import attn.api.checked_call
import attn.calls.checked_kernel
import attn.choose.dispatch
from attn.accuracy import judge
from attn.api.attention import choice_of
from attn.api.launch import kernels
from attn.chips import get_chip, other_chip
from attn.choose.dispatch import KERNELS, _choose, forward_of
from attn.choose.tiled_tiles import ALONE, TILED, tiled_tile
from attn.emulator.checks import LdsRace, NotWaitedFor
from attn.kernels.combine import combine, combine_arguments
from attn.kernels.parts.grid.tensors import arguments
from attn.kernels.parts.grid.workgroup import Workgroup
from attn.kernels.parts.weights import dropout as kept
from attn.kernels.plain.forward import PlainForward
from attn.kernels.plain.rectangle import Rectangle
from attn.kernels.tiles.plain import Sections, TiledTile
from attn.ops import common as ops, dropout, nvidia as nv
from attn.ops.plain import plain
from attn.ops.renderers import printer_of
from attn.problem import Problem, Strided
from attn.reference import exact
from attn.score.alibi import alibi
from attn.score.softcap import softcap
from attn.tinygrad_compat import VECTORS, AxisType, Context, KernelInfo, Ops, Tensor, UOp, compiled, dtypes, lower
from attn.values import FLOATS
from api_cases import check_attention, draw, emulated, floats, int32
from cases import Inputs, array, expected, in_turn, normal, problem, tensor
from test_forward import ADVERSARIAL, large_rows, rising

PLAIN_CHIPS = ("gfx1030", "gfx1010", "sm_80", "gfx942")
SMALL = TiledTile(4, 4, 4, 4, 16, 8, keeps_own=False)     # 16 threads: a problem has several tiles along every dimension
AHEAD = replace(SMALL, depth=8, keeps_own=True, ahead=True)
ONE_THREAD = replace(ALONE, walked=4, own=4, parts=2, columns=4)

@contextlib.contextmanager
def with_tile(tile:TiledTile|None, patch:pytest.MonkeyPatch) -> Iterator[None]:
  # Context in which dispatch uses `tile` for every problem. With None, dispatch chooses as usual.
  if tile is not None: patch.setitem(KERNELS, "tiled", replace(KERNELS["tiled"], tile=lambda p, arch: tile))
  _choose.cache_clear(), kernels.cache_clear()
  try: yield
  finally:
    patch.undo()
    _choose.cache_clear(), kernels.cache_clear()

def check(arch:str="gfx1030", make=normal, tile:TiledTile|None=None, **parameters) -> tuple[np.ndarray, np.ndarray]:
  with with_tile(tile, pytest.MonkeyPatch()): return check_attention(arch, "tiled", make, **parameters)

# ***** the law *****

@pytest.mark.sample(2)
@in_turn("dtype, arch", ("float32", "float16", "bfloat16"), PLAIN_CHIPS)
def test_every_type(dtype:str, arch:str) -> None: check(arch, B=1, H=4, Hkv=2, Sq=70, Sk=100, D=40, Dv=24, dtype=dtype, causal=dtype != "float16")

def test_float32_is_exact_to_its_own_rounding() -> None:
  # float32 results of the forward kernel of plain UOps differ from float64 by at most 2e-6, even where docs/contract.md allows more.
  p = problem(H=1, Sq=64, Sk=200, D=64, dtype="float32")
  x, got = normal(p), check(H=1, Sq=64, Sk=200, D=64, dtype="float32")
  s = (x.q.astype(np.float64) @ x.k.swapaxes(-1, -2).astype(np.float64))*p.softmax_scale
  weights = np.exp(s - s.max(-1, keepdims=True))
  assert np.abs(got[0] - weights/weights.sum(-1, keepdims=True) @ x.v.astype(np.float64)).max() < 2e-6

@pytest.mark.sample(3)
@in_turn("make, dtype", ADVERSARIAL, ("float32", "bfloat16", "float16"), among=12)
def test_adversarial(make, dtype:str) -> None:
  dtype = "bfloat16" if make.__name__ == "huge_key" and dtype == "float16" else dtype
  check("gfx1010", make, tile=SMALL, H=2, Sq=40, Sk=90, D=32, dtype=dtype)

@pytest.mark.parametrize("D, Dv", [(1, 3), pytest.param(512, 300, marks=pytest.mark.thorough), pytest.param(260, 512, marks=pytest.mark.thorough)])
def test_head_dimensions(D:int, Dv:int) -> None: check(tile=SMALL if D < 100 else None, H=1, Sq=20, Sk=40, D=D, Dv=Dv, dtype="float32")

def test_long_sums_are_taken_in_parts() -> None:
  # The forward kernel of plain UOps sums a long dot product in several parts. So lse for scores near 1e4 is within 4 units in the last place of the
  # largest score. One sequential sum of 512 products would err by 9 such units.
  parameters:dict[str, Any] = dict(H=2, Sq=70, Sk=90, D=512, Dv=8, dtype="float32")
  _, lse = check(make=large_rows, tile=replace(SMALL, down=8, across=8, depth=32, ahead=True), **parameters)
  _, law = expected(p := problem(**parameters), large_rows(p), {})
  assert np.abs(lse - law.exact).max() < 4*np.spacing(np.float32(np.abs(law.exact).max()))

def test_softcap_is_as_exact_as_float32() -> None:
  # The error of o with softcap in float32 is below 6e-7 times the size of the values. Near 0, tanh(x) must not be computed as 1 - 2/(1 + exp(2x)),
  # with which the error would be 15e-7.
  def large_values(p:Problem) -> Inputs:
    x = normal(p)
    return replace(x, v=x.v*1000)
  parameters:dict[str, Any] = dict(Sq=30, Sk=40, D=16, dtype="float32", softcap=30.0)
  o, _ = check(make=large_values, tile=SMALL, **parameters)
  law, _ = expected(p := problem(**parameters), large_values(p), {})
  assert np.abs(o - law.exact).max() < 1000*6e-7

@pytest.mark.thorough
@pytest.mark.parametrize("row", TILED, ids=lambda row: str(row.shape))
def test_every_tile(row) -> None:
  check("sm_90", tile=row.shape, H=1, Sq=row.shape.block_m + 3, Sk=row.shape.block_n + 5, D=min(row.up_to, 264), dtype="float32")

# ***** options *****

MASKED = {"window": (9, 3), "softcap": 2.0, "layout": "bshd",
          "extras": {"alibi_slopes": np.float32([.5, .25, .1, .03]), "bias": floats(2, 1, 20, 50), "sinks": floats(4), "kv_lengths": int32(31, 50)}}
PACKED = {"layout": "thd", "causal": True, "extras": {"cu_seqlens_q": int32(0, 0, 4, 9, 11), "cu_seqlens_k": int32(0, 3, 3, 10, 13)}}

@pytest.mark.parametrize("dtype, tile", [("float32", AHEAD), *(pytest.param("float16", x, marks=pytest.mark.thorough) for x in (ONE_THREAD, ALONE))])
def test_options(dtype:str, tile:TiledTile) -> None: check(tile=tile, B=2, H=4, Hkv=2, Sq=20, Sk=50, D=16, dtype=dtype, **MASKED)

def test_options_without_workgroups(monkeypatch:pytest.MonkeyPatch) -> None:
  # A chip without workgroups, such as a CPU, runs the grid as a loop. The forward kernel of plain UOps is right on such a chip, which the emulator
  # simulates here: with packed sequences, and with window, softcap, ALiBi, bias, sinks and lengths together.
  monkeypatch.setattr(attn.api.checked_call, "arch_of", serial := lambda device: replace(get_chip("gfx1030"), lds=0, serial=True))
  monkeypatch.setattr(attn.calls.checked_kernel, "arch_of", serial)
  check(tile=ONE_THREAD, H=2, Hkv=1, Sq=11, Sk=13, D=16, dtype="float32", **PACKED)
  check(tile=ONE_THREAD, B=2, H=4, Hkv=2, Sq=20, Sk=50, D=16, dtype="float32", **MASKED)

def test_packed_sequences() -> None: check(tile=SMALL, H=2, Hkv=1, Sq=11, Sk=13, D=16, dtype="float32", **PACKED)

def test_key_ranges() -> None: check(tile=SMALL, H=2, Sq=20, Sk=70, D=16, Dv=8, dtype="float32", causal=True, num_splits=3)

def test_nan_beyond_the_lengths_has_no_effect() -> None:
  def poisoned(p:Problem):
    x = normal(p)
    x.k[:, :, 21:], x.v[:, :, 21:] = np.nan, np.nan
    return x
  for tile in (SMALL, ONE_THREAD):
    o, lse = check(make=poisoned, tile=tile, B=1, H=1, Sq=9, Sk=50, D=16, dtype="float32", extras={"kv_lengths": int32(21)})
    assert np.isfinite(o).all() and np.isfinite(lse).all()

def test_one_thread_without_workgroups() -> None:
  # A device without workgroups, such as a CPU, runs the grid as a loop over the blocks of queries. One thread computes a block for all batches and
  # heads. The forward kernel of plain UOps is right on such a device, which the emulator simulates here.
  serial = replace(get_chip("gfx1030"), lds=0, serial=True)
  p = problem(B=2, H=2, Sq=20, Sk=30, D=16, dtype="float32", lse=False, causal=True)
  kernel = forward_of(p, serial, ONE_THREAD)
  sink = kernel(*placeholders(p))
  kinds = sorted((u.arg[-1].name, int(u.vmax) + 1) for u in sink.toposort() if u.op is Ops.RANGE and u.arg[-1] is not AxisType.LOOP)
  assert kinds == [("GLOBAL", 5)]
  x = normal(p)
  with Context(DEV="EMU::gfx1030"):
    o = Tensor.empty(2, 2, 20, 16)
    got = o.custom_kernel(*map(Tensor, (x.q, x.k, x.v)), fxn=kernel)[0].numpy()
  np.testing.assert_allclose(got, exact(x.q, x.k, x.v, p.softmax_scale, p.window, p.offset)[0], atol=2e-6)

DROPOUT = dict(H=2, Hkv=1, Sq=9, Sk=50, D=16, dtype="float32", causal=True, dropout_p=0.3, extras={"dropout_seed": np.array([3, 5], np.uint32)})

@pytest.mark.parametrize("tile", (SMALL, pytest.param(ONE_THREAD, marks=pytest.mark.thorough)))
def test_dropout(tile:TiledTile) -> None: check(tile=tile, **DROPOUT)

HALF, NORMALISED = kept._kept_half, Workgroup.normalised
FAULTS_OF_DROPOUT: dict[str, tuple[Any, str, Any]] = {
  "bits of the wrong keys": (kept, "_kept_half", lambda scores, row, query, key: HALF(scores, row, query, key//8*8)),
  "O of all P": (kept.KeptHere, "drop", lambda self, x: x),
  "O without 1/(1 - p)": (Workgroup, "normalised", lambda self, *args: NORMALISED(replace(self, p=replace(self.p, dropout_p=0.0)), *args))}

@pytest.mark.parametrize("fault", [pytest.param(x, marks=pytest.mark.thorough if i else ()) for i, x in enumerate(FAULTS_OF_DROPOUT)])
def test_planted_fault_of_dropout(fault:str, monkeypatch:pytest.MonkeyPatch) -> None:
  # A planted fault in dropout makes the error of o larger than its limit. Each fault has its own problem, because tinygrad's cache keeps programs.
  monkeypatch.setattr(*FAULTS_OF_DROPOUT[fault])
  with pytest.raises(AssertionError, match="o: "): check(tile=SMALL, **{**DROPOUT, "Sq": 10 + list(FAULTS_OF_DROPOUT).index(fault)})

@pytest.mark.thorough
@pytest.mark.parametrize("D", (1, 6, 130))
def test_rows_that_are_no_multiple_of_four(D:int) -> None:
  # The forward kernel of plain UOps is right for rows whose width is no multiple of four. In an earlier version, a kernel of one thread summed
  # elements that no code had written.
  check(tile=ONE_THREAD, H=1, Sq=9, Sk=20, D=D, Dv=5, dtype="float32")

# ***** asynchronous copies *****

COPIED = TiledTile(4, 8, 4, 4, 8, 8, asynchronous=True, steps_at_once=8)      # K and V of a tile are copied in two portions each
COPIED_WHOLE = replace(COPIED, depth=16, values=16)
CASES_OF_COPIES: dict[str, dict[str, Any]] = {
  "uneven": dict(H=4, Hkv=2, Sq=45, Sk=70, D=24, Dv=20, causal=True), "options": dict(B=2, H=4, Hkv=2, Sq=20, Sk=50, D=16, **MASKED),
  "packed": dict(H=2, Hkv=1, Sq=11, Sk=13, D=16, **PACKED), "long sums": dict(H=1, Sq=33, Sk=40, D=256, Dv=16),
  "key ranges": dict(H=2, Sq=20, Sk=70, D=16, Dv=8, causal=True, num_splits=3),
  "dropout": dict(H=2, Hkv=1, Sq=9, Sk=50, D=16, dropout_p=0.3, extras={"dropout_seed": np.array([3, 5], np.uint32)})}

@pytest.mark.sample(3)
@in_turn("name, on", CASES_OF_COPIES, (("sm_90", COPIED), ("sm_80", COPIED_WHOLE)))
def test_asynchronous_copies(name:str, on:tuple[str, TiledTile]) -> None:
  check(on[0], tile=on[1], dtype="float32", **CASES_OF_COPIES[name])

@in_turn("make, on", ADVERSARIAL, (("sm_90", COPIED),), among=4)
def test_adversarial_inputs_that_are_copied_asynchronously(make, on:tuple[str, TiledTile]) -> None:
  check(on[0], make, tile=on[1], H=2, Sq=40, Sk=90, D=32, dtype="float32")

STARTED = Rectangle.started
FAULTS_OF_COPIES: dict[str, tuple[Any, str, Any]] = {
  "no wait": (nv, "wait_copies", lambda after, but: nv.commit(after)),
  "to the place that is read": (Rectangle, "started", lambda self, portion, place, *args: STARTED(self, portion, (place + 1)%2, *args))}

@pytest.mark.usefixtures("without_places")
@pytest.mark.parametrize("fault", FAULTS_OF_COPIES)
def test_planted_fault_of_asynchronous_copies(fault:str, monkeypatch:pytest.MonkeyPatch) -> None:
  # The emulator stops at a read of data that was not waited for. Each fault has its own problem, because tinygrad's cache keeps programs.
  monkeypatch.setattr(*FAULTS_OF_COPIES[fault])
  with pytest.raises(NotWaitedFor):
    check("sm_90", tile=COPIED, H=1, Sq=45 + list(FAULTS_OF_COPIES).index(fault), Sk=71, D=16, dtype="float32")

def test_rows_that_are_no_whole_units_are_not_copied_asynchronously() -> None:
  # NVIDIA's chips copy whole units of 16 bytes, without a conversion. Other rows are copied through registers, as all rows are on other chips.
  def tile(arch:str, **parameters:Any) -> TiledTile:
    views = {name: parameters.pop(name) for name in ("k_view", "v_view") if name in parameters}
    p = problem(**{**dict(H=256, Sq=512, Sk=512, D=64, dtype="float32"), **parameters})
    return tiled_tile(replace(p, **views), get_chip(arch))
  whole = Strided(256*512*64, 0, 0, 512*64, 64)
  assert tile("sm_90").asynchronous and tile("sm_90", D=512, Dv=512).asynchronous and tile("sm_90", k_view=whole, v_view=whole).asynchronous
  for arch, parameters in (("gfx942", {}), ("sm_90", {"D": 62}), ("sm_90", {"Dv": 6}), ("sm_90", {"dtype": "float16"}),
                           ("sm_90", {"k_view": whole, "v_view": replace(whole, start=2)})):
    assert not tile(arch, **parameters).asynchronous, (arch, parameters)

# ***** planted faults *****

def fault(name:str, change) -> None:
  # checks the kernel of plain UOps with change(method) in place of its method `name`; a fault raises AssertionError
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(PlainForward, name, change(getattr(PlainForward, name)))
    check(make=rising, tile=SMALL, H=1, Sq=20, Sk=70, D=16, dtype="float32", causal=True)

def test_sums_that_are_not_rescaled_show() -> None:
  with pytest.raises(AssertionError, match="o: "):
    fault("summed", lambda old: lambda self, *args: old(self, *args[:6], [ops.splat(1.0, 4)]*len(args[6]), *args[7:]))

def test_keys_that_are_not_masked_show() -> None:
  with pytest.raises(AssertionError, match="o: "): fault("masked", lambda old: property(lambda self: False))

@pytest.mark.usefixtures("without_places")
def test_sections_of_local_memory_that_overlap_show(monkeypatch:pytest.MonkeyPatch) -> None:
  places = Sections.places.fget
  monkeypatch.setattr(Sections, "places", property(lambda self: {**places(self), "p": places(self)["walked"]}))
  with pytest.raises(LdsRace): check(tile=replace(SMALL, down=16), H=1, Sq=20, Sk=70, D=16, dtype="float32")

def test_a_maximum_that_not_all_threads_share_shows() -> None:
  with pytest.raises(AssertionError, match="o: "):
    fault("over_threads", lambda old: lambda self, parts, join, ready, *done: (parts, old(self, parts, join, ready, *done)[1]))

# ***** plain UOps *****

def placeholders(p:Problem) -> list[UOp]:
  return [UOp.placeholder(shape, {**FLOATS, "int32": dtypes.int}[dtype], i) for i, (shape, dtype) in enumerate(arguments(p).values())]

def customs(sink:UOp) -> list[UOp]: return [u for u in sink.toposort() if u.op in (Ops.CUSTOM, Ops.CUSTOMI)]

def test_the_kernel_is_plain_uops() -> None:
  p = problem(H=2, Sq=20, Sk=50, D=16, softcap=2.0, window=(9, 3), extras={"bias": floats(1, 1, 20, 50), "kv_lengths": int32(31)})
  program = forward_of(p, other_chip("CL", 49152), SMALL)(*placeholders(p))
  q = replace(p, num_splits=2)
  args = [UOp.placeholder(shape, FLOATS[dtype], i) for i, (shape, dtype) in enumerate(combine_arguments(q).values())]
  merge = combine(q, get_chip("gfx1030"), 2)(*args)
  assert customs(merge) and not customs(plain(merge)) and not customs(program)
  assert not {u.dtype for u in program.toposort()} & set(VECTORS)

def test_kernels_for_attns_renderers_keep_their_vectors() -> None:
  # The kernel for a chip of attn's table has vectors, and at most two thirds as many UOps as the kernel of plain UOps for another chip.
  p = problem(H=2, Sq=20, Sk=50, D=16, dtype="float32")
  ours, others = (lower(forward_of(p, chip, SMALL)(*placeholders(p)), printer_of("gfx1030"))
                  for chip in (get_chip("gfx1030"), other_chip("CL", 49152)))
  assert len(ours) < len(others)*2/3

def operations(x:UOp, y:UOp, word:UOp, place:UOp, dtype:str) -> list[UOp]:
  # the results of each of attn's operations that can be written in plain UOps, such as exp2 or softcap
  four = ops.build(x, y, ops.mul(x, 3.0), ops.add(x, y))
  bits = dropout.kept_octet((word, word), place, place, place, word, 0.3)
  return [ops.exp2(x), ops.log2(ops.mul(x, x)), ops.rcp(y), ops.max_(x, y), ops.fma(x, 2.5, y), ops.sub(x, y),
          ops.extract(softcap(four, 0.5, 2.0, terms={"float16": 4}.get(dtype, 10)), 2),
          ops.extract(alibi(four, y, place, (0, 1, 4, 5)), 3), ops.extract(ops.mask_above(four, place, (0, 1, 4, 5)), 2),
          ops.extract(ops.mask_beyond(four, place - 3, place, (0, 1, 4, 5)), 1), ops.extract(ops.weights(four, ops.build(x, y), 0.5), 3),
          ops.extract(ops.widen_to_float(ops.pack(four, dtype), 4, dtype), 3), ops.as_float(word),
          ops.extract(dropout.drop_numbers(four, bits, ((0, 0), (0, 16), (0, 1), (0, 17)), 0), 1), bits.cast(dtypes.float)]

@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_an_operation_means_the_same_in_plain_uops(dtype:str) -> None:
  # Many of attn's operations can be computed in two ways: on the emulator by a numpy function, and in plain UOps on devices that lack the operation.
  # Both give equal numbers.
  n, rng = 64, np.random.default_rng(0)
  given = rng.standard_normal((2, n)).astype(np.float32), rng.integers(0, 2**31, n).astype(np.uint32)
  count = len(operations(*[UOp.const(1.0, dtypes.float)]*2, *[UOp.const(1, t) for t in (dtypes.uint, dtypes.int)], dtype))
  def kernel(way, o:UOp, x:UOp, words:UOp) -> UOp:
    i = UOp.range(n, 0, AxisType.WARP)
    found = operations(x.flatten()[i].load(), x.flatten()[i + n].load(), words[i].load(), i.cast(dtypes.int)//9, dtype)
    stores = [o.flatten()[j*n + i].store(value) for j, value in enumerate(found)]
    return way(UOp.group(*stores).end(i).sink(arg=KernelInfo("attn_operations", opts_to_apply=()), tag="attn"))
  with Context(DEV="EMU::gfx1030"):
    got = [Tensor.empty(count, n).custom_kernel(*map(Tensor, given), fxn=functools.partial(kernel, way))[0].numpy() for way in (lambda x: x, plain)]
  np.testing.assert_allclose(got[1], got[0], rtol=1e-6, atol=1e-7)
  assert (np.abs(got[0]).max(1) > 0).all()

def test_an_instruction_without_plain_uops_is_named() -> None:
  from attn.ops import amd
  x = UOp.placeholder((1,), dtypes.uint, 0)
  with pytest.raises(NotImplementedError, match="is an instruction that has no plain UOps"):
    plain(x[0].store(amd.byte_perm(x[0].load(), x[0].load(), 1)).sink())

@pytest.mark.parametrize("dtype", ("float16", "float32"))
def test_a_program_takes_every_tensor_of_its_call(dtype:str) -> None:
  # A compiled kernel has a parameter for every tensor of its call, also for a tensor that it does not read. For example, the kernel that merges key
  # ranges takes q, k and v only so that the gradient finds the inputs of attention. An earlier version dropped such parameters, and a CUDA graph on
  # an H200 failed with "invalid argument".
  with emulated("sm_90"):
    q, k = draw(1, 2, 1, 64, dtype=dtype), draw(1, 2, 4096, 64, dtype=dtype)
    assert choice_of(q, k, k, num_splits=4).kernel == {"float16": "split_kv", "float32": "tiled"}[dtype]
    calls = compiled(attn.attention(q, k, k, num_splits=4)).src
  assert [len(call.src) - 1 for call in calls] == [5, 6] and all(call.src[0].arg.globals == tuple(range(len(call.src) - 1)) for call in calls)

# ***** dispatch *****

def test_what_it_takes_and_why_not() -> None:
  with emulated("gfx942"):
    q, wide, half = draw(1, 1, 8, 64, dtype="float32"), draw(1, 1, 8, 300), draw(1, 1, 8, 64)
    assert [choice_of(x, x, x).kernel for x in (q, wide, half)] == ["tiled", "tiled", "forward"]
    assert choice_of(*[draw(1, 1, 8, 513)]*3).why_not("tiled") == "D=513: this kernel supports at most 512"
  with emulated("gfx1030"):
    choice = choice_of(half, half, half)
    assert choice.kernel == "tiled" and "gfx1030: AMD's kernels have no tile" in choice.why_not("forward")
    assert attn.explain(half, half, half, backward=True).kernels == ("backward_dq_tiled", "backward_dkdv_tiled")

def test_memory_of_each_is_told() -> None:
  with emulated("gfx1030"):
    q, k = draw(1, 2, 1, 64), draw(1, 2, 3000, 64)
    choice = choice_of(q, k, k)
    assert choice.work.splits > 1 and dict(choice.memory) == {"tiled": 4*2*65*choice.work.splits, "three_pass": 4*2*3000}

def test_local_memory_that_has_no_room() -> None:
  p = problem(H=1, Sq=8, D=512, dtype="float32")
  assert tiled_tile(p, other_chip("CL", 49152)).lds_bytes(p) <= 49152
  with pytest.raises(NotImplementedError, match="needs 26624 bytes of LDS, CL has 1024"): tiled_tile(p, other_chip("CL", 1024))

def test_workgroups_of_four_warps_lie_two_to_a_multiprocessor() -> None:
  # sm_80 has room for one such workgroup: it takes a tile of more warps
  p = problem(H=16, Sq=4096, Sk=4096, D=128, dtype="float32")
  hopper, ampere = (tiled_tile(p, get_chip(arch)) for arch in ("sm_90", "sm_80"))
  assert hopper.asynchronous and hopper.threads == 128 and 2*hopper.lds_bytes(p) <= get_chip("sm_90").lds
  assert hopper.lds_bytes(p) <= get_chip("sm_80").lds < 2*hopper.lds_bytes(p) and ampere.threads == 256

# ***** real devices *****

SCRIPT = """
import numpy as np, attn
from attn.accuracy import judge, law_of
from attn.tinygrad_compat import Tensor, dtypes
rng = np.random.default_rng(0)
for dtype, kind in (("float32", np.float32), ("float16", np.float16))[:{types}]:
  q, k, v = (rng.standard_normal((2, 2, n, 24)).astype(kind) for n in (37, 70, 70))
  choice = attn.explain(*map(Tensor, (q, k, v)), causal=True)
  assert choice.kernel == "tiled", choice
  got = attn.attention(*map(Tensor, (q, k, v)), causal=True, out_dtype=dtypes.float).numpy()
  work = (q, k, v, 24**-0.5, (-1, 0), 33)
  verdict = judge(got, law_of(*work, dtype=dtype, out_dtype="float32")[0])
  assert verdict.ok, verdict
  print(dtype, verdict)
"""

def on(device:str, types:int, script:str=SCRIPT, **settings:str) -> None:
  # runs a script in a new process with DEV=`device` and the environment variables `settings`, and fails if the script fails
  # the script has a list of dtypes, with float32 first, and tests the first `types` of them
  root = Path(__file__).resolve().parent.parent.parent
  environment = {**os.environ, "DEV": device, "PYTHONPATH": str(root), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **settings}
  done = subprocess.run([sys.executable, "-c", script.replace("{types}", str(types))], capture_output=True, text=True, env=environment, timeout=600)
  assert done.returncode == 0, done.stderr[-2000:]

@pytest.mark.parametrize("types", (1, pytest.param(2, marks=pytest.mark.thorough)))
def test_a_cpu_with_the_clang_of_zig(types:int) -> None:
  pytest.importorskip("ziglang")
  on("CPU", types, CC=str(Path(__file__).resolve().parent.parent.parent/"examples/clang_of_zig.sh"))

INFINITE = """
import numpy as np, attn
from attn.tinygrad_compat import Tensor
q, k, v = (np.random.default_rng(0).standard_normal((1, 1, n, 40)).astype(np.float32) for n in (8, 2, 2))
v[:, :, -1] = -np.inf
assert np.isneginf(attn.attention(*map(Tensor, (q, k, v))).numpy()).all()
"""

def test_a_cpu_with_an_infinite_last_row() -> None:
  # The forward kernel of plain UOps computes whole tiles of keys, also with one thread. For a key beyond the last it reads the last row of V once
  # more, with weight 0. If this row is infinite, 0 times the row must not give NaN in the output.
  pytest.importorskip("ziglang")
  on("CPU", 1, INFINITE, CC=str(Path(__file__).resolve().parent.parent.parent/"examples/clang_of_zig.sh"))

BETWEEN_UNITS = """
import numpy as np, attn
from attn.tinygrad_compat import Tensor
def slice_of(*shape): return Tensor(np.ones(np.prod(shape) + 1, np.float32)).realize()[1:].reshape(shape)
def int32(x): return Tensor(np.array(x, np.int32)).realize()
q, k, v = slice_of(1, 6, 3, 192), slice_of(1, 4, 3, 192), slice_of(1, 4, 3, 192)
for start, value in ((0, 1.0), (1, 0.0)):
  o = attn.attention(q, k, v, block_table=int32([[0]]), kv_lengths=int32([1]), kv_starts=int32([start]))
  assert (o.numpy() == value).all()
"""

def test_a_cpu_with_slices_that_begin_between_units() -> None:
  # Kernels on a CPU read slices that begin at any element of a buffer. A CPU instruction for 16 aligned bytes would crash the process at such an
  # address.
  pytest.importorskip("ziglang")
  on("CPU", 1, BETWEEN_UNITS, CC=str(Path(__file__).resolve().parent.parent.parent/"examples/clang_of_zig.sh"))

@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ("float32", "float16", "bfloat16"))
@pytest.mark.parametrize("make", (normal, *ADVERSARIAL), ids=lambda f: f.__name__)
def test_on_a_gpu(make, dtype:str, monkeypatch:pytest.MonkeyPatch) -> None:
  if make.__name__ == "huge_key" and dtype == "float16": pytest.skip("float16 cannot hold such large scores")
  monkeypatch.setenv("ATTN_KERNEL", "tiled")
  for shape in ({"Sq": 40, "Sk": 200, "D": 64}, {"Sq": 150, "Sk": 170, "D": 40, "Dv": 136, "causal": True}, {"Sq": 70, "Sk": 90, "D": 512}):
    p = problem(H=2, dtype=dtype, **shape)
    x, extras = make(p), dict[str, np.ndarray]()
    with Context(DEV="CUDA"):
      given = (tensor(a, dtype, "CUDA") for a in (x.q, x.k, x.v))
      o, lse = (array(t) for t in attn.attention(*given, causal="causal" in shape, return_lse=True))
    law, of_lse = expected(p, x, extras)
    assert (verdict := judge(o, law)).ok, f"o: {verdict}"
    assert (verdict := judge(lse, of_lse)).ok, f"lse: {verdict}"

@pytest.mark.thorough
def test_opencl_on_a_cpu() -> None:
  # Results are right through OpenCL on a CPU, by Debian's pocl-opencl-icd.
  if not any(Path("/etc/OpenCL/vendors").glob("pocl*.icd")): pytest.skip("no OpenCL driver: apt-get install pocl-opencl-icd ocl-icd-libopencl1")
  on("CL", 2)
