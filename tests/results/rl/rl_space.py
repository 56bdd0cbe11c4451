"""The recipes of the space `rl` by what they are made of, and the pairs that answer its questions."""

from tests.results.rl.rl_page import told

TRAINERS = {"BF16": "bf16", "QAT": "bf16, forward mxfp4-rceil", "MXFP4": "mxfp4-rceil"}
ROLLOUTS = {"BF16": "bf16", "W4A16": "mxfp4-rceil-w4a16", "W4A4": "mxfp4-rceil"}
OWN = {"BF16": "BF16", "QAT": "W4A4", "MXFP4": "W4A4"}
"""Trainer -> the rollouts that its own forward pass is."""
CELLS = [(trainer, rollouts, False) for trainer in TRAINERS for rollouts in ROLLOUTS]
CELLS += [(trainer, rollouts, True) for trainer, rollouts, _ in CELLS if rollouts != OWN[trainer]]
"""Trainer, rollouts, and whether samples are weighed by TIS."""
BASELINE = ("BF16", "BF16", False)


def label(trainer, rollouts, tis):
    """Of the recipe of a cell."""
    rolled = "" if rollouts == OWN[trainer] else f", rollout {ROLLOUTS[rollouts]}"
    return TRAINERS[trainer] + ", tis 2" * tis + rolled


def pairs(first, second, of):
    """The labels of two recipes that differ in one part alone, of all cells: that with first in place `of` (0, trainer;
    1, rollouts; 2, TIS), and that with second."""
    there = [cell for cell in CELLS if cell[of] == first]
    beside = [(*cell[:of], second, *cell[of + 1 :]) for cell in there]
    return [(label(*a), label(*b)) for a, b in zip(there, beside, strict=True) if b in CELLS]


QUESTIONS = {
    "TIS 2 against none": pairs(True, False, of=2),
    "W4A16 rollouts against W4A4": pairs("W4A16", "W4A4", of=1),
    "W4A16 rollouts against BF16": pairs("W4A16", "BF16", of=1),
    "W4A4 rollouts against BF16": pairs("W4A4", "BF16", of=1),
    "QAT against a BF16 trainer": pairs("QAT", "BF16", of=0),
    "MXFP4 trainer against BF16": pairs("MXFP4", "BF16", of=0),
    "MXFP4 trainer against QAT": pairs("MXFP4", "QAT", of=0),
}


def averaged(values, of):
    """By seed, the mean over pairs of the first less the second. values: [seeds, recipes]."""
    return sum(values[first] - values[second] for first, second in of) / len(of)


def effect(values, of):
    return told(averaged(values, of))
