"""Ends a sweep from inside and outside, and shows until then that it lives.

A sweep that is refused before its first job leaves the state of the one before it.

Ctrl-C ends a sweep between two steps of its loop, never in the middle of storing a result. Another process asks by a
file beside the store. The thread that looks for that file also writes the sweep's state every two seconds, whatever
else the driver waits for (workers that stand still, a plan that takes minutes, a server that does not answer).
"""

from __future__ import annotations

import contextlib
import contextvars
import signal
import threading
import time
from collections.abc import Callable, Iterator

from fp4dse.dse import ConfigError, StoreError
from fp4dse.results.store.atomic import write_atomic
from fp4dse.results.store.locks import LAST_S
from fp4dse.results.store.remote import AnyPath, locate, without_retries
from fp4dse.results.store.retries import stop_waiting_when
from fp4dse.sweeps.running.state import HEARTBEAT_S, SweepState, keep_bytes, read_state, write_state


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


def is_refused(error: BaseException, state: SweepState) -> bool:
    """The input was wrong, and the loop of the sweep has not begun."""
    return isinstance(error, ConfigError) and not state.elapsed_s


@contextlib.contextmanager
def state_kept_if_refused(store: AnyPath, state: SweepState) -> Iterator[None]:
    """Around `heartbeat`: if the sweep is refused, the store has its earlier state again, or none."""
    put_back = keep_bytes(store)
    try:
        yield
    except ConfigError as error:
        if is_refused(error, state):
            put_back()
        raise


@contextlib.contextmanager
def heartbeat(store: AnyPath, state: SweepState) -> Iterator[Callable[[], bool]]:
    """Within, `state` is written to the store every HEARTBEAT_S seconds; at the end once more, as it is then. Yields a
    function that says whether somebody asked for a stop since."""
    over, stop_asked = threading.Event(), threading.Event()

    def beat() -> None:
        while not over.is_set():
            write_state(store, state)
            with contextlib.suppress(OSError, StoreError):  # a store that cannot be reached now is asked again later
                if (without_retries(store) / "stop").exists():
                    stop_asked.set()
            over.wait(HEARTBEAT_S)
        write_state(store, state)
        _forget_requests(store)

    _forget_requests(store)
    here = contextvars.copy_context()
    thread = threading.Thread(target=here.run, args=(beat,), name="heartbeat", daemon=True)
    thread.start()
    try:
        yield stop_asked.is_set
    finally:
        over.set()
        thread.join(LAST_S)


def stop_sweep(store: str | AnyPath) -> SweepState:
    """Ask the sweep that writes to a store to end, wherever it runs, and wait until it has.

    StoreError if none runs, or if it has not ended after a minute.
    """
    state = read_state(store)
    if not state.driver_is_alive:
        raise StoreError(f"{store}: no sweep runs here ({state.ended or f'process {state.pid} is gone'})")
    write_atomic(locate(store) / "stop", f"{time.time()}\n".encode())
    deadline = time.monotonic() + 60.0
    while (state := read_state(store)).driver_is_alive:
        if time.monotonic() > deadline:
            raise StoreError(f"{store}: process {state.pid} on {state.host} was asked to stop, but has not yet")
        time.sleep(0.2)
    return state


def _forget_requests(store: AnyPath) -> None:
    """Delete requests to stop, which were for a sweep that is over."""
    with contextlib.suppress(OSError):
        (without_retries(store) / "stop").unlink(missing_ok=True)
