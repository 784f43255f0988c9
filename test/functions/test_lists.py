"""Tests of lists of visible tiles. Kernels loop over such a list if a mask leaves a query more than one interval of keys. numpy computes the expected
lists and masks."""
from __future__ import annotations
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
import numpy as np
import pytest
from tinygrad import TinyJit
import attn
from attn.accuracy import judge
from attn.calls import checked_kernel, tile_lists as calls_tile_lists
from attn.calls.gradient import lists_of_backward, lists_of_forward, of_backward, split_into
from attn.calls.tile_lists import tile_lists
from attn.chips import Chip, get_chip
from attn.chips.matrix import MMA
from attn.choose.dispatch import single_kernel
from attn.choose.gradient_kernels import GRADIENT_KERNELS
from attn.choose.tile_lists import listing, with_lists
from attn.emulator.checks import Deadlock, UninitialisedRead
from attn.functions.symbols import BATCH, QUERY_HEAD, depends
from attn.functions.trace import functions_of
from attn.kernels.nvidia import gradient_sums
from attn.kernels.parts.backward.turns import Turns
from attn.kernels.parts.program.blocks import TileList, list_length
from attn.kernels.parts.weights.scores import Scores
from attn.kernels.tile_lists import ListedBlocks, SeenTiles, seen_in_tiles, table_arguments
from attn.kernels.tiles.wgmma import WgmmaBackwardTile
from attn.kernels.wgmma import forward as wgmma_forward
from attn.ops import hopper
from attn.ops.pairs import PairOperands
from attn.ops.renderers import render
from attn.problem import Problem
from attn.score.masks import hiding
from attn.tinygrad_compat import Context, GlobalCounters, Tensor, UOp, dtypes
from attn.values import FLOATS, INTS
from api_cases import emulated, lists, whole
from cases import Inputs, array, expected, expected_gradients, floats, normal, problem, tensor

UNITS = ("gfx942", "gfx1100", "sm_80", "sm_90", "gfx1030")     # the last one has kernels of plain UOps

@dataclass(frozen=True)
class Case:
  # A mask_mod in UOps (`mask`) and the same mask in numpy (`of_numbers`).
  mask: Callable[..., Any]
  of_numbers: Callable[..., Any]
  documents: bool = False  # whether the mask reads the document of each key, int32 (B, Sk)

