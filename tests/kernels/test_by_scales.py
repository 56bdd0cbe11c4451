"""Elements by given scales have the bits of the reference, where the operand kernel does not take the quantizer."""

import msgspec
import pytest
import torch

from fp4dse.dse import QUANTIZERS, Recipe
from fp4dse.dse.rounding import Ema, Stochastic
from fp4dse.dse.scale import BF16, E4M3, FP32, UE5M3, One, TensorScale
from fp4dse.kernels import LaneNumerics, lanes
from fp4dse.kernels.quant.backend import PLAIN
from fp4dse.kernels.quant.call import Call
from fp4dse.kernels.quant.operand.state import EMA_STEPS
from fp4dse.kernels.quant.triton.by_scales import by_scales
from tests.kernels.comparing import Operators


def changed(name, **fields):
    return msgspec.structs.replace(QUANTIZERS[name], **fields)


def stored_by_chance(name):
    q = QUANTIZERS[name]
    return msgspec.structs.replace(q, scale=msgspec.structs.replace(q.scale, rounding="stochastic"))


CASES = {
    **{name: QUANTIZERS[name] for name in ("luq", "int4-sawb", "radix4", "radix4-odd", "fp4-row", "fp8", "fp8-e5m2")},
    **{name: q for name, q in QUANTIZERS.items() if isinstance(q.scale, One)},
    "radix4-sr": changed("radix4", rounding=Stochastic()),
    "radix4-sr8": changed("radix4", rounding=Stochastic(bits=8)),
    "row factors": changed("nvfp4", tensor_scale=TensorScale(over="row")),
    "segment factors": changed("nvfp4", tensor_scale=TensorScale(over="segment"), rounding=Stochastic()),
    "stochastic scales": stored_by_chance("nvfp4"),
    "soft maxima": changed("nvfp4", scaling="softmax"),
    "blocks of 8": changed("nvfp4", block=8),
    "blocks of 8 by chance": changed("mxfp4", block=8, rounding=Stochastic()),
    "row factors, stored by chance": msgspec.structs.replace(
        stored_by_chance("nvfp4"), tensor_scale=TensorScale(over="row")
    ),
    **{f"{type(scale).__name__} of 8": changed("nvfp4", block=8, scale=scale) for scale in (BF16(), FP32(), UE5M3())},
    **{
        f"e4m3, {rounding}, {convention}, hybrid {hybrid}, zero {zero}": changed(
            "nvfp4",
            block=8,
            scale=E4M3(rounding=rounding, convention=convention, hybrid=hybrid, zero=zero),
            tensor_scale=TensorScale(over="row"),
        )
        for rounding, convention, hybrid, zero in [
            ("up", "decode", False, "keep"),
            ("nearest", "encode", False, "min"),
            ("nearest", "encode", True, "one"),
            ("up", "decode", True, "min"),
        ]
    },
    "moving average": changed("mxfp4", rounding=Ema(beta=0.9)),
}


