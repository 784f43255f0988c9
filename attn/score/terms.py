"""The terms there are, in their order, and what is asked of those that a problem has."""
from __future__ import annotations
import functools
from collections.abc import Callable, Mapping
from attn.problem import Problem
from attn.score.alibi import ALIBI
from attn.score.bias import BIAS
from attn.score.softcap import SOFTCAP
from attn.score.term import Positions, ScoreTerm
from attn.tinygrad_compat import Tensor

TERMS: tuple[ScoreTerm, ...] = (SOFTCAP, ALIBI, BIAS)

TERM_TENSORS = tuple(name for term in TERMS for name in term.tensors)

def score_terms(p:Problem) -> tuple[ScoreTerm, ...]:
  """Those in use."""
  return tuple(term for term in TERMS if getattr(p, term.name) not in (None, False, 0.0))

def terms_after(term:ScoreTerm) -> set[str]:
  """The names of the terms that come after one."""
  return {x.name for x in TERMS[TERMS.index(term) + 1:]}

def plain_terms(p:Problem, given:Mapping[str, Tensor]) -> Callable[[Tensor, Positions], Tensor]:
  """All of a problem in tensor operations: what makes scores of softmax_scale * Q K^T."""
  return lambda s, at: functools.reduce(lambda x, term: term.plain(x, p, at, given), score_terms(p), s)
