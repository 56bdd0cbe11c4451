"""Tuned learning rates: files of the presets as they are, rates inside their grids, and what is made of them."""

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
from scipy.stats import ttest_1samp

from fp4dse.dse import QUANTIZERS, ConfigError, Recipe, recipe_files
from fp4dse.dse.attention import Attention, KeyGradient, Scores
from fp4dse.dse.reading.files import decode_json
from fp4dse.dse.resolution import FILE, RESOLVES
from fp4dse.dse.tuning import CLASSES, tuning_class
from fp4dse.results.stats.paired import SETTING
from fp4dse.sweeps.jobs.rows import lane_id, task_context
from fp4dse.tasks import facts_of, get_task
from fp4dse.tasks.catalogue import TASKS
from fp4dse.tasks.environment import environment
from fp4dse.tasks.facts import rate_of
from fp4dse.tasks.job import Job, Lane
from fp4dse.tasks.tuned import FOLDER, Point, Tuned, all_tuned, file_name, tuned, workers
from fp4dse.tasks.tuned.decay import add_decay, decays_and_clips, further
from fp4dse.tasks.tuned.page import page, untuned
from fp4dse.tasks.tuned.resolution import SIZES, found_by, is_open, least_found, resolution
from fp4dse.tasks.tuned.resolved import encoded, resolved_presets
from fp4dse.tasks.tuned.trainer import Trainer, representatives
from fp4dse.tasks.tuned.tune import has_all, kept, main, merged, tune
from fp4dse.tasks.tuned.workers import train_in_workers
from tests.forked_workers import fork_workers

SHIPPED = all_tuned()
NAMES = [file_name(found.task, found.preset, found.data) for found in SHIPPED]


@pytest.mark.parametrize("found", SHIPPED, ids=NAMES)
def test_a_file_belongs_to_the_preset_as_it_is(found):
    assert (FOLDER / file_name(found.task, found.preset, found.data)).is_file()
    task = get_task(found.task, found.preset, found.data or None)
    assert (task.rev, task.steps) == (found.rev, found.steps), "tune it again: python -m fp4dse.tasks.tuned.tune"
    assert (task.lr, task.rates) == (found.rates["bf16"], found.rates)
    assert facts_of(task).rates == found.rates


@pytest.mark.parametrize("found", SHIPPED, ids=NAMES)
def test_the_best_rate_of_a_class_has_a_worse_one_on_either_side(found):
    assert {"bf16", "forward"} <= found.rates.keys() <= CLASSES.keys()
    for of, rate in found.rates.items():
        tried = {point.lr: point.mean for point in found.curve if point.of == of and point.is_own}
        assert min(tried) < rate < max(tried)
        assert len(tried) >= 5
        assert tried[rate] == min(tried.values())


def test_no_seed_that_chose_a_rate_is_one_that_a_sweep_has_by_itself():
    """Nor one of the check, which chooses nothing, and may have a sweep's."""
    for found in SHIPPED:
        assert min(found.seeds) >= 1000
        assert not set(found.seeds) & set(found.fresh_seeds)


def test_every_recipe_has_a_class_and_every_class_a_representative():
    assert {name: tuning_class(recipe) for name, recipe in representatives().items()} == {of: of for of in CLASSES}
    classes = {name: tuning_class(file.recipe) for name, file in recipe_files().items()}
    assert classes["bf16"] == "bf16"
    assert classes["nvfp4-stable-spam"] == "stable-spam"
    assert classes["nvfp4-muon"] == "muon"
    assert classes["luq"] == "forward"
    nvfp4, plain = QUANTIZERS["nvfp4"], Recipe.named("bf16")
    cores = {"forward": Attention(scores=Scores(q=nvfp4)), "backward": Attention(dk=KeyGradient(q=nvfp4))}
    for of, core in cores.items():
        assert tuning_class(msgspec.structs.replace(plain, attention=core)) == of


def test_what_nobody_tuned_keeps_the_rate_of_its_preset():
    task = get_task("language", "350M")
    assert tuned("language", "350M") is None
    assert rate_of(task, Recipe.named("nvfp4")) == task.lr == 3e-4
    assert tuned("vision", "quickstart", "shapes?size=32") is None
    assert tuned("vision", "quickstart", "/a/folder") is None


def test_the_page_is_what_the_files_say():
    shown = Path(__file__).parents[2] / "docs" / "presets.md"
    assert shown.read_text() == page(SHIPPED, untuned()), "python -m fp4dse.tasks.tuned.page > docs/presets.md"


