"""Tests of the checks of machine code. The checks find a planted fault in a small assembly text, and find nothing in the same text without the fault.
"""
from __future__ import annotations
import random, re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
import numpy as np
import pytest
from click.testing import CliRunner
from attn.chips import get_chip
from attn.choose.backward import choose_bias_tile, dbias_of
from attn.compilers.clang import assembly
from attn.isa import costs, source
from attn.isa.__main__ import main
from attn.isa.buffer_offsets import KnownRegisters
from attn.isa.check import findings
from attn.isa.instruction import Instruction
from attn.isa.source import Shape, Spec, problem_of_spec, uneven_shape
from attn.kernels.parts.grid.tensors import dbias_arguments
from attn.ops import renderers
from attn.ops.renderers import render
from attn.tinygrad_compat import UOp
from cases import TYPES, problem
from isa_sample import sample

def of(text:str, arch:str) -> list[str]: return findings("k:\n" + text.replace("; ", "\n") + "\ns_endpgm", arch)

# ***** across lanes *****

SWAP, WMMA = "v_permlane32_swap_b32_e32 v0, v1", "v_wmma_f32_16x16x16_f16 v[0:7], v[0:7], v[8:15], v[0:7]"
MEET = "s_or_b64 exec, exec, s[2:3]"
IF = "s_and_saveexec_b64 s[2:3], vcc; s_cbranch_execz .LBB0_2"
# if (c) ... else ..., as clang compiles it
IF_ELSE = f"{IF}; %s; s_xor_b64 s[2:3], exec, s[2:3]; .LBB0_2:; s_or_saveexec_b64 s[2:3], s[2:3]; %s; s_xor_b64 exec, exec, s[2:3]; {MEET}; %s"
# a loop inside a branch that lanes leave one by one
LOOP = ("s_mov_b64 s[4:5], 0; .LBB0_1:; v_cmp_gt_i32_e32 vcc, v1, v2; %s; s_or_b64 s[4:5], vcc, s[4:5]; s_andn2_b64 exec, exec, s[4:5]; "
        "s_cbranch_execnz .LBB0_1; s_or_b64 exec, exec, s[4:5]; %s")
# a loop over the different values that lanes hold
WATERFALL = ("s_mov_b32 s2, exec_lo; .LBB0_1:; v_readfirstlane_b32 s4, v0; v_cmp_eq_u32_e32 vcc_lo, s4, v0; s_and_saveexec_b32 s3, vcc_lo; %s; "
             "s_xor_b32 exec_lo, exec_lo, s3; s_cbranch_execnz .LBB0_1; s_mov_b32 exec_lo, s2; %s")

@pytest.mark.parametrize("arch, text", [
  ("gfx950", f"{IF}; {SWAP}; .LBB0_2:; {MEET}"), ("gfx950", f"{IF}; .LBB0_2:; {SWAP}; {MEET}"),
  ("gfx950", IF_ELSE % (SWAP, "s_nop 0", "s_nop 0")), ("gfx950", (IF_ELSE % ("s_nop 0", "s_nop 0", "s_nop 0")).replace(MEET, f"{SWAP}; {MEET}")),
  ("gfx950", LOOP % (SWAP, "s_nop 0")), ("gfx1100", WATERFALL % (WMMA, "s_nop 0")),
  ("gfx950", f"s_and_saveexec_b64 s[2:3], vcc; s_mov_b32 s3, 0; {MEET}; {SWAP}"),                  # the code loses one half of the mask
  ("gfx950", f"s_cbranch_scc0 .LBB0_2; s_and_saveexec_b64 s[2:3], vcc; .LBB0_2:; {SWAP}"),         # EXEC depends on the path that the wave ran
  ("gfx1100", f"v_cmpx_gt_i32_e32 v0, v1; {WMMA}"), ("gfx1100", f"s_and_b32 exec_lo, exec_lo, vcc_lo; {WMMA}"),
  ("gfx1100", "s_and_saveexec_b32 s2, vcc_lo; v_add_f32_dpp v0, v1, v2 row_ror:4 row_mask:0xf bank_mask:0xf"),
  ("gfx1201", "s_mov_b32 exec_lo, s2; v_permlanex16_b32 v0, v1, s1, 0xfedcba98 op_sel:[1,0]"),
  ("gfx942", f"{IF}; ds_bpermute_b32 v0, v1, v2; .LBB0_2:; {MEET}"),
  ("gfx942", "v_cmpx_gt_i32_e32 vcc, v0, v1; ds_swizzle_b32 v0, v1 offset:swizzle"),
  ("gfx942", f"{IF}; v_mfma_f32_32x32x8_f16 v[0:15], v[0:1], v[2:3], v[0:15]; .LBB0_2:; {MEET}"),
  ("gfx950", "s_andn2_b64 exec, exec, s[2:3]; ds_read_b64_tr_b16 v[0:1], v4")])
