"""Tests of mla_wgmma, the kernel of multi-head latent attention (MLA) with Hopper's wgmma: V is the first columns of K."""
from __future__ import annotations
import functools, shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
import numpy as np
import pytest
from attn.chips import get_chip
from attn.choose.dispatch import choose
from attn.choose.mla_tiles import mla_wgmma_tile
from attn.emulator.checks import EmulatorError, LdsRace, NotWaitedFor, UninitialisedRead
from attn.kernels.parts.weights.scores import Scores
from attn.kernels.wgmma import latent as wgmma_latent
from attn.kernels.wgmma.latent import WgmmaLatent
from attn.ops import common as ops, hopper as wgmma, nvidia as nv
from attn.ops.operation import statement
from attn.tinygrad_compat import UOp
from api_cases import emulated
from cases import check_kernels, floats, ints, normal, problem
from kinds import KINDS
from test_mla import Maker, Plant, barriers_but, check_cache, latent, not_a_number, wrong
from test_stored import no_spills_on_nvidia

ARCH = "sm_90"
NARROW = dict(H=40, Hkv=1, D=136, Dv=120)     # small, so that lowering is quick: two panels of V, one for each warpgroup, and a further one of K

def check_mla(make:Maker=normal, **parameters:Any) -> np.ndarray|None:
  # compares each element of o and lse of mla_wgmma with float64, and returns lse
  parameters = {**NARROW, "Sq": 1, "v_in_k": True, **parameters}
  return check_kernels(ARCH, latent(make), tile=lambda _: mla_wgmma_tile(problem(**parameters), get_chip(ARCH)), **parameters)[1]

# ***** the kernel *****

OPTIONS:dict[str, dict[str, Any]] = {
  "causal, float32": dict(Sq=5, Sk=170, causal=True, out_dtype="float32"),
  "lengths, sinks": dict(B=3, Sq=2, Sk=200, causal=True, extras=dict(kv_lengths=ints(33, 0, 200), sinks=floats(40))),
  "splits": dict(B=2, Sk=300, num_splits=3, extras=dict(kv_lengths=ints(133, 300))),
  "window, ALiBi, two blocks": dict(Sq=2, Sk=230, window=(40, 3), dtype="bfloat16", extras=dict(alibi_slopes=np.abs(floats(40))/4)),
  "packed sequences": dict(layout="thd", Sq=9, Sk=200, causal=True, extras=dict(cu_seqlens_q=ints(0, 2, 5, 9), cu_seqlens_k=ints(0, 100, 101, 200))),
  "softcap, few heads": dict(H=3, Sk=70, softcap=2.0), "more queries than keys": dict(H=20, Sq=9, Sk=5, causal=True, layout="bshd"),
  "without lse": dict(Sk=170, lse=False, dtype="bfloat16"), "top-left": dict(Sq=5, Sk=100, causal="top-left"), "one key": dict(Sk=1),
  "two key heads": dict(H=40, Hkv=2, Sk=70, layout="bshd"), "tiny scale": dict(Sk=70, softmax_scale=1.3e-38),
  "large scale": dict(Sk=70, softmax_scale=1e3), "no further panel": dict(Sk=150, D=128, Dv=128),
}
BY_DEFAULT = 4

@pytest.mark.parametrize("option", [pytest.param(x, marks=() if i < BY_DEFAULT else pytest.mark.thorough) for i, x in enumerate(OPTIONS)])
def test_option(option:str) -> None: check_mla(**OPTIONS[option])

@pytest.mark.parametrize("heads, Sq, dtype", (pytest.param(64, 2, "bfloat16", marks=pytest.mark.thorough), (128, 1, "float16")))
def test_whole_rows(heads:int, Sq:int, dtype:str) -> None:
  # The kernel is right for DeepSeek's sizes: keys of 576 columns, of which 512 are the values.
  check_mla(H=heads, Sq=Sq, Sk=150, D=576, Dv=512, causal=True, dtype=dtype)

