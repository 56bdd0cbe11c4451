"""BF16 between the layers: every operation is that of FP32, rounded once, both ways; lanes stay their own."""

import msgspec
import pytest
import torch

from fp4dse.dse import ConfigError, Recipe
from fp4dse.kernels import LaneNumerics, QuantConv2d, QuantLinear, add_bias, lanes, silu
from fp4dse.kernels.ops.affine import affine
from fp4dse.kernels.ops.group_norm import group_norm
from fp4dse.kernels.ops.layer_norm import layer_norm
from fp4dse.kernels.ops.rms_norm import rms_norm
from fp4dse.kernels.ops.rope import rope, rope_tables
from fp4dse.kernels.quant.backend import PLAIN
from fp4dse.sweeps.jobs.rows import lane_id, task_context
from fp4dse.tasks import TASKS, Lane, environment, facts_of, get_task, nn, train
from fp4dse.tasks.backward import backward
from fp4dse.tasks.engine import Population
from fp4dse.tasks.job import Job
from fp4dse.tasks.language.experts import _WeightRows
from fp4dse.tasks.vision.resnet import BatchNorm
from fp4dse.tasks.worker import task_of

BF16 = torch.bfloat16
SAME_MODEL = ("walks-smoke", "edits-smoke", "carries-smoke")
"""That of `rl:smoke`, with other tokens."""
PRESETS = [
    (name, preset)
    for name, presets in TASKS.items()
    for preset in presets
    if preset.endswith("smoke") and preset not in SAME_MODEL
]
"""Of every task."""
SUPERVISED = [name for name, presets in TASKS.items() if presets["smoke"].pretrain is None]


@pytest.fixture
def eager(monkeypatch):
    """The reference: nothing to compile."""
    monkeypatch.setattr(lanes, "backend", lambda device: PLAIN)


