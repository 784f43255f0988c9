"""Rates and latencies of the execution units of a compute unit, in clock cycles: data for timing machine code instruction by instruction."""
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
  """A number of cycles, or of bytes per cycle, with the document or measurement from which it comes."""
  value: int
  # a key of the table ORIGINS, or ASSUMED
  origin: str

@dataclass(frozen=True)
class Machine:
  """Latencies and rates of the instructions of one family of chips, by which the time of machine code is predicted."""
  # a latency is the time from the issue of an instruction to the issue of an instruction that uses its result
  turn: Figure               # cycles between turns of a SIMD; in a turn it issues at most one instruction of each kind, from different waves
  step: Figure               # least cycles between two instructions of a wave
  vector: Figure             # latency of a vector instruction
  vector_to_matrix: Figure   # latency of a vector instruction whose result a matrix instruction uses
  vector_to_scalar: Figure   # latency of a vector instruction whose result a scalar instruction or a branch uses: masks, v_readfirstlane
  dot: Figure                # latency of a dot product, except where the next dot product adds to its sum
  slow: Figure               # cycles of a 32-bit integer multiplication on the vector ALU
  transcendental: Figure     # latency of v_exp and other transcendental instructions
  beside: Figure             # 1 if transcendentals have a unit of their own and take one slot of vector issue
  matrix: Figure             # latency of a matrix instruction beyond its cycles; 0 where the next matrix instruction adds to its sum
  matrix_sum: Figure         # latency of an instruction of 8 cycles, beyond its cycles, where the next matrix instruction adds to its sum
  packed_drain: Figure       # cycles from the end of a matrix instruction until packed fp32 may follow on the same unit; 0 if that runs beside it
  packed_alone: Figure       # 1 if packed fp32 instructions and matrix instructions exclude each other
  scalar: Figure             # latency of a scalar instruction
  scalar_load: Figure        # latency of a scalar load
  taken: Figure              # cycles of a branch that is taken
  passed: Figure             # cycles of a branch that is not taken
  barrier: Figure            # cycles from the last wave's arrival at a barrier to the next instruction
  lds: Figure                # latency of an access to LDS without its transfer
  lds_ports: Figure          # ports of LDS. The SIMDs of a compute unit share the ports evenly, and also LDS's bytes per cycle
  lds_queue: Figure          # cycles of waiting transfers at a port beyond which no access to LDS is issued
  lds_address: Figure        # cycles of a port that the addresses of a store take
  permute: Figure            # latency of a permutation of lanes through LDS, without its transfer
  memory: Figure             # latency of a load from memory
  memory_bytes: Figure       # bytes per cycle that a compute unit gets from memory
  memory_queue: Figure       # loads that a compute unit may issue before the transfer of the first one ends
  lds_load: Figure           # cycles by which a load to LDS takes longer than a load to registers

def figures_of(machine:Machine) -> dict[str, Figure]:
  return {f.name: getattr(machine, f.name) for f in fields(machine)}
