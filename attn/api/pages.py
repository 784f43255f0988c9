"""Keys and values in pages. A page is a block of rows. A block table says for each sequence which pages hold the rows of the sequence, in order."""
from __future__ import annotations
from dataclasses import replace
import numpy as np
from attn import values
from attn.calls.checked_kernel import dtype_of, numbers_at_hand
from attn.calls.options import AttentionOptions
from attn.calls.placement import AXES, Placement, local_shape
from attn.calls.plain import bhsd, from_bhsd, plain_attention
from attn.calls.views import in_buffer, whole_places
from attn.problem import LAYOUTS, Pages, Problem, Strided
from attn.tinygrad_compat import Tensor, UOp, buffer_under
from attn.values import static_shape

def check_pages(q:Tensor, k:Tensor, v:Tensor, options:AttentionOptions, lengths_name:str, names:tuple[str, str, str]=("q", "k", "v")) -> Pages:
  """Checks q, the pages k and v (pages, page_size, Hkv, D), and the block table; returns the size and number of pages."""
  # Error messages call q, k and v by `names`, and kv_lengths by `lengths_name`: the names that the caller's own arguments have.
  table = options.block_table
  assert table is not None
  of_q, of_k, of_v, of_table = (static_shape(name, values.tensor(name, t).shape) for name, t in zip((*names, "block_table"), (q, k, v, table)))
  for name, shape in zip(names[1:], (of_k, of_v)):
    if len(shape) != 4 or 0 in shape:
      raise ValueError(f"{name} has shape {shape}: with block_table it must be pages, (pages, page_size, Hkv, D), each at least 1")
  if of_v[:3] != of_k[:3]: raise ValueError(f"{names[2]} has shape {of_v}: its pages, page_size and heads must be those of {names[1]}, {of_k}")
  for name, t in zip((*names[1:], "block_table"), (k, v, table)):
    if t.device == q.device or (t is table and not isinstance(q.device, str)): continue
    raise ValueError(f"{name} is on {t.device} but {names[0]} on {q.device}: all tensors must be on the same device")
  dtype_of("block_table", table)
  if len(of_q) != len(AXES[options.layout]):
    raise ValueError(f"{names[0]} has shape {of_q}; layout={options.layout!r} needs {LAYOUTS[options.layout]}")
  starts = options.cu_seqlens_q
  if starts is not None and starts.ndim != 1: raise ValueError(f"cu_seqlens_q has shape {values.shown_shape(starts.shape)}: must be (sequences + 1,)")
  sequences = {"thd": None if starts is None else starts.shape[0] - 1, "nsd": None}.get(options.layout, of_q[0])
  if len(of_table) != 2 or 0 in of_table or sequences not in (None, of_table[0]):
    raise ValueError(f"block_table has shape {of_table}: must be ({'B' if sequences is None else sequences}, max_blocks)")
  if options.layout == "nsd" and of_q[0] % of_table[0]:
    raise ValueError(f"block_table has shape {of_table}: its {of_table[0]} sequences must divide the {of_q[0]} of {names[0]}, (B*H, S, D)")
  if options.kv_lengths is None:
    raise ValueError(f"{lengths_name}=None with block_table: must say how many rows each sequence has, at most max_blocks*page_size")
  for name, default in (("sequence_order", "contiguous"), ("sequence_lengths", None)):
    if (given := getattr(options, name)) != default:
      raise ValueError(f"{name}={values.shown(given)} with block_table: must be {default!r}; rows in pages are not sharded over devices, shard "
                       "along heads")
  if options.cu_seqlens_k is not None: raise ValueError(f"cu_seqlens_k with block_table: must be None, {lengths_name} says how long sequences are")
  pages = Pages(of_k[1], of_k[0], of_table[1])
  if pages.count == 1: check_only_page(table, options.kv_lengths, lengths_name, pages)
  return pages

