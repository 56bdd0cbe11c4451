"""Which kernels a tensor goes through, what they share, and how their time is split."""

import msgspec
import pytest

from fp4dse.dse import Hadamard, Quantizer, Recipe
from fp4dse.dse.cost import load_chip
from fp4dse.dse.cost.operands import TECHNIQUES, Item, Kernel, passes, seconds, tensor_uses
from fp4dse.dse.cost.work import Work
from fp4dse.dse.scale import TensorScale
from fp4dse.dse.stages import Dgrad, Fprop, Wgrad

B200 = load_chip("b200")
BF16, MXFP4, NVFP4, TILES = (Quantizer.named(name) for name in ("bf16", "mxfp4", "nvfp4", "nvfp4-2d"))


def kernels(tensor: str, first, second) -> list[Kernel]:
    return passes(tensor_uses(tensor, first, second, B200), B200)


def of(kernel: Kernel, field: str) -> float:
    return kernel.per_step * sum(getattr(item.work, field) for item in kernel.items)


def scaled(**factor) -> Quantizer:
    return msgspec.structs.replace(NVFP4, tensor_scale=TensorScale(**factor))


def test_both_orientations_share_one_read():
    [kernel] = kernels("x", Fprop(x=MXFP4, w=MXFP4), Wgrad(g=MXFP4, x=MXFP4))
    assert (of(kernel, "read"), of(kernel, "write")) == (2, 2 * 4.25 / 8)
    assert {item.slot for item in kernel.items} == {"fprop.x", "wgrad.x"}


def test_plain_operands_need_no_kernel():
    assert not kernels("x", Fprop(x=BF16, w=BF16), Wgrad(g=BF16, x=BF16))


@pytest.mark.parametrize(
    ("factor", "share"),
    [({}, 1), ({"amax": "held"}, 1 / 50), ({"amax": "held", "steps": 8}, 1 / 8), ({"amax": "previous"}, 0)],
)
def test_only_a_current_maximum_reads_the_tensor_again(factor, share):
    q = scaled(**factor)
    made = kernels("x", Fprop(x=q, w=q), Wgrad(g=q, x=q))
    assert sum(of(kernel, "read") for kernel in made) == pytest.approx(2 + 2 * share)


@pytest.mark.parametrize("over", ["row", "segment"])
def test_factors_of_rows_are_found_on_the_way(over):
    q = scaled(over=over)
    assert len(kernels("x", Fprop(x=q, w=q), Wgrad(g=q, x=q))) == 1


def test_a_tensor_rotated_along_two_axes_has_two_maxima_from_one_read():
    turned, plain = Hadamard(size=16), None
    instructions = {}
    for rotation in (plain, turned):
        made = kernels("g", Dgrad(g=NVFP4, w=NVFP4, rotation=rotation), Wgrad(g=NVFP4, x=NVFP4, rotation=rotation))
        assert len(made) == 2
        assert of(made[0], "read") == 2
        instructions[rotation] = of(made[0], "vector")
    assert instructions[plain] == 2
    assert instructions[turned] == 1 + 2 * (1 + 5)


def test_equal_tiles_are_encoded_once_and_written_twice():
    maximum, kernel = kernels("w", Fprop(x=NVFP4, w=TILES), Dgrad(g=NVFP4, w=TILES))
    assert [item.technique for item in kernel.items if item.slot == "dgrad.w"] == ["second copy"]
    assert of(kernel, "write") == 2 * TILES.bits_per_element / 8
    assert of(maximum, "read") == 2


@pytest.mark.parametrize(
    "dgrad",
    [
        Dgrad(g=NVFP4, w=TILES, rotation=Hadamard(size=16)),
        Dgrad(g=NVFP4, w=msgspec.structs.replace(TILES, range="16/17")),
        Dgrad(g=NVFP4, w=NVFP4),
    ],
    ids=["rotated", "another range", "rows"],
)
def test_tiles_are_encoded_again_where_the_encoding_is_another(dgrad):
    kernel = kernels("w", Fprop(x=NVFP4, w=TILES), dgrad)[-1]
    assert "second copy" not in {item.technique for item in kernel.items}


def test_one_copy_serves_both_products_where_units_contract_it_along_either_axis():
    fp8, rows = (Quantizer.named(name) for name in ("fp8-current", "fp8-row"))
    stages = Fprop(x=fp8, w=fp8), Wgrad(g=fp8, x=fp8)
    assert sum(of(kernel, "write") for kernel in kernels("x", *stages)) == 1
    hopper = load_chip("h100")
    assert sum(of(kernel, "write") for kernel in passes(tensor_uses("x", *stages, hopper), hopper)) == 2
    by_rows = kernels("x", Fprop(x=rows, w=rows), Wgrad(g=rows, x=rows))
    assert sum(of(kernel, "write") for kernel in by_rows) == 2
    other = kernels("x", Fprop(x=fp8, w=fp8), Wgrad(g=BF16, x=fp8))  # a BF16 product wants it decoded
    assert sum(of(kernel, "write") for kernel in other) == 1 + 2


def test_operands_from_the_forwards_copy_read_its_codes():
    forward, copied = kernels("x", Fprop(x=MXFP4, w=MXFP4), Wgrad(g=MXFP4, x=MXFP4, source="forward"))
    assert of(forward, "read") == 2
    assert of(copied, "read") == 4.25 / 8


def test_a_bf16_product_of_the_forwards_copy_is_fed_by_decoding_it():
    _, copied = kernels("x", Fprop(x=MXFP4, w=MXFP4), Wgrad(g=BF16, x=BF16, source="forward"))
    assert (of(copied, "read"), of(copied, "write")) == (4.25 / 8, 2)


def test_a_bf16_operand_of_a_rotated_product_is_rotated():
    [kernel] = kernels("x", Fprop(x=BF16, w=BF16), Wgrad(g=MXFP4, x=BF16, rotation=Hadamard(size=32)))
    assert (of(kernel, "read"), of(kernel, "write"), of(kernel, "vector")) == (2, 2, 1 + 7)


def test_arithmetic_under_a_pass_that_waits_for_memory_is_free():
    items = [Item("fprop.x", "rotation", Work(vector=6)), Item("fprop.x", "quantize", Work(read=2, write=2, vector=3))]
    assert seconds(Kernel(tuple(items)), B200) == {"quantize": items[1].work.seconds(B200), "rotation": 0}


@pytest.mark.parametrize(
    "name", ["quartet2", "nvidia-nvfp4", "tetrajet-qema", "wang-dge-occ", "averis", "metis", "pact", "sun-radix4"]
)
@pytest.mark.parametrize("chip", [load_chip(name) for name in ("b200", "h200")], ids=["b200", "h200"])
def test_the_split_of_a_kernel_adds_up_to_its_time(name, chip):
    recipe = Recipe.named(name)
    for kernel in passes(tensor_uses("x", recipe.fprop, recipe.wgrad, chip), chip):
        split = seconds(kernel, chip)
        whole = Work()
        for item in kernel.items:
            whole += item.work
        assert sum(split.values()) == pytest.approx(kernel.per_step * whole.seconds(chip))
        assert set(split) <= set(TECHNIQUES)
        assert min(split.values()) >= 0
