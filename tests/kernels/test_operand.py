"""What a slot keeps from step to step, what it does about outliers, and what backward operands are made from."""

import msgspec
import pytest
import torch

from fp4dse.dse import QUANTIZERS, Hadamard, Quantizer, Recipe
from fp4dse.dse.outliers import Clamp, Residual
from fp4dse.dse.rounding import Ema
from fp4dse.dse.scale import FP32, TensorScale
from fp4dse.dse.stages import STAGES, Dgrad, Fprop, Wgrad
from fp4dse.kernels import LaneNumerics, lanes, quantize
from fp4dse.kernels.ops.rotation import rotate, rotate_back
from fp4dse.kernels.quant.backend import PLAIN
from fp4dse.kernels.quant.operand.kinds import clamped
from fp4dse.kernels.quant.operand.state import EMA_STEPS

replace = msgspec.structs.replace
NV, NONE = QUANTIZERS["nvfp4"], QUANTIZERS["none"]


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    """The reference: nothing to compile."""
    monkeypatch.setattr(lanes, "backend", lambda device: PLAIN)


def recipe(x: Quantizer = NONE, w: Quantizer = NONE, rotation: Hadamard | None = None, **backward: str) -> Recipe:
    """Only the forward operands are quantized."""
    return Recipe(
        fprop=Fprop(x=x, w=w, rotation=rotation),
        dgrad=Dgrad(g=NONE, w=NONE, source=backward.get("dgrad", "master")),
        wgrad=Wgrad(g=NONE, x=NONE, source=backward.get("wgrad", "master")),
    )


def decoded(numerics: LaneNumerics, x: torch.Tensor, slot: str = "fprop.x") -> torch.Tensor:
    return numerics.slots[slot].quantize(x, numerics.use(0)).decoded()


def steps(numerics: LaneNumerics, xs: torch.Tensor, slot: str = "fprop.x") -> list[torch.Tensor]:
    """xs [steps, L, R, C] decoded one after the other."""
    out = []
    for step, x in enumerate(xs):
        numerics.step.fill_(step)
        out.append(decoded(numerics, x, slot))
    return out


# --- tensor maxima -----------------------------------------------------------------------------------------------


def followed(policy: TensorScale, xs: torch.Tensor) -> list[int]:
    """Step whose tensor maximum each step's scale follows, by comparing with that maximum given."""
    q = replace(NV, tensor_scale=policy)
    got = steps(LaneNumerics([recipe(x=q), recipe(x=NV)], [0, 1]), xs)
    fixed = []
    for at in range(len(xs)):  # a tensor with that maximum in a row of its own has that scale
        row = torch.zeros_like(xs[:, :, :1])
        row[..., 0] = xs[at].abs().amax(dim=(1, 2))[None, :, None]
        x = torch.cat([xs, row], dim=2).clamp(-row[:, :, :, :1], row[:, :, :, :1])
        fixed.append([quantize(t[0], NV).values[:-1] for t in x])
    found = []
    for step, value in enumerate(got):
        matches = [at for at in range(len(xs)) if torch.equal(fixed[at][step], value[0])]
        found.append(matches[0] if len(matches) == 1 else -1)
    return found


SHRINKING = (
    torch.randn(7, 2, 4, 32, generator=torch.Generator().manual_seed(1))
    * torch.linspace(3, 1.1, 7)[:, None, None, None]
)
"""Maxima fall from step to step, so that no older one clips."""


def test_a_current_maximum_is_that_of_the_step():
    assert followed(TensorScale(), SHRINKING) == [0, 1, 2, 3, 4, 5, 6]


def test_a_previous_maximum_is_one_step_old():
    assert followed(TensorScale(amax="previous"), SHRINKING) == [0, 0, 1, 2, 3, 4, 5]


def test_a_held_maximum_is_refreshed_every_so_many_steps():
    assert followed(TensorScale(amax="held", steps=3.0), SHRINKING) == [0, 0, 0, 3, 3, 3, 6]


@pytest.mark.parametrize("steps", [3, 50])
@pytest.mark.parametrize("nothing", [0.0, torch.inf])
@pytest.mark.parametrize("until", range(6))
def test_a_held_maximum_of_nothing_is_taken_again_soon(nothing, until, steps):
    """1, 2, 4 … steps after the first, and with every period: whether or not other lanes measure in between."""
    q = replace(NV, tensor_scale=TensorScale(amax="held", steps=float(steps)))
    for beside in (q, replace(q, tensor_scale=TensorScale(amax="previous"))):
        numerics = LaneNumerics([recipe(x=q), recipe(x=beside)], [0, 1])
        found = []
        for step in range(12):
            x = torch.ones(2, 1, 16) * 2.0**-step
            if step < until:
                x[:, :, 0] = nothing
                x = x if nothing else torch.zeros_like(x)
            numerics.step.fill_(step)
            numerics.measuring = numerics.measures(step)
            decoded(numerics, x)
            [kept_now] = numerics.slots["fprop.x"].state.values()
            found.append(kept_now[0].item())
        taken = [step for step in range(12) if step % steps == 0 or (step in (1, 2, 4, 8) and step < steps)]
        expected, kept = [], 0.0
        for step in range(12):
            if step in taken and (step % steps == 0 or not kept):
                kept = 2.0**-step if step >= until else nothing if nothing == 0 else kept
            expected.append(kept)
        assert found == expected


