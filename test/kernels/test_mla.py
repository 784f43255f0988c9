"""Tests of multi-head latent attention (MLA), where V is the first columns of K: by the kernels mla and mla_mma, by other kernels, and over caches
with one tensor for keys and values."""
from __future__ import annotations
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable
import numpy as np
import pytest
import attn
from attn.accuracy import judge, law_of
from attn.api.attention import backward_choice_of, choice_of
from attn.cache import tuned
from attn.calls.kept_graphs import recipes
from attn.chips import CHIPS, get_chip
from attn.choose.dispatch import KERNELS, choose, choose_tile
from attn.choose.mla_tiles import UP_TO, mla_mma_tile, mla_tile
from attn.emulator import plan
from attn.emulator.checks import LdsRace, UninitialisedRead
from attn.emulator.matrix import Layout
from attn.emulator.plan import Plan
from attn.kernels.amd import latent as amd_latent
from attn.kernels.amd.latent import AmdLatent
from attn.kernels.amd.products import LdsColumns
from attn.kernels.mma import latent as mma_latent
from attn.kernels.mma.latent import MmaLatent
from attn.kernels.parts.weights.scores import Scores
from attn.kernels.tiles.amd import MlaTile
from attn.kernels.tiles.common import ScalarPlaces
from attn.kernels.tiles.mma import MlaMmaTile
from attn.measure import decode
from attn.ops.operation import statement
from attn.problem import Problem
from attn.search.latent import latent_space
from attn.tinygrad_compat import Ops, Tensor, UOp, ast_of
from api_cases import draw, emulated
from cases import Inputs, array, check_kernels, expected, floats, in_turn, ints, normal, problem, tensor
from kinds import KINDS

UNITS = ("gfx1100", "sm_80", "gfx942", "gfx1201", "sm_90", "gfx950")
NARROW = dict(H=40, Hkv=1, D=48, Dv=40)     # small, so that lowering is quick; the last tiles are more than half full
Maker = Callable[[Problem], Inputs]

def latent(make:Maker) -> Maker:
  # a function that makes inputs as `make` does, except that V is the first columns of K
  def made(p:Problem) -> Inputs:
    x = make(p)
    return Inputs(x.q, x.k, x.k[..., :p.Dv])
  return made

def tile_for(arch:str, p:Problem) -> MlaTile|MlaMmaTile: return (mla_mma_tile if arch.startswith("sm") else mla_tile)(p, get_chip(arch))

def check_mla(arch:str, make:Maker=normal, **parameters:Any) -> np.ndarray|None:
  # compares o and lse of a latent kernel (mla or mla_mma) with float64, and returns lse
  # the latent kernel runs, although dispatch would choose another kernel for so small a head dimension; its tile fits the number of query rows
  # (queries times heads)
  parameters = {**NARROW, "Sq": 1, "v_in_k": True, **parameters}
  return check_kernels(arch, latent(make), tile=lambda _: tile_for(arch, problem(**parameters)), **parameters)[1]

# ***** the kernels *****

OPTIONS:dict[str, dict[str, Any]] = {
  "softcap, few heads": dict(H=3, Sk=70, softcap=2.0),
  "causal, float32": dict(Sq=5, Sk=70, causal=True, out_dtype="float32"),
  "lengths, sinks": dict(B=3, Sq=2, Sk=100, causal=True, extras=dict(kv_lengths=ints(33, 0, 100), sinks=floats(40))),
  "window, ALiBi, odd rows": dict(Sq=2, Sk=130, window=(40, 3), D=45, Dv=37, dtype="bfloat16", extras=dict(alibi_slopes=np.abs(floats(40))/4)),
  "packed sequences": dict(layout="thd", Sq=9, Sk=200, causal=True, extras=dict(cu_seqlens_q=ints(0, 2, 5, 9), cu_seqlens_k=ints(0, 100, 101, 200))),
  "more queries than keys": dict(H=20, Sq=9, Sk=5, causal=True, layout="bshd"),
  "splits": dict(B=2, Sk=300, num_splits=3, extras=dict(kv_lengths=ints(133, 300))),
  "without lse": dict(Sk=170, lse=False, dtype="bfloat16"),
  "top-left": dict(Sq=5, Sk=100, causal="top-left"),
  "one column": dict(Sk=70, Dv=1), "all columns": dict(Sk=70, Dv=48),
  "two key heads": dict(H=40, Hkv=2, Sk=70, layout="bshd"), "16 heads": dict(H=16, Sk=70, layout="nsd"), "one key": dict(Sk=1),
  "tiny scale": dict(Sk=70, softmax_scale=1.3e-38), "large scale": dict(Sk=70, softmax_scale=1e3),
}
BY_DEFAULT = 3

