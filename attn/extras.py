"""Error message for a missing package: the message names the optional dependencies of attn (an "extra", such as attn[bench]) that install the
package."""
from __future__ import annotations
import contextlib
from collections.abc import Iterator

@contextlib.contextmanager
def needs(extra:str, program:str, module:str) -> Iterator[None]:
  """Context for imports that need attn's optional dependencies `extra`: a missing package raises an error that says what to install."""
  # `program` is the program's name in this sentence. The error is SystemExit if `module` runs as a program ("__main__"), else ModuleNotFoundError.
  try: yield
  except ModuleNotFoundError as e:
    package = (e.name or "").partition(".")[0]
    if package in ("", "attn", "tinygrad", "numpy"): raise
    sentence = f"{program}: needs {package}, which the extra {extra} installs: run pip install '.[{extra}]' in a clone of attn"
    if module == "__main__": raise SystemExit(sentence) from None
    raise ModuleNotFoundError(sentence, name=e.name) from None
