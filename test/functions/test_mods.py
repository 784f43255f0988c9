"""Tests of the functions of attn.mods, ready-made score_mods and mask_mods: o, lse and the gradients agree with float64. The tests compute each
function a second time in numpy."""
from __future__ import annotations
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
import numpy as np
import pytest
import attn
from attn.accuracy import judge, law_of, law_of_gradients
from attn.reference import Array, Options
from attn.tinygrad_compat import Context, Tensor
from api_cases import computed_on, run_on_a_cpu
from cases import array, normal, problem, tensor

pytestmark = pytest.mark.usefixtures("not_unrolled")

B, H, HKV, SQ, SK = 2, 2, 1, 33, 50
BATCH, HEAD = np.arange(B)[:, None, None, None], np.arange(H)[:, None, None]
I, J = np.arange(SK - SQ, SK)[:, None], np.arange(SK)     # the last query is at the last key

# ***** what the functions mean *****

Scores = tuple[Array, Any, float]     # as attn.reference.Options.score_mod returns them

def numbers(*shape:int, seed:int=3) -> Array: return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)

NUMBERS = np.array([[0]*9 + [4]*20 + [1]*21, [2]*25 + [7] + [2]*24], np.int32)
SLOPES, TABLE, GATES, SCALES = np.array([0.5, 0.03125], np.float32), numbers(H, 2*SK - 1), np.array([1.25, -0.5], np.float32), numbers(H)

def of_head(x:Array) -> Array: return x.astype(np.float64)[HEAD]
def added(s:Array, x:Array) -> Scores: return s + x, np.ones_like(s), 0.0
def times(s:Array, x:Array) -> Scores: return s*x, np.broadcast_to(x, s.shape), float(np.abs(s).max())
def capped(s:Array, cap:float) -> Scores: return cap*np.tanh(s/cap), np.cosh(s/cap)**-2, cap

def in_reach(i:Any, j:Any) -> Any:
  # Returns whether pixel j lies in the tile of pixel i or in one of the eight tiles around it.
  # Tiles are 2 x 2 pixels of an image with 8 columns.
  (y, x), (at_y, at_x) = np.divmod(i, 8), np.divmod(j, 8)
  first_y, first_x = y - y % 2 - 2, x - x % 2 - 2
  return (first_y <= at_y) & (at_y < first_y + 6) & (first_x <= at_x) & (at_x < first_x + 6)

@dataclass(frozen=True)
class Example:
  # A function of attn.mods with its tensors, and its meaning in numpy: `sees` for a mask_mod, `scores` for a score_mod.
  function: Callable[..., Any]
  sees: Array|None = None
  scores: Callable[[Array], Scores]|None = None
  tensors: tuple[Array, ...] = ()
  causal: bool = False
  @property
  def mods(self) -> dict[str, Any]: return {"mask_mod" if self.scores is None else "score_mod": self.function}

