"""The numerics of a population: what each lane's six slots do, as tables on the device, and the GEMM that uses them.

One function serves the three GEMMs: both operands are laid out [L, rows, contraction], rotated, padded with zeros
to whole blocks, quantized along the contraction, and multiplied by the stage's backend of gemm.py; the tensor decode
factors are applied to the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from fp4dse.dse import SLOTS, STAGES, Recipe
from fp4dse.kernels import blocks
from fp4dse.kernels.activations import silu
from fp4dse.kernels.backend import PLAIN, Backend, backend
from fp4dse.kernels.descriptor import descriptor
from fp4dse.kernels.fused import BLOCKS, features
from fp4dse.kernels.gemm import GEMMS, pick
from fp4dse.kernels.philox import STREAMS, random16, signs
from fp4dse.kernels.rotation import rotate


class SlotTable:
    """One operand slot of all lanes: block size, descriptor rows, and which lanes round to BF16 if it is plain."""

    def __init__(self, recipes: Sequence[Recipe], slot: str, device: torch.device) -> None:
        quantizers = [recipe.slot(slot).canonical() for recipe in recipes]
        self.site = SLOTS.index(slot)
        self.block = None if quantizers[0].is_plain else quantizers[0].block
        if self.block:
            self.floats, self.ints = descriptor(quantizers, device)
            self.features = features(self.floats, self.ints)
        else:
            bf16 = torch.tensor([q.element == "bf16" for q in quantizers], device=device)
            self.bf16 = "all" if bf16.all() else "some" if bf16.any() else "none"
            self.bf16_lanes = bf16[:, None, None]


class LaneNumerics:
    """Recipes of equal structural signature with their seeds, ready to run: `gemm(stage, …)`.

    recipes, seeds: one a lane, L >= 2 (batched products of a single matrix take another algorithm, so a lane on its
    own would not have the bits that it has in company). `step` is a device scalar that the training loop advances.
    """

    def __init__(self, recipes: Sequence[Recipe], seeds: Sequence[int], device: torch.device | str = "cpu") -> None:
        if len({r.signature() for r in recipes}) != 1:
            raise ValueError("lanes of one population must share their structural signature")
        if len(recipes) < 2 or len(recipes) != len(seeds):
            raise ValueError(f"a population needs two lanes or more and a seed each: {len(recipes)}, {len(seeds)}")
        device = torch.device(device)
        self.lanes = len(recipes)
        self.seeds = torch.tensor(list(seeds), dtype=torch.int64, device=device)
        self.step = torch.zeros((), dtype=torch.int64, device=device)
        self.slots = {slot: SlotTable(recipes, slot, device) for slot in SLOTS}
        plain = not any(table.block for table in self.slots.values())
        self.backend: Backend = PLAIN if plain else backend(str(device))
        self.rotations = {stage: recipes[0].canonical().rotation(stage) for stage in STAGES}
        self.gemms: dict[str, str] = {}
        self.gemm_why_not: tuple[str, ...] = ()
        for stage, operands in STAGES.items():
            a, b = ([recipe.slot(f"{stage}.{operand}").canonical() for recipe in recipes] for operand in operands)
            self.gemms[stage], reasons = pick(str(device), a, b)
            self.gemm_why_not += tuple(f"{stage}: {reason}" for reason in reasons)

    def gemm(self, stage: str, layer: int, a: Tensor, a_dim: int, b: Tensor, b_dim: int) -> Tensor:
        """The product of one stage, contracted over dimension `a_dim` of a and `b_dim` of b (1 or 2): [L, R, S].

        a, b: float32 [L, ·, ·], in the order of STAGES[stage]. `layer` keys the random numbers.
        """
        slot_a, slot_b = (self.slots[f"{stage}.{operand}"] for operand in STAGES[stage])
        rotation = self.rotations[stage]
        unit = max([rotation.size if rotation else 1, *(blocks.unit(s.block) for s in (slot_a, slot_b) if s.block)])
        a, b = blocks.pad(a.detach(), a_dim, unit), blocks.pad(b.detach(), b_dim, unit)
        if rotation:
            flips = None
            if rotation.signs == "random":
                site = torch.tensor(8 * layer + list(STAGES).index(stage), device=a.device)
                flips = signs(self.seeds, self.step, site, rotation.size, self.backend.words)
            a, b = (rotate(t, rotation.size, d, flips) for t, d in ((a, a_dim), (b, b_dim)))
        product = GEMMS[self.gemms[stage]]
        qa, dec_a = self._operand(slot_a, layer, a, a_dim, product.operand)
        qb, dec_b = self._operand(slot_b, layer, b, b_dim, product.operand)
        out = product.run(qa, qb)
        for dec in (dec_a, dec_b):
            out = out if dec is None else out * dec[:, None, None]
        return out

    def _operand(
        self, slot: SlotTable, layer: int, x: Tensor, dim: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None]:
        """x as [L, rows, contraction], quantized; with the factor to apply to the product, if any.

        dtype: what the product takes. Fused kernels and BF16 operands come in it at once, others in float32.
        """
        if isinstance(slot.block, int) and self.backend.operand:
            return self._fused(slot, layer, x, dim == 1, slot.block, dtype)
        x = x if dim == 2 else x.mT
        if not slot.block:
            if slot.bf16 == "none":
                return x, None
            rounded = x.to(torch.bfloat16).to(dtype)
            return (rounded if slot.bf16 == "all" else torch.where(slot.bf16_lanes, rounded, x)), None
        rows = x.shape[1]
        x = blocks.pad(x, 1, blocks.tile(slot.block) or 1)
        # for other strides, and for a view of another tensor, a compiled function would be traced anew
        cut = blocks.cut(x, slot.block).contiguous().detach()
        if self.backend.operand and cut.shape[2] in BLOCKS:
            values, dec = self._fused(slot, layer, cut, False, cut.shape[2], dtype)
            return blocks.join(values, x.shape, slot.block)[:, :rows], dec
        random = None
        if slot.features.stochastic:
            site = torch.tensor(8 * layer + slot.site, device=x.device)
            draw = partial(random16, self.seeds, STREAMS["rounding"], self.step, site, words=self.backend.words)
            random = draw(-(-cut[0].numel() // 8) * 8)[:, : cut[0].numel()].view_as(cut)
        values, dec = self.backend.decode_operand(cut, slot.floats, slot.ints, random, slot.features.adaptive)
        return blocks.join(values, x.shape, slot.block)[:, :rows], dec

    def _fused(
        self, slot: SlotTable, layer: int, x: Tensor, columns: bool, block: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """x [L, R, C] (columns: [L, C, R]) quantized in blocks along C by the backend's own kernel: [L, R, C]."""
        tables, keys = (slot.floats, slot.ints, slot.features), (self.seeds, self.step, 8 * layer + slot.site)
        return self.backend.operand(x, columns, block, *tables, *keys, None, dtype)  # type: ignore[misc]


@torch.no_grad()
def warm_up(recipes: Sequence[Recipe]) -> None:
    """Compile all that a population of these recipes calls on the CPU, with this number of threads, at any size.

    Forks of this process then compile nothing (but for an operand that is a single block). Cheap where nothing is left
    to compile.
    """
    recipes = list(dict.fromkeys(recipes)) * 2
    numerics = LaneNumerics(recipes, range(len(recipes)))
    a, b = torch.ones(numerics.lanes, 40, 256), torch.ones(numerics.lanes, 50, 256)  # no block is a whole operand
    for stage in STAGES:
        numerics.gemm(stage, 0, a, 2, b, 2)
    for shape in ((2, 3, 4), (2, 3, 4, 5)):  # a layer's output without and with tokens
        silu(torch.ones(shape), numerics.backend.sigmoid)
