"""The first screen: the recipe to use, how sure that is and what it costs, beside the chart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import numpy as np
import pandas as pd

from fp4dse.results.report.findings import Findings
from fp4dse.results.report.markup import called, changed, changed_with, many, number, spoken
from fp4dse.results.report.panel import Panel, for_each_setting
from fp4dse.results.stats.levels import POINTS
from fp4dse.results.stats.paired import OVERHEAD
from fp4dse.results.stats.recipes.equal_time import FARTHEST, Time
from fp4dse.results.stats.recipes.margins import Margin, margin_text
from fp4dse.results.stats.recipes.pareto import LEAST_SAVING
from fp4dse.results.stats.recipes.verdict import (
    EXPECTED_WORDS,
    Against,
    Confirmed,
    Verdict,
    bf16_words,
    front_words,
    held_against,
)
from fp4dse.results.text.ratios import noun

QUERIES = (
    "FROM front",
    "FROM confirmed",
    "SELECT task, preset, count(*) FILTER (verdict IN ('open', 'same')) AS open, "
    "count(*) FILTER (choice IS NULL AND diverged > 0) AS diverged, "
    "count(*) FILTER (choice IS NULL AND coalesce(diverged, 0) = 0) AS missing FROM confirmed GROUP BY ALL",
    "SELECT task, preset, verdict, count(*) AS recipes FROM versus_soonest "
    "WHERE config_id NOT IN (SELECT config_id FROM runs WHERE is_baseline) GROUP BY ALL",
    "FROM versus_soonest",
    "FROM margins",
    "FROM learning_rates",
    "SELECT task, preset, sum(at_edge::INT) AS at_edge, "
    "sum((NOT same_grid AND source IS DISTINCT FROM 'preset')::INT) AS other_grid, "
    "sum((source = 'preset' AND NOT is_baseline)::INT) AS untuned, "
    "sum((at_edge AND NOT is_baseline)::INT) AS recipes_at_edge, any_value(rates) AS rates, any_value(lr) AS lr "
    "FROM learning_rates GROUP BY ALL",
    "SELECT task, preset, count(*) AS recipes, count(*) FILTER (note = 'diverged') AS diverged "
    "FROM recipes WHERE NOT is_baseline GROUP BY ALL",
)
HELD_OUT = """Loss is the held-out loss <b>with the quantizers on</b>, rounding to nearest: what the model loses when
it also runs in FP4, not only what FP4 did to its weights. The table below has the loss in BF16 beside it."""

TRAINERS_ALONE = """All overheads here and on the front are of <b>the trainer's step alone</b>; what a token of the
rollouts takes beside BF16's is the column <b>rollout overhead</b> of the table below."""


def first_screen(found: Findings) -> str:
    """The answers beside the figure, which the script draws (HTML)."""
    return (
        f'<div class="first"><div class="answer">{_card(found)}</div><figure><div id="front" class="tall-plot"></div>'
        '<figcaption><span id="front-says" aria-live="polite"></span> '
        '<button type="button" id="clip" hidden>show all to scale</button></figcaption></figure></div>'
        f"{_notes(found)}"
    )


@for_each_setting
def _card(found: Findings) -> str:
    [verdict] = found.verdicts
    if verdict.config_id is None:
        lead = (
            f'<p class="lead"><span class="key">Use</span><b>no recipe of these</b></p><p>{_sentence(verdict.none)}</p>'
        )
    else:
        new = verdict.confirmed
        sure = _sure(verdict)
        screened = f'<p><span class="key">Screened</span>{called(verdict.label, found.labels)}. {sure}</p>'
        lead = (
            f"{_lead(new.label if new else verdict.label, found)}"
            f'<p><span class="key">This sure</span>{_confirmed(new) if new else sure}</p>'
            f'<p><span class="key">This cost</span>{_cost(verdict)}{_cheaper(found, verdict)}</p>'
            f"{screened if new else ''}"
        )
    said = (*verdict.warnings, *(verdict.confirmed.warnings() if verdict.confirmed else ()))
    warnings = "".join(f"<li>{_sentence(text)}</li>" for text in said)
    return f"{lead}{f'<ul class=warn>{warnings}</ul>' if warnings else ''}"


@for_each_setting
def _notes(found: Findings) -> str:
    """Says which loss this is and which count as the same (HTML), below the screen, where warnings leave no room."""
    [verdict] = found.verdicts
    held_out = HELD_OUT.replace("Loss is the held-out loss", f"{noun().capitalize()} is the held-out {noun()}")
    notes = held_out if verdict.config_id is None else f"{held_out} {_what_is_the_same(verdict.margin)}"
    return f'<p class="muted">{notes}</p>'


def _what_is_the_same(margin: Margin) -> str:
    """The margin of equivalence and what it is from (HTML)."""
    says = escape(margin.sentence(), quote=False).replace(margin_text(margin.value), _within(margin))
    says = says.replace(" %", "\u00a0%")
    return f"{says[:1].upper()}{says[1:]}."


def _lead(label: str, found: Findings) -> str:
    short = found.labels.of(label)
    size = max(1.0, 1.5 - max(0, len(short) - 24) * 0.012)
    return (
        f'<p class="lead"><span class="key">Use</span><b style="font-size:{size:.2f}rem" '
        f'title="{escape(label)}">{escape(short)}</b></p>'
    )


