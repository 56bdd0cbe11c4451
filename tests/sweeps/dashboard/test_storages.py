"""Studies are the same wherever they are kept, and what is not ours at a path that somebody named stays as it is."""

import contextlib
import json
import os
import random
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import optuna
import pytest

from fp4dse.dse import ConfigError
from fp4dse.sweeps.dashboard import storages
from fp4dse.sweeps.dashboard.mirror import mirror_trials
from fp4dse.sweeps.dashboard.storages import MARK, mend_journal, open_storage
from fp4dse.sweeps.dashboard.trials import VALUES, TrialData
from tests.sweeps import databases

NAME = "few vision:small"


def load(storage, name=NAME) -> optuna.Study:
    return optuna.load_study(study_name=name, storage=storage)


def contents(storage, name=NAME) -> list:
    """What a reader sees of a study."""
    return [(trial.state, trial.values, trial.params, trial.user_attrs) for trial in load(storage, name).trials]


def some_trials(n: int, seed: int = 0) -> list[TrialData]:
    draws = random.Random(seed)
    return [
        TrialData(
            key=f"{i}",
            params={"a": draws.choice("xyz"), "b": draws.choice("uvw")},
            values=(draws.random(), draws.random()) if i % 5 else None,
            facts={"label": f"recipe {i}", "gap_low": None},
        )
        for i in range(n)
    ]


# --- a journal file --------------------------------------------------------------------------------------------------


def test_a_journal_that_is_torn_anywhere_in_its_last_line_goes_on_as_if_it_were_not(tmp_path):
    path, lines = tmp_path / "torn.journal", some_trials(8)
    mirror_trials(open_storage(path), NAME, lines[:7])
    whole = path.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    for length in [*range(last + 1, len(whole), 37), len(whole) - 1]:
        path.write_bytes(whole[:length])
        assert mend_journal(path)
        mirror_trials(open_storage(path), NAME, lines)
        assert [trial.user_attrs["label"] for trial in load(open_storage(path)).trials] == [
            f"recipe {i}" for i in range(8)
        ]


@pytest.mark.parametrize("broken", [b"\x00\xff\n", b'{"op": \n', b"[1, 2]\n", b"x" * 100 + b"\n"])
def test_a_journal_of_ours_that_is_broken_elsewhere_is_made_anew_and_none_of_it_is_lost(tmp_path, broken, caplog):
    path, lines = tmp_path / "broken.journal", some_trials(4)
    mirror_trials(open_storage(path), NAME, lines)
    for aside in ("broken.journal.broken", "broken.journal.broken2"):
        first, _, rest = path.read_bytes().partition(b"\n")
        path.write_bytes(before := first + b"\n" + broken + rest)
        mirror_trials(open_storage(path), NAME, lines)
        assert len(load(open_storage(path)).trials) == 4
        assert (tmp_path / aside).read_bytes() == before
        assert f"line 2 is broken; set aside as {tmp_path / aside}" in caplog.text


def an_sqlite_file(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE mine (x)")
        connection.commit()


def anothers_journal(path: Path, cut: int = 0) -> None:
    """A study that somebody made with Optuna alone."""
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path)))
    optuna.create_study(study_name="mine", storage=storage).enqueue_trial({"x": 1})
    os.truncate(path, path.stat().st_size - cut)


