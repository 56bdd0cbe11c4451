"""Curves of reinforcement learning: those that were recorded, mean over seeds, and nothing where there are none."""

import pytest

from fp4dse.results import open_store
from fp4dse.results.report.findings import COLUMNS, findings
from fp4dse.results.report.rollout_curves import PANEL, figure, recorded

STEPS = [1.0, 2.0, 4.0]


def lane(row, name, seed, loss, **series):
    of_rl = {"task": "rl", "preset": "small", "gap_unit": "points"}
    return row(name, seed, loss, recorded={"step": STEPS, **series} if series else None, **of_rl)


@pytest.fixture
def rl(store, row):
    rewards = {0: [0.4, 0.5, 0.6], 1: [0.5, 0.6, 0.8]}
    lanes = [
        lane(row, name, seed, loss, reward=rewards[seed], mismatch_kl=[0.1, 0.2, None], **{"flushed/fprop.w": STEPS})
        for name, loss in (("bf16", 0.2), ("nvfp4", 0.3))
        for seed in rewards
    ]
    store.add(lanes, "job")
    return store


def found(store):
    return findings(store.runs(COLUMNS), store)


def test_lines_are_means_over_seeds(rl):
    lines = recorded(found(rl).settings[0])
    assert list(lines["recipe"].unique()) == ["BF16", "nvfp4"]
    of = lines[lines["recipe"].eq("nvfp4") & lines["name"].eq("reward")]
    assert of["step"].tolist() == STEPS
    assert of["mean"].tolist() == pytest.approx([0.45, 0.55, 0.7])
    assert lines["name"].eq("mismatch_kl").sum() == 4, "what has no number has no point"
    drawn = figure(lines)
    assert len(drawn["data"]) == 4, "two recipes, two plots"
    assert {"xaxis", "xaxis2"} <= drawn["layout"].keys()
    assert "xaxis3" not in drawn["layout"]


def test_the_panel_is_there_only_where_rollouts_were_recorded(rl, row, tmp_path):
    assert "KL, rollout to trainer" in PANEL.html(found(rl))
    other = open_store(tmp_path / "other", create=True)
    other.add([row("bf16", 0, 0.5, recorded={"step": STEPS, "gnr": STEPS}), row("nvfp4", 0, 0.6)], "job")
    assert PANEL.html(found(other)) == ""
    rl.add([row("bf16", 0, 0.5), row("nvfp4", 0, 0.6)], "job-2")
    assert "Nothing was recorded of rollouts here" in PANEL.html(found(rl))
