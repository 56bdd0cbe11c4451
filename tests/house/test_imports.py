"""The arrows between the folders run one way, no module imports itself by way of others, and a late import puts
something off."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.each import each
from tests.house.import_tree import BY_NAME, Tree, is_command, is_heavy
from tests.house.modules import ROOMS, ROOT, TOP, modules, parsed

MAY_IMPORT = {
    "dse": set(),
    "kernels": {"dse"},
    "tasks": {"dse", "kernels"},
    "results": {"dse"},
    "sweeps": {"dse", "tasks", "results"},
    "commands": set(ROOMS),
    "cli": {"dse", "commands"},
    "__main__": {"cli"},
    "__init__": set(),
}
NO_TORCH = ("dse", "results")
FOLDERS = {
    "results/stats": ("estimates", "sizes", "recipes", "techniques", "layers", "rollouts"),
    "sweeps": ("jobs", "executors", "planning", "running", "searching", "stages", "dashboard", "bench"),
}
"""Folders of two crowded rooms, in the order of their pages: each imports those before it, and none after."""


def imports_of(file: Path) -> set[str]:
    """Dotted names that a module imports, wherever in it; `from a import b` gives a.b."""
    names = set()
    for node in ast.walk(parsed(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@each("file", modules())
def test_imports_run_one_way(file):
    room = file.relative_to(ROOT).parts[0].removesuffix(".py")
    imports = imports_of(file)
    rooms = {name.split(".")[1] for name in imports if name.startswith("fp4dse.")}
    assert rooms - {room} <= MAY_IMPORT[room]
    assert not {name.split(".")[0] for name in imports} & {*ROOMS, "cli"}, "rooms are imported as fp4dse.<room>"
    if room in NO_TORCH:
        assert not {name for name in imports if name.split(".")[0] == "torch"}


@each("path", sorted(FOLDERS))
def test_folders_import_those_before_them(path):
    """Modules of results/stats itself import none; those of sweeps itself hold its folders together."""
    folders, home = FOLDERS[path], ROOT / path
    prefix = f"fp4dse.{path.replace('/', '.')}."
    assert sorted(folders) == sorted(file.parent.name for file in home.glob("*/__init__.py"))
    said = (home / "__init__.py").read_text()
    assert sorted(folders, key=lambda folder: re.search(rf"^ *{folder}  ", said, re.MULTILINE).start()) == list(folders)
    for file in home.rglob("*.py"):
        folder, *rest = file.relative_to(home).parts
        if not rest and path == "sweeps":
            continue
        before = folders[: folders.index(folder) + 1] if rest else ()
        used = {name.removeprefix(prefix).split(".")[0] for name in imports_of(file) if name.startswith(prefix)}
        assert not used.intersection(folders).difference(before), file


@pytest.fixture(scope="module")
def our_tree() -> Tree:
    return Tree(ROOT)


def test_no_module_imports_itself_by_way_of_others(our_tree):
    """Imports within functions and by name counted: they put a cost off, and untie nothing. One knot is meant: the
    registry of operations imports implementations, which know their definitions, which ask the registry."""
    graphlib.TopologicalSorter(our_tree.whole_graph(plugged_in=False)).prepare()
    with pytest.raises(graphlib.CycleError) as error:
        graphlib.TopologicalSorter(our_tree.whole_graph(plugged_in=True)).prepare()
    assert "fp4dse.kernels.dispatch" in error.value.args[1]
    assert {name for (name, _), edge in BY_NAME.items() if edge.plugged_in} == {"fp4dse.kernels.dispatch"}


def test_every_import_by_name_is_listed_and_finds_modules(our_tree):
    assert our_tree.by_name() == dict.fromkeys(BY_NAME, True), "each in a function, and each in the list"
    for edge in filter(lambda edge: edge.targets, BY_NAME.values()):
        assert any(re.fullmatch(edge.targets, name) for name in our_tree.trees), edge
    late = our_tree.late()
    assert late.keys() == {"fp4dse.results", "fp4dse.tasks"}
    assert not set().union(*late.values()) - our_tree.trees.keys()


def made(root: Path, files: dict[str, str]) -> Tree:
    for name, text in {**dict.fromkeys(TOP, ""), **files}.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    return Tree(root)


def test_a_circle_that_somebody_ties_is_found(tmp_path):
    tree = made(
        tmp_path,
        {
            "dse/a.py": "from fp4dse.dse.b import two\none = 1\n",
            "dse/b.py": "from fp4dse.kernels import c\ntwo = 2\n",
            "kernels/c.py": "def three():\n    from fp4dse.dse.a import one\n",
        },
    )
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(tree.graph()).prepare()


@pytest.mark.parametrize(
    "back",
    [
        "import fp4dse.dse.a as a",
        "if TYPE_CHECKING:\n    import json\nelse:\n    from fp4dse.dse.a import one",
        "if not TYPE_CHECKING:\n    from fp4dse.dse import a",
    ],
)
def test_a_circle_is_found_however_its_import_is_written(tmp_path, back):
    tree = made(tmp_path, {"dse/a.py": "from fp4dse.dse.b import two\none = 1\n", "dse/b.py": f"{back}\ntwo = 2\n"})
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(tree.graph()).prepare()


def test_a_circle_by_way_of_a_package_is_found(tmp_path):
    tree = made(
        tmp_path,
        {
            "dse/a.py": "def one():\n    from fp4dse.kernels.b import two\n",
            "kernels/__init__.py": "from fp4dse.dse.a import one\n",
            "kernels/b.py": "two = 2\n",
        },
    )
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(tree.graph()).prepare()


def test_an_import_by_name_that_nobody_listed_is_found(tmp_path):
    tree = made(
        tmp_path,
        {
            "dse/a.py": "import importlib\ndef one(name):\n    return importlib.import_module(f'fp4dse.{name}')\n",
            "dse/b.py": "from importlib import import_module as other\n",
            "dse/c.py": "two = import_module('fp4dse.dse.a')\n",
            "dse/d.py": "def three():\n    return import_module('torchao.mx'), __import__('fp4dse.dse.c')\n",
            "tasks/__init__.py": "__getattr__ = lazy(__name__, e=('four',), **{'f.g': ('five',)})\n",
            "tasks/e.py": "from fp4dse.dse import a\n",
        },
    )
    assert tree.by_name() == {
        ("fp4dse.dse.a", "f'fp4dse.{name}'"): True,
        ("fp4dse.dse.b", "as other"): False,
        ("fp4dse.dse.c", "'fp4dse.dse.a'"): False,
        ("fp4dse.dse.d", "'fp4dse.dse.c'"): True,
    }
    assert tree.late() == {"fp4dse.tasks": {"fp4dse.tasks.e", "fp4dse.tasks.f.g"}}
    assert tree.whole_graph(plugged_in=True)["fp4dse.tasks"] == {"fp4dse.tasks.e", "fp4dse.tasks.f.g"}


def vain(tree: Tree) -> list[str]:
    """Imports within functions that put nothing off: neither in a command, nor of what brings a heavy package that
    the module does not bring itself."""
    brings = tree.brings()
    return [
        f"{name}: {functions[-1].name} imports {other}"
        for name, imports in tree.imports.items()
        for other, functions in imports
        if functions and not is_command(name, functions[0])
        if not (({other} if is_heavy(other) else brings.get(other, set())) - brings[name])
    ]


def test_an_import_within_a_function_puts_a_heavy_package_off(our_tree):
    assert vain(our_tree) == []


def test_an_import_within_a_function_that_puts_nothing_off_is_found(tmp_path):
    tree = made(
        tmp_path,
        {
            "tasks/__init__.py": "if TYPE_CHECKING:\n    from fp4dse.tasks.engine import train\n",
            "tasks/engine.py": "import torch\ndef again():\n    import torch\n",
            "tasks/light.py": "import json\n",
            "tasks/driver.py": "def one():\n    from fp4dse.tasks import train, light\n    import torch, json\n",
            "sweeps/user.py": "from fp4dse.tasks import train\ndef two():\n    from fp4dse.tasks import engine\n",
            "commands/all.py": "@app.command()\ndef three():\n    from fp4dse.tasks import light\n",
        },
    )
    assert sorted(vain(tree)) == [
        "fp4dse.sweeps.user: two imports fp4dse.tasks.engine",
        "fp4dse.tasks.driver: one imports fp4dse.tasks.light",
        "fp4dse.tasks.driver: one imports json",
        "fp4dse.tasks.engine: again imports torch",
    ]


DRIVER_ONLY = ("optuna", "duckdb", "plotly", "ray", "pandas", "pyarrow")

REFUSE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {refused}:
            raise ImportError("a worker must not import " + name)
sys.meta_path.insert(0, Refuse())
import {wanted}
"""


