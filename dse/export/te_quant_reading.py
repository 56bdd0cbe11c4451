"""Megatron's configuration of formats per layer, read as a recipe: what te_quant.py writes, and what others wrote.

Of its matchers the first that fits holds, of rules the last: so they become rules in reverse order. Which layers a glob
means is found out by trying it on Megatron's names of the layers that exist here. Layers that do not exist here are
noted, what cannot be a recipe is a ConfigError.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from itertools import groupby, product
from typing import Any

import msgspec

from fp4dse.dse.errors import ConfigError, at_key
from fp4dse.dse.export.listed import of_layer
from fp4dse.dse.export.names import LEAVES, words_of
from fp4dse.dse.export.te_quant import ARGUMENTS, CONFIGS, OVERRIDE, recipes
from fp4dse.dse.layers.exceptions import value_of
from fp4dse.dse.layers.rule import CHANGES, QUANTIZERS, LayerRule
from fp4dse.dse.quantizer import BF16, NAMES_OF, Quantizer
from fp4dse.dse.quantizers import QUANTIZERS as QUANTIZERS_BY_NAME
from fp4dse.dse.reading.files import DEEPEST, is_deep
from fp4dse.dse.reading.library import recipe_from_dict, recipe_to_dict
from fp4dse.dse.recipe import Recipe
from fp4dse.dse.scale import TensorScale
from fp4dse.dse.stages import STAGES

NAMES: dict[str, tuple[str, ...]] = {
    "qkv": ("decoder.layers.{}.self_attention.linear_qkv",),
    "attention-out": ("decoder.layers.{}.self_attention.linear_proj",),
    "up": ("decoder.layers.{}.mlp.linear_fc1",),
    "down": ("decoder.layers.{}.mlp.linear_fc2",),
    "expert up": (
        "decoder.layers.{}.mlp.experts.linear_fc1",
        "decoder.layers.{}.mlp.experts.local_experts.0.linear_fc1",
    ),
    "expert down": (
        "decoder.layers.{}.mlp.experts.linear_fc2",
        "decoder.layers.{}.mlp.experts.local_experts.0.linear_fc2",
    ),
}
"""Leaf of names.LEAVES -> Megatron's names of it, {} for the number of the block."""

ABSENT: dict[str, tuple[str, ...]] = {
    "Mamba's projections": ("mixer.in_proj", "mixer.out_proj"),
    "latent projections of experts": ("mlp.fc1_latent_proj", "mlp.fc2_latent_proj"),
    "shared experts": ("mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2"),
    "latent attention": tuple(
        f"self_attention.linear_{of}" for of in ("q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj")
    ),
    "cross attention": tuple(f"cross_attention.linear_{of}" for of in ("q", "kv", "proj")),
}
"""Layers of Megatron that do not exist here -> their names within a block."""
PREDICTION = ("mtp.layers.0.transformer_layer.self_attention.linear_qkv", "mtp.layers.0.eh_proj")
"""Names of layers of multi-token prediction, which does not exist here either."""

BLOCKS = 160
"""More blocks than a model has: a glob on more of them is one on all further ones."""
FLAGS = ("--fp4-format", "--fp4-recipe", "--fp8-format", "--fp8-recipe")
ENDS = ("--num-layers-at-start-in-bf16", "--num-layers-at-end-in-bf16")
IGNORED = ("evaluation_recipe", "tp_only_amax_red", "fp8_param", "fp4_param")
"""Fields of a config that say other things than what its layers compute in training."""


class Imported(msgspec.Struct, frozen=True):
    """A recipe, and what the file says that it has not, or does not say."""

    recipe: Recipe
    notes: tuple[str, ...]


class _Matcher(msgspec.Struct, frozen=True):
    """Layers in words and blocks, with their config and whether it holds in blocks that are BF16."""

    config: str
    over: bool
    words: tuple[str, ...]
    blocks: tuple[int, ...]


