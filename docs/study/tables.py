"""Makes the tables of findings.md anew from the study's store: `python docs/study/tables.py`.

A table stands between its marker, `<!-- effects of TASK:PRESET -->`, `<!-- front of TASK:PRESET -->`,
`<!-- answers -->`, `<!-- claims -->` or one of those below, and the next `<!-- end -->`.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd

from fp4dse.dse import SLOTS, Recipe, Space, recipe_from_dict
from fp4dse.dse.cost import BAND
from fp4dse.dse.quantizer import Quantizer
from fp4dse.results import open_store, summarize
from fp4dse.results.stats.agreement import Ranked, agreement, agreement_with_fewer_seeds, compared, published
from fp4dse.results.stats.answers import answers, effects_of
from fp4dse.results.stats.extrapolation import extrapolation
from fp4dse.results.stats.intervals import paired_interval
from fp4dse.results.stats.paired import add_gap, by_seed, rows_at_best_lr
from fp4dse.results.stats.questions import Questions, load_questions
from fp4dse.results.stats.spread import spread_over_seeds
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
    if marker == "answers":
        return _markdown(_answers(runs, effects, questions))
    if marker == "claims":
        claims = load_questions(HERE / "claims.toml")
        return _markdown(_answers(runs, effects_of(runs, claims), claims))
    what, _, task = marker.partition(" of ")
    if what == "front":
        return _markdown(_front(runs[_is_of(runs, task)]))
    mine = effects[_is_of(effects, task)]
    parts = []
    for title, rows in effect_tables(mine, questions).items():
        if rows:
            parts.append(
                f"\n**{title}**\n\n{_markdown([{k: v for k, v in row.items() if k not in _SAID} for row in rows])}"
            )
    if not parts and _is_of(runs, task).any():
        return "\nNo two of its recipes differ in a technique of a question and in nothing else.\n\n"
    return "".join(parts) + "\n" if parts else _markdown([])


def _is_of(frame: pd.DataFrame, task: str) -> pd.Series:
    """True in the lines of TASK:PRESET."""
    return (frame["task"] + ":" + frame["preset"]).eq(task)


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
    for ends, of in (("floor", "mxfp4"), ("ceil", "mxfp4-rceil")):
        pair = named.get(f"{of}, gradients SR"), named.get("hif4, gradients SR")
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
                row[heading] = _interval(of_seeds)
            rows.append(row)
    return rows


def _agreement(runs: pd.DataFrame) -> list[dict[str, object]]:
    """A row for each task and group of Quartet II's schemes, of which two are far enough apart: agreement with their
    order at 30M parameters."""
    found = agreement(runs).query("pairs > 0")
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
    """A row for each task and number of seeds: agreement with Quartet II's order in each group, over all choices of
    seeds."""
    found = agreement_with_fewer_seeds(runs[runs["task"].eq("language")])
    found = found[found["published"].eq("quartet2")]
    return [
        {
            "task": f"{task}:{preset}",
            "seeds": seeds,
            **{line.group: f"{line.agree:.0%} ({line.agree_least:.0%} at least)" for line in lines.itertuples()},
        }
        for (task, preset, seeds), lines in found.groupby(["task", "preset", "seeds"], observed=True)
    ]


def _published(runs: pd.DataFrame) -> list[dict[str, object]]:
    """A row for each of Quartet II's schemes: its published gap, and the gaps here, from the least in each group."""
    found = published(runs)
    mine = found["published"].eq("quartet2") & found["task"].eq("language")
    found = found[mine].sort_values(["group", "published_gap"])
    here = {preset: f"language:{preset}" for preset in _by_size(found["preset"].unique())}
    rows: dict[str, dict[str, object]] = {}
    for line in found.itertuples():
        row = rows.setdefault(line.scheme, {"group": line.group, "scheme": line.scheme})
        row["30M, published"] = f"{100 * line.published_gap:+.2f} %"
        row.update({name: row.get(name, "") for name in here.values()})
        row[here[line.preset]] = _gap(line.gap, line.gap_low, line.gap_high, line.pairs)
    return list(rows.values())


