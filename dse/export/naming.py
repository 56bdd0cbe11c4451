"""Python that finds the setting of a layer by its name: it is part of what is printed for libraries of Python."""

from __future__ import annotations

from collections.abc import Sequence

from fp4dse.dse.export.assignment import Entry
from fp4dse.dse.export.names import GLOBS

IMPORTS = ("from fnmatch import fnmatchcase",)


def text(rules: Sequence[tuple[Entry, str]], default: str) -> list[str]:
    """Lines that define GLOBS, RULES and `setting(name)`: the word of the first rule that fits, else the default."""
    kinds = dict.fromkeys(word for entry, _ in rules for word in entry.kind)
    lines = [
        "GLOBS = {  # of names of layers, by kind",
        *(f"    {word!r}: {GLOBS[word]!r}," for word in kinds),
        "}",
        "",
    ]
    lines.append(
        "RULES = (  # kinds (none: any), a glob on the name, blocks (None: any), the format: the first that fits"
    )
    for entry, word in rules:
        lines.append(
            f"    ({entry.kind!r}, {entry.name or '*'!r}, {_blocks(entry.blocks)}, {word!r}),  # {entry.origin}"
        )
    return [
        *lines,
        ")",
        "",
        "",
        "def setting(name):",
        '    block = next((int(word) for word in name.split(".") if word.isdigit()), None)',
        "    for kinds, glob, blocks, found in RULES:",
        "        if kinds and not any(fnmatchcase(name, one) for kind in kinds for one in GLOBS[kind]):",
        "            continue",
        "        if fnmatchcase(name, glob) and (blocks is None or block in blocks):",
        "            return found",
        f"    return {default!r}",
        "",
    ]


def _blocks(blocks: tuple[int, ...] | None) -> str:
    if not blocks:
        return repr(blocks)
    if len(blocks) > 1 and list(blocks) == list(range(blocks[0], blocks[-1] + 1)):
        return f"range({blocks[0]}, {blocks[-1] + 1})"
    return repr(blocks)
