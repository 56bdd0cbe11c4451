"""Operands that a product decodes by itself have the reference's bits, and their products are those of decoded ones."""

import itertools

import pytest
import torch

from fp4dse.dse import QUANTIZERS
from fp4dse.kernels.ops import products
from fp4dse.kernels.ops.products import decoding
from fp4dse.kernels.quant.call import Call
from fp4dse.kernels.quant.descriptor import descriptor
from fp4dse.kernels.quant.packed import codebook, scales_in_order, unpack
from fp4dse.kernels.quant.triton import unfused
from fp4dse.kernels.quant.triton.features import features_of
from tests.kernels.test_batched import FINISHES, finish_of

NAMES = ("nvfp4", "mxfp4")
ALONG = {"nvfp4": 64, "mxfp4": 128}
"""The shortest steps along the contraction: four blocks."""


def packed_of(x, name):
    """x [L, R, K] as codes [L, R, K / 2], scale codes [L, R, K / block] and decoded numbers, float32."""
    quantizers = [QUANTIZERS[name].canonical()] * len(x)
    tables, zero = descriptor(quantizers, x.device), torch.zeros((), dtype=torch.int64)
    seeds = torch.zeros(len(x), dtype=torch.int64)
    call = Call(int(quantizers[0].block), *tables, features_of(*tables), seeds, zero, 0)
    codes, scales, _ = unfused.packed(x, False, call, quantizers)
    return codes, scales, decoded(codes, scales, name)


