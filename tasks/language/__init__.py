"""Language: a Llama-shaped decoder, dense or with experts, on bytes or tokens."""

from fp4dse.tasks.language.presets import PRESETS, on_data

__all__ = ["PRESETS", "on_data"]
