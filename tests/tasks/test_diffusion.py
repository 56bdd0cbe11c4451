"""Diffusion: what is noised can be denoised, samplers do what their formula says, lanes are alone, and models learn."""

import io
import itertools
import math

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from fp4dse.dse import ConfigError, Recipe
from fp4dse.kernels import LaneNumerics
from fp4dse.tasks import Lane, diffusion, get_task, train
from fp4dse.tasks.data.digits import digits
from fp4dse.tasks.data.images import Images
from fp4dse.tasks.diffusion import frechet, process
from fp4dse.tasks.draws import Draws, fixed_order

SMOKE = ("smoke", "dit-smoke")


def lanes_of(task, names=("bf16",), seeds=(0, 1)):
    return [Lane(Recipe.named(name), task.lr, seed) for name in names for seed in seeds]


def draws(seeds=(3, 4), step=0):
    return Draws(torch.tensor(seeds), torch.tensor(step))


@pytest.mark.parametrize("preset", SMOKE)
@pytest.mark.parametrize("recipe", ["bf16", pytest.param("nvfp4-sr-rht", marks=pytest.mark.slow)])
def test_loss_halves_and_samples_are_drawn(preset, recipe):
    task = get_task("diffusion", preset)
    task = msgspec.structs.replace(task, steps=min(task.steps, 30))
    assert task.metric_name == "fid"
    for lane in train(task, lanes_of(task, (recipe,))).lanes:
        assert lane.train_loss_final < 0.5 * lane.curve_loss[0]
        assert 0 < lane.metrics["fid"] < 1e4
        assert Image.open(io.BytesIO(lane.pictures["samples"])).size == (213, 213)


def test_the_share_of_the_image_falls_from_almost_all_to_almost_nothing():
    shares = process.alpha_bar()
    assert len(shares) == 1000
    assert shares[0] == pytest.approx(1 - 1e-4)
    assert shares[-1] == pytest.approx(4.04e-5, rel=0.01)  # 2006.11239
    assert all(a > b for a, b in itertools.pairwise(shares))


def test_noise_has_the_variance_of_its_time_and_is_of_the_seed():
    x = torch.full((2, 400, 8, 8, 1), 16, dtype=torch.uint8)
    (noisy, times), noise = process.noised(digits, x, None, draws())
    share = torch.tensor(process.alpha_bar(), dtype=torch.float64)[times][:, :, None, None, None]
    assert torch.allclose(noisy.double(), share.sqrt() + (1 - share).sqrt() * noise, atol=1e-6)  # the image is 1
    assert (int(times.min()), int(times.max())) == pytest.approx((0, 999), abs=20)
    (again, _), _ = process.noised(digits, x[:1], None, draws((4,)))
    assert torch.equal(again[0], noisy[1])
    (other, _), _ = process.noised(digits, x, None, draws(step=1))
    assert not torch.equal(other, noisy)


class Oracle:
    """Knows the only image that there is, and so the noise in any other."""

    def __init__(self, image):
        self.image = image

    def __call__(self, inputs):
        x, times = inputs
        share = torch.tensor(process.alpha_bar())[times][:, :, None, None, None]
        return (x - share.sqrt() * self.image) / (1 - share).sqrt()


@pytest.mark.parametrize("eta", [0.0, 1.0])
@pytest.mark.parametrize("steps", [1, 2, 10])
def test_a_model_that_knows_the_noise_is_sampled_to_the_image(eta, steps):
    image = torch.linspace(-0.9, 0.9, 16).view(4, 4, 1)
    found = process.sample(Oracle(image), draws(), (4, 4, 1), 5, steps, eta)
    assert found.shape == (2, 5, 4, 4, 1)
    assert torch.allclose(found, image.expand_as(found), atol=1e-3)


class Gaussian:
    """The best prediction for images N(0, v) in every pixel."""

    def __init__(self, variance):
        self.variance = variance

    def __call__(self, inputs):
        x, times = inputs
        share = torch.tensor(process.alpha_bar())[times][:, :, None, None, None]
        return x * (1 - share).sqrt() / (share * self.variance + 1 - share)


@pytest.mark.parametrize("eta", [0.0, 1.0])
def test_samples_of_a_gaussian_have_its_variance(eta):
    """The mean of 2·128·64 squares of deviation 0.2 has a standard error of 0.04·sqrt(2/16384) = 0.00044; 2 % are
    for steps that are not infinitely small."""
    found = process.sample(Gaussian(0.04), draws(), (8, 8, 1), 128, 1000, eta)
    assert float(found.double().square().mean()) == pytest.approx(0.04, abs=5 * 0.00044 + 0.0008)


