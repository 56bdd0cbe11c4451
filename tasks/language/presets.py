"""Language as a task: what is measured, and models from seconds on a CPU to a billion parameters.

Two series. `9M`, `60M`, `350M`, `1B` are the widths of arXiv 2509.17791, counted with a vocabulary of 32,000; on bytes
they are smaller. `0.4M` to `30M` are ours, for studies of recipes by size: they are counted without embeddings and
head, trained on the procedural language unless --data says otherwise, and all their products' sides are multiples of
128. `moe8` and `moe64` have so many experts, and one that every token has; their sizes are of what a token meets.
Learning rates rise over the first `warmup` of the steps and fall linearly to zero over the last `decay` of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn

from fp4dse.tasks.data import grammar
from fp4dse.tasks.data.grammar import Language
from fp4dse.tasks.data.python_source import installed_python
from fp4dse.tasks.data.text import BYTES, Corpus, read_corpus, standard_library
from fp4dse.tasks.draws import Draws
from fp4dse.tasks.language.decoder import Decoder, Shape
from fp4dse.tasks.language.experts import Mixture, with_balance
from fp4dse.tasks.language.pretrained import check_held_out, read_pretrained
from fp4dse.tasks.losses import cross_entropy
from fp4dse.tasks.task import Finish, Problem, Task

REV = 5
EXPERTS_REV = 6
"""Of presets with experts, which draw by other seeds since they are multiplied together."""
EVAL_PASSES = 16
"""Most batches that are held out."""


def problem(
    corpus: Callable[[], Corpus | Language], shape: Shape, batch: int, steps: int, seeds: Sequence[int]
) -> Problem:
    """Windows of context + 1 tokens, inputs and targets in one: no more than training and evaluation read."""
    found = corpus()
    texts = found.windows(shape.context, batch * steps, EVAL_PASSES * batch)
    return of_texts(*texts, shape.initial(found.vocabulary, seeds))


def of_texts(train: Tensor, held_out: Tensor, init: dict[str, Tensor]) -> Problem:
    """Texts to read, integers [n, context + 1] each, the same for all seeds, and initial weights."""
    train, held_out = train[None], held_out[None]
    nothing = (x.new_empty(*x.shape[:2], 0) for x in (train, held_out))
    return Problem(train, next(nothing), held_out, next(nothing), init)


def shifted(x: Tensor, _y: Tensor, _draws: Draws) -> tuple[Tensor, Tensor]:
    """Tokens to read and to say, int64 [L, B, T] each."""
    x = x.to(torch.int64)
    return x[..., :-1].contiguous(), x[..., 1:].contiguous()


def loss(out: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    """-log p of each token and the weighted balance loss, [L, B·T, 1]."""
    return with_balance(cross_entropy(out[0], y), out[1])


def logits(out: tuple[Tensor, Tensor]) -> Tensor:
    """Logits [L, B, T, V] among the outputs."""
    return out[0]


def bits(bytes_per_token: float, out: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    """Bits per byte of text."""
    return cross_entropy(out[0], y) * (1 / (math.log(2) * bytes_per_token))


def excess(entropy: Callable[[], float], out: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    """Nats per token above the entropy of the held-out text: what a model could still learn."""
    return cross_entropy(out[0], y) - entropy()


def perplexity(_model: nn.Module, _problem: Problem, _draws: Draws, val_loss: Tensor) -> Finish:
    """exp of the held-out loss per token."""
    values = [math.exp(min(x, 700.0)) for x in val_loss.tolist()]
    return Finish(metrics={"perplexity": torch.tensor(values, dtype=torch.float64)})


class Preset(msgspec.Struct, frozen=True):
    """A model and its training numbers, for any corpus. parts: as in Task; of a vocabulary of 32,000 the logits of the
    paper's batch are 63 GiB."""

    shape: Shape
    batch: int
    steps: int
    lr: float
    decay: float = 0.9
    warmup: float = 0.05
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    parts: int = 1


