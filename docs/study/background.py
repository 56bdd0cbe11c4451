"""A run in the background that outlives the call that started it: cards.py and stages.py, each of its own file.

It works on a copy of the project in a folder `at`, in a session of its own. There stand also the file that it runs,
`run.txt`, what it says, `driver`, its process, and `ended`, once it has ended.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

TREE = Path(__file__).resolve().parents[2]
COPY = "fp4dse"
"""The copy's folder. torch.compile traces nothing in a package named tree, which pytest makes of a folder `tree`."""
FILE, SAID, DRIVER, ENDED = "run.toml", "run.txt", "driver", "ended"


def start(
    script: str,
    file: Path,
    at: Path,
    options: Sequence[object],
    without: Sequence[str] = (),
    prepare: Callable[[Path], None] | None = None,
) -> None:
    """Begin a run of a script of this folder on a file, unless it has begun. The script is called with the file, its
    options and --at. without: names that are not copied; prepare: is called with the copy before.

    It ends the program where another file runs, or ran, in that folder."""
    if (at / DRIVER).exists():
        if (at / FILE).read_bytes() != file.read_bytes():
            sys.exit(f"--at: found {at}, where another file runs or ran; accepted: another folder")
        return
    tree = at / COPY
    shutil.rmtree(at, ignore_errors=True)  # of a start that did not come to its end
    shutil.copytree(TREE, tree, symlinks=True, ignore=shutil.ignore_patterns(".*", "__pycache__", *without))
    shutil.copy(file, at / FILE)
    if prepare:
        prepare(tree)
    words = [sys.executable, tree / "docs" / "study" / script, at / FILE, *options, "--at", at]
    with open(at / SAID, "ab") as log:
        streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        driver = subprocess.Popen(
            [str(word) for word in words], cwd=tree, start_new_session=True, env=surroundings(tree), **streams
        )
    (at / DRIVER).write_text(str(driver.pid))


def wait(at: Path, seconds: float, bring: Callable[[], None], every: float | None = None) -> str:
    """Wait until a run has ended, or so many seconds, and call `bring`, in between every so many seconds, too. Returns
    what became of the run: "ended", "it goes on", or "it is gone", as a process that was killed is."""
    begin = brought = time.monotonic()
    driver = Path("/proc") / (at / DRIVER).read_text()
    while not (at / ENDED).exists() and driver.exists() and (now := time.monotonic()) - begin < seconds:
        if every is not None and now - brought > every:
            bring()
            brought = time.monotonic()
        time.sleep(0.5)
    bring()
    return "ended" if (at / ENDED).exists() else "it goes on" if driver.exists() else "it is gone"


def surroundings(tree: Path) -> dict[str, str]:
    """Environment variables with which Python imports the package from a copy of the project."""
    path = os.pathsep.join(filter(None, [str(tree / "typings"), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
