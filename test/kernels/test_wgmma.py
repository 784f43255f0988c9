"""Tests of the wgmma kernel for Hopper against float64, on the emulator and, with `python -m pytest -m gpu`, on this machine's GPU."""
from __future__ import annotations
import functools, itertools, re, shutil, subprocess
from dataclasses import replace
import numpy as np
import pytest
import cases, test_features as features
from attn.chips import get_chip
from attn.chips.nvidia import FORWARD_WGMMA
from attn.chips.shapes import RatedUpTo
from attn.choose.dispatch import forward_of
from attn.choose.tiles import wgmma_tile
from attn.emulator.checks import DivergentBarrier, EmulatorError, LdsRace, Misaligned, NotWaitedFor
from attn.kernels.parts.grid import workgroup
from attn.kernels.parts.memory.layouts import SwizzledPanels
from attn.kernels.parts.program.blocks import Descending
from attn.kernels.parts.program.counts import ceildiv
from attn.kernels.tiles import wgmma as wgmma_tiles
from attn.kernels.tiles.wgmma import WgmmaTile
from attn.kernels.wgmma import forward as wgmma_forward
from attn.ops import hopper, nvidia
from attn.ops.operation import OPERATIONS
from attn.ops.renderers import render
from attn.ops.softmax import LOWEST
from attn.tinygrad_compat import UOp, dtypes
from cases import DTYPES, DTYPES_AND_MASKS, GPU, WIDTHS, change_kernel, check, check_kernels, count_products, in_turn, problem
from test_forward import ADVERSARIAL, MASKS, SHAPES

either = pytest.mark.parametrize("chip", ("sm_90", GPU))

@pytest.fixture(autouse=True)
def always(monkeypatch) -> None:
  # makes the wgmma kernel run in every test of this file, also for few queries
  monkeypatch.setenv("ATTN_KERNEL", "forward_wgmma")
  monkeypatch.setattr(cases, "choose_tile", wgmma_tile)

# forward_wgmma copies rows in units of 8 elements; test_nvidia.py has the other shapes.
BY_EIGHTS = [name for name, case in SHAPES.items() if not case.get("D", 64)%8 and not case.get("Dv", 64)%8]

@pytest.mark.sample(5)
@in_turn("case, chip", BY_EIGHTS, ["sm_90"], [GPU], turn=1, among=2)
def test_shapes(chip:str, case:str) -> None: check(chip, **SHAPES[case])

@pytest.mark.sample(7)
@either
@pytest.mark.parametrize("case", MASKS)
def test_masks(chip:str, case:str) -> None: check(chip, **MASKS[case])

@pytest.mark.sample(7)
@either
@pytest.mark.parametrize("make", ADVERSARIAL, ids=lambda f: f.__name__)
def test_adversarial(chip:str, make) -> None:
  check(chip, make, H=2, Sq=40, Sk=200, D=64, dtype="bfloat16" if make.__name__ == "huge_key" else "float16")
  check(chip, make, H=2, Sq=70, Sk=90, D=32, dtype="bfloat16", causal=True)

@pytest.mark.sample(3)
@in_turn("D, on", WIDTHS, [("sm_90", *mask) for mask in DTYPES_AND_MASKS],
         [pytest.param(("CUDA", *mask), marks=pytest.mark.gpu) for mask in DTYPES_AND_MASKS])
def test_head_dimensions(D:int, on:tuple[str, str, bool|str]) -> None:
  # forward_wgmma is right for every head dimension that has a tile of its own, in float16 and bfloat16, without a mask and with causal masks that
  # begin at the top left or end at the bottom right.
  chip, dtype, causal = on
  check(chip, H=4, Hkv=2, Sq=150, Sk=203, D=D, dtype=dtype, causal=causal)

@pytest.mark.gpu
@pytest.mark.parametrize("D", WIDTHS)
def test_large_grids(D:int) -> None:
  for dtype, causal in itertools.product(("float16", "bfloat16"), (False, True)):
    check("CUDA", B=2, H=24, Hkv=8, Sq=1000, Sk=1111, D=D, dtype=dtype, causal=causal)

