"""Fine-tuning of a folder's model on text of the user: it starts as that model, what is recovered is measured from its
own rounding, and its weights become such a folder again."""

import json
import math
import shutil
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from fp4dse.dse import ConfigError, Recipe, recipe_from_dict, recipe_to_dict
from fp4dse.results import open_store
from fp4dse.results.stats.techniques.recovered import recovered
from fp4dse.sweeps import run_sweep
from fp4dse.sweeps.arguments import find_space
from fp4dse.sweeps.weights import as_folder, fitted
from fp4dse.tasks import Lane, check_task, facts_of, get_task, train
from fp4dse.tasks.engine import Population
from fp4dse.tasks.engine.evaluation import evaluate
from fp4dse.tasks.fitted.fit import fit_weights
from fp4dse.tasks.language.folder import LEARNED, read_folder
from fp4dse.tasks.language.folder_out import write_folder
from fp4dse.tasks.start.make_weights import make_weights
from fp4dse.tasks.start.weights import digest_of, read_about, read_weights
from tests.commands.running import call
from tests.forked_workers import fork_workers
from tests.tasks.language.folders import BASE, CONFIGS, save, tensors_of

replace = msgspec.structs.replace
BF16 = Recipe.named("bf16")
SIDES = {
    "dgrad": {"g": "bf16", "w": "bf16", "source": "forward"},
    "wgrad": {"g": "bf16", "x": "bf16", "source": "forward"},
}
WORDS = "the base reads on in a text and loses less of it than rounding took".split()  # noqa: SIM905


