"""tinygrad's renderers for HIP and CUDA, with what our kernels need besides: the text of operations, the functions that they call, vector types.

`OperationsPrinter` is the last base of each class here, as in `class X(HIPRenderer, OperationsPrinter)`. tinygrad's class then prints the kernel and
hands what it has printed on to ours.
"""
from __future__ import annotations
import re
from typing import Any, ClassVar
from attn.chips.matrix import LaneSums, Matrix, Mma
from attn.ops import amd as amd, common as common, dropout as dropout, hopper as hopper, nvidia as nvidia   # they fill OPERATIONS
from attn.ops import softmax as softmax
from attn.ops.bounds import HELD, is_minimum, second_bounds
from attn.ops.branches import made_before_branches
from attn.ops.language import KernelText
from attn.ops.printer import bare, wrapped
from attn.ops.operation import Call, is_ours
from attn.tinygrad_compat import (VECTORS, AddrSpace, CStyleLanguage, CUDARenderer, HIPCCRenderer, HIPRenderer,
                                  NVCCRenderer, Ops, PatternMatcher, Target, UOp, UPat, adapt_cuda, dtypes,
                                  lower, shared_memory_text, spec_names, without_comgr)

MARK = "// a kernel of attn"   # the first line of a source that is ours: attn/compilers/renderer.py goes by it

# With SPEC=2 tinygrad prints each AST as Python and evaluates that, where it must find what the operations' arguments are made of.
spec_names.update({x.__name__: x for x in (Call, LaneSums, Matrix, Mma, softmax.RowLanes)})

# CUDA declares its vectors of up to four elements, clang none. (Up to clang 20 the attribute stands in typedefs only.)
VECTOR_ELEMENTS = {"float": "float", "uint": "unsigned", "int": "int", "short": "short", "ushort": "unsigned short", "half": "_Float16",
                   "bfloat": "__bf16"}
OPERATORS = {Ops.ADD: "+", Ops.SUB: "-", Ops.MUL: "*"}
LONGEST = 150   # a line of more is broken
POINTERS = {AddrSpace.GLOBAL: "const void*", AddrSpace.LOCAL: "void*"}
C_NAMES = {dtypes.uint: "unsigned", dtypes.int: "int", dtypes.float: "float", dtypes.bool: "bool"}

def readable(line:str) -> str:
  """A line that is too long in several."""
  return wrapped(line, line[:len(line) - len(line.lstrip())] + " "*6) if len(line) > LONGEST else line

def vector_types(text:str, before:list[str]) -> list[str]:
  """Declarations of the vector types that a HIP text names and that have none before."""
  declared = set(re.findall(r"^typedef .* (\w+) __attribute__", "\n".join(before), re.MULTILINE))
  names = set(re.findall(rf"\b(({'|'.join(VECTOR_ELEMENTS)})(\d+))\b", text))
  return [f"typedef {VECTOR_ELEMENTS[element]} {name} __attribute__((ext_vector_type({n})));"
          for name, element, n in sorted(names, key=lambda x: (x[1], int(x[2]))) if name not in declared]

def c_type(u:UOp) -> str:
  """The C type of an operand; of an address in registers that of what lies there, elsewhere none in particular."""
  name = C_NAMES.get(u.dtype, u.dtype.name)
  return POINTERS.get(u.addrspace, f"{name}*" if u.addrspace is AddrSpace.REG and u.op is Ops.INDEX else name)