@pytest.mark.sample(3)
@pytest.mark.parametrize("row", FORWARD_WGMMA, ids=str)
def test_every_tile(row:RatedUpTo, monkeypatch) -> None:
  tile = WgmmaTile(**vars(row.shape))
  change_kernel(monkeypatch, "forward_wgmma", tile=lambda p, arch: tile)
  few = tile.lds_bytes(problem(Sk=500, D=row.up_to)) > get_chip("sm_90").lds      # a tile for problems whose keys all fit into it
  assert tile.lds_bytes(problem(Sk=tile.block_n, D=row.up_to)) <= get_chip("sm_90").lds
  check("sm_90", H=1, Sq=200, Sk=tile.block_n if few else 500, D=row.up_to, causal="top-left" if few else True)

@pytest.mark.sample(5)
@in_turn("option, chip", features.OPTIONS, ["sm_90"], [GPU], turn=1, among=2)    # test_features.py runs the other options by mma.sync
def test_option(chip:str, option:str) -> None: features.test_option(chip, option)

@pytest.mark.sample(2)
@either
@pytest.mark.parametrize("ends", features.ENDS)
def test_packed_sequences(chip:str, ends:str) -> None:
  for causal in (False, True): features.test_packed_sequences(chip, ends, causal)

FEATURES = {
  **{f.__name__: f for f in (features.test_causal_rows_that_see_nothing, features.test_lengths_beyond_the_buffer, features.test_causal_is_a_window,
                             features.test_bias_of_minus_infinity, features.test_nan_in_a_masked_bias)},
  "cache beyond lengths": functools.partial(features.test_cache_beyond_lengths, Sq=20),
  "window counts itself": functools.partial(features.test_window_counts_itself, Sq=256),
  "wide, softcap": functools.partial(features.test_option_wide, option="softcap"),
  "wide, bias": functools.partial(features.test_option_wide, option="bias"),
  "scores far below zero": functools.partial(features.test_scores_far_below_zero, option={}),
  "scores far below zero, softcap": functools.partial(features.test_scores_far_below_zero, option=dict(softcap=1e6)),
  "huge scores": functools.partial(features.test_huge_scores, option={}),
}

@pytest.mark.sample(6)
@either
@pytest.mark.parametrize("feature", FEATURES)
def test_feature(chip:str, feature:str) -> None: FEATURES[feature](chip)

@pytest.mark.parametrize("descending", (True, False))
def test_nearest_keys_first(descending:bool, monkeypatch) -> None:
  # The wgmma forward kernel loops over the keys beginning with those nearest to the query. With steep ALiBi slopes, the number that the softmax
  # subtracts from a row's scores then changes only at the first tile. In the other order it changes at every tile.
  if not descending: monkeypatch.setattr(workgroup, "nearest_first", lambda walk: False)
  definition, changes = OPERATIONS["correct"].meaning, list[bool]()
  def counted(lanes, reference, *args, **static):
    before = np.array(lanes.load_register(reference, 0))
    done = definition(lanes, reference, *args, **static)
    changes.append(bool((before != lanes.load_register(reference, 0)).any()))
    return done
  monkeypatch.setitem(OPERATIONS, "correct", replace(OPERATIONS["correct"], meaning=counted))
  tile = WgmmaTile(1, 64)
  check_kernels("sm_90", H=1, Sq=64, Sk=64*6, D=32, causal=True, tile=lambda _: tile, extras=dict(alibi_slopes=np.ones(1, np.float32)))
  assert len(changes) == 6 and sum(changes) == (1 if descending else 6)

@pytest.mark.usefixtures("without_places")
def test_planted_order_of_tiles(monkeypatch) -> None:
  wrong = Descending.mirrored
  monkeypatch.setattr(Descending, "mirrored", lambda order, x: wrong(order, x) + 1)
  with pytest.raises((AssertionError, EmulatorError)):
    check_kernels("sm_90", H=1, Sq=200, Sk=300, D=32, causal=True, tile=lambda _: WgmmaTile(2, 64),
                  extras=dict(alibi_slopes=np.full(1, 0.01, np.float32)))

# ***** faults that the emulator must find *****

def nothing(order:UOp) -> UOp: return nvidia.commit(order)

