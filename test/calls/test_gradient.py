"""Tests of attention's gradients: for every way to call attention, with every option, they agree with float64 within the error limit of each element
(docs/contract.md)."""
from __future__ import annotations
import itertools, re
from typing import Any, Callable
import numpy as np
import pytest
from tinygrad import TinyJit
from tinygrad.device import Buffer
import attn
from attn import flash_attn
from attn.accuracy import Law, judge, without_error
from attn.calls import gradient
from attn.calls.history import made
from attn.calls.options import DEFAULTS
from attn.calls.placement import AXES
from attn.chips import get_chip
from attn.choose import backward_tiles
from attn.choose.backward import BackwardChoice, Parts, can_differentiate, choose_backward, choose_parts, memory_of, most_seen
from attn.choose.backward_tiles import wgmma_at_once
from attn.functions.trace import functions_of
from attn.kernels.tiles.plain import TiledBackwardTile
from attn.kernels.wgmma import gradients_of_few
from attn.problem import Problem
from attn.reference import arrange, restore, rounded
from attn.tinygrad_compat import Context, GlobalCounters, Tensor, dtypes
from api_cases import draw, emulated, extra, floats, int32, whole
from cases import DTYPES, Inputs, array, compute_all_gradients_at_once, expected_gradients, normal, problem, tensor

pytestmark = pytest.mark.usefixtures("not_unrolled")

SMALL: dict[str, Any] = dict(H=2, Sq=20, Sk=40, D=16)

def check_gradients(arch:str="gfx942", kernel:str="", make:Callable[[Problem], Inputs]=normal, *, extras:dict[str, np.ndarray]|None=None,
                    through:tuple[str, ...]=("o",), place:Callable[[str, Tensor], Tensor]=lambda _, t: t, training:int=1,
                    **parameters:Any) -> dict[str, np.ndarray]:
  # Runs `attention`, checks that the gradients of all inputs are within their error limits (docs/contract.md), and returns them by name.
  # `parameters` are the arguments of `problem`, `make` draws q, k and v, and `extras` holds optional tensors by name. The loss is a weighted sum of
  # the outputs that `through` names: "o", "lse", or both. `training` is the value of tinygrad's setting TRAINING. `place` may move each tensor to
  # other devices. The gradients of q, k and v are (B, H, S, D).
  extras = extras or {}
  p = problem(extras=extras, lse="lse" in through, **{**SMALL, **parameters})
  x, B, rows = make(p), *((1, p.total_q) if p.varlen else (p.B, p.Sq))
  rng = np.random.default_rng(11)
  do = rounded(rng.standard_normal((B, p.H, rows, p.Dv), dtype=np.float32), p.out_dtype) if "o" in through else None
  dlse = rng.standard_normal((B, p.H, rows), dtype=np.float32) if "lse" in through else None
  call = {name: value for name, value in parameters.items() if name in DEFAULTS and name != "out_dtype"}
  with emulated(arch, kernel), Context(TRAINING=training):
    given = {name: place(name, tensor(arrange(a, p.layout), p.dtype)) for name, a in vars(x).items()}
    given |= {name: place(name, extra(name, a, p.bias_dtype)) for name, a in extras.items()}
    o, *lse = values if isinstance(values := attn.attention(**given, out_dtype=DTYPES[p.out_dtype], return_lse=p.return_lse, **call), tuple) \
      else (values,)
    loss = Tensor(0.0, device=o.device)
    if do is not None: loss = loss + (o*place("o", tensor(arrange(do, p.layout), p.out_dtype))).float().sum()
    if dlse is not None: loss = loss + (lse[0].isinf().where(0.0, lse[0])*place("lse", tensor(dlse, "float32").reshape(lse[0].shape))).sum()
    names = [name for name in given if name in ("q", "k", "v", "bias", "sinks")]
    gradients = dict(zip(names, loss.gradient(*[given[name] for name in names])))
    assert all(g.shape == given[name].shape and g.dtype == given[name].dtype for name, g in gradients.items())
    got = {name: array(whole(g)) if g.device is not None else np.zeros(g.shape) for name, g in gradients.items()}   # a constant gradient is 0
  for name in ("q", "k", "v"): got[name] = restore(got[name], p.layout, getattr(x, name).shape)
  for name, law in expected_gradients(p, x, extras, do, dlse).items():
    if name == "alibi_slopes": continue
    assert (verdict := judge(got[name], law)).ok, f"d{name}: {verdict}"
  return got

# ***** options *****

OPTIONS: dict[str, dict[str, Any]] = {
  "bfloat16, another width": dict(dtype="bfloat16", D=24, Dv=8), "float32 output": dict(out_dtype="float32"),
  "GQA, causal": dict(B=2, H=6, Hkv=2, causal=True), "MQA, top-left": dict(H=4, Hkv=1, causal="top-left"),
  "window, scale": dict(window=(5, 3), softmax_scale=0.7), "softcap": dict(softcap=2.0),
  "alibi": dict(extras=dict(alibi_slopes=np.abs(floats(2))/4)),
  "bias": dict(B=2, Sq=8, Sk=12, extras=dict(bias=floats(2, 2, 8, 12))),
  "bias of heads": dict(B=2, H=4, Hkv=2, Sq=8, Sk=12, softcap=2.0, extras=dict(bias=floats(1, 4, 1, 1))),
  "bias of keys": dict(B=2, H=4, Hkv=2, Sq=8, Sk=12, bias_dtype="float16", extras=dict(bias=rounded(floats(1, 4, 1, 12), "float16"))),
  "sinks": dict(extras=dict(sinks=floats(2))), "kv_lengths, causal": dict(B=2, causal=True, extras=dict(kv_lengths=int32(25, 0))),
  "all of the scores": dict(B=2, H=4, Hkv=2, Sq=8, Sk=12, causal=True, softcap=3.0, extras=dict(
    alibi_slopes=np.abs(floats(4))/4, bias=floats(2, 4, 8, 12), sinks=floats(4), kv_lengths=int32(12, 7))),
  "splits": dict(Sk=150, num_splits=2),
  "bshd": dict(B=2, layout="bshd", causal=True), "nsd": dict(layout="nsd", window=(9, -1))}

# cases that other cases or the tests of kernels nearly repeat
THOROUGH = ("MQA, top-left", "softcap", "alibi", "bias", "sinks", "nsd")
@pytest.mark.sample(5)
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.thorough) if n in THOROUGH else n for n in OPTIONS])
def test_options(name:str) -> None: check_gradients(**OPTIONS[name])

@pytest.mark.parametrize("through", [("lse",), ("o", "lse")])
@pytest.mark.parametrize("name", ["GQA, causal", "splits"])
def test_through_lse(name:str, through:tuple[str, ...]) -> None: check_gradients(through=through, **OPTIONS[name])

def test_splits_with_sinks() -> None: check_gradients(through=("o", "lse"), Sk=150, num_splits=2, extras=dict(sinks=floats(2)))

@pytest.mark.sample(2)
@pytest.mark.parametrize("arch", ["gfx1100", "gfx1201", "sm_80", pytest.param("sm_90", marks=pytest.mark.thorough)])
def test_every_kind_of_chip(arch:str) -> None: check_gradients(arch, through=("o", "lse"), H=4, Hkv=2, causal=True, Sq=12, Sk=16)

def test_warpgroups() -> None:
  check_gradients("sm_90", through=("o", "lse"), H=4, Hkv=2, causal=True, Sq=66, Sk=70, extras=dict(bias=floats(1, 4, 1, 70)))

@pytest.mark.parametrize("dtype, D", [("float32", 16), pytest.param("float16", 264, marks=pytest.mark.thorough)])
def test_where_no_matrix_kernel_takes_it(dtype:str, D:int) -> None: check_gradients(dtype=dtype, D=D, Sq=4, Sk=6, causal=True)

def hidden_keys(p:Problem, seed:int=0) -> Inputs:
  # Makes inputs in which some keys are -inf and their values NaN. No query sees these keys.
  x = normal(p, seed)
  x.k[:, :, :p.Sk - p.Sq], x.v[:, :, :p.Sk - p.Sq] = -np.inf, np.nan
  return x

