"""The recipe to use in each setting, and all else that the verdict on it says (verdict.py), from frames of statistics.

The recipe is the first in the order of ranked.py. Where candidates were confirmed on fresh seeds (confirmed.py), their
answer goes before the screened one.
"""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from fp4dse.dse.cost import BAND
from fp4dse.results.stats.factors import VariedBySetting, varied_by
from fp4dse.results.stats.learning_rates import learning_rates
from fp4dse.results.stats.levels import POINTS, are_shares
from fp4dse.results.stats.paired import MARGINS, OVERHEAD, SETTING, plain_ids, rows_at_best_lr, stacked
from fp4dse.results.stats.preset_warnings import preset_warnings
from fp4dse.results.stats.recipes.confirmed import COLUMNS as CONFIRMED_COLUMNS
from fp4dse.results.stats.recipes.confirmed import confirmed
from fp4dse.results.stats.recipes.equal_time import Time, time_to_quality
from fp4dse.results.stats.recipes.front_chance import chance_of
from fp4dse.results.stats.recipes.margins import Margin
from fp4dse.results.stats.recipes.ranked import CHANCE, Ranked, settings_of, versus_first, with_chance
from fp4dse.results.stats.recipes.rate_choice import Rates, rates_of
from fp4dse.results.stats.recipes.summary import SUMMARIZED, summarize
from fp4dse.results.stats.recipes.verdict import Against, Confirmed, Verdict
from fp4dse.results.stats.stages import fresh
from fp4dse.results.text.ratios import change, counted

VERDICTS_READ = [*SUMMARIZED, *MARGINS, "trains"]
"""The columns that verdicts are from."""

NO_RECIPE = pd.Series(
    {"config_id": None, "label": "", "name": None, "pairs": 0}
    | dict.fromkeys(["gap", "gap_low", "gap_high", *CHANCE, OVERHEAD, *BAND], math.nan)
)
"""In place of a line of `with_chance` where no recipe quantizes and has a gap."""


def verdicts(runs: pd.DataFrame) -> list[Verdict]:
    """One for each setting of some runs, in the order of `summarize`. runs: VERDICTS_READ at least."""
    rows = rows_at_best_lr(runs)
    recipes = summarize(rows)
    varied = varied_by(rows)
    recipes = with_chance(recipes, chance_of(rows, recipes, varied=varied))
    return verdicts_from(rows, recipes, learning_rates(runs), confirmed_if_any(runs), varied)


def confirmed_if_any(runs: pd.DataFrame) -> pd.DataFrame:
    """The lines of `confirmed`; none where no row is of the confirm stage, so that screening pays for no candidates."""
    return confirmed(runs) if len(fresh(runs)) else stacked([], CONFIRMED_COLUMNS)


def verdicts_from(
    rows: pd.DataFrame,
    recipes: pd.DataFrame,
    rates: pd.DataFrame,
    new: pd.DataFrame,
    varied: VariedBySetting | None = None,
) -> list[Verdict]:
    """The verdicts from frames that are at hand, in the order of `recipes`.

    rows: of `rows_at_best_lr`; recipes: of `with_chance`; rates: of `learning_rates`; new: of `confirmed_if_any`;
    varied: of `varied_by`, if it is at hand.
    """
    each = settings_of(rows, recipes)
    versus = versus_first(rows, each, varied)
    frames = (versus, rates, new)
    parts = [dict(iter(frame.groupby(list(SETTING), sort=False, observed=True))) for frame in frames]
    found = []
    for setting, one in each.items():
        others, of_rates, of_new = (
            part.get(setting, frame.iloc[:0]) for part, frame in zip(parts, frames, strict=True)
        )
        screened = _verdict(setting, one, others, of_rates)
        on_fresh = _confirmed(of_new, screened.margin)
        first = on_fresh or screened
        line = one.lines[one.lines["config_id"].eq(first.config_id)]
        says = screened.warnings
        if len(line):
            says = (*_of_the_recipe(line.iloc[0], first.time, plain_ids(one.lines)), *says)
        found.append(screened._replace(confirmed=on_fresh, warnings=says))
    return found


def _confirmed(lines: pd.DataFrame, margin: Margin) -> Confirmed | None:
    """The answer of the lines of `confirmed` of one setting."""
    if not lines["recommended"].any():
        return None
    pick = lines[lines["recommended"].astype(bool)].iloc[0]
    finished = lines["choice"].notna()
    gap = {"gap": float(pick["estimate"]), "gap_low": float(pick["low"]), "gap_high": float(pick["high"])}
    return Confirmed(
        config_id=pick["config_id"],
        label=pick["label"],
        **gap,
        chosen_on=int(pick["chosen_on"]),
        estimated_on=int(pick["estimated_on"]),
        bf16=_against_bf16(gap, int(pick["estimated_on"]), margin),
        margin=margin,
        overhead=float(pick[OVERHEAD]),
        time=time_to_quality(**gap, overhead=float(pick[OVERHEAD]), margin=margin),
        by_time=pick["ranked_by"] == "time",
        finished=int(finished.sum()),
        diverged=int((~finished & lines["diverged"].gt(0)).sum()),
        missing=int((~finished & ~lines["diverged"].gt(0)).sum()),
        open=int(lines["verdict"].isin(["open", "same"]).sum()),
    )


