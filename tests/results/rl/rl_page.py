"""The page of reinforcement learning, as its tests read it."""

import re
from pathlib import Path

import numpy as np
from scipy.special import ndtr, stdtrit
from scipy.stats import ttest_1samp

from fp4dse.results.stats.estimates.intervals import mean_interval

DOCS = Path(__file__).parents[3] / "docs"
PAGE = DOCS / "rl.md"
MACRO = "e2m1 1x32 e8m0-rceil macro"
FIXED = f"{MACRO}, forward residual, noise weights"
IN_ROLLOUTS = "bf16, rollout mxfp4-rceil"
WEIGHTS = f"{IN_ROLLOUTS}-w4a16"
MANY = ["mxfp4-rceil", FIXED, IN_ROLLOUTS, "bf16, noise weights", "bf16, noise qerl"]
"""The recipes of 32 seeds, in the order of their tables."""
WALKS = ["walks-small", "walks-medium"]
EQUAL, FRESH = 6e-5, range(40, 72)
"""The rate and the seeds of the equivalence test on walks."""


def table(page, first):
    """The cells of the rows of the table whose header begins so."""
    rows = page.partition(first)[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def section(page, title):
    """The text below a heading, up to the next one, in one line."""
    return " ".join(page.partition(f"# {title}\n")[2].partition("\n##")[0].split()).replace("−", "-")


def numbers(text):
    text = text.replace("−", "-").replace("**", "").replace("×", "")
    return [float(number) for number in re.findall(r"[+-]?\d*\.?\d+", text)]


def interval(values):
    """Mean and both limits of values over seeds, and p of the t-test, which the page has beside the limits."""
    return *told(values)[:3], ttest_1samp(values, 0).pvalue


def queries_of(page):
    """The queries that stand in blocks of their own."""
    return re.findall(r"```sql\n(.*?)```", page, re.DOTALL)


def chance_to_pass(mean, deviation, n):
    """That both one-sided tests at 5 % are passed with n pairs of this mean and deviation (points)."""
    error = deviation / np.sqrt(n)
    above, below = ((0.7 + side) / error - stdtrit(n - 1, 0.95) for side in (mean, -mean))
    return ndtr(above) + ndtr(below) - 1


def pairs_to_show_none(deviation):
    """The fewest pairs of this deviation (points) that show with a chance of 80 % that there is no difference."""
    n = np.arange(2, 10_000)
    return int(n[chance_to_pass(0, deviation, n) >= 0.8][0])


def told(values):
    """Mean, both limits and p, of a difference in points, one of each seed."""
    return mean_interval(np.asarray(values, float)[None]).iloc[0][["mean", "low", "high", "p"]].to_numpy(float)


def signed(mean, low, high, *_):
    """A difference as tables have it: `−0.34 (−0.70 to +0.02)`."""
    return f"{mean:+.2f} ({low:+.2f} to {high:+.2f})".replace("-", "−")


def short(p):
    """p as tables have it: `<.001`, `.012`, `.45`, `1`."""
    if p < 0.0005:
        return "<.001"
    return "1" if p > 0.995 else f"{p:.3f}".lstrip("0") if p < 0.1 else f"{p:.2f}".lstrip("0")