def keys_of_minus_inf(p:Problem, seed:int=0) -> Inputs:
  # Makes inputs in which one key that all queries see is -inf. A softcap makes its scores finite.
  x = normal(p, seed)
  x.k[:, :, 1] = -np.inf
  return Inputs(np.abs(x.q), x.k, x.v)

@pytest.mark.parametrize("make, options", [(hidden_keys, dict(window=(0, -1))), (keys_of_minus_inf, dict(softcap=2.0))])
def test_infinite_keys_without_kernels(make:Callable[..., Inputs], options:dict[str, Any]) -> None:
  check_gradients(kernel="three_pass", make=make, dtype="float32", H=1, D=4, Sq=3, Sk=5, extras=dict(bias=floats(1, 1, 3, 5)), **options)

def test_long_rows_are_for_the_kernels_of_plain_uops() -> None:
  # Rows of more than 256 elements use the kernels of plain UOps in forward and backward, in float16 and bfloat16.
  for dtype, D in itertools.product(("float16", "bfloat16"), (257, 264, 512)):
    tiles = can_differentiate(problem(dtype=dtype, D=D), get_chip("gfx942"))
    assert not isinstance(tiles, str) and {type(tile) for tile in tiles} == {TiledBackwardTile}, (dtype, D)

PACKED = dict(layout="thd", H=4, Hkv=2, Sq=30, Sk=44, D=16)
ENDS = {"plain": (int32(0, 9, 30), int32(0, 20, 44)), "an empty one": (int32(0, 9, 9, 30), int32(0, 20, 30, 44)),
        "no keys": (int32(0, 9, 14, 30), int32(0, 20, 20, 44)), "rows of none": (int32(2, 9, 24), int32(3, 20, 40))}

@pytest.mark.sample(2)
@pytest.mark.parametrize("name, causal", [("plain", True), pytest.param("an empty one", False, marks=pytest.mark.thorough), ("no keys", True),
                                          ("rows of none", False)])
def test_packed_sequences(name:str, causal:bool) -> None:
  q_ends, k_ends = ENDS[name]
  got = check_gradients(**PACKED, causal=causal, through=("o", "lse"), extras=dict(sinks=floats(4), cu_seqlens_q=q_ends, cu_seqlens_k=k_ends))
  for n, ends in (("q", q_ends), ("k", k_ends), ("v", k_ends)):     # rows of no sequence have gradient 0 exactly
    assert not got[n][:, :, :ends[0]].any() and not got[n][:, :, ends[-1]:].any(), n

def test_rows_that_see_no_key_get_exactly_0() -> None:
  got = check_gradients(Sq=40, Sk=20, causal=True, through=("o", "lse"))
  assert not got["q"][:, :, :20].any() and got["q"][:, :, 21:].any(-1).all()
  got = check_gradients(B=2, extras=dict(kv_lengths=int32(0, 17)))
  assert not got["q"][0].any() and not got["k"][0].any() and not got["v"][1, :, 17:].any() and got["v"][1, :, :17].all()

# ***** ways to call *****

def expected_of_sum(*tensors:Tensor, **options:Any) -> tuple[Law, ...]:
  # Returns dq, dk and dv of the loss sum(o) in float64: for each the exact values and the error limit of each element.
  p = problem(**options)
  return tuple(expected_gradients(p, Inputs(*map(array, tensors)), {}, np.ones((p.B, p.H, p.Sq, p.Dv), np.float32), None)[n] for n in "qkv")

def hold(gradients:Any, laws:Any) -> None:
  for g, law in zip(gradients, laws, strict=True): assert (verdict := judge(array(g), law)).ok, verdict

def three() -> tuple[Tensor, Tensor, Tensor]: return draw(1, 2, 32, 16), draw(1, 2, 32, 16, seed=1), draw(1, 2, 32, 16, seed=2)

def test_the_first_snippet() -> None:
  with emulated("gfx942"):
    q, k, v = three()
    o = Tensor.empty(*q.shape, dtype=q.dtype)
    o = Tensor.custom_kernel(o, q, k, v, fxn=attn.flash_attention)[0]
    o.float().sum().backward()
    hold((q.grad, k.grad, v.grad), expected_of_sum(q, k, v, Sq=32, D=16))

def test_a_function_with_options_and_lse() -> None:
  with emulated("gfx942"):
    q, k, v = three()
    fxn = attn.flash_attention_fn(causal=True, return_lse=True)
    o, lse = Tensor.custom_kernel(Tensor.empty(*q.shape, dtype=q.dtype), Tensor.empty(1, 2, 32, dtype=dtypes.float), q, k, v, fxn=fxn)[:2]
    of_o, of_lse = o.float().sum().gradient(q, k, v), lse.sum().gradient(q, k)     # before realize, which forgets the graph
    hold(of_o, expected_of_sum(q, k, v, Sq=32, D=16, causal=True))
    want = expected_gradients(problem(Sq=32, D=16, causal=True), Inputs(*map(array, (q, k, v))), {}, None, np.ones((1, 2, 32), np.float32))
    hold(of_lse, (want["q"], want["k"]))

def test_a_grad_fxn_of_the_users_wins() -> None:
  with emulated("gfx942"):
    q, k, v = three()
    def mine(g:Any, call:Any) -> Any: return None, g*2, None, None
    o = Tensor.custom_kernel(Tensor.empty(*q.shape, dtype=q.dtype), q, k, v, fxn=attn.flash_attention, grad_fxn=mine)[0]
    np.testing.assert_array_equal(array(o.float().sum().gradient(q)[0]), 2)

def test_the_inputs_that_custom_kernel_returns_have_no_gradient_of_their_own() -> None:
  with emulated("gfx942"):
    q, k, v = three()
    o, after = Tensor.custom_kernel(Tensor.empty(*q.shape, dtype=q.dtype), q, k, v, fxn=attn.flash_attention)[:2]
    with pytest.raises(NotImplementedError, match="through an input that custom_kernel returned"): (o.float().sum() + after.float().sum()).gradient(q)

@pytest.mark.parametrize("deterministic", [False, True])
def test_flash_attn(deterministic:bool) -> None:
  with emulated("gfx942"):
    q, k, v = three()
    rows = lambda t: t.transpose(1, 2)
    want = expected_of_sum(q, k, v, Sq=32, D=16, causal=True)
    o = flash_attn.flash_attn_func(rows(q), rows(k), rows(v), causal=True, deterministic=deterministic)
    hold(o.float().sum().gradient(q, k, v), want)
    packed = Tensor.stack(*map(rows, (q, k, v)), dim=2).contiguous().realize()
    g, = flash_attn.flash_attn_qkvpacked_func(packed, causal=True, deterministic=deterministic).float().sum().gradient(packed)
    hold([rows(g[:, :, i]).contiguous() for i in range(3)], want)

# ***** all gradients at once *****

FEW: dict[str, Any] = dict(B=1, H=2, Sq=80, Sk=256, D=128, causal=True)

@pytest.fixture
def for_few(monkeypatch:pytest.MonkeyPatch) -> None:
  compute_all_gradients_at_once(monkeypatch)

@pytest.mark.sample(2)
@pytest.mark.usefixtures("for_few")
@pytest.mark.parametrize("order, deterministic", (((0, 1, 2), False), ((1, 0, 2), True), ((2, 1, 0), False)))
def test_gradients_at_once_in_any_order(order:tuple[int, ...], deterministic:bool) -> None:
  # The kernel that computes dq, dk and dv at once runs only once, even if the three gradients are realized one after another: otherwise it would add
  # to the fp32 sums of dq twice.
  p = problem(**FEW)
  x = normal(p)
  with emulated("sm_90"):
    q, k, v = (tensor(a, p.dtype, "EMU").realize() for a in (x.q, x.k, x.v))
    assert attn.explain(q, k, v, causal=True, deterministic=deterministic, backward=True).kernels == tuple(
      f"backward_{name}_wgmma" for name in ("delta", "all", "finish"))
    found = attn.attention(q, k, v, causal=True, deterministic=deterministic).float().sum().gradient(q, k, v)
    got = {i: array(found[i]) for i in order}
  want = expected_gradients(p, x, {}, np.ones((p.B, p.H, p.Sq, p.Dv), np.float32), None)
  for i, name in enumerate("qkv"): assert (verdict := judge(got[i], want[name])).ok, f"d{name}: {verdict}"

