"""Tests of `scaled_dot_product_attention` under tinygrad's models: one kernel reads a cache in place at every position, and attn recognizes only the
models' causal mask as causal."""
from __future__ import annotations
import math, warnings
from typing import Any
import numpy as np
import pytest
from tinygrad import TinyJit, UOp, Variable, function
import attn
from attn.accuracy import judge, law_of
from attn.api.slices import lengths_seen
from attn.calls.views import cache_of, in_buffer, is_causal_mask, room_for_rows
from attn.reference import rounded
from attn.tinygrad_compat import Context, GlobalCounters, Tensor, dtypes
from api_cases import emulated
from cases import EVERY_ARCH, array, tensor

H, HKV, D, CAPACITY = 4, 2, 32, 70

def causal_mask(T:Any, start:Any, buffer:bool=True) -> Tensor:
  return Tensor.full((1, 1, T, start + T), -math.inf, dtype=dtypes.half, buffer=buffer).triu(start + 1)

class Gpt2:
  # A model step with the cache of tinygrad's examples/gpt2.py: one tensor (2, B, S, H, D) for K and V.
  def __init__(self, dtype:str, device:str) -> None:
    # The heads are repeated as in examples/llama.py.
    self.cache = Tensor.zeros(2, 1, CAPACITY, HKV, D, dtype=dtype, device=device).contiguous().realize()
  def __call__(self, q:Tensor, k:Tensor, v:Tensor, start:UOp) -> Tensor:
    T = k.shape[2]
    self.cache[:, :, start:start + T].assign(Tensor.stack(k.transpose(1, 2), v.transpose(1, 2))).realize()
    keys, values = (x.repeat((1, 1, 1, H//HKV)).reshape(1, start + T, H, D).transpose(1, 2)
                    for x in (self.cache[0][:, :start + T], self.cache[1, :, 0:start + T]))
    return q.scaled_dot_product_attention(keys, values, causal_mask(T, start) if T > 1 else None).realize()

class Llm:
  # A model step that uses its cache as tinygrad/llm/model.py does: one tensor (2, B, H, S, D) in half holds K and V.
  def __init__(self, dtype:str, device:str) -> None:
    # Queries are float32. The prompt comes in chunks; the length of a chunk is a Variable. The step on a chunk runs inside tinygrad's
    # `@function(precompile=True)`.
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
  pytest.param(model, dtype, arch, marks=() if (model, i, dtype) == (Llm, n, "float16") else pytest.mark.thorough)
  for n, model in enumerate((Gpt2, Llm)) for dtype in ("float16", "bfloat16") for i, arch in enumerate(EVERY_ARCH)]
  + [pytest.param(model, "float16", "CUDA", marks=pytest.mark.gpu) for model in (Gpt2, Llm)])
def test_a_model_of_tinygrad(model:Any, dtype:str, arch:str) -> None:
  # A model processes a prompt in two chunks, then single tokens under TinyJit. attn's kernels compute every attention call. TinyJit captures the step
  # once for all tokens, and no kernel copies the cache.
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
  # attn recognizes the causal mask of tinygrad's models however they build it. A similar mask that hides other keys, or that hides keys by a number
  # other than -inf, is not recognized as causal.
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
  # `cache_of` finds the offset and the strides of slices of a cache, so that kernels read the slices in place. It returns None for rows that are
  # computed, reversed or padded, and for repeated heads if the copies of a head are not neighbours.
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
    with pytest.raises(NotImplementedError, match=r"shapes \(1, 2, 2, 32\) and \(1, 2, .*n.*, 32\): a symbolic length must be a sum of bound"):
      attn.scaled_dot_product_attention(q, *[k[:, :, :start*2]]*2)

# ***** keys that are no slices, masks of one column, lengths that are ints *****

def judged(o:Tensor, *x:np.ndarray, dtype:str="float16", out_dtype:str="float16", window:tuple[int, int]=(-1, -1)) -> None:
  law, _ = law_of(*x, D**-.5, window, x[1].shape[2] - x[0].shape[2], dtype=dtype, out_dtype=out_dtype)
  assert (verdict := judge(array(o), law)).ok, verdict

def numbers(*shape:int, seed:int=0) -> np.ndarray: return np.random.default_rng(seed).standard_normal(shape).astype(np.float16).astype(np.float32)

MIXED = ("float16", "float32", "float32"), ("float32", "float16", "float16"), ("bfloat16", "bfloat16", "float32")

@pytest.mark.parametrize("types, symbolic", [pytest.param(types, symbolic, marks=() if symbolic is (i == 0) and i < 2 else pytest.mark.thorough)
                                             for i, types in enumerate(MIXED) for symbolic in (True, False)])
