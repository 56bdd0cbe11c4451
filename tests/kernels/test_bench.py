"""The benchmark looks before it measures: what it times has the bits of the reference, or the row says so."""

import json

import msgspec
import pytest

from fp4dse import cli
from fp4dse.kernels import backend, bench


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(bench, "EDGE", 128)


def rows(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "kernels", "--json"])
    return ended.value.code, json.loads(capsys.readouterr().out)


def test_every_row_stands_beside_a_copy(capsys):
    code, table = rows(capsys)
    assert code == 0
    assert [row["what"].split(",")[0] for row in table] == [
        "float32: copy",
        "float32: nvfp4",
        "float32: nvfp4 SR",
        "float32: mxfp4",
        "float32: mxfp4 SR",
    ]
    for row in table:
        assert row["of_copy"] == pytest.approx(table[0]["time_us"] / row["time_us"])
        assert row["wrong"] == 0


def test_a_path_that_is_off_by_one_bit_is_told_and_fails(monkeypatch, capsys):
    sound = backend("cpu")

    def off(*arguments):
        values, factor = sound.decode_operand(*arguments)
        values[0, 0, 0] += 1
        return values, factor

    monkeypatch.setattr(bench, "backend", lambda device: msgspec.structs.replace(sound, decode_operand=off))
    code, table = rows(capsys)
    assert code == 1
    assert [row["wrong"] for row in table] == [0, 1, 1, 1, 1]
