"""What there is to say of a family of chips, those with the same matrix unit, and of a chip: the fields of their rows. Each family has a file beside
this one, with all that is known of it.

Sources
  [calc]  AMD Matrix Instruction Calculator (github.com/ROCm/amd_matrix_instruction_calculator): "execution cycles" and "co-execution cycles
          possible" of each MFMA and WMMA of CDNA2, CDNA3, RDNA3 and RDNA4.
  [llvm]  LLVM, lib/Target/AMDGPU/SISchedule.td: passes per MFMA (1 pass = 4 cycles) of gfx940, and of gfx950, which runs the older shapes at half
          rate; AMDGPUBaseInfo.cpp: sizes and granules of register files and LDS, wave slots.
  [isa]   AMD's documents of the instruction sets CDNA2, CDNA3, CDNA4, RDNA3, RDNA4: widths of waves and SIMDs, LDS banks, quarter-rate
          transcendentals; the last word of a buffer's resource descriptor (MI300 ISA 9.1.5, RDNA3 ISA 8.1.5, RDNA4 ISA 9.1.5).
  [cdna4] AMD CDNA 4 white paper: doubled transcendental rate, 160 KB LDS with 256 bytes per clock of reads.
  [amd]   AMD's data sheets and product pages: compute units, peak engine (boost) clock, memory bandwidth. Of MI250X and MI250
          one die, which is a device of its own. Strix Halo: Radeon 8060S, LPDDR5X-8000 on 256 bits; the other APUs have 128 bits of LPDDR5X-7500,
          of gfx1152 of LPDDR5X-8000. MI308X has no public data sheet.
  [l2]    AMD CDNA 3 white paper: an XCD's L2 has 16 channels, which give 2 KB a cycle together; MI300X has 8 XCDs. ROCm Compute Profiler,
          docs/conceptual/l2-cache.rst: 32 channels in MI200's, of 128 bytes a cycle (AMD CDNA 2 white paper). Assumed: CDNA4's is as CDNA3's, and
          RDNA's has 64 bytes a cycle for each 16 bits of the memory's width, as RDNA's slices have (AMD RDNA white paper).
  [cuda]  NVIDIA, CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": shared memory of a block; data sheets:
          multiprocessors.
"""
from __future__ import annotations
from collections.abc import Mapping
from dataclasses import dataclass, field
from attn.chips.machine import Machine
from attn.chips.matrix import LaneSums, Matrix, Mma
from attn.chips.shapes import BackwardShape, ForwardShape, MlaShape, UpTo

LLVM = 22    # the release of the compiler with which tiles are chosen where none is named: on the emulator there is none

@dataclass(frozen=True)
class Pipes:
  """What instructions cost on one compute unit. Cycles are of one SIMD; bytes per clock are of the LDS that its SIMDs share."""
  simds: int                 # SIMDs per compute unit
  valu: int                  # cycles of a full-rate vector instruction
  trans: int                 # cycles of a transcendental
  lds_read: int              # LDS bytes per clock, reads
  lds_write: int             # LDS bytes per clock, writes
  coissue: bool              # the matrix unit runs beside the vector ALU (CDNA) or on it (RDNA)
  matrix_issue: int          # cycles of vector issue that a matrix instruction takes where it runs beside
  max_waves: int             # wave slots of a SIMD
  lds_granule: int           # bytes
  flops: int                 # dense 16-bit operations per clock of a compute unit
  matrix: Mapping[str, int]  # shape MxNxK, "_2b" for blocks -> cycles

@dataclass(frozen=True)
class Counters:
  """The counters of accesses that are under way, by what they count."""
  load: str
  store: str
  lds: str
  scalar: str
  number: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)    # of s_waitcnt, where there is one: in which bits of its number a
                                                                                     # counter's are, (first, how many), the low ones first
  def most(self, name:str) -> int:
    """The most that a counter counts; as the number of a wait it stands for none."""
    return (1 << sum(bits for _, bits in self.number.get(name, ((0, 6),)))) - 1

