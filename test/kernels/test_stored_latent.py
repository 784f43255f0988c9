"""Tests of latent attention (MLA) over a cache whose latent columns are stored in 8 bits and whose rotary columns keep 16 bits."""
from __future__ import annotations
import shutil
from dataclasses import replace
from typing import Any
import numpy as np
import pytest
from attn.chips import get_chip
from attn.chips.matrix import MMA
from attn.choose.dispatch import choose
from attn.choose.tiled_tiles import tiled_tile
from attn.kernels.amd import latent as amd_latent
from attn.kernels.amd.latent import AmdLatent
from attn.kernels.mma import latent as mma_latent
from attn.kernels.mma.latent import MmaLatent
from attn.kernels.parts.grid.workgroup import Workgroup
from attn.kernels.parts.weights.softmax import sum_of_unscaled
from attn.kernels.tiles.mma import MlaMmaTile
from attn.ops import common as ops
from attn.tinygrad_compat import UOp
from cases import EVERY_ARCH, GPU, chip, in_turn, ints, rounded
from stored_cases import check_stored, dequantised, normal_rows, run_stored, stored_problem
from test_stored import (HARD, OF_FLOATS, SIXTEEN, lengths_with_garbage, no_spills_on_amd, no_spills_on_nvidia, odd_rows_of_k, other_half_first,
                         tiny_values, values_of_all_sizes)

UNITS = (*EVERY_ARCH, "gfx90a", "sm_90")
LATENT: dict[str, Any] = dict(H=16, Hkv=1, D=96, Dv=64, v_in_k=True)

def check_latent(arch:str, *make:Any, **parameters:Any) -> None: check_stored(arch, *make, **{**LATENT, **parameters})

@pytest.mark.sample(3)
@in_turn("make, arch", HARD, UNITS, [GPU])
def test_hard_rows(arch:str, make:Any) -> None:
  # Latent attention over 8-bit rows is within its error limits on hard inputs: for some queries under a causal mask, and for decoding with the keys
  # split into ranges.
  check_latent(arch, make, Sq=20, Sk=150, causal=True, out_dtype="float32")
  check_latent(arch, make, H=40, Sq=6, Sk=200, D=40, Dv=32, dtype="bfloat16", causal=True, num_splits=3)

@pytest.mark.sample(2)
@pytest.mark.parametrize("make", HARD)
def test_hard_rows_in_plain_uops(make:Any) -> None:
  for arch, dtype in (("gfx942", "float32"), ("sm_80", "float16")):
    check_latent(arch, make, tile=lambda p: tiled_tile(p, chip(arch)), H=4, Sq=20, Sk=70, D=24, Dv=17, causal=True, dtype=dtype)

OPTIONS: dict[str, dict[str, Any]] = {
  "pages": dict(Sk=96, page_size=16, Sq=3), "odd pages": dict(Sk=70, page_size=7), "pages of a tile": dict(Sk=256, page_size=64, num_splits=2),
  "float16 scales": dict(scale_dtype="float16", Sk=70, page_size=10), "no rotary columns": dict(D=64), "odd rotary columns": dict(D=67, Sq=2),
  "softcap": dict(softcap=5.0, Sk=70, H=3), "bshd": dict(layout="bshd", window=(50, 3), Sq=5), "no lse": dict(lse=False, H=40, dtype="bfloat16"),
  "tiny scale": dict(softmax_scale=1.3e-38, Sk=70), "batch invariant": dict(Sk=600, batch_invariant=True, num_splits=2)}

@pytest.mark.sample(3)
@in_turn("name, arch", OPTIONS, UNITS, [GPU])
def test_options(arch:str, name:str) -> None: check_latent(arch, **{"Sq": 1, **OPTIONS[name]})

@in_turn("pages, arch", (0, 16), UNITS, [GPU])
def test_rows_beyond_the_lengths_have_no_effect(arch:str, pages:int) -> None:
  check_latent(arch, lengths_with_garbage, B=2, Sq=3, Sk=128, page_size=pages, extras=dict(kv_lengths=ints(37, 111)))

@pytest.mark.sample(2)
@in_turn("make, on", (normal_rows, values_of_all_sizes, odd_rows_of_k), OF_FLOATS, [pytest.param(("CUDA", "fp8e4m3"), marks=pytest.mark.gpu)])
def test_floats_of_8_bits(make:Any, on:tuple[str, str]) -> None: check_latent(on[0], make, stored=on[1], Sq=8, Sk=96, page_size=16, causal=True)

@pytest.mark.parametrize("rows, keys, parts", ((1, 48, 3), (2, 48, 1), (1, 80, 1)))
def test_tiles_of_any_multiple_of_16_keys(rows:int, keys:int, parts:int) -> None:
  # Latent attention is right with tiles of 48 and 80 keys, whose scales do not fill whole lines of shared memory.
  check_latent("sm_90", tile=lambda p: MlaMmaTile(rows, keys, parts, matrix=MMA[p.dtype]), Sq=3, Sk=150)

@pytest.mark.thorough
@pytest.mark.parametrize("arch", (*UNITS, pytest.param("CUDA", marks=pytest.mark.gpu)))
@pytest.mark.parametrize("heads", (16, 128))
def test_whole_rows(heads:int, arch:str) -> None:
  # Latent attention over 8-bit rows is right for DeepSeek's sizes: 512 latent columns and 64 rotary columns.
  check_latent(arch, H=heads, Sq=1, Sk=150, D=576, Dv=512, dtype="bfloat16" if heads > 16 else "float16")