@pytest.mark.usefixtures("for_few")
def test_tiles_of_gradients_at_once(capsys:pytest.CaptureFixture[str]) -> None:
  # Where one kernel computes dq, dk and dv at once, `explain` counts the query tiles that this kernel skips, masks, and computes without a mask. The
  # small kernels before and after it are not counted.
  q, k = (Tensor.empty(1, 2, rows, 128, dtype=dtypes.half) for rows in (256, 256))
  assert attn.explain(q, k, k, causal=True, deterministic=False, arch="sm_90", backward=True).at_once
  counted = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  backward_")]
  assert counted == ["  backward_all_wgmma: query tiles: 25.0 % skipped, 50.0 % masked, 25.0 % without a mask"]

@pytest.mark.sample(2)
@pytest.mark.parametrize("arch, suffix, deterministic", (("sm_90", "_wgmma", False), ("sm_90", "_wgmma", True), ("gfx942", "", False),
                                                         ("gfx942", "", True)))
def test_gradients_at_once_in_a_jit(monkeypatch:pytest.MonkeyPatch, arch:str, suffix:str, deterministic:bool) -> None:
  # Three calls under TinyJit give the same dq, although the kernel that computes all gradients at once adds to sums in memory. So each replay must
  # set these sums to 0 again. With deterministic=True it must also reset the counters that say which workgroup adds next.
  compute_all_gradients_at_once(monkeypatch, suffix)
  with emulated(arch):
    q, k, v = (Tensor.randn(1, 2, rows, 128, device="EMU").half().realize() for rows in (80, 256, 256))
    assert attn.explain(q, k, v, deterministic=deterministic, backward=True).at_once
    @TinyJit
    def gradients(q:Tensor) -> Tensor:
      return attn.attention(q, k, v, deterministic=deterministic).float().square().sum().gradient(q)[0].realize()
    first = [array(gradients(q)) for _ in range(3)]
    for x in first[1:]: np.testing.assert_allclose(x, first[0], rtol=0, atol=0 if deterministic else 1e-2*np.abs(first[0]).max())

REFUSED_AT_ONCE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
  "deterministic": ({}, dict(deterministic=True), "deterministic=True: "),
  "D": (dict(D=80), {}, "D=80, Dv=80: it has enough registers only with D 64 and 128"),
  "few keys": (dict(Sk=512), dict(causal=False), "a query sees 512 keys on average: faster only from 768 on"),
  "softcap": ({}, dict(softcap=3.0, causal=False, window=(500, 300)), r"softcap with window=\(500, 300\): it would have too few registers"),
  "score_mod": ({}, dict(score_mod=lambda s, b, h, i, j: s*s), "score_mod: it would have too few registers"),
  "dropout beside slopes": ({}, dict(dropout_p=0.1, alibi_slopes=Tensor.empty(2)), "alibi with dropout_p: it would have too few registers"),
  "dropout and part blocks": (dict(Sk=2100), dict(dropout_p=0.1), "dropout_p: it would have too few registers if Sq or Sk is no multiple"),
  "few blocks in order": (dict(B=2, Sk=16384), dict(deterministic=True, causal=False), "deterministic=True: .* here 16384 and 512"),
  "causal in order": ({}, dict(deterministic=True), "deterministic=True: .* is faster from 4096 queries on, here 2048"),
  "few queries in order": (dict(B=1, H=8, Sq=128, Sk=65536), dict(deterministic=True, causal=False), "deterministic=True: .* queries on, here 128"),
  "few keys in order": (dict(B=512, Sk=1024), dict(deterministic=True, causal=False), "deterministic=True: .* here 1024 and 8192"),
  "blocks": (dict(B=2), {}, "64 blocks of 128 keys: "),
}
@pytest.mark.parametrize("case", REFUSED_AT_ONCE)
def test_two_kernels_where_one_is_not_chosen(case:str) -> None:
  sizes, options, reason = REFUSED_AT_ONCE[case]
  B, H, Sq, Sk, D = {**dict(B=66, H=2, Sq=2048, Sk=2048, D=128), **sizes}.values()
  q, k = (Tensor.empty(B, H, rows, D, dtype="half") for rows in (Sq, Sk))
  found = attn.explain(q, k, k, arch="sm_90", backward=True, **{"causal": True, "deterministic": False, **options})
  assert found.kernels == ("backward_dq_wgmma", "backward_dkdv_wgmma")
  assert re.match(reason, found.why_not("backward_all_wgmma") or ""), found

def test_a_bias_has_a_kernel_of_its_own_beside_two_kernels() -> None:
  q, bias = Tensor.empty(66, 2, 2048, 128, dtype="half"), Tensor.empty(1, 2, 2048, 2048)
  found = attn.explain(q, q, q, arch="sm_90", backward=True, deterministic=False, bias=bias)
  assert found.kernels == ("backward_dq_wgmma", "backward_dkdv_wgmma", "backward_dbias_mma")
  assert (found.why_not("backward_all_wgmma") or "").startswith("bias: a kernel of its own"), found

# (whether one kernel is chosen with deterministic=False, and with deterministic=True; sizes and options)
MEASURED: dict[str, tuple[bool, bool, dict[str, Any]]] = {
  "full": (True, True, {}), "causal": (True, False, dict(causal=True)), "keys that fill no whole block": (True, False, dict(Sk=2100)),
  "slopes": (True, False, dict(causal=True, slopes=True)),
  "lengths": (True, False, dict(causal=True, lengths=True)), "shared heads": (True, False, dict(Hkv=1)),
  "dropout": (True, True, dict(dropout_p=0.1)), "dropout, causal": (True, True, dict(dropout_p=0.1, causal=True)),
  "softcap": (True, True, dict(softcap=3.0)), "softcap, causal": (True, False, dict(softcap=3.0, causal=True)),
  "a long window": (True, False, dict(Sk=8192, window=(4095, 0))), "D 64": (True, False, dict(D=64)),
  "D 64, causal": (True, False, dict(D=64, causal=True)), "packed": (True, False, dict(packed=True)),
  "packed, causal": (True, False, dict(packed=True, causal=True)),
  "packed, causal, D 64": (True, False, dict(D=64, packed=True, causal=True)),
  "dropout, D 64": (True, True, dict(D=64, dropout_p=0.1, causal=True)), "softcap, D 64": (True, False, dict(D=64, softcap=3.0, causal=True))}
NOT_MEASURED: dict[str, tuple[dict[str, Any], str]] = {
  "packed keys that fill no whole block": (dict(packed=True, longest=2100), "Sk=2100, no multiple of 128, with varlen"),
  "window": (dict(window=(1023, 200)), r"window=\(1023, 200\)"), "packed window": (dict(packed=True, window=(1500, 0)), r"window=.* with varlen"),
  "D 64, window": (dict(D=64, window=(1023, 200)), r"window=\(1023, 200\)"),
  "D 64, packed": (dict(D=64, packed=True), r"window=\(-1, -1\) with varlen")}

