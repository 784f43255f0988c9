"""Attention over sequences whose rows are sharded over devices, in one of three ways: gathering of keys, exchange of results, or ring attention.
Begin with `run_shared_rows`."""
from __future__ import annotations
import functools, itertools, math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from attn import values
from attn.calls.checked_kernel import CheckedKernel, KernelFunction, checked_ast, region
from attn.calls.gradient import OUTPUTS, lse_axes
from attn.calls.options import AttentionOptions
from attn.calls.placement import AXES, Placement, local_shape, rows_dimension
from attn.calls.views import whole_places
from attn.chips import CHIPS, Chip
from attn.choose.dispatch import choose
from attn.kernels.merge import RowRange, merge, part_places
from attn.kernels.order_keys import order_keys
from attn.kernels.parts.grid.tensors import of_backward
from attn.ops.plain import plain
from attn.parallel.shards import ContextLaunch, PieceRun, SequencePiece, SequenceShards, head_chunks
from attn.problem import ORDERS, DealtRows, Problem, Strided
from attn.score.terms import TERM_TENSORS
from attn.tinygrad_compat import Ops, Tensor, UOp, also_after, ast_of, copied, copy_call, dtypes, inside_function, new_buffer, remembered
from attn.values import FLOATS, cache_of_kernels

# - Gathering: q, k and v are divided along their rows. Each device computes its own queries over all keys, by several launches of a kernel, each for
# some heads. The device first gathers the keys of these heads from all devices. While one launch runs, the keys of the next heads are copied to a
# second buffer.
# - Exchange: only k and v are divided, and every device has all queries. Each device computes all queries over its own keys. Then the devices
# exchange the results, o and lse in one buffer, and one kernel on each device merges the results.
# - Ring attention (arXiv 2310.01889): q, k and v are divided, but no single kernel can compute the problem. A device computes its queries over the
# keys of one device after another, and merges the results. These keys are copied into two buffers in turn.

SLOTS = 2             # buffers of a device for the keys of others: one is read while the other is filled
PARTS_KEPT = 4        # most partial results that wait to be merged: without a limit the memory would grow with the number of devices

# Type of a function that computes (o, lse) of a problem, from tensors by name, on a device. Its last argument has the buffers for the results (o,
# lse, and the buffers that they are regions of), or is empty.
Attend = Callable[[Problem, dict[str, Tensor], str, Sequence[Tensor]], list[Tensor]]

@dataclass(frozen=True)
class SharedRows:
  """An attention problem with sharded rows: the problem, the devices, and which rows each device holds."""
  problem: Problem  # the whole problem, without the padding that the devices hold
  arch: Chip
  at: Placement
  shards: SequenceShards
  @property
  def devices(self) -> tuple[str, ...]: return (self.at.device,) if isinstance(self.at.device, str) else self.at.device
  @property
  def own(self) -> Problem:
    """The problem with Sq replaced by the number of query rows on one device, padding included. It gives the shapes of a device's o and lse."""
    return of_backward(replace(self.problem, Sq=self.shards.queries or self.problem.Sq))
  def gathering(self, device:int) -> list[tuple[tuple[int, int], Problem]]:
    """Returns the launches of a device that copies all keys to itself: ((first key/value head, number of heads), problem) for each launch."""
    p, shards = self.problem, self.shards
    # Heads are key/value heads, counted over all batches. Each launch has the same heads on all devices.
    heads = (0, p.B*p.Hkv)
    # If the kernel divides the keys into ranges, one buffer holds the partial results of all ranges.
    if shards.count == 1 or self.divides_keys: return [(heads, shards.dealt(p, device, heads))]
    return [(heads, replace(shards.dealt(p, device, heads), num_splits=1)) for heads in head_chunks(p, shards)]
  @functools.cached_property
  def divides_keys(self) -> bool:
    """Whether a launch over all heads and all keys would be split over several workgroups per query tile (split-KV) on some device."""
    p, shards = self.problem, self.shards
    return any(choose(shards.dealt(p, device, (0, p.B*p.Hkv)), self.arch).work.splits > 1 for device in range(shards.count))
  @property
  def first_gathering(self) -> Problem: return self.gathering(0)[0][1]
  @property
  def gathers(self) -> bool:
    """Whether each device copies the keys of all devices to itself, instead of exchanging results."""
    # No device gathers if every device has all of q, or if only tinygrad's tensor operations can compute the problem (`three_pass`).
    if self.shards.queries is None or choose(self.first_gathering, self.arch).kernel == "three_pass": return False
    # OpenCL can't pass a region of a buffer to a kernel.
    return region(region_of(UOp.empty((2,), dtype=dtypes.float, device=self.devices[0]), 0, 1)) is not None
  @property
  def explanation(self) -> str:
    """Sentence in which `attn.explain` says how rows are divided among devices."""
    return self.shards.explanation(self.problem, len(self.gathering(0)) if self.gathers else 0)
  def real_rows(self, device:int) -> tuple[RowRange, ...]:
    """Returns which rows of q on a device are no padding, as ranges counted from the device's first row."""
    return tuple(RowRange(piece.at, piece.rows) for piece in self.shards.queries_of(self.problem, device))

