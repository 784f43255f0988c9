"""Tests of sequences whose rows are sharded over devices. The keys that queries see in each launch are compared with the mask of the whole sequence,
and results with float64. Other tests check what is copied between devices and what is refused."""
from __future__ import annotations
import collections, itertools, math, random, re, zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
import numpy as np
import pytest
import attn
from attn.accuracy import judge
from attn.api import checked_call
from attn.calls import checked_kernel
from attn.calls.options import DEFAULTS
from attn.calls.kept_graphs import recipes
from attn.chips import get_chip, other_chip
from attn.emulator.checks import UninitialisedRead
from attn.kernels.merge import RowRange, merge, part_places
from attn.kernels.parts.grid.workgroup import rows_of_block
from attn.kernels.parts.program.blocks import extent
from attn.kernels.tiles.common import blocks_of_queries
from attn.measure import context as measure
from attn.ops.plain import plain
from attn.parallel import context, context_gradient, shards as dealing
from attn.parallel.shards import SequenceShards, head_chunks, pieces_of, rows_held
from attn.problem import ORDERS, Problem
from attn.reference import rounded, visible
from attn.tinygrad_compat import Context, Device, Ops, Target, Tensor, TinyJit, UOp, cuda, dtypes, lower, with_selected_inputs
import tinygrad.schedule
from tinygrad.renderer.cstyle import ClangRenderer
from api_cases import draw, emulated, extra, floats, whole
from cases import DTYPES, arrange, array, expected, expected_gradients, hold, normal, problem, restore, tensor
from stand_in_graph import StandInGraph

pytestmark = pytest.mark.usefixtures("not_unrolled")

ROWS = {"bhsd": 2, "bshd": 1, "nsd": 1}          # axis of the rows in q, k, v and o
LSE_ROWS = {"bhsd": 2, "bshd": 2, "nsd": 1}
def devices(n:int) -> tuple[str, ...]: return tuple(f"EMU:{i}" for i in range(n))

# ***** what the launches see *****

def shards(p:Problem, count:int, order:str, whole_q:bool=False) -> SequenceShards:
  return SequenceShards(count, order, rows_held(p.Sk, count, order), None if whole_q else rows_held(p.Sq, count, order))

def held(s:SequenceShards, rows:int, length:int, device:int) -> np.ndarray:
  # Returns the position in the sequence of each row on a device, -1 for padding.
  # This follows docs/sharding.md, and uses none of the functions under test. `rows` is the number of rows on a device, `length` that of the sequence.
  places = np.arange(rows*s.count)
  pieces = np.split(np.where(places < length, places, -1), s.count if s.order == "contiguous" else 2*s.count)
  return pieces[device] if s.order == "contiguous" else np.concatenate([pieces[device], pieces[-1 - device]])

def counted(p:Problem, s:SequenceShards) -> np.ndarray:
  # Counts for each pair (query, key) how many launches on all devices see it; the array (Sq, Sk) should equal the mask.
  seen = np.zeros((p.Sq, p.Sk), int)
  for device in range(s.count):
    mine = np.arange(p.Sq) if s.queries is None else held(s, s.queries, p.Sq, device)
    for owner, launches in s.plan(p, device):
      theirs = held(s, s.keys, p.Sk, owner)
      for launch in launches:
        i, j = (table[run.first:run.first + run.count] for table, run in ((mine, launch.queries), (theirs, launch.keys)))
        assert (i >= 0).all() and (j >= 0).all(), "a launch computes or sees rows of padding"
        mask = visible(len(i), len(j), launch.seen.window, launch.seen.offset)
        seen[np.ix_(i, j)] += mask
        distances = np.arange(len(i))[:, None] + launch.seen.offset - np.arange(len(j))
        assert not p.alibi or (distances == i[:, None] + p.offset - j)[mask].all()
  return seen

def check_plan(p:Problem, s:SequenceShards) -> None:
  np.testing.assert_array_equal(counted(p, s), visible(p.Sq, p.Sk, p.window, p.offset))

def sized(Sq:int, Sk:int, window:tuple[int, int], offset:int, alibi:bool=False) -> Problem:
  return Problem(1, 1, 1, Sq, Sk, 8, 8, window=window, offset=offset, alibi=(True,) if alibi else None, softmax_scale=1.0)

def drawn(count:int) -> Iterator[tuple[Problem, SequenceShards]]:
  rng = random.Random(5)
  for _ in range(count):
    Sq, Sk = (rng.choice((1, 3, 7, 16, 33, 64)) for _ in range(2))
    window = rng.choice(((-1, -1), (-1, 0), (5, 0), (3, 4), (-1, 9), (20, 0)))
    p = sized(Sq, Sk, window, rng.choice((0, Sk - Sq)), rng.random() < .3)
    yield p, shards(p, rng.choice((1, 2, 3, 4, 8)), rng.choice(("contiguous", "zigzag")), rng.random() < .3)

def test_launches_see_what_the_mask_leaves_once() -> None:
  for p, s in drawn(300): check_plan(p, s)

@pytest.mark.parametrize("count", (2, 4, 8))
def test_a_causal_mask_takes_one_launch_of_an_owner_and_the_same_work_of_all(count:int) -> None:
  p = sized(16*count, 16*count, (-1, 0), 0)
  s = shards(p, count, "zigzag")
  seen = counted(p, s)
  for device in range(count):
    assert [len(launches) for _, launches in s.plan(p, device)] == [1]*count
    assert s.queries is not None
    assert seen[held(s, s.queries, p.Sq, device)].sum() == seen.sum()//count
  first = shards(p, count, "contiguous").plan(p, 0)
  assert [owner for owner, _ in first] == [0]      # all keys of the other devices come after its queries

def broken_plan(monkeypatch:pytest.MonkeyPatch, name:str, fault:Any) -> None:
  original = getattr(dealing, name)
  monkeypatch.setattr(dealing, name, lambda *args: fault(original(*args)))

FAULTS = {
  "a piece is dropped": ("launches", lambda found: found[1:]),
  "the diagonal is off by one": ("as_one", lambda seen: seen and replace(seen, offset=seen.offset + (seen.window != (-1, -1)))),
  "pieces are swapped": ("pieces_of", lambda found: tuple(replace(x, at=y.at) for x, y in zip(found, found[::-1]))),
  "padding is seen": ("pieces_of", lambda found: tuple(replace(x, rows=8) for x in found))}

@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_of_the_plan_are_seen(monkeypatch:pytest.MonkeyPatch, fault:str) -> None:
  p = sized(30, 30, (-1, 0), 0)
  s = shards(p, 2, "zigzag")
  check_plan(p, s)
  broken_plan(monkeypatch, *FAULTS[fault])
  with pytest.raises((AssertionError, IndexError)): check_plan(p, s)