PLANTED = {
  "a tile is not waited for": (lambda m: m.setattr(hopper, "arrived", lambda bar, t, order, published: nothing(order)), LdsRace, "reads lds"),
  "nobody arrives": (lambda m: m.setattr(hopper, "arrive", lambda barrier, order: nothing(order)), DivergentBarrier, "nobody has arrived"),
  "a ring of two": (lambda m: [m.setattr(of, "STAGES", 2) for of in (wgmma_tiles, wgmma_forward)], LdsRace, "writes lds"),
  "copied over what is being multiplied": (lambda m: m.setattr(wgmma_forward.WgmmaForward, "stage", lambda x, t, of: UOp.const(0)), LdsRace, "lds"),
  "products are not waited for": (lambda m: m.setattr(hopper, "wait_products", lambda acc, order: nothing(order)), NotWaitedFor,
                                  r"the accumulator reg\d+\[0\], which the operation started at attn/kernels/wgmma/forward.py:\d+ still writes"),
  "panels not aligned": (lambda m: m.setattr(WgmmaTile, "lds_bytes", lambda tile, p: 16*9217) or m.setattr(
    SwizzledPanels, "size", property(lambda self: self.panel*ceildiv(self.units, 8) + 1)), Misaligned, "a multiple of 1024"),
}

def of_weigh(monkeypatch, change) -> None:
  # replaces the emulator's numpy function for the operation `weigh`, which computes P of a tile, by `change`
  definition = OPERATIONS["weigh"].meaning
  changed = replace(OPERATIONS["weigh"], meaning=lambda lanes, *args, **static: change(definition, lanes, *args, **static))
  monkeypatch.setitem(OPERATIONS, "weigh", changed)

def never_weighed(definition, lanes, reference, bias, p, scores, part, *rest, **static):
  # faulty operation `weigh`, which computes P of a tile of keys: it computes P for the first tile only
  seen = (lanes.load_register(reference, 0) > LOWEST).any()
  if not seen: return definition(lanes, reference, bias, p, scores, part, *rest, **static)
  return np.zeros(len(lanes.active), np.float32)

WRONG = {
  "units of a row as lanes have them before they exchange": lambda m: m.setattr(nvidia, "transposed", lambda words, in_quad: words),
  "P of the trip before": lambda m: of_weigh(m, never_weighed),
}

@pytest.mark.parametrize("fault", WRONG)
def test_planted_wrong_numbers(fault:str, monkeypatch) -> None:
  WRONG[fault](monkeypatch)
  with pytest.raises(AssertionError): check("sm_90", H=1, Sq=64, Sk=130, D=32)

@pytest.mark.usefixtures("without_places")
def test_the_ring_has_no_more_places_than_tiles(monkeypatch) -> None:
  # The wgmma forward kernel keeps tiles of keys in a ring buffer. If there are only two tiles, the buffer has two places, so the kernel does not copy
  # a third tile of zeros.
  tile = WgmmaTile(1, 48)
  change_kernel(monkeypatch, "forward_wgmma", tile=lambda p, arch: tile)
  assert [tile.stages(problem(Sk=n)) for n in (1, 48, 49, 97, 1000)] == [1, 1, 2, 3, 3]
  check("sm_90", H=1, Sq=70, Sk=90, D=32, causal=True)
  monkeypatch.setattr(wgmma_forward, "STAGES", 2)       # a ring of two places counts as full, and the kernel copies a third tile
  with pytest.raises(LdsRace): check("sm_90", H=1, Sq=70, Sk=90, D=32)

@pytest.mark.parametrize("chip", ("sm_90", GPU))
def test_two_tiles_of_keys(chip:str, monkeypatch) -> None:
  # The kernel is right with two tiles of keys, and the compiler cannot find out in which iteration it copies the second one. ptxas 13.0 derived that
  # from a comparison, and then put rows of the second tile where the first one was still read: on an H100 nearly all rows were wrong.
  tile = WgmmaTile(2, 48)
  change_kernel(monkeypatch, "forward_wgmma", tile=lambda p, arch: tile)
  check(chip, H=4, Sq=90, Sk=90, D=256, causal="top-left")
  p = problem(H=4, Sq=90, Sk=90, D=256, causal="top-left")
  tensors = [UOp.placeholder(shape, DTYPES[dtype], slot) for slot, (shape, dtype) in enumerate(p.shapes.values())]
  assert not re.search(r"\(Lidx\d+<\d+\)", render(forward_of(p, get_chip("sm_90"), tile)(*tensors), "sm_90"))

