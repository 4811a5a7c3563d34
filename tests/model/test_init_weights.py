"""Initial weights: a function of (seed, name, element index) and of nothing else."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from meshwright.model.decoder import Decoder
from meshwright.model.init import fill_, init_value, init_whole_
from meshwright.spec import ModelSpec
from meshwright.spec.tiling import Tiling, tiled


def whole(shape: tuple[int, ...], seed: int = 3, name: str = "a.weight", dtype=torch.float32) -> Tensor:
    vectors = [torch.arange(size) for size in shape]
    return fill_(
        torch.empty(shape, dtype=dtype),
        seed=seed,
        name=name,
        index_vectors=vectors,
        shape=torch.Size(shape),
        std=1.0,
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "indices",
    [
        [slice(0, 5), slice(None)],
        [slice(5, 13), slice(3, 9)],
        [slice(1, None, 3), slice(None, None, 2)],
        [[12, 0, 7], [2, 1]],
        [slice(0, 0), slice(None)],
    ],
)
def test_any_part_equals_the_part_of_the_whole(indices: list, dtype: torch.dtype) -> None:
    full = whole((13, 11), dtype=dtype)
    vectors = [torch.arange(size)[index] for size, index in zip((13, 11), indices, strict=True)]
    expected = full[vectors[0]][:, vectors[1]]
    part = torch.empty(expected.shape, dtype=dtype)
    fill_(part, seed=3, name="a.weight", index_vectors=vectors, shape=full.shape, std=1.0)
    assert torch.equal(part, expected)


def test_chunks_leave_no_seams() -> None:
    full = whole((64, 9))
    for elements in (1, 9, 100):
        with tiled(Tiling(init_elements=elements)):
            assert torch.equal(whole((64, 9)), full)
    assert torch.equal(whole((576,)), full.flatten()), "the element's flat index decides, not the shape"


def test_values_are_standard_normal() -> None:
    x = whole((1000, 1000), dtype=torch.float64)
    n = x.numel()
    # Five standard errors of each statistic of n independent normals.
    assert abs(float(x.mean())) < 5 / math.sqrt(n)
    assert abs(float(x.var()) - 1) < 5 * math.sqrt(2 / n)
    assert abs(float((x**3).mean())) < 5 * math.sqrt(15 / n)
    assert abs(float((x**4).mean()) - 3) < 5 * math.sqrt(96 / n)
    assert 4.0 < float(x.abs().max()) < 7.0
    # The whole distribution (Kolmogorov-Smirnov), far below the 0.1% point.
    ordered = torch.special.ndtr(x.flatten().sort().values)
    assert float((ordered - torch.arange(n) / n).abs().max()) < 1.95 / math.sqrt(n)
    # Neighbours along both dims know nothing of each other.
    for a, b in ((x[:-1], x[1:]), (x[:, :-1], x[:, 1:])):
        assert abs(float((a * b).mean())) < 5 / math.sqrt(n)


@pytest.mark.parametrize("other", [{"seed": 4}, {"name": "b.weight"}, {"seed": 2**63 - 1}])
def test_streams_do_not_correlate(other: dict) -> None:
    a, b = whole((300, 300), dtype=torch.float64), whole((300, 300), dtype=torch.float64, **other)
    assert abs(float((a * b).mean())) < 5 / 300


def test_every_parameter_starts_as_its_kind() -> None:
    sizes = {"layers": 2, "hidden": 64, "ffn": 96, "heads": 4, "vocab_size": 128}
    spec = ModelSpec(preset=None, **sizes, qk_norm=True, qkv_bias=True, out_bias=True, mlp_bias=True)
    decoder = init_whole_(Decoder(spec), seed=5)
    residual = spec.init_std / math.sqrt(2 * spec.layers)
    for name, parameter in decoder.named_parameters():
        if "norm" in name:
            assert bool((parameter == 1).all()), name
        elif name.endswith("bias"):
            assert bool((parameter == 0).all()), name
        else:
            std = residual if name.endswith(("attn.o.weight", "mlp.down.weight")) else spec.init_std
            assert init_value(spec, name).std == std
            assert abs(float(parameter.detach().std()) / std - 1) < 5 / math.sqrt(2 * parameter.numel()), name


def test_wrong_indices_are_refused() -> None:
    with pytest.raises(ValueError, match=r"a\.weight"):
        fill_(
            torch.empty(3, 2), seed=0, name="a.weight", index_vectors=[torch.arange(2)] * 2,
            shape=torch.Size((4, 2)), std=1.0,
        )  # fmt: skip
