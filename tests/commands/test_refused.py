"""What a command cannot do it says in one line: the input's fault is 2, the machine's 1."""

import json
from pathlib import Path

import numpy as np
import pytest

from fp4dse.dse import StoreError
from fp4dse.results import Store, open_store
from tests.commands.running import FEW, assert_one_line, swept


def test_credentials_in_a_url_are_refused_and_not_repeated(run):
    answer = run("store", "info", "--store", "s3://AKIA:hidden/secret@bucket/store")
    assert answer.code == 2
    assert "hidden" not in answer.err
    assert "AWS_SECRET_ACCESS_KEY" in answer.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["sweep", "no-such-space"], ["no-such-space", "quickstart"]),
        (["sweep", "missing.toml"], ["missing.toml"]),
        (["sweep", "broken.toml"], ["broken.toml", "TOML", "axes = "]),
        (["sweep", "binary.toml"], ["binary.toml", "UTF-8"]),
        (["sweep", "typo.toml"], ["typo.toml", "axis", "axes"]),
        (["sweep", "few.toml", "--task", "chess"], ["chess", "regression, vision"]),
        (["sweep", "few.toml", "--preset", "huge"], ["huge", "quickstart"]),
        (["sweep", "few.toml", "--seeds", "many"], ["--seeds", "many"]),
        (["sweep", "few.toml", "--seeds", "0"], ["--seeds"]),
        (["sweep", "few.toml", "--lr", "1e-3,-1"], ["--lr", "-1"]),
        (["sweep", "few.toml", "--budget", "soon"], ["--budget", "soon", "30m"]),
        (["sweep", "few.toml", "--jobs", "0"], ["--jobs"]),
        (["sweep", "few.toml", "--device", "abacus"], ["abacus", "cpu"]),
        (["sweep", "few.toml", "--rungs", "2", "--keep", "1.5"], ["--keep", "1.5"]),
        (["search", "few.toml", "--sampler", "tpe", "--trials", "0"], ["--trials", "0"]),
        (
            ["search", "few.toml", "--sampler", "tpe", "--trials", "1", "--objectives", "speed"],
            ["--objectives", "speed"],
        ),
        (["sweep", "few.toml", "--executor", "k8s"], ["--executor", "k8s", "slurm"]),
        (["recipe", "show", "nvfp5"], ["nvfp5", "nvfp4-sr"]),
        (["tensor", "absent.npy"], ["absent.npy"]),
        (["tensor", "few.toml"], [".toml", ".safetensors"]),
        (["tensor", "few.npy"], ["few.npy"]),
        (["tensor", "one.npy", "--quantizer", "nvfp5"], ["nvfp5", "nvfp4"]),
        (["tensor", "one.npy", "--plot", "error.png"], ["--plot", "error.png", ".html"]),
        (
            ["sweep", "finetune", "--task", "finetune:smoke", "--from", "a.safetensors", "--from", "b.safetensors"],
            ["--from", "'a.safetensors and b.safetensors'", "one", "repeat the command"],
        ),
        (["weights", "fit", "language:smoke", "--from", ""], ["--from", "not empty"]),
        (["status"], ["--store", "quickstart"]),
        (["status", "--store", "nowhere"], ["nowhere"]),
        (["report", "--store", "nowhere"], ["nowhere"]),
        (["query", "SELECT 1", "--store", "."], ["not a store"]),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(run, arguments, words):
    Path("broken.toml").write_text("axes = [")
    Path("few.npy").write_text(FEW)
    np.save("one.npy", np.ones(32))
    Path("binary.toml").write_bytes(b"\xff\xfe\x00")
    Path("typo.toml").write_text('[axis]\n"*" = ["nvfp4"]')
    assert_one_line(run(*arguments), 2, *words)
    assert not Path("runs").exists()


def test_wrong_sql_is_one_line(run, finished):
    assert_one_line(run("query", "SELEC 1"), 2, "SELEC 1")


def test_a_store_of_a_newer_version_is_refused(run):
    open_store("new", create=True)
    Path("new/store.json").write_text('{"schema_version": 999}')
    assert_one_line(swept(run, "--store", "new"), 2, "999", "upgrade")


def test_a_store_that_cannot_be_written_is_the_machines_fault(run):
    Path("file").write_text("")
    assert_one_line(swept(run, "--store", "file/store"), 1, "file/store")


def test_a_full_disk_is_the_machines_fault_and_loses_nothing(run, monkeypatch):
    def full(*_):
        raise StoreError("runs: the disk is full") from OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "add", full)
        answer = swept(run)
    assert answer.code == 1
    assert answer.err.splitlines()[-1] == "fp4dse: runs: the disk is full"
    assert json.loads(swept(run, "--json").out)["stored"] > 0


def test_escape_sequences_from_files_are_shown_and_not_obeyed(run, tmp_path):
    hostile = "w\x1b[2J\x9b31m<b>"
    np.savez(tmp_path / "a.npz", **{hostile: np.ones((4, 16), np.float32), f"{hostile}i": np.arange(3)})
    (tmp_path / "hostile.toml").write_text(FEW.replace('"few"', r'"x\u001b[2Jy"'))
    (tmp_path / "\x1b[2J.toml").write_text("x")
    asked = [
        ["tensor", "a.npz", "--quantizer", "nvfp4", "--plot", "a.html"],
        ["tensor", "a.npz", "--quantizer", "nvfp4", "--json"],
        ["space", "\x1b[2J.toml"],
        ["cost", "\x1b[2J"],
        ["space", "hostile.toml"],
        ["sweep", "few.toml", "--\x1b[2J"],
    ]
    for arguments in asked:
        answer = run(*arguments)
        assert not set("\x1b\x9b") & set(answer.out + answer.err), arguments
    assert "\\u001b[2J" in run(*asked[0]).out
    assert "\\u001b[2J" in run(*asked[2]).err
    assert hostile in json.loads(run(*asked[1]).out)["rows"][0]["tensor"]
    assert "<b>" not in (tmp_path / "a.html").read_text()
