"""Classes for the data about hardware: `Family` (all chips with the same matrix unit), `Chip`, and `Card` (a product that contains a chip)."""
from __future__ import annotations
from collections.abc import Mapping
from dataclasses import dataclass, field
from attn.chips.machine import Machine
from attn.chips.matrix import LaneSums, Matrix, Mma
from attn.chips.shapes import BackwardShape, ForwardShape, MlaShape, ShapeAtOnce, UpTo

# Each family has a file in this folder, with all facts about the family, its chips and its cards.
#
# Sources of the data:
# - Cycles of MFMA and WMMA of CDNA2, CDNA3, RDNA3 and RDNA4: AMD Matrix Instruction Calculator ("execution cycles" and "co-execution cycles
#   possible"), github.com/ROCm/amd_matrix_instruction_calculator.
# - Passes (1 pass = 4 cycles) of an MFMA on gfx940 and gfx950: LLVM, lib/Target/AMDGPU/SISchedule.td. gfx950 executes MFMA of the older shapes at
#   half rate.
# - Sizes and granules of register files and LDS, wave slots: LLVM, AMDGPUBaseInfo.cpp.
# - Widths of waves and SIMDs, LDS banks, quarter-rate transcendentals: AMD's documents of the instruction sets CDNA2, CDNA3, CDNA4, RDNA3, RDNA4.
#   The last word of a buffer's resource descriptor: MI300 ISA 9.1.5, RDNA3 ISA 8.1.5, RDNA4 ISA 9.1.5.
# - CDNA4's doubled rate of transcendentals and 160 KB of LDS with 256 bytes per clock of reads: AMD CDNA 4 white paper.
# - Compute units, peak engine (boost) clock, memory bandwidth: AMD's data sheets and product pages. The figures of MI250X and MI250 are for one die,
#   which is a device of its own. Strix Halo: Radeon 8060S, LPDDR5X-8000 on 256 bits; the other APUs have 128 bits of LPDDR5X-7500, gfx1152 has 128
#   bits of LPDDR5X-8000. MI308X has no public data sheet.
# - Bytes that L2 gives in a cycle: the L2 of an XCD has 16 channels, which give 2 KB together, and MI300X has 8 XCDs (AMD CDNA 3 white paper). The
#   L2 of MI200 has 32 channels, of 128 bytes each (ROCm Compute Profiler, docs/conceptual/l2-cache.rst; AMD CDNA 2 white paper). Assumed: the L2 of
#   CDNA4 gives as many bytes as the L2 of CDNA3. Assumed: the L2 of every RDNA chip gives 64 bytes for each 16 bits of the memory's width, as the
#   slices of L2 in AMD's RDNA white paper do.
# - Fastest published 16-bit GEMMs. MI300X and MI325X: AMD, Measuring Max-Achievable FLOPs, part 2, 2025-02-28, bf16; this article also has the
#   clocks (1.207 and 1.447 GHz) and the use of the matrix unit (up to 94%). MI350X: FlyDSL (github.com/tingqli/pyhip, gemm_950_optimization.md).
#   MI355X: HipKittens (arXiv 2511.08083, table 2). RX 7900 XTX, 9070 XT and 9060 XT: PyTorch, the faster of fp16 and bf16
#   (github.com/zzc0721/torch-performance-test-data, issues 58, 173 and 165).
# - Sizes of a die's L2 and of Infinity Cache: ROCm's documentation, "AMD GPU specifications", of 2026. A chip has the sizes of its largest card.
# - Bandwidth of Infinity Cache: AMD CDNA 3 white paper; for RX 7900 XTX, AMD's product page and Chips and Cheese. Assumed: CDNA4 has the bandwidth
#   of CDNA3. Assumed: the other RDNA chips have the bandwidth of RX 7900 XTX for each bit of the memory's width.
# - Shared memory of an NVIDIA block: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability". Multiprocessors: NVIDIA's data
#   sheets.

LLVM = 22    # release of LLVM for which tiles are chosen if no compiler is known, for example on the emulator

@dataclass(frozen=True)
class Pipes:
  """Costs of instructions on one compute unit: cycles on one SIMD, and bytes per clock that LDS, which all SIMDs share, moves."""
  simds: int                 # SIMDs per compute unit
  valu: int                  # cycles of a full-rate vector instruction
  trans: int                 # cycles of a transcendental
  lds_read: int              # LDS bytes per clock, reads
  lds_write: int             # LDS bytes per clock, writes
  coissue: bool              # whether the matrix unit runs beside the vector ALU (True: CDNA) or on it (False: RDNA)
  matrix_issue: int          # cycles of vector issue that a matrix instruction takes where the matrix unit runs beside the vector ALU
  max_waves: int             # wave slots of a SIMD
  lds_granule: int           # bytes by which LDS is allocated
  flops: int                 # dense 16-bit operations per clock of a compute unit
  matrix: Mapping[str, int]  # shape of a matrix instruction -> its cycles; the shape is MxNxK, with "_2b" after it for 2 blocks, "_fp8" for 8 bits

