"""HF folders whose weights have a scale for each block: fp8 as DeepSeek-V3's, and mxfp4 as GPT-OSS's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_models import DEEPSEEK, GPT_OSS, TOKENS, read_whole, save_theirs
from meshwright.exchange.hf import import_hf, load_hf
from meshwright.exchange.hf_block_scaled import from_mxfp4, from_tiles
from meshwright.spec import UserError

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SIDES = [4, 2]
FP8 = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": SIDES,
}  # fmt: skip


def quantise(weight: Tensor, high: int, wide: int) -> tuple[Tensor, Tensor]:
    """Codes in e4m3 and scales of blocks, one block at a time."""
    rows, columns = weight.shape
    scales = torch.empty(-(-rows // high), -(-columns // wide))
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide)
            scales[i, j] = weight[place].abs().max() / 448
            codes[place] = (weight[place] / scales[i, j]).to(torch.float8_e4m3fn)
    return codes, scales


def is_quantised(name: str) -> bool:
    return name.endswith(("_proj.weight", "_mqa.weight"))


def make_fp8(folder: Path) -> Any:
    """A DeepSeek-V3 in fp8 in `folder`; returns the model with weights of codes times scales."""
    model = save_theirs(folder, "DeepseekV3", DEEPSEEK)
    file, config = folder / "model.safetensors", folder / "config.json"
    plain, stored = load_file(file), {}
    for name, tensor in plain.items():
        stored[name] = tensor
        if is_quantised(name):
            stored[name], stored[f"{name}_scale_inv"] = quantise(tensor, *SIDES)
    save_file(stored, file, metadata={"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": FP8}))
    return model


def edit(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_fp8_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    make_fp8(tmp_path)
    how = transformers.FineGrainedFP8Config(dequantize=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=how, dtype=torch.float32
    ).eval()
    decoder = load_hf(tmp_path, torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(decoder(TOKENS), theirs(TOKENS).logits, rtol=0, atol=1e-5)
    _, tensors = read_whole(tmp_path)
    own = dict(theirs.named_parameters())
    for layer in range(3):
        assert torch.equal(
            tensors[f"blocks.{layer}.attn.o.weight"], own[f"model.layers.{layer}.self_attn.o_proj.weight"]
        )


@pytest.mark.parametrize(
    ("shape", "sides"), [((50, 33), (32, 16)), ((7, 5), (128, 128)), ((64, 32), (1, 32))]
)
def test_tiles_at_the_ends_may_be_smaller(shape: tuple[int, int], sides: tuple[int, int]) -> None:
    codes, scales = quantise(torch.randn(shape, generator=torch.Generator().manual_seed(0)), *sides)
    found = from_tiles(codes, scales, sides)
    for row in range(shape[0]):
        for column in range(shape[1]):
            exact = float(codes[row, column].float() * scales[row // sides[0], column // sides[1]])
            assert float(found[row, column]) == exact


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, e: t.update({e: torch.ones(2, 2)}), r"o_proj\.weight has scales of shape \[2, 2\] in F32"),
        (lambda t, e: t.update({e: t[e].half()}), r"o_proj\.weight has scales of shape .* in F16"),
        (
            lambda t, e: t.update({e.removesuffix("_scale_inv"): torch.ones(64, 48)}),
            r"o_proj\.weight has scales but no codes in fp8",
        ),
        (lambda t, e: t.pop(e), r"o_proj\.weight is in F8_E4M3; convert it"),
        (lambda t, e: t[e].fill_(torch.nan), r"o_proj\.weight has values that are not finite"),
    ],
)
def test_parts_of_weights_in_fp8_that_do_not_fit_are_named(change: Any, message: str, tmp_path: Path) -> None:
    make_fp8(tmp_path)
    edit(tmp_path, lambda tensors: change(tensors, "model.layers.0.self_attn.o_proj.weight_scale_inv"))
    with pytest.raises(UserError, match=message):
        load_hf(tmp_path)


def test_sides_of_blocks_are_whole_numbers(tmp_path: Path) -> None:
    make_fp8(tmp_path)
    config = tmp_path / "config.json"
    read = json.loads(config.read_text())
    config.write_text(json.dumps(read | {"quantization_config": FP8 | {"weight_block_size": [128, 0]}}))
    with pytest.raises(UserError, match=r"weight_block_size \[128, 0\]; it must be two whole numbers"):
        import_hf(tmp_path)


def test_mxfp4_is_read_as_transformers_reads_it() -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 10, 4, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(90, 150, (3, 10, 4), generator=generator, dtype=torch.uint8)
    ours = from_mxfp4(blocks, scales).mT
    for dtype in (torch.bfloat16, torch.float32):
        theirs = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=dtype)
        assert ours.shape == theirs.shape == (3, 128, 10)
        assert torch.equal(ours.to(dtype), theirs)


def make_mxfp4(folder: Path) -> None:
    """A GPT-OSS with random experts in mxfp4, under the names of the published files."""
    save_theirs(folder, "GptOss", GPT_OSS | {"intermediate_size": 96})
    file, config = folder / "model.safetensors", folder / "config.json"
    generator, stored = torch.Generator().manual_seed(1), {}
    for name, tensor in load_file(file).items():
        if not name.endswith("experts.gate_up_proj") and not name.endswith("experts.down_proj"):
            stored[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        sizes = experts, outputs, inputs // 32
        codes = torch.randint(0, 256, (*sizes, 16), generator=generator, dtype=torch.uint8)
        stored[f"{name}_blocks"] = codes
        stored[f"{name}_scales"] = torch.randint(120, 124, sizes, generator=generator, dtype=torch.uint8)
    save_file(stored, file, metadata={"format": "pt"})
    described = {"quantization_config": {"quant_method": "mxfp4"}}
    config.write_text(json.dumps(json.loads(config.read_text()) | described))


def test_gpt_oss_in_mxfp4_computes_what_transformers_computes(tmp_path: Path) -> None:
    make_mxfp4(tmp_path)
    how = transformers.Mxfp4Config(dequantize=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=how, dtype=torch.float32
    ).eval()
    with torch.no_grad():
        ours = load_hf(tmp_path, torch.float32)(TOKENS)
        torch.testing.assert_close(ours, theirs(TOKENS).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, e: t.pop(f"{e}_scales"), "down_proj has blocks but no scales that fit them"),
        (
            lambda t, e: t.update({f"{e}_blocks": t[f"{e}_blocks"].int()}),
            r"down_proj has blocks of shape .* in I32",
        ),
        (lambda t, e: t[f"{e}_scales"].fill_(255), "down_proj has values that are not finite"),
    ],
)
def test_parts_of_weights_in_mxfp4_that_do_not_fit_are_named(
    change: Any, message: str, tmp_path: Path
) -> None:
    make_mxfp4(tmp_path)
    edit(tmp_path, lambda tensors: change(tensors, "model.layers.1.mlp.experts.down_proj"))
    with pytest.raises(UserError, match=message):
        load_hf(tmp_path)
