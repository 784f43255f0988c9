"""Tests of the timing model, which predicts a kernel's time: it steps through the machine code and counts cycles."""
from __future__ import annotations
import csv, json, math, re
from dataclasses import replace
from pathlib import Path
import xml.etree.ElementTree as ElementTree
import pytest
from click.testing import CliRunner
from attn.chips import CHIPS, MODELLED, get_chip
from attn.chips.family import Caches
from attn.isa import source
from attn.isa.__main__ import main
from attn.isa.parse import parse
from attn.isa.timing.addresses import WaveState
from attn.isa.timing.drawing import svg_of
from attn.isa.source import Shape
from attn.isa.timing.kernels import predicted_kernel
from attn.chips.machine import ASSUMED, ORIGINS, figures_of
from attn.isa.timing.memory import GroupWork, starting_order, makespan_in_order, rows_fetched
from attn.isa.timing.predict import (Division, at_both_clocks, blocks_of_grid, bytes_of_levels, fed_by_l2, predict, trips_of_blocks, walked_in_a_trip,
                                     work_of_grid)
from attn.isa.operands import uses
from attn.isa.timing.steps import TripStep, trip_steps, unknown
from attn.isa.timing.trips import timing_of
from attn.isa.timing.waves import Wave, step_waves
from attn.problem import Problem

def instructions(text:str, arch:str):
  return parse(f".amdgcn_target \"amdgcn-amd-amdhsa--{arch}\"\nk:\n{text}\n.type k,@function")[0].instructions

def steps(text:str, arch:str, banks:int|None=None) -> list[TripStep]:
  trip = instructions(text, arch)
  return trip_steps(trip, get_chip(arch), [banks]*len(trip), [False]*len(trip))

def cycles(arch:str, *texts:str, simds:list[int]|None=None, banks:int|None=None, group:bool=False) -> float:
  # Returns the predicted cycles of one loop iteration, when one wave runs each assembly text.
  # `simds` has the SIMD of each wave; by default all waves share one SIMD. Each wave is a workgroup of its own, or with `group` all waves are one
  # workgroup. `banks` is the number of cycles that the LDS banks need for each access; None: the smallest possible number.
  waves = [Wave(0 if group else i, (simds or [0]*len(texts))[i], steps(text, arch, banks)) for i, text in enumerate(texts)]
  return step_waves(waves, CHIPS[arch], 12, 4).cycles

# The tests use instruction sequences whose cycles follow from the model's sources: measurements on an MI308X (pyhip's documents), the cycles of
# AMD's calculator, LLVM's latencies. The expected numbers were computed by hand before the model ran.

MFMA = "v_mfma_f32_16x16x16_bf16 v[{0}:{1}], v[40:41], v[42:43], v[{0}:{1}]\n"
def mfmas(n:int) -> str: return "".join(MFMA.format(4*(i % 4), 4*(i % 4) + 3) for i in range(n))
def adds(n:int, first:int=100) -> str: return "".join(f"v_add_f32_e32 v{first + i % 4}, v90, v91\n" for i in range(n))
EXP, PACKED = "v_exp_f32_e32 v60, v61\n", "v_pk_mul_f32 v[70:71], v[72:73], v[74:75]\n"

# ***** issue: measured on gfx942 *****

@pytest.mark.parametrize("body, measured", [
  (mfmas(1), 16), (mfmas(1) + adds(1), 16), (mfmas(1) + adds(2), 16), (mfmas(1) + adds(3), 16), (mfmas(1) + adds(4), 20),
  (mfmas(1) + EXP, 20), (mfmas(1) + 2*EXP, 36), (mfmas(1) + 3*EXP, 52), (mfmas(1) + PACKED, 28), (mfmas(1) + 2*PACKED, 32), (mfmas(1) + 3*PACKED, 36),
  (EXP + adds(1), 20), (2*EXP, 32), (EXP + PACKED, 20), (adds(4), 16), (PACKED, 4), (mfmas(2) + adds(3) + EXP, 48)])
def test_what_was_measured_on_cdna3(body:str, measured:int) -> None:
  assert cycles("gfx942", body) == measured

def test_two_waves_overlap() -> None:
  # The timing model runs vector instructions of one wave at the same time as matrix instructions of another. 8 MFMAs need 128 cycles and 24 additions
  # 96. Together they need at most 130, because 3 additions fit beside each MFMA.
  assert cycles("gfx942", mfmas(8), adds(24)) <= 130
  assert cycles("gfx942", mfmas(8)) == 128 and cycles("gfx942", adds(24)) == 96

# ***** dependences *****