def test_reports_know_of_each_preset_whether_it_resolves():
    found = resolved_presets(SHIPPED)
    assert FILE.read_bytes() == encoded(found), "python -m fp4dse.tasks.tuned.resolved"
    assert {one.preset for one in found if one.resolves} >= {"regression:quickstart", "language:1M"}
    assert {one.preset for one in found if not one.resolves} >= {"vision:quickstart", "language:0.4M"}
    with_nan = msgspec.structs.replace(found[0], ratio=None, least=None)
    assert resolved_presets([]) == []
    assert decode_json(encoded([with_nan]), list[type(with_nan)]) == [with_nan]


def test_the_page_names_every_preset_that_nobody_tuned():
    named = [f"{task}:{preset}" for task, presets in TASKS.items() for preset in presets]
    on_own_data = {f"{found.task}:{found.preset}" for found in SHIPPED if not found.data}
    assert sorted(on_own_data | {*untuned()}) == sorted(named)
    assert not on_own_data & {*untuned()}
    text = page(SHIPPED, untuned()).partition("## Not tuned")[2]
    assert all(f"`{name}`" in text for name in untuned())


def test_what_has_all_that_is_asked_for_is_not_tuned_again(tmp_path, capsys):
    found = tuned("language", "1M")
    task = get_task("language", "1M")
    assert has_all(found, task, found.device, ["bf16", "forward"], seeds=3, fresh=0)
    for change in ({"rev": 0}, {"steps": 1}, {"device": "tpu"}, {"seeds": [1000]}, {"curve": []}):
        assert not has_all(msgspec.structs.replace(found, **change), task, found.device, ["bf16"], seeds=3, fresh=0)
    assert not has_all(found, task, found.device, ["sgd"], seeds=3, fresh=0)
    unclipped = msgspec.structs.replace(found, fresh_seeds=[2000], curve=[p for p in found.curve if p.is_own])
    assert has_all(unclipped, task, found.device, ["bf16"], seeds=3, fresh=0)
    assert not has_all(unclipped, task, found.device, ["bf16"], seeds=3, fresh=1)  # no decay or clip was tried
    half = [point for point in found.curve if point.is_own or point.of == "bf16"]
    assert not has_all(msgspec.structs.replace(found, curve=half), task, found.device, ["bf16"], seeds=3, fresh=1)
    assert not has_all(found, task, found.device, ["bf16"], seeds=3, fresh=len(found.fresh_seeds) + 1)
    asked = ["language:1M", "--device", found.device, "--classes", "bf16", "--fresh", "0", "--lacking"]
    before = (FOLDER / file_name("language", "1M")).read_bytes()
    main([*asked, "--work", str(tmp_path)])
    assert "has all of it" in capsys.readouterr().out
    assert not [*tmp_path.iterdir()]
    assert (FOLDER / file_name("language", "1M")).read_bytes() == before


@pytest.mark.parametrize("found", [one for one in SHIPPED if one.check], ids=lambda one: f"{one.task}-{one.preset}")
def test_a_check_is_of_the_fresh_seeds_at_the_rates_that_the_file_has(found):
    """So that each difference of a resolution is of one setting, paired by seed: a file has one device and revision."""
    assert {point.of: point.lr for point in found.check} == {
        of: found.rates["bf16" if of == "bf16" else "forward"] for of in ("bf16", "nvfp4", "mxfp4")
    }
    assert {len(point.losses) for point in found.check} == {len(found.fresh_seeds)}
    assert not {*found.fresh_seeds} & {*found.seeds}


def made(**losses: list[float | None]) -> Tuned:
    check = [Point(of, 1e-3, values) for of, values in losses.items()]
    return Tuned("regression", "smoke", "", 1, 40, "cpu", [1000], [], [2000], check)


def test_a_resolution_is_that_of_paired_logarithms():
    found = resolution(made(bf16=[1.0, 2.0, 4.0], nvfp4=[1.1, 2.2, 4.84], mxfp4=[1.2, 2.4, 4.8]))
    gaps = [math.log(1.1), math.log(1.1), math.log(1.21)]
    assert found.spread == pytest.approx(math.log(2))
    assert found.gap == pytest.approx(sum(gaps) / 3)
    assert found.ratio == pytest.approx(found.gap / found.gap_sd)
    assert not found.tells_apart()
    assert resolution(made(bf16=[1.0, 2.0], nvfp4=[1.1, 2.201], mxfp4=[1.2, 2.4])).tells_apart()


@pytest.mark.parametrize("task", ["vision", "diffusion"])
def test_a_preset_of_images_resolves_on_a_cpu(task):
    found = tuned(task, "teacher")
    assert found.device == "cpu"
    assert resolution(found).ratio >= RESOLVES
    assert resolution(found).tells_apart(len(found.fresh_seeds))


