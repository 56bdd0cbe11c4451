"""Channels that are treated apart, as data: how many, what is one spelling, what they do not go together with."""

import tomllib

import msgspec
import pytest

from fp4dse.dse import QUANTIZERS, Hadamard, Recipe
from fp4dse.dse.channels import CHANNEL_NAMES, Corrected, Held, channels_name
from fp4dse.dse.cost.chip import load_chip
from fp4dse.dse.cost.model import load_model
from fp4dse.dse.cost.step import step_cost
from fp4dse.dse.cost.storage import activation_bits, bits_per_element
from fp4dse.dse.estimator import Clipped, Estimator, Through
from fp4dse.dse.export import export
from fp4dse.dse.layers.place import Place
from fp4dse.dse.outliers import OUTLIER_NAMES
from fp4dse.dse.reading.library import recipe_from_dict, recipe_to_toml
from fp4dse.dse.rounding import Ema, Stochastic

replace = msgspec.structs.replace
NV = QUANTIZERS["nvfp4"]


def recipe(channels, name="nvfp4", **fprop):
    base = Recipe.named(name)
    return replace(base, fprop=replace(base.fprop, channels=channels, **fprop))


@pytest.mark.parametrize(
    ("share", "counts"),
    [(0.1, {1: 0, 2: 1, 4: 1, 14: 1, 15: 2, 64: 6, 65: 7}), (0.99, {2: 1, 10: 9}), (0.25, {2: 1, 10: 3})],
)
def test_a_share_is_a_number_of_channels_at_least_one_and_never_all(share, counts):
    assert {channels: Held(share=share).count(channels) for channels in counts} == counts


def test_every_choice_has_a_phrase_of_its_own():
    every = [
        *CHANNEL_NAMES.values(),
        *(
            Held(),
            Held(share=0.2),
            Held(by="amax"),
            Held(steps=9.0),
            Held(wgrad=False),
            Held(format=QUANTIZERS["bf16"]),
        ),
        *(
            Corrected(),
            Corrected(of="both"),
            Corrected(share=0.2),
            Corrected(steps=9.0),
            Corrected(by="mean"),
            Corrected(by="error"),
        ),
    ]
    assert len({channels_name(channels) for channels in every}) == len(every)
    assert channels_name(Held(steps=50.0)) == "10% by norm every 50 in mxfp8"
    signatures = {recipe(channels).signature() for channels in every}
    assert len(signatures) == len(every)  # the number of channels is a shape


def test_what_has_no_effect_is_no_part_of_the_recipe():
    assert recipe(Held(), "bf16").canonical() == Recipe.named("bf16").canonical()
    forward_only = recipe(Held())
    forward_only = replace(forward_only, wgrad=Recipe.named("bf16").wgrad)
    of = forward_only.canonical().fprop.channels
    assert isinstance(of, Held)
    assert not of.wgrad
    assert recipe(Held(format=replace(QUANTIZERS["mxfp8"], range="16/17"))).config_id == recipe(Held()).config_id
    assert recipe(Held()).config_id != Recipe.named("nvfp4").config_id


@pytest.mark.parametrize(
    "channels", [*CHANNEL_NAMES.values(), Held(format=replace(NV, block=32)), Corrected(of="both")]
)
def test_a_recipe_is_read_back_from_toml(channels):
    one = recipe(channels)
    assert recipe_from_dict(tomllib.loads(recipe_to_toml(one))) == one


def test_a_rule_for_layers_has_channels_of_its_own():
    text = """
    layers = [{ kind = "mlp", "fprop.channels" = "arc" }, { kind = "attention", "fprop.channels" = "none" }]
    fprop = { x = "nvfp4", w = "nvfp4", channels = { kind = "held", share = 0.2 } }
    dgrad = { g = "nvfp4", w = "nvfp4" }
    wgrad = { g = "nvfp4", x = "nvfp4" }
    """
    made = recipe_from_dict(tomllib.loads("\n".join(line.strip() for line in text.splitlines())))
    found = {kind: made.at(Place(kind)).fprop.channels for kind in ("mlp", "attention", "conv")}
    assert found == {"mlp": CHANNEL_NAMES["arc"], "attention": None, "conv": Held(share=0.2)}
    assert [rule.label() for rule in made.layers] == ["mlp: channels arc", "attention: channels none"]
    assert recipe_from_dict(tomllib.loads(recipe_to_toml(made))).config_id == made.config_id


