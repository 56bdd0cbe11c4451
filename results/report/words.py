"""What came out, in plain words: what won, by how much, how sure that is, what it costs, and what helped."""

from __future__ import annotations

import math
from html import escape

import numpy as np
import pandas as pd

from fp4dse.results.equivalence import MARGIN
from fp4dse.results.paired import OVERHEAD
from fp4dse.results.report.findings import Findings
from fp4dse.results.report.parts import called, interval, many, number, percents
from fp4dse.results.tables import metric_title
from fp4dse.results.tables import number as digits

QUERIES = (
    "SELECT count(DISTINCT config_id) FILTER (NOT is_baseline) AS recipes, count(DISTINCT task) AS tasks, count(*) AS "
    "lanes, count(*) FILTER (status = 'diverged') AS diverged, count(*) FILTER (status = 'failed') AS failed FROM runs",
    "FROM front",
    "SELECT task, preset, verdict, count(*) AS recipes FROM versus_best "
    "WHERE config_id NOT IN (SELECT config_id FROM runs WHERE is_baseline) GROUP BY ALL",
    "FROM versus_best",
    "FROM noise_floor",
    "FROM hypervolume",
    "SELECT task, preset, sum(at_edge::INT) AS at_edge, sum((NOT same_grid)::INT) AS other_grid FROM learning_rates "
    "GROUP BY ALL",
    "SELECT * FROM effects WHERE kind = 'main'",
    "SELECT task, preset, count(*) AS recipes, sum(on_front::INT) AS on_front, "
    "count(*) FILTER (note = 'diverged') AS diverged, count(*) FILTER (note = 'pruned') AS pruned, "
    "count(*) FILTER (note = 'failed') AS failed, max(seeds) AS seeds FROM recipes WHERE NOT is_baseline GROUP BY ALL",
)
POOLED = "SELECT * FROM pooled WHERE kind = 'main'"
MOST_EFFECTS = 3


def verdict(found: Findings, setting: int, title: str) -> str:
    """One setting in a few sentences (HTML)."""
    lines = found.recipes[found.recipes["setting"].eq(setting)]
    ranked = lines[lines["points"].gt(0) & np.isfinite(lines["gap"])].sort_values("gap", kind="stable")
    says = []
    if ranked.empty:
        says.append("<b>No winner</b>: no recipe that quantizes has a gap here.")
    else:
        best = ranked.iloc[0]
        says += [f"<b>Lowest loss</b>: {named(best)}.", f"<b>How sure</b>: {' '.join(_sure(found, setting, best))}"]
        front = ranked[ranked["on_front"]]
        if len(front):
            cheap = front.sort_values([OVERHEAD, "gap"]).iloc[0]
            if cheap["config_id"] != best["config_id"]:
                says.append(f"<b>Cheapest on the front</b>: {named(cheap)}.")
    says += _helps(*(frame[frame["setting"].eq(setting)] for frame in (found.effects, found.marginal)))
    says += _area(found, setting)
    says += [f"<b>Tried</b>: {_tried(lines)} {_baseline(found, setting)}{_rates(found, setting)}"]
    text = "".join(f"<li>{line}</li>" for line in says).replace(" %", "&nbsp;%")
    return f'<div class="verdict"><h3>{escape(title)}</h3><ul>{text}</ul></div>'


def pooled(found: Findings) -> str:
    """What holds over all settings (HTML), empty with one setting."""
    mains = found.pooled[found.pooled["kind"].eq("main")] if len(found.pooled) else found.pooled
    if mains.empty:
        return ""
    sure = mains[mains["low"].gt(0) | mains["high"].lt(0)].sort_values("effect")
    says = []
    for word, part in (("better", sure[sure["effect"].lt(0)]), ("worse", sure[sure["effect"].gt(0)].iloc[::-1])):
        for line in part.head(MOST_EFFECTS).to_dict("records"):
            size = number(line["effect"], f"{100 * abs(line['effect']):.1f}")
            low, high = sorted((line["low"], line["high"]), key=abs)
            bounds = " to ".join(number(value, f"{100 * abs(value):.1f}") for value in (low, high))
            agree = f"{number(line['agree'])} of {number(line['settings'])} tasks agree"
            says.append(
                f"<li><b>{_level(line)}</b> instead of {escape(str(line['reference']))} is {word}, by {size} places in "
                f"a hundred ({bounds}); {agree}.</li>"
            )
    body = f"<ul>{''.join(says)}</ul>" if says else "<p>No technique's effect is told apart from none.</p>"
    intro = "Ranks within each task, so that no task's size of loss counts for more."
    return f'<div class="verdict"><h3>All tasks together</h3><p class="muted">{intro}</p>{body}</div>'


