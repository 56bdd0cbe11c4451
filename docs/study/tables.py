"""Makes the tables of findings.md anew from the study's store: `python docs/study/tables.py`.

A table stands between `<!-- effects of TASK:PRESET -->` or `<!-- lanes -->` and others, and the next `<!-- end -->`.
"""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd

from fp4dse.dse import Space
from fp4dse.results import open_store
from fp4dse.results.stats.agreement import agreement, agreement_with_fewer_seeds, published
from fp4dse.results.stats.answers import effects_of
from fp4dse.results.stats.intervals import mean_interval
from fp4dse.results.stats.paired import add_gap, by_seed
from fp4dse.results.stats.questions import Questions, load_questions
from fp4dse.results.text.answer_tables import effect_tables
from fp4dse.results.text.ratios import change_with_range

HERE = Path(__file__).parent


def main() -> None:
    """Write the tables into findings.md."""
    questions = load_questions(HERE / "questions.toml")
    runs = open_store(HERE / "store").runs()
    effects = effects_of(runs, questions)
    page = HERE / "findings.md"
    text = page.read_text(encoding="utf-8")
    for marker in re.findall(r"<!-- (?!end)(.+) -->", text):
        table = _table(marker, runs, effects, questions)
        text = re.sub(
            rf"(<!-- {marker} -->\n).*?(<!-- end -->)", lambda m, t=table: f"{m[1]}{t}{m[2]}", text, flags=re.DOTALL
        )
    page.write_text(text, encoding="utf-8")


def _table(marker: str, runs: pd.DataFrame, effects: pd.DataFrame, questions: Questions) -> str:
    """The table that a marker names, in Markdown."""
    if marker in _OF_RUNS:
        return _markdown(_OF_RUNS[marker](runs))
    task = marker.removeprefix("effects of ")
    mine = effects[(effects["task"] + ":" + effects["preset"]).eq(task)]
    parts = []
    for title, rows in effect_tables(mine, questions).items():
        if rows:
            parts.append(
                f"\n**{title}**\n\n{_markdown([{k: v for k, v in row.items() if k != 'task'} for row in rows])}"
            )
    return "".join(parts) + "\n"


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
    found = mean_interval(gaps).set_index(ids)
    scales = lanes.groupby("config_id")["fprop_x_scale"].first()
    rows: dict[str, dict[str, object]] = {}
    for recipe in Space.load(HERE / "gradient-range.toml").recipes():
        line, scale = found.loc[recipe.config_id], scales[recipe.config_id]
        row = rows.setdefault(scale, {"scale": f"`{scale}`"})
        row[f"loss scale {recipe.training.loss_scale:g}"] = change_with_range(line["mean"], line["low"], line["high"])
    return list(rows.values())


def _agreement(runs: pd.DataFrame) -> list[dict[str, object]]:
    """A row for each task and group of Quartet II's schemes: agreement with their order at 30M parameters."""
    found = agreement(runs)
    return [
        {
            "task": f"{line.task}:{line.preset}",
            "schemes": line.group,
            "recipes": line.recipes,
            "pairs 0.2 % apart": line.pairs,
            "in the same order": f"{line.agree:.0%} ({line.agree_low:.0%} to {line.agree_high:.0%})",
            "of a perfect proxy": f"{line.ceiling_agree:.0%}",
            "Spearman": f"{line.spearman:.2f} ({line.spearman_low:.2f} to {line.spearman_high:.2f})",
            "of a perfect proxy's": f"{line.ceiling_spearman:.2f}",
        }
        for line in found[found["published"].eq("quartet2")].itertuples()
    ]


def _fewer_seeds(runs: pd.DataFrame) -> list[dict[str, object]]:
    """A row for each number of seeds: agreement with Quartet II's order in each group, over all choices of seeds."""
    found = agreement_with_fewer_seeds(runs[runs["task"].eq("language")])
    found = found[found["published"].eq("quartet2")]
    return [
        {
            "seeds": seeds,
            **{line.group: f"{line.agree:.0%} ({line.agree_least:.0%} at least)" for line in lines.itertuples()},
        }
        for seeds, lines in found.groupby("seeds")
    ]


def _published(runs: pd.DataFrame) -> list[dict[str, object]]:
    """A row for each of Quartet II's schemes: its published gap, and the gaps here, from the least in each group."""
    found = published(runs)
    mine = found["published"].eq("quartet2") & found["task"].eq("language")
    found = found[mine].sort_values(["group", "published_gap"])
    return [
        {
            "group": line.group,
            "scheme": line.scheme,
            "30M, published": f"{100 * line.published_gap:+.2f} %",
            f"{line.task}:{line.preset}": change_with_range(line.gap, line.gap_low, line.gap_high),
            "seeds": line.pairs,
        }
        for line in found.itertuples()
    ]


_OF_RUNS = {
    "lanes": _lanes,
    "gradient-range": _gradient_range,
    "agreement": _agreement,
    "fewer-seeds": _fewer_seeds,
    "published": _published,
}
"""Marker -> rows of its table, of all runs."""


def _markdown(rows: list[dict[str, object]]) -> str:
    names = list(rows[0])
    lines = [names, ["---"] * len(names), *([str(row.get(name, "")) for name in names] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    main()
