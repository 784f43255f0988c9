"""Predictions of kernels: of ours by their word, of others by their text."""
from __future__ import annotations
from dataclasses import dataclass, field
from attn.chips import MODELLED
from attn.compilers.clang import assembly
from attn.isa import source
from attn.isa.report import LoopProducts
from attn.isa.timing.predict import Division, Prediction, predict
from attn.isa.timing.tables import PythonLines
from attn.isa.timing.trips import Timing, timing_of
from attn.problem import Problem

LINE_TABLES = ("-gline-tables-only",)     # with which clang's text says where an instruction is from, and is otherwise the same

@dataclass(frozen=True)
class Shape:
  """What a prediction of a problem needs beside the kernel."""
  b: int = 4
  h: int = 16
  hkv: int = 16
  n: int = 8192

@dataclass(frozen=True)
class Predicted:
  """A kernel's timing, with the problem that it is asked for."""
  timing: Timing
  problem: Problem|None
  division: Division|None          # None: not known, and nothing is said of the problem
  lines: PythonLines = field(default_factory=dict)
  @property
  def title(self) -> str:
    p = self.problem
    return f"B={p.B} H={p.H} Hkv={p.Hkv} N={p.Sq} D={p.D} {p.dtype}" + " causal"*(p.window[1] == 0) if p is not None else ""
  def on_cards(self, card:str|None=None, ghz:float|None=None) -> list[Prediction]:
    """The problem on each card of the chip whose clock is known, or on one of them. Raises ValueError for a card that is not the chip's."""
    known = {c.name: c for c in self.timing.chip.cards}
    if card is not None and card not in known: raise ValueError(f"--card {card}: the cards of {self.timing.chip.name} are {', '.join(known)}")
    if self.problem is None or self.division is None: return []
    chosen = [known[card]] if card is not None else [c for c in known.values() if c.cus and (c.ghz or ghz)]
    return [predict(self.problem, self.timing, self.division, c, ghz) for c in chosen]

def _problem(shape:Shape, d:int, dv:int, dtype:str, causal:bool) -> Problem:
  return Problem(shape.b, shape.h, shape.hkv, shape.n, shape.n, d, dv, dtype=dtype, out_dtype=dtype, window=(-1, 0 if causal else -1),
                 softmax_scale=d**-0.5)

def _division(timing:Timing, queries:int, keys:bool, products:LoopProducts) -> Division:
  """How the problem is divided, from the scores of a trip and a wave's own rows."""
  assert timing.loops[0].scores is not None
  return Division(queries*timing.waves, timing.loops[0].scores/queries, keys, products)

def of_spec(spec:source.Spec, shape:Shape|None=None, lines:bool=True) -> Predicted:
  """A kernel of ours."""
  if spec.kernel == source.LATENT: raise ValueError(f"{spec}: how its waves share a problem is not in the model; `report` has its bounds")
  if spec.arch not in MODELLED: raise ValueError(f"{spec}: the model is of AMD's chips, {', '.join(MODELLED)}")
  kernel = source.kernel_source(spec)
  timing = timing_of(assembly(kernel.text, spec.arch, LINE_TABLES), spec.arch, kernel.d, kernel.dv, title=str(spec), products=kernel.products)
  keys = spec.kernel == "dkdv"
  own = kernel.block_m//timing.waves
  problem = _problem(shape or Shape(), spec.d, spec.d, spec.dtype, spec.mask == "causal")
  return Predicted(timing, problem, _division(timing, own, keys, kernel.products), source.python_lines(spec) if lines else {})

def of_text(text:str, shape:Shape, arch:str|None=None, d:int|None=None, dtype:str="float16", causal:bool=False, dv:int|None=None,
            kernel_name:str|None=None, queries:int|None=None, lds:int|None=None, threads:int|None=None, title:str|None=None,
            products:LoopProducts=((1, 1),), behind:int|None=None) -> Predicted:
  """A kernel of an assembly text; of a problem only where the head dimension and the queries of a wave are given."""
  timing = timing_of(text, arch, d, dv, kernel_name, lds, threads, title, products, behind)
  if d is None or queries is None: return Predicted(timing, None, None)
  return Predicted(timing, _problem(shape, d, dv or d, dtype, causal), _division(timing, queries, False, products))

