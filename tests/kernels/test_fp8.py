"""FP8 under FP32 factors: of a tensor, now or from its history, of a row, of 1×128 and of 128×128.

Bits against torchao's code and against Transformer Engine's formulas (tests/pytorch/references/quantize_scale_calc.py,
common/recipe/delayed_scaling.cu), written once more with casts of ml_dtypes; products against their definition.
"""

import itertools

import ml_dtypes
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp4dse.dse import QUANTIZERS, STAGES, Quantizer, Recipe, recipe_from_dict, recipe_to_dict
from fp4dse.dse.estimator import Clipped, Estimator, Through
from fp4dse.dse.outliers import OUTLIER_NAMES
from fp4dse.dse.scale import One, TensorScale
from fp4dse.dse.stages import Dgrad, Fprop, Hadamard, Wgrad
from fp4dse.kernels import LaneNumerics, quantize
from fp4dse.kernels.gemm import GEMMS, pick, product
from fp4dse.kernels.ops import products
from fp4dse.kernels.ops.attention_core import AttentionCore
from fp4dse.kernels.quant.backend import backend

replace = msgspec.structs.replace
ACTIVATION, WEIGHT = QUANTIZERS["fp8-1x128"], QUANTIZERS["fp8-128x128"]
DEEPSEEK = Recipe(
    Fprop(x=ACTIVATION, w=WEIGHT), Dgrad(g=ACTIVATION, w=WEIGHT), Wgrad(g=ACTIVATION, x=ACTIVATION)
).canonical()
TYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
CASTS = {"e4m3": (ml_dtypes.float8_e4m3fn, 448), "e5m2": (ml_dtypes.float8_e5m2, 57344)}


def wide(rows=256, columns=384, seed=0):
    """Numbers whose rows and tiles differ in size by up to 2^±30, some rows of BF16 numbers, some on ties."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=g) * torch.exp2(torch.randint(-30, 31, (rows, 1), generator=g).float())
    x[:, 128:256] *= 2.0**-7
    x[::3] = x[::3].bfloat16().float()
    x[1] = torch.round(torch.randn(columns, generator=g) * 64) / 8
    x[1, ::128] = 448.0
    return x


# --- the quantizers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_blocks_and_tiles_equal_torchao_bit_for_bit(seed):
    from torchao.prototype.blockwise_fp8_training import kernels as torchaos  # seconds, of which others have no use

    x = wide(seed=seed)
    theirs = {
        "fp8-1x128": (torchaos.torch_blockwise_scale_act_quant_lhs, x),
        "fp8-128x128": (torchaos.torch_blockwise_scale_weight_quant, x),
    }
    for name, (function, given_) in theirs.items():
        got, (codes, factors) = quantize(given_, QUANTIZERS[name]), function(given_)
        assert torch.equal(got.codes, codes.view(torch.uint8))
        assert torch.equal(got.tensor_scale, factors)
        assert (got.scales == 1).all()
    got, (codes, factors) = quantize(x.mT.contiguous(), ACTIVATION), torchaos.torch_blockwise_scale_act_quant_rhs(x)
    assert torch.equal(got.codes, codes.contiguous().view(torch.uint8).mT)
    assert torch.equal(got.tensor_scale, factors.mT)


@pytest.mark.parametrize("element", TYPES)
@pytest.mark.parametrize(("over", "granularity"), [("tensor", "TENSORWISE"), ("row", "AXISWISE")])
def test_tensors_and_rows_equal_torchao_bit_for_bit(element, over, granularity):
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated

    q = Quantizer(element=element, scale=One(), tensor_scale=TensorScale(over=over))
    for x in (*wide(), wide()):
        x = x.view(-1, 384)
        got = quantize(x, q)
        dim = {"axiswise_dim": -1} if over == "row" else {}
        scale = tensor_to_scale(x, TYPES[element], scaling_granularity=ScalingGranularity[granularity], **dim)
        assert torch.equal(got.codes, to_fp8_saturated(x * scale, TYPES[element]).view(torch.uint8))
        assert torch.equal(got.tensor_scale.view(-1), (1 / scale).view(-1))


def by_transformer_engine(x: np.ndarray, amax: np.float32, element: str) -> tuple[np.ndarray, np.float32]:
    """Codes and the inverse scale of x under this maximum, in float32 and by casts of ml_dtypes."""
    kind, largest = CASTS[element]
    f = np.float32
    with np.errstate(over="ignore", divide="ignore"):
        scale = f(1) if amax == 0 else min(f(largest) / f(amax), np.finfo(f).max)
    return np.clip(x * scale, -f(largest), f(largest)).astype(kind).view(np.uint8), f(1) / scale


@pytest.mark.parametrize("element", CASTS)
def test_the_current_maximum_scales_as_in_transformer_engine_over_the_whole_range(element):
    name = {"e4m3": "fp8-current", "e5m2": "fp8-e5m2-current"}[element]
    x = torch.randn(1024, generator=torch.Generator().manual_seed(0))
    for exponent in range(-149, 127):
        row = (x.double() * 2.0**exponent / x.abs().max()).float()
        codes, inverse = by_transformer_engine(row.numpy(), row.abs().max().numpy(), element)
        got = quantize(row[None], QUANTIZERS[name])
        assert np.array_equal(got.codes[0].numpy(), codes)
        assert got.tensor_scale.item() == inverse
    assert quantize(torch.zeros(1, 8), QUANTIZERS[name]).tensor_scale.item() == 1


def test_a_margin_is_a_target_of_a_power_of_two():
    q = replace(QUANTIZERS["fp8-current"], tensor_scale=TensorScale(target=4.0))
    x = wide()
    got, plain_ = quantize(x, q), quantize(x * 4, QUANTIZERS["fp8-current"])
    assert got.elements.abs().max() == 112
    assert got.tensor_scale == plain_.tensor_scale  # as if the maximum were four times as large


@pytest.mark.parametrize("element", CASTS)
@pytest.mark.parametrize("window", [1, 3, 1024])
def test_delayed_scaling_is_transformer_engines_from_the_second_step_on(element, window):
    """The largest of the last maxima, without this step's; here the first step has its own, there a scale of one."""
    lanes, steps = 2, 12
    g = torch.Generator().manual_seed(0)
    sizes = torch.exp2(torch.randint(-9, 9, (steps, lanes, 1, 1), generator=g).float())
    xs = torch.randn(steps, lanes, 4, 32, generator=g) * sizes
    q = Quantizer(element=element, scale=One(), tensor_scale=TensorScale(amax="history", steps=window))
    others = Quantizer(element=element, scale=One(), tensor_scale=TensorScale(amax="history", steps=2.0))
    recipes = [Recipe.uniform(q), Recipe.uniform(others)]
    numerics, history = LaneNumerics(recipes, [0, 1]), [[], []]
    for step, x in enumerate(xs):
        numerics.step.fill_(step)
        (term,) = numerics.slots["fprop.x"].quantize(x, numerics.use(0)).terms
        for lane, length in enumerate((window, 2)):
            maxima = history[lane][-length:] or [float(x[lane].abs().max())]
            codes, inverse = by_transformer_engine(x[lane].numpy(), np.float32(max(maxima)), element)
            values = codes.view(CASTS[element][0]).astype(np.float32)
            assert np.array_equal(term.values[lane].numpy(), values)
            assert term.factor[lane] == inverse
            history[lane].append(float(x[lane].abs().max()))