def recipe(outliers=None, x_outliers=None, **training):
    """NVFP4 in both forward operands, with their treatments; gradients in BF16."""
    nvfp4 = recipe_to_dict(Recipe.named("nvfp4"))["fprop"]
    treated = {"w": outliers, "x": x_outliers}
    operands = {of: nvfp4[of] | ({"outliers": how} if how else {}) for of, how in treated.items()}
    return recipe_from_dict({"fprop": operands, **SIDES, "training": training})


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """60 kB, of which what is held out has a hundred windows of 32 bytes."""
    generator = torch.Generator().manual_seed(3)
    file = tmp_path_factory.mktemp("text") / "notes.txt"
    drawn = torch.randint(len(WORDS), (600, 20), generator=generator).tolist()
    file.write_text("\n\n".join(" ".join(WORDS[i] for i in line) for line in drawn))
    return file


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A Qwen3 with grouped heads, norms and a tied head, whose tokens are bytes."""
    config = BASE | CONFIGS["qwen3, tied"]
    return save(tmp_path_factory.mktemp("folder") / "qwen", config, tensors_of(config))


@pytest.fixture(scope="module")
def trained(folder, text, tmp_path_factory) -> Path:
    """The same after a training on the text, by the task of language."""
    task = get_task("language", "smoke", str(text), str(folder))
    weights, _ = make_weights(replace(task, steps=60), Lane(BF16, 1e-2, 0))
    path = tmp_path_factory.mktemp("trained") / "qwen"
    write_folder(path, folder, weights, {})
    return path


def tuned(folder, text, preset="smoke"):
    return get_task("finetune", preset, str(text), str(folder))


def first_loss(task, of=BF16):
    return evaluate(Population(task, [Lane(of, 1e-3, 0)], "cpu"))[0][0].item()


def test_it_starts_with_the_held_out_loss_of_the_language_task(trained, text):
    """To the bit: windows, batches and model are the same."""
    assert first_loss(tuned(trained, text)) == first_loss(get_task("language", "smoke", str(text), str(trained)))


@pytest.mark.heavy
@pytest.mark.parametrize("name", CONFIGS)
def test_it_starts_with_the_held_out_loss_of_transformers(in_float32, tmp_path, text, name):
    """Of the same tokens, within 1e-5 of it where products are in FP32."""
    library = pytest.importorskip("transformers")
    config = BASE | CONFIGS[name]
    save(tmp_path / "m", config, tensors_of(config))
    task = tuned(tmp_path / "m", text)
    tokens = task.problem([0]).val_x[0].long()
    model = library.AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(tokens[:, :-1]).logits
    expected = cross_entropy(logits.flatten(0, 1).double(), tokens[:, 1:].flatten()).item()
    assert first_loss(task) == pytest.approx(expected, rel=1e-5)


def test_text_goes_through_the_tokenizer_of_the_folder(folder, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    copied = shutil.copytree(folder, tmp_path / "m")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, "one": 1, "two": 2}, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(copied / "tokenizer.json"))
    (tmp_path / "t.txt").write_text("\n\n".join("one two " * 9 + f"number {i}" for i in range(100)))
    problem = tuned(copied, tmp_path / "t.txt").problem([0])
    expected = ([1, 2] * 9 + [0, 0]) * 2
    assert problem.val_x[0, 0].tolist() == expected[:33]
    assert problem.train_x[0, 0].tolist() == expected[:33]
    assert problem.init["embed"].shape == (1, 256, 32)


def test_numbers_are_those_of_the_preset_and_the_text(trained, text):
    task, bundled = tuned(trained, text), get_task("finetune", "smoke")
    for name in ("name", "preset", "rev", "steps", "batch", "warmup", "decay", "weight_decay", "betas", "tokens"):
        assert getattr(task, name) == getattr(bundled, name), name
    assert (task.lr, task.rates, task.metric_name, task.has_teacher) == (1e-5, {}, "bits_per_byte", True)
    problem = task.problem([0, 1])
    assert problem.train_x.shape == (1, 320, 33)
    assert problem.val_x.shape == (1, 32, 33)
    longer = tuned(trained, text, "text")
    assert longer.problem([0]).val_x.shape[2] == 257
    assert longer.tokens == 200 * 8 * 256


RECIPES = {
    "PTQ": {"trains": "none"},
    "QAT": {},
    "QAD": {"distill": "qad"},
    "QLoRA": {"outliers": "lora", "trains": "learned"},
    "random coreset": {"coreset": {"by": "random", "share": 0.2}},
    "ACS": {"coreset": {"by": "acs", "share": 0.2, "selections": 2}},
}


@pytest.fixture(scope="module")
def swept(trained, text, tmp_path_factory):
    """What trains all, less, or on less, by a sweep: its rows."""
    store = tmp_path_factory.mktemp("sweep") / "store"
    recipes = [recipe(**of) for of in RECIPES.values()]
    asked = ("finetune", "smoke", str(text), str(trained))
    with pytest.MonkeyPatch.context() as patch:
        fork_workers(patch)
        result = run_sweep(recipes, tasks=[asked], seeds=[0, 1], lrs=[3e-3], store=store, jobs=1)
    assert result.failed == 0
    return open_store(store).runs()


def test_what_is_recovered_is_measured_from_rounding_to_nearest_of_the_folder(swept, trained, text):
    lanes = {name: swept[swept["config_id"].eq(recipe(**of).config_id)] for name, of in RECIPES.items()}
    task = tuned(trained, text)
    rounded = first_loss(task, recipe())
    assert lanes["PTQ"]["val_loss"].tolist() == [rounded] * 2, "before any training"
    assert lanes["PTQ"]["val_loss_bf16"].tolist() == [first_loss(task)] * 2
    assert rounded > first_loss(task)
    lines = recovered(swept).set_index("config_id")
    start = f"weights {task.start[:8]}"
    for name, of in RECIPES.items():
        if name == "PTQ":
            continue
        line, rows = lines.loc[recipe(**of).config_id], lanes[name]
        expected = (rounded - rows["val_loss"].mean()) / (rounded - first_loss(task))
        assert line["of_base"] == pytest.approx(expected, rel=1e-9), name
        assert (line["ptq"], line["pairs"], line["start"]) == (pytest.approx(rounded), 2, start), name
        assert math.isfinite(line["of_bf16"]), name
    assert lines.loc[recipe().config_id, "of_base"] > 0.2, "training gets some of it back"


def test_rows_have_the_digests_of_folder_and_text(swept, trained, text):
    task = tuned(trained, text)
    assert set(swept["dataset_digest"]) == {task.digest}
    assert set(swept["start_digest"]) == {task.start}
    assert set(swept["preset"]) == {"smoke"}


def test_the_key_follows_what_the_folder_and_the_text_hold_and_not_where_they_are(trained, text, tmp_path):
    first = tuned(trained, text).digest
    copied = shutil.copytree(trained, tmp_path / "copy")
    (tmp_path / "same.txt").write_bytes(text.read_bytes())
    assert tuned(copied, tmp_path / "same.txt").digest == first
    others = [tuned(trained, text, "small").digest]
    (tmp_path / "other.txt").write_text(text.read_text().replace("base", "case"))
    others.append(tuned(trained, tmp_path / "other.txt").digest)
    config = json.loads((copied / "config.json").read_text())
    for change in ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, {"rms_norm_eps": 1e-5}):
        (copied / "config.json").write_text(json.dumps(config | change))
        others += [tuned(copied, text).digest, get_task("language", "smoke", str(text), str(copied)).digest]
    others.append(get_task("language", "smoke", str(text), str(trained)).digest)
    assert len({first, *others}) == 1 + len(others)


def test_a_lane_is_itself_beside_others(trained, text):
    task = replace(tuned(trained, text), steps=6)
    lanes = [Lane(recipe(**of), 1e-3, seed) for of in ({}, {"distill": "qad"}) for seed in (0, 1)]
    together = train(task, lanes).lanes
    assert [train(task, [lane]).lanes[0].val_loss for lane in lanes] == [lane.val_loss for lane in together]


@pytest.mark.heavy
def test_the_shipped_space_is_trained_whole(trained, text):
    """Every recipe of `finetune` takes a step on the folder's model, without a loss that is not finite."""
    task = replace(tuned(trained, text), steps=1)
    alike = {}
    for each in find_space("finetune").recipes():
        alike.setdefault(each.signature(), []).append(Lane(each, 1e-3, 0))
    for lanes in alike.values():
        assert all(lane.status == "done" for lane in train(task, lanes).lanes)


