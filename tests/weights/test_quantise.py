"""Quantised folders: the numbers of compressed-tensors, the tokens of transformers, and what they cost."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_models import CASES, GPT2, MIXTRAL, read_whole, save_theirs
from meshwright import api
from meshwright.exchange.hf import export_hf, load_hf
from meshwright.exchange.hf_quantised import (
    Quantisation,
    pack,
    quantised_tensors,
    stored_bytes,
    unpack,
)
from meshwright.infer import generate
from meshwright.model.decoder import Decoder
from meshwright.model.quantisation import BITS, fake_quantise
from meshwright.spec import ModelSpec, UserError
from meshwright.spec.precision import Quantised
from meshwright.weights.quantise import nearest, plan_quantisation

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
compressed = pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")

RECIPES = get_args(Quantised)
PROMPT = [5, 17, 3, 96, 41, 5, 0, 71]
OPENED = [
    *((case, recipe) for case in ("llama", "qwen3 tied, biases", "mistral window") for recipe in RECIPES),
    *((case, recipe) for case in ("mixtral", "qwen3_moe") for recipe in RECIPES[:2]),
    ("deepseek_v3", "int8"),
]
QUICK = {
    *(("llama", recipe) for recipe in RECIPES), ("qwen3 tied, biases", "int4"),
    ("mistral window", "int8-dynamic"), ("qwen3_moe", "int4"), ("mixtral", "int8"), ("deepseek_v3", "int8"),
}  # fmt: skip


def write(folder: Path, decoder: Decoder, recipe: Quantised, **how: Any) -> Quantisation:
    """Write a quantised folder of a decoder, rounded to nearest."""
    plan = plan_quantisation(decoder.spec, recipe, **how)
    codes = nearest(decoder.spec, decoder.tensors(), plan)
    export_hf(folder, decoder.spec, decoder.tensors(), dtype=torch.bfloat16, quantised=(plan, codes))
    return plan


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Decoder]:
    """A function from a case of `CASES` to its decoder with random weights, in fp32."""
    made: dict[str, Decoder] = {}

    def family(case: str) -> Decoder:
        if case not in made:
            folder = tmp_path_factory.mktemp("family")
            save_theirs(folder, *CASES[case])
            made[case] = load_hf(folder)
        return made[case]

    return family


@pytest.mark.parametrize(
    ("case", "recipe"),
    [pytest.param(*each, marks=() if each in QUICK else pytest.mark.full) for each in OPENED],
)
def test_transformers_opens_each_recipe_with_our_tokens(
    families: Callable[[str], Decoder], case: str, recipe: Quantised, tmp_path: Path
) -> None:
    """In fp32; transformers rounds experts to bf16 as it stacks them, so here ours are, too.

    The largest number of a token falls between two codes of int8, where the last bit of a sum decides.
    """
    write(tmp_path / "q", families(case), recipe)
    ours = load_hf(tmp_path / "q")
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if ".experts." in name:
                parameter.copy_(parameter.bfloat16())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.float32).eval()
    for name, parameter in theirs.named_parameters():
        if ".experts." in name:
            parameter.data = parameter.data.float()
    tokens = torch.tensor([PROMPT])
    near = 0.05 if recipe == "int8-dynamic" else 2e-5
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=near)
        for _ in range(12):
            tokens = torch.cat([tokens, theirs(tokens).logits[:, -1:].argmax(-1)], 1)
    found = generate(ours, PROMPT, 12)
    assert found == tokens[0, len(PROMPT) :].tolist()
    assert len(set(found)) > 1


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", [32, 44, 97])
def test_codes_are_packed_as_compressed_tensors_packs_them(bits: int, columns: int) -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

    draw = torch.Generator().manual_seed(0)
    half = 2 ** (bits - 1)
    codes = torch.randint(-half, half, (5, columns), generator=draw, dtype=torch.int8)
    words = pack(codes, bits)
    assert torch.equal(unpack(words, bits, columns), codes)
    assert torch.equal(unpack_from_int32(words, bits, codes.shape), codes)
    theirs = pack_to_int32(codes, bits)
    assert words.shape == theirs.shape
    assert torch.equal(unpack(theirs, bits, columns), codes)


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_are_those_of_compressed_tensors(
    families: Callable[[str], Decoder], recipe: Quantised, tmp_path: Path
) -> None:
    """Its decompression, given scales in fp32, and the rounding of quantisation-aware training."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    decoder = families("llama")
    how = write(tmp_path / "q", decoder, recipe)
    config = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    stored = load_file(tmp_path / "q" / "model.safetensors")
    spec, read = read_whole(tmp_path / "q")
    assert spec.parameters == decoder.spec.parameters
    trained = decoder.tensors()
    pieces = list(quantised_tensors(spec))
    assert len(pieces) == 3 * 7
    for piece in pieces:
        stem, (name,) = piece.hf.removesuffix("weight"), piece.parameters
        own = {key.removeprefix(stem): value for key, value in stored.items() if key.startswith(stem)}
        own["weight_scale"] = own["weight_scale"].float()
        theirs = BaseCompressor.get_value_from_registry(config["format"]).decompress(own, scheme)["weight"]
        assert torch.equal(read[name], theirs)
        assert torch.equal(read[name], fake_quantise(trained[name], recipe, how.group))
    assert torch.equal(read["embed.weight"], trained["embed.weight"].bfloat16())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("case", ["llama", "qwen3 tied, biases", "qwen3_moe"])
