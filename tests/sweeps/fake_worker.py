"""A worker that trains nothing: `fake_worker.py MODE[=VALUE]`. It starts fast and fails on demand.

It speaks as tasks/worker.py does: a line a job, a fork a job, a line at its end. Modes that begin with `parent` befall
the parent. Every lane that it takes is written as a line to `lanes.txt` above the store, or to $FAKE_LANES, so that
tests can count trainings.
"""

import hashlib
import json
import math
import os
import runpy
import signal
import sys
import time
from pathlib import Path

die_with = runpy.run_path(str(Path(__file__).parents[2] / "dse" / "program" / "leash.py"))["die_with"]

CARDS = {"0": "NVIDIA H200", "1": "NVIDIA L40S"}
"""What a worker that is given $FAKE_CARD says of its device."""


def main(mode: str) -> None:
    mode, _, value = mode.partition("=")
    parent = os.getpid()
    for line in sys.stdin:
        job_file, out_file, stderr_file = json.loads(line)
        os.dup2(os.open(stderr_file, os.O_WRONLY | os.O_APPEND), 2)
        if mode == "parent-crash":
            sys.exit("RuntimeError: not ready")
        child = os.fork()
        if not child:
            die_with(parent)
            work(mode, value, job_file, out_file)
            return
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if mode == "parent-killed-late":
            os.kill(os.getpid(), signal.SIGKILL)
        print(f'\n{{"exit": {code}}}', flush=True)
        if mode == "parent-leaves":
            return


def work(mode: str, value: str, job_file: str, out_file: str) -> None:
    """The child's part."""
    job, out = json.loads(Path(job_file).read_text()), Path(out_file)
    lanes = job["lanes"]
    if (card := job.get("only_on", {}).get("device_class")) and card != CARDS.get(os.environ.get("FAKE_CARD", "")):
        print(f"it is for {card}", file=sys.stderr)
        sys.exit(19)
    note(Path(os.environ.get("FAKE_LANES", out.parents[2].parent / "lanes.txt")), lanes)
    report("setup", 0, lanes)
    if mode == "crash":
        sys.exit("Traceback ...\nRuntimeError: the die was cast")
    if mode == "crash-once":
        try:
            Path(value).touch(exist_ok=False)
            sys.exit("RuntimeError: only once")
        except FileExistsError:
            pass
    if mode == "memory" and len(lanes) > int(value):
        sys.exit(17)
    if mode == "large":
        sys.exit(print("Traceback ...\nout of memory: one lane", file=sys.stderr) or 20)
    if mode == "killed" and len(lanes) > int(value):
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "hang":
        time.sleep(600)
    if mode == "garbage":
        os.write(1, b"\xff\xfe{]\n" + b"x" * 300_000 + b'\n[1, 2]\n{"exit": "0"}\n')
    if mode == "slow":
        time.sleep(float(value))
    report("train", 5, lanes)
    report("evaluate", 10, lanes)
    hidden = out.with_name(".out")
    best = best_rates(value) if mode == "lowest" else None
    hidden.write_text(json.dumps(result(lanes, mode, bool(job.get("rungs")), best)))
    hidden.replace(out)
    if mode == "crash-late":
        sys.exit("an error on the way out")
    if mode == "garbage":
        os.write(1, b'{"phase": "eval')


def note(path: Path, lanes: list[dict]) -> None:
    with open(path, "a") as file:
        file.write("".join(f"{json.dumps(lane, sort_keys=True)}\n" for lane in lanes))


def report(phase: str, step: int, lanes: list[dict]) -> None:
    print(json.dumps({"phase": phase, "step": step, "steps": 10, "losses": [0.5] * len(lanes)}), flush=True)


def best_rates(value: str) -> tuple[float, float]:
    """The learning rates of the lowest loss: under the task's own optimizer, and under another."""
    own, other = map(float, value.split(","))
    return own, other


def result(lanes: list[dict], mode: str, rungs: bool, best: tuple[float, float] | None) -> dict:
    """With rungs, every other lane is dropped."""
    statuses = ["diverged" if mode == "diverge" else "pruned" if rungs and i % 2 else "done" for i in range(len(lanes))]
    return {
        "lanes": [outcome(lane, status, best) for lane, status in zip(lanes, statuses, strict=True)],
        "train_s": 0.01,
        "setup_s": 0.01,
        "quantizer_backend": "none",
        "gemm_backend": "none",
        "fallbacks": [],
        "peak_memory_bytes": 1,
        **({"environment": {"device_class": CARDS[card]}} if (card := os.environ.get("FAKE_CARD")) else {}),
    }


def outcome(lane: dict, status: str, best: tuple[float, float] | None) -> dict:
    diverged = status == "diverged"
    luck = hashlib.sha256(json.dumps(lane, sort_keys=True).encode()).digest()[0] / 256
    loss = 1 + luck
    if best:
        loss = 1 + luck / 100 + math.log(lane["lr"] / best[bool(lane["recipe"]["training"]["optimizer"])]) ** 2
    return {
        "status": status,
        "diverged_step": 3 if diverged else None,
        "pruned_step": 5 if status == "pruned" else None,
        "train_loss_min": None if diverged else loss,
        "train_loss_final": None if diverged else loss,
        "val_loss": loss if status == "done" else None,
        "metrics": {},
        "curve_step": [1],
        "curve_loss": [loss],
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
