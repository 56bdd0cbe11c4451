"""Weights that other libraries packed in FP4 are a start like any: to the bit as the library decodes them."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch

from fp4dse.dse import ConfigError
from fp4dse.dse.quantizers import QUANTIZERS
from fp4dse.kernels import quantize
from fp4dse.tasks import get_task
from fp4dse.tasks.language.folder import read_folder, said_of
from fp4dse.tasks.language.folder_out import write_folder
from fp4dse.tasks.language.packed import FORMATS, unpacked
from fp4dse.tasks.start.weights import read_weights
from tests.commands.running import call
from tests.tasks.language.folders import BASE, save, tensors_of

MADE = Path(__file__).parent / "packed"
"""Folders that the libraries wrote (packed/make.py)."""
EXPECTED = json.loads((MADE / "expected.json").read_text())
LEVELS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
CT, MODELOPT = (FORMATS[method][1] for method in ("compressed-tensors", "modelopt"))
NVFP4, MXFP4 = "nvfp4-pack-quantized", "mxfp4-pack-quantized"
SAID = {"quant_method": "compressed-tensors", "format": NVFP4}


def halves(codes: torch.Tensor) -> torch.Tensor:
    """Codes [N, K], two a byte, the first one below."""
    return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)


@pytest.mark.parametrize(
    ("packing", "factor", "of"),
    [(CT[NVFP4], [1536.7], lambda s, f: s / f), (MODELOPT["NVFP4"], 7.1e-5, lambda s, f: s * f)],
)
def test_every_code_under_every_scale_is_level_times_scale_in_fp32(packing, factor, of):
    scales = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()[:, None]
    codes = torch.arange(16).expand(127, 16)
    factor = torch.tensor(factor)
    tensors = {f"a.{packing.codes}": halves(codes), "a.weight_scale": scales, f"a.{packing.factor}": factor}
    found = unpacked(tensors | {"a.input_scale": torch.ones(())}, packing, "here")
    assert found.keys() == {"a.weight"}
    assert torch.equal(found["a.weight"], torch.tensor(LEVELS) * of(scales, factor))


def test_every_code_under_every_exponent_is_exact():
    """Up to 6 · 2^125, beyond which 6 is no number in FP32."""
    codes, exponents = torch.arange(16).repeat(2).expand(253, 32), torch.arange(253, dtype=torch.uint8)[:, None]
    found = unpacked({"a.weight_packed": halves(codes), "a.weight_scale": exponents}, CT[MXFP4], "here")["a.weight"]
    expected = [[level * 2.0 ** (exponent - 127) for level in LEVELS * 2] for exponent in range(253)]
    assert torch.equal(found.double(), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("name", EXPECTED)
def test_weights_are_those_that_the_library_decodes(name):
    packing = {"modelopt-nvfp4": MODELOPT["NVFP4"], "compressed-mxfp4": CT[MXFP4]}.get(name, CT[NVFP4])
    tensors = unpacked(read_weights(MADE / name / "model.safetensors"), packing, name)
    digests = {of: hashlib.sha256((tensors[of] + 0.0).numpy().tobytes()).hexdigest() for of in EXPECTED[name]}
    assert digests == EXPECTED[name]
    weights = read_folder(MADE / name, context=16).weights()
    assert torch.equal(weights["blocks.0.out.weight"], tensors["model.layers.0.self_attn.o_proj.weight"])
    assert len(weights) == 9  # embedding and head, two norms and four weights of a block, and the last norm


def test_what_is_left_out_is_said():
    assert said_of(MADE / "compressed-mxfp4") == "weights of compressed-mxfp4 are packed in FP4, and are decoded"
    for name in ("compressed-nvfp4", "modelopt-nvfp4"):
        assert str(said_of(MADE / name)).endswith("; 7 scales of activations are left out, as recipes scale them anew")
    assert said_of(MADE) is None


def test_a_command_says_it_once_and_goes_on(pair, capsys):
    assert call("weights", "fit", "language:smoke", "--from", str(pair[1]), "--method", "awq") == 2
    said = capsys.readouterr().err
    assert said.count("weights of packed are packed in FP4, and are decoded; 14 scales of activations") == 1
    assert "--method: found 'awq'" in said


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A model on the grid of NVFP4 as it is, and packed; queries, keys and values have one factor, and gate and up."""
    base, dense, packed = tmp_path_factory.mktemp("packed"), {}, {}
    joint = {"q": "qkv", "k": "qkv", "v": "qkv", "g": "gu", "u": "gu"}
    tensors = tensors_of(BASE | {"model_type": "llama"})
    for name, w in tensors.items():
        layer, _, kind = name.rpartition("_proj.weight")[0].rpartition(".")
        if not layer:
            dense[name] = packed[name] = w
            continue
        together = [of for of in joint if joint[of] == joint.get(kind[0], "")] or [kind[0]]
        names = [of for of in tensors if of.startswith(f"{layer}.") and of[len(layer) + 1] in together]
        made = quantize(torch.cat([tensors[of] for of in names]), QUANTIZERS["nvfp4"])
        first = sum(len(tensors[of]) for of in names[: names.index(name)])
        codes, scales = (of[first : first + len(w)] for of in (made.codes, made.scales))
        of = name.removesuffix("weight")
        packed |= {f"{of}weight_packed": halves(codes), f"{of}weight_scale": scales.to(torch.float8_e4m3fn)}
        packed |= {f"{of}weight_global_scale": 1 / made.tensor_scale[None], f"{of}input_global_scale": torch.ones(1)}
        dense |= {name: made.values[first : first + len(w)]}
    config = BASE | {"model_type": "llama"}
    return save(base / "dense", config, dense), save(base / "packed", config | {"quantization_config": SAID}, packed)