def test_samples_are_of_the_seed_and_passes_differ():
    model = Gaussian(0.04)
    found = process.sample(model, draws((3, 4)), (2, 2, 1), 2 * process.PASS, 3)
    assert torch.equal(process.sample(model, draws((4,)), (2, 2, 1), 2 * process.PASS, 3)[0], found[1])
    assert not torch.equal(found[:, : process.PASS], found[:, process.PASS :])


def test_times_of_a_sampler_hold_both_ends():
    assert process.times_of(1) == [999]
    assert process.times_of(2) == [999, 0]
    assert process.times_of(4) == [999, 666, 333, 0]
    assert process.times_of(1000) == list(range(999, -1, -1))


def test_a_step_of_adam_is_that_of_torch():
    ours = [torch.randn(3, 4, generator=torch.Generator().manual_seed(0))]
    theirs = [p.clone().requires_grad_() for p in ours]
    moments, optimizer = [(torch.zeros(3, 4), torch.zeros(3, 4))], torch.optim.Adam(theirs, lr=2e-3)
    for step in range(1, 6):
        gradients = [torch.sin(step * p) for p in ours]
        theirs[0].grad = gradients[0].clone()
        optimizer.step()
        frechet._adam(ours, gradients, moments, step, 2e-3)
        assert torch.equal(ours[0], theirs[0])


def test_the_digits_are_those_that_scikit_learn_loads():
    theirs, ours = load_digits(), digits()
    order = fixed_order(len(theirs.images))
    for name, parts in (
        ("images", (ours.train[..., 0], ours.held_out[..., 0])),
        ("target", (ours.train_labels, ours.held_out_labels)),
    ):
        assert torch.equal(torch.cat(parts), torch.from_numpy(theirs[name])[order].to(parts[0].dtype))


def test_the_classifier_is_always_the_same(monkeypatch):
    """With one number of threads, after a few steps of its training."""
    monkeypatch.setattr(frechet, "STEPS", 20)
    before = torch.get_rng_state()
    found, again = (frechet.reference.__wrapped__(digits) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(found.mean, again.mean)
    assert torch.equal(found.covariance, again.covariance)


def accuracy_of(images: Images, x: torch.Tensor, y: torch.Tensor) -> float:
    """Of the classifier of these images on x, integers [n, H, W, C]."""
    features, head = frechet.classifier(images)
    return (head(features(x.float() * (2 / images.top) - 1).float()).argmax(1) == y).double().mean().item()


def test_the_classifier_knows_digits():
    images = digits()
    assert accuracy_of(images, images.held_out, images.held_out_labels) > 0.95


def test_the_distance_orders_real_images_blurred_ones_and_noise():
    found = frechet.reference(digits)
    real = digits().held_out.float() / 8 - 1
    generator = torch.Generator().manual_seed(0)
    noisy = (real + 0.5 * torch.randn(real.shape, generator=generator)).clamp(-1, 1)
    noise = torch.randn(real.shape, generator=generator).clamp(-1, 1)
    few = real[:1].expand(360, -1, -1, -1)
    distances = [frechet.frechet_distance(found, samples) for samples in (real, noisy, noise)]
    assert distances == sorted(distances)
    assert distances[1] > 2 * distances[0]
    assert frechet.frechet_distance(found, few) > 5 * distances[0]  # one good image again and again
    assert math.isnan(frechet.frechet_distance(found, noise * math.nan))
    assert frechet.frechet_distance(found, digits().train.float() / 8 - 1) < 0.01 * distances[0]


def test_the_distance_is_that_of_two_gaussians():
    torch.manual_seed(0)
    mean, basis = torch.randn(5, dtype=torch.float64), torch.randn(5, 5, dtype=torch.float64)
    samples = torch.randn(50, 1, 1, 5)
    found = frechet.Reference(lambda x: x.flatten(1).double(), mean, basis @ basis.T)
    ours = frechet.frechet_distance(found, samples)
    covariance = torch.cov(samples.flatten(1).double().T)
    product = np.linalg.eigvals((covariance @ found.covariance).numpy())
    theirs = (samples.flatten(1).double().mean(0) - mean).square().sum() + covariance.trace()
    theirs = theirs + found.covariance.trace() - 2 * np.sqrt(product.real).sum()
    assert ours == pytest.approx(float(theirs), rel=1e-6)


def test_images_of_one_class_are_told_apart_by_their_rotation(monkeypatch):
    monkeypatch.setattr(frechet, "STEPS", 100)
    images = digits()
    zeros = torch.zeros_like(images.train_labels)
    one = Images(images.train, zeros, images.held_out, zeros[:360], 1, images.mean, images.std, "0" * 16, 16)
    turns = torch.arange(360) % 4
    turned = torch.stack([image.rot90(int(k)) for image, k in zip(one.held_out, turns, strict=True)])
    assert accuracy_of(one, turned, turns) > 0.6  # .82; by chance .25


def test_large_images_and_oblong_ones_have_features():
    for height, width in ((40, 40), (8, 36), (3, 5)):
        pixels = torch.randint(0, 256, (4, height, width, 3), dtype=torch.uint8)
        given = Images(pixels, torch.arange(4), pixels, torch.arange(4), 4, (0.0,) * 3, (1.0,) * 3, "0" * 16)
        body = frechet._body(given)
        assert body(pixels.float()).shape == (4, frechet.FEATURES)


def test_the_grid_shows_samples_row_by_row_with_lines_between():
    samples = torch.linspace(-1, 1, 10)[:, None, None, None].expand(10, 2, 3, 3)
    pixels = np.asarray(Image.open(io.BytesIO(frechet.sample_sheet(samples, columns=4, least=1))))
    assert pixels.shape == (8, 15, 3)  # 3·(2 + 1) - 1 by 4·(3 + 1) - 1
    assert [int(pixels[0, 4 * i, 0]) for i in range(4)] == [0, 28, 57, 85]
    assert int(pixels[3, 0, 0]) == 113
    assert {int(pixels[0, 3, 0]), int(pixels[2, 0, 0]), int(pixels[7, 14, 0])} == {frechet.GREY}
    assert Image.open(io.BytesIO(frechet.sample_sheet(samples, columns=4, least=31))).size == (45, 24)
    grey = Image.open(io.BytesIO(frechet.sample_sheet(samples[:1, ..., :1] * math.nan, columns=1)))
    assert grey.mode == "L"
    assert grey.getextrema() == (0, 0)


def images(size, channels, n=4):
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (n, size, size, channels), dtype=np.uint8))
    labels = torch.arange(n) % 2
    return Images(pixels, labels, pixels, labels, 2, (128.0,) * channels, (70.0,) * channels, "0" * 16)