@pytest.mark.parametrize("rows, idle", ((192, 0), (128, 1), (64, 2), (65, 1)))
def test_warpgroups_without_queries(rows:int, idle:int, monkeypatch) -> None:
  # Warpgroups without queries start no matrix products. The last workgroup has three warpgroups, of which `idle` have no query. Each other warpgroup
  # starts two products in each iteration.
  tile, started = WgmmaTile(3, 64), count_products(monkeypatch)
  check_kernels("sm_90", H=1, Sq=192 + rows, Sk=100, D=32, tile=lambda _: tile)
  assert started == [6 - idle]*4       # two blocks at a time, two iterations

# Tiles that were the fastest on an H200 (docs/nvidia.md).
FASTEST = {
  (64, 16, 16, 256, 256, 64, True): (1, 64), (8, 16, 16, 128, 128, 64, False): (1, 64), (32, 12, 12, 512, 512, 64, False): (2, 64),
  (2, 10, 10, 4096, 77, 64, False): (1, 80), (2, 20, 20, 1024, 77, 64, False): (1, 80), (3, 20, 20, 777, 777, 64, True): (1, 64),
  (8, 32, 4, 2048, 2048, 128, True): (3, 96), (4, 16, 16, 4096, 4096, 128, False): (3, 96), (4, 16, 16, 4096, 4096, 128, True): (3, 96),
  (4, 32, 32, 4096, 4096, 64, False): (3, 128), (1, 32, 32, 1024, 1024, 64, True): (1, 64), (1, 16, 16, 16384, 16384, 64, False): (3, 128),
  (1, 16, 16, 16384, 16384, 64, True): (3, 128),
  (4, 16, 16, 4096, 4096, 96, False): (3, 112), (2, 10, 10, 4096, 77, 128, False): (1, 80), (1, 8, 8, 1024, 1024, 128, False): (1, 128)}

def test_fastest_tiles() -> None:
  for (B, H, Hkv, Sq, Sk, D, causal), tile in FASTEST.items():
    p = problem(B, H, Hkv, Sq, Sk, D, lse=False, causal="top-left" if causal else False)
    assert wgmma_tile(p, get_chip("sm_90")) == WgmmaTile(*tile), p

@pytest.mark.sample(3)
@pytest.mark.parametrize("fault", PLANTED)
def test_planted_fault(fault:str, monkeypatch) -> None:
  plant, error, text = PLANTED[fault]
  plant(monkeypatch)
  with pytest.raises(error, match=text): check("sm_90", H=1, Sq=200, Sk=500, D=64)

WITH_DROPOUT = dict(causal=True, dropout_p=0.1, extras={"dropout_seed": np.zeros(2, np.uint32)})
@pytest.mark.sample(3)
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@in_turn("D, options", (64, 128, 192, 256),
         ({}, dict(causal=True), dict(lse=True, window=(64, 64)), dict(lse=True, causal=True, softcap=30.0), WITH_DROPOUT), among=2, besides=(128,))
def test_no_local_memory(D:int, options:dict, tmp_path) -> None:
  # Compiled by nvcc, the wgmma forward kernel does not spill registers. ptxas also does not report that it makes each wgmma wait for the one before.
  p = problem(H=256, Sq=4096, D=D, **{"lse": False, **options})
  kinds = DTYPES | {"uint32": dtypes.uint}
  tensors = [UOp.placeholder(shape, kinds[dtype], i) for i, (shape, dtype) in enumerate(p.shapes.values())]
  kernel = forward_of(p, arch := get_chip("sm_90"), wgmma_tile(p, arch))
  (source := tmp_path/"kernel.cu").write_text(render(kernel(*tensors), "sm_90"))
  command = ["nvcc", "-gencode=arch=compute_90a,code=sm_90a", "-cubin", "-Xptxas", "-v", "-o", str(tmp_path/"kernel.cubin"), str(source)]
  text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
  assert re.search(r"0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", text) and "serialized" not in text, text
