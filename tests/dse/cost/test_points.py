"""The paper's technique count, and the rule that extends it."""

import msgspec
import pytest

from fp4dse.dse import Hadamard, Quantizer, Recipe, points
from fp4dse.dse.layers.rule import LayerRule
from fp4dse.dse.noise import NOISE_NAMES
from fp4dse.dse.outliers import Residual
from fp4dse.dse.rollout import ROLLOUT_NAMES
from fp4dse.dse.rounding import Stochastic
from fp4dse.dse.scale import E5M2, TensorScale
from fp4dse.dse.training import Training

replace = msgspec.structs.replace
POINTS = {
    "bf16": 0,
    "mxfp4": 1,  # the floor
    "nvfp4": 2,  # tensor scaling
    "nvfp4-sr": 3,  # + stochastic rounding
    "nvfp4-sr-rht": 4,  # + rotation
    "ue5m3-sr": 3,
    "mxfp4-sr-rht": 3,
    "quartet2": 5,  # tensor scaling, rotation, four-over-six, corrected scales
    "arcquant": 4,  # tensor scaling, stochastic rounding, channels
    "chon": 5,  # tensor scaling, stochastic rounding, rotation, channels
    "averis": 4,  # tensor scaling, stochastic rounding, outliers
    "metis": 4,  # the same
    "metis-factors": 4,
    "pact": 4,  # tensor scaling, scales of SAWB, outliers
    "wang-dge-occ": 3,  # a relaxation, outliers
    "tetrajet-qema": 3,  # stochastic rounding, an average
    "hif4-ascend": 3,  # rotation, exponents of parts of a block
}


@pytest.mark.parametrize(("name", "count"), POINTS.items())
def test_points_count_the_techniques_of_a_recipe_on_a_floor_of_one(name, count):
    assert points(Recipe.named(name)) == count


def test_a_technique_that_only_a_rule_for_layers_switches_on_counts():
    rounded = msgspec.structs.replace(Quantizer.named("nvfp4"), rounding=Stochastic())
    rule = LayerRule(kind=("mlp",), wgrad_g=rounded, wgrad_rotation=Recipe.named("nvfp4-sr-rht").wgrad.rotation)
    for base, count in (("nvfp4", 4), ("mxfp4", 4), ("bf16", 4), ("nvfp4-sr-rht", 4)):
        assert points(msgspec.structs.replace(Recipe.named(base), layers=(rule,))) == count


def test_untouched_operands_cost_no_points():
    assert points(Recipe.uniform(Quantizer.named("none"))) == 0


@pytest.mark.parametrize(
    ("change", "count"),
    [
        ({"block": 32}, 2),  # of nvfp4's two: the floor and its tensor scale
        ({"scale": E5M2()}, 2),
        ({"range": "16/17"}, 2),
        ({"tensor_scale": TensorScale(amax="held")}, 2),
        ({"tensor_scale": None}, 1),
        ({"rounding": Stochastic()}, 3),
        ({"adapt": "4over6-mae"}, 3),
        ({"adapt": "razer"}, 3),
        ({"scaling": "split"}, 3),
        ({"outliers": Residual()}, 3),
        ({"rounding": Stochastic(samples=2)}, 4),
    ],
)
def test_what_is_done_beyond_a_maximum_and_a_rounding_counts_one(change, count):
    q = msgspec.structs.replace(Quantizer.named("nvfp4"), **change)
    assert points(Recipe.uniform(q)) == count


def test_a_kind_of_technique_counts_once_wherever_it_is_used():
    sr = msgspec.structs.replace(Quantizer.named("mxfp4"), rounding=Stochastic())
    one = Recipe.uniform(Quantizer.named("mxfp4"))
    everywhere = Recipe.uniform(sr)
    once = msgspec.structs.replace(one, dgrad=msgspec.structs.replace(one.dgrad, g=sr))
    assert points(once) == points(everywhere) == 2


def test_a_rollout_counts_beside_a_plain_trainer():
    def with_rollout(rollout, **more):
        return replace(Recipe.named("bf16"), training=Training(rollout=rollout, **more))

    plain = ROLLOUT_NAMES["bf16"]
    assert points(with_rollout(plain, noise=NOISE_NAMES["qerl"])) == 0, "nothing is quantized"
    assert points(with_rollout(ROLLOUT_NAMES["mxfp4"])) == 1
    assert points(with_rollout(ROLLOUT_NAMES["nvfp4-w4a16"])) == 2
    assert points(with_rollout(ROLLOUT_NAMES["mxfp4"], noise=NOISE_NAMES["qerl"])) == 2
    assert points(with_rollout(replace(plain, kv_cache=Quantizer.named("mxfp4")))) == 1
    rotated = replace(ROLLOUT_NAMES["mxfp4"], rotation=Hadamard(32))
    assert points(with_rollout(rotated)) == 2
    both = replace(Recipe.named("mxfp4"), training=Training(rollout=ROLLOUT_NAMES["nvfp4"]))
    assert points(both) == 2
