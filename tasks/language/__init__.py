"""Language: a Llama-shaped decoder, dense or with experts, on bytes or tokens."""

from fp4dse.tasks.language.presets import NAMED, PRESETS, context_of, excess, on_data, on_folder

__all__ = ["NAMED", "PRESETS", "context_of", "excess", "on_data", "on_folder"]