@pytest.mark.parametrize("arch, body, expected", [
  ("gfx942", 8*"v_add_f32_e32 v1, v1, v2\n", 32), ("gfx1100", 8*"v_add_f32_e32 v1, v1, v2\n", 40), ("gfx1100", adds(8), 8), ("gfx1201", adds(8), 8),
  # A transcendental has LLVM's latency of 10 cycles, and one can issue every 4 cycles.
  ("gfx1100", 2*"v_exp_f32_e32 v1, v1\n", 20), ("gfx1100", 2*EXP, 8),
  # An MFMA can use the previous sum as C at once; any other use must wait 16 cycles after the unit's 32.
  ("gfx942", 2*"v_mfma_f32_32x32x8_f16 v[0:15], v[40:41], v[42:43], v[0:15]\n", 64),
  ("gfx942", "v_mfma_f32_32x32x8_f16 v[0:15], v[40:41], v[42:43], 0\nv_add_f32_e32 v60, v0, v1\n", 52),
  ("gfx950", "v_mfma_f32_32x32x16_f16 v[0:15], v[40:43], v[44:47], 0\nv_add_f32_e32 v60, v0, v1\n", 56),
  ("gfx942", "v_add_f32_e32 v1, v2, v3\ns_nop 3\n", 20), ("gfx1100", "v_add_f32_e32 v1, v2, v3\ns_nop 3\n", 5),
  # WMMA occupies the vector ALU's issue; transcendentals run beside the next WMMA.
  ("gfx1100", "v_wmma_f32_16x16x16_f16 v[0:7], v[8:15], v[16:23], v[0:7]\n" + adds(4), 36),
  ("gfx1100", "v_wmma_f32_16x16x16_f16 v[0:7], v[8:15], v[16:23], v[0:7]\n" + 4*EXP, 45),
  ("gfx1201", "v_wmma_f32_16x16x16_f16 v[0:7], v[8:11], v[16:19], v[0:7]\n" + adds(4), 20)])
def test_dependences(arch:str, body:str, expected:int) -> None:
  assert cycles(arch, body) == expected

@pytest.mark.parametrize("text, writes, reads", [
  ("v_mfma_f32_4x4x4_16b_f16 v[0:3], v[4:5], v[6:7], 0", {"v0", "v1", "v2", "v3"}, {"v4", "v5", "v6", "v7"}),
  ("v_dual_fmac_f32 v0, v1, v2 :: v_dual_mov_b32 v3, v4", {"v0", "v3"}, {"v0", "v1", "v2", "v4"}),
  ("v_dot2c_f32_f16_e32 v1, v2, v3", {"v1"}, {"v1", "v2", "v3"}), ("v_cmp_gt_f32_e32 v1, v2", {"vcc"}, {"v1", "v2"}),
  ("v_cmp_gt_f32_e64 s[0:1], v1, v2", {"s0", "s1"}, {"v1", "v2"}), ("ds_read_b64 v[0:1], v2 offset:8", {"v0", "v1"}, {"v2"}),
  ("ds_write_b64 v2, v[0:1]", set(), {"v0", "v1", "v2"}), ("buffer_store_dword v1, v2, s[0:3], 0 offen", set(), {"v1", "v2", "s0", "s1", "s2", "s3"}),
  ("v_permlane32_swap_b32_e32 v1, v2", {"v1", "v2"}, {"v1", "v2"}), ("v_add_co_u32 v0, vcc, v1, v2", {"v0", "vcc"}, {"v1", "v2"}),
  ("s_and_saveexec_b64 s[2:3], vcc", {"s2", "s3", "scc", "exec"}, {"vcc"}), ("s_cbranch_scc1 .LBB0_1", set(), {"scc"}),
  ("v_cvt_f16_f32_e64 v193.h, v232", {"v193"}, {"v232"})])
def test_uses(text:str, writes:set[str], reads:set[str]) -> None:
  found = uses(instructions(text, "gfx942")[0])
  assert (set(found[0]), set(found[1])) == (writes, reads)

# ***** accesses *****

@pytest.mark.parametrize("body, banks, expected", [
  ("ds_read_b128 v[0:3], v4\ns_waitcnt lgkmcnt(0)\n", None, 68), ("ds_read_b32 v0, v4\ns_waitcnt lgkmcnt(0)\n", None, 56),   # 64 and 52 + 4
  (8*"ds_read_b128 v[0:3], v4\n", None, 128), (8*"ds_read_b32 v0, v4\n", None, 32), (8*"ds_read_b32 v0, v4\n", 64, 512),    # 16, 4; 64 in one bank
  ("buffer_load_dwordx4 v[0:3], v4, s[0:3], 0 offen\ns_waitcnt vmcnt(0)\n", None, 672),     # 650, 16 of transfer, and issue steps
  (8*"buffer_load_dwordx4 v[0:3], v4, s[0:3], 0 offen\n", None, 128)])
