"""Which layers and steps are not quantized, and what the training side of a recipe says; defaults leave no trace."""

import re
import tomllib
from pathlib import Path

import msgspec
import pytest

from fp4dse.dse import ConfigError, Recipe, recipe_from_dict, recipe_to_dict, recipe_to_toml
from fp4dse.dse.layers.place import Place
from fp4dse.dse.layers.precision import Finish, Precise
from fp4dse.dse.optimizer import SGD, AdamW, StableSPAM
from fp4dse.dse.oscillation import OsciReset
from fp4dse.dse.reading.library import read_recipe_file
from fp4dse.dse.schedule import Cosine
from fp4dse.dse.training import Training

replace = msgspec.structs.replace
NVFP4 = Recipe.named("nvfp4")


def test_ends_and_tables_are_precise_by_default_and_projections_are_not():
    whys = {kind: Precise().why(Place(kind)) for kind in ("linear", "embedding", "head", "attention", "mlp", "router")}
    assert whys == {
        "linear": None, "embedding": "embedding", "head": "head", "attention": None, "mlp": None, "router": "router"
    }  # fmt: skip
    assert Precise(attention=True, head=False).why(Place("attention", 0, 2)) == "attention"
    assert Precise(head=False).why(Place("head")) is None


@pytest.mark.parametrize(
    ("precise", "blocks", "kept"),
    [
        (Precise(first=2), 6, [0, 1]),
        (Precise(last=1), 6, [5]),
        (Precise(first=1, last=9), 4, [0, 1, 2, 3]),
        (Precise(first=0.032, last=0.129), 62, [0, 1, *range(54, 62)]),
        (Precise(first=0.032, last=0.129), 12, [10, 11]),
        (Precise(first=0.032, last=0.129), 2, []),
    ],
)
def test_blocks_at_the_ends_are_kept_by_number_or_by_share(precise, blocks, kept):
    assert [i for i in range(blocks) if precise.why(Place("mlp", i, blocks))] == kept
    assert precise.why(Place("mlp")) is None  # outside of blocks


def test_the_finish_is_the_last_share_of_the_steps():
    assert Finish(share=0.1).first_step(1000) == 900
    assert Finish(share=1.0).first_step(40) == 0
    assert Finish(share=0.001).first_step(40) == 40
    assert [Finish(share=0.5, what=w).stages for w in ("forward", "backward")] == [("fprop",), ("dgrad", "wgrad")]


def test_what_quantizes_nothing_has_nothing_to_keep_precise():
    bf16 = Recipe.named("bf16")
    for changes in ({"precise": Precise(attention=True)}, {"finish": Finish(share=0.1)}, {"gemm": "bf16-rounded"}):
        assert replace(bf16, **changes).config_id == bf16.config_id
        assert replace(NVFP4, **changes).config_id != NVFP4.config_id
        assert replace(NVFP4, **changes).signature() != NVFP4.signature()
    backward_only = replace(NVFP4, fprop=bf16.fprop)
    finishes = {
        what: replace(backward_only, finish=Finish(share=0.1, what=what)) for what in ("forward", "backward", "all")
    }
    assert finishes["forward"].config_id == backward_only.config_id
    assert finishes["all"].config_id == finishes["backward"].config_id != backward_only.config_id


def test_only_the_kind_of_optimizer_and_the_parts_of_a_batch_are_structure():
    def signature(**fields):
        return replace(NVFP4, training=Training(**fields)).signature()

    same = [{"weight_decay": 0.1}, {"beta1": 0.8, "beta2": 0.99}, {"clip": 1.0}, {"loss_scale": 1024.0}]
    assert {signature(**fields) for fields in same} == {NVFP4.signature()}
    assert signature(optimizer=SGD()) == signature(optimizer=SGD(momentum=0.5))
    assert len({signature(**f) for f in ({}, {"optimizer": SGD()}, {"optimizer": AdamW()}, {"accumulate": 2})}) == 4


def test_sgd_has_no_betas():
    with_betas, without = (replace(NVFP4, training=Training(optimizer=SGD(), beta2=b)) for b in (0.9, None))
    assert with_betas.config_id == without.config_id


