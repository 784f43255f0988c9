"""Tests of the key/value cache: append in place, lengths that the host knows or that only the device knows, decoding under TinyJit, and overflow."""
import numpy as np
import pytest
from tinygrad import TinyJit, Variable
import attn
from attn import flash_attn
from attn.accuracy import judge, law_of
from attn.api.cache import append_kv, attention_with_kv_cache, empty_kv_cache
from attn.tinygrad_compat import Tensor, dtypes
from api_cases import draw, emulated, whole
from cases import EVERY_ARCH, arrange, array, restore, tensor

pytestmark = pytest.mark.usefixtures("not_unrolled")

B, H, HKV, D, CAPACITY = 2, 4, 2, 32, 160
DEVICES = ("EMU:0", "EMU:1")

def lengths(*n): return Tensor(list(n), dtype=dtypes.int, device="EMU").realize()

def poisoned(layout="bhsd", capacity=CAPACITY, dtype=dtypes.half):
  # Creates a key cache and a value cache full of NaN.
  shape = {"bhsd": (B, HKV, capacity, D), "bshd": (B, capacity, HKV, D), "nsd": (B*HKV, capacity, D)}[layout]
  return [Tensor.full(shape, float("nan"), dtype=dtype, device="EMU").contiguous().realize() for _ in range(2)]

def check_output(got, q, k, v, dtype="float16"):
  # Checks that each element of `got`, causal attention of `q` over `k` and `v`, is within its error limit (docs/contract.md).
  args = (q.shape[-1]**-.5, (-1, 0), k.shape[2] - q.shape[2])
  verdict = judge(got, law_of(q, k, v, *args, dtype=dtype, out_dtype=dtype)[0])
  assert verdict.ok, verdict

@pytest.mark.parametrize("layout", ("bhsd", "bshd", "nsd"))
@pytest.mark.parametrize("new", (1, 5))
def test_rows_land_where_they_belong(layout, new):
  with emulated("gfx942"):
    caches = poisoned(layout)
    rows = [np.random.default_rng(i).standard_normal((B, HKV, new, D)).astype(np.float16) for i in range(2)]
    start = (7, 150) if layout != "nsd" else (7,)
    heads = HKV if layout != "nsd" else B*HKV
    n = append_kv(*(tensor(arrange(x, layout), "float16") for x in rows), *caches, lengths(*start), layout=layout)
    assert n.tolist() == [x + new for x in start]
    for x, cache in zip(rows, caches):
      got = restore(array(cache), layout, (B, HKV, CAPACITY, D)).reshape(-1, heads, CAPACITY, D)
      want = np.full_like(got, np.nan)
      for b, at in enumerate(start): want[b, :, at:at + new] = x.reshape(-1, heads, new, D)[b]
      np.testing.assert_array_equal(got, want)

@pytest.mark.sample(2)
@pytest.mark.parametrize("arch", EVERY_ARCH)
def test_decoding_is_the_uncached_computation(arch):
  # Decoding with a cache gives the result of attention without a cache at every position. The cache is full of NaN at first. The test appends a
  # prompt of 60 rows, then single rows under TinyJit at an offset that a Variable gives.
  with emulated(arch):
    q, k, v = (np.random.default_rng(i).standard_normal((B, h, 90, D)).astype(np.float16) for i, h in enumerate((H, HKV, HKV)))
    k_cache, v_cache = poisoned()
    captured = []
    def step(q, k, v, position):
      captured.append(position)
      return attention_with_kv_cache(q, k, v, k_cache, v_cache, position).realize()
    jitted, position = TinyJit(step), Variable("position", 0, CAPACITY - 1)
    part = lambda x, i, j: tensor(x[:, :, i:j], "float16").realize()
    full = [x.astype(np.float32) for x in (q, k, v)]
    check_output(array(step(*(part(x, 0, 60) for x in (q, k, v)), 0)), *(x[:, :, :60] for x in full))
    for i in range(60, 90):
      got = array(jitted(*(part(x, i, i + 1) for x in (q, k, v)), position.bind(i)))
      check_output(got, full[0][:, :, i:i+1], *(x[:, :, :i+1] for x in full[1:]))
    assert len(captured) == 3     # the prompt, the first step, and its capture
    assert np.isnan(array(k_cache)[:, :, 90:]).all() and np.isnan(array(v_cache)[:, :, 90:]).all()

