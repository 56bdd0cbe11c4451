"""A teacher of diffusion: the best denoiser of a body that was drawn, whose predictions students learn."""

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

from fp4dse.dse import Recipe
from fp4dse.tasks import Lane, diffusion, get_task, train
from fp4dse.tasks.data.digits import digits
from fp4dse.tasks.data.shapes import Shapes
from fp4dse.tasks.diffusion import teacher_student
from fp4dse.tasks.diffusion.process import alpha_bar
from fp4dse.tasks.diffusion.teacher_student import HELD_OUT, TRAIN, fitted_head, noisy, predict, taken_apart, taught
from fp4dse.tasks.task import with_steps

MODEL = diffusion.SIZES["dit-smoke"].model
COUNT = 256


@pytest.fixture
def few(monkeypatch):
    """128 noisy images held out, of which neither the tests before know nor those behind."""
    monkeypatch.setattr(teacher_student, "HELD", 128)
    teacher_student._teacher.cache_clear()
    yield
    teacher_student._teacher.cache_clear()


def made(noise, steps=8):
    """The smallest transformer, 8 steps of 32 images, without samples."""
    size = msgspec.structs.replace(diffusion.SIZES["dit-smoke"], steps=steps)
    plain = size.task(name="diffusion", preset="dit-smoke", rev=1, summary="noise", loss=diffusion.mean_squared_error)
    return taught(plain, size.model, size.data, noise)


def test_a_student_that_starts_at_the_teacher_has_no_loss(few):
    lane = Lane(Recipe.named("bf16"), 0.0, 7)
    [alike] = train(made(0.0), [lane]).lanes
    assert 0 <= alike.val_loss < 1e-9
    assert max(alike.curve_loss) < 1e-9
    [away] = train(made(1.0), [lane]).lanes
    assert away.val_loss > 0.1


def test_noisy_images_are_those_of_the_process():
    found = noisy(digits, TRAIN, COUNT)
    share = torch.tensor(alpha_bar(), dtype=torch.float64)[found.times][:, None, None, None]
    images = digits().train[:COUNT].double() / 8 - 1
    assert torch.allclose(found.x.double(), share.sqrt() * images + (1 - share).sqrt() * found.noise, atol=1e-6)
    assert float(found.noise.square().mean()) == pytest.approx(1, abs=0.05)  # of 16,384: 4.5 deviations
    held_out = noisy(digits, HELD_OUT, COUNT)
    assert not torch.equal(found.times, held_out.times)
    assert not torch.equal(found.noise, held_out.noise)
    again = noisy(digits, TRAIN, len(digits().train) + 1)
    assert not torch.equal(again.noise[0], again.noise[-1])  # the same image with noise of its own


def test_no_other_head_of_the_teachers_predicts_the_noise_better(few):
    """By the least squares of numpy on what heads that pass features on say: no sums of ours, nor the ridge."""
    train_, held_out = noisy(digits, TRAIN, COUNT), noisy(digits, HELD_OUT, 128)
    weights = MODEL.init(digits(), [teacher_student.SEED])
    fitted = weights | fitted_head(MODEL, weights, train_)
    width, pixels = weights["head.w"].shape[2], weights["head.w"].shape[1]

    def in_patches(x):
        return x.reshape(len(x), 2, 4, 2, 4).transpose(2, 3).reshape(-1, 16).double().numpy()

    def features(part):
        columns = []
        for first in range(0, width, pixels):
            passes_on = weights | {
                "head.w": torch.eye(width)[None, first : first + pixels],
                "head.b": torch.zeros(1, pixels),
            }
            columns.append(in_patches(predict(MODEL, passes_on, part.x, part.times)))
        return np.concatenate([*columns, np.ones((len(columns[0]), 1))], 1)

    best, *_ = np.linalg.lstsq(features(train_), in_patches(train_.noise), rcond=None)

    def error(part, said):
        return float(np.square(said - in_patches(part.noise)).mean())

    for part in train_, held_out:
        ours = error(part, in_patches(predict(MODEL, fitted, part.x, part.times)))
        theirs = error(part, features(part) @ best)
        assert ours == pytest.approx(theirs, rel=0.02)
        drawn = error(part, in_patches(predict(MODEL, weights, part.x, part.times)))
        assert ours < 0.6 * min(1.0, drawn)  # 1: who predicts no noise


def test_seeds_share_the_teacher_and_start_at_places_of_their_own(few):
    task = made(0.5)
    both, alone, at_it = task.problem([3, 5]), task.problem([5]), made(0.0).problem([3])
    assert both.train_x.shape == (1, COUNT, 65)
    assert both.val_y.shape == (1, 128, 8, 8, 1)
    for name in ("train_x", "train_y", "val_x", "val_y"):
        assert torch.equal(getattr(both, name), getattr(alone, name))
    drawn = MODEL.init(digits(), [3, 5])
    for name, start in both.init.items():
        assert torch.equal(start[1], alone.init[name][0])
        away = start - at_it.init[name]
        assert torch.allclose(away, (0.0 if name.endswith(".b") else 0.5) * drawn[name], atol=1e-6)


def test_a_batch_is_the_noisy_image_its_time_and_the_prediction(few):
    problem = made(0.5).problem([0])
    found = noisy(digits, TRAIN, COUNT)
    (x, times), y = taken_apart(problem.train_x, problem.train_y, None)
    assert torch.equal(x[0], found.x)
    assert torch.equal(times[0], found.times)
    assert torch.equal(y, problem.train_y)
    for said, noise in (y[0], found.noise), (problem.val_y[0], noisy(digits, HELD_OUT, 128).noise):
        assert float((said - noise).square().mean()) < 0.6  # by the fitted head; 1: who predicts no noise


def test_the_data_are_another_problem_for_each_teacher_and_cost_nothing_to_name(monkeypatch):
    monkeypatch.setattr(Shapes, "images", None)
    monkeypatch.setattr(teacher_student, "_teacher", None)
    task, other = get_task("diffusion", "teacher"), get_task("diffusion", "teacher", "shapes")
    digests = {task.digest, other.digest, made(0.5).digest, made(0.25).digest, made(0.5, 9).digest}
    assert len({*digests, get_task("diffusion", "dit-small").digest}) == 6


def test_a_teacher_predicts_noise_in_a_users_images_too(few, tmp_path):
    for i in range(90):
        Image.new("RGB", (8, 8), (i, 2 * i, 40)).save(tmp_path / f"{i}.png")
    task = get_task("diffusion", "teacher", str(tmp_path))
    assert task.summary.startswith("noise in images, ")
    assert task.problem([0]).val_y.shape == (1, 128, 8, 8, 3)


def test_students_learn_and_are_sampled(few):
    task = get_task("diffusion", "teacher")
    (size,) = task.finish.args
    little = msgspec.structs.replace(size, samples=16, sampler=2)
    task = msgspec.structs.replace(with_steps(task, 30), finish=diffusion.partial(diffusion._finish, little))
    lanes = [Lane(Recipe.named(name), task.lr, seed) for name in ("bf16", "nvfp4") for seed in (0, 1)]
    results = [lane for pair in (lanes[:2], lanes[2:]) for lane in train(task, pair).lanes]
    for lane in results:
        assert lane.train_loss_final < 0.5 * lane.curve_loss[0]
        assert lane.metrics["fid"] > 0
        assert lane.pictures["samples"].startswith(b"\x89PNG")
    [alone] = train(task, lanes[3:]).lanes
    assert alone.curve_loss == results[3].curve_loss
    assert alone.val_loss == results[3].val_loss
