"""Fine-tuning as a task: a decoder that was trained in BF16 is trained on with a recipe's quantizers.

It reads on in the procedural language, in texts that it has not read before. On another language every method would
learn that, too, as would BF16; here nearly all that a lane gains is what quantization had cost. A language without end
has no text to learn by heart, and its entropy is known.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache, partial

import msgspec
import torch

from fp4dse.tasks import language
from fp4dse.tasks.data.grammar import HELD_OUT, TRAIN, Language
from fp4dse.tasks.start.base_weights import base_weights
from fp4dse.tasks.task import Problem, Task

REV = 1


class _Preset(msgspec.Struct, frozen=True):
    """base: preset of language whose model and training are the base's, and its rate; steps, batch, lr: of what
    follows; held_out: texts."""

    base: str
    base_lr: float
    steps: int
    batch: int
    lr: float
    held_out: int


def problem(base: Task, preset: _Preset, context: int, seeds: Sequence[int]) -> Problem:
    """Texts after those that the base has read, and held out the same for all; weights before any training."""
    words = Language()
    read, count = base.batch * base.steps, preset.batch * preset.steps
    train, held_out = (
        torch.from_numpy(words.texts(split, first, n, context + 1)[0])[None]
        for split, first, n in ((TRAIN, read, count), (HELD_OUT, 0, preset.held_out))
    )
    nothing = (x.new_empty(*x.shape[:2], 0) for x in (train, held_out))
    assert base.preview is not None
    return Problem(train, next(nothing), held_out, next(nothing), base.preview(seeds).init)


def _task(name: str, preset: _Preset) -> Task:
    base, words = language.NAMED["grammar"](preset.base), Language()
    context = language.context_of(preset.base)
    entropy = cache(partial(words.entropy, context, preset.held_out))
    # a row has its rate beside the digest: another default leaves stored rows comparable
    described = [REV, msgspec.structs.replace(preset, lr=0.0), words.digest, base.rev]
    data = hashlib.sha256(msgspec.json.encode(described)).hexdigest()[:16]
    return msgspec.structs.replace(
        base,
        name="finetune",
        preset=name,
        rev=REV,
        summary=f"language:{preset.base} after its training, {preset.steps} steps more; {base.summary}",
        problem=partial(problem, base, preset, context),
        pretrain=partial(base_weights, base, preset.base_lr),
        metrics={"excess": partial(language.excess, entropy)},
        digest_of=lambda: data,
        steps=preset.steps,
        batch=preset.batch,
        lr=preset.lr,
        warmup=0.1,
        decay=0.9,
        weight_decay=0.0,
        eval_rows=min(512, preset.held_out),
        tokens=preset.steps * preset.batch * context,
    )


_PRESETS = {
    "smoke": _Preset("smoke", 1e-2, steps=20, batch=16, lr=1e-3, held_out=32),
    "small": _Preset("0.4M", 8e-3, steps=200, batch=32, lr=4e-4, held_out=1024),
}
PRESETS = {name: _task(name, preset) for name, preset in _PRESETS.items()}