@pytest.mark.parametrize(("preset", "size"), [("cifar", 8), ("paper", 8), ("ffhq-paper", 8), ("dit-cifar", 8)])
def test_larger_models_take_a_step(preset, size):
    """On the smallest images that their shape allows."""
    given = images(size, 3)
    model = diffusion.SIZES[preset].model
    start = {name: value.expand(2, *value.shape[1:]).clone() for name, value in model.init(given, [0]).items()}
    built = model.build(start, LaneNumerics([Recipe.named("bf16")] * 2, [0, 0]))
    inputs, noise = process.noised(lambda: given, given.train[None].expand(2, -1, -1, -1, -1), None, draws())
    out = built(inputs)
    assert out.shape == noise.shape
    out.square().mean().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in built.parameters())


def test_presets_of_the_paper_have_its_numbers():
    small, big = (get_task("diffusion", name) for name in ("paper", "ffhq-paper"))
    assert (small.batch, small.lr, small.steps) == (512, 1e-3, 20 * 97)
    assert (big.batch, big.lr, big.steps) == (20, 1e-4, 3 * 3325)
    for task in (small, big):
        with pytest.raises(ConfigError, match="data: found nothing; accepted: a PATH with"):
            task.problem([0])


def test_a_users_images_are_noised_and_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(frechet, "STEPS", 20)
    generator = np.random.default_rng(0)
    for i in range(40):
        Image.fromarray(generator.integers(0, 256, (12, 12, 3), dtype=np.uint8)).save(tmp_path / f"{i}.png")
    task = msgspec.structs.replace(diffusion.on_data("smoke", f"{tmp_path}?size=8"), steps=2)
    (lane,) = train(task, lanes_of(task, seeds=(0,))).lanes
    assert lane.metrics["fid"] > 0
    assert Image.open(io.BytesIO(lane.pictures["samples"])).mode == "RGB"
    with pytest.raises(ConfigError, match=r"training images in .*: found 32; accepted: 64 or more"):
        diffusion.on_data("small", f"{tmp_path}?size=8")
    with pytest.raises(ConfigError, match="height × width of the images: found '9 × 9'; accepted: multiples of 2"):
        diffusion.on_data("smoke", f"{tmp_path}?size=9")
