"""How often each method sends its calibration data through a model, which is nearly all that fitting takes."""

from collections import Counter

import msgspec
import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

from fp4dse.dse import recipe_from_dict
from fp4dse.kernels import QuantLinear
from fp4dse.tasks import Lane, get_task
from fp4dse.tasks.fitted import fit
from fp4dse.tasks.fitted.methods import METHODS

SMOKE = get_task("finetune", "smoke")
SAMPLES = 32


@pytest.fixture
def passes(monkeypatch):
    """Fits by a method; (layer's number of inputs and outputs, with gradients) -> passes over all calibration data.
    Evaluations are left out."""
    task = msgspec.structs.replace(SMOKE, pretrain=lambda seeds, _device: SMOKE.problem(seeds).init)
    monkeypatch.setattr(fit, "_loss", lambda *_: 0.0)

    def of(method):
        found = Counter()

        def count(module, args, _output):
            if isinstance(module, QuantLinear):
                tokens = args[0].numel() // args[0].shape[-1]
                found[(*module.weight.shape[1:], torch.is_grad_enabled())] += tokens

        rotation = "hadamard32" if method == "mr-gptq" else "none"
        sides = {side: {"g": "bf16", other: "bf16"} for side, other in (("dgrad", "w"), ("wgrad", "x"))}
        recipe = recipe_from_dict({"fprop": {"x": "nvfp4", "w": "nvfp4", "rotation": rotation}, **sides})
        handle = register_module_forward_hook(count)
        try:
            fit.fit_weights(task, Lane(recipe, 1e-3, 0), method, SAMPLES)
        finally:
            handle.remove()
        a_pass = SAMPLES * task.tokens // (task.steps * task.batch)
        return {layer: tokens / a_pass for layer, tokens in found.items()}

    return of


@pytest.mark.parametrize("method", METHODS)
def test_layer_by_layer_all_goes_through_the_model_once_for_each(passes, method):
    found = passes(method)
    assert len(found) == 5, "four layers of a block, and the head"
    assert all(count == (0 if with_gradients else 4) for (*_, with_gradients), count in found.items())


def test_block_ap_takes_two_passes_forwards_and_two_of_training_through_each_block(passes):
    found = passes("block-ap")
    assert len(found) == 8, "the head is left out"
    assert set(found.values()) == {2.0}
    assert sum(with_gradients for *_, with_gradients in found) == 4
