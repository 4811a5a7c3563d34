"""HF folders: the same logits as transformers on the same weights, in and out again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_models import CASES, LLAMA, TOKENS, TYPES, read_whole, same_files, save_theirs, their_logits
from meshwright.exchange.hf import export_hf, import_hf, load_hf
from meshwright.exchange.hf_config import write_hf_config
from meshwright.exchange.hf_state_dict import hf_tensors
from meshwright.infer import generate
from meshwright.model.decoder import Decoder
from meshwright.model.init import init_whole_
from meshwright.spec import ModelSpec, UserError

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.mark.parametrize("case", CASES)
def test_logits_and_generation_equal_transformers(case: str, tmp_path: Path) -> None:
    model = save_theirs(tmp_path, *CASES[case])
    decoder = load_hf(tmp_path)
    assert not decoder.training
    with torch.no_grad():
        torch.testing.assert_close(decoder(TOKENS), model(TOKENS).logits, rtol=0, atol=1e-5)
    prompt = TOKENS[:, :8]
    theirs = model.generate(prompt, max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(generate(decoder, prompt, 16), theirs[:, 8:])


@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_transformers(case: str, tmp_path: Path) -> None:
    """Within 1e-5 of the largest element of each."""
    model, (spec, _) = save_theirs(tmp_path, *CASES[case]), import_hf(tmp_path)
    decoder, targets = load_hf(tmp_path).requires_grad_(), TOKENS.roll(-1, 1)
    decoder.loss(TOKENS, targets).backward()
    logits = model(TOKENS).logits.flatten(0, 1)
    torch.nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum").backward()
    ours = {name: parameter.grad for name, parameter in decoder.named_parameters()}
    theirs = {name: parameter.grad for name, parameter in model.named_parameters()}
    compared = 0
    for piece in hf_tensors(spec, stacked=True):
        if piece.parameters[0] in ours:  # a router's bias has no gradient
            wanted = theirs[piece.hf]
            difference = (piece.join(ours, torch.float32) - wanted).abs().max()
            # A bias of keys without positions changes nothing: its gradient is rounding alone.
            assert difference <= 1e-5 * wanted.abs().max() + 1e-6, piece.hf
            compared += 1
    assert compared == len(theirs)


def test_a_mistral_with_types_of_layers_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    fields = LLAMA | {"head_dim": 16, "sliding_window": 7, "layer_types": TYPES}
    save_theirs(tmp_path / "theirs", "Ministral", fields)
    path = tmp_path / "theirs" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "mistral"}))
    spec, tensors = read_whole(tmp_path / "theirs")
    assert [kind.window for kind in spec.layer_kinds] == [7, None, 7]
    export_hf(tmp_path / "ours", spec, tensors)
    with torch.no_grad():
        ours = load_hf(tmp_path / "theirs")(TOKENS)
    for folder in ("theirs", "ours"):
        torch.testing.assert_close(ours, their_logits(tmp_path / folder), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"family": "mixtral", "layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
        ({"family": "llama"}, "sliding_window"),
        ({"family": "qwen3", "rope_local_base_freq": 1e3}, "rope_local_base_freq"),
    ],
)
def test_windows_that_a_family_does_not_compute_are_refused(fields: dict[str, Any], message: str) -> None:
    types = ["sliding_attention", "full_attention"]
    experts = {"moe": {"experts": 4, "top_k": 2, "ffn": 64}} if fields["family"] == "mixtral" else {}
    qwen = {"qk_norm": True} if fields["family"] == "qwen3" else {}
    given = {"preset": "tiny", "sliding_window": 8, "layer_types": types} | experts | qwen | fields
    with pytest.raises(UserError, match=rf"model\.{message}: HF's {fields['family']} does not compute"):
        write_hf_config(ModelSpec.model_validate(given), "float32")


@pytest.mark.parametrize(
    ("case", "sharded"),
    [
        pytest.param(
            *(case, sharded),
            id=f"{case}-{'sharded' if sharded else 'one file'}",
            marks=pytest.mark.full if number % 2 == sharded else (),
        )
        for number, case in enumerate(CASES)
        for sharded in (False, True)
    ],
)
def test_import_then_export_changes_nothing(case: str, sharded: bool, tmp_path: Path) -> None:
    how = {"max_shard_size": "40KB"} if sharded else {}
    model = save_theirs(tmp_path / "theirs", *CASES[case], **how)
    spec, tensors = read_whole(tmp_path / "theirs")
    export_hf(tmp_path / "ours", spec, tensors, max_shard_bytes=40_000 if sharded else 10**9)
    assert (len(list((tmp_path / "ours").glob("*.safetensors"))) > 1) == sharded
    same_files(tmp_path / "ours", tmp_path / "theirs")
    with torch.no_grad():
        assert torch.equal(their_logits(tmp_path / "ours"), model(TOKENS).logits)
    again, _ = import_hf(tmp_path / "ours")
    ignored = {"hf", "weights"}
    assert again.model_dump(exclude=ignored) == spec.model_dump(exclude=ignored)


SHAPE = {
    "layers": 2, "hidden": 48, "ffn": 64, "heads": 4, "kv_heads": 4, "head_dim": 12, "vocab_size": 101,
    "init_std": 0.1,
}  # fmt: skip
OURS: dict[str, dict[str, Any]] = {
    "llama": {"preset": "small", "kv_heads": 2},
    "qwen3": {"preset": "qwen3-8b", "kv_heads": 2},
    "mistral": {"preset": "small", "kv_heads": 2},
    "qwen2": {"preset": "small", "kv_heads": 2, "qkv_bias": True},
    "smollm3": {"preset": "small", "kv_heads": 2, "rope_layers": [True, False]},
    "granite": {"preset": "small", "embedding_scale": 3.0, "attention_scale": 0.2, "logit_scale": 0.125},
    "phi3": {"preset": "small", "rope_dim": 6, "sliding_window": 9},
    "starcoder2": {
        "preset": "small",
        "norm": "layernorm",
        "activation": "gelu_tanh",
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
    },
    "gemma3_text": {
        "preset": "small",
        "norm_placement": "both",
        "norm_unit_offset": True,
        "qk_norm": True,
        "activation": "geglu_tanh",
        "embedding_scale": 48**0.5,
        "attention_scale": 0.25,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_local_base_freq": 100.0,
    },
    "gemma2": {
        "preset": "small",
        "norm_placement": "both",
        "norm_unit_offset": True,
        "activation": "geglu_tanh",
        "embedding_scale": 48**0.5,
        "attention_scale": 0.25,
        "attention_softcap": 5.0,
        "logit_softcap": 3.0,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "olmo3": {
        "preset": "small",
        "norm_placement": "post",
        "qk_norm": True,
        "qk_norm_over": "all",
        "sliding_window": 9,
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_scaling": {"kind": "yarn", "factor": 4.0, "original_max_seq_len": 32},
        "rope_local_base_freq": 10000.0,
    },
    "glm4": {"preset": "small", "kv_heads": 2, "norm_placement": "both", "rope_dim": 6, "qkv_bias": True},
    "cohere2": {
        "preset": "small",
        "parallel_block": True,
        "norm": "layernorm",
        "norm_bias": False,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_layers": [True, False],
    },
    "olmo2": {"preset": "small", "norm_placement": "post", "qk_norm": True, "qk_norm_over": "all"},
    "gpt2": {"preset": "gpt3-175b"},
    "mixtral": {"preset": "mixtral-8x7b", "kv_heads": 2, "moe": {"ffn": 64}},
    "qwen3_moe": {"preset": "qwen3-30b-a3b", "kv_heads": 2, "moe": {"experts": 8, "ffn": 32}},
    "olmoe": {"preset": "mixtral-8x7b", "qk_norm": True, "qk_norm_over": "all", "moe": {"ffn": 64}},
    "qwen2_moe": {
        "preset": "qwen3-30b-a3b",
        "qk_norm": False,
        "qkv_bias": True,
        "moe": {"experts": 8, "ffn": 32, "shared_ffn": 40, "shared_gate": True},
    },
    "glm4_moe": {
        "preset": "qwen3-30b-a3b",
        "kv_heads": 2,
        "rope_dim": 6,
        "moe": {
            "experts": 8,
            "ffn": 32,
            "shared_ffn": 64,
            "router": "sigmoid",
            "bias": True,
            "dense_first": 1,
            "aux_loss": 0.0,
        },
    },
    "deepseek_v2": {
        "preset": "deepseek-v3",
        "moe": {
            "experts": 16,
            "ffn": 32,
            "shared_ffn": 64,
            "dense_first": 1,
            "router": "softmax",
            "bias": False,
            "renormalise": False,
            "group_score": "max",
        },
        "mla": {"q_rank": 24, "kv_rank": 16, "rope_dim": 4, "v_dim": 10},
        "rope_scaling": None,
    },
    "gpt_oss": {
        "preset": "mixtral-8x7b",
        "kv_heads": 2,
        "qkv_bias": True,
        "out_bias": True,
        "attention_sinks": True,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"],
        "moe": {"ffn": 64, "router_bias": True, "expert_bias": True, "activation": "clamped_swiglu"},
    },
    "granitemoe": {
        "preset": "mixtral-8x7b",
        "attention_scale": 0.2,
        "residual_scale": 0.5,
        "moe": {"ffn": 64},
    },
    "deepseek_v3": {
        "preset": "deepseek-v3",
        "moe": {"experts": 16, "ffn": 32, "shared_ffn": 64, "dense_first": 1},
        "mla": {"q_rank": 24, "kv_rank": 16, "rope_dim": 4, "v_dim": 10},
        "rope_scaling": {"kind": "yarn", "factor": 4, "original_max_seq_len": 16, "mscale_all_dim": 0.5},
    },
}


@pytest.mark.parametrize("family", OURS)
def test_our_own_models_open_in_transformers(family: str, tmp_path: Path) -> None:
    spec = ModelSpec.model_validate({**SHAPE, "family": family, **OURS[family]})
    decoder = init_whole_(Decoder(spec), seed=0)
    for bias in decoder.balance_biases().values():
        bias.uniform_(-0.2, 0.2)
    export_hf(tmp_path / "out", spec, decoder.tensors())
    with torch.no_grad():
        torch.testing.assert_close(their_logits(tmp_path / "out"), decoder(TOKENS), rtol=0, atol=1e-5)
        assert torch.equal(load_hf(tmp_path / "out")(TOKENS), decoder(TOKENS))
    again, _ = import_hf(tmp_path / "out")
    assert again.model_dump(exclude={"hf", "preset", "weights"}) == spec.model_dump(
        exclude={"hf", "preset", "weights"}
    )


@pytest.mark.parametrize("family", ["gemma3_text", "granite"])
def test_the_usual_factor_of_scores_is_written_where_files_have_one(family: str, tmp_path: Path) -> None:
    fields = {**SHAPE, **OURS[family], "family": family, "attention_scale": None}
    spec = ModelSpec.model_validate(fields)
    decoder = init_whole_(Decoder(spec), seed=0)
    export_hf(tmp_path / "out", spec, decoder.tensors())
    with torch.no_grad():
        torch.testing.assert_close(their_logits(tmp_path / "out"), decoder(TOKENS), rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", ["llama tied", "qwen3 tied, biases", "gpt2"])
@pytest.mark.parametrize("form", ["base model", "head alone"])
def test_forms_of_a_tied_model_that_transformers_reads(case: str, form: str, tmp_path: Path) -> None:
    """A base model's names have no prefix, and a tied matrix may be there as the head's alone."""
    model = save_theirs(tmp_path, *CASES[case])
    if form == "base model":
        (model.transformer if case == "gpt2" else model.model).save_pretrained(tmp_path)
        names = load_file(tmp_path / "model.safetensors").keys()
        assert not any(name.startswith(("model.", "transformer.", "lm_head.")) for name in names)
    else:
        tensors = load_file(tmp_path / "model.safetensors")
        embedding = "transformer.wte.weight" if case == "gpt2" else "model.embed_tokens.weight"
        tensors["lm_head.weight"] = tensors.pop(embedding)
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with torch.no_grad():
        ours = load_hf(tmp_path)(TOKENS)
        torch.testing.assert_close(ours, model(TOKENS).logits, rtol=0, atol=1e-5)
        torch.testing.assert_close(ours, their_logits(tmp_path), rtol=0, atol=1e-5)


SPELLINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "all layers are full": ("mistral window", {"layer_types": ["full_attention"] * 3}),
    "all layers slide": ("mistral window", {"layer_types": ["sliding_attention"] * 3}),
    "kinds of layers are null": ("mistral window", {"layer_types": None}),
    "kinds of layers of a llama": ("llama", {"layer_types": ["full_attention"] * 3}),
    "swish": ("llama", {"hidden_act": "swish"}),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_other_spellings_of_a_config_are_read_as_transformers_does(name: str, tmp_path: Path) -> None:
    case, changed = SPELLINGS[name]
    save_theirs(tmp_path, *CASES[case])
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with torch.no_grad():
        torch.testing.assert_close(load_hf(tmp_path)(TOKENS), their_logits(tmp_path), rtol=0, atol=1e-5)


def test_an_adapter_beside_weights_is_told(tmp_path: Path) -> None:
    save_theirs(tmp_path, *CASES["llama"])
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.warns(UserWarning, match="holds an adapter of PEFT beside the model's weights, which is not"):
        import_hf(tmp_path)


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 32},
    "base alone": {"rope_type": "default", "rope_theta": 7.0},
}  # fmt: skip
BESIDE: dict[str, dict[str, Any]] = {
    "alone": {},
    "beside another": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}},
    "beside a base": {"rope_theta": 500.0},
    "beside a length": {"original_max_position_embeddings": 16},
    "all": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        "rope_theta": 300.0,
    },
}


@pytest.mark.parametrize("own_base", [False, True], ids=["", "with a base"])
@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("kind", ROPES)
def test_rope_scaling_is_read_as_transformers_does(
    kind: str, beside: str, own_base: bool, tmp_path: Path
) -> None:
    save_theirs(tmp_path, "Llama", LLAMA)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    scaling = ROPES[kind] | ({"rope_theta": 50.0} if own_base else {})
    path.write_text(json.dumps(config | BESIDE[beside] | {"rope_scaling": scaling}))
    with torch.no_grad():
        torch.testing.assert_close(load_hf(tmp_path)(TOKENS), their_logits(tmp_path), rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", ["llama tied", "gpt2"])
def test_a_tied_head_that_differs_is_refused(case: str, tmp_path: Path) -> None:
    """An equal one is read as none; with tie_word_embeddings false a model has both."""
    model = save_theirs(tmp_path, *CASES[case])
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    embedding = "transformer.wte.weight" if case == "gpt2" else "model.embed_tokens.weight"
    tensors["lm_head.weight"] = tensors[embedding].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    with torch.no_grad():
        torch.testing.assert_close(load_hf(tmp_path)(TOKENS), model(TOKENS).logits, rtol=0, atol=1e-5)
    tensors["lm_head.weight"][3, 5] += 1
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lm_head.weight has other values than .*; set tie_word_embeddings"):
        load_hf(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with torch.no_grad():
        torch.testing.assert_close(load_hf(tmp_path)(TOKENS), their_logits(tmp_path), rtol=0, atol=1e-5)
