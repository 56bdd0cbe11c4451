"""The tables of docs/cost.md, written by `python -m fp4dse.dse.cost.cost_page docs/cost.md`.

A table stands between `<!-- name -->` and `<!-- /name -->`; a test holds that the file is as `fill` leaves it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from fp4dse.dse.cost.chip import UNITS, chip_names, load_chip
from fp4dse.dse.cost.iteration import iteration, load_workload, workload_names
from fp4dse.dse.cost.model import load_model, model_names
from fp4dse.dse.cost.points import points
from fp4dse.dse.cost.scenario import ENDS, MID, scenarios
from fp4dse.dse.cost.step import DEFAULT_CHIP, DEFAULT_MODEL, overhead
from fp4dse.dse.cost.storage import activation_bits, bits_per_element
from fp4dse.dse.cost.validation import Comparison, effects, fits, kernels, median_error, ratios
from fp4dse.dse.reading.library import recipe_files


def markdown(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def comparison_table(rows: Iterable[Comparison]) -> str:
    """Measured beside modelled, and the error of the model."""
    cells = ([row.what, _four(row.measured), _four(row.modelled), f"{round(100 * row.error):+d} %"] for row in rows)
    return markdown(["what", "measured", "modelled", "error"], cells)


def fit_table() -> str:
    """Measurements that the numbers of the model were chosen from, with the source."""
    cells = (
        [
            row.what,
            f"`{row.chip}`",
            _four(row.measured),
            _four(row.modelled),
            f"{round(100 * row.error):+d} %",
            row.source,
        ]
        for row in fits()
    )
    return markdown(["what", "chip", "measured", "modelled", "error", "source"], cells)


def ratio_table() -> str:
    """Ratios of two runs, with the band and the source; the worst last."""
    head = ["what", "chip", "shape", "measured", "modelled (band)", "error", "source"]
    rows = []
    for row in sorted(ratios(), key=lambda row: abs(row.error)):
        where, error = [f"`{row.chip}`", row.shape], f"{100 * row.error:+.1f} %"
        rows.append([row.what, *where, f"{row.measured:.3f}", _with_band(row), error, row.source])
    return markdown(head, rows)


def error_table() -> str:
    """The held-back ratios in four numbers: all, those of whole models against BF16, of these those in FP4, those that
    share no run with what was used to fit, and by chip."""
    rows = ratios()
    models = [row for row in rows if row.shape in model_names()]
    parts = {
        "all": rows,
        "of whole models": models,
        "of whole models, against BF16": [row for row in models if "against BF16" in row.what],
        "of whole models in FP4, against BF16": [
            row for row in models if "against BF16" in row.what and re.search("NVFP4|MXFP4", row.what)
        ],
        "of two runs neither of which was used": [row for row in rows if not row.over_is_fitted],
        **{f"on `{chip}`": [row for row in rows if row.chip == chip] for chip in sorted({row.chip for row in rows})},
    }
    head = ["ratios", "number", "median error", "within 10 %", "within the band", "worst"]
    return markdown(head, [[name, *_errors(part)] for name, part in parts.items()])


def _errors(rows: Sequence[Comparison]) -> list[str]:
    worst = max(rows, key=lambda row: abs(row.error))
    near = sum(abs(row.error) <= 0.1 for row in rows)
    inside = sum(row.within for row in rows)
    found = [f"{len(rows)}", f"{100 * median_error(rows):.1f} %", f"{near}", f"{inside}"]
    return [*found, f"{worst.what}: {100 * worst.error:+.1f} %"]


def _with_band(row: Comparison) -> str:
    low, high = row.band
    return f"{row.modelled:.3f} ({low:.2f} to {high:.2f})"


def scenario_table() -> str:
    """The factors on FP4 products and on kernels that quantize, rounds, and the unmodelled share of BF16's step."""
    head = ["scenario", "assumes", "FP4 products, ×", "quantizing, ×", "Philox rounds", "unmodelled"]
    rows = (
        [f"`{name}`", s.summary, *(f"{number.value:g}" for number in (s.products, s.passes, s.philox, s.rest))]
        for name, s in scenarios().items()
    )
    return markdown(head, rows)