def test_accesses_of_a_wave_on_cdna3(body:str, banks:int|None, expected:int) -> None:
  assert cycles("gfx942", body, banks=banks) == expected

def test_a_load_that_is_under_way_long_enough_costs_nothing() -> None:
  early = "ds_read_b128 v[0:3], v4\n" + adds(20) + "s_waitcnt lgkmcnt(0)\n"
  assert cycles("gfx942", early) == 4 + 80 + 4

def test_simds_share_the_ports_of_lds() -> None:
  # LDS has two ports of 64 bytes a cycle in the timing model, and each port serves two SIMDs. So 8 reads of 1 KB keep a port busy for 128 cycles.
  body = 8*"ds_read_b128 v[0:3], v4\n"
  assert cycles("gfx942", body, body, simds=[0, 2]) == 128 and cycles("gfx942", body, body, simds=[0, 1]) == 256
  assert cycles("gfx942", *[body]*4, simds=[0, 1, 2, 3]) == 256 and cycles("gfx950", *[body]*4, simds=[0, 1, 2, 3]) == 128

def test_a_barrier_waits_for_the_last_wave() -> None:
  # A barrier of the timing model ends when the last wave arrives: 50 instructions of 4 cycles end at cycle 200, and 8 more cycles pass until the next
  # instruction.
  assert cycles("gfx942", adds(50) + "s_barrier\n", adds(10) + "s_barrier\n", simds=[0, 1], group=True) == 208
  signal = "s_barrier_signal -1\n"
  wait = "s_barrier_wait -1\n"
  assert cycles("gfx1201", adds(50) + signal + wait, adds(10) + signal + adds(10) + wait, simds=[0, 1], group=True) == 58

def test_priority_decides_who_goes_first() -> None:
  body = "s_setprio {0}\n" + adds(40)
  found = step_waves([Wave(0, 0, steps(body.format(0), "gfx942")), Wave(1, 0, steps(body.format(1), "gfx942"))], CHIPS["gfx942"], 3)
  assert len(found.starts[1]) > len(found.starts[0])

def test_waves_that_wait_for_each_other_are_an_error() -> None:
  with pytest.raises(RuntimeError, match="wait for each other"):
    step_waves([Wave(0, i, steps("s_barrier_wait -1\n", "gfx1201")) for i in range(2)], CHIPS["gfx1201"], 3)

# ***** kernels *****

LOOP = "\n".join(["s_mov_b32 s0, 0", "{before}", ".LBB0_1:", "v_mfma_f32_32x32x8_f16 v[0:15], v[40:41], v[42:43], v[0:15]", "{inside}",
                  "s_add_i32 s0, s0, 1", "s_cmp_lt_i32 s0, 9", "s_cbranch_scc1 .LBB0_1", "s_endpgm"])

def kernel(before:str="s_nop 0", inside:str="s_nop 0", arch:str="gfx942", threads:int=256) -> str:
  body = LOOP.format(before=before, inside=inside)
  return (f".amdgcn_target \"amdgcn-amd-amdhsa--{arch}\"\nk:\n{body}\n.type k,@function\n.amdhsa_kernel k\n.amdhsa_next_free_vgpr 128\n"
          f".amdhsa_accum_offset 128\n.end_amdhsa_kernel\namdhsa.kernels:\n  - .max_flat_workgroup_size: {threads}\n    .symbol: k.kd\n")

@pytest.mark.parametrize("shift, expected", [(2, 0), (3, 2*4 - 2*4 + 4*2), (7, 4*(64 - 2))])
def test_bank_conflicts_from_the_addresses(shift:int, expected:int) -> None:
  # The timing model computes bank conflicts from the addresses of the lanes. Lanes 4 bytes apart share no bank. At 8 bytes apart, two lanes share
  # each bank, and each access takes 2 more cycles. At 128 bytes apart, all lanes share one bank.
  found = timing_of(kernel(f"v_lshlrev_b32_e32 v50, {shift}, v0", "ds_read_b32 v51, v50\ns_waitcnt lgkmcnt(0)"))
  assert found.loops[0].conflicts == expected and found.loops[0].unknown_addresses == 0

def test_an_address_that_is_loaded_is_not_known() -> None:
  found = timing_of(kernel("global_load_dword v50, v0, s[2:3]\ns_waitcnt vmcnt(0)", "ds_read_b32 v51, v50\ns_waitcnt lgkmcnt(0)"))
  assert found.loops[0].unknown_addresses == 1

