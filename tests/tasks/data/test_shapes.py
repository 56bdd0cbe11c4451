"""Procedural images: the same everywhere, whatever is drawn beside them; their classes are what the pictures show."""

import msgspec
import numpy as np
import pytest
import torch

from fp4dse.dse import ConfigError, Recipe
from fp4dse.tasks import Lane, diffusion, get_task, train, vision
from fp4dse.tasks.data import shapes
from fp4dse.tasks.data.figures import FIGURES, TEXTURES, figures, textures
from fp4dse.tasks.data.images import digest_of
from fp4dse.tasks.data.shapes import HELD_OUT, RANGES, TRAIN, Shapes, load_shapes, parse_shapes
from fp4dse.tasks.task import with_steps

BARE = Shapes(32, fade=0, clutter=0, occluders=0, noise=0)


@pytest.mark.parametrize(
    ("found", "digest"),
    [
        (shapes.SMALL, "157a148f7abd9ea4"),
        (Shapes(32, 3), "c415df5873430fea"),
        (Shapes(64, 1, 256, occluders=3, clutter=100, noise=50), "012e59a9f1ecbc09"),
    ],
)
def test_images_are_the_same_on_every_machine(found, digest):
    drawn = (found.images(split, 7, 300) for split in (TRAIN, HELD_OUT))
    assert digest_of(*map(torch.from_numpy, drawn)) == digest


@pytest.mark.parametrize("found", [Shapes(), Shapes(32, 3, occluders=2), Shapes(16, occluders=0)])
def test_an_image_does_not_depend_on_how_many_are_drawn_with_it(found, monkeypatch):
    whole = found.images(TRAIN, 0, 50)
    monkeypatch.setattr(shapes, "DRAWN", 11)
    monkeypatch.setattr(shapes, "PIXELS", 3 * 32 * 32)
    assert (found.images(TRAIN, 20, 30) == whole[20:]).all()
    assert (found.images(TRAIN, 49, 1) == whole[49:]).all()


def test_no_image_is_drawn_twice():
    drawn = np.concatenate([BARE.images(split, 0, 5000) for split in (TRAIN, HELD_OUT)])
    assert len(np.unique(drawn.reshape(len(drawn), -1), axis=0)) == len(drawn)


def test_classes_are_equally_frequent_and_their_number_is_that_of_the_image():
    loaded = load_shapes(Shapes(classes=48), 960)
    assert (torch.bincount(loaded.train_labels, minlength=48) == 20).all()
    counts = torch.bincount(loaded.held_out_labels, minlength=48)
    assert counts.max() - counts.min() <= 1
    assert (Shapes(classes=48).labels(100, 20) == loaded.train_labels[100:120].numpy()).all()


def test_every_class_is_a_pair_of_its_own():
    found = Shapes(classes=RANGES["classes"][-1])
    scene = found._scene(TRAIN, 0, found.classes)
    pairs = {(int(scene.layers[i, 1, 0]), int(scene.texture[i])) for i in range(found.classes)}
    assert len(pairs) == found.classes == len(FIGURES) * len(TEXTURES)


def turned(table):
    return [np.rot90(side, k) for side in (table, table.T) for k in range(4)]


def test_no_figure_is_another_one_turned_and_none_touches_the_rim():
    tables = figures(2.4 / 16).astype(float) / 127
    for i, one in enumerate(tables):
        assert max(one[0].max(), one[-1].max(), one[:, 0].max(), one[:, -1].max()) == 0
        for other in tables[:i]:
            assert min(np.abs(one - each).mean() for each in turned(other)) > 0.05


def test_no_texture_is_another_one_turned_or_with_its_tones_exchanged():
    tables = textures().astype(float) / 127
    for i, one in enumerate(tables):
        for other in tables[:i]:
            assert min(np.abs(one - each).mean() for each in turned(other) + turned(1 - other)) > 0.06


def test_a_plain_disc_is_of_one_tone_before_another():
    for image in BARE.images(TRAIN, 0, 50 * BARE.classes)[:: BARE.classes, ..., 0].astype(int):
        corners = image[[0, 0, -1, -1], [0, -1, 0, -1]]
        assert np.ptp(corners) == 0
        inside = image[14:18, 14:18]
        assert np.ptp(inside) == 0
        assert abs(inside[0, 0] - corners[0]) >= 48
        assert set(np.unique(image)) <= set(range(*sorted((corners[0], inside[0, 0])))) | {corners[0], inside[0, 0]}


