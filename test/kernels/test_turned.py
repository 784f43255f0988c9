"""Tests of attention of 8-bit floats for which another kernel transposes V before."""
from __future__ import annotations
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
import numpy as np
import pytest
from attn.chips import get_chip
from attn.chips.nvidia import FORWARD_WGMMA_TURNED
from attn.chips.shapes import UpTo
from attn.choose.dispatch import TURNING, choose, program_of, read_by, single_kernel
from attn.emulator.checks import EmulatorError
from attn.kernels.nvidia import turn, widen
from attn.kernels.parts.grid.tensors import arguments
from attn.kernels.parts.program.blocks import blocks_seen
from attn.kernels.tiles.wgmma import WgmmaTile
from attn.kernels.wgmma.forward import WgmmaForward
from attn.ops.renderers import render
from attn.problem import Problem
from attn.tinygrad_compat import UOp
from attn.values import FLOATS, INTS
from cases import GPU, Inputs, in_turn, ints, normal, problem
from test_8_bits import HARD, RUN, check_8_bits, scales_of, spills

def check_turned(arch:str, make:Any=normal, **parameters:Any) -> None: check_8_bits(arch, make, kernel=TURNING, **parameters)

# tiles of 96 and of 128 keys; the last tile of keys in part; columns that are no whole 32; several heads and batches in each layout
SHAPES = (dict(Sq=64, Sk=64, D=32), dict(Sq=70, Sk=300, D=64), dict(Sq=130, Sk=150, D=128, H=2, Hkv=1, B=2, out_dtype="bfloat16"),
          dict(Sq=200, Sk=500, D=128, lse=False, fast_accumulate=True), dict(Sq=200, Sk=77, D=48, Dv=96), dict(Sq=3, Sk=200, D=128, layout="nsd"),
          dict(Sq=130, Sk=200, D=256, H=1, layout="bshd"), dict(Sq=70, Sk=150, D=160, Dv=192, causal=True))

@pytest.mark.sample(5)
@in_turn("shape, arch", SHAPES, ["sm_90"], [GPU])
def test_shapes(shape:dict[str, Any], arch:str) -> None: check_turned(arch, **shape)

@pytest.mark.sample(3)
@in_turn("row, arch", FORWARD_WGMMA_TURNED, ["sm_90"], [GPU])
def test_every_tile(row:UpTo[Any], arch:str) -> None:
  assert row.shape.block_n <= RUN      # otherwise a sum of more products would stay in the matrix unit
  check_turned(arch, H=1, Sq=200, Sk=500, D=row.up_to, causal=True, extras=scales_of(1, 1), tile=WgmmaTile(**vars(row.shape)))

@pytest.mark.sample(4)
@in_turn("make, arch", HARD, ["sm_90"], [GPU])
def test_hard_inputs(make:Any, arch:str) -> None:
  check_turned(arch, make, Sq=66, Sk=150, D=32, causal=True)
  check_turned(arch, make, Sq=66, Sk=300, D=64, causal=True, lse=False)

OPTIONS: dict[str, dict[str, Any]] = {
  "scales of heads": dict(B=2, H=4, Hkv=2, extras=scales_of(2, 2)), "scales and a mask": dict(causal=True, extras=scales_of(1, 1)),
  "negative scales": dict(extras={"q_scale": np.array([[-0.5]], np.float32), "k_scale": np.array([[3]], np.float32)}, Sk=300),
  "scale 0": dict(extras={"k_scale": np.array([[0]], np.float32)}, Sk=300), "NaN scale": dict(extras={"q_scale": np.array([[np.nan]], np.float32)}),
  "tiny scale": dict(extras={"q_scale": np.array([[2.0**-110]], np.float32), "k_scale": np.array([[2.0**-30]], np.float32)}),
  "window": dict(window=(20, 3), Sk=400), "sinks": dict(extras={"sinks": np.array([0.5, 4], np.float32)}), "top left": dict(causal="top-left"),
  "lengths": dict(B=3, extras={"kv_lengths": ints(37, 0, 90)}), "softcap": dict(softcap=3.0, extras=scales_of(1, 2))}

@pytest.mark.sample(4)
@in_turn("name, arch", OPTIONS, ["sm_90"], [GPU])
def test_options(name:str, arch:str) -> None: check_turned(arch, **{"Sq": 66, "Sk": 150, "D": 32, "H": 2, **OPTIONS[name]})

def nan_beyond(p:Problem) -> Inputs:
  # NaN in the rows of K and V from row 37 on
  x = normal(p)
  x.k[:, :, 37:], x.v[:, :, 37:] = np.nan, np.nan
  return x

