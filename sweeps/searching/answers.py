"""Looks up the results of recipes in the store, for the sampler and for the front of a task."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4dse.results import Store, summarize
from fp4dse.results.stats.paired import OVERHEAD
from fp4dse.results.stats.recipes.summary import SUMMARIZED
from fp4dse.sweeps.jobs.rows import SHARED

OBJECTIVES = {"gap": "gap", "overhead": OVERHEAD, "loss": "val_loss", "metric": "val_metric"}
OBJECTIVES |= {"points": "points", "bits": "bits"}
"""Objective -> column of the summary. All are to be small, but a metric whose task says that higher is better."""


@dataclass
class Answers:
    """`values`: config_id -> the objectives of recipes that have them all, with a sign that makes small ones good;
    `states`: `done`, or why there are none."""

    store: Store
    context: dict[str, Any]
    objectives: Sequence[str]
    values: dict[str, list[float]] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)
    labels: dict[str, tuple[str, int]] = field(default_factory=dict)

    @property
    def signs(self) -> list[float]:
        """Per objective: 1, or -1 where high is good."""
        rises = self.context["metric_better"] == "higher"
        return [-1.0 if name == "metric" and rises else 1.0 for name in self.objectives]

    def read(self, config_ids: Sequence[str]) -> None:
        """Look up what the store knows of these recipes now; nothing else of it is read.

        Where workers are of several kinds, a recipe has a line for each, and each is compared with BF16 on its own
        kind: the answer is their mean, weighted by their pairs of seeds."""
        runs = self.store.runs(SUMMARIZED, recipes=config_ids)
        runs = runs[(runs[SHARED] == [self.context[name] for name in SHARED]).all(axis="columns")]
        pruned = set(runs["config_id"][runs["status"].eq("pruned")])  # the mean of the seeds that are left flatters
        found: dict[str, list[dict[str, Any]]] = {}
        for line in summarize(runs).to_dict("records"):
            found.setdefault(line["config_id"], []).append(line)
        for config_id in (*config_ids, *found):
            for known in (self.values, self.states, self.labels):
                known.pop(config_id, None)
        for config_id, lines in found.items():
            good = [line for line in lines if not line["note"]]
            diverged = any(line["note"] == "diverged" for line in lines)
            spoiled = "pruned" if config_id in pruned else "diverged" if diverged else ""
            self.labels[config_id] = lines[0]["label"], sum(line["seeds"] for line in lines)
            if spoiled or not good:
                self.states[config_id] = spoiled or lines[0]["note"]
                continue
            values = (self._mean(good) * self.signs).tolist()
            if all(map(math.isfinite, values)):
                self.states[config_id], self.values[config_id] = "done", values

    def _mean(self, lines: list[dict[str, Any]]) -> NDArray[np.float64]:
        """The objectives over the lines, by pairs of seeds. A single line stays as it is, to the bit."""
        values = np.array([[line[OBJECTIVES[name]] for name in self.objectives] for line in lines], float)
        weights = [max(line["pairs"], 1) for line in lines]
        return values[0] if len(lines) == 1 else np.average(values, axis=0, weights=weights)

    def front(self, config_ids: Sequence[str]) -> list[dict[str, Any]]:
        """The non-dominated of these recipes, the best by the first objective first."""
        met = [config_id for config_id in config_ids if config_id in self.values]
        points = np.array([self.values[config_id] for config_id in met]).reshape(len(met), len(self.objectives))
        no_worse = (points[:, None] <= points[None]).all(axis=2)
        beaten = np.any(no_worse & (points[:, None] < points[None]).any(axis=2), axis=0).tolist()
        chosen = sorted((i for i in range(len(met)) if not beaten[i]), key=lambda i: tuple(points[i]))
        return [
            {
                "label": self.labels[met[i]][0],
                "config_id": met[i],
                "seeds": self.labels[met[i]][1],
                **dict(zip(self.objectives, (points[i] * self.signs).tolist(), strict=True)),
            }
            for i in chosen
        ]