def test_what_needs_all_lanes_is_found_where_some_are_off(arch:str, text:str) -> None:
  found = of(text, arch)
  assert len(found) == 1 and found[0].startswith("across lanes: behind ") and "where lanes may be off" in found[0]

@pytest.mark.parametrize("arch, text", [
  ("gfx950", f"{SWAP}; {IF}; v_readfirstlane_b32 s8, v0; .LBB0_2:; {MEET}; {SWAP}"),
  ("gfx950", IF_ELSE % ("s_nop 0", SWAP, SWAP)),                                                     # EXEC has all lanes at this instruction
  # an if whose lanes compute nothing, as clang compiles it
  ("gfx1100", "s_and_saveexec_b32 s4, s0; s_xor_b32 s4, exec_lo, s4; s_and_not1_saveexec_b32 s5, s4; s_cbranch_execz .LBB0_1; v_mov_b32_e32 v0, 0; "
              f".LBB0_1:; s_or_b32 exec_lo, exec_lo, s5; {WMMA}"),
  ("gfx950", LOOP % ("s_nop 0", SWAP)), ("gfx950", f"{IF}; {LOOP % ('s_nop 0', 's_nop 0')}; .LBB0_2:; {MEET}; {SWAP}"),
  ("gfx1100", WATERFALL % ("s_nop 0", WMMA)),
  ("gfx950", f"s_cmp_eq_u32 s0, 0; s_cbranch_scc1 .LBB0_2; {SWAP}; .LBB0_2:; {SWAP}"),               # a branch that the whole wave runs
  ("gfx950", f"s_and_b64 vcc, exec, vcc; s_cbranch_vccz .LBB0_2; {SWAP}; .LBB0_2:; {SWAP}"),
  ("gfx950", f"s_and_saveexec_b64 s[2:3], vcc; s_mov_b64 exec, -1; {SWAP}"), ("gfx950", f"s_or_saveexec_b64 s[2:3], -1; {SWAP}"),
  # a mask that the code saves in lanes of a vector register
  ("gfx1100", "s_and_saveexec_b32 s2, vcc_lo; v_writelane_b32 v40, s2, 1; s_mov_b32 s2, 0; v_readlane_b32 s3, v40, 1; "
              f"s_mov_b32 exec_lo, s3; {WMMA}"),
  # nested masks with else
  ("gfx950", f"{IF}; s_and_saveexec_b64 s[6:7], s[8:9]; s_xor_b64 s[6:7], exec, s[6:7]; s_or_saveexec_b64 s[6:7], s[6:7]; "
             f"s_xor_b64 exec, exec, s[6:7]; s_or_b64 exec, exec, s[6:7]; .LBB0_2:; {MEET}; {SWAP}")])
def test_whole_waves_are_left_alone(arch:str, text:str) -> None: assert of(text, arch) == []

def branches(depth:int, inside:str, i:int=0) -> str:
  # Returns assembly text of if-else, nested to `depth` as clang compiles them, with `inside` in the innermost branches.
  own, (then, other) = f"s{10 + i}", (branches(depth - 1, inside, i + 1) if depth > 1 else inside for _ in range(2))
  return (f"s_and_saveexec_b32 {own}, s{20 + i}; s_xor_b32 {own}, exec_lo, {own}; {then}; s_and_not1_saveexec_b32 {own}, {own}; {other}; "
          f"s_or_b32 exec_lo, exec_lo, {own}")

@pytest.mark.parametrize("depth", range(1, 7))
def test_behind_branches_inside_branches_waves_are_whole(depth:int) -> None:
  assert of(f"{branches(depth, 's_nop 0')}; {WMMA}", "gfx1100") == []
  assert len(of(f"{branches(depth, WMMA)}; {WMMA}", "gfx1100")) == 2**depth

