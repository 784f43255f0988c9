"""The problems of a report: twelve for GPUs, and twelve of the same kinds that take seconds on the emulator and on a CPU."""
from __future__ import annotations
from dataclasses import dataclass
from attn.measure.rows import heads_text
from attn.problem import BYTES, Problem

OF_FORWARD, OF_BACKWARD, OF_DECODE = REPORT_KINDS = ("forward", "backward", "decode")
BF16, FP16 = "bfloat16", "float16"
COUNTED_AS = {OF_FORWARD: 1.0, OF_DECODE: 1.0, OF_BACKWARD: 2.5}     # operations that count, as multiples of forward's: see bench.py

@dataclass(frozen=True)
class ReportedShape:
  """A problem of a report: its sizes, dtype and mask."""
  # forward, the gradients of q, k and v (backward), or one query for each sequence (decode)
  kind: str
  B: int
  H: int
  Hkv: int
  Sq: int
  Sk: int
  D: int
  dtype: str
  causal: bool

  def __post_init__(self) -> None:
    if self.kind not in REPORT_KINDS: raise ValueError(f"kind: must be one of {', '.join(REPORT_KINDS)}, not {self.kind!r}")
    if self.dtype not in (BF16, FP16): raise ValueError(f"dtype: must be {BF16} or {FP16}, not {self.dtype!r}")
    for name in ("B", "H", "Hkv", "Sq", "Sk", "D"):
      if getattr(self, name) < 1: raise ValueError(f"{name}: must be at least 1, not {getattr(self, name)}")
  def __str__(self) -> str:
    return (f"{self.kind} ({self.B}, {heads_text(self.H, self.Hkv)}, {self.Sq} x {self.Sk}, {self.D}) {self.dtype}"
            f"{' causal' if self.causal else ''}")
  @property
  def problem(self) -> Problem:
    return Problem(self.B, self.H, self.Hkv, self.Sq, self.Sk, self.D, self.D, dtype=self.dtype, out_dtype=self.dtype,
                   softmax_scale=self.D**-0.5, window=(-1, 0 if self.causal else -1), offset=self.Sk - self.Sq, num_splits=1)
  @property
  def flops(self) -> float: return self.problem.flops*COUNTED_AS[self.kind]
  @property
  def bytes_read(self) -> int:
    """Bytes of K and V, each read once."""
    return 2*self.B*self.Hkv*self.Sk*self.D*BYTES[self.dtype]

def square(kind:str, B:int, H:int, Hkv:int, N:int, D:int, dtype:str, causal:bool) -> ReportedShape:
  return ReportedShape(kind, B, H, Hkv, N, N, D, dtype, causal)

def decoded(B:int, H:int, Hkv:int, Sk:int, D:int, dtype:str) -> ReportedShape: return ReportedShape(OF_DECODE, B, H, Hkv, 1, Sk, D, dtype, False)

REPORT_SHAPES: dict[str, tuple[ReportedShape, ...]] = {
  "full": (
    square(OF_FORWARD, 4, 16, 16, 4096, 128, FP16, False), square(OF_FORWARD, 4, 16, 16, 4096, 128, BF16, True),
    square(OF_FORWARD, 8, 16, 16, 2048, 64, FP16, False), square(OF_FORWARD, 8, 16, 16, 2048, 64, BF16, True),
    square(OF_FORWARD, 1, 32, 8, 8192, 128, BF16, True), square(OF_FORWARD, 1, 16, 16, 4096, 256, FP16, False),
    square(OF_BACKWARD, 4, 16, 16, 2048, 128, FP16, False), square(OF_BACKWARD, 4, 16, 16, 2048, 128, BF16, True),
    square(OF_BACKWARD, 8, 16, 16, 2048, 64, BF16, False),
    decoded(1, 32, 8, 16384, 128, FP16), decoded(4, 32, 8, 16384, 128, BF16), decoded(8, 32, 32, 4096, 64, BF16)),
  "small": (
    square(OF_FORWARD, 1, 2, 2, 128, 128, FP16, False), square(OF_FORWARD, 1, 2, 2, 128, 128, BF16, True),
    square(OF_FORWARD, 1, 2, 2, 128, 64, FP16, False), square(OF_FORWARD, 1, 2, 2, 128, 64, BF16, True),
    square(OF_FORWARD, 1, 4, 1, 128, 128, BF16, True), square(OF_FORWARD, 1, 1, 1, 64, 256, FP16, False),
    square(OF_BACKWARD, 1, 2, 2, 64, 128, FP16, False), square(OF_BACKWARD, 1, 2, 2, 64, 128, BF16, True),
    square(OF_BACKWARD, 1, 2, 2, 64, 64, BF16, False),
    decoded(1, 4, 1, 512, 128, FP16), decoded(2, 4, 1, 512, 128, BF16), decoded(2, 2, 2, 256, 64, BF16)),
}
