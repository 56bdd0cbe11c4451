"""Every kind of file gives the tensors that were put into it, and a broken one gives one line."""

import json
import math
import pickle
import struct
import zipfile
from collections import OrderedDict

import numpy as np
import pytest
import torch

from fp4dse.dse import ConfigError
from fp4dse.kernels import inspect_file, read_tensors
from fp4dse.kernels.inspection.files import READERS, SAFETENSORS_DTYPES
from fp4dse.kernels.inspection.tensors import DEFAULT_QUANTIZERS

X = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))


def safetensors(header: object, data: bytes = b"") -> bytes:
    """A file, written here from the format's description."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: str, shape: list, begin: int, end: int) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f2", "<f8"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_npy_gives_one_tensor_named_after_the_file(tmp_path, dtype, order):
    np.save(tmp_path / "w.npy", np.asarray(X.numpy().astype(dtype), order=order))
    got = read_tensors(tmp_path / "w.npy")
    assert list(got) == ["w"]
    assert torch.equal(got["w"].double(), torch.from_numpy(X.numpy().astype(dtype).astype("f8")))


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_gives_its_arrays_and_says_what_is_none(tmp_path, save):
    save(tmp_path / "a.npz", w=X.numpy(), i=np.arange(3), s=np.float32(1), e=np.ones((0, 3)), o=np.array([{}]))
    got = read_tensors(tmp_path / "a.npz")
    assert torch.equal(got["w"], X)
    assert (got["i"], got["s"], got["e"]) == ("dtype int64", "a single number", "no elements")
    assert "pickle" in got["o"]


def test_torch_gives_tensors_of_nested_dicts_and_lists(tmp_path):
    state = OrderedDict(weight=torch.nn.Parameter(X), half=X.bfloat16(), sparse=X.to_sparse(), step=torch.tensor(3))
    torch.save({"model": state, "optimizer": [{"m": X.double()}], "epoch": 3}, tmp_path / "a.pt")
    got = read_tensors(tmp_path / "a.pt")
    assert torch.equal(got["model.weight"], X)
    assert not got["model.weight"].requires_grad
    assert torch.equal(got["model.half"], X.bfloat16())
    assert torch.equal(got["optimizer.0.m"], X.double())
    reasons = {name: why for name, why in got.items() if isinstance(why, str)}
    assert reasons == {
        "model.sparse": "layout sparse_coo",
        "model.step": "dtype int64",
        "epoch": "int, not a tensor",
    }


@pytest.mark.parametrize("ending", [".pt", ".pth", ".PT"])
@pytest.mark.parametrize("archive", [True, False])
def test_torch_gives_a_tensor_alone_in_either_file_layout(tmp_path, ending, archive):
    path = tmp_path / f"w{ending}"
    torch.save(X, path, _use_new_zipfile_serialization=archive)
    assert torch.equal(read_tensors(path)["w"], X)


def test_safetensors_gives_every_dtype(tmp_path):
    tensors = {name: X.to(dtype) for name, dtype in SAFETENSORS_DTYPES.items()}
    header, data = {"__metadata__": {"format": "pt"}}, b"\0"  # an odd start: nothing but the first dtype is aligned
    for name, x in tensors.items():
        raw = x.view(torch.uint8).numpy().tobytes()
        header[name] = entry(name, list(x.shape), len(data), len(data) + len(raw))
        data += raw
    header["ids"] = entry("I64", [2], 0, 16)
    header["one"] = entry("F32", [], 0, 4)
    (tmp_path / "a.safetensors").write_bytes(safetensors(header, data))
    got = read_tensors(tmp_path / "a.safetensors")
    for name, x in tensors.items():
        assert got[name].dtype == x.dtype
        assert torch.equal(got[name].float(), x.float())
    assert (got["ids"], got["one"]) == ("dtype I64", "a single number")


def test_a_mapped_file_stays_as_it_was(tmp_path):
    np.save(tmp_path / "w.npy", X.numpy())
    (tmp_path / "w.safetensors").write_bytes(safetensors({"w": entry("F32", [4, 32], 0, 512)}, X.numpy().tobytes()))
    torch.save(X, tmp_path / "w.pt")
    for path in sorted(tmp_path.iterdir()):
        before = path.read_bytes()
        read_tensors(path)["w"].zero_()
        assert path.read_bytes() == before


FOUR = bytes(4)
BROKEN_SAFETENSORS = {
    "longer header than file": struct.pack("<Q", 99) + b"{}",
    "no JSON": safetensors(b"{]"),
    "no UTF-8": safetensors(b'{"\xff": 1}'),
    "no object": safetensors([1]),
    "no entry": safetensors({"w": 3}),
    "too little data": safetensors({"w": entry("F32", [2], 0, 8)}, FOUR),
    "offsets before the data": safetensors({"w": entry("F32", [1], -4, 0)}, FOUR),
    "offsets reversed": safetensors({"w": entry("F32", [1], 4, 0)}, FOUR),
    "another size than the shape": safetensors({"w": entry("F32", [2], 0, 4)}, FOUR),
    "a negative size": safetensors({"w": entry("F32", [-1], 0, 4)}, FOUR),
    "a size that no machine has": safetensors({"w": entry("F32", [10**12], 0, 4)}, FOUR),
    "a size beyond 64 bits and nothing": safetensors({"w": entry("F32", [0, 10**30], 0, 0)}),
    "a deep list": safetensors(b"[" * 100_000),
    "deep tables": safetensors(b'{"w":' * 100_000 + b"1" + b"}" * 100_000),
}


def assert_one_line(path, *words):
    with pytest.raises(ConfigError) as caught:
        read_tensors(path)
    assert "\n" not in str(caught.value)
    for word in (str(path), "accepted", *words):
        assert word in str(caught.value)


@pytest.mark.parametrize("what", BROKEN_SAFETENSORS)
def test_a_broken_safetensors_file_is_one_line(tmp_path, what):
    (tmp_path / "w.safetensors").write_bytes(BROKEN_SAFETENSORS[what])
    assert_one_line(tmp_path / "w.safetensors")


def npy(shape: tuple, descr: str = "<f4", version: int = 1) -> bytes:
    """A file of one array of 16 bytes, whatever shape it claims."""
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY" + struct.pack("<BBH" if version == 1 else "<BBI", version, 0, len(header)) + header + bytes(16)


@pytest.mark.parametrize("shape", [(10**12,), (2**62, 8), (10**30,), (-1, -(10**12)), (5,)])
@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize("descr", ["<f4", "<f8"])
def test_an_array_that_claims_more_than_its_file_has_is_one_line(tmp_path, shape, version, descr):
    (tmp_path / "w.npy").write_bytes(npy(shape, descr, version))
    with zipfile.ZipFile(tmp_path / "w.npz", "w") as archive:
        archive.writestr("w.npy", npy(shape, descr, version))
    assert_one_line(tmp_path / "w.npy")
    assert_one_line(tmp_path / "w.npz")


def test_lists_that_hold_themselves_or_each_other_without_end_are_one_line(tmp_path):
    round_about: list = [X]
    round_about.append(round_about)
    deep: list = [X]
    for _ in range(100):
        deep = [deep]
    for value in (round_about, deep):
        torch.save({"w": value}, tmp_path / "w.pt")
        assert_one_line(tmp_path / "w.pt")


@pytest.mark.parametrize("ending", READERS)
@pytest.mark.parametrize("content", [b"", b"text, and enough of it to be read as a header", b"PK\x03\x04 no archive"])
def test_another_kind_of_file_is_one_line(tmp_path, ending, content):
    (tmp_path / f"w{ending}").write_bytes(content)
    assert_one_line(tmp_path / f"w{ending}", ending)


@pytest.mark.parametrize("ending", READERS)
def test_a_truncated_file_is_one_line(tmp_path, ending):
    path = tmp_path / f"w{ending}"
    if ending == ".npy":
        np.save(path, X.numpy())
    elif ending == ".npz":
        np.savez(path, w=X.numpy())
    elif ending == ".safetensors":
        path.write_bytes(safetensors({"w": entry("F32", [4, 32], 0, 512)}, X.numpy().tobytes()))
    else:
        torch.save(X, path)
    for part in (0.98, 0.5):
        path.write_bytes(path.read_bytes()[: math.floor(part * path.stat().st_size)])
        assert_one_line(path)


def test_damaged_compression_is_one_line(tmp_path):
    path = tmp_path / "w.npz"
    np.savez_compressed(path, w=X.numpy())
    with zipfile.ZipFile(path) as archive:
        start = archive.getinfo("w.npy").header_offset + 30 + len("w.npy") + 40
    content = bytearray(path.read_bytes())
    content[start : start + 40] = bytes(40)
    path.write_bytes(content)
    assert_one_line(path)


class Code:
    """What pickle would run."""

    def __reduce__(self):
        return exec, ("raise SystemExit('the file was executed')",)


def test_code_in_a_file_is_refused(tmp_path):
    torch.save({"w": X, "code": Code()}, tmp_path / "w.pt")
    np.save(tmp_path / "w.npy", np.array([Code()], dtype=object), allow_pickle=True)
    (tmp_path / "w.pth").write_bytes(pickle.dumps(Code()))
    for ending in (".pt", ".npy", ".pth"):
        assert_one_line(tmp_path / f"w{ending}")


def test_a_file_that_is_missing_or_of_no_known_kind_is_one_line(tmp_path):
    assert_one_line(tmp_path / "w.npy", "nothing")
    (tmp_path / "folder.npy").mkdir()
    assert_one_line(tmp_path / "folder.npy")
    (tmp_path / "w.gguf").write_bytes(b"GGUF")
    assert_one_line(tmp_path / "w.gguf", ".safetensors")


def test_a_file_without_a_usable_tensor_says_what_it_holds(tmp_path):
    np.savez(tmp_path / "w.npz", ids=np.arange(3))
    assert_one_line(tmp_path / "w.npz", "ids: dtype int64")
    (tmp_path / "w.safetensors").write_bytes(safetensors({}))
    assert_one_line(tmp_path / "w.safetensors", "no tensors")


# --- inspection of a file ----------------------------------------------------------------------------------------


def test_a_row_says_what_a_quantizer_cannot_take_and_the_others_go_on(tmp_path):
    bad = X.clone()
    bad[0, 0] = math.nan
    torch.save({"w": X, "short": X[:, :16], "bias": X[0, :30], "nan": bad, "step": 3}, tmp_path / "a.pt")
    found = inspect_file(tmp_path / "a.pt", ["mxfp4", "nvfp4", "nvfp4-2d"])
    rows = {(row["tensor"], row["quantizer"]): row for row in found["rows"]}
    assert len(rows) == 4 * 3
    assert rows["w", "mxfp4"]["note"] is None
    assert rows["w", "mxfp4"]["shape"] == [4, 32]
    assert "4; accepted: a multiple of the block size 16" in rows["w", "nvfp4-2d"]["note"]
    assert "16; accepted: a multiple of the block size 32" in rows["short", "mxfp4"]["note"]
    assert rows["short", "mxfp4"]["mse"] is None
    assert rows["short", "nvfp4"]["mse"] > 0
    assert "30; accepted: a multiple of the block size 16" in rows["bias", "nvfp4"]["note"]
    assert "a matrix" in rows["bias", "nvfp4-2d"]["note"]
    assert "NaN" in rows["nan", "mxfp4"]["note"]
    assert found["skipped"] == {"step": "int, not a tensor"}
    json.dumps(found, allow_nan=False)


def test_quantizers_are_found_by_name(tmp_path):
    np.save(tmp_path / "w.npy", X.numpy())
    assert [row["quantizer"] for row in inspect_file(tmp_path / "w.npy")["rows"]] == list(DEFAULT_QUANTIZERS)
    with pytest.raises(ConfigError, match="nvfp5"):
        inspect_file(tmp_path / "w.npy", ["nvfp5"])
