"""Rows are sent as a recipe stores them: a kernel writes the same bytes in one pass, and reads them at their places."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fp4dse.dse import QUANTIZERS, Quantizer
from fp4dse.kernels.dispatch import OPERATIONS, refusals
from fp4dse.kernels.ops.messages import packed, placed, row_bytes
from tests.kernels.comparing import Operators, randn, same, take_kernels

FUSED = ["mxfp4", "mxfp4-ceil", "mxfp4-rceil", "mxfp4-even", "fp8-1x128", "bf16"]
OTHERS = ["fp8-row", "mxfp8", "none"]


def quantizer(name: str) -> Quantizer:
    return Quantizer(element=name) if name in ("bf16", "none") else QUANTIZERS[name]


def every(rows: Tensor) -> Tensor:
    """The numbers of all rows, one after the other."""
    return torch.arange(len(rows))


def edges(width: int) -> Tensor:
    """Rows of this width with all numbers of BF16, in order and shuffled: each exponent, infinity and NaN among them,
    and ones with more digits, near the middles between E2M1's numbers."""
    of = torch.arange(1 << 16, dtype=torch.int32) << 16
    shuffled = of[torch.randperm(len(of), generator=torch.Generator().manual_seed(0))]
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]).view(torch.int32)
    near = (middles[:, None, None] + (torch.arange(-3, 4) << 23)[:, None] + torch.tensor([-1, 0, 1])).flatten()
    near = torch.cat([near, near + (1 << 31) - (1 << 32)]).repeat(9)
    whole = torch.cat([of, shuffled, near]).to(torch.int32)
    return whole[: len(whole) // width * width].view(torch.float32).view(-1, width)


def of_one_nan(message: Tensor, width: int, q: Quantizer) -> Tensor:
    """The message with one code for NaN in FP8, which has two, and in BF16, which has 254: rounding to BF16 writes
    0xFFFF on a CPU and 0x7FFF on a GPU."""
    if q.element == "bf16":
        codes = message.contiguous().view(torch.int16)
        return torch.where(codes & 0x7FFF > 0x7F80, 0x7FFF, codes).to(torch.int16).view(torch.uint8)
    end = -(-width // 128) * 128 if q.element == "e4m3" else 0
    is_nan = (message & 0x7F == 0x7F) & (torch.arange(message.shape[1]) < end)
    return torch.where(is_nan, 0x7F, message)


@pytest.mark.parametrize(("name", "dtype"), [("fp8-1x128", torch.float8_e4m3fn), ("bf16", torch.bfloat16)])
def test_every_code_of_nan_counts_as_one_and_every_other_code_as_itself(name, dtype):
    """Of FP8 the factors behind the codes have bytes of all kinds, and no NaN."""
    integers = torch.uint8 if dtype.itemsize == 1 else torch.int16
    codes = torch.arange(256**dtype.itemsize).to(integers).view(-1, 256)
    factors = torch.empty(len(codes), 0, dtype=torch.uint8) if name == "bf16" else torch.full((len(codes), 8), 0x7F)
    message = torch.cat([codes.view(torch.uint8), factors.to(torch.uint8)], 1)
    found = of_one_nan(message, 256, quantizer(name))
    assert torch.equal(found[:, 256 * dtype.itemsize :], factors)
    one = found[:, : 256 * dtype.itemsize].contiguous().view(integers)
    is_nan = codes.view(dtype).isnan()
    assert torch.equal(one.view(dtype).isnan(), is_nan)
    assert torch.equal(one[~is_nan], codes[~is_nan])
    assert len(codes[is_nan].unique()) == (254 if name == "bf16" else 2)
    assert len(one[is_nan].unique()) == 1


def by_definition(monkeypatch, function, *arguments):
    with monkeypatch.context() as patch:
        take_kernels(patch, "messages", taken=False)
        return function(*arguments)


@pytest.mark.parametrize("width", [2048, 2080], ids=["whole", "ragged"])
@pytest.mark.parametrize("name", FUSED)
def test_a_kernel_writes_the_bytes_of_the_definition_and_reads_its_numbers(place, monkeypatch, name, width):
    """Rows in any order, some twice, each of three choices; places that get one, in any order, and some that do not."""
    q, x, g = quantizer(name), edges(width), torch.Generator().manual_seed(1)
    chosen = torch.randperm(3 * len(x), generator=g)[: len(x) + 3]
    chosen[:2] = chosen[2]
    source = torch.randperm(2 * len(chosen), generator=g)
    source[source >= len(chosen)] = -1
    message = by_definition(monkeypatch, packed, x, chosen, q, 3)
    numbers = by_definition(monkeypatch, placed, message, source, width, q)
    found = place.messages.packed(x.to(place.device), chosen.to(place.device), q, 3).cpu()
    assert torch.equal(*(of_one_nan(of, width, q) for of in (found, message)))
    got = place.messages.placed(message.to(place.device), source.to(place.device), width, q).cpu()
    assert same(got, numbers)
    assert (got[source < 0].view(torch.int32) == 0).all()


@pytest.mark.parametrize("name", ["mxfp4", "fp8-1x128"])
def test_every_code_under_every_scale_is_read(place, monkeypatch, name):
    """Of MXFP4 also those that no operand has: NaN's scale over numbers. Of FP8 all codes under some factors."""
    q = quantizer(name)
    if name == "mxfp4":
        codes = torch.arange(256, dtype=torch.uint8).view(16, 16).repeat(1, 16).view(-1, 16)  # [256, 16]
        scales = torch.arange(256, dtype=torch.uint8).repeat_interleave(len(codes))[:, None]
        message, width = torch.cat([codes.repeat(256, 1), scales], 1), 32
    else:
        codes = torch.arange(256, dtype=torch.uint8).view(2, 128)
        factors = torch.cat([randn(6).exp2(), torch.tensor([0.0, 2.0**-149, 2.0**126, torch.inf])])[:, None]
        factors = factors.contiguous().view(torch.uint8).repeat_interleave(2, 0)
        message, width = torch.cat([codes.repeat(10, 1), factors], 1), 128
    message = message[torch.randperm(len(message), generator=torch.Generator().manual_seed(0))[:1024]]
    wanted = by_definition(monkeypatch, placed, message, every(message), width, q)
    there = message.to(place.device), every(message).to(place.device)
    got = place.messages.placed(*there, width, q).cpu()
    assert same(got, wanted)
    assert torch.equal(got.signbit() | got.isnan(), wanted.signbit() | wanted.isnan())


@settings(max_examples=30)
@given(
    st.sampled_from(["mxfp4", "mxfp4-rceil", "fp8-1x128", "fp8-row", "bf16", "none"]),
    st.integers(0, 5),
    st.sampled_from([32, 128, 160]),
    st.integers(0, 99),
    st.integers(-20, 20),
)
@example("fp8-row", 1, 10, 0, 0)
def test_rows_are_what_a_recipe_makes_of_them_wherever_they_travel(name, rows, width, seed, power):
    q = quantizer(name)
    x = randn(rows, width, seed=seed) * 2.0**power
    message = packed(x, every(x), q)
    assert message.shape == (rows, row_bytes(width, q))
    found = placed(message, every(x), width, q)
    if name == "none":
        assert torch.equal(found, x)
    for i in range(rows):
        alone = packed(x[i : i + 1], torch.zeros(1, dtype=torch.int64), q)
        assert torch.equal(placed(alone, torch.zeros(1, dtype=torch.int64), width, q)[0], found[i])
    if name.startswith("mxfp4"):
        assert torch.equal(placed(packed(found, every(found), q), every(found), width, q), found)


@pytest.mark.parametrize("name", [*FUSED, *OTHERS])
def test_a_place_gets_the_row_that_it_names_or_zeros(name):
    q, x = quantizer(name), randn(4, 256, seed=7)
    message = packed(x, torch.tensor([7, 0, 5]), q, 2)
    whole = placed(packed(x, every(x), q), every(x), 256, q)
    got = placed(message, torch.tensor([-1, 2, 1, -1, 0, 2]), 256, q)
    assert torch.equal(got, torch.stack([torch.zeros(256), whole[2], whole[0], torch.zeros(256), whole[3], whole[2]]))
    nothing = packed(x, torch.empty(0, dtype=torch.int64), q)
    assert nothing.shape == (0, row_bytes(256, q))
    assert torch.equal(placed(nothing, torch.full((3,), -1), 256, q), torch.zeros(3, 256))


def test_the_kernels_take_what_is_sent_by_default_and_say_what_they_do_not(place, monkeypatch):
    for name in FUSED:
        assert place.messages.why_not(torch.empty(1), quantizer(name)) is None
    for name in (*OTHERS, "mxfp4-34", "fp8-1x128"):
        reason = place.messages.why_not(torch.empty(1), quantizer(name))
        assert (reason is None) == (name == "fp8-1x128")
    refusals()
    x = randn(2, 128)
    with monkeypatch.context() as patch:
        patch.setattr(OPERATIONS["messages"], "has_kernels", lambda _: True)
        packed(x, every(x), quantizer("fp8-row"))
    assert [said for said in refusals() if said.startswith("messages: computed by torch (quantizer: found fp8-row")]


def test_nothing_but_kernels_runs_where_they_are_taken(place, monkeypatch):
    """One launch a way, whatever a descriptor would say: no number is fetched from the device."""
    x, launched = randn(4, 256).to(place.device), []
    with monkeypatch.context() as patch:
        take_kernels(patch, "messages")
        for name in ("mxfp4", "fp8-1x128", "bf16"):
            q, kind = quantizer(name), {"mxfp4": "mxfp4", "fp8-1x128": "fp8", "bf16": "bf16"}[name]
            packed(x, every(x).to(place.device), q)  # what is kept is made
            for way in ("packed", "placed"):
                kernel = getattr(place.messages, f"_{kind}_{way}_kernel")
                patch.setattr(place.messages, f"_{kind}_{way}_kernel", Counted(kernel, launched))
            with Operators() as seen:
                message = packed(x, every(x).to(place.device), q)
                placed(message, every(x).to(place.device), 256, q)
            assert {name for name in seen.names if name not in ALLOWED} == set()
    assert len(launched) == 6


ALLOWED = {"arange", "empty", "view", "detach"} | {"_to_copy", "copy_", "lift_fresh", "new_empty", "set_"}
"""What makes inputs and outputs, and what the interpreter does for a launch."""


class Counted:
    """A kernel whose launches are noted."""

    def __init__(self, kernel, launched):
        self.kernel, self.launched = kernel, launched

    def __getitem__(self, programs):
        self.launched.append(programs)
        return self.kernel[programs]
