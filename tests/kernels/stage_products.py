"""Products of a stage from its operands as they are, and what holds for every treatment that takes a part off them."""

import msgspec
import torch

from fp4dse.dse import Recipe
from fp4dse.dse.stages import STAGES
from fp4dse.kernels import LaneNumerics, lanes
from fp4dse.kernels.quant.backend import PLAIN, _compiled

GEMM_DIMS = {"fprop": (2, 2), "dgrad": (2, 1), "wgrad": (1, 1)}
"""The dimension of each operand that a stage contracts, where x [L, M, K], w [L, N, K], g [L, M, N]."""
Tensors = dict[str, torch.Tensor]


def product(numerics: LaneNumerics, stage: str, of: Tensors, layer: int = 0) -> torch.Tensor:
    (a, b), (a_dim, b_dim) = STAGES[stage], GEMM_DIMS[stage]
    return numerics.gemm(stage, layer, of[a], a_dim, of[b], b_dim)


def exact(stage: str, of: Tensors) -> torch.Tensor:
    a, b = (of[name].double() for name in STAGES[stage])
    return {"fprop": lambda: a @ b.mT, "dgrad": lambda: a @ b, "wgrad": lambda: a.mT @ b}[stage]()


def uniform_with(recipe: Recipe, rotation: object, **of: object) -> Recipe:
    """The recipe with these quantizers for `x`, `w` and `g` in every stage, and a rotation."""
    stages = {
        name: msgspec.structs.replace(
            getattr(recipe, name), **{operand: of[operand] for operand in operands}, rotation=rotation
        )
        for name, operands in STAGES.items()
    }
    return msgspec.structs.replace(recipe, **stages)


def same_bits_alone(recipes: list[Recipe], stage: str, of: Tensors, layer: int = 0) -> bool:
    """True if every lane has the bits beside the others that it has by itself."""
    together = product(LaneNumerics(recipes, range(3, 3 + len(recipes))), stage, of, layer)
    alone = [
        product(LaneNumerics([recipe], [3 + lane]), stage, {k: x[lane : lane + 1] for k, x in of.items()}, layer)[0]
        for lane, recipe in enumerate(recipes)
    ]
    return all(map(torch.equal, alone, together))


def same_bits_on_both_paths(monkeypatch, recipe: Recipe, of: Tensors, layer: int = 0) -> bool:
    """True if the reference and the fast path of a CPU agree in all stages, for two lanes."""
    got = []
    for backend in (PLAIN, _compiled()):
        monkeypatch.setattr(lanes, "backend", lambda _, of=backend: of)
        numerics = LaneNumerics([recipe] * 2, [0, 1])
        got.append([product(numerics, stage, of, layer) for stage in STAGES])
    return all(torch.equal(a, b) for a, b in zip(*got, strict=True))
