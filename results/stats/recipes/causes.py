"""Causes for which a recipe loses, each judged by a threshold: what `fp4dse diagnose` measured, put into words.

A diagnosis is the record of tasks/inspection/diagnosis.py as plain dicts and lists. Every cause has one number: the
largest over operands or layers, and over the steps that were looked at. That of a layer is relative to its own
gradient, since Adam gives each weight a step of its own size. The main cause is the one that is the most times above
its threshold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

TOLD_APART = 3.0
"""Standard errors from 0 at which a bias counts as one."""


class Threshold(NamedTuple):
    """limit: of the number; says: what the number is; why: this limit."""

    limit: float
    says: str
    why: str


OPERAND = "NVFP4 loses this much of normal numbers in all (0.009)"
TENTH = "a tenth of the gradient's length; averaging over steps does not take it away"
THIRD = "the gradient-to-noise ratio is √3, below which arXiv 2505.19115 quantizes no backward pass"

THRESHOLDS = {
    "clipping": Threshold(0.01, "squared error of an operand's clipped elements, of Σx²", OPERAND),
    "flushing": Threshold(0.01, "squares of an operand's elements that became zero, of Σx²", OPERAND),
    "bias of the forward pass": Threshold(
        0.01, "bias² that forward quantizers give a layer's gradient, of ‖g‖²", TENTH
    ),
    "bias of the backward pass": Threshold(0.01, "bias² that backward quantizers give it, of ‖g‖²", TENTH),
    "variance of the forward pass": Threshold(1 / 3, "variance that forward quantizers give it, of ‖g‖²", THIRD),
    "variance of the backward pass": Threshold(1 / 3, "variance that backward quantizers give it, of ‖g‖²", THIRD),
}
"""Cause -> its threshold."""


class Cause(NamedTuple):
    """A cause: its number, how many times its threshold that is, and where it is the largest: the step, and the layer,
    with the slot of an operand. A bias that is not told apart from 0 is 0."""

    cause: str
    value: float
    times: float
    step: int
    where: str


def causes(diagnosis: dict[str, Any]) -> list[Cause]:
    """All causes, the main one first. None if no step was looked at."""
    worst: dict[str, tuple[float, int, str]] = {}
    for moment in diagnosis["moments"]:
        for cause, value, where in _of_moment(moment):
            if cause not in worst or value > worst[cause][0]:
                worst[cause] = value, moment["step"], where
    found = [Cause(name, of[0], of[0] / THRESHOLDS[name].limit, *of[1:]) for name, of in worst.items()]
    return sorted(found, key=lambda cause: -cause.times)


def _of_moment(moment: dict[str, Any]) -> Iterator[tuple[str, float, str]]:
    """(cause, number, where most of it is) at one step."""
    for cause, name in (("clipping", "clipped_error"), ("flushing", "flushed_error")):
        known = [row for row in moment["operands"] if row[name] is not None]
        if known:
            row = max(known, key=lambda row: row[name])
            yield cause, row[name], f"{row['layer']} {row['slot']}"
    for way in ("forward", "backward"):
        layers = moment[way]["layers"]
        for name, number in (("bias", bias2), ("variance", variance)):
            if layers:
                worst = max(layers, key=lambda layer: number(layers[layer]))
                yield f"{name} of the {way} pass", number(layers[worst]), worst


def bias2(error: dict[str, Any]) -> float:
    """bias² of a gradient, 0 where it is not told apart from 0."""
    value = error["bias2"]
    return 0.0 if value is None or value <= TOLD_APART * error["bias2_se"] else float(value)


def variance(error: dict[str, Any]) -> float:
    """Variance of a gradient, 0 where it is unknown."""
    return max(0.0, error["variance"] or 0.0)


def flat_from(error: dict[str, Any]) -> float | None:
    """The number of passes from which on more of the mean's error is bias than variance; None without a bias."""
    bias = bias2(error)
    return max(1.0, variance(error) / bias) if bias else None


def sentence(diagnosis: dict[str, Any]) -> str:
    """The main cause in one sentence."""
    if (ended := diagnosis["diverged"]) is not None:
        return _divergence(ended)
    found = causes(diagnosis)
    main = found[0]
    limit = THRESHOLDS[main.cause]
    where = f" in {main.where} at step {main.step}"
    if main.times < 1:
        nearest = f"{main.cause} is the nearest, {main.value:.2g} of {limit.limit:.2g}{where}"
        return f"No cause reaches its threshold; {nearest}."
    others = [cause.cause for cause in found[1:] if cause.times >= 1]
    below = [cause.cause for cause in found[1:] if cause.times < 1]
    said = [f"Main cause: {main.cause}, {main.value:.2g}{where} (threshold {limit.limit:.2g}: {limit.why})"]
    said += [f"{_listed(others)} {'is' if len(others) == 1 else 'are'} above threshold, too"] if others else []
    said += [f"{_listed(below)} {'is' if len(below) == 1 else 'are'} below"] if below else []
    return "; ".join(said) + "."


def _divergence(ended: dict[str, Any]) -> str:
    if ended["slot"] is None:
        return f"The lane diverged at step {ended['step']}: all operands of its products are finite there."
    by = "made numbers that are not finite" if ended["made"] else "was given numbers that are not finite"
    return f"The lane diverged at step {ended['step']}: {ended['slot']} of {ended['layer']} is the first that {by}."


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
