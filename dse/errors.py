"""Two kinds of error, each one line: wrong input, and a store that cannot be used."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

ALIKE = 0.66
"""The share of a word that must be the same for it to be taken for a slip: `nvpf4` for `nvfp4`, not `sr` for `rht`."""


class ConfigError(ValueError):
    """Input that a person can correct.

    `where` is the file and key (or the argument), `found` the value as given (None for nothing), `accepted` what
    would be taken instead. `str(error)` is one line. Where `accepted` lists names, the one that `found` is a slip of is
    asked for. `also`: further values that it may be a slip of, too many to be listed.
    """

    def __init__(self, where: str, found: object, accepted: str, also: Sequence[str] = ()) -> None:
        self.where, self.found, self.accepted, self.also = where, found, accepted, also
        shown = "nothing" if found is None else repr(found)
        if len(shown) > 100:
            shown = shown[:100] + "…"
        meant = (_alike(found, also) or near(found, names_in(accepted))) if isinstance(found, str) else None
        asks = f"; did you mean {meant!r}?" if meant else ""
        super().__init__(" ".join(f"{where}: found {shown}; accepted: {accepted}{asks}".splitlines()))


class StoreError(RuntimeError):
    """The store cannot be read or written; the message is one line that says why and what to do."""


def names_in(accepted: str) -> list[str]:
    """The names of a list in words: `a, b, or a table` has a and b."""
    parts = re.split(r"[,;]\s*|\s+or\s+|\bone of\s+", accepted)
    return [part for part in parts if part and not re.search(r"\s", part)]


def near(text: str, names: list[str]) -> str | None:
    """The name that the text is a slip of; of a path, which has dots, the path with the first such name put right."""
    lower = {name.lower(): name for name in reversed(names) if "." not in name}
    words = text.split(".")
    for i, word in enumerate(words):
        if word not in names and (found := difflib.get_close_matches(word.lower(), lower, 1, ALIKE)):
            return ".".join([*words[:i], lower[found[0]], *words[i + 1 :]])
    return None


def _alike(text: str, values: Sequence[str]) -> str | None:
    return next(iter(difflib.get_close_matches(text, values, 1, 0.8)), None)


def at_key(where: str, *keys: str) -> str:
    """`file: key.key`"""
    return f"{where}: {'.'.join(keys)}" if keys else where