def test_a_history_forgets_what_is_not_finite_and_stands_still_in_evaluation():
    q = Quantizer(element="e4m3", scale=One(), tensor_scale=TensorScale(amax="history", steps=4.0))
    numerics = LaneNumerics([Recipe.uniform(q)] * 2, [0, 1])
    slot, x = numerics.slots["fprop.x"], torch.ones(2, 1, 32)

    def factor(values, step, training=True):
        numerics.step.fill_(step)
        numerics.training = training
        return slot.quantize(values, numerics.use(0)).terms[0].factor[0].item() * 448

    assert factor(x, 0) == pytest.approx(1)
    assert factor(x * torch.inf, 1) == pytest.approx(1)
    assert factor(x * 3, 2) == pytest.approx(1)
    state = {key: value.clone() for key, value in slot.state.items()}
    assert factor(x * 7, 3, training=False) == pytest.approx(3)
    assert all(torch.equal(state[key], value) for key, value in slot.state.items())
    again = LaneNumerics([Recipe.uniform(q)] * 2, [0, 1])
    again.load_state(numerics.state())
    again.step.fill_(3)
    got, expected = again.slots["fprop.x"].quantize(x, again.use(0)), slot.quantize(x, numerics.use(0))
    assert torch.equal(got.terms[0].factor, expected.terms[0].factor)


def test_a_weight_and_its_transpose_have_one_encoding_in_tiles():
    numerics = LaneNumerics([DEEPSEEK] * 2, [0, 1])
    w = wide(256, 256)[None].repeat(2, 1, 1)
    forward = numerics.slots["fprop.w"].quantize(w, numerics.use(0)).decoded()
    backward = numerics.slots["dgrad.w"].quantize(w, replace(numerics.use(0), dim=1)).decoded()
    assert torch.equal(forward, backward.mT)


# --- the product -------------------------------------------------------------------------------------------------


