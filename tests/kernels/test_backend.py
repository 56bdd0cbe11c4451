"""The compiled path is the reference, whatever draws and shapes it meets, and in whatever order."""

import msgspec
import torch

from fp4dse.dse import Quantizer
from fp4dse.dse.rounding import Stochastic
from fp4dse.kernels import backend, reference
from fp4dse.kernels.arithmetic.philox import STREAMS, random16
from fp4dse.kernels.descriptor import descriptor


def test_every_draw_has_its_own_threshold_on_the_compiled_path():
    """4 + 2·fraction goes up to 6 at the threshold of its draw, 1 - (2r + 1) / 2^17, and down to 4 just below it."""
    r = torch.arange(1 << 16, dtype=torch.int32)
    at = 4 + 2 * (1 - (2 * r + 1).to(torch.float32) * 2.0**-17)
    just_below = torch.nextafter(at, torch.tensor(0.0))
    mxfp4 = msgspec.structs.replace(Quantizer.named("mxfp4"), rounding=Stochastic())  # the scale of [4, 8) is one
    tables, path = descriptor([mxfp4, mxfp4]), backend("cpu")
    assert path.name == "compiled", path.why_not
    draws = r.view(1, -1, 32).repeat(2, 1, 1)
    for drawn in (draws, draws.to(torch.int16)):  # the same bits in 32 and in 16
        values, _ = path.decode_operand(torch.stack([at, just_below]).view(2, -1, 32), *tables, drawn, False)
        assert (values[0] == 6).all()
        assert (values[1] == 4).all()


def test_draws_are_those_of_the_reference():
    seeds, step, site = torch.tensor([3, 4]), torch.tensor(5), torch.tensor(6)
    drawn = backend("cpu").draws(seeds, STREAMS["rounding"], step, site, 4096)
    wanted = random16(seeds, STREAMS["rounding"], step, site, 4096)
    assert torch.equal(drawn.to(torch.int32) & 0xFFFF, wanted)


def test_many_threads_have_the_bits_of_the_reference():
    x = torch.randn(2, 1000, 16)
    tables = descriptor([Quantizer.named("nvfp4")] * 2)
    threads = torch.get_num_threads()
    try:
        for n in (1, 2):
            torch.set_num_threads(n)
            with torch.no_grad():
                got = backend("cpu").decode_operand(x, *tables, None, False)
            for a, b in zip(got, reference.decode_operand(x, *tables, None, False), strict=True):
                assert torch.equal(a, b)
    finally:
        torch.set_num_threads(threads)
