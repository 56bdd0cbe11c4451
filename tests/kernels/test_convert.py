"""A user's own model, converted: the same names and parameters, the products of the recipe, and a report."""

import copy
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from fp4dse.dse import ConfigError, Quantizer, Recipe, recipe_from_dict, recipe_to_dict
from fp4dse.dse.layers.place import Place
from fp4dse.dse.layers.precision import Finish, Precise
from fp4dse.dse.optimizer import StableSPAM
from fp4dse.dse.rounding import Stochastic
from fp4dse.dse.training import Training
from fp4dse.kernels import LaneNumerics, QuantLinear, convert, lanes
from fp4dse.kernels.conv import QuantConv2d
from fp4dse.kernels.converted import ConvertedLinear
from fp4dse.kernels.quant.backend import Backend

replace = msgspec.structs.replace
pytestmark = pytest.mark.filterwarnings("ignore:convert. no (stem|head|blocks)")  # toys have none
NVFP4, SR, QUARTET = (Recipe.named(name) for name in ("nvfp4", "nvfp4-sr-rht", "quartet"))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attn = nn.ModuleDict(
            {name: nn.Linear(width, width, bias=False) for name in ("q_proj", "k_proj", "o_proj")}
        )
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        q, k = self.attn["q_proj"](self.norm(x)), self.attn["k_proj"](self.norm(x))
        x = x + self.attn["o_proj"](torch.softmax(q @ k.mT, -1) @ x)
        return x + self.mlp(self.norm(x))


