"""Finished jobs on their way into the store. One thread writes them in their order, so that neither workers nor signals
wait for a disk or a server.

A store behind a URL may be out of reach for a while: what is finished waits, whole, in the job folders, and is tried
again as long as anything else is left to do, then for `PATIENCE_S`. A driver that gives up, or is killed, leaves the
folders to the next one (resume.py). A disk that takes nothing is an error at once: the folders are on it, too.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from fp4dse.dse import StoreError
from fp4dse.results import Store
from fp4dse.results.store.remote import RemotePath
from fp4dse.results.store.retries import stop_waiting_when, why_unreachable
from fp4dse.results.text.ratios import counted

T = TypeVar("T")

PATIENCE_S = 600.0
"""So long a driver that has nothing else to do waits for a store that cannot be written."""
RETRY_S = 10.0
SLOW_S = 10.0
"""A store that has not taken rows for so long is worth a word."""
COMPACT_FILES = 512
"""So many files are joined while a sweep runs, so that a driver that starts after a kill reads few."""


class StoreWriter(Generic[T]):
    """Writes rows to a store, on a thread of its own. Rows come with an item, which `stored` returns when they are
    there."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.waiting: deque[tuple[T, list[dict[str, Any]], str]] = deque()
        self._stored: deque[T] = deque()
        self._error: BaseException | None = None
        self._why = "it does not answer"
        self._since = 0.0
        self._added = 0
        self._news = threading.Condition()
        self._last = False  # whether a failure is the end
        self._over = False
        here = contextvars.copy_context()  # who asks the driver to stop asks its threads, too
        self._thread = threading.Thread(target=here.run, args=(self._work,), name="storing", daemon=True)
        self._thread.start()

    def put(self, of: T, rows: list[dict[str, Any]], name: str) -> None:
        """Queue rows, which are stored as `name`."""
        with self._news:
            self._since = self._since if self.waiting else time.monotonic()
            self.waiting.append((of, rows, name))
            self._news.notify_all()

    def stored(self) -> Sequence[T]:
        """The items that were stored since the last call. Raises what storing raised, in which case nothing more is
        stored."""
        found = []
        while self._stored:
            found.append(self._stored.popleft())
        if self._error is not None and not found:
            raise self._error
        return found

    def finish(self, wait_s: float) -> None:
        """Wait until all that was put is stored, or cannot be, for `wait_s` seconds at most."""
        with self._news:
            self._news.wait_for(lambda: not self.waiting or self._over, wait_s)

    def last_try(self, wait_s: float) -> None:
        """Wait as `finish` does, but no longer for a store that cannot be written now."""
        with self._news:
            self._last = True
            self._news.notify_all()
        self.finish(wait_s)

    def trouble(self) -> str | None:
        """The reason that rows wait, if they have for long."""
        if not self.waiting or time.monotonic() - self._since < SLOW_S:
            return None
        jobs = counted(len(self.waiting), "finished job")
        minutes = (time.monotonic() - self._since) / 60
        why = why_unreachable(self.store.path) or self._why
        return f"waiting for {self.store.path} for {minutes:.0f} min with {jobs}, which are safe on the disk: {why}"

    def refusal(self, work: object) -> StoreError:
        """The error of a driver that waits no more; the machine's fault, not the input's."""
        jobs = counted(len(self.waiting), "finished job")
        advice = f"{jobs} kept in {work}, the same command stores them and continues"
        error = StoreError(f"{self.store.path}: cannot be written ({self._why}); {advice}")
        error.__cause__ = OSError(self._why)
        return error

    def close(self) -> None:
        """Begin nothing more; what is being written may take a moment."""
        with self._news:
            self._last = self._over = True
            self._news.notify_all()
        self._thread.join(RETRY_S)

    def _work(self) -> None:
        with stop_waiting_when(lambda: self._last):
            while not self._over:
                with self._news:
                    self._news.wait_for(lambda: self.waiting or self._over)
                    if self._over:
                        return
                    of, rows, name = self.waiting[0]
                asked = self._last  # before this try, not during it
                try:
                    self._store(rows, name)
                except BaseException as error:
                    self._fail(error, asked)
                    continue
                with self._news:
                    self._since = time.monotonic()
                    self._stored.append(of)
                    self.waiting.popleft()
                    self._news.notify_all()

    def _fail(self, error: BaseException, asked: bool) -> None:
        """Wait before the next try, or end."""
        with self._news:
            if self._may_pass(error):
                self._why = " ".join(str(error.__cause__ or error).split())
                self._over = self._over or asked
                self._news.wait_for(lambda: self._last or self._over, RETRY_S)
            else:
                self._error, self._over = error, True
            self._news.notify_all()

    def _store(self, rows: list[dict[str, Any]], name: str) -> None:
        self.store.add(rows, name)
        self._added += 1
        if self._added % COMPACT_FILES == 0:
            self.store.compact()

    def _may_pass(self, error: BaseException) -> bool:
        """True if a server or the way to it failed, not the rows."""
        is_machine = isinstance(error, OSError) or isinstance(error.__cause__, OSError)
        return is_machine and isinstance(self.store.path, RemotePath)
