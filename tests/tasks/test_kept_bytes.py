"""What a forward pass keeps is counted, in a training too, and counting changes nothing."""

import msgspec
import pytest
import torch
from torch import nn

from fp4dse.dse import Recipe
from fp4dse.sweeps.jobs.rows import result_rows
from fp4dse.tasks import Job, JobResult, Lane, LaneResult, get_task
from fp4dse.tasks.engine.kept import keeping
from fp4dse.tasks.engine.population import Population


def test_a_tensor_counts_once_and_parameters_do_not():
    layer, x = nn.Linear(8, 8), torch.randn(4, 8)
    with keeping(layer.parameters()) as kept:
        hidden = layer(x)
        y = hidden * hidden + torch.sin(hidden)
    assert kept.bytes() == x.nbytes + hidden.nbytes
    assert kept.bytes() == 0
    y.sum().backward()
    assert layer.weight.grad.abs().sum() > 0


def trained(preset="smoke", lanes=2) -> Population:
    """After one step."""
    recipe = Recipe.named("nvfp4-sr-rht").canonical()
    task = msgspec.structs.replace(get_task("language", preset), steps=2)
    p = Population(task, [Lane(recipe, 1e-2, seed) for seed in range(lanes)], "cpu")
    p.train_step(0)
    return p


def test_a_training_says_what_it_kept_and_has_the_same_bits(monkeypatch):
    counted = trained()
    assert trained("smoke+recompute").kept_bytes < 0.7 * counted.kept_bytes
    assert trained(lanes=4).kept_bytes == pytest.approx(2 * counted.kept_bytes, rel=0.01)
    first = counted.kept_bytes
    counted.train_step(1)
    assert counted.kept_bytes == first
    monkeypatch.setattr(Population, "_keeping", lambda self: None)
    bare = trained()
    bare.train_step(1)
    assert bare.kept_bytes is None
    assert torch.equal(bare.optimizer.flat, counted.optimizer.flat)


def test_rows_have_speed_and_memory():
    lane = LaneResult("done", None, 1.0, 1.0, 1.0, {}, [], [])
    done = JobResult([lane, lane], 4.0, 1.0, "none", "fp32", [], 7, kept_bytes=5)
    job = Job("language", "smoke", [Lane(Recipe.named("nvfp4"), 1e-2, seed) for seed in range(2)])
    context = {"tokens": 1000.0, "metric_name": None}
    assert [(row["tokens_per_s"], row["kept_bytes"]) for row in result_rows(job, done, context)] == [(500.0, 5)] * 2
    assert result_rows(job, done, {**context, "tokens": None})[0]["tokens_per_s"] is None
    done.lanes[1] = msgspec.structs.replace(lane, status="pruned")
    assert result_rows(job, done, context)[0]["tokens_per_s"] is None