def _confirmed(new: Confirmed) -> str:
    """The estimate of the seeds that did not choose (HTML)."""
    loss = changed_with(new.gap, new.gap_low, new.gap_high)
    says = (
        f"Confirmed: {noun()} <b>{loss}</b> against BF16 on {many(new.estimated_on, 'fresh seed')} that had no part in "
    )
    says += f"choosing it ({number(new.chosen_on)} others did): "
    says += _beside_bf16(new.bf16, new.margin)
    count = many(new.open, "other candidate")
    return f"{says}. {count} not told apart from it{held_against(new.by_time)}." if new.open else f"{says}."


def _sentence(text: str) -> str:
    text = spoken(text)
    return f"{text[:1].upper()}{text[1:]}."


def _sure(verdict: Verdict) -> str:
    seeds = many(verdict.pairs, "paired seed")
    loss = changed_with(verdict.gap, verdict.gap_low, verdict.gap_high)
    basis = f" ({EXPECTED_WORDS})" if verdict.is_expected else ""
    says = f"{noun().capitalize()} <b>{loss}</b> against BF16, {seeds}{basis}: "
    says += _beside_bf16(verdict.bf16, verdict.margin)
    if not math.isnan(verdict.p_front):
        share = f"a chance of {100 * verdict.p_front:.0f} %"
        says += f'; <span title="{share}">{front_words(verdict.p_front)}</span>'
    return f"{says}.{_rivals(verdict)}"


def _beside_bf16(bf16: Against, margin: Margin) -> str:
    """`<b>as good as BF16 within ±0.5 %</b>` (HTML)."""
    return f"<b>{bf16_words(bf16, margin)}</b>".replace(margin_text(margin.value), _within(margin))


def _within(margin: Margin) -> str:
    """`±0.5 %` (HTML), all digits of the logarithm behind it."""
    return number(margin.value, margin_text(margin.value).replace(" ", "\u00a0"))


def _rivals(verdict: Verdict) -> str:
    """A sentence (HTML) on recipes that are as good, or that the seeds do not tell apart."""
    counts = (verdict.as_good, f"within {_within(verdict.margin)} of"), (verdict.open, "not told apart from")
    others = ", ".join(f"{many(n, 'other recipe')} {what} it" for n, what in counts if n)
    return f" {others}{held_against(verdict.by_time)}." if others else ""


def _cost(verdict: Verdict) -> str:
    overhead, band = verdict.price
    if not math.isfinite(overhead):
        return "Unknown: its rows hold no overhead."
    alone = f" {TRAINERS_ALONE}" if verdict.unit == POINTS else ""
    time = _time((verdict.confirmed or verdict).time)
    return f"{share_of_bf16(verdict.axis, overhead)}{_band(band)}{_model(verdict.overhead_of)}.{time}{alone}"


def _time(time: Time) -> str:
    """A sentence (HTML) on the time to BF16's loss; empty where nobody knows it."""
    if math.isnan(time.mean):
        return ""
    if math.isinf(time.mean):
        return f" BF16's loss: <b>not with {1 / FARTHEST:g} times its tokens</b>."
    mean, low, high = (number(share, f"{100 * share:.0f}") for share in time[:3])
    ends = "" if math.isnan(time.low) else f" ({low} to {high}&nbsp;%)"
    ends = f" ({low}&nbsp;% or more)" if math.isinf(time.high) else ends
    about = "roughly " if time.rough else ""
    return f" BF16's loss in {about}<b>{mean}&nbsp;%</b>{ends} of its time, more tokens making up for the gap."


def _band(band: Sequence[float]) -> str:
    """` (50 to 60 % with better and worse software)` (HTML); empty if there is none."""
    if len({f"{100 * end:.0f}" for end in band}) < 2:
        return ""
    low, high = (number(end, f"{100 * end:.0f}") for end in band)
    return f" ({low} to {high}&nbsp;% with better and worse software)"


def share_of_bf16(axis: str, value: float) -> str:
    """`55 % of BF16's step time` (HTML)."""
    if axis == "overhead":
        return f"<b>{number(value, f'{100 * value:.0f}')}&nbsp;%</b> of BF16's step time"
    return many(value, "point") if axis == "points" else f"{escape(axis)} {number(value, f'{value:.3g}')}"


def _model(of: str | None) -> str:
    return f' <span class="muted">(modelled: {escape(of.rpartition(", revision")[0] or of)})</span>' if of else ""


def _cheaper(found: Findings, verdict: Verdict) -> str:
    """Sentences (HTML): that the recipe saves no time, and the cheapest member of the front, where that is another."""
    slow = verdict.axis == OVERHEAD and verdict.price[0] > 1 - LEAST_SAVING
    saves = " <b>It saves no time against BF16.</b>" if slow else ""
    lines = found.front[np.isfinite(found.front[OVERHEAD].astype(float))]
    if lines.empty:
        return saves
    cheap = lines.iloc[0]
    if cheap["config_id"] == (verdict.confirmed or verdict).config_id:
        return f"{saves} Nothing on the front is cheaper."
    if verdict.axis == OVERHEAD and verdict.price[0] - cheap[OVERHEAD] < LEAST_SAVING:
        return saves
    return f"{saves} Cheapest on the front: {_member(found, verdict, cheap)}."


def _member(found: Findings, verdict: Verdict, line: pd.Series) -> str:
    """`nvfp4, 63 %, loss +3 %` of a line of the front (HTML)."""
    name = f'<b title="{escape(line["label"])}">{escape(found.labels.of(line["label"]))}</b>'
    share = share_of_bf16(verdict.axis, line[OVERHEAD]).replace(" of BF16's step time", "")
    return f"{name}, {share}, {noun()} {changed(line['gap'])}"


PANEL = Panel("answer", "Answer", "", first_screen, QUERIES)
