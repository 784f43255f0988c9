"""attn's cache directory, for results that are expensive to make again (machine code, sources, fastest tile descriptions). A file in this directory
is either complete or absent.

The directory is $XDG_CACHE_HOME/attn, or ~/.cache/attn (on macOS ~/Library/Caches/attn) if that variable is not set. A relative XDG_CACHE_HOME counts
as not set: XDG Base Directory Specification 0.8, "All paths set in these environment variables must be absolute"."""
from __future__ import annotations
import contextlib, hashlib, os, stat, sys, tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
try: import fcntl
except ImportError: fcntl = None   # type: ignore[assignment] # Windows has none

MOST_BYTES = 1 << 28      # every file that attn writes here is smaller; a larger file is not attn's

def directory() -> Path:
  """Path of the cache directory, which need not exist."""
  home = "~/Library/Caches" if sys.platform == "darwin" else "~/.cache"
  named = os.environ.get("XDG_CACHE_HOME", "").strip()
  return Path(named if os.path.isabs(named) else os.path.expanduser(home))/"attn"

def content_of(path:Path) -> bytes:
  """Returns the content of a regular file. Never blocks: raises OSError at once if the name belongs to a pipe or a device. Also raises OSError if the
  file does not exist, or has MOST_BYTES or more."""
  with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as f:
    found = os.fstat(f.fileno())
    if not stat.S_ISREG(found.st_mode): raise OSError(f"{path} is not a regular file")
    if found.st_size >= MOST_BYTES: raise OSError(f"{path} has {found.st_size} bytes: must have fewer than {MOST_BYTES}")
    return f.read(MOST_BYTES)

def write(path:Path, data:bytes) -> None:
  """Makes `data` the content of the file `path`, in one step: another process sees either the old file or the new file. Leaves no temporary file
  behind, even when the write is interrupted. Raises OSError if the file can't be written."""
  path.parent.mkdir(parents=True, exist_ok=True)
  with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as f:
    try:
      f.write(data)
      f.close()
      os.replace(f.name, path)
    except BaseException:         # includes KeyboardInterrupt
      os.unlink(f.name)
      raise

@contextlib.contextmanager
def only_one(path:Path) -> Iterator[None]:
  """Context in which no other process changes the file `path`: only one process at a time can be in the context of a file. In the context, the
  process may read, change and write the file. On systems without flock the context protects nothing. The lock is a second file beside `path`, which
  is not deleted. Raises OSError if the lock file can't be made."""
  path.parent.mkdir(parents=True, exist_ok=True)
  with open(os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o666), "rb") as lock:
    if fcntl is not None: fcntl.flock(lock, fcntl.LOCK_EX)
    yield

def _place(kind:str, key:tuple[str, ...]) -> Path:
  return directory()/"compilers"/f"{hashlib.sha256(chr(0).join((kind, *key)).encode()).hexdigest()}.{kind}"

def is_kept(kind:str, key:tuple[str, ...]) -> bool:
  """Tells whether the cache contains a file for this `kind` of data (such as "program") and this `key`. The file may be damaged."""
  return os.path.isfile(_place(kind, key))     # also False if the directory cannot be entered

def kept(kind:str, key:tuple[str, ...], make:Callable[[], bytes]) -> bytes:
  """Returns the data for a `kind` (such as "program") and a `key` from the cache. If the cache does not have the data, `make` makes the data, which
  are then written to the cache. The file begins with the SHA-256 of the data, so a damaged file counts as missing. A cache that can't be read or
  written is ignored."""
  path = _place(kind, key)
  with contextlib.suppress(OSError):
    digest, data = (found := content_of(path))[:32], found[32:]
    if hashlib.sha256(data).digest() == digest: return data
  data = make()
  with contextlib.suppress(OSError): write(path, hashlib.sha256(data).digest() + data)
  return data
