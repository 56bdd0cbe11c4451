"""Megatron's reading of a file of formats per layer, as its source has it: what a layer computes by its name.

core/quantization/quant_config.py and core/extensions/transformer_engine.py at commit d98e8a6, from which the rules are
taken: the first enabled matcher holds; a layer in a BF16 block at either end is left in BF16 unless its settings
override that.
"""

from fnmatch import fnmatch
from functools import lru_cache

import yaml

from fp4dse.dse.export.te_quant import recipes

NAMES = {
    "qkv": "decoder.layers.{}.self_attention.linear_qkv",
    "attention-out": "decoder.layers.{}.self_attention.linear_proj",
    "up": "decoder.layers.{}.mlp.linear_fc1",
    "down": "decoder.layers.{}.mlp.linear_fc2",
    "expert up": "decoder.layers.{}.mlp.experts.linear_fc1",
    "expert down": "decoder.layers.{}.mlp.experts.linear_fc2",
}
"""Leaf of names.LEAVES that Megatron quantizes -> its name."""

FORMATS = {
    ("fp4_quantization_recipe", "nvfp4", "e4m3"): "nvfp4",
    ("fp8_quantization_recipe", "mxfp8", "e4m3"): "mxfp8",
    ("fp8_quantization_recipe", "mxfp8", "hybrid"): "mxfp8_hybrid",
    ("fp8_quantization_recipe", "tensorwise", "e4m3"): "fp8",
    ("fp8_quantization_recipe", "tensorwise", "hybrid"): "fp8_hybrid",
}


def computes(text, leaf, block, blocks, base="nvfp4", first=0, last=0):
    """The recipe of a layer under a file's text."""
    data = _loaded(text)
    quantized = base != "bf16" and first <= block < blocks - last
    matchers = [of for of in (data["matchers"] or {}).values() if of["enabled"]]
    name = NAMES[leaf].format(block)
    found = next((of["config"] for of in matchers if fnmatch(name, of["pattern"])), None)
    if found is None:
        return recipes()[base if quantized else "bf16"]
    training = dict(data["configs"][found]["training_recipe"])
    over = training.pop("override_nonquantized_autocast", False)
    if not quantized and not over:
        return recipes()["bf16"]
    form = training.pop("fp8_format", "e4m3")
    if not training:
        return recipes()["bf16"]
    [(key, value)] = training.items()
    return recipes()[FORMATS[key, value, form]]


@lru_cache(maxsize=16)
def _loaded(text):
    """The file as tables; a layer at a time asks for it."""
    return yaml.safe_load(text)
