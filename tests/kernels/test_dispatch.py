"""Every operation says in one place which implementation it takes, and why not a faster one."""

import ast
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


ASKING = {
    "dispatch.py: by_device": "the one place that chooses between two ways to compute the same",
    "dispatch.py: has_kernels": "the registry itself",
    "dispatch.py: kernels": "the registry itself",
    "dispatch.py: implementation": "the registry itself",
    "ops/adamw/__init__.py: pieces": "size of pieces: a CPU's cache",
    "ops/philox/__init__.py: draws16": "size of pieces: a CPU's memory",
    "quant/operand/kinds.py: laid_out": "layout in memory",
    "quant/spec/codecs/dialects.py: dialects": "where a table lies",
    "quant/triton/launch.py: _compares_pairs": "what a GPU can do",
    "quant/triton/pair_tiles.py: _has_pairs_of_integers": "what a GPU can do",
    "ops/products/triton.py: _has_copy_engine": "what a GPU can do",
    "layer_time.py: _timers": "which clock measures",
    "bench/table.py: bench": "which rows are measured",
    "bench/baseline.py: gemm": "what is compared with: code as others write it",
    "bench/compiled.py: __init__": "the same",
    "bench/compiled_rl.py: __init__": "the same",
    "bench/speed.py: bench": "which rows are measured",
    "bench/speed.py: _rows": "which device is current",
    "engine/population.py: __init__": "memory that the allocator keeps",
    "engine/population.py: _build": "streams and graphs",
    "engine/lane_counts.py: why_not_fit": "memory that is free",
    "engine/lane_counts.py: wait_for": "what a clock measures",
    "engine/lane_counts.py: give_back": "memory that is free",
    "engine/lane_counts.py: reset_peak": "memory that is taken",
    "engine/lane_counts.py: peak": "memory that is taken",
    "engine/run.py: _peak_memory": "memory that is taken",
    "device_memory.py: total_memory": "memory that there is",
    "environment.py: environment": "a column of rows",
    "engine/lane_counts.py: _name": "a name in messages",
    "engine/lane_counts.py: is_alone_on": "memory that others take",
    "engine/lane_counts.py: free_memory": "memory that is free",
    "own/one_by_one.py: seeded": "state of torch's own random numbers",
}
"""Functions that ask for the kind of a device, each with what it is about: none of them chooses an implementation."""


def test_no_function_but_these_asks_for_the_kind_of_a_device():
    found = set()
    for room in ("kernels", "tasks"):
        for file in FOLDER.parents[1].joinpath(room).rglob("*.py"):
            of_room = file.relative_to(FOLDER.parents[1] / room)
            tree = ast.parse(file.read_text())
            functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
            found |= {f"{of_room}: {f.name}" for f in functions if any(map(_asks, ast.walk(f)))}
            inside = {id(node) for f in functions for node in ast.walk(f)}
            assert not any(_asks(node) and id(node) not in inside for node in ast.walk(tree)), of_room
    assert found == set(ASKING)


def _asks(node):
    """True for `x.is_cuda` and its like, for `device.type` compared with anything, and for a name that is looked at:
    `device.startswith("cuda")`, `"cuda" in device`."""
    if isinstance(node, ast.Attribute):
        return node.attr in ("is_cuda", "is_cpu")
    if isinstance(node, ast.Call):
        of_name = isinstance(node.func, ast.Attribute) and node.func.attr in ("startswith", "partition", "split")
        return of_name and any(_is_kind(argument) for argument in node.args)
    if isinstance(node, ast.Compare) and _is_kind(node.left) and isinstance(node.ops[0], ast.In | ast.NotIn):
        return True
    sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
    return any(isinstance(side, ast.Attribute) and side.attr == "type" for side in sides)


def _is_kind(node):
    return isinstance(node, ast.Constant) and node.value in ("cuda", "cpu", "cuda:")


@pytest.mark.parametrize(
    "line",
    [
        "x.is_cuda",
        "x.device.type == 'cuda'",
        "'cpu' != torch.device(d).type",
        "d.startswith('cuda')",
        "'cuda' not in str(d)",
    ],
)
def test_a_function_that_asks_is_found(line):
    assert any(map(_asks, ast.walk(ast.parse(f"if {line}: pass"))))


def test_on_a_cpu_it_is_native_code_or_torch_with_the_reason():
    found = implementations("cpu")
    assert found["native", None] == ["adamw", "philox", "silu"]
    (reason,) = (why for how, why in found if how == "torch")
    assert "need a CUDA device" in reason


def test_without_native_code_its_reason_is_given(monkeypatch):
    monkeypatch.setattr(native, "why_not_native", lambda: "no compiler")
    assert implementations("cpu")["torch", "no compiler"] == ["adamw", "philox", "silu"]


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
