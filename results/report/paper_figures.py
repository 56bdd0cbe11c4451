"""Figures for papers: the report's pictures as PNG, SVG or PDF files, drawn by matplotlib without a browser.

Shapes and dashes differ, so that they survive a black-and-white printer. Texts of SVG and PDF stay texts.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from fp4dse.dse import ConfigError
from fp4dse.results.report.curves import front_curves, over_seeds
from fp4dse.results.report.figures import ratio_ticks, usual_limit
from fp4dse.results.report.findings import Findings
from fp4dse.results.report.heatmaps import crossed, interaction_values
from fp4dse.results.report.techniques import name_of, shown_effects
from fp4dse.results.store.atomic import writing
from fp4dse.results.text.ratios import change, counted, noun, written_in

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

FORMS = ("png", "svg", "pdf")
BLUE, GREY = "#1d5fd0", "#8a929c"
DASHES = ("-", "--", ":", "-.", (0, (8, 2)), (0, (8, 2, 1, 2)))
STYLE: dict[Any, Any] = {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False, "svg.fonttype": "none"}
STYLE |= {"pdf.fonttype": 42, "savefig.dpi": 300, "axes.linewidth": 0.6, "legend.frameon": False}
STYLE |= {"svg.hashsalt": "fp4dse"}  # the same names inside the file each time
WIDTH = 3.5
"""Of a column, inches."""
LETTERS = 80
"""Of a line across a figure, in small print."""
MOST_TICKS = 8
MOST_NAMED = 12
"""Members of the front in the key."""


def write_figures(found: Findings, folder: str | Path, form: str = "pdf") -> list[Path]:
    """front, effects, interactions and curves of each setting as files in `folder`; returns those that were written.

    form: png, svg or pdf. A figure that a setting has no numbers for is left out. ConfigError on another form.
    StoreError if the folder cannot be written.
    """
    check_form(form)
    import matplotlib as mpl
    from matplotlib.figure import Figure

    folder, written = Path(folder), []
    with writing(folder), mpl.rc_context(STYLE):
        folder.mkdir(parents=True, exist_ok=True)
        for one, title in zip(found.settings, found.titles.values(), strict=True):
            for what, draw in _DRAW.items():
                figure = Figure(figsize=(WIDTH, 2.6), layout="constrained")
                with written_in(one.verdicts[0].unit):
                    drawn = draw(one, figure)
                if drawn:
                    path = folder / f"{what}-{re.sub(r'[^A-Za-z0-9]+', '-', title).strip('-')}.{form}"
                    figure.savefig(path, metadata=_undated(form))
                    written.append(path)
    return written


def check_form(form: str) -> None:
    """ConfigError unless figures can be written in this form."""
    if form not in FORMS:
        raise ConfigError("--format", form, ", ".join(FORMS))


def _undated(form: str) -> dict[str, Any]:
    """The same numbers make the same file."""
    return {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(form, {})


def _front(found: Findings, figure: Figure) -> bool:
    lines = found.recipes[found.recipes["points"].gt(0)]
    cost, says = next(iter(found.axes.items()))
    lines = lines[np.isfinite(lines["gap"]) & lines[cost].notna()]
    if lines.empty:
        return False
    axes = figure.subplots()
    floor = found.floors["noise_floor"]
    if len(floor) and np.isfinite(floor.iloc[0]):
        axes.axhspan(-floor.iloc[0], floor.iloc[0], color="#000", alpha=0.08, lw=0)
    axes.axhline(0, color="#000", lw=0.6)
    front = lines[lines["on_front"]].sort_values([cost, "gap"])
    others = lines[~lines["on_front"]]
    axes.plot(others[cost], others["gap"], "D", ms=3, mfc="none", mec=GREY, mew=0.6, rasterized=len(others) > 2000)
    axes.step(front[cost], front["gap"], where="post", color=BLUE, ls=":", lw=1)
    half = [front["gap"] - front["gap_low"], front["gap_high"] - front["gap"]]
    axes.errorbar(front[cost], front["gap"], np.nan_to_num(half), fmt="o", ms=5, color=BLUE, capsize=2, lw=1)
    for n, (x, y) in enumerate(zip(front[cost], front["gap"], strict=True), 1):
        axes.annotate(str(n), (x, y), xytext=(4, 4), textcoords="offset points", color=BLUE)
    limit = usual_limit(lines["gap"], front[["gap", "gap_high"]].max().max())
    if limit is not None:
        axes.set_ylim(top=limit + 0.1 * (limit - lines["gap"].min()))
        far = others[others["gap"].gt(axes.get_ylim()[1])]
        edge = np.full(len(far), 1.0)
        axes.plot(
            far[cost],
            edge,
            "^",
            ms=3,
            mfc="none",
            mec=GREY,
            mew=0.6,
            transform=axes.get_xaxis_transform(),
            clip_on=False,
        )
        says_far = f"{counted(len(far), 'recipe')} above, not to scale"
        axes.annotate(says_far, (1, 1), xycoords="axes fraction", ha="right", va="bottom", color=GREY)
    _ratio_ticks(axes.yaxis, axes.get_ylim())
    if lines[cost].nunique() <= MOST_TICKS:
        axes.set_xticks(sorted(lines[cost].unique()))
    axes.set_xlabel(says)
    axes.set_ylabel(f"{noun()} against BF16")
    _key(found, front, figure)
    return True


def _key(found: Findings, front: pd.DataFrame, figure: Figure) -> None:
    """The legend of the numbers on the front."""
    from matplotlib.lines import Line2D

    called = [found.labels.of(label) for label in front["label"].head(MOST_NAMED)]
    marks = [Line2D([], [], marker=f"${n}$", color=BLUE, ls="", label=name) for n, name in enumerate(called, 1)]
    if marks:
        shared = textwrap.fill(found.labels.says(), LETTERS) or None
        figure.set_size_inches(WIDTH, 2.6 + 0.13 * (len(marks) + (shared.count("\n") + 1 if shared else 0)))
        figure.legend(handles=marks, loc="outside lower center", title=shared, fontsize=6, title_fontsize=6)


def _ratio_ticks(axis: Axis, limits: tuple[float, float]) -> None:
    """Ticks of an axis of log ratios as changes in %, or as ratios."""
    axis.set_ticks(*ratio_ticks(*limits, 6))


def _effects(found: Findings, figure: Figure) -> bool:
    lines = shown_effects(found.marginal)
    if lines.empty:
        return False
    figure.set_size_inches(WIDTH * 1.4, 0.8 + 0.2 * len(lines))
    axes = figure.subplots()
    half = np.stack([lines["difference"] - lines["low"], lines["high"] - lines["difference"]])
    rows, partly = np.arange(len(lines)), lines["untried"].ne("").to_numpy()
    axes.axvline(0, color="#000", lw=0.6)
    sure = lines["q"].lt(0.05).to_numpy()  # told from nothing with all techniques in mind, as in the report
    for of, colour in ((~partly, BLUE), (partly, GREY)):
        bars = np.nan_to_num(half[:, of])
        axes.errorbar(lines["difference"][of], rows[of], xerr=bars, fmt="none", color=colour, capsize=2, lw=1)
        for which, fill in ((of & sure, colour), (of & ~sure, "white")):
            axes.plot(lines["difference"][which], rows[which], "D", ms=4, mfc=fill, mec=colour)
    stars = ["*" if so else "" for so in partly]
    names = [name_of(line) + star for line, star in zip(lines.to_dict("records"), stars, strict=True)]
    axes.set_yticks(rows, names)
    axes.invert_yaxis()
    _ratio_ticks(axes.xaxis, axes.get_xlim())
    note = "\n* one of the two was never tried with what the other was" if partly.any() else ""
    axes.set_xlabel(f"{noun()} with it against without it, matched pairs{note}")
    return True


def _interactions(found: Findings, figure: Figure) -> bool:
    names, values, stars = interaction_values(crossed(found.effects))
    if not np.isfinite(values).any():
        return False
    side = 1.6 + 0.42 * len(names)
    figure.set_size_inches(side + 0.8, side)
    axes = figure.subplots()
    most = np.nanmax(np.abs(values))
    image = axes.imshow(values, cmap="PuOr_r", vmin=-most, vmax=most)
    for i, j in np.argwhere(np.isfinite(values)):
        text = change(values[i, j]).replace(" ", "") + "*" * bool(stars[i, j])
        axes.text(
            j,
            i,
            text,
            ha="center",
            va="center",
            fontsize=5.5,
            color="#000" if abs(values[i, j]) < 0.7 * most else "#fff",
        )
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
    axes.set_yticks(range(len(names)), names)
    bar = figure.colorbar(image, shrink=0.7, label="loss beyond what both do alone")
    positions, texts = ratio_ticks(-most, most, 5)
    bar.set_ticks(positions, labels=texts)
    return True


def _curves(found: Findings, figure: Figure) -> bool:
    lines = front_curves(found)
    if lines.empty:
        return False
    figure.set_size_inches(WIDTH, 3.2)
    axes: Axes = figure.subplots()
    by_step = over_seeds(lines)
    for i, name in enumerate(lines["name"].unique()):
        part: pd.DataFrame = by_step[by_step["name"].eq(name)].sort_values("step")
        colour = "#000" if i == 0 else f"C{(i - 1) % 10}"
        axes.fill_between(part["step"], part["min"], part["max"], color=colour, alpha=0.12, lw=0)
        axes.plot(
            part["step"], part["mean"], color=colour, ls=DASHES[i % len(DASHES)], lw=1.6 if i == 0 else 1, label=name
        )
    axes.set_xscale("log")
    if by_step["min"].min() > 0:
        axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel("training loss")
    figure.legend(loc="outside lower center", fontsize=6)
    return True


_DRAW = {"front": _front, "effects": _effects, "interactions": _interactions, "curves": _curves}
"""Name of a file -> function that draws it; False where there is nothing to draw."""
