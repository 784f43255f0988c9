"""Tests of score_mod and mask_mod in every kind of call: decoding, splits, lengths, pages, packed sequences, latent attention, several devices,
TinyJit, flash_attention_fn and tensor operations. Everywhere the function gets the positions that query and key have in the whole sequence."""
from __future__ import annotations
from collections.abc import Callable
from typing import Any
import numpy as np
import pytest
import attn
from attn.reference import Array
from attn.tinygrad_compat import Tensor, TinyJit, UOp, dtypes
from api_cases import emulated, floats, whole

pytestmark = pytest.mark.usefixtures("not_unrolled")

B, H, HKV, D = 2, 4, 2, 32
TABLE = floats(B, H, seed=7).astype(np.float32)

def score(s:UOp, b:UOp, h:UOp, i:UOp, j:UOp, t:UOp) -> UOp: return s + t[b, h]*(i - j).cast(dtypes.float)*0.1
def mask(b:UOp, h:UOp, i:UOp, j:UOp, t:UOp) -> UOp: return ((i - j) % 3 != 1) & (i >= j)

def drawn(*shape:int, seed:int) -> Array: return floats(*shape, seed=seed).astype(np.float16)
def on(x:Array, device:str="EMU") -> Tensor: return Tensor(x, device=device).realize()

