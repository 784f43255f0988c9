"""Tests of gradients by kernels of plain UOps, which need no matrix unit: in every dtype, with every option, with many threads and with one. Planted
faults give errors above the limits."""
from __future__ import annotations
import contextlib
from collections.abc import Callable, Iterator
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any
import numpy as np
import pytest
import attn
import attn.api.checked_call
import attn.calls.checked_kernel
import attn.choose.backward
from attn.accuracy import judge
from attn.chips import Chip, get_chip, other_chip
from attn.choose.backward import dkdv_of, dq_of, kernel_tiles
from attn.choose.gradient_kernels import GRADIENT_KERNELS
from attn.choose.tiled_tiles import BACKWARD_ALONE, tiled_backward_tile
from attn.emulator import plan
from attn.emulator.checks import LdsRace, UninitialisedRead, UnwrittenOutput
from attn.emulator.plan import Plan
from attn.kernels.parts.backward import gradients
from attn.kernels.parts.grid.tensors import dkdv_arguments, dq_arguments
from attn.kernels.parts.grid.workgroup import Workgroup
from attn.kernels.parts.weights import dropout
from attn.kernels.parts.weights.scores import Scores
from attn.kernels.plain import backward as plain_backward
from attn.kernels.plain.rectangle import Rectangle
from attn.kernels.tiles.plain import TiledBackwardTile, TiledTile
from attn.problem import Problem
from attn.reference import rounded
from attn.tinygrad_compat import VECTORS, Context, Ops, UOp, dtypes
from attn.values import FLOATS
import cases
import test_backward
import test_forward
from api_cases import draw, emulated, floats, int32
from backward_cases import check_backward_kernels, expected_gradients, loss_of
from cases import array, normal, problem, tensor
from test_backward import CASES, PARTS, diagonal, of_head_0, scaled, unmasked, without_dlse, without_last_head, wrong
from test_gradient import ENDS, PACKED, check_gradients
from test_tiled import PLAIN_CHIPS, customs, on, with_tile

FEW = TiledBackwardTile(2, 2, 4, 4, 8, 4, keeps_own=False)      # four threads: a problem has several tiles along every dimension
KEPT = replace(FEW, down=4, values=8, keeps_own=True, steps_at_once=2)
ONE_THREAD = replace(BACKWARD_ALONE, walked=4, own=4, parts=2, columns=4)
FEW_FORWARD, FORWARD_ALONE = TiledTile(2, 2, 4, 4, 8, 4, keeps_own=False), TiledTile(1, 1, 4, 4, 0, 0, parts=2, columns=4)
SMALL: dict[str, Any] = dict(H=1, Sq=20, Sk=33, D=16, dtype="float32")
SEED = np.array([3, 5], np.uint32)

def check(arch:str="gfx1030", tile:TiledBackwardTile=FEW, **parameters:Any) -> dict[str, np.ndarray]:
  # launches the backward kernels of plain UOps with the given tile, without `attention`, and checks the gradients
  return check_backward_kernels(arch, tiles=lambda t: replace(tile, keys=t.keys), **{**SMALL, **parameters})

@contextlib.contextmanager
def with_tiles(tile:TiledBackwardTile) -> Iterator[None]:
  with pytest.MonkeyPatch.context() as patch:
    patch.setitem(GRADIENT_KERNELS, tile.suffix, replace(GRADIENT_KERNELS[tile.suffix], tile=lambda p, arch, keys: replace(tile, keys=keys)))
    kernel_tiles.cache_clear()
    try: yield
    finally: kernel_tiles.cache_clear()

def check_all(arch:str="gfx1030", tile:TiledBackwardTile|None=FEW, **parameters:Any) -> dict[str, np.ndarray]:
  # checks the outputs and gradients of `attention`, computed by kernels of plain UOps, with `tile` in backward
  with contextlib.ExitStack() as small:
    if tile is not None:
      small.enter_context(with_tiles(tile))
      small.enter_context(with_tile(FEW_FORWARD if not tile.alone else FORWARD_ALONE, pytest.MonkeyPatch()))
    return check_gradients(arch, **{**SMALL, **parameters})

# ***** the law *****

OWN_CASES = [x for x in CASES if "bias" not in x]       # with a bias, three_pass computes the gradients

