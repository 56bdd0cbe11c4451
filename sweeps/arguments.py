"""What people type, as values: `regression:small`, `3` or `0,1,2` seeds, `1e-3,3e-3`, `1h30m`, the name of a space.

ConfigError says what would be accepted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fp4dse.dse import ConfigError, Recipe, Space, load_recipe, recipe_files, recipe_from_dict
from fp4dse.results.remote import Place, RemotePath, locate
from fp4dse.sweeps.places import RUNS, home
from fp4dse.sweeps.rungs import Halving

if TYPE_CHECKING:
    import pandas as pd

DEFAULT_PRESET = "small"
_SECONDS = {"s": 1, "m": 60, "h": 3600}


def shipped_spaces() -> dict[str, Path]:
    """Name -> file of the spaces that come with the package."""
    folder = Path(__file__).with_name("spaces")
    return {path.stem: path for path in sorted(folder.glob("*.toml"), key=lambda path: path.stem)}


def find_space(text: str) -> Space:
    """A space from a TOML file, or a shipped one by name."""
    if not text.endswith(".toml") and text not in shipped_spaces():
        raise ConfigError("space", text, f"a .toml file, or one of {', '.join(shipped_spaces())}")
    return Space.load(text if text.endswith(".toml") else shipped_spaces()[text], shipped_spaces().get)


def find_stored(text: str, runs: pd.DataFrame) -> str:
    """The config_id of a recipe that the runs hold, given as that, by name or `.toml` file, or by the label of tables.
    ConfigError names those of them that have a name."""
    ids = runs["config_id"]
    if text.endswith(".toml") or text in recipe_files():
        found = {load_recipe(text).config_id} & set(ids)
    else:
        from fp4dse.results.labels import short_labels  # pandas, which most arguments do without

        recipes = runs[~runs["is_baseline"].astype(bool)].drop_duplicates("recipe_label")
        called = short_labels(recipes["recipe_label"], recipes["recipe_name"])
        found = set(ids[ids.eq(text) | runs["recipe_label"].eq(text) | runs["recipe_label"].map(called.of).eq(text)])
    if len(found) != 1:
        names = ", ".join(sorted(set(runs["recipe_name"].dropna()))) or "none"
        others = "a label as tables have it, or a config_id (fp4dse query recipes)"
        raise ConfigError("recipe", text, f"one that was trained here: {names}, {others}")
    return found.pop()


def find_recipe(text: str, store: str | None) -> Recipe:
    """A recipe by name, from a `.toml` file, or of a store (default: the latest one, if there is any), by label or
    config_id. ConfigError if there is none."""
    if text.endswith(".toml") or text in recipe_files() or not (store or _stores()):
        return load_recipe(text)
    from fp4dse.results import open_store

    place = store or latest_store()
    runs = open_store(place).runs(["config_id", "recipe", "recipe_label", "recipe_name", "is_baseline"])
    try:
        config_id = find_stored(text, runs)
    except ConfigError:
        others = f"a .toml file, or a label or config_id that {place} holds"
        raise ConfigError("recipe", text, f"{', '.join(recipe_files())}, {others}") from None
    return recipe_from_dict(msgspec.json.decode(runs.loc[runs["config_id"].eq(config_id), "recipe"].iloc[0]))


def default_store(space: str) -> Path:
    """Where a sweep goes if nobody says."""
    return RUNS / space / "store"


def latest_store() -> Path:
    """The store that was swept into last, for commands that are given none. ConfigError if there is none."""
    states = _stores()
    if not states:
        raise ConfigError(
            "--store", None, f"the folder of a store (there is none under {RUNS}/; try `fp4dse quickstart`)"
        )
    return states[-1].parent


def _stores() -> list[Path]:
    """The state files of all stores that were swept into here, the latest last."""
    return sorted(RUNS.glob("*/store/state.json"), key=lambda path: path.stat().st_mtime)


def report_path(store: str | Place) -> Path:
    """Next to the store: `runs/NAME/report.html`; of a store behind a URL, in the folder that it has here."""
    store = locate(store)
    if isinstance(store, RemotePath):
        return home(store) / "report.html"
    return store.with_name("report.html" if store.name == "store" else f"{store.name}-report.html")


def parse_tasks(texts: Iterable[str], preset: str | None = None, data: str | None = None) -> list[tuple[str, ...]]:
    """`task`, `task:preset` or `FILE.py:NAME` each, as get_task is asked; whether they exist is asked elsewhere."""
    asked: list[tuple[str, ...]] = []
    texts = list(texts)
    for text in texts:
        task, colon, own = text.rpartition(":")
        pair = (task, own) if colon else (own, preset or DEFAULT_PRESET)
        asked.append(pair if data is None else (*pair, data))
    if preset is not None and all(":" in text for text in texts):
        raise ConfigError("--preset", preset, "nothing where every --task names its own")
    if data is not None and len({task for task, *_ in asked}) > 1:
        raise ConfigError("--data", data, "data for one task (several --task are given)")
    return asked


def parse_seeds(text: str) -> list[int]:
    """`3` is three seeds: 0, 1, 2. `4,7` is those two."""
    accepted = "a number of seeds (3), or a list of seeds (0,1,2)"
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"\d{1,9}", part) for part in parts):
        raise ConfigError("--seeds", text, accepted)
    numbers = [int(part) for part in parts]
    seeds = numbers if len(numbers) > 1 else list(range(numbers[0]))
    if not seeds:
        raise ConfigError("--seeds", text, accepted)
    return seeds


def parse_lrs(texts: Iterable[str]) -> list[float] | None:
    """Learning rates, each text one or a comma list; None (the task's own) where there is no text."""
    lrs = []
    for text in texts:
        for part in text.split(","):
            try:
                lr = float(part)
            except ValueError:
                lr = math.nan
            if not (0 < lr < math.inf):
                raise ConfigError("--lr", part, "a number above 0, or several with commas: 1e-3,3e-3")
            lrs.append(lr)
    return lrs or None


def parse_options(texts: Iterable[str]) -> dict[str, str]:
    """`KEY=VALUE` each."""
    options = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise ConfigError("--option", text, "KEY=VALUE")
        options[key] = value
    return options


def parse_halving(rungs: int, keep: float | None) -> Halving | None:
    """No rungs are no halving."""
    if rungs < 0:
        raise ConfigError("--rungs", rungs, "0 for none, or a whole number above 0")
    if rungs:
        return Halving(rungs) if keep is None else Halving(rungs, keep)
    if keep is not None:
        raise ConfigError("--keep", keep, "nothing without --rungs")
    return None


def parse_duration(text: str | None) -> float | None:
    """`90s`, `30m`, `1h30m` in seconds; None stays None."""
    if text is None:
        return None
    if not re.fullmatch(r"(\d+(\.\d+)?[hms])+", text):
        raise ConfigError("--budget", text, "a duration: 90s, 30m, 1h30m")
    return sum(float(number) * _SECONDS[unit] for number, _, unit in re.findall(r"(\d+(\.\d+)?)([hms])", text))
