"""Tests of the attention in tinygrad's examples/mlperf/models/flat_llama.py and gpt_oss.py. Small trainers call attention inside a
`@function(precompile=True)` for each layer, as these models do: once with attn, and once with tinygrad's own operations."""
from __future__ import annotations
import itertools, math
from collections.abc import Callable
import numpy as np
import pytest
from tinygrad import TinyJit, function
from tinygrad.nn.optim import SGD
import attn
from attn.api.thunder import fused_qkv_rope, thunder_attention as flash_attention
from attn.tinygrad_compat import Context, Tensor
from api_cases import computed_on, whole
from cases import array, tensor

pytestmark = pytest.mark.usefixtures("not_unrolled")

DIM, HEADS, KV_HEADS, D, LAYERS, VOCAB, B, S, WINDOW, STEPS = 32, 4, 2, 16, 2, 32, 2, 24, 8, 20

def rotated(x:Tensor, freqs:Tensor) -> Tensor:
  # Computes the rotary embedding as tinygrad's extra/models/llama.py does, with pairs of neighbouring elements.
  a, b = x.reshape(*x.shape[:-1], D//2, 2).split(1, -1)
  cosine, sine = freqs[..., :1], freqs[..., 1:]
  return (a*cosine - b*sine).cat(a*sine + b*cosine, dim=-1).flatten(3)

def parts(xqkv:Tensor, freqs:Tensor) -> tuple[Tensor, Tensor, Tensor]:
  x = xqkv.reshape(*xqkv.shape[:2], KV_HEADS, HEADS//KV_HEADS + 2, D)
  xq = x[:, :, :, :HEADS//KV_HEADS].reshape(*xqkv.shape[:2], HEADS, D)
  xq, xk = rotated(xq, freqs), rotated(x[:, :, :, -2], freqs)
  return xq.cast(xqkv.dtype), xk.cast(xqkv.dtype), x[:, :, :, -1]

Attend = Callable[..., tuple[Tensor, list[Tensor]]]

def llama_by_sdpa(xqkv:Tensor, freqs:Tensor, sinks:Tensor, sliding:bool) -> tuple[Tensor, list[Tensor]]:
  xq, xk, xv = (x.transpose(1, 2) for x in parts(xqkv, freqs))
  return xq.scaled_dot_product_attention(xk, xv, is_causal=True, enable_gqa=True).transpose(1, 2), []

def llama_by_thunder(xqkv:Tensor, freqs:Tensor, sinks:Tensor, sliding:bool) -> tuple[Tensor, list[Tensor]]:
  attn, *save = flash_attention(*fused_qkv_rope(xqkv, freqs, HEADS, KV_HEADS, D), is_causal=True, write_flat=True)
  return attn, save

def gpt_oss_by_thunder(xqkv:Tensor, freqs:Tensor, sinks:Tensor, sliding:bool) -> tuple[Tensor, list[Tensor]]:
  xq, xk, xv = parts(xqkv, freqs)
  attn, _, l_vec = flash_attention(xq, xk, xv, is_causal=True, write_flat=True, sinks=sinks, window=WINDOW if sliding else 0)
  attn = attn.reshape(*xqkv.shape[:2], HEADS*D)
  return attn, [attn, xq, xk, xv, l_vec]

def weights_of(scores:Tensor, sink:Tensor) -> Tensor:
  m = scores.max(-1, keepdim=True).maximum(sink)
  e = (scores - m).exp()
  return e/(e.sum(-1, keepdim=True) + (sink - m).exp())

def in_bands(xq:Tensor, xk:Tensor, xv:Tensor, sinks:Tensor) -> Tensor:
  # Computes attention with a sliding window in tensor operations, band by band.
  # A band has WINDOW queries, which see keys of their own band and of the band before.
  length, group, bands = xq.shape[1], HEADS//KV_HEADS, xq.shape[1]//WINDOW
  q = xq.reshape(-1, length, KV_HEADS, group, D).permute(0, 2, 3, 1, 4).reshape(-1, KV_HEADS, group, bands, WINDOW, D).float()
  k, v = (x.permute(0, 2, 1, 3).reshape(-1, KV_HEADS, 1, bands, WINDOW, D).float() for x in (xk, xv))
  k, v = (x.pad((None, None, None, (1, 0), None, None))[:, :, :, :bands].cat(x, dim=-2) for x in (k, v))
  i, j = Tensor.arange(WINDOW).reshape(WINDOW, 1), Tensor.arange(2*WINDOW).reshape(1, 2*WINDOW)
  seen = (j > i) & (j <= i + WINDOW) & ((Tensor.arange(bands).reshape(bands, 1, 1) >= 1) | (j >= WINDOW))
  scores = seen.where((q @ k.transpose(-1, -2))/math.sqrt(D), -math.inf)
  w = weights_of(scores, sinks.reshape(1, KV_HEADS, group, 1, 1, 1).float()).cast(xv.dtype)
  return (w @ v.cast(xv.dtype)).reshape(-1, KV_HEADS, group, length, D).permute(0, 3, 1, 2, 4)

def gpt_oss_by_tinygrad(xqkv:Tensor, freqs:Tensor, sinks:Tensor, sliding:bool) -> tuple[Tensor, list[Tensor]]:
  xq, xk, xv = parts(xqkv, freqs)
  if sliding: return in_bands(xq, xk, xv, sinks), []
  length = xq.shape[1]
  q = xq.reshape(-1, length, KV_HEADS, HEADS//KV_HEADS, D).permute(0, 2, 3, 1, 4)
  k, v = (x.permute(0, 2, 1, 3).unsqueeze(2) for x in (xk, xv))
  i, j = Tensor.arange(length).reshape(length, 1), Tensor.arange(length).reshape(1, length)
  mask = (j <= i).where(0.0, -1e30).cast("float32").contiguous()
  scores = (q @ k.transpose(-2, -1)).float()/math.sqrt(D) + mask
  w = weights_of(scores, sinks.reshape(1, KV_HEADS, HEADS//KV_HEADS, 1, 1).float()).cast(v.dtype)
  return (w @ v).permute(0, 3, 1, 2, 4), []

class Trainer:
  # A small language model that tests train, whose layers are `@function(precompile=True)` and use `attend` for attention.
  def __init__(self, attend:Attend, dtype:str, devices:tuple[str, ...], shared:str) -> None:
    self.attend, self.devices, self.shared = attend, devices, shared
    rng = np.random.default_rng(0)
    def weight(*shape:int, axis:int|None=None) -> Tensor:
      drawn = tensor(rng.standard_normal(shape).astype(np.float32)/math.sqrt(shape[-1]), dtype, devices[0])
      return self.placed(drawn, axis if shared == "heads" else None)
    self.wqkv = [weight((HEADS + 2*KV_HEADS)*D, DIM, axis=0) for _ in range(LAYERS)]
    self.wo = [weight(DIM, HEADS*D, axis=1) for _ in range(LAYERS)]
    self.w = [weight(DIM, DIM) for _ in range(LAYERS)]
    self.sinks = [weight(HEADS, axis=0) for _ in range(LAYERS)]
    self.embedding, self.output = weight(VOCAB, DIM), weight(VOCAB, DIM)
    angles = np.outer(np.arange(2*S), 10000.0**(-np.arange(0, D, 2)/D)).reshape(1, 2*S, 1, D//2, 1)
    self.freqs = self.placed(tensor(np.concatenate([np.cos(angles), np.sin(angles)], -1).astype(np.float32), dtype, devices[0]), None)
    self.weights = [*self.wqkv, *self.wo, *self.w, *(self.sinks if "gpt" in attend.__name__ else []), self.embedding, self.output]
  def placed(self, t:Tensor, axis:int|None) -> Tensor:
    return (t if len(self.devices) == 1 else t.shard(self.devices, axis)).realize()
  @function(precompile=True, precompile_backward=True)
  def layer(self, x:Tensor, freqs:Tensor, sliding:bool, wqkv:Tensor, wo:Tensor, w:Tensor, sinks:Tensor) -> tuple[Tensor, ...]:
    xqkv = (x.layernorm() @ wqkv.T).cast(x.dtype)
    attended, save = self.attend(xqkv, freqs, sinks, sliding)
    h = x + attended.reshape(*x.shape[:2], HEADS*D) @ wo.T
    return (h + (h.layernorm() @ w.T).silu(), xqkv, *save)
  def loss(self, tokens:Tensor) -> Tensor:
    h = self.embedding[tokens[:, :-1]]
    for i in range(LAYERS):
      h, *_ = self.layer(h, self.freqs[:, :S], i % 2 == 0, self.wqkv[i], self.wo[i], self.w[i], self.sinks[i])
    return (h @ self.output.T).float().sparse_categorical_crossentropy(tokens[:, 1:])
  def losses(self, steps:int) -> list[float]:
    tokens = np.random.default_rng(1).integers(0, VOCAB, (B, S + 1)).astype(np.int32)
    placed = self.placed(Tensor(tokens, device=self.devices[0]), 0 if self.shared == "batch" else None)
    optimizer = SGD(self.weights, lr=0.02)
    @TinyJit
    def step(tokens:Tensor) -> Tensor:
      optimizer.zero_grad()
      loss = self.loss(tokens)
      loss.backward()
      return loss.realize(*optimizer.schedule_step())
    with Context(TRAINING=1): return [float(whole(step(placed)).item()) for _ in range(steps)]

NOISE = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-19}     # difference of losses: one unit in the last place of a number near 1
PROGRAMS = {"flat_llama.py": (llama_by_sdpa, llama_by_sdpa), "flat_llama.py, thunder": (llama_by_thunder, llama_by_sdpa),
            "gpt_oss.py": (gpt_oss_by_tinygrad, gpt_oss_by_tinygrad), "gpt_oss.py, thunder": (gpt_oss_by_thunder, gpt_oss_by_tinygrad)}
CASES = [("flat_llama.py", "float16", "EMU::gfx942", ""), ("flat_llama.py", "bfloat16", "EMU::sm_80", "heads"),
         ("flat_llama.py", "float32", "CPU", ""), ("flat_llama.py", "float16", "EMU::gfx1100", "batch"),
         ("flat_llama.py, thunder", "bfloat16", "EMU::gfx1100", ""), ("flat_llama.py, thunder", "float16", "EMU::gfx942", "heads"),
         ("gpt_oss.py", "float16", "EMU::gfx942", ""), ("gpt_oss.py", "bfloat16", "EMU::sm_80", "batch"),
         ("gpt_oss.py", "float16", "EMU::gfx1100", "heads"), ("gpt_oss.py", "float32", "CPU", ""),
         ("gpt_oss.py, thunder", "float16", "EMU::sm_80", ""), ("gpt_oss.py, thunder", "bfloat16", "EMU::gfx942", "batch"),
         ("gpt_oss.py, thunder", "float16", "EMU::gfx942", "heads"), ("gpt_oss.py, thunder", "float32", "CPU", "")]

@pytest.mark.thorough
@pytest.mark.parametrize("program, dtype, on, shared", CASES)
def test_losses(program:str, dtype:str, on:str, shared:str) -> None:
  # A small trainer has the same losses in 20 training steps with attn as with tinygrad's own attention, up to rounding, also if the batch or the
  # heads are sharded over two devices.
  ours, own = PROGRAMS[program]
  kind = on.split(":")[0]
  devices = (kind, f"{kind}:1") if shared else (kind,)
  with computed_on(on):
    right = Trainer(own, dtype, devices, shared).losses(STEPS)
    with attn.installed() as decisions:
      decisions.clear()
      found = Trainer(ours, dtype, devices, shared).losses(STEPS)
  assert all(d.kernel for d in decisions) and bool(decisions) == (ours is own)
  assert right[-1] < 0.8*right[0]
  np.testing.assert_allclose(found, right, rtol=0, atol=NOISE[dtype])

def names_of(t:Tensor) -> list[str]:
  # Returns the names of the kernels that would compute a tensor, which can no longer be computed afterwards.
  return [getattr(call.src[0].arg, "name", "") for call in t.schedule_linear().src]

def scheduled(attend:Attend, sliding:bool) -> list[tuple[str, list[int]]]:
  # Returns the kernels of a layer's forward and backward pass with `attend`: names, and numbers of elements of their buffers.
  trainer = Trainer(attend, "float16", ("EMU",), "")
  x = tensor(np.random.default_rng(3).standard_normal((B, S, DIM)).astype(np.float32), "float16").realize()
  outputs = trainer.layer(x, trainer.freqs[:, :S], sliding, trainer.wqkv[0], trainer.wo[0], trainer.w[0], trainer.sinks[0])
  wanted = [*outputs, *outputs[0].float().sum().gradient(trainer.wqkv[0])]
  return [(getattr(call.src[0].arg, "name", ""), [u.max_numel() for u in call.src[1:]]) for call in wanted[0].schedule_linear(*wanted[1:]).src]

@pytest.mark.parametrize("program", [pytest.param(name, marks=() if "oss" in name else pytest.mark.thorough) for name in PROGRAMS])
def test_no_copies_of_the_inputs(program:str) -> None:
  # One kernel writes each of q, k and v in a layer of the small trainers, and no kernel copies them. The backward pass runs the forward kernel again
  # only if the layer has not kept o and lse.
  q, k = B*S*HEADS*D, B*S*KV_HEADS*D
  with computed_on("EMU::gfx942"), attn.installed(), Context(TRAINING=1):
    kernels = scheduled(PROGRAMS[program][0], sliding=program != "gpt_oss.py")     # gpt_oss.py itself copies keys and values into bands
  names = [name.rsplit("_gfx942", 1)[0] for name, _ in kernels if name.startswith("attn_")]
  kept = "thunder" in program
  assert names == ["attn_forward"]*(1 if kept else 2) + ["attn_backward_dq", "attn_backward_dkdv"]
  xqkv = B*S*(HEADS + 2*KV_HEADS)*D
  written = [sizes[0] for name, sizes in kernels if not name.startswith("attn_") and xqkv in sizes[1:] and sizes[0] in (q, k)]
  recomputed = 1 if program == "gpt_oss.py, thunder" else 2      # a layer that has not kept q, k and v computes them again for its gradient
  assert sorted(written) == sorted([q, k, k]*recomputed)
  copies = [sizes for name, sizes in kernels if not name.startswith("attn_") and len(sizes) == 2 and sizes[0] == sizes[1] and sizes[0] in (q, k)]
  assert [sizes[0] for sizes in copies].count(q) <= kept     # the copy of o that the layer keeps

BY_DEFAULT = (("float16", "EMU::gfx942", True), ("bfloat16", "EMU::sm_80", False))

@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype, on, sliding", [
  pytest.param(*case, marks=() if case in BY_DEFAULT else pytest.mark.thorough)
  for case in itertools.product(NOISE, ("EMU::gfx942", "EMU::gfx1100", "EMU::sm_80", "CPU"), (True, False))])
def test_inference_of_gpt_oss(dtype:str, on:str, sliding:bool, monkeypatch:pytest.MonkeyPatch) -> None:
  # One kernel computes the attention of a layer with gpt-oss's heads and sinks, with or without a sliding window. This holds if the layer calls attn,
  # and also if it writes attention out in tensor operations, as tinygrad's model does. The error against float32 is at most twice that of tinygrad's
  # own kernels.
  for name, n in {"HEADS": 64, "KV_HEADS": 8, "D": 64, "S": 48, "WINDOW": 16}.items(): monkeypatch.setitem(globals(), name, n)
  rng, kind = np.random.default_rng(5), on.split(":")[0]
  angles = np.outer(np.arange(S), 150000.0**(-np.arange(0, D, 2)/D)).reshape(1, S, 1, D//2, 1)
  numbers = (rng.standard_normal((1, S, (HEADS + 2*KV_HEADS)*D)), np.concatenate([np.cos(angles), np.sin(angles)], -1), 2*rng.standard_normal(HEADS))
  with computed_on(on):
    xqkv, freqs, sinks = (tensor(x.astype(np.float32), dtype, kind).realize() for x in numbers)
    exact, own = (gpt_oss_by_tinygrad(*given, sliding)[0].reshape(1, S, HEADS*D)
                  for given in ([t.float().realize() for t in (xqkv, freqs, sinks)], (xqkv, freqs, sinks)))
    x, y = array(exact.float()), array(own.float())
    for write in (gpt_oss_by_thunder, gpt_oss_by_tinygrad):
      with attn.installed() as decisions:
        decisions.clear()
        z = array(write(xqkv, freqs, sinks, sliding)[0].reshape(1, S, HEADS*D).float())
        assert [d.kernel is None for d in decisions] == [False]*(write is gpt_oss_by_tinygrad)
        assert np.abs(z - x).max() <= 2*np.abs(y - x).max() + 1e-5*np.abs(x).max()
        assert sum(name.startswith("attn_") for name in names_of(write(xqkv, freqs, sinks, sliding)[0])) == 1
