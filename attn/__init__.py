"""Flash attention for tinygrad: one UOp program, specialised per matrix unit, and an emulator that runs it without a GPU."""
from attn.version import check_version
check_version()
from attn.api.attention import attention, explain  # noqa: E402
from attn.api.cache import append_kv, attention_with_kv_cache, empty_kv_cache, empty_paged_cache  # noqa: E402
from attn.api.custom_kernel import flash_attention, flash_attention_fn  # noqa: E402
from attn.api.dropout import dropout_mask  # noqa: E402
from attn.calls.history import keep_history as _keep_history  # noqa: E402
from attn.parallel.sequence import shard_sequence, unshard_sequence  # noqa: E402
from attn.api.sdpa import install, installed, scaled_dot_product_attention, uninstall  # noqa: E402
from attn.emulator.device import register as _register_emulator  # noqa: E402
from attn.compilers.renderer import register_renderers as _register_renderers  # noqa: E402
from attn.cache.kept_programs import keep_programs as _keep_programs  # noqa: E402
from attn.tinygrad_compat import survive_a_damaged_cache as _survive_a_damaged_cache  # noqa: E402

_register_emulator()
_register_renderers()
_keep_programs()
_keep_history()
_survive_a_damaged_cache()

__all__ = ["append_kv", "attention", "attention_with_kv_cache", "dropout_mask", "empty_kv_cache", "empty_paged_cache", "explain", "flash_attention",
           "flash_attention_fn", "install", "installed", "scaled_dot_product_attention", "shard_sequence", "uninstall",
           "unshard_sequence"]
