"""Names of layers in other libraries: the kinds of place.py as globs, and the blocks that a rule means as numbers.

A glob is one of Python's fnmatch on the dotted name of a module, `model.layers.3.self_attn.q_proj`: those of Hugging
Face's decoders, of Megatron-LM, and of Transformer Engine's own TransformerLayer. The number of a block is the first
word of the name that is a number.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from fp4dse.dse.layers.place import Place
from fp4dse.dse.layers.rule import LayerRule

GLOBS: dict[str, tuple[str, ...]] = {
    "qkv": ("*qkv", "*.q_proj", "*.k_proj", "*.v_proj", "*linear_q", "*linear_kv"),
    "attention-out": ("*.o_proj", "*.linear_proj", "*attention.proj", "*.attn.proj", "*attention.out_proj"),
    "up": ("*fc1", "*.gate_proj", "*.up_proj", "*.gate_up_proj"),
    "down": ("*fc2", "*.down_proj"),
    "expert": ("*.experts", "*.experts.*"),
    "router": ("*.router", "*.mlp.gate"),
    "embedding": ("*embed_tokens", "*word_embeddings"),
    "head": ("lm_head", "*.lm_head", "output_layer", "*.output_layer"),
}
"""Word of place.WORDS -> globs of the layers that have it. Words that are not here have no names of their own."""
GLOBS["attention"] = (*GLOBS["qkv"], *GLOBS["attention-out"])
GLOBS["mlp"] = (*GLOBS["up"], *GLOBS["down"])

LEAVES: dict[str, Place] = {
    "embedding": Place("embedding"),
    "head": Place("head"),
    "router": Place("router", 0),
    "qkv": Place("attention", 0, role="qkv"),
    "attention-out": Place("attention", 0, role="attention-out"),
    "up": Place("mlp", 0, role="up"),
    "down": Place("mlp", 0, role="down"),
    "expert up": Place("mlp", 0, role="up", expert=True),
    "expert down": Place("mlp", 0, role="down", expert=True),
}
"""The layers of a model of another library: what tells them apart -> where one is."""


def places(blocks: int) -> dict[tuple[str, int | None], Place]:
    """All of them in a model of so many blocks, by leaf and block."""
    found: dict[tuple[str, int | None], Place] = {}
    for leaf, place in LEAVES.items():
        if place.block is None:
            found[leaf, None] = place
        else:
            found |= {(leaf, i): msgspec.structs.replace(place, block=i, blocks=blocks) for i in range(blocks)}
    return found


def words_of(leaves: Iterable[str]) -> tuple[str, ...] | None:
    """The fewest words that mean these leaves and no others, None if there are none."""
    wanted = set(leaves)
    meant = {word: {leaf for leaf, place in LEAVES.items() if word in place.words} for word in GLOBS}
    words: list[str] = []
    for word, found in sorted(meant.items(), key=lambda item: -len(item[1])):
        if found and found <= wanted and not any(found <= meant[other] for other in words):
            words.append(word)
    return tuple(words) if set().union(*(meant[word] for word in words)) == wanted else None


FAR = 1000
"""More blocks than any model has."""


def numbers(rule: LayerRule, blocks: int | None) -> tuple[int, ...] | None:
    """The blocks that a rule means: None for all layers, in blocks or outside.

    ValueError if they depend on the number of blocks and that is not known.
    """
    if not (rule.first or rule.last or rule.blocks):
        return None
    if blocks is not None:
        return _meant(rule, blocks)
    near = _meant(rule, FAR)
    is_share = 0 < rule.first < 1 or 0 < rule.last < 1
    if is_share or near != _meant(rule, FAR + 1) or any(number >= FAR // 2 for number in near):
        raise ValueError("of how many blocks")
    return near


def _meant(rule: LayerRule, blocks: int) -> tuple[int, ...]:
    where = LayerRule(first=rule.first, last=rule.last, blocks=rule.blocks, fprop_rotation="none")
    return tuple(i for i in range(blocks) if where.matches(Place("linear", i, blocks)))
