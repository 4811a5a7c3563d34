"""Parts of weights: a rank's rectangles are read alone, whatever order and form files have them in."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hf_models import CASES, read_whole, save_theirs
from meshwright.checkpoint.save_plan import narrow
from meshwright.exchange.hf import import_hf
from meshwright.exchange.hf_files import SafetensorsFiles
from meshwright.spec.sharded_tensor import Rectangle

FORMS = [
    "llama biases, wide heads",
    "gpt2",
    "phi3 window, partial rotation",
    "mixtral",
    "deepseek_v3",
    "glm4",
]


def any_rectangle(shape: torch.Size, draw: random.Random) -> Rectangle:
    bounds = [sorted(draw.sample(range(size + 1), 2)) for size in shape]
    return tuple(first for first, _ in bounds), tuple(end - first for first, end in bounds)


@pytest.mark.parametrize("case", FORMS)
def test_any_rectangle_is_that_of_the_whole(case: str, tmp_path: Path) -> None:
    save_theirs(tmp_path, *CASES[case])
    _, wholes = read_whole(tmp_path)
    _, weights = import_hf(tmp_path)
    draw = random.Random(0)
    for _ in range(5):
        wanted = {name: [any_rectangle(value.shape, draw)] for name, value in wholes.items()}
        found = {name: torch.full_like(value, torch.nan) for name, value in wholes.items()}
        for name, rectangle, value in weights.parts(wanted):
            assert value.shape == rectangle[1]
            narrow(found[name], rectangle).copy_(value)
        for name, (rectangle,) in wanted.items():
            assert torch.equal(narrow(found[name], rectangle), narrow(wholes[name], rectangle)), name


def test_what_a_rank_does_not_hold_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_theirs(tmp_path, *CASES["qwen3_moe"])
    spec, weights = import_hf(tmp_path)
    assert spec.moe is not None
    given, sizes = os.preadv, []

    def noted(descriptor: int, buffers: list[Any], offset: int) -> int:
        sizes.append(sum(map(len, buffers)))
        return given(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", noted)
    shape = (spec.moe.experts, spec.moe.ffn, spec.hidden)
    expert = ((1, 0, 0), (1, *shape[1:]))
    ((_, rectangle, _),) = weights.parts({"blocks.0.mlp.experts.gate": [expert]})
    assert rectangle == expert and sum(sizes) == 4 * spec.moe.ffn * spec.hidden
    sizes.clear()
    rows = ((10, 0), (7, spec.hidden))
    list(weights.parts({"embed.weight": [rows]}))
    assert sum(sizes) == 4 * 7 * spec.hidden


@pytest.mark.parametrize("case", FORMS)
def test_what_reading_takes_is_known_before(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_theirs(tmp_path, *CASES[case])
    _, wholes = read_whole(tmp_path)
    _, weights = import_hf(tmp_path)
    draw, given, sizes = random.Random(1), os.preadv, []

    def noted(descriptor: int, buffers: list[Any], offset: int) -> int:
        sizes.append(sum(map(len, buffers)))
        return given(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", noted)
    wanted = {name: [any_rectangle(value.shape, draw)] for name, value in wholes.items()}
    told = weights.reading(wanted)
    assert not sizes
    list(weights.parts(wanted))
    assert sum(sizes) == told.bytes > told.at_a_time > 0


def test_long_parts_of_rows_are_read_alone(tmp_path: Path) -> None:
    value = torch.randn(6, 5000, generator=torch.Generator().manual_seed(0))
    save_file({"model.norm.weight": value}, tmp_path / "x.safetensors")
    header = (tmp_path / "x.safetensors", (6, 5000), "F32")
    start = (tmp_path / "x.safetensors").stat().st_size - value.nbytes
    files = SafetensorsFiles({"model.norm.weight": header}, {"model.norm.weight": start})
    for columns in (1100, 900):
        rectangle: Rectangle = ((1, 300), (4, columns))
        (found,) = files.parts("model.norm.weight", [rectangle])
        assert torch.equal(found, value[1:5, 300 : 300 + columns])
        read = columns if columns > 1024 else 5000  # a page is 1,024 numbers
        assert files.reading("model.norm.weight", [rectangle]).bytes == 4 * 4 * read
