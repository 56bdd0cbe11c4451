"""Many cases in one test: all are tried, and those that fail are named."""

import pytest

from tests.each import each


def test_every_case_that_fails_is_raised_with_its_values():
    tried = []

    @each("a, b", [(1, 2), (3, 3), (5, 6)])
    def unequal(a, b):
        tried.append((a, b))
        assert a == b

    with pytest.raises(ExceptionGroup, match="2 of 3 cases") as raised:
        unequal()
    assert tried == [(1, 2), (3, 3), (5, 6)]
    assert [error.__notes__ for error in raised.value.exceptions] == [["with a = 1, b = 2"], ["with a = 5, b = 6"]]


@pytest.mark.parametrize("names", ["a", "a, b"])
def test_no_case_at_all_fails(names):
    with pytest.raises(AssertionError, match="no case"):
        each(names, [])(lambda **_: None)()


@each("case", [1, 2, 3])
@each("other", "ab")
def test_fixtures_are_given_to_every_case(case, other, tmp_path):
    assert tmp_path.exists()
    (tmp_path / f"{case}{other}").touch(exist_ok=False)
