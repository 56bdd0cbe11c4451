"""The 1,797 handwritten digits that scikit-learn ships: 8×8 pixels of 0 … 16 (UCI optical recognition of digits).

Its file is read, and nothing of it imported, which takes longer than many a job.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from fp4dse.tasks.data.images import Images, digest_of, moments
from fp4dse.tasks.draws import fixed_order

HELD_OUT = 360


@cache
def digits() -> Images:
    """In a fixed order, the last 360 held out. Mean and standard deviation are those of all images and pixels."""
    lines = torch.from_numpy(np.loadtxt(_file(), delimiter=",", dtype=np.uint8))
    pixels, labels = lines[:, :-1].reshape(-1, 8, 8, 1), lines[:, -1].to(torch.int64)
    order = fixed_order(len(pixels))
    mean, std = moments(pixels)
    pixels, labels = pixels[order], labels[order]
    parts = pixels[:-HELD_OUT], labels[:-HELD_OUT], pixels[-HELD_OUT:], labels[-HELD_OUT:]
    return Images(*parts, 10, mean, std, digest_of(*parts), top=16)


def _file() -> Path:
    """A line an image: 64 pixels and the digit. FileNotFoundError if scikit-learn keeps it elsewhere."""
    found = find_spec("sklearn")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("scikit-learn, which has the digits, is missing: `pip install scikit-learn`")
    return Path(found.origin).with_name("datasets") / "data" / "digits.csv.gz"