def _front(runs: pd.DataFrame) -> list[dict[str, object]]:
    """A row for each recipe that is on the front with the best software, with the worst or with the middling one."""
    if runs.empty:
        return []
    found = front(runs)
    return [
        {
            "recipe": line.label,
            "loss": _gap(line.gap, line.gap_low, line.gap_high, line.pairs),
            "loss in BF16": change(line.gap_bf16),
            "time of a step": f"{line.overhead:.2f} ({line.overhead_low:.2f} to {line.overhead_high:.2f})",
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
                f"loss, seeds {first}": change(gaps[:half].mean()),
                f"seeds {other}": change(gaps[half:].mean()),
                "all four": _interval(gaps),
                "in BF16": _interval(bf16[at[name]]),
                "against the row above": "" if before is None else _interval(gaps - before),
                "chance of the front": f"{chances[name]:.2f}",
            }
        )
        before = gaps
    return out


def _reducible(runs: pd.DataFrame) -> list[dict[str, object]]:
    """A row for BF16, its loss above the text's entropy, and for each recipe trained at 10M: its gap in that."""
    lines = summarize(runs[runs["task"].eq("language")])
    names = lines.loc[lines["preset"].eq("10M") & lines["label"].ne("bf16"), "config_id"]
    found = lines[lines["config_id"].isin(names)].sort_values("overhead")
    rows: list[dict[str, object]] = []
    for _, of in found.groupby("config_id", sort=False):
        of = of.set_index("preset")
        row: dict[str, object] = {"recipe": of["label"].iloc[-1]}
        for preset in _by_size(of.index):
            line = of.loc[preset]
            row[preset] = change_with_range(*line[["gap_reducible", "gap_reducible_low", "gap_reducible_high"]])
        rows.append(row)
    above = runs[runs["task"].eq("language") & runs["is_baseline"].astype(bool)]
    means = above["val_metric"].groupby(above["preset"].astype(str)).mean()
    return [{"recipe": "BF16, nats a token", **{p: f"{means[p]:.4f}" for p in _by_size(means.index)}}, *rows]


def _by_size(presets: Iterable[str]) -> list[str]:
    """Presets by parameters, then by tokens: 10M before 10M-long."""
    return sorted(presets, key=lambda preset: (float(preset.partition("M")[0]), preset))


def _sizes(runs: pd.DataFrame) -> list[dict[str, object]]:
    """A row for each recipe of `halve.toml` and `quartet2-10M.toml` that two sizes have: its gap at each."""
    lines = summarize(runs[runs["task"].eq("language")])
    lines = lines[lines["config_id"].isin(_GROUPS) & lines["gap"].notna()]
    sizes = _by_size(lines["preset"].unique())
    found = lines.set_index(["config_id", "preset"])
    labels = lines.drop_duplicates("config_id").set_index("config_id")["label"]
    rows = []
    for name, group in _GROUPS.items():
        row: dict[str, object] = {"quantizes": group, "recipe": labels.get(name, name)}
        for preset in sizes:
            if (name, preset) in found.index:
                line = found.loc[name, preset]
                row[preset] = _gap(line["gap"], line["gap_low"], line["gap_high"], line["pairs"])
        if len(row) > 3:
            rows.append(row)
    return rows


