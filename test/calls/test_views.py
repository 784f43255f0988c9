"""Tests of tensors that are views, by any chain of movement operations. A kernel reads a view in place at the right addresses; attn copies a view
that cannot be read in place. attn refuses an output view that cannot be written in place, before it writes anything."""
from __future__ import annotations
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
import attn
from attn import flash_attn
from attn.accuracy import judge, law_of
from attn.calls.views import in_buffer
from attn.reference import rounded
from attn.tinygrad_compat import Context, Tensor
from api_cases import emulated, whole
from cases import array, expected_gradients, floats, hold, normal, problem, tensor

pytestmark = pytest.mark.usefixtures("not_unrolled")

# ***** views *****

APPLIED: dict[str, Callable[[Tensor, Any], Tensor]] = {
  "permute": Tensor.permute, "flip": Tensor.flip, "reshape": Tensor.reshape, "expand": Tensor.expand, "shrink": Tensor.shrink, "pad": Tensor.pad,
  "stride": lambda t, steps: t[tuple(slice(None, None, n) for n in steps)], "select": lambda t, i: t[i]}

@dataclass(frozen=True)
class View:
  # A view of an array in memory.
  memory: np.ndarray
  steps: tuple[tuple[str, Any], ...]  # movement operations that make the view
  of: np.ndarray  # the elements that the view must have
  def tensors(self) -> tuple[Tensor, Tensor]:
    t = base = Tensor(np.ascontiguousarray(self.memory), device="EMU").realize()
    for name, argument in self.steps: t = APPLIED[name](t, argument)
    return base, t

def larger(x:np.ndarray, before:list[int], after:list[int]) -> np.ndarray:
  # Surrounds x along each axis a with before[a] and after[a] numbers that no kernel may read.
  lost: Any = np.nan if x.dtype.kind == "f" else 10**6
  return np.pad(x, list(zip(before, after)), constant_values=np.array(lost).astype(x.dtype))

