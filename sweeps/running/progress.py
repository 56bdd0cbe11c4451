"""Shows a sweep while it runs: a live table on a terminal, a plain line now and then elsewhere.

Everything shown comes from the one SweepState, so that `fp4dse status` in another terminal shows the same.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fp4dse.dse.program.terminal import drawn_on, duration, visible
from fp4dse.results.text.ratios import counted
from fp4dse.sweeps.running.state import SweepState
from fp4dse.tasks.job import Progress

LINE_S = 10.0
"""Fewest seconds between two plain lines, unless there is nothing new: then six times as many."""
WAITS = {
    "start": "a worker starts",
    "setup": "data and initial weights are made",
    "first step": "the first steps, for which a GPU compiles kernels",
}
"""Phase of a job that has no loss yet -> what it waits for. `start`, until the job's first report, is a phase of
JobState alone; the others are phases of Progress, too."""

Show = Callable[[SweepState], None]


@contextlib.contextmanager
def display(progress: bool | Show) -> Iterator[Show]:
    """The function to call with the state: a given one, the display on standard error, or one that shows nothing."""
    if callable(progress):
        yield progress
    elif not progress:
        yield lambda _: None
    elif sys.stderr.isatty():
        # refreshed by the sweep's own loop: no thread, and the table never shows half a state
        with Live(console=Console(file=drawn_on(sys.stderr)), auto_refresh=False) as live:
            yield lambda state: live.update(render(state), refresh=True)
    else:
        yield _plain_lines(sys.stderr)


def render(state: SweepState) -> RenderableType:
    """Name and bar, headline, one row per running job, the best recipe so far, what went wrong. Fits 80 columns."""
    total, done = (state.asked, state.finished + state.failed)
    if state.trials_asked:
        total, done = state.trials_asked, state.trials
    bar = ProgressBar(total=max(total, 1), completed=done, width=40)
    head = Table.grid(padding=(0, 2))
    head.add_row(Text(visible(state.name), style="bold"), bar, f"{100 * done / max(total, 1):.0f} %")
    jobs = Table.grid(padding=(0, 2))
    for widest in (None, None, 16, None, None, None):  # the bar gives way where there is little room
        jobs.add_column(no_wrap=widest is None, max_width=widest)
    for job in state.running:
        steps = f"{job.phase} {job.step}/{job.steps}" if job.steps else job.phase
        loss = "" if job.loss is None else f"loss {job.loss:.4g}"
        dead = f"{job.lanes - job.alive} dead" if job.loss is not None and job.alive < job.lanes else ""
        bar = ProgressBar(total=max(job.steps, 1), completed=job.step)
        jobs.add_row(visible(f"  {job.task}:{job.preset}"), f"{job.lanes} lanes", bar, steps, loss, dead)
    notes = [Text(visible(line), overflow="fold") for line in remarks(state)]
    return Group(
        head, Text(visible(headline(state))), *([jobs] if state.running and state.driver_is_alive else []), *notes
    )


def headline(state: SweepState) -> str:
    """`120/294 lanes, 2 diverged; 2 jobs running, 6 waiting; about 1m40s left`; of a search the trials come first."""
    parts = [f"{state.finished}/{state.asked} lanes"]
    if state.trials_asked:
        stored = f" ({state.trials_stored} from the store)" if state.trials_stored else ""
        parts[:0] = [f"{state.trials}/{state.trials_asked} trials{stored}"]
    bad = ((state.diverged, "diverged"), (state.pruned, "pruned"), (state.failed, "failed"))
    parts += [f"{n} {word}" for n, word in bad if n]
    text = ", ".join(parts)
    if state.ended:
        return f"{text}; {state.ended}"
    if not state.driver_is_alive:
        return f"{text}; its process {state.pid} on {state.host} is gone, the same command continues"
    if state.running or state.jobs_waiting:
        text += f"; {counted(len(state.running), 'job')} running, {state.jobs_waiting} waiting"
    if state.done + state.diverged:
        text += f"; {state.lanes_per_minute:.0f} lanes a minute"
    return text if state.eta_s is None else f"{text}; about {duration(state.eta_s)} left"


def watch(read: Callable[[], SweepState], console: Console, wait_s: float = 1.0) -> SweepState:
    """Show a sweep of another process until it ends or Ctrl-C; on no terminal, a line now and then."""
    live = Live(console=console, auto_refresh=False) if console.is_terminal else contextlib.nullcontext()
    lines = _plain_lines(sys.stdout)
    state = read()
    with contextlib.suppress(KeyboardInterrupt), live:
        while True:
            if isinstance(live, Live):
                live.update(render(state), refresh=True)
            else:
                lines(state)
            if not state.driver_is_alive:
                break
            time.sleep(wait_s)
            state = read()
    return state


def remarks(state: SweepState) -> list[str]:
    """Lines below the headline: what it and its jobs wait for, the best so far, retries, failures."""
    lines = [state.trouble] if state.trouble and state.driver_is_alive else []
    lines += waits_of(state)
    lines += [f"best so far: {best}" for best in state.best]
    lines += [f"retried {n}×: {reason}" for reason, n in state.retries.items()]
    lines += [failure.sentence() for failure in state.failures.values()]
    return lines


def job_line(progress: Progress) -> str:
    """A report of one job: `train 50/200, median loss 0.25`."""
    losses = [loss for loss in progress.losses if loss is not None]
    loss = f", median loss {statistics.median(losses):.4g}" if losses else ""
    return f"{progress.phase} {progress.step}/{progress.steps}{loss}"


def waits_of(state: SweepState) -> list[str]:
    """A sentence for each thing that jobs without a loss wait for, while the sweep runs: `language:moe8-4B: data and
    initial weights …`."""
    if not state.driver_is_alive:
        return []
    found = [f"{job.task}:{job.preset}: {WAITS[job.phase]}" for job in state.running if job.phase in WAITS]
    return list(dict.fromkeys(found))


def _plain_lines(file: TextIO) -> Show:
    last: tuple[float, object] = (-60 * LINE_S, None)

    def show(state: SweepState) -> None:
        nonlocal last
        now, waits = time.monotonic(), waits_of(state)
        news = state.finished + state.failed + state.trials, waits
        wait = LINE_S if news != last[1] else 6 * LINE_S
        if state.ended or now - last[0] >= wait:
            last = now, news
            losses = [f"{job.task} {job.loss:.4g}" for job in state.running if job.loss is not None]
            extra = [state.trouble] if state.trouble and not state.ended else []
            extra += waits
            extra += [f"median losses: {', '.join(losses)}"] if losses else []
            extra += [f"best so far: {' | '.join(state.best)}"] if state.best else []
            print(f"{state.name}: {'; '.join([headline(state), *extra])}", file=file, flush=True)

    return show
