"""Every number in the report is in the answer of a command that is printed in the same section."""

import base64
import contextlib
import html
import io
import json
import math
import re
import shlex
import subprocess
import sys

import msgspec
import numpy as np
import pytest

from fp4dse import cli
from fp4dse.dse import QUANTIZERS, Recipe
from fp4dse.dse.training import Training
from fp4dse.results import write_report
from tests.results.asked_once import views_made_once


@pytest.fixture(scope="module")
def sections(swept_page) -> dict[str, str]:
    """Section -> its HTML."""
    found = re.findall(r'(?s)<section id="([^"]+)">(.*?)</section>', swept_page.read_text())
    assert len(found) == 11
    return dict(found)


@pytest.fixture(scope="module")
def answers(sections) -> dict[str, list[list[dict]]]:
    """Section -> what each of its queries answers, as rows."""
    known: dict[str, list[dict]] = {}
    out = {}
    with views_made_once():
        for name, text in sections.items():
            commands = [shlex.split(command) for command in commands_of(text)]
            assert commands, name
            for command in commands:
                if command[:2] == ["fp4dse", "query"] and (key := " ".join(command)) not in known:
                    known[key] = answer(command[1:])
            out[name] = [known[key] for command in commands if (key := " ".join(command)) in known]
    return out


def commands_of(text: str) -> list[str]:
    asked = re.search(r'(?s)<details class="asked">(.*?)</details>', text)
    return [html.unescape(code) for code in re.findall(r"(?s)<code>(.*?)</code>", asked[1])] if asked else []


def answer(arguments: list[str]) -> list[dict]:
    printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        cli.main([*arguments, "--format", "json"])
    printed.flush()
    return json.loads(printed.buffer.getvalue())


def numbers_in(rows: object) -> np.ndarray:
    found: list[float] = []

    def walk(value: object) -> None:
        if isinstance(value, dict):
            for item in value.values():
                walk(item)
        elif isinstance(value, list):
            for item in value:
                walk(item)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found.append(float(value))

    walk(rows)
    return np.array(sorted(found))


def assert_all_in(values: list[float], known: np.ndarray, where: str) -> None:
    for value in values:
        assert np.isclose(known, value, rtol=1e-9, atol=1e-15).any(), f"{where}: {value}"


@pytest.mark.parametrize("name", ["answer", "said", "storage", "divergence", "machines"])
def test_every_number_in_words_and_tables_is_in_an_answer(sections, answers, name):
    text = sections[name]
    cells = [html.unescape(cell) for cell in re.findall(r'<td class="n" data-v="([^"]+)"', text)]
    values = [float(value) for value in [*re.findall(r'<data value="([^"]+)"', text), *cells]]
    assert values
    assert_all_in(values, numbers_in(answers[name]), name)


@pytest.mark.heavy
def test_every_number_of_what_was_confirmed_is_in_an_answer(store, row):
    losses = {"bf16": 0.50, "nvfp4": 0.53, "nvfp4-sr": 0.535, "mxfp4": 0.54, "mxfp4-sr-rht": 0.53}
    rng = np.random.default_rng(0)
    lanes = [
        row(name, seed, loss * np.exp(0.01 * rng.normal()), **({"stage": "confirm"} if seed > 2 else {}))
        for name, loss in losses.items()
        for seed in (0, 1, 2, 1000, 1001, 1002, 1003)
    ]
    lanes[-1] = row("mxfp4-sr-rht", 1003, None, stage="confirm")
    store.add(lanes, "job")
    gaps = store.sql("SELECT run_id, gap FROM runs ORDER BY run_id")["gap"]
    assert gaps.tolist() == store.runs().sort_values("run_id")["gap"].tolist()
    path = store.path.parent / "confirmed.html"
    write_report(store, path)
    found = dict(re.findall(r'(?s)<section id="([^"]+)">(.*?)</section>', path.read_text()))
    for name in ("answer", "confirmed"):
        text = found[name]
        with views_made_once():
            asked = [answer(shlex.split(command)[1:]) for command in commands_of(text)]
        cells = [html.unescape(cell) for cell in re.findall(r'<td class="n" data-v="([^"]+)"', text)]
        values = [float(value) for value in [*re.findall(r'<data value="([^"]+)"', text), *cells]]
        assert values
        assert_all_in(values, numbers_in(asked), name)
    assert "1</data> candidate diverged on a fresh seed" in found["answer"].replace("1.0", "1")
    assert found["confirmed"].count("★") == 1


def test_every_share_that_fine_tuning_gives_back_is_in_an_answer(store, row):
    def recipe(trains):
        plain = Recipe.named("bf16")
        of = msgspec.structs.replace(plain.fprop, w=QUANTIZERS["nvfp4"])
        return msgspec.structs.replace(plain, fprop=of, training=Training(trains=trains))

    losses = {Recipe.named("bf16"): 2.0, recipe("none"): 2.1, recipe("all"): 2.06}
    lanes = [
        {**row(of, seed, loss + 0.01 * seed * (1 + i)), "val_loss_bf16": 2.0}
        for i, (of, loss) in enumerate(losses.items())
        for seed in (0, 1, 2)
    ]
    store.add(lanes, "job")
    path = store.path.parent / "tuned.html"
    write_report(store, path)
    text = dict(re.findall(r'(?s)<section id="([^"]+)">(.*?)</section>', path.read_text()))["recovered"]
    cells = [float(html.unescape(cell)) for cell in re.findall(r'<td class="n" data-v="([^"]+)"', text)]
    asked = [answer(shlex.split(command)[1:]) for command in commands_of(text)]
    assert len(cells) == 6
    assert_all_in(cells, numbers_in(asked), "recovered")


