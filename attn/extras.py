"""What a program says where a package is missing that an extra of attn installs."""
from __future__ import annotations
import contextlib
from collections.abc import Iterator

@contextlib.contextmanager
def needs(extra:str, program:str, module:str) -> Iterator[None]:
  """Imports in here may want packages of `extra`, such as "bench". Where one is missing a `module` that runs as a program ("__main__") ends with one
  sentence, and another raises ModuleNotFoundError with that sentence."""
  try: yield
  except ModuleNotFoundError as e:
    package = (e.name or "").partition(".")[0]
    if package in ("", "attn", "tinygrad", "numpy"): raise
    sentence = f"{program}: needs {package}, which the extra {extra} installs: run pip install '.[{extra}]' in a clone of attn"
    if module == "__main__": raise SystemExit(sentence) from None
    raise ModuleNotFoundError(sentence, name=e.name) from None
