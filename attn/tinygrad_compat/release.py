"""Check of tinygrad's signatures at import: a git checkout may have the version number that attn requires, but be older or newer than the release."""
from __future__ import annotations
import contextlib, importlib, inspect
from collections.abc import Iterator
from typing import Any
from attn.tinygrad_compat.version import TINYGRAD_VERSION

# functions that make kernels, which change most often: module:name -> names of the parameters. test/tinygrad_compat/test_compat.py checks all others.
RELEASED = {
  "tinygrad.uop.ops:UOp": ("op", "dtype", "src", "arg", "tag", "metadata", "_buffer"),
  "tinygrad.uop.ops:UOp.call": ("self", "srcs", "ret_dtype", "grad_fxn", "name", "precompile", "precompile_backward", "aux"),
  "tinygrad.uop.ops:UOp.custom_kernel": ("srcs", "fxn", "grad_fxn"), "tinygrad:Tensor.custom_kernel": ("self", "lst", "fxn", "grad_fxn"),
  "tinygrad.uop.ops:UOp.placeholder": ("shape", "dtype", "slot", "addrspace", "device", "volatile", "tag"),
  "tinygrad.codegen:full_rewrite_to_sink": ("ast", "ren", "optimize"), "tinygrad.codegen.late.linearizer:linearize": ("sink",)}

def difference(name:str, parameters:tuple[str, ...]) -> str|None:
  """Returns how the parameters of tinygrad's function `name` differ from `parameters`, as text, or None if they don't."""
  module, path = name.split(":")
  try:
    found:Any = importlib.import_module(module)
    for part in path.split("."): found = getattr(found, part)
  except (ImportError, AttributeError): return f"{name} is not there"
  names = tuple(inspect.signature(found).parameters)
  return None if names == parameters else f"{name} takes ({', '.join(names)}) and not ({', '.join(parameters)})"

def not_the_release(found:str) -> ImportError:
  return ImportError(f"attn needs tinygrad {TINYGRAD_VERSION} as it was released; the installed one has that version number but differs: {found}; "
                     f"to install the release: python -m pip install --force-reinstall tinygrad=={TINYGRAD_VERSION}")

def check_release() -> None:
  """Raises ImportError, in one sentence, if the installed tinygrad differs from the release with its version number."""
  for name, parameters in RELEASED.items():
    if (found := difference(name, parameters)) is not None: raise not_the_release(found)

@contextlib.contextmanager
def imports_of_the_release() -> Iterator[None]:
  """Context for imports from tinygrad: a name that does not exist raises the ImportError of `check_release`."""
  try: yield
  except (ImportError, AttributeError) as e: raise not_the_release(str(e)) from e

check_release()
