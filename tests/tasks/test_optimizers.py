"""Lane optimizers are the published ones, lane by lane; every number is a lane's, and neighbours do not matter."""

import math
from collections import namedtuple

import msgspec
import pytest
import torch
from torch import nn

from fp4dse.dse import ConfigError, Recipe
from fp4dse.dse.optimizer import SGD, AdamW, StableSPAM
from fp4dse.dse.schedule import Constant, Cosine, Linear, Triangle
from fp4dse.dse.training import Training
from fp4dse.kernels import LaneNumerics
from fp4dse.tasks import Lane, get_task, train
from fp4dse.tasks.backward import backward, batch_part
from fp4dse.tasks.draws import Draws
from fp4dse.tasks.engine import Population
from fp4dse.tasks.optimizers import KINDS, LaneOptimizer, Numbers, decays, make_optimizer
from fp4dse.tasks.optimizers.hyperparameters import schedule_factor

replace = msgspec.structs.replace


TASK = replace(get_task("vision", "smoke"), steps=12)
SMALL = replace(get_task("regression", "smoke"), steps=8)


def lane(seed=0, lr=1e-2, recipe="nvfp4", **training) -> Lane:
    return Lane(replace(Recipe.named(recipe), training=Training(**training)), lr, seed)


class Toy(nn.Module):
    """A product's weight, which decays, and another parameter, which does not; lane axis first."""

    def __init__(self, lanes: int) -> None:
        super().__init__()
        self.product = nn.Module()
        self.product.weight = nn.Parameter(torch.randn(lanes, 3, 4))
        self.product.place = None
        self.bias = nn.Parameter(torch.randn(lanes, 5))


def numbers(optimizer, weight_decay=0.0, beta1=0.9, beta2=0.95, clip=math.inf, loss_scale=1.0, eps=1e-8) -> Numbers:
    return Numbers(optimizer, weight_decay, beta1, beta2, eps, clip, loss_scale)


def run(of_lanes, gradients, lr=0.1, lr_factors=None):
    """The flat weights before and after each step. gradients: [steps, L, P]."""
    torch.manual_seed(0)
    model = Toy(len(of_lanes))
    made = LaneOptimizer(model, torch.full((len(of_lanes),), lr), of_lanes, lr_factors or [1.0] * len(gradients))
    seen = [made.flat.clone()]
    for step, gradient in enumerate(gradients):
        made.step(gradient, torch.ones(len(of_lanes), dtype=torch.bool), torch.tensor([step]))
        seen.append(made.flat.clone())
    return model, seen


def gradients(steps, lanes, seed=1):
    return torch.randn(steps, lanes, 17, generator=torch.Generator().manual_seed(seed))


def order(model):
    """Names in the order of the flat tensor, with sizes."""
    return [(name, p[0].numel()) for name, p in model.named_parameters()]


TORCH = {
    "adamw": (AdamW(), lambda p, n: torch.optim.AdamW(p, lr=0.1, betas=(n.beta1, n.beta2), eps=n.eps)),
    "sgd": (SGD(momentum=0.8), lambda p, n: torch.optim.SGD(p, lr=0.1, momentum=0.8)),
}


@pytest.mark.parametrize("name", TORCH)
def test_updates_are_those_of_torch_and_only_weights_of_products_decay(name):
    optimizer, make = TORCH[name]
    lanes = [numbers(optimizer, 0.1), numbers(optimizer, 0.0, beta2=0.999), numbers(optimizer, 0.3, beta1=0.5)]
    model, seen = run(lanes, gradients(6, 3))
    for i, n in enumerate(lanes):
        twins = {k: seen[0][i].split([s for _, s in order(model)])[j].clone() for j, (k, _) in enumerate(order(model))}
        twins = {k: nn.Parameter(v) for k, v in twins.items()}
        groups = [
            {"params": [p], "weight_decay": n.weight_decay if k == "product.weight" else 0.0} for k, p in twins.items()
        ]
        theirs = make(groups, n)
        for gradient in gradients(6, 3):
            for p, g in zip(twins.values(), gradient[i].split([s for _, s in order(model)]), strict=True):
                p.grad = g.clone()
            theirs.step()
        expected = torch.cat([p.detach() for p in twins.values()])
        assert torch.allclose(seen[-1][i], expected, rtol=1e-5, atol=1e-6)


