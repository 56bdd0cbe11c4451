"""What is kept for the backward pass: inputs of blocks whose inside is made again, whatever quantizers remember or
draw, and codes in place of decoded activations. Neither changes a bit of training."""

import json
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from fp4dse import cli
from fp4dse.dse import ConfigError, Quantizer, Recipe, recipe_from_dict, recipe_to_dict
from fp4dse.dse.scale import TensorScale
from fp4dse.kernels import LaneNumerics
from fp4dse.kernels.quant.operand.records import Journal
from fp4dse.sweeps.jobs.rows import lane_id, task_context
from fp4dse.tasks import Lane, environment, facts_of, get_task
from fp4dse.tasks.bench import kept
from fp4dse.tasks.bench.kept import kept_for_backward
from fp4dse.tasks.engine import Population
from fp4dse.tasks.job import Job
from fp4dse.tasks.language.decoder import Decoder
from fp4dse.tasks.task import with_steps
from fp4dse.tasks.worker import task_of

STEPS = 4


def forward(amax: str, steps: float = 1.0) -> Recipe:
    """Stochastic gradients, and an NVFP4 forward pass scaled by these maxima."""
    q = replace(Quantizer.named("nvfp4"), tensor_scale=TensorScale(amax=amax, steps=steps))
    base = Recipe.named("nvfp4-sr-rht")
    return replace(base, fprop=replace(base.fprop, x=q, w=q))


def with_more(base: str, **more) -> Recipe:
    return recipe_from_dict({**recipe_to_dict(Recipe.named(base)), **more})


FROM_FORWARD = {"wgrad": recipe_to_dict(Recipe.named("nvfp4-sr-rht"))["wgrad"] | {"source": "forward"}}
HELD = {"like": "nvfp4", "tensor_scale": {"amax": "held", "steps": 2}}
RECIPES = {
    "nearest": Recipe.named("nvfp4"),
    "stochastic, random Hadamard": Recipe.named("nvfp4-sr-rht"),
    "held maxima": forward("held", 2),
    "previous maxima": forward("previous"),
    "history of maxima": forward("history", 3),
    "feedback": forward("feedback"),
    "moving averages": Recipe.named("tetrajet-qema"),
    "channels": Recipe.named("tetrajet2-outcontrol"),
    "attention core": with_more("nvfp4-sr", attention={"scores": {"q": HELD, "k": HELD}}),
    "rules for layers": with_more("nvfp4-sr", layers=[{"kind": "down", "fprop.x": HELD, "fprop.w": HELD}]),
}
"""What quantizers draw or carry from step to step."""


CARRIES = ["previous maxima", "history of maxima", "moving averages"]
"""Those that a second pass would find changed."""


def trained(preset: str, recipe: Recipe, *, counting: bool = False, device: str = "cpu") -> Population:
    """Two lanes after a few steps; on a GPU the last ones are replayed."""
    p = Population(
        with_steps(get_task("language", preset), STEPS), [Lane(recipe, 1e-2, seed) for seed in (0, 1)], device
    )
    p.numerics.counting = counting
    for step in range(STEPS):
        p.train_step(step)
    return p


def same(preset: str, recipe: Recipe, ending: str = "+recompute", **more: Any) -> bool:
    """True if all that further training depends on has the same bits with this ending as without."""
    plain, again = (trained(preset + end, recipe, **more).state(STEPS) for end in ("", ending))
    return plain.keys() == again.keys() and all(torch.equal(plain[name], again[name]) for name in plain)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", RECIPES)
def test_a_training_has_the_same_bits(name, device):
    assert same("smoke", RECIPES[name], device=device)


@pytest.mark.parametrize("name", CARRIES)
def test_without_the_journal_it_would_not(monkeypatch, name):
    monkeypatch.setattr(Journal, "mode", property(lambda _: "", lambda *_: None), raising=False)
    assert not same("smoke", RECIPES[name])


def test_so_have_experts_and_bf16_between_layers():
    assert same("moe-smoke+bf16", RECIPES["held maxima"])


PACKED = {
    "mxfp4": Recipe.named("hopper-moe-fp4"),
    "nvfp4, rotated": with_more("nvfp4-sr-rht", **FROM_FORWARD),
    "held maxima": replace(forward("held", 2), wgrad=replace(forward("held").wgrad, source="forward")),
    "stochastic, of what was rounded": Recipe.named("tetrajet"),
    "tiles": with_more("nvfp4", fprop={"x": "nvfp4-2d", "w": "nvfp4-2d"}, **FROM_FORWARD),
    "mxfp8": with_more("nvfp4", fprop={"x": "mxfp8", "w": "mxfp8"}, **FROM_FORWARD),
    "converted": with_more("hopper-moe-fp4", wgrad={"g": "fp8-1x128", "x": "fp8-1x128", "source": "converted"}),
}
"""Weight gradients of the forward pass's copy."""


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", PACKED)
def test_a_training_that_keeps_codes_has_the_same_bits(name, device):
    assert same("smoke", PACKED[name], "+packed", device=device)