# ***** division of a problem *****

WHOLE_INSTEAD = "shard q, k and v along batch or heads instead"
LENGTHS_INSTEAD = "sequence_lengths says how many rows all batches have; for different lengths shard along batch or heads"
REFUSED = {"dropout_p": WHOLE_INSTEAD, "kv_lengths": LENGTHS_INSTEAD, "kv_starts": LENGTHS_INSTEAD, "block_table": WHOLE_INSTEAD,
           "cu_seqlens_q": WHOLE_INSTEAD, "cu_seqlens_k": WHOLE_INSTEAD, "batch_invariant": WHOLE_INSTEAD}

def sequence_shards(shapes:dict[str, tuple[int, ...]], options:AttentionOptions,
                    at:Placement) -> tuple[Placement, SequenceShards|None, tuple[int, int]]:
  """Returns (placement on devices, division of rows among them or None, (Sq, Sk) without padding), or raises ValueError for options that don't
  fit."""
  # Raises ValueError for an option that needs whole sequences; the message tells how to shard instead. The division is None if rows are not divided.
  order, lengths = options.sequence_order, options.sequence_lengths
  asked = f"sequence_order={order!r}" if order != "contiguous" else f"sequence_lengths={lengths}" if lengths is not None else None
  if at.shared not in ("rows", "keys"):
    if asked is None: return at, None, (0, 0)
    if not isinstance(at.device, str):
      raise ValueError(f"{asked} with {f'tensors sharded along {at.shared}' if at.shared else 'all of q, k and v on every device'}: must keep its "
                       "default unless k and v, or q, k and v, are sharded along their rows, as attn.shard_sequence does")
    # Tensors on one device with sequence_order or sequence_lengths count as divided along rows.
    at = Placement(at.device, "rows")
  what = "k and v sharded along their rows" if at.shared == "keys" else "q, k and v sharded along their rows"
  if options.layout == "thd":
    raise ValueError(f"layout='thd' with {asked or what}: packed sequences can't be sharded along rows; {WHOLE_INSTEAD}")
  for name, instead in REFUSED.items():
    if isinstance(given := getattr(options, name), (Tensor, UOp)) or given not in (None, False, 0.0):
      raise ValueError(f"{name}={values.shown(given)} with {what}: {instead}")
  axis = AXES[options.layout].index("rows")
  rows = shapes["q"][axis], shapes["k"][axis]
  for name, have, want, least in zip(("Sq", "Sk"), rows, lengths or rows, (rows[0] if at.shared == "keys" else 1, 1)):
    if not least <= want <= have:
      raise ValueError(f"sequence_lengths={lengths}: {name} must lie in {least}..{have}, the rows of {'q' if name == 'Sq' else 'k'}")
  pieces = at.count*ORDERS[order]
  for name, have in zip(("q", "k") if at.shared == "rows" else ("k",), rows if at.shared == "rows" else rows[1:]):
    if have % pieces:
      raise ValueError(f"{name} has {have} rows: sequence_order={order!r} on {at.count} devices needs a multiple of {pieces}, "
                       "which attn.shard_sequence pads to")
  shared = SequenceShards(at.count, order, rows[1]//at.count, rows[0]//at.count if at.shared == "rows" else None,
                          tuple(name for name in TERM_TENSORS if lies_as_q(name, getattr(options, name), rows[0], at)))
  return at, shared, lengths or rows

