"""The forward pass that samples of reinforcement learning come from, where it is another than the trainer's, as data.

An inference engine samples in few bits (W4A4: both operands of a product; W4A16: weights alone), and a trainer learns
from the samples in more. It rounds to nearest, as held-out data do, and quantizes along the same axes as training.
"""

from __future__ import annotations

import msgspec

from fp4dse.dse.layers.precision import Precise
from fp4dse.dse.quantizer import BF16, Quantizer
from fp4dse.dse.quantizers import QUANTIZERS
from fp4dse.dse.record import Part, name_in
from fp4dse.dse.stages import Fprop, Hadamard, rotation_name


class Rollout(Part, frozen=True):
    """Y = X Wᵀ of a rollout, and what is around it.

    precise   layers that compute in BF16, by their place in the model
    kv_cache  of keys and values, in blocks along the width of a head; keys after their rotary embedding. Attention
              reads what the cache holds, also of the prompt
    """

    x: Quantizer
    w: Quantizer
    rotation: Hadamard | None = None
    precise: Precise = Precise()
    kv_cache: Quantizer = BF16

    @property
    def fprop(self) -> Fprop:
        """The stage of a recipe that computes it."""
        return Fprop(x=self.x, w=self.w, rotation=self.rotation)

    def canonical(self) -> Rollout:
        """The one spelling of all that compute the same. A cache that is not quantized is multiplied as BF16."""
        x, w, cache = (q.canonical().evaluated().canonical() for q in (self.x, self.w, self.kv_cache))
        plain = x.is_plain and w.is_plain
        found = Rollout(x, w) if plain else Rollout(x, w, self.rotation, self.precise)
        return msgspec.structs.replace(found, kv_cache=BF16 if cache.is_plain else cache)


ROLLOUT_NAMES: dict[str, Rollout] = {
    **{name: Rollout(q, q).canonical() for name, q in QUANTIZERS.items()},
    **{f"{name}-w4a16": Rollout(BF16, q).canonical() for name, q in QUANTIZERS.items() if not q.is_plain},
}
"""Every named quantizer, of both operands, and with `-w4a16` behind its name of the weights alone."""


def rollout_name(rollout: Rollout | None) -> str:
    """The key in ROLLOUT_NAMES, or operands, rotation and precise layers in words, and what else there is; `trainer`
    for none."""
    if rollout is None:
        return "trainer"
    more = [] if rollout.kv_cache == BF16 else [f"KV {rollout.kv_cache.label()}"]
    rollout = msgspec.structs.replace(rollout, kv_cache=BF16)
    if (name := name_in(ROLLOUT_NAMES, rollout)) is not None:
        return ", ".join([name, *more])
    words = [rollout.x.label() if rollout.x == rollout.w else f"x {rollout.x.label()} w {rollout.w.label()}"]
    words += [] if rollout.rotation is None else [rotation_name(rollout.rotation)]
    words += [] if rollout.precise == Precise() else [f"precise {rollout.precise.label()}"]
    return ", ".join([*words, *more])