@pytest.mark.parametrize(
    ("name", "first", "changed"), [("regression", 1, ["mlp"]), ("vision", 5, ["quickstart", "cnn-small", "cnn-medium"])]
)
def test_rows_of_a_preset_before_its_weight_decay_are_compared_with_none_after(name, first, changed):
    revisions = {preset: task.rev for preset, task in TASKS[name].items()}
    assert revisions == {
        **dict.fromkeys(revisions, first),
        **dict.fromkeys(changed, first + 1),
    }  # the others keep theirs
    for task in (get_task(name, preset) for preset in changed):
        assert task.weight_decay > 0
        before = msgspec.structs.replace(facts_of(task), rev=first)
        contexts = [task_context(facts, environment("cpu", 1)) for facts in (before, facts_of(task))]
        ids = {lane_id(Lane(Recipe.named("bf16"), task.lr, 0), context) for context in contexts}
        assert len(ids) == 2
        settings = [[context[column] for column in SETTING] for context in contexts]
        assert settings[0] != settings[1]


def test_as_many_seeds_as_a_resolution_states_find_a_difference_in_80_of_100_studies():
    rng = np.random.default_rng(0)
    for sd in (0.001, 0.0034, 0.01):
        logs = rng.normal(0, 1, 5)
        logs = 0.02 + sd * (logs - logs.mean()) / logs.std(ddof=1)
        found = resolution(made(bf16=[1.0] * 5, nvfp4=np.exp(logs).tolist(), mxfp4=np.exp(2 * logs).tolist()))
        assert found.gap_sd == pytest.approx(sd)
        for size, seeds in zip(SIZES[1:], found.seeds[1:], strict=True):
            power = [
                np.mean(ttest_1samp(rng.normal(math.log1p(size), sd, (20_000, n)), 0, axis=1).pvalue < 0.05)
                for n in (seeds, max(2, seeds - 1))
            ]
            assert power[0] > 0.79  # 20,000 studies know it to 0.003
            assert power[1] < 0.81 or seeds == 2
        told = np.mean(ttest_1samp(rng.normal(found.rival, found.rival_sd, (20_000, 5)), 0, axis=1).pvalue < 0.05)
        assert found.tells_apart() == (told > 0.8)


def test_the_least_difference_that_seeds_find_is_found_in_80_of_100_studies():
    for seeds in (2, 5, 12):
        assert found_by(seeds, least_found(seeds, 0.03), 0.03) == pytest.approx(0.8)
    assert math.isnan(least_found(5, math.nan))
    assert least_found(5, 0.0) == 0.0


def test_a_rate_is_open_if_its_seeds_do_not_tell_it_from_one_four_times_as_high_or_as_low():
    def curve(far: list[float | None], near: list[float | None]) -> Tuned:
        rates = {0.004: [1.0, 1.1, 1.2], 0.008: near, 0.016: far, 0.001: [2.0, 2.2, 2.4]}
        points = [Point("bf16", lr, losses[: len(far)]) for lr, losses in rates.items()]
        return msgspec.structs.replace(made(), curve=[*points, Point("bf16", 0.016, [1.0, 1.1, 1.2], clip=1.0)])

    alike, worse = [1.01, 1.09, 1.22], [1.5, 1.7, 1.8]
    assert is_open(curve(alike, worse), "bf16")
    assert not is_open(curve(worse, alike), "bf16")  # a neighbour
    assert not is_open(curve([1.5, None, 1.8], alike), "bf16")
    assert is_open(curve(worse[:1], alike), "bf16")  # one seed
    assert not is_open(curve(worse, alike), "forward")
    assert "| 0.004 ? |" in page([curve(alike, worse)], [])


@pytest.mark.parametrize(
    ("other", "said"), [([0.9, 0.99, 1.08], "−10 % (clip 1, 0.004)"), ([0.7, 1.2, 0.98], "−15 % ? (clip 1, 0.004)")]
)
def test_a_loss_with_other_numbers_is_marked_where_its_seeds_do_not_tell_it(other, said):
    points = [Point("bf16", 0.004, [1.0, 1.1, 1.2]), Point("bf16", 0.004, other, clip=1.0)]
    assert f"| {said} |" in page([msgspec.structs.replace(made(), curve=points)], [])


def test_a_recipe_that_diverged_resolves_nothing():
    found = resolution(made(bf16=[1.0, 2.0], nvfp4=[1.1, None], mxfp4=[1.2, 2.4]))
    assert math.isnan(found.ratio)
    assert not found.tells_apart()