MINUS_4 = "v_sub_u32_e32 v50, 60, v0\nv_mul_i32_i24_e32 v50, 4, v50\n"      # 240 - 4*lane: negative from lane 61 on
@pytest.mark.parametrize("before, address", [
  (MINUS_4, lambda lane: 240 - 4*lane), (MINUS_4 + "v_max_i32_e32 v51, 0, v50", lambda lane: max(0, 240 - 4*lane)),
  (MINUS_4 + "v_min_i32_e32 v51, 8, v50", lambda lane: min(8, 240 - 4*lane)),
  (MINUS_4 + "v_min_u32_e32 v51, 8, v50", lambda lane: min(8, 240 - 4*lane & 0xffffffff)),
  ("v_mul_i32_i24_e32 v51, 0xffffff, v0", lambda lane: -lane),
  ("v_bfrev_b32_e32 v51, v0", lambda lane: int(f"{lane:032b}"[::-1], 2)),
  ("s_movk_i32 s9, 0x8000\nv_add_u32_e32 v51, s9, v0", lambda lane: lane - 32768),
  ("v_bfe_i32 v51, v0, 0, 1", None), ("v_min_i16_e32 v51, v0, v0", None), ("v_lshlrev_b64 v[51:52], 2, v[0:1]", None)])
def test_addresses_keep_the_sign(before:str, address) -> None:
  # The timing model computes the integer instructions that lead to an address, with the right sign. The result of an instruction that the model
  # cannot compute is unknown, not wrong.
  state = WaveState(CHIPS["gfx942"], 0, False)
  for x in instructions(before, "gfx942"): state.follow(x)
  found = state.values.get("v51" if "v51" in before else "v50")
  assert (found is None) == (address is None)
  if address is not None: assert [int(v) for v in found] == [address(lane) & 0xffffffff for lane in range(64)]

def test_waves_that_are_a_barrier_behind_are_found() -> None:
  found = timing_of(kernel("v_readfirstlane_b32 s9, v0\ns_cmp_lt_i32 s9, 256\ns_cbranch_scc1 .LBB0_9\ns_barrier\n.LBB0_9:", "s_barrier", threads=512))
  assert found.behind == 4 and found.waves == 8
  assert timing_of(kernel("s_barrier", "s_barrier", threads=512)).behind == 0

TWO_LOOPS = "\n".join([
  "s_cmp_lt_i32 s5, 4", "s_cbranch_scc0 .LBB0_2", ".LBB0_1:", "{matrix}", "s_barrier", "{vector}", "s_barrier", "s_cbranch_scc1 .LBB0_1",
  "s_branch .LBB0_3", ".LBB0_2:", "{vector}", "s_barrier", "{matrix}", "s_barrier", "s_cbranch_scc1 .LBB0_2", ".LBB0_3:", "s_endpgm"])

def test_halves_of_a_workgroup_take_loops_of_their_own() -> None:
  # The predicted time of an iteration is right if the two halves of a workgroup run different loops. An iteration has two phases. In each phase, one
  # half executes 8 MFMAs while the other executes 60 additions; then the halves change roles. A SIMD has one wave of each half, and issues one
  # instruction of either kind every 4 cycles. So a phase takes at least (60 + 8)*4 = 272 cycles. A barrier and a branch are added.
  sums = [f"v[{16*(i % 4)}:{16*(i % 4) + 15}]" for i in range(8)]
  matrix = "\n".join(f"v_mfma_f32_32x32x8_f16 {x}, v[80:81], v[82:83], {x}" for x in sums)
  text = kernel(threads=512).replace("next_free_vgpr 128", "next_free_vgpr 256")
  text = text.replace(LOOP.format(before="s_nop 0", inside="s_nop 0"), TWO_LOOPS.format(matrix=matrix, vector=adds(60)))
  loop = timing_of(text).loops[0]
  assert loop.label == ".LBB0_1 and .LBB0_2" and 568 <= loop.cycles <= 620 and loop.matrix_use > 0.8

def test_trips_of_causal_problems() -> None:
  p = Problem(1, 4, 2, 256, 256, 64, 64, window=(-1, 0), softmax_scale=0.125)
  assert trips_of_blocks(p, Division(64, 32)) == [2, 4, 6, 8] and trips_of_blocks(p, Division(64, 32, keys=True)) == [16, 12, 8, 4]

