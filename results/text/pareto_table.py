"""The trade-off of each setting as plain text: readable in 80 columns, in a pipe, and without colour."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
import pandas as pd

from fp4dse.dse import recipe_from_dict
from fp4dse.dse.cost import BAND, load_chip
from fp4dse.dse.cost.units import notes
from fp4dse.results.stats.levels import POINTS, are_shares
from fp4dse.results.stats.paired import OVERHEAD, PLAIN, SETTING
from fp4dse.results.stats.recipes.summary import ROLLOUT
from fp4dse.results.stats.recipes.verdict import Verdict
from fp4dse.results.text.labels import Labels, short_labels
from fp4dse.results.text.ratios import (
    UNKNOWN,
    change,
    change_range,
    counted,
    share_with_band,
    size,
    written_in,
)
from fp4dse.results.text.verdict_text import verdict_text, wrapped

STAR = "★"
BETTER = {"lower": "↓", "higher": "↑"}
"""The better direction of a metric, as it is shown behind its name."""
ON_FRONT = f"{STAR}: no other recipe has both a lower loss and a lower overhead."
BANDED = "In brackets the overhead with better and with worse software; only who is beaten with both is off the front."
VERSUS = "vs BF16: the loss on held-out data, with quantizers on and rounding to nearest, against BF16's."
POINTS_TEXT = "In points: accuracy on held-out data less BF16's, in hundredths; the higher the better."
IN_BF16 = "in BF16: the same with both models evaluated in BF16."
TRAINERS_ALONE = (
    "overhead: of the trainer's step alone, where lanes learn from samples of their own; rollout: what a token of "
    "these takes (modelled, BF16 = 1)."
)
MATCHED = (
    "Some recipes change the optimizer, the clip, the loss scale or the schedule, which may help BF16 as well: "
    "gap_matched (`fp4dse query recipes`) is against BF16 that has them, too, and so are the effects of techniques."
)
NARROWEST = 20
"""Columns that a recipe's name has at least."""


def pareto_table(
    summary: pd.DataFrame,
    floors: pd.DataFrame,
    limit: int | None = 20,
    width: int = 100,
    verdicts: Sequence[Verdict] = (),
    remarks: Sequence[str] = (),
) -> str:
    """The trade-off as text, per setting: BF16, the noise floor, the recipes by front and gap, and the verdict.

    summary, floors, verdicts: from summarize, noise_floor and verdicts. remarks: of price_remarks. At most `limit`
    recipes per setting, the front always whole. Recipes are called as in labels.py; what they are called wraps at
    `width` and is never cut.
    """
    titles = setting_titles(summary)
    called = short_labels(*(summary.loc[~summary["is_baseline"], column] for column in ("label", "name")))
    found = {verdict.setting: verdict for verdict in verdicts}
    blocks = []
    for keys, lines in summary.groupby(list(SETTING), sort=False):
        floor = floors[(floors[list(SETTING)] == list(keys)).all(axis="columns")]
        with written_in(unit_of(lines)):
            block = [
                titles[keys],
                wrapped(baseline_text(floor), width, 6),
                "",
                *_body(lines, called, limit, width),
                "",
                count(lines),
            ]
        if keys in found:
            block += ["", verdict_text(found[keys], called, width)]
        blocks.append("\n".join(block))
    if not blocks:
        return ""
    legend = [ON_FRONT] if summary["on_front"].any() else []
    legend += [BANDED] if any(name in summary and summary[name].notna().any() for name in BAND) else []
    legend += [
        VERSUS,
        *([POINTS_TEXT, TRAINERS_ALONE] if are_shares(summary).any() else []),
        *([IN_BF16] if _has_bf16(summary) else []),
        *([MATCHED] if _is_matched(summary) else []),
    ]
    legend += [*remarks, *filter(None, [called.says()])]
    return "\n\n\n".join(blocks) + "\n\n" + "\n".join(wrapped(line, width, 0) for line in legend)


def unit_of(lines: pd.DataFrame) -> object:
    """The gap_unit of lines of `summarize` or `noise_floor` of one setting."""
    return POINTS if are_shares(lines).any() else None


