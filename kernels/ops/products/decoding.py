"""Codes of two elements a byte and scale codes as numbers, in registers: E2M1 under scales in E4M3 or E8M0.

An element times its scale has at most six significant bits, so that the operand is that of the reference, to the bit,
but for a power of two. The exponent and mantissa bits of a code are moved to where a wider format has them; then all of
its numbers, subnormal ones too, are a power of two times the element, and one product with the scale is what is left:

    fp16      2^-14 times the element, times 2^7 times the scale in E4M3. In FP16 all bits of a code go to one byte
    bf16      2^-126 times the element, times 2^118 times the scale in E4M3, to multiply numbers in BF16
    powers    2^-126 times the element, times 2^126, times the scale in E8M0, whose range leaves no room for less

A result is multiplied by `POWERS` for each operand. No number on the way is too large, or too small to be exact.
"""

from __future__ import annotations

import triton
import triton.language as tl

POWERS = {"fp16": 2.0**7, "bf16": 2.0**8, "powers": 1.0}
"""Factors of a result, for each operand of a form."""
_SEVEN, _TWICE = tl.constexpr(2.0**127), tl.constexpr(2.0**111)


def _times(kind: str, factors: list[str]) -> str:
    """Products of the four results with two factors, in turn."""
    return "".join(f"mul.rn.{kind}x2 ${n}, ${n}, {factors[n % 2]};\n" for n in range(4))


_FP16 = tl.constexpr(
    """{
    .reg .b32 low, high, sign;
    shl.b32 low, $4, 1;
    shl.b32 sign, $4, 4;
    and.b32 low, low, 0x0E0E0E0E;
    and.b32 sign, sign, 0x80808080;
    or.b32 low, low, sign;
    shr.b32 high, $4, 3;
    and.b32 high, high, 0x0E0E0E0E;
    and.b32 sign, $4, 0x80808080;
    or.b32 high, high, sign;
    prmt.b32 $0, low, 0, 0x1404;
    prmt.b32 $1, low, 0, 0x3424;
    prmt.b32 $2, high, 0, 0x1404;
    prmt.b32 $3, high, 0, 0x3424;
    """
    + _times("f16", ["$5", "$6"])
    + "}"
)
"""Four bytes as pairs of FP16: of their low halves, then of their high halves. A code makes one byte of a number, the
other is zero."""
_MOVED = """{
    .reg .b32 up, left, low, high;
    shr.b32 up, $4, 2;
    shl.b32 left, $4, 4;
    shl.b32 low, $4, 2;
    prmt.b32 $0, left, low, 0x5140;
    prmt.b32 $1, left, low, 0x7362;
    prmt.b32 $2, $4, up, 0x5140;
    prmt.b32 $3, $4, up, 0x7362;
    shl.b32 $0, $0, 2;
    shl.b32 $1, $1, 2;
    shl.b32 $2, $2, 2;
    shl.b32 $3, $3, 2;
    and.b32 $0, $0, 0x81C081C0;
    and.b32 $1, $1, 0x81C081C0;
    and.b32 $2, $2, 0x81C081C0;
    and.b32 $3, $3, 0x81C081C0;
    """
_BF16 = tl.constexpr(_MOVED + _times("bf16", ["$5", "$6"]) + "}")
"""The same in BF16. Each code lies beside a copy of itself that is two bits to the right, so that one shift takes its
sign and its other bits to their places."""
_OF_POWERS = tl.constexpr(
    f"{_MOVED}mov.b32 high, 0x7E807E80;\n" + _times("bf16", ["high"] * 2) + _times("bf16", ["$5", "$6"]) + "}"
)

_REGISTERS = tl.constexpr("=&r,=&r,=&r,=&r,r,r,r")
"""Four results, which are written before all is read; codes; scales of the first two bytes, and of the others."""


@triton.jit
def decoded_halves(codes, scales, FORM: tl.constexpr):
    """The elements of the low and of the high halves of codes, uint8, times scales of codes' shape as `scale_of` has
    them: bfloat16, or float16 in the form `fp16`. Tests: a twin."""
    if FORM == "fp16":
        low, high = tl.inline_asm_elementwise(
            _FP16, _REGISTERS, [codes, scales], (tl.float16, tl.float16), is_pure=True, pack=4
        )
    else:
        low, high = tl.inline_asm_elementwise(
            _BF16 if FORM == "bf16" else _OF_POWERS,
            _REGISTERS,
            [codes, scales],
            (tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    return low, high


@triton.jit
def settled(x):
    """x, of 16 bits, as it is: the compiler does not move what made it beyond this. Triton 3.6 fails where it moves a
    permutation into shared memory. Tests: a twin."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, is_pure=True, pack=2)


@triton.jit
def scale_of(code, FORM: tl.constexpr):
    """Scales of their codes as `decoded_halves` takes them."""
    code = code.to(tl.int32)
    if FORM == "powers":
        bits = tl.where(code == 255, 0x7FC0, tl.maximum(code << 7, 0x40))
        scale = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        # E4M3's bits where float32 has them are 2^-120 times the scale
        scale = (code << 20).to(tl.float32, bitcast=True) * _SEVEN
        if FORM == "bf16":
            scale = scale * _TWICE
        scale = tl.where(code == 127, float("nan"), scale).to(tl.float16 if FORM == "fp16" else tl.bfloat16)
    return scale
