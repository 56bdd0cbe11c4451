"""What is compiled for a CPU has the bits of the reference: any quantizers side by side, in either orientation."""

import itertools

import msgspec
import pytest
import torch

from fp4dse.dse import QUANTIZERS, Quantizer, Recipe
from fp4dse.dse.formats import ELEMENTS
from fp4dse.dse.own_formats import FloatElement, TableElement
from fp4dse.dse.rounding import ROUNDING_NAMES, Ema, Nearest, Stochastic, samples_of
from fp4dse.dse.rules.quantizers import quantizer_faults
from fp4dse.dse.scale import SCALE_NAMES, OwnScale
from fp4dse.kernels import LaneNumerics, lanes, native, native_library
from fp4dse.kernels.ops import adamw as adam
from fp4dse.kernels.ops import philox
from fp4dse.kernels.ops import silu as activations
from fp4dse.kernels.ops.philox import STREAMS
from fp4dse.kernels.quant.backend import PLAIN, backend
from fp4dse.kernels.quant.call import Call
from fp4dse.kernels.quant.descriptor import descriptor
from fp4dse.kernels.quant.spec.reference import decode_operand
from fp4dse.kernels.quant.triton import unfused
from fp4dse.kernels.quant.triton.features import features_of
from fp4dse.tasks.threads import torch_threads

replace = msgspec.structs.replace
NVFP4, MXFP4 = Quantizer.named("nvfp4"), Quantizer.named("mxfp4")


def takes(q: Quantizer) -> bool:
    own = q.codec == "block" and isinstance(q.block, int) and not q.is_plain
    return own and not q.stochastic_scales and not isinstance(q.rounding, Ema)


NAMED = {name: q for name, q in QUANTIZERS.items() if takes(q)}


@pytest.fixture(autouse=True, scope="module")
def library():
    assert native.why_not_native() is None


