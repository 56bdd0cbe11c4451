"""Every shipped recipe, its six slots as the literature gives them (techniques table: format, rounding, rotation)."""

import pytest

from fp4dse.dse import SHARED, SLOTS, STAGES, Recipe, recipe_files
from fp4dse.dse.place import Place
from fp4dse.dse.precision import Finish, Precise
from fp4dse.dse.stages import rotation_name
from fp4dse.dse.training import StableSPAM, Training

SLOTS_OF = {
    "alto-mxfp4": [
        "mxfp4-even",
        "e2m1 32x32 e8m0-even",
        "mxfp4-rceil SR",
        "e2m1 32x32 e8m0-even",
        "mxfp4-rceil SR",
        "mxfp4-even",
    ],
    "amd-mxfp4": ["mxfp4", "mxfp4", "mxfp4", "mxfp4", "mxfp4", "mxfp4"],
    "bf16": ["bf16", "bf16", "bf16", "bf16", "bf16", "bf16"],
    "fp4-all-the-way": ["nvfp4", "nvfp4", "nvfp4 16/17 SR", "nvfp4", "nvfp4 16/17 SR", "nvfp4 16/17 SR"],
    "four-over-six": [
        "nvfp4-4over6-mse",
        "nvfp4-4over6-mse",
        "nvfp4 16/17 SR",
        "nvfp4-4over6-mse",
        "nvfp4 16/17 SR",
        "nvfp4-4over6-mse",
    ],
    "hif4-ascend": ["hif4", "hif4", "hif4", "hif4", "hif4", "hif4"],
    "luq": ["int4-sawb", "int4-sawb", "luq", "int4-sawb", "luq", "int4-sawb"],
    "mxfp4": ["mxfp4", "mxfp4", "mxfp4", "mxfp4", "mxfp4", "mxfp4"],
    "mxfp4-ascend": [
        "mxfp4-rceil",
        "mxfp4-rceil",
        "mxfp4-rceil SR",
        "mxfp4-rceil SR",
        "mxfp4-rceil SR",
        "mxfp4-rceil SR",
    ],
    "mxfp4-sr-rht": ["mxfp4-rceil", "mxfp4-rceil", "mxfp4-rceil SR", "mxfp4-rceil", "mxfp4-rceil SR", "mxfp4-rceil"],
    "mxfp4-tiles": ["mxfp4-2d", "mxfp4-2d", "mxfp4-rceil SR", "mxfp4-2d", "mxfp4-rceil SR", "mxfp4-2d"],
    "nvfp4": ["nvfp4", "nvfp4", "nvfp4", "nvfp4", "nvfp4", "nvfp4"],
    "nvfp4-sr": ["nvfp4", "nvfp4", "nvfp4 16/17 SR", "nvfp4", "nvfp4 16/17 SR", "nvfp4"],
    "nvfp4-sr-rht": ["nvfp4", "nvfp4", "nvfp4 16/17 SR", "nvfp4", "nvfp4 16/17 SR", "nvfp4"],
    "nvfp4-stable-spam": ["nvfp4", "nvfp4", "nvfp4", "nvfp4", "nvfp4", "nvfp4"],
    "nvidia-nvfp4-finish": ["nvfp4", "nvfp4-2d", "nvfp4 16/17 SR", "nvfp4-2d", "nvfp4 16/17 SR", "nvfp4"],
    "nvidia-nvfp4": ["nvfp4", "nvfp4-2d", "nvfp4 16/17 SR", "nvfp4-2d", "nvfp4 16/17 SR", "nvfp4"],
    "quartet": [
        "quest-mxfp4",
        "quest-mxfp4",
        "mxfp4 aligned",
        "mxfp4 aligned",
        "mxfp4 aligned",
        "mxfp4 aligned",
    ],
    "quartet2": ["nvfp4-4over6-mse", "nvfp4-4over6-mse", "ms-eden", "ms-eden", "ms-eden", "ms-eden"],
    "sun-radix4": ["int4-sawb", "int4-sawb", "radix4", "int4-sawb", "radix4-odd", "int4-sawb"],
    "te-nvfp4": ["nvfp4", "nvfp4-2d", "nvfp4 SR", "nvfp4-2d", "nvfp4 SR", "nvfp4"],
    "tetrajet": ["mxfp4-rceil", "mxfp4-rceil", "mxfp4-rceil SR", "mxfp4-rceil SR", "mxfp4-rceil SR", "mxfp4-rceil SR"],
    "tetrajet-qema": [
        "mxfp4-rceil",
        "mxfp4-rceil EMA",
        "mxfp4-rceil SR",
        "mxfp4-rceil SR",
        "mxfp4-rceil SR",
        "mxfp4-rceil SR",
    ],
    "tetrajet2": [
        "e2m1 1x16 e4m3 T448 segment",
        "e2m1 1x16 e4m3 T448 segment",
        "e2m1 1x16 e4m3 T448 segment 16/17 SR",
        "e2m1 1x16 e4m3 T448 segment 16/17 SR",
        "e2m1 1x16 e4m3 T448 segment 16/17 SR",
        "e2m1 1x16 e4m3 T448 segment 16/17 SR",
    ],
    "tseng-mxfp4": ["bf16", "bf16", "mxfp4 3/4 SR", "mxfp4 3/4 SR", "mxfp4 3/4 SR", "mxfp4 3/4 SR"],
    "ue5m3-graphcore": [
        "e2m1 1x16 ue5m3-61440 T448 held50",
        "e2m1 16x16 ue5m3-61440 T448 held50",
        "e2m1 1x16 ue5m3-61440 T448 held50 SR8",
        "e2m1 16x16 ue5m3-61440 T448 held50",
        "e2m1 1x16 ue5m3-61440 T448 held50 SR8",
        "e2m1 1x16 ue5m3-61440 T448 held50",
    ],
    "ue5m3-sr": ["ue5m3-t448", "ue5m3-t448", "ue5m3-t448 16/17 SR", "ue5m3-t448", "ue5m3-t448 16/17 SR", "ue5m3-t448"],
    "ufp4": [
        "e1m2 1x16 fp32",
        "e1m2 1x16 fp32",
        "e1m2 1x16 fp32 SR",
        "e1m2 1x16 fp32",
        "e1m2 1x16 fp32 SR",
        "e1m2 1x16 fp32",
    ],
    "wang-dge-occ": ["fp4-row occ", "fp4-row", "fp8-e5m2", "fp8", "fp8-e5m2", "fp8"],
    "zhou-mixed": ["fp4-row", "fp4-row", "fp8-e5m2", "fp8", "fp8-e5m2", "fp8"],
}
"""Recipe -> fprop.x, fprop.w, dgrad.g, dgrad.w, wgrad.g, wgrad.x."""

