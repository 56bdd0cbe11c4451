"""The benchmark looks before it measures: what it times has the bits of the reference, or the row says so."""

import json

import msgspec
import pytest
import torch

from fp4dse import cli
from fp4dse.dse import ConfigError, Quantizer
from fp4dse.kernels import backend, quantize
from fp4dse.kernels.bench import conversion
from fp4dse.kernels.bench import cpu as bench_cpu
from fp4dse.kernels.bench import experts as bench_experts
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


@pytest.mark.heavy
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


@pytest.mark.heavy
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


def experts_rows(monkeypatch, **more):
    """Rows of a small shape on a CPU, whose products are not timed."""
    monkeypatch.setattr(bench_experts, "graph", lambda call: call)
    monkeypatch.setattr(bench_experts, "median_us", lambda call: 40.0)
    shape = bench_experts.Shape("four experts", 4, 16, 32, 128)
    return list(bench_experts._rows("cpu", (), (shape,), **more))


def test_products_of_experts_are_checked_and_one_that_torch_has_not_is_a_note(monkeypatch):
    def missing(_):
        raise NotImplementedError("no such product\nhere")

    monkeypatch.setitem(bench_experts.WAYS, "torch, BF16", missing)
    monkeypatch.setitem(bench_experts.WAYS, "torch, FP8", bench_experts._ours)
    found = {row.what: row for row in experts_rows(monkeypatch)}
    assert [*found] == [f"four experts: {way}" for way in bench_experts.WAYS]
    ours, _, bf16, _ = found.values()
    assert (ours.wrong, ours.note, ours.of_torch_fp8) == (0, "", 1.0)
    assert ours.tflops == pytest.approx(2 * 64 * 32 * 128 / 4e-6 / 1e12)
    assert (bf16.time_us, bf16.wrong, bf16.note) == (None, None, "NotImplementedError: no such product")


def test_a_product_that_is_wrong_is_counted(monkeypatch):
    off = lambda of: (lambda: bench_experts._ours(of)[0]() + 1.0, True)  # noqa: E731
    for way in bench_experts.WAYS:
        monkeypatch.setitem(bench_experts.WAYS, way, off)
    assert {row.wrong for row in experts_rows(monkeypatch)} == {64 * 32}


def test_groups_have_different_numbers_of_tokens_and_zeros_after_them():
    of = bench_experts.operands(bench_experts.Shape("", 4, 16, 8, 32), "cpu")
    assert of.filled.sum() == 4 * 16
    assert len(of.filled.unique()) > 1
    assert not any(rows[n:].any() for rows, n in zip(of.a, of.filled.tolist(), strict=True))
    tokens, ends = of.flat()
    assert len(tokens) == 4 * 16 == ends[-1]


def test_a_device_without_kernels_is_refused():
    with pytest.raises(ConfigError, match="a device with the fused kernels"):
        next(bench_experts.bench("cpu"))
