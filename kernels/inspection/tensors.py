"""Statistics of a quantized tensor, number by number: the record behind `fp4dse tensor`.

Errors are relative to the tensor: mse = Σ(x̂−x)²/Σx², sqnr_db = −10·log10(mse), gain = ⟨x, x̂⟩/⟨x, x⟩, which is 1 for a
quantizer that shrinks nothing on average. Sums are taken in float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp4dse.dse import ConfigError, Quantizer
from fp4dse.kernels.inspection.decompose import finite, split, whole, why_not_decomposed
from fp4dse.kernels.inspection.files import read_tensors
from fp4dse.kernels.quant.counters import COUNTERS, count, largest_element
from fp4dse.kernels.quant.descriptor import descriptor
from fp4dse.kernels.quant.quantize import Quantized, quantize
from fp4dse.kernels.quant.spec.blocks import cut

DEFAULT_QUANTIZERS = ("mxfp4", "mxfp4-rceil", "nvfp4", "ue5m3-t448")


def inspect_file(path: str | Path, names: Sequence[str] | None = None) -> dict[str, Any]:
    """`rows`, one a tensor and named quantizer, and `skipped`: name -> why, for what is no floating-point tensor.

    names: of quantizers; by default DEFAULT_QUANTIZERS.

    Raises ConfigError for an unknown quantizer and for what `read_tensors` refuses.
    """
    quantizers = {name: Quantizer.named(name) for name in names or DEFAULT_QUANTIZERS}
    tensors = read_tensors(path)
    rows = [row for name, x in tensors.items() if isinstance(x, Tensor) for row in inspect_tensor(name, x, quantizers)]
    return {"file": str(path), "rows": rows, "skipped": {n: why for n, why in tensors.items() if isinstance(why, str)}}


def inspect_tensor(name: str, x: Tensor, quantizers: Mapping[str, Quantizer]) -> list[dict[str, Any]]:
    """A row a quantizer: tensor, shape, dtype, quantizer and what `statistics` finds, or in `note` why it refuses."""
    head = {"tensor": name, "shape": list(x.shape), "dtype": str(x.dtype).removeprefix("torch.")}
    x = x.detach().to(torch.float32)
    rows = []
    for label, quantizer in quantizers.items():
        try:
            found = statistics(x, quantizer)
        except ConfigError as error:
            found = dict.fromkeys(STATISTICS) | {"note": str(error)}
        rows.append({**head, "quantizer": label, **found})
    return rows


def statistics(x: Tensor, quantizer: Quantizer, *, seed: int = 0) -> dict[str, Any]:
    """Statistics of a quantizer on a finite tensor [..., K].

    bits           stored bits per element, without tensor scales
    mse, sqnr_db, gain   see above; None where they have no value (a tensor of zeros, no error at all)
    clipped, flushed, zeroed, saturated   shares, see counters.COUNTERS; None for a plain operand
    decomposition  shares of the error's energy by part and cross term, see decompose; None where there is no split
    note           why there is no decomposition, or None

    Raises ConfigError for NaN and Inf, in x or decoded, and for what `quantize` refuses.
    """
    x = finite(x)
    quantized = quantize(x, quantizer, seed=seed)
    original, decoded = x.double(), whole(x, quantized, quantizer)
    energy = float(original.square().sum())
    error = float((decoded - original).square().sum())
    mse = error / energy if energy else None
    why_not = why_not_decomposed(quantizer)
    shares = None if why_not else split(x, quantized, quantizer).shares()
    return {
        "bits": quantizer.bits_per_element,
        "mse": mse,
        "sqnr_db": -10 * math.log10(mse) if mse else None,
        "gain": float((original * decoded).sum()) / energy if energy else None,
        **counter_shares(x, quantized, quantizer),
        "decomposition": shares or None,
        "note": why_not,
    }


STATISTICS = ("bits", "mse", "sqnr_db", "gain", *COUNTERS, "decomposition", "note")
"""The keys of `statistics`."""


def counter_shares(x: Tensor, quantized: Quantized, quantizer: Quantizer) -> dict[str, float | None]:
    """COUNTERS as shares of elements or blocks; None each for a plain operand, which has no scale."""
    if quantized.scales is None:
        return dict.fromkeys(COUNTERS)
    scales = _per_element(quantized.scales, x)
    tensors = (x, quantized.elements, scales)
    blocks, q, scale = (cut(t.reshape(1, -1, x.shape[-1]), quantizer.block) for t in tensors)
    meta = {name: value[None] for name, value in quantized.meta.items()}
    tables, largest = descriptor([quantizer], x.device), largest_element(quantizer.codec, meta)
    counts = count(blocks, q, scale, quantized.tensor_scale.reshape(1, -1), *tables, largest)
    sizes = {"elements": x.numel(), "blocks": blocks.shape[1]}
    return {name: int(counts[name]) / sizes[whole] for name, whole in COUNTERS.items()}


def _per_element(scales: Tensor, x: Tensor) -> Tensor:
    """Block scales repeated along every axis until they have x's shape."""
    for axis, (have, want) in enumerate(zip(scales.shape, x.shape, strict=True)):
        scales = scales.repeat_interleave(want // have, axis)
    return scales
