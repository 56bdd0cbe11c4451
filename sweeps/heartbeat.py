"""A driver's sign of life: its state is written every two seconds by a thread of its own, whatever else the driver
waits for (workers that stand still, a plan that takes minutes, a server that does not answer). The same thread looks
whether somebody asked it to stop."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator

from fp4dse.results.store.locks import LAST_S
from fp4dse.results.store.remote import AnyPath
from fp4dse.sweeps.places import stop_requested, withdraw_stop
from fp4dse.sweeps.state import BEAT_S, SweepState, write_state


@contextlib.contextmanager
def heartbeat(store: AnyPath, state: SweepState) -> Iterator[Callable[[], bool]]:
    """Within, `state` is written to the store again and again; at the end once more, as it is then. Yields whether
    somebody asked for a stop since."""
    over, asked = threading.Event(), threading.Event()

    def beat() -> None:
        while not over.is_set():
            write_state(store, state)
            if stop_requested(store):
                asked.set()
            over.wait(BEAT_S)
        write_state(store, state)
        withdraw_stop(store)

    withdraw_stop(store)
    here = contextvars.copy_context()
    thread = threading.Thread(target=here.run, args=(beat,), name="heartbeat", daemon=True)
    thread.start()
    try:
        yield asked.is_set
    finally:
        over.set()
        thread.join(LAST_S)