def test_a_problem_takes_its_trips_and_edges() -> None:
  # The timing model predicts the time of a problem whose workgroups fill 304 compute units once: the time of 8 loop iterations and of the
  # instructions before and after the loop, at 2.1 GHz.
  timing, card = timing_of(kernel()), next(c for c in CHIPS["gfx942"].cards if c.name == "MI300X")
  p = Problem(1, 304*timing.groups, 304*timing.groups, 128, 256, 64, 64, softmax_scale=0.125)
  found = predict(p, timing, Division(128, 32), card)
  assert found.compute_seconds*2.1e9 == pytest.approx(8*timing.cycles + timing.edges/timing.groups, abs=2)
  assert predict(p, timing, Division(128, 32), card, 1.05).compute_seconds == pytest.approx(2*found.compute_seconds)

def test_small_workgroups_spread_over_the_simds() -> None:
  # The timing model spreads small workgroups over SIMDs: four workgroups of one wave run on four SIMDs, in the time of one workgroup. A fifth
  # workgroup shares a SIMD with another.
  matrix = "\n".join(f"v_mfma_f32_32x32x8_f16 v[{16*i}:{16*i + 15}], v[80:81], v[82:83], v[{16*i}:{16*i + 15}]" for i in range(4))
  text = kernel(threads=64).replace("v_mfma_f32_32x32x8_f16 v[0:15], v[40:41], v[42:43], v[0:15]", matrix)
  one, four, five = (timing_of(text, grid=n*CHIPS["gfx942"].cus) for n in (1, 4, 5))
  assert [x.groups for x in (one, four, five)] == [1, 4, 5]
  assert four.cycles == pytest.approx(one.cycles, abs=8) and five.cycles > 1.1*one.cycles

@pytest.mark.parametrize("division, own, read", [
  (Division(64, 32), 4, 4*(2 + 4 + 6 + 8)*32 + 4*256),          # for each of 4 heads: blocks of 2 to 8 iterations of 32 rows of K and V, and Q with O
  (Division(128, 32), 4, 4*(4 + 8)*32 + 4*256),                 # twice the queries in a workgroup: half as many blocks read K and V
  (Division(64, 32, keys=True, products=((2, 2),)), 2, 2*(16 + 12 + 8 + 4)*32 + 2*256),
  (Division(64, 32, keys=True, products=((1, 1), (2, 1))), 2, 2*2*(16 + 12 + 8 + 4)*32 + 2*256)])
def test_what_workgroups_read_goes_through_l2(division:Division, own:int, read:int) -> None:
  # The timing model computes the time that L2 needs for the rows that workgroups read. With D=64 in fp16, a row of K and of V together has 256 bytes;
  # L2 delivers 16384 bytes a cycle at 2.1 GHz.
  p, timing, card = Problem(1, 4, 2, 256, 256, 64, 64, window=(-1, 0), softmax_scale=0.125), timing_of(kernel()), CHIPS["gfx942"].cards[0]
  found = predict(p, timing, division, card)
  assert found.times["L2"] == pytest.approx(read*256/(16384*2.1e9)) and found.limit == "compute"
  slow = predict(p, timing, division, replace(card, l2=1))
  assert slow.limit == "L2" and slow.seconds == pytest.approx(16384*found.times["L2"]) and slow.tflops < found.tflops

def test_workgroups_start_in_the_order_of_the_grid() -> None:
  # The timing model starts workgroups in the order of the kernel's grid. Here four heads, two of which share their keys, run in groups of two heads.
  # The blocks of the first group start before those of the second, and in each group the longest block is first. With two key ranges each block is
  # two workgroups, which read different rows.
  assert starting_order([1, 2], 4, 2, 2) == [GroupWork(rows, trips) for rows in (0, 1) for trips in (2, 2, 1, 1)]
  assert [x.rows for x in starting_order([2], 4, 1, 4)] == [0, 1, 2, 3] and starting_order([4], 1, 1, 1, 2) == [GroupWork(0, 2), GroupWork(1, 2)]

def test_a_place_that_is_free_takes_the_next_workgroup() -> None:
  # The timing model gives the next workgroup to the place that is free first. Of workgroups with 4, 1, 1 and 3 iterations, one place takes the first
  # (4 iterations), and the other place the remaining ones (1 + 1 + 3). If each place is on a die of its own, workgroups go to the dies in turn: one
  # die takes 4 and 1, the other one 1 and 3.
  work = [GroupWork(0, n) for n in (4, 1, 1, 3)]
  assert makespan_in_order(work, 2, 1, 10, 0) == 50 and makespan_in_order(work, 2, 1, 10, 1) == 53 and makespan_in_order(work, 2, 2, 10, 0) == 50
  assert makespan_in_order(work[::-1], 2, 1, 10, 0) == 60 and makespan_in_order(work, 4, 1, 10, 0) == 40

