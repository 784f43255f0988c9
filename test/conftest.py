"""Settings of the test run: kernels are lowered in the test process, for starting tinygrad's worker pool costs more than it gives (tests of it start
it)."""
import os
os.environ.setdefault("PARALLEL", "0")
