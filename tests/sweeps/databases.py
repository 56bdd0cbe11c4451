"""A PostgreSQL server of the machine's own binaries, in a folder of its own, on loopback, for one test session."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

USER = "postgres"
"""The server refuses to run as root; Debian's package makes this user."""


def binary(name: str) -> str | None:
    """Debian keeps the server's programs off the PATH."""
    places = [str(path.parent) for path in sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))]
    return shutil.which(name, path=os.pathsep.join([*places, os.environ.get("PATH", "")]))


def why_not() -> str | None:
    """Why there is no server, None if there can be one."""
    if not binary("initdb") or not binary("postgres"):
        return "PostgreSQL's server is not installed (apt-get install postgresql)"
    if os.geteuid() == 0 and USER not in {user.pw_name for user in pwd.getpwall()}:
        return f"root cannot run PostgreSQL's server and there is no user {USER}"
    return None


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextlib.contextmanager
def postgresql() -> Iterator[str]:
    """The URL of a fresh, empty database; the server ends with the block."""
    folder = Path(tempfile.mkdtemp(prefix="fp4dse-postgresql-"))
    port = free_port()
    as_user: dict = {}
    if os.geteuid() == 0:
        user = pwd.getpwnam(USER)
        os.chown(folder, user.pw_uid, user.pw_gid)
        as_user = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    data, quiet = folder / "data", {"cwd": folder, "env": {"LC_ALL": "C", "PATH": os.environ["PATH"]}, **as_user}
    made = [str(binary("initdb")), "--pgdata", str(data), "--username=fp4dse", "--auth=trust", "--no-sync"]
    made += ["--encoding=UTF8", "--locale=C"]  # Optuna stores JSON as text
    subprocess.run(made, check=True, capture_output=True, **quiet)
    options = ["-c", "listen_addresses=127.0.0.1", "-c", f"unix_socket_directories={folder}", "-c", "fsync=off"]
    server = subprocess.Popen(
        [str(binary("postgres")), "-D", str(data), "-p", str(port), *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        **quiet,
    )
    try:
        assert server.stderr
        for line in server.stderr:
            if b"ready to accept connections" in line:
                break
        yield f"postgresql://fp4dse@127.0.0.1:{port}/postgres"
    finally:
        server.send_signal(signal.SIGINT)  # without waiting for clients
        server.communicate(timeout=60)
        shutil.rmtree(folder, ignore_errors=True)