@pytest.mark.parametrize("mask, heads, one", ((lambda b, h, i, j, n: n[i] == n[j], 32, True), (lambda b, h, i, j, n: n[i] == n[j], 24, False),
                                              (lambda b, h, i, j, n: (i//64) == n[j], 32, True), (lambda b, h, i, j, n: n[i] < n[j], 32, False),
                                              (lambda b, h, i, j, n: (i - n[j]) % 4 == 0, 32, False),
                                              (lambda b, h, i, j, n: (i >= j) & (n[i] == n[j]), 32, False)))
def test_one_kernel_in_order_for_masks_that_compare_two_numbers(mask:Callable[..., Any], heads:int, one:bool) -> None:
  # in a fixed order, for masks such as documents, if there are enough heads
  with emulated("sm_90"):
    q, numbers = Tensor.empty(1, heads, 16384, 128, dtype="bfloat16"), Tensor.empty(16384, dtype="int32")
    assert attn.explain(q, q, q, arch="sm_90", backward=True, mask_mod=mask, mod_tensors=(numbers,)).at_once == one

def test_one_kernel_in_order_with_tiles_of_128_queries() -> None:
  for rows, one in ((4096, True), (2048, False)):
    q = Tensor.empty(128, 1, rows, 64, dtype="half")
    assert attn.explain(q, q, q, arch="sm_90", backward=True).at_once == one

def test_one_kernel_in_order_under_a_causal_mask() -> None:
  # at head dimension 128, from 4096 queries and keys and 2048 blocks of 128 keys on; without a mask from 2048 on
  for heads, rows, causal, one in ((64, 4096, True, True), (63, 4096, True, False), (128, 2048, True, False), (128, 2048, False, True)):
    q = Tensor.empty(1, heads, rows, 128, dtype="half")
    assert attn.explain(q, q, q, arch="sm_90", backward=True, causal=causal).at_once == one, (heads, rows, causal)

def one_kernel_or_two(deterministic:bool, *, H:int=2, Hkv:int=2, Sk:int=2048, D:int=128, packed:bool=False, slopes:bool=False, lengths:bool=False,
                      longest:int=2048, **options:Any) -> BackwardChoice:
  # Returns the kernels that dispatch chooses on sm_90 for the gradients of 66 batches or packed sequences of 2048 queries.
  q, k = (Tensor.empty(66, heads, rows, D, dtype="half") for heads, rows in ((H, 2048), (Hkv, Sk)))
  if packed:
    q, k = (Tensor.empty(66*2048, heads, D, dtype="half") for heads in (H, Hkv))
    options |= {"layout": "thd", "max_seqlen_q": 2048, "max_seqlen_k": longest}
    options |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), Tensor.empty(67, dtype=dtypes.int))
  if slopes: options["alibi_slopes"] = Tensor.empty(H)
  if lengths: options["kv_lengths"] = Tensor.empty(66, dtype=dtypes.int)
  return attn.explain(q, k, k, arch="sm_90", backward=True, deterministic=deterministic, **options)

@pytest.mark.parametrize("case", MEASURED)
def test_one_kernel_where_it_was_measured_to_be_faster(case:str) -> None:
  in_no_order, in_order, given = MEASURED[case]
  assert [one_kernel_or_two(deterministic, **given).at_once for deterministic in (False, True)] == [in_no_order, in_order]

@pytest.mark.parametrize("case", NOT_MEASURED)
def test_two_kernels_where_one_was_not_measured_to_be_faster(case:str) -> None:
  given, reason = NOT_MEASURED[case]
  found = one_kernel_or_two(False, **given)
  assert not found.at_once
  assert re.match(f"{reason}: right, but was not measured to be faster than two kernels", found.why_not("backward_all_wgmma") or ""), found

def test_one_kernel_with_a_mask_mod() -> None:
  # One kernel computes all gradients under a mask_mod that leaves a query several intervals of keys, if workgroups may add to dq in any order. If the
  # mask also hides all keys after the query, or if the order is fixed (deterministic=True), two kernels compute them. A mask_mod that leaves each
  # query one interval of keys is treated like a window.
  def reason(mask:Any, deterministic:bool=False) -> str:
    p = problem(B=66, Sq=2048, D=128, deterministic=deterministic, **functions_of(None, mask, ()))
    return str(wgmma_at_once(p, get_chip("sm_90")))
  assert reason(lambda b, h, i, j: (i - j) % 4 < 2).startswith("128x64 8 waves")
  assert reason(lambda b, h, i, j: (i - j) % 4 < 2, True).startswith("deterministic=True: ")
  assert reason(lambda b, h, i, j: (i >= j) & ((i - j) % 4 < 2)).startswith("a mask_mod that hides the last keys of a query: right")
  assert reason(lambda b, h, i, j: (i >= j) & (i - j < 1900)).startswith("a mask_mod that hides the first keys of a query: right")
  assert reason(lambda b, h, i, j: i >= j).startswith("128x64 8 waves")
  assert reason(lambda b, h, i, j: i >= j, True).startswith("deterministic=True: ")

def test_a_fixed_order_is_chosen_where_it_was_measured_to_be_faster() -> None:
  # Dispatch on sm_90 chooses one kernel for all gradients where it was measured to be faster than two kernels, although its workgroups add to dq in a
  # fixed order (deterministic=True, the default). This is so with one query head for each key/value head, and with many blocks of keys: without a
  # mask from 2048 keys on, with causal=True from 4096. With fewer keys, or with several query heads for a key/value head, two kernels compute the
  # gradients.
  one, two = ("backward_delta_wgmma", "backward_all_wgmma", "backward_finish_wgmma"), ("backward_dq_wgmma", "backward_dkdv_wgmma")
  def kernels(rows:int, Hkv:int, causal:bool) -> tuple[str, ...]:
    q, k = (Tensor.empty(8, heads, rows, 128, dtype="half") for heads in (16, Hkv))
    return attn.explain(q, k, k, arch="sm_90", backward=True, causal=causal).kernels
  assert kernels(2048, 16, False) == kernels(4096, 16, True) == one
  assert kernels(1024, 16, False) == kernels(2048, 16, True) == kernels(4096, 4, False) == kernels(4096, 4, True) == two

REFUSED_ON_AMD = {
  "deterministic": ("gfx942", {}, dict(deterministic=True), "deterministic=True: "), "D": ("gfx942", dict(D=80), {}, "D=80, Dv=80: "),
  "functions": ("gfx942", {}, dict(score_mod=lambda s, b, h, i, j: s*s), "score_mod: "),
  "blocks": ("gfx942", dict(B=2), {}, "8 blocks of 128 keys: "), "queries": ("gfx942", dict(Sq=64), {}, "64 queries share keys: "),
  "dropout beside slopes": ("gfx942", {}, dict(dropout_p=0.1, alibi_slopes=Tensor.empty(2)), "dropout_p with alibi_slopes: "),
  "registers": ("gfx1100", {}, {}, "a wave of gfx1100 has 256 registers: "), "chip": ("gfx90a", {}, {}, "gfx90a: "),
  "dropout": ("gfx942", dict(D=64), dict(dropout_p=0.1), "dropout_p: "),
}
@pytest.mark.parametrize("case", REFUSED_ON_AMD)
def test_two_kernels_where_one_is_not_chosen_on_amd(case:str) -> None:
  arch, sizes, options, reason = REFUSED_ON_AMD[case]
  B, H, Sq, Sk, D = {**dict(B=99, H=2, Sq=1024, Sk=256, D=128), **sizes}.values()
  q, k = (Tensor.empty(B, H, rows, D, dtype="half") for rows in (Sq, Sk))
  found = attn.explain(q, k, k, arch=arch, backward=True, **{"causal": True, "deterministic": False, **options})
  assert found.kernels == ("backward_dq", "backward_dkdv")
  assert (found.why_not("backward_all") or "").startswith(reason), found

def test_gradients_at_once_on_cdna(monkeypatch:pytest.MonkeyPatch) -> None:
  # Dispatch chooses the kernel that computes dq, dk and dv at once on CDNA, too. Each gradient is right, also if it is realized alone.
  compute_all_gradients_at_once(monkeypatch, "")
  p = problem(**FEW)
  x = normal(p)
  with emulated("gfx942"):
    q, k, v = (tensor(a, p.dtype, "EMU").realize() for a in (x.q, x.k, x.v))
    assert attn.explain(q, k, v, causal=True, deterministic=False, backward=True).kernels == ("backward_delta", "backward_all", "backward_finish")
    found = attn.attention(q, k, v, causal=True, deterministic=False).float().sum().gradient(q, k, v)
    got = [array(g) for g in found]
  want = expected_gradients(p, x, {}, np.ones((p.B, p.H, p.Sq, p.Dv), np.float32), None)
  for name, g in zip("qkv", got): assert (verdict := judge(g, want[name])).ok, f"d{name}: {verdict}"

