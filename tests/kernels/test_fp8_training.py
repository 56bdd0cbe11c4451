"""How much of the operands of a training FP8 holds: all but what is nearly zero, once there is a step before."""

from collections import defaultdict

import torch
import torch.nn.functional as F
from msgspec.structs import replace

from fp4dse.dse import Recipe
from fp4dse.kernels import stage
from fp4dse.tasks import get_task
from fp4dse.tasks.engine.lane_counts import lanes_of
from fp4dse.tasks.engine.population import Population
from fp4dse.tasks.task import with_steps

STEPS = 3
TILE = 64
"""Rows and columns of a tile of the result (ops/fp8/wide.py)."""


def lines_with_a_flag(shift):
    """Which lines of tiles have a flag, of one lane."""
    lines = (shift.flags[0] > 0).any(1)
    return F.pad(lines, (0, -len(lines) % TILE)).view(-1, TILE).any(1)


def test_a_training_mends_nearly_no_tile_after_its_first_step(on_units, any_size, monkeypatch):
    """A decoder in MXFP4 with BF16 between its layers. In the first step powers are 1, and gradients are far below."""
    shares, step = defaultdict(list), 0
    multiply = stage.Stage.multiply

    def watched(self, a, b, *more):
        shifts = [of.terms[0].shift for of in (a, b)]
        if None not in shifts:
            rows, columns = map(lines_with_a_flag, shifts)
            shares[step > 0, self.name].append((rows[:, None] | columns[None, :]).float().mean())
        return multiply(self, a, b, *more)

    monkeypatch.setattr(stage.Stage, "multiply", watched)
    task = with_steps(get_task("language", "small+bf16"), 100)
    population = Population(task, lanes_of(task, [replace(Recipe.named("mxfp4"), gemm="fp8-exact")], 1), "cpu")
    for step in range(STEPS):
        population.train_step(step)
    found = {of: torch.stack(each) for of, each in shares.items()}
    assert {name for _, name in found} == {"fprop", "dgrad", "wgrad"}
    assert float(found[False, "fprop"].mean()) == 0
    assert float(found[False, "wgrad"].mean()) == 1
    for name in ("fprop", "dgrad", "wgrad"):
        assert float(found[True, name].mean()) <= 0.01
