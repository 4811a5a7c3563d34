"""Adapters against PEFT: logits, gradients and merged weights in float64, and folders that it opens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft_models import InFloat64, decoder_of, theirs_with
from torch import Tensor

from hf_models import CASES, TOKENS, save_theirs
from meshwright.checkpoint.weights import fill
from meshwright.exchange.foreign.caller import IMPORT
from meshwright.exchange.foreign.source import open_source
from meshwright.exchange.peft_adapter import names_in_file, peft_layers, peft_targets
from meshwright.model.lora import merged
from meshwright.spec import UserError
from meshwright.spec.lora import LoraSpec
from meshwright.spec.parameters import parameters

peft = pytest.importorskip("peft", reason="peft is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SPECS: dict[str, dict[str, Any]] = {
    "all": {"rank": 3, "alpha": 7.0},
    "rslora": {"rank": 4, "alpha": 7.0, "rslora": True},
    "attention": {"rank": 2, "targets": ["*.attn.*"]},
    "dora": {"rank": 3, "alpha": 7.0, "dora": True},
    "some, dora": {
        "rank": 2,
        "rslora": True,
        "dora": True,
        "targets": ["*.attn.v.weight", "blocks.1.mlp.up.*"],
    },
    "some": {"rank": 5, "targets": ["*.attn.q.weight", "*.attn.v.weight", "blocks.1.mlp.*"]},
}
OF_EXPERTS: dict[str, dict[str, Any]] = {
    "experts": {"rank": 3, "alpha": 7.0, "targets": ["*.experts.*"]},
    "experts, rslora": {"rank": 2, "rslora": True, "targets": ["*.attn.*", "*.experts.*"]},
    "some experts": {"rank": 5, "targets": ["*.experts.up", "blocks.1.mlp.experts.down", "*.q.weight"]},
}
FAMILIES = [
    "llama", "llama biases, wide heads", "qwen2", "qwen3 tied, biases", "phi3", "gpt2", "glm4", "gemma2",
    "cohere2", "starcoder2",
]  # fmt: skip
EXPERTS = [
    "deepseek_v3", "deepseek_v2", "qwen2_moe", "mixtral", "qwen3_moe", "olmoe", "glm4_moe", "granitemoe",
    "gpt_oss",
]  # fmt: skip
QUICK = {
    ("llama", "dora"), ("phi3", "some, dora"), ("gpt2", "dora"), ("glm4", "some, dora"),
    ("llama", "all"), ("llama", "rslora"), ("phi3", "some"), ("gpt2", "all"), ("glm4", "all"),
}  # fmt: skip
QUICK_EXPERTS = {
    *((family, "attention") for family in ("deepseek_v3", "deepseek_v2", "qwen2_moe")),
    *((family, "experts") for family in ("mixtral", "qwen3_moe", "gpt_oss")),
    ("mixtral", "experts, rslora"), ("qwen3_moe", "some experts"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        pytest.param(family, kind, marks=() if (family, kind) in QUICK else pytest.mark.full)
        for family in FAMILIES
        for kind in SPECS
    ]
    + [
        pytest.param(family, kind, marks=() if (family, kind) in QUICK_EXPERTS else pytest.mark.full)
        for family in EXPERTS
        for kind in ("attention", *OF_EXPERTS)
    ],
)
def test_a_folder_of_peft_has_the_same_logits_and_gradients(family: str, kind: str, tmp_path: Path) -> None:
    lora = LoraSpec.model_validate((SPECS | OF_EXPERTS)[kind])
    save_theirs(tmp_path / "hf", *CASES[family])
    decoder = decoder_of(tmp_path / "hf", lora)
    with InFloat64():
        model = theirs_with(decoder, lora, tmp_path / "hf", tmp_path / "adapter")
        theirs = model(TOKENS).logits
    ours = decoder(TOKENS)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    for logits in (ours, theirs):
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten()).backward()
    found = {name: each.grad for name, each in decoder.named_parameters() if each.grad is not None}
    wanted = {
        name.replace(".default.", ".").replace("vector.weight", "vector"): each.grad
        for name, each in model.named_parameters()
        if each.grad is not None
    }
    targets = peft_targets(decoder.spec, lora)
    assert {name for each in targets for name in names_in_file(each)} == wanted.keys()
    assert len(found) == (3 if lora.dora else 2) * sum(sum(each.adapted) for each in targets)
    frozen = {name: torch.zeros_like(each) for name, each in decoder.named_parameters() if each.grad is None}
    for each in targets:
        a, *of_rows = (wanted[name] for name in names_in_file(each))
        mine_a, *mine_of_rows = each.to_peft(lora.rank, found | frozen)
        torch.testing.assert_close(mine_a, a, rtol=1e-10, atol=1e-13)
        for mine, theirs in zip(mine_of_rows, of_rows, strict=True):
            torch.testing.assert_close(mine, theirs * (mine != 0), rtol=1e-10, atol=1e-13)


def test_adapters_that_peft_takes_for_those_of_experts_are_refused(tmp_path: Path) -> None:
    save_theirs(tmp_path / "hf", *CASES["qwen2_moe"])
    decoder = decoder_of(tmp_path / "hf", lora := LoraSpec(rank=2))
    with pytest.raises(
        UserError, match=r"--adapter: PEFT takes an adapter of model\.layers\.0\.mlp\.shared_e"
    ):
        theirs_with(decoder, lora, tmp_path / "hf", tmp_path / "adapter")


@pytest.mark.parametrize("kind", SPECS)
def test_merged_weights_are_those_of_peft(kind: str, tmp_path: Path) -> None:
    lora = LoraSpec.model_validate(SPECS[kind])
    save_theirs(tmp_path / "hf", *CASES["llama"])
    decoder = decoder_of(tmp_path / "hf", lora)
    model = theirs_with(decoder, lora, tmp_path / "hf", tmp_path / "adapter")
    mine = {name: each.detach() for name, each in decoder.named_parameters()}
    whole = model.merge_and_unload().state_dict()
    for layer in peft_layers(decoder.spec, lora):
        (weight,) = layer.weights
        a, b, *magnitude = (mine[each.name] for each in weight.adapters)
        found = merged(mine[weight.name], a, b, lora.scale, *magnitude)
        torch.testing.assert_close(found, whole[f"{layer.module}.weight"], rtol=1e-12, atol=1e-14)
    read = dict[str, Tensor]()
    spec, weights, *_ = open_source(tmp_path / "adapter", IMPORT, None, None)
    read = {
        each.name: torch.empty(each.shape).double() for unit in parameters(spec).values() for each in unit
    }
    fill(read, weights)
    for piece in peft_layers(decoder.spec, lora):
        torch.testing.assert_close(
            read[piece.weights[0].name], whole[f"{piece.module}.weight"], rtol=1e-6, atol=1e-7
        )


def test_the_config_names_modules_shortly_where_all_of_them_have_adapters(tmp_path: Path) -> None:
    save_theirs(tmp_path / "hf", *CASES["llama"])
    for number, (kind, wanted) in enumerate({"all": 7, "some": 3 + 3 + 3}.items()):
        lora = LoraSpec.model_validate(SPECS[kind])
        decoder = decoder_of(tmp_path / "hf", lora)
        theirs_with(decoder, lora, tmp_path / "hf", tmp_path / str(number))
        config = json.loads((tmp_path / str(number) / "adapter_config.json").read_text())
        assert len(config["target_modules"]) == wanted
