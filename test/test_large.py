"""Tensors beyond 2^31 elements. No integer of a kernel overflows, which the ranges of its lowered program prove: nothing of such a size is allocated
but in the test on a CPU, and touched there neither."""
from __future__ import annotations
import os, subprocess, sys
from collections.abc import Iterable
from pathlib import Path
import numpy as np
import pytest
from attn.emulator.ranges import Ranges
from attn.kernels.append import Append, append
from attn.ops.renderers import printer_of
from attn.problem import DealtRows, Pages, Problem, Strided
from attn.tinygrad_compat import Ops, UOp, dtypes, lower
sys.path.insert(0, os.path.dirname(__file__))

MANY = 2**33      # elements
CHIPS = ("gfx942", "sm_80")

def unproven(sink:UOp, arch:str) -> list[str]:
  """The integers of a kernel that may be more than their type holds."""
  return [f"{u.op.name} of {u.dtype.name}: {low}..{high}" for u, (low, high) in Ranges(lower(sink, printer_of(arch))).beyond.items()]

def types_of_indices(uops:Iterable[UOp], slot:int) -> set[str]:
  """Of what says where in an argument an access is."""
  return {u.src[1].dtype.name for u in uops if u.op in (Ops.INDEX, Ops.SHRINK) and u.src[0].op is Ops.PARAM and u.src[0].arg.slot == slot}

# ***** rows that are appended *****

def tensors_of(a:Append) -> list[UOp]:
  """Placeholders of (cache, rows, lengths, [block_table])."""
  sizes = [(a.places.size, dtypes.half), (a.B*a.H*a.new*a.width, dtypes.half), (a.B, dtypes.int)]
  if a.pages is not None: sizes.append((a.B*a.pages.most, dtypes.int))
  return [UOp.placeholder((n,), dtype, slot) for slot, (n, dtype) in enumerate(sizes)]

def in_pages(count:int, size:int, B:int=1, most:int=64, H:int=8, width:int=128) -> Append:
  return Append(B, H, 1, size*most, width, "bhsd", Strided(count*size*H*width, 0, size*H*width, width, H*width), Pages(size, count, most))

APPENDED = {      # by the argument that is large
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
  """A cache of up to 2^31 elements is addressed in 32 bits, as it was."""
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
  """Two caches of 4.3 GB, of which only the rows that are written take memory."""
  pytest.importorskip("ziglang")
  root = Path(__file__).resolve().parent.parent
  environment = {**os.environ, "DEV": "CPU", "CC": str(root/"examples/clang_of_zig.sh"), "PYTHONPATH": str(root),
                 "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
  done = subprocess.run([sys.executable, "-c", ON_A_CPU], capture_output=True, text=True, env=environment, timeout=600)
  assert done.returncode == 0, done.stderr[-2000:]

# ***** operations *****

def test_operations_of_a_mask() -> None:
  """As many as all rows together see keys; a count that walks over the rows would take minutes where there are 2^30."""
  rng = np.random.default_rng(0)
  for i in range(300):
    Sq, Sk, left, right, offset = map(int, rng.integers((2, 1, -1, -1, -20), (30, 30, 40, 40, 20)))
    dealt, view = DealtRows(3, Sq//2, 7, int(rng.integers(1, Sq)), (0, 1)), Strided(10**3, 0, 0, 0, 1)
    of_devices = dict(dealt=dealt, k_view=view, v_view=view) if i%2 else {}
    p = Problem(1, 1, 1, Sq, Sk, 8, 8, window=(left, right), offset=offset, softmax_scale=1.0, **of_devices)
    places = [p.place(row) + offset for row in range(p.queries)]
    seen = sum(0 <= key < Sk and (left < 0 or key >= x - left) and (right < 0 or key <= x + right) for x in places for key in range(Sk))
    assert p.flops == 2*seen*(8 + 8), p
  causal = Problem(1, 1, 1, 2**30, 2**30, 8, 8, window=(-1, 0), softmax_scale=1.0)
  assert causal.flops == 2**30*(2**30 + 1)*(8 + 8)
