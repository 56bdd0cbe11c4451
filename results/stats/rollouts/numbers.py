"""Numbers of a training that learns from samples of its own, one of each a lane, from its row and what was recorded.

    accuracy            share of held-out problems that is solved, by the rollout's forward pass
    reward, entropy     mean over the recorded steps (share; nats a token), and so mismatch_kl (rollout to trainer, nats
                        a token), ratios_clipped and rerouted
    gradient_error      geometric mean over the recorded steps where it is above 0, and so gradient_error/BLOCK
    mismatch_kl_max     the largest that was recorded
    mismatch_kl_slope   least squares, nats a token for each 100 updates: 0 where it stays flat
    entropy_at_reward   the entropy at equal reward

An error of the gradient is a ratio that spans decades: in a few minibatches next to nothing is left to learn, the exact
gradient is near 0 and the error is a hundred times as large as in others, which would rule a mean. So it is averaged as
a logarithm, over seeds, too, and two of them are compared by the logarithm of their ratio (`OF_RATIOS`).

Entropy falls while reward rises, so that a lane that learns less has more of it for that reason alone. The last number
takes this off, by an analysis of covariance of two lanes i, this one and BF16's of its seed and rate, over the steps t,

    entropy[i, t] = lane[i] + b1 · reward[i, t] + b2 · reward[i, t]²

with slopes that the two share; the number is lane[i] + b1 · r + b2 · r², r and r² being BF16's means. So it depends on
these two lanes and on no other that a store may have, and BF16's own is its mean entropy. A lane has none where BF16 of
its seed and rate has no records or diverged.

The recorded steps of a number are those at which all lanes of a setting recorded it (results/stats/recorded.py): beside
lanes of an older version, which recorded rewards, entropies and divergences at some thirty steps, those that recorded
them at every step count at these alone.
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fp4dse.results.stats.estimates.intervals import untied_interval
from fp4dse.results.stats.levels import are_shares
from fp4dse.results.stats.paired import SETTING, at_best_lr, by_seed, rows_at_best_lr, stacked
from fp4dse.results.stats.recorded import Series, at_common_steps, is_series, steps_of
from fp4dse.results.stats.stages import screened

RECORDED_READ = ("recorded", "recipe")
"""The columns of runs that are read beside those of other views."""
AVERAGED = ("reward", "entropy", "mismatch_kl", "ratios_clipped", "rerouted")
OF_RATIOS = "gradient_error"
"""The beginning of numbers whose means are geometric and whose differences are logarithms of ratios."""
UPDATES = 100
"""Steps that mismatch_kl_slope is for."""
LEAST_FREE = 3
"""Steps of two lanes beyond the unknowns, from which on entropies are held against rewards."""

COLUMNS = [*SETTING, "config_id", "label", "lr", "number", "seeds", "value", "low", "high"]
COLUMNS += ["pairs", "difference", "difference_low", "difference_high", "p"]


def rollout_numbers(runs: pd.DataFrame) -> pd.DataFrame:
    """Each number of a training that learns from its samples, a line per SETTING, recipe and number.

    At one learning rate, the best of most recipes; a recipe without it is at its own best, and its difference is to
    BF16 at that rate. Columns: SETTING, config_id, label, lr, number (accuracy, reward, entropy, entropy_at_reward,
    mismatch_kl, mismatch_kl_max, mismatch_kl_slope, ratios_clipped, rerouted, gradient_error, gradient_error/BLOCK: see
    the module), seeds, value (mean over seeds; geometric of gradient_error), low, high (95 %; NaN with one seed), pairs
    (seeds that BF16 has at that rate, too), difference (to BF16, seed by seed), difference_low, difference_high (95 %),
    p (of it against zero); NaN where all seeds tie, of however many. A difference of gradient_error would be ln of a
    ratio, which BF16, whose error is 0, is not part of: NaN. Recorded steps are those that all lanes of a setting have.
    No line where nothing was recorded of rollouts."""
    parts = []
    for keys, rows in recorded_rows(runs):
        shown = rows[at_one_rate(rows)]
        for number, values in lane_numbers(rows).items():
            recipes, matrix = by_seed(shown, values[shown.index])
            apart = differences(number, values.to_numpy(float), _of_bf16(rows, values).to_numpy(float))
            _, against = by_seed(shown, pd.Series(apart, rows.index)[shown.index])
            facts = shown.drop_duplicates("config_id").set_index("config_id").reindex(recipes)
            known = np.isfinite(matrix).any(axis=1)
            over, beside = over_seeds(number, matrix), untied_interval(against)
            line = pd.DataFrame({"config_id": recipes, "label": facts["recipe_label"].to_numpy(), "number": number})
            line = line.assign(lr=facts["lr"].to_numpy(float), seeds=over["n"], value=over["mean"])
            line = line.assign(low=over["low"], high=over["high"], pairs=beside["n"], difference=beside["mean"])
            line = line.assign(difference_low=beside["low"], difference_high=beside["high"], p=beside["p"])
            parts.append(line[known].assign(**keys))
    return stacked(parts, COLUMNS).sort_values([*SETTING, "number", "value"], ignore_index=True)


def over_seeds(number: str, values: NDArray[np.float64]) -> pd.DataFrame:
    """`untied_interval` of values [rows, seeds] of a number, of their logarithms where means are geometric; 0, without
    an interval, if a seed has 0."""
    if not number.startswith(OF_RATIOS):
        return untied_interval(values)
    shown = ["mean", "low", "high"]
    found = untied_interval(np.log(np.where(values > 0, values, np.nan)))
    with np.errstate(over="ignore"):  # of two seeds that lie hundreds of decades apart
        found[shown] = np.exp(found[shown])
    found.loc[(values == 0).any(axis=1), shown] = [0.0, np.nan, np.nan]
    return found.assign(n=np.isfinite(values).sum(axis=1))


def mean_of(number: str, values: NDArray[np.float64]) -> float:
    """The mean of all values, geometric as in `over_seeds`."""
    if not number.startswith(OF_RATIOS):
        return float(values.mean())
    return float(np.exp(np.log(values).mean())) if (values > 0).all() else 0.0


def differences(number: str, values: NDArray[np.float64], of: NDArray[np.float64]) -> NDArray[np.float64]:
    """values - of, elementwise; of a number whose means are geometric ln(values / of): 0 where both are 0, NaN where
    one is."""
    if not number.startswith(OF_RATIOS):
        return values - of
    with np.errstate(divide="ignore", invalid="ignore"):
        apart = np.log(values) - np.log(of)
    return np.where((values == 0) & (of == 0), 0.0, np.where(np.isfinite(apart), apart, np.nan))


def _of_bf16(rows: pd.DataFrame, values: pd.Series) -> pd.Series:
    """Each row's value of BF16 at its rate and seed, NaN where there is none; same index."""
    keys = pd.MultiIndex.from_frame(rows[["lr", "seed"]])
    base = rows["is_baseline"].to_numpy(bool)
    found = pd.Series(values.to_numpy(float)[base], keys[base])
    return pd.Series(found[~found.index.duplicated()].reindex(keys).to_numpy(), rows.index)