def _verdict(setting: tuple[Any, ...], of: Ranked, versus: pd.DataFrame, rates: pd.DataFrame) -> Verdict:
    """versus: the lines of `versus_first`; rates: of `learning_rates`."""
    tried, ranked, margin = of.tried, of.ranked, of.margin
    others = versus[versus["config_id"].isin(tried["config_id"])]
    open_ = others[others["verdict"].eq("open")].sort_values("difference")
    pick = ranked.iloc[0] if len(ranked) else NO_RECIPE
    diverged = int(tried["note"].eq("diverged").sum())
    chosen = rates_of(rates, pick["config_id"])
    mine = of.rows[of.rows["config_id"].eq(pick["config_id"])]
    gap = _expected(pick)
    bf16 = _against_bf16(gap, int(pick["pairs"]), margin)
    overhead = math.nan if pd.isna(pick[OVERHEAD]) else float(pick[OVERHEAD])
    time = time_to_quality(**gap, overhead=overhead, margin=margin)
    priced = mine["overhead_of"].dropna() if "overhead_of" in mine else pd.Series(dtype=object)
    return Verdict(
        setting=setting,
        config_id=pick["config_id"],
        label=pick["label"],
        name=pick["name"] if isinstance(pick["name"], str) else None,
        gap=gap["gap"],
        gap_low=gap["gap_low"],
        gap_high=gap["gap_high"],
        pairs=int(pick["pairs"]),
        bf16=bf16,
        p_front=float(pick["p_front"]),
        overhead=overhead,
        band=tuple(float(pick[name]) for name in BAND if pd.notna(pick[name])),
        axis=OVERHEAD,
        overhead_of=str(priced.iloc[-1]) if len(priced) else None,
        time=time,
        by_time=not math.isnan(of.slope),
        slower=of.slower(),
        as_good=int(others["verdict"].eq("same").sum()),
        open=len(open_),
        more_seeds=float(open_["more_seeds"].iloc[0]) if len(open_) else math.nan,
        tried=len(tried),
        diverged=diverged,
        margin=margin,
        rates=chosen,
        unit=POINTS if are_shares(of.lines).any() else None,
        is_expected=math.isfinite(pick["expected_low"]),
        none="" if len(ranked) else _why_none(of.lines, tried, diverged),
        warnings=(
            *_warnings(len(ranked) > 0, bf16, diverged, len(tried), chosen),
            *(preset_warnings(setting) if len(ranked) else ()),
        ),
    )


def _expected(pick: pd.Series) -> dict[str, float]:
    """gap, gap_low and gap_high of a verdict: what is expected, or the recipe's own where it does not compete."""
    names = {"gap": "expected", "gap_low": "expected_low", "gap_high": "expected_high"}
    known = math.isfinite(pick["expected"])
    return {name: float(pick[of if known else name]) for name, of in names.items()}


def _against_bf16(gap: dict[str, float], pairs: int, margin: Margin) -> Against:
    if pairs < 2 or math.isnan(gap["gap_low"]):
        return "unknown" if pairs < 2 else "tied"
    if gap["gap_low"] > -margin.value and gap["gap_high"] < margin.value:
        return "same"
    return "worse" if gap["gap_low"] > 0 else "better" if gap["gap_high"] < 0 else "open"


def _why_none(lines: pd.DataFrame, tried: pd.DataFrame, diverged: int) -> str:
    if tried.empty:
        return "only BF16 was trained here"
    if not lines.loc[lines["is_baseline"], "seeds"].gt(0).any():
        return "no BF16 baseline finished, so no recipe has a gap"
    if diverged == len(tried):
        return f"every recipe diverged ({diverged} of {len(tried)}): nothing here trains to the end"
    return "no recipe that quantizes has a gap"


def _of_the_recipe(line: pd.Series, time: Time, plain: set[str]) -> tuple[str, ...]:
    """Sentences on the recipe that is named first. line: of `summarize`; time: to BF16's loss, of its answer."""
    return (*_two_evaluations(line), *_trains_otherwise(line, plain), *_takes_longer(time))


def _two_evaluations(pick: pd.Series) -> tuple[str, ...]:
    """A sentence where the recipe is on the other side of BF16 once both are evaluated in BF16, by more than chance
    each time."""
    sides = [_side(pick[f"{gap}_low"], pick[f"{gap}_high"]) for gap in ("gap", "gap_bf16")]
    if set(sides) != {"better", "worse"}:
        return ()
    used, kept = sides
    return (
        f"it is {used} than BF16 when it is used in FP4, and {kept} when its weights are used in BF16, both by more "
        "than chance",
    )


def _trains_otherwise(pick: pd.Series, plain: set[str]) -> tuple[str, ...]:
    """A sentence where the recipe brings an optimizer, a clip or a schedule, which BF16 can have as well."""
    of = pick["baseline_id"]
    if pd.isna(of) or of in plain or not math.isfinite(pick["gap_matched"]):
        return ()
    return (
        "it changes the optimizer, the clip or the schedule as well: against BF16 with that its gap is "
        f"{change(pick['gap_matched'])}",
    )


def _takes_longer(time: Time) -> tuple[str, ...]:
    """A sentence where the best recipe needs more time than BF16."""
    if not time.mean >= 1:
        return ()
    return ("no recipe that saves time in a step is expected to reach BF16's loss in less time than BF16",)


def _side(low: float, high: float) -> Against:
    """Of a gap's interval, NaN where there is none."""
    return "worse" if low > 0 else "better" if high < 0 else "open"


def _warnings(has_recipe: bool, bf16: Against, diverged: int, tried: int, rates: Rates) -> tuple[str, ...]:
    says = []
    if bf16 == "unknown" and has_recipe:
        says.append("one seed: no difference can be told from chance; --seeds takes more")
    says += rates.warnings() if tried else ()
    if has_recipe and diverged:
        says.append(f"{diverged} of {counted(tried, 'recipe')} diverged")
    return tuple(says)
