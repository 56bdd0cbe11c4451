"""Files that somebody else wrote: what is wrong with them is said in one line, however they are wrong."""

import msgspec
import pytest

from fp4dse.dse import ConfigError, Space, load_recipe
from fp4dse.dse.cost import load_chip, load_model
from fp4dse.dse.reading.files import DEEPEST, decode_json, is_deep, read_toml

DEEP = 100_000
WRONG = {
    "deep lists": "a = " + "[" * DEEP + "]" * DEEP,
    "deep tables in a line": "a = " + "{b = " * DEEP + "1" + "}" * DEEP,
    "a deep key": "a" + ".b" * 2000 + " = 1",
    "a deep heading": "[a" + ".b" * 2000 + "]",
    "lists that the reader takes": "a = " + "[" * 2 * DEEPEST + "]" * 2 * DEEPEST,
    "a number without end": "a = " + "9" * 10_000,
    "no TOML": "a = = 1",
    "a key twice": "a = 1\na = 2",
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("read", [read_toml, Space.load, load_recipe, load_chip, load_model])
def test_whatever_is_wrong_with_a_toml_file_is_one_line_that_names_it(tmp_path, what, read):
    path = tmp_path / "wrong.toml"
    path.write_text(WRONG[what])
    with pytest.raises(ConfigError) as error:
        read(path if read is read_toml else str(path))
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600


@pytest.mark.parametrize(
    "text",
    [b"[" * DEEP, b'{"a":' * DEEP, b"[" * 2 * DEEPEST + b"]" * 2 * DEEPEST, b'{"a": "\xff"}', b"", b"{"],
)
def test_whatever_is_wrong_with_json_is_a_decode_error(text):
    with pytest.raises(msgspec.DecodeError):
        decode_json(text)


def test_what_is_not_looked_into_may_not_be_deep_either():
    with pytest.raises(msgspec.DecodeError):
        decode_json(b'{"a":' * DEEP + b"1" + b"}" * DEEP, dict[str, msgspec.Raw])


def test_json_is_read_as_the_type_that_is_asked_for():
    assert decode_json(b'{"a": [1, {"b": null}]}') == {"a": [1, {"b": None}]}
    assert decode_json(b"[1, 2]", tuple[int, int]) == (1, 2)


def test_as_deep_as_is_said_is_taken():
    nested: object = 1
    for _ in range(DEEPEST - 1):
        nested = [nested]
    assert not is_deep(nested)
    assert is_deep([[nested]])
