"""Flash attention for tinygrad: one UOp program, specialised per matrix unit, and an emulator that runs it without a GPU."""
from attn.tinygrad_compat import check_version
check_version()
from attn.api import flash_attention, flash_attention_fn  # noqa: E402
from attn.emulator.device import register as _register_emulator  # noqa: E402

_register_emulator()

__all__ = ["flash_attention", "flash_attention_fn"]
