"""Tests of forward kernels over q, k and v of 8-bit floats."""
from __future__ import annotations
import shutil, subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any
import numpy as np
import pytest
from attn.accuracy import ShortSums, judge
from attn.chips import get_chip
from attn.chips.nvidia import FORWARD_WGMMA_OF_BYTES
from attn.chips.shapes import RatedUpTo
from attn.choose.dispatch import KERNELS, TURNING, choose, choose_tile, forward_of
from attn.choose.preparation import turned_tile
from attn.compilers.clang import assembly
from attn.emulator.chips import SHORT_SUMS
from attn.isa.report import analyse
from attn.emulator.checks import DivergentBarrier, Race
from attn.kernels.nvidia.warps import Warps
from attn.kernels.parts.grid.tensors import arguments
from attn.kernels.parts.grid.workgroup import Workgroup
from attn.kernels.parts.memory import transposed
from attn.kernels.tiles.wgmma import WgmmaTile
from attn.kernels.wgmma import forward as wgmma_forward
from attn.kernels.wgmma.forward import WgmmaForward
from attn.ops import nvidia as nv, softmax
from attn.ops.numerics import ROUNDOFF
from attn.ops.renderers import render
from attn.ops.softmax import LIFT
from attn.problem import Problem
from attn.tinygrad_compat import UOp
from attn.values import FLOATS, INTS
from cases import GPU, Inputs, chip, expected, floats, hold, in_turn, normal, problem, rounded, run_kernels, with_input_scales

UNITS = ("sm_89", "gfx942", "gfx950", "gfx1201", "sm_120")
WITH_WGMMA = (*UNITS, "sm_90")
RUN = 128       # products that a matrix unit with short sums adds up before the sum goes to fp32

def short_sums(arch:str, fast:bool=False) -> ShortSums|None:
  # how the chip's matrix unit adds 8-bit products if its sums have fewer bits than fp32, otherwise None
  name = chip(arch).name
  # with `fast` (the option fast_accumulate) the unit adds all products of a sum without fp32 additions between
  return ShortSums(SHORT_SUMS[name], 0 if fast else RUN) if name in SHORT_SUMS else None

def check_8_bits(arch:str, make:Any=normal, *, extras:dict[str, np.ndarray]|None=None, out_dtype:str="float32", tile:WgmmaTile|None=None,
                 kernel:str="split_kv", **parameters:Any) -> None:
  # Runs the kernels on 8-bit floats of the chip, and compares each element of o and lse with float64. With `kernel` TURNING, another kernel
  # transposes V before.
  extras = dict(extras or {})
  p = problem(dtype=chip(arch).fp8, out_dtype=out_dtype, extras=extras, **parameters)
  x = make(p)
  tile = tile or (turned_tile if kernel == TURNING else choose_tile)(p, chip(arch))
  o, lse = run_kernels(p, x, arch, extras, tile, kernel)
  hold(p, x, extras, o, lse, short_sums(arch, p.fast_accumulate))

# ***** shapes *****

SHAPES = (dict(Sq=64, Sk=64, D=32), dict(Sq=40, Sk=150, D=64), dict(Sq=33, Sk=200, D=128, H=4, Hkv=2), dict(Sq=20, Sk=70, D=192, Dv=128),
          dict(Sq=17, Sk=90, D=144, Dv=192), dict(Sq=30, Sk=77, D=80, Dv=48), dict(Sq=5, Sk=300, D=64, H=8, Hkv=2),
          dict(Sq=1, Sk=400, D=128, H=8, Hkv=1))

@pytest.mark.sample(4)
@in_turn("shape, arch", SHAPES, UNITS, [GPU])
def test_shapes(shape:dict[str, Any], arch:str) -> None: check_8_bits(arch, **shape)

def test_rows_in_pieces() -> None:
  # mma.sync takes rows of any length. AMD's kernels refuse rows that are not made of whole 16-byte units.
  check_8_bits("sm_120", Sq=20, Sk=70, D=37, Dv=50)
  p = problem(dtype="fp8e4m3", out_dtype="bfloat16", D=32, Dv=40)
  with pytest.raises(NotImplementedError, match="Dv=40: must be a multiple of 16"): choose_tile(p, get_chip("gfx950"))

