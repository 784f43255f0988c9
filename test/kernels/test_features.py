"""Tests of every option of the forward kernel against float64, also on cases that other implementations of attention get wrong."""
from __future__ import annotations
import math, mmap
from dataclasses import replace
from typing import Any
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from attn.accuracy import judge
from attn.chips import get_chip
from attn.choose.dispatch import choose_tile, forward_of
from attn.compilers import clang
from attn.emulator.device import EmulatedCUDARenderer, EmulatedHIPRenderer
from attn.emulator.machine import Frame
from attn.emulator.memory import Allocation, View
from attn.emulator.plan import Plan
from attn.kernels.parts.grid.tensors import arguments
from attn.kernels.tiles.amd import Tile
from attn.kernels.tiles.mma import MmaTile
from attn.ops.numerics import widen
from attn.ops.renderers import render
from attn.problem import Count, Problem
from attn.tinygrad_compat import Ops, Target, UOp, lower
from cases import (ARCHS, EVERY_ARCH, TYPES, Inputs, check_kernels, chips_in_turn, drawn, every_arch, expected, floats, in_turn, ints,
                   normal, on_the_emulator, problem, run_kernels)

def slopes(*shape:int) -> np.ndarray: return np.abs(floats(*shape))/4
def packed(tile:Tile|MmaTile) -> Tile|MmaTile: return replace(tile, pack_gqa=True)
def apart(tile:Tile|MmaTile) -> Tile|MmaTile: return replace(tile, pack_gqa=False)

# ***** each option by itself *****

OPTIONS: dict[str, dict[str, Any]] = {
  "softcap": dict(Sq=70, Sk=100, softcap=2.0),
  "softcap that hardly bends": dict(Sq=40, Sk=70, softcap=5000.0, dtype="bfloat16"),
  "softcap of a model": dict(Sq=40, Sk=70, softcap=50.0, softmax_scale=1.0),
  "softcap that saturates": dict(Sq=40, Sk=70, softcap=0.1, causal=True),
  "alibi": dict(Sq=70, Sk=100, extras=dict(alibi_slopes=slopes(2))),
  "alibi, causal, more queries": dict(Sq=100, Sk=70, causal=True, extras=dict(alibi_slopes=slopes(2))),
  "alibi, top-left": dict(Sq=70, Sk=100, causal="top-left", extras=dict(alibi_slopes=slopes(2))),
  "alibi per batch": dict(B=2, Sq=40, Sk=70, dtype="bfloat16", extras=dict(alibi_slopes=slopes(2, 2))),
  "bias": dict(B=2, Sq=70, Sk=100, extras=dict(bias=floats(2, 2, 70, 100))),
  "bias of every head": dict(B=2, Sq=40, Sk=72, extras=dict(bias=floats(1, 1, 40, 72)), bias_dtype="float16"),
  "bias per head": dict(B=2, Sq=40, Sk=70, extras=dict(bias=floats(1, 2, 1, 70)), bias_dtype="bfloat16"),
  "bias by elements": dict(Sq=40, Sk=71, extras=dict(bias=floats(1, 2, 40, 71)), bias_dtype="float16"),
  "bias of a key": dict(B=2, Sq=40, Sk=77, causal=True, extras=dict(bias=floats(2, 1, 1, 77))),
  "bias of a query": dict(B=2, Sq=40, Sk=70, extras=dict(bias=floats(2, 2, 40, 1)), bias_dtype="bfloat16"),
  "sinks": dict(Sq=70, Sk=100, causal=True, extras=dict(sinks=floats(2))),
  "sinks, rows that see nothing": dict(Sq=70, Sk=30, causal=True, extras=dict(sinks=floats(2)*4)),
  "sinks far above and below": dict(Sq=20, Sk=40, extras=dict(sinks=np.array([200, -np.inf], np.float32))),
  "lengths": dict(B=3, Sq=40, Sk=100, extras=dict(kv_lengths=ints(33, 0, 100))),
  "lengths, causal": dict(B=3, Sq=40, Sk=100, causal=True, layout="bshd", extras=dict(kv_lengths=ints(33, 64, 99))),
  "lengths, top-left": dict(B=2, Sq=40, Sk=100, causal="top-left", extras=dict(kv_lengths=ints(33, 64))),
  "lengths, windowed": dict(B=3, Sq=20, Sk=150, causal=True, window=(30, 0), extras=dict(kv_lengths=ints(17, 128, 150))),
  "all of them": dict(B=2, Sq=33, Sk=80, causal=True, softcap=3.0,
                      extras=dict(alibi_slopes=slopes(2, 2), bias=floats(2, 2, 33, 80), sinks=floats(2), kv_lengths=ints(50, 80))),
}

