"""Settings of the test run: kernels are lowered in the test process, for starting tinygrad's worker pool costs more than it gives (tests of it start
it); a worker of pytest has one core, so that threads of BLAS only wait for each other; and Python does not look for cycles of objects, which neither
lowering nor emulation leaves, for that is to walk over every UOp that is alive. What names no device is on the CPU, whatever drivers there are: one
for OpenCL, say, which has an LLVM of its own and doesn't go with another in the same process."""
import gc, os
os.environ.setdefault("PARALLEL", "0")
os.environ.setdefault("DEV", "CPU")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")    # numpy looks when it is imported
gc.disable()