@pytest.mark.heavy
def test_a_tuning_finds_a_rate_inside_its_grid(capsys):
    task, classes = get_task("regression", "smoke"), ("bf16", "forward")
    found = tune(Trainer(task, "cpu", 64), "", classes, seeds=2, fresh=2)
    again = tune(Trainer(task, "cpu", 5), "", classes, seeds=2, fresh=2)
    assert found == again  # lanes that train together do not meet
    assert found.rates.keys() == {"bf16", "forward"}
    test_the_best_rate_of_a_class_has_a_worse_one_on_either_side(found)
    assert [point.of for point in found.check] == ["bf16", "nvfp4", "mxfp4"]
    assert "lanes in" in capsys.readouterr().err


@pytest.mark.heavy
def test_workers_find_the_same_rates_and_do_not_train_again_what_is_finished(tmp_path, capsys, monkeypatch):
    fork_workers(monkeypatch, workers)
    task = get_task("regression", "smoke")
    alone = tune(Trainer(task, "cpu", 64), "", ["bf16"], seeds=1, fresh=0)
    assert (alone.check, {point.is_own for point in alone.curve}) == ([], {True})
    assert tune(Trainer(task, "cpu", 3, 2, tmp_path), "", ["bf16"], seeds=1, fresh=0) == alone
    results = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("out.json")}
    jobs = [decode_json(file.with_name("job.json").read_bytes(), Job) for file in results]
    assert sum(len(job.lanes) for job in jobs) == len(alone.curve)
    assert tune(Trainer(task, "cpu", 3, 2, tmp_path), "", ["bf16"], seeds=1, fresh=0) == alone
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("out.json")} == results
    assert "lanes in" in capsys.readouterr().err


def test_a_job_that_comes_to_nothing_says_why(tmp_path):
    lane = Lane(Recipe.named("bf16"), 1e-3, 0)
    with pytest.raises(RuntimeError, match=r"preset of language: found .none."):
        list(train_in_workers([Job("language", "none", [lane])], tmp_path, 1))


def test_a_class_more_leaves_the_curves_and_the_check_of_the_others_as_they_are(tmp_path):
    asked = ["regression:smoke", "--seeds", "2", "--fresh", "2", "--folder", str(tmp_path), "--classes"]
    main([*asked, "bf16", "forward"])
    [file] = tmp_path.iterdir()
    before = decode_json(file.read_bytes(), Tuned)
    main([*asked, "sgd-bf16"])
    after = decode_json(file.read_bytes(), Tuned)
    assert after.rates.keys() == {"bf16", "forward", "sgd-bf16"}
    assert [point for point in after.curve if point.of != "sgd-bf16"] == before.curve
    assert (after.check, after.fresh_seeds) == (before.check, before.fresh_seeds)
    assert after.curve == sorted(after.curve, key=lambda point: point.of)  # as a tuning of all would write it


@pytest.mark.heavy
def test_weight_decay_and_clipping_are_added_at_the_rates_that_a_file_has(tmp_path, capsys):
    asked = ["regression:smoke", "--seeds", "2", "--folder", str(tmp_path)]
    with pytest.raises(ConfigError, match="preset: found 'regression:smoke'; accepted: one whose rates are tuned"):
        main([*asked, "--decay"])
    main([*asked, "--fresh", "0", "--classes", "bf16", "forward", "sgd-bf16"])
    [file] = tmp_path.iterdir()
    before = decode_json(file.read_bytes(), Tuned)
    main([*asked, "--decay"])
    after = decode_json(file.read_bytes(), Tuned)
    assert [point for point in after.curve if point.is_own] == before.curve
    others = {(p.of, p.lr, p.weight_decay, p.clip) for p in after.curve if not p.is_own}
    rates = {of: {before.rates[of], 2 * before.rates[of]} for of in ("bf16", "forward")}
    numbers = {(decay, clip) for decay in (None, 0.1, 0.3) for clip in (None, 1.0)} - {(None, None)}
    assert others >= {(of, lr, *pair) for of in rates for lr in rates[of] for pair in numbers}
    for of in rates:  # the best is inside, or as far as it goes
        best = min((p for p in after.curve if p.of == of), key=lambda point: point.mean)
        assert (
            best.is_own or best.lr < max(lr for name, lr, *_ in others if name == of) or best.lr == 8 * before.rates[of]
        )
    at_once = tune(Trainer(get_task("regression", "smoke"), "cpu", 64), "", ["bf16", "forward"], seeds=2, fresh=1)
    assert [p for p in after.curve if p.of != "sgd-bf16"] == at_once.curve
    capsys.readouterr()
    main([*asked, "--decay", "--lacking"])
    assert "has all of it" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"steps: found .*; accepted: 7, as the file of regression:smoke has it"):
        add_decay(Trainer(get_task("regression", "smoke"), "cpu", 64), msgspec.structs.replace(after, steps=7))


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ({(1, None, 1.0): 0.9, (1, 0.3, None): 1.1, (2, None, 1.0): 1.0}, []),  # inside: no larger decay, half the rate
        ({(1, 0.3, None): 0.9, (2, 0.3, None): 1.1, (1, 0.1, None): 1.0}, [(1, 1.0, None)]),
        ({(1, 1.0, 1.0): 0.9, (2, 0.3, None): 1.1}, [(1, 3.0, 1.0)]),
        ({(1, 3.0, None): 0.9, (2, 0.3, None): 1.1}, []),
        ({(1, 0.1, None): 1.0, (2, 0.3, None): 0.9}, [(2, 1.0, None), (4, 0.3, None)]),
        ({(1, 0.1, None): 1.9, (2, 0.3, None): 1.8}, []),  # the preset's own is better than all
    ],
)
def test_settings_go_beyond_what_is_the_best_at_an_edge(losses, expected):
    """Losses by how many times the rate of the class, decay and clip; the class's own at its rate is 1.5."""
    rate = 0.0078
    found = msgspec.structs.replace(made(bf16=[1.0, 2.0]), curve=[Point("bf16", rate, [1.5])])
    points = [Point("bf16", times * rate, [loss], decay, clip) for (times, decay, clip), loss in losses.items()]
    assert further(points, found, "bf16") == [(times * rate, decay, clip) for times, decay, clip in expected]


