"""What operands lost in training is in the report where it was recorded, and nothing is where it was not."""

import html
import re

import pytest

from fp4dse.dse import Recipe
from fp4dse.dse.stages import SLOTS
from fp4dse.results import open_store
from fp4dse.results.report import PANELS, read_findings
from fp4dse.results.report.recorded_losses import PANEL

STEPS = [1.0, 2.0, 4.0]
HALF = Recipe(fprop=Recipe.named("nvfp4").fprop, dgrad=Recipe.named("bf16").dgrad, wgrad=Recipe.named("bf16").wgrad)


def recorded(level: float, slots=SLOTS) -> list[tuple[str, list[float | None]]]:
    """Shares that grow with the steps."""
    shares = {
        f"{word}/{slot}": [level * part * (i + 1) for part in (0.5, 0.75, 1.0)]
        for word, level in (("flushed", level), ("clipped", level / 8))
        for i, slot in enumerate(slots)
    }
    return list({"step": STEPS, "gnr": [9.0, None, 60 * level], "gradient_norm": [1.0] * 3, **shares}.items())


@pytest.fixture
def trained(store, row):
    return filled(store, row)


def filled(store, row):
    """Two recipes and one with a plain backward pass, all on a front; two seeds each."""
    for seed in (0, 1):
        rows = [row("bf16", seed, 0.5), row("mxfp4", seed, 0.9, recorded=recorded(0.1))]
        rows += [row("nvfp4", seed, 0.55 + 0.01 * seed, recorded=recorded(0.04 + 0.02 * seed))]
        rows += [row(HALF, seed, 0.52, recorded=recorded(0.03, SLOTS[:2]))]
        store.add(rows, f"seed {seed}")
    return store


@pytest.fixture(scope="module")
def shown(tmp_path_factory, row):
    """The section of such a store."""
    return section(filled(open_store(tmp_path_factory.mktemp("trained") / "store", create=True), row))


def section(store) -> str:
    """HTML; empty if the report has none."""
    return PANEL.html(read_findings(store))


def cells(text: str) -> dict[str, list[str]]:
    """Recipe -> what its other cells say."""
    rows = re.findall(r"(?s)<tr class=\"\">(.*?)</tr>", text)
    said = [
        [html.unescape(re.sub("<br>", " | ", c)) for c in re.findall(r"(?s)<td[^>]*>(.*?)</td>", row)] for row in rows
    ]
    plain = [[" ".join(re.sub("<[^>]+>", "", cell).split()) for cell in row] for row in said]
    return {row[0]: row[1:] for row in plain}


def test_a_slot_has_the_shares_of_the_last_step_mean_over_seeds(shown):
    found = cells(shown)
    assert found["nvfp4"][:4] == ["flushed | clipped", "5.0 % | 0.6 %", "10.0 % | 1.2 %", "15.0 % | 1.9 %"]
    assert found["nvfp4"][-1] == "3 (0 of 2 steps below √3)"
    assert found[HALF.label()][-1] == "1.8 (0 of 2 steps below √3)"


def test_slots_without_a_block_scale_are_a_dash(shown):
    line = cells(shown)[HALF.label()]
    assert line[1] == "3.0 % | 0.4 %"
    assert line[3:7] == ["–"] * 4


def test_bars_are_the_steps_on_one_scale(shown):
    bars = re.findall(r'<span class="strip" title="([^"]*)">((?:<i[^>]*></i>)*)</span>', shown)
    assert len(bars) == 2 * (6 + 6 + 2)  # the plain slots have none
    assert {len(re.findall("<i", drawn)) for _, drawn in bars} == {len(STEPS)}
    heights = [float(h) for _, drawn in bars for h in re.findall(r"height:(\d+)%", drawn)]
    assert max(heights) == 100
    [top] = [says for says, drawn in bars if "height:100%" in drawn]
    assert top == "step 1: 30.0 %, step 2: 45.0 %, step 4: 60.0 %"


def test_its_numbers_are_the_answer_of_the_query_beside_it(trained):
    assert PANEL in PANELS
    text = section(trained)
    assert html.escape(PANEL.queries[0]) in text or PANEL.queries[0].replace("'", "'\"'\"'") in html.unescape(text)
    answer = trained.sql(PANEL.queries[0])
    counts = trained.sql(PANEL.queries[1])
    known = {*answer["mean"].dropna(), *answer["step"], *counts["below"], *counts["steps"]}
    values = [float(value) for value in re.findall(r'<data value="([^"]+)"', text)]
    assert values
    for value in values:
        assert any(value == pytest.approx(other, rel=1e-9) for other in known), value


def test_a_recipe_that_recorded_nothing_is_left_out(trained, row):
    trained.add([row("nvfp4-sr", seed, 0.51) for seed in (0, 1)], "unrecorded")
    assert Recipe.named("nvfp4-sr").config_id in set(trained.pareto()["config_id"])
    assert set(cells(section(trained))) == {"mxfp4", "nvfp4"}


def test_without_recordings_there_is_no_section(store, row):
    store.add([row("bf16", 0, 0.5), row("nvfp4", 0, 0.55)], "job")
    assert section(store) == ""


def test_a_task_without_recordings_says_so_beside_one_with(trained, row):
    trained.add([row(name, seed, 0.5, task="regression") for name in ("bf16", "nvfp4") for seed in (0, 1)], "plain")
    assert "No recipe of this front was trained with <code>--record</code>" in section(trained)
