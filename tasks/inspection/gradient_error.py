"""Bias and variance of a gradient that depends on chance, from n passes over the same batch with the same weights.

Pass i has the error e_i = g_i − t_i, t_i the true gradient. Of the mean error of n passes the expected square is

    E ‖(e_1 + … + e_n) / n‖² = bias² + variance / n        bias² = ‖E e‖²,  variance = E ‖e − E e‖²

so an unbiased gradient falls as 1/n, and a biased one flattens at bias². Both are estimated without bias of their own:

    variance = (Σ‖e_i‖² − ‖Σ e_i‖² / N) / (N − 1)
    bias²    = (‖Σ e_i‖² − Σ‖e_i‖²) / (N (N − 1)),   the mean of ⟨e_i, e_j⟩ over i ≠ j; by chance it may be below zero

which together fit the curve at n = N exactly. Standard errors are those of a jackknife that leaves out one of BLOCKS
blocks of passes at a time. Where there is no bias at all, it overstates that of bias² (by √2 in the limit). Everything
is relative to ‖t‖², t the mean of t_i, and sums are taken in float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from fp4dse.tasks.job import number

BLOCKS = 16
"""Blocks of passes, one of which a jackknife leaves out. Passes come block by block."""


class MeanError(msgspec.Struct, frozen=True):
    """Error of the mean of n passes at n = 1, 2, 4 …, relative to ‖t‖². runs: how many runs of n passes it is averaged
    over; se: its standard error, from their spread, None for a single run."""

    n: int
    error: float | None
    se: float | None
    runs: int


class GradientError(msgspec.Struct, frozen=True):
    """Error of a gradient that depends on chance; all but norm, passes and cosine relative to ‖t‖². None: t is zero.

    norm          ‖t‖
    passes        N
    error         of one pass: the mean of ‖e_i‖²
    cosine        between one pass and its true gradient, mean
    bias2, variance   as above, with their standard errors
    curve         error of the mean against n
    """

    norm: float
    passes: int
    error: float | None
    cosine: float | None
    bias2: float | None
    bias2_se: float | None
    variance: float | None
    variance_se: float | None
    curve: list[MeanError]


class GradientErrors:
    """Errors of gradients of P numbers, taken in block by block, in all and by groups of parameters.

    sizes: of the parameters, P together. groups: G of them, each the indices of its parameters.
    """

    def __init__(self, sizes: Sequence[int], groups: Sequence[Sequence[int]]) -> None:
        self.sizes = list(sizes)
        self.belongs = torch.zeros(len(self.sizes), len(groups), dtype=torch.float64)
        for column, members in enumerate(groups):
            self.belongs[list(members), column] = 1.0
        self.means: list[Tensor] = []  # of the errors of each block, [P]
        self.squares: list[Tensor] = []  # Σ‖e_i‖² of each block, [G]
        self.cosines: list[Tensor] = []
        self.true: list[Tensor] = []
        self.runs: dict[int, list[Tensor]] = {}  # n -> squares [runs, G]
        self.per_block = 0

    def add(self, used: Tensor, true: Tensor) -> None:
        """Take in a block of passes: gradients g_i and t_i, float64 [C, P]; C a power of two, the same each time."""
        errors = used - true
        self.per_block = len(errors)
        squares = self._dot(errors, errors)
        self.squares.append(squares.sum(0))
        norms = self._dot(used, used) * self._dot(true, true)
        self.cosines.append((self._dot(used, true) / norms.sqrt()).mean(0))
        self.true.append(true.mean(0))
        self.means.append(self._mean(errors, 1, self.runs))

    def found(self) -> list[GradientError]:
        """Error of each group, once BLOCKS blocks are taken in. ValueError before."""
        if len(self.means) != BLOCKS:
            raise ValueError(f"blocks: found {len(self.means)}; accepted: {BLOCKS}")
        passes, means, squares = BLOCKS * self.per_block, torch.stack(self.means), torch.stack(self.squares)
        runs = {n: [*of] for n, of in self.runs.items()}
        mean = self._mean(means, self.per_block, runs)[None]
        runs[passes] = [self._dot(mean, mean)]
        total, square = self.per_block * means.sum(0), squares.sum(0)
        fit = self._fit(total, square, passes)
        without = [
            self._fit(total - self.per_block * means[k], square - squares[k], passes - self.per_block)
            for k in range(BLOCKS)
        ]
        errors = [_jackknife(torch.stack(of)) for of in zip(*without, strict=True)]
        true = torch.stack(self.true).mean(0)[None]
        scale = self._dot(true, true)[0]
        rows = torch.stack([square / passes, fit[0], errors[0], fit[1], errors[1]], 1) / scale[:, None]
        cosine = torch.stack(self.cosines).mean(0)
        out = []
        for g in range(len(scale)):
            error, bias2, bias2_se, variance, variance_se = map(number, rows[g].tolist())
            curve = [_mean_error(n, torch.cat(of)[:, g] / scale[g]) for n, of in sorted(runs.items())]
            out.append(
                GradientError(
                    norm=float(scale[g].sqrt()),
                    passes=passes,
                    error=error,
                    cosine=number(float(cosine[g])),
                    bias2=bias2,
                    bias2_se=bias2_se,
                    variance=variance,
                    variance_se=variance_se,
                    curve=curve,
                )
            )
        return out

    def _mean(self, means: Tensor, n: int, runs: dict[int, list[Tensor]]) -> Tensor:
        """The mean [P] of means of n passes each, [R, P]; on the way it notes in `runs` the squares of means of n
        passes, of 2n, and so on, but for that of all."""
        while len(means) > 1:
            runs.setdefault(n, []).append(self._dot(means, means))
            means, n = (means[0::2] + means[1::2]) / 2, 2 * n
        return means[0]

    def _dot(self, a: Tensor, b: Tensor) -> Tensor:
        """⟨a, b⟩ of each row of a, b [R, P] within each group, [R, G]."""
        by_parameter = [part.sum(1) for part in (a * b).split(self.sizes, 1)]
        return torch.stack(by_parameter, 1).cpu() @ self.belongs

    def _fit(self, total: Tensor, squares: Tensor, passes: int) -> tuple[Tensor, Tensor]:
        """bias² and variance [G] from Σ e_i [P] and Σ‖e_i‖² [G]."""
        whole = self._dot(total[None], total[None])[0]
        return (whole - squares) / (passes * (passes - 1)), (squares - whole / passes) / (passes - 1)


def _jackknife(without: Tensor) -> Tensor:
    """Standard errors [G] from the estimates without one block each, [BLOCKS, G]."""
    spread = (without - without.mean(0)).square().sum(0)
    return (spread * (BLOCKS - 1) / BLOCKS).sqrt()


def _mean_error(n: int, squares: Tensor) -> MeanError:
    runs = len(squares)
    se = number(float(squares.std() / runs**0.5)) if runs > 1 else None
    return MeanError(n, number(float(squares.mean())), se, runs)