def import_without(wanted: str, refused: tuple[str, ...]) -> subprocess.CompletedProcess:
    code = REFUSE.format(refused=set(refused), wanted=wanted)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)


def test_a_worker_imports_without_the_packages_of_the_driver():
    modules = ", ".join(
        ".".join(("fp4dse", *file.relative_to(ROOT).with_suffix("").parts))
        for room in ("dse", "kernels", "tasks")
        for file in (ROOT / room).rglob("*.py")
        if file.name != "__init__.py"
    )
    done = import_without(modules, DRIVER_ONLY)
    assert done.returncode == 0, done.stderr


def test_the_design_space_imports_without_torch():
    done = import_without("fp4dse.dse", ("torch", "numpy", *DRIVER_ONLY))
    assert done.returncode == 0, done.stderr


def test_a_driver_and_the_commands_that_read_import_without_torch():
    modules = (
        "fp4dse.cli, fp4dse.sweeps.sweep, fp4dse.sweeps.searching.search, fp4dse.sweeps.running.state, "
        "fp4dse.results.store.query"
    )
    done = import_without(modules, ("torch", "scipy", "optuna", "duckdb", "plotly", "ray"))
    assert done.returncode == 0, done.stderr


def test_the_refusal_refuses():
    assert "must not import pandas" in import_without("pandas", DRIVER_ONLY).stderr
