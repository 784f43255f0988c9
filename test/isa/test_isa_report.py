"""Tests of attn.isa's reports on machine code: classes of instructions, branches and loops, the path that a loop usually takes, counts and bounds,
and the command line."""
import json
from dataclasses import replace
import pytest
from click.testing import CliRunner
from attn.chips import CHIPS, MODELLED, SEARCHED
from attn.isa import costs, sass, source
from attn.isa.__main__ import main
from attn.compilers.clang import assemble, assembly
from attn.isa.costs import defects
from attn.compilers.disassemble import disassemble, elf_chip
from attn.isa.flow import blocks_of, loops_of, matrix_loops, usual_path
from attn.isa.instruction import Instruction, access_bytes, kind_of, matrix_shape
from attn.isa.parse import parse
from attn.isa.report import analyse, waves_by_lds, waves_by_registers
from attn.isa.timing import costs_file
from attn.isa.waits import raised_by, waited_for, waits_of
from attn.tinygrad_compat import CompileError
from isa_sample import KEYS, UNITS, sample

# ***** instructions *****

@pytest.mark.parametrize("text, kind", [
  ("v_mfma_f32_32x32x8_f16 v[0:15], v[0:1], v[2:3], v[0:15]", "matrix"),
  ("v_wmma_f32_16x16x16_f16 v[0:7], v[0:7], v[8:15], v[0:7]", "matrix"),
  ("v_exp_f32_e32 v0, v1", "exp"),
  ("v_s_exp_f32 s0, s1", "exp"),
  ("v_rcp_f32_e32 v0, v1", "transcendental"),
  ("v_log_f32_e32 v0, v1", "transcendental"),
  ("v_pk_mul_f32 v[0:1], v[0:1], v[2:3]", "packed"),
  ("v_dual_mul_f32 v0, v1, v2 :: v_dual_add_f32 v3, v4, v5", "dual"),
  ("v_add_f32_e32 v0, v1, v2", "valu"),
  ("v_max3_f32 v0, v1, v2, v3", "valu"),
  ("v_accvgpr_read_b32 v0, a0", "acc_move"),
  ("v_permlane32_swap_b32_e32 v0, v1", "lane"),
  ("v_readfirstlane_b32 s0, v0", "lane"),
  ("ds_bpermute_b32 v0, v1, v2", "lds_permute"),
  ("ds_read_b128 v[0:3], v4", "lds_read"),
  ("ds_load_b128 v[0:3], v4", "lds_read"),
  ("ds_read_b64_tr_b16 v[0:1], v4", "lds_read"),
  ("ds_write_b64 v0, v[1:2]", "lds_write"),
  ("ds_store_b128 v0, v[1:4]", "lds_write"),
  ("global_load_dwordx4 v[0:3], v[0:1], off", "load"),
  ("buffer_load_dwordx4 v0, s[0:3], 0 offen lds", "load_to_lds"),
  ("global_load_lds_dwordx4 v[0:1], off", "load_to_lds"),
  ("buffer_load_b128 v[0:3], v4, s[0:3], 0 offen", "load"),
  ("global_store_b128 v[0:1], v[2:5], off", "store"),
  ("scratch_load_b32 v0, off, s0", "scratch"),
  ("buffer_store_dword v44, off, s[52:55], 0 offset:4", "scratch"),
  ("buffer_load_dwordx4 v[0:3], v4, s[0:3], 0 offen", "load"),
  ("buffer_load_dword off, s[0:3], s4 lds", "load_to_lds"),
  ("buffer_inv sc1", "memory_other"),
  ("s_waitcnt lgkmcnt(0)", "wait"),
  ("s_wait_dscnt 0x0", "wait"),
  ("s_wait_alu 0xfffe", "wait"),
  ("s_barrier", "barrier"),
  ("s_barrier_signal -1", "barrier"),
  ("s_cbranch_scc1 .LBB0_1", "branch"),
  ("s_endpgm", "branch"),
  ("s_setprio 1", "hint"),
  ("s_sched_barrier 0", "hint"),
  ("s_nop 0", "nop"),
  ("s_delay_alu instid0(VALU_DEP_1)", "nop"),
  ("s_load_dwordx4 s[0:3], s[0:1], 0x0", "scalar_load"),
  ("s_add_i32 s0, s0, 1", "salu")])
def test_kinds(text, kind):
  op, _, args = text.partition(" ")
  assert kind_of(op, args) == kind

@pytest.mark.parametrize("op, size", [("ds_read_b128", 16),
                                      ("ds_read2_b64", 16),
                                      ("ds_load_2addr_b32", 8),
                                      ("ds_read2st64_b32", 8),
                                      ("ds_read_u16", 2),
                                      ("ds_read_u16_d16_hi", 2),
                                      ("ds_write_b16", 2),
                                      ("ds_write_b8", 1),
                                      ("global_load_dwordx4", 16),
                                      ("global_load_dword", 4),
                                      ("buffer_load_b96", 12),
                                      ("global_load_ushort", 2),
                                      ("ds_read_b64_tr_b16", 8)])
def test_bytes_of_an_access(op, size): assert access_bytes(op) == size

@pytest.mark.parametrize("op, shape, flops", [("v_mfma_f32_32x32x8_f16", "32x32x8", 16384),
                                              ("v_mfma_f32_16x16x32_bf16", "16x16x32", 16384),
                                              ("v_mfma_f32_32x32x4_2b_f16", "32x32x4_2b", 16384),
                                              ("v_wmma_f32_16x16x16_f16", "16x16x16", 8192)])
