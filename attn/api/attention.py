"""Public functions `attention`, which computes attention of Tensors with the fastest kernel for the chip, and `explain`, which says which kernel
`attention` chooses and why."""
from __future__ import annotations
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from attn import values
from attn.api.checked_call import CheckedCall, prepare
from attn.api.launch import check_devices, run, seeded
from attn.calls.options import AttentionOptions, options_of
from attn.calls.quantized import GivenRows, stored_rows
from attn.calls.tile_shares import shares_told
from attn.chips import Chip
from attn.choose.backward import BackwardChoice, choose_backward
from attn.choose.dispatch import TURNING, WIDENING, Choice
from attn.compilers.choice import in_use
from attn.kernels.parts.grid.tensors import of_backward
from attn.kernels.tiles.common import BlockTile
from attn.parallel.context import first_launch
from attn.problem import INPUT_SCALES, Problem
from attn.score.terms import check_differentiable
from attn.tinygrad_compat import DType, Tensor, UOp

@values.names_itself
def attention(q:Tensor, k:GivenRows, v:GivenRows|None, *, causal:bool|str=False, softmax_scale:float|None=None, layout:str="bhsd", window:tuple[int,
              int]=(-1, -1), softcap:float=0.0, v_dim:int|None=None, alibi_slopes:Tensor|None=None, bias:Tensor|None=None, score_mod:Callable[...,
              UOp]|None=None, mask_mod:Callable[..., UOp]|None=None, mod_tensors:Sequence[Tensor]=(), sinks:Tensor|None=None,
              kv_lengths:int|UOp|Tensor|None=None, kv_starts:Tensor|None=None, block_table:Tensor|None=None, cu_seqlens_q:Tensor|None=None,
              cu_seqlens_k:Tensor|None=None, max_seqlen_q:int|None=None, max_seqlen_k:int|None=None, dropout_p:float=0.0,
              dropout_seed:Tensor|None=None, q_scale:Tensor|None=None, k_scale:Tensor|None=None, v_scale:Tensor|None=None,
              fast_accumulate:bool=False, num_splits:int=0, batch_invariant:bool=False, deterministic:bool=True,
              return_lse:bool=False, sequence_order:str="contiguous", sequence_lengths:tuple[int, int]|None=None, out:Tensor|None=None,
              out_dtype:DType|str|None=None, arch:str|None=None) -> Any:
  """Computes softmax(score) V. Returns o in the layout of q, or (o, lse) with `return_lse`. Nothing runs before a result is realized.

    o = attn.attention(q, k, v, causal=True)
    o, lse = attn.attention(q, k, v, window=(127, 0), softcap=30.0, return_lse=True)
    attn.explain(q, k, v, causal=True)            # prints which kernel this call takes, and why not the other kernels

  The score is softmax_scale * Q K^T. Then softcap, ALiBi, bias and the masks act on the score, in this order.

  Tensors
    q                 (B, H, Sq, D), float16, bfloat16, float32 or 8-bit floats (see below). A view of a buffer is first copied to a new buffer.
    k                 (B, Hkv, Sk, D), in the dtype of q. H is a multiple of Hkv: query head h reads key/value head h // (H // Hkv).
    v                 (B, Hkv, Sk, Dv), in the dtype of q. None if `v_dim` is given. A cache k and v may also be QuantizedRows: numbers stored in 8
                      bits, with a scale for each row. With v_dim, k may be QuantizedLatent.
    v_dim             V is k[..., :v_dim]: multi-head latent attention, see MLA below.
    layout            "bhsd", "bshd" (B, S, H, D), "nsd" (B*H, S, D) or "thd" (total, H, D): packed sequences, one after another.
    out               Tensor to write o to, which the call returns as o: a buffer, or the contiguous() of a slice that has no gaps in the buffer.
    out_dtype         Dtype of o. Default: the dtype of `out`, or of q; bfloat16 for q of 8-bit floats.
    return_lse        Also return lse, the natural-log sum of exponentials: float32 (B, H, Sq), (B*H, Sq) in "nsd", (H, total) in "thd".

  Scores
    softmax_scale     Factor of Q K^T. Default: 1/sqrt(D).
    softcap           A score becomes softcap*tanh(score/softcap). 0: no cap.
    alibi_slopes      (H) or (B, H): slope*|i + Sk - Sq - j| is subtracted from the score of query i and key j.
    bias              Added to the scores, broadcastable to (B, H, Sq, Sk). -inf masks.
    score_mod         Your own function of a score, applied last. See Functions below.
    mod_tensors       Tensors that score_mod and mask_mod read.
    sinks             (H): score of one extra key per head that has no value. lse counts this key.

  Masks
    causal            False. True or "bottom-right": query i sees keys j <= i + Sk - Sq. "top-left": keys j <= i, as in PyTorch.
    window            (left, right): number of keys seen before and after the diagonal key, which is seen too. -1: no bound.
    mask_mod          Your own mask. See Functions below.

  Lengths
    kv_lengths        Number of keys that exist: an int or a Variable for all batches, or int32 (B). See Lengths below.
    kv_starts         int32 (B), only with kv_lengths: rows of k and v before row kv_starts[b] do not exist. Masks, ALiBi and your own functions
                      count keys from row kv_starts[b], which is key 0.
    block_table       int32 (B, max_blocks): k and v are pages, see Pages below.
    cu_seqlens_q      int32 (sequences + 1), for "thd": the row of q where each sequence begins, then the total.
    cu_seqlens_k      int32 (sequences + 1), for "thd": the row of k and v where each sequence begins, then the total.
    max_seqlen_q      Longest sequence of q, for "thd". Default: the total, which is right but slower.
    max_seqlen_k      Longest sequence of k, for "thd". Default: the total, which is right but slower.

  Dropout
    dropout_p         Probability that an element of P becomes 0, at least 0 and below 1. All other elements become P/(1 - dropout_p).
    dropout_seed      uint32 (2): decides which elements become 0. Default: a new seed for each call, from tinygrad's generator.

  8-bit floats
    q_scale           Factor of q, float32: one number, or (B, Hkv).
    k_scale           Factor of k, as q_scale.
    v_scale           Factor of v, as q_scale.
    fast_accumulate   Leave all sums to the matrix unit, which adds with 14 bits on sm_89 and sm_90. See 8-bit floats below.

  Execution
    num_splits        Number of key ranges computed in parallel and then merged. 0: chosen by a heuristic. 1: no split.
    batch_invariant   A row of o has the same bits alone and in any batch. Costs speed.
    deterministic     Gradients have the same bits in every run. False lets faster kernels add to dq in any order.
    sequence_order    Order of rows sharded over devices: "contiguous", or "zigzag" as attn.shard_sequence orders rows.
    sequence_lengths  (Sq, Sk) without padding, of rows sharded over devices.
    arch              Chip, for example "gfx942". Default: the chip of q's device.

  Functions: score_mod(score, b, h, i, j, *tensors) returns the score to use instead. mask_mod(b, h, i, j, *tensors) says whether the query at i sees
  the key at j. Both functions are called once, with scalar UOps, and become part of the kernels, backward too: `lambda b, h, i, j: i >= j` is
  causal=True. score is float32, after all other terms. b is the index of the batch, or of the packed sequence. h is the index of the query head. j is
  the row of the key in the key's sequence. i is the row of the query + Sk - Sq, so that i = j on the diagonal; with causal="top-left" i is the row of
  the query. The tensors are mod_tensors, which a function may index: table[h, i - j]. Write & | ~ and .where() in place of and, or, not and if.
  attn.mods has examples, docs/functions.md the rules.

  Masks: a query that sees no key gives 0, and -inf in lse.

  Lengths: rows of k and v beyond kv_lengths have no effect, NaN included. `causal` aligns the last query to the last key that exists.

  Pages: with block_table, k is (pages, page_size, Hkv, D) and v (pages, page_size, Hkv, Dv) in every layout. Sequence b has its rows in the pages
  block_table[b, 0], block_table[b, 1], ... kv_lengths says how many rows a sequence has, at most max_blocks*page_size. Entries of block_table beyond
  these rows are not read. Any page_size works. A multiple of the number of keys in a tile, which `explain` prints, is fastest.

  MLA: v=None with v_dim is latent attention as DeepSeek-V2 decodes (arXiv 2405.04434): D=576, v_dim=512, and 16 to 128 query heads on one key head. K
  is read once and V is not copied. softmax_scale stays 1/sqrt(D) by default. DeepSeek's models use (128 + 64)**-0.5, from the head dimension before
  the projections are absorbed. With YaRN these models multiply softmax_scale by mscale**2, where mscale = 0.1*mscale_all_dim*ln(factor) + 1 has the
  numbers of rope_scaling in the model's configuration. No kernel computes the gradient of MLA: tinygrad's automatic differentiation does.

  Dropout: dropout_p is rounded to a multiple of 2^-16. Dropout is active whether or not tinygrad's TRAINING is set. lse is computed without dropout.
  Every device holds the whole dropout_seed. attn.dropout_mask shows which elements dropout keeps. The default seed depends on Tensor.manual_seed.
  Under TinyJit, too, each call draws a new seed.

  8-bit floats: q, k and v of fp8e4m3, or of fp8e4m3fnuz on gfx942, stand for q*q_scale, k*k_scale and v*v_scale. The matrix unit multiplies the 8-bit
  numbers, and P is rounded to the dtype of q, too. A call with 8-bit floats has no gradient, no dropout and no cache. (A cache of 8-bit numbers is
  QuantizedRows: q then has 16 bits, and the kernel converts k and v to 16 bits.) The matrix units of sm_89 and sm_90 add products with about 14 bits,
  so kernels add a sum to a float32 sum after 128 products. With fast_accumulate kernels leave sums to the matrix unit, and a long row may lose the
  products of small weights (docs/attention.md).

  Batch invariance: a kernel divides the keys at the same places in every batch. So the bits of a row depend on the number of queries, but not on the
  lengths of other sequences or on the pages (docs/serving.md).

  Devices (docs/sharding.md): with tensors sharded along batch or heads, devices exchange nothing. With q, k and v sharded along rows, each device
  computes the queries that lie on this device, and gathers k and v from all devices, a few heads at a time. With only k and v sharded along rows, and
  q on every device, devices exchange o and lse once and merge these results. "zigzag" gives all devices equal work under a causal mask. Masks, ALiBi
  and bias use the true positions of rows. A bias has the keys in true order, and also the queries, unless the bias is sharded along queries as q is.
  Keys beyond sequence_lengths are never seen; queries beyond sequence_lengths give 0, and -inf in lse.

  Raises ValueError or NotImplementedError before anything runs. The error names the argument, its value and what is supported."""
  options = {name: x for name, x in locals().items() if name not in ("q", "k", "v")}
  return attend(prepare(q, k, v, AttentionOptions(**options)))

