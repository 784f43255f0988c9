"""Tests of the staggered kernel of CDNA2 and CDNA3, in which two halves of a workgroup's waves take turns. The results agree with float64, and the
emulator finds a missing barrier."""
from __future__ import annotations
from dataclasses import replace
import pytest
from attn.chips import get_chip
from attn.choose.dispatch import choose
from attn.choose.tiles import choose_amd_tile, staggered_tile
from attn.compilers.clang import assembly
from attn.emulator.checks import LdsRace
from attn.isa.source import Spec, kernel_source, problem_of_spec
from attn.kernels import staggered
from cases import check_kernel, normal, problem
from test_forward import ADVERSARIAL, huge_key

def check(make=normal, arch:str="gfx942", **parameters) -> None:
  p, chip = problem(**{"D": 128, **parameters}), get_chip(arch)
  check_kernel(staggered.staggered(p, chip, staggered_tile(p, chip)), p, make(p), arch)

CASES = {
  "whole tiles": dict(H=1, Sq=256, Sk=256), "an odd number of tiles": dict(H=1, Sq=200, Sk=160, dtype="bfloat16"), "one key": dict(H=2, Sq=3, Sk=1),
  "odd lengths, D and Dv": dict(H=2, Sq=100, Sk=133, D=70, Dv=101, dtype="bfloat16", arch="gfx90a"),
  "grouped heads": dict(B=2, H=6, Hkv=2, Sq=70, Sk=130, layout="bshd"),
  "fp32 out": dict(H=1, Sq=100, Sk=220, D=96, out_dtype="float32"), "causal": dict(H=1, Sq=300, causal=True, arch="gfx90a"),
  "causal, rows that see nothing": dict(H=1, Sq=300, Sk=40, causal=True, dtype="bfloat16"),
  "causal top-left": dict(H=1, Sq=300, Sk=150, causal="top-left"), "a window": dict(H=1, Sq=300, Sk=400, window=(50, 20)),
}

@pytest.mark.sample(3)
@pytest.mark.parametrize("case", CASES)
def test_contract(case:str) -> None: check(**CASES[case])

@pytest.mark.sample(4)
@pytest.mark.parametrize("make", ADVERSARIAL, ids=lambda f: f.__name__)
def test_adversarial(make) -> None: check(make, H=2, Sq=70, Sk=200, dtype="bfloat16" if make is huge_key else "float16")

@pytest.mark.usefixtures("without_places")
def test_fewer_tiles_in_lds_are_a_race(monkeypatch) -> None:
  monkeypatch.setattr(staggered, "BUFFERS", 2)
  with pytest.raises(LdsRace): check(H=1, Sq=256, Sk=256)

def test_dispatch() -> None:
  # Dispatch chooses the staggered kernel for suitable problems on chips that have this kernel. For other problems it says why not.
  plain = {"B": 4, "H": 32, "Sq": 4096, "D": 128, "dtype": "bfloat16", "causal": True, "lse": False}
  p, chip = problem(**plain), get_chip("gfx942")
  assert choose(p, chip).kernel == "staggered" == choose(problem(**plain | {"lse": True}), get_chip("gfx950")).kernel
  assert choose(p, get_chip("gfx950")).kernel == "dual_wave" and choose(p, get_chip("gfx1100")).kernel == "forward"
  for change, why in (({"D": 64}, "predicted to be faster"), ({"D": 192}, "supports at most 128"), ({"Sq": 100}, "compute units idle"),
                      ({"Sq": 1, "Sk": 4096, "B": 64}, "Sq=1: half of the 256 rows of a block would be padding"),
                      ({"D": 100, "Dv": 128}, "only one of them is a multiple of 8"),
                      ({"softcap": 20.0}, "softcap: this kernel does not support it")):
    assert why in (choose(problem(**plain | change), chip).why_not("staggered") or "")
  assert choose(p, replace(get_chip("gfx950"), llvm=21)).kernel == "staggered"       # dual_wave needs LLVM 22

def test_fp32_is_not_packed() -> None:
  # clang packs no fp32 operations in the machine code of the staggered kernel, because the kernel's source forbids it. In the forward kernel clang
  # packs them.
  spec = Spec("gfx942", 128)
  tiles = (None, choose_amd_tile(problem_of_spec(spec), get_chip(spec.arch)))
  apart, packed = (assembly(kernel_source(spec, tile).text, spec.arch) for tile in tiles)
  assert "v_pk_fma_f32" not in apart and "v_pk_mul_f32" not in apart and "v_pk_mul_f32" in packed