@pytest.mark.sample(2)
@in_turn("option, arch", list(OPTIONS)[:BY_DEFAULT], UNITS)
def test_option(option:str, arch:str) -> None: check_mla(arch, **OPTIONS[option])

@pytest.mark.thorough
@pytest.mark.parametrize("arch", UNITS)
@pytest.mark.parametrize("option", list(OPTIONS)[BY_DEFAULT:])
def test_further_option(option:str, arch:str) -> None: check_mla(arch, **OPTIONS[option])

@pytest.mark.thorough
@pytest.mark.parametrize("heads, arch", [(heads, UNITS[i%len(UNITS)]) for i, heads in enumerate((32, 64, 32, 64, 128, 16))])
def test_whole_rows(heads:int, arch:str) -> None:
  # Latent attention is right for DeepSeek's sizes: keys of 576 columns, of which 512 are the values. Two queries for each head give 32 to 256 query
  # rows on one key/value head.
  check_mla(arch, H=heads, Sq=2, Sk=70, D=576, Dv=512, causal=True, dtype="bfloat16" if heads == 64 else "float16")

@pytest.mark.parametrize("kind, arch", [pytest.param(kind, arch, marks=() if (kind, arch) == ("rising", "gfx950") else pytest.mark.thorough)
                                        for kind in KINDS for arch in UNITS])
def test_hard_inputs(kind:str, arch:str) -> None: check_mla(arch, lambda p: KINDS[kind](p, 3), Sq=2, Sk=150)

def not_a_number(p:Problem) -> Inputs:
  # inputs in which one query is NaN and one query contains an inf
  x = normal(p)
  x.q[0, 3, 0], x.q[0, 7, 0, 0] = np.nan, np.inf
  return x

@in_turn("arch, make", UNITS, [not_a_number], among=len(UNITS), turn=3)
def test_a_nan_stays_in_its_row(arch:str, make:Maker) -> None: check_mla(arch, make, Sk=90)

def wrong(m:pytest.MonkeyPatch, of:Any, name:str, make:Callable[[Any], Any]) -> None: m.setattr(of, name, make(getattr(of, name)))

