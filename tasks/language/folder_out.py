"""Weights of the decoder as a folder of Hugging Face again: like the one that training, or fitting, began with.

It has the configuration, the tokenizer and the other texts of that one, `model.safetensors` in FP32 under its names and
`fp4dse.json`, which says what made the weights. What quantizers learned has no name there and stands beside it, in
`learned.safetensors`.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from safetensors.torch import save_file
from torch import Tensor

from fp4dse.dse import ConfigError
from fp4dse.dse.program.whole_file import whole_file
from fp4dse.dse.reading.files import decode_json
from fp4dse.tasks.language.decoder import Shape
from fp4dse.tasks.language.folder import CONFIG, INDEX, LEARNED, names_of, read_folder
from fp4dse.tasks.language.packed import OTHER_FILE, QUANTIZATION
from fp4dse.tasks.start.weights import ABOUT_FILE, write_weights

WEIGHTS = "model.safetensors"
TEXTS = (".json", ".jinja", ".model", ".txt")
"""Endings of the files beside the weights that belong to a model."""
DTYPES = ("dtype", "torch_dtype")
"""Keys of a configuration that say in what its weights are to be read."""


def write_folder(path: Path, source: Path, weights: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write weights, under the decoder's names, of the model in the folder `source` as a folder of their own; one that
    was written so is replaced. The weights come last, so that what has some is whole. ConfigErrors as of
    check_target."""
    check_target(path, source)
    path.mkdir(parents=True, exist_ok=True)
    for name in (WEIGHTS, LEARNED):
        (path / name).unlink(missing_ok=True)
    for file in sorted(source.iterdir()):
        if file.is_file() and file.suffix in TEXTS and file.name not in (CONFIG, INDEX, ABOUT_FILE, OTHER_FILE):
            shutil.copyfile(file, path / file.name)
    config = decode_json((source / CONFIG).read_bytes(), dict)
    config |= {key: "float32" for key in DTYPES if key in config}
    config.pop(QUANTIZATION, None)  # of weights that were packed in `source`
    for name, said in ((CONFIG, config), (ABOUT_FILE, about)):
        (path / name).write_bytes(msgspec.json.format(msgspec.json.encode(said, order="sorted"), indent=2))
    theirs, learned = _apart(read_folder(source, context=1).shape, weights)
    if learned:
        write_weights(path / LEARNED, learned, about)
    with whole_file(path / WEIGHTS) as hidden:
        save_file(theirs, hidden, {"format": "pt"})  # without which transformers reads nothing


def check_target(path: Path, source: Path) -> None:
    """ConfigError for a file, for `source`, and for a folder with something in it that was not written here."""
    used = path.is_dir() and any(path.iterdir()) and not (path / ABOUT_FILE).exists()
    if path.is_file() or path.resolve() == source.resolve() or used:
        raise ConfigError("--out", str(path), "a folder that is new or empty, or was written by this command")


def _apart(shape: Shape, weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights under the names of Hugging Face, and what has none there."""
    theirs: dict[str, Tensor] = {}
    left = dict(weights)
    heads, kv_heads, size = shape.of_heads
    rows = {1: None, 2: [shape.ffn] * 2, 3: [heads * size, kv_heads * size, kv_heads * size]}
    for ours, parts in names_of(shape):
        value, sizes = left.pop(ours), rows[len(parts)]
        found = [value] if sizes is None else value.split(sizes)
        theirs |= {name: part.contiguous() for name, part in zip(parts, found, strict=True)}
    if shape.tied:
        left.pop("head.weight")  # it is the embedding
    return theirs, left
