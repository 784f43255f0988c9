"""Decodes with a key/value cache under TinyJit. One compiled step serves every length. At every position the step computes the same token as a
computation without a cache."""
import os
os.environ.setdefault("DEV", "EMU::gfx942")
import numpy as np
from tinygrad import Device, Tensor, TinyJit, UOp, Variable, dtypes
import attn

VOCABULARY, WIDTH, H, HKV, D, CAPACITY = 97, 64, 4, 2, 16, 128
TOKENS = int(os.environ.get("TOKENS", "12"))
rng = np.random.default_rng(0)
def weight(rows:int, columns:int) -> Tensor: return Tensor((rng.standard_normal((rows, columns))*rows**-0.5).astype(np.float16)).realize()
embedding, to_q, to_k, to_v, to_out, head = (weight(*shape) for shape in (
  (VOCABULARY, WIDTH), (WIDTH, H*D), (WIDTH, HKV*D), (WIDTH, HKV*D), (H*D, WIDTH), (WIDTH, VOCABULARY)))
places = weight(CAPACITY, WIDTH)
k_cache, v_cache = attn.empty_kv_cache(1, HKV, CAPACITY, D, layout="bshd")

def project(x:Tensor) -> list[Tensor]: return [(x @ w).reshape(1, x.shape[1], -1, D) for w in (to_q, to_k, to_v)]   # (B, S, H, D)
def logits(x:Tensor, o:Tensor) -> Tensor: return ((x + o.reshape(1, -1, H*D) @ to_out)[:, -1] @ head).float()

def without_cache(tokens:list[int]) -> np.ndarray:
  """Returns the logits of the token that follows `tokens`, one for each word of the vocabulary. No cache is used."""
  x = Tensor(np.stack([embedding.numpy()[t] + places.numpy()[i] for i, t in enumerate(tokens)])[None])
  return logits(x, attn.attention(*project(x), causal=True, layout="bshd")).numpy()[0]

captures: list[UOp] = []
@TinyJit
def step(token:Tensor, position:UOp) -> Tensor:
  """Returns the logits of the token that follows `token`, one for each word of the vocabulary. `token` is (1, 1), the token at `position`. The cache
  has the keys and values of all earlier positions."""
  captures.append(position)
  x = embedding[token] + places[position:position + 1].reshape(1, 1, WIDTH)
  q, k, v = project(x)
  return logits(x, attn.attention_with_kv_cache(q, k, v, k_cache, v_cache, position, layout="bshd")).realize()

position = Variable("position", 0, CAPACITY - 1)
tokens = [1]
for i in range(TOKENS):
  got, want = step(Tensor([[tokens[i]]], dtype=dtypes.int).realize(), position.bind(i)).numpy()[0], without_cache(tokens)
  assert np.abs(got - want).max() < 0.02 and int(got.argmax()) == int(want.argmax()), f"position {i} differs"
  tokens.append(int(got.argmax()))
assert len(captures) == 2   # the first step runs without a graph, the second one is captured, later ones replay it
print(f"{TOKENS} tokens on {Device.DEFAULT}, the same with the cache as without, position by position, by one compiled step: {tokens}")
