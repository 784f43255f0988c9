"""Tests of tensors with more than 2^31 elements: the ranges of the integers in a lowered program prove that no integer of a kernel overflows."""
from __future__ import annotations
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any
import numpy as np
import pytest
from attn.chips import Chip, get_chip
from attn.choose.backward import choose_bias_tile, dbias_of, dkdv_of, dq_of, tiles_of
from attn.choose.dispatch import KERNELS, choose, choose_tile, forward_of
from attn.choose.tiled_tiles import tiled_backward_tile, tiled_tile
from attn.emulator.ranges import Ranges
from attn.kernels.append import Append, append
from attn.kernels.combine import combine, combine_arguments
from attn.kernels.merge import RowRange, merge, part_places
from attn.kernels.parts.grid.tensors import arguments, dbias_arguments, dkdv_arguments, dq_arguments
from attn.ops.renderers import printer_of
from attn.problem import DealtRows, Pages, Problem, Strided
from attn.tinygrad_compat import Ops, UOp, dtypes, lower
from api_cases import run_on_a_cpu
from cases import TYPES, in_turn

MANY = 2**33      # elements
CHIPS = ("gfx942", "sm_80")

def unproven(sink:UOp, arch:str) -> list[str]:
  # a line for each integer of a kernel whose value may exceed the range of its type
  return [f"{u.op.name} of {u.dtype.name}: {low}..{high}" for u, (low, high) in Ranges(lower(sink, printer_of(arch))).beyond.items()]

def types_of_indices(uops:Iterable[UOp], slot:int) -> set[str]:
  # the types of the integers with which a program indexes its argument number `slot`
  return {u.src[1].dtype.name for u in uops if u.op in (Ops.INDEX, Ops.SHRINK) and u.src[0].op is Ops.PARAM and u.src[0].arg.slot == slot}

# ***** rows that are appended *****

def tensors_of(a:Append) -> list[UOp]:
  # makes placeholders for the tensors of the append kernel
  sizes = [(a.places.size, dtypes.half), (a.B*a.H*a.new*a.width, dtypes.half), (a.B, dtypes.int)]
  if a.pages is not None: sizes.append((a.B*a.pages.most, dtypes.int))
  return [UOp.placeholder((n,), dtype, slot) for slot, (n, dtype) in enumerate(sizes)]

def in_pages(count:int, size:int, B:int=1, most:int=64, H:int=8, width:int=128) -> Append:
  return Append(B, H, 1, size*most, width, "bhsd", Strided(count*size*H*width, 0, size*H*width, width, H*width), Pages(size, count, most))

