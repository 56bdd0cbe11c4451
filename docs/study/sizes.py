"""The tables of findings.md that hold sizes against one another and against published gaps."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd
from cells import gap, spearman_words

from fp4dse.dse import SLOTS, Recipe, Space
from fp4dse.dse.quantizer import Quantizer
from fp4dse.results import summarize
from fp4dse.results.stats.estimates.spread import spread_over_seeds
from fp4dse.results.stats.paired import by_seed, rows_at_best_lr
from fp4dse.results.stats.sizes.agreement import Ranked, agreement, agreement_with_fewer_seeds, compared, published
from fp4dse.results.text.ratios import change_with_range

HERE = Path(__file__).parent


def one_machine(runs: pd.DataFrame) -> pd.DataFrame:
    """Runs as if all were of one kind of machine, for gaps, which are against BF16 of the same: a seed on another kind
    is another seed."""
    kinds, names = pd.factorize(runs["device_class"].astype(str))
    return runs.assign(device_class=" and ".join(names), seed=runs["seed"] + 1000 * kinds)


def _agreement(runs: pd.DataFrame) -> list[dict[str, object]]:
    """A row for each task and group of Quartet II's schemes, of which two are far enough apart: agreement with their
    order at 30M parameters."""
    found = agreement(runs).query("pairs > 0")
    return [
        {
            "task": f"{line.task}:{line.preset}",
            "schemes": line.group,
            "recipes": line.recipes,
            "pairs 0.2 % apart": line.pairs,
            "in the same order": f"{line.agree:.0%} ({line.agree_low:.0%} to {line.agree_high:.0%})",
            "of a perfect proxy": f"{line.ceiling_agree:.0%}",
            "Spearman": f"{line.spearman:.2f} ({line.spearman_low:.2f} to {line.spearman_high:.2f})",
            "of a perfect proxy's": f"{line.ceiling_spearman:.2f}",
        }
        for line in found[found["published"].eq("quartet2")].itertuples()
    ]


def _fewer_seeds(runs: pd.DataFrame) -> list[dict[str, object]]:
    """A row for each task whose schemes have the same seeds, and number of them: agreement with Quartet II's order in
    each group, over all choices of that many."""
    found = agreement_with_fewer_seeds(runs[runs["task"].eq("language") & runs["preset"].isin(["0.4M", "1M"])])
    found = found[found["published"].eq("quartet2")]
    return [
        {
            "task": f"{task}:{preset}",
            "seeds": seeds,
            **{line.group: f"{line.agree:.0%} ({line.agree_least:.0%} at least)" for line in lines.itertuples()},
        }
        for (task, preset, seeds), lines in found.groupby(["task", "preset", "seeds"], observed=True)
    ]


def _published(runs: pd.DataFrame) -> list[dict[str, object]]:
    """A row for each of Quartet II's schemes: its published gap, and the gaps here, from the least in each group."""
    found = published(runs)
    mine = found["published"].eq("quartet2") & found["task"].eq("language")
    found = found[mine].sort_values(["group", "published_gap"])
    here = {preset: f"language:{preset}" for preset in by_size(found["preset"].unique())}
    rows: dict[str, dict[str, object]] = {}
    for line in found.itertuples():
        row = rows.setdefault(line.scheme, {"group": line.group, "scheme": line.scheme})
        row["30M, published"] = f"{100 * line.published_gap:+.2f} %"
        row.update({name: row.get(name, "") for name in here.values()})
        row[here[line.preset]] = gap(line.gap, line.gap_low, line.gap_high, line.pairs)
    return list(rows.values())


def _sizes(runs: pd.DataFrame) -> list[dict[str, object]]:
    """A row for each recipe of HALVE and of `quartet2-10M.toml` that two sizes have: its gap at each."""
    lines = summarize(runs[runs["task"].eq("language")])
    lines = lines[lines["config_id"].isin(GROUPS) & lines["gap"].notna()]
    sizes = by_size(lines["preset"].unique())
    found = lines.set_index(["config_id", "preset"])
    labels = lines.drop_duplicates("config_id").set_index("config_id")["label"]
    rows = []
    for name, group in GROUPS.items():
        row: dict[str, object] = {"quantizes": group, "recipe": labels.get(name, name)}
        for preset in sizes:
            if (name, preset) in found.index:
                line = found.loc[name, preset]
                row[preset] = gap(line["gap"], line["gap_low"], line["gap_high"], line["pairs"])
        if len(row) > 3:
            rows.append(row)
    return rows


