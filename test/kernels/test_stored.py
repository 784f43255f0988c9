"""Tests of forward kernels over keys and values that are stored in 8 bits with a scale for each row."""
from __future__ import annotations
import shutil, subprocess
from dataclasses import replace
from pathlib import Path
import numpy as np
import pytest
from attn.chips import get_chip
from attn.choose.dispatch import WIDENING, choose, program_of
from attn.choose.tiled_tiles import tiled_tile
from attn.choose.tiles import wgmma_tile
from attn.compilers.clang import assembly, toolchain
from attn.emulator.checks import EmulatorError
from attn.isa.report import analyse
from attn.kernels.nvidia import stored as stored_keys, widen
from attn.kernels.nvidia.stored import StoredKeys
from attn.kernels.parts.grid.tensors import arguments, check_backward
from attn.kernels.parts.program.blocks import blocks_seen
from attn.kernels.tiles import wgmma as wgmma_tiles
from attn.kernels.tiles.wgmma import WgmmaTile
from attn.kernels.wgmma import forward as wgmma_forward
from attn.ops import common as ops, softmax
from attn.ops.nvidia import commit
from attn.ops.renderers import render
from attn.ops.softmax import LANE
from attn.ops.stored import numbers
from attn.problem import Problem, Strided
from attn.tinygrad_compat import UOp
from attn.values import FLOATS, INTS
from cases import EVERY_ARCH, GPU, chip, floats, in_turn, ints, rounded
from stored_cases import Stored, check_stored, dequantised, hold_stored, normal_rows, numbers_of, quantised, run_stored, stored_problem

SIXTEEN = ("float16", "bfloat16")
UNITS = (*EVERY_ARCH, "gfx90a", "sm_90")

widened_stores = StoredKeys.widened_stores

# ***** inputs *****

def along_keys(p:Problem) -> np.ndarray: return np.arange(p.Sk)/p.Sk

def with_values(p:Problem, k:np.ndarray|None=None, v:np.ndarray|None=None) -> Stored:
  # normally distributed inputs, except that the rows of k or v are quantised from the given float arrays
  x = normal_rows(p)
  # latent attention: the values are the first columns of k
  if p.v_in_k:
    if k is not None: x, v = replace(x, rotary=rounded(k[..., p.Dv:], p.dtype)), k[..., :p.Dv] if v is None else v
    k = v
  for name, rows in (("k", k), ("v", v)):
    if rows is not None: x = replace(x, **dict(zip((name, f"{name}_scales"), quantised(rows, p.stored))))
  return x

def rows_like(p:Problem, width:int, seed:int=5) -> np.ndarray: return np.random.default_rng(seed).standard_normal((p.B, p.Hkv, p.Sk, width))

def tiny_values(p:Problem) -> Stored:
  # inputs whose rows of V have scales of about 1e-8, so small that P times a scale is 0 in float16
  return with_values(p, v=rows_like(p, p.Dv)*4e-7)
def large_values(p:Problem) -> Stored:
  # inputs in which the largest element of each row of V is 65504, the largest number of float16
  v = rows_like(p, p.Dv)
  return with_values(p, v=v/np.abs(v).max(-1, keepdims=True)*65504)
def values_of_all_sizes(p:Problem) -> Stored:
  # inputs whose rows of V have random magnitudes: their scales lie between 1e-8 and 516
  sizes = np.exp(np.random.default_rng(2).uniform(np.log(4e-7), np.log(2e4), (p.B, p.Hkv, p.Sk, 1)))
  return with_values(p, v=rows_like(p, p.Dv)*sizes)
def growing_values(p:Problem) -> Stored:
  # inputs whose rows of V grow by a factor of about 2^40 from the first key to the last
  # P times the scale of a row then outgrows any fixed number that the kernel could subtract from the exponents
  return with_values(p, v=rows_like(p, p.Dv)*2.0**(along_keys(p)*40 - 30)[:, None])
