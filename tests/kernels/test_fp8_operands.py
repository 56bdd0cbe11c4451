"""FP8 operands hold what they are made of, or leave it to BF16; quantizers write them."""

import pytest
import torch

from fp4dse.dse.rounding import Nearest, Stochastic
from fp4dse.kernels.ops import fp8
from fp4dse.kernels.ops.fp8 import E4M3, E5M2, History
from fp4dse.kernels.ops.mxfp4 import window
from fp4dse.kernels.quant.triton import operators as fused
from fp4dse.kernels.quant.triton import unfused
from tests.kernels.fp8_operands import (
    DTYPES,
    INTERPRETED,
    MX,
    SIGNED,
    assert_same_operand,
    changed,
    history_of,
    odd_segments,
)
from tests.kernels.test_triton import arguments_for, call_for, flat, odd_rows, signs_of, to


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_is_held_while_exponents_lie_within_the_window(dtype):
    """Two blocks, one with E2M1's largest number at the window's highest exponent, one j below it with every code."""
    lowest, highest = window(dtype)
    for below in range(highest - lowest + 3):
        for power in (-40, 0, 17):
            x = torch.zeros(1, 1, 128)
            x[0, 0, 0] = 6.0
            x[0, 0, 32:48] = SIGNED * 2.0**-below
            values, shift = fp8.to_fp8(x * 2.0**power, dtype)
            fits = below <= highest - lowest
            assert bool(shift.flags[0, 0, 0] == 0) == fits
            assert bool(shift.notes.any()) == (not fits)
            assert torch.equal(shift.decoded(values), x * 2.0**power)
            if not fits:
                assert not values.float().any()


@pytest.mark.parametrize(("dtype", "room"), [(E5M2, 2), (E4M3, 1)])
def test_the_power_leaves_room_above_what_the_step_before_had(dtype, room):
    """So many binades, as docs/numerics.md says: a number of the next one is not held."""
    for before in (-40, 0, 17):
        top = fp8.top_of(torch.tensor([[6.0 * 2.0**before]]))
        for above in range(-2, room + 3):
            x = torch.full((1, 1, 128), 6.0 * 2.0 ** (before + above))
            shift = fp8.to_fp8(x, dtype, history_of(1, int(top)))[1]
            assert bool(shift.flags.any()) == (above > room)


def test_a_history_is_written_in_training_and_empties_the_place_of_the_next_step():
    """Outside of training the largest of all steps is read. What is not finite is not kept."""
    x = torch.tensor([[1.0, 3.6], [float("inf"), -2.0], [float("nan"), 0.0], [0.0, 0.0]])
    expected = [127 + 2, 127 + 1, 0, 0]
    assert fp8.top_of(x).tolist() == expected
    for step in range(3):
        history = History(torch.tensor([[130, 120, 140]] * 4, dtype=torch.int32), torch.tensor(step), True)
        before = history.tops[0].tolist()
        assert torch.equal(history.power(E5M2), fp8.power_of(history.tops[:, (step + 2) % 3], E5M2, fp8.HEADROOM[E5M2]))
        history.write(fp8.top_of(x))
        assert history.tops[:, step].tolist() == [max(before[step], top) for top in expected]
        assert not history.tops[:, (step + 1) % 3].any()
        assert (history.tops[:, (step + 2) % 3] == before[(step + 2) % 3]).all()
        outside = history._replace(training=False)
        assert torch.equal(outside.power(E5M2), fp8.power_of(history.tops.amax(1), E5M2, fp8.HEADROOM[E5M2]))
        kept = outside.tops.clone()
        outside.write(fp8.top_of(x))
        assert torch.equal(outside.tops, kept)