@pytest.mark.parametrize(
    ("field", "less", "more"),
    [("fade", 0, 90), ("clutter", 0, 60), ("noise", 0, 20), ("occluders", 0, 3), ("turn", 0, 100), ("invert", 0, 100)],
)
def test_difficulty_changes_images_and_digest(field, less, more):
    easy, hard = (msgspec.structs.replace(Shapes(), **{field: value}) for value in (less, more))
    assert (easy.images(TRAIN, 0, 64) != hard.images(TRAIN, 0, 64)).mean() > 0.1
    assert easy.digest != hard.digest


def test_what_is_not_said_is_as_the_preset_has_it():
    assert parse_shapes("shapes", BARE) == BARE
    assert parse_shapes("shapes?size=64&channels=3&classes=10", BARE) == msgspec.structs.replace(
        BARE, size=64, channels=3, classes=10
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("size=48", "size of data shapes: found '48'; accepted: 16, 32 or 64"),
        ("channels=2", "channels of data shapes: found '2'; accepted: 1 or 3"),
        ("classes=1", "classes of data shapes: found '1'; accepted: 2 to 256"),
        ("noise=loud", "noise of data shapes: found 'loud'; accepted: 0 to 50"),
        ("occluders", "occluders of data shapes: found ''; accepted: 0 to 3"),
        ("width=16", "option of data shapes: found 'width'; accepted: size, channels, classes, turn, invert"),
    ],
)
@pytest.mark.parametrize("task", ["vision", "diffusion"])
def test_wrong_options_are_refused(task, options, said):
    with pytest.raises(ConfigError) as refused:
        get_task(task, "smoke", f"shapes?{options}")
    assert said in str(refused.value)


def test_a_size_that_a_model_cannot_take_is_refused():
    size = msgspec.structs.replace(vision.SIZES["smoke"], model=vision.vit(5, 16, 1, 2))
    with pytest.raises(ConfigError, match="height × width of the images: found '16 × 16'; accepted: multiples of 5"):
        size.on("shapes", "vision:smoke")


@pytest.mark.parametrize(
    ("task", "preset", "shape"),
    [
        ("vision", "small", (16, 16, 1)),
        ("vision", "cnn-mnist-paper", (32, 32, 1)),
        ("vision", "resnet-cifar", (32, 32, 3)),
        ("vision", "resnet-paper", (64, 64, 3)),
        ("diffusion", "dit-small", (16, 16, 1)),
        ("diffusion", "cifar", (32, 32, 3)),
        ("diffusion", "ffhq-paper", (64, 64, 3)),
    ],
)
def test_a_preset_takes_images_of_its_kind_and_reads_each_once(monkeypatch, task, preset, shape):
    """And nothing is drawn to know what they are."""
    monkeypatch.setattr(Shapes, "images", None)
    given = get_task(task, preset)
    asked = get_task(task, preset, "shapes")
    found = {"vision": vision.SIZES, "diffusion": diffusion.SIZES}[task][preset].on("shapes", preset)
    assert (found.shapes.size, found.shapes.size, found.shapes.channels) == shape
    assert asked.steps == given.steps
    assert asked.digest == found.shapes.digest
    assert f"{shape[0]}×{shape[0]}" in asked.summary
    assert asked.origin == (task, preset, "shapes")
    assert found.images == min(given.steps * given.batch, shapes.MOST // np.prod(shape))


@pytest.mark.parametrize(("task", "preset"), [("vision", "cnn-smoke"), ("diffusion", "smoke")])
def test_presets_learn_from_them(task, preset, monkeypatch):
    monkeypatch.setattr(shapes, "HELD", 64)  # what is held out, and the quality of samples, are not looked at
    task = get_task(task, preset, "shapes?clutter=0&occluders=0&fade=0&classes=4")
    problem = task.problem([0, 1])
    assert problem.train_x.shape == (1, task.batch * task.steps, 16, 16, 1)
    lanes = [Lane(Recipe.named("bf16"), task.lr, seed) for seed in (0, 1)]
    for lane in train(msgspec.structs.replace(with_steps(task, 20), finish=None), lanes).lanes:
        assert lane.train_loss_final < 0.97 * lane.curve_loss[0]


def test_a_folder_of_that_name_is_read_where_its_path_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shapes").mkdir()
    with pytest.raises(ConfigError, match=r"--data: found .*shapes'; accepted: CIFAR-10/100"):
        get_task("vision", "smoke", "./shapes")
