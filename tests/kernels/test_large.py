"""Tensors of more than 2^31 numbers, and results of as many: kernels count beyond 32 bits.

On a device, where a test takes up to 35 GB; both ends are compared with the definition. In the interpreter small
tensors are said to be large.
"""

import pytest
import torch

from fp4dse.dse import QUANTIZERS, Quantizer
from fp4dse.kernels.ops import fp8, launching, messages
from fp4dse.kernels.ops.fp8 import E4M3, E5M2, History, Shift
from fp4dse.kernels.ops.unpacked import unpacked
from fp4dse.kernels.quant.triton import operators as fused
from fp4dse.kernels.quant.triton import unfused
from tests.kernels.fp8_operands import MX, assert_same_operand, history_of, operand, there
from tests.kernels.test_triton import call_for, to

MANY = 2**31
ENDS = slice(64), slice(-64, None)


@pytest.fixture
def sizes(place, monkeypatch):
    """Chooses the sizes of a device, else those of the interpreter, which are said to be large."""
    if place.device == "cuda":
        yield lambda on_device, _: on_device
        torch.cuda.empty_cache()
    else:
        monkeypatch.setattr(launching, "NEAR", 0)
        yield lambda _, here: here


def integers(place, *shape, dtype=torch.bfloat16):
    """Numbers from -3 to 3, of which FP32 holds every sum here, and FP8 each."""
    g = torch.Generator(place.device).manual_seed(0)
    return torch.randint(-3, 4, shape, dtype=torch.int8, device=place.device, generator=g).to(dtype)


def is_large(place, *shape):
    """True on a device if a tensor of this shape has more than 2^31 numbers; elsewhere in any case."""
    return place.device != "cuda" or torch.Size(shape).numel() > MANY