def test_without_a_step_before_the_power_is_one():
    assert torch.equal(
        fp8.power_of(torch.tensor([0, 1, 127, 254], dtype=torch.int32), E5M2),
        torch.tensor([1.0, 2.0**-60, 2.0**-15, 2.0**60]),
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_count_for_nothing_whatever_their_sign(dtype):
    values, shift = fp8.to_fp8(torch.tensor([-0.0, 0.0]).repeat(1, 3, 64), dtype)
    assert not shift.flags.any()
    assert torch.equal(values.view(torch.uint8), torch.tensor([128, 0], dtype=torch.uint8).repeat(1, 3, 64))


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_operand_stands_for_the_numbers_that_it_was_made_of(dtype):
    x = odd_segments()
    values, shift = fp8.to_fp8(x, dtype)
    wide = shift.flags > 0
    assert 0 < wide.sum() < 0.75 * wide.numel()
    assert wide[1, 3, 1]
    assert wide[1, 4, 0]
    assert values.float().isfinite().all()
    assert torch.equal(shift.decoded(values).nan_to_num(3.0), x.nan_to_num(3.0))


# --- what quantizers write ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_has_the_bits_of_the_definition(place, dtype, transposed):
    x = odd_segments()
    power = torch.tensor([2.0**3, 0.25])
    for of in (x, x.to(torch.bfloat16)):
        expected = fp8.split(of, dtype, power)
        of = of.mT.contiguous().mT if transposed else of
        assert_same_operand(place.fp8.split(of.to(place.device), dtype, power.to(place.device)), expected)


def quantized(place, arguments, dtype, history):
    """Operand, history and factors of the kernel, and of the definition."""
    values, dec = unfused.operand(*arguments)
    there = History(history.tops.to(place.device, copy=True), arguments[2].step.to(place.device), history.training)
    history = History(history.tops.clone(), *history[1:])
    expected = fp8.to_fp8(values, dtype, history)
    x, columns, call = to(place.device, arguments)
    *got, factor = fused.fp8(x, columns, call._replace(step=there.step), dtype, there)
    assert torch.equal(there.tops.cpu(), history.tops)
    assert torch.equal(factor.cpu(), dec)
    return got, expected


def edge_blocks(dtype, lanes, above=False):
    """Elements of E2M1 with all codes, bfloat16 [L, R, 128]: of 32 rows at a time a block lies so many binades below
    the others that the window ends there, or all do so many above what the step before had."""
    lowest, highest = window(dtype)
    width = highest - lowest - fp8.HEADROOM[dtype]
    below = torch.arange(-6, 1) if above else torch.arange(width - 4, width + 6)
    x = SIGNED[torch.randint(16, (lanes, 32 * len(below), 128), generator=torch.Generator().manual_seed(0))]
    x[:, :, ::32] = -6.0
    x[:, :, 37] = -0.0
    x[:, :, : 128 if above else 32] *= torch.exp2(-below.float()).repeat_interleave(32)[:, None]
    return x.to(torch.bfloat16)


ROUNDINGS = [Nearest(), Stochastic()] * 3 + [Nearest()]
"""Of the first lanes."""


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 2, 7])
def test_operands_have_the_bytes_of_the_definition_on_both_sides_of_the_windows_edges(place, dtype, columns, count):
    """Tiles that are held, some of whose segments are, and none of which is; zeros of both signs; a lane with NaN and
    an infinity. Powers lie 16 bytes apart."""
    count = min(count, 7 if place.device == "cuda" else 3)
    of_lanes = [changed(rounding=rounding) for rounding in ROUNDINGS[:count]]
    for above in (False, True):
        x = edge_blocks(dtype, count, above)
        x[:, 5] = -0.0
        if count > 1:
            x[1, 40, 7], x[1, 100, 120] = float("nan"), float("inf")
        arguments = arguments_for(x, of_lanes, columns)
        history = history_of(count, 129, True, int(arguments[2].step))  # of 6
        got, expected = quantized(place, arguments, dtype, history)
        held = (expected[1].flags == 0).unflatten(1, (-1, 32)).all(2).all(2)  # of tiles
        assert held.any(1).all()
        assert not held.all(1).any()
        assert_same_operand(got, expected)
        assert [p.data_ptr() % 16 for p in got[1].power] == [0] * count


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@INTERPRETED
def test_quantizers_write_what_is_made_of_their_operands(place, columns):
    for training, length, rows in ((True, 128, 14), (False, 384, 38), (True, 160, 20), (True, 32, 16)):
        x = odd_rows(2, length, rows)
        x[0, 6, :32] *= 2.0**-35
        for kind in (torch.float32, torch.bfloat16):
            arguments = arguments_for(x.to(kind), [MX, changed(rounding=Stochastic())], columns)
            history = history_of(2, torch.tensor([130, 0]), training, int(arguments[2].step))
            got, expected = quantized(place, arguments, E5M2, history)
            assert (expected[1].flags > 0).any()
            assert_same_operand(got, expected)


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
def test_programs_of_several_tiles_write_the_same(place, columns, monkeypatch):
    """Also where the last of a program's tiles lie beyond the end, or none of them has a flag."""
    for name, value in {"_MANY": 1, "_TILES_OF": (3, 4)}.items():
        monkeypatch.setattr(place.module, name, value)
    for length, rows in ((1184, 70), (96, 200)):
        x = odd_rows(2, length, rows)
        x[1, 6, length - 32 :] *= 2.0**-35
        arguments = arguments_for(x.to(torch.bfloat16), [MX, changed(rounding=Stochastic())], columns)
        got, expected = quantized(place, arguments, E5M2, history_of(2, 130, True, int(arguments[2].step)))
        assert (expected[1].flags > 0).any()
        assert_same_operand(got, expected)


@INTERPRETED
def test_a_rotated_operand_is_written_likewise(place):
    for size in (32, 256):
        arguments = arguments_for(odd_rows(2, 512), [MX] * 2, rotation=size, signs=signs_of(2, size))
        assert_same_operand(*quantized(place, arguments, E5M2, history_of(2, 128, True, int(arguments[2].step))))


@INTERPRETED
def test_the_operator_is_sound(place):
    call = to(place.device, call_for([MX] * 2))
    for columns in (False, True):
        x = torch.randn(2, 128, 128, device=place.device)
        tops = torch.zeros(2, 3, dtype=torch.int32, device=place.device)
        arguments = x, columns, E5M2, tops, True, *flat(call)
        torch.library.opcheck(torch.ops.fp4dse.fp8, arguments, test_utils=["test_schema", "test_faketensor"])
