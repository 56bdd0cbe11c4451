"""The error of a rollout's weights and of their change is that of quantizing them apart, and its parts add up to it."""

import msgspec
import pytest

from fp4dse.dse import Hadamard, Quantizer, Recipe
from fp4dse.dse.inject import PARTS
from fp4dse.dse.outliers import Residual
from fp4dse.dse.rollout import ROLLOUT_NAMES, Rollout
from fp4dse.dse.scale import FP32
from fp4dse.dse.training import Training
from fp4dse.kernels import decompose, quantize
from fp4dse.kernels.inspection.decompose import CROSS
from fp4dse.tasks import Lane, get_task, train
from fp4dse.tasks.engine import Population
from tests.tasks.rl.little import little

replace = msgspec.structs.replace
SMOKE = get_task("rl", "smoke")
RCEIL = Quantizer.named("mxfp4-rceil")
ROLLOUTS = {
    "bf16": None,
    "mxfp4-rceil": ROLLOUT_NAMES["mxfp4-rceil"],
    "nvfp4": ROLLOUT_NAMES["nvfp4-w4a16"],
    "fallback": Rollout(RCEIL, replace(RCEIL, outliers=Residual(0.5))),
    "rotated": Rollout(RCEIL, RCEIL, Hadamard(16, "fixed")),
    "random signs": Rollout(RCEIL, RCEIL, Hadamard(16)),
}
LANES = [
    Lane(replace(Recipe.named("bf16"), training=Training(rollout=rollout)), 1e-3, 1) for rollout in ROLLOUTS.values()
]


@pytest.fixture(scope="module")
def after():
    """Numbers, and weights of the layers that are quantized (all but the head), after 0, 1 and 5 steps."""
    population, found = Population(little(SMOKE, SMOKE.steps, prompts=8), LANES, "cpu", record=True), {}
    for step in range(6):
        if step in (0, 1, 5):
            layers = {name: of for name, of in population.weight_errors.layers.items() if name != "head"}
            weights = {name: layer.weight.detach().clone() for name, layer in layers.items()}
            found[step] = population.weight_errors.statistics(), weights
        population.train_step(step)
    return found


def decoded(w, rollout):
    """Q(w) of one lane's weight."""
    found = quantize(w, rollout.w, rotation=rollout.rotation).values.double()
    if isinstance(rollout.w.outliers, Residual):
        found += rollout.w.outliers.alpha * quantize(w - found.float(), rollout.w).values.double()
    return found


@pytest.mark.parametrize("step", [1, 5])
@pytest.mark.parametrize("name", ["mxfp4-rceil", "nvfp4", "fallback", "rotated"])
def test_errors_are_those_of_quantizing_apart_and_their_parts_add_up(after, name, step):
    lane, rollout = list(ROLLOUTS).index(name), ROLLOUTS[name]
    numbers, weights = after[step]
    first = after[0][1]
    error, size, change, moved = 0.0, 0.0, 0.0, 0.0
    for layer in weights:
        now, then = weights[layer][lane], first[layer][lane]
        here = decoded(now, rollout) - now.double()
        error, size = error + here.square().sum(), size + now.double().square().sum()
        difference = now.double() - then.double()
        seen = decoded(now, rollout) - decoded(then, rollout)
        change, moved = change + (seen - difference).square().sum(), moved + difference.square().sum()
    assert numbers["weight_error"][lane].item() == pytest.approx((error / size).item(), rel=1e-5)
    assert numbers["change_error"][lane].item() == pytest.approx((change / moved).item(), rel=1e-4)
    for key in ("weight_error", "change_error"):
        parts = [numbers[f"{key}/{part}"][lane].item() for part in (*PARTS, *(f"{a}·{b}" for a, b in CROSS))]
        assert sum(parts) == pytest.approx(numbers[key][lane].item(), rel=1e-9)
        assert parts[0] > 0 < parts[2]


def test_parts_are_those_of_decompose(after):
    numbers, weights = after[1]
    found = [decompose(of[1], RCEIL) for of in weights.values()]
    size = sum(float(of[1].double().square().sum()) for of in weights.values())
    for part in PARTS:
        expected = sum(of.energy[part] for of in found) / size
        assert numbers[f"weight_error/{part}"][1].item() == pytest.approx(expected, rel=1e-9)


def test_lanes_without_such_a_split_have_no_number(after):
    for step in (1, 5):
        for value in after[step][0].values():
            assert value.isnan().tolist() == [True, False, False, False, False, True]
    unrounded = replace(RCEIL, scale=FP32())
    lane = Lane(replace(LANES[0].recipe, training=Training(rollout=Rollout(unrounded, unrounded))), 1e-3, 1)
    found = Population(SMOKE, [lane], "cpu", record=True).weight_errors.statistics()
    assert found["weight_error/scale"].item() == 0
    assert found["weight_error/grid"].item() > 0
    assert found["change_error"].isnan().all(), "nothing has changed yet"
    alone = Population(SMOKE, LANES[:1], "cpu", record=True).weight_errors.statistics()
    assert alone.keys() == found.keys()
    assert all(value.isnan().all() for value in alone.values())


def test_recording_changes_no_lane_and_survives_a_lane_beyond_all_numbers():
    task = replace(SMOKE, steps=4)
    diverged = replace(LANES[1], lr=1e38)
    recorded = train(task, [diverged, LANES[1], LANES[4]], record=True).lanes
    plain = train(task, [LANES[1], LANES[4]]).lanes
    assert recorded[0].status == "diverged"
    for one, other in zip(recorded[1:], plain, strict=True):
        assert replace(one, recorded={}) == other
    assert {"accuracy", "weight_error/dead", "change_error/scale·grid"} <= recorded[1].recorded.keys()
    assert recorded[1].recorded["change_error"][0] is None
    assert all(value > 0 for value in recorded[1].recorded["change_error"][1:])