APPENDED = {      # key: the name of the large argument
  "cache: rows": Append(1, 8, 1, MANY//8//128, 128, "bhsd", Strided(MANY, 0, MANY, MANY//8, 128)),
  "cache: batches": Append(2**20, 8, 1, 8, 128, "bhsd", Strided(MANY, 0, 2**13, 2**10, 128)),
  "cache: rows far apart": Append(2, 8, 3, 2**10, 128, "bhsd", Strided(MANY, 0, 2**10, 128, 2**23)),
  "cache: pages": in_pages(MANY//2**16, 64),
  "cache: pages of rows of one element": in_pages(2**28, 4, width=1),
  "rows": Append(2**12, 8, 2**11, 2**12, 128, "bhsd", Strided(2**34, 0, 2**22, 2**19, 128)),
  "rows beside each other": Append(2**12, 8, 2**11, 2**12, 128, "bshd", Strided(2**34, 0, 2**22, 128, 2**10)),
  "block_table": in_pages(2**10, 64, 2**20, 2**13)}

@pytest.mark.parametrize("arch", CHIPS)
@pytest.mark.parametrize("of", APPENDED)
def test_append(of:str, arch:str) -> None:
  a = APPENDED[of]
  assert max(x.max_numel() for x in tensors_of(a)) >= MANY
  assert not unproven(append(a)(*tensors_of(a)), arch)

@pytest.mark.parametrize("count, kind", ((2**14, "int"), (2**15, "int"), (2**15 + 1, "long")))
def test_index_types_of_append(count:int, kind:str) -> None:
  # The kernel that appends rows to a cache uses 32-bit indices for up to 2^31 elements, and 64-bit indices for a larger cache.
  a = in_pages(count, 64)
  for arch in CHIPS: assert types_of_indices(lower(append(a)(*tensors_of(a)), printer_of(arch)), 0) == {kind}

ON_A_CPU = """
import numpy as np, attn
from attn.tinygrad_compat import Tensor, dtypes
def int32(x): return Tensor(x, dtype=dtypes.int).realize()
def drawn(*shape): return Tensor(np.random.default_rng(0).standard_normal(shape).astype(np.float16)).realize()
cache, at = Tensor.empty(1, 1, 2**27 + 16, 16, dtype=dtypes.half).realize(), 2**27 + 7
rows = drawn(1, 1, 2, 16)
assert attn.append_kv(rows, None, cache, None, int32([at])).tolist() == [at + 2]
np.testing.assert_array_equal(cache[:, :, at:at + 2].numpy(), rows.numpy())
assert not cache[:, :, at - 8:at].numpy().any() and not cache[:, :, at + 2:].numpy().any()
pages, page = Tensor.empty(2**15 + 8, 64, 8, 128, dtype=dtypes.half).realize(), 2**15 + 3
rows = drawn(1, 1, 8, 128)
attn.append_kv(rows, None, pages, None, int32([64 + 9]), block_table=int32([[5, page]]), layout="bshd").realize()
np.testing.assert_array_equal(pages[page, 9].numpy(), rows.numpy()[0, 0])
assert not pages[page, :9].numpy().any() and not pages[page, 10:].numpy().any()
"""

@pytest.mark.thorough
def test_append_on_a_cpu() -> None:
  # Append works on two caches of 4.3 GB. Only the written rows use physical memory.
  run_on_a_cpu(ON_A_CPU, timeout=600)

# ***** attention *****

Shapes = dict[str, tuple[tuple[int, ...], str]]
Program = tuple[Shapes, Callable[..., UOp]]     # tensors that are the kernel's parameters; the kernel

def sized(**options:Any) -> Problem:
  sizes = dict(B=1, H=8, Sq=1024, Sk=1024, D=16) | options
  sizes = {"Hkv": sizes["H"], "Dv": sizes["D"], "softmax_scale": 0.25, "offset": sizes["Sk"] - sizes["Sq"]} | sizes
  return Problem(**sizes)

def in_views(rows:int, size:int, apart:int, **options:Any) -> Problem:
  # makes a problem whose K and V are views of larger buffers: batches take `size` elements, rows are `apart` elements apart
  view = Strided(size, 0, 16, 32, apart)
  return sized(B=2, H=2, Sq=64, Sk=rows, k_view=view, v_view=view, **options)

def of_pages(size:int, count:int, most:int, B:int=64) -> Problem:
  view = Strided(count*size*8*16, 0, size*8*16, 16, 8*16)
  return sized(B=B, Sq=1, Sk=size*most, kv_lengths=True, k_view=view, v_view=view, pages=Pages(size, count, most))

def forward(p:Problem, chip:Chip) -> Iterator[Program]:
  yield arguments(p), forward_of(p, chip, choose_tile(p, chip))
def split(p:Problem, chip:Chip) -> Iterator[Program]:
  p = replace(p, num_splits=4)
  yield arguments(p), forward_of(p, chip, choose_tile(p, chip))
  yield combine_arguments(p), combine(p, chip, 4)
def merged(p:Problem, chip:Chip) -> Iterator[Program]:
  half = p.Sq//2
  rows = RowRange(0, half), RowRange(half, half)
  parts = {f"part_{i}": ((part_places(p, half)[-1],), "float32") for i in range(2)}
  yield {name: p.shapes[name] for name in ("o", "lse")} | parts, merge(replace(p, return_lse=True), chip, rows)
def gradients(p:Problem, chip:Chip) -> Iterator[Program]:
  dq, dkdv = tiles_of(p, chip)
  yield dq_arguments(p, True, 2), dq_of(p, chip, dq, True, 2)
  yield dkdv_arguments(p, 2), dkdv_of(p, chip, dkdv, 2)
def of_bias(p:Problem, chip:Chip) -> Iterator[Program]:
  tile = choose_bias_tile(p, chip)
  yield dbias_arguments(p), dbias_of(p, chip, tile)
  yield dkdv_arguments(p), dkdv_of(p, chip, tiles_of(p, chip)[1])
def plain(p:Problem, chip:Chip) -> Iterator[Program]:
  yield arguments(p), forward_of(p, chip, tiled_tile(p, chip))
def plain_gradients(p:Problem, chip:Chip) -> Iterator[Program]:
  dq, dkdv = (tiled_backward_tile(p, chip, keys) for keys in (False, True))
  yield dq_arguments(p), dq_of(p, chip, dq)
  yield dkdv_arguments(p), dkdv_of(p, chip, dkdv)

BIAS, PACKED = dict(bias=(True,)*4, bias_dtype="float16"), dict(layout="thd", B=64, total_q=2**25, total_k=2**25, Sq=2**20, Sk=2**20)
LENGTHS, LONG = dict(kv_lengths=True, kv_starts=True), dict(H=2, Sq=2**28, Sk=2**28)
LARGE: dict[str, tuple[Problem, Callable[[Problem, Chip], Iterator[Program]], tuple[str, ...]]] = {   # last: arguments with at least MANY elements
  "batches": (sized(B=2**16, return_lse=True), forward, ("o", "q", "k", "v")),
  "rows beside each other": (sized(layout="bshd", H=2**13, Sq=2**16, Sk=2**16, window=(-1, 0)), forward, ("o", "q", "k", "v")),
  "a window": (sized(window=(2**27, 2**26), **LONG), forward, ("o", "q", "k", "v")),
  "slopes": (sized(softcap=30.0, alibi=(True,), window=(-1, 0), **LONG), forward, ("o", "q", "k", "v")),
  "groups of heads": (sized(H=16, Hkv=2, Sq=4, Sk=2**28), split, ("k", "v")),
  "parts": (sized(B=2**12, Sq=2**12, sinks=True), split, ("o_partial",)),
  "lse": (sized(B=2**13, H=2**10, Sk=64, return_lse=True), split, ("o", "lse", "o_partial", "lse_partial", "q")),
  "lengths": (sized(B=2**15, Sk=2**12, **LENGTHS), forward, ("k", "v")),
  "packed": (sized(H=32, return_lse=True, **PACKED), split, ("o", "o_partial", "q", "k", "v")),
  "pages": (of_pages(64, 2**20, 2**13), forward, ("k", "v")),
  "pages smaller than a tile": (of_pages(8, 2**23, 2**13), forward, ("k", "v")),
  "a table": (of_pages(64, 2**10, 2**13, 2**20), forward, ("block_table",)),
  "a view": (in_views(2**11, MANY, 2**22), forward, ("k", "v")),
  "bias": (sized(B=2**10, **BIAS), forward, ("bias",)),
  "bias, rows": (sized(H=2, Sq=2**16, Sk=2**16, **BIAS), forward, ("bias",)),
  "one bias of all heads": (sized(B=2, H=4, Sq=2**17, Sk=2**16, bias=(False, False, True, True)), gradients, ("bias",)),
  "dropout": (sized(B=2**16, dropout_p=0.1, first_batch_and_head=True), gradients, ("dq", "dk", "dv", "q", "k", "v", "do")),
  "gradients of rows": (sized(window=(-1, 0), **LONG), gradients, ("dq", "dk", "dv", "q", "k", "v", "do")),
  "gradients of lse": (sized(B=2**13, H=2**10, Sk=64), gradients, ("dq", "delta", "q", "lse", "do", "dlse")),
  "gradients of packed": (sized(H=32, window=(-1, 0), **PACKED), gradients, ("dq", "dk", "dv", "q", "k", "v", "do")),
  "gradients with lengths": (sized(H=2, Sq=2**10, Sk=2**28, kv_lengths=True), gradients, ("dk", "dv", "k", "v")),
  "gradient of a bias": (sized(B=2**10, **BIAS), of_bias, ("dbias", "bias")),
  "gradient of one bias": (sized(B=2, H=4, Sq=2**17, Sk=2**16, bias=(False, False, True, True)), of_bias, ("dbias", "bias")),
  "merged": (sized(B=2**17, return_lse=True), merged, ("o", "part_0", "part_1")),
  "latent": (sized(B=2**10, H=16, Hkv=1, Sq=1, Sk=2**14, D=576, Dv=512, v_in_k=True), forward, ("k",))}

def check_large(p:Problem, programs:Callable[[Problem, Chip], Iterator[Program]], large:Iterable[str], arch:str) -> None:
  found = set()
  for shapes, kernel in programs(p, get_chip(arch)):
    sizes = {name: math.prod(shape) for name, (shape, _) in shapes.items()}
    found |= {name for name, size in sizes.items() if size >= MANY}
    assert not unproven(kernel(*[UOp.placeholder(shape, TYPES[dtype], i) for i, (shape, dtype) in enumerate(shapes.values())]), arch)
  assert found >= set(large)

@pytest.mark.sample(4)
@in_turn("of, arch", LARGE, ("gfx942", "gfx1201", "sm_80", "sm_90"))
def test_attention(of:str, arch:str) -> None: check_large(*LARGE[of], arch)

PLAIN = {"bias": (sized(B=2**10, dtype="float32", **BIAS), plain, ("bias",)), "pages": (of_pages(8, 2**23, 2**13), plain, ("k", "v")),
         "packed": (sized(H=32, **PACKED), plain, ("o", "q", "k", "v")),
         "gradients": (sized(window=(-1, 0), **LONG), plain_gradients, ("dq", "dk", "dv", "q", "k", "v", "do"))}

@pytest.mark.parametrize("of", [pytest.param(of, marks=() if of == "bias" else pytest.mark.thorough) for of in PLAIN])
def test_plain_attention(of:str) -> None: check_large(*PLAIN[of], "gfx1030")

ON_GFX950 = sized(B=2**13, D=128)

@pytest.mark.thorough
@pytest.mark.parametrize("kernel", ("dual_wave", "staggered"))
def test_kernels_of_gfx950(kernel:str) -> None:
  def programs(p:Problem, chip:Chip) -> Iterator[Program]:
    work, program = KERNELS[kernel].can(p, chip), KERNELS[kernel].program
    assert not isinstance(work, str) and program is not None
    yield arguments(p), program(p, chip, work.tile)
  check_large(ON_GFX950, programs, ("o", "q", "k", "v"), "gfx950")

# ***** beyond the limits *****

@pytest.mark.parametrize("p, name", ((in_views(2**10, 2**36, 2**26), "k"), (sized(layout="bshd", H=2**20, Hkv=1, D=16), "q"),
                                     (sized(H=2, Sq=2**6, Sk=2**26, **BIAS), "bias")), ids=("k", "q", "bias"))
def test_rows_too_far_apart(p:Problem, name:str) -> None:
  for arch in CHIPS:
    chip = get_chip(arch)
    with pytest.raises(NotImplementedError, match=rf"{name}: .* span \d+ bytes: a kernel can address at most 2147483632"):
      forward_of(p, chip, choose_tile(p, chip))
    assert f"{name}: " in str(choose(p, chip).why_not("forward" if arch == "gfx942" else "forward_mma"))

@pytest.mark.parametrize("name", ("Sq", "Sk", "total_q", "total_k"))
def test_too_many_rows(name:str) -> None:
  rows = 2**28 + 1
  with pytest.raises(NotImplementedError, match=f"{name}={rows}: .* at most {2**28}"): sized(**(PACKED if "total" in name else {}) | {name: rows})

# ***** operations *****

def test_operations_of_a_mask() -> None:
  # The number of operations of a masked problem is computed from the total number of keys that all rows see, by a formula. A loop over 2^28 rows
  # would need minutes.
  rng = np.random.default_rng(0)
  for i in range(300):
    Sq, Sk, left, right, offset = map(int, rng.integers((2, 1, -1, -1, -20), (30, 30, 40, 40, 20)))
    dealt, view = DealtRows(3, Sq//2, 7, int(rng.integers(1, Sq)), (0, 1)), Strided(10**3, 0, 0, 0, 1)
    of_devices = dict(dealt=dealt, k_view=view, v_view=view) if i%2 else {}
    p = Problem(1, 1, 1, Sq, Sk, 8, 8, window=(left, right), offset=offset, softmax_scale=1.0, **of_devices)
    places = [p.place(row) + offset for row in range(p.queries)]
    seen = sum(0 <= key < Sk and (left < 0 or key >= x - left) and (right < 0 or key <= x + right) for x in places for key in range(Sk))
    assert p.flops == 2*seen*(8 + 8), p
  causal = Problem(1, 1, 1, 2**28, 2**28, 8, 8, window=(-1, 0), softmax_scale=1.0)
  assert causal.flops == 2**28*(2**28 + 1)*(8 + 8)
