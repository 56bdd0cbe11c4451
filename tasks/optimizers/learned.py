"""The update of what quantizers learn (kernels/learned.py), around that of an optimizer of any kind.

gradient  <- gradient + decay · alpha                   before all else: the decay is a term of the loss
alpha     <- max(alpha + (rate - 1) · its step, 2^-100)  after it: a learning rate of its own

In a step in which its quantizer is off, as in a finish, a clip has no gradient: neither it nor its momenta change then.

One lane may have clips that another one has not. Sums over all parameters of a lane must not depend on that, so clips
are summed apart, each in a place that it has whatever lanes there are, and are added last.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fp4dse.kernels import lane_sum
from fp4dse.kernels.learned import LEAST, ClipParameter, possible_clips
from fp4dse.tasks.optimizers.hyperparameters import Tensors


class Learned:
    """The n clips among a model's parameters, in the order of these.

    tensors   their numbers among the parameter tensors
    at        per what an optimizer keeps a number -> their places in it, int64 [n]; `element` is the flat tensor of all
    """

    def __init__(self, model: nn.Module, layout: Tensors, device: torch.device) -> None:
        parameters = list(model.parameters())
        self.tensors = [i for i, p in enumerate(parameters) if isinstance(p, ClipParameter)]
        self.clips = [p for p in parameters if isinstance(p, ClipParameter)]
        self.is_any = bool(self.clips)
        if not self.is_any:
            return
        ends = torch.tensor(layout.sizes).cumsum(0) - 1
        is_other = torch.tensor([matrix is None for matrix in layout.matrices])
        others = (torch.tensor(layout.sizes) * is_other).cumsum(0) - 1
        chosen = torch.tensor(self.tensors)
        self.at = {"element": ends[chosen], "tensor": chosen, "other": others[chosen]}
        self.at = {per: places.to(device) for per, places in self.at.items()}
        rest = torch.ones(sum(layout.sizes), dtype=torch.bool)
        rest[ends[chosen]] = False
        self.rest = rest.nonzero()[:, 0].to(device)
        possible = [None if of is None else id(of) for of in possible_clips(model).values()]
        self.possible = len(possible)
        self.slots = torch.tensor([possible.index(id(clip)) for clip in self.clips], device=device)

        def numbers(field: str, without: float) -> Tensor:
            rows = [[getattr(of, field, without) for of in clip.of_lanes] for clip in self.clips]
            return torch.tensor(rows, device=device).mT.contiguous()

        self.decay, self.rate = numbers("decay", 0.0), numbers("rate", 1.0)
        self.off: Tensor | None = None
        """The clips whose quantizer is off in this step, bool [n]; None if none is."""
        self._known: dict[tuple[bool, ...], Tensor] = {}  # a step that is captured may copy nothing to the device

    def take_note(self) -> None:
        """See which clips have no gradient in this step, and give them one of zeros."""
        if not self.is_any:
            return
        off = tuple(clip.grad is None for clip in self.clips)
        if off not in self._known:
            self._known[off] = torch.tensor(off, device=self.rest.device)
        self.off = self._known[off] if any(off) else None
        for clip in self.clips:
            clip.grad = torch.zeros_like(clip) if clip.grad is None else clip.grad

    def square_sum(self, x: Tensor) -> Tensor:
        """Σ x² of each lane, [L], of x [L, P]."""
        squares = x * x
        if not self.is_any:
            return lane_sum(squares, 1)
        own = self.total(squares.index_select(1, self.at["element"]))
        return lane_sum(squares.index_select(1, self.rest), 1) + own

    def total(self, values: Tensor) -> Tensor:
        """The sum over the clips of a lane, [L], of values [L, n] that are zero where a lane learns none."""
        every = values.new_zeros(len(values), self.possible)
        return lane_sum(every.index_copy(1, self.slots, values), 1)

    def before(self, flat: Tensor, kept: Mapping[str, tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Copies [L, n] of the clips (under no name) and, where one is off, of what is kept for them.

        kept: name -> per what it has a number, and the tensor
        """
        every = {"": ("element", flat)} | (dict(kept) if self.off is not None else {})
        return {name: x.index_select(1, self.at[per]) for name, (per, x) in every.items() if per in self.at}

    def with_decay(self, gradient: Tensor, alpha: Tensor) -> Tensor:
        """The gradient [L, P] with the decays' terms."""
        term = self.decay * alpha
        term = term if self.off is None else torch.where(self.off, 0.0, term)
        return gradient.index_add(1, self.at["element"], term)

    def after(self, flat: Tensor, kept: Mapping[str, tuple[str, Tensor]], before: Mapping[str, Tensor]) -> None:
        """Lengthen the steps that the optimizer made from `before`, in place; take back those of clips that are off."""
        now, alpha = flat.index_select(1, self.at["element"]), before[""]
        own = torch.where(self.rate == 1, now, alpha + self.rate * (now - alpha)).clamp(min=LEAST)
        if self.off is None:
            flat.index_copy_(1, self.at["element"], own)
            return
        flat.index_copy_(1, self.at["element"], torch.where(self.off, alpha, own))
        for name, old in before.items():
            if name:
                per, x = kept[name]
                x.index_copy_(1, self.at[per], torch.where(self.off, old, x.index_select(1, self.at[per])))
