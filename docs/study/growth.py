"""The tables of findings.md that say how gaps grow with the size of the model."""

from __future__ import annotations

from functools import partial

import numpy as np
import pandas as pd
from cells import interval
from scipy.stats import ttest_ind
from sizes import GROUPS, at_sizes, by_size, groups

from fp4dse.results import summarize
from fp4dse.results.stats.estimates.intervals import holm
from fp4dse.results.stats.paired import by_seed, rows_at_best_lr
from fp4dse.results.stats.sizes.extrapolation import extrapolation
from fp4dse.results.stats.sizes.scaling import scaling

SCALE = range(30, 34)
"""Seeds of stage *scale*."""
GROWTHS = ("0.4M", "10M"), ("10M", "30M"), ("1M", "3M"), ("10M", "3M")
"""Sizes that are held against one another."""
QUANTIZES = GROUPS | groups("scale.toml")


def _scale(runs: pd.DataFrame, of: str = "gap") -> list[dict[str, object]]:
    """A row for each recipe of *scale*, the largest gap at 10M first: its gap, or another column, at each size."""
    lines = summarize(runs)
    largest = lines[lines["preset"].eq("10M") & lines["label"].ne("bf16")].sort_values("gap", ascending=False)
    return [at_sizes(lines[lines["config_id"].eq(name)], of) for name in largest["config_id"]]


def _shares(runs: pd.DataFrame) -> list[dict[str, object]]:
    """A row for each recipe of *scale*: its gap in the loss above the text's entropy at each size, and whether those of
    GROWTHS differ."""
    rows = rows_at_best_lr(runs)
    rows = rows[rows["gap_reducible"].notna() & ~rows["is_baseline"].astype(bool)]
    of = {preset: by_seed(part, part["gap_reducible"]) for preset, part in rows.groupby("preset", observed=True)}
    gaps = {preset: dict(zip(ids, values, strict=True)) for preset, (ids, values) in of.items()}
    labels = rows.drop_duplicates("config_id").set_index("config_id")["recipe_label"].astype(str)
    names = sorted(gaps["0.4M"], key=lambda name: gaps["10M"][name].mean(), reverse=True)
    grown = {f"{large} against {small}": _grown(gaps[small], gaps[large]) for small, large in GROWTHS}
    out = []
    for name in names:
        row: dict[str, object] = {"recipe": labels[name]}
        row |= {size: interval(gaps[size][name]) if name in gaps[size] else "" for size in by_size(gaps)}
        out.append({**row, **{title: found.get(name, "") for title, found in grown.items()}})
    return out


def _grown(small: dict[str, np.ndarray], large: dict[str, np.ndarray]) -> dict[str, str]:
    """Of recipes that two sizes have whether their gaps rise or fall, by Welch's test at 5 %, adjusted for their number
    (Holm)."""
    both = sorted(set(small) & set(large))
    chances = holm([ttest_ind(small[name], large[name], equal_var=False).pvalue for name in both])
    words = {}
    for name, chance in zip(both, chances, strict=True):
        direction = "rises" if large[name].mean() > small[name].mean() else "falls"
        words[name] = f"{direction if chance < 0.05 else 'not significant'}, p = {chance:.2g}"
    return words


