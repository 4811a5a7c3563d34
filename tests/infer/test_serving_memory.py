"""The memory of serving that `fit` tells is that of the decoder, its caches and the files of weights."""

from __future__ import annotations

import pytest
import torch

from meshwright import api
from meshwright.exchange.hf_quantised import stored_bytes
from meshwright.exchange.stored_weights import tensor_shapes
from meshwright.infer.forward import StageForward
from meshwright.infer.paged_cache import PageTable, pages_of
from meshwright.infer.sampling import Sampling
from meshwright.model.decoder import Decoder
from meshwright.planner.fit.serving import ServingFit
from meshwright.spec import ModelSpec
from meshwright.weights.quantise import plan_quantisation

BATCH, LENGTH = 3, 1000


def found(model: str) -> tuple[ModelSpec, dict[str, ServingFit]]:
    fits = api.fit(model, gpu="rtx-4090", seq_len=LENGTH, batch=BATCH)
    return fits.model, {each.format: each for each in fits.serving}


@pytest.mark.parametrize("model", ["smollm2-135m", "gpt2", "moe-small", "gemma3-270m"])
def test_weights_and_caches_are_those_of_a_decoder(model: str) -> None:
    spec, fits = found(model)
    with torch.device("meta"):
        decoder = Decoder(spec).to(torch.bfloat16)
        table = PageTable(BATCH * pages_of(LENGTH))
        forward = StageForward(decoder, Sampling(), table.pages)
    weights = sum({id(each): each.nbytes for each in decoder.parameters()}.values())
    cached = sum(cache._buffer.nbytes for cache in forward._caches)
    assert fits["bf16"].needs.parameters == pytest.approx(weights, rel=0.001)
    assert fits["bf16"].needs.activations == cached


@pytest.mark.parametrize("recipe", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("model", ["smollm2-135m", "qwen3-0.6b", "moe-small"])
def test_quantised_weights_have_the_bytes_of_their_files(model: str, recipe: str) -> None:
    spec, fits = found(model)
    if fits[recipe].spec is None:
        assert spec.moe is not None and recipe == "fp8"
        return
    how = plan_quantisation(spec, recipe)  # type: ignore[arg-type]
    stored = stored_bytes(spec, tensor_shapes(spec), how)
    padded = 0.01 if spec.moe is not None else 0.0  # the files have shared experts as wide as the others
    assert fits[recipe].needs.parameters == pytest.approx((1 - padded) * stored, rel=0.003)
