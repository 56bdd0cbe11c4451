"""What a rule sees of a recipe is enough to answer as if it saw all of it."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from fp4dse.dse import QUANTIZERS, Recipe, Space, recipe_files
from fp4dse.dse.attention import Attention, Scores
from fp4dse.dse.channels import Corrected, Held
from fp4dse.dse.inject import INJECT_NAMES
from fp4dse.dse.layers.precision import Finish
from fp4dse.dse.layers.rule import LayerRule
from fp4dse.dse.noise import Noise
from fp4dse.dse.optimizer import SGD, Muon
from fp4dse.dse.oscillation import QRamping
from fp4dse.dse.outliers import OUTLIER_NAMES
from fp4dse.dse.rollout import Rollout
from fp4dse.dse.rounding import Ema
from fp4dse.dse.rules import RECIPE_RULES, canonical_faults
from fp4dse.dse.rules.quantizers import QUANTIZER_RULES
from fp4dse.dse.training import Distill, Training

SPACES = Path(__file__).parents[2] / "sweeps" / "spaces"

HOSTILE = Space(
    "hostile",
    axes={
        "*": ["nvfp4", "mxfp4", "bf16", "none", "ms-eden", "if4", "fp8"],
        "wgrad": ["mxfp4", {"rounding": "ema"}, "ms-eden"],
        "fprop.w.rounding": ["nearest", "ema"],
        "estimator.w": [{}, {"element": "dge", "scale": "exact"}],
        "forward.outliers": ["none", "occ", "mean", "low-rank"],
        "wgrad.rotation": ["none", "rht128"],
        "precise.first": [0.0, 1.5],
        "training.beta1": [0.9, 1.0],
        "gemm": ["exact", "fp8-exact"],
    },
)


CHANNELS: list[tuple[str, Held | Corrected, dict[str, Any]]] = [
    ("nvfp4", Held(share=1.5), {}),
    ("wang-dge-occ", Held(), {}),
    ("tetrajet2", Corrected(), {"gemm": "bf16-rounded"}),
    ("tetrajet2", Corrected(of="both"), {"gemm": "bf16-rounded"}),
    ("averis", Held(), {}),
    ("nvfp4", Held(format=msgspec.structs.replace(QUANTIZERS["nvfp4"], scaling="quest")), {}),
]
"""Channels that a recipe does not go together with, most of them."""


def with_channels(name: str, channels: Held | Corrected, **more: Any) -> Recipe:
    recipe = Recipe.named(name)
    return msgspec.structs.replace(recipe, fprop=msgspec.structs.replace(recipe.fprop, channels=channels), **more)


def everything() -> list[Recipe]:
    """Shipped recipes, and every eleventh combination of shipped spaces and of hostile values, rejected or not."""
    shipped = {path.stem: path for path in SPACES.glob("*.toml")}
    built = [space for path in shipped.values() if (space := Space.load(path, shipped.get)).base]
    combinations = [recipe for space in [*built, HOSTILE] for recipe in list(space._combinations())[::11]]
    named = [file.recipe for file in recipe_files().values()] + [Recipe.uniform(q) for q in QUANTIZERS.values()]
    contradicting = LayerRule(("mlp",), wgrad_g=QUANTIZERS["mxfp4"]), LayerRule(("mlp",), wgrad_g=QUANTIZERS["fp8"])
    named.append(msgspec.structs.replace(Recipe.named("nvfp4"), layers=contradicting))
    clamped = msgspec.structs.replace(QUANTIZERS["nvfp4"], outliers=OUTLIER_NAMES["occ"])
    named.append(msgspec.structs.replace(Recipe.named("nvfp4"), attention=Attention(Scores(q=clamped))))
    moving = msgspec.structs.replace(QUANTIZERS["nvfp4"], rounding=Ema())
    named.append(msgspec.structs.replace(Recipe.named("nvfp4"), training=Training(rollout=Rollout(moving, moving))))
    ramping = Training(optimizer=SGD(), ramping=QRamping())
    named.append(msgspec.structs.replace(Recipe.named("tetrajet"), training=ramping))
    named.append(msgspec.structs.replace(Recipe.named("nvfp4"), training=Training(distill=Distill(weight=2.0))))
    named.append(msgspec.structs.replace(Recipe.named("pact"), training=Training(optimizer=Muon(), trains="learned")))
    named.append(with_channels("nvfp4", Held(), finish=Finish(share=0.1, what="all-but-weights")))
    named.append(
        msgspec.structs.replace(Recipe.named("luq-fnt"), layers=(LayerRule(("mlp",), wgrad_g=QUANTIZERS["mxfp4"]),))
    )
    of_codes = msgspec.structs.replace(Recipe.named("nvfp4").wgrad, source="converted")
    named.append(msgspec.structs.replace(Recipe.named("nvfp4"), wgrad=of_codes))
    pact = Recipe.named("pact")
    named.append(msgspec.structs.replace(pact, wgrad=msgspec.structs.replace(pact.wgrad, x=pact.fprop.x)))
    factors, mlp = Recipe.named("metis-factors"), LayerRule(("mlp",), wgrad_g=QUANTIZERS["mxfp4"])
    named.append(msgspec.structs.replace(factors, layers=(mlp,)))
    named.append(msgspec.structs.replace(factors, wgrad=msgspec.structs.replace(factors.wgrad, x=factors.fprop.w)))
    named.append(msgspec.structs.replace(Recipe.named("nvfp4"), training=Training(inject=INJECT_NAMES["scale"])))
    named.append(msgspec.structs.replace(Recipe.named("bf16"), training=Training(noise=Noise(stages=1))))
    scaled = msgspec.structs.replace(QUANTIZERS["mxfp4"], outliers=OUTLIER_NAMES["scales"])
    bf16, scales = Recipe.named("bf16"), Training(trains="learned")
    of_scales = msgspec.structs.replace(bf16.fprop, w=scaled)
    named.append(msgspec.structs.replace(bf16, fprop=of_scales, training=scales))
    named += [with_channels(name, channels, **more) for name, channels, more in CHANNELS]
    return [recipe.canonical() for recipe in [*named, *combinations]]


def test_rules_that_look_at_parts_find_what_they_find_on_the_whole():
    broken = dict.fromkeys(RECIPE_RULES, 0)
    for recipe in everything():
        expected = {rule for rule, (_, check) in RECIPE_RULES.items() if check(recipe)}
        assert {rule for rule, _ in canonical_faults(recipe)} - set(QUANTIZER_RULES) == expected
        for rule in expected:
            broken[rule] += 1
    assert all(broken.values()), f"never broken: {broken}"


@pytest.mark.parametrize("rule", RECIPE_RULES)
def test_a_rule_looks_at_fields_that_there_are(rule):
    views, _ = RECIPE_RULES[rule]
    assert all(set(view) <= set(Recipe.__struct_fields__) for view in views)
