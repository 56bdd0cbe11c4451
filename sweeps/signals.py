"""Ctrl-C ends a sweep between two steps of its loop, never in the middle of storing a result."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

from fp4dse.results.store.retries import stop_waiting_when


@contextlib.contextmanager
def stop_signals() -> Iterator[list[str]]:
    """Within, SIGINT, SIGTERM and SIGHUP end nothing: their names are added to the list that this yields,
    and a store that is waited for is given up.

    A signal that is ignored stays so (nohup). Outside the main thread Python allows no handlers: nothing changes.
    """
    received: list[str] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    wanted = [s for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) != signal.SIG_IGN]
    before = {s: signal.signal(s, lambda number, _: received.append(signal.Signals(number).name)) for s in wanted}
    try:
        with stop_waiting_when(lambda: bool(received)):  # for a server that cannot be reached
            yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
