"""Studies of known truth for what is said across sizes and against published tables: coverage, and what to expect.

`scaling`: BF16 follows a law, and six recipes have factors of parameters, of data, or of both in it; or their gaps
follow a power law. Presets, seeds and noise are those of a study of five sizes. `published`: the schemes of Quartet
II's table, whose true gaps in the small task are the published ones, stretched and distorted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from fp4dse.results.bench.scores import Score
from fp4dse.results.bench.statistics import summed
from fp4dse.results.published import tables
from fp4dse.results.stats.estimates.curve_fits import Array
from fp4dse.results.stats.estimates.rankings import signs, spearman
from fp4dse.results.stats.sizes.agreement import APART, Ranked, ceiling, compared, recipe_gaps
from fp4dse.results.stats.sizes.extrapolation import extrapolation
from fp4dse.results.stats.sizes.loss_law import KNOWN, REFERENCE, loss_law
from fp4dse.results.stats.sizes.scaling import scaling

PRESETS = {"0.4M": (4e5, 20), "1M": (1e6, 20), "3M": (3e6, 20), "10M": (1e7, 5), "10M-long": (1e7, 20), "30M": (3e7, 5)}
"""Name -> parameters, tokens for each."""
LAW = {"floor": 1.7, "parameters_term": 0.5, "parameters_exponent": 0.35, "tokens_term": 0.4, "tokens_exponent": 0.4}
QUOTED = 0.075
"""% of error of the perfect proxy whose chances to reach 0.9 are .78 (forward schemes) and .45 (whole recipes)."""

WORLDS = ("law, entropy known", "law", "power")
KINDS = ("forward", "backward", "both")
RECIPES = 6


def scaling_study(
    rng: np.random.Generator, world: str, seeds: int = 3, noise: float = 0.001, common: float = 0.005
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Runs at PRESETS, and the truth: a line a recipe with eff_n, eff_d, size_exponent, ratio_exponent.

    noise, common: standard deviations of log losses, of a lane and of what all lanes of a seed share.
    """
    shrink = np.exp(-rng.uniform([0.05, 0.02], [0.5, 0.3], (RECIPES, 2)))
    kinds = [KINDS[i % 3] for i in range(RECIPES)]
    truth = pd.DataFrame({"config_id": [f"{i:016x}" for i in range(RECIPES)], "kind": kinds})
    truth["eff_n"] = np.where(truth["kind"].eq("backward"), 1, shrink[:, 0])
    truth["eff_d"] = np.where(truth["kind"].eq("forward"), 1, shrink[:, 1])
    truth["size_exponent"] = rng.uniform(-0.3, 0, RECIPES)
    truth["ratio_exponent"] = rng.uniform(-0.3, 0.3, RECIPES)
    strength = rng.uniform(0.005, 0.04, RECIPES)
    frames = []
    for preset, (parameters, ratio) in PRESETS.items():
        tokens = parameters * ratio
        n, r = np.log(parameters / REFERENCE[0]), np.log(ratio / 20)
        plain = _law(parameters, tokens)
        gaps = np.log(_law(parameters * truth["eff_n"], tokens * truth["eff_d"]) / plain).to_numpy()
        if world == "power":
            gaps = strength * np.exp(truth["size_exponent"] * n + truth["ratio_exponent"] * r).to_numpy()
        shared, own = rng.normal(0, common, seeds), rng.normal(0, noise, (RECIPES + 1, seeds))
        losses = plain * np.exp(np.append(0.0, gaps)[:, None] + shared + own)
        frames.append(_runs(preset, parameters, tokens, losses, kinds, world))
    return pd.concat(frames, ignore_index=True), truth


def _law(parameters: Any, tokens: Any) -> Any:
    first = LAW["parameters_term"] * (parameters / REFERENCE[0]) ** -LAW["parameters_exponent"]
    return LAW["floor"] + first + LAW["tokens_term"] * (tokens / REFERENCE[1]) ** -LAW["tokens_exponent"]


