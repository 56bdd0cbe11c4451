"""Rows and columns in FP8 from one read of a tensor: the bytes of two kernels, which are those of the definition."""

from functools import partial

import msgspec
import pytest
import torch
from triton.runtime.jit import JITFunction

from fp4dse.dse import Hadamard, Recipe
from fp4dse.kernels import LaneNumerics, backend, dispatch, lanes
from fp4dse.kernels.layers import product
from fp4dse.kernels.ops import fp8
from fp4dse.kernels.ops.fp8 import E4M3, E5M2, History
from fp4dse.kernels.quant.triton import operators as fused
from fp4dse.kernels.quant.triton import pair_both, unfused
from tests.kernels.fp8_operands import DTYPES, INTERPRETED, MX, assert_same_operand, changed, history_of
from tests.kernels.fp8_quantizer_variants import BOTH_WAYS
from tests.kernels.test_pairs import RULES, is_short, magnitudes
from tests.kernels.test_triton import call_for, flat, to

RECIPES = {
    "mxfp4": Recipe.named("mxfp4"),
    "mxfp4-rht": msgspec.structs.replace(
        Recipe.named("mxfp4"), wgrad=msgspec.structs.replace(Recipe.named("mxfp4").wgrad, rotation=Hadamard(size=32))
    ),
}


def drawn(lanes, rows, width):
    """bfloat16 [L, rows, width]."""
    return torch.randn(lanes, rows, width, generator=torch.Generator().manual_seed(rows)).to(torch.bfloat16)


def assert_same_both(place, x, rules, dtypes, tops=(129, 129), training=True):
    """Both operands of x, and what their histories are afterwards, equal the definition's. rules: of each, one a lane.
    Returns the number of flags of each."""
    calls = [call_for(of) for of in rules]
    calls[1] = calls[1]._replace(seeds=calls[0].seeds, step=calls[0].step)
    assert pair_both.are_paired(x, calls)
    x_there, *there = to(place.device, (x, *calls))
    there[1] = there[1]._replace(seeds=there[0].seeds, step=there[0].step)
    histories = [history_of(len(x), top, training, int(calls[0].step)) for top in tops]
    known = tuple(History(of.tops.to(place.device, copy=True), there[0].step, training) for of in histories)
    flags = []
    for columns, (*got, factor) in enumerate(fused.both_fp8(x_there, tuple(there), dtypes, known)):
        values, dec = unfused.operand(x, bool(columns), calls[columns])
        expected = fp8.to_fp8(values, dtypes[columns], histories[columns])
        assert_same_operand(got, expected)
        assert torch.equal(factor.cpu(), dec)
        assert torch.equal(known[columns].tops.cpu(), histories[columns].tops)
        flags.append(int(expected[1].flags.sum()))
    return flags


