"""A small GPT learns to repeat what it has read, 50 steps of Adam: once with tinygrad's own attention and once under `attn.installed()` with these
kernels, forward and backward, from the same weights on the same batches. The two loss curves have to agree within TOLERANCE at every step."""
import os, time
os.environ.setdefault("DEV", "EMU::gfx942")
import numpy as np
from tinygrad import Tensor, TinyJit
from tinygrad.helpers import Context
from tinygrad.nn.optim import Adam
import attn

VOCABULARY, WIDTH, HEADS, LAYERS, PERIOD, LENGTH, BATCH, STEPS = 16, 32, 2, 2, 8, 32, 4, 50
TOLERANCE = 0.05      # of the loss, in nats

class Layer:
  def __init__(self, rng:np.random.Generator):
    weight = lambda rows, columns: Tensor((rng.standard_normal((rows, columns))*rows**-0.5).astype(np.float32)).realize()
    self.qkv, self.out, self.up, self.down = weight(WIDTH, 3*WIDTH), weight(WIDTH, WIDTH), weight(WIDTH, 2*WIDTH), weight(2*WIDTH, WIDTH)
  def __call__(self, x:Tensor) -> Tensor:
    qkv = (x.layernorm() @ self.qkv).half().reshape(BATCH, LENGTH, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
    seen = qkv[0].scaled_dot_product_attention(qkv[1], qkv[2], is_causal=True)
    x = x + seen.transpose(1, 2).reshape(BATCH, LENGTH, WIDTH).float() @ self.out
    return x + (x.layernorm() @ self.up).relu() @ self.down

def batches() -> list[np.ndarray]:
  """Sequences that repeat their first PERIOD tokens, one hot."""
  rng = np.random.default_rng(1)
  return [np.eye(VOCABULARY, dtype=np.float32)[np.tile(rng.integers(0, VOCABULARY, (BATCH, PERIOD)), LENGTH//PERIOD)] for _ in range(STEPS)]

def train() -> list[float]:
  """The loss of each step."""
  rng = np.random.default_rng(0)
  layers = [Layer(rng) for _ in range(LAYERS)]
  token, place, head = (Tensor((rng.standard_normal(s)*s[0]**-0.5).astype(np.float32)).realize()
                        for s in ((VOCABULARY, WIDTH), (LENGTH, WIDTH), (WIDTH, VOCABULARY)))
  optimizer = Adam([token, place, head, *(w for layer in layers for w in vars(layer).values())], lr=1e-2, fused=True)
  @TinyJit
  def step(x:Tensor) -> Tensor:
    optimizer.zero_grad()
    h = x @ token + place
    for layer in layers: h = layer(h)
    guess = (h.layernorm() @ head).log_softmax(-1)
    loss = -(guess[:, PERIOD-1:-1]*x[:, PERIOD:]).sum(-1).mean()     # of the tokens that can be known
    loss.backward()
    return loss.realize(*optimizer.schedule_step())
  with Context(TRAINING=1): return [step(Tensor(x).realize()).item() for x in batches()]

start = time.perf_counter()
own = train()
middle = time.perf_counter()
with attn.installed() as decisions: ours = train()
end = time.perf_counter()
for i in range(0, STEPS, 7): print(f"step {i:2d}  tinygrad's attention {own[i]:.4f}  these kernels {ours[i]:.4f}")
apart = max(abs(a - b) for a, b in zip(own, ours))
print(f"{STEPS} steps in {middle - start:.0f} s and {end - middle:.0f} s, the loss curves at most {apart:.4f} apart, {TOLERANCE} allowed; "
      f"{decisions[-1].kernel}: {len(decisions)} calls")
assert {d.kernel for d in decisions} == {"forward"} and ours[-1] < 0.8*ours[0]
assert 0 < apart < TOLERANCE       # other kernels round differently
