"""Every comparison is within a seed: the gap of a row to BF16, and the learning rate at which a recipe is judged.

    gap         = log(val_loss / val_loss of BF16)     printed as the ratio that it is the logarithm of (ratios.py)
    gap_bf16    = log(val_loss_bf16 / val_loss_bf16 of BF16)      the same of both models evaluated in BF16
    gap_matched = log(val_loss / val_loss of the recipe's own baseline)
    gap_reducible = log((val_loss - E) / (val_loss of BF16 - E))  E: the entropy of the held-out data, where it is known

The last is of what a model could still learn, where the task's metric `excess` says how much of a loss that is.

Where a task's losses are shares (gap_unit `points`), a gap is the difference of the two instead of that of their
logarithms, a hundredth a point of accuracy; all that is said of log losses holds of these losses as they are.

A recipe and BF16 share the initial weights and the data order of a seed, so the difference within a seed has
far less noise than either loss. Rows are compared only within one SETTING.

Fronts and verdicts go by `gap`, whose denominator is the same for all: the lowest loss has the lowest gap. The own
baseline of a recipe that quantizes is BF16 with its training side (`Recipe.baseline`): where a recipe changes the
optimizer, the clip, the loss scale or the schedule, gap_matched is what FP4 costs under these. Effects of techniques go
by it, so that of an optimizer is a difference of differences: what it does to FP4 beyond what it does to BF16.

Learning rates are chosen before pairing: each recipe, and the baseline, at its own best rate of the same grid, by the
mean loss over its seeds. That the choice is made on the very losses that are reported flatters all: learning_rates.py
says by how much.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fp4dse.dse import Recipe
from fp4dse.results.stats.levels import are_shares, levels
from fp4dse.results.stats.stages import STAGE, screened

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
"""Columns that two rows share if their losses may be compared."""

OVERHEAD = "overhead"
"""The default overhead axis: a numeric column of runs. Small is cheap."""

MEASURED = ["measured", "measured_of"]
"""Another overhead axis, and what it is of: figures of one device, joined to the runs (store/measured.py)."""

MARGINS = ["margin", "margin_of"]
"""The margin of equivalence of a row's setting, a log ratio: how close two losses must be to count as the same. And
what it is from (tokens_worth.py)."""

NEEDED = [*SETTING, "config_id", "baseline_id", "lr", "seed", "is_baseline", "status"]
NEEDED += ["val_loss", "val_loss_bf16", "val_metric", "metric_name", "gap_unit", STAGE]
"""The columns that `add_gap` reads."""

DERIVED = ["baseline_loss", "gap", "gap_bf16", "gap_matched", "gap_reducible"]
"""The columns that `add_gap` adds."""

EXCESS = "excess"
"""The metric of a loss above the entropy of its data."""

PLAIN = Recipe.named("bf16").config_id
"""The recipe that the gap is measured from where no training side is changed."""

_JUDGED = ("setting", "loss", "diverged", "pruned", "failed")
"""The columns of `outcomes` that `rows_at_best_lr` adds."""

COMPARED = ["log_loss", "reference"]
"""Two more of them: the log loss that effects are of, and plain BF16's of the seed, NaN where there is none.

