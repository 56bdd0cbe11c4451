"""The parts of a quantizer's error: the scale, the dead zone around zero, or the grid (2605.20402).

With the ideal scale s* = amax / val_max of each block and Q* the same rounding under s*, the error of Q is exactly

    Q − x = (Q − Q*) + (Q* − x)[Q* = 0] + (Q* − x)[Q* ≠ 0]
             scale      dead               grid

**scale** is what storing the scale in its format costs (or wins: the parts are not orthogonal, and a rounded scale may
undo some of the grid's error). **dead** are the elements below half of the smallest one under s*: |x| ≤ amax/24 for
E2M1. **grid** is the rounding of all others. dead and grid are orthogonal, since no element is in both. dead and scale
are orthogonal wherever no block's scale is below s* (`rceil`, `ceil`, range 3/4): what is 0 under s* is then 0 under s
too. Energies and cross terms are sums over the tensor, in float64, and add up to ‖Q − x‖².

s* is the unrounded scale in the decode sense, x̂ = q·s, whichever number is stored: a tensor scale drops out of it, and
so do a macro-block factor, the encode convention and a hybrid scale, whose effects are part of the scale error. Range
`16/17` has the val_max of its definition; ranges `3/4` and `aligned` quantize 3x/4 and decode with 4s/3, so their
ideal is s* = amax/6 on x itself. The split is defined for nearest rounding and one scale a block that follows its
maximum; what is not is refused.

With an outlier fallback, x̂ = Q(x) + α Q(x - Q(x)), Q* stands for the same with both scales ideal:
x̂* = Q*(x) + α Q*(x - Q*(x)). So scale is what rounding both costs, dead are the elements that neither of the two
represents (x̂* = 0: a dead element of the first whose block has no larger error beside it is mended by the second), and
grid is what is left of all others.
"""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from fp4dse.dse import ConfigError, Quantizer
from fp4dse.dse.formats import ELEMENTS
from fp4dse.dse.outliers import Residual
from fp4dse.dse.record import defaults, plain
from fp4dse.dse.rounding import Nearest
from fp4dse.dse.scale import E8M0, FP32, FloatScale
from fp4dse.kernels.quant.quantize import Quantized, quantize

CROSS = (("scale", "dead"), ("scale", "grid"), ("dead", "grid"))

_DEFINED = {"element", "block", "scale", "tensor_scale", "rounding", "range", "scaling", "arithmetic"}
_IDEAL_RANGE = {"full": "full", "16/17": "16/17", "3/4": "full", "aligned": "full"}
_SCALINGS = ("amax", "macro")


class Decomposition(msgspec.Struct, frozen=True):
    """The three parts of an error, float64 of x's shape, and their sums of squares.

    energy  of `scale`, `dead`, `grid`: ‖part‖². In the unit of x²
    cross   of (`scale`, `dead`), (`scale`, `grid`), (`dead`, `grid`): 2⟨a, b⟩
    total   ‖Q − x‖², the sum of all six
    dead_elements  how many x ≠ 0 have Q* = 0
    """

    scale: Tensor
    dead: Tensor
    grid: Tensor
    energy: dict[str, float]
    cross: dict[tuple[str, str], float]
    total: float
    dead_elements: int

    def shares(self) -> dict[str, float]:
        """Energies and cross terms over the total: `scale`, `dead`, `grid`, `scale·dead`, …; empty without an error.

        They sum to 1; a negative cross term is error that cancels.
        """
        named = self.energy | {f"{a}·{b}": value for (a, b), value in self.cross.items()}
        return {name: value / self.total for name, value in named.items()} if self.total else {}


def decompose(x: Tensor, quantizer: Quantizer, *, seed: int = 0) -> Decomposition:
    """Split the quantization error of x [..., K] into scale, dead zone and grid; their sum is Q − x.

    x: floating point, finite, computed in float32. seed keys whatever the quantizer draws. Raises ConfigError where
    the split is not defined (see `why_not_decomposed`), for NaN and Inf, and for what `quantize` refuses.
    """
    ideal_scale(quantizer)  # what is not defined is refused before anything is computed
    return split(x, quantize(x, quantizer, seed=seed), quantizer)


