"""Says for which problems kernels loop over lists of tiles (attn/kernels/tile_lists.py)."""
from __future__ import annotations
from dataclasses import replace
from attn.chips import CHIPS, Chip
from attn.functions.symbols import BATCH, QUERY_HEAD, depends, elements_of
from attn.kernels.tile_lists import ListedBlocks
from attn.kernels.tiles.common import BlockTile, heads_of
from attn.problem import Problem

LEAST_TILES = 2048     # tiles of the scores of all heads: to make lists of fewer tiles may take longer than lists save
LEAST_HEADS = 4        # heads that share a list of a mask that reads tensors: such a list is made in every call

def listing(p:Problem, arch:Chip, tile:BlockTile|None, over:str="keys") -> ListedBlocks|None:
  """Returns which lists of tiles a kernel with the tile `tile` loops over, or None if it loops over neighbouring tiles without a list. `over` says
  whether the tiles are tiles of keys or of queries.

  Lists are made for a mask_mod that leaves more than an interval of keys, if all batches have the same numbers of queries and keys. Devices without
  threads get none."""
  if p.mask_mod is None or tile is None or p.v_in_k or p.varlen or p.kv_lengths or p.sk_variable is not None or p.dealt is not None: return None
  if p.first_batch_and_head or p.batch_invariant or heads_of(p, tile) > 1 or arch.serial: return None
  of_batches, of_heads = (depends(p.mask_mod.value, symbol) for symbol in (BATCH, QUERY_HEAD))
  heads = (p.H, 1) if over == "keys" else (p.Hkv, p.H//p.Hkv)
  found = ListedBlocks(p, over, tile.block_m, tile.block_n, p.B if of_batches else 1, heads if of_heads else (1, 1), arch.name in CHIPS)
  if elements_of(p.mask_mod.value) and LEAST_HEADS*found.lists > p.B*p.H: return None
  return found if p.B*p.H*found.blocks*found.tiles >= LEAST_TILES else None

def with_lists(p:Problem, lists:ListedBlocks|None) -> Problem:
  """Returns `p` with the shape of the lists that its kernel loops over, or `p` itself if there are no lists."""
  return p if lists is None else replace(p, tile_list=lists.shape)
