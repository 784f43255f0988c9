"""The directory in which attn keeps what is dear to find out again (machine code, sources, tiles that were timed), and files in it that are whole or
absent.

It is the user's cache directory: $XDG_CACHE_HOME/attn, or ~/.cache/attn (on macOS ~/Library/Caches/attn) where that is not set. A relative
XDG_CACHE_HOME counts as not set: XDG Base Directory Specification 0.8, "All paths set in these environment variables must be absolute".
"""
from __future__ import annotations
import contextlib, hashlib, os, stat, sys, tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
try: import fcntl
except ImportError: fcntl = None   # type: ignore[assignment] # Windows has none

MOST_BYTES = 1 << 28      # a file of the cache has fewer; what is larger is none of ours

def directory() -> Path:
  """Where everything is kept. It need not exist."""
  home = "~/Library/Caches" if sys.platform == "darwin" else "~/.cache"
  named = os.environ.get("XDG_CACHE_HOME", "").strip()
  return Path(named if os.path.isabs(named) else os.path.expanduser(home))/"attn"

def content_of(path:Path) -> bytes:
  """Returns the content of a regular file, at once: nothing else that may have its name, a pipe or a device, is waited for or read. Raises OSError
  where there is no such file, or one of MOST_BYTES or more."""
  with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as f:
    found = os.fstat(f.fileno())
    if not stat.S_ISREG(found.st_mode): raise OSError(f"{path} is no regular file")
    if found.st_size >= MOST_BYTES: raise OSError(f"{path} has {found.st_size} bytes: a file of this cache has less than {MOST_BYTES}")
    return f.read(MOST_BYTES)

def write(path:Path, data:bytes) -> None:
  """Replaces the file at once, so that another process sees the old one or the new one. Leaves no other file behind, also where it is interrupted.
  Raises OSError where the file can't be written."""
  path.parent.mkdir(parents=True, exist_ok=True)
  with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as f:
    try:
      f.write(data)
      f.close()
      os.replace(f.name, path)
    except BaseException:         # KeyboardInterrupt is one
      os.unlink(f.name)
      raise

@contextlib.contextmanager
def only_one(path:Path) -> Iterator[None]:
  """Lets one process at a time, on systems that have flock, read a file, change what it says and write it. The lock is a file beside it, which stays.
  Raises OSError where that can't be made."""
  path.parent.mkdir(parents=True, exist_ok=True)
  with open(os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o666), "rb") as lock:
    if fcntl is not None: fcntl.flock(lock, fcntl.LOCK_EX)
    yield

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
    digest, data = (found := content_of(path))[:32], found[32:]
    if hashlib.sha256(data).digest() == digest: return data
  data = make()
  with contextlib.suppress(OSError): write(path, hashlib.sha256(data).digest() + data)
  return data