def test_a_held_maximum_is_measured_when_it_may_be_taken_and_not_else():
    numerics = LaneNumerics([recipe(x=replace(NV, tensor_scale=TensorScale(amax="held", steps=20.0)))], [0])
    assert [step for step in range(64) if numerics.measures(step)] == [0, 1, 2, 4, 8, 16, 20, 40, 60]


def test_a_neighbour_with_a_held_maximum_changes_nothing():
    held = replace(NV, tensor_scale=TensorScale(amax="held"))
    together = steps(LaneNumerics([recipe(x=held), recipe(x=NV)], [0, 1]), SHRINKING)
    apart = steps(LaneNumerics([recipe(x=NV), recipe(x=NV)], [0, 1]), SHRINKING)
    for a, b in zip(together, apart, strict=True):
        assert torch.equal(a[1], b[1])


def test_what_outgrows_a_held_maximum_saturates_and_stays_finite():
    held = replace(NV, tensor_scale=TensorScale(amax="held"))
    numerics = LaneNumerics([recipe(x=held)] * 2, [0, 1])
    small, large = steps(numerics, torch.stack([torch.full((2, 1, 16), 1.0), torch.full((2, 1, 16), 100.0)]))
    assert torch.equal(small, torch.ones(2, 1, 16))
    assert torch.equal(large, torch.ones(2, 1, 16))


def test_evaluation_uses_what_is_held_and_changes_nothing():
    held = replace(NV, tensor_scale=TensorScale(amax="held", steps=1.0))
    numerics = LaneNumerics([recipe(x=held)] * 2, [0, 1])
    steps(numerics, SHRINKING[:2])
    state = {key: value.clone() for key, value in numerics.slots["fprop.x"].state.items()}
    numerics.training = False
    decoded(numerics, SHRINKING[5] * 0.5)
    assert state.keys() == numerics.slots["fprop.x"].state.keys()
    assert all(torch.equal(value, numerics.slots["fprop.x"].state[key]) for key, value in state.items())


# --- factors per row and segment ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("over", "width"), [("row", 256), ("segment", 128)])
def test_each_row_or_segment_is_quantized_as_a_tensor_of_its_own(over, width):
    q = replace(NV, tensor_scale=TensorScale(over=over))
    x = torch.randn(2, 3, 256) * torch.tensor([1e-6, 1.0, 1e6])[None, :, None]
    x[:, :, 128:] *= 1e3
    alone = torch.stack([quantize(part[None], NV).values[0] for part in x.reshape(-1, width)]).view_as(x)
    assert torch.equal(decoded(LaneNumerics([recipe(x=q)] * 2, [0, 1]), x), alone)
    got = quantize(x[0], q)
    assert torch.equal(got.values, alone[0])
    assert got.tensor_scale.shape == (3, 256 // width)
    factors = got.tensor_scale.repeat_interleave(width, dim=1)
    assert torch.equal((got.elements * got.scales.repeat_interleave(16, dim=1)) * factors, got.values)


@pytest.mark.parametrize("change", [{"tensor_scale": TensorScale(over="row")}, {"outliers": Residual()}], ids=str)
def test_a_product_is_that_of_the_decoded_operands(change):
    """With factors per row, and of two terms each."""
    q = replace(NV, **change)
    x, w = torch.randn(2, 5, 64), torch.randn(2, 7, 64)
    numerics = LaneNumerics([recipe(x=q, w=q)] * 2, [0, 1])
    out = numerics.gemm("fprop", 0, x, 2, w, 2)
    expected = decoded(numerics, x).double() @ decoded(numerics, w, "fprop.w").double().mT
    assert torch.allclose(out.double(), expected, rtol=0, atol=1e-5)


# --- moving averages ---------------------------------------------------------------------------------------------


def test_a_weight_is_rounded_towards_its_average_once_that_is_old_enough():
    """2502.20853's example: 1.27 lies between 1 and 1.5; nearest takes 1.5, an average of 1.20 takes 1."""
    q = Quantizer(block=32, scale=FP32(), rounding=Ema(beta=0.5))
    w = torch.zeros(2, 1, 32)
    w[..., 0] = 6.0  # the scale is 1
    w[..., 1] = 1.20
    numerics = LaneNumerics([recipe(w=q), recipe(w=replace(q, rounding=QUANTIZERS["nvfp4"].rounding))], [0, 1])
    values = steps(numerics, w.repeat(EMA_STEPS, 1, 1, 1), "fprop.w")
    w[..., 1] = 1.27
    assert values[-1][0, 0, 1] == 1.0
    numerics.step.fill_(EMA_STEPS)
    after = decoded(numerics, w, "fprop.w")  # the average is 1.235 now
    assert after[0, 0, 1] == 1.0
    assert after[1, 0, 1] == 1.5


def test_a_young_average_leaves_rounding_to_nearest():
    q = Quantizer(block=32, scale=FP32(), rounding=Ema())
    xs = torch.randn(EMA_STEPS, 2, 4, 32)
    numerics = LaneNumerics([recipe(w=q), recipe(w=replace(q, rounding=NV.rounding))], [0, 1])
    xs[:, 1] = xs[:, 0]
    for value in steps(numerics, xs, "fprop.w"):
        assert torch.equal(value[0], value[1])


def test_an_average_only_chooses_between_the_two_neighbours():
    q = Quantizer(block=32, scale=FP32(), rounding=Ema(beta=0.9))
    xs = torch.randn(EMA_STEPS + 4, 2, 8, 32)
    numerics = LaneNumerics([recipe(w=q)] * 2, [0, 1])
    last = steps(numerics, xs, "fprop.w")[-1]
    scale = xs[-1].abs().amax(dim=2, keepdim=True) / 6
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6.0])
    z, got = (xs[-1] / scale).abs(), (last / scale).abs()
    step = torch.where(z < 2, 0.5, torch.where(z < 4, 1.0, 2.0))
    assert ((got - z).abs() <= step * (1 + 1e-5)).all()
    assert (((got[..., None] - grid).abs() < 1e-5).any(-1)).all()
    nearest = quantize(xs[-1], replace(q, rounding=NV.rounding)).values
    assert (last != nearest).float().mean() > 0.05