def test_float32_beside_16_bits(types:tuple[str, str, str], symbolic:bool) -> None:
  # If some of q, k and v are float32 and the others have a 16-bit dtype, attention rounds all to the 16-bit dtype and returns float32. Two different
  # 16-bit dtypes are refused.
  dtype = next(x for x in types if x != "float32")
  with emulated("gfx942"), attn.installed() as decisions:
    x = numbers(1, H, 3, D), numbers(1, H, 17, D, seed=1), numbers(1, H, 17, D, seed=2)
    q, k, v = (tensor(a, type_).realize() for a, type_ in zip(x, types))
    n = Variable("n", 1, 17).bind(11)
    if symbolic: k, v = k[:, :, :n], v[:, :, :n]
    o = q.scaled_dot_product_attention(k, v)
    assert decisions[-1].kernel is not None and o.dtype == dtypes.float
    seen = 11 if symbolic else 17
    rows = (rounded(array(tensor(a, type_)), dtype)[:, :, :seen] for a, type_ in zip(x, types))
    judged(o, *rows, dtype=dtype, out_dtype="float32")
    with pytest.raises(ValueError, match="have dtypes float16, bfloat16, float32: must be the same, or float32 and one 16-bit dtype"):
      attn.scaled_dot_product_attention(q.half(), k.bfloat16(), v.float())

def test_keys_computed_with_a_symbolic_length() -> None:
  # Keys that are no slice of one buffer, such as a slice of a cache joined (`cat`) with the newest row, are copied before a kernel reads them.
  # Elements of the cache beyond the slice have no effect.
  with emulated("gfx942"), attn.installed() as decisions:
    q, k, v = numbers(1, H, 1, D), numbers(1, H, 12, D, seed=1), numbers(1, H, 12, D, seed=2)
    start = Variable("n", 1, 14)
    cache = [tensor(np.pad(a[:, :, :-1], [(0, 0), (0, 0), (0, 4), (0, 0)], constant_values=np.nan), "float16").realize() for a in (k, v)]
    keys, values_ = (c[:, :, :start.bind(11)].cat(tensor(a[:, :, -1:], "float16"), dim=2) for c, a in zip(cache, (k, v)))
    o = tensor(q, "float16").scaled_dot_product_attention(keys, values_)
    assert decisions[-1].kernel is not None
    judged(o, q, k, v)

COLUMNS = [([[3.5]], [[1], [1]]), ([[INF]], [[0], [0]]), ([[math.nan]], [[math.nan]]*2), ([[0.0], [INF]], [[1], [0]]),
           ([[True], [False]], [[1], [0]]), ([[-2.0], [-INF]], [[1], [math.nan]])]

def test_a_mask_of_one_column() -> None:
  # A mask with a single column adds the same number to all scores of a row, so it does not change the weights. If this number is -inf, the output of
  # the row is 0.
  with emulated("gfx942"), attn.installed() as decisions:
    decisions.clear()
    q, k = tensor(numbers(1, H, 2, D), "float16").realize(), tensor(numbers(1, H, 12, D, seed=1), "float16").realize()
    keys = k[:, :, :Variable("n", 1, 12).bind(9)]
    plain = array(q.scaled_dot_product_attention(keys, keys))
    for mask, factor in COLUMNS:
      np.testing.assert_array_equal(array(q.scaled_dot_product_attention(keys, keys, Tensor(mask))), plain*np.array(factor), err_msg=str(mask))
    assert [x.kernel for x in decisions] == ["forward"]*7
    with pytest.raises(ValueError, match=r"attn_mask has shape \(3, 1\): must broadcast to \(1, 4, 2, 1\)"):
      attn.scaled_dot_product_attention(q, keys, keys, Tensor.zeros(3, 1))

