"""Text as tokens: the standard library's own documentation, and text, Parquet and token files of the user.

Text is cut into paragraphs (at blank lines; rows of a Parquet column are taken whole), of which each is kept once:
documentation repeats itself, and what is trained on must not be held out too. Every tenth is held out. A token is a
byte, unless a `tokenizer.json` lies beside the files, or another one is named: then it is what that makes of the text.

Token files are bare little-endian integers, `NAME.bin`, with what they mean in `NAME.json`:

    {"dtype": "uint16", "vocabulary": 32000, "bytes_per_token": 4.1}

Their last tenth is held out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics

import msgspec
import numpy as np
import torch
from torch import Tensor

from fp4dse.dse import ConfigError
from fp4dse.dse.reading.files import decode_json
from fp4dse.tasks.data.user_files import Fingerprint, fingerprint, hash_files, read_column, split_column

HELD_OUT = 10
"""One paragraph in so many is held out."""
BYTES = 256
TEXT = (".txt", ".md", ".rst")
COLUMN = "text"
_DTYPES = {"uint16": "<u2", "uint32": "<u4"}


class Corpus(msgspec.Struct, frozen=True):
    """train, held_out: tokens, integers [n]. bytes_per_token: UTF-8 bytes of text to a token, held out. contents: what
    it was made of, with versions, where the name does not say it."""

    name: str
    train: np.ndarray
    held_out: np.ndarray
    vocabulary: int
    bytes_per_token: float
    digest: str
    contents: str | None = None

    def windows(self, length: int, train: int, held_out: int) -> tuple[Tensor, Tensor]:
        """Windows of length + 1 tokens: at most so many to train on, and so many held out."""
        return (
            windows(self.train, length, train, self.vocabulary),
            windows(self.held_out, length, held_out, self.vocabulary),
        )


@cache
def standard_library(tokenizer: Path | None = None) -> Corpus:
    """The documentation in pydoc_data.topics, as bytes, or as tokens of a tokenizer.json. It differs between Python
    versions, and so does the digest."""
    train, held_out = split_paragraphs(paragraphs(topics[name] for name in sorted(topics)))
    return _tokens("the standard library's documentation", tokenizer, train, held_out)


def read_corpus(path: str, tokenizer: Path | None = None) -> Corpus:
    """The corpus at a `--data` path: a file of text, a `.parquet` file (`FILE:COLUMN`; default column: text), a `.bin`
    file of tokens, or a folder of text or Parquet files. tokenizer: a tokenizer.json that text goes through; None: one
    beside it, if there is any. ConfigError on what cannot be read, or holds too little."""
    file, column = split_column(path)
    files = _files_of(file)
    read_by = [*files, *_beside(files), *([tokenizer] if tokenizer else [])]
    return _read(path, tuple(files), column or COLUMN, tokenizer, fingerprint(read_by))


def paragraphs(texts: Iterable[str]) -> list[str]:
    """Paragraphs, the text between blank lines: each once, in order."""
    cut = (part.strip("\n") for text in texts for part in text.replace("\r\n", "\n").split("\n\n"))
    return list(dict.fromkeys(part for part in cut if part.strip()))


def split_paragraphs(parts: list[str]) -> tuple[list[str], list[str]]:
    """(training, held-out) parts, each with a blank line after it."""
    ended = [part + "\n\n" for part in parts]
    return [part for i, part in enumerate(ended) if (i + 1) % HELD_OUT], ended[HELD_OUT - 1 :: HELD_OUT]


def windows(tokens: np.ndarray, length: int, most: int, vocabulary: int) -> Tensor:
    """[n, length + 1]: windows that overlap by one token, at most `most`, spread evenly. The smallest integer type that
    holds the vocabulary, since they lie on the device."""
    starts = np.arange(0, len(tokens) - length, length)
    if len(starts) > most:
        starts = starts[np.arange(most) * len(starts) // most]
    dtype = np.uint8 if vocabulary <= 256 else np.int16 if vocabulary <= 32768 else np.int32
    if not len(starts):
        return torch.empty(0, length + 1, dtype=torch.uint8)
    cut = np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[starts]
    return torch.from_numpy(cut.astype(dtype))


def _files_of(path: Path) -> list[Path]:
    if not path.exists():
        raise ConfigError("--data", str(path), "a file or folder that exists")
    if path.is_file():
        return [path]
    for suffixes in (TEXT, (".parquet",)):
        if found := sorted(p for p in path.rglob("*") if p.suffix in suffixes and p.is_file()):
            return found
    raise ConfigError("--data", str(path), f"a folder with files that end in {', '.join(TEXT)} or .parquet")


def _beside(files: list[Path]) -> list[Path]:
    """Files that say how to read these."""
    wanted = [files[0].parent / "tokenizer.json", *(f.with_suffix(".json") for f in files if f.suffix == ".bin")]
    return [path for path in wanted if path.exists()]


@cache
def _read(path: str, files: tuple[Path, ...], column: str, tokenizer: Path | None, _: Fingerprint) -> Corpus:
    if files[0].suffix == ".bin":
        return _read_tokens(path, files[0])
    if files[0].suffix == ".parquet":
        parts = list(dict.fromkeys(row for file in files for row in read_column(file, column) if row.strip()))
    else:
        parts = paragraphs(_read_text(file) for file in files)
    if len(parts) < HELD_OUT:
        raise ConfigError("--data", path, f"text with {HELD_OUT} different paragraphs or more (found {len(parts)})")
    train, held_out = split_paragraphs(parts)
    beside = files[0].parent / "tokenizer.json"
    return _tokens(path, tokenizer or (beside if beside.exists() else None), train, held_out)


def _tokens(name: str, tokenizer: Path | None, train: list[str], held_out: list[str]) -> Corpus:
    return _of_tokenizer(name, tokenizer, train, held_out) if tokenizer else _of_bytes(name, train, held_out)


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError("--data", str(file), f"UTF-8 text (byte {error.start} is none)") from None


def _of_bytes(name: str, train: list[str], held_out: list[str]) -> Corpus:
    a, b = (np.frombuffer("".join(parts).encode(), dtype=np.uint8) for parts in (train, held_out))
    return Corpus(Path(name).name, a, b, vocabulary=BYTES, bytes_per_token=1.0, digest=_digest("bytes", a, b))


def _of_tokenizer(name: str, file: Path, train: list[str], held_out: list[str]) -> Corpus:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ConfigError(
            "--data", str(file), "the package `tokenizers` (pip install 'fp4dse[text]'), or data without tokenizer.json"
        ) from None
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises nothing narrower
        raise ConfigError("--data", str(file), f"a tokenizer.json of the package `tokenizers` ({error})") from None

    def tokens(parts: list[str]) -> np.ndarray:
        encoded = tokenizer.encode_batch(parts)
        return np.concatenate([np.asarray(each.ids, dtype=np.uint32) for each in encoded])

    a, b, size = tokens(train), tokens(held_out), tokenizer.get_vocab_size()
    _check_vocabulary(name, [a, b], size, str(file))
    per_token = len("".join(held_out).encode()) / max(1, len(b))
    return Corpus(Path(name).name, a, b, vocabulary=size, bytes_per_token=per_token, digest=_digest(str(size), a, b))


def _read_tokens(path: str, file: Path) -> Corpus:
    """A `.bin` file with its `.json` beside it; a tokenizer.json beside it must have the same vocabulary."""
    beside = file.with_suffix(".json")
    example = '{"dtype": "uint16", "vocabulary": 32000, "bytes_per_token": 4.1}'
    try:
        said = decode_json(beside.read_bytes())
        dtype, size, per_token = said["dtype"], int(said["vocabulary"]), float(said["bytes_per_token"])
        code = _DTYPES[dtype]
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError("--data", path, f"a .bin file with {beside.name} beside it, like {example}") from None
    if file.stat().st_size % np.dtype(code).itemsize or not file.stat().st_size:
        raise ConfigError("--data", path, f"whole {dtype} tokens (it has {file.stat().st_size} bytes)")
    tokens = np.memmap(file, dtype=code, mode="r")
    _check_vocabulary(path, [tokens], size, beside.name)
    tokenizer = file.parent / "tokenizer.json"
    if tokenizer.exists() and (found := _entries(tokenizer)) > size:
        raise ConfigError("--data", path, f"a tokenizer.json of {size} entries, as {beside.name} has (found {found})")
    cut = len(tokens) - len(tokens) // HELD_OUT
    digest = hashlib.sha256(f"{size} {dtype} {hash_files([file])}".encode()).hexdigest()[:16]
    return Corpus(file.name, tokens[:cut], tokens[cut:], vocabulary=size, bytes_per_token=per_token, digest=digest)


def _entries(tokenizer: Path) -> int:
    """Entries of a tokenizer.json, without the package."""
    try:
        said = decode_json(tokenizer.read_bytes())
        pieces, added = said["model"]["vocab"], [token["id"] for token in said.get("added_tokens", [])]
        ids = range(len(pieces)) if isinstance(pieces, list) else pieces.values()
        size: int = 1 + max([*ids, *added])
        return size
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError("--data", str(tokenizer), "a tokenizer.json of the package `tokenizers`") from None


def _check_vocabulary(path: str, parts: list[np.ndarray], size: int, source: str) -> None:
    largest = max((int(part.max()) for part in parts if len(part)), default=0)
    if largest >= size:
        raise ConfigError("--data", path, f"tokens below {size}, the vocabulary of {source} (found {largest})")


def _digest(how: str, *parts: np.ndarray) -> str:
    state = hashlib.sha256(how.encode())
    for part in parts:
        state.update(b"|" + part.tobytes())
    return state.hexdigest()[:16]