def test_labels_say_what_is_not_the_default():
    recipe = replace(
        NVFP4,
        precise=Precise(last=2),
        finish=Finish(share=0.18, what="forward"),
        gemm="bf16-rounded",
        training=Training(optimizer=StableSPAM(reset=500), clip=1.0, accumulate=4),
    )
    assert recipe.label() == (
        "nvfp4, precise embedding+head+router, last 2, last 0.18 forward precise, bf16-rounded, "
        "stable-spam theta=0.999 gamma1=0.7 gamma2=0.9 reset=500, clip 1, accumulate 4"
    )
    columns = recipe.columns()
    assert (columns["finish"], columns["clip"], columns["weight_decay"]) == ("last 0.18 forward", 1.0, None)


def test_toml_reads_back_with_names_and_defaults_left_out(tmp_path):
    recipe = replace(NVFP4, gemm="bf16-rounded", finish=Finish(share=0.2), training=Training(optimizer=StableSPAM()))
    text = recipe_to_toml(recipe)
    assert '\n[training]\noptimizer = "stable-spam"\n' in text
    assert "precise" not in text
    (tmp_path / "r.toml").write_text(text)
    assert read_recipe_file(tmp_path / "r.toml").recipe == recipe
    assert recipe_from_dict(recipe_to_dict(recipe)) == recipe


def test_what_has_no_value_has_a_name_in_files():
    recipe = replace(NVFP4, finish=Finish(share=0.2), training=Training(AdamW(), weight_decay=0.1, clip=1.0))
    own = dict.fromkeys(("optimizer", "weight_decay", "clip"), "task")
    assert recipe_from_dict(recipe_to_dict(recipe) | {"finish": "none", "training": own}) == NVFP4


MISTAKES = {
    "share": ({"finish": {"share": 1.5}}, r"finish.share: found 1.5; accepted: a number above 0, at most 1"),
    "no share": ({"finish": {"share": 0}}, r"finish.share: found 0; accepted: a number above 0"),
    "half a block": ({"precise": {"first": 1.5}}, r"precise.first: found 1.5; accepted: a whole number of blocks"),
    "below zero": ({"precise": {"last": -1}}, r"precise.last: found -1; accepted: a number from 0 on"),
    "coreset": ({"training": {"coreset": {"share": 1.5}}}, r"coreset.share: found 1.5; accepted: a number from 0 to 1"),
    "warm-up": (
        {"training": {"schedule": {"kind": "cosine", "warmup": 2}}},
        r"schedule.warmup: found 2; .* from 0 to 1",
    ),
    "beta": ({"training": {"beta1": 1.0}}, r"training.beta1: found 1.0; accepted: a number below 1"),
    "reset": (
        {"training": {"optimizer": {"kind": "stable-spam", "reset": 0}}},
        r"reset: found 0; .*whole number",
    ),
    "optimizer": (
        {"training": {"optimizer": "lion"}},
        r"found 'lion'; accepted: task, adamw, sgd, stable",
    ),
    "clip": ({"training": {"clip": 0}}, r"training.clip: found 0; accepted: task, a number above 0"),
    "finish": ({"finish": "all"}, r"finish: found 'all'; accepted: none, or a table"),
    "parts": ({"training": {"accumulate": 3}}, r"training.accumulate: found 3; accepted: 1, 2, 4"),
    "fp8": ({"gemm": "fp8-exact"}, r"gemm: found 'fp8-exact'; accepted: exact, bf16-rounded \(nvfp4 in fprop.x has 6 "),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named(name):
    changes, message = MISTAKES[name]
    with pytest.raises(ConfigError, match=message):
        recipe_from_dict(recipe_to_dict(NVFP4) | changes)


def test_mxfp4_fits_fp8_products():
    assert replace(Recipe.named("mxfp4"), gemm="fp8-exact").validate() == []


def test_the_tables_of_the_docs_are_recipes():
    page = (Path(__file__).parents[3] / "docs" / "training.md").read_text(encoding="utf-8")
    tables = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    recipe = recipe_from_dict(recipe_to_dict(NVFP4) | tomllib.loads("\n".join(tables)))
    assert recipe.precise == Precise(first=2, last=0.129)
    assert recipe.finish == Finish(share=0.18, what="forward")
    reset = OsciReset(threshold=8)
    assert recipe.training == Training(
        StableSPAM(), 0.1, 0.9, 0.999, 1.0, 1024.0, 4, Cosine(0.1, 0.1), reset, loss_scale_growth=2000
    )
