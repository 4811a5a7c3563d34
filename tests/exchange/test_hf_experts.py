"""HF folders of mixtures of experts: each form that files have, and what is left out or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_models import CASES, DEEPSEEK, TOKENS, read_whole, same_files, save_theirs, their_logits
from meshwright import api
from meshwright.exchange.hf import export_hf, load_hf
from meshwright.exchange.hf_state_dict import hf_tensors
from meshwright.model.decoder import Decoder
from meshwright.model.init import init_whole_
from meshwright.spec import ModelSpec, UserError
from meshwright.spec.presets import PRESETS

FAMILIES = [
    "mixtral", "qwen3_moe biases, dense first", "deepseek_v3 yarn", "qwen2_moe", "granitemoe"
]  # fmt: skip
BIAS = "blocks.{}.mlp.router.bias"


@pytest.mark.parametrize("case", FAMILIES)
def test_experts_in_one_tensor_are_read_too(case: str, tmp_path: Path) -> None:
    model = save_theirs(tmp_path / "stacked", *CASES[case], save_original_format=False)
    assert any("gate_up_proj" in name for name in load_file(tmp_path / "stacked" / "model.safetensors"))
    spec, tensors = read_whole(tmp_path / "stacked")
    export_hf(tmp_path / "ours", spec, tensors)
    model.save_pretrained(tmp_path / "theirs")
    same_files(tmp_path / "ours", tmp_path / "theirs")


@pytest.mark.parametrize("case", FAMILIES)
def test_a_run_made_of_a_folder_gives_it_back(case: str, tmp_path: Path) -> None:
    save_theirs(tmp_path / "theirs", *CASES[case])
    api.import_hf(tmp_path / "theirs", tmp_path / "run")
    with torch.no_grad():
        assert torch.equal(api.load_run(tmp_path / "run")(TOKENS), load_hf(tmp_path / "theirs")(TOKENS))
    api.export(tmp_path / "run", tmp_path / "ours", "float32")
    same_files(tmp_path / "ours", tmp_path / "theirs")


def test_biases_of_routers_stay_in_fp32(tmp_path: Path) -> None:
    model = save_theirs(tmp_path / "theirs", "DeepseekV3", DEEPSEEK)
    bias = model.model.layers[2].mlp.gate.e_score_correction_bias
    spec, tensors = read_whole(tmp_path / "theirs")
    export_hf(tmp_path / "ours", spec, tensors, dtype=torch.bfloat16)
    written = load_file(tmp_path / "ours" / "model.safetensors")
    name = "model.layers.2.mlp.gate.e_score_correction_bias"
    assert torch.equal(written.pop(name), bias)
    assert {t.dtype for key, t in written.items() if "correction" not in key} == {torch.bfloat16}
    decoder = load_hf(tmp_path / "ours")
    assert decoder.embed.weight.dtype == torch.bfloat16
    assert torch.equal(decoder.balance_biases()[BIAS.format(2)], bias)


def test_rotary_channels_in_halves_are_read_too(tmp_path: Path) -> None:
    model = save_theirs(tmp_path / "theirs", "DeepseekV3", DEEPSEEK | {"rope_interleave": False})
    spec, tensors = read_whole(tmp_path / "theirs")
    export_hf(tmp_path / "ours", spec, tensors)
    with torch.no_grad():
        logits = model(TOKENS).logits
        torch.testing.assert_close(load_hf(tmp_path / "theirs")(TOKENS), logits, rtol=0, atol=1e-5)
        torch.testing.assert_close(their_logits(tmp_path / "ours"), logits, rtol=0, atol=1e-5)


def edit_tensors(folder: Path, edit: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_layers_that_predict_further_tokens_are_left_out_where_the_config_has_none(tmp_path: Path) -> None:
    model = save_theirs(tmp_path, "DeepseekV3", DEEPSEEK)
    extra = {f"model.layers.3.{name}.weight": torch.zeros(2) for name in ("enorm", "mlp.gate", "eh_proj")}
    edit_tensors(tmp_path, lambda tensors: tensors.update(extra))
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_nextn_predict_layers": 0}))
    with torch.no_grad():
        torch.testing.assert_close(load_hf(tmp_path)(TOKENS), model(TOKENS).logits, rtol=0, atol=1e-5)
    edit_tensors(tmp_path, lambda tensors: tensors.pop("model.layers.3.eh_proj.weight"))
    with pytest.raises(UserError, match=r"has a tensor model\.layers\.3\.\w+"):
        load_hf(tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t, e: t.pop(e.format(3)), r"lacks the tensor .*experts\.3\.up_proj"),
        (lambda t, e: t.update({e.format(2): torch.zeros(3, 3)}), r"experts\.2\.up_proj\.weight .*\[3, 3\]"),
        (lambda t, e: t.update({e.format(8): t[e.format(0)].clone()}), r"has a tensor .*experts\.8\.up_proj"),
    ],
)
def test_experts_that_are_not_as_asked_for_are_named(damage: Any, message: str, tmp_path: Path) -> None:
    save_theirs(tmp_path, "DeepseekV3", DEEPSEEK)
    one = "model.layers.1.mlp.experts.{}.up_proj.weight"
    edit_tensors(tmp_path, lambda tensors: damage(tensors, one))
    with pytest.raises(UserError, match=message):
        load_hf(tmp_path)


@pytest.mark.parametrize("preset", [name for name in PRESETS if PRESETS[name]["family"] in CASES])
@pytest.mark.parametrize("stacked", [False, True])
def test_every_element_of_a_preset_is_in_one_tensor_of_its_files(preset: str, stacked: bool) -> None:
    spec = ModelSpec(preset=preset)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in Decoder(spec).tensors().items()}
    every = list(hf_tensors(spec, stacked))
    assert len({piece.hf for piece in every}) == len(every)
    zeros = sum(
        piece.elements(shapes) - shapes[piece.parameters[0]].numel() for piece in every if piece.padded
    )
    assert sum(piece.elements(shapes) for piece in every) == zeros + sum(s.numel() for s in shapes.values())
    assert {name for piece in every for name in piece.parameters} == shapes.keys()


TINY = {"layers": 1, "hidden": 32, "ffn": 32, "heads": 2, "kv_heads": 2, "head_dim": 16, "vocab_size": 32}
MOE = {"experts": 4, "top_k": 2, "ffn": 32}
LATENT = {"q_rank": 8, "kv_rank": 8, "rope_dim": 4, "v_dim": 8}
SIGMOID = MOE | {"router": "sigmoid", "bias": True, "shared_ffn": 32}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"family": "llama", "moe": MOE},
            "model.family: HF's llama has no model.moe; set model.family to mixtral, which computes it",
        ),
        ({"family": "mixtral"}, "model.family: HF's mixtral needs model.moe"),
        ({"family": "mixtral", "moe": MOE, "mla": LATENT}, "HF's mixtral has no model.mla"),
        ({"family": "deepseek_v3", "moe": SIGMOID}, "HF's deepseek_v3 needs model.mla"),
        ({"family": "mixtral", "moe": MOE | {"shared_ffn": 32}}, "model.moe.shared_ffn"),
        ({"family": "mixtral", "moe": MOE | {"renormalise": False}}, "model.moe.renormalise"),
        ({"family": "mixtral", "moe": MOE | {"capacity_factor": 2.0}}, "model.moe.capacity_factor"),
        ({"family": "qwen3_moe", "qk_norm": True, "moe": MOE | {"router": "sigmoid"}}, "model.moe.router"),
        ({"family": "qwen3_moe", "moe": MOE}, "model.qk_norm"),
        ({"family": "deepseek_v3", "mla": LATENT, "moe": MOE | {"shared_ffn": 32}}, "model.moe.router"),
        ({"family": "deepseek_v3", "mla": LATENT, "moe": SIGMOID | {"bias": False}}, "model.moe.bias"),
        (
            {"family": "deepseek_v3", "mla": LATENT, "moe": SIGMOID | {"groups": 4}},
            "at least 2 of",
        ),
        ({"family": "deepseek_v3", "mla": LATENT, "moe": SIGMOID, "kv_heads": 1}, "each of the 2 heads"),
    ],
)
def test_a_mixture_that_no_family_computes_is_not_exported(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    spec = ModelSpec.model_validate({"preset": None, **TINY, **fields})
    tensors = init_whole_(Decoder(spec), seed=0).tensors()
    with pytest.raises(UserError) as caught:
        export_hf(tmp_path / "out", spec, tensors)
    assert message in str(caught.value)
    assert not any(tmp_path.iterdir())


def test_experts_go_to_the_shards_they_fit_in(tmp_path: Path) -> None:
    save_theirs(tmp_path / "theirs", *CASES["deepseek_v3"])
    spec, tensors = read_whole(tmp_path / "theirs")
    export_hf(tmp_path / "ours", spec, tensors, max_shard_bytes=20_000)
    index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())["weight_map"]
    of_experts = {index[name] for name in index if ".1.mlp.experts." in name}
    assert len(of_experts) > 3
    assert all(path.stat().st_size < 35_000 for path in (tmp_path / "ours").glob("*.safetensors"))
    same_files(tmp_path / "ours", tmp_path / "theirs")