@pytest.mark.sample(8)
@chips_in_turn("option", OPTIONS)
def test_option(arch:str, option:str) -> None: check_kernels(arch, **OPTIONS[option])

@chips_in_turn("option", ("softcap", "bias", "sinks", "lengths, causal"))
def test_option_wide(arch:str, option:str) -> None: check_kernels(arch, **{**OPTIONS[option], "D": 128, "Dv": 48})

# ***** packed sequences *****

ENDS = {
  "even": (ints(0, 40, 100), ints(0, 70, 120)),
  "empty at the start, in the middle and at the end": (ints(0, 0, 40, 40, 100, 100), ints(0, 0, 50, 50, 120, 120)),
  "no queries": (ints(0, 0, 40, 40, 100), ints(0, 20, 50, 70, 120)),
  "no keys": (ints(0, 30, 60, 100), ints(0, 0, 120, 120)),
}

@pytest.mark.sample(4)
@chips_in_turn("ends", ENDS)
@pytest.mark.parametrize("causal", (False, True))
def test_packed_sequences(arch:str, ends:str, causal:bool) -> None:
  q, k = ENDS[ends]
  longest = [int(np.diff(x).max()) for x in (q, k)]
  check_kernels(arch, layout="thd", H=4, Hkv=2, Sq=100, Sk=120, causal=causal, max_seqlen_q=longest[0], max_seqlen_k=longest[1],
                extras=dict(cu_seqlens_q=q, cu_seqlens_k=k))

def test_packed_sequences_with_options() -> None:
  q, k = ENDS["even"]
  for arch, more in zip(EVERY_ARCH, (dict(softcap=2.0), dict(window=(20, 5)), dict(causal=True, window=(30, 0)), dict(causal="top-left"),
                                     dict(causal=True, softcap=2.0)), strict=True):
    check_kernels(arch, layout="thd", Sq=100, Sk=120, **more, extras=dict(alibi_slopes=slopes(2, 2), sinks=floats(2), cu_seqlens_q=q, cu_seqlens_k=k))

# ***** query heads of a group in one tile *****

GROUPS: dict[str, dict[str, Any]] = {
  "one query": dict(H=8, Hkv=2, Sq=1, Sk=130, causal=True),
  "three queries, odd group": dict(H=6, Hkv=2, Sq=3, Sk=100, causal=True, layout="bshd", dtype="bfloat16"),
  "one head of keys": dict(B=2, H=5, Hkv=1, Sq=7, Sk=70, window=(20, 3)),
  "several blocks": dict(H=8, Hkv=2, Sq=40, Sk=70, causal=True),
  "by elements": dict(H=4, Hkv=2, Sq=2, Sk=40, D=36, Dv=20),
  "every option": dict(B=2, H=6, Hkv=2, Sq=2, Sk=90, causal=True, softcap=3.0,
                       extras=dict(alibi_slopes=slopes(2, 6), bias=floats(2, 6, 2, 90), sinks=floats(6), kv_lengths=ints(50, 90))),
  "packed sequences": dict(layout="thd", H=6, Hkv=2, Sq=9, Sk=120, causal=True, max_seqlen_q=5, max_seqlen_k=70,
                           extras=dict(cu_seqlens_q=ints(0, 4, 4, 9), cu_seqlens_k=ints(0, 50, 60, 120), alibi_slopes=slopes(6))),
}

@pytest.mark.sample(4)
@chips_in_turn("case", GROUPS)
def test_grouped_queries(arch:str, case:str) -> None:
  o, lse = check_kernels(arch, **GROUPS[case], tile=packed)
  o_apart, lse_apart = check_kernels(arch, **GROUPS[case], tile=apart)
  assert lse is not None and lse_apart is not None
  np.testing.assert_allclose(o, o_apart, atol=2e-2 if GROUPS[case].get("dtype") == "bfloat16" else 2e-3)
  np.testing.assert_allclose(lse, lse_apart, rtol=1e-5, atol=1e-5)

