"""The choice of each recipe's learning rate: from which rates, whether it is a fair one, and how much it flatters.

The choice (paired.py) is made on the very losses that are reported. That flatters every recipe, BF16 included, by about
the expected gain of the best of k noisy means: its optimism, which is told with the rate chosen on the other seeds.
"""

from __future__ import annotations

import pandas as pd

from fp4dse.results.stats.levels import are_shares, levels
from fp4dse.results.stats.paired import SETTING, at_best_lr, outcomes, stacked
from fp4dse.results.stats.stages import TUNE, of_stage, screened

SEARCHED = "searched"
TUNED = ("tuned", SEARCHED)
"""Of lr_source: rates that were chosen on other seeds than those reported."""


def learning_rates(runs: pd.DataFrame) -> pd.DataFrame:
    """The choice of each recipe's learning rate, one line per SETTING and recipe.

    Columns: SETTING, config_id, label, is_baseline, lr (chosen), source (its lr_source: `tuned`, `preset`, `given`,
    `searched`; None in rows of before there was that), rates (tried), grid (text), tuned (the rate was chosen on other
    seeds: source), same_grid (tuned, or as the most common grid of the setting, or nothing is trained, so that all
    rates are one), at_edge (the chosen rate is the lowest or highest of several, of those that were searched where it
    is `searched`: a better one may lie outside), optimism. optimism is how much lower the recipe's mean log loss is
    at the chosen rate than at rates chosen without the seed that they are judged on; it is the bias of choosing on
    the reported losses, 0 with one rate, NaN with one seed or where a rate lacks a seed.
    """
    columns = [*SETTING, "config_id", "label", "is_baseline", "lr", "source", "rates", "grid"]
    columns += ["tuned", "same_grid", "at_edge", "optimism"]
    if runs.empty:
        return stacked([], columns)
    searched = of_stage(runs, TUNE)
    runs = screened(runs)
    source = runs["lr_source"] if "lr_source" in runs else pd.Series(index=runs.index, dtype=object)
    facts = {"label": runs["recipe_label"], "is_baseline": runs["is_baseline"].astype(bool), "source": source}
    facts["untrained"] = runs["trains"].eq("none").fillna(False) if "trains" in runs else False
    work = outcomes(runs).assign(**facts, tuned=source.isin(TUNED), shares=are_shares(runs))
    recipe = ["setting", "config_id"]
    tried = work.groupby([*recipe, "lr"], sort=True)["seed"].count().reset_index()
    grids = tried.groupby(recipe)["lr"].agg(rates="count", least="min", most="max")
    grids["grid"] = tried["lr"].map("{:g}".format).groupby([tried[name] for name in recipe]).agg(", ".join)
    chosen = at_best_lr(work)
    best = work[chosen].drop_duplicates(recipe).set_index(recipe)
    trained = grids[~best["untrained"].reindex(grids.index, fill_value=False).to_numpy(bool)]
    usual = trained.groupby("setting")["grid"].agg(lambda found: found.value_counts().index[0])
    out = grids.join(best[["lr", "label", "is_baseline", "source", "tuned", "untrained"]]).join(_optimism(work, chosen))
    same = out["grid"].to_numpy() == usual.reindex(out.index.get_level_values("setting")).to_numpy()
    out["same_grid"] = same | (out["tuned"] | out["untrained"]).to_numpy(bool)
    out["at_edge"] = out["rates"].gt(1) & (out["lr"].eq(out["least"]) | out["lr"].eq(out["most"]))
    settings = runs[list(SETTING)].assign(setting=work["setting"]).drop_duplicates("setting")
    out = out.reset_index().merge(settings, on="setting").sort_values(["setting", "label"])
    of = [*SETTING, "config_id"]
    ends = out[of].merge(searched.groupby(of, dropna=False)["lr"].agg(["min", "max"]).reset_index(), "left", of)
    at_end = (ends[["min", "max"]].to_numpy(float) == out[["lr"]].to_numpy(float)).any(axis=1)
    out["at_edge"] |= out["source"].eq(SEARCHED).to_numpy() & at_end
    return out[columns].reset_index(drop=True)


def _optimism(work: pd.DataFrame, chosen: pd.Series) -> pd.Series:
    """Per (setting, config_id): mean log loss at rates chosen on the other seeds, minus that at the chosen rate."""
    recipe = ["setting", "config_id"]
    log = work.assign(log=levels(work["loss"], work["shares"]))
    rates = log.groupby([*recipe, "lr"])["loss"].agg(["sum", "count", "size"])
    log = log.join(rates, on=[*recipe, "lr"])
    log["others"] = (log["sum"] - log["loss"]) / (log["count"] - 1).where(log["count"].gt(1))
    held_out = log.sort_values(["others", "lr"]).drop_duplicates([*recipe, "seed"]).groupby(recipe)["log"].mean()
    out = held_out - log[chosen].groupby(recipe)["log"].mean()
    whole = rates.groupby(recipe).agg(least=("count", "min"), most=("size", "max"), rates=("size", "size"))
    complete = whole["least"].eq(whole["most"]) & whole["most"].gt(1)
    return out.where(complete).mask(whole["rates"].eq(1), 0.0).rename("optimism")