log_loss is the log of the loss (`levels`), less what the recipe's training side does to BF16 (gap - gap_matched); NaN
where BF16 was not trained with it."""


def numbered(rows: pd.DataFrame, names: Sequence[str], sort: bool = True, dropna: bool = True) -> pd.Series:
    """A number for each combination of values in these columns, from 0, in the order of the values or, not sorted, of
    the rows. NaN where a value is missing, if `dropna`; else missing values are equal, and the last.

    A group-by of pandas has these numbers too, but makes much more before it tells them.
    """
    number, most = np.zeros(len(rows), np.int64), 1
    missing = np.zeros(len(rows), bool)
    for name in names:
        codes, values = pd.factorize(rows[name])
        if sort and len(values) > 1:  # one value, as most columns of SETTING have, is in order
            codes, values = pd.factorize(rows[name], sort=True)
        lacks, count = codes < 0, len(values)
        if lacks.any():
            missing |= lacks
            codes, count = np.where(lacks, count, codes), count + 1
        if most * count >= 1 << 62:
            number, most = _dense(number, sort)
        number, most = number * count + codes, most * count
    if not (dropna and missing.any()):
        return pd.Series(_dense(number, sort)[0], rows.index)
    found = pd.Series(np.nan, rows.index)
    found[~missing] = _dense(number[~missing], sort)[0]
    return found


def _dense(number: NDArray[np.int64], sort: bool) -> tuple[NDArray[np.int64], int]:
    """The numbers without holes, from 0, in their order or in that of their first appearance; and how many."""
    dense, found = pd.factorize(number, sort=sort)
    return dense, len(found)


def outcomes(runs: pd.DataFrame) -> pd.DataFrame:
    """Per row, same index: setting (int), config_id, lr, seed, loss (NaN unless it finished), diverged, pruned, failed.

    A finished row whose validation loss is NaN or Inf counts as diverged. A pruned one was dropped at a rung.
    """
    done = runs["status"].eq("done")
    loss = runs["val_loss"].astype(float)
    finite = done & np.isfinite(loss)
    return pd.DataFrame(
        {
            "setting": numbered(runs, SETTING),
            "config_id": runs["config_id"],
            "lr": runs["lr"],
            "seed": runs["seed"],
            "loss": loss.where(finite),
            "diverged": runs["status"].eq("diverged") | (done & ~finite),
            "pruned": runs["status"].eq("pruned"),
            "failed": runs["status"].eq("failed"),
        },
        index=runs.index,
    )


def at_best_lr(work: pd.DataFrame) -> pd.Series:
    """True for rows of `outcomes` at their recipe's best learning rate (same index).

    A rate without a finished seed loses to one with; then fewer diverged seeds win, then more finished seeds, then
    the lower mean loss, then the lower rate.
    """
    keys = ["setting", "config_id", "lr"]
    group = numbered(work, keys, sort=False)
    first = group.notna() & ~group.duplicated()
    rates = work.loc[first, keys]
    if not rates.duplicated(keys[:2]).any():
        return group.notna()  # one rate each, as in most studies
    loss = work["loss"].groupby(group)
    rates = rates.set_index(group[first])
    seeds = loss.count()
    rates = rates.assign(
        empty=seeds.eq(0), diverged=work["diverged"].groupby(group).sum(), fewer=-seeds, loss=loss.mean()
    )
    ranked = rates.sort_values(["empty", "diverged", "fewer", "loss", "lr"])
    return group.isin(ranked.drop_duplicates(["setting", "config_id"]).index)


def add_gap(runs: pd.DataFrame) -> pd.DataFrame:
    """`runs` with DERIVED: baseline_loss (of plain BF16 at its best rate, same setting and seed) and the gaps.

    Gaps are inf where the row diverged, NaN where it failed, has no baseline, or a loss is not positive. In a frame
    without `baseline_id` everyone's own baseline is plain BF16 (is_baseline); one without `val_loss_bf16` has no
    gap_bf16, and rows whose metric is another have no gap_reducible.
    """
    known = _with_baseline_id(runs).reset_index(drop=True)
    place = numbered(known, [*SETTING, "seed"], sort=False, dropna=False).to_numpy()
    is_plain = known["is_baseline"].astype(bool)
    work = outcomes(known)
    owned, owners = pd.factorize(known["baseline_id"])
    reference = known["config_id"].isin(owners) | is_plain
    bases = _baselines(known[reference], work[reference])
    losses = bases[["baseline_loss", "baseline_loss_bf16"]].to_numpy(float)
    plain = bases["baseline_id"].isin(known.loc[is_plain, "config_id"].unique()).to_numpy(bool)
    there = place[bases.index]
    usual = _looked_up(there[plain], losses[plain], place)
    owner = owners.get_indexer(bases["baseline_id"])
    own = [
        np.where(of < 0, unknown, at * len(owners) + of) for of, at, unknown in ((owner, there, -1), (owned, place, -2))
    ]
    matched = _looked_up(own[0], losses, own[1])
    shares = are_shares(known)
    excess = _excess(known)
    gaps = {
        name: np.where(work["diverged"], np.inf, levels(loss, shares) - levels(baseline, shares))
        for name, loss, baseline in (
            ("gap", work["loss"], usual[:, 0]),
            ("gap_bf16", _in_bf16(known), usual[:, 1]),
            ("gap_matched", work["loss"], matched[:, 0]),
            ("gap_reducible", excess, excess.to_numpy() - work["loss"].to_numpy() + usual[:, 0]),
        )
    }
    return runs.assign(baseline_loss=usual[:, 0], **gaps)


def _looked_up(keys: NDArray[np.int64], values: NDArray[np.float64], wanted: NDArray[np.int64]) -> NDArray[np.float64]:
    """The values [n, k] of the wanted keys, NaN where there is none. keys: [n], each that is wanted once."""
    if not len(keys):
        return np.full((len(wanted), values.shape[1]), np.nan)
    order = np.argsort(keys)
    at = order[np.searchsorted(keys[order], wanted).clip(max=len(keys) - 1)]
    return np.where((keys[at] == wanted)[:, None], values[at], np.nan)


def baselines(runs: pd.DataFrame) -> pd.DataFrame:
    """SETTING, baseline_id, seed, baseline_loss and baseline_loss_bf16: what runs of that setting, baseline and seed
    are compared with. Screened rows choose their rate for themselves. runs: those of baselines."""
    return _baselines(runs, outcomes(runs)).reset_index(drop=True)


def _baselines(runs: pd.DataFrame, work: pd.DataFrame) -> pd.DataFrame:
    """The same with the index of their rows, which have these `outcomes`."""
    if STAGE in runs:
        work = work.assign(setting=numbered(runs, [*SETTING, STAGE], dropna=False))
    found = runs[[*SETTING, "seed"]].assign(
        baseline_id=runs["config_id"].astype(runs["baseline_id"].dtype),
        baseline_loss=work["loss"],
        baseline_loss_bf16=_in_bf16(runs),
    )
    found = found[at_best_lr(work)].dropna(subset="baseline_loss")
    return found[~numbered(found, [*SETTING, "baseline_id", "seed"], sort=False, dropna=False).duplicated()]


def _with_baseline_id(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs with a baseline_id; without one they are compared with plain BF16."""
    if "baseline_id" in runs:
        return runs
    plain = runs.loc[runs["is_baseline"].astype(bool), "config_id"]
    return runs.assign(baseline_id=plain.iloc[0] if len(plain) else "")