ROTATIONS_OF = {
    "alto-mxfp4": ["none", "none", "rht32"],
    "amd-mxfp4": ["none", "none", "hadamard16"],
    "four-over-six": ["none", "none", "rht16"],
    "hif4-ascend": ["rht64", "none", "none"],
    "mxfp4-ascend": ["rht32", "none", "none"],
    "mxfp4-sr-rht": ["none", "none", "rht32"],
    "nvfp4-sr-rht": ["none", "none", "rht16"],
    "nvidia-nvfp4-finish": ["none", "none", "rht16"],
    "nvidia-nvfp4": ["none", "none", "rht16"],
    "quartet": ["hadamard32", "rht32", "rht32"],
    "quartet2": ["none", "rht128", "rht128"],
    "te-nvfp4": ["none", "none", "fixed16"],
    "tetrajet2": ["none", "rht16", "rht16"],
    "tseng-mxfp4": ["none", "rht64", "rht64"],
    "ufp4": ["rht16", "rht16", "rht16"],
}
"""Recipe -> rotation of fprop, dgrad, wgrad, where there is one."""

FROM_FORWARD = ["quartet", "quartet2", "tetrajet", "tetrajet-qema", "tetrajet2"]
"""Recipes that re-quantize the forward's copies of x and w in the backward pass."""

ENDS = Precise(first=0.032, last=0.129)
AROUND_OF = {
    "four-over-six": {"precise": Precise(last=0.167)},
    "fp4-all-the-way": {"finish": Finish(share=0.038, what="backward")},
    "nvfp4-stable-spam": {"training": Training(optimizer=StableSPAM(reset=500), beta1=0.9, beta2=0.999)},
    "nvidia-nvfp4": {"precise": ENDS},
    "nvidia-nvfp4-finish": {"precise": ENDS, "finish": Finish(share=0.18, what="forward")},
    "zhou-mixed": {"precise": Precise(attention=True), "finish": Finish(share=0.1)},
}
"""Recipe -> layers and steps that are not quantized, and the training side, where they are not the default."""


@pytest.mark.parametrize("name", recipe_files())
def test_a_recipe_keeps_precise_what_its_paper_does(name):
    recipe = Recipe.named(name)
    around = {field: getattr(recipe, field) for field in ("precise", "finish", "gemm", "training")}
    defaults = {"precise": Precise(), "finish": None, "gemm": "exact", "training": Training()}
    assert around == defaults | AROUND_OF.get(name, {})


def test_shares_of_blocks_are_those_of_the_papers():
    def kept(name, blocks):
        return [i for i in range(blocks) if Recipe.named(name).precise.why(Place("mlp", i, blocks))]

    assert kept("nvidia-nvfp4", 62) == [0, 1, *range(54, 62)]
    assert kept("four-over-six", 24) == [20, 21, 22, 23]


@pytest.mark.parametrize("name", recipe_files())
def test_a_recipe_has_the_six_slots_of_its_paper(name):
    recipe = Recipe.named(name)
    assert [recipe.slot(slot).label() for slot in SLOTS] == SLOTS_OF[name]
    rotations = [rotation_name(recipe.rotation(stage)) for stage in STAGES]
    assert rotations == ROTATIONS_OF.get(name, ["none", "none", "none"])
    assert {recipe.source(stage) for stage in SHARED} == {"forward" if name in FROM_FORWARD else "master"}


@pytest.mark.parametrize("name", recipe_files())
def test_a_recipe_says_what_it_is_and_where_it_is_from(name):
    file = recipe_files()[name]
    assert len(file.summary) > 10
    assert file.source