FAULTS = {
    "all channels": (recipe(Held(share=1.0)), "fprop.channels.share: found 1"),
    "errors in another format": (recipe(Held(by="error")), "fprop.channels.by: found 'error'"),
    "segments": (recipe(Corrected(by="error"), "tetrajet2"), "fprop.x.tensor_scale.over: found 'segment'"),
    "a part of a step": (recipe(Held(steps=2.5)), "fprop.channels.steps: found 2.5"),
    "outliers": (recipe(Held(), w=replace(NV, outliers=OUTLIER_NAMES["occ"])), "fprop.w.outliers: found 'occ'"),
    "an average": (recipe(Corrected(), w=replace(NV, rounding=Ema())), "fprop.w.rounding: found 'ema'"),
    "tiles": (recipe(Held(), "nvidia-nvfp4"), "fprop.w.block: found '16x16'"),
    "samples": (recipe(Corrected(), x=replace(NV, rounding=Stochastic(samples=2))), "fprop.x.rounding"),
    "a rotation": (recipe(Corrected(), rotation=Hadamard(size=16)), "fprop.rotation: found 'rht16'"),
    "an estimator": (
        replace(recipe(Held()), estimator=Estimator(w=Through(Clipped()))),
        "estimator.w: found 'clipped'",
    ),
    "a mean in wgrad": (recipe(Held(), "averis", x=NV), "wgrad.g.outliers: found 'mean'"),
    "a product of decoded operands": (replace(recipe(Corrected(of="both")), gemm="bf16-rounded"), "gemm: found"),
    "chance": (recipe(Held(format=replace(NV, rounding=Stochastic()))), "fprop.channels.format.rounding"),
    "a past": (recipe(Held(format=QUANTIZERS["fp8-delayed"])), "fprop.channels.format.tensor_scale.amax"),
    "no quantizer": (recipe(Held(format=replace(NV, scaling="quest"))), "fprop.channels.format."),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_channels_do_not_go_together_with(fault):
    made, words = FAULTS[fault]
    assert any(words in error for _, error in made.validate()), made.validate()


@pytest.mark.parametrize(
    "made",
    [
        recipe(Held(), rotation=Hadamard(size=16)),
        recipe(Held(wgrad=False), "averis", x=NV),
        recipe(Held(), w=QUANTIZERS["bf16"]),
        recipe(Corrected(), "nvfp4-sr-rht"),
    ],
    ids=lambda made: made.label(),
)
def test_what_they_go_together_with(made):
    assert made.validate() == []


def test_other_libraries_have_no_such_channels():
    for target in ("te", "torchao", "modelopt", "te_quant"):
        cannot = export(recipe(Held()), target).cannot
        assert any("channels 10% by norm in mxfp8 (it has none)" in line for line in cannot), cannot


def test_channels_apart_cost_between_none_and_all():
    model, chip = load_model("llama-8b"), load_chip("gb200")

    def total(made):
        return step_cost(made, model, chip).total

    none, all_of_them = total(Recipe.named("nvfp4")), total(Recipe.uniform(QUANTIZERS["mxfp8"]))
    costs = [none, *(total(recipe(Held(share=share))) for share in (0.05, 0.2, 0.5)), all_of_them]
    assert costs == sorted(costs)
    assert costs[1] > 1.005 * none
    assert total(recipe(Held(wgrad=False))) < total(recipe(Held()))
    assert none < total(recipe(Held(steps=50.0))) < total(recipe(Held()))
    assert total(recipe(Corrected())) < total(recipe(Corrected(by="error"))) < 1.3 * none
    assert none < total(recipe(Corrected())) < total(recipe(Corrected(of="both"))) < 1.1 * none


def test_stored_bits_are_those_of_both_parts():
    held, plain = QUANTIZERS["mxfp8"].bits_per_element, NV.bits_per_element
    assert activation_bits(recipe(Held(share=0.2))) == pytest.approx(0.8 * plain + 0.2 * held)
    assert activation_bits(recipe(Held(share=0.2, wgrad=False))) == plain
    slots = [0.8 * plain + 0.2 * held] * 3 + [plain] * 2 + [plain + held]
    assert bits_per_element(recipe(Held(share=0.2))) == pytest.approx(sum(slots) / 6)
    assert bits_per_element(recipe(Corrected(share=0.2))) == pytest.approx((6.2 * plain) / 6)