def test_shape_of_a_matrix_instruction(op, shape, flops): assert matrix_shape(op) == (shape, flops)

@pytest.mark.parametrize("arch", MODELLED)
def test_the_cycles_of_a_shape_are_the_chips_peak_or_its_half(arch):
  # The published cycles of each matrix instruction agree with the published peak rate of its chip. The rate that follows from the cycles is the peak,
  # or a half, a quarter or twice of it; for most FP8 instructions it must be twice the peak.
  cu = CHIPS[arch].pipes
  for shape, cycles in cu.matrix.items():
    if shape == "4x4x4_16b": continue      # adds numbers of single lanes and counts as no matrix operations
    rate = matrix_shape(f"_{shape}_")[1]/cycles*cu.simds/cu.flops
    fp8 = shape in ("32x32x64", "16x16x128") or (shape.endswith("_fp8") and arch != "gfx950")
    assert rate == pytest.approx(2 if fp8 else rate) and rate in (0.25, 0.5, 1, 2), (shape, rate)

# ***** graph *****

def block_names(text:str):
  kernel = parse(f".amdgcn_target \"amdgcn-amd-amdhsa--gfx942\"\nk:\n{text}\n.type k,@function")[0]
  return blocks_of(kernel.code)

MFMA = "v_mfma_f32_32x32x8_f16 v[0:15], v[0:1], v[2:3], v[0:15]\n"
EXP = "v_exp_f32_e32 v0, v1\n"
FLOPS_PER_EXP = 4*64*64   # D=64, 64 lanes: one v_exp for each 32x32x8

def test_a_loop_is_found_and_a_branch_out_of_it_is_not():
  blocks = block_names("s_mov_b32 s0, 0\n"
                       f".LBB0_1:\n{MFMA}s_cbranch_scc1 .LBB0_3\ns_add_i32 s0, s0, 1\ns_cbranch_scc0 .LBB0_1\n"
                       ".LBB0_3:\ns_endpgm")
  loop, = loops_of(blocks)
  assert [blocks[i].labels for i in sorted(loop.body)] == [[".LBB0_1"], []] and blocks[loop.header].labels == [".LBB0_1"]

def test_of_nested_loops_the_inner_one_with_matrices_counts():
  blocks = block_names(f".LBB0_1:\n.LBB0_2:\n{MFMA}s_cbranch_scc0 .LBB0_2\ns_cbranch_scc0 .LBB0_1\ns_endpgm")
  # two back edges to one header make one loop
  assert [blocks[x.header].labels for x in matrix_loops(blocks)] == [["k", ".LBB0_1", ".LBB0_2"]]
  blocks = block_names(f".LBB0_1:\ns_nop 0\n.LBB0_2:\n{MFMA}s_cbranch_scc0 .LBB0_2\n.LBB0_3:\ns_nop 0\n"
                       "s_cbranch_scc0 .LBB0_3\ns_cbranch_scc0 .LBB0_1\ns_endpgm")
  assert len(loops_of(blocks)) == 3 and [blocks[x.header].labels for x in matrix_loops(blocks)] == [[".LBB0_2"]]

def test_of_equal_loops_the_shorter_one_counts():
  # If two loops of a kernel have the same matrix operations, the report on its machine code describes the shorter loop: the one without a mask.
  blocks = block_names(f".LBB0_1:\nv_cndmask_b32 v0, v1, v2, vcc\n{MFMA}s_cbranch_scc0 .LBB0_1\n"
                       f".LBB0_2:\n{MFMA}s_cbranch_scc0 .LBB0_2\ns_endpgm")
  assert blocks[matrix_loops(blocks)[0].header].labels == [".LBB0_2"]

def path_of(text:str) -> list[str]:
  blocks = block_names(text)
  return [x.op for b in usual_path(blocks, matrix_loops(blocks)[0], FLOPS_PER_EXP) for x in blocks[b].instructions]

def test_a_rare_side_block_is_left_out():
  path = path_of(f".LBB0_1:\n{MFMA*4}s_cbranch_vccz .LBB0_2\n{EXP}v_mul_f32 v2, v2, v0\n"
                 f".LBB0_2:\n{EXP*4}s_cbranch_scc0 .LBB0_1\ns_endpgm")
  assert path.count("v_exp_f32_e32") == 4 and "v_mul_f32" not in path

def test_a_block_with_the_exponentials_is_not_left_out():
  # The report on machine code counts the instructions of the usual path through a loop. This path contains the basic block with the exponentials,
  # although an s_cbranch_execz can skip the block.
  path = path_of(f".LBB0_1:\n{MFMA*4}s_cbranch_execz .LBB0_2\n{EXP*4}v_mul_f32 v2, v2, v0\n"
                 ".LBB0_2:\ns_cbranch_scc0 .LBB0_1\ns_endpgm")
  assert "v_exp_f32_e32" in path and "v_mul_f32" in path

def test_a_block_with_matrix_work_is_not_left_out():
  path = path_of(f".LBB0_1:\n{MFMA*4}{EXP}s_cbranch_vccz .LBB0_2\n{MFMA*4}\n.LBB0_2:\ns_cbranch_scc0 .LBB0_1\ns_endpgm")
  assert path.count("v_mfma_f32_32x32x8_f16") == 8

