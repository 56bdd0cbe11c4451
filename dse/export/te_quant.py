"""Megatron's configuration of formats per layer: the file of `--te-precision-config-file`, `te_quant.cfg`.

    configs:                                    named settings of a layer
      mxfp8:
        transformer_engine_config_type: "TEQuantizationParams"
        training_recipe: {fp8_quantization_recipe: "mxfp8"}
    matchers:                                   globs on names of layers; the first that fits holds
      mlp_mxfp8: {config: "mxfp8", type: "glob", pattern: "*.linear_fc[12]", enabled: true}

Target: Megatron-LM at d98e8a6 (core/quantization/quant_config.py, core/extensions/transformer_engine.py), and
Megatron-Bridge's perf_recipes/nemotronh/te_quant.cfg. The format of all other layers, and BF16 blocks at the ends, are
arguments of Megatron, which the first line of the file repeats. A layer in these ends stays BF16, unless its settings
say override_nonquantized_autocast. Megatron quantizes no embedding, head or router.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product

import msgspec

from fp4dse.dse.export import te
from fp4dse.dse.export.assignment import PRECISE, USUAL, Assignment, Entry, assign
from fp4dse.dse.export.listed import Settings
from fp4dse.dse.export.pieces import Said
from fp4dse.dse.layers.precision import Precise
from fp4dse.dse.recipe import Recipe

ARGUMENTS = "# Megatron's arguments:"
"""Begins the line of the file that repeats them."""
LARGE = 200
"""Blocks of a model in which rules are looked at that mean the same in all large ones."""
OVERRIDE = "override_nonquantized_autocast"


class Config(msgspec.Struct, frozen=True):
    """training: a layer's `training_recipe`; arguments: of Megatron, for all layers."""

    training: dict[str, str]
    arguments: dict[str, str]


def _fp8(recipe: str, form: str) -> Config:
    training = {"fp8_quantization_recipe": recipe} | ({} if form == "e4m3" else {"fp8_format": form})
    return Config(training, {"--fp8-format": form, "--fp8-recipe": recipe})


CONFIGS: dict[str, tuple[str, Config]] = {
    "bf16": ("recipe = None", Config({}, {})),
    "nvfp4": (
        "recipe = NVFP4BlockScaling()",
        Config({"fp4_quantization_recipe": "nvfp4"}, {"--fp4-format": "e2m1", "--fp4-recipe": "nvfp4"}),
    ),
    "mxfp8": ("recipe = MXFP8BlockScaling()", _fp8("mxfp8", "e4m3")),
    "mxfp8_hybrid": ("recipe = MXFP8BlockScaling(fp8_format=Format.HYBRID)", _fp8("mxfp8", "hybrid")),
    "fp8_hybrid": ("recipe = Float8CurrentScaling()", _fp8("tensorwise", "hybrid")),
    "fp8": ("recipe = Float8CurrentScaling(fp8_format=Format.E4M3)", _fp8("tensorwise", "e4m3")),
}
"""Name -> the line of Transformer Engine's settings that Megatron makes, and what says so."""

PATTERNS = {
    "attention": "*.self_attention.linear_*",
    "qkv": "*.linear_qkv",
    "attention-out": "*.linear_proj",
    "mlp": "*.linear_fc[12]",
    "up": "*.linear_fc1",
    "down": "*.linear_fc2",
    "expert": "*.experts.*linear_fc[12]",
}
"""Word of place.WORDS -> the glob of its layers in Megatron."""


@cache
def recipes() -> dict[str, Recipe]:
    """Name of CONFIGS -> the recipe that it computes."""
    listed = list(te.settings())
    found = {name: [s for s in listed if _line(s) == line] for name, (line, _) in CONFIGS.items()}
    return {name: one[0].recipe for name, one in found.items()}


def _line(settings: Settings) -> str:
    lines = [line for line in settings.text.splitlines() if line.startswith("recipe = ")]
    return lines[0].partition("  #")[0]


def settings() -> Iterator[Settings]:
    """The settings of a layer: text is a name of CONFIGS."""
    for made in te.settings():
        for name, (line, _) in CONFIGS.items():
            if _line(made) == line:
                yield Settings(name, made.recipe, notes=tuple(note for note in made.notes if note == te.OLDER))


