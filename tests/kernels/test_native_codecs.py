"""Native code has the bits of the reference in every codec: blocks of any size, whatever is given beside them."""

from functools import cache
from itertools import product

import msgspec
import pytest
import torch

from fp4dse.dse import QUANTIZERS, Quantizer, Recipe
from fp4dse.dse.formats import ELEMENTS
from fp4dse.dse.own_formats import FloatElement, TableElement
from fp4dse.dse.rounding import Ema, Nearest, Stochastic
from fp4dse.dse.rules.quantizers import quantizer_faults
from fp4dse.dse.scale import SCALE_NAMES, UE5M3, OwnScale, TensorScale
from fp4dse.kernels import LaneNumerics, lanes, native, native_library
from fp4dse.kernels.ops.philox import STREAMS, random16
from fp4dse.kernels.quant.backend import PLAIN, _compiled
from fp4dse.kernels.quant.call import Call
from fp4dse.kernels.quant.descriptor import descriptor
from fp4dse.kernels.quant.operand.state import EMA_STEPS
from fp4dse.kernels.quant.spec import reference
from fp4dse.kernels.quant.spec.codecs import CODECS
from fp4dse.kernels.quant.triton.features import features_of

replace = msgspec.structs.replace
NVFP4 = QUANTIZERS["nvfp4"]
BASES = {q.codec: q for q in reversed([q for q in QUANTIZERS.values() if not q.is_plain])}
BASES |= {
    "block": replace(NVFP4, scale=SCALE_NAMES["fp32"]),
    "softmax": replace(NVFP4, scaling="softmax"),
    "table": replace(NVFP4, element=TableElement(values=tuple(float(n) for n in range(-8, 8)))),
}
VALUES = {
    "element": [
        *ELEMENTS,
        FloatElement(mantissa=0, emin=-4, max=4.0),
        FloatElement(mantissa=2, emin=-3, max=1.75),
        TableElement(values=(-0.75, 0.0, 2.5)),
        TableElement(values=tuple(float(n) for n in range(16))),
    ],
    "scale": [*SCALE_NAMES.values(), OwnScale(mantissa=4, emin=-2, max=31.0), UE5M3(rounding="stochastic")],
    "rounding": [Nearest(), Nearest(ties="away"), Stochastic(), Stochastic(bits=8), Ema()],
    "adapt": ["none", "4over6-mse", "4over6-mae"],
    "range": ["full", "16/17", "3/4", "aligned"],
    "tensor_scale": [None, TensorScale(), TensorScale(target=16.0)],
}
SIZES = {"hif4": [64], "macro": [8, 32, 64], "sawb": [7, 64, 1000]}


@cache
def population(codec: str) -> list[Quantizer]:
    """The codec with all that it may be combined with: each two of the fields above."""
    base = replace(BASES[codec], outliers=None)
    changes = [
        {one: a, other: b}
        for one, other in product(VALUES, VALUES)
        if one < other
        for a in VALUES[one]
        for b in VALUES[other]
    ]
    made = dict.fromkeys(replace(base, **change) for change in [{}, *changes])
    return [q for q in made if not quantizer_faults(q) and q.canonical().codec == codec]


