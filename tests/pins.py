"""What must not change when the inside does: `python tests/pins.py > before.txt` on one commit, and again on another.

A line a fact, with a digest of its bits. Both must run on one machine: products of a CPU differ between processors.
Where lines differ, a commit changed what it computes, what it is called or what it stores.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from itertools import islice

import msgspec
import torch

from fp4dse.dse import QUANTIZERS, Space, recipe_files
from fp4dse.dse.rounding import Stochastic
from fp4dse.dse.rules.quantizers import quantizer_faults
from fp4dse.kernels import quantize
from fp4dse.kernels.vectors import with_whole_tiles
from fp4dse.results.store.schema import ROW
from fp4dse.sweeps.arguments import shipped_spaces
from fp4dse.tasks import Lane, get_task, train

TASKS = (
    "regression:smoke",
    "vision:smoke",
    "vision:resnet-smoke",
    "diffusion:smoke",
    "diffusion:dit-smoke",
    "language:smoke",
    "language:moe-smoke",
)
STEPS, SEEDS = 6, (0, 1)
MOST = 2_000
"""Recipes of a space that are looked at."""


def pins() -> Iterator[tuple[str, object]]:
    """(what, its value)."""
    for name, file in recipe_files().items():
        yield f"recipe {name}", (file.recipe.config_id, file.recipe.label(), sorted(file.recipe.columns().items()))
    for name, path in shipped_spaces().items():
        space = Space.load(path, shipped_spaces().get)
        yield f"space {name}", [recipe.config_id for recipe in islice(space.recipes(), MOST)]
    yield "columns of a row", [(field.name, str(field.type)) for field in ROW]
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    x = x * torch.exp2(torch.randn(64, 1, generator=torch.Generator().manual_seed(1)) * 8)
    for name, q in QUANTIZERS.items():
        by_chance = msgspec.structs.replace(q, rounding=Stochastic())
        for kind, of in ("", q), (" by chance", by_chance):
            if not q.is_plain and not quantizer_faults(of):
                yield f"quantizer {name}{kind}", quantize(with_whole_tiles(x, of), of).values
    for task in TASKS:
        short = msgspec.structs.replace(get_task(*task.split(":")), steps=STEPS)
        for name, file in recipe_files().items():
            lanes = [Lane(file.recipe, short.lr, seed) for seed in SEEDS]
            yield f"training {task} {name}", [(*lane.curve_loss, lane.val_loss) for lane in train(short, lanes).lanes]


def digest(value: object) -> str:
    data = value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode()
    return hashlib.sha256(data).hexdigest()[:16]


if __name__ == "__main__":
    torch.set_num_threads(1)
    wanted = sys.argv[1:]
    for what, value in pins():
        if not wanted or what.split()[0] in wanted:
            print(what, digest(value), flush=True)
