"""The end of a sweep or a search in words: counts, what failed and where to read more, and how to go on."""

from __future__ import annotations

from fp4dse.dse.program.terminal import duration
from fp4dse.results.text.ratios import counted
from fp4dse.sweeps.searching.search import SearchResult
from fp4dse.sweeps.searching.study import StudyResult
from fp4dse.sweeps.sweep import SweepResult


def conclusion(result: SweepResult) -> str:
    """The summary of a sweep: counts, what failed and where to read more, why it stopped and how to go on."""
    counts = f"{result.done} done, {result.diverged} diverged, {result.failed} failed, {result.stored} stored before"
    counts += f", {result.pruned} dropped at rungs" if result.pruned else ""
    lines = [f"{counted(result.asked, 'lane')} in {duration(result.wall_s)}: {counts}"]
    return "\n".join(lines + _ending(result, result.failed > 0, f"{result.left} lanes are left"))


def search_conclusion(result: SearchResult) -> str:
    """The summary of a search: a paragraph a task, why it stopped and how to go on."""
    lines = [line for study in result.studies for line in _study_lines(result, study)]
    lines.append(f"{counted(result.lanes, 'lane')} trained in {duration(result.wall_s)}")
    left = sum(result.asked - study.trials for study in result.studies)
    failed = any(study.failed for study in result.studies)
    return "\n".join(lines + _ending(result, failed, f"{counted(left, 'trial')} left"))


def _ending(result: SweepResult | SearchResult, failed: bool, left: str) -> list[str]:
    """Lines on what failed and where to read more, and on why it stopped."""
    lines = [failure.sentence() for failure in result.failures]
    if failed:
        lines.append("what failed workers said is in failed/ beside their jobs/; the same command tries them again")
    if result.stopped:
        lines.append(f"{result.stopped}; {left}, the same command continues")
    return lines


def _study_lines(result: SearchResult, study: StudyResult) -> list[str]:
    kinds = ((study.trained, "trained"), (study.stored, "from the store"), (study.replicates, "with further seeds"))
    bad = ((study.diverged, "diverged"), (study.failed, "failed"))
    counts = ", ".join(f"{n} {word}" for n, word in [*kinds, *bad] if n)
    whole = f"{result.combinations:,} combinations" if result.space is None else f"{result.space:,}"
    share = 100 * study.recipes / (result.space or result.combinations)
    trials = f"{study.trials} of {counted(result.asked, 'trial')}"
    repeated, forbidden = f"what was known {study.repeated} times", f"what a rule forbids {study.rejected} times"
    lines = [
        f"{study.task}:{study.preset}: {trials}: {counts or 'none came back'}",
        f"  {counted(study.recipes, 'recipe')} of {whole} in the space tried ({share:.3g} %), "
        f"{len(study.front)} on the front",
        f"  {result.sampler} proposed {repeated}, {forbidden}",
    ]
    lines += [f"  ended early: {study.stopped}"] if study.stopped else []
    return lines
