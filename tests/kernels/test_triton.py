"""The fused kernels have the bits of the reference, in Triton's interpreter and on a CUDA device where there is one."""

import itertools
import random

import msgspec
import pytest
import torch
from torch.utils._pytree import tree_map_only

from fp4dse.dse import QUANTIZERS, STAGES, Quantizer, Recipe
from fp4dse.dse.formats import ELEMENTS
from fp4dse.dse.own_formats import FloatElement
from fp4dse.dse.rounding import ROUNDING_NAMES, Ema, Nearest, Stochastic, samples_of
from fp4dse.dse.rules.quantizers import quantizer_faults
from fp4dse.dse.scale import E4M3, E6M2, SCALE_NAMES, FloatScale, OwnScale, TensorScale
from fp4dse.kernels import LaneNumerics, dispatch, lanes
from fp4dse.kernels.ops.rotation import rotate
from fp4dse.kernels.quant.backend import PLAIN
from fp4dse.kernels.quant.call import Call
from fp4dse.kernels.quant.descriptor import descriptor
from fp4dse.kernels.quant.packed import pack, unpack, why_not_packed
from fp4dse.kernels.quant.spec import blocks
from fp4dse.kernels.quant.spec.codecs import Encoded
from fp4dse.kernels.quant.spec.reference import decode_operand, tensor_maxima
from fp4dse.kernels.quant.triton import limits, unfused
from fp4dse.kernels.quant.triton import operators as fused
from fp4dse.kernels.quant.triton.features import features_of

tl = pytest.importorskip("triton.language", reason="triton is not installed")

NAMED = {
    name: q for name, q in QUANTIZERS.items() if not q.is_plain and isinstance(q.block, int) and q.codec == "block"
}
OWN_WAY = {name: q for name, q in QUANTIZERS.items() if isinstance(q.block, int) and q.codec in limits.CODECS[1:]}
OWN_WAY["soft-nvfp4"] = msgspec.structs.replace(QUANTIZERS["nvfp4"], scaling="softmax")
SEEDS, STEP, SITE = (3, -5, 2**40 + 7), 11, 77


def rounded(q, rounding):
    return msgspec.structs.replace(q, rounding=rounding)


def odd_rows(lanes, columns, rows=13):
    """Random rows, some of very different size, on the grid, zero, subnormal and huge; NaN and Inf in the last lane."""
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


def call_for(quantizers, site=SITE, step=STEP, block=None, **more):
    """The call record of lanes."""
    tables, seeds = descriptor(quantizers), torch.tensor((SEEDS * len(quantizers))[: len(quantizers)])
    keys = seeds, torch.tensor(step), site
    return Call(block or quantizers[0].block, *tables, features_of(*tables), *keys, codec=quantizers[0].codec, **more)


def arguments_for(x, quantizers, columns=False, **more):
    """What the operators take first, for lanes x [L, R, C]."""
    return x.mT.contiguous() if columns else x, columns, call_for(quantizers, **more)


def to(device, arguments):
    """Every tensor on the device."""
    return tree_map_only(torch.Tensor, lambda t: t.to(device), arguments)


def flat(call):
    """What the operator itself gets of a call, as it is traced."""
    return *call[:3], list(call.features), *call[4:]


def both(place, x, quantizers, columns=False, dtype=torch.float32, step=STEP, block=None, rotation=0, signs=None):
    """(fused, reference on the CPU), each values and factors, for lanes x [L, R, C]."""
    arguments = arguments_for(x, quantizers, columns, step=step, block=block, rotation=rotation, signs=signs)
    got = fused.operand(*to(place.device, arguments), dtype)
    values, dec = unfused.operand(*arguments)
    return tuple(t.cpu() for t in got), (values.to(dtype), dec)


