"""The least that steps can take: two rows by hand, and the page that shows them."""

from pathlib import Path

import pytest

from fp4dse.tasks import get_task
from fp4dse.tasks.bench.roofline import fill, model_of, of_quantizer, of_step

PAGE = Path(__file__).parents[2] / "docs" / "speed.md"


def test_an_mlp_of_four_layers_by_hand():
    work = of_step(get_task("regression", "mlp"))
    weights, numbers = 4 * 256 * 256, 512 * 256
    assert work.bytes == 38 * weights + 10 * 3 * numbers + 4 * numbers == 14_417_920
    assert work.operations == {"BF16": 2 * 512 * 65_536 * (2 + 3 + 3 + 3), "FP8": 0}
    assert work.seconds("H100") == pytest.approx(4.304e-6, rel=1e-3)
    assert work.seconds("H200") == pytest.approx(3.004e-6, rel=1e-3)


def test_a_decoder_of_350m_by_hand():
    task, tokens = get_task("language", "350M"), 16 * 1024
    blocks, head = 24 * (4 * 1024**2 + 3 * 1024 * 2736), 256 * 1024
    embedded, norms = head, 49 * 1024
    core = 24 * 7 * tokens * 1024 * 1024
    for units, of_blocks in (("BF16", 0.0), ("FP8", 6.0 * tokens * blocks)):
        work = of_step(task, units)
        assert work.operations["FP8"] == of_blocks
        assert sum(work.operations.values()) == 6 * tokens * (blocks + head) + core
    left = 24 * tokens * (3 * 1024 + 1024 + 1024 + 2 * 2736 + 1024)
    assert work.bytes == 32 * (blocks + head + embedded + norms) + 6 * (blocks + head) + 10 * left + 4 * 256 * tokens
    assert of_step(task).seconds("H100") == pytest.approx(32.637e12 / 989e12, rel=1e-4)


def test_a_transformer_of_images_has_the_tasks_parameters():
    model = model_of(get_task("vision", "small"))
    assert [(of.name, of.rows) for of in model.products][:2] == [("embed.w", 256), ("block0.qkv.w", 256)]
    assert model.products[-1] == ("head.w", 10, 64, 64)
    assert model.attention == 2 * 14 * 256 * 4 * 64


def test_a_quantizer_reads_and_writes():
    assert of_quantizer(8192, 2).seconds("H200") == 8192**2 * 4 / 4.8e12


def test_the_page_has_the_table():
    page = PAGE.read_text(encoding="utf-8")
    assert fill(page) == page, "run: python -m fp4dse.tasks.bench.roofline docs/speed.md"
