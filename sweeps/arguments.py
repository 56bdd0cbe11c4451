"""Reads what people type into values: `regression:small`, `3`, `0,1,2` or `40-71` seeds, `1e-3,3e-3`, `1h30m`, the name
of a space.

ConfigError says what would be accepted.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fp4dse.dse import ConfigError, Recipe, Space, load_recipe, recipe_files, recipe_from_dict
from fp4dse.dse.cost import DEFAULT_COST, CostTarget
from fp4dse.dse.reading.files import read_toml
from fp4dse.dse.space.space_file import EXAMPLE, MOST_SEEDS, is_seeds
from fp4dse.results import open_store
from fp4dse.results.text.labels import short_labels
from fp4dse.sweeps.planning.halving import Halving
from fp4dse.sweeps.stores import latest_store, swept_stores

if TYPE_CHECKING:
    import pandas as pd

DEFAULT_PRESET = "small"
_SECONDS = {"s": 1, "m": 60, "h": 3600}


def shipped_spaces() -> dict[str, Path]:
    """Name -> file of the spaces that come with the package."""
    folder = Path(__file__).with_name("spaces")
    return {path.stem: path for path in sorted(folder.glob("*.toml"), key=lambda path: path.stem)}


def find_space(text: str, axes: Sequence[str] = (), model: str | None = None, chip: str | None = None) -> Space:
    """A space from a TOML file, or a shipped one by name, with further axes, and overheads of a model and a chip; where
    there are axes, a recipe, by name or file, is a space, too."""
    space = _recipe_alone(text)
    if space is not None and not axes:
        one = "a recipe is one with an axis: -a PATH=VALUE,VALUE"
        raise ConfigError("space", text, f"a .toml file, or one of {', '.join(shipped_spaces())}; {one}")
    if space is None:
        if not text.endswith(".toml") and text not in shipped_spaces():
            raise ConfigError("space", text, f"a .toml file, or one of {', '.join(shipped_spaces())}")
        space = Space.load(text if text.endswith(".toml") else shipped_spaces()[text], shipped_spaces().get)
    if axes:
        around = {name: getattr(space, name) for name in ("base", "fixed", "design")}
        read = Space.from_dict({**around, "axes": {**space.axes, **parse_axes(axes)}}, "--axis").axes
        space = msgspec.structs.replace(space, axes=read)
    return msgspec.structs.replace(space, cost=find_cost(model, chip, space.cost))


def _recipe_alone(text: str) -> Space | None:
    """The recipe as a space without axes; None if it is none."""
    if text.endswith(".toml"):
        is_recipe = not set(read_toml(Path(text), EXAMPLE)).isdisjoint(Recipe.__struct_fields__)
    else:
        is_recipe = text in recipe_files() and text not in shipped_spaces()
    return Space(Path(text).stem if text.endswith(".toml") else text, base=load_recipe(text)) if is_recipe else None


def parse_axes(texts: Iterable[str]) -> dict[str, list[Any]]:
    """`PATH=VALUE,VALUE` each: path -> values. A value is what TOML takes it for (16, true, { like = "nvfp4", … }), and
    what TOML does not know is a text."""
    axes: dict[str, list[Any]] = {}
    for text in texts:
        path, equals, values = (part.strip() for part in text.partition("="))
        if not (path and equals and values):
            raise ConfigError("--axis", text, "PATH=VALUE,VALUE, as *.g.rounding=nearest,stochastic")
        if path in axes:
            raise ConfigError("--axis", text, f"each path once ({path} has values already)")
        axes[path] = _parse_values(text, values)
    return axes


def _parse_values(axis: str, text: str) -> list[Any]:
    """The values between the commas that stand in no bracket."""
    depth, parts = 0, [""]
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    if not all(part.strip() for part in parts):
        raise ConfigError("--axis", axis, "a value before and after every comma")
    return [_toml_or_text(part.strip()) for part in parts]


def _toml_or_text(text: str) -> object:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def find_stored(text: str, runs: pd.DataFrame) -> str:
    """The config_id of a recipe that the runs hold, given as that, by name or `.toml` file, or by the label of tables.
    ConfigError names those of them that have a name."""
    ids, labels = runs["config_id"], []
    if text.endswith(".toml") or text in recipe_files():
        found = {load_recipe(text).config_id} & set(ids)
    else:
        recipes = runs[~runs["is_baseline"].astype(bool)].drop_duplicates("recipe_label")
        called = short_labels(recipes["recipe_label"], recipes["recipe_name"])
        found = set(ids[ids.eq(text) | runs["recipe_label"].eq(text) | runs["recipe_label"].map(called.of).eq(text)])
        labels = [*recipes["recipe_label"], *called.short.values()]
    if len(found) != 1:
        names = ", ".join(sorted(set(runs["recipe_name"].dropna()))) or "none"
        others = "a label as tables have it, or a config_id (fp4dse query recipes)"
        raise ConfigError("recipe", text, f"one that was trained here: {names}, {others}", labels)
    return found.pop()


def find_recipe(text: str, store: str | None) -> Recipe:
    """A recipe by name, from a `.toml` file, or of a store (default: the latest one, if there is any), by label or
    config_id. ConfigError if there is none."""
    if text.endswith(".toml") or text in recipe_files():
        return load_recipe(text)
    if not (store or swept_stores()):
        others = "a .toml file, or with --store FOLDER a label or config_id that the store holds"
        raise ConfigError("recipe", text, f"{', '.join(recipe_files())}, {others}")
    target = store or latest_store()
    runs = open_store(target).runs(["config_id", "recipe", "recipe_label", "recipe_name", "is_baseline"])
    try:
        config_id = find_stored(text, runs)
    except ConfigError as error:
        others = f"a .toml file, or a label or config_id that {target} holds"
        raise ConfigError("recipe", text, f"{', '.join(recipe_files())}, {others}", error.also) from None
    return recipe_from_dict(msgspec.json.decode(runs.loc[runs["config_id"].eq(config_id), "recipe"].iloc[0]))


def parse_tasks(
    texts: Iterable[str], preset: str | None = None, data: str | None = None, start: str | None = None
) -> list[tuple[str, ...]]:
    """`task`, `task:preset` or `FILE.py:NAME` each, as get_task is asked; whether they exist is asked elsewhere."""
    asked: list[tuple[str, ...]] = []
    texts = list(texts)
    for text in texts:
        task, colon, own = text.rpartition(":")
        pair = (task, own) if colon else (own, DEFAULT_PRESET if preset is None else preset)
        more = (data or "", start) if start else (data,) if data else ()
        asked.append((*pair, *more))
        if asked.count(asked[-1]) > 1:
            raise ConfigError("--task", text, f"each task and preset once ({':'.join(pair)} is there twice)")
    if preset is not None and all(":" in text for text in texts):
        raise ConfigError("--preset", preset, "nothing where every --task names its own")
    several = len({task for task, *_ in asked}) > 1
    if data is not None and several:
        raise ConfigError("--data", data, "data for one task (several --task are given)")
    if start is not None and several:
        raise ConfigError("--from", start, "weights for one task (several --task are given)")
    return asked


def parse_seeds(text: str) -> list[int]:
    """`3` is three seeds: 0, 1, 2. `4,7` is those two, `40-71` all from 40 to 71, `7-7` seed 7 alone."""
    accepted = f"a number of seeds (3), or seeds (0,1,2 or 40-71), {MOST_SEEDS:,} at most"
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"\d{1,9}(-\d{1,9})?", part) for part in parts):
        raise ConfigError("--seeds", text, accepted)
    if len(parts) == 1 and "-" not in text:
        ranges = [range(int(text))]
    else:
        ends = (part.partition("-") for part in parts)
        ranges = [range(int(first), int(last or first) + 1) for first, _, last in ends]
    seeds = [seed for one in ranges for seed in one[: MOST_SEEDS + 1]]  # no longer than what is refused
    if not all(ranges) or not is_seeds(seeds):
        raise ConfigError("--seeds", text, accepted)
    _check_once("--seeds", seeds)
    return seeds


def _check_once(where: str, values: Sequence[object]) -> None:
    """ConfigError for a list that has a value twice."""
    for value in values:
        if values.count(value) > 1:
            raise ConfigError(where, ", ".join(map(str, values)), f"each value once ({value} is there twice)")


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
    _check_once("--lr", lrs)
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


def find_cost(model: str | None, chip: str | None, default: CostTarget = DEFAULT_COST) -> CostTarget:
    """The model and the chip that overheads are of; None stays the default's. ConfigError if there is no such model or
    chip."""
    cost = CostTarget(default.model if model is None else model, default.chip if chip is None else chip)
    cost.check("--")
    return cost


def parse_duration(text: str | None, option: str = "--budget") -> float | None:
    """`90s`, `30m`, `1h30m` in seconds; None stays None."""
    if text is None:
        return None
    if not re.fullmatch(r"(\d+(\.\d+)?[hms])+", text):
        raise ConfigError(option, text, "a duration: 90s, 30m, 1h30m")
    seconds = sum(float(number) * _SECONDS[unit] for number, _, unit in re.findall(r"(\d+(\.\d+)?)([hms])", text))
    if not seconds:
        raise ConfigError(option, text, "a duration above 0: 90s, 30m, 1h30m")
    return seconds
