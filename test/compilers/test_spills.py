"""Tests that the forward and backward kernels that dispatch chooses spill no registers in a loop, and never load memory for one lane after
another."""
from __future__ import annotations
import random
from dataclasses import replace
from collections.abc import Callable
from typing import Any
import numpy as np
import pytest
from attn import mods
from attn.cache.tuned import CLASSES
from attn.chips import SEARCHED, get_chip
from attn.choose.backward import all_of, at_once, can_differentiate, choose_bias_tile, dbias_of, dkdv_of, dq_of
from attn.choose.dispatch import choose, program_of
from attn.choose.tile_lists import listing, with_lists
from attn.compilers.clang import assembly, toolchain
from attn.functions.trace import functions_of
from attn.isa.check import findings
from attn.isa.report import HotLoop, analyse
from attn.kernels.parts.grid.tensors import all_arguments, arguments, dbias_arguments, dkdv_arguments, dq_arguments
from attn.kernels.tiles.amd import BackwardTile, Tile
from attn.ops.renderers import render
from attn.problem import Problem, Shapes
from attn.search.forward import FILLS, LARGEST_TILE
from attn.tinygrad_compat import UOp
from cases import ARCHS, TYPES, in_turn, problem
pytest.importorskip("ziglang")

# clang generates such loads if an address that all lanes share lies in vector registers; the problems are random, or had one of these faults in an
# earlier version

OF_LOOPS = ("waterfall", "scratch", "scalar spills")

def found_in_code(program:Callable[..., UOp], shapes:Shapes, arch:str) -> list[str]:
  # Compiles a kernel for tensors of these shapes, and returns the faults that the checks OF_LOOPS find in its machine code.
  tensors = [UOp.placeholder(shape, TYPES[dtype], slot) for slot, (shape, dtype) in enumerate(shapes.values())]
  return [x for x in findings(assembly(render(program(*tensors), arch), arch), arch) if x.startswith(OF_LOOPS)]

def found_in_forward(p:Problem, arch:str) -> list[str]:
  # Returns the faults in the machine code of the forward kernel that dispatch chooses; none if dispatch chooses tensor operations.
  choice = choose(p, replace(get_chip(arch), llvm=toolchain().llvm))
  if choice.work.tile is None: return []
  p = replace(p, num_splits=choice.work.splits)
  p = with_lists(p, listing(p, get_chip(arch), choice.work.tile))
  return found_in_code(program_of(choice, p), arguments(p), arch)

def found_in_backward(p:Problem, arch:str, kernel:str) -> list[str]:
  # Returns the faults in the machine code of the backward kernel `kernel` ("dq", "dkdv" or "dbias").
  chip = replace(get_chip(arch), llvm=toolchain().llvm)
  if kernel == "dbias": return found_in_code(dbias_of(p, chip, choose_bias_tile(p, chip)), dbias_arguments(p), arch)
  tiles = can_differentiate(p, chip)
  assert not isinstance(tiles, str), tiles
  p = with_lists(p, listing(p, chip, *[(tiles[0], "keys"), (tiles[1], "queries")][kernel == "dkdv"]))
  if kernel == "dq": return found_in_code(dq_of(p, chip, tiles[0]), dq_arguments(p), arch)
  return found_in_code(dkdv_of(p, chip, tiles[1]), dkdv_arguments(p), arch)

@pytest.mark.sample(3)
@in_turn("case, kernel", ("full", "causal", "uneven rows", "kv_lengths", "alibi_slopes", "softcap", "dropout"),
         [(arch, D, dtype) for arch in ("gfx942", "gfx950") for D in (64, 128) for dtype in ("float16", "bfloat16")])
