"""The chips, one row each, with everything that anyone derives from a chip: kernels, dispatch, the search for tiles, the report on machine code, the
disassembler, the roofline, error messages. The emulator alone has tables of its own: that the two agree is a test.

Sources
  [llvm]  LLVM, include/llvm/BinaryFormat/ELF.h (EF_AMDGPU_MACH_AMDGCN_*); lib/Target/AMDGPU/AMDGPU.td and AMDGPUBaseInfo.cpp: register files and
          their granules.
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
from dataclasses import dataclass
from attn.chips.families import CDNA2, CDNA3, CDNA4, NVIDIA, OTHER, RDNA1, RDNA2, RDNA3, RDNA4, Family, Pipes
from attn.chips.matrix import Matrix

LLVM = 22    # the release of the compiler with which tiles are chosen where none is named: on the emulator there is none

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
    """What its instructions cost, of a chip in MODELLED."""
    assert self.unit.pipes is not None, f"{self.name} has no machine model"
    return self.unit.pipes
  def peak(self, card:Card) -> float:
    """Dense 16-bit TFLOP/s of one of its cards."""
    return card.cus*self.pipes.flops*card.ghz/1e3
  def __str__(self) -> str: return self.name if self.unit is OTHER else f"{self.name} ({self.products})"

CHIPS: dict[str, Chip] = {chip.name: chip for chip in (
  Chip("gfx90a", CDNA2, 65536, (Card("MI250X", 110, 1.7, 1638, 4096), Card("MI250", 104, 1.7, 1638, 4096), Card("MI210", 104, 1.7, 1638, 4096)),
       machine=0x3f, searched=True),
  Chip("gfx942", CDNA3, 65536, (Card("MI300X", 304, 2.1, 5300, 16384), Card("MI308X", 0), Card("MI325X", 304, 2.1, 6000, 16384)),
       machine=0x4c, searched=True),
  Chip("gfx950", CDNA4, 163840, (Card("MI350X", 256, 2.2, 8000, 16384), Card("MI355X", 256, 2.4, 8000, 16384)), machine=0x4f, searched=True),
  Chip("gfx1100", RDNA3, 65536, (Card("RX 7900 XTX", 96, 2.5, 960, 1536), Card("RX 7900 XT", 84), Card("W7900", 96)), registers=1536, granule=24,
       machine=0x41, searched=True),
  Chip("gfx1101", RDNA3, 65536, (Card("RX 7800 XT", 60, 2.43, 624, 1024), Card("RX 7700 XT", 54)), registers=1536, granule=24, machine=0x46),
  Chip("gfx1102", RDNA3, 65536, (Card("RX 7600", 32, 2.655, 288, 512),), registers=1024, granule=16, machine=0x47),
  Chip("gfx1103", RDNA3, 65536, (Card("Radeon 780M", 12, 2.7, 120),), registers=1024, granule=16, machine=0x44),
  Chip("gfx1150", RDNA3, 65536, (Card("Radeon 890M (Strix Point)", 16, 2.9, 120),), registers=1024, granule=16, machine=0x43),
  Chip("gfx1151", RDNA3, 65536, (Card("Ryzen AI Max (Strix Halo)", 40, 2.9, 256),), registers=1536, granule=24, machine=0x4a),
  Chip("gfx1152", RDNA3, 65536, (Card("Radeon 860M (Krackan Point)", 8, 3.0, 128),), registers=1024, granule=16, machine=0x55),
  Chip("gfx1200", RDNA4, 65536, (Card("RX 9060 XT", 32, 3.13, 320, 512),), registers=1536, granule=24, machine=0x48),
  Chip("gfx1201", RDNA4, 65536, (Card("RX 9070 XT", 64, 2.97, 645, 1024), Card("RX 9070", 56)), registers=1536, granule=24, machine=0x4e,
       searched=True),
  Chip("gfx1010", RDNA1, 65536, (Card("RX 5700 XT", 40), Card("RX 5700", 36))),
  Chip("gfx1030", RDNA2, 65536, (Card("RX 6900 XT", 80), Card("RX 6800 XT", 72))),
  Chip("sm_80", NVIDIA, 166912, (Card("A100", 108), Card("A30", 56))),
  Chip("sm_86", NVIDIA, 101376, (Card("RTX 30", 84), Card("A10", 72), Card("A40", 84))),
  Chip("sm_89", NVIDIA, 101376, (Card("RTX 40", 128), Card("L4", 58), Card("L40S", 142))),
  Chip("sm_90", NVIDIA, 232448, (Card("H100", 132), Card("H200", 132), Card("GH200", 132)), wgmma=True),
  Chip("sm_120", NVIDIA, 101376, (Card("RTX 50", 170),)),
)}
MODELLED = tuple(name for name, chip in CHIPS.items() if chip.unit.pipes is not None)   # whose machine code has bounds
SEARCHED = tuple(name for name, chip in CHIPS.items() if chip.searched)                 # one of each of AMD's families

def get_chip(name:str) -> Chip:
  """The row of `name`, such as "gfx942" or "gfx942:sramecc+:xnack-". Raises ValueError for a name that is not in the table."""
  if (chip := CHIPS.get(name.split(":")[0])) is None:
    raise ValueError(f"arch={name!r} has no matrix unit that these kernels know; supported: {', '.join(CHIPS)}")
  return chip

def other_chip(name:str, lds:int, serial:bool=False) -> Chip:
  """A row for a device that is not in the table: what it says of itself. The number of its compute units is not known, 0."""
  return Chip(name, OTHER, lds, (Card(name, 0),), serial=serial)

def modelled(name:str) -> Chip:
  """The row of a chip whose machine code has bounds. Raises ValueError for another."""
  if name not in MODELLED: raise ValueError(f"no machine model for {name!r}: known are {', '.join(MODELLED)}")
  return CHIPS[name]
