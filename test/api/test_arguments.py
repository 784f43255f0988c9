"""Tests of every argument of every public function with values of wrong type, wrong values and extreme values. Each call gives the right result, or
raises a ValueError or NotImplementedError that names the function and the argument. The environment variable ATTN_EXAMPLES sets the number of random
problems:

    ATTN_EXAMPLES=2000 python -m pytest test/api/test_arguments.py -k random
"""
from __future__ import annotations
import functools, inspect, os
from collections.abc import Callable
from typing import Any
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from tinygrad import Variable
import attn
from attn import flash_attn, values
from attn.accuracy import judge, law_of
from attn.api.checked_call import known
from attn.reference import Options
from attn.tinygrad_compat import DType, GlobalCounters, Tensor, dtypes
from api_cases import check_attention, emulated, whole
import api_cases
from cases import array

pytestmark = pytest.mark.usefixtures("not_unrolled")

REFUSALS = (ValueError, NotImplementedError)
EXAMPLES = int(os.environ.get("ATTN_EXAMPLES", "10"))     # the thorough run uses 100

def half(*shape:int) -> Tensor: return draw(*shape)
draw = functools.cache(api_cases.draw)      # cached, because the tests make thousands of calls
@functools.cache
def int32(*values:int) -> Tensor: return Tensor(np.array(values, np.int32), device="EMU").realize()
def caches() -> dict[str, Tensor]:
  k, v = attn.empty_kv_cache(1, 2, 8, 16)
  return {"k_cache": k, "v_cache": v}
def four() -> dict[str, Any]: return {name: draw(1, 2, n, 16, seed=i) for i, (name, n) in enumerate((("q", 3), ("k", 5), ("v", 5)))}
def rows() -> dict[str, Any]: return {name: draw(1, n, 2, 16, seed=i) for i, (name, n) in enumerate((("q", 3), ("k", 5), ("v", 5)))}
def packed() -> dict[str, Any]:
  return {**{name: draw(9, 2, 16, seed=i) for i, name in enumerate("qkv")}, "cu_seqlens_q": int32(0, 4, 9), "cu_seqlens_k": int32(0, 4, 9)}
def new() -> dict[str, Any]: return {"k_new": draw(1, 2, 1, 16), "v_new": draw(1, 2, 1, 16), **caches(), "cache_seqlens": 3}

class Strange:
  def __repr__(self) -> str: return "Strange()"

# Values that every argument gets in turn.
VALUES: dict[str, Callable[[], Any]] = {
  "None": lambda: None, "True": lambda: True, "False": lambda: False, "numpy bool": lambda: np.bool_(True),
  # words
  "a word": lambda: "x", "no word": lambda: "", "bytes": lambda: b"x", "bhsd": lambda: "bhsd", "top-left": lambda: "top-left",
  "gfx942": lambda: "gfx942", "gfx1100": lambda: "gfx1100", "float32 by name": lambda: "float32",
  # numbers
  "0": lambda: 0, "1": lambda: 1, "2": lambda: 2, "3": lambda: 3, "-1": lambda: -1, "-2": lambda: -2, "2**31": lambda: 2**31,
  "10**400": lambda: 10**400, "2.0": lambda: 2.0, "2.5": lambda: 2.5, "-2.5": lambda: -2.5, "nan": lambda: float("nan"),
  "inf": lambda: float("inf"), "1e308": lambda: 1e308, "1e-45": lambda: 1e-45, "1j": lambda: 1j, "int64": lambda: np.int64(2),
  "float32": lambda: np.float32(2),
  # tuples, lists and other collections
  "[]": lambda: [], "()": lambda: (), "[1, 1]": lambda: [1, 1], "(1,)": lambda: (1,), "(1, 1)": lambda: (1, 1), "(0, -1)": lambda: (0, -1),
  "(1.5, 1)": lambda: (1.5, 1), "('1', 1)": lambda: ("1", 1), "(2**40, 1)": lambda: (2**40, 1), "{}": lambda: {}, "set": lambda: {1},
  # other objects
  "strange": Strange, "a type": lambda: int, "a function": lambda: len, "a dtype": lambda: dtypes.half, "an int dtype": lambda: dtypes.int,
  # tensors
  "an array": lambda: np.zeros((3, 4), np.float32), "a number tensor": lambda: Tensor(1.5, device="EMU"),
  "an int tensor": lambda: int32(1, 2, 3), "one int": lambda: int32(2), "a long tensor": lambda: int32(2).cast(dtypes.long),
  "a float tensor": lambda: draw(7, dtype="float32"), "a bool tensor": lambda: int32(1) > 0, "five dimensions": lambda: draw(1, 1, 2, 3, 16),
  "no rows": lambda: Tensor.empty(0, dtype=dtypes.half, device="EMU"),
  "no row of four": lambda: Tensor.empty(1, 2, 0, 16, dtype=dtypes.half, device="EMU"),
  "no width": lambda: Tensor.empty(1, 2, 3, 0, dtype=dtypes.half, device="EMU"),
  "another device": lambda: Tensor(np.zeros((1, 2, 3, 16), np.float16), device="EMU:1"),
  "a Variable": lambda: Variable("n", 0, 5).bind(2), "a free Variable": lambda: Variable("n", 0, 5),
  "a symbolic shape": lambda: draw(1, 2, 5, 16)[:, :, :Variable("m", 1, 5).bind(3)],
}

