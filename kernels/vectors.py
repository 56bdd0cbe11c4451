"""Frozen vectors: an input, and what each named quantizer makes of it, for the self-test and for others' checks.

    python -m fp4dse.kernels.vectors

writes them again from the reference, after a quantizer was named or one was mended. What changes is then in the diff
of the tests that hold them to oracles; that the numbers of others stayed is said.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import torch

from fp4dse.dse import QUANTIZERS, Quantizer
from fp4dse.dse.quantizer import tile
from fp4dse.kernels.quant.quantize import quantize

VECTORS = Path(__file__).with_name("vectors.npz")
BLOCK_SCALED = {name: q for name, q in QUANTIZERS.items() if not q.is_plain}

ORACLES = "its elements and scales: gfloat, ml_dtypes, torchao (tests/kernels/test_oracles.py)"
TRANSCRIPTION = "a transcription of its definition by hand (tests/kernels/codecs)"


@cache
def vectors() -> dict[str, np.ndarray]:
    """`x` float32 [64, 128] (BF16 numbers), and for each named quantizer `NAME/values`, `/codes`, `/scales`.

    `NAME/oracle` says what the tests hold the reference to. Tiles of 128 are made of x with x below it.
    """
    with np.load(VECTORS) as file:
        return {key: file[key] for key in file.files}


def with_whole_tiles(x: torch.Tensor, quantizer: Quantizer) -> torch.Tensor:
    """The tensor that a quantizer makes its vectors of: x [rows, 128], and again below where a tile has more rows."""
    return x.repeat(max(1, -(-tile(quantizer.block) // len(x))), 1)


def make_vectors() -> dict[str, np.ndarray]:
    """The same from the reference of today; the tests hold the shipped file to it and to oracles."""
    generator = torch.Generator().manual_seed(2026)
    x = torch.randn(64, 128, generator=generator) * torch.exp2(torch.randn(64, 1, generator=generator) * 4)
    x = x.bfloat16().float()
    x[5], x[6] = 0, x[6] * 2.0**-120
    out = {"x": x.numpy()}
    for name, q in BLOCK_SCALED.items():
        got = quantize(with_whole_tiles(x, q), q)
        out[f"{name}/oracle"] = np.array(ORACLES if q.codec == "block" else TRANSCRIPTION)
        for field in ("values", "codes", "scales"):
            out[f"{name}/{field}"] = getattr(got, field).numpy()
    return out


def main() -> None:
    """Write the file, and say what is new in it or changed."""
    old, new = vectors() if VECTORS.exists() else {}, make_vectors()
    for name in sorted(old.keys() | new.keys()):
        if name not in old or name not in new:
            print(f"{name}: {'new' if name in new else 'gone'}")
        elif not np.array_equal(old[name], new[name], equal_nan=old[name].dtype.kind == "f"):
            print(f"{name}: changed")
    np.savez_compressed(VECTORS, **new)  # type: ignore[arg-type]
    print(f"{VECTORS.name}: {len(BLOCK_SCALED)} quantizers")


if __name__ == "__main__":
    main()
