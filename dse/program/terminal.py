"""Text for a terminal. Names in files, labels and error messages are somebody else's text: an escape sequence in them
would move the cursor, recolour or rewrite what stands there, so it is shown, not obeyed.

Within `safe_terminal` all that this process prints passes through `visible`. What draws on the terminal on purpose (a
live table) writes to `drawn_on(stream)`, and makes the texts that it draws visible itself.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but tab and newline, what changes the direction of writing, and halves of characters, which stand
for bytes of a file's name that are no text."""


def visible(text: str) -> str:
    r"""The text with control characters as escapes: `\u001b[31m` for what would turn the terminal red. Strings of JSON
    and of TOML mean the same after it as before."""
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class Visible:
    """A text stream that makes visible what is written to it; all else is the stream's."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write the text; characters that the stream cannot encode are escaped, too."""
        encoding = self.stream.encoding or "utf-8"
        self.stream.write(visible(text).encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def safe_terminal() -> Iterator[None]:
    """Within, standard output and standard error show control characters as escapes."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, Visible(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def drawn_on(stream: TextIO) -> TextIO:
    """The stream itself, for what draws with control characters."""
    return stream.stream if isinstance(stream, Visible) else stream


def duration(seconds: float) -> str:
    """`42s`, `3m05s`, `2h10m`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"