def lies_as_q(name:str, t:Tensor|None, rows:int, at:Placement) -> bool:
  """Returns whether the rows of an optional tensor, such as a bias, are sharded like the rows of q, padding included."""
  axes = TERM_TENSORS[name].axes
  if t is None or "rows" not in axes or at.shared != "rows" or (axis := t.ndim - len(axes) + axes.index("rows")) < 0: return False
  if isinstance(at.device, str): return int(t.shape[axis]) == rows
  return t.device == at.device and t.uop.axis == axis

def with_rows(shape:tuple[int, ...], layout:str, rows:int) -> tuple[int, ...]:
  """Returns a shape in `layout` with its number of rows replaced by `rows`."""
  return tuple(rows if axis == "rows" else n for axis, n in zip(AXES[layout], shape))

def extra_shape(name:str, t:Tensor, shards:SequenceShards|None, queries:int) -> tuple[int, ...]:
  """Returns the shape that an optional tensor, such as a bias or sinks, would have on a single device, for `queries` queries."""
  # A tensor whose rows are divided among devices like those of q has all rows of the sequence, without the padding. Every other tensor is complete on
  # each device.
  shape = local_shape(t)
  if shards is None or name not in shards.as_q or (axis := rows_dimension(name)) is None: return shape
  if shape[axis] != shards.queries:
    raise ValueError(f"{name} has {shape[axis]} rows on each device, and q {shards.queries}: must be equal")
  return (*shape[:axis], queries, *shape[axis + 1:])

# ***** shards *****

def in_buffers(u:UOp) -> UOp:
  """Returns a tensor whose data lie in a buffer on each device: `u` itself, or a copy of `u`."""
  # Without buffers, one kernel might read the tensor as an expression that is not computed yet, and another read one device's buffer. tinygrad would
  # take the expression and the buffer for the same value.
  if inside_function(): return copied(u)      # a function's argument has no shards yet
  if u.has_buffer_identity(): return u
  return u.contiguous() if isinstance(u.device, str) else copied(u)

def shards_of(u:UOp) -> list[UOp]:
  """Returns the shards of a tensor that lies in buffers, one for each device."""
  if isinstance(u.device, str): return [u]
  if u.op is Ops.UNSHARD: u = u.src[0]
  elif u.op is Ops.AFTER and u.src[0].op is Ops.UNSHARD: u = u.replace(src=(u.src[0].src[0], *u.src[1:]))
  return [u.mselect(i) for i in range(len(u.device or ()))]

def of_device(u:UOp, i:int) -> UOp:
  """Returns the shard of a tensor on its i-th device, or the tensor itself if it is on one device."""
  return u if isinstance(u.device, str) else u.mselect(i)

def passed(held:dict[str, list[UOp]], device:int, name:str, owners:list[int]) -> Iterator[dict[str, UOp]]:
  """Yields {tensor name: shard} for each device in `owners`; a shard of another device is first copied to device number `device`, called `name`."""
  # `held` has all shards of each tensor. `device` and `name` are the index and the name of the receiving device, and `owners` the devices whose
  # shards come, in order. Shards of other devices are copied into SLOTS buffers of each tensor, used in turn, so a buffer holds a shard only for a
  # while. Each copy is marked (`remembered`), so that a later computation with the shard copies it again.
  slots: list[dict[str, UOp]] = [{} for _ in range(SLOTS)]
  copied = 0
  for owner in owners:
    if owner == device:
      yield {tensor: shards[owner] for tensor, shards in held.items()}
      continue
    slot, copied = slots[copied % SLOTS], copied + 1
    for tensor, shards in held.items():
      shard = shards[owner]
      to = slot[tensor] if tensor in slot else new_buffer(shard.max_shape, shard.dtype, name)
      slot[tensor] = remembered(to.after(to.store(shard.copy_to_device(name))))
    yield dict(slot)

# ***** one launch *****

def cut(u:UOp, axis:int, first:int, count:int) -> UOp:
  """Returns a view of `count` rows along an axis, from row `first` on."""
  return u.shrink(tuple((first, first + count) if i == axis else (0, n) for i, n in enumerate(u.max_shape)))

