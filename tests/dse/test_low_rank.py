"""Components taken off an operand, as data: what they do not go together with, names and what lanes may share."""

import msgspec
import pytest

from fp4dse.dse import QUANTIZERS, ConfigError, Quantizer, Recipe
from fp4dse.dse.outliers import LowRank, outlier_words
from fp4dse.dse.reading.library import recipe_from_dict
from fp4dse.dse.rounding import Ema, Stochastic
from fp4dse.dse.rules import canonical_faults
from fp4dse.dse.rules.quantizers import quantizer_faults
from fp4dse.dse.stages import STAGES
from tests.each import each

replace = msgspec.structs.replace
NV = replace(QUANTIZERS["nvfp4"], outliers=LowRank())


def with_x(q: Quantizer) -> Recipe:
    recipe = Recipe.named("nvfp4")
    return replace(recipe, fprop=replace(recipe.fprop, x=q))


FAULTS = {
    "a moving average": (replace(NV, rounding=Ema()), "outliers: found 'low-rank'; accepted: none, occ, clamp"),
    "samples": (replace(NV, rounding=Stochastic(samples=2)), "outliers: found 'low-rank'"),
    "tiles": (replace(NV, block="16x16"), "block: found '16x16'; accepted: a number, row, tensor (for outliers"),
    "MS-EDEN": (replace(QUANTIZERS["ms-eden"], outliers=LowRank()), "scaling: found 'eden'"),
}


@pytest.mark.parametrize(("q", "message"), FAULTS.values(), ids=FAULTS)
def test_components_do_not_go_together_with(q, message):
    assert [rule for rule, error in quantizer_faults(q) if message in str(error)] == ["outliers"]


@each("name", [n for n, q in QUANTIZERS.items() if not (q.is_plain or q.codec == "eden")])
def test_other_quantizers_may_have_them(name):
    q = replace(QUANTIZERS[name], outliers=LowRank(rank=2))
    assert bool(quantizer_faults(q)) == (isinstance(q.block, str) and "x" in q.block)


@pytest.mark.parametrize(
    ("of", "words"),
    [
        (LowRank(), "low-rank"),
        (LowRank(rank=4), "low-rank4"),
        (LowRank(iterations=1), "low-rank16x1"),
        (LowRank(4, 3), "low-rank4x3"),
        (LowRank(vectors="fp32"), "low-rank-fp32"),
        (LowRank(4, 2, "fp32"), "low-rank4-fp32"),
    ],
)
def test_each_has_its_words_id_and_population(of, words):
    recipe, default = with_x(replace(NV, outliers=of)), with_x(NV)
    assert outlier_words(of) == words
    assert words in recipe.label()
    assert recipe.columns()["fprop_x_outliers"] == words
    same = of == LowRank()
    assert (recipe.config_id == default.config_id) == (recipe.signature() == default.signature()) == same
    assert not list(canonical_faults(recipe.canonical()))


@pytest.mark.parametrize("field", ["rank", "iterations"])
def test_there_is_one_at_least(field):
    x = {"like": "nvfp4", "outliers": {"kind": "low-rank", field: 0}}
    stages = {name: dict.fromkeys(operands, "nvfp4") for name, operands in STAGES.items()}
    with pytest.raises(ConfigError, match=rf"fprop.x.outliers.{field}"):
        recipe_from_dict({**stages, "fprop": {"x": x, "w": "nvfp4"}})


def test_a_tensor_has_no_more_than_its_sizes():
    assert [LowRank().count(*size) for size in ((4, 100), (100, 7), (100, 100))] == [4, 7, 16]
