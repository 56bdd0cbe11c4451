"""Text from bundled documentation and from a user's files, as tokens; and what can be wrong with them."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from fp4dse.dse import ConfigError
from fp4dse.tasks import get_task
from fp4dse.tasks.data.text import paragraphs, read_corpus, split_paragraphs, standard_library, windows
from fp4dse.tasks.language import presets

PARAGRAPHS = [f"This is paragraph {i} of a text, naïve but long enough." for i in range(60)]
TEXT = "\n\n".join(PARAGRAPHS)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def text_of(tokens) -> str:
    return bytes(np.asarray(tokens, dtype=np.uint8)).decode()


def test_the_documentation_is_english_of_which_no_paragraph_is_in_both_parts():
    corpus = standard_library()
    train, held_out = ({p for p in text_of(part).split("\n\n") if p} for part in (corpus.train, corpus.held_out))
    assert not train & held_out
    assert 200_000 < len(corpus.train) < 1_000_000
    assert len(corpus.held_out) > 20_000
    assert text_of(corpus.train).count("The ") > 100


def test_paragraphs_are_kept_once_and_in_order():
    assert paragraphs(["a\n\nb\n\n\n\na", "c\r\n\r\nb\n\n   \n\n"]) == ["a", "b", "c"]
    train, held_out = split_paragraphs([str(i) for i in range(25)])
    assert held_out == ["9\n\n", "19\n\n"]
    assert len(train) == 23


def test_windows_overlap_by_one_token_and_are_spread_evenly():
    tokens = np.arange(101)
    cut = windows(tokens, 10, 1000, 128)
    assert cut.shape == (10, 11)
    assert cut.dtype == torch.uint8
    assert torch.equal(cut[:, 0], torch.arange(0, 100, 10, dtype=torch.uint8))
    assert torch.equal(cut[1:, 0], cut[:-1, -1])
    assert windows(tokens, 10, 4, 128)[:, 0].tolist() == [0, 20, 50, 70]
    assert windows(tokens, 10, 4, 32_000).dtype == torch.int16
    assert windows(tokens, 10, 4, 50_000).dtype == torch.int32
    assert windows(tokens, 101, 4, 128).shape == (0, 102)


def test_a_text_file_is_its_bytes():
    Path("a.txt").write_text(TEXT, encoding="utf-8")
    corpus = read_corpus("a.txt")
    assert text_of(corpus.held_out) == "".join(p + "\n\n" for p in PARAGRAPHS[9::10])
    assert (corpus.vocabulary, corpus.bytes_per_token) == (256, 1.0)


def test_a_folder_is_all_its_files_and_parquet_is_the_same_text():
    Path("all").mkdir()
    Path("all/a.txt").write_text("\n\n".join(PARAGRAPHS[:25]), encoding="utf-8")
    Path("all/b.md").write_text("\n\n".join(PARAGRAPHS[20:]), encoding="utf-8")
    Path("one.txt").write_text(TEXT, encoding="utf-8")
    pq.write_table(pa.table({"text": [*PARAGRAPHS, None], "n": range(61)}), "one.parquet")
    digests = {read_corpus(name).digest for name in ("all", "one.txt", "one.parquet", "one.parquet:text")}
    assert len(digests) == 1


def test_a_changed_file_is_read_again():
    Path("a.txt").write_text(TEXT, encoding="utf-8")
    before = read_corpus("a.txt").digest
    Path("a.txt").write_text(TEXT + "\n\nand more", encoding="utf-8")
    assert read_corpus("a.txt").digest != before


def test_a_tokenizer_beside_the_text_is_used():
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    made.train_from_iterator(PARAGRAPHS, tokenizers.trainers.BpeTrainer(vocab_size=300, show_progress=False))
    Path("a.txt").write_text(TEXT, encoding="utf-8")
    made.save("tokenizer.json")
    corpus = read_corpus("a.txt")
    assert corpus.vocabulary == made.get_vocab_size()
    expected = [i for p in PARAGRAPHS[9::10] for i in made.encode(p + "\n\n").ids]
    assert corpus.held_out.tolist() == expected
    held_out_bytes = len("".join(p + "\n\n" for p in PARAGRAPHS[9::10]).encode())
    assert corpus.bytes_per_token == held_out_bytes / len(expected)


def token_file(tokens, dtype="uint16", **said) -> None:
    np.asarray(tokens).astype(np.dtype(dtype).newbyteorder("<")).tofile("t.bin")
    meta = {"dtype": dtype, "vocabulary": 1000, "bytes_per_token": 4.0, **said}
    Path("t.json").write_text(json.dumps({k: v for k, v in meta.items() if v is not None}))


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_token_files_are_bare_integers(dtype):
    token_file(range(1000), dtype)
    corpus = read_corpus("t.bin")
    assert corpus.train.tolist() == list(range(900))
    assert corpus.held_out.tolist() == list(range(900, 1000))
    assert (corpus.vocabulary, corpus.bytes_per_token) == (1000, 4.0)


def refused(path: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_corpus(path)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_what_is_wrong_with_token_files_is_said():
    token_file([1, 2, 1000])
    assert "tokens below 1000, the vocabulary of t.json (found 1000)" in refused("t.bin")
    token_file(range(1000))
    tokenizer = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 1000, "content": "<s>"}]}
    Path("tokenizer.json").write_text(json.dumps(tokenizer))
    assert "a tokenizer.json of 1000 entries, as t.json has (found 1001)" in refused("t.bin")
    Path("tokenizer.json").write_text("{}")
    assert "a tokenizer.json of the package" in refused("t.bin")
    token_file(range(1000), vocabulary=None)
    assert '"vocabulary": 32000' in refused("t.bin")
    Path("t.json").unlink()
    assert "t.json beside it" in refused("t.bin")
    token_file([])
    assert "whole uint16 tokens" in refused("t.bin")


def test_what_is_wrong_with_text_is_said():
    assert "a file or folder that exists" in refused("nothing.txt")
    Path("empty.txt").write_text("")
    assert "10 different paragraphs or more (found 0)" in refused("empty.txt")
    Path("again.txt").write_text("again\n\n" * 100)
    assert "(found 1)" in refused("again.txt")
    Path("latin.txt").write_bytes("naïve".encode("latin-1"))
    assert "UTF-8 text (byte 2 is none)" in refused("latin.txt")
    Path("nothing").mkdir()
    assert "a folder with files that end in .txt" in refused("nothing")
    pq.write_table(pa.table({"body": PARAGRAPHS, "n": range(60)}), "a.parquet")
    assert "FILE:COLUMN with one of body, n" in refused("a.parquet")
    assert "a column of text (this one is int64)" in refused("a.parquet:n")
    Path("bad.parquet").write_bytes(b"no parquet")
    assert "a readable Parquet file" in refused("bad.parquet")
    Path("tokenizer.json").write_text("{}")
    Path("a.txt").write_text(TEXT, encoding="utf-8")
    pytest.importorskip("tokenizers")
    assert "a tokenizer.json of the package" in refused("a.txt")


def test_without_the_package_a_tokenizer_is_refused_and_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    Path("a.txt").write_text(TEXT, encoding="utf-8")
    Path("tokenizer.json").write_text("{}")
    assert "pip install 'fp4dse[text]'" in refused("a.txt")


def test_a_preset_on_text_takes_its_vocabulary_and_bytes_per_token(monkeypatch):
    monkeypatch.setattr(presets, "EVAL_PASSES", 16)
    token_file(np.arange(20_000) % 700, vocabulary=700, bytes_per_token=2.0)
    task = get_task("language", "smoke", "t.bin")
    problem = task.problem([0])
    assert problem.init["embed"].shape == (1, 700, 32)
    assert problem.val_x.shape == (1, 62, 33), "all that is held out"
    assert task.origin == ("language", "smoke", str(Path("t.bin").resolve()))
    assert task.digest == read_corpus("t.bin").digest


def test_text_that_holds_out_less_than_a_window_is_refused():
    Path("a.txt").write_text("\n\n".join(f"p{i}" for i in range(30)))
    with pytest.raises(ConfigError, match="33 held-out tokens or more"):
        get_task("language", "smoke", "a.txt")
