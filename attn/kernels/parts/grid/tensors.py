"""Names, shapes and dtypes of the tensors that kernels read and write, and checks that a kernel can address them."""
from __future__ import annotations
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar
from attn.kernels.parts.memory.rows import strides
from attn.kernels.parts.program.counts import ceildiv
from attn.kernels.parts.program.diagonals import Diagonals
from attn.kernels.tiles.common import QUERIES_OF_SUMS, TURNS_OF_SUMS, BlockTile, heads_of
from attn.ops.common import MAX_RECORDS
from attn.problem import BYTES, Problem, Shapes, Strided
from attn.score.sums import sum_over_scores
from attn.score.terms import check_derivatives, score_terms
from attn.values import cache_of_kernels

X = TypeVar("X")

MAX_D = 256      # elements of the longest row of O that fits in registers

def arguments(p:Problem) -> Shapes:
  """Returns {name: (shape, dtype)} of the tensors that the kernel `forward` takes, in order."""
  # With G = p.num_splits > 1 key ranges, the kernel writes the results of each range instead of o, lse and lse_rest. These are float32 tensors, and
  # their shapes do not depend on the layout: o_partial (G, B, H, Sq, Dv) and lse_partial (G, B, H, Sq). For "thd" total_q replaces B and Sq:
  # o_partial is (G, H, total_q, Dv). The kernel then takes no sinks.
  if p.num_splits == 1: return p.shapes
  rows = (p.num_splits, p.H, p.total_q) if p.varlen else (p.num_splits, p.B, p.H, p.Sq)
  return {"o_partial": ((*rows, p.Dv), "float32"), "lse_partial": (rows, "float32"),
          **({"lse_rest_partial": (rows, "float32")} if p.wide_scores else {}),
          **{name: x for name, x in p.shapes.items() if name not in ("o", "lse", "lse_rest", "sinks")}}

def extras_of_backward(p:Problem) -> Shapes:
  """Returns {name: (shape, dtype)} of the optional tensors that backward kernels take, such as bias and kv_lengths."""
  # sinks act only through the lse
  return {name: x for name, x in p.extras.items() if name != "sinks"}

def in_parts(tensor:tuple[tuple[int, ...], str], parts:int) -> tuple[tuple[int, ...], str]:
  """Returns (shape, dtype) of a gradient in memory: `tensor` itself, or `parts` fp32 partial sums if `parts` is above 0."""
  return ((parts, *tensor[0]), "float32") if parts else tensor

@cache_of_kernels
def split_into(p:Problem, number:int) -> Problem:
  """Returns `p` with its keys divided into `number` key ranges, which different workgroups compute."""
  return replace(p, num_splits=number)

@cache_of_kernels
def of_backward(p:Problem) -> Problem:
  """Returns `p` with the outputs lse and, with wide scores, lse_rest, which the forward kernel must write if a backward pass follows."""
  # lse_rest: the part of the lse that rounding to fp32 lost
  return replace(p, return_lse=True, lse_rest=p.wide_scores)

def log_sums(tensors:Mapping[str, X]) -> dict[str, X]:
  """Returns those of `tensors` that hold the logarithm of the sum of exp(score): lse and, if there is one, lse_rest."""
  return {name: x for name, x in tensors.items() if name in ("lse", "lse_rest")}

def dq_arguments(p:Problem, dlse:bool=False, parts:int=0) -> Shapes:
  """Returns {name: (shape, dtype)} of the tensors that `backward_dq` takes, in order."""
  # The kernel writes delta, and dq; with `parts` above 0 it writes `parts` partial sums of dq in fp32 instead of dq. It reads the others.
  x = of_backward(p).shapes
  return {"dq": in_parts(x["q"], parts), "delta": x["lse"], "q": x["q"], "k": x["k"], "v": x["v"], "o": x["o"], **log_sums(x), "do": x["o"],
          **extras_of_backward(p), **({"dlse": x["lse"]} if dlse else {})}

def dkdv_arguments(p:Problem, parts:int=0) -> Shapes:
  """Returns {name: (shape, dtype)} of the tensors that `backward_dkdv` takes, in order."""
  # The kernel writes dk and dv; with `parts` above 0 it writes `parts` partial sums of each in fp32 instead. It reads the others.
  x = of_backward(p).shapes
  return {"dk": in_parts(x["k"], parts), "dv": in_parts(x["v"], parts), "q": x["q"], "k": x["k"], "v": x["v"], **log_sums(x),
          "delta": x["lse"], "do": x["o"], **extras_of_backward(p)}