@pytest.mark.parametrize("name", ["mxfp4", "fp8-1x128", "bf16"])
def test_rows_are_sent_and_placed_from_one_end_to_the_other(place, sizes, name):
    q = QUANTIZERS[name] if name in QUANTIZERS else Quantizer(element=name)
    rows, width = sizes((2**16 + 8, 2**15 + 128), (24, 160))
    assert is_large(place, rows, width)
    x = torch.randn(rows, width, dtype=torch.bfloat16, device=place.device)
    turned = torch.arange(rows, device=place.device).flip(0)
    message = place.messages.packed(x, turned, q)
    found = place.messages.placed(message, turned, width, q)
    for row in (0, 1, rows // 2, rows - 2, rows - 1):
        first = torch.zeros(1, dtype=torch.int64)
        of_row = messages.packed(x[row : row + 1].cpu(), first, q)
        assert torch.equal(message[rows - 1 - row].cpu(), of_row[0])
        assert torch.equal(found[row].cpu(), messages.placed(of_row, first, width, q)[0])


def test_codes_are_unpacked_in_lanes_of_so_many_numbers(place, sizes):
    rows, half = sizes((2**16 + 8, 2**14 + 64), (136, 48))
    assert is_large(place, rows, 2 * half)
    g = torch.Generator(place.device).manual_seed(0)
    codes, scales = (
        torch.randint(*of, (2, rows, n), dtype=torch.uint8, device=place.device, generator=g)
        for of, n in (((0, 256), half), ((100, 150), half // 16))
    )
    quantizers = [MX.canonical()] * 2
    found = place.unpacked.unpacked(codes, scales, quantizers)
    for end in ENDS:
        assert torch.equal(found[:, end].cpu(), unpacked(codes[:, end].cpu(), scales[:, end].cpu(), quantizers))


@pytest.mark.parametrize("in_segments", [False, True])
def test_groups_have_so_many_rows(place, sizes, in_segments):
    rows, columns = sizes((2**24 + 40, 128), (168, 24))
    assert is_large(place, rows, 128)
    a, b = integers(place, 2, rows, 128), integers(place, 2, columns, 128)
    a[1, -5:] = torch.nan  # not filled, so not read
    count = torch.tensor([rows, rows - 5], device=place.device)
    powers = torch.exp2(torch.arange(rows, device=place.device) % 7.0).expand(2, -1)[..., None].contiguous()
    if in_segments:
        found = place.grouped.grouped_in_segments(a, b, powers, None, count, False, "ieee")
    else:
        found = place.grouped.grouped(a, b, count, False, "ieee")
    for end in ENDS:
        expected = torch.einsum("grk,gsk->grs", a[:, end].cpu().double(), b.cpu().double())
        expected = expected * powers[:, end].cpu() if in_segments else expected
        assert torch.equal(found[:, end].cpu().double(), expected.nan_to_num(0.0))


@pytest.mark.parametrize("in_segments", [False, True])
def test_groups_have_so_many_numbers_along_the_contraction(place, sizes, in_segments):
    """As a weight's gradient has, of which only the ends are not zero: sums of all would be rounded."""
    length = sizes(2**26 + 128, 384)
    assert is_large(place, length, 32)
    a, b = (torch.zeros(1, length, 32, dtype=torch.bfloat16, device=place.device) for _ in range(2))
    ends = slice(128), slice(-128, -3)  # and what is not filled is zero
    for end in ends:
        for x in (a, b):
            x[:, end] = integers(place, *x[:, end].shape)
    count = torch.tensor([length - 3], device=place.device)
    powers = torch.exp2(torch.arange(length // 128, device=place.device) % 7.0).expand(1, 32, -1).contiguous()
    if in_segments:
        found = place.grouped.grouped_in_segments(a.mT, b.mT, powers, None, count, True, "ieee")
    else:
        found = place.grouped.grouped(a.mT, b.mT, count, True, "ieee")
    parts = [(a[0, end].cpu().double().mT @ b[0, end].cpu().double()) for end in ends]
    if in_segments:
        parts = [part * powers[0, 0, at].item() for part, at in zip(parts, (0, -1), strict=True)]
    assert torch.equal(found[0].cpu().double(), sum(parts))


def lane(place, sizes, dtype, columns, *, whole=False):
    """A lane [1, R, C] whose first and last blocks along the contraction FP8 does not hold. whole: of integers."""
    shape = sizes((1, 2**16 + 96, 2**15 + 32), (1, 160, 160))
    assert is_large(place, *shape)
    x = integers(place, *shape, dtype=dtype) if whole else torch.randn(*shape, dtype=dtype, device=place.device)
    along = x.mT if columns else x
    along[:, 3, :32] *= 2.0**-60
    along[:, -3, -32:] *= 2.0**-60
    return x


def ends_of(found, x, columns):
    """Both ends of an operand in FP8, and what it was made of, on a CPU."""
    values, shift = found
    for end in ENDS:
        flags, wide = (t[:, end].cpu() for t in (shift.flags, shift.wide))
        there = values[:, end].cpu(), Shift(shift.power.cpu(), flags, shift.notes.cpu(), wide)
        yield there, (x[:, :, end] if columns else x[:, end]).cpu().contiguous()


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_quantizer_writes_so_many_numbers_in_fp8(place, sizes, dtype, columns):
    """Of bfloat16 two at a time."""
    x, call = lane(place, sizes, dtype, columns), call_for([MX])
    history = history_of(1, 129, True, int(call.step))
    at = to(place.device, call)
    known = History(history.tops.to(place.device, copy=True), at.step, True)
    *found, _ = fused.fp8(x, columns, at, E5M2, known)
    for got, piece in ends_of(found, x, columns):
        values, _ = unfused.operand(piece, columns, call)
        expected = fp8.to_fp8(values, E5M2, history._replace(tops=history.tops.clone()))
        assert expected[1].flags.sum() == 1
        assert_same_operand(got, expected)


def test_both_operands_of_so_many_numbers_are_written_from_one_read(place, sizes):
    x = lane(place, sizes, torch.bfloat16, columns=False)
    of_columns = x[:, :, -1:].mT  # and not held down the columns
    of_columns[:, :, 64:96] *= 2.0**-60
    of_columns = x[:, :, 1:2].mT
    of_columns[:, :, 64:96] *= 2.0**-60
    calls, dtypes = [call_for([MX]) for _ in range(2)], (E5M2, E4M3)
    calls[1] = calls[1]._replace(seeds=calls[0].seeds, step=calls[0].step)
    at = [to(place.device, call) for call in calls]
    at[1] = at[1]._replace(seeds=at[0].seeds, step=at[0].step)
    histories = [history_of(1, 129, True, int(calls[0].step)) for _ in dtypes]
    known = tuple(History(of.tops.to(place.device, copy=True), at[0].step, True) for of in histories)
    assert place.pair_both.are_paired(x, at)
    for columns, (*found, _) in enumerate(fused.both_fp8(x, tuple(at), dtypes, known)):
        for got, piece in ends_of(found, x, columns):
            values, _ = unfused.operand(piece, bool(columns), calls[columns])
            tops = histories[columns].tops.clone()
            expected = fp8.to_fp8(values, dtypes[columns], histories[columns]._replace(tops=tops))
            assert expected[1].flags.any()
            assert_same_operand(got, expected)


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
def test_so_many_numbers_become_fp8(place, sizes, columns):
    x, power = lane(place, sizes, torch.bfloat16, columns, whole=True), torch.tensor([0.5])
    along = x.mT if columns else x
    found = place.fp8.split(along, E4M3, power.to(place.device))
    for got, piece in ends_of(found, x, columns):
        expected = fp8.split(piece.mT if columns else piece, E4M3, power)
        assert expected[1].flags.sum() == 1
        assert_same_operand(got, expected)


def test_a_product_in_fp8_has_so_many_numbers(place, sizes, any_size):
    """Those of the last row are not held."""
    rows, columns = sizes((2**16 + 16, 2**15 + 16), (80, 80))
    assert is_large(place, rows, columns)
    x, y = (integers(place, 1, n, 128, dtype=torch.float32).cpu() for n in (rows, columns))
    x[:, -1] *= 2.0**-60
    a, b = (there(place.device, operand(of, kind)) for of, kind in ((x, E5M2), (y, E4M3)))
    assert a.shift.flags[0].flatten().nonzero().tolist() == [[rows - 1]]
    found = place.fp8.multiply(a, b)
    for down in ENDS:
        for across in ENDS:
            expected = x[0, down].double() @ y[0, across].double().mT
            assert torch.equal(found[0, down, across].cpu().double(), expected)