def test_decoding_reads_keys_once() -> None:
  # Decoding reads each key once, because one workgroup computes the eight query heads that share a key/value head.
  p = problem(H=64, Hkv=8, Sq=1, Sk=4096, D=128)
  for arch in EVERY_ARCH:
    tile = choose_tile(p, get_chip(arch))
    assert tile.pack_gqa
    grid = [u.vmax + 1 for u in uops_of(p, arch, tile) if u.op is Ops.SPECIAL and u.arg.startswith("g")]
    assert math.prod(grid) == 8

# ***** errors of other implementations *****

@every_arch
def test_causal_rows_that_see_nothing(arch:str) -> None:
  o, lse = check_kernels(arch, Sq=5, Sk=2, causal=True)
  assert lse is not None and (o[:, :, :3] == 0).all() and np.isneginf(lse[:, :, :3]).all() and np.isfinite(lse[:, :, 3:]).all()

def dirty(p:Problem) -> Inputs:
  # inputs in which the keys and values beyond each sequence's length are NaN
  x = normal(p)
  for b, n in enumerate((32, 64, 96, 48)): x.k[b, :, n:] = x.v[b, :, n:] = np.nan
  return x

@pytest.mark.sample(2)
@every_arch
@pytest.mark.parametrize("Sq", (1, 20))
def test_cache_beyond_lengths(arch:str, Sq:int) -> None:
  for causal in (False, True):
    o, lse = check_kernels(arch, dirty, B=4, H=4, Hkv=2, Sq=Sq, Sk=128, causal=causal, extras=dict(kv_lengths=ints(32, 64, 96, 48)))
    assert lse is not None and np.isfinite(o).all() and np.isfinite(lse).all()

@every_arch
def test_lengths_beyond_the_buffer(arch:str) -> None:
  # A length above the number of rows of a buffer counts as this number, and a negative length as 0. No access leaves the buffer.
  p = problem(B=3, Sq=3, Sk=40, causal=True, extras=dict(kv_lengths=ints(0, 0, 0)))
  o, _ = run_kernels(p, x := normal(p), arch, dict(kv_lengths=ints(40, 2**31 - 1, -5)))
  assert (verdict := judge(o, expected(p, x, dict(kv_lengths=ints(40, 40, 0)))[0])).ok, str(verdict)

def even(p:Problem) -> Inputs:
  # inputs with equal scores, for which each output is the mean of the values that its query sees
  return replace(normal(p), q=np.zeros((p.B, p.H, p.Sq, p.D), np.float32))

@every_arch
@pytest.mark.parametrize("Sq", (1, 256))
def test_window_counts_itself(arch:str, Sq:int) -> None:
  # window=(W-1, 0) lets a query see W keys: the key at the query's own position and W-1 keys before it.
  o, lse = check_kernels(arch, even, H=1, Sq=Sq, Sk=256, D=16, window=(127, -1), causal=True)
  v = normal(problem(H=1, Sq=Sq, Sk=256, D=16)).v[0, 0]
  assert lse is not None
  np.testing.assert_allclose(o[0, 0, -1], v[-128:].mean(0), atol=1e-3)
  np.testing.assert_allclose(np.exp(lse[0, 0, -1]), 128, rtol=1e-5)

@every_arch
def test_causal_is_a_window(arch:str) -> None:
  o, lse = check_kernels(arch, Sq=70, Sk=100, causal=True)
  o_window, lse_window = check_kernels(arch, Sq=70, Sk=100, window=(-1, 0))
  assert lse is not None and (o == o_window).all() and (lse == lse_window).all()

@every_arch
def test_bias_of_minus_infinity(arch:str) -> None:
  bias = floats(1, 1, 40, 150)
  bias[..., 7, :] = -np.inf          # this row sees no key
  bias[..., 9, :128] = -np.inf       # this row sees nothing in the first tiles
  bias[..., 11, 1:] = -np.inf        # this row sees a single key
  o, lse = check_kernels(arch, Sq=40, Sk=150, extras=dict(bias=bias))
  assert lse is not None and (o[:, :, 7] == 0).all() and np.isneginf(lse[:, :, 7]).all()

