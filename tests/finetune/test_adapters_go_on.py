"""Training that goes on from adapters that exist: as PEFT goes on from them, on every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from chat_models import chats, model_in, opened, trained_by_trl, written
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_models import CASES, save_theirs
from meshwright import api
from meshwright.cli.main import main
from meshwright.exchange.peft_adapter import write_adapter
from meshwright.spec import RunSpec, UserError, load
from meshwright.spec.lora import is_adapter
from meshwright.weights.adapters import adapter_shapes
from meshwright.weights.initial_weights import open_weights
from ranks import Ranks
from training_runs import run_it, start

SEQ_LEN, STEPS = 96, 4


def adapter_in(folder: Path, base: Path, **config: Any) -> peft.PeftModel:
    """Write an adapter of PEFT whose B is not zero, in float64, into a folder."""
    torch.manual_seed(1)
    made = peft.get_peft_model(
        opened(base), peft.LoraConfig(**{"r": 3, "lora_alpha": 12, "task_type": "CAUSAL_LM"} | config)
    )
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    made.double().save_pretrained(folder)
    return made


def spec_of(base: Path, corpus: Path, **flags: object) -> RunSpec:
    given: dict[str, object] = {
        "model.hf": base, "data.corpus": corpus, "data.cache": corpus.parent / "cache", "layout.dp": 1,
        "data.seq_len": SEQ_LEN, "data.val_fraction": 0, "data.pack": "false", "train.batch_tokens": 8 * SEQ_LEN,
        "train.steps": STEPS, "train.lr": 0.01, "train.warmup_steps": 0, "train.schedule": "constant",
        "train.weight_decay": 0, "precision.compute": "fp64", "layout.micro_batch": 1,
    }  # fmt: skip
    given |= {key.replace("__", "."): value for key, value in flags.items()}
    return load(None, [(key, str(value)) for key, value in given.items()])


CONFIGS: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": ["q_proj", "v_proj", "down_proj"]},
    "all, rslora": {"target_modules": "all-linear", "use_rslora": True},
    "layers": {"target_modules": ["k_proj", "up_proj"], "layers_to_transform": [1]},
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_it_equals_going_on_with_peft(kind: str, tmp_path: Path) -> None:
    base, adapter, rows = tmp_path / "model", tmp_path / "adapter", chats(1, 8)
    model_in(base)
    adapter_in(adapter, base, **CONFIGS[kind])
    theirs = peft.PeftModel.from_pretrained(opened(base), adapter, is_trainable=True)
    losses = trained_by_trl(theirs, base, rows, tmp_path / "trl", 8, max_steps=STEPS, max_length=SEQ_LEN)
    spec = spec_of(base, written(rows, tmp_path / "chats.jsonl"), lora__weights=adapter)
    assert spec.lora is not None and (spec.lora.rank, spec.lora.alpha) == (3, 12)
    api.train(spec, out=tmp_path / "run", quiet=True)
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert [row["loss"] for row in lines if "loss" in row] == pytest.approx(losses, rel=1e-9)
    api.export(tmp_path / "run", tmp_path / "ours", adapter=True)
    ours = load_file(tmp_path / "ours" / "adapter_model.safetensors")
    wanted = {
        name.replace(".default.", "."): each.detach()
        for name, each in theirs.named_parameters()
        if "lora_" in name
    }
    before = load_file(adapter / "adapter_model.safetensors")
    assert ours.keys() == wanted.keys() == before.keys()
    for name, each in wanted.items():
        assert not torch.allclose(before[name], each, rtol=1e-3), name
        torch.testing.assert_close(ours[name], each, rtol=1e-9, atol=1e-11)


LAYOUTS: list[tuple[str, dict[str, object]]] = [
    ("llama", {"dp": 2, "zero": 3}),
    ("llama", {"tp": 2, "dp": 2, "zero": 1}),
    ("llama", {"pp": 2, "cp": 2}),
    ("glm4", {"tp": 2}),
    ("phi3", {"tp": 2, "dp": 2, "zero": 2}),
    ("gpt2", {"dp": 2, "zero": 3}),
    ("mixtral", {"dp": 2, "ep": 2, "zero": 1}),
    ("gpt_oss", {"dp": 4, "ep": 2, "zero": 3}),
]


@pytest.mark.parametrize(("family", "axes"), LAYOUTS, ids=str)
def test_layouts_go_on_as_one_device(
    ranks: Ranks, corpus: Path, tmp_path: Path, family: str, axes: dict[str, object]
) -> None:
    """From a folder that was exported here, whose joined layers have blocks."""
    save_theirs(tmp_path / "hf", *CASES[family])
    experts = ",*.experts.*" if family in ("mixtral", "gpt_oss") else ""
    flags: dict[str, object] = {
        "data__tokenizer": "byte", "data__seq_len": 32, "train__batch_tokens": 8 * 32, "train__steps": 3,
        "model__vocab_size": 300, "model__weights": tmp_path / "hf", "layout__dp": 1,
    }  # fmt: skip
    new = spec_of(tmp_path / "hf", corpus, **flags, lora__rank=2, lora__targets=f"all-linear{experts}")
    assert new.lora is not None
    torch.manual_seed(2)
    drawn = {name: torch.randn(shape).double() / 9 for name, shape in adapter_shapes(new).items()}
    write_adapter(tmp_path / "adapter", new.model, new.lora, drawn, None, torch.float64)
    alone = spec_of(tmp_path / "hf", corpus, **flags, lora__weights=tmp_path / "adapter")
    assert alone.lora is not None and adapter_shapes(alone) == adapter_shapes(new)
    assert (alone.lora.targets == new.lora.targets) == (not experts)
    weights = open_weights(alone)
    assert weights is not None and weights.exact
    first, wanted = start(ranks, alone, tmp_path / "alone")
    flags |= {f"layout__{axis}": size for axis, size in axes.items()}
    spec = spec_of(tmp_path / "hf", corpus, **flags, lora__weights=tmp_path / "adapter")
    found = dict[str, Tensor]()
    for result, tensors in ranks.run(spec.layout, run_it, spec, tmp_path / "run", None):
        assert result["final_loss"] == pytest.approx(first["final_loss"], rel=1e-9)
        found |= tensors
    assert found.keys() == wanted.keys()
    for name in filter(is_adapter, wanted):
        assert not torch.equal(found[name], drawn[name])
        apart = (found[name] - wanted[name]).abs().max() / wanted[name].abs().max()
        assert apart < 1e-9, name
