"""A teacher's classes: a student is measured against what a model of its own shape says of procedural images."""

import math

import msgspec
import pytest
import torch
from PIL import Image

from fp4dse.dse import Recipe
from fp4dse.tasks import Lane, get_task, train, vision
from fp4dse.tasks.data import shapes
from fp4dse.tasks.data.shapes import Shapes
from fp4dse.tasks.task import with_steps
from fp4dse.tasks.vision import teacher_student
from fp4dse.tasks.vision.teacher_student import SCALE, agrees, divergence, taught

DATA = "shapes?classes=6"


@pytest.fixture
def few(monkeypatch):
    """128 held-out images, of which neither the tests before know nor those behind."""
    remembered = shapes.load_shapes, teacher_student._teacher
    monkeypatch.setattr(shapes, "HELD", 128)
    for made_once in remembered:
        made_once.cache_clear()
    yield
    for made_once in remembered:
        made_once.cache_clear()


def made(noise):
    """The smallest transformer, 4 steps of 32 images."""
    size = msgspec.structs.replace(vision.SIZES["smoke"], steps=4).on(DATA, "smoke")
    plain = size.task(
        name="vision",
        preset="smoke",
        rev=1,
        summary="images",
        prepare=lambda x, y, _: ((x.float() - 128) / 70, y),
        loss=divergence,
    )
    return taught(plain, size.model, size.data, noise)


def test_a_student_that_starts_at_the_teacher_has_no_loss(few):
    [alike] = train(msgspec.structs.replace(made(0.0), steps=1), [Lane(Recipe.named("bf16"), 0.0, 7)]).lanes
    assert 0 <= alike.val_loss < 1e-4  # the teacher's head is not rounded to BF16
    assert alike.metrics == {"accuracy": 1.0}
    [away] = train(msgspec.structs.replace(made(1.0), steps=1), [Lane(Recipe.named("bf16"), 0.0, 7)]).lanes
    assert away.val_loss > 0.1
    assert away.metrics["accuracy"] < 0.9


def test_the_teachers_logits_have_mean_0_and_the_stated_deviation(few):
    problem = made(0.5).problem([0])
    assert problem.val_y.shape == (1, 128, 6)
    assert problem.train_y.shape == (1, 128, 6)
    assert problem.val_y.mean((0, 1)).abs().max() < 1e-4
    assert float(problem.val_y.std()) == pytest.approx(SCALE, rel=1e-4)


def test_seeds_share_the_teacher_and_start_at_places_of_their_own(few):
    task = made(0.5)
    both, alone, at_it = task.problem([3, 5]), task.problem([5]), made(0.0).problem([3])
    assert torch.equal(both.val_y, alone.val_y)
    for name, start in both.init.items():
        assert torch.equal(start[1], alone.init[name][0])
        if name.endswith(".w"):
            away = [start[i] - at_it.init[name][0] for i in (0, 1)]
            assert not torch.equal(*away)
            drawn = vision.SIZES["smoke"].model.init(vision.SIZES["smoke"].on(DATA, "smoke").data(), [3, 5])[name]
            assert torch.allclose(torch.stack(away), 0.5 * drawn, atol=1e-5)


def test_divergence_is_that_of_probabilities():
    out, teacher = torch.tensor([[[0.0, 0.0], [3.0, 3.0]]]), torch.tensor([[[math.log(3), 0.0], [1.0, 1.0]]])
    expected = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    assert torch.allclose(divergence(out, teacher), torch.tensor([[expected, 0.0]]), atol=1e-6)
    assert agrees(torch.tensor([[[1.0, 2.0], [2.0, 1.0]]]), teacher).tolist() == [[0.0, 1.0]]


def test_the_data_are_another_problem_for_each_teacher_and_cost_nothing_to_name(monkeypatch):
    monkeypatch.setattr(Shapes, "images", None)
    task, other = get_task("vision", "teacher"), get_task("vision", "teacher", "shapes?noise=10")
    assert len({task.digest, other.digest, made(0.5).digest, made(0.25).digest}) == 4
    assert task.digest == get_task("vision", "teacher", "shapes").digest
    assert task.digest != get_task("vision", "medium", "shapes?classes=64&clutter=20&occluders=1&noise=4").digest


def test_a_teacher_gives_classes_to_a_users_images_too(tmp_path):
    for name, shade in ("dark", 40), ("light", 200):
        (tmp_path / name).mkdir()
        for i in range(45):
            Image.new("L", (8, 8), shade + i).save(tmp_path / name / f"{i}.png")
    task = get_task("vision", "teacher", str(tmp_path))
    assert task.summary.startswith("images, ")
    assert task.digest not in {get_task("vision", "teacher").digest, get_task("vision", "small", str(tmp_path)).digest}
    problem = task.problem([0])
    assert problem.train_y.shape == (1, 72, 2)
    assert float(problem.val_y.std()) == pytest.approx(SCALE, rel=1e-3)


def test_students_learn(few):
    task = with_steps(get_task("vision", "teacher"), 30)
    lanes = [Lane(Recipe.named(name), task.lr, seed) for name in ("bf16", "nvfp4") for seed in (0, 1)]
    for pair in lanes[:2], lanes[2:]:
        for lane in train(task, pair).lanes:
            assert lane.train_loss_final < 0.5 * lane.curve_loss[0]
