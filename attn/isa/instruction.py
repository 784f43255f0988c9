"""Classifies AMDGPU instructions by their mnemonic."""
from __future__ import annotations
import functools, re
from dataclasses import dataclass, field

@dataclass(frozen=True)
class Instruction:
  op: str      # mnemonic
  args: str    # operands as written
  text: str    # the whole line, without comments
  line: int|None = field(default=None, compare=False)   # line of the source, if the assembly text says it

  @property
  def kind(self) -> str: return kind_of(self.op, self.args)
  @property
  def name(self) -> str:
    """Mnemonic without the suffix for its encoding."""
    name = re.sub(r"_(e32|e64|sdwa|dpp|e64_dpp|vi|gfx\w+)$", "", self.op)
    # a matrix instruction of CDNA2, such as v_mfma_f32_32x32x8bf16_1k, gets the name that CDNA3 uses for it
    return re.sub(r"^(v_mfma_\w+x\d+)(b?f16)(_1k)?$", r"\1_\2", name)
  @property
  def dpp(self) -> bool: return re.search(r"row_|quad_perm|wave_|dpp|bank_mask", self.args) is not None

# (kind, pattern on the mnemonic); the first match counts. kind_of recognises loads to LDS by their operands
_KINDS = [(kind, re.compile(pattern)) for kind, pattern in [
  ("matrix", r"v_(mfma|smfmac|wmma|swmmac)_"),
  ("lds_permute", r"ds_(bpermute|permute|swizzle)"),
  ("lds_read", r"ds_(read|load)"),
  ("lds_write", r"ds_(write|store)"),
  ("lds_other", r"ds_"),
  ("scratch", r"scratch_"),
  ("load", r"(global|buffer|flat)_load"),
  ("store", r"(global|buffer|flat)_.*store"),
  ("memory_other", r"(global|buffer|flat)_"),
  ("acc_move", r"v_accvgpr"),
  ("lane", r"v_(permlane|readlane|writelane|readfirstlane)"),
  ("exp", r"v_(s_)?exp"),
  ("transcendental", r"v_(s_)?(log|rcp|rsq|sqrt|sin|cos|prng)_"),
  ("nop", r"v_nop|s_(nop|delay_alu|sleep|clause)"),
  ("packed", r"v_pk_"),
  ("dual", r"v_dual_"),
  ("valu", r"v_"),
  ("wait", r"s_wait(cnt|_)"),
  ("barrier", r"s_barrier"),
  ("branch", r"s_(branch|cbranch|setpc|swappc|endpgm|getpc)"),
  ("hint", r"s_(setprio|sched|iglp|set_)"),
  ("scalar_load", r"s_(load|buffer_load|dcache)"),
  ("salu", r"s_"),
  ("other", r""),
]]
KINDS = [kind for kind, _ in _KINDS] + ["load_to_lds"]
VECTOR = ("valu", "packed", "dual", "acc_move", "lane")   # the vector ALU without transcendentals and matrices

@functools.lru_cache(maxsize=8192)
def kind_of(op:str, args:str="") -> str:
  """Returns the kind of an instruction, such as "matrix" or "load": one of KINDS."""
  kind = next(kind for kind, pattern in _KINDS if pattern.match(op))
  if kind == "load" and ("_lds_" in op or re.search(r"\blds\b", args)): return "load_to_lds"
  # CDNA2 has no other instruction for scratch (a lane's own memory, for spilled registers) than a buffer access without a per-lane address
  return "scratch" if kind in ("load", "store") and op.startswith("buffer_") and re.search(r"\boff\b", args) else kind

_SHAPE = re.compile(r"_(\d+)x(\d+)x(\d+)(?:_(\d+)b)?")

def matrix_shape(op:str) -> tuple[str, int]:
  """Returns (shape, floating point operations) of a matrix instruction, for example ("32x32x8", 16384)."""
  if (m:=_SHAPE.search(op)) is None: return "?", 0
  rows, columns, depth, blocks = (int(x or 1) for x in m.groups())
  # The shape of an instruction of 8-bit floats, which some chips compute in fewer cycles, ends in "_fp8". An instruction of 4x4 blocks counts 0
  # operations: kernels use it to add up numbers within a lane, and it computes no part of attention's products.
  of = "_fp8" if "fp8_fp8" in op else f"_{blocks}b" if blocks > 1 else ""
  return f"{rows}x{columns}x{depth}{of}", 2*rows*columns*depth*blocks*(rows > 4)

def speed_of_products(op:str) -> int:
  """Returns the matrix unit's peak rate for this instruction's operands, relative to 16-bit operands: 2 for 8-bit floats, else 1."""
  return 2 if "fp8_fp8" in op or "f8f6f4" in op else 1

def access_bytes(op:str) -> int:
  """Returns the number of bytes that a memory instruction moves per lane."""
  twice = 2 if re.search(r"read2|write2|load_2addr|store_2addr", op) else 1
  if m:=re.search(r"dwordx(\d)", op): return 4*int(m[1])*twice
  if m:=re.search(r"_b(\d+)", op): return int(m[1])//8*twice
  if "dword" in op: return 4
  if m:=re.search(r"_[ui](\d+)", op): return int(m[1])//8*twice
  if "short" in op or "d16" in op: return 2
  return 1 if "byte" in op else 4
