"""The procedural language: a slow reader who sees tokens alone finds the probabilities that the source states."""

import numpy as np
import pytest

from fp4dse.dse import ConfigError, Recipe
from fp4dse.tasks import Lane, get_task, train
from fp4dse.tasks.data import grammar
from fp4dse.tasks.data.grammar import Language, ordered, rank_of
from fp4dse.tasks.data.turns import HALF
from fp4dse.tasks.task import with_steps

LANGUAGE = Language(512)
KINDS = ("noun", "verb", "adjective", "adverb", "topic", "preposition", "stop", "that", "and", "pronoun")


def kind_of(token):
    return max(kind for kind, first in LANGUAGE.first.items() if first <= token)


class Reader:
    """Plain Python over the grammar's table: `next` is the probability of every token, from what was read alone."""

    def __init__(self):
        self.state, self.subjects, self.known = grammar.BEGIN, [0], {}

    def options(self):
        found = dict(grammar.GRAMMAR[self.state])
        if self.state == grammar.SUBJECT and len(self.subjects) == grammar.DEPTH + 1:
            share, _ = found.pop(grammar.THAT)
            verb, after = found[grammar.VERB]
            found[grammar.VERB] = (verb + share, after)
        return found

    def next(self):
        out = np.zeros(LANGUAGE.vocabulary)
        for kind, (share, _) in self.options().items():
            inner = self.subjects
            if kind == grammar.END:
                kind = grammar.STOP if len(self.subjects) == 1 else grammar.VERB
                inner = self.subjects[:-1]
            self.spread(out, kind, share / 16, inner)
        return out

    def spread(self, out, kind, chance, subjects):
        first = LANGUAGE.first[kind]
        if kind in (grammar.STOP, grammar.THAT, grammar.AND):
            out[first] += chance
        elif kind == grammar.PRONOUN:
            out[first + subjects[-1] % 4] += chance
        else:
            orders = self.orders(kind, subjects)
            ranks = np.arange(LANGUAGE.count(kind))
            for key in orders:
                word = ordered(ranks, key, len(ranks))
                place = first + (4 * word + subjects[-1] % 4 if kind == grammar.VERB else word)
                out[place] += chance * LANGUAGE.chances[kind] / len(orders)

    def orders(self, kind, subjects):
        known, key = self.known, grammar.key_of
        if kind == grammar.VERB:
            return [key(kind, subjects[-1])]
        if kind == grammar.ADVERB:
            return [key(kind, known["verb"])]
        if kind == grammar.ADJECTIVE:
            return [key(kind, known["topic"])]
        if kind != grammar.NOUN:
            return [key(kind)]
        if self.state in (grammar.PHRASE, grammar.OBJECT_PHRASE):
            return [key(kind, grammar.PREPOSITION, known["preposition"])]
        if self.state in (grammar.VERBED, grammar.QUALIFIED):
            return [key(kind, grammar.VERB, known["verb"]), key(kind, subjects[-1], known["verb"])]
        return [key(kind, grammar.TOPIC, known["topic"])]

    def read(self, token):
        kind, options = kind_of(token), self.options()
        if kind in options:
            after = options[kind][1]
        elif kind == grammar.VERB:
            self.subjects.pop()
            after = grammar.VERBED
        else:
            assert kind == grammar.STOP
            assert len(self.subjects) == 1
            after = grammar.SENTENCE
        if kind == grammar.THAT:
            self.subjects.append(self.subjects[-1])
        if kind == grammar.NOUN and after == grammar.SUBJECT and self.state != grammar.PHRASE:
            self.subjects[-1] = token
        self.known[KINDS[kind]] = token
        self.state = after


@pytest.mark.parametrize("options", grammar.GRAMMAR.values())
def test_the_chances_of_a_state_are_sixteen_sixteenths(options):
    assert sum(share for share, _ in options.values()) == 16


@pytest.mark.parametrize("size", [4, 8, 16, 32, 128, 256])
def test_an_order_holds_every_word_once_and_can_be_undone(size):
    ranks = np.arange(size)
    for key in range(50):
        words = ordered(ranks, np.full(size, key), size)
        assert sorted(words) == list(ranks)
        assert (rank_of(words, np.full(size, key), size) == ranks).all()


def test_a_reader_of_the_tokens_knows_their_probabilities():
    tokens, nats = LANGUAGE.texts(1, 40, 6, 65)
    unexpected = []
    for text, surprise in zip(tokens, nats, strict=True):
        reader = Reader()
        for token, nat in zip(text, surprise, strict=True):
            chances = reader.next()
            assert chances.sum() == pytest.approx(1, abs=1e-12)
            assert -np.log(chances[token]) == pytest.approx(nat, rel=1e-5, abs=1e-6)
            positive = chances[chances > 0]
            unexpected.append(nat + (positive * np.log(positive)).sum())
            reader.read(int(token))
    # surprises are those of draws from these probabilities: their excess over the entropy is a martingale difference
    assert abs(np.mean(unexpected)) < 4 * np.std(unexpected) / np.sqrt(len(unexpected))


def test_frequencies_are_the_probabilities():
    tokens, _ = LANGUAGE.texts(0, 0, 20_000, 2)
    counts = np.bincount(tokens[:, 0], minlength=512)
    expected = 20_000 * Reader().next()
    drawn = expected > 0
    assert counts[~drawn].sum() == 0
    chi = ((counts - expected)[drawn] ** 2 / expected[drawn]).sum()
    assert chi < 45  # 15 degrees of freedom: one in ten thousand