LENGTHS: dict[str, Any] = dict(Sq=70, Sk=200, D=32, extras={"kv_lengths": ints(37)})

def test_rows_beyond_the_lengths_have_no_effect() -> None: check_turned("sm_90", nan_beyond, **LENGTHS)

# ***** planted faults *****

def columns_as_they_were(m:pytest.MonkeyPatch) -> None: m.setattr(turn, "transpose_dwords", lambda rows: rows)
def keys_in_their_own_order(m:pytest.MonkeyPatch) -> None: m.setattr(turn, "key_in_unit", lambda mat, h, n: h*4 + n)
def no_first_tiles(m:pytest.MonkeyPatch) -> None:
  m.setattr(widen, "blocks_seen", lambda walk, first, last, keys: blocks_seen(walk, last, last, keys))
def every_row_exists(m:pytest.MonkeyPatch) -> None:
  m.setattr(turn, "rows_read", lambda group: (group.p.Sk - group.first_row).minimum(group.tile.block_m))
def no_ones(m:pytest.MonkeyPatch) -> None: m.setattr(WgmmaForward, "ones", lambda unit, shared: [])
def half_of_the_stages(m:pytest.MonkeyPatch) -> None: m.setattr(WgmmaTile, "stages", lambda tile, p: 2)

@pytest.mark.sample(3)
@pytest.mark.parametrize(("plant", "make", "error", "options"), (
  (columns_as_they_were, normal, AssertionError, {}), (keys_in_their_own_order, normal, AssertionError, {}),
  (no_first_tiles, normal, EmulatorError, dict(Sk=600, window=(40, 0))), (every_row_exists, nan_beyond, AssertionError, LENGTHS),
  (no_ones, normal, EmulatorError, {}), (half_of_the_stages, normal, EmulatorError, dict(Sk=700))))
def test_faults_are_found(plant:Any, make:Any, error:type[Exception], options:dict[str, Any], monkeypatch:pytest.MonkeyPatch,
                          without_places:None) -> None:
  plant(monkeypatch)
  with pytest.raises(error): check_turned("sm_90", make, **{"Sq": 130, "Sk": 210, **options, "D": 48})     # a shape of no other test

# ***** machine code *****

@pytest.mark.sample(2)
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("options", (dict(lse=False), dict(lse=False, causal=True), dict(causal=True), dict(lse=False, window=(5000, 5000)),
                                     dict(softcap=3.0, causal=True)), ids=str)
@pytest.mark.parametrize("D", (64, 128, 192, 256))
def test_no_register_spills(D:int, options:dict[str, Any], tmp_path:Path) -> None:
  p = problem(dtype="fp8e4m3", out_dtype="bfloat16", B=4, H=32, D=D, Sq=16384, extras=scales_of(1, 1), **options)
  choice = choose(p, get_chip("sm_90"))
  assert choice.kernel == TURNING
  tensors = arguments(read_by(p, choice)).values()
  text = render(program_of(choice, p)(*[UOp.placeholder(shape, (FLOATS | INTS)[dtype], i) for i, (shape, dtype) in enumerate(tensors)]), "sm_90")
  assert not (found := spills(text, "sm_90", tmp_path)), found

# ***** which kernel *****

LONG: dict[str, Any] = dict(B=1, H=16, Sq=8192, D=128, lse=False)

@pytest.mark.parametrize(("why", "options"), (
  ("", {}), ("", dict(causal=True)), ("on average 1024 rows of q read a key", dict(Sq=1024)), ("", dict(Hkv=4, Sq=1024)),
  ("kv_starts", dict(extras=dict(kv_lengths=ints(8192), kv_starts=ints(0)))), ("batch_invariant", dict(batch_invariant=True)),
  ("no tile of turned_wgmma fits", dict(extras=dict(alibi_slopes=np.ones(16, np.float32)))),
  ("the transposed V would take 2147483648 bytes", dict(B=16, H=64, Sq=16384))))
def test_which_kernel_transposes_v(why:str, options:dict[str, Any]) -> None:
  p = problem(dtype="fp8e4m3", out_dtype="bfloat16", **{**LONG, **options})
  choice = choose(p, get_chip("sm_90"))
  assert choice.kernel == ("forward_wgmma" if why else TURNING) and (choice.why_not(TURNING) or "").startswith(why)

def test_a_single_kernel_transposes_v_itself() -> None:
  p = problem(dtype="fp8e4m3", out_dtype="bfloat16", **LONG)
  tile = single_kernel(p, get_chip("sm_90"))[1]
  assert isinstance(tile, WgmmaTile) and tile.transposes(p) and not tile.transposes(replace(p, turned=tile.block_n))
