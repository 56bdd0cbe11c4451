"""MXFP4 in FP8, two numbers at a time: the bytes of the definition for every magnitude, rule, size and lane."""

from functools import partial

import pytest
import torch
from triton.runtime.jit import JITFunction

from fp4dse.dse.formats import E8M0_RULES
from fp4dse.dse.scale import E8M0
from fp4dse.kernels.ops.fp8 import E4M3, E5M2
from fp4dse.kernels.ops.mxfp4 import window
from fp4dse.kernels.quant.reading import columns_read
from fp4dse.kernels.quant.triton import pair_tiles, pairs, programs
from tests.kernels.fp8_operands import DTYPES, MX, assert_same_operand, changed, history_of
from tests.kernels.fp8_quantizer_variants import ways
from tests.kernels.test_fp8_operands import quantized
from tests.kernels.test_triton import call_for

RULES = [changed(scale=E8M0(rule=rule)) for rule in E8M0_RULES] + [changed(scale=E8M0(), range="3/4")]


def magnitudes():
    """Blocks of 32 neighbours, bfloat16 [128, 704]: a row for each significand of their largest, all numbers from that
    down to 2^-5 of it; then zeros of both signs, and tiny numbers."""
    largest = 0x4000 + torch.arange(128)[:, None, None]
    bits = largest - torch.arange(21 * 31).reshape(1, 21, 31)
    blocks = torch.cat([largest.expand(-1, 21, 1), bits], 2)
    signs = torch.randint(2, blocks.shape, generator=torch.Generator().manual_seed(0)) << 15
    small = torch.tensor([0, 0x8000, 1, 0x8001, 0x3F00, 0xBF00, 0x80, 0x4000]).repeat(128, 1, 4)
    return torch.cat([blocks | signs, small], 1).flatten(1).to(torch.int16).view(torch.bfloat16)


def along(x, rules, columns):
    """What the operators take first, for an operand [L, R, C] whose blocks lie along its rows; or that lies the other
    way in memory. It is made in pairs where rows in memory are whole pieces of 16."""
    there, call = x.mT.contiguous() if columns else x, call_for(rules)
    assert pair_tiles.is_paired(there, call) == (there.shape[2] % 16 == 0)
    return there, columns, call


WAYS = pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])


def is_short(place, patch):
    """Makes what is not done in pairs an error."""

    def failing(*_):
        raise AssertionError("made in float32")

    patch.setattr(place.pair_tiles, "put_fp8", failing)