def falling_values(p:Problem) -> Stored: return with_values(p, v=rows_like(p, p.Dv)*2.0**(10 - along_keys(p)*40)[:, None])
def tiny_values_of_the_best_key(p:Problem) -> Stored:
  # inputs in which key 7 has nearly all of the first query's weight, and a row of V that is 10^7 times smaller
  k, v, x = rows_like(p, p.D), rows_like(p, p.Dv), normal_rows(p)
  k[:, :, 7] = 3*np.repeat(x.q.reshape(p.B, p.Hkv, -1, p.Sq, p.D)[:, :, 0, :1], 1, 2)[:, :, 0]
  v[:, :, 7] *= 1e-7
  return with_values(p, k, v*100)
def keys_of_all_sizes(p:Problem) -> Stored:
  sizes = np.exp(np.random.default_rng(2).uniform(np.log(1e-6), np.log(20), (p.B, p.Hkv, p.Sk, 1)))
  return with_values(p, k=rows_like(p, p.D)*sizes)
def large_keys(p:Problem) -> Stored:
  # inputs in which the largest element of each row of K is 65504, and the queries are small
  k = rows_like(p, p.D)
  x = with_values(p, k=k/np.abs(k).max(-1, keepdims=True)*65504)
  return replace(x, q=np.sign(x.q)*2.0**-10)
def rising_scores(p:Problem) -> Stored:
  # inputs whose scores rise from key to key, so that each tile of keys has a new maximum
  q = normal_rows(p).q
  k = np.repeat((q.mean((1, 2)) if p.H else q)[:, None, None, :], p.Hkv, 1)*(300*along_keys(p))[:, None] + rows_like(p, p.D)
  return with_values(p, k=k)
def zero_rows(p:Problem) -> Stored:
  # inputs in which some rows of K and V are zeros, and all rows of one head of V
  k, v = rows_like(p, p.D), rows_like(p, p.Dv)
  k[:, :, 3::5] = v[:, :, 2::3] = 0
  v[:, -1] = 0
  return with_values(p, k, v)
def equal_rows(p:Problem) -> Stored: return with_values(p, np.ones((p.B, p.Hkv, p.Sk, p.D)), np.full((p.B, p.Hkv, p.Sk, p.Dv), 3.0))
def odd_rows_of_k(p:Problem) -> Stored:
  # inputs with a NaN in one row of K and an inf in another
  # under a causal mask some queries see neither of these rows, some one, and some both
  k = rows_like(p, p.D)
  k[:, :, p.Sk - p.Sq + 5, 1], k[:, 0, p.Sk - 3, 0] = np.nan, np.inf
  return with_values(p, k)
def odd_rows_of_v(p:Problem) -> Stored:
  v = rows_like(p, p.Dv)
  v[:, :, p.Sk - p.Sq + 5, 1], v[:, 0, p.Sk - 3, 0] = np.nan, -np.inf
  return with_values(p, v=v)
def nan_query(p:Problem) -> Stored:
  x = normal_rows(p)
  x.q[..., 3, 1] = np.nan
  return x

HARD = (tiny_values, large_values, values_of_all_sizes, growing_values, falling_values, tiny_values_of_the_best_key, keys_of_all_sizes, large_keys,
        rising_scores, zero_rows, equal_rows, odd_rows_of_k, odd_rows_of_v, nan_query)

@pytest.mark.sample(3)
@in_turn("make, arch", HARD, UNITS, [GPU])
def test_hard_rows(arch:str, make) -> None:
  # Attention over 8-bit rows is within its error limits on hard inputs, by every kernel: for a chunk of a prompt under a causal mask, and for
  # decoding with the keys split into ranges.
  check_stored(arch, make, Sq=20, Sk=150, D=32, causal=True, out_dtype="float32")
  check_stored(arch, make, Sq=6, Sk=300, D=64, dtype="bfloat16", causal=True, num_splits=3)

@pytest.mark.sample(3)
@pytest.mark.parametrize("make", HARD)
def test_hard_rows_in_plain_uops(make) -> None:
  for arch, dtype in (("gfx942", "float32"), ("sm_80", "float16")):
    check_stored(arch, make, tile=lambda p: tiled_tile(p, chip(arch)), Sq=20, Sk=70, D=16, causal=True, dtype=dtype)

# ***** what users have beside the rows *****