def test_all_gradients_at_once(case:str, kernel:tuple[str, int, str]) -> None:
  # The kernel that dispatch chooses for all gradients spills no vector register, spills no scalar register in a loop, and never accesses memory for
  # one lane after another.
  given = {"full": {}, "causal": {"causal": True}, "uneven rows": {"Sq": 4000, "Sk": 4133, "causal": True}, "kv_lengths": option("kv_lengths", 2),
           "alibi_slopes": option("alibi_slopes", 32) | {"causal": True}, "softcap": {"softcap": 30.0, "window": (500, 300)},
           "dropout": {"dropout_p": 0.1, "causal": True, "extras": {"dropout_seed": np.empty(2, np.uint32)}}}[case]
  arch, D, dtype = kernel
  chip = replace(get_chip(arch), llvm=toolchain().llvm)
  p = problem(**{"B": 2, "H": 32, "Hkv": 8, "Sq": 4096, "Sk": 4096, "D": D, "dtype": dtype, "lse": True, "deterministic": False, **given})
  if not any(set(p.options) <= set(x.options) for x in chip.unit.at_once[D]): pytest.skip("two kernels compute the gradients with this option")
  tile = at_once(p, chip)
  assert isinstance(tile, BackwardTile), tile
  tensors = [UOp.placeholder(shape, TYPES[of], slot) for slot, (shape, of) in enumerate(all_arguments(p).values())]
  code = assembly(render(all_of(p, chip, tile)(*tensors), chip.name), chip.name)
  assert [x for x in findings(code, chip.name) if x.startswith(OF_LOOPS)] == []
  assert analyse(code, chip.name).resources.vgpr_spills == 0

def option(name:str, *shape:int) -> dict[str, Any]: return {"extras": {name: np.empty(shape, np.int32 if name == "kv_lengths" else np.float32)}}

MANY: dict[str, Any] = {"B": 8, "H": 32, "dtype": "bfloat16"}
GQA: dict[str, Any] = {"B": 8, "H": 32, "Hkv": 8}
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
  **{f"dropout beside long rows in pieces, lse={lse}": ("gfx1100", MANY | {"Sq": 236, "Sk": 4001, "D": 186, "causal": "top-left", "lse": lse,
                                                                         "dropout_p": 0.1, "extras": {"dropout_seed": np.empty(2, np.uint32)}})
     for lse in (False, True)},
  # Fault of an earlier version: the number of bytes of the bias was in vector registers.
  "a bias beside long rows in pieces": ("gfx1201", GQA | {"Sq": 3442, "Sk": 101, "D": 159, "Dv": 96, "causal": "top-left", "dtype": "bfloat16",
                                                          "lse": False, **option("bias", 1, 1, 3442, 101)}),
  "both masks beside long rows in pieces": ("gfx950", {"B": 8, "H": 32, "Sq": 4280, "Sk": 4280, "D": 182, "window": (138, 169), "lse": False}),
  "slopes beside wide rows": ("gfx950", MANY | {"Sq": 367, "Sk": 1187, "D": 248, "causal": "top-left",
                                                "extras": {"alibi_slopes": np.empty(32, np.float32)}}),
  **{f"latent attention on {arch}, {what}": (arch, dict(B=8, H=heads, Hkv=1, Sk=4096, D=576, Dv=512, v_in_k=True, **more))
     for arch in ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
     for what, heads, more in (("decode", 128, dict(Sq=1)), ("causal", 128, dict(Sq=4, dtype="bfloat16", causal=True)),
                               ("few heads", 16, dict(Sq=1, softcap=30.0)))},
  "a softcap beside long rows in pieces": ("gfx950", MANY | {"Hkv": 8, "Sq": 1001, "Sk": 3909, "D": 167, "Dv": 139, "causal": True,
                                                             "softcap": 30.0, "lse": False}),
  # Grids large enough for the large tile of forward, where the staggered kernel needs a larger grid or does not support the options.
  "pieces beside two waves on a SIMD": ("gfx942", {"B": 1, "H": 32, "Sq": 2048, "Sk": 2048, "D": 127, "Dv": 125, "window": (50, 20),
                                                     "dtype": "bfloat16"}),
  "pieces and nothing else": ("gfx942", {"B": 1, "H": 32, "Sq": 2048, "Sk": 2048, "D": 117, "lse": False}),
  "slopes beside pieces and two waves on a SIMD": ("gfx90a", MANY | {"Sq": 300, "D": 126, "causal": True,
                                                                  "extras": {"alibi_slopes": np.empty(32, np.float32)}}),
  "lengths of keys beside pieces": ("gfx950", MANY | {"Sq": 300, "D": 117, "causal": True, "extras": {"kv_lengths": np.empty(8, np.int32)}}),
  "dropout beside two waves on a SIMD": ("gfx942", MANY | {"Sq": 300, "D": 128, "window": (50, 20), "dropout_p": 0.1,
                                                         "extras": {"dropout_seed": np.empty(2, np.uint32)}}),
  "three trips under a mask": ("gfx950", MANY | {"Sq": 250, "Sk": 515, "D": 128, "causal": True, "lse": False}),
  # The results of two comparisons for each score took too many scalar registers.
  "both masks beside many keys": ("gfx950", {"B": 2, "H": 8, "Sq": 1000, "Sk": 1033, "D": 64, "window": (50, 20)}),
  **{f"{name} beside two waves on a SIMD, CDNA2": ("gfx90a", MANY | GQA | {"Sq": 4096, "Sk": 4096, "D": 128, **given})
     for name, given in (("slopes", option("alibi_slopes", 32) | {"causal": True}), ("softcap", {"softcap": 30.0, "window": (500, 300)}))},
  "pieces on RDNA3, and nothing else": ("gfx1100", MANY | {"Sq": 300, "D": 113, "causal": True, "lse": False}),
}
BY_DEFAULT = ("few keys and a mask", "three trips under a mask", "both masks beside many keys", "rows in pieces and an lse",
              "O of 208 columns beside pieces and few queries", "pieces beside two waves on a SIMD")