def _runs(preset: str, parameters: float, tokens: float, losses: Array, kinds: list[str], world: str) -> pd.DataFrame:
    """Runs of BF16, the first row of losses [recipes + 1, seeds], and of the recipes."""
    recipe = np.repeat(np.arange(len(losses)) - 1, losses.shape[1])
    kind = np.array([*kinds, "none"], object)[recipe]
    element = {True: "e2m1", False: "bf16"}
    forward = [element[one in ("forward", "both")] for one in kind]
    backward = [element[one in ("backward", "both")] for one in kind]
    columns = dict.fromkeys(["rev_quantizers", "rev_engine", "rev_task"], 1) | {"lr": 1e-3, "status": "done"}
    columns |= dict.fromkeys(["task", "dataset_digest", "device_class", "software_class"], "generated")
    columns |= {"preset": preset, "parameters": parameters, "tokens": tokens, "lane_s": parameters / 1e6}
    columns["metric_name"] = "excess" if world == "law, entropy known" else "other"
    return pd.DataFrame(
        {
            "config_id": [f"{i:016x}" if i >= 0 else "bf16" for i in recipe],
            "recipe_label": [f"recipe {i}" if i >= 0 else "bf16" for i in recipe],
            "is_baseline": recipe < 0,
            "seed": np.tile(np.arange(losses.shape[1]), len(losses)),
            "val_loss": losses.ravel(),
            "val_metric": losses.ravel() - LAW["floor"],
            **{f"fprop_{operand}_element": forward for operand in "xw"},
            **{f"{stage}_g_element": backward for stage in ("dgrad", "wgrad")},
            **columns,
        }
    )


def scaling_scores(runs: pd.DataFrame, truth: pd.DataFrame, world: str) -> Iterator[Score]:
    """Held against its truth: what scaling, loss_law and extrapolation say of one study."""
    lines = scaling(runs).merge(truth, on="config_id", suffixes=("", "_true"))
    names = ["size_exponent", "ratio_exponent"] if world == "power" else ["eff_n", "eff_d"]
    for name in names:
        for kind, part in lines.groupby("kind"):
            yield f"{name} of {kind} covers", *_covered(part, name, part[f"{name}_true"])
    law = loss_law(runs)
    for name in KNOWN:
        yield f"law: {name} covers", *_covered(law, name, LAW[name])
    held = extrapolation(runs)
    for model, part in held.groupby("model"):
        known = part["error"].notna()
        yield f"largest size, {model}: within its interval", float(part["error"].abs().le(1).sum()), float(known.sum())
        yield f"largest size, {model}: pairs in order", float(part["agree"].sum()), float(part["pairs"].sum())


def _covered(lines: pd.DataFrame, name: str, truth: Any) -> tuple[float, float]:
    told = lines[f"{name}_low"].notna()
    inside = lines[f"{name}_low"].le(truth) & lines[f"{name}_high"].ge(truth)
    return float((inside & told).sum()), float(told.sum())


def published_scores(rng: np.random.Generator, seeds: int = 3, noise: float = 0.1) -> Iterator[Score]:
    """The schemes of Quartet II's table with gaps stretched by 1 to 3 and distorted by a fifth of their spread."""
    table = tables()["quartet2"]
    for group in table.groups():
        figures = recipe_gaps(table, group)
        published = np.array(list(figures.values()))
        true = rng.uniform(1, 3) * (published + 0.2 * published.std() * rng.normal(size=len(published)))
        gaps = true[:, None] + rng.normal(0, noise, seeds) + rng.normal(0, noise, (len(true), seeds))
        line = compared(Ranked("quartet2", group, list(figures), published, gaps, len(figures)), table.error)
        pairs, alike = signs(published, true, APART)
        for name, value in (("agree", alike / pairs), ("spearman", float(spearman(published, true)))):
            low, high = (float(str(line[f"{name}{end}"])) for end in ("_low", "_high"))
            yield f"{group}: {name} covers", float(low - 1e-9 <= value <= high + 1e-9), 1
        everything = [scheme.gaps[0] for scheme in table.schemes.values() if scheme.group == group]
        reached = ceiling(everything, QUOTED, draws=1, seed=int(rng.integers(2**31)))[2]
        yield f"{group}: a perfect proxy with {QUOTED} % of error reaches 0.9", reached, 1


def bench_scaling(studies: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """The lines of `fp4dse bench statistics --size scaling`."""
    for place, world in enumerate(WORLDS):
        rngs = (np.random.default_rng([seed, place, i]) for i in range(studies))
        yield from summed(world, [list(scaling_scores(*scaling_study(rng, world), world)) for rng in rngs])


def bench_published(studies: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """The lines of `fp4dse bench statistics --size published`."""
    rngs = (np.random.default_rng([seed, 99, i]) for i in range(studies))
    yield from summed("published", [list(published_scores(rng)) for rng in rngs])
