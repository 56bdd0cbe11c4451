"""Decoders of others: a folder as Hugging Face's `save_pretrained` leaves it, of a Llama, Mistral, Qwen2 or Qwen3.

`config.json` gives the shape, the `.safetensors` files the weights, whose names are mapped onto the decoder's.
Weights that are packed in FP4 are decoded (packed.py). What the decoder cannot express is refused by name, and so is
every tensor that has no place in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from fp4dse.dse import ConfigError
from fp4dse.dse.reading.files import decode_json
from fp4dse.kernels.ops.rope import Rope
from fp4dse.tasks.language.decoder import Shape
from fp4dse.tasks.language.packed import OF_ACTIVATIONS, OTHER_FILE, QUANTIZATION, Packing, packing_of, unpacked
from fp4dse.tasks.start.weights import OPTION, names_in, read_weights

KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
}
"""model_type -> what all models of this type have of Shape. `attention_bias` of a Llama or Qwen3 adds biases."""
BIASED = ("llama", "qwen3")
FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "partial_rotary_factor": 1.0,
}
"""Key of the configuration -> its one value that the decoder has, which counts if the key is not there, too."""
CONFIG, INDEX = "config.json", "model.safetensors.index.json"
LEARNED = "learned.safetensors"
"""Beside these, of a folder that this program wrote (folder_out.py): what quantizers learned, under our names."""
THEIR_EMBEDDING = "model.embed_tokens.weight"
"""A file that has it is of a folder."""
OF_BLOCK: dict[str, tuple[str, ...]] = {
    "norm1": ("input_layernorm.weight",),
    "qkv.weight": tuple(f"self_attn.{of}_proj.weight" for of in "qkv"),
    "qkv.bias": tuple(f"self_attn.{of}_proj.bias" for of in "qkv"),
    "q_norm": ("self_attn.q_norm.weight",),
    "k_norm": ("self_attn.k_norm.weight",),
    "out.weight": ("self_attn.o_proj.weight",),
    "out.bias": ("self_attn.o_proj.bias",),
    "norm2": ("post_attention_layernorm.weight",),
    "mlp.up.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.down.weight": ("mlp.down_proj.weight",),
}
"""Tensor of a block -> those of a folder that it is made of, one above the other."""


class Pretrained(msgspec.Struct, frozen=True):
    """A model of a folder. weights: as in weights.py, under the decoder's names, read when they are asked for;
    tokenizer: None if the folder has none."""

    name: str
    shape: Shape
    vocabulary: int
    weights: Callable[[], dict[str, Tensor]]
    tokenizer: Path | None


def read_folder(path: Path, context: int) -> Pretrained:
    """The model in a folder, for windows of `context` tokens. ConfigError for what is missing or not to be had."""
    file, config = path / CONFIG, _read(path / CONFIG)
    shape, packing = _shape(config, str(file), context), _packing(path, config)
    vocabulary = _whole(config, str(file), "vocab_size")
    tokenizer = path / "tokenizer.json"
    return Pretrained(
        path.name, shape, vocabulary, lambda: _weights(path, shape, packing), tokenizer if tokenizer.exists() else None
    )


def said_of(path: Path) -> str | None:
    """One sentence on what is read otherwise than it stands in a folder: None where nothing is, and where there is no
    model. ConfigErrors as of read_folder."""
    if not (path / CONFIG).is_file() or _packing(path, _read(path / CONFIG)) is None:
        return None
    left = sum(name.endswith(OF_ACTIVATIONS) for file in _files(path) for name in names_in(file))
    more = f"; {left} scales of activations are left out, as recipes scale them anew" if left else ""
    return f"weights of {path.name} are packed in FP4, and are decoded{more}"


def _read(file: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = decode_json(file.read_bytes(), dict)
        return found
    except (OSError, msgspec.DecodeError) as error:
        accepted = f"a folder with a {file.name} that can be read ({error})"
        raise ConfigError(OPTION, str(file.parent), accepted) from None


def _packing(path: Path, config: dict[str, Any]) -> Packing | None:
    """The packing of the folder's weights, None if they are not packed."""
    said, file = config.get(QUANTIZATION), path / CONFIG
    if said is None and (path / OTHER_FILE).exists():
        file = path / OTHER_FILE
        said = _read(file).get("quantization")
        said = {"quant_method": "modelopt", **(said if isinstance(said, dict) else {})}
    return None if said is None else packing_of(said, str(file))


