"""Tests of the numbers of tiles that `explain` prints: how many tiles a kernel skips, masks, and computes without a mask. The expected numbers come
from numpy, which looks at all pairs of a query and a key."""
from __future__ import annotations
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
import numpy as np
import pytest
import attn
from attn import mods
from attn.calls import tile_shares
from attn.calls.tile_shares import WITH_MASK, NO_MASK, SKIPPED, Listed, shares_of, visited_tiles
from attn.chips import Chip, get_chip
from attn.choose.backward import tiles_of
from attn.choose.dispatch import choose
from attn.functions.trace import functions_of
from attn.kernels.parts.grid.tensors import of_backward
from attn.kernels.tiles.common import BlockTile, heads_of
from attn.problem import Problem
from attn.reference import Array
from attn.tinygrad_compat import Tensor
from api_cases import emulated, lists
from cases import problem

# ***** masks *****

@dataclass(frozen=True)
class Mask:
  # A mask, written several times: in numpy, as a mask_mod, and as options of a problem.
  # `hull` computes whether a key lies in an interval that contains all keys that the query sees; it is None if the keys that a query sees are an
  # interval. `documents` says whether the mask reads the document of each key.
  sees: Callable[..., Any]
  mod: Callable[..., Any]|None = None
  hull: Callable[..., Any]|None = None
  documents: bool = False
  built_in: tuple[tuple[str, Any], ...] = ()

