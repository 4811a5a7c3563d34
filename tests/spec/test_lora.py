"""The section [lora]: which parameters it adds, in the decoder's order, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright.model.decoder import Decoder
from meshwright.model.lora import attach_adapters
from meshwright.spec import RunSpec, UserError, load
from meshwright.spec.lora import is_adapter
from meshwright.spec.parameter_groups import run_parameters

SMALL: dict[str, Any] = {"preset": "tiny", "layers": 2}
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"qkv_bias": True, "mlp_bias": True, "qk_norm": True},
    "experts": {"moe": {"experts": 4, "top_k": 2, "ffn": 32, "shared_ffn": 32, "dense_first": 1}},
    "expert biases": {"moe": {"experts": 4, "top_k": 2, "ffn": 32, "shared_ffn": 32, "expert_bias": True}},
    "latents": {"heads": 4, "kv_heads": 4, "mla": {"q_rank": 24, "kv_rank": 16, "rope_dim": 8, "v_dim": 16}},
}


def spec_of(model: dict[str, Any], lora: dict[str, Any], **sections: dict[str, Any]) -> RunSpec:
    return RunSpec.model_validate({"model": SMALL | model, "lora": {"rank": 4} | lora} | sections)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize(
    "targets", [["all-linear"], ["*.attn.*"], ["blocks.1.*.down.weight", "*.q.weight"], ["blocks.1.*"]]
)
def test_parameters_are_those_of_the_decoder(name: str, dora: bool, targets: list[str]) -> None:
    if dora and targets == ["blocks.1.*"] and "moe" in MODELS[name]:  # no magnitudes of experts
        targets = ["blocks.1.attn.*"]
    spec = spec_of(MODELS[name], {"targets": targets, "dora": dora})
    with torch.device("meta"):
        decoder = attach_adapters(Decoder(spec.model), spec.lora)
    found = [(name, tuple(parameter.shape)) for name, parameter in decoder.named_parameters()]
    listed = [parameter for unit in run_parameters(spec).values() for parameter in unit]
    assert found == [(each.name, each.shape) for each in listed]
    assert {each.trainable == is_adapter(each.name) for each in listed} == {True}
    assert any(each.trainable for each in listed)


@pytest.mark.parametrize(
    ("model", "targets", "patterns"),
    [
        ({}, ["q_proj", "v_proj"], ["*.attn.q.weight", "*.attn.v.weight"]),
        ({}, ["layers.1.mlp.up_proj", "*.attn.k.weight"], ["*.attn.k.weight", "blocks.1.mlp.up.weight"]),
        ({}, [f"{x}_proj" for x in ("q", "k", "v", "o", "gate", "up", "down")], ["all-linear"]),
        ({"preset": "gpt2"}, ["c_attn"], ["*.attn.q.weight", "*.attn.k.weight", "*.attn.v.weight"]),
        ({"preset": "gpt2"}, ["attn.c_proj"], ["*.attn.o.weight"]),
        ({"family": "qwen3_moe", "qk_norm": True, **MODELS["experts"]}, ["mlp.experts.gate_up_proj"],
         ["*.mlp.experts.gate", "*.mlp.experts.up"]),
        (MODELS["latents"] | {"family": "deepseek_v3"}, ["q_a_proj", "kv_b_proj"],
         ["*.attn.q_a.weight", "*.attn.kv.weight"]),
    ],
)  # fmt: skip
def test_modules_of_transformers_are_targets(
    model: dict[str, Any], targets: list[str], patterns: list[str]
) -> None:
    lora = spec_of(model, {"targets": targets}).lora
    assert lora is not None and list(lora.targets) == patterns


def test_keys_of_peft_are_told() -> None:
    for key, ours in {"r": "rank", "lora_alpha": "alpha", "target_modules": "targets"}.items():
        with pytest.raises(UserError, match=rf"--lora\.{key}: unknown key; did you mean 'lora\.{ours}'\?"):
            load(None, [("lora.rank", "4"), (f"lora.{key}", "8")])


REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    (r"lora\.rank: 4096 is more than \d+, the rank of", {}, {"rank": 4096}, {}),
    (r"lora\.targets: '\*\.q_proj' matches no linear layer; the near", {}, {"targets": ["*.q_proj"]}, {}),
    (r"'q_proj' matches no linear layer; .*, and modules of gpt2 are c_attn, c_fc, c_proj",
     {"preset": "gpt2"}, {"targets": ["q_proj"]}, {}),
    (r"matches embed\.weight, which gets no adapter", {}, {"targets": ["embed.*"]}, {}),
    (r"lora\.rank: 33 is more than 32, the rank of blocks\.1\.mlp\.experts\.gate", MODELS["experts"],
     {"targets": ["*.experts.*"], "rank": 33}, {}),
    (r"matches blocks\.0\.mlp\.experts\.gate_bias, which gets no", MODELS["expert biases"],
     {"targets": ["*.gate_bias"]}, {}),
    (r"lora\.dora: true is not defined for adapters of routed experts, such as that of blocks\.1",
     MODELS["experts"], {"targets": ["all-linear", "*.experts.*"], "dora": True}, {}),
    (r"train\.frozen: 'embed\.\*' has no effect beside \[lora\]", {}, {}, {"train": {"frozen": ["embed.*"]}}),
    (r"train\.lr_factors\.embed\.\*: every parameter that it matches is frozen by \[lora\]", {}, {},
     {"train": {"lr_factors": {"embed.*": 2.0}}}),
    (r"model\.mup_base_hidden: 64 does not go with \[lora\]", {"mup_base_hidden": 64, "tied": False}, {}, {}),
    (r"model\.mtp_num_layers: 1 does not go with \[lora\]", {"mtp_num_layers": 1}, {}, {}),
    (r"precision\.qat: 'int8' trains weights that are rounded", {}, {}, {"precision": {"qat": "int8"}}),
    (r"precision\.compute: 'fp8' rounds the operands", {}, {}, {"precision": {"compute": "fp8"}}),
    (r"lora\.dropout: 0\.1 does not go with train\.com", {}, {"dropout": 0.1}, {"train": {"compile": True}}),
]  # fmt: skip


def test_all_linear_layers_are_without_routed_experts() -> None:
    every = run_parameters(spec_of(MODELS["experts"], {"targets": ["all-linear"]})).values()
    assert not [p.name for unit in every for p in unit if is_adapter(p.name) and p.expert]
    both = run_parameters(spec_of(MODELS["experts"], {"targets": ["all-linear", "*.experts.*"]})).values()
    shapes = {p.name: p.shape for unit in both for p in unit if is_adapter(p.name) and p.expert}
    assert shapes["blocks.1.mlp.experts.up_adapter.lora_a.weight"][:2] == (4, 4) and len(shapes) == 6


@pytest.mark.parametrize(
    ("sentence", "model", "lora", "sections"), REFUSED, ids=[each[0][:24] for each in REFUSED]
)
def test_what_does_not_go_with_adapters_is_refused(
    sentence: str, model: dict[str, Any], lora: dict[str, Any], sections: dict[str, Any]
) -> None:
    with pytest.raises(UserError, match=sentence):
        spec_of(model, lora, **sections)


BASE: dict[str, Any] = {"quantise": "nf4"}
WHOLE_BLOCKS: dict[str, Any] = {"hidden": 128, "ffn": 192, "heads": 4, "kv_heads": 2, "head_dim": 32}


def test_linear_layers_of_blocks_are_quantised_whether_or_not_they_have_adapters() -> None:
    experts = {"moe": {"experts": 4, "top_k": 2, "ffn": 32, "shared_ffn": 64, "dense_first": 1}}
    spec = spec_of(WHOLE_BLOCKS | experts, BASE | {"targets": ["*.attn.q.weight"]})
    listed = [each for unit in run_parameters(spec).values() for each in unit]
    found = {each.name.split(".", 2)[2] for each in listed if each.quantised == "nf4"}
    layers = [f"attn.{each}" for each in "qkvo"]
    layers += [f"mlp.{part}{each}" for part in ("", "shared.") for each in ("gate", "up", "down")]
    assert found == {f"{layer}.weight" for layer in layers}
    assert not any(each.quantised for each in listed if each.trainable or not each.name.startswith("blocks"))


@pytest.mark.parametrize(
    ("model", "sections", "told"),
    [
        ({"hidden": 96}, {}, r"attn\.q\.weight has 96 of them"),
        ({}, {"layout": {"tp": 2}}, r"mlp\.down\.weight has 192 / 2 ranks = 96 .* try layout\.tp = 1"),
        ({}, {"train": {"compile": True}}, r"train\.compile: true does not go with lora\.quantise = 'nf4'"),
        ({}, {"layout": {"pp": 2, "dp": 2, "zero": 3}}, r"layout\.zero: 3 .* give layout\.zero = 2"),
        ({}, {"precision": {"compute": "fp8"}}, r"precision\.compute: 'fp8'"),
    ],
)
def test_what_does_not_go_with_a_quantised_base_is_refused(
    model: dict[str, Any], sections: dict[str, Any], told: str
) -> None:
    with pytest.raises(UserError, match=told):
        spec_of(WHOLE_BLOCKS | model, BASE, **sections)
