"""Tests of `scaled_dot_product_attention` under tinygrad's models: one kernel reads a cache in place for every position, and only the models' causal
mask is recognized as causal."""
from __future__ import annotations
import math, warnings
from typing import Any
import numpy as np
import pytest
from tinygrad import TinyJit, UOp, Variable, function
import attn
from attn.accuracy import judge, law_of
from attn.calls.views import cache_of, is_causal_mask
from attn.tinygrad_compat import Context, GlobalCounters, Tensor, dtypes
from api_cases import emulated
from cases import EVERY_ARCH, array, tensor

H, HKV, D, CAPACITY = 4, 2, 32, 70

def causal_mask(T:Any, start:Any, buffer:bool=True) -> Tensor:
  return Tensor.full((1, 1, T, start + T), -math.inf, dtype=dtypes.half, buffer=buffer).triu(start + 1)

class Gpt2:
  """The cache of examples/gpt2.py and examples/llama.py in tinygrad: (2, B, S, H, D), with heads repeated as in llama.py."""
  def __init__(self, dtype:str, device:str) -> None:
    self.cache = Tensor.zeros(2, 1, CAPACITY, HKV, D, dtype=dtype, device=device).contiguous().realize()
  def __call__(self, q:Tensor, k:Tensor, v:Tensor, start:UOp) -> Tensor:
    T = k.shape[2]
    self.cache[:, :, start:start + T].assign(Tensor.stack(k.transpose(1, 2), v.transpose(1, 2))).realize()
    keys, values = (x.repeat((1, 1, 1, H//HKV)).reshape(1, start + T, H, D).transpose(1, 2)
                    for x in (self.cache[0][:, :start + T], self.cache[1, :, 0:start + T]))
    return q.scaled_dot_product_attention(keys, values, causal_mask(T, start) if T > 1 else None).realize()

class Llm:
  """The cache of tinygrad/llm/model.py: (2, B, H, S, D) in half, with queries in float32. A Variable gives the length of a prompt's chunks, which run
  in a precompiled function."""
  def __init__(self, dtype:str, device:str) -> None:
    self.cache = Tensor.zeros(2, 1, HKV, CAPACITY, D, dtype=dtypes.half, device=device).contiguous().realize()
  def attend(self, q:Tensor, k:Tensor, v:Tensor, start:UOp) -> Tensor:
    T = k.shape[2]
    store = self.cache[:, :, :, start:start + T].uop.store(Tensor.stack(k, v).cast(dtypes.half).uop)
    cache = Tensor(self.cache.uop.after(store))
    mask = None if isinstance(T, int) and T == 1 else causal_mask(T, start, buffer=False)
    return q.float().scaled_dot_product_attention(cache[0, :, :, 0:start + T], cache[1, :, :, 0:start + T], mask, enable_gqa=True).contiguous()
  def __call__(self, q:Tensor, k:Tensor, v:Tensor, start:UOp) -> Tensor:
    attend = self.attend if isinstance(k.shape[2], int) else function(self.attend, precompile=True, allow_implicit=True)
    return attend(q, k, v, start).realize()

@pytest.mark.parametrize("model, dtype, arch", [
  pytest.param(model, dtype, arch, marks=() if (i, dtype) == (n % len(EVERY_ARCH), "float16") else pytest.mark.thorough)
  for n, model in enumerate((Gpt2, Llm)) for dtype in ("float16", "bfloat16") for i, arch in enumerate(EVERY_ARCH)]
  + [pytest.param(model, "float16", "CUDA", marks=pytest.mark.gpu) for model in (Gpt2, Llm)])
def test_a_model_of_tinygrad(model:Any, dtype:str, arch:str) -> None:
  """A model processes a prompt in two chunks and then single tokens under TinyJit. attn's kernels compute every attention call, one capture serves
  all tokens, and no kernel copies the cache."""
  if model is Llm and dtype == "bfloat16": pytest.skip("this model's cache is always half")
  device = "CUDA" if arch == "CUDA" else "EMU"
  with Context(DEV="CUDA") if arch == "CUDA" else emulated(arch), attn.installed() as decisions:
    decisions.clear()
    q, k, v = (np.random.default_rng(i).standard_normal((1, h, 60, D)).astype(np.float32) for i, h in enumerate((H, HKV, HKV)))
    part = lambda x, i, j: tensor(x[:, :, i:j], dtype, device).realize()
    layer, start, toks = model(dtype, device), Variable("start_pos", 0, CAPACITY - 1), UOp.variable("toks", 1, 40)
    step, at = TinyJit(layer), 0
    for n in (37, 20, 1, 1, 1)[model is Gpt2:]:
      parts = [part(x, at, at + n) for x in (q, k, v)]
      if model is Llm and n > 1: parts = [part(x, 0, 60)[:, :, start.bind(at):start.bind(at) + toks.bind(n)] for x in (q, k, v)]
      GlobalCounters.reset()
      o = (layer if n > 1 else step)(*parts, start.bind(at))
      kernels = GlobalCounters.kernel_count
      rows = [array(part(x, 0, at + n)) for x in (q, k, v)]
      o = o if isinstance(o.shape[2], int) else o.pad_to((1, H, 40, D))[:, :, :n]
      args = D**-.5, (-1, 0), at
      law, _ = law_of(rows[0][:, :, at:], *rows[1:], *args, dtype=dtype, out_dtype=dtype)
      assert (verdict := judge(array(o), law)).ok, f"{n} rows from {at} on: {verdict}"
      at += n
    assert len(decisions) == (3 if model is Gpt2 else 4) and all(x.kernel is not None for x in decisions), list(decisions)
    assert arch == "CUDA" or kernels == (2 if model is Gpt2 else 4)     # append and attention; Llm adds rounding q and making the result contiguous

INF = -math.inf

def test_the_causal_mask_is_known_and_nothing_else() -> None:
  """attn recognizes the causal mask of tinygrad's models in every form. It does not recognize a similar mask that hides other keys, or that hides
  keys by a number other than -inf."""
  with emulated("gfx942"):
    n, other, T = Variable("n", 0, 15).bind(3), Variable("m", 0, 15).bind(3), UOp.variable("T", 1, 4).bind(2)
    def full(rows:Any, columns:Any, value:float=INF) -> Tensor: return Tensor.full((1, 1, rows, columns), value, dtype=dtypes.float)
    for mask, rows, keys in ((causal_mask(2, n), 2, n + 2), (causal_mask(2, n, False), 2, n + 2), (causal_mask(T, n), T, n + T),
                             (causal_mask(4, 0), 4, 4), (causal_mask(2, 5), 2, 7), (full(2, n + 2).triu(n + 1).cast(dtypes.half), 2, n + 2)):
      assert is_causal_mask(mask, rows, keys)
    changed = np.triu(np.full((2, 7), INF, np.float32), 6)
    changed[0, 1] = -1
    for mask, rows, keys in (
      (full(2, n + 2).triu(n), 2, n + 2), (full(2, n + 2).triu(n + 2), 2, n + 2), (full(2, n + 2, -1e9).triu(n + 1), 2, n + 2),
      (full(2, n + 2).triu(other + 1), 2, n + 2), (full(2, other + 2).triu(other + 1), 2, n + 2), (full(2, n + 2).triu(4), 2, n + 2),
      (full(2, n + 2).tril(n + 1), 2, n + 2), (full(2, 7).triu(5), 2, 7), (full(2, 7).triu(7), 2, 7), (full(2, 7, -1e9).triu(6), 2, 7),
      (full(2, 7).triu(6).realize(), 2, 7), (Tensor(changed).reshape(1, 1, 2, 7), 2, 7), (full(3, n + 2).triu(n + 1), 2, n + 2),
      (full(2, n + 2).triu(n + 1) + Tensor.zeros(1, 1, 2, 1), 2, n + 2), (full(2, n + 2).triu(n + 1)*2, 2, n + 2)):
      assert not is_causal_mask(mask, rows, keys), (rows, keys)

def test_where_rows_lie() -> None:
  """Kernels read a slice of a cache in place if its strides are constant. A tensor without constant strides does not count as part of a cache."""
  with emulated("gfx942"):
    base, n = Tensor.zeros(3, 2, 16, 2, 8, dtype="half", device="EMU").contiguous().realize(), Variable("n", 1, 15).bind(3)
    def places(x:Tensor, y:Tensor) -> Any:
      if (found := cache_of(x, y)) is None: return None
      return [(f.places.start, f.places.batch, f.places.head, f.places.row, f.group) for f in found]
    part = lambda i: base[i, :, :n + 1].transpose(1, 2)
    assert places(part(1), part(2)) == [(512, 256, 8, 16, 1), (1024, 256, 8, 16, 1)]
    assert places(part(0)[..., 2:6], part(0)[..., 2:6]) == [(2, 256, 8, 16, 1)]*2
    heads_first = base.permute(0, 3, 1, 2, 4)[0, :, :, :n + 1]     # (2, 2, n + 1, 8)
    repeated = heads_first.unsqueeze(2).expand(2, 2, 3, n + 1, 8).reshape(2, 6, n + 1, 8)
    assert places(repeated, repeated) == [(0, 8, 256, 16, 3)]*2
    assert places(heads_first.repeat((1, 3, 1, 1)), part(1)) is None       # heads 0 1 0 1 0 1: copies of a head are not neighbours
    for x in (part(0)*2, part(0)[..., ::-1], part(0).pad((None, None, None, (0, 4)))): assert places(x, part(1)) is None

def test_a_fallback_is_explained_once() -> None:
  with emulated("gfx942"), attn.installed() as decisions:
    q, k = (Tensor.zeros(1, 2, rows, 32, dtype=dtypes.half, device="EMU").contiguous().realize() for rows in (2, 16))
    start = Variable("n", 1, 14).bind(3)
    mask = Tensor.full((1, 1, 2, start + 2), INF, dtype=dtypes.half).triu(start)
    with warnings.catch_warnings(record=True) as said:
      warnings.simplefilter("always")
      for _ in range(2): q.scaled_dot_product_attention(k[:, :, :start + 2], k[:, :, :start + 2], mask)
    assert decisions[-1].kernel is None and "only the causal mask is known" in decisions[-1].reason
    assert [str(x.message) for x in said] == [f"scaled_dot_product_attention goes to tinygrad's own: {decisions[-1].reason}"]
    with pytest.raises(NotImplementedError, match=r"key has the symbolic shape \(1, 2, \(n\+2\), 32\) and key or value is no slice"):
      attn.scaled_dot_product_attention(q, k[:, :, :start + 2]*2, k[:, :, :start + 2])
