"""Images are read as published: every loader on tiny files in the published format, and every error before training."""

import gzip
import io
import pickle
import struct

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from fp4dse.dse import ConfigError
from fp4dse.tasks.data.digits import digits
from fp4dse.tasks.data.images import load_images, moments, parse_source

RANDOM = np.random.default_rng(0)


def planes(n):
    return RANDOM.integers(0, 256, (n, 3, 32, 32), dtype=np.uint8)


def write_cifar10(folder, binary):
    folder.mkdir()
    written = {}
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        images, labels = planes(2), [int(y) for y in RANDOM.integers(0, 10, 2)]
        labels = [0, 9] if name == "data_batch_1" else labels if name.startswith("data") else [9, 0]
        written[name] = images, labels
        flat = images.reshape(2, -1)
        if binary:
            rows = np.concatenate([np.array(labels, dtype=np.uint8)[:, None], flat], axis=1)
            (folder / f"{name}.bin").write_bytes(rows.tobytes())
        else:
            content = {b"batch_label": b"x", b"labels": labels, b"data": flat, b"filenames": [b"a.png", b"b.png"]}
            (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    return written


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("below", [False, True])
def test_cifar10_is_read_in_both_versions(tmp_path, binary, below):
    folder = tmp_path / ("cifar-10-batches-bin" if binary else "cifar-10-batches-py")
    written = write_cifar10(folder, binary)
    found = load_images(str(tmp_path if below else folder))
    assert found.shape == (32, 32, 3)
    assert (len(found.train), len(found.held_out)) == (10, 2)
    third, _ = written["data_batch_2"]
    assert np.array_equal(found.train[2].numpy(), third[0].transpose(1, 2, 0))
    names = sorted({y for name, (_, labels) in written.items() if name.startswith("data") for y in labels})
    assert found.train_labels[:2].tolist() == [names.index(0), names.index(9)]
    assert found.held_out_labels.tolist() == [names.index(9), names.index(0)]


@pytest.mark.parametrize("binary", [False, True])
def test_cifar100_has_fine_and_coarse_labels(tmp_path, binary):
    for name in ("train", "test"):
        images = planes(4).reshape(4, -1)
        fine, coarse = [0, 1, 2, 3], [1, 0, 1, 0]
        if binary:
            heads = np.array([coarse, fine], dtype=np.uint8).T
            (tmp_path / f"{name}.bin").write_bytes(np.concatenate([heads, images], axis=1).tobytes())
        else:
            content = {b"data": images, b"fine_labels": fine, b"coarse_labels": coarse}
            (tmp_path / name).write_bytes(pickle.dumps(content, protocol=2))
    assert load_images(str(tmp_path)).train_labels.tolist() == [0, 1, 2, 3]
    found = load_images(f"{tmp_path}:coarse")
    assert (found.train_labels.tolist(), found.classes) == ([1, 0, 1, 0], 2)
    with pytest.raises(ConfigError, match=r"label of data .*: found 'kind'; accepted: fine, coarse"):
        load_images(f"{tmp_path}:kind")


class Bomb:
    def __reduce__(self):
        return print, ("executed",)


def test_a_pickle_that_is_a_program_is_refused_unexecuted(tmp_path, capsys):
    write_cifar10(tmp_path / "c", False)
    (tmp_path / "c" / "data_batch_3").write_bytes(pickle.dumps({b"data": Bomb()}))
    with pytest.raises(ConfigError, match=r"data_batch_3: found 'it asks for builtins.print'; accepted: the pickle"):
        load_images(str(tmp_path / "c"))
    assert capsys.readouterr().out == ""


def test_damaged_cifar_files_are_named(tmp_path):
    for number, (binary, name, content) in enumerate(
        [(False, "data_batch_2", b"\x80"), (True, "test_batch.bin", b"12"), (False, "data_batch_5", pickle.dumps({}))]
    ):
        folder = tmp_path / str(number)
        write_cifar10(folder, binary)
        (folder / name).write_bytes(content)
        with pytest.raises(ConfigError, match=name):
            load_images(str(folder))
    write_cifar10(tmp_path / "9", True)
    (tmp_path / "9" / "data_batch_4.bin").unlink()
    with pytest.raises(ConfigError, match=r"data_batch_4.bin: found .FileNotFoundError"):
        load_images(str(tmp_path / "9"))


def idx(array):
    return bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_mnist(folder, packed=False, n=(6, 3)):
    folder.mkdir(parents=True)
    images = {}
    for part, count in zip(("train", "t10k"), n, strict=True):
        images[part] = RANDOM.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        for name, array in (
            (f"{part}-images-idx3-ubyte", images[part]),
            (f"{part}-labels-idx1-ubyte", np.arange(count, dtype=np.uint8) % 3),
        ):
            content = idx(array)
            (folder / (name + ".gz" * packed)).write_bytes(gzip.compress(content) if packed else content)
    return images


@pytest.mark.parametrize("packed", [False, True])
def test_mnist_is_read_packed_and_unpacked(tmp_path, packed):
    images = write_mnist(tmp_path / "MNIST" / "raw", packed)
    found = load_images(str(tmp_path))
    assert (found.shape, found.classes) == ((28, 28, 1), 3)
    assert np.array_equal(found.held_out[..., 0].numpy(), images["t10k"])
    assert found.train_labels.tolist() == [0, 1, 2, 0, 1, 2]


def test_damaged_idx_files_are_named(tmp_path):
    write_mnist(tmp_path / "a")
    (tmp_path / "a" / "train-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x03" + bytes(12))
    with pytest.raises(ConfigError, match="train-labels-idx1-ubyte: found '00 00 08 03'"):
        load_images(str(tmp_path / "a"))
    write_mnist(tmp_path / "b")
    file = tmp_path / "b" / "t10k-images-idx3-ubyte"
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(ConfigError, match=r"accepted: 3 × 28 × 28 bytes"):
        load_images(str(tmp_path / "b"))
    write_mnist(tmp_path / "c", packed=True)
    file = tmp_path / "c" / "train-images-idx3-ubyte.gz"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ConfigError, match=r"train-images-idx3-ubyte.gz: found 'EOFError"):
        load_images(str(tmp_path / "c"))


