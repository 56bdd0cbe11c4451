"""Noise on the policy that samples of reinforcement learning come from, as data."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from fp4dse.dse.record import Part, name_or_numbers


class Noise(Part, frozen=True, tag_field="kind", tag="noise"):
    """Gaussian noise on parameters of the policy that samples, drawn anew for each rollout: adaptive quantization noise
    (AQN). Its size falls geometrically, from `start` to `end`.

    of      `norms`: added to the gains of the norms before quantized products (QeRL, 2510.11696); `weights`: to the
            weights of quantized products, before they are quantized, in units of each tensor's root mean square
            (2605.20402 states 1 % to 0.1 %; of what, is inferred)
    stages  equal parts of the training: in the first there is no noise, in the others it stays the same; 0: it falls
            with every rollout
    """

    of: Literal["norms", "weights"] = "norms"
    start: Annotated[float, msgspec.Meta(gt=0)] = 1e-2
    end: Annotated[float, msgspec.Meta(gt=0)] = 1e-4
    stages: Annotated[int, msgspec.Meta(ge=0)] = 10

    def sizes(self, rollouts: int) -> list[float]:
        """The standard deviation in each of so many rollouts."""
        if not self.stages:
            return [self.start * (self.end / self.start) ** (n / max(rollouts - 1, 1)) for n in range(rollouts)]
        at = [n * self.stages // rollouts for n in range(rollouts)]
        falls = max(self.stages - 2, 1)
        return [self.start * (self.end / self.start) ** ((k - 1) / falls) if k else 0.0 for k in at]


NOISE_NAMES: dict[str, Noise] = {
    "qerl": Noise(),
    "weights": Noise("weights", 1e-2, 1e-3, 0),
}


def noise_name(noise: Noise | None) -> str:
    """The key in NOISE_NAMES, or the numbers, in full; `none` for none."""
    return "none" if noise is None else name_or_numbers(NOISE_NAMES, noise, "=")