@dataclass(frozen=True, eq=False)   # a family is its row
class Family:
  """A generation of matrix units, with what goes with it in each chip that has one."""
  name: str
  wave: int               # lanes of a wave
  vgprs: int              # vector registers (of one lane) a wave may have
  busy_waves: int         # waves that keep a compute unit busy, beyond which they share it: one for each SIMD (of RDNA, those of one CU), on NVIDIA
                          # two, measured on an H200 (docs/nvidia.md)
  bf16_pack: bool = False # converts two fp32 to bf16 in one instruction
  dual_issue: bool = False   # issues two vector instructions of a wave at once that find their registers in different banks: VOPD, RDNA3 ISA 7.6
  dual_dots: tuple[str, ...] = ()   # input dtypes whose dot products are among them
  matrix: Mapping[str, tuple[Matrix, ...]] = field(default_factory=dict)   # input dtype -> AMD's matrix instructions, the preferred one first
  dots: tuple[str, ...] = ()                                     # input dtypes of whose pairs a dot product adds to fp32: they sum a lane's packed P
  sums: Mapping[str, LaneSums] = field(default_factory=dict)     # input dtype -> what begins those sums, from zeros, for which a dot product needs a
                                                                 # move; or sums P where there is none. With neither P is unpacked and added
  descriptor: int = 0     # last word of a buffer's resource descriptor: a raw buffer of 32-bit data whose range check counts bytes
  llvm: int = 0           # the first release of LLVM that knows it, where it is newer than the kernels need
  tables: str = ""        # tinygrad's tables that decode its machine code; "": it has none
  agprs: bool = False     # accumulation registers lie behind a wave's vector registers, in one file
  mma: Mapping[str, Mma] = field(default_factory=dict)           # the same of NVIDIA's
  loads_to_lds: bool = False   # has direct loads to LDS of 16 bytes, and transposing ones from it
  apart: tuple[str, ...] = ()  # input dtypes of kernels in which fp32 operations are better not packed (docs/tried.md)
  packs_anew: bool = False     # clang packs a dword once more for each of its uses, unless told otherwise
  says_lds: bool = False       # a kernel says how much LDS it takes beside what its text declares
  # tiles, the first that fits is taken; where there is none, a cautious one (attn/chips/shapes.py)
  forward: tuple[UpTo[ForwardShape], ...] = ()
  dq: tuple[UpTo[BackwardShape], ...] = ()
  dkdv: tuple[UpTo[BackwardShape], ...] = ()
  plain_dq: tuple[UpTo[BackwardShape], ...] = ()      # tried before those, see attn/choose/backward_tiles.py
  plain_dkdv: tuple[UpTo[BackwardShape], ...] = ()
  latent: tuple[UpTo[MlaShape], ...] = ()             # of mla
  # what reports on machine code, and predictions from it, know of it; None: there are none
  pipes: Pipes|None = None
  counters: Counters|None = None
  machine: Machine|None = None

@dataclass(frozen=True)
class Card:
  """A product that has a chip."""
  name: str
  cus: int            # compute units (multiprocessors); 0: not published
  ghz: float = 0.0    # peak engine clock; 0: not published, or not needed
  gbs: float = 0.0    # memory bandwidth, GB/s
  l2: int = 0         # bytes a cycle that the L2 caches give; 0: not published

@dataclass(frozen=True)
class Chip:
  name: str
  unit: Family            # its matrix unit's generation
  lds: int                # bytes of LDS (shared memory) a workgroup may have; on AMD those of a compute unit, but for RDNA's pairs of them
  cards: tuple[Card, ...]
  registers: int = 512    # vector registers per lane of a SIMD
  granule: int = 8        # in which waves get them
  machine: int = 0        # in the e_flags of a code object (EF_AMDGPU_MACH); 0: of which there are no reports
  wgmma: bool = False     # multiplies for warpgroups, from shared memory
  searched: bool = False  # the search for tiles compiles for this chip of the family (attn/search/forward.py)
  tuned: bool = False     # a real device, whose tiles may come from its own TUNE=1 (attn/cache/tuned.py)
  serial: bool = False    # no workgroups: parts of a kernel are done one after another
  llvm: int = LLVM        # the release of LLVM in the compiler that compiles for it

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
    """Compute units of the largest card."""
    return max(card.cus for card in self.cards)
  @property
  def products(self) -> str: return ", ".join(card.name for card in self.cards)
  @property
  def pipes(self) -> Pipes:
    """Costs of the instructions of a chip in MODELLED."""
    assert self.unit.pipes is not None, f"{self.name} has no machine model"
    return self.unit.pipes
  @property
  def counters(self) -> Counters:
    """Counters that a wave waits on, of a chip in MODELLED."""
    assert self.unit.counters is not None, f"{self.name} has no counters"
    return self.unit.counters
  @property
  def latencies(self) -> Machine:
    assert self.unit.machine is not None, f"{self.name} has no latencies"
    return self.unit.machine
  def peak(self, card:Card) -> float:
    """Dense 16-bit TFLOP/s of one of its cards."""
    return card.cus*self.pipes.flops*card.ghz/1e3
  def __str__(self) -> str: return self.name if self.products == self.name else f"{self.name} ({self.products})"