def write_folder(folder, classes=("cat", "dog"), n=5, size=(6, 4), mode="RGB"):
    for name in classes:
        (folder / name).mkdir(parents=True)
        for i in range(n):
            shape = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
            Image.fromarray(RANDOM.integers(0, 256, shape, dtype=np.uint8)).save(folder / name / f"{i}.png")


def test_a_folder_has_a_class_per_folder_and_a_fixed_fifth_held_out(tmp_path):
    write_folder(tmp_path)
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "cat" / "notes.txt").write_text("not an image")
    found = load_images(str(tmp_path))
    assert (found.shape, found.classes, len(found.train), len(found.held_out)) == ((4, 6, 3), 2, 8, 2)
    everything = torch.cat([found.train, found.held_out]).flatten(1).tolist()
    first = np.asarray(Image.open(tmp_path / "cat" / "0.png")).flatten().tolist()
    assert everything.count(first) == 1


def test_a_folder_in_parts_keeps_them(tmp_path):
    write_folder(tmp_path / "train")
    write_folder(tmp_path / "val", n=2)
    found = load_images(str(tmp_path))
    assert (len(found.train), len(found.held_out)) == (10, 4)
    (tmp_path / "val" / "fox").mkdir()
    Image.new("RGB", (6, 4)).save(tmp_path / "val" / "fox" / "0.png")
    load_images.cache_clear()
    with pytest.raises(ConfigError, match=r"held-out label in .*: found 'fox'"):
        load_images(str(tmp_path))


def test_grey_images_have_one_channel_and_among_colours_three(tmp_path):
    write_folder(tmp_path / "grey", mode="L")
    assert load_images(str(tmp_path / "grey")).shape == (4, 6, 1)
    write_folder(tmp_path / "both")
    Image.new("L", (6, 4), 7).save(tmp_path / "both" / "cat" / "0.png")
    found = load_images(str(tmp_path / "both"))
    assert found.shape == (4, 6, 3)
    assert [7] * 72 in torch.cat([found.train, found.held_out]).flatten(1).tolist()


def test_images_of_several_sizes_need_a_size(tmp_path):
    write_folder(tmp_path)
    Image.new("RGB", (8, 8)).save(tmp_path / "dog" / "3.png")
    with pytest.raises(ConfigError, match=r"size of image .*dog/3.png: found '8×8'; accepted: 6×4 as .*0.png, or size"):
        load_images(str(tmp_path))
    assert load_images(f"{tmp_path}?size=5").shape == (5, 5, 3)
    assert load_images(str(tmp_path), 3).shape == (3, 3, 3)
    assert load_images(f"{tmp_path}?size=5", 3).shape == (5, 5, 3)


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b"no image", lambda b: b""])
def test_a_corrupt_image_is_named(tmp_path, damage):
    write_folder(tmp_path, size=(40, 40))
    file = tmp_path / "cat" / "2.png"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ConfigError, match=r"image .*cat/2.png: found .* accepted: an image that is whole"):
        load_images(str(tmp_path))


def write_parquet(file, n=5, label="label", values=None, images=None):
    rows = []
    for i in range(n):
        out = io.BytesIO()
        Image.fromarray(RANDOM.integers(0, 256, (4, 6), dtype=np.uint8)).save(out, "PNG")
        rows.append({"bytes": out.getvalue(), "path": f"{i}.png"})
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = {"image": pa.array(images or rows, kind), label: pa.array(values or [i % 2 for i in range(n)])}
    pq.write_table(pa.table(table), file)
    return rows