@every_arch
def test_nan_in_a_masked_bias(arch:str) -> None:
  # NaN in a bias has no effect where the key is hidden: beyond a length, or above the diagonal of a causal mask.
  bias = floats(1, 1, 40, 150)
  bias[..., 100:] = np.nan
  o, _ = check_kernels(arch, Sq=40, Sk=150, extras=dict(bias=bias, kv_lengths=ints(100)))
  assert np.isfinite(o).all()
  bias[0, 0][np.triu_indices(40, 111, 150)] = np.nan
  bias[0, 0][np.tril_indices(40, 110, 150)] = 0
  assert np.isfinite(check_kernels(arch, Sq=40, Sk=150, causal=True, extras=dict(bias=bias))[0]).all()

def low(p:Problem) -> Inputs:
  # inputs with scores near -1e5, at which a kernel with a finite number in place of -inf might show hidden keys
  x = normal(p)
  return Inputs(np.full_like(x.q, 112), np.full_like(x.k, -112), x.v)

@pytest.mark.sample(3)
@every_arch
@pytest.mark.parametrize("option", ({}, dict(softcap=1e6), dict(extras=dict(bias=np.zeros((1, 1, 1, 70), np.float32)))),
                         ids=("raw", "softcap", "bias"))
def test_scores_far_below_zero(arch:str, option:dict[str, Any]) -> None:
  _, lse = check_kernels(arch, low, Sq=70, causal=True, **option)
  assert lse is not None and (lse < -5e4).all()

def huge(p:Problem) -> Inputs:
  # inputs with scores of 1.3e10 whose products with softmax_scale are inexact
  # In exp(score*scale - maximum*scale), a kernel may round the product of the maximum but not that of the score, as an fma does. Then the difference
  # is wrong by hundreds, and P by hundreds of powers of two.
  x = normal(p)
  k = np.full_like(x.k, 16384)
  k[:, :, ::3] = 16256               # the next lower bfloat16
  return Inputs(np.full_like(x.q, 12288), k, x.v)

@every_arch
@pytest.mark.parametrize("option", ({}, dict(extras=dict(bias=np.zeros((1, 1, 1, 100), np.float32)))), ids=("raw", "bias"))
def test_huge_scores(arch:str, option:dict[str, Any]) -> None:
  o, lse = check_kernels(arch, huge, Sq=20, Sk=100, D=64, dtype="bfloat16", softmax_scale=0.25, **option)
  assert lse is not None and np.isfinite(o).all() and (lse > 3e9).all()

# ***** sizes *****

def uops_of(p:Problem, arch:str, tile:Tile|MmaTile) -> list[UOp]:
  tensors = [UOp.placeholder(shape, TYPES[dtype], i) for i, (shape, dtype) in enumerate(arguments(p).values())]
  renderer = EmulatedCUDARenderer if arch.startswith("sm_") else EmulatedHIPRenderer
  return lower(forward_of(p, get_chip(arch), tile)(*tensors), renderer(Target("EMU", "HIP", arch)))

def sparse(nbytes:int) -> View:
  # a view of emulated device memory, `nbytes` of zeros, of which only written parts use physical memory
  a = Allocation.__new__(Allocation)
  memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000))   # since Python 3.13
  a.data, a.written, a.touched, a.outputs = np.frombuffer(memory, np.uint8), None, True, {}
  return View(a, 0, nbytes)

def run_alone(p:Problem, arch:str, views:list[View], number:int) -> None:
  # runs the workgroup with the index `number` (-1: the last) of the forward kernel on the emulator
  uops = uops_of(p, arch, choose_tile(p, get_chip(arch)))
  plan, sizes = Plan(uops, "attn_large", arch), {u.arg: u.vmax + 1 for u in uops if u.op is Ops.SPECIAL}
  grid, local = (tuple(sizes.get(f"{kind}idx{i}", 1) for i in range(3)) for kind in "gl")
  assert math.prod(grid) == p.B*p.H and max(grid[1:]) <= 65535
  with np.errstate(all="ignore"): Frame(plan, number % (p.B*p.H), 1, grid, local, dict(zip(plan.params, views, strict=True)), {}).run()