def test_each_function_of_a_text_is_looked_at() -> None:
  text = f"one:\ns_nop 0\ns_endpgm\ntwo:\ns_and_saveexec_b32 s2, vcc_lo\n{WMMA}\ns_endpgm\nthree:\n{WMMA}\ns_endpgm"
  assert findings(text, "gfx1100") == [f"across lanes: behind two, where lanes may be off: {WMMA}"]

# ***** buffer offsets *****

LOAD, AND = "buffer_load_dwordx4 v[4:7], v1, s[4:7], 0 offen offset:16", "v_and_b32_e32 v1, 63, v0"
TO_LDS = "buffer_load_dwordx4 v1, s[4:7], 0 offen offset:16 lds"
ANEW = f"v_mov_b32_e32 v1, s8; {IF}; {AND}; %s; .LBB0_2:; {MEET}; %s"      # inactive lanes keep an unknown value

@pytest.mark.parametrize("arch, text", [
  ("gfx942", f"v_mov_b32_e32 v1, s8; {LOAD}"), ("gfx942", f"global_load_dword v1, v0, s[2:3]; {LOAD}"), ("gfx942", f"v_mov_b32_e32 v1, -4; {LOAD}"),
  ("gfx942", f"{AND}; v_sub_u32_e32 v1, 62, v1; {LOAD}"), ("gfx942", f"{AND}; v_subrev_u32_e32 v1, 1, v1; {LOAD}"),
  ("gfx942", f"{AND}; v_add_u32_e32 v1, 0xfffffb80, v1; {LOAD.replace('16', '1152')}"), ("gfx942", f"{AND}; v_mul_lo_u32 v1, v1, 0xfffffb80; {LOAD}"),
  ("gfx942", f"{AND}; v_mov_b32_e32 v2, s8; v_mad_u32_u24 v1, v1, 48, v2; {LOAD}"), ("gfx942", f"{AND}; v_lshlrev_b32_e32 v1, 27, v1; {LOAD}"),
  ("gfx942", f"s_min_i32 s8, s9, 3; v_mov_b32_e32 v1, s8; {LOAD}"), ("gfx942", f"{AND}; v_ashrrev_i32_e32 v1, 3, v9; {LOAD}"),
  ("gfx942", f"{AND}; v_cndmask_b32_e64 v1, v1, -v1, s[2:3]; {LOAD}"), ("gfx942", f"{AND}; v_lshlrev_b32_sdwa v1, v2, v1 dst_sel:DWORD; {LOAD}"),
  ("gfx942", f"s_mov_b32 vcc_lo, 4; v_mov_b32_e32 v1, vcc_hi; {LOAD}"), ("gfx942", f"s_movk_i32 s8, 0xfb80; v_mov_b32_e32 v1, s8; {LOAD}"),
  ("gfx942", f"v_mov_b32_e32 v1, 0; .LBB0_1:; {LOAD}; v_add_u32_e32 v1, 64, v1; s_cbranch_scc1 .LBB0_1"),
  ("gfx942", f"{AND}; s_cbranch_scc1 .LBB0_1; v_mov_b32_e32 v1, s8; .LBB0_1:; {LOAD}"),
  ("gfx942", ANEW % ("s_nop 0", LOAD)), ("gfx942", ANEW % (f"s_andn2_saveexec_b64 s[6:7], s[2:3]; {LOAD}", "s_nop 0")),
  ("gfx942", f"v_mov_b32_e32 v1, s8; {IF}; {AND}; v_readfirstlane_b32 s9, v1; .LBB0_2:; {MEET}; v_mov_b32_e32 v1, s9; {LOAD}"),
  ("gfx942", f"{AND}; v_mad_u64_u32 v[2:3], s[8:9], v0, s10, v[8:9]; v_mov_b32_e32 v1, v2; {LOAD}"),
  ("gfx1201", f"{AND}; v_mad_co_u64_u32 v[2:3], s8, v1, 4, v[0:1]; v_mov_b32_e32 v1, s8; {LOAD}"),
  ("gfx1100", f"v_dual_mov_b32 v1, v9 :: v_dual_and_b32 v9, 15, v0; {LOAD}"), ("gfx950", f"v_mov_b32_e32 v1, s8; {TO_LDS}")])