@pytest.mark.parametrize("kernel", ("forward", "split_kv", "three_pass"))
def test_lengths_of_each_batch(kernel):
  with emulated("gfx942", kernel):
    k_cache, v_cache = poisoned()
    old, more = (0, 121), {"num_splits": 2} if kernel == "split_kv" else {}
    k, v = (np.random.default_rng(i).standard_normal((B, HKV, 130, D)).astype(np.float16) for i in range(2))
    for cache, x in ((k_cache, k), (v_cache, v)):
      data = array(cache)
      for b, n in enumerate(old): data[b, :, :n] = x[b, :, :n]
      cache.assign(tensor(data, "float16")).realize()
    q = np.random.default_rng(2).standard_normal((B, H, 9, D)).astype(np.float16)
    new = [tensor(np.stack([x[b, :, n:n + 9] for b, n in enumerate(old)]), "float16") for x in (k, v)]
    o = array(attention_with_kv_cache(tensor(q, "float16"), *new, k_cache, v_cache, lengths(*old), **more))
    for b, n in enumerate(old): check_output(o[b:b+1], *(x.astype(np.float32) for x in (q[b:b+1], k[b:b+1, :, :n + 9], v[b:b+1, :, :n + 9])))

def test_lengths_in_a_tensor_under_jit():
  with emulated("gfx942"):
    q, k, v = (np.random.default_rng(i).standard_normal((B, h, 20, D)).astype(np.float16) for i, h in enumerate((H, HKV, HKV)))
    k_cache, v_cache = empty_kv_cache(B, HKV, CAPACITY, D)
    step = TinyJit(lambda q, k, v, n: attention_with_kv_cache(q, k, v, k_cache, v_cache, n).realize())
    for i in range(6):
      o = array(step(*(tensor(x[:, :, i:i+1], "float16").realize() for x in (q, k, v)), lengths(i, i)))
      check_output(o, *(x.astype(np.float32) for x in (q[:, :, i:i+1], k[:, :, :i+1], v[:, :, :i+1])))

# ***** overflow *****

def test_an_overflow_that_the_host_knows_of_is_an_error():
  with emulated("gfx942"):
    k_cache, v_cache = empty_kv_cache(B, HKV, 8, D)
    new = draw(B, HKV, 3, D)
    n = Variable("n", 0, 100)
    for start in (6, n.bind(6)):
      with pytest.raises(ValueError, match=r"cache_seqlens=6: with 3 new rows that is more than the 8 that the cache holds"):
        append_kv(new, new, k_cache, v_cache, start)
    with pytest.raises(ValueError, match=r"cache_seqlens=-1: must lie in 0\.\.8"): append_kv(new, new, k_cache, v_cache, -1)
    with pytest.raises(ValueError, match=r"k_new has 9 rows: k_cache holds 8"): append_kv(draw(B, HKV, 9, D), new, k_cache, v_cache, 0)
    assert (array(k_cache) == 0).all()
    assert append_kv(new, new, k_cache, v_cache, 5).tolist() == [8, 8]

def test_an_overflow_that_only_the_device_knows_of_writes_nothing_beyond():
  # If only the device knows the length, append drops rows beyond the capacity of the cache. The emulator checks that no access is out of bounds, and
  # the rows next to the cache in its buffer do not change.
  with emulated("gfx942"):
    k_cache, v_cache = poisoned(capacity=8)
    new = draw(B, HKV, 3, D)
    assert append_kv(new, new, k_cache, v_cache, lengths(6, 100)).tolist() == [8, 8]
    got = array(k_cache)
    np.testing.assert_array_equal(got[0, :, 6:], array(new)[0, :, :2])
    assert np.isnan(got[0, :, :6]).all() and np.isnan(got[1]).all()
    append_kv(new, new, k_cache, v_cache, lengths(-2, -1000))
    got = array(k_cache)
    np.testing.assert_array_equal(got[0, :, 0], array(new)[0, :, 2])
    assert np.isnan(got[0, :, 1:6]).all() and np.isnan(got[1]).all()

def test_a_variable_beyond_the_cache_under_jit_writes_nothing():
  with emulated("gfx942"):
    k_cache, v_cache = empty_kv_cache(B, HKV, 4, D)
    new, n = draw(B, HKV, 1, D).realize(), Variable("n", 0, 100)
    step = TinyJit(lambda new, n: append_kv(new, new, k_cache, v_cache, n).realize())
    for i in range(4):
      assert step(new, n.bind(i)).tolist() == [min(i + 1, 4)]*B
      for cache in (k_cache, v_cache):
        np.testing.assert_array_equal(array(cache)[:, :, :i + 1], np.broadcast_to(array(new), (B, HKV, i + 1, D)))
        assert not array(cache)[:, :, i + 1:].any()
    before = array(k_cache)
    assert step(new, n.bind(9)).tolist() == [4]*B
    np.testing.assert_array_equal(array(k_cache), before)