def run_last_workgroup(p:Problem, arch:str) -> tuple[np.ndarray, Inputs]:
  # runs the workgroup of the forward kernel for the last head of the last batch, and returns its o and its inputs
  # the rows that this workgroup reads are random numbers; all others are zeros
  views, x = [sparse(math.prod(shape)*2) for shape, _ in arguments(p).values()], normal(replace(p, B=1, H=1, Hkv=1))
  for view, tensor in zip(views[1:], (x.q, x.k, x.v), strict=True): view.data[-2*tensor.size:] = tensor.astype(np.float16).ravel().view(np.uint8)
  run_alone(p, arch, views, -1)
  last = p.Sq*p.Dv
  assert not views[0].data[-4*last:-2*last].any(), "the last workgroup wrote to another head"
  return widen(views[0].data[-2*last:].view(np.uint16).astype(np.uint32), "float16").reshape(p.Sq, p.Dv), x

@on_the_emulator
def test_indices_beyond_32_bits(arch:str) -> None:
  # The forward kernel reads the right rows of K and V if these tensors have more than 2^31 elements.
  p = problem(B=8300, H=16, Sq=1, Sk=130, D=128, lse=False)
  assert math.prod(p.shapes["k"][0]) > 2**31
  o, x = run_last_workgroup(p, arch)
  s = np.exp((x.q[0, 0] @ x.k[0, 0].T).astype(np.float64)*p.softmax_scale)
  np.testing.assert_allclose(o, s @ x.v[0, 0]/s.sum(), atol=2e-3)

@on_the_emulator
def test_a_bias_beyond_32_bits(arch:str) -> None:
  # The forward kernel reads the first head's part of a bias with 2^32 elements.
  p = replace(problem(B=2**12, H=2**8, Sq=16, Sk=256, D=16, lse=False), bias=(True,)*4)
  one = replace(p, B=1, H=1, Hkv=1, bias=None)
  views, x, bias = [sparse(math.prod(shape)*(4 if name == "bias" else 2)) for name, (shape, _) in arguments(p).items()], normal(one), floats(16, 256)
  for view, tensor in zip(views[1:], (x.q, x.k, x.v, bias), strict=True):
    view.data[:tensor.size*(4 if tensor is bias else 2)] = tensor.astype(np.float32 if tensor is bias else np.float16).ravel().view(np.uint8)
  run_alone(p, arch, views, 0)
  o = widen(views[0].data[:2*p.Sq*p.Dv].view(np.uint16).astype(np.uint32), "float16").reshape(p.Sq, p.Dv)
  s = np.exp((x.q[0, 0] @ x.k[0, 0].T).astype(np.float64)*p.softmax_scale + bias)
  np.testing.assert_allclose(o, s @ x.v[0, 0]/s.sum(-1, keepdims=True), atol=2e-3)

@pytest.mark.parametrize(("Sk", "wide"), ((1, False), (130, True)))
def test_index_type(Sk:int, wide:bool) -> None:
  # Kernels compute addresses in 32 bits if all addresses fit, and otherwise in 64 bits.
  p = problem(B=8300, H=16, Sq=1, Sk=Sk, D=128, lse=False)
  for arch in EVERY_ARCH:
    tensors = [UOp.placeholder(shape, TYPES[dtype], i) for i, (shape, dtype) in enumerate(arguments(p).values())]
    text = render(forward_of(p, get_chip(arch), choose_tile(p, get_chip(arch)))(*tensors), arch).split("{", 1)[1]
    assert ("(long)" in text) == wide

@on_the_emulator
@pytest.mark.parametrize("heads", (65536, 70001))
def test_more_heads_than_a_grid_axis(arch:str, heads:int) -> None:
  p = problem(H=heads, Sq=3, Sk=20, D=16, lse=False)
  o, x = run_last_workgroup(p, arch)
  s = np.exp((x.q[0, 0] @ x.k[0, 0].T).astype(np.float64)*p.softmax_scale)
  np.testing.assert_allclose(o, s @ x.v[0, 0]/s.sum(-1, keepdims=True), atol=2e-3)

