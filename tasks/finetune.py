"""Fine-tuning as a task: a decoder that was trained in BF16 is trained on with a recipe's quantizers.

It reads on in the procedural language, in texts that it has not read before. On another language every method would
learn that, too, as would BF16; here nearly all that a lane gains is what quantization had cost. A language without end
has no text to learn by heart, and its entropy is known.

Or a decoder of a folder (language/folder.py) is trained on, on the user's text as its own tokenizer cuts it: no base is
trained then, and training may have to learn that text, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import NoReturn

import msgspec
import torch
from torch import Tensor

from fp4dse.dse import ConfigError
from fp4dse.tasks import language
from fp4dse.tasks.data.grammar import HELD_OUT, TRAIN, Language
from fp4dse.tasks.data.text import Corpus
from fp4dse.tasks.language.decoder import Shape
from fp4dse.tasks.start.base_weights import base_weights
from fp4dse.tasks.task import Problem, Task

REV = 1
WARMUP, DECAY = 0.1, 0.9
FOLDER_LR = 1e-5
"""Of a folder's model, whatever the preset: those of presets are for bases of a million parameters. Nobody tuned it."""


class _Preset(msgspec.Struct, frozen=True):
    """base: preset of language whose model and training are the base's, and its rate; steps, batch, lr: of what
    follows; held_out: texts."""

    base: str
    base_lr: float
    steps: int
    batch: int
    lr: float
    held_out: int


class _OfFolder(msgspec.Struct, frozen=True):
    """A preset for the model of a folder: windows of `context` tokens, and how many of them are read and held out."""

    context: int
    steps: int
    batch: int
    held_out: int


def problem(base: Task, preset: _Preset, context: int, seeds: Sequence[int]) -> Problem:
    """Texts after those that the base has read, and held out the same for all; weights before any training."""
    words = Language()
    read, count = base.batch * base.steps, preset.batch * preset.steps
    train, held_out = (
        torch.from_numpy(words.texts(split, first, n, context + 1)[0])
        for split, first, n in ((TRAIN, read, count), (HELD_OUT, 0, preset.held_out))
    )
    assert base.preview is not None
    return language.of_texts(train, held_out, base.preview(seeds).init)


def problem_of_folder(corpus: Corpus, shape: Shape, count: int, held_out: int, seeds: Sequence[int]) -> Problem:
    """At most so many windows to read, and so many held out. The weights are zeros, which the folder's replace: those
    of a large model would be drawn in vain."""
    init = {name: torch.zeros(len(seeds), *of) for name, of in shape.parameters(corpus.vocabulary).items()}
    return language.of_texts(*corpus.windows(shape.context, count, held_out), init)


def _task(name: str, preset: _Preset) -> Task:
    base, words = language.NAMED["grammar"](preset.base), Language()
    context = language.context_of(preset.base)
    entropy = cache(partial(words.entropy, context, preset.held_out))
    # a row has its rate beside the digest: another default leaves stored rows comparable
    described = [REV, msgspec.structs.replace(preset, lr=0.0), words.digest, base.rev]
    data = _digest(described)
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
        warmup=WARMUP,
        decay=DECAY,
        weight_decay=0.0,
        eval_rows=min(512, preset.held_out),
        tokens=preset.steps * preset.batch * context,
    )


def _digest(of: object) -> str:
    return hashlib.sha256(msgspec.json.encode(of)).hexdigest()[:16]


def _of_folder(name: str, preset: _OfFolder, shape: Shape, corpus: Corpus) -> Task:
    """Of a decoder on a text of its tokens. A batch is also what an evaluation pass reads: logits of a large vocabulary
    are what takes memory."""
    numbers = language.Preset(shape, preset.batch, preset.steps, FOLDER_LR, decay=DECAY, warmup=WARMUP)
    base = language.on_read(name, numbers, corpus)
    count = preset.batch * preset.steps
    data = _digest([REV, preset, corpus.digest, base.rev])
    return msgspec.structs.replace(
        base,
        name="finetune",
        rev=REV,
        summary=f"{preset.steps} steps more of {base.summary}",
        problem=partial(problem_of_folder, corpus, shape, count, preset.held_out),
        preview=partial(problem_of_folder, corpus, shape, 1, 1),
        digest_of=lambda: data,
    )


def on_folder(preset: str, path: str | None, folder: Path) -> tuple[Task, dict[str, Tensor]]:
    """The preset with a pretrained decoder as its base, on the user's text; and the decoder's weights. ConfigErrors as
    of language.read_pretrained, and without a text."""
    if path is None:
        raise ConfigError("--data", None, f"{_TEXT} that the model of {folder.name} is to be fine-tuned on")
    of = _FOR_FOLDERS[preset]
    model, corpus = language.read_pretrained(folder, path, of.context)
    return _of_folder(preset, of, model.shape, corpus), model.weights()


def _missing(*_: object) -> NoReturn:
    raise ConfigError("--data", None, f"{_TEXT}, and --from FOLDER of a decoder: none is bundled for this preset")


def _without_base(name: str, preset: _OfFolder) -> Task:
    """A preset for folders alone, before one is named."""
    return Task(
        name="finetune",
        preset=name,
        rev=REV,
        summary=f"a decoder of a folder, {preset.steps} steps more on your text, windows of {preset.context}",
        problem=_missing,
        model=_missing,
        loss=_missing,
        digest_of=_missing,
        steps=preset.steps,
        batch=preset.batch,
        lr=FOLDER_LR,
    )


_TEXT = "a PATH with text"
_PRESETS = {
    "smoke": _Preset("smoke", 1e-2, steps=20, batch=16, lr=1e-3, held_out=32),
    "small": _Preset("0.4M", 8e-3, steps=200, batch=32, lr=4e-4, held_out=1024),
}
_FOLDERS_ALONE = {
    "text": _OfFolder(context=256, steps=200, batch=8, held_out=256),
    "long": _OfFolder(context=1024, steps=500, batch=4, held_out=128),
}
_FOR_FOLDERS = _FOLDERS_ALONE | {
    name: _OfFolder(language.context_of(of.base), of.steps, of.batch, of.held_out) for name, of in _PRESETS.items()
}
PRESETS = {name: _task(name, preset) for name, preset in _PRESETS.items()}
PRESETS |= {name: _without_base(name, preset) for name, preset in _FOLDERS_ALONE.items()}