def stable_spam(weights, grads, o: StableSPAM, n: Numbers, lr):
    """One tensor, in float64, step by step as in the released code; the first step is one."""
    top = norm = square = 0.0
    m, v, t = torch.zeros_like(weights), torch.zeros_like(weights), 0
    for step, g in enumerate(grads, 1):
        t += 1
        top = o.theta * top + (1 - o.theta) * g.abs().max()
        limit = top / (1 - o.theta**t)
        g = torch.where(g.abs() > limit, g / g.abs().max() * limit, g)
        norm = o.gamma1 * norm + (1 - o.gamma1) * g.norm()
        square = o.gamma2 * square + (1 - o.gamma2) * g.norm() ** 2
        g = g / g.norm() * (norm / (1 - o.gamma1**t)) / ((square / (1 - o.gamma2**t)) ** 0.5 + n.eps)
        if step % o.reset == 0:
            t = 1
        m, v = n.beta1 * m + (1 - n.beta1) * g, n.beta2 * v + (1 - n.beta2) * g * g
        weights = weights - lr * (m / (1 - n.beta1**t)) / ((v / (1 - n.beta2**t)) ** 0.5 + n.eps)
        if step % o.reset == 0:
            m, v = torch.zeros_like(weights), torch.zeros_like(weights)
    return weights


def test_stable_spam_clips_normalises_and_forgets_as_published():
    kinds = [StableSPAM(reset=4), StableSPAM(theta=0.9, gamma1=0.85, gamma2=0.99, reset=100), StableSPAM(reset=1)]
    lanes = [numbers(kind, beta2=0.999) for kind in kinds]
    drawn = gradients(10, len(lanes))
    drawn[5] *= 30  # a spike
    model, seen = run(lanes, drawn)
    for i, n in enumerate(lanes):
        at = 0
        for _, size in order(model):
            part = slice(at, at + size)
            expected = stable_spam(seen[0][i, part].double(), drawn[:, i, part].double(), kinds[i], n, 0.1)
            assert torch.allclose(seen[-1][i, part].double(), expected, rtol=1e-4, atol=1e-5)
            at += size


def test_the_first_step_of_stable_spam_normalises_every_tensor_to_one():
    """The mean of Adam is then a tenth of it."""
    torch.manual_seed(0)
    model = Toy(2)
    made = LaneOptimizer(model, torch.ones(2), [numbers(StableSPAM())] * 2, [1.0])
    gradient = 100 * gradients(1, 2)[0]
    made.step(gradient, torch.ones(2, dtype=torch.bool), torch.tensor([0]))
    means = made.kept["mean"].split(made.sizes, 1)
    for i, (mean, part) in enumerate(zip(means, gradient.split(made.sizes, 1), strict=True)):
        assert torch.allclose(mean.norm(dim=1), torch.full((2,), 0.1), rtol=1e-5)
        assert torch.allclose(made.kept["top"][:, i], part.abs().amax(1) / 1000)