# ***** refused calls *****

def test_refused():
  with emulated("gfx942"):
    k_cache, v_cache = empty_kv_cache(B, HKV, 8, D)
    new = draw(B, HKV, 1, D)
    for call, text in (
      (lambda: append_kv(draw(B, HKV, 1, 16), new, k_cache, v_cache, 0),
       r"k_new has shape \(2, 2, 1, 16\): must be that of k_cache, \(2, 2, 8, 32\)"),
      (lambda: append_kv(new[:, :, :0], new[:, :, :0], k_cache, v_cache, 0), r"k_new has shape \(2, 2, 0, 32\): every dimension must be at least 1"),
      (lambda: append_kv(new.float(), new, k_cache, v_cache, 0), "k_new has dtype float32: must be that of k_cache, float16"),
      (lambda: append_kv(new, draw(B, HKV, 2, D), k_cache, v_cache, 0), "v_new and v_cache have 2 and 8 rows"),
      (lambda: append_kv(new, new, k_cache, v_cache, 0.5), "cache_seqlens=0.5: must be an int, a Variable or an int32 Tensor"),
      (lambda: append_kv(new, new, k_cache, v_cache, Tensor([1., 2.], device="EMU")), "cache_seqlens has dtype float32: must be int32"),
      (lambda: append_kv(new, new, k_cache, v_cache, lengths(1, 2, 3)), r"cache_seqlens has shape \(3,\): must be \(2,\)"),
      (lambda: append_kv(new, new, k_cache, v_cache, 0, layout="thd"), "layout='thd': must be one of 'bhsd', 'bshd', 'nsd'"),
      (lambda: empty_kv_cache(B, HKV, 8, D, layout="nsd"), "layout='nsd': must be one of 'bhsd', 'bshd'"),
      (lambda: append_kv(new, new, k_cache, v_cache, Tensor(3, dtype=dtypes.int)), r"cache_seqlens has shape \(\): must be \(2,\)"),
      (lambda: attention_with_kv_cache(draw(B, H, 1, D), new, new, k_cache, v_cache, 0, kv_lengths=3), "kv_lengths with a cache"),
      (lambda: attention_with_kv_cache(draw(B, H, 1, D), new, new, k_cache, v_cache, 0, sequence_order="zigzag"),
       "sequence_order with a cache: caches are not sharded"),
      (lambda: flash_attn.flash_attn_with_kvcache(draw(B, 1, H, D), k_cache, v_cache, k=new), "v=None: must both be Tensors"),
    ):
      with pytest.raises(ValueError, match=text): call()

# ***** several devices, and FlashAttention's name *****

@pytest.mark.parametrize("axis", (0, 1))
def test_a_cache_on_two_devices(axis):
  # A cache sharded over two devices along batch or heads accepts the old length as an int, as a tensor and as a Variable. In an earlier version, an
  # int applied only to the batches of one device.
  with emulated("gfx942"):
    q, k, v = (np.random.default_rng(i).standard_normal((B, h, 10, D)).astype(np.float16) for i, h in enumerate((H, HKV, HKV)))
    k_cache, v_cache = (t.shard(DEVICES, axis).realize() for t in poisoned())
    part = lambda x, i, j: tensor(x[:, :, i:j], "float16").shard(DEVICES, axis).realize()
    for i, j, there in ((0, 8, 0), (8, 9, lengths(8, 8)), (9, 10, Variable("position", 0, CAPACITY - 1).bind(9))):
      o = whole(attention_with_kv_cache(*(part(x, i, j) for x in (q, k, v)), k_cache, v_cache, there))
      check_output(array(o), *(x.astype(np.float32) for x in (q[:, :, i:j], k[:, :, :j], v[:, :, :j])))

def test_flash_attn_with_kvcache():
  with emulated("gfx942"):
    caches, others = empty_kv_cache(B, HKV, 40, D, layout="bshd"), empty_kv_cache(B, HKV, 40, D, layout="bshd")
    q, k, v = draw(B, 3, H, D), draw(B, 3, HKV, D, seed=1), draw(B, 3, HKV, D, seed=2)
    n = lengths(4, 11)
    o, lse = flash_attn.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=n, causal=True, return_softmax_lse=True)
    np.testing.assert_array_equal(array(o), array(attention_with_kv_cache(q, k, v, *others, n, layout="bshd")))
    again = flash_attn.flash_attn_with_kvcache(q, *caches, cache_seqlens=n + 3, causal=True)
    np.testing.assert_array_equal(array(again), array(o))
    assert lse.shape == (B, H, 3)
    with pytest.raises(ValueError, match="cache_seqlens=None"): flash_attn.flash_attn_with_kvcache(q, *caches, k, v)
    assert attn.empty_kv_cache is empty_kv_cache

