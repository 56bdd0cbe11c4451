"""A plan holds every missing lane exactly once, in jobs that one worker can train in lock-step."""

import math
from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from fp4dse.dse import ConfigError, Quantizer, Recipe, Space, recipe_files, recipe_from_dict, recipe_to_dict
from fp4dse.dse.optimizer import AdamW, StableSPAM
from fp4dse.dse.scale import TensorScale
from fp4dse.dse.training import Training
from fp4dse.dse.tuning import tuning_class
from fp4dse.sweeps.arguments import find_space
from fp4dse.sweeps.jobs.machine import Machine
from fp4dse.sweeps.planning.halving import Halving
from fp4dse.sweeps.planning.plan import SHARE, Piece, cut, plan, uses_random_bits
from fp4dse.tasks import get_task
from fp4dse.tasks.job import Lane

TASKS = [get_task("regression", "quickstart"), get_task("vision", "quickstart")]
RECIPES = [file.recipe for file in recipe_files().values()]
SPACE = list(find_space("quickstart").recipes())


def make(recipes=SPACE, tasks=TASKS, seeds=(0, 1, 2), lrs=None, stored=(), workers=1, max_lanes=None, **more):
    machine = Machine("cpu", 1, [{}] * workers)
    sizes = {(task.name, task.preset): max_lanes for task in tasks if max_lanes}
    is_stored = lambda task, lane: (task.name, lane) in stored  # noqa: E731
    return plan(recipes, tasks, seeds=seeds, lrs=lrs, is_stored=is_stored, machine=machine, sizes=sizes, **more)


def lanes(planned) -> Counter:
    return Counter((job.task, job.preset, lane) for job in planned.jobs for lane in job.lanes)


@settings(max_examples=30, deadline=None)
@given(
    recipes=st.lists(st.sampled_from(RECIPES), max_size=8),
    seeds=st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True),
    lrs=st.lists(st.sampled_from([1e-3, 2e-3, 1e-2]), min_size=1, max_size=3, unique=True),
    max_lanes=st.integers(1, 40),
)
def test_every_lane_is_planned_exactly_once(recipes, seeds, lrs, max_lanes):
    planned = make(recipes, seeds=seeds, lrs=lrs, max_lanes=max_lanes)
    configs = {recipe.canonical() for recipe in [*recipes, Recipe.named("bf16")]}
    configs |= {recipe.baseline() for recipe in recipes}
    expected = {
        (task.name, task.preset, Lane(recipe, lr, seed))
        for task in TASKS
        for recipe in configs
        for lr in lrs
        for seed in seeds
    }
    assert lanes(planned) == Counter(dict.fromkeys(expected, 1))
    assert planned.asked == planned.left == len(expected)
    assert max(len(job.lanes) for job in planned.jobs) <= max_lanes


SPAM = Training(optimizer=StableSPAM())


def test_bf16_is_planned_under_every_training_side_that_recipes_have():
    scaled = replace(Recipe.named("nvfp4"), training=Training(optimizer=AdamW(), loss_scale=1024.0))
    planned = make([replace(Recipe.named(name), training=SPAM) for name in ("nvfp4", "mxfp4")] + [scaled])
    matched = replace(Recipe.named("bf16"), training=SPAM)
    found = Counter(lane.recipe for job in planned.jobs for lane in job.lanes if lane.recipe.is_plain)
    assert found == {Recipe.named("bf16"): 6, matched: 6}  # tasks × seeds
    first = planned.jobs[:4]
    assert {lane.recipe for job in first for lane in job.lanes} == set(found)
    asked = make([matched], halving=Halving())
    assert not any(job.rungs for job in asked.jobs)


def test_a_job_holds_one_structural_signature():
    for job in make().jobs:
        assert len({lane.recipe.signature() for lane in job.lanes}) == 1


def test_the_baseline_is_planned_for_every_task_rate_and_seed_though_the_space_lacks_it():
    planned = make([Recipe.named("nvfp4")], seeds=(4, 7), lrs=[1e-3, 1e-2])
    baseline = Recipe.named("bf16").canonical()
    found = {(task, lane.lr, lane.seed) for task, _, lane in lanes(planned) if lane.recipe == baseline}
    assert found == {(task.name, lr, seed) for task in TASKS for lr in (1e-3, 1e-2) for seed in (4, 7)}