def named(line: pd.Series) -> str:
    """A recipe with its gap, interval, cost and chance (HTML)."""
    label = line["name"] if isinstance(line["name"], str) else line["label"]
    told = f" ({escape(line['label'])})" if label != line["label"] else ""
    bounds = interval(line["gap_low"], line["gap_high"])
    seeds = f"{number(line['pairs'])} paired seeds"
    sure = f"95 % interval {bounds}, {seeds}" if bounds else "one seed, so no interval"
    times = f", {math.exp(line['gap']):.1f} times its loss" if line["gap"] > 0.5 else ""
    gap = f"{percents(line['gap'])} % against BF16{times} ({sure})"
    chance = ""
    if math.isfinite(line["p_front"]):
        share = number(line["p_front"], f"{100 * line['p_front']:.0f}")
        chance = f", on the front in {share} % of draws over seeds"
    return f"<b>{escape(label)}</b>{told}: {gap}, {_cost(line)}{chance}"


def _cost(line: pd.Series) -> str:
    value = line[OVERHEAD]
    if not math.isfinite(value):
        return "at an unknown overhead"
    if OVERHEAD == "points":
        return f"for {many(value, 'point')}"
    if OVERHEAD == "overhead":
        return f"at {number(value, f'{value:.3f}')} of BF16's modelled step time"
    return f"at {OVERHEAD} {number(value, f'{value:.4g}')}"


def _tried(lines: pd.DataFrame) -> str:
    tried = lines[~lines["is_baseline"]]
    counts = [f"{number(int(tried['on_front'].sum()))} on the front"]
    for note in ("diverged", "pruned", "failed"):
        if n := int(tried["note"].eq(note).sum()):
            counts.append(f"{number(n)} {note}")
    seeds = int(tried["seeds"].max()) if len(tried) else 0
    return f"{many(len(tried), 'recipe')}, up to {many(seeds, 'seed')} each: {', '.join(counts)}."


def _rates(found: Findings, setting: int) -> str:
    """What the choice of learning rates leaves open, empty where each recipe had one rate of the same grid."""
    lines = found.rates[found.rates["setting"].eq(setting)]
    edge, other = int(lines["at_edge"].sum()), int((~lines["same_grid"].astype(bool)).sum())
    says = []
    if edge:
        says.append(f" The best learning rate of {many(edge, 'recipe')} stands at the edge of the grid.")
    if other:
        says.append(f" {many(other, 'recipe')} had another grid of learning rates than most.")
    return "".join(says)


def _sure(found: Findings, setting: int, best: pd.Series) -> list[str]:
    """Whether the seeds tell the best recipe apart from BF16 and from the others."""
    if best["pairs"] < 2:
        return ["with one seed nothing can be told apart."]
    says = []
    if best["gap_low"] <= 0 <= best["gap_high"]:
        says.append("it cannot be told apart from BF16.")
    else:
        says.append(f"it is {'worse' if best['gap'] > 0 else 'better'} than BF16 by more than chance.")
    others = found.versus_best[found.versus_best["setting"].eq(setting)]
    bases = found.recipes.loc[found.recipes["is_baseline"], "config_id"]
    others = others[~others["config_id"].isin(bases)]
    words = {"same": f"as good within ±{100 * MARGIN:g} %", "open": "not told apart from it", "higher": "worse"}
    words |= {"lower": "better on the seeds that they share", "diverged": "diverged", "pruned": "dropped at a rung"}
    counts = [f"{number(n)} {words[v]}" for v in words if (n := int(others["verdict"].eq(v).sum()))]
    if counts:
        says.append(f"The other recipes: {', '.join(counts)}.")
    still = others[others["verdict"].eq("open") & np.isfinite(others["more_seeds"].astype(float))]
    if len(still):
        near = still.sort_values("difference").iloc[0]
        more = many(near["more_seeds"], "more seed")
        says.append(f"It would take {more} to settle the nearest, {called(near['label'], found.labels)}.")
    return says


