"""The table of parameters is the decoder's own: names, shapes and order, for every kind of model."""

from __future__ import annotations

import pytest
import torch

from meshwright.model.decoder import Decoder
from meshwright.spec import ModelSpec
from meshwright.spec.parameters import parameters, piece_of
from meshwright.spec.presets import PRESETS

MODELS = [
    *({"preset": name, "layers": 2} for name in PRESETS),
    {"preset": "tiny", "tied": True, "qk_norm": True, "mlp_bias": True, "out_bias": True},
]


@pytest.mark.parametrize("fields", MODELS, ids=str)
def test_names_and_shapes_are_the_decoder_s(fields: dict[str, object]) -> None:
    model = ModelSpec.model_validate(fields)
    with torch.device("meta"):
        built = {name: tuple(parameter.shape) for name, parameter in Decoder(model).named_parameters()}
    table = {p.name: p.shape for unit in parameters(model).values() for p in unit}
    assert table == built


PUBLISHED = [
    ("mixtral-8x7b", 46.7, 12.9),
    ("mixtral-8x22b", 140.6, 39.2),
    ("qwen3-30b-a3b", 30.5, 3.4),
    ("qwen3-235b-a22b", 235.1, 22.2),
    ("deepseek-v3", 671.0, 37.6),
]
"""Billions in all and of one token, embeddings included, by model cards. Qwen3-30B-A3B's says 3.3: it rounds
3.35 down."""


@pytest.mark.parametrize(("preset", "billions", "active"), PUBLISHED)
def test_parameters_are_as_many_as_published(preset: str, billions: float, active: float) -> None:
    model = ModelSpec(preset=preset)
    assert round(model.parameters / 1e9, 1) == billions
    assert round(model.active_parameters / 1e9, 1) == active


@pytest.mark.parametrize(("tp", "kv_heads", "vocab"), [(1, 8, 61), (2, 8, 61), (4, 2, 8191), (8, 1, 64)])
def test_pieces_cover_the_whole_once_for_each_copy(tp: int, kv_heads: int, vocab: int) -> None:
    model = ModelSpec.model_validate({"preset": "tiny", "kv_heads": kv_heads, "vocab_size": vocab})
    for unit in parameters(model).values():
        for parameter in unit:
            pieces = [piece_of(parameter, model, tp, rank, True) for rank in range(tp)]
            length = parameter.shape[parameter.dim]
            held = [i for p in pieces for i in range(p.first, p.first + p.size - p.padding)]
            assert sorted(held) == sorted(list(range(length)) * pieces[0].copies)
