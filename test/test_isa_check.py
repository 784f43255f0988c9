"""What the checks of machine code find, and what they leave alone: small assembly texts, with a fault planted or without one."""
from __future__ import annotations
import re
from pathlib import Path
import pytest
from click.testing import CliRunner
from attn.isa import costs, source
from attn.isa.__main__ import main
from attn.isa.check import findings
from attn.isa.source import Spec
from isa_sample import sample

def of(text:str, arch:str) -> list[str]: return findings("k:\n" + text.replace("; ", "\n") + "\ns_endpgm", arch)

# ***** across lanes *****

SWAP, WMMA = "v_permlane32_swap_b32_e32 v0, v1", "v_wmma_f32_16x16x16_f16 v[0:7], v[0:7], v[8:15], v[0:7]"
MEET = "s_or_b64 exec, exec, s[2:3]"
IF = "s_and_saveexec_b64 s[2:3], vcc; s_cbranch_execz .LBB0_2"
# if (c) ... else ..., as clang has it
IF_ELSE = f"{IF}; %s; s_xor_b64 s[2:3], exec, s[2:3]; .LBB0_2:; s_or_saveexec_b64 s[2:3], s[2:3]; %s; s_xor_b64 exec, exec, s[2:3]; {MEET}; %s"
# a loop that lanes leave one by one, inside a branch
LOOP = ("s_mov_b64 s[4:5], 0; .LBB0_1:; v_cmp_gt_i32_e32 vcc, v1, v2; %s; s_or_b64 s[4:5], vcc, s[4:5]; s_andn2_b64 exec, exec, s[4:5]; "
        "s_cbranch_execnz .LBB0_1; s_or_b64 exec, exec, s[4:5]; %s")
# a loop over the values that lanes hold
WATERFALL = ("s_mov_b32 s2, exec_lo; .LBB0_1:; v_readfirstlane_b32 s4, v0; v_cmp_eq_u32_e32 vcc_lo, s4, v0; s_and_saveexec_b32 s3, vcc_lo; %s; "
             "s_xor_b32 exec_lo, exec_lo, s3; s_cbranch_execnz .LBB0_1; s_mov_b32 exec_lo, s2; %s")

@pytest.mark.parametrize("arch, text", [
  ("gfx950", f"{IF}; {SWAP}; .LBB0_2:; {MEET}"), ("gfx950", f"{IF}; .LBB0_2:; {SWAP}; {MEET}"),
  ("gfx950", IF_ELSE % (SWAP, "s_nop 0", "s_nop 0")), ("gfx950", (IF_ELSE % ("s_nop 0", "s_nop 0", "s_nop 0")).replace(MEET, f"{SWAP}; {MEET}")),
  ("gfx950", LOOP % (SWAP, "s_nop 0")), ("gfx1100", WATERFALL % (WMMA, "s_nop 0")),
  ("gfx950", f"s_and_saveexec_b64 s[2:3], vcc; s_mov_b32 s3, 0; {MEET}; {SWAP}"),                  # one half of the mask is lost
  ("gfx950", f"s_cbranch_scc0 .LBB0_2; s_and_saveexec_b64 s[2:3], vcc; .LBB0_2:; {SWAP}"),         # on one of two ways
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
  ("gfx950", IF_ELSE % ("s_nop 0", SWAP, SWAP)),                                                     # EXEC is whole for an instant between the two
  ("gfx950", LOOP % ("s_nop 0", SWAP)), ("gfx950", f"{IF}; {LOOP % ('s_nop 0', 's_nop 0')}; .LBB0_2:; {MEET}; {SWAP}"),
  ("gfx1100", WATERFALL % ("s_nop 0", WMMA)),
  ("gfx950", f"s_cmp_eq_u32 s0, 0; s_cbranch_scc1 .LBB0_2; {SWAP}; .LBB0_2:; {SWAP}"),               # a branch of the whole wave
  ("gfx950", f"s_and_b64 vcc, exec, vcc; s_cbranch_vccz .LBB0_2; {SWAP}; .LBB0_2:; {SWAP}"),
  ("gfx950", f"s_and_saveexec_b64 s[2:3], vcc; s_mov_b64 exec, -1; {SWAP}"), ("gfx950", f"s_or_saveexec_b64 s[2:3], -1; {SWAP}"),
  # a mask that was put aside in lanes of a vector register
  ("gfx1100", "s_and_saveexec_b32 s2, vcc_lo; v_writelane_b32 v40, s2, 1; s_mov_b32 s2, 0; v_readlane_b32 s3, v40, 1; "
              f"s_mov_b32 exec_lo, s3; {WMMA}"),
  # masks inside masks, with else
  ("gfx950", f"{IF}; s_and_saveexec_b64 s[6:7], s[8:9]; s_xor_b64 s[6:7], exec, s[6:7]; s_or_saveexec_b64 s[6:7], s[6:7]; "
             f"s_xor_b64 exec, exec, s[6:7]; s_or_b64 exec, exec, s[6:7]; .LBB0_2:; {MEET}; {SWAP}")])
