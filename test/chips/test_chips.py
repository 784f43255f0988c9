"""Tests of the table of chips. Its rows agree with the emulator's table, which was written independently, and each chip's kernels agree with float64.
"""
from __future__ import annotations
from collections import Counter
from dataclasses import replace
import numpy as np
import pytest
from attn.chips import CHIPS, FAMILIES, MODELLED, SEARCHED, get_chip, modelled
from attn.emulator.chips import DOTS, EMULATED
from attn.isa.roofline import RATED
from attn.problem import Problem
from attn.reference import rounded
from attn.tinygrad_compat import Context, Tensor, dtypes
from cases import Inputs, check, in_turn, normal, problem, run

def test_the_emulator_knows_the_same_chips() -> None:
  assert list(CHIPS) == list(EMULATED)
  for name, chip in CHIPS.items():
    own = EMULATED[name]
    assert (own.family, own.wave, own.lds) == (chip.family, chip.wave, chip.lds), name
    assert chip.unit.dots == tuple(dtype for dtype, families in DOTS.items() if chip.family in families), name

@pytest.mark.sample(5)
@in_turn("arch, dtype", CHIPS, ("float16", "bfloat16"))
def test_the_contract_holds(arch:str, dtype:str) -> None:
  check(arch, H=2, Sq=100, Sk=150, D=64, causal=dtype == "bfloat16", dtype=dtype)

def test_gfx90a_loses_what_is_denormal_in_fp16() -> None:
  # gfx90a treats values of V below the lowest normal fp16 number, 2^-14, as zero; other chips do not.
  def tiny(p:Problem) -> Inputs: return replace(x := normal(p), v=rounded(np.sign(x.v)*np.float32(2.0**-15), p.dtype))
  shape = {"H": 1, "Sq": 40, "Sk": 1, "D": 32, "make": tiny}
  p = problem(**{name: n for name, n in shape.items() if name != "make"})
  found = {arch: run(p, tiny(p), arch)[0] for arch in ("gfx90a", "gfx942")}
  assert (np.abs(found["gfx942"]) == 2.0**-15).all() and (found["gfx90a"] == 0).all()
  check("gfx942", **shape)
  with pytest.raises(AssertionError, match="o: "): check("gfx90a", **shape)

def test_plain_tinygrad_runs_on_every_chip() -> None:
  # tinygrad's own matrix product is right on an emulated chip of every family. For a chip that tinygrad does not know, it must not use the matrix
  # instruction of another chip.
  x = np.random.default_rng(0).integers(-4, 5, (2, 64, 64)).astype(np.float16)
  for arch in dict((chip.family, name) for name, chip in CHIPS.items()).values():
    with Context(DEV=f"EMU::{arch}"):
      got = Tensor(x[0]).matmul(Tensor(x[1]), dtype=dtypes.float).numpy()
    np.testing.assert_array_equal(got, x[0].astype(np.float32) @ x[1].astype(np.float32), err_msg=arch)

def test_every_family_of_amd_has_tiles_that_were_searched_for_on_one_chip() -> None:
  with_tiles = [name for name, family in FAMILIES.items() if family.matrix]
  assert [CHIPS[name].family for name in SEARCHED] == with_tiles == [name for name, family in FAMILIES.items() if family.forward]

def test_cards_and_machines_belong_to_one_chip() -> None:
  cards = Counter(card.name for chip in CHIPS.values() for card in chip.cards)
  machines = Counter(chip.machine for chip in CHIPS.values() if chip.machine)
  assert max(cards.values()) == max(machines.values()) == 1
  assert {name for name, chip in CHIPS.items() if chip.machine} == set(MODELLED) == {chip.name for chip, _ in RATED.values()}

def test_a_chip_has_the_registers_for_a_wave_and_lds_for_a_workgroup() -> None:
  # Each chip's numbers are consistent: the registers of a wave are at most those of a SIMD (on CDNA one wave may use all of them, on RDNA at most a
  # quarter), and registers and LDS are multiples of the sizes in which they are allocated.
  for chip in map(CHIPS.__getitem__, MODELLED):
    assert chip.registers % chip.granule == 0 and chip.registers >= chip.vgprs and chip.lds % chip.pipes.lds_granule == 0, chip

def test_a_name_may_have_features_and_must_be_known() -> None:
  assert get_chip("gfx942:sramecc+:xnack-") is CHIPS["gfx942"]
  with pytest.raises(ValueError, match=r"arch='gfx906' is not known; .*: gfx90a.*; without one: gfx1010"): get_chip("gfx906")
  with pytest.raises(ValueError, match="no rates of instructions are known for 'sm_80'; they are known for gfx"): modelled("sm_80")
