"""The features of the fused kernels that a population needs: what no lane does is left out when they are compiled."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fp4dse.kernels.quant.descriptor import FLOATS, INTS


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
    found = dict.fromkeys(Features._fields, False)
    for columns, table in (FLOATS, floats), (INTS, ints):
        for column, values in zip(columns.values(), table[:, : len(columns)].cpu().unbind(1), strict=True):
            if column.feature and column.needed(values):
                found[column.feature] = True
    return Features(**found)