@pytest.mark.thorough
@pytest.mark.parametrize("case", OWN_CASES)
def test_gradients(case:str) -> None: check(tile=KEPT, **CASES[case])

@pytest.mark.thorough
@pytest.mark.parametrize("case", OWN_CASES)
def test_one_thread(case:str) -> None: check(tile=ONE_THREAD, **CASES[case])

@pytest.mark.thorough
@pytest.mark.parametrize("arch", PLAIN_CHIPS)
@pytest.mark.parametrize("dtype", ("float32", "float16", "bfloat16"))
def test_every_type_with_its_own_tiles(arch:str, dtype:str) -> None:
  # The forward and backward kernels of plain UOps are right in every dtype with the tiles that dispatch chooses. In 16-bit dtypes the test uses
  # D=264, because kernels for matrix units end at D=256.
  check_all(arch, None, H=4, Hkv=2, Sq=70, Sk=100, D=40 if dtype == "float32" else 264, Dv=24, dtype=dtype, causal=True, through=("o", "lse"))

@pytest.mark.thorough
@pytest.mark.parametrize("arch", ("gfx1030", "gfx942", "sm_90"))
@pytest.mark.parametrize("D, Dv", ((1, 3), (130, 50), (200, 256), (512, 300), (260, 512)))
def test_head_dimensions(arch:str, D:int, Dv:int) -> None: check_all(arch, None, H=1, Sq=20, Sk=40, D=D, Dv=Dv)

def test_float32_is_exact_to_its_own_rounding() -> None:
  # float32 gradients by the kernels of plain UOps have errors below 2e-6, even where docs/contract.md allows more. Two query heads share their keys,
  # and some queries see no key.
  parameters = {**SMALL, "H": 2, "Hkv": 1, "Sq": 36, "causal": True}
  p = problem(**parameters)
  want, got = expected_gradients(p, normal(p), loss_of(p), {}), check(tile=KEPT, **parameters)
  for name, x in got.items(): assert np.abs(x - want[name].exact).max() < 2e-6, name

HARD = {f"{make.__module__.removeprefix('test_')}-{make.__name__}": make for make in (*test_backward.ADVERSARIAL, *test_forward.ADVERSARIAL)}
@pytest.mark.parametrize("name, D", [pytest.param(name, D, marks=() if (name, D) == ("backward-deep", 40)
                                                  else pytest.mark.thorough) for name in HARD for D in (16, 40)])
def test_adversarial(name:str, D:int) -> None:
  # Gradients are within their error limits on hard inputs. Where one key dominates, P is exactly 1 only if backward rounds the scores as forward did
  # when it computed lse. Where all scores are near -300, dP and delta cancel in P*(dP - delta) only if backward computes P exactly as forward did.
  check_all(make=HARD[name], Sq=40, Sk=50, D=D)

@pytest.mark.thorough
@pytest.mark.parametrize("name", ("backward-peaked", "forward-large_rows", "backward-huge_key", "backward-deep"))
def test_adversarial_with_long_rows(name:str) -> None: check_all(tile=None, make=HARD[name], Sq=40, Sk=50, D=136)

# ***** options *****

@pytest.mark.thorough
@pytest.mark.parametrize("case", ("one head of keys for six", "a window", "packed"))
def test_parts(case:str) -> None: check(**PARTS[case])

@pytest.mark.parametrize("tile", (FEW, pytest.param(ONE_THREAD, marks=pytest.mark.thorough)))
def test_dropout(tile:TiledBackwardTile) -> None:
  # Backward drops the elements of P that forward drops.
  check(tile=tile, H=2, Hkv=1, causal=True, dropout_p=0.3, extras=dict(dropout_seed=SEED))

BLIND: dict[str, dict[str, Any]] = {     # rows that see no key
  "causal": dict(causal=True), "window": dict(window=(3, 2)), "top-left": dict(causal="top-left", window=(3, 0)),
  "lengths": dict(B=2, extras=dict(kv_lengths=int32(0, 17))), "causal, lengths": dict(B=2, causal=True, extras=dict(kv_lengths=int32(3, 17))),
  "sinks": dict(causal=True, extras=dict(sinks=floats(2))), "alibi": dict(causal=True, extras=dict(alibi_slopes=np.abs(floats(2))/4)),
  "softcap": dict(causal=True, softcap=2.0), "bias": dict(causal=True, extras=dict(bias=floats(1, 2, 40, 20))),
  "dropout": dict(causal=True, dropout_p=0.3, extras=dict(dropout_seed=SEED)),
  "-inf": dict(extras=dict(bias=np.where(np.arange(40)[:, None] < 7, -np.inf, np.zeros((1, 1, 40, 20))).astype(np.float32)))}