def rows_in_buffer(u:UOp, axis:int, first:int, count:int) -> UOp:
  """Copies rows first..first+count-1 along an axis of `u` to a new buffer; returns `u` itself if `u` has only these rows."""
  # tinygrad's `contiguous()` would make a view of a buffer that is already contiguous, and tinygrad's memory planner would not know that the buffer
  # is still in use
  return u if count == u.shape[axis] else filled_with_rows(cut(u, axis, first, count))

def filled_with_rows(u:UOp) -> UOp:
  """Copies the tensor `u` to a new buffer, and returns the buffer."""
  buffer = new_buffer(u.max_shape, u.dtype, u.device)
  return buffer.after(buffer.store(u))

def launch_problem(p:Problem, launch:ContextLaunch) -> Problem:
  """Returns the problem `p` for a single launch: with the queries and keys of `launch`, and without sinks."""
  # It has no sinks, because a sink must count once, not in each launch.
  return of_backward(replace(p, Sq=launch.queries.count, Sk=launch.keys.count, window=launch.seen.window, offset=launch.seen.offset, top_left=False,
                             sinks=False))

def launch_tensors(c:SharedRows, held:dict[str, UOp], launch:ContextLaunch) -> dict[str, UOp]:
  """Returns {name: tensor} for tensors that score terms read, such as a bias, each cut to the queries and keys of one launch."""
  def part(name:str, u:UOp, axis:int|None, run:PieceRun) -> UOp:
    if axis is None or u.shape[axis] == 1: return u
    if name in c.shards.as_q and run is launch.queries: return cut(u, axis, run.first, run.count)
    first, *rest = [cut(u, axis, piece.start, piece.rows) for piece in run.pieces]
    return first.cat(*rest, dim=axis)
  # The tensors in `held` have all keys in the order of the sequence. They have all queries in this order, too, or if they are sharded like q, only
  # the device's queries. Tensors without an axis of queries or keys are left out.
  found = dict[str, UOp]()
  for name, tensor in TERM_TENSORS.items():
    if name not in held or not {"rows", "keys"} & {*tensor.axes}: continue
    rows = part(name, held[name], tensor.dimension("rows"), launch.queries)
    found[name] = filled_with_rows(part(name, rows, tensor.dimension("keys"), launch.keys))
  return found

def with_views(p:Problem, arch:Chip, held:dict[str, tuple[int, ...]], keys:PieceRun) -> Problem:
  """Changes `p` so that the kernel reads the rows `keys` directly in the device's k and v (shapes in `held`), without copying these rows first."""
  # Nothing changes if the launch uses all rows that the device holds.
  axis = AXES[p.layout].index("rows")
  if all(shape[axis] == keys.count for shape in held.values()): return p
  def of(name:str) -> Strided|None:
    # Returns start and strides of the launch's rows of the tensor `name` in the device's buffer; None if there is no such tensor.
    return None if name not in held else replace(place := whole_places(held[name], p.layout), start=keys.first*place.row)
  # Nothing changes if another kernel would be needed to read keys in place, or if no kernel computes the problem.
  viewed = replace(p, k_view=of("k"), v_view=of("v"))
  return viewed if choose(viewed, arch).kernel == choose(p, arch).kernel != "three_pass" else p

# ***** gathering: all keys of some heads *****

def region_of(u:UOp, first:int, count:int) -> UOp:
  """Returns a region of `count` elements of a buffer, on one or several devices, from element `first` on."""
  return u.flatten().shrink(((first, first + count),)).contiguous()

def bare_buffer(u:UOp) -> UOp:
  """Returns the buffer of a tensor without the writes to it that are still pending."""
  while u.op in (Ops.RESHAPE, Ops.UNSHARD, Ops.AFTER): u = u.src[0]
  return u

@cache_of_kernels
def ordering_kernel(p:Problem, held:int, pieces:tuple[SequencePiece, ...], first:int, heads:tuple[int, int], width:int) -> KernelFunction:
  """Returns a kernel function that copies a device's rows of k or v (`pieces`) into a larger buffer, in the order of the whole sequence."""
  # The kernel's arguments are (gathered, shard). `shard` is the device's k or v, with `held` rows per head and `width` elements per row; `pieces` are
  # the pieces of the sequence that the device holds. Heads are key/value heads (first, count), counted over all batches. Rows in `gathered` are in
  # the order of the sequence, from row `first` of the sequence on. Equal arguments return the identical object, because tinygrad's schedule cache
  # compares by identity.
  front, back = pieces[0], pieces[-1]
  keys = DealtRows(front.start - first, back.at, back.start - back.at - front.start, sum(piece.rows for piece in pieces), heads)
  program = functools.partial(order_keys, p, held, keys, width)
  return lambda *placeholders: CheckedKernel(ast_of(program, *placeholders[:2]), ("gathered",), takes=2)