def _order(runs: pd.DataFrame) -> list[dict[str, object]]:
    """A row for each pair of sizes and group of recipes of which the larger has a pair apart: does the smaller order
    them alike?"""
    rows = rows_at_best_lr(runs[runs["task"].eq("language")])
    rows = rows[rows["config_id"].isin(_GROUPS) & rows["gap"].notna()]
    gaps = {}
    for preset, part in rows.groupby("preset", observed=True):
        ids, values = by_seed(part, part["gap"])
        gaps[preset] = pd.DataFrame(100 * values, index=ids)
    lines: list[dict[str, object]] = []
    sizes = _by_size(gaps)
    for (small, large), group in itertools.product(itertools.combinations(sizes, 2), dict.fromkeys(_GROUPS.values())):
        both = [n for n, of in _GROUPS.items() if of == group and n in gaps[small].index and n in gaps[large].index]
        if len(both) < 3:
            continue
        spread = spread_over_seeds(gaps[large].loc[both].dropna(axis="columns", how="all").to_numpy())
        proxy = gaps[small].loc[both].dropna(axis="columns", how="all").to_numpy()
        error = float(np.sqrt(np.mean(spread.error**2)))
        found = compared(Ranked(large, group, both, spread.mean, proxy, len(both)), error)
        if not found["pairs"]:
            continue
        lines.append(
            {
                "sizes": f"{small} for {large}",
                "quantizes": group,
                "recipes": len(both),
                "pairs 0.2 % apart": found["pairs"],
                "in the same order": f"{found['agree']:.0%} ({found['agree_low']:.0%} to {found['agree_high']:.0%})",
                "of a perfect proxy": f"{found['ceiling_agree']:.0%}",
            }
        )
    return lines


def _extrapolated(runs: pd.DataFrame) -> list[dict[str, object]]:
    """A row for each model of how gaps grow: its predictions for the largest size, from the others."""
    found = extrapolation(runs[runs["task"].eq("language")])
    return [
        {
            "prediction of": preset,
            "model": model,
            "recipes": len(lines),
            "measured − predicted, median": f"{100 * lines['difference'].median():+.2f} %",
            "within its interval": f"{lines['error'].abs().le(1).mean():.0%}",
            "right side, of pairs 0.2 % apart": f"{lines['agree'].sum() / lines['pairs'].sum():.0%}",
        }
        for (preset, model), lines in found.groupby(["preset", "model"], sort=False, observed=True)
    ]


def _interval(gaps: np.ndarray) -> str:
    """The mean of gaps, one a seed, with its t interval."""
    line = paired_interval(gaps[None]).iloc[0]
    return change_with_range(line["mean"], line["low"], line["high"])


def _gap(gap: float, low: float, high: float, seeds: int) -> str:
    """A gap with its 95 % interval and the seeds that it is from."""
    return f"{change_with_range(gap, low, high)}, {int(seeds)} seeds"


def _groups() -> dict[str, str]:
    """config_id -> what the recipe quantizes, of the recipes that are trained at 10M."""
    found = {}
    for file in ("halve.toml", "quartet2-10M.toml"):
        for recipe in Space.load(HERE / file).recipes():
            canonical = recipe.canonical()
            passes = [any(not q.is_plain for q in part) for part in _slots(canonical)]
            found[canonical.config_id] = {(True, True): "all", (True, False): "forward"}.get(tuple(passes), "backward")
    return dict(sorted(found.items(), key=lambda pair: pair[1]))


def _slots(recipe: Recipe) -> tuple[list[Quantizer], list[Quantizer]]:
    forward = [recipe.slot(slot) for slot in SLOTS if slot.startswith("fprop")]
    return forward, [recipe.slot(slot) for slot in SLOTS if not slot.startswith("fprop")]


_GROUPS = _groups()

_OF_RUNS = {
    "lanes": _lanes,
    "gradient-range": _gradient_range,
    "pairs": _pairs,
    "agreement": _agreement,
    "fewer-seeds": _fewer_seeds,
    "published": _published,
    "confirm": _confirm,
    "reducible": _reducible,
    "sizes": _sizes,
    "order": _order,
    "extrapolated": _extrapolated,
}
"""Marker -> rows of its table, of all runs."""


def _markdown(rows: list[dict[str, object]]) -> str:
    """The rows as a table, with the columns of all of them; in words where there are none."""
    if not rows:
        return "\nNothing was trained for this yet.\n\n"
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [names, ["---"] * len(names), *([str(row.get(name, "")) for name in names] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    main()