def test_baselines_start_first_and_the_longest_jobs_next():
    jobs = make().jobs
    steps = {task.name: task.steps for task in TASKS}
    plain = [job.lanes[0].recipe.is_plain for job in jobs]
    sizes = [len(job.lanes) * steps[job.task] for job in jobs if not job.lanes[0].recipe.is_plain]
    assert plain == sorted(plain, reverse=True)
    assert sizes == sorted(sizes, reverse=True)


def test_what_trains_nothing_is_planned_at_one_rate_and_starts_behind_the_baselines():
    space, task = list(find_space("finetune").recipes()), get_task("finetune", "smoke")
    jobs = make(space, tasks=[task], seeds=(0, 1), lrs=[1e-4, 4e-4, 1.6e-3]).jobs
    assert [job.turn for job in jobs] == sorted(job.turn for job in jobs)
    untrained = [recipe for recipe in space if recipe.training.trains == "none"]
    assert len(untrained) == 5
    for recipe in untrained:
        [job] = [job for job in jobs if any(lane.recipe == recipe for lane in job.lanes)]
        assert job.turn == 1
        assert [(lane.lr, lane.seed) for lane in job.lanes] == [(1e-4, 0), (1e-4, 1)]
    trained = [job for job in jobs if job.turn == 2]
    assert all({lane.lr for lane in job.lanes} == {1e-4, 4e-4, 1.6e-3} for job in trained)
    assert trained


def test_the_same_question_gives_the_same_jobs():
    assert make(workers=2) == make(list(SPACE), workers=2)


def test_each_task_is_trained_at_its_own_learning_rate_unless_one_is_given():
    untuned = [msgspec.structs.replace(task, rates={}) for task in TASKS]
    planned = {(job.task, lane.lr) for job in make(tasks=untuned).jobs for lane in job.lanes}
    assert planned == {(task.name, task.lr) for task in untuned}
    assert {lane.lr for job in make(lrs=[0.5]).jobs for lane in job.lanes} == {0.5}


def test_where_a_preset_is_tuned_each_class_of_recipes_has_its_own_rate():
    rates = {"bf16": 0.1, "forward": 0.2, "backward": 0.3, "stable-spam": 0.4}
    forward_bf16 = msgspec.structs.replace(Recipe.named("nvfp4"), fprop=Recipe.named("bf16").fprop)
    recipes = [Recipe.named("nvfp4"), forward_bf16, Recipe.named("nvfp4-stable-spam")]
    tuned = [msgspec.structs.replace(TASKS[0], rates=rates)]
    planned = {lane.recipe.config_id: lane.lr for job in make(recipes, tasks=tuned).jobs for lane in job.lanes}
    of = dict(zip(["bf16", "forward", "backward", "stable-spam"], [Recipe.named("bf16"), *recipes], strict=True))
    assert {name: planned[recipe.canonical().config_id] for name, recipe in of.items()} == rates


def test_what_is_stored_is_not_planned_again():
    everything = lanes(make())
    half = {(task, lane) for index, (task, _, lane) in enumerate(everything) if index % 2}
    rest = make(stored=half)
    assert {(task, lane) for task, _, lane in lanes(rest)} == {(task, lane) for task, _, lane in everything} - half
    assert (rest.asked, rest.stored) == (len(everything), len(half))
    assert make(stored={(task, lane) for task, _, lane in everything}).jobs == []


def test_lanes_that_draw_no_random_bits_are_kept_together():
    mixed = 0
    planned = make(max_lanes=12)
    for job in planned.jobs:
        mixed += len({uses_random_bits(lane.recipe) for lane in job.lanes}) > 1
    assert mixed <= planned.populations


def test_few_jobs_for_two_workers_on_the_quickstart():
    planned = make(workers=2)
    assert planned.asked == 2 * 3 * (48 + 1)
    assert planned.populations <= len(planned.jobs) <= 2 * planned.populations


pieces = st.lists(
    st.builds(
        lambda lanes, steps, fewest, more: Piece(False, list(range(lanes)), steps, fewest, fewest + more),
        lanes=st.integers(1, 300),
        steps=st.integers(1, 500),
        fewest=st.integers(1, 30),
        more=st.integers(0, 60),
    ),
    min_size=1,
    max_size=6,
)