def _helps(effects: pd.DataFrame, pairs: pd.DataFrame) -> list[str]:
    """The largest main effects whose interval leaves out zero. One that matched pairs contradict is no finding."""
    mains = effects[effects["kind"].eq("main") & effects["effect"].notna()]
    sure = mains[mains["high"].lt(0) | mains["low"].gt(0)].sort_values("effect")
    keyed = {(line["factor"], line["level"]): line for line in pairs.to_dict("records")}
    found = (_contradicted(line, keyed.get((line["factor"], line["level"]))) for line in sure.to_dict("records"))
    contrary = np.array(list(found), bool)
    unclear, sure = sure[contrary], sure[~contrary]
    says = []
    for start, part in (
        ("<b>What helps on average</b>:", sure[sure["effect"].lt(0)].head(MOST_EFFECTS)),
        ("<b>What harms on average</b>:", sure[sure["effect"].gt(0)].iloc[::-1].head(MOST_EFFECTS)),
    ):
        if len(part):
            says.append(f"{start} {'; '.join(map(_effect, part.to_dict('records')))}.")
    if len(unclear):
        levels = "; ".join(map(_level, unclear.to_dict("records")))
        says.append(
            f"<b>Depends on its company</b>: {levels}. The mean over all combinations and the pairs of recipes that "
            "differ in nothing else point in opposite directions."
        )
    if not says and len(mains):
        says.append("<b>What helps on average</b>: no technique's effect is told apart from none.")
    return says


def _contradicted(effect: dict, pair: dict | None) -> bool:
    """Whether matched pairs say, by more than chance, the opposite."""
    return pair is not None and (pair["high"] < 0 < effect["effect"] or effect["effect"] < 0 < pair["low"])


def _area(found: Findings, setting: int) -> list[str]:
    """The front as one number."""
    volumes = found.volumes[found.volumes["setting"].eq(setting)]
    if volumes.empty:
        return []
    line = volumes.iloc[0]
    corner = number(line["reference_overhead"], f"{line['reference_overhead']:g}")
    ends = f"{escape(line['axis'].replace('_', ' '))} {corner} and twice BF16's loss"
    if not line["hypervolume"]:
        return [f"<b>The front as one number</b>: {number(0.0, '0')}; no recipe is below {ends}."]
    area = number(line["hypervolume"], f"{line['hypervolume']:.4g}")
    if math.isfinite(line["low"]):
        area += f" ({' to '.join(number(line[name], f'{line[name]:.4g}') for name in ('low', 'high'))})"
    return [f"<b>The front as one number</b>: it dominates an area of {area}, counted up to {ends}."]


def _effect(line: dict) -> str:
    """`X instead of Y (+1.00 %, 95 % interval …)` (HTML)."""
    instead = f" instead of {escape(str(line['reference']))}" if line["reference"] != line["level"] else ""
    bounds = interval(line["low"], line["high"])
    return f"{_level(line)}{instead} ({percents(line['effect'])} %, 95 % interval {bounds})"


def _level(line: dict) -> str:
    """A level as a space writes it (HTML)."""
    return f"<code>{escape(line['factor'])} = {escape(str(line['level']))}</code>"


def _baseline(found: Findings, setting: int) -> str:
    floor = found.floors[found.floors["setting"].eq(setting)]
    if floor.empty or not floor["seeds"].iloc[0]:
        return "No BF16 baseline was finished here, so there are no gaps."
    line = floor.iloc[0]
    title = metric_title(floor)
    metric = f", {escape(title)} {number(line['val_metric'], digits(line['val_metric']))}" if title else ""
    noise = "with one seed its noise floor is unknown"
    if math.isfinite(line["noise_floor"]):
        noise = f"from seed to seed it differs by {percents(line['noise_floor'], sign=False)} % (noise floor)"
    reached = f"BF16 reaches a loss of {number(line['val_loss'], digits(line['val_loss']))}"
    return f"{reached}{metric}; {noise}."