@pytest.mark.parametrize("case", [pytest.param(x, marks=() if x == "causal" else pytest.mark.thorough) for x in BLIND])
def test_three_pass_where_rows_see_no_key(case:str) -> None:
  # Gradients of three_pass, the fallback in tinygrad's tensor operations, contain no NaN if some rows see no key.
  check_gradients("gfx1030", "three_pass", through=("o", "lse"), H=2, Sq=40, Sk=20, D=16, dtype="float32", **BLIND[case])

@pytest.mark.thorough
@pytest.mark.parametrize("case", BLIND)
def test_where_rows_see_no_key(case:str) -> None:
  check_all(through=("o", "lse"), H=2, Sq=40, Sk=20, **BLIND[case])

@pytest.mark.thorough
@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("kernel", ("", "three_pass"))
def test_packed_sequences(name:str, kernel:str) -> None:
  q_ends, k_ends = ENDS[name]
  check_gradients("gfx1030", kernel, **PACKED, dtype="float32", causal=True, through=("o", "lse"),
                  extras=dict(sinks=floats(4), cu_seqlens_q=q_ends, cu_seqlens_k=k_ends))

@pytest.mark.thorough
def test_without_workgroups(monkeypatch:pytest.MonkeyPatch) -> None:
  # Gradients are right on a chip without workgroups, which runs the grid as a loop, as a CPU does. The emulator simulates such a chip.
  def serial(device:Any) -> Any: return replace(get_chip("gfx1030"), lds=0, serial=True)
  for module in (attn.api.checked_call, attn.calls.checked_kernel): monkeypatch.setattr(module, "arch_of", serial)
  check_all(tile=ONE_THREAD, B=2, H=4, Hkv=2, Sq=20, Sk=30, window=(9, 3), through=("o", "lse"), extras=dict(kv_lengths=int32(21, 30)))
  check_all(tile=ONE_THREAD, **PACKED, causal=True, extras=dict(cu_seqlens_q=ENDS["no keys"][0], cu_seqlens_k=ENDS["no keys"][1]))

@pytest.mark.thorough
def test_same_in_every_run() -> None:
  first, second = (check(only="dkdv") for _ in range(2))
  for name, x in first.items(): np.testing.assert_array_equal(x, second[name])

# ***** planted faults *****

def without_delta(m:pytest.MonkeyPatch) -> None: m.setattr(plain_backward, "scaled_delta", lambda delta, p: UOp.const(0.0, dtypes.float))
def unguarded(m:pytest.MonkeyPatch) -> None:
  # plants a fault: the kernel does not set P and dS of hidden keys to 0
  # For a query that sees no key, with lse = -inf, right kernels compute P with +inf in place of lse, which also gives 0. Without this, too, the
  # gradients become NaN.
  m.setattr(gradients, "reference", lambda x: x)
  m.setattr(Scores, "clear", lambda self, x, row, tile: x)
def of_another_head(m:pytest.MonkeyPatch) -> None:
  wrong(m, Workgroup, "query_value_rows", lambda numbers: lambda self, name, head: numbers(self, name, self.first_head))
def rounded_otherwise(m:pytest.MonkeyPatch) -> None: m.setattr(plain_backward, "exact_weights", without_rounding)
def without_rounding(scores:Scores, raw:list[UOp], normalisers:list[gradients.Normaliser], row:Any, tile:UOp, masked:bool) -> gradients.Weights:
  ops, log2e = plain_backward.ops, 1.4426950408889634
  right = gradients.exact_weights(scores, raw, normalisers, row, tile, masked)
  p = [ops.exp2(ops.fma(y, scores.unit.base2, ops.mul(e.high, -log2e))) for y, e in zip(raw, normalisers)]
  return replace(right, p=right.visible(p))
def one_step_for_all(m:pytest.MonkeyPatch) -> None:
  m.setattr(Rectangle, "quad_of", lambda self, portion, item, old=Rectangle.quad_of: old(self, replace(portion, column=UOp.const(0)), item))