def attend(c:CheckedCall) -> Any:
  """Runs a checked call of `attention`: returns o, or (o, lse) if the call asks for lse."""
  check_devices(c)
  o, *lse = run(seeded(c))
  return (o, *lse) if lse else o

def choice_of(q:Tensor, k:GivenRows, v:GivenRows|None, **options:Any) -> Choice:
  """Returns which kernel a call of `attention` with these arguments would run, without running anything."""
  # With the option `arch` the machine need not have the chip.
  return prepare(q, k, v, options_of("attention", options)).choice()

def backward_choice_of(q:Tensor, k:GivenRows, v:GivenRows|None, **options:Any) -> BackwardChoice:
  """Returns what would compute the gradients of a call of `attention` with these arguments, without running anything."""
  # Raises NotImplementedError, naming the term, if a score term (such as a score_mod) has no derivative.
  call = prepare(q, k, v, options_of("attention", options))
  check_differentiable(call.problem)
  of = call.problem if call.shards is None else first_launch(call.problem, call.shards)
  return choose_backward(of, call.arch, call.choice().kernel)

def copied_caches(c:CheckedCall, given:dict[str, GivenRows|None]) -> list[str]:
  """Returns which of "k" and "v" no kernel can read in place, so that each run of the call `c` copies them."""
  # Only pages (blocks of cache rows) and rows of 8-bit numbers can be such. `given` has k and v as the caller gave them.
  if c.problem.pages is None and not c.problem.stored: return []
  tensors = {name: stored_rows(name, t) for name, t in given.items() if t is not None}
  return [name for name, t in tensors.items() if c.tensors[name] is not t]

