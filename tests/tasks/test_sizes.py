"""How many lanes fit and how many are fastest: a model from two peaks, and a search that stops where nothing is won."""

import re
import subprocess
import sys

import pytest
import torch

from fp4dse.dse import Recipe
from fp4dse.tasks import get_task
from fp4dse.tasks.engine import sizes
from fp4dse.tasks.engine.sizes import Memory, best_lanes, lanes_of, memory_of, plan_lanes

TASK, RECIPES = get_task("regression", "smoke"), [Recipe.named("bf16")]


def test_lanes_fit_into_the_planned_share_of_the_memory():
    model = Memory(fixed=1000, per_lane=100)
    assert model.lanes(2000 / sizes.SHARE) == 10
    assert model.lanes(1150 / sizes.SHARE) == 1
    assert model.lanes(1050 / sizes.SHARE) == 0


def test_the_model_follows_from_two_peaks(monkeypatch):
    monkeypatch.setattr(sizes, "peak_bytes", lambda task, recipes, device, lanes: 500 + 70 * lanes)
    assert memory_of(TASK, RECIPES, "cpu") == Memory(500, 70)
    assert plan_lanes(TASK, RECIPES, "cpu", memory=1200 / sizes.SHARE) == 10


@pytest.mark.parametrize(("room", "fit"), [(3, 3), (1, 1), (0.9, 0)])
def test_where_a_few_lanes_are_too_many_one_tells_how_many_fit(monkeypatch, room, fit):
    """A device that holds `room` lanes of 1000 bytes."""

    def peak(task, recipes, device, lanes):
        if lanes > room:
            raise torch.OutOfMemoryError
        return 1000 * lanes

    monkeypatch.setattr(sizes, "peak_bytes", peak)
    assert plan_lanes(TASK, RECIPES, "cpu", memory=1000 * room / sizes.SHARE) == fit


def test_what_does_not_grow_does_not_hide_what_does(monkeypatch):
    monkeypatch.setattr(sizes, "peak_bytes", lambda task, recipes, device, lanes: max(5000, 100 + 150 * lanes))
    assert memory_of(TASK, RECIPES, "cpu").per_lane == pytest.approx(150, rel=0.4)


PEAKS = """
from fp4dse.dse import Recipe
from fp4dse.tasks import get_task
from fp4dse.tasks.engine import sizes

print([sizes.peak_bytes(get_task("regression", "smoke"), [Recipe.named("bf16")], "cpu", lanes) for lanes in (2, 400)])
"""


def test_the_peak_of_a_real_population_grows_with_its_lanes():
    """In a process of its own: memory that was freed before would be taken first."""
    found = subprocess.run([sys.executable, "-c", PEAKS], capture_output=True, text=True, check=True).stdout
    few, many = map(int, re.findall(r"\d+", found))
    assert many > few


def test_the_search_stops_where_nothing_is_won(monkeypatch):
    asked = []

    def rate(task, recipes, device, lanes):
        asked.append(lanes)
        return {8: 100.0, 16: 190.0, 32: 300.0, 64: 301.0}[lanes]

    monkeypatch.setattr(sizes, "lanes_per_second", rate)
    monkeypatch.setattr(sizes, "peak_bytes", lambda task, recipes, device, lanes: 10 * lanes)
    assert best_lanes(TASK, RECIPES, "cpu") == 32
    assert asked == [8, 16, 32, 64]


def test_the_search_ends_with_the_memory(monkeypatch):
    monkeypatch.setattr(sizes, "lanes_per_second", lambda task, recipes, device, lanes: float(lanes))
    monkeypatch.setattr(sizes, "peak_bytes", lambda task, recipes, device, lanes: 10 * lanes)
    assert best_lanes(TASK, RECIPES, "cpu", memory=350) == 16


def test_measured_lanes_have_few_seeds_and_every_recipe():
    recipes = [Recipe.named(name) for name in ("nvfp4", "nvfp4-sr")]
    lanes = lanes_of(TASK, recipes, 10)
    assert len(set(lanes)) == 10
    assert {lane.seed for lane in lanes} == {0, 1, 2, 3}
    assert {lane.recipe for lane in lanes} == set(recipes)