@pytest.mark.usefixtures("for_few")
def test_memory_at_once() -> None:
  # The kernel that computes all gradients at once needs 4 bytes of extra memory for each element of dq, for fp32 sums. Rows are rounded up to tiles
  # of 64 queries. With deterministic=True it also needs integers that give workgroups a fixed order: 8 for each tile, and one counter that numbers
  # the workgroups as they start. The number of keys does not matter.
  for Sk, deterministic in ((1024, False), (8192, False), (8192, True)):
    p = problem(B=4, H=64, Sq=2000, Sk=Sk, D=128, deterministic=deterministic)
    found = choose_backward(p, get_chip("sm_90"), "forward_wgmma")
    assert found.at_once and found.memory == 4*64*(2*4*2000 + 4*2048*128) + deterministic*4*(4*64*32*8 + 1)

def test_sdpa_by_itself_and_installed() -> None:
  with emulated("gfx942"):
    q, k, v = three()
    want = expected_of_sum(q, k, v, Sq=32, D=16, causal="top-left")
    hold(attn.scaled_dot_product_attention(q, k, v, is_causal=True).float().sum().gradient(q, k, v), want)
    with Context(TRAINING=1), attn.installed() as decisions:
      hold(q.scaled_dot_product_attention(k, v, is_causal=True).float().sum().gradient(q, k, v), want)
    assert decisions[-1].kernel == "forward"

def test_a_model_in_training_calls_as_berts_and_llamas_do() -> None:
  # Gradients are right for calls in the form of BERT (additive mask (B, 1, 1, S), no dropout) and of LLaMA (causal, grouped heads, bfloat16): their
  # error against fp32 is at most twice that of tinygrad's own gradients.
  with emulated("gfx942"), Context(TRAINING=1):
    mask = Tensor(np.where(np.arange(12) < 9, 0, -10000.0).astype(np.float32).reshape(1, 1, 1, 12)).cast(dtypes.half)
    for dtype, heads, call in (("float16", 4, {"attn_mask": mask}), ("bfloat16", 2, {"is_causal": True, "enable_gqa": True})):
      q, k, v = draw(1, 4, 12, 16, dtype=dtype), draw(1, heads, 12, 16, dtype=dtype, seed=1), draw(1, heads, 12, 16, dtype=dtype, seed=2)
      weight = draw(1, 4, 12, 16, dtype=dtype, seed=3)
      def gradients(t:tuple[Tensor, ...], w:Tensor) -> list[np.ndarray]:
        return [array(g) for g in (t[0].scaled_dot_product_attention(*t[1:], **call)*w).float().sum().gradient(*t)]
      own, fine = gradients((q, k, v), weight), gradients(tuple(t.float().realize() for t in (q, k, v)), weight.float())
      with attn.installed() as decisions: ours = gradients((q, k, v), weight)
      assert decisions[-1].kernel is not None, decisions[-1].reason
      for got, theirs, want in zip(ours, own, fine): assert np.abs(got - want).max() <= 2*np.abs(theirs - want).max() + 1e-5

def test_jit() -> None:
  with emulated("gfx942"):
    @TinyJit
    def step(q:Tensor, k:Tensor, v:Tensor) -> list[Tensor]:
      return [g.realize() for g in attn.attention(q, k, v, causal=True).float().sum().gradient(q, k, v)]
    for seed in range(4):
      q, k, v = (draw(1, 2, 32, 16, seed=seed*3 + i) for i in range(3))
      hold(step(q, k, v), expected_of_sum(q, k, v, Sq=32, D=16, causal=True))

def test_views_and_one_tensor_in_several_places() -> None:
  # A tensor x that is q, k and v of one call gets the sum of all three gradients. Views of a tensor get the gradients of their parts.
  with emulated("gfx942"):
    x = draw(1, 2, 32, 16)
    want = expected_of_sum(x, x, x, Sq=32, D=16)
    g, = attn.attention(x, x, x).float().sum().gradient(x)
    total = without_error(want[0].exact.shape)
    for law in want: total.add(..., law)
    assert (verdict := judge(array(g), total)).ok, verdict
    halves = draw(1, 2, 64, 16)
    g, = attn.attention(halves[:, :, ::2], halves[:, :, 1::2], halves[:, :, 1::2]).float().sum().gradient(halves)
    even, odd = halves[:, :, ::2].contiguous(), halves[:, :, 1::2].contiguous()
    law, *_ = expected_of_sum(even, odd, odd, Sq=32, D=16)
    assert judge(array(g)[:, :, ::2], law).ok

def test_out() -> None:
  with emulated("gfx942"):
    q, k, v = three()
    out = Tensor.empty(*q.shape, dtype=q.dtype, device="EMU")
    assert attn.attention(q, k, v, out=out) is out
    hold(out.float().sum().gradient(q, k, v), expected_of_sum(q, k, v, Sq=32, D=16))

READ: dict[str, Callable[[Tensor, Tensor], Any]] = {
  "nothing": lambda o, loss: None, "the loss": lambda o, loss: loss.item(), "o": lambda o, loss: o.numpy(), "o by name": lambda o, loss: o.realize()}

@pytest.mark.sample(2)
@pytest.mark.parametrize("what, training, splits", [
  ("the loss", 1, 1), ("the loss", 0, 1), ("o by name", 0, 1),
  *[pytest.param(*x, marks=pytest.mark.thorough) for x in (("o", 1, 1), ("o", 0, 2), ("o by name", 1, 2), ("the loss", 1, 2), ("the loss", 0, 2))]])
def test_a_loss_may_be_read_before_its_gradients_are_taken(what:str, training:int, splits:int) -> None:
  # Gradients through two layers of attention have the same bits whether or not the loss or an output was read before. A realized output has its own
  # buffer, so a later write to q does not change it.
  def gradient_of(read:str) -> list[np.ndarray]:
    x = draw(1, 2, 12, 16) @ (w := draw(16, 16, seed=3))
    first, lse = attn.attention(x + x, x, x, num_splits=splits, return_lse=True)
    o, more = attn.attention(x + first, first, first, num_splits=splits, return_lse=True)
    loss = o.float().square().mean() + lse.mean() + more.mean()
    READ[read](o, loss)
    if read == "o by name": loss = o.float().square().mean() + lse.mean() + more.mean()     # made of the realized tensors
    loss.backward()
    assert w.grad is not None, "the graph of the loss is lost"
    return [w.grad.numpy(), *(x.numpy() for x in loss.gradient(w, first))]
  with emulated("gfx942"), Context(TRAINING=training):
    for x, y in zip(gradient_of("nothing"), gradient_of(what)):
      assert x.any()
      np.testing.assert_array_equal(x, y)
    q = draw(1, 1, 12, 16).contiguous().realize()
    before = (o := attn.attention(q, q, q).realize()).numpy()
    q.assign(q*0).realize()
    np.testing.assert_array_equal(o.numpy(), before)

def test_lse_alone_after_it_was_read() -> None:
  # The gradient of a loss that uses only lse is right after lse was read and o was deleted: attn computes o again. If the rows of a sequence are
  # divided over devices, attn raises an error instead.
  def gradient_of(read:bool) -> np.ndarray:
    q, k, v = three()
    lse = attn.attention(q, k, v, return_lse=True)[1]
    if read: lse.realize()
    return array(lse.square().sum().gradient(q)[0])
  with emulated("gfx942"):
    np.testing.assert_array_equal(gradient_of(True), gradient_of(False))
    q, k, v = (t.shard(("EMU", "EMU:1"), 2).realize() for t in three())
    o, lse = attn.attention(q, k, v, return_lse=True)
    lse.realize()
    del o
    with pytest.raises(RuntimeError, match="the gradient through lse, which was computed before, needs o, which no longer exists"):
      lse.square().sum().gradient(q)