@pytest.mark.sample(3)
@pytest.mark.parametrize("case", [pytest.param(x, marks=() if x in BY_DEFAULT else pytest.mark.thorough) for x in SPILLED])
def test_kernels_that_once_spilled(case:str) -> None:
  arch, parameters = SPILLED[case]
  assert found_in_forward(problem(**parameters), arch) == []

LARGE: dict[str, Any] = {"B": 4, "H": 16, "Hkv": 4, "Sq": 4133, "Sk": 4000, "dtype": "bfloat16"}
# by the option's name in Problem.options, for the sizes LARGE
ONE_OPTION: dict[str, dict[str, Any]] = {
  "": {}, "window": {"window": (500, -1)}, "softcap": {"softcap": 30.0}, "alibi": option("alibi_slopes", 4, 16),
  "bias": option("bias", 4, 16, 4133, 4000), "dropout_p": {"dropout_p": 0.1, "extras": {"dropout_seed": np.empty(2, np.uint32)}}}

TABLES = {"forward": "plain_forward", "dq": "plain_dq", "dkdv": "plain_dkdv"}     # for problems with at most one option

@pytest.mark.sample(6)
@pytest.mark.parametrize("mask", ({"causal": "top-left"}, {"window": (500, 300)}, {}), ids=("causal", "both masks", "full"))
@pytest.mark.parametrize("arch, kernel, D, option", [(arch, kernel, row.up_to, option) for arch in SEARCHED for kernel, table in TABLES.items()
                                                     for row in getattr(get_chip(arch).unit, table) for option in row.options])
def test_tiles_for_one_option(arch:str, kernel:str, D:int, option:str, mask:dict[str, Any]) -> None:
  # Tiles of the tables for problems with at most one option spill no register with uneven rows, shared keys, and Dv unlike D.
  for width, lse in ((D, True), (D - 8, kernel != "forward")):
    p = problem(**{**LARGE, **mask, **ONE_OPTION[option]}, D=width, Dv=width - 48*(width < D), lse=lse)
    assert (found_in_forward(p, arch) if kernel == "forward" else found_in_backward(p, arch, kernel)) == []

CHIPS_DRAWN = ("gfx90a", *ARCHS)
OPTIONS = ("softcap", "bias", "alibi_slopes", "sinks", "kv_lengths", "dropout_seed")

def any_width(rng:random.Random) -> int: return rng.choice((rng.randint(1, 256), rng.choice((32, 64, 96, 128, 192, 256))))

def edge_of_a_class(rng:random.Random) -> int:
  # Returns a random head dimension 1 to 15 below one of CLASSES, the head dimensions for which tables store a tile.
  # a kernel for such a head dimension has the fewest free registers, and reads each row in several pieces
  return rng.choice(CLASSES) - rng.randint(1, 15)

def edge_of_the_grid(rng:random.Random, arch:str, heads:int) -> int:
  # Returns a random number of queries near which dispatch changes to larger tiles, for `heads` heads in all batches.
  # with tiles of LARGEST_TILE queries, the number of workgroups lies between FILLS, the least for which dispatch takes a large tile, and the number
  # of compute units
  return LARGEST_TILE*rng.randint(*sorted((FILLS, get_chip(arch).cus)))//heads

