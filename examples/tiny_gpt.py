"""Generates text with a tiny GPT in plain tinygrad, once with tinygrad's own attention and once, under `attn.installed()`, with the kernels of attn.
Both texts consist of the same tokens."""
import os
os.environ.setdefault("DEV", "EMU::gfx942")
import numpy as np
from tinygrad import Tensor
import attn

VOCABULARY, WIDTH, HEADS, LAYERS, PROMPT, TOKENS = 61, 64, 4, 2, 12, int(os.environ.get("TOKENS", "4"))

class Layer:
  def __init__(self, rng:np.random.Generator):
    weight = lambda rows, columns: Tensor((rng.standard_normal((rows, columns))*rows**-0.5).astype(np.float16)).realize()
    self.qkv, self.out, self.up, self.down = weight(WIDTH, 3*WIDTH), weight(WIDTH, WIDTH), weight(WIDTH, 4*WIDTH), weight(4*WIDTH, WIDTH)
  def __call__(self, x:Tensor) -> Tensor:
    n = x.shape[1]
    q, k, v = ((x.layernorm() @ self.qkv)[:, :, i*WIDTH:(i + 1)*WIDTH].reshape(1, n, HEADS, -1).transpose(1, 2) for i in range(3))
    x = x + q.scaled_dot_product_attention(k, v, is_causal=True).transpose(1, 2).reshape(1, n, WIDTH) @ self.out
    return x + (x.layernorm() @ self.up).gelu() @ self.down

rng = np.random.default_rng(7)
embedding, places, head = (rng.standard_normal((n, WIDTH)).astype(np.float16) for n in (VOCABULARY, PROMPT + TOKENS, VOCABULARY))
layers = [Layer(rng) for _ in range(LAYERS)]

def scores(tokens:list[int]) -> np.ndarray:
  x = Tensor((embedding[tokens] + places[:len(tokens)])[None])
  for layer in layers: x = layer(x)
  return (x[:, -1].layernorm() @ Tensor(head.T.copy()*np.float16(WIDTH**-0.5))).float().numpy()[0]

def generate() -> tuple[list[int], np.ndarray]:
  tokens, seen = list(range(PROMPT)), []
  for _ in range(TOKENS):
    seen.append(scores(tokens))
    tokens.append(int(seen[-1].argmax()))
  return tokens[PROMPT:], np.stack(seen)

own, own_scores = generate()
with attn.installed() as decisions: ours, our_scores = generate()
kernels = [d.kernel for d in decisions]
print(f"tinygrad's attention: {own}\nthese kernels:        {ours}   ({', '.join(sorted(set(map(str, kernels))))}: {len(kernels)} calls)")
assert ours == own and np.abs(our_scores - own_scores).max() < 0.1
assert len(kernels) == LAYERS*TOKENS and None not in kernels
assert np.abs(our_scores - own_scores).max() > 0   # other kernels round differently
