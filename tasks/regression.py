"""Regression: a student MLP that learns the function of a teacher MLP, and the linear Gaussian task of arXiv
2509.17791.

Teacher–student (specification: arXiv 2609.02846): X ~ N(0,1), teacher weights N(0, 1/fan_in), SiLU between layers, no
bias, student = teacher + noise/sqrt(fan_in) · N(0,1), targets without noise, AdamW at a constant learning rate without
weight decay, unless the preset says otherwise. Everything is drawn per seed.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from fp4dse.dse.layers.place import Place
from fp4dse.kernels import LaneNumerics, QuantLinear, silu
from fp4dse.kernels.ops.philox import STREAMS, normal
from fp4dse.kernels.ops.squared_error import mean_squared_error
from fp4dse.tasks.data.tabular import Table, read_table
from fp4dse.tasks.draws import seed_keys
from fp4dse.tasks.task import Problem, Task

REV = 1
REV_OF = {"mlp": 2}
"""Of presets that changed where others did not, so that their rows are compared with none of before: `mlp` had no
weight decay."""


class Mlp(nn.Module):
    """Linear layers with SiLU between them: x [L, B, in] -> [L, B, out]. Parameters `w0`, `w1` …, and `b0` … if any.

    None of them is an embedding or a head, which recipes keep precise: all are quantized. Each is a block.
    """

    def __init__(self, parameters: dict[str, Tensor], numerics: LaneNumerics) -> None:
        super().__init__()
        depth = sum(name.startswith("w") for name in parameters)
        self.layers = nn.ModuleList(
            QuantLinear(
                parameters[f"w{i}"], parameters.get(f"b{i}"), numerics, i, Place("linear", i, depth, name=f"w{i}")
            )
            for i in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x) if i == 0 else layer(silu(x))
        return x


def teacher_student(
    widths: Sequence[int], n_train: int, n_val: int, noise: float, label_noise: float, seeds: Sequence[int]
) -> Problem:
    """The teacher–student problem for each seed; `widths` = in, hidden …, out. label_noise: standard deviation of what
    is added to the targets of the training samples, as a share of theirs. Held-out targets have none."""
    keys = seed_keys(seeds)

    def draw(stream: str, site: int, *shape: int) -> Tensor:
        return normal(keys, STREAMS[stream], 0, site, prod(shape)).view(-1, *shape)

    teacher, student = {}, {}
    for i, (fan_in, fan_out) in enumerate(itertools.pairwise(widths)):
        teacher[f"w{i}"] = draw("data", 16 + i, fan_out, fan_in) / fan_in**0.5
        student[f"w{i}"] = teacher[f"w{i}"] + noise / fan_in**0.5 * draw("init", i, fan_out, fan_in)
    x_train, x_val = draw("data", 0, n_train, widths[0]), draw("data", 1, n_val, widths[0])
    y_train = _teach(teacher, x_train)
    if label_noise:
        y_train += label_noise * y_train.std(dim=(1, 2), keepdim=True) * draw("data", 2, *y_train.shape[1:])
    return Problem(x_train, y_train, x_val, _teach(teacher, x_val), student)


def _teach(weights: dict[str, Tensor], x: Tensor) -> Tensor:
    """Targets, seed by seed: a batched product would depend on how many seeds there are."""
    targets = []
    for seed in range(len(x)):
        h = x[seed].double()
        for i in range(len(weights)):
            h = (h if i == 0 else h * torch.sigmoid(h)) @ weights[f"w{i}"][seed].double().T
        targets.append(h.float())
    return torch.stack(targets)


def gaussian(width: int, n_train: int, n_val: int, seeds: Sequence[int]) -> Problem:
    """y = Xw with X, w ~ N(0,1), shared by all seeds; one Linear with bias from uniform ±1/sqrt(width) weights."""
    shared = torch.zeros(1, dtype=torch.int64)
    x = normal(shared, STREAMS["data"], 0, 0, (n_train + n_val) * width).view(1, -1, width)
    w = normal(shared, STREAMS["data"], 0, 1, width).view(width, 1)
    y = (x[0].double() @ w.double()).float()[None]
    keys = seed_keys(seeds)
    weight = normal(keys, STREAMS["init"], 0, 0, width).view(-1, 1, width) / (3 * width) ** 0.5
    init = {"w0": weight, "b0": torch.zeros(len(keys), 1)}
    return Problem(x[:, :n_train], y[:, :n_train], x[:, n_train:], y[:, n_train:], init)


def table(hidden: Sequence[int], found: Table, seeds: Sequence[int]) -> Problem:
    """A table of the user's, shared by all seeds; weights N(0, 1/fan_in) per seed, those of the last layer a tenth of
    that, and biases of zero."""
    keys = seed_keys(seeds)
    widths = (found.train_x.shape[1], *hidden, 1)
    init = {}
    for i, (fan_in, fan_out) in enumerate(itertools.pairwise(widths)):
        std = fan_in**-0.5 * (0.1 if i == len(hidden) else 1.0)
        init[f"w{i}"] = (std * normal(keys, STREAMS["init"], 0, i, fan_out * fan_in)).view(-1, fan_out, fan_in)
        init[f"b{i}"] = torch.zeros(len(keys), fan_out)
    return Problem(found.train_x[None], found.train_y[None], found.val_x[None], found.val_y[None], init)


def _parameters(widths: Sequence[int], biases: bool) -> int:
    """Number of parameters of an MLP."""
    return sum(fan_in * fan_out + biases * fan_out for fan_in, fan_out in itertools.pairwise(widths))


def teacher_task(
    preset: str,
    widths: tuple[int, ...],
    n: tuple[int, int],
    batch: int,
    steps: int,
    noise: float = 0.25,
    label_noise: float = 0.0,
    **numbers: Any,
) -> Task:
    """A teacher–student task: widths from input to output, n samples to train on and held out, noise of the start and
    of the labels. `numbers`: further fields of the Task."""
    shape = "-".join(map(str, widths))
    noisy = f", labels with {100 * label_noise:g} % noise" if label_noise else ""
    return _task(
        preset,
        f"teacher–student MLP {shape}, {n[0]} samples{noisy}",
        f"teacher-student {shape} {n} {noise}" + (f" {label_noise}" if label_noise else ""),
        problem=partial(teacher_student, widths, *n, noise, label_noise),
        steps=steps,
        batch=batch,
        lr=2e-3,
        size=_parameters(widths, False),
        **numbers,
    )


def _gaussian_task(preset: str, width: int, n: tuple[int, int], batch: int, steps: int) -> Task:
    return _task(
        preset,
        f"linear {width}-1 on Gaussian data, {n[0]} samples",
        f"gaussian {width} {n}",
        problem=partial(gaussian, width, *n),
        steps=steps,
        batch=batch,
        lr=1e-2,
        betas=(0.9, 0.999),
        size=_parameters((width, 1), True),
    )


def _task(preset: str, summary: str, data: str, **numbers: Any) -> Task:
    """A task of an MLP. data: text from which the digest follows, as the data do."""
    digest = hashlib.sha256(data.encode()).hexdigest()[:16]
    return Task(
        name="regression",
        preset=preset,
        rev=REV_OF.get(preset, REV),
        summary=summary,
        model=Mlp,
        loss=mean_squared_error,
        rounds_inputs=True,
        takes_bf16=True,
        digest_of=lambda: digest,
        **numbers,
    )


PRESETS = {
    task.preset: task
    for task in (
        teacher_task("smoke", (32, 32, 16), (256, 128), 32, 40),
        teacher_task("quickstart", (64, 64, 32), (4096, 512), 64, 240, noise=1.0, label_noise=0.3, decay=0.9),
        teacher_task("small", (256, 256, 64), (2048, 1024), 128, 500),
        teacher_task(
            "deep",
            (64, 128, 128, 128, 32),
            (16_384, 1024),
            128,
            800,
            noise=1.0,
            label_noise=0.3,
            decay=0.9,
            weight_decay=0.1,
        ),
        teacher_task("mlp", (256,) * 5, (4096, 1024), 512, 1000, noise=1.0, weight_decay=0.3),
        _gaussian_task("gaussian-smoke", 64, (1024, 256), 128, 40),
        _gaussian_task("gaussian", 1024, (80_000, 20_000), 4096, 400),
    )
}
"""`quickstart` starts further from the teacher than the fixture, so that BF16 keeps an error to compare with.
`small` is the published teacher–student fixture. `deep` also sees the backward pass: its labels are noisy, so that
gradients stay, and its learning rate falls, so that they average out. `mlp` is one of the size at which the engine's
speed is stated; without its weight decay BF16's loss is twice as high. `gaussian` is the paper's Gaussian regression at
its size."""

HIDDEN: dict[str, tuple[int, ...]] = {
    "smoke": (32,),
    "quickstart": (64,),
    "small": (256,),
    "deep": (128, 128, 128),
    "mlp": (256, 256, 256),
    "gaussian-smoke": (),
    "gaussian": (),
}
"""Preset -> hidden widths of its model on a table of the user's."""


def on_data(preset: str, path: str) -> Task:
    """The preset on `FILE:COLUMN`. ConfigError on what cannot be read."""
    found = read_table(path)
    rows, features = found.train_x.shape
    widths = (features, *HIDDEN[preset], 1)
    shape = "-".join(map(str, widths))
    return msgspec.structs.replace(
        PRESETS[preset],
        summary=f"{found.name}, {rows} rows, MLP {shape}",
        problem=partial(table, HIDDEN[preset], found),
        digest_of=lambda: found.digest,
        size=_parameters(widths, True),
        samples=lambda: rows,
    )