class OperationsPrinter(CStyleLanguage):
  language: ClassVar[str]
  def learn(self) -> None:
    """From now on the renderer knows operations: its constructor's last step."""
    self.string_rewrite = print_calls + self.string_rewrite
  def _render(self, uops:list[UOp]) -> Any:
    self.operations = KernelText(self.language, self.target.arch)
    name, kernel, bufs = super()._render(uops)
    return name, ["\n".join(map(readable, lines.split("\n"))) for lines in kernel], bufs
  def call_text(self, x:UOp) -> str:
    types = [c_type(u) for u in x.src]
    return self.operations.call(x.arg, C_NAMES.get(x.dtype, x.dtype.name), types, [self[u] for u in x.src])
  def need_operator(self, x:UOp) -> None:
    """tinygrad prints an operator between vectors as it is: sees to it that there is one."""
    self.operations.printer().vector_operator(OPERATORS[x.op], *[c_type(u) for u in x.src])
  def declarations(self, prefix:list[str], bufs:Any, text:str) -> list[str]:
    """What the source needs that tinygrad declares only where a kernel computes with it."""
    raise NotImplementedError
  def render_kernel(self, function_name:str, kernel:list[str], bufs:Any, uops:list[UOp], prefix:list[str]|None=None) -> str:
    """The source. That of a kernel of ours, which its name or its vector types tell, begins with a mark; another kernel's stays as it is."""
    if not is_ours(function_name, uops):
      return super().render_kernel(function_name, kernel, bufs, uops, prefix)
    functions = list(self.operations.functions.values())
    needed = self.declarations(prefix or [], bufs, "\n".join([*functions, *kernel]))
    text = super().render_kernel(function_name, kernel, bufs, uops, [MARK, *(prefix or []), *needed, *functions])
    return "\n".join(readable(line) if f" {function_name}(" in line else line for line in text.split("\n"))

print_calls = PatternMatcher([
  (UPat((Ops.CUSTOM, Ops.CUSTOMI), name="x"), lambda ctx, x: ctx.call_text(x) if isinstance(x.arg, Call) else None),
  (UPat((Ops.ADD, Ops.SUB, Ops.MUL), name="x"), lambda ctx, x: ctx.need_operator(x) if x.dtype in VECTORS else None)])

# clang packs fp32 operations in pairs (v_pk_fma_f32), for which the matrix unit stands still: docs/timing.md
GLOBAL, GLOBAL_UNPACKED = "__attribute__((global))", '__attribute__((global, target("no-packed-fp32-ops")))'

print_guards = PatternMatcher([
  (UPat(Ops.WHERE, name="x"), lambda ctx, x: ctx.held_text(x) if x in ctx.held else None),
  (UPat(Ops.IF, name="x"), lambda ctx, x: ctx.branch_text(x) if x in ctx.before else None)])

class HipOperations(OperationsPrinter):
  language = "hip"
  def learn(self) -> None:
    super().learn()
    self.string_rewrite, self.held = print_guards + self.string_rewrite, set[UOp]()
  def _render(self, uops:list[UOp]) -> Any:
    name = next((u.arg.function_name for u in uops if u.op is Ops.SINK and u.arg is not None), "")
    self.held, self.before = second_bounds(uops) if is_ours(name, uops) else set[UOp](), made_before_branches(uops)
    return super()._render(uops)
  def held_text(self, x:UOp) -> str:
    """A maximum, or what stands for a minimum, whose bound clang does not know."""
    bound, of = x.src[1].src[0].arg, x.src[2]
    least = is_minimum(x)
    name = "not_above" if least else "not_below"
    self.operations.functions.setdefault(name, HELD[name])
    return f"~not_above({bare(self[of.src[0]])}, {~bound})" if least else f"not_below({bare(self[of])}, {bound})"
  def branch_text(self, x:UOp) -> str:
    """The beginning of a branch, behind what has to be made before it. clang takes an assembly text of HIP for one in which lanes meet: it stays out
    of branches, and so does what makes its operand."""
    return "\n".join([*(f'asm volatile("" :: "v"({self[value]}));' for value in self.before[x]), f"if ({self[x.src[0]]}) {{"])
  def render_kernel(self, function_name:str, kernel:list[str], bufs:Any, uops:list[UOp], prefix:list[str]|None=None) -> str:
    text = super().render_kernel(function_name, kernel, bufs, uops, prefix)
    apart = any(isinstance(u.arg, Call) and u.arg.name == "fp32_apart" for u in uops)
    return text.replace(GLOBAL, GLOBAL_UNPACKED, 1) if apart else text
  def declarations(self, prefix:list[str], bufs:Any, text:str) -> list[str]:
    used = {u.dtype for _, (u, _) in bufs}
    sixteen = {dtypes.half: "#define half _Float16",
               dtypes.bfloat16: f"typedef {'__bf16' if HIPRenderer.is_cdna4(self.target.arch) else 'unsigned short'} hip_bfloat16;"}
    return [line for dtype, line in sixteen.items() if dtype in used and line not in prefix] + vector_types(text, prefix)

