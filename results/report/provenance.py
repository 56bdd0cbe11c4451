"""The panels of the machines, with failures and paths not taken, and of how to run everything again."""

from __future__ import annotations

import json
from html import escape

import pandas as pd

from fp4dse.dse import recipe_from_dict, recipe_to_toml
from fp4dse.results.report.findings import MACHINE, SOFTWARE, Findings
from fp4dse.results.report.page import table
from fp4dse.results.report.panel import Panel
from fp4dse.results.stats.paired import SETTING
from fp4dse.results.stats.stages import fresh, screened
from fp4dse.results.text.ratios import counted

MOST = 10
"""Reasons that are listed."""


def machines(found: Findings) -> str:
    """Each machine with its versions and the time that it took, and what did not go as wanted (HTML)."""
    runs = found.runs
    groups = runs.groupby([*MACHINE, *SOFTWARE], sort=False, dropna=False)
    facts = [(name.replace("_", " "), "") for name in [*MACHINE, *SOFTWARE]]
    columns = [("lanes", "n"), ("training time", "n"), *facts]
    rows = []
    for line in groups["lane_s"].agg(["size", "sum"]).reset_index().to_dict("records"):
        row: list[tuple[str, object]] = [(f"{line['size']:,}", line["size"]), (_duration(line["sum"]), line["sum"])]
        words = ["–" if pd.isna(line[name]) else str(line[name]) for name in [*MACHINE, *SOFTWARE]]
        rows.append([*row, *((escape(word), word) for word in words)])
    html = table(columns, rows)
    html += _counts("Paths that were wanted and not taken", _by_reason(runs[["run_id", "fallbacks"]]))
    return html + _counts("Lanes that failed (they are tried again by the same sweep)", runs["failure"].dropna())


def how_to_repeat(found: Findings) -> str:
    """All that determines a lane, and the recipes of the fronts as files (HTML)."""
    html = (
        "<p>Install the version and commit named above. A lane is determined by its recipe, learning rate, seed, and "
    )
    html += "what stands here; the same sweep on the same class of device and software gives the same bits, and trains "
    html += "only what the store lacks.</p><ul>"
    commands = []
    for keys, part in found.runs.groupby(list(SETTING), sort=False):
        part, new = screened(part), fresh(part)
        if part.empty:  # nothing but what chose learning rates
            continue
        facts = dict(zip(SETTING, keys, strict=True))
        rates = ", ".join(repr(float(lr)) for lr in sorted(part["lr"].unique()))
        seeds = sorted(part["seed"].unique())
        lanes = f"--seeds {','.join(map(str, seeds))}"
        if not part["lr_source"].isin(["tuned", "preset"]).all():
            lanes += f" --lr {rates.replace(' ', '')}"
        commands.append(f"fp4dse sweep SPACE --task {facts['task']}:{facts['preset']} {lanes}")
        if len(new):
            where = f"--task {facts['task']}:{facts['preset']} --seeds {new['seed'].nunique()}"
            commands.append(f"fp4dse confirm {where}")
        others = "; ".join(f"{name.replace('_', ' ')} {facts[name]}" for name in SETTING[2:])
        title = found.titles[tuple(keys)]
        html += f"<li><b>{escape(title)}</b>: learning rates {rates}; seeds {_ranges(seeds)}; {escape(others)}</li>"
    html += "</ul><p>With SPACE the space that was swept, or any recipe below saved as a file that it names; "
    html += "with the --data that there was, and tasks of your own as FILE.py:NAME:</p>"
    html += f"<pre><code>{escape(chr(10).join(dict.fromkeys(commands)))}</code></pre>"
    html += "<p>Recipes on a front, as files that <code>fp4dse</code> takes wherever it takes a recipe:</p>"
    front = found.recipes[found.recipes["on_front"]].drop_duplicates("config_id")
    for config_id, label in zip(front["config_id"], front["label"], strict=True):
        toml = recipe_to_toml(recipe_from_dict(json.loads(found.recipe_texts[config_id])))
        html += f"<details><summary>{escape(label)} ({config_id})</summary><pre>{escape(toml)}</pre></details>"
    return html


def _ranges(seeds: list[int]) -> str:
    whole = len(seeds) > 3 and seeds == list(range(int(seeds[0]), int(seeds[-1]) + 1))
    return f"{seeds[0]} to {seeds[-1]}" if whole else ", ".join(str(seed) for seed in seeds)


def _by_reason(runs: pd.DataFrame) -> pd.Series:
    """A line a lane and reason, as `fprop, dgrad: tf32-exact not taken: why`. runs: run_id, and fallbacks, lists of
    `stage: why` or `why`."""
    long = runs.explode("fallbacks").dropna(subset="fallbacks")
    which, texts = pd.factorize(long["fallbacks"].astype(str))
    parts = pd.Series(texts).str.extract(r"^((?:fprop|dgrad|wgrad)(?=: ))?(?:: )?(.*)$").astype(object)
    stage, why = parts[0].fillna("").to_numpy()[which], parts[1].to_numpy()[which]
    stages: dict[tuple[str, str], dict[str, None]] = {}
    for run, text, one in zip(long["run_id"], why, stage, strict=True):
        stages.setdefault((run, text), {})[one] = None
    found = [(", ".join(of), text) for (_, text), of in stages.items()]
    return pd.Series([f"{of}: {text}" if of else text for of, text in found], dtype=object)


def _counts(heading: str, sentences: pd.Series) -> str:
    if sentences.empty:
        return ""
    lines = sentences.value_counts()
    items = "".join(f"<li>{escape(str(text))} ({counted(n, 'lane')})</li>" for text, n in lines.head(MOST).items())
    more = f"<p>And {counted(len(lines) - MOST, 'other reason')}.</p>" if len(lines) > MOST else ""
    return f"<h3>{escape(heading)}</h3><ul>{items}</ul>{more}"


def _duration(seconds: float) -> str:
    if seconds < 600:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 36000 else f"{seconds / 3600:.1f} h"


MACHINES = Panel(
    "machines",
    "Machines",
    "What was run where",
    machines,
    (
        f"SELECT {', '.join([*MACHINE, *SOFTWARE])}, count(*) AS lanes, sum(lane_s) AS seconds FROM runs GROUP BY ALL",
        "SELECT why, count(*) AS lanes FROM (SELECT unnest(fallbacks) AS why FROM runs) GROUP BY ALL",
        "SELECT failure, count(*) AS lanes FROM runs WHERE failure IS NOT NULL GROUP BY ALL",
    ),
)
REPEAT = Panel(
    "again",
    "Again",
    "How to run it again",
    how_to_repeat,
    (
        f"SELECT {', '.join(SETTING)}, list(DISTINCT lr) AS lrs, list(DISTINCT seed) AS seeds FROM runs GROUP BY ALL",
        "FROM learning_rates",
    ),
)
