"""Keys and values in pages: blocks of rows of which a table says, for each sequence, which ones it has and in what order."""
from __future__ import annotations
from attn import values
from attn.api.checked_kernel import dtype_of, static_shape
from attn.api.options import AttentionOptions
from attn.api.placement import AXES
from attn.api.plain import BATCHED, bhsd, from_bhsd
from attn.api.views import in_buffer, whole_places
from attn.problem import LAYOUTS, Pages, Problem, Strided
from attn.tinygrad_compat import Tensor

def check_pages(q:Tensor, k:Tensor, v:Tensor, options:AttentionOptions, lengths_name:str, names:tuple[str, str, str]=("q", "k", "v")) -> Pages:
  """The pages that k and v are, (pages, page_size, Hkv, D), and which of them the sequences of q have. `names` are what its caller calls q, k and
  v."""
  table = options.block_table
  assert table is not None
  of_q, of_k, of_v, of_table = (static_shape(name, values.tensor(name, t).shape) for name, t in zip((*names, "block_table"), (q, k, v, table)))
  for name, shape in zip(names[1:], (of_k, of_v)):
    if len(shape) != 4 or 0 in shape:
      raise ValueError(f"{name} has shape {shape}: with block_table it must be pages, (pages, page_size, Hkv, D), each at least 1")
  if of_v[:3] != of_k[:3]: raise ValueError(f"{names[2]} has shape {of_v}: its pages, their size and heads must be those of {names[1]}, {of_k}")
  if not isinstance(q.device, str):
    raise NotImplementedError(f"{names[0]} is on {q.device} with block_table: tensors on a single device are supported")
  for name, t in zip((*names[1:], "block_table"), (k, v, table)):
    if t.device != q.device: raise ValueError(f"{name} is on {t.device} but {names[0]} on {q.device}: all tensors must be on the same device")
  dtype_of("block_table", table)
  if len(of_q) != len(AXES[options.layout]):
    raise ValueError(f"{names[0]} has shape {of_q}; layout={options.layout!r} needs {LAYOUTS[options.layout]}")
  starts = options.cu_seqlens_q
  if starts is not None and starts.ndim != 1: raise ValueError(f"cu_seqlens_q has shape {values.shown_shape(starts.shape)}: must be (sequences + 1,)")
  sequences = {"thd": None if starts is None else starts.shape[0] - 1, "nsd": None}.get(options.layout, of_q[0])
  if len(of_table) != 2 or 0 in of_table or sequences not in (None, of_table[0]):
    raise ValueError(f"block_table has shape {of_table}: must be ({'B' if sequences is None else sequences}, max_blocks)")
  if options.layout == "nsd" and of_q[0] % of_table[0]:
    raise ValueError(f"block_table has shape {of_table}: its {of_table[0]} sequences do not divide the {of_q[0]} of {names[0]}, (B*H, S, D)")
  if options.kv_lengths is None:
    raise ValueError(f"{lengths_name}=None with block_table: must say how many rows each sequence has, at most max_blocks*page_size")
  if options.cu_seqlens_k is not None: raise ValueError(f"cu_seqlens_k with block_table: {lengths_name} says how long sequences are")
  return Pages(of_k[1], of_k[0], of_table[1])

def places_in_pages(t:Tensor) -> Strided:
  """Where the rows of pages lie, in the buffer that they are a view of or in one of their own."""
  found = in_buffer(bhsd(t, "bshd"))
  return whole_places(tuple(map(int, t.shape)), "bshd") if found is None else found.places

def out_of_pages(p:Problem, t:dict[str, Tensor]) -> dict[str, Tensor]:
  """The tensors of a problem with keys in pages, with k and v in the problem's layout. An entry of the table that is no page gives rows of 0."""
  assert p.pages is not None
  if p.layout not in BATCHED:
    raise NotImplementedError(f"block_table with layout={p.layout!r} where no matrix kernel takes the problem: must be 'bhsd' or 'bshd'")
  def rows(x:Tensor, width:int) -> Tensor:
    return from_bhsd(x[t["block_table"]].reshape(p.B, p.Sk, p.Hkv, width).transpose(1, 2), p.layout)
  return {name: x for name, x in t.items() if name != "block_table"} | {name: rows(t[name], width) for name, width in (("k", p.D), ("v", p.Dv))
                                                                        if name in t}
