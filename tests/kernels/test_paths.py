"""Operands take the fastest path that does not refuse them."""

from __future__ import annotations

import msgspec
import pytest
import torch

from fp4dse.dse import Quantizer, Recipe
from fp4dse.dse.estimator import Clipped, Estimator, Through
from fp4dse.dse.outliers import OUTLIER_NAMES
from fp4dse.dse.rounding import Stochastic
from fp4dse.kernels import native, native_library
from fp4dse.kernels.quant.backend import PLAIN, Backend, _compiled
from fp4dse.kernels.quant.operand.kinds import (
    Centred,
    Clamped,
    Estimated,
    Plain,
    Residual,
    Sampled,
    Scaled,
    Spectral,
    make_slot,
)
from fp4dse.kernels.quant.operand.paths import PATHS, described, first_path
from fp4dse.kernels.quant.operand.records import Use
from fp4dse.kernels.quant.triton import limits
from fp4dse.kernels.quant.triton import operators as fused
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


@pytest.mark.parametrize(
    ("block", "shape", "path"),
    [
        ("32x32", (2, 64, 64), "blocks"),  # of 1024
        ("row", (2, 32, 1024), "blocks"),
        ("row", (2, 32, 8), "blocks"),
        ("row", (2, 32, 48), "by-scales"),
        ("row", (2, 32, 2048), "by-scales"),
    ],
)
def test_native_code_is_asked_for_its_own_blocks_and_has_the_bits_of_the_reference(block, shape, path):
    q = replace(NVFP4, block=block, rounding=Stochastic())
    x, got = torch.randn(shape), []
    for backend in (_compiled(), PLAIN):
        of = slot(q, backend)
        assert first_path(of.quantizers, x, USE) == (path if backend is not PLAIN else "reference")
        (term,) = of.quantize(x, USE).terms
        got.append((term.values, term.factor))
    for ours, theirs in zip(*got, strict=True):
        assert torch.equal(ours, theirs)
    if path == "by-scales":
        said = f"block: found {shape[2]} elements; accepted: 8, 16, 32, 64, 128, 256, 512, 1024"
        assert PATHS["blocks"].why_not(slot(q, _compiled()).quantizers, x, USE) == said


def test_a_machine_says_what_each_path_takes():
    rows = {name: takes for name, takes, _ in described(_compiled(), "no GPU")}
    assert rows["quantizing whole"].startswith("block, table; blocks of 8, 16,")
    assert rows["quantizing by-scales"] == ", ".join(native_library.CODECS)
    assert rows["quantizing tiles"] == rows["gradient through quantizers"] == "no"
    on_gpu = replace(PLAIN, operand=fused.operand, squares=fused.squares, by_scales=by_scales, through=fused.through)
    rows = {name: takes for name, takes, _ in described(on_gpu, None)}
    assert rows["quantizing tiles"] == "block; tiles of 16, 32"
    assert rows["gradient through quantizers"] == ", ".join(limits.RELAXATIONS)
    assert [name.removeprefix("quantizing ") for name in rows][:-1] == list(PATHS)


def test_a_slot_has_one_kind():
    names = "occ", "residual", "mean", "low-rank"
    clamp, residual, mean, low_rank = (replace(NVFP4, outliers=OUTLIER_NAMES[name]) for name in names)
    kinds = {Plain: Quantizer(element="bf16"), Scaled: NVFP4, Clamped: clamp, Residual: residual, Centred: mean}
    kinds[Spectral] = low_rank
    kinds[Sampled] = replace(NVFP4, rounding=Stochastic(samples=2))
    assert all(type(slot(q)) is kind for kind, q in kinds.items())
    recipe = replace(Recipe.uniform(NVFP4), estimator=Estimator(w=Through(Clipped())))
    made = {name: make_slot([recipe] * 2, name, CPU, PLAIN) for name in ("fprop.x", "fprop.w", "dgrad.w")}
    assert [type(of) for of in made.values()] == [Scaled, Estimated, Scaled]