FOREIGN = {
    "SQLite": (an_sqlite_file, "this is an SQLite file: sqlite:///"),
    "a text": (lambda path: path.write_text("my notes\n"), "this file is neither and stays as it is"),
    "a text without an end of line": (lambda path: path.write_text("my notes"), "stays as it is"),
    "the beginning of a JSON text": (lambda path: path.write_text("{"), "stays as it is"),
    "JSON lines": (lambda path: path.write_text('{"by":"fp4dse","x":1}\n{"x":2}\n'), "stays as it is"),
    "bytes": (lambda path: path.write_bytes(bytes(range(256)) * 40), "stays as it is"),
    "an empty line": (lambda path: path.write_bytes(b"\n"), "stays as it is"),
    "deep JSON": (lambda path: path.write_text("[" * 100_000), "stays as it is"),
    "a torn journal of somebody else's": (lambda path: anothers_journal(path, 5), "its last line is torn"),
    "a folder": (lambda path: path.mkdir(), "a file, or the path of one"),
}


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("linked", [False, True])
def test_what_is_not_ours_at_the_path_stays_as_it_is_and_the_error_says_what_it_is(tmp_path, kind, linked):
    make, said = FOREIGN[kind]
    path = named = tmp_path / "mine"
    make(path)
    if linked:
        (named := tmp_path / "link").symlink_to(path)
    before = None if path.is_dir() else path.read_bytes()
    with pytest.raises(ConfigError, match="--storage") as caught:
        open_storage(named)
    assert said in str(caught.value)
    assert path.is_dir() or path.read_bytes() == before
    assert {place.name for place in tmp_path.iterdir()} == {"mine", "link"} if linked else {"mine"}


def test_a_whole_journal_of_somebody_else_is_added_to_and_keeps_what_it_has(tmp_path):
    anothers_journal(path := tmp_path / "mine.journal")
    before = path.read_bytes()
    mirror_trials(open_storage(path), NAME, some_trials(3))
    assert path.read_bytes().startswith(before)
    assert not mend_journal(path)
    assert len(load(open_storage(path), "mine").trials) == 1
    assert len(load(open_storage(path)).trials) == 3


@pytest.mark.parametrize("kind", ["empty", "link to an empty file", "link to none", "in a folder that is not there"])
def test_where_nothing_is_yet_a_journal_is_made(tmp_path, kind):
    path = tmp_path / ("a/b/new" if "folder" in kind else "new")
    if kind != "link to none" and "folder" not in kind:
        (tmp_path / "target").touch()
    if "link" in kind:
        path.symlink_to(tmp_path / "target")
    mirror_trials(open_storage(path), NAME, some_trials(3))
    assert len(load(open_storage(path)).trials) == 3
    assert path.is_symlink() == ("link" in kind)


def test_a_torn_line_behind_a_link_is_cut_and_the_link_stays(tmp_path):
    path, link = tmp_path / "target", tmp_path / "link"
    mirror_trials(open_storage(path), NAME, some_trials(3))
    whole = path.read_bytes()
    path.write_bytes(whole + MARK + b'"op_code":')
    link.symlink_to(path)
    assert mend_journal(link)
    assert link.is_symlink()
    assert path.read_bytes() == whole


def test_a_line_that_another_process_is_just_writing_is_not_cut(tmp_path):
    path = tmp_path / "busy.journal"
    mirror_trials(open_storage(path), NAME, some_trials(3))
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    lock = optuna.storages.journal.JournalFileSymlinkLock(str(path))
    lock.acquire()

    def finish() -> None:
        path.write_bytes(whole)
        lock.release()

    writer = threading.Timer(0.2, finish)
    writer.start()
    assert not mend_journal(path)
    writer.join()
    assert path.read_bytes() == whole


def test_a_sound_journal_is_left_alone(tmp_path):
    path = tmp_path / "sound.journal"
    assert not mend_journal(path)
    mirror_trials(open_storage(path), NAME, some_trials(3))
    before = path.read_bytes()
    assert not mend_journal(path)
    assert path.read_bytes() == before
    for line in before.splitlines():
        json.loads(line)


# --- other storages ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def postgresql_url():
    if reason := databases.why_not():
        assert not os.environ.get("CI"), reason
        pytest.skip(reason)
    with databases.postgresql() as url:
        yield url


@pytest.fixture
def grpc_url(tmp_path):
    """A journal behind Optuna's proxy, served by a thread."""
    port = databases.free_port()
    served = threading.Thread(target=storages.serve_grpc, args=(tmp_path / "behind.journal", port), daemon=True)
    served.start()
    return f"grpc://127.0.0.1:{port}"


