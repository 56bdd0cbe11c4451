"""A rollout can be captured: nothing in it asks a tensor for a number, nor has a shape by its content."""

from functools import partial

import msgspec
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fp4dse.dse import QUANTIZERS, Recipe
from fp4dse.dse.inject import INJECT_NAMES
from fp4dse.dse.noise import NOISE_NAMES
from fp4dse.dse.rollout import ROLLOUT_NAMES
from fp4dse.dse.training import Training
from fp4dse.kernels import native
from fp4dse.kernels.quant.backend import backend
from fp4dse.tasks import Lane, get_task
from fp4dse.tasks.draws import Draws, seed_keys
from fp4dse.tasks.engine import Population
from fp4dse.tasks.rl.carries import Carries
from fp4dse.tasks.rl.chains import Chains
from fp4dse.tasks.rl.edits import Edits
from fp4dse.tasks.rl.presets import _PRESETS
from fp4dse.tasks.rl.walks import Walks
from tests.each import each

replace = msgspec.structs.replace
BY_CONTENT = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "item", "is_nonzero", "equal", "argwhere")
"""Operations of aten that wait for the device, or whose results have a shape that only it knows."""


class Static(TorchDispatchMode):
    """Refuses operations of BY_CONTENT; notes all shapes in their order."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().removeprefix("aten::").partition(".")[0]
        assert name not in BY_CONTENT, f"{name} in a rollout"
        out = function(*args, **(kwargs or {}))
        self.shapes.append((name, tuple(out.shape) if isinstance(out, torch.Tensor) else None))
        return out


def population(asked, preset="smoke", replay="none", record=False):
    smoke = get_task("rl", preset)
    plan = replace(_PRESETS[preset].plan, asked=asked)
    task = replace(smoke, pretrain=None, experience=partial(smoke.experience.func, plan))
    bf16, mxfp4 = Recipe.named("bf16"), ROLLOUT_NAMES["mxfp4-rceil"]
    trainings = [
        Training(inject=INJECT_NAMES["scale+grid"]),
        Training(rollout=mxfp4, tis=2.0, noise=NOISE_NAMES["qerl"], replay=replay),
        Training(rollout=replace(mxfp4, kv_cache=QUANTIZERS["fp8-row"]), noise=NOISE_NAMES["weights"]),
    ]
    return Population(task, [Lane(replace(bf16, training=of), 1e-3, 1) for of in trainings], "cpu", record)


@pytest.fixture
def without_native_code(monkeypatch):
    """The definitions in torch: native code for a CPU takes numbers."""
    monkeypatch.setenv("FP4DSE_EAGER", "1")
    monkeypatch.setattr(native, "takes", lambda _: False)
    native.why_not_native.cache_clear()
    backend.cache_clear()
    yield
    native.why_not_native.cache_clear()
    backend.cache_clear()


@pytest.mark.usefixtures("without_native_code")
@pytest.mark.parametrize("of", [(1,), (2,), (2, "moe-smoke", "router")])
def test_a_rollout_has_no_number_and_no_shape_by_content(of):
    found = population(*of)
    found.train_step(0)  # what is made once is made
    seen = []
    for step in (2, 4):
        found._enter(step)
        with Static() as watched:
            found.experience.collect()
            found.experience.batch()
        seen.append(watched.shapes)
    assert len(seen[0]) > 100
    assert seen[0] == seen[1]


@pytest.mark.usefixtures("without_native_code")
def test_nor_has_what_a_step_records():
    found = population(1, record=True)
    found.train_step(0)
    seen = []
    for step in (1, 3):
        found._enter(step)
        inputs, target = found._batch()
        out, gradient = found.model(inputs), torch.ones_like(found.optimizer.flat)
        with Static() as watched:
            found._record([found.experience.observed(out, target)] * 2, gradient)
        seen.append(watched.shapes)
    assert "index_copy_" in dict(seen[0])
    assert seen[0] == seen[1]


@pytest.mark.usefixtures("without_native_code")
@each("kind", [Chains(2, 4), Walks(2, 4, 6), Edits(2, 4, 3, 6), Carries(2, 4, 2)])
def test_no_kind_of_problems_has_one_either(kind):
    draws, seen = Draws(seed_keys([0, 1]), torch.zeros((), dtype=torch.int64)), []
    for _ in range(2):
        with Static() as watched:
            prompts = kind.prompts(draws, 0, 3)
            kind.is_part(prompts[..., : kind.answer_length])
            kind.is_right(prompts, prompts[..., -kind.answer_length :])
        seen.append(watched.shapes)
        draws.step.add_(1)
    assert seen[0] == seen[1]


def test_it_would_be_noticed():
    with Static(), pytest.raises(AssertionError, match="_local_scalar_dense in a rollout"):
        torch.ones(()).item()