def test_rounded_again_weights_stay_where_the_largest_code_of_each_block_is_the_last(pair):
    """To a rounding of FP32, in which factors are divided by or multiplied with; the tensor scale of a recipe is over
    queries, keys and values, as the libraries have it."""
    dense, packed = (read_folder(of, 32).weights() for of in pair)
    for name, w in packed.items():
        torch.testing.assert_close(w, dense[name], rtol=3e-7, atol=0)
        if name.endswith(".weight") and "head" not in name:
            torch.testing.assert_close(quantize(w, QUANTIZERS["nvfp4"]).values, w, rtol=3e-7, atol=0)


def test_a_block_whose_largest_code_is_not_the_last_is_scaled_anew():
    """As GPTQ leaves some: its scale was made for 6, and the largest is 4, so that 3, 2 and 1 of 4 are no levels."""
    w = torch.tensor([6.0, *[1.0] * 15, 4.0, 3.0, 2.0, *[0.5] * 13]).view(1, 32)
    again = quantize(w, QUANTIZERS["nvfp4"]).values
    torch.testing.assert_close(again[:, :16], w[:, :16], rtol=3e-7, atol=0)
    assert (again[:, 16:] - w[:, 16:]).abs().max() > 0.1


def test_a_packed_folder_is_the_start_of_a_task_and_becomes_a_plain_folder(pair, tmp_path):
    source = tmp_path / "m"
    shutil.copytree(pair[1], source)
    (source / "hf_quant_config.json").write_text("{}")  # as of ModelOpt; config.json counts
    weights = read_folder(source, 32).weights()
    write_folder(tmp_path / "out", source, weights, {})
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()
    starts = {get_task("language", "smoke", None, str(of)).start for of in (source, tmp_path / "out")}
    assert len(starts) == 1


def test_modelopts_own_file_says_it_too(tmp_path):
    folder = tmp_path / "m"
    shutil.copytree(MADE / "modelopt-nvfp4", folder)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    name, expected = "blocks.0.mlp.down.weight", read_folder(MADE / "modelopt-nvfp4", 16).weights()
    assert torch.equal(read_folder(folder, 16).weights()[name], expected[name])


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"quant_method": "gptq"}, "quant_method: found 'gptq'; accepted: compressed-tensors, modelopt"),
        ("fp4", "quant_method: found nothing"),
        (SAID | {"format": "pack-quantized"}, f"format: found 'pack-quantized'; accepted: {NVFP4}, {MXFP4}"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "quant_algo: found 'FP8'; accepted: NVFP4, W4A16_NVFP4"),
        (SAID | {"transform_config": {"config_groups": {"R3": {}}}}, "transform_config: found 'transforms'"),
    ],
)
def test_what_is_not_decoded_is_one_line(pair, tmp_path, said, words):
    folder = tmp_path / "m"
    shutil.copytree(pair[1], folder)
    (folder / "config.json").write_text(json.dumps(BASE | {"model_type": "llama", "quantization_config": said}))
    with pytest.raises(ConfigError, match=words):
        read_folder(folder, 32)


@pytest.mark.parametrize("said", [None, "NVFP4", [1], {}])
def test_a_file_of_modelopt_without_its_format_is_one_line(tmp_path, said):
    folder = tmp_path / "m"
    shutil.copytree(MADE / "modelopt-nvfp4", folder)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": said}))
    with pytest.raises(ConfigError, match=r"hf_quant_config.json: quant_algo: found nothing; accepted: NVFP4"):
        read_folder(folder, 32)


CODES, SCALE, FACTOR = torch.zeros(4, 16, dtype=torch.uint8), torch.ones(4, 2), torch.ones(1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"a.weight_scale": None}, r"here: a\.weight_scale: found nothing; accepted: shape \[4, 2\]"),
        ({"a.weight_scale": SCALE.T}, r"a\.weight_scale: found 'shape \[2, 4\]'"),
        ({"a.weight_scale": SCALE.to(torch.uint8)}, r"a\.weight_scale: found 'torch.uint8'; accepted: FP8"),
        ({"a.weight": torch.ones(4, 32)}, r"a\.weight_packed: found 'a\.weight, too'; accepted: one of them"),
        ({"a.weight_packed": CODES[:, :0]}, r"a\.weight_packed: found '0 inputs'"),
        ({"a.weight_global_scale": torch.ones(4)}, r"a\.weight_global_scale: found 'shape \[4\]'"),
        ({"a.weight_global_scale": torch.zeros(1)}, r"a\.weight_scale: found 'NaN or infinity'"),
        ({"a.weight_packed": CODES[:, :4]}, r"a\.weight_packed: found '8 inputs'; accepted: whole blocks of 16"),
    ],
)
def test_tensors_that_do_not_fit_are_named(change, words):
    tensors = {"a.weight_packed": CODES, "a.weight_scale": SCALE, "a.weight_global_scale": FACTOR} | change
    with pytest.raises(ConfigError, match=words):
        unpacked({name: value for name, value in tensors.items() if value is not None}, CT[NVFP4], "here")