def drawn_option(rng:random.Random, sizes:dict[str, int]) -> dict[str, Any]:
  # Returns one of OPTIONS or no option, drawn at random, as parameters of `problem`.
  if (option := rng.choice((None, *OPTIONS))) is None: return {}
  if option == "softcap": return {"softcap": 30.0}
  shapes = {"bias": (1, 1, sizes["Sq"], sizes["Sk"]), "alibi_slopes": (sizes["H"],), "sinks": (sizes["H"],), "kv_lengths": (sizes["B"],),
            "dropout_seed": (2,)}
  dtype = {"kv_lengths": np.int32, "dropout_seed": np.uint32}.get(option, np.float32)
  return {"extras": {option: np.empty(shapes[option], dtype)}, **({"dropout_p": 0.1} if option == "dropout_seed" else {})}

def drawn_problem(rng:random.Random, edge:bool) -> tuple[str, dict[str, Any]]:
  # Returns a random chip and problem. With `edge`, dispatch changes to another tile near this problem.
  arch, heads, batch, width = rng.choice(CHIPS_DRAWN), rng.choice((8, 32)), rng.choice((1, 8)), edge_of_a_class if edge else any_width
  d, queries = width(rng), edge_of_the_grid(rng, arch, batch*heads) if edge else rng.choice((1, rng.randint(2, 64), rng.randint(64, 5000)))
  sizes = {"B": batch, "H": heads, "Hkv": rng.choice((heads, heads//4)), "Sq": queries, "Sk": rng.randint(1, 5000), "D": d,
           "Dv": rng.choice((d, d, width(rng)))}
  window = {"window": (rng.choice((-1, rng.randint(0, 500))), rng.choice((-1, rng.randint(0, 300))))}
  mask = rng.choice(({}, {"causal": True}, {"causal": "top-left"}, window))
  return arch, {**sizes, **mask, **drawn_option(rng, sizes), "dtype": rng.choice(("float16", "bfloat16")), "lse": rng.random() < 0.5}

@pytest.mark.parametrize("seed", [pytest.param(n, marks=pytest.mark.thorough if n > 1 else ()) for n in range(60)])
def test_random_problems(seed:int) -> None:
  # Kernels for random problems do not spill registers. Every second problem has a head dimension or grid at which dispatch changes to another tile.
  arch, parameters = drawn_problem(random.Random(seed), seed % 2 == 1)
  assert found_in_forward(problem(**parameters), arch) == [], f"{arch}: {parameters}"

# ***** the backward kernels *****

SPILLED_BACKWARD = {
  "a bias of float32 and what lse has lost": ("gfx1100", "dkdv", {"H": 8, "Sq": 1000, "Sk": 1000, "D": 128, "dtype": "bfloat16",
                                                                **option("bias", 1, 8, 1000, 1000)}),
  "wide rows, some beyond the last tile": ("gfx1100", "dq", {"B": 2, "H": 16, "Sq": 4000, "Sk": 4133, "D": 256}),
  "a bias beside wide rows": ("gfx1100", "dq", {"H": 8, "Sq": 1872, "Sk": 3311, "D": 248, "dtype": "bfloat16", **option("bias", 1, 1, 1872, 3311)}),
  "long rows in pieces for one query": ("gfx1100", "dq", {"B": 8, "H": 8, "Hkv": 2, "Sq": 1, "Sk": 4379, "D": 245, "Dv": 80, "softcap": 30.0}),
  "long rows in pieces and a softcap": ("gfx1201", "dq", GQA | {"Sq": 139, "Sk": 1092, "D": 243, "softcap": 30.0}),
  "one wave, slopes and pieces": ("gfx90a", "dq", GQA | {"Sq": 30, "Sk": 3182, "D": 166, "window": (52, 79), "dtype": "bfloat16",
                                                       **option("alibi_slopes", 32)}),
  "one wave and a bias": ("gfx90a", "dq", {"B": 8, "H": 8, "Sq": 5, "Sk": 3432, "D": 256, "window": (394, -1), "dtype": "bfloat16",
                                            **option("bias", 1, 1, 5, 3432)}),
  **{f"rows in pieces, a mask and a bias on {arch}": (
    arch, "dq", {"B": 8, "H": 8, "Sq": 312, "Sk": 145, "D": 123, "causal": True, "dtype": "bfloat16", **option("bias", 1, 1, 312, 145)})
     for arch in ("gfx1100", "gfx1201")},
  "short rows in pieces": ("gfx1100", "dkdv", GQA | {"Sq": 114, "Sk": 2340, "D": 63, "causal": "top-left"}),
  "rows in pieces and lengths": ("gfx1100", "dkdv", {"B": 8, "H": 32, "Sq": 145, "Sk": 1368, "D": 117, "Dv": 121, "dtype": "bfloat16",
                                                     **option("kv_lengths", 8)}),
  "few queries, uneven rows and lengths": ("gfx1100", "dkdv", {"B": 8, "H": 32, "Sq": 28, "Sk": 791, "D": 96, "Dv": 66, "dtype": "bfloat16",
                                                               **option("kv_lengths", 8)}),
  "rows in pieces and slopes": ("gfx1201", "dkdv", GQA | {"Sq": 277, "Sk": 1400, "D": 116, "Dv": 50, "causal": True, **option("alibi_slopes", 32)}),
  "wide rows in pieces and a bias": ("gfx950", "dkdv", {"B": 8, "H": 32, "Sq": 239, "Sk": 358, "D": 252, "causal": "top-left",
                                                        **option("bias", 1, 1, 239, 358)}),
  # Fault of an earlier version: clang moved the computation of dS into the branch that stores only the existing rows.
  **{f"a bias of D={d} and rows that do not fill a tile": (
    "gfx1100", "dbias", {"B": 2, "H": 8, "Sq": 1000, "Sk": 1033, "D": d, "causal": d == 128, "dtype": "bfloat16", **option("bias", 2, 8, 1000, 1033)})
     for d in (128, 256)},
  # All these problems have one tile of keys. Fault of an earlier version: iterations kept the positions of their rows of q and dO in registers.
  **{f"a bias that {shared} share, D={d}, Dv={dv} on {arch}": (arch, "dbias", sizes | {"D": d, "Dv": dv, "softcap": 30.0, **option("bias", *bias)})
     for arch, shared, d, dv, sizes, bias in (
       ("gfx1100", "heads", 57, 191, {"H": 32, "Hkv": 8, "Sq": 880, "Sk": 2015, "dtype": "bfloat16"}, (1, 1, 880, 2015)),
       ("gfx1201", "rows", 252, 252, {"B": 8, "H": 32, "Sq": 239, "Sk": 358, "causal": "top-left"}, (8, 32, 1, 358)))},
  # The results of two comparisons for each score took too many scalar registers.
  **{f"several heads and a mask on {arch}": (arch, "dkdv", {"B": 2, "H": 8, "Hkv": 2, "Sq": 1000, "Sk": 1033, "D": 64, "causal": True})
     for arch in ("gfx90a", "gfx942")},
  # Fault of an earlier version: loads ran lane by lane, because the start of a tile or the number of rows was in vector registers.
  **{f"{what} on {arch}": (arch, "dkdv", {"B": 1, "H": 32, **sizes})
     for arch in ("gfx942", "gfx1100") for what, sizes in (
       ("more keys than queries", {"Sq": 2048, "Sk": 4096, "D": 64, "causal": True}), ("4000 rows", {"Sq": 4000, "D": 64, "causal": True}),
       ("uneven rows", {"Sq": 1000, "Sk": 1033, "D": 64, "causal": True}), ("a window of wide rows", {"Sq": 4096, "D": 256, "window": (100, 50)}))},
  "one trip of uneven rows beside lengths": ("gfx1201", "dkdv", {"H": 8, "Hkv": 2, "Sq": 3585, "Sk": 2740, "D": 192, "causal": "top-left",
                                                                 **option("kv_lengths", 1)}),
  # Fault of an earlier version: clang stopped with "illegal VGPR to SGPR copy".
  "one trip for each of several heads": ("gfx1201", "dkdv", GQA | {"Sq": 3, "Sk": 449, "D": 128, "window": (192, -1), "dtype": "bfloat16"}),
  "one trip under a mask": ("gfx950", "dkdv", {"B": 8, "H": 8, "Hkv": 2, "Sq": 32, "Sk": 372, "D": 192, "causal": True, "dtype": "bfloat16"}),
  # Where a tile of the tables for problems without options once spilled, or nearly has no registers left.
  **{f"no option, {what}": ("gfx950", "dkdv", {"B": 4, **sizes}) for what, sizes in (
    ("D=176", {"H": 8, "Sq": 4393, "Sk": 3910, "D": 176, "causal": "top-left", "dtype": "bfloat16"}),
    ("D=184", {"H": 16, "Sq": 3000, "Sk": 3050, "D": 184, "window": (500, -1)}),
    ("D=128", {"H": 16, "Sq": 4133, "Sk": 4000, "D": 128, "causal": "top-left"}))},
  "no option, D=192 on RDNA": ("gfx1201", "dkdv", {"B": 4, "H": 16, "Sq": 4000, "Sk": 4133, "D": 192, "window": (50, 20), "dtype": "bfloat16"}),
  "no option, wide rows": ("gfx950", "dq", GQA | {"Sq": 4133, "Sk": 4000, "D": 200, "Dv": 256, "causal": "top-left"}),
  "one query and a window": ("gfx90a", "dkdv", {"H": 8, "Sq": 1, "Sk": 2970, "D": 49, "window": (145, 118), "softcap": 30.0}),
}
BACKWARD_BY_DEFAULT = ("short rows in pieces", "one trip under a mask", "more keys than queries on gfx942", "several heads and a mask on gfx90a",
                       "a bias of D=128 and rows that do not fill a tile")

@pytest.mark.sample(3)
@pytest.mark.parametrize("case", [pytest.param(x, marks=() if x in BACKWARD_BY_DEFAULT else pytest.mark.thorough) for x in SPILLED_BACKWARD])
def test_backward_kernels_that_once_spilled(case:str) -> None:
  arch, kernel, parameters = SPILLED_BACKWARD[case]
  assert found_in_backward(problem(lse=True, **parameters), arch, kernel) == []

def with_bias(rng:random.Random, parameters:dict[str, Any]) -> dict[str, Any]:
  # Returns a problem's parameters with a bias, which broadcasts along random dimensions, in place of its option.
  shape = tuple(rng.choice((1, n, n)) for n in (parameters[x] for x in ("B", "H", "Sq", "Sk")))
  return {**{n: x for n, x in parameters.items() if n not in ("extras", "dropout_p")}, **option("bias", *shape)}

def drawn_backward(seed:int) -> tuple[str, str, dict[str, Any]]:
  # Returns a random chip, a backward kernel, and a problem for this kernel.
  rng, kernel = random.Random(seed), ("dq", "dkdv", "dbias")[seed % 3]
  # half of the problems have a head dimension at which dispatch changes to another tile
  arch, parameters = drawn_problem(rng, seed // 3 % 2 == 1)
  return arch, kernel, (with_bias(rng, parameters) if kernel == "dbias" else parameters) | {"lse": True}

@pytest.mark.parametrize("seed", [pytest.param(n, marks=pytest.mark.thorough if n not in (0, 2) else ()) for n in range(60)])
def test_random_backward_problems(seed:int) -> None:
  arch, kernel, parameters = drawn_backward(seed)
  assert found_in_backward(problem(**parameters), arch, kernel) == [], f"{arch}: {kernel} of {parameters}"

# ***** functions of the caller *****

LENGTHS, FUNCTION_HEADS = 4096, 16
FUNCTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {     # the functions, and the tensors that they read
  "documents": ({"mask_mod": mods.documents}, {"mod_tensor0": np.empty((2, LENGTHS), np.int32)}),
  "alibi_bias": ({"score_mod": mods.alibi_bias}, {"mod_tensor0": np.empty(FUNCTION_HEADS, np.float32)}),
  "tanh_softcap": ({"score_mod": mods.tanh_softcap(30.0)}, {})}

def with_functions(name:str, D:int, kernel:str) -> Problem:
  # Returns a problem with the score_mod or mask_mod called `name`.
  given, tensors = FUNCTIONS[name]
  traced = functions_of(given.get("score_mod"), given.get("mask_mod"), tuple((t.shape, str(t.dtype)) for t in tensors.values()))
  # Its lengths are multiples of every tile, so that only the function can cause spills. With a mask_mod that leaves a query several intervals of
  # keys, such as `documents`, kernels loop over lists of visible tiles.
  return problem(B=2, H=FUNCTION_HEADS, Sq=LENGTHS, Sk=LENGTHS, D=D, lse=kernel != "forward", extras=tensors, **traced)

# Every chip and every kernel, each with the function that needs the most registers there. Earlier versions spilled: they clamped an index that is
# never negative for each key, and looked for the last key in tiles that do not contain it. That took registers for each key of a tile.
FUNCTIONS_BY_DEFAULT = {("gfx942", 128, "dq"), ("gfx942", 256, "dkdv"), ("gfx950", 128, "forward"), ("gfx950", 256, "forward"),
                        ("gfx950", 64, "dkdv"), ("gfx1100", 128, "dkdv"), ("gfx1100", 64, "forward"), ("gfx1201", 256, "forward"),
                        ("gfx1201", 128, "dq")}

@pytest.mark.sample(5)
@pytest.mark.parametrize("arch, D, kernel, name", [
  pytest.param(arch, D, kernel, name, marks=() if (arch, D, kernel) in FUNCTIONS_BY_DEFAULT and name == "documents" else pytest.mark.thorough)
  for arch in ARCHS for D in (64, 128, 256) for kernel in ("forward", "dq", "dkdv") for name in FUNCTIONS])
def test_kernels_with_functions(arch:str, D:int, kernel:str, name:str) -> None:
  p = with_functions(name, D, kernel)
  assert (found_in_forward(p, arch) if kernel == "forward" else found_in_backward(p, arch, kernel)) == []

def loop_of(p:Problem, arch:str, kernel:str, like:Problem) -> HotLoop:
  # Returns the counts of the hot loop of the forward or dq kernel of `p`, compiled with the tile of the problem `like`.
  chip = replace(get_chip(arch), llvm=toolchain().llvm)
  choice, tiles = choose(like, chip), can_differentiate(like, chip)
  assert isinstance(choice.work.tile, Tile) and choice.work.splits == 1 and not isinstance(tiles, str)
  tile: Any = choice.work.tile if kernel == "forward" else tiles[0]
  program, names = (program_of(choice, p), arguments(p)) if kernel == "forward" else (dq_of(p, chip, tile), dq_arguments(p))
  tensors = [UOp.placeholder(shape, TYPES[dtype], slot) for slot, (shape, dtype) in enumerate(names.values())]
  products, q_tiles = (((1, 1),), tile.q_tiles) if kernel == "forward" else (((2, 1),), 1)
  found = analyse(assembly(render(program(*tensors), arch), arch), arch, p.D, p.Dv, queries=q_tiles*tile.matrix.N, products=products).loop
  assert found is not None
  return found

BUILT_IN: dict[str, dict[str, Any]] = {"alibi_bias": option("alibi_slopes", FUNCTION_HEADS), "tanh_softcap": {"softcap": 30.0}}

@pytest.mark.sample(2)
@pytest.mark.parametrize("arch", ("gfx942", pytest.param("gfx1100", marks=pytest.mark.thorough)))
@pytest.mark.parametrize("kernel", ("forward", "dq"))
@pytest.mark.parametrize("name", BUILT_IN)
def test_a_function_costs_what_the_built_in_term_costs(name:str, kernel:str, arch:str) -> None:
  # A caller's score_mod or mask_mod has at most 5 % more vector instructions for each score than the built-in option that computes the same.
  built_in = problem(B=2, H=FUNCTION_HEADS, Sq=LENGTHS, Sk=LENGTHS, D=128, lse=kernel != "forward", **BUILT_IN[name])
  function = with_functions(name, 128, kernel)
  mine, other = loop_of(function, arch, kernel, function), loop_of(built_in, arch, kernel, function)
  assert mine.scores == other.scores and mine.valu_per_score is not None and other.valu_per_score is not None
  assert 1 < mine.valu_per_score <= 1.05*other.valu_per_score

def test_an_identity_costs_nothing() -> None:
  # attn drops a score_mod that returns the score unchanged, and a mask_mod that is true for all pairs of a query and a key.
  sizes = {"Sq": 300, "D": 128}
  assert problem(**sizes, **functions_of(lambda s, b, h, i, j: s, lambda b, h, i, j: (i >= 5) | (i < 5), ())) == problem(**sizes)