def _task(
    preset: str,
    found: Preset,
    corpus: Callable[[], Corpus | Language],
    name: str,
    vocabulary: int,
    metrics: dict[str, Callable[..., Tensor]],
    samples: Callable[[], int] | None = None,
) -> Task:
    """The preset, by name and in numbers, on text of which name and vocabulary are known; it is read when it is
    needed."""
    shape = found.shape
    size = shape.size(vocabulary)
    experts, parameters = "", f"{size / 1e6:.3g}M parameters"
    if shape.experts:
        shared = " and one for all" if shape.mixture.shared else ""
        experts = f" with {shape.experts} experts, {shape.mixture.chosen} a token{shared}"
        parameters += f" ({shape.active(vocabulary) / 1e6:.3g}M a token)"
    return Task(
        name="language",
        preset=preset,
        rev=EXPERTS_REV if shape.experts else REV,
        summary=f"{name}, vocabulary {vocabulary}, decoder {shape.depth}×{shape.width}{experts}, "
        f"{parameters}, windows of {shape.context}",
        problem=partial(problem, corpus, shape, found.batch, found.steps),
        preview=partial(problem, corpus, shape, 1, 1),
        prepare=shifted,
        model=partial(Decoder, shape),
        loss=loss,
        metrics=metrics,
        better="lower",
        finish=perplexity,
        digest_of=lambda: corpus().digest,
        contents_of=lambda: corpus().contents,
        steps=found.steps,
        batch=found.batch,
        lr=found.lr,
        betas=found.betas,
        weight_decay=found.weight_decay,
        decay=found.decay,
        warmup=found.warmup,
        eval_rows=found.batch // found.parts,
        parts=found.parts,
        size=size,
        parameters=shape.size_within(vocabulary),
        tokens=found.steps * found.batch * shape.context,
        samples=samples,
        logits=None if shape.experts else logits,
    )


_by_size = partial(Preset, weight_decay=0.1)
_BY_SIZE = {
    "0.4M": _by_size(Shape(128, 384, 2, 4, 64), 64, 2_080, 4e-3),
    "1M": _by_size(Shape(128, 384, 5, 4, 64), 128, 2_600, 4e-3),
    "3M": _by_size(Shape(256, 768, 4, 4, 64), 256, 4_160, 2e-3),
    "10M": _by_size(Shape(384, 1024, 6, 6, 64), 256, 3_240, 1e-3),
    "10M-long": _by_size(Shape(384, 1024, 6, 6, 64), 256, 12_960, 1e-3),
    "30M": _by_size(Shape(640, 1792, 6, 10, 64), 512, 4_650, 1e-3),
    "moe8-1M": _by_size(Shape(128, 128, 5, 4, 64, 8, mixture=Mixture(2, 128, balance="bias")), 128, 2_600, 4e-3),
    "moe64-3M": _by_size(Shape(256, 128, 3, 4, 64, 64, mixture=Mixture(6, 256, balance="bias")), 256, 3_850, 2e-3),
    "moe8-10M": _by_size(Shape(384, 384, 5, 6, 64, 8, mixture=Mixture(2, 384, balance="bias")), 256, 2_930, 1e-3),
}
"""20 tokens a parameter, of experts those that a token meets; `10M`, `moe8-10M` and `30M` 5. The shape of `30M` is that
of Quartet II's. Without weight decay BF16 and NVFP4 both end higher (docs/presets.md)."""

