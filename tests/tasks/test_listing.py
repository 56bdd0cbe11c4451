"""The list of tasks has every preset, with the parameters that its models have and the data that it needs."""

import math

from fp4dse.tasks.catalogue import TASKS
from fp4dse.tasks.listing import NOTES, SECONDS, list_tasks


def test_every_preset_is_listed_with_its_parameters_or_the_data_that_it_needs():
    listed = {one.task: one for one in list_tasks()}
    assert list(listed) == [f"{task}:{preset}" for task, presets in TASKS.items() for preset in presets]
    assert set(SECONDS) | set(NOTES) <= set(listed)
    for one in listed.values():
        assert one.data == "bundled" or one.data.startswith("--data PATH with ")
        assert one.parameters or one.data != "bundled"
    assert listed["vision:cnn-paper"].data == "--data PATH with the files of CIFAR-10"
    assert listed["language:paper"].data == "--data PATH with 4,096 samples or more"  # a batch
    assert "memorises" in listed["vision:small"].note


def test_every_preset_that_shows_that_a_recipe_trains_has_its_seconds_on_a_cpu():
    """Without a number the list says that it is for a GPU, which a smoke preset never is."""
    smoke = {f"{task}:{preset}" for task, presets in TASKS.items() for preset in presets if preset.endswith("smoke")}
    assert smoke <= set(SECONDS)
    assert max(SECONDS[name] for name in smoke) < 10


def test_the_size_of_a_regression_is_that_of_its_weights():
    for preset in ("smoke", "small", "mlp", "gaussian-smoke"):
        task = TASKS["regression"][preset]
        assert task.size == sum(math.prod(weight.shape[1:]) for weight in task.problem([0]).init.values())