def _four(value: float) -> str:
    """Four digits, without an exponent."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:#.4g}"


def chip_table() -> str:
    """Peak rates, and of the matrix units the share of the peak that is reached; 10¹² a second, bandwidth in TB/s,
    memory in GB; and if an instruction rounds E2M1 by chance."""
    head = ["chip", *(f"{unit.upper()}, TFLOP/s" for unit in UNITS[:4]), "vector", "special", "convert", "TB/s", "GB"]
    head += ["stochastic rounding"]
    rows = []
    for name in chip_names():
        chip = load_chip(name)
        rates = [
            f"{chip.matrix[unit].value / 1e12:g} · {chip.flops(unit) / chip.matrix[unit].value:.2g}"
            if unit in chip.matrix
            else "–"
            for unit in UNITS[:4]
        ]
        others = (chip.vector, chip.special, chip.convert, chip.bandwidth)
        memory = f"{chip.capacity.value / 1e9:g}" if chip.capacity else "–"
        rounds = "instruction" if "e2m1 stochastic" in chip.converts else "software"
        rows.append([f"`{name}`", *rates, *(f"{number.value / 1e12:g}" for number in others), memory, rounds])
    return markdown(head, rows)


def model_table() -> str:
    rows = ([f"`{name}`", load_model(name).summary, load_model(name).source] for name in model_names())
    return markdown(["model", "what", "source"], rows)


def recipe_table() -> str:
    """All shipped recipes, the fastest on the default chip first, with the band there."""
    chips = ("gb200", "gb300", "mi355x", "rtx-5090", "h200")
    head = ["recipe", "`gb200`", "band", *(f"`{chip}`" for chip in chips[1:]), "points", "bits", "kept bits"]
    rows = []
    for name, file in sorted(recipe_files().items(), key=lambda item: overhead(item[1].recipe)):
        r = file.recipe
        numbers = [str(points(r)), f"{bits_per_element(r):.3g}", f"{activation_bits(r):.3g}"]
        mid, *others = (f"{overhead(r, chip=chip):.3f}" for chip in chips)
        low, high = (f"{overhead(r, scenario=end):.2f}" for end in ENDS)
        rows.append([f"`{name}`", mid, f"{low} to {high}", *others, *numbers])
    return markdown(head, rows)


def workload_table() -> str:
    """The share of rollouts in BF16's iteration, and iterations of two recipes, on the default chip, with the band."""
    model, chip, recipes = load_model(DEFAULT_MODEL), load_chip(DEFAULT_CHIP), ("nvidia-nvfp4", "rl-row-scaled")
    rows = []
    for name in workload_names():
        workload = load_workload(name)
        found = [[iteration(recipe_files()[r].recipe, model, chip, workload, s) for s in (MID, *ENDS)] for r in recipes]
        shares = [one.share for one in found[0]]
        cells = [shares, *([one.overhead() for one in of] for of in found)]
        numbers = [f"{mid:.2f} ({low:.2f} to {high:.2f})" for mid, low, high in cells]
        rows.append([f"`{name}`", workload.summary, *numbers, workload.source])
    return markdown(["workload", "what", "`rollout_share`", *(f"`{r}`" for r in recipes), "source"], rows)


def sensitivity_table() -> str:
    cells = ([e.what, f"{100 * e.largest:.0f} %", f"{e.swapped} of {e.pairs}"] for e in effects())
    return markdown(["changed", "largest change of an overhead", "pairs that swap"], cells)


TABLES: dict[str, Callable[[], str]] = {
    "chips": chip_table,
    "models": model_table,
    "recipes": recipe_table,
    "workloads": workload_table,
    "scenarios": scenario_table,
    "errors": error_table,
    "ratios": ratio_table,
    "fits": fit_table,
    "sensitivity": sensitivity_table,
    "kernels": lambda: comparison_table(kernels()),
}


def fill(text: str) -> str:
    """The text with every table as it is now. KeyError for a mark of no table."""
    return re.sub(
        r"<!-- (\w+) -->\n.*?<!-- /\1 -->",
        lambda found: f"<!-- {found[1]} -->\n{TABLES[found[1]]()}\n<!-- /{found[1]} -->",
        text,
        flags=re.DOTALL,
    )


if __name__ == "__main__":
    for file in map(Path, sys.argv[1:]):
        file.write_text(fill(file.read_text(encoding="utf-8")), encoding="utf-8")
