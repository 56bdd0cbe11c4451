"""What README and docs show works as it stands there: examples, commands, tables, links."""

import re
import runpy
import shlex
import sys
import tomllib
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import typer

from fp4dse import cli
from fp4dse.dse import ConfigError, Quantizer, Space, recipe_from_dict
from fp4dse.dse.agreement import agreements, warning
from fp4dse.dse.record import field_types
from fp4dse.dse.space.space import Count
from fp4dse.results import open_store
from fp4dse.results.text.verdict_text import wrapped
from fp4dse.sweeps import run_sweep
from tests.each import each

ROOT = Path(__file__).parent.parent
PAGES = {file.name: file.read_text(encoding="utf-8") for file in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]}
README = PAGES["README.md"]
COMMAND = re.compile(r"^ {4}(?:\$ )?(fp4dse \w.*)$", re.MULTILINE)
COMMANDS = [(page, line) for page, text in PAGES.items() for line in COMMAND.findall(text)]


def every_command(group, path: str = "") -> dict:
    """`store merge` -> the command."""
    found = {}
    for name, command in group.commands.items():
        inner = every_command(command, f"{path}{name} ") if hasattr(command, "commands") else {path + name: command}
        found.update(inner)
    return found


EVERY = every_command(typer.main.get_command(cli.app))
ON_PAPER = [line for line in COMMAND.findall(README) if re.match("fp4dse (space|cost|export) ", line)]
FAKE = (sys.executable, str(Path(__file__).with_name("sweeps") / "fake_worker.py"), "ok")


def block(page: str, language: str) -> str:
    """The only example of a language on a page."""
    [found] = blocks(page, language)
    return found


def blocks(page: str, language: str) -> list[str]:
    """All examples of a language on a page."""
    return re.findall(rf"```{language}\n(.*?)```", PAGES[page], re.DOTALL)


def words(line: str) -> list[str]:
    """A shell line's arguments, without its comment and where its output goes."""
    return shlex.split(line.partition(" > ")[0], comments=True)[1:]


def test_commands_are_found():
    assert len(COMMANDS) > 30
    assert len(ON_PAPER) > 2


@each("page, line", COMMANDS)
def test_a_command_exists_with_its_arguments(page, line):
    command, arguments = typer.main.get_command(cli.app), words(line)
    while hasattr(command, "commands"):
        command = command.commands[arguments.pop(0)]
    command.make_context("fp4dse", arguments)


def test_readme_and_help_say_the_same_of_how_long_the_quickstart_takes():
    [said] = re.findall(r"make quickstart .*: (.* CPU cores), once installed", README)
    assert said in EVERY["quickstart"].help


def test_readme_shows_the_warning_that_the_quickstart_prints():
    [digest] = {line.dataset_digest for line in agreements().of("regression:quickstart")}
    lines = wrapped(f"{'Beware:':<10}{warning('regression', 'quickstart', digest)}.", 100, 10)
    assert "\n".join(f"    {line}" for line in lines.splitlines()) in README


@each("name", EVERY)
def test_help_ends_with_an_example_that_parses(name):
    line = EVERY[name].epilog.removeprefix("Example: fp4dse ")
    assert line.startswith(name)
    EVERY[name].make_context(name, words(f"fp4dse {line.removeprefix(name)}"))


@pytest.mark.parametrize("line", ON_PAPER)
def test_what_needs_no_training_runs(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(block("README.md", "toml"))
    with pytest.raises(SystemExit) as ended:
        cli.main(words(line))
    assert not ended.value.code


def test_the_python_example_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(run_sweep.__kwdefaults__, "worker", FAKE)
    Path("example.py").write_text(block("README.md", "python"))
    names = runpy.run_path("example.py")
    assert len(names["runs"]) == len(open_store("runs/mine/store").done()) == 3 * (4 + 1)
    assert len(names["best"]) == 4 + 1
    assert len(names["front"]) > 0
    assert len(names["what_helps"]) > 0


def test_the_space_enumerates_and_uses_its_rule():
    count = Count()
    assert len(list(Space.from_dict(tomllib.loads(block("README.md", "toml"))).recipes(count))) == count.left > 0
    assert count.rejected == {"not both": count.raw // 4}


def test_the_recipe_reads():
    ruled = recipe_from_dict(tomllib.loads(blocks("recipes.md", "toml")[1]))
    assert [rule.where() for rule in ruled.layers] == ["attention", "qkv+down, blocks -4:", "block0.up"]
    recipe = tomllib.loads(blocks("recipes.md", "toml")[0])
    assert recipe.pop("summary")
    assert recipe_from_dict(recipe).label() == "mxfp4-rceil, gradients SR, wgrad rht32"


def test_formats_of_ones_own_read_as_shown():
    """In a recipe, with the rest of the page's first example, and in a space."""
    first, _, own = map(tomllib.loads, blocks("recipes.md", "toml"))
    del first["summary"]
    recipe = recipe_from_dict(first | own)
    assert recipe.fprop.x.label() == "nf4-126d55 1x32 ue3m4-874c4a"
    assert "`mine-126d55`" in PAGES["recipes.md"]
    space = Space.from_dict(tomllib.loads(blocks("spaces.md", "toml")[1]))
    assert len({recipe.config_id for recipe in space.recipes()}) == 6


def test_the_page_names_every_block_that_is_accepted():
    sentence = PAGES["recipes.md"].partition("A block has ")[2].partition(";")[0]
    assert set(re.findall(r"`(\w+)`|(\d+)", sentence)) == {
        (block, "") if isinstance(block, str) else ("", str(block))
        for block in get_args(field_types(Quantizer)["block"])
    }


def test_the_mistake_is_answered_as_shown():
    wrong = {"axes": {"*.g.rounding": ["nearest", "sr"]}}
    with pytest.raises(ConfigError) as caught:
        Space.from_dict(wrong, "mine.toml")
    assert f"fp4dse: {caught.value}\n" in README


def test_the_tensor_table_is_what_the_command_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    np.save("normal.npy", np.random.default_rng(0).normal(size=(512, 1024)))
    [line] = [line for page, line in COMMANDS if page == "tensor.md"]
    with pytest.raises(SystemExit):
        cli.main(words(line))
    printed = "".join(f"    {line}\n" if line else "\n" for line in capsys.readouterr().out.splitlines())
    assert printed in PAGES["tensor.md"]


@pytest.mark.parametrize("page", PAGES)
def test_linked_files_exist(page):
    here = ROOT if page == "README.md" else ROOT / "docs"
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", PAGES[page])]
    assert not [link for link in links if "://" not in link and not (here / link).exists()]


def anchors_of(text):
    """The anchors of a page's headings, as GitHub makes them; of equal ones those after the first have a number."""
    found, seen = set(), {}
    for heading in re.findall(
        r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE
    ):
        anchor = re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "", heading).lower()).replace(" ", "-")
        seen[anchor] = seen.get(anchor, -1) + 1
        found.add(anchor if not seen[anchor] else f"{anchor}-{seen[anchor]}")
    return found


LINKING = [*PAGES, "study/findings.md", "study/plan.md"]


@pytest.mark.parametrize("page", LINKING)
def test_linked_headings_exist(page):
    file = ROOT / page if page == "README.md" else ROOT / "docs" / page
    for link in re.findall(r"\]\(([^)\s]*#[^)\s]+)\)", file.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        if "://" not in link and (not path or path.endswith(".md")):
            there = (file.parent / path if path else file).read_text(encoding="utf-8")
            assert anchor in anchors_of(there), link
