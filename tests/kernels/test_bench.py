"""The benchmark looks before it measures: what it times has the bits of the reference, or the row says so."""

import json

import msgspec
import pytest
import torch

from fp4dse import cli
from fp4dse.dse import Quantizer
from fp4dse.kernels import backend, quantize
from fp4dse.kernels.bench import conversion
from fp4dse.kernels.bench import cpu as bench_cpu
from fp4dse.kernels.ops.mxfp4 import E4M3, Fp8

OURS = ["nvfp4, path `compiled`", "nvfp4 SR, path `compiled`", "mxfp4, path `compiled`", "mxfp4 SR, path `compiled`"]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Small tensors, and of the peers one that is installed for the tests and one that nobody has."""
    nobody = bench_cpu.Peer("nobody", "MXFP4", lambda x: __import__("nobodys_quantizer"))
    monkeypatch.setattr(bench_cpu, "EDGE", 128)
    monkeypatch.setattr(bench_cpu, "ROUNDS", 2)
    peers = [peer for peer in bench_cpu.PEERS if peer.package == "gfloat"]
    monkeypatch.setattr(bench_cpu, "PEERS", (*peers, nobody))
    monkeypatch.setattr(bench_cpu, "keep_freed_memory", lambda: None)


def rows(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "kernels", "--json"])
    return ended.value.code, json.loads(capsys.readouterr().out)


def test_every_row_stands_beside_a_copy_and_a_peer_that_is_not_there_is_no_failure(capsys):
    code, table = rows(capsys)
    assert code == 0
    head = f"float32, {torch.get_num_threads()} threads: "
    assert all(row["what"].startswith(head) for row in table)
    assert [row["what"].removeprefix(head) for row in table[:5]] == ["copy", *OURS]
    for row in table[:-1]:
        assert row["of_copy"] == pytest.approx(table[0]["time_us"] / row["time_us"])
    assert [row["wrong"] for row in table[:5]] == [0] * 5
    assert all(row["extra_memory"] >= 0 for row in table[1:-1])
    assert table[-1]["what"].endswith("nobody (not a package): MXFP4: not taken, no module nobodys_quantizer")
    assert table[-1]["time_us"] is None


def test_a_path_that_is_off_by_one_bit_is_told_and_fails(monkeypatch, capsys):
    sound = backend("cpu")

    def off(*arguments):
        values, factor = sound.operand(*arguments)
        values[0, 0, 0] += 1
        return values, factor

    monkeypatch.setattr(bench_cpu, "backend", lambda device: msgspec.structs.replace(sound, operand=off))
    code, table = rows(capsys)
    assert code == 1
    assert [row["wrong"] for row in table[:5]] == [0, 1, 1, 1, 1]


def test_the_peers_compute_what_their_rows_say():
    x = torch.randn(64, 128)
    peers = {peer.call.__name__: peer.call for peer in bench_cpu.PEERS}
    assert torch.equal(peers["gfloat"](x)(), quantize(x, Quantizer.named("mxfp4")).values)
    assert torch.equal(bench_cpu.torchao_mxfp4(x)(), quantize(x, Quantizer.named("mxfp4")).values)


def test_rows_of_a_cpu_are_not_chosen(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "kernels", "--only", "mxfp4"])
    assert ended.value.code == 2
    assert "--only" in capsys.readouterr().err


def test_the_rows_of_conversions_are_of_one_operand(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    quantized = quantize(torch.randn(1, 256, 128), Quantizer.named("mxfp4"))
    codes = quantized.codes[..., 0::2] | quantized.codes[..., 1::2] << 4
    direct, twice, by_bf16, *others = conversion.cases(codes, (torch.log2(quantized.scales) + 127).to(torch.uint8))
    for row in (direct, by_bf16):
        values, factor, *_ = row.call()
        assert torch.equal(Fp8(values.view(E4M3), factor, values).decoded(), quantized.values.mT)
    assert not torch.equal(twice.call()[0], direct.call()[0])  # it is rounded again
    assert direct.nbytes == twice.nbytes == by_bf16.nbytes == 1.5625 * 256 * 128
    for row in (direct, twice, by_bf16, *others):
        assert all(map(torch.equal, row.call(), row.expected()))


def test_the_peak_of_a_call_is_counted_and_not_what_it_leaves():
    size = 64 << 20
    assert 0.95 * size < bench_cpu._extra_memory(lambda: torch.ones(size // 4).amax()) < 1.2 * size
    assert bench_cpu._extra_memory(lambda: None) < 0.2 * size
