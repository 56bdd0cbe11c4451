"""The trade-off as plain text: readable in 80 columns, in a pipe, and without colour. And frames as JSON-ready data."""

from __future__ import annotations

import math
import textwrap
from itertools import groupby

import numpy as np
import pandas as pd

from fp4dse.results.intervals import counted, percent
from fp4dse.results.labels import Labels, short_labels
from fp4dse.results.paired import OVERHEAD, SETTING

STAR = "★"
BETTER = {"lower": "↓", "higher": "↑"}
"""Which way a metric is better, as it is shown behind its name."""
AXIS = f"Nothing is below {STAR} in gap and overhead (modelled step time, BF16 = 1)"


def pareto_table(summary: pd.DataFrame, floors: pd.DataFrame, limit: int | None = 20, width: int = 100) -> str:
    """Per setting: the baseline, the noise floor, and the recipes, front first, then by gap.

    summary, floors: from summarize and noise_floor. At most `limit` recipes per setting, the front always
    whole. Recipes are called as in labels.py; what they are called wraps at `width` and is never cut.
    """
    titles = setting_titles(summary)
    called = short_labels(*(summary.loc[~summary["is_baseline"], column] for column in ("label", "name")))
    blocks = []
    for keys, lines in summary.groupby(list(SETTING), sort=False):
        floor = floors[(floors[list(SETTING)] == list(keys)).all(axis="columns")]
        blocks.append(
            "\n".join([titles[keys], baseline_text(floor), "", *_body(lines, called, limit, width), "", count(lines)])
        )
    return "\n\n\n".join(blocks) + ("\n\n" + "\n".join(filter(None, [AXIS, called.says()])) if blocks else "")


def setting_titles(frame: pd.DataFrame) -> dict[tuple, str]:
    """SETTING values -> `task (preset)`, and what else differs where that is shared by several settings."""
    settings = frame[list(SETTING)].drop_duplicates()
    titles = {}
    for keys in settings.itertuples(index=False):
        alike = settings[settings["task"].eq(keys.task) & settings["preset"].eq(keys.preset)]
        apart = [f"{name} {getattr(keys, name)}" for name in SETTING[2:] if alike[name].nunique() > 1]
        titles[tuple(keys)] = ", ".join([f"{keys.task} ({keys.preset})", *apart])
    return titles


def baseline_text(floor: pd.DataFrame) -> str:
    """What BF16 reached and how far it is from itself at another seed. floor: the setting's line, or none."""
    if floor.empty or not floor["seeds"].iloc[0]:
        return "no BF16 baseline was finished here, so there are no gaps"
    line = floor.iloc[0]
    title = metric_title(floor)
    metric = f", {title} {number(line['val_metric'])}" if title else ""
    noise = "noise floor unknown (needs 2 seeds)"
    if math.isfinite(line["noise_floor"]):
        noise = f"noise floor {100 * line['noise_floor']:.2f} %"
    reached = f"val loss {number(line['val_loss'])}{metric}, lr {line['lr']:g}, {counted(line['seeds'], 'seed')}"
    return f"BF16: {reached}; {noise}"


def gap_text(line: pd.Series) -> str:
    """`+1.23 ± 0.40` in %, or why there is none."""
    if line["note"] == "diverged":
        return f"diverged {line['diverged']}/{line['seeds'] + line['diverged'] + line['failed']}"
    if line["note"]:
        return line["note"]
    half = 50 * (line["gap_high"] - line["gap_low"])
    return f"{percent(line['gap'])} ± {half:.2f}" if math.isfinite(half) else f"{percent(line['gap'])} (1 seed)"


def count(lines: pd.DataFrame) -> str:
    """How many recipes, on the front, diverged, failed. lines: of one setting."""
    tried = lines[~lines["is_baseline"]]
    shared = int(_twins(tried).duplicated(keep=False).sum())
    counts = [f"{tried['on_front'].sum()} on the front"]
    counts += [f"{tried['note'].eq(note).sum()} {note}" for note in ("diverged", "failed")]
    return f"{counted(len(tried), 'recipe')}{f' ({shared} share lines)' if shared else ''}: {', '.join(counts)}"