def test_a_register_that_may_be_negative_is_found(arch:str, text:str) -> None:
  found = of(text, arch)
  assert len(found) == 1 and found[0].startswith("buffer offsets: v1 may be below 0, or is unknown: buffer_load_dwordx4")

@pytest.mark.parametrize("arch, text", [
  ("gfx942", f"{AND}; {LOAD}"), ("gfx942", f"v_mov_b32_e32 v1, s8; {LOAD.replace(' offset:16', '')}"),
  ("gfx90a", "buffer_load_dword v1, off, s[0:3], 0 offset:4"), ("gfx942", f"v_bfe_u32 v1, v0, 10, 10; v_lshl_or_b32 v1, v1, 5, 7; {LOAD}"),
  ("gfx942", f"{AND}; v_cndmask_b32_e32 v1, 0x80000000, v1, vcc; {LOAD}"),
  ("gfx942", f"{AND}; v_sub_u32_e32 v1, 63, v1; v_mul_u32_u24_e32 v1, 0x480, v1; {LOAD}"), ("gfx942", f"v_max_i32_e32 v1, 0, v9; {LOAD}"),
  ("gfx942", f"v_med3_i32 v1, v9, 0, 63; {LOAD}"), ("gfx942", f"s_max_i32 s8, s9, 0; s_min_i32 s8, s8, 3; v_mov_b32_e32 v1, s8; {LOAD}"),
  ("gfx942", f"{AND}; v_readfirstlane_b32 s8, v9; s_and_b32 s8, s8, 1; s_mul_i32 s8, s8, 0x480; v_lshl_add_u32 v1, v1, 4, s8; {LOAD}"),
  ("gfx942", f"s_bfe_u32 s8, s9, 0x10001; s_mulk_i32 s9, 0x480; v_mov_b32_e32 v1, s8; {LOAD}"),
  ("gfx942", f"{AND}; v_accvgpr_write_b32 a3, v1; v_mov_b32_e32 v1, v9; v_accvgpr_read_b32 v1, a3; {LOAD}"),
  ("gfx942", ANEW % (LOAD, "s_nop 0")), ("gfx942", f"{AND}; {IF}; v_and_b32_e32 v1, 15, v0; .LBB0_2:; {MEET}; {LOAD}"),
  ("gfx942", f"{AND}; .LBB0_1:; {LOAD}; v_xor_b32_e32 v1, 64, v1; s_cbranch_scc1 .LBB0_1"),
  ("gfx942", f"{AND}; v_mad_u64_u32 v[2:3], s[8:9], v1, 4, v[1:2]; v_mov_b32_e32 v1, v2; {LOAD}"),
  ("gfx1100", f"v_dual_mov_b32 v9, v1 :: v_dual_and_b32 v1, 15, v0; {LOAD}"), ("gfx950", f"{AND}; {TO_LDS}; {LOAD}")])
def test_a_register_that_is_not_negative_is_left_alone(arch:str, text:str) -> None: assert of(text, arch) == []

def test_how_many_dimensions_a_workgroup_has() -> None:
  # The check of machine code knows the range of register v0, which holds the coordinates of a thread in its workgroup, ten bits for each dimension.
  # It takes the number of dimensions from the assembly text, or assumes three if the text states none.
  text = f"k:\nv_lshlrev_b32_e32 v1, 4, v0\n{LOAD}\ns_endpgm\n"
  says = ".amdhsa_kernel k\n  .amdhsa_system_vgpr_workitem_id {}\n.end_amdhsa_kernel\n"
  assert [len(findings(text + more, "gfx942")) for more in ("", says.format(0), says.format(1), says.format(2))] == [1, 0, 0, 1]

