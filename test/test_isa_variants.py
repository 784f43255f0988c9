"""Every kernel that dispatch chooses, on every chip, compiled: no spill, no slow idiom, and what it costs stands in docs/costs.txt."""
from __future__ import annotations
from pathlib import Path
import pytest
from attn.arch import get_arch
from attn.dispatch import choose_tile
from attn.isa import costs
from attn.isa.compiler import assembly
from attn.isa.parse import parse
from attn.isa.report import analyse
from attn.isa.source import Spec, kernel_source, problem_of

FILE = Path(__file__).parent.parent/"docs"/"costs.txt"

@pytest.mark.parametrize("spec", costs.SPECS, ids=str)
def test_kernel(spec:Spec) -> None:
  arch, kernel = get_arch(spec.arch), kernel_source(spec)
  text = assembly(kernel.text, spec.arch)
  report = analyse(text, spec.arch, kernel.d, kernel.dv, queries=kernel.queries, title=str(spec))
  r, matrix = report.resources, choose_tile(problem_of(spec), arch).matrix
  assert (r.vgpr_spills, r.sgpr_spills, r.scratch) == (0, 0, 0)
  assert r.lds is not None and r.lds <= arch.lds
  assert report.loop is not None and f"_{matrix.M}x{matrix.N}x{matrix.K}_" in " ".join(f"_{name}" for name in report.loop.matrix)
  assert costs.defects(parse(text)[0]) == []
  assert costs.compare(FILE.read_text(),
                       [costs.line_of(report)]) == [], "the costs changed: look, and if it is meant: python -m attn.isa costs --write docs/costs.txt"
