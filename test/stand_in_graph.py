"""Stand-in, on the emulator, for the GPU graphs (such as CUDA graphs) that tinygrad makes under TinyJit."""
from __future__ import annotations
from types import SimpleNamespace
from typing import Any, ClassVar
from attn.tinygrad_compat import Ops, UOp
from tinygrad.engine.jit import MultiGraphRunner

class StandInGraph(MultiGraphRunner):
  # Stand-in for a GPU graph, such as a CUDA graph, whose nodes are kernels and copies.
  # The graph records the addresses of a call once, and replaces the addresses of inputs in each later call. It also records for which nodes each node
  # waits. Of the nodes that need not wait, the last runs first.
  made: ClassVar[list[StandInGraph]] = []
  def __init__(self, linear:UOp, input_uops:tuple[UOp, ...]=()):
    super().__init__(linear, input_uops)
    self.made.append(self)
    self.nodes: list[tuple[Any, ...]] = []
    self.waits: list[set[int]] = []
    for _, ast, buffers, _ in self.calls:
      is_program = ast.op is Ops.PROGRAM
      bases = [b.base for b in (buffers if is_program else buffers[:2])]
      written = ast.arg.outs if is_program else [0]
      here = SimpleNamespace(number=len(self.waits))
      self.waits.append({node.number for node in self._access_resources(bases, list(written), here)})
      addresses = [b._buf for b in buffers]
      if ast.op is Ops.COPY:
        self.nodes.append((None, SimpleNamespace(dstDevice=addresses[0], srcDevice=addresses[1]), None, True))
      else: self.nodes.append((None, None, SimpleNamespace(**{f"f{i}": x for i, x in enumerate(addresses)}), False))
    self.updatable = [j for j, some in enumerate(self.uop_replace) if some]
  def __call__(self, input_uops:tuple[UOp, ...], var_vals:dict[str, int], wait:bool=False) -> float|None:
    for j in self.updatable:
      for i, slot in self.uop_replace[j]:
        b = input_uops[slot].buffer
        address = (b.bufs[self.calls[j][0]] if hasattr(b, "bufs") else b)._buf
        if self.nodes[j][3]: setattr(self.nodes[j][1], "srcDevice" if i == 1 else "dstDevice", address)
        else: setattr(self.nodes[j][2], f"f{i}", address)
    for j in self.order():
      (_, ast, _, _), runtime, (_, copy, arguments, is_copy) = self.calls[j], self.runtimes[j], self.nodes[j]
      if is_copy: copy.dstDevice.fill(copy.srcDevice.data, copy.srcDevice.written)
      else:
        global_size, local_size = ast.arg.launch_dims({})
        given = [*vars(arguments).values()]
        if len(given) != len(ast.arg.globals):
          raise RuntimeError(f"{len(given)} tensors for {len(ast.arg.globals)} parameters: invalid argument")
        runtime(*given, global_size=global_size, local_size=local_size, vals=())
    return None
  def order(self) -> list[int]:
    found = list[int]()
    while len(found) < len(self.waits):
      found.append(max(n for n, waits in enumerate(self.waits) if n not in found and waits <= {*found}))
    return found
  def launches_on(self, device:str) -> list[int]:
    # Returns the numbers of the graph's nodes that are attention kernels on a device.
    return [n for n, (_, ast, buffers, _) in enumerate(self.calls)
            if ast.op is Ops.PROGRAM and buffers[0].device == device and "in_order" not in ast.arg.name]
  def before(self, node:int) -> set[int]:
    # Returns the nodes for which a node waits, directly or through other nodes.
    return self.waits[node].union(*map(self.before, self.waits[node]))
