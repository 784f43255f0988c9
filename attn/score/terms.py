"""The terms there are, in their order, and what is asked of those that a problem has."""
from __future__ import annotations
import functools
from collections.abc import Callable, Mapping
from attn.problem import Problem
from attn.score.alibi import ALIBI
from attn.score.bias import BIAS
from attn.score.softcap import SOFTCAP
from attn.score.term import Positions, ScoreTerm, TermRegisters, TermTensor, one
from attn.tinygrad_compat import Tensor

TERMS: tuple[ScoreTerm, ...] = (SOFTCAP, ALIBI, BIAS)

TERM_TENSORS: dict[str, TermTensor] = {tensor.name: tensor for term in TERMS for tensor in term.tensors}

def score_terms(p:Problem) -> tuple[ScoreTerm, ...]:
  """Terms that a problem has, in their order."""
  return tuple(term for term in TERMS if getattr(p, term.name) not in (None, False, 0.0))

def heaviest(p:Problem) -> TermRegisters|None:
  """What the term that takes the most registers takes; None without terms."""
  return max((term.registers for term in score_terms(p)), default=None)

def crowded(p:Problem) -> bool:
  """Whether a term takes as many registers as the scores."""
  return heaviest(p) == TermRegisters.SCORES

def goes_by_distance(p:Problem) -> bool:
  """Whether a score goes by how far its query and its key are apart, beside the window."""
  return any(term.placed for term in score_terms(p))

def varies(p:Problem) -> bool:
  """Whether the derivative of any term is not 1 everywhere."""
  return any(term.derivative is not one for term in score_terms(p))

def check_differentiable(p:Problem) -> None:
  """Raises NotImplementedError for a term that has no derivative."""
  for term in score_terms(p):
    if not term.differentiable: raise NotImplementedError(f"{term.name}={getattr(p, term.name)}: it has no derivative, so attention has no gradient")

def check_derivatives(p:Problem) -> None:
  """Raises NotImplementedError for a term whose derivative the backward kernels don't have."""
  check_differentiable(p)
  for term in score_terms(p):
    if term.derivative is None: raise NotImplementedError(f"{term.name}={getattr(p, term.name)}: the backward kernels have no derivative of it")

def has_sum(p:Problem) -> bool:
  """Whether a term has a tensor whose gradient a kernel sums."""
  return any(tensor.summed for term in score_terms(p) for tensor in term.tensors)

def summed_term(p:Problem) -> ScoreTerm:
  """The term with that tensor: a problem has one at most."""
  found, = (term for term in score_terms(p) if any(tensor.summed for tensor in term.tensors))
  return found

def summed_tensor(p:Problem) -> TermTensor:
  found, = (tensor for tensor in summed_term(p).tensors if tensor.summed)
  return found

def terms_after(term:ScoreTerm) -> set[str]:
  """The names of the terms that come after one."""
  return {x.name for x in TERMS[TERMS.index(term) + 1:]}

def plain_terms(p:Problem, given:Mapping[str, Tensor]) -> Callable[[Tensor, Positions], Tensor]:
  """All of a problem in tensor operations: what makes scores of softmax_scale * Q K^T."""
  return lambda s, at: functools.reduce(lambda x, term: term.plain(x, p, at, given), score_terms(p), s)
