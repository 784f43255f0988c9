"""Settings of the test run."""
import collections, gc, hashlib, os
from collections.abc import Iterator
import pytest
# Kernels are lowered in the test process, because tinygrad's worker pool costs more time than it saves here; tests of the pool start it themselves.
# BLAS uses one thread, because a pytest worker has one core. Python's cycle collector is off: lowering and emulation leave no cycles, and the
# collector would walk over every living UOp. pytest itself collects when all tests are done; `gc.freeze` then leaves it nothing to walk over. The
# default device is CPU, whatever drivers exist: an OpenCL driver, for example, may bring its own LLVM, which conflicts with another LLVM in the same
# process.

os.environ.setdefault("PARALLEL", "0")
os.environ.setdefault("DEV", "CPU")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")    # numpy reads this when it is imported
gc.disable()
from tinygrad.helpers import NOOPT, Context     # noqa: E402 - tinygrad reads DEV when it is imported
from attn.calls.kept_graphs import recipes      # noqa: E402
from attn.emulator import plan                  # noqa: E402
from attn.emulator.listing import NOWHERE       # noqa: E402
from attn.tinygrad_compat import ast_of         # noqa: E402

def pytest_sessionfinish() -> None: gc.freeze()

@pytest.hookimpl(tryfirst=True)
def pytest_configure(config:pytest.Config) -> None:
  # Lets a worker of pytest-xdist that has no test left take tests of another worker.
  # So all workers end at about the same time.
  if getattr(config.option, "dist", "no") == "load": config.option.dist = "worksteal"

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items:list[pytest.Item]) -> None:
  # Applies the mark `sample(n)` of a test: all but n of its cases get the mark `thorough`.
  # A checksum of their names chooses the n cases.
  cases = collections.defaultdict[str, list[pytest.Item]](list)
  for item in items:
    if item.get_closest_marker("sample") is not None and not any(map(item.get_closest_marker, ("gpu", "thorough", "compilers"))):
      cases[item.nodeid.split("[")[0]].append(item)
  for found in cases.values():
    n = found[0].get_closest_marker("sample").args[0]      # type: ignore[union-attr]
    for item in sorted(found, key=lambda x: hashlib.sha256(x.name.encode()).digest())[n:]: item.add_marker(pytest.mark.thorough)

@pytest.fixture(scope="session", autouse=True)
def offsets_of_our_kernels() -> Iterator[None]:
  # Fails a test that emulates an attn kernel whose AMD buffer instructions have an offset with a term that may be negative.
  # A GPU may then load zeros (attn/emulator/offsets.py says why), but the emulator loads the right numbers. The terms are checked when the emulator
  # reads the lowered program.
  own = plan.Plan.__init__
  def made(self:plan.Plan, *args:object, **named:object) -> None:
    own(self, *args, **named)     # type: ignore[arg-type]
    assert not self.name.startswith("attn_") or not self.offset_terms, f"{self.name}: {[u.arg.name for u in self.offset_terms]}"
  with pytest.MonkeyPatch.context() as m:
    m.setattr(plan.Plan, "__init__", made)
    yield

@pytest.fixture(autouse=True)
def no_kept_kernels() -> None:
  # Clears attn's caches of kernels and of graphs before each test.
  # A test that changes code would otherwise get what the old code made.
  ast_of.cache_clear()
  recipes.cache_clear()

@pytest.fixture
def not_unrolled(request:pytest.FixtureRequest) -> Iterator[None]:
  # Makes tinygrad lower its own kernels without unrolling loops, except on real devices.
  # Unrolling takes most of the time of a test with many kernels.
  on_a_gpu = request.node.get_closest_marker("gpu") is not None
  with Context(NOOPT=NOOPT.value if on_a_gpu else 1): yield

@pytest.fixture
def without_places(monkeypatch:pytest.MonkeyPatch) -> None:
  # Switches off the emulator's search for the Python line that made a faulty operation, for tests that need only the fault.
  # The search lowers the kernel a second time.
  monkeypatch.setattr(plan.Plan, "place", lambda self, u: NOWHERE)
