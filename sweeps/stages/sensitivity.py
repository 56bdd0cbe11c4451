"""Trains each unit of a model quantized alone and spared alone, then a choice of those that should stay in BF16.

The recipes of a study are trained as any sweep trains them, all at one learning rate, so that what differs between two
of them is the unit alone. The store notes which recipe stands for which unit (results/store/studies.py).

A budget is spent by a knapsack on what sparing each unit gains. The choice is then trained on fresh seeds, beside the
recipe itself and beside the first and last blocks of equal cost, because the seeds that chose it flatter it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any, get_args

import msgspec

from fp4dse.dse import ConfigError, Recipe
from fp4dse.dse.cost import CostTarget, load_model
from fp4dse.dse.layers.place import Place
from fp4dse.dse.layers.sensitivity import SCOPES, By, Grain, Unit, alone, ends, products, spared, units
from fp4dse.dse.stages import STAGES
from fp4dse.results import Store
from fp4dse.results.stats.layers.knapsack import best_choice, options
from fp4dse.results.stats.layers.sensitivity import sensitivity
from fp4dse.results.stats.layers.study import Measured, Spared, Spend, Study
from fp4dse.results.stats.stages import CONFIRM
from fp4dse.results.store.studies import read_studies, record_study
from fp4dse.sweeps.stages.confirming import FIRST_SEED
from fp4dse.sweeps.sweep import SweepResult, run_sweep
from fp4dse.tasks.facts import find_facts, rate_of
from fp4dse.tasks.layers import find_layers

SEEDS = (0, 1, 2, 3, 4)
Asked = tuple[str, ...]
"""Arguments of get_task."""


class StudyPlan(msgspec.Struct, frozen=True):
    """A study, and what there is to train for it.

    recipes  by config_id, the recipe itself among them
    work     place -> its share of the multiply-adds of the model
    """

    asked: Asked
    study: Study
    recipe: Recipe
    units: list[Unit]
    grain: Grain
    recipes: dict[str, Recipe]
    work: dict[Place, float]

    def of(self, stages: Mapping[Place, frozenset[str]]) -> float:
        """The share of the model's multiply-adds that products have."""
        return sum(self.work[place] * len(of) / len(STAGES) for place, of in stages.items())


def make_grain(by: str, parts: int, scopes: str) -> Grain:
    """The grain that a command asks for. ConfigError names the option."""
    if by not in get_args(By):
        raise ConfigError("--by", by, ", ".join(get_args(By)))
    names = tuple(dict.fromkeys(name.strip() for name in scopes.split(",")))
    try:
        return Grain(by, parts, names)  # type: ignore[arg-type]
    except ConfigError as error:
        option = {"parts": "--parts", "scopes": "--products"}.get(error.where, error.where)
        raise ConfigError(option, error.found, error.accepted) from None


def check_spend(text: str | None) -> Spend | None:
    """The cost that a budget limits; ConfigError for anything else."""
    if text is not None and text not in get_args(Spend):
        raise ConfigError("--spend", text, ", ".join(get_args(Spend)))
    return text  # type: ignore[return-value]