_PRESETS = {
    "smoke": Preset(Shape(32, 64, 1, 2, 32), 16, 60, 1e-2),
    "tiny": Preset(Shape(64, 192, 2, 4, 64), 16, 300, 5e-3),
    "small": Preset(Shape(96, 256, 3, 4, 64), 32, 500, 4e-3),
    "9M": Preset(Shape(128, 352, 4, 4, 128), 128, 1500, 3e-3),
    "10M-256": Preset(Shape(384, 1024, 6, 6, 256), 8, 1500, 1e-3),
    "60M": Preset(Shape(512, 1376, 8, 8, 512), 32, 4000, 1e-3),
    "350M": Preset(Shape(1024, 2736, 24, 16, 1024), 16, 10_000, 3e-4),
    "1B": Preset(Shape(2048, 5456, 24, 32, 1024), 8, 20_000, 2e-4),
    "paper": Preset(Shape(128, 352, 4, 4, 128), 4096, 1545, 3e-3, decay=1.0, warmup=0.0, betas=(0.9, 0.999), parts=8),
    **_BY_SIZE,
    "moe-smoke": Preset(Shape(32, 32, 1, 2, 32, experts=4), 16, 60, 1e-2),
    "moe-small": Preset(Shape(96, 128, 3, 4, 64, experts=4), 32, 500, 4e-3),
    "moe-9M": Preset(Shape(128, 176, 4, 4, 128, experts=8), 128, 1500, 3e-3),
    "moe8-smoke": Preset(Shape(32, 32, 1, 2, 32, 8, mixture=Mixture(2, 32, balance="bias")), 16, 60, 1e-2),
    "moe8-4B": Preset(Shape(2048, 4096, 16, 16, 1024, 8, mixture=Mixture(2, 1024, balance="bias")), 8, 20, 2e-4),
}
"""`moe8-4B` is there for speed and memory, not for its loss."""


def _on_corpus(
    preset: str,
    found: Preset,
    corpus: Callable[[], Corpus],
    name: str,
    vocabulary: int = BYTES,
    bytes_per_token: float = 1.0,
) -> Task:
    """The preset, by name and in numbers, on a text that has an end."""
    in_bits = partial(bits, bytes_per_token)
    samples = lambda: (len(corpus().train) - 1) // found.shape.context  # noqa: E731
    return _task(preset, found, corpus, name, vocabulary, {"bits_per_byte": in_bits}, samples)


def _on_grammar(preset: str, options: str = grammar.NAME) -> Task:
    """The preset on the procedural language, which has no end. options: as --data names them."""
    found, language = _PRESETS[preset], grammar.parse_language(options)
    entropy = cache(partial(language.entropy, found.shape.context, EVAL_PASSES * found.batch))
    return _task(
        preset, found, lambda: language, language.name, language.vocabulary, {"excess": partial(excess, entropy)}
    )


PRESETS = {
    preset: _on_grammar(preset)
    if preset in _BY_SIZE
    else _on_corpus(preset, found, standard_library, "the standard library's documentation")
    for preset, found in _PRESETS.items()
}


def context_of(preset: str) -> int:
    """Tokens in a window."""
    return _PRESETS[preset].shape.context


NAMED: dict[str, Callable[[str], Task]] = {
    grammar.NAME: _on_grammar,
    "python": lambda preset: _on_corpus(preset, _PRESETS[preset], installed_python, installed_python().name),
}
"""Names for `--data` that are no files: name -> (preset -> task)."""


def on_data(preset: str, path: str) -> Task:
    """The preset on the user's text, or on one of NAMED. ConfigError on what cannot be read, or holds out less than a
    window."""
    if path in NAMED:
        return NAMED[path](preset)
    if path.partition("?")[0] == grammar.NAME:
        return _on_grammar(preset, path)
    corpus, found = read_corpus(path), _PRESETS[preset]
    check_held_out(path, corpus, found.shape.context)
    return on_read(preset, found, corpus)


def on_folder(preset: str, path: str | None, folder: Path) -> tuple[Task, dict[str, Tensor]]:
    """The preset with a pretrained decoder in place of its own, on the user's text or, without any, on the standard
    library's documentation; and the decoder's weights. ConfigErrors as of read_pretrained."""
    found = _PRESETS[preset]
    model, corpus = read_pretrained(folder, path, found.shape.context)
    return on_read(preset, msgspec.structs.replace(found, shape=model.shape), corpus), model.weights()


def on_read(preset: str, found: Preset, corpus: Corpus) -> Task:
    """The preset, by name and in numbers, on a text that is read."""
    return _on_corpus(preset, found, lambda: corpus, corpus.name, corpus.vocabulary, corpus.bytes_per_token)
