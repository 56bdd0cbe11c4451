"""What several tests of decoders share."""

import pytest
from torch.nn.functional import scaled_dot_product_attention

from fp4dse.kernels import LaneNumerics, layers
from fp4dse.kernels.ops.attention import heads_joined


@pytest.fixture
def in_float32(monkeypatch):
    """Products and the attention core in FP32 and by torch, so that what is around them shows to the last digits."""

    def product(x, w, b, *_):
        return x @ w.mT + (0.0 if b is None else b[:, None])

    def attention(_self, _layer, q, k, v, causal, heads):
        return heads_joined(scaled_dot_product_attention(q, k, v, is_causal=causal), heads)

    monkeypatch.setattr(layers, "product", product)
    monkeypatch.setattr(LaneNumerics, "attention", attention)