def test_a_kernel_function_and_what_nobody_wants_the_gradient_of() -> None:
  with emulated("gfx942"):
    q, k, v = three()
    o = Tensor.custom_kernel(Tensor.empty(*q.shape, dtype=q.dtype, device="EMU"), q, k, v, fxn=attn.flash_attention)[0].realize()
    hold(o.float().sum().gradient(q, k, v), expected_of_sum(q, k, v, Sq=32, D=16))
    w = draw(16, 16, seed=3)
    (o.detach() @ w).sum().backward()
    assert w.grad is not None and q.grad is None
    assert len([x for x in made if x is o.uop.base]) == 1

def test_a_gradient_through_what_tinyjit_has_captured_is_an_error() -> None:
  with emulated("gfx942"):
    q, k, v = three()
    @TinyJit
    def step(q:Tensor, k:Tensor, v:Tensor) -> Tensor:
      o = attn.attention(q, k, v).realize()
      return o.float().sum().gradient(q)[0].realize()
    step(q, k, v)
    with pytest.raises(RuntimeError, match=r"a gradient through an output of attention that TinyJit has captured and that was computed before"):
      step(q, k, v)

# ***** devices *****

TWO = ("EMU", "EMU:1")

@pytest.mark.sample(2)
@pytest.mark.parametrize("of_q, of_k, heads, layout", [
  ("batch", "batch", 2, "bhsd"), ("heads", "heads", 2, "bshd"), ("heads", None, 1, "bhsd"), (None, "rows", 2, "bhsd"),
  *[pytest.param(x, x, 2, "bhsd", marks=pytest.mark.thorough) for x in ("heads", None)]])
def test_shards(of_q:str|None, of_k:str|None, heads:int, layout:str) -> None:
  # If one half of the query heads of a key/value head is on one device and the other half on another, the gradient of this key/value head is the sum
  # of the gradients from both devices.
  axes = {"q": of_q, "k": of_k, "v": of_k, "o": of_q, "lse": of_q}
  def place(name:str, t:Tensor) -> Tensor:
    if name == "sinks": return t.shard(TWO, 0 if of_q == "heads" else None)
    return t.shard(TWO, None if (axis := axes[name]) is None else AXES["bhsd" if name == "lse" else layout].index(axis))
  check_gradients(B=2, H=4, Hkv=heads, Sq=12, Sk=16, layout=layout, through=("o", "lse"), place=place, extras=dict(sinks=floats(4)))

@pytest.mark.parametrize("shape, shared, axis", [((1, 4, 1, 16), "batch", None), ((1, 4, 12, 16), "heads", 1)])
def test_shards_with_a_bias(shape:tuple[int, ...], shared:str, axis:int|None) -> None:
  # The gradient of a bias that several devices use is the sum of the gradients from all devices.
  def place(name:str, t:Tensor) -> Tensor: return t.shard(TWO, axis if name == "bias" else ("batch", "heads").index(shared))
  check_gradients(B=2, H=4, Hkv=4, Sq=12, Sk=16, place=place, extras=dict(bias=floats(*shape)))

def test_attention_shards_a_tensor_on_one_device() -> None:
  # If q, k and v are divided over devices, `attention` also divides a bias or sinks that lie on one device. Each device then computes the gradient of
  # its part.
  def place(name:str, t:Tensor) -> Tensor: return t if name in ("bias", "sinks") else t.shard(TWO, 1)
  check_gradients(H=4, Sq=6, Sk=8, place=place, extras=dict(bias=floats(1, 4, 6, 8), sinks=floats(4)))

# ***** ATTN_KERNEL *****

BOTH = ("backward_dq", "backward_dkdv")

@pytest.mark.parametrize("kernel, names", [("forward,backward_dq", BOTH), ("backward_dkdv", BOTH), ("backward_three_pass", ()), ("three_pass", ()),
                                           ("backward_three_pass, forward", ())])
def test_named_kernels(kernel:str, names:tuple[str, ...]) -> None:
  with emulated("gfx942", kernel):
    choice = attn.explain(*three(), backward=True)
    assert choice.kernels == names
    if kernel.startswith("backward_t"): assert choice.refused == "ATTN_KERNEL=backward_three_pass asks for another kernel"

@pytest.mark.parametrize("arch, kernel, unit", [("sm_90", "backward_dq", "_wgmma"), ("sm_90", "backward_dkdv_wgmma,backward_dbias_mma", "_wgmma"),
                                                ("sm_90", "backward_dbias_mma,backward_dq_mma", "_mma"), ("sm_80", "backward_dbias_mma", "_mma")])
def test_named_units(arch:str, kernel:str, unit:str) -> None:
  # If the environment variable ATTN_KERNEL names a backward kernel, all gradients of q, k and v use the matrix unit of this kernel. ATTN_KERNEL
  # accepts the names that `explain` shows, one by one or as a list.
  with emulated(arch, kernel):
    q, bias = draw(1, 1, 64, 16), draw(1, 1, 64, 64)
    shown = attn.explain(q, q, q, bias=bias, backward=True).kernels
    assert shown == (f"backward_dq{unit}", f"backward_dkdv{unit}", "backward_dbias_mma")
  with emulated(arch, ",".join(shown)): assert attn.explain(q, q, q, bias=bias, backward=True).kernels == shown

def test_named_kernels_are_those_that_run() -> None: check_gradients("gfx942", "backward_three_pass", Sq=8, Sk=8, training=0)

def test_launches_of_named_kernels() -> None:
  assert launches("v", kernel="backward_dq") == 3 < launches("q", "k", "v", kernel="backward_three_pass")

def test_backward_kernels_that_cannot_be_forced() -> None:
  with emulated("gfx942", "backward_dq"), pytest.raises(NotImplementedError, match=r"ATTN_KERNEL=backward_dq: dtype float32.*; bias: there is no"):
    attn.attention(*[t.float() for t in three()], bias=draw(1, 1, 1, 32))
  for arch, kernel, reason in (("gfx942", "backward_dkdv_mma", "gfx942 has no mma.sync"), ("gfx942", "backward_dq_wgmma", "gfx942 has no wgmma"),
                               ("sm_80", "backward_dkdv_wgmma", "sm_80 has no wgmma"), ("sm_90", "backward_dq_wgmma", "Sq=32, Sk=32: a warpgroup")):
    with emulated(arch, kernel), pytest.raises(NotImplementedError, match=f"ATTN_KERNEL={kernel}: {reason}"): attn.explain(*three(), backward=True)
  with emulated("gfx942", "backward_dkdv"):
    rows = draw(1, 4, 12, 16, dtype="float32").shard(TWO), *[draw(1, 1, 12, 16, dtype="float32").shard(TWO, 2)]*2
    bias = draw(1, 1, 1, 12).shard(TWO)
    with pytest.raises(NotImplementedError, match=r"ATTN_KERNEL=backward_dkdv: dtype float32.*bias"): attn.attention(*rows, bias=bias)

@pytest.mark.parametrize("kernel, said", [("backward_dx", "'backward_dx': must be one of split_kv,.*or for the gradients.*backward_dq, "
                                                       "backward_dkdv, backward_dbias, backward_dq_wgmma.*backward_dbias_mma.*"
                                                       "backward_dkdv_tiled, backward_three"),
  ("forward,", "'' must be one of"), ("forward,three_pass", "forward and three_pass exclude each other"),
  ("backward_dq,backward_three_pass", "backward_dq and backward_three_pass exclude each other"),
  ("backward_dq_mma,backward_dkdv_wgmma", "backward_dq_mma and backward_dkdv_wgmma exclude each other")])
def test_words_that_name_no_kernel(kernel:str, said:str) -> None:
  with emulated("gfx942", kernel), pytest.raises(ValueError, match=said): attn.attention(*three())

# ***** cost and limits *****

def launches(*names:str, arch:str="gfx942", kernel:str="", training:int=1, **more:Tensor) -> int:
  # Counts the kernels, forward included, that run when the gradients of the inputs `names` are computed for a random dO.
  with emulated(arch, kernel), Context(TRAINING=training):
    t = dict(zip("qkv", three())) | {name: x.realize() for name, x in more.items()}
    gradients = attn.attention(**t).gradient(*[t[name] for name in names], gradient=draw(1, 2, 32, 16, seed=9))
    GlobalCounters.reset()
    Tensor.realize(*gradients)
    return GlobalCounters.kernel_count