@pytest.mark.gpu
def test_on_a_gpu_codes_are_kept_where_a_kernel_writes_them():
    """Of tiles there is none, which is a reason; steps are captured as without."""
    reasons = {name: trained("smoke+packed", PACKED[name], device="cuda").numerics.fallbacks for name in PACKED}
    assert {name for name, found in reasons.items() if any("kept as codes" in r for r in found)} == {"tiles"}


def test_codes_go_with_bf16_experts_recomputation_and_rules():
    assert same("moe-smoke+bf16", PACKED["mxfp4"], "+packed+recompute")
    rules = [{"kind": "down", "fprop.x": "nvfp4"}, {"kind": "qkv", "fprop": "bf16", "dgrad": "bf16", "wgrad": "bf16"}]
    assert same("smoke", with_more("hopper-moe-fp4", layers=rules), "+packed")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("preset", ["smoke", "moe-smoke", "moe8-smoke+bf16"])
def test_what_swiglu_keeps_in_mxfp8_goes_with_codes_and_recomputation(preset, device):
    assert same(f"{preset}+swiglu8", PACKED["mxfp4"], "+packed+recompute", device=device)


@pytest.mark.parametrize("preset", ["smoke", "moe-smoke"])
@pytest.mark.parametrize("recipe", ["bf16", "nvfp4"])
def test_it_changes_gradients_and_no_value(preset, recipe):
    plain, rounded = (trained(preset + end, Recipe.named(recipe)) for end in ("", "+swiglu8"))
    assert plain.losses(0) == rounded.losses(0)
    assert plain.losses(STEPS - 1) != rounded.losses(STEPS - 1)
    assert plain.losses(STEPS - 1) == pytest.approx(rounded.losses(STEPS - 1), rel=1e-2)
    assert rounded.kept_bytes is not None
    assert rounded.kept_bytes < plain.kept_bytes


def test_a_preset_with_it_is_another_and_so_are_its_rows():
    lane, ids = Lane(Recipe.named("bf16"), 1e-3, 0), {}
    for preset in ("small+bf16", "small+bf16+swiglu8", "small+bf16+swiglu8+packed+recompute", "small+swiglu8"):
        task = get_task("language", preset)
        facts = facts_of(task)
        assert (task.packed, task.recompute) == (preset.endswith("+packed+recompute"),) * 2
        assert (task.swiglu8, task.dtype == "bfloat16") == ("+swiglu8" in preset, "+bf16" in preset)
        assert task.preset == preset.removesuffix("+packed+recompute")
        assert task_of(Job("language", task.preset, [lane], origin=facts.origin, digest=facts.digest)) == task
        ids[preset] = lane_id(lane, task_context(facts, environment("cpu", 1)))
    assert ids["small+bf16+swiglu8"] == ids["small+bf16+swiglu8+packed+recompute"]
    assert len({*ids.values()}) == 3


def test_codes_that_cannot_be_kept_are_a_reason():
    p = trained("smoke+packed", Recipe.named("nvfp4"))
    assert "activations not kept as codes (wgrad.source: found input; accepted: forward)" in p.numerics.fallbacks
    assert not any("codes" in reason for reason in trained("smoke+packed", PACKED["mxfp4"]).numerics.fallbacks)


def test_a_convolution_keeps_its_image_and_says_so():
    """The one layer that is none, the precise head, keeps BF16 for FP32."""
    lanes = [Lane(Recipe.named("hopper-moe-fp4"), 1e-2, seed) for seed in (0, 1)]
    tasks = [with_steps(get_task("vision", f"resnet-smoke{ending}"), 1) for ending in ("", "+packed")]
    plain, packed = (Population(task, lanes, "cpu") for task in tasks)
    for p in (plain, packed):
        p.train_step(0)
    said = "activations not kept as codes (convolutions: they keep images, "
    assert [any(reason.startswith(said) for reason in p.numerics.fallbacks) for p in (plain, packed)] == [False, True]
    states = plain.state(1), packed.state(1)
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    rows, width = 32, 16
    assert plain.kept_bytes - packed.kept_bytes == 2 * rows * width * (4 - 2)


def test_what_is_counted_is_counted_once():
    assert same("smoke", RECIPES["previous maxima"], counting=True)


def test_the_preset_is_the_same_and_so_are_its_rows():
    lane, ids = Lane(Recipe.named("nvfp4"), 1e-3, 0), set()
    for preset in ("small+bf16", "small+bf16+recompute"):
        task = get_task("language", preset)
        facts = facts_of(task)
        ids.add(lane_id(lane, task_context(facts, environment("cpu", 1))))
        assert (task.preset, task.dtype) == ("small+bf16", "bfloat16")
        made = task_of(Job("language", task.preset, [lane], origin=facts.origin, digest=facts.digest))
        assert made.recompute == preset.endswith("+recompute")
    assert len(ids) == 1