@pytest.mark.parametrize("name", ["answer", "said"])
def test_no_number_in_words_is_without_its_digits(sections, name):
    """Numbers outside of `<data>` are names of recipes, levels, or the margins that the page states."""
    text = re.sub(r"(?s)<details.*?</details>|<figcaption.*?</figcaption>", " ", sections[name])
    text = re.sub(r"(?s)<code>.*?</code>|<b (style|title).*?</b>|<h3>.*?</h3>|<data .*?</data>|<[^>]+>", " ", text)
    stated = r"95 % intervals|±0.5&nbsp;%"
    names = r"BF16|FP4|(nvfp4|ue5m3|mxfp4)\S*|rht16|llama\S+|b200|\S*16/17|instead of \S+|language:0\.4M"
    assert re.findall(r"\S*\d\S*", re.sub(f"{stated}|{names}", " ", text)) == []


@pytest.mark.parametrize("name", ["techniques", "interactions", "divergence"])
def test_every_number_in_a_figure_is_in_an_answer(sections, answers, name):
    known = numbers_in(answers[name]) * (100 if name == "divergence" else 1)  # the others are log ratios
    found = [
        json.loads(text) for text in re.findall(r'(?s)<script type="application/json">(.*?)</script>', sections[name])
    ]
    assert found
    for figure in found:
        for trace in figure["data"]:
            values = trace["z"] if "z" in trace else [trace["x"]]
            points = [v for row in values for v in row if v is not None]
            assert points
            assert_all_in(points, known, name)
            for side, sign in (("array", 1), ("arrayminus", -1)):
                bars = trace.get("error_x", {}).get(side, [])
                ends = [x + sign * bar for x, bar in zip(trace["x"], bars, strict=False) if bar is not None]
                assert_all_in(ends, known, name)


def test_every_column_of_the_front_is_in_an_answer(sections, answers):
    data = json.loads(
        re.search(r'(?s)<script type="application/json" id="recipes">(.*?)</script>', sections["trade-off"])[1]
    )
    columns = {k: np.frombuffer(base64.b64decode(text), kind) for k, (kind, text) in data["columns"].items()}
    recipes, front, _, *costs = answers["trade-off"]
    lines = {(f"{line['task']} ({line['preset']})", line["config_id"]): line for line in recipes}
    chances = {(line["task"], line["config_id"]): line["p_front"] for line in front}
    prices = {name: {} for name in [axis["name"] for axis in data["axes"]]}
    for rows in costs:
        for line in rows:
            for name in prices:
                if name in line and "config_id" in line:
                    prices[name][line["config_id"]] = line[name]
    assert data["count"] == len(recipes) - 2
    for i in range(data["count"]):
        config_id = data["ids"][columns["recipe"][i]]
        line = lines[data["settings"][columns["setting"][i]]["title"], config_id]
        for name in (
            "gap",
            "gap_low",
            "gap_high",
            "gap_bf16",
            "val_loss",
            "val_metric",
            "lr",
            "seeds",
            "pairs",
            "diverged",
            "failed",
        ):
            expected = math.nan if line[name] is None else line[name]
            if name in ("gap", "gap_bf16") and line["note"] == "diverged":
                expected = math.inf
            np.testing.assert_allclose(columns[name][i], expected, rtol=1e-6)
        chance = chances.get((line["task"], config_id), 0.0)
        if line["gap"] is not None and line["note"] == "":
            np.testing.assert_allclose(columns["p_front"][i], chance, rtol=1e-6)
        for name, price in prices.items():
            np.testing.assert_allclose(columns[name][i], price[config_id], rtol=1e-12)


def test_every_curve_is_in_an_answer(sections, answers):
    known = numbers_in(answers["curves"])
    for text in re.findall(r'(?s)<script type="application/json">(.*?)</script>', sections["curves"]):
        for trace in json.loads(text)["data"]:
            if trace.get("fill"):  # the band is made of single seeds
                assert_all_in(trace["y"], known, "curves")


def test_the_statistics_of_operands_are_what_the_printed_python_prints(sections):
    [command] = [shlex.split(command) for command in commands_of(sections["slots"])]
    printed = subprocess.run([sys.executable, *command[1:]], capture_output=True, text=True, check=True).stdout
    known = np.array([float(v) for v in re.findall(r"(?<![\w-])\d+\.\d+(?:e-\d+)?(?!\w)", printed)])
    values = [float(value) for value in re.findall(r'<data value="([^"]+)"', sections["slots"])]
    assert values
    for value in values:
        assert np.isclose(known, value, rtol=1e-3, atol=1e-6).any(), value
