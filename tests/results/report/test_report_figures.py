"""Figures for papers: one file a picture and setting, in the form that was asked for, the same bytes each time."""

import re

import pytest

from fp4dse import cli
from fp4dse.dse import ConfigError
from fp4dse.results import open_store
from fp4dse.results.report import paper_figures, read_findings, write_figures

matplotlib = pytest.importorskip("matplotlib", reason="needs the extra `figures`")
STARTS = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}


@pytest.fixture(scope="module")
def found(swept):
    return read_findings(swept)


def test_each_setting_has_its_four_figures_and_a_text_of_an_svg_is_a_text(found, tmp_path):
    written = paper_figures.write_figures(found, tmp_path / "new" / "folder", "svg")
    whats = ("front", "effects", "interactions", "curves")
    tasks = ("regression-quickstart", "vision-quickstart")
    assert {path.name for path in written} == {f"{what}-{task}.svg" for what in whats for task in tasks}
    [path] = [path for path in written if path.name.startswith("effects-vision")]
    assert re.search(r"<text[^>]*>wgrad\.rotation: rht16 \(not none\)", path.read_text())


@pytest.fixture(scope="module")
def read_twice(tmp_path_factory, row):
    """The findings of a small store, read two times."""
    store = open_store(tmp_path_factory.mktemp("little") / "store", create=True)
    store.add([row("bf16", 0, 0.5), row("nvfp4", 0, 0.6), row("mxfp4", 0, 0.7)], "job")
    return [read_findings(store) for _ in range(2)]


@pytest.mark.parametrize("form", STARTS)
def test_the_same_store_makes_the_same_bytes(read_twice, tmp_path, form):
    first, second = (
        paper_figures.write_figures(found, tmp_path / name, form) for name, found in zip("ab", read_twice, strict=True)
    )
    assert len(first) == 3  # one seed and two recipes tell no interaction
    assert all(path.suffix == f".{form}" and path.read_bytes().startswith(STARTS[form]) for path in first)
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_what_has_no_numbers_has_no_figure(store, row, tmp_path):
    store.add([row("nvfp4", 0, None), row("mxfp4", 0, 0.5, curve_step=[], curve_loss=[])], "job")
    assert write_figures(store, tmp_path) == []


def test_another_form_is_refused(swept, tmp_path):
    with pytest.raises(ConfigError, match="found 'gif'; accepted: png, svg, pdf"):
        write_figures(swept, tmp_path, "gif")


def test_the_command_prints_what_it_wrote(store, row, tmp_path, capsys):
    store.add([row("bf16", 0, 0.5), row("nvfp4", 0, 0.6), row("mxfp4", 0, 0.7)], "job")
    with pytest.raises(SystemExit) as ended:
        cli.main(["report", "--store", str(store.path), "--figures", str(tmp_path / "figures"), "--format", "svg"])
    assert not ended.value.code
    printed = capsys.readouterr().out.split()
    assert sorted(printed) == sorted(str(path) for path in (tmp_path / "figures").iterdir())
    assert len(printed) == 3