def _order(runs: pd.DataFrame) -> list[dict[str, object]]:
    """A row for each pair of sizes and group of recipes of which the larger has a pair apart: does the smaller order
    them alike?"""
    rows = rows_at_best_lr(runs[runs["task"].eq("language")])
    rows = rows[rows["config_id"].isin(GROUPS) & rows["gap"].notna()]
    gaps = {}
    for preset, part in rows.groupby("preset", observed=True):
        ids, values = by_seed(part, part["gap"])
        gaps[preset] = pd.DataFrame(100 * values, index=ids)
    lines: list[dict[str, object]] = []
    sizes = by_size(gaps)
    for (small, large), group in itertools.product(itertools.combinations(sizes, 2), dict.fromkeys(GROUPS.values())):
        both = [n for n, of in GROUPS.items() if of == group and n in gaps[small].index and n in gaps[large].index]
        if len(both) < 3:
            continue
        spread = spread_over_seeds(gaps[large].loc[both].dropna(axis="columns", how="all").to_numpy())
        proxy = gaps[small].loc[both].dropna(axis="columns", how="all").to_numpy()
        error = float(np.sqrt(np.mean(spread.error**2)))
        found = compared(Ranked(large, group, both, spread.mean, proxy, len(both)), error)
        if not found["pairs"]:
            continue
        lines.append(
            {
                "sizes": f"{small} for {large}",
                "quantizes": group,
                "recipes": len(both),
                "pairs 0.2 % apart": found["pairs"],
                "in the same order": f"{found['agree']:.0%} ({found['agree_low']:.0%} to {found['agree_high']:.0%})",
                "of a perfect proxy": f"{found['ceiling_agree']:.0%}",
                "Spearman": spearman_words(spread.mean, np.nanmean(proxy, axis=1)),
                "of a perfect proxy's": f"{found['ceiling_spearman']:.2f}",
            }
        )
    return lines


def _reducible(runs: pd.DataFrame) -> list[dict[str, object]]:
    """A row for BF16, its loss above the text's entropy, and for each recipe trained at 10M: its gap in that."""
    lines = summarize(runs[runs["task"].eq("language")])
    names = lines.loc[lines["preset"].eq("10M") & lines["label"].ne("bf16"), "config_id"]
    found = lines[lines["config_id"].isin(names)].sort_values("overhead")
    rows = [at_sizes(of, "gap_reducible") for _, of in found.groupby("config_id", sort=False)]
    above = runs[runs["task"].eq("language") & runs["is_baseline"].astype(bool)]
    means = above["val_metric"].groupby(above["preset"].astype(str)).mean()
    return [{"recipe": "BF16, nats a token", **{p: f"{means[p]:.4f}" for p in by_size(means.index)}}, *rows]


def at_sizes(lines: pd.DataFrame, gap: str) -> dict[str, object]:
    """The row of a recipe: one kind of gap at each size. lines: of the recipe alone, of `summarize`."""
    of = lines.set_index("preset")
    found = {preset: of.loc[preset, [gap, f"{gap}_low", f"{gap}_high"]] for preset in by_size(of.index)}
    return {"recipe": of["label"].iloc[-1], **{preset: change_with_range(*line) for preset, line in found.items()}}


def by_size(presets: Iterable[str]) -> list[str]:
    """Presets by parameters, then by tokens: 10M before 10M-long."""
    return sorted(presets, key=lambda preset: (float(preset.partition("M")[0]), preset))


def groups(*files: str) -> dict[str, str]:
    """config_id -> what the recipe quantizes, of the recipes of spaces."""
    found = {}
    for file in files:
        for recipe in Space.load(HERE / file).recipes():
            canonical = recipe.canonical()
            passes = [any(not q.is_plain for q in part) for part in _slots(canonical)]
            found[canonical.config_id] = {(True, True): "all", (True, False): "forward"}.get(tuple(passes), "backward")
    return dict(sorted(found.items(), key=lambda pair: pair[1]))


def _slots(recipe: Recipe) -> tuple[list[Quantizer], list[Quantizer]]:
    forward = [recipe.slot(slot) for slot in SLOTS if slot.startswith("fprop")]
    return forward, [recipe.slot(slot) for slot in SLOTS if not slot.startswith("fprop")]


HALVE = "halve.toml", "halve-rest.toml"
"""Spaces of the recipes of stage *halve*."""
GROUPS = groups(*HALVE, "quartet2-10M.toml")
"""Of the recipes of the stages before *scale* that are trained at 10M."""
HALVED = set(groups(*HALVE))
"""Recipes of stage *halve*."""

OF_EARLIER = {
    "agreement": _agreement,
    "fewer-seeds": _fewer_seeds,
    "published": _published,
    "reducible": _reducible,
    "sizes": _sizes,
    "order": _order,
}
"""Marker -> rows of its table, of the runs of all stages before *scale*."""
