"""Cost of a kernel: registers, LDS, and the work of one iteration of its hot loop, with two bounds on the use of the matrix unit.

  report = analyse(assembly_text, d=128)      # any .s, or llvm-objdump -d output with arch="gfx942"
  print(report.loop.serial)"""
from __future__ import annotations
import dataclasses, re
from collections import Counter
from dataclasses import dataclass
from typing import Any
from collections.abc import Sequence
from attn.chips import Chip, modelled
from attn.isa.flow import Block, Loop, blocks_of, matrix_loops, usual_path
from attn.isa.instruction import KINDS, VECTOR, Instruction, access_bytes, matrix_shape, speed_of_products
from attn.isa.parse import Kernel, parse
from attn.isa.waits import Stop, path_of_waits, waits_of

# The hot loop is the innermost loop with the most matrix work. A causal kernel has two such loops; its hot loop is the one without the mask. Only
# the usual path through the loop counts (`flow.usual_path`), without rare side blocks. A kernel that loops over its tiles twice has two hot loops;
# the report adds up one iteration of each. Not modelled: LDS bank conflicts, caches and memory, latencies, barriers, clocks.

LoopProducts = tuple[tuple[int, int], ...]   # for each hot loop of a kernel: number of matrix products that have D as a dimension, and that have Dv
PRODUCTS: LoopProducts = ((1, 1),)           # forward: S and O
GRADIENTS = (3, 2)                       # backward needs S, dQ and dK (one dimension is D), and dP and dV (one is Dv)

@dataclass(frozen=True)
class Resources:
  """Registers, LDS and threads of a wave and of a workgroup; None if the text (a bare disassembly) doesn't contain the number."""
  vgpr: int|None
  agpr: int|None
  sgpr: int|None
  vgpr_spills: int|None
  sgpr_spills: int|None
  scratch: int|None            # bytes per lane
  lds: int|None                # bytes per workgroup
  threads: int|None            # per workgroup
  waves_by_registers: int|None # waves per SIMD
  waves_by_lds: float|None

@dataclass(frozen=True)
class HotLoop:
  """Counts of one wave's instructions and cycles in one iteration of the hot loop, and upper bounds on the use of the matrix unit."""
  label: str
  instructions: int                 # on the usual path
  instructions_in_all: int          # in every block of the loop
  kinds: dict[str, int]             # instruction.KINDS -> count
  matrix: dict[str, int]            # instruction -> count
  lds_read: dict[str, int]          # "b128" -> count
  lds_write: dict[str, int]
  load_widths: dict[str, int]
  dpp: int                          # vector instructions that also read across lanes
  conversions: int
  flops: int                        # floating point operations of the matrix instructions
  cycles: dict[str, float]          # matrix, vector, transcendental, lds -> cycles on one SIMD
  unpublished: dict[str, int]       # matrix shapes with no cycle count in the model, timed at the chip's peak
  overlap: float                    # matrix cycles of the products / cycles of the busiest pipe
  serial: float                     # matrix cycles of the products / cycles if matrix, vector and transcendental work never overlap
  # figures per score, None if the head dimension is not known
  scores: float|None                # query x key elements per iteration
  queries: int|None                 # per wave
  keys: float|None                  # per iteration
  valu_per_score: float|None        # vector instructions per score of a lane's share
  exp_per_score: float|None
  lds_bytes_per_score: float|None
  useful: float|None                # cycles of the products that attention needs, at the chip's dense rate / the same divisor as in `serial`

  @property
  def valu(self) -> int: return sum(self.kinds[k] for k in VECTOR)

@dataclass(frozen=True)
class Report:
  name: str
  arch: str
  d: int|None
  resources: Resources
  loops: int                        # innermost loops with matrix instructions
  loop: HotLoop|None
  waits: tuple[Stop, ...] = ()      # waits and barriers of one iteration

  def json(self) -> dict[str, Any]:
    found = dataclasses.asdict(self)
    if self.loop is not None: found["loop"]["valu"] = self.loop.valu
    return found

# ***** resources *****