def whole_numbers(lanes, rows, columns, seed=0):
    """Elements of E4M3 whose partial sums over 128 are exact in FP32, in any order."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-15, 16, (lanes, rows, columns), generator=g).float()


def factors(lanes, rows, segments, seed=0):
    return torch.randn(lanes, rows, segments, generator=torch.Generator().manual_seed(seed)).abs() / 448


def by_definition(a, b, factor_a, factor_b):
    """Float32 in numpy, an operation at a time; sums of whole numbers are exact."""
    a, b = (t.double().numpy() for t in (a, b))
    out = np.zeros((len(a), a.shape[1], b.shape[1]), np.float32)
    for number in range(a.shape[2] // 128):
        along = slice(128 * number, 128 * number + 128)
        part = (a[:, :, along] @ b[:, :, along].transpose(0, 2, 1)).astype(np.float32)
        if factor_a is not None:
            part = part * factor_a[:, :, number].numpy()[:, :, None]
        if factor_b is not None:
            part = part * factor_b[:, :, number].numpy()[:, None, :]
        out = out + part
    return torch.from_numpy(out)


CASES = [(5, 7, 384), (16, 64, 128), (130, 33, 256)]
FLAGS = list(itertools.product((True, False), (True, False)))
"""Of both operands; the last are False."""


@pytest.mark.parametrize(("has_a", "has_b"), FLAGS[:-1])
@pytest.mark.parametrize(("rows", "columns", "length"), CASES)
def test_a_product_is_the_scaled_sums_of_its_segments_one_after_the_other(rows, columns, length, has_a, has_b):
    a, b = whole_numbers(3, rows, length), whole_numbers(3, columns, length, 1)
    fa = factors(3, rows, length // 128) if has_a else None
    fb = factors(3, columns, length // 128, 1) if has_b else None
    expected = by_definition(a, b, fa, fb)
    for name in ("fp32", "bf16-exact", "tf32-exact", "fp8-exact"):
        assert torch.equal(product(GEMMS[name], (a, b), (fa, fb)), expected), name


@pytest.mark.parametrize("transposed", FLAGS)
@pytest.mark.parametrize(("has_a", "has_b"), FLAGS[:-1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_has_the_bits_of_the_definition(place, dtype, has_a, has_b, transposed):
    for rows, columns, length in CASES:
        a, b = whole_numbers(3, rows, length).to(dtype), whole_numbers(3, columns, length, 1).to(dtype)
        fa = factors(3, rows, length // 128) if has_a else None
        fb = factors(3, columns, length // 128, 1) if has_b else None
        expected = by_definition(a, b, fa, fb)
        a, b = (x.mT.contiguous().mT if t else x for x, t in zip((a, b), transposed, strict=True))
        given_ = [None if t is None else t.to(place.device) for t in (a, b, fa, fb)]
        got = place.products.in_segments(*given_, "ieee")
        assert torch.equal(got.cpu(), expected)
        chosen = [None if t is None else t[[2, 0]] for t in given_]
        assert torch.equal(place.products.in_segments(*chosen, "ieee"), got[[2, 0]])


@given(*[st.integers(1, 70)] * 2, st.integers(1, 4), st.booleans(), st.booleans(), st.sampled_from([2, 3, 9]))
def test_a_lane_has_the_bits_that_it_has_alone(rows, columns, segments, a_columns, b_columns, lanes):
    g = torch.Generator().manual_seed(rows)
    a, b = (torch.randn(1, n, 128 * segments, generator=g) for n in (rows, columns))
    fa, fb = factors(1, rows, segments), factors(1, columns, segments, 1)

    def laid(x, by_columns):
        return x.mT.contiguous().mT if by_columns else x.contiguous()

    def run(times):
        operands = [laid(x.repeat(times, 1, 1), c) for x, c in ((a, a_columns), (b, b_columns))]
        return products.in_segments(*operands, fa.repeat(times, 1, 1), fb.repeat(times, 1, 1), products.multiply)

    assert torch.equal(run(lanes), run(1).expand(lanes, -1, -1))


def test_nothing_is_summed_over_an_empty_contraction():
    a, b = torch.ones(2, 3, 0), torch.ones(2, 4, 0)
    out = products.in_segments(a, b, torch.ones(2, 3, 0), None, products.multiply)
    assert torch.equal(out, torch.zeros(2, 3, 4))


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_multiplies_its_decoded_operands_at_any_size(stage):
    numerics, (first, second) = LaneNumerics([DEEPSEEK] * 2, [0, 1]), STAGES[stage]
    a, b = torch.randn(2, 40, 300), torch.randn(2, 200, 300)
    a[:, :, 128:] *= 1e-3
    got = numerics.gemm(stage, 0, a, 2, b, 2)
    turned = numerics.gemm(stage, 0, a.mT.contiguous(), 1, b.mT.contiguous(), 1)
    padded = [torch.nn.functional.pad(x, (0, 84)) for x in (a, b)]
    decoded = [
        numerics.slots[f"{stage}.{name}"].quantize(x, numerics.use(0)).decoded().double()
        for name, x in zip((first, second), padded, strict=True)
    ]
    exact, size = decoded[0] @ decoded[1].mT, decoded[0].abs() @ decoded[1].abs().mT
    for found in (got, turned):
        assert ((found - exact).abs() <= 2.0**-18 * size).all()
    alone = LaneNumerics([DEEPSEEK], [1]).gemm(stage, 0, a[1:], 2, b[1:], 2)
    assert torch.equal(alone, got[1:])


@pytest.mark.parametrize(
    "change",
    [{"outliers": OUTLIER_NAMES["residual"]}, {"outliers": OUTLIER_NAMES["occ"]}, {"tensor_scale": TensorScale()}],
    ids=["residual", "occ", "tensor"],
)
def test_factors_of_all_kinds_meet_in_a_product(change):
    """Of two terms, with what clamping cut off, or with a factor a tensor on one side and a row on the other."""
    x, w = torch.randn(2, 20, 256), torch.randn(2, 30, 256)
    for other in (WEIGHT, QUANTIZERS["fp8-row"], QUANTIZERS["nvfp4"], QUANTIZERS["bf16"]):
        recipe = replace(DEEPSEEK, fprop=Fprop(x=replace(ACTIVATION, **change), w=other))
        assert not recipe.validate()
        numerics = LaneNumerics([recipe] * 2, [0, 1])
        out = numerics.gemm("fprop", 0, x, 2, w, 2).double()
        of_x = numerics.slots["fprop.x"].quantize(x, numerics.use(0))
        of_w = numerics.slots["fprop.w"].quantize(w, numerics.use(0)).decoded().double()
        expected = of_x.decoded().double() @ of_w.mT
        if of_x.rest is not None:
            expected += of_x.rest.double() @ w.double().mT
        assert torch.allclose(out, expected, rtol=0, atol=2e-4)


def test_what_is_counted_rotated_or_has_an_estimator_is_scaled_alike():
    x, w = torch.randn(2, 20, 256), torch.randn(2, 140, 256)
    usual = LaneNumerics([DEEPSEEK] * 2, [0, 1])
    expected = usual.gemm("fprop", 0, x, 2, w, 2)
    usual.counting = True
    assert torch.equal(usual.gemm("fprop", 0, x, 2, w, 2), expected)
    assert not any(usual.lost()["fprop.x"][what].any() for what in ("clipped", "zeroed", "saturated"))
    passing = replace(DEEPSEEK, estimator=Estimator(x=Through(Clipped()), w=Through(Clipped())))
    numerics = LaneNumerics([passing] * 2, [0, 1])
    forward = numerics.forward(0, x, w, (True, True))
    assert torch.equal(forward.y, expected)
    g = torch.randn(2, 20, 256)
    assert torch.equal(numerics.backward("x", 0, g, forward.saved_x), g)  # nothing lies beyond the largest element
    rotated = replace(DEEPSEEK, fprop=replace(DEEPSEEK.fprop, rotation=Hadamard(16)))
    out = LaneNumerics([rotated] * 2, [0, 1]).gemm("fprop", 0, x, 2, w, 2)
    assert (out - x @ w.mT).norm() < 0.06 * (x @ w.mT).norm()


@pytest.mark.parametrize("name", [name for name in QUANTIZERS if name.startswith("fp8-") and name != "fp8-e5m2"])
def test_scaled_fp8_is_a_bf16_product(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    q = QUANTIZERS[name]
    assert pick("cuda", [q], [q, Quantizer.named("nvfp4"), Quantizer.named("mxfp8")]) == ("bf16-exact", ())
    assert set(Recipe.uniform(q).signature().products) == {"bf16"}


def test_the_attention_core_scales_partial_sums_as_well():
    data = recipe_to_dict(Recipe.named("bf16"))
    recipe = recipe_from_dict({**data, "attention": {"scores": {"q": "fp8-1x128", "k": "fp8-1x128"}}})
    numerics = LaneNumerics([recipe] * 2, [0, 1])
    core = AttentionCore([recipe.attention] * 2, torch.device("cpu"), backend("cpu"), "exact")
    q, k = torch.randn(8, 48, 160), torch.randn(8, 30, 160)  # four heads of a lane, two segments of their padded size
    decoded = []
    for x in (q, k):
        padded = torch.nn.functional.pad(x, (0, 96))
        decoded.append(quantize(padded.reshape(-1, 256), ACTIVATION).values.view_as(padded).double())
    got = core.products["scores"](q, k, numerics.use(0), 0)
    size = decoded[0].abs() @ decoded[1].abs().mT
    assert ((got - decoded[0] @ decoded[1].mT).abs() <= 2.0**-18 * size).all()