def test_a_gradient_that_nobody_asks_for_costs_no_kernel() -> None:
  # A gradient that is not asked for runs no kernel. The forward kernel and backward_dq always run. backward_dkdv, which needs delta from backward_dq,
  # and the kernels of the gradients of sinks and bias run only if their gradient is asked for.
  assert launches("q") == 2 and launches("k") == launches("v") == launches("q", "k", "v") == 3
  with emulated("gfx942"): sinks, bias = Tensor(floats(2), device="EMU"), draw(1, 2, 32, 32, seed=4)
  assert launches("q", "k", "v", sinks=sinks, bias=bias) == 3 and launches("q", "sinks", sinks=sinks) == 3
  assert launches("q", "bias", arch="sm_80", bias=bias) == 3

# ***** gradients in parts *****

def in_parts(monkeypatch:pytest.MonkeyPatch, dq:int, dkdv:int, *sums:int) -> None:
  monkeypatch.setattr(gradient, "parts_of_chosen", lambda p, arch: Parts(dq, dkdv, sums))

@pytest.mark.parametrize("parts, parameters", [
  ((2, 4), dict(H=4, Hkv=1, Sk=70, causal=True)), ((2, 0, 2), dict(B=2, extras=dict(bias=floats(1, 2, 20, 40))))])
def test_parts_are_added(monkeypatch:pytest.MonkeyPatch, parts:tuple[int, ...], parameters:dict[str, Any]) -> None:
  in_parts(monkeypatch, *parts)
  check_gradients(through=("o", "lse"), **parameters)

def test_each_sum_of_parts_is_one_kernel_more(monkeypatch:pytest.MonkeyPatch) -> None:
  in_parts(monkeypatch, 2, 2)
  assert launches("q") == 3 and launches("v") == 4 and launches("q", "k", "v") == 6

@pytest.mark.parametrize("parts", [(0, 0), (2, 4)])
def test_memory(monkeypatch:pytest.MonkeyPatch, parts:tuple[int, ...]) -> None:
  # Gradients need memory, besides inputs and outputs, for lse and delta (8 bytes for each row) and for partial gradients. `memory_of`, whose number
  # `explain` shows, agrees with the buffers that tinygrad allocates.
  in_parts(monkeypatch, *parts)
  found, allocate = list[int](), Buffer.allocate
  def counted(self:Buffer, *args:Any, **more:Any) -> Buffer:
    if self._base is None: found.append(self.nbytes)
    return allocate(self, *args, **more)
  with emulated("gfx942"), Context(TRAINING=1):
    q, k, v, do = (draw(1, heads, 256, 32, seed=i) for i, heads in enumerate((4, 1, 1, 4)))
    gradients = attn.attention(q, k, v).gradient(q, k, v, gradient=do)
    monkeypatch.setattr(Buffer, "allocate", counted)
    Tensor.realize(*gradients)
    monkeypatch.setattr(Buffer, "allocate", allocate)
  p, outputs = problem(H=4, Hkv=1, Sq=256, D=32), 2*(2*q.numel() + 2*k.numel())       # bytes of o, dq, dk and dv
  assert memory_of(p, get_chip("gfx942"), Parts(*parts)) == 8*4*256 + 4*(parts[0]*q.numel() + parts[1]*2*k.numel())
  assert sum(found) == outputs + memory_of(p, get_chip("gfx942"), Parts(*parts))

def test_parts_where_a_grid_leaves_units_idle(capsys:pytest.CaptureFixture[str]) -> None:
  # A kernel divides its sums into partial gradients if its grid would leave compute units idle: if all query heads share one key/value head (MQA), or
  # if few queries meet many keys. A large grid needs no partial gradients.
  def chosen(B:int, H:int, Hkv:int, Sq:int, Sk:int, arch:str="gfx942") -> Parts:
    return choose_parts(problem(B=B, H=H, Hkv=Hkv, Sq=Sq, Sk=Sk, D=128), get_chip(arch))
  for arch in ("gfx942", "gfx950", "gfx1100", "gfx1201"):
    mqa, few, large = chosen(1, 32, 1, 4096, 2048, arch), chosen(1, 8, 8, 64, 65536, arch), chosen(4, 16, 16, 4096, 4096, arch)
    assert mqa.dkdv > 1 and few.dq > 1 and large == Parts(0, 0)
    own = get_chip(arch).cus*256*4*256*4            # bytes: up to 256 rows of dK and dV for each workgroup of a full chip
    assert memory_of(problem(H=32, Hkv=1, Sq=4096, Sk=2048, D=128), get_chip(arch), mqa) - 8*32*4096 <= 5*own
  with emulated("gfx942"):
    q, k = Tensor.empty(1, 32, 4096, 128, dtype=dtypes.half), Tensor.empty(1, 1, 4096, 128, dtype=dtypes.half)
    choice = attn.explain(q, k, k, backward=True)
  text = capsys.readouterr().out
  assert f"in {choice.parts[1]} parts" in text and f"memory beside inputs and outputs: {choice.memory} bytes" in text and choice.parts[1] > 1

def test_parts_by_the_longest_workgroup() -> None:
  # The number of partial gradients depends on the workgroup that takes longest. Under a causal mask this is the workgroup of the first keys, which
  # all queries see. If it would run long after the others have ended, sums are divided into more parts than without a mask: twice as many if all
  # heads share the keys. A grid with enough other work is not divided.
  def chosen(H:int, Hkv:int, causal:bool) -> int: return choose_parts(problem(H=H, Hkv=Hkv, Sq=4096, D=128, causal=causal), get_chip("sm_90")).dkdv
  assert chosen(32, 1, True) == 2*chosen(32, 1, False) == 8 and chosen(16, 4, True) == 2 and chosen(16, 4, False) == 0 == chosen(16, 16, True)

def test_most_seen() -> None:
  # `most_seen` computes the largest number of keys that a query sees, and of queries that see a key. Both agree with a mask in numpy.
  rng = np.random.default_rng(3)
  for _ in range(400):
    Sq, Sk, left, right = (int(rng.integers(low, high)) for low, high in ((1, 40), (1, 40), (-1, 12), (-1, 12)))
    causal = [False, True, "top-left"][int(rng.integers(3))]
    p = problem(Sq=Sq, Sk=Sk, causal=causal, **({} if causal else {"window": (left, right)}))
    further = np.arange(Sk) - np.arange(Sq)[:, None] - p.offset
    seen = ((further <= p.window[1]) | (p.window[1] < 0)) & ((further >= -p.window[0]) | (p.window[0] < 0))
    assert (most_seen(p, "keys"), most_seen(p, "queries")) == (seen.sum(1).max(), seen.sum(0).max()), p

FEW_ROWS_AT_ONCE = {"few queries": (1, 8, 8, 128, 65536), "all heads on one": (1, 32, 1, 4096, 4096)}
@pytest.mark.parametrize("case", FEW_ROWS_AT_ONCE)
def test_one_kernel_of_few_rows(case:str) -> None:
  # One kernel computes all gradients if there are few queries. It also does if there are few keys, and several workgroups can share the query heads
  # of a key/value head. Under a causal mask two kernels compute them.
  B, H, Hkv, Sq, Sk = FEW_ROWS_AT_ONCE[case]
  q, k = Tensor.empty(B, H, Sq, 128, dtype=dtypes.half), Tensor.empty(B, Hkv, Sk, 128, dtype=dtypes.half)
  assert attn.explain(q, k, k, arch="sm_90", backward=True, deterministic=False).at_once
  assert not attn.explain(q, k, k, arch="sm_90", backward=True, deterministic=False, causal="top-left").at_once

# ***** all gradients of few queries *****