def sums_cut_off(m:pytest.MonkeyPatch) -> None:
  # makes the emulated matrix unit round sums towards 0, as the matrix unit of an H200 does
  def cut(add:Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    def added(self:Any, c:np.ndarray, product:np.ndarray) -> np.ndarray:
      exactly = add(self, c.astype(np.float64), product.astype(np.float64))
      found = exactly.astype(np.float32)
      return np.where(np.abs(found) > np.abs(exactly), np.nextafter(found, np.float32(0)), found)
    return added
  wrong(m, Layout, "add_matrices", cut)

@pytest.mark.thorough
def test_sums_that_are_cut_off(monkeypatch:pytest.MonkeyPatch) -> None:
  # If a matrix unit rounds sums towards 0, the lse of a row with one dominant key becomes too small. The latent kernel therefore adds the products of
  # only a few instructions (ADDED_UP) in the matrix unit, and adds these partial sums in fp32. Its error is less than half of the error of one sum of
  # all 36 instructions. Both errors are within the limit of lse.
  sizes:dict[str, Any] = dict(H=128, Sk=500, D=576)
  p = problem(**NARROW | sizes, Sq=1, v_in_k=True)
  def steep(p:Problem) -> Inputs: return KINDS["q times 8"](p, 1)
  exact = expected(p, latent(steep)(p), {})[1].exact
  def lost(added_up:int) -> float:
    # the mean relative error of lse, positive if lse is too small, with sums of `added_up` matrix instructions
    # the kernel adds the products of `added_up` instructions in the matrix unit, which cuts off the sum's low bits, before it adds them in fp32
    monkeypatch.setattr(mma_latent, "ADDED_UP", added_up)
    ast_of.cache_clear(), recipes.cache_clear()      # an AST and a graph with another ADDED_UP are kept for the same problem
    lse = check_mla("sm_80", steep, **sizes)
    return float(np.mean((exact - lse)/exact))
  sums_cut_off(monkeypatch)
  assert 0 < 2*lost(mma_latent.ADDED_UP) < lost(36)

# ***** planted faults: each is caught *****

Plant = Callable[[pytest.MonkeyPatch], None]

def first_columns_only(m:pytest.MonkeyPatch) -> None:
  # plants a fault: every wave multiplies P by the first wave's columns of V
  m.setattr(amd_latent, "LdsColumns", lambda tile, mat, first: LdsColumns(tile, mat, UOp.const(0)))
  wrong(m, MmaLatent, "v_rows", lambda rows: lambda self, t, line: self.k_rows(t))
def weights_of_another_wave(m:pytest.MonkeyPatch) -> None:
  # plants a fault: a wave stores its P in the place of another wave, which computes the next queries
  def of_next(x:Any) -> Any:
    wave, tiles = x.share.wave, x.share.row_tiles
    return replace(x, share=replace(x.share, wave=wave//tiles*tiles + (wave + 1)%tiles))
  def elsewhere(put:Any) -> Any: return lambda self, *x: put(of_next(self), *x)
  for of, name in ((AmdLatent, "store_weights"), (MmaLatent, "put_weights")): wrong(m, of, name, elsewhere)
def never_rescaled(m:pytest.MonkeyPatch) -> None:
  def of_none(acc:UOp, factors:UOp, *done:UOp) -> UOp: return statement("rescale", acc[0], factors[0], *done, rows=1, tiles=1, accs=0)
  for of in (amd_latent, mma_latent): m.setattr(of, "rescale", of_none)
def unmasked(m:pytest.MonkeyPatch) -> None: m.setattr(Scores, "mask", lambda self, x, row, tile: x)
def own_keys_alone(m:pytest.MonkeyPatch) -> None:
  # plants a fault: a wave takes the largest score of its own keys for the largest score of the row
  def alone(highest:Any) -> Any: return lambda self, *x: highest(replace(self, share=replace(self.share, key_parts=1)), *x)
  for of in (AmdLatent, MmaLatent): wrong(m, of, "highest", alone)
def first_part_of_sums(m:pytest.MonkeyPatch) -> None:
  # plants a fault: the kernel adds the first wave's sum of P several times, and leaves the other waves' sums out
  wrong(m, ScalarPlaces, "total", lambda total: lambda self, kind, part: total(self, kind, part if isinstance(part, UOp) else 0))

AMD = tuple(unit for unit in UNITS if unit.startswith("gfx"))
FAULTS:dict[Plant, tuple[str, ...]] = {     # units on which each fault gives an error above its limit; by default the test runs the first unit
  first_columns_only: ("sm_80", *AMD, "sm_90"), weights_of_another_wave: ("gfx942", *UNITS), never_rescaled: ("gfx950", *UNITS),
  unmasked: ("gfx1201", *UNITS), own_keys_alone: ("gfx1100", "sm_80", "gfx1201", "sm_90"),
  first_part_of_sums: ("gfx1201", "sm_90", "gfx1100", "sm_80")}

@pytest.mark.sample(3)
@pytest.mark.parametrize("plant, arch", [
  pytest.param(plant, arch, marks=() if arch == units[0] and plant is not first_part_of_sums else pytest.mark.thorough)
  for plant, units in FAULTS.items() for arch in dict.fromkeys(units)])
def test_planted_fault(monkeypatch:pytest.MonkeyPatch, plant:Plant, arch:str) -> None:
  plant(monkeypatch)
  make = KINDS["normal" if plant is unmasked else "rising"]       # in rising rows the last keys outweigh the zeros beyond the end
  with pytest.raises(AssertionError, match="o: "): check_mla(arch, lambda p: make(p, 0), Sk=139, D=80, Dv=72, lse=False)

def barriers_but(m:pytest.MonkeyPatch, left_out:int) -> Callable[[], int]:
  # makes the emulator skip barrier `left_out` of the next program, and returns a function that counts the program's barriers
  seen, barrier = [0], Plan.barrier
  def some(self:Plan, u:UOp) -> None:
    if seen[0] != left_out: barrier(self, u)
    seen[0] += 1
  m.setattr(Plan, "barrier", some)
  m.setattr(plan, "_RULES", {**plan._RULES, Ops.BARRIER: some})
  return lambda: seen[0]

# Number of barriers in each unit's kernel, and the index of the barrier that tinygrad would insert if it were left out, before the loop's end.
BARRIERS:dict[str, tuple[int, int|None]] = {"gfx942": (8, 6), "gfx1201": (10, 8), "sm_80": (7, None)}

@pytest.mark.parametrize("arch, left_out", [pytest.param(arch, i, marks=() if i == 2 and arch == "gfx942" else pytest.mark.thorough)
                                            for arch, (n, spare) in BARRIERS.items() for i in range(n) if i != spare])
@pytest.mark.usefixtures("without_places")
def test_without_a_barrier(monkeypatch:pytest.MonkeyPatch, arch:str, left_out:int) -> None:
  # The kernel for latent attention needs each of its barriers: if one is left out, the emulator reports a race or a read of unwritten memory. The
  # only exception is a barrier that tinygrad would insert by itself. Each case has its own problem, because tinygrad's cache keeps programs.
  count = barriers_but(monkeypatch, left_out)
  with pytest.raises((LdsRace, UninitialisedRead)): check_mla(arch, Sk=129 + left_out, lse=False)
  assert count() == BARRIERS[arch][0]

# ***** attention and caches *****

def check_against_exact(o:np.ndarray, q:np.ndarray, k:np.ndarray, Dv:int, **options:Any) -> None:
  # checks o (B, H, Sq, Dv) of causal latent attention with queries q and keys k against float64
  args = q.astype(np.float32), k.astype(np.float32), k[..., :Dv].astype(np.float32), q.shape[-1]**-0.5, (-1, 0), k.shape[-2] - q.shape[-2]
  assert (verdict := judge(o, law_of(*args, dtype="float16", out_dtype="float16")[0])).ok, verdict

def drawn(*shape:int, seed:int=0) -> np.ndarray: return np.random.default_rng(seed).standard_normal(shape).astype(np.float16)

@pytest.mark.thorough
@pytest.mark.parametrize("arch", UNITS)
def test_kernel_by_dispatch(arch:str, D:int=264) -> None:
  # Dispatch chooses the latent kernels for rows that are too long for the forward kernel. The latent kernels read a view of a larger tensor in place.
  q, whole = drawn(1, 8, 2, D), drawn(2, 1, 40, D, seed=1)
  with emulated(arch):
    k = tensor(whole, "float16").realize()[1:]
    o = attn.attention(tensor(q, "float16"), k, None, v_dim=257, causal=True)
    assert choice_of(tensor(q, "float16"), k, None, v_dim=257, causal=True).kernel == ("mla_mma" if arch.startswith("sm") else "mla")
    check_against_exact(array(o), q, whole[1:], 257)

@pytest.mark.parametrize("arch, Dv", [pytest.param(arch, Dv, marks=() if arch == "gfx1201" else pytest.mark.thorough)
                                      for arch, Dv in (("gfx1201", 24), ("sm_90", 24), ("sm_80", 20), ("gfx942", 20), ("gfx950", 32))])
def test_other_kernels_read_v_in_k(arch:str, Dv:int) -> None:
  # Latent attention with short rows runs on the usual kernels, which read V from the first columns of K.
  q, k = drawn(1, 4, 70, 32), drawn(1, 1, 80, 32, seed=1)
  with emulated(arch): check_against_exact(array(attn.attention(tensor(q, "float16"), tensor(k, "float16"), None, v_dim=Dv, causal=True)), q, k, Dv)

def test_no_kernel_has_its_gradient() -> None:
  # No kernel computes gradients of a call with v_dim, in which V is the first v_dim columns of K: tinygrad differentiates tensor operations instead.
  # `explain` says so, also for small head dimensions and float32, where an earlier version raised KeyError.
  for arch, dtype, D in (("gfx942", "float16", 32), ("sm_80", "float32", 32), ("sm_90", "float16", 576)):
    with emulated(arch):
      choice = backward_choice_of(draw(1, 4, 3, D, dtype=dtype), draw(1, 1, 40, D, dtype=dtype), None, v_dim=20)
      assert choice.kernels == () and ("v_dim: the backward kernels need v as a tensor of its own" in str(choice) or D > 512), choice

@pytest.mark.thorough
@pytest.mark.parametrize("arch, D, Dv", (("gfx942", 32, 20), ("sm_80", 264, 257)))
def test_gradient(arch:str, D:int, Dv:int) -> None:
  # A call with v_dim takes V from the first v_dim columns of K, and tinygrad computes its gradient from tensor operations. The gradient of K equals
  # that of a call with separate K and V, where the gradient of V is added to the first columns of the gradient of K.
  with emulated(arch):
    q, k = (tensor(x, "float16").realize() for x in (drawn(1, 4, 3, D), drawn(1, 1, 40, D, seed=1)))
    found, want = (attn.attention(q, k, v, causal=True, **options).float().square().sum().gradient(q, k)
                   for v, options in ((None, {"v_dim": Dv}), (k[..., :Dv], {})))
    for x, y in zip(found, want): np.testing.assert_allclose(x.numpy(), y.numpy(), atol=2e-2)

def check_cache(heads:int, D:int, Dv:int, capacity:int, filled:int, page:int, **options:Any) -> None:
  # checks latent attention of two new rows over a cache, and what the cache contains after the call
  # `filled` of `capacity` rows are filled, the others are NaN; with `page` > 0 the cache consists of pages with this many rows, in random order
  q, k = drawn(1, heads, 2, D), drawn(1, 1, filled + 2, D, seed=1)
  held = np.full((1, 1, capacity, D), np.nan, np.float16)
  held[:, :, :filled] = k[:, :, :filled]
  if page:
    order = np.random.default_rng(2).permutation(capacity//page)
    held = held.reshape(capacity//page, page, 1, D)[np.argsort(order)]
    options["block_table"] = Tensor(order[None].astype(np.int32), device="EMU").realize()
  cache = tensor(held, "float16").contiguous().realize()
  o = attn.attention_with_kv_cache(tensor(q, "float16"), tensor(k[:, :, filled:], "float16"), None, cache, None, filled, v_dim=Dv, **options)
  check_against_exact(array(o), q, k, Dv)
  rows = array(cache).reshape(-1, page or capacity, D)
  rows = rows[order].reshape(capacity, D) if page else rows[0]
  np.testing.assert_array_equal(rows[:filled + 2], k[0, 0].astype(np.float32))

@pytest.mark.parametrize("arch, page", [pytest.param(arch, page, marks=() if (arch, page) == ("gfx942", 4) else pytest.mark.thorough)
                                        for arch in ("gfx942", "sm_80", "gfx1201", "sm_90") for page in (0, 1, 4, 32)])
def test_cache(arch:str, page:int) -> None:
  # Latent attention is right over a cache that serves as keys and values, a whole tensor or in pages. Rows beyond its length are NaN.
  with emulated(arch): check_cache(4, 264, 257, 64, 33, page)

# ***** tiles *****

def latent_problem(arch:str, **sizes:int) -> Problem:
  return problem(**{**dict(B=2, H=128, Hkv=1, Sq=1, Sk=4000, D=576, Dv=512), **sizes}, v_in_k=True, lse=False)

SPACES = [(arch, tile) for arch in UNITS for tile in latent_space(latent_problem(arch), get_chip(arch))]
@pytest.mark.thorough
@pytest.mark.parametrize("arch, tile", SPACES, ids=lambda x: str(x) + getattr(x, "options", ""))
def test_every_tile_that_is_timed(arch:str, tile:MlaTile|MlaMmaTile) -> None:
  # Latent attention is right with every tile that tuning by time (the environment variable TUNE=1) tries. The rows are shorter than in real calls, to
  # save time.
  check_kernels(arch, latent(normal), tile=lambda _: tile, **NARROW, Sq=2, Sk=139, v_in_k=True, causal=True)

@pytest.mark.parametrize("arch", ("gfx942", "sm_90"))
def test_a_tile_that_was_timed(arch:str, monkeypatch:pytest.MonkeyPatch, tmp_path:Path, recwarn:pytest.WarningsRecorder) -> None:
  # Tuning by time (the environment variable TUNE=1) stores the fastest tile for latent attention. Dispatch uses this tile for all problems with the
  # same head dimensions and options whose lengths and number of heads round up to the same powers of two. A stored tile that the chip cannot have is
  # ignored, with a warning.
  monkeypatch.setattr(tuned, "path", lambda: tmp_path/"tune.json")
  monkeypatch.setattr(tuned, "stamp", lambda: {"attn": "0"})
  row, chip, seen = decode.DecodeStep(2, 128, 1, 4000, 576, v_dim=512), get_chip(arch), list[Any]()
  real = replace(chip, tuned=True)
  space = list(latent_space(latent_problem(arch), chip))
  fastest = space[3]
  def seconds(call:Any, work:Any) -> float:
    seen.append((work.tile, work.splits))
    return 1e-3 if work.tile == fastest else 2e-3
  with emulated(arch): table = decode.tune(row, seconds)
  own = choose_tile(p := latent_problem(arch), chip)
  assert table[0]["tile"] == str(fastest) and table[0]["chosen by"] == "" and [x for x, _ in seen] == [own, *(x for x in space if x != own)]
  assert all(parts > 1 for _, parts in seen)
  for like in (p, latent_problem(arch, Sk=3000), replace(p, kv_lengths=True)): assert choose_tile(like, real) == fastest != choose_tile(like, chip)
  for other in (latent_problem(arch, H=16), latent_problem(arch, Dv=500), latent_problem(arch, Sk=5000), replace(p, softcap=2.0)):
    assert choose_tile(other, real) == choose_tile(other, chip)
  assert not recwarn.list
  tuned.warn.cache_clear()
  (tmp_path/"tune.json").write_text((tmp_path/"tune.json").read_text().replace('"row_tiles": ', '"row_tiles": 7'))
  assert choose_tile(p, real) == own and "row_tiles=7" in str(recwarn.list[0].message) and len(recwarn.list) == 1

def test_rows_of_the_measurement() -> None:
  of_16 = decode.DecodeStep(8, 16, 1, 4096, 576, 16, v_dim=512)
  assert decode.decode_steps(["576", "B=8", "page=16", "H=16"]) == [of_16, replace(of_16, bits=8)]
  for word, text in (("C=8", "C=8: must be NAME=NUMBER, NAME one"), ("B=x", "B=x: must be a whole number"), ("keys=0", "keys=0: must be a whole")):
    with pytest.raises(ValueError, match=text): decode.decode_steps([word])
  with emulated("sm_90"), pytest.raises(ValueError, match="it is for latent attention"): decode.tune(decode.DecodeStep(1, 2, 2, 64))

# ***** what is refused *****

def test_bad_arguments() -> None:
  with emulated("gfx942"):
    q, k, v = draw(1, 4, 1, 32), draw(1, 1, 40, 32), draw(1, 1, 40, 24)
    for arguments, options, text in (((q, k, None), {}, "v=None with v_dim=None"), ((q, k, v), {"v_dim": 24}, "v_dim=24 with v"),
                                     ((q, k, None), {"v_dim": 33}, "v_dim=33: must lie in 1..32"), ((q, k, None), {"v_dim": 0}, "v_dim=0"),
                                     ((q, k, None), {"v_dim": 2.5}, "v_dim=2.5")):
      with pytest.raises(ValueError, match=text): attn.attention(*arguments, **options)
    with pytest.raises(ValueError, match="v_cache=None with v_new"): attn.append_kv(draw(1, 1, 1, 32), draw(1, 1, 1, 24), k, None, 3)
    with pytest.raises(ValueError, match="v=None with v_dim=None"):
      attn.attention_with_kv_cache(q, draw(1, 1, 1, 32), None, draw(1, 1, 40, 32), None, 3)

def test_what_the_kernels_refuse_goes_to_another() -> None:
  longest, bias = UP_TO["D"], dict(extras=dict(bias=floats(1, 1, 1, 40)))
  for what, parameters in (("bias", bias), (f"D={longest + 8}", dict(D=longest + 8)), ("float32", dict(dtype="float32"))):
    p = problem(**{**dict(H=4, Hkv=1, Sq=1, Sk=40, D=longest, Dv=300, v_in_k=True, lse=False), **parameters})
    choice = choose(p, get_chip("gfx942"))
    assert choice.kernel == "three_pass" and what in (choice.why_not("mla") or ""), choice
  p, latent_kernels = problem(H=128, Hkv=1, Sq=1, Sk=4096, D=576, Dv=512, v_in_k=True, lse=False), {"mla", "mla_mma", "mla_wgmma"}
  for name, chip in CHIPS.items():
    if chip.matrix or chip.unit.mma: assert choose(replace(p, num_splits=1), chip).kernel in latent_kernels, name
  assert choose(replace(p, num_splits=0), get_chip("gfx942")).work.splits > 1 and latent_kernels < KERNELS.keys()