def file_name(recipe: str) -> str:
    """A recipe's name, file or label as the name of a folder."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", Path(recipe).stem if recipe.endswith(".toml") else recipe).strip("-")[:60]


def plan_study(
    recipe: Recipe,
    asked: Asked,
    grain: Grain,
    *,
    lr: float | None = None,
    seeds: Sequence[int] | None = None,
    cost: CostTarget,
) -> StudyPlan:
    """The units of a recipe on a task and their recipes. lr: None is the task's for the recipe's class.

    ConfigError for a recipe that quantizes nothing there, and for a task whose model is too large to be looked at.
    """
    task = find_facts(*asked)
    layers = find_layers(*asked)
    if layers is None:
        raise ConfigError("--task", ":".join(asked), "a task whose model is small enough to be looked at here")
    whole = sum(layer.products for layer in layers)
    work: dict[Place, float] = {}
    for layer in layers:
        work[layer.place] = work.get(layer.place, 0.0) + layer.products / whole
    recipe, places = recipe.canonical(), list(work)
    recipes, found = {recipe.config_id: recipe}, []
    cut = units(recipe, places, grain)
    for unit in cut:
        of = products([unit], places, grain.by)
        only, without = alone(recipe, of, places), spared(recipe, of, places)
        recipes |= {only.config_id: only, without.config_id: without}
        share = sum(work[place] * len(stages) / len(STAGES) for place, stages in of.items())
        step = _step(recipe, unit, grain, cost)
        found.append(Measured(unit.layers, unit.scope, only.config_id, without.config_id, share, step))
    if any(unit.step == 0.0 for unit in found):  # the cost model knows nothing of rules
        found = [msgspec.structs.replace(unit, step=None) for unit in found]
    study = Study(
        task=task.name,
        preset=task.preset,
        label=recipe.label(),
        config_id=recipe.config_id,
        baseline_id=recipe.baseline().config_id,
        lr=rate_of(task, recipe) if lr is None else lr,
        seeds=tuple(seeds or SEEDS),
        step_of=cost.of,
        units=tuple(found),
    )
    return StudyPlan(asked, study, recipe, cut, grain, recipes, work)


def with_fisher(plan: StudyPlan, scores: Mapping[Place, float]) -> StudyPlan:
    """The plan with the score of each unit that has a forward product. scores: of tasks/inspection/fisher.py."""
    found = []
    for unit, measured in zip(plan.units, plan.study.units, strict=True):
        of = products([unit], list(plan.work), plan.grain.by)
        forward = [place for place, stages in of.items() if "fprop" in stages]
        score = sum(scores[place] for place in forward) if forward else None
        found.append(msgspec.structs.replace(measured, fisher=score))
    return msgspec.structs.replace(plan, study=msgspec.structs.replace(plan.study, units=tuple(found)))


def run_study(plan: StudyPlan, store: str, **limits: Any) -> SweepResult:
    """Train what the store lacks of a study. limits: the arguments of `run_sweep` that do not say what is trained."""
    study = plan.study
    recipes = list(plan.recipes.values())
    return run_sweep(recipes, tasks=[plan.asked], seeds=study.seeds, lrs=[study.lr], store=store, **limits)


def note_study(plan: StudyPlan, store: Store) -> Study:
    """Note a study in its store; the same with the choices that were made there before."""
    record_study(store, plan.study)
    return read_studies(store)[-1]


def check_budget(study: Study, budget: float, spend: Spend | None = None) -> Spend:
    """The cost that the budget (a share: 0.05) limits. ConfigError, before anything is trained, if it is the step's and
    that is not known, and if no unit fits, whatever it gains."""
    if spend == "step" and study.spend != "step":
        raise ConfigError("--spend", spend, "products: the cost model does not know all units of this task")
    spend = spend or study.spend
    if (least := min(unit.cost(spend) for unit in study.units)) > budget:
        raise ConfigError("--budget", f"{budget:.2%}", f"{_rounded_up(least)} or more: the cheapest unit")
    return spend


def choose(plan: StudyPlan, store: Store, budget: float, spend: Spend | None = None) -> tuple[Spared, list[Recipe]]:
    """The units to spare within a budget (a share: 0.05), by what was measured, and the recipes to train for it: the
    recipe itself, the chosen one, that with first and last blocks spared.

    ConfigError if nothing that gains fits, and as of `check_budget`.
    """
    study = plan.study
    spend = check_budget(study, budget, spend)
    lines = sensitivity(store.runs(), study)
    lines = lines.drop_duplicates("unit").set_index("unit")
    gains = [float(lines["gain"].get(unit.label, float("nan"))) for unit in study.units]
    best = best_choice(options(study, gains, spend, SCOPES), budget)
    if not best.units:
        gaining = [unit.cost(spend) for unit, gain in zip(study.units, gains, strict=True) if gain > 0]
        fits = f"{_rounded_up(min(gaining))} or more: the cheapest unit that gains" if gaining else ""
        accepted = fits or "nothing: no unit gains"
        raise ConfigError("--budget", f"{budget:.2%}", accepted)
    places = list(plan.work)
    meant = products([plan.units[i] for i in best.units], places, plan.grain.by)
    chosen, used = spared(plan.recipe, meant, places), plan.of(meant)
    at_ends, ends_used = _first_and_last(plan, used)
    rival = spared(plan.recipe, dict.fromkeys(at_ends, frozenset(STAGES)), places) if at_ends else None
    fresh = islice((seed for seed in count(FIRST_SEED) if seed not in study.seeds), len(study.seeds))
    choice = Spared(
        budget=budget,
        spend=spend,
        units=tuple(sorted(best.units)),
        config_id=chosen.config_id,
        cost=best.cost,
        products=used,
        seeds=tuple(fresh),
        ends=rival.config_id if rival else None,
        ends_layers=", ".join(place.name or place.kind for place in at_ends),
        ends_products=ends_used,
    )
    return choice, [plan.recipe, chosen, *([rival] if rival else [])]


def run_choice(plan: StudyPlan, store: Store, choice: Spared, recipes: Sequence[Recipe], **limits: Any) -> SweepResult:
    """Train the recipes of a choice on fresh seeds, and note it in the store."""
    lrs, where = [plan.study.lr], str(store.path)
    result = run_sweep(recipes, tasks=[plan.asked], seeds=choice.seeds, lrs=lrs, store=where, stage=CONFIRM, **limits)
    record_study(store, msgspec.structs.replace(plan.study, choices=(choice,)))
    return result


def _rounded_up(share: float) -> str:
    """A share in words that, given back as a budget, is enough for it."""
    return f"{math.ceil(share * 1e4 - 1e-6) / 100:.2f}%"


def _first_and_last(plan: StudyPlan, most: float) -> tuple[list[Place], float]:
    """Layers of the first and last blocks with all their products, as many as fit, and their multiply-adds. What the
    recipe does not quantize is left as it is."""
    taken, used = [], 0.0
    for place in ends(list(plan.work)):
        if plan.recipe.at(place).is_plain or used + plan.work[place] > most * (1 + 1e-9):
            continue
        taken.append(place)
        used += plan.work[place]
    return taken, used


def _step(recipe: Recipe, unit: Unit, grain: Grain, cost: CostTarget) -> float | None:
    """Time that sparing the same unit of the model that overheads are of adds to its step, as a share of it; None
    where that model has no such layers, or where no rule can tell them from others."""
    model = load_model(cost.model)
    places = list(dict.fromkeys(place for linear in model.linears for place in model.places(linear)))
    of = products([unit], places, grain.by)
    if not of:
        return None
    try:
        ruled = spared(recipe, of, places)
    except ConfigError:
        return None
    return cost.overhead(ruled) / cost.overhead(recipe) - 1
