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
from fp4dse.results.store.spaces import store_name
from fp4dse.sweeps.arguments import report_path
from fp4dse.sweeps.pictures import REPORT
from fp4dse.sweeps.state import read_state
from fp4dse.sweeps.study import mirror

if TYPE_CHECKING:
    import optuna

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
"""The dashboard has no password: it is for this machine alone; `ssh -L` brings it elsewhere."""
FOLLOW_S = 3.0
"""How often new rows are looked for."""
SHARE = 0.1
"""Most of the time that mirroring may take."""


def default_storage(store: AnyPath) -> Path:
    """The journal beside the store's files, or in the working directory if these are behind a URL; it may be deleted
    at any time."""
    return (store if isinstance(store, Path) else Path()) / "dashboard.journal"


def sweep_name(store: Store) -> str:
    """`zoo` for runs/zoo/store, else the folder's name."""
    return store_name(store)


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
    import optuna_dashboard

    stop = stop or threading.Event()
    follower = Follower(store, sweep, storage)
    follower.look()
    try:
        server = _Server((HOST, port), _Quiet)
    except (OSError, OverflowError) as error:
        raise ConfigError("--port", port, f"a port that is free, or 0 for any ({error})") from None
    pages = _Followed(optuna_dashboard.wsgi(storage), storage, follower.mirroring)
    server.set_app(_ForThisMachine(_WithReport(pages, report_path(store.path)), server.server_port))
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
                self.look()
            except (ConfigError, StoreError, OSError) as error:
                log.warning("%s", error)
            wait = max(FOLLOW_S, (time.monotonic() - begin) / SHARE)

    def look(self) -> dict[str, int]:
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


class _ForThisMachine:
    """Pages for requests that name this machine and come from its own pages, whatever their method; 403 for others."""

    def __init__(self, app: WSGIApplication, port: int) -> None:
        self.app, self.port = app, port
        names = (HOST, "localhost")
        self.hosts = {f"{name}:{port}" for name in names} | ({*names} if port == 80 else set())

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        origin = environ.get("HTTP_ORIGIN")
        ours = environ.get("HTTP_HOST") in self.hosts
        if ours and (origin is None or origin.removeprefix("http://") in self.hosts):
            return self.app(environ, start_response)
        tunnel = f"ssh -L {self.port}:{HOST}:{self.port} MACHINE"
        says = f"This dashboard answers at http://{HOST}:{self.port} alone; from another machine: {tunnel}"
        return _text(start_response, "403 Forbidden", says)


class _WithReport:
    """Pages, and the store's report under /report, as notes link to it."""

    def __init__(self, app: WSGIApplication, page: Path) -> None:
        self.app, self.page = app, page

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ.get("PATH_INFO") != REPORT:
            return self.app(environ, start_response)
        try:
            body = self.page.read_bytes()
        except OSError:
            return _text(start_response, "404 Not Found", f"There is no {self.page} yet: fp4dse report writes it.")
        start_response("200 OK", [("Content-Type", "text/html; charset=utf-8"), ("Content-Length", str(len(body)))])
        return [body]


def _text(start_response: StartResponse, status: str, text: str) -> Iterable[bytes]:
    body = f"{text}\n".encode()
    headers = [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(body)))]
    start_response(status, headers)
    return [body]


class _Followed:
    """The dashboard's pages, on which a study keeps the number under which it was first asked for."""

    def __init__(self, app: WSGIApplication, storage: optuna.storages.BaseStorage, mirroring: threading.Lock) -> None:
        self.app, self.storage, self.mirroring = app, storage, mirroring
        self.names: dict[int, str] = {}

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if not path.startswith(("/api/", "/csv/")):
            return self.app(environ, start_response)
        with self.mirroring:
            found = re.match(r"(/api/studies/|/csv/)(\d+)(.*)", path)
            if found:
                path = f"{found[1]}{self.number(int(found[2]))}{found[3]}"
            return self.app({**environ, "PATH_INFO": path}, start_response)

    def number(self, asked: int) -> int:
        """That of the study that now has the name of the one that was asked for."""
        try:
            self.names[asked] = self.storage.get_study_name_from_id(asked)
            return asked
        except KeyError:  # it was made anew
            pass
        try:
            return self.storage.get_study_id_from_name(self.names[asked])
        except KeyError:
            return asked


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
