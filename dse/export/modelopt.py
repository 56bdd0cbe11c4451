"""The formats that NVIDIA's Model Optimizer (ModelOpt 0.47) trains with, by quantization-aware training.

Input and weight of a layer have a quantizer each; both backward products are BF16, of the decoded copies. Formats are
those of `modelopt_recipes/configs/numerics`: NVFP4, MXFP8 and E4M3 by tensor; its MXFP4 and MXFP8 round scales up.
A recipe is a YAML file whose list `quant_cfg` names quantizers by globs; the last one that fits holds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product

from fp4dse.dse.export.listed import Settings, bf16_backward
from fp4dse.dse.export.pieces import Said
from fp4dse.dse.quantizer import BF16
from fp4dse.dse.quantizers import QUANTIZERS
from fp4dse.dse.recipe import Recipe
from fp4dse.dse.stages import Fprop

FORMATS: dict[str, str] = {
    "nvfp4": "num_bits: e2m1, block_sizes: {-1: 16, type: dynamic, scale_bits: e4m3}",
    "mxfp4-rceil": "num_bits: e2m1, block_sizes: {-1: 32, type: dynamic, scale_bits: e8m0}",
    "mxfp8-rceil": "num_bits: e4m3, block_sizes: {-1: 32, type: dynamic, scale_bits: e8m0}",
    "fp8": "num_bits: e4m3, axis: null",
}
"""Named quantizer -> its `cfg`."""

CALIBRATED = "maxima of tensors are those of the calibration (algorithm: max), not of each step"
NOTES = (
    "embeddings, heads and routers are switched off by name, as in ModelOpt's own default_disabled_quantizers",
    "mtq.quantize(model, config, forward_loop) with this file's `quantize`, then train: the backward pass is BF16",
)


def settings() -> Iterator[Settings]:
    """The formats of a layer: input and weight, each in one of FORMATS or in BF16."""
    for x, w in _pairs():
        fprop = Fprop(x=QUANTIZERS[x] if x else BF16, w=QUANTIZERS[w] if w else BF16)
        notes = (CALIBRATED,) if {w, x} & {"nvfp4", "fp8"} else ()
        yield Settings(_file(_entries("*", x, w)), bf16_backward(fprop, from_copies=True), notes=(*NOTES, *notes))


def render(said: Said[Settings], recipe: Recipe) -> Settings:
    """The file for layers of different formats. recipe: what they compute."""
    formats = {one.recipe.config_id: pair for one, pair in zip(settings(), _pairs(), strict=True)}
    lines = _entries("*", *formats[said.default.recipe.config_id])
    for entry, made in reversed(said.entries):  # the last one that fits holds
        blocks = [""] if entry.blocks is None else [f"*layers.{block}." for block in entry.blocks]
        globs = [entry.name] if entry.name else list(entry.globs or ["*"])
        lines.append(f"    # {entry.origin}")
        for block, glob in product(blocks, globs):
            lines += _entries(block + glob, *formats[made.recipe.config_id])
    notes = dict.fromkeys(note for one in [said.default, *(made for _, made in said.entries)] for note in one.notes)
    return Settings(_file(lines, ()), recipe, notes=(*notes, *said.notes))


def cannot_name(said: Said[Settings]) -> list[str]:
    """Rules whose name goes together with kinds or blocks: one glob cannot say both."""
    return [
        f"{entry.origin}: a name together with kinds or blocks (it has one glob)"
        for entry, _ in said.entries
        if entry.name and (entry.kind or entry.blocks is not None)
    ]


def _pairs() -> Iterator[tuple[str, str]]:
    """Formats of input and weight in the order of `settings`."""
    return ((x, w) for w, x in product(("", *FORMATS), repeat=2))


def _entries(glob: str, x: str, w: str) -> list[str]:
    lines = []
    for which, name in (("weight_quantizer", w), ("input_quantizer", x)):
        text = f"cfg: {{{FORMATS[name]}}}, enable: true" if name else "enable: false"
        dot = "" if glob == "*" else "."
        lines.append(f"    - {{quantizer_name: {json.dumps(glob + dot + which)}, {text}}}")
    return lines


OFF = ("*embed*", "*lm_head*", "*output_layer*", "*router*", "*mlp.gate.*")


def _file(lines: list[str], off: tuple[str, ...] = OFF) -> str:
    return "\n".join(
        [
            "metadata:",
            "  recipe_type: ptq",
            "  description: by fp4dse, for quantization-aware training",
            "quantize:",
            "  algorithm: max",
            "  quant_cfg:",
            '    - {quantizer_name: "*", enable: false}',
            *lines,
            *(f"    - {{quantizer_name: {json.dumps(glob)}, enable: false}}" for glob in off),
        ]
    )