def test_whole_waves_are_left_alone(arch:str, text:str) -> None: assert of(text, arch) == []

def test_each_function_of_a_text_is_looked_at() -> None:
  text = f"one:\ns_nop 0\ns_endpgm\ntwo:\ns_and_saveexec_b32 s2, vcc_lo\n{WMMA}\ns_endpgm\nthree:\n{WMMA}\ns_endpgm"
  assert findings(text, "gfx1100") == [f"across lanes: behind two, where lanes may be off: {WMMA}"]

# ***** the command *****

def run(*args:object) -> tuple[int, list[str]]:
  done = CliRunner().invoke(main, ["check", *map(str, args)])
  if done.exception is not None and not isinstance(done.exception, SystemExit): raise done.exception
  return done.exit_code, done.output.splitlines()

@pytest.fixture
def ours(monkeypatch:pytest.MonkeyPatch) -> list[Spec]:
  """Samples in the place of our kernels, and two specs in the place of all; in the one for gfx1100 some lanes leave before the end."""
  specs = [Spec("gfx942", 64), Spec("gfx1100", 64)]
  def kernel_source(spec:Spec, llvm:int) -> source.Source:
    text, leave = sample(spec.arch, spec.d), "  if (t&1) return;\n  l = __builtin_amdgcn_update_dpp(0.0f, l, 0xb1, 15, 15, true);\n"
    if spec.arch == "gfx1100": text = text.replace("  float r = ", leave + "  float r = ")
    return source.Source(text, spec.d, spec.d, 32, 128)
  monkeypatch.setattr(source, "kernel_source", kernel_source)
  monkeypatch.setattr(costs, "SPECS", specs)
  return specs

def test_the_command_looks_at_every_kernel(ours:list[Spec]) -> None:
  status, lines = run()
  assert status == 1 and lines and all(re.match(r"gfx1100/64/float16/full under clang \d+: across lanes: ", x) for x in lines)
  assert run("--arch", "gfx942") == (0, []) and run("gfx942/64") == (0, []) and run("gfx1100/64") == (1, lines)

def test_the_command_looks_at_files(tmp_path:Path) -> None:
  (file := tmp_path/"kernel.s").write_text(f"k:\nv_cmpx_gt_i32_e32 v0, v1\n{WMMA}\ns_endpgm")
  assert run(file, "--arch", "gfx1100") == (1, [f"{file}: across lanes: behind k, where lanes may be off: {WMMA}"])
  with pytest.raises(ValueError, match="doesn't name its chip"): run(file)
  file.write_text("nothing")
  with pytest.raises(ValueError, match="no AMDGPU code found"): run(file, "--arch", "gfx1100")

def test_kernels_for_other_vendors_are_refused() -> None:
  with pytest.raises(ValueError, match=r"sm_90/64/float16/full: checks are of AMD's chips"): run("sm_90/64")