WORD = 2**32
def signed(x:int) -> int: return x - WORD if x >= WORD//2 else x
def is_24(x:int) -> int: return x & 0xffffff
OPERATIONS: dict[str, Callable[..., int]] = {     # results by the ISA documents
  "v_mov_b32_e32": lambda x: x,
  "v_add_u32_e32": lambda x, y: x + y, "v_add3_u32": lambda x, y, z: x + y + z, "v_sub_u32_e32": lambda x, y: x - y, "s_sub_i32": lambda x, y: x - y,
  "v_subrev_u32_e32": lambda x, y: y - x, "v_mul_lo_u32": lambda x, y: x*y, "s_mul_i32": lambda x, y: x*y, "v_mul_hi_u32": lambda x, y: x*y >> 32,
  "v_mul_u32_u24_e32": lambda x, y: is_24(x)*is_24(y), "v_mad_u32_u24": lambda x, y, z: is_24(x)*is_24(y) + z,
  "v_and_b32_e32": lambda x, y: x & y, "s_andn2_b32": lambda x, y: x & ~y, "v_or_b32_e32": lambda x, y: x | y, "v_or3_b32": lambda x, y, z: x | y | z,
  "v_xor_b32_e32": lambda x, y: x ^ y, "v_and_or_b32": lambda x, y, z: x & y | z, "v_bfi_b32": lambda x, y, z: x & y | ~x & z,
  "v_xad_u32": lambda x, y, z: (x ^ y) + z, "v_bfe_u32": lambda x, y, z: x >> (y & 31) & (1 << (z & 31)) - 1,
  "s_bfe_u32": lambda x, y: x >> (y & 31) & (1 << (y >> 16 & 127)) - 1,
  "v_lshlrev_b32_e32": lambda x, y: y << (x & 31), "v_lshrrev_b32_e32": lambda x, y: y >> (x & 31), "s_lshl_b32": lambda x, y: x << (y & 31),
  "v_ashrrev_i32_e32": lambda x, y: signed(y) >> (x & 31), "s_ashr_i32": lambda x, y: signed(x) >> (y & 31), "s_lshr_b32": lambda x, y: x >> (y & 31),
  "v_lshl_add_u32": lambda x, y, z: (x << (y & 31)) + z, "v_add_lshl_u32": lambda x, y, z: x + y << (z & 31),
  "v_lshl_or_b32": lambda x, y, z: x << (y & 31) | z, "s_lshl3_add_u32": lambda x, y: (x << 3) + y,
  "v_min_u32_e32": min, "v_max_u32_e32": max, "v_max3_u32": max, "v_min_i32_e32": lambda x, y: min(x, y, key=signed),
  "v_max_i32_e32": lambda x, y: max(x, y, key=signed), "v_med3_i32": lambda x, y, z: sorted((x, y, z), key=signed)[1]}

def test_ranges_hold_what_instructions_give() -> None:
  # The check of machine code computes a range for the result of each instruction, and the result lies in it. The test draws operands from small and
  # large ranges.
  rng = random.Random(0)
  known = 0
  for op, meaning in OPERATIONS.items():
    count = 3 if op in ("v_max3_u32", "v_med3_i32") else 2 if op.startswith(("v_min", "v_max")) else meaning.__code__.co_argcount
    for _ in range(200):
      names = [f"{op[0]}{i}" for i in range(1, count + 1)]
      ranges = {name: tuple(sorted(rng.randrange(1 << rng.choice((3, 5, 12, 20, 31, 32))) for _ in range(2))) for name in names}
      state = KnownRegisters(dict(ranges), dict(ranges))
      state.follow(Instruction(op, args := ", ".join([f"{op[0]}9", *names]), f"{op} {args}"), True)
      low, high = state.active.get(f"{op[0]}9", (0, WORD - 1))
      known += high < WORD - 1
      for _ in range(10):
        found = meaning(*[rng.choice((*ranges[name], rng.randint(*ranges[name]))) for name in names]) % WORD
        assert low <= found <= high, (op, ranges, found, (low, high))
  assert known > 3000
# ***** in loops *****

TILE = "buffer_load_dwordx4 v[4:7], v1, s[4:7], 0 offen"
TRIPS = ".LBB0_9:; %s; s_cmp_lg_u32 s9, 0; s_cbranch_scc1 .LBB0_9"
TO_SCRATCH, FROM_SCRATCH = "scratch_store_dword off, v3, off offset:8", "scratch_load_dword v3, off, off offset:8"
MFMA = "v_mfma_f32_32x32x8_f16 v[0:15], v[0:1], v[2:3], v[0:15]"
TO_LANES, FROM_LANES = "v_writelane_b32 v40, s2, 1", "v_readlane_b32 s2, v40, 1"

