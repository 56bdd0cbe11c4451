"""A task that a user writes in plain torch: what a function `build()` of a file returns, as a Task.

    model    a function without arguments that makes the nn.Module: each seed has initial weights of its own
    train    (inputs, targets), tensors or arrays whose first axis counts the samples, or a Dataset of such pairs
    test     the same, held out
    loss     (what the model returns, targets) -> a scalar, the mean over the batch

and, if wanted, `metrics` (name -> the same, for the held-out data) and the training numbers of Task that NUMBERS names.
What is wrong with it is said in one line, when the file is read: two samples go through the model and the loss.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from fp4dse.dse import ConfigError
from fp4dse.kernels import LaneNumerics
from fp4dse.tasks.own.one_by_one import LaneOutputs, SequentialLanes, SequentialNumerics, initial, named, seeded
from fp4dse.tasks.task import Problem, Task

NEEDED = ("model", "train", "test", "loss")
NUMBERS: dict[str, tuple[Any, Any]] = {
    "steps": (int, 500),
    "batch": (int, 64),
    "lr": (float, 1e-3),
    "betas": (tuple[float, float], (0.9, 0.95)),
    "eps": (float, 1e-8),
    "weight_decay": (float, 0.0),
    "clip": (float | None, None),
    "warmup": (float, 0.0),
    "decay": (float, 0.0),
    "better": (str | None, None),
    "summary": (str, ""),
}
"""Field of Task -> its type, and its value if it is not given."""


class Data(msgspec.Struct, frozen=True):
    """Samples: x [n, …] and their targets y [n, …]."""

    x: Tensor
    y: Tensor


def plain_task(record: object, where: str, name: str, preset: str) -> Task:
    """The task that `build()` described. `where`: how the file and the function are named in what is said."""
    if not isinstance(record, Mapping):
        raise ConfigError(where, type(record).__name__, f"a dict with {', '.join(NEEDED)}")
    allowed = [*NEEDED, "metrics", *NUMBERS]
    for key in record:
        if key not in allowed:
            raise ConfigError(f"{where}: key", key, ", ".join(allowed))
    for key in NEEDED:
        if key not in record:
            raise ConfigError(f"{where}: {key}", None, f"a dict with {', '.join(NEEDED)}")
    make, loss, metrics = record["model"], record["loss"], dict(record.get("metrics", {}))
    if isinstance(make, nn.Module) or not callable(make):
        wanted = "a function that makes the module, such as `lambda: Net()`, so that each seed has weights of its own"
        raise ConfigError(f"{where}: model", type(make).__name__, wanted)
    for key, function in {"loss": loss, **metrics}.items():
        if not callable(function):
            raise ConfigError(f"{where}: {key}", type(function).__name__, "a function of (outputs, targets)")
    train, test = (_data(record[key], f"{where}: {key}") for key in ("train", "test"))
    numbers = {
        key: _number(record.get(key, default), f"{where}: {key}", type_) for key, (type_, default) in NUMBERS.items()
    }
    if not 1 <= numbers["batch"] <= len(train.x):
        raise ConfigError(f"{where}: batch", numbers["batch"], f"1 … {len(train.x)}, the samples in train")
    if numbers["steps"] < 1:
        raise ConfigError(f"{where}: steps", numbers["steps"], "1 or more")
    module = _checked_module(make, {"loss": loss, **metrics}, train, where)
    size = sum(p.numel() for p in module.parameters() if p.requires_grad)
    summary = numbers.pop("summary") or f"{type(module).__name__}, {size:,} parameters, {len(train.x)} samples"
    return Task(
        name=name,
        preset=preset,
        rev=1,
        summary=summary,
        problem=partial(_problem, make, train, test, where),
        model=partial(_model, make, where),
        loss=partial(_per_lane, loss),
        metrics={key: partial(_per_lane, metric) for key, metric in metrics.items()},
        digest_of=partial(_digest, train, test),
        eval_rows=numbers["batch"],
        size=size,
        one_by_one=True,
        **numbers,
    )


def _model(
    make: Callable[[], nn.Module], where: str, parameters: dict[str, Tensor], numerics: LaneNumerics
) -> SequentialLanes:
    assert isinstance(numerics, SequentialNumerics)
    return SequentialLanes(initial(make, 0), parameters, numerics, where)


def _problem(make: Callable[[], nn.Module], train: Data, test: Data, where: str, seeds: Sequence[int]) -> Problem:
    """The data, which all seeds share, and each seed's initial weights and buffers."""
    each = [named(initial(make, seed)) for seed in seeds]
    try:
        init = {name: torch.stack([of[name] for of in each]) for name in each[0]}
    except (KeyError, RuntimeError) as error:
        raise ConfigError(f"{where}: model", str(error), "a function that makes the same module every time") from None
    return Problem(train.x[None], train.y[None], test.x[None], test.y[None], init)


