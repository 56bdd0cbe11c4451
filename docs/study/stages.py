"""Trains stages of the study on the GPUs of one machine, unattended, and goes on from what an earlier run brought back.

    python docs/study/stages.py docs/study/stages.toml --out OUT --wait 570

The first call starts the run in the background, on a copy of the tree in the folder of `--at`, waits so many seconds
and writes OUT/study.tar, every two minutes and in the end: new rows, tuned rates, results of tunings, and what was
said. The same command again, on the same machine, waits for the run that goes on; elsewhere, with `--resume study.tar`,
it goes on from that file.
The run itself ends after `--limit` seconds. It needs torch, msgspec, pandas, pyarrow and scipy.

A chain of the file is a list of steps, run one after the other beside the other chains, in workers of its own:

    tune PRESET …       python -m fp4dse.tasks.tuned.tune --lacking: its rates are those of the sweeps that follow, and
                        what the tree has rates of is not tuned again
    sweep SPACE …       sweep_stage.py, into the store of the chain

Texts of the presets that a chain names (`texts = ["10M"]`) are drawn before all chains, on all cores.
What the store of the tree that a chain names (`store = "docs/study/store"`) has is not trained again.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
import tomllib
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import IO, Any

from background import COPY, FILE, SAID, TREE, cards, ending, start, surroundings, wait

LEAST_S, STORING_S = 20.0, 25.0
"""Seconds that a step must have before it, and those that a sweep has to end in."""
BRINGING_S = 120.0
"""Seconds between two writings of OUT: what breaks off loses what came since."""


def main() -> None:
    """Start the run, if there is none, wait, and bring back what there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--at", type=Path, default=Path("/tmp/study"))
    parser.add_argument("--wait", type=float, default=570.0, help="seconds until OUT is written")
    parser.add_argument("--limit", type=float, default=1140.0, help="seconds that the run takes at most")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--only", nargs="+", default=[], metavar="CHAIN", help="these chains alone")
    parser.add_argument("--resume", type=Path, help="study.tar of a run on another machine")
    parser.add_argument("--drive", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.drive:
        drive(asked.stages, asked.at, asked.device, time.monotonic() + asked.limit, asked.only)
        return
    at, out = asked.at.resolve(), asked.out.resolve()
    chains = [chain["name"] for chain in tomllib.loads(asked.stages.read_text())["chain"]]
    if unknown := sorted(set(asked.only) - set(chains)):
        sys.exit(f"--only: found {', '.join(unknown)}; accepted: {', '.join(chains)}")
    what = ["--device", asked.device, *(["--only", *asked.only] if asked.only else [])]
    how = ["--out", out, "--limit", asked.limit, "--drive"]
    start("stages.py", asked.stages, at, what, how, ["runs"], partial(resume, asked.resume) if asked.resume else None)
    wait(at, asked.wait, partial(bring, at, out), BRINGING_S)


def resume(brought: Path, tree: Path) -> None:
    """Take over what a run on another machine brought: its results, and the rates that it tuned. tree: of this run."""
    with tarfile.open(brought) as file:
        file.extractall(tree.parent, filter="data")
    for rates in (tree.parent / "rates").glob("*.json"):
        shutil.copy(rates, tree / "tasks" / "tuned")


def drive(stages: Path, at: Path, device: str, end: float, only: Sequence[str] = ()) -> None:
    """Run the chains side by side until they, or the time, are over. only: these alone, where any are named."""
    with ending(at):
        file = tomllib.loads(stages.read_text())
        (at / "logs").mkdir(exist_ok=True)
        named = [chain for chain in file["chain"] if not only or chain["name"] in only]
        draw_texts({preset for chain in named for preset in chain.get("texts", [])})
        chains = [threading.Thread(target=run_chain, args=(chain, at, device, end)) for chain in named]
        for chain in chains:
            chain.start()
        for chain in chains:
            chain.join()


def run_chain(chain: dict[str, Any], at: Path, device: str, end: float) -> None:
    """Run the steps of a chain. After a tuning that fails nothing is trained at rates that nobody tuned."""
    name, jobs = chain["name"], str(chain["workers"] * cards(device))
    folder = at / "chains" / name
    with open(at / "logs" / f"{name}.txt", "ab", buffering=0) as log:
        if "store" in chain:
            merge = [sys.executable, "-P", "-m", "fp4dse", "store", "merge", str(folder / "store"), chain["store"]]
            if run(merge, log, end - time.monotonic()):
                log.write(b"### without the rows of the tree nothing is trained\n")
                return
        for step in chain["steps"]:
            left = end - time.monotonic()
            if left < LEAST_S + STORING_S:
                log.write(f"### no time left for {step}\n".encode())
                return
            kind, *words = shlex.split(step)
            options = ["--device", device, "--jobs", jobs]
            if kind == "tune":
                command = [
                    "-m",
                    "fp4dse.tasks.tuned.tune",
                    *words,
                    "--lacking",
                    *options,
                    "--work",
                    str(folder / "tune"),
                ]
            else:
                sweep = str(Path(__file__).with_name("sweep_stage.py"))
                command = [sweep, *words, *options, "--store", str(folder / "store")]
                command += ["--budget", f"{left - STORING_S:.0f}"]
            began = time.monotonic()
            code = run([sys.executable, "-P", *command], log, left)
            log.write(f"### {time.monotonic() - began:.0f} s, exit {code}: {step}\n".encode())
            if kind == "tune" and code:
                return


def run(command: list[str], log: IO[bytes], limit_s: float) -> int:
    """Run a command in the tree and return its exit code; when its time is over it and all that it started end."""
    streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
    process = subprocess.Popen(command, cwd=TREE, start_new_session=True, **streams)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait()


def draw_texts(presets: Iterable[str]) -> None:
    """Draw the texts of presets of the language task into the cache, on all cores: every job reads them there."""
    from fp4dse.tasks import get_task
    from fp4dse.tasks.data.grammar import ROWS, TRAIN, Language
    from fp4dse.tasks.language.presets import context_of

    blocks = set()
    for preset in presets:
        task, length = get_task("language", preset), context_of(preset) + 1
        blocks |= {(TRAIN, number * ROWS, length) for number in range(task.batch * task.steps // ROWS)}
    if blocks:
        cores = min(len(blocks), len(os.sched_getaffinity(0)))
        with ProcessPoolExecutor(cores, multiprocessing.get_context("spawn")) as pool:
            for one in [pool.submit(Language().block, *block) for block in sorted(blocks)]:
                one.result()
    print(f"{len(blocks)} blocks of texts", flush=True)


def merge(store: str | Path, into: Path, tree: Path) -> None:
    """Take the rows of a store into another one."""
    command = [sys.executable, "-P", "-m", "fp4dse", "store", "merge", str(into), str(store)]
    subprocess.run(command, check=True, cwd=tree, env=surroundings(tree))


def bring(at: Path, out: Path) -> str:
    """Write OUT/study.tar: rows of all chains in a store each, without those of the tree that they began with, tuned
    rates, results of tunings, and logs. Returns what steps said of their end."""
    out.mkdir(parents=True, exist_ok=True)
    brought = at / "brought"
    chains = tomllib.loads((at / FILE).read_text())["chain"]
    begun_from = {chain["name"]: chain.get("store") for chain in chains}
    shutil.rmtree(brought, ignore_errors=True)
    (brought / "rates").mkdir(parents=True)
    before = {file.name: file.read_bytes() for file in (TREE / "tasks" / "tuned").glob("*.json")}
    for file in (at / COPY / "tasks" / "tuned").glob("*.json"):
        if before.get(file.name) != file.read_bytes():
            shutil.copy(file, brought / "rates")
    for chain in (at / "chains").glob("*"):
        to = brought / "chains" / chain.name
        for result in chain.glob("tune/*/out.json"):
            (to / "tune" / result.parent.name).mkdir(parents=True)
            for name in ("job.json", "out.json"):
                shutil.copy(result.with_name(name), to / "tune" / result.parent.name)
        if (chain / "store" / "store.json").exists():
            if store := begun_from.get(chain.name):
                merge(store, to / "store", at / COPY)
            known = list((to / "store" / "parts").glob("*"))
            merge(chain / "store", to / "store", at / COPY)
            for part in known:  # whoever reads this has them
                part.unlink()
    shutil.copy(at / SAID, brought)
    said = []
    for log in sorted((at / "logs").glob("*.txt")):
        shutil.copy(log, brought)
        said += [log.stem, *(f"    {line}" for line in log.read_text().splitlines() if line.startswith("###"))]
    with tarfile.open(out / "study.part", "w") as file:
        for entry in sorted(brought.iterdir()):
            file.add(entry, entry.name)
    size = (out / "study.part").rename(out / "study.tar").stat().st_size  # a reader of OUT sees a whole file
    return "\n".join([*said, f"{size / 2**20:.1f} MiB in {out / 'study.tar'}"])


if __name__ == "__main__":
    main()