@pytest.mark.parametrize("count, order", ((1, "zigzag"), (2, "zigzag"), (3, "zigzag"), (3, "contiguous")))
@pytest.mark.parametrize("block_m", (3, 5, 8))
def test_a_kernel_knows_where_queries_are(count:int, order:str, block_m:int) -> None:
  # A kernel computes the right position in the whole sequence for each query, if a device holds one or two pieces of 5 rows. No block of queries has
  # rows of two pieces.
  length = 5*count*ORDERS[order] - 3
  p = sized(length, length, (-1, 0), 0)
  s = shards(p, count, order)
  for device in range(count):
    mine = held(s, s.keys, length, device)
    q = s.dealt(p, device, (0, 1))
    assert [q.place(row) for row in range(q.queries)] == mine[mine >= 0].tolist()
    assert places_of_blocks(q, block_m) == mine[mine >= 0].tolist()

def check_keys(p:Problem, s:SequenceShards) -> None:
  # Checks that each device gets the keys that its queries see, and REACH rows around them, at the addresses that its kernel reads.
  keys, heads = np.arange(p.Sk), np.arange(p.B*p.Hkv)[:, None]
  for device in range(s.count):
    mine = held(s, s.queries or 0, p.Sq, device)
    seen = visible(p.Sq, p.Sk, p.window, p.offset)[mine[mine >= 0]]
    gathered, found = s.keys_gathered(p, device), set[int]()
    for rows in (*s.keys_held(p, device), *(rows for _, rows in s.keys_copied(p, device))):
      assert gathered.start <= rows.start and rows.stop <= gathered.stop
      found |= {*rows}
    for owner, rows in s.keys_copied(p, device): assert {*rows} <= {*held(s, s.keys, p.Sk, owner).tolist()} and owner != device
    for row in seen:
      for j in np.flatnonzero(row): assert {*range(max(0, j - dealing.REACH), min(p.Sk, j + dealing.REACH + 1))} <= found
    view = s.dealt(p, device, (0, p.B*p.Hkv)).k_view
    assert view is not None and view.size == len(gathered)*p.B*p.Hkv*p.D
    places = view.start + heads//p.Hkv*view.batch + heads%p.Hkv*view.head + keys[gathered.start:gathered.stop]*view.row
    assert (places//p.D == np.arange(len(gathered))*p.B*p.Hkv + heads).all()

def test_keys_are_where_kernels_look_for_them(monkeypatch:pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(dealing, "REACH", 3)
  some = [(replace(p, B=2, H=3, Hkv=3), s) for p, s in drawn(150) if s.queries is not None and s.count > 1]
  for p, s in some: check_keys(p, s)
  def short(s:SequenceShards, p:Problem, device:int) -> tuple[range, ...]:
    return tuple(range(piece.start, piece.start + piece.rows - 1) for piece in s.keys_of(p, device))
  monkeypatch.setattr(SequenceShards, "keys_held", short)
  with pytest.raises(AssertionError):
    for p, s in some: check_keys(p, s)

def places_of_blocks(p:Problem, block_m:int) -> list[int]:
  # Returns the position in the sequence of each query, from the blocks of `block_m` rows; fails if a query is in two blocks.
  tile: Any = SimpleNamespace(block_m=block_m, pack_gqa=False)
  places = dict[int, int]()
  for number in range(math.prod(blocks_of_queries(p, tile))):
    own = rows_of_block(p, tile, extent(p, UOp.const(0), {}), UOp.const(number), False)
    first, last, end, further = (int((UOp.const(0) + x).simplify().val) for x in (own.first, own.last, own.end, own.further))
    rows = range(first, min(last + 1, end))
    assert not places.keys() & {*rows}
    places |= {row: row + further for row in rows}
  return [places[row] for row in range(p.queries)]

# ***** sharding rows and back *****

@pytest.mark.parametrize("count, order, length", ((1, "zigzag", 5), (2, "zigzag", 13), (4, "contiguous", 3)))
def test_shard_and_unshard_give_the_sequence_back(count:int, order:str, length:int) -> None:
  a = np.arange(2*length*3, dtype=np.float32).reshape(2, length, 3)
  with emulated("gfx942"):
    x = attn.shard_sequence(Tensor(a, device="EMU"), devices(count), 1, order)
    assert x.shape[1] == rows_held(length, count, order)*count and (count == 1 or x.uop.axis == 1)
    np.testing.assert_array_equal(attn.unshard_sequence(x, -2, length, order).numpy(), a)

def test_zigzag_deals_out_front_and_back() -> None:
  with emulated("gfx942"):
    x = attn.shard_sequence(Tensor(np.arange(7, dtype=np.float32), device="EMU"), devices(2), 0)
    assert whole(x).tolist() == [0, 1, 6, 0, 2, 3, 4, 5]      # the pieces are (0, 1), (2, 3), (4, 5) and (6, padding)

# ***** results *****

def check(count:int, order:str="zigzag", arch:str="gfx942", kernel:str="", *, keys:bool=False, extras:dict[str, np.ndarray]|None=None,
          shared_bias:bool=False, **parameters:Any) -> None:
  # Checks that o and lse of `attention` on `count` devices are within their error limits (docs/contract.md).
  # The rows of q, k and v are sharded over the devices. With `keys` only k and v are, and each device has all of q. `extras` are optional inputs,
  # such as a bias, by name; each device has all of them. With `shared_bias`, the rows of the bias are sharded like those of q.
  extras = extras or {}
  p = problem(extras=extras, **parameters)
  x, axis = normal(p), ROWS[p.layout]
  call = {name: value for name, value in parameters.items() if name in DEFAULTS and name != "out_dtype"}
  at = devices(count)
  with emulated(arch, kernel):
    def dealt(a:np.ndarray, name:str) -> Tensor:
      t = tensor(arrange(a, p.layout), p.dtype)
      if keys and name == "q": return t.shard(at)
      return attn.shard_sequence(t, at, axis, order)
    def optional(name:str, a:np.ndarray) -> Tensor:
      t = extra(name, a, p.bias_dtype)
      return attn.shard_sequence(t, at, 2, order) if shared_bias and name == "bias" else t.shard(at)
    o, lse = attn.attention(*(dealt(getattr(x, name), name) for name in "qkv"), return_lse=True, out_dtype=DTYPES[p.out_dtype],
                            sequence_order=order, sequence_lengths=(p.Sq, p.Sk), **call,
                            **{name: optional(name, a) for name, a in extras.items()})
    assert not keys or (o.uop.axis, lse.uop.axis) == (None, None)
    Tensor.realize(o, lse)
    if keys: o, lse = whole(o), whole(lse)
    else:
      padding = array(whole(o).transpose(0, axis)), whole(lse).transpose(0, LSE_ROWS[p.layout]).numpy()
      there = np.concatenate([i*rows_held(p.Sq, count, order) + np.arange(x.at, x.at + x.rows)
                              for i in range(count) for x in pieces_of(i, count, order, rows_held(p.Sq, count, order), p.Sq)])
      assert (np.delete(padding[0], there, 0) == 0).all() and (np.delete(padding[1], there, 0) == -np.inf).all()
      o, lse = attn.unshard_sequence(o, axis, p.Sq, order), attn.unshard_sequence(lse, LSE_ROWS[p.layout], p.Sq, order)
    got, got_lse = restore(array(o), p.layout, (p.B, p.H, p.Sq, p.Dv)), lse.numpy().reshape(p.B, p.H, p.Sq)
  hold(p, x, extras, got, got_lse)

SLOPES, SINKS = np.float32([.5, .25]), np.float32([1.5, -1])
CASES = {
  "fewer rows than pieces": (8, {"causal": True, "Sq": 3, "extras": {"sinks": SINKS}, "D": 16}),
  "causal, without a matrix unit": (2, {"causal": True, "H": 1, "Sq": 20, "D": 8, "arch": "gfx1030", "dtype": "float32"}),
  "causal, grouped heads": (2, {"causal": True, "H": 4, "Hkv": 2, "Sq": 70}),
  "window and bias": (2, {"window": (20, 3), "Sq": 40, "Sk": 33, "layout": "bshd",
                          "extras": {"bias": floats(1, 2, 40, 33)}, "shared_bias": True}),
  "contiguous": (4, {"causal": True, "Sq": 33, "order": "contiguous", "arch": "sm_90", "dtype": "bfloat16",
                     "layout": "nsd", "softcap": 5.0})}
MORE = {
  "full": {"Sq": 70, "Sk": 50},
  "top left": {"Sq": 50, "Sk": 90, "causal": "top-left"},
  "more queries": {"Sq": 90, "Sk": 31, "causal": True},
  "window": {"Sq": 90, "window": (13, 0), "causal": True},
  "alibi": {"Sq": 50, "Sk": 91, "causal": True, "extras": {"alibi_slopes": SLOPES}},
  "sinks": {"Sq": 60, "Sk": 31, "extras": {"sinks": SINKS}},
  "softcap": {"Sq": 40, "softcap": 3.0, "causal": True},
  "bias of keys": {"Sq": 40, "Sk": 31, "extras": {"bias": floats(1, 1, 1, 31)}},
  "bias": {"Sq": 40, "causal": True, "extras": {"bias": floats(1, 2, 40, 40)}},
  "splits": {"Sq": 40, "Sk": 300, "num_splits": 2},
  "lengths below": {"Sq": 3, "Sk": 2},
  "batches": {"B": 2, "H": 4, "Hkv": 1, "Sq": 33, "causal": True}}

@pytest.mark.parametrize("name", [name if i < 2 else pytest.param(name, marks=pytest.mark.thorough)
                                  for i, name in enumerate(CASES)])
def test_contract(name:str) -> None:
  count, parameters = CASES[name]
  check(count, **parameters)

@pytest.mark.parametrize("keys", (False, True))
@pytest.mark.parametrize("layout", ROWS)
@pytest.mark.parametrize("arch, kernel, dtype", (("gfx942", "", "float16"), ("gfx1100", "", "bfloat16"), ("sm_80", "", "float16"),
                                                 ("gfx1030", "", "float32"), ("gfx942", "three_pass", "float16")))
@pytest.mark.parametrize("count, order", ((2, "zigzag"), (4, "zigzag"), (4, "contiguous"), (8, "zigzag"), (1, "zigzag")))
@pytest.mark.parametrize("name", MORE)
@pytest.mark.thorough
def test_contract_of_every_option(name:str, count:int, order:str, arch:str, kernel:str, dtype:str, layout:str, keys:bool) -> None:
  if keys and count == 1: pytest.skip("one device holds all keys")
  if kernel and "splits" in name: pytest.skip("three_pass has no splits")
  check(count, order, arch, kernel, keys=keys, layout=layout, dtype=dtype, **MORE[name])

def test_a_tile_has_rows_that_no_query_sees(monkeypatch:pytest.MonkeyPatch) -> None:
  # A tile reads rows before and after the rows that a window shows, so a device copies REACH more rows. If REACH is 0, the emulator stops at a read
  # of rows that were not copied.
  monkeypatch.setattr(dealing, "REACH", 0)
  with pytest.raises(UninitialisedRead): check(2, Sq=300, D=16, H=1, window=(70, 0), causal=True)

@pytest.mark.thorough
@pytest.mark.parametrize("order", ("zigzag", "contiguous"))
@pytest.mark.parametrize("arch, dtype", (("gfx942", "float16"), ("gfx1100", "bfloat16"),
                                         ("sm_80", "float16"), ("sm_90", "bfloat16")))
def test_windows_of_long_sequences(monkeypatch:pytest.MonkeyPatch, arch:str, dtype:str, order:str) -> None:
  # A device copies only a part of a long sequence if there is a window. REACH, the number of rows that it copies before and after the visible ones,
  # is 256 here; these kernels need fewer.
  monkeypatch.setattr(dealing, "REACH", 256)
  check(2, order, arch, Sq=1300, D=32, H=1, window=(70, 0), causal=True, dtype=dtype)

def test_wide_scores_of_an_odd_number_of_rows() -> None:
  # Results are right if a device's partial result has 5 rows. `lse_rest`, the part of lse that fp32 loses, then begins at no multiple of 16 bytes in
  # the device's buffer.
  check(2, keys=True, H=1, Sq=5, Sk=12, D=16, extras={"bias": floats(1, 1, 1, 12)})

@pytest.mark.thorough
def test_a_bias_of_one_query() -> None:
  # A bias of one row for a sequence of one query belongs to this query, and is not taken for a row that applies to all queries. The second device has
  # only padding and no query.
  check(2, Sq=1, Sk=31, D=16, extras={"bias": floats(1, 2, 1, 31)})

@pytest.mark.thorough
def test_devices_without_regions(monkeypatch:pytest.MonkeyPatch) -> None:
  # Results are right on devices, such as OpenCL's, where a kernel cannot take a part of a buffer as an argument and the renderer does not know attn's
  # operations. A device then computes its queries over the keys of one device after another, and kernels of plain UOps merge the results.
  monkeypatch.setattr(context, "region", lambda u: None)
  monkeypatch.setattr(context, "CHIPS", {})
  check(2, kernel="tiled", Sq=6, Sk=5, D=6, dtype="float32", extras={"sinks": SINKS})

def test_sharded_keys_with_whole_queries() -> None:
  # Results are right if the keys are sharded over devices and every device has the single query, as in decoding. The order "zigzag" gives each device
  # two pieces of the keys.
  check(4, Sq=1, Sk=70, H=4, Hkv=1, causal=True, keys=True, extras={"sinks": np.float32([1, 2, -1, 0])})

def test_sharded_keys_without_workgroups(monkeypatch:pytest.MonkeyPatch) -> None:
  # Results are right if the keys are sharded over two chips without workgroups. Kernels then loop over the grid, as on a CPU, and so does the kernel
  # that merges results.
  for module in (checked_call, checked_kernel):
    monkeypatch.setattr(module, "arch_of", lambda device: replace(get_chip("gfx1030"), lds=0, serial=True))
  check(2, arch="gfx1030", kernel="tiled", Sq=6, Sk=5, D=6, keys=True, dtype="float32")
  # one thread writes four numbers of lse at once
  check(2, arch="gfx1030", kernel="tiled", Sq=5, Sk=6, D=6, H=1, keys=True, dtype="float32")
  p = problem(Sq=6, D=6, H=1, dtype="float32", lse=True)
  numbers = [UOp.placeholder((n,), dtypes.float, i) for i, n in enumerate((36, 6, part_places(p, 6)[-1], part_places(p, 6)[-1]))]
  sink = plain(merge(p, other_chip("CPU", 0, serial=True), (RowRange(0, 6),)*2)(*numbers))
  source = (renderer := ClangRenderer(Target("CPU", arch="x86_64,native"))).render(lower(sink, renderer))
  assert re.findall(r"for \(int \w+ = 0; \w+ < (\d+)", source) and "core_id" not in source

# ***** gradients *****

def check_gradients(count:int, order:str="zigzag", arch:str="gfx942", *, keys:bool=False, extras:dict[str, np.ndarray]|None=None,
                    shared_bias:bool=False, **parameters:Any) -> None:
  # Checks that the gradients of a loss that uses o and lse, on `count` devices, are within their error limits (docs/contract.md).
  # The arguments are those of `check`.
  extras = extras or {}
  p = problem(extras=extras, **parameters)
  x, axis, lse_axis, at = normal(p), ROWS[p.layout], LSE_ROWS[p.layout], devices(count)
  rng = np.random.default_rng(11)
  do = rounded(rng.standard_normal((p.B, p.H, p.Sq, p.Dv), np.float32), p.out_dtype)
  dlse = rng.standard_normal((p.B, p.H, p.Sq), np.float32)
  call = {name: value for name, value in parameters.items() if name in DEFAULTS and name != "out_dtype"}
  with emulated(arch), Context(TRAINING=1):
    def dealt(t:Tensor, along:int, to_all:bool) -> Tensor:
      return t.shard(at) if to_all else attn.shard_sequence(t, at, along, order)
    given = {name: dealt(tensor(arrange(a, p.layout), p.dtype), axis, keys and name == "q") for name, a in vars(x).items()}
    given |= {name: dealt(extra(name, a, p.bias_dtype), 2, not (shared_bias and name == "bias")) for name, a in extras.items()}
    o, lse = attn.attention(**given, return_lse=True, sequence_order=order, sequence_lengths=(p.Sq, p.Sk), **call)
    loss = (o*dealt(tensor(arrange(do, p.layout), p.out_dtype), axis, keys)).float().sum()
    of_lse = dealt(tensor(dlse.reshape(-1, p.Sq) if p.layout == "nsd" else dlse, "float32"), lse_axis, keys)
    loss = loss + (lse.isinf().where(0.0, lse)*of_lse).sum()
    gradients = dict(zip(given, loss.gradient(*given.values())))
    Tensor.realize(*gradients.values())
    got = {}
    for name, g in gradients.items():
      assert (g.shape, g.dtype, g.uop.axis) == (given[name].shape, given[name].dtype, given[name].uop.axis)
      rows, along = p.Sk if name in "kv" else p.Sq, 2 if name == "bias" else axis
      got[name] = array(whole(g) if g.uop.axis is None else attn.unshard_sequence(g, along, rows, order))
  for name in "qkv": got[name] = restore(got[name], p.layout, getattr(x, name).shape)
  for name, law in expected_gradients(p, x, extras, do, dlse).items():
    assert (verdict := judge(got[name], law)).ok, f"d{name}: {verdict}"

SMALL = {"Sq": 8, "D": 16, "H": 2, "Hkv": 1}

def test_gradients_go_back_to_their_owners(monkeypatch:pytest.MonkeyPatch) -> None:
  check_gradients(2, **SMALL)
  added_up = context_gradient.added_up
  # loses the results of other devices
  monkeypatch.setattr(context_gradient, "added_up", lambda parts, *args: added_up(parts[:1], *args))
  recipes.cache_clear()
  with pytest.raises(AssertionError, match=r"d[qkv]: error"): check_gradients(2, **SMALL)

@pytest.mark.parametrize("keys", (False, True))
@pytest.mark.parametrize("arch, dtype", (("gfx942", "float16"), ("sm_90", "bfloat16"), ("gfx1030", "float32")))
@pytest.mark.parametrize("count, order", ((2, "zigzag"), (4, "zigzag"), (4, "contiguous"), (8, "zigzag")))
@pytest.mark.parametrize("name", MORE)
@pytest.mark.thorough
def test_gradients_of_every_option(name:str, count:int, order:str, arch:str, dtype:str, keys:bool) -> None:
  if "splits" in name: pytest.skip("gradients are not computed by splits")
  check_gradients(count, order, arch, keys=keys, dtype=dtype, D=16, **MORE[name])

def test_the_gradient_of_a_sum_and_a_shard_of_padding() -> None:
  # Gradients are right if dO is one number everywhere, and if one device has only padding and no query.
  with emulated("gfx942"):
    x = [draw(1, 1, rows, 16) for rows in (1, 6, 6)]
    def gradients(place:Any, **options:Any) -> list[np.ndarray]:
      return [g.numpy() for g in attn.attention(*map(place, x), causal=True, **options).float().sum().gradient(*x)]
    def shard(t:Tensor) -> Tensor: return attn.shard_sequence(t, devices(2), 2, "contiguous")
    shared = gradients(shard, sequence_order="contiguous", sequence_lengths=(1, 6))
    for got, want in zip(shared, gradients(lambda t: t)): np.testing.assert_allclose(got, want, atol=2e-3)

@pytest.mark.thorough
def test_gradients_of_a_bias_sharded_like_q() -> None:
  check_gradients(2, Sq=12, Sk=30, D=16, extras={"bias": floats(1, 2, 12, 30)}, shared_bias=True)

# ***** results, read in any order *****

SHARED = {"rows": 2, "keys": 2, "heads": 1, "batch": 0}     # what the devices share, and the sharded axis of k and v

def groups(names:list[str], seed:int) -> list[list[str]]:
  rng = random.Random(seed)
  order = rng.sample(names, len(names))
  cuts = sorted(rng.sample(range(1, len(order)), rng.randrange(len(order))))
  return [order[i:j] for i, j in itertools.pairwise((0, *cuts, len(order)))]

def check_reading(count:int, shared:str, reading:Callable[[list[str]], list[list[str]]], *, order:str="zigzag", calls:int=1, arch:str="gfx942",
                  extras:dict[str, np.ndarray]|None=None, **parameters:Any) -> None:
  # Checks o, lse and all gradients on `count` devices, where `reading` says which of these results are realized together.
  # `shared` says what is sharded over the devices: "rows", "keys", "heads" or "batch". `reading` divides the names of the results into groups, which
  # are realized one after another. With `calls` above 1, everything is computed that many times under TinyJit, with other inputs each time.
  p, at, extras = problem(extras=extras, **parameters), devices(count), extras or {}
  options, in_order = {name: parameters[name] for name in ("causal", "softcap") if name in parameters}, shared in ("rows", "keys")
  if in_order: options |= {"sequence_order": order}
  def dealt(t:Tensor, name:str) -> Tensor:
    if name in extras or (shared == "keys" and name not in ("k", "v")): return t.shard(at).realize()
    return (attn.shard_sequence(t, at, 2, order) if in_order else t.shard(at, SHARED[shared])).realize()
  def taken(t:Tensor) -> np.ndarray:
    return array(attn.unshard_sequence(t, 2, t.shape[2], order) if in_order and t.uop.axis == 2 else whole(t))
  def computed(*tensors:Tensor) -> list[Tensor]:
    given = dict(zip(names, tensors))
    do, dlse = given.pop("do"), given.pop("dlse")
    o, lse = attn.attention(**given, return_lse=True, **options)
    of = [name for name in given if name != "alibi_slopes"]
    loss = (o*do).float().sum() + (lse*dlse).sum()
    found = dict(zip(of, loss.gradient(*[given[name] for name in of]))) | {"o": o, "lse": lse}
    for together in reading([*found]): Tensor.realize(*[found[name] for name in together])
    results[:] = found
    return [*found.values()]
  names, results, step = ["q", "k", "v", *extras, "do", "dlse"], list[str](), computed if calls == 1 else TinyJit(computed)
  with emulated(arch), Context(TRAINING=1):
    for seed in range(calls):
      x, rng = normal(p, seed), np.random.default_rng(11 + seed)
      do, dlse = rounded(rng.standard_normal((p.B, p.H, p.Sq, p.Dv), np.float32), p.out_dtype), floats(p.B, p.H, p.Sq, seed=seed)
      tensors = [tensor(a, p.dtype) for a in (x.q, x.k, x.v)] + [extra(name, a) for name, a in extras.items()]
      tensors += [tensor(do, p.out_dtype), tensor(dlse, "float32")]
      got = dict(zip(names, map(dealt, tensors, names)))
      got = {name: taken(t) for name, t in zip(results, step(*got.values()))}
      laws = expected_gradients(p, x, extras, do, dlse) | dict(zip(("o", "lse"), expected(p, x, extras)))
      for name, result in got.items():
        assert (verdict := judge(result, laws[name])).ok, f"call {seed}, {name} or its gradient: {verdict}"

def one_by_one(names:list[str]) -> list[list[str]]: return [[name] for name in names]

def test_gradients_are_read_one_by_one(monkeypatch:pytest.MonkeyPatch) -> None:
  # Gradients are right on three devices if they are realized one after another and each device has only one buffer for keys of other devices. Each
  # copy into the buffer then overwrites the one before.
  monkeypatch.setattr(context, "SLOTS", 1)
  check_reading(3, "rows", one_by_one, order="contiguous", calls=3, Sq=48, H=1, D=16)

class AnyOrder(collections.deque[Any]):
  # Queue of the kernels that tinygrad's scheduler may take next, which gives a random one instead of the first.
  def __init__(self, ready:Iterable[Any], rng:random.Random) -> None:
    super().__init__(ready)
    self.rng = rng
  def popleft(self) -> Any:
    self.rotate(self.rng.randrange(len(self)))
    return super().popleft()

def in_any_order(monkeypatch:pytest.MonkeyPatch, seed:int) -> Context:
  # Makes tinygrad schedule kernels in random orders that their dependencies allow.
  rng = random.Random(seed)
  monkeypatch.setattr(tinygrad.schedule, "deque", lambda ready: AnyOrder(ready, rng))
  return Context(SCACHE=0)

@pytest.mark.sample(2)
@pytest.mark.parametrize("launches", (1, 3))
@pytest.mark.parametrize("seed", (1, 2))
def test_no_launch_is_before_the_keys_that_it_reads(monkeypatch:pytest.MonkeyPatch, seed:int, launches:int) -> None:
  # A kernel on a device waits for all copies of keys that it reads, in whatever order tinygrad schedules kernels and copies.
  def chunks(p:Problem, shards:SequenceShards) -> list[tuple[int, int]]:
    return [(head, p.Hkv//launches) for head in range(0, p.Hkv, p.Hkv//launches)]
  monkeypatch.setattr(context, "head_chunks", chunks)
  with in_any_order(monkeypatch, seed): check(4, H=launches, Sq=16, D=16)

def test_gradients_in_any_order(monkeypatch:pytest.MonkeyPatch) -> None:
  with in_any_order(monkeypatch, 1): check_gradients(3, **SMALL)

READ: dict[str, dict[str, Any]] = {
  "plain": {},
  "causal": {"causal": True},
  "grouped heads": {"softcap": 3.0, "Hkv": 1},
  "bias": {"extras": {"bias": floats(1, 2, 80, 80)}},
  "sinks": {"causal": True, "extras": {"sinks": SINKS}},
  "slopes": {"causal": True, "extras": {"alibi_slopes": SLOPES}}}

def scaled_up(shared:str, count:int, *, extras:dict[str, np.ndarray]|None=None, Hkv:int=2, **parameters:Any) -> dict[str, Any]:
  # Returns the parameters of a problem of the table READ, changed so that it can be sharded evenly over `count` devices.
  # Every device gets the same number of rows, batches or heads. `shared` says what is sharded: "rows", "keys", "heads" or "batch".
  rows, heads = 80//(2*count)*2*count, count if shared == "heads" else 1
  def scaled(name:str, a:np.ndarray) -> np.ndarray:
    return np.repeat(a, heads, 1)[:, :, :rows, :rows] if name == "bias" else np.repeat(a, heads, 0)
  return {"B": count if shared == "batch" else 1, "H": 2*heads, "Hkv": Hkv*heads, "Sq": rows, "D": 16,
          "extras": {name: scaled(name, a) for name, a in (extras or {}).items()}, **parameters}

@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("count", (2, 3, 4, 5, 8))
@pytest.mark.parametrize("shared", SHARED)
def test_results_are_read_in_any_order(shared:str, count:int, seed:int) -> None:
  # Results of random problems on several devices are right in whatever order they are read, one by one or in groups, with and without TinyJit.
  rng = random.Random(zlib.crc32(f"{shared} {count} {seed}".encode()))
  name, order, calls, reading = rng.choice([*READ]), rng.choice([*ORDERS]), rng.choice((1, 3)), rng.randrange(1000)
  problem_of_count = scaled_up(shared, count, **READ[name])
  check_reading(count, shared, lambda names: groups(names, reading), order=order, calls=calls, **problem_of_count)

# ***** under TinyJit *****

def test_under_tinyjit() -> None:
  # Results on several devices are right under TinyJit with grouped heads, padding and a causal mask. The inputs are computed tensors, so in each call
  # tinygrad uses other buffers for them, for parts of keys, and for messages between devices.
  p = problem(H=2, Hkv=1, Sq=21, D=16, causal=True)
  with emulated("gfx942"):
    @TinyJit
    def step(q:Tensor, k:Tensor, v:Tensor) -> Tensor:
      return attn.attention(q*2, k, v*2, causal=True, sequence_order="zigzag", sequence_lengths=(21, 21)).realize()
    for seed in range(3):
      x = normal(p, seed)
      t = [attn.shard_sequence(tensor(a, "float16"), devices(2), 2).realize() for a in (x.q/2, x.k, x.v/2)]
      got = array(attn.unshard_sequence(step(*t), 2, 21))
      law, _ = expected(p, replace(x, q=rounded(x.q/2, "float16")*2, v=rounded(x.v/2, "float16")*2), {})
      assert (verdict := judge(got, law)).ok, f"call {seed}: {verdict}"

@pytest.mark.parametrize("mended", (True, pytest.param(False, marks=pytest.mark.thorough)))
def test_a_graph_takes_the_inputs_of_each_call(monkeypatch:pytest.MonkeyPatch, mended:bool) -> None:
  # Each call under TinyJit uses its own inputs, although launches and copies read only parts of them. tinygrad's own graph keeps the parts of the
  # first call; the case `mended=False` shows this.
  monkeypatch.setattr(context.SharedRows, "gathers", False)
  with emulated("gfx942", "tiled"):
    moves = list[int]()
    graph = with_selected_inputs(StandInGraph, lambda _, moved: moves.append(len(moved))) if mended else StandInGraph
    for name in devices(2): monkeypatch.setattr(Device[name], "graph", graph)
    @TinyJit
    def step(q:Tensor, k:Tensor, v:Tensor) -> Tensor: return attn.attention(q, k, v).realize()
    inputs = [[draw(1, 1, 4, 8, seed=3*n + i) for i in range(3)] for n in range(4)]
    # every input has its own buffer
    kept = [[attn.shard_sequence(t, devices(2), 2, "contiguous").realize() for t in x] for x in inputs]
    right = [np.abs(array(whole(step(*t))) - array(attn.attention(*x))).max() < 4e-3 for t, x in zip(kept, inputs)]
    assert right == [True, True, mended, mended]
    first_moves = list(moves)
    step(*kept[-1])
    # Each device copies k and v of the other device. If inputs have the addresses of the call before, the copies do not change.
    assert moves == first_moves and (first_moves == [4, 4]) == mended

def test_long_copies_of_keys_run_beside_a_launch() -> None:
  # Where copying the keys of all heads takes long, a device computes its heads in several launches of equal size: while one runs, the keys of the
  # next are copied. 32 or 8 key/value heads run in two halves, 9 heads in groups of three. Short sequences need one launch for all heads.
  def parts(H:int, Hkv:int, rows:int) -> list[tuple[int, int]]:
    p = Problem(1, H, Hkv, rows, rows, 128, 128, window=(-1, 0), softmax_scale=1.0)
    return head_chunks(p, shards(p, 2, "zigzag"))
  assert parts(32, 32, 32768) == [(0, 16), (16, 16)] and parts(32, 8, 32768) == [(0, 4), (4, 4)]
  assert parts(32, 8, 4096) == [(0, 8)]
  assert parts(9, 9, 1 << 18) == [(i, 3) for i in (0, 3, 6)]
  assert parts(1, 1, 1 << 22) == [(0, 1)]

def heads_at_a_time(monkeypatch:pytest.MonkeyPatch, count:int) -> None:
  monkeypatch.setattr(context, "head_chunks", lambda p, shards: [(first, count) for first in range(0, p.B*p.Hkv, count)])

def graph_of_heads(monkeypatch:pytest.MonkeyPatch) -> tuple[StandInGraph, bool]:
  # Captures a call on two devices, three heads one after another; returns the graph, and whether its results are right for other inputs.
  heads_at_a_time(monkeypatch, 1)
  with emulated("gfx942", "tiled"), Context(JIT_BATCH_SIZE=0):
    for name in devices(2): monkeypatch.setattr(Device[name], "graph", with_selected_inputs(StandInGraph, lambda *_: None))
    @TinyJit
    def step(q:Tensor, k:Tensor, v:Tensor) -> Tensor: return attn.attention(q, k, v, sequence_order="zigzag").realize()
    p = problem(H=3, Sq=8, D=8)
    inputs = [normal(p, seed) for seed in range(3)]
    kept = [[attn.shard_sequence(tensor(a, "float16"), devices(2), 2).realize() for a in (x.q, x.k, x.v)] for x in inputs]
    for t in kept: o = attn.unshard_sequence(step(*t), 2, 8)
    return StandInGraph.made[-1], judge(array(o), expected(p, inputs[-1], {})[0]).ok

def test_a_graph_copies_keys_while_heads_are_computed(monkeypatch:pytest.MonkeyPatch) -> None:
  # Two devices compute three heads, each head in a launch. A launch waits for two things: all keys of its head have arrived, and its own device has
  # put its keys of the next head in order. A device's buffers have room for two heads. So the keys of the third head wait until the keys of the first
  # head were used by the device's own launch, and copied by the other device.
  graph, right = graph_of_heads(monkeypatch)
  assert right
  for device in ("EMU", "EMU:1"):
    launches = graph.launches_on(device)
    before = [graph.before(n) for n in launches]
    assert len(launches) == 3 and [sorted(of & {*launches}) for of in before] == [[], launches[:1], launches[:1]]
    # Head 0 waits for k and v: put in order on both devices (4), two pieces of each copied here (4), head 1 put in order here (2).
    # Head 1: heads 0 and 1 put in order and head 0 copied, on both devices (16), the launch of head 0 (1), head 1 copied here (4), head 2 put in
    # order here (2).
    # Head 2: the same 16, both launches of head 0 (2), head 1 copied on both devices (8), head 2 put in order on both (4) and copied here (4).
    assert [len(of) for of in before] == [4 + 4 + 2, 16 + 1 + 4 + 2, 16 + 2 + 8 + 4 + 4]

@pytest.mark.thorough
def test_a_graph_that_forgets_what_is_read_is_seen(monkeypatch:pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(cuda, "holds", lambda whole, part: True)
  with pytest.raises(UninitialisedRead, match="nobody has written"): graph_of_heads(monkeypatch)

# ***** what is copied *****

def copies(o:Tensor) -> list[tuple[str, str, int]]:
  # Returns the copies between devices that computing o needs, each as (from, to, bytes).
  calls = [u for u in o.schedule_linear().src if u.src[0].op is Ops.COPY and u.src[1].device != u.src[2].device]
  return [(u.src[2].device, u.src[1].device, u.src[1].max_numel()*u.src[1].dtype.itemsize) for u in calls]

def sequence(count:int, *shape:int, order:str="zigzag") -> Tensor:
  return attn.shard_sequence(draw(*shape), devices(count), 2, order).realize()

def test_only_visible_keys_of_small_heads_are_copied(monkeypatch:pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(dealing, "REACH", 1)
  row = 16*2
  with emulated("gfx942", "tiled"):
    q, k = sequence(2, 1, 4, 32, 16), sequence(2, 1, 1, 32, 16)
    found = copies(attn.attention(q, k, k, causal=True, sequence_order="zigzag"))
    # one copy from EMU to EMU:1 has a single row of the last piece
    of_k = [("EMU", "EMU:1", 8*row), ("EMU", "EMU:1", row), *[("EMU:1", "EMU", 8*row)]*2]
    assert sorted(found) == sorted(of_k*2)
    q, k = sequence(3, 1, 4, 48, 16, order="contiguous"), sequence(3, 1, 1, 48, 16, order="contiguous")
    found = copies(attn.attention(q, k, k, causal=True, window=(8, 0)))
    before, behind = [("EMU", "EMU:1", 9*row), ("EMU:1", "EMU:2", 9*row)], [("EMU:1", "EMU", row), ("EMU:2", "EMU:1", row)]
    assert sorted(found) == sorted((before + behind)*2)

@pytest.mark.thorough
@pytest.mark.parametrize("count, causal", ((2, True), (8, True), (8, False)))
def test_memory_is_that_of_one_device_and_two_parts_of_the_keys(monkeypatch:pytest.MonkeyPatch, count:int, causal:bool) -> None:
  # Each device needs, under TinyJit, memory for its inputs, for o and lse of its own rows, and for two buffers with k and v of some heads from all
  # devices.
  for name, value in (("MEASURED_SECONDS", 0), ("MEASURED_ROUNDS", 1)): monkeypatch.setattr(measure, name, value)
  rows, heads, together, D = 32, 4, 1, 16
  heads_at_a_time(monkeypatch, together)
  with emulated("gfx942", "tiled"):
    row = measure.SharedProblem("rows", heads, heads, rows*count, rows*count, D, causal=causal)
    measure.measured(row, devices(count))      # while it runs, caches may drop kernels of earlier tests, and with them memory
    found = measure.measured(row, devices(count))
  shard, lse = heads*rows*D*2, heads*rows*4
  assert found.inputs == [3*shard]*count
  assert max(found.besides) == shard + lse + context.SLOTS*2*count*shard*together//heads

@pytest.mark.thorough
def test_the_measurement_prints_its_rows(monkeypatch:pytest.MonkeyPatch, capsys:pytest.CaptureFixture[str]) -> None:
  # `python -m attn.measure.context` prints its table on the emulator. Its times are meaningful only on two GPUs.
  for name, value in (("MEASURED_SECONDS", 0), ("MEASURED_ROUNDS", 1)): monkeypatch.setattr(measure, name, value)
  monkeypatch.setenv("SMALL", "1")
  with emulated("gfx942", "tiled"): measure.main(["524288", "keys"])
  printed = capsys.readouterr().out
  for text in ("(1, 4 on 1, 1 x 128, 16) full, keys shared: one", "bytes, inputs:", "copy from EMU:1"): assert text in printed

def test_few_queries_are_exchanged_once() -> None:
  # If the keys are sharded over devices, the devices exchange the results of few queries once: each device sends one buffer with o and lse to every
  # other device, and one kernel merges them.
  with emulated("gfx942"):
    q, k = draw(1, 4, 1, 16).shard(devices(2)).realize(), sequence(2, 1, 1, 64, 16, order="contiguous")
    o = attn.attention(q, k, k)
    size = 4*(16 + 1)*4
    assert sorted(copies(o)) == [("EMU", "EMU:1", size), ("EMU:1", "EMU", size)]
    assert len(attn.attention(q, k, k).schedule_linear().src) == 2 + 2 + 2

def test_explain(capsys:pytest.CaptureFixture[str]) -> None:
  with emulated("gfx942"):
    q, whole_q = sequence(2, 1, 2, 16, 16), draw(1, 2, 1, 16).shard(devices(2))
    choice = attn.explain(q, q, q, causal=True, sequence_order="zigzag", backward=True)
    assert choice.kernels == ("backward_dq", "backward_dkdv")
    said = "rows shared by 2 devices, zigzag: 1 launches on each, for whose heads the keys of at most 1 others come over"
    assert said in capsys.readouterr().out
    attn.explain(whole_q, q, q)
    said = "keys shared by 2 devices, contiguous: at most 1 launches on each, and o and lse exchanged once"
    assert said in capsys.readouterr().out

# ***** what is refused *****

def test_refusals() -> None:
  with emulated("gfx942"):
    q, long, odd = sequence(2, 2, 2, 16, 16), sequence(2, 2, 2, 24, 16), sequence(2, 2, 2, 14, 16, order="contiguous")
    plain = draw(2, 2, 16, 16)
    for options, text in (({"kv_lengths": 3}, "kv_lengths=3 with q, k and v sharded along their rows: sequence_lengths says"),
                          ({"kv_lengths": Tensor([3, 3])}, "kv_lengths=Tensor of shape .* with q, k and v sharded along"),
                          ({"dropout_p": .1}, "dropout_p=0.1 with q, k and v sharded along their rows: shard q, k and v along batch or heads"),
                          ({"batch_invariant": True}, "batch_invariant=True with q, k and v sharded .* along batch or heads"),
                          ({"sequence_order": "ring"}, "sequence_order='ring': must be one of 'contiguous', 'zigzag'"),
                          ({"sequence_lengths": (17, 24)}, r"sequence_lengths=\(17, 24\): Sq must lie in 1..16"),
                          ({"sequence_lengths": (1, 2, 3)}, r"sequence_lengths=\(1, 2, 3\): must be \(Sq, Sk\)"),
                          ({"bias": floats(2, 2, 9, 24)}, r"bias has shape \(2, 2, 9, 24\): must have 4 dim")):
      if "bias" in options: options = {"bias": Tensor(options["bias"], device="EMU").shard(devices(2))}
      with pytest.raises(ValueError, match=text): attn.attention(q, long, long, **options)
    with pytest.raises(ValueError, match="q has 14 rows: sequence_order='zigzag' on 2 devices needs a multiple of 4"):
      attn.attention(odd, odd, odd, sequence_order="zigzag")
    batch = plain.shard(devices(2), 0)
    with pytest.raises(ValueError, match="sequence_order='zigzag' with tensors sharded along batch"):
      attn.attention(batch, batch, batch, sequence_order="zigzag")
    for arguments, text in (((plain, "EMU:0", 4), r"axis=4: must be an axis of x, .*-4\.\.3"),
                            ((plain, ("EMU:0", "EMU"), 2), "devices=.*must be different devices"),
                            ((plain, ("EMU", "NOSUCH"), 2), "devices='NOSUCH': this device does not open"),
                            ((q, "EMU", 2), "x is on .*must be on one device"), ((plain, devices(2), 2, "back"), "order='back'")):
      with pytest.raises(ValueError, match=text): attn.shard_sequence(*arguments)
    for arguments, text in (((q, 1, 2), "axis=1: x is sharded along axis 2"),
                            ((q, 2, 17), r"length=17: must be a number of rows, 1\.\.16"),
                            ((odd, 2, 3), "order='zigzag' with x .*: axis 2 must be a multiple of its 4 pieces")):
      with pytest.raises(ValueError, match=text): attn.unshard_sequence(*arguments)
    with pytest.raises(ValueError, match="k_cache is sharded along its rows"): attn.append_kv(q, q, long, long, 0)

# ***** two GPUs *****

GPUS = ("CUDA:0", "CUDA:1")
ON_GPUS: dict[str, tuple[bool, str, dict[str, Any]]] = {     # whether each GPU has all rows of q, the order, the problem
  "rows, zigzag": (False, "zigzag", {"H": 16, "Hkv": 8, "Sq": 4100, "D": 128, "causal": True}),
  "rows, contiguous": (False, "contiguous", {"H": 4, "Sq": 1500, "Sk": 2300, "D": 64, "dtype": "bfloat16"}),
  "rows beside heads": (False, "zigzag", {"H": 8, "Hkv": 2, "Sq": 1000, "D": 64, "causal": True, "layout": "bshd",
                                          "window": (300, 0)}),
  "keys": (True, "contiguous", {"H": 8, "Hkv": 2, "Sq": 1, "Sk": 5000, "D": 128, "causal": True})}

def have_two_gpus() -> bool:
  try: return all(Device[name] is not None for name in GPUS)
  except Exception: return False     # tinygrad raises several kinds of errors for a missing device

@pytest.mark.gpu
@pytest.mark.parametrize("backward", (False, True))
@pytest.mark.parametrize("name", ON_GPUS)
@pytest.mark.parametrize("at_once", (False, True))
def test_two_gpus(monkeypatch:pytest.MonkeyPatch, at_once:bool, name:str, backward:bool) -> None:
  # o, or the gradients of a loss through o, are right on two GPUs under TinyJit with other inputs in each call. One case computes all heads in one
  # launch, another case computes one head in each launch.
  if not have_two_gpus(): pytest.skip("this machine does not have two GPUs")
  if not at_once: heads_at_a_time(monkeypatch, 1)
  keys, order, parameters = ON_GPUS[name]
  p = problem(**parameters, lse=False)
  axis, options = ROWS[p.layout], {x: parameters[x] for x in ("causal", "layout", "window") if x in parameters}
  def dealt(a:np.ndarray, is_q:bool) -> Tensor:
    t = tensor(arrange(a, p.layout), p.dtype, GPUS[0])
    return (t.shard(GPUS) if keys and is_q else attn.shard_sequence(t, GPUS, axis, order)).realize()
  def taken(t:Tensor, is_q:bool, shape:tuple[int, ...]) -> np.ndarray:
    whole_one = whole(t) if keys and is_q else attn.unshard_sequence(t, axis, p.Sq if is_q else p.Sk, order)
    return restore(array(whole_one), p.layout, shape)
  @TinyJit
  def step(q:Tensor, k:Tensor, v:Tensor, do:Tensor) -> list[Tensor]:
    o = attn.attention(q, k, v, sequence_order=order, sequence_lengths=(p.Sq, p.Sk), **options)
    return [x.realize() for x in ((o*do).float().sum().gradient(q, k, v) if backward else (o,))]
  with Context(DEV="CUDA", TRAINING=int(backward)):
    for seed in range(4):
      x = normal(p, seed)
      do = rounded(np.random.default_rng(seed).standard_normal((p.B, p.H, p.Sq, p.Dv), np.float32), p.out_dtype)
      found = step(dealt(x.q, True), dealt(x.k, False), dealt(x.v, False), dealt(do, True))
      if backward: want = expected_gradients(p, x, {}, do, np.zeros((p.B, p.H, p.Sq), np.float32))
      else: want = {"o": expected(p, x, {})[0]}
      for t, (of, law) in zip(found, want.items()):
        verdict = judge(taken(t, of in "qo", law.exact.shape), law)
        assert verdict.ok, f"call {seed}, {'d'*backward}{of}: {verdict}"