def assert_same_bits(got, expected):
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        nan = torch.isnan(b)
        assert torch.equal(torch.isnan(a), nan)
        kind = torch.int16 if a.dtype == torch.bfloat16 else torch.int32
        assert torch.equal(a.view(kind)[~nan], b.view(kind)[~nan])  # the sign of zero included


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("rounding", [Nearest(), Stochastic()], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("name", NAMED)
def test_a_named_quantizer_has_the_bits_of_the_reference(place, name, rounding, columns):
    q = NAMED[name]
    for dtype in (torch.float32, torch.bfloat16):
        # numbers of bfloat16 are read in pairs, which an odd number of rows does not allow for columns
        x = odd_rows(2, 3 * q.block, 13 if dtype == torch.float32 or name == "nvfp4" else 14).to(dtype)
        assert_same_bits(*both(place, x, [rounded(q, rounding), q], columns))


def test_tensors_of_any_maximum_have_the_bits_of_the_reference_and_none_of_them_is_nan(place):
    """Among them those whose multipliers, inverses or tensor factors are beyond float32."""
    maxima = torch.tensor([2.0**-149, 1e-38, 1e-36, 3e-34, 1e-20, 1.0, 1e30, 2.0**127, 3.4028234663852886e38])
    factors = TensorScale(), TensorScale(target=2.0**-9), None
    encode = [SCALE_NAMES["e4m3-encode"], E4M3(convention="encode", hybrid=True), SCALE_NAMES["ue5m3-encode"]]
    of = [Quantizer(scale=scale, tensor_scale=t) for scale in (E4M3(), *encode) for t in factors]
    small = FloatElement(mantissa=1, emin=-30, max=2.0**-28)
    of += [Quantizer(element=small, scale=scale, tensor_scale=TensorScale()) for scale in (E4M3(), encode[0])]
    shares = torch.tensor([1, 2.0**-12, 2.0**-60, 0]).repeat_interleave(16)
    x = torch.rand(len(of), len(maxima), 1, 64, generator=torch.Generator().manual_seed(0)) * shares
    x[:, :, :, 0] = 1
    x = (x.double() * maxima.double()[:, None, None]).float().flatten(0, 1)
    got, expected = both(place, x, [q for q in of for _ in maxima])
    assert_same_bits(got, expected)
    assert not torch.isnan(got[0] * got[1][:, None, None]).any()


def lanes_of(q):
    """q as it is, and with other parts that its codec allows, which share a launch."""
    replace = msgspec.structs.replace
    candidates = [rounded(q, r) for r in ROUNDING_NAMES.values() if samples_of(r) == 1]
    candidates += [replace(q, tensor_scale=t) for t in (None, TensorScale(), TensorScale(target=100.0))]
    candidates += [replace(q, range=r) for r in ("16/17", "3/4", "aligned")]
    candidates += [replace(q, element=e) for e in ("e3m0", "int4", "e1m2")]
    for scale in SCALE_NAMES.values():
        if isinstance(scale, FloatScale):
            drawn = "stochastic" if q.codec == "eden" else "nearest"
            candidates += [replace(q, scale=replace(scale, zero=zero, rounding=drawn)) for zero in ("keep", "one")]
            candidates.append(replace(q, scale=replace(scale, rounding="up")))
    fits = [c for c in candidates if not quantizer_faults(c) and not isinstance(c.rounding, Ema)]
    fits += [c.evaluated() for c in [q, *fits] if c.codec == "eden"]
    return list(dict.fromkeys([q, *fits]))


def rows_for(lanes, columns):
    """Lanes of odd rows, and every third one of usual rows, one of which is constant."""
    usual = torch.randn(1, 13, columns, generator=torch.Generator().manual_seed(1))
    usual[:, 3] = 1.99
    return torch.cat([odd_rows(2, columns), usual])[torch.arange(lanes) % 3]


@pytest.mark.parametrize(
    ("columns", "dtype"), [(False, torch.float32), (True, torch.bfloat16)], ids=["rows", "columns"]
)
@pytest.mark.parametrize("name", OWN_WAY)
def test_a_codec_has_the_bits_of_the_reference(place, name, columns, dtype):
    lanes = lanes_of(OWN_WAY[name])
    x = rows_for(len(lanes), 2 * lanes[0].unit).to(dtype)
    assert_same_bits(*both(place, x, lanes, columns))


OF_ANY_SIZE = [msgspec.structs.replace(q, block=block) for q in OWN_WAY.values() for block in (16, 32, 64, 128, 256)]


@pytest.mark.parametrize("q", [q for q in OF_ANY_SIZE if not quantizer_faults(q)], ids=lambda q: q.label())
def test_a_codec_takes_blocks_of_any_size(place, q):
    lanes = [c for c in (q, q, rounded(q, Stochastic())) if not quantizer_faults(c)]
    assert_same_bits(*both(place, rows_for(3, 2 * q.unit)[: len(lanes)], lanes, q.block == 32, step=2**33 + 5))


@pytest.mark.parametrize("name", ["if4", "mixfp4", "razer"])
def test_a_codec_takes_tiles(place, name):
    for block in (256, 1024):
        assert_same_bits(*both(place, rows_for(3, block), [OWN_WAY[name]] * 3, block=block))


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("name", OWN_WAY)
def test_a_codec_takes_what_the_kernel_rotates(place, name, columns):
    x, signs, dtype = rows_for(3, 256), signs_of(3, 128), torch.bfloat16 if columns else torch.float32
    assert_same_bits(*both(place, x, [OWN_WAY[name]] * 3, columns, dtype, rotation=128, signs=signs))


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("name", ["if4", "mixfp4", "hif4", "mbs-mxfp4"])
def test_a_codec_draws_for_every_element_in_odd_shapes(place, name, columns):
    q = OWN_WAY[name]
    lanes = [rounded(q, Stochastic()), rounded(q, Stochastic(bits=8))]
    for rows in (1, 37):
        assert_same_bits(*both(place, torch.randn(2, rows, 3 * q.unit), lanes, columns))


def test_corrected_scales_draw_for_every_block_in_odd_shapes(place):
    for (rows, width), columns in itertools.product(((1, 48), (37, 80), (130, 16)), (False, True)):
        x = torch.randn(3, rows, width)
        assert_same_bits(*both(place, x, [OWN_WAY["ms-eden"]] * 3, columns))


OWN_ELEMENTS = FloatElement(mantissa=0, emin=-4, max=4.0), FloatElement(mantissa=3, emin=1, max=7.5)
OWN_SCALES = (
    OwnScale(mantissa=4, emin=-2, max=31.0),
    OwnScale(mantissa=2, emin=-30, max=2.0**33),
    OwnScale(mantissa=0, emin=-7, max=2.0**7, zero="min"),
)


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
def test_float_formats_of_ones_own_have_the_bits_of_the_reference(place, columns):
    roundings = Nearest(), Nearest(ties="away"), Stochastic()
    lanes = [
        Quantizer(element=element, scale=scale, rounding=rounding, tensor_scale=tensor_scale)
        for element, scale, rounding in itertools.product((*OWN_ELEMENTS, "e2m1"), OWN_SCALES, roundings)
        for tensor_scale in (None, TensorScale())
    ]
    lanes += [msgspec.structs.replace(q, element=element) for element in OWN_ELEMENTS for q in QUANTIZERS.values()
              if q.codec == "block" and q.block == 16 and not q.is_plain]  # fmt: skip
    assert_same_bits(*both(place, rows_for(len(lanes), 64), lanes, columns))


def signs_of(lanes, size):
    return (torch.randint(0, 2, (lanes, size), generator=torch.Generator().manual_seed(1)) * 2 - 1).float()


def every_quantizer(block):
    """All combinations of parts of the general codec, those that say nothing new left out."""
    elements = [name for name, f in ELEMENTS.items() if f.radix == 2 and name != "s1p2"]
    roundings = [of for of in ROUNDING_NAMES.values() if not isinstance(of, Ema) and samples_of(of) == 1]
    scales = [scale for scale in SCALE_NAMES.values() if not isinstance(scale, E6M2)]
    for scale in [s for s in SCALE_NAMES.values() if isinstance(s, FloatScale)]:
        fields = ("up", "nearest"), ("decode", "encode"), (False, True), ("keep", "min", "one")
        for rounding, convention, hybrid, zero in itertools.product(*fields):
            changes = {"rounding": rounding, "convention": convention, "hybrid": hybrid, "zero": zero}
            scales.append(msgspec.structs.replace(scale, **changes))
    tensor = None, TensorScale(), TensorScale(target=256.0)
    parts = elements, scales, tensor, roundings, ("full", "16/17", "3/4"), ("none", "4over6-mse")
    for element, scale, tensor_scale, rounding, reach, adapt in itertools.product(*parts):
        yield Quantizer(element, block, scale, tensor_scale, rounding, reach, adapt)


@pytest.mark.parametrize(("block", "lanes"), [(16, 150), (32, 50), (64, 20), (128, 20)])
def test_recipes_of_every_kind_share_a_launch(place, block, lanes):
    lanes = lanes if place.device == "cuda" else lanes // 2
    recipes = random.Random(block).sample(list(every_quantizer(block)), lanes)
    x = odd_rows(2, 2 * block)
    assert_same_bits(*both(place, x[torch.arange(lanes) % 2], recipes))


@pytest.mark.parametrize("block", [256, 1024])
def test_a_tile_is_a_large_block(place, block):
    q = NAMED["nvfp4"]
    assert_same_bits(*both(place, odd_rows(2, block, 11), [q, rounded(q, Stochastic())], block=block))


@pytest.mark.parametrize("shape", [(1, 1, 16), (2, 1, 48), (1, 37, 80), (3, 130, 16)])
@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
def test_odd_shapes(place, shape, columns):
    q = NAMED["nvfp4"]
    lanes = [q, rounded(q, Stochastic(bits=8)), NAMED["e4m3-b16"]][: shape[0]]
    assert_same_bits(*both(place, torch.randn(shape), lanes, columns))


def test_bfloat16_output_is_the_operand_rounded_once(place):
    x = odd_rows(2, 64)
    assert_same_bits(*both(place, x, [NAMED["nvfp4"], rounded(NAMED["nvfp4"], Stochastic())], dtype=torch.bfloat16))
    inexact = Quantizer(scale=SCALE_NAMES["fp32"])
    assert_same_bits(*both(place, x, [inexact, inexact], columns=True, dtype=torch.bfloat16))


def test_steps_and_seeds_beyond_32_bits_draw_as_the_reference(place):
    q = rounded(NAMED["nvfp4-1716"], Stochastic())
    x = torch.randn(3, 8, 64)
    assert_same_bits(*both(place, x, [q] * 3, step=2**33 + 5))


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
def test_every_output_is_written_and_nothing_else(place, columns):
    q = NAMED["nvfp4"]
    x = torch.randn(2, 32, 37, device=place.device) if columns else torch.randn(2, 37, 32, device=place.device)
    call = to(place.device, call_for([q, q]))
    with_maxima = call._replace(tensor_amax=place.module.tensor_maxima(x))
    arguments = x, columns, call
    values, codes = unfused.operand(*arguments), unfused.packed(*arguments, [q, q])
    for expected, poison in ((values, float("nan")), (codes, 255)):
        guarded = [guard(t, poison) for t in expected]
        out, *scales, dec = (inner for _, inner in guarded)
        place.module.launch(x, columns, with_maxima, (out, scales[0] if scales else None, dec))
        for (memory, got), want in zip(guarded, expected, strict=True):
            assert torch.equal(got, want)
            for edge in (memory[:32], memory[-32:]):
                assert torch.equal(edge, torch.full_like(edge, poison)) or edge.isnan().all()


def guard(t, poison):
    """Memory full of poison, and in the middle of it a tensor like t."""
    memory = torch.full((t.numel() + 64,), poison, dtype=t.dtype, device=t.device)
    return memory, memory[32:-32].view(t.shape)


def test_results_do_not_depend_on_tile_sizes(place, monkeypatch):
    lanes = [NAMED["nvfp4"], rounded(NAMED["nvfp4"], Stochastic())]
    x = odd_rows(2, 64, 40)
    expected = [both(place, x, lanes, columns)[0] for columns in (False, True)]
    sizes = {"_TILE": 512, "_EDGE": 32, "_MANY": 1, "_TILES_OF": (3, 2), "_MAXIMUM_TILE": 1024}
    for name, size in sizes.items():
        monkeypatch.setattr(place.module, name, size)
        for columns in (False, True):
            assert_same_bits(both(place, x, lanes, columns)[0], expected[columns])


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize(("block", "size"), [(16, 16), (16, 128), (32, 16), (128, 32), (32, 256)])
def test_a_rotated_operand_has_the_bits_of_the_reference(place, block, size, columns):
    name = {16: "nvfp4", 32: "mxfp4", 128: "mxfp4"}[block]
    q = msgspec.structs.replace(NAMED[name], block=block)
    for dtype, signs in ((torch.float32, signs_of(2, size)), (torch.bfloat16, None)):
        x = odd_rows(2, 2 * max(size, block)).to(dtype)
        assert_same_bits(*both(place, x, [q, rounded(q, Stochastic())], columns, rotation=size, signs=signs))


def test_lanes_may_share_their_signs(place):
    x, signs = odd_rows(2, 64), signs_of(1, 32)
    assert_same_bits(*both(place, x, [NAMED["nvfp4"]] * 2, rotation=32, signs=signs))


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
def test_tensor_maxima_are_those_of_the_rotated_tensor(place, columns):
    x, signs = torch.randn(3, 17, 256), signs_of(3, 64)
    x[1, 4, 5] = float("nan")
    expected = rotate(x, 64, 2, signs).abs().amax((1, 2))
    x = (x.mT.contiguous() if columns else x).to(place.device)
    assert_same_bits([place.module.tensor_maxima(x, columns, 64, signs.to(place.device)).cpu()], [expected])


PACKED = {name: q for name, q in NAMED.items() if why_not_packed(q) is None}


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("name", PACKED)
def test_packed_operands_are_those_of_the_reference(place, name, columns):
    q = PACKED[name]
    lanes = [q, rounded(q, Stochastic())]
    for dtype, kinds in itertools.product((torch.bfloat16, torch.float32), ([q, q], lanes)):  # without draws, with them
        x = odd_rows(2, 3 * q.block, 14).to(dtype)
        arguments = arguments_for(x, kinds, columns)
        expected = unfused.packed(*arguments, kinds)
        got = fused.packed(*to(place.device, arguments))
        assert all(torch.equal(a.cpu(), b) for a, b in zip(got, expected, strict=True))
    codes, scales, _ = expected
    values, _ = unfused.operand(*arguments)
    unpacked = unpack(codes.view(2, -1, q.block // 2), scales.view(2, -1), lanes)
    assert_same_bits([unpacked.view(values.shape)], [values])


@pytest.mark.parametrize("element", ["e2m1", "e1m2", "int4"])
def test_codes_are_right_at_every_midpoint_and_for_every_bfloat16_number(place, element):
    """Both codings are monotonic in y, which is x here but for a power of two: midpoints decide all other numbers."""
    grid = ELEMENTS[element].magnitudes()
    midpoints = [(a + b) / 2 for a, b in itertools.pairwise(grid)]
    at = torch.tensor([*midpoints, *grid]).view(torch.int32)[:, None] + torch.arange(-3, 4)
    near = at.clamp(min=0).view(torch.float32).flatten()
    top = 2.0 ** torch.tensor(max(grid)).log2().floor()
    exact = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16).float()
    y = torch.cat([near[near < 2 * top], exact[exact < 2 * top]])
    rows = torch.nn.functional.pad(y, (0, -len(y) % 15)).view(-1, 15)
    rows = torch.cat([torch.full((len(rows), 1), top), rows], 1)  # so that every scale is the same power of two
    q = Quantizer(element, 16, SCALE_NAMES["e8m0"])
    for x in (rows, -rows):
        arguments = arguments_for(x[None], [q])
        codes, scales, _ = fused.packed(*to(place.device, arguments))
        assert len(scales.unique()) == 1
        assert torch.equal(codes.cpu(), unfused.packed(*arguments, [q])[0])


def test_packed_operands_are_rotated_too(place):
    lanes = [NAMED["nvfp4"]] * 2
    arguments = arguments_for(odd_rows(2, 64), lanes, rotation=32, signs=signs_of(2, 32))
    expected = unfused.packed(*arguments, lanes)
    got = fused.packed(*to(place.device, arguments))
    assert all(torch.equal(a.cpu(), b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize(("element", "word"), [("e4m3", "element"), ("e2m1", "scale")])
def test_what_has_no_packed_form_is_named(element, word):
    q = Quantizer(element=element, scale=SCALE_NAMES["fp32"])
    assert why_not_packed(q).startswith(f"{word}: found")
    with pytest.raises(ValueError, match=f"{word}: found"):
        pack(Encoded(torch.zeros(1, 1, 16), torch.zeros(1, 1)), [q])


def of_both(rows, columns):
    """The calls of both operands: they share their seeds and step."""
    return rows, columns._replace(seeds=rows.seeds, step=rows.step)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("rotations", [(0, 0), (0, 16), (128, 32)], ids=str)
def test_both_operands_are_those_of_two_calls(place, rotations, dtype):
    drawn = NAMED["mxfp4"] if dtype == torch.uint8 and any(rotations) else rounded(NAMED["mxfp4"], Stochastic())
    lanes = [NAMED["nvfp4"]] * 2, [NAMED["mxfp4"], drawn]
    x = odd_rows(2, 128, 96).to(torch.float32 if dtype == torch.float32 else torch.bfloat16)
    turned = [{"rotation": size, "signs": signs_of(2, size) if size else None} for size in rotations]
    calls = of_both(*(call_for(q, site, **more) for q, site, more in zip(lanes, (5, 6), turned, strict=True)))
    expected = []
    for columns, call in enumerate(calls):
        if dtype == torch.uint8:
            expected += unfused.packed(x, bool(columns), call, lanes[columns])
        else:
            values, dec = unfused.operand(x, bool(columns), call)
            expected += [values.to(dtype), dec]
    there, calls = to(place.device, (x, calls))
    got = fused.both(there, of_both(*calls), dtype)
    if dtype == torch.uint8:
        assert all(torch.equal(a.cpu(), b) for a, b in zip(got, expected, strict=True))
    else:
        assert_same_bits([t.cpu() for t in got], expected)


def test_tensor_maxima_keep_nan(place):
    x = torch.randn(3, 17, 32)
    x[1, 4, 5], x[2, 6, 7], x[2, 8, 9] = float("inf"), float("inf"), float("nan")
    for dtype in (torch.float32, torch.bfloat16):
        got = place.module.tensor_maxima(x.to(place.device, dtype)).cpu()
        assert torch.equal(got[:2], x.to(dtype).float().abs().amax((1, 2))[:2])
        assert got[2].isnan()


def test_a_given_maximum_takes_the_place_of_the_current_one(place):
    q = NAMED["nvfp4"]
    x = torch.randn(1, 4, 32)
    with_larger = torch.cat([x, torch.full((1, 1, 32), 9.0)], 1)
    _, (values, dec) = both(place, with_larger, [q])
    call = call_for([q], tensor_amax=torch.tensor([9.0]))
    got = fused.operand(*to(place.device, (x, False, call)), torch.float32)
    for found in ([t.cpu() for t in got], unfused.operand(x, False, call)):
        assert_same_bits(found, (values[:, :4].contiguous(), dec))
    codes = [t.cpu() for t in fused.packed(*to(place.device, (x, False, call)))]
    assert all(torch.equal(a, b) for a, b in zip(codes, unfused.packed(x, False, call, [q]), strict=True))


def test_maxima_that_lie_apart_are_those_of_their_lanes(place):
    """As learned clips do, which are parameters among others of their lanes."""
    q = NAMED["nvfp4"]
    x = torch.randn(3, 32, 32)
    among = torch.tensor([9.0, 1e-3, 1e3, 1e-6]).repeat(3, 1) * torch.tensor([[1.0], [2.0], [4.0]])
    there = place.device, call_for([q] * 3)
    call = to(*there)._replace(tensor_amax=among.to(place.device)[:, 0])
    assert not call.tensor_amax.is_contiguous()
    on_cpu = there[1]._replace(tensor_amax=among[:, 0].contiguous())
    expected = unfused.operand(x, False, on_cpu)
    given = x.to(place.device), False, call
    assert_same_bits([t.cpu() for t in fused.operand(*given, torch.float32)], expected)
    codes = [t.cpu() for t in fused.packed(*given)]
    assert all(torch.equal(a, b) for a, b in zip(codes, unfused.packed(x, False, on_cpu, [q] * 3), strict=True))
    rows = [t.cpu() for t in fused.both(given[0], (call, call), torch.float32)[:2]]
    assert_same_bits(rows, expected)


@pytest.mark.parametrize("names", [["nvfp4", "nvfp4-sr"], ["nvfp4-sr-rht"] * 2, ["quartet2"] * 2, ["hif4-ascend"] * 2])
def test_layers_quantize_with_the_kernels_as_without(place, monkeypatch, names):
    agree_with_the_reference(place, monkeypatch, [Recipe.named(name) for name in names], STAGES)


@pytest.mark.parametrize("name", ["nvfp4-2d", *OWN_WAY])
def test_layers_quantize_weights_with_the_kernels_as_without(place, monkeypatch, name):
    recipe = Recipe.named("quartet2" if name == "ms-eden" else "nvfp4-sr")
    recipe = msgspec.structs.replace(
        recipe, fprop=msgspec.structs.replace(recipe.fprop, w=(QUANTIZERS | OWN_WAY)[name])
    )
    agree_with_the_reference(place, monkeypatch, [recipe] * 2, ["fprop"])


@pytest.mark.parametrize("names", [["nvfp4", "nvfp4-sr"], ["nvfp4-sr-rht"] * 2, ["quartet2"] * 2])
def test_layers_quantize_bf16_operands_with_the_kernels_as_without(place, monkeypatch, names):
    agree_with_the_reference(place, monkeypatch, [Recipe.named(name) for name in names], STAGES, torch.bfloat16)


def agree_with_the_reference(place, monkeypatch, recipes, stages, dtype=torch.float32):
    """The products of these stages, with and without the kernels, which every slot takes, of operands in dtype: those
    of the same numbers in float32."""
    a, b = (torch.randn(2, *shape, device=place.device).to(dtype) for shape in ((40, 56), (56, 24)))
    results = []
    for operand in (None, fused.operand):
        monkeypatch.setattr(
            lanes, "backend", lambda _, operand=operand: msgspec.structs.replace(PLAIN, operand=operand)
        )
        numerics = LaneNumerics(recipes, (3, 4), place.device)
        taken = [slot.quantizers.why_not_operand is None for slot in numerics.slots.values()]
        assert set(taken) == {operand is not None}
        for x, w in {(a, b), (a.float(), b.float())}:
            results.append([numerics.gemm(stage, 1, x, 2, w, 1) for stage in stages])
    for first, *others in zip(*results, strict=True):
        assert all(torch.equal(first, other) for other in others)


def test_the_operator_is_sound(place):
    given = to(place.device, call_for([NAMED["nvfp4"]] * 2, tensor_amax=torch.ones(2)))
    both_calls = *flat(given._replace(tensor_amax=None)), *flat(given._replace(tensor_amax=None, rotation=16))
    ops, tests = torch.ops.fp4dse, {"test_utils": ["test_schema", "test_faketensor"]}
    for columns in (False, True):
        x = torch.randn(2, 16, 32, device=place.device)
        torch.library.opcheck(ops.operand, (x, columns, torch.bfloat16, *flat(given._replace(codec="razer"))), **tests)
        torch.library.opcheck(ops.packed, (x, columns, *flat(given)), **tests)
    x = torch.randn(2, 64, 32, device=place.device)
    for dtype in (torch.bfloat16, torch.uint8):
        torch.library.opcheck(ops.both, (x, dtype, *both_calls), **tests)


@pytest.mark.parametrize(
    ("x", "block", "dtype", "message"),
    [
        (torch.zeros(1, 2, 16).half(), 16, torch.float32, r"dtype: found torch.float16 to torch.float32; accepted"),
        (torch.zeros(1, 2, 16), 16, torch.float16, r"dtype: found torch.float32 to torch.float16"),
        (torch.zeros(1, 0, 16), 16, torch.float32, r"x: found \(1, 0, 16\); accepted: 1 to 65,535 lanes"),
        (torch.zeros(1, 2, 24), 24, torch.float32, r"block: found 24; accepted: 16, 32"),
        (torch.zeros(1, 2, 40), 16, torch.float32, r"x: found \(1, 2, 40\); accepted: .* blocks of 16 divide"),
    ],
)
def test_what_the_kernels_do_not_take_is_named(x, block, dtype, message):
    with pytest.raises(ValueError, match=message):
        fused.operand(x, False, call_for([NAMED["nvfp4"]], block=block), dtype)


def test_a_rotation_that_the_kernels_do_not_take_is_named():
    for width, size, message in (
        (48, 48, "rotation: found 48; accepted: 0 .none., 16"),
        (48, 32, "a rotation of 32 div"),
    ):
        with pytest.raises(ValueError, match=message):
            fused.operand(torch.zeros(1, 2, width), False, call_for([NAMED["nvfp4"]], rotation=size), torch.float32)


def test_a_codec_that_the_kernels_do_not_take_is_named():
    x, call = torch.zeros(1, 2, 64), call_for([NAMED["mxfp4"]])
    for codec, message in (
        ("radix4", r"codec: found radix4; accepted: block, eden, .* softmax"),
        ("macro", r"x: found \(1, 2, 64\); accepted: .* blocks of 128 divides"),
    ):
        with pytest.raises(ValueError, match=message):
            fused.operand(x, False, call._replace(codec=codec), torch.float32)
    own = call._replace(codec="razer")
    for run in (lambda: fused.packed(x, False, own), lambda: fused.both(x, (own, own), torch.float32)):
        with pytest.raises(ValueError, match="codec: found razer; accepted: block"):
            run()


def test_both_operands_are_of_the_same_seeds_and_step():
    calls = call_for([NAMED["mxfp4"]]), call_for([NAMED["mxfp4"]])
    with pytest.raises(ValueError, match="calls: found seeds or steps of their own"):
        fused.both(torch.zeros(1, 32, 32), calls, torch.float32)


def test_features_are_those_of_some_lane():
    assert not any(features_of(*descriptor([NAMED["mxfp4"], NAMED["e4m3-b16"]])))
    lanes = [NAMED["nvfp4"], rounded(NAMED["e4m3-b16"], Stochastic()), NAMED["nvfp4-4over6-mse"]]
    assert features_of(*descriptor(lanes)) == (True, True, True, False, False)
    for scale in ("e4m3-encode", "bf16", "fp32"):
        assert features_of(*descriptor([Quantizer(scale=SCALE_NAMES[scale])])).scales
    assert features_of(*descriptor([Quantizer(element="e3m0")])).ties
    assert features_of(*descriptor([Quantizer(rounding=Nearest(ties="away"))])).ties


def test_no_device_but_cuda_takes_the_kernels():
    assert dispatch.why_not_fused("cpu") == "Triton kernels not taken on cpu: they need a CUDA device"


TILED = ("nvfp4-2d", "mxfp4-2d", "ue5m3-2d")


@pytest.mark.parametrize("name", [name for name in TILED if name in QUANTIZERS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_are_quantized_where_they_lie(place, name, dtype):
    """Of lanes that lie apart; NaN poisons what is not written."""
    q = QUANTIZERS[name]
    edge = int(q.block.split("x")[0])
    memory = torch.full((3, 96 * 160 + 40), torch.nan)
    x = memory[:, : 96 * 160].view(3, 96, 160)
    x.copy_(odd_rows(3, 160, rows=96))
    call = call_for([q] * 3, block=edge, tensor_amax=tensor_maxima(x)[:, 0])
    assert limits.why_not_squares(x, edge, call.features, "block", True) is None
    on_place = memory.to(place.device)[:, : 96 * 160].view(3, 96, 160)
    values, dec = place.squares.squares(on_place, to(place.device, call), dtype)
    expected, expected_dec = decode_operand(blocks.cut(x, q.block), call.floats, call.ints)
    assert_same_bits([values.cpu(), dec.cpu()], [blocks.join(expected, x.shape, q.block).to(dtype), expected_dec])


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
def test_lanes_may_lie_apart(place, columns):
    q = QUANTIZERS["nvfp4"]
    memory = torch.randn(3, 32 * 48 + 16)
    x = memory[:, : 32 * 48].view(3, 32, 48)
    call = call_for([q] * 3)
    on_place = memory.to(place.device)[:, : 32 * 48].view(3, 32, 48)
    got = fused.operand(on_place, columns, to(place.device, call), torch.float32)
    assert_same_bits([t.cpu() for t in got], unfused.operand(x, columns, call))
    assert_same_bits([place.module.tensor_maxima(on_place).cpu()], [tensor_maxima(x)[:, 0]])


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
def test_lanes_of_bfloat16_numbers_may_begin_anywhere(place, columns):
    """Also where no word of two begins."""
    q = QUANTIZERS["nvfp4"]
    for start, apart in ((0, 1), (1, 1), (1, 2)):
        memory = torch.randn(3, 32 * 48 + apart, dtype=torch.bfloat16)
        call = call_for([q] * 3)
        x = memory.to(place.device).flatten()[start:].as_strided((3, 32, 48), (32 * 48 + apart, 48, 1))
        got = fused.operand(x, columns, to(place.device, call), torch.float32)
        assert_same_bits([t.cpu() for t in got], unfused.operand(x.cpu().contiguous(), columns, call))