def test_parquet_of_hugging_face_is_read(tmp_path):
    (tmp_path / "data").mkdir()
    write_parquet(tmp_path / "data" / "train-00000-of-00002.parquet")
    write_parquet(tmp_path / "data" / "train-00001-of-00002.parquet", n=3)
    write_parquet(tmp_path / "data" / "test-00000-of-00001.parquet", n=2)
    found = load_images(str(tmp_path))
    assert (found.shape, len(found.train), len(found.held_out), found.classes) == ((4, 6, 1), 8, 2, 2)


def test_one_parquet_file_is_split_and_may_name_its_classes(tmp_path):
    write_parquet(tmp_path / "a.parquet", n=6, label="kind", values=["b", "a", "b", "a", "b", "a"])
    found = load_images(f"{tmp_path / 'a.parquet'}:kind")
    assert (len(found.train), len(found.held_out), found.classes) == (5, 1, 2)
    with pytest.raises(ConfigError, match=r"label column of .*a.parquet: found 'label'; accepted: one of image, kind"):
        load_images(str(tmp_path / "a.parquet"))
    with pytest.raises(ConfigError, match=r"image column of .*: found 'img'; accepted: one of image, kind"):
        load_images(f"{tmp_path / 'a.parquet'}:kind?image=img")


def test_parquet_that_does_not_hold_labelled_images_says_why(tmp_path):
    write_parquet(tmp_path / "float.parquet", values=[0.5] * 5)
    with pytest.raises(ConfigError, match="found 'label of double'; accepted: a column of integers or strings"):
        load_images(str(tmp_path / "float.parquet"))
    write_parquet(tmp_path / "gone.parquet", n=2, images=[{"bytes": None, "path": "there.png"}] * 2)
    with pytest.raises(ConfigError, match=r"row 0 of .*gone.parquet: found nothing; accepted: an image"):
        load_images(str(tmp_path / "gone.parquet"))
    write_parquet(tmp_path / "bad.parquet", n=2, images=[{"bytes": b"x", "path": ""}] * 2)
    with pytest.raises(ConfigError, match=r"image in row 0 of .*bad.parquet"):
        load_images(str(tmp_path / "bad.parquet"))
    (tmp_path / "no.parquet").write_bytes(b"text")
    with pytest.raises(ConfigError, match=r"no.parquet: found .*; accepted: a Parquet file"):
        load_images(str(tmp_path / "no.parquet"))
    pq.write_table(pa.table({"image": [1], "label": [1]}), tmp_path / "number.parquet")
    with pytest.raises(ConfigError, match=r"found 'image of int64'; accepted: a column of bytes or struct"):
        load_images(str(tmp_path / "number.parquet"))


def test_what_is_not_there_or_not_known_is_said_so(tmp_path):
    with pytest.raises(ConfigError, match=r"data: found '/nowhere'; accepted: a file or folder that exists"):
        load_images("/nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"data: found .*; accepted: CIFAR-10/100 or MNIST files"):
        load_images(str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match=r"option of data .*: found 'colour'; accepted: image, size"):
        parse_source(f"{tmp_path}?colour=red")
    for given in ("0", "big", "-3"):
        with pytest.raises(ConfigError, match=r"size of data .*accepted: a whole number"):
            parse_source(f"{tmp_path}?size={given}")
    write_folder(tmp_path / "one", classes=("cat",), n=1)
    with pytest.raises(ConfigError, match="images: found 1; accepted: two or more"):
        load_images(str(tmp_path / "one"))
    write_mnist(tmp_path / "mnist")
    with pytest.raises(ConfigError, match="published images keep their size"):
        load_images(f"{tmp_path / 'mnist'}?size=14")


def test_the_digest_is_of_the_content_alone(tmp_path):
    write_mnist(tmp_path / "plain")
    (tmp_path / "packed").mkdir()
    for file in (tmp_path / "plain").iterdir():
        (tmp_path / "packed" / f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
    digest = load_images(str(tmp_path / "plain")).digest
    assert load_images(str(tmp_path / "packed")).digest == digest
    file = tmp_path / "plain" / "t10k-labels-idx1-ubyte"
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    load_images.cache_clear()
    assert load_images(str(tmp_path / "plain")).digest != digest


def test_moments_are_those_of_the_pixels():
    pixels = torch.from_numpy(RANDOM.integers(0, 256, (7, 5, 4, 2), dtype=np.uint8))
    pixels[..., 1] = 9
    mean, std = moments(pixels)
    assert mean == pytest.approx((pixels[..., 0].double().mean().item(), 9))
    assert std == pytest.approx((pixels[..., 0].double().std().item(), 1))


def test_digits_are_all_there():
    found = digits()
    assert (found.shape, found.classes, found.top) == ((8, 8, 1), 10, 16)
    assert (len(found.train), len(found.held_out), int(found.train.max())) == (1437, 360, 16)
    assert torch.bincount(torch.cat([found.train_labels, found.held_out_labels])).min() > 170