@in_turn("dtype, arch", SIXTEEN, UNITS, [GPU])
def test_a_row_that_one_key_dominates_is_exact(arch:str, dtype:str) -> None:
  # If one key has all the weight, O is the stored row of this key times the row's scale, up to two roundings in float32. The scores of this test come
  # from the rotary columns alone.
  p = stored_problem(Sq=1, Sk=96, dtype=dtype, out_dtype="float32", **LATENT)
  x = normal_rows(p)
  assert x.rotary is not None
  x = replace(x, q=rounded(np.sign(x.q), dtype), rotary=rounded(x.rotary*0, dtype))
  best = 5*np.arange(16) + 3
  x.rotary[0, 0, best] = np.sign(x.q[0, :, 0, 64:])*60
  x.q[..., :64] = 0
  o, _ = run_stored(p, x, arch, {})
  np.testing.assert_allclose(o[0, :, 0], dequantised(x, "int8")[1][0, 0, best], rtol=2**-21)

# ***** planted faults: each is caught *****

MODULES = (amd_latent, mma_latent)

def weights_without_scales(m:pytest.MonkeyPatch) -> None:
  for module in MODULES: m.setattr(module, "scaled_weights", lambda p, scales, rows=1: p)
def reference_without_scales(m:pytest.MonkeyPatch) -> None:
  for module in MODULES: m.setattr(module, "compared_scores", lambda scores, scales, to_log2: scores)
def sums_with_scales(m:pytest.MonkeyPatch) -> None:
  # Plants a fault: O is divided by a sum of P times the scales of the rows. The right sum is that of P.
  def of_ones(packed:list[UOp], p:list[UOp], scales:list[UOp], dtype:str, rows:int=1) -> UOp:
    return sum_of_unscaled(packed, p, [ops.splat(1.0, ops.length(x)) for x in scales], dtype, rows)
  for module in MODULES: m.setattr(module, "sum_of_unscaled", of_ones)
def rotary_columns_of_one_row(m:pytest.MonkeyPatch) -> None:
  # plants a fault: the kernel uses the rotary columns of the first key for all keys
  own = Workgroup.rows_of
  def first_only(self:Workgroup, name:str, *how:Any, **named:Any) -> Any:
    rows = own(self, name, *how, **named)
    return replace(rows, stride=0) if name == "k_rotary" else rows
  m.setattr(Workgroup, "rows_of", first_only)
def scores_without_scales(m:pytest.MonkeyPatch) -> None:
  # plants a fault: the scores of the latent columns are not multiplied by the scales
  for of in (AmdLatent, MmaLatent):
    own = of.raw_scores
    def raw(self:Any, *state:Any, own:Any=own, of:Any=of) -> Any:
      scales = of.scales
      with pytest.MonkeyPatch.context() as inside:
        inside.setattr(of, "scales", lambda self, *at: [ops.splat(1.0, ops.length(x)) for x in scales(self, *at)])
        return own(self, *state)
    m.setattr(of, "raw_scores", raw)

def test_faults_where_threads_convert_a_tile(monkeypatch:pytest.MonkeyPatch) -> None:
  # The test of latent attention finds a fault in the conversion of a tile of K in shared memory, which takes place if there are several matrix tiles
  # of queries.
  other_half_first(monkeypatch)
  with pytest.raises(AssertionError): check_latent("sm_80", H=40, Sq=1, Sk=150)

@pytest.mark.sample(3)
@in_turn("fault, arch", ((weights_without_scales, normal_rows), (reference_without_scales, tiny_values), (sums_with_scales, normal_rows),
                         (rotary_columns_of_one_row, normal_rows), (scores_without_scales, normal_rows)), ("gfx942", "sm_80"))
def test_faults(monkeypatch:pytest.MonkeyPatch, arch:str, fault:tuple[Any, Any]) -> None:
  plant, make = fault
  plant(monkeypatch)
  with pytest.raises(AssertionError): check_latent(arch, make, Sq=1, Sk=150)

# ***** machine code, and refusals *****

DECODE = dict(B=64, Sq=1, Sk=4096, lse=False, **{**LATENT, "D": 576, "Dv": 512})

@pytest.mark.sample(2)
@in_turn("of, arch", [(dtype, heads) for dtype in SIXTEEN for heads in (16, 128)], ("gfx942", "gfx950", "gfx1100", "gfx1201"))
def test_decoding_spills_no_registers_on_amd(arch:str, of:tuple[str, int]) -> None:
  dtype, heads = of
  no_spills_on_amd(stored_problem(dtype=dtype, **{**DECODE, "H": heads}), arch)

@pytest.mark.sample(2)
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("dtype, stored, heads", (("float16", "int8", 16), ("bfloat16", "int8", 128), ("bfloat16", "fp8e4m3", 128)))
def test_decoding_spills_no_registers_on_nvidia(stored:str, dtype:str, heads:int, tmp_path:Any) -> None:
  no_spills_on_nvidia(stored_problem(dtype=dtype, stored=stored, **{**DECODE, "H": heads}), tmp_path)

def test_refusals() -> None:
  p = stored_problem(Sq=1, **LATENT)
  for arch, kernel, general in (("gfx942", "mla", "forward"), ("sm_90", "mla_mma", "forward_mma")):
    assert choose(p, get_chip(arch)).kernel in (kernel, "split_kv")
    assert "with v_dim: the kernels for latent attention read such a cache" in (choose(p, get_chip(arch)).why_not(general) or "")
  odd = replace(p, Dv=63, k_rotary_view=p.k_rotary_view)
  assert choose(odd, get_chip("gfx942")).kernel == "tiled" and "must be a multiple of 32" in (choose(odd, get_chip("gfx942")).why_not("mla") or "")
