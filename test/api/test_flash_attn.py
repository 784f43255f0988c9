"""Tests of attn's versions of FlashAttention's functions. The tests run every argument of each function. The table in docs/flash_attention.md is made
from the list of these tests."""
from __future__ import annotations
import inspect, sys
from pathlib import Path
from typing import Any, Callable
import numpy as np
import pytest
import attn
from attn import flash_attn
from attn.accuracy import judge, law_of
from attn.tinygrad_compat import Context, Tensor
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))    # when the file runs as a program
from api_cases import draw, emulated
from api_cases import whole as whole_tensor
from cases import array, tensor

pytestmark = pytest.mark.usefixtures("not_unrolled")

B, SQ, SK, H, HKV, D = 2, 4, 12, 4, 2, 16
DOCUMENT = Path(__file__).resolve().parent.parent.parent/"docs/flash_attention.md"

def int32(*x:Any) -> Tensor: return Tensor(np.array(x, np.int32), device="EMU").realize()
def numbers(*shape:int, seed:int=0) -> np.ndarray: return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
Q, K, V = (numbers(B, n, h, D, seed=i).astype(np.float16) for i, (n, h) in enumerate(((SQ, H), (SK, HKV), (SK, HKV))))
SLOPES = np.array([.5, .25, .125, .0625], np.float32)

def half(x:np.ndarray) -> Tensor: return tensor(x, "float16").realize()
def qkv() -> list[Tensor]: return [half(x) for x in (Q, K, V)]
def packed_rows(x:np.ndarray) -> np.ndarray: return x.reshape(-1, *x.shape[2:])
CU_Q, CU_K = [(0, n, 2*n) for n in (SQ, SK)]

# ***** the functions on the same numbers: each returns out (B, SQ, H, D), and lse where wanted *****

def call_without_cache(function:str, **more:Any) -> Any:
  # Calls the FlashAttention function named `function`, one without a cache, on the inputs of this file.
  q, k, v = qkv()
  if function == "flash_attn_func": return flash_attn.flash_attn_func(q, k, v, **more)
  if function == "flash_attn_kvpacked_func": return flash_attn.flash_attn_kvpacked_func(q, half(np.stack([K, V], 2)), **more)
  three = [Q, K[:, :SQ].repeat(2, 2), V[:, :SQ].repeat(2, 2)]
  if function == "flash_attn_qkvpacked_func": return flash_attn.flash_attn_qkvpacked_func(half(np.stack(three, 2)), **more)
  lens = {"max_seqlen_q": SQ, "max_seqlen_k": SK} | {n: more.pop(n) for n in ("max_seqlen_q", "max_seqlen_k") if n in more}
  q, k, v = (half(packed_rows(x)) for x in (Q, K, V))
  cu = int32(*CU_Q), int32(*CU_K)
  if function == "flash_attn_varlen_func": return flash_attn.flash_attn_varlen_func(q, k, v, *cu, **lens, **more)
  if function == "flash_attn_varlen_kvpacked_func":
    return flash_attn.flash_attn_varlen_kvpacked_func(q, half(np.stack([packed_rows(x) for x in (K, V)], 1)), *cu, **lens, **more)
  qkv_rows = half(np.stack(list(map(packed_rows, three)), 1))
  return flash_attn.flash_attn_varlen_qkvpacked_func(qkv_rows, cu[0], more.pop("max_seqlen", SQ), **more)

def ours(function:str, **options:Any) -> Any:
  q, k, v = qkv()
  if "qkvpacked" in function: k, v = (half(x[:, :SQ].repeat(2, 2)) for x in (K, V))
  return attn.attention(q, k, v, layout="bshd", **options)

def same_numbers(x:Tensor, y:Tensor) -> None: np.testing.assert_array_equal(array(x).reshape(array(y).shape), array(y))

def agrees(ours_:dict[str, Any], **theirs:Any) -> Callable[[str], None]:
  def run(function:str) -> None: same_numbers(call_without_cache(function, **theirs), ours(function, **ours_))
  return run