CASES = {
  "documents": Case(lambda b, h, i, j, d: d[b, i].eq(d[b, j]), lambda b, h, i, j, d: d[b, i] == d[b, j], True),
  "next document": Case(lambda b, h, i, j, d: (d[b, i] + 1).eq(d[b, j]), lambda b, h, i, j, d: d[b, i] + 1 == d[b, j], True),
  "neighbourhood": Case(lambda b, h, i, j: ((i//16 - j//16).abs() < 3) & ((i%16 - j%16).abs() < 3),
                        lambda b, h, i, j: (abs(i//16 - j//16) < 3) & (abs(i%16 - j%16) < 3)),
  "sinks and window": Case(lambda b, h, i, j: (i >= j) & ((i - j < 30) | (j < 4)), lambda b, h, i, j: (i >= j) & ((i - j < 30) | (j < 4))),
  "squares": Case(lambda b, h, i, j: ((i//128 + j//128)%3).eq(0) | (((i//128 + j//128)%3).eq(1) & ((i + j)%2).eq(0)),
                  lambda b, h, i, j: ((i//128 + j//128)%3 == 0) | (((i//128 + j//128)%3 == 1) & ((i + j)%2 == 0))),
  "squares of heads": Case(lambda b, h, i, j: ((i//32 + j//32)%3).eq(h%3) | (h.eq(3) & ((i + j)%2).eq(0)),
                           lambda b, h, i, j: ((i//32 + j//32)%3 == h%3) | ((h == 3) & ((i + j)%2 == 0)))}

def documents(p:Problem, seed:int=0, rows:int=20) -> np.ndarray:
  # Returns for each key the index of its document, int32 (B, Sk). A document has about `rows` keys.
  return np.sort(np.random.default_rng(seed).integers(0, p.Sk//rows, (p.B, p.Sk)), 1).astype(np.int32)

def seen(p:Problem, case:Case, d:np.ndarray) -> np.ndarray:
  # Returns whether each query sees each key under the mask of a case, bool (B, H, Sq, Sk), computed in numpy.
  b, h, i, j = np.ogrid[:p.B, :p.H, p.offset:p.offset + p.Sq, :p.Sk]
  return np.broadcast_to(case.of_numbers(b, h, i, j, *[d]*case.documents), (p.B, p.H, p.Sq, p.Sk))

def sized(case:Case, **sizes:Any) -> Problem:
  p = problem(**sizes)
  kinds = (((p.B, p.Sk), "int32"),) if case.documents else ()
  extras = {"mod_tensor0": np.empty((p.B, p.Sk), np.int32)} if case.documents else {}
  return problem(**sizes, extras=extras, **functions_of(None, case.mask, kinds))

# ***** the lists *****

def expected_turns(lists:np.ndarray, block:int, started:Callable[[int], int]) -> list[int]:
  # Returns, for each tile in the list of the block `block`, how many blocks that start earlier have the tile in their lists, too.
  # `lists` has the lists of all blocks of a head. `started` maps a block to its place in the order in which blocks start.
  def tiles_of(b:int) -> list[int]: return lists[b][2:2 + lists[b][1]].tolist()
  return [sum(tile in tiles_of(b) for b in range(len(lists)) if started(b) < started(block)) for tile in tiles_of(block)]

def expected_list(mask:np.ndarray, block_n:int, tiles:int) -> list[int]:
  # Returns the list of visible tiles that the kernels must make for a block of which `mask` shows some scores.
  # `mask` is (..., rows, columns), in `tiles` tiles of `block_n` columns. The list begins with the number of partly masked tiles and the number of
  # all visible tiles. Then come the partly masked tiles, then the tiles without a hidden score.
  parts = [mask[..., t*block_n:(t + 1)*block_n] for t in range(tiles)]
  whole = [x.all() and x.shape[-1] == block_n for x in parts]
  some = [t for t, x in enumerate(parts) if x.any() and not whole[t]]
  full = [t for t in range(tiles) if whole[t]]
  return [len(some), len(some) + len(full), *some, *full, *[tiles]*(tiles + 1 - len(some) - len(full))]

def with_turns_from(usual:list[int], descending:bool) -> list[int]:
  # Converts a list of visible tiles to the list for blocks that add to dq in a fixed order.
  # The tiles without a hidden score come first, and both kinds of tiles are in descending or in ascending order.
  parts, visible, *tiles = usual
  some, full = (sorted(x, reverse=descending) for x in (tiles[:parts], tiles[parts:visible]))
  return [len(full), visible, *full, *some, *tiles[visible:]]

@pytest.mark.sample(5)
@pytest.mark.parametrize("over", ["keys", "queries"])
@pytest.mark.parametrize("name, block_m, block_n", [*((name, 64, 32) for name in CASES), ("documents", 48, 8), ("squares of heads", 48, 8)])
def test_lists_have_the_tiles_that_a_mask_leaves(name:str, block_m:int, block_n:int, over:str) -> None:
  # The lists of visible tiles are right, also if there are more tiles than a workgroup has (with 8 columns in a tile).
  case = CASES[name]
  p = sized(case, B=2, H=4, Hkv=2, Sq=170, Sk=300)
  mask, d = p.mask_mod, documents(p)
  assert mask is not None
  heads = ((4, 1) if over == "keys" else (2, 2)) if depends(mask.value, QUERY_HEAD) else (1, 1)
  batches = 2 if depends(mask.value, BATCH) else 1
  x = ListedBlocks(p, over, block_m, block_n, batches, heads, True)
  with emulated("gfx942"): got = tile_lists(x, "EMU::gfx942", {"mod_tensor0": Tensor(d, device="EMU::gfx942")}).numpy()
  left = seen(p, case, d)
  if over == "queries": left = left.swapaxes(-1, -2)
  for b, h, block in np.ndindex(*got.shape[:3]):
    own = left[b:b + 1 if batches > 1 else None, h*heads[1]:(h + 1)*heads[1] if heads[0] > 1 else None,
               block*block_m:(block + 1)*block_m]
    assert got[b, h, block].tolist() == expected_list(own, block_n, x.tiles), (b, h, block)

@pytest.mark.sample(3)
@pytest.mark.parametrize("name, keys", (("documents", 400), ("squares", 400), ("causal stripes", 400), ("documents", 60), ("documents", 100)))
def test_lists_say_when_a_block_has_its_turn(name:str, keys:int) -> None:
  # Kernels that add to dq in a fixed order need another order of the list of visible tiles. The list ends with a number for each tile, namely how
  # many blocks that start earlier have the tile in their lists, too.
  stripes = Case(lambda b, h, i, j: (i >= j) & ((i//50 + j//40) % 2).eq(0), lambda b, h, i, j: (i >= j) & ((i//50 + j//40) % 2 == 0))
  p = sized(CASES.get(name, stripes), B=1, H=4, Sq=keys - 70 if keys > 100 else 50, Sk=keys)
  d = documents(p)
  found = []
  for with_turns in (False, True):
    x = ListedBlocks(p, "queries", 64, 32, 1, (1, 1), True, with_turns)
    with emulated("gfx942"): found.append(tile_lists(x, "EMU::gfx942", {"mod_tensor0": Tensor(d, device="EMU::gfx942")}).numpy()[0, 0])
  alone, got = found
  assert alone.shape[-1] == list_length(x.tiles) and got.shape[-1] == list_length(x.tiles, True)
  for block in range(len(got)):
    assert got[block, :alone.shape[-1]].tolist() == with_turns_from(alone[block].tolist(), not hiding(p).after), block
    turns = expected_turns(got, block, lambda b: len(got) - 1 - b if hiding(p).after else b)
    assert got[block, alone.shape[-1]:][:len(turns)].tolist() == turns, block

@pytest.mark.sample(2)
@pytest.mark.parametrize("block_m, block_n, of_table", ((64, 32, None), (64, 32, (32, 32)), (32, 64, (16, 32))))
@pytest.mark.parametrize("over", ("keys", "queries"))
def test_lists_of_batches_with_lengths(over:str, block_m:int, block_n:int, of_table:tuple[int, int]|None) -> None:
  # Tiles with keys or queries that do not exist count as partly hidden if the kernel loops over these. In a loop over the other side they do not
  # matter. Lists do not depend on the size of the tiles in the table from which they are made.
  case = Case(lambda b, h, i, j: ((i + 512)//128 + j//128).ne(5), lambda b, h, i, j: (i + 512)//128 + j//128 != 5)
  lengths = np.array([160, 200, 0, 72])
  p = problem(B=4, Sq=130, Sk=210, extras={"kv_lengths": lengths.astype(np.int32)}, **functions_of(None, case.mask, ()))
  sizes = None if of_table is None else of_table if over == "keys" else of_table[::-1]
  x = ListedBlocks(p, over, block_m, block_n, 4, (1, 1), True, of_table=sizes)
  with emulated("gfx942"):
    got = tile_lists(x, "EMU::gfx942", {"kv_lengths": Tensor(lengths.astype(np.int32), device="EMU::gfx942")}).numpy()
  for b, n in enumerate(lengths):
    left = case.of_numbers(b, 0, *np.ogrid[n - 130:n, :n])
    if over == "queries": left = left.T
    for block in range(x.blocks):
      own = left[block*block_m:(block + 1)*block_m]
      assert got[b, 0, block].tolist() == (expected_list(own, block_n, x.tiles) if len(own) else [0, 0, *[x.tiles]*(x.tiles + 1)]), (b, block)

@dataclass(frozen=True)
class TensorCase:
  # A mask_mod that reads tensors, in UOps (`mask`), and the same mask in numpy (`of_numbers`).
  mask: Callable[..., Any]
  of_numbers: Callable[..., Any]
  tensors: Callable[[int, int], tuple[np.ndarray, ...]]  # makes the tensors for given numbers of queries and keys

def ids(n:int, least:int=-4, most:int=5, seed:int=3) -> np.ndarray: return np.random.default_rng(seed).integers(least, most, n).astype(np.int32)
def with_nan(n:int) -> np.ndarray: return np.where(np.arange(n) % 70 == 69, np.nan, np.arange(n)//64).astype(np.float32)
def by_rows(mask:Callable[..., Any], rows:int, keys:int) -> Callable[..., Any]:
  # Wraps a mask function that reads tensors by the query's row in q as a mask_mod.
  # attn calls a mask_mod with the query's position among the keys: row r has position r + keys - rows.
  return lambda b, h, i, j, *t: mask(b, h, i + (rows - keys), j, *t)

TENSOR_CASES = {
  "sorted": TensorCase(lambda b, h, i, j, q, k: q[i].eq(k[j]), lambda b, h, i, j, q, k: q[i] == k[j],
                       lambda rows, keys: (np.sort(ids(rows)), np.sort(ids(keys, seed=4)))),
  "random": TensorCase(lambda b, h, i, j, q, k: q[i].eq(k[j]), lambda b, h, i, j, q, k: q[i] == k[j],
                       lambda rows, keys: (ids(rows, 0, 1000), ids(keys, 0, 1000, 4))),
  "aligned": TensorCase(lambda b, h, i, j, q, k: q[i].eq(k[j]) & (i + 40 >= j), lambda b, h, i, j, q, k: (q[i] == k[j]) & (i + 40 >= j),
                        lambda rows, keys: ((np.arange(rows)//64).astype(np.int32) - 2, (np.arange(keys)//64).astype(np.int32) - 2)),
  "NaN": TensorCase(lambda b, h, i, j, q, k: (q[i] < k[j]).logical_not() & (i - j < 98),
                    lambda b, h, i, j, q, k: ~(q[i] < k[j]) & (i - j < 98),
                    lambda rows, keys: (with_nan(rows), with_nan(keys))),
  "extremes": TensorCase(lambda b, h, i, j, q, k: q[i] < k[j], lambda b, h, i, j, q, k: q[i] < k[j],
                         lambda rows, keys: (np.where(np.arange(rows) < 100, 2**31 - 1, -2**31).astype(np.int32),
                                             np.where(np.arange(keys) < 100, 2**31 - 1, -2**31 + np.arange(keys)//150).astype(np.int32))),
  "flags of heads": TensorCase(lambda b, h, i, j, f, k: f[h, j] & ((i//64).eq(k[j]) | f[h, 0]),
                               lambda b, h, i, j, f, k: f[h, j] & ((i//64 == k[j]) | f[h, 0]),
                               lambda rows, keys: (ids(4*keys, 0, 9).reshape(4, keys) > 0, (np.arange(keys)//64).astype(np.uint8)))}

@pytest.mark.sample(5)
@pytest.mark.parametrize("over", ["keys", "queries"])
@pytest.mark.parametrize("rows, keys", [(170, 300), (300, 170)])
@pytest.mark.parametrize("name", TENSOR_CASES)
def test_lists_of_masks_that_read_tensors(name:str, rows:int, keys:int, over:str) -> None:
  # The lists of visible tiles are right for masks that read tensors by the row of the query and by the key, whatever the tensors hold.
  case = TENSOR_CASES[name]
  arrays = case.tensors(rows, keys)
  extras = {f"mod_tensor{n}": x for n, x in enumerate(arrays)}
  traced = functions_of(None, by_rows(case.mask, rows, keys), tuple((x.shape, x.dtype.name) for x in arrays))
  p = problem(B=1, H=4, Hkv=2, Sq=rows, Sk=keys, extras=extras, **traced)
  of_heads = ((4, 1) if over == "keys" else (2, 2)) if depends(p.mask_mod.value, QUERY_HEAD) else (1, 1)
  x = ListedBlocks(p, over, 64, 32, 1, of_heads, True)
  with emulated("gfx942"):
    got = tile_lists(x, "EMU::gfx942", {name: Tensor(t, device="EMU::gfx942") for name, t in extras.items()}).numpy()
  with np.errstate(over="ignore"): left = case.of_numbers(0, *np.ogrid[:4, :rows, :keys], *arrays)
  left = np.broadcast_to(left, (4, rows, keys))
  if over == "queries": left = left.swapaxes(-1, -2)
  for h, block in np.ndindex(*got.shape[1:3]):
    own = left[h*of_heads[1]:(h + 1)*of_heads[1] if of_heads[0] > 1 else None, block*64:(block + 1)*64]
    assert got[0, h, block].tolist() == expected_list(own, 32, x.tiles), (h, block)

# ***** attention over them *****

def computed(p:Problem, x:Inputs, do:np.ndarray, arch:str, case:Case, d:np.ndarray, **options:Any) -> list[np.ndarray]:
  # Computes o and the gradients of q, k and v by `attention` with the mask of a case, on the emulator of the chip `arch`.
  with emulated(arch):
    q, k, v, of_o = (tensor(a, p.dtype).realize() for a in (x.q, x.k, x.v, do))
    given = {name: Tensor(a, device="EMU").realize() if isinstance(a, np.ndarray) else a for name, a in options.items()}
    o = attn.attention(q, k, v, mask_mod=case.mask, mod_tensors=[Tensor(d, device="EMU").realize()]*case.documents, **given)
    return [array(t) for t in (o, *o.gradient(q, k, v, gradient=of_o))]

@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ("squares", "documents"))
@pytest.mark.parametrize("arch", [pytest.param(arch, marks=() if arch in ("gfx942", "sm_90") else pytest.mark.thorough) for arch in UNITS])
def test_attention_over_lists_agrees_with_float64(arch:str, name:str) -> None:
  # o and the gradients are within the error limit of each element where kernels loop over lists of visible tiles. With these masks a block has hidden
  # tiles, partly masked tiles and tiles without a hidden score. The mask of documents reads a tensor, so kernels make its lists in each call.
  case, sizes = CASES[name], {"H": 2, "Hkv": 1, "Sq": 300, "Sk": 300}
  p = sized(case, **sizes)
  x, d = normal(p), documents(p, rows=150)
  do = floats(*x.q.shape).astype(np.float16).astype(np.float32)
  extras = {"bias": np.where(seen(p, case, d), 0, -np.inf).astype(np.float32)}
  with lists(True): o, *gradients = computed(p, x, do, arch, case, d)
  of_bias = problem(**sizes, extras=extras)
  assert (verdict := judge(o, expected(of_bias, x, extras)[0])).ok, f"o: {verdict}"
  laws = expected_gradients(of_bias, x, extras, do, None)
  for n, g in zip(("q", "k", "v"), gradients): assert (verdict := judge(g, laws[n])).ok, f"{n}: {verdict}"

SPLIT = Case(lambda b, h, i, j, d: d[b, i*2 % 4096].eq(d[b, j*2 % 4096]), lambda b, h, i, j, d: d[b, i*2 % 4096] == d[b, j*2 % 4096], True)

@pytest.mark.parametrize("name, loops", (("documents", 1), ("neighbourhood", 1), ("squares", 2), ("split", 2)))
def test_forward_has_one_loop_over_a_list(name:str, loops:int) -> None:
  # The wgmma forward kernel has one loop over a list of visible tiles, if an operation can compute the mask behind a branch, and if lowest and
  # highest values may prove that the mask hides nothing of a tile. For the mask "split", whose elements of a tensor do not lie side by side, it has
  # two: over the partly masked tiles and over the others.
  p, on = sized((CASES | {"split": SPLIT})[name], Sq=4096, Sk=4096, H=8), get_chip("sm_90")
  p = with_lists(p, listing(p, on, single_kernel(p, on)[1]))
  placeholders = [UOp.placeholder(shape, (FLOATS | INTS)[kind], i) for i, (shape, kind) in enumerate(p.shapes.values())]
  assert render(single_kernel(p, on)[0](*placeholders), "sm_90").count("for (int Lidx") == loops

def test_kernels_share_what_makes_their_lists() -> None:
  # dq and dkdv take their lists from one table. For documents, the kernel that makes the table of forward makes that of backward, too, so that
  # tinygrad compiles it once.
  def kernel(x:SeenTiles) -> UOp:
    return seen_in_tiles(x)(*[UOp.placeholder(shape, (FLOATS | INTS)[kind], i) for i, (shape, kind) in enumerate(table_arguments(x).values())])
  on, sizes = get_chip("sm_90"), {"B": 1, "H": 32, "Sq": 16384, "D": 128, "dtype": "bfloat16"}
  p = sized(CASES["neighbourhood"], **sizes)
  dq, dkdv = lists_of_backward(split_into(of_backward(p), 1), on)
  assert dq is not None and dkdv is not None and dq.table == dkdv.table
  p = sized(CASES["documents"], **sizes)
  forward, (_, all_at_once) = lists_of_forward(p, on), lists_of_backward(split_into(of_backward(p), 1), on)
  assert forward is not None and all_at_once is not None and kernel(forward.table) is kernel(all_at_once.table)

def never_hidden(m:pytest.MonkeyPatch) -> None: m.setattr(wgmma_forward, "keep_seen", lambda acc, gate, pairs, after: hopper.publish(after))
def rows_exchanged(m:pytest.MonkeyPatch) -> None:
  own = Scores.pairs
  def exchanged(self:Scores, rows:list[Any], tile:UOp) -> PairOperands:
    found = own(self, rows, tile)
    return replace(found, rows=found.rows[::-1], limits=found.limits[::-1])
  m.setattr(Scores, "pairs", exchanged)
def columns_shifted(m:pytest.MonkeyPatch) -> None:
  own = Scores.pairs
  def shifted(self:Scores, rows:list[Any], tile:UOp) -> PairOperands:
    found = own(self, rows, tile)
    return replace(found, distances=tuple(n + 1 for n in found.distances))
  m.setattr(Scores, "pairs", shifted)
def without_limits(m:pytest.MonkeyPatch) -> None:
  own = Scores.pairs
  m.setattr(Scores, "pairs", lambda self, rows, tile: replace(own(self, rows, tile), limits=([], []), limited=()))
@pytest.mark.sample(3)
@pytest.mark.parametrize("name, plant", [("documents", None), ("neighbourhood", None), ("sinks and window", None), ("documents", never_hidden),
  ("documents", rows_exchanged), ("neighbourhood", rows_exchanged), ("neighbourhood", columns_shifted), ("neighbourhood", without_limits)])
@pytest.mark.usefixtures("without_places")
def test_planted_fault_of_pairs(monkeypatch:pytest.MonkeyPatch, name:str, plant:Callable[[pytest.MonkeyPatch], None]|None) -> None:
  # o of the forward kernel with one loop is within the error limit of each element, and is not if the kernel is wrong
  if plant is not None: plant(monkeypatch)
  case, sizes = CASES[name], {"H": 2, "Hkv": 1, "Sq": 150, "Sk": 200, "D": 16}
  p = sized(case, **sizes)
  x, d = normal(p), documents(p, rows=90)
  with lists(True), emulated("sm_90"):
    q, k, v = (tensor(a, p.dtype).realize() for a in (x.q, x.k, x.v))
    o = array(attn.attention(q, k, v, mask_mod=case.mask, mod_tensors=[Tensor(d, device="EMU").realize()]*case.documents))
  extras = {"bias": np.where(seen(p, case, d), 0, -np.inf).astype(np.float32)}
  assert judge(o, expected(problem(**sizes, extras=extras), x, extras)[0]).ok == (plant is None)

def one_kernel(monkeypatch:pytest.MonkeyPatch) -> None:
  # Makes dispatch choose the wgmma kernel that computes all gradients at once, for every problem.
  row = GRADIENT_KERNELS["_wgmma"]
  assert row.at_once is not None
  def tile(p:Problem, arch:Chip) -> WgmmaBackwardTile: return WgmmaBackwardTile(2, 64, matrix=MMA[p.dtype], keys=True, adds_dq=True)
  monkeypatch.setitem(GRADIENT_KERNELS, "_wgmma", replace(row, at_once=replace(row.at_once, tile=tile)))

def gradients_by_one_kernel(name:str, deterministic:bool=True) -> list[np.ndarray]:
  # Computes the gradients of q, k and v by the kernel for all gradients, over lists of visible tiles, and compares them with float64.
  case, sizes = CASES[name], {"H": 2, "Hkv": 1, "Sq": 300, "Sk": 400, "D": 16}
  p = sized(case, **sizes)
  x, d = normal(p), documents(p, rows=150)
  do = floats(*x.q.shape).astype(np.float16).astype(np.float32)
  with lists(True): _, *gradients = computed(p, x, do, "sm_90", case, d, deterministic=deterministic)
  extras = {"bias": np.where(seen(p, case, d), 0, -np.inf).astype(np.float32)}
  laws = expected_gradients(problem(**sizes, extras=extras), x, extras, do, None)
  for n, g in zip(("q", "k", "v"), gradients): assert (verdict := judge(g, laws[n])).ok, f"{n}: {verdict}"
  return gradients

@pytest.mark.parametrize("name", ("documents", "next document", pytest.param("squares", marks=pytest.mark.thorough)))
def test_one_kernel_loops_over_lists(monkeypatch:pytest.MonkeyPatch, name:str) -> None:
  # The kernel that computes all gradients at once can loop over lists of visible tiles. The gradients agree with float64. If the kernel adds to dq in
  # a fixed order, dq has the same bits in whatever order workgroups start. dq of queries that see no key is 0.
  one_kernel(monkeypatch)
  gradients_by_one_kernel(name, deterministic=False)
  found = []
  for resident, order in ((0, 0), (1, 1), (2, 2), (0, 3)):
    monkeypatch.setenv("ATTN_EMU_RESIDENT", str(resident))
    monkeypatch.setenv("ATTN_EMU_ORDER", str(order))
    found.append(gradients_by_one_kernel(name))
  for other in found[1:]:
    for x, y in zip(other, found[0]): np.testing.assert_array_equal(x, y)

def every_turn_first(m:pytest.MonkeyPatch) -> None: m.setattr(TileList, "turn", lambda self, i: UOp.const(0, dtypes.int))
def every_turn_later(m:pytest.MonkeyPatch) -> None:
  turn = TileList.turn
  m.setattr(TileList, "turn", lambda self, i: turn(self, i) + 1)
def turns_of_four_tiles(m:pytest.MonkeyPatch) -> None:
  of = Turns.of
  m.setattr(Turns, "of", staticmethod(lambda *args: replace(of(*args), tiles=4)))

def nobody_sets(m:pytest.MonkeyPatch) -> None: m.setattr(Turns, "sets", lambda self, i: UOp.const(False))
def everybody_sets(m:pytest.MonkeyPatch) -> None: m.setattr(Turns, "sets", lambda self, i: UOp.const(True))
def every_sum_is_set(m:pytest.MonkeyPatch) -> None: m.setattr(gradient_sums, "some_turn_ended", lambda *args: UOp.const(True))

@pytest.mark.sample(3)
@pytest.mark.parametrize("plant, error, text", ((every_turn_first, Deadlock, "waits until"), (every_turn_later, Deadlock, "waits until"),
                                                (turns_of_four_tiles, Deadlock, "waits until"), (everybody_sets, AssertionError, "q: "),
                                                (nobody_sets, AssertionError, "q: "), (every_sum_is_set, UninitialisedRead, "nobody has written")))
@pytest.mark.usefixtures("without_places")
def test_planted_fault_of_turns_in_lists(monkeypatch:pytest.MonkeyPatch, plant:Callable[[pytest.MonkeyPatch], None], error:type[Exception],
                                         text:str) -> None:
  one_kernel(monkeypatch)
  plant(monkeypatch)
  found = []
  with pytest.raises(error, match=text):
    for order in range(4):
      monkeypatch.setenv("ATTN_EMU_ORDER", str(order))
      found.append(gradients_by_one_kernel("next document" if plant is every_sum_is_set else "documents")[0])
      np.testing.assert_array_equal(found[-1], found[0])

def check_bits_of_calls_and_replays(device:str, score_mod:Callable[..., Any]|None, runs:int, **sizes:Any) -> None:
  """Computes the gradients of q, k and v under a mask of documents in `runs` calls and in as many replays of a TinyJit. All have the same bits."""
  p = sized(CASES["documents"], **sizes)
  x, d = normal(p), Tensor(documents(p, rows=p.Sk//9), device=device).realize()
  q, k, v, do = (tensor(a, p.dtype, device).realize() for a in (x.q, x.k, x.v, floats(*x.q.shape)))
  @TinyJit
  def gradients(d:Tensor) -> tuple[Tensor, ...]:
    with Context(TRAINING=1): o = attn.attention(q, k, v, score_mod=score_mod, mask_mod=CASES["documents"].mask, mod_tensors=(d,))
    return tuple(g.realize() for g in o.gradient(q, k, v, gradient=do))
  first, *others = [[array(t) for t in of(d)] for of in [gradients.fxn]*runs + [gradients]*(2 + runs)]     # a TinyJit replays from its third call on
  for found in others:
    for x, y in zip(found, first): np.testing.assert_array_equal(x, y)

def test_gradients_of_one_kernel_over_lists_have_the_same_bits_in_replays(monkeypatch:pytest.MonkeyPatch) -> None:
  one_kernel(monkeypatch)
  with lists(True), emulated("sm_90"): check_bits_of_calls_and_replays("EMU", None, 1, H=1, Sq=192, D=16)

@pytest.mark.gpu
@pytest.mark.parametrize("score_mod", (None, pytest.param(lambda score, b, h, i, j, d: (score/20).tanh()*20, id="softcap")))
def test_gradients_over_lists_have_the_same_bits_in_every_run(score_mod:Callable[..., Any]|None) -> None:
  # Documents alone have, from 8192 keys of 32 heads on, one kernel for all gradients, which adds to dq in a fixed order. Documents with a score_mod
  # have two kernels.
  check_bits_of_calls_and_replays("CUDA", score_mod, 20, H=32, Sq=8192 if score_mod is None else 2048, D=128, dtype="bfloat16")

def test_lists_of_part_tiles_change_no_bit() -> None:
  # A loop over the list of visible tiles gives the same bits as a loop over all tiles, if the mask hides some scores of every tile. Here documents
  # are shorter than tiles. Both loops then go through the tiles in the same order, and tiles that are not in the list add 0.
  case = CASES["documents"]
  p = sized(case, B=2, Sq=200)
  x, d = normal(p), documents(p)
  do = floats(*x.q.shape).astype(np.float16).astype(np.float32)
  found = []
  for wanted in (True, False):
    with lists(wanted): found.append(computed(p, x, do, "gfx942", case, d))
  for over_lists, without in zip(*found): np.testing.assert_array_equal(over_lists, without)

def test_lists_follow_the_numbers_of_a_tensor() -> None:
  # If a mask reads a tensor, kernels make the lists of visible tiles again in each call, also when TinyJit replays the call.
  case = CASES["documents"]
  p = sized(case, Sq=200)
  x = normal(p)
  with lists(True), emulated("gfx1030"):
    q, k, v = (tensor(a, p.dtype).realize() for a in (x.q, x.k, x.v))
    @TinyJit
    def step(d:Tensor) -> Tensor: return attn.attention(q, k, v, mask_mod=case.mask, mod_tensors=(d,)).realize()
    for seed in range(4):
      d = documents(p, seed)
      extras = {"bias": np.where(seen(p, case, d), 0, -np.inf).astype(np.float32)}
      o = array(step(Tensor(d, device="EMU").realize()))
      assert (verdict := judge(o, expected(problem(Sq=200, extras=extras), x, extras)[0])).ok, f"{seed}: {verdict}"

@pytest.mark.parametrize("name", ["documents", "neighbourhood"])
def test_the_first_lists_start_no_workers(name:str, monkeypatch:pytest.MonkeyPatch) -> None:
  # A first call whose kernels make lists of visible tiles starts no worker processes. tinygrad starts them to compile two kernels at once, which
  # takes longer than compiling the kernels of the lists.
  def pool() -> Any: raise AssertionError("worker processes are started")
  monkeypatch.setattr("tinygrad.engine.realize.get_worker_pool", pool)
  case = CASES[name]
  p = sized(case, Sq=132)
  x, d = normal(p), documents(p)
  given = {"mod_tensors": (Tensor(d, device="EMU").realize(),)} if case.documents else {}
  with lists(True), emulated("gfx942"):
    q, k, v = (tensor(a, p.dtype).realize() for a in (x.q, x.k, x.v))
    extras = {"bias": np.where(seen(p, case, d), 0, -np.inf).astype(np.float32)}
    o = array(attn.attention(q, k, v, mask_mod=case.mask, **given).realize())
  assert (verdict := judge(o, expected(problem(Sq=132, extras=extras), x, extras)[0])).ok, verdict

def neighbourhood(seed:int) -> tuple[Problem, Inputs, Callable[..., Any]]:
  # Returns a problem with a mask that reads no tensor, its inputs, and the mask.
  # Each seed gives another number of rows, so attn has not yet cached the problem's lists of visible tiles.
  p = sized(CASES["neighbourhood"], Sq=140 + seed, Sk=140 + seed)
  return p, normal(p), CASES["neighbourhood"].mask

def test_the_kernel_that_reads_kept_lists_begins_to_compile_first(monkeypatch:pytest.MonkeyPatch) -> None:
  # The kernel that loops over lists begins to compile first, if the device compiles in threads: before the kernels that make these lists, because its
  # compilation takes longest. The lists are there when the call returns. Later calls use the same lists and begin to compile nothing.
  order, own = list[str](), checked_kernel.compile_at_once
  def noted(launch:UOp, device:str) -> None:
    order.append(launch.src[0].arg.name)
    own(launch, device)
  def made(*args:Any, of:Callable[..., Tensor]=calls_tile_lists.new_lists) -> Tensor:
    order.append("lists")
    return of(*args)
  monkeypatch.setattr(checked_kernel, "compile_at_once", noted)
  monkeypatch.setattr(calls_tile_lists, "new_lists", made)
  monkeypatch.setattr(checked_kernel, "in_threads", lambda renderer: True)
  p, x, mask = neighbourhood(1)
  with lists(True), emulated("sm_90"):
    q, k, v = (tensor(a, p.dtype).realize() for a in (x.q, x.k, x.v))
    found = [attn.attention(q, k, v, mask_mod=mask) for _ in range(2)]
    assert len(order) == 2 and order[1] == "lists"
    before = GlobalCounters.kernel_count
    for o in found: o.realize()
    assert GlobalCounters.kernel_count == before + 2
    d = documents(p)
    extras = {"bias": np.where(seen(p, CASES["neighbourhood"], d), 0, -np.inf).astype(np.float32)}
    assert (verdict := judge(array(found[0]), expected(problem(Sq=141, Sk=141, extras=extras), x, extras)[0])).ok, verdict

def test_lists_that_could_not_be_made_are_made_again(monkeypatch:pytest.MonkeyPatch) -> None:
  # If making the kept lists of a mask fails, the next call makes the lists, and does not use a buffer without lists.
  own = calls_tile_lists.new_lists
  def failing(*args:Any) -> Tensor: raise RuntimeError("no lists")
  p, x, mask = neighbourhood(2)
  with lists(True), emulated("gfx942"):
    q, k, v = (tensor(a, p.dtype).realize() for a in (x.q, x.k, x.v))
    monkeypatch.setattr(calls_tile_lists, "new_lists", failing)
    with pytest.raises(RuntimeError, match="no lists"): attn.attention(q, k, v, mask_mod=mask)
    monkeypatch.setattr(calls_tile_lists, "new_lists", own)
    o = array(attn.attention(q, k, v, mask_mod=mask))
  extras = {"bias": np.where(seen(p, CASES["neighbourhood"], documents(p)), 0, -np.inf).astype(np.float32)}
  assert (verdict := judge(o, expected(problem(Sq=142, Sk=142, extras=extras), x, extras)[0])).ok, verdict

# ***** lists where tensors say which queries and keys exist *****

STRIPES = Case(lambda b, h, i, j, d: (((i - j + 4096)//64) % 3).eq(0) & (d[b, j] % 5 > 0),
               lambda b, h, i, j, d: ((i - j + 4096)//64 % 3 == 0) & (d[b, j] % 5 > 0), True)

@pytest.fixture
def made(monkeypatch:pytest.MonkeyPatch) -> list[ListedBlocks]:
  # Returns a list that records every list of tiles that attn makes during a test.
  found, of = list[ListedBlocks](), calls_tile_lists.new_lists
  def noted(x:ListedBlocks, *args:Any) -> Tensor:
    found.append(x)
    return of(x, *args)
  monkeypatch.setattr(calls_tile_lists, "new_lists", noted)
  return found

def agrees(o:np.ndarray, gradients:list[np.ndarray], p:Problem, x:Inputs, extras:dict[str, np.ndarray], do:np.ndarray) -> None:
  assert (verdict := judge(o, expected(p, x, extras)[0])).ok, f"o: {verdict}"
  laws = expected_gradients(p, x, extras, do, None)
  for n, g in zip(("q", "k", "v"), gradients): assert (verdict := judge(g, laws[n])).ok, f"{n}: {verdict}"

MASKS_OF_LENGTHS = {"stripes": STRIPES, "sinks and window": CASES["sinks and window"]}

@pytest.mark.sample(1)
@pytest.mark.parametrize("arch, name", [pytest.param(arch, name, marks=() if arch == on else pytest.mark.thorough)
                                        for arch in UNITS for name, on in (("stripes", "sm_90"), ("sinks and window", "gfx942"))])
def test_lists_with_kv_lengths(arch:str, name:str, made:list[ListedBlocks]) -> None:
  # If kv_lengths says how many keys a batch has, each batch has lists of its own, made in each call. o and the gradients agree with float64. One
  # batch has no keys, and one has fewer keys than queries.
  case, sizes, lengths = MASKS_OF_LENGTHS[name], dict(B=3, H=2, Hkv=1, Sq=150, Sk=400), np.array([333, 0, 100], np.int32)
  p = sized(case, **sizes)
  x, d = normal(p), documents(p)
  do = floats(*x.q.shape).astype(np.float16).astype(np.float32)
  i, j = np.arange(150)[None, :, None] + (lengths - 150)[:, None, None], np.arange(400)[None, None]
  mask = case.of_numbers(np.arange(3)[:, None, None], 0, i, j, *[d]*case.documents)
  extras = {"kv_lengths": lengths, "bias": np.where(mask, 0, -np.inf).astype(np.float32)[:, None]}
  with lists(True):
    o, *gradients = computed(p, x, do, arch, case, d, kv_lengths=lengths)
  agrees(o, gradients, problem(**sizes, extras=extras), x, extras, do)
  assert sorted(x.over for x in made) == ["keys"]*3 + ["queries"] and all(x.batches == 3 for x in made)     # forward twice, dq; dkdv

@pytest.mark.sample(1)
@pytest.mark.parametrize("arch, name", [pytest.param(arch, name, marks=() if arch == on else pytest.mark.thorough)
                                        for arch in (*UNITS, "gfx950") for name, on in (("stripes", "gfx950"), ("sinks and window", "sm_80"))])
def test_lists_of_packed_sequences(arch:str, name:str, made:list[ListedBlocks]) -> None:
  # Each packed sequence has lists of its own, made in each call, in which queries and keys are counted within the sequence. o and the gradients of
  # each sequence agree with float64.
  ends_q, ends_k = np.array([5, 155, 155, 290], np.int32), np.array([0, 200, 210, 400], np.int32)
  case, rng, most_q, most_k = MASKS_OF_LENGTHS[name], np.random.default_rng(5), 150, 200
  def draw(rows:int, heads:int) -> np.ndarray: return rng.standard_normal((rows, heads, 32)).astype(np.float16).astype(np.float32)
  q, k, v, do = draw(300, 2), draw(400, 1), draw(400, 1), draw(300, 2)
  d = rng.integers(0, 9, (3, most_k)).astype(np.int32)
  with lists(True), emulated(arch):
    tensors = [tensor(a, "float16").realize() for a in (q, k, v)]
    given = {told: Tensor(a, device="EMU").realize() for told, a in (("cu_seqlens_q", ends_q), ("cu_seqlens_k", ends_k))}
    o = attn.attention(*tensors, layout="thd", mask_mod=case.mask, mod_tensors=[Tensor(d, device="EMU").realize()]*case.documents,
                       max_seqlen_q=most_q, max_seqlen_k=most_k, **given)
    got = [array(t) for t in (o, *o.gradient(*tensors, gradient=tensor(do, "float16").realize()))]
  def part(a:np.ndarray, ends:np.ndarray, b:int) -> np.ndarray: return a[ends[b]:ends[b + 1]].transpose(1, 0, 2)[None]
  for b in (0, 2):
    x = Inputs(*(part(a, ends, b) for a, ends in ((q, ends_q), (k, ends_k), (v, ends_k))))
    Sq, Sk = x.q.shape[2], x.k.shape[2]
    i, j = np.arange(Sq)[:, None] + (Sk - Sq), np.arange(Sk)[None]
    extras = {"bias": np.where(case.of_numbers(b, 0, i, j, *[d]*case.documents), 0, -np.inf).astype(np.float32)[None, None]}
    parts = [part(a, ends, b) for a, ends in zip(got, (ends_q, ends_q, ends_k, ends_k))]
    agrees(parts[0], parts[1:], problem(B=1, H=2, Hkv=1, Sq=Sq, Sk=Sk, extras=extras), x, extras, part(do, ends_q, b))
  assert sorted(x.over for x in made) == ["keys"]*3 + ["queries"] and all(x.batches == 3 for x in made)     # forward twice, dq; dkdv
  for a, ends in zip(got, (ends_q, ends_q, ends_k, ends_k)): assert not a[:ends[0]].any() and not a[ends[-1]:].any()

SQUARES_OF_BATCHES = Case(lambda b, h, i, j: ((i//32 + j//32) % 3).eq((h + b) % 3), lambda b, h, i, j: (i//32 + j//32) % 3 == (h + b) % 3)

@pytest.mark.sample(2)
@pytest.mark.parametrize("name, axis", (("heads", 0), ("heads", 1), ("documents", 1), pytest.param("documents", 0, marks=pytest.mark.thorough),
                                        ("neighbourhood", 0)))
def test_lists_on_devices_that_divide_batches_or_heads(name:str, axis:int, made:list[ListedBlocks]) -> None:
  # If batches or heads are sharded over devices, each device makes lists for its own batches and heads: the mask gets their indices in the whole
  # call. o and the gradients agree with float64.
  case = SQUARES_OF_BATCHES if name == "heads" else CASES[name]
  sizes, devices = dict(B=2, H=4, Hkv=4, Sq=140, Sk=140), ("EMU:1", "EMU:2")
  p = sized(case, **sizes)
  x, d = normal(p), documents(p)
  do = floats(*x.q.shape).astype(np.float16).astype(np.float32)
  with lists(True), emulated("gfx942"):
    def sharded(a:np.ndarray) -> Tensor: return tensor(a, p.dtype, "EMU:1").shard(devices, axis).realize()
    q, k, v, of_o = map(sharded, (x.q, x.k, x.v, do))
    tensors = [Tensor(d, device="EMU:1").shard(devices, None).realize()]*case.documents
    o = attn.attention(q, k, v, mask_mod=case.mask, mod_tensors=tensors)
    got = [array(whole(t)) for t in (o, *o.gradient(q, k, v, gradient=of_o))]
  extras = {"bias": np.where(seen(p, case, d), 0, -np.inf).astype(np.float32)}
  agrees(got[0], got[1:], problem(**sizes, extras=extras), x, extras, do)
  assert {x.over for x in made} == {"keys", "queries"}