@dataclass
class GatheringDevice:
  """What one device needs to attend to the keys of all devices: tensors, launches, and buffers into which all keys are copied."""
  c: SharedRows
  number: int
  tensors: dict[str, UOp]
  launches: list[tuple[tuple[int, int], Problem]]  # (heads, problem) of each
  # Buffers for the gathered k and v, by name; successive launches use different ones. The UOp of a buffer waits for all launches so far that use the
  # buffer.
  slots: list[dict[str, UOp]]
  own_copies: list[dict[str, UOp]]  # for each slot, the kernels that have copied the device's own keys into it
  @staticmethod
  def of(c:SharedRows, held:dict[str, list[UOp]], number:int) -> GatheringDevice:
    t, launches = {x: shards[number] for x, shards in held.items()}, c.gathering(number)
    t |= {name: dealt_rows(c, name, t[name], number) for name in TERM_TENSORS if name in t}
    shapes = {x: shape for x, (shape, _) in launches[0][1].shapes.items() if x in ("k", "v")} if c.shards.count > 1 else {}
    slots = [{x: UOp.empty(shape, dtype=t[x].dtype, device=c.devices[number]) for x, shape in shapes.items()}
             for _ in launches[:SLOTS]]
    return GatheringDevice(c, number, t, launches, slots, [{} for _ in slots])
  def keys(self, n:int, name:str, rows:range) -> UOp:
    """Returns the region, in a buffer of launch n, for the rows `rows` of k or v (`name`); `rows` counts in the whole sequence."""
    (_, heads), p = self.launches[n][0], self.c.problem
    row, first = heads*(p.D if name == "k" else p.Dv), self.c.shards.keys_gathered(p, self.number).start
    return region_of(bare_buffer(self.slots[n % SLOTS][name]), (rows.start - first)*row, len(rows)*row)
  def order_own(self, n:int) -> None:
    """Copies this device's rows of k and v into the buffers of launch n, in the order of the whole sequence."""
    # The copies wait until the own keys are copied for launch n - 1, which runs earlier.
    before, called = (self.own_keys(n - 1), tuple(self.own_copies[(n - 1) % SLOTS].values())) if n else ([], ())
    p, shards, slot = self.c.problem, self.c.shards, self.slots[n % SLOTS]
    pieces, first = shards.keys_of(p, self.number), shards.keys_gathered(p, self.number).start
    for name, u in slot.items() if pieces else ():
      kernel = ordering_kernel(p, shards.keys, pieces, first, self.launches[n][0], p.D if name == "k" else p.Dv)
      written = UOp.custom_kernel(also_after(u, *called), self.tensors[name], *before, fxn=kernel)[0]
      self.own_copies[n % SLOTS][name] = call = written.src[1]
      slot[name] = u.after(call)
  def own_keys(self, n:int) -> list[UOp]:
    """Returns the regions of launch n's buffers into which `order_own` copies this device's rows of k and v."""
    held = self.c.shards.keys_held(self.c.problem, self.number)
    return [self.keys(n, name, rows) for name in self.slots[n % SLOTS] for rows in held]

def gather(c:SharedRows, devices:list[GatheringDevice], n:int) -> None:
  """Copies keys and values from device to device, as launch n of each device needs them."""
  # A device copies from the other devices' buffers for this launch, into which they have copied their own keys.
  copied = [(x, y, name, rows) for x in devices for owner, rows in c.shards.keys_copied(c.problem, x.number)
            for y in [devices[owner]] for name in x.slots[n % SLOTS]]
  taken = list[tuple[GatheringDevice, str, UOp]]()
  for x, y, name, rows in copied:
    slot, before = x.slots[n % SLOTS], x.slots[(n - 1) % SLOTS].values() if n else ()
    slot[name] = also_after(slot[name], y.own_copies[n % SLOTS][name])
    # The copies wait for the copies for launch n - 1, so that they don't slow them down.
    call = copy_call(x.keys(n, name, rows), y.keys(n, name, rows), slot[name], *before)
    slot[name] = slot[name].after(call)
    taken.append((y, name, call))
  for y, name, call in taken: y.slots[n % SLOTS][name] = also_after(y.slots[n % SLOTS][name], call)

