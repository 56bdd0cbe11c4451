"""The 1,797 handwritten digits that scikit-learn ships: 8×8 pixels of 0 … 16 (UCI optical recognition of digits)."""

from __future__ import annotations

from functools import cache

import torch

from fp4dse.tasks.data.images import Images, digest_of, fixed_order, moments

HELD_OUT = 360


@cache
def digits() -> Images:
    """In a fixed order, the last 360 held out. Mean and standard deviation are those of all images and pixels."""
    from sklearn.datasets import load_digits

    data = load_digits()
    pixels = torch.tensor(data.images).to(torch.uint8)[..., None]
    labels = torch.tensor(data.target, dtype=torch.int64)
    order = fixed_order(len(pixels))
    mean, std = moments(pixels)
    pixels, labels = pixels[order], labels[order]
    parts = pixels[:-HELD_OUT], labels[:-HELD_OUT], pixels[-HELD_OUT:], labels[-HELD_OUT:]
    return Images(*parts, 10, mean, std, digest_of(*parts), top=16)
