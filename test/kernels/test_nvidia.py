"""Tests of the mma.sync kernels against float64, on the emulator and, with `python -m pytest -m gpu`, on this machine's GPU."""
from __future__ import annotations
import itertools, re, shutil, subprocess
from dataclasses import replace
from typing import Any
import numpy as np
import pytest
from tinygrad import TinyJit, Variable
from attn.chips import get_chip
from attn.chips.matrix import MMA
from attn.choose.dispatch import choose, forward_of
from attn.choose.tiles import mma_tile
from attn.emulator.checks import LdsRace, NotWaitedFor
from attn.kernels.nvidia import ring
from attn.kernels.parts.grid.tensors import arguments
from attn.kernels.parts.memory.layouts import SwizzledRows
from attn.kernels.tiles.mma import MmaTile
from attn.ops import nvidia
from attn.ops.renderers import render
from attn.problem import Problem
from attn.tinygrad_compat import Context, Tensor, UOp
from cases import DTYPES_AND_MASKS, GPU, TYPES, WIDTHS, Inputs, change_kernel, check, in_turn, normal, problem
from test_features import COMPILED as OPTIONS_COMPILED
from test_forward import ADVERSARIAL, MASKS, SHAPES

either = pytest.mark.parametrize("chip", ("sm_90", GPU))

@pytest.fixture(autouse=True)
def without_wgmma(monkeypatch) -> None:
  # Makes dispatch choose mma.sync kernels on sm_90. Clears dispatch's cached choices before and after each test.
  change_kernel(monkeypatch, "forward_wgmma", lacks=lambda arch: "this tests mma.sync")

@pytest.mark.sample(3)
@in_turn("case, chip", SHAPES, ["sm_90"], [GPU], among=2)
def test_shapes(chip:str, case:str) -> None: check(chip, **SHAPES[case])

@pytest.mark.sample(3)
@either
@pytest.mark.parametrize("case", MASKS)
def test_masks(chip:str, case:str) -> None: check(chip, **MASKS[case])

@pytest.mark.sample(3)
@either
@pytest.mark.parametrize("make", ADVERSARIAL, ids=lambda f: f.__name__)
def test_adversarial(chip:str, make) -> None:
  check(chip, make, H=2, Sq=40, Sk=200, D=64, dtype="bfloat16" if make.__name__ == "huge_key" else "float16")
  check(chip, make, H=2, Sq=70, Sk=90, D=32, dtype="bfloat16", causal=True)

@either
@pytest.mark.parametrize(("value", "scale"), ((12288, 0.25), (14336, 0.1)))
def test_scores_too_large_for_one_fma(chip:str, value:int, scale:float) -> None:
  # The mma.sync kernel computes exp2(score - maximum) without overflow or underflow for bfloat16 scores above 1e10 beside rows of ordinary scores. A
  # single fma would round the product of the scale with the maximum but not that with the score, and give exponents of 128 and -96 here.
  def make(p:Problem) -> Inputs:
    x = normal(p)
    q, k = np.full_like(x.q, value), np.full_like(x.k, 16384)
    q[..., ::3, :] = x.q[..., ::3, :]*2.0**-14
    return Inputs(q, k, x.v)
  check(chip, make, Sq=20, Sk=170, D=64, dtype="bfloat16", softmax_scale=scale, out_dtype="float32")

@pytest.mark.sample(2)
@in_turn("D, on", WIDTHS, [(chip, *mask) for mask in DTYPES_AND_MASKS for chip in ("sm_80", "sm_86", "sm_89")],
         [pytest.param(("CUDA", *mask), marks=pytest.mark.gpu) for mask in DTYPES_AND_MASKS])
def test_head_dimensions(D:int, on:tuple[str, str, bool|str]) -> None:
  # The mma.sync kernel is right for each head dimension, with the tiles of large grids on a problem of few heads: in float16 and bfloat16, with
  # causal masks that begin at the top left or end at the bottom right.
  chip, dtype, causal = on
  check(chip, H=4, Hkv=2, Sq=150, Sk=203, D=D, dtype=dtype, causal=causal)

@pytest.mark.sample(3)
@either
@pytest.mark.parametrize("ratio", (1, 3, 4, 5, 7, 8, 24))
def test_grouped_heads(chip:str, ratio:int) -> None:
  check(chip, B=2, H=2*ratio, Hkv=2, Sq=20, Sk=40, layout=("bhsd", "bshd")[ratio % 2], causal=ratio % 2 == 1)

@pytest.mark.gpu
@pytest.mark.parametrize("D", WIDTHS)
def test_large_grids(D:int) -> None:
  # The mma.sync kernel is right on a GPU for grids that fill the chip, for which dispatch chooses its large tiles.
  for dtype, causal in itertools.product(("float16", "bfloat16"), (False, True)):
    check("CUDA", B=2, H=24, Hkv=8, Sq=1000, Sk=1111, D=D, dtype=dtype, causal=causal)

