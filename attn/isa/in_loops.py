"""Finds code that no loop should have, because every iteration pays for it: loads that are done lane by lane, and accesses to spilled registers."""
from __future__ import annotations
from collections.abc import Iterable, Sequence
from attn.isa.flow import Block, Loop, loops_of, matrix_loops, usual_path
from attn.isa.instruction import Instruction
from attn.isa.waits import path_of_waits

# A load through a buffer descriptor needs the descriptor in scalar registers. If clang has computed the descriptor's address or size in vector
# registers, even with one value for all lanes, each load gets a loop of its own, called a waterfall. In each iteration of the waterfall
# v_readfirstlane_b32 takes the value of one lane, EXEC is narrowed to the lanes with the same value, and these lanes load. The other lanes load in
# later iterations. Spilled vector registers go to memory (scratch). Spilled scalar registers go to lanes of a vector register (v_writelane_b32,
# v_readlane_b32).

ACCESSES = ("load", "load_to_lds", "store", "memory_other")

def _inside(blocks:Sequence[Block], loop:Loop) -> list[Instruction]: return [x for b in sorted(loop.body) for x in blocks[b].instructions]

def _is_waterfall(blocks:Sequence[Block], loop:Loop) -> bool:
  """Returns whether a loop repeats a memory access, once for each different operand value that lanes have (a waterfall loop)."""
  inside = _inside(blocks, loop)
  by_value = any(x.op.startswith("v_readfirstlane") for x in inside) and any("and_saveexec" in x.op for x in inside)
  ends = [blocks[b].instructions[-1].op for b in loop.latches]
  return by_value and ends == ["s_cbranch_execnz"] and any(x.kind in ACCESSES for x in inside)

def _at(blocks:Sequence[Block], loop:Loop) -> str: return f"the loop at {blocks[loop.header].labels[-1]}"

def _innermost(loops:Iterable[Loop], block:int) -> Loop|None:
  # the smallest of the loops that contain the basic block
  return min((loop for loop in loops if block in loop.body), key=lambda loop: len(loop.body), default=None)

def waterfalls(blocks:Sequence[Block]) -> list[str]:
  """Returns a line for each memory access that is done lane by lane, inside and outside of loops."""
  loops = loops_of(blocks)
  found = {loop.header: loop for loop in loops if _is_waterfall(blocks, loop)}
  others = [loop for loop in loops if loop.header not in found]
  def where(loop:Loop) -> str: return f"in {_at(blocks, around)}" if (around := _innermost(others, loop.header)) is not None else "outside of loops"
  return [f"{where(found[header])}: {next(x for x in _inside(blocks, found[header]) if x.kind in ACCESSES).text}"
          for header in sorted(found)]

def _trip(blocks:Sequence[Block], loop:Loop) -> set[int]:
  """Returns the basic blocks through which most iterations of a loop go."""
  if not any(blocks[b].flops for b in loop.body): return loop.body
  # of a loop with matrix work, without rare side blocks such as a rescale
  return set(path_of_waits(blocks, loop, usual_path(blocks, loop, 0.0)))

def _per_loop(blocks:Sequence[Block], wanted:set[int]) -> list[tuple[Loop, int]]:
  """Returns (loop, how many instructions of one iteration have an id() in `wanted`) for each loop with such instructions."""
  found, loops = list[tuple[Loop, int]](), loops_of(blocks)
  for loop in sorted(loops, key=lambda loop: loop.header):
    # an instruction in an inner loop counts for the inner loop alone
    own = {b for b in _trip(blocks, loop) if _innermost(loops, b) is loop}
    if n := sum(id(x) in wanted for b in own for x in blocks[b].instructions): found.append((loop, n))
  return found

def scratch_accesses(blocks:Sequence[Block]) -> list[str]:
  """Returns a line per loop with the number of accesses to vector registers that were spilled to memory."""
  wanted = {id(x) for block in blocks for x in block.instructions if x.kind == "scratch"}
  return [f"{n} in {_at(blocks, loop)}" for loop, n in _per_loop(blocks, wanted)]

def scalar_spills(blocks:Sequence[Block]) -> list[str]:
  """Returns a line per loop with the number of moves of spilled scalar registers to and from lanes of vector registers."""
  code = [x for block in blocks for x in block.instructions]
  aside = {x.args.split(",")[0] for x in code if x.op.startswith("v_writelane")}
  wanted = {id(x) for x in code if x.op.startswith("v_writelane") or (x.op.startswith("v_readlane") and x.args.split(",")[1].strip() in aside)}
  # A loop that contains a loop with matrix work is left out: it runs rarely (for example once per head), and a move is only one instruction.
  working = [loop.body for loop in matrix_loops(blocks)]
  return [f"{n} in {_at(blocks, loop)}" for loop, n in _per_loop(blocks, wanted) if not any(body < loop.body for body in working)]
