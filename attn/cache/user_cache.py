"""attn's cache directory, for results that are expensive to make again: machine code, sources, and fastest tile descriptions. A file in this
directory is either complete or absent."""
from __future__ import annotations
import contextlib, hashlib, os, stat, sys, tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
# The directory is $XDG_CACHE_HOME/attn, or ~/.cache/attn (on macOS ~/Library/Caches/attn) if that variable is not set. A relative XDG_CACHE_HOME
# counts as not set: XDG Base Directory Specification 0.8, "All paths set in these environment variables must be absolute".
try: import fcntl
except ImportError: fcntl = None   # type: ignore[assignment] # Windows has none

MOST_BYTES = 1 << 28      # every file that attn writes here is smaller; a larger file is not attn's

def directory() -> Path:
  """Returns the path of the cache directory, which need not exist."""
  home = "~/Library/Caches" if sys.platform == "darwin" else "~/.cache"
  named = os.environ.get("XDG_CACHE_HOME", "").strip()
  return Path(named if os.path.isabs(named) else os.path.expanduser(home))/"attn"

def content_of(path:Path) -> bytes:
  """Returns the content of a regular file of fewer than MOST_BYTES bytes; raises OSError for anything else."""
  # Opening a pipe or a device does not block.
  with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as f:
    found = os.fstat(f.fileno())
    if not stat.S_ISREG(found.st_mode): raise OSError(f"{path} is not a regular file")
    if found.st_size >= MOST_BYTES: raise OSError(f"{path} has {found.st_size} bytes: must have fewer than {MOST_BYTES}")
    return f.read(MOST_BYTES)

def write(path:Path, data:bytes) -> None:
  """Replaces the content of a file by `data` in one step: another process sees either the old content or the new content."""
  # No temporary file is left behind, even when the write is interrupted.
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
  """Context in which no other process changes the file `path`."""
  # The lock is a second file beside `path`, which is not deleted. On systems without flock the context protects nothing.
  path.parent.mkdir(parents=True, exist_ok=True)
  with open(os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o666), "rb") as lock:
    if fcntl is not None: fcntl.flock(lock, fcntl.LOCK_EX)
    yield

def _place(kind:str, key:tuple[str, ...]) -> Path:
  return directory()/"compilers"/f"{hashlib.sha256(chr(0).join((kind, *key)).encode()).hexdigest()}.{kind}"

def is_kept(kind:str, key:tuple[str, ...]) -> bool:
  """Returns whether the cache directory has a file, perhaps damaged, with the key `key` for the `kind` of data, such as "program"."""
  return os.path.isfile(_place(kind, key))     # also False if the directory cannot be entered

def kept(kind:str, key:tuple[str, ...], make:Callable[[], bytes]) -> bytes:
  """Returns the bytes that the cache keeps with the key `key` for the `kind` of data, such as "program"; for a missing key, `make` makes the
  bytes."""
  path = _place(kind, key)
  # A cache that can't be read or written is ignored.
  with contextlib.suppress(OSError):
    # The file begins with the SHA-256 of the data, so a damaged file counts as missing.
    digest, data = (found := content_of(path))[:32], found[32:]
    if hashlib.sha256(data).digest() == digest: return data
  data = make()
  with contextlib.suppress(OSError): write(path, hashlib.sha256(data).digest() + data)
  return data
