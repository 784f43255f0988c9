"""Table of all score terms (softcap, ALiBi, bias, score_mod), in the order in which they apply to a score, and questions about the terms of a
problem."""
from __future__ import annotations
import functools
from collections.abc import Callable, Mapping
from attn.problem import Problem
from attn.score.alibi import ALIBI
from attn.score.bias import BIAS
from attn.score.own import SCORE_MOD
from attn.score.places import Positions
from attn.score.softcap import SOFTCAP
from attn.score.term import ScoreTerm, TermRegisters, TermTensor, one
from attn.tinygrad_compat import Tensor

TERMS: tuple[ScoreTerm, ...] = (SOFTCAP, ALIBI, BIAS, SCORE_MOD)

TERM_TENSORS: dict[str, TermTensor] = {tensor.name: tensor for term in TERMS for tensor in term.tensors}

def score_terms(p:Problem) -> tuple[ScoreTerm, ...]:
  """Returns the score terms (softcap, ALiBi, bias, score_mod) of a problem, in the order in which they change a score."""
  return tuple(term if term.of is None else term.of(p) for term in TERMS if getattr(p, term.name) not in (None, False, 0.0))

def heaviest(p:Problem) -> TermRegisters|None:
  """Returns how many registers the most expensive of a problem's score terms needs; None if it has no score term."""
  return max((term.registers for term in score_terms(p)), default=None)

def crowded(p:Problem) -> bool:
  """Returns whether a score term of a problem needs one more register for each score, which leaves few registers for tiles."""
  return heaviest(p) == TermRegisters.SCORES

def goes_by_distance(p:Problem) -> bool:
  """Returns whether a score term of a problem, such as ALiBi, depends on how far a query and a key are apart."""
  return any(term.placed for term in score_terms(p))

def varies(p:Problem) -> bool:
  """Returns whether a problem has a score term, such as softcap, whose derivative by the score is not 1 everywhere."""
  return any(term.derivative is not one for term in score_terms(p))

def check_differentiable(p:Problem) -> None:
  """Raises NotImplementedError if a problem has no gradient: q, k and v have 8 bits, or a score term has no derivative."""
  if p.of_8_bits: raise NotImplementedError(f"q, k and v are {p.dtype}: attention of 8-bit floats has no gradient; train with 16 bits or float32")
  for term in score_terms(p):
    if not term.differentiable: raise NotImplementedError(f"{term.name}={getattr(p, term.name)}: it has no derivative, so attention has no gradient")

def check_derivatives(p:Problem) -> None:
  """Raises NotImplementedError if the backward kernels cannot compute the derivative of a score term of the problem."""
  check_differentiable(p)
  for term in score_terms(p):
    if term.derivative is None: raise NotImplementedError(f"{term.name}={getattr(p, term.name)}: the backward kernels cannot compute its derivative")

def terms_after(term:ScoreTerm) -> set[str]:
  """Returns the names of the score terms that change a score later than `term` does."""
  names = [x.name for x in TERMS]
  return {*names[names.index(term.name) + 1:]}

def plain_terms(p:Problem, given:Mapping[str, Tensor]) -> Callable[[Tensor, Positions], Tensor]:
  """Returns a function of (softmax_scale * Q K^T, positions) that applies all score terms of a problem in tensor operations."""
  return lambda s, at: functools.reduce(lambda x, term: term.plain(x, p, at, given), score_terms(p), s)