# --- outliers ----------------------------------------------------------------------------------------------------


def test_the_residual_is_quantized_again():
    q = replace(NV, outliers=Residual(alpha=0.5))
    x = torch.randn(2, 4, 64)
    first = torch.stack([quantize(lane, NV).values for lane in x])
    second = torch.stack([quantize(lane, NV).values for lane in x - first])
    got = decoded(LaneNumerics([recipe(x=q)] * 2, [0, 1]), x)
    assert torch.allclose(got, first + 0.5 * second, rtol=1e-6, atol=0)


def test_clamping_cuts_at_signed_quantiles():
    x = torch.arange(1000.0)[torch.randperm(1000)].view(1, 10, 100)
    got = clamped(x, torch.tensor([0.99], dtype=torch.float64))
    assert (got.min(), got.max()) == (9, 990)
    assert (got != x).float().mean() == pytest.approx(0.018)  # 9 below and 9 above


def test_compensation_makes_the_product_exact_but_for_quantization():
    x, w = torch.randn(2, 32, 64), torch.randn(2, 7, 64)
    x[:, 3, 5] = 1000.0
    exact = x.double() @ w.double().mT
    errors = {}
    for compensate in (True, False):
        numerics = LaneNumerics([recipe(x=replace(FINE, outliers=Clamp(compensate=compensate)), w=FINE)] * 2, [0, 1])
        errors[compensate] = (numerics.gemm("fprop", 0, x, 2, w, 2).double() - exact).abs().max()
    assert errors[True] < 2
    assert errors[False] > 500


FINE = Quantizer(element="e4m3", block=16, scale=FP32())
"""So fine that its error is small beside that of a clamped outlier."""


# --- sources -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rotation", [None, Hadamard(size=16), Hadamard(size=32, signs="none", order="sequency")])
def test_backward_operands_are_the_forwards_copies_where_the_recipe_says_so(rotation):
    x, w, g = torch.randn(2, 6, 40), torch.randn(2, 7, 40), torch.randn(2, 6, 7)
    numerics = LaneNumerics([recipe(NV, NV, rotation, dgrad="forward", wgrad="forward")] * 2, [0, 1])
    y, back_x, back_w, *_ = numerics.forward(0, x, w)
    assert back_x.shape == x.shape
    assert back_w.shape == w.shape
    assert torch.allclose(y, back_x @ back_w.mT, atol=2e-5)
    assert not torch.allclose(back_x, x, atol=1e-3)
    if rotation is None:
        assert torch.equal(numerics.gemm("dgrad", 0, g, 2, back_w, 1), g @ back_w)


