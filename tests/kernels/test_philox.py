"""Random numbers are a pure function of what they are for."""

import itertools
import threading

import pytest
import torch

from fp4dse.kernels.ops import philox
from fp4dse.tasks.threads import torch_threads


def _hex(words):
    return [f"{int(w):08x}" for w in words]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # the known-answer vectors published with Random123
        ((0, 0, 0, 0), (0, 0), ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, ["408f276d", "41c83b0e", "a20bc7c6", "6d5451fd"]),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            ["d16cfe09", "94fdcceb", "5001e420", "24126ea1"],
        ),
    ],
)
def test_equals_the_published_vectors(counter, key, expected):
    as_tensor = [torch.tensor(v) for v in (*counter, *key)]
    assert _hex(philox.philox4x32(*as_tensor)) == expected


def test_a_draw_does_not_depend_on_neighbours_or_length():
    step, site = torch.tensor(5), torch.tensor(9)
    many = philox.random16(torch.arange(7), 1, step, site, 256)
    one = philox.random16(torch.tensor([3, 3]), 1, step, site, 64)
    assert torch.equal(many[3, :64], one[0])
    assert torch.equal(one[0], one[1])


@pytest.mark.parametrize("pieces", [1 / 3, 1, 2, 2.25])
def test_a_draw_does_not_depend_on_the_pieces_it_is_made_in(monkeypatch, pieces):
    monkeypatch.setattr(philox, "PIECE", 3 * 40)
    seeds, step, site, counters = torch.arange(3), torch.tensor(5), torch.tensor(9), int(40 * pieces)
    whole = philox.words(seeds, 1, step, site, counters).view(3, -1)
    halves = torch.stack([whole & 0xFFFF, whole >> 16 & 0xFFFF], dim=-1).view(3, -1)
    assert torch.equal(philox.random16(seeds, 1, step, site, 8 * counters), halves)
    assert torch.equal(philox.draws16(seeds, 1, step, site, 8 * counters).to(torch.int32) & 0xFFFF, halves)


def test_streams_steps_sites_and_seeds_are_different_sequences():
    draws = {
        (seed, stream, step, site): tuple(
            philox.random16(torch.tensor([seed]), stream, torch.tensor(step), torch.tensor(site), 64)[0].tolist()
        )
        for seed in (0, 1)
        for stream in (1, 2)
        for step in (0, 1)
        for site in (0, 1)
    }
    assert len(set(draws.values())) == len(draws)


def test_sixteen_bit_draws_are_uniform():
    draws = philox.random16(torch.tensor([11]), 1, torch.tensor(0), torch.tensor(0), 1 << 20)[0]
    assert int(draws.min()) >= 0
    assert int(draws.max()) <= 65535
    counts = torch.bincount(draws >> 8, minlength=256).double()  # 256 cells of 4096 expected
    chi2 = float(((counts - 4096) ** 2 / 4096).sum())
    assert 170 < chi2 < 350  # 255 degrees of freedom: mean 255, standard deviation 22.6


def test_signs_are_fair_and_normals_are_normal():
    step = torch.tensor(0)
    signs = philox.signs(torch.tensor([1]), step, step, 1 << 16)
    assert set(signs.unique().tolist()) == {-1.0, 1.0}
    assert abs(float(signs.mean())) < 4 / 256
    x = philox.normal(torch.tensor([1]), 3, 0, 0, 1 << 18)[0].double()
    assert abs(float(x.mean())) < 4 / 512
    assert abs(float(x.var()) - 1) < 4 * (2 / (1 << 18)) ** 0.5
    assert abs(float((x**4).mean()) - 3) < 4 * (96 / (1 << 18)) ** 0.5


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("native", [False, True])
def test_a_normal_draw_is_box_muller_whatever_pieces_and_threads_make_it(monkeypatch, threads, native):
    def whole(keys, site, count):
        half = -(-count // 2)
        u = (philox.random32(keys, 3, 0, site, 2 * half).double() + 0.5) * 2.0**-32
        radius, angle = torch.sqrt(-2 * torch.log(u[:, :half])), 2 * torch.pi * u[:, half:]
        return torch.cat([radius * torch.cos(angle), radius * torch.sin(angle)], dim=1)[:, :count].float()

    monkeypatch.setattr(philox, "LARGE", 1 if native else 1 << 30)
    with torch_threads(threads):
        for piece in (7, 64, 1 << 15):
            monkeypatch.setattr(philox, "PAIRS", piece)
            for seeds, count in itertools.product(([0], [3, 2**40 + 1, 5]), (1, 2, 3, 6, 127, 1000)):
                keys = torch.tensor(seeds)
                expected = whole(keys, 9, count)
                assert torch.equal(philox.normal(keys, 3, 0, 9, count), expected), (piece, seeds, count)
                assert torch.equal(philox.normal(keys, 3, 0, 9, count, 0.3), 0.3 * expected), (piece, seeds, count)


def threads_of_a_draw(monkeypatch, at_once: int, pieces: int, threads: int) -> set[int]:
    """Threads that write the pieces of a large draw, each of which waits until so many are being written."""
    used, together = set(), threading.Barrier(at_once, timeout=20)
    monkeypatch.setattr(philox, "_write_pairs", lambda *_: (used.add(threading.get_ident()), together.wait()))
    with torch_threads(threads):
        philox.normal(torch.tensor([0]), 3, 0, 9, 2 * pieces * philox.PAIRS)
    return used


def test_two_threads_write_a_large_draw_at_once_and_a_process_that_has_one_writes_it_itself(monkeypatch):
    """Workers of a sweep on a CPU have one each, as there is one a core."""
    assert len(threads_of_a_draw(monkeypatch, at_once=2, pieces=6, threads=2)) == 2
    assert threads_of_a_draw(monkeypatch, at_once=1, pieces=6, threads=1) == {threading.get_ident()}


def test_a_draw_takes_no_more_threads_than_it_has_pieces(monkeypatch):
    assert len(threads_of_a_draw(monkeypatch, at_once=4, pieces=4, threads=40)) == 4


def test_the_threads_of_a_draw_have_a_limit(monkeypatch):
    most = philox.MOST_THREADS
    assert len(threads_of_a_draw(monkeypatch, at_once=most, pieces=2 * most, threads=most + 4)) == most
