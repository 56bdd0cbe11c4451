"""A convolution is the product of its im2col matrix: plain torch's values with the quantizers off, the six slots on."""

import msgspec
import pytest
import torch
import torch.nn.functional as F

from fp4dse.dse import SLOTS, STAGES, Hadamard, Quantizer, Recipe
from fp4dse.dse.rounding import Stochastic
from fp4dse.dse.stages import Dgrad, Fprop, Wgrad
from fp4dse.kernels import LaneNumerics, QuantConv2d, quantize
from fp4dse.kernels.ops.columns import Window, col2im, im2col

OFF, NVFP4 = Quantizer.named("none"), Quantizer.named("nvfp4")
SHAPES = [  # batch, height, width, channels in, channels out, kernel, stride, padding
    (2, 8, 8, 3, 16, (3, 3), 1, 1),
    (3, 7, 9, 16, 8, (3, 3), 2, 1),
    (2, 6, 6, 16, 8, (1, 1), 1, 0),
    (2, 5, 5, 4, 6, (1, 1), 2, 0),
    (1, 14, 14, 1, 5, (7, 7), 2, 3),
    (2, 5, 8, 2, 3, (2, 3), 1, 0),
]


def recipe_with(slot: str | None = None, quantizer: Quantizer = OFF, **rotations) -> Recipe:
    """All slots off but one; rotations by stage name."""

    def stage(kind, name):
        slots = {o: quantizer if slot == f"{name}.{o}" else OFF for o in STAGES[name]}
        return kind(**slots, rotation=rotations.get(name))

    return Recipe(fprop=stage(Fprop, "fprop"), dgrad=stage(Dgrad, "dgrad"), wgrad=stage(Wgrad, "wgrad"))


def from_forward(q: Quantizer, rotation: Hadamard | None = None) -> Recipe:
    """dW takes the columns as q of the forward pass left them, and quantizes them again."""
    return Recipe(
        fprop=Fprop(x=q, w=q, rotation=rotation), dgrad=Dgrad(g=q, w=q), wgrad=Wgrad(g=q, x=q, source="forward")
    )


def numerics(recipe: Recipe, lanes: int) -> LaneNumerics:
    """Lanes of the recipe as written: `canonical` would drop a rotation that has nothing to quantize."""
    made = LaneNumerics([recipe] * lanes, range(lanes))
    for name, stage in made.quantized.items():
        stage.rotation = recipe.rotation(name)
    return made


def run(recipe, shape, lanes=2):
    """x, w, bias, g and y, dx, dw, dbias of one layer."""
    batch, height, width, cin, cout, kernel, stride, padding = shape
    torch.manual_seed(0)
    x = torch.randn(lanes, batch, height, width, cin, requires_grad=True)
    w, b = torch.randn(lanes, cout, *kernel, cin), torch.randn(lanes, cout)
    layer = QuantConv2d(w, b, numerics(recipe, lanes), layer=3, stride=stride, padding=padding)
    y = layer(x)
    g = torch.randn_like(y)
    y.backward(g)
    return (x.detach(), w, b, g), (y.detach(), x.grad, layer.weight.grad.view_as(w), layer.bias.grad)


def torch_conv(x, w, b, g, stride, padding):
    """The same by torch's convolution, in float64, lane by lane."""
    found = []
    for lane in zip(x.double(), w.double(), b.double(), g.double(), strict=True):
        lx, lw, lb = (t.clone().requires_grad_() for t in lane[:3])
        y = F.conv2d(lx.permute(0, 3, 1, 2), lw.permute(0, 3, 1, 2), lb, stride, padding).permute(0, 2, 3, 1)
        y.backward(lane[3])
        found.append((y.detach(), lx.grad, lw.grad, lb.grad))
    return tuple(torch.stack(t) for t in zip(*found, strict=True))


