"""Data of the family CDNA3, the chips of the MI300 series: instructions, caches, LDS, tables of tile shapes, and cards."""
from __future__ import annotations
from attn.chips.cdna import COUNTERS_ON_CDNA, DKDV_ON_CDNA, DQ_ON_CDNA, LATENT_ON_CDNA, PLAIN_DQ_128, SUMS, mfma, mfma_of_bytes
from attn.chips.family import Caches, Card, Chip, Family, Pipes
from attn.chips.machine import ASSUMED, Figure, Machine
from attn.chips.shapes import AT_MOST_ONE, NO_BIAS, NO_OPTION, BackwardShape, ForwardShape, ShapeAtOnce, UpTo

# On CDNA software has to wait for the results of MFMA: the compiler puts enough other instructions, or s_nop, between two dependent instructions.
CDNA3_MACHINE = Machine(
  turn=Figure(4, "profiler"), step=Figure(4, "profiler"), vector=Figure(4, "coissue"), vector_to_matrix=Figure(12, "hazard"),
  vector_to_scalar=Figure(16, "clrx"), dot=Figure(16, "hazard"), slow=Figure(16, ASSUMED), transcendental=Figure(20, "hazard"),
  beside=Figure(0, "coissue"), matrix=Figure(16, "hazard"), matrix_sum=Figure(8, "hazard"), packed_drain=Figure(8, "coissue"),
  packed_alone=Figure(1, "coissue"), scalar=Figure(4, "schedule"), scalar_load=Figure(200, ASSUMED), taken=Figure(32, "schedule"),
  passed=Figure(8, ASSUMED), barrier=Figure(8, ASSUMED),
  lds=Figure(48, "latency"), lds_ports=Figure(2, "profiler"), lds_queue=Figure(64, ASSUMED),
  lds_address=Figure(4, "profiler"), permute=Figure(48, ASSUMED), memory=Figure(650, "latency"), memory_bytes=Figure(64, "fifo"),
  memory_queue=Figure(16, "fifo"), lds_load=Figure(48, ASSUMED))

# Best first: the first row that fits is taken. A search by predictions from machine code made this table (python -m attn.tune --write). No row was
# measured. Beside each row stand the worst figures over fp16 and bf16, full and causal: the predicted use of the matrix unit, bounds on that use
# (docs/isa.md), and waves per SIMD. A row with `llvm` is for compilers of that release and older ones: for them it replaces the rows without `llvm`
# that have the same head dimension.
FORWARD_ON_CDNA3: tuple[UpTo[ForwardShape], ...] = (
  UpTo(64, ForwardShape(4, 1, 64, fenced=True)),                              # predicted 56.5%, serial 51.0%, issued 48.5%, overlap 94.0%, waves 3
  UpTo(64, ForwardShape(8, 1, 64), fills=256, llvm=21),                       # serial 51.5%, issued 49.0%, overlap 93.5%, waves 2
  UpTo(64, ForwardShape(4, 1, 64), llvm=21),                                  # serial 48.0%, issued 46.0%, overlap 83.0%, waves 2
  UpTo(128, ForwardShape(8, 1, 64, fenced=True), fills=256),                  # predicted 62.0%, serial 67.5%, issued 64.0%, overlap 97.0%, waves 2
  UpTo(128, ForwardShape(4, 1, 32, fenced=True)),                             # predicted 57.5%, serial 67.5%, issued 63.5%, overlap 97.0%, waves 2
  UpTo(128, ForwardShape(8, 1, 64), fills=256, llvm=21),                      # serial 68.0%, issued 64.5%, overlap 100.0%, waves 2
  UpTo(128, ForwardShape(4, 1, 32, prefetch=0), llvm=21),                     # serial 55.5%, issued 53.0%, overlap 100.0%, waves 2
  UpTo(192, ForwardShape(4, 1, 32, fenced=True)),                             # predicted 67.0%, serial 76.0%, issued 71.0%, overlap 98.0%, waves 2
  UpTo(256, ForwardShape(4, 1, 32, fenced=True)),                             # serial 78.5%, issued 73.0%, overlap 100.0%, waves 1
  UpTo(256, ForwardShape(4, 1, 32), llvm=21),                                 # serial 78.5%, issued 73.0%, overlap 100.0%, waves 1
)

