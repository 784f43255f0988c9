"""tinygrad's renderers for HIP and CUDA, extended by the operations and vector types of attn's kernels. Begin with `render`."""
from __future__ import annotations
import re
from typing import Any, ClassVar
from attn.chips.matrix import LaneSums, Matrix, Mma
from attn.ops import amd as amd, atomics as atomics, common as common, dropout as dropout, hopper as hopper   # imported to fill OPERATIONS
from attn.ops import nvidia as nvidia, softmax as softmax
from attn.ops.bounds import HELD, is_minimum, second_bounds
from attn.ops.branches import made_before_branches
from attn.ops.language import KernelText
from attn.ops.printer import bare, wrapped
from attn.ops.operation import Call, is_ours
from attn.tinygrad_compat import (VECTORS, AddrSpace, CStyleLanguage, CUDARenderer, HIPCCRenderer, HIPRenderer,
                                  NVCCRenderer, Ops, PatternMatcher, Target, UOp, UPat, adapt_cuda, dtypes,
                                  lower, shared_memory_text, spec_names, without_comgr)

# Each renderer has two bases, as in `class X(HIPRenderer, HipOperations)`. tinygrad's class comes first. Its method `render_kernel` collects the
# lines that stand before the kernel, and passes them on to `OperationsPrinter`, the base class of `HipOperations` and `CudaOperations`.
# `OperationsPrinter` adds attn's functions and declarations to these lines.

MARK = "// a kernel of attn"   # first line of every source of attn: attn/compilers/renderer.py recognises it

# With SPEC=2 tinygrad prints each AST as Python and evaluates it: it must find the classes of the operations' arguments there.
spec_names.update({x.__name__: x for x in (Call, LaneSums, Matrix, Mma, softmax.RowLanes)})

# C++ types of the elements of the vector types that a HIP text declares. CUDA declares vectors of up to four elements itself, clang declares none.
# (Up to clang 20 the attribute of vector types is allowed in typedefs only.)
VECTOR_ELEMENTS = {"float": "float", "uint": "unsigned", "int": "int", "short": "short", "ushort": "unsigned short", "half": "_Float16",
                   "bfloat": "__bf16"}
OPERATORS = {Ops.ADD: "+", Ops.SUB: "-", Ops.MUL: "*"}
LONGEST = 150   # a longer line of the source is broken
POINTERS = {AddrSpace.GLOBAL: "const void*", AddrSpace.LOCAL: "void*"}
C_NAMES = {dtypes.uint: "unsigned", dtypes.int: "int", dtypes.float: "float", dtypes.bool: "bool"}

def readable(line:str) -> str:
  """Returns a line of source, broken after commas if it is longer than LONGEST."""
  return wrapped(line, line[:len(line) - len(line.lstrip())] + " "*6) if len(line) > LONGEST else line

def vector_types(text:str, before:list[str]) -> list[str]:
  """Returns declarations of the vector types that appear in a HIP text and are not declared in the lines `before`."""
  declared = set(re.findall(r"^typedef .* (\w+) __attribute__", "\n".join(before), re.MULTILINE))
  names = set(re.findall(rf"\b(({'|'.join(VECTOR_ELEMENTS)})(\d+))\b", text))
  return [f"typedef {VECTOR_ELEMENTS[element]} {name} __attribute__((ext_vector_type({n})));"
          for name, element, n in sorted(names, key=lambda x: (x[1], int(x[2]))) if name not in declared]

def c_type(u:UOp) -> str:
  """Returns the C type of an operand: for a pointer to registers the type of one register, for other pointers void."""
  name = C_NAMES.get(u.dtype, u.dtype.name)
  return POINTERS.get(u.addrspace, f"{name}*" if u.addrspace is AddrSpace.REG and u.op is Ops.INDEX else name)

class OperationsPrinter(CStyleLanguage):
  language: ClassVar[str]
  def learn(self) -> None:
    """Makes this renderer render attn's operations, too. Each subclass calls it at the end of its constructor."""
    self.string_rewrite = print_calls + self.string_rewrite
  def _render(self, uops:list[UOp]) -> Any:
    self.operations = KernelText(self.language, self.target.arch)
    name, kernel, bufs = super()._render(uops)
    return name, ["\n".join(map(readable, lines.split("\n"))) for lines in kernel], bufs
  def call_text(self, x:UOp) -> str:
    types = [c_type(u) for u in x.src]
    return self.operations.call(x.arg, C_NAMES.get(x.dtype, x.dtype.name), types, [self[u] for u in x.src])
  def need_operator(self, x:UOp) -> None:
    """Declares the C++ operator, such as +, that the UOp `x` applies to vectors, if the language has none for vectors."""
    # tinygrad renders its own operators unchanged and expects the language to define them on vectors
    self.operations.printer().vector_operator(OPERATORS[x.op], *[c_type(u) for u in x.src])
  def declarations(self, prefix:list[str], bufs:Any, text:str) -> list[str]:
    """Returns declarations of types that the source `text` uses and that tinygrad's lines `prefix` do not declare."""
    # tinygrad declares a type only if a kernel computes with it
    raise NotImplementedError
  def render_kernel(self, function_name:str, kernel:list[str], bufs:Any, uops:list[UOp], prefix:list[str]|None=None) -> str:
    """Returns the source of a kernel. A kernel of attn gets the line MARK, and the C++ functions of its operations, before it."""
    if not is_ours(function_name, uops):
      return super().render_kernel(function_name, kernel, bufs, uops, prefix)
    functions = list(self.operations.functions.values())
    needed = self.declarations(prefix or [], bufs, "\n".join([*functions, *kernel]))
    text = super().render_kernel(function_name, kernel, bufs, uops, [MARK, *(prefix or []), *needed, *functions])
    return "\n".join(readable(line) if f" {function_name}(" in line else line for line in text.split("\n"))

