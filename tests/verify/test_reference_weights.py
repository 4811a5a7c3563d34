"""The second implementation of initial weights gives each parameter of `Decoder` its value, bit by bit."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from meshwright.comm.mesh import Mesh
from meshwright.model import init
from meshwright.model.decoder import Decoder
from meshwright.model.init import InitValue, init_value, init_whole_
from meshwright.spec import ModelSpec, RunSpec
from meshwright.verify.reference.weights import initial_weights
from meshwright.verify.verify import verify
from ranks import Ranks
from small import spec_of

GPT2 = {
    "model__family": "gpt2", "model__norm": "layernorm", "model__activation": "gelu_tanh",
    "model__position": "learned", "model__max_seq_len": 16, "model__qkv_bias": "true",
    "model__out_bias": "true", "model__mlp_bias": "true", "model__tied": "true", "model__kv_heads": 4,
}  # fmt: skip
MOE = {
    "model__moe__experts": 4, "model__moe__top_k": 2, "model__moe__ffn": 12, "model__moe__shared_ffn": 8,
    "model__moe__dense_first": 1, "model__layers": 3,
}  # fmt: skip
MLA = {
    "model__kv_heads": 4, "model__mla__q_rank": 12, "model__mla__kv_rank": 8, "model__mla__rope_dim": 4,
    "model__mla__v_dim": 6,
}  # fmt: skip
MODELS = {
    "llama": {},
    "qwen3": {"model__qk_norm": "true", "model__head_dim": 12},
    "tied": {"model__tied": "true"},
    "gpt2": GPT2,
    "moe": MOE,
    "mla": MLA,
}


def of_the_decoder(model: ModelSpec, seed: int) -> dict[str, torch.Tensor]:
    decoder = init_whole_(Decoder(model).double(), seed)
    return {name: parameter.detach() for name, parameter in decoder.named_parameters()}


@pytest.mark.parametrize("seed", [0, 2**31])
@pytest.mark.parametrize("flags", MODELS.values(), ids=MODELS)
def test_every_element_of_every_parameter_is_equal(flags: dict[str, object], seed: int) -> None:
    model = spec_of({"model.vocab_size": 61, "data.seq_len": 16}, **flags).model
    plain, decoder = initial_weights(model, seed), of_the_decoder(model, seed)
    assert plain.keys() == decoder.keys()
    for name, tensor in decoder.items():
        assert plain[name].dtype == torch.float64
        assert torch.equal(plain[name], tensor), name


def without_depth(spec: ModelSpec, name: str) -> InitValue:
    """Projections into the residual stream are not made smaller by depth."""
    value = init_value(spec, name)
    return InitValue(value.mean, spec.init_std if value.std else 0.0)


def verify_with_another_initialiser(mesh: Mesh, spec: RunSpec) -> dict[str, object] | None:
    with patch.object(init, "init_value", without_depth):
        return verify(spec, mesh, 1)


def test_verify_finds_a_wrong_initialiser(ranks: Ranks) -> None:
    spec = spec_of({"data.seq_len": 16, "train.batch_tokens": 64, "layout.dp": 2})
    found = ranks.run(spec.layout, verify_with_another_initialiser, spec)[0]
    assert not found["equal"]
    assert found["first"]["kind"] == "initial weight"
    assert found["rows"][0]["worst"] > 1e-6
