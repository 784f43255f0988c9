"""Tests of keys and values in pages: attention and append through a block table on every matrix unit, and wrong block tables, which the emulator
reports."""
from __future__ import annotations
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
import numpy as np
import pytest
from tinygrad import TinyJit
import attn
from attn import flash_attn
from attn.accuracy import judge, law_of
from attn.emulator.checks import BadEntry, SharedSlot
from attn.kernels.append import Append, append
from attn.problem import Pages, Strided
from attn.reference import Options
from attn.tinygrad_compat import Context, Ops, Tensor, UOp, compiled, dtypes
from tinygrad.engine.realize import get_call_arg_uops
from api_cases import draw, emulated, run_on_a_cpu, whole
from cases import EVERY_ARCH, array, arrange, restore, tensor

H, HKV, D = 4, 2, 32
NO_PAGE = 10**9     # in table entries that no kernel may read

def int32(x:Any, device:str="EMU") -> Tensor: return Tensor(np.array(x, np.int32), device=device).realize()

@dataclass(frozen=True)
class Paged:
  # Keys and values of sequences with the given `lengths`: as plain arrays, and in `pages` in random order.
  # Elements of pages that belong to no sequence are NaN.
  lengths: tuple[int, ...]
  k: np.ndarray
  v: np.ndarray
  pages: tuple[np.ndarray, np.ndarray]
  table: np.ndarray
  @staticmethod
  def of(lengths:tuple[int, ...], size:int, d:int=D, seed:int=0) -> Paged:
    rng, most = np.random.default_rng(seed), -(-max(lengths)//size) + 1
    k, v = (rng.standard_normal((len(lengths), HKV, max(lengths), d)).astype(np.float16) for _ in range(2))
    table = rng.permutation(len(lengths)*most + 2)[:len(lengths)*most].reshape(len(lengths), most).astype(np.int32)
    pages = tuple(np.full((len(lengths)*most + 2, size, HKV, d), np.nan, np.float16) for _ in range(2))
    for to, x in zip(pages, (k, v)):
      for b, n in enumerate(lengths):
        for j in range(n): to[table[b, j//size], j%size] = x[b, :, j]
    for b, n in enumerate(lengths): table[b, -(-n//size):] = NO_PAGE
    return Paged(lengths, k, v, (pages[0], pages[1]), table)
  def tensors(self, device:str="EMU") -> list[Tensor]: return [tensor(x, "float16", device).realize() for x in self.pages]

def check_output(got:np.ndarray, q:np.ndarray, x:Paged, window:tuple[int, int]=(-1, 0), **options:Any) -> None:
  # Checks that each element of `got`, attention of `q` over the paged sequences `x`, is within its error limit (docs/contract.md).
  # `options` are score options, such as softcap.
  for b, n in enumerate(x.lengths):
    one = [a.astype(np.float32) for a in (q[b:b+1], x.k[b:b+1, :, :n], x.v[b:b+1, :, :n])]
    args, more = (q.shape[-1]**-.5, window, n - q.shape[2]), {"options": Options(**options)} if options else {}
    verdict = judge(got[b:b+1], law_of(*one, *args, dtype="float16", out_dtype="float16", **more)[0])
    assert verdict.ok, f"sequence {b} of {n} keys: {verdict}"

CASES = (   # page size, queries, lengths, head dimension, arguments, chip that runs the case by default
  (7, 3, (70, 33), D, {}, "sm_80"), (16, 1, (70, 0), D, {"num_splits": 2}, "gfx942"), (64, 70, (200, 130), D, {}, "sm_90"),
  (16, 1, (70, 33), 20, {}, "gfx1201"), (7, 3, (20, 9), 16, {}, "gfx1030"), (1, 1, (70, 33), D, {}, None),
  (128, 1, (200, 33), D, {"num_splits": 2}, None), (32, 40, (100, 61), D, {}, None), (3, 5, (30,), 3, {}, "gfx1030"))

@pytest.mark.sample(3)
@pytest.mark.parametrize("page, Sq, lengths, d, options, arch", [
  pytest.param(*case[:-1], arch, marks=() if arch == case[-1] else pytest.mark.thorough)
  for case in CASES for arch in (*EVERY_ARCH, "sm_90", "gfx1030")])
def test_attention(page:int, Sq:int, lengths:tuple[int, ...], d:int, options:dict[str, Any], arch:str) -> None:
  # Attention over pages of any size is right with fewer and with more queries than a tile, with rows that do not fill 16-byte units, and with splits.
  # The output of a sequence of length 0 is 0.
  x, q = Paged.of(lengths, page, d), np.random.default_rng(5).standard_normal((len(lengths), H, Sq, d)).astype(np.float16)
  with emulated(arch):
    o = array(attn.attention(tensor(q, "float16"), *x.tensors(), block_table=int32(x.table), kv_lengths=int32(lengths), causal=True, **options))
  if 0 in lengths: assert (o[lengths.index(0)] == 0).all()
  check_output(o, q, x) if 0 not in lengths else check_output(o[:1], q[:1], Paged(lengths[:1], x.k, x.v, x.pages, x.table))

@pytest.mark.parametrize("layout, arch", [("bshd", "gfx942"), pytest.param("nsd", "sm_80", marks=pytest.mark.thorough)])
def test_with_options_in_any_layout(layout:str, arch:str) -> None:
  # A window, softcap, sinks and packed GQA work in any layout over pages that are views of one tensor. The fallback three_pass, which computes
  # attention in tinygrad's tensor operations, is right, too.
  x, q = Paged.of((9, 5), 4), np.random.default_rng(5).standard_normal((2, H, 2, D)).astype(np.float16)
  sinks = np.random.default_rng(6).standard_normal(H).astype(np.float32)
  for kernel in ("", "three_pass"):
    with emulated(arch, kernel):
      both = tensor(np.stack(x.pages, 1), "float16").realize()
      o = attn.attention(tensor(arrange(q, layout), "float16"), both[:, 0], both[:, 1], layout=layout, block_table=int32(x.table),
                         kv_lengths=int32(x.lengths), window=(6, 0), softcap=20.0, sinks=Tensor(sinks, device="EMU"))
      check_output(restore(array(o), layout, q.shape), q, x, (6, 0), softcap=20.0, sinks=sinks)

@pytest.mark.parametrize("arch", [pytest.param(a, marks=() if a == "sm_80" else pytest.mark.thorough) for a in EVERY_ARCH])
def test_a_prefix_that_two_sequences_share(arch:str) -> None:
  # Two sequences share their first two pages. Each sequence then grows in pages of its own, one row at a time under TinyJit. Each result equals the
  # result of the sequence without the other.
  rng = np.random.default_rng(3)
  prefix = [rng.standard_normal((1, h, 16, D)).astype(np.float16) for h in (HKV, HKV)]
  own = [rng.standard_normal((2, h, 4, D)).astype(np.float16) for h in (H, HKV, HKV)]
  with emulated(arch):
    k_pages, v_pages = attn.empty_paged_cache(6, 8, HKV, D, device="EMU")
    table = int32([[4, 1, 2, NO_PAGE], [4, 1, 5, NO_PAGE]])
    attn.append_kv(*(tensor(x, "float16") for x in prefix), k_pages, v_pages, 0, block_table=int32([[4, 1]]))
    step = TinyJit(lambda q, k, v, n: attn.attention_with_kv_cache(q, k, v, k_pages, v_pages, n, block_table=table).realize())
    for i in range(4):
      o = array(step(*(tensor(x[:, :, i:i+1], "float16").realize() for x in own), int32([16 + i]*2)))
      k, v = (np.concatenate([p.repeat(2, 0), x[:, :, :i+1]], 2) for p, x in zip(prefix, own[1:]))
      check_output(o, own[0][:, :, i:i+1], Paged((17 + i, 17 + i), k, v, (k, v), np.zeros(0)))
    assert not array(k_pages)[[0, 3]].any() and not array(v_pages)[[0, 3]].any()

@pytest.mark.parametrize("count, arch, kernel", [(2, "sm_90", ""), pytest.param(4, "gfx942", "", marks=pytest.mark.thorough),
                                                 pytest.param(2, "gfx942", "three_pass", marks=pytest.mark.thorough)])
def test_heads_on_several_devices(count:int, arch:str, kernel:str) -> None:
  # Attention over pages is right if the heads are divided over devices: each device holds its own heads of every page, and the whole block table.
  # Pages that are divided in another way are refused.
  devices, rng = tuple(f"EMU:{i}" for i in range(count)), np.random.default_rng(3)
  old, new = ([rng.standard_normal((2, h, n, D)).astype(np.float16) for h in (8, 4, 4)] for n in (8, 1))
  pages = [np.concatenate([np.zeros((4, 8, 4, D), np.float16), x.transpose(0, 2, 1, 3)]) for x in old[1:]]      # the rows lie in pages 4 and 5
  def shard(x:np.ndarray, axis:int|None=1) -> Tensor: return tensor(x, "float16", devices[0]).shard(devices, axis).realize()
  with emulated(arch, kernel):
    k_pages, v_pages = (shard(x, 2) for x in pages)
    q, k_new, v_new = map(shard, new)
    table = int32([[4, 1], [5, 2]], devices[0])
    o = attn.attention_with_kv_cache(q, k_new, v_new, k_pages, v_pages, int32([8, 8], devices[0]), block_table=table)
    assert (o.device, o.uop.axis) == (k_pages.device, 1) and len(o.device) == count
    k, v = (np.concatenate([x, y], 2) for x, y in zip(old[1:], new[1:]))
    check_output(array(whole(o)), new[0], Paged((9, 9), k, v, (k, v), np.zeros(0)))
    for axis in (1, None):
      with pytest.raises(NotImplementedError, match=f"q: axis 1, k: axis {axis}, v: axis 2 sharded, with block_table and layout='bhsd': shard"):
        attn.attention(q, shard(pages[0], axis), v_pages, block_table=table, kv_lengths=9)
    assert attn.empty_paged_cache(6, 8, 4, D, device=devices)[1].uop.axis == 2
    with pytest.raises(ValueError, match=f"Hkv=3 on device=.*must be a multiple of the {count} devices"):
      attn.empty_paged_cache(6, 8, 3, D, device=devices)

@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"pages of {case[0]}, {case[1]} queries")
def test_on_a_gpu(case:tuple[Any, ...]) -> None:
  # Attention over pages, in the cases of the other tests, and append are right on a GPU. An entry of the block table that is no valid page number
  # makes a kernel read another page, but does not stop the kernel.
  page, Sq, lengths, d, options, _ = case
  if 0 in lengths: lengths = lengths[:1]
  x, q = Paged.of(lengths, page, d), np.random.default_rng(5).standard_normal((len(lengths), H, Sq, d)).astype(np.float16)
  with Context(DEV="CUDA"):
    (k_pages, v_pages), table = x.tensors("CUDA"), int32(x.table, "CUDA")
    o = attn.attention(tensor(q, "float16", "CUDA"), k_pages, v_pages, block_table=table, kv_lengths=int32(lengths, "CUDA"), causal=True, **options)
    check_output(array(o), q, x)
    last = [tensor(np.stack([a[b, :, n - 1:n] for b, n in enumerate(lengths)]), "float16", "CUDA") for a in (x.k, x.v)]
    emptied = [tensor(np.where(np.isnan(a), 0, a*0), "float16", "CUDA").realize() for a in x.pages]
    attn.append_kv(*last, *emptied, int32([n - 1 for n in lengths], "CUDA"), block_table=table)
    got = array(emptied[0])
    for b, n in enumerate(lengths): np.testing.assert_array_equal(got[x.table[b, (n - 1)//page], (n - 1)%page], x.k[b, :, n - 1].astype(np.float32))
    wild = int32(np.full_like(x.table, NO_PAGE), "CUDA")
    attn.attention(tensor(q, "float16", "CUDA"), k_pages, v_pages, block_table=wild, kv_lengths=int32(lengths, "CUDA"), **options).realize()

def test_a_single_page_keeps_its_table() -> None:
  # A kernel over a single page does not read the block table, but still takes it as an argument. A CUDA graph under TinyJit passes every tensor of a
  # call to each kernel, and fails if a kernel lacks a parameter.
  with emulated("sm_90"):
    k, v = attn.empty_paged_cache(1, 64, HKV, D, device="EMU")
    table, n = int32([[0]]), attn.append_kv(*[draw(1, HKV, 3, D)]*2, k, v, int32([5]), block_table=int32([[0]]))
    o = attn.attention(draw(1, H, 3, D), k, v, block_table=table, kv_lengths=n)
    programs = [call for call in compiled(o, k, v).src if call.src[0].op is Ops.PROGRAM and call.src[0].src[0].arg.name.startswith("attn_")]
  given = {call.src[0].src[0].arg.name: (len(call.src[0].arg.globals), len(get_call_arg_uops(call))) for call in programs}
  assert len(given) == 2 and all(taken == count for taken, count in given.values()), given

# ***** faults in a block table *****

def test_the_emulator_stops_at_an_entry_that_is_no_page() -> None:
  x, q = Paged.of((6, 3), 4), draw(2, H, 1, D)
  for entry, arch in ((-1, "sm_80"), (len(x.pages[0]), "gfx942"), (NO_PAGE, "gfx1030")):
    table = x.table.copy()
    table[1, 0] = entry
    with emulated(arch), pytest.raises(BadEntry, match=f"an entry of block_table is {entry}: must lie in 0..{len(x.pages[0]) - 1}"):
      attn.attention(q, *x.tensors(), block_table=int32(table), kv_lengths=int32(x.lengths)).realize()
  with emulated("gfx942"), pytest.raises(BadEntry):
    new = draw(2, HKV, 1, D)
    k_pages, v_pages = x.tensors()
    attn.append_kv(new, new, k_pages, v_pages, int32([3, 4]), block_table=int32([[0], [NO_PAGE]]))
    attn.append_kv(new, new, k_pages, v_pages, int32([3, 3]), block_table=int32([[0], [NO_PAGE]]))
    k_pages.realize()

def test_the_emulator_stops_at_two_rows_for_one_slot() -> None:
  # Two sequences may append different rows to a page that they share. If they write two rows to the same place in the page, the emulator stops with
  # an error.
  with emulated("gfx942"):
    k_pages, v_pages = attn.empty_paged_cache(3, 8, HKV, D, device="EMU")
    new, table = draw(2, HKV, 2, D), int32([[1], [1]])
    attn.append_kv(new, new, k_pages, v_pages, int32([0, 2]), block_table=table)
    k_pages.realize()
    with pytest.raises(SharedSlot, match="slot 22 is written 2 times in one launch"):
      attn.append_kv(new, new, k_pages, v_pages, int32([3, 2]), block_table=table)
      k_pages.realize()

def test_refused() -> None:
  with emulated("gfx942"):
    k, v = attn.empty_paged_cache(4, 8, HKV, D, device="EMU")
    q, new, table, before = draw(2, H, 1, D), draw(2, HKV, 1, D), int32([[0, 1], [2, 3]]), (k.uop, v.uop)
    def call(**options:Any) -> Any: return lambda: attn.attention(**{"q": q, "k": k, "v": v, "block_table": table, "kv_lengths": 3, **options})
    def append(lengths:Any=3, new:Tensor=new, **options:Any) -> Any:
      return lambda: attn.attention_with_kv_cache(q, new, new, k, v, lengths, **{"block_table": table, **options})
    for what, text in (
      (call(block_table=table.cast(dtypes.long)), "block_table has dtype int64: must be int32"),
      (call(block_table=table[0]), r"block_table has shape \(2,\)"),
      (call(block_table=int32([[0, 1]])), r"block_table has shape \(1, 2\): must be \(2, max_blocks\)"),
      (call(block_table=table.to("EMU:1")), "block_table is on EMU:1"), (call(kv_lengths=None), "kv_lengths=None with block_table"),
      (call(kv_lengths=17), r"kv_lengths=17: must lie in 0\.\.16"), (call(kv_lengths=int32([3])), r"kv_lengths has shape \(1,\): must be \(2,\)"),
      (call(sequence_lengths=(1, 3)), r"sequence_lengths=\(1, 3\) with block_table"),
      (call(k=draw(4, 0, HKV, D)), r"k has shape \(4, 0, 2, 32\)"), (call(k=draw(4, 8, D)), r"k has shape \(4, 8, 32\): with block_table"),
      (call(v=draw(3, 8, HKV, D)), r"v has shape \(3, 8, 2, 32\): its pages"), (call(q=draw(2, 3, 1, D)), "H=3 query heads"),
      (append(16), r"cache_seqlens=16: with 1 new rows that is more than the 16 that block_table has pages for"),
      (append(new=new[:, :, :0]), r"k_new has shape \(2, 2, 0, 32\): every dimension must be at least 1"),
      (append(new=draw(2, H, 1, D)), r"k_new has shape \(2, 4, 1, 32\)"), (append(new=new.float()), "k_new is float32 on EMU"),
      (append(block_table=table[:1]), r"block_table has shape \(1, 2\)"), (append(softcap=-1.0), "softcap=-1.0"),
      (call(k=k[:1], v=v[:1], block_table=int32([[0, 3], [1, 0]])), r"block_table has an entry 1 for rows .*: there is one page, so it must be 0"),
      (lambda: attn.empty_paged_cache(4, 8, HKV, D, device=("EMU", "EMU:0")), "device=.*: must be different devices"),
      (lambda: attn.empty_paged_cache(4, 8, HKV, D, device=("EMU", "NOSUCH")), "device='NOSUCH': this device does not open"),
      (lambda: attn.empty_paged_cache(4, 0, HKV, D), "page_size=0: must be a whole number, at least 1")):
      with pytest.raises(ValueError, match=text): what()
    assert (k.uop, v.uop) == before

@pytest.mark.parametrize("starts, there", (((14, -2), (14, 15, 16)), ((5, 16), (5, 6, 7))))
def test_rows_that_do_not_fit_are_dropped(starts:tuple[int, ...], there:tuple[int, ...]) -> None:
  # If only the device knows the lengths, append drops new rows for which the block table has no page. In an earlier version, such a row used a table
  # entry of the next sequence, and the emulator reported two rows in one place; for the last sequence, the kernel read past the end of the table.
  with emulated("gfx942"):
    k, v = attn.empty_paged_cache(4, 8, HKV, D, device="EMU")
    new = draw(2, HKV, 3, D)
    filled = attn.append_kv(new, new, k, v, int32(starts), block_table=int32([[0, 1], [2, 3]]))
    assert filled.tolist() == [min(max(n + 3, 0), 16) for n in starts]
    for cache in (k, v): assert np.flatnonzero(array(cache).reshape(32, -1).any(-1)).tolist() == list(there)

def test_append_in_plain_uops() -> None:
  # The append kernel has no custom operation, so it also works on devices such as CPU, whose renderer does not know attn's operations. With
  # `checked`, the kernel has one custom operation, which lets the emulator find two rows that go to one place.
  a = Append(2, HKV, 1, 16, D, "bhsd", Strided(4*8*HKV*D, 0, 8*HKV*D, D, HKV*D), Pages(8, 4, 2), threads=False, checked=False)
  shapes = ((a.places.size,), dtypes.half), ((2, HKV, 1, D), dtypes.half), ((2,), dtypes.int), ((2, 2), dtypes.int)
  for checked in (False, True):
    sink = append(replace(a, checked=checked))(*[UOp.placeholder(shape, dtype, i) for i, (shape, dtype) in enumerate(shapes)])
    assert any(u.op is Ops.CUSTOM for u in sink.toposort()) == checked

@pytest.mark.thorough
def test_on_a_cpu() -> None:
  # Pages work on a CPU, but slowly: tinygrad's operations first gather the rows from the pages.
  script = "import numpy as np, attn, test_paged as t\n" \
    "x, q = t.Paged.of((40, 9), 7), np.random.default_rng(5).standard_normal((2, t.H, 1, t.D)).astype(np.float16)\n" \
    "given = [t.Tensor(y, device='CPU').realize() for y in (q, *x.pages, x.table, np.array(x.lengths, np.int32))]\n" \
    "t.check_output(attn.attention(*given[:3], block_table=given[3], kv_lengths=given[4], causal=True).numpy(), q, x)"
  run_on_a_cpu(script)

@pytest.mark.parametrize("arch", ("sm_80", pytest.param("gfx1100", marks=pytest.mark.thorough)))
def test_flash_attn_varlen_func(arch:str) -> None:
  # FlashAttention's function `flash_attn_varlen_func` accepts packed queries over pages.
  x, counts = Paged.of((30, 17), 8), (5, 3)
  q = np.random.default_rng(5).standard_normal((8, H, D)).astype(np.float16)
  with emulated(arch):
    o = array(flash_attn.flash_attn_varlen_func(tensor(q, "float16"), *x.tensors(), int32([0, 5, 8]), int32([0, 30, 47]), 5, 30, causal=True,
                                                block_table=int32(x.table)))
  for b, (first, n) in enumerate(zip((0, 5), counts)):
    one = Paged(x.lengths[b:b+1], x.k[b:b+1], x.v[b:b+1], x.pages, x.table)
    check_output(o[first:first + n].swapaxes(0, 1)[None], q[first:first + n].swapaxes(0, 1)[None], one)

# ***** a single page: no kernel reads its block table *****

def step_of_one_page(device:str) -> Callable[[int], tuple[Tensor, Paged, np.ndarray]]:
  # Returns a function of i that appends row i to a single page under TinyJit, for i = 0, 1, 2, ...
  # The function returns the output for the query of row i, the keys and values stored so far, and the query.
  rng, pages, table = np.random.default_rng(3), attn.empty_paged_cache(1, 8, HKV, D, device=device), int32([[0]], device)
  q, k, v = (rng.standard_normal((1, h, 4, D)).astype(np.float16) for h in (H, HKV, HKV))
  jitted = TinyJit(lambda q, k, v, n: attn.attention_with_kv_cache(q, k, v, *pages, n, block_table=table).realize())
  def step(i:int) -> tuple[Tensor, Paged, np.ndarray]:
    new = [tensor(x[:, :, i:i+1], "float16", device).realize() for x in (q, k, v)]
    before = [x[:, :, :i+1] for x in (k, v)]
    return jitted(*new, int32([i], device)), Paged((i + 1,), *before, tuple(before), np.zeros(0)), q[:, :, i:i+1]
  return step

@pytest.mark.gpu
def test_steps_of_one_page_on_a_gpu() -> None:
  with Context(DEV="CUDA"):
    step = step_of_one_page("CUDA")
    for i in range(4):
      o, x, q = step(i)
      check_output(array(o), q, x)