def price_remarks(runs: pd.DataFrame, summary: pd.DataFrame) -> list[str]:
    """A line for each setting with recipes on its front whose price is an assumption, as the chip does not have their
    formats; it names them.

    runs: with the columns config_id, recipe and overhead_of; summary: of these runs.
    """
    titles = setting_titles(summary)
    front = summary[summary["on_front"]]
    known = runs[runs["config_id"].isin(front["config_id"])].drop_duplicates("config_id").set_index("config_id")
    called = short_labels(*(summary.loc[~summary["is_baseline"], column] for column in ("label", "name")))
    found: dict[tuple[str, str], list[str]] = {}
    for _, line in front.iterrows():
        of = known.loc[line["config_id"]]
        chip = str(of["overhead_of"]).rpartition(", revision")[0].rpartition(" on ")[2]
        if chip and notes(recipe_from_dict(json.loads(of["recipe"])), load_chip(chip)):
            name = called.of(line["label"]).partition(": ")[0]
            found.setdefault((titles[tuple(line[list(SETTING)])], chip), []).append(name)
    return [
        f"{title}: of its front, priced as if {chip} had what it lacks: {'; '.join(labels)} "
        "(`fp4dse cost RECIPE` says what)"
        for (title, chip), labels in found.items()
    ]


def setting_titles(frame: pd.DataFrame) -> dict[tuple[Any, ...], str]:
    """SETTING values -> `task (preset)`, and what else differs where that is shared by several settings."""
    settings = frame[list(SETTING)].drop_duplicates()
    titles = {}
    for keys in settings.itertuples(index=False):
        alike = settings[settings["task"].eq(keys.task) & settings["preset"].eq(keys.preset)]
        apart = [f"{name} {getattr(keys, name)}" for name in SETTING[2:] if alike[name].nunique() > 1]
        titles[tuple(keys)] = ", ".join([f"{keys.task} ({keys.preset})", *apart])
    return titles


def baseline_text(floor: pd.DataFrame) -> str:
    """The loss that BF16 reached, and its distance from itself at another seed. floor: the setting's line, or none."""
    if floor.empty or not floor["seeds"].iloc[0]:
        return "no BF16 baseline was finished here, so there are no gaps"
    line = floor.iloc[0]
    title = metric_title(floor)
    metric = f", {title} {number(line['val_metric'])}" if title else ""
    noise = "noise floor unknown (needs 2 seeds)"
    if math.isfinite(line["noise_floor"]):
        noise = f"noise floor {size(line['noise_floor'])} (BF16 at another seed)"
    reached = f"val loss {number(line['val_loss'])}{metric}, lr {line['lr']:g}, {counted(line['seeds'], 'seed')}"
    return f"BF16: {reached}; {noise}"


def gap_text(line: pd.Series) -> tuple[str, str]:
    """`+1.23 %` and `+0.83 to +1.63 %`, or why there is no gap and no interval. line: of summarize."""
    if line["note"] == "diverged":
        return "diverged", f"{line['diverged']} of {counted(line['seeds'] + line['diverged'] + line['failed'], 'seed')}"
    if line["note"]:
        return line["note"], ""
    bounds = change_range(line["gap"], line["gap_low"], line["gap_high"])
    return change(line["gap"]), bounds or ("seeds tie" if line["pairs"] > 1 else counted(line["pairs"], "seed"))


def change_or_dash(gap: float) -> str:
    """`+1.23 %`; a dash where there is no number."""
    return change(gap) if math.isfinite(gap) else "–"


def _has_bf16(lines: pd.DataFrame) -> bool:
    """True if some recipe has a gap in BF16."""
    tried = lines[~lines["is_baseline"].astype(bool)]
    return bool(np.isfinite(tried["gap_bf16"].astype(float)).any())


def _is_matched(lines: pd.DataFrame) -> bool:
    """True if some recipe is compared with another BF16 than the plain one."""
    return bool(lines["baseline_id"].notna().any() and lines["baseline_id"].dropna().ne(PLAIN).any())


def count(lines: pd.DataFrame) -> str:
    """Counts of recipes: all, on the front, diverged, failed. lines: of one setting."""
    tried = lines[~lines["is_baseline"]]
    shared = int(_duplicates(tried).duplicated(keep=False).sum())
    counts = [f"{tried['on_front'].sum()} on the front"]
    bad = [f"{n} {note}" for note in ("diverged", "pruned", "failed") if (n := tried["note"].eq(note).sum())]
    counts += bad or ["none diverged or failed"]
    return f"{counted(len(tried), 'recipe')}{f' ({shared} share lines)' if shared else ''}: {', '.join(counts)}"