def check_packed(function:str) -> None:
  # Checks that causal attention by `function` on packed sequences is within its error limits (docs/contract.md).
  # Packed and separate results may differ in their bits, because dispatch may choose another tile for packed sequences.
  o = array(call_without_cache(function, causal=True)).reshape(B, SQ, H, D).swapaxes(1, 2)
  k, v = (x[:, :SQ].repeat(2, 2) if "qkvpacked" in function else x for x in (K, V))
  x = [a.astype(np.float32).swapaxes(1, 2) for a in (Q, k, v)]
  args = D**-.5, (-1, 0), k.shape[1] - SQ
  assert judge(o, law_of(*x, *args, dtype="float16", out_dtype="float16")[0]).ok

def with_lse(function:str) -> None:
  _, lse, nothing = call_without_cache(function, return_attn_probs=True)
  assert nothing is None and lse.shape == ((H, B*SQ) if "varlen" in function else (B, H, SQ))
  want = array(ours(function, return_lse=True)[1])
  np.testing.assert_allclose(array(lse).reshape(H, B, SQ).swapaxes(0, 1) if "varlen" in function else array(lse), want, rtol=1e-5)

def with_probabilities(function:str) -> None:
  with_lse(function)
  check_shown_mask(function)

def dropped(function:str) -> None:
  Tensor.manual_seed(3)
  first = array(call_without_cache(function, dropout_p=.5))
  assert np.abs(first - array(call_without_cache(function))).max() > .1
  Tensor.manual_seed(3)
  np.testing.assert_array_equal(array(call_without_cache(function, dropout_p=.5)), first)

SEED, DROPPED_P = np.array([7, 11], np.uint32), .4

def kept_by_mask(mask:Tensor) -> np.ndarray:
  # Returns a bool array, true for each element of P that dropout kept, from S_dmask, FlashAttention's third result.
  # Tests run with NOOPT=1. Without tinygrad's optimizations the kernel that computes S_dmask cannot be lowered.
  with Context(NOOPT=0): return array(mask) >= 0

def check_seed(function:str) -> None:
  # Checks that `function` with dropout_seed gives the result of `attention` with this seed.
  seed = Tensor(SEED, device="EMU")
  got = array(call_without_cache(function, dropout_p=DROPPED_P, dropout_seed=seed))
  want = array(ours(function, dropout_p=DROPPED_P, dropout_seed=seed))
  np.testing.assert_allclose(got.reshape(want.shape), want, rtol=0, atol=2e-3)     # another tile rounds otherwise