# Tiles for q, k and v of 8-bit floats: the best of about 30 by the time that is predicted from machine code of clang 22, with scales and a causal
# mask. None was measured.
BYTES_ON_CDNA3 = (
  UpTo(64, ForwardShape(4, 1, 64, prefetch=2)),
  UpTo(128, ForwardShape(4, 1, 32, fenced=True)),
  UpTo(192, ForwardShape(4, 1, 64, fenced=True)),
  UpTo(256, ForwardShape(8, 1, 32, fenced=True, prefetch=2), fills=256), UpTo(256, ForwardShape(4, 1, 32, fenced=True)),
)

# Tiles of the kernel that computes all gradients at once, by head dimension. Without options such a tile must be predicted to be at least 1.2 times
# as fast as two kernels, because the prediction leaves out what atomic additions cost in L2. MI300X at the clock of a GEMM, (4, 16, 4096, D), bf16,
# ms without the small kernels before and after it, in parentheses those of two kernels: D = 64 full 2.12 (2.89), causal 0.99 (1.37), and D = 128 full
# 3.91 (5.39), causal 2.01 (2.68).
AT_ONCE_ON_CDNA3 = {64: (ShapeAtOnce(BackwardShape(4, 32, ahead=6), ("sinks", "kv_lengths", "alibi", "softcap")),),
                    128: (ShapeAtOnce(BackwardShape(4, 32, ahead=16)),)}

LONG_DQ = BackwardShape(4, 32, fenced=8, sparing=True, read_ahead=1)     # of dq above D = 128

# the last two shapes in `pipes` of CDNA3 and of CDNA4 are for 8-bit inputs
CDNA3 = Family("cdna3", wave=64, vgprs=512, busy_waves=4, descriptor=0x00027000, tables="cdna", agprs=True, matrix={
    "float16": (mfma(32, 8, "f16", "half"), mfma(16, 16, "f16", "half")),
    "bfloat16": (mfma(32, 8, "bf16_1k", "short"), mfma(16, 16, "bf16_1k", "short")),
    "fp8e4m3fnuz": (mfma_of_bytes("mfma_f32_32x32x16_fp8_fp8", 16, "long", "0, 0, 0"),)}, dots=("float16",), sums=SUMS,
  pipes=Pipes(simds=4, valu=4, trans=16, lds_read=128, lds_write=128, coissue=True, matrix_issue=4, max_waves=8, lds_granule=512, flops=2048, matrix={
    "32x32x8": 32, "16x16x16": 16, "32x32x4_2b": 64, "16x16x4_4b": 32, "4x4x4_16b": 8, "32x32x16_fp8": 32, "16x16x32_fp8": 16}),
  apart=("float16",), forward=FORWARD_ON_CDNA3, forward_of_bytes=BYTES_ON_CDNA3, dq=DQ_ON_CDNA, dkdv=DKDV_ON_CDNA,
  plain_forward=(UpTo(128, ForwardShape(4, 1, 32, fenced=True), options=("bias",)), UpTo(256, ForwardShape(4, 1, 32), options=("dropout_p",))),
  plain_dq=(UpTo(64, BackwardShape(4, 64, fenced=2), options=(*NO_OPTION, "softcap")),
            UpTo(64, BackwardShape(4, 64, prefetch=0), options=("alibi",)), PLAIN_DQ_128,
            UpTo(128, BackwardShape(4, 64, fenced=8), options=NO_BIAS), *(UpTo(d, BackwardShape(4, 64), options=("bias",)) for d in (64, 128)),
            UpTo(192, LONG_DQ, options=(*NO_OPTION, *NO_BIAS)), UpTo(192, BackwardShape(4, 32, sparing=True, read_ahead=1), options=("bias",)),
            UpTo(256, LONG_DQ, options=AT_MOST_ONE)),
  plain_dkdv=(UpTo(192, BackwardShape(4, 32, fenced=8, read_ahead=1)),
              UpTo(192, BackwardShape(4, 32, fenced=8, sparing=True, read_ahead=1), options=("softcap",))),
  latent=LATENT_ON_CDNA, at_once=AT_ONCE_ON_CDNA3,
  counters=COUNTERS_ON_CDNA, machine=CDNA3_MACHINE)

CACHES_OF_CDNA3 = Caches(8, 4 << 20, 256 << 20, 17200)

CHIPS_OF_CDNA3 = (
  Chip("gfx942", CDNA3, 65536, (Card("MI300X", 304, 2.1, 5300, 16384, 708), Card("MI308X", 0), Card("MI325X", 304, 2.1, 6000, 16384, 843)),
       machine=0x4c, searched=True, fp8="fp8e4m3fnuz", caches=CACHES_OF_CDNA3),)
