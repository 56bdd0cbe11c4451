"""The main cause is the one that is farthest above its threshold, and the sentence says so."""

import pytest

from fp4dse.results.stats.recipes.causes import THRESHOLDS, causes, flat_from, sentence


def error(bias2=0.0, se=0.0, variance=0.0) -> dict:
    return {"bias2": bias2, "bias2_se": se, "variance": variance}


def both(worst: dict) -> dict:
    return {"whole": error(), "layers": {"w0": worst, "w1": error()}}


def moment(step=10, clipped=0.0, flushed=0.0, backward=None, forward=None) -> dict:
    operands = [
        {"layer": "w0", "slot": "fprop.x", "clipped_error": clipped, "flushed_error": 0.0},
        {"layer": "w1", "slot": "dgrad.g", "clipped_error": 0.0, "flushed_error": flushed},
        {"layer": "w2", "slot": "dgrad.g", "clipped_error": None, "flushed_error": None},
    ]
    return {
        "step": step,
        "operands": operands,
        "backward": both(backward or error()),
        "forward": both(forward or error()),
    }


def diagnosis(*moments, diverged=None) -> dict:
    return {"moments": list(moments), "diverged": diverged}


CASES = {
    "clipping": moment(clipped=0.05),
    "flushing": moment(flushed=0.05),
    "bias of the forward pass": moment(forward=error(bias2=0.05)),
    "bias of the backward pass": moment(backward=error(bias2=0.05)),
    "variance of the forward pass": moment(forward=error(variance=1.0)),
    "variance of the backward pass": moment(backward=error(variance=1.0)),
}


@pytest.mark.parametrize("cause", THRESHOLDS)
def test_every_cause_can_be_the_main_one(cause):
    found = causes(diagnosis(moment(), CASES[cause]))
    assert (found[0].cause, found[0].times) == (cause, pytest.approx(3 if "variance" in cause else 5))
    assert [one.times for one in found[1:]] == [0] * 5
    where = {"clipping": "w0 fprop.x", "flushing": "w1 dgrad.g"}.get(cause, "w0")
    assert found[0].where == where
    said = sentence(diagnosis(CASES[cause]))
    assert said.startswith(f"Main cause: {cause}, ")
    assert f" in {where} at step 10 (" in said


def test_the_step_is_that_of_the_largest_number():
    found = causes(diagnosis(moment(step=4, clipped=0.02), moment(step=8, clipped=0.05), moment(step=9, clipped=0.03)))
    assert (found[0].step, found[0].value) == (8, 0.05)


def test_a_bias_that_is_not_told_apart_from_zero_is_none():
    for bias2, se, counts in ((0.03, 0.02, False), (0.03, 0.009, True), (-0.01, 0.001, False), (None, None, False)):
        [value] = [
            c.value
            for c in causes(diagnosis(moment(backward=error(bias2, se))))
            if c.cause == "bias of the backward pass"
        ]
        assert value == (bias2 if counts else 0)


def test_below_all_thresholds_the_nearest_is_named():
    said = sentence(diagnosis(moment(clipped=0.004, backward=error(variance=0.1))))
    assert said == "No cause reaches its threshold; clipping is the nearest, 0.004 of 0.01 in w0 fprop.x at step 10."


def test_the_sentence_names_what_else_is_above_and_what_is_below():
    said = sentence(diagnosis(moment(clipped=0.02, flushed=0.01, backward=error(bias2=0.09, variance=0.5))))
    assert said.startswith("Main cause: bias of the backward pass, 0.09 in w0 at step 10 (threshold 0.01: a tenth")
    assert said.endswith(
        "; clipping, variance of the backward pass and flushing are above threshold, too; "
        "bias of the forward pass and variance of the forward pass are below."
    )


def test_a_curve_is_flat_where_bias_outweighs_variance_over_n():
    assert flat_from(error(bias2=0.01, variance=0.5)) == pytest.approx(50)
    assert flat_from(error(bias2=0.01)) == 1
    assert flat_from(error(bias2=0.01, se=0.01, variance=0.5)) is None


def test_a_lane_that_diverged_says_where():
    ended = {"step": 7, "layer": "w1", "slot": "wgrad.g", "made": False}
    assert sentence(diagnosis(diverged=ended)) == (
        "The lane diverged at step 7: wgrad.g of w1 is the first that was given numbers that are not finite."
    )
    assert "made numbers" in sentence(diagnosis(diverged=ended | {"made": True}))
    assert "are finite there" in sentence(diagnosis(diverged=ended | {"slot": None, "layer": None}))
