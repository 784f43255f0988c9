"""Tests of dropout: its random bits are equal on every chip and statistically random; the kernels of every matrix unit drop elements of P, and of the
gradient of P, by these bits; every way to ask for dropout works."""
from __future__ import annotations
import functools, itertools, re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
import numpy as np
import pytest
from tinygrad import TinyJit
import attn
from attn import flash_attn
from attn.api import launch
from attn.api.dropout import drawn_seed, seed_from
from attn.calls.placement import Placement
from attn.chips import get_chip
from attn.choose.dispatch import choose_tile, forward_of
from attn.kernels.amd import backward as amd_backward, forward as amd_forward
from attn.kernels.mma import forward as mma_forward
from attn.kernels.nvidia import warp_gradients
from attn.kernels.parts.backward import gradients
from attn.kernels.parts.backward.gradients import Normaliser, scaled_delta
from attn.kernels.parts.grid.tensors import arguments
from attn.kernels.parts.grid.workgroup import Workgroup
from attn.kernels.parts.weights.dropout import Kept, kept_scores
from attn.kernels.parts.weights.epilogue import finish
from attn.kernels.wgmma import backward as wgmma_backward, forward as wgmma_forward
from attn.ops.dropout import philox
from attn.ops.interpret_numpy import Numbers
from attn.ops.renderers import render
from attn.problem import Problem
from attn.tinygrad_compat import Context, Tensor, UOp, dtypes
from attn.values import FLOATS
from api_cases import check_attention, draw, emulated, int32, whole
from backward_cases import check_backward_kernels
from cases import ARCHS, Inputs, array, check_kernels, floats, kept_mask, philox4x32, problem, run_kernels
from test_gradient import check_gradients

SEED = np.array([0x1234567, 0x89abcdef], np.uint32)
P = 0.3

def with_seed(**extras:np.ndarray) -> dict[str, Any]: return dict(dropout_p=P, extras={**extras, "dropout_seed": SEED})

def in_turn_on(archs:tuple[str, ...], cases:dict[str, Any]) -> Any:
  # Decorator: runs a test for every pair of one of `cases` and a chip; by default each case runs on one chip, and the chips take turns.
  # All other pairs get pytest's mark `thorough`.
  return pytest.mark.parametrize("case, arch", [
    pytest.param(case, arch, marks=() if i % len(archs) == k else pytest.mark.thorough, id=f"{case}-{arch}")
    for i, case in enumerate(cases) for k, arch in enumerate(archs)])

# ***** random bits *****

# Test vectors of Random123 (kat_vectors), philox 4x32 with 7 rounds: counter, key, result
VECTORS = [((0,)*4, (0,)*2, (0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48)),
           ((0xffffffff,)*4, (0xffffffff,)*2, (0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662)),
           ((0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344), (0xa4093822, 0x299f31d0), (0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a))]

class OneLane:
  wave, active = 1, np.ones(1, np.bool_)

@pytest.mark.parametrize("counter, key, result", VECTORS)
def test_philox(counter:tuple[int, ...], key:tuple[int, ...], result:tuple[int, ...]) -> None:
  # attn's Philox generator, and the tests' own implementation of it, give the published numbers.
  def words(xs:tuple[int, ...]) -> list[np.ndarray]: return [np.array([x], np.uint32) for x in xs]
  interpreter: Any = Numbers(OneLane())     # type: ignore[arg-type]
  assert tuple(int(x[0]) for x in philox(interpreter, words(counter), words(key))) == result
  assert tuple(map(int, philox4x32(counter, key))) == result

def test_the_mask_in_tensor_operations() -> None:
  with emulated("gfx942"):
    seed = Tensor(SEED, device="EMU")
    got = attn.dropout_mask(seed, P, 2, 3, 5, 21, batch_start=7, head_start=4)
    assert got.dtype == dtypes.bool and got.device == "EMU"
    np.testing.assert_array_equal(got.numpy(), kept_mask(SEED, P, 2, 3, 5, 21, 7, 4))
    assert attn.dropout_mask(seed, 0.0, 1, 1, 3, 9).numpy().all()

