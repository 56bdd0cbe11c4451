"""What all tests of tasks share."""

from collections.abc import Callable
from functools import cache

import pytest

from fp4dse.tasks import diffusion
from fp4dse.tasks.data.grammar import Language
from fp4dse.tasks.data.images import Images
from fp4dse.tasks.diffusion import frechet
from fp4dse.tasks.language import presets


@pytest.fixture(autouse=True, scope="module")
def little_is_held_out():
    """Of text two batches, not sixteen: they are read three times after each training, which takes most of one of few
    steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(presets, "EVAL_PASSES", 2)
        yield


_DRAWN = Language.texts
_texts = cache(_DRAWN)
FEW_TOKENS = 1 << 17


def _texts_once(language: Language, split: int, first: int, count: int, length: int):
    if count * length > FEW_TOKENS:
        return _DRAWN(language, split, first, count, length)
    tokens, nats = _texts(language, split, first, count, length)
    return tokens.copy(), nats.copy()


@pytest.fixture(autouse=True, scope="module")
def texts_are_drawn_once(request):
    """Of the procedural language: each population draws all that it reads, which takes longer than to train one of few
    steps. But for the tests of the language itself."""
    if request.module.__name__.endswith("test_grammar"):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Language, "texts", _texts_once)
        yield


@cache
def _little_reference(data: Callable[[], Images]) -> frechet.Reference:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frechet, "STEPS", 20)
        return frechet.reference.__wrapped__(data)


@pytest.fixture(autouse=True, scope="module")
def samples_are_judged_by_a_little_classifier():
    """Trained for a few steps, not for three seconds. What the whole one can tell, test_diffusion.py asks of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diffusion, "reference", _little_reference)
        yield
