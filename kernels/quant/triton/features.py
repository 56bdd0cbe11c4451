"""The features of the fused kernels that a population needs: what no lane does is left out when they are compiled."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fp4dse.kernels.quant.descriptor import FLOATS, INTS

WIDE = 2.0**100
"""Scale formats that reach beyond are rounded by the kernel's long way."""

TIES = ("log_ties", "half_away")
"""Columns of ties that are not to even."""


class Features(NamedTuple):
    """The features that some lane of a descriptor table needs; the rest is left out of the kernel when it is compiled.

    scales: the encode convention, hybrid, rounded-up and BF16 or FP32 scales; ties: half-away and logarithmic ones
    """

    tensor_scale: bool
    stochastic: bool
    adaptive: bool
    scales: bool
    ties: bool


def features_of(floats: Tensor, ints: Tensor) -> Features:
    """The features of descriptor tables; reads them back from the device."""
    f = dict(zip(FLOATS, floats[:, : len(FLOATS)].cpu().unbind(1), strict=True))
    i = dict(zip(INTS, ints.cpu().unbind(1), strict=True))
    scales, ties = (any(bool(i[n].any()) for n in of) for of in (("encode", "hybrid", "scale_up"), TIES))
    return Features(
        tensor_scale=bool(f["tensor_target"].any()),
        stochastic=bool(i["stochastic"].any()),
        adaptive=bool(i["adapt"].any()),
        scales=scales or bool((f["scale_max"] > WIDE).any()),
        ties=ties,
    )
