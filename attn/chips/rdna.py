"""Data that RDNA's families with a matrix unit share: WMMA instructions, waves of 32 lanes."""
from __future__ import annotations
from attn.chips.family import Caches
from attn.chips.matrix import Matrix
from attn.chips.shapes import BOTH, NO_BIAS, NO_OPTION, BackwardShape, MlaShape, UpTo

def wmma(suffix:str, operand_type:str, block:int, duplicated:bool=False, K:int=16, arguments:str="{a}, {b}, {c}", size:int=2) -> Matrix:
  """Returns the table row of a WMMA instruction C (16 x 16) += A (16 x K) B (K x 16), e.g. wmma_f32_16x16x16_f16_w32 for `suffix` "f16_w32"."""
  # `suffix` is the end of its builtin's name in clang, `operand_type` the builtin's type for an element of A and B, and `arguments` the text of the
  # builtin's arguments. `size` is the number of bytes of an element of A and B. A lane holds the rows of C in groups of `block` consecutive rows.
  # `duplicated` says whether both halves of a wave hold all of A and B.
  operand = 16*K//32*(1 + duplicated)
  return Matrix(f"wmma_f32_16x16x{K}_{suffix}", 16, 16, K, 32, operand, block, operand_type, arguments, "permlanex16", duplicated, size)

# Neither registers nor LDS have room for Q, so each iteration reads Q from memory. No register is spilled.
LATENT_ON_RDNA = (UpTo(576, MlaShape(4, 32, 2, q_reloaded=True, weight_parts=2), beyond=32),
                  UpTo(576, MlaShape(2, 32, 2, q_reloaded=True, weight_parts=2, prefetch=0)))

# For the gradient of a bias if rows of q and dO consist of pieces: each iteration reads these rows from memory again, so fewer registers hold them
# and more waves run at a time. No register is spilled. With bf16 and D = 125, an iteration is predicted to take 0.64 of the time of the tile of dq on
# gfx1100, and 0.19 of it on gfx1201.
DBIAS_IN_PIECES = UpTo(128, BackwardShape(4, 16, BOTH, fenced=2, prefetch=0, sparing=True))

# With (4, 16, 8192, 192) it is predicted to be 27 to 39% faster than the rows with `sparing` on gfx1100 and gfx1201, without options and with
# softcap, ALiBi or dropout, and no register is spilled.
PLAIN_DKDV_192_ON_RDNA = UpTo(192, BackwardShape(2, 16, BOTH, fenced=4, prefetch=0, passes=2, read_ahead=3), options=(*NO_OPTION, *NO_BIAS))

def caches_of_one_die(l2:int, shared:int, gbs:float) -> Caches:
  """Returns the caches of a chip made of one die: `l2` MB of L2, `shared` MB of Infinity Cache, memory of `gbs` GB/s."""
  # half of Infinity Cache is for the K and V of the workgroups that run at the same time, half for Q and O
  return Caches(1, l2 << 20, shared << 20, gbs, group=shared << 19)