def _round_up(x:int, granule:int) -> int: return -(-x//granule)*granule

def waves_by_registers(chip:Chip, registers:int) -> int:
  most = chip.pipes.max_waves
  return min(most, chip.registers//_round_up(registers, chip.granule)) if registers else most

def waves_by_lds(chip:Chip, lds:int, threads:int, whole_processor:bool) -> float:
  """Returns the number of waves per SIMD for which the LDS has room, if a workgroup uses `lds` bytes."""
  # In RDNA's CU mode (-mcumode, which tinygrad and this package use) a workgroup uses only the half of the LDS that belongs to its CU. In workgroup
  # processor mode (`whole_processor`) two CUs share both halves (RDNA3 ISA, section 2.3).
  cu, cus = chip.pipes, 2 if whole_processor else 1
  groups = cus*chip.lds//_round_up(lds, cu.lds_granule)
  return min(cu.max_waves, groups*-(-threads//chip.wave)/(cus*cu.simds))

def resources_of(kernel:Kernel, chip:Chip, lds:int|None=None, threads:int|None=None) -> Resources:
  """Returns the registers, LDS and threads that a kernel declares. `lds` and `threads` replace declared numbers."""
  def known(*names:str) -> int|None: return next((kernel.metadata[n] for n in names if n in kernel.metadata), None)
  total, agpr = known("vgpr_count", "amdhsa_next_free_vgpr"), known("agpr_count")
  offset = known("amdhsa_accum_offset", "accum_offset")   # from gfx90a on one register file has the VGPRs, and the AGPRs behind them
  if agpr is None and total is not None: agpr = max(0, total - offset) if offset is not None else 0
  vgpr = offset if agpr and offset is not None else total
  declared = known("group_segment_fixed_size", "amdhsa_group_segment_fixed_size")
  # LDS may be given at launch
  lds = lds if lds is not None else declared
  threads = threads or known("max_flat_workgroup_size")
  whole = bool(known("workgroup_processor_mode", "amdhsa_workgroup_processor_mode"))
  return Resources(vgpr, agpr, known("sgpr_count", "amdhsa_next_free_sgpr"), known("vgpr_spill_count"), known("sgpr_spill_count"),
                   known("private_segment_fixed_size", "amdhsa_private_segment_fixed_size"), lds, threads,
                   waves_by_registers(chip, total) if total is not None else None,
                   waves_by_lds(chip, lds, threads, whole) if lds and threads else None)

# ***** the loop *****

def _widths(instructions:Sequence[Instruction]) -> dict[str, int]:
  return dict(sorted(Counter(f"b{8*access_bytes(x.op)}" for x in instructions).items(), key=lambda w: int(w[0][1:])))

def matrix_cycles(instructions:Sequence[Instruction], chip:Chip) -> tuple[float, Counter[str]]:
  """Returns the cycles of the matrix instructions, and {shape without a known cycle count: number of its instructions}."""
  cu, cycles, unknown = chip.pipes, 0.0, Counter[str]()
  for x in instructions:
    shape, flops = matrix_shape(x.op)
    if shape not in cu.matrix or "f8f6f4" in x.op: unknown[shape] += 1
    # instructions of an unknown shape are counted at the chip's peak rate
    cycles += cu.matrix.get(shape, flops*cu.simds/(cu.flops*speed_of_products(x.op)))
  return cycles, unknown

def measure(label:str, trip:Sequence[Instruction], in_all:int, chip:Chip, d:int|None, dv:int|None, queries:int|None,
            products:LoopProducts=PRODUCTS) -> HotLoop:
  """Counts the instructions in `trip`, one iteration of a loop, and computes upper bounds on the use of the matrix unit."""
  # `in_all` is the number of instructions in all blocks of the loop, `queries` the number of queries of a wave, `label` the loop's name in the
  # result. `d` and `dv` are the head dimensions. `products`: for each hot loop, how many matrix products have D as one of their three dimensions
  # (such as S = Q K^T), and how many have Dv (such as O = P V).
  cu = chip.pipes
  by_kind: dict[str, list[Instruction]] = {k: [] for k in KINDS}
  for x in trip: by_kind[x.kind].append(x)
  n = {k: len(v) for k, v in by_kind.items()}
  valu, transcendentals = sum(n[k] for k in VECTOR), n["exp"] + n["transcendental"]
  matrix, unpublished = matrix_cycles(by_kind["matrix"], chip)
  of_products, _ = matrix_cycles([x for x in by_kind["matrix"] if matrix_shape(x.op)[1]], chip)      # without instructions that only add up
  def moved(*kinds:str) -> int:   # an access of less than a dword still takes a whole bank
    return sum(max(4, access_bytes(x.op)) for k in kinds for x in by_kind[k])
  read, written = moved("lds_read"), moved("lds_write", "load_to_lds")
  # each SIMD runs one wave, and all SIMDs share the LDS
  lds = chip.wave*cu.simds*((read + 4*n["lds_permute"])/cu.lds_read + written/cu.lds_write)
  vector, slow = float(valu*cu.valu), float(transcendentals*cu.trans)
  if cu.coissue: busiest = max(matrix, vector + slow + n["matrix"]*cu.matrix_issue, lds)
  else: busiest = max(matrix + vector + transcendentals*cu.valu, slow, lds)   # RDNA's transcendental unit is separate, but takes issue slots
  flops = sum(matrix_shape(x.op)[1] for x in by_kind["matrix"])
  scores = flops/sum(flops_of_score(x, d, dv) for x in products) if d else None
  share = scores/chip.wave if scores else None
  rate = cu.flops/cu.simds*max((speed_of_products(x.op) for x in by_kind["matrix"]), default=1)
  needed = flops_of_score(PRODUCTS[0] if products == PRODUCTS else GRADIENTS, d, dv)/rate if d else 0
  def per_score(x:float) -> float|None: return x/share if share else None
  return HotLoop(label, len(trip), in_all, n, dict(Counter(x.name.removeprefix("v_") for x in by_kind["matrix"])), _widths(by_kind["lds_read"]),
                 _widths(by_kind["lds_write"]), _widths(by_kind["load"] + by_kind["load_to_lds"]),
                 sum(x.dpp for k in VECTOR for x in by_kind[k]), sum(x.op.startswith("v_cvt") for k in VECTOR for x in by_kind[k]), flops,
                 {"matrix": matrix, "vector": vector, "transcendental": slow, "lds": lds}, dict(unpublished), of_products/busiest,
                 of_products/(matrix + vector + slow), scores, queries, scores/queries if scores and queries else None, per_score(valu),
                 per_score(n["exp"]), per_score(read + written), scores*needed/(matrix + vector + slow) if scores else None)

def pick_kernel(kernels:Sequence[Kernel], name:str|None=None) -> Kernel:
  """Returns the kernel whose name contains `name`, or without a name the kernel with the most matrix instructions."""
  if not kernels: raise ValueError("no AMDGPU code found: expected assembly text of a kernel, or the output of llvm-objdump -d")
  if (found:=next((k for k in kernels if name is None or name in k.name), None)) is None:
    raise ValueError(f"no kernel has {name!r} in its name: there are {', '.join(k.name for k in kernels)}")
  return found

def flops_of_score(products:tuple[int, int], d:int, dv:int|None) -> int: return 2*(products[0]*d + products[1]*(dv or d))

def hot_loop(kernel:Kernel, chip:Chip, d:int|None=None, dv:int|None=None, every_block:bool=False,
             rank:int=0, products:LoopProducts=PRODUCTS) -> tuple[str, list[Instruction], int, int, list[Stop]]|None:
  """Returns (labels, instructions of one iteration, number of the loop's instructions, number of loops with matrix work, waits); None if no loop has
  matrix work."""
  # `rank` 1, 2, ... takes the loop with the next most matrix work. An iteration takes the usual path through the loop, without side blocks that few
  # iterations enter; with `every_block` it takes all blocks. `d` and `dv` are the padded head dimensions.
  # `products` has an entry for each hot loop (see `analyse`). With several entries, the kernel runs several hot loops one after another, and the
  # result is the sum of one iteration of each.
  blocks = blocks_of(kernel.code)
  loops = matrix_loops(blocks)
  labels, trip, in_all, waits = [], list[Instruction](), 0, list[Stop]()
  for one in products:
    same = loops if len(products) == 1 else loops_with_part(blocks, loops, *(flops_of_score(x, d or 1, dv) for x in (one, max(products))))
    if rank and rank >= len(same): raise ValueError(f"loop {rank} of {kernel.name}: must be less than {len(same)}, its number of matrix loops")
    if not same: return None
    loop = same[rank]
    path = sorted(loop.body) if every_block else usual_path(blocks, loop, float(flops_of_score(one, d, dv))*chip.wave if d else 0)
    labels += blocks[loop.header].labels
    trip += [x for b in path for x in blocks[b].instructions]
    waits += waits_of([x for b in path_of_waits(blocks, loop, path) for x in blocks[b].instructions], chip)
    in_all += sum(len(blocks[b].instructions) for b in loop.body)
  return " ".join(labels), trip, in_all, len(loops), waits

def loops_with_part(blocks:Sequence[Block], loops:Sequence[Loop], part:int, most:int) -> list[Loop]:
  """Returns the loops with exactly part/most times the matrix operations of loops[0], which has the most matrix operations."""
  # a kernel with several hot loops divides the matrix products among them; `most` is the work of the loop with the most products, which comes first
  flops = [sum(blocks[b].flops for b in loop.body) for loop in loops]
  return [loop for loop, x in zip(loops, flops) if x*most == flops[0]*part]

def analyse(text:str, arch:str|None=None, d:int|None=None, dv:int|None=None, kernel_name:str|None=None, queries:int|None=None, lds:int|None=None,
            threads:int|None=None, every_block:bool=False, rank:int=0, title:str|None=None, products:LoopProducts=PRODUCTS) -> Report:
  """Returns a report on one kernel of an assembly text, whose head dimensions, padded as the kernel computes them, are `d` and `dv`."""
  # `queries` is the number of queries of a wave. `products` has a pair of numbers for each hot loop: how many matrix products have D as one of their
  # three dimensions (such as S = Q K^T), and how many have Dv (such as O = P V). `kernel_name` is the kernel's name or a part of it; without it, the
  # kernel with the most matrix instructions is taken. `lds` and `threads` replace what the text declares. `rank` chooses the loop: 0 for the one
  # with the most matrix work, 1 for the next. `every_block` counts every basic block of the loop, not only its usual path. `title` is the name of
  # the report.
  kernel = pick_kernel(parse(text, arch), kernel_name)
  if kernel.arch is None: raise ValueError("the text doesn't name its chip: give arch, such as gfx942")
  chip = modelled(re.split(r"[:+-]", kernel.arch)[0])
  found = hot_loop(kernel, chip, d, dv, every_block, rank, products)
  loop = measure(found[0], found[1], found[2], chip, d, dv, queries, products) if found is not None else None
  return Report(title or kernel.name, kernel.arch, d, resources_of(kernel, chip, lds, threads), found[3] if found is not None else 0, loop,
                tuple(found[4]) if found is not None else ())