def test_sizes_are_as_computed(
    families: Callable[[str], Decoder], case: str, recipe: Quantised, tmp_path: Path
) -> None:
    decoder = families(case)
    if case == "qwen3_moe" and recipe in ("int8-dynamic", "fp8"):
        with pytest.raises(UserError, match="rounds the inputs of experts in vLLM and not in transformers"):
            write(tmp_path / "q", decoder, recipe)
        return
    how = write(tmp_path / "q", decoder, recipe)
    shapes = {name: tensor.shape for name, tensor in decoder.tensors().items()}
    stored = load_file(tmp_path / "q" / "model.safetensors")
    assert sum(tensor.nbytes for tensor in stored.values()) == stored_bytes(decoder.spec, shapes, how)
    numbers = sum(piece.elements(shapes) for piece in quantised_tensors(decoder.spec))
    codes = sum(
        tensor.nbytes for tensor in stored.values() if tensor.dtype not in (torch.bfloat16, torch.int64)
    )
    assert codes == numbers * BITS[recipe] // 8


# Folders ------------------------------------------------------------------------------------------------


def edit(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def configure(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= values
    (folder / "config.json").write_text(json.dumps(config))


LAYER = "model.layers.1.mlp.up_proj"
DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (lambda f: edit(f, lambda t: t.pop(f"{LAYER}.weight_packed")), f"layer {LAYER} lacks a part"),
    (lambda f: edit(f, lambda t: t.pop(f"{LAYER}.weight_scale")), f"lacks the tensor {LAYER}.weight"),
    (lambda f: edit(f, lambda t: t.pop(f"{LAYER}.weight_shape")), f"layer {LAYER} lacks a part"),
    (
        lambda f: edit(f, lambda t: t.update({f"{LAYER}.weight_shape": torch.tensor([96, -64])})),
        f"layer {LAYER} lacks a part",
    ),
    (
        lambda f: edit(f, lambda t: t.update({f"{LAYER}.weight_shape": torch.tensor([96, 128])})),
        rf"layer {LAYER} has codes of shape \[96, 8\] in I32",
    ),
    (
        lambda f: edit(f, lambda t: t.update({f"{LAYER}.weight_scale": torch.ones(96, 4)})),
        r"has scales of shape \[96, 4\] in F32",
    ),
    (
        lambda f: edit(f, lambda t: t[f"{LAYER}.weight_scale"].fill_(float("nan"))),
        f"tensor {LAYER}.weight .* not finite",
    ),
    (lambda f: edit(f, lambda t: t.update({f"{LAYER}.weight_g_idx": torch.ones(64)})), "does not have"),
    (lambda f: configure(f, quant_method="gptq"), "quantised in a way that is not read .*'gptq'"),
    (lambda f: configure(f, format="marlin-24"), "quantised in a way that is not read"),
    (lambda f: configure(f, config_groups={}), "quantised in a way that is not read"),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGES)
def test_folders_that_do_not_fit_together_are_one_sentence(
    families: Callable[[str], Decoder], damage: Callable[[Path], None], words: str, tmp_path: Path
) -> None:
    write(tmp_path / "q", families("llama"), "int4")
    damage(tmp_path / "q")
    with pytest.raises(UserError, match=words) as caught:
        load_hf(tmp_path / "q")
    assert "\n" not in str(caught.value)


def test_a_config_of_llm_compressor_is_read(families: Callable[[str], Decoder], tmp_path: Path) -> None:
    """With all of its keys, most of which say what is the case without them."""
    from compressed_tensors.quantization import QuantizationConfig

    write(tmp_path / "q", families("llama"), "int4")
    config = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    configure(tmp_path / "q", **QuantizationConfig.model_validate(config).model_dump(mode="json"))
    assert generate(load_hf(tmp_path / "q"), PROMPT, 3)


def test_layers_that_are_kept_stay_in_bf16(families: Callable[[str], Decoder], tmp_path: Path) -> None:
    decoder = families("llama")
    how = write(tmp_path / "q", decoder, "fp8", keep=["*.down_proj", "model.layers.0.self_attn.[qkv]_proj"])
    assert len(how.kept) == 1 + 3 + 3
    with safe_open(tmp_path / "q" / "model.safetensors", framework="pt") as file:
        kept = file.get_tensor("model.layers.2.mlp.down_proj.weight")
    assert torch.equal(kept, decoder.tensors()["blocks.2.mlp.down.weight"].bfloat16())
    ours = load_hf(tmp_path / "q")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.float32).eval()
    tokens = torch.tensor([PROMPT])
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("fields", "how", "words"),
    [
        ({}, {"keep": ["*.gate_proj"]}, "gate_proj is kept and .*up_proj is not, which vLLM computes as one"),
        ({}, {"keep": ["*.dwon_proj"]}, "'.*dwon_proj' matches no linear layer; give a name such as model"),
        ({}, {"keep": ["model.layers.*"]}, "every linear layer is kept"),
        ({}, {"recipe": "int8", "group": 32}, "group-size: 'int8' has a scale for each row"),
        ({"ffn": 96}, {"group": 128}, "128 columns share a scale, and .* has 64; give 32"),
        ({"ffn": 40}, {}, "32 columns share a scale, and .*down_proj has 40; --keep .*down_proj, or .* int8"),
    ],
)  # fmt: skip
def test_what_does_not_fit_a_model_is_one_sentence(
    fields: dict[str, object], how: dict[str, Any], words: str
) -> None:
    given = {
        "preset": None,
        "layers": 2,
        "hidden": 64,
        "ffn": 64,
        "heads": 4,
        "kv_heads": 2,
        "vocab_size": 97,
    }
    with pytest.raises(UserError, match=words):
        plan_quantisation(ModelSpec.model_validate(given | fields), **({"recipe": "int4"} | how))


def test_the_largest_group_that_divides_all_widths_is_taken() -> None:
    given = {"preset": None, "layers": 2, "hidden": 256, "heads": 4, "kv_heads": 2, "vocab_size": 97}
    for ffn, group in ((512, 128), (704, 64), (352, 32)):
        assert plan_quantisation(ModelSpec.model_validate(given | {"ffn": ffn}), "int4").group == group
    model = ModelSpec.model_validate(given | {"ffn": 352})
    assert plan_quantisation(model, "int4", keep=["*.down_proj"]).group == 128


def test_families_that_clients_do_not_open_are_refused(tmp_path: Path) -> None:
    save_theirs(tmp_path / "gpt2", "GPT2", GPT2)
    with pytest.raises(UserError, match="GPT-2's layers are stored as Conv1D"):
        api.quantise(tmp_path / "gpt2", tmp_path / "q", "int8")
    save_theirs(tmp_path / "moe", "Mixtral", MIXTRAL)
    with pytest.raises(UserError, match="'gptq' needs many inputs of every linear layer"):
        api.quantise(tmp_path / "moe", tmp_path / "q", "int4", algorithm="gptq")
    assert not (tmp_path / "q").exists()
