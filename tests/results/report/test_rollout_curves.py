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


def test_lanes_of_every_step_are_drawn_beside_others_at_the_steps_that_both_have(rl, row):
    """A mean over seeds is of the same seeds at each step; the parts of the error have steps of their own."""
    every = {"step/reward": [1.0, 2.0, 3.0, 4.0], "reward": [0.5, 0.7, 9.0, 1.0], "weight_error/grid": STEPS}
    rl.add([lane(row, "nvfp4", 2, 0.3, **every)], "job-2")
    lines = recorded(found(rl).settings[0])
    of = lines[lines["recipe"].eq("nvfp4")].set_index(["name", "step"])["mean"]
    assert of["reward"].index.tolist() == STEPS
    assert of["reward"].tolist() == pytest.approx([1.4 / 3, 1.8 / 3, 2.4 / 3])
    assert of["weight_error/grid"].tolist() == STEPS


def test_lanes_of_every_step_alone_are_drawn_at_each(store, row):
    every = {"step/reward": [1.0, 2.0, 3.0, 4.0], "reward": [0.5, 0.7, 0.9, 1.0]}
    store.add([lane(row, name, 0, 0.2, **every) for name in ("bf16", "nvfp4")], "job")
    lines = recorded(found(store).settings[0])
    assert lines[lines["recipe"].eq("BF16")]["step"].tolist() == [1.0, 2.0, 3.0, 4.0]


def test_the_panel_is_there_only_where_rollouts_were_recorded(rl, row, tmp_path):
    assert "KL, rollout to trainer" in PANEL.html(found(rl))
    other = open_store(tmp_path / "other", create=True)
    other.add([row("bf16", 0, 0.5, recorded={"step": STEPS, "gnr": STEPS}), row("nvfp4", 0, 0.6)], "job")
    assert PANEL.html(found(other)) == ""
    rl.add([row("bf16", 0, 0.5), row("nvfp4", 0, 0.6)], "job-2")
    assert "Nothing was recorded of rollouts here" in PANEL.html(found(rl))
