"""Language: a Llama-shaped decoder, dense or with experts, on bytes or tokens."""

from fp4dse.tasks.language.presets import NAMED, PRESETS, on_data, on_folder

__all__ = ["NAMED", "PRESETS", "on_data", "on_folder"]
