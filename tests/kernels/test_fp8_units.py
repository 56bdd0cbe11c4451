"""Layers in FP8 units compute what they do without, with histories of their own; others are left to other units."""

import msgspec
import pytest
import torch

from fp4dse.dse import QUANTIZERS, Hadamard, Recipe
from fp4dse.dse.attention import Attention
from fp4dse.dse.exactness import has_factor
from fp4dse.dse.outliers import Clamp, Residual
from fp4dse.dse.rounding import Stochastic
from fp4dse.dse.stages import Fprop, Wgrad
from fp4dse.kernels import LaneNumerics, gemm, lanes
from fp4dse.kernels.layers import product
from fp4dse.kernels.ops import fp8
from fp4dse.kernels.ops.attention_core import AttentionCore
from fp4dse.kernels.ops.fp8 import E4M3, E5M2
from fp4dse.kernels.quant.backend import PLAIN
from fp4dse.kernels.quant.operand import state
from fp4dse.kernels.quant.operand.records import Journal, Use
from fp4dse.kernels.quant.triton import operators as fused
from fp4dse.kernels.quant.triton import unfused
from tests.each import each
from tests.kernels.fp8_operands import (
    INTERPRETED,
    MX,
    changed,
    recipe,
)
from tests.kernels.test_triton import arguments_for

OF_TENSOR = QUANTIZERS["fp8-current"]
LAYERS = {
    "mxfp4": Recipe.named("mxfp4"),
    "tiles": Recipe.named("mxfp4-tiles"),
    "by chance": Recipe.uniform(changed(rounding=Stochastic())),
    "samples": recipe(wgrad=Wgrad(g=changed(rounding=Stochastic(samples=2)), x=MX)),
    "rotated": recipe(fprop=Fprop(x=MX, w=MX, rotation=Hadamard(32))),
    "tensor": Recipe.uniform(OF_TENSOR),
    "tensor and blocks": recipe(fprop=Fprop(x=OF_TENSOR, w=MX), wgrad=Wgrad(g=MX, x=QUANTIZERS["fp8-e5m2-current"])),
}
LEFT = {
    "residual": recipe(fprop=Fprop(x=changed(outliers=Residual()), w=MX)),
    "clamp": recipe(fprop=Fprop(x=changed(outliers=Clamp()), w=MX)),
    "int4": recipe(fprop=Fprop(x=changed(element="int4"), w=MX)),
    "e1m2": recipe(fprop=Fprop(x=MX, w=changed(element="e1m2"))),
    "mxfp8": recipe(fprop=Fprop(x=QUANTIZERS["mxfp8"], w=MX)),
    "rows": recipe(fprop=Fprop(x=QUANTIZERS["fp8-row"], w=MX)),
    "segments": recipe(fprop=Fprop(x=QUANTIZERS["fp8-1x128"], w=MX)),
    "twice": recipe(fprop=Fprop(x=QUANTIZERS["fp8-e5m2-current"], w=QUANTIZERS["fp8-e5m2-current"])),
}
"""Recipes whose fprop is left to other units."""


@each("name", LEFT)
def test_what_fp8_units_are_not_for_is_left_to_others_with_the_reason(name):
    a, b = ([q.canonical()] for q in (LEFT[name].fprop.x, LEFT[name].fprop.w))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gemm, "_why_not_device", lambda *_: None)
        patch.setattr(gemm, "why_not_fused", lambda _: None)
        assert str(gemm.GEMMS["fp8-exact"].why_not("cuda", a, b)).startswith("fp8-exact not taken: found ")
        assert gemm.GEMMS["fp8-exact"].why_not("cuda", [MX], [MX]) is None


@each("name", LAYERS)
def test_stages_of_fp8_units_know_the_formats_of_both_operands(name):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gemm, "_why_not_device", lambda *_: None)
        patch.setattr(gemm, "why_not_fused", lambda _: None)
        numerics = LaneNumerics([msgspec.structs.replace(LAYERS[name], gemm="fp8-exact")], (3,))
        for of in numerics.quantized.values():
            assert of.gemm == "fp8-exact"
            assert len(of.fp8) == 2
            assert E4M3 in of.fp8.values()
            for operand_name, slot in of.slots.items():
                itself = slot.quantizers.first.block == "tensor"
                assert (operand_name in of.fp8_itself) == itself