def rows_apart(i:Any, j:Any, rows:int) -> Any: return abs(i//rows - j//rows)

MASKS = {
  "causal=True": Mask(lambda b, h, i, j: j <= i, built_in=(("causal", True),)),
  "window": Mask(lambda b, h, i, j: (j >= i - 50) & (j <= i + 20), built_in=(("window", (50, 20)),)),
  "causal": Mask(lambda b, h, i, j: j <= i, mods.causal),
  "sliding_window": Mask(lambda b, h, i, j: (j <= i) & (i - j < 40), mods.sliding_window(40)),
  "prefix_lm": Mask(lambda b, h, i, j: (j <= i) | (j < 100), mods.prefix_lm(100)),
  "dilated_window": Mask(lambda b, h, i, j: (j <= i) & (i - j < 60) & ((i - j) % 4 == 0), mods.dilated_window(60, 4),
                         lambda b, h, i, j: (j <= i) & (i - j < 60)),
  "sinks_and_window": Mask(lambda b, h, i, j: (j <= i) & ((j < 4) | (i - j < 30)), mods.sinks_and_window(4, 30), lambda b, h, i, j: j <= i),
  "documents": Mask(lambda b, h, i, j, d: d[b, i] == d[b, j], mods.documents, lambda b, h, i, j: i == i, documents=True),
  "neighbourhood": Mask(lambda b, h, i, j: (rows_apart(i, j, 16) <= 2) & (abs(i % 16 - j % 16) <= 2), mods.sliding_tile(16, 2),
                        lambda b, h, i, j: rows_apart(i, j, 16) <= 2),
  "sliding_tile": Mask(lambda b, h, i, j: (rows_apart(i, j, 32) <= 1) & (abs(i % 16//2 - j % 16//2) <= 1), mods.sliding_tile(16, 1, tile=2),
                       lambda b, h, i, j: rows_apart(i, j, 32) <= 1),
  "squares of heads": Mask(lambda b, h, i, j: (i//64 + j//64) % 3 == h % 3, lambda b, h, i, j: ((i//64 + j//64) % 3).eq(h % 3),
                           lambda b, h, i, j: i == i)}

def test_every_mask_of_mods_is_here() -> None:
  of_scores = ("alibi_bias", "relative_bias", "tanh_softcap", "tanh_gate", "head_scale")
  named = {name for name, x in vars(mods).items() if callable(x) and x.__module__ == mods.__name__}
  assert named - {*of_scores} <= {*MASKS}

SIZES: dict[str, dict[str, int]] = {
  "fewer queries": dict(B=2, H=4, Hkv=2, Sq=170, Sk=300, D=64), "more queries": dict(H=3, Hkv=3, Sq=290, Sk=170, D=128),
  "queries of several heads": dict(H=8, Hkv=2, Sq=5, Sk=300, D=64), "whole tiles": dict(H=2, Sq=256, Sk=512, D=128)}

def documents(B:int, Sk:int) -> Array: return np.sort(np.random.default_rng(3).integers(0, 4, (B, Sk)), 1).astype(np.int32)

def problem_and_documents(mask:Mask, sizes:dict[str, int]) -> tuple[Problem, Array]:
  d = documents(sizes.get("B", 1), sizes["Sk"])
  extras = {"mod_tensor0": d} if mask.documents else {}
  kinds = ((d.shape, "int32"),) if mask.documents else ()
  return problem(lse=False, extras=extras, **sizes, **dict(mask.built_in), **functions_of(None, mask.mod, kinds)), d

# ***** all pairs *****

def seen(p:Problem, sees:Callable[..., Any], tensors:list[Array], rows:int) -> Array:
  # Computes in numpy whether the query of each row sees each key: (B, H, rows, keys).
  # `rows` may exceed the number of queries: the mask is then computed for positions beyond the last query, too.
  b, h, i, j = np.ogrid[:p.B, :p.H, p.offset:p.offset + rows, :p.Sk]
  return np.broadcast_to(sees(b, h, i, j, *tensors), (p.B, p.H, rows, p.Sk))

def expected(p:Problem, mask:Mask, d:Array, tile:BlockTile, width:int, over:str, listed:bool, always:bool) -> Array:
  # Returns whether a kernel skips each tile, masks it, or computes it without the mask: an array (B, H, blocks, tiles).
  # If `over` is "keys", a workgroup owns a block of queries and loops over tiles of `width` keys; otherwise it owns keys and loops over queries. `d`
  # (B, rows) has the document of each row, for a mask that reads documents. With `listed`, the kernel has a list of the tiles that a block sees.
  # Without a list, it visits all tiles in the mask's `hull`. Then the rows of the last block that lie beyond the last row also see tiles. With
  # `always`, the kernel computes the mask in every tile that it visits.
  heads = heads_of(p, tile) if over == "keys" else 1
  own = p.Sq*heads if over == "keys" else p.Sk
  blocks, exact = -(-own//tile.block_m), listed or mask.hull is None
  if over == "keys":
    queries = p.Sq if listed else (blocks*tile.block_m - 1)//heads + 1
    pairs = seen(p, mask.sees if exact else mask.hull or mask.sees, [d]*(mask.documents and exact), queries).repeat(heads, 2)
  else:
    pairs = seen(p, mask.sees if exact else mask.hull or mask.sees, [d]*(mask.documents and exact), p.Sq).swapaxes(2, 3)
    ghosts = blocks*tile.block_m - p.Sk
    if not listed and ghosts:
      b, h, i, j = np.ogrid[:p.B, :p.H, p.offset:p.offset + p.Sq, p.Sk:p.Sk + ghosts]
      more = np.broadcast_to((mask.sees if mask.hull is None else mask.hull)(b, h, i, j), (p.B, p.H, p.Sq, ghosts)).swapaxes(2, 3)
      pairs = np.concatenate([pairs, more], 2)
  columns = pairs.shape[-1]
  found = np.full((p.B, p.H, blocks, -(-columns//width)), SKIPPED, np.int8)
  for block, tile_number in np.ndindex(*found.shape[2:]):
    part = pairs[:, :, block*tile.block_m:(block + 1)*tile.block_m, tile_number*width:(tile_number + 1)*width]
    some, whole = part.any((2, 3)), part.all((2, 3)) & (part.shape[3] == width)
    plain = whole & (exact and not always)
    found[:, :, block, tile_number] = np.where(plain, NO_MASK, np.where(some, WITH_MASK, SKIPPED))
  return found

# ***** counted *****

def kernels(p:Problem, chip:Chip) -> list[tuple[str, Problem, BlockTile, str]]:
  choice = choose(p, chip)
  tile, of_b = choice.work.tile, of_backward(p)
  assert tile is not None
  return [(choice.kernel, p, tile, "keys"), *[("backward", of_b, t, over) for t, over in zip(tiles_of(of_b, chip), ("keys", "queries"))]]

def check(name:str, sizes:str, arch:str, with_lists:bool) -> None:
  mask = MASKS[name]
  if mask.documents and sizes == "more queries": pytest.skip("documents need a key for each query")
  p, d = problem_and_documents(mask, SIZES[sizes])
  with lists(with_lists), emulated(arch):
    chip = choose(p, tile_shares.arch_of("EMU")).arch
    assert chip is not None
    for kernel, of, tile, over in kernels(p, chip):
      given = {"mod_tensor0": Tensor(d, device="EMU").realize()}
      found = visited_tiles(kernel, of, chip, tile, over, "EMU", given)
      listed = isinstance(found, Listed)
      assert listed == (with_lists and mask.hull is not None and (over == "queries" or heads_of(p, tile) == 1)), (kernel, over)
      want = expected(p, mask, d, tile, tile.block_n, over, listed, chip.name == "gfx1030")
      kinds = found.kinds()
      if over == "queries" and kinds.shape[1] > 1:      # heads that share keys share a list
        group = want.reshape(p.B, p.Hkv, -1, *want.shape[2:])
        some, whole = (group != SKIPPED).any(2), (group == NO_MASK).all(2)
        want = np.where(whole, NO_MASK, np.where(some, WITH_MASK, SKIPPED))
      np.testing.assert_array_equal(np.broadcast_to(kinds, want.shape), want, err_msg=f"{kernel} over {over}, {tile}")
      shares = shares_of(over, found)
      assert [shares.skipped, shares.masked, shares.plain] == [(kinds == x).sum() for x in (SKIPPED, WITH_MASK, NO_MASK)]

ON = ("gfx942", "gfx1100", "sm_80", "sm_90", "gfx1030")

@pytest.mark.sample(99)
@pytest.mark.parametrize("arch", ON)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", MASKS)
def test_tiles_of_intervals(name:str, sizes:str, arch:str) -> None: check(name, sizes, arch, False)

@pytest.mark.sample(3)
@pytest.mark.parametrize("name, sizes, arch", [
  pytest.param(name, sizes, arch, marks=() if (sizes, arch) == ("fewer queries", "gfx942") else pytest.mark.thorough)
  for name, mask in MASKS.items() if mask.hull is not None for sizes in SIZES for arch in ON])
def test_tiles_of_lists(name:str, sizes:str, arch:str) -> None: check(name, sizes, arch, True)

def test_two_tiles_of_dual_wave_are_one() -> None:
  # `visited_tiles`, which tells which tiles a kernel skips or masks, has tiles of 128 keys for the kernel dual_wave, because each iteration of this
  # kernel computes two tiles of 64 keys.
  p, chip = problem(B=4, H=32, Sq=600, Sk=700, D=128, causal=True, lse=False), get_chip("gfx950")
  choice = choose(p, chip)
  assert choice.kernel == "dual_wave" and choice.work.tile is not None
  found = visited_tiles(choice.kernel, p, chip, choice.work.tile, "keys", "EMU", {})
  want = expected(p, MASKS["causal=True"], documents(1, 1), choice.work.tile, 128, "keys", False, False)
  np.testing.assert_array_equal(found.kinds()[0, 0], want[0, 0])

# ***** lengths *****

def check_causal_batches(p:Problem, tensors:dict[str, Array], queries:Array, keys:Array) -> None:
  # Checks which tiles `visited_tiles` reports as skipped, masked, or without a mask, if each sequence has its own lengths.
  # The mask is causal, and the last query of a sequence sees all its keys.
  chip = get_chip("gfx942")
  tile = choose(p, chip).work.tile
  assert tile is not None
  with emulated("gfx942"):
    found = visited_tiles("forward", p, chip, tile, "keys", "EMU", {name: Tensor(x, device="EMU").realize() for name, x in tensors.items()}).kinds()
  i, j = np.arange(tile.block_m)[:, None], np.arange(found.shape[3]*tile.block_n)
  for b, _, block in np.ndindex(*found.shape[:3]):
    first = block*tile.block_m
    pairs = (j <= first + i + keys[b] - queries[b]) & (j < keys[b]) & (first < queries[b])
    for t in range(found.shape[3]):
      part = pairs[:, t*tile.block_n:(t + 1)*tile.block_n]
      assert found[b, 0, block, t] == (NO_MASK if part.all() else WITH_MASK if part.any() else SKIPPED), (b, block, t)

def test_lengths_of_batches() -> None:
  ends, starts = np.int32([57, 300, 0]), np.int32([0, 130, 0])
  tensors = {"kv_lengths": ends, "kv_starts": starts}
  p = problem(B=3, H=2, Sq=300, Sk=300, D=64, causal=True, lse=False, extras=tensors)
  check_causal_batches(p, tensors, np.full(3, 300), ends - starts)

def test_packed_sequences() -> None:
  of_q, of_k = np.int32([0, 290, 310, 310]), np.int32([0, 300, 333, 400])
  tensors = {"cu_seqlens_q": of_q, "cu_seqlens_k": of_k}
  p = problem(H=2, Sq=310, Sk=400, D=64, layout="thd", causal=True, lse=False, extras=tensors, max_seqlen_q=290, max_seqlen_k=300)
  check_causal_batches(p, tensors, np.diff(of_q), np.diff(of_k))

# ***** explain *****

def lines_of(capsys:pytest.CaptureFixture[str]) -> list[str]: return [x.strip() for x in capsys.readouterr().out.splitlines() if " tiles: " in x]

def test_explain_says_the_shares(capsys:pytest.CaptureFixture[str], monkeypatch:pytest.MonkeyPatch) -> None:
  # `explain` prints how many tiles a kernel skips, masks, and computes without a mask. Under a causal mask of 256 queries these are 2, 4 and 2 of 8
  # tiles of 128 x 64. `explain` runs no kernel for this.
  monkeypatch.setattr(tile_shares, "tile_lists", None)
  with emulated("gfx942"):
    q = Tensor.empty(1, 2, 256, 64, dtype="half", device="EMU")
    attn.explain(q, q, q)
    assert lines_of(capsys) == []
    choice = attn.explain(q, q, q, causal=True)
    assert (choice.work.tile.block_m, choice.work.tile.block_n) == (128, 64)
    assert lines_of(capsys) == ["key tiles: 25.0 % skipped, 50.0 % masked, 25.0 % without a mask"]
    assert not isinstance(attn.explain(q, q, q, mask_mod=mods.causal, backward=True), str)
    forward, dq, dkdv = lines_of(capsys)
    assert forward == "key tiles: 25.0 % skipped, 50.0 % masked, 25.0 % without a mask"
    assert dq.startswith("backward_dq: key tiles: ") and dkdv.startswith("backward_dkdv: query tiles: ")

def test_explain_says_what_is_not_known(capsys:pytest.CaptureFixture[str]) -> None:
  def own(b:Any, h:Any, i:Any, j:Any, d:Any) -> Any: return (i >= j) & d[b, i].eq(d[b, j])
  with lists(True), emulated("gfx942"):
    q, numbers = Tensor.empty(1, 2, 256, 64, dtype="half", device="EMU"), Tensor(np.int32([[0]*128 + [1]*128]), device="EMU")
    attn.explain(q, q, q, mask_mod=own, mod_tensors=(numbers + 1,))
    assert lines_of(capsys) == ["key tiles: at least 25.0 % skipped, others not counted: mod_tensor0 has no numbers yet"]
    attn.explain(q, q, q, mask_mod=own, mod_tensors=(numbers.realize(),))
    assert lines_of(capsys) == ["key tiles: 50.0 % skipped, 50.0 % masked, 0.0 % without a mask"]
    attn.explain(q, q, q, mask_mod=own, mod_tensors=(numbers,), arch="gfx1100")
    line, = lines_of(capsys)
    assert line.startswith("key tiles: 50.0 % skipped")
    attn.explain(q, q, q, causal=True, kv_lengths=Tensor([100], dtype="int", device="EMU") + 1)
    assert lines_of(capsys) == ["key tiles: not counted: kv_lengths has no numbers yet"]

def test_explain_says_why_there_is_no_list(capsys:pytest.CaptureFixture[str]) -> None:
  # `attn.explain` says why a kernel has no list of visible tiles. Either there are few tiles; or each call would have to make its lists, because they
  # depend on tensors, and few heads share a list. `explain` says nothing if there is a list, or if a query's visible keys are an interval.
  def told(*sizes:int, mask:Callable[..., Any]|None=None, **options:Any) -> list[str]:
    q = Tensor.empty(*sizes, dtype="half", device="EMU")
    attn.explain(q, q, q, mask_mod=mask or mods.sinks_and_window(4, 64), **options)
    return [x.partition("; no list of tiles: ")[2] for x in lines_of(capsys)]
  ids, ends = Tensor(np.zeros((1, 512), np.int32), device="EMU").realize(), Tensor(np.int32([0, 200, 512]), device="EMU").realize()
  of_sequences = {"layout": "thd", "cu_seqlens_q": ends, "cu_seqlens_k": ends}
  with emulated("gfx942"):
    assert told(1, 2, 512, 64) == ["64 tiles are fewer than 2048"]
    few_heads = "the lists depend on tensors, so that each call makes its lists, and fewer than 4 heads share a list"
    assert told(1, 2, 512, 64, kv_lengths=300) == told(512, 2, 64, **of_sequences) == [few_heads]
    assert told(1, 2, 512, 64, mask=mods.documents, mod_tensors=(ids,)) == [few_heads]
    assert told(1, 64, 512, 64, kv_lengths=300) == told(512, 64, 64, **of_sequences) == [""]
    assert told(1, 2, 512, 64, mask=mods.causal) == told(1, 64, 512, 64, mask=mods.documents, mod_tensors=(ids,)) == [""]
