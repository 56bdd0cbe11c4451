"""Keeps the GPUs of one machine busy, unattended: commands of a file, each on as many cards as it asks for.

    python docs/study/cards.py docs/study/device.toml --out OUT --limit 1600 --wait 560

The first call starts the run in the background, on a copy of the tree in the folder of `--at`, waits so many seconds
and writes OUT/cards.tgz, every minute and in the end: a folder for each command, with what it said (said.txt) and what
it left in $RESULTS. The same command again, on the same machine, waits for the run that goes on. The run ends after
`--limit` seconds.

A file is a list of commands. A card that becomes free takes the first of them that still waits and asks for no more
cards than are free; one that needs more cards than there are, or more time than is left, is left out, and said:

    [[command]]
    name = "tests"
    cards = 1              # the default
    least = 120            # seconds without which it is not begun
    run = "{python} -m pytest -m gpu tests/kernels"

{left}: seconds that it has, some less than the run, so that it can still write its results; {python}: this one. A
command has its cards in CUDA_VISIBLE_DEVICES. What has not ended when the run does is killed, with the processes of its
group; what began a session of its own, or a group, as `timeout` does, must keep to its {left}. What is timed is best
put last, when the machine is quieter.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tarfile
import time
import tomllib
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from background import SAID, cards, ending, start, wait

SPARE_S = 15.0
"""Seconds by which {left} is short of the end of the run."""
BRINGING_S = 60.0
"""Seconds between two writings of OUT."""
KEYS = {"name", "run", "cards", "least"}


class Running(NamedTuple):
    """A command that was begun."""

    name: str
    process: subprocess.Popen[bytes]
    cards: list[int]
    began: float


def main() -> None:
    """Start the run, if there is none, wait, and bring back what there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--at", type=Path, default=Path("/tmp/cards"))
    parser.add_argument("--wait", type=float, default=560.0, help="seconds until OUT is written")
    parser.add_argument("--limit", type=float, default=1600.0, help="seconds that the run takes at most")
    parser.add_argument("--cards", type=int, help="how many there are; by itself all GPUs")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these commands alone")
    parser.add_argument("--drive", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.drive:
        drive(read(asked.file, asked.only), asked.at, asked.cards or cards("cuda"), time.monotonic() + asked.limit)
        return
    at, out = asked.at.resolve(), asked.out.resolve()
    read(asked.file, asked.only)  # what is wrong with the file is said here
    what = [*(["--only", *asked.only] if asked.only else []), *(["--cards", asked.cards] if asked.cards else [])]
    start("cards.py", asked.file, at, what, ["--out", out, "--limit", asked.limit, "--drive"])
    wait(at, asked.wait, partial(bring, at, out), BRINGING_S)


def read(file: Path, only: list[str]) -> list[dict[str, Any]]:
    """The commands of a file, in its order. only: these alone, where any are named."""
    commands = tomllib.loads(file.read_text())["command"]
    for command in commands:
        if wrong := sorted({"name", "run"} - set(command)) or sorted(set(command) - KEYS):
            found = f"{file}: {command.get('name', 'a command')}: found {', '.join(sorted(command))}"
            sys.exit(f"{found}; accepted: name and run, and cards and least; see {', '.join(wrong)}")
    names = [command["name"] for command in commands]
    if wrong := [name for name in names if Path(name).name != name]:
        sys.exit(f"{file}: found the name {wrong[0]!r}; accepted: one that a folder can have")
    if wrong := [command["name"] for command in commands if command.get("cards", 1) < 1]:
        sys.exit(f"{file}: {wrong[0]}: found cards below 1; accepted: 1 and more")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        sys.exit(f"{file}: found {', '.join(twice)} more than once; accepted: a name of its own for each command")
    if unknown := sorted(set(only) - set(names)):
        sys.exit(f"--only: found {', '.join(unknown)}; accepted: {', '.join(names)}")
    return [{"cards": 1, "least": 0, **command} for command in commands if not only or command["name"] in only]


def drive(waiting: list[dict[str, Any]], at: Path, count: int, end: float) -> None:
    """Begin commands as cards become free, until none is left or the time is over."""
    begun, free, running = time.monotonic(), list(range(count)), list[Running]()
    for command in [command for command in waiting if command["cards"] > count]:
        say(begun, f"{command['name']} left out: it needs {command['cards']} cards, there are {count}")
        waiting.remove(command)
    with ending(at):
        try:
            while waiting or running:
                now = time.monotonic()
                for one in [one for one in running if one.process.poll() is not None]:
                    say(begun, f"{one.name} ended after {now - one.began:.0f} s, exit {one.process.returncode}")
                    running.remove(one)
                    free = sorted([*free, *one.cards])
                for command in [command for command in waiting if command["least"] > end - SPARE_S - now]:
                    say(begun, f"{command['name']} left out: it needs {command['least']} s")
                    waiting.remove(command)
                fits = next((command for command in waiting if command["cards"] <= len(free)), None)
                if fits:
                    waiting.remove(fits)
                    held, free = free[: fits["cards"]], free[fits["cards"] :]
                    running.append(begin(fits, at, held, int(end - SPARE_S - now)))
                    say(begun, f"{fits['name']} on {', '.join(map(str, running[-1].cards))}")
                elif now > end:
                    break
                else:
                    time.sleep(0.5)
        finally:
            for one in running:
                say(begun, f"{one.name} is stopped")
                os.killpg(one.process.pid, signal.SIGKILL)


def say(begun: float, what: str) -> None:
    """A line of run.txt."""
    print(f"{time.monotonic() - begun:.0f} s: {what}", flush=True)


def begin(command: dict[str, Any], at: Path, held: list[int], left: int) -> Running:
    """Start a command in the tree's copy, on its cards."""
    results = at / "results" / command["name"]
    results.mkdir(parents=True)
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = shown.split(",") if shown else [str(card) for card in range(max(held) + 1)]
    env = {"RESULTS": str(results), "CUDA_VISIBLE_DEVICES": ",".join(names[card] for card in held)}
    run = command["run"].replace("{left}", str(left)).replace("{python}", sys.executable)
    with open(results / "said.txt", "wb") as said:
        process = subprocess.Popen(
            ["bash", "-c", run],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            env={**os.environ, **env},
            start_new_session=True,
        )
    return Running(command["name"], process, held, time.monotonic())


def bring(at: Path, out: Path) -> str:
    """Write OUT/cards.tgz, and return what the run said."""
    out.mkdir(parents=True, exist_ok=True)
    with tarfile.open(out / "cards.part", "w:gz") as file:
        file.add(at / SAID, SAID)
        for found in sorted((at / "results").glob("**/*")):
            with contextlib.suppress(FileNotFoundError):  # it was renamed meanwhile
                file.add(found, found.relative_to(at / "results"), recursive=False)
    size = (out / "cards.part").rename(out / "cards.tgz").stat().st_size
    return f"{(at / SAID).read_text()}{size / 2**20:.1f} MiB in {out / 'cards.tgz'}"


if __name__ == "__main__":
    main()
