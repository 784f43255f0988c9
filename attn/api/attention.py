"""`attention` takes Tensors and finds the kernel; `explain` says which, and why not the others."""
from __future__ import annotations
from typing import Any
from attn import values
from attn.api.checked_call import CheckedCall, prepare
from attn.parallel.context import first_launch
from attn.api.launch import check_devices, run, seeded
from attn.calls.options import AttentionOptions, options_of
from attn.choose.backward import BackwardChoice, choose_backward
from attn.choose.dispatch import Choice
from attn.compilers.choice import in_use
from attn.score.terms import check_differentiable
from attn.tinygrad_compat import DType, Tensor, UOp

def attention(q:Tensor, k:Tensor, v:Tensor|None, *, causal:bool|str=False, softmax_scale:float|None=None, layout:str="bhsd",
              window:tuple[int, int]=(-1, -1), softcap:float=0.0, v_dim:int|None=None, alibi_slopes:Tensor|None=None, bias:Tensor|None=None,
              sinks:Tensor|None=None, kv_lengths:int|UOp|Tensor|None=None, kv_starts:Tensor|None=None, block_table:Tensor|None=None,
              cu_seqlens_q:Tensor|None=None, cu_seqlens_k:Tensor|None=None, max_seqlen_q:int|None=None, max_seqlen_k:int|None=None,
              dropout_p:float=0.0, dropout_seed:Tensor|None=None, num_splits:int=0, batch_invariant:bool=False, return_lse:bool=False,
              sequence_order:str="contiguous", sequence_lengths:tuple[int, int]|None=None, out:Tensor|None=None, out_dtype:DType|str|None=None,
              arch:str|None=None) -> Any:
  """softmax(score) V of Tensors, by the kernel that `explain` tells: o in the layout of q, or (o, lse) with `return_lse`. Nothing runs until it is
  realized.

  q (B, H, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv): float16, bfloat16 or float32, views of tensors included (they are copied). H is a multiple
  of Hkv: query head h reads key/value head h // (H // Hkv). Score: softmax_scale * Q K^T, then softcap, ALiBi, bias and the masks, in this order.

  causal:        False; True or "bottom-right" (query i sees keys j <= i + Sk - Sq); "top-left" (query i sees keys j <= i, as PyTorch has it)
  softmax_scale: 1/sqrt(D) by default
  layout:        "bhsd"; "bshd" (B, S, H, D); "nsd" (B*H, S, D); "thd" (total, H, D), sequences one after another, with cu_seqlens_q and cu_seqlens_k,
                 int32 (sequences + 1), the row each begins at, and perhaps max_seqlen_q and max_seqlen_k, the longest
  window:        (left, right) keys seen on each side of the diagonal, itself included; -1 for no bound
  softcap:       scores become softcap*tanh(score/softcap); 0 for none
  v_dim:         V is k[..., :v_dim], and v None: multi-head latent attention (MLA, DeepSeek-V2, arXiv 2405.04434) as it decodes, with D=576 and
                 v_dim=512, and 16 to 128 query heads on one. K is read once, and no V is copied out of it. The default of softmax_scale stays
                 1/sqrt(D); DeepSeek's models take (128 + 64)**-0.5, of the head before its projections are absorbed, and with YaRN times
                 mscale**2, mscale = 0.1*mscale_all_dim*ln(factor) + 1 by their configuration's rope_scaling. The gradient is by tinygrad
  alibi_slopes:  (H) or (B, H): slope*|i + Sk - Sq - j| is subtracted
  bias:          added, broadcastable to (B, H, Sq, Sk); -inf masks
  sinks:         (H): scores of one more key per head, which has no value; lse counts it
  kv_lengths:    keys there are, the alignment of `causal` being to them: int32 Tensor (B), or an int or a Variable for all; what lies beyond, NaN
                 included, has no effect
  kv_starts:     int32 (B), beside kv_lengths: the keys before it do not exist either, and are not counted
  block_table:   int32 (B, max_blocks): k and v are pages, (pages, page_size, Hkv, D) and (pages, page_size, Hkv, Dv) whatever the layout, and the
                 rows of sequence b are in the pages block_table[b, 0], block_table[b, 1], ... kv_lengths says how many rows, at most
                 max_blocks*page_size. Entries beyond are not read. Any page_size; fastest is a multiple of the tile's keys, which `explain` tells
  dropout_p:     each element of P becomes 0 with this probability (0 <= dropout_p < 1, in steps of 2^-16) and the others P/(1 - dropout_p), in
                 training or not; lse is that without dropout. attn.dropout_mask tells which
  dropout_seed:  uint32 (2), whole on every device: what decides which. By default it is drawn from tinygrad's generator (Tensor.manual_seed), in each
                 call anew, of a TinyJit too
  num_splits:    key ranges computed apart: 0 as a heuristic finds, 1 never, more: so many
  batch_invariant: a row comes out the same, bit by bit, alone and in any batch of as many queries, whatever the lengths of the others and the pages
                 are: the tile and the key ranges don't go by what else there is. Costs speed: docs/serving.md
  sequence_order: how devices hold q, k and v that are sharded along their rows: "contiguous", or "zigzag" as attn.shard_sequence deals them out, the
                 same work for all under a causal mask. Everything else goes by the true places of rows: masks, ALiBi, and a bias, whose keys are
                 in order, and its rows too unless they are sharded as those of q
  sequence_lengths: (Sq, Sk) of the sequences that devices share, without the padding: rows of k beyond are never seen, and those of q give 0, and
                 -inf in lse
  return_lse:    also the natural-log sum of exponentials, float32 (B, H, Sq); (B*H, Sq) in layout "nsd", (H, total) in "thd"
  out:           where to put o, a whole buffer; it is also what is returned
  out_dtype:     that of out or of q by default
  arch:          such as "gfx942"; by default that of q's device

  A row that sees no key gives 0, and -inf in lse. Tensors sharded over devices: along batch or heads nothing is communicated; q, k and v along their
  rows: each device computes its own queries, and gathers k and v meanwhile, some heads after others; k and v alone along their rows, with q on every
  device: o and lse are exchanged once, and merged (docs/sharding.md).
  Raises ValueError or NotImplementedError, naming the argument, its value and what is supported, before anything runs.
  """
  options = {name: x for name, x in locals().items() if name not in ("q", "k", "v")}
  return attend(prepare(q, k, v, AttentionOptions(**options)))