# A warpgroup has 64 queries, and a block two or three warpgroups, of which the last may have none. The warps divide the parts of V that they
# transpose. With more than 128 columns, O is computed in two parts.
SHAPES_OF_WGMMA = (dict(Sq=64, Sk=64, D=32), dict(Sq=70, Sk=300, D=64), dict(Sq=130, Sk=150, D=128, H=2, Hkv=1, out_dtype="bfloat16"),
                   dict(Sq=200, Sk=77, D=48, Dv=96),
                   dict(Sq=100, Sk=300, D=128, num_splits=2), dict(Sq=100, Sk=200, D=128, fast_accumulate=True), dict(Sq=3, Sk=200, D=128),
                   dict(Sq=130, Sk=200, D=256, H=1), dict(Sq=70, Sk=150, D=160, Dv=192, causal=True),
                   dict(Sq=70, Sk=150, D=64, Dv=256, H=1, out_dtype="bfloat16", fast_accumulate=True))

@pytest.mark.sample(5)
@in_turn("shape, arch", SHAPES_OF_WGMMA, ["sm_90"], [GPU])
def test_shapes_of_wgmma(shape:dict[str, Any], arch:str) -> None: check_8_bits(arch, **shape)

@pytest.mark.sample(5)
@in_turn("row, arch", FORWARD_WGMMA_OF_BYTES, ["sm_90"], [GPU])
def test_every_tile_of_wgmma(row:RatedUpTo, arch:str) -> None:
  check_8_bits(arch, H=1, Sq=200, Sk=500, D=row.up_to, causal=True, tile=WgmmaTile(**vars(row.shape)))

# ***** inputs *****

def of(p:Problem, q:np.ndarray, k:np.ndarray, v:np.ndarray) -> Inputs: return Inputs(*(rounded(a, p.dtype) for a in (q, k, v)))

def rising(p:Problem, by:float) -> Inputs:
  # makes scores that rise from each group of 16 keys to the next, by a factor of 2^`by` in exp(score)
  x = normal(p)
  k = np.zeros_like(x.k)
  steps = np.arange(p.Sk)//16*by*np.log(2)/p.softmax_scale      # q k, which is the product of the first two elements of the rows
  k[..., 0], k[..., 1] = np.floor(steps/16), steps % 16
  q = np.zeros_like(x.q)
  q[..., 0], q[..., 1] = 16, 1
  return of(p, q, k, x.v)

def just_below_the_headroom(p:Problem) -> Inputs: return rising(p, 8 - LIFT[p.dtype] - 0.02)
def just_above_the_headroom(p:Problem) -> Inputs: return rising(p, 8 - LIFT[p.dtype] + 0.1)
def falling(p:Problem) -> Inputs:
  x = just_below_the_headroom(p)
  return Inputs(x.q, x.k[:, :, ::-1].copy(), x.v)
def large(p:Problem) -> Inputs:
  # makes queries and keys with numbers up to the largest number of the 8-bit format
  x = normal(p)
  return of(p, x.q*100, x.k*100, x.v*100)
