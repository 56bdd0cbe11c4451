"""A frame as a file: CSV and JSON for scripts, Parquet for more pandas, LaTeX for a paper."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from fp4dse.dse import ConfigError


def to_csv(frame: pd.DataFrame) -> bytes:
    """CSV with a header; nothing where there is no value, lists as JSON."""
    flat = frame.copy()
    for name in _lists(frame):
        flat[name] = [json.dumps(row[name]) for row in records(frame[[name]])]
    text: str = flat.to_csv(index=False, lineterminator="\n")
    return text.encode()


def to_json(frame: pd.DataFrame) -> bytes:
    """JSON: a list of objects; NaN and inf are null."""
    return (json.dumps(records(frame), indent=2, ensure_ascii=False) + "\n").encode()


def to_parquet(frame: pd.DataFrame) -> bytes:
    """A Parquet file, compressed with zstd."""
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pandas(frame, preserve_index=False), sink, compression="zstd")
    return sink.getvalue()


def to_latex(frame: pd.DataFrame) -> bytes:
    r"""A tabular with booktabs rules (`\usepackage{booktabs}`): numbers right with four digits, texts escaped."""
    numeric = [pd.api.types.is_numeric_dtype(frame[name]) for name in frame]
    lines = [r"\begin{tabular}{" + "".join("r" if number else "l" for number in numeric) + "}", r"\toprule"]
    lines += [" & ".join(_escaped(str(name)) for name in frame) + r" \\", r"\midrule"]
    lines += [" & ".join(map(_latex_cell, row)) + r" \\" for row in frame.itertuples(index=False)]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""]).encode()


FORMATS: dict[str, Callable[[pd.DataFrame], bytes]] = {
    "csv": to_csv,
    "json": to_json,
    "parquet": to_parquet,
    "latex": to_latex,
}


SUFFIXES = {".csv": "csv", ".json": "json", ".parquet": "parquet", ".tex": "latex"}


def format_of(path: Path) -> str:
    """The format of FORMATS that a file's name ends in; ConfigError if it ends in none."""
    try:
        return SUFFIXES[path.suffix.lower()]
    except KeyError:
        raise ConfigError("--out", str(path), f"a name that ends in {', '.join(SUFFIXES)}, or --format") from None


def _lists(frame: pd.DataFrame) -> list[str]:
    return [name for name in frame if any(isinstance(value, list | np.ndarray) for value in frame[name])]


def _latex_cell(value: object) -> str:
    if isinstance(value, list | np.ndarray):
        return _escaped(", ".join(map(str, value)))
    if value is None or value is pd.NA or value is pd.NaT or value != value:
        return "--"
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if isinstance(value, float | np.floating):
        if np.isinf(value):
            return r"$\infty$" if value > 0 else r"$-\infty$"
        digits, _, power = f"{value:.4g}".partition("e")
        return f"${digits} \\cdot 10^{{{int(power)}}}$" if power else f"${digits}$"
    return f"${value}$" if isinstance(value, int | np.integer) else _escaped(str(value))


def _escaped(text: str) -> str:
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return "".join(special.get(c, f"\\{c}" if c in "&%$#_{}" else c) for c in text)


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows as plain data that any JSON writer takes: NaN and inf are None, times are ISO texts."""
    return [{str(name): plain(value) for name, value in row.items()} for row in frame.to_dict("records")]


def plain(value: object) -> object:
    """One value as plain data: NaN, inf and missing are None."""
    if isinstance(value, np.ndarray | list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or value is pd.NA or value is pd.NaT:
        return None
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int | bool) else getattr(value, "isoformat", lambda: str(value))()
