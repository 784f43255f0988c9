"""Tests of the order in which workgroups start on AMD's chips: heads whose K and V fit together into a cache of the chip start together."""
from __future__ import annotations
from dataclasses import replace
import pytest
from attn.chips import CHIPS, get_chip
from attn.kernels.parts.grid.workgroup import head_fastest, heads_together, kv_head_fastest
from attn.kernels.tiles.amd import Tile
from attn.kernels.tiles.common import BlockTile
from attn.tinygrad_compat import UOp
from backward_cases import check_backward_kernels
from cases import check, problem

ROW = 2*(64 + 64)     # bytes of a row of K and V together, D = 64

def order(make, p, tile:BlockTile, arch:str) -> list[tuple[int, int]]:
  # the head and the block of each workgroup of the grid that `make` builds, in the order in which workgroups start
  # the last axis of the grid varies fastest
  grid = make(p, tile, tile.matrix, CHIPS[arch])
  ranges, found = grid.ranges[:-2], [{}]
  for r in ranges: found = [{**x, r: UOp.const(i)} for x in found for i in range(r.vmax + 1)]
  return [tuple(int(x.substitute(values).simplify().arg) for x in (grid.head, grid.block)) for values in found]

@pytest.fixture
def two_heads(monkeypatch:pytest.MonkeyPatch):
  # a function change(rows, *archs) that gives these chips a cache for K and V of two heads
  def change(rows:int, *archs:str) -> None:
    for arch in archs: monkeypatch.setitem(CHIPS, arch, replace(CHIPS[arch], caches=replace(CHIPS[arch].caches, group=2*rows*ROW)))
  return change

def test_groups_of_heads_start_one_after_another(two_heads) -> None:
  # If the cache holds K and V of two of four heads, all blocks of the first two heads start first. If the cache holds all heads, or the chip does not
  # group heads (CDNA), consecutive workgroups compute different heads. In backward, workgroups that own keys start in the same order; there Q and dO
  # must fit into the cache.
  p, tile = problem(H=4, Sq=128, Sk=256, D=64), Tile(4, 1, 16, matrix=CHIPS["gfx1201"].matrix["float16"][0])
  assert tile.block_m == 64
  everything = [(head, block) for block in range(2) for head in range(4)]
  assert order(head_fastest, p, tile, "gfx1201") == everything
  two_heads(256, "gfx1201")
  assert order(head_fastest, p, tile, "gfx1201") == [(head, block) for first in (0, 2) for block in range(2) for head in (first, first + 1)]
  assert order(kv_head_fastest, replace(p, Sq=256, Sk=128), tile, "gfx1201") == order(head_fastest, p, tile, "gfx1201")
  assert order(head_fastest, p, replace(tile, matrix=CHIPS["gfx942"].matrix["float16"][0], waves=2), "gfx942") == everything

@pytest.mark.parametrize("heads, kv_heads, rows, together", [
  (4, 4, 256, 4), (4, 4, 8192, 1), (4, 4, 4096, 2), (6, 6, 2100, 3), (8, 2, 4096, 8), (8, 2, 8192, 4), (3, 3, 10**6, 1)])
def test_heads_whose_keys_have_room(heads:int, kv_heads:int, rows:int, together:int) -> None:
  # `heads_together` returns how many heads start together: the largest divisor of the number of heads whose K and V fit into the part of the cache
  # that is meant for K and V. RX 9060 XT has 32 MB of Infinity Cache, half of it for K and V; 65536 rows of D = 64 in fp16 are 16 MB. Query heads
  # with the same keys need them once. On chips without such a limit, such as gfx942, all heads start together.
  chip = replace(get_chip("gfx1200"), caches=replace(get_chip("gfx1200").caches, group=8192*ROW))
  assert get_chip("gfx1200").caches.group == 65536*ROW
  p = problem(H=heads, Hkv=kv_heads, Sq=rows, Sk=rows, D=64)
  assert heads_together(p, chip, 1) == together
  assert heads_together(p, get_chip("gfx942"), 1) == heads and heads_together(p, get_chip("gfx942")) == kv_heads

@pytest.mark.sample(1)
@pytest.mark.parametrize("arch, shape", [
  ("gfx1201", dict(B=2, H=4, Sq=150, Sk=100, D=64, causal=True)), ("gfx1100", dict(B=1, H=6, Hkv=3, Sq=70, Sk=140, D=64, dtype="bfloat16"))])
def test_kernels_with_groups_of_heads(two_heads, arch:str, shape:dict) -> None:
  # Outputs and gradients are right if the chip's cache is too small for all heads, so that workgroups start group by group of heads.
  two_heads(max(shape["Sq"], shape["Sk"]), arch)
  p = problem(**shape)
  assert 1 < heads_together(p, get_chip(arch), 1) < p.all_heads and 1 <= heads_together(p, get_chip(arch)) < p.B*p.Hkv
  check(arch, **shape)
  check_backward_kernels(arch, **shape)