def read_te_quant(text: str, where: str, arguments: str | None = None) -> Imported:
    """The recipe of a file's text. where: its name, for errors; arguments: of Megatron, in place of those in the file.

    ConfigError on what cannot be a recipe.
    """
    import yaml  # type: ignore[import-untyped]

    try:
        data = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: of a date that is none
        why = "too many levels" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise ConfigError(where, why, "YAML with configs and matchers") from None
    if is_deep(data):
        raise ConfigError(where, "too many levels", f"tables and lists within each other, {DEEPEST} at most")
    configs, matchers = (_table(data, key, where) for key in ("configs", "matchers"))
    notes: list[str] = []
    base, first, last = _arguments(text, where, arguments, notes)
    named = {name: _config(data, notes, where, "configs", name) for name, data in configs.items()}
    found: list[_Matcher] = []
    for name, matcher in matchers.items():
        found += _matcher(name, matcher, named, base, notes, where)
    return Imported(_recipe(_merged(found), base, first, last, where), tuple(dict.fromkeys(notes)))


def _table(data: object, key: str, where: str) -> dict[str, Any]:
    if not isinstance(data, dict) or not isinstance(data.get(key) or {}, dict) or "configs" not in data:
        raise ConfigError(at_key(where, key), None, "a file with the tables configs and matchers")
    return {str(name): value for name, value in (data.get(key) or {}).items()}


def _arguments(text: str, where: str, given: str | None, notes: list[str]) -> tuple[str, int, int]:
    """The config of all other layers, and the numbers of BF16 blocks at either end."""
    lines = [line.removeprefix(ARGUMENTS) for line in text.splitlines() if line.startswith(ARGUMENTS)]
    if given is None and not lines:
        notes.append(
            "the file does not say how all other layers compute, nor which blocks are BF16: NVFP4BlockScaling() "
            "is taken, and none (--arguments says so)"
        )
        return "nvfp4", 0, 0
    place, words = ("--arguments", shlex.split(given)) if given is not None else (where, shlex.split(lines[0]))
    found: dict[str, str] = {}
    while words:
        key, *words = words
        key, is_given, value = key.partition("=")
        if key == "--first-last-layers-bf16":
            found |= {end: found.get(end, "1") for end in ENDS}  # Megatron's own numbers
            continue
        if key not in (*FLAGS, *ENDS) or not (is_given or words):
            raise ConfigError(
                place, key, ", ".join([*FLAGS, "--first-last-layers-bf16", *ENDS]) + ", each with a value"
            )
        found[key] = value if is_given else words.pop(0)
    flags = {key: found[key] for key in FLAGS if key in found}
    name = next((name for name, (_, config) in CONFIGS.items() if config.arguments == flags), None)
    if name is None:
        accepted = "; ".join(
            " ".join(f"{k} {v}" for k, v in of.arguments.items()) or "none" for _, of in CONFIGS.values()
        )
        raise ConfigError(place, " ".join(f"{k} {v}" for k, v in flags.items()), accepted)
    for end in ENDS:
        if not found.get(end, "0").isdigit():
            raise ConfigError(at_key(place, end), found[end], "a number of blocks")
    first, last = (int(found.get(end, 0)) for end in ENDS)
    return name, first, last


def _config(data: object, notes: list[str], where: str, *keys: str) -> tuple[str, bool]:
    """The name in CONFIGS of a layer's settings, and whether they hold in blocks that are BF16."""
    known = "transformer_engine_config_type", "training_recipe", "evaluation_recipe"
    if not isinstance(data, dict) or not isinstance(data.get("training_recipe"), dict):
        raise ConfigError(at_key(where, *keys), data, "a table with transformer_engine_config_type and training_recipe")
    for key in data:
        if key not in known:
            raise ConfigError(at_key(where, *keys, key), key, ", ".join(known))
    if data.get(known[0]) != "TEQuantizationParams":
        raise ConfigError(at_key(where, *keys, known[0]), data.get(known[0]), "TEQuantizationParams")
    training: dict[str, Any] = dict(data["training_recipe"])
    over = bool(training.pop(OVERRIDE, False))
    if not training.pop("override_quantized_autocast", True):
        raise ConfigError(at_key(where, *keys, "override_quantized_autocast"), False, "true: it would have no effect")
    ignored = [key for key in IGNORED if training.pop(key, None) or (key == "evaluation_recipe" and key in data)]
    notes += [f"{'.'.join(keys)}.{key} is left out: a recipe says what training computes" for key in ignored]
    if training.get("fp8_format") == "e4m3" or "fp8_quantization_recipe" not in training:
        training.pop("fp8_format", None)  # the default, or of no use
    name = next((name for name, (_, config) in CONFIGS.items() if config.training == training), None)
    if name is None:
        accepted = "; ".join(
            ", ".join(f"{k} {v}" for k, v in of.training.items()) or "nothing" for _, of in CONFIGS.values()
        )
        raise ConfigError(at_key(where, *keys, "training_recipe"), training, accepted)
    return name, over