def lengths_with_garbage(p:Problem) -> Stored:
  # makes caches in which the rows beyond each length hold random numbers, and scales that are NaN, inf, 0, very large or very small
  x, rng = normal_rows(p), np.random.default_rng(4)
  for b, n in enumerate((37, 111)):
    for a in (x.k_scales, x.v_scales): a[b, :, n:] = rng.choice(np.array([np.nan, np.inf, 0, 3e38, 1e-40], np.float32), a[b, :, n:].shape)
    for a in (x.k, x.v): a[b, :, n:] = rng.integers(-128, 128, a[b, :, n:].shape)
  return x

OPTIONS: dict[str, dict] = {
  "decode": dict(Sq=1, Sk=320), "ranges": dict(Sq=1, Sk=320, num_splits=3), "one head": dict(H=2, Sq=7), "many heads": dict(H=16, Hkv=2, Sq=1),
  "pages of 16": dict(Sk=160, page_size=16, Sq=3), "pages of 128": dict(Sk=256, page_size=128, Sq=1, num_splits=2),
  "pages and layout bshd": dict(Sk=96, page_size=32, Sq=5, layout="bshd", causal=True), "bshd": dict(layout="bshd", window=(50, 3)),
  "float16 scales": dict(scale_dtype="float16", Sq=3), "float16 scales in pages": dict(scale_dtype="float16", Sk=96, page_size=16),
  "odd D": dict(D=33, Dv=17, Sq=5), "D of 8": dict(D=40, Dv=24, Sq=5), "D of 128": dict(D=128, Sq=2), "D of 256": dict(D=256, Sk=70, Sq=2),
  "Dv of 16": dict(D=64, Dv=16, Sq=18), "float32 output": dict(out_dtype="float32", Sq=40), "no lse": dict(lse=False, Sq=40),
  "softcap": dict(softcap=5.0), "causal": dict(causal=True, Sq=40), "window": dict(window=(20, -1), Sq=40),
  "bias": dict(extras=dict(bias=floats(1, 1, 20, 150))), "float16 bias": dict(extras=dict(bias=floats(1, 4, 20, 150)), bias_dtype="float16"),
  "alibi": dict(extras=dict(alibi_slopes=np.abs(floats(4)))), "sinks": dict(extras=dict(sinks=floats(4)), out_dtype="float32"),
  "dropout": dict(dropout_p=0.3, extras=dict(dropout_seed=np.array([3, 5], np.uint32))),
  "batch invariant": dict(Sq=1, Sk=600, B=2, batch_invariant=True, num_splits=2)}

@pytest.mark.sample(4)
@in_turn("name, arch", OPTIONS, UNITS, [GPU])
@pytest.mark.parametrize("dtype", ("float16", pytest.param("bfloat16", marks=pytest.mark.thorough)))
def test_options(arch:str, name:str, dtype:str) -> None: check_stored(arch, dtype=dtype, **OPTIONS[name])

@pytest.mark.sample(2)
@in_turn("pages, arch", (16, 0, 64), UNITS, [GPU])
def test_rows_beyond_the_lengths_have_no_effect(arch:str, pages:int) -> None:
  for splits in (1, 2):
    check_stored(arch, lengths_with_garbage, B=2, Sq=3, Sk=128, page_size=pages, num_splits=splits, extras=dict(kv_lengths=ints(37, 111)))

@pytest.mark.parametrize("arch", ("gfx942", "sm_80"))
def test_rows_beyond_the_lengths_have_no_effect_in_plain_uops(arch:str) -> None:
  check_stored(arch, lengths_with_garbage, tile=lambda p: tiled_tile(p, chip(arch)), B=2, Sq=3, Sk=128, D=16, page_size=16,
               extras=dict(kv_lengths=ints(37, 111)))

@pytest.mark.sample(3)
@in_turn("dtype, arch", (*SIXTEEN, "float32"), UNITS, [GPU], among=3)
def test_a_row_that_one_key_dominates_is_exact(arch:str, dtype:str) -> None: check_dominated(arch, dtype)

