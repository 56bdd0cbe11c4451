"""optuna-dashboard over a store: mirrors what is there, serves it on this machine, and stays in step with a sweep.

A study has to be made anew when a recipe brings a value that its axes did not have, which is often while a sweep is
young, and then has another number. A page that is open on the old number is answered with the new study, and no page
sees a study half made.

The server has no password, so it answers only requests that name this machine. A foreign page that a browser here has
open may send others (by a name of its own that leads here, or as a form), but cannot hide where they are from.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from fp4dse.dse import ConfigError, StoreError
from fp4dse.results import Store
from fp4dse.results.store.remote import AnyPath
from fp4dse.sweeps.dashboard.mirror import mirror
from fp4dse.sweeps.dashboard.trials import REPORT
from fp4dse.sweeps.running.state import read_state
from fp4dse.sweeps.stores import report_path

if TYPE_CHECKING:
    import optuna

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
"""The dashboard has no password: it is for this machine alone; `ssh -L` brings it elsewhere."""
FOLLOW_S = 3.0
"""Seconds after which new rows are looked for again."""
SHARE = 0.1
"""Most of the time that mirroring may take."""


def default_storage(store: AnyPath) -> Path:
    """The journal beside the store's files, or in the working directory if these are behind a URL; it may be deleted
    at any time."""
    return (store if isinstance(store, Path) else Path()) / "dashboard.journal"


def serve(
    store: Store,
    sweep: str,
    storage: optuna.storages.BaseStorage,
    port: int = 8080,
    follow: bool = True,
    ready: Callable[[str], None] = print,
    stop: threading.Event | None = None,
) -> None:
    """Mirror the store, then serve until `stop` or an interrupt, mirroring what comes in meanwhile.

    `ready` is called with the address. Port 0 takes any free one. ConfigError if the port is taken.
    """
    stop = stop or threading.Event()
    follower = Follower(store, sweep, storage)
    follower.update()
    try:
        server = _Server((HOST, port), _Quiet)
    except (OSError, OverflowError) as error:
        raise ConfigError("--port", port, f"a port that is free, or 0 for any ({error})") from None
    server.set_app(_Pages(follower, server.server_port))
    threads = [threading.Thread(target=server.serve_forever, daemon=True)]
    if follow:
        threads.append(threading.Thread(target=follower.run, args=(stop,), daemon=True))
    for thread in threads:
        thread.start()
    ready(f"http://{HOST}:{server.server_port}")
    try:
        stop.wait()
    except KeyboardInterrupt:
        stop.set()
    finally:
        server.shutdown()
        server.server_close()
        for thread in threads:
            thread.join()


class Follower:
    """Keeps the studies of a store in step with it. Holds what it saw last, and `mirroring` while they change."""

    def __init__(self, store: Store, sweep: str, storage: optuna.storages.BaseStorage) -> None:
        self.store, self.sweep, self.storage = store, sweep, storage
        self.seen: object = None
        self.mirroring = threading.Lock()

    def run(self, stop: threading.Event) -> None:
        """Look every FOLLOW_S seconds, less often where it takes long. A store that cannot be read now may be later."""
        wait = FOLLOW_S
        while not stop.wait(wait):
            begin = time.monotonic()
            try:
                self.update()
            except (ConfigError, StoreError, OSError) as error:
                log.warning("%s", error)
            wait = max(FOLLOW_S, (time.monotonic() - begin) / SHARE)

    def update(self) -> dict[str, int]:
        """Mirror the store if it changed; returns study name -> trials. Recipes of a running sweep come when all of
        their lanes have."""
        running = self._sweep_is_running()
        here = (running, self.store.files())
        if here == self.seen:
            return {}
        with self.mirroring:
            found = mirror(self.store, self.storage, self.sweep, unfinished=not running)
        self.seen = here
        return found

    def _sweep_is_running(self) -> bool:
        try:
            return read_state(self.store.path).driver_is_alive
        except StoreError:
            return False


class _Pages:
    """The dashboard's pages, and the store's report under /report as notes link to it, for this machine alone.

    A request that does not name this machine, or comes from a page of another one, is answered with 403, whatever its
    method. A study keeps the number under which it was first asked for.
    """

    def __init__(self, follower: Follower, port: int) -> None:
        import optuna_dashboard

        self.app: WSGIApplication = optuna_dashboard.wsgi(follower.storage)
        self.storage, self.mirroring = follower.storage, follower.mirroring
        self.report, self.port = report_path(follower.store.path), port
        names = (HOST, "localhost")
        self.hosts = {f"{name}:{port}" for name in names} | ({*names} if port == 80 else set())
        self.study_names: dict[int, str] = {}

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path, origin = environ.get("PATH_INFO", ""), environ.get("HTTP_ORIGIN")
        is_ours = origin is None or origin.removeprefix("http://") in self.hosts
        if not is_ours or environ.get("HTTP_HOST") not in self.hosts:
            tunnel = f"ssh -L {self.port}:{HOST}:{self.port} MACHINE"
            text = f"This dashboard answers at http://{HOST}:{self.port} alone; from another machine: {tunnel}"
            return _answer(start_response, "403 Forbidden", text)
        if path == REPORT:
            try:
                return _answer(start_response, "200 OK", self.report.read_bytes())
            except OSError:
                text = f"There is no {self.report} yet: fp4dse report writes it."
                return _answer(start_response, "404 Not Found", text)
        if not path.startswith(("/api/", "/csv/")):
            return self.app(environ, start_response)
        with self.mirroring:
            found = re.match(r"(/api/studies/|/csv/)(\d+)(.*)", path)
            if found:
                path = f"{found[1]}{self.number(int(found[2]))}{found[3]}"
            return self.app({**environ, "PATH_INFO": path}, start_response)

    def number(self, asked: int) -> int:
        """The number of the study that now has the name of the one that was asked for."""
        try:
            self.study_names[asked] = self.storage.get_study_name_from_id(asked)
            return asked
        except KeyError:  # it was made anew
            pass
        try:
            return self.storage.get_study_id_from_name(self.study_names[asked])
        except KeyError:
            return asked


def _answer(start_response: StartResponse, status: str, body: str | bytes) -> Iterable[bytes]:
    """A line of text, or a page of HTML as bytes."""
    kind, data = ("plain", f"{body}\n".encode()) if isinstance(body, str) else ("html", body)
    headers = [("Content-Type", f"text/{kind}; charset=utf-8"), ("Content-Length", str(len(data)))]
    start_response(status, headers)
    return [data]


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def server_bind(self) -> None:
        """Without WSGIServer's look-up of this machine's name, which may take long."""
        super(WSGIServer, self).server_bind()
        self.setup_environ()

    def setup_environ(self) -> None:
        self.server_name, self.server_port = HOST, self.server_address[1]
        super().setup_environ()


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass
