"""Data of the family RDNA3, the chips of RX 7000 and Strix: instructions, caches, LDS, tables of tile shapes, and cards."""
from __future__ import annotations
from attn.chips.family import Card, Chip, Counters, Family, Pipes
from attn.chips.machine import ASSUMED, Figure, Machine
from attn.chips.rdna import DBIAS_IN_PIECES, LATENT_ON_RDNA, PLAIN_DKDV_192_ON_RDNA, caches_of_one_die, wmma
from attn.chips.shapes import AT_MOST_ONE, BOTH, NO_OPTION, BackwardShape, ForwardShape, UpTo

RDNA3_MACHINE = Machine(
  turn=Figure(1, "isa"), step=Figure(1, "isa"), vector=Figure(5, "schedule"), vector_to_matrix=Figure(5, ASSUMED),
  vector_to_scalar=Figure(16, ASSUMED),
  dot=Figure(5, ASSUMED), slow=Figure(4, "schedule"), transcendental=Figure(10, "schedule"), beside=Figure(1, "isa"), matrix=Figure(5, ASSUMED),
  matrix_sum=Figure(0, ASSUMED), packed_drain=Figure(0, "isa"), packed_alone=Figure(0, "isa"), scalar=Figure(2, "schedule"),
  scalar_load=Figure(100, ASSUMED), taken=Figure(32, "schedule"), passed=Figure(4, ASSUMED), barrier=Figure(8, ASSUMED),
  lds=Figure(60, ASSUMED),
  lds_ports=Figure(1, ASSUMED), lds_queue=Figure(64, ASSUMED), lds_address=Figure(1, ASSUMED), permute=Figure(60, ASSUMED),
  memory=Figure(376, "chips"), memory_bytes=Figure(64, ASSUMED), memory_queue=Figure(16, ASSUMED), lds_load=Figure(0, "isa"))

# Best first: the first row that fits is taken. A search by predictions from machine code made this table (python -m attn.tune --write). No row was
# measured. Beside each row stand the worst figures over fp16 and bf16, full and causal: the predicted use of the matrix unit, bounds on that use
# (docs/isa.md), and waves per SIMD. A row with `llvm` is for compilers of that release and older ones: for them it replaces the rows without `llvm`
# that have the same head dimension.
FORWARD_ON_RDNA3: tuple[UpTo[ForwardShape], ...] = (
  UpTo(64, ForwardShape(8, 1, 32, fenced=True)),                              # predicted 78.5%, serial 80.5%, issued 75.5%, overlap 87.0%, waves 8
  UpTo(128, ForwardShape(8, 1, 32, fenced=True)),                             # serial 86.5%, issued 81.5%, overlap 90.0%, waves 4
  UpTo(192, ForwardShape(4, 1, 16, q_in_lds=True, fenced=True)),              # serial 90.0%, issued 82.0%, overlap 93.0%, waves 2
  UpTo(256, ForwardShape(4, 1, 16, q_in_lds=True, fenced=True, prefetch=0)),  # predicted 63.0%, serial 91.5%, issued 83.0%, overlap 93.5%, waves 2
)

# chosen by the registers that clang 22 needs; none of them was measured
DQ_ON_RDNA3 = (
  UpTo(64, BackwardShape(4, 16)),
  UpTo(128, BackwardShape(4, 16, (True, False), fenced=2), whole=True),
  UpTo(128, BackwardShape(4, 16, (True, False), fenced=2, prefetch=0, sparing=True)),
  UpTo(256, BackwardShape(2, 16, BOTH, fenced=2, prefetch=0, sparing=True, by_item=True)))
DBIAS_ON_RDNA3 = (*DQ_ON_RDNA3[:2], DBIAS_IN_PIECES, DQ_ON_RDNA3[3])
DKDV_ON_RDNA3 = (
  UpTo(64, BackwardShape(4, 16), whole=True), UpTo(64, BackwardShape(4, 16, fenced=2, prefetch=0)),
  UpTo(64, BackwardShape(4, 16, fenced=2), whole=True, llvm=21), UpTo(64, BackwardShape(4, 16, fenced=2, prefetch=0), llvm=21),
  UpTo(128, BackwardShape(4, 16, BOTH, fenced=2), whole=True),
  UpTo(128, BackwardShape(4, 16, BOTH, fenced=2, prefetch=0, sparing=True, passes=2)),
  UpTo(256, BackwardShape(2, 16, BOTH, fenced=2, prefetch=0, sparing=True, passes=2, read_ahead=3), whole=True),
  UpTo(256, BackwardShape(2, 16, BOTH, fenced=2, prefetch=0, sparing=True, passes=2)))
