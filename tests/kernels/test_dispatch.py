"""Every operation says in one place which implementation it takes, and why not a faster one."""

from pathlib import Path

import pytest
import torch

from fp4dse.kernels import dispatch, native, ops
from fp4dse.kernels.dispatch import OPERATIONS, implementations, refusals
from fp4dse.kernels.ops.silu import silu
from tests.kernels.comparing import take_kernels

FOLDER = Path(ops.__file__).parent
BUILDING_BLOCKS = {"elementary", "rotation"}
"""Triton code that other kernels are made of, without a launch of its own."""


def test_every_folder_with_kernels_is_in_the_registry():
    listed = {name for names in implementations("cpu").values() for name in names}
    assert listed == set(OPERATIONS) == {file.parent.name for file in FOLDER.glob("*/triton.py")} - BUILDING_BLOCKS


def test_nothing_else_asks_where_kernels_run():
    asking = {
        str(file.relative_to(FOLDER.parent))
        for file in FOLDER.parents[1].joinpath("kernels").rglob("*.py")
        if "_takes(" in file.read_text() or "has_kernels(" in file.read_text()
    }
    assert asking == {"dispatch.py"}


def test_on_a_cpu_it_is_native_code_or_torch_with_the_reason():
    found = implementations("cpu")
    assert found["native", None] == ["adamw", "silu"]
    (reason,) = (why for how, why in found if how == "torch")
    assert "need a CUDA device" in reason


def test_without_native_code_its_reason_is_given(monkeypatch):
    monkeypatch.setattr(native, "why_not_native", lambda: "no compiler")
    assert implementations("cpu")["torch", "no compiler"] == ["adamw", "silu"]


def test_an_operand_that_kernels_refuse_is_computed_by_torch_and_said(place, monkeypatch):
    take_kernels(monkeypatch, "silu")
    x = torch.randn(4, 9, device=place.device)
    refusals()
    expected = silu(x)
    assert not refusals()
    monkeypatch.setattr(place.silu, "why_not", lambda x: f"x: found {tuple(x.shape)}; accepted: none", raising=False)
    monkeypatch.setattr(place.silu, "silu", None)  # it is not called
    assert torch.equal(silu(x), expected)
    assert refusals() == ("silu: computed by torch (x: found (4, 9); accepted: none)",)
    assert not refusals()  # each is said once


def test_an_empty_tensor_needs_no_kernel(monkeypatch):
    take_kernels(monkeypatch, "silu")
    assert silu(torch.zeros(3, 0)).shape == (3, 0)
    assert not refusals()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_where_kernels_run(device):
    x = torch.zeros(1, device=device)
    assert OPERATIONS["sums"].has_kernels(x) == (dispatch.why_not_fused(device) is None) == (device == "cuda")
