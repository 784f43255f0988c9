"""Tests that no term of an offset of AMD's buffer instructions can be negative (attn/emulator/offsets.py says why)."""
from __future__ import annotations
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
import numpy as np
import pytest
from attn.calls.views import whole_places
from attn.chips import get_chip
from attn.choose.backward import can_differentiate, choose_bias_tile, dbias_of, dkdv_of, dq_of
from attn.choose.dispatch import KERNELS, choose
from attn.choose.mla_tiles import mla_tile
from attn.emulator.offsets import OffsetTerm, may_be_negative
from attn.emulator.ranges import Ranges
from attn.kernels.parts.grid import workgroup
from attn.kernels.parts.grid.tensors import arguments, dbias_arguments, dkdv_arguments, dq_arguments
from attn.ops.common import not_negative, opaque_uniform
from attn.ops.operation import Call
from attn.ops.renderers import printer_of
from attn.problem import Pages, Problem, Shapes
from attn.tinygrad_compat import AxisType, Context, KernelInfo, Ops, Tensor, UOp, dtypes, lower
from cases import ARCHS, TYPES, amd_in_turn, floats, in_turn, ints, problem

# ***** ranges of numbers *****

NUMBERS: list[Callable[[UOp], UOp]] = [
  lambda x: x*3 - 7, lambda x: 20 - x, lambda x: (20 - x)*-2, lambda x: x//5, lambda x: (x - 9)//4, lambda x: x % 5, lambda x: (x - 9) % 4,
  lambda x: (x - 9).maximum(0), lambda x: (x*2).minimum(11), lambda x: (x < 7).where(x, x - 7), lambda x: (x < 40).where(x, -1), lambda x: x << 3,
  lambda x: x >> 2, lambda x: (x - 9) >> 2, lambda x: x & 12, lambda x: (x - 9) & 12, lambda x: x ^ -1, lambda x: not_negative(x, 31)//3,
  lambda x: not_negative(x, 20)*-1 + 20, lambda x: opaque_uniform(x).cast(dtypes.weakint).maximum(0).minimum(127)//3]

def test_ranges() -> None:
  # `Ranges` computes the lowest and the highest value of each integer in a lowered program. All values that the emulator computes lie between these
  # two.
  for i, make in enumerate(NUMBERS):
    def kernel(o:UOp, make:Callable[[UOp], UOp]=make, i:int=i) -> UOp:
      x = UOp.range(32, 0, AxisType.WARP)
      return o[x].store(make(x).cast(dtypes.int)).end(x).sink(arg=KernelInfo(f"number_{i}", opts_to_apply=()))
    uops = lower(kernel(UOp.placeholder((32,), dtypes.int, 0)), printer_of("gfx942"))
    with Context(DEV="EMU::gfx942"): values = Tensor.empty(32, dtype=dtypes.int).custom_kernel(fxn=kernel)[0].numpy()
    low, high = Ranges(uops).of[next(u.src[1] for u in uops if u.op is Ops.STORE)]
    assert low <= values.min() and values.max() <= high, (i, low, high, values)

# ***** kernels *****

PAGES = Pages(16, 40, 8)
IN_PAGES = whole_places((PAGES.count, PAGES.size, 1, 48), "bshd")
LATENT: dict[str, Any] = dict(Hkv=1, Sk=100, D=48, Dv=40, v_in_k=True, causal=True)
# tiles with rows of several heads and of several blocks
SEVERAL_HEADS: dict[str, dict[str, Any]] = {
  "latent, 64 heads": dict(H=64, Sq=2, **LATENT), "latent, 128 heads": dict(H=128, Sq=3, **LATENT), "latent, 16 heads": dict(H=16, Sq=8, **LATENT),
  "latent, pages": dict(H=64, Sq=2, **{**LATENT, "Sk": PAGES.rows}, pages=PAGES, views=(IN_PAGES, IN_PAGES),
                        extras=dict(kv_lengths=ints(100), block_table=np.zeros((1, PAGES.most), np.int32))),
  "24 heads": dict(H=72, Hkv=3, Sq=15, Sk=100, window=(20, 3)),
  "48 heads, bias": dict(H=96, Hkv=2, Sq=15, Sk=64, extras=dict(bias=floats(1, 96, 15, 64))),
  "latent, 40 heads": dict(H=40, Sq=5, **LATENT),      # rows are divided by no power of two
}
OTHERS: dict[str, dict[str, Any]] = {
  "latent, whole rows": dict(H=64, Sq=2, **{**LATENT, "D": 576, "Dv": 512}),
  "latent, packed sequences": dict(H=40, Sq=9, layout="thd", **LATENT,
                                   extras=dict(cu_seqlens_q=ints(0, 2, 5, 9), cu_seqlens_k=ints(0, 40, 41, 100))),
  "causal, bias, dropout": dict(Sq=300, Sk=350, causal=True, dropout_p=0.1,
                                extras=dict(bias=floats(1, 2, 300, 350), dropout_seed=ints(1, 2).view("u4"))),
  "odd widths": dict(Sq=300, D=37, Dv=21, causal="top-left"),
  "window of packed sequences": dict(Sq=300, layout="thd", window=(40, 10),
                                     extras=dict(cu_seqlens_q=ints(0, 100, 300), cu_seqlens_k=ints(0, 90, 300))),
  "splits": dict(H=8, Hkv=2, Sq=1, Sk=4096, num_splits=4, causal=True, extras=dict(kv_lengths=ints(999))),
}
BACKWARD = ("causal, bias, dropout", "odd widths", "window of packed sequences")

def placeholders(shapes:Shapes) -> list[UOp]: return [UOp.placeholder(shape, TYPES[dtype], i) for i, (shape, dtype) in enumerate(shapes.values())]

def forward_kernel(p:Problem, arch:str) -> UOp:
  # the forward kernel that dispatch chooses, or for latent attention `mla`
  chip = get_chip(arch)
  choice = choose(p, chip)
  # dispatch would give short rows to another kernel than mla, but kernels of short rows are quick to lower
  name, tile = ("mla", mla_tile(p, chip)) if p.v_in_k else (choice.kernel, choice.work.tile)
  program = KERNELS[name].program
  assert program is not None and tile is not None
  p = replace(p, num_splits=1 if p.v_in_k else choice.work.splits)
  return program(p, chip, tile)(*placeholders(arguments(p)))

def backward_kernels(p:Problem, arch:str) -> Iterator[UOp]:
  chip = get_chip(arch)
  found = can_differentiate(p, chip)
  assert not isinstance(found, str), found
  yield dq_of(p, chip, found[0], dlse=True)(*placeholders(dq_arguments(p, dlse=True)))
  yield dkdv_of(p, chip, found[1])(*placeholders(dkdv_arguments(p)))
  if p.bias is not None: yield dbias_of(p, chip, choose_bias_tile(p, chip))(*placeholders(dbias_arguments(p)))

def not_shown(kernel:UOp, arch:str) -> list[OffsetTerm]:
  # the terms in the offsets of a kernel's buffer loads that are not proven to be at least 0
  uops = lower(kernel, printer_of(arch))
  assert any(isinstance(u.arg, Call) and u.arg.name in ("buffer_load", "load_to_lds") for u in uops)
  ranges = Ranges(uops)
  return [term for u in uops for term in may_be_negative(u, ranges)]

@pytest.mark.sample(4)
@amd_in_turn("name", SEVERAL_HEADS)
def test_several_heads(name:str, arch:str) -> None: assert not not_shown(forward_kernel(problem(**SEVERAL_HEADS[name]), arch), arch)

@pytest.mark.thorough
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", OTHERS)
def test_other_options(name:str, arch:str) -> None: assert not not_shown(forward_kernel(problem(**OTHERS[name]), arch), arch)

@pytest.mark.thorough
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", BACKWARD)
def test_backward(name:str, arch:str) -> None:
  for kernel in backward_kernels(problem(**OTHERS[name]), arch): assert not not_shown(kernel, arch)

@in_turn("name, arch", ("latent, 64 heads", "24 heads"), ARCHS, turn=1)
def test_blocks_backwards_are_needed(name:str, arch:str, monkeypatch:pytest.MonkeyPatch) -> None:
  # A kernel that starts its last blocks first computes a block's number as a difference. `not_negative` hides this difference from the compiler. If
  # the test removes `not_negative`, an offset has a term that may be negative.
  monkeypatch.setattr(workgroup.ops, "not_negative", lambda x, most: x)
  assert not_shown(forward_kernel(problem(**SEVERAL_HEADS[name]), arch), arch)