@dataclass(frozen=True)
class Counters:
  """Names of the hardware counters, such as vmcnt, that count a wave's memory accesses which are not complete yet."""
  load: str
  store: str
  lds: str
  scalar: str
  number: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)    # counter -> its bits in the operand of s_waitcnt, where the chip
                                                                                     # has that: (first bit, number of bits), low bits first
  def most(self, name:str) -> int:
    """Returns the largest value to which the counter `name` can count, e.g. 63 for a counter of 6 bits."""
    return (1 << sum(bits for _, bits in self.number.get(name, ((0, 6),)))) - 1

@dataclass(frozen=True, eq=False)   # compared by identity: each family has one row
class Family:
  """What all chips with the same matrix unit share, such as CDNA3: registers, matrix instructions, special instructions and tile shapes."""
  name: str
  wave: int               # lanes of a wave
  vgprs: int              # most vector registers of a wave, per lane
  busy_waves: int         # waves that keep a compute unit busy; more waves only share its rate. AMD: one wave for each SIMD (on RDNA, each SIMD of
                          # one CU). NVIDIA: two waves for each, measured on an H200 (docs/nvidia.md)
  bf16_pack: bool = False # whether one instruction converts two fp32 numbers to bf16
  dual_issue: bool = False   # whether two vector instructions of a wave issue at once if their registers are in different banks: VOPD, RDNA3 ISA 7.6
  dual_dots: tuple[str, ...] = ()   # input dtypes whose dot products issue two at once
  matrix: Mapping[str, tuple[Matrix, ...]] = field(default_factory=dict)   # input dtype -> AMD's matrix instructions, the preferred one first
  dots: tuple[str, ...] = ()                                     # input dtypes with a dot product of pairs in fp32, which sums a lane's packed P
  sums: Mapping[str, LaneSums] = field(default_factory=dict)     # input dtype -> instruction that begins such a sum from zeros (a dot product needs a
                                                                 # move for that), or that makes the whole sum where there is no dot product. With
                                                                 # neither, P is unpacked and added
  descriptor: int = 0     # last word of a buffer's resource descriptor: a raw buffer of 32-bit data whose range check counts bytes
  llvm: int = 0           # first release of LLVM that knows the family, if that is newer than the release which the kernels need anyway
  tables: str = ""        # name of tinygrad's tables that decode the family's machine code; "": tinygrad has none
  agprs: bool = False     # whether accumulation registers lie behind a wave's vector registers, in one register file
  mma: Mapping[str, Mma] = field(default_factory=dict)           # input dtype -> NVIDIA's matrix instruction
  loads_to_lds: bool = False   # whether there are direct 16-byte loads to LDS, and transposing loads from LDS
  apart: tuple[str, ...] = ()  # input dtypes of kernels in which fp32 operations are better not packed (docs/tried.md)
  packs_again: bool = False     # whether clang packs a dword again for each of its uses, unless it is told not to
  says_lds: bool = False       # whether the launch of a kernel must state LDS beyond what the kernel's text declares
  # Tables of tile shapes. The first row that fits is taken. If a table is empty, a cautious shape is used (attn/chips/shapes.py). A table for plain
  # problems is tried before the other one of its kernel: `plain_rows` of attn/choose/rows.py says what a plain problem is.
  forward: tuple[UpTo[ForwardShape], ...] = ()
  forward_of_bytes: tuple[UpTo[ForwardShape], ...] = ()     # for q, k and v of 8-bit floats
  dq: tuple[UpTo[BackwardShape], ...] = ()
  dkdv: tuple[UpTo[BackwardShape], ...] = ()
  dbias: tuple[UpTo[BackwardShape], ...] = ()         # of the kernel for the gradient of a bias; empty: the rows of `dq`
  plain_forward: tuple[UpTo[ForwardShape], ...] = ()
  plain_dq: tuple[UpTo[BackwardShape], ...] = ()
  plain_dkdv: tuple[UpTo[BackwardShape], ...] = ()
  at_once: Mapping[int, tuple[ShapeAtOnce, ...]] = field(default_factory=dict)     # head dimension -> rows for the kernel of all gradients
  latent: tuple[UpTo[MlaShape], ...] = ()             # tiles of mla
  # data for reports on machine code and for predictions from it; None: there are no reports
  pipes: Pipes|None = None
  counters: Counters|None = None
  machine: Machine|None = None