def text_of_8_bits(p:Problem, arch:Chip|None) -> str:
  """Returns a text for `explain` about 8-bit q, k and v: their format, their scales, and how the matrix unit adds products."""
  scales = [name for name in INPUT_SCALES if getattr(p, name)]
  sums = "float32"
  if arch is not None and arch.short_sums:
    sums = "about 14 bits (fast_accumulate)" if p.fast_accumulate else "float32, after each 128 products of about 14 bits"
  return f"q, k and v: {p.dtype}, {', '.join(scales) or 'without scales'}; sums in {sums}"

def text_of_tiles(c:CheckedCall, kernel:str, p:Problem, tile:BlockTile|None, over:str="keys") -> str:
  """Returns a text for `explain`: the percentage of tiles that a kernel skips because of masks, and of tiles that it computes with a mask; "" without
  masks."""
  # `over` says what the kernel loops over: tiles of "keys", or of "queries" in backward. Nothing is said if several devices divide the rows of a
  # sequence.
  return shares_told(kernel, p, c.arch, tile, over, c.at.device, c.tensors) if c.shards is None else ""

@values.names_itself
def explain(q:Tensor, k:GivenRows, v:GivenRows|None, *, backward:bool=False, **options:Any) -> Choice|BackwardChoice:
  """Prints which kernel `attention` chooses for these arguments, and why `attention` doesn't choose the other kernels. Also prints the chosen
  kernel's tile description (the sizes by which the kernel divides the problem) and the number of key ranges (KV splits). Returns the choice. Runs no
  kernel.

    attn.explain(q, k, v, causal=True)                                # for the device of q
    attn.explain(q, k, v, causal=True, arch="gfx942", backward=True)  # for any chip, without a GPU; also what computes the gradients

  The options are those of `attention`. With `backward`, `explain` also prints what computes the gradients, and returns this choice instead of the
  choice of the forward kernel. For a call with a mask, `explain` also prints what percentage of the tiles of keys each kernel skips, and in what
  percentage each kernel computes the mask. On an AMD GPU `explain` also prints which compiler compiles the kernel (docs/compilers.md)."""
  call, backward = prepare(q, k, v, options_of("attention", options)), values.truth("backward", backward)
  print(choice := call.choice())
  if told := text_of_tiles(call, choice.kernel, replace(call.problem, num_splits=choice.work.splits), choice.work.tile): print(f"  {told}")
  if call.shards is not None: print(f"  {call.shared_rows.explanation}")
  if call.problem.of_8_bits: print(f"  {text_of_8_bits(call.problem, choice.arch)}" + "; V transposed by another kernel"*(choice.kernel == TURNING))
  if call.problem.stored:
    by = "another kernel, once for all blocks of queries" if choice.kernel == WIDENING else "the kernel"
    print(f"  k and v: {call.problem.stored}, with {call.problem.scale_dtype} scales, converted by {by}")
  for name in copied_caches(call, {"k": k, "v": v}): print(f"  {name} is a view whose rows don't lie a constant stride apart: every call copies it")
  if p := options_of("attention", options).dropout_p: print(f"  dropout_p={p}: each element of P is kept with probability {1 - p:g}")
  device = q.device if isinstance(q.device, str) else (q.device or ("",))[0]
  if choice.arch is not None and device.split(":")[0] == "AMD": print(f"  compiler: {in_use(choice.arch.name)}")
  if not backward: return choice
  print(gradients := backward_choice_of(q, k, v, **options))
  for kernel in (x for x in gradients.chosen if x.over):
    if told := text_of_tiles(call, kernel.name, of_backward(call.problem), kernel.tile, kernel.over): print(f"  {kernel.name}: {told}")
  return gradients
