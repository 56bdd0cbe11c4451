"""Models of the structure and the names of those that people have, small: torchvision, timm and Hugging Face."""

import sys
from types import ModuleType

import torch
from torch import nn

BLOCKS = 8
WIDTH = 16


class BasicBlock(nn.Module):
    """Of torchvision's ResNet."""

    def __init__(self, fan_in, fan_out):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(fan_in, fan_out, 3, padding=1, bias=False), nn.BatchNorm2d(fan_out)
        self.conv2, self.bn2 = nn.Conv2d(fan_out, fan_out, 3, padding=1, bias=False), nn.BatchNorm2d(fan_out)
        self.downsample = None
        if fan_in != fan_out:
            self.downsample = nn.Sequential(nn.Conv2d(fan_in, fan_out, 1, bias=False), nn.BatchNorm2d(fan_out))

    def forward(self, x):
        h = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(h + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    """Two blocks a stage, as ResNet-18: three of the stages have equal structure, and are no blocks."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        for i, (fan_in, fan_out) in enumerate(((4, 4), (4, 6), (6, 8), (8, 10)), 1):
            self.add_module(f"layer{i}", nn.Sequential(BasicBlock(fan_in, fan_out), BasicBlock(fan_out, fan_out)))
        self.fc = nn.Linear(10, 5)

    def forward(self, x):
        h = torch.relu(self.bn1(self.conv1(x)))
        for i in range(1, 5):
            h = getattr(self, f"layer{i}")(h)
        return self.fc(h.mean((2, 3)))


class EncoderBlock(nn.Module):
    """Of torchvision's ViT."""

    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.self_attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x):
        h = self.ln_1(x)
        x = x + self.self_attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_proj = nn.Conv2d(3, WIDTH, 4, 4)
        self.class_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        layers = {f"encoder_layer_{i}": EncoderBlock() for i in range(BLOCKS)}
        self.encoder = nn.ModuleDict({"layers": nn.Sequential()})
        for name, layer in layers.items():
            self.encoder["layers"].add_module(name, layer)
        self.heads = nn.Sequential()
        self.heads.add_module("head", nn.Linear(WIDTH, 5))

    def forward(self, x):
        h = self.conv_proj(x).flatten(2).mT
        h = torch.cat([self.class_token.expand(len(h), -1, -1), h], 1)
        return self.heads(self.encoder["layers"](h)[:, 0])


class VGG(nn.Module):
    def __init__(self):
        super().__init__()
        convolutions = [nn.Conv2d(i, o, 3, padding=1) for i, o in ((3, 4), (4, 6), (6, 6), (6, 8))]
        self.features = nn.Sequential(*(layer for conv in convolutions for layer in (conv, nn.ReLU())))
        self.classifier = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.0), nn.Linear(16, 5))

    def forward(self, x):
        return self.classifier(self.features(x).mean((2, 3)))


class NextBlock(nn.Module):
    """Of timm's ConvNeXt."""

    def __init__(self, width):
        super().__init__()
        self.conv_dw = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        return x + self.mlp(self.conv_dw(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Stage(nn.Module):
    """Of timm's ConvNeXt."""

    def __init__(self, fan_in, fan_out, blocks):
        super().__init__()
        self.downsample = nn.Sequential(nn.Conv2d(fan_in, fan_out, 2, 2)) if fan_in != fan_out else nn.Identity()
        self.blocks = nn.Sequential(*(NextBlock(fan_out) for _ in range(blocks)))

    def forward(self, x):
        return self.blocks(self.downsample(x))


class ConvNeXt(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 2, 2))
        self.stages = nn.Sequential(Stage(4, 4, 2), Stage(4, 8, 4), Stage(8, 12, 2))
        self.head = nn.ModuleDict({"fc": nn.Linear(12, 5)})

    def forward(self, x):
        return self.head["fc"](self.stages(self.stem(x)).mean((2, 3)))


class Mlp(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x)))


class MixerBlock(nn.Module):
    """Of timm's mixer: a block of two modules of one class."""

    def __init__(self):
        super().__init__()
        self.mlp_tokens, self.mlp_channels = Mlp(16), Mlp(WIDTH)

    def forward(self, x):
        x = x + self.mlp_tokens(x.mT).mT
        return x + self.mlp_channels(x)


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.ModuleDict({"proj": nn.Conv2d(3, WIDTH, 4, 4)})
        self.blocks = nn.Sequential(*(MixerBlock() for _ in range(BLOCKS)))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x):
        return self.head(self.blocks(self.stem["proj"](x).flatten(2).mT).mean(1))


class LlamaLayer(nn.Module):
    def __init__(self, experts=0):
        super().__init__()
        self.self_attn = nn.ModuleDict({f"{n}_proj": nn.Linear(WIDTH, WIDTH, bias=False) for n in "qkvo"})
        if experts:
            self.mlp = nn.ModuleDict({"gate": nn.Linear(WIDTH, experts), "experts": nn.ModuleList()})
            self.mlp["experts"].extend(Mlp(WIDTH) for _ in range(experts))
        else:
            self.mlp = nn.ModuleDict({n: nn.Linear(WIDTH, WIDTH) for n in ("gate_proj", "up_proj", "down_proj")})
        self.experts = experts

    def forward(self, x):
        q, k, v, o = (self.self_attn[f"{n}_proj"] for n in "qkvo")
        x = x + o(torch.softmax(q(x) @ k(x).mT, -1) @ v(x))
        if self.experts:
            shares = torch.softmax(self.mlp["gate"](x), -1)
            return x + sum(shares[..., i : i + 1] * of(x) for i, of in enumerate(self.mlp["experts"]))
        return x + self.mlp["down_proj"](torch.relu(self.mlp["gate_proj"](x)) * self.mlp["up_proj"](x))


