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
    sweep SPACE …       as fp4dse sweep, into the store of the chain, without its table and report; --lanes: of a job;
                        --data: as there; --front-of TASK:PRESET: of SPACE the recipes that the rows of that preset
                        choose, at its rates

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
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fp4dse.dse import Recipe, Space

TREE = Path(__file__).resolve().parents[2]
LEAST_S, STORING_S = 20.0, 25.0
"""Seconds that a step must have before it, and those that a sweep has to end in."""
BRINGING_S = 120.0
"""Seconds between two writings of OUT, so that a machine that is taken away takes little with it."""
LEAST_SEEDS, MOST_CHOSEN, ALWAYS = 3, 6, "nvidia-nvfp4"
"""Of the rule by which a stage chooses the recipes of the next one (plan.md)."""


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
    if sys.argv[1] == "sweep":
        sweep(sys.argv[2:])
        return
    asked = parser.parse_args()
    if asked.drive:
        drive(asked.stages, asked.at, asked.device, time.monotonic() + asked.limit, asked.only)
        return
    begin = brought = time.monotonic()
    if not asked.at.exists():
        start(asked)
    while not (asked.at / "ended").exists() and time.monotonic() - begin < asked.wait:
        if time.monotonic() - brought > BRINGING_S:
            bring(asked.at, asked.out)
            brought = time.monotonic()
        time.sleep(0.5)
    bring(asked.at, asked.out)
    print("ended" if (asked.at / "ended").exists() else "it goes on", flush=True)


def start(asked: argparse.Namespace) -> None:
    """Copy the tree and start the run there, in a session of its own, so that it outlives this call."""
    tree = asked.at / "tree"
    shutil.copytree(TREE, tree, symlinks=True, ignore=shutil.ignore_patterns(".*", "runs", "__pycache__"))
    if asked.resume:
        with tarfile.open(asked.resume) as file:
            file.extractall(asked.at, filter="data")
        for rates in (asked.at / "rates").glob("*.json"):
            shutil.copy(rates, tree / "tasks" / "tuned")
    stages = asked.at / "stages.toml"
    shutil.copy(asked.stages, stages)
    command = [sys.executable, tree / "docs" / "study" / "stages.py", stages, "--out", asked.out, "--at", asked.at]
    options = ["--limit", str(asked.limit), "--device", asked.device, "--drive"]
    options += ["--only", *asked.only] if asked.only else []
    with open(asked.at / "run.log", "ab") as log:
        subprocess.Popen(
            [*map(str, command), *options],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=surroundings(tree),
        )


