"""Magnitudes (DoRA) against PEFT: dropout in training, names in its files, runs, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft_models import InFloat64, decoder_of, their_model, theirs_with
from safetensors.torch import load_file
from torch import Tensor, nn

from covering import some
from hf_models import CASES, TOKENS, save_theirs
from meshwright.comm.mesh import Mesh
from meshwright.exchange.peft_adapter import names_in_file, peft_layers
from meshwright.model.lora import LoraLinear, adapters_off
from meshwright.model.lora_dropout import Dropout, token_keys
from meshwright.spec import RunSpec, load
from meshwright.spec.lora import MAGNITUDE, LoraSpec
from meshwright.train.step import Trainer
from meshwright.weights.initial_weights import open_weights
from ranks import Ranks

peft = pytest.importorskip("peft", reason="peft is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SHARE = 0.3


class Dropped(nn.Module):
    """Drops in PEFT's model what the decoder's layer drops."""

    def __init__(self, dropout: Dropout) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x)


@pytest.mark.parametrize("family", ["llama biases, wide heads", "starcoder2"])
def test_dropout_in_training_is_that_of_peft(family: str, tmp_path: Path) -> None:
    lora = LoraSpec(rank=3, alpha=7.0, dropout=SHARE, dora=True)
    save_theirs(tmp_path / "hf", *CASES[family])
    decoder = decoder_of(tmp_path / "hf", lora)
    with InFloat64():
        model = theirs_with(decoder, lora, tmp_path / "hf", tmp_path / "adapter").train()
    adapted = {name: each for name, each in decoder.named_modules() if isinstance(each, LoraLinear)}
    current = token_keys(0, 1, torch.arange(len(TOKENS)), torch.arange(TOKENS.shape[1]))
    for layer in peft_layers(decoder.spec, lora):
        own = adapted[layer.weights[0].name.removesuffix(".weight")]
        own.dropout.keys.current = current
        theirs = model.get_submodule(f"base_model.model.{layer.module}")
        theirs.lora_dropout["default"] = Dropped(own.dropout)
    with InFloat64():
        wanted = model(TOKENS).logits
    found = decoder(TOKENS)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    for logits in (found, wanted):
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten()).backward()
    gradients = {name: each.grad for name, each in decoder.named_parameters() if each.grad is not None}
    of_peft = {name.replace(".default.", "."): each.grad for name, each in model.named_parameters()}
    for layer in peft_layers(decoder.spec, lora):
        for mine, name in zip(layer.to_peft(lora.rank, gradients), names_in_file(layer), strict=True):
            theirs = of_peft[name.replace("_vector", "_vector.weight")]
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-13)


def test_files_have_the_names_that_peft_writes(tmp_path: Path) -> None:
    lora = LoraSpec(rank=3, dora=True)
    save_theirs(tmp_path / "hf", *CASES["llama"])
    model = theirs_with(decoder_of(tmp_path / "hf", lora), lora, tmp_path / "hf", tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / each / "adapter_model.safetensors") for each in ("ours", "theirs"))
    assert ours.keys() == theirs.keys() and any(name.endswith("lora_magnitude_vector") for name in ours)
    for name, value in theirs.items():
        assert torch.equal(ours[name], value)


def test_the_model_without_adapters_is_the_base(tmp_path: Path) -> None:
    save_theirs(tmp_path / "hf", *CASES["llama biases, wide heads"])
    decoder = decoder_of(tmp_path / "hf", LoraSpec(rank=3, dora=True))
    with InFloat64():
        base = their_model(tmp_path / "hf")(TOKENS).logits
    with adapters_off(decoder):
        torch.testing.assert_close(decoder(TOKENS), base, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(decoder(TOKENS), base, atol=1e-3)


def magnitudes(mesh: Mesh, spec: RunSpec) -> dict[str, Tensor]:
    trainer = Trainer(spec, mesh)
    trainer.initialise(open_weights(spec))
    found = {name: each.full_tensor().clone() for name, each in trainer.states.trained_parameters()}
    return {name: each for name, each in found.items() if name.endswith(MAGNITUDE)}


@pytest.mark.parametrize(
    "layout", some([{}, {"layout.tp": 2}, {"layout.dp": 3, "layout.zero": 1}], [{"layout.tp": 2}]), ids=str
)
def test_magnitudes_begin_as_those_of_peft(ranks: Ranks, layout: dict[str, object], tmp_path: Path) -> None:
    save_theirs(tmp_path / "hf", *CASES["llama"])
    hf = tmp_path / "hf"
    given: dict[str, Any] = {"model.hf": hf, "model.weights": hf, "precision.compute": "fp64"}
    given |= {"data.seq_len": 12, "train.batch_tokens": 36, "lora.rank": 3, "lora.dora": "true"} | layout
    spec = load(None, [(key, str(value)) for key, value in given.items()])
    assert spec.lora is not None
    found = ranks.run(spec.layout, magnitudes, spec)[0]
    config = peft.LoraConfig(r=3, use_dora=True, target_modules="all-linear")
    model = peft.get_peft_model(their_model(hf), config)
    theirs = {name: each.detach() for name, each in model.named_parameters() if "magnitude" in name}
    assert len(found) == len(theirs) > 0
    for layer in peft_layers(spec.model, spec.lora):
        own = found[layer.weights[0].name.removesuffix(".weight") + MAGNITUDE]
        wanted = theirs[f"base_model.model.{layer.module}.lora_magnitude_vector.default.weight"]
        (turned,) = layer.piece.rotary or (None,)
        own = own if turned is None else turned.to_file(own)
        torch.testing.assert_close(own, wanted, rtol=1e-13, atol=0)


def test_peft_refuses_magnitudes_of_routed_experts(tmp_path: Path) -> None:
    save_theirs(tmp_path / "hf", *CASES["mixtral"])
    name = "model.layers.0.mlp.experts.down_proj"
    config = peft.LoraConfig(r=2, use_dora=True, target_modules=[], target_parameters=[name])
    with pytest.raises(ValueError, match="does not work with use_dora"):
        peft.get_peft_model(their_model(tmp_path / "hf"), config)