def recorded_rows(runs: pd.DataFrame) -> list[tuple[dict[str, object], pd.DataFrame]]:
    """Per SETTING, its values by name and its rows of which rollouts were recorded, at all rates, numbered anew; their
    column `recorded` is name -> float64 [steps] of what numbers are made of, at the steps that all lanes have, which
    stand under `step/NAME`."""
    if not set(RECORDED_READ) <= set(runs):
        return []
    there = runs[are_shares(runs) & runs["recorded"].notna()]
    series = [{name: np.array(values, float) for name, values in dict(of).items()} for of in there["recorded"]]
    there = there.assign(recorded=series)
    there = there[np.array(["reward" in of for of in series], bool)]
    if there.empty:
        return []
    out = []
    for keys, part in screened(there).groupby(list(SETTING), sort=False, observed=True):
        rows = pd.concat([rows_at_best_lr(of) for _, of in part.groupby("lr", sort=False)])
        rows = rows.loc[part.index].reset_index(drop=True)
        common = at_common_steps(list(rows["recorded"]), ~(rows["diverged"] | rows["pruned"]).astype(bool), _is_read)
        rows["recorded"] = pd.Series(common, rows.index, dtype=object)
        out.append((dict(zip(SETTING, keys, strict=True)), rows))
    return out


def _is_read(name: str) -> bool:
    return is_series(name) and (name in AVERAGED or name.startswith(OF_RATIOS))


def common_rate(rows: pd.DataFrame) -> float:
    """The rate that is the best of most recipes of a setting, the lower of two."""
    counts = _own_best(rows).value_counts()
    return float(counts.index[counts.eq(counts.max())].min())


