"""A model of a size, as data, with its training numbers, and the problem that it makes of images: weights fit their
shape and their classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self

import msgspec
from torch import Tensor, nn

from fp4dse.dse import ConfigError, Recipe
from fp4dse.kernels import LaneNumerics
from fp4dse.tasks.data.digits import digits
from fp4dse.tasks.data.images import Images, load_images
from fp4dse.tasks.data.shapes import NAME, SMALL, Shapes, load_shapes, parse_shapes
from fp4dse.tasks.task import Problem, Task


class Model(msgspec.Struct, frozen=True):
    """init: (images, seeds) -> parameters [S, …]; build: (parameters [L, …], numerics) -> module on images
    [L, B, H, W, C]; multiple: what height and width must be multiples of."""

    name: str
    init: Callable[[Images, Sequence[int]], dict[str, Tensor]]
    build: Callable[[dict[str, Tensor], LaneNumerics], nn.Module]
    multiple: int = 1

    def in_bf16(self, weights: dict[str, Tensor]) -> nn.Module:
        """One lane in BF16 that is not trained, as teachers are. weights: [1, …]."""
        numerics = LaneNumerics([Recipe.named("bf16")], [0])
        numerics.training = False
        return self.build(weights, numerics)

    def check(self, images: Images) -> None:
        """ConfigError for images that the model cannot take."""
        height, width, _ = images.shape
        self.check_size(height, width)

    def check_size(self, height: int, width: int) -> None:
        """The same, of their size."""
        if height % self.multiple or width % self.multiple:
            wanted = f"multiples of {self.multiple} for {self.name}; size=N makes all images N×N"
            raise ConfigError("height × width of the images", f"{height} × {width}", wanted)


class ImagePreset(msgspec.Struct, frozen=True):
    """A model with its training numbers. images: of the data set whose epochs `epochs` counts, until a path is given.
    size: what images in files of their own are scaled to, unless the path says otherwise. eval_rows,
    weight_decay, clip: as in Task.
    shapes: the procedural images that it is on, if any; drawn: those that it takes where nobody says which."""

    model: Model
    batch: int
    lr: float
    steps: int = 0
    epochs: int = 0
    images: int = 0
    decay: float = 0.9
    betas: tuple[float, float] = (0.9, 0.95)
    data: Callable[[], Images] = digits
    size: int | None = None
    eval_rows: int = 512
    weight_decay: float = 0.0
    clip: float | None = None
    shapes: Shapes | None = None
    drawn: Shapes = SMALL

    @property
    def all_steps(self) -> int:
        """Steps of the training."""
        return self.steps or self.epochs * (self.images // self.batch)

    @property
    def source(self) -> str:
        """The data, in a word."""
        if self.shapes is not None:
            return self.shapes.name
        return "digits" if self.data is digits else "images"

    @property
    def digest(self) -> str:
        """Of the data. Procedural images are not made for it."""
        return (self.shapes or self.data()).digest

    def on(self, path: str, name: str, classes: int = 1) -> Self:
        """This preset, called `name`, on the images at `path`, of at least so many classes, or on procedural ones.
        ConfigError for data that cannot be read or that the model cannot take."""
        if path.partition("?")[0] == NAME:
            return self._on_shapes(parse_shapes(path, self.drawn))
        data = partial(load_images, path, self.size)
        images = data()
        self.model.check(images)
        n = len(images.train)
        if images.classes < classes:
            raise ConfigError(f"classes in {path}", images.classes, f"{classes} or more")
        if n < self.batch:
            raise ConfigError(f"training images in {path}", n, f"{self.batch} or more, a batch of {name}")
        return msgspec.structs.replace(self, data=data, images=n, shapes=None)

    def _on_shapes(self, shapes: Shapes) -> Self:
        """On as many images as its steps read, so that none is read twice, unless these were too many to keep."""
        self.model.check_size(shapes.size, shapes.size)
        count = shapes.most(self.all_steps * self.batch)
        data = partial(load_shapes, shapes, count)
        return msgspec.structs.replace(self, data=data, steps=self.all_steps, images=count, shapes=shapes)

    def task(self, **of_family: Any) -> Task:
        """The Task of this preset. `of_family`: its name, loss and other fields that do not follow from the preset."""
        return Task(
            problem=partial(image_problem, self.model, self.data),
            model=self.model.build,
            digest_of=lambda: self.digest,
            steps=self.all_steps,
            batch=self.batch,
            lr=self.lr,
            betas=self.betas,
            decay=self.decay,
            weight_decay=self.weight_decay,
            clip=self.clip,
            eval_rows=self.eval_rows,
            **of_family,
        )


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
        raise ConfigError("--data", None, f"a PATH with {what}: none is bundled for this preset")

    return missing