def packed_but(*names:str) -> dict[str, Any]: return {name: x for name, x in packed().items() if name not in names}
def pages(k:str, v:str) -> dict[str, Any]:
  # Makes the cache arguments of a call: caches, with the argument names `k` and `v`, of one page of four rows, and the block table.
  # A function that does not know pages can take the same tensors as a cache of one batch.
  found = [draw(1, 4, 4, 16, seed=i).contiguous().realize() for i in range(2)]
  return {k: found[0], v: found[1], "block_table": Tensor([[0]], dtype=dtypes.int, device="EMU").realize()}

TWO = ("EMU:0", "EMU:1")

# function -> (the function, its right arguments); each test replaces one argument
FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]]]] = {
  "attention": (attn.attention, four), "explain": (attn.explain, four), "attention, packed": (attn.attention, lambda: {**packed(), "layout": "thd"}),
  "append_kv": (attn.append_kv, new), "attention_with_kv_cache": (attn.attention_with_kv_cache, lambda: {"q": draw(1, 2, 1, 16), **new()}),
  "empty_kv_cache": (attn.empty_kv_cache, lambda: {"batch": 1, "heads": 2, "capacity": 3, "width": 4}),
  "scaled_dot_product_attention": (attn.scaled_dot_product_attention, lambda: dict(zip(("query", "key", "value"), four().values()))),
  "flash_attention_fn": (attn.flash_attention_fn, dict),
  "dropout_mask": (attn.dropout_mask, lambda: {"seed": int32(1, 2).cast(dtypes.uint), "p": 0.1, "B": 1, "H": 2, "Sq": 3, "Sk": 5}),
  "flash_attn_func": (flash_attn.flash_attn_func, rows),
  "flash_attn_kvpacked_func": (flash_attn.flash_attn_kvpacked_func, lambda: {"q": draw(1, 3, 2, 16), "kv": draw(1, 5, 2, 2, 16)}),
  "flash_attn_qkvpacked_func": (flash_attn.flash_attn_qkvpacked_func, lambda: {"qkv": draw(1, 5, 3, 2, 16)}),
  "flash_attn_varlen_func": (flash_attn.flash_attn_varlen_func, lambda: {**packed(), "max_seqlen_q": 5, "max_seqlen_k": 5}),
  "flash_attn_varlen_kvpacked_func": (flash_attn.flash_attn_varlen_kvpacked_func,
                                      lambda: {**packed_but("k", "v"), "kv": draw(9, 2, 2, 16), "max_seqlen_q": 5, "max_seqlen_k": 5}),
  "flash_attn_varlen_qkvpacked_func": (flash_attn.flash_attn_varlen_qkvpacked_func,
                                       lambda: {"qkv": draw(9, 3, 2, 16), "cu_seqlens": packed()["cu_seqlens_q"], "max_seqlen": 5}),
  "shard_sequence": (attn.shard_sequence, lambda: {"x": draw(1, 2, 5, 16), "devices": TWO, "axis": 2}),
  "unshard_sequence": (attn.unshard_sequence, lambda: {"x": attn.shard_sequence(draw(1, 2, 5, 16), TWO, 2), "axis": 2, "length": 5}),
  "empty_paged_cache": (attn.empty_paged_cache, lambda: {"num_pages": 2, "page_size": 3, "Hkv": 2, "D": 4}),
  "attention, pages": (attn.attention, lambda: {"q": draw(1, 4, 3, 16), **pages("k", "v"), "kv_lengths": int32(2)}),
  "append_kv, pages": (attn.append_kv, lambda: {**dict.fromkeys(("k_new", "v_new"), draw(1, 4, 1, 16)), **pages("k_cache", "v_cache"),
                                                "cache_seqlens": 1}),
  "flash_attn_with_kvcache": (flash_attn.flash_attn_with_kvcache, lambda: {"q": draw(1, 1, 2, 16), "k_cache": draw(1, 8, 2, 16),
                                                                         "v_cache": draw(1, 8, 2, 16, seed=1)}),
  "quantize_kv": (attn.quantize_kv, lambda: {"x": draw(1, 2, 3, 16)}), "rotate": (attn.rotate, lambda: {"x": draw(1, 2, 3, 16)}),
  "dequantize_kv": (attn.dequantize_kv, lambda: {"rows": attn.quantize_kv(draw(1, 2, 3, 16))}),
}
# Other words by which a message may name an argument: for tensors, a dimension or another tensor that it does not fit.
ALSO = {
  "q": ("query", "H=", "k has", "B=", "v has", "bias", "D=", "k_cache"), "k": ("q, k and v", "v has", "Hkv"), "v": ("q, k and v", "Dv"),
  "kv": ("k has", "k is"), "qkv": ("q has",), "layout": ("has shape",), "k_new": ("k_cache",), "v_new": ("v_cache",), "k_cache": ("k_new", "q, k"),
  "v_cache": ("v_new", "q, k"), "query": ("key", "enable_gqa"), "key": ("query", "value"), "value": ("key",), "cu_seqlens_q": ("cu_seqlens_k",),
  "cu_seqlens_k": ("cu_seqlens_q", "max_seqlen"), "is_causal": ("attn_mask",), "block_table": ("k_new", "kv_lengths"),
  "x": ("length=",), "max_seqlen": ("max_seqlen_q",), "cu_seqlens": ("cu_seqlens_q",)}