def before(d:Any, kind:str, x:np.ndarray) -> tuple[np.ndarray, Any]|None:
  # Returns a random array from which the movement operation `kind` makes x, and the operation's argument; or None if there is none.
  # `d` is hypothesis's function that draws.
  axes = range(x.ndim)
  def some(most:int) -> list[int]: return [d(st.integers(0, most)) for _ in axes]
  match kind:
    case "permute":
      order = d(st.permutations(list(axes)))
      return x.transpose(np.argsort(order)), tuple(order)
    case "flip":
      flipped = tuple(a for a, yes in zip(axes, some(1)) if yes)
      return np.flip(x, flipped), flipped
    case "reshape":
      a = d(st.sampled_from(axes)) if x.ndim else 0
      if d(st.booleans()) and a + 1 < x.ndim: shape = (*x.shape[:a], x.shape[a]*x.shape[a + 1], *x.shape[a + 2:])
      else:
        n = d(st.sampled_from([n for n in range(1, x.shape[a] + 1) if x.shape[a] % n == 0]))
        shape = (*x.shape[:a], n, x.shape[a]//n, *x.shape[a + 1:])
      return x.reshape(shape), x.shape
    case "shrink":
      first, behind = some(2), some(2)
      return larger(x, first, behind), tuple((n, n + size) for n, size in zip(first, x.shape))
    case "stride":
      steps = [n + 1 for n in some(1)]
      if x.ndim > 4 or 1 in x.shape: return None
      apart = larger(np.zeros(x.shape, x.dtype), [0]*x.ndim, [(n - 1)*(size - 1) for n, size in zip(steps, x.shape)])
      apart[...] = larger(x[:0], [0]*x.ndim, [1] + [0]*(x.ndim - 1)).flat[0]
      apart[tuple(slice(None, None, n) for n in steps)] = x
      return apart, tuple(steps)
    case "select":
      i, n = d(st.integers(0, 2)), 3
      return larger(x[None], [i] + [0]*x.ndim, [n - 1 - i] + [0]*x.ndim), i
    case "expand":
      same_ = [a for a in axes if x.shape[a] > 1 and (x == x.take([0], a)).all()]
      return (x.take([0], same_[0]), x.shape) if same_ else None
    case "pad":
      zeros = [a for a in axes if x.shape[a] > 1 and not x.take([0], a).any()]
      if not zeros: return None
      return np.delete(x, 0, zeros[0]), tuple((int(a == zeros[0]), 0) for a in axes)
  raise AssertionError(kind)

@st.composite
def views(d:Any, x:np.ndarray, writable:bool=False) -> View:
  # Returns a random view with the elements x, made by up to four movement operations.
  # Some draws change x first: they make all slices along an axis equal, so that the view can repeat a slice, or set the first slice to 0, so that the
  # view can pad. Integers and views that are written to (`writable`) are not changed. `d` is hypothesis's function that draws.
  alter, axis = d(st.sampled_from(("", "", "alike", "zeros"))), d(st.integers(0, x.ndim - 1))
  of_floats = x.dtype.kind == "f" and not writable
  if alter == "alike" and of_floats: x = np.repeat(x.take([0], axis), x.shape[axis], axis)
  if alter == "zeros" and of_floats: x = np.where((np.indices(x.shape)[axis] == 0), x.dtype.type(0), x)
  memory, steps = x, list[tuple[str, Any]]()
  for kind in d(st.lists(st.sampled_from(sorted(APPLIED)), min_size=1, max_size=4)):
    if memory.size > 20000 or memory.ndim > 6 or (found := before(d, kind, memory)) is None: continue
    memory = found[0]
    steps.append((kind, found[1]))
  return View(memory, tuple(reversed(steps)), x)

def drawn(examples:int) -> Callable[[Any], Any]:
  # Decorator: runs a test on `examples` random inputs; fewer than 50 are the same in every run.
  # A failing draw is not made smaller first, which would take minutes.
  return settings(max_examples=examples, deadline=None, derandomize=examples < 50, suppress_health_check=list(HealthCheck), database=None,
                  phases=(Phase.generate,))

NUMBERS = np.arange(2*3*4*4, dtype=np.int32).reshape(2, 3, 4, 4)
found_in_place: list[bool] = []

@drawn(40)
@given(views(NUMBERS))
def check_where_rows_lie(view:View) -> None:
  with emulated("gfx942"): t = view.tensors()[1]
  found = in_buffer(t)
  found_in_place.append(found is not None)
  if found is None: return
  at = found.places
  b, h, s, d = np.indices(t.shape)
  assert at.size == view.memory.size
  np.testing.assert_array_equal(view.memory.reshape(-1)[at.start + b*at.batch + h*at.head + s*at.row + d], view.of)

def test_where_the_rows_of_a_view_lie() -> None:
  # attn reads a view in place only if the strides that it finds give the right position of every element. The random views include some that are read
  # in place and some that are not.
  found_in_place.clear()
  check_where_rows_lie()
  assert 0.1 < np.mean(found_in_place) < 0.9

# ***** every function that takes tensors *****

B, H, HKV, D, SQ, SK, PAGES, SIZE = 2, 4, 2, 16, 3, 8, 5, 4
Arrays = dict[str, np.ndarray]

def half(*shape:int, seed:int=0) -> np.ndarray: return np.random.default_rng(seed).standard_normal(shape).astype(np.float16)
def single(*shape:int, seed:int=0) -> np.ndarray: return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
def ints(*x:Any) -> np.ndarray: return np.array(x, np.int32)

def qkv() -> Arrays: return {"q": half(B, H, SQ, D), "k": half(B, HKV, SK, D, seed=1), "v": half(B, HKV, SK, D, seed=2)}
def queries() -> Arrays: return {"q": half(B, SQ, H, D)}
def packed() -> Arrays:
  tensors = {"q": half(9, H, D), "k": half(9, HKV, D, seed=1), "v": half(9, HKV, D, seed=2)}
  return {**tensors, "cu_seqlens_q": ints(0, 4, 9), "cu_seqlens_k": ints(0, 4, 9)}
def caches(k:str="k_cache", v:str="v_cache", count:int=PAGES, rows:int=SIZE) -> Arrays:
  return {k: half(count, rows, HKV, D, seed=1), v: half(count, rows, HKV, D, seed=2)}
def new(rows:int=2, heads:int=HKV) -> Arrays: return {"k_new": half(B, rows, heads, D, seed=3), "v_new": half(B, rows, heads, D, seed=4)}
def angles() -> Arrays: return {"rotary_cos": single(SK, 4, seed=5), "rotary_sin": single(SK, 4, seed=6)}
TABLE = ints([1, 3], [4, 0])

def gradients(q:Tensor, k:Tensor, v:Tensor, bias:Tensor, sinks:Tensor, weight:Tensor) -> list[Tensor]:
  o = attn.attention(q, k, v, bias=bias, sinks=sinks)
  return [x.contiguous() for x in (o*weight).sum().gradient(q, k, v, bias, sinks)]

def by_custom_kernel(q:Tensor, k:Tensor, v:Tensor, bias:Tensor) -> Tensor:
  o = Tensor.empty(*q.shape, dtype=q.dtype, device="EMU")
  return Tensor.custom_kernel(o, q, k, v, bias, fxn=attn.flash_attention_fn(extras=("bias",)))[0]

def cached(**t:Tensor) -> Any:
  return flash_attn.flash_attn_with_kvcache(causal=True, k=t.pop("k_new", None), v=t.pop("v_new", None), **t)

@dataclass(frozen=True)
class Function:
  # A function under test: how to call it, the arrays that it takes, and the names of the arguments that it writes.
  call: Callable[..., Any]
  takes: Callable[[], Arrays]
  writes: tuple[str, ...] = ()

def with_options(function:Callable[..., Any], **options:Any) -> Callable[..., Any]: return lambda **tensors: function(**tensors, **options)

WRITTEN = ("k_cache", "v_cache")
FUNCTIONS = {
  "attention": Function(with_options(attn.attention, causal=True), lambda: {
    **qkv(), "bias": single(B, 1, SQ, SK), "alibi_slopes": abs(single(B, H)), "sinks": single(H), "kv_lengths": ints(7, 5)}),
  "attention, starts": Function(attn.attention, lambda: {**qkv(), "kv_lengths": ints(7, 5), "kv_starts": ints(2, 1)}),
  "attention, packed": Function(with_options(attn.attention, layout="thd"), packed),
  "attention, pages": Function(with_options(attn.attention, layout="bshd"), lambda: {
    **queries(), **caches("k", "v"), "block_table": TABLE, "kv_lengths": ints(7, 5)}),
  "attention, v in k": Function(with_options(attn.attention, v_dim=8), lambda: {"q": half(B, H, SQ, D), "k": half(B, 1, SK, D), "v": None}),
  "attention, v in pages of k": Function(with_options(attn.attention, v_dim=8), lambda: {
    "q": half(B, H, SQ, D), "k": half(PAGES, SIZE, 1, D), "v": None, "block_table": TABLE, "kv_lengths": ints(7, 5)}),
  "attention, dropout": Function(with_options(attn.attention, dropout_p=.5), lambda: {**qkv(), "dropout_seed": np.array([3, 4], np.uint32)}),
  "attention, out": Function(attn.attention, lambda: {**qkv(), "out": half(B, H, SQ, D, seed=9)}, ("out",)),
  "gradients": Function(gradients, lambda: {**qkv(), "bias": single(B, 1, SQ, SK), "sinks": single(H), "weight": single(B, H, SQ, D)}),
  "flash_attention_fn": Function(by_custom_kernel, lambda: {**qkv(), "bias": single(1, H, SQ, SK)}),
  "scaled_dot_product_attention": Function(attn.scaled_dot_product_attention, lambda: {
    **dict(zip(("query", "key", "value"), (half(B, H, n, D, seed=n) for n in (SQ, SK, SK)))), "attn_mask": single(H, SQ, SK)}),
  "scaled_dot_product_attention, bools": Function(attn.scaled_dot_product_attention, lambda: {
    **dict(zip(("query", "key", "value"), (half(B, H, n, D, seed=n) for n in (SQ, SK, SK)))), "attn_mask": single(SQ, SK) > 0}),
  "dropout_mask": Function(with_options(attn.dropout_mask, p=.5, B=1, H=2, Sq=3, Sk=9), lambda: {"seed": np.array([3, 4], np.uint32)}),
  "append_kv": Function(with_options(attn.append_kv, layout="bshd"), lambda: {
    **new(), **caches(count=B, rows=SK), "cache_seqlens": ints(5, 3)}, WRITTEN),
  "append_kv, pages": Function(with_options(attn.append_kv, layout="bshd"), lambda: {
    **new(), **caches(), "block_table": TABLE, "cache_seqlens": ints(5, 3)}, WRITTEN),
  "attention_with_kv_cache": Function(with_options(attn.attention_with_kv_cache, layout="bshd"), lambda: {
    **queries(), **new(), **caches(count=B, rows=SK), "cache_seqlens": ints(5, 3)}, WRITTEN),
  "attention_with_kv_cache, pages": Function(with_options(attn.attention_with_kv_cache, layout="bshd"), lambda: {
    **queries(), **new(), **caches(), "block_table": TABLE, "cache_seqlens": ints(5, 3)}, WRITTEN),
  "flash_attn_with_kvcache": Function(cached, lambda: {
    **queries(), **caches(count=B, rows=SK), "cache_seqlens": ints(7, 5), "cache_leftpad": ints(2, 0)}),
  "flash_attn_with_kvcache, batches": Function(cached, lambda: {
    **queries(), **caches(rows=SK), "cache_batch_idx": ints(3, 1), "cache_seqlens": ints(7, 5)}),
  "flash_attn_with_kvcache, rotary": Function(cached, lambda: {
    **queries(), **new(), **caches(rows=SK), **angles(), "cache_batch_idx": ints(3, 1), "cache_seqlens": ints(5, 3)}, WRITTEN),
}

def placed(x:np.ndarray|None) -> Tensor|None: return None if x is None else Tensor(np.ascontiguousarray(x), device="EMU").realize()

def results(call:Callable[..., Any], tensors:dict[str, Any], writes:tuple[str, ...]) -> list[np.ndarray]:
  # Calls a function, and returns its results and the tensors that it has written, as arrays.
  found = call(**tensors)
  given = [t for t in (found if isinstance(found, (tuple, list)) else (found,)) if isinstance(t, Tensor)]
  Tensor.realize(*given)
  return [array(t) if t.dtype.name != "bool" else t.numpy() for t in (*given, *(tensors[name] for name in writes))]

def check_views(name:str, d:Any) -> None:
  # Compares a call of the function `name` on random views with a call on contiguous tensors of equal elements.
  function = FUNCTIONS[name]
  with emulated("gfx942"):
    arrays = function.takes()
    among = sorted(x for x, a in arrays.items() if a is not None)
    chosen = d.draw(st.sets(st.sampled_from(among), min_size=1))
    of = {x: d.draw(views(arrays[x], x in function.writes)) for x in sorted(chosen)}
    own = {x: placed(of[x].of if x in of else a) for x, a in arrays.items()}
    bases, seen = {}, {x: placed(a) for x, a in arrays.items()}
    for x, view in of.items(): bases[x], seen[x] = view.tensors()
    try: got = results(function.call, seen, function.writes)
    except ValueError as e:
      assert any(x in str(e) for x in function.writes if x in of), f"{name} of views {of}: {e}"
      for x, base in bases.items(): np.testing.assert_array_equal(base.numpy(), of[x].memory)
      return
    for i, (x, y) in enumerate(zip(got, results(function.call, own, function.writes))):
      np.testing.assert_array_equal(x, y, err_msg=f"result {i} of {name} of {({x: view.steps for x, view in of.items()})}")

@pytest.mark.parametrize("view", (lambda t: t.permute(0, 2, 3, 1).contiguous().realize().permute(0, 3, 1, 2),
                                  lambda t: t.flip(0).contiguous().realize().flip(0)))
def test_pages_that_are_copied(view:Callable[[Tensor], Tensor], capsys:pytest.CaptureFixture[str]) -> None:
  # If a view of pages cannot be read in place, attn copies the pages. The result is right, `explain` reports the copy, and append refuses such pages.
  x = FUNCTIONS["attention, pages"].takes()
  with emulated("gfx942"):
    t: dict[str, Any] = {name: placed(a) for name, a in x.items()}
    t["v"] = view(t["v"])
    got = array(attn.attention(**t, layout="bshd"))
    attn.explain(**t, layout="bshd")
    told = capsys.readouterr().out
    assert "v is a view whose rows don't lie a constant stride apart: every call copies it" in told and "k is a view" not in told
    with pytest.raises(ValueError, match="v_cache is a computed value, or a view whose rows don't lie in a buffer a constant stride apart"):
      attn.append_kv(*map(placed, new().values()), t["k"], t["v"], 3, layout="bshd", block_table=t["block_table"])
  for b, n in enumerate(x["kv_lengths"]):
    rows = [x[name][x["block_table"][b]].reshape(-1, HKV, D)[:n] for name in ("k", "v")]
    one = [a[None].swapaxes(1, 2).astype(np.float32) for a in (x["q"][b], *rows)]
    args = D**-.5, (-1, -1), n - SQ
    verdict = judge(got[b:b+1].swapaxes(1, 2), law_of(*one, *args, dtype="float16", out_dtype="float16")[0])
    assert verdict.ok, verdict

LONG_OR_LIKE_ANOTHER = (
  "gradients", "attention, starts", "attention, v in k", "scaled_dot_product_attention, bools", "attention_with_kv_cache, pages")

@pytest.mark.sample(7)
@pytest.mark.parametrize("name", [x for x in FUNCTIONS if x not in LONG_OR_LIKE_ANOTHER])
def test_views(name:str) -> None:
  @drawn(2)
  @given(st.data())
  def check(d:Any) -> None: check_views(name, d)
  check()

@pytest.mark.thorough
@pytest.mark.parametrize("name", FUNCTIONS)
def test_many_views(name:str) -> None:
  @drawn(30)
  @given(st.data())
  def check(d:Any) -> None: check_views(name, d)
  check()

# ***** slices that begin between two 16-byte units *****

def slice_at(x:np.ndarray, first:int, dtype:str="float16") -> Tensor:
  return tensor(np.concatenate([np.full(first, np.nan, np.float32), x.ravel()]), dtype).realize()[first:].reshape(x.shape)

@pytest.mark.sample(1)
@pytest.mark.parametrize("arch, first", (("gfx942", 1), ("gfx1100", 2), ("sm_80", 1), ("sm_90", 4), ("gfx1030", 3)))
def test_slices_that_begin_anywhere(arch:str, first:int) -> None:
  # Inputs and dO may begin at any element of a buffer, in `attention` and in `custom_kernel`, forward and backward. attn must not read them in place
  # with vector loads that need aligned addresses. tinygrad's optimizations are on (NOOPT=0), so its own copies use vectors, too.
  p = problem(H=2, Sq=70, Sk=66, D=24, extras={"bias": floats(1, 1, 1, 66)})
  x, bias, do = normal(p), floats(1, 1, 1, 66), rounded(floats(1, 2, 70, 24, seed=3), "float16")
  with emulated(arch), Context(NOOPT=0):
    t = {name: slice_at(a, first) for name, a in vars(x).items()} | {"bias": slice_at(bias, first, "float32")}
    o, lse = attn.attention(**t, return_lse=True)
    wanted = ("q", "k", "v")
    found = dict(zip(wanted, o.gradient(*[t[name] for name in wanted], gradient=slice_at(do, first))))
    hold(p, x, {"bias": bias}, array(o), array(lse))
    laws = expected_gradients(p, x, {"bias": bias}, do, None)
    for name, g in found.items(): assert (verdict := judge(array(g), laws[name])).ok, f"d{name}: {verdict}"
    p = replace(p, bias=None)
    custom = Tensor.empty(*o.shape, dtype=o.dtype, device="EMU").custom_kernel(t["q"], t["k"], t["v"], fxn=attn.flash_attention)[0]
    gq, = custom.gradient(t["q"], gradient=slice_at(do, first))
    hold(p, x, {}, array(custom), None)
    assert (verdict := judge(array(gq), expected_gradients(p, x, {}, do, None)["q"])).ok, verdict

def test_slices_of_several_devices() -> None:
  # A slice of a tensor that is divided over devices is read correctly: on each device it begins at an offset in the device's part.
  p, devices = problem(B=2, H=1, Sq=33, D=24), ("EMU:0", "EMU:1")
  x = normal(p)
  def part(a:np.ndarray) -> Tensor:
    wide = np.concatenate([np.full((p.B, 1), np.nan, np.float32), a.reshape(p.B, -1)], 1)
    return tensor(wide, "float16").shard(devices, axis=0).realize()[:, 1:].reshape(a.shape)
  with emulated("gfx942"): hold(p, x, {}, array(whole(attn.attention(*[part(a) for a in vars(x).values()]))), None)

def test_an_output_that_begins_between_units() -> None:
  with emulated("gfx942"):
    q, out = slice_at(floats(1, 2, 33, 24), 0), Tensor.empty(2*33*24 + 1, dtype="half", device="EMU")[1:].reshape(1, 2, 33, 24).contiguous()
    with pytest.raises(ValueError, match="out begins at byte 2 of its buffer: kernels write rows by 16 bytes"): attn.attention(q, q, q, out=out)
    with pytest.raises(ValueError, match="o begins at byte 2 of its buffer"): out.custom_kernel(q, q, q, fxn=attn.flash_attention)