@pytest.fixture(params=["journal", "sqlite", "postgresql", "grpc"])
def url(request, tmp_path):
    """A storage of each kind."""
    if request.param in ("postgresql", "grpc"):
        return request.getfixturevalue(f"{request.param}_url")
    return str(tmp_path / "a.journal") if request.param == "journal" else f"sqlite:///{tmp_path / 'a.db'}"


def close(storage):
    """Give back the connections of a storage; a journal has none."""
    storage.remove_session()
    if isinstance(storage, optuna.storages.RDBStorage):
        storage.engine.dispose()
    if isinstance(storage, optuna.storages.GrpcStorageProxy):
        storage.close()


@pytest.fixture
def opened():
    """Opens storages and closes them at the end."""
    with contextlib.ExitStack() as stack:

        def open_(url):
            storage = open_storage(url)
            stack.callback(close, storage)
            return storage

        yield open_


def test_every_storage_shows_the_same_study_and_two_writers_share_it(url, opened, tmp_path):
    expected = open_storage(tmp_path / "expected.journal")
    for name, lines in (("one", some_trials(12)), ("two", some_trials(9, seed=1))):
        mirror_trials(expected, name, lines)
        writer = opened(url)
        mirror_trials(writer, name, lines[:4])
        mirror_trials(writer, name, lines)
        mirror_trials(opened(url), name, lines)
    reader = opened(url)
    for name in ("one", "two"):
        assert contents(reader, name) == contents(expected, name)
        assert load(reader, name).metric_names == list(VALUES)


WRITER = """
import sys
from fp4dse.sweeps.dashboard.trials import TrialData
from fp4dse.sweeps.dashboard.storages import open_storage
from fp4dse.sweeps.dashboard.mirror import mirror_trials
storage = open_storage(sys.argv[1])
for n in range(1, 9):
    facts = [{"label": str(i)} for i in range(n)]
    trials = [TrialData(key=str(i), params={"a": "xyz"[i % 3]}, values=(i, -i), facts=facts[i]) for i in range(n)]
    mirror_trials(storage, sys.argv[2], trials)
"""


@pytest.mark.slow
@pytest.mark.parametrize("url", ["journal", "postgresql", "grpc"], indirect=True)
def test_several_processes_that_write_at_a_time_lose_nothing(url, opened):
    reader = opened(url)  # makes the tables of a database
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, url, f"study {i}"]) for i in range(2)
    ]  # at the same time
    assert [writer.wait(timeout=120) for writer in writers] == [0, 0]
    for i in range(2):
        assert [trial.user_attrs["label"] for trial in load(reader, f"study {i}").trials] == [str(n) for n in range(8)]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("postgresql://me:secret@127.0.0.1:1/none", "a database that answers"),
        ("postgresql://127.0.0.1:1/none?user=me&password=secret", "a database that answers"),
        ("postgresql://me:x/secret@127.0.0.1:1/none", "a database that answers"),
        ("postgresql:/me:secret@127.0.0.1/none", "a path, or a URL with :// in it"),
        ("grpc://127.0.0.1", "grpc://HOST:PORT"),
        ("grpc://me:secret@127.0.0.1:1", "grpc://HOST:PORT"),
        ("grpc://127.0.0.1:99999", "grpc://HOST:PORT"),
        ("nosql://me:secret@x", "a database that answers"),
        ("sqlite:////proc/none/x.db", "a database that answers"),
        ("/proc/none/x.journal", "a file that can be read and written"),
    ],
)
def test_a_storage_that_does_not_answer_is_named_without_its_password(wrong, said):
    with pytest.raises(ConfigError, match="--storage") as caught:
        open_storage(wrong)
    assert said in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_proxy_behind_which_nobody_answers_is_named(monkeypatch):
    monkeypatch.setattr(storages, "WAIT_S", 0.2)
    with pytest.raises(ConfigError, match="of a storage that answers"):
        open_storage("grpc://127.0.0.1:1")
