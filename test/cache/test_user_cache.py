"""Tests of the cache directory, and of cache files that other processes write, that are damaged, or that are no regular files."""
import multiprocessing, os
from dataclasses import replace
from pathlib import Path
import pytest
from attn.cache import user_cache
from attn.chips import get_chip
from attn.cache import tuned
from attn.problem import Problem

def test_the_directory_is_where_platformdirs_has_it(monkeypatch, tmp_path):
  platformdirs = pytest.importorskip("platformdirs")
  for value in (str(tmp_path), "", None):
    if value is None: monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    else: monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert user_cache.directory() == Path(platformdirs.user_cache_dir("attn"))

@pytest.mark.parametrize("value", ["relative/folder", ".", "~/cache", " "])
def test_a_relative_directory_counts_as_not_set(monkeypatch, value):
  monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
  usual = user_cache.directory()
  monkeypatch.setenv("XDG_CACHE_HOME", value)
  assert user_cache.directory() == usual and usual.is_absolute()

def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path):
  (tmp_path/"there").mkdir()
  with pytest.raises(OSError): user_cache.write(tmp_path/"there", b"x")    # a directory has this name
  assert [f.name for f in tmp_path.iterdir()] == ["there"]

def test_an_interrupted_write_leaves_what_was_there(tmp_path, monkeypatch):
  (tmp_path/"file").write_bytes(b"old")
  def interrupted(*paths): raise KeyboardInterrupt
  monkeypatch.setattr(os, "replace", interrupted)
  with pytest.raises(KeyboardInterrupt): user_cache.write(tmp_path/"file", b"new")
  assert [(f.name, f.read_bytes()) for f in tmp_path.iterdir()] == [("file", b"old")]

# ***** irregular files *****

def pipe(path:Path) -> None: os.mkfifo(path)
def device(path:Path) -> None: path.symlink_to("/dev/zero")
def huge(path:Path) -> None:
  with open(path, "wb") as f: f.truncate(user_cache.MOST_BYTES)
ODD = pytest.mark.parametrize("make", [pipe, device, huge])

@ODD
def test_irregular_files_are_replaced(make, tmp_path, monkeypatch):
  # attn does not read a cache entry that is no regular file or that is too large. It computes the content and replaces the entry.
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  user_cache.kept("source", ("key",), lambda: b"first")
  file, = (f for f in tmp_path.rglob("*") if f.is_file())
  file.unlink()
  make(file)
  assert user_cache.kept("source", ("key",), lambda: b"second") == b"second"
  assert user_cache.kept("source", ("key",), lambda: b"third") == b"second"

@pytest.fixture
def stamped(monkeypatch) -> None: monkeypatch.setattr(tuned, "stamp", lambda: {"compiler": "clang version 22"})

P = Problem(B=2, H=16, Hkv=16, Sq=4096, Sk=4096, D=128, Dv=128, softmax_scale=0.1)
ARCH = replace(get_chip("gfx942"), tuned=True)

@ODD
def test_irregular_files_hold_no_tuned_tiles(make, tmp_path, monkeypatch, stamped, recwarn):
  monkeypatch.setattr(tuned, "path", lambda: tmp_path/"tune.json")
  tuned.warn.cache_clear()
  make(tmp_path/"tune.json")
  assert not tuned.winner(P, ARCH)
  warning, = recwarn.list
  assert str(tmp_path/"tune.json") in str(warning.message)
  tuned.store(P, ARCH, None, 1e-3)
  assert tuned.load()["gfx942"]

# ***** several processes *****

def store_some(folder:Path, first:int) -> None:
  os.environ["XDG_CACHE_HOME"] = str(folder)
  for n in range(first, first + 8): tuned.store(replace(P, Sq=1 << n % 8, Sk=1 << n//8), ARCH, None, 1e-3)

def test_processes_that_tune_at_a_time_keep_each_others_winners(tmp_path, monkeypatch, stamped):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  processes = [multiprocessing.get_context("fork").Process(target=store_some, args=(tmp_path, 8*i)) for i in range(6)]
  for x in processes: x.start()
  for x in processes: x.join()
  assert [x.exitcode for x in processes] == [0]*6 and len(tuned.load()["gfx942"]) == 48
