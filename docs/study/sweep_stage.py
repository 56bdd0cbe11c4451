"""A sweep of one stage of the study, as fp4dse sweep, without its table and report:

    python docs/study/sweep_stage.py SPACE --task TASK:PRESET --seeds 0,1,2 --store STORE --lanes 12 …

--lanes: of a job; --data, --from, --lr: as there; --front-of TASK:PRESET: of SPACE the recipes that the rows of that
preset choose, at its rates.
"""

from __future__ import annotations

import argparse
import sys

from fp4dse.dse import Recipe, Space
from fp4dse.results import open_store
from fp4dse.results.stats.recipes.front_chance import front_chance
from fp4dse.sweeps import find_space, run_sweep
from fp4dse.sweeps.arguments import parse_lrs, parse_seeds, parse_tasks
from fp4dse.sweeps.planning.plan import class_rates
from fp4dse.tasks import find_facts

LEAST_SEEDS, MOST_CHOSEN, ALWAYS = 3, 6, "nvidia-nvfp4"
"""Of the rule by which a stage chooses the recipes of the next one (plan.md)."""


def main() -> None:
    """Sweep a space."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("space")
    for name in ("task", "seeds", "device", "store", "lanes"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--data")
    parser.add_argument("--from", dest="start")
    rates_of = parser.add_mutually_exclusive_group()
    rates_of.add_argument("--front-of")
    rates_of.add_argument("--lr")
    parser.add_argument("--jobs", type=int, required=True)
    parser.add_argument("--budget", type=float, required=True)
    asked = parser.parse_args()
    space, rates = find_space(asked.space), parse_lrs([asked.lr]) if asked.lr else None
    if asked.front_of:
        space, rates = front_of(asked.front_of, space, asked.store)
    result = run_sweep(
        space,
        tasks=parse_tasks([asked.task], data=asked.data, start=asked.start),
        seeds=parse_seeds(asked.seeds),
        lrs=rates,
        store=asked.store,
        device=asked.device,
        jobs=asked.jobs,
        budget_s=asked.budget,
        options={"lanes": asked.lanes},
        progress=True,
    )
    print(result, flush=True)
    sys.exit(result.exit_code)


def front_of(preset: str, space: Space, store: str) -> tuple[list[Recipe], list[float]]:
    """The recipes of a space that go on to the next stage by the plan's rule, and the one rate of all classes there.

    Those on the front of the space's rows of the preset: the cheapest, the one of the lowest gap, and of those between
    at most four, the likeliest first; NVIDIA's recipe always. Nothing is chosen from a part: the program ends where a
    recipe lacks three seeds on one kind of machine."""
    recipes = {recipe.canonical().config_id: recipe for recipe in space.recipes()}
    ((task, name, *_),) = parse_tasks([preset])
    runs = open_store(store).runs()
    mine = (runs["task"].eq(task) & runs["preset"].eq(name)) & (runs["config_id"].isin(recipes) | runs["is_baseline"])
    lines = front_chance(runs[mine])
    lines = lines[lines["config_id"].isin(recipes)]
    whole = lines[lines["pairs"].ge(LEAST_SEEDS)]
    if len(whole) < len(recipes) or whole["config_id"].nunique() < len(whole):
        sys.exit(f"{preset}: {len(whole)} of {len(recipes)} recipes have {LEAST_SEEDS} seeds on one kind of machine")
    front = whole[whole["on_front"]].sort_values(["overhead", "gap"])
    between = front.iloc[1:].sort_values("gap").iloc[1:].sort_values("p_front", ascending=False)
    chosen = {*front["config_id"].iloc[:1], *front.sort_values("gap")["config_id"].iloc[:1]}
    chosen |= {*between["config_id"].iloc[: MOST_CHOSEN - 2], Recipe.named(ALWAYS).canonical().config_id}
    for line in whole[whole["config_id"].isin(chosen)].itertuples():
        print(f"chosen: {line.label}, {100 * line.gap:+.2f} %, {line.overhead:.2f} of BF16's time", flush=True)
    facts = find_facts(task, name)
    left = [recipe for one, recipe in recipes.items() if one in chosen]
    rates = {class_rates(facts, recipe)[0] for recipe in [Recipe.named("bf16"), *left]}
    if len(rates) > 1:
        sys.exit(f"{preset}: found the rates {sorted(rates)}; accepted: one for all classes, as a sweep has one list")
    return left, [*rates]


if __name__ == "__main__":
    main()
