"""The table of named quantizers in docs/numerics.md: `python -m fp4dse.kernels.inspection.catalogue` prints it."""

from __future__ import annotations

import torch

from fp4dse.dse import QUANTIZERS
from fp4dse.dse.own_formats import element_name
from fp4dse.dse.quantizer import Quantizer, block_name
from fp4dse.dse.scale import scale_name
from fp4dse.kernels.quant.quantize import quantize


def gaussian_error(quantizer: Quantizer, rows: int = 2048) -> float:
    """Relative squared error on standard normal numbers [rows, 2048], always the same ones."""
    x = torch.randn(rows, 2048, generator=torch.Generator().manual_seed(0))
    return float(((quantize(x, quantizer).values - x) ** 2).sum() / (x**2).sum())


def table(rows: int = 2048) -> str:
    """Markdown, one line a named quantizer; its error is that of so many rows."""
    lines = ["| name | element | block | scale | tensor scale | range | bits | error |", "|" + " --- |" * 8]
    for name, q in QUANTIZERS.items():
        q = q.canonical()
        target = f"{q.tensor_scale.target:g}" if q.tensor_scale else "–"
        stored = ["–"] * 4 if q.is_plain else [block_name(q.block), scale_name(q.scale), target, q.range]
        error = gaussian_error(q, rows)
        cells = [
            f"`{name}`",
            element_name(q.element),
            *stored,
            f"{q.bits_per_element:.4g}",
            f"{error:.2e}" if error else "0",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
