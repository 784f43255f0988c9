"""Everything that attn imports from tinygrad; no other package of attn imports tinygrad. tinygrad's kernel API is alpha, so attn requires one
version: with another one, attn's import fails with one sentence."""
from attn.tinygrad_compat.version import TINYGRAD_VERSION   # first, because it checks tinygrad's version
from attn.tinygrad_compat import release as release     # second, because it checks what the other modules import
# test/tinygrad_compat/test_compat.py checks every name and signature used here. Some names are wrapped: uops.py constructs UOps, lowering.py lowers
# kernels, caches.py handles tinygrad's caches of kernels, draws.py draws random numbers, patches.py and cuda.py change tinygrad's behaviour,
# functions.py does so for `@function`, recipes.py makes an expression again of other inputs, tensors.py and devices.py query tensors and devices,
# timers.py times kernels.
with release.imports_of_the_release():
  from tinygrad import Device, Tensor, TinyJit
  from tinygrad.device import Allocator, Buffer, BufferSpec, CompileError, Compiled, Compiler, Program, TinyELF
  from tinygrad.dtype import AddrSpace, DType, dtypes, strong_dtype
  from tinygrad.engine.realize import capturing
  from tinygrad.helpers import ALLOW_TF32, CCACHE, Context, DEBUG, DEV, GlobalCounters, TRAINING, Target, VIZ
  from tinygrad.renderer import Estimates, Renderer
  from tinygrad.renderer.cstyle import CStyleLanguage, CUDARenderer, HIPCCRenderer, HIPRenderer, NVCCRenderer
  from tinygrad.runtime.support.elf import elf_loader
  from tinygrad.uop.ops import AxisType, GroupOp, KernelInfo, Ops, PatternMatcher, ProgramInfo, UOp, UPat, exec_alu
  from attn.tinygrad_compat.caches import ast_of, forget_oldest_kernels, launch_of, program_key, program_of_launch
  from attn.tinygrad_compat.compile_threads import compile_at_once, in_threads, lower_few_kernels_here
  from attn.tinygrad_compat.cuda import adapt_cuda, dynamic_shared_name, shared_memory_text, with_selected_inputs
  from attn.tinygrad_compat.devices import (DeviceAbilities, c_compiler, card_facts, comgr_compiler, comgr_version, decode_instruction, device_of,
                                            double_transcendentals, opened_devices, without_comgr, workgroups_of)
  from attn.tinygrad_compat.draws import rand_then, realize_counters
  from attn.tinygrad_compat.functions import copied, inside_function, new_buffer, wanted_of
  from attn.tinygrad_compat.lowering import Places, lower, lowered_with_places, made_with_places, statements, tinygrad_folder
  from attn.tinygrad_compat.patches import (Rerouted, ToProgram, around_gradients, equality_as_uops, levels_to_caller, maker_of_latent_cache,
                                            method_of_tinygrad, programs_through, survive_a_damaged_cache, watch_kernels)
  from attn.tinygrad_compat.recipes import Recipe, divided_inputs, next_buffer, recipe_of
  from attn.tinygrad_compat.tensors import differentiated, put_into_tensors, written_to
  from attn.tinygrad_compat.timers import compiled, cuda_graph_seconds, cuda_seconds, device_seconds, foreign_cuda_context, make_current, run_alone
  from attn.tinygrad_compat.uops import (VECTORS, VectorDType, also_after, as_uint64, begins_at, bits_under_views, buffer_under, committed,
                                         copy_call, flat_element, new_uop, on_top, remembered, spec_names, vector_dtype, view_of_placeholder,
                                         with_accesses, with_outputs, with_params)

__all__ = ["ALLOW_TF32", "AddrSpace", "Allocator", "AxisType", "Buffer", "BufferSpec", "CCACHE", "CStyleLanguage", "CUDARenderer", "CompileError",
           "Compiled", "Compiler", "Context", "DEBUG", "DEV", "DType", "Device", "DeviceAbilities", "Estimates", "GlobalCounters", "GroupOp",
           "HIPCCRenderer", "HIPRenderer", "KernelInfo", "NVCCRenderer", "Ops", "PatternMatcher", "Places", "Program", "ProgramInfo", "Recipe",
           "Renderer", "Rerouted", "TINYGRAD_VERSION", "TRAINING", "Target", "Tensor", "TinyELF", "TinyJit", "ToProgram", "UOp", "UPat", "VECTORS",
           "VIZ", "VectorDType", "adapt_cuda", "also_after", "around_gradients", "as_uint64", "ast_of", "begins_at", "bits_under_views",
           "buffer_under", "c_compiler", "capturing", "card_facts", "comgr_compiler", "comgr_version", "committed", "compile_at_once", "compiled",
           "copied", "copy_call", "cuda_graph_seconds", "cuda_seconds", "decode_instruction", "device_of", "device_seconds", "differentiated",
           "divided_inputs", "double_transcendentals", "dtypes", "dynamic_shared_name", "elf_loader", "equality_as_uops", "exec_alu",
           "flat_element", "foreign_cuda_context", "forget_oldest_kernels", "in_threads", "inside_function", "launch_of", "levels_to_caller",
           "lower", "lower_few_kernels_here", "lowered_with_places", "made_with_places", "make_current", "maker_of_latent_cache",
           "method_of_tinygrad", "new_buffer", "new_uop", "next_buffer", "on_top", "opened_devices", "program_key", "program_of_launch",
           "programs_through", "put_into_tensors", "rand_then", "realize_counters", "recipe_of", "remembered", "run_alone", "shared_memory_text",
           "spec_names", "statements", "strong_dtype", "survive_a_damaged_cache", "tinygrad_folder", "vector_dtype", "view_of_placeholder",
           "wanted_of", "watch_kernels", "with_accesses", "with_outputs", "with_params", "with_selected_inputs", "without_comgr", "workgroups_of",
           "written_to"]
