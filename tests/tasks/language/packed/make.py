"""Make the folders beside this file anew: a Llama of random weights, as llm-compressor and ModelOpt pack it.

In an environment of its own, with llmcompressor 0.14.0, compressed-tensors 0.19.0 and nvidia-modelopt 0.47.0:

    python tests/tasks/language/packed/make.py

`expected.json` has a digest of each weight as the library decodes it, in FP32.
"""

import hashlib
import json
import shutil
import tempfile
from pathlib import Path

import modelopt.torch.quantization as mtq
import tokenizers
import torch
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).parent
WORDS = [chr(97 + i) for i in range(16)]
PLAIN = tempfile.TemporaryDirectory()
TOKENS = torch.randint(16, (8, 16), generator=torch.Generator().manual_seed(1))


def model() -> LlamaForCausalLM:
    """Of random weights, and read from a folder, whose configuration the libraries ask for."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    made = LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=64))
    made.to(torch.bfloat16).save_pretrained(PLAIN.name)
    return LlamaForCausalLM.from_pretrained(PLAIN.name)


def by_llm_compressor(folder: Path, scheme: str) -> None:
    found = model()
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="a"))
    data = Dataset.from_dict({"input_ids": TOKENS.tolist(), "attention_mask": torch.ones_like(TOKENS).tolist()})
    recipe = GPTQModifier(targets="Linear", scheme=scheme, ignore=["lm_head"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="a")
    oneshot(model=found, dataset=data, recipe=recipe, processor=tokenizer, num_calibration_samples=8, max_seq_length=16)
    found.save_pretrained(folder, save_compressed=True)


def by_modelopt(folder: Path) -> None:
    found = mtq.quantize(model(), mtq.NVFP4_DEFAULT_CFG, lambda m: m(TOKENS))
    with torch.inference_mode():
        export_hf_checkpoint(found, dtype=torch.bfloat16, export_dir=folder)


def decoded(folder: Path) -> dict[str, torch.Tensor]:
    """Weights as the library of a folder decodes them, in FP32."""
    tensors, out = load_file(folder / "model.safetensors"), {}
    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    for name, scale in tensors.items():
        of = name.removesuffix("weight_scale")
        if of == name:
            continue
        if said["quant_method"] == "modelopt":
            codes = tensors[f"{of}weight"]
            packed = NVFP4QTensor(torch.Size([len(codes), 2 * codes.shape[1]]), torch.float32, codes)
            factor = tensors[f"{of}weight_scale_2"]
            out[f"{of}weight"] = packed.dequantize(scale=scale, double_scale=factor, block_sizes={-1: 16})
        else:
            args = QuantizationArgs.model_validate(said["config_groups"]["group_0"]["weights"])
            codes, factor = tensors[f"{of}weight_packed"], tensors.get(f"{of}weight_global_scale")
            numbers = unpack_fp4_from_uint8(codes, len(codes), 2 * codes.shape[1], dtype=torch.float32)
            wide = scale.float() if factor is not None else 2.0 ** (scale.float() - 127)
            out[f"{of}weight"] = dequantize(numbers, wide, args=args, dtype=torch.float32, global_scale=factor)
    return out


if __name__ == "__main__":
    makers = {
        "compressed-nvfp4": lambda to: by_llm_compressor(to, "NVFP4"),
        "compressed-mxfp4": lambda to: by_llm_compressor(to, "MXFP4A16"),
        "modelopt-nvfp4": by_modelopt,
    }
    expected = {}
    for folder, make in makers.items():
        shutil.rmtree(HERE / folder, ignore_errors=True)
        make(HERE / folder)
        for file in (HERE / folder).iterdir():
            if file.name not in ("config.json", "hf_quant_config.json", "model.safetensors"):
                file.unlink()
        digests = {
            n: hashlib.sha256((w + 0.0).numpy().tobytes()).hexdigest() for n, w in decoded(HERE / folder).items()
        }
        expected[folder] = dict(sorted(digests.items()))
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