def test_masters_are_kept_otherwise():
    x, w = torch.randn(2, 6, 32), torch.randn(2, 7, 32)
    _, back_x, back_w, *_ = LaneNumerics([recipe(NV, NV)] * 2, [0, 1]).forward(0, x, w)
    assert back_x is x
    assert back_w is w


# --- rotations ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_the_sequency_matrix_is_symmetric_its_own_inverse_and_sorted(size):
    matrix = rotate(torch.eye(size)[None], size, 2, None, "sequency")[0]
    assert torch.equal(matrix, matrix.T)
    assert torch.allclose(matrix @ matrix, torch.eye(size), atol=1e-6)
    changes = (matrix[:-1].sign() != matrix[1:].sign()).sum(0)
    assert changes.tolist() == list(range(size))


@pytest.mark.parametrize("order", ["sylvester", "sequency"])
def test_rotating_back_inverts(order):
    x, signs = torch.randn(2, 5, 64), torch.sign(torch.randn(2, 32))
    assert torch.allclose(rotate_back(rotate(x, 32, 2, signs, order), 32, 2, signs, order), x, atol=1e-6)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("layer", "step"), [(0, 0), (3, 7)])
def test_every_stage_layer_and_step_rotates_by_signs_of_its_own(stage, layer, step):
    """Those that are keyed by 8 · layer + number of the stage, and by no other."""
    rotation, seed = Hadamard(size=16), 5
    of = Recipe(fprop=Fprop(NV, NV, rotation), dgrad=Dgrad(NV, NV, rotation), wgrad=Wgrad(NV, NV, rotation))
    numerics = LaneNumerics([of], [seed])
    numerics.step.fill_(step)
    a, b = torch.randn(1, 24, 64), torch.randn(1, 40, 64)
    got = numerics.gemm(stage, layer, a, 2, b, 2)[0]

    def by(site, step):
        keys = {"rotation": rotation, "seed": seed, "step": step, "site": site}
        return quantize(a[0], NV, **keys).values @ quantize(b[0], NV, **keys).values.T

    site = 8 * layer + list(STAGES).index(stage)
    assert torch.allclose(got, by(site, step), atol=1e-4)
    others = [by(site + n, step) for n in (-2, -1, 1, 2, 8)] + [by(site, step + 1)]
    assert all((got - other).abs().max() > 0.1 for other in others)


def test_fixed_signs_are_those_of_transformer_engine():
    rotation = Hadamard(size=16, signs="fixed")
    got = quantize(torch.eye(16), NONE, rotation=rotation)
    assert got.elements[3, :4].tolist() == [-0.25, 0.25, 0.25, -0.25]
    assert torch.equal(got.elements, quantize(torch.eye(16), NONE, rotation=rotation, seed=7, step=3).elements)


# --- counters ----------------------------------------------------------------------------------------------------


def test_slots_count_what_they_lose_and_compute_the_same():
    q = QUANTIZERS["mxfp4"]
    x, w = torch.randn(2, 6, 40), torch.randn(2, 7, 40)
    x[0, 0, :4] = torch.tensor([7.9, 0.1, 0.1, 0.0])  # 7.9 is clipped to 6, 0.1 is flushed
    x[0, 0, 4:32] = 1.0
    silent, counting = (LaneNumerics([recipe(x=q, w=q)] * 2, [0, 1]) for _ in range(2))
    counting.counting = True
    assert torch.equal(counting.gemm("fprop", 0, x, 2, w, 2), silent.gemm("fprop", 0, x, 2, w, 2))
    assert silent.lost() == {}
    lost = counting.lost()
    assert set(lost) == {"fprop.x", "fprop.w"}
    decoded_x = quantize(torch.nn.functional.pad(x, (0, 24)), q).values[..., :40]
    flushed = ((decoded_x == 0) & (x != 0)).double().mean((1, 2))
    assert torch.equal(lost["fprop.x"]["flushed"], flushed)
    assert lost["fprop.x"]["clipped"][0] > 0
    assert (lost["fprop.x"]["zeroed"] == 0).all()


def test_counts_add_up_over_calls_and_layers():
    q = QUANTIZERS["nvfp4"]
    numerics = LaneNumerics([recipe(x=q)] * 2, [0, 1])
    numerics.counting = True
    x, w = torch.randn(2, 6, 32), torch.randn(2, 7, 32)
    numerics.gemm("fprop", 0, x, 2, w, 2)
    once = {name: number.clone() for name, number in numerics.slots["fprop.x"].counts.items()}
    numerics.gemm("fprop", 1, x, 2, w, 2)
    assert all(torch.equal(number, 2 * once[name]) for name, number in numerics.slots["fprop.x"].counts.items())
    assert once["elements"].tolist() == [192, 192]
    assert once["blocks"].tolist() == [12, 12]
