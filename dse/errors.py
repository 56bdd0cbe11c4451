"""Two kinds of error, each one line: wrong input, and a store that cannot be used."""


class ConfigError(ValueError):
    """Input that a person can correct.

    `where` is the file and key (or the argument), `found` the value as given (None for nothing), `accepted` what
    would be taken instead. `str(error)` is one line.
    """

    def __init__(self, where: str, found: object, accepted: str) -> None:
        self.where, self.found, self.accepted = where, found, accepted
        shown = "nothing" if found is None else repr(found)
        if len(shown) > 100:
            shown = shown[:100] + "…"
        super().__init__(" ".join(f"{where}: found {shown}; accepted: {accepted}".splitlines()))


class StoreError(RuntimeError):
    """The store cannot be read or written; the message is one line that says why and what to do."""
