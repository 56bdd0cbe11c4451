"""What the page of reinforcement learning says of a cache in few bits, and of DAPO's preset, is what the store has."""

import numpy as np
import pytest
from scipy.special import stdtrit

from fp4dse.results.stats.estimates.intervals import holm
from fp4dse.results.stats.recipes.equivalence import compare
from fp4dse.tasks.rl.walks import Walks
from tests.results.rl.rl_page import IN_ROLLOUTS, section, short, signed, table, told
from tests.results.rl.rl_space import effect

CACHE = "May the cache be in FP8 or FP4?"
DAPO = "Does DAPO's preset leave room?"
PLAIN = {"BF16": ("bf16, rollout bf16", "bf16"), "MXFP4": (IN_ROLLOUTS, IN_ROLLOUTS)}
"""Rollouts -> the label of theirs that a cache is written behind, and that of the recipe with a cache in BF16."""
KEPT = {"FP8, a scale a row": "fp8-row", "MXFP4": "mxfp4-rceil"}
CACHES = [(f"{own}, KV {name}", plain) for own, plain in PLAIN.values() for name in KEPT.values()]
"""The lines of the table: a recipe, and the one that it is compared with."""
BEHIND = {("BF16", "MXFP4"): IN_ROLLOUTS, ("MXFP4", "BF16"): "mxfp4-rceil, rollout bf16"}
BEHIND |= {("MXFP4", "MXFP4"): "mxfp4-rceil"}
"""Trainer, rollouts -> the recipe, of DAPO's preset."""


@pytest.fixture(scope="module")
def lines(space_store):
    """The lines of `compare` of CACHES."""
    runs = space_store.runs()
    ids = runs.drop_duplicates("recipe_label").set_index("recipe_label")["config_id"]
    found = [compare(runs, ids[a], ids[b], 0.007).set_index("preset").loc["walks-small"] for a, b in CACHES]
    assert {line["pairs"] for line in found} == {8}
    return found


def test_what_a_cache_costs_is_what_the_store_has(page, eight, divergence, lines):
    solved, in_bf16, kl = eight("walks-small"), eight("walks-small", "val_loss_bf16"), divergence.loc["walks-small"]
    found = [told(solved[a] - solved[b]) for a, b in CACHES]
    adjusted, same = holm([of[3] for of in found]), holm([line["p_same"] for line in lines])
    rows = table(page, "| rollouts | cache | points")
    assert [(row[0], row[1]) for row in rows] == [(rollouts, kept) for rollouts in PLAIN for kept in KEPT]
    for row, (a, b), of, p, line, p_same in zip(rows, CACHES, found, adjusted, lines, same, strict=True):
        apart = solved[a] - solved[b]
        half = stdtrit(7, 0.95) * apart.std() / 8**0.5
        assert of[:3] == pytest.approx([-100 * line[name] for name in ("difference", "high", "low")])
        assert row[2:4] == [signed(*of), f"{short(of[3])}, {short(p)}"]
        assert row[4] == f"{apart.mean() - half:+.2f} to {apart.mean() + half:+.2f}".replace("-", "−")
        assert row[5] == ("open" if "are not told apart" in line["verdict"] else "as good")
        assert (row[5] == "as good") == (line["p_same"] < 0.05)
        assert row[6] == f"{short(line['p_same'])}, {short(p_same)}"
        assert row[7] == signed(*told(in_bf16[a] - in_bf16[b]))
        value = 1e4 * np.exp(kl[a].mean())
        assert row[8] == (f"{value:.1f}" if value > 1 else f"{value:.2g}")
    assert [row[5] for row in rows] == ["as good", "open"] * 2
    text = section(page, CACHE)
    assert "p of equivalence {} and {}.".format(*sorted(map(short, same))[:2]) in text
    assert min(same) > 0.05
    problems = Walks(8, 16, 18)
    assert f"has {problems.answer_length} tokens at most here, and a prompt {problems.prompt_length}" in text
    seeds = [line["more_seeds"] for line in lines if np.isfinite(line["more_seeds"])]
    assert "asks for {:.0f} and {:.0f} more seeds".format(*seeds) in text


