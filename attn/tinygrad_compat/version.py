"""The tinygrad that this package is written for. It is looked at here, before any of it is imported, so that another fails with one sentence."""
from __future__ import annotations
import importlib.metadata

TINYGRAD_VERSION = "0.14.0"

def check_version() -> None:
  """Raises ImportError when the installed tinygrad is not the version that this package was written for."""
  try: found = importlib.metadata.version("tinygrad")
  except importlib.metadata.PackageNotFoundError: found = "none"
  if found != TINYGRAD_VERSION:
    raise ImportError(f"attn needs tinygrad=={TINYGRAD_VERSION} but {found} is installed: tinygrad's kernel API is alpha and changes by version")

check_version()
