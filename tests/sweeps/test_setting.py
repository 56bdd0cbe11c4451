"""Who works with what: workers, threads, graphics cards."""

import pytest
import torch

from fp4dse.dse import ConfigError
from fp4dse.sweeps import setting
from fp4dse.sweeps.setting import find_machine


def test_on_a_cpu_a_worker_has_one_thread_and_by_default_one_core(monkeypatch):
    assert {find_machine("cpu", jobs).threads for jobs in (None, 1, 2, 5)} == {1}
    assert len(find_machine("cpu", 5).slots) == 5
    monkeypatch.setattr(setting.os, "sched_getaffinity", lambda _: range(12))
    assert len(find_machine("cpu").slots) == 12


def test_a_worker_on_the_cpu_sees_no_graphics_card():
    assert {slot["CUDA_VISIBLE_DEVICES"] for slot in find_machine("cpu").slots} == {""}


@pytest.fixture
def three_cards(monkeypatch):
    monkeypatch.setattr(setting, "check_device", lambda device: None)
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


def test_the_kinds_of_cards_are_those_that_workers_may_get(three_cards):
    assert find_machine("cuda").kinds == ("H200", "L40S")
    assert len(find_machine("cpu").kinds) == 1
    assert find_machine("cuda", local=False).kinds == ()