@pytest.mark.parametrize(("columns", "dtype"), [(True, E5M2), (False, E4M3)], ids=["columns", "rows"])
@pytest.mark.parametrize(
    ("rules", "each"), [(RULES[::4], 32), pytest.param(RULES, 1, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_every_magnitude_is_rounded_as_by_the_definition_under_every_rule(
    place, dtype, columns, rules, each, monkeypatch
):
    """A lane a rule. None of these numbers is too small or large for FP8, and all are made in pairs. each: one
    significand of the largest in so many."""
    arguments = along(magnitudes()[::each].expand(len(rules), -1, -1), rules, columns)
    if not isinstance(place.pair_tiles.finish, JITFunction):
        is_short(place, monkeypatch)
    got, expected = quantized(place, arguments, dtype, history_of(len(rules), 128, True, int(arguments[2].step)))
    assert not expected[1].flags.any()
    assert_same_operand(got, expected)


@WAYS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_exponent_of_a_block_is_held_or_not_as_by_the_definition(place, dtype, columns):
    """Also those that overflow or are subnormal; a segment has blocks of one exponent, or zeros beside them."""
    bits = (torch.arange(256) << 7)[:, None] + torch.tensor([0, 0x30, 0x7F, 0x41]).repeat(32)
    bits -= torch.arange(128) % 7 << 7
    bits = bits.clamp(min=0) | (torch.arange(128) % 3 == 1).int() << 15
    x = torch.cat([bits, bits], 1).to(torch.int16).view(torch.bfloat16)
    x[:, 128 + 32 : 128 + 96] = 0.0
    for top, rule in ((128, RULES[0]), (60, RULES[2]), (254, RULES[-1])):
        arguments = along(x[None], [rule], columns)
        got, expected = quantized(place, arguments, dtype, history_of(1, top, True, int(arguments[2].step)))
        assert_same_operand(got, expected)


@WAYS
@pytest.mark.parametrize("bits", [1, 0x10, 0x1F, 0x80, 0x7F00, 0x7F7F, 0x7F80, 0x7FC0])
def test_one_block_of_tiny_or_huge_numbers_alone_is_not_lost(place, bits, columns):
    """Of the smallest scale 0x10 is a fourth, which becomes zero, and 0x1F nearly a half."""
    x = torch.randn(2, 16, 128, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    x[1, 3, :32] = torch.tensor(bits, dtype=torch.int16).view(torch.bfloat16)
    arguments = along(x, [MX, RULES[2]], columns)
    got, expected = quantized(place, arguments, E5M2, history_of(2, 129, True, int(arguments[2].step)))
    assert expected[1].flags.sum() == (bits not in (1, 0x10))
    assert_same_operand(got, expected)


@WAYS
@pytest.mark.parametrize(("rows", "length"), [(16, 32), (48, 96), (80, 160), (70, 160), (5, 64), (64, 256), (16, 416)])
def test_tiles_that_are_filled_in_part_are_written_likewise(place, rows, length, columns):
    """In training and out of it, held and not; nothing beyond the end is written."""
    lowest, highest = window(E4M3)
    x = torch.randn(2, rows, length, generator=torch.Generator().manual_seed(rows))
    for far, training in ((False, False), (True, True)):
        if far:
            x[1, 4, -32:] *= 2.0 ** (lowest - highest - 4)
            x[1, 3, -1] = float("nan")
        arguments = along(x.to(torch.bfloat16), [MX, RULES[2]], columns)
        got, expected = quantized(place, arguments, E4M3, history_of(2, 129, training, int(arguments[2].step)))
        assert bool(expected[1].flags.any()) == far
        assert_same_operand(got, expected)


@WAYS
@pytest.mark.parametrize("lanes", [1, 2, 7, 64])
def test_a_lane_has_the_bytes_that_it_has_alone(place, lanes, columns):
    """Lanes lie apart in memory, and at addresses that are no multiples of 16 bytes, too."""
    x = torch.randn(lanes, 32, 160 if lanes < 64 else 32, generator=torch.Generator().manual_seed(1))
    sizes = torch.arange(lanes) % 13
    x = (x * torch.exp2(sizes * 3.0)[:, None, None]).to(torch.bfloat16)
    rules, tops = (RULES * 13)[:lanes], 128 + 3 * sizes
    x, *rest = along(x, rules, columns)
    shifted = torch.cat([x.flatten()[:3], x.flatten()])[3:].view_as(x)
    for kind in (torch.cat([x, x], 1)[:, : x.shape[1]], shifted)[: 2 if lanes < 7 else 1]:
        step = int(rest[1].step)
        got, expected = quantized(place, (kind, *rest), E5M2, history_of(lanes, tops, True, step))
        assert_same_operand(got, expected)
        for lane in range(lanes) if lanes < 64 else (0, 37, 63):
            alone = kind[lane : lane + 1], columns, call_for(rules[lane : lane + 1])
            one, _ = quantized(place, alone, E5M2, history_of(1, tops[lane], True, step))
            assert torch.equal(one[0][0].view(torch.uint8), got[0][lane].view(torch.uint8))


@WAYS
def test_a_lane_of_other_elements_is_made_as_before(place, columns):
    """Whatever the lane beside it."""
    x = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    for other in (changed(element="int4"), changed(element="e1m2"), changed(element="e4m3")):
        arguments = along(x, [MX, other], columns)
        got, expected = quantized(place, arguments, E4M3, history_of(2, 129, True, int(arguments[2].step)))
        assert_same_operand(got, expected)


@pytest.mark.parametrize("way", ways(), ids=lambda way: way.name())
def test_every_way_to_launch_has_the_bytes_of_the_definition(place, way, monkeypatch):
    """Ways of the program that times them, in tiles that are held and that are not."""
    x = torch.randn(1, 80, 288, generator=torch.Generator().manual_seed(1))
    x[0, 4, :32] *= 2.0**-40
    name = "columns_in_fp8" if way.columns else "rows_in_fp8"
    of = getattr(place.pair_columns if way.columns else place.pair_rows, name)
    monkeypatch.setattr(place.module, name, partial(of, how=way.how))
    arguments = along(x.to(torch.bfloat16), [MX], way.columns)
    got, expected = quantized(place, arguments, E4M3, history_of(1, 129, True, int(arguments[2].step)))
    assert expected[1].flags.sum() == 1
    assert_same_operand(got, expected)


def test_the_short_way_reads_each_column_that_decides_about_its_lanes():
    """A column that is added for all formats is one that this way would not heed: it has to be read here, or listed."""
    constants = {
        "FP8": 2,
        "CODEC": "block",
        **dict.fromkeys(("TENSOR_SCALE", "STOCHASTIC", "ADAPTIVE", "NEAREST"), False),
    }
    of_all = columns_read(programs.quantize_kernel, **constants, UNUSUAL=0, BY_BLOCKS=True)
    of_float_scales = {"scale_pmin", "scale_ulps", "scale_max", "scale_zero", "inv_val_max"}
    of_chance = {"stochastic", "random_shift"}
    assert columns_read(pairs.rule_of, pair_tiles.finish) == of_all - of_float_scales - of_chance