@pytest.mark.parametrize("order, slots, room, fetched", [
  ("aabb", 2, 0, 8),      # two rounds of one set of rows each
  ("abab", 2, 0, 16),     # two rounds of both sets
  ("abab", 2, 7, 16), ("abab", 2, 8, 8),      # the second round finds both sets in the cache if 2 x 4 iterations fit
  ("abab", 4, 0, 8), ("aaaa", 1, 0, 16), ("aaaa", 1, 4, 4)])
def test_rows_that_workgroups_share_are_fetched_once(order:str, slots:int, room:float, fetched:float) -> None:
  assert rows_fetched([GroupWork("ab".index(x), 4) for x in order], slots, room) == fetched

@pytest.mark.parametrize("order, slots, room, fetched", [
  ("abab", 2, 0, 16), ("aabb", 2, 0, 16),     # nothing is shared without room
  ("aabb", 2, 4, 8), ("abab", 4, 7, 16), ("abab", 4, 8, 8)])      # room for one set of rows, for less than both, for both
def test_workgroups_that_drift_apart_share_what_the_cache_holds(order:str, slots:int, room:float, fetched:float) -> None:
  assert rows_fetched([GroupWork("ab".index(x), 4) for x in order], slots, room, apart=True) == fetched

def test_workgroups_that_drift_apart_take_longer() -> None:
  # Workgroups that drift apart are predicted to take longer if L2 is small: they fetch rows again and again. With room for all rows of a round, the
  # two predicted times are equal.
  p, timing, card = Problem(1, 4, 4, 4096, 4096, 64, 64, softmax_scale=0.125), timing_of(kernel(arch="gfx90a")), CHIPS["gfx90a"].cards[0]
  for l2, equal in ((1 << 16, False), (1 << 30, True)):
    found = predict(p, replace(timing, chip=replace(timing.chip, caches=Caches(1, l2))), Division(128, 32), replace(card, gbs=1))
    assert (found.seconds_apart == found.seconds) == equal and found.seconds_apart >= found.seconds
    assert found.bytes_apart["memory"] == (found.bytes["memory"] if equal else found.bytes["memory"] + 4*31*4096*2*64*2)

def test_the_order_of_heads_decides_what_memory_delivers() -> None:
  # The timing model counts how often K and V of a head are fetched from memory. On a chip with one die and two places for workgroups, the two blocks
  # of a head should start together: each head is then fetched once. If heads alternate, the blocks of a head run in two rounds, and each head is
  # fetched twice. On a chip with 8 dies it is better if 8 heads alternate: each head then stays on one die. Otherwise all dies fetch every head.
  chip = replace(CHIPS["gfx1201"], caches=Caches(1, 1, 1, 1e3))
  p, x = Problem(1, 4, 4, 128, 256, 64, 64, softmax_scale=0.125), Division(64, 32)
  rows = 4*256*256
  alternating, in_turn = (bytes_of_levels(p, y, work_of_grid(p, y), chip, 2) for y in (x, replace(x, together=1)))
  moved = math.prod((4, 128, 64))*2*2 + rows
  assert in_turn["memory"] == moved and alternating["memory"] == moved + rows
  assert alternating["Infinity Cache"] - in_turn["Infinity Cache"] == rows
  assert alternating["L2"] == in_turn["L2"] == 2*rows + 4*128*256
  p = replace(p, H=8, Hkv=8, Sq=512)
  dies = [bytes_of_levels(p, y, work_of_grid(p, y), CHIPS["gfx942"], 64)["Infinity Cache"] for y in (x, replace(x, together=1))]
  assert dies[1] - dies[0] == 7*8*256*256

def test_published_gemms_are_those_of_the_cards() -> None:
  # docs/data/timing_gemms.csv has a row for every GPU of which attn knows a GEMM that AMD published: its TFLOP/s, the sustained clock that follows
  # from them, and a source.
  rows = {row["card"]: row for row in csv.DictReader((Path(__file__).parents[2]/"docs"/"data"/"timing_gemms.csv").open())}
  cards = {card.name: (chip, card) for chip in CHIPS.values() for card in chip.cards if card.gemm}
  assert rows.keys() == cards.keys() and all(row["source"] for row in rows.values())
  for name, (chip, card) in cards.items():
    assert (rows[name]["TFLOP/s"], rows[name]["GHz sustained"]) == (f"{card.gemm:g}", f"{chip.sustained(card):.2f}"), name