def _matcher(
    name: str, data: object, configs: Mapping[str, tuple[str, bool]], base: str, notes: list[str], where: str
) -> list[_Matcher]:
    """The layers of a matcher, one for each set of blocks; none if it is off, or means none that exist here."""
    keys = "matchers", name
    if not isinstance(data, dict):
        raise ConfigError(at_key(where, *keys), data, "a table with config, type, pattern and enabled")
    if not data.get("enabled", False):
        notes.append(f"{name} is not enabled")
        return []
    if data.get("type") != "glob":
        raise ConfigError(at_key(where, *keys, "type"), data.get("type"), "glob")
    if data.get("config") not in configs:
        raise ConfigError(at_key(where, *keys, "config"), data.get("config"), ", ".join(configs))
    pattern = data.get("pattern")
    if not isinstance(pattern, str):
        raise ConfigError(at_key(where, *keys, "pattern"), pattern, "a glob on the names of layers")
    config, over = configs[data["config"]]
    if base == "bf16" and config != "bf16" and not over:
        notes.append(f"{name} has no effect: nothing else is quantized, and {data['config']} has no {OVERRIDE}")
        return []
    blocks_of = {leaf: _blocks(names, pattern) for leaf, names in NAMES.items()}
    absent = _absent(pattern)
    if not any(blocks_of.values()):
        if not absent:
            accepted = ", ".join(name.format("N") for names in NAMES.values() for name in names)
            raise ConfigError(at_key(where, *keys, "pattern"), pattern, f"a glob on {accepted}")
        notes.append(f"{name} ({pattern}, {config}): {', '.join(absent)} do not exist here")
        return []
    found = []
    for blocks in dict.fromkeys(blocks for blocks in blocks_of.values() if blocks):
        leaves = [leaf for leaf, of in blocks_of.items() if of == blocks]
        words = words_of(leaves)
        if words is None:
            accepted = f"a glob that means whole kinds of layers, as *.linear_fc1 does (this one: {', '.join(leaves)})"
            raise ConfigError(at_key(where, *keys, "pattern"), pattern, accepted)
        found.append(_Matcher(config, over, words, blocks))
    return found


def _blocks(names: Iterable[str], pattern: str) -> tuple[int, ...]:
    return tuple(i for i in range(BLOCKS) if any(fnmatchcase(name.format(i), pattern) for name in names))


def _absent(pattern: str) -> list[str]:
    """The layers that do not exist here and that a glob means."""
    found = [
        words
        for words, names in ABSENT.items()
        if any(fnmatchcase(f"decoder.layers.{i}.{name}", pattern) for name in names for i in range(BLOCKS))
    ]
    return found + ["layers of multi-token prediction"] * any(fnmatchcase(name, pattern) for name in PREDICTION)


def _merged(matchers: list[_Matcher]) -> list[_Matcher]:
    """The fewest matchers by which the same config holds in every layer, in the same order: what is written of them and
    read again is the same. Where one is left out, those beside it may have become neighbours."""
    while (fewer := _without_held(_joined(matchers))) != matchers:
        matchers = fewer
    return matchers


def _joined(matchers: list[_Matcher]) -> list[_Matcher]:
    """Neighbours of one config as one for each set of blocks: which of them holds first makes no difference."""
    joined = []
    for (config, over), run in groupby(matchers, key=lambda one: (one.config, one.over)):
        blocks: dict[str, set[int]] = {}
        for one in run:
            for word in one.words:
                blocks.setdefault(word, set()).update(one.blocks)
        words: dict[tuple[int, ...], list[str]] = {}
        for word, of in blocks.items():
            words.setdefault(tuple(sorted(of)), []).append(word)
        joined += [_Matcher(config, over, tuple(kind), of) for of, kind in words.items()]
    return joined


