"""No forward kernel that dispatch chooses spills registers in its hot loop: problems that did, and some at random."""
from __future__ import annotations
import random
from dataclasses import replace
from typing import Any
import numpy as np
import pytest
from attn.chips import get_chip
from attn.choose.dispatch import choose, program_of
from attn.compilers.clang import assembly, toolchain
from attn.isa.report import analyse
from attn.kernels.parts.tensors import arguments
from attn.ops.renderers import render
from attn.problem import Problem
from attn.tinygrad_compat import UOp
from cases import ARCHS, TYPES, problem
pytest.importorskip("ziglang")

def scratch_accesses(p:Problem, arch:str) -> int:
  """Of a trip of the kernel that dispatch chooses: 0 where it has no trips, or is none of ours."""
  choice = choose(p, replace(get_chip(arch), llvm=toolchain().llvm))
  if choice.work.tile is None: return 0
  p = replace(p, num_splits=choice.work.splits)
  tensors = [UOp.placeholder(shape, TYPES[dtype], slot) for slot, (shape, dtype) in enumerate(arguments(p).values())]
  report = analyse(assembly(render(program_of(choice, p)(*tensors), arch), arch), arch, p.D, p.Dv)
  return report.loop.kinds["scratch"] if report.loop is not None else 0

MANY: dict[str, Any] = {"B": 8, "H": 32, "dtype": "bfloat16"}
SPILLED = {
  "few keys and a mask": ("gfx950", MANY | {"Sq": 300, "Sk": 200, "D": 128, "causal": "top-left", "lse": False}),
  "one trip without a mask": ("gfx950", MANY | {"Sq": 200, "Sk": 330, "D": 128, "causal": True, "lse": False}),
  "an lse and a last trip that is not whole": ("gfx950", MANY | {"Sq": 300, "Sk": 4090, "D": 128}),
  "rows in pieces and an lse": ("gfx1100", MANY | {"Sq": 300, "D": 50, "causal": True}),
  "rows in pieces and few queries": ("gfx1201",
                                     {"B": 8, "H": 8, "Hkv": 2, "Sq": 1, "Sk": 4962, "D": 122, "Dv": 190, "window": (276, -1), "softcap": 5.0}),
  "long rows in pieces": ("gfx1100", {"B": 8, "H": 32, "Hkv": 8, "Sq": 58, "Sk": 529, "D": 183, "causal": True, "lse": False}),
  "D=70, Dv=50": ("gfx1100", MANY | {"Sq": 300, "D": 70, "Dv": 50}), "D=120, Dv=104": ("gfx1100", MANY | {"Sq": 300, "D": 120, "Dv": 104}),
  "wide, few queries": ("gfx1201", {"Sq": 1, "Sk": 300, "D": 256}),
  "O of 208 columns beside pieces and few queries": ("gfx1100", {"B": 8, "H": 8, "Sq": 5, "Sk": 1099, "D": 149, "Dv": 206}),
  "wide rows in pieces for one query": ("gfx942", {"B": 8, "H": 8, "Sq": 1, "Sk": 3021, "D": 255, "causal": True, "dtype": "bfloat16"}),
  "dropout beside wide rows in pieces": ("gfx1100", MANY | {"Sq": 1, "Sk": 4096, "D": 250, "lse": False, "dropout_p": 0.1,
                                                           "extras": {"dropout_seed": np.empty(2, np.uint32)}}),
  "both masks beside long rows in pieces": ("gfx950", {"B": 8, "H": 32, "Sq": 4280, "Sk": 4280, "D": 182, "window": (138, 169), "lse": False}),
  "slopes beside wide rows": ("gfx950", MANY | {"Sq": 367, "Sk": 1187, "D": 248, "causal": "top-left",
                                                "extras": {"alibi_slopes": np.empty(32, np.float32)}}),
  **{f"latent attention on {arch}, {what}": (arch, dict(B=8, H=heads, Hkv=1, Sk=4096, D=576, Dv=512, v_in_k=True, **more))
     for arch in ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
     for what, heads, more in (("decode", 128, dict(Sq=1)), ("causal", 128, dict(Sq=4, dtype="bfloat16", causal=True)),
                               ("few heads", 16, dict(Sq=1, softcap=30.0)))},
  "a softcap beside long rows in pieces": ("gfx950", MANY | {"Hkv": 8, "Sq": 1001, "Sk": 3909, "D": 167, "Dv": 139, "causal": True,
                                                             "softcap": 30.0, "lse": False}),
}
BY_DEFAULT = ("few keys and a mask", "rows in pieces and an lse", "O of 208 columns beside pieces and few queries")

@pytest.mark.parametrize("case", [pytest.param(x, marks=() if x in BY_DEFAULT else pytest.mark.thorough) for x in SPILLED])
def test_what_spilled(case:str) -> None:
  arch, parameters = SPILLED[case]
  assert scratch_accesses(problem(**parameters), arch) == 0

def drawn_problem(rng:random.Random) -> tuple[str, dict[str, Any]]:
  """A chip, and a problem of any size, mask and option."""
  d = rng.choice((rng.randint(1, 256), rng.choice((32, 64, 96, 128, 192, 256))))
  heads, batch = rng.choice((8, 32)), rng.choice((1, 8))
  queries, keys = rng.choice((1, rng.randint(2, 64), rng.randint(64, 5000))), rng.randint(1, 5000)
  window = {"window": (rng.choice((-1, rng.randint(0, 500))), rng.choice((-1, rng.randint(0, 300))))}
  mask = rng.choice(({}, {"causal": True}, {"causal": "top-left"}, window))
  shapes = {"bias": (1, 1, queries, keys), "alibi_slopes": (heads,), "sinks": (heads,), "kv_lengths": (batch,)}
  option = rng.choice((None, None, "softcap", *shapes))
  options: dict[str, Any] = {"softcap": 30.0} if option == "softcap" else {}
  if option in shapes: options["extras"] = {option: np.empty(shapes[option], np.int32 if option == "kv_lengths" else np.float32)}
  sizes = {"B": batch, "H": heads, "Hkv": rng.choice((heads, heads//4)), "Sq": queries, "Sk": keys, "D": d,
           "Dv": rng.choice((d, d, rng.randint(1, 256)))}
  return rng.choice(ARCHS), {**sizes, **mask, **options, "dtype": rng.choice(("float16", "bfloat16")), "lse": rng.random() < 0.5}

@pytest.mark.parametrize("seed", [pytest.param(n, marks=pytest.mark.thorough if n > 1 else ()) for n in range(60)])
def test_drawn(seed:int) -> None:
  arch, parameters = drawn_problem(random.Random(seed))
  assert scratch_accesses(problem(**parameters), arch) == 0, f"{arch}: {parameters}"
