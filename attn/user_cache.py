"""The directory in which attn keeps what is dear to find out again (machine code, sources, tiles that were timed), and files in it that are whole or
absent.

It is the user's cache directory: $XDG_CACHE_HOME/attn, or ~/.cache/attn (on macOS ~/Library/Caches/attn) where that is not set.
"""
from __future__ import annotations
import contextlib, hashlib, os, sys, tempfile
from collections.abc import Callable
from pathlib import Path

def directory() -> Path:
  """Where everything is kept. It need not exist."""
  home = "~/Library/Caches" if sys.platform == "darwin" else "~/.cache"
  return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME", "").strip() or home))/"attn"

def write(path:Path, data:bytes) -> None:
  """Replaces the file at once, so that another process sees the old one or the new one. Raises OSError where it can't be written."""
  path.parent.mkdir(parents=True, exist_ok=True)
  with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as f:
    try:
      f.write(data)
      f.close()
      os.replace(f.name, path)
    except OSError:
      os.unlink(f.name)
      raise

def _place(kind:str, key:tuple[str, ...]) -> Path:
  return directory()/"compilers"/f"{hashlib.sha256(chr(0).join((kind, *key)).encode()).hexdigest()}.{kind}"

def is_kept(kind:str, key:tuple[str, ...]) -> bool:
  """Whether `kept` has a file of this kind and key; it may be damaged."""
  return os.path.isfile(_place(kind, key))     # False, too, where the directory cannot be entered

def kept(kind:str, key:tuple[str, ...], make:Callable[[], bytes]) -> bytes:
  """What `make` gives, made once for a `kind` and `key`. It is kept behind its SHA-256: a damaged file is as good as none, and so is a cache that
  can't be read or written."""
  path = _place(kind, key)
  with contextlib.suppress(OSError):
    digest, data = (found := path.read_bytes())[:32], found[32:]
    if hashlib.sha256(data).digest() == digest: return data
  data = make()
  with contextlib.suppress(OSError): write(path, hashlib.sha256(data).digest() + data)
  return data