def hard(*shape):
    """Numbers of many sizes, on the grid, zero and subnormal; NaN and Inf in the last lane."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(*shape, generator=g)
    x[:, ::3] *= torch.exp2(torch.randint(-20, 20, (len(x), len(range(0, shape[1], 3)), 1), generator=g).float())
    x[:, 1] = 0
    x[:, 2] *= 1e-41
    x[:, 4] = torch.round(x[:, 4] * 4) / 4
    x[-1, 5, 3], x[-1, 6, 5] = float("nan"), float("inf")
    return x


@pytest.mark.parametrize(
    ("dtype", "shape"), [(torch.float32, (2, 40, 384)), (torch.bfloat16, (3, 9, 128))], ids=["float32", "bfloat16"]
)
@pytest.mark.parametrize("name", CASES)
def test_a_slot_has_the_bits_of_the_reference(place, monkeypatch, name, dtype, shape):
    recipe = Recipe.uniform(QUANTIZERS["mxfp4"])
    recipe = msgspec.structs.replace(recipe, fprop=msgspec.structs.replace(recipe.fprop, w=CASES[name]))
    found = []
    for kernel in (None, by_scales):
        chosen = msgspec.structs.replace(PLAIN, by_scales=kernel)
        monkeypatch.setattr(lanes, "backend", lambda _, chosen=chosen: chosen)
        numerics = LaneNumerics([recipe] * shape[0], range(shape[0]), place.device)
        slot = numerics.slots["fprop.w"]
        assert (slot.quantizers.why_not_by_scales is None) == (kernel is not None)
        for step in (0, EMA_STEPS + 1):
            numerics.step.fill_(step)
            x = (hard(*shape) * (1 + step / 8)).to(place.device)
            found.append(
                slot.quantize(x, msgspec.structs.replace(numerics.use(7), length=shape[2], dtype=dtype)).terms[0]
            )
    for expected, got in zip(found[:2], found[2:], strict=True):
        wanted = expected.values.to(got.values.dtype)
        assert torch.equal(got.values.isnan(), wanted.isnan())
        assert torch.equal(got.values.nan_to_num(7.0), wanted.nan_to_num(7.0))
        assert got.factor is expected.factor or torch.equal(got.factor.nan_to_num(7.0), expected.factor.nan_to_num(7.0))
    assert found[2].values.dtype == (torch.float32 if name == "segment factors" else dtype)


def test_the_moving_average_decides_some_elements(place, monkeypatch):
    """Without it the test above would not see whether it is heeded."""
    plain, guided = CASES["moving average"], msgspec.structs.replace(CASES["moving average"], rounding=Ema(beta=0.9))
    plain = msgspec.structs.replace(plain, rounding=QUANTIZERS["mxfp4"].rounding)
    monkeypatch.setattr(lanes, "backend", lambda _: msgspec.structs.replace(PLAIN, by_scales=by_scales))
    values = []
    for q in (plain, guided):
        recipe = Recipe.uniform(QUANTIZERS["mxfp4"])
        recipe = msgspec.structs.replace(recipe, fprop=msgspec.structs.replace(recipe.fprop, w=q))
        numerics = LaneNumerics([recipe] * 2, (0, 1), place.device)
        for step in (0, EMA_STEPS):
            numerics.step.fill_(step)
            x = hard(2, 9, 128)[:, :5].to(place.device) * (1 + step / 8)
            term = numerics.slots["fprop.w"].quantize(x, msgspec.structs.replace(numerics.use(0), length=128)).terms[0]
        values.append(term.values)
    assert not torch.equal(*values)


@pytest.mark.parametrize("name", ["fp8-1x128", "fp8-128x128", "fp8-row", "fp8"])
def test_maxima_scales_and_elements_are_an_operator_each(place, name):
    """Launches that take longer than what they do are most of a small step's time."""
    of = LaneNumerics([Recipe.uniform(QUANTIZERS[name])] * 2, (0, 1), place.device).slots["fprop.w"].quantizers
    x = of.cut(torch.randn(2, 256, 256, device=place.device))
    keys = torch.arange(2, device=place.device), torch.tensor(0, device=place.device), 0
    factors = of.first.factors(256, 256)
    with Operators() as seen:
        by_scales(x, Call(x.shape[2], *of.tables, of.features, *keys), torch.bfloat16, factors=factors)
    assert [name for name in seen.names if name not in ("empty", "select")] == ["aminmax", "scales", "elements"]


def test_the_operators_are_sound(place):
    x, scale = torch.randn(2, 3, 40, device=place.device), torch.ones(2, 3, device=place.device)
    recipe = Recipe.uniform(QUANTIZERS["fp8"])
    of = LaneNumerics([recipe] * 2, (0, 1), place.device).slots["fprop.x"].quantizers
    keys = torch.arange(2, device=place.device), torch.tensor(0, device=place.device), 0
    call = Call(40, *of.tables, of.features, *keys)
    of_call = *call[:3], list(call.features), *call[4:]
    arguments = x, scale, scale, None, torch.bfloat16, *of_call
    torch.library.opcheck(torch.ops.fp4dse.elements, arguments, test_utils=["test_schema", "test_faketensor"])
    for amax in (None, scale[:, :1]):
        arguments = -scale, scale, amax, *of_call
        torch.library.opcheck(torch.ops.fp4dse.scales, arguments, test_utils=["test_schema", "test_faketensor"])