def test_what_is_missing_or_does_not_fit_is_one_line(trained, text, tmp_path):
    (tmp_path / "short.txt").write_text("\n\n".join(f"paragraph {i:02}" for i in range(30)))
    (tmp_path / "t.bin").write_bytes(bytes(4000))
    (tmp_path / "t.json").write_text('{"dtype": "uint16", "vocabulary": 300, "bytes_per_token": 4.0}')
    config = BASE | CONFIGS["qwen3, tied"] | {"vocab_size": 300}
    larger = save(tmp_path / "larger", config, tensors_of(config))
    folder, data = str(trained), str(text)
    for asked, words in (
        (("finetune", "smoke", None, folder), r"--data: found nothing; accepted: a PATH with text"),
        (("finetune", "smoke", "", folder), r"--data: found nothing; accepted: a PATH with text"),
        (("finetune", "smoke", "grammar?copying=25", folder), r"--data: .*text for the tokenizer of qwen"),
        (("finetune", "smoke", data), r"nothing with finetune, unless --from FOLDER names a model that reads it"),
        (("finetune", "nope", data, folder), r"preset of finetune: found 'nope'; accepted: smoke, small, text, long"),
        (("finetune", "smoke", str(tmp_path / "nope.txt"), folder), r"--data: .*a file or folder that exists"),
        (("finetune", "smoke", data, str(larger)), r"--from: .*a folder with the tokenizer\.json of the model"),
        (("finetune", "smoke", str(tmp_path / "t.bin"), folder), r"tokens below 256, .*qwen \(found 300\)"),
        (("finetune", "small", str(tmp_path / "short.txt"), folder), r"--data: .*65 held-out tokens or more, a window"),
        (("finetune", "smoke", None, f"{folder}/model.safetensors"), r"--from: .*the folder that this file is in"),
        (("finetune", "smoke", data, str(tmp_path)), r"--from: .*config\.json that can be read"),
        (("rl", "smoke", None, folder), r"folders are for language and finetune; a problem of rl .* no text"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            get_task(*asked)
    with pytest.raises(ConfigError, match=r"--data: found nothing; accepted: a PATH with text, and --from FOLDER"):
        facts_of(get_task("finetune", "text"))
    less = facts_of(get_task("finetune", "smoke", str(tmp_path / "short.txt"), folder))
    with pytest.raises(ConfigError, match=r"--data: .*short\.txt'; accepted: data with 16 samples or more, .*11\)"):
        check_task(less, "cpu")


@pytest.mark.parametrize("name", CONFIGS)
def test_a_folder_that_is_written_is_the_one_that_was_read(tmp_path, name):
    config = BASE | CONFIGS[name]
    source = save(tmp_path / "m", config | {"torch_dtype": "bfloat16"}, tensors_of(config))
    (source / "tokenizer_config.json").write_text("{}")
    (source / "README.md").write_text("not of the model")
    weights = read_folder(source, 8).weights()
    write_folder(tmp_path / "out", source, weights, {"method": "gptq"})
    theirs, again = load_file(source / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert theirs.keys() == again.keys()
    assert all(torch.equal(value, again[key]) for key, value in theirs.items())
    files = {"config.json", "fp4dse.json", "model.safetensors", "tokenizer_config.json"}
    assert {file.name for file in (tmp_path / "out").iterdir()} == files
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "float32"
    assert read_about(tmp_path / "out") == {"method": "gptq"}
    assert read_folder(tmp_path / "out", 8).shape == read_folder(source, 8).shape


def test_transformers_reads_what_was_trained_here(trained, text, in_float32):
    library = pytest.importorskip("transformers")
    model = library.AutoModelForCausalLM.from_pretrained(trained)
    assert next(model.parameters()).dtype == torch.float32
    tokens = tuned(trained, text).problem([0]).val_x[0].long()
    with torch.no_grad():
        logits = model(tokens[:, :-1]).logits
    expected = cross_entropy(logits.flatten(0, 1).double(), tokens[:, 1:].flatten()).item()
    assert first_loss(tuned(trained, text)) == pytest.approx(expected, rel=1e-5)


def test_what_quantizers_learned_goes_with_the_folder(trained, text, tmp_path):
    pact = recipe(x_outliers={"kind": "learned-clip", "start": 4.0, "rate": 1000})
    task = replace(tuned(trained, text), steps=3)
    weights, result = make_weights(task, Lane(pact, 1e-3, 0))
    for _ in range(2):  # a second time over the first
        write_folder(tmp_path / "out", trained, weights, {})
    assert (tmp_path / "out" / LEARNED).exists()
    assert first_loss(tuned(tmp_path / "out", text), pact) == pytest.approx(result.val_loss, rel=1e-6)
    plain = {name: value for name, value in weights.items() if "clip" not in name}
    write_folder(tmp_path / "out", trained, plain, {})
    assert not (tmp_path / "out" / LEARNED).exists()
    for path in (trained, tmp_path):
        with pytest.raises(ConfigError, match=r"--out: .*a folder that is new or empty"):
            write_folder(path, trained, weights, {})


def test_weights_fitted_to_a_folder_start_a_sweep_of_it(trained, text, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    asked = ("finetune", "smoke", str(text), str(trained))
    path = fitted(asked, Lane(recipe(), 1e-3, 0), "gptq", 64)
    as_folder(path, tmp_path / "gptq", trained)
    said = read_about(tmp_path / "gptq")
    assert said["loss_bf16"] < said["loss_fitted"] < said["loss_nearest"]
    task = tuned(tmp_path / "gptq", text)
    assert (task.start, task.start_method) == (said["digest"], "gptq")
    assert first_loss(task, recipe()) == pytest.approx(said["loss_fitted"], rel=1e-6)


def test_a_tied_head_that_is_quantized_is_not_fitted(trained, text):
    head = replace(recipe(), precise=replace(recipe().precise, head=False))
    with pytest.raises(ConfigError, match=r"precise\.head: found False; accepted: true \(.*embedding"):
        fit_weights(tuned(trained, text), Lane(head, 1e-3, 0), "gptq", 16)


def test_the_commands_write_a_folder_where_they_begin_with_one(trained, text, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    fit = ["weights", "fit", "finetune:smoke", "--method", "nearest", "--samples", "16"]
    fit += ["--from", str(trained), "--data", str(text), "--json"]
    for more, kind, path in (
        ([], "folder", "runs/weights/finetune-smoke-nvfp4-nearest-0"),
        (["--out", "mine"], "folder", "mine"),
        (["--out", "mine"], "folder", "mine"),
        (["--out", "w.safetensors"], "file", "w.safetensors"),
    ):
        assert call(*fit, *more) == 0
        said = json.loads(capsys.readouterr().out)
        assert said[kind] == path
        weights = read_folder(Path(path), 8).weights() if kind == "folder" else read_weights(Path(path))
        assert digest_of(weights) == said["digest"]
    Path("full").mkdir()
    Path("full/notes.txt").write_text("mine")
    for out, words in (("full", "new or empty"), (str(trained), "new or empty"), ("w.safetensors/x", "cannot be")):
        assert call(*fit, "--out", out) != 0
        assert words in capsys.readouterr().err
    assert call("weights", "make", "finetune:smoke", "--out", "mine") == 2
    assert "a path that ends in .safetensors, or the folder of a model for --from" in capsys.readouterr().err