def test_of_two_ways_with_the_same_work_the_cheaper_is_taken():
  # The report on machine code counts the instructions of the usual path through a loop. Of two branches with the same matrix operations, this path
  # takes the cheaper: the one without a mask.
  path = path_of(f".LBB0_1:\ns_cbranch_vccz .LBB0_2\n{MFMA*4}{EXP*4}v_cndmask_b32 v0, v1, v2, vcc\ns_branch .LBB0_3\n"
                 f".LBB0_2:\n{MFMA*4}{EXP*4}\n"
                 ".LBB0_3:\ns_cbranch_scc0 .LBB0_1\ns_endpgm")
  assert "v_cndmask_b32" not in path and path.count("v_mfma_f32_32x32x8_f16") == 4

# ***** waits *****

def _counted(report):
  # Returns (kind, pending accesses) for each wait for memory and each barrier in a report.
  # other waits differ between the assembly text and the code object
  return [(x.what.split()[0], x.under_way) for x in report.waits if not x.what.startswith(("s_wait_alu", "s_waitcnt_depctr"))]

def stops(arch, text):
  # Returns a tuple for each wait and each barrier of an assembly text.
  trip = parse(f".amdgcn_target \"amdgcn-amd-amdhsa--{arch}\"\nk:\n{text}\n.type k,@function")[0].instructions
  # (text, accesses that it waits for, instructions since the last of them was issued, matrix instructions among these, {counter: accesses still
  # pending after it}); if it waits for no access, a single 0 in place of the three numbers
  return [(x.what, *([y.accesses, y.instructions, y.matrix] if (y := x.awaited) is not None else [0]), x.under_way)
          for x in waits_of(trip, CHIPS[arch])]

LOAD = "buffer_load_dwordx4 v[0:3], v4, s[0:3], 0 offen\n"

@pytest.mark.parametrize("arch, text, waited", [
  ("gfx942", "s_waitcnt vmcnt(4) lgkmcnt(0)", {"vmcnt": 4, "lgkmcnt": 0}),
  ("gfx942", "s_waitcnt 0xc07f", {"lgkmcnt": 0}),
  ("gfx950", "s_waitcnt 3956", {"vmcnt": 4}),
  ("gfx950", f"s_waitcnt {0x4f73}", {"vmcnt": 19}),
  ("gfx942", "s_waitcnt expcnt(0)", {"expcnt": 0}),
  ("gfx1100", "s_waitcnt 1015", {"vmcnt": 0}),
  ("gfx1100", "s_waitcnt_vscnt null, 0x0", {"vscnt": 0}),
  ("gfx1100", "s_waitcnt_depctr depctr_va_vdst(0)", {}),
  ("gfx1201", "s_wait_loadcnt_dscnt 0xd03", {"loadcnt": 13, "dscnt": 3}),
  ("gfx1201", "s_wait_storecnt_dscnt 0x0", {"storecnt": 0, "dscnt": 0}),
  ("gfx1201", "s_wait_kmcnt 0x2", {"kmcnt": 2}),
  ("gfx1201", "s_wait_alu depctr_va_vcc(0)", {})])
def test_counters_of_a_wait(arch, text, waited):
  op, _, args = text.partition(" ")
  assert waited_for(Instruction(op, args, text), CHIPS[arch].counters) == waited

@pytest.mark.parametrize("arch, text, counters", [
  ("gfx942", "global_store_dwordx4 v[0:1], v[2:5], off", {"vmcnt"}),
  ("gfx1100", "global_store_b128 v[0:1], v[2:5], off", {"vscnt"}),
  ("gfx1201", "global_store_b128 v[0:1], v[2:5], off", {"storecnt"}),
  ("gfx942", "s_load_dword s0, s[2:3], 0x0", {"lgkmcnt"}),
  ("gfx1201", "s_load_b32 s0, s[2:3], 0x0", {"kmcnt"}),
  ("gfx1201", "ds_store_b128 v0, v[1:4]", {"dscnt"}),
  ("gfx950", "buffer_load_dwordx4 v0, s[0:3], 0 offen lds", {"vmcnt"}),
  ("gfx1100", "flat_load_b32 v0, v[1:2]", {"vmcnt", "lgkmcnt"}),
  ("gfx1100", "global_atomic_add_u32 v0, v1, s[0:1]", {"vscnt"}),
  ("gfx1100", "global_atomic_add_u32 v0, v1, v2, s[0:1] glc", {"vmcnt"}),
  ("gfx1100", "scratch_store_b32 off, v0, s0", {"vscnt"}),
  ("gfx942", "buffer_inv sc1", set()),
  ("gfx942", "v_add_f32_e32 v0, v1, v2", set())])
def test_counters_that_an_access_raises(arch, text, counters):
  op, _, args = text.partition(" ")
  assert raised_by(Instruction(op, args, text), CHIPS[arch].counters) == counters

def test_a_wait_lasts_for_what_came_before_those_it_leaves():
  found = stops("gfx942", f"{LOAD*3}{MFMA*2}ds_read_b128 v[0:3], v4\ns_waitcnt vmcnt(1) lgkmcnt(0)\ns_barrier\n"
                          f"{MFMA}s_waitcnt vmcnt(0)")
  assert found == [("vmcnt(1)", 2, 5, 2, {"vmcnt": 1}), ("lgkmcnt(0)", 1, 1, 0, {"vmcnt": 1}), ("s_barrier", 0, {"vmcnt": 1}),
                   ("vmcnt(0)", 1, 7, 3, {})]