@pytest.mark.parametrize("together", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_one_kernel_for_lengths_that_are_ints(together:bool) -> None:
  # attn copies the first slice of a cache that it sees. After that, one kernel reads slices of any length in place: another length costs no
  # compilation and no copy. K and V are slices of one tensor or of two.
  with emulated("gfx942"), attn.installed() as decisions:
    decisions.clear()
    lengths_seen.clear()
    q, k, v = numbers(1, H, 1, D), numbers(1, HKV, CAPACITY, D, seed=1), numbers(1, HKV, CAPACITY, D, seed=2)
    both = tensor(np.stack([k, v]), "float16").realize() if together else [tensor(x, "float16").realize() for x in (k, v)]
    query, kernels = tensor(q, "float16").realize(), []
    for n in (7, 9, 69):
      GlobalCounters.reset()
      o = query.scaled_dot_product_attention(both[0][:, :, :n], both[1][:, :, :n], enable_gqa=True).realize()
      kernels.append(GlobalCounters.kernel_count)
      judged(o, q, k[:, :, :n], v[:, :, :n])
    assert kernels[0] > 1 and kernels[1:] == [1]*2 and all(x.kernel is not None for x in decisions)
    assert [len(x) for x in lengths_seen.values()] == [3]
    with Context(TRAINING=1):        # in training the call also gets gradients
      keys = both[0][:, :, :12]
      (g,) = query.scaled_dot_product_attention(keys, keys, enable_gqa=True).float().sum().gradient(query)
      assert np.isfinite(array(g)).all()

@pytest.mark.parametrize("rows, arch", [pytest.param(n, arch, marks=pytest.mark.thorough if (n, arch) != (16385, "gfx942") else ())
                                        for n in (16383, 16384, 16385, 131072) for arch in ("gfx942", "gfx1100", "sm_80")])
def test_a_long_cache(rows:int, arch:str) -> None:
  # A query sees exactly the rows of a long cache that a Variable counts. The rows after them are NaN and must have no effect. The last of the counted
  # rows has the largest weight, so a kernel that misses it gives a wrong output.
  with emulated(arch), attn.installed() as decisions:
    decisions.clear()
    q, k, v = numbers(1, 2, 1, 16), *(numbers(1, 1, rows, 16, seed=seed) for seed in (1, 2))
    k[0, 0, -1] = 4*q[0, 0, 0]      # the newest row weighs most, so that a length one short shows
    cache = tensor(np.pad(np.stack([k, v]), [(0, 0)]*3 + [(0, 40), (0, 0)], constant_values=np.nan), "float16").realize()
    keys, values_ = (cache[i, :, :, :Variable("start_pos", 0, rows + 30).bind(rows - 1) + 1] for i in (0, 1))
    o = tensor(q, "float16").realize().scaled_dot_product_attention(keys, values_, enable_gqa=True)
    assert decisions[-1].kernel == "split_kv"
    law, _ = law_of(q, *(x.astype(np.float16).astype(np.float32) for x in (k, v)), 16**-.5, (-1, -1), rows - 1, dtype="float16", out_dtype="float16")
    assert (verdict := judge(array(o), law)).ok, verdict

@pytest.mark.thorough
@pytest.mark.parametrize("arch", ("gfx942", "gfx1100", "sm_80"))
@pytest.mark.parametrize("queries", [1, 5])
def test_a_latent_cache(queries:int, arch:str) -> None:
  # A model writes out latent attention (MLA) in tensor operations, as tinygrad.llm does. One kernel computes it and reads the cache in place. The
  # sizes are DeepSeek's: a row of the cache has 512 + 64 columns, and the first 512 are the values.
  D, Dv, n = 576, 512, 70
  with emulated(arch), attn.installed() as decisions:
    decisions.clear()
    q, k = numbers(1, 16, queries, D), numbers(1, 1, n, D, seed=1)
    cache = tensor(np.pad(k, [(0, 0), (0, 0), (0, 20), (0, 0)], constant_values=np.nan), "float16").realize()
    start = Variable("start_pos", 0, 80).bind(n - queries)
    keys = cache[:, :, :start + queries]
    scores = tensor(q, "float16").realize().float() @ keys.transpose(-1, -2)*(1/192**.5)
    if queries > 1: scores = scores + Tensor.full((1, 1, queries, start + queries), INF, buffer=False).triu(start + 1)
    o = scores.softmax(-1) @ keys[..., :Dv]
    assert [x.kernel in ("split_kv", "mla", "mla_mma") for x in decisions] == [True] and o.dtype == dtypes.float
    law, _ = law_of(q, k, k[..., :Dv], 192**-.5, (-1, 0), n - queries, dtype="float16", out_dtype="float32")
    assert (verdict := judge(array(o), law)).ok, verdict

def test_room_for_rows() -> None:
  # `room_for_rows` returns to how many rows the slice of a cache may grow: its rows end with the buffer, or before they would overwrite the next head
  # or batch.
  def room(t:Tensor) -> int:
    found = in_buffer(t)
    assert found is not None
    return room_for_rows(found.places, int(t.shape[0]), int(t.shape[1]), int(t.shape[3]))
  with emulated("gfx942"):
    base = Tensor.zeros(2, 3, 16, 4, 8, dtype="half", device="EMU").contiguous().realize()
    assert [room(base[i, :, 2:5].transpose(1, 2)) for i in (0, 1)] == [16, 14]
    assert room(base.permute(0, 3, 1, 2, 4)[:, 0, :, :5]) == 16 and room(base[1, :1, 2:5].transpose(1, 2)) == 46
    with pytest.raises(ValueError, match="a cache of one row"): room(base[0, :, :1].transpose(1, 2))
