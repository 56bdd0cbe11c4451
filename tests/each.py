"""Many small cases of one claim as one test: pytest takes 2 ms for a test, more than most cases take to compute."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

Test = Callable[..., None]


def each(names: str, cases: Iterable[Any]) -> Callable[[Test], Test]:
    """A decorator that is used as pytest.mark.parametrize, but makes one test of all cases.

    names: of arguments, with commas; cases: a value each, or a tuple of values if there are several names. All cases
    are tried; those that fail are raised together, each with its values. Without a case the test fails. Fixtures are
    shared by the cases.
    """
    split = names.replace(",", " ").split()
    listed = [dict(zip(split, case if len(split) > 1 else [case], strict=True)) for case in cases]

    def decorate(test: Test) -> Test:
        signature = inspect.signature(test)

        @functools.wraps(test)
        def of_all_cases(**fixtures: Any) -> None:
            assert listed, "no case"
            failed = []
            for case in listed:
                try:
                    test(**case, **fixtures)
                except Exception as error:
                    error.add_note(f"with {', '.join(f'{name} = {value!s:.100}' for name, value in case.items())}")
                    failed.append(error)
            if failed:
                raise ExceptionGroup(f"{len(failed)} of {len(listed)} cases", failed)

        rest = [p for name, p in signature.parameters.items() if name not in split]
        of_all_cases.__signature__ = signature.replace(parameters=rest)  # type: ignore[attr-defined]
        return of_all_cases

    return decorate
