"""`convert` on the classes themselves, from small configurations, where these libraries are installed.

They are no part of what the tests need: test_structure.py has stand-ins of the same structure. torchvision's wheel on
the package index wants a torch with CUDA.
"""

import pytest
import torch

from fp4dse.dse import Quantizer, Recipe
from fp4dse.kernels import convert

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4}
TEXT = {**SMALL, "vocab_size": 96}


def hugging_face(kind: str, **config):
    library = pytest.importorskip("transformers")
    model = getattr(library, kind)
    return model(model.config_class(**config)), torch.arange(24).view(2, 12)


def vision(kind: str, **config):
    library = pytest.importorskip("torchvision")
    return getattr(library.models, kind)(num_classes=10, **config), torch.randn(2, 3, 32, 32)


def timm(kind: str, **config):
    library = pytest.importorskip("timm")
    return library.create_model(kind, num_classes=10, **config), torch.randn(2, 3, 32, 32)


VIT = {"image_size": 32, "patch_size": 8, "num_layers": 8, "num_heads": 4, "hidden_dim": 32, "mlp_dim": 64}
TIMM_VIT = {"img_size": 32, "patch_size": 8, "depth": 8, "embed_dim": 48, "num_heads": 3}
MODELS = {
    "llama": (lambda: hugging_face("LlamaForCausalLM", **TEXT), "lm_head", 8, 49),
    "qwen2": (lambda: hugging_face("Qwen2ForCausalLM", **TEXT, num_key_value_heads=2), "lm_head", 8, 49),
    "gpt2": (lambda: hugging_face("GPT2LMHeadModel", n_embd=32, n_layer=8, n_head=4), "lm_head", 8, 28),
    "bert": (lambda: hugging_face("BertForSequenceClassification", **TEXT), "classifier", 8, 43),
    "resnet18": (lambda: vision("resnet18"), "fc", 8, 17),
    "vit": (lambda: vision("VisionTransformer", **VIT), "heads.head", 8, 28),
    "timm-vit": (lambda: timm("vit_tiny_patch16_224", **TIMM_VIT), "head", 8, 28),
    "timm-resnet18": (lambda: timm("resnet18"), "fc", 8, 17),
}
"""Name -> model and batch, its head, its blocks, and how many layers NVIDIA's recipe quantizes."""


def output(y):
    return y if isinstance(y, torch.Tensor) else y[0]


@pytest.mark.parametrize("name", MODELS)
def test_published_classes_are_converted_train_and_load(name):
    make, head, blocks, quantized = MODELS[name]
    torch.manual_seed(0)
    model, data = make()
    keys, before = list(model.state_dict()), output(model.eval()(data))
    report = convert(model, "nvidia-nvfp4")
    assert f"head: {head}; {blocks} blocks" in report.notes[0]
    assert len(report.converted) == quantized
    assert any("last blocks" in (line.why_not or "") for line in report.lines)
    assert list(model.state_dict()) == keys
    assert output(model(data)).shape == before.shape
    output(model.train()(data)).square().mean().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    plain, _ = make()
    plain.load_state_dict(model.state_dict())
    convert(plain, Recipe.uniform(Quantizer.named("none")))
    if not any(isinstance(m, torch.nn.BatchNorm2d) for m in model.modules()):  # whose statistics the training moved
        assert torch.equal(output(plain.eval()(data)), before)
