"""Flash attention for tinygrad: kernels written as UOps for the matrix units of AMD and NVIDIA GPUs, and an emulator that runs the kernels without a
GPU. Begin with `attention` and `explain`."""
from attn import mods
from attn.api.attention import attention, explain
from attn.api.cache import append_kv, attention_with_kv_cache, empty_kv_cache, empty_paged_cache
from attn.api.custom_kernel import flash_attention, flash_attention_fn
from attn.api.dropout import dropout_mask
from attn.calls.quantized import QuantizedLatent, QuantizedRows, dequantize_kv, quantize_kv, rotate
from attn.calls.history import keep_history as _keep_history
from attn.parallel.sequence import shard_sequence, unshard_sequence
from attn.api.sdpa import install, installed, scaled_dot_product_attention, uninstall
from attn.emulator.device import register as _register_emulator
from attn.compilers.renderer import register_renderers as _register_renderers
from attn.cache.kept_programs import keep_programs as _keep_programs
from attn.ops.atomics import show_shared_tensors as _show_shared_tensors
from attn.tinygrad_compat import lower_few_kernels_here as _lower_few_kernels_here, survive_a_damaged_cache as _survive_a_damaged_cache

_register_emulator()
_register_renderers()
_show_shared_tensors()
_keep_programs()
_lower_few_kernels_here()
_keep_history()
_survive_a_damaged_cache()

__all__ = ["QuantizedLatent", "QuantizedRows", "append_kv", "attention", "attention_with_kv_cache", "dequantize_kv", "dropout_mask", "empty_kv_cache",
           "empty_paged_cache", "explain", "flash_attention", "flash_attention_fn", "install", "installed", "mods", "quantize_kv", "rotate",
           "scaled_dot_product_attention", "shard_sequence", "uninstall", "unshard_sequence"]