@pytest.mark.usefixtures("not_unrolled")
@pytest.mark.parametrize("sizes", [(2, 2, 3, 5), (5, 7, 11, 13)])
def test_the_mask_of_sizes_that_are_no_powers_of_two(sizes:tuple[int, ...]) -> None:
  # `dropout_mask` is right for sizes that are no powers of two. tinygrad computes the index of an axis there as the remainder of a division, and
  # would fail to lower a remainder of 64-bit integers.
  with emulated("gfx942"): np.testing.assert_array_equal(attn.dropout_mask(Tensor(SEED, device="EMU"), P, *sizes).numpy(), kept_mask(SEED, P, *sizes))

def elements_apart(mask:np.ndarray) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
  # Yields (label, a, b) for each axis of the mask and several distances: elements of a lie this distance behind those of b.
  # Along the keys, two such elements lie in the same octet (eight neighbouring keys), in neighbouring octets, or further apart.
  for axis, name in enumerate(("batch", "head", "query", "key")):
    for lag in (1, 2, 3, 4, 7, 8, 16, 32, 64):
      if lag < mask.shape[axis]:
        yield f"{name} {lag}", np.take(mask, range(lag, mask.shape[axis]), axis), np.take(mask, range(mask.shape[axis] - lag), axis)

SIGMAS = 5      # one of these 150 statistics exceeds it by chance for 1 of 10,000 seeds

