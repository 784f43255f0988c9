"""Small programs that call attention as tinygrad's examples and models of release 0.14.0 do. (tinygrad's wheel does not contain those.) Each program
has one layer with random weights, and calls the same methods of Tensor with the same kinds of arguments, dtypes, caches and masks."""
from __future__ import annotations
import math
from collections.abc import Callable
from typing import Any
import numpy as np
from tinygrad import Tensor, TinyJit, UOp, Variable, dtypes

HEADS, WIDTH, ROWS = 2, 32, 12
D = WIDTH//HEADS
BOUND_AT_IMPORT = Tensor.scaled_dot_product_attention      # as extra/models/unet.py binds the method

class Program:
  # Base class of the small programs, whose weights and inputs are random and rounded to `dtype`.
  def __init__(self, dtype:Any, exact:bool=False) -> None:
    # If `exact`, the rounded numbers are then converted to float32. A program draws them one after another from one generator, so each run has the
    # same numbers.
    self.rng, self.rounded, self.dtype = np.random.default_rng(1), dtype, dtypes.float if exact else dtype
  def draw(self, *shape:int, factor:float=1.0) -> Tensor:
    return Tensor((factor*self.rng.standard_normal(shape)).astype(np.float32)).cast(self.rounded).cast(self.dtype).realize()
  def weights(self, *names:str) -> None:
    for name in names: setattr(self, name, self.draw(WIDTH, WIDTH, factor=WIDTH**-.5))
  def run(self) -> list[Tensor]: raise NotImplementedError

def heads(x:Tensor) -> Tensor: return x.reshape(*x.shape[:2], HEADS, D).transpose(1, 2)
def merged(x:Tensor) -> Tensor: return x.transpose(1, 2).flatten(2)

class Bert(Program):
  # Calls attention as tinygrad's extra/models/bert.py does.
  calls = 1
  def run(self) -> list[Tensor]:
    self.weights("q", "k", "v")
    x, seen = self.draw(2, ROWS, WIDTH), Tensor(self.rng.integers(0, 2, (2, ROWS)).astype(np.int32))
    # This mask is computed from Python numbers, so it has tinygrad's dtype weakfloat, which takes the dtype of the tensor to which it is added.
    mask = (1.0 - seen.unsqueeze(1).unsqueeze(2))*-10000.0
    return [merged(Tensor.scaled_dot_product_attention(heads(x @ self.q), heads(x @ self.k), heads(x @ self.v), mask, .1))]

class Clip(Program):
  # Calls attention as the text model of tinygrad's extra/models/clip.py does, with a mask of -inf above the diagonal.
  calls = 1
  def run(self) -> list[Tensor]:
    self.weights("q", "k", "v")
    x, mask = self.draw(2, ROWS, WIDTH), Tensor.full((1, 1, ROWS, ROWS), float("-inf")).triu(1)
    return [merged(Tensor.scaled_dot_product_attention(heads(x @ self.q), heads(x @ self.k), heads(x @ self.v), attn_mask=mask))]

class Vit(Program):
  # Calls attention as tinygrad's extra/models/vit.py and extra/models/transformer.py do, without a mask.
  calls = 1
  def run(self) -> list[Tensor]:
    self.weights("q", "k", "v")
    x = self.draw(2, ROWS + 1, WIDTH)
    q, k, v = (x.linear(w).reshape(2, -1, HEADS, D).transpose(1, 2) for w in (self.q, self.k, self.v))
    return [Tensor.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, -1, WIDTH)]

class Unet(Program):
  # Calls attention as tinygrad's extra/models/unet.py does: over a picture, and over the words of a prompt.
  calls = 2
  def run(self) -> list[Tensor]:
    self.weights("q", "k", "v")
    x, words = self.draw(1, 16, WIDTH), self.draw(1, 7, WIDTH)
    # That file takes a reference to Tensor.scaled_dot_product_attention when it is imported, before attn replaces this method. attn must still
    # compute the calls.
    for keys in (x, words): x = x + merged(BOUND_AT_IMPORT(heads(x @ self.q), heads(keys @ self.k), heads(keys @ self.v)))
    return [x]

