"""Choice of what converts 8-bit rows of K and V for prompt chunks on wgmma: the attention kernel, or a kernel before it
(attn/kernels/nvidia/widen.py)."""
from __future__ import annotations
from attn.chips import Chip
from attn.choose.refusals import wgmma_refuses
from attn.choose.tiles import wgmma_tile
from attn.kernels.nvidia.widen import bytes_of_widened, widened_problem
from attn.kernels.tiles.wgmma import WgmmaTile
from attn.problem import Problem

UNSUPPORTED = ("v_in_k", "varlen", "dealt", "mask_mod", "batch_invariant")
MOST_WIDENED = 1 << 30     # of converted rows
LEAST_READERS = 1536     # rows of q that must read a key for its conversion to pay, on average

def widened_refuses(p:Problem, arch:Chip) -> str|None:
  if (reason := wgmma_refuses(p, arch)) is not None: return reason
  if not p.stored: return "k and v are not stored in 8 bits: there is nothing to convert"
  return next((f"{name}: this kernel does not support it" for name in UNSUPPORTED if getattr(p, name)), None)

def widened_tile(p:Problem, arch:Chip) -> WgmmaTile: return wgmma_tile(widened_problem(p), arch)

def keys_that_some_query_sees(p:Problem) -> int:
  """Returns the number of keys of a head that at least one query sees, if each sequence has the largest length that the problem allows."""
  left, right = p.window
  return p.Sk if left < 0 else min(p.Sk, p.Sq + left + (right if right >= 0 else p.Sk))

def widened_slower(p:Problem, arch:Chip) -> str|None:
  if (size := bytes_of_widened(p)) > MOST_WIDENED: return f"the converted rows would take {size} bytes, more than {MOST_WIDENED}"
  rows = p.visible_scores*(p.H//p.Hkv)//keys_that_some_query_sees(p)
  if rows >= LEAST_READERS: return None
  return f"on average {rows} rows of q read a key; with less than {LEAST_READERS}, forward_wgmma, which converts keys itself, is faster"