def gathered_over(c:SharedRows, inputs:Mapping[str, UOp], held:dict[str, list[UOp]], attend:Attend, outputs:dict[str, UOp]) -> UOp:
  """Computes attention after each device has gathered all keys: fills the buffers `outputs`, and returns the UOp of the last launch."""
  # `held` has the part of each tensor on each device, and `attend` makes one launch. A launch computes all queries of a device over all keys, for
  # some heads. While it runs, the keys for the next heads are copied from other devices. A device copies its own keys for the next heads before the
  # launch, because it is busy during the launch.
  devices, states = [GatheringDevice.of(c, held, i) for i in range(len(c.devices))], outputs
  count = len(devices[0].launches)
  for n in range(count):
    for x in devices if n == 0 else (): x.order_own(0)
    gather(c, devices, n)     # first for all devices: if TinyJit makes several graphs, all launches are then in one graph
    for x in devices:
      next_keys = list[UOp]()
      if n + 1 < count:
        x.order_own(n + 1)
        next_keys = x.own_keys(n + 1)
      (heads, p), slot = x.launches[n], x.slots[n % SLOTS] if x.slots else {}
      if next_keys: slot |= {name: also_after(u, x.own_copies[(n + 1) % SLOTS][name]) for name, u in slot.items()}
      *results, q = (heads_in(p, name, u, heads, x.number) for name, u in (*states.items(), ("q", inputs["q"])))
      whole = [*(of_device(u, x.number) for u in states.values()), x.tensors["q"]]
      tensors = {name: Tensor(u) for name, u in (x.tensors | slot | {"q": q}).items()}
      found, *_ = attend(p, tensors, c.devices[x.number], [Tensor(u) for u in (*results, *whole, *next_keys)])
      call = found.uop.src[1]
      states = {name: u.after(call) for name, u in states.items()}
      slot |= {name: u.after(call) for name, u in slot.items()}
  return call

