"""Maxima with feedback (GradScale): powers of two, a factor of two a step, by the maximum of the step before."""

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp4dse.dse import Quantizer, Recipe
from fp4dse.dse.scale import One, TensorScale
from fp4dse.kernels import LaneNumerics, quantize
from fp4dse.kernels.quant.spec.feedback import LEAST, MOST, fed_back, power_above

replace = msgspec.structs.replace
FEEDBACK = replace(Quantizer.named("radix4"), scale=One(), tensor_scale=TensorScale(amax="feedback"))


@given(exponent=st.integers(-100, 99), fraction=st.floats(1.0, 2.0, exclude_min=True, width=32))
def test_a_maximum_begins_at_the_next_power_of_two(exponent, fraction):
    got = power_above(torch.tensor([2.0**exponent, fraction * 2.0**exponent, 0.0, torch.nan, 1e-38, torch.inf]))
    assert got.tolist() == [2.0**exponent, 2.0 ** (exponent + 1), 1.0, 1.0, LEAST, 1.0]


def test_it_doubles_above_halves_at_half_and_stays_between():
    maxima = torch.tensor([8.1, 8.0, 4.1, 4.0, 0.1, 0.0, torch.nan, torch.inf])
    assert fed_back(torch.full((8,), 8.0), maxima).tolist() == [16.0, 8.0, 8.0, 4.0, 4.0, 8.0, 8.0, 8.0]
    ends = torch.tensor([LEAST, MOST])
    assert fed_back(ends, torch.tensor([1e-38, 3e38])).equal(ends)


@given(amax=st.floats(2.0**-40, 2.0**40, width=32), start=st.integers(-40, 40))
def test_it_settles_at_the_power_that_a_steady_maximum_begins_with(amax, start):
    maxima, power = torch.tensor([amax]), torch.tensor([2.0**start])
    for _ in range(82):
        power = fed_back(power, maxima)
    assert power.equal(power_above(maxima))


def test_gradients_are_on_powers_of_four_under_the_scale_and_saturate_where_they_outgrow_it():
    """By hand: |g| up to 5, 5, 40, 40, 40, 1. The power is 8 at first, and 64/8 the multiplier."""
    recipe = Recipe.named("sun-radix4-gradscale")
    numerics = LaneNumerics([recipe, recipe], [0, 1])
    slot = numerics.slots["dgrad.g"]
    got = []
    for step, size in enumerate((5.0, 5.0, 40.0, 40.0, 40.0, 1.0)):
        numerics.step.fill_(step)
        g = torch.tensor([[size, size / 5, -size / 40, 0.0]]).expand(2, 16, 4).contiguous()
        operand = slot.quantize(g, replace(numerics.use(0), dim=2, length=4))
        got.append(operand.decoded()[0, 0].tolist())
    # 40: 5 · 8 = 40 is the midpoint of 16 and 64, which goes up: 64 / 8 = 8; 8 -> 4 (2.5 · 4 = 10 is above) / 8; -1 / 8
    assert got[0] == got[1] == [8.0, 0.5, -0.125, 0.0]
    assert got[2] == [8.0, 8.0, -0.5, 0.0]  # 40 saturates, 8 · 8 is the largest, 1 · 8 is 4 or 16, nearer to 4
    assert [of[0] for of in got[2:]] == [8.0, 16.0, 32.0, 1.0]


def test_it_takes_the_bits_of_a_quantizer_whose_maximum_is_that_power():
    torch.manual_seed(0)
    x = torch.randn(16, 32)
    grown = torch.cat([x, torch.full((1, 32), power_above(x.abs().amax()[None]).item())])
    now = replace(FEEDBACK, tensor_scale=TensorScale())
    assert torch.equal(quantize(x, FEEDBACK).values, quantize(grown, now).values[:-1])


SHORT = {"held": 2.0, "history": 2.0}


def test_what_a_lane_follows_is_its_own():
    """Beside lanes that follow the current maximum and that of the step before."""
    amaxes = ("feedback", "current", "previous", "held", "history")
    recipes = [
        Recipe.uniform(replace(FEEDBACK, tensor_scale=TensorScale(amax=amax, steps=SHORT.get(amax, 50.0))))
        for amax in amaxes
    ]
    together = LaneNumerics(recipes, range(5))
    alone = [LaneNumerics([recipe], [i]) for i, recipe in enumerate(recipes)]
    torch.manual_seed(0)
    for step, size in enumerate((1.0, 30.0, 30.0, 0.01, 0.01)):
        x, w = torch.randn(5, 8, 32) * size, torch.randn(5, 4, 32)
        for numerics in (together, *alone):
            numerics.step.fill_(step)
        y = together.forward(0, x, w).y
        for i, one in enumerate(alone):
            assert torch.equal(y[i], one.forward(0, x[i : i + 1], w[i : i + 1]).y[0])
    assert together.slots["fprop.x"].state["amax 0 0"][0].log2().item() % 1 == 0
    with pytest.raises(ValueError, match="signature"):
        LaneNumerics([recipes[0], Recipe.named("luq")], [0, 1])
