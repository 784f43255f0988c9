"""Tests of `batch_invariant=True`: the output of a sequence has the same bits whether the sequence is computed alone or in a batch, whatever the
lengths and pages of the other sequences are."""
from __future__ import annotations
import numpy as np
import pytest
import attn
from attn.tinygrad_compat import Tensor
from api_cases import draw, emulated
from cases import array, tensor
from test_paged import Paged, int32

H, HKV, D = 4, 2, 16

@pytest.mark.parametrize("arch, batches", [("sm_80", 1), *[pytest.param(x, 20, marks=pytest.mark.thorough) for x in ("gfx942", "gfx1201", "sm_80")]])
def test_in_random_batches(arch:str, batches:int) -> None:
  # One decoding step over 600 keys in pages of 16 rows gives a sequence the same bits alone and in a batch. The batch has up to seven other sequences
  # and a wider block table.
  rng, most = np.random.default_rng(7), 600
  q, k, v = (rng.standard_normal((1, h, n, D)).astype(np.float16) for h, n in ((H, 1), (HKV, most), (HKV, most)))
  def step(others:tuple[int, ...], pages_more:int, invariant:bool) -> np.ndarray:
    x = Paged.of((most, *others), 16, D, int(rng.integers(1000)))
    for to, rows in zip(x.pages, (k, v)):
      for j in range(most): to[x.table[0, j//16], j%16] = rows[0, :, j]
    table = np.concatenate([x.table, np.zeros((len(x.lengths), pages_more), np.int32)], 1)
    queries = np.concatenate([q, rng.standard_normal((len(others), H, 1, D)).astype(np.float16)])
    return array(attn.attention(tensor(queries, "float16"), *x.tensors(), block_table=int32(table), kv_lengths=int32(x.lengths),
                                batch_invariant=invariant))[0]
  with emulated(arch):
    alone = step((), 0, True)
    for _ in range(batches):
      others = tuple(int(n) for n in rng.integers(1, 300, rng.integers(1, 8)))
      np.testing.assert_array_equal(step(others, int(rng.integers(0, 40)), True), alone)

@pytest.mark.parametrize("arch", ("gfx942", "sm_90"))
def test_choices_do_not_depend_on_the_batch(arch:str) -> None:
  # The tile and the number of key ranges are the same for every batch size with batch_invariant, for one query and for 300 queries. Without
  # batch_invariant they change with the batch size.
  def choice(B:int, invariant:bool, Sq:int=1) -> tuple[str, str, int]:
    q, k = (Tensor.empty(B, *shape, 64, dtype="half", device="EMU") for shape in ((H, Sq), (HKV, 2048)))
    found = attn.api.attention.choice_of(q, k, k, kv_lengths=1100, batch_invariant=invariant)
    return found.kernel, str(found.work.tile), found.work.splits
  with emulated(arch):
    assert len({choice(B, True) for B in (1, 7, 200)}) == 1 and choice(1, True)[2] == 4
    assert len({choice(B, False) for B in (1, 7, 200)}) > 1
    assert len({choice(B, True, 300) for B in (1, 40)}) == 1 and choice(1, True, 300)[2] == 1

def test_refused() -> None:
  with emulated("gfx942"):
    q, k = draw(1, 2, 1, 16), Tensor.empty(1, 2, 2**18, 16, dtype="half", device="EMU")
    with pytest.raises(ValueError, match="num_splits=4 with batch_invariant=True"): attn.attention(q, q, q, num_splits=4, batch_invariant=True)
    with pytest.raises(NotImplementedError, match="batch_invariant=True with room for 262144 keys"): attn.attention(q, k, k, batch_invariant=True)