def unwritten(m:pytest.MonkeyPatch) -> None: m.setattr(Workgroup, "cleared_gradients", lambda self, names: [])

FAULTS: dict[Callable[[pytest.MonkeyPatch], None], tuple[dict[str, Any], str]] = {
  without_delta: (dict(only="dq"), "dq: "), without_dlse: (dict(only="dq", dlse=True), "dq: "),
  scaled("dq", power=1): (dict(only="dq"), "dq: "), scaled("dq", power=-1): (dict(only="dq"), "dq: "),
  scaled("dk", power=1): (dict(only="dkdv"), "dk: "), scaled("dk", power=-1): (dict(only="dkdv"), "dk: "),
  without_last_head: (dict(only="dkdv", H=3, Hkv=1), "dk: "),
  diagonal("keys"): (dict(only="dq", causal=True), "dq: "), diagonal("queries"): (dict(only="dkdv", causal=True), "d[kv]: "),
  unmasked("keys"): (dict(only="dq", make=test_backward.deep), "dq: "),
  # A query beyond the last one has lse 0, so the scores of distant keys overflow there.
  unmasked("queries"): (dict(only="dkdv", extras=dict(alibi_slopes=np.full(1, -3, np.float32))), "d[kv]: "),
  unguarded: (dict(only="dkdv", Sq=33, Sk=20, causal=True), "d[kv]: "), of_another_head: (dict(only="dkdv", H=2, Hkv=1), "d[kv]: "),
  of_head_0("lse"): (dict(only="dq", H=2), "dq: "), of_head_0("delta"): (dict(only="dkdv", H=2), "dk: "),
  one_step_for_all: (dict(only="dq"), "dq: "),
  unwritten: (dict(only="dkdv", **PACKED, extras=dict(cu_seqlens_q=ENDS["rows of none"][0], cu_seqlens_k=ENDS["rows of none"][1])), "never written")}

BY_DEFAULT = ("without_delta", "unguarded", "of_another_head", "diagonal_of_queries")      # tests of the matrix units plant the other faults, too
@pytest.mark.sample(2)
@pytest.mark.parametrize("plant", [pytest.param(f, id=f.__name__, marks=() if f.__name__ in BY_DEFAULT else pytest.mark.thorough) for f in FAULTS])
def test_planted_fault(plant:Callable[[pytest.MonkeyPatch], None], monkeypatch:pytest.MonkeyPatch) -> None:
  parameters, text = FAULTS[plant]
  plant(monkeypatch)
  with pytest.raises(UnwrittenOutput if plant is unwritten else AssertionError, match=text): check(**parameters)

def check_weights_of_one_key() -> None:
  # A row that sees one key has a weight of exactly 1, however large its score is, so dv is the sum of dO. The accuracy law alone would not notice a
  # weight that is off by the rounding of a large score.
  dv = check_all(make=test_forward.large_rows, Sk=1, D=20)["v"]
  do = np.random.default_rng(11).standard_normal((1, 1, 20, 20), np.float32)      # as `check_gradients` draws it
  terms = np.abs(do).sum(2, keepdims=True, dtype=np.float64)
  assert np.all(np.abs(dv - do.sum(2, keepdims=True, dtype=np.float64)) <= 20*2.0**-24*terms), "dv: a weight is not 1"

def test_weights_of_one_key() -> None: check_weights_of_one_key()

def test_planted_fault_scores_rounded_otherwise(monkeypatch:pytest.MonkeyPatch) -> None:
  rounded_otherwise(monkeypatch)
  with pytest.raises(AssertionError, match="a weight is not 1"): check_weights_of_one_key()