def attend(c:CheckedCall) -> Any:
  """o, or (o, lse)."""
  check_devices(c)
  o, *lse = run(seeded(c))
  return (o, *lse) if lse else o

def choice_of(q:Tensor, k:Tensor, v:Tensor|None, **options:Any) -> Choice:
  """The kernel, tile and split that `attention` takes with these arguments, and why not the others; `arch` may be any chip."""
  return prepare(q, k, v, options_of("attention", options)).choice()

def backward_choice_of(q:Tensor, k:Tensor, v:Tensor|None, **options:Any) -> BackwardChoice:
  """What computes the gradients of `attention` with these arguments, and why not the backward kernels. Raises NotImplementedError, with its name,
  for a term that has no derivative."""
  call = prepare(q, k, v, options_of("attention", options))
  check_differentiable(call.problem)
  of = call.problem if call.shards is None else first_launch(call.problem, call.shards)
  return choose_backward(of, call.arch, call.choice().kernel)

def copied_pages(c:CheckedCall, given:dict[str, Tensor|None]) -> list[str]:
  """Names of k and v, of those that are pages, which a kernel cannot read where they lie."""
  return [name for name, t in given.items() if c.problem.pages is not None and t is not None and c.tensors[name] is not t]

def explain(q:Tensor, k:Tensor, v:Tensor|None, *, backward:bool=False, **options:Any) -> Choice|BackwardChoice:
  """Prints and returns `choice_of(...)`; on an AMD GPU also prints which compiler the kernel gets (docs/compilers.md). With `backward` it also
  prints what computes the gradients, `backward_choice_of(...)`, and returns that."""
  call, backward = prepare(q, k, v, options_of("attention", options)), values.truth("backward", backward)
  print(choice := call.choice())
  if call.shards is not None: print(f"  {call.shared_rows.told}")
  for name in copied_pages(call, {"k": k, "v": v}): print(f"  {name} is a view whose rows don't lie a constant stride apart: every call copies it")
  if p := options_of("attention", options).dropout_p: print(f"  dropout_p={p}: each element of P is kept with probability {1 - p:g}")
  device = q.device if isinstance(q.device, str) else (q.device or ("",))[0]
  if choice.arch is not None and device.split(":")[0] == "AMD": print(f"  compiler: {in_use(choice.arch.name)}")
  if not backward: return choice
  print(gradients := backward_choice_of(q, k, v, **options))
  return gradients
