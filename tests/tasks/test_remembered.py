"""What is remembered is what would be answered, and nothing of other sources, versions or processors."""

import json
import os
import subprocess
import sys

import msgspec
import pytest

from fp4dse.tasks import environment, facts_of, find_facts, get_task, remembered
from fp4dse.tasks.remembered import recall, remember


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(remembered, "WITH_TORCH", False)
    return tmp_path / "fp4dse"


def ask(answers: list[int]) -> list[int]:
    return remembered.remembered("numbers", lambda: answers, list[int])


def test_a_question_is_asked_once():
    assert ask([1]) == [1]
    assert ask([2]) == [1]


def test_a_process_that_begins_with_torch_asks_anew(monkeypatch):
    ask([1])
    monkeypatch.setattr(remembered, "WITH_TORCH", True)
    assert ask([2]) == [2]


def test_answers_of_another_stamp_count_for_nothing(monkeypatch):
    ask([1])
    monkeypatch.setattr(remembered, "stamp", lambda: "another")
    assert recall("numbers", list[int]) is None
    assert ask([2]) == [2]


@pytest.mark.parametrize("text", [b"", b"{", b'{"stamp": 1}', b'{"stamp": "STAMP", "answers": {"numbers": "no"}}'])
def test_a_file_that_makes_no_sense_is_replaced(folder, text):
    folder.mkdir()
    (folder / "answers.json").write_bytes(text.replace(b"STAMP", remembered.stamp().encode()))
    assert recall("numbers", list[int]) is None
    assert ask([3]) == [3]
    assert recall("numbers", list[int]) == [3]


def test_where_nothing_can_be_written_it_is_asked_each_time(folder):
    folder.write_text("a file in place of the folder")
    assert (ask([1]), ask([2])) == ([1], [2])
    remember("more", 1)
    assert recall("more", int) is None


def test_the_stamp_follows_the_code_and_the_tuned_rates(tmp_path):
    """A sweep after a tuning has its rates, though no line of code changed."""
    stamps = [remembered.stamp.__wrapped__(tmp_path)]
    for name in ("tasks/engine/run.py", "dse/a.py", "tasks/tuned/regression-smoke.json", "kernels/ops/b.py"):
        file = tmp_path / name
        for text in ("1", "2"):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            stamps.append(remembered.stamp.__wrapped__(tmp_path))
    assert len(set(stamps)) == 9


STAMP = "from fp4dse.tasks.remembered import stamp; print(stamp())"


def test_the_stamp_follows_what_torch_is_told_of_the_processor():
    stamps = []
    for setting in ("", "default"):
        env = {**os.environ, "ATEN_CPU_CAPABILITY": setting}
        stamps.append(subprocess.run([sys.executable, "-c", STAMP], env=env, capture_output=True, check=True).stdout)
    assert stamps[0] != stamps[1]


DRIVER = """
import json, sys
from fp4dse.tasks import environment, find_facts
import msgspec
found = [msgspec.to_builtins(find_facts(*asked)) for asked in (("regression", "small"), ("language", "smoke"))]
print(json.dumps([found, environment("cpu", 2), "torch" in sys.modules]))
"""


@pytest.mark.heavy
def test_a_second_process_knows_the_same_without_torch():
    said = [json.loads(subprocess.check_output([sys.executable, "-c", DRIVER])) for _ in range(2)]
    assert [with_torch for *_, with_torch in said] == [True, False]
    live = [facts_of(get_task("regression", "small")), facts_of(get_task("language", "smoke"))]
    here = environment("cpu", 2)
    for found, surroundings, _ in said:
        assert [msgspec.convert(facts, type(live[0])) for facts in found] == live
        assert {**surroundings, "git_commit": ""} == {**here, "git_commit": ""}  # somebody may commit meanwhile


def test_facts_of_a_users_data_are_never_remembered(tmp_path):
    for names in ("x,y", "x,y,z"):
        rows = "".join(",".join(str(i * k % 7) for k in range(1, names.count(",") + 2)) + "\n" for i in range(100))
        (tmp_path / "t.csv").write_text(f"{names}\n{rows}")
        found = find_facts("regression", "smoke", f"{tmp_path / 't.csv'}:y")
        assert found == facts_of(get_task("regression", "smoke", f"{tmp_path / 't.csv'}:y"))