def _shape(config: dict[str, Any], where: str, context: int) -> Shape:
    kind = config.get("model_type")
    if kind not in KINDS:
        raise ConfigError(f"{where}: model_type", kind, ", ".join(KINDS))
    for key, only in FIXED.items():
        if (found := config.get(key, only)) != only:
            raise ConfigError(f"{where}: {key}", found, f"{only!r} (the decoder has nothing else)")
    slides = config.get("use_sliding_window", kind == "mistral") and config.get("sliding_window")
    if slides and slides < context:
        raise ConfigError(f"{where}: sliding_window", slides, f"{context} or more, the preset's window, or none")
    width, heads = (_whole(config, where, key) for key in ("hidden_size", "num_attention_heads"))
    kv_heads = _whole(config, where, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(f"{where}: num_key_value_heads", kv_heads, f"a divisor of num_attention_heads, {heads}")
    biased = kind in BIASED and bool(config.get("attention_bias", False))
    return Shape(
        width=width,
        ffn=_whole(config, where, "intermediate_size"),
        depth=_whole(config, where, "num_hidden_layers"),
        heads=heads,
        context=context,
        kv_heads=kv_heads,
        head_width=_whole(config, where, "head_dim", width // heads),
        tied=bool(config.get("tie_word_embeddings", False)),
        rope=_rope(config, where),
        eps=float(config.get("rms_norm_eps", 1e-6)),
        **({"qkv_bias": biased, "out_bias": biased} | KINDS[kind]),
    )


def _rope(config: dict[str, Any], where: str) -> Rope:
    """Angles, from `rope_parameters` or, as older configurations have it, `rope_theta` and `rope_scaling`."""
    said = {"rope_theta": config.get("rope_theta", 10_000.0)} | (config.get("rope_scaling") or {})
    said |= config.get("rope_parameters") or {}
    kind = said.get("rope_type", said.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ConfigError(f"{where}: rope_type", kind, "default, llama3")
    names = {"base": "rope_theta"}
    if kind == "llama3":
        names |= {"factor": "factor", "low": "low_freq_factor", "high": "high_freq_factor"}
        names["length"] = "original_max_position_embeddings"
    for name in names.values():
        if not isinstance(said.get(name), int | float) or not said[name] > 0:
            raise ConfigError(f"{where}: {name}", said.get(name), "a number above 0")
    return Rope(**{ours: float(said[name]) for ours, name in names.items()})


def _whole(config: dict[str, Any], where: str, key: str, default: int | None = None) -> int:
    found = config.get(key)
    found = default if found is None else found
    if not isinstance(found, int) or found < 1:
        raise ConfigError(f"{where}: {key}", found, "a whole number above 0")
    return found


def _weights(path: Path, shape: Shape, packing: Packing | None) -> dict[str, Tensor]:
    """Weights of the folder under the decoder's names. A head that is tied may be there or not."""
    theirs: dict[str, Tensor] = {}
    for file in _files(path):
        theirs |= read_weights(file)
    if packing is not None:
        theirs = unpacked(theirs, packing, f"{OPTION} {path.name}")
    theirs = {name: value for name, value in theirs.items() if not name.endswith("rotary_emb.inv_freq")}
    ours = {}
    for name, parts in names_of(shape):
        found = [theirs.pop(part, None) for part in parts]
        for part, value in zip(parts, found, strict=True):
            if value is None:
                raise ConfigError(f"{OPTION} {path.name}: {part}", None, "a tensor, as config.json wants it")
        ours[name] = torch.cat([value for value in found if value is not None])
    if shape.tied:
        theirs.pop("lm_head.weight", None)
        ours["head.weight"] = ours["embed"]
    if theirs:
        name, value = next(iter(theirs.items()))
        raise ConfigError(f"{OPTION} {path.name}: {name}", f"shape {list(value.shape)}", "tensors that the decoder has")
    return ours | (read_weights(path / LEARNED) if (path / LEARNED).exists() else {})


def _files(path: Path) -> list[Path]:
    """The files of weights: those of the index, where there is one."""
    if (index := path / INDEX).exists():
        try:
            return sorted({path / str(name) for name in decode_json(index.read_bytes())["weight_map"].values()})
        except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
            raise ConfigError(OPTION, str(index), "an index as save_pretrained writes it") from None
    others = (file for file in sorted(path.glob("*.safetensors")) if file.name != LEARNED)
    if found := sorted(path.glob("model*.safetensors")) or list(others):
        return found
    raise ConfigError(OPTION, str(path), "a folder with .safetensors files")


def names_of(shape: Shape) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The decoder's names with those of the folder."""
    absent = {
        name
        for has, names in (
            (shape.qkv_bias, ("qkv.bias",)),
            (shape.out_bias, ("out.bias",)),
            (shape.qk_norm, ("q_norm", "k_norm")),
        )
        for name in names
        if not has
    }
    yield "embed", (THEIR_EMBEDDING,)
    for i in range(shape.depth):
        for name, parts in OF_BLOCK.items():
            if name not in absent:
                yield f"blocks.{i}.{name}", tuple(f"model.layers.{i}.{part}" for part in parts)
    yield "norm", ("model.norm.weight",)
    if not shape.tied:
        yield "head.weight", ("lm_head.weight",)
