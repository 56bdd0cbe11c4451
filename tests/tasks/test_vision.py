"""Vision: every model learns at its smallest size, alone or in company, on digits and on images of the user."""

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

from fp4dse.dse import ConfigError, Recipe
from fp4dse.kernels import LaneNumerics
from fp4dse.tasks import Lane, get_task, train, vision
from fp4dse.tasks.data.images import Images

SMOKE = ("smoke", "resnet-smoke", "cnn-smoke")


def lanes_of(task, names=("bf16",), seeds=(0, 1)):
    return [Lane(Recipe.named(name), task.lr, seed) for name in names for seed in seeds]


@pytest.mark.parametrize("preset", SMOKE)
@pytest.mark.parametrize("recipe", ["bf16", "nvfp4-sr-rht"])
def test_loss_falls_to_three_quarters_and_digits_are_told_apart(preset, recipe):
    task = get_task("vision", preset)
    for lane in train(task, lanes_of(task, (recipe,))).lanes:
        assert lane.train_loss_final < 0.75 * lane.curve_loss[0]
        assert lane.metrics["accuracy"] > 0.4  # by chance 0.1


def images(size, channels, classes, n=4):
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (n, size, size, channels), dtype=np.uint8))
    labels = torch.arange(n) % classes
    return Images(pixels, labels, pixels, labels, classes, (128.0,) * channels, (70.0,) * channels, "0" * 16)


def parameters(preset, size, channels, classes):
    """Of one lane of the preset, on images of that kind."""
    made = vision.SIZES[preset].model.init(images(size, channels, classes), [0])
    return made, sum(value[0].numel() for value in made.values())


def test_models_of_the_paper_have_its_sizes():
    made, count = parameters("resnet-paper", 224, 3, 100)
    assert count == 11_689_512  # ResNet-18 of torchvision, with its 1,000 outputs
    assert made["stem.w"].shape == (1, 64, 7, 7, 3)
    made, _ = parameters("cnn-mnist-paper", 28, 1, 10)
    assert made["hidden0.w"].shape == (1, 128, 3136)
    made, _ = parameters("cnn-paper", 32, 3, 10)
    assert [made[f"{name}.w"].shape[1:] for name in ("hidden0", "hidden1", "head")] == [
        (512, 4096),
        (128, 512),
        (10, 128),
    ]
    steps = {name: get_task("vision", name).steps for name in ("cnn-paper", "cnn-mnist-paper", "resnet-paper")}
    assert steps == {"cnn-paper": 1940, "cnn-mnist-paper": 2340, "resnet-paper": 4940}


@pytest.mark.parametrize(
    ("preset", "size", "channels"),
    [
        ("resnet-cifar", 8, 3),
        ("resnet-paper", 32, 3),
        ("cnn-paper", 32, 3),
        ("cnn-mnist-paper", 28, 1),
        ("vit-paper", 8, 3),
    ],
)
def test_models_of_the_paper_take_a_step(preset, size, channels):
    """On the smallest images that their shape allows."""
    given = images(size, channels, 10)
    model = vision.SIZES[preset].model
    start = {name: value.expand(2, *value.shape[1:]).clone() for name, value in model.init(given, [0]).items()}
    built = model.build(start, LaneNumerics([Recipe.named("bf16")] * 2, [0, 0]))
    x = given.train[None].expand(2, -1, -1, -1, -1).to(torch.float32) / 128 - 1
    out = built(x)
    assert out.shape[:2] == (2, 4)
    out.square().mean().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in built.parameters())


def test_presets_without_data_of_their_own_say_what_they_need():
    for name in ("vit-paper", "resnet-paper", "resnet-cifar", "cnn-paper", "cnn-mnist-paper"):
        task = get_task("vision", name)
        for ask in (lambda task=task: task.digest, lambda task=task: task.problem([0])):
            with pytest.raises(ConfigError, match=r"data: found nothing; accepted: a PATH with"):
                ask()


def test_inputs_have_mean_0_and_variance_1():
    task = get_task("vision", "smoke")
    problem = task.problem([0])
    x, y = task.prepare(torch.cat([problem.train_x, problem.val_x], 1), problem.train_y, None)
    assert abs(float(x.double().mean())) < 1e-6
    assert abs(float(x.double().var()) - 1) < 1e-6
    assert y is problem.train_y


def write(folder, n, size, classes=("a", "b")):
    """Images whose class is their brightness."""
    generator = np.random.default_rng(0)
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for i in range(n):
            pixels = generator.integers(100 * number, 100 * number + 100, (size, size, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i}.png")


@pytest.mark.parametrize("preset", SMOKE)
def test_a_users_images_are_learnt(tmp_path, preset):
    write(tmp_path, 30, 12)
    task = vision.on_data(preset, f"{tmp_path}?size=8")
    task = msgspec.structs.replace(task, steps=25)
    for lane in train(task, lanes_of(task)).lanes:
        assert lane.metrics["accuracy"] == 1
    assert task.digest != get_task("vision", preset).digest


def test_epochs_are_of_the_users_data(tmp_path):
    write(tmp_path, 400, 4)
    assert vision.on_data("cnn-paper", str(tmp_path)).steps == 20 * (640 // 512)


def test_data_that_a_model_cannot_take_is_refused(tmp_path):
    write(tmp_path / "odd", 30, 6)
    with pytest.raises(ConfigError, match="height × width of the images: found '6 × 6'; accepted: multiples of 4"):
        vision.on_data("smoke", str(tmp_path / "odd"))
    write(tmp_path / "few", 5, 8)
    with pytest.raises(
        ConfigError, match=r"training images in .*: found 8; accepted: 32 or more, a batch of vision:smoke"
    ):
        vision.on_data("smoke", str(tmp_path / "few"))
    write(tmp_path / "one", 40, 8, ("a",))
    with pytest.raises(ConfigError, match=r"classes in .*: found 1; accepted: 2 or more"):
        vision.on_data("smoke", str(tmp_path / "one"))