def at_one_rate(rows: pd.DataFrame) -> pd.Series:
    """True for the rows of a setting at the common rate; of recipes that were not trained at it, for those at their
    best. Entropies, divergences and gradients follow from the rate before all else."""
    common = common_rate(rows)
    has_it = rows["lr"].eq(common).groupby(rows["config_id"]).transform("any")
    return rows["lr"].eq(rows["config_id"].map(_own_best(rows)).mask(has_it, common))


def _own_best(rows: pd.DataFrame) -> pd.Series:
    """config_id -> its best rate. rows: of one setting."""
    best = rows[at_best_lr(rows.assign(setting=0))]
    return best.drop_duplicates("config_id").set_index("config_id")["lr"]


def lane_numbers(rows: pd.DataFrame) -> dict[str, pd.Series]:
    """Number -> its value in each row, NaN where there is none. rows: of one SETTING, from `recorded_rows`."""
    lines = [_of_lane(of) for of in rows["recorded"]]
    found = pd.DataFrame(lines, index=rows.index)
    found.insert(0, "accuracy", 1 - rows["loss"])
    found["entropy_at_reward"] = np.nan
    plain = rows[rows["is_baseline"].astype(bool) & ~rows["diverged"]]
    bf16 = dict(zip(zip(plain["lr"], plain["seed"], strict=True), plain["recorded"], strict=True))
    for at, lr, seed, of in zip(rows.index, rows["lr"], rows["seed"], rows["recorded"], strict=True):
        if (lr, seed) in bf16:
            found.loc[at, "entropy_at_reward"] = at_equal_reward(of, bf16[lr, seed])
    found[rows["diverged"].to_numpy(bool)] = np.nan
    return {str(name): values for name, values in found.items()}


def _of_lane(of: Series) -> dict[str, float]:
    """The numbers of a lane that its own records suffice for."""
    out = {}
    for name, values in of.items():
        known = values[np.isfinite(values)]
        if name in AVERAGED and known.size:
            out[name] = float(known.mean())
        elif name.startswith(OF_RATIOS) and known.size:
            out[name] = float(np.exp(np.log(known[known > 0]).mean())) if (known > 0).any() else 0.0
    kl = of.get("mismatch_kl", np.array([]))
    known = np.isfinite(kl)
    if known.any():
        out["mismatch_kl_max"] = float(kl[known].max())
    if known.sum() > 2:
        steps = steps_of(of, "mismatch_kl")[known] / UPDATES
        away = steps - steps.mean()
        out["mismatch_kl_slope"] = float(away @ kl[known] / (away @ away))
    return out


def at_equal_reward(lane: Series, bf16: Series) -> float:
    """`entropy_at_reward` of a lane beside BF16's of its seed, from what was recorded of both; NaN where there are too
    few steps to tell the slopes."""
    (y, x), (y_bf16, x_bf16) = _entropies(lane), _entropies(bf16)
    if lane is bf16:
        return float(y.mean()) if len(y) else math.nan
    if not len(y) or not len(y_bf16) or len(y) + len(y_bf16) < 2 + x.shape[1] + LEAST_FREE:
        return math.nan
    away = np.concatenate([x - x.mean(axis=0), x_bf16 - x_bf16.mean(axis=0)])
    slopes, *_ = np.linalg.lstsq(away, np.concatenate([y - y.mean(), y_bf16 - y_bf16.mean()]), rcond=None)
    return float(y.mean() - (x.mean(axis=0) - x_bf16.mean(axis=0)) @ slopes)


def _entropies(of: Series) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Entropies [steps] and, at the same steps, rewards and their squares [steps, 2]."""
    if not {"entropy", "reward"} <= set(of):
        return np.array([]), np.empty((0, 2))
    _, of_y, of_r = np.intersect1d(steps_of(of, "entropy"), steps_of(of, "reward"), return_indices=True)
    y, r = of["entropy"][of_y], of["reward"][of_r]
    known = np.isfinite(y) & np.isfinite(r)
    return y[known], np.stack([r[known], r[known] ** 2], axis=1)


def nothing_recorded(runs: pd.DataFrame, store: str) -> str:
    """Empty where rollouts were recorded, else what is missing and the command that trains it. runs: with
    RECORDED_READ; store: as --store names it."""
    if recorded_rows(runs):
        return ""
    sweep = f"fp4dse sweep rl --task rl:smoke --seeds 3 --record --store {store}"
    return f"no row has records of rollouts; `{sweep}` trains some"