@pytest.mark.gpu
def test_attention_of_tensors() -> None:
  # `attention` is right on a GPU with score options, with a split, and with a cache to which TinyJit appends.
  from attn import attention, attention_with_kv_cache, explain
  with Context(DEV="CUDA"):
    rng = np.random.default_rng(0)
    q, k, v = (Tensor(rng.standard_normal((2, 4, 100, 64)).astype(np.float16)) for _ in range(3))
    close = lambda x, y: np.testing.assert_allclose(x.numpy(), y.numpy(), atol=4e-3)
    close(attention(q, k, v), q.scaled_dot_product_attention(k, v))
    close(attention(q, k, v, causal="top-left"), q.scaled_dot_product_attention(k, v, is_causal=True))
    assert explain(q, k, v, num_splits=2).kernel == "split_kv"
    close(attention(q, k, v, num_splits=2), q.scaled_dot_product_attention(k, v))
    cache = [Tensor.zeros(2, 4, 100, 64, dtype="half").contiguous().realize() for _ in range(2)]
    step = TinyJit(lambda n, *new: attention_with_kv_cache(*new, *cache, n, causal=True).realize())
    steps = [step(Variable("n", 0, 99).bind(i), *(x[:, :, i:i + 1].contiguous().realize() for x in (q, k, v))).numpy() for i in range(100)]
    close(Tensor(np.concatenate(steps, 2)), q.scaled_dot_product_attention(k, v, is_causal=True))
    bias = Tensor(rng.standard_normal((100, 100)).astype(np.float32))
    assert explain(q, k, v, bias=bias).kernel == "forward_mma"
    close(attention(q, k, v, bias=bias), q.scaled_dot_product_attention(k, v, attn_mask=bias.half()))

# ***** tiles *****

TILES = [MmaTile(*numbers, waves=waves, stages=stages, q_in_lds=q_in_lds, matrix=MMA["float16"]) for waves, *numbers, stages, q_in_lds in (
  (4, 2, 64, 2, False), (8, 1, 64, 2, False), (4, 2, 48, 2, True), (2, 1, 32, 3, False), (4, 1, 32, 4, True), (1, 2, 16, 2, False))]
TILES += [replace(TILES[0], parts=4), replace(TILES[1], parts=1), replace(TILES[2], parts=3)]
TILES += [replace(TILES[0], q_tiles=1, stages=3, key_waves=4), replace(TILES[0], key_waves=2)]

ON_TILES: dict[str, dict[str, Any]] = {"causal": dict(Sq=150, Sk=133, D=64, causal=True), "window": dict(Sq=40, Sk=203, D=96, window=(70, -1)),
                                       "full": dict(H=1, Sq=70, Sk=130, D=128, dtype="float16")}

@pytest.mark.sample(2)
@in_turn("tile, case", TILES, list(ON_TILES))
def test_every_kind_of_tile(tile:MmaTile, case:str, monkeypatch) -> None:
  # The mma.sync kernel is right with any combination of a tile's fields: number of warps, tiles of queries for each warp, keys and the parts that
  # they are computed in, stages of the ring buffer, and where Q is kept.
  change_kernel(monkeypatch, "forward_mma", tile=lambda p, arch: tile)
  monkeypatch.setenv("ATTN_KERNEL", "forward_mma")
  check("sm_90", **ON_TILES[case])

@pytest.mark.parametrize("arch", ("sm_80", "sm_86", "sm_89", "sm_90"))
def test_tiles_fit(arch:str) -> None:
  for D, heads in itertools.product((16, 64, 80, 96, 128, 160, 192, 256), (1, 256)):
    p = problem(H=heads, Sq=1024, D=D)
    choice = choose(p, a := get_chip(arch))
    assert choice.kernel == "forward_mma"
    assert mma_tile(p, a).lds_bytes(p) <= a.lds

def test_two_blocks_to_a_multiprocessor() -> None:
  # Tiles of the mma.sync kernel leave shared memory for two workgroups on a multiprocessor, so that one computes while the other waits. The exception
  # is D = 256 on chips with 100 KB of shared memory.
  for arch, D in itertools.product(("sm_80", "sm_86", "sm_89", "sm_90"), (64, 96, 128, 192, 256)):
    p, a = problem(H=256, Sq=1024, D=D), get_chip(arch)
    alone = D == 256 and arch in ("sm_86", "sm_89")
    assert (a.lds + 1024)//(mma_tile(p, a).lds_bytes(p) + 1024) >= (1 if alone else 2)