@pytest.mark.parametrize("only", (pytest.param("dq", marks=pytest.mark.thorough), "dkdv"))
@pytest.mark.usefixtures("without_places")
def test_planted_fault_no_barriers(only:str, monkeypatch:pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(Plan, "barrier", lambda self, u: None)
  monkeypatch.setattr(plan, "_RULES", {**plan._RULES, Ops.BARRIER: Plan.barrier})
  with pytest.raises((LdsRace, UninitialisedRead)): check(only=only, Sq=64, Sk=64, tile=replace(FEW, down=8, across=8))

@pytest.mark.thorough
def test_planted_fault_bits_of_the_wrong_keys(monkeypatch:pytest.MonkeyPatch) -> None:
  wrong(monkeypatch, dropout, "_kept_half", lambda half: lambda scores, row, query, key: half(scores, row, query, key//8*8))
  with pytest.raises(AssertionError, match=r"d[qkv]: "): check(only="dkdv", dropout_p=0.3, extras=dict(dropout_seed=SEED))

# ***** dispatch *****

def test_what_computes_the_gradient() -> None:
  with emulated("gfx1030"):
    q, wide = draw(1, 2, 20, 16, dtype="float32"), draw(1, 1, 8, 600, dtype="float32")
    gradients = attn.explain(q, q, q, backward=True)
    assert gradients.kernels == ("backward_dq_tiled", "backward_dkdv_tiled") and gradients.memory == 8*2*20
    assert "memory beside inputs and outputs: 320 bytes" in str(gradients)
    assert "bias: there is no kernel of plain UOps for its gradient" in str(attn.explain(q, q, q, backward=True, bias=draw(1, 1, 1, 20)))
    assert "forward is three_pass" in str(attn.explain(wide, wide, wide, backward=True))
  with emulated("gfx942"):
    half, wide = draw(1, 1, 8, 64), draw(1, 1, 8, 300)
    by_matrices, by_none = attn.explain(half, half, half, backward=True), attn.explain(wide, wide, wide, backward=True)
    assert by_matrices.kernels == ("backward_dq", "backward_dkdv") and by_matrices.why_not("backward_dq") is None
    assert by_none.kernels == ("backward_dq_tiled", "backward_dkdv_tiled") and by_none.why_not("backward_dq_tiled") is None
    for line in ("not backward_dq, backward_dkdv: D=300: this kernel supports at most 256",
                 "not backward_dq_wgmma, backward_dkdv_wgmma: gfx942 has no wgmma", "not backward_dq_mma, backward_dkdv_mma: gfx942 has no mma.sync"):
      assert line in str(by_none)
  with emulated("gfx942", "backward_dq_tiled"):
    forced = attn.explain(half, half, half, backward=True)
    assert forced.kernels == ("backward_dq_tiled", "backward_dkdv_tiled")
    assert forced.why_not("backward_dkdv") == "ATTN_KERNEL=backward_dq_tiled asks for another kernel"
  with emulated("gfx1030", "backward_dq_mma"), pytest.raises(NotImplementedError, match=r"ATTN_KERNEL=backward_dq_mma: gfx1030 has no mma\.sync"):
    attn.explain(q, q, q, backward=True)

def both_tiles(p:Problem, chip:Chip) -> list[TiledBackwardTile]: return [tiled_backward_tile(p, chip, keys) for keys in (False, True)]

@pytest.mark.parametrize("arch", ("gfx1030", "gfx942", "gfx950", "sm_80", "sm_90"))
def test_tiles_fit_in_local_memory(arch:str) -> None:
  # The tiles of the backward kernels of plain UOps fit in local memory for every combination of element sizes. A tile that is too large would fail
  # only when a gradient is asked for, after forward has run.
  for D, Dv in itertools.product((1, 20, 48, 64, 80, 128, 160, 256, 384, 512), repeat=2):
    p = problem(Sq=100, Sk=77, D=D, Dv=Dv, dtype="float32")
    for tile in both_tiles(p, get_chip(arch)): assert tile.lds_bytes(p) <= get_chip(arch).lds, (D, Dv, tile)

def test_local_memory_that_has_no_room() -> None:
  p = problem(H=1, Sq=8, D=512, dtype="float32")
  assert all(t.lds_bytes(p) <= 49152 for t in both_tiles(p, other_chip("CL", 49152)))
  with pytest.raises(NotImplementedError, match="no tile of backward_dq_tiled fits D=512"): both_tiles(p, other_chip("CL", 1024))

def test_kernels_are_plain_uops() -> None:
  # Backward kernels consist of plain UOps, even with softcap, a window, lengths and dropout. They contain no operation for which a renderer would
  # need a definition.
  p = problem(**{**SMALL, "softcap": 2.0, "window": (9, 3), "dropout_p": 0.3, "extras": dict(kv_lengths=int32(31), dropout_seed=SEED)})
  for names, make in ((dq_arguments(p), dq_of), (dkdv_arguments(p), dkdv_of)):
    types = {**FLOATS, "int32": dtypes.int, "uint32": dtypes.uint}
    given = [UOp.placeholder(shape, types[dtype], i) for i, (shape, dtype) in enumerate(names.values())]
    program = make(p, other_chip("CL", 49152), replace(FEW, keys="dk" in names))(*given)
    assert not customs(program) and not {u.dtype for u in program.toposort()} & set(VECTORS)

# ***** real devices *****

SCRIPT = """
import numpy as np, attn
from attn.accuracy import judge, law_of_gradients
from attn.tinygrad_compat import Tensor
rng = np.random.default_rng(0)
for dtype, kind in (("float32", np.float32), ("float16", np.float16))[:{types}]:
  q, k, v, do = (rng.standard_normal((2, h, n, 24)).astype(kind) for h, n in ((4, 37), (2, 70), (2, 70), (4, 37)))
  given = [Tensor(x).realize() for x in (q, k, v)]
  assert attn.explain(*given, causal=True, backward=True).kernels == ("backward_dq_tiled", "backward_dkdv_tiled")
  found = (attn.attention(*given, causal=True)*Tensor(do)).float().sum().gradient(*given)
  args = (q, k, v, do, None, 24**-0.5, (-1, 0), 33)
  laws = law_of_gradients(*args, dtype=dtype, out_dtype=dtype)
  for name, x in zip("qkv", found):
    assert (verdict := judge(x.numpy(), getattr(laws, name))).ok, (dtype, name, verdict)
    print(dtype, name, verdict)
"""

@pytest.mark.thorough
@pytest.mark.parametrize("device", ("CPU", "CL"))
def test_on_this_machine(device:str) -> None:
  # Gradients are right on this machine's CPU, with the clang of the PyPI package ziglang, and through OpenCL, with Debian's pocl-opencl-icd.
  if device == "CPU": pytest.importorskip("ziglang")
  elif not any(Path("/etc/OpenCL/vendors").glob("pocl*.icd")): pytest.skip("no OpenCL driver: apt-get install pocl-opencl-icd ocl-icd-libopencl1")
  on(device, 2, SCRIPT, **({"CC": str(Path(__file__).resolve().parent.parent.parent/"examples/clang_of_zig.sh")} if device == "CPU" else {}))

ON_A_GPU: tuple[dict[str, Any], ...] = (dict(Sq=40, Sk=200, D=64), dict(Sq=150, Sk=170, D=40, Dv=136, causal=True), dict(Sq=70, Sk=90, D=512),
                                        dict(H=4, Hkv=2, Sq=120, Sk=150, D=128, window=(40, 9)), dict(Sq=90, Sk=60, D=200, causal=True))

@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ("float32", "float16", "bfloat16"))
@pytest.mark.parametrize("name", (None, *HARD))
def test_on_a_gpu(name:str|None, dtype:str, monkeypatch:pytest.MonkeyPatch) -> None:
  # Outputs and gradients are within their error limits on a GPU. Inputs with NaN or inf run without a mask: with a mask, 0 times NaN would reach dk
  # of hidden keys (docs/attention.md).
  if dtype == "float16" and name is not None and "huge_key" in name: pytest.skip("float16 cannot hold such large scores")
  monkeypatch.setenv("ATTN_KERNEL", "tiled,backward_dq_tiled")
  for shape in ON_A_GPU if name is None else [{**shape, "causal": False} for shape in ON_A_GPU[:2]]:
    p = problem(**{"H": 2, **shape, "dtype": dtype})
    x = normal(p) if name is None else HARD[name](p)
    do = rounded(np.random.default_rng(11).standard_normal((p.B, p.H, p.Sq, p.Dv), dtype=np.float32), dtype)
    with Context(DEV="CUDA"):
      given = [tensor(a, dtype, "CUDA") for a in (x.q, x.k, x.v)]
      o = attn.attention(*given, causal=shape.get("causal", False), window=shape.get("window", (-1, -1)))
      found = [array(g) for g in (o*tensor(do, dtype, "CUDA")).float().sum().gradient(*given)]
    want = cases.expected_gradients(p, x, {}, do, None)
    for n, got in zip("qkv", found): assert (verdict := judge(got, want[n])).ok, f"d{n}, {shape}: {verdict}"