# ***** machine code *****

COMPILED: dict[str, dict[str, Any]] = {   # enough heads for the largest tile
  "softcap": dict(softcap=30.0),
  "large softcap": dict(softcap=1000.0, causal=True),
  "alibi": dict(causal=True, extras=dict(alibi_slopes=slopes(512))),
  "bias": dict(extras=dict(bias=np.zeros((1, 1, 512, 512), np.float32))),
  "16-bit bias": dict(causal=True, extras=dict(bias=np.zeros((1, 1, 512, 512), np.float32)), bias_dtype="bfloat16"),
  "sinks": dict(extras=dict(sinks=floats(512))),
  "lengths": dict(causal=True, extras=dict(kv_lengths=ints(512))),
  "packed sequences": dict(layout="thd", causal=True, extras=dict(cu_seqlens_q=ints(0, 512), cu_seqlens_k=ints(0, 512))),
}

@pytest.mark.sample(5)
@in_turn("of, arch", [(option, D) for option in COMPILED for D in (64, 128)], ARCHS)
def test_no_spills(of:tuple[str, int], arch:str) -> None:
  option, D = of
  p = problem(H=512, Sq=512, D=D, **COMPILED[option])
  tensors = [UOp.placeholder(shape, TYPES[dtype], i) for i, (shape, dtype) in enumerate(arguments(p).values())]
  text = clang.assembly(render(forward_of(p, get_chip(arch), choose_tile(p, get_chip(arch)))(*tensors), arch), arch)
  assert ".vgpr_spill_count: 0" in text and ".private_segment_fixed_size: 0" in text
  assert text.count("v_readfirstlane") < 10, "loads loop over the values of their descriptor"

@pytest.mark.sample(2)
@in_turn("window, arch", ((100, -1), (100, 0)), ARCHS, among=2)
def test_no_spills_in_a_window(arch:str, window:tuple[int, int]) -> None:
  p = problem(H=512, Sq=512, D=256, dtype="bfloat16", window=window)
  tensors = [UOp.placeholder(shape, TYPES[dtype], i) for i, (shape, dtype) in enumerate(arguments(p).values())]
  text = clang.assembly(render(forward_of(p, get_chip(arch), choose_tile(p, get_chip(arch)))(*tensors), arch), arch)
  assert ".vgpr_spill_count: 0" in text and ".private_segment_fixed_size: 0" in text

@pytest.mark.sample(1)
@pytest.mark.parametrize(("dtype", "out"), (("bfloat16", "float16"), ("float16", "bfloat16"), ("float16", "float32")))
def test_output_type_compiles(dtype:str, out:str) -> None:
  # The source of the forward kernel declares the type of the output, although the kernel computes no value of this type.
  p = problem(Sq=40, dtype=dtype, out_dtype=out)
  for arch in ARCHS:
    tensors = [UOp.placeholder(shape, TYPES[t], i) for i, (shape, t) in enumerate(arguments(p).values())]
    assert "s_endpgm" in clang.assembly(render(forward_of(p, get_chip(arch), choose_tile(p, get_chip(arch)))(*tensors), arch), arch)

# ***** refusals *****