def test_banks() -> None:
  # The layout of the mma.sync kernels in shared memory (`SwizzledRows`) causes no bank conflicts: ldmatrix reads eight rows of a matrix from all
  # different banks, and cp.async writes eight 16-byte units of a line to all different banks.
  for width in (16, 64, 80, 128, 192, 256):
    rows = SwizzledRows(16, width//8)
    at = np.array([[int(rows.place(UOp.const(r), UOp.const(u)).simplify().arg) for u in range(rows.units)] for r in range(16)])
    assert len(set(at.flat)) == at.size
    for u in range(rows.units): assert {len(set(at[r:r + 8, u] % 8)) for r in (0, 8)} == {8}
    for u in range(0, rows.units//8*8, 8): assert all(len(set(at[r, u:u + 8] % 8)) == 8 for r in range(16))

@pytest.mark.parametrize("begin", (0, 24, 1))
def test_a_place_in_shared_memory_is_a_register_and_a_constant(begin:int) -> None:
  # `SwizzledRows.further` splits the place of a 16-byte unit into an expression, kept in a register, and a constant. Two tiles that are a constant
  # distance apart share the register. A tile that begins inside a line of eight units is refused: the layout's xor would then mix up rows.
  def tile(base:int) -> SwizzledRows: return SwizzledRows(16, 16, base=UOp.variable("t", 0, 3)*2*rows + base)
  def place(base:int, row:int, unit:int) -> int: return int(tile(base).place(UOp.const(row), UOp.const(unit)).substitute(third).simplify().arg)
  rows, third = 16*8, {UOp.variable("t", 0, 3): UOp.const(3)}
  if begin%8:
    with pytest.raises(AssertionError, match="multiple of 8 units"): tile(begin).further(UOp.const(0), UOp.const(0), 0, 0)
    return
  for row, more, units in itertools.product(range(8), (0, 8), range(0, 16, 2)):
    kept, constant = tile(begin).further(UOp.const(row), UOp.const(1), more, units)
    assert int(kept.substitute(third).simplify().arg) + constant == place(begin, row + more, units + 1)
    assert kept.simplify() is tile(0).further(UOp.const(row), UOp.const(1), more, units)[0].simplify()

DECODE = dict(B=2, H=16, Hkv=2, Sq=1, Sk=4096, causal=True, num_splits=16, extras=dict(kv_lengths=np.ones(1, np.int32).repeat(2)))
COMPILED: dict[str, dict[str, Any]] = {"full": dict(lse=False), "causal": dict(lse=False, causal=True), "lse": {}, "causal, lse": dict(causal=True),
                                       **OPTIONS_COMPILED, "decode": DECODE}

@pytest.mark.sample(2)
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@in_turn("option, D", COMPILED, (64, 128), [pytest.param(D, marks=pytest.mark.thorough) for D in (96, 256)], among=4)
def test_no_local_memory(option:str, D:int, tmp_path) -> None:
  # The mma.sync kernel, with its tiles for large grids and for decoding, compiles without spills and without a stack. tinygrad compiles sm_90 kernels
  # as sm_90a, and so does the test.
  a, p = get_chip("sm_90"), problem(**{"H": 512, "Sq": 512, "D": D, **COMPILED[option]})
  tensors = [UOp.placeholder(shape, TYPES[dtype], i) for i, (shape, dtype) in enumerate(arguments(p).values())]
  (source := tmp_path/"kernel.cu").write_text(render(forward_of(p, a, mma_tile(p, a))(*tensors), "sm_90"))
  command = ["nvcc", "-arch=sm_90a", "-cubin", "-Xptxas", "-v", "-o", str(tmp_path/"kernel.cubin"), str(source)]
  text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
  assert re.search(r"0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", text), text

# ***** faults that the emulator must find *****

@pytest.mark.usefixtures("without_places")
def test_copies_have_to_be_waited_for(monkeypatch) -> None:
  monkeypatch.setattr(nvidia, "wait_copies", lambda order, but: nvidia.commit(order))
  with pytest.raises(NotWaitedFor, match=r"reads lds.*still writes"): check("sm_80", H=1, Sq=32, Sk=130, D=16)

@pytest.mark.usefixtures("without_places")
def test_a_barrier_must_follow_the_wait(monkeypatch) -> None:
  monkeypatch.setattr(ring, "workgroup_barrier", lambda after: after)
  with pytest.raises(LdsRace): check("sm_80", H=1, Sq=64, Sk=130, D=16)


@pytest.mark.parametrize("transposed", (False, True))
def test_ldmatrix(transposed:bool) -> None:
  # The emulator's ldmatrix gives lane l the columns 2*(l%4) and 2*(l%4) + 1 of row l//4 of each matrix, or of its transpose (PTX ISA 9.7.14.5.15).
  class Lanes:
    active, wave = np.ones(32, bool), 32
    def load_bytes(self, pointer, offset, nbytes, gate): return np.ascontiguousarray(memory.reshape(32, 8)).view(np.uint8).T
  memory = np.arange(4*8*8, dtype=np.uint16).reshape(4, 8, 8)
  got = nvidia._ldmatrix(Lanes(), None, 0, transposed)
  for matrix, lane in itertools.product(range(4), range(32)):
    m = memory[matrix].T if transposed else memory[matrix]
    assert got[matrix, lane] == int(m[lane//4, lane%4*2]) | int(m[lane//4, lane%4*2 + 1]) << 16
