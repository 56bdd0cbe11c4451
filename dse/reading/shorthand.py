"""Reading plain data as the records of a recipe. Shorthand that files may use is expanded here and nowhere else:

* a quantizer, scale, tensor scale, rounding, outlier treatment, rotation, relaxation or design may be given by name,
  and so may channels that are treated apart;
* `{ like = "nvfp4", rounding = "stochastic" }` is a named quantizer with some fields changed.
"""

from __future__ import annotations

import typing

import msgspec

from fp4dse.dse.channels import CHANNEL_NAMES, Channels
from fp4dse.dse.errors import ConfigError, at_key
from fp4dse.dse.estimator import RELAXATION_NAMES, SCALE_RELAXATION_NAMES, Relaxation, ScaleRelaxation
from fp4dse.dse.formats import ELEMENTS, PLAIN
from fp4dse.dse.inject import INJECT_NAMES, Inject
from fp4dse.dse.layers.precision import Finish
from fp4dse.dse.noise import NOISE_NAMES, Noise
from fp4dse.dse.optimizer import OPTIMIZER_NAMES, Optimizer
from fp4dse.dse.oscillation import RAMPING_NAMES, RESET_NAMES, Ramping, Reset
from fp4dse.dse.outliers import OUTLIER_NAMES, Outliers
from fp4dse.dse.own_formats import Element
from fp4dse.dse.quantizer import Quantizer
from fp4dse.dse.quantizers import QUANTIZERS
from fp4dse.dse.record import (
    NotNegative,
    Part,
    Positive,
    accepted,
    field_types,
    options,
    part_types,
    required_fields,
    takes,
)
from fp4dse.dse.rollout import ROLLOUT_NAMES, Rollout
from fp4dse.dse.rounding import ROUNDING_NAMES, Rounding
from fp4dse.dse.scale import SCALE_NAMES, TENSOR_SCALE_NAMES, Scale, TensorScale
from fp4dse.dse.schedule import SCHEDULE_NAMES, Schedule
from fp4dse.dse.space.design import DESIGN_NAMES, Design
from fp4dse.dse.stages import ROTATION_NAMES, Hadamard
from fp4dse.dse.training import CORESET_NAMES, DISTILL_NAMES, Coreset, Distill, Growth

NAMES: dict[typing.Any, dict[str, typing.Any]] = {
    Quantizer: QUANTIZERS,
    Scale: SCALE_NAMES,
    TensorScale | None: TENSOR_SCALE_NAMES,
    Rounding: ROUNDING_NAMES,
    Outliers: OUTLIER_NAMES,
    Hadamard | None: ROTATION_NAMES,
    Channels: CHANNEL_NAMES,
    Relaxation: RELAXATION_NAMES,
    ScaleRelaxation: SCALE_RELAXATION_NAMES,
    Design: DESIGN_NAMES,
    Optimizer: {"task": None, **OPTIMIZER_NAMES},
    Schedule: {"task": None, **SCHEDULE_NAMES},
    Reset: {"none": None, **RESET_NAMES},
    Ramping: {"none": None, **RAMPING_NAMES},
    Rollout | None: {"trainer": None, **ROLLOUT_NAMES},
    Inject | None: {"none": None, **INJECT_NAMES},
    Noise | None: {"none": None, **NOISE_NAMES},
    Coreset | None: {"none": None, **CORESET_NAMES},
    Distill | None: {"none": None, **DISTILL_NAMES},
    Finish | None: {"none": None},
    NotNegative | None: {"task": None},
    Positive | None: {"task": None},
    Growth: {"none": None},
}
"""Type of a field -> what may stand there by name."""


def read(value: object, type_: typing.Any, where: str, *keys: str) -> typing.Any:
    """Plain data as what a field of `type_` holds. ConfigError names `where` (the file) and the path of `keys`."""
    if isinstance(value, str) and value in NAMES.get(type_, {}):
        return NAMES[type_][value]
    if isinstance(value, dict) and (parts := part_types(type_)):
        return _read_part(value, parts, where, *keys)
    if isinstance(value, list) and tuple in takes(type_).classes:
        value = tuple(value)
    if not takes(type_).fits(value):
        raise ConfigError(at_key(where, *keys), value, _in_words(type_))
    return value


def _read_part(data: dict[str, typing.Any], parts: list[type[Part]], where: str, *keys: str) -> Part:
    """The table as one of `parts`, which its tag picks where there are several."""
    data, cls = dict(data), parts[0]
    if tag_field := cls.__struct_config__.tag_field:
        tags = {str(part.__struct_config__.tag): part for part in parts}
        tag = data.pop(tag_field, None)
        if not isinstance(tag, str) or tag not in tags:
            raise ConfigError(at_key(where, *keys, tag_field), tag, ", ".join(tags))
        cls = tags[tag]
    if "like" in data and cls in (Quantizer, Rollout):
        name = data.pop("like")
        if cls is Rollout and name not in ROLLOUT_NAMES:
            raise ConfigError(at_key(where, *keys, "like"), name, ", ".join(ROLLOUT_NAMES))
        base: Part = ROLLOUT_NAMES[name] if cls is Rollout else read(name, Quantizer, where, *keys, "like")
        return msgspec.structs.replace(base, **read_fields(data, cls, where, *keys))
    fields = read_fields(data, cls, where, *keys)
    for name in required_fields(cls):
        if name not in fields:
            raise ConfigError(at_key(where, *keys, name), None, _in_words(field_types(cls)[name]))
    try:
        return cls(**fields)
    except ConfigError as error:  # of a record whose fields have to fit each other
        raise ConfigError(at_key(where, *keys, error.where), error.found, error.accepted) from None


def read_fields(data: dict[str, typing.Any], cls: type[Part], where: str, *keys: str) -> dict[str, typing.Any]:
    """Some fields of a record, each read as its type; ConfigError on a field that `cls` does not have."""
    known = field_types(cls)
    for key in data:
        if key not in known:
            raise ConfigError(at_key(where, *keys, key), key, ", ".join(known) or "no fields")
    return {key: read(value, known[key], where, *keys, key) for key, value in data.items()}


def _in_words(type_: typing.Any) -> str:
    own = {Element: "elements", Scale: "scales"}.get(type_)
    words = [f"or a name that the file defines in [{own}.NAME]"] if own else []
    if type_ is Element:
        return ", ".join([*ELEMENTS, *PLAIN, *words])
    if type_ not in NAMES:
        return accepted(type_)
    others = [option for option in options(type_) if option is not type(None)]
    return ", ".join([*NAMES[type_], *words, "or a table" if part_types(type_) else accepted(others[0])])
