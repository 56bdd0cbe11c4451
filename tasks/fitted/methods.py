"""Ways to fit a weight to its grid, given the second moments of what it multiplies.

With inputs X [T, K] and H = Xᵀ X, rounding W [N, K] to Ŵ changes the outputs by ‖X (Ŵ - W)ᵀ‖² = tr (Ŵ - W) H (Ŵ - W)ᵀ.

    nearest  each element by itself
    gptq     one column after the other, the error of each made good by those that follow (2210.17323)
    mr-gptq  scales shrunk to the smallest |Ŵ - W|^2.4 of each block, then gptq, on rotated weights (2509.23202)
    llm-fp4  scales shrunk to the smallest change of the outputs, block after block, three rounds; elements to nearest
             (LLM-FP4's search of exponent biases, 2310.16836, for scales of blocks)

Scales are held while columns change: grid.py. All is done in float64.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fp4dse.dse import Quantizer
from fp4dse.tasks.fitted.grid import Grid, block_maxima, hold, spread

DAMPING = 0.01
"""Share of H's mean diagonal that is added to it (GPTQ's code)."""
SHRINKS, LEAST_SHRINK, POWER = 100, 0.8, 2.4
"""Factors of scales that MR-GPTQ tries, from 1 down to the least, and the power of errors (FP-Quant's code)."""
SEARCH_STEPS, ROUNDS = 100, 3
"""Factors that LLM-FP4 tries, from 0.01 on, and its rounds. It goes on to 1.2; from 1 on nothing is clipped."""


def output_error(w: Tensor, fitted: Tensor, h: Tensor) -> Tensor:
    """‖X (Ŵ - W)ᵀ‖², float64, of weights [N, K] and H [K, K]."""
    away = fitted.to(torch.float64) - w.to(torch.float64)
    return torch.einsum("nk,kl,nl->", away, h, away)


def rounded_to_nearest(w: Tensor, quantizer: Quantizer, _h: Tensor) -> Tensor:
    """Each element to nearest."""
    return hold(w, quantizer).rounded(w.to(torch.float64))


def gptq(w: Tensor, quantizer: Quantizer, h: Tensor) -> Tensor:
    """GPTQ on the grid that the weight has."""
    return by_columns(w, hold(w, quantizer), h)


def mr_gptq(w: Tensor, quantizer: Quantizer, h: Tensor) -> Tensor:
    """GPTQ on a grid whose scales were searched for."""
    candidates = torch.linspace(1.0, LEAST_SHRINK, SHRINKS, dtype=torch.float64, device=w.device)
    q = quantizer.evaluated()
    best = torch.full_like(block_maxima(w, q), torch.inf, dtype=torch.float64)
    shrink = torch.ones_like(best)
    for factor in candidates.tolist():
        away = hold(w, quantizer, torch.full_like(w, factor)).rounded(w.to(torch.float64)) - w
        error = _sums(away.abs() ** POWER, q)
        shrink = torch.where(error < best, factor, shrink)
        best = torch.minimum(error, best)
    return by_columns(w, hold(w, quantizer, spread(shrink, q, w)), h)


def searched(w: Tensor, quantizer: Quantizer, h: Tensor) -> Tensor:
    """The scales with the smallest error of the outputs, one block of columns after the other."""
    q, wide = quantizer.evaluated(), w.to(torch.float64)
    width = q.block if isinstance(q.block, int) else w.shape[1] if q.block in ("row", "tensor") else int(q.unit)
    factors = torch.linspace(0.01, 1.0, SEARCH_STEPS, dtype=torch.float64, device=w.device).tolist()
    tried = [hold(w, quantizer, torch.full_like(w, factor)).rounded(wide) for factor in factors]
    best = tried[-1]
    for _ in range(ROUNDS):
        for first in range(0, w.shape[1], width):
            part = slice(first, first + width)
            of_others = (best - wide) @ h[:, part] - (best - wide)[:, part] @ h[part, part]
            errors = []
            for candidate in tried:
                away = candidate[:, part] - wide[:, part]
                of_rows = ((away @ h[part, part] + 2 * of_others) * away).sum(1)
                errors.append(_of_tiles(of_rows, q))
            chosen = torch.stack(errors).argmin(0)
            picked = torch.stack([candidate[:, part] for candidate in tried])[chosen, torch.arange(len(w))]
            best = torch.cat([best[:, :first], picked, best[:, first + width :]], dim=1)
    return best


def by_columns(w: Tensor, grid: Grid, h: Tensor) -> Tensor:
    """GPTQ of w [N, K] on a grid: what rounding a column leaves over is taken on by the columns after it, as least
    squares have it: w_j -= e · U_ij / U_ii, U the upper Cholesky factor of H⁻¹ (2210.17323, algorithm 1)."""
    left = w.to(torch.float64).clone()
    upper = inverse_factor(h)
    out = torch.empty_like(left)
    for column in range(w.shape[1]):
        out[:, column] = grid.rounded(left[:, column], column)
        error = (left[:, column] - out[:, column]) / upper[column, column]
        left[:, column:] -= error[:, None] * upper[column, column:]
    return out


def inverse_factor(h: Tensor) -> Tensor:
    """U, upper, with Uᵀ U = H⁻¹ of the damped H [K, K]; inputs that are always zero count as if they were noise."""
    h = h.to(torch.float64).clone()
    diagonal = h.diagonal()
    diagonal[diagonal == 0] = 1.0
    diagonal += DAMPING * diagonal.mean()
    found: Tensor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(h)), upper=True)
    return found


METHODS: dict[str, Callable[[Tensor, Quantizer, Tensor], Tensor]] = {
    "nearest": rounded_to_nearest,
    "gptq": gptq,
    "mr-gptq": mr_gptq,
    "llm-fp4": searched,
}
"""Name -> (weight float32 [N, K], its quantizer, H float64 [K, K]) -> the fitted weight, float64 [N, K]."""


def _sums(x: Tensor, q: Quantizer) -> Tensor:
    """Sums over blocks of x >= 0 [N, K], in the shape that scales have."""
    scale = block_maxima(x, q)
    per = torch.where(scale > 0, scale, 1.0)
    ones = x / spread(per, q, x)
    n, k = x.shape
    rows, columns = n // scale.shape[0], k // scale.shape[1]
    total: Tensor = ones.view(scale.shape[0], rows, scale.shape[1], columns).sum((1, 3))
    return total * per


def _of_tiles(of_rows: Tensor, q: Quantizer) -> Tensor:
    """Errors of rows [N], with those of all rows that share scales in each of them."""
    together = len(of_rows) if q.block == "tensor" else int(str(q.block).split("x")[0]) if "x" in str(q.block) else 1
    return of_rows.view(-1, together).sum(1).repeat_interleave(together)