def decoded(codes, scales, name):
    lanes, rows, half = codes.shape
    quantizers = [QUANTIZERS[name].canonical()] * lanes
    blocks = codes.view(lanes, -1, half // scales.shape[2])
    return unpack(blocks, scales.flatten(1), quantizers).view(lanes, rows, 2 * half)


def to_device(place, codes, scales):
    return place.packed.Packed(codes.to(place.device), scales.mT.contiguous().to(place.device))


def spread(*shape, seed=0):
    """Numbers whose blocks have scales of many sizes."""
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(-6, 7, (*shape[:-1], shape[-1] // 16), generator=generator)
    return torch.randn(shape, generator=generator) * torch.exp2(powers.float()).repeat_interleave(16, -1)


def every_code(name, least):
    """Codes [1, R, K / 2] and scale codes [1, R, K / block]: all pairs of an element and a scale, from `least` on."""
    quantizer = QUANTIZERS[name].canonical()
    scales = torch.arange(least, len(scales_in_order(quantizer.scale)), dtype=torch.uint8)
    scales = torch.cat([scales, scales[-1:].expand(-len(scales) % 128)])
    block = int(quantizer.block)
    rows = len(scales) * block // ALONG[name]
    byte = torch.arange(8, dtype=torch.uint8) * 2
    return (byte | byte + 1 << 4).repeat(block // 16 * len(scales)).view(1, rows, -1), scales.view(1, rows, -1)


def one_hot(length, name):
    """The identity, packed."""
    codes, scales, numbers = packed_of(torch.eye(length)[None] * 6, name)
    return codes, scales, numbers


@pytest.mark.parametrize("name", NAMES)
def test_every_code_under_every_scale_has_the_bits_of_the_reference(place, name):
    """In each place that an operand may have: a, b, beside one in BF16 and beside a packed one."""
    # 2^-126 on a device: that its tensor cores keep numbers which are subnormal in FP32 is nothing that we ask of them
    codes, scales = every_code(name, 2 if name == "mxfp4" and place.device == "cuda" else 0)
    wanted, along = decoded(codes, scales, name), ALONG[name]
    if name == "mxfp4":  # the largest scales are out of BF16's range with the largest elements, so in the reference
        wanted = wanted.bfloat16().float()
        wanted[wanted.isinf().any(2)] = torch.nan
    operand, tiles = to_device(place, codes, scales), place.products.Tiles(64, 64, along, 4, 2)
    identity = torch.eye(along)[None].to(torch.bfloat16).to(place.device)
    hot_codes, hot_scales, hot = one_hot(along, name)
    unit = hot.amax().item()
    for of, factor in ((identity, 1.0), (to_device(place, hot_codes, hot_scales), unit)):
        got = place.packed.multiply(operand, of, products.AS_IT_IS, tiles).cpu()
        assert torch.equal(got.nan_to_num(nan=7e30), (wanted * factor).nan_to_num(nan=7e30))
        got = place.packed.multiply(of, operand, products.AS_IT_IS, tiles).cpu()
        assert torch.equal(got.mT.nan_to_num(nan=7e30), (wanted * factor).nan_to_num(nan=7e30))


KINDS = {"f16x2": torch.float16, "bf16x2": torch.bfloat16}
OPERATIONS = {
    "shl": lambda a, b: a << b,
    "shr": lambda a, b: (a & 0xFFFFFFFF) >> b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
}


def run(assembly, registers):
    """Run the few instructions of PTX that decoding takes. registers: name -> int64 [n], of 32 bits each."""
    for line in filter(None, (part.strip("{} \n") for part in assembly.split(";"))):
        if line.startswith(".reg"):
            continue
        operation, operands = line.split(None, 1)
        (name, *kind), (target, *of) = operation.split("."), operands.split(", ")
        of = [registers[x] if x in registers else torch.tensor(int(x, 0)) for x in of]
        if name == "mov":
            value = of[0].expand_as(registers["$4"])
        elif name == "prmt":
            byte = [x >> 8 * n & 255 for x in of[:2] for n in range(4)]
            value = sum(byte[of[2].item() >> 4 * n & 7] << 8 * n for n in range(4))
        elif name == "mul":
            numbers = [x.to(torch.int32).view(KINDS[kind[1]]).view(-1, 2).float() for x in of]
            value = (numbers[0] * numbers[1]).to(KINDS[kind[1]]).view(torch.int32).flatten().long()
        else:
            value = OPERATIONS[name](*of)
        registers[target] = value & 0xFFFFFFFF
    return registers


@pytest.mark.parametrize(("form", "name"), [("fp16", "nvfp4"), ("bf16", "nvfp4"), ("powers", "mxfp4")])
def test_the_assembly_decodes_every_byte_in_each_place_under_every_scale(form, name):
    """The interpreter runs a twin of it, so here is what it says, instruction by instruction."""
    elements, grid = codebook(QUANTIZERS[name].canonical())
    grid = grid[:-1] if name == "nvfp4" else grid[:253]  # beyond these six times the scale is infinite
    kind = torch.float16 if form == "fp16" else torch.bfloat16
    power = decoding.POWERS[form]
    byte, code = (x.flatten() for x in torch.meshgrid(torch.arange(256), torch.arange(len(grid)), indexing="ij"))
    unit = {"fp16": 2.0**7, "bf16": 2.0**118, "powers": 1.0}[form]
    scale = (grid.double() * unit).to(kind).view(torch.int16).long()[code] & 0xFFFF
    assembly = {"fp16": decoding._FP16, "bf16": decoding._BF16, "powers": decoding._OF_POWERS}[form].value
    for place in range(4):
        word = torch.randint(0, 2**32, byte.shape, generator=torch.Generator().manual_seed(place))
        word = word & ~(255 << 8 * place) & 0xFFFFFFFF | byte << 8 * place
        both = scale | scale << 16
        got = run(assembly, {"$4": word, "$5": both if place < 2 else both * 0, "$6": both * 0 if place < 2 else both})
        for half, four in ((0, byte & 15), (2, byte >> 4)):
            found = (got[f"${half + place // 2}"] >> 16 * (place % 2)).to(torch.int16).view(kind).double()
            assert torch.equal(found, elements[four].double() * grid[code].double() / power)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kinds", [(True, True), (True, False), (False, True)], ids=["both", "a", "b"])
def test_products_of_packed_operands_are_those_of_decoded_ones(place, name, kinds):
    """Rows that fill no tile, a contraction that fills no step where there is one lane, several lanes."""
    for lanes, rows, columns, k in ((1, 80, 48, 288), (3, 48, 80, 256)):
        of = [packed_of(spread(lanes, n, k, seed=n), name) for n in (rows, columns)]
        (a, b), tiles = [numbers.to(torch.bfloat16) for _, _, numbers in of], place.products.Tiles(64, 64, 128, 4, 2)
        operands = [
            to_device(place, codes, scales) if kind else x.to(place.device)
            for kind, x, (codes, scales, _) in zip(kinds, (a, b), of, strict=True)
        ]
        got = place.packed.multiply(*operands, products.AS_IT_IS, tiles).cpu()
        exact, size = a.double() @ b.double().mT, a.double().abs() @ b.double().abs().mT
        assert ((got - exact).abs() <= 2.0**-18 * size).all()
        in_turn = place.packed.multiply(*operands, products.AS_IT_IS, tiles, programs=1).cpu()
        assert torch.equal(in_turn, got)
        if kinds != (True, True):  # in the same order
            same = place.products.described(a.to(place.device), b.to(place.device), products.AS_IT_IS, tiles)
            assert torch.equal(got, same.cpu())
        for lane in range(lanes):
            alone = [
                type(x)(*(part[lane : lane + 1] for part in x)) if isinstance(x, tuple) else x[lane : lane + 1]
                for x in operands
            ]
            assert torch.equal(place.packed.multiply(*alone, products.AS_IT_IS, tiles).cpu()[0], got[lane])


@pytest.mark.parametrize("finish", FINISHES)
def test_a_packed_product_is_finished_as_others_are(place, finish):
    a, b = (to_device(place, *packed_of(spread(2, n, 128, seed=n), "nvfp4")[:2]) for n in (80, 48))
    tiles, end = place.products.Tiles(64, 64, 64, 4, 2), finish_of(finish, 2, (80, 48), place.device)
    product = place.packed.multiply(a, b, products.AS_IT_IS, tiles)
    got = place.packed.multiply(a, b, end, tiles)
    assert got.dtype == end.dtype
    assert torch.equal(got, products.finished(product, end))


def test_a_block_without_a_number_makes_nan_of_its_row(place):
    for name in NAMES:
        codes, scales, _ = packed_of(spread(1, 64, 128), name)
        codes[0, 5, :32], scales[0, 5, 0] = 0, len(scales_in_order(QUANTIZERS[name].canonical().scale))
        assert decoded(codes, scales, name).isnan().any(2).sum() == 1
        a, b = to_device(place, codes, scales), to_device(place, *packed_of(spread(1, 64, 128, seed=1), name)[:2])
        got = place.packed.multiply(a, b, products.AS_IT_IS, place.products.Tiles(64, 64, 128, 4, 2))
        assert torch.equal(got.isnan().all(2).cpu(), torch.arange(64)[None] == 5)
        assert torch.equal(got.isnan().any(2).cpu(), torch.arange(64)[None] == 5)


def test_what_the_kernel_does_not_take_is_refused_with_a_reason(place):
    def operand(lanes, rows, k, block):
        shape = lanes, k // block, rows
        return place.packed.Packed(
            torch.zeros(lanes, rows, k // 2, dtype=torch.uint8), torch.zeros(shape, dtype=torch.uint8)
        )

    plain = torch.zeros(1, 16, 64, dtype=torch.bfloat16)
    for a, b, reason in (
        (plain, plain, "found none that is packed"),
        (operand(1, 16, 64, 16), operand(1, 16, 128, 16), "contraction of b: found 128"),
        (operand(1, 16, 64, 8), plain, "block: found 8"),
        (operand(1, 24, 64, 16), plain, "rows a multiple of 16"),
        (operand(1, 16, 64, 32), plain, "along: found 64; accepted: a multiple of four blocks, 128"),
        (
            operand(2, 16, 96, 16),
            torch.zeros(2, 16, 96, dtype=torch.bfloat16),
            "found 96; accepted: a multiple of 64, or",
        ),
    ):
        with pytest.raises(ValueError, match=reason):
            place.packed.multiply(a, b, products.AS_IT_IS, place.products.Tiles(64, 64, 64, 4, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(64, 512, 256, 256), (2, 1152, 384, 1024), (1, 4096, 1024, 2752)], ids=str)
def test_on_a_gpu_packed_products_have_the_same_bits_in_any_company(name, shape):
    from fp4dse.kernels.ops.products import packed
    from fp4dse.kernels.ops.products.triton import Tiles

    lanes, rows, columns, k = shape
    of = [packed_of(spread(lanes, n, k, seed=n), name) for n in (rows, columns)]
    operands = [packed.Packed(codes.cuda(), scales.mT.contiguous().cuda()) for codes, scales, _ in of]
    a, b = (numbers.cuda() for _, _, numbers in of)
    exact, size = a.double() @ b.double().mT, a.double().abs() @ b.double().abs().mT
    for rows_, columns_, along, warps in itertools.product((64, 128), (128,), (128,), (4, 8)):
        tiles = Tiles(rows_, columns_, along, warps, 3)
        got = packed.multiply(*operands, products.AS_IT_IS, tiles)
        assert ((got - exact).abs() <= 2.0**-16 * size).all()
        for registers, programs in ((128 if warps == 8 else None, None), (None, 1), (None, 2)):
            assert torch.equal(packed.multiply(*operands, products.AS_IT_IS, tiles, registers, programs), got)
        last = [packed.Packed(x.codes[-1:], x.scales[-1:]) for x in operands]
        assert torch.equal(packed.multiply(*last, products.AS_IT_IS, tiles)[0], got[-1])
