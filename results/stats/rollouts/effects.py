"""The effect of each treatment on each number of a training that learns from its samples: which one moves which?

A treatment is something that a recipe has and that can be taken off: a fix (macro blocks, the fallback for outliers, a
rotation, noise), a correction, another forward pass for rollouts, a part of an error that is injected. Where a store
has a recipe both with and without it, in all else the same, the two are a pair, in every seed that both finished; with
all combinations of some treatments trained, pairs are those of a full factorial design. It is taken off wherever a
recipe has it, in the trainer's quantizers and in the rollout's.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fp4dse.dse import SLOTS, STAGES, Recipe, recipe_from_dict
from fp4dse.dse.inject import PARTS as ERRORS
from fp4dse.dse.inject import Parts
from fp4dse.dse.noise import noise_name
from fp4dse.dse.outliers import Residual
from fp4dse.dse.quantizer import Quantizer
from fp4dse.dse.rollout import rollout_name
from fp4dse.results.stats.estimates.intervals import adjusted, untied_interval
from fp4dse.results.stats.paired import SETTING, by_seed, stacked
from fp4dse.results.stats.rollouts.numbers import common_rate, differences, lane_numbers, mean_of, recorded_rows

COLUMNS = [*SETTING, "treatment", "trainer", "lr", "number", "pairs", "seeds", "without", "difference", "low", "high"]
COLUMNS += ["p", "q"]

replace = msgspec.structs.replace


def rollout_effects(runs: pd.DataFrame) -> pd.DataFrame:
    """The effect of what a recipe can do without on each number of `rollout_numbers`, from pairs of recipes.

    The two of a pair are at one learning rate: the common one of `rollout_numbers` if both were trained at it, else
    the shared one at which they are best; without one they are no pair. Columns: SETTING, treatment (`macro blocks`,
    `fallback`, `rotation`, `noise …`, `tis …`, `kl …`, `router replay`, `rollout …`, `inject scale`, `inject dead`,
    `inject grid`), trainer (`bf16`, `qat`: its forward pass is quantized, `fp4`: its gradients, too), lr (pairs at
    another rate are a line of their own), number, pairs (of recipes that differ in it alone), seeds, without (the mean
    of the recipes without it; geometric of gradient_error), difference (mean over seeds of the mean over pairs, the
    same in each seed: where lanes are missing, pairs or seeds that lack some are left out of the line; of
    gradient_error ln of the ratio, which exp makes a factor), low, high (95 %, over seeds), p, q (p adjusted for all
    lines of the setting that have one). These four are NaN with one seed, and where all seeds tie, of however many: by
    chance, as accuracies do, or by definition, as the gradient's error under a BF16 trainer."""
    parts = []
    for keys, rows in recorded_rows(runs):
        pairs = pairs_by_rate(rows)
        at_rate = {lr: rows[rows["lr"].eq(lr)] for *_, lr in pairs}
        lines = []
        for number, values in lane_numbers(rows).items():
            matrices = {lr: by_seed(part, values[part.index]) for lr, part in at_rate.items()}
            for (treatment, trainer, lr), of in pairs.items():
                recipes, y = matrices[lr]
                with_, without = (recipes.get_indexer(ids) for ids in zip(*of, strict=True))
                apart = differences(number, y[with_], y[without])
                whole = complete_block(np.isfinite(apart))
                if not whole[0].size:
                    continue
                over = untied_interval(apart[whole].mean(axis=0)[None]).iloc[0]
                line: dict[str, Any] = {"treatment": treatment, "trainer": trainer, "lr": lr, "number": number}
                line |= {"pairs": whole[0].size, "seeds": whole[1].size}
                line |= {"without": mean_of(number, y[without][whole]), "difference": over["mean"]}
                lines.append(line | {name: over[name] for name in ("low", "high", "p")})
        if lines:
            found = pd.DataFrame(lines)
            parts.append(found.assign(q=adjusted(found["p"]), **keys))
    order = [*SETTING, "treatment", "trainer", "lr"]
    return stacked(parts, COLUMNS).sort_values(order, kind="stable", ignore_index=True)


def pairs_by_rate(rows: pd.DataFrame) -> dict[tuple[str, str, float], list[tuple[str, str]]]:
    """(treatment, trainer, lr) -> pairs of config_ids of which both have a loss at that rate, each pair at one: the
    common one or, where one of the two lacks it, that of the lowest mean loss of both. rows: from `recorded_rows`."""
    losses = rows.groupby(["config_id", "lr"])["loss"].mean().unstack()
    common = common_rate(rows)
    out: dict[tuple[str, str, float], list[tuple[str, str]]] = {}
    for (treatment, trainer), pairs in treatment_pairs(rows).items():
        for pair in pairs:
            both = losses.loc[list(pair)].mean(skipna=False).dropna()
            if both.size:
                lr = common if common in both.index else float(both.idxmin())
                out.setdefault((treatment, trainer, lr), []).append(pair)
    return out