@pytest.mark.parametrize("arch, text, found", [
  ("gfx1100", TRIPS % (WATERFALL % (TILE, "s_nop 0")), [f"waterfall: in the loop at .LBB0_9: {TILE}"]),
  ("gfx1100", TRIPS % (WATERFALL % ("buffer_store_b32 v4, v1, s[4:7], 0 offen", "s_nop 0")),
   ["waterfall: in the loop at .LBB0_9: buffer_store_b32 v4, v1, s[4:7], 0 offen"]),
  ("gfx1100", WATERFALL % (TILE, "s_nop 0"), [f"waterfall: outside of loops: {TILE}"]),
  ("gfx1100", TRIPS % f"{TO_SCRATCH}; s_nop 0; {FROM_SCRATCH}", ["scratch: 2 in the loop at .LBB0_9"]),
  ("gfx942", f".LBB0_9:; {MFMA}; s_cbranch_execz .LBB0_8; {FROM_SCRATCH}; .LBB0_8:; s_cbranch_scc1 .LBB0_9", ["scratch: 1 in the loop at .LBB0_9"]),
  ("gfx90a", TRIPS % "buffer_load_dword v3, off, s[0:3], 0 offset:8", ["scratch: 1 in the loop at .LBB0_9"]),
  ("gfx942", f"{TO_LANES}; {TRIPS % FROM_LANES}", ["scalar spills: 1 in the loop at .LBB0_9"]),
  ("gfx942", TRIPS.replace("9", "8") % f"{TO_LANES}; {TRIPS % FROM_LANES}; {FROM_LANES}",
   ["scalar spills: 2 in the loop at .LBB0_8", "scalar spills: 1 in the loop at .LBB0_9"]),
  ("gfx942", TRIPS.replace("9", "8") % f"{TO_LANES}; {TRIPS % f'{MFMA}; {FROM_LANES}'}", ["scalar spills: 1 in the loop at .LBB0_9"])])
def test_what_a_loop_should_not_have_is_found(arch:str, text:str, found:list[str]) -> None: assert of(text, arch) == found

@pytest.mark.parametrize("arch, text", [
  ("gfx1100", TRIPS % (WATERFALL % ("s_nop 0", TILE))), ("gfx1100", TRIPS % f"v_readfirstlane_b32 s4, v0; {TILE}"),
  ("gfx1100", f"{TO_SCRATCH}; {TRIPS % TILE}; {FROM_SCRATCH}"), ("gfx90a", TRIPS % "buffer_load_dword v3, v1, s[0:3], 0 offen"),
  ("gfx942", f"{TO_LANES}; {TRIPS % TILE}; {FROM_LANES}"), ("gfx942", TRIPS % "v_readlane_b32 s2, v41, 1"), ("gfx950", LOOP % (TILE, "s_nop 0")),
  ("gfx942", TRIPS.replace("9", "8") % f"{FROM_LANES}; {TRIPS % MFMA}; {TO_LANES}"),                                # runs once for a whole loop
  ("gfx942", f".LBB0_9:; {MFMA}; s_cbranch_vccz .LBB0_8; {FROM_SCRATCH}; .LBB0_8:; s_cbranch_scc1 .LBB0_9")])      # a rescale in few iterations
def test_other_loops_are_left_alone(arch:str, text:str) -> None: assert of(text, arch) == []
# ***** kernels *****

def dbias_text(arch:str) -> str:
  # Returns the source of the kernel of a bias's gradient, where queries do not fill the last tile.
  # the bias has a row for each query
  p = replace(problem(Sq=83, Sk=71, extras=dict(bias=np.zeros((1, 2, 83, 71), np.float32))), return_lse=True)
  chip = get_chip(arch)
  args = [UOp.placeholder(shape, TYPES[dtype], i) for i, (shape, dtype) in enumerate(dbias_arguments(p).values())]
  return render(dbias_of(p, chip, choose_bias_tile(p, chip))(*args), arch)

def test_stored_values_are_computed_before_branches(monkeypatch:pytest.MonkeyPatch) -> None:
  # If a branch stores a value, the kernels compute the value before the branch. Otherwise clang 22 moves matrix instructions into `if (row < Sq)`,
  # where some lanes are not active.
  def found() -> list[str]: return [x for x in findings(assembly(dbias_text("gfx1100"), "gfx1100")) if x.startswith("across lanes")]
  assert found() == []
  monkeypatch.setattr(renderers, "made_before_branches", lambda uops: {})
  assert found() and all("v_wmma" in x for x in found())