def test_loads_of_the_trip_before_are_under_way():
  # A load that is pending at the end of a loop iteration is waited for in the next iteration. The table of waits in a report on machine code takes
  # this into account.
  assert stops("gfx1201", "buffer_load_b128 v[0:3], v4, s[0:3], null offen\n" + MFMA + "s_wait_loadcnt 0x1\n" + MFMA) == [
    ("loadcnt(1)", 1, 6, 3, {"loadcnt": 1})]

def test_waits_of_waves_with_an_active_lane_are_on_the_way():
  text = (f".LBB0_1:\n{LOAD}{MFMA*4}{EXP*4}s_cbranch_vccnz .LBB0_4\n"
          ".LBB0_2:\ns_cbranch_execz .LBB0_3\ns_waitcnt vmcnt(0)\nds_write_b128 v0, v[1:4]\n"
          f".LBB0_3:\ns_barrier\ns_cbranch_scc0 .LBB0_1\ns_endpgm\n.LBB0_4:\ns_waitcnt vmcnt(0) lgkmcnt(0)\ns_branch .LBB0_2")
  report = analyse(f".amdgcn_target \"amdgcn-amd-amdhsa--gfx942\"\nk:\n{text}\n.type k,@function", d=64)
  assert report.loop.kinds["wait"] == 0 and [x.what for x in report.waits] == ["vmcnt(0)", "s_barrier"]

# ***** reports *****

