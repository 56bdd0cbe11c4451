"""The page of tuned presets: `python -m fp4dse.tasks.tuned.page > docs/presets.md`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

from fp4dse.dse.agreement import AGREES, LEAST, Agreement, agreements
from fp4dse.dse.resolution import RESOLVES
from fp4dse.dse.tuning import CLASSES
from fp4dse.tasks.catalogue import TASKS
from fp4dse.tasks.tuned import Point, Tuned, all_tuned, tuned
from fp4dse.tasks.tuned.resolution import SIZES, differ, is_open, resolution

HEAD = """# Tuned presets

At which learning rate is a recipe trained, if I give none? At the one that was tuned for its class on this preset:

{classes}

A preset without a line here [is not tuned](#not-tuned); the column `lr_source` of a row, and the report, say which it
was. `--lr` takes rates of your own, and `fp4dse sweep … --tune` first finds the best rate of every recipe, BF16
included, on two seeds that it does not report.

How were they tuned? Rates a factor of two apart were tried, until the best one of each class was not the lowest or the
highest of them. The seeds are never those that a sweep has by itself, so that tuning does not flatter its results. Of
presets with an entry in the last column weight decay and clipping were tried then, at the best rate and at twice that.
A class without a rate here is trained at BF16's, which nobody tuned for it; `lr_source` has `preset` there.

    python -m fp4dse.tasks.tuned.tune regression:deep          # how a line comes about, for your own presets, too

With `--jobs 8 --work DIR` it trains in eight workers, dealt out among the GPUs, and goes on from DIR where it was
stopped.

## Rates

{rates}

A question mark stands where the seeds of the tuning do not tell the best rate from one that is four times as high or as
low, by a paired t test at 5 %: there it may be the best by luck; in the last column, where they do not tell the two
losses apart. One seed tells nothing.

The last column is BF16's loss with the best of other weight decays (of 0, 0.1 and 0.3), clipping at norm 1 or both,
against the preset's own numbers, which it keeps. Tunings since November 28 go on to 1 and 3 where the largest that was
tried, or the preset's own, is the best; of those before nobody knows whether more is better still.

## Which presets tell recipes apart?

At these rates, on other seeds. *sd* is a standard deviation between seeds, of differences paired by seed where there
are two recipes. A preset resolves single recipes if NVFP4's gap is {wanted:g} times its sd or more and five seeds tell
NVFP4 from MXFP4; where it does not, the terminal and the report warn after a sweep (*Beware*). The seeds are those with
which a difference of that size is found in 80 of 100 studies, for pairs as noisy as NVFP4 and BF16 are.

{resolved}

A line above without one here was tuned, and not checked.

## Which presets have a larger model's order of recipes?

A preset may resolve recipes, and have them in another order than a language model. Over the recipes that quantize both
passes and that both presets trained, of pairs {apart:g} % or more apart in the second one: the share that the first has
in the same order, and Spearman's correlation of all gaps, with its 95 % interval over recipes (bootstrap). The gaps are
of one device and revision of either preset, the two that share most recipes. *Scales apart* are those of the weight
gradient's G without whose recipes the rest agrees best, if at least a third of what does not agree goes with them.

{agreed}

`vision:medium` and `diffusion:small` are on `shapes`. A line takes {least} recipes or more, so `language:10M` has none;
of all presets without one nobody knows it. After a sweep the terminal and the report warn (*Beware*) where less than
{enough:.0f} % of pairs are in the same order, and where nobody knows although other presets of the task have a line.
They name the preset to ask in its place: `{ask}`, the smallest that agrees with all larger ones. It wants a GPU
(`fp4dse sweep … --task {ask} --estimate` says how long); what 960 recipes lose there is known already:

    fp4dse query "FROM recipes WHERE preset = '0.4M' AND rev_engine = 7 ORDER BY gap" --store docs/study/store

* **The quickstart's tasks do not see what is wrong with UE5M3 scales without a tensor scale.** There these are not told
  from NVFP4; on `language:0.4M` the three that were trained lose 53 to 97 %, NVFP4 1.3 %.
* **`vision:quickstart` has hardly an order of recipes.** With three seeds little more than half of the pairs are in
  that of `language:0.4M`, and a coin would have half: its seeds differ more than its recipes do.
* **`regression:deep` sees the backward pass, but not stochastic gradients as language does.** Against BF16, with the
  forward pass in BF16 and eight seeds, NVFP4 loses 4.0 % (3.3 to 4.7) and with stochastic gradients 5.7 % (4.8 to 6.6),
  more on every seed. In the language models they help: NVFP4 in all operands loses 1.3 % at 0.4M and 1.2 % at 1M, and
  with stochastic gradients 0.4 and 0.3 %.

The table is written from the stores of the study and of the quickstart:

    python -m fp4dse.results.preset_agreement docs/study/store runs/quickstart/store

## Not tuned

These presets have a rate that somebody thought right; that of `rl:small` is the best of a few that BF16
[was tried at](rl.md#which-rate). `smoke` ones show that a recipe trains, and no more; others need data of yours, are
too large, or are waiting for it. `fp4dse tasks` and reports say so, too. A preset that is here and above was tuned on
the other data alone.

{others}
"""


def untuned() -> list[str]:
    """TASK:PRESET of all that were not tuned on the data they have by themselves."""
    return [f"{task}:{preset}" for task, presets in TASKS.items() for preset in presets if tuned(task, preset) is None]


def page(found: list[Tuned], others: Sequence[str]) -> str:
    """The page in Markdown. others: the presets that are not tuned."""
    classes = "\n".join(f"* `{name}`: {what}" for name, what in CLASSES.items())
    rates = _table(["preset", *CLASSES, "steps", "with decay, clipping"], [_rates(one) for one in found])
    sizes = [f"seeds for {100 * size:g} %" for size in SIZES]
    head = ["preset", "BF16: loss, sd", "NVFP4: gap, sd", "ratio", "MXFP4 − NVFP4, sd", *sizes]
    resolved = _table(head, [_resolved(one) for one in found if one.check])
    of_tasks = groupby(others, key=lambda name: name.partition(":")[0])
    listed = "\n".join(f"* {', '.join(f'`{name}`' for name in names)}" for _, names in of_tasks)
    orders = agreements()
    columns = ["preset", "against", "recipes", "pairs", "same order", "Spearman", "scales apart", "newest row"]
    return HEAD.format(
        classes=classes,
        rates=rates,
        resolved=resolved,
        wanted=RESOLVES,
        agreed=_table(columns, [_agreed(line) for line in orders.lines]),
        apart=orders.apart,
        least=LEAST,
        enough=100 * AGREES,
        ask=orders.to_ask,
        others=listed,
    )


def _name(found: Tuned) -> str:
    return f"`{found.task}:{found.preset}`" + (f" on `{found.data}`" if found.data else "")


def _rates(found: Tuned) -> list[str]:
    rates = found.rates
    chosen = [f"{rates[of]:g}{' ?' if is_open(found, of) else ''}" if of in rates else "" for of in CLASSES]
    return [_name(found), *chosen, f"{found.steps:,}", _others(found)]


def _others(found: Tuned) -> str:
    """BF16's best loss among other weight decays and clips, against that of its rate alone."""
    own = found.best("bf16")
    others = [point for point in found.curve if point.of == "bf16" and not point.is_own]
    if own is None or not others:
        return ""
    best = min(others, key=lambda point: point.mean)
    return f"{_percent(best.mean - own.mean)}{'' if differ(best, own) else ' ?'} ({_with(best)})"


def _with(point: Point) -> str:
    numbers = {"decay": point.weight_decay, "clip": point.clip}
    return ", ".join([f"{name} {value:g}" for name, value in numbers.items() if value is not None] + [f"{point.lr:g}"])


def _resolved(found: Tuned) -> list[str]:
    r = resolution(found)
    loss = math.exp(next(point for point in found.check if point.of == "bf16").mean)
    seeds = [f"{needed:,}" for needed in r.seeds]
    ratio = f"**{r.ratio:.0f}**" if r.ratio >= RESOLVES else f"{r.ratio:.1f}"
    apart = "" if r.tells_apart() else " (not with 5 seeds)"
    return [
        _name(found),
        f"{loss:.3g}, {100 * r.spread:.2g} %",
        f"{_percent(r.gap)}, {100 * r.gap_sd:.2g} %",
        ratio,
        f"{_percent(r.rival)}, {100 * r.rival_sd:.2g} %{apart}",
        *seeds,
    ]


def _agreed(line: Agreement) -> list[str]:
    counts = [f"{number:,}" for number in (line.recipes, line.pairs)]
    share = f"{100 * line.agree:.0f} %"
    same = f"**{share}**" if line.agree >= AGREES else share
    apart = line.unseen and f"{line.unseen.scales}: {100 * line.unseen.agree:.0f} % without them"
    spearman = f"{line.spearman:.2f} ({line.spearman_low:.2f} to {line.spearman_high:.2f})".replace("-", "−")
    return [f"`{line.preset}`", f"`{line.against}`", *counts, same, spearman, apart or "", line.measured]


def _percent(difference: float) -> str:
    change = 100 * math.expm1(difference)
    return f"{change:+{',.0f' if abs(change) >= 100 else '.2g'}} %".replace("-", "−")


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows))


if __name__ == "__main__":
    print(page(all_tuned(), untuned()), end="")