def check_dominated(arch:str, dtype:str, widened:bool=False) -> None:
  # If one key has all the weight, O is the stored row of this key times the row's scale, up to rounding in float32.
  make_tile = (lambda p: tiled_tile(p, chip(arch))) if dtype == "float32" else None
  p = stored_problem(Sq=16, Sk=96, D=64, H=2, dtype=dtype, out_dtype="float32")
  x = normal_rows(p)
  x = replace(x, q=rounded(np.sign(x.q), dtype))
  for i in range(16):
    for h in range(2): x.k[0, h, 3*i + h], x.k_scales[0, h, 3*i + h] = np.sign(x.q[0, h, i]).astype(np.int8)*100, 1.0
  o, _ = run_stored(p, x, arch, {}, None if make_tile is None else make_tile(p), widened)
  want = dequantised(x, "int8")[1][0][np.arange(2)[:, None], 3*np.arange(16) + np.arange(2)[:, None]]
  np.testing.assert_allclose(o[0], want, rtol=2**-21)

# ***** wgmma: chunks of prompts *****

def check_wgmma(arch:str, *make, **parameters) -> None:
  check_stored(arch, *make, tile=lambda p: wgmma_tile(p, chip(arch)), **{"Sq": 70, "Sk": 150, **parameters})

ON_HOPPER = pytest.mark.parametrize("arch", ("sm_90", GPU))

@pytest.mark.sample(5)
@ON_HOPPER
@pytest.mark.parametrize("make", HARD)
def test_hard_rows_by_wgmma(arch:str, make) -> None:
  if HARD.index(make)%2: check_wgmma(arch, make, D=32, causal=True, out_dtype="float32")
  else: check_wgmma(arch, make, D=64, dtype="bfloat16", causal=True)

FOR_PROMPTS: dict[str, dict] = {
  "ranges": dict(Sk=300, num_splits=2, D=32), "pages of 16": dict(Sk=160, page_size=16, D=32), "pages of 64": dict(Sk=256, page_size=64, causal=True),
  "many queries": dict(Sq=200, Sk=130, D=48, Dv=16, H=2), "float16 scales": dict(scale_dtype="float16", lse=False),
  "bshd": dict(layout="bshd", D=128),
  "one warpgroup": dict(Sq=50, D=96, H=2), "one tile": dict(Sk=20), "softcap": dict(softcap=5.0),
  "window": dict(window=(20, -1)),
  "bias": dict(extras=dict(bias=floats(1, 1, 70, 150))),
  "alibi": dict(extras=dict(alibi_slopes=np.abs(floats(4))), causal=True), "sinks": dict(extras=dict(sinks=floats(4)), out_dtype="float32"),
  "fp8": dict(stored="fp8e4m3", dtype="bfloat16"), "fp8 in pages of 32": dict(stored="fp8e4m3", Sk=160, page_size=32, D=128, causal=True),
  "D of 256": dict(D=256, Sk=100, causal=True, H=2), "pages of 128": dict(D=96, Sk=256, page_size=128, causal=True, H=2),
  "batch invariant": dict(Sk=200, B=2, batch_invariant=True, D=32),
  "dropout": dict(dropout_p=0.3, extras=dict(dropout_seed=np.array([3, 5], np.uint32)))}

@pytest.mark.sample(3)
@ON_HOPPER
@pytest.mark.parametrize("name", FOR_PROMPTS)
def test_options_by_wgmma(arch:str, name:str) -> None: check_wgmma(arch, **FOR_PROMPTS[name])

@ON_HOPPER
def test_rows_beyond_the_lengths_have_no_effect_by_wgmma(arch:str) -> None:
  for page_size in (0, 16): check_wgmma(arch, lengths_with_garbage, B=2, Sk=128, page_size=page_size, extras=dict(kv_lengths=ints(37, 111)))

def test_odd_rows_of_v_without_an_lse_by_wgmma() -> None:
  # A NaN in a row of V reaches the queries that see the row, and no others, also if no LSE is written, and with dropout.
  check_wgmma("sm_90", odd_rows_of_v, D=32, H=2, Hkv=1, causal=True, lse=False)
  check_wgmma("sm_90", odd_rows_of_v, D=32, H=2, lse=False, **FOR_PROMPTS["dropout"])