def split(x: Tensor, quantized: Quantized, quantizer: Quantizer) -> Decomposition:
    """The decomposition of x [..., K] whose quantized form under `quantizer` is at hand (its first one, where it has a
    fallback); raises as decompose does."""
    x, of_ideal = finite(x), ideal_scale(quantizer)
    ideal = quantize(x, of_ideal)
    assert quantized.scales is not None
    assert ideal.scales is not None
    if quantized.scales.shape != ideal.scales.shape:
        raise ConfigError("quantizer.scale", plain(quantizer.scale), "one scale a block")
    decoded, at_ideal = whole(x, quantized, quantizer), whole(x, ideal, of_ideal)
    original = x.double()
    scale = decoded - at_ideal
    rest = at_ideal - original
    is_dead = at_ideal == 0
    parts = {"scale": scale, "dead": torch.where(is_dead, rest, 0.0), "grid": torch.where(is_dead, 0.0, rest)}
    return Decomposition(
        **parts,
        energy={name: _inner(part, part) for name, part in parts.items()},
        cross={(a, b): 2 * _inner(parts[a], parts[b]) for a, b in CROSS},
        total=_inner(decoded - original, decoded - original),
        dead_elements=int((is_dead & (original != 0)).sum()),
    )


def whole(x: Tensor, quantized: Quantized, quantizer: Quantizer) -> Tensor:
    """All that stands for x, float64: its quantized form, and with a fallback alpha times that of its error.
    ConfigError where it is not finite."""
    decoded = finite(quantized.values, "x̂")
    if not isinstance(quantizer.outliers, Residual):
        return decoded.double()
    second = finite(quantize(x - decoded, quantizer).values, "x̂")
    return decoded.double() + quantizer.outliers.alpha * second.double()


def finite(x: Tensor, name: str = "x") -> Tensor:
    """x in float32; ConfigError, which says `name`, if it holds NaN or Inf."""
    x = x.detach().to(torch.float32)
    if bad := int((~torch.isfinite(x)).sum()):
        raise ConfigError(name, f"{bad} elements that are NaN or Inf", "finite numbers")
    return x


def ideal_scale(quantizer: Quantizer) -> Quantizer:
    """The quantizer of Q*: same elements, blocks and ties, the scale amax / val_max in FP32 and nothing above it.

    ConfigError names the field for which there is no such quantizer.
    """
    q = quantizer.canonical()
    if isinstance(q.element, str) and q.element not in ELEMENTS:
        raise ConfigError("quantizer.element", q.element, f"an element with a block scale: {', '.join(ELEMENTS)}")
    if not isinstance(q.rounding, Nearest):
        raise ConfigError("quantizer.rounding", plain(q.rounding), "nearest, half-away")
    if not isinstance(q.scale, E8M0 | FloatScale):
        raise ConfigError("quantizer.scale", plain(q.scale), "E8M0 or a float format")
    if q.range not in _IDEAL_RANGE:
        raise ConfigError("quantizer.range", q.range, ", ".join(_IDEAL_RANGE))
    if q.scaling not in _SCALINGS:
        raise ConfigError("quantizer.scaling", q.scaling, ", ".join(_SCALINGS))
    for field, default in defaults(Quantizer).items():
        if field == "outliers" and isinstance(q.outliers, Residual):
            continue
        if field not in _DEFINED and getattr(q, field) != default:
            raise ConfigError(f"quantizer.{field}", getattr(q, field), str(default))
    range_ = _IDEAL_RANGE[q.range]
    return msgspec.structs.replace(q, scale=FP32(), tensor_scale=None, scaling="amax", range=range_)


def why_not_decomposed(quantizer: Quantizer) -> str | None:
    """The reason why the error of this quantizer has no such split; None where it has one."""
    try:
        ideal_scale(quantizer)
    except ConfigError as error:
        return str(error)
    return None


def _inner(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum())