def numerics(recipe="bf16", dtype=torch.float32):
    return LaneNumerics([Recipe.named(recipe)] * 3, range(3), dtype=dtype)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gradients(function, g, *inputs):
    """The output, and the gradients of the inputs."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    out = function(*leaves)
    out.backward(g.to(out.dtype).view_as(out))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


X = (3, 4, 6, 6, 8)
OPERATIONS = {
    "silu": (silu, [X]),
    "layer norm": (layer_norm, [X]),
    "group norm": (lambda x: group_norm(x, 4), [X]),
    "batch norm": (lambda x: BatchNorm(randn(3, 8, seed=3), randn(3, 8, seed=4), numerics())(x), [X]),
    "layer norm with gain and shift": (layer_norm, [X, X[:3] + X[4:], X[:3] + X[4:]]),
    "group norm with gain and shift": (lambda x, a, b: group_norm(x, 4, a, b), [X, (3, 4, 8), (3, 4, 8)]),
    "affine": (affine, [(3, 7, 8), (3, 8), (3, 8)]),
    "mean pool": (nn.mean_pool, [X]),
    "upsampled": (nn.upsampled, [X]),
    "rms norm": (lambda x: rms_norm(x, randn(3, 8, seed=3)), [X]),
    "rope": (lambda x: rope(x, *rope_tables(9, 8)), [(5, 9, 8)]),
    "bias": (lambda x: add_bias(x, randn(3, 8, seed=3)), [(3, 7, 8)]),
    "weighed": (lambda x: _WeightRows.apply(x, randn(3, 7, seed=3)), [(3, 7, 8)]),
    "residual": (torch.add, [X, X]),
    "gated": (torch.mul, [X, X]),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_is_that_of_fp32_rounded_once(name):
    function, shapes = OPERATIONS[name]
    inputs = [randn(*shape, seed=i).to(BF16) for i, shape in enumerate(shapes)]
    g = randn(*function(*inputs).shape, seed=9).to(BF16)
    wide = gradients(function, g.float(), *(x.float() for x in inputs))
    for low, exact in zip(gradients(function, g, *inputs), wide, strict=True):
        assert low.dtype == BF16
        assert torch.equal(low, exact.to(BF16))


@pytest.mark.parametrize("recipe", ["bf16", "nvfp4-sr-rht", "quartet", "tetrajet2"])
def test_a_layer_is_that_of_fp32_rounded_once(eager, recipe):
    x, w, b, g = randn(3, 40, 32).to(BF16), randn(3, 24, 32, seed=1), randn(3, 24, seed=2), randn(3, 40, 24).to(BF16)
    results = []
    for dtype in (BF16, torch.float32):
        layer = QuantLinear(w, b, numerics(recipe, dtype=dtype), 2)
        out = gradients(layer, g, x.to(dtype))
        results.append([*out, layer.weight.grad, layer.bias.grad])
    for low, exact in zip(*results, strict=True):
        assert torch.equal(low, exact.to(low.dtype))
    assert [t.dtype for t in results[0]] == [BF16, BF16, torch.float32, torch.float32]


def short(name, preset, steps):
    """From weights as they are drawn: nothing here depends on how good they are."""
    return msgspec.structs.replace(get_task(name, preset), steps=steps, pretrain=None)


@pytest.mark.parametrize(("name", "preset"), PRESETS)
def test_all_that_passes_between_layers_is_bf16(eager, name, preset):
    seen = []

    def look(layer, inputs, output):
        seen.append((layer.layer, "out", output.dtype))
        if output.requires_grad:
            output.register_hook(lambda g: seen.append((layer.layer, "gradient", g.dtype)))

    def look_before(layer, inputs):
        first.setdefault(layer.layer, inputs[0].dtype)

    first: dict = {}
    task = short(name, f"{preset}+bf16", 2)
    p = Population(task, [Lane(Recipe.named("nvfp4"), task.lr, seed) for seed in (0, 1)], "cpu")
    layers = [layer for layer in p.model.modules() if isinstance(layer, (QuantLinear, QuantConv2d))]
    layers = [layer for layer in layers if not layer.place.expert]  # which are multiplied together, not called
    for layer in layers:
        layer.register_forward_hook(look)
        layer.register_forward_pre_hook(look_before)
    loss = backward(task, p.model, p.numerics, p.optimizer, *p._batch())
    assert loss.dtype == torch.float32
    assert {dtype for *_, dtype in seen} == {BF16}
    assert len(seen) == 2 * len(layers)
    others = {dtype for layer, dtype in first.items() if dtype != BF16}
    assert others <= {torch.float32}
    assert sum(dtype != BF16 for dtype in first.values()) <= 2  # images and times as they come


@pytest.mark.parametrize("recipe", ["bf16", "nvfp4"])
def test_inputs_that_a_model_rounds_first_are_gathered_rounded(recipe):
    task = short("regression", "smoke+bf16", 3)
    states = []
    for rounds in (True, False):
        p = Population(
            msgspec.structs.replace(task, rounds_inputs=rounds), [Lane(Recipe.named(recipe), task.lr, 0)] * 2, "cpu"
        )
        assert [of.dtype for of in p._batch()] == [BF16 if rounds else torch.float32, torch.float32]
        for step in range(task.steps):
            p.train_step(step)
        states.append(p.state(task.steps))
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_nothing_prepares_inputs_that_are_kept_rounded():
    tasks = [get_task(name, preset) for name, presets in TASKS.items() for preset in presets if "smoke" in preset]
    assert {task.name for task in tasks if task.rounds_inputs} == {"regression"}
    assert all(task.prepare is None for task in tasks if task.rounds_inputs)


def kept_bytes(name, preset):
    """What a forward pass keeps for the backward pass, parameters apart."""
    task = short(name, preset, 2)
    p = Population(task, [Lane(Recipe.named("nvfp4"), task.lr, seed) for seed in (0, 1)], "cpu")
    own = {parameter.untyped_storage().data_ptr() for parameter in p.model.parameters()}
    kept: dict = {}

    def pack(x):
        if x.is_floating_point() and x.untyped_storage().data_ptr() not in own:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    inputs, targets = p._batch()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        task.loss(p.model(inputs), targets)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize(("name", "preset"), [p for p in PRESETS if p[1] != "gaussian-smoke"])
def test_what_is_kept_for_the_backward_pass_takes_little_more_than_half(eager, name, preset):
    low, wide = kept_bytes(name, f"{preset}+bf16"), kept_bytes(name, preset)
    assert low < 0.62 * wide, (low, wide)


@pytest.mark.heavy
@pytest.mark.parametrize(("name", "recipe"), list(zip(SUPERVISED, ["bf16", "nvfp4-sr-rht"] * 2, strict=True)))
def test_losses_fall(name, recipe):
    task = get_task(name, "smoke+bf16")
    task = msgspec.structs.replace(task, steps=min(task.steps, 40), finish=None)  # no samples are looked at
    for lane in train(task, [Lane(Recipe.named(recipe), task.lr, seed) for seed in (0, 1)]).lanes:
        assert lane.train_loss_final < 0.7 * lane.curve_loss[0]


def test_rows_of_a_preset_with_bf16_are_their_own():
    lane, contexts = Lane(Recipe.named("nvfp4"), 1e-3, 0), []
    for preset in ("small", "small+bf16"):
        task = get_task("language", preset)
        contexts.append(task_context(facts_of(task), environment("cpu", 1)))
        assert task_of(Job("language", preset, [lane])) == task
    assert [context["dtype"] for context in contexts] == ["float32", "bfloat16"]
    assert lane_id(lane, contexts[0]) != lane_id(lane, contexts[1])


def test_a_preset_with_bf16_takes_data_of_the_users(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"Paragraph {i} of a text.\n\n" for i in range(400)))
    task = get_task("language", "smoke+bf16", str(text))
    assert (task.preset, task.dtype) == ("smoke+bf16", "bfloat16")
    assert get_task(*task.origin).digest == task.digest
    assert get_task(*task.origin).dtype == "bfloat16"


def test_an_unknown_preset_is_named_with_its_ending():
    with pytest.raises(ConfigError, match=r"small\+fp8.*each with \+bf16"):
        get_task("vision", "small+fp8")
