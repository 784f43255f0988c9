"""Tests of the lower bound of a kernel's time that follows from the problem, the tile and the chip."""
import itertools
import pytest
from attn.chips import MODELLED
from attn.chips.cdna3 import CDNA3
from attn.isa.report import Report, analyse
from attn.isa.roofline import PUBLISHED, RATED, makespan, published, rated, roofline, trips
from attn.isa.table import bounds
from attn.kernels.tiles.amd import Tile
from attn.problem import Problem

TILE = Tile(4, 1, 64, matrix=CDNA3.matrix["float16"][0])   # 128 queries x 64 keys
def problem(B=1, H=64, S=8192, D=128, window=(-1, -1), **kw) -> Problem:
  return Problem(**{**dict(B=B, H=H, Hkv=H, Sq=S, Sk=S, D=D, Dv=D, window=window, softmax_scale=1.0), **kw})

def peak_of(card:str) -> float:
  chip, row = RATED[card]
  return chip.peak(row)

@pytest.mark.parametrize("card, peak", [("MI300X", 1307), ("MI325X", 1307), ("MI355X", 2517), ("MI350X", 2307), ("RX 7900 XTX", 123),
                                        ("RX 9070 XT", 195), ("RX 7800 XT", 75), ("Ryzen AI Max (Strix Halo)", 59), ("RX 9060 XT", 103)])
def test_peaks_are_those_of_the_data_sheets(card, peak): assert round(peak_of(card)) == peak

def test_every_chip_has_a_model_and_every_arch_a_chip():
  assert {chip.name for chip, _ in RATED.values()} == set(MODELLED)
  assert [card.name for _, card in rated("gfx950:xnack-")] == ["MI350X", "MI355X"]

def test_a_large_full_problem_reaches_the_peak_times_the_utilisation():
  bound = roofline(problem(B=304), TILE, *RATED["MI300X"])
  assert bound.tflops == pytest.approx(peak_of("MI300X")) and bound.balance == bound.useful == 1 and bound.limit == "compute"
  assert roofline(problem(B=304), TILE, *RATED["MI300X"], 0.5).tflops == pytest.approx(bound.tflops/2)

def test_the_tail_of_the_grid():
  # A bound of the time counts whole rounds of workgroups: 305 equal workgroups on 304 compute units take two rounds.
  bound = roofline(problem(H=305, S=128), TILE, *RATED["MI300X"])
  assert bound.balance == pytest.approx(305/608)

def test_a_workgroup_of_one_wave_has_room_for_three_others():
  tile = Tile(1, 1, 64, matrix=CDNA3.matrix["float16"][0])
  assert roofline(problem(H=304, S=32), tile, *RATED["MI300X"]).balance == pytest.approx(0.25)
  assert roofline(problem(H=1216, S=32), tile, *RATED["MI300X"]).balance == 1

def test_padding_and_masked_tiles_are_work_that_does_not_count():
  assert roofline(problem(H=304, D=96), TILE, *RATED["MI300X"]).useful == 1
  assert roofline(problem(H=304, D=80), TILE, *RATED["MI300X"]).useful == pytest.approx(160/(80 + 96))   # V is padded to 3 x 32 columns
  causal = roofline(problem(H=304, S=128, window=(-1, 0)), TILE, *RATED["MI300X"])
  assert causal.useful == pytest.approx(128*129/2/(128*128))

def test_memory_bounds_a_problem_of_few_queries():
  chip, card = RATED["MI300X"]
  bound = roofline(problem(B=64, Sq=1, Sk=65536), TILE, chip, card)
  assert bound.limit == "memory"
  assert bound.tflops == pytest.approx(card.gbs/1000, rel=0.01)   # 4 D operations and 4 D bytes of K and V for each query and key

def test_trips_of_masks():
  assert trips(problem(S=512), TILE) == [8]*4
  assert trips(problem(S=512, window=(-1, 0)), TILE) == [2, 4, 6, 8]
  assert trips(problem(Sq=128, Sk=512, window=(-1, 0), offset=384), TILE) == [8]
  assert trips(problem(Sq=128, Sk=512, window=(-1, 0), offset=0), TILE) == [2]
  assert trips(problem(S=512, window=(64, 0)), TILE) == [2, 3, 3, 3]
  assert trips(problem(Sq=128, Sk=64, window=(-1, 0), offset=-64), TILE) == [1]

def test_the_makespan_is_never_above_the_best_schedule():
  for sizes in ([3, 3, 2, 2, 2], [5, 4, 3, 3, 3], [7, 1, 1], [4, 4, 4], [1]):
    for machines in (1, 2, 3):
      schedules = itertools.product(range(machines), repeat=len(sizes))
      best = min(max(sum(s for s, m in zip(sizes, where, strict=True) if m == i) for i in range(machines)) for where in schedules)
      assert makespan(sizes, 1, machines) <= best
  assert makespan([4, 4, 4], 1, 2) == 8 and makespan([5], 7, 3) == 15 and makespan([0, 0], 4, 3) == 0

def test_published_figures_are_found_for_their_shape_only():
  asked = problem(window=(-1, 0))
  assert [(x.kernel, x.tflops) for x in published(asked, "MI325X")] == [("AITER assembly", 639), ("Composable Kernel", 420), ("FlyDSL", 391)]
  assert published(problem(), "MI325X") == [] and published(asked, "MI300X") == []
  assert published(problem(B=16, window=(-1, 0), dtype="bfloat16"), "MI355X")[0].tflops == 1185
  assert published(problem(B=16, Hkv=8, window=(-1, 0), dtype="bfloat16"), "MI355X")[0].tflops == 1237

def test_no_measurement_is_above_its_chips_peak():
  for x in PUBLISHED: assert x.tflops < peak_of(x.card), x

def test_the_table_says_that_it_is_a_bound():
  text = ".type k,@function\nk:\n.LBB0_1:\n" + "v_mfma_f32_32x32x8_f16 v[0:15], v[0:1], v[2:3], v[0:15]\n"*4 + "s_cbranch_scc0 .LBB0_1\ns_endpgm\n"
  report: Report = analyse(text, "gfx942", 128)
  table = bounds(problem(window=(-1, 0)), TILE, report)
  assert table.title == "bound, not measured" and list(table.columns[0].cells) == ["MI300X", "MI325X"]
  assert "AITER assembly 639" in list(table.columns[-1].cells)[1]