def test_both_clocks() -> None:
  # `Chip.sustained` is the clock that a GPU sustains in the GEMM that AMD published: within 1% of the clock that AMD measured, at most the rated
  # clock, and None without a published GEMM. The GEMM reaches 94% of the peak at that clock. A time predicted at the sustained clock is longer by the
  # ratio of the two clocks.
  clocks = {card.name: (chip.sustained(card), card) for chip in CHIPS.values() for card in chip.cards if chip.unit.pipes}
  assert clocks["MI300X"][0] == pytest.approx(1.207, rel=0.01) and clocks["MI325X"][0] == pytest.approx(1.447, rel=0.01)
  assert all((clock > 0) == (card.gemm > 0) and clock <= card.ghz for clock, card in clocks.values())
  timing, (clock, card) = timing_of(kernel()), clocks["MI300X"]
  assert 0.94*CHIPS["gfx942"].peak(replace(card, ghz=clock)) == pytest.approx(card.gemm)
  p = Problem(4, 16, 16, 4096, 4096, 64, 64, softmax_scale=0.125)
  rated, sustained = at_both_clocks(p, timing, Division(128, 32), card)
  assert sustained is not None and rated.compute_seconds*2.1 == pytest.approx(sustained.compute_seconds*clock)
  assert at_both_clocks(p, timing, Division(128, 32), replace(card, gemm=0))[1] is None

def test_a_tile_of_few_queries_is_not_fed_by_l2() -> None:
  # The timing model computes which share of the matrix units' peak rate is possible at the speed of L2. While gfx950 reads 64 bytes from L2, it can
  # execute 4096 operations. A row of K and one of V have 4*D bytes together, and cause 4*D operations for each query of a workgroup. So with 64
  # queries the share is 1, and with 16 queries 1/4. If a kernel loops over the rows twice, it reads them twice, and the share is half as large.
  text = kernel(arch="gfx950").replace("v_mfma_f32_32x32x8_f16 v[0:15], v[40:41], v[42:43]", "v_mfma_f32_32x32x16_f16 v[0:15], v[40:43], v[44:47]")
  timing = timing_of(text, d=16, dv=16)         # one MFMA is half of the work on 32 x 32 scores: 512 for a wave
  assert walked_in_a_trip(timing, 64) == 4*512/64
  for own, share in ((64, 1.0), (16, 0.25)):
    assert fed_by_l2(timing, Division(own, walked_in_a_trip(timing, own)), 2*16*2) == pytest.approx(share)
  assert fed_by_l2(timing, Division(64, 32, products=((1, 1), (1, 1))), 2*16*2) == pytest.approx(0.5)

def test_memory_moves_every_tensor_once() -> None:
  # The timing model counts each tensor once between memory and chip. Forward moves O and Q of 4 heads and K and V of 2 heads, 256 rows of 128 bytes
  # each. With 2 key ranges it writes partial O and lse in fp32 instead of O. The kernel of dq moves dq, q, o and do of 4 heads, k and v of 2 heads,
  # and two numbers of 4 bytes for each of 4 x 256 queries.
  p, timing, card = Problem(1, 4, 2, 256, 256, 64, 64, softmax_scale=0.125), timing_of(kernel()), CHIPS["gfx942"].cards[0]
  def moved(p:Problem, x:Division) -> float: return predict(p, timing, x, card).bytes["memory"]
  row = 256*128
  assert moved(p, Division(64, 32)) == pytest.approx(12*row)
  assert moved(replace(p, num_splits=2), Division(64, 32, splits=2)) == pytest.approx(8*row + 2*4*256*4*(64 + 1))
  assert moved(p, Division(64, 32, products=((2, 1),))) == pytest.approx(20*row + 2*4*256*4)

def test_key_ranges_and_packed_heads_divide_a_problem() -> None:
  # The timing model counts the workgroups of a problem with one query for each of 16 heads. A workgroup computes the 8 heads that use the same
  # key/value head. The 1024 keys take 32 iterations of 32 keys, divided into 4 key ranges. So there are 2*4 = 8 workgroups of 8 iterations each.
  p = Problem(1, 16, 2, 1, 1024, 64, 64, softmax_scale=0.125, num_splits=4)
  x = Division(32, 32, heads=8, splits=4)
  assert trips_of_blocks(p, x) == [32] and blocks_of_grid(p, 32, heads=8) == 8
  timing, card = timing_of(kernel()), CHIPS["gfx942"].cards[0]
  found = predict(p, timing, x, card)
  assert found.trips == 8 and found.compute_seconds*2.1e9 == pytest.approx(8*timing.cycles + timing.edges/timing.groups, abs=2)

# ***** data and errors *****

def test_each_figure_has_a_source() -> None:
  for machine in (CHIPS[name].latencies for name in MODELLED):
    assert all(figure.origin in (*ORIGINS, ASSUMED) for figure in figures_of(machine).values())
  assert all((chip.unit.pipes is None) == (chip.unit.machine is None) == (chip.unit.counters is None) for chip in CHIPS.values())

