"""Tables and page of a diagnosis say what it holds, worst first."""

import json
import re

import pytest
from plotly.graph_objects import Figure

from fp4dse.dse import StoreError
from fp4dse.results.report.diagnosis_page import (
    cause_rows,
    curve_figure,
    curve_rows,
    facts,
    layer_rows,
    loss_figure,
    operand_rows,
    write_diagnosis_page,
)


def error(bias2, variance, se=1e-5) -> dict:
    curve = [
        {"n": n, "error": bias2 + variance / n, "se": None if n == 4 else 0.001, "runs": 4 // n} for n in (1, 2, 4)
    ]
    more = {"norm": 1.0, "passes": 4, "cosine": 0.98765, "bias2_se": se, "variance_se": 2e-4, "curve": curve}
    return {"bias2": bias2, "variance": variance, "error": bias2 + variance, **more}


def operand(layer, slot, mse, **more) -> dict:
    usual = {"clipped": 0.0341, "flushed": 0.1, "clipped_error": 1e-4, "flushed_error": 2e-3, "gain": 0.99}
    return {"layer": layer, "slot": slot, "mse": mse, **usual, **more}


def moment(step) -> dict:
    layers = {"w0": error(0.001, 0.03), "<w1>": error(0.02, 0.05), "head": error(0.0, 0.0, 0.0)}
    forward = {name: error(0.2, 0.0, 0.0) for name in layers}
    return {
        "step": step,
        "operands": [operand("w0", "fprop.x", 0.01), operand("<w1>", "dgrad.g", 0.03), operand("w0", "dgrad.g", None)],
        "backward": {"whole": error(0.01, 0.04), "layers": layers},
        "forward": {"whole": error(0.2, 0.0, 0.0), "layers": forward},
    }


DIAGNOSIS = {
    "recipe": "nvfp4 & <more>",
    "config_id": "0" * 16,
    "task": "regression",
    "preset": "smoke",
    "seed": 0,
    "steps": 40,
    "lr": 0.002,
    "baseline_lr": 0.004,
    "val_loss": 0.0105,
    "val_loss_bf16": 0.03,
    "baseline_val_loss": 0.01,
    "curve_step": [1, 2, 4],
    "curve_loss": [1.0, 0.5, 0.3],
    "baseline_curve_loss": [1.0, 0.4, 0.2],
    "apart": 2,
    "diverged": None,
    "moments": [moment(4), moment(40)],
}
ENDED = DIAGNOSIS | {
    "moments": [],
    "val_loss": None,
    "diverged": {"step": 3, "layer": "w0", "slot": "dgrad.g", "made": True},
}


def test_facts_are_losses_against_bf16_and_where_the_lane_went():
    found = facts(DIAGNOSIS)
    assert (found["loss against BF16"], found["its weights in BF16"]) == ("+5.00 %", "× 3.00")
    assert found["training loss above BF16's"] == "from step 2 on"
    assert "diverged" not in found
    assert (facts(ENDED)["diverged"], facts(ENDED)["loss against BF16"]) == ("step 3, dgrad.g of w0", "none")


def test_worst_layers_and_operands_come_first():
    rows = layer_rows(DIAGNOSIS["moments"][0])
    assert [row["layer"] for row in rows] == ["(all)", "<w1>", "w0", "head"]
    assert rows[1]["flat from n"] == 2.5
    assert (rows[3]["bias²"], rows[3]["variance"], rows[3]["flat from n"]) == (0, 0, None)
    operands = operand_rows(DIAGNOSIS["moments"][0])
    assert [(row["layer"], row["MSE"]) for row in operands] == [("<w1>", 0.03), ("w0", 0.01), ("w0", None)]
    assert (operands[0]["clip%"], operands[0]["flush%"]) == (3.41, 10)
    assert [row["cause"] for row in cause_rows(DIAGNOSIS)][:2] == [
        "bias of the forward pass",
        "bias of the backward pass",
    ]


def test_the_curve_has_a_line_a_number_of_passes_and_a_column_a_step():
    assert curve_rows(DIAGNOSIS)[0] == {"passes": 1, "step 4": "0.05 ± 0.001", "step 40": "0.05 ± 0.001"}
    assert curve_rows(DIAGNOSIS)[2] == {"passes": 4, "step 4": "0.02", "step 40": "0.02"}
    assert curve_rows(ENDED) == []


def test_the_curve_s_line_is_the_fit():
    figure = curve_figure(DIAGNOSIS)
    Figure(figure)  # Plotly takes every property
    points, fit = figure["data"][:2]
    assert points["y"] == pytest.approx([0.05, 0.03, 0.02])
    assert fit["y"] == pytest.approx(points["y"])
    assert [trace["name"] for trace in figure["data"] if "name" in trace] == [
        f"{way}, step {step}" for step in (4, 40) for way in ("backward", "forward")
    ]
    Figure(loss_figure(DIAGNOSIS))


def test_the_page_holds_figures_tables_and_reasons_and_is_escaped(tmp_path):
    write_diagnosis_page(DIAGNOSIS, tmp_path / "of" / "why.html")
    page = (tmp_path / "of" / "why.html").read_text()
    figures = re.findall(r'<script type="application/json">(.*?)</script>', page, re.DOTALL)
    assert [json.loads(figure)["data"] for figure in figures] == [
        curve_figure(DIAGNOSIS)["data"],
        loss_figure(DIAGNOSIS)["data"],
    ]
    body = page[page.index("<body>") : page.index("<script>")]
    for text in ("nvfp4 &amp; &lt;more&gt;", "Main cause: bias of the forward pass", "&lt;w1&gt;", "2505.19115"):
        assert text in body
    assert "<w1>" not in body
    assert body.index("Layers at step 40") < body.index("Layers at step 4<")


def test_a_page_of_a_lane_that_diverged_before_it_was_looked_at_says_so(tmp_path):
    write_diagnosis_page(ENDED, tmp_path / "why.html")
    assert "dgrad.g of w0 is the first that made numbers" in (tmp_path / "why.html").read_text()


def test_a_page_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "why.html").mkdir()
    with pytest.raises(StoreError, match=re.escape("why.html")):
        write_diagnosis_page(DIAGNOSIS, tmp_path / "why.html")