@pytest.mark.parametrize("kind", [pytest.param(kind, marks=() if kind in ("rising", "one hot") else pytest.mark.thorough) for kind in KINDS])
def test_hard_inputs(kind:str) -> None: check_mla(lambda p: KINDS[kind](p, 3), Sq=2, Sk=150)

def test_a_nan_stays_in_its_row() -> None: check_mla(not_a_number, Sk=90)

# ***** planted faults: each is caught *****

def first_columns_only(m:pytest.MonkeyPatch) -> None:
  # plants a fault: both warpgroups multiply P by the first columns of V
  m.setattr(WgmmaLatent, "v_panels", WgmmaLatent.k_panels)
def weights_of_another_warp(m:pytest.MonkeyPatch) -> None:
  # plants a fault: a warp stores its P in the place of another warp, which computes the next queries
  def of_next(x:WgmmaLatent) -> WgmmaLatent:
    at = x.warps.at
    return replace(x, warps=replace(x.warps, at=replace(at, wave=at.wave//4*4 + (at.wave + 1)%4)))
  wrong(m, WgmmaLatent, "put_weights", lambda put: lambda self, s: put(of_next(self), s))
def never_rescaled(m:pytest.MonkeyPatch) -> None:
  # plants a fault: the second warpgroup does not rescale its columns of O when the first one raises m
  m.setattr(wgmma_latent, "rescale", lambda acc, factors, *done: statement("rescale", acc[0], factors[0], *done, rows=1, tiles=1, accs=0))
def unmasked(m:pytest.MonkeyPatch) -> None: m.setattr(Scores, "masks", lambda self, x, rows, tile, done: [])
def sums_of_second(m:pytest.MonkeyPatch) -> None:
  # plants a fault: the second warpgroup divides O by its own sums of P, which it has not computed
  wrong(m, WgmmaLatent, "load", lambda load: lambda self, s, place: load(self, s, place) if place == self.tile.factors_at(self.p) else s.l[0].load())
def one_sum(m:pytest.MonkeyPatch) -> None:
  # Of the partial sums of a score only the first one counts.
  m.setattr(wgmma_latent, "ADDED_UP_BY_WGMMA", 5)
  m.setattr(functools, "reduce", lambda f, xs, *start: xs[0] if f is ops.add and not start else REDUCE(f, xs, *start))

REDUCE = functools.reduce
FAULTS:tuple[Plant, ...] = (first_columns_only, weights_of_another_warp, never_rescaled, unmasked, sums_of_second, one_sum)

@pytest.mark.parametrize("plant", FAULTS)
def test_planted_fault(monkeypatch:pytest.MonkeyPatch, plant:Plant) -> None:
  plant(monkeypatch)
  make = KINDS["normal" if plant in (unmasked, one_sum) else "rising"]       # in rising rows the last keys outweigh the zeros beyond the end
  with pytest.raises(AssertionError, match="o: "): check_mla(lambda p: make(p, 0), Sk=139, lse=False)

def nothing(order:UOp) -> UOp: return nv.commit(order)

NOT_WAITED:dict[str, tuple[Plant, type[EmulatorError]]] = {
  "a tile is not waited for": (lambda m: m.setattr(wgmma, "arrived", lambda bar, t, order: nothing(order)), LdsRace),
  "products are not waited for": (lambda m: m.setattr(wgmma, "wait_products", lambda acc, order: nothing(order)), NotWaitedFor)}

@pytest.mark.usefixtures("without_places")
@pytest.mark.parametrize("fault", NOT_WAITED)
def test_what_is_not_waited_for(monkeypatch:pytest.MonkeyPatch, fault:str) -> None:
  plant, error = NOT_WAITED[fault]
  plant(monkeypatch)
  with pytest.raises(error): check_mla(Sk=150, lse=False)

BARRIERS = 7      # after the mbarrier is made; two in each of two loops, one of them with masks; two before the outputs

@pytest.mark.parametrize("left_out", [pytest.param(i, marks=() if i == 2 else pytest.mark.thorough) for i in range(1, BARRIERS)])
@pytest.mark.usefixtures("without_places")
def test_without_a_barrier(monkeypatch:pytest.MonkeyPatch, left_out:int) -> None:
  # The kernel needs each of its barriers: if one is left out, the emulator reports a race or a read of unwritten memory. The first barrier is left
  # in, because the emulator does not check when the mbarrier is made. Each case has its own problem, because tinygrad's cache keeps programs.
  count = barriers_but(monkeypatch, left_out)
  with pytest.raises((LdsRace, UninitialisedRead)): check_mla(Sk=130 + left_out, lse=False)
  assert count() == BARRIERS

# ***** attention and caches *****

@pytest.mark.parametrize("page", [pytest.param(page, marks=() if page == 16 else pytest.mark.thorough) for page in (0, 16, 64)])
def test_cache(page:int) -> None:
  # attention_with_kv_cache uses the kernel, also if the cache has pages. Rows beyond its length are NaN.
  with emulated(ARCH): check_cache(20, 264, 256, 192, 130, page, num_splits=1)

# ***** choice *****

def reasons(**parameters:Any) -> tuple[str, str]:
  # the name of the kernel that is chosen on sm_90 without key ranges, and the reason why it is not mla_wgmma
  p = problem(**{**dict(H=128, Hkv=1, Sq=1, Sk=4096, D=576, Dv=512, v_in_k=True, lse=False), **parameters})
  choice = choose(replace(p, num_splits=1), get_chip(ARCH))
  return choice.kernel, choice.why_not("mla_wgmma") or ""

@pytest.mark.parametrize("parameters, why", (
  (dict(H=16), "16 rows: a block has 64; mla_mma, with smaller blocks, is as fast"), (dict(H=8, Sq=2), "16 rows"),
  (dict(Dv=320), "Dv=320: 2 warpgroups divide panels of 64 columns evenly, and O has 5"),
  (dict(D=572), "D=572: must be a multiple of 8"), (dict(Dv=508), "Dv=508: must be a multiple of 8")))
def test_what_goes_to_mla_mma(parameters:dict[str, Any], why:str) -> None:
  kernel, reason = reasons(**parameters)
  assert kernel == "mla_mma" and why in reason, (kernel, reason)

@pytest.mark.parametrize("parameters", ({}, dict(H=16, Sq=2), dict(H=17), dict(D=320, Dv=256), dict(dtype="bfloat16", Sq=4, causal=True)))
def test_what_the_kernel_gets(parameters:dict[str, Any]) -> None: assert reasons(**parameters) == ("mla_wgmma", "")

def test_where_the_chip_has_no_wgmma() -> None:
  p = problem(H=128, Hkv=1, Sq=1, Sk=4096, D=576, Dv=512, v_in_k=True, lse=False, num_splits=1)
  assert choose(p, get_chip("sm_80")).why_not("mla_wgmma") == "sm_80 has no wgmma"

# ***** machine code *****

BURDENS = ({}, dict(causal=True), dict(Sq=2, softcap=2.0), dict(num_splits=3), dict(extras=dict(alibi_slopes=floats(128)), window=(40, 3)),
           dict(out_dtype="float32", softcap=2.0, causal=True, extras=dict(alibi_slopes=floats(128))),
           dict(extras=dict(kv_lengths=ints(33, 300), sinks=floats(128)), causal=True))

@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
@pytest.mark.parametrize("burden", range(len(BURDENS)))
def test_spills_no_registers(dtype:str, burden:int, tmp_path:Path) -> None:
  no_spills_on_nvidia(problem(**{**dict(B=2, H=128, Hkv=1, Sq=1, Sk=4000, D=576, Dv=512, v_in_k=True, dtype=dtype), **BURDENS[burden]}), tmp_path)