@pytest.mark.parametrize("arch", SEARCHED)
@pytest.mark.parametrize("d", [64, 128])
def test_the_work_of_a_trip_is_known(arch, d):
  # A report on machine code counts the work of one loop iteration as the source determines it: matrix instructions, scores, exponentials and LDS
  # traffic. The bounds of the loop's time follow from these counts.
  u, cu = UNITS[arch], CHIPS[arch].pipes
  report = analyse(assembly(sample(arch, d), arch), d=d, queries=u.m)
  loop, held = report.loop, report.resources
  assert report.arch == arch and loop.kinds["matrix"] == sum(loop.matrix.values()) == 2*KEYS*d//(u.m*u.k)
  assert loop.scores == u.m*KEYS and loop.keys == KEYS and loop.exp_per_score == 1.0
  assert loop.kinds["barrier"] >= 2 and loop.instructions < loop.instructions_in_all   # rescaling lies beside the usual path
  reads, writes = (sum(n*int(w[1:])//8 for w, n in x.items()) for x in (loop.lds_read, loop.lds_write))
  assert reads == loop.kinds["matrix"]*u.lanes*2 and loop.kinds["lds_permute"] == 1
  share = u.m*KEYS/u.wave
  assert loop.valu_per_score == pytest.approx(loop.valu/share)
  assert loop.lds_bytes_per_score == pytest.approx((reads + writes)/share)
  cycles = loop.cycles
  # the samples use the matrix instruction that runs at the chip's full rate
  assert cycles["matrix"] == loop.flops/(cu.flops/cu.simds)
  assert loop.serial == pytest.approx(cycles["matrix"]/sum(cycles[x] for x in ("matrix", "vector", "transcendental")))
  assert loop.serial < loop.overlap <= 1
  assert held.lds == 2*(KEYS*(d+8) + d*(KEYS+8)) and held.vgpr_spills == held.scratch == 0 and held.waves_by_registers >= 1

def test_the_numbers_of_a_kernel_that_can_be_counted_by_hand():
  text = (".amdgcn_target \"amdgcn-amd-amdhsa--gfx942\"\n.type k,@function\nk:\n.LBB0_1:\n" + MFMA*8 + EXP*2 +
          "v_rcp_f32_e32 v0, v1\n"
          "v_pk_mul_f32 v[0:1], v[0:1], v[2:3]\n"
          "v_mov_b32_dpp v0, v1 row_shr:1 row_mask:0xf bank_mask:0xf\n"
          "v_cvt_f16_f32_e32 v0, v1\n"
          "ds_read_b128 v[0:3], v4\n"
          "ds_write_b16 v0, v1\n"
          "buffer_load_dwordx4 v0, s[0:3], 0 offen lds\n"
          "ds_bpermute_b32 v0, v1, v2\n"
          "s_cbranch_scc0 .LBB0_1\ns_endpgm\n")
  loop = analyse(text, d=64).loop
  assert (loop.kinds["matrix"], loop.kinds["exp"], loop.kinds["transcendental"]) == (8, 2, 1)
  assert (loop.valu, loop.dpp, loop.conversions) == (3, 1, 1)
  assert loop.flops == 8*16384 and loop.scores == 8*16384/(4*64) and loop.exp_per_score == 2/8
  # CDNA3: 32 cycles for a 32x32x8, 4 for a vector instruction, 16 for a transcendental; LDS: 64 lanes x 4 SIMDs at 128 bytes a clock. A write of 2
  # bytes counts as 4.
  assert loop.cycles == {"matrix": 256, "vector": 12, "transcendental": 48, "lds": 256*(16 + 4)/128 + 256*(4 + 16)/128}
  assert loop.overlap == 1 and loop.serial == 256/(256 + 12 + 48)
  assert loop.lds_bytes_per_score == (16 + 4 + 16)/8

def test_rdna_shares_its_issue_between_matrix_and_vector():
  text = (".amdgcn_target \"amdgcn-amd-amdhsa--gfx1100\"\n.type k,@function\nk:\n.LBB0_1:\n" +
          "v_wmma_f32_16x16x16_f16 v[0:7], v[0:7], v[8:15], v[0:7]\n"*4 + EXP*2 + "v_add_f32_e32 v0, v1, v2\n"*10 +
          "s_cbranch_scc0 .LBB0_1\ns_endpgm\n")
  loop = analyse(text, d=64).loop
  assert loop.overlap == 128/(128 + 10 + 2) and loop.serial == 128/(128 + 10 + 8)

@pytest.mark.parametrize("arch, registers, waves", [("gfx942", 128, 4),
                                                    ("gfx942", 129, 3),
                                                    ("gfx942", 256, 2),
                                                    ("gfx942", 264, 1),
                                                    ("gfx942", 8, 8),
                                                    ("gfx1100", 256, 5),
                                                    ("gfx1100", 96, 16),
                                                    ("gfx1100", 97, 12),
                                                    ("gfx1201", 192, 8)])
def test_waves_by_registers(arch, registers, waves): assert waves_by_registers(CHIPS[arch], registers) == waves

@pytest.mark.parametrize("arch, lds, threads, whole, waves", [
  ("gfx942", 32768, 256, False, 2),
  ("gfx942", 32769, 256, False, 1),
  ("gfx942", 65536, 512, False, 2),
  ("gfx950", 65536, 256, False, 2),
  ("gfx950", 81920, 256, False, 2),
  ("gfx1100", 40960, 128, False, 2),
  ("gfx1100", 40960, 128, True, 3),
  ("gfx1100", 1024, 128, False, 16)])
def test_waves_by_lds(arch, lds, threads, whole, waves): assert waves_by_lds(CHIPS[arch], lds, threads, whole) == waves

def test_a_spill_is_seen():
  source_ = sample("gfx942", 128).replace("(1, 256)))", "(1, 1024)))")   # sixteen waves share the registers
  held = analyse(assembly(source_, "gfx942"), d=128).resources
  assert held.vgpr_spills > 0 and held.scratch > 0

def test_text_without_a_kernel_is_an_error():
  with pytest.raises(ValueError, match="no AMDGPU code"): analyse("hello", arch="gfx942")
  with pytest.raises(ValueError, match="chip"): analyse("k:\n s_endpgm\n")
  with pytest.raises(ValueError, match="no rates of instructions are known for 'gfx906'"): analyse("k:\n s_endpgm\n", arch="gfx906")
  with pytest.raises(ValueError, match="there are k"): analyse("k:\n s_endpgm\n", arch="gfx942", kernel_name="other")

def test_a_kernel_without_a_matrix_loop_has_resources_only():
  report = analyse(".type k,@function\nk:\n s_endpgm\n", arch="gfx942")
  assert report.loop is None and report.loops == 0

@pytest.mark.parametrize("arch", [arch for arch in MODELLED if CHIPS[arch].unit.tables])
def test_a_code_object_gives_the_report_of_its_text(arch):
  text = assembly(sample(arch), arch)
  lib = assemble(text, arch)
  assert elf_chip(lib).name == arch
  a, b = analyse(text, d=64), analyse(disassemble(lib), d=64)
  assert _counted(a) == _counted(b) and any(under_way for _, under_way in _counted(a))
  same = ("kinds", "matrix", "lds_read", "lds_write", "load_widths", "dpp", "conversions", "cycles")
  assert a.resources == b.resources and all(getattr(a.loop, x) == getattr(b.loop, x) for x in same)

def test_a_code_object_that_would_be_decoded_wrongly_is_refused():
  # attn.isa refuses to report on a code object of gfx90a: the instruction tables of CDNA3 would decode each bf16 MFMA of CDNA2 as a sparse MFMA.
  with pytest.raises(ValueError, match=r"gfx90a \(MI250X.*no tables to decode it by.*llvm-objdump"):
    disassemble(assemble(assembly(sample("gfx90a"), "gfx90a"), "gfx90a"))

def test_agprs_are_told_from_vgprs():
  # The report on a CDNA kernel with more than 256 registers counts accumulation registers and vector registers separately, from the assembly text and
  # from the code object.
  text = assembly(sample("gfx950", 256), "gfx950")
  held = analyse(text, d=256).resources
  text = text.replace(".agpr_count:     0", ".agpr_count:     16")
  text = text.replace(f".amdhsa_accum_offset {held.vgpr + -held.vgpr % 4}", ".amdhsa_accum_offset 128")
  changed = analyse(text, d=256).resources
  assert changed.vgpr == 128 and changed.agpr == 16
  assert changed == analyse(disassemble(assemble(text, "gfx950")), d=256).resources

def test_llvm_objdump_text_is_read():
  # attn.isa reads the text of llvm-objdump. A branch in this text has a number as its target. The target's address is in a comment; without the
  # comment, attn.isa computes it.
  dump = ("\nkernel.co:\tfile format elf64-amdgpu\n\n0000000000001600 <k>:\n"
          "\tv_mov_b32_e32 v0, 0                                        // 000000001600: 7E000280\n"
          "\tv_mfma_f32_32x32x8_f16 v[0:15], v[0:1], v[2:3], v[0:15]     // 000000001604: D3CC0000 04020500\n"
          "\tv_exp_f32_e32 v1, v2                                        // 00000000160C: 7E024102\n"
          "\ts_cbranch_scc0 {}\n\ts_endpgm                                // 000000001614: BF810000\n")
  for branch in ("65532 // 000000001610: BF84FFFC <k+0x4>", "65532 // 000000001610: BF84FFFC"):
    loop = analyse(dump.format(branch), "gfx942", 64).loop
    assert loop.instructions == 3 and loop.kinds["matrix"] == loop.kinds["exp"] == 1

# ***** slow idioms *****

@pytest.mark.sample(22)
@pytest.mark.parametrize("arch", MODELLED)
@pytest.mark.parametrize("change, said", [({}, None), ({"exp": "__ocml_exp2_f32"}, "v_ldexp after an exp"),
                                          ({"maximum": "x > y ? x : y"}, "compare and select"),
                                          ({"maximum": "y < x ? x : y"}, "compare and select")])
def test_slow_idioms_are_found(arch, change, said):
  found = defects(parse(assembly(sample(arch, **change), arch))[0])
  assert not found if said is None else len(found) >= 30 and all(x.startswith(said) for x in found)

def test_idioms_in_dual_issue_are_found():
  text = ("k:\nv_cmp_gt_f32_e32 vcc_lo, v1, v2\nv_dual_mov_b32 v9, v8 :: v_dual_cndmask_b32 v3, v2, v1\n"
          "v_exp_f32_e32 v4, v4\nv_mov_b32 v5, v6\nv_ldexp_f32 v4, v4, v7\ns_endpgm")
  assert len(defects(parse(text, "gfx1100")[0])) == 2

def test_selects_that_are_no_maximum_are_not_found():
  text = ("k:\nv_cmp_gt_f32_e32 vcc, v1, v2\nv_cndmask_b32_e32 v3, v4, v5, vcc\n"
          "v_cmp_lt_i32_e32 vcc, v1, v2\nv_cndmask_b32_e32 v3, v1, v2, vcc\n"
          "v_exp_f32_e32 v4, v4\nv_exp_f32_e32 v4, v5\nv_mov_b32 v4, v1\nv_ldexp_f32 v5, v4, v7\ns_endpgm")
  assert defects(parse(text, "gfx942")[0]) == []

# ***** the command, and the file of costs *****

@pytest.fixture
def ours(monkeypatch):
  # Replaces the sources of attn's kernels by the small sample kernels of isa_sample.py.
  def kernel_source(spec, llvm=None):
    maximum = "x > y ? x : y" if spec.mask == "causal" else "__builtin_fmaxf(x, y)"
    return source.Source(sample(spec.arch, spec.d, maximum=maximum), spec.d, spec.d, UNITS[spec.arch].m, 4*UNITS[spec.arch].m)
  monkeypatch.setattr(source, "kernel_source", kernel_source)

def run(*args, ok=True) -> str:
  done = CliRunner().invoke(main, [str(a) for a in args])
  assert (done.exit_code == 0) == ok, done.output
  if done.exception is not None and not isinstance(done.exception, SystemExit): raise done.exception
  return done.output

def test_a_kernel_by_options_and_by_its_word(ours):
  by_options = json.loads(run("--arch", "gfx942", "--d", 64, "--causal", "--json"))
  assert by_options == json.loads(run("gfx942/64/float16/causal", "--json"))
  assert by_options[0]["name"] == "gfx942/64/float16/causal" and by_options[0]["loop"]["queries"] == 32

def test_backward_kernels_by_options_and_by_their_words(monkeypatch):
  def report_of(spec, *_): return costs.analyse(assembly(sample("gfx942"), "gfx942"), "gfx942", 64, title=str(spec))
  monkeypatch.setattr(costs, "report_of", report_of)
  by_options = run("--arch", "gfx942", "--d", 64, "--causal", "--gradient", "dq", "--json")
  assert by_options == run("gfx942/64/float16/causal/dq", "--json")
  assert json.loads(by_options)[0]["name"] == "gfx942/64/float16/causal/dq"
  assert str(source.Spec.parse("gfx942/64/float16/full/dkdv")) == "gfx942/64/float16/full/dkdv"
  with pytest.raises(ValueError, match="kernel 'dv' is not one of forward, decode, decode_int8, decode_fp8, dq, dkdv"):
    run("gfx942/64/float16/full/dv", ok=False)
  assert "two numbers, of products with dimension D and with dimension Dv" in run("--products", "5", "gfx942/64", ok=False)

@pytest.mark.parametrize("option, found", [
  ("softcap", dict(softcap=30.0)), ("alibi", dict(alibi=(True,))), ("bias", dict(bias=(False, False, True, True))), ("dropout", dict(dropout_p=0.1)),
  ("window", dict(window=(1024, 0)))])
def test_words_with_an_option(option, found):
  # A word may name one option after the mask. Its kernel is for a problem with this option. A window hides keys behind a query only if the mask is
  # not causal.
  spec = source.Spec.parse(f"gfx942/128/float16/causal+{option}/dq")
  assert (spec.mask, spec.option, str(spec)) == ("causal", option, f"gfx942/128/float16/causal+{option}/dq")
  assert source.problem_of_spec(spec) == replace(source.problem_of_spec(replace(spec, option="")), **found)
  assert source.problem_of_spec(source.Spec.parse("gfx942/128/float16/full+window")).window == (1024, 1024)

@pytest.mark.parametrize("word, said", [
  ("gfx942/128/float16/causal+cap", "option 'cap' is not one of window, softcap, alibi, bias, dropout"),
  ("gfx942/128/float16/full+", "names no option after the"),
  ("gfx942/128/float16/full+bias/decode", "only for forward and backward kernels"),
  ("gfx942/576/float16/full+softcap/mla", "only for forward and backward kernels")])
def test_words_with_a_wrong_option(word, said):
  with pytest.raises(ValueError, match=said): source.Spec.parse(word)

@pytest.mark.parametrize("kernel, passes, exponentials", (("dq", 1, 1), ("dkdv", 1, 1), ("dkdv", 2, 2)))
def test_hot_loops_of_the_backward(kernel, passes, exponentials):
  # The report on machine code finds the hot loop of each backward kernel, and counts scores, exponentials and matrix instructions correctly. A kernel
  # of dk and dv that loops over the queries twice (two passes) computes P twice, so it has two exponentials for each score.
  spec = source.Spec("gfx1100", 32, "float16", "causal", kernel)
  _, tile = source.chosen(spec)
  found = source.kernel_source(spec, replace(tile, passes=passes))
  loop = costs.report_of_text(spec, found, assembly(found.text, spec.arch)).loop
  assert loop.scores == tile.matrix.N*tile.block_n and loop.exp_per_score == exponentials
  assert sum(loop.matrix.values()) == 2*{("dq", 1): 3, ("dkdv", 1): 4, ("dkdv", 2): 5}[kernel, passes]*loop.scores/256

def test_useful_is_of_both_backward_kernels():
  # `useful` is the share of the matrix unit's peak rate that goes to necessary products. For the two backward kernels together it is the time of five
  # products at the peak rate, divided by the time of both kernels. The kernels compute seven products, so `useful` is at most 5/7.
  reports = costs.reports_of([source.Spec("gfx1201", 32, kernel=kernel) for kernel in ("dq", "dkdv")])
  cycles = [sum(r.loop.cycles[x] for x in ("matrix", "vector", "transcendental"))/r.loop.scores for r in reports]
  matrix = [r.loop.cycles["matrix"]/r.loop.scores for r in reports]
  for r in reports: assert r.loop.useful == pytest.approx(5/7*sum(matrix)/sum(cycles)) and r.loop.useful < 5/7

def test_the_table_names_every_figure(ours):
  shown = run("gfx942/64", "gfx1100/64")
  for name in ("VGPR", "waves/SIMD by LDS", "32 x mfma_f32_32x32x8_f16", "VALU/elt", "bound, not measured",
               "overlap %", "serial %", "useful %"):
    assert name in shown
  assert len(run("--brief", "gfx942/64", "gfx1100/64").splitlines()) == 6

def test_a_file_and_a_difference(ours, tmp_path):
  text, lib = tmp_path/"a.s", tmp_path/"b.co"
  text.write_text(assembly(sample("gfx942"), "gfx942"))
  lib.write_bytes(assemble(assembly(sample("gfx942", maximum="x > y ? x : y"), "gfx942"), "gfx942"))
  lines = run("--diff", text, lib, "--d", 64).splitlines()
  assert "change" in "".join(lines[:4])
  valu = next(x for x in lines if "VALU  " in x).split("│")
  assert int(valu[3]) - int(valu[2]) == float(valu[4]) > 20

def test_errors_say_what_is_wrong(ours, tmp_path):
  assert "name a file" in run("report", ok=False) and "Usage" in run(ok=False)
  assert "compares two" in run("--diff", "gfx942/64", ok=False)
  for word, said in (("nothing.s", "no such file"), ("gfx906/64", "arch 'gfx906'"), ("gfx942/64/float8", "dtype 'float8'"),
                     ("gfx942/x", "is no kernel"), ("gfx942/0", "D=0: .* D=1 to 256"), ("sm_90/0", "D=0: .* D=1 to 256"),
                     ("gfx942/1000", "D=1000: .* D=1 to 256"), ("gfx942/600/float16/full/mla", "mla is for D=257 to 576")):
    with pytest.raises(ValueError, match=said): run(word, ok=False)
  (tmp_path/"bundle.co").write_bytes(b"\x7fELF" + bytes(60))
  with pytest.raises(ValueError, match="not of an AMD GPU"): run(tmp_path/"bundle.co", ok=False)

def test_a_loop_that_there_is_not(ours, tmp_path):
  text = tmp_path/"a.s"
  text.write_text(assembly(sample("gfx942"), "gfx942"))
  for what in ("gfx942/64", text):
    with pytest.raises(ValueError, match=r"loop 99 of .*: must be less than 1, its number of matrix loops"):
      run(what, "--loop", 99, ok=False)
    assert "-5 is not in the range" in run(what, "--loop", -5, ok=False)

def test_every_block_of_a_kernel_of_ours(ours):
  usual, whole = (json.loads(run("gfx942/64", "--json", *more))[0]["loop"] for more in ((), ("--every-block",)))
  assert usual["useful"] is not None and whole["instructions"] >= usual["instructions"]

def test_an_option_of_files_beside_a_kernel_of_ours(ours):
  for command, option, value in (((), "--dv", 1), ((), "--products", "1,1"),
                                 (("time",), "--behind", 1), (("time",), "--queries", 1)):
    assert f"{option} is for files: gfx942/64 is a kernel of attn" in run(*command, "gfx942/64", option, value, ok=False)

@pytest.mark.parametrize("args", [("time", "gfx942/64", "--svg"), ("time", "gfx942/64", "--png"), ("costs", "--write")])
def test_a_file_in_a_folder_that_there_is_not(args, tmp_path):
  assert f"there is no folder '{tmp_path/'missing'}'" in run(*args, tmp_path/"missing"/"file", ok=False).replace("\n", "")

def test_assembly_and_source_are_printed(ours):
  assert "v_mfma" in run("asm", "gfx942/64") and "__builtin_amdgcn_mfma" in run("asm", "gfx942/64", "--hip")

def test_help_shows_every_option():
  shown = run("--help")
  for name, command in main.commands.items():
    for option in [x for p in command.params for x in p.opts if x.startswith("--")]: assert option in shown, f"{name} {option}"
  assert "Options of report, the command where none is named" in shown and "--every-block" in shown

def test_cuda_source_and_sass(monkeypatch, tmp_path):
  # `python -m attn.isa asm` prints CUDA source and SASS. Here two scripts that print their input stand for the CUDA toolkit. Without a toolkit the
  # command prints the source alone.
  scripts = {"nvcc": 'while [ "$1" != -o ]; do echo "$1" >> "$CALLS"; shift; done; echo binary > "$2"',
             "nvdisasm": 'echo "SASS of $1"; cat "$2"'}
  for tool, text in scripts.items():
    (tmp_path/tool).write_text(f"#!/bin/sh\n{text}\n")
    (tmp_path/tool).chmod(0o755)
  monkeypatch.setenv("CALLS", str(tmp_path/"calls"))
  monkeypatch.setattr(sass.shutil, "which", lambda name, path=None: str(tmp_path/name) if (tmp_path/name).exists() else None)
  shown = run("asm", "sm_90/64")
  assert "wgmma.mma_async" in shown and shown.rstrip().endswith("SASS of -c\nbinary")
  assert "-gencode=arch=compute_90a,code=sm_90a" in (tmp_path/"calls").read_text()
  alone = run("asm", "sm_90/64", "--cuda")
  assert "wgmma.mma_async" in alone and "SASS" not in alone and shown.startswith(alone)
  (tmp_path/"nvdisasm").unlink()
  without = run("asm", "sm_80/64/bfloat16/causal")
  assert "mma.sync.aligned.m16n8k16" in without and "no cuobjdump or nvdisasm" in without
  (tmp_path/"nvcc").write_text("#!/bin/sh\necho 'kernel.cu(3): error: what' >&2; exit 1\n")
  (tmp_path/"nvdisasm").write_text("")
  with pytest.raises(CompileError, match=r"nvcc failed:\n.*error: what"): run("asm", "sm_90/64", ok=False)

def test_no_report_on_a_chip_of_nvidia():
  with pytest.raises(ValueError, match=r"sm_90/64: reports are only for AMD's chips.*`asm sm_90/64` prints"): run("sm_90/64", ok=False)
  with pytest.raises(ValueError, match="--arch sm_90: reports are only for AMD's chips"): run(__file__, "--arch", "sm_90", ok=False)

def test_costs_are_written_compared_and_changes_named(ours, monkeypatch, tmp_path):
  specs = [source.Spec("gfx942", 64), source.Spec("gfx1100", 64), source.Spec("gfx942", 64, mask="causal")]
  monkeypatch.setattr(costs, "SPECS", specs)
  file = tmp_path/"costs.txt"
  run("costs", "--write", file)
  assert [x.split("|")[0].strip() for x in file.read_text().splitlines()[2:]] == [str(s) for s in specs]
  assert file.read_text().splitlines()[0].startswith("#") and "not measurements" in file.read_text()
  run("costs", "--check", file)
  assert costs_file.costs().compare(file.read_text(), costs_file.costs().lines_of(specs)) == []
  def kernel_source(s, llvm): return source.Source(sample(s.arch, s.d, exp="__ocml_exp2_f32"), s.d, s.d, 32, 128)
  monkeypatch.setattr(source, "kernel_source", kernel_source)
  changes = costs_file.costs().compare(file.read_text(), costs_file.costs().lines_of(specs))
  assert any("VALU/elt was" in c for c in changes) and all(c.startswith(tuple(map(str, specs))) for c in changes)
  assert "costs changed" in run("costs", "--check", file, ok=False)
  before = file.read_text().splitlines()
  run("costs", "--write", file, "--arch", "gfx1100")    # rows of other chips keep their text and position
  after = file.read_text().splitlines()
  cells = lambda line: [x.strip() for x in line.split("|")]
  assert [cells(x) for x in after[:3] + after[4:]] == [cells(x) for x in before[:3] + before[4:]]
  assert cells(after[3]) != cells(before[3])
  (tmp_path/"none.txt").unlink(missing_ok=True)
  run("costs", "--write", tmp_path/"none.txt", "--arch", "gfx1100")
  assert [cells(x)[0] for x in (tmp_path/"none.txt").read_text().splitlines()[2:]] == [str(specs[1])]
  lines = costs_file.costs().lines_of(specs[:1])
  assert costs_file.costs().compare(costs_file.costs().header, lines) == ["gfx942/64/float16/full: not in the file"]
