"""Tables on a terminal: texts are folded, numbers are whole, and what does not fit is printed in blocks."""

import json

import pytest
from rich.console import Console

from fp4dse.commands import printing

LABEL = "forward nvfp4, gradients 16/17 stochastic, and a rotation of sixteen on the weight gradient"
ROWS = [{"label": LABEL, "gap": 0.0123456, "seeds": n, "none": None} for n in (3, 1234567)]


@pytest.fixture
def terminal(monkeypatch):
    def of(width):
        monkeypatch.setattr(printing, "console", lambda: Console(width=width, highlight=False, markup=False))

    return of


@pytest.mark.parametrize("width", [60, 90, 200])
def test_a_table_fits_and_keeps_its_numbers_and_all_words(terminal, capsys, width):
    terminal(width)
    printing.print_rows(["label", "gap", "seeds"], ROWS)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= width
    assert out.count("0.01235") == 2
    assert "1234567" in out
    assert set(LABEL.split()) <= set(out.split())


def test_what_is_too_wide_for_a_table_is_a_block_a_row(terminal, capsys):
    terminal(40)
    printing.print_rows(["label", "gap", "seeds"], ROWS)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines if line.startswith("seeds")] == [["seeds", "3"], ["seeds", "1234567"]]


def test_a_block_has_no_line_for_what_a_row_has_not(terminal, capsys):
    terminal(30)
    printing.print_rows(["label", "gap", "seeds", "none"], [ROWS[0], {**ROWS[0], "none": 0.5}])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line for line in lines if line[:1] == ["none"]] == [["none", "0.5"]]


def test_a_wide_answer_says_once_what_all_rows_share(terminal, capsys):
    terminal(400)
    rows = [{**{f"c{i}": i for i in range(printing.WIDE)}, "seed": seed, "empty": None} for seed in (0, 1)]
    printing.print_answer(list(rows[0]), rows)
    head, last = (lambda lines: (lines[1], lines[-1]))(capsys.readouterr().out.splitlines())
    assert head.split() == ["seed"]
    assert last == "in all rows: " + ", ".join(f"c{i} {i}" for i in range(printing.WIDE))


WIDE_ROWS = [{"label": LABEL, "gap": 0.5 + n, "low": 0.25, "high": 1.25 + n, "id": "0123456789abcdef"} for n in (0, 1)]


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (200, ["label", "gap", "low", "high", "id"]),
        (55, ["label", "gap", "low", "high"]),
        (40, ["label", "gap"]),
    ],
)
def test_a_narrow_terminal_shows_the_weightiest_columns_and_names_the_others(terminal, capsys, width, shown):
    terminal(width)
    printing.print_answer(list(WIDE_ROWS[0]), WIDE_ROWS, brief=("label gap", "low high"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == shown
    others = [name for name in WIDE_ROWS[0] if name not in shown]
    assert lines[-1].startswith(f"does not fit: {', '.join(others)} (--format") == bool(others)


def test_where_not_even_those_fit_an_answer_is_a_block_a_row_with_everything(terminal, capsys):
    terminal(30)
    printing.print_answer(list(WIDE_ROWS[0]), WIDE_ROWS, brief=("label gap", "low high"))
    out = capsys.readouterr().out
    assert out.count("0123456789abcdef") == 2
    assert "does not fit" not in out


def test_an_answer_without_rows_has_its_columns(terminal, capsys):
    terminal(80)
    printing.print_answer(["task", "gap"], [])
    assert {"task", "gap"} <= set(capsys.readouterr().out.split())


def test_json_is_whole(capsys):
    printing.print_rows(["gap"], ROWS, as_json=True)
    assert json.loads(capsys.readouterr().out) == ROWS


def test_a_list_says_once_what_it_holds_often(terminal, capsys):
    terminal(80)
    printing.print_facts({"jobs": ["a × 4", "b × 2", "a × 4"]})
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["jobs", "a", "×", "4,", "2", "times"],
        ["b", "×", "2"],
    ]


@pytest.mark.parametrize("as_json", [False, True])
def test_a_row_is_printed_before_the_next_one_is_made(terminal, capsys, as_json):
    def rows():
        yield {"what": "first"}
        assert "first" in capsys.readouterr().out
        yield {"what": "second"}

    printing.print_each(rows(), as_json)
    out = capsys.readouterr().out
    assert "first" not in out
    assert json.loads(out) == {"what": "second"} if as_json else "second" in out


@pytest.mark.parametrize("width", [20, 200])
def test_escape_sequences_in_names_and_values_are_shown(terminal, capsys, width):
    terminal(width)
    rows = [{"na\x1b[31mme": "va\x9blue\x07", "more": {"in\x1bside": 1}, "list": ["\x1bc"]}]
    printing.print_rows(list(rows[0]), rows)
    printing.print_facts(rows[0])
    out = capsys.readouterr().out
    assert not set("\x1b\x9b\x07") & set(out)
    assert "\\u001b" in out