@pytest.mark.parametrize("name", LAYERS)
@INTERPRETED
def test_a_layer_computes_the_same_in_fp8_units(place, any_size, monkeypatch, on_units, name):
    """Each stage, in all ways to quantize; the definition's products are FP32's of the same numbers."""
    kernels = msgspec.structs.replace(PLAIN, operand=fused.operand, fp8=fused.fp8, packed=fused.packed)
    monkeypatch.setattr(lanes, "backend", lambda _: kernels)
    x, w, g = (torch.randn(2, *shape) for shape in [(32, 128), (64, 128), (32, 64)])
    x[0, 5, :32] *= 2.0**-40
    x, w = x.requires_grad_(), w.requires_grad_()
    results = []
    for numerics in (LaneNumerics([LAYERS[name]] * 2, (3, 4)), on_units(LAYERS[name])):
        results.append([])
        for step, scale in ((0, 1.0), (1, 2.0**-12)):  # all that is far from the step before is exact, too
            numerics.step.fill_(step)
            y = product(x * scale, w, None, numerics, 1)
            results[-1] += [y / scale, *torch.autograd.grad(y, (x, w), g * scale)]
    assert set(numerics.gemms.values()) == {"fp8-exact"}
    for got, expected in zip(*results[::-1], strict=True):
        assert got.isfinite().all()
        assert (got - expected).norm() <= 2e-6 * expected.norm()


def of_lanes(seeds, numerics, sizes, device="cpu"):
    """y, and the gradients of x and w, of two steps in lanes of these seeds, each with numbers of its own; the second
    step's are far smaller."""
    rows, columns, length = sizes
    given = torch.Generator(device), []
    for seed in seeds:
        given[0].manual_seed(seed)
        shapes = (rows, length), (columns, length), (rows, columns)
        given[1].append([torch.randn(*shape, generator=given[0], device=device) for shape in shapes])
    x, w, g = (torch.stack(of) for of in zip(*given[1], strict=True))
    x[:, 5, :32] *= 2.0**-40
    x, w, found = x.to(numerics.dtype).requires_grad_(), w.requires_grad_(), []
    for step, scale in ((0, 1.0), (1, 2.0**-12)):
        numerics.step.fill_(step)
        y = product(x * scale, w, None, numerics, 1)
        found += [y.detach(), *torch.autograd.grad(y, (x, w), (g * scale).to(y.dtype))]
    return found


def assert_each_is_what_it_is_alone(made, sizes, device="cpu"):
    """Of 64 lanes the first, the last and one between, alone; made: seeds -> numerics."""
    together = of_lanes(range(64), made(range(64)), sizes, device)
    for lane in (0, 37, 63):
        numerics = made([lane])
        assert set(numerics.gemms.values()) == {"fp8-exact"}
        alone = of_lanes([lane], numerics, sizes, device)
        assert all(torch.equal(a[lane : lane + 1], b) for a, b in zip(together, alone, strict=True)), lane


@pytest.mark.heavy
@INTERPRETED
def test_of_64_lanes_of_a_layer_each_has_the_bits_that_it_has_alone(place, any_size, monkeypatch, on_units):
    kernels = msgspec.structs.replace(PLAIN, operand=fused.operand, fp8=fused.fp8, packed=fused.packed)
    monkeypatch.setattr(lanes, "backend", lambda _: kernels)
    of = msgspec.structs.replace(LAYERS["by chance"], gemm="fp8-exact")
    assert_each_is_what_it_is_alone(lambda seeds: LaneNumerics([of] * len(seeds), seeds), (32, 16, 32))


def test_a_layer_of_another_shape_takes_the_products_that_it_takes_without_fp8(on_units):
    """Bit for bit, and nothing is carried from step to step."""
    x, w = torch.randn(2, 5, 72), torch.randn(2, 3, 72)
    units = on_units("mxfp4")
    assert torch.equal(units.forward(0, x, w).y, LaneNumerics([recipe()] * 2, (3, 4)).forward(0, x, w).y)
    assert not units.state()


def stepped(numerics, steps, scale=1.0):
    """The results of a layer in these steps."""
    x, w = torch.randn(2, 32, 128, generator=torch.Generator().manual_seed(0)) * scale, torch.ones(2, 16, 128)
    for step in steps:
        numerics.step.fill_(step)
        numerics.forward(0, x, w)


def test_histories_are_kept_from_step_to_step_and_only_in_training(any_size, on_units):
    numerics = on_units("mxfp4")
    stepped(numerics, [0, 1])
    kept = {name: value.clone() for name, value in numerics.state().items()}
    assert {name for name in kept if "tops" in name} == {"state/fprop.x/tops 0 0", "state/fprop.w/tops 0 0"}
    tops = kept["state/fprop.w/tops 0 0"]
    assert tops.tolist() == [[127, 127, 0]] * 2
    assert tops.dtype == torch.int32
    numerics.training = False
    stepped(numerics, [2], 8.0)
    assert all(torch.equal(value, kept[name]) for name, value in numerics.state().items())
    numerics.training, copy = True, on_units("mxfp4")
    copy.load_state(kept)
    for of in (numerics, copy):
        stepped(of, [2], 8.0)
    for name, value in copy.state().items():
        assert torch.equal(value, numerics.state()[name])
        assert not torch.equal(value, kept[name])


