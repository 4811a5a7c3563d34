"""Packed weights of linear layers: the same tokens, and no second copy."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from meshwright.infer import generate, packed_linears
from meshwright.infer.packed_linears import pack_linears
from meshwright.model.decoder import Decoder
from meshwright.model.init import init_whole_
from meshwright.spec import ModelSpec
from small_decoders import BLOCKS, SMALL

SHAPES = {
    "llama": {},
    **BLOCKS,
    "tied, biases": {"tied": True, "qkv_bias": True, "mlp_bias": True, "out_bias": True},
    "windows": {
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_local_base_freq": 100.0,
    },
    "latents": {"kv_heads": 4, "mla": {"q_rank": 12, "kv_rank": 8, "rope_dim": 6, "v_dim": 10}},
    "experts": {"moe": {"experts": 4, "top_k": 2, "ffn": 24, "shared_ffn": 16, "dense_first": 1}},
    "gpt": {"norm": "layernorm", "activation": "gelu", "position": "learned", "qkv_bias": True},
}
PROMPTS = torch.tensor([[5, 17, 3, 96, 41, 5, 0], [9] * 7, [1, 2, 3, 4, 5, 6, 7]])


def make_decoder(shape: str) -> Decoder:
    spec = ModelSpec.model_validate(SMALL | SHAPES[shape])
    decoder = init_whole_(Decoder(spec), seed=1).eval()
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if name.endswith("bias"):
                parameter.uniform_(-0.3, 0.3)
    return decoder


@pytest.mark.parametrize("shape", SHAPES)
def test_packed_weights_choose_the_same_tokens(shape: str) -> None:
    """Equal, and not only close: these models leave no two tokens so near each other."""
    decoder = make_decoder(shape)
    expected = generate(decoder, PROMPTS, 20)
    assert len(expected.unique()) > 5
    with patch.object(packed_linears, "_SMALLEST", 0):
        packed = pack_linears(decoder)
    assert torch.equal(generate(packed, PROMPTS, 20), expected)
    assert torch.equal(generate(packed, PROMPTS.repeat(4, 1), 20), expected.repeat(4, 1))  # keys are copied
    dense = [p for name, p in packed.named_parameters() if name.endswith(("attn.o.weight", "mlp.up.weight"))]
    assert dense and all(p.is_meta for p in dense), "the weights would be in memory twice"


@pytest.mark.parametrize(("dtype", "smallest"), [(torch.float64, 0), (torch.float32, 2**18)])
def test_weights_in_float64_and_small_ones_stay_as_they_are(dtype: torch.dtype, smallest: int) -> None:
    decoder = make_decoder("llama").to(dtype)
    expected = generate(decoder, PROMPTS, 5)
    with patch.object(packed_linears, "_SMALLEST", smallest):
        packed = pack_linears(decoder)
    assert not any(parameter.is_meta for parameter in packed.parameters())
    for prompts, tokens in ((PROMPTS, expected), (PROMPTS[:1], expected[:1])):  # of one row, no packed weight
        assert torch.equal(generate(packed, prompts, 5), tokens)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_formats_generate_whether_or_not_this_cpu_has_products_of_them(dtype: torch.dtype) -> None:
    decoder = make_decoder("llama").to(dtype)
    with patch.object(packed_linears, "_SMALLEST", 0):
        assert generate(pack_linears(decoder), PROMPTS, 5).shape == (3, 5)
