"""AdamW for lanes: every lane its own learning rate, all parameters in one tensor [L, P].

The parameters of the model are views into that tensor, so a step is a dozen element-wise operations whatever the depth.
Each operation is a single IEEE rounding, so a lane's bits do not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fp4dse.kernels.arithmetic.reduce import has_kernels


class LaneAdamW:
    """AdamW (decoupled weight decay) over the parameters of a model with a leading lane axis.

    lr: float32 [L]. After construction the model's parameters are views into `self.flat` [L, P].
    """

    def __init__(
        self, model: nn.Module, lr: Tensor, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        self.parameters = list(model.parameters())
        self.lr, self.betas, self.eps, self.weight_decay = lr[:, None], betas, eps, weight_decay
        lanes = len(lr)
        self.flat = torch.cat([p.detach().reshape(lanes, -1) for p in self.parameters], dim=1)
        for p, view in zip(self.parameters, self.flat.split([p[0].numel() for p in self.parameters], 1), strict=True):
            p.data = view.view(p.shape)
        self.mean = torch.zeros_like(self.flat)
        self.square = torch.zeros_like(self.flat)

    def state(self) -> dict[str, Tensor]:
        """What moves from step to step beside the parameters: the tensors themselves, [L, P]."""
        return {"mean": self.mean, "square": self.square}

    def schedule(self, lr_factors: Sequence[float]) -> Tensor:
        """What `step` takes for each of the steps, float32 [steps, 3]: learning-rate factor and bias corrections."""
        b1, b2 = self.betas
        rows = [[factor, 1 - b1**count, 1 - b2**count] for count, factor in enumerate(lr_factors, 1)]
        return torch.tensor(rows, dtype=torch.float64).to(torch.float32).to(self.flat.device)

    def gradient(self) -> Tensor:
        """The gradients as one tensor [L, P]; they are cleared."""
        out = torch.cat([p.grad.reshape(len(p), -1) for p in self.parameters], dim=1)  # type: ignore[union-attr]
        for p in self.parameters:
            p.grad = None
        return out

    def step(self, gradient: Tensor, alive: Tensor, numbers: Tensor) -> None:
        """One update of the lanes that are alive (bool [L]); the others keep their bits.

        numbers: the step's row of `schedule`, on the device, so that a captured step reads them anew.
        """
        if has_kernels(gradient):
            from fp4dse.kernels.fused import pointwise

            tensors = self.flat, self.mean, self.square, gradient, alive, self.lr, numbers
            pointwise.adamw(*tensors, self.betas, self.eps, self.weight_decay)
            return
        lr_factor, correction1, correction2 = numbers.unbind()
        b1, b2 = self.betas
        keep = alive[:, None]
        mean = self.mean * b1 + gradient * (1 - b1)
        square = self.square * b2 + gradient * gradient * (1 - b2)
        scale = torch.sqrt(square / correction2) + self.eps
        update = mean / correction1 / scale
        if self.weight_decay:
            update = update + self.flat * self.weight_decay
        self.mean.copy_(torch.where(keep, mean, self.mean))
        self.square.copy_(torch.where(keep, square, self.square))
        self.flat.copy_(torch.where(keep, self.flat - self.lr * lr_factor * update, self.flat))