print_calls = PatternMatcher([
  (UPat((Ops.CUSTOM, Ops.CUSTOMI), name="x"), lambda ctx, x: ctx.call_text(x) if isinstance(x.arg, Call) else None),
  (UPat((Ops.ADD, Ops.SUB, Ops.MUL), name="x"), lambda ctx, x: ctx.need_operator(x) if x.dtype in VECTORS else None)])

# clang packs fp32 operations in pairs (v_pk_fma_f32), and the matrix unit stands still during such a pair: docs/timing.md
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
    """Returns the text of a maximum or minimum of a number and a constant, as a call that clang cannot see through."""
    bound, of = x.src[1].src[0].arg, x.src[2]
    least = is_minimum(x)
    name = "not_above" if least else "not_below"
    self.operations.functions.setdefault(name, HELD[name])
    # a minimum min(x, n) comes as ~max(~x, ~n): `x` is the maximum in it
    return f"~not_above({bare(self[of.src[0]])}, {~bound})" if least else f"not_below({bare(self[of])}, {bound})"
  def branch_text(self, x:UOp) -> str:
    """Returns the "if" line of a branch, after inline assembly that makes clang compute values before the branch if they need all lanes."""
    # clang takes inline assembly in HIP for an operation across lanes, so it moves neither the assembly nor the values into the branch
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
  """Base class of the CUDA renderers."""
  language = "cuda"
  def declarations(self, prefix:list[str], bufs:Any, text:str) -> list[str]:
    """Returns declarations of the 16-bit types that the source uses and tinygrad does not declare, as structs of 2 bytes."""
    # A struct is enough, because a kernel only has pointers to such a type: tinygrad includes the type's header if a kernel computes with it. A
    # header would take NVRTC a tenth of a second.
    used = {u.dtype for _, (u, _) in bufs}
    half, bfloat16 = "#include <cuda_fp16.h>", "#include <cuda_bf16.h>"
    unknown = {"half": dtypes.half in used and half not in prefix and bfloat16 not in prefix,      # cuda_bf16.h includes cuda_fp16.h
               "nv_bfloat16": dtypes.bfloat16 in used and bfloat16 not in prefix}
    return [f"struct {name} {{ unsigned short bits; }};" for name, needed in unknown.items() if needed]
  def render_buffer(self, x:UOp) -> str: return shared_memory_text(x, super().render_buffer(x))
  def render_kernel(self, function_name:str, kernel:list[str], bufs:Any, uops:list[UOp], prefix:list[str]|None=None) -> str:
    """Returns the source of a kernel, with a pragma before each loop that the compiler should unroll (`Allocator.range`)."""
    # tinygrad writes the range of such a loop as in `Lidx6_m4`
    lines = [re.sub(r"^( *)(?=for \(int \w+idx\d+_m(\d+) )", r"\1#pragma unroll \2\n\1", line) for line in kernel]
    return super().render_kernel(function_name, lines, bufs, uops, prefix)

class OperationsHIPRenderer(HIPRenderer, HipOperations):
  def __init__(self, target:Target, use_hipcc:bool=False):
    super().__init__(target, use_hipcc)
    self.learn()
class OperationsHIPCCRenderer(HIPCCRenderer, HipOperations):
  def __init__(self, target:Target):
    super().__init__(target)
    self.learn()
class OperationsHIPTextRenderer(OperationsHIPCCRenderer):
  """Renderer for HIP that only makes text and has no compiler."""
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
  """Returns tinygrad's CUDA compiler, set to make machine code for `arch` instead of PTX, NVIDIA's intermediate code."""
  # The driver would have to compile PTX once more. sm_90a has wgmma; the renderer's target stays sm_90, because tinygrad expects a number after
  # "sm_".
  return type(compiler)("sm_90a" if arch == "sm_90" else arch, ptx=False, cache_key="cuda_machine_code")

def printer_of(arch:str) -> OperationsPrinter:
  """Returns the renderer of kernels for `arch`, as HIP (gfx...) or CUDA (sm_...)."""
  if arch.startswith("sm_"): return OperationsNVCCRenderer(Target("CUDA", "NVCC", arch))
  return OperationsHIPTextRenderer(Target("AMD", "HIPCC", arch))

def render(sink:UOp, arch:str) -> str:
  """Returns the source of a kernel, given as an AST: HIP if `arch` is gfx..., CUDA if it is sm_.... Needs no compiler and no GPU."""
  renderer = printer_of(arch)
  return renderer.render(lower(sink, renderer))

def adapt(devices:str|tuple[str, ...]|None) -> None:
  """Makes the CUDA devices among `devices` use attn's renderers from now on, in the whole process."""
  adapt_cuda(devices, {CUDARenderer: OperationsCUDARenderer, NVCCRenderer: OperationsNVCCRenderer})