@pytest.mark.parametrize(("options", "text"), (
  (dict(softcap=-1.0), "softcap=-1.0"),
  (dict(softcap=math.inf), "softcap=inf"),
  (dict(num_splits=-1), "num_splits=-1"),
  (dict(num_splits=1000), "num_splits=1000"),
  (dict(extras=dict(alibi_slopes=floats(3))), "alibi_slopes has shape (3,)"),
  (dict(extras=dict(alibi_slopes=ints(1, 2))), "alibi_slopes has shape (2,) and dtype int32"),
  (dict(extras=dict(bias=floats(2, 64))), "bias has shape (2, 64)"),
  (dict(extras=dict(bias=floats(1, 3, 64, 64))), "bias has shape (1, 3, 64, 64)"),
  (dict(extras=dict(sinks=floats(1))), "sinks has shape (1,)"),
  (dict(extras=dict(kv_lengths=ints(1, 2))), "kv_lengths has shape (2,)"),
  (dict(extras=dict(kv_lengths=floats(1))), "kv_lengths has shape (1,) and dtype float32"),
  (dict(extras=dict(cu_seqlens_q=ints(0, 1))), "cu_seqlens_q with layout='bhsd'"),
  (dict(extras=dict(nothing=floats(1))), "nothing is not an optional tensor"),
  (dict(max_seqlen_q=3), "max_seqlen_q=3"),
  (dict(sk_variable=Count((("n", -1, 64),))), "sk_variable=Count(variables=(('n', -1, 64),), constant=0): must be at least 0"),
  (dict(sk_variable=Count((("n", 1, 64),)), extras=dict(kv_lengths=ints(4))), "constant=0) with kv_lengths"),
  (dict(layout="thd"), "layout='thd' needs cu_seqlens_q"),
  (dict(layout="thd", extras=dict(cu_seqlens_q=ints(0), cu_seqlens_k=ints(0, 4))), "cu_seqlens_q has shape (1,)"),
  (dict(layout="thd", extras=dict(cu_seqlens_q=ints(0, 4), cu_seqlens_k=ints(0, 4, 8))), "cu_seqlens_k has shape (3,)"),
  (dict(layout="thd", extras=dict(cu_seqlens_q=ints(0, 4), cu_seqlens_k=ints(0, 4), bias=floats(1, 2, 64, 64))), "bias with layout='thd'"),
), ids=lambda x: x if isinstance(x, str) else "")
def test_refuses(options:dict[str, Any], text:str) -> None:
  with pytest.raises((ValueError, NotImplementedError)) as e: problem(**options)
  assert text in str(e.value)

def test_refuses_unresolved_splits() -> None:
  p, arch = problem(num_splits=0), get_chip("gfx942")
  with pytest.raises(ValueError, match="num_splits=0"): forward_of(p, arch, choose_tile(p, arch))

def test_refuses_what_a_descriptor_cannot_address() -> None:
  p, arch = replace(problem(), Sk=2**23, bias=(False, False, True, True)), get_chip("gfx942")
  with pytest.raises(NotImplementedError, match="bias: 64 queries"): forward_of(p, arch, choose_tile(p, arch))

# ***** random problems *****

@st.composite
def problems(draw:st.DrawFn) -> tuple[str, dict[str, Any]]:
  B, Hkv, ratio = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.sampled_from((1, 1, 3, 4)))
  H, Sq, Sk = Hkv*ratio, draw(st.integers(1, 70)), draw(st.integers(1, 90))
  causal = draw(st.sampled_from((False, False, True, "top-left")))
  window = draw(st.sampled_from(((-1, -1), (-1, -1), (0, 0), (13, 0), (7, 3), (40, -1))))
  seed = draw(st.integers(0, 2**20))
  extras: dict[str, np.ndarray] = {}
  if draw(st.booleans()): extras["alibi_slopes"] = np.abs(floats(*((B, H) if draw(st.booleans()) else (H,)), seed=seed))/8
  if draw(st.booleans()): extras["bias"] = floats(*(n if draw(st.booleans()) else 1 for n in (B, H, Sq, Sk)), seed=seed + 1)
  if draw(st.booleans()): extras["sinks"] = floats(H, seed=seed + 2)
  if draw(st.booleans()): extras["kv_lengths"] = ints(*(draw(st.integers(0, Sk)) for _ in range(B)))
  return draw(st.sampled_from(EVERY_ARCH)), dict(
    B=B, H=H, Hkv=Hkv, Sq=Sq, Sk=Sk, D=draw(st.sampled_from((8, 16, 24, 64))), Dv=draw(st.sampled_from((16, 20, 40))), causal=causal,
    window=(window[0], min(window[1], 0)) if causal else window, dtype=draw(st.sampled_from(("float16", "bfloat16"))),
    layout=draw(st.sampled_from(("bhsd", "bshd"))), softcap=draw(st.sampled_from((0.0, 0.0, 2.5))), num_splits=draw(st.integers(1, 3)), extras=extras)

@drawn
def test_any_problem(draws:int) -> None:
  @settings(max_examples=draws, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
  @given(problems())
  def each(drawn:tuple[str, dict[str, Any]]) -> None: check_kernels(drawn[0], **drawn[1])
  each()