EXAMPLES = {
  "causal": Example(attn.mods.causal, J <= I),
  "sliding_window": Example(attn.mods.sliding_window(9), (I - 9 < J) & (J <= I)),
  "dilated_window": Example(attn.mods.dilated_window(20, 3), np.isin(I - J, range(0, 20, 3))),
  "sinks_and_window": Example(attn.mods.sinks_and_window(3, 11), (J <= I) & ((J < 3) | (J > I - 11))),
  "documents": Example(attn.mods.documents, (NUMBERS[:, SK - SQ:, None] == NUMBERS[:, None])[:, None], tensors=(NUMBERS,)),
  "prefix_lm": Example(attn.mods.prefix_lm(23), (J <= I) | (J <= 22)),
  "neighbourhood": Example(attn.mods.sliding_tile(8, 2), np.isin(J//8 - I//8, range(-2, 3)) & np.isin(J % 8 - I % 8, range(-2, 3))),
  "sliding_tile": Example(attn.mods.sliding_tile(8, 1, tile=2), in_reach(I, J)),
  "alibi_bias": Example(attn.mods.alibi_bias, scores=lambda s: added(s, -of_head(SLOPES)*abs(I - J)), tensors=(SLOPES,)),
  "relative_bias": Example(attn.mods.relative_bias(SK), scores=lambda s: added(s, TABLE[:, I - J + 49]), tensors=(TABLE,), causal=True),
  "tanh_softcap": Example(attn.mods.tanh_softcap(0.75), scores=lambda s: capped(s, 0.75), causal=True),
  "tanh_gate": Example(attn.mods.tanh_gate, scores=lambda s: times(s, np.tanh(of_head(GATES))), tensors=(GATES,)),
  "head_scale": Example(attn.mods.head_scale, scores=lambda s: times(s, of_head(SCALES)), tensors=(SCALES,), causal=True)}

# ***** the check *****

def check(example:Example, device:str, kernel:str="", D:int=64, gradients:bool=True, dtype:str="float16") -> None:
  # Compares o, lse and the gradients of q, k and v with float64: each element must be within its error limit (docs/contract.md).
  p = problem(B, H, HKV, SQ, SK, D, dtype=dtype, causal=example.causal)
  x = normal(p)
  do = normal(problem(B, H, HKV, SQ, SQ, D, dtype=dtype), seed=5).q
  options = Options(score_mod=example.scores, mask_mod=example.sees)
  of = (x.q, x.k, x.v), (p.softmax_scale, p.window, p.offset, options), {"dtype": dtype, "out_dtype": dtype}
  with computed_on(device, kernel), Context(TRAINING=1):
    on = device.partition(":")[0]
    q, k, v, g = (tensor(a, dtype, on).realize() for a in (x.q, x.k, x.v, do))
    o, lse = attn.attention(q, k, v, **example.mods, mod_tensors=[Tensor(t, device=on).realize() for t in example.tensors],
                            causal=example.causal, return_lse=True)
    results = {"o": o, "lse": lse} | (dict(zip(("q", "k", "v"), o.gradient(q, k, v, gradient=g))) if gradients else {})
    Tensor.realize(*results.values())
    got = {name: array(t) for name, t in results.items()}
  laws = dict(zip(("o", "lse"), law_of(*of[0], *of[1], **of[2])))
  if gradients: laws |= vars(law_of_gradients(*of[0], do, None, *of[1], **of[2]))
  for name, out in got.items(): assert (verdict := judge(out, laws[name])).ok, f"{name}: {verdict}"

UNITS = ("EMU::gfx942", "EMU::sm_90")
WITH_GRADIENTS = ("sinks_and_window", "documents", "relative_bias", "tanh_softcap", "tanh_gate")     # by default

@pytest.mark.sample(6)
@pytest.mark.parametrize("name, unit", [(name, UNITS[i % 2]) for i, name in enumerate(EXAMPLES)])
def test_example(name:str, unit:str) -> None: check(EXAMPLES[name], unit, D=32, gradients=name in WITH_GRADIENTS)

OTHERS = (*UNITS, *(f"EMU::{arch}" for arch in ("gfx950", "gfx1100", "gfx1201", "sm_80", "gfx1030")))

@pytest.mark.thorough
@pytest.mark.parametrize("unit", OTHERS)
@pytest.mark.parametrize("name", EXAMPLES)
def test_example_on_every_unit(name:str, unit:str) -> None: check(EXAMPLES[name], unit)

@pytest.mark.thorough
@pytest.mark.parametrize("name", EXAMPLES)
def test_example_in_float32(name:str) -> None: check(EXAMPLES[name], "EMU::gfx1030", dtype="float32")

@pytest.mark.thorough
@pytest.mark.parametrize("name", EXAMPLES)
def test_example_in_tensor_operations(name:str) -> None: check(EXAMPLES[name], "EMU::gfx942", "three_pass")

@pytest.mark.thorough
def test_examples_on_a_cpu() -> None:
  script = "import test_mods\nfor x in test_mods.EXAMPLES.values(): test_mods.check(x, 'CPU', dtype='float32')"
  run_on_a_cpu(script, timeout=900)