def complete_block(known: NDArray[np.bool_]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Rows and columns of known [pairs, seeds], as indices of what they share, with no hole: where there are some, the
    pair or the seed that lacks the largest share goes, the seed of two that lack as much, until there is none."""
    pairs, seeds = np.flatnonzero(known.any(axis=1)), np.flatnonzero(known.any(axis=0))
    while pairs.size and not (block := known[np.ix_(pairs, seeds)]).all():
        of_pairs, of_seeds = 1 - block.mean(axis=1), 1 - block.mean(axis=0)
        if of_pairs.max() > of_seeds.max():
            pairs = np.delete(pairs, of_pairs.argmax())
        else:
            seeds = np.delete(seeds, of_seeds.argmax())
    return np.ix_(pairs, seeds)  # type: ignore[return-value]


def treatment_pairs(rows: pd.DataFrame) -> dict[tuple[str, str], list[tuple[str, str]]]:
    """(treatment, trainer) -> pairs of config_ids, of the recipe with it and of that without. rows: with `recipe`."""
    texts = rows.drop_duplicates("config_id").set_index("config_id")["recipe"]
    out: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for config_id, text in texts.items():
        recipe = recipe_from_dict(msgspec.json.decode(text))
        for treatment, rest in without_each(recipe).items():
            if rest.config_id in texts.index:
                out.setdefault((treatment, trainer_of(recipe)), []).append((str(config_id), rest.config_id))
    return out


def trainer_of(recipe: Recipe) -> str:
    """`bf16`, `qat` where the forward pass alone is quantized, else `fp4`."""
    quantized = [slot for slot in SLOTS if recipe.slot(slot).element != "bf16"]
    if not quantized:
        return "bf16"
    return "qat" if all(slot.startswith("fprop") for slot in quantized) else "fp4"


def without_each(recipe: Recipe) -> dict[str, Recipe]:
    """Treatment -> the recipe without it, of the treatments that it has."""
    training = recipe.training
    out = {
        "macro blocks": _quantizers(recipe, {"scaling": "amax"}, lambda q: q.scaling == "macro"),
        "fallback": _quantizers(recipe, {"outliers": None}, lambda q: isinstance(q.outliers, Residual)),
        "rotation": _unrotated(recipe),
    }
    fields: dict[str, dict[str, Any]] = {
        f"noise {noise_name(training.noise)}": {"noise": None},
        f"tis {training.tis}": {"tis": None},
        f"kl {training.kl}": {"kl": None},
        "router replay": {"replay": "none"},
        f"rollout {rollout_name(training.rollout)}": {"rollout": None},
    }
    out |= {name: replace(recipe, training=replace(training, **changes)) for name, changes in fields.items()}
    if training.inject is not None:
        for part in ERRORS:
            rest = [word for word in training.inject.parts.split("+") if word != part]
            kept: Parts = "+".join(rest)  # type: ignore[assignment]
            inject = replace(training.inject, parts=kept) if rest else None
            out[f"inject {part}"] = replace(recipe, training=replace(training, inject=inject))
    return {name: rest for name, rest in out.items() if rest.config_id != recipe.config_id}


def _quantizers(recipe: Recipe, changes: dict[str, Any], meets: Any) -> Recipe:
    """The recipe with these changes of the quantizers that meet a condition, also of its rollout's."""

    def changed(part: Any) -> Any:
        own = {name: getattr(part, name) for name in part.__struct_fields__}
        new = {name: replace(q, **changes) for name, q in own.items() if isinstance(q, Quantizer) and meets(q)}
        return replace(part, **new)

    stages = {stage: changed(getattr(recipe, stage)) for stage in STAGES}
    rollout = recipe.training.rollout
    return replace(recipe, **stages, training=replace(recipe.training, rollout=rollout and changed(rollout)))


def _unrotated(recipe: Recipe) -> Recipe:
    stages = {stage: replace(getattr(recipe, stage), rotation=None) for stage in STAGES}
    rollout = recipe.training.rollout
    plain = rollout and replace(rollout, rotation=None)
    return replace(recipe, **stages, training=replace(recipe.training, rollout=plain))
