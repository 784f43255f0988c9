"""Settings of the test run: kernels are lowered in the test process, for starting tinygrad's worker pool costs more than it gives (tests of it start
it); a worker of pytest has one core, so that threads of BLAS only wait for each other; and Python does not look for cycles of objects, which neither
lowering nor emulation leaves, for that is to walk over every UOp that is alive, nor does pytest when all tests are done. What names no device is on
the CPU, whatever drivers there are: one for OpenCL, say, which has an LLVM of its own and doesn't go with another in the same process."""
import gc, os
from collections.abc import Iterator
import pytest
os.environ.setdefault("PARALLEL", "0")
os.environ.setdefault("DEV", "CPU")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")    # numpy looks when it is imported
gc.disable()
from tinygrad.helpers import NOOPT, Context     # noqa: E402 - it asks for DEV when it is imported
from attn.emulator import plan                  # noqa: E402
from attn.emulator.listing import NOWHERE       # noqa: E402

def pytest_sessionfinish() -> None: gc.freeze()

@pytest.fixture(scope="session", autouse=True)
def offsets_of_our_kernels() -> Iterator[None]:
  """Of no kernel of attn that a test emulates may a part of an offset be below 0, as far as the program says (attn/emulator/offsets.py): the emulator
  looks at nothing as it runs."""
  own = plan.Plan.__init__
  def made(self:plan.Plan, *args:object, **named:object) -> None:
    own(self, *args, **named)     # type: ignore[arg-type]
    assert not self.name.startswith("attn_") or not self.offset_parts, f"{self.name}: {[u.arg.name for u in self.offset_parts]}"
  with pytest.MonkeyPatch.context() as m:
    m.setattr(plan.Plan, "__init__", made)
    yield

@pytest.fixture
def not_unrolled(request:pytest.FixtureRequest) -> Iterator[None]:
  """The kernels that tinygrad makes around those of attn, and those that these are compared with, are lowered as they are written: to unroll them as
  it does takes most of the time of a test that has many. On a real device they are optimized."""
  on_a_gpu = request.node.get_closest_marker("gpu") is not None
  with Context(NOOPT=NOOPT.value if on_a_gpu else 1): yield

@pytest.fixture
def without_places(monkeypatch:pytest.MonkeyPatch) -> None:
  """That the emulator stops at a planted fault is the point, and not which line of Python it names, for which it lowers the kernel once more."""
  monkeypatch.setattr(plan.Plan, "place", lambda self, u: NOWHERE)
