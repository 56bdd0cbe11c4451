import io
import json

import numpy as np
import pandas as pd
import pytest

from fp4dse.results.text.frames import FORMATS

FRAME = pd.DataFrame(
    {
        "recipe_name": ["nvfp4", None, "a&b_50%"],
        "gap": [0.012345678, np.inf, np.nan],
        "seeds": pd.array([3, None, 5], "Int32"),
        "on_front": [True, False, False],
        "curve": [np.array([1.0, np.nan]), np.array([]), None],
        "when": pd.to_datetime(["2026-01-02T03:04:05Z"] * 3),
        "tiny": [1.5e-9, 2.0, 1e12],
    }
)


def test_json_and_csv_hold_the_same_values():
    data = json.loads(FORMATS["json"](FRAME))
    assert data[0]["gap"] == 0.012345678
    assert [line["gap"] for line in data[1:]] == [None, None]
    assert data[0]["curve"] == [1.0, None]
    table = pd.read_csv(io.BytesIO(FORMATS["csv"](FRAME)))
    assert table["seeds"].tolist()[::2] == [3, 5]
    assert table["gap"][0] == 0.012345678
    assert json.loads(table["curve"][0]) == [1.0, None]
    assert table["recipe_name"].tolist()[::2] == ["nvfp4", "a&b_50%"]


def test_parquet_reads_back_to_the_same_frame():
    again = pd.read_parquet(io.BytesIO(FORMATS["parquet"](FRAME)))
    assert again["gap"].tolist() == pytest.approx(FRAME["gap"].tolist(), nan_ok=True)
    assert again["on_front"].tolist() == [True, False, False]
    assert again["curve"][0][0] == 1.0


def test_latex_escapes_texts_and_rounds_numbers():
    text = FORMATS["latex"](FRAME.drop(columns=["curve", "when"])).decode()
    assert text.startswith("\\begin{tabular}{lrrrr}\n\\toprule\nrecipe\\_name & gap & seeds & on\\_front & tiny \\\\\n")
    assert r"nvfp4 & $0.01235$ & $3$ & yes & $1.5 \cdot 10^{-9}$ \\" in text
    assert r"-- & $\infty$ & -- & no & $2$ \\" in text
    assert r"a\&b\_50\% & -- & $5$ & no & $1 \cdot 10^{12}$ \\" in text


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_without_rows_or_columns_has_every_form(name):
    assert isinstance(FORMATS[name](FRAME.iloc[:0]), bytes)
    assert isinstance(FORMATS[name](pd.DataFrame()), bytes)