def check_only_page(table:Tensor, rows:int|UOp|Tensor, lengths_name:str, pages:Pages) -> None:
  """Raises ValueError if a cache has a single page, page 0, and the block table names another page for rows that exist."""
  # A kernel for a single page does not read the block table, so only this check finds a wrong entry. The check runs only where the host can read the
  # table at no cost, as on the emulator.
  entries, counts = numbers_at_hand(table), numbers_at_hand(rows) if isinstance(rows, Tensor) else rows
  if entries is None or counts is None or isinstance(counts, UOp) or (np.ndim(counts) and np.shape(counts) != entries.shape[:1]): return
  used = np.arange(pages.most) < -(-np.reshape(counts, (-1, 1))//pages.size)
  if (wrong := entries[np.broadcast_to(used, entries.shape) & (entries != 0)]).size:
    raise ValueError(f"block_table has an entry {wrong[0]} for rows that {lengths_name} counts: there is one page, so it must be 0")

def placement_in_pages(q:Tensor, k:Tensor, v:Tensor, layout:str, names:tuple[str, str, str]=("q", "k", "v")) -> Placement:
  """Returns how q and the pages lie on devices: on one, or sharded along heads. Raises NotImplementedError for any other sharding."""
  if q.device is None: raise ValueError(f"{names[0]} is a constant without a device: call .contiguous() on a device first")
  if isinstance(q.device, str): return Placement(q.device)
  axes = (AXES[layout], AXES["bshd"], AXES["bshd"])
  found = [None if t.uop.axis is None else axis[t.uop.axis] for t, axis in zip((q, k, v), axes)]
  if found == [None]*3: return Placement(q.device)
  single = found == ["heads", None, None] and k.shape[2] == 1
  if layout != "nsd" and (single or found == ["heads"]*3): return Placement(q.device, "heads")
  said = ", ".join(f"{name}: axis {t.uop.axis}" for name, t in zip(names, (q, k, v)))
  raise NotImplementedError(f"{said} sharded, with block_table and layout={layout!r}: shard all three along their heads (axis 2 of pages), "
                            f"or {names[0]} along its heads with a single key/value head on every device, or none of them; layout='nsd' cannot be "
                            "sharded, because it joins the heads of all sequences")

def in_a_cache(t:Tensor, layout:str) -> tuple[Tensor, Strided]:
  """Returns keys or values as a buffer that kernels can read, and the start and strides of the rows in this buffer."""
  # `t` may also be scales, which have one number for each row and lack the last axis of `layout`.
  rows = t if t.ndim == len(AXES[layout]) else t.unsqueeze(-1)
  # A view of a larger buffer is read in place if each row is contiguous and the rows lie a constant stride apart. Any other view is copied.
  if isinstance(t.device, str) and (found := in_buffer(bhsd(rows, layout))) is not None: return t, found.places
  whole = whole_places(local_shape(rows), layout)
  return t if not isinstance(t.device, str) or buffer_under(t.uop) is None else t.contiguous(), whole

def plain_attention_of_pages(p:Problem, t:dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
  """Computes attention of keys and values in pages by tinygrad's own operations. Returns (o, lse, what rounding removed from lse)."""
  assert p.pages is not None
  if p.varlen:
    raise NotImplementedError("block_table with layout='thd': no kernel with matrix instructions supports this problem (attn.explain says why); "
                              "other kernels need another layout")
  batched = replace(p, layout="bhsd")
  # An entry of the block table that is not the index of a page stands for rows of zeros.
  def rows(x:Tensor) -> Tensor: return x[t["block_table"]].reshape(p.B, p.Sk, x.shape[2], x.shape[3]).transpose(1, 2)
  q = t["q"].reshape(p.B, -1, p.Sq, p.D) if p.layout == "nsd" else bhsd(t["q"], p.layout)
  given = {name: rows(x) if name in ("k", "v") else x for name, x in t.items() if name != "block_table"} | {"q": q}
  o, lse, rest = plain_attention(batched, given)
  if p.layout == "nsd": return o.reshape(-1, p.Sq, p.Dv), lse.reshape(-1, p.Sq), rest.reshape(-1, p.Sq)
  return from_bhsd(o, p.layout), lse, rest