def not_waited_for(m:pytest.MonkeyPatch) -> None:
  # plants a fault: a thread converts its part of a tile to 16 bits before the copies of the tile to shared memory are complete
  m.setattr(wgmma_forward.nv, "wait_copies", lambda after, but: commit(after))
def scales_of_two_tiles(m:pytest.MonkeyPatch) -> None:
  # plants a fault: shared memory has room for the scales of only two tiles, which the next tile's scales overwrite
  m.setattr(wgmma_tiles, "SCALE_STAGES", 2)
def no_nans(m:pytest.MonkeyPatch) -> None: m.setattr(wgmma_forward, "zero_or_nan", lambda x: ops.splat(0.0, 2))
def scales_of_any_size(m:pytest.MonkeyPatch) -> None:
  # plants a fault: scales of V are used as they are, also those of rows of zeros
  m.setattr(stored_keys, "scale_in_range", lambda x: x)
  m.setattr(softmax, "in_range", lambda c, x: x)
def sums_without_factors(m:pytest.MonkeyPatch) -> None:
  # plants a fault: the kernel decides whether P has grown too large from the sum of P without the scales of V
  m.setattr(wgmma_forward, "FACTORS", LANE)
def other_half_first(m:pytest.MonkeyPatch) -> None:
  # plants a fault: the two 16-byte halves of 16 converted numbers are stored in each other's place
  def swapped(self:StoredKeys, shared:UOp, to:dict, pieces:list[UOp]) -> list[UOp]:
    class Elsewhere:
      def __init__(self, layout): self.layout, self.rows, self.units = layout, layout.rows, layout.units
      def place(self, row:UOp, unit:UOp) -> UOp: return self.layout.place(row, unit ^ 1)
    return widened_stores(self, shared, {name: Elsewhere(layout) for name, layout in to.items()}, pieces)
  m.setattr(StoredKeys, "widened_stores", swapped)

@pytest.mark.sample(3)
@pytest.mark.parametrize("plant, make, error", (
  (not_waited_for, normal_rows, EmulatorError), (scales_of_two_tiles, normal_rows, EmulatorError), (no_nans, odd_rows_of_v, AssertionError),
  (scales_of_any_size, zero_rows, AssertionError),
  (sums_without_factors, growing_values, AssertionError), (other_half_first, normal_rows, AssertionError)))
def test_faults_of_wgmma(monkeypatch:pytest.MonkeyPatch, plant, make, error) -> None:
  plant(monkeypatch)
  with pytest.raises(error): check_wgmma("sm_90", make, Sk=400, D=32, causal=True)

# ***** wgmma after a kernel that converts the rows *****

def check_widened(arch:str, *make, **parameters) -> None: check_stored(arch, *make, widened=True, **{"Sq": 70, "Sk": 150, **parameters})

@pytest.mark.sample(5)
@ON_HOPPER
@pytest.mark.parametrize("make", HARD)
def test_hard_rows_widened(arch:str, make) -> None:
  if HARD.index(make)%2: check_widened(arch, make, D=64, causal=True, dtype="bfloat16")
  else: check_widened(arch, make, D=32, causal=True, out_dtype="float32")

WIDENED_OPTIONS = {name: x for name, x in FOR_PROMPTS.items() if name not in ("ranges", "batch invariant")} | {
  "window in long rows": dict(Sk=600, window=(40, 20), B=2, extras=dict(kv_lengths=ints(537, 311))),
  "last queries are padding": dict(Sk=600, causal="top-left", tile=lambda p: WgmmaTile(2, 32)),
  "lengths": dict(B=2, Sk=300, causal=True, extras=dict(kv_lengths=ints(1, 299)))}

@pytest.mark.sample(3)
@ON_HOPPER
@pytest.mark.parametrize("name", WIDENED_OPTIONS)
def test_options_widened(arch:str, name:str) -> None: check_widened(arch, **WIDENED_OPTIONS[name])

@ON_HOPPER
def test_rows_beyond_the_lengths_have_no_effect_widened(arch:str) -> None:
  for page_size in (0, 16): check_widened(arch, lengths_with_garbage, B=2, Sk=128, page_size=page_size, extras=dict(kv_lengths=ints(37, 111)))

