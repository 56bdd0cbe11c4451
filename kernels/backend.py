"""Which implementation of the quantizer runs on a device, decided once, with its reason.

`triton`    the fused kernels, on a CUDA device; all but quantizing is the reference's
`eager`     the reference itself, on any device
`compiled`  on a CPU with a C++ compiler: the functions of native.py and, for what these do not have, the reference
            through torch.compile, 6–10 times faster, set up when it is first needed; the same bits
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Collection, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from fp4dse.dse import Quantizer
from fp4dse.kernels import compiling, native, reference
from fp4dse.kernels import dispatch as devices
from fp4dse.kernels.codecs import SCALES, Encoded
from fp4dse.kernels.descriptor import unheeded
from fp4dse.kernels.fused import limits
from fp4dse.kernels.fused import operators as fused
from fp4dse.kernels.fused.by_scales import by_scales
from fp4dse.kernels.ops import philox


class Backend(msgspec.Struct, frozen=True):
    """A named implementation of `reference.decode_operand` and `philox.words`.

    draws: `philox.random16`, or the same bits in another form that this decode_operand takes
    operand, by_scales: `fused.operand` and `fused.by_scales`, or twins, which take the place of the first two, where
        there are such; operand for these codecs and blocks, for lanes that need no other columns of the descriptor
        tables than are `heeded` (of a codec), and for operands that are to be rotated in groups of one of these sizes
    quantize_blocks: `reference.quantize_blocks`, for operands whose elements and scales the backward pass needs
    through: `fused.through`, which makes them again where there is such a kernel
    why_not: what was passed over, one sentence each; see `reasons`
    """

    name: str
    decode_operand: Callable[..., tuple[Tensor, Tensor]]
    words: Callable[..., Tensor]
    why_not: tuple[str, ...] = ()
    draws: Callable[..., Tensor] = philox.random16
    operand: Callable[..., tuple[Tensor, Tensor]] | None = None
    codecs: tuple[str, ...] = limits.CODECS
    blocks: tuple[int, ...] = limits.BLOCKS
    heeded: Callable[[str], Collection[str]] = limits.heeded
    rotations: tuple[int, ...] = limits.ROTATIONS
    by_scales: Callable[..., tuple[Tensor, Tensor]] | None = None
    quantize_blocks: Callable[..., tuple[Encoded, Tensor]] = reference.quantize_blocks
    through: Callable[..., Tensor] | None = None

    def reasons(self) -> tuple[str, ...]:
        """What was passed over, one sentence each, and what has been found out about torch's compiler since."""
        tried = self.name == "compiled" and why_not_torch.cache_info().currsize
        found = why_not_torch() if tried else None
        return (*self.why_not, found) if found else self.why_not

    def why_not_operand(self, q: Quantizer, tables: tuple[Tensor, Tensor]) -> str | None:
        """The reason why `operand` does not take lanes of these descriptor tables; None if it does, or if there is no
        `operand`. q: the canonical quantizer of one, of which codec, block and factors are those of all."""
        if self.operand is None:
            return None
        if q.codec not in self.codecs:
            return f"codec: found {q.codec}; accepted: {', '.join(self.codecs)}"
        if isinstance(q.block, int) and q.block not in self.blocks:
            return f"block: found {q.block}; accepted: {', '.join(map(str, self.blocks))}"
        if q.factors_over != "tensor":
            return f"tensor_scale.over: found {q.factors_over}; accepted: tensor"
        return next(iter(unheeded(*tables, self.heeded(q.codec))), None)

    def why_not_by_scales(self, q: Quantizer, tables: tuple[Tensor, Tensor]) -> str | None:
        """The same of `by_scales`."""
        if q.codec not in SCALES:
            return f"codec: found {q.codec}; accepted: {', '.join(SCALES)}"
        return next(iter(unheeded(*tables, limits.heeded_by_scales(), of="element")), None)


def why_not_compiled(device: str) -> str | None:
    """The reason why the compiled path is not taken on this device, or None if it is."""
    if torch.device(device).type != "cpu":
        return f"compiled quantizer not taken on {device}: only on the CPU does it keep the reference's bits"
    if os.environ.get("FP4DSE_EAGER"):
        return "compiled quantizer not taken: FP4DSE_EAGER is set"
    if shutil.which(os.environ.get("CXX", "g++")) is None and shutil.which("clang++") is None:
        return "compiled quantizer not taken: no C++ compiler found (install g++ or set CXX)"
    return None


@cache
def backend(device: str) -> Backend:
    """The backend for a device: `triton` or `compiled` where possible, else `eager` with the reason."""
    if torch.device(device).type == "cuda":
        reason = devices.why_not_fused(device)
        if reason:
            return _eager(reason)
        kernels = {"operand": fused.operand, "by_scales": by_scales, "words": _words, "through": fused.through}
        return msgspec.structs.replace(_eager(), name="triton", **kernels)
    reason = why_not_compiled(device)
    return _eager(reason) if reason else _compiled()


PLAIN = Backend("plain", reference.decode_operand, philox.words)
"""For populations without a block-scaled slot: nothing to compile."""