def test_what_a_cache_does_to_kl_is_what_the_store_has(page, divergence):
    text, kl = section(page, CACHE), divergence.loc["walks-small"]

    def ratio(first, second):
        return np.exp(effect(kl, [(first, second)])[:3])

    (fp8, _), (mxfp4, _), *under = CACHES
    assert "makes {:.0f} times that of one in FP8 ({:.1f} to {:.0f})".format(*ratio(mxfp4, fp8)) in text
    assert "and {:.2f} ({:.2f} to {:.2f}) of that of MXFP4 rollouts".format(*ratio(mxfp4, IN_ROLLOUTS)) in text
    both = [x for first, second in under for x in ratio(first, second)]
    assert "×{:.2f} ({:.2f} to {:.2f}) and ×{:.2f} ({:.2f} to {:.2f})".format(*both) in text


def test_the_arms_of_dapos_preset_are_what_the_store_has(page, eight, divergence):
    solved, in_bf16 = eight("dapo-small"), eight("dapo-small", "val_loss_bf16")
    apart = {arm: solved[name] - solved["bf16"] for arm, name in BEHIND.items()}
    adjusted = holm([told(of)[3] for of in apart.values()])
    assert adjusted.min() > 0.05
    rows = table(page, "| trainer | rollouts | points against BF16 in both, 95 % | p, of three |")
    for row, (arm, of), all_three in zip(rows, apart.items(), adjusted, strict=True):
        name, found = BEHIND[arm], told(of)
        assert tuple(row[:2]) == arm
        assert row[2:4] == [signed(*found), f"{short(found[3])}, {short(all_three)}"]
        assert row[4] == signed(*told(in_bf16[name] - in_bf16["bf16"]))
        assert row[5] == f"{(of < 0).sum()}, {(of > 0).sum()}"
        kl = divergence.loc["dapo-small", name]
        assert row[6] == ("0" if kl.isna().all() else f"{1e4 * np.exp(kl.mean()):.1f}")
    text, ends = section(page, DAPO), 100 + solved["bf16"]
    assert (ends > 99).sum() == 6
    assert f"BF16 ends at {ends.mean():.1f} %, six of eight seeds above 99" in text
    loses = apart["MXFP4", "BF16"]
    assert loses.nsmallest(2).index.tolist() == [0, 4]
    assert f"lose {-loses.mean():.1f} points, which hangs on two seeds" in text
    assert f"0 loses {-loses[0]:.1f} and 4 loses {-loses[4]:.1f}." in text
    without = [of for seeds in ([0], [0, 4]) for of in told(loses.drop(seeds))[:3]]
    assert "it is {:.2f} ({:.2f} to {:+.2f}), without both {:.2f} ({:.2f} to {:+.2f})".format(*without) in text


def test_what_happens_on_dapos_preset_while_it_trains(page, space_store, store, eight):
    text = section(page, DAPO)
    rewards = space_store.sql("FROM rollout_numbers WHERE preset = 'dapo-small' AND number = 'reward'")
    rewards = rewards.set_index("label").loc[list(BEHIND.values())]
    below = -100 * rewards[["difference", "difference_high", "difference_low"]].to_numpy()
    said = "by {:.1f} points ({:.1f} to {:.1f}) with MXFP4 rollouts, {:.1f} ({:.1f} to {:.1f}) with an MXFP4 trainer, "
    assert (said + "{:.1f} ({:.1f} to {:.1f}) with both").format(*below.ravel()) in text
    assert f"(Holm's p {short(holm(rewards['p']).max())} for the three)" in text
    fell = space_store.sql(
        "SELECT step, value FROM recorded JOIN runs USING (run_id) WHERE preset = 'dapo-small' AND name = 'reward' "
        "AND recipe_label = 'mxfp4-rceil, rollout bf16' AND seed = 0"
    ).set_index("step")["value"]
    fell = f"from a reward of {fell[97]:.2f} at update 97 to {fell[193]:.2f} at 193"
    assert fell.replace("0.", ".") in text
    plain = store.sql(
        "SELECT seed, 100 * val_metric AS solved FROM runs WHERE preset = 'small' AND lr = 2.4e-4 AND seed < 8 "
        "AND recipe_label = 'bf16' ORDER BY seed"
    ).set_index("seed")["solved"]
    mean, low, high, _ = told(100 + eight("dapo-small")["bf16"] - plain)
    assert f"ends {mean:.1f} points above it ({low:.1f} to {high:+.1f})" in text
