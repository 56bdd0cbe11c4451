"""A model of a size, as data, and the problem that it makes of images: weights fit their shape and their classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from torch import Tensor, nn

from fp4dse.dse import ConfigError
from fp4dse.kernels import LaneNumerics
from fp4dse.tasks.data.images import Images
from fp4dse.tasks.task import Problem


class Model(msgspec.Struct, frozen=True):
    """init: (images, seeds) -> parameters [S, …]; build: (parameters [L, …], numerics) -> module on images
    [L, B, H, W, C]; multiple: what height and width must be multiples of."""

    name: str
    init: Callable[[Images, Sequence[int]], dict[str, Tensor]]
    build: Callable[[dict[str, Tensor], LaneNumerics], nn.Module]
    multiple: int = 1

    def check(self, images: Images) -> None:
        """ConfigError for images that the model cannot take."""
        height, width, _ = images.shape
        if height % self.multiple or width % self.multiple:
            wanted = f"multiples of {self.multiple} for {self.name}; size=N makes all images N×N"
            raise ConfigError("height × width of the images", f"{height} × {width}", wanted)


def image_problem(model: Model, data: Callable[[], Images], seeds: Sequence[int]) -> Problem:
    """Data shared by all seeds, pixels as they are stored; initial weights for each seed."""
    images = data()
    model.check(images)
    return Problem(
        images.train[None],
        images.train_labels[None],
        images.held_out[None],
        images.held_out_labels[None],
        model.init(images, seeds),
    )


def needed(what: str) -> Callable[[], Images]:
    """The data of a preset that has none of its own."""

    def missing() -> Images:
        raise ConfigError("data", None, f"--data PATH with {what}: none is bundled for this preset")

    return missing