def _words(*arguments) -> Tensor:
    """`philox.words` by one kernel."""
    from fp4dse.kernels.ops.philox import triton  # which needs it

    return triton.words(*arguments)


def _eager(*reasons: str) -> Backend:
    return Backend("eager", reference.decode_operand, philox.words, reasons)


def _decode_drawn(
    x: Tensor, floats: Tensor, ints: Tensor, drawn: Tensor | None, adaptive: bool, **more
) -> tuple[Tensor, Tensor]:
    """`reference.decode_operand` for random bits that are called BF16: their conversion moves them up by 16.

    Of the types of 16 bits, the compiler reads BF16 as vectors and int16 one by one, ten times slower; int32 takes
    twice the memory.
    """
    random = None if drawn is None else (drawn.to(torch.float32).view(torch.int32) >> 16) & 0xFFFF
    return reference.decode_operand(x, floats, ints, random, adaptive, **more)


def _in_pairs(function: Callable) -> Callable:
    """The function of tensors with the lane axis first, given a single lane twice: for sizes of one the compiler makes
    variants of its own, which takes longer than computing them twice."""

    def twice(x: Any) -> Any:
        return torch.cat([x, x]) if isinstance(x, Tensor) and x.dim() and len(x) == 1 else x

    def first(x: Any) -> Any:
        return x[:1] if isinstance(x, Tensor) else x

    def run(x: Tensor, *arguments, **more):
        if len(x) > 1:
            return function(x, *arguments, **more)
        return tree_map(first, function(twice(x), *tree_map(twice, arguments), **tree_map(twice, more)))

    return run


@cache
def _compile_safely() -> None:
    """Have torch's compiler run as `compiling` does it, and build again what in its cache is not whole."""
    from torch._inductor import codecache, cpp_builder, exc
    from torch.utils._filelock import FileLock

    def run(cmd_line: str, cwd: str) -> None:
        words = shlex.split(cmd_line)
        try:
            compiling.build(words, cwd)
        except subprocess.CalledProcessError as error:
            raise exc.CppCompileError(words, error.stderr) from error

    def build(lock_path: str, cpp_builders: Sequence[cpp_builder.CppBuilder]) -> None:
        with FileLock(lock_path, timeout=codecache.LOCK_TIMEOUT):
            for builder in cpp_builders:
                if not compiling.is_there(target := Path(builder.get_target_file_path())):
                    target.unlink(missing_ok=True)
        in_cache(lock_path, cpp_builders)

    in_cache = codecache._worker_compile_cpp
    codecache._worker_compile_cpp, cpp_builder.run_compile_cmd = build, run


@cache
def why_not_torch() -> str | None:
    """The reason why torch's compiler cannot be had, or None if it can: a small function is then compiled, which takes
    seconds."""
    import torch._dynamo
    import torch._inductor.config
    import torch.fx.experimental._config

    # A population meets each (block size, stochastic or not) once; past the limit fullgraph=True raises, so there
    # is no silent return to eager.
    torch._dynamo.config.recompile_limit = 64
    torch.fx.experimental._config.use_duck_shape = False  # sizes that happen to be equal once need not be ever after
    torch._inductor.config.compile_threads = 1  # for a handful of kernels a pool of processes costs more than it saves
    # else what is compiled for a small tensor uses one thread, whatever comes after it
    torch._inductor.config.cpp.min_chunk_size = 1
    _compile_safely()
    try:
        with torch.no_grad():  # as in training: what is traced with gradients is traced again without
            _compile(torch.neg)(torch.ones(2, 16))
    except Exception as error:  # whatever the tool chain does: say so and go on with the reference
        what = " ".join(str(error).split())[:200]
        return f"compiled quantizer not taken: {type(error).__name__}: {what}"
    return None


def _compile(function: Callable) -> Callable:
    return _in_pairs(torch.compile(function, fullgraph=True, dynamic=True))


def _when_called(function: Callable) -> Callable:
    """The function through torch's compiler, which its first call sets up; itself where there is none."""

    @cache
    def twin() -> Callable:
        return function if why_not_torch() else _compile(function)

    def run(*arguments, **more):
        return twin()(*arguments, **more)

    return run


def _compiled() -> Backend:
    decode_drawn, quantize = _when_called(_decode_drawn), _when_called(reference.quantize_blocks)

    def decode(
        x: Tensor, floats: Tensor, ints: Tensor, random: Tensor | None = None, adaptive: bool = False, **more
    ) -> tuple[Tensor, Tensor]:
        drawn = None if random is None else random.to(torch.int16).view(torch.bfloat16)
        return decode_drawn(x, floats, ints, drawn, adaptive, **more)

    if reason := native.why_not_native():
        if without := why_not_torch():
            return _eager(without)
        words = _when_called(philox.words)
        draws = partial(philox.draws16, words=words)
        return Backend("compiled", decode, words, (reason,), draws=draws, quantize_blocks=quantize)
    return Backend(
        "compiled",
        decode,
        native.words,
        draws=partial(philox.draws16, words=native.words),
        operand=native.operand,
        codecs=native.CODECS,
        blocks=native.BLOCKS,
        heeded=lambda _: native.heeded(),
        rotations=(),
        quantize_blocks=quantize,
    )
