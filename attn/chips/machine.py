"""The units of a compute unit as stepping through machine code sees them: their rates and latencies. Beside each figure stands the source that it is
from, or "assumed".

Cycles are of the shader clock.
"""
from __future__ import annotations
from dataclasses import dataclass, fields
from typing import NamedTuple

ASSUMED = "assumed"
ORIGINS = {
  "calc": "AMD Matrix Instruction Calculator, github.com/ROCm/amd_matrix_instruction_calculator: execution and co-execution cycles",
  "hazard": "LLVM, lib/Target/AMDGPU/GCNHazardRecognizer.cpp: wait states that a use needs after an instruction, 4 cycles each on CDNA",
  "schedule": "LLVM, lib/Target/AMDGPU/SISchedule.td: latencies of GFX10SpeedModel and GFX11SpeedModel, those of SICommonWriteRes in fours",
  "profiler": "ROCm Compute Profiler, docs/conceptual/pipeline-descriptions.rst: the scheduler's turns, LDS ports of 64 bytes for two SIMDs each, "
              "what a store to LDS takes",
  "coissue": "github.com/tingqli/pyhip, docs/mfma-valu-coissue.md: measured on MI308X (gfx942): vector instructions alone and beside MFMA",
  "latency": "github.com/tingqli/pyhip, docs/mem_latency.md: measured on MI308X: LDS 52 cycles for b32 and 64 for b128, memory 500 to 800",
  "fifo": "github.com/tingqli/pyhip, experiments/attention/flydsl/attn_4wave/tools/vmem-fifo.md: measured on MI308X: 16 cycles between loads of 16 "
          "bytes a lane, once about 16 are under way",
  "clrx": "CLRX, doc/GcnTimings.md: a scalar instruction after a vector one that has a mask as its result",
  "chips": "Chips and Cheese, Latency Testing is Hard (RDNA 3 Power Saving), 2023-06-14: a RX 7900 XTX's Infinity Cache: 150.3 ns, vector side",
  "cdna4": "AMD CDNA 4 white paper: 256 bytes a cycle of reads from LDS, twice CDNA3's transcendental rate",
  "isa": "AMD's documents of the instruction sets",
}

class Figure(NamedTuple):
  """A number of cycles, or of bytes a cycle, and where it is from: a word of ORIGINS or ASSUMED."""
  value: int
  origin: str

@dataclass(frozen=True)
class Machine:
  """What stepping through instructions needs to know of a family. A latency is from the issue of an instruction to that of one that uses its
  result."""
  turn: Figure               # cycles between turns of a SIMD; in a turn it issues at most one instruction of each kind, of different waves
  step: Figure               # least cycles between two instructions of a wave
  vector: Figure             # latency of a vector instruction
  vector_to_matrix: Figure   # the same where a matrix instruction uses it
  vector_to_scalar: Figure   # the same where a scalar instruction or a branch does: masks, v_readfirstlane
  dot: Figure                # latency of a dot product, but for the sum that the next dot product adds to
  slow: Figure               # cycles of a 32-bit integer multiplication on the vector ALU
  transcendental: Figure     # latency of v_exp and its like
  beside: Figure             # 1 where transcendentals have a unit of their own and take one slot of vector issue
  matrix: Figure             # latency of a matrix instruction beyond its cycles; none for the sum that the next one adds to
  matrix_sum: Figure         # latency of that sum for an instruction of 8 cycles, beyond its cycles
  packed_drain: Figure       # cycles after a matrix instruction's own until packed fp32 may follow on the same unit; 0 where it runs beside
  packed_alone: Figure       # 1 where packed fp32 instructions and those of the matrix unit exclude each other
  scalar: Figure             # latency of a scalar instruction
  scalar_load: Figure        # latency of a scalar load
  taken: Figure              # cycles of a branch that is taken
  passed: Figure             # of one that is not
  barrier: Figure            # from the last wave's arrival to the next instruction
  lds: Figure                # latency of an access to LDS without its transfer
  lds_ports: Figure          # to the SIMDs of a compute unit, which share them and the bytes a cycle of LDS evenly
  lds_queue: Figure          # cycles of transfers that a port may have before it, beyond which no access to LDS is issued
  lds_address: Figure        # cycles of a port for the addresses of a store
  permute: Figure            # latency of a permutation of lanes through LDS, without its transfer
  memory: Figure             # latency of a load from memory
  memory_bytes: Figure       # bytes a cycle that a compute unit gets
  memory_queue: Figure       # loads of a compute unit that are issued before the first one's transfer ends
  lds_load: Figure           # what a load to LDS takes beyond one to registers

def figures_of(machine:Machine) -> dict[str, Figure]:
  """The figures of a row by name."""
  return {f.name: getattr(machine, f.name) for f in fields(machine)}
