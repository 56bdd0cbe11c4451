"""Stem, head and blocks of models that people have, by structure; and what becomes of their layers."""

import copy
import pickle
from itertools import pairwise

import pytest
import torch
from torch import nn

from fp4dse.dse import ConfigError, Quantizer, Recipe
from fp4dse.dse.reading.library import recipe_to_toml
from fp4dse.kernels import convert
from fp4dse.kernels.structure import structure_of
from tests.kernels.standins import MODELS, Conv1D, as_transformers

OFF = Recipe.uniform(Quantizer.named("none"))


@pytest.fixture(autouse=True)
def transformers(monkeypatch):
    as_transformers(monkeypatch)


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name][0]()


@pytest.mark.parametrize("name", MODELS)
def test_stem_head_and_blocks_are_found(name):
    _, _, stem, heads, blocks = MODELS[name]
    found = structure_of(dict(made(name).named_modules()))
    assert found.words().startswith(f"stem: {stem}; head: {', '.join(heads)}; ")
    assert found.heads == heads
    assert found.blocks == blocks
    assert set(found.missing) == ({"blocks"} if name == "vgg" else set())


@pytest.mark.filterwarnings("ignore:convert. no blocks found")
@pytest.mark.parametrize("name", MODELS)
def test_the_last_blocks_stay_precise_and_the_model_trains_and_loads(name):
    """NVIDIA's recipe keeps 0.129 of the blocks: one of eight, one of four."""
    model, data = made(name), MODELS[name][1]()
    *_, stem, heads, blocks = MODELS[name]
    plain = copy.deepcopy(model)
    report = convert(model, "nvidia-nvfp4")
    precise = {line.name for line in report.lines if line.why_not and line.why_not.startswith("precise")}
    last = {name for name in report.converted if name.startswith(blocks[-1])}
    assert not last
    assert {line.name for line in report.lines if line.why_not and "last blocks" in line.why_not}
    assert precise >= set(heads)
    assert ("look-up" in stem) != (stem in precise)
    assert all(any(name.startswith(of) for name in report.converted) for of in blocks[1:-1])
    assert list(model.state_dict()) == list(plain.state_dict())
    assert list(dict(model.named_modules())) == list(dict(plain.named_modules()))
    model.load_state_dict(plain.state_dict())
    plain.load_state_dict(model.state_dict())
    y = model(data)
    y.square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert not torch.equal(y, plain(data))
    model.eval()
    expected = model(data)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(data), expected)


@pytest.mark.parametrize("name", ["resnet", "vit", "gpt2", "llama-tied"])
def test_without_quantizers_a_model_is_what_it_was_bit_for_bit(name):
    model, twin, data = made(name), made(name), MODELS[name][1]()
    convert(model, OFF)
    for of in (model, twin):
        of(data).square().mean().backward()
    assert torch.equal(model(data), twin(data))
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_a_weight_shared_with_a_look_up_is_a_head_wherever_it_stands():
    class Early(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.unembed = nn.Embedding(9, 8), nn.Linear(8, 9, bias=False)
            self.unembed.weight = self.embed.weight
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(3))

    found = structure_of(dict(Early().named_modules()))
    assert (found.heads, found.blocks) == (["unembed"], ["layers.0", "layers.1", "layers.2"])


@pytest.mark.parametrize(
    ("widths", "missing"), [([8] * 6, set()), ([8, 8, 8, 8, 8, 16], {"blocks"}), ([8, 8], {"blocks"})]
)
def test_equal_layers_between_stem_and_head_are_blocks_without_a_module_around_each(widths, missing):
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 8)
            self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
            self.last = nn.Linear(widths[-1], 2)

    found = structure_of(dict(Bare().named_modules()))
    assert (found.stem, found.heads) == ("first", ["last"])
    assert found.blocks == [f"layers.{n}" for n in range(len(widths) - 1)]
    assert set(found.missing) == missing


@pytest.mark.parametrize(
    ("model", "lost"),
    [
        (nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), "no stem, head found: 2 layers are too few"),
        (nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(3))), "no stem found: the fi"),
    ],
)
def test_what_is_not_found_is_warned_of_where_the_recipe_needs_it(model, lost):
    with pytest.warns(UserWarning, match=rf"convert: {lost}.*places=\{{…\}} says where layers stand"):
        report = convert(model, "nvfp4")
    assert any(note.startswith(lost[:7]) for note in report.notes)


def test_a_plain_recipe_warns_of_nothing():
    convert(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), "bf16")


def test_a_recipe_is_itself_or_a_name_or_a_file(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(recipe_to_toml(Recipe.named("nvfp4")))
    wanted = convert(made("llama"), Recipe.named("nvfp4")).recipe
    assert convert(made("llama"), "nvfp4").recipe == wanted
    assert convert(made("llama"), file).recipe == convert(made("llama"), str(file)).recipe == wanted
    with pytest.raises(ConfigError, match=r"recipe: found 'nvfp5'; accepted: .*nvfp4.*or a \.toml file"):
        convert(made("llama"), "nvfp5")


@pytest.mark.filterwarnings("ignore:convert. no stem")
def test_gpt2s_transposed_layer_is_the_linear_layer_of_its_transpose():
    torch.manual_seed(0)
    theirs, ours = nn.Sequential(Conv1D(24, 16)), nn.Sequential(nn.Linear(16, 24))
    ours.load_state_dict({"0.weight": theirs[0].weight.detach().T, "0.bias": theirs[0].bias.detach()})
    x = torch.randn(3, 5, 16)
    for model in (theirs, ours):
        convert(model, "nvfp4-sr-rht", seed=3)
    y, expected = theirs(x), ours(x)
    assert torch.equal(y, expected)
    y.square().sum().backward()
    expected.square().sum().backward()
    assert torch.equal(theirs[0].weight.grad, ours[0].weight.grad.T)