def parameters(name:str) -> list[str]:
  return [p.name for p in inspect.signature(FUNCTIONS[name][0]).parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]

def mentions(value:Any, text:str) -> bool:
  # Returns whether the error message `text` shows the wrong value of an argument.
  # A Tensor or an array need not be shown. The value None need not be shown if the message has the word "needs": it then says which argument is
  # missing.
  if isinstance(value, (Tensor, np.ndarray)): return True
  if value is None and "needs" in text: return True
  parts = value if isinstance(value, (tuple, list)) else ()
  told = [values.shown(value), str(value)[:values.SHOWN_MOST], *map(values.shown, parts)]
  if isinstance(value, DType): told.append(values.dtype_text(value))
  return any(x in text for x in told)

def check_result(name:str, given:dict[str, Any], result:Any) -> None:
  # Checks the result of a call of the function `name` with the arguments `given`.
  # Each element of the output o of `attention` in layout bhsd must be within its error limit (docs/contract.md); all other results must be finite.
  tensors = [t for t in (result if isinstance(result, tuple) else (result,)) if isinstance(t, Tensor)]
  if tensors: Tensor.realize(*tensors)
  if name == "attention" and not any(given.get(x) is not None for x in ("kv_lengths", "bias")) and given.get("layout", "bhsd") == "bhsd":
    x = [array(given[n]) for n in ("q", "k", "v")]
    queries, keys = given.get("sequence_lengths") or (x[0].shape[2], x[1].shape[2])     # rows beyond belong to no sequence
    x = [a[:, :, :n] for a, n in zip(x, (queries, keys, keys))]
    o = array(tensors[0])
    assert not o[:, :, queries:].any()
    causal, (left, to_right), scale = given.get("causal", False), given.get("window", (-1, -1)), given.get("softmax_scale")
    args = (0.25 if scale is None else float(scale), (min(int(left), 1000), min(int(0 if causal else to_right), 1000)),
            0 if causal == "top-left" else keys - queries,
            Options(softcap=float(given.get("softcap", 0.0)), top_left=causal == "top-left"))
    out_dtype = "float32" if given.get("out_dtype") == "float32" else "float16"
    assert (verdict := judge(o[:, :, :queries], law_of(*x, *args, dtype="float16", out_dtype=out_dtype)[0])).ok, verdict
  elif name not in ("empty_kv_cache", "empty_paged_cache"):
    for t in map(whole, tensors[:1]):
      t = t.shrink_to([known(n) for n in t.shape])
      assert np.isfinite(array(t) if dtypes.is_float(t.dtype) else t.numpy()).all()

def result_of(name:str, argument:str, label:str) -> tuple[dict[str, Any], Any]|None:
  # Calls the function `name` with VALUES[label] as `argument`; returns (arguments, result), or None if a good error was raised.
  # A good error names the function and the argument. The result is not computed yet.
  function, make = FUNCTIONS[name]
  given, before = make() | {argument: VALUES[label]()}, GlobalCounters.kernel_count
  try: return given, function(**given)
  except REFUSALS as e:
    text = str(e)
    assert text.startswith(f"{function.__name__}: "), f"{argument} is {label}: {text}"
    assert any(word in text for word in (argument, *ALSO.get(argument, ()))), f"{argument} is {label}: {text}"
    assert mentions(given[argument], text), f"{argument} is {label}: {text}"
    assert GlobalCounters.kernel_count == before and "UOp(" not in text and "<UOp" not in text and len(text) < 600, f"{label}: {text}"
  except RuntimeError as e:
    assert name == "scaled_dot_product_attention" and argument == "attn_mask", f"{argument} is {label}: {e}"     # as PyTorch does
  except Exception as e: raise AssertionError(f"{name}({argument}={label}): {type(e).__name__}: {e}") from e
  return None