def surroundings(tree: Path) -> dict[str, str]:
    """Environment variables with which Python imports the package from a tree."""
    path = os.pathsep.join(filter(None, [str(tree / "typings"), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def drive(stages: Path, at: Path, device: str, end: float, only: Sequence[str] = ()) -> None:
    """Run the chains side by side until they, or the time, are over. only: these alone, where any are named."""
    try:
        file = tomllib.loads(stages.read_text())
        draw_texts(file.get("texts", []))
        (at / "logs").mkdir(exist_ok=True)
        named = [chain for chain in file["chain"] if not only or chain["name"] in only]
        chains = [threading.Thread(target=run_chain, args=(chain, at, device, end)) for chain in named]
        for chain in chains:
            chain.start()
        for chain in chains:
            chain.join()
    finally:
        (at / "ended").touch()


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
                command = [__file__, "sweep", *words, *options, "--store", str(folder / "store")]
                command += ["--budget", f"{left - STORING_S:.0f}"]
            began = time.monotonic()
            code = run([sys.executable, "-P", *command], log, left)
            log.write(f"### {time.monotonic() - began:.0f} s, exit {code}: {step}\n".encode())
            if kind == "tune" and code:
                return


def sweep(words: list[str]) -> None:
    """Sweep a space."""
    from fp4dse.sweeps import find_space, run_sweep
    from fp4dse.sweeps.arguments import parse_seeds, parse_tasks

    parser = argparse.ArgumentParser()
    parser.add_argument("space")
    for name in ("task", "seeds", "device", "store", "lanes"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--front-of")
    parser.add_argument("--data")
    parser.add_argument("--jobs", type=int, required=True)
    parser.add_argument("--budget", type=float, required=True)
    asked = parser.parse_args(words)
    space, rates = find_space(asked.space), None
    if asked.front_of:
        space, rates = front_of(asked.front_of, space, asked.store)
    result = run_sweep(
        space,
        tasks=parse_tasks([asked.task], data=asked.data),
        seeds=parse_seeds(asked.seeds),
        lrs=rates,
        store=asked.store,
        device=asked.device,
        jobs=asked.jobs,
        budget_s=asked.budget,
        options={"lanes": asked.lanes},
    )
    print(result, flush=True)
    sys.exit(result.exit_code)


def front_of(preset: str, space: Space, store: str) -> tuple[list[Recipe], list[float]]:
    """The recipes of a space that go on to the next stage by the plan's rule, and the one rate of all classes there.

    Those on the front of the space's rows of the preset: the cheapest, the one of the lowest gap, and of those between
    at most four, the likeliest first; NVIDIA's recipe always. Nothing is chosen from a part: the program ends where a
    recipe lacks three seeds on one kind of machine."""
    from fp4dse.dse import Recipe
    from fp4dse.results import open_store
    from fp4dse.results.stats.recipes.front_chance import front_chance
    from fp4dse.sweeps.arguments import parse_tasks
    from fp4dse.sweeps.planning.plan import class_rates
    from fp4dse.tasks import find_facts

    recipes = {recipe.canonical().config_id: recipe for recipe in space.recipes()}
    ((task, name, *_),) = parse_tasks([preset])
    runs = open_store(store).runs()
    mine = (runs["task"].eq(task) & runs["preset"].eq(name)) & (runs["config_id"].isin(recipes) | runs["is_baseline"])
    lines = front_chance(runs[mine])
    lines = lines[lines["config_id"].isin(recipes)]
    whole = lines[lines["pairs"].ge(LEAST_SEEDS)]
    if len(whole) < len(recipes) or whole["config_id"].nunique() < len(whole):
        sys.exit(f"{preset}: {len(whole)} of {len(recipes)} recipes have {LEAST_SEEDS} seeds on one kind of machine")
    front = whole[whole["on_front"]].sort_values(["overhead", "gap"])
    between = front.iloc[1:].sort_values("gap").iloc[1:].sort_values("p_front", ascending=False)
    chosen = {*front["config_id"].iloc[:1], *front.sort_values("gap")["config_id"].iloc[:1]}
    chosen |= {*between["config_id"].iloc[: MOST_CHOSEN - 2], Recipe.named(ALWAYS).canonical().config_id}
    for line in whole[whole["config_id"].isin(chosen)].itertuples():
        print(f"chosen: {line.label}, {100 * line.gap:+.2f} %, {line.overhead:.2f} of BF16's time", flush=True)
    facts = find_facts(task, name)
    left = [recipe for one, recipe in recipes.items() if one in chosen]
    rates = {class_rates(facts, recipe)[0] for recipe in [Recipe.named("bf16"), *left]}
    if len(rates) > 1:
        sys.exit(f"{preset}: found the rates {sorted(rates)}; accepted: one for all classes, as a sweep has one list")
    return left, [*rates]


def run(command: list[str], log: IO[bytes], limit_s: float) -> int:
    """Run a command in the tree and return its exit code; when its time is over it and all that it started end."""
    streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
    process = subprocess.Popen(command, cwd=TREE, start_new_session=True, **streams)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait()


def cards(device: str) -> int:
    """The number of GPUs, 1 for a CPU."""
    if device == "cpu":
        return 1
    import torch

    return torch.cuda.device_count()


def draw_texts(presets: list[str]) -> None:
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


def bring(at: Path, out: Path) -> None:
    """Write OUT/study.tar: rows of all chains in a store each, without those of the tree that they began with, tuned
    rates, results of tunings, and logs."""
    out.mkdir(parents=True, exist_ok=True)
    brought = at / "brought"
    chains = tomllib.loads((at / "stages.toml").read_text())["chain"]
    begun_from = {chain["name"]: chain.get("store") for chain in chains}
    shutil.rmtree(brought, ignore_errors=True)
    (brought / "rates").mkdir(parents=True)
    before = {file.name: file.read_bytes() for file in (TREE / "tasks" / "tuned").glob("*.json")}
    for file in (at / "tree" / "tasks" / "tuned").glob("*.json"):
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
                merge(store, to / "store", at / "tree")
            known = list((to / "store" / "parts").glob("*"))
            merge(chain / "store", to / "store", at / "tree")
            for part in known:  # whoever reads this has them
                part.unlink()
    shutil.copy(at / "run.log", brought)
    for log in (at / "logs").glob("*.txt"):
        shutil.copy(log, brought)
        print(log.stem, *[line for line in log.read_text().splitlines() if line.startswith("###")], sep="\n    ")
    with tarfile.open(out / "study.part", "w") as file:
        for entry in sorted(brought.iterdir()):
            file.add(entry, entry.name)
    (out / "study.part").rename(out / "study.tar")  # a reader of OUT sees a whole file
    print(f"{(out / 'study.tar').stat().st_size / 2**20:.1f} MiB in {out / 'study.tar'}", flush=True)


if __name__ == "__main__":
    main()
