"""Sums of dS (gradients of scores) that the kernel `backward_dbias` computes: the gradient of a bias, or of an element of a tensor that score_mod
reads."""
from __future__ import annotations
from dataclasses import dataclass, replace
from attn.functions.indices import simple_index
from attn.functions.symbols import number_of_tensor
from attn.problem import Problem
from attn.score.own import float_elements
from attn.score.terms import score_terms, terms_after
from attn.tinygrad_compat import UOp

# An element of such a tensor changes many scores. Its gradient is the sum of the gradients of these scores, each multiplied by the derivative of the
# score by the element.

OTHER_INDEX = "an index is more than b, h, i, j or i - j and a constant; index by i - j, and make the tensor with tinygrad operations"

@dataclass(frozen=True)
class Summed:
  """Describes a sum of dS (gradients of scores) that a kernel computes as the gradient of a tensor, such as a bias."""
  name: str  # of the tensor
  sizes: tuple[int, ...]  # along batches, heads, queries and keys; 1 along an axis over which dS is added up
  dtype: str  # in which the kernel stores a complete sum
  derivatives: tuple[str, ...]  # names of the score terms by whose derivatives dS is multiplied before
  # Whether scores with equal i - j (query i, key j) share an element of the tensor. The kernel then adds up all tiles of dS that lie on one diagonal
  # of the score matrix, and stores one tile for each diagonal. Tensor operations add up the elements with equal i - j in these tiles.
  diagonals: bool = False

def sum_over_scores(p:Problem) -> Summed:
  """Describes the sum of dS (gradients of scores) that the kernel `backward_dbias` computes for a problem."""
  if p.by_element is not None: return _of_element(p, float_elements(p)[p.by_element])
  (term, tensor), = ((term, tensor) for term in score_terms(p) for tensor in term.tensors if tensor.summed)
  return Summed(tensor.name, *p.extras[tensor.name], tuple(terms_after(term)))

def _of_element(p:Problem, element:UOp) -> Summed:
  index = simple_index(element)
  assert index is not None
  counted = {x.what for x in index}
  of_all = {"b": p.B, "h": p.H, "i": p.Sq, "j": p.Sk}
  sizes = tuple(n if what in counted else 1 for what, n in of_all.items())
  return Summed(f"mod_tensor{number_of_tensor(element)}", sizes, "float32", ("score_mod",), "i - j" in counted)

def has_sum(p:Problem) -> bool:
  """Returns whether a problem has a tensor, such as a bias, whose gradient is a sum of dS that a kernel computes."""
  return any(tensor.summed for term in score_terms(p) for tensor in term.tensors)

def problems_of_sums(p:Problem) -> tuple[Problem, ...]:
  """Returns a problem for each run of the kernel `backward_dbias`; a run computes the gradient of the bias, or of one element of mod_tensors."""
  # For the sum of a bias this is the problem itself, for an element of mod_tensors a copy with `by_element`. Elements of tensors for which
  # `why_not_summed` gives a reason are left out.
  elements = [] if p.score_mod is None else float_elements(p)
  wanted = [n for n, u in enumerate(elements) if why_not_summed(p, number_of_tensor(u)) is None]
  return (*[p]*has_sum(p), *(replace(p, by_element=n) for n in wanted))

def why_not_summed(p:Problem, number:int) -> str|None:
  """Returns why no kernel computes the gradient of mod_tensors[number], or None if one does."""
  if p.first_batch_and_head or p.dealt is not None: return "the problem lies on several devices"
  for index in (simple_index(u) for u in float_elements(p) if number_of_tensor(u) == number):
    if index is None: return OTHER_INDEX
    counted = {x.what for x in index}
    if p.varlen and counted & {"i", "j", "i - j"}: return "sequences are packed, and an index depends on i or j"
    if p.kv_lengths and not p.top_left and counted & {"i", "i - j"}: return "kv_lengths says at run time what i is"
  return None
