"""Prints the HIP program that tinygrad's renderer makes for a kernel; needs no GPU and no compiler. An argument, for example gfx1201, selects the
chip."""
import sys
from tinygrad import UOp, dtypes
from attn import flash_attention_fn
from attn.ops.renderers import render

arch = sys.argv[1] if len(sys.argv) > 1 else "gfx942"
o, q, k, v = (UOp.placeholder((1, 8, 1024, 128), dtypes.half, slot) for slot in range(4))
source = render(flash_attention_fn(causal=True, arch=arch)(o, q, k, v).sink, arch)
print(source)
print(f"// {len(source.splitlines())} lines for {arch}, {source.count('_mfma_') + source.count('_wmma_')} of them matrix instructions")
