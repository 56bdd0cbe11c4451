"""The examples of the README work as they stand there."""

import re
import tomllib
from pathlib import Path

import numpy as np
import pytest

from fp4dse import cli
from fp4dse.dse import ConfigError, Space, recipe_from_dict
from fp4dse.dse.space import Count

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
SPACE, RECIPE = (tomllib.loads(block) for block in re.findall(r"```toml\n(.*?)```", README, re.DOTALL))


def test_the_space_enumerates_and_uses_its_rule():
    count = Count()
    assert len(list(Space.from_dict(SPACE).recipes(count))) == count.left > 0
    assert count.rejected == {"not both": 6}


def test_the_recipe_reads():
    texts = {key: RECIPE.pop(key) for key in ("summary",)}
    assert texts["summary"]
    assert recipe_from_dict(RECIPE).label() == "mxfp4-rceil, gradients SR, wgrad rht32"


def test_the_mistake_is_answered_as_shown():
    wrong = {"axes": {"*.g.rounding": ["nearest", "sr"]}}
    with pytest.raises(ConfigError) as caught:
        Space.from_dict(wrong, "mine.toml")
    assert f"fp4dse: {caught.value}\n" in README


def test_the_tensor_table_is_what_the_command_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    np.save("normal.npy", np.random.default_rng(0).normal(size=(512, 1024)))
    [command] = re.findall(r"^    fp4dse (tensor .*)$", README, re.MULTILINE)
    with pytest.raises(SystemExit):
        cli.main(command.split())
    printed = "".join(f"    {line}\n" if line else "\n" for line in capsys.readouterr().out.splitlines())
    assert printed in README


def test_linked_files_exist():
    links = re.findall(r"\]\(([^)]+)\)", README)
    absent = [link for link in links if "://" not in link and not (Path(__file__).parent.parent / link).exists()]
    assert not absent