@pytest.mark.parametrize("p", [0.1, 0.5])
def test_rate_and_independence(p:float) -> None:
  # The rate of kept elements is right in the whole mask, in each head, query and key, and at each position in an octet (eight neighbouring keys). The
  # mask shows no correlation along any axis, between neighbouring seeds, or between (i, j) and (j, i).
  mask = kept_mask(SEED, p, 4, 4, 160, 160)
  q, n = round(p*65536)/65536, mask.size
  def held(name:str, mean:np.ndarray, count:int, variance:float) -> None:
    assert (np.abs(mean) <= SIGMAS*np.sqrt(variance/count)).all(), name
  x, variance = mask - (1 - q), q*(1 - q)
  held("rate", x.mean(), n, variance)
  for axes in ((2, 3), (0, 1, 3), (0, 1, 2)): held(f"rate over {axes}", x.mean(axes), int(np.prod([x.shape[i] for i in axes])), variance)
  held("rate in an octet", x.reshape(-1, 8).mean(0), n//8, variance)
  for name, a, b in elements_apart(x): held(name, (a*b).mean(), a.size, variance**2)
  held("transposed", (x*x.swapaxes(2, 3))[:, :, ~np.eye(160, dtype=bool)].mean(), n//2, 2*variance**2)     # each pair counts twice
  held("heads as batches", (x*x.swapaxes(0, 1))[~np.eye(4, dtype=bool)].mean(), n//2, 2*variance**2)
  for i, bit in itertools.product(range(2), (1, 1 << 31)):
    other = SEED ^ np.array([bit if j == i else 0 for j in range(2)], np.uint32)
    held(f"seed {i} {bit}", (x*(kept_mask(other, p, 4, 4, 160, 160) - (1 - q))).mean(), n, variance**2)

def test_a_rate_that_is_wrong_is_noticed() -> None:
  # The statistics of these tests reject a rate of 26/256, which is 6 sigma from p = 0.1 (a generator with 8 random bits for each score would have
  # this rate). They also reject a mask that is equal in all heads.
  mask = kept_mask(SEED, 26/256, 4, 4, 320, 320)
  assert abs(mask.mean() - 0.9) > SIGMAS*np.sqrt(0.09/mask.size)
  shared = np.broadcast_to(mask[:, :1], mask.shape) - 0.9
  assert any(abs((a*b).mean()) > SIGMAS*0.09/np.sqrt(a.size) for name, a, b in elements_apart(shared) if name.startswith("head"))

# ***** on every matrix unit *****

UNITS = (*ARCHS, "sm_80", "sm_90")      # sm_90 uses wgmma from 64 queries on

def showing(p:Problem) -> Inputs:
  # Makes inputs with which O shows the dropout mask: all keys have equal weight, and column j of O is the weight of key j.
  assert p.Dv >= p.Sk
  v = np.broadcast_to(np.eye(p.Sk, p.Dv, dtype=np.float32), (p.B, p.Hkv, p.Sk, p.Dv)).copy()
  return Inputs(np.zeros((p.B, p.H, p.Sq, p.D), np.float32), np.zeros((p.B, p.Hkv, p.Sk, p.D), np.float32), v)

def mask_of(arch:str, tile:Callable[[Any], Any]=lambda x: x, **parameters:Any) -> np.ndarray:
  # Returns the dropout mask that the forward kernel applies: true for each element of P that it keeps.
  # O shows the mask. `tile` maps the tile that dispatch chooses to the tile that is used; `parameters` change the problem.
  p = problem(**{**dict(B=2, H=2, Sq=70, Sk=104, D=8, Dv=104, lse=False), **with_seed(), **parameters})
  o, _ = run_kernels(p, showing(p), arch, {"dropout_seed": SEED}, tile(choose_tile(p, get_chip(arch))))
  found = o != 0
  np.testing.assert_array_equal(o[found], np.float32(np.float16(1/104/(1 - P))))
  return found[..., :p.Sk]

@pytest.mark.sample(3)
@pytest.mark.parametrize("arch", UNITS)
def test_the_mask_is_that_of_the_document(arch:str) -> None:
  np.testing.assert_array_equal(mask_of(arch), kept_mask(SEED, P, 2, 2, 70, 104))

TILES: dict[str, list[dict[str, Any]]] = {
  "gfx942": [dict(block_n=64, waves=1), dict(q_tiles=2), dict(block_n=128)], "gfx1100": [dict(block_n=16), dict(q_tiles=2, waves=2)],
  "sm_80": [dict(block_n=16, waves=1), dict(block_n=48, q_tiles=2)], "sm_90": [dict(block_n=80), dict(groups=1, block_n=176)]}

@pytest.mark.sample(2)
@pytest.mark.parametrize("arch, changes", [
  pytest.param(arch, changes, marks=() if i == 0 else pytest.mark.thorough) for arch, all_ in TILES.items() for i, changes in enumerate(all_)])
def test_the_mask_does_not_depend_on_tiles(arch:str, changes:dict[str, Any]) -> None:
  np.testing.assert_array_equal(mask_of(arch, lambda tile: replace(tile, **changes)), kept_mask(SEED, P, 2, 2, 70, 104))

@pytest.mark.parametrize("arch", ["gfx942", "sm_80"])
def test_the_mask_does_not_depend_on_splits(arch:str) -> None:
  p = problem(B=1, H=2, Sq=20, Sk=200, D=8, Dv=200, num_splits=3, **with_seed())
  o, _ = run_kernels(p, showing(p), arch, {"dropout_seed": SEED})
  np.testing.assert_array_equal(o != 0, kept_mask(SEED, P, 1, 2, 20, 200))

FORWARD: dict[str, dict[str, Any]] = {
  "causal, grouped heads": dict(H=4, Hkv=2, Sq=70, Sk=133, causal=True, dtype="bfloat16", **with_seed()),
  "few queries of a group": dict(H=6, Hkv=2, Sq=3, Sk=90, **with_seed()),
  "window, bshd, fp32 out": dict(B=2, Sq=80, Sk=60, window=(20, 7), layout="bshd", out_dtype="float32", **with_seed()),
  "packed": dict(layout="thd", Sq=70, Sk=90, causal=True, **with_seed(cu_seqlens_q=int32(0, 40, 40, 70), cu_seqlens_k=int32(0, 30, 41, 90))),
  "softcap, sinks, lengths": dict(B=2, Sq=66, Sk=70, softcap=3.0, **with_seed(sinks=floats(2), kv_lengths=int32(70, 33))),
  "from another batch and head": dict(B=2, Sq=20, Sk=40, **with_seed(first_batch_and_head=np.array([3, 5], np.uint32))),
  "splits, sinks": dict(Sq=20, Sk=300, num_splits=3, **with_seed(sinks=floats(2)))}

@pytest.mark.sample(4)
@in_turn_on(UNITS, FORWARD)
def test_forward(arch:str, case:str) -> None: check_kernels(arch, **{**dict(D=16), **FORWARD[case]})

@pytest.mark.gpu
@pytest.mark.parametrize("case", FORWARD)
def test_forward_on_the_gpu(case:str) -> None: check_kernels("CUDA", **{**dict(D=64), **FORWARD[case]})

BACKWARD: dict[str, dict[str, Any]] = {
  "causal, grouped heads": dict(H=4, Hkv=2, Sq=70, Sk=101, causal=True, dlse=True, **with_seed()),
  "packed": dict(layout="thd", H=2, Hkv=1, Sq=70, Sk=90, causal=True,
                 **with_seed(cu_seqlens_q=int32(3, 20, 20, 60), cu_seqlens_k=int32(2, 30, 41, 80))),
  "softcap, window, bfloat16": dict(B=2, H=1, Sq=40, Sk=65, softcap=3.0, window=(20, 7), dtype="bfloat16", **with_seed()),
  "another batch and head": dict(H=2, Sq=40, Sk=35, **with_seed(first_batch_and_head=np.array([3, 5], np.uint32), alibi_slopes=floats(2)**2))}

@pytest.mark.sample(2)
@in_turn_on(ARCHS, BACKWARD)
def test_backward(arch:str, case:str) -> None: check_backward_kernels(arch, **{**dict(D=16), **BACKWARD[case]})

@pytest.mark.sample(2)
@in_turn_on(("sm_80", "sm_90"), BACKWARD)
def test_backward_on_nvidia(arch:str, case:str) -> None: check_backward_kernels(arch, **{**dict(D=16), **BACKWARD[case]})

@pytest.mark.parametrize("p", [1e-6, 0.97])
def test_rates_near_0_and_1(p:float) -> None:
  check_backward_kernels("gfx1201", H=1, Sq=33, Sk=40, D=16, extras={"dropout_seed": SEED}, dropout_p=p)

# ***** faults *****

def unscaled(self:Any, row:Any, m:Any, totals:Any) -> Any: return finish(m, totals, self.scores, None)

def summed_after(self:Any, s:Any, tiles:Any, t:Any, part:Any, masked:bool) -> Any:
  # Version of the forward kernel's step `weigh` with a fault: row sums contain only the elements that dropout keeps.
  scores = self.group.scores
  left = [kept_scores(scores, [row], t) for row in self.queries]
  softmax, addends = s.softmax.addends(self.dual)
  weights = [kept.drop(softmax.weights(x, addend, scores.to_log2)) for kept, x, addend in zip(left, tiles, addends, strict=True)]
  softmax = softmax.correct(weights, tiles, scores.to_log2, self.mat, self.sums, self.tile.rescale_above, self.statements.do)
  return replace(s, softmax=softmax), None

def wrong_head(scores:Any, rows:Any, tile:Any) -> Kept: return kept_scores(scores, [replace(row, head=row.head + 1) for row in rows], tile)
def wrong_tile(scores:Any, rows:Any, tile:Any) -> Kept: return kept_scores(scores, rows, tile + 1)
def plain_normaliser(p:Problem, *numbers:Any, of:Any=Normaliser.of) -> Any: return of(replace(p, dropout_p=0.0), *numbers)
def whole_delta(delta:Any, p:Problem) -> Any: return scaled_delta(delta, replace(p, dropout_p=0.0))
def as_it_was(self:Any, x:Any, first:int=0) -> Any: return x

FAULTS: dict[str, tuple[str, Any, str, Any]] = {
  "O without 1/(1 - p)": ("o", Workgroup, "normalised", unscaled), "sums of what is left": ("o", amd_forward.AmdForward, "weigh", summed_after),
  "O by another head's mask": ("o", amd_forward, "kept_scores", wrong_head), "O of all P": ("o", Kept, "packed", as_it_was),
  "dQ by another tile's mask": ("dq", amd_backward, "kept_scores", wrong_tile), "dQ of all dP": ("dq", Kept, "drop", as_it_was),
  "dQ without 1/(1 - p)": ("dq", Normaliser, "of", staticmethod(plain_normaliser)),
  "dQ with too much delta": ("dq", amd_backward, "scaled_delta", whole_delta),
  "dK and dV by another head's mask": ("dkdv", amd_backward, "kept_scores", wrong_head), "dV of all P": ("dkdv", Kept, "packed", as_it_was),
  "dK of all dP": ("dkdv", Kept, "drop", as_it_was),
  "dK and dV without 1/(1 - p)": ("dkdv", Normaliser, "of", staticmethod(plain_normaliser)),
  "dK with too much delta": ("dkdv", gradients, "scaled_delta", whole_delta)}

def hold_to_the_law(kernel:str) -> None:
  rare = lambda tile: replace(tile, rescale_above=8.0)      # makes corrections rare: most iterations keep their first P
  if kernel == "o": check_kernels("gfx1201", H=1, Sq=16, Sk=96, D=16, tile=rare, **with_seed())
  else: check_backward_kernels("gfx1201", H=1, Sq=40, Sk=40, D=16, only=kernel, **with_seed())

ON_NVIDIA: dict[str, tuple[str, Any, str, Any]] = {
  "dQ by another tile's mask": ("dq", (warp_gradients,), "kept_scores", wrong_tile),
  "dQ of all dP": ("dq", (Kept,), "drop", as_it_was), "dV of all P": ("dkdv", (Kept,), "packed", as_it_was),
  "dK and dV by another head's mask": ("dkdv", (warp_gradients,), "kept_scores", wrong_head),
  "dK with too much delta": ("dkdv", (gradients, wgmma_backward), "scaled_delta", whole_delta),
  "dQ with too much delta": ("dq", (warp_gradients,), "scaled_delta", whole_delta),
  "O by another head's mask": ("o", (mma_forward, wgmma_forward), "kept_scores", wrong_head), "O of all P": ("o", (Kept,), "packed", as_it_was),
  "O without 1/(1 - p)": ("o", (Workgroup,), "normalised", unscaled)}

def shared_by_units(fault:str) -> bool:
  # Returns whether it is enough to test this fault on one of the two NVIDIA units, because both have the same faulty line.
  return fault.startswith("O ") or len(ON_NVIDIA[fault][1]) == 1

@pytest.mark.sample(5)
@pytest.mark.parametrize("fault, arch", [pytest.param(fault, arch, marks=pytest.mark.thorough if shared_by_units(fault) and (i + k) % 2 else ())
                                         for i, fault in enumerate(ON_NVIDIA) for k, arch in enumerate(("sm_80", "sm_90"))])
def test_a_fault_on_nvidia_is_caught(fault:str, arch:str, monkeypatch:pytest.MonkeyPatch) -> None:
  kernel, where, name, wrong = ON_NVIDIA[fault]
  for of in where: monkeypatch.setattr(of, name, wrong)
  check = check_kernels if kernel == "o" else functools.partial(check_backward_kernels, only=kernel)
  with pytest.raises(AssertionError, match="|".join(f"{x}: " for x in {"dkdv": ("dk", "dv")}.get(kernel, (kernel,)))):
    check(arch, H=1, Sq=64, Sk=64, D=16, **with_seed())

@pytest.mark.parametrize("kernel", ["o", "dq", "dkdv"])
def test_without_a_fault(kernel:str) -> None: hold_to_the_law(kernel)

@pytest.mark.sample(6)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught(fault:str, monkeypatch:pytest.MonkeyPatch) -> None:
  kernel, *place = FAULTS[fault]
  monkeypatch.setattr(*place)
  with pytest.raises(AssertionError, match="error"): hold_to_the_law(kernel)

# ***** machine code *****

@pytest.mark.parametrize("arch", ["gfx942", "gfx1100"])
def test_comparisons_stay_packed(arch:str) -> None:
  # The forward kernel compares dropout's 16-bit random numbers two at a time, by packed subtractions and minima. Its machine code has no 16-bit
  # comparison: clang would otherwise emit one comparison and one select for each number.
  pytest.importorskip("ziglang")
  from attn.compilers.clang import assembly
  p, chip = problem(Sq=256, Sk=256, D=64, lse=False, **with_seed()), get_chip(arch)
  shapes = arguments(p).values()
  given = [UOp.placeholder(shape, dtypes.uint if dtype == "uint32" else FLOATS[dtype], slot) for slot, (shape, dtype) in enumerate(shapes)]
  text = assembly(render(forward_of(p, chip, choose_tile(p, chip))(*given), arch), arch)
  assert text.count("v_pk_min_u16") == text.count("v_pk_sub_u16") and text.count("v_pk_min_u16") % 4 == 0 < text.count("v_pk_min_u16")
  assert not re.search(r"v_cmp_\w+_u16", text)

# ***** attention *****

SMALL: dict[str, Any] = dict(B=2, H=4, Hkv=2, Sq=12, Sk=20, D=16)

@pytest.mark.sample(2)
@pytest.mark.parametrize("arch, kernel", [("gfx942", ""), ("sm_90", ""), ("gfx1100", "three_pass"), ("gfx942", "split_kv")])
def test_attention(arch:str, kernel:str) -> None:
  check_attention(arch, kernel, causal=True, **{**SMALL, "Sk": 150} if kernel == "split_kv" else SMALL, **with_seed())

@pytest.mark.parametrize("arch", ["gfx942", "sm_80"])
def test_gradients(arch:str) -> None: check_gradients(arch, through=("o", "lse"), B=2, H=2, Sq=6, Sk=9, **with_seed(sinks=floats(2)))

def test_gradients_of_packed_sequences_in_tensor_operations() -> None:
  check_gradients("gfx942", "three_pass", layout="thd", H=2, Hkv=1, Sq=8, Sk=11, D=8,
                  **with_seed(cu_seqlens_q=int32(1, 4, 7), cu_seqlens_k=int32(2, 6, 11)))

def test_a_bias_has_its_gradient() -> None: check_gradients(H=1, Sq=4, Sk=9, D=8, **with_seed(bias=floats(1, 1, 4, 9)))

TWO = ("EMU", "EMU:1")

def shards(of_q:int|None, of_k:int|None) -> Callable[[str, Tensor], Tensor]:
  return lambda name, t: t.shard(TWO, {"q": of_q, "k": of_k, "v": of_k, "o": of_q}.get(name))

@pytest.mark.sample(2)
@pytest.mark.parametrize("of_q, of_k, heads", [(0, 0, 2), (1, 1, 2), (1, None, 1), (None, None, 2)])
def test_shards_use_the_mask_of_the_whole(of_q:int|None, of_k:int|None, heads:int) -> None:
  # Each device that holds a part of the tensors uses its part of the dropout mask of the whole tensors. The tensors are divided along batch or heads,
  # only q is divided along heads, or every device has all of the tensors.
  check_gradients(**{**SMALL, "Hkv": heads}, place=shards(of_q, of_k), **with_seed())

def test_shards_with_masks_of_their_own_are_caught(monkeypatch:pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(launch, "first_of_each", lambda at, p: Tensor([0]*4, dtype=dtypes.uint, device=TWO[0]).shard(TWO, 0))
  for of in range(2):
    with pytest.raises(AssertionError, match="error"): check_attention(**SMALL, place=shards(of, of), **with_seed())

def drops(call:Callable[[], Tensor]) -> bool:
  # Calls a function twice, and returns whether the two results differ, as they do with a new dropout seed in each call.
  return not np.array_equal(array(call()), array(call()))

def test_a_seed_is_drawn() -> None:
  # Every call without a seed draws a new seed from tinygrad's random generator. o and the gradients of a call use the same seed; the gradient of v
  # shows this, because o is linear in v.
  with emulated("gfx942"), Context(TRAINING=1):
    q, k, v = draw(1, 2, 12, 16), draw(1, 2, 20, 16, seed=1), draw(1, 2, 20, 16, seed=2)
    def call() -> Tensor: return attn.attention(q, k, v, dropout_p=P)
    found = []
    for _ in range(2):
      Tensor.manual_seed(3)
      found.append([array(call()) for _ in range(2)])
    np.testing.assert_array_equal(found[0], found[1])
    assert not np.array_equal(found[0][0], found[0][1])
    o = attn.attention(q, k, v, dropout_p=P, out_dtype="float32")
    total = o.sum()
    dv, = total.gradient(v)
    Tensor.realize(total, dv)
    np.testing.assert_allclose((array(dv)*array(v)).sum(), total.numpy(), atol=0.02)

def seeds_by(draw_one:Callable[[], Tensor], random_dtype:str) -> list[list[float]]:
  # Makes eight seeds with `draw_one`, and a user's random numbers between them; returns all values in the order in which they were made.
  # The first four seeds are realized one after another, with a user's numbers after each. The last four are realized together with a user's numbers.
  # `random_dtype` is tinygrad's default float dtype.
  with Context(DEFAULT_FLOAT=random_dtype):
    Tensor.manual_seed(7)
    apart = [(draw_one().tolist(), Tensor.rand(3).tolist()) for _ in range(4)]
    together = [draw_one() for _ in range(4)] + [Tensor.rand(2)]
    Tensor.realize(*together)
    return [*itertools.chain(*apart), *[x.tolist() for x in together]]

@pytest.mark.parametrize("random_dtype", ["float32", "float16"])
def test_seeds_are_those_of_tinygrads_generator(random_dtype:str) -> None:
  # attn draws the same seed as it would from four float32 numbers of `Tensor.rand`, without calling `Tensor.rand`. Later calls of `Tensor.rand` also
  # give the same numbers. This holds for each default float dtype.
  with emulated("gfx942"):
    at = Placement("EMU")
    got = seeds_by(lambda: drawn_seed(at), random_dtype)
    assert got == seeds_by(lambda: seed_from(Tensor.rand(2, 2, dtype=dtypes.float)), random_dtype)
  assert len({tuple(x) for x in got}) == len(got)

def test_under_jit_each_call_has_a_seed_of_its_own() -> None:
  with emulated("gfx942"), Context(TRAINING=1):
    @TinyJit
    def step(q:Tensor, k:Tensor, v:Tensor) -> tuple[Tensor, Tensor]:
      total = attn.attention(q, k, v, dropout_p=P, out_dtype="float32").sum()
      return total.realize(*(dv := total.gradient(v))), dv[0]
    v, seen = draw(1, 2, 20, 16, seed=2), []
    for _ in range(5):
      total, dv = step(draw(1, 2, 12, 16), draw(1, 2, 20, 16, seed=1), v)
      np.testing.assert_allclose((array(dv)*array(v)).sum(), total.numpy(), atol=0.02)
      seen.append(float(total.numpy()))
    assert len(set(seen)) == 5

def test_custom_kernel() -> None:
  with emulated("gfx942"):
    q, k, v, seed = draw(1, 2, 32, 16), draw(1, 2, 32, 16, seed=1), draw(1, 2, 32, 16, seed=2), Tensor(SEED, device="EMU")
    fxn = attn.flash_attention_fn(dropout_p=P, extras=("dropout_seed",))
    o = Tensor.empty(*q.shape, dtype=q.dtype).custom_kernel(q, k, v, seed, fxn=fxn)[0]
    want = attn.attention(q, k, v, dropout_p=P, dropout_seed=seed)
    for got, expected in zip((o, *o.float().sum().gradient(q, k, v)), (want, *want.float().sum().gradient(q, k, v))):
      np.testing.assert_array_equal(array(got), array(expected))

def test_flash_attn_drops_whenever_it_is_told_to() -> None:
  with emulated("gfx942"):
    q, cu = draw(1, 12, 2, 16), Tensor(int32(0, 5, 12), device="EMU")
    assert drops(lambda: flash_attn.flash_attn_func(q, q, q, dropout_p=P)) and not drops(lambda: flash_attn.flash_attn_func(q, q, q))
    assert drops(lambda: flash_attn.flash_attn_varlen_func(q[0], q[0], q[0], cu, cu, 7, 7, dropout_p=P))

def test_sdpa_drops_in_training() -> None:
  with emulated("gfx942"):
    q = draw(1, 2, 12, 16)
    def call() -> Tensor: return attn.scaled_dot_product_attention(q, q, q, dropout_p=P)
    assert not drops(call)
    with Context(TRAINING=1):
      assert drops(call)
      with attn.installed() as decisions: assert drops(lambda: q.scaled_dot_product_attention(q, q, dropout_p=P))
    assert {d.kernel for d in list(decisions)[-2:]} == {"forward"}

def test_explain(capsys:pytest.CaptureFixture[str]) -> None:
  with emulated("gfx950"), pytest.MonkeyPatch.context() as patch:
    q = draw(1, 2, 512, 128)
    before = Tensor.rand(1).item()
    Tensor.manual_seed(1)
    first = Tensor.rand(1).item()
    Tensor.manual_seed(1)
    choice = attn.explain(q, q, q, dropout_p=P)
    assert Tensor.rand(1).item() == first != before, "explain must not draw a seed"
    assert choice.kernel == "forward" and choice.why_not("dual_wave") == "dropout_p: this kernel does not support it"
    assert "dropout_p=0.3: each element of P is kept with probability 0.7" in capsys.readouterr().out
    patch.setenv("ATTN_KERNEL", "dual_wave")
    with pytest.raises(NotImplementedError, match="dropout_p: this kernel does not support it"): attn.attention(q, q, q, dropout_p=P)
  with emulated("gfx942"):
    q = draw(1, 2, 32, 16)
    assert "backward_dq_mma" in str(attn.explain(q, q, q, dropout_p=P, arch="sm_80", backward=True))
    assert "backward_dq_tiled" in str(attn.explain(q, q, q, dropout_p=0.99999, backward=True)), "P/(1 - dropout_p) overflows float16 on a matrix unit"

# ***** errors *****

@pytest.mark.parametrize("p", [1, 1.0, -0.1, float("nan"), "half", None, True])
def test_a_rate_that_is_no_probability(p:Any) -> None:
  with emulated("gfx942"):
    q = draw(1, 2, 12, 16)
    with pytest.raises(ValueError, match=r"dropout_p=.*: must be a probability, at least 0 and less than 1"): attn.attention(q, q, q, dropout_p=p)
    with pytest.raises(ValueError, match=r"p=.*: must be a probability"): attn.dropout_mask(Tensor(SEED), p, 1, 1, 1, 1)

def test_what_is_wrong_with_a_seed() -> None:
  with emulated("gfx942"):
    q, seed = draw(2, 2, 12, 16), Tensor(SEED, device="EMU")
    def call(**options:Any) -> Any: return attn.attention(q, q, q, dropout_p=P, **options)
    with pytest.raises(ValueError, match=r"dropout_seed has shape \(3,\): must be \(2,\)"): call(dropout_seed=Tensor.zeros(3, dtype=dtypes.uint))
    with pytest.raises(ValueError, match="dropout_seed has dtype int32: must be uint32"): call(dropout_seed=seed.cast(dtypes.int))
    with pytest.raises(ValueError, match="dropout_seed is on EMU:1"): call(dropout_seed=Tensor(SEED, device="EMU:1"))
    with pytest.raises(ValueError, match=r"dropout_p=0\.3 with k and v sharded along their rows: shard q, k and v along batch or heads"):
      attn.attention(q.shard(TWO, None), q.shard(TWO, 2), q.shard(TWO, 2), dropout_p=P)
    with pytest.raises(ValueError, match=r"dropout_p=0.3 with extras=\(\): must name dropout_seed"): attn.flash_attention_fn(dropout_p=P)
    with pytest.raises(ValueError, match=r"dropout_seed with dropout_p=0\.0"):
      Tensor.empty_like(q).custom_kernel(q, q, q, seed, fxn=attn.flash_attention_fn(extras=("dropout_seed",)))
    with pytest.raises(ValueError, match=r"^dropout_mask: seed has shape \(1,\): must be \(2,\)"): attn.dropout_mask(seed[:1], P, 1, 1, 1, 1)
    with pytest.raises(ValueError, match=r"^dropout_mask: seed has dtype int32: must be uint32"):
      attn.dropout_mask(seed.cast(dtypes.int), P, 1, 1, 1, 1)
    with pytest.raises(ValueError, match="batch_start=-1"): attn.dropout_mask(seed, P, 1, 1, 1, 1, batch_start=-1)
    np.testing.assert_array_equal(array(attn.attention(q, q, q, dropout_seed=seed)), array(attn.attention(q, q, q)))

def test_a_seed_is_copied_to_every_device() -> None:
  # attention copies a seed that lies on the first of several devices to all of them.
  with emulated("gfx942"):
    t = [draw(2, 2, 12, 16, seed=i) for i in range(3)]
    want = attn.attention(*t, dropout_p=P, dropout_seed=Tensor(SEED, device="EMU"))
    got = attn.attention(*[x.shard(TWO, 0) for x in t], dropout_p=P, dropout_seed=Tensor(SEED, device=TWO))
    np.testing.assert_array_equal(array(whole(got)), array(want))
