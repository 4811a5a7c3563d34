"""HF folders: the same logits as transformers on the same weights, in and out again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from meshwright.checkpoint.hf import export_hf, import_hf, load_hf
from meshwright.model.decoder import Decoder
from meshwright.model.init import init_whole_
from meshwright.spec import ModelSpec, UserError, load

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

LLAMA: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "tie_word_embeddings": False, "initializer_range": 0.1,
}  # fmt: skip
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 32}  # fmt: skip
GPT2 = {
    "vocab_size": 101,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 96,
    "initializer_range": 0.1,
}
MIXTRAL = LLAMA | {"num_local_experts": 4}
QWEN3_MOE = LLAMA | {
    "head_dim": 16, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}  # fmt: skip
DEEPSEEK = LLAMA | {
    "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
    "n_shared_experts": 2, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "kv_lora_rank": 20,
    "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", LLAMA),
    "llama tied": ("Llama", LLAMA | {"tie_word_embeddings": True}),
    "llama biases, wide heads": ("Llama", LLAMA | {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    "llama linear rope": (
        "Llama", LLAMA | {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "llama llama3 rope": ("Llama", LLAMA | {"rope_parameters": LLAMA3_ROPE}),
    "qwen3": ("Qwen3", LLAMA | {"head_dim": 16}),
    "qwen3 tied, biases": (
        "Qwen3", LLAMA | {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True}),
    "mistral window": ("Mistral", LLAMA | {"sliding_window": 7}),
    "mistral": ("Mistral", LLAMA | {"sliding_window": None}),
    "llama yarn": ("Llama", LLAMA | {"rope_parameters": YARN}),
    "llama yarn, not truncated": (
        "Llama", LLAMA | {"rope_parameters": YARN | {"truncate": False, "attention_factor": 1.5,
                                                     "beta_fast": 16, "beta_slow": 2}}),
    "mixtral": ("Mixtral", MIXTRAL),
    "mixtral window, tied": ("Mixtral", MIXTRAL | {"sliding_window": 7, "tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3Moe", QWEN3_MOE),
    "qwen3_moe biases, dense first": (
        "Qwen3Moe", QWEN3_MOE | {"attention_bias": True, "mlp_only_layers": [0], "norm_topk_prob": False}),
    "qwen3_moe every second": ("Qwen3Moe", QWEN3_MOE | {"decoder_sparse_step": 2}),
    "deepseek_v3": ("DeepseekV3", DEEPSEEK),
    "deepseek_v3 yarn": (
        "DeepseekV3", DEEPSEEK | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.0}}),
    "deepseek_v3 without a latent of queries": (
        "DeepseekV3", DEEPSEEK | {"q_lora_rank": None, "norm_topk_prob": False, "rms_norm_eps": 1e-3}),
    "gpt2": ("GPT2", GPT2),
    "gpt2 erf, narrow": ("GPT2", GPT2 | {"activation_function": "gelu", "n_inner": 80}),
    "gpt2 untied": ("GPT2", GPT2 | {"tie_word_embeddings": False}),
}  # fmt: skip
TOKENS = torch.randint(0, 101, (2, 48), generator=torch.Generator().manual_seed(0))


def save_theirs(folder: Path, family: str, fields: dict[str, Any], **how: Any) -> Any:
    """A model of transformers with random weights (biases and norms too), saved in `folder`."""
    torch.manual_seed(0)
    name = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    model = getattr(transformers, name)(getattr(transformers, f"{family}Config")(**fields)).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.2, 0.2)
    model.save_pretrained(folder, **how)
    return model


def their_logits(folder: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(TOKENS).logits


def same_files(a: Path, b: Path) -> None:
    ours, theirs = (
        {k: v for f in sorted(p.glob("*.safetensors")) for k, v in load_file(f).items()} for p in (a, b)
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    model = save_theirs(tmp_path, *CASES[case])
    decoder = load_hf(tmp_path)
    assert not decoder.training
    with torch.no_grad():
        torch.testing.assert_close(decoder(TOKENS), model(TOKENS).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "sharded"])
@pytest.mark.parametrize("case", CASES)
def test_import_then_export_changes_nothing(case: str, sharded: bool, tmp_path: Path) -> None:
    how = {"max_shard_size": "40KB"} if sharded else {}
    model = save_theirs(tmp_path / "theirs", *CASES[case], **how)
    spec, weights = import_hf(tmp_path / "theirs")
    export_hf(tmp_path / "ours", spec, dict(weights), max_shard_bytes=40_000 if sharded else 10**9)
    assert (len(list((tmp_path / "ours").glob("*.safetensors"))) > 1) == sharded
    same_files(tmp_path / "ours", tmp_path / "theirs")
    with torch.no_grad():
        assert torch.equal(their_logits(tmp_path / "ours"), model(TOKENS).logits)
    again, _ = import_hf(tmp_path / "ours")
    ignored = {"hf"}
    assert again.model_dump(exclude=ignored) == spec.model_dump(exclude=ignored)


@pytest.mark.parametrize("preset", ["llama", "qwen3", "mistral", "gpt2"])
def test_our_own_models_open_in_transformers(preset: str, tmp_path: Path) -> None:
    shape = {
        "layers": 2,
        "hidden": 48,
        "ffn": 64,
        "heads": 4,
        "head_dim": 12,
        "vocab_size": 101,
        "init_std": 0.1,
    }
    base = {"llama": "small", "qwen3": "qwen3-8b", "mistral": "small", "gpt2": "gpt3-175b"}[preset]
    kv_heads = 4 if preset == "gpt2" else 2
    spec = ModelSpec(preset=base, family=preset, kv_heads=kv_heads, **shape)
    decoder = init_whole_(Decoder(spec), seed=0)
    export_hf(tmp_path / "out", spec, dict(decoder.named_parameters()))
    with torch.no_grad():
        torch.testing.assert_close(their_logits(tmp_path / "out"), decoder(TOKENS), rtol=0, atol=1e-5)
        assert torch.equal(load_hf(tmp_path / "out")(TOKENS), decoder(TOKENS))


def train_tokenizer(path: Path) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the cat sat on the mat, naïvely " * 50], trainer)
    tokenizer.save(str(path))
    return tokenizer


def test_the_tokenizer_goes_along(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(tmp_path / "tokenizer.json")
    spec = ModelSpec(preset="tiny", layers=1, vocab_size=300)
    decoder = init_whole_(Decoder(spec), seed=0)
    parameters = dict(decoder.named_parameters())
    export_hf(tmp_path / "out", spec, parameters, tmp_path / "tokenizer.json", torch.bfloat16)
    opened = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "the naïve cat\n\n  sat"
    assert opened.encode(text, add_special_tokens=False) == tokenizer.encode(text).ids
    assert opened.decode(opened.encode(text)) == text
    end = tokenizer.token_to_id("<|endoftext|>")
    assert opened.eos_token_id == end
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.generation_config.eos_token_id == end
    assert model.dtype == torch.bfloat16
    assert load_hf(tmp_path / "out").embed.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("named", "eos", "bos"),
    [
        ({"eos_token": "<stop>", "bos_token": {"content": "<go>", "lstrip": False}}, "<stop>", "<go>"),
        ({"eos_token": {"content": "<stop>"}, "bos_token": None}, "<stop>", None),
        ({"eos_token": ["<stop>"], "bos_token": 3}, "</s>", None),
        ({"eos_token": "<stop>", "model_max_length": 7}, "<stop>", None),
        (None, "</s>", None),
    ],
    ids=["both", "no bos", "wrong types", "a length", "no config"],
)
def test_the_ends_are_those_of_the_tokenizer_config(
    named: dict[str, Any] | None, eos: str, bos: str | None, tmp_path: Path
) -> None:
    words = {"<unk>": 0, "<go>": 1, "<stop>": 2, "</s>": 3, "cat": 4}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.add_special_tokens(["<unk>", "<go>", "<stop>", "</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    beside = tmp_path / "tokenizer_config.json"
    if named is not None:
        beside.write_text(json.dumps({"chat_template": "{{ messages }}", **named}))
    spec = ModelSpec(preset="tiny", layers=1)
    parameters = dict(init_whole_(Decoder(spec), seed=0).named_parameters())
    export_hf(tmp_path / "out", spec, parameters, tmp_path / "tokenizer.json")
    for name in ("config.json", "generation_config.json"):
        written = json.loads((tmp_path / "out" / name).read_text())
        assert written["eos_token_id"] == words[eos]
        assert written["bos_token_id"] == (None if bos is None else words[bos])
    copied = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    if named is not None:
        assert copied == {"model_max_length": spec.max_seq_len} | json.loads(beside.read_text())
    else:
        assert (copied["eos_token"], copied["model_max_length"]) == (eos, spec.max_seq_len)


def test_the_beginning_may_be_what_the_post_processor_puts_first(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "<go>": 1, "</s>": 2}, unk_token="<unk>"))
    template = processors.TemplateProcessing("<go> $A </s>", special_tokens=[("<go>", 1), ("</s>", 2)])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(), template])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    spec = ModelSpec(preset="tiny", layers=1)
    parameters = dict(init_whole_(Decoder(spec), seed=0).named_parameters())
    export_hf(tmp_path / "out", spec, parameters, tmp_path / "tokenizer.json")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["bos_token_id"], written["eos_token_id"]) == (1, 2)


def test_an_end_that_the_tokenizer_lacks_is_named(tmp_path: Path) -> None:
    train_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<stop>"}')
    spec = ModelSpec(preset="tiny", layers=1)
    parameters = dict(init_whole_(Decoder(spec), seed=0).named_parameters())
    with pytest.raises(UserError, match=r"no end-of-document token '<stop>'"):
        export_hf(tmp_path / "out", spec, parameters, tmp_path / "tokenizer.json")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    spec = ModelSpec(preset="tiny", layers=1)
    parameters = dict(init_whole_(Decoder(spec), seed=0).named_parameters())
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "out", tmp_path / ("x" * 300)):
        with pytest.raises(UserError, match="cannot be written"):
            export_hf(folder, spec, parameters)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    spec = ModelSpec(preset="tiny", layers=1)
    parameters = dict(init_whole_(Decoder(spec), seed=0).named_parameters())
    out = tmp_path / "out"
    out.mkdir()
    export_hf(out, spec, parameters)  # an empty one is taken
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(UserError, match="not an empty folder"):
        export_hf(out, spec, parameters)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_a_failed_export_leaves_nothing(tmp_path: Path) -> None:
    spec = ModelSpec(preset="tiny", layers=1)
    parameters = dict(init_whole_(Decoder(spec), seed=0).named_parameters())
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(UserError, match=r"broken\.json"):
        export_hf(tmp_path / "out", spec, parameters, tmp_path / "broken.json")
    for wrong, name in (
        ({k: v for k, v in parameters.items() if k != "head.norm.weight"}, r"head\.norm\.weight is missing"),
        (parameters | {"embed.weight": torch.zeros(3, 2)}, r"embed\.weight has shape \[3, 2\]"),
        (parameters | {"extra.weight": torch.zeros(1)}, r"extra\.weight"),
    ):
        with pytest.raises(UserError, match=name):
            export_hf(tmp_path / "out", spec, wrong)
    assert [path.name for path in tmp_path.iterdir()] == ["broken.json"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
            r"lacks the tensor model\.layers\.1\.mlp\.up_proj",
        ),
        (lambda t: t.update({"model.layers.9.x": torch.zeros(1)}), r"has a tensor model\.layers\.9\.x"),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(5)}),
            r"model\.norm\.weight .* has shape \[5\]",
        ),
    ],
)
def test_wrong_tensors_are_named(damage: Any, message: str, tmp_path: Path) -> None:
    save_theirs(tmp_path, "Llama", LLAMA)
    tensors = load_file(tmp_path / "model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=message):
        load_hf(tmp_path)


def test_unreadable_folders_are_named(tmp_path: Path) -> None:
    save_theirs(tmp_path, "Llama", LLAMA, max_shard_size="40KB")
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    first = next(iter(content["weight_map"]))
    for name, message in (("../x.safetensors", "outside of its folder"), ("gone.safetensors", "is not in")):
        index.write_text(json.dumps(content | {"weight_map": content["weight_map"] | {first: name}}))
        with pytest.raises(UserError, match=message):
            load_hf(tmp_path)
    index.write_text("[]")
    with pytest.raises(UserError, match="not a JSON object"):
        load_hf(tmp_path)
    index.write_text('{"weight_map": {"a": 3}}')
    with pytest.raises(UserError, match="has no weight_map"):
        load_hf(tmp_path)
    index.unlink()
    with pytest.raises(UserError, match="has neither"):
        load_hf(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(UserError, match="not a readable safetensors"):
        load_hf(tmp_path)
    with pytest.raises(UserError, match="there is no file"):
        load_hf(tmp_path / "nowhere")


def test_what_no_family_computes_is_not_exported(tmp_path: Path) -> None:
    spec = ModelSpec(preset="tiny", layers=1, qk_norm=True)
    parameters = dict(init_whole_(Decoder(spec), seed=0).named_parameters())
    with pytest.raises(UserError, match=r"model\.qk_norm"):
        export_hf(tmp_path / "out", spec, parameters)
    assert not any(tmp_path.iterdir())


def test_exported_weights_may_be_read_by_whoever_reads_the_rest(tmp_path: Path) -> None:
    decoder = init_whole_(Decoder(load().model), 0)
    export_hf(tmp_path / "hf", decoder.spec, dict(decoder.named_parameters()))
    modes = {path.stat().st_mode for path in (tmp_path / "hf").iterdir()}
    assert len(modes) == 1