def test_starts_of_rows_widened() -> None:
  # If sequences begin at later rows of the cache (kv_starts), both ways of converting rows give the same results.
  extras = dict(kv_lengths=ints(237, 300), kv_starts=ints(5, 130))
  p = stored_problem(B=2, Sq=70, Sk=300, causal=True, extras=extras, out_dtype="float32")
  x = normal_rows(p)
  (o, lse), (want, want_lse) = (run_stored(p, x, "sm_90", extras, wgmma_tile(p, chip("sm_90")), widened) for widened in (True, False))
  np.testing.assert_allclose(o, want, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(lse, want_lse, rtol=1e-6)

def test_a_row_that_one_key_dominates_is_exact_widened() -> None: check_dominated("sm_90", "float16", widened=True)

CHUNKS = dict(B=4, H=32, Hkv=8, Sk=4096, D=128, causal=True)

@pytest.mark.parametrize("why, options", (
  ("", dict(Sq=512)), ("", dict(Sq=2048, B=1, Sk=8192, Hkv=32)), ("on average 504 rows of q read a key", dict(Sq=128)),
  ("on average 1025 rows of q read a key", dict(Sq=512, causal=False, window=(511, 0))), ("", dict(Sq=2048, causal=False, window=(1000, 0))),
  ("the converted rows would take 2214592512 bytes", dict(Sq=512, Sk=2**17)),
  ("batch_invariant", dict(Sq=512, batch_invariant=True)),
  ("", dict(Sq=512, page_size=16, extras=dict(kv_lengths=ints(1, 2, 3, 4), block_table=np.zeros((4, 256), np.int32))))))
def test_which_kernel_converts_rows(why:str, options:dict) -> None:
  # Another kernel converts the rows of chunks of many queries, if its results are not too large. Otherwise the choice says why not.
  found = choose(stored_problem(**{**CHUNKS, **options}), get_chip("sm_90"))
  assert found.kernel == ("forward_wgmma" if why else WIDENING)
  assert (found.why_not(WIDENING) or "").startswith(why)

def rows_of_queries_only(m:pytest.MonkeyPatch) -> None:
  # plants a fault: the kernel converts the rows that queries see, but not those that the last block's padding sees
  m.setattr(widen, "round_up", lambda n, to: n)
def no_first_rows(m:pytest.MonkeyPatch) -> None:
  # plants a fault: the kernel converts no rows that only the first queries see
  m.setattr(widen, "blocks_seen", lambda walk, first, last, keys: blocks_seen(walk, last, last, keys))
def kinds_in_another_order(m:pytest.MonkeyPatch) -> None:
  m.setattr(widen, "kinds_of_scales", lambda *given: stored_keys.kinds_of_scales(*given)[::-1])
def scales_of_one_tile(m:pytest.MonkeyPatch) -> None: m.setattr(WgmmaTile, "scale_stages", lambda self, p: 1)
def columns_exchanged(m:pytest.MonkeyPatch) -> None:
  # plants a fault: the eight numbers of a piece are stored with their halves exchanged
  widened_unit = StoredKeys.widened_unit
  m.setattr(StoredKeys, "widened_unit", lambda self, words: widened_unit(self, ops.build(*[ops.extract(words, i) for i in (1, 0)])))

@pytest.mark.sample(3)
@pytest.mark.parametrize("plant, error, options", (
  (rows_of_queries_only, EmulatorError, WIDENED_OPTIONS["last queries are padding"]), (no_first_rows, EmulatorError, dict(Sk=600, window=(40, 0))),
  (kinds_in_another_order, AssertionError, {}), (scales_of_one_tile, EmulatorError, dict(Sk=400)), (columns_exchanged, AssertionError, {})))
def test_faults_of_widening(monkeypatch:pytest.MonkeyPatch, plant, error, options:dict) -> None:
  plant(monkeypatch)
  with pytest.raises(error): check_widened("sm_90", D=32, H=2, **options)     # no other test has this problem: its kernels would be kept

# ***** scales that rows share *****

@pytest.mark.sample(2)
@pytest.mark.parametrize("latent", (False, True))
@pytest.mark.parametrize("arch", UNITS)
def test_one_scale_for_all_rows(arch:str, latent:bool) -> None:
  # Attention is right if all rows of K have one scale and all rows of V another. In latent attention K and V have the same scale.
  sizes = dict(H=16, Hkv=1, Sq=2, D=96, Dv=64, v_in_k=True) if latent else dict(Sq=40, D=64, causal=True)
  one, p = Strided(1, 0, 0, 0, 0), stored_problem(Sk=150, **sizes)
  p = replace(p, k_scale_view=one, v_scale_view=None if latent else one)
  x, (of_k, of_v) = normal_rows(p), (0.02, 0.02 if latent else 0.03)
  given = replace(x, k_scales=np.array([of_k], np.float32), v_scales=np.array([of_v], np.float32))
  full = replace(x, k_scales=np.full_like(x.k_scales, of_k), v_scales=np.full_like(x.v_scales, of_v))
  hold_stored(p, full, {}, *run_stored(p, given, arch, {}))

# ***** floats of 8 bits *****

OF_FLOATS = [("gfx942", "fp8e4m3fnuz"), ("gfx950", "fp8e4m3"), ("gfx1201", "fp8e4m3"), ("sm_90", "fp8e4m3")]

@pytest.mark.sample(2)
@in_turn("make, on", (normal_rows, values_of_all_sizes, zero_rows, odd_rows_of_v), OF_FLOATS,
         [pytest.param(("CUDA", "fp8e4m3"), marks=pytest.mark.gpu)])
def test_floats_of_8_bits(make, on:tuple[str, str]) -> None:
  # Attention over keys and values in the chip's own 8-bit float format is within its error limits (docs/contract.md): for 20 queries, and for 6
  # queries over a paged cache with the keys split into two ranges.
  arch, kind = on
  check_stored(arch, make, stored=kind, Sq=20, Sk=150, D=32, causal=True, out_dtype="float32")
  check_stored(arch, make, stored=kind, Sq=6, Sk=160, D=64, dtype="bfloat16", causal=True, num_splits=2, page_size=16)

def test_floats_of_8_bits_in_plain_uops() -> None:
  for arch, kind in OF_FLOATS[::3]:
    check_stored(arch, tile=lambda p: tiled_tile(p, chip(arch)), stored=kind, Sq=20, Sk=70, D=16, dtype="float32")

def test_every_byte_is_converted() -> None:
  for kind in ("int8", "fp8e4m3", "fp8e4m3fnuz"):
    every = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(numbers(every, kind), numbers_of(every.view(np.int8) if kind == "int8" else every, kind))

@pytest.mark.parametrize("arch", ("gfx1100", "gfx90a", "sm_80"))
def test_chips_without_floats_of_8_bits_refuse_them(arch:str) -> None:
  p = stored_problem(stored="fp8e4m3")
  with pytest.raises(NotImplementedError, match=f"tiled: stored='fp8e4m3': {arch} converts int8"): choose(p, get_chip(arch))

# ***** machine code *****

DECODE = dict(B=64, H=32, Hkv=8, Sq=1, Sk=4096, D=128, lse=False)

def text_of(p:Problem, arch:str, llvm:int=22) -> str:
  # the source of the kernel that dispatch chooses for a problem on a chip, for clang of the release `llvm`
  choice = choose(p, replace(get_chip(arch), llvm=llvm))
  names = arguments(p := replace(p, num_splits=choice.work.splits))
  tensors = [UOp.placeholder(shape, (FLOATS | INTS)[dtype], i) for i, (shape, dtype) in enumerate(names.values())]
  return render(program_of(choice, p)(*tensors), arch)

@pytest.mark.sample(4)
@in_turn("dtype, arch", SIXTEEN, ("gfx942", "gfx950", "gfx1100", "gfx1201"), among=2)
@pytest.mark.parametrize("floats", (False, True))
def test_decoding_spills_no_registers_on_amd(arch:str, dtype:str, floats:bool) -> None:
  if floats and not get_chip(arch).fp8: return
  no_spills_on_amd(stored_problem(dtype=dtype, stored=get_chip(arch).fp8 if floats else "int8", **DECODE), arch)

def no_spills_on_amd(p:Problem, arch:str) -> None:
  pytest.importorskip("ziglang")
  found = analyse(assembly(text_of(p, arch, toolchain().llvm), arch), arch).resources
  assert not found.vgpr_spills and not found.sgpr_spills, found

@pytest.mark.sample(2)
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("dtype", SIXTEEN)
@pytest.mark.parametrize("stored", ("int8", "fp8e4m3"))
def test_decoding_spills_no_registers_on_nvidia(stored:str, dtype:str, tmp_path) -> None:
  no_spills_on_nvidia(stored_problem(dtype=dtype, stored=stored, **DECODE), tmp_path)

def no_spills_on_nvidia(p:Problem, tmp_path:Path) -> None:
  (source := tmp_path/"kernel.cu").write_text(text_of(p, "sm_90"))
  command = ["nvcc", "-arch=sm_90a", "-cubin", "-Xptxas", "-v", "-o", str(tmp_path/"kernel.cubin"), str(source)]
  text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
  assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in text, text

# ***** choice *****

@pytest.mark.parametrize("sizes, keys, stages", (
  ({}, 64, 5), ({"B": 1}, 64, 4), ({"B": 1, "page_size": 16}, 128, 2), ({"B": 17, "page_size": 64}, 128, 2), ({"page_size": 256}, 64, 5)))
def test_tiles_of_decoding_on_sm_90(sizes:dict[str, int], keys:int, stages:int) -> None:
  # Tiles of decoding over 8-bit rows on sm_90 have more keys in small pages, and fewer stages for few sequences.
  B, page_size = sizes.get("B", 64), sizes.get("page_size", 0)
  extras = dict(block_table=np.zeros((B, 4096//page_size), np.int32), kv_lengths=np.zeros(B, np.int32)) if page_size else {}
  tile = choose(stored_problem(**{**DECODE, **sizes}, extras=extras), get_chip("sm_90")).work.tile
  assert (tile.block_n, tile.stages) == (keys, stages)

# ***** refusals *****

def test_refusals() -> None:
  # Kernels that cannot read 8-bit keys and values refuse them with a reason. So do the backward kernels.
  p = stored_problem(Sq=300, D=128)
  for arch, kernel in (("gfx950", "dual_wave"), ("gfx942", "staggered"), ("sm_90", "three_pass")):
    reason = choose(p, get_chip(arch)).why_not(kernel)
    assert reason is None or "stored" in reason, reason
  assert choose(p, get_chip("sm_90")).kernel == "forward_wgmma" and choose(p, get_chip("gfx942")).kernel == "forward"
  for other, reason in (({"Sq": 63}, "Sq=63: a warpgroup has 64 queries"), ({"D": 72}, "D=72: must be a multiple of 16")):
    found = choose(stored_problem(**{"Sq": 300, "D": 128, **other}), get_chip("sm_90"))
    assert found.kernel == "forward_mma" and reason in str(found.why_not("forward_wgmma")), found
  with pytest.raises(NotImplementedError, match="stored='int8': keys and values that are stored in 8 bits have no gradient"):
    check_backward(p, choose(p, get_chip("gfx942")).work.tile)
  with pytest.raises(NotImplementedError, match="three_pass: stored='int8': tensor operations would hold"): choose(p, None)

def test_problems_that_contradict_themselves() -> None:
  p = stored_problem()
  for fields, kind, match in (
      (dict(stored="int4"), NotImplementedError, "stored='int4': must be '' or one of int8"),
      (dict(scale_dtype="bfloat16"), NotImplementedError, "scale_dtype='bfloat16': must be one of float32, float16"),
      (dict(k_scale_view=None), ValueError, "stored='int8' with k_scale_view=None"),
      (dict(stored=""), ValueError, "stored='', v_in_k=False, D=64, Dv=64 with k_scale_view=.*: there are no such rows"),
      (dict(v_in_k=True, v_view=None), ValueError, "stored='int8', v_in_k=True, D=64, Dv=64 with v_scale_view=.*: there are no such rows"),
      (dict(v_in_k=True, v_view=None, v_scale_view=None, Dv=32), ValueError, "stored='int8' with k_rotary_view=None: must say where")):
    with pytest.raises(kind, match=match): replace(p, **fields)
