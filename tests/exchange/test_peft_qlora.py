"""Adapters on a quantised base against PEFT on a model of transformers that has the rounded weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft_models import InFloat64, decoder_of, theirs_with
from torch import Tensor

from blocks_in_numpy import in_numpy
from meshwright.comm.mesh import Mesh
from meshwright.exchange.peft_adapter import names_in_file, peft_layers
from meshwright.spec import RunSpec, load
from meshwright.spec.lora import BASE_BITS, is_adapter
from meshwright.spec.parameters import BaseFormat
from meshwright.train.step import Trainer
from meshwright.weights.initial_weights import open_weights
from ranks import Ranks

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

TOKENS = torch.arange(24).reshape(2, 12) * 7 % 61
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def loss_of(logits: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())


def computed(mesh: Mesh, spec: RunSpec, adapters: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and the gradients of the adapters, of a run that starts from a folder, with these adapters."""
    trainer = Trainer(spec, mesh)
    trainer.initialise(open_weights(spec))
    for name, stored in trainer.states.trained_parameters():
        stored.to_local().copy_(adapters[name])  # type: ignore[union-attr]
    trainer.states.begin_step(1)
    trainer.states.begin_microbatch(last=True)
    logits = trainer.decoder(TOKENS)
    loss_of(logits).backward()
    trainer.states.finish_step()
    return logits.detach(), {name: each.full_tensor().clone() for name, each in trainer.states.gradients()}


def save_rounded(folder: Path, out: Path, form: BaseFormat) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    for name, weight in model.named_parameters():
        if name.split(".")[-2] in LINEAR:
            weight.data.copy_(torch.from_numpy(in_numpy(weight.detach().numpy(), form)))
    model.save_pretrained(out)


@pytest.mark.parametrize("form", list(BASE_BITS))
def test_logits_and_gradients_are_those_of_peft_on_rounded_weights(
    ranks: Ranks, form: BaseFormat, tmp_path: Path
) -> None:
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=61, head_dim=16, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    hf, rounded = tmp_path / "hf", tmp_path / "rounded"
    transformers.LlamaForCausalLM(config).double().save_pretrained(hf)
    save_rounded(hf, rounded, form)
    given: dict[str, Any] = {"model.hf": hf, "model.weights": hf, "precision.compute": "fp64"}
    given |= {"data.seq_len": 12, "train.batch_tokens": 24, "lora.rank": 3, "lora.quantise": form}
    spec = load(None, [(key, str(value)) for key, value in given.items()])
    assert spec.lora is not None
    decoder = decoder_of(rounded, spec.lora)
    adapters = {name: each.detach() for name, each in decoder.named_parameters() if is_adapter(name)}
    logits, found = ranks.run(spec.layout, computed, spec, adapters)[0]
    with InFloat64():
        model = theirs_with(decoder, spec.lora, rounded, tmp_path / "adapter")
        theirs = model(TOKENS).logits
    torch.testing.assert_close(logits, theirs, rtol=1e-10, atol=1e-10)
    loss_of(theirs).backward()
    wanted = {name.replace(".default.", "."): each.grad for name, each in model.named_parameters()}
    for layer in peft_layers(decoder.spec, spec.lora):
        for mine, name in zip(layer.to_peft(spec.lora.rank, found), names_in_file(layer), strict=True):
            torch.testing.assert_close(mine, wanted[name], rtol=1e-10, atol=1e-13)
