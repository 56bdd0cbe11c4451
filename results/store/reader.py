"""Reading while others write, and going on without what is broken.

Readers hold no lock: a file may be joined into a part under their eyes, then they look again. Each file is verified
before it is used (integrity.py). One that is broken is left out, with a warning that says how many lanes are missing
then; one that cannot be read now is an error, so that no answer lacks its rows.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from typing import TypeVar

import pyarrow as pa

from fp4dse.dse import StoreError
from fp4dse.results.store.atomic import in_parallel, move, reading, writing
from fp4dse.results.store.compaction import consequence, list_files, quarantine
from fp4dse.results.store.inbox import by_format
from fp4dse.results.store.integrity import Broken, VerifiedFiles, broken_file, count_lanes, first_line
from fp4dse.results.store.remote import AnyPath, RemotePath
from fp4dse.results.store.retries import is_server_error, with_retries

log = logging.getLogger(__name__)

T = TypeVar("T")

LOOKS = 10
DOUBTS = 4
"""So often all is verified again because a verified file could not be decoded, before that is an error."""


class _Doubted(Exception):
    """Files that had been verified could not be decoded: bits flipped since, or fewer bytes came than there are."""


class Reader:
    """The files of a store that are read; those that it found broken are left out from then on."""

    def __init__(self, store: AnyPath) -> None:
        self.store = store
        self.left_out: dict[AnyPath, str] = {}
        self._verified = VerifiedFiles(store)

    def read(self, action: Callable[[list[AnyPath]], T]) -> T:
        """`action` on all files that are what was written. StoreError if they cannot be read now."""
        vanished = doubts = 0
        while vanished < LOOKS:
            files = self._files()
            try:
                with reading(self.store):
                    if not self._leave_out(self._verified.broken(by_format(files)[1])):
                        return self._act(action, files)
            except FileNotFoundError:
                vanished += 1
            except Broken as broken:
                self._leave_out(broken.reasons)
            except _Doubted as doubted:
                doubts += 1
                if doubts > (DOUBTS if isinstance(self.store, RemotePath) else 1):
                    reason = first_line(doubted.__cause__ or doubted)
                    raise StoreError(f"{self.store}: cannot be read ({reason}); nothing was changed") from None
                self._verified.forget()
        raise StoreError(f"{self.store}: files keep vanishing while they are read; is something deleting them?")

    def move_broken(self, verify_all: bool = False) -> None:
        """Move files that are broken to `torn/`; the lock is held. Inbox files are verified when they are joined; with
        `verify_all` every file is verified now, also those that were before. StoreError if one cannot be read now."""
        if verify_all:
            self._verified.forget()
        ipc, parquet = by_format(self._files())
        with reading(self.store):
            reasons = self._verified.broken(parquet)
            for found in in_parallel(broken_file, ipc if verify_all else []):
                reasons |= found
        for file, reason in {**self.left_out, **reasons}.items():
            if file.exists():
                quarantine(self.store, file, reason)
        self.left_out.clear()

    def mend(self) -> dict[str, list[str]]:
        """Move the broken files of the store to `torn/`, and those of `torn/` that are not broken back: copied there
        again, or moved there by mistake. The lock is held.

        Returns names: "returned", and "broken" with the reason, all that `torn/` holds now.
        """
        self.move_broken(verify_all=True)
        torn = list_files(self.store, "torn")
        with reading(self.store):
            broken = {file: reason for found in in_parallel(broken_file, torn) for file, reason in found.items()}
        returned = [file for file in torn if file not in broken]
        for file in returned:
            with writing(self.store):
                move(file, self.store / _home(file) / file.name)
        return {
            "returned": [file.name for file in returned],
            "broken": [f"{file.name}: {broken[file]}" for file in torn if file in broken],
        }

    def _files(self) -> list[AnyPath]:
        # the inbox is listed first: a file joined into a part in between is then seen twice, never not at all
        found = [file for folder in ("inbox", "parts") for file in list_files(self.store, folder)]
        return [file for file in found if file not in self.left_out] if self.left_out else found

    def _act(self, action: Callable[[list[AnyPath]], T], files: list[AnyPath]) -> T:
        def attempt() -> T:
            try:
                return action(files)
            except FileNotFoundError:
                raise
            except (pa.ArrowException, OSError) as error:
                if isinstance(self.store, RemotePath) and is_server_error(error):
                    raise
                raise _Doubted from error

        return with_retries(attempt, self.store)

    def _leave_out(self, reasons: Mapping[AnyPath, str]) -> bool:
        """Leave these files out from now on, logged; True if there are any."""
        new = [file for file in reasons if file not in self.left_out]
        for file, lanes in zip(new, in_parallel(count_lanes, new), strict=True):
            log.warning("%s: left out, it is broken (%s). %s", file, reasons[file], consequence(lanes))
        self.left_out.update({file: reasons[file] for file in new})
        return bool(reasons)


def _home(file: AnyPath) -> str:
    """The folder that a file of this name was written to."""
    return "parts" if re.fullmatch(r"(join\d-)?[0-9a-f]{16}\.parquet", file.name) else "inbox"
