"""Makes the tables of findings.md anew from the study's store: `python docs/study/tables.py`.

A table stands between its marker, `<!-- effects of TASK:PRESET -->`, `<!-- front of TASK:PRESET -->`,
`<!-- answers -->`, `<!-- claims -->` or one of those below, and the next `<!-- end -->`.
"""

from __future__ import annotations

import itertools
import json
import re
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from cells import gap, interval, markdown, time
from growth import OF_ALL, OF_SCALE, SCALE
from images import OF_IMAGES
from sizes import HALVED, OF_EARLIER, one_machine

from fp4dse.dse import Space, recipe_from_dict
from fp4dse.dse.cost import BAND
from fp4dse.results import open_store, summarize
from fp4dse.results.stats.estimates.intervals import paired_interval
from fp4dse.results.stats.paired import add_gap, by_seed, rows_at_best_lr
from fp4dse.results.stats.techniques.answers import answers, effects_of
from fp4dse.results.stats.techniques.questions import Questions, load_questions
from fp4dse.results.text.answer_tables import answer_rows, effect_tables
from fp4dse.results.text.ratios import change, change_with_range
from fp4dse.results.views import front

HERE = Path(__file__).parent
_SAID = ("task", "interval")
"""Columns that the text above a table stands for."""
APART = ("rotation of wgrad", "stochastic gradient of dgrad", "stochastic gradient of wgrad", "forward, stochastic")
"""Effects that are shown pair by pair."""
FLUSHED = ("ue5m3", "e2m1 1x16 ue5m3-encode")
"""Recipes whose scales flush a part of the gradients: what changes that part outweighs all other pairs."""


def main() -> None:
    """Write the tables into findings.md."""
    questions = load_questions(HERE / "questions.toml")
    runs = open_store(HERE / "store").runs(margins=True)
    effects = effects_of(runs, questions)
    page = HERE / "findings.md"
    text = page.read_text(encoding="utf-8")
    scale = runs["seed"].isin(SCALE)
    groups = (_OF_RUNS | OF_ALL | OF_IMAGES, runs), (OF_SCALE, runs[scale]), (OF_EARLIER, one_machine(runs[~scale]))
    named = {marker: partial(make, of) for makers, of in groups for marker, make in makers.items()}
    for marker in re.findall(r"<!-- (?!end)(.+) -->", text):
        table = markdown(named[marker]()) if marker in named else _table(marker, runs, effects, questions)
        text = re.sub(
            rf"(<!-- {marker} -->\n).*?(<!-- end -->)", lambda m, t=table: f"{m[1]}{t}{m[2]}", text, flags=re.DOTALL
        )
    page.write_text(text, encoding="utf-8")


def _table(marker: str, runs: pd.DataFrame, effects: pd.DataFrame, questions: Questions) -> str:
    """The table that a marker of effects, answers, claims or a front names, in Markdown."""
    if marker == "answers":
        return markdown(_answers(runs, effects, questions))
    if marker == "claims":
        claims = load_questions(HERE / "claims.toml")
        return markdown(_answers(runs, effects_of(runs, claims), claims))
    what, _, task = marker.partition(" of ")
    if what == "front":
        return markdown(_front(_of_front(runs, task)))
    mine = effects[_is_of(effects, task)]
    parts = []
    for title, rows in effect_tables(mine, questions).items():
        if rows:
            parts.append(
                f"\n**{title}**\n\n{markdown([{k: v for k, v in row.items() if k not in _SAID} for row in rows])}"
            )
    if not parts and _is_of(runs, task).any():
        return "\nNo two of its recipes differ in a technique of a question and in nothing else.\n\n"
    return "".join(parts) + "\n" if parts else markdown([])


def _is_of(frame: pd.DataFrame, task: str) -> pd.Series:
    """True in the lines of TASK:PRESET."""
    return (frame["task"] + ":" + frame["preset"]).eq(task)


def _of_front(runs: pd.DataFrame, task: str) -> pd.DataFrame:
    """The rows that the front of TASK:PRESET is of: none of *scale*, and at 10M those of *halve*."""
    mine = _is_of(runs, task) & ~runs["seed"].isin(SCALE)
    if task == "language:10M":
        mine &= runs["config_id"].isin(HALVED) | runs["is_baseline"]
    return runs[mine]


