"""Tests of split-KV, where each workgroup computes a range of the keys: the merged partial results agree with float64, and with the kernel that
computes all keys in one range."""
from __future__ import annotations
from dataclasses import replace
from typing import Any
import numpy as np
import pytest
from tinygrad import TinyJit
import attn
from attn.accuracy import judge
from attn.api.launch import kernels
from attn.chips import get_chip
from attn.choose.dispatch import Choice, Work, choose_tile, forward_of
from attn.choose.splits import key_tiles, resolve, split_heuristic
from attn.compilers import clang
from attn.kernels.combine import combine, combine_arguments
from attn.kernels.parts.grid.tensors import arguments
from attn.ops.renderers import render
from attn.problem import Count, Pages, Problem, Strided
from attn.tinygrad_compat import Context, Tensor, UOp, dtypes
from cases import (ARCHS, DTYPES, TYPES, Inputs, array, check_kernels, chip, chips_in_turn, every_arch, expected, floats, in_turn, ints, on_two,
                   normal, on_the_emulator, problem, run_kernels, tensor)


# ***** partial results and their merge *****

SPLITS: dict[str, dict[str, Any]] = {
  "even": dict(Sq=40, Sk=256, num_splits=4),
  "ranges of several tiles": dict(H=1, Sq=20, Sk=600, num_splits=2, dtype="bfloat16"),
  "odd": dict(Sq=70, Sk=333, num_splits=3, D=128, dtype="bfloat16"),
  "causal": dict(Sq=150, Sk=200, num_splits=3, causal=True),
  "causal, rows that see nothing": dict(Sq=150, Sk=70, num_splits=2, causal=True),
  "causal, most ranges empty": dict(Sq=5, Sk=2, num_splits=4, causal=True),
  "window": dict(Sq=100, Sk=200, num_splits=2, window=(20, 7)),
  "more splits than tiles": dict(Sq=20, Sk=70, num_splits=9),
  "ranges in a loop and left over": dict(H=1, Sq=3, Sk=37*128, D=16, num_splits=37),
  "ranges far above others": dict(H=1, Sq=20, Sk=300, num_splits=3, softmax_scale=50.0),
  "bshd": dict(B=2, Sq=20, Sk=150, num_splits=3, layout="bshd", out_dtype="float32"),
  "nsd": dict(B=2, Sq=20, Sk=150, num_splits=3, layout="nsd"),
  "Dv 63": dict(Sq=20, Sk=150, D=40, Dv=63, num_splits=2),
  "Dv 1": dict(Sq=20, Sk=150, D=40, Dv=1, num_splits=2, dtype="bfloat16"),
  "Dv 250": dict(Sq=20, Sk=100, D=16, Dv=250, num_splits=2),
  "no lse": dict(Sq=20, Sk=150, num_splits=2, lse=False),
  "softcap": dict(Sq=20, Sk=150, num_splits=2, softcap=2.0),
  "sinks": dict(Sq=40, Sk=150, num_splits=3, causal=True, extras=dict(sinks=floats(2))),
  "lengths": dict(B=3, Sq=20, Sk=200, num_splits=3, causal=True,
                  extras=dict(kv_lengths=ints(0, 5, 190), alibi_slopes=np.abs(floats(2)), bias=floats(1, 2, 20, 200))),
  "packed sequences": dict(layout="thd", Sq=100, Sk=120, num_splits=3, causal=True, max_seqlen_q=60, max_seqlen_k=70,
                           extras=dict(cu_seqlens_q=ints(0, 0, 40, 40, 100), cu_seqlens_k=ints(0, 20, 50, 50, 120), sinks=floats(2))),
  "decode": dict(B=2, H=8, Hkv=2, Sq=1, Sk=300, D=128, num_splits=5, causal=True, extras=dict(kv_lengths=ints(300, 77), sinks=floats(8))),
}

@pytest.mark.sample(4)
@chips_in_turn("case", SPLITS)
def test_split(arch:str, case:str) -> None: check_kernels(arch, **SPLITS[case])

@every_arch
def test_empty_range_weighs_nothing(arch:str) -> None:
  # If a row sees no key of a key range, the range has weight 0 in the merge. The test uses rows with Sq > Sk under a causal mask.
  o, lse = check_kernels(arch, Sq=130, Sk=70, num_splits=2, causal=True)
  assert lse is not None and (o[:, :, :60] == 0).all() and np.isneginf(lse[:, :, :60]).all() and np.isfinite(lse[:, :, 60:]).all()

@every_arch
def test_sink_counts_once(arch:str) -> None:
  sinks = np.array([3.0, -1.0], np.float32)
  results = [check_kernels(arch, Sq=20, Sk=300, num_splits=n, extras=dict(sinks=sinks)) for n in (1, 2, 4)]
  for o, lse in results[1:]:
    np.testing.assert_allclose(o, results[0][0], atol=2e-3)
    assert lse is not None and results[0][1] is not None
    np.testing.assert_allclose(lse, results[0][1], atol=1e-5)

