"""The table, the remarks and the picture of an inspection say what its rows hold."""

import json
import re

import pytest
from plotly.graph_objects import Figure

from fp4dse.dse import StoreError
from fp4dse.results.report.tensor_page import PARTS, error_figure, remarks, tensor_table, write_tensor_page

SHARES = {"scale": 1.75, "dead": 0.02, "grid": 0.75, "scale·dead": 0.0, "scale·grid": -1.5, "dead·grid": 0.0}
SHARES["scale·dead"] = -0.02


def row(tensor="w", quantizer="mxfp4", **fields) -> dict:
    usual = {"bits": 4.25, "mse": 0.0125, "sqnr_db": 19.03, "gain": 0.98, "note": None, "decomposition": SHARES}
    return {
        "tensor": tensor,
        "shape": [2, 32],
        "dtype": "float32",
        "quantizer": quantizer,
        "clipped": 0.02,
        "flushed": 1e-6,
        "zeroed": 0.0,
        "saturated": 0.0,
        **usual,
        **fields,
    }


NOT_SPLIT = row("<v>", "nvfp4-4over6-mse", decomposition=None, note="quantizer.adapt: found 'x'; accepted: none")
NOTHING = row("b", **dict.fromkeys(["bits", "mse", "sqnr_db", "gain", "clipped", "flushed", "zeroed", "saturated"]))
NOTHING |= {"decomposition": None, "note": "x.shape[-1]: found 30; accepted: a multiple"}
ROWS = [row(), NOT_SPLIT, NOTHING]


TABLE = """\
w  2×32 float32
  quantizer         bits       MSE     dB    gain  clip%  flush%  zero%  scale%  dead%  grid%  cross%
  mxfp4             4.25  1.25e-02  19.03  0.9800      2  0.0001      0     175      2     75    -152

<v>  2×32 float32
  quantizer         bits       MSE     dB    gain  clip%  flush%  zero%  scale%  dead%  grid%  cross%
  nvfp4-4over6-mse  4.25  1.25e-02  19.03  0.9800      2  0.0001      0       –      –      –       –

b  2×32 float32
  quantizer         bits       MSE     dB    gain  clip%  flush%  zero%  scale%  dead%  grid%  cross%
  mxfp4             x.shape[-1]: found 30; accepted: a multiple

no decomposition, nvfp4-4over6-mse of <v>: quantizer.adapt: found 'x'; accepted: none
skipped, dtype int64: ids"""


def test_the_table_has_shares_in_percent_dashes_where_nothing_is_defined_and_reasons():
    assert tensor_table(ROWS, {"ids": "dtype int64"}) == TABLE
    assert tensor_table([row(), row(quantizer="nvfp4-4over6-mse")], {}).startswith(TABLE.split("\n\n")[0])


def test_remarks_name_what_was_left_out_once_a_reason():
    many = [{**NOTHING, "tensor": f"b{i}"} for i in range(5)]
    lines = remarks([*ROWS, *many], {"ids": "dtype int64", "step": "dtype int64", "one": "a single number"})
    assert lines == [
        "no decomposition, nvfp4-4over6-mse of <v>: quantizer.adapt: found 'x'; accepted: none",
        "not quantized, mxfp4 of b, b0, b1 and 3 more: x.shape[-1]: found 30; accepted: a multiple",
        "skipped, dtype int64: ids, step",
        "skipped, a single number: one",
    ]
    assert remarks([row()], {}) == []


def test_the_bars_of_a_tensor_add_up_to_its_error():
    figure = error_figure(ROWS)
    Figure(figure)  # Plotly takes every property
    bars = {trace["name"]: trace for trace in figure["data"]}
    assert set(bars) == {*PARTS, "relative MSE"}
    for trace in figure["data"]:
        assert trace["y"] == [["w", "<v>"], ["mxfp4", "nvfp4-4over6-mse"]]
    for i, total in enumerate(bars.pop("relative MSE")["x"]):
        assert sum(bar["x"][i] or 0 for bar in bars.values()) == pytest.approx(total) == pytest.approx(1.25)
    assert bars["not split"]["x"] == [None, 1.25]


def test_the_page_holds_figure_table_and_remarks_and_is_escaped(tmp_path):
    write_tensor_page(ROWS, {"<ids>": "dtype int64"}, "error of <w>", tmp_path / "e.html")
    page = (tmp_path / "e.html").read_text()
    figure = re.search(r'<script type="application/json">(.*?)</script>', page, re.DOTALL)
    assert json.loads(figure[1])["data"] == error_figure(ROWS)["data"]
    body = page[page.index("<body>") : page.index("<script>")]
    for text in ("error of &lt;w&gt;", "&lt;v&gt;", "&lt;ids&gt;", "1.25e-02", "not quantized"):
        assert text in body
    for text in ("<v>", "<w>", "<ids>"):
        assert text not in body


def test_a_page_that_cannot_be_written_is_one_line(tmp_path):
    with pytest.raises(StoreError, match="absent"):
        write_tensor_page(ROWS, {}, "error", tmp_path / "absent" / "e.html")
