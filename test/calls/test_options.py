"""Tests that attn declares each option once: signatures, docstrings and the tables of the documents agree with attn/calls/options.py."""
from __future__ import annotations
import inspect, re
from dataclasses import fields
from pathlib import Path
from typing import Any
import pytest
import attn
from attn.calls.options import AttentionOptions, KernelOptions
from attn.tinygrad_compat import Tensor
from api_cases import emulated

ROOT = Path(__file__).resolve().parent.parent.parent
OF_KERNELS, OF_ATTENTION = ({f.name: f for f in fields(record)} for record in (KernelOptions, AttentionOptions))
NOT_WITH_A_CACHE = {"kv_lengths", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "dropout_p", "dropout_seed",
                    "sequence_order", "sequence_lengths", "q_scale", "k_scale", "v_scale", "fast_accumulate"}

def keywords(function:Any) -> dict[str, Any]:
  return {name: x.default for name, x in inspect.signature(function).parameters.items() if x.kind is x.KEYWORD_ONLY}

def rows(text:str, header:str) -> dict[str, list[str]]:
  # Returns the rows of all Markdown tables in a text that have this header, by their first cell.
  found = {}
  for table in re.findall(rf"^\| {re.escape(header)} \|\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE):
    for line in table.splitlines():
      first, *cells = (cell.strip() for cell in line.strip("|").split(" | "))
      found[first] = cells
  return found

def test_signatures() -> None:
  assert keywords(attn.attention) == {name: f.default for name, f in OF_ATTENTION.items()}
  assert keywords(attn.flash_attention_fn) == {"extras": (), **{name: f.default for name, f in OF_KERNELS.items()}}
  assert keywords(attn.attention_with_kv_cache).keys() <= OF_ATTENTION.keys()

def test_annotations() -> None:
  # The type of each option in attn/calls/options.py is the type in the function's signature.
  for function, record in ((attn.attention, OF_ATTENTION), (attn.flash_attention_fn, OF_KERNELS)):
    for name, f in record.items(): assert inspect.signature(function).parameters[name].annotation == f.type, name

def test_docstrings() -> None:
  for function, record in ((attn.attention, OF_ATTENTION), (attn.flash_attention_fn, OF_KERNELS)):
    text = inspect.getdoc(function) or ""
    for name in record: assert re.search(rf"\b{name}\b", text), f"{function.__name__} does not explain {name}"

def test_the_document_is_the_record() -> None:
  table = rows((ROOT/"docs/options.md").read_text(), "option | default | meaning")
  assert table == {name: [f"`{f.default!r}`", f.metadata["meaning"]] for name, f in OF_ATTENTION.items()}

def test_the_readme_names_options_that_there_are() -> None:
  for line in rows((ROOT/"README.md").read_text(), "option | meaning"):
    for name in line.split(", "): assert name in OF_ATTENTION, name

@pytest.mark.parametrize("name", OF_ATTENTION)
def test_every_option_is_checked_by_name(name:str) -> None:
  # `attention` refuses a wrong value of each option with an error that names the option. Attention with a cache does so before it appends a row to
  # the cache.
  class Nonsense:
    def __repr__(self) -> str: return "nonsense"
  with emulated("gfx942"):
    q = Tensor.empty(1, 1, 4, 16, dtype="half", device="EMU")
    cache = Tensor.zeros(1, 1, 8, 16, dtype="half", device="EMU").contiguous().realize()
    other = Tensor.zeros(1, 1, 8, 16, dtype="half", device="EMU").contiguous().realize()
    before = cache.uop
    with pytest.raises(ValueError, match=f"{name}=nonsense: must be"): attn.attention(q, q, q, **{name: Nonsense()})
    with pytest.raises(ValueError, match=f"{name} with a cache" if name in NOT_WITH_A_CACHE else f"{name}=nonsense: must be"):
      attn.attention_with_kv_cache(q, q, q, cache, other, 0, **{name: Nonsense()})
    assert cache.uop is before
    if name in OF_KERNELS:
      with pytest.raises(ValueError, match=f"{name}=nonsense: must be"): attn.flash_attention_fn(**{name: Nonsense()})