def _per_lane(function: Callable[[Any, Tensor], Tensor], outputs: LaneOutputs, targets: Tensor) -> Tensor:
    """The function of each lane's outputs and targets, its mean where it is one for each sample: float32 [L]."""
    pairs = zip(outputs.outputs, targets, strict=True)
    return torch.stack([torch.as_tensor(function(out, y)).to(torch.float32).mean() for out, y in pairs])


def _data(given: Any, where: str) -> Data:
    """Inputs and targets of tensors, arrays or a Dataset; float64 becomes float32."""
    wanted = "(inputs, targets), two tensors of the same length, or a Dataset of such pairs"
    if not isinstance(given, (tuple, list)):
        given = _read(given, where, wanted)
    if len(given) != 2 or not all(isinstance(part, (Tensor, np.ndarray)) for part in given):
        raise ConfigError(where, [type(part).__name__ for part in given], wanted)
    x, y = (torch.as_tensor(part).detach().cpu() for part in given)
    if not x.dim() or not y.dim() or len(x) != len(y) or not len(x):
        raise ConfigError(where, [list(x.shape), list(y.shape)], wanted)
    for part, said in ((x, "inputs"), (y, "targets")):
        broken = ~torch.isfinite(part).reshape(len(part), -1).all(dim=1)
        if broken.any():
            raise ConfigError(where, f"NaN or infinity in sample {int(broken.nonzero()[0])}", f"finite {said}")
    return Data(*(part.to(torch.float32) if part.dtype == torch.float64 else part for part in (x, y)))


def _read(dataset: Any, where: str, wanted: str) -> Any:
    """All samples of a Dataset, read once."""
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise ConfigError(where, type(dataset).__name__, wanted)
    with _failing_as(where, wanted):
        firsts = []
        for key in (0, 1):
            with seeded(torch.device("cpu"), key):
                firsts.append(default_collate([dataset[0]]))
        if not all(torch.equal(a, b) for a, b in zip(*firsts, strict=True)):
            better = "a Dataset without chance in it: it is read once (augment in the model's forward, in train mode)"
            raise ConfigError(where, "a sample that differs when it is read again", better)
        return default_collate([dataset[i] for i in range(len(dataset))])


def _number(value: object, where: str, type_: Any) -> Any:
    try:
        return msgspec.convert(value, type_)
    except msgspec.ValidationError as error:
        raise ConfigError(where, value, str(error)) from None


@contextmanager
def _warned_after() -> Iterator[None]:
    """Warnings wait until all is well: what is wrong is one line, without what torch thought of it before."""
    with warnings.catch_warnings(record=True) as held:
        warnings.simplefilter("always")
        yield
    for one in held:
        warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)


@_warned_after()
def _checked_module(
    make: Callable[[], nn.Module], functions: Mapping[str, Callable[..., Any]], train: Data, where: str
) -> nn.Module:
    """The module, after two samples went through it, loss and metrics. ConfigError for what does not work."""
    with _failing_as(f"{where}: model", "a function without arguments that runs"):
        module = initial(make, 0)
    if not isinstance(module, nn.Module):
        raise ConfigError(f"{where}: model", type(module).__name__, "a function that returns an nn.Module")
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    for name, p in trained:
        if p.dtype != torch.float32 or isinstance(p, nn.parameter.UninitializedParameter):
            kind = "a parameter of unknown shape" if p.dtype == torch.float32 else p.dtype
            raise ConfigError(f"{where}: model: {name}", kind, "torch.float32 (call .float() on the module)")
    if not trained:
        raise ConfigError(f"{where}: model", "no parameters", "a module with something to train")
    x, y = train.x[:2], train.y[:2]
    with seeded(torch.device("cpu"), 0):
        with _failing_as(f"{where}: model", f"a module that takes a batch of train's inputs, {_shape(x)}"):
            out = module.train()(x)
        for key, function in functions.items():
            with _failing_as(f"{where}: {key}", f"a function of what the model returns and of targets {_shape(y)}"):
                value = function(out, y)
            if key == "loss" and not (isinstance(value, Tensor) and value.numel() == 1):
                found = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ConfigError(f"{where}: loss", found, "a scalar tensor, the mean over the batch")
            if key == "loss" and not value.requires_grad:
                raise ConfigError(f"{where}: loss", "no gradient", "a loss that depends on the parameters")
    return module


@contextmanager
def _failing_as(where: str, accepted: str) -> Iterator[None]:
    """ConfigError in place of whatever the user's code raises."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(where, f"{type(error).__name__}: {error}", accepted) from None


def _shape(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def _digest(*data: Data) -> str:
    found = hashlib.sha256()
    for part in (tensor for of in data for tensor in (of.x, of.y)):
        found.update(_shape(part).encode())
        found.update(part.contiguous().view(torch.uint8).numpy().tobytes() if part.numel() else b"")
    return found.hexdigest()