def _answers(runs: pd.DataFrame, effects: pd.DataFrame, questions: Questions) -> list[dict[str, object]]:
    """A row for each effect: its answer, from what, and what it does to the modelled time of a step."""
    screen = effects[_is_of(effects, questions.screen)]
    found = screen.set_index(["question", "effect", "evaluation"])
    first = runs.drop_duplicates("config_id").set_index("config_id")
    recipes = {name: recipe_from_dict(json.loads(text)).canonical() for name, text in first["recipe"].items()}
    here = set(runs.loc[_is_of(runs, questions.screen), "config_id"])
    of = {(question.id, effect.name): effect for question in questions.questions for effect in question.effects}
    rows = []
    for answer in answer_rows(answers(effects, questions)):
        key = answer["question"], answer["effect"]
        pairs = [pair for pair in of[key].pairs(recipes) if here.issuperset(pair)]
        before, after = (list(side) for side in zip(*pairs, strict=True))
        row: dict[str, object] = {"": answer["question"], "effect": answer["effect"]}
        for evaluation, heading in (("quantized", "loss"), ("bf16", "loss in BF16")):
            line = found.loc[(*key, evaluation)]
            row["pairs × seeds"] = f"{len(pairs)} × {line['seeds']}"
            row[heading] = change_with_range(line["difference"], line["low"], line["high"])
        ends = [np.mean(first.loc[after, end].to_numpy() - first.loc[before, end].to_numpy()) for end in BAND]
        row["step time"] = " to ".join(f"{end:+.3f}" for end in ends)
        rows.append({**row, "answer": answer["answer"], "why": answer["why"]})
    return rows


def _lanes(runs: pd.DataFrame) -> list[dict[str, object]]:
    """A row for each task and kind of device: recipes, seeds of each, lanes, and how many diverged."""
    rows = []
    for (task, preset, device), lanes in runs.groupby(["task", "preset", "device_class"], observed=True):
        seeds = lanes.groupby("config_id", observed=True)["seed"].nunique()
        rows.append(
            {
                "task": f"{task}:{preset}",
                "device": device,
                "recipes": len(seeds),
                "seeds of a recipe": " or ".join(str(count) for count in sorted(seeds.unique())),
                "lanes": len(lanes),
                "diverged": int(lanes["status"].eq("diverged").sum()),
            }
        )
    return rows


def _gradient_range(runs: pd.DataFrame) -> list[dict[str, object]]:
    """A row for each scale format of gradient-range.toml, a column for each loss scale: loss against BF16."""
    lanes = add_gap(runs[runs["task"].eq("language") & runs["preset"].eq("0.4M")])
    ids, gaps = by_seed(lanes, lanes["gap"])
    found = paired_interval(gaps).set_index(ids)
    scales = lanes.groupby("config_id")["fprop_x_scale"].first()
    rows: dict[str, dict[str, object]] = {}
    for recipe in Space.load(HERE / "gradient-range.toml").recipes():
        line, scale = found.loc[recipe.config_id], scales[recipe.config_id]
        row = rows.setdefault(scale, {"scale": f"`{scale}`"})
        row[f"loss scale {recipe.training.loss_scale:g}"] = change_with_range(line["mean"], line["low"], line["high"])
    return list(rows.values())


