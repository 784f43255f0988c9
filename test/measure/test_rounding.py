"""Tests of docs/data/rounding.csv, the table of the errors that rounding keys and values to 8 bits causes."""
from __future__ import annotations
import csv
from pathlib import Path
import numpy as np
import pytest
from attn.calls.quantized import rotate
from attn.measure import rounding
from attn.tinygrad_compat import Context, Tensor

DOCS = Path(__file__).resolve().parent.parent.parent/"docs"

def stored() -> list[list[str]]: return list(csv.reader((DOCS/"data/rounding.csv").open()))

def test_the_page_has_the_figures_of_the_table() -> None:
  # The table in docs/serving.md shows the rounding errors of docs/data/rounding.csv for D = 128 and float32 scales. The errors confirm what the page
  # says about keys with outliers: rotating them reduces the output's error in int8 to less than a third, and increases it in fp8e4m3.
  head, *rows = stored()
  assert tuple(head) == rounding.ERROR_COLUMNS and len(rows) == len(rounding.WIDTHS)*2*len(rounding.ROUNDINGS)*2
  of = {tuple(row[:5]): row[5:] for row in rows}
  page = (DOCS/"serving.md").read_text()
  for name, scales in rounding.ROUNDINGS:
    if scales == "float16": continue
    cells = [x for keys, rotated in (("normal", "no"), ("outliers", "no"), ("outliers", "yes")) for x in of["128", keys, name, scales, rotated]]
    assert f"| {name} | {' | '.join(cells)} |" in page
  def error(name:str, rotated:str) -> float: return float(of["128", "outliers", name, "float32", rotated][1])
  assert error("int8", "yes") < error("int8", "no")/3 and error("fp8e4m3", "yes") > error("fp8e4m3", "no")

def test_rotation_keeps_scores() -> None:
  # `rotate` changes no dot product of two rows if both are rotated. It spreads one large element of a row evenly over a part of the row. The part is
  # as wide as the largest power of two that divides the row's width.
  with Context(DEV="EMU::gfx942", NOOPT=1):
    for width in (128, 24, 7):
      turned = rotate(Tensor(np.eye(width, dtype=np.float32))).numpy()
      part = width & -width
      np.testing.assert_allclose(turned @ turned.T, np.eye(width), atol=1e-6)
      np.testing.assert_allclose(np.abs(turned).max(), part**-.5, rtol=1e-6)
    with pytest.raises(NotImplementedError, match="x has dtype int32: must be one of float16"): rotate(Tensor([1, 2]))

@pytest.mark.thorough
def test_the_table_is_what_the_command_computes() -> None:
  with Context(DEV="EMU::gfx942", NOOPT=1): found = list(rounding.error_rows((64,)))
  for row, kept in zip(found, stored()[1:]):
    assert list(row[:5]) == kept[:5]
    np.testing.assert_allclose([float(x) for x in row[5:]], [float(x) for x in kept[5:]], rtol=0.1)