def odd_rows(lanes, columns, rows=13):
    """Rows of very different size, some on the grid, zero, subnormal and huge; NaN and Inf in the last lane."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(lanes, rows, columns, generator=g)
    x[:, ::3] *= torch.exp2(torch.randint(-60, 60, (lanes, len(range(0, rows, 3)), 1), generator=g).float())
    x[:, 1] = 0
    x[:, 2] *= 1e-41
    x[:, 4] *= 1e37
    x[:, 5, 0] = 1e30
    x[:, 7] = torch.round(x[:, 7] * 4) / 4
    x[-1, 8, 3], x[-1, 9, 5], x[-1, 10, -1] = float("nan"), float("inf"), -float("inf")
    return x


def same(a, b):
    """Bit for bit; a NaN is a NaN."""
    nan = torch.isnan(b)
    return torch.equal(torch.isnan(a), nan) and torch.equal(a[~nan].view(torch.int32), b[~nan].view(torch.int32))


def assert_operands_agree(x, quantizers, columns, seeds=None, step=11, site=77, block=None):
    """x [L, R, C], contracted over C."""
    tables = descriptor(quantizers)
    given = x.mT.contiguous() if columns else x
    seeds = torch.arange(len(x)) if seeds is None else torch.tensor(list(seeds))
    keys = seeds, torch.tensor(step), site
    codec = quantizers[0].canonical().codec
    call = Call(block or quantizers[0].block, *tables, features_of(*tables), *keys, codec=codec)
    got = native.operand(given, columns, call)
    for ours, theirs in zip(got, unfused.operand(given, columns, call), strict=True):
        assert ours.shape == theirs.shape
        assert same(ours, theirs)


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("columns", [False, True])
def test_named_quantizers_have_the_bits_of_the_reference(name, columns):
    q = NAMED[name]
    assert_operands_agree(odd_rows(3, 2 * max(q.block, 32)), [q] * 3, columns)


@pytest.mark.parametrize("columns", [False, True])
def test_every_element_scale_and_rounding_side_by_side(columns):
    roundings = [of for of in ROUNDING_NAMES.values() if not isinstance(of, Ema) and samples_of(of) == 1]
    quantizers = [
        q
        for element, scale, rounding, like in itertools.product(
            (*ELEMENTS, *OWN_ELEMENTS), (*SCALE_NAMES.values(), *OWN_SCALES), roundings, (NVFP4, MXFP4)
        )
        if not quantizer_faults(q := replace(like, element=element, scale=scale, rounding=rounding, block=32))
        and takes(q)
    ]
    assert len(quantizers) > 100
    assert_operands_agree(
        odd_rows(len(quantizers), 64), quantizers, columns, ([7, -5, 2**40 + 1] * 999)[: len(quantizers)]
    )


OWN_ELEMENTS = FloatElement(mantissa=0, emin=-4, max=4.0), FloatElement(mantissa=3, emin=1, max=7.5)
OWN_SCALES = OwnScale(mantissa=4, emin=-2, max=31.0), OwnScale(mantissa=0, emin=-7, max=2.0**7, zero="min")
TABLES = [
    (
        -1.0,
        -0.6962,
        -0.5251,
        -0.3949,
        -0.2844,
        -0.1848,
        -0.091,
        0.0,
        0.08,
        0.161,
        0.246,
        0.338,
        0.441,
        0.563,
        0.723,
        1.0,
    ),
    tuple(float(n) for n in range(-8, 8)),
    tuple(float(n) for n in range(16)),
    (-0.75, 0.0, 2.5),
]


@pytest.mark.parametrize("block", [8, 16, 32, 256])
@pytest.mark.parametrize("columns", [False, True])
def test_tables_of_every_scale_and_rounding_side_by_side(columns, block):
    roundings = [of for of in ROUNDING_NAMES.values() if not isinstance(of, Ema) and samples_of(of) == 1]
    quantizers = [
        q
        for values, scale, rounding, like in itertools.product(
            TABLES, (*SCALE_NAMES.values(), *OWN_SCALES), roundings, (NVFP4, MXFP4)
        )
        if not quantizer_faults(
            q := replace(like, element=TableElement(values=values), scale=scale, rounding=rounding, block=block)
        )
        and not q.stochastic_scales
    ]
    assert len(quantizers) > 100
    assert_operands_agree(odd_rows(len(quantizers), max(block, 64)), quantizers, columns)


@pytest.mark.parametrize("block", native.BLOCKS)
@pytest.mark.parametrize("columns", [False, True])
def test_the_better_of_two_encodings_beside_lanes_that_have_one(columns, block):
    """Of few rows and of more than are looked at together, with errors that are equal."""
    adapts, roundings = ("none", "4over6-mse", "4over6-mae"), (Nearest(), Nearest(ties="away"), Stochastic())
    scales = *(NVFP4.scale, SCALE_NAMES["ue5m3"], SCALE_NAMES["e4m3-encode"], SCALE_NAMES["fp32"]), *OWN_SCALES
    elements = "e2m1", "int4", TableElement(values=TABLES[-1])
    for element in elements:
        quantizers = [
            q
            for adapt, scale, rounding in itertools.product(adapts, scales, roundings)
            if not quantizer_faults(
                q := replace(NVFP4, element=element, adapt=adapt, scale=scale, rounding=rounding, block=min(block, 256))
            )
        ]
        assert {q.adapt for q in quantizers} == set(adapts)
        for rows in (13, 40) if element == "e2m1" and block < 1024 else (13,):
            assert_operands_agree(odd_rows(len(quantizers), 2 * block, rows), quantizers, columns, block=block)


@pytest.mark.parametrize(
    ("seed", "step", "site"), [(3, 2**33 + 5, 77), (-5, 11, 77), (2**40 + 7, 11, 2**33), (0, 0, 0)]
)
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("rows", [1, 13, 200])
def test_draws_of_any_keys_and_sizes_are_those_of_philox(seed, step, site, columns, rows):
    q = replace(NVFP4, rounding=Stochastic())
    x = torch.randn(2, rows, 48, generator=torch.Generator().manual_seed(rows))
    assert_operands_agree(x, [q] * 2, columns, [seed, seed + 1], step, site)


def test_lanes_may_lie_apart_and_threads_share_them():
    x = torch.randn(5, 100, 480)[:, :64]
    for threads in (1, 2):
        with torch_threads(threads):
            assert_operands_agree(x, [NVFP4, replace(NVFP4, element="int4"), *[NVFP4] * 3], False)


def test_a_tensor_maximum_that_is_given_takes_the_place_of_the_present_one():
    x = torch.randn(2, 8, 64)
    x[1, 0, 0] = torch.nan
    tables, seeds, step = descriptor([NVFP4] * 2), torch.arange(2), torch.tensor(0)
    for amax in (torch.tensor([2.0, 7.0]), torch.tensor([0.0, torch.inf])):
        got = native.operand(x, False, Call(16, *tables, features_of(*tables), seeds, step, 0, amax))
        expected = decode_operand(x.view(2, -1, 16), *tables, tensor_amax=amax[:, None])
        assert same(got[0].reshape(expected[0].shape), expected[0])
        assert same(got[1], expected[1])


def test_what_it_does_not_take_is_refused_in_words():
    x, tables = torch.randn(2, 8, 64), descriptor([NVFP4] * 2)
    call = Call(16, *tables, features_of(*tables), torch.arange(2), torch.tensor(0), 0, rotation=16)
    with pytest.raises(ValueError, match=r"found torch.float32, rotation 16, .* accepted: float32, 0, block"):
        native.operand(x, False, call)


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4-sr-rht", "mxfp4", "nvidia-nvfp4", "fp4-all-the-way"])
@pytest.mark.parametrize(("m", "n", "k"), [(24, 40, 48), (64, 1, 1024)])
def test_products_have_the_bits_of_the_reference(recipe, m, n, k, monkeypatch):
    """All three products of a layer, with rotations, tiles and held maxima as the recipe has them."""
    seen = []
    torch.manual_seed(0)
    x, w, g = torch.randn(2, m, k), torch.randn(2, n, k), torch.randn(2, m, n)
    for path in (backend("cpu"), PLAIN):
        monkeypatch.setattr(lanes, "backend", lambda _, path=path: path)
        numerics = LaneNumerics([Recipe.named(recipe)] * 2, [0, 1])
        numerics.precise_layers.clear()
        out = [
            numerics.forward(0, x, w).y,
            numerics.gemm("dgrad", 0, g, 2, w, 1),
            numerics.gemm("wgrad", 0, g, 1, x, 1),
        ]
        seen.append(out)
    for ours, theirs in zip(*seen, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-4)  # a product's order of sums depends on the layout


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4-sr-rht"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 7, 9), (7, 3, 130), (33, 1, 5), (64, 64, 48)])
def test_a_lane_has_the_same_products_wherever_it_stands(recipe, m, n, k):
    """Results of an odd size are aligned otherwise for every lane."""
    torch.manual_seed(0)
    x, w, g = torch.randn(16, m, k), torch.randn(16, n, k), torch.randn(16, m, n)

    def products(x, w, g):
        numerics = LaneNumerics([Recipe.named(recipe)] * len(x), [0] * len(x))
        backward = numerics.gemm("dgrad", 0, g, 2, w, 1), numerics.gemm("wgrad", 0, g, 1, x, 1)
        return [numerics.forward(0, x, w).y, *backward]

    together = products(x, w, g)
    for first, count in ((5, 2), (1, 3), (3, 13)):
        of = slice(first, first + count)
        for alone, all_of_them in zip(products(x[of].clone(), w[of].clone(), g[of].clone()), together, strict=True):
            assert torch.equal(alone, all_of_them[of])


@pytest.mark.parametrize("shape", [(3, 1001), (2, 1), (5, 70_000)])
def test_adamw_is_the_reference_and_lanes_that_are_not_alive_stay(shape):
    torch.manual_seed(0)
    lanes, elements = shape
    flat, mean, gradient = (torch.randn(shape) for _ in range(3))
    square, decaying = torch.randn(shape).square(), torch.rand(elements) > 0.5
    numbers = torch.tensor([1e-3, 0.9, 0.1, 0.95, 0.05, 1e-8, 0.19, 0.0975, 0.1]).repeat(lanes, 1)
    numbers[0, -1] = 0.0
    alive = torch.arange(lanes) != 1
    gradient[1] = torch.nan
    seen = []
    for adamw in (native.adamw, adam._adamw):
        tensors = [t.clone() for t in (flat, mean, square)]
        adamw(*tensors, gradient, alive, numbers, decaying)
        seen.append(tensors)
    for ours, theirs, before in zip(*seen, (flat, mean, square), strict=True):
        assert torch.equal(ours, theirs)
        assert torch.equal(ours[1], before[1])
        assert not torch.equal(ours[0], before[0])


@pytest.mark.parametrize("first", [0, 5, 2**32 - 70])
@pytest.mark.parametrize("step", [3, 2**33 + 1])
def test_words_are_those_of_the_reference(first, step):
    seeds = torch.tensor([0, 7, -5, 2**31, 2**40 + 1, -(2**62)])
    for count in (1, 63, 64, 65, 200):
        asked = seeds, STREAMS["batch"], torch.tensor(step), torch.tensor(9), count, torch.tensor(first)
        assert torch.equal(native.words(*asked), philox.words(*asked))


def test_silu_and_its_gradient_are_those_of_single_operations():
    x = torch.cat(
        [torch.linspace(-100, 100, 100_001), torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-42])]
    )
    g, s = torch.randn_like(x), activations.sigmoid(x)
    assert same(native.silu(x), x * s)
    assert same(native.silu_gradient(x, g), g * (s * (1.0 + x * (1.0 - s))))


def test_without_a_compiler_the_reason_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    native_library.library.cache_clear()
    native.why_not_native.cache_clear()
    try:
        assert "no C++ compiler found (install g++ or set CXX)" in native.why_not_native()
        assert not native.takes(torch.zeros(1))
    finally:
        native_library.library.cache_clear()
        native.why_not_native.cache_clear()


def test_adamw_without_marks_decays_nothing():
    g = torch.Generator().manual_seed(1)
    flat, mean, gradient = (torch.randn(3, 70, generator=g) for _ in range(3))
    tensors = [
        flat,
        mean,
        mean.square(),
        gradient,
        torch.tensor([True, False, True]),
        torch.rand(3, 9, generator=g) + 0.5,
    ]
    found, expected = ([t.clone() for t in tensors] for _ in range(2))
    native.adamw(*found, None)
    adam._adamw(*expected, None)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
