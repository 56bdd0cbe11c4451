"""A run in the background that outlives the call that started it: cards.py and stages.py, each of its own file.

It works on a copy of the project in a folder `at`, in a session of its own. There stand also the file that it runs, the
options that say what of it, `run.txt`, what it says, `driver`, its process, and `ended`, how it ended.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

TREE = Path(__file__).resolve().parents[2]
COPY = "fp4dse"
"""The copy's folder. torch.compile traces nothing in a package named tree, which pytest makes of a folder `tree`."""
FILE, OPTIONS, SAID, DRIVER, ENDED = "run.toml", "options", "run.txt", "driver", "ended"


def start(
    script: str,
    file: Path,
    at: Path,
    what: Sequence[object],
    how: Sequence[object],
    without: Sequence[str] = (),
    prepare: Callable[[Path], None] | None = None,
) -> None:
    """Begin a run of a script of this folder on a file, unless it has begun. The script is called with the file, the
    options and --at. what: options without which it would be another run; how: the others. without: names that are not
    copied; prepare: is called with the copy before.

    It ends the program where `at` has another run, or anything else."""
    words = " ".join(map(str, what))
    if (at / DRIVER).exists():
        if (at / FILE).read_bytes() != file.read_bytes() or (at / OPTIONS).read_text() != words:
            ran = f"where another file, or with '{(at / OPTIONS).read_text()}', runs or ran"
            sys.exit(f"--at: found {at}, {ran}; accepted: another folder")
        return
    if at.exists() and any(at.iterdir()) and not (at / OPTIONS).exists():
        sys.exit(f"--at: found {at}, which has other things; accepted: a folder that is empty or not there")
    shutil.rmtree(at, ignore_errors=True)  # of a start that did not come to its end
    at.mkdir(parents=True)
    (at / OPTIONS).write_text(words)
    shutil.copy(file, at / FILE)
    tree = at / COPY
    shutil.copytree(TREE, tree, symlinks=True, ignore=shutil.ignore_patterns(".*", "__pycache__", *without))
    if prepare:
        prepare(tree)
    command = [sys.executable, tree / "docs" / "study" / script, at / FILE, *what, *how, "--at", at]
    with open(at / SAID, "ab") as log:
        streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        driver = subprocess.Popen(
            [str(word) for word in command], cwd=tree, start_new_session=True, env=surroundings(tree), **streams
        )
    (at / DRIVER).write_text(str(driver.pid))


@contextmanager
def ending(at: Path) -> Iterator[None]:
    """Note how a run ended: with an error, or not."""
    how = "it broke off"
    try:
        yield
        how = "ended"
    finally:
        (at / ENDED).write_text(how)


def wait(at: Path, seconds: float, bring: Callable[[], str], every: float) -> None:
    """Wait until a run has ended, or so many seconds, and call `bring`, every so many seconds and in the end. Says what
    the last call returned and what became of the run, and ends the program, with 1 where it broke off or was killed."""
    begin = brought = time.monotonic()
    while not (at / ENDED).exists() and _is_there(at) and (now := time.monotonic()) - begin < seconds:
        if now - brought > every:
            bring()
            brought = time.monotonic()
        time.sleep(0.5)
    print(bring())
    ended = (at / ENDED).read_text() if (at / ENDED).exists() else "it goes on" if _is_there(at) else "it is gone"
    print(ended, flush=True)
    sys.exit(ended not in ("ended", "it goes on"))


def _is_there(at: Path) -> bool:
    """True if the run's process is there, and no zombie."""
    try:
        stat = (Path("/proc") / (at / DRIVER).read_text() / "stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def cards(device: str) -> int:
    """The number of GPUs, 1 for a CPU."""
    if device == "cpu":
        return 1
    import torch

    return torch.cuda.device_count()


def surroundings(tree: Path) -> dict[str, str]:
    """Environment variables with which Python imports the package from a copy of the project."""
    path = os.pathsep.join(filter(None, [str(tree / "typings"), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
