"""Wrong input is one line that names the field, what was found and what is accepted, and exit code 2."""

from pathlib import Path

import pytest

from fp4dse import cli

FILES = {
    "few.toml": 'axes."*.block" = [16, 32]\n',
    "only.toml": 'summary = "nothing else"\n',
    "twice.toml": 'axes."*.block" = [16, 16]\n',
    "up.toml": 'name = "../../x"\naxes."*.block" = [16, 32]\n',
    "nameless.toml": 'name = ""\naxes."*.block" = [16, 32]\n',
    "late.toml": 'axes."*.block" = [16, 32]\nlanes.seeds = [99999999999999999999]\n',
    "many.toml": 'axes."*.block" = [16, 32]\nlanes.seeds = 1000000000000\n',
    "itself.toml": 'join = ["itself.toml"]\n',
    "a.toml": 'join = ["b.toml"]\n',
    "b.toml": 'join = ["a.toml"]\n',
    "few.py": "X = 1\n",
}
CHIP = (Path(cli.__file__).parent / "dse/cost/chips/b200.toml").read_text()
MODEL = (Path(cli.__file__).parent / "dse/cost/models/mlp.toml").read_text()

CASES = [
    ("space only.toml", "only.toml: found 'summary'; accepted: a space that says what is tried"),
    ("space twice.toml", "twice.toml: axes.*.block[1]: found '16'; accepted: each value once"),
    ("space up.toml", "up.toml: name: found '../../x'; accepted: a text without /"),
    ("space nameless.toml", "nameless.toml: name: found ''; accepted: a text"),
    ("space late.toml", "late.toml: lanes.seeds: found [99999999999999999999]; accepted: a number of seeds"),
    ("sweep many.toml --dry-run", "many.toml: lanes.seeds: found 1000000000000; accepted: a number of seeds"),
    ("space itself.toml", "does not lead back to itself (itself.toml → itself.toml)"),
    ("space a.toml", "does not lead back to itself (a.toml → b.toml → a.toml)"),
    ("space nvfp4 -a *.block=16,16", "--axis: axes.*.block[1]: found '16'; accepted: each value once"),
    ("space nvfp4 -a *.block=-16", "--axis: axes.*.block[0]: found -16"),
    ("space nvfp4 -a ünïcode=1", "--axis: axes.ünïcode: found 'ünïcode'"),
    ("space Zoo", "did you mean 'zoo'?"),
    ("recipe list --chip ''", "--chip: found ''; accepted: a text that is not empty"),
    ("recipe show Quartet", "did you mean 'quartet'?"),
    (
        "cost nvfp4 --chip negative.toml",
        "negative.toml: found 'matrix.fp4 is -9e+15, but must be a finite number above 0'",
    ),
    ("cost nvfp4 --model tokenless.toml", "tokenless.toml: found 'tokens is -"),
    ("cost nvfp4 --model ''", "--model: found ''"),
    ("cost nvfp4 --extra-tokens nan", "--extra-tokens: found nan; accepted: a number above -1"),
    ("cost nvfp4 --extra-tokens inf", "--extra-tokens: found inf"),
    ("cost nvfp4 --device cuda", "--device: found 'cuda'; accepted: nothing without --measure"),
    ("export nvfp4 --to TE", "did you mean 'te'?"),
    ("sweep few.toml --task regresion", "did you mean 'regression'?"),
    ("sweep few.toml --task regression:smal", "did you mean 'small'?"),
    (
        "sweep few.toml --task regression:smoke --task regression:smoke",
        "--task: found 'regression:smoke'; accepted: each",
    ),
    ("sweep few.toml --task few.py:Y", "--task: found 'few.py:Y'"),
    ("sweep few.toml --data ''", "--data: found ''"),
    ("sweep few.toml --preset ''", "--preset: found ''"),
    ("sweep few.toml --store ''", "--store: found ''"),
    ("sweep few.toml --seeds 0,0,1", "--seeds: found '0, 0, 1'; accepted: each value once (0 is there twice)"),
    ("sweep few.toml --seeds 999999999", "--seeds: found '999999999'"),
    ("sweep few.toml --lr 1e-3,0.001", "--lr: found '0.001, 0.001'; accepted: each value once"),
    ("sweep few.toml --budget 0s", "--budget: found '0s'; accepted: a duration above 0"),
    ("sweep few.toml --executor slrum --dry-run", "did you mean 'slurm'?"),
    ("sweep few.toml --device CPU", "did you mean 'cpu'?"),
    ("search few.toml --sampler tpee --trials 1", "did you mean 'tpe'?"),
    ("search few.toml --sampler tpe --trials 1 --sampler-seed -1", "--sampler-seed: found -1"),
    ("status --store ''", "--store: found ''"),
    ("report --out ''", "--out: found '.'; accepted: the path of a file"),
    ("report --out folder", "--out: found 'folder'; accepted: the path of a file"),
    ("report --figures figures --out x.html", "--out: found 'x.html'; accepted: nothing with --figures"),
    ("report --format png", "--format: found 'png'; accepted: nothing without --figures"),
    ("compare nvfp4 --margin -1", "--margin: found -1.0"),
    ("store invalidate quantizers 99999999999999999999999", "below: found 99999999999999999999999"),
    ("store invalidate quantizers 0", "below: found 0; accepted: a whole number above 0"),
    ("bench sweep --only nothing", "--only: found 'nothing'; accepted: plan, harness"),
    ("bench results --rows -1", "--rows: found -1"),
    ("tensor x.npy --quantizer nvpf4", "did you mean 'nvfp4'?"),
]


@pytest.mark.parametrize(("line", "words"), CASES, ids=[line for line, _ in CASES])
def test_wrong_input_is_one_line_with_field_value_and_fix(line, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "negative.toml").write_text(CHIP.replace("value = ", "value = -", 1))
    (tmp_path / "tokenless.toml").write_text(MODEL.replace("tokens = ", "tokens = -", 1))
    with pytest.raises(SystemExit) as ended:
        cli.main(["" if word == "''" else word for word in line.split()])
    printed = capsys.readouterr()
    assert ended.value.code == 2
    assert words in printed.err
    assert len(printed.err.splitlines()) == 1
    assert printed.out == ""
    assert not Path("runs").exists()
