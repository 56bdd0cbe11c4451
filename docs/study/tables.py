"""Makes the tables of findings.md anew from the study's store: `python docs/study/tables.py`.

A table stands between `<!-- effects of TASK:PRESET -->` or `<!-- lanes -->` and the next `<!-- end -->`.
"""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd

from fp4dse.results import open_store
from fp4dse.results.stats.answers import answers, effects_of
from fp4dse.results.stats.questions import Questions, load_questions
from fp4dse.results.text.answer_tables import answer_rows, effect_tables

HERE = Path(__file__).parent


def main() -> None:
    """Write the tables into findings.md."""
    questions = load_questions(HERE / "questions.toml")
    runs = open_store(HERE / "store").runs()
    effects = effects_of(runs, questions)
    page = HERE / "findings.md"
    text = page.read_text(encoding="utf-8")
    for marker in re.findall(r"<!-- (lanes|answers|effects of \S+) -->", text):
        table = _table(marker, runs, effects, questions)
        text = re.sub(
            rf"(<!-- {marker} -->\n).*?(<!-- end -->)", lambda m, t=table: f"{m[1]}{t}{m[2]}", text, flags=re.DOTALL
        )
    page.write_text(text, encoding="utf-8")


def _table(marker: str, runs: pd.DataFrame, effects: pd.DataFrame, questions: Questions) -> str:
    """The table that a marker names, in Markdown."""
    if marker == "lanes":
        return _markdown(_lanes(runs))
    if marker == "answers":
        return _markdown(answer_rows(answers(effects, questions)))
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
    """A row for each task and kind of device: recipes, seeds, lanes, and how many diverged."""
    rows = []
    for (task, preset, device), lanes in runs.groupby(["task", "preset", "device_class"], observed=True):
        rows.append(
            {
                "task": f"{task}:{preset}",
                "device": device,
                "recipes": lanes["config_id"].nunique(),
                "seeds": lanes["seed"].nunique(),
                "lanes": len(lanes),
                "diverged": int(lanes["status"].eq("diverged").sum()),
            }
        )
    return rows


def _markdown(rows: list[dict[str, object]]) -> str:
    names = list(rows[0])
    lines = [names, ["---"] * len(names), *([str(row.get(name, "")) for name in names] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    main()
