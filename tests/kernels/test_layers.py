"""A quantized layer with its quantizers off is the plain layer, and every slot quantizes what it says it does."""

import pytest
import scipy.linalg
import torch

from fp4dse.dse import SLOTS, STAGES, Hadamard, Quantizer, Recipe
from fp4dse.dse.stages import Dgrad, Fprop, Wgrad
from fp4dse.kernels import LaneNumerics, QuantLinear, lane_sum, quantize, silu
from fp4dse.kernels.ops.elementary import exp_nonpositive
from fp4dse.kernels.ops.products import multiply
from fp4dse.kernels.ops.rotation import hadamard, rotate, rotate_back

OFF = Quantizer.named("none")


def recipe_with(slot: str | None = None, quantizer: Quantizer = OFF, **rotations) -> Recipe:
    """All slots off but one; rotations by stage name."""

    def stage(kind, name):
        slots = {o: quantizer if slot == f"{name}.{o}" else OFF for o in STAGES[name]}
        return kind(**slots, rotation=rotations.get(name))

    return Recipe(fprop=stage(Fprop, "fprop"), dgrad=stage(Dgrad, "dgrad"), wgrad=stage(Wgrad, "wgrad"))


def numerics(recipe: Recipe, lanes: int = 3) -> LaneNumerics:
    """Lanes of the recipe as written: `canonical` would drop a rotation that has nothing to quantize."""
    made = LaneNumerics([recipe] * lanes, range(lanes))
    for name, stage in made.quantized.items():
        stage.rotation = recipe.rotation(name)
    return made


def run(recipe: Recipe, m: int = 48, k: int = 32, n: int = 24, lanes: int = 3):
    """(x, w, g, y, dx, dw) of one layer."""
    torch.manual_seed(0)
    x, w, g = torch.randn(lanes, m, k, requires_grad=True), torch.randn(lanes, n, k), torch.randn(lanes, m, n)
    layer = QuantLinear(w, None, numerics(recipe, lanes), layer=2)
    y = layer(x)
    y.backward(g)
    return x.detach(), w, g, y.detach(), x.grad, layer.weight.grad


def plain(x, w, g):
    return multiply(x, w), multiply(g, w.mT), multiply(g.mT, x.mT)


def test_quantizers_off_equals_plain_bit_for_bit():
    for m, k, n in ((48, 32, 24), (64, 16, 10), (33, 17, 1)):
        x, w, g, *got = run(recipe_with(), m, k, n)
        for ours, theirs in zip(got, plain(x, w, g), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("size", [16, 32, 128])
@pytest.mark.parametrize("signs", ["random", "none"])
def test_a_rotation_cancels_in_its_own_gemm(stage, size, signs):
    x, w, g, *got = run(recipe_with(**{stage: Hadamard(size=size, signs=signs)}))
    for name, ours, theirs in zip(STAGES, got, plain(x, w, g), strict=True):
        error = float((ours - theirs).norm() / theirs.norm())
        assert error < 1e-6
        assert (error > 0) == (name == stage)  # it was applied, and only there


@pytest.mark.parametrize("slot", SLOTS)
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "ue5m3"])
def test_each_slot_quantizes_its_operand_along_the_contraction_axis(slot, name):
    q = Quantizer.named(name)
    x, w, g, *got = run(recipe_with(slot, q), m=64, k=32, n=96)
    along = {  # operand laid out with the contraction axis last, and the way back
        "fprop.x": (x, False),
        "fprop.w": (w, False),
        "dgrad.g": (g, False),
        "dgrad.w": (w, True),
        "wgrad.g": (g, True),
        "wgrad.x": (x, True),
    }
    source, transposed = along[slot]
    operand = source.mT if transposed else source
    seen = torch.stack([quantize(lane, q).values for lane in operand])  # a tensor scale is a lane's own
    seen = seen.mT if transposed else seen
    swapped = {"x": x, "w": w, "g": g} | {slot.split(".")[1]: seen}
    stage = list(STAGES).index(slot.split(".")[0])
    expected = plain(x, w, g)[:stage] + plain(**swapped)[stage : stage + 1] + plain(x, w, g)[stage + 1 :]
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(got[stage], plain(x, w, g)[stage], rtol=1e-3, atol=1e-3)


def test_sizes_that_the_block_does_not_divide_are_padded_with_zeros():
    q = Quantizer.named("mxfp4")
    x, w, _, y, dx, dw = run(Recipe.uniform(q), m=20, k=17, n=10)
    assert (y.shape, dx.shape, dw.shape) == ((3, 20, 10), (3, 20, 17), (3, 10, 17))
    pad = torch.nn.functional.pad
    seen = quantize(pad(x, (0, 15)), q).values[..., :17], quantize(pad(w, (0, 15)), q).values[..., :17]
    assert torch.allclose(y, torch.bmm(seen[0], seen[1].mT), rtol=1e-5, atol=1e-5)


