"""The share that fine-tuning gives back of what rounding to nearest loses, with intervals.

    recovered = (PTQ - tuned) / (PTQ - BF16)

PTQ is a recipe with the same forward operands that trains nothing (`training.trains = "none"`), of the same seed; BF16
is its own weights without quantizers, which is the base (`val_loss_bf16`), or BF16 that was trained on as long. The two
differ: a base that still learns gives labels something that no rounding took.

**All three begin with the same weights**, those of the row's setting: the task's own base, or what `--from` gave. From
weights that were fitted to their quantizers (`weights fit`) PTQ is these, rounded, and not the base rounded to nearest;
so what fitting gave back is in no share here, and `lost` is what these weights still lose (next to nothing, for
weights alone on their grid). Starts are different settings and never stand in one line.

Numerator and denominator are means over the same seeds, and neither is known: the interval of their ratio is Fieller's
(1954). It is unbounded where the denominator's own interval has zero in it, where nothing was lost for sure. Where
the mean of the denominator is zero or below there is nothing to have a share of, and so no share.

**With one start for all seeds (`--from`) the denominator of `of_base` is one number**, where the forward pass draws
nothing: the same weights, rounded, on the same held-out texts, seed by seed. It has no spread then, and Fieller's
interval is that of the mean given back, in its units, bounded however little was lost. It says what another order of
data would give back of this loss, of these weights on these texts, and nothing of other weights or other texts. Whether
`lost` is more than chance among texts, no number of seeds can tell.
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fp4dse.results.stats.estimates.intervals import CONFIDENCE, TIED, same_computation
from fp4dse.results.stats.levels import are_shares
from fp4dse.results.stats.paired import SETTING, numbered, rows_at_best_lr, stacked

OPERANDS = tuple(
    f"fprop_{operand}_{field}"
    for operand in "xw"
    for field in ("element", "block", "scale", "tensor_scale", "range", "adapt", "scaling", "arithmetic")
)
"""The columns by which a recipe and its PTQ have the same forward operands; roundings and treatments may differ."""
FORWARD = (*OPERANDS, "fprop_rotation", "precise", "layers")
LEARNED = "pact|lsq|learned-clip|factors|lora|scales"
"""Treatments that are parameters: before training, rounding to nearest."""
TRAINS, OUTLIERS = "trains", ("fprop_x_outliers", "fprop_w_outliers")
START = ("start_digest", "start_method")
BASE = "the base"
"""The start of lanes without `--from`."""
RECOVERED_READ = [*FORWARD, TRAINS, *OUTLIERS, *START, "recipe_label", "val_loss", "val_loss_bf16", "overhead"]
"""The columns beside those of `rows_at_best_lr`."""

_OF = ("of_base", "of_bf16")
COLUMNS = [*SETTING, "start", "config_id", "label", "lr", "pairs", "loss", "ptq", "ptq_label", "lost", "overhead"]
COLUMNS += [f"{name}{end}" for name in _OF for end in ("", "_low", "_high")]


def recovered(runs: pd.DataFrame) -> pd.DataFrame:
    """Each recipe that trains beside the one that rounds the same weights and trains nothing.

    One line per SETTING and quantizing recipe for which there is such a one, the largest share first, at its best
    learning rate. Columns: SETTING, start (the weights that both, and BF16, begin with: `the base`; of `--from` by what
    they were fitted to quantizers, `gptq` say, or else `weights` and their digest), config_id, label, lr, pairs (seeds
    that both have), loss (mean), ptq (mean loss of the other), ptq_label (with the start before it, where that is not
    the base: `gptq: nvfp4, untrained`), lost (its mean loss less that of its weights in BF16: from fitted weights what
    these still lose, and not what rounding the base to nearest does), overhead, of_base (the share of `lost`
    that is given back), of_base_low, of_base_high (95 %), of_bf16 and its interval (the share of the distance to BF16
    that was trained on as long). A share and its interval are NaN where its own denominator, `lost` or that distance,
    is zero or below. Intervals are NaN with one seed; they have infinite ends where the denominator may be zero. With
    one start for all seeds `lost` is the same for each: intervals of of_base are then over orders of data alone."""
    rows = rows_at_best_lr(runs)
    rows = rows[np.isfinite(rows["loss"])]
    parts = []
    for _, part in rows.groupby("setting", sort=False):
        part = part.assign(forward=_forward(part))
        untrained = part[TRAINS].eq("none") & part["fprop_w_element"].ne("bf16")
        ptq = part[untrained].drop_duplicates(["forward", "seed"]).set_index(["forward", "seed"])
        for config_id, own in part[~part[TRAINS].eq("none")].groupby("config_id", sort=False):
            key = pd.MultiIndex.from_frame(own[["forward", "seed"]])
            there = key.isin(ptq.index)
            if there.any():
                parts.append(_line(str(config_id), own[there], ptq.loc[key[there]]))
    found = stacked(parts, COLUMNS)
    return found.sort_values([*SETTING, "of_base"], ascending=[True] * len(SETTING) + [False], ignore_index=True)


def recovered_if_any(runs: pd.DataFrame) -> pd.DataFrame:
    """The lines of `recovered`; none, at once, where nothing is rounded without training."""
    return recovered(runs) if TRAINS in runs and runs[TRAINS].eq("none").any() else stacked([], COLUMNS)


def _forward(part: pd.DataFrame) -> pd.Series:
    """A number for the forward operands of each row before anything is learned."""
    words = {name: part[name].astype("string").fillna("none") for name in OUTLIERS}
    treated = {name: of.where(~of.str.match(LEARNED), "none") for name, of in words.items()}
    return numbered(part.assign(**treated), [*FORWARD, *OUTLIERS], sort=False, dropna=False)


def _line(config_id: str, own: pd.DataFrame, ptq: pd.DataFrame) -> pd.DataFrame:
    first, other = own.iloc[0], ptq.iloc[0]
    given = ptq["val_loss"].to_numpy(float) - own["val_loss"].to_numpy(float)
    lost = (ptq["val_loss"] - ptq["val_loss_bf16"]).to_numpy(float)
    from_bf16 = ptq["val_loss"].to_numpy(float) - own["baseline_loss"].to_numpy(float)
    line: dict[str, object] = {name: first[name] for name in SETTING}
    start = start_name(first.get("start_digest"), first.get("start_method"))
    ptq_label = other["recipe_label"] if start == BASE else f"{start}: {other['recipe_label']}"
    line |= {
        "start": start,
        "config_id": config_id,
        "label": first["recipe_label"],
        "lr": first["lr"],
        "pairs": len(own),
    }
    line |= {"loss": own["val_loss"].mean(), "ptq": ptq["val_loss"].mean(), "ptq_label": ptq_label}
    line |= {"lost": lost.mean(), "overhead": first["overhead"]}
    shares = bool(are_shares(own).any())
    for name, of in zip(_OF, (lost, from_bf16), strict=True):
        line |= dict(zip((name, f"{name}_low", f"{name}_high"), ratio(given, of, shares), strict=True))
    return pd.DataFrame([line])


def start_name(digest: object, method: object) -> str:
    """The weights that lanes begin with, from the columns of START of a row: None or missing where there is nothing."""
    if not isinstance(digest, str):
        return BASE
    return f"{method if isinstance(method, str) else 'weights'} {digest[:8]}"


def ratio(above: NDArray[np.float64], below: NDArray[np.float64], shares: bool = False) -> tuple[float, float, float]:
    """mean(above) / mean(below) of pairs, and Fieller's 95 % interval: the r for which the mean of above - r · below is
    not distinguishable from zero. All are NaN where mean(below) is not positive. Ends are infinite where these r are no
    interval; NaN with one pair, and where the pairs tie, so that nothing is known of their spread. Where `above` is 0
    on every seed, or equal to `below`, nothing was given back or all of it, by the same computation: there the ends
    are the ratio. shares: of counts, which tie by chance."""
    n, a, b = len(above), float(np.mean(above)), float(np.mean(below))
    if not 0 < b < math.inf:
        return math.nan, math.nan, math.nan
    found = a / b
    if n < 2 or not math.isfinite(found):
        return found, math.nan, math.nan
    same = bool(same_computation(np.stack([above, np.subtract(above, below)]), shares).any())
    if not same and np.std(above - found * below) <= TIED * max(abs(a), abs(b)):
        return found, math.nan, math.nan
    from scipy.special import stdtrit

    t = float(stdtrit(n - 1, 0.5 + CONFIDENCE / 2))
    (aa, ab), (_, bb) = np.cov(above, below) / n * t**2
    # (a - r b)² = t² var(above - r below) / n, a quadratic in r
    square, middle, constant = b**2 - bb, a * b - ab, a**2 - aa
    root = middle**2 - square * constant
    if square <= 0 or (root < 0 and not same):
        return found, -math.inf, math.inf
    if same:
        return found, found, found
    return found, (middle - math.sqrt(root)) / square, (middle + math.sqrt(root)) / square
