"""Time to a quality target (arXiv 2610.00053): a faster step must not need too many more of them."""

from __future__ import annotations

import math

from fp4dse.dse.errors import ConfigError


def time_to_quality(overhead: float, extra_tokens: float) -> float:
    """T/T₀ = (1 + τ)/(1 + g): training time to the quality that BF16 reaches, relative to BF16's.

    overhead      step time relative to BF16's, 1/(1 + g) for a throughput gain g
    extra_tokens  τ, the share of tokens more than BF16 that the target takes: 0.1 is 10 % more
    """
    if not -1 < extra_tokens < math.inf:
        raise ConfigError("--extra-tokens", extra_tokens, "a number above -1 (0.1 is 10 % more tokens than BF16)")
    return (1 + extra_tokens) * overhead


def tokens_to_spare(overhead: float) -> float:
    """The τ at which a recipe is as fast as BF16: how many more tokens its step time pays for."""
    return 1 / overhead - 1
