"""What is stored as codes decodes to the same bits, whichever rule chose the scales, however elements were rounded."""

import pytest
import torch
from msgspec.structs import replace

from fp4dse.dse import QUANTIZERS, Quantizer
from fp4dse.dse.own_formats import FloatElement
from fp4dse.dse.rounding import Stochastic
from fp4dse.kernels.quant.backend import PLAIN, Backend, _compiled, backend
from fp4dse.kernels.quant.operand.kinds import slot_of
from fp4dse.kernels.quant.operand.records import Term, Use
from fp4dse.kernels.quant.operand.stored import encoded_blocks, restored, stored, why_not_stored
from fp4dse.kernels.quant.triton import unfused

STORED = [name for name, q in QUANTIZERS.items() if why_not_stored(q.canonical()) is None]
USE = Use(torch.arange(2), torch.zeros((), dtype=torch.int64), 3, training=True)
ONE = replace(USE, seeds=USE.seeds[:1])


def numbers() -> torch.Tensor:
    """float32 [2, 9, 128] of every size, with zeros of both signs and a NaN."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(2, 9, 128, generator=g) * torch.exp2(torch.randint(-30, 8, (2, 9, 1), generator=g).float())
    x[0, 0] = 0.0
    x[0, 1] = -0.0
    x[0, 2] *= 1e-38
    x[0, 3, ::8] *= 1e4
    return x


def operand(q: Quantizer, x: torch.Tensor) -> tuple[Term, list[Quantizer]]:
    quantizers = [q.canonical()] * len(x)
    [term] = slot_of(quantizers, 0, torch.device("cpu"), PLAIN).quantize(x, USE).terms
    return term, quantizers


def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """The same bits, but for the kind of NaN."""
    if a is None or b is None:
        return a is b
    bits = a.contiguous().view(torch.int32) == b.contiguous().view(torch.int32)
    return a.shape == b.shape and bool((bits | a.isnan() & b.isnan()).all())


@pytest.mark.parametrize("name", STORED)
def test_it_is_restored_bit_for_bit(name):
    for rounding in ({}, {"rounding": Stochastic()}):
        x = numbers()
        if QUANTIZERS[name].tensor_scale is None:
            x[1, 4, 40] = torch.nan
        term, quantizers = operand(replace(QUANTIZERS[name], **rounding), x)
        back = restored(stored(term, quantizers), quantizers)
        assert same(back.values, term.values)
        assert same(back.factor, term.factor)


def test_it_takes_the_bytes_of_its_format():
    sizes = {"mxfp4": 0.53125, "nvfp4": 0.5625, "fp8-1x128": 1.03125, "mxfp4-2d": 0.53125, "mxfp8": 1.03125}
    for name, size in sizes.items():
        of = stored(*operand(QUANTIZERS[name], torch.randn(2, 64, 256)))
        factors = 0 if of.factor.ndim == 1 else of.factor.nbytes
        assert of.codes.nbytes + of.scales.nbytes + factors == size * 2 * 64 * 256
    bf16 = [Quantizer(element="bf16").canonical()] * 2
    assert stored(Term(torch.ones(2, 4, 32), None), bf16).codes.nbytes == 2 * 2 * 4 * 32


def test_what_has_no_codes_says_so():
    reasons = {name: why_not_stored(QUANTIZERS[name].canonical()) for name in QUANTIZERS if name not in STORED}
    assert {"hif4", "int4-sawb"} <= reasons.keys()
    assert {"mxfp4", "nvfp4", "mxfp4-2d", "fp8-1x128", "fp8-128x128", "mxfp8", "mxfp8-e5m2-rceil"} <= {*STORED}
    assert "codec" in reasons["hif4"]


def test_values_that_are_no_block_are_refused():
    with pytest.raises(ValueError, match="a block that is no"):
        encoded_blocks(torch.tensor([6.0, 5.0] * 16).view(1, 1, 32), [QUANTIZERS["mxfp4"].canonical()])


@pytest.mark.parametrize("names", [("mxfp4", "mxfp4-rceil"), ("nvfp4", "ue5m3-t448"), ("mxfp4-2d",) * 2], ids=str)
def test_the_kernel_decodes_what_is_stored(place, names):
    """Two lanes whose scales are of two formats, NaN among them."""
    x, quantizers = numbers(), [QUANTIZERS[name].canonical() for name in names]
    x[1, 4, 40] = torch.nan
    terms = [
        slot_of([q], 0, torch.device("cpu"), PLAIN).quantize(x[i : i + 1], ONE).terms[0]
        for i, q in enumerate(quantizers)
    ]
    of = [stored(term, [q]) for term, q in zip(terms, quantizers, strict=True)]
    codes, scales = (torch.cat([getattr(one, name) for one in of]) for name in ("codes", "scales"))
    got = place.unpacked.unpacked(codes.to(place.device), scales.to(place.device), quantizers).cpu()
    assert same(got, torch.cat([term.values for term in terms]))


def packing(quantizers: list[Quantizer], device: str) -> Backend:
    """A backend with a kernel that writes codes; on a CPU the definition in its place."""
    if device == "cuda":
        return backend(device)
    return replace(_compiled(), packed=lambda x, columns, call: unfused.packed(x, columns, call, quantizers))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ["mxfp4", "mxfp4-rceil", "nvfp4", "ue5m3-t448"])
@pytest.mark.parametrize("rounding", [{}, {"rounding": Stochastic()}], ids=["nearest", "stochastic"])
def test_a_kernel_writes_codes_that_decode_to_the_operand_beside_them(name, rounding, device):
    quantizers = [replace(QUANTIZERS[name], **rounding).canonical()] * 2
    slot = slot_of(quantizers, 0, torch.device(device), packing(quantizers, device))
    use = replace(USE, seeds=USE.seeds.to(device), step=USE.step.to(device), keeping=True)
    assert slot.why_not_codes is None
    found = slot.quantize(numbers().to(device), use)
    plain = slot.quantize(numbers().to(device), replace(use, keeping=False))
    assert found.stored is not None
    assert same(found.decoded().cpu(), plain.decoded().cpu())
    assert same(restored(found.stored, quantizers).decoded().cpu(), plain.decoded().cpu())


def test_where_no_kernel_writes_codes_there_is_a_reason():
    for name, said in {"nvfp4": "no such kernel", "mxfp4-2d": "no such kernel"}.items():
        quantizers = [QUANTIZERS[name].canonical()] * 2
        assert said in str(slot_of(quantizers, 0, torch.device("cpu"), _compiled()).why_not_codes)
    tiles = [QUANTIZERS["mxfp4-2d"].canonical()] * 2
    assert "blocks along" in str(slot_of(tiles, 0, torch.device("cpu"), packing(tiles, "cpu")).why_not_codes)
    few = [replace(QUANTIZERS["nvfp4"], element=FloatElement(mantissa=1, emin=0, max=4.0)).canonical()] * 2
    assert "found 7 magnitudes" in str(slot_of(few, 0, torch.device("cpu"), packing(few, "cpu")).why_not_codes)
    fp8 = [QUANTIZERS["fp8-1x128"].canonical()] * 2
    assert slot_of(fp8, 0, torch.device("cpu"), _compiled()).why_not_codes is None
