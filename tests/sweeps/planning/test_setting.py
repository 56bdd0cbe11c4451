"""Who works with what: workers, threads, graphics cards."""

import pytest
import torch

from fp4dse.dse import ConfigError, Recipe
from fp4dse.sweeps.jobs import machine
from fp4dse.sweeps.jobs.machine import find_machine
from fp4dse.sweeps.planning import setting


def test_on_a_cpu_a_worker_has_one_thread_and_by_default_one_core(monkeypatch):
    assert {find_machine("cpu", jobs).threads for jobs in (None, 1, 2, 5)} == {1}
    assert len(find_machine("cpu", 5).slots) == 5
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: range(12))
    assert len(find_machine("cpu").slots) == 12


def test_a_worker_on_the_cpu_sees_no_graphics_card():
    assert {slot["CUDA_VISIBLE_DEVICES"] for slot in find_machine("cpu").slots} == {""}


@pytest.fixture
def three_cards(monkeypatch):
    monkeypatch.setattr(machine, "check_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda card: ["H200", "L40S", "H200"][card])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return monkeypatch


def cards(jobs=None) -> list[str]:
    return [slot["CUDA_VISIBLE_DEVICES"] for slot in find_machine("cuda", jobs).slots]


def test_each_worker_has_one_card_and_cards_are_shared_out_evenly(three_cards):
    assert cards() == ["0", "1", "2"]
    assert cards(jobs=4) == ["0", "1", "2", "0"]


def test_only_the_cards_that_are_visible_are_used(three_cards):
    three_cards.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-5")
    assert cards() == ["4", "GPU-5"]


@pytest.mark.parametrize(("device", "jobs", "word"), [("abacus", None, "cpu, cuda"), ("cpu", 0, "above 0")])
def test_wrong_settings_are_refused(device, jobs, word):
    with pytest.raises(ConfigError, match=word):
        find_machine(device, jobs)


def test_the_kind_of_each_workers_card_is_known(three_cards):
    assert find_machine("cuda").kinds == ("H200", "L40S", "H200")
    assert find_machine("cuda", jobs=1).kinds == ("H200",)
    assert len(set(find_machine("cpu", 3).kinds)) == 1
    assert find_machine("cuda", local=False).kinds == ()


def test_what_cannot_be_trained_is_refused_before_anything_runs():
    for asked, word in (
        ([("language", "paper")], "a batch of language:paper"),
        ([("regression", "smoke", "nothing.csv:price")], "a .csv or .parquet file that exists"),
    ):
        with pytest.raises(ConfigError, match=word):
            setting.find_setting(asked)


def test_tasks_of_one_name_and_preset_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"{i},{i * i % 7}\n" for i in range(100))
    (tmp_path / "t.csv").write_text(f"x,y\n{rows}")
    own, bundled = ("regression", "smoke", "t.csv:y"), ("regression", "smoke")
    assert len(setting.find_setting([own, own]).tasks) == 1
    with pytest.raises(ConfigError, match="regression:smoke twice"):
        setting.find_setting([own, bundled])


def test_endings_that_change_no_bit_are_no_tasks_of_their_own():
    """What was typed is named, and how to measure the memory of each."""
    typed = r"'language:smoke and language:smoke\+packed'"
    with pytest.raises(ConfigError, match=f"{typed}.*one of them.*rows of language:smoke; .*a --store of its own"):
        setting.find_setting([("language", "smoke"), ("language", "smoke+packed")])
    with pytest.raises(ConfigError, match=r"'language:smoke\+bf16\+packed and language:smoke\+bf16\+recompute'"):
        setting.find_setting([("language", "smoke+bf16+packed"), ("language", "smoke+bf16+recompute")])


def test_jobs_say_where_the_data_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"{i},{i * i % 7}\n" for i in range(100))
    (tmp_path / "t.csv").write_text(f"x,y\n{rows}")
    found = setting.find_setting([("regression", "smoke", "t.csv:y")])
    jobs = found.plan([Recipe.named("nvfp4")], [0], None, set()).jobs
    assert {job.origin for job in jobs} == {("regression", "smoke", f"{tmp_path / 't.csv'}:y")}
    assert {job.digest for job in jobs} == {found.tasks[0].digest}
    bundled = setting.find_setting([("regression", "smoke")]).plan([Recipe.named("nvfp4")], [0], None, set()).jobs
    assert {(job.origin, job.digest) for job in bundled} == {((), "")}
