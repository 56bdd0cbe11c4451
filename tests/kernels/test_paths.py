"""Operands take the fastest path that does not refuse them."""

from __future__ import annotations

import msgspec
import pytest
import torch

from fp4dse.dse import Quantizer, Recipe
from fp4dse.dse.estimator import Clipped, Estimator, Through
from fp4dse.dse.outliers import OUTLIER_NAMES
from fp4dse.kernels import native
from fp4dse.kernels.quant.backend import PLAIN, Backend
from fp4dse.kernels.quant.operand.kinds import Clamped, Estimated, Plain, Residual, Scaled, make_slot
from fp4dse.kernels.quant.operand.paths import PATHS, first_path
from fp4dse.kernels.quant.operand.records import Use
from fp4dse.kernels.quant.triton.by_scales import by_scales

replace = msgspec.structs.replace
CPU = torch.device("cpu")
WITH_OPERAND = replace(PLAIN, operand=native.operand)
WITH_SCALES = replace(PLAIN, by_scales=by_scales)
NVFP4 = Quantizer.named("nvfp4")
USE = Use(torch.arange(2), torch.tensor(0), 0, training=True)


def slot(q: Quantizer, backend=PLAIN, name: str = "fprop.w"):
    return make_slot([Recipe.uniform(q)] * 2, name, CPU, backend)


@pytest.mark.parametrize(
    ("backend", "block", "counting", "path"),
    [
        (PLAIN, 16, False, "reference"),
        (WITH_SCALES, 16, False, "by-scales"),
        (WITH_OPERAND, 16, False, "whole"),
        (WITH_OPERAND, 16, True, "counted"),
        (WITH_OPERAND, "16x16", False, "blocks"),
        (WITH_OPERAND, "row", False, "blocks"),
        (PLAIN, "row", True, "counted"),
    ],
    ids=lambda value: None if isinstance(value, Backend) else str(value),
)
def test_the_first_path_that_takes_an_operand_is_taken(backend, block, counting, path):
    of = slot(replace(NVFP4, block=block), backend).quantizers
    x, use = torch.randn(2, 32, 64), replace(USE, counting=counting)
    assert first_path(of, x, use) == path
    skipped = list(PATHS)[: list(PATHS).index(path)]
    assert all(isinstance(PATHS[name].why_not(of, x, use), str) for name in skipped)


def test_rows_of_a_length_that_the_kernel_does_not_have_are_left_to_the_reference():
    of = slot(replace(NVFP4, block="row"), WITH_OPERAND).quantizers
    assert first_path(of, torch.randn(2, 32, 48), USE) == "reference"
    assert PATHS["blocks"].why_not(of, torch.randn(2, 32, 48), USE).startswith("block: found 48 elements; accepted: 16")


def test_a_slot_has_one_kind():
    clamp, residual = (replace(NVFP4, outliers=OUTLIER_NAMES[name]) for name in ("occ", "residual"))
    kinds = {Plain: Quantizer(element="bf16"), Scaled: NVFP4, Clamped: clamp, Residual: residual}
    assert all(type(slot(q)) is kind for kind, q in kinds.items())
    recipe = replace(Recipe.uniform(NVFP4), estimator=Estimator(w=Through(Clipped())))
    made = {name: make_slot([recipe] * 2, name, CPU, PLAIN) for name in ("fprop.x", "fprop.w", "dgrad.w")}
    assert [type(of) for of in made.values()] == [Scaled, Estimated, Scaled]