def _body(lines: pd.DataFrame, called: Labels, limit: int | None, width: int) -> list[str]:
    tried = lines[~lines["is_baseline"]]
    duplicates = _duplicates(tried)
    alike = duplicates.groupby(duplicates).groups
    firsts = tried[~duplicates.duplicated()]
    shown = firsts if limit is None else firsts.head(max(limit, int(firsts["on_front"].sum())))
    title = metric_title(lines)
    result, value = (title, "val_metric") if title else (f"val loss {BETTER['lower']}", "val_loss")
    has_bf16 = _has_bf16(lines)
    samples = are_shares(lines).any()
    heads = ["", "vs BF16", "95 % interval", *(["in BF16"] if has_bf16 else []), "overhead"]
    heads += [*(["rollout"] if samples else []), result, "lr", "recipe"]
    rows = [heads]
    for index, line in shown.iterrows():
        names = (called.of(tried.loc[twin, "label"]) for twin in alike[duplicates[index]])
        recipe = _all_recipes(sorted(names, key=len))
        mark, lr = STAR if line["on_front"] else "", f"{line['lr']:g}"
        gaps = [*gap_text(line), *([change_or_dash(line["gap_bf16"])] if has_bf16 else [])]
        costs = [_overhead(line), *([_of_rollout(line)] if samples else [])]
        rows.append([mark, *gaps, *costs, number(line[value]), lr, recipe])
    if lines["lr"].nunique() == 1:  # BF16's line above has it
        rows = [[*row[:-2], row[-1]] for row in rows]
    *widths, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
    indent = sum(widths) + 2 * len(widths)
    out = []
    for *cells, recipe in rows:
        numbers = "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        label = textwrap.wrap(recipe, max(width - indent, NARROWEST), break_long_words=False, break_on_hyphens=False)
        out += [f"{numbers}  {label[0]}", *(" " * indent + more for more in label[1:])]
    if len(shown) < len(firsts):
        out.append(f"… and {len(firsts) - len(shown)} more")
    return out


def _duplicates(tried: pd.DataFrame) -> pd.Series:
    """A number for each recipe, the same for those that trained to the same bits at the same cost: with and without a
    loss scale of 2^10, say."""
    same = [name for name in ("gap", "gap_low", "gap_high", "val_loss", "lr", OVERHEAD, ROLLOUT) if name in tried]
    trained = tried.groupby(same, sort=False, dropna=False).ngroup()
    return trained.where(np.isfinite(tried["gap"].astype(float)), -1 - np.arange(len(tried)))


def _all_recipes(names: list[str]) -> str:
    """The first name, and of the others what it lacks. names: the simplest first."""
    first, *others = names
    ends = []
    for other in others:
        parts = other.split(", ")
        shown = ["…" if part in first.split(", ") else part for part in parts]
        ends.append(", ".join(part for part, _ in groupby(shown)))
    return f"{first} (the same bits: {'; '.join(ends)})" if ends else first


def number(value: float) -> str:
    """Four significant digits; a dash where there is none."""
    return f"{value:#.4g}" if math.isfinite(value) else "–"


def _overhead(line: pd.Series) -> str:
    """`0.63 (0.55 to 0.73)`, or a dash. line: of summarize."""
    value = line.get(OVERHEAD)
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return share_with_band(value, [end for name in BAND if math.isfinite(end := line.get(name, math.nan))])


def _of_rollout(line: pd.Series) -> str:
    """`0.63`, or a dash. line: of summarize."""
    value = line.get(ROLLOUT)
    return UNKNOWN if value is None or not math.isfinite(value) else f"{value:.2f}"


def metric_title(frame: pd.DataFrame) -> str | None:
    """`fid ↓`: the metric of a setting's lines, and which way it is better where the task says so; None without one."""
    names, ways = frame["metric_name"].dropna(), frame["metric_better"].dropna()
    if names.empty or frame["val_metric"].isna().all():
        return None
    return f"{names.iloc[0]}{f' {BETTER[way]}' if (way := next(iter(ways), None)) in BETTER else ''}"
