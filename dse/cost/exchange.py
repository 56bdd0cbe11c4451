"""Tokens that are sent to experts on other GPUs (expert parallelism): bytes and seconds.

Of every token `copies` go out. There are four all-to-alls in a block:

    forward dispatch    x, as the expert's first product takes it: codes and scales of `fprop.x`
    forward combine     the results, BF16
    backward dispatch   gradients of the results, as the expert's last layer takes them: codes and scales of `dgrad.g`
    backward combine    gradients of x, BF16

Of n GPUs, 1/n of what is sent stays where it is. Seconds are bytes / `Chip.network`, times the share that products do
not hide; a chip of unknown network takes none.
"""

from __future__ import annotations

from functools import lru_cache

from fp4dse.dse.cost.at_place import recipe_at
from fp4dse.dse.cost.chip import Chip
from fp4dse.dse.cost.model import Model
from fp4dse.dse.quantizer import Quantizer
from fp4dse.dse.recipe import Recipe

WAYS = ("forward dispatch", "forward combine", "backward dispatch", "backward combine")


def exchanged_bytes(recipe: Recipe, model: Model) -> dict[str, float]:
    """Way -> bytes that a GPU sends to others in a micro-batch; the mean over its blocks where these differ."""
    places = [place for linear in model.linears if linear.expert for place in model.places(linear)]
    sends = [_bytes(recipe_at(recipe, place).fprop.x) for place in places if place.role != "down"]
    returns = [_bytes(recipe_at(recipe, place).dgrad.g) for place in places if place.role == "down"]
    each = dict(zip(WAYS, (_mean(sends), 2.0, _mean(returns), 2.0), strict=True))
    elements = sum(of.count * model.tokens * of.copies * of.width * (1 - 1 / of.gpus) for of in model.exchange)
    return {way: elements * number for way, number in each.items()}


@lru_cache(maxsize=65536)
def exchange_seconds(recipe: Recipe, model: Model, chip: Chip, ways: tuple[str, ...] = WAYS) -> float:
    """Seconds of a micro-batch in which a GPU waits for tokens."""
    if chip.network is None or not model.exchange:
        return 0.0
    elements = sum(of.count * of.copies * of.width * (1 - 1 / of.gpus) for of in model.exchange)
    exposed = sum(of.count * of.copies * of.width * (1 - 1 / of.gpus) * of.exposed.value for of in model.exchange)
    sent = sum(number for way, number in exchanged_bytes(recipe, model).items() if way in ways)
    return sent * exposed / elements / chip.network.value if elements else 0.0


def _mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else 2.0


def _bytes(q: Quantizer) -> float:
    """Of an element as it is sent."""
    return 2.0 if q.is_plain else q.canonical().bits_per_element / 8