def awkward(lanes: int, n: int, size: int) -> torch.Tensor:
    """Blocks of very different size, some on the grid, zero, subnormal and huge; some lanes with NaN and Inf, others
    with tiny numbers alone."""
    g = torch.Generator().manual_seed(size)
    x = torch.randn(lanes, n, size, generator=g)
    x[:, ::3] *= torch.exp2(torch.randint(-60, 60, (lanes, len(range(0, n, 3)), 1), generator=g).float())
    x[:, 1] = torch.tensor([0.0, -0.0])[torch.arange(size) % 2]
    x[:, 2] *= 1e-41
    x[:, 4] *= 1e37
    x[:, 5, 0] = 1e30
    x[:, 6] = x[:, 6].abs()
    x[:, 7] = torch.round(x[:, 7] * 4) / 4
    x[::3, 8, 3], x[1::5, 9, 1] = torch.nan, -torch.inf
    x[3::4] *= 2.0**-149
    return x


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit; a NaN is a NaN."""
    if a.dtype != torch.float32 or b.dtype != torch.float32:
        return torch.equal(a, b) and a.dtype == b.dtype
    nan = b.isnan()
    return torch.equal(a.isnan(), nan) and torch.equal(a[~nan].view(torch.int32), b[~nan].view(torch.int32))


def test_native_code_has_every_codec():
    assert set(native_library.CODECS) == set(CODECS)
    assert set(BASES) == set(CODECS)


@pytest.mark.parametrize(
    ("codec", "size"), [(c, size) for c in native_library.CODECS for size in SIZES.get(c, [16, 32, 100])]
)
def test_every_codec_beside_whatever_is_given(codec, size):
    """Random bits for elements and scales, averages to round towards, maxima, parts with factors of their own."""
    quantizers, g = population(codec), torch.Generator().manual_seed(size)
    lanes, n = len(quantizers), 16
    x, tables, zero = awkward(lanes, n, size), descriptor(quantizers), torch.tensor(0)
    random = random16(torch.arange(lanes), 1, zero, zero, n * size).view_as(x)
    scale_random = random16(torch.arange(lanes), 6, zero, zero, n)
    guide = x * (1 + 0.3 * torch.randn(x.shape, generator=g))
    guide[:, 3], guide[:, 6] = torch.nan, -guide[:, 6]
    maxima = torch.exp2(torch.randint(-40, 40, (lanes, 2), generator=g).float())
    cases: list[tuple[torch.Tensor | None, dict]] = [
        (None, {}),
        (random, {"scale_random": scale_random}),
        (random, {"guide": guide}),
        (None, {"guide": guide, "scale_random": scale_random}),
    ]
    if codec not in ("exact", "macro"):  # they have no tensor factor to be given
        cases += [
            (random, {"factors": 2}),
            (None, {"tensor_amax": maxima[:, :1]}),
            (None, {"factors": 2, "tensor_amax": maxima}),
        ]
    if codec == "sawb":
        cases += [(random, {"unpadded": size - 2})]
    for drawn, more in cases:
        arguments = x, *tables, drawn, any(q.adapt.startswith("4over6") for q in quantizers)
        (got, dec), (wanted, factors) = (
            path.quantize_blocks(*arguments, codec=codec, **more) for path in (native, reference)
        )
        assert same(got.q, wanted.q), more
        assert same(got.scale, wanted.scale), more
        assert same(dec, factors), more
        assert list(got.meta) == list(wanted.meta)
        assert all(same(got.meta[name], wanted.meta[name]) for name in wanted.meta), more


@pytest.mark.parametrize(
    ("codec", "size", "factors"), [("hif4", 32, 1), ("macro", 256, 1), ("macro", 8, 2), ("block", 16, 3)]
)
def test_blocks_that_a_codec_cannot_have_are_refused(codec, size, factors):
    with pytest.raises(
        ValueError, match=rf"blocks: found 16 blocks of {size} in {factors} parts of codec {codec}; accepted"
    ):
        native.quantize_blocks(torch.ones(1, 16, size), *descriptor([BASES[codec]]), codec=codec, factors=factors)


@pytest.mark.parametrize("size", [32, 33])
@pytest.mark.parametrize("factors", [1, 3])
def test_random_bits_are_drawn_where_they_are_used(size, factors):
    """Also for a number of elements that is no multiple of those of a counter, and keys beyond 32 bits."""
    q = replace(NVFP4, rounding=Stochastic())
    x, tables = torch.randn(2, 9, size), descriptor([q, NVFP4])
    for keys in ((torch.tensor([3, 2**40 + 1]), torch.tensor(7), 5), (torch.tensor([-3, 1]), torch.tensor(2**33), 5)):
        call = Call(size, *tables, features_of(*tables), *keys)
        random = random16(keys[0], STREAMS["rounding"], keys[1], torch.tensor(keys[2]), 9 * size).view_as(x)
        got, wanted = (
            native.by_scales(x, call, factors=factors),
            reference.decode_operand(x, *tables, random, factors=factors),
        )
        assert all(same(a, b) for a, b in zip(got, wanted, strict=True))


def slots(monkeypatch, recipe: Recipe, name: str, steps=(0, EMA_STEPS + 1), **keys) -> list:
    """What slots of native code and of the reference make of an operand in these steps, along either dimension."""
    found = []
    for path in (_compiled(), PLAIN):
        monkeypatch.setattr(lanes, "backend", lambda _, path=path: path)
        numerics = LaneNumerics([recipe] * 2, [0, 1])
        slot = numerics.slots[name]
        assert (slot.quantizers.why_not_by_scales is None) == (path is not PLAIN)
        for step, dim in product(steps, (1, 2)):
            numerics.step.fill_(step)
            x = torch.randn(2, 128, 128, generator=torch.Generator().manual_seed(step)) * (1 + step)
            operand = slot.quantize(x, replace(numerics.use(dim), length=128, dim=dim, **keys))
            found += [t for term in operand.terms for t in term if t is not None]
        found += [slot.counts[name] for name in sorted(slot.counts)]
    return found


SPECIAL = {
    "rows": replace(NVFP4, tensor_scale=replace(NVFP4.tensor_scale, over="row")),
    "segments": replace(NVFP4, tensor_scale=replace(NVFP4.tensor_scale, over="segment")),
    "fp8 delayed": QUANTIZERS["fp8-delayed"],
    "fp8 rows": QUANTIZERS["fp8-row"],
    "fp8 segments": QUANTIZERS["fp8-1x128"],
    "fp8 tiles": QUANTIZERS["fp8-128x128"],
    "held": replace(NVFP4, tensor_scale=replace(NVFP4.tensor_scale, amax="held", steps=4)),
    "previous tiles": replace(NVFP4, block="16x16", tensor_scale=replace(NVFP4.tensor_scale, amax="previous")),
    "averaged": replace(NVFP4, rounding=Ema(beta=0.9)),
    "averaged rows": replace(NVFP4, block="row", tensor_scale=None, rounding=Ema(beta=0.9)),
    "averaged table": replace(BASES["table"], rounding=Ema(beta=0.9)),
    "adaptive by chance": replace(NVFP4, adapt="4over6-mse", scale=UE5M3(rounding="stochastic"), rounding=Stochastic()),
}


@pytest.mark.parametrize("counting", [False, True])
@pytest.mark.parametrize("name", [*BASES, *SPECIAL])
def test_a_slot_has_the_bits_of_the_reference(name, counting, monkeypatch):
    """In either orientation, with what is kept from step to step, and what it counts."""
    recipe = Recipe.uniform(QUANTIZERS["mxfp4"])
    recipe = replace(recipe, fprop=replace(recipe.fprop, w=(BASES | SPECIAL)[name]))
    found = slots(monkeypatch, recipe, "fprop.w", counting=counting)
    half = len(found) // 2
    assert len(found) == 2 * half
    assert all(same(a, b) for a, b in zip(found[:half], found[half:], strict=True))