def unsaid(said: Said[Settings]) -> list[str]:
    """Rules that globs on Megatron's names do not say."""
    lines = []
    for entry, _ in said.entries:
        if entry.number == USUAL:
            continue
        if entry.name:
            lines.append(f"{entry.origin}: a name of layers (Megatron's have other names)")
        lines += [
            f"{entry.origin}: kind {word} (Megatron does not quantize it)"
            for word in entry.kind
            if word not in PATTERNS
        ]
    return lines


def assigned(recipe: Recipe, blocks: int | None) -> Assignment:
    """As `assign`; BF16 blocks at the ends are arguments of Megatron, so that their number need not be known."""
    if blocks is not None or not _ends(recipe.precise, None):
        return assign(recipe, blocks)
    inside = msgspec.structs.replace(recipe, precise=msgspec.structs.replace(recipe.precise, first=0.0, last=0.0))
    made, large = assign(inside, None), assign(recipe, LARGE)
    kept, cannot = [], list(made.cannot)
    for entry in made.entries:
        if entry.number < 0 or {of.recipe for of in large.entries if of.number == entry.number} == {entry.recipe}:
            kept.append(entry)
        else:
            cannot.append(f"{entry.origin}: what it leaves differs in the blocks at the ends")
    return Assignment(made.default, tuple(kept), tuple(cannot))


def render(said: Said[Settings], recipe: Recipe, blocks: int | None) -> Settings:
    """The file. recipe: what it computes; blocks: of the model."""
    default, ends = said.default.text, _ends(recipe.precise, blocks)
    arguments = dict(CONFIGS[default][1].arguments) | ends
    entries = [(entry, made.text) for entry, made in said.entries if entry.number != USUAL and not _is_ends(entry)]
    over = bool(ends) or default == "bf16"
    lines = [" ".join([ARGUMENTS, *(f"{key} {value}".strip() for key, value in arguments.items())]), "configs:"]
    used = dict.fromkeys(name for _, name in entries) or {"bf16": None}
    for name in used:
        training = dict(CONFIGS[name][1].training)
        texts = [f'{key}: "{value}"' for key, value in training.items()] + [f"{OVERRIDE}: true"] * bool(
            training and over
        )
        lines += [f"  {name}:", '    transformer_engine_config_type: "TEQuantizationParams"']
        lines += (
            ["    training_recipe:", *(f"      {text}" for text in texts)] if texts else ["    training_recipe: {}"]
        )
    lines.append("matchers:" if entries else "matchers: {}")
    for number, (entry, name) in enumerate(entries):
        for word, pattern in _patterns(entry):
            lines += [
                f"  rule{number}_{word}:  # {entry.origin}",
                f'    config: "{name}"',
                '    type: "glob"',
                f'    pattern: "{pattern}"',
                "    enabled: true",
            ]
    notes = ["random bits of stochastic rounding, and how many there are, are Transformer Engine's own"]
    notes += ["Megatron-LM at d98e8a6; embeddings, heads and routers are not quantized there"]
    notes += dict.fromkeys(note for made in (said.default, *(of for _, of in said.entries)) for note in made.notes)
    return Settings("\n".join(lines), recipe, notes=tuple(notes))


def _is_ends(entry: Entry) -> bool:
    return entry.number == PRECISE and not entry.kind


def _ends(precise: Precise, blocks: int | None) -> dict[str, str]:
    """Arguments for BF16 blocks at the ends; none if they are shares of a number that is not known."""
    given = precise.first, precise.last
    if not any(given) or (blocks is None and any(0 < number < 1 for number in given)):
        return {}
    first, last = (round(number if number >= 1 else number * (blocks or 0)) for number in given)
    start, end = (f"--num-layers-at-{at}-in-bf16" for at in ("start", "end"))
    return {"--first-last-layers-bf16": "", start: str(first), end: str(last)}


def _patterns(entry: Entry) -> Iterator[tuple[str, str]]:
    """(a word for a key, glob) of an entry's layers."""
    blocks = [None] if entry.blocks is None else list(entry.blocks)
    for word, block in product(entry.kind or ("",), blocks):
        glob = PATTERNS[word] if word else "*"
        words = [word.replace("-", "_"), "" if block is None else f"layer{block}"]
        yield "_".join(filter(None, words)), glob if block is None else f"*.layers.{block}.*{glob.lstrip('*.')}"
