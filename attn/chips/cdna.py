"""Data that CDNA's families share: MFMA instructions, waves of 64 lanes, accumulation registers."""
from __future__ import annotations
from attn.chips.family import Counters
from attn.chips.matrix import LaneSums, Matrix
from attn.chips.shapes import BackwardShape, MlaShape, UpTo

def mfma(M:int, K:int, suffix:str, operand_type:str, exchange:str="bpermute", banks:int=32) -> Matrix:
  """Returns the table row of an MFMA instruction C (M x M) += A (M x K) B (K x M), e.g. 32x32x8f16 for M = 32, K = 8 and `suffix` "f16"."""
  # `suffix` is the text after the sizes in the name of clang's builtin, e.g. "f16" in mfma_f32_32x32x8f16. `operand_type` is the builtin's type for
  # an element of A and B. `exchange` names the instruction by which lanes exchange values: "bpermute" (ds_bpermute) or "permlane_swap"
  # (v_permlane16_swap and v_permlane32_swap). `banks` is the number of LDS banks for reads.
  return Matrix(f"mfma_f32_{M}x{M}x{K}{suffix}", M, M, K, 64, M*K//64, 4, operand_type, "{a}, {b}, {c}, 0, 0, 0", exchange, banks=banks)

def mfma_of_bytes(name:str, K:int, operand_type:str, arguments:str, exchange:str="bpermute", banks:int=32) -> Matrix:
  """Returns the table row of an MFMA instruction on 8-bit floats, C (32 x 32) += A (32 x K) B (K x 32); `name`: clang's builtin."""
  # `name` is the name of clang's builtin without `__builtin_amdgcn_`, `operand_type` the builtin's type for the elements of A and B, `arguments` the
  # text of the arguments after A, B and C; `exchange` and `banks` as for `mfma`
  return Matrix(name, 32, 32, K, 64, K//2, 4, operand_type, f"{{a}}, {{b}}, {{c}}, {arguments}", exchange, size=1, banks=banks)

SUMS = {"float16": LaneSums("mfma_f32_4x4x4f16", "half"), "bfloat16": LaneSums("mfma_f32_4x4x4bf16_1k", "short")}

# LLVM, AMDGPUBaseInfo.cpp: decodeVmcnt, decodeLgkmcnt
COUNTERS_ON_CDNA = Counters("vmcnt", "vmcnt", "lgkmcnt", "lgkmcnt", {"vmcnt": ((0, 4), (14, 2)), "lgkmcnt": ((8, 4),)})

# Backward tiles for every problem. They are chosen by the registers that clang 22 needs. Tiles for problems without options, which CDNA3 and CDNA4
# try before them, are chosen by the predicted time of a problem, too (python -m attn.tune --near). None of them was measured.
DQ_ON_CDNA = (UpTo(128, BackwardShape(4, 32)), UpTo(256, BackwardShape(4, 32, fenced=8, sparing=True), whole=True),
              UpTo(256, BackwardShape(4, 32, fenced=8, prefetch=0, sparing=True)))
DKDV_OF_256_ON_CDNA = (UpTo(256, BackwardShape(4, 32, fenced=8, sparing=True, passes=2, read_ahead=1), whole=True),
                       UpTo(256, BackwardShape(4, 32, fenced=8, prefetch=0, sparing=True, passes=2)))
DKDV_ON_CDNA = (UpTo(64, BackwardShape(4, 32, fenced=2)), UpTo(128, BackwardShape(4, 32, fenced=4)), *DKDV_OF_256_ON_CDNA)
PLAIN_DQ_128 = UpTo(128, BackwardShape(4, 32, fenced=2))     # on CDNA3 and CDNA4

# A wave keeps Q in registers, and no register is spilled. The 64 query rows of a workgroup share each load of K from memory.
LATENT_ON_CDNA = (UpTo(576, MlaShape(4, 32, 1), matrix=1),)