def _pairs(runs: pd.DataFrame) -> list[dict[str, object]]:
    """A row for each pair on `language:1M` of the techniques whose effects are means over unlike pairs, and for all but
    those of FLUSHED; with t intervals of these seeds alone, nothing pooled."""
    lanes = rows_at_best_lr(runs[runs["task"].eq("language") & runs["preset"].eq("1M")])
    ids, quantized = by_seed(lanes, lanes["gap"])
    _, bf16 = by_seed(lanes, lanes["gap_bf16"])
    first, at = lanes.drop_duplicates("config_id").set_index("config_id"), {name: row for row, name in enumerate(ids)}
    label = first["recipe_label"].astype(str).to_dict()
    recipes = {name: recipe_from_dict(json.loads(text)).canonical() for name, text in first["recipe"].items()}
    groups: dict[str, list[tuple[str, str]]] = {}
    questions = load_questions(HERE / "questions.toml").questions
    for effect in itertools.chain.from_iterable(question.effects for question in questions if question.id != "Q7"):
        name = effect.name.partition(" (")[0] if effect.name.startswith(APART) else effect.name
        if name in APART or name.startswith("HiFloat4"):
            groups[name] = list(dict.fromkeys([*groups.get(name, []), *effect.pairs(recipes)]))
    named = {text: name for name, text in label.items()}
    both = ", gradients SR", ", gradients SR, backward rht64"
    for (ends, of), more in itertools.product((("floor", "mxfp4"), ("ceil", "mxfp4-rceil")), both):
        pair = named.get(f"{of}{more}"), named.get(f"hif4{more}")
        groups[f"HiFloat4 for MXFP4 ({ends})"] += [pair] if None not in pair else []  # type: ignore[list-item]
    rows: list[dict[str, object]] = []
    for name, pairs in groups.items():
        parts = [(label[one], [(one, other)]) for one, other in pairs]
        rest = [pair for pair in pairs if label[pair[0]] not in FLUSHED]
        parts.sort(key=lambda part: part[0] in FLUSHED)
        if len(rest) < len(pairs):
            parts[len(rest) :] = [("*mean of the lines above*", rest), *parts[len(rest) :], ("*mean of all*", pairs)]
        for on, some in parts:
            row: dict[str, object] = {"technique": name, "on top of, or in place of": on}
            for heading, gaps in (("loss", quantized), ("loss in BF16", bf16)):
                of_seeds = np.mean([gaps[at[b]] - gaps[at[a]] for a, b in some], axis=0)
                row[heading] = interval(of_seeds)
            rows.append(row)
    return rows


def _front(runs: pd.DataFrame) -> list[dict[str, object]]:
    """A row for each recipe that is on the front with the best software, with the worst or with the middling one."""
    if runs.empty:
        return []
    found = front(runs)
    return [
        {
            "recipe": line.label,
            "loss": gap(line.gap, line.gap_low, line.gap_high, line.pairs),
            "loss in BF16": change(line.gap_bf16),
            "time of a step": f"{line.overhead:.2f} ({line.overhead_low:.2f} to {line.overhead_high:.2f})",
            "time to BF16's loss": time(line.time_to_quality, line.time_to_quality_low, line.time_to_quality_high),
            "chance of the front": f"{line.p_front:.2f}",
        }
        for line in found[found["on_front"]].itertuples()
    ]


def _confirm(runs: pd.DataFrame) -> list[dict[str, object]]:
    """A row for each recipe of the confirm stage, the cheapest first: its gap on the seeds that choose, on those that
    estimate and on all, and what it is worth against the row above."""
    rows = rows_at_best_lr(runs[_is_of(runs, "language:10M-long")])
    chances = front(rows).set_index("config_id")["p_front"]
    lines = summarize(rows).set_index("config_id")
    lines = lines[lines["gap"].notna() & lines["label"].ne("bf16")].sort_values("overhead")
    ids, quantized = by_seed(rows, rows["gap"])
    _, bf16 = by_seed(rows, rows["gap_bf16"])
    at, half = {name: row for row, name in enumerate(ids)}, quantized.shape[1] // 2

    seeds = sorted(rows["seed"].unique())
    first, other = (", ".join(str(seed) for seed in part) for part in (seeds[:half], seeds[half:]))
    out: list[dict[str, object]] = []
    before = None
    for name, line in lines.iterrows():
        gaps = quantized[at[name]]
        out.append(
            {
                "recipe": line["label"],
                "time of a step": f"{line['overhead']:.2f}",
                "to BF16's loss": time(*line[["time_to_quality", "time_to_quality_low", "time_to_quality_high"]]),
                f"loss, seeds {first}": change(gaps[:half].mean()),
                f"seeds {other}": change(gaps[half:].mean()),
                "all four": interval(gaps),
                "in BF16": interval(bf16[at[name]]),
                "against the row above": "" if before is None else interval(gaps - before),
                "chance of the front": f"{chances[name]:.2f}",
            }
        )
        before = gaps
    return out


_OF_RUNS = {"lanes": _lanes, "gradient-range": _gradient_range, "pairs": _pairs, "confirm": _confirm}
"""Marker -> rows of its table; those that compare sizes are in sizes.py, those of images in images.py."""


if __name__ == "__main__":
    main()
