"""Small models as folders of Hugging Face, of random weights."""

import json

import torch
from safetensors.torch import save_file

BASE = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-3,  # so large that it shows
}
CONFIGS = {
    "llama": {"model_type": "llama"},
    "llama, groups and biases": {
        "model_type": "llama", "num_key_value_heads": 2, "attention_bias": True, "rope_theta": 5e5
    },
    "llama 3.1": {
        "model_type": "llama", "num_key_value_heads": 2, "head_dim": 16, "rope_theta": 1e3,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "mistral": {"model_type": "mistral", "num_key_value_heads": 2, "head_dim": 6, "sliding_window": 4096},
    "qwen2, tied": {"model_type": "qwen2", "num_key_value_heads": 1, "tie_word_embeddings": True},
    "qwen3, tied": {
        "model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
}  # fmt: skip


def tensors_of(config: dict) -> dict[str, torch.Tensor]:
    """Random weights under the names of Hugging Face."""
    generator = torch.Generator().manual_seed(0)
    width, heads, ffn = config["hidden_size"], config["num_attention_heads"], config["intermediate_size"]
    kv, size = config.get("num_key_value_heads", heads), config.get("head_dim", width // heads)
    kind = config["model_type"]
    shapes = {"model.embed_tokens.weight": (256, width), "model.norm.weight": (width,)}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (256, width)
    for i in range(config["num_hidden_layers"]):
        of = f"model.layers.{i}."
        outputs = {"q": heads * size, "k": kv * size, "v": kv * size}
        shapes |= {f"{of}self_attn.{name}_proj.weight": (out, width) for name, out in outputs.items()}
        shapes[f"{of}self_attn.o_proj.weight"] = (width, heads * size)
        if kind == "qwen2" or config.get("attention_bias"):
            shapes |= {f"{of}self_attn.{name}_proj.bias": (out,) for name, out in outputs.items()}
        if config.get("attention_bias"):
            shapes[f"{of}self_attn.o_proj.bias"] = (width,)
        if kind == "qwen3":
            shapes |= {f"{of}self_attn.{name}_norm.weight": (size,) for name in "qk"}
        shapes |= {f"{of}mlp.{name}_proj.weight": (ffn, width) for name in ("gate", "up")}
        shapes[f"{of}mlp.down_proj.weight"] = (width, ffn)
        shapes |= {f"{of}{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
    return {name: torch.randn(shape, generator=generator) * 0.4 for name, shape in shapes.items()}


def save(folder, config: dict, tensors: dict[str, torch.Tensor]):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder
