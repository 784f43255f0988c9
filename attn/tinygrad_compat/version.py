"""Checks tinygrad's version before any part of tinygrad is imported: another version fails with one sentence."""
from __future__ import annotations
import importlib.metadata

TINYGRAD_VERSION = "0.14.0"

def check_version() -> None:
  """Raises ImportError if the installed tinygrad is not the version that attn was written for."""
  try: found = importlib.metadata.version("tinygrad")
  except importlib.metadata.PackageNotFoundError: found = "none"
  if found != TINYGRAD_VERSION:
    raise ImportError(f"attn needs tinygrad=={TINYGRAD_VERSION} but {found} is installed: tinygrad's kernel API is alpha and changes by version")

check_version()
