"""Paired tests of two recipes: different, the same, or undecided, and how many more seeds would decide.

All differences are paired: d = log(loss a / loss b) on each seed that both finished; of gaps where the two have
different baselines (paired.py), but for `compare`, which is about the losses themselves. Two questions are asked of
them, and "no significant difference" answers neither:

    different?   the 95 % interval of mean d leaves out zero: that of intervals.py, whose p is of the same rule
    the same?    the 90 % interval of mean d lies within ±margin: two one-sided t-tests at 5 % (TOST, Schuirmann 1987)

A difference may be real and yet within the margin; the verdict then is `same`, and p tells the rest. What is neither is
`open`. This is of one pair. Where many are judged at once (`against`, simultaneous.py), either verdict goes by one
interval that holds for all of them: with 5 % for each line, one study in three of fifty recipes that are just beyond
the margin would call one of them the same. Seeds that would decide: the fewest with which one of the two tests is
passed with a chance of 80 %, over what mean and standard deviation may be after all (promised.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import stdtr

from fp4dse.dse import ConfigError
from fp4dse.results.stats.estimates.intervals import BOOTSTRAP_FROM, CONFIDENCE, holm, mean_interval, paired_interval
from fp4dse.results.stats.estimates.promised import Prospect, more_pairs
from fp4dse.results.stats.estimates.simultaneous import fixed, lowest, table, versus
from fp4dse.results.stats.factors import VariedBySetting
from fp4dse.results.stats.levels import POINTS, are_shares, levels
from fp4dse.results.stats.paired import OVERHEAD, SETTING, bf16_cost, by_seed, rows_at_best_lr, setting_of, stacked
from fp4dse.results.stats.recipes.front_chance import codes_of
from fp4dse.results.stats.recipes.margins import MARGIN, margin_of, margin_text
from fp4dse.results.stats.recipes.pareto import worth_naming
from fp4dse.results.stats.recipes.together import drawn_beside, pair_among, together
from fp4dse.results.text.ratios import change, change_range, counted, in_points, noun, written_in


def against(
    runs: pd.DataFrame,
    reference: str | Mapping[tuple[Any, ...], str] | None = None,
    margin: float | None = None,
    varied: VariedBySetting | None = None,
) -> pd.DataFrame:
    """Every recipe against one: a config_id, or values of SETTING -> one that these rows chose; by default, per
    SETTING, the quantizing recipe of the lowest gap, of those that save time against BF16 if any does.

    Columns: SETTING, config_id, label, reference (config_id), pairs, difference (of mean gaps, which is the mean log
    loss ratio where both have one baseline; below 0 where the recipe is better), low, high (95 %, of all recipes at
    once), p, p_holm (adjusted for all recipes of the setting), p_same (of TOST, of this line alone), margin (a log
    ratio: the given one, or the setting's, see margins.py), verdict (of all at once: `lower`, `higher`, `same` within
    the margin, `open`, `diverged`, `pruned`), more_seeds (whole number, NaN where decided or with fewer than two pairs,
    inf where 10,000 would not do). BF16 has a line; the reference has none. varied: of `varied_by`, if it is at hand.
    ConfigError if the store holds no runs of `reference`, or if the margin is not positive."""
    given = reference if isinstance(reference, str) else None
    _check(runs, given, margin)
    rows = rows_at_best_lr(runs)
    parts = []
    for _, part in rows.groupby("setting", sort=False):
        recipes, log = by_seed(part, pd.Series(levels(part["loss"], are_shares(part)), part.index))
        facts = part.groupby("config_id", sort=False)
        diverged = facts["diverged"].any().reindex(recipes).to_numpy()
        pruned = facts["pruned"].any().reindex(recipes).to_numpy(bool)
        quantizes = facts["points"].first().reindex(recipes).gt(0).to_numpy()
        finished = quantizes & ~diverged
        overhead = facts[OVERHEAD].first().reindex(recipes) if OVERHEAD in part else np.full(len(recipes), np.nan)
        seeds = np.where(finished, np.isfinite(log).sum(axis=1), 0)
        finished &= worth_naming(np.where(finished, overhead, np.inf), seeds, bf16_cost(part))
        eligible = finished & ~pruned
        chosen = given
        if isinstance(reference, Mapping):
            chosen = reference.get(setting_of(part))
        elif given is None:
            _, gaps = by_seed(part, part["gap"])
            chosen = _lowest(recipes, gaps if np.isfinite(gaps).any() else log, finished)
        if chosen is None or chosen not in recipes:
            continue
        row, within = recipes.get_loc(chosen), margin_of(part, margin).value
        line = versus_one(recipes, log, row, eligible & (given is None), codes_of(part, varied), within)
        line = line.assign(config_id=recipes, label=facts["recipe_label"].first().reindex(recipes).to_numpy())
        line = line.assign(reference=chosen, **{name: part[name].iloc[0] for name in SETTING})
        line = open_ties(line) if are_shares(part).any() else line
        line = without_claims(line, pruned | pruned[row], "pruned")
        line = without_claims(line, diverged | diverged[row])
        line = line.drop(index=row)
        parts.append(line.assign(p_holm=holm(line["p"])))
    columns = [*SETTING, "config_id", "label", "reference", "pairs", "difference", "low", "high"]
    columns += ["p", "p_holm", "p_same", "margin", "verdict", "more_seeds"]
    return stacked(parts, columns).sort_values([*SETTING, "difference"], ignore_index=True)


def versus_one(
    recipes: pd.Index,
    log: NDArray[np.float64],
    row: int,
    chosen: NDArray[np.bool_],
    knobs: pd.DataFrame,
    margin: float,
    asked: NDArray[np.bool_] | None = None,
) -> pd.DataFrame:
    """`table` of simultaneous.py for all recipes. log: [recipes, seeds]; row: of the reference; chosen: [recipes],
    those whose lowest it is, none if it is not; knobs: of `codes_of`; asked: [recipes], those that are told at once,
    None for all."""
    out = differences(log - log[row], margin)
    if not np.isfinite(log[row]).any() or np.isfinite(log).any(axis=1).sum() < 2:
        return out.drop(columns="std").assign(more_seeds=np.nan)
    found = together(recipes, log)
    known, first, which, distinct, spread = found
    one = found.row_of(row)
    truth = drawn_beside(spread, distinct, knobs.reindex(recipes[known[first]]))
    of = np.bincount(which, chosen[known]) > 0
    told = None if asked is None else np.bincount(which, asked[known]) > 0
    rows = np.full(len(distinct), one)
    whole = versus(distinct, rows, spread, truth, lowest(of) if of.any() else fixed(one), told)
    lines = table(whole.taken(which), margin).set_axis(known, axis="index")
    lines["pairs"] = np.isfinite(log[known] - log[row]).sum(axis=1)
    return out.assign(**lines.reindex(out.index)).drop(columns="std")


def differences(d: NDArray[np.float64], margin: float = MARGIN, shares: bool = False) -> pd.DataFrame:
    """Per row of paired differences d [rows, seeds]: pairs, difference, std, low, high, p, p_same, margin, verdict.

    verdict is `lower`, `higher`, `same` or `open`; see `against`. Losses that are equal on every seed are the same
    computation. shares: they are of counts, below 30 of which tie by chance, so that such lines are open, without an
    interval.
    """
    found = paired_interval(d, shares)
    out = pd.DataFrame({"pairs": found["n"], "difference": found["mean"], "std": found["std"]})
    out[["low", "high", "p"]] = found[["low", "high", "p"]]
    out["margin"] = margin
    n = found["n"].where(found["n"].gt(1)).astype(float)
    error = found["std"] / np.sqrt(n)
    room = margin - found["mean"].abs()
    with np.errstate(divide="ignore", invalid="ignore"):
        out["p_same"] = stdtr(n - 1, -(room / error).mask(error.eq(0), np.sign(room) * np.inf))
    out["p_same"] = out["p_same"].where(out["p"].notna())
    out["verdict"] = np.select(
        [out["p_same"].lt(1 - CONFIDENCE), out["low"].gt(0), out["high"].lt(0)], ["same", "higher", "lower"], "open"
    )
    return out


def open_ties(line: pd.DataFrame) -> pd.DataFrame:
    """Lines of shares without claims where fewer than 30 seeds tie, as counts do by chance. line: of `differences`."""
    tied = line["low"].eq(0) & line["high"].eq(0) & line["pairs"].lt(BOOTSTRAP_FROM)
    claims = ["low", "high", "p", "p_same", "more_seeds"]
    return line.assign(verdict=line["verdict"].mask(tied, "open"), **{name: line[name].mask(tied) for name in claims})


def without_claims(line: pd.DataFrame, excluded: NDArray[np.bool_], verdict: str = "diverged") -> pd.DataFrame:
    """The lines without numbers where one side diverged on a seed, or was dropped at a rung. line: of `differences`."""
    if not excluded.any():
        return line
    claims = ["difference", "low", "high", "p", "p_same", "more_seeds"]
    line.loc[excluded, claims] = np.nan
    return line.assign(verdict=line["verdict"].mask(excluded, verdict))


def promised(line: pd.DataFrame, prospect: Callable[[int, float, float], Prospect]) -> pd.DataFrame:
    """The lines with more_seeds (see `compare`): NaN where decided or without an interval. line: of `differences`;
    prospect: what pairs of this number, mean and standard deviation may be after all."""
    asked = (line["verdict"].eq("open") & line["p"].notna() & line["std"].gt(0)).to_numpy()
    more = np.full(len(line), np.nan)
    numbers = line[["pairs", "difference", "std", "margin"]].to_numpy(float)
    for row in np.flatnonzero(asked):  # one at a time: hundreds of nodes by a hundred numbers of seeds each
        pairs, mean, std, margin = numbers[[row]].T
        more[row] = more_pairs(prospect(int(pairs[0]), mean[0], std[0]), std, float(margin[0]))[0]
    return line.assign(more_seeds=more)


def compare(runs: pd.DataFrame, a: str, b: str, margin: float | None = None) -> pd.DataFrame:
    """The paired difference log(loss a / loss b) between two config_ids, one line per SETTING that has both. runs: of
    other recipes, too, which say how many seeds would decide (together.py).

    Columns: SETTING, label_a, label_b, lr_a, lr_b, pairs, diverged_a, diverged_b, difference, low, high, p, p_same,
    margin, margin_of (what it is from: `given`, or see margins.py), more_seeds (whole number, NaN where decided or with
    fewer than two pairs, inf where 10,000 would not do: with so many more a verdict is reached in 80 % of cases, over
    what mean and spread may be after all), verdict (a plain sentence). ConfigError if an id has no rows, or no SETTING
    has both.
    """
    for config_id in (a, b):
        _check(runs, config_id, margin)
    rows = rows_at_best_lr(runs[runs["config_id"].isin([a, b])])
    rows = rows.assign(log=levels(rows["loss"], are_shares(rows)))
    sides = [rows[rows["config_id"].eq(config_id)] for config_id in (a, b)]
    lines = []
    for setting in [s for s in sides[0]["setting"].unique() if s in set(sides[1]["setting"])]:
        left, right = (side[side["setting"].eq(setting)].set_index("seed") for side in sides)
        d = (left["log"] - right["log"]).dropna().to_numpy(float)
        line = {name: left[name].iloc[0] for name in SETTING}
        line |= {"label_a": left["recipe_label"].iloc[0], "label_b": right["recipe_label"].iloc[0]}
        line |= {"lr_a": left["lr"].iloc[0], "lr_b": right["lr"].iloc[0]}
        line |= {"diverged_a": int(left["diverged"].sum()), "diverged_b": int(right["diverged"].sum())}
        within, shares = margin_of(left, margin), bool(are_shares(left).any())
        prospect = partial(_among_all, runs, [line[name] for name in SETTING], a, b)
        found = differences(d[None, :], within.value, shares)
        if line["diverged_a"] or line["diverged_b"]:
            found = found.assign(verdict="diverged")
        line |= {"margin_of": within.of, **promised(found, prospect).iloc[0].to_dict()}
        with written_in(POINTS if shares else None):
            lines.append({**line, "verdict": _sentence(line) + _rates(line)})
    if not lines:
        raise ConfigError("compare", f"{a}, {b}", "two recipes that were run on the same task, device and software")
    columns = [*SETTING, "label_a", "label_b", "lr_a", "lr_b", "pairs", "diverged_a", "diverged_b", "difference"]
    return pd.DataFrame(lines)[[*columns, "low", "high", "p", "p_same", "margin", "margin_of", "more_seeds", "verdict"]]


def _among_all(runs: pd.DataFrame, setting: Sequence[Any], a: str, b: str, *of_pairs: Any) -> Prospect:
    """`pair_among` the recipes of a setting, hundreds of them. setting: its values of SETTING."""
    return pair_among(rows_at_best_lr(runs[runs[list(SETTING)].eq(setting).all(axis=1)]), a, b, *of_pairs)


def _check(runs: pd.DataFrame, config_id: str | None, margin: float | None) -> None:
    if config_id is not None and not runs["config_id"].eq(config_id).any():
        raise ConfigError("compare", config_id, "a recipe that the store holds runs of")
    if margin is not None and not margin > 0:
        raise ConfigError("margin", margin, "a log ratio above 0, such as 0.005 for half a percent")


def _lowest(recipes: pd.Index, values: NDArray[np.float64], eligible: NDArray[np.bool_]) -> str | None:
    found = mean_interval(values)["mean"].where(eligible)
    return None if found.isna().all() else recipes[found.argmin()]


def _rates(line: dict[str, Any]) -> str:
    """A sentence on two recipes that are compared at different rates, else nothing."""
    if line["lr_a"] == line["lr_b"]:
        return ""
    of = [f"{_quoted(line[f'label_{side}'])} {line[f'lr_{side}']:g}" for side in "ab"]
    return f" Each is at a rate of its own: {', '.join(of)} (--lr takes one for both)."


def _sentence(line: dict[str, Any]) -> str:
    where, a, b = f"{line['task']} ({line['preset']})", *(_quoted(line[f"label_{side}"]) for side in "ab")
    if line["verdict"] == "diverged":
        diverged = [
            f"{name} diverged on {n}" for s, name in zip("ab", (a, b), strict=True) if (n := line[f"diverged_{s}"])
        ]
        return f"{where}: {' and '.join(diverged)} of the seeds; a mean difference would say nothing."
    if line["pairs"] < 2:
        return f"{where}: {_pairs(line)}; at least 2 are needed to tell."
    margin = margin_text(line["margin"])
    if line["verdict"] == "same":
        return f"{where}: {a} and {b} are the same within {margin}: {_undecided_size(line)}."
    if line["verdict"] == "open" and np.isnan(line["p"]):
        by = change(line["difference"])
        return (
            f"{where}: {a} and {b} are not told apart: the {noun()} of the first is at {by} on each of {_pairs(line)}, \
which tells nothing of the spread."
        )
    if line["verdict"] == "open":
        return (
            f"{where}: {a} and {b} are not told apart: {_undecided_size(line)}; {_advice(line['more_seeds'], margin)}."
        )
    if line["verdict"] == "lower":
        return f"{where}: {a} has {_better()} than {b}: {_size(line)}."
    other_way = {"difference": -line["difference"], "low": -line["high"], "high": -line["low"]}
    return f"{where}: {b} has {_better()} than {a}: {_size({**line, **other_way})}."


def _better() -> str:
    return "a higher accuracy" if in_points() else "a lower loss"


def _undecided_size(line: dict[str, Any]) -> str:
    """The loss of the first of two recipes that the seeds do not tell apart, against the second's."""
    if line["low"] == line["high"] == 0:
        return f"equal {noun(many=True)} on {_pairs(line)}"
    return f"the {noun()} of the first is at {_size(line)}"


def _size(line: dict[str, Any]) -> str:
    """`-46.0 % (95 % interval -47.8 to -44.1 % and p < 0.001, by the t-test of 3 paired seeds)`."""
    bounds = change_range(line["difference"], line["low"], line["high"])
    p = "p < 0.001" if line["p"] < 0.001 else f"p = {line['p']:.2g}"
    size = change(line["difference"])
    rule = "bootstrap" if line["pairs"] >= BOOTSTRAP_FROM else "t-test"
    return f"{size} (95 % interval {bounds} and {p}, by the {rule} of {_pairs(line)})"


def _pairs(line: dict[str, Any]) -> str:
    return counted(int(line["pairs"]), "paired seed")


def _advice(more: float, margin: str) -> str:
    if not np.isfinite(more):
        return f"no number of seeds in reach would tell, nor show that they are the same within {margin}"
    return f"{counted(int(more), 'more seed')} would tell, or show that they are the same within {margin}"


def _quoted(label: str) -> str:
    """A label with commas in quotes, as a shell takes it."""
    return f'"{label}"' if ", " in label else label