class Vae(Program):
  # Calls attention as the autoencoder of tinygrad's examples/stable_diffusion.py does: on tensors of three dimensions, with one wide head.
  calls = 1
  def run(self) -> list[Tensor]:
    q, k, v = (self.draw(1, WIDTH, 4, 4).reshape(1, WIDTH, 16).transpose(1, 2) for _ in range(3))
    return [Tensor.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(1, WIDTH, 4, 4)]

class Gpt2(Program):
  # Calls attention as tinygrad's examples/gpt2.py does: K and V are in one cache, and a Variable says where the newest token goes.
  calls = 3
  def start(self, at:int) -> int|UOp: return at if not at else Variable("start_pos", 1, ROWS - 1).bind(at)
  def step(self, x:Tensor, start:Any) -> Tensor:
    T = x.shape[1]
    q, k, v = (x.linear(w).reshape(1, T, HEADS, D) for w in (self.q, self.k, self.v))
    self.cache[:, :, start:start + T].assign(Tensor.stack(k, v)).realize()
    keys, values = (self.cache[i, :, :start + T] for i in (0, 1))
    mask = Tensor.full((1, 1, T, start + T), float("-inf"), dtype=x.dtype).triu(start + 1) if T > 1 else None
    o = q.transpose(1, 2).scaled_dot_product_attention(keys.transpose(1, 2), values.transpose(1, 2), mask)
    return (x + merged(o)).realize()
  def run(self) -> list[Tensor]:
    self.weights("q", "k", "v")
    self.cache = Tensor.zeros(2, 1, ROWS, HEADS, D, dtype=self.dtype).contiguous().realize()
    step, found, at = TinyJit(self.step), list[Tensor](), 0
    for n in (5, 1, 1, 1):
      x = self.draw(1, n, WIDTH)
      found.append((self.step if n > 1 else step)(x, self.start(at)).clone().realize())
      at += n
    return found