class Llama(nn.Module):
    """A language model of Hugging Face's, with its head's weight shared or its own."""

    def __init__(self, tied=False, experts=0):
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(32, WIDTH)
        self.model.layers = nn.ModuleList(LlamaLayer(experts) for _ in range(BLOCKS))
        self.lm_head = nn.Linear(WIDTH, 32, bias=False)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens):
        h = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            h = layer(h)
        return self.lm_head(h)


class Conv1D(nn.Module):
    """Of Hugging Face's pytorch_utils: a linear layer whose weight is [in, out]."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(0.2 * torch.randn(nx, nf)), nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        return torch.addmm(self.bias, x.reshape(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


Conv1D.__module__ = "transformers.pytorch_utils"


def as_transformers(monkeypatch):
    """Have the stand-in found where the class is."""
    for name in ("transformers", "transformers.pytorch_utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["transformers.pytorch_utils"].Conv1D = Conv1D  # type: ignore[attr-defined]


class GPT2Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.ModuleDict({"c_attn": Conv1D(3 * WIDTH, WIDTH), "c_proj": Conv1D(WIDTH, WIDTH)})
        self.mlp = nn.ModuleDict({"c_fc": Conv1D(2 * WIDTH, WIDTH), "c_proj": Conv1D(WIDTH, 2 * WIDTH)})

    def forward(self, x):
        q, k, v = self.attn["c_attn"](x).chunk(3, -1)
        x = x + self.attn["c_proj"](torch.softmax(q @ k.mT, -1) @ v)
        return x + self.mlp["c_proj"](torch.relu(self.mlp["c_fc"](x)))


class GPT2(nn.Module):
    def __init__(self):
        super().__init__()
        self.transformer = nn.Module()
        self.transformer.wte, self.transformer.wpe = nn.Embedding(32, WIDTH), nn.Embedding(16, WIDTH)
        self.transformer.h = nn.ModuleList(GPT2Block() for _ in range(BLOCKS))
        self.lm_head = nn.Linear(WIDTH, 32, bias=False)
        self.lm_head.weight = self.transformer.wte.weight

    def forward(self, tokens):
        h = self.transformer.wte(tokens) + self.transformer.wpe.weight[: tokens.shape[1]]
        for block in self.transformer.h:
            h = block(h)
        return self.lm_head(h)


class BertLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.ModuleDict({n: nn.Linear(WIDTH, WIDTH) for n in ("query", "key", "value", "output")})
        self.intermediate, self.output = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v, o = (self.attention[n] for n in ("query", "key", "value", "output"))
        x = x + o(torch.softmax(q(x) @ k(x).mT, -1) @ v(x))
        return x + self.output(torch.relu(self.intermediate(x)))


class Bert(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = nn.ModuleDict({"word_embeddings": nn.Embedding(32, WIDTH)})
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(BertLayer() for _ in range(BLOCKS))})
        self.pooler = nn.Linear(WIDTH, WIDTH)
        self.classifier = nn.Linear(WIDTH, 3)

    def forward(self, tokens):
        h = self.embeddings["word_embeddings"](tokens)
        for layer in self.encoder["layer"]:
            h = layer(h)
        return self.classifier(torch.tanh(self.pooler(h[:, 0])))


def images():
    return torch.randn(2, 3, 16, 16)


def tokens():
    return torch.arange(24).view(2, 12) % 20


LLAMA = "model.embed_tokens, a look-up", ["lm_head"], [f"model.layers.{i}" for i in range(8)]
MODELS = {
    "resnet": (ResNet, images, "conv1", ["fc"], [f"layer{i}.{j}" for i in (1, 2, 3, 4) for j in (0, 1)]),
    "vit": (ViT, images, "conv_proj", ["heads.head"], [f"encoder.layers.encoder_layer_{i}" for i in range(8)]),
    "vgg": (
        VGG,
        images,
        "features.0",
        ["classifier.3"],
        ["features.2", "features.4", "features.6", "classifier.0"],
    ),
    "convnext": (
        ConvNeXt,
        images,
        "stem.0",
        ["head.fc"],
        [f"stages.{i}.blocks.{j}" for i, n in enumerate((2, 4, 2)) for j in range(n)],
    ),
    "mixer": (Mixer, images, "stem.proj", ["head"], [f"blocks.{i}" for i in range(8)]),
    "llama": (Llama, tokens, *LLAMA),
    "llama-tied": (lambda: Llama(tied=True), tokens, *LLAMA),
    "mixtral": (lambda: Llama(experts=10), tokens, *LLAMA),
    "gpt2": (
        GPT2,
        tokens,
        "transformer.wte, a look-up",
        ["lm_head"],
        [f"transformer.h.{i}" for i in range(8)],
    ),
    "bert": (
        Bert,
        tokens,
        "embeddings.word_embeddings, a look-up",
        ["classifier"],
        [f"encoder.layer.{i}" for i in range(8)],
    ),
}
"""Name -> what makes it, what makes a batch, its stem, its heads, its blocks."""