def test_an_instruction_that_is_not_known_is_named() -> None:
  text = "x_strange_thing v0, v1\nv_mfma_f32_8x8x99_f16 v[0:3], v[4:5], v[6:7], 0\nv_add_f32 v0, v1, v2"
  found = list(unknown(instructions(text, "gfx942"), CHIPS["gfx942"]))
  assert len(found) == 2 and "x_strange_thing (1): not known" in found[0] and "8x8x99" in found[1] and "peak rate" in found[1]

@pytest.mark.parametrize("text, words", [
  ("v_add_f32 v0, v1, v2\ns_endpgm", "no loop with matrix instructions"),
  (LOOP.format(before="s_nop 0", inside="s_nop 0"), "how many threads")])
def test_errors(text:str, words:str) -> None:
  with pytest.raises(ValueError, match=words): timing_of(f".amdgcn_target \"amdgcn-amd-amdhsa--gfx942\"\nk:\n{text}\n.type k,@function")

def test_the_command(tmp_path) -> None:
  path, drawn = tmp_path/"k.s", tmp_path/"k.svg"
  path.write_text(kernel(inside=adds(8)))
  options = ["--d", "64", "--queries", "32", "--svg", str(drawn), "--card", "MI300X", "--ghz", "1.5", "--json"]
  done = CliRunner().invoke(main, ["time", str(path), *options])
  assert done.exit_code == 0, done.output
  found = json.loads(done.output)
  assert found["waves"] == 4 and found["problems"][0]["ghz"] == 1.5 and found["loops"][0]["stalls"]
  root = ElementTree.parse(drawn).getroot()
  assert sum("SIMD" in (x.text or "") for x in root.iter()) >= 4
  assert "behind=9: a workgroup of" in str(CliRunner().invoke(main, ["time", str(path), "--behind", "9"]).exception)
  assert "-3 is not in the range" in CliRunner().invoke(main, ["time", str(path), "--behind", "-3"]).output
  assert "cards of gfx942 are MI300X" in str(CliRunner().invoke(main, ["time", str(path), "--card", "RX 580"]).exception)

def test_a_kernel_of_ours_with_its_lines() -> None:
  # The timing model predicts attn's forward kernel for gfx942 with D = 64 and a causal mask. For waits in the hot loop it knows the line of Python in
  # attn/kernels that emitted the waiting instruction. The picture of an iteration of this loop has a band for each wave.
  found = predicted_kernel(source.Spec.parse("gfx942/64/float16/causal"), Shape(1, 8, 8, 2048))
  loop = found.timing.loops[0]
  assert 0.2 < loop.matrix_use < 1 and loop.unknown_addresses == 0 and not found.timing.unknown
  lines = {x.step.instruction.line for x in loop.stalls}
  assert any(line in found.lines and re.match(r"attn/kernels/", found.lines[line][0]) for line in lines)
  assert svg_of(found.timing, loop, 1).count("SIMD ") == found.timing.waves
  assert all(x.tflops < CHIPS["gfx942"].peak(x.card) for x in found.on_cards())

def test_the_kernel_of_decode() -> None:
  # The timing model predicts decoding: keys are split into ranges, and a workgroup computes all query heads of a key/value head. Memory is the limit
  # on every GPU. The command line refuses --decode together with --gradient.
  found = predicted_kernel(source.Spec.parse("gfx950/64/float16/full/decode"), Shape(8, 32, 8, 16384), lines=False)
  p, x = found.problem, found.division
  assert p is not None and x is not None and (p.Sq, p.Sk, x.heads) == (1, 16384, 4) and x.splits == p.num_splits > 1
  assert "16384" in found.title and f"{x.splits} key ranges" in found.title
  assert all(y.limit == "memory" for y in found.on_cards())
  done = CliRunner().invoke(main, ["--arch", "gfx950", "--d", "64", "--decode", "--gradient", "dq"])
  assert done.exit_code and "one of them" in done.output

def test_lines_of_python_are_kept(tmp_path, monkeypatch) -> None:
  # A cache on disk keeps a kernel's source and its lines of Python, so that a second call does not compute them again. Entries that other versions of
  # attn's files wrote are not used.
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  spec, made = source.Spec.parse("gfx942/64/float16/full"), []
  monkeypatch.setattr(source.Listing, "of", lambda make, printer, of=source.Listing.of: made.append(1) or of(make, printer))
  first, second = (source.kernel_source(spec, lines=True) for _ in range(2))
  assert len(made) == 1 and first == second and first.text == source.kernel_source(spec).text and first.python
  monkeypatch.setattr(source, "_made_by", lambda: "other files")
  assert source.kernel_source(spec, lines=True) == first and len(made) == 2