def _without_held(matchers: list[_Matcher]) -> list[_Matcher]:
    """The matchers without the runs of blocks in all of whose layers earlier ones hold."""
    found = []
    held: set[tuple[str, int]] = set()
    for one in matchers:
        leaves = [leaf for leaf, place in LEAVES.items() if place.words & set(one.words)]
        kept: list[int] = []
        for run in _runs(one.blocks):
            layers = set(product(leaves, run))
            kept += [] if layers <= held else run
            held |= layers
        if kept:
            found.append(msgspec.structs.replace(one, blocks=tuple(kept)))
    return found


def _recipe(matchers: list[_Matcher], base: str, first: int, last: int, where: str) -> Recipe:
    """The recipe of the base with a rule for each matcher, in reverse order, and BF16 blocks at the ends."""
    fields = _fields({base, *(one.config for one in matchers), *(["bf16"] if first or last else [])})
    rules = [_rule(one, run, fields) for one in reversed(matchers) for run in reversed(_runs(one.blocks))]
    ends = [LayerRule(first=float(first), last=float(last), **dict.fromkeys(QUANTIZERS, BF16))] if first or last else []  # type: ignore[arg-type]
    over = {one.over for one in matchers if one.config != "bf16"}
    if ends and len(over) > 1:
        accepted = f"{OVERRIDE} in all configs that quantize or in none, where blocks at the ends are BF16"
        raise ConfigError(at_key(where, "configs"), OVERRIDE, accepted)
    ordered = [*rules, *ends] if over == {False} else [*ends, *rules]
    recipe = msgspec.structs.replace(recipes()[base], layers=tuple(ordered)).canonical()
    return recipe_from_dict(recipe_to_dict(_readable(recipe)), where)


def _readable(recipe: Recipe) -> Recipe:
    """The same recipe, with quantizers spelled as people do."""
    stages = {
        stage: msgspec.structs.replace(part, **{o: _spelled(getattr(part, o)) for o in STAGES[stage]})
        for stage, part in ((stage, getattr(recipe, stage)) for stage in STAGES)
    }
    rules = tuple(
        msgspec.structs.replace(rule, **{field: _spelled(q) for field in QUANTIZERS if (q := getattr(rule, field))})
        for rule in recipe.layers
    )
    return msgspec.structs.replace(recipe, layers=rules, **stages)


def _spelled(q: Quantizer) -> Quantizer:
    if name := NAMES_OF.get(q.canonical()):
        return QUANTIZERS_BY_NAME[name]
    usual = msgspec.structs.replace(q, tensor_scale=TensorScale())
    return usual if usual.canonical() == q.canonical() else q


def _fields(names: Iterable[str]) -> tuple[str, ...]:
    """The fields of rules among these configs: all quantizers, and what is not the same in all of them.

    BF16 is one of them wherever some layers are: it has no rotation, so that a rule on top of it has to say its own.
    """
    there = [recipes()[name] for name in sorted(names)]
    return tuple(
        field for field in CHANGES if field in QUANTIZERS or len({str(value_of(of, field)) for of in there}) > 1
    )


def _rule(one: _Matcher, run: range, fields: tuple[str, ...]) -> LayerRule:
    of = of_layer(recipes()[one.config])
    changes: dict[str, Any] = {field: value_of(of, field) for field in (QUANTIZERS if one.config == "bf16" else fields)}
    return LayerRule(kind=one.words, blocks=_slice(run), **changes)


def _runs(blocks: tuple[int, ...]) -> list[range]:
    """Runs of neighbours."""
    starts = [i for i in blocks if i - 1 not in blocks]
    stops = [i + 1 for i in blocks if i + 1 not in blocks]
    return [range(*ends) for ends in zip(starts, stops, strict=True)]


def _slice(run: range) -> str:
    """A run of blocks as rules have it: empty for all of them, open if it goes on."""
    if run.stop == BLOCKS:
        return f"{run.start}:" if run.start else ""
    return str(run.start) if len(run) == 1 else f"{run.start}:{run.stop}"