def _body(lines: pd.DataFrame, called: Labels, limit: int | None, width: int) -> list[str]:
    tried = lines[~lines["is_baseline"]]
    twins = _twins(tried)
    alike = twins.groupby(twins).groups
    firsts = tried[~twins.duplicated()]
    shown = firsts if limit is None else firsts.head(max(limit, int(firsts["on_front"].sum())))
    title = metric_title(lines)
    result, value = (title, "val_metric") if title else (f"val loss {BETTER['lower']}", "val_loss")
    rows = [["", "gap to BF16, %", "overhead", result, "lr", "recipe"]]
    for index, line in shown.iterrows():
        recipe = _all_recipes(sorted((called.of(tried.loc[twin, "label"]) for twin in alike[twins[index]]), key=len))
        mark, lr = STAR if line["on_front"] else "", f"{line['lr']:g}"
        rows.append([mark, gap_text(line), _ratio(line.get(OVERHEAD)), number(line[value]), lr, recipe])
    _align(rows, 1, " ± ")
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    indent = sum(widths) + 2 * len(widths)
    out = []
    for row in rows:
        numbers = "  ".join(cell.rjust(w) for cell, w in zip(row[:5], widths, strict=True))
        label = textwrap.wrap(row[5], max(width - indent, 24), break_long_words=False, break_on_hyphens=False)
        out += [f"{numbers}  {label[0]}", *(" " * indent + more for more in label[1:])]
    if len(shown) < len(firsts):
        out.append(f"… and {len(firsts) - len(shown)} more")
    return out


def _twins(tried: pd.DataFrame) -> pd.Series:
    """A number for each recipe, the same for those that trained to the same bits at the same cost: with and without a
    loss scale of 2^10, say."""
    same = [name for name in ("gap", "gap_low", "gap_high", "val_loss", "lr", OVERHEAD) if name in tried]
    trained = tried.groupby(same, sort=False, dropna=False).ngroup()
    return trained.where(np.isfinite(tried["gap"].astype(float)), -1 - np.arange(len(tried)))


def _all_recipes(names: list[str]) -> str:
    """The first name, and of the others what it lacks. names: the simplest first."""
    first, *others = names
    ends = []
    for other in others:
        parts = other.split(", ")
        told = ["…" if part in first.split(", ") else part for part in parts]
        ends.append(", ".join(part for part, _ in groupby(told)))
    return f"{first} (the same bits: {'; '.join(ends)})" if ends else first


def number(value: float) -> str:
    """Four significant digits; a dash where there is none."""
    return f"{value:#.4g}" if math.isfinite(value) else "–"


def _ratio(value: float | None) -> str:
    return f"{value:.2f}" if value is not None and math.isfinite(value) else "–"


def _align(rows: list[list[str]], column: int, sign: str) -> None:
    """Pad what follows `sign`, so that right-aligned cells have their signs in line."""
    width = max(len(row[column].partition(sign)[2]) for row in rows)
    for row in rows:
        left, found, right = row[column].partition(sign)
        row[column] = left + found + right.rjust(width) if found else left


def metric_title(frame: pd.DataFrame) -> str | None:
    """`fid ↓`: the metric of a setting's lines, and which way it is better where the task says so; None without one."""
    names, ways = frame["metric_name"].dropna(), frame["metric_better"].dropna()
    if names.empty or frame["val_metric"].isna().all():
        return None
    return f"{names.iloc[0]}{f' {BETTER[ways.iloc[0]]}' if len(ways) else ''}"


def records(frame: pd.DataFrame) -> list[dict]:
    """The rows as plain data that any JSON writer takes: NaN and inf are None, times are ISO texts."""
    return [{str(name): plain(value) for name, value in row.items()} for row in frame.to_dict("records")]


def plain(value: object) -> object:
    """One value as plain data: NaN, inf and missing are None."""
    if isinstance(value, np.ndarray | list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or value is pd.NA or value is pd.NaT:
        return None
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int | bool) else getattr(value, "isoformat", lambda: str(value))()