def _in_bf16(runs: pd.DataFrame) -> pd.Series:
    """val_loss_bf16 of finished rows, NaN of others."""
    if "val_loss_bf16" not in runs:
        return pd.Series(np.nan, runs.index)
    loss = runs["val_loss_bf16"].astype(float)
    return loss.where(runs["status"].eq("done") & np.isfinite(loss))


def _excess(runs: pd.DataFrame) -> pd.Series:
    """The loss above the entropy of finished rows, NaN of others and where nobody knows the entropy."""
    if not {"val_metric", "metric_name"} <= set(runs):
        return pd.Series(np.nan, runs.index)
    return runs["val_metric"].astype(float).where(runs["status"].eq("done") & runs["metric_name"].eq(EXCESS))


def rows_at_best_lr(runs: pd.DataFrame) -> pd.DataFrame:
    """The screened rows at each recipe's best learning rate, with DERIVED, the columns of `outcomes`, and COMPARED.

    A frame that has a gap keeps it, so that rows may be filtered before. A result of this function comes back
    unchanged, so that one frame can serve several statistics. A recipe with a pruned seed has neither loss nor gap:
    only its lucky seeds are left, and their mean would flatter it.
    """
    if all(name in runs for name in (*_JUDGED, *COMPARED)):
        return runs
    runs = screened(runs)
    runs = runs if "gap" in runs else add_gap(runs)
    runs = runs.assign(**{name: np.nan for name in ("gap_bf16", "gap_reducible") if name not in runs})
    runs = runs if "gap_matched" in runs else runs.assign(gap_matched=runs["gap"])
    work = outcomes(runs)
    added = {name: work[name].to_numpy() for name in _JUDGED}
    rows, best = runs.assign(**added), at_best_lr(work).to_numpy()
    rows = rows if best.all() else rows[best]  # most studies have one rate, and a selection copies every column
    rows = rows.assign(**_compared(rows))
    if not rows["pruned"].any():
        return rows
    partly = rows["pruned"].groupby([rows["setting"], rows["config_id"]]).transform("any") & ~rows["diverged"]
    return rows.assign(**{name: rows[name].mask(partly) for name in ("loss", *DERIVED[1:], "log_loss")})