def dirty(p:Problem) -> Inputs:
  x = normal(p)
  for b, n in enumerate((32, 64, 96, 48)): x.k[b, :, n:] = x.v[b, :, n:] = np.nan
  return x

@every_arch
def test_cache_beyond_lengths(arch:str) -> None:
  for Sq in (1, 20):
    o, _ = check_kernels(arch, dirty, B=4, Sq=Sq, Sk=128, num_splits=3, causal=True, extras=dict(kv_lengths=ints(32, 64, 96, 48)))
    assert np.isfinite(o).all()

def nan_query(p:Problem) -> Inputs:
  x = normal(p)
  x.q[0, 0, 3, 5] = np.nan
  return x

@every_arch
def test_nan_stays_in_its_row(arch:str) -> None:
  o, lse = check_kernels(arch, nan_query, Sq=20, Sk=200, num_splits=3)
  assert lse is not None and np.isnan(o[0, 0, 3]).all() and np.isnan(o).sum() == o.shape[-1] and np.isnan(lse).sum() == 1

@pytest.mark.sample(2)
@pytest.mark.parametrize("Sk", (16384, 16385, 20000))
def test_decode_of_any_length(Sk:int) -> None:
  shape: dict[str, Any] = dict(H=4, Hkv=1, Sq=1, Sk=Sk, D=64)
  p, arch = problem(**shape, num_splits=0), get_chip("gfx942")
  p = resolve(p, arch, choose_tile(p, arch))
  assert p.num_splits > 32
  check_kernels("gfx942", **shape, num_splits=p.num_splits)

def test_shapes_of_scratch() -> None:
  p = problem(B=2, H=3, Sq=5, Sk=100, Dv=20, num_splits=4, layout="bshd", extras=dict(sinks=floats(3)))
  assert list(arguments(p).items())[:2] == [("o_partial", ((4, 2, 3, 5, 20), "float32")), ("lse_partial", ((4, 2, 3, 5), "float32"))]
  assert list(arguments(p)) == ["o_partial", "lse_partial", "q", "k", "v"]
  assert list(combine_arguments(p)) == ["o", "lse", "o_partial", "lse_partial", "sinks"]

def test_refusals() -> None:
  p, arch = problem(num_splits=2), get_chip("gfx942")
  with pytest.raises(ValueError, match="splits=3"): combine(p, arch, 3)
  with pytest.raises(ValueError, match="splits=1"): combine(replace(p, num_splits=1), arch, 1)
  with pytest.raises(ValueError, match="3 tensors given"): combine(p, arch, 2)(*[UOp.placeholder((4,), dtypes.float, i) for i in range(3)])

# ***** one kernel for every length *****

@every_arch
def test_variable_length_under_jit(arch:str) -> None:
  p = problem(H=4, Hkv=2, Sq=1, Sk=200, causal=True, num_splits=2, sk_variable=Count((("n_k", 1, 200),)))
  x, a, device = normal(p), chip(arch), "CUDA" if arch == "CUDA" else "EMU"
  first, second = kernels(p, Choice("split_kv", Work(choose_tile(p, a), 2), a, ()))
  names, merged, variable = arguments(p), combine_arguments(p), UOp.variable("n_k", 1, 200)
  with Context(DEV=arch if device == "CUDA" else f"EMU::{arch}"):
    q, k, v = (tensor(t, p.dtype, device).realize() for t in (x.q, x.k, x.v))
    def call(kernel:Any, tensors:list[Tensor], *more:UOp) -> list[Tensor]:
      done = kernel(*[UOp.placeholder_like(t.uop, slot=i) for i, t in enumerate(tensors)]).call(*[t.uop for t in tensors], *more)
      return [Tensor(t.uop.after(done)) for t in tensors]
    def empty(shape:tuple[int, ...], dtype:str) -> Tensor: return Tensor.empty(*shape, dtype=DTYPES[dtype], device=device)
    @TinyJit
    def step(q:Tensor, k:Tensor, v:Tensor, n:UOp) -> Tensor:
      parts = call(first, [empty(*names["o_partial"]), empty(*names["lse_partial"]), q, k, v], n)
      return call(second, [empty(*merged["o"]), empty(*merged["lse"]), *parts[:2]])[0].realize()
    for n in (200, 1, 64, 65, 128, 37):
      o = array(step(q, k, v, variable.bind(n)))
      cut = replace(p, Sk=n, offset=n - 1, sk_variable=None)
      assert (verdict := judge(o, expected(cut, Inputs(x.q, x.k[:, :, :n], x.v[:, :, :n]), {})[0])).ok, f"{n} keys: {verdict}"

# ***** how many splits *****

@pytest.mark.parametrize(("b", "h", "hk", "sq", "sk", "least", "most"), (
  (1, 2, 2, 40000, 40000, 4, 4), (1, 16, 16, 128, 65535, 16, 16), (1, 8, 8, 32768, 32768, 1, 4), (8, 16, 16, 8192, 8192, 1, 1)))