def heads_in(p:Problem, name:str, u:UOp, heads:tuple[int, int], device:int) -> UOp:
  """Returns a device's part of `u` (q, o or lse) for one launch, which computes the key/value heads `heads`, (first, count)."""
  size = math.prod(p.shapes[name][0])
  if size == math.prod(u.max_shard_shape): return shards_of(u)[device] if name == "q" else of_device(u, device)
  return of_device(region_of(bare_buffer(u), heads[0]//heads[1]*size, size), device)

def dealt_rows(c:SharedRows, name:str, u:UOp, device:int) -> UOp:
  """Returns a tensor that a score term reads, such as a bias, cut to a device's query rows, and padded to the same number of rows as q."""
  # Nothing changes for a tensor without an axis of queries, or whose rows are already divided like those of q.
  queries, axis, rows = c.shards.queries, rows_dimension(name), c.problem.Sq
  if name in c.shards.as_q or axis is None or (u.shape[axis] == 1 and rows > 1) or queries is None: return u
  first, *rest = [cut(u, axis, x.start, x.rows) for x in c.shards.queries_of(c.problem, device)] or [cut(u, axis, 0, 1)]
  return filled_with_rows(first.cat(*rest, dim=axis).pad_to((*u.max_shape[:axis], queries, *u.max_shape[axis + 1:])))

# ***** parts: one buffer with o and lse (and lse_rest for wide scores) of some rows over some keys *****

def packed(p:Problem, results:Sequence[Tensor]) -> UOp:
  """Copies the results of a launch, o and lse, into one buffer, which a single copy can send to another device."""
  first, *rest = [x.flatten().pad_to(end - begin) for x, (begin, end) in zip(results, itertools.pairwise(part_places(p, p.Sq)))]
  return first.cat(*rest).contiguous().uop

def written_part(p:Problem, device:str, write:Callable[..., UOp]) -> UOp:
  """Returns a buffer into which `write` writes o, lse and, if the problem has it, lse_rest (what rounding removed from lse)."""
  # `write` makes the launch: it gets the regions for the results and the whole buffer, and returns the UOp of the launch. The whole buffer is an
  # argument of the launch, so that tinygrad's memory planner knows that the buffer is in use.
  shapes, (*places, size) = [p.shapes[name][0] for name in p.outputs], part_places(p, p.Sq)
  buffer = new_buffer((size,), dtypes.float, device)
  results = [buffer.shrink(((begin, begin + math.prod(shape)),)).reshape(shape).contiguous()
             for shape, begin in zip(shapes, places)]
  if region(results[0]) is not None: return buffer.after(write(*results, buffer))
  results = [new_buffer(shape, dtypes.float, device) for shape in shapes]     # OpenCL's buffers have no regions
  call = write(*results, buffer)
  return packed(p, [Tensor(u.after(call)) for u in results])

def run_launch(c:SharedRows, launch:ContextLaunch, held:dict[str, UOp], device:int, attend:Attend) -> UOp:
  """Makes one launch of attention on the device's tensors `held`, and returns the buffer with its results."""
  name, axis = c.devices[device], AXES[c.problem.layout].index("rows")
  p = replace(launch_problem(c.problem, launch), out_dtype="float32")
  p = with_views(p, c.arch, {x: held[x].max_shape for x in ("k", "v") if x in held}, launch.keys)
  t = held | {"q": rows_in_buffer(held["q"], axis, launch.queries.first, launch.queries.count)}
  if p.k_view is None: t |= {x: rows_in_buffer(t[x], axis, launch.keys.first, launch.keys.count) for x in ("k", "v") if x in t}
  t |= launch_tensors(c, t, launch)
  tensors = {x: Tensor(u) for x, u in t.items()}
  if choose(p, c.arch).kernel == "three_pass": return packed(p, attend(p, tensors, name, ()))
  return written_part(p, name, lambda *into: attend(p, tensors, name, [Tensor(u) for u in into])[0].uop.src[1])

@cache_of_kernels
def merge_kernel(p:Problem, arch:Chip, parts:tuple[RowRange, ...], real_rows:tuple[RowRange, ...], only_plain_uops:bool) -> KernelFunction:
  """Returns the kernel function that merges partial results into the outputs of `p`. Partial result n holds the rows parts[n]."""
  # Its arguments are the outputs, one buffer for each partial result, and the sinks if p.sinks. `parts` lists which rows each partial result holds.
  # `real_rows` lists the rows that are no padding; only these get the sinks. With `only_plain_uops` any device can run the kernel. Equal arguments
  # return the identical object, because tinygrad's schedule cache compares by identity.
  merging = merge(p, arch, parts, real_rows)
  program = (lambda *args: plain(merging(*args))) if only_plain_uops else merging
  takes = len(p.outputs) + len(parts) + p.sinks
  return lambda *placeholders: CheckedKernel(checked_ast(program, arch, *placeholders[:takes]), p.outputs, small=True, takes=takes)

@dataclass(frozen=True)
class ContextPart:
  """A partial result on one device: the buffer `found` has o and lse of the rows `rows`, computed over some of the keys."""
  rows: RowRange
  found: UOp

def merge_call(c:SharedRows, p:Problem, parts:list[ContextPart], outputs:tuple[UOp, ...], sinks:UOp|None=None,
               real_rows:tuple[RowRange, ...]=()) -> UOp:
  """Returns the UOp of a launch that merges the partial results `parts` into the outputs of `p`."""
  # `outputs` begins with the buffers for the outputs. The launch takes the further buffers as arguments but does not use them, so that tinygrad keeps
  # them. `real_rows` lists the rows that are no padding.
  p = replace(p, sinks=sinks is not None, num_splits=1)
  kernel = merge_kernel(p, c.arch, tuple(part.rows for part in parts), real_rows, c.arch.name not in CHIPS)
  given = [part.found for part in parts] + ([sinks] if sinks is not None else [])
  count = len(p.outputs)
  return UOp.custom_kernel(*outputs[:count], *given, *outputs[count:], fxn=kernel)[0].src[1]

def merged_part(c:SharedRows, parts:list[ContextPart], device:int) -> ContextPart:
  """Merges the partial results of a device into one result that covers all query rows of the device."""
  p, rows = replace(c.own, out_dtype="float32"), RowRange(0, c.own.Sq)
  if len(parts) == 1 and parts[0].rows == rows: return parts[0]
  return ContextPart(rows, written_part(p, c.devices[device], lambda *into: merge_call(c, p, parts, into)))

# ***** all devices *****

def found_by(c:SharedRows, held:dict[str, list[UOp]], device:int, attend:Attend) -> list[ContextPart]:
  """Makes all launches of a device, each over the keys of one device, and returns their partial results."""
  plan, parts = c.shards.plan(c.problem, device), list[ContextPart]()
  keys = {name: shards for name, shards in held.items() if name in ("k", "v")}
  others = {name: shards[device] for name, shards in held.items() if name not in ("k", "v", "sinks")}
  for (_, some), of_owner in zip(plan, passed(keys, device, c.devices[device], [owner for owner, _ in plan])):
    for launch in some:
      # So no more than PARTS_KEPT partial results are in memory.
      if len(parts) == PARTS_KEPT: parts = [merged_part(c, parts, device)]
      rows = RowRange(launch.queries.first, launch.queries.count)
      parts.append(ContextPart(rows, run_launch(c, launch, others | of_owner, device, attend)))
  return parts

def merged_over(c:SharedRows, held:dict[str, list[UOp]], attend:Attend, outputs:dict[str, UOp]) -> UOp:
  """Computes attention by merging partial results of all devices: fills the buffers `outputs`, and returns the UOp of the last launch."""
  parts = [found_by(c, held, device, attend) for device in range(len(c.devices))]
  if c.shards.queries is None: parts = exchanged(c, parts)
  states = outputs
  for i, some in enumerate(parts):     # each CALL comes after the one before it, because for tinygrad all of them write to the same buffer
    into = tuple(of_device(u, i) for u in states.values())
    call = merge_call(c, c.own, some, into, held["sinks"][i] if "sinks" in held else None, c.real_rows(i))
    states = {name: u.after(call) for name, u in states.items()}
  return call

def run_shared_rows(c:SharedRows, inputs:Mapping[str, UOp], attend:Attend) -> dict[str, UOp]:
  """Computes attention of `inputs`, whose rows are sharded over devices; returns by name o, lse, and the tensors that a gradient needs."""
  # o and lse, sharded like q, are buffers that are still to be filled. merged_o, merged_lse and merged_lse_rest are the filled outputs, which a
  # gradient needs. `attend` makes one launch.
  held = {name: shards_of(u) for name, u in inputs.items()}
  shapes, layout = c.own.shapes, c.problem.layout
  axes = {name: AXES[layout] if name == "o" else lse_axes(layout) for name in c.own.outputs}
  buffers = {name: new_buffer(shapes[name][0], FLOATS[shapes[name][1]], c.at.device) for name in axes}
  call = gathered_over(c, inputs, held, attend, buffers) if c.gathers else merged_over(c, held, attend, buffers)
  def on_all(name:str) -> UOp:
    u = buffers[name]
    return u if c.shards.queries is None or isinstance(u.device, str) else u.unshard(axes[name].index("rows"))
  return {name: on_all(name) for name in OUTPUTS} | {f"merged_{name}": u.after(call) for name, u in buffers.items()}

def exchanged(c:SharedRows, parts:list[list[ContextPart]]) -> list[list[ContextPart]]:
  """Merges the partial results on each device into one, and copies this one to every device. Returns, for each device, the merged results of all
  devices."""
  # A device whose queries see no key has no result.
  found = [(i, merged_part(c, some, i)) for i, some in enumerate(parts) if some]
  return [[ContextPart(part.rows, part.found if i == to else part.found.copy_to_device(name)) for i, part in found]
          for to, name in enumerate(c.devices)]

def first_launch(p:Problem, shards:SequenceShards) -> Problem:
  """Returns a launch's problem as an example: the first launch in which some device attends to the keys of a single device, or `p` without
  launches."""
  some = [launch for device in range(shards.count) for _, launches in shards.plan(p, device) for launch in launches]
  return replace(launch_problem(p, some[0]), out_dtype="float32") if some else p
