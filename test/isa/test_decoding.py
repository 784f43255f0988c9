"""Tests of docs/data/decode_amd.csv, a table of predicted times of decoding, and of how many bytes a prediction counts for 8-bit rows of a cache."""
from __future__ import annotations
import dataclasses
from pathlib import Path
import pytest
from attn.chips import MODELLED, get_chip
from attn.isa import source
from attn.isa.roofline import RATED, roofline
from attn.isa.timing import decoding
from attn.isa.timing.predict import Division, bytes_of_levels, work_of_grid
from attn.isa.source import Spec
from attn.problem import Problem

DATA = Path(__file__).parent.parent.parent/"docs"/"data"

@pytest.mark.parametrize("arch", ("gfx1201", pytest.param("gfx942", marks=pytest.mark.thorough)))
def test_the_committed_table(arch:str) -> None:
  # docs/data/decode_amd.csv has a row for each chip and cache, and the rows are those that the command computes today.
  pytest.importorskip("ziglang")
  lines = (DATA/"decode_amd.csv").read_text().splitlines()
  assert lines[0] == ",".join(decoding.OF_DECODING)
  assert [line.split(",")[0] for line in lines[1:]] == [str(spec) for chip in MODELLED for spec in decoding.decoding_specs(chip)]
  assert [line for line in lines if line.startswith(f"{arch}/128/float16")] == \
         [decoding.decoding_line(spec) for spec in decoding.decoding_specs(arch) if spec.dtype == "float16"]

def test_bytes_of_stored_rows() -> None:
  # Predictions count one byte for each element of an 8-bit row, and the scales of its key and value. So a row of 128 elements takes 132 bytes in int8
  # and 256 in 16 bits.
  def problem(kernel:str) -> Problem:
    return dataclasses.replace(source.problem_of_spec(Spec("gfx942", 128, "float16", "full", kernel), decoding.DECODE_STEP), num_splits=1)
  chip, card = RATED["MI300X"]
  rows, queries = 64*8*4096, 64*32*256*2
  for p, of_row in ((problem("decode"), 256), (problem("decode_int8"), 132)):
    x = Division(16, 32.0, heads=4)
    found = bytes_of_levels(p, x, work_of_grid(p, x), get_chip("gfx942"), 608)
    assert found["memory"] == 2*rows*of_row + queries and found["L2"] == 2*rows*of_row + queries
    tile = source.chosen(Spec("gfx942", 128, "float16", "full", "decode_int8"), shape=decoding.DECODE_STEP)[1]
    assert roofline(p, tile, chip, card).memory_seconds == pytest.approx((2*rows*of_row + queries)/card.gbs/1e9)

def test_words_of_kernels() -> None:
  assert str(Spec.parse("gfx942/128/float16/full/decode_int8")) == "gfx942/128/float16/full/decode_int8"
  with pytest.raises(ValueError, match="gfx1100 does not convert 8-bit floats"): Spec.parse("gfx1100/128/float16/full/decode_fp8")
