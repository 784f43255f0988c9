"""Decides for which problems kernels loop over lists of the tiles that a mask_mod leaves visible (attn/kernels/tile_lists.py)."""
from __future__ import annotations
from dataclasses import replace
from attn.chips import CHIPS, Chip
from attn.functions.symbols import BATCH, QUERY_HEAD, depends
from attn.kernels.tile_lists import ListedBlocks
from attn.kernels.tiles.common import TILES_OF_TURN, BlockTile, heads_of
from attn.problem import Problem

LEAST_TILES = 2048     # tiles of the scores of all heads: to make lists of fewer tiles may take longer than lists save
LEAST_HEADS = 4        # heads that share a list of a mask that reads tensors: such a list is made in every call

def no_lists(p:Problem, arch:Chip, tile:BlockTile) -> str|None:
  """Returns why a kernel cannot loop over lists of the tiles that mask_mod leaves visible, or None if it can."""
  # None is returned, too, if a problem is only too small for lists.
  reasons = ((p.v_in_k, "V is a part of K"), (p.pages is not None, "K and V lie in pages"),
             (p.sk_variable is not None, "a Variable says how many keys there are"), (p.dealt is not None, "devices share the rows of a sequence"),
             (p.batch_invariant, "batch_invariant=True"),
             (heads_of(p, tile) > 1, "a block has the queries of several heads"), (arch.serial, f"{arch.name} has no threads"))
  return next((reason for holds, reason in reasons if holds), None)

def listing(p:Problem, arch:Chip, tile:BlockTile|None, over:str="keys", with_turns:bool=False) -> ListedBlocks|None:
  """Returns the lists of visible tiles over which a kernel loops with a mask_mod, or None if the kernel uses no lists."""
  # `over` is "keys" or "queries": the kernel loops over tiles of these.
  found = lists_or_reason(p, arch, tile, over)
  if not isinstance(found, ListedBlocks): return None
  # The lists also say in which order workgroups add to a sum. A tile of the list is then as long as a turn.
  return replace(found, block_n=found.block_n*TILES_OF_TURN, with_turns=True) if with_turns else found

def lists_or_reason(p:Problem, arch:Chip, tile:BlockTile|None, over:str="keys") -> ListedBlocks|str|None:
  """Returns the lists of visible tiles over which a kernel loops with a mask_mod, the reason why it uses none, or None without a mask_mod."""
  # `over` is "keys" or "queries": the kernel loops over tiles of these.
  if p.mask_mod is None or tile is None: return None
  if (reason := no_lists(p, arch, tile)) is not None: return reason
  of_heads, of_batches = depends(p.mask_mod.value, QUERY_HEAD), depends(p.mask_mod.value, BATCH) or p.kv_lengths or p.varlen
  heads = (p.H, 1) if over == "keys" else (p.Hkv, p.H//p.Hkv)
  found = ListedBlocks(p, over, tile.block_m, tile.block_n, p.B if of_batches else 1, heads if of_heads else (1, 1), arch.name in CHIPS)
  if found.read and LEAST_HEADS*found.lists > p.B*p.H:
    return f"the lists depend on tensors, so that each call makes its lists, and fewer than {LEAST_HEADS} heads share a list"
  tiles = p.B*p.H*found.blocks*found.tiles
  return found if tiles >= LEAST_TILES else f"{tiles} tiles are fewer than {LEAST_TILES}"

def with_lists(p:Problem, lists:ListedBlocks|None) -> Problem:
  """Returns a copy of `p` for a kernel that loops over `lists`, or `p` itself if `lists` is None."""
  return p if lists is None else replace(p, tile_list=lists.shape)
