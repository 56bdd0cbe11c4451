"""A task in a user's own file: the worked example of the docs, and what can be wrong with a file."""

import re
from pathlib import Path

import msgspec
import pytest

from fp4dse import cli
from fp4dse.dse import ConfigError, Recipe
from fp4dse.results import open_store
from fp4dse.tasks import TASKS, Job, Lane, get_task
from fp4dse.tasks.worker import task_of
from tests.forked_workers import fork_workers

PAGE = (Path(__file__).parents[2] / "docs" / "own-task.md").read_text(encoding="utf-8")
PLAIN, EXAMPLE, PROOF = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
PLAIN_COMMAND, COMMAND = re.findall(r"^    fp4dse (sweep .*)$", PAGE, re.MULTILINE)
[COMPLAINT] = re.findall(r"^    fp4dse: (.*)$", PAGE, re.MULTILINE)


@pytest.fixture
def example(tmp_path, monkeypatch) -> Path:
    """A folder with the example's file and the space that its command names."""
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text('summary = "mine"\n[axes]\n"*" = ["nvfp4"]\n')
    Path("tumours.py").write_text(EXAMPLE)
    monkeypatch.setattr("fp4dse.results.report.write_report", lambda _, page, **__: page.write_text("<html>"))
    return tmp_path / "tumours.py"


@pytest.mark.heavy
def test_the_worked_example_is_swept_and_learns(example):
    with pytest.raises(SystemExit) as ended:
        cli.main([*COMMAND.split(), "--jobs", "1"])
    assert ended.value.code == 0
    runs = open_store("runs/mine/store").runs()
    assert len(runs) == 6
    assert set(runs["task"]) == {"tumours"}
    assert set(runs["preset"]) == {"small"}
    assert set(runs["dataset_digest"]) == {get_task("tumours.py", "SMALL").digest}
    assert (runs["val_metric"] > 0.9).all()
    with pytest.raises(SystemExit):
        cli.main([*COMMAND.split(), "--jobs", "1", "--dry-run"])


@pytest.mark.heavy
def test_the_plain_module_is_swept_and_learns(example, monkeypatch):
    fork_workers(monkeypatch)
    Path("digits.py").write_text(PLAIN)
    with pytest.raises(SystemExit) as ended:
        cli.main([*PLAIN_COMMAND.split(), "--jobs", "1"])
    assert ended.value.code == 0
    runs = open_store("runs/mine/store").runs()
    assert len(runs) == 4
    assert set(zip(runs["task"], runs["preset"], strict=True)) == {("digits", "build")}
    assert (runs["val_metric"] > 0.8).all()
    assert all(
        "lanes trained one at a time: digits.py:build makes a plain torch module" in f for f in runs["fallbacks"]
    )


def test_what_is_wrong_with_a_plain_module_is_said_as_the_page_shows(example):
    wrong = PLAIN.replace("nn.functional.cross_entropy,", "nn.CrossEntropyLoss(reduction='none'),")
    Path("digits.py").write_text(wrong)
    with pytest.raises(ConfigError) as caught:
        get_task("digits.py", "build")
    assert str(caught.value) == COMPLAINT
    assert "ZeroDivisionError: division by zero in line 2" in refused("def build():\n    return 1 / 0\n", "build")
    assert "found 'int'; accepted: a dict with model, train, test, loss" in refused(
        "def build():\n    return 1\n", "build"
    )


@pytest.mark.slow
def test_the_proof_of_lane_independence_holds(example):
    exec(compile(PROOF, "own-task.md", "exec"), {})


def test_a_changed_file_has_another_digest(example):
    before = get_task("tumours.py", "SMALL").digest
    example.write_text(EXAMPLE + "\n# another word\n")
    assert get_task("tumours.py", "SMALL").digest != before


def test_a_worker_refuses_a_file_that_has_changed_since_the_job_was_made(example):
    task = get_task("tumours.py", "SMALL")
    lanes = [Lane(Recipe.named("bf16"), task.lr, 0)]
    job = Job(task.name, task.preset, lanes, origin=task.origin, digest=task.digest)
    job = msgspec.json.decode(msgspec.json.encode(job), type=Job)
    assert task_of(job).digest == task.digest
    example.write_text(EXAMPLE + "\n# another word\n")
    with pytest.raises(ConfigError, match=r"tumours\.py:SMALL has changed since the sweep began"):
        task_of(job)


def refused(text: str, name: str = "SMALL") -> str:
    Path("own.py").write_text(text)
    with pytest.raises(ConfigError) as caught:
        get_task("own.py", name)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_what_is_wrong_with_a_file_is_said_in_one_line(example):
    with pytest.raises(ConfigError, match=r"nothing\.py'; accepted: a Python file that exists"):
        get_task("nothing.py", "SMALL")
    assert "an object of class Task in own.py" in refused(EXAMPLE, "LARGE")
    assert "an object of class Task in own.py" in refused("SMALL = 3\n")
    assert "SyntaxError" in refused("a = 1\nb ==\n")
    assert "ZeroDivisionError: division by zero in line 2" in refused("a = 1\nb = a / 0\n")
    assert "another name than regression" in refused(EXAMPLE.replace('"tumours"', '"regression"'))
    assert "letters, digits" in refused(EXAMPLE.replace('"tumours"', '"my/task"'))
    assert "better: found 'up'; accepted: lower, higher" in refused(EXAMPLE.replace('better="higher"', 'better="up"'))
    assert "better: found 'up'; accepted: lower, higher" in refused(PLAIN.replace('"higher"', '"up"'), "build")


def test_an_own_task_takes_no_data(example):
    with pytest.raises(ConfigError, match="names its own data"):
        get_task("tumours.py", "SMALL", "table.csv:price")


def test_every_task_of_ours_that_has_a_metric_says_which_way_it_is_better():
    tasks = [task for presets in TASKS.values() for task in presets.values()]
    ways = {task.metric_name: task.better for task in tasks}
    assert ways == {None: None, "accuracy": "higher", "fid": "lower", "bits_per_byte": "lower", "excess": "lower"}
