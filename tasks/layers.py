"""The layers of a task's model, with what each multiplies: asked for without training, before a sweep is planned."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from fp4dse.dse.layers.place import Place
from fp4dse.tasks.remembered import remembered

if TYPE_CHECKING:
    from fp4dse.tasks.task import Task

SAMPLES = 2


class Layer(msgspec.Struct, frozen=True):
    """A layer with weights. products: multiply-adds of its forward product for one sample; those of the two backward
    products are as many each."""

    place: Place
    products: float


class _Answer(msgspec.Struct, frozen=True):
    """Layers as they are remembered."""

    layers: list[Layer] | None


def find_layers(*asked: str) -> list[Layer] | None:
    """The layers of the model of the task that get_task finds for the same arguments, in the model's order; None for a
    model too large to be built for this (MOST_PARAMETERS). ConfigErrors as of get_task."""

    def ask() -> _Answer:
        from fp4dse.tasks.catalogue import get_task  # imports torch

        return _Answer(layers_of(get_task(*asked)))

    bundled = len(asked) == 2 and not asked[0].endswith(".py")
    return (remembered(f"layers of {':'.join(asked)}", ask, _Answer) if bundled else ask()).layers


def layers_of(task: Task) -> list[Layer] | None:
    """The layers of a task's model, which is built for one seed and sees SAMPLES held-out samples."""
    import torch

    from fp4dse.tasks.counting import MOST_PARAMETERS, counting_numerics
    from fp4dse.tasks.draws import Draws

    if task.size > MOST_PARAMETERS:
        return None
    problem = (task.preview or task.problem)([0])
    numerics = counting_numerics(task)
    model = task.model(problem.init, numerics)
    x, y = problem.val_x[:1, :SAMPLES], problem.val_y[:1, :SAMPLES]
    inputs, _ = task.prepare(x, y, Draws(numerics.seeds, numerics.step)) if task.prepare else (x, y)
    with torch.no_grad():
        model(inputs)
    return [Layer(place, numerics.products.get(layer, 0.0) / x.shape[1]) for layer, place in numerics.places.items()]
