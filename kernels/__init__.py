"""The quantized-GEMM backend: reference definition, lane GEMM, rotations, counter-based random numbers, layers."""

from fp4dse.kernels.conv import QuantConv2d
from fp4dse.kernels.convert import Report, convert
from fp4dse.kernels.inspection.decompose import Decomposition, decompose, why_not_decomposed
from fp4dse.kernels.inspection.files import read_tensors
from fp4dse.kernels.inspection.tensors import inspect_file, inspect_tensor, statistics
from fp4dse.kernels.lanes import LaneNumerics
from fp4dse.kernels.layers import QuantLinear, add_bias
from fp4dse.kernels.ops.silu import silu
from fp4dse.kernels.ops.sums import lane_mean, lane_sum
from fp4dse.kernels.quant.backend import backend, why_not_compiled
from fp4dse.kernels.quant.quantize import Quantized, quantize

NUMERICS_REV = 3
"""Revision of what quantizers and layers compute; raised when a fix changes results."""

__all__ = [
    "NUMERICS_REV",
    "Decomposition",
    "LaneNumerics",
    "QuantConv2d",
    "QuantLinear",
    "Quantized",
    "Report",
    "add_bias",
    "backend",
    "convert",
    "decompose",
    "inspect_file",
    "inspect_tensor",
    "lane_mean",
    "lane_sum",
    "quantize",
    "read_tensors",
    "silu",
    "statistics",
    "why_not_compiled",
    "why_not_decomposed",
]
