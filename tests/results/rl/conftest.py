"""What the tests of the page of reinforcement learning share."""

import pytest

from fp4dse.results import Store, open_store
from tests.results.asked_once import asked_once, joined, views_made_once
from tests.results.rl.rl_page import DOCS, PAGE


@pytest.fixture(scope="session")
def store(tmp_path_factory) -> Store:
    """The rows that the page is of. Tests of several files ask its queries."""
    return asked_once(joined(DOCS / "study" / "rl-store", tmp_path_factory.mktemp("rl") / "store"))


@pytest.fixture(scope="session")
def space_store() -> Store:
    """The rows of the space `rl`, of caches and of DAPO's preset: eight seeds."""
    return asked_once(open_store(DOCS / "study" / "rl-space-store"))


@pytest.fixture(scope="session")
def eight(space_store):
    """A function of a preset and a column of losses: 100 times their negative, by seed and recipe."""
    runs = space_store.runs()

    def of(preset, column="val_loss"):
        found = -100 * runs[runs["preset"].eq(preset)].pivot(index="seed", columns="recipe_label", values=column)
        assert list(found.index) == list(range(8))
        assert found.notna().all(axis=None)
        return found

    return of


@pytest.fixture(scope="session")
def divergence(space_store):
    """The logarithm of a lane's mean KL from rollout to trainer, by preset and seed, and by recipe; NaN where there is
    none but for rounding."""
    rows = space_store.sql(
        "SELECT preset, seed, recipe_label, ln(avg(value)) AS kl FROM recorded JOIN runs USING (run_id) "
        "WHERE name = 'mismatch_kl' GROUP BY ALL HAVING 1e-7 < avg(value)"
    )
    found = rows.pivot(index=["preset", "seed"], columns="recipe_label", values="kl")
    return found.reindex(columns=space_store.runs(["recipe_label"])["recipe_label"].unique())


@pytest.fixture(scope="session")
def page() -> str:
    return PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def few_views():
    with views_made_once():
        yield


@pytest.fixture(scope="module")
def every_effect(store, few_views):
    return store.sql("FROM rollout_effects")


@pytest.fixture(scope="module")
def effects(every_effect):
    """The effects of fixes on `rl:small`."""
    return every_effect[every_effect["preset"].eq("small")]
