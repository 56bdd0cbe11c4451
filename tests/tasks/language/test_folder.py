"""Decoders of others: the logits of an independent implementation, and of transformers where it is installed."""

import json
import math

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from fp4dse.dse import ConfigError, Recipe
from fp4dse.kernels import LaneNumerics
from fp4dse.tasks import Lane, get_task, train
from fp4dse.tasks.engine import Population
from fp4dse.tasks.language.folder import INDEX, read_folder
from tests.tasks.language.folders import BASE, CONFIGS, save, tensors_of

TOKENS = torch.randint(256, (3, 32), generator=torch.Generator().manual_seed(1))


def scaled(frequency: torch.Tensor, said: dict | None) -> torch.Tensor:
    """Frequencies as in Meta's code for Llama 3.1, one by one."""
    out = []
    for f in frequency.tolist() if said else ():
        turns = said["original_max_position_embeddings"] * f / (2 * math.pi)
        low, high, factor = said["low_freq_factor"], said["high_freq_factor"], said["factor"]
        smooth = (turns - low) / (high - low)
        out.append(f if turns > high else f / factor if turns < low else (1 - smooth) * f / factor + smooth * f)
    return torch.tensor(out, dtype=torch.float64) if said else frequency


def logits_of(config: dict, w: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """The model by its definition, in float64, without anything of ours."""
    w = {name: value.double() for name, value in w.items()}
    heads, eps = config["num_attention_heads"], config["rms_norm_eps"]
    kv, size = config.get("num_key_value_heads", heads), config.get("head_dim", config["hidden_size"] // heads)
    theta = config.get("rope_theta") or config.get("rope_parameters", {}).get("rope_theta", 1e4)
    frequency = scaled(theta ** -(torch.arange(0, size, 2).double() / size), config.get("rope_scaling"))
    angle = torch.outer(torch.arange(tokens.shape[1]), frequency).repeat(1, 2)

    def norm(x, name):
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * w[f"{name}.weight"]

    def turned(x):
        a, b = x.chunk(2, -1)
        return x * angle.cos() + torch.cat([-b, a], -1) * angle.sin()

    def projected(x, name):
        return linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    h = w["model.embed_tokens.weight"][tokens]
    for i in range(config["num_hidden_layers"]):
        of = f"model.layers.{i}."
        x = norm(h, f"{of}input_layernorm")
        counts = {"q": heads, "k": kv, "v": kv}
        parts = {n: projected(x, f"{of}self_attn.{n}_proj").unflatten(-1, (c, size)) for n, c in counts.items()}
        if config["model_type"] == "qwen3":
            parts |= {n: norm(parts[n], f"{of}self_attn.{n}_norm") for n in "qk"}
        q, k, v = (parts[n].transpose(1, 2) for n in "qkv")
        mixed = scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True, enable_gqa=True)
        h = h + projected(mixed.transpose(1, 2).flatten(2), f"{of}self_attn.o_proj")
        x = norm(h, f"{of}post_attention_layernorm")
        inside = silu(projected(x, f"{of}mlp.gate_proj")) * projected(x, f"{of}mlp.up_proj")
        h = h + projected(inside, f"{of}mlp.down_proj")
    return linear(norm(h, "model.norm"), w.get("lm_head.weight", w["model.embed_tokens.weight"]))


def ours(task, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of two lanes, which are the same."""
    model = task.model({k: v.expand(2, *v.shape[1:]).clone() for k, v in task.preview([0]).init.items()},
                       LaneNumerics([Recipe.named("bf16")] * 2, [0, 1]))  # fmt: skip
    with torch.no_grad():
        logits, _ = model(tokens.expand(2, -1, -1).contiguous())
    assert torch.equal(logits[0], logits[1])
    return logits[0]


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_the_definition(in_float32, tmp_path, name):
    config = BASE | CONFIGS[name]
    tensors = tensors_of(config)
    task = get_task("language", "smoke", None, str(save(tmp_path / "m", config, tensors)))
    expected = logits_of(config, tensors, TOKENS)
    assert (ours(task, TOKENS) - expected).abs().max() < 2e-5 * expected.abs().max()


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers(in_float32, tmp_path, name):
    library = pytest.importorskip("transformers")
    config = BASE | CONFIGS[name]
    made = library.AutoConfig.for_model(**config)
    torch.manual_seed(0)
    model = library.AutoModelForCausalLM.from_config(made).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.3)
        expected = model(TOKENS).logits
    model.save_pretrained(tmp_path / "m")
    task = get_task("language", "smoke", None, str(tmp_path / "m"))
    assert (ours(task, TOKENS) - expected).abs().max() < 5e-5 * expected.abs().max()


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """The folder of a model with grouped heads, norms and a tied head."""
    config = BASE | CONFIGS["qwen3, tied"]
    return save(tmp_path_factory.mktemp("folder") / "qwen", config, tensors_of(config))


def test_gradients_of_a_tied_head_and_grouped_heads_are_those_of_torch(in_float32, qwen):
    config, tensors = json.loads((qwen / "config.json").read_text()), tensors_of(BASE | CONFIGS["qwen3, tied"])
    theirs = {name: value.double().requires_grad_() for name, value in tensors.items()}
    weights = torch.randn(3, 32, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    (logits_of(config, theirs, TOKENS) * weights).sum().backward()
    task = get_task("language", "smoke", None, str(qwen))
    model = task.model(dict(task.preview([0]).init), LaneNumerics([Recipe.named("bf16")], [0]))
    (model(TOKENS[None])[0] * weights).sum().backward()
    block, of = model.blocks[1], "model.layers.1.self_attn."
    qkv = torch.cat([theirs[f"{of}{name}_proj.weight"].grad for name in "qkv"])
    for found, expected in (
        (model.embed.grad, theirs["model.embed_tokens.weight"].grad),
        (block.qkv.weight.grad, qkv),
        (block.q_norm.grad, theirs[f"{of}q_norm.weight"].grad),
        (block.k_norm.grad, theirs[f"{of}k_norm.weight"].grad),
    ):
        assert (found[0] - expected).abs().max() < 1e-4 * expected.abs().max()


def test_a_population_trains_from_a_folder_and_lanes_are_independent(qwen):
    task = msgspec.structs.replace(get_task("language", "smoke+bf16", None, str(qwen)), steps=3)
    lanes = [Lane(Recipe.named(name), 1e-3, seed) for name in ("nvfp4", "nvfp4-sr") for seed in (0, 1)]
    together = train(task, lanes).lanes
    assert [lane.val_loss for lane in together[2:3]] == [lane.val_loss for lane in train(task, lanes[2:3]).lanes]
    assert task.parameters == task.size - 256 * 32
    population = Population(task, lanes, "cpu")
    assert population.model.head.weight is population.model.embed
    assert population.optimizer.flat.shape == (4, task.size)


def test_weights_in_several_files_are_one_model(qwen, tmp_path):
    config, tensors = json.loads((qwen / "config.json").read_text()), tensors_of(BASE | CONFIGS["qwen3, tied"])
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    names, index = sorted(tensors), {}
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name].clone() for name in part}, folder / f"model-{number}.safetensors")
        index |= dict.fromkeys(part, f"model-{number}.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": index}))
    save_file({"else": torch.ones(2)}, folder / "other.safetensors")
    starts = {get_task("language", "smoke", None, str(of)).start for of in (qwen, folder)}
    assert len(starts) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gpt2"}, "model_type: found 'gpt2'; accepted: llama, mistral, qwen2, qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act: found 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type: found 'yarn'; accepted: default, llama3"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "factor: found nothing; accepted: a number"),
        ({"use_sliding_window": True, "sliding_window": 8}, "sliding_window: found 8; accepted: 32 or more"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: found 3; accepted: a divisor"),
        ({"vocab_size": "many"}, "vocab_size: found 'many'"),
        ({"num_hidden_layers": 3}, r"model\.layers\.2\.input_layernorm\.weight: found nothing"),
        ({"num_hidden_layers": 1}, r"model\.layers\.1\..*: found 'shape"),
        ({"hidden_size": 48}, r"embed: found 'shape \[256, 32\]'; accepted: shape \[256, 48\]"),
        ({"tie_word_embeddings": False}, r"lm_head\.weight: found nothing"),
        ({"vocab_size": 300}, "a folder with the tokenizer.json of the model, or tokens"),
    ],
)
def test_what_the_decoder_cannot_express_is_one_line(qwen, tmp_path, change, words):
    config = BASE | CONFIGS["qwen3, tied"] | change
    folder = save(tmp_path / "m", config, tensors_of(BASE | CONFIGS["qwen3, tied"]))
    with pytest.raises(ConfigError, match=words):
        get_task("language", "smoke", None, str(folder))


def test_a_folder_is_for_language_and_its_own_tokens(qwen, tmp_path):
    for asked, words in (
        (("vision", "smoke", None, str(qwen)), "folders are for language and finetune"),
        (("language", "smoke", "grammar", str(qwen)), "text for the tokenizer of qwen"),
        (("language", "nope", None, str(qwen)), "preset of language"),
        (("language", "smoke", None, str(tmp_path)), "config.json that can be read"),
    ):
        with pytest.raises(ConfigError, match=words):
            get_task(*asked)
    (tmp_path / "t.bin").write_bytes(bytes(4000))
    (tmp_path / "t.json").write_text('{"dtype": "uint16", "vocabulary": 300, "bytes_per_token": 4.0}')
    with pytest.raises(ConfigError, match=r"tokens below 256, the vocabulary of qwen \(found 300\)"):
        get_task("language", "smoke", str(tmp_path / "t.bin"), str(qwen))


def test_text_goes_through_the_tokenizer_of_the_folder(qwen, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    config = BASE | CONFIGS["qwen3, tied"]
    folder = save(tmp_path / "m", config, tensors_of(config))
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(folder / "tokenizer.json"))
    assert read_folder(folder, 32).tokenizer == folder / "tokenizer.json"
    (tmp_path / "t.txt").write_text("\n\n".join("a b c " * 30 + str(i) for i in range(300)))
    task = get_task("language", "smoke", str(tmp_path / "t.txt"), str(folder))
    problem = task.preview([0])
    assert set(problem.train_x.unique().tolist()) <= {0, 1, 2}
    assert problem.init["embed"].shape == (1, 256, 32)
    assert task.digest != get_task("language", "smoke", str(tmp_path / "t.txt"), str(qwen)).digest
