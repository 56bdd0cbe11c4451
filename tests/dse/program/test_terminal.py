"""Somebody else's text on a terminal: shown, never obeyed."""

import io
import json
import sys
import tomllib

import pytest

from fp4dse.dse.program.terminal import Visible, drawn_on, safe_terminal, visible

HOSTILE = "\x1b[2J\x1b]0;title\x07\x9b31m\r\x08\x7f\u202egpj.exe\x85"


def test_control_characters_are_escapes_and_all_other_text_stays():
    assert visible("\x1b[31mred\x9b") == "\\u001b[31mred\\u009b"
    assert visible("a\tb\nc é ★ 日本 × 😀") == "a\tb\nc é ★ 日本 × 😀"
    shown = visible(HOSTILE)
    assert shown.isprintable()
    assert visible(shown) == shown


def test_every_control_character_of_unicode_is_shown():
    import unicodedata

    for code in range(sys.maxunicode + 1):
        if unicodedata.category(chr(code)) in ("Cc", "Cs", "Zl", "Zp") and chr(code) not in "\t\n":
            assert visible(chr(code)).isascii()


def test_json_and_toml_mean_the_same_after_it():
    assert json.loads(visible(json.dumps([HOSTILE], ensure_ascii=False))) == [HOSTILE]
    assert tomllib.loads('a = "' + visible("\x9b\x7f") + '"') == {"a": "\x9b\x7f"}


def test_what_is_printed_within_is_visible_and_what_draws_on_purpose_is_not_touched(capsys):
    with safe_terminal():
        print(HOSTILE)
        print(HOSTILE, file=sys.stderr)
        drawn_on(sys.stdout).write("\x1b[1m")
    out, err = capsys.readouterr()
    assert out == f"{visible(HOSTILE)}\n\x1b[1m"
    assert err == f"{visible(HOSTILE)}\n"
    print("\x1b")
    assert capsys.readouterr().out == "\x1b\n"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_what_a_terminal_cannot_show_ends_nothing(encoding):
    raw = io.BytesIO()
    stream = Visible(io.TextIOWrapper(raw, encoding=encoding))
    stream.writelines(["a × b ★ ", "\udcff\n"])
    stream.flush()
    assert raw.getvalue().decode(encoding).endswith("\\udcff\n")