class Decoder(nn.Module):
    """Tied embedding and head."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(3))
        self.lm_head = nn.Linear(width, 20, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def decoder() -> Decoder:
    torch.manual_seed(0)
    return Decoder()


def mlp(width: int = 32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 48), nn.ReLU(), nn.Linear(48, 8))


TOKENS = torch.arange(24).view(2, 12) % 20


def loss_of(model, data=TOKENS):
    return model(data).square().mean()


def test_names_shapes_and_parameters_are_the_same_objects():
    model, twin = decoder(), decoder()
    before = {name: id(p) for name, p in model.named_parameters()}
    convert(model, SR)
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert list(model.state_dict()) == list(twin.state_dict())
    assert list(dict(model.named_modules())) == list(dict(twin.named_modules()))
    model.load_state_dict(twin.state_dict())
    assert model.lm_head.weight is model.embed.weight
    assert isinstance(model.layers[0].mlp[0], nn.Linear)


def test_the_report_lists_every_layer_with_its_reason():
    report = convert(decoder(), replace(NVFP4, precise=Precise(attention=True, last=1), training=Training(clip=1.0)))
    assert report.converted == [f"layers.{i}.mlp.{j}" for i in (0, 1) for j in (0, 2)]
    whys = {line.name: line.why_not for line in report.lines}
    assert whys["embed"] == "a look-up, not a product"
    assert whys["lm_head"] == "precise in the recipe (head)"
    assert whys["layers.0.attn.q_proj"] == "precise in the recipe (attention)"
    assert whys["layers.2.mlp.0"] == "precise in the recipe (last blocks, block 2 of 3)"
    assert report.notes == [
        "stem: embed, a look-up; head: lm_head; 3 blocks layers.0 … layers.2",
        "left to your training loop: clip 1",
    ]
    assert "layers.0.mlp.0        Linear     quantized, as mlp of block 0\n" in str(report)
    assert "layers.0.norm" not in whys


def test_the_report_says_why_the_reference_quantizes(monkeypatch):
    knows_nothing = {"heeded": lambda *_: (), "scale_heeded": lambda *_: (), "operand": tuple, "by_scales": tuple}
    monkeypatch.setattr(lanes, "backend", lambda _: Backend("blind", **knows_nothing))
    report = convert(nn.Linear(32, 32), NVFP4)
    report.steps.numerics(torch.device("cpu"))
    assert [reason for reason in report.fallbacks if reason.startswith("quantized by the reference (")]


def test_places_can_be_given_where_the_name_does_not_say():
    model = mlp()
    report = convert(model, NVFP4, places={"0": Place("embedding")})
    assert report.converted == ["2"]
    assert model.fp4dse_report is report
    assert type(model[0]) is nn.Linear


def test_convolutions_of_one_pixel_are_known_from_larger_ones():
    """By the shape of the kernel, whatever the layers are called."""
    rule = {"kind": "pointwise", "*": "bf16"}
    recipe = recipe_from_dict({**recipe_to_dict(Recipe.named("nvfp4")), "layers": [rule]})
    model = nn.Sequential(*(nn.Conv2d(16, 16, size) for size in (3, 3, 1, (1, 3), 3)), nn.Flatten(), nn.Linear(16, 4))
    report = convert(model, recipe)
    assert report.converted == ["1", "3", "4"]
    assert {line.name for line in report.lines if line.why_not} == {"0", "2", "6"}


def test_modules_that_take_weights_past_their_layers_are_left_alone():
    class Own(nn.Linear):
        pass

    model = nn.Sequential(
        nn.MultiheadAttention(16, 2, add_bias_kv=True), Own(16, 16), nn.Conv1d(2, 3, 1), nn.Linear(16, 16)
    )
    model.extend([nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(4, 4, 3, padding="same"), nn.Conv2d(4, 8, 3, groups=4)])
    report = convert(model, NVFP4, places={"5": Place("conv"), "6": Place("conv")})
    whys = {line.name: line.why_not for line in report.lines}
    assert report.converted == ["3"]
    assert whys["0"] == whys["0.out_proj"] == "add_bias_kv is not built"
    assert whys["6"] == "depthwise: sums of 9 products, shorter than a block of a scale"
    assert whys["1"] == "a subclass of Linear, which may compute something else"
    assert whys["2"] == "not one of Linear, Conv2d, MultiheadAttention"
    assert whys["4"] == "groups 2 is not built"
    assert whys["5"] == "padding same is not built"


@pytest.mark.parametrize(
    "recipe",
    [NVFP4, SR, QUARTET, *map(Recipe.named, ("wang-dge-occ", "averis", "metis", "tetrajet2-outcontrol", "arcquant"))],
    ids=lambda r: r.label()[:12],
)
def test_a_converted_layer_is_the_lane_layer(recipe):
    """With the seed and the layer number of a lane: its output and gradients, but for the order of a sum."""
    model = nn.Sequential(nn.Linear(32, 48))
    convert(model, recipe, seed=5)
    x, g = torch.randn(2, 12, 32, requires_grad=True), torch.randn(2, 12, 48)
    y = model(x)
    y.backward(g)
    numerics = LaneNumerics([recipe] * 2, [5, 5])
    own = [p.detach()[None].repeat(2, *[1] * p.dim()) for p in (model[0].weight, model[0].bias)]
    lanes = QuantLinear(*own, numerics, 0)
    x_lanes = x.detach().reshape(1, 24, 32).repeat(2, 1, 1).requires_grad_()
    expected = lanes(x_lanes)
    expected.backward(g.reshape(1, 24, 48).repeat(2, 1, 1))
    assert torch.allclose(y.flatten(0, 1), expected[0], rtol=1e-4, atol=1e-5)
    assert torch.allclose(x.grad.flatten(0, 1), x_lanes.grad[0], rtol=1e-4, atol=1e-4)
    assert torch.allclose(model[0].weight.grad, lanes.weight.grad[0], rtol=1e-4, atol=1e-4)
    assert torch.allclose(model[0].bias.grad, lanes.bias.grad[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kernel", "stride", "padding"), [(3, 1, 1), (3, 2, 0), (1, 1, 0), ((2, 3), 2, 1)])
def test_a_converted_convolution_without_quantizers_is_the_convolution(kernel, stride, padding):
    torch.manual_seed(0)
    model, none = nn.Sequential(nn.Conv2d(3, 5, kernel, stride, padding)), Recipe.uniform(Quantizer.named("none"))
    twin = copy.deepcopy(model)
    convert(model, none).steps.off = False  # by the product of its columns
    x, x_twin = (torch.randn(2, 3, 9, 8, generator=torch.Generator().manual_seed(0)).requires_grad_() for _ in range(2))
    y, expected = model(x), twin(x_twin)
    g = torch.randn_like(expected)
    y.backward(g)
    expected.backward(g)
    for ours, theirs in (
        (y, expected),
        (x.grad, x_twin.grad),
        (model[0].weight.grad, twin[0].weight.grad),
        (model[0].bias.grad, twin[0].bias.grad),
        (model(x[0]), twin(x[0])),
    ):
        assert ours.shape == theirs.shape
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)


MASKS = {
    "none": dict,
    "bool": lambda: {"attn_mask": torch.ones(5, 5).triu(1).bool()},
    "causal": lambda: {"attn_mask": torch.full((5, 5), -torch.inf).triu(1), "is_causal": True},
    "of each head": lambda: {"attn_mask": torch.randn(6, 5, 5)},
    "padding": lambda: {"key_padding_mask": torch.tensor([[False] * 5, [True] + [False] * 4, [False] * 4 + [True]])},
    "both": lambda: {"attn_mask": torch.ones(5, 5).triu(1).bool(), "key_padding_mask": torch.zeros(3, 5).bool()},
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_converted_attention_without_quantizers_is_the_attention(mask, batch_first, need_weights):
    torch.manual_seed(0)
    model = nn.MultiheadAttention(8, 2, batch_first=batch_first)
    nn.init.normal_(model.in_proj_bias)
    twin, none = copy.deepcopy(model), Recipe.uniform(Quantizer.named("none"))
    convert(model, none).steps.off = False  # by products
    x = torch.randn(3, 5, 8) if batch_first else torch.randn(5, 3, 8)
    masks = MASKS[mask]()
    ours, theirs = (of(x, x, x, need_weights=need_weights, **masks) for of in (model, twin))
    assert torch.allclose(ours[0], theirs[0], rtol=1e-4, atol=1e-5)
    assert (ours[1] is None) == (theirs[1] is None) == (not need_weights)
    if need_weights:
        assert torch.allclose(ours[1], theirs[1], rtol=1e-4, atol=1e-5)
    for of, (y, _) in ((model, ours), (twin, theirs)):
        y.square().sum().backward()
        assert of.in_proj_weight.grad is not None
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=1e-3, atol=1e-4)


def test_so_it_is_across_sequences_without_a_batch_and_with_weights_of_each_head():
    torch.manual_seed(0)
    none = Recipe.uniform(Quantizer.named("none"))
    for keys, options in ((8, {}), (6, {"kdim": 6, "vdim": 4, "bias": False})):
        model = nn.MultiheadAttention(8, 2, **options)
        twin = copy.deepcopy(model)
        convert(model, none).steps.off = False
        q, k = torch.randn(5, 8), torch.randn(7, keys)
        v = k if keys == 8 else torch.randn(7, 4)
        ours, theirs = (of(q, k, v, average_attn_weights=False) for of in (model, twin))
        assert ours[1].shape == theirs[1].shape == (2, 5, 7)
        assert torch.allclose(ours[0], theirs[0], rtol=1e-4, atol=1e-5)
        assert torch.allclose(ours[1], theirs[1], rtol=1e-4, atol=1e-5)


def test_the_projections_of_attention_have_random_bits_of_their_own():
    torch.manual_seed(0)
    model = nn.Sequential(nn.ModuleDict({"attention": nn.MultiheadAttention(16, 2)}), nn.Linear(16, 16))
    convert(model, SR)
    assert (model[0]["attention"].fp4dse_layer, model[1].fp4dse_layer) == (0, 4)


@pytest.mark.parametrize("grad", [True, False])
def test_an_encoder_layer_multiplies_by_its_layers_in_eval_mode_too(grad):
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3).eval()
    x, padding = torch.randn(2, 6, 16), torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    plain = model(x, src_key_padding_mask=padding)
    convert(model, NVFP4)
    with torch.set_grad_enabled(grad):
        y = model(x, src_key_padding_mask=padding)
    assert y.shape == plain.shape
    assert torch.equal(y, model(x, src_key_padding_mask=padding))
    assert 0.01 < ((y - plain).norm() / plain.norm()) < 0.5


def test_a_converted_convolution_is_the_lane_layer():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(16, 8, 3, padding=1))
    convert(model, SR, seed=5)
    x = torch.randn(2, 16, 6, 6)
    weight, bias = (p.detach()[None].repeat(2, *[1] * p.dim()) for p in (model[0].weight, model[0].bias))
    lanes = QuantConv2d(weight.permute(0, 1, 3, 4, 2), bias, LaneNumerics([SR] * 2, [5, 5]), 0, padding=1)
    expected = lanes(x.permute(0, 2, 3, 1)[None].repeat(2, 1, 1, 1, 1))[0].permute(0, 3, 1, 2)
    assert torch.allclose(model(x), expected, rtol=1e-4, atol=1e-5)


def test_every_forward_pass_in_training_is_a_step_with_random_bits_of_its_own():
    model = mlp()
    convert(model, SR)
    x = torch.randn(16, 32)
    gradients = []
    for _ in range(2):
        model.zero_grad()
        loss_of(model, x).backward()
        gradients.append(model[0].weight.grad.clone())
    assert not torch.equal(*gradients)
    again = mlp()
    convert(again, SR)
    loss_of(again, x).backward()
    assert torch.equal(again[0].weight.grad, gradients[0])


def test_a_backward_pass_belongs_to_the_step_of_its_forward_pass():
    """Two forward passes, then both backward: as one after the other. Quartet rotates with random signs."""
    xs = torch.randn(2, 16, 32)
    together, apart = mlp(), mlp()
    for model in (together, apart):
        convert(model, QUARTET)
    losses = [loss_of(together, x) for x in xs]
    losses[1].backward()
    losses[0].backward()
    for x in xs:
        loss_of(apart, x).backward()
    assert torch.allclose(together[0].weight.grad, apart[0].weight.grad, rtol=1e-5, atol=1e-7)


def test_evaluation_changes_nothing_that_is_kept():
    model = mlp()
    recipe = Recipe.named("ue5m3-graphcore")
    report = convert(model, recipe)
    x = torch.randn(16, 32)
    loss_of(model, x).backward()

    def kept():
        slots = report.steps._numerics[torch.device("cpu")].slots
        return {(name, key): value.clone() for name, slot in slots.items() for key, value in slot.state.items()}

    before = kept()
    assert before
    model.eval()
    first = model(100 * x)
    assert torch.equal(first, model(100 * x))
    assert before.keys() == kept().keys()
    assert all(torch.equal(value, kept()[key]) for key, value in before.items())
    model.train()
    assert report.steps.step == 0
    model(x)
    assert report.steps.step == 1


def test_the_finish_needs_the_number_of_steps_and_then_comes():
    recipe = replace(NVFP4, finish=Finish(share=0.5), precise=Precise(head=False, embedding=False))
    with pytest.raises(ConfigError, match=r"steps: found nothing; accepted: the steps of the whole training"):
        convert(mlp(), recipe)
    model, baseline = mlp(), mlp()
    convert(model, recipe, steps=4)
    convert(baseline, Recipe.named("bf16"))
    x = torch.randn(16, 32)
    assert [torch.equal(model(x), baseline(x)) for _ in range(4)] == [False, False, True, True]


def test_eval_mode_computes_as_the_model_is_deployed():
    """Rounded to nearest where training rounds by chance, and with quantized activations after fine-tuning in high
    precision."""
    luq, around = Recipe.named("luq"), {"precise": Precise(head=False, embedding=False)}
    luq = replace(luq, fprop=replace(luq.fprop, x=replace(luq.fprop.x, rounding=Stochastic())))
    tuned, plain = mlp(), mlp()
    convert(tuned, replace(luq, finish=Finish(share=0.5, what="all-but-weights"), **around), steps=2)
    convert(plain, replace(luq, **around).evaluated())
    x = torch.randn(16, 32)
    expected = plain(x)
    for _ in range(2):
        assert not torch.equal(tuned.train()(x), expected)
        assert torch.equal(tuned.eval()(x), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_goes_in_and_comes_out(dtype):
    model, twin = mlp(), mlp()
    convert(model, NVFP4)
    model, twin = model.to(dtype), twin.to(dtype)
    x = torch.randn(64, 32).to(dtype)
    y = model(x)
    y.float().square().mean().backward()
    assert y.dtype == dtype
    assert model[0].weight.grad.dtype == dtype
    error = (y - twin(x)).float().norm() / twin(x).float().norm()
    assert 0.01 < error < 0.4  # what NVFP4 costs


def test_autocast_sets_the_dtype_of_the_output_and_not_the_products():
    model, plain = mlp(), mlp()
    convert(model, NVFP4)
    convert(plain, NVFP4)
    x = torch.randn(64, 32)
    hidden = plain[0](x)
    with torch.autocast("cpu", torch.bfloat16):
        got = model[0](x)
        assert got.dtype == torch.bfloat16
        got.float().square().mean().backward()  # within autocast, too
    assert torch.equal(got, hidden.to(torch.bfloat16))
    assert model[0].weight.grad.dtype == torch.float32


def test_double_precision_and_second_derivatives_are_refused():
    model = mlp()
    convert(model, NVFP4)
    with pytest.raises(ConfigError, match=r"dtype of the input: found torch.float64; accepted: torch.float32"):
        model(torch.randn(4, 32).double())
    x = torch.randn(4, 32, requires_grad=True)
    (gradient,) = torch.autograd.grad(loss_of(model, x), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_copies_and_pickles_train_on_their_own():
    model = decoder()
    convert(model, SR)
    loss_of(model).backward()
    copied, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for other in (copied, loaded):
        assert other.fp4dse_report.steps is other.layers[0].mlp[0].fp4dse
        assert other.fp4dse_report.steps is not model.fp4dse_report.steps
        other.zero_grad()
        loss_of(other).backward()
        assert other.fp4dse_report.steps.step == 1
    assert model.fp4dse_report.steps.step == 0


def test_recomputed_activations_give_the_same_gradients():
    from torch.utils.checkpoint import checkpoint

    models = [mlp(), mlp()]
    x = torch.randn(16, 32)
    for model, recompute in zip(models, (False, True), strict=True):
        convert(model, SR)
        whole = model.forward
        if recompute:
            model.forward = lambda x, whole=whole: checkpoint(whole, x, use_reentrant=False)
        loss_of(model, x).backward()
    assert torch.equal(models[0][0].weight.grad, models[1][0].weight.grad)


MISTAKES = {
    "twice": (lambda m: (convert(m, NVFP4), convert(m, NVFP4)), "model: found 'converted already'"),
    "unknown place": (lambda m: convert(m, NVFP4, places={"1.x": Place()}), "places: found '1.x'; accepted: 0, 1, 2"),
    "nothing": (lambda m: convert(nn.ReLU(), NVFP4), "model: found 'ReLU'; .*it has no weights"),
    "all precise": (
        lambda m: convert(m, NVFP4, places=dict.fromkeys("02", Place("head"))),
        r"0: precise in .*\(head\)",
    ),
    "rule": (lambda m: convert(m, replace(NVFP4, gemm="fp8-exact")), "recipe: found 'fp8-holds-operands'"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_and_leaves_the_model_as_it_was(name):
    act, message = MISTAKES[name]
    model = mlp()
    with pytest.raises(ConfigError, match=message):
        act(model)
    if name != "twice":
        assert not any(isinstance(module, ConvertedLinear) for module in model.modules())


def test_the_training_side_of_a_recipe_is_named_as_the_users_own_matter():
    report = convert(mlp(), replace(NVFP4, training=Training(optimizer=StableSPAM())))
    assert report.notes[-1] == "left to your training loop: stable-spam"


DDP = """
import sys
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from fp4dse.dse import Recipe
from fp4dse.kernels import convert

