"""A decoder with adapters, and PEFT's model of the same, in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from meshwright.checkpoint.weights import fill
from meshwright.exchange.hf import import_hf
from meshwright.exchange.peft_adapter import peft_targets, write_adapter
from meshwright.model.decoder import Decoder
from meshwright.model.lora import attach_adapters
from meshwright.spec.lora import MAGNITUDE, LoraSpec, is_adapter

peft = pytest.importorskip("peft", reason="peft is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")


def decoder_of(folder: Path, lora: LoraSpec) -> Decoder:
    """The decoder of an HF folder in float64, frozen, with adapters that are not zero."""
    spec, weights = import_hf(folder)
    decoder = Decoder(spec).double()
    fill(decoder.tensors(), weights)
    decoder.requires_grad_(False)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in attach_adapters(decoder, lora).named_parameters():
        if is_adapter(name):
            torch.nn.init.normal_(parameter, float(name.endswith(MAGNITUDE)), 0.1, generator)
            parameter.requires_grad_()
    return decoder.eval()


class InFloat64(TorchFunctionMode):
    """Makes float64 of every fp32 that is asked for, in which transformers computes norms and rotations."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda x: torch.float64 if x is torch.float32 else x, (args, kwargs or {}))
        return (torch.Tensor.double if func is torch.Tensor.float else func)(*args, **kwargs)


def their_model(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def theirs_with(decoder: Decoder, lora: LoraSpec, folder: Path, out: Path) -> Any:
    """PEFT's model of a folder, with the decoder's adapters by way of a folder of PEFT."""
    tensors = {name: each.detach() for name, each in decoder.named_parameters()}
    write_adapter(out, decoder.spec, lora, tensors, str(folder), torch.float64)
    model = peft.PeftModel.from_pretrained(their_model(folder), out, is_trainable=True).eval()
    written = {name for name, each in model.named_parameters() if each.requires_grad}
    assert len(written) == (3 if lora.dora else 2) * len(peft_targets(decoder.spec, lora))
    return model
