"""GGUF files: weights, architecture and tokenizer as llama.cpp wants them, read back by others' programs."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from hf_models import (
    CASES,
    DEEPSEEK,
    GEMMA2,
    GEMMA3,
    GPT2,
    GPT_OSS,
    GRANITE,
    LLAMA,
    LLAMA3_ROPE,
    MIXTRAL,
    OLMOE,
    QWEN2_MOE,
    QWEN3_MOE,
    SPECIAL,
    TYPES,
    YARN,
    causal_lm,
    config_class,
    save_theirs,
)
from llama_cpp_server import LlamaCpp
from meshwright import api
from meshwright.cli.main import main
from meshwright.data.tokenizer import train_bpe
from meshwright.exchange.gguf_file import check_gguf, export_gguf
from meshwright.exchange.hf import load_hf
from meshwright.exchange.llama_cpp_graphs import GRAPHS
from meshwright.model.decoder import Decoder
from meshwright.spec import ModelSpec, UserError
from meshwright.spec.hf.families import FAMILIES

gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install 'meshwright[gguf]'")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

Array = NDArray[Any]
TEXT = ["the cat sat on the mat, it's 1234 degrees: naïve\n\n  and so on " * 40]


@dataclass(frozen=True)
class Model:
    """A model of transformers with random weights, ours with the same weights, and the GGUF file of both."""

    theirs: Any
    ours: Decoder
    file: Path

    def tensors(self) -> dict[str, Array]:
        reader = gguf.GGUFReader(self.file)
        return {each.name: gguf.quants.dequantize(each.data, each.tensor_type) for each in reader.tensors}

    def field(self, key: str) -> Any:
        found = gguf.GGUFReader(self.file).get_field(key)
        return None if found is None else found.contents()


def make(folder: Path, family: str, fields: dict[str, Any], dtype: str = "float32") -> Model:
    folder.mkdir(exist_ok=True)
    theirs = save_theirs(folder / "hf", family, fields | {"vocab_size": 300})
    train_bpe(iter(TEXT), 290).save(folder)
    ours = load_hf(folder / "hf", torch.float32)
    export_gguf(folder / "m.gguf", ours.spec, ours.tensors(), folder / "tokenizer.json", dtype)
    return Model(theirs, ours, folder / "m.gguf")


def numpys(model: Model) -> dict[str, Array]:
    return {name: value.detach().numpy() for name, value in model.theirs.state_dict().items()}


def test_the_file_holds_the_weights_and_the_architecture(tmp_path: Path) -> None:
    model = make(tmp_path, "Llama", LLAMA | {"num_hidden_layers": 1, "attention_bias": True})
    found, theirs = model.tensors(), numpys(model)
    block = "model.layers.0."
    names = {
        "token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight", "blk.0.attn_norm.weight": f"{block}input_layernorm.weight",
        "blk.0.ffn_norm.weight": f"{block}post_attention_layernorm.weight",
        "blk.0.attn_v.weight": f"{block}self_attn.v_proj.weight",
        "blk.0.attn_output.weight": f"{block}self_attn.o_proj.weight",
        "blk.0.attn_v.bias": f"{block}self_attn.v_proj.bias",
        "blk.0.attn_output.bias": f"{block}self_attn.o_proj.bias",
        **{f"blk.0.ffn_{x}.weight": f"{block}mlp.{x}_proj.weight" for x in ("gate", "up", "down")},
    }  # fmt: skip
    for name, hf in names.items():
        assert np.array_equal(found.pop(name), theirs[hf]), name
    for x, heads in (("q", 4), ("k", 2)):  # rows of a head: channel i, then channel i + half, and so on
        for leaf in ("weight", "bias"):
            value = theirs[f"{block}self_attn.{x}_proj.{leaf}"]
            paired = value.reshape(heads, 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
            assert np.array_equal(found.pop(f"blk.0.attn_{x}.{leaf}"), paired)
    assert not found
    wanted = {
        "general.architecture": "llama", "general.file_type": 0, "llama.context_length": 128,
        "llama.embedding_length": 64, "llama.block_count": 1, "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2, "llama.vocab_size": 300,
        "llama.rope.dimension_count": 16, "llama.rope.freq_base": 10000.0, "llama.expert_count": None,
        "llama.attention.layer_norm_rms_epsilon": float(np.float32(1e-6)),
    }  # fmt: skip
    assert {key: model.field(key) for key in wanted} == wanted


def test_the_file_holds_the_tokenizer(tmp_path: Path) -> None:
    model = make(tmp_path, "Llama", LLAMA | {"num_hidden_layers": 1})
    tree = json.loads((tmp_path / "tokenizer.json").read_text())
    tokens, types = (model.field(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    assert {token: number for number, token in enumerate(tokens[:290])} == tree["model"]["vocab"]
    assert tokens[290:] == [f"[PAD{number}]" for number in range(290, 300)]
    assert types == [3] + [1] * 289 + [5] * 10  # control, normal, unused
    assert model.field("tokenizer.ggml.merges") == [" ".join(pair) for pair in tree["model"]["merges"]]
    wanted = {"model": "gpt2", "pre": "gpt-2", "eos_token_id": 0, "bos_token_id": 0, "add_bos_token": True}
    assert {key: model.field(f"tokenizer.ggml.{key}") for key in wanted} == wanted


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "q8_0"])
def test_matrices_are_rounded_and_vectors_are_not(tmp_path: Path, dtype: str) -> None:
    exact = make(tmp_path / "exact", "Mixtral", MIXTRAL | {"num_hidden_layers": 1, "intermediate_size": 72})
    rounded = make(
        tmp_path / dtype, "Mixtral", MIXTRAL | {"num_hidden_layers": 1, "intermediate_size": 72}, dtype
    )
    kinds = {each.name: each.tensor_type.name for each in gguf.GGUFReader(rounded.file).tensors}
    kind = {"bfloat16": "BF16", "float16": "F16", "q8_0": "Q8_0"}[dtype]
    assert kinds["blk.0.attn_q.weight"] == kinds["blk.0.ffn_up_exps.weight"] == kind
    assert kinds["blk.0.attn_norm.weight"] == kinds["blk.0.ffn_gate_inp.weight"] == "F32"
    assert kinds["blk.0.ffn_down_exps.weight"] == ("F16" if dtype == "q8_0" else kind)  # rows of 72
    found = rounded.tensors()
    for name, value in exact.tensors().items():
        share = {"F32": 0.0, "BF16": 2**-8, "F16": 2**-10, "Q8_0": 1 / 127}[kinds[name]]
        assert np.abs(found[name] - value).max() <= share * np.abs(value).max(), name
    assert rounded.field("general.file_type") == {"bfloat16": 32, "float16": 1, "q8_0": 7}[dtype]


def test_experts_are_one_tensor_and_latents_are_split(tmp_path: Path) -> None:
    model = make(tmp_path, "DeepseekV3", DEEPSEEK | {"num_hidden_layers": 2})
    found, theirs = model.tensors(), numpys(model)
    given = theirs["model.layers.1.mlp.experts.gate_up_proj"]
    assert np.array_equal(found["blk.1.ffn_gate_exps.weight"], given[:, : given.shape[1] // 2])
    assert np.array_equal(found["blk.1.ffn_up_exps.weight"], given[:, given.shape[1] // 2 :])
    assert np.array_equal(
        found["blk.1.exp_probs_b.bias"], theirs["model.layers.1.mlp.gate.e_score_correction_bias"]
    )
    both = theirs["model.layers.0.self_attn.kv_b_proj.weight"].reshape(4, 16 + 12, 20)
    assert np.array_equal(found["blk.0.attn_k_b.weight"], both[:, :16].swapaxes(1, 2))
    assert np.array_equal(found["blk.0.attn_v_b.weight"], both[:, 16:])
    wanted = {
        "expert_count": 8, "expert_used_count": 3, "expert_shared_count": 2, "expert_group_count": 4,
        "expert_group_used_count": 2, "expert_weights_scale": 2.5, "expert_gating_func": 2,
        "leading_dense_block_count": 1, "attention.key_length": 28, "attention.key_length_mla": 24,
        "attention.value_length": 20, "attention.value_length_mla": 12, "attention.q_lora_rank": 24,
    }  # fmt: skip
    assert {key: model.field(f"deepseek2.{key}") for key in wanted} == wanted


def test_the_length_is_that_of_the_window(tmp_path: Path) -> None:
    model = make(tmp_path, *CASES["mistral window"])
    assert model.field("llama.context_length") == 7


THEIR_FILES = {
    "llama": ("Llama", LLAMA), "llama tied": ("Llama", LLAMA | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", LLAMA | {"head_dim": 128}),
    "qwen3_moe": ("Qwen3Moe", QWEN3_MOE | {"moe_intermediate_size": 768}),
    "gpt2": ("GPT2", GPT2 | {"n_positions": 1024}),
}  # fmt: skip
"""Models whose GGUF files transformers reads, too: it takes these sizes for granted."""


@pytest.mark.parametrize("name", THEIR_FILES)
def test_transformers_opens_the_file_and_writes_the_same_tokens(tmp_path: Path, name: str) -> None:
    pytest.importorskip("accelerate", reason="transformers needs accelerate for GGUF files: pip install it")
    model = make(tmp_path, *THEIR_FILES[name])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=model.file.name, dtype=torch.float32
    ).eval()
    tokens = torch.tensor([[5, 77, 260, 9]])
    with torch.no_grad():
        new = theirs.generate(tokens, max_new_tokens=12, do_sample=False, eos_token_id=None)
        ours = tokens
        for _ in range(12):
            ours = torch.cat([ours, model.ours(ours)[:, -1:].argmax(-1)], 1)
    assert torch.equal(new, ours)
    read = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=model.file.name)
    backend = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert read.encode("the naïve cat", add_special_tokens=False) == backend.encode("the naïve cat").ids


def has_architecture(name: str) -> bool:
    """True for a class of transformers whose family llama.cpp has an architecture of."""
    return {family.causal_lm: family.gguf for family in FAMILIES.values()}[causal_lm(name)] is not None


SMOLLM3 = LLAMA | SPECIAL | {"num_hidden_layers": 5}
COHERE2 = LLAMA | SPECIAL | {"sliding_window": 7, "num_hidden_layers": 5, "tie_word_embeddings": True}
COMPUTED = {name: case for name, case in CASES.items() if has_architecture(case[0]) and name not in (
    "qwen3 windows from a layer on", "qwen3 windows in some layers", "qwen3 tied, biases",
    "llama yarn, not truncated", "qwen3_moe biases, dense first", "qwen3_moe every second",
    "deepseek_v3 yarn", "deepseek_v3 without a latent of queries", "gpt2 erf, narrow",
    "qwen2 tied, windows from a layer on", "smollm3", "smollm3 listed", "starcoder2 window, tied, no biases",
    "gemma3", "gemma3 scaled", "cohere2", "cohere2 untied, biases", "olmo2 tied, biases",
    "phi3 longrope", "phi3 longrope, partial rotation", "gemma2", "gemma2 without caps",
    "olmo3 yarn on full layers", "olmoe", "olmoe biases, tied", "qwen2_moe no biases, dense first",
    "deepseek_v2 groups, yarn, no latent of queries", "gpt_oss", "gpt_oss no biases, tied, full layers",
)} | {
    "llama yarn, attention factor": (
        "Llama", LLAMA | {"rope_parameters": YARN | {"attention_factor": 1.5, "rope_theta": 1e3}}),
    "qwen3 yarn": ("Qwen3", LLAMA | {"head_dim": 16, "rope_parameters": YARN}),
    "deepseek_v3 yarn": (
        "DeepseekV3", DEEPSEEK | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}}),
    "deepseek_v3 without a latent": (
        "DeepseekV3", DEEPSEEK | {"q_lora_rank": None, "norm_topk_prob": False, "topk_group": 4}),
    "qwen2 yarn": ("Qwen2", LLAMA | {"rope_parameters": YARN}),
    "smollm3": ("SmolLM3", SMOLLM3),
    "smollm3 biases, wide heads": ("SmolLM3", SMOLLM3 | {"head_dim": 32}),
    "granite scaled": ("Granite", LLAMA | GRANITE | {"rope_parameters": LLAMA3_ROPE, "head_dim": 32}),
    "starcoder2 window, tied": (
        "Starcoder2", LLAMA | SPECIAL | {"sliding_window": 9, "tie_word_embeddings": True}),
    "gemma3": ("Gemma3", GEMMA3 | {"query_pre_attn_scalar": 16}),
    "gemma3 scaled": ("Gemma3", CASES["gemma3 scaled"][1] | {"query_pre_attn_scalar": 16}),
    "glm4 wide heads": ("Glm4", LLAMA | SPECIAL | {"head_dim": 32}),
    "cohere2": ("Cohere2", COHERE2),
    "cohere2 every second": ("Cohere2", COHERE2 | {"layer_types": TYPES, "num_hidden_layers": 3}),
    "gemma2": ("Gemma2", GEMMA2 | {"query_pre_attn_scalar": 16}),
    "gemma2 without caps": (
        "Gemma2", GEMMA2 | {"query_pre_attn_scalar": 16, "attn_logit_softcapping": None,
                            "final_logit_softcapping": None}),
    "olmoe": ("Olmoe", OLMOE | SPECIAL | {"norm_topk_prob": False, "num_key_value_heads": 4}),
    "gpt_oss": ("GptOss", GPT_OSS | {"attention_bias": True, "rope_parameters": YARN}),
    "olmo2 yarn": ("Olmo2", LLAMA | SPECIAL | {"rope_parameters": YARN}),
}  # fmt: skip
"""Models that llama.cpp computes as we do."""


@pytest.mark.parametrize("name", COMPUTED)
def test_llama_cpp_computes_the_same_logits(tmp_path: Path, name: str) -> None:
    model = make(tmp_path, *COMPUTED[name])
    spec = model.ours.spec
    windows = GRAPHS[str(FAMILIES[spec.family].gguf)].window_period is not None
    length = 40 if windows else min(40, (spec.sliding_window or 41) - 1)
    tokens = torch.randint(0, 290, (length,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = model.ours(tokens[None])[0].log_softmax(-1)
    reader = LlamaCpp(model.file)
    # llama.cpp looks GELU up in a table of fp16.
    allowed = 5e-3 if "gelu" in spec.activation or "geglu" in spec.activation else 2e-5
    for end in (1, length // 2, length):
        theirs = reader.log_probs(tokens[:end].tolist(), spec.vocab_size)
        assert (theirs - ours[end - 1]).abs().max() < allowed


@pytest.mark.parametrize("text", ["the naïve cat's 1234 things  \n\n\tx = 'm'  ", "a  b\r\n\n  c ", ""])
def test_llama_cpp_reads_a_text_as_the_same_tokens(tmp_path: Path, text: str) -> None:
    reader = LlamaCpp(make(tmp_path, "Llama", LLAMA | {"num_hidden_layers": 1}).file)
    backend = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    given = reader.log_probs([0, *backend.encode(text).ids], 300)
    assert torch.equal(reader.log_probs(text, 300), given)
    assert not torch.equal(reader.log_probs([0, *backend.encode(text + "x").ids], 300), given)


def test_llama_cpp_continues_a_prompt_as_generate_does(tmp_path: Path) -> None:
    model = make(tmp_path, "Llama", LLAMA)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tmp_path / file, tmp_path / "hf" / file)
    ours = api.generate(tmp_path / "hf", "the cat", max_new_tokens=24)
    assert len(ours) > 12 and LlamaCpp(model.file).continued("the cat", 24).startswith(ours)


REFUSED = [
    (
        *CASES["qwen3 windows in some layers"],
        r"model\.layer_types: llama\.cpp's qwen3 does not compute layers with different windows",
    ),
    (*CASES["qwen3 tied, biases"], r"model\.out_bias: llama\.cpp's qwen3 does not compute a bias"),
    (*CASES["llama yarn, not truncated"], r"model\.rope_scaling\.truncate: "),
    ("Llama", LLAMA | {"rope_parameters": YARN | {"beta_fast": 16.0}}, r"another beta_fast than 32"),
    (*CASES["deepseek_v3 yarn"], r"model\.rope_scaling\.mscale: llama\.cpp's deepseek2"),
    (*CASES["deepseek_v3 without a latent of queries"], r"model\.norm_eps: .*another epsilon \(1e-06\)"),
    ("DeepseekV3", DEEPSEEK | {"num_hidden_layers": 26}, r"model\.layers: .* 26 layers"),
    ("Qwen3Moe", QWEN3_MOE | {"norm_topk_prob": False}, r"model\.moe\.renormalise: "),
    (*CASES["qwen3_moe every second"], r"model\.moe: .* layers without experts"),
    (*CASES["gpt2 erf, narrow"], r"model\.activation: llama\.cpp's gpt2 .* \(it has gelu_tanh\)"),
    ("Qwen2", LLAMA | {"head_dim": 32}, r"model\.head_dim: llama\.cpp's qwen2 "),
    (*CASES["smollm3 listed"], r"model\.rope_layers: llama\.cpp's smollm3 .* each 4-th"),
    ("SmolLM3", SMOLLM3 | {"mlp_bias": True}, r"model\.mlp_bias: llama\.cpp's smollm3"),
    (*CASES["starcoder2 window, tied, no biases"], r"model\.qkv_bias: .* a model without biases"),
    (*CASES["gemma3"], r"model\.attention_scale: llama\.cpp's gemma3 .* than 0\.25 here"),
    (
        "Gemma3",
        GEMMA3
        | {"query_pre_attn_scalar": 16, "layer_types": TYPES[::-1] + TYPES[:1], "num_hidden_layers": 4},
        r"model\.layer_types: llama\.cpp's gemma3 does not compute layers whose windows",
    ),
    (*CASES["cohere2"], r"model\.tied: llama\.cpp's cohere2 does not compute a head of its own"),
    (*CASES["olmo2 tied, biases"], r"model\.qkv_bias: llama\.cpp's olmo2"),
    (*CASES["phi3 longrope"], r"model\.rope_scaling: llama\.cpp's phi3 does not compute LongRoPE"),
    (*CASES["gemma2"], r"model\.attention_scale: llama\.cpp's gemma2"),
    (*CASES["olmo3 yarn on full layers"], r"model\.rope_local_base_freq: llama\.cpp's olmo2"),
    (
        "Olmoe",
        OLMOE | SPECIAL | {"norm_topk_prob": True, "num_key_value_heads": 4},
        r"model\.moe\.renormalise: llama\.cpp's olmoe .* whose weights add up to 1",
    ),
    ("Olmoe", OLMOE | SPECIAL | {"norm_topk_prob": False}, r"model\.kv_heads: llama\.cpp's olmoe"),
    ("Qwen2Moe", QWEN2_MOE | {"norm_topk_prob": True}, r"model\.moe\.renormalise: .* add up to 1"),
    (*CASES["deepseek_v2 groups, yarn, no latent of queries"], r"model\.moe\.group_score: "),
    (*CASES["gpt_oss"], r"model\.rope_scaling\.truncate: llama\.cpp's gpt-oss"),
]


@pytest.mark.parametrize(("family", "fields", "words"), REFUSED)
def test_a_model_that_llama_cpp_computes_otherwise_is_refused(
    tmp_path: Path, family: str, fields: dict[str, Any], words: str
) -> None:
    config_class(family)(**fields, architectures=[causal_lm(family)]).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=words) as told:
        check_gguf(tmp_path / "m.gguf", ModelSpec.model_validate({"hf": str(tmp_path)}))
    assert "export to a folder" in str(told.value) and "\n" not in str(told.value)


def test_without_the_package_a_sentence_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match=r"install it with `pip install 'meshwright\[gguf\]'`"):
        check_gguf(tmp_path / "m.gguf", ModelSpec())


def test_a_run_is_exported_by_the_name_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path, "Llama", LLAMA | {"num_hidden_layers": 1})
    api.import_hf(tmp_path / "hf", tmp_path / "run")
    target = tmp_path / "q.gguf"
    with pytest.raises(UserError, match=r"has no tokenizer\.json, which is a part of GGUF files"):
        api.export(tmp_path / "run", target)
    shutil.copyfile(tmp_path / "tokenizer.json", tmp_path / "run" / "tokenizer.json")
    assert main(["export", str(tmp_path / "run"), str(target), "--dtype", "q8_0"]) == 0
    assert capsys.readouterr().out == f"wrote {target}\n"
    content = target.read_bytes()
    with pytest.raises(UserError, match=r"q\.gguf exists; give another file"):
        api.export(tmp_path / "run", target)
    assert target.read_bytes() == content
    with pytest.raises(UserError, match=r"'q8_0' is not one of .* a format of GGUF files"):
        api.export(tmp_path / "run", tmp_path / "out", "q8_0")
    with pytest.raises(UserError, match="'q4' is not one of float32, bfloat16, float16, q8_0"):
        api.export(tmp_path / "run", tmp_path / "x.gguf", "q4")
    with pytest.raises(UserError, match="cannot be written"):
        api.export(tmp_path / "run", tmp_path / "nowhere" / "x.gguf")
    full = OSError("4096 requested and 0 written")  # as numpy tells of a full disk, without an errno
    with (
        patch("gguf.GGUFWriter.write_tensor_data", side_effect=full),
        pytest.raises(UserError, match=r"cannot be written \(4096 requested and 0 written\)"),
    ):
        api.export(tmp_path / "run", tmp_path / "full.gguf")
    assert not (tmp_path / "full.gguf").exists()


def test_a_suffix_in_capitals_is_a_file_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path, "Llama", LLAMA | {"num_hidden_layers": 1})
    api.import_hf(tmp_path / "hf", tmp_path / "run")
    shutil.copyfile(tmp_path / "tokenizer.json", tmp_path / "run" / "tokenizer.json")
    target = tmp_path / "m.GGUF"
    assert main(["export", str(tmp_path / "run"), str(target), "--json"]) == 0
    assert target.read_bytes()[:4] == b"GGUF"
    assert json.loads(capsys.readouterr().out) == {"file": str(target)}
