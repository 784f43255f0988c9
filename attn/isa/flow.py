"""Control-flow graph of a kernel, its natural loops, and the usual path through a loop."""
from __future__ import annotations
from dataclasses import dataclass, field
from collections.abc import Sequence
from attn.isa.instruction import Instruction, matrix_shape

@dataclass
class Block:
  labels: list[str] = field(default_factory=list)
  instructions: list[Instruction] = field(default_factory=list)
  successors: list[int] = field(default_factory=list)

  @property
  def flops(self) -> int: return sum(matrix_shape(x.op)[1] for x in self.instructions if x.kind == "matrix")
  @property
  def exponentials(self) -> int: return sum(x.kind == "exp" for x in self.instructions)

@dataclass
class Loop:
  header: int
  body: set[int]
  latches: list[int]

# Dominators are computed as in Cooper, Harvey and Kennedy, "A Simple, Fast Dominance Algorithm"; natural loops as in the Dragon Book, section 9.6.
Way = tuple[int, int, int, tuple[int, ...]]   # a path to a block's end: matrix work, exponentials (at most those needed), instructions, blocks

_ENDS = ("s_branch", "s_cbranch", "s_endpgm", "s_setpc")

def blocks_of(code:Sequence[str|Instruction]) -> list[Block]:
  """Returns the basic blocks of code, each with its successors. Block 0 is the entry."""
  blocks = [Block()]
  for x in code:
    last = blocks[-1]
    if isinstance(x, str):
      if last.instructions: blocks.append(last:=Block())
      last.labels.append(x)
    else:
      if last.instructions and last.instructions[-1].op.startswith(_ENDS): blocks.append(last:=Block())
      last.instructions.append(x)
  where = {label: i for i, block in enumerate(blocks) for label in block.labels}
  for i, block in enumerate(blocks):
    end = block.instructions[-1] if block.instructions else None
    if end is not None and end.op.startswith(("s_branch", "s_cbranch")) and end.args and (target:=end.args.split(",")[-1].split()[0]) in where:
      block.successors.append(where[target])
    falls = end is None or not end.op.startswith(("s_branch", "s_endpgm", "s_setpc"))
    if falls and i + 1 < len(blocks) and i + 1 not in block.successors: block.successors.append(i + 1)
  return blocks

def _postorder(start:int, successors:dict[int, list[int]]) -> list[int]:
  order, seen, stack = [], {start}, [(start, iter(successors[start]))]
  while stack:
    node, rest = stack[-1]
    if (nxt:=next((x for x in rest if x not in seen), None)) is None:
      order.append(node)
      stack.pop()
    else:
      seen.add(nxt)
      stack.append((nxt, iter(successors[nxt])))
  return order

def loops_of(blocks:Sequence[Block]) -> list[Loop]:
  """Returns the natural loops in a control-flow graph. Back edges to the same header belong to the same loop."""
  order = _postorder(0, {i: b.successors for i, b in enumerate(blocks)})[::-1]
  rank = {b: i for i, b in enumerate(order)}
  predecessors: dict[int, list[int]] = {b: [] for b in order}
  for b in order:
    for s in blocks[b].successors: predecessors[s].append(b)
  dominator = {0: 0}
  def meet(x:int, y:int) -> int:
    while x != y:
      while rank[x] > rank[y]: x = dominator[x]
      while rank[y] > rank[x]: y = dominator[y]
    return x
  changed = True
  while changed:
    changed = False
    for b in order[1:]:
      known = [p for p in predecessors[b] if p in dominator]
      new = known[0]
      for p in known[1:]: new = meet(new, p)
      if dominator.get(b) != new: dominator[b], changed = new, True
  def dominates(x:int, y:int) -> bool:
    while rank[y] > rank[x]: y = dominator[y]
    return x == y
  loops: dict[int, Loop] = {}
  for b in order:
    for header in (s for s in blocks[b].successors if dominates(s, b)):
      loop = loops.setdefault(header, Loop(header, {header}, []))
      loop.latches.append(b)
      stack = [b]
      while stack:
        if (x:=stack.pop()) not in loop.body:
          loop.body.add(x)
          stack += predecessors[x]
  return list(loops.values())

def matrix_loops(blocks:Sequence[Block]) -> list[Loop]:
  """Returns the innermost loops with matrix instructions, those with the most floating point operations first."""
  flops = [b.flops for b in blocks]
  loops = [(sum(flops[i] for i in loop.body), loop) for loop in loops_of(blocks)]
  loops = [(f, loop) for f, loop in loops if f and not any(g and other.body < loop.body for g, other in loops)]
  # among loops with equally many operations, the loop with fewer instructions comes first: of the two loops of a causal kernel, the loop without a
  # mask
  return [loop for _, loop in sorted(loops, key=lambda x: (-x[0], sum(len(blocks[i].instructions) for i in x[1].body)))]

def usual_path(blocks:Sequence[Block], loop:Loop, flops_per_exp:float) -> list[int]:
  """Returns the basic blocks through which most iterations of a loop go, in order from the loop's header to its end."""
  # The path with the fewest instructions that has all of the loop's matrix work and 97 % of its exponentials. So it avoids side blocks that few
  # iterations enter, such as a rescale of the accumulator, even if they have a few exponentials. The path goes through an inner loop once.
  # `flops_per_exp` is the matrix work for each v_exp instruction, or 0 if that is not known.
  inside = {b: [s for s in blocks[b].successors if s in loop.body and s != loop.header] for b in loop.body}
  order = _postorder(loop.header, inside)[::-1]
  rank = {b: i for i, b in enumerate(order)}
  most = {b: 0 for b in order}        # matrix work of the best path to a block's end
  for b in order:
    most[b] += blocks[b].flops
    for s in inside[b]:
      if rank[s] > rank[b]: most[s] = max(most[s], most[b])
  needed = int(0.97*max(most[b] for b in loop.latches)/flops_per_exp) if flops_per_exp else 0
  ways: dict[int, list[Way]] = {b: [] for b in order}
  ways[loop.header] = [(0, 0, 0, ())]
  for b in order:
    block, kept = blocks[b], list[Way]()
    arrived = [(f + block.flops, min(needed, e + block.exponentials), n + len(block.instructions), (*path, b)) for f, e, n, path in ways[b]]
    for way in sorted(arrived, key=lambda w: (-w[0], -w[1], w[2])):
      if not any(k[1] >= way[1] and k[2] <= way[2] for k in kept): kept.append(way)   # paths in `kept` have at least as much matrix work
    ways[b] = kept
    for s in inside[b]:
      if rank[s] > rank[b]: ways[s] = ways[s] + kept
  return list(max((w for b in loop.latches for w in ways[b]), key=lambda w: (w[0], w[1], -w[2]))[3])

def way_inside(blocks:Sequence[Block], loop:Loop, first:int, last:int) -> list[int]:
  """Returns the shortest path inside a loop from basic block `first` up to but without `last`; empty if there is none."""
  ways = [[first]]
  for way in ways:
    for s in blocks[way[-1]].successors:
      if s == last: return way
      if s in loop.body and all(s not in other for other in ways): ways.append([*way, s])
  return []