rank, store, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
torch.manual_seed(0)
weights = {}
for name in ("bf16", "nvfp4-sr"):
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 8))
    convert(model, Recipe.named(name), seed=rank)
    x, y = torch.randn(3, 2, 16, 32), torch.randn(3, 2, 16, 8)
    model.load_state_dict({k: torch.linspace(-.1, .1, v.numel()).view_as(v) for k, v in model.state_dict().items()})
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        (parallel(x[step, rank]) - y[step, rank]).square().mean().backward()
        optimizer.step()
    weights[name] = model.state_dict()
    assert model.fp4dse_report.steps.step == 2
torch.save({"weights": weights, "x": x, "y": y}, out)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_data_parallel_processes_keep_the_same_weights(tmp_path):
    script = tmp_path / "ddp.py"
    script.write_text(DDP)
    environment = {**os.environ, "FP4DSE_EAGER": "1", "OMP_NUM_THREADS": "1"}
    files = [tmp_path / f"{rank}.pt" for rank in (0, 1)]
    command = [sys.executable, str(script)]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store"), str(file)], env=environment)
        for rank, file in enumerate(files)
    ]
    assert [process.wait(timeout=120) for process in ranks] == [0, 0]
    first, second = (torch.load(file)["weights"] for file in files)
    for name, state in first.items():
        assert all(torch.equal(value, second[name][key]) for key, value in state.items())
    start = torch.linspace(-0.1, 0.1, 48 * 32).view(48, 32)
    moved = {name: (state["0.weight"] - start).norm() for name, state in first.items()}
    assert 0 < (first["bf16"]["0.weight"] - first["nvfp4-sr"]["0.weight"]).norm() < 1.5 * max(moved.values())


def test_the_example_of_the_docs_runs_and_prints_what_they_show(capsys):
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (shown,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    exec(compile(example, "training.md", "exec"), {"__name__": "example"})
    assert capsys.readouterr().out == shown