class Llama(Gpt2):
  # Calls attention as tinygrad's extra/models/llama.py does without TinyJit.
  calls = 4
  def run(self) -> list[Tensor]:
    self.weights("q")
    self.k, self.v = (self.draw(WIDTH//2, WIDTH, factor=WIDTH**-.5).T for _ in range(2))
    self.cache = Tensor.zeros(2, 1, ROWS, HEADS//2, D, dtype=self.dtype).contiguous().realize()
    found, at = list[Tensor](), 0
    # An int says where the newest token goes, and key/value heads are repeated.
    for n in (5, 1, 1, 1):
      found.append(self.step(self.draw(1, n, WIDTH), at))
      at += n
    return found
  def step(self, x:Tensor, start:Any) -> Tensor:
    T = x.shape[1]
    q = (x @ self.q).reshape(1, T, HEADS, D)
    k, v = ((x @ w).reshape(1, T, HEADS//2, D) for w in (self.k, self.v))
    self.cache[:, :, start:start + T].assign(Tensor.stack(k, v)).realize()
    keys, values = (self.cache[i, :, 0:start + T].repeat((1, 1, 1, 2)).reshape(1, start + T, HEADS, D) for i in (0, 1))
    mask = Tensor.full((1, 1, T, start + T), float("-inf"), dtype=x.dtype).triu(start + 1) if T > 1 else None
    return (x + merged(q.transpose(1, 2).scaled_dot_product_attention(keys.transpose(1, 2), values.transpose(1, 2), mask))).realize()

class Whisper(Program):
  # Calls attention as tinygrad's examples/whisper.py does: self-attention over a float32 cache, then cross-attention to the encoder's output.
  calls = 6
  def step(self, x:Tensor, start:Any) -> Tensor:
    q, k, v = x @ self.q, x @ self.k, x @ self.v
    k, v = (cache.shrink((None, (0, start), None)).cat(rows, dim=1) for cache, rows in zip(self.caches, (k, v)))
    for cache, rows in zip(self.caches, (k, v)): cache.assign(rows.pad((None, (0, ROWS - start - x.shape[1]), None)).contiguous()).realize()
    # The mask is a corner of a larger mask.
    x = x + merged(Tensor.scaled_dot_product_attention(heads(q), heads(k), heads(v), self.mask[:x.shape[1], :x.shape[1]]))
    k, v = (self.heard @ w for w in (self.k, self.v))
    return (x + merged(Tensor.scaled_dot_product_attention(heads(x @ self.q), heads(k), heads(v), None))).realize()
  def run(self) -> list[Tensor]:
    self.weights("q", "k", "v")
    self.caches = [Tensor.zeros(1, ROWS, WIDTH) for _ in range(2)]
    self.mask, self.heard = Tensor.full((ROWS, ROWS), -math.inf).triu(1).realize(), self.draw(1, 9, WIDTH)
    step, found, at = TinyJit(self.step), list[Tensor](), 0
    for n in (4, 1, 1, 1):
      x = self.draw(1, n, WIDTH)
      start = Variable("self_attn_cache_len", 1, ROWS - 1).bind(at) if at else 0
      found.append((self.step if n > 1 else step)(x, start).clone().realize())
      at += n
    return found

class T5(Program):
  # Calls attention as tinygrad's extra/models/t5.py does: written out, without a scale, with a learned bias and softmax in float32.
  calls = 1
  def run(self) -> list[Tensor]:
    self.weights("q", "k", "v")
    x, bias = self.draw(2, ROWS, WIDTH), self.draw(ROWS, ROWS, HEADS).permute([2, 0, 1]).unsqueeze(0)
    q, k, v = ((x @ w).view(2, -1, HEADS, D).transpose(1, 2) for w in (self.q, self.k, self.v))
    scores = Tensor.matmul(q, k.transpose(3, 2))
    scores += bias
    weights = Tensor.softmax(scores.float(), axis=-1).cast(scores.dtype)
    return [Tensor.matmul(weights, v).transpose(1, 2).contiguous().view(2, -1, WIDTH)]

class Mla(Program):
  # Computes latent attention as tinygrad/llm/model.py does, written out in tensor operations.
  calls = 3
  latent = 24
  def step(self, x:Tensor, start:Any) -> Tensor:
    # Values are the first columns of the keys, all query heads use one head of keys, and the cache is read after the store of the newest rows.
    T = x.shape[1]
    q, row = (x @ self.q).reshape(1, T, HEADS, D).transpose(1, 2) @ self.absorbed, x @ self.k
    k = Tensor(self.cache.uop.after(self.cache[:, :, start:start + T, :].uop.store(row.reshape(1, 1, T, WIDTH).uop)))[:, :, 0:start + T, :]
    v = k[..., :self.latent]
    mask = None if isinstance(T, int) and T == 1 else Tensor.full((1, 1, T, start + T), float("-inf"), dtype=x.dtype, buffer=False).triu(start + 1)
    scores = q @ k.transpose(-1, -2)*(1.0/24**.5)
    if mask is not None: scores = scores + mask
    return merged((scores.softmax(-1) @ v) @ self.out.transpose(-1, -2)).realize()
  def run(self) -> list[Tensor]:
    self.weights("q", "k")
    self.absorbed, self.out = (self.draw(HEADS, D, n, factor=D**-.5) for n in (WIDTH, self.latent))
    self.cache = Tensor.empty(1, 1, ROWS, WIDTH, dtype=self.dtype)
    step, found, at = TinyJit(self.step), list[Tensor](), 0
    chunk = self.draw(1, 7, WIDTH)[:, :UOp.variable("toks", 1, 7).bind(5)]
    for x in (chunk, *(self.draw(1, 1, WIDTH) for _ in range(3))):
      o = (step if at else self.step)(x, Variable("start_pos", 0, ROWS - 1).bind(at))
      found.append((o if at else o.pad_to((1, 7, HEADS*D))[:, :5]).clone().realize())
      at += 1 if at else 5
    return found

PROGRAMS: list[Callable[..., Any]] = [Bert, Clip, Vit, Unet, Vae, Gpt2, Llama, Whisper, T5, Mla]
