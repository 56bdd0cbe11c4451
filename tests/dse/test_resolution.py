"""Who judges single recipes by a preset that does not resolve them is told so."""

import msgspec
import pytest

from fp4dse.dse.resolution import Resolved, resolved, warning

NOISY = Resolved("vision:tiny", "digits", 2, ratio=0.4, tells_apart=False, least=0.314)
ALIKE = Resolved("vision:alike", "digits", 2, ratio=12.0, tells_apart=False, least=0.02)
APART = Resolved("language:tiny", "text", 2, ratio=4.0, tells_apart=True, least=0.0057)
DIVERGED = Resolved("vision:wild", "digits", 2, ratio=None, tells_apart=False, least=None)
GOOD = Resolved("language:good", "text", 2, ratio=10.0, tells_apart=True, least=0.001)
LINES = [NOISY, ALIKE, APART, DIVERGED, GOOD]


def said(line: Resolved, **others: str | int) -> str | None:
    task, _, preset = line.preset.partition(":")
    asked = {"task": task, "preset": preset, "dataset_digest": line.dataset_digest, "rev": line.rev, **others}
    return warning(**asked, found=LINES)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            NOISY,
            "this preset does not resolve single recipes: NVFP4's gap deviates from seed to seed by 250 % of itself, "
            "where 10 % or less resolves; five seeds do not tell NVFP4 from MXFP4, and mostly find differences in loss "
            "of 31 %, with more of them (--seeds) smaller ones",
        ),
        (
            APART,
            "single recipes: with five seeds this preset mostly finds differences in loss of 0.57 %, with more of them "
            "(--seeds) smaller ones",
        ),
        (
            ALIKE,
            "this preset does not resolve single recipes: five seeds do not tell NVFP4 from MXFP4, and mostly find "
            "differences in loss of 2 %, with more of them (--seeds) smaller ones",
        ),
    ],
)
def test_a_preset_that_does_not_resolve_is_warned_of(line, words):
    assert said(line) == words


def test_where_a_recipe_diverged_or_one_seed_was_tried_nobody_knows():
    assert "is not known to resolve" in said(DIVERGED)
    equal = msgspec.structs.replace(NOISY, ratio=0.0)
    assert "is not known to resolve" in warning("vision", "tiny", "digits", 2, [equal])
    assert warning("vision", "tiny", "digits", 2, []) is None


def test_nothing_is_said_of_a_preset_that_resolves_or_that_nobody_checked():
    assert said(GOOD) is None
    assert said(msgspec.structs.replace(NOISY, preset="my.py:task")) is None
    for other in ({"dataset_digest": "mine"}, {"rev": 3}, {"preset": "other"}):
        assert said(NOISY, **other) is None


def test_the_shipped_file_has_each_preset_once_for_its_data():
    found = resolved()
    assert len({(one.preset, one.dataset_digest) for one in found}) == len(found) > 20
    assert {one.resolves for one in found} == {True, False}
