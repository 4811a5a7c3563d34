"""Runs that train adapters on weights of transformers, and all that reads such a run afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from runs_from_weights import tokenizer_of, trained
from safetensors.torch import load_file

from hf_models import CASES, TOKENS, save_theirs, their_logits
from meshwright import api
from meshwright.spec import UserError

peft = pytest.importorskip("peft", reason="peft is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

LORA = {"lora__rank": 4, "lora__alpha": 16.0, "train__steps": 4, "train__lr": 0.05}


@pytest.fixture(scope="module")
def run(theirs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("lora") / "run"
    trained(theirs, out, model__weights=theirs, model__hf=theirs, **LORA)
    return out


@pytest.fixture(scope="module")
def merged(run: Path) -> Path:
    folder = run.parent / "merged"
    api.export(run, folder)
    return folder


def test_the_base_stays_and_the_merged_model_differs(theirs: Path, run: Path, merged: Path) -> None:
    before, after = load_file(theirs / "model.safetensors"), load_file(merged / "model.safetensors")
    assert before.keys() == after.keys()
    linear = {name for name in before if "_proj" in name}
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == linear
    assert not torch.allclose(their_logits(theirs), their_logits(merged), atol=1e-3)
    decoder = api.load_run(run)
    torch.testing.assert_close(decoder(TOKENS), their_logits(merged), rtol=1e-4, atol=1e-4)


def test_peft_opens_the_adapters_with_the_logits_of_the_merged_model(
    theirs: Path, run: Path, merged: Path, tmp_path: Path
) -> None:
    api.export(run, tmp_path / "adapter", adapter=True)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(theirs) and config["r"] == 4
    base = transformers.AutoModelForCausalLM.from_pretrained(theirs, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS).logits, their_logits(merged), rtol=1e-4, atol=1e-4)
    api.import_hf(tmp_path / "adapter", tmp_path / "imported")
    api.export(tmp_path / "imported", tmp_path / "again")
    again, once = (load_file(folder / "model.safetensors") for folder in (tmp_path / "again", merged))
    for name, value in once.items():
        torch.testing.assert_close(again[name], value, rtol=1e-6, atol=1e-7)


def test_peft_opens_magnitudes_with_the_logits_of_the_merged_model(theirs: Path, tmp_path: Path) -> None:
    run, adapter, whole = (tmp_path / name for name in ("run", "adapter", "merged"))
    trained(theirs, run, **LORA, model__weights=theirs, model__hf=theirs, lora__dora="true", layout__tp=2)
    api.export(run, whole)
    api.export(run, adapter, adapter=True)
    assert json.loads((adapter / "adapter_config.json").read_text())["use_dora"] is True
    base = transformers.AutoModelForCausalLM.from_pretrained(theirs, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, adapter).eval()
    with torch.no_grad():
        found, wanted = model(TOKENS).logits, their_logits(whole)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(their_logits(theirs), wanted, atol=1e-3)
    torch.testing.assert_close(api.load_run(run)(TOKENS), wanted, rtol=1e-4, atol=1e-4)
    api.import_hf(adapter, tmp_path / "imported")
    api.export(tmp_path / "imported", tmp_path / "again")
    again, once = (load_file(folder / "model.safetensors") for folder in (tmp_path / "again", whole))
    for name, value in once.items():
        torch.testing.assert_close(again[name], value, rtol=1e-5, atol=1e-7)


def test_peft_opens_adapters_of_experts_with_the_logits_of_the_merged_model(
    theirs: Path, tmp_path: Path
) -> None:
    base = tmp_path / "moe"
    save_theirs(base, "Qwen3Moe", CASES["qwen3_moe"][1] | {"vocab_size": 300})
    tokenizer_of(base)
    run, adapter, whole = (tmp_path / name for name in ("run", "adapter", "merged"))
    how = LORA | {"lora__targets": "*.attn.q.weight,*.experts.*", "model__weights": base, "model__hf": base}
    trained(theirs, run, **how)
    api.export(run, whole)
    api.export(run, adapter, adapter=True)
    before, after = load_file(base / "model.safetensors"), load_file(whole / "model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if ".experts." in name or ".q_proj." in name}
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert "model.layers.0.mlp.experts.gate_up_proj" in config["target_parameters"]
    hf = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(hf, adapter).eval()
    with torch.no_grad():
        found, wanted = model(TOKENS).logits, their_logits(whole)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(their_logits(base), wanted, atol=1e-3)
    torch.testing.assert_close(api.load_run(run)(TOKENS), wanted, rtol=1e-4, atol=1e-4)
    with pytest.raises(UserError, match="target_parameters, adapters of stacked experts"):
        api.import_hf(adapter, tmp_path / "imported")


def test_generate_evaluate_and_average_take_the_merged_model(
    run: Path, merged: Path, theirs: Path, tmp_path: Path
) -> None:
    ours, hf = (api.generate(model, prompt="the cat", max_new_tokens=8) for model in (run, merged))
    assert ours == hf
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat, " * 40)
    how: dict[str, Any] = {"data": {"text": text}, "only_data": True, "seq_len": 16}
    rows = [api.evaluate(model, **how) for model in (run, merged)]
    bits = [_bits(row) for row in rows]
    assert bits[0] == pytest.approx(bits[1], rel=1e-5) and bits[0] != pytest.approx(
        _bits(api.evaluate(theirs, **how))
    )
    api.merge([run, merged], tmp_path / "mean", method="linear")
    api.export(tmp_path / "mean", tmp_path / "mean-hf")
    mean, once = (load_file(folder / "model.safetensors") for folder in (tmp_path / "mean-hf", merged))
    for name, value in once.items():
        torch.testing.assert_close(mean[name], value, rtol=1e-6, atol=1e-7)


def _bits(found: Any) -> float:
    return float(found["checkpoints"][0]["domains"]["text"]["bits_per_byte"])


def test_a_run_from_a_run_of_adapters_starts_from_the_merged_weights(
    run: Path, theirs: Path, tmp_path: Path, merged: Path
) -> None:
    trained(theirs, tmp_path / "on", model__weights=run, train__lr=1e-30)
    api.export(tmp_path / "on", tmp_path / "hf")
    found, wanted = (load_file(folder / "model.safetensors") for folder in (tmp_path / "hf", merged))
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7)


def test_what_is_not_about_adapters_is_refused(run: Path, theirs: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--dtype: bfloat16 is about a whole model"):
        api.export(run, tmp_path / "a", "bfloat16", adapter=True)
    with pytest.raises(UserError, match="--adapter: writes a folder of PEFT"):
        api.export(run, tmp_path / "a.gguf", adapter=True)
    api.import_hf(theirs, tmp_path / "whole")
    with pytest.raises(UserError, match=r"--adapter: .* has no adapters"):
        api.export(tmp_path / "whole", tmp_path / "a", adapter=True)
    with pytest.raises(UserError, match="holds a whole model and no adapters"):
        trained(theirs, tmp_path / "whole", tmp_path / "whole", resume="auto", **LORA)
