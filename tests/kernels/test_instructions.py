"""What is counted are instructions: each once, and none that does nothing."""

import pytest

pytest.importorskip("triton", reason="triton is not installed")
from tests.kernels.instructions import names

LISTING = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;                   /* 0x00000a00ff017b82 */
                                                                            /* 0x000fe20000000800 */
        /*0010*/              @!P1 IMAD.IADD R3, R3, 0x1, -R40 ;            /* 0x0000000103039824 */
        /*0020*/              @UP0 UIADD3 UR6, UR6, 0x1, URZ ;              /* 0x0000000103039824 */
        /*10030*/                  LDG.E.128 R16, desc[UR10][R8.64] ;       /* 0x0000000103039824 */
.L_x_0:
        /*10040*/                  BRA `(.L_x_0);                           /* 0xfffffffc00fc7947 */
        /*10050*/                  NOP;                                     /* 0x0000000000007918 */
"""


def test_instructions_are_counted_whatever_their_predicate():
    assert names(LISTING) == ["LDC", "IMAD", "UIADD3", "LDG", "BRA"]
