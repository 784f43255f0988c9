"""One table row per target: everything about a chip that a kernel, the dispatcher or an error message needs to know."""
from __future__ import annotations
from dataclasses import dataclass

@dataclass(frozen=True)
class Arch:
  name: str
  family: str          # the matrix unit's generation: the key of fragment.MATRIX
  wave: int            # lanes of a wave
  lds: int             # bytes of LDS (shared memory) a workgroup may have
  vgprs: int           # vector registers (of one lane) a wave may have
  bf16_pack: bool      # converts two fp32 to bf16 in one instruction
  cus: int             # compute units (multiprocessors) of the largest card
  chips: str           # cards that have it
  wgmma: bool = False  # multiplies for warpgroups, from shared memory
  tuned: bool = False  # a real device, whose tiles may come from its own TUNE=1 (attn/tuned.py)

  @property
  def busy_waves(self) -> int:
    """Waves that keep a compute unit busy, beyond which they share it: one for each SIMD (of RDNA, those of one CU), on NVIDIA two, measured on an
    H200 (docs/nvidia.md)."""
    return 2 if self.family.startswith("rdna") else 8 if self.family == "nvidia" else 4
  def __str__(self) -> str: return f"{self.name} ({self.chips})"

ARCHS: dict[str, Arch] = {a.name: a for a in (
  Arch("gfx942", "cdna3", 64, 65536, 512, False, 304, "MI300X, MI308X, MI325X"),
  Arch("gfx950", "cdna4", 64, 163840, 512, True, 256, "MI350X, MI355X"),
  Arch("gfx1100", "rdna3", 32, 65536, 256, False, 96, "RX 7900 XTX, RX 7900 XT, W7900"),
  Arch("gfx1101", "rdna3", 32, 65536, 256, False, 60, "RX 7800 XT, RX 7700 XT"),
  Arch("gfx1151", "rdna3", 32, 65536, 256, False, 40, "Ryzen AI Max (Strix Halo)"),
  Arch("gfx1200", "rdna4", 32, 65536, 256, False, 32, "RX 9060 XT"),
  Arch("gfx1201", "rdna4", 32, 65536, 256, False, 64, "RX 9070 XT, RX 9070"),
  Arch("sm_80", "nvidia", 32, 166912, 255, True, 108, "A100, A30"),
  Arch("sm_86", "nvidia", 32, 101376, 255, True, 84, "RTX 30, A10, A40"),
  Arch("sm_89", "nvidia", 32, 101376, 255, True, 142, "RTX 40, L4, L40S"),
  Arch("sm_90", "nvidia", 32, 232448, 255, True, 132, "H100, H200, GH200", True),
)}

def get_arch(name:str) -> Arch:
  """The row of `name`, such as "gfx942" or "gfx942:sramecc+:xnack-". Raises ValueError for a name that is not in the table."""
  if (arch := ARCHS.get(name.split(":")[0])) is None:
    raise ValueError(f"arch={name!r} has no matrix unit that these kernels know; supported: {', '.join(ARCHS)}")
  return arch