def test_heuristic_of_published_shapes(b:int, h:int, hk:int, sq:int, sk:int, least:int, most:int) -> None:
  # The heuristic for split-KV chooses between `least` and `most` key ranges for published shapes with D=64, on a chip of 304 compute units. These
  # limits come from publications, too.
  p, arch = problem(B=b, H=h, Hkv=hk, Sq=sq, Sk=sk, D=64, dtype="bfloat16"), get_chip("gfx942")
  assert least <= split_heuristic(p, arch, choose_tile(p, arch)) <= most

def test_a_first_decode_starts_no_workers(monkeypatch) -> None:
  # The first decoding step with two key ranges starts no worker processes. tinygrad would start them to compile two kernels at once, which takes
  # longer than compiling the small kernel `combine`, which merges the ranges. So attn compiles `combine` itself when it is called.
  def pool() -> Any: raise AssertionError("worker processes are started")
  monkeypatch.setattr("tinygrad.engine.realize.get_worker_pool", pool)
  with Context(DEV="EMU::sm_90"):
    q, k, v = (tensor(np.ones((1, 2, n, 24), np.float32), "float16").realize() for n in (1, 130, 130))
    assert (attn.attention(q, k, v, num_splits=2).realize().float().numpy() == 1).all()

def test_resolve() -> None:
  arch = get_chip("gfx942")
  for given, Sk, want in ((1, 4096, 1), (7, 4096, 7), (250, 300, None), (5, 1, 1), (0, 64, 1)):
    p = problem(B=8, H=64, Sq=64, Sk=Sk, num_splits=given)
    tile = choose_tile(p, arch)
    assert resolve(p, arch, tile).num_splits == (want or key_tiles(p, tile))

@on_the_emulator
def test_heuristic_fills_the_chip(arch:str) -> None:
  # If a decoding batch is too small for the chip, the heuristic for split-KV divides long key sequences until more than half of the compute units
  # have a workgroup. It never chooses more key ranges than there are key tiles.
  a = get_chip(arch)
  for Sk in (64, 1000, 16384, 131072):
    p = problem(B=1, H=32, Hkv=8, Sq=1, Sk=Sk, D=128)
    tile = choose_tile(p, a)
    splits = split_heuristic(p, a, tile)
    assert splits <= key_tiles(p, tile)
    if Sk >= 16384: assert 8*splits*2 > a.cus

def test_heuristic_leaves_a_full_chip_alone() -> None:
  # The heuristic for split-KV keeps a single key range for a batch with more workgroups than the chip can run at once: shorter workgroups would only
  # start and end more often.
  p, arch = problem(B=64, H=32, Sq=1, Sk=1024, D=128), get_chip("gfx942")
  assert split_heuristic(p, arch, choose_tile(p, arch)) == 1

@pytest.mark.parametrize(("B", "Sk", "page", "splits"), ((1, 4096, 16, 16), (1, 8192, 16, 16), (1, 16384, 16, 16), (1, 65536, 16, 32),
                                                        (1, 16384, 64, 16), (2, 4096, 16, 16), (2, 16384, 16, 16)))
def test_ranges_over_pages_on_an_h200(B:int, Sk:int, page:int, splits:int) -> None:
  # These numbers of key ranges were the fastest ones on an H200, for 32 query heads on 8 key heads (docs/tried.md).
  view = Strided(B*8*Sk*128, 0, page*8*128, 128, 8*128)
  p = Problem(B, 32, 8, 1, Sk, 128, 128, softmax_scale=0.1, kv_lengths=True, pages=Pages(page, B*Sk//page, Sk//page), k_view=view, v_view=view)
  assert split_heuristic(p, get_chip("sm_90"), choose_tile(p, get_chip("sm_90"))) == splits

# ***** machine code *****

@pytest.mark.sample(2)
@on_two("arch", ARCHS)
@in_turn("D, dtype", (64, 128, 256), ("float16", "bfloat16"))
def test_no_spills(arch:str, dtype:str, D:int) -> None:
  # Two kernels for decoding spill no registers: the forward kernel, which computes key ranges, and `combine`, which merges their results.
  p = problem(B=2, H=16, Hkv=2, Sq=1, Sk=4096, D=D, dtype=dtype, causal=True, num_splits=16, extras=dict(kv_lengths=ints(1, 1)))
  a = get_chip(arch)
  for kernel, names in ((forward_of(p, a, choose_tile(p, a)), arguments(p)), (combine(p, a, 16), combine_arguments(p))):
    tensors = [UOp.placeholder(shape, TYPES[t], i) for i, (shape, t) in enumerate(names.values())]
    text = clang.assembly(render(kernel(*tensors), arch), arch)
    assert ".vgpr_spill_count: 0" in text and ".private_segment_fixed_size: 0" in text

def test_splits_do_not_change_results() -> None:
  x = normal(p := problem(Sq=20, Sk=500))
  whole, _ = run_kernels(p, x, "gfx942", {})
  for n in (2, 3, 8):
    o, _ = run_kernels(replace(p, num_splits=n), x, "gfx942", {})
    np.testing.assert_allclose(o, whole, atol=1e-3)