def expected(q:Array, k:Array, v:Array, table:Array=TABLE) -> Array:
  # Computes attention of arrays (B, H, Sq, D) in float64, with the score_mod and the mask_mod of these tests in numpy.
  q, k, v = (x.astype(np.float64) for x in (q, k, v))
  k, v = (np.repeat(x, q.shape[1]//x.shape[1], 1) for x in (k, v))
  i, j = np.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2], np.arange(k.shape[2])
  s = q @ k.swapaxes(-1, -2)/np.sqrt(q.shape[-1]) + table.astype(np.float64)[..., None, None]*(i - j)*0.1
  s = np.where(((i - j) % 3 != 1) & (i >= j), s, -np.inf)
  p = np.exp(s - np.maximum(s.max(-1, keepdims=True), -1e300))
  return p/np.maximum(p.sum(-1, keepdims=True), 1e-300) @ v

OWN: dict[str, Any] = dict(score_mod=score, mask_mod=mask)
def close(o:Tensor, want:Array) -> None: np.testing.assert_allclose(whole(o).numpy().astype(np.float64), want, atol=3e-3, rtol=2e-3)

CHIPS = ("gfx942", pytest.param("sm_90", marks=pytest.mark.thorough))

@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("splits", (0, 3))
def test_decoding(chip:str, splits:int) -> None:
  q, k, v = drawn(B, H, 1, D, seed=1), drawn(B, HKV, 300, D, seed=2), drawn(B, HKV, 300, D, seed=3)
  with emulated(chip): close(attn.attention(*map(on, (q, k, v)), mod_tensors=(on(TABLE),), num_splits=splits, **OWN), expected(q, k, v))

@pytest.mark.parametrize("starts", (None, (5, 9)))
@pytest.mark.parametrize("kernel", ("", "three_pass"))
def test_lengths(kernel:str, starts:tuple[int, ...]|None) -> None:
  q, k, v, ends = drawn(B, H, 20, D, seed=1), drawn(B, HKV, 70, D, seed=2), drawn(B, HKV, 70, D, seed=3), (57, 70)
  given = {} if starts is None else {"kv_starts": np.int32(starts)}
  with emulated("gfx1100", kernel):
    o = attn.attention(*map(on, (q, k, v)), mod_tensors=(on(TABLE),), kv_lengths=on(np.int32(ends)), **{x: on(y) for x, y in given.items()}, **OWN)
    rows = [slice(first, last) for first, last in zip(starts or (0, 0), ends)]
    close(o, np.concatenate([expected(q[b:b+1], k[b:b+1, :, rows[b]], v[b:b+1, :, rows[b]], TABLE[b:b+1]) for b in range(B)]))

@pytest.mark.parametrize("chip", CHIPS)
def test_pages(chip:str) -> None:
  q, k, v, ends = drawn(B, H, 7, D, seed=1), drawn(12, 16, HKV, D, seed=2), drawn(12, 16, HKV, D, seed=3), (50, 64)
  table = np.int32([[3, 1, 7, 0], [2, 5, 4, 11]])
  def rows(x:Array, b:int) -> Array: return x[table[b]].reshape(1, 64, HKV, D).transpose(0, 2, 1, 3)[:, :, :ends[b]]
  with emulated(chip):
    o = attn.attention(*map(on, (q, k, v)), mod_tensors=(on(TABLE),), kv_lengths=on(np.int32(ends)), block_table=on(table), **OWN)
    close(o, np.concatenate([expected(q[b:b+1], rows(k, b), rows(v, b), TABLE[b:b+1]) for b in range(B)]))

@pytest.mark.parametrize("kernel", ("", "three_pass"))
def test_packed_sequences(kernel:str) -> None:
  # A score_mod or mask_mod gets as b the index of the packed sequence, and i and j count within this sequence.
  ends_q, ends_k = (0, 20, 50), (0, 40, 70)
  q, k, v = drawn(50, H, D, seed=1), drawn(70, HKV, D, seed=2), drawn(70, HKV, D, seed=3)
  with emulated("gfx942", kernel):
    o = attn.attention(*map(on, (q, k, v)), layout="thd", mod_tensors=(on(TABLE),), cu_seqlens_q=on(np.int32(ends_q)),
                       cu_seqlens_k=on(np.int32(ends_k)), **OWN)
    def part(x:Array, ends:tuple[int, ...], b:int) -> Array: return x[ends[b]:ends[b + 1]].transpose(1, 0, 2)[None]
    want = [expected(part(q, ends_q, b), part(k, ends_k, b), part(v, ends_k, b), TABLE[b:b+1])[0].transpose(1, 0, 2) for b in range(2)]
    close(o, np.concatenate(want))

@pytest.mark.parametrize("chip", CHIPS)
def test_latent_attention(chip:str) -> None:
  q, k, table = drawn(1, 16, 2, 576, seed=1), drawn(1, 1, 130, 576, seed=2), floats(1, 16, seed=4).astype(np.float32)
  with emulated(chip):
    close(attn.attention(on(q), on(k), None, v_dim=512, mod_tensors=(on(table),), **OWN), expected(q, k, k[..., :512], table))

def gradients(attend:Callable[..., Tensor], inputs:list[Tensor]) -> list[Array]:
  return [whole(g).numpy().astype(np.float64) for g in attend(*inputs).float().square().sum().gradient(*inputs)]

@pytest.mark.parametrize("axis, with_gradients", ((0, False), (1, False), (2, False),
                                                  *[pytest.param(axis, True, marks=pytest.mark.thorough) for axis in range(3)]))
def test_shards(axis:int, with_gradients:bool) -> None:
  # Two devices each compute a part of a call: half of the batches, of the heads or of the sequence. On each device, score_mod and mask_mod get the
  # indices that query and key have in the whole call.
  x, devices = [drawn(B, H, 32, D, seed=1), drawn(B, HKV, 32, D, seed=2), drawn(B, HKV, 32, D, seed=3)], ("EMU:1", "EMU:2")
  with emulated("gfx942"):
    def shard(t:Tensor) -> Tensor: return attn.shard_sequence(t, devices, 2, "contiguous") if axis == 2 else t.shard(devices, axis)
    def attend(*t:Tensor) -> Tensor: return attn.attention(*t, mod_tensors=(on(TABLE, "EMU:1").shard(devices, None),), **OWN)
    sharded = [shard(on(a, "EMU:1")).realize() for a in x]
    close(attend(*sharded), expected(*x))
    if not with_gradients: return
    alone = gradients(lambda *t: attn.attention(*t, mod_tensors=(on(TABLE),), **OWN), list(map(on, x)))
    for got, want in zip(gradients(attend, sharded), alone): np.testing.assert_allclose(got, want, atol=2e-2, rtol=2e-2)

def test_keys_alone_shared_are_refused() -> None:
  x, devices = [drawn(B, H, 32, D, seed=1), drawn(B, HKV, 32, D, seed=2), drawn(B, HKV, 32, D, seed=3)], ("EMU:1", "EMU:2")
  with emulated("gfx942"):
    q, k, v = (on(a, "EMU:1").shard(devices, axis) for a, axis in zip(x, (None, 2, 2)))
    with pytest.raises(NotImplementedError, match="mask_mod with k and v sharded along their rows"):
      attn.attention(q, k, v, mask_mod=lambda b, h, i, j: j < 20)
    with pytest.raises(NotImplementedError, match="score_mod and mask_mod with k and v sharded along their rows"):
      attn.attention(q, k, v, mod_tensors=(on(TABLE, "EMU:1").shard(devices, None),), **OWN)

@pytest.mark.parametrize("kernel", ("", "three_pass"))
def test_jit_and_new_values(kernel:str) -> None:
  # A call that TinyJit replays uses the new values of mod_tensors, the tensors that its score_mod or mask_mod reads.
  x = [drawn(B, H, 20, D, seed=1), drawn(B, HKV, 33, D, seed=2), drawn(B, HKV, 33, D, seed=3)]
  with emulated("gfx942", kernel):
    attend = TinyJit(lambda q, k, v, t: attn.attention(q, k, v, mod_tensors=(t,), **OWN).realize())
    for n in range(4):
      table = floats(B, H, seed=20 + n).astype(np.float32)
      close(attend(*map(on, x), on(table)), expected(*x, table))

def test_kernel_function() -> None:
  # flash_attention_fn accepts score_mod and mask_mod. The tensors that they read are named in the argument `extras`; the kernel takes them after q, k
  # and v. Equal functions give the same kernel function.
  x = [drawn(B, H, 20, D, seed=1), drawn(B, HKV, 33, D, seed=2), drawn(B, HKV, 33, D, seed=3)]
  with emulated("gfx942"):
    fn = attn.flash_attention_fn(extras=("mod_tensor0",), arch="gfx942", **OWN)
    assert fn is attn.flash_attention_fn(extras=("mod_tensor0",), arch="gfx942", **OWN)
    tensors = [on(a) for a in (*x, TABLE)]
    close(Tensor.empty(B, H, 20, D, dtype="half", device="EMU").custom_kernel(*tensors, fxn=fn)[0], expected(*x))

def test_a_part_of_larger_tensors() -> None:
  # If the option first_batch_and_head says that q, k and v are a part of larger tensors, score_mod and mask_mod get batch and head as counted in the
  # larger tensors. This holds in kernels, and in tensor operations that compute gradients.
  x, table = [drawn(B, H, 20, D, seed=1), drawn(B, HKV, 33, D, seed=2), drawn(B, HKV, 33, D, seed=3)], floats(B + 1, H + 2, seed=7).astype(np.float32)
  def gradient(t:Tensor, o:Tensor) -> Array: return o.float().square().sum().gradient(t)[0].numpy().astype(np.float64)
  with emulated("gfx942"):
    fn = attn.flash_attention_fn(extras=("first_batch_and_head", "mod_tensor0"), arch="gfx942", **OWN)
    q, k, v, part, larger = map(on, (*x, table[1:, 2:].copy(), table))
    o = Tensor.empty(B, H, 20, D, dtype="half", device="EMU").custom_kernel(q, k, v, on(np.uint32([1, 2])), larger, fxn=fn)[0]
    close(o, expected(*x, table[1:, 2:]))
    want = gradient(part, attn.attention(q, k, v, mod_tensors=(part,), **OWN))
    found = gradient(larger, o)
  np.testing.assert_allclose(found[1:, 2:], want, atol=1e-2, rtol=1e-2)
  assert abs(want).max() > 0.1 and not found[0].any() and not found[:, :2].any()

def test_a_cache() -> None:
  x = [drawn(B, HKV, 40, D, seed=2), drawn(B, HKV, 40, D, seed=3)]
  q = drawn(B, H, 3, D, seed=1)
  with emulated("gfx942"):
    caches = [Tensor.zeros(B, HKV, 64, D, dtype="half", device="EMU").contiguous().realize() for _ in x]
    attn.append_kv(*(on(a[:, :, :37].copy()) for a in x), *caches, 0)
    o = attn.attention_with_kv_cache(on(q), *(on(a[:, :, 37:].copy()) for a in x), *caches, 37, mod_tensors=(on(TABLE),), **OWN)
    close(o, expected(q, *x))