def _falls(runs: pd.DataFrame) -> list[dict[str, object]]:
    """A row for each recipe that quantizes the forward pass, alone or with the backward pass, and that 1M and 10M have:
    what it loses in nats at 1M, 3M and 10M, and the ratios to 1M. The first row is BF16's loss above the text's
    entropy."""
    sizes = "1M", "3M", "10M"
    language = runs[runs["task"].eq("language") & runs["rev_engine"].eq(8) & runs["preset"].isin(sizes)]
    base = language[language["is_baseline"].astype(bool)]
    above = {size: 1000 * base.loc[base["preset"].eq(size), "val_metric"].mean() for size in sizes}
    rows = language[~language["is_baseline"].astype(bool) & language["config_id"].isin(QUANTIZES)]
    pair = ["preset", "device_class", "seed"]
    rows = rows.merge(base[[*pair, "val_loss"]], on=pair, suffixes=("", "_of_base"))
    rows["lost"] = 1000 * (rows["val_loss"] - rows["val_loss_of_base"])
    labels = rows.drop_duplicates("config_id").set_index("config_id")["recipe_label"].astype(str)
    out = []
    for name, of in rows.groupby("config_id", observed=True):
        lost = {size: of.loc[of["preset"].eq(size), "lost"] for size in sizes}
        if QUANTIZES[name] == "backward" or lost["1M"].empty or lost["10M"].empty:
            continue
        row = {"recipe": labels[name], "quantizes": QUANTIZES[name]}
        row |= {f"at {size}": f"{values.mean():.2f}" if len(values) else "" for size, values in lost.items()}
        row |= {f"of it left at {size}": _left(lost["1M"], lost[size]) for size in sizes[1:]}
        out.append((lost["10M"].mean() / lost["1M"].mean(), row))
    first = {"recipe": "BF16, above the entropy", "quantizes": ""} | {f"at {at}": f"{above[at]:.1f}" for at in sizes}
    first |= {f"of it left at {size}": f"{above[size] / above['1M']:.2f}" for size in sizes[1:]}
    return [first, *(row for _, row in sorted(out, key=lambda pair: pair[0], reverse=True))]


def _left(small: pd.Series, large: pd.Series) -> str:
    """The ratio of two means with its standard error; empty where there is none."""
    if large.empty:
        return ""
    ratio = large.mean() / small.mean()
    return f"{ratio:.2f} ± {ratio * np.hypot(small.sem() / small.mean(), large.sem() / large.mean()):.2f}"


def _worth(runs: pd.DataFrame) -> list[dict[str, object]]:
    """A row for each recipe that *scale* has and three presets or more: what its parameters and tokens are worth, how
    far that is from its gaps, and how far a power law is."""
    language = runs[runs["task"].eq("language")]
    ours = language.loc[language["seed"].isin(SCALE), "config_id"]
    found = scaling(language)
    found = found[found["config_id"].isin(ours) & found["eff_d"].notna() & found["presets"].ge(3)]
    return [
        {
            "recipe": line["label"],
            "presets": line["presets"],
            "parameters are worth": _factor(*line[["eff_n", "eff_n_low", "eff_n_high"]]),
            "tokens are worth": _factor(*line[["eff_d", "eff_d_low", "eff_d_high"]]),
            "misfit": f"{line['misfit_effective']:.1f}",
            "of a power law": f"{line['misfit_power']:.1f}",
        }
        for _, line in found.sort_values("misfit_effective", ascending=False).iterrows()
    ]


def _factor(value: float, low: float, high: float) -> str:
    """A number with its limits, where it has some."""
    return f"{value:.2f}" if np.isnan(low) else f"{value:.2f} ({low:.2f} to {high:.2f})"


def _extrapolated(runs: pd.DataFrame) -> list[dict[str, object]]:
    """A row for each model of how gaps grow: its predictions for 10M from the smaller sizes of *scale*, and for 30M
    from all that was trained below it."""
    language = runs[runs["task"].eq("language")]
    scale = language["seed"].isin(SCALE)
    parts = extrapolation(language[scale & language["preset"].ne("30M")]), extrapolation(language)
    found = pd.concat(parts, ignore_index=True)
    return [
        {
            "prediction of": preset,
            "model": model,
            "recipes": len(lines),
            "measured − predicted, median": f"{100 * lines['difference'].median():+.2f} %",
            "largest": f"{100 * max(lines['difference'], key=abs):+.2f} %",
            "within its interval": f"{lines['error'].abs().le(1).mean():.0%}" if len(lines) > 3 else "",
            "right side, of pairs 0.2 % apart": f"{lines['agree'].sum() // 2} of {lines['pairs'].sum() // 2}",
        }
        for (preset, model), lines in found.groupby(["preset", "model"], sort=False, observed=True)
    ]


OF_SCALE = {"scale": _scale, "scale in BF16": partial(_scale, of="gap_bf16"), "shares": _shares}
"""Marker -> rows of its table, of the runs of *scale*."""

OF_ALL = {"falls": _falls, "worth": _worth, "extrapolated": _extrapolated}
"""The same, of all runs."""
