"""The page of fine-tuning as its tests read it."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def finetune_page():
    return (DOCS / "finetune.md").read_text(encoding="utf-8").replace("−", "-").replace("**", "")


def percent(page, after, until):
    """The numbers of a sentence of the page: shares in %, losses in nats."""
    said = " ".join(page.split()).partition(after)[2].partition(until)[0]
    return [float(number.replace(",", "")) for number in re.findall(r"(?<![\w.,])[+-]?[\d,]*\.?\d+(?![\w-])", said)]