def test_layers_side_by_side_have_the_histories_that_each_has_alone():
    """As experts that are multiplied together: of two lanes and two layers, the layers of a lane beside each other."""
    seeds, tops = torch.tensor([3, 4]), torch.tensor([[130, 120], [110, 100]], dtype=torch.int32)
    alone, together = {}, {}
    for step in range(3):
        for number, layer in enumerate((5, 7)):
            with state.history(alone, Use(seeds, torch.tensor(step), layer, True), 0) as known:
                known.write(tops[:, number] + step)
        use = Use(seeds.repeat_interleave(2), torch.tensor(step), 5, True, members=(5, 7))
        with state.history(together, use, 0) as known:
            known.write(tops.flatten() + step)
        assert alone.keys() == together.keys() == {"tops 5 0", "tops 7 0"}
        assert all(torch.equal(value, together[name]) for name, value in alone.items())


def test_a_pass_that_is_made_again_finds_and_leaves_what_the_first_one_did():
    kept, journal = {}, Journal()
    for step in range(3):
        use, seen = Use(torch.tensor([3]), torch.tensor(step), 5, True, journal=journal), []
        for journal.mode in ("first", "again"):
            with state.history(kept, use, 0) as known:
                seen.append(known.power(E5M2))
                known.write(torch.tensor([120 + step], dtype=torch.int32))
            seen.append(kept["tops 5 0"].clone())
        assert torch.equal(seen[0], seen[2])
        assert torch.equal(seen[1], seen[3])
        journal.mode = ""
        journal.before.clear()
    assert seen[0] == fp8.power_of(torch.tensor([121]), E5M2, fp8.HEADROOM[E5M2])


@each("name", QUANTIZERS)
def test_a_factor_that_is_left_out_is_one(name):
    q = QUANTIZERS[name].canonical()
    if has_factor(q) or not isinstance(q.block, int):
        return
    x = torch.randn(1, 4, 2 * q.unit) * torch.exp2(torch.arange(4.0))[:, None]
    x[0, 3] = 0.0
    assert torch.equal(unfused.operand(*arguments_for(x, [q]))[1], torch.ones(1))


def test_the_attention_core_takes_exact_products_all_the_same():
    assert AttentionCore([Attention()], torch.device("cpu"), PLAIN, "fp8-exact").exact


@pytest.mark.gpu
def test_a_layer_on_a_device_computes_the_same_in_fp8_units_and_a_lane_what_it_does_alone():
    """In the first step, whose power is 1, and in others; with a jump by 2^-12."""
    x, w, g = (torch.randn(2, *shape, device="cuda") for shape in ((4096, 1024), (2048, 1024), (4096, 2048)))
    x[0, 5, :32] *= 2.0**-40
    results = []
    for gemm_name, chosen in (("exact", slice(2)), ("fp8-exact", slice(2)), ("fp8-exact", slice(1, 2))):
        own_x, own_w = (of[chosen].clone().requires_grad_() for of in (x, w))
        numerics = LaneNumerics([recipe(gemm=gemm_name)] * len(own_x), (3, 4)[chosen], "cuda", dtype=torch.bfloat16)
        assert set(numerics.gemms.values()) == {"bf16-exact" if gemm_name == "exact" else gemm_name}
        results.append([])
        for step, scale in enumerate((1.0, 1.0, 2.0**-12)):
            numerics.step.fill_(step)
            y = product((own_x * scale).to(torch.bfloat16), own_w, None, numerics, 1)
            results[-1] += [y, *torch.autograd.grad(y, (own_x, own_w), (g[chosen] * scale).to(y.dtype))]
    for expected, got, alone in zip(*results, strict=True):
        assert got.isfinite().all()
        assert (got.float() - expected.float()).norm() <= 2.0**-8 * expected.float().norm()  # y is rounded to BF16
        assert torch.equal(got[1:], alone)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mxfp4", "by chance"])
def test_of_64_lanes_on_a_device_each_has_the_bits_that_it_has_alone(name):
    """Of a layer that is just large enough."""
    of, sizes = msgspec.structs.replace(LAYERS[name], gemm="fp8-exact"), (4096, 2048, 1024)
    assert fp8.is_taken(*sizes)

    def made(seeds):
        return LaneNumerics([of] * len(seeds), seeds, "cuda", dtype=torch.bfloat16)

    assert_each_is_what_it_is_alone(made, sizes, "cuda")


@pytest.mark.gpu
def test_a_layer_of_ragged_shape_has_the_bits_that_it_has_without_fp8():
    x, w = (torch.randn(2, n, 1024, device="cuda", dtype=torch.bfloat16) for n in (4104, 2048))
    of = [LaneNumerics([recipe(gemm=name)] * 2, (3, 4), "cuda") for name in ("exact", "fp8-exact")]
    first, second = (numerics.forward(0, x, w).y for numerics in of)
    assert torch.equal(first, second)
    assert not of[1].state()