@dataclass(frozen=True)
class Caches:
  """Caches between a chip's compute units and its memory."""
  # A die is a part of the chip with an L2 cache of its own, which the other dies cannot use. The hardware gives workgroups to the dies in turn.
  dies: int = 1              # dies of the chip; CDNA3 and CDNA4: XCDs
  l2: int = 0                # bytes of a die's L2; 0: not published
  shared: int = 0            # bytes of the cache that all dies share (Infinity Cache); 0: there is none
  shared_gbs: float = 0.0    # its bandwidth, GB/s
  group: int = 0             # bytes of K and V over which workgroups that run together may loop; 0: any number

GEMM_USE = 0.94     # use of the matrix unit by the fastest published GEMMs

@dataclass(frozen=True)
class Card:
  """A product (such as a graphics card) that contains a chip."""
  name: str
  cus: int            # compute units (multiprocessors); 0: not published
  ghz: float = 0.0    # peak engine clock; 0: not published, or not needed
  gbs: float = 0.0    # memory bandwidth, GB/s
  l2: int = 0         # bytes a cycle that the L2 caches give; 0: not published
  gemm: float = 0.0   # TFLOP/s of the fastest 16-bit GEMM that was published for the card; 0: none

@dataclass(frozen=True)
class Chip:
  name: str
  unit: Family            # generation of its matrix unit
  lds: int                # most bytes of LDS (shared memory) of a workgroup. On CDNA a compute unit has this LDS; on RDNA a pair has twice as much
  cards: tuple[Card, ...]
  registers: int = 512    # vector registers per lane of a SIMD
  granule: int = 8        # number of registers by which a wave's registers are allocated
  machine: int = 0        # number of the chip in the e_flags of a code object (EF_AMDGPU_MACH); 0: there are no reports for this chip
  wgmma: bool = False     # whether the chip has wgmma: matrix products of a warpgroup, from shared memory
  fp8: str = ""           # format of 8-bit floats that the chip converts by instructions (attn/ops/formats.py); "": none
  short_sums: bool = False    # whether its matrix unit adds products of 8-bit floats with about 14 bits (attn/emulator/chips.py has the sources)
  searched: bool = False  # whether the search for tiles compiles for this chip of the family (attn/search/forward.py)
  tuned: bool = False     # whether this is a real device, whose tiles may come from its own TUNE=1 (attn/cache/tuned.py)
  serial: bool = False    # whether the device has no workgroups: it executes the parts of a kernel one after another
  llvm: int = LLVM        # release of LLVM in the compiler that compiles for it
  caches: Caches = Caches()

  @property
  def family(self) -> str: return self.unit.name
  @property
  def matrix(self) -> Mapping[str, tuple[Matrix, ...]]: return self.unit.matrix
  @property
  def wave(self) -> int: return self.unit.wave
  @property
  def vgprs(self) -> int: return self.unit.vgprs
  @property
  def bf16_pack(self) -> bool: return self.unit.bf16_pack
  @property
  def busy_waves(self) -> int: return self.unit.busy_waves
  @property
  def cus(self) -> int:
    """Number of compute units of the largest card with this chip."""
    return max(card.cus for card in self.cards)
  @property
  def products(self) -> str: return ", ".join(card.name for card in self.cards)
  @property
  def pipes(self) -> Pipes:
    """Costs of the chip's instructions. Raises an error for chips that are not listed in MODELLED."""
    assert self.unit.pipes is not None, f"{self.name} has no rates of instructions"
    return self.unit.pipes
  @property
  def counters(self) -> Counters:
    """Counters of memory accesses for which a wave can wait. Raises an error for chips that are not listed in MODELLED."""
    assert self.unit.counters is not None, f"{self.name} has no counters"
    return self.unit.counters
  @property
  def latencies(self) -> Machine:
    assert self.unit.machine is not None, f"{self.name} has no latencies"
    return self.unit.machine
  def peak(self, card:Card) -> float:
    """Returns the peak rate of 16-bit matrix products (dense, without sparsity) of a card with this chip, in TFLOP/s."""
    return card.cus*self.pipes.flops*card.ghz/1e3
  def sustained(self, card:Card) -> float:
    """Returns the clock in GHz that a card sustains while its matrix units work, or 0 if this clock is not known."""
    # derived from the speed of the card's fastest published GEMM, which is assumed to keep the matrix units busy 94% of the time (GEMM_USE); never
    # above the rated clock
    return min(card.ghz, card.gemm*1e3/(card.cus*self.pipes.flops*GEMM_USE)) if card.cus else 0.0
  def __str__(self) -> str: return self.name if self.products == self.name else f"{self.name} ({self.products})"