@pytest.mark.parametrize(("own", "beyond"), [(0.0, []), (0.1, []), (0.3, [1.0, 3.0]), (1.0, [3.0]), (3.0, [])])
def test_a_preset_whose_own_decay_is_the_largest_is_tried_with_larger_ones(own, beyond):
    """The larger a decay, the better: what is tried ends at the largest there is, whatever the preset's own is."""

    class Better:
        task = msgspec.structs.replace(get_task("regression", "smoke"), weight_decay=own, clip=1.0)

        def points(self, asked, seeds):
            return [Point(of, lr, [1 / (2 + (decay or 0))], decay, clip) for of, _, lr, decay, clip in asked]

    found = msgspec.structs.replace(made(bf16=[1.0, 2.0]), curve=[Point("bf16", 0.0078, [1 / (2 + own)])])
    tried = {point.weight_decay for point in decays_and_clips(Better(), found)}
    usual = {0.0, 0.1, 0.3} - {own}
    assert tried == usual | {*beyond} | ({1.0, 3.0} if own < 0.3 else set())


def test_a_check_holds_each_recipe_at_the_rate_of_its_class_though_only_one_of_them_is_tuned_again():
    task = get_task("regression", "smoke")
    here = {"rev": task.rev, "steps": task.steps, "curve": [Point("forward", 0.0078, [1e-6])]}
    before = msgspec.structs.replace(made(bf16=[1.0, 2.0]), **here)
    found = tune(Trainer(task, "cpu", 64), "", ["bf16"], seeds=1, fresh=1, before=before)
    rates = {"bf16": found.rates["bf16"], "nvfp4": 0.0078, "mxfp4": 0.0078}
    assert {point.of: point.lr for point in found.check} == rates


def test_what_was_tuned_anew_replaces_what_there_was_and_other_circumstances_are_refused():
    task = get_task("regression", "smoke")
    curve = [Point("bf16", 1e-3, [1.0]), Point("forward", 1e-3, [2.0])]
    numbers = {"rev": task.rev, "steps": task.steps, "curve": curve}
    before = msgspec.structs.replace(made(bf16=[1.0, 2.0]), **numbers)
    found = merged(msgspec.structs.replace(before, curve=[Point("bf16", 2e-3, [0.5])], check=[]), before)
    assert found.curve == [Point("bf16", 2e-3, [0.5]), Point("forward", 1e-3, [2.0])]
    assert (found.check, found.fresh_seeds) == (before.check, before.fresh_seeds)
    assert kept(before, task, "cpu", ["bf16"], before.seeds) == before
    assert kept(before, task, "cuda", ["bf16", "forward", "sgd"], [7]) is None
    with pytest.raises(ConfigError, match=r"device: found 'cuda'; accepted: cpu, as the file .* with forward, too"):
        kept(before, task, "cuda", ["bf16"], before.seeds)
    with pytest.raises(ConfigError, match="rev: found"):
        kept(msgspec.structs.replace(before, rev=0), task, "cpu", ["bf16"], before.seeds)