def few_arguments(p:Problem, dlse:bool=False, parts:int=0, key_parts:int=0) -> Shapes:
  """Returns {name: (shape, dtype)} of the tensors that `backward_few` takes, in order."""
  # The kernel writes dq, dk, dv and delta, and reads what `backward_dq` reads. With `parts` above 0 it writes `parts` partial sums of dq in fp32
  # instead of dq, and with `key_parts` equal to 1 a sum of dk and one of dv in fp32.
  dk, dv = (in_parts(p.shapes[name], key_parts) for name in ("k", "v"))
  return {"dq": in_parts(p.shapes["q"], parts), "dk": dk, "dv": dv, **dq_arguments(p, dlse, parts)}

def dq_sums(p:Problem) -> tuple[tuple[int, ...], str]:
  """Returns (shape, dtype) of the fp32 tensor to which every workgroup that owns keys adds its part of dQ."""
  # For each head, the accumulator consists of tiles of QUERIES_OF_SUMS queries. Each packed sequence begins at a tile of its own: tile
  # r//QUERIES_OF_SUMS + b for sequence number b, if its first row has the index r. The added b leaves room, because the last tile of each sequence
  # before it may not be full.
  heads, tiles = (p.H, p.total_q//QUERIES_OF_SUMS + p.B) if p.varlen else (p.B*p.H, ceildiv(p.Sq, QUERIES_OF_SUMS))
  return ((heads, tiles, QUERIES_OF_SUMS*p.D), "float32")

def dq_turns(p:Problem) -> Shapes:
  """Returns {"dq_turns": (shape, dtype)}, int32 counters, if workgroups add to dQ in a fixed order, otherwise {}."""
  # The counters of turns say how many blocks of keys have added to a tile of queries. The last counter counts the tickets: a workgroup's ticket, the
  # number of workgroups that have asked before, decides which block of keys it owns.
  return {"dq_turns": ((math.prod(dq_sums(p)[0][:2])*TURNS_OF_SUMS + 1,), "int32")} if p.deterministic else {}

def set_by_first(p:Problem) -> bool:
  """Returns whether the workgroup that adds to a tile of dQ first overwrites it, so that no kernel must set dQ to 0 before."""
  # the lists of tiles tell a workgroup whether it is the first
  return p.deterministic and p.tile_list is not None

def lengths_of(p:Problem) -> Shapes:
  return {name: x for name, x in p.extras.items() if name in ("kv_lengths", "cu_seqlens_q", "cu_seqlens_k")}

def delta_arguments(p:Problem, dlse:bool=False) -> Shapes:
  """Returns {name: (shape, dtype)} of the tensors that `backward_delta` takes, in order."""
  # The kernel writes delta. It sets the fp32 accumulator of dQ (the tensor dq_sums) to 0, unless `set_by_first(p)` is true, and the counters of turns
  # (dq_turns), if there are any. Later `backward_all` adds to the accumulator, and `backward_finish` makes dq from it.
  x = of_backward(p).shapes
  sums: Shapes = {} if set_by_first(p) else {"dq_sums": dq_sums(p)}
  return {**sums, **dq_turns(p), "delta": x["lse"], "o": x["o"], "do": x["o"], **lengths_of(p), **({"dlse": x["lse"]} if dlse else {})}

def all_arguments(p:Problem, parts:int=0) -> Shapes:
  """Returns {name: (shape, dtype)} of the tensors that `backward_all` takes, in order."""
  # the kernel adds to dq_sums, the fp32 accumulator of dQ
  return {"dq_sums": dq_sums(p), **dq_turns(p), **dkdv_arguments(p, parts)}

def finish_arguments(p:Problem) -> Shapes:
  """Returns {name: (shape, dtype)} of the tensors that `backward_finish` takes, in order."""
  # the kernel makes dq from the fp32 accumulator dq_sums
  return {"dq": p.shapes["q"], "dq_sums": dq_sums(p), **(dq_turns(p) if set_by_first(p) else {}), **lengths_of(p)}

def dbias_arguments(p:Problem, parts:int=0, tile:BlockTile|None=None) -> Shapes:
  """Returns {name: (shape, dtype)} of the tensors that `backward_dbias` takes, in order. `tile` decides the shape of sums over diagonals."""
  # The first tensor is the kernel's output: the sum of dS that `sum_over_scores(p)` describes, from which the gradient of a bias, or of a tensor that
  # score_mod reads, is made. If `parts` is above 0, the kernel writes `parts` partial sums. A sum over diagonals (scores with equal query number
  # minus key number) has a shape that depends on `tile`.
  x, found = of_backward(p).shapes, sum_over_scores(p)
  size = found.sizes if tile is None else size_of_sum(p, tile.block_m, tile.block_n)
  return {f"d{found.name}": in_parts((size, found.dtype), parts), "q": x["q"], "k": x["k"], "v": x["v"], **log_sums(x),
          "delta": x["lse"], "do": x["o"], **extras_of_backward(p)}

def size_of_sum(p:Problem, block_m:int, block_n:int) -> tuple[int, ...]:
  """Returns the shape of the sum of dS that a kernel with tiles of `block_m` queries by `block_n` keys writes for the gradient of a bias."""
  # The sum of dS that `sum_over_scores(p)` describes. A sum over diagonals adds dS of all scores with equal query number minus key number: the kernel
  # then adds up all tiles that lie on one diagonal, and writes one tile for each diagonal.
  found = sum_over_scores(p)
  if not found.diagonals: return found.sizes
  return (*found.sizes[:2], Diagonals(p.Sq, p.Sk, block_m, block_n).count*block_m, block_n)

def too_wide(p:Problem) -> str|None:
  """Returns an error message if D or Dv is too large for a kernel that holds a row of O in registers, otherwise None."""
  widths = (("D", p.D), ("Dv", p.Dv))
  return next((f"{name}={value}: this kernel supports at most {MAX_D}" for name, value in widths if value > MAX_D), None)

def check_range(p:Problem, tile:BlockTile, backward:bool=False) -> None:
  """Raises NotImplementedError if the rows that a workgroup reads of one tensor are more than one buffer descriptor can address."""
  # A descriptor has 64 bits for the address at which the range begins, but only 32 bits for an offset within it. In a backward kernel a workgroup
  # also reads dO, and may loop over queries.
  heads, most = heads_of(p, tile), max(tile.block_m, tile.block_n)
  queries, keys = min(p.Sq, most if backward else tile.block_m), min(p.Sk, most)
  if heads > 1: queries = p.Sq
  def of_keys(width:int, view:Strided|None) -> int: return strides(p.layout, p.Hkv, p.Sk, width)[2] if view is None else view.row
  def of_queries(width:int) -> int: return heads*queries*strides(p.layout, p.H, p.Sq, width)[2]
  reads = {"q": of_queries(p.D)*p.itemsize, "k": keys*of_keys(p.D, p.k_view)*p.key_itemsize}
  if not p.v_in_k: reads["v"] = keys*of_keys(p.Dv, p.v_view)*p.key_itemsize
  if backward: reads["do"] = of_queries(p.Dv)*p.out_itemsize
  for tensor in (tensor for term in score_terms(p) for tensor in term.tensors if "rows" in tensor.axes):
    shape, dtype = p.extras[tensor.name]
    rows = tensor.axes.index("rows")
    reads[tensor.name] = heads*(queries if shape[rows] > 1 or p.Sq == 1 else 1)*math.prod(shape[rows + 1:])*BYTES[dtype]
  for name, nbytes in reads.items():
    what = f"{keys} keys" if name in ("k", "v") else f"{queries} queries of {heads} heads"
    if nbytes > MAX_RECORDS: raise NotImplementedError(f"{name}: {what} span {nbytes} bytes: a kernel can address at most {MAX_RECORDS}")

def check_problem(p:Problem, tile:BlockTile) -> None:
  """Raises ValueError if the number of splits is not chosen yet, and NotImplementedError if a tensor is too large."""
  if p.num_splits == 0: raise ValueError("num_splits=0: a kernel needs a number of splits, at least 1; splits.resolve chooses one")
  check_range(p, tile)

def check_backward(p:Problem, tile:BlockTile) -> None:
  """Raises NotImplementedError if the backward kernels cannot compute the gradient of problem `p`."""
  if p.stored: raise NotImplementedError(f"stored={p.stored!r}: keys and values that are stored in 8 bits have no gradient")
  if p.v_in_k: raise NotImplementedError("v_dim: the backward kernels need v as a tensor of its own")
  if p.num_splits != 1: raise NotImplementedError(f"num_splits={p.num_splits}: the backward kernels support only num_splits=1")
  for name in ("k_view", "kv_starts"):
    if getattr(p, name): raise NotImplementedError(f"{name}: the backward kernels cannot read keys from a part of a cache")
  if p.sk_variable is not None:
    raise NotImplementedError(f"sk_variable={p.sk_variable}: the backward kernels take no Variable as the number of keys; give a tensor")
  check_derivatives(p)
  check_range(p, tile, backward=True)