@pytest.mark.parametrize("dtypes", [(E5M2, E4M3), (E4M3, E5M2)], ids=["e5m2-e4m3", "e4m3-e5m2"])
@pytest.mark.parametrize(
    ("rules", "each"), [(RULES[::4], 32), pytest.param(RULES, 1, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_every_magnitude_is_rounded_as_by_the_definition_under_every_rule(place, dtypes, rules, each, monkeypatch):
    """A lane a rule. Blocks with all magnitudes lie along rows, then down columns; all are made in pairs."""
    if not isinstance(place.pair_tiles.finish, JITFunction):
        is_short(place, monkeypatch)
    rows = magnitudes()[::each, :-32]  # the last ones are tiny, and a column of them is not held
    x = rows.repeat(-(-32 // len(rows)), 1).expand(len(rules), -1, -1).contiguous()
    for kind in (x, x.mT.contiguous()):
        assert assert_same_both(place, kind, (rules, rules[::-1]), dtypes, (128, 128)) == [0, 0]


@pytest.mark.parametrize("shape", [(32, 32), (96, 160), (160, 96), (128, 256), (416, 32)], ids=str)
def test_tiles_that_are_filled_in_part_are_written_likewise(place, shape):
    """In training and out of it; nothing beyond the end is written."""
    for training in (False, True):
        assert assert_same_both(place, drawn(2, *shape), ([MX, RULES[2]],) * 2, (E5M2, E4M3), training=training)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_operand_may_be_held_where_the_other_is_not(place, dtype):
    """A block of a row that is far below its neighbours along the row, and one far below those down the column."""
    x = drawn(2, 160, 160)
    x[0, 3, :32] *= 2.0**-40
    x[1, 64:96, 5] *= 2.0**-40
    x[1, 7, 130], x[0, 9, 11] = float("nan"), float("inf")
    assert all(assert_same_both(place, x, ([MX, MX],) * 2, (dtype, E5M2), (129, 140)))


def test_lanes_that_lie_apart_or_at_odd_addresses_are_read_where_they_are(place):
    x = drawn(3, 64, 96)
    shifted = torch.cat([x.flatten()[:3], x.flatten()])[3:].view_as(x)
    for kind in (torch.cat([x, x], 1)[:, :64], shifted):
        assert_same_both(place, kind, (RULES[:3], RULES[1:4]), (E5M2, E5M2), (129, 133))


def test_each_of_64_lanes_has_the_bytes_of_its_own_definition(place):
    """Which knows no other lane; some have numbers that FP8 does not hold."""
    x, rules = drawn(64, 32, 32), (RULES * 13)[:64]
    x[::21, 3], x[37, :, 3] = x[::21, 3] * 2.0**-40, x[37, :, 3] * 2.0**-40
    assert all(assert_same_both(place, x, (rules, rules[::-1]), (E5M2, E4M3)))


def test_other_elements_of_a_lane_are_made_as_before(place):
    for other in (changed(element="int4"), changed(element="e4m3")):
        assert_same_both(place, drawn(2, 64, 64), ([MX, other], [MX, MX]), (E5M2, E4M3))


def test_every_way_to_launch_has_the_bytes_of_the_definition(place, monkeypatch):
    """Ways of the program that times them, in tiles that are held and that are not."""
    x = drawn(1, 160, 288)
    x[0, 4, :32] *= 2.0**-40
    made = place.pair_both.both_in_fp8
    for how in BOTH_WAYS:
        monkeypatch.setattr(place.module, "both_in_fp8", partial(made, how=how))
        assert assert_same_both(place, x, ([MX], [MX]), (E5M2, E4M3))[0] > 0


def test_what_is_not_made_by_one_program_is_made_by_two(place):
    """Whatever there is against it; operators check the rest."""
    x = drawn(1, 64, 96)
    calls = [call_for([MX]) for _ in range(2)]
    assert pair_both.are_paired(x, calls)
    for odd in (x[:, :, :40].contiguous(), x[:, :40], x.float()):
        assert not pair_both.are_paired(odd, calls)
    of_sixteen = changed(block=16)
    calls = tuple(call_for([of_sixteen]) for _ in range(2))
    calls = calls[0], calls[1]._replace(seeds=calls[0].seeds, step=calls[0].step)
    assert not pair_both.are_paired(x, calls)
    with pytest.raises(ValueError, match="seeds or steps of their own"):
        fused.both_fp8(x, (calls[0], calls[1]._replace(step=calls[0].step.clone())), (E5M2, E4M3), (None, None))


@INTERPRETED
def test_its_operator_is_sound(place):
    """Its schema, and the shapes that it has without being run: one program or two."""
    for x in (drawn(2, 64, 96), drawn(1, 32, 32).float()):
        call = call_for([MX] * len(x))
        tops = [torch.zeros(len(x), 3, dtype=torch.int32) for _ in range(2)]
        arguments = x, E5M2, E4M3, *tops, True, *flat(call), *flat(call)
        torch.library.opcheck(torch.ops.fp4dse.both_fp8, arguments, test_utils=["test_schema", "test_faketensor"])


@pytest.mark.heavy
@INTERPRETED
@pytest.mark.usefixtures("any_size", "on_units")
def test_a_layer_has_the_same_gradients_and_state_whether_or_not_its_gradient_is_read_once(place, monkeypatch):
    """With what a GPU has: of one read where both products want it and are of FP8 units, and nothing else is done to
    it."""
    monkeypatch.setattr(dispatch, "why_not_fused", lambda _: None)
    kernels = backend.__wrapped__("cuda")
    assert kernels.both_fp8 is fused.both_fp8
    calls = []

    def counted(*arguments):
        calls.append(arguments)
        return fused.both_fp8(*arguments)

    x, w, g = (
        torch.randn(2, *shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
        for shape in [(32, 64), (32, 64), (32, 32)]
    )
    for name, wanted, reads in (
        ("mxfp4", (True, True), 2),
        ("mxfp4", (False, True), 0),
        ("mxfp4-rht", (True, True), 0),
    ):
        recipe = msgspec.structs.replace(RECIPES[name], gemm="fp8-exact")
        results = []
        for both_fp8 in (None, counted):
            of = msgspec.structs.replace(kernels, both_fp8=both_fp8)
            monkeypatch.setattr(lanes, "backend", lambda _, of=of: of)
            numerics, found = LaneNumerics([recipe] * 2, (3, 4), dtype=torch.bfloat16), []
            for step, scale in ((0, 1.0), (1, 2.0**-12)):
                numerics.step.fill_(step)
                inputs = [t.clone().requires_grad_(of) for t, of in zip((x, w), wanted, strict=True)]
                y = product(inputs[0], inputs[1], None, numerics, 1)
                found += [y, *torch.autograd.grad(y, [t for t in inputs if t.requires_grad], g * scale)]
            results.append((found, numerics.state()))
        (before, state_before), (after, state_after) = results
        assert len(calls) == reads
        calls.clear()
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert state_before.keys() == state_after.keys()
        assert all(torch.equal(state_before[key], state_after[key]) for key in state_before)