def test_stochastic_operands_of_two_gemms_and_two_steps_are_drawn_independently():
    recipe = Recipe.named("nvfp4-sr")
    made = LaneNumerics([recipe] * 2, [0, 0])
    g, w = torch.randn(1, 32, 32).repeat(2, 1, 1), torch.eye(32).repeat(2, 1, 1)
    first = made.gemm("dgrad", 0, g, 2, w, 1)
    assert torch.equal(first[0], first[1])  # the same seed: the same bits
    assert torch.equal(first, made.gemm("dgrad", 0, g, 2, w, 1))
    assert not torch.equal(first, made.gemm("dgrad", 1, g, 2, w, 1))
    made.step.fill_(1)
    assert not torch.equal(first, made.gemm("dgrad", 0, g, 2, w, 1))


def test_a_lane_has_the_same_bits_in_any_company():
    torch.manual_seed(0)
    recipes = [Recipe.named(n) for n in ("nvfp4", "nvfp4-sr", "ue5m3-sr", "nvfp4", "ue5m3-sr")]
    x, w = torch.randn(5, 40, 48), torch.randn(5, 24, 48)
    together = LaneNumerics(recipes, range(5)).gemm("dgrad", 1, x, 2, w.mT, 1)
    x[0] = float("nan")
    beside_nan = LaneNumerics(recipes, range(5)).gemm("dgrad", 1, x, 2, w.mT, 1)
    assert torch.equal(together[1:], beside_nan[1:])
    for chosen in ([3, 1], [4, 2, 1], [1, 2, 3, 4], [2]):
        few = LaneNumerics([recipes[i] for i in chosen], chosen).gemm("dgrad", 1, x[chosen], 2, w[chosen].mT, 1)
        assert torch.equal(few, together[chosen])


def test_lanes_of_different_structure_are_refused():
    with pytest.raises(ValueError, match="structural signature"):
        LaneNumerics([Recipe.named("nvfp4"), Recipe.named("mxfp4")], [0, 1])
    for recipes, seeds in (([], []), ([Recipe.named("nvfp4")], [0, 1])):
        with pytest.raises(ValueError, match=f"a lane or more and a seed each: {len(recipes)}, {len(seeds)}"):
            LaneNumerics(recipes, seeds)


def test_bf16_and_untouched_operands_share_a_population():
    made = LaneNumerics([recipe_with("fprop.x", Quantizer.named("bf16")), recipe_with()], [0, 0])
    a, b = torch.randn(2, 8, 16), torch.randn(2, 8, 16)
    got = made.gemm("fprop", 0, a, 2, b, 2)
    assert torch.equal(got[1], torch.bmm(a, b.mT)[1])
    assert torch.equal(got[0], torch.bmm(a.bfloat16().float(), b.mT)[0])


def test_lanes_that_need_different_products_share_no_population():
    with pytest.raises(ValueError, match="structural signature"):
        LaneNumerics([Recipe.named("bf16"), Recipe.uniform(OFF)], [0, 0])


def test_hadamard_is_the_sylvester_matrix_and_its_own_inverse():
    for n in (16, 32, 64, 128):
        eye = torch.eye(n)[None]
        expected = torch.tensor(scipy.linalg.hadamard(n)).float() / n**0.5
        assert torch.allclose(hadamard(eye, n, 2)[0], expected, atol=1e-7)
        assert torch.allclose(hadamard(eye, n, 1)[0], expected, atol=1e-7)
    x = torch.randn(2, 5, 64)
    flips = torch.sign(torch.randn(2, 32))
    assert torch.allclose(rotate_back(rotate(x, 32, 2, flips), 32, 2, flips), x, atol=1e-6)
    e3 = torch.zeros(1, 1, 16)
    e3[0, 0, 3] = 1
    assert hadamard(e3, 16, 2)[0, 0, :4].tolist() == [0.25, -0.25, -0.25, 0.25]


def test_lane_sum_adds_everything_in_an_order_of_its_own():
    for n in (1, 2, 3, 7, 64, 100):
        x = torch.randint(-1000, 1000, (3, n, 5)).float()
        assert torch.equal(lane_sum(x, 1), x.sum(1))
    x = torch.randn(4, 1000)
    assert torch.equal(lane_sum(x, 1)[2:], lane_sum(x[2:], 1))


def test_silu_and_its_gradient_are_accurate_and_the_same_everywhere():
    x = torch.linspace(-100, 100, 100_003)
    exact = x.double() * torch.sigmoid(x.double())
    assert torch.allclose(silu(x).double(), exact, rtol=1e-6, atol=1e-30)
    leaf = torch.randn(500, requires_grad=True)
    silu(leaf).sum().backward()
    twin = leaf.detach().double().requires_grad_()
    torch.nn.functional.silu(twin).sum().backward()
    assert torch.allclose(leaf.grad.double(), twin.grad, rtol=1e-5, atol=1e-7)
    assert exp_nonpositive(torch.tensor([0.0])).item() == 1
    for start in range(1, 40):
        assert torch.equal(silu(x[start:]), silu(x)[start:])