PLAIN_DQ_ON_RDNA3 = (
  UpTo(64, BackwardShape(4, 32, fenced=2), options=(*NO_OPTION, "alibi", "bias", "dropout_p")),
  UpTo(192, BackwardShape(2, 16, BOTH, fenced=4, prefetch=0, sparing=True, read_ahead=3), options=AT_MOST_ONE),
  UpTo(256, BackwardShape(2, 16, BOTH, fenced=2, prefetch=0, sparing=True, read_ahead=3, by_item=True), options=AT_MOST_ONE))
PLAIN_DKDV_ON_RDNA3 = (UpTo(64, BackwardShape(4, 16, (True, False), fenced=4, prefetch=0), options=("dropout_p",)), PLAIN_DKDV_192_ON_RDNA)

RDNA3 = Family("rdna3", wave=32, vgprs=256, busy_waves=2, dual_issue=True, dual_dots=("float16",), descriptor=0x31004000, tables="rdna3", matrix={
    "float16": (wmma("f16_w32", "half", 1, duplicated=True),), "bfloat16": (wmma("bf16_w32", "short", 1, duplicated=True),)},
  dots=("float16", "bfloat16"),
  pipes=Pipes(simds=2, valu=1, trans=4, lds_read=128, lds_write=128, coissue=False, matrix_issue=0, max_waves=16, lds_granule=1024, flops=512,
              matrix={"16x16x16": 32}),
  forward=FORWARD_ON_RDNA3, dq=DQ_ON_RDNA3, dkdv=DKDV_ON_RDNA3, dbias=DBIAS_ON_RDNA3,
  plain_forward=(UpTo(64, ForwardShape(4, 1, 64, fenced=True, prefetch=0), options=("softcap", "dropout_p")),
                 UpTo(64, ForwardShape(4, 1, 64, fenced=True), options=("window",)),
                 UpTo(128, ForwardShape(4, 1, 32, fenced=True, prefetch=0), options=("window", "softcap", "alibi")),),
  plain_dq=PLAIN_DQ_ON_RDNA3, plain_dkdv=PLAIN_DKDV_ON_RDNA3, latent=LATENT_ON_RDNA,
  counters=Counters("vmcnt", "vscnt", "lgkmcnt", "lgkmcnt", {"vmcnt": ((10, 6),), "lgkmcnt": ((4, 6),)}), machine=RDNA3_MACHINE)

CHIPS_OF_RDNA3 = (
  Chip("gfx1100", RDNA3, 65536, (Card("RX 7900 XTX", 96, 2.5, 960, 1536, 105.4), Card("RX 7900 XT", 84), Card("W7900", 96)), registers=1536,
       granule=24, machine=0x41, searched=True, caches=caches_of_one_die(6, 96, 3494)),
  Chip("gfx1101", RDNA3, 65536, (Card("RX 7800 XT", 60, 2.43, 624, 1024), Card("RX 7700 XT", 54)), registers=1536, granule=24,
       machine=0x46, caches=caches_of_one_die(4, 64, 2330)),
  Chip("gfx1102", RDNA3, 65536, (Card("RX 7600", 32, 2.655, 288, 512),), registers=1024, granule=16, machine=0x47,
       caches=caches_of_one_die(2, 32, 1165)),
  Chip("gfx1103", RDNA3, 65536, (Card("Radeon 780M", 12, 2.7, 120),), registers=1024, granule=16, machine=0x44),
  Chip("gfx1150", RDNA3, 65536, (Card("Radeon 890M (Strix Point)", 16, 2.9, 120),), registers=1024, granule=16, machine=0x43),
  Chip("gfx1151", RDNA3, 65536, (Card("Ryzen AI Max (Strix Halo)", 40, 2.9, 256),), registers=1536, granule=24, machine=0x4a),
  Chip("gfx1152", RDNA3, 65536, (Card("Radeon 860M (Krackan Point)", 8, 3.0, 128),), registers=1024, granule=16, machine=0x55),)
