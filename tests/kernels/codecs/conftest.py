"""Tensors of blocks that codecs are compared with their oracles on."""

import pytest
import torch

KINDS = {
    "random": lambda x: x,
    "bf16": lambda x: x.bfloat16().float(),
    "small-integers": lambda x: torch.round(x * 4),  # ties everywhere
    "halves": lambda x: torch.round(x * 8).clamp(-15, 15) / 2,
    "wide": lambda x: x * torch.exp2(torch.linspace(-40, 40, len(x)).round())[:, None],
    "one-outlier": lambda x: torch.cat([x[:, :1] * 1e6, x[:, 1:]], 1),
    "one-sign": lambda x: x.abs() * torch.where(torch.arange(len(x)) % 2 == 0, 1.0, -1.0)[:, None],
    "equal": lambda x: x[:, :1].expand_as(x).contiguous(),
    "zero-blocks": lambda x: x * (torch.arange(len(x)) % 2)[:, None],
    "subnormal": lambda x: x * 1e-41,
    "huge": lambda x: x.clamp(-3, 3) * 1e38,
}


@pytest.fixture(params=KINDS)
def draw(request):
    """A function of the block size: float32 [64, size], each row a block."""
    kind = KINDS[request.param]
    generator = torch.Generator().manual_seed(11)
    return lambda size: kind(torch.randn(64, size, generator=generator))
