"""Trains a small GPT to repeat what it has read, for 50 steps of Adam: once with tinygrad's own attention and once, under `attn.installed()`, with
the kernels of attn, forward and backward. Weights and batches are the same in both runs. At every step the losses of both runs may differ by at most
0.02 (TOLERANCE) times the loss of step 1. PLOT=curves.svg draws the losses (needs matplotlib).

Settings scale the model up. This command trains a model of the size of GPT-2:

DEV=CUDA LAYERS=12 WIDTH=768 HEADS=12 LENGTH=1024 BATCH=8 VOCABULARY=50304 LR=0.0003 python examples/train_gpt.py"""
import gc, os, time
os.environ.setdefault("DEV", "EMU::gfx942")
import numpy as np
from tinygrad import GlobalCounters, Tensor, TinyJit, dtypes
from tinygrad.helpers import Context, getenv
from tinygrad.nn.optim import Adam
import attn

VOCABULARY, WIDTH, HEADS, LAYERS = getenv("VOCABULARY", 16), getenv("WIDTH", 32), getenv("HEADS", 2), getenv("LAYERS", 2)
LENGTH, BATCH, STEPS, LR = getenv("LENGTH", 32), getenv("BATCH", 4), getenv("STEPS", 50), getenv("LR", 1e-2)
PERIOD, KINDS = LENGTH//4, 16    # tokens before a sequence repeats; different tokens
TOLERANCE = 0.02    # share of the first loss
FIRST = 3           # first steps, which are not timed because TinyJit captures in them

def times(x:Tensor, weight:Tensor) -> Tensor: return x.half().matmul(weight.half(), dtype=dtypes.float)

class Layer:
  def __init__(self, rng:np.random.Generator):
    weight = lambda rows, columns: Tensor((rng.standard_normal((rows, columns))*rows**-0.5).astype(np.float32)).realize()
    self.qkv, self.out, self.up, self.down = weight(WIDTH, 3*WIDTH), weight(WIDTH, WIDTH), weight(WIDTH, 2*WIDTH), weight(2*WIDTH, WIDTH)
  def __call__(self, x:Tensor) -> Tensor:
    qkv = times(x.layernorm(), self.qkv).half().reshape(BATCH, LENGTH, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
    seen = qkv[0].scaled_dot_product_attention(qkv[1], qkv[2], is_causal=True)
    x = x + times(seen.transpose(1, 2).reshape(BATCH, LENGTH, WIDTH), self.out)
    return x + times(times(x.layernorm(), self.up).relu(), self.down)

def batches() -> list[np.ndarray]:
  """Returns the batches of all steps. A sequence repeats its first PERIOD tokens, which are drawn from the first KINDS tokens of the vocabulary."""
  rng = np.random.default_rng(1)
  return [np.tile(rng.integers(0, KINDS, (BATCH, PERIOD)), LENGTH//PERIOD).astype(np.int32) for _ in range(STEPS)]

def train() -> tuple[list[float], float, int]:
  """Trains the model. Returns the loss of each step, the seconds per step, and the largest number of bytes in use on the device."""
  rng = np.random.default_rng(0)
  layers = [Layer(rng) for _ in range(LAYERS)]
  token, place, head = (Tensor((rng.standard_normal(s)*s[0]**-0.5).astype(np.float32)).realize()
                        for s in ((VOCABULARY, WIDTH), (LENGTH, WIDTH), (WIDTH, VOCABULARY)))
  optimizer = Adam([token, place, head, *(w for layer in layers for w in vars(layer).values())], lr=LR, fused=True)
  @TinyJit
  def step(x:Tensor) -> Tensor:
    optimizer.zero_grad()
    one_hot = x.one_hot(VOCABULARY)
    h = times(one_hot, token) + place
    for layer in layers: h = layer(h)
    guess = times(h.layernorm(), head).log_softmax(-1)
    loss = -(guess[:, PERIOD-1:-1]*one_hot[:, PERIOD:]).sum(-1).mean()     # loss on the tokens that are predictable
    loss.backward()
    return loss.realize(*optimizer.schedule_step())
  losses, ends, most = list[float](), list[float](), 0
  with Context(TRAINING=1):
    for x in batches():
      losses.append(step(Tensor(x).realize()).item())
      ends.append(time.perf_counter())
      most = max(most, GlobalCounters.mem_used)
  return losses, (ends[-1] - ends[FIRST - 1])/max(1, STEPS - FIRST), most

def plot(path:str, curves:dict[str, list[float]]) -> None:
  import matplotlib
  matplotlib.use("Agg")
  import matplotlib.pyplot as plt
  figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
  for (name, losses), style in zip(curves.items(), ("-", "--")): axes.plot(losses, style, label=name)
  axes.set(xlabel="step", ylabel="loss (nats)", title=f"{LAYERS} layers, {WIDTH} wide, {LENGTH} tokens, {BATCH} sequences, {os.environ['DEV']}")
  axes.legend()
  figure.savefig(path)

own, own_time, own_memory = train()
gc.collect()
with attn.installed() as decisions: ours, our_time, our_memory = train()
for i in range(0, STEPS, 7): print(f"step {i:2d}  tinygrad's attention {own[i]:.4f}  these kernels {ours[i]:.4f}")
for name, seconds, memory in (("tinygrad's attention", own_time, own_memory), ("these kernels", our_time, our_memory)):
  print(f"{name}: {seconds:.3f} s a step, {BATCH*LENGTH/seconds:.0f} tokens a second, {memory/2**20:.1f} MB at most")
apart = max(abs(a - b) for a, b in zip(own, ours))
print(f"{STEPS} steps, the loss curves at most {apart:.4f} apart, {TOLERANCE*own[0]:.4f} allowed; {decisions[-1].kernel}: {len(decisions)} calls")
if path := getenv("PLOT", ""): plot(path, {"tinygrad's attention": own, "these kernels": ours})
assert all((d.kernel or "").startswith("forward") for d in decisions) and ours[-1] < 0.9*ours[0]
assert 0 < apart < TOLERANCE*own[0]       # other kernels round differently
