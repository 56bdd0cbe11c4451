"""From rows to statements: the gap to BF16, its interval over seeds, and whether two recipes differ.

    gap = log(val_loss / baseline val_loss)          about the relative excess when small; printed in %

Everything is paired: a recipe and its baseline share the initial weights and the data order of a seed, so the
difference within a seed has far less noise than either loss. The mean of n paired differences d has the interval
mean(d) ± t(0.975, n-1) · std(d)/√n.

Learning rates are chosen before pairing: each recipe, and the baseline, at its own best rate of the grid. The choice
is made on the very losses that are reported, which flatters all recipes alike. Rows are compared only within one
SETTING.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy.special import stdtr, stdtrit

from fp4dse.dse import ConfigError
from fp4dse.results.pareto import front

SETTING = (
    "task",
    "preset",
    "dataset_digest",
    "device_class",
    "software_class",
    "rev_quantizers",
    "rev_engine",
    "rev_task",
)
"""What two rows share if their losses may be compared."""

CONFIDENCE = 0.95

NEEDED = [*SETTING, "config_id", "lr", "seed", "is_baseline", "status", "val_loss"]
"""The columns that `add_gap` reads."""

DERIVED = ["baseline_loss", "gap"]
"""The columns that `add_gap` adds."""

LABELS = ["recipe_label", "recipe_name", "points", "bits_per_element", "val_metric", "metric_name"]
SUMMARIZED = [*NEEDED, *DERIVED, *LABELS]
"""The columns that `summarize` reads."""


def outcomes(runs: pd.DataFrame) -> pd.DataFrame:
    """Per row, same index: setting (int), config_id, lr, seed, loss (NaN unless it finished), diverged, failed.

    A finished row whose validation loss is NaN or Inf counts as diverged.
    """
    done = runs["status"].eq("done")
    loss = runs["val_loss"].astype(float)
    finite = done & np.isfinite(loss)
    return pd.DataFrame(
        {
            "setting": runs.groupby(list(SETTING)).ngroup(),
            "config_id": runs["config_id"],
            "lr": runs["lr"],
            "seed": runs["seed"],
            "loss": loss.where(finite),
            "diverged": runs["status"].eq("diverged") | (done & ~finite),
            "failed": runs["status"].eq("failed"),
        },
        index=runs.index,
    )


def at_best_lr(work: pd.DataFrame) -> pd.Series:
    """Which rows of `outcomes` stand at their recipe's best learning rate (bool, same index).

    A rate without a finished seed loses to one with; then fewer diverged seeds win, then more finished seeds, then
    the lower mean loss, then the lower rate.
    """
    group = work.groupby(["setting", "config_id", "lr"], sort=False).ngroup()
    rates = work.groupby(group).agg(
        setting=("setting", "first"),
        config_id=("config_id", "first"),
        lr=("lr", "first"),
        seeds=("loss", "count"),
        diverged=("diverged", "sum"),
        loss=("loss", "mean"),
    )
    rates = rates.assign(empty=rates["seeds"].eq(0), fewer=-rates["seeds"])
    ranked = rates.sort_values(["empty", "diverged", "fewer", "loss", "lr"])
    return group.isin(ranked.drop_duplicates(["setting", "config_id"]).index)


def add_gap(runs: pd.DataFrame) -> pd.DataFrame:
    """`runs` with baseline_loss (the baseline at its best rate, same setting and seed) and gap.

    gap is inf where the row diverged, NaN where it failed, has no baseline, or a loss is not positive.
    """
    pair = [*SETTING, "seed"]
    baseline = runs[pair].merge(baselines(runs), how="left", on=pair)["baseline_loss"].to_numpy()
    work = outcomes(runs)
    gap = np.where(work["diverged"], np.inf, _log(work["loss"]) - _log(baseline))
    return runs.assign(baseline_loss=baseline, gap=gap)


def baselines(runs: pd.DataFrame) -> pd.DataFrame:
    """SETTING, seed and baseline_loss: what each run of that setting and seed is compared with."""
    runs = runs[runs["is_baseline"].astype(bool)]
    work = outcomes(runs)
    runs = runs[[*SETTING, "seed"]].assign(baseline_loss=work["loss"])
    return runs[at_best_lr(work)].dropna(subset="baseline_loss").reset_index(drop=True)


def summarize(runs: pd.DataFrame) -> pd.DataFrame:
    """One line per SETTING and recipe, at the recipe's best learning rate.

    Columns: SETTING, config_id, label, name, is_baseline, lr, seeds (finished), diverged, failed, val_loss and
    val_metric (means), metric_name, gap, gap_low, gap_high (mean of the paired gaps, 95 % interval; NaN bounds with
    one pair), pairs, p_best (two-sided p of the paired difference to the recipe with the lowest gap), points, bits,
    on_front, note (why there is no gap, else empty).

    A frame that has gap and baseline_loss (as Store.runs() gives) keeps them, so that rows may be filtered first.
    A recipe with a diverged seed has gap = inf. The front is over recipes that quantize (points > 0) and have a
    finite gap: the baseline is the reference and competes with nobody.
    """
    runs = runs if "gap" in runs else add_gap(runs)
    work = outcomes(runs)
    best = at_best_lr(work)
    work, chosen = work[best], runs.loc[best, SUMMARIZED]
    rows = chosen.assign(
        setting=work["setting"],
        loss=work["loss"],
        diverged=work["diverged"],
        failed=work["failed"],
        val_metric=chosen["val_metric"].astype(float).where(work["loss"].notna()),
        paired=chosen["gap"].where(np.isfinite(chosen["gap"])),
        unpaired=work["loss"].notna() & chosen["baseline_loss"].isna(),
    )
    kept = [*SETTING, "is_baseline", "lr", "metric_name", "points"]
    out = (
        rows.groupby(["setting", "config_id"], sort=False)
        .agg(
            **{name: (name, "first") for name in kept},
            label=("recipe_label", "first"),
            name=("recipe_name", "first"),
            bits=("bits_per_element", "first"),
            seeds=("loss", "count"),
            diverged=("diverged", "sum"),
            failed=("failed", "sum"),
            val_loss=("loss", "mean"),
            val_metric=("val_metric", "mean"),
            pairs=("paired", "count"),
            gap=("paired", "mean"),
            std=("paired", "std"),
            unpaired=("unpaired", "sum"),
        )
        .reset_index()
    )
    half = half_width(out["std"], out["pairs"])
    spoiled = out["diverged"].gt(0)
    out["gap_low"], out["gap_high"] = (out["gap"] + sign * half.where(~spoiled) for sign in (-1, 1))
    out["gap"] = out["gap"].mask(spoiled, np.inf)
    out["note"] = np.select(
        [spoiled, out["seeds"].eq(0), out["pairs"].gt(0), out["unpaired"].gt(0)],
        ["diverged", "failed", "", "no baseline"],
        "loss is not positive",
    )
    quantizes = out["points"].gt(0) & np.isfinite(out["gap"])
    out["on_front"] = False
    for _, part in out[quantizes].groupby("setting"):
        out.loc[part.index, "on_front"] = front(part["points"], part["gap"])
    out["p_best"] = _p_against_best(out[quantizes], rows).reindex(out.index)
    out = out.sort_values(
        ["setting", "is_baseline", "on_front", "gap", "label"], ascending=[True, False, False, True, True]
    )
    columns = [*SETTING, "config_id", "label", "name", "is_baseline", "lr", "seeds", "diverged", "failed"]
    columns += ["val_loss", "val_metric", "metric_name", "gap", "gap_low", "gap_high", "pairs", "p_best"]
    return out[[*columns, "points", "bits", "on_front", "note"]].reset_index(drop=True)


def _p_against_best(candidates: pd.DataFrame, rows: pd.DataFrame) -> pd.Series:
    """Two-sided p of the seed-paired difference between each candidate and the lowest gap of its setting."""
    winners = candidates.sort_values("gap").drop_duplicates("setting")[["setting", "config_id"]]
    best = rows.merge(winners)[["setting", "seed", "paired"]].rename(columns={"paired": "best"})
    pairs = rows[["setting", "config_id", "seed", "paired"]].merge(best, on=["setting", "seed"])
    difference = (pairs["paired"] - pairs["best"]).groupby([pairs["setting"], pairs["config_id"]], sort=False)
    p = p_value(difference.mean(), difference.std(), difference.count())
    lines = candidates[["setting", "config_id"]].merge(p.rename("p").reset_index(), how="left")
    return pd.Series(lines["p"].to_numpy(), index=candidates.index)


def noise_floor(runs: pd.DataFrame) -> pd.DataFrame:
    """Per SETTING: the baseline's lr, seeds, val_loss, val_metric, metric_name and noise_floor.

    noise_floor is the rms of log(loss_i / loss_j) over all pairs of seeds, which is √2 · std of the log losses:
    how far BF16 is from BF16 when only the seed differs. NaN with fewer than two seeds.
    """
    base = runs[runs["is_baseline"].astype(bool)]
    base = base.assign(loss=outcomes(base)["loss"])[at_best_lr(outcomes(base))]
    out = (
        base.assign(log=_log(base["loss"]))
        .groupby(list(SETTING), sort=False)
        .agg(
            lr=("lr", "first"),
            seeds=("loss", "count"),
            val_loss=("loss", "mean"),
            val_metric=("val_metric", "mean"),
            metric_name=("metric_name", "first"),
            std=("log", "std"),
        )
        .reset_index()
    )
    return out.assign(noise_floor=np.sqrt(2) * out["std"]).drop(columns="std")


def compare(runs: pd.DataFrame, a: str, b: str) -> pd.DataFrame:
    """The paired difference log(loss a / loss b) between two config_ids, one line per SETTING that has both.

    Columns: SETTING, label_a, label_b, lr_a, lr_b, pairs, diverged_a, diverged_b, difference, low, high, p, verdict
    (a plain sentence). ConfigError if an id has no rows, or no SETTING has both.
    """
    for config_id in (a, b):
        if not runs["config_id"].eq(config_id).any():
            raise ConfigError("compare", config_id, "a recipe that the store holds runs of")
    work = outcomes(runs)
    rows = runs.assign(log=_log(work["loss"]), diverged=work["diverged"], setting=work["setting"])[at_best_lr(work)]
    sides = [rows[rows["config_id"].eq(config_id)] for config_id in (a, b)]
    lines = []
    for setting in [s for s in sides[0]["setting"].unique() if s in set(sides[1]["setting"])]:
        left, right = (side[side["setting"].eq(setting)].set_index("seed") for side in sides)
        d = (left["log"] - right["log"]).dropna()
        n, mean, std = len(d), d.mean(), d.std()
        half = half_width(pd.Series([std]), pd.Series([n])).iloc[0]
        line = {name: left[name].iloc[0] for name in SETTING}
        line |= {"label_a": left["recipe_label"].iloc[0], "label_b": right["recipe_label"].iloc[0]}
        line |= {"lr_a": left["lr"].iloc[0], "lr_b": right["lr"].iloc[0], "pairs": n}
        line |= {"diverged_a": int(left["diverged"].sum()), "diverged_b": int(right["diverged"].sum())}
        line |= {"difference": mean, "low": mean - half, "high": mean + half}
        line["p"] = p_value(pd.Series([mean]), pd.Series([std]), pd.Series([n])).iloc[0]
        lines.append({**line, "verdict": _verdict(line)})
    if not lines:
        raise ConfigError("compare", f"{a}, {b}", "two recipes that were run on the same task, device and software")
    return pd.DataFrame(lines)


def _verdict(line: dict) -> str:
    where, a, b = f"{line['task']} ({line['preset']})", line["label_a"], line["label_b"]
    blown = [f"{line[f'label_{s}']} diverged on {line[f'diverged_{s}']}" for s in "ab" if line[f"diverged_{s}"]]
    if blown:
        return f"{where}: {' and '.join(blown)} of the seeds; a mean difference would say nothing."
    if line["pairs"] < 2:
        return f"{where}: {counted(line['pairs'], 'paired seed')}; at least 2 are needed to tell."
    sure = f"p = {line['p']:.2g}, {line['pairs']} paired seeds"
    if line["p"] >= 1 - CONFIDENCE:
        bounds = f"interval {percent(line['low'])} to {percent(line['high'])} %"
        return f"{where}: {a} and {b} are not told apart: {percent(line['difference'])} % in loss ({bounds}, {sure})."
    better, worse = (a, b) if line["difference"] < 0 else (b, a)
    low, size, high = sorted(abs(100 * line[name]) for name in ("low", "difference", "high"))
    bounds = f"interval {low:.2f} to {high:.2f} %"
    return f"{where}: {better} has a lower loss than {worse}, by {size:.2f} % ({bounds}, {sure})."


def half_width(std: pd.Series, n: pd.Series) -> pd.Series:
    """Half of the 95 % t-interval of a mean; NaN where n < 2."""
    n = n.where(n.gt(1)).astype(float)
    return stdtrit(n - 1, 0.5 + CONFIDENCE / 2) * std / np.sqrt(n)


def p_value(mean: pd.Series, std: pd.Series, n: pd.Series) -> pd.Series:
    """Two-sided p of a mean difference against zero; 1 where all differences are zero, NaN where n < 2."""
    n = n.where(n.gt(1)).astype(float)
    with np.errstate(divide="ignore", invalid="ignore"):
        t = (mean.abs() / (std / np.sqrt(n))).mask(mean.eq(0), 0.0)
    return 2 * stdtr(n - 1, -t)


def percent(log_ratio: float) -> str:
    """A gap as text in %, signed, two decimals."""
    return f"{100 * log_ratio:+.2f}"


def counted(n: int, word: str) -> str:
    """`1 seed`, `3 seeds`."""
    return f"{n} {word}" if n == 1 else f"{n} {word}s"


def _log(values) -> np.ndarray:
    """Natural logarithm, NaN where a value is not positive."""
    values = np.asarray(values, float)
    return np.log(np.where(values > 0, values, np.nan))