@given(pieces, st.integers(1, 64))
def test_cutting_keeps_order_and_bounds(populations, workers):
    parts: dict[int, list[list[int]]] = {}
    for number, part in cut(populations, workers):
        parts.setdefault(number, []).append(part)
    for number, piece in enumerate(populations):
        assert [lane for part in parts[number] for lane in part] == piece.lanes
        assert max(map(len, parts[number])) <= piece.most
        if len(parts[number]) > 1:
            halves = math.ceil(len(piece.lanes) / math.ceil(len(piece.lanes) / piece.most))
            assert min(map(len, parts[number])) >= min(piece.fewest, halves // 2)


@given(st.integers(1, 5000), st.integers(2, 16))
def test_jobs_become_shorter_towards_the_end(lanes, workers):
    sizes = [len(part) for _, part in cut([Piece(False, list(range(lanes)), 10, 16, 512)], workers)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] <= max(32, lanes * SHARE / workers + 1)
    assert sizes[-1] < 32 or lanes >= 32 * workers


def test_one_worker_has_nobody_to_wait_for():
    assert [len(part) for _, part in cut([Piece(False, list(range(1000)), 10, 16, 512)], 1)] == [500, 500]


def test_with_rungs_lanes_stay_together():
    with_rungs = make(workers=2, halving=Halving(1)).jobs
    assert max(len(job.lanes) for job in with_rungs) > max(len(job.lanes) for job in make(workers=2).jobs)


def test_an_invalid_recipe_is_refused_by_its_rule():
    bad = Recipe.uniform(Quantizer(tensor_scale=TensorScale(target=1e6)))
    with pytest.raises(ConfigError, match="target-above-scale-format"):
        make([bad])


def test_a_hundred_thousand_lanes_are_planned_from_a_space():
    space = Space.from_dict({"axes": {"*": ["mxfp4", "nvfp4"], "fprop.rotation": ["none", "rht16"]}})
    planned = make(space.recipes(), seeds=range(10_000), tasks=TASKS[:1], lrs=[1e-3, 1e-2])
    assert planned.asked == 10_000 * 2 * (4 + 1)


def ruled(**rule):
    return recipe_from_dict({**recipe_to_dict(Recipe.named("nvfp4")), "layers": [rule]})


def test_a_rule_that_meets_no_layer_of_a_task_is_an_error_before_anything_is_trained():
    vision = get_task("vision", "quickstart")
    fine = ruled(name="block?.qkv", wgrad="bf16")
    assert make([fine], [vision]).left == 6
    with pytest.raises(ConfigError, match=r"vision:quickstart, recipe nvfp4.*layers\[0\].*did you mean 'block\?\.qkv'"):
        make([fine, ruled(name="block?.qvk", wgrad="bf16")], [vision])
    with pytest.raises(ConfigError, match=r"regression:quickstart.*layers\[0\]: found 'block\?\.qkv'.*linear"):
        make([fine], [vision, get_task("regression", "quickstart")])


def test_a_rule_for_a_kind_that_no_task_has_is_an_error_and_one_that_some_have_is_not():
    vision, regression = get_task("vision", "quickstart"), get_task("regression", "quickstart")
    attention = ruled(kind="attention", wgrad="bf16")
    with pytest.raises(ConfigError, match=r"layers\[0\]: found 'attention'.*linear"):
        make([attention], [regression])
    assert make([attention], [regression, vision]).left == 2 * make([attention], [vision]).left
    with pytest.raises(ConfigError, match=r"layers\[0\]: found 'expert'"):
        make([ruled(kind="expert", wgrad="bf16")], [regression, vision])


def test_a_recipe_whose_rules_quantize_the_forward_pass_has_the_rate_of_such():
    bf16 = recipe_to_dict(Recipe.named("bf16"))
    for what, of in (("fprop", "forward"), ("wgrad", "backward"), ("*", "forward")):
        recipe = recipe_from_dict({**bf16, "layers": [{"kind": "mlp", what: "nvfp4"}]})
        assert tuning_class(recipe) == of