def _compared(rows: pd.DataFrame) -> dict[str, NDArray[np.float64]]:
    """COMPARED of rows with loss, baseline_loss, gap and gap_matched."""
    with np.errstate(invalid="ignore"):  # of a diverged row inf - inf
        excess = rows["gap"].to_numpy(float) - rows["gap_matched"].to_numpy(float)
    plain = plain_ids(rows)
    own_is_plain = rows["baseline_id"].isin(plain) if "baseline_id" in rows else True  # it needs no BF16 of the seed
    excess = np.where(own_is_plain, 0.0, excess)
    shares = are_shares(rows)
    return {
        "log_loss": levels(rows["loss"], shares) - excess,
        "reference": levels(rows["baseline_loss"], shares),
    }


def plain_ids(rows: pd.DataFrame) -> set[str]:
    """config_ids of plain BF16, without a training side of its own. rows: with is_baseline; or lines of recipes."""
    return {PLAIN, *rows.loc[rows["is_baseline"].astype(bool), "config_id"]}


def setting_of(rows: pd.DataFrame) -> tuple[Any, ...]:
    """The values of SETTING of rows of one setting, of which there is one or more."""
    return tuple(rows[name].iloc[0] for name in SETTING)


def bf16_cost(rows: pd.DataFrame, overhead: str = OVERHEAD) -> float | None:
    """The cost of BF16 on an axis, where it competes with recipes: rows (or lines) of a setting that it costs 1 in.

    None on other axes: it has no points, and on a machine that computes FP4 by other means nothing is cheaper. None
    where lanes roll out, too, whose time the modelled overhead does not have.
    """
    return 1.0 if overhead == OVERHEAD and not are_shares(rows).any() else None


def by_seed(
    rows: pd.DataFrame, values: pd.Series, key: pd.Series | None = None
) -> tuple[pd.Index, NDArray[np.float64]]:
    """config_ids and the values as a matrix [recipes, seeds], NaN where there is none.

    rows: of one setting, or of several with a `key` that tells recipes of different settings apart.
    """
    recipe, recipes = pd.factorize(rows["config_id"] if key is None else key)
    seed, seeds = pd.factorize(rows["seed"], sort=True)
    matrix = np.full((len(recipes), len(seeds)), np.nan)
    matrix[recipe, seed] = np.where(np.isfinite(values), values, np.nan)
    return pd.Index(np.asarray(recipes)), matrix


def stacked(parts: Sequence[pd.DataFrame], columns: Sequence[str]) -> pd.DataFrame:
    """The frames under each other, with these columns; of no frames one without lines."""
    if not parts:
        return pd.DataFrame({name: [] for name in columns})
    return pd.concat(parts, ignore_index=True)[list(columns)]