class CudaOperations(OperationsPrinter):
  """And the compiler makes machine code, by `machine_code`."""
  language = "cuda"
  def declarations(self, prefix:list[str], bufs:Any, text:str) -> list[str]:
    """Where tinygrad includes no header for a type of 16 bits, the kernel has addresses of such numbers and computes with none: their size is enough,
    and a header takes NVRTC a tenth of a second."""
    used = {u.dtype for _, (u, _) in bufs}
    half, bfloat16 = "#include <cuda_fp16.h>", "#include <cuda_bf16.h>"
    unknown = {"half": dtypes.half in used and half not in prefix and bfloat16 not in prefix,      # cuda_bf16.h includes cuda_fp16.h
               "nv_bfloat16": dtypes.bfloat16 in used and bfloat16 not in prefix}
    return [f"struct {name} {{ unsigned short bits; }};" for name, needed in unknown.items() if needed]
  def render_buffer(self, x:UOp) -> str: return shared_memory_text(x, super().render_buffer(x))

class OperationsHIPRenderer(HIPRenderer, HipOperations):
  def __init__(self, target:Target, use_hipcc:bool=False):
    super().__init__(target, use_hipcc)
    self.learn()
class OperationsHIPCCRenderer(HIPCCRenderer, HipOperations):
  def __init__(self, target:Target):
    super().__init__(target)
    self.learn()
class OperationsHIPTextRenderer(OperationsHIPCCRenderer):
  """Prints HIP and compiles nothing."""
  def __init__(self, target:Target):
    with without_comgr(): super().__init__(target)

class OperationsCUDARenderer(CUDARenderer, CudaOperations):
  def __init__(self, target:Target):
    super().__init__(target)
    self.learn()
    self.compiler = machine_code(self.compiler, target.arch)
class OperationsNVCCRenderer(NVCCRenderer, CudaOperations):
  def __init__(self, target:Target):
    super().__init__(target)
    self.learn()
    self.compiler = machine_code(self.compiler, target.arch)

def machine_code(compiler:Any, arch:str) -> Any:
  """tinygrad's compiler for CUDA, made to give machine code and not PTX: NVRTC makes both for a chip that is named, and the driver would translate
  the PTX again. sm_90 gets code for sm_90a, which has wgmma; tinygrad takes what follows "sm_" for a number, so the renderer's target stays."""
  return type(compiler)("sm_90a" if arch == "sm_90" else arch, ptx=False, cache_key="cuda_machine_code")

def printer_of(arch:str) -> OperationsPrinter:
  """What prints kernels for `arch`, as HIP (gfx...) or CUDA (sm_...)."""
  if arch.startswith("sm_"): return OperationsNVCCRenderer(Target("CUDA", "NVCC", arch))
  return OperationsHIPTextRenderer(Target("AMD", "HIPCC", arch))

def render(sink:UOp, arch:str) -> str:
  """The HIP (gfx...) or CUDA (sm_...) source of a kernel's AST for `arch`; needs no compiler and no GPU."""
  renderer = printer_of(arch)
  return renderer.render(lower(sink, renderer))

def adapt(devices:str|tuple[str, ...]|None) -> None:
  """Makes those of `devices` that are CUDA print our kernels from now on."""
  adapt_cuda(devices, {CUDARenderer: OperationsCUDARenderer, NVCCRenderer: OperationsNVCCRenderer})
