"""Predicts the time of kernels: of a kernel of attn from its name, such as gfx942/128/float16/causal, of any other kernel from its assembly text."""
from __future__ import annotations
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from attn.chips import MODELLED
from attn.compilers.clang import assembly
from attn.isa import source
from attn.isa.report import LoopProducts
from attn.isa.timing.predict import Division, Prediction, at_both_clocks, blocks_of_grid, predict, walked_in_a_trip
from attn.isa.timing.trips import Timing, timing_of
from attn.kernels.parts.grid.workgroup import heads_together
from attn.problem import Problem

LINE_TABLES = ("-gline-tables-only",)     # makes clang name the source line of each instruction; the code stays the same

ASKED = source.Shape(4, 16, 16, 8192)     # shape of the predicted problem by default

@dataclass(frozen=True)
class Predicted:
  """Predicted time of a kernel's hot loops, with what is needed to predict the time of a whole problem."""
  timing: Timing
  problem: Problem|None
  # how the problem is divided among workgroups
  division: Division|None          # None: not known, so no problem can be predicted
  lines: Mapping[int, source.PythonLine] = field(default_factory=dict)
  @property
  def title(self) -> str:
    p, x = self.problem, self.division
    if p is None or x is None: return ""
    length = f"N={p.Sq}" if p.Sq == p.Sk else f"Sq={p.Sq} Sk={p.Sk}"
    ranges = f" in {x.splits} key ranges, without merging them"*(x.splits > 1)
    return f"B={p.B} H={p.H} Hkv={p.Hkv} {length} D={p.D} {p.dtype}" + " causal"*(p.window[1] == 0) + ranges
  def on_cards(self, card:str|None=None, ghz:float|None=None) -> list[Prediction]:
    """Returns predictions of the problem's time on `card`, or on each card whose rated clock is known; none if the problem is unknown."""
    known = {c.name: c for c in self.timing.chip.cards}
    if card is not None and card not in known: raise ValueError(f"--card {card}: the cards of {self.timing.chip.name} are {', '.join(known)}")
    if self.problem is None or self.division is None: return []
    chosen = [known[card]] if card is not None else [c for c in known.values() if c.cus and (c.ghz or ghz)]
    if ghz is not None: return [predict(self.problem, self.timing, self.division, c, ghz) for c in chosen]
    # at the rated clock, and at the clock that the card sustains under matrix work, if this clock is known
    return [x for c in chosen for x in at_both_clocks(self.problem, self.timing, self.division, c) if x is not None]

def _problem(shape:source.Shape, d:int, dv:int, dtype:str, causal:bool) -> Problem:
  return Problem(shape.b, shape.h, shape.hkv, shape.n, shape.n, d, dv, dtype=dtype, out_dtype=dtype, window=(-1, 0 if causal else -1),
                 softmax_scale=d**-0.5)

def predicted_kernel(spec:source.Spec, shape:source.Shape=ASKED, lines:bool=True) -> Predicted:
  """Compiles a kernel of attn for a problem of size `shape`, and predicts the time of its hot loop from the machine code."""
  # `lines`: the prediction names the line of Python that emitted an instruction
  if spec.kernel == source.LATENT: raise ValueError(f"{spec}: the model does not cover latent attention; `report` gives bounds for it")
  if spec.arch not in MODELLED: raise ValueError(f"{spec}: the model is only for AMD's chips, {', '.join(MODELLED)}")
  kernel = source.kernel_source(spec, shape=shape, lines=lines)
  return of_source(spec, kernel, assembly(kernel.text, spec.arch, LINE_TABLES), shape)

def of_source(spec:source.Spec, kernel:source.Source, text:str, shape:source.Shape=ASKED) -> Predicted:
  """Predicts the time of the hot loop of a kernel of attn, from its HIP source `kernel` and its assembly `text`."""
  problem, keys = replace(source.problem_of_spec(spec, shape), num_splits=kernel.splits), spec.kernel in ("dkdv", source.ALL)
  timing = timing_of(text, spec.arch, kernel.d, kernel.dv, title=str(spec), products=kernel.products,
                     grid=blocks_of_grid(problem, kernel.block_m, keys, kernel.heads))
  walked = walked_in_a_trip(timing, kernel.block_m)
  together = heads_together(problem, timing.chip, 0 if keys else kernel.heads)
  return Predicted(timing, problem, Division(kernel.block_m, walked, keys, kernel.products, kernel.heads, kernel.splits, together), kernel.python)

def of_text(text:str, shape:source.Shape=ASKED, arch:str|None=None, d:int|None=None, dtype:str="float16", causal:bool=False, dv:int|None=None,
            kernel_name:str|None=None, queries:int|None=None, lds:int|None=None, threads:int|None=None, title:str|None=None,
            products:LoopProducts=((1, 1),), behind:int|None=None) -> Predicted:
  """Predicts the time of the hot loops of any kernel from its assembly text."""
  # `products` has a pair of numbers for each hot loop: how many matrix products have D as one of their three dimensions (such as S = Q K^T), and how
  # many have Dv (such as O = P V). `behind` is the number of waves of a workgroup that begin the loop one barrier behind the others; by default it
  # is found in the text. `causal` says whether the problem has a causal mask. The other arguments are explained at `analyse`.
  timing = timing_of(text, arch, d, dv, kernel_name, lds, threads, title, products, behind)
  # without them no problem can be predicted (`on_cards`)
  if d is None or queries is None: return Predicted(timing, None, None)
  own = queries*timing.waves
  return Predicted(timing, _problem(shape, d, dv or d, dtype, causal), Division(own, walked_in_a_trip(timing, own), False, products))