NOT_FOR_FEW_QUERIES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
  "queries": (dict(Sq=65), {}, "Sq=65: a workgroup holds all queries of a head, at most 64"),
  "D": (dict(D=96), {}, "D=96, Dv=96: it was measured only with D 64 and 128, and Dv as large"),
  "heads": (dict(Hkv=2), {}, "8 heads, 2 key/value heads: it cannot add the dk and dv of several heads"),
  "an option": ({}, dict(softcap=3.0), "softcap: other kernels compute the gradients with this option"),
  "a window": ({}, dict(window=(4000, 0)), r"window=\(4000, 0\): it loops over all keys"),
  "a causal mask at the first keys": ({}, dict(causal="top-left"), "a query sees 32 keys on average: measured only from"),
  "keys": (dict(Sk=512), {}, "a query sees 512 keys on average: measured only from 1024 on")}

def few_or_two(*, H:int=8, Hkv:int=8, Sq:int=64, Sk:int=8192, D:int=128, **options:Any) -> Any:
  q, k = Tensor.empty(1, H, Sq, D, dtype="half"), Tensor.empty(1, Hkv, Sk, D, dtype="half")
  return attn.explain(q, k, k, arch="sm_90", backward=True, **options)

@pytest.mark.parametrize("case", NOT_FOR_FEW_QUERIES)
def test_other_kernels_where_the_kernel_of_few_queries_is_not_chosen(case:str) -> None:
  sizes, options, reason = NOT_FOR_FEW_QUERIES[case]
  assert re.match(reason, few_or_two(**sizes, **options).why_not("backward_few_wgmma") or "")

def test_few_queries_are_chosen() -> None:
  # One kernel computes all gradients of few queries, in any order and in a fixed order alike. Its memory is lse and delta, and dq in fp32 for each
  # part of the keys.
  for D, options in ((64, {}), (128, {}), (128, dict(deterministic=False)), (128, dict(causal=True)), (128, dict(dropout_p=0.1))):
    found = few_or_two(D=D, **options)
    assert found.kernels == ("backward_few_wgmma",) and found.at_once
    assert found.memory == 4*8*64*(2 + found.parts[0]*D)

@pytest.fixture
def for_few_keys(monkeypatch:pytest.MonkeyPatch) -> None: monkeypatch.setattr(backward_tiles, "FEW_QUERIES_KEYS", 64)

@pytest.mark.usefixtures("for_few_keys")
def test_gradients_of_few_queries_in_a_jit() -> None:
  # The gradients of few queries, with those of sinks and of lse, are right, and the same in each call under TinyJit. Each can be realized alone.
  p = problem(B=1, H=2, Sq=64, Sk=320, D=128, extras=(extras := dict(sinks=floats(2))))
  x, do, dlse = normal(p), np.ones((p.B, p.H, p.Sq, p.Dv), np.float32), np.ones((p.B, p.H, p.Sq), np.float32)
  want = expected_gradients(p, x, extras, do, dlse)
  with emulated("sm_90"):
    q, k, v, sinks = (tensor(a, kind, "EMU").realize() for a, kind in ((x.q, p.dtype), (x.k, p.dtype), (x.v, p.dtype), (extras["sinks"], "float32")))
    assert attn.explain(q, k, v, sinks=sinks, backward=True).kernels == ("backward_few_wgmma",)
    def gradients(q:Tensor) -> list[Tensor]:
      o, lse = attn.attention(q, k, v, sinks=sinks, return_lse=True)
      return (o.float().sum() + lse.sum()).gradient(q, k, v, sinks)
    @TinyJit
    def replayed(q:Tensor) -> tuple[Tensor, ...]:
      Tensor.realize(*(found := gradients(q)))
      return tuple(found)
    runs = [[array(t) for t in replayed(q)] for _ in range(3)]
    alone = array(gradients(q)[1])
  for run in runs[1:]: assert all((a == b).all() for a, b in zip(run, runs[0]))
  assert (alone == runs[0][1]).all()
  for name, got in zip(("q", "k", "v", "sinks"), runs[0]): assert (verdict := judge(got, want[name])).ok, f"d{name}: {verdict}"

@pytest.mark.usefixtures("for_few_keys")
def test_few_queries_whose_heads_two_devices_share(monkeypatch:pytest.MonkeyPatch) -> None:
  # Two devices have a head each of the queries, and the same keys. Each writes its part of dk and dv in fp32, and these parts are added.
  found, real = list[bool](), gradients_of_few.as_owner_of_keys
  def noted(group:Any, tiles:Any, in_parts:bool) -> Any:
    found.append(in_parts)
    return real(group, tiles, in_parts)
  monkeypatch.setattr(gradients_of_few, "as_owner_of_keys", noted)
  def place(name:str, t:Tensor) -> Tensor: return t.shard(TWO, 1 if name in ("q", "o") else None)
  check_gradients("sm_90", H=2, Hkv=1, Sq=64, Sk=128, D=128, place=place)
  assert set(found) == {True}

def test_forward_runs_again_for_its_lse_outside_of_training() -> None: assert launches("q", "k", "v", training=0) == 4

def test_by_three_pass_forward_does_not_run_and_each_gradient_stands_alone() -> None:
  assert launches("v", kernel="three_pass") < launches("q", "k", "v", kernel="three_pass")

def test_no_second_derivative() -> None:
  with emulated("gfx942"):
    q, k, v = three()
    g, = attn.attention(q, k, v).float().sum().gradient(q)
    with pytest.raises(NotImplementedError, match=r"no second derivative.*ATTN_KERNEL=three_pass"): g.float().square().sum().gradient(k)
  with emulated("gfx942", "three_pass"):
    g, = attn.attention(q, k, v).float().sum().gradient(q)
    assert np.isfinite(array(g.float().square().sum().gradient(k)[0])).all()

def test_appending_to_a_cache_has_no_gradient() -> None:
  with emulated("gfx942"):
    q, k, v = three()
    caches = attn.empty_kv_cache(1, 2, 64, 16, device="EMU")
    o = attn.attention_with_kv_cache(q, k, v, *caches, 0)
    with pytest.raises(NotImplementedError, match=r"[kv]_cache: appending to a cache has no gradient"): o.float().sum().gradient(k)
    assert array(o.float().sum().gradient(q)[0]).any()

def test_explain_tells_what_computes_the_gradient(capsys:pytest.CaptureFixture[str]) -> None:
  with emulated("gfx942"):
    q, k, v = three()
    choice = attn.explain(q, k, v, backward=True)
    assert choice.kernels == ("backward_dq", "backward_dkdv") and "forward on gfx942" in (text := capsys.readouterr().out)
    assert re.search(r"gradient on gfx942.*: backward_dq tile \d+x\d+ .*, backward_dkdv tile \d+x\d+ ", text)
    assert attn.explain(q.float(), k.float(), v.float(), backward=True).kernels == ("backward_dq_tiled", "backward_dkdv_tiled")
    assert attn.explain(q, k, v, arch="sm_80", backward=True).kernels == ("backward_dq_mma", "backward_dkdv_mma")
    bias = draw(1, 2, 32, 32)
    assert attn.explain(q, k, v, bias=bias, arch="sm_90", backward=True).kernels == ("backward_dq_mma", "backward_dkdv_mma", "backward_dbias_mma")
    capsys.readouterr()
    choice = attn.explain(q.float(), k.float(), v.float(), bias=bias, arch="sm_80", backward=True)
    text = capsys.readouterr().out
    assert choice.kernels == () and "three_pass, computed again" in text and f"not backward_dq and backward_dkdv: {choice.refused}" in text
    one, bias = draw(1, 1, 32, 16), draw(1, 1, 32, 32)
    shared = q.shard(TWO, 1), one.shard(TWO, None), one.shard(TWO, None)
    assert attn.explain(*shared, bias=bias, backward=True).kernels == (*BOTH, "backward_dbias")
    assert attn.explain(q.shard(TWO), k.shard(TWO, 2), v.shard(TWO, 2), backward=True).kernels == BOTH
    with pytest.raises(ValueError, match="backward='nonsense'"): attn.explain(q, k, v, backward="nonsense")