def test_other_values_are_computed_in_the_branch() -> None:
  # Values that a branch of the dbias kernel stores to LDS are computed inside the branch, so that waves that skip the branch do not compute them.
  # Only values that are stored to global memory are computed before the branch.
  text = dbias_text("gfx1100")
  stored = re.findall(r"if \(.*\) \{\n +\*\((buf|data)\w+\+.*\) = (\w+);", text)
  before = {of: {f'asm volatile("" :: "v"({value}));' in text for space, value in stored if space == of} for of in ("buf", "data")}
  assert before == {"buf": {False}, "data": {True}}

# ***** the command *****

def run(*args:object) -> tuple[int, list[str]]:
  done = CliRunner().invoke(main, ["check", *map(str, args)])
  if done.exception is not None and not isinstance(done.exception, SystemExit): raise done.exception
  return done.exit_code, done.output.splitlines()

@pytest.fixture
def ours(monkeypatch:pytest.MonkeyPatch) -> list[Spec]:
  # Replaces attn's kernels by three small sample kernels, of which two have a fault.
  specs = [Spec("gfx942", 64), Spec("gfx1100", 64), Spec("gfx1201", 64)]
  def kernel_source(spec:Spec, llvm:int, shape:Shape|None) -> source.Source:
    text, leave = sample(spec.arch, spec.d), "  if (t&1) return;\n  l = __builtin_amdgcn_update_dpp(0.0f, l, 0xb1, 15, 15, true);\n"
    # some lanes return before an operation across lanes; for gfx1201 only if lengths are no powers of two
    if spec.arch == "gfx1100" or (spec.arch == "gfx1201" and shape is not None): text = text.replace("  float r = ", leave + "  float r = ")
    return source.Source(text, spec.d, spec.d, 32, 128)
  monkeypatch.setattr(source, "kernel_source", kernel_source)
  monkeypatch.setattr(costs, "SPECS", specs)
  return specs

def test_the_command_looks_at_every_kernel(ours:list[Spec]) -> None:
  status, lines = run()
  kernels = [re.fullmatch(r"gfx(\w+)/64/float16/full(.*) under clang \d+: across lanes: .*", x) for x in lines]
  assert status == 1 and [x and x.groups() for x in kernels] == [("1100", ""), ("1100", " of uneven rows"), ("1201", " of uneven rows")]
  assert run("--arch", "gfx942") == (0, []) and run("gfx942/64") == (0, []) and run("gfx1100/64") == (1, lines[:2])

def test_uneven_rows() -> None:
  # `uneven_shape` gives a problem for checks of machine code in which the last tiles are not full: the number of queries is no multiple of 128, and
  # the number of keys no multiple of 16. With a causal mask, the last query sees all keys.
  p = problem_of_spec(spec := Spec("gfx942", 64, mask="causal"), uneven_shape(spec))
  assert (p.Sq, p.Sk, p.H, p.Hkv, p.offset, p.window) == (4000, 4133, 32, 8, 133, (-1, 0)) and p.Sq % 128 and p.Sk % 16
  latent = problem_of_spec(spec := Spec("gfx942", 576, kernel="mla"), uneven_shape(spec))
  assert (latent.Sq, latent.Sk, latent.offset) == (2, 4133, 4131)

def test_the_command_looks_at_files(tmp_path:Path) -> None:
  (file := tmp_path/"kernel.s").write_text(f"k:\nv_cmpx_gt_i32_e32 v0, v1\n{WMMA}\ns_endpgm")
  assert run(file, "--arch", "gfx1100") == (1, [f"{file}: across lanes: behind k, where lanes may be off: {WMMA}"])
  with pytest.raises(ValueError, match="doesn't name its chip"): run(file)
  file.write_text("nothing")
  with pytest.raises(ValueError, match="no AMDGPU code found"): run(file, "--arch", "gfx1100")

def test_kernels_for_other_vendors_are_refused() -> None:
  with pytest.raises(ValueError, match=r"sm_90/64/float16/full: checks are only for AMD's chips"): run("sm_90/64")