def error(ours, theirs):
    return float((ours.double() - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("shape", SHAPES)
def test_quantizers_off_equals_the_convolution_of_torch(shape):
    given, got = run(recipe_with(), shape)
    for ours, theirs in zip(got, torch_conv(*given, *shape[-2:]), strict=True):
        assert ours.shape == theirs.shape
        assert error(ours, theirs) < 1e-6


@pytest.mark.parametrize("shape", SHAPES[:2])
def test_quantizers_off_equals_the_plain_product_of_columns_bit_for_bit(shape):
    (x, w, b, g), (y, dx, dw, _) = run(recipe_with(), shape)
    window = Window(*shape[5:])
    flat, matrix, rows = im2col(x, window), w.flatten(2), g.flatten(1, 3)
    assert torch.equal(y.flatten(1, 3), torch.bmm(flat, matrix.mT) + b[:, None])
    assert torch.equal(dw.flatten(2), torch.bmm(rows.mT, flat))
    assert torch.equal(dx, col2im(torch.bmm(rows, matrix), window, x.shape, x.dtype))


@pytest.mark.parametrize("stage", STAGES)
def test_a_rotation_cancels_in_its_own_product(stage):
    given, got = run(recipe_with(**{stage: Hadamard(size=16)}), SHAPES[1])
    for name, ours, theirs in zip(STAGES, got, torch_conv(*given, *SHAPES[1][-2:]), strict=False):
        assert error(ours, theirs) < 2e-6, name


@pytest.mark.parametrize("slot", SLOTS)
def test_each_slot_quantizes_along_the_contraction_of_its_product(slot):
    q = Quantizer.named("mxfp4")  # blocks of 32: the sizes are such that none needs padding
    shape = (2, 4, 8, 32, 64, (3, 3), 1, 1)
    (x, w, b, g), got = run(recipe_with(slot, q), shape)
    window = Window((3, 3), 1, 1)
    operands = {"x": im2col(x, window), "w": w.flatten(2), "g": g.flatten(1, 3)}
    stage, name = slot.split(".")
    last = slot in ("fprop.x", "fprop.w", "dgrad.g")  # else the contraction is the operand's rows
    seen = operands[name] if last else operands[name].mT
    seen = torch.stack([quantize(lane, q).values for lane in seen])
    operands[name] = seen if last else seen.mT
    if stage == "fprop":
        wanted, ours = torch.bmm(operands["x"], operands["w"].mT) + b[:, None], got[0].flatten(1, 3)
    elif stage == "wgrad":
        wanted, ours = torch.bmm(operands["g"].mT, operands["x"]), got[2].flatten(2)
    else:
        wanted, ours = col2im(torch.bmm(operands["g"], operands["w"]), window, x.shape, x.dtype), got[1]
    assert torch.allclose(ours, wanted, rtol=1e-4, atol=1e-4)
    (_, plain) = run(recipe_with(), shape)
    unchanged = [torch.equal(a, b) for a, b in zip(got[:3], plain[:3], strict=True)]
    assert unchanged == [name != stage for name in STAGES]


def test_columns_are_ordered_by_kernel_row_then_column_then_channel():
    x = torch.arange(2 * 3 * 2, dtype=torch.float32).view(1, 1, 2, 3, 2).expand(2, -1, -1, -1, -1)
    columns = im2col(x, Window((2, 2)))
    assert columns.shape == (2, 2, 8)
    assert columns[0, 0].tolist() == [0, 1, 2, 3, 6, 7, 8, 9]
    assert columns[0, 1].tolist() == [2, 3, 4, 5, 8, 9, 10, 11]


@pytest.mark.parametrize("shape", SHAPES[:2])
def test_a_lane_has_the_same_bits_in_any_company(shape):
    batch, height, width, cin, cout, kernel, stride, padding = shape
    torch.manual_seed(0)
    recipes = [Recipe.named(n) for n in ("nvfp4", "nvfp4-sr", "ue5m3-sr", "nvfp4", "ue5m3-sr")]
    x, w = torch.randn(5, batch, height, width, cin), torch.randn(5, cout, *kernel, cin)
    b = torch.randn(5, cout)

    def trained(chosen):
        lanes = LaneNumerics([recipes[i] for i in chosen], chosen)
        leaf = x[chosen].clone().requires_grad_()
        layer = QuantConv2d(w[chosen].clone(), b[chosen].clone(), lanes, 1, stride=stride, padding=padding)
        y = layer(leaf)
        y.backward(torch.ones_like(y) + y.detach())
        return y.detach(), leaf.grad, layer.weight.grad, layer.bias.grad

    together = trained([0, 1, 2, 3, 4])
    for chosen in ([3, 1], [4, 2, 1], [1, 2, 3, 4]):
        for few, all_lanes in zip(trained(chosen), together, strict=True):
            assert torch.equal(few, all_lanes[chosen])


def test_an_image_smaller_than_the_kernel_is_refused():
    layer = QuantConv2d(torch.ones(2, 1, 5, 5, 1), None, numerics(recipe_with(), 2), 0)
    with pytest.raises(ValueError, match="image of 4×4 with padding 0: kernel"):
        layer(torch.ones(2, 1, 4, 4, 1))


def kept_times(recipe):
    """How many numbers a forward pass keeps for the backward pass, for each number of a further image."""
    w, kept = torch.randn(2, 8, 3, 3, 16), []
    layer = QuantConv2d(w, None, LaneNumerics([recipe] * 2, [0, 1]), 1, padding=1)
    for batch in (2, 4):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, to=sizes: (to.append(t.numel()), t)[1], lambda t: t):
            layer(torch.randn(2, batch, 6, 6, 16, requires_grad=True))
        kept.append(sum(sizes))
    return (kept[1] - kept[0]) / (2 * 2 * 6 * 6 * 16)


def test_the_image_is_kept_for_the_backward_pass_and_not_its_columns():
    """But where the backward pass needs what the forward pass quantized by maxima that have moved on by then."""
    for name in ("bf16", "nvfp4-sr-rht", "tetrajet", "quartet"):
        assert kept_times(Recipe.named(name)) == 1
    held = msgspec.structs.replace(NVFP4.tensor_scale, amax="held", steps=4)
    for tensor_scale, times in ((NVFP4.tensor_scale, 1), (held, 9)):
        q = msgspec.structs.replace(NVFP4, tensor_scale=tensor_scale)
        assert kept_times(from_forward(q)) == times


HOPPER = Recipe.named("hopper-moe-fp4")
CONVERTED = msgspec.structs.replace(HOPPER, wgrad=msgspec.structs.replace(HOPPER.wgrad, source="converted"))
HELD = from_forward(
    msgspec.structs.replace(NVFP4, tensor_scale=msgspec.structs.replace(NVFP4.tensor_scale, amax="held", steps=4))
)


@pytest.mark.parametrize(
    ("recipe", "packed", "says"),
    [
        (HOPPER, True, True),
        (CONVERTED, False, True),
        (HOPPER, False, False),
        (HELD, True, False),  # whose columns are kept, as codes
    ],
)
@pytest.mark.parametrize("kernel", [1, 3])
def test_where_codes_are_wanted_and_the_image_is_kept_there_is_a_reason(recipe, packed, says, kernel):
    lanes = LaneNumerics([recipe] * 2, [0, 1])
    lanes.packed = packed
    layer = QuantConv2d(torch.randn(2, 8, kernel, kernel, 16), None, lanes, 1)
    layer(torch.randn(2, 3, 6, 6, 16))
    assert any("codes (convolutions: they keep images" in reason for reason in lanes.fallbacks) == says


def test_where_no_quantizer_has_codes_that_is_the_only_reason():
    lanes = LaneNumerics([Recipe.named("nvfp4")] * 2, [0, 1])
    lanes.packed = True
    QuantConv2d(torch.randn(2, 8, 3, 3, 16), None, lanes, 1)(torch.randn(2, 3, 6, 6, 16))
    assert [reason.split(" (")[1][:12] for reason in lanes.fallbacks if "kept as codes" in reason] == ["wgrad.source"]


@pytest.mark.parametrize("rotation", [None, Hadamard(size=16)])
@pytest.mark.parametrize("slot", ["mxfp4", "nvfp4", "none"])
def test_what_the_backward_pass_quantizes_again_is_what_the_forward_pass_had(monkeypatch, slot, rotation):
    """Stochastic bits, rotation signs and what an estimator masks too."""
    q = msgspec.structs.replace(Quantizer.named(slot), rounding=Stochastic()) if slot != "none" else OFF
    recipe = msgspec.structs.replace(from_forward(q, rotation), estimator=Recipe.named("quartet").estimator)
    found = run(recipe, SHAPES[1])
    monkeypatch.setattr(LaneNumerics, "can_requantize_x", lambda self, layer: False)
    for ours, theirs in zip(found[1], run(recipe, SHAPES[1])[1], strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("slot", "wanted"), [("none", torch.float32), ("bf16", torch.bfloat16), ("nvfp4", torch.float32)]
)
def test_columns_are_bf16_where_they_would_be_rounded_first(slot, wanted):
    lanes = LaneNumerics([recipe_with("fprop.x", Quantizer.named(slot))] * 2, [0, 1])
    assert lanes.input_dtype("fprop", 0, torch.float32) == wanted
    assert lanes.input_dtype("wgrad", 0, torch.float32) == torch.float32