def one_huge_key(p:Problem) -> Inputs:
  x = normal(p)
  x.k[:, :, p.Sk//2] *= 16
  return of(p, x.q, x.k, x.v)
def constants(p:Problem) -> Inputs: return Inputs(*(np.full_like(a, c) for a, c in zip((normal(p).q, normal(p).k, normal(p).v), (1, 1, 3))))
def positive(p:Problem) -> Inputs:
  # inputs without negative numbers: the errors of their sums have one sign and do not cancel
  x = normal(p)
  return Inputs(*map(np.abs, (x.q, x.k, x.v)))
def tiny(p:Problem) -> Inputs:
  # inputs in which many numbers are denormal in the 8-bit format
  x = normal(p)
  return of(p, x.q*2.0**-5, x.k*2.0**-5, x.v*2.0**-8)
def nan_rows(p:Problem) -> Inputs:
  # puts a NaN into a query, into a key that some queries see, and into a row of V that all queries see
  x = normal(p)
  x.q[:, :, 3, 1], x.k[:, :, p.Sk - p.Sq + 9, 0], x.v[:, :, 0, 2] = np.nan, np.nan, np.nan
  return x

HARD = (just_below_the_headroom, just_above_the_headroom, falling, large, one_huge_key, constants, positive, tiny, nan_rows)

@pytest.mark.sample(5)
@in_turn("make, arch", HARD, WITH_WGMMA, [GPU])
def test_hard_inputs(make:Any, arch:str) -> None:
  rows = 66 if chip(arch).wgmma else 24
  check_8_bits(arch, make, Sq=rows, Sk=150, D=32, causal=True)
  check_8_bits(arch, make, Sq=rows, Sk=300, D=64, causal=True, num_splits=3)

# ***** options *****

def scales_of(B:int, Hkv:int) -> dict[str, np.ndarray]:
  rng = np.random.default_rng(3)
  return {name: (2.0**rng.uniform(-3, 3, (B, Hkv))).astype(np.float32) for name in ("q_scale", "k_scale", "v_scale")}

OPTIONS: dict[str, dict[str, Any]] = {
  "scales of heads": dict(B=2, H=4, Hkv=2, extras=scales_of(2, 2)), "scales of tensors": dict(extras=scales_of(1, 1)),
  "a scale of V": dict(extras={"v_scale": np.array([[-0.25]], np.float32)}), "NaN scale": dict(extras={"k_scale": np.array([[np.nan]], np.float32)}),
  "causal": dict(causal=True), "window": dict(window=(20, 3)), "softcap": dict(softcap=3.0, extras=scales_of(1, 2), H=2),
  "alibi": dict(extras={"alibi_slopes": np.array([0.3, 0.02], np.float32)}), "bias": dict(extras={"bias": floats(1, 2, 66, 100)}),
  "sinks": dict(extras={"sinks": np.array([0.5, 4], np.float32), **scales_of(1, 2)}), "no lse": dict(lse=False),
  "lengths": dict(B=2, extras={"kv_lengths": np.array([37, 90], np.int32)}), "bshd": dict(layout="bshd"), "nsd": dict(layout="nsd"),
  "splits": dict(num_splits=2, extras=scales_of(1, 2)), "bfloat16": dict(out_dtype="bfloat16"), "float16": dict(out_dtype="float16"),
  "few queries": dict(Sq=3, H=8, Hkv=2, extras=scales_of(1, 2)), "fast sums": dict(fast_accumulate=True, D=128)}

@pytest.mark.sample(9)
@in_turn("name, arch", OPTIONS, WITH_WGMMA, [GPU])
def test_options(name:str, arch:str) -> None: check_8_bits(arch, **{"Sq": 66, "Sk": 100, "D": 32, **OPTIONS[name]})

# ***** sums of about 14 bits *****

def test_a_long_row_needs_sums_in_fp32() -> None:
  # `fast_accumulate` leaves all sums to a matrix unit that adds with fewer bits than fp32. On 4096 products of one sign its error is above the error
  # limit; without `fast_accumulate`, where sums go to fp32 after 128 products, the error is within the limit.
  for fast in (False, True):
    p = problem(dtype="fp8e4m3", out_dtype="float32", H=1, Sq=16, Sk=4096, D=32, lse=False, fast_accumulate=fast)
    x = positive(p)
    o, _ = run_kernels(p, x, "sm_89", {}, choose_tile(p, get_chip("sm_89")))
    assert judge(o, expected(p, x, {}, short_sums("sm_89"))[0]).ok != fast

def test_the_needle() -> None:
  # One key among 8192 has a large value row and a tenth of the first query's weight. The first query's row of o contains this value row, and each
  # element of o is within its error limit.
  p = problem(dtype="fp8e4m3", out_dtype="float32", H=1, Sq=16, Sk=8192, D=64, lse=False)
  x = normal(p)
  x.k[0, 0, 5000], x.v[0, 0, 5000] = np.sign(x.q[0, 0, 0])*1.25, 16
  o, _ = run_kernels(p, x, "sm_89", {}, choose_tile(p, get_chip("sm_89")))
  law = expected(p, x, {}, short_sums("sm_89"))[0]
  assert judge(o, law).ok and (law.exact[0, 0, 0] > 0.5).all()

# A law of 10^6 scores takes half a minute. So only some rows of large problems are judged by their laws, which do not depend on other rows.
JUDGED = 8

def last_rows(p:Problem, x:Inputs, extras:dict[str, np.ndarray], batch:int, head:int) -> tuple[Problem, Inputs, dict[str, np.ndarray]]:
  # Returns the problem of the last queries of one head, with its inputs and its scales.
  of, kv = (slice(batch, batch + 1), slice(head, head + 1)), (slice(batch, batch + 1), slice(head*p.Hkv//p.H, head*p.Hkv//p.H + 1))
  scales = {name: a[kv] for name, a in extras.items()}
  part = replace(p, B=1, H=1, Hkv=1, Sq=JUDGED, offset=p.Sk - JUDGED, **dict.fromkeys(scales, 1))
  return part, Inputs(x.q[of][:, :, -JUDGED:], x.k[kv], x.v[kv]), scales

def in_float32(p:Problem, x:Inputs, batch:int) -> np.ndarray:
  # Returns o of one batch, computed in float32 by the definition of attention. The mask is causal, or there is none.
  k, v = (np.repeat(a[batch], p.H//p.Hkv, axis=0).astype(np.float32) for a in (x.k, x.v))
  scores = x.q[batch].astype(np.float32) @ k.swapaxes(1, 2)*np.float32(p.softmax_scale)
  if p.window[1] == 0: scores[:, np.arange(p.Sk) > np.arange(p.Sq)[:, None] + p.offset] = -np.inf
  weights = np.exp(scores - scores.max(-1, keepdims=True))
  return weights/weights.sum(-1, keepdims=True) @ v

@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ("split_kv", TURNING))
@pytest.mark.parametrize(("D", "size"), ((64, 1.75), (128, 1.25), (256, 0.875)))
def test_the_needle_on_a_gpu(D:int, size:float, kernel:str) -> None:
  # One key among 131072 has a large value row and a part of the last query's weight. The last query's row of o contains this value row, and each
  # element of the last rows of o is within its error limit. The kernel uses wgmma if the GPU has it.
  if kernel == TURNING and not chip("CUDA").wgmma: pytest.skip("needs wgmma")
  for dtype in ("float32", "bfloat16"):
    p = problem(dtype=chip("CUDA").fp8, out_dtype=dtype, H=1, Sq=128, Sk=131072, D=D, lse=False)
    x = normal(p)
    x.k[0, 0, 77777], x.v[0, 0, 77777] = np.sign(x.q[0, 0, -1])*size, 16
    o, _ = run_kernels(p, x, "CUDA", {}, (turned_tile if kernel == TURNING else choose_tile)(p, chip("CUDA")), kernel)
    law = expected(*last_rows(p, x, {}, 0, 0), short_sums("CUDA"))[0]
    assert (verdict := judge(o[:, :, -JUDGED:], law)).ok and (law.exact[0, 0, -1] > 0.5).all() and np.isfinite(o).all(), verdict

LARGE_GRIDS = (dict(Sq=1000, Sk=1111, D=64), dict(Sq=1024, Sk=2048, D=128), dict(Sq=700, Sk=1500, D=128, Dv=64), dict(Sq=1000, Sk=1111, D=256),
               dict(Sq=700, Sk=1000, D=192))

def check_large_grid(arch:str, shape:dict[str, int], H:int=12, kernel:str="split_kv") -> None:
  for out_dtype, causal in (("float32", False), ("bfloat16", True), ("float16", True)):
    extras = scales_of(2, 4)
    p = problem(dtype=chip(arch).fp8, out_dtype=out_dtype, B=2, H=H, Hkv=4, causal=causal, extras=extras, **shape)
    x = normal(p)
    o, lse = run_kernels(p, x, arch, dict(extras), (turned_tile if kernel == TURNING else choose_tile)(p, chip(arch)), kernel)
    assert lse is not None
    for batch, head in ((0, 0), (1, H//2), (1, H - 1)):
      part = np.s_[batch:batch + 1, head:head + 1, -JUDGED:]
      hold(*last_rows(p, x, extras, batch, head), o[part], lse[part], short_sums(arch))
    for batch in range(p.B):     # a weight's rounding changes it by at most ROUNDOFF; so the sums of P V and of P change by at most this part
      exact, largest = in_float32(p, with_input_scales(p, x, extras), batch), np.abs(with_input_scales(p, x, extras).v[batch]).max()
      assert (np.abs(o[batch] - exact) <= 2*ROUNDOFF[p.dtype]*largest).all()

@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ("split_kv", TURNING))
@pytest.mark.parametrize("shape", LARGE_GRIDS, ids=str)
def test_large_grids(shape:dict[str, int], kernel:str) -> None:
  if kernel == TURNING and not chip("CUDA").wgmma: pytest.skip("needs wgmma")
  check_large_grid("CUDA", shape, kernel=kernel)

# ***** planted faults *****

def left_out(name:str) -> Any:
  # a planted fault (class, method, faulty replacement): the kernel does not multiply by the scale `name`
  right = Workgroup.input_scale
  return Workgroup, "input_scale", lambda group, given: None if given == name else right(group, given)

SCALED: dict[str, Any] = {"extras": scales_of(1, 2), "H": 2}
FAULTS: dict[str, tuple[str, Any, Any, dict[str, Any]]] = {
  "the reference is never raised": ("sm_89", (softmax, "ALL_SET_BEFORE", 0x01010101), just_above_the_headroom, {"causal": True}),
  "V's columns are not taken apart, mma": ("sm_120", (nv, "columns_apart", lambda words: words), normal, {}),
  "V's columns are not taken apart, wgmma": ("sm_90", (nv, "columns_apart", lambda words: words), normal, {"Sq": 64}),
  "ones that are twos": ("sm_90", (wgmma_forward, "ONES_OF", {"fp8e4m3": 0x40404040}), normal, {"Sq": 64}),
  "columns in another order": ("sm_90", (Warps, "alternating_columns", Warps.columns), normal, {"Sq": 64}),
  "bytes of two keys are exchanged, gfx942": ("gfx942", (transposed, "LOW_BYTES_IN_TURN", 0x01050004), normal, {}),
  "bytes of two keys are exchanged, gfx950": ("gfx950", (transposed, "LOW_BYTES_IN_TURN", 0x01050004), normal, {}),
  "bytes of two keys are exchanged, gfx1201": ("gfx1201", (transposed, "LOW_BYTES_IN_TURN", 0x01050004), normal, {}),
  "the largest weight is 2^-6": ("sm_120", (softmax, "lift_of", lambda dtype, scale: -6.0), normal, {"Sk": 900}),
  **{f"without {name}": ("gfx1201", left_out(name), normal, SCALED) for name in ("q_scale", "k_scale", "v_scale")},
  "P is computed again from scores without scales": ("sm_90", (softmax, "scaled_score", lambda c, x, factor: x), normal, {**SCALED, "Sq": 64}),
  "without q_scale, wgmma": ("sm_90", left_out("q_scale"), normal, {**SCALED, "Sq": 64})}

RACES: dict[str, tuple[tuple[Any, str, Any], type[Exception]]] = {
  "a tile of V is overwritten while warps transpose it": ((WgmmaTile, "given_stages", lambda tile, p: 1), Race),
  "a tile of K is overwritten while products read it": ((WgmmaTile, "key_stages", lambda tile, p: 2), Race),
  "a thread does not wait for its own copies": ((nv, "wait_copies", lambda after, but: nv.commit(after)), Race),
  "no warpgroup passes its turn on": ((WgmmaForward, "turn_passed", lambda unit, s, gate: s), DivergentBarrier)}

@pytest.mark.sample(2)
@pytest.mark.parametrize("name", RACES)
def test_the_emulator_finds_what_a_chip_would_not_forgive(name:str, monkeypatch:pytest.MonkeyPatch, without_places:None) -> None:
  fault, error = RACES[name]
  monkeypatch.setattr(*fault)
  with pytest.raises(error): check_8_bits("sm_90", H=1, Sq=130, Sk=203, D=48, tile=WgmmaTile(2, 64, True))     # a shape of no other test

@pytest.mark.sample(6)
@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(name:str, monkeypatch:pytest.MonkeyPatch) -> None:
  arch, fault, make, parameters = FAULTS[name]
  monkeypatch.setattr(*fault)
  with pytest.raises(AssertionError, match=r"limit|pattern"):
    check_8_bits(arch, make, **{"Sq": 25, "Sk": 171, "D": 48, **parameters})       # a shape of no other test: kernels are kept

# ***** machine code *****

LARGE: dict[str, dict[str, Any]] = {
  "full": dict(Sq=4096), "causal": dict(Sq=4096, causal=True), "window": dict(Sq=4096, window=(300, 0)), "decode": dict(Sq=1, Sk=4096, Hkv=8),
  "softcap": dict(Sq=4096, softcap=3.0, causal=True)}

def text_of(arch:str, D:int, shape:dict[str, Any]) -> str:
  # the source of the kernel that dispatch chooses on a chip for large problems with scales of q, k and v
  p = problem(dtype=get_chip(arch).fp8, out_dtype="bfloat16", B=4, H=32, D=D, lse=shape.get("window") is not None, extras=scales_of(1, 1), **shape)
  tensors = [UOp.placeholder(shape, (FLOATS | INTS)[dtype], i) for i, (shape, dtype) in enumerate(arguments(p).values())]
  return render(forward_of(p, get_chip(arch), choose_tile(p, get_chip(arch)))(*tensors), arch)

@pytest.mark.sample(6)
@in_turn("name, arch", [f"{name} {D}" for D in (64, 128, 192, 256) for name in LARGE], ("gfx942", "gfx950", "gfx1201"), among=5)
def test_amd_spills_no_registers(name:str, arch:str) -> None:
  pytest.importorskip("ziglang")
  option, D = name.split()
  found = analyse(assembly(text_of(arch, int(D), LARGE[option]), arch), arch).resources
  assert not found.vgpr_spills and not found.sgpr_spills, found

def spills(source:str, arch:str, folder:Path, products:bool=True) -> str:
  """Compiles a CUDA source with nvcc. Returns the compiler's messages if registers are spilled, or with `products` also if the compiler waits for
  each wgmma; otherwise ""."""
  (text := folder/"kernel.cu").write_text(source)
  code = arch.replace("sm_90", "sm_90a")
  target = f"-gencode=arch={code.replace('sm', 'compute')},code={code}"
  command = ["nvcc", target, "-cubin", "-Xptxas", "-v", "-o", str(folder/"kernel.cubin"), str(text)]
  told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
  fine = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in told
  return "" if fine and not (products and ("C7510" in told or "C7511" in told)) else told

@pytest.mark.sample(3)
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@in_turn("name, arch", [f"{name} {D}" for D in (64, 128) for name in LARGE], ("sm_89", "sm_90", "sm_120"), among=5)
def test_nvidia_spills_no_registers(name:str, arch:str, tmp_path:Path) -> None:
  option, D = name.split()
  assert not (found := spills(text_of(arch, int(D), LARGE[option]), arch, tmp_path, D != "64")), found

# ***** which kernel, and refusals *****

def test_the_kernel() -> None:
  def chosen(arch:str, dtype:str="fp8e4m3", **shape:Any) -> str:
    return choose(problem(dtype=dtype, out_dtype="bfloat16", **{"B": 4, "H": 64, "Sq": 512, "D": 128, "lse": False, **shape}), get_chip(arch)).kernel
  assert [chosen(arch) for arch in ("sm_89", "sm_90", "sm_120", "gfx950", "gfx1200")] == [
    "forward_mma", "forward_wgmma", "forward_mma", "forward", "forward"]
  assert chosen("gfx942", "fp8e4m3fnuz") == "forward" and chosen("sm_90", Sq=8) == "forward_mma"

@pytest.mark.parametrize(("arch", "dtype", "shape", "message"), (
  ("gfx942", "fp8e4m3", {}, "forward: q, k and v are fp8e4m3: the 8-bit floats of gfx942 are fp8e4m3fnuz"),
  ("gfx1100", "fp8e4m3", {}, "forward: q, k and v are fp8e4m3: gfx1100 multiplies no 8-bit floats; kernels for them: gfx942"),
  ("sm_80", "fp8e4m3", {}, "forward_mma: q, k and v are fp8e4m3: sm_80 multiplies no 8-bit floats"),
  ("sm_90", "fp8e4m3", {"D": 320}, "forward_wgmma: D=320: this kernel supports at most 256"),
  ("sm_89", "fp8e4m3", {"D": 256}, "forward_mma: no tile of forward_mma fits D=256"),
  ("sm_90", "fp8e4m3", {"D": 72}, "forward_wgmma: D=72: must be a multiple of 16"), (None, "fp8e4m3", {}, "three_pass: q, k and v are fp8e4m3")))
def test_refusals(arch:str|None, dtype:str, shape:dict[str, Any], message:str) -> None:
  p = problem(dtype=dtype, out_dtype="bfloat16", **{"Sq": 200, "D": 64, **shape})
  with pytest.raises(NotImplementedError, match=message): choose(p, None if arch is None else get_chip(arch))

@pytest.mark.parametrize(("options", "message"), (
  (dict(dropout_p=0.5), "dropout_p=0.5 with fp8e4m3"), (dict(q_scale=3), r"q_scale=3: must be 0, 1 or B\*Hkv=2 numbers"),
  (dict(dtype="float16", fast_accumulate=True), "fast_accumulate=True with q, k and v of float16"), (dict(v_in_k=True), "v_in_k=True with fp8e4m3")))
def test_problems_that_there_are_not(options:dict[str, Any], message:str) -> None:
  with pytest.raises((ValueError, NotImplementedError), match=message):
    Problem(**{"B": 1, "H": 2, "Hkv": 2, "Sq": 4, "Sk": 4, "D": 16, "Dv": 16, "dtype": "fp8e4m3", "softmax_scale": 0.25, **options})

def test_other_kernels_refuse_8_bits() -> None:
  p = problem(dtype="fp8e4m3", out_dtype="bfloat16", D=128, Sq=512)
  for name in ("dual_wave", "staggered", "tiled", "mla"): assert isinstance(KERNELS[name].can(p, get_chip("gfx950")), str), name