def test_the_gradient_of_a_lane_is_clipped_by_its_own_norm():
    drawn = gradients(1, 3)
    lanes = [numbers(SGD(), clip=c) for c in (1.0, math.inf, 1e6)]
    _, seen = run(lanes, drawn, lr=1.0)
    moved = seen[0] - seen[1]
    assert moved[0].norm() == pytest.approx(1.0, rel=1e-5)
    assert torch.allclose(moved[0], drawn[0, 0] / drawn[0, 0].norm(), atol=1e-6)
    assert torch.allclose(moved[1:], drawn[0, 1:], atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_lane_has_the_same_bits_in_any_company_and_dead_ones_keep_theirs(kind):
    lanes = [
        numbers(kind(), 0.0),
        numbers(kind(), 0.2, beta2=0.99, clip=1.0),
        numbers(kind(), 0.0, beta1=0.8, loss_scale=8.0),
    ]
    drawn = gradients(5, 3)
    _, together = run(lanes, drawn)
    torch.manual_seed(0)
    start = Toy(3)
    for chosen in ([1, 0], [2, 1]):
        model = Toy(2)
        for p, q in zip(model.parameters(), start.parameters(), strict=True):
            p.data = q.data[chosen].clone()
        made = LaneOptimizer(model, torch.full((2,), 0.1), [lanes[i] for i in chosen], [1.0] * 5)
        alive = torch.tensor([True, True])
        for step in range(5):
            made.step(drawn[step, chosen], alive, torch.tensor([step]))
        assert torch.equal(made.flat, together[-1][chosen])
        tensors = {"weights": made.flat, **made.state()}
        dead = {name: value[0].clone() for name, value in tensors.items()}
        made.step(torch.full_like(drawn[0, chosen], math.nan), torch.tensor([False, True]), torch.tensor([4]))
        assert all(torch.equal(value[0], dead[name]) for name, value in tensors.items())
        assert all(len(value) == 2 for value in tensors.values())


def test_products_of_a_model_decay_and_its_biases_and_positions_do_not():
    population = Population(TASK, [lane(0), lane(1)], "cpu")
    flags = dict(zip([name for name, _ in population.model.named_parameters()], decays(population.model), strict=True))
    assert {name for name, flag in flags.items() if flag} == {name for name in flags if name.endswith(".weight")}
    assert not flags["position"]


def test_what_a_recipe_leaves_open_is_the_tasks():
    task = replace(TASK, weight_decay=0.1, clip=1.0)
    population = Population(task, [lane(), lane(weight_decay=0.0, clip=2.0, beta1=0.5)], "cpu")
    assert population.optimizer.weight_decay.flatten().tolist() == pytest.approx([0.1, 0.0])
    assert population.optimizer.clip.flatten().tolist() == [1.0, 2.0]
    assert population.optimizer.columns["b1"].flatten().tolist() == pytest.approx([0.9, 0.5])


@pytest.mark.parametrize("name", ["adamw", "sgd", "stable-spam", "muon"])
def test_losses_fall_with_every_optimizer(name):
    kind = next(kind for kind in KINDS if kind().__struct_config__.tag == name)
    task = get_task("regression", "smoke")
    lr = 3e-2 if name == "sgd" else task.lr
    for result in train(task, [lane(seed, lr, optimizer=kind()) for seed in (0, 1)]).lanes:
        assert result.train_loss_final < 0.8 * result.curve_loss[0]


def test_a_loss_scale_is_taken_out_of_the_gradients_again():
    """Exactly, where it is a power of two and nothing falls out of FP32's range: NVFP4's tensor scale follows."""
    with_scale, without = train(SMALL, [lane(0, loss_scale=4096.0), lane(0)]).lanes
    assert with_scale.train_loss_final == without.train_loss_final


def gradient_of(parts: int, recipe: str) -> tuple[torch.Tensor, torch.Tensor]:
    task = get_task("vision", "smoke")
    lanes = [lane(seed, recipe=recipe, accumulate=parts) for seed in (0, 1)]
    problem = task.problem([0, 1])
    numerics = LaneNumerics([one.recipe for one in lanes], [0, 1], steps=task.steps)
    model = task.model({k: v.clone() for k, v in problem.init.items()}, numerics)
    optimizer = make_optimizer(model, lanes, task)
    x, y = (data[:, :32].expand(2, *[-1] * (data.dim() - 1)) for data in (problem.train_x, problem.train_y))
    draws = Draws(numerics.seeds, numerics.step)
    loss = backward(task, model, numerics, optimizer, *task.prepare(x, y, draws))
    return loss, optimizer.gradient()


def test_a_batch_in_parts_is_the_same_batch():
    whole, parts = gradient_of(1, "bf16"), gradient_of(4, "bf16")
    assert torch.allclose(whole[0], parts[0], rtol=1e-6)
    error = (whole[1] - parts[1]).norm() / whole[1].norm()
    assert 0 < error < 5e-3  # gradients of a loss are rounded to BF16 at another size


def test_a_task_may_want_parts_and_a_recipe_more_of_them():
    problem, numerics = TASK.problem([0]), LaneNumerics([Recipe.named("bf16")], [0])
    model = TASK.model({k: v.clone() for k, v in problem.init.items()}, numerics)
    for wanted, own, parts in ((1, 1, 1), (4, 1, 4), (4, 2, 4), (4, 8, 8)):
        task = msgspec.structs.replace(TASK, parts=wanted)
        assert make_optimizer(model, [lane(0, accumulate=own)], task).accumulate == parts


def test_the_papers_language_model_fits_with_its_vocabulary():
    task = get_task("language", "paper")
    logits = task.batch // task.parts * 128 * 32_000 * 4
    assert task.batch == 4096
    assert task.eval_rows == task.batch // task.parts
    assert 4 * logits < 40 * 2**30


def test_parts_of_a_batch_draw_random_bits_of_their_own():
    recipe = Recipe.named("nvfp4-sr-rht")
    numerics = LaneNumerics([recipe] * 2, [0, 0])
    torch.manual_seed(0)
    g, w = torch.randn(1, 32, 32).repeat(2, 1, 1), torch.randn(1, 32, 32).repeat(2, 1, 1)
    first = numerics.gemm("wgrad", 0, g, 1, w, 1)
    numerics.part = 1
    assert not torch.equal(first, numerics.gemm("wgrad", 0, g, 1, w, 1))


def test_what_slots_keep_moves_once_a_step_and_not_with_every_part():
    recipe = Recipe.named("tetrajet-qema")
    seen = []
    for parts in ([0], [0, 1, 2]):
        numerics = LaneNumerics([recipe] * 2, [0, 1])
        for step in range(2):
            numerics.step.fill_(step)
            for part in parts:
                numerics.part = part
                numerics.forward(0, torch.ones(2, 8, 32), torch.full((2, 4, 32), float(step)))
        seen.append(numerics.slots["fprop.w"].state["average 0"].clone())
    assert torch.equal(*seen)


def test_a_batch_that_cannot_be_cut_is_refused_before_training():
    with pytest.raises(ConfigError, match=r"training.accumulate: found 64; accepted: a divisor of the batch of 32"):
        Population(TASK, [lane(accumulate=64), lane(accumulate=64)], "cpu")


def test_any_nest_of_tensors_is_cut_along_the_batch():
    x = torch.arange(12).view(2, 6)
    got = batch_part((x, {"a": x[:, :, None]}), 1, 3)
    assert got[0].tolist() == [[2, 3], [8, 9]]
    assert got[1]["a"].shape == (2, 2, 1)
    named = namedtuple("Named", "first second")
    assert batch_part(named(x, [x]), 2, 3).second[0].tolist() == [[4, 5], [10, 11]]


def test_numbers_of_steps_beyond_the_table_are_written_when_they_are_due(monkeypatch):
    of_lanes = [numbers(AdamW(), beta2=0.99), numbers(AdamW(), beta1=0.5)]
    whole = LaneOptimizer(Toy(2), torch.ones(2), of_lanes, [1 / (step + 1) for step in range(10)])
    monkeypatch.setattr("fp4dse.tasks.optimizers.lane_optimizer.TABLE_STEPS", 4)
    parts = LaneOptimizer(Toy(2), torch.ones(2), of_lanes, whole.lr_factors)
    assert len(parts.table) == 4
    for step in (0, 3, 4, 7, 9, 2):
        parts.prepare(step)
        assert torch.equal(parts.table[step % 4], whole.table[step])


def test_learning_rates_rise_and_fall_as_scheduled():
    schedules = Constant(0.1), Linear(0.1, 0.2), Cosine(0.1, 0.2)
    constant, linear, cosine = ([schedule_factor(s, step, 100) for step in range(100)] for s in schedules)
    for factors in (constant, linear, cosine):
        assert factors[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert constant[10:] == [1.0] * 90
    t = torch.arange(91, dtype=torch.float64)[1:] / 91
    assert linear[10:] == pytest.approx((0.2 + 0.8 * (1 - t)).tolist())
    assert cosine[10:] == pytest.approx((0.2 + 0.4 * (1 + torch.cos(math.pi * t))).tolist())


def test_a_triangle_stands_behind_a_cosine():
    """FNT: up to the peak in the middle, back to the floor in the last step, with the same slope."""
    of = Triangle(warmup=0.1, floor=0.2, share=0.2, peak=0.6)
    factors = [schedule_factor(of, step, 50) for step in range(50)]
    assert factors[:40] == [schedule_factor(Cosine(0.1, 0.2), step, 40) for step in range(40)]
    assert factors[40:] == pytest.approx([0.28, 0.36, 0.44, 0.52, 0.6, 0.52, 0.44, 0.36, 0.28, 0.2])
    assert schedule_factor(Triangle(share=0.0), 49, 50) == schedule_factor(Cosine(), 49, 50)


@pytest.mark.parametrize("warmup", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_short_trainings_have_learning_rates_too(warmup, steps):
    for schedule in (Constant(warmup), Linear(warmup), Cosine(warmup)):
        assert all(0 < schedule_factor(schedule, step, steps) <= 1 for step in range(steps))


def test_cosine_without_warm_up_is_that_of_torch():
    parameter = nn.Parameter(torch.ones(1))
    theirs = torch.optim.SGD([parameter], lr=1.0)
    annealing = torch.optim.lr_scheduler.CosineAnnealingLR(theirs, T_max=50, eta_min=0.1)
    for step in range(50):
        assert schedule_factor(Cosine(floor=0.1), step, 50) == pytest.approx(theirs.param_groups[0]["lr"])
        theirs.step()
        annealing.step()
