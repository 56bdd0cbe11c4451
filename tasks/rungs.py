"""Choice of the lanes that go on at a rung: successive halving on two objectives, inside a running population.

At a rung the lanes are ranked by non-domination on (loss so far, overhead), both to be small, and the worse part is
dropped. Losses are compared at equal learning rate and, as data order and initial weights belong to a seed, only
within a seed. Where the recipes of the lanes are given, a recipe's seeds stay or go together, by the mean over its
seeds of how far it is from the mean of all lanes of that seed; a mean over the seeds that happened to survive would
flatter.

Ranks as in non-dominated sorting (Deb et al. 2002); halving on fronts as in Schmucker et al. (2106.12639). Within a
front the lower loss is better.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Hashable, Sequence


def keep_lanes(
    losses: Sequence[float | None],
    overheads: Sequence[float],
    seeds: Sequence[int],
    lrs: Sequence[float],
    keep: float,
    recipes: Sequence[Hashable] | None = None,
) -> list[bool]:
    """True for each lane that goes on, [L]: at each learning rate (and seed, without `recipes`) the better share `keep`
    of the recipes, rounded up.

    losses    held-out losses at the rung, None where a lane has diverged: it does not go on, and is not counted
    keep      share in (0, 1]
    recipes   what identifies a lane's recipe. One with a diverged lane ranks last
    """
    lanes = range(len(losses))
    units: dict[Hashable, dict[Hashable, list[int]]] = {}  # comparable set -> recipe -> lanes
    for lane in lanes:
        one = recipes[lane] if recipes else lane
        units.setdefault(lrs[lane] if recipes else (seeds[lane], lrs[lane]), {}).setdefault(one, []).append(lane)
    stays = [False] * len(losses)
    for of_recipe in units.values():
        excess = _excess(losses, seeds, [lane for members in of_recipe.values() for lane in members])
        running = [members for members in of_recipe.values() if any(lane in excess for lane in members)]
        scores = [sum(excess.get(lane, math.inf) for lane in members) / len(members) for members in running]
        order = ranking(scores, [overheads[members[0]] for members in running])
        for unit in order[: math.ceil(keep * len(running) - 1e-9)]:
            for lane in running[unit]:
                stays[lane] = lane in excess
    return stays


def ranking(losses: Sequence[float], overheads: Sequence[float]) -> list[int]:
    """Indices, best first: by front, then loss, then overhead, then as given."""
    fronts = front_numbers(losses, overheads)
    return sorted(range(len(losses)), key=lambda i: (fronts[i], losses[i], overheads[i]))


def front_numbers(x: Sequence[float], y: Sequence[float]) -> list[int]:
    """0 for points that nothing dominates, 1 for those that only these dominate, and so on. Equal points are equal.

    In the order of (x, y) a point is dominated by a front iff the lowest y of the front so far is not above its own;
    these lowest values increase with the number of the front. O(n log n).
    """
    numbers = [0] * len(x)
    lowest: list[float] = []
    previous: int | None = None
    for i in sorted(range(len(x)), key=lambda i: (x[i], y[i])):
        if previous is not None and (x[i], y[i]) == (x[previous], y[previous]):
            numbers[i] = numbers[previous]
            continue
        number = numbers[i] = bisect_right(lowest, y[i])
        lowest[number : number + 1] = [y[i]]
        previous = i
    return numbers


def _excess(losses: Sequence[float | None], seeds: Sequence[int], lanes: Sequence[int]) -> dict[int, float]:
    """Loss minus the mean loss of the lane's seed, for lanes that have a finite loss."""
    of_seed: dict[int, list[float]] = {}
    running = {lane: loss for lane in lanes if (loss := losses[lane]) is not None and math.isfinite(loss)}
    for lane, loss in running.items():
        of_seed.setdefault(seeds[lane], []).append(loss)
    means = {seed: math.fsum(found) / len(found) for seed, found in of_seed.items()}
    return {lane: loss - means[seeds[lane]] for lane, loss in running.items()}
