"""A decoder of a folder, and text as tokens of its own."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from fp4dse.dse import ConfigError
from fp4dse.tasks.data.text import BYTES, Corpus, read_corpus, standard_library
from fp4dse.tasks.language.folder import Pretrained, read_folder
from fp4dse.tasks.start.weights import OPTION


def read_pretrained(folder: Path, path: str | None, context: int) -> tuple[Pretrained, Corpus]:
    """The model in a folder for windows of `context` tokens, and the text at a `--data` path, without any the standard
    library's documentation, by the folder's tokenizer; its vocabulary is the model's. The digest of the text has the
    model's shape in it: equal weights are another model with other angles, heads or norms.

    ConfigError on what cannot be read, does not fit together, or holds out less than a window."""
    model = read_folder(folder, context)
    corpus = standard_library(model.tokenizer) if path is None else read_corpus(path, model.tokenizer)
    tokens = path is not None and path.endswith(".bin")
    if not tokens and model.tokenizer is None and model.vocabulary != BYTES:
        raise ConfigError(OPTION, str(folder), "a folder with the tokenizer.json of the model, or tokens for --data")
    if corpus.vocabulary > model.vocabulary:
        accepted = f"tokens below {model.vocabulary}, the vocabulary of {model.name}"
        raise ConfigError("--data", path, f"{accepted} (found {corpus.vocabulary})")
    check_held_out(path, corpus, context)
    said = f"{corpus.digest} for {msgspec.json.encode(model.shape, order='sorted').decode()} of {model.vocabulary}"
    return model, msgspec.structs.replace(
        corpus,
        name=f"{model.name} on {corpus.name}",
        vocabulary=model.vocabulary,
        digest=hashlib.sha256(said.encode()).hexdigest()[:16],
    )


def check_held_out(path: str | None, corpus: Corpus, context: int) -> None:
    """ConfigError if less than a window of `context` tokens and the one that follows is held out."""
    if len(corpus.held_out) <= context:
        accepted = f"{context + 1} held-out tokens or more, a window (a tenth of the text has {len(corpus.held_out)})"
        raise ConfigError("--data", path, accepted)
