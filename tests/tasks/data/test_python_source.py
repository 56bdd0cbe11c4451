"""Installed Python source as a corpus: each content once, packages held out whole, written once and read in place."""

import numpy as np
import pytest

from fp4dse.dse import ConfigError
from fp4dse.tasks import get_task
from fp4dse.tasks.data import python_source
from fp4dse.tasks.facts import facts_of


@pytest.fixture(autouse=True)
def packages(tmp_path, monkeypatch):
    """Twenty packages of a hundred kilobytes; all have one file in common."""
    found = {}
    for i in range(20):
        folder = tmp_path / f"package{i}"
        folder.mkdir()
        (folder / "own.py").write_text(f"# package {i}\n" * 6_000)
        (folder / "common.py").write_text("# of all of them\n")
        found[f"package{i} 1.0"] = sorted(folder.iterdir())
    monkeypatch.setattr(python_source, "_packages", lambda: iter(found.items()))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    python_source.installed_python.cache_clear()
    yield found
    python_source.installed_python.cache_clear()


def lines(part) -> set[str]:
    return set(bytes(part).decode().splitlines()) - {"", "# of all of them"}


def test_packages_are_held_out_whole():
    corpus = python_source.installed_python()
    assert len(lines(corpus.train)) == 18
    assert len(lines(corpus.held_out)) == 2
    assert not lines(corpus.train) & lines(corpus.held_out)


def test_a_content_is_kept_once():
    corpus = python_source.installed_python()
    everything = bytes(np.concatenate([corpus.train, corpus.held_out]))
    assert everything.count(b"# of all of them") == 1


def test_it_is_written_once_and_a_torn_writing_is_taken_up_again(packages, tmp_path):
    corpus = python_source.installed_python()
    [folder] = (tmp_path / "cache").rglob("python-*")
    before = (folder / "train.bin").stat().st_mtime_ns
    python_source.installed_python.cache_clear()
    again = python_source.installed_python()
    assert (folder / "train.bin").stat().st_mtime_ns == before
    (folder / "held_out.bin").unlink()
    (folder / "digest").unlink()
    python_source.installed_python.cache_clear()
    assert bytes(python_source.installed_python().held_out) == bytes(corpus.held_out) == bytes(again.held_out)


def test_another_version_is_another_text(packages):
    digest = python_source.installed_python().digest
    packages["package0 2.0"] = packages.pop("package0 1.0")
    python_source.installed_python.cache_clear()
    assert python_source.installed_python().digest != digest


def test_other_files_of_the_same_version_are_another_text(packages, tmp_path, monkeypatch):
    """Two machines have the same packages in the same versions, and one of them a file that its build wrote."""
    here = python_source.installed_python()
    packages["package3 1.0"][1].write_text("# built elsewhere\n" * 6_000)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another machine"))
    python_source.installed_python.cache_clear()
    there = python_source.installed_python()
    assert there.contents == here.contents
    assert there.digest != here.digest


def test_too_little_is_refused(packages):
    for name in list(packages)[3:]:
        del packages[name]
    with pytest.raises(ConfigError, match="bytes of installed Python source"):
        get_task("language", "smoke", "python")


def test_a_preset_reads_it():
    task = get_task("language", "smoke", "python")
    assert task.problem([0]).train_x.shape == (1, 16 * 60, 33)
    assert task.summary.startswith("Python source of 20 packages, vocabulary 256")
    assert task.digest == python_source.installed_python().digest
    made_of = facts_of(task).contents.split("; ")
    assert len(made_of) == 20
    assert all(len(each.split()) == 2 for each in made_of), "a package and its version each"
    assert get_task("language", "smoke").contents is None