def test_other_tasks_have_no_blocks_to_recompute():
    with pytest.raises(ConfigError, match=r"vision.*small \(\+recompute: for language alone\)"):
        get_task("vision", "small+recompute")
    with pytest.raises(ConfigError, match=r"vision.*small\+packed \(\+swiglu8 and \+recompute: for language alone\)"):
        get_task("vision", "small+swiglu8+packed+recompute")
    with pytest.raises(ConfigError, match=r"each with \+bf16 or without, then \+swiglu8, \+packed and \+recompute"):
        get_task("language", "small+recompute+bf16")


@pytest.mark.parametrize("recipe", ["bf16", "nvfp4-sr-rht"])
def test_a_block_keeps_its_two_inputs(recipe):
    plain, again = (kept_for_backward("tiny" + ending, Recipe.named(recipe)) for ending in ("", "+recompute"))
    assert again.block == 2 * 64 * 4  # the stream and the branch that it has yet to receive
    assert plain.block > 6 * again.block


def test_operands_of_linear_layers_take_a_quarter_in_mxfp4_and_half_in_fp8(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "kept", "0.4M+bf16", "--json"])
    rows = {row["what"]: row for row in json.loads(capsys.readouterr().out)}
    bf16, fp8, mxfp4 = (rows[what]["bytes_per_token_and_block"] for what in list(rows)[:3])
    operands = 6 * 128  # of a token, the MLP's inside being three times as wide as the stream
    factors = 4 / 128
    shared = 2 * 128  # the result of attention, which in BF16 the next layer does not keep again
    assert bf16 - fp8 == pytest.approx((2 - 1 - factors) * operands - shared, abs=0.2)
    assert bf16 - mxfp4 == pytest.approx((2 - 17 / 32) * operands - shared, abs=0.2)  # and a factor of the tensor
    # .76 of BF16 is wanted, and was reached while BF16 kept that result twice, in two orders: 4,616 bytes a token and
    # block, 4,360 since, beside 3,488 in MXFP4 then and now. So it is missed though nothing keeps more than before
    assert (bf16, mxfp4) == pytest.approx((4360, 3488), abs=0.2)
    assert rows["MXFP4"]["of_bf16"] < 0.805
    assert rows["MXFP4"]["of_fp8"] < 0.91
    inside = rows["MXFP4, and SwiGLU in MXFP8"]
    saved = mxfp4 - inside["bytes_per_token_and_block"]
    assert saved == pytest.approx((2 - 33 / 32) * 2 * 3 * 128)  # gate and up
    assert inside["of_bf16"] < 0.635  # wanted: .62, reached while BF16 kept 4,616
    assert rows["MXFP4, decoded"]["of_bf16"] > 1
    assert ended.value.code in (0, None)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("hopper-moe-fp4", torch.float32)])
def test_copies_of_experts_weights_are_kept_as_the_cost_model_has_them(name, dtype):
    task, lanes, experts = get_task("language", "moe8-smoke+bf16+packed"), 2, 8
    [shape] = task.model.args
    numerics = LaneNumerics([Recipe.named(name)] * lanes, range(lanes), "cpu", dtype=torch.bfloat16)
    numerics.packed = True
    model = Decoder(shape, shape.initial(256, range(lanes)), numerics)
    tokens, kept = torch.arange(128).view(1, 4, 32).expand(lanes, -1, -1), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        model(tokens)
    copies = {(lanes * experts, 2 * shape.ffn, shape.width), (lanes * experts, shape.width, shape.ffn)}
    assert {(tuple(x.shape), x.dtype) for x in kept if tuple(x.shape) in copies} == {(of, dtype) for of in copies}


@pytest.mark.parametrize("ending", ["+packed", "+recompute", "+packed+recompute", "+swiglu8", "+swiglu8+packed"])
def test_a_preset_that_says_what_is_kept_is_refused_as_it_was_typed(ending, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "kept", f"0.4M+bf16{ending}"])
    assert ended.value.code == 2
    assert f"preset: found '0.4M+bf16{ending}'; accepted: 0.4M+bf16 (with and without" in capsys.readouterr().err


def test_a_gpu_also_tells_memory_and_speed(monkeypatch):
    """Tokens a second are those of all lanes, whole batches; only a GPU knows its peak."""
    monkeypatch.setattr(kept, "by_device", lambda device, cpu, cuda: cuda)
    monkeypatch.setattr(kept, "peak_bytes", lambda task, recipes, device, lanes: 3 * 2**20)
    monkeypatch.setattr(kept, "step_us", lambda task, recipe, lanes, device: 1e6 * lanes)
    task = get_task("language", "smoke")
    rows = list(kept.bench("smoke"))
    assert {row.peak_mib for row in rows} == {3.0}
    assert {row.tokens_per_s for row in rows} == {task.batch * kept.shape_of(task).context}
