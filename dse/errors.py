"""One kind of error for every wrong input: it names the place, what was found, what is accepted."""


class ConfigError(ValueError):
    """Input that a person can correct.

    `where` is the file and key (or the argument), `found` the value as given, `accepted` what would be taken
    instead. `str(error)` is one line.
    """

    def __init__(self, where: str, found: object, accepted: str) -> None:
        self.where, self.found, self.accepted = where, found, accepted
        super().__init__(f"{where}: found {found!r}; accepted: {accepted}")


class StoreError(RuntimeError):
    """The store cannot be read or written; the message is one line that says why and what to do."""
