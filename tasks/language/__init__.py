"""Language: a Llama-shaped decoder, dense or with experts, on bytes or tokens."""

from fp4dse.tasks.language.presets import (
    NAMED,
    PRESETS,
    Preset,
    context_of,
    excess,
    of_texts,
    on_data,
    on_folder,
    on_read,
)
from fp4dse.tasks.language.pretrained import read_pretrained

__all__ = [
    "NAMED",
    "PRESETS",
    "Preset",
    "context_of",
    "excess",
    "of_texts",
    "on_data",
    "on_folder",
    "on_read",
    "read_pretrained",
]