def test_a_text_does_not_depend_on_how_many_are_drawn_with_it(monkeypatch):
    tokens, nats = LANGUAGE.texts(0, 0, 50, 33)
    monkeypatch.setattr(grammar, "ROWS", 7)
    again, same = LANGUAGE.texts(0, 20, 30, 20)
    assert (again == tokens[20:, :20]).all()
    assert (same == nats[20:, :20]).all()


def test_windows_are_the_texts_whether_drawn_or_read_and_a_damaged_file_is_drawn_anew(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(grammar, "ROWS", 8)
    texts = LANGUAGE.texts(grammar.TRAIN, 0, 20, 9)[0]
    assert (LANGUAGE.windows(8, 20, 3)[0].numpy() == texts).all()
    files = sorted(tmp_path.rglob("*.npy"))
    assert [len(np.load(file)) for file in files] == [8, 8]  # whole blocks alone
    files[0].write_bytes(b"")
    files[1].write_bytes(files[1].read_bytes()[:-1])
    assert (LANGUAGE.windows(8, 20, 3)[0].numpy() == texts).all()
    np.save(files[0], texts[8:16])
    assert (LANGUAGE.windows(8, 20, 3)[0].numpy()[:8] == texts[8:16]).all()  # it is what is read


def test_texts_that_turn_copy_or_calculate_and_all_others_stay_as_they_are():
    plain, plain_nats = Language().texts(0, 0, 400, 80)
    tokens, nats = Language(copying=30, arithmetic=20).texts(0, 0, 400, 80)
    copy, total, plus, equals, zero = range(Language().first[grammar.PRONOUN] + 4, 2048)[:5]
    assert (tokens[:, :HALF] == plain[:, :HALF]).all()
    assert (nats[:, :HALF] == plain_nats[:, :HALF]).all()
    turned = {"copy": 0, "sum": 0}
    for text, surprise, before, usual in zip(tokens.tolist(), nats, plain.tolist(), plain_nats, strict=True):
        if text[HALF] == copy:
            turned["copy"] += 1
            assert text[HALF:] == [copy, *text[:HALF], copy, *text[: 80 - 2 * HALF - 2]]
            assert surprise[HALF:].tolist() == pytest.approx([-np.log(0.3), *[0] * (80 - HALF - 1)])
        elif text[HALF] == total:
            turned["sum"] += 1
            groups = [text[start : start + 5] for start in range(HALF + 1, 76, 5)]
            assert all(0 <= one[n] - zero < 10 for one in groups for n in (0, 2, 4))
            assert all([one[1], one[3]] == [plus, equals] for one in groups)
            assert all((one[0] + one[2] - 2 * zero) % 10 == one[4] - zero for one in groups)
            assert surprise[HALF + 1 : HALF + 6].tolist() == pytest.approx([np.log(10), 0, np.log(10), 0, 0])
        else:
            assert text == before
            assert surprise[HALF] == pytest.approx(usual[HALF] - np.log(0.5), rel=1e-5)
            assert (surprise[HALF + 1 :] == usual[HALF + 1 :]).all()
    assert abs(turned["copy"] - 120) < 4.5 * np.sqrt(400 * 0.3 * 0.7)
    assert abs(turned["sum"] - 80) < 4.5 * np.sqrt(400 * 0.2 * 0.8)


def test_options_are_part_of_the_digest_and_what_is_no_option_is_refused():
    digests = {grammar.parse_language(f"grammar{options}").digest for options in ("", "?copying=25", "?arithmetic=25")}
    assert len(digests) == 3
    assert grammar.parse_language("grammar?copying=0").digest == Language().digest
    assert get_task("language", "smoke", "grammar?copying=25").digest in digests
    for options, said in (
        ("copy=1", "accepted: copying, arithmetic"),
        ("copying=101", "accepted: 0 to 100, percent of the texts"),
        ("copying=60&arithmetic=50", "found 110; accepted: 100 percent together at most"),
    ):
        with pytest.raises(ConfigError, match=said):
            get_task("language", "smoke", f"grammar?{options}")


def test_splits_and_texts_differ():
    train, held_out = (LANGUAGE.texts(split, 0, 200, 64)[0] for split in (0, 1))
    assert len(np.unique(np.concatenate([train, held_out]), axis=0)) == 400


def test_the_language_is_the_same_on_every_machine():
    tokens, nats = LANGUAGE.texts(0, 0, 2, 12)
    assert tokens.tolist() == EXPECTED
    assert nats.astype(float).sum() == pytest.approx(TOTAL, rel=1e-6)


EXPECTED = [
    [494, 45, 305, 189, 501, 38, 506, 269, 473, 114, 504, 427],
    [488, 117, 341, 239, 504, 508, 341, 114, 498, 15, 506, 309],
]
TOTAL = 40.088158


def test_a_preset_on_the_language_measures_what_is_left_to_learn():
    task = get_task("language", "smoke", "grammar")
    problem = task.problem([0, 1])
    assert problem.train_x.shape == (1, task.batch * task.steps, 33)
    assert problem.init["embed"].shape == (2, 2048, 32)
    assert task.origin == ("language", "smoke", "grammar")
    [result] = train(with_steps(task, 30), [Lane(Recipe.named("bf16"), 1e-2, 0)]).lanes
    entropy = Language().entropy(32, 2 * task.batch)
    assert result.metrics["excess"] == pytest.approx(result.val_loss - entropy, abs=1e-4)
    assert 0.5 < result.metrics["excess"] < 3


def test_a_file_of_that_name_is_read_where_its_path_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "grammar").write_text("\n\n".join(f"paragraph {i} of some text" for i in range(900)))
    assert get_task("language", "smoke", "./grammar").summary.startswith("grammar, vocabulary 256")
