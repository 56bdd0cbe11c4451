"""The structure of any torch model, found without running it: stem, head, and the blocks that repeat.

    products   modules with a weight of two or more dimensions, except look-ups, in the order of registration (the
               order in which they are called is not known)
    blocks     the modules of one kind that hold most of the products. Modules are of one kind if they have one class;
               nn.Sequential, ModuleList and ModuleDict, if they have equal structure. A stage that is little more than
               a list of blocks is not a block itself. Where no blocks are found, every product between stem and head is
               one
    stem       the first product, if it stands before all blocks and no look-up stands before it
    head       the last product, if it stands in no block; and every product that shares its weight with a look-up

Attention, MLP and router are recognized by common words in the names of layers. Of these, the recipes of the literature
depend on the router alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import nn

from fp4dse.dse.layers.place import Kind, Place, Role, conv_role

LOOK_UPS = (nn.Embedding, nn.EmbeddingBag)
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
"""Modules that only hold others: two are of one kind if their structures are equal."""
LEAST_SHARE = 0.5
"""Blocks hold at least this share of the products together, or there are none."""
LEAST_PRODUCTS = 3
"""A model with fewer products has no stem and head: nothing would be left between them."""

WORDS: dict[Kind, tuple[str, ...]] = {
    "router": ("router",),
    "attention": ("attn", "attention", "qkv", "q", "k", "v", "query", "key", "value"),
    "mlp": ("mlp", "ffn", "feed", "expert", "experts"),
}
"""Kind -> words in the dotted name of a layer, split at dots and underscores; the first that fits."""


class Structure(NamedTuple):
    """The parts of a model, by names of modules.

    look_up  the look-up in the stem's place, where inputs are row numbers
    missing  those of `stem`, `head` and `blocks` that were not found -> why
    """

    products: list[str]
    look_up: str | None
    stem: str | None
    heads: list[str]
    blocks: list[str]
    missing: dict[str, str]

    def place(self, name: str, module: nn.Module) -> Place:
        """The place of a product."""
        block = next((i for i, of in enumerate(self.blocks) if is_within(name, of)), None)
        blocks = 0 if block is None else len(self.blocks)
        kind: Kind = "embedding" if name == self.stem else "head" if name in self.heads else kind_of(name, module)
        words = _words(name)
        known = (role for role, (of, ends) in ROLES.items() if kind == of and not ends.isdisjoint(words[-2:]))
        role = next(known, conv_role(kind, getattr(module, "kernel_size", ())))
        return Place(kind, block, blocks, role, bool({"expert", "experts"} & {*words}), name)

    def words(self) -> str:
        """Stem, head and blocks in one line."""
        blocks = f"{len(self.blocks)} blocks {self.blocks[0]} … {self.blocks[-1]}" if self.blocks else "no blocks"
        stem = f"{self.look_up}, a look-up" if self.look_up else self.stem or "none"
        return f"stem: {stem}; head: {', '.join(self.heads) or 'none'}; {blocks}"

    def faults(self, among: Sequence[str]) -> list[str]:
        """A sentence for each reason why some of these were not found."""
        reasons: dict[str, list[str]] = {}
        for what, why in self.missing.items():
            if what in among:
                reasons.setdefault(why, []).append(what)
        return [f"no {', '.join(whats)} found: {why}" for why, whats in reasons.items()]


def structure_of(modules: Mapping[str, nn.Module]) -> Structure:
    """The structure of a model with these `named_modules`."""
    inside = [name for name, module in modules.items() if isinstance(module, nn.MultiheadAttention)]
    products = [
        name
        for name, module in modules.items()
        if is_product(module) and not any(name != of and is_within(name, of) for of in inside)
    ]
    tables = {name: id(module.weight) for name, module in modules.items() if isinstance(module, LOOK_UPS)}
    tied = [name for name in products if id(getattr(modules[name], "weight", None)) in tables.values()]
    if len(products) < LEAST_PRODUCTS:
        few = f"{len(products)} layers are too few"
        return Structure(products, None, None, tied, [], {"stem": few, "head": few, "blocks": few})
    missing = {}
    blocks = _blocks(modules, products)
    order, (first, last) = list(modules), (products[0], products[-1])
    look_up = next((name for name in tables if order.index(name) < order.index(first)), None)
    stem = None if look_up or _within(first, blocks) else first
    if not look_up and stem is None:
        missing["stem"] = f"the first layer, {first}, is in block {_within(first, blocks)}"
    heads = [*tied, *([] if last in tied or _within(last, blocks) else [last])]
    if not heads:
        missing["head"] = f"the last layer, {last}, is in block {_within(last, blocks)}"
    if not blocks:
        blocks = [name for name in products if name != stem and name not in heads]
        if len(blocks) < 2 or len({_layer(modules[name]) for name in blocks}) > 1:
            found = "no part of the model that has layers in it repeats and holds half of them"
            missing["blocks"] = f"{found}: each layer between stem and head is one"
    return Structure(products, look_up, stem, heads, blocks, missing)


def is_product(module: nn.Module) -> bool:
    """True if a module multiplies with a weight of its own, as far as its weights tell."""
    if isinstance(module, nn.MultiheadAttention):
        return True
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() >= 2 and not isinstance(module, LOOK_UPS)


def _words(name: str) -> list[str]:
    return name.lower().replace("_", ".").split(".")


def kind_of(name: str, module: nn.Module) -> Kind:
    """The kind of a layer that is neither stem nor head."""
    words = _words(name)
    if words[-1] == "gate":  # of experts; a gated linear unit has a gate_proj
        return "router"
    if isinstance(module, nn.MultiheadAttention):
        return "attention"
    known: Kind | None = next((kind for kind, known in WORDS.items() if not set(words).isdisjoint(known)), None)
    return known or ("conv" if isinstance(module, nn.Conv2d) else "linear")


ROLES: dict[Role, tuple[Kind, set[str]]] = {
    "qkv": ("attention", {"q", "k", "v", "qkv", "query", "key", "value", "kv", "in"}),
    "attention-out": ("attention", {"o", "out", "proj", "dense", "output"}),
    "up": ("mlp", {"gate", "up", "fc1", "w1", "w3", "fc", "intermediate"}),
    "down": ("mlp", {"down", "fc2", "w2", "proj", "output"}),
}
"""Role -> its kind, and words of which one ends the name of a layer that has it; the first that fits."""


def is_within(name: str, of: str) -> bool:
    """True if a module is another one or part of it, by their names."""
    return name == of or not of or name.startswith(f"{of}.")


def _within(name: str, blocks: Sequence[str]) -> str | None:
    return next((block for block in blocks if is_within(name, block)), None)


def _blocks(modules: Mapping[str, nn.Module], products: Sequence[str]) -> list[str]:
    """The names of the blocks in their order; empty if none are found."""
    families: dict[object, list[str]] = {}
    for name, module in modules.items():
        if name and name not in products and _held(name, products):
            family = families.setdefault(_kind(module), [])
            if not _within(name, family):  # the outermost of a kind
                family.append(name)

    def held(family: Sequence[str]) -> int:
        return sum(len(_held(name, products)) for name in family)

    several = [f for f in families.values() if len(f) > 1 and held(f) >= LEAST_SHARE * len(products)]
    blocks = max(
        several, key=lambda f: (held(f) > len(f), held(f), -len(f)), default=[]
    )  # a layer with its norm is none
    while inner := _inside(blocks, modules, products):
        blocks = inner
    return blocks


def _inside(stages: Sequence[str], modules: Mapping[str, nn.Module], products: Sequence[str]) -> list[str]:
    """The blocks in stages, if each stage is a list of blocks and at most one layer more; else empty."""
    found: list[str] = []
    for stage in stages:
        for child, module in modules[stage].named_children():
            members = [f"{stage}.{child}.{name}" for name, _ in module.named_children()]
            kinds = {_kind(modules[name]) for name in members if name in modules}
            inner = sum(len(_held(name, products)) for name in members if name not in products)
            alike = isinstance(module, CONTAINERS) and len(kinds) == 1
            if alike and inner and len(_held(stage, products)) - inner <= 1:
                found += members
                break
        else:
            return []
    return found if len(found) > len(stages) else []


def _held(name: str, products: Sequence[str]) -> list[str]:
    return [product for product in products if is_within(product, name)]


def _kind(module: nn.Module) -> object:
    """The kind of a module: equal for modules that may be blocks of one model."""
    return _signature(module) if isinstance(module, CONTAINERS) else type(module)


def _layer(product: nn.Module) -> tuple[object, ...]:
    """The kind of a product that is a block itself: its class and, if there is one, its weight's shape."""
    weight = product._parameters.get("weight")
    return type(product), None if weight is None else weight.shape


def _signature(module: nn.Module) -> tuple[object, ...]:
    return type(module), *((name, _signature(child)) for name, child in module.named_children())
