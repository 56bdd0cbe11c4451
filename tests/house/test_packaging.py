"""What is installed is what is in the tree, under one name."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import fp4dse
from tests.house.modules import ROOMS, ROOT, SETUP, TOP, packages_on_disk


def test_the_tests_see_this_tree():
    assert Path(fp4dse.__file__).resolve().parent == ROOT
    assert fp4dse.__version__ == importlib.metadata.version("fp4dse")


def test_every_folder_with_modules_is_a_listed_package():
    on_disk = packages_on_disk()
    assert set(SETUP["packages"]) == set(on_disk)
    assert {name: (ROOT / folder).resolve() for name, folder in SETUP["package-dir"].items()} == on_disk
    assert all((folder / "__init__.py").exists() for folder in on_disk.values())


def test_the_package_runs_as_a_command():
    done = subprocess.run([sys.executable, "-m", "fp4dse", "--version"], capture_output=True, text=True)
    assert done.stdout.strip() == importlib.metadata.version("fp4dse")


def test_the_top_of_the_tree_holds_no_module_but_the_cli():
    """All that lies there is shipped as `fp4dse.<name>`."""
    assert {file.name for file in ROOT.glob("*.py")} == set(TOP)


def run(*command: str | Path, cwd: Path) -> str:
    """Standard output; with the end of standard error in the failure if the command fails."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def tracked_files() -> list[Path]:
    """Files that git would have in a clone made now, relative to the root."""
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    return [Path(name) for name in listed.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from the source distribution of a clean copy of the tree."""
    copy = tmp_path_factory.mktemp("clone")
    for file in tracked_files():
        (copy / file).parent.mkdir(parents=True, exist_ok=True)
        (copy / file).write_bytes((ROOT / file).read_bytes())
    build = "import sys, setuptools.build_meta as b; print(b.build_sdist(sys.argv[1]))"
    dist = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-W", "error", "-c", build, dist, cwd=copy)
    sdist = next(dist.glob("*.tar.gz"))
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps", "--no-build-isolation")
    run(*pip, "--wheel-dir", dist, sdist, cwd=dist)
    return next(dist.glob("*.whl"))


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_data_file_of_the_tree_and_nothing_else(wheel):
    rooms = [file for file in tracked_files() if file.parts[0] in ROOMS]
    expected = {Path("fp4dse", file) for file in [*rooms, *map(Path, TOP), Path("py.typed")]}
    shipped = {Path(name) for name in zipfile.ZipFile(wheel).namelist()}
    assert {file for file in shipped if not file.parts[0].endswith(".dist-info")} == expected


@pytest.mark.slow
def test_the_wheel_works_from_anywhere_beside_a_package_named_kernels(wheel, tmp_path):
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    (site / "kernels").mkdir()
    (site / "kernels" / "__init__.py").write_text("origin = 'another project'\n")
    # torch and the rest come from this environment, but not fp4dse: a .pth line adds no finder of editable packages
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python, "install", "--no-deps")
    run(*pip, "--no-index", "--ignore-installed", wheel, cwd=tmp_path)

    where = (
        "import kernels, fp4dse, fp4dse.kernels; print(kernels.origin, fp4dse.__file__, fp4dse.__version__, sep='|')"
    )
    origin, file, version = run(python, "-c", where, cwd=tmp_path).strip().split("|")
    assert origin == "another project"
    assert Path(file) == site / "fp4dse" / "__init__.py"
    assert version == importlib.metadata.version("fp4dse")

    script = tmp_path / "venv" / "bin" / "fp4dse"
    assert "sweep" in run(script, "--help", cwd=tmp_path)
    recipes = run(script, "recipe", "list", cwd=tmp_path)
    assert all(file.stem in recipes for file in (ROOT / "dse" / "recipes").glob("*.toml"))
