"""A large store is read with its texts as categories, and its long texts as codes: the same rows in less memory."""

import pandas as pd

from fp4dse.dse import Recipe
from fp4dse.results import effects, front_chance, marginal, summarize
from fp4dse.results.report.findings import as_texts
from fp4dse.results.stats.paired import rows_at_best_lr


def test_texts_as_categories_are_the_same_texts(swept):
    plain, coded = swept.runs(), swept.runs(categories=True)
    assert isinstance(coded["config_id"].dtype, pd.CategoricalDtype)
    assert coded["recipe_label"].cat.categories.is_monotonic_increasing
    pd.testing.assert_frame_equal(as_texts(coded), plain)


def test_statistics_say_the_same_of_categories(swept):
    plain, coded = swept.runs(), rows_at_best_lr(swept.runs(categories=True))
    for view in (summarize, front_chance, effects, marginal):
        pd.testing.assert_frame_equal(as_texts(view(coded)), view(plain), check_dtype=False)


def test_recipes_are_found_in_the_inbox_and_in_parts(store, row):
    store.add([row("nvfp4", 0, 0.5)], "first")
    store.compact(1)
    store.add([row("mxfp4", 0, 0.5), row("bf16", 0, 0.4)], "second")
    ids = {name: Recipe.named(name).config_id for name in ("nvfp4", "mxfp4")}
    texts = store.runs().set_index("config_id")["recipe"]
    assert store.recipe_texts(list(ids.values())) == {config_id: texts[config_id] for config_id in ids.values()}
    assert store.recipe_texts([]) == {}