# ***** caches that are parts of larger buffers *****

@pytest.mark.sample(2)
@pytest.mark.parametrize("name, arch", [("K and V in one", "sm_80"), ("interleaved", "gfx942"), ("rows apart", "gfx1201")])
def test_caches_in_one_buffer(name, arch):
  # Two caches may be views of one buffer. Appended rows then appear in the buffer and in a view that was made earlier. All other elements of the
  # buffer are NaN and do not change.
  with emulated(arch):
    shape = {"K and V in one": (2, B, HKV, 24, D), "interleaved": (B, HKV, 24, 2, D), "rows apart": (B, HKV, 24, 3, D + 4)}[name]
    base = Tensor.full(shape, float("nan"), dtype=dtypes.half, device="EMU").contiguous().realize()
    def part(i): return base[i] if name == "K and V in one" else base[:, :, :, i, :D]
    (k_cache, v_cache), earlier = (part(0), part(1)), part(0)
    q, k, v = (np.random.default_rng(i).standard_normal((B, h, 9, D)).astype(np.float16) for i, h in enumerate((H, HKV, HKV)))
    for i, j in ((0, 5), (5, 9)):
      o = attention_with_kv_cache(*(tensor(x[:, :, i:j], "float16") for x in (q, k, v)), k_cache, v_cache, lengths(i, i))
      check_output(array(o), *(x.astype(np.float32) for x in (q[:, :, i:j], k[:, :, :j], v[:, :, :j])))
    whole_base = array(base)
    for i, want in ((0, k), (1, v)):
      got = whole_base[i] if name == "K and V in one" else whole_base[:, :, :, i, :D]
      np.testing.assert_array_equal(got[:, :, :9], want)
      assert np.isnan(got[:, :, 9:]).all()
    assert np.isnan(whole_base).sum() == whole_base.size - k.size - v.size
    np.testing.assert_array_equal(array(earlier)[:, :, :9], k)

def test_views_that_are_no_cache():
  with emulated("gfx942"):
    base = Tensor.zeros(2, B, HKV, 24, D, dtype=dtypes.half, device="EMU").contiguous().realize()
    new = draw(B, HKV, 2, D)
    for k_cache, v_cache, text in (
      (base[0], base[0], "k_cache and v_cache overlap"), (base[0, :, :, :12], base[0, :, :, 11:23], "k_cache and v_cache overlap"),
      (base[0, :1].expand(B, HKV, 24, D), base[1], "k_cache is expanded along its batch"),
      (base[0]*2, base[1], "k_cache is a computed value, or a view whose rows"), (base[0].flip(2), base[1], "k_cache is a computed value")):
      with pytest.raises(ValueError, match=text): append_kv(new, new, k_cache, v_cache, 0)
    append_kv(new, new, base[0, :, :, :12], base[0, :, :, 12:], 3)
    got = array(base)
    np.testing.assert_array_equal(got[0, :, :, 3:5], array(new))
    np.testing.assert_array_equal(got[0, :, :, 15:17], array(new))
    assert np.count_nonzero(got) == 2*array(new).size

def test_an_argument_error_leaves_the_cache_as_it_was():
  with emulated("gfx942"):
    k_cache, v_cache = poisoned(capacity=8)
    q, new, table = draw(B, H, 1, D), draw(B, HKV, 1, D), Tensor([[0], [1]], dtype=dtypes.int, device="EMU")
    before = k_cache.uop, v_cache.uop
    for options in (dict(softcap=-1.0), dict(causal="left"), dict(window=(3,)), dict(sinks=draw(H + 1)), dict(alibi_slopes=draw(3)),
                    dict(num_splits=999), dict(arch="gfx950"), dict(bias=draw(1, 1, 1, 5)), dict(out=draw(1)), dict(out_dtype="int8"),
                    dict(kv_starts=lengths(1)), dict(block_table=table), dict(nonsense=1)):
      with pytest.raises((ValueError, NotImplementedError)): attention_with_kv_cache(q, new, new, k_cache, v_cache, 0, **options)
    with pytest.raises((ValueError, NotImplementedError)): attention_with_kv_cache(draw(B, H, 1, 16), new, new, k_cache, v_cache, 0)
    assert (k_cache.uop, v_cache.uop) == before