ARGUMENTS = [(name, argument) for name in FUNCTIONS for argument in parameters(name)]

def check_argument(name:str, argument:str, computed:slice) -> None:
  # Calls the function `name` once for each test value of `argument`, and checks the results of the accepted calls `computed`.
  # `computed` is a slice of the accepted calls.
  with emulated("gfx942"):
    accepted = [(label, found) for label in VALUES if (found := result_of(name, argument, label)) is not None]
    for label, (given, result) in accepted[computed]:
      try: check_result(name, given, result)
      except Exception as e: raise AssertionError(f"{name}({argument}={label}) is accepted, but the result is wrong: {type(e).__name__}: {e}") from e

@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_every_argument(name:str, argument:str) -> None:
  # A function either accepts a value of an argument, or refuses it with a good error. To save time, only some of the accepted calls are computed:
  # every fortieth, from a first call that differs from argument to argument.
  turn = ARGUMENTS.index((name, argument))
  check_argument(name, argument, slice(turn % 40, None, 40))

@pytest.mark.thorough
@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_every_accepted_value(name:str, argument:str) -> None: check_argument(name, argument, slice(None))

def test_every_public_function_is_here() -> None:
  functions = {name for name in attn.__all__ if inspect.isfunction(getattr(attn, name))}
  of_others = {"flash_attention", "install", "installed", "uninstall"}     # they take the arguments of `attention`, or none
  assert functions - of_others <= {name.split(",")[0] for name in FUNCTIONS} and of_others <= functions
  assert {name for name in vars(flash_attn) if name.startswith("flash_attn")} <= FUNCTIONS.keys()

# ***** random problems *****

@st.composite
def random_problems(d:Any) -> dict[str, Any]:
  pick = lambda *xs: d(st.sampled_from(xs))
  Hkv, group = pick(1, 2), pick(1, 1, 3)
  causal = pick(False, False, True, "top-left")
  p: dict[str, Any] = {"H": Hkv*group, "Hkv": Hkv, "D": pick(8, 16, 20, 33, 64, 128), "dtype": pick("float16", "bfloat16"), "causal": causal,
                       "softcap": pick(0.0, 0.0, 1.5, 30.0), "num_splits": pick(0, 0, 1, 2, 5),
                       "window": (pick(-1, -1, 0, 5, 200, 2**33), -1 if causal else pick(-1, -1, 0, 9, 2**31))}
  rng = np.random.default_rng(d(st.integers(0, 2**16)))
  extras: dict[str, np.ndarray] = {}
  if pick(False, False, True): extras["sinks"] = rng.standard_normal(p["H"]).astype(np.float32)
  if pick(False, False, False, True):
    lengths = [d(st.integers(0, 40)) for _ in range(pick(1, 2, 4))]
    ends = np.cumsum([0, *lengths]).astype(np.int32)
    if ends[-1] == 0: ends[-1] = 1
    extras |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
    return p | {"B": 1, "Sq": int(ends[-1]), "Sk": int(ends[-1]), "layout": "thd", "extras": extras, "Hkv": p["Hkv"]}
  p |= {"B": pick(1, 1, 2), "Sq": pick(1, 2, 17, 64, 70), "Sk": d(st.integers(1, 140)), "layout": pick("bhsd", "bshd"), "Dv": pick(None, None, 24),
        "out_dtype": pick(None, "float32")}
  if p["out_dtype"] is None: del p["out_dtype"]
  if pick(False, False, True): extras["alibi_slopes"] = np.abs(rng.standard_normal(p["H"])).astype(np.float32)
  if pick(False, False, True): extras["kv_lengths"] = np.array([d(st.integers(0, p["Sk"])) for _ in range(p["B"])], np.int32)
  return p | {"extras": extras}

def drawn(examples:int) -> Callable[[Any], Any]:
  # Decorator: runs a test on `examples` random problems, each on a random chip.
  # If `examples` is at most 25, every run draws the same problems.
  problems = given(random_problems(), st.sampled_from(("gfx942", "gfx950", "gfx1100", "gfx1201", "sm_80", "sm_90")))
  many = settings(max_examples=examples, deadline=None, derandomize=examples <= 25, suppress_health_check=list(HealthCheck))
  return lambda test: many(problems(test))

@drawn(EXAMPLES)
def test_random_problems(parameters:dict[str, Any], arch:str) -> None: check_attention(arch, **parameters)

@pytest.mark.thorough
@drawn(100)
def test_many_random_problems(parameters:dict[str, Any], arch:str) -> None: check_attention(arch, **parameters)
