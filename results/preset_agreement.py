"""Writes dse/agreement.json: `python -m fp4dse.results.preset_agreement docs/study/store runs/quickstart/store`.

The stores are those of the study and of `fp4dse quickstart`. A preset off the ladder is compared with each of the
ladder, one on it with the larger ones, over recipes that both have, if there are enough. These are of one setting of
either, the two that share most recipes, and quantize both passes: gaps of another device or revision differ for other
reasons than the task, and recipes that quantize one pass alone rank before all others anywhere.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import product

import msgspec
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fp4dse.dse import SLOTS
from fp4dse.dse.agreement import AGREES, FILE, LEAST, Agreement, Agreements, Unseen
from fp4dse.results.stats.estimates.rankings import Array, signs, spearman, spearman_interval
from fp4dse.results.stats.paired import rows_at_best_lr
from fp4dse.results.stats.sizes.agreement import APART
from fp4dse.results.store.store import open_store

LADDER = ["language:0.4M", "language:1M", "language:3M", "language:10M", "language:10M-long", "language:30M"]
FEW = 0.25
"""Most of these recipes that may be named as what a preset cannot see: it would be left with another question."""
EXPLAINED = 1 / 3
"""Least share of the pairs in another order that has to go with them."""
_FORWARD, _BACKWARD = (
    [slot.replace(".", "_") + "_element" for slot in SLOTS if slot.startswith("fprop.") == of] for of in (True, False)
)


def preset_agreement(runs: pd.DataFrame, ladder: Sequence[str] = tuple(LADDER)) -> Agreements:
    """The agreement of all presets of some rows, at their newest revisions, with those of the ladder. runs: of
    `Store.runs`."""
    rows = rows_at_best_lr(runs)
    rows = rows[_is_whole(rows)]
    finite = np.isfinite(rows["gap"].astype(float))
    name = rows["task"].astype(str) + ":" + rows["preset"].astype(str)
    rows = rows.assign(name=name, gap=rows["gap"].astype(float))
    rows = rows[finite.groupby([rows["setting"], rows["config_id"]]).transform("all")]
    rows = rows[rows["rev_task"] == rows.groupby("name")["rev_task"].transform("max")]
    of: dict[str, list[_Gaps]] = {}
    for (preset, _), part in rows.groupby(["name", "setting"]):
        of.setdefault(str(preset), []).append(_Gaps(part))
    lines = []
    for preset, against in product(sorted(of), ladder):
        if preset in ladder and ladder.index(preset) >= ladder.index(against):
            continue
        pairs = [*product(of[preset], of.get(against, []))]
        mine, theirs = max(pairs, key=_most_shared, default=(None, None))
        if mine and theirs and len(mine.shared(theirs)) >= LEAST:
            line = _line(preset, mine, against, theirs)
            lines += [line] if line.pairs else []  # of no pair there is no share, and the file has no NaN
    return Agreements(APART, [*ladder], lines)


def _is_whole(rows: pd.DataFrame) -> NDArray[np.bool_]:
    """True for rows of recipes that quantize operands of the forward pass and of the backward pass, [rows]."""
    forward, backward = ((rows[of].notna() & rows[of].ne("bf16")).any(axis=1) for of in (_FORWARD, _BACKWARD))
    return np.asarray(forward & backward)


class _Gaps:
    """Of one setting of a preset: mean gap and scales of gradients by recipe, data, and when the newest row was
    written."""

    def __init__(self, rows: pd.DataFrame) -> None:
        self.mean = rows.groupby("config_id", observed=True)["gap"].mean()
        first = rows.drop_duplicates("config_id").set_index("config_id")
        self.scales = pd.Series({key: _scales(row) for key, row in first.iterrows()})
        [self.digest] = rows["dataset_digest"].unique()
        self.newest = rows["created_at"].max()

    def shared(self, other: _Gaps) -> pd.Index:
        """The recipes of both."""
        return self.mean.index.intersection(other.mean.index)


def _scales(row: pd.Series) -> str:
    """`ue5m3 scales without a tensor scale`, of the weight gradient's G; empty where that is not quantized."""
    scale, tensor = row["wgrad_g_scale"], row["wgrad_g_tensor_scale"]
    if not isinstance(scale, str):
        return ""
    return f"{scale} scales {'with' if pd.notna(tensor) else 'without'} a tensor scale"


def _most_shared(two: tuple[_Gaps, _Gaps]) -> tuple[int, pd.Timestamp, pd.Timestamp]:
    """The order in which two settings are preferred, the highest first: by recipes of both, then by newer rows."""
    mine, theirs = two
    return len(mine.shared(theirs)), mine.newest, theirs.newest


def _line(preset: str, mine: _Gaps, against: str, theirs: _Gaps) -> Agreement:
    both = mine.shared(theirs)
    here, there = mine.mean[both].to_numpy(), theirs.mean[both].to_numpy()
    pairs, agree = _alike(here, there)
    low, high = spearman_interval(there, here)
    return Agreement(
        preset=preset,
        dataset_digest=str(mine.digest),
        against=against,
        recipes=len(both),
        pairs=pairs,
        agree=round(agree, 4),
        spearman=round(float(spearman(there, here)), 4),
        spearman_low=round(low, 4),
        spearman_high=round(high, 4),
        measured=f"{max(mine.newest, theirs.newest):%Y-%m-%d}",
        unseen=None if agree >= AGREES else _unseen(mine.scales[both].to_numpy(), here, there, agree),
    )


def _alike(here: Array, there: Array) -> tuple[int, float]:
    """Pairs APART there, and the share of them that is in the same order here."""
    pairs, alike = signs(100 * there, 100 * here, APART)
    return int(pairs), float(alike / pairs) if pairs else np.nan


def _unseen(scales: np.ndarray, here: Array, there: Array, agree: float) -> Unseen | None:
    """The scales without whose recipes the rest agrees best; None where these explain less than EXPLAINED of what does
    not agree, or are more than FEW."""
    found: Unseen | None = None
    least = agree + EXPLAINED * (1 - agree)
    for name in sorted({*scales} - {""}):
        of = scales == name
        rest = _alike(here[~of], there[~of])[1]
        if of.mean() <= FEW and rest >= least:
            least = rest
            found = Unseen(name, round(rest, 4), *(round(float(np.median(there[part])), 4) for part in (of, ~of)))
    return found


def main(arguments: list[str] | None = None) -> None:
    """Write the file from stores."""
    parser = argparse.ArgumentParser(prog="python -m fp4dse.results.preset_agreement", description=__doc__)
    parser.add_argument("stores", nargs="+")
    asked = parser.parse_args(arguments)
    found = preset_agreement(pd.concat([open_store(path).runs() for path in asked.stores], ignore_index=True))
    text = msgspec.json.encode(found).decode()
    FILE.write_text(text.replace('{"preset"', '\n  {"preset"') + "\n", encoding="utf-8")
    print(f"{FILE}: {len(found.lines)} lines")


if __name__ == "__main__":
    main()