def check_shown_mask(function:str) -> None:
  # Checks that the output of `function` is P V, where P has only the elements that the returned S_dmask shows as kept.
  # tinygrad's generator draws the seed.
  q, k, v = (x.astype(np.float64).swapaxes(1, 2) for x in (Q, *((x[:, :SQ].repeat(2, 2) for x in (K, V)) if "qkvpacked" in function else (K, V))))
  k, v = (x.repeat(H//x.shape[1], 1) for x in (k, v))
  o, _, mask = call_without_cache(function, dropout_p=DROPPED_P, return_attn_probs=True)
  assert mask.dtype == o.dtype and mask.shape == (B, H, SQ, k.shape[2])
  scores = np.exp(q @ k.swapaxes(2, 3)*D**-.5)
  p = scores/scores.sum(-1, keepdims=True)*kept_by_mask(mask)/(1 - DROPPED_P)
  np.testing.assert_allclose(array(o).reshape(B, SQ, H, D), (p @ v).swapaxes(1, 2), atol=5e-3)

def window(function:str) -> None:
  agrees({"window": (2, 1)}, window_size=[2, 1])(function)
  agrees({"causal": True, "window": (2, 0)}, window_size=(2, 5), causal=True)(function)
  agrees({}, window_size=(-7, -2))(function)

def softcap(function:str) -> None:
  agrees({"softcap": 5.0}, softcap=5.0)(function)
  agrees({}, softcap=-1.0)(function)

def check_longest(function:str) -> None:
  # Checks that a max_seqlen larger than the number of rows does not change the result of `function`.
  q = function == "flash_attn_varlen_qkvpacked_func"
  agrees({}, **({"max_seqlen": 99} if q else {"max_seqlen_q": 99, "max_seqlen_k": 999}))(function)

def check_pages(function:str) -> None:
  # Checks that keys and values in pages of 6 rows, in another order, give the same result as without pages.
  pages = [half(x.reshape(2*B, 6, HKV, D)[[3, 0, 1, 2]]) for x in (K, V)]
  o = flash_attn.flash_attn_varlen_func(half(packed_rows(Q)), *pages, int32(*CU_Q), int32(*CU_K), SQ, SK, block_table=int32([1, 2], [3, 0]))
  x = [a.astype(np.float32).swapaxes(1, 2) for a in (Q, K, V)]
  args = D**-.5, (-1, -1), SK - SQ
  got = array(o).reshape(B, SQ, H, D).swapaxes(1, 2)
  assert judge(got, law_of(*x, *args, dtype="float16", out_dtype="float16")[0]).ok

MAIN = agrees({})
OF_ALL: dict[str, tuple[str, Callable[[str], None]]] = {
  "dropout_p": ("dropout whenever it is not 0, with a seed from tinygrad's generator", dropped),
  "softmax_scale": ("1/sqrt(D) by default", agrees({"softmax_scale": .5}, softmax_scale=.5)),
  "causal": ("bottom-right", check_packed), "softcap": ("off at 0 and below", softcap),
  "window_size": ("tuple or list; a negative bound is no bound; with causal the right bound is 0", window),
  "alibi_slopes": ("(H) or (B, H)", lambda f: agrees({"alibi_slopes": Tensor(SLOPES, device="EMU")}, alibi_slopes=Tensor(SLOPES, device="EMU"))(f)),
  "deterministic": ("True: gradients have the same bits in every run; out always has", agrees({}, deterministic=True)),
  "return_attn_probs": ("returns (out, softmax_lse, S_dmask): 1 where dropout keeps an element of P, -1 where not; None without dropout",
                        with_probabilities),
  "dropout_seed": ("a keyword, not FlashAttention's: uint32 (2), decides which elements drop", check_seed)}
TABLE: dict[tuple[str, str], tuple[str, Callable[[str], None]]] = {}
for name, tensors in (("flash_attn_func", {"q": "(B, Sq, H, D)", "k": "(B, Sk, Hkv, D)", "v": "(B, Sk, Hkv, Dv)"}),
                      ("flash_attn_kvpacked_func", {"q": "(B, Sq, H, D)", "kv": "(B, Sk, 2, Hkv, D)"}),
                      ("flash_attn_qkvpacked_func", {"qkv": "(B, S, 3, H, D)"}),
                      ("flash_attn_varlen_func", {"q": "(total_q, H, D)", "k": "(total_k, Hkv, D)", "v": "(total_k, Hkv, Dv)",
                                                  "cu_seqlens_q": "int32 (B + 1)", "cu_seqlens_k": "int32 (B + 1)"}),
                      ("flash_attn_varlen_kvpacked_func", {"q": "(total_q, H, D)", "kv": "(total_k, 2, Hkv, D)", "cu_seqlens_q": "int32 (B + 1)",
                                                           "cu_seqlens_k": "int32 (B + 1)"}),
                      ("flash_attn_varlen_qkvpacked_func", {"qkv": "(total, 3, H, D)", "cu_seqlens": "int32 (B + 1)"})):
  TABLE |= {(name, argument): (text, MAIN) for argument, text in tensors.items()}
  if "varlen" in name:
    names = ("max_seqlen",) if "qkvpacked" in name else ("max_seqlen_q", "max_seqlen_k")
    TABLE |= {(name, argument): ("longest sequence; a number above the number of rows sets no bound", check_longest) for argument in names}
  TABLE |= {(name, argument): x for argument, x in OF_ALL.items()}
TABLE["flash_attn_varlen_func", "block_table"] = ("int32 (B, max_blocks); k and v are then pages (pages, page_size, Hkv, D)", check_pages)

# ***** a cache *****

START = (5, 8)       # rows already in the cache

def call_with_cache(causal:bool=True, start:Any=None, caches:tuple[Tensor, Tensor]|None=None, new:int=2, **more:Any) -> Tensor:
  # Calls `flash_attn_with_kvcache` on the inputs of this file with `new` new rows, and returns the output.
  # `start` has the old length of each batch, and `caches` the key and value caches.
  k_cache, v_cache = caches or [half(x) for x in (K, V)]
  at = int32(*START) if start is None else start
  return flash_attn.flash_attn_with_kvcache(half(Q[:, :new]), k_cache, v_cache, half(Q[:, :new, :HKV]), half(Q[:, :new, 2:]), cache_seqlens=at,
                                            causal=causal, **more)

def caches_after_append(start:tuple[int, ...]=START, new:int=2, k_new:np.ndarray|None=None) -> list[np.ndarray]:
  # Returns the expected contents of the key and value caches after `flash_attn_with_kvcache` has appended `new` rows to each batch.
  # `start` has the first new row of each batch. `k_new` are the new keys.
  out = []
  for cache, rows in ((K, Q[:, :new, :HKV] if k_new is None else k_new), (V, Q[:, :new, 2:])):
    full = cache.copy()
    for b, n in enumerate(start): full[b, n:n + new] = rows[b]
    out.append(full)
  return out

def judged(o:Tensor, q:np.ndarray, k:np.ndarray, v:np.ndarray, ends:tuple[int, ...], window_:tuple[int, int]=(-1, 0),
           starts:tuple[int, ...]=(0, 0)) -> None:
  for b, (first, n) in enumerate(zip(starts, ends)):
    x = [a.astype(np.float32).swapaxes(1, 2) for a in (q[b:b+1], k[b:b+1, first:n], v[b:b+1, first:n])]
    args = D**-.5, window_, n - first - q.shape[1]
    verdict = judge(array(o)[b:b+1].swapaxes(1, 2), law_of(*x, *args, dtype="float16", out_dtype="float16")[0])
    assert verdict.ok, verdict

ENDS = tuple(n + 2 for n in START)

def cache_main(_:str) -> None: judged(call_with_cache(), Q[:, :2], *caches_after_append(), ENDS)
def cache_of_an_int(_:str) -> None: judged(call_with_cache(start=6), Q[:, :2], *caches_after_append((6, 6)), (8, 8))
def cache_full(_:str) -> None:
  o = flash_attn.flash_attn_with_kvcache(*qkv(), causal=True)
  judged(o, Q, K, V, (SK, SK))
def check_more_batches_in_cache(_:str) -> None:
  # Checks calls in which the caches have three batches and the queries two.
  # cache_batch_idx selects two batches of the caches in another order. Without cache_batch_idx, the queries belong to the first two batches.
  larger = [np.concatenate([x[1:], numbers(1, SK, HKV, D, seed=9).astype(np.float16), x[:1]]) for x in (K, V)]
  caches = [half(x) for x in larger]
  judged(call_with_cache(caches=(caches[0], caches[1]), cache_batch_idx=int32(2, 0)), Q[:, :2], *caches_after_append(), ENDS)
  keys = caches_after_append()[0]
  np.testing.assert_array_equal(array(caches[0]), np.stack([keys[1], larger[0][1], keys[0]]).astype(np.float32))
  caches = [half(np.concatenate([x, x[:1]])) for x in (K, V)]
  judged(call_with_cache(caches=(caches[0], caches[1])), Q[:, :2], *caches_after_append(), ENDS)
  np.testing.assert_array_equal(array(caches[0])[:2], caches_after_append()[0].astype(np.float32))
def cache_leftpad(_:str) -> None: judged(call_with_cache(cache_leftpad=int32(2, 5)), Q[:, :2], *caches_after_append(), ENDS, starts=(2, 5))
def cache_in_pages(_:str) -> None:
  k_pages, v_pages = (half(x.reshape(2*B, 6, HKV, D)[[3, 0, 1, 2]]) for x in (K, V))
  judged(call_with_cache(caches=(k_pages, v_pages), block_table=int32([1, 2], [3, 0])), Q[:, :2], *caches_after_append(), ENDS)

def rotated(x:np.ndarray, places:np.ndarray, cos:np.ndarray, sin:np.ndarray, interleaved:bool) -> np.ndarray:
  # Computes the rotary embedding of x in float64 with complex numbers.
  # Two columns are the real and the imaginary part of one complex number, which is multiplied by cos + i sin. `places` has each row's position, the
  # index into `cos` and `sin`. `interleaved` pairs neighbouring columns; otherwise column j is paired with the column half the rotary width further.
  half_, y = cos.shape[1], x.astype(np.float64)
  a, b = (y[..., 0:2*half_:2], y[..., 1:2*half_:2]) if interleaved else (y[..., :half_], y[..., half_:2*half_])
  z = (a + 1j*b)*(cos + 1j*sin)[places][:, :, None]
  if interleaved: y[..., 0:2*half_:2], y[..., 1:2*half_:2] = z.real, z.imag
  else: y[..., :half_], y[..., half_:2*half_] = z.real, z.imag
  return y.astype(np.float16)

def rotary(interleaved:bool, causal:bool=True) -> Callable[[str], None]:
  def run(_:str) -> None:
    angles = np.arange(16)[:, None]*np.array([1., .3, .1, .03])      # for the first 8 of 16 columns
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    caches = [half(x) for x in (K, V)]
    o = call_with_cache(causal, caches=(caches[0], caches[1]), rotary_cos=Tensor(cos, device="EMU"), rotary_sin=Tensor(sin, device="EMU"),
               rotary_interleaved=interleaved)
    at = np.array(START)[:, None] + np.arange(2)
    k_new, q = rotated(Q[:, :2, :HKV], at, cos, sin, interleaved), rotated(Q[:, :2], at if causal else at[:, :1].repeat(2, 1), cos, sin, interleaved)
    got, (k, v) = array(caches[0]), caches_after_append(k_new=k_new)
    np.testing.assert_allclose(got, k.astype(np.float32), rtol=2e-3, atol=2e-3)      # one ulp of half, because the angles are in fp32
    judged(o, q, got.astype(np.float16), v, ENDS, (-1, 0) if causal else (-1, -1))
  return run

def cache_lse(_:str) -> None:
  _, lse = call_with_cache(return_softmax_lse=True)
  assert lse.shape == (B, H, 2) and np.isfinite(array(lse)).all()

def like_ours(theirs:dict[str, Any], options:dict[str, Any]) -> Callable[[str], None]:
  def run(_:str) -> None:
    k_cache, v_cache = (half(x) for x in (K, V))
    new = half(Q[:, :2]), half(Q[:, :2, :HKV]), half(Q[:, :2, 2:])
    want = attn.attention_with_kv_cache(*new, k_cache, v_cache, int32(*START), layout="bshd", **options)
    same_numbers(call_with_cache(**theirs), want)
  return run

OF_A_CACHE = {
  "q": ("(B, Sq, H, D)", cache_main), "k_cache": ("(B or more, capacity, Hkv, D), may be a view of a larger buffer; or pages", cache_main),
  "v_cache": ("like k_cache", cache_main), "k": ("(B, new, Hkv, D), appended in place before anything is read", cache_main),
  "v": ("like k", cache_main),
  "rotary_cos": ("(positions, rotary_dim/2) for an even rotary_dim up to D; rotates q and k; a position for each row of the cache", rotary(True)),
  "rotary_sin": ("like rotary_cos", rotary(True, False)),
  "cache_seqlens": ("int, Variable or int32 (B); without it the caches are full", cache_of_an_int),
  "cache_batch_idx": ("int32 (B); without it the first B batches", check_more_batches_in_cache),
  "cache_leftpad": ("int32 (B), also with block_table", cache_leftpad),
  "block_table": ("int32 (B, max_blocks), for pages of any size", cache_in_pages),
  "softmax_scale": ("1/sqrt(D) by default", like_ours({"softmax_scale": .5}, {"softmax_scale": .5})),
  "causal": ("bottom-right", like_ours({"causal": False}, {"causal": False})),
  "window_size": ("as in flash_attn_func", like_ours({"window_size": [3, 4]}, {"window": (3, 0)})),
  "softcap": ("off at 0 and below", like_ours({"softcap": -2}, {})),
  "rotary_interleaved": ("True: pairs of neighbouring columns; False: pairs across the two halves", rotary(False)),
  "alibi_slopes": ("(H) or (B, H)", lambda f: like_ours(*[{"alibi_slopes": Tensor(SLOPES, device="EMU")}]*2)(f)),
  "num_splits": ("0: chosen by a heuristic", like_ours({"num_splits": 1}, {"num_splits": 1})),
  "return_softmax_lse": ("returns (out, softmax_lse); a row that sees no key has lse -inf, in FlashAttention +inf", cache_lse)}
TABLE |= {("flash_attn_with_kvcache", argument): x for argument, x in OF_A_CACHE.items()}

BY_DEFAULT = {("flash_attn_func", "window_size"), ("flash_attn_kvpacked_func", "dropout_seed"),
              ("flash_attn_varlen_qkvpacked_func", "return_attn_probs"), ("flash_attn_varlen_qkvpacked_func", "max_seqlen"),
              ("flash_attn_varlen_kvpacked_func", "causal"),
              ("flash_attn_with_kvcache", "cache_batch_idx"), ("flash_attn_with_kvcache", "cache_leftpad"), ("flash_attn_with_kvcache", "rotary_sin"),
              ("flash_attn_with_kvcache", "rotary_interleaved"), ("flash_attn_with_kvcache", "block_table")}

@pytest.mark.sample(5)
@pytest.mark.parametrize("function, argument", [pytest.param(*x, marks=() if x in BY_DEFAULT else pytest.mark.thorough) for x in TABLE])
def test_argument(function:str, argument:str) -> None:
  with emulated("gfx942"): TABLE[function, argument][1](function)

def table_of_arguments() -> str:
  # Builds the table of arguments in docs/flash_attention.md.
  lines = ["| function | argument | here |", "|---|---|---|"]
  return "\n".join([*lines, *(f"| {function} | {argument} | {text} |" for (function, argument), (text, _) in TABLE.items())]) + "\n"

def test_the_table_has_every_argument_and_is_in_the_document() -> None:
  # The table in docs/flash_attention.md lists every argument of FlashAttention's functions. `python test/api/test_flash_attn.py` makes this table.
  functions = {name: f for name, f in vars(flash_attn).items() if name.startswith("flash_attn_")}
  for name, f in functions.items():
    assert {argument for function, argument in TABLE if function == name} == set(inspect.signature(f).parameters), name
  assert table_of_arguments() in DOCUMENT.read_text()

OPTIONS_OF_ALL = ["dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "deterministic", "return_attn_probs"]

@pytest.mark.parametrize("function, tensors", [
  (flash_attn.flash_attn_func, ["q", "k", "v"]), (flash_attn.flash_attn_kvpacked_func, ["q", "kv"]), (flash_attn.flash_attn_qkvpacked_func, ["qkv"]),
  (flash_attn.flash_attn_varlen_kvpacked_func, ["q", "kv", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]),
  (flash_attn.flash_attn_varlen_qkvpacked_func, ["qkv", "cu_seqlens", "max_seqlen"])], ids=lambda x: getattr(x, "__name__", ""))
def test_signatures_are_those_of_flash_attention(function:Callable[..., Any], tensors:list[str]) -> None:
  # Positional arguments have FlashAttention's names and order. An unknown argument raises a TypeError that names the called function.
  by_place = [name for name, x in inspect.signature(function).parameters.items() if x.kind is x.POSITIONAL_OR_KEYWORD]
  assert by_place == tensors + OPTIONS_OF_ALL
  with pytest.raises(TypeError, match=rf"^{function.__name__}\(\) got an unexpected keyword argument 'dropout'"):
    function(*[None for _ in tensors], dropout=.1)

def test_positions_are_on_every_device_that_shares_the_heads() -> None:
  angles = [Tensor(numbers(16, 4), device="EMU").realize()]*2
  def call(place:Callable[[Tensor], Tensor]) -> Tensor:
    q, k, v, *caches = (place(half(x)).realize() for x in (Q[:, :2], K[:, :2], V[:, :2], K, V))
    o = flash_attn.flash_attn_with_kvcache(q, *caches, k, v, rotary_cos=angles[0], rotary_sin=angles[1], cache_seqlens=int32(*START), causal=True)
    return whole_tensor(o)
  with emulated("gfx942"): same_numbers(call(lambda t: t.shard(("EMU:0", "EMU:1"), 2)), call(lambda t: t))

def test_refused() -> None:
  with emulated("gfx942"):
    q, cache, n = draw(B, 2, H, D), [draw(B, SK, HKV, D).contiguous() for _ in range(2)], int32(*START)
    new, cos = draw(B, 2, HKV, D), draw(16, 4, dtype="float32")
    def call(**more:Any) -> Any: return lambda: flash_attn.flash_attn_with_kvcache(q, *cache, new, new, cache_seqlens=n, **more)
    varlen, wide, short = flash_attn.flash_attn_varlen_func, draw(SK, 9, dtype="float32"), cos[:SK - 1]
    packed, qkv_rows = flash_attn.flash_attn_varlen_qkvpacked_func, draw(4, 3, H, D)
    for what, text in (
      (call(rotary_cos=cos), "rotary_sin=None: must both be Tensors"),
      (call(rotary_cos=cos, rotary_sin=cos[:3]), r"shapes \(16, 4\) and \(3, 4\)"),
      (call(rotary_cos=cos[:, :0], rotary_sin=cos[:, :0]), r"rotary_cos has shape \(16, 0\): both dimensions must be at least 1"),
      (call(rotary_cos=cos.to("EMU:1"), rotary_sin=cos), "rotary_cos is on EMU:1 but q on EMU"),
      (call(rotary_cos=short, rotary_sin=short), rf"rotary_cos has {SK - 1} positions: must have at least {SK}"),
      (call(rotary_cos=wide, rotary_sin=wide), r"its second size must be at most half of the 16 columns of q"),
      (lambda: flash_attn.flash_attn_with_kvcache(q, *cache, cache_seqlens=n, rotary_cos=cos, rotary_sin=cos), "rotary_cos without new rows"),
      (lambda: flash_attn.flash_attn_with_kvcache(q, *cache, n, new, cos, cos, n), r"k has shape \(2,\): must be \(B, S, H, D\)"),
      (lambda: flash_attn.flash_attn_with_kvcache(q, *cache, new.to("EMU:1"), new, cos, cos, n), "k is on EMU:1 but q on EMU"),
      (call(rotary_cos=cos, rotary_sin=cos, block_table=q), r"block_table has shape .*: must be \(B, max_blocks\)"),
      (call(cache_batch_idx=int32(0)), r"cache_batch_idx has shape \(1,\): must be \(2,\)"),
      (call(cache_batch_idx=int32(0, 5)), r"cache_batch_idx=\[0, 5\]: must lie in 0..1, the batches of k_cache"),
      (call(cache_batch_idx=int32(-1, 1)), r"cache_batch_idx=\[-1, 1\]: must lie in 0..1"),
      (lambda: flash_attn.flash_attn_with_kvcache(q, *cache, new, new, cos, cos, int32(1, 2, 3)), r"cache_seqlens has shape \(3,\): must be \(2,\)"),
      (lambda: flash_attn.flash_attn_with_kvcache(q, *cache, new, new, cos, cos, n.float()), "cache_seqlens has dtype float32"),
      (call(cache_leftpad=cos), "cache_leftpad has dtype float32"), (call(window_size=(1, 2, 3)), r"window_size=\(1, 2, 3\)"),
      (call(cache_batch_idx=n, block_table=int32([0], [1])), "cache_batch_idx with block_table"),
      (lambda: packed(q, n, 3), r"qkv has shape \(2, 2, 4, 16\): must be \(total, 3, H, D\)"), (lambda: packed(n, n, 3), "qkv has dtype int32"),
      (lambda: packed(qkv_rows, n.float(), 3), "_qkvpacked_func: cu_seqlens has dtype float32"),
      (lambda: packed(qkv_rows, n[:1], 3), r"_qkvpacked_func: cu_seqlens has shape \(1,\)"),
      (lambda: packed(qkv_rows, int32(0, 2, 9), 3), r"_qkvpacked_func: cu_seqlens=\[0, 2, 9\]: must not decrease, and must lie in 0\.\.4"),
      (lambda: packed(qkv_rows, int32(0, 1, 4), 2), "_qkvpacked_func: max_seqlen=2: cu_seqlens has a sequence of 3 rows"),
      (lambda: packed(qkv_rows, int32(0, 1, 4), 0), "_qkvpacked_func: max_seqlen=0: must be"),
      (lambda: flash_attn.flash_attn_kvpacked_func(q, n), "kv has dtype int32"),
      (lambda: flash_attn.flash_attn_kvpacked_func(q, cache[0]), r"kv has shape \(2, 12, 2, 16\): must be \(B, Sk, 2, Hkv, D\)"),
      (lambda: varlen(q[0], *cache, int32(0, 2), n.float(), 2, 3, block_table=int32([0])), "cu_seqlens_k has dtype float32")):
      with pytest.raises((ValueError, NotImplementedError), match=text): what()

if __name__ == "__main__":
  head, tail = DOCUMENT.read_text().split("| function | argument | here |")
  DOCUMENT.write_text(head + table_of_arguments() + tail[tail.index("\n\n") + 1:])
