"""Exports as other programs meet them: the first token, padding, the model card, formats, memory."""

from __future__ import annotations

import json
import struct
import tomllib
import weakref
from itertools import starmap
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from hf_models import LLAMA, save_theirs, their_logits
from meshwright import api
from meshwright.checkpoint.weights import whole_part
from meshwright.data.tokenizer import END, byte_tokenizer
from meshwright.exchange.hf import export_hf, load_hf, tensor_shapes
from meshwright.exchange.hf_config import export_remark
from meshwright.exchange.hub import hub_id
from meshwright.exchange.parameter_source import HeldParameters
from meshwright.exchange.safetensors_stream import SafetensorsStream, TensorInfo
from meshwright.model.decoder import Decoder
from meshwright.model.init import init_whole_
from meshwright.spec import ModelSpec, RunSpec, UserError
from meshwright.spec.load import from_tree
from meshwright.spec.presets import PRESETS
from meshwright.weights.load import write_run
from meshwright.weights.model_card import model_card

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

PROMPTS = ["import ", "def main(", "class A", "    return ", "# The "]
SHARED = {
    "preset": "moe-tiny", "layers": 2, "hidden": 32, "ffn": 48, "heads": 2, "kv_heads": 1, "head_dim": 16,
    "vocab_size": 101, "moe": {"experts": 4, "top_k": 2, "ffn": 32, "shared_ffn": 40},
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with random weights, whose tokenizer is one of this program's own."""
    folder = tmp_path_factory.mktemp("run")
    byte_tokenizer().save(folder)
    model = ModelSpec.model_validate({
        "preset": "tiny", "layers": 2, "hidden": 48, "ffn": 64, "heads": 4, "kv_heads": 2, "head_dim": 12,
        "vocab_size": 257, "max_seq_len": 128, "init_std": 0.3,
    })  # fmt: skip
    tensors = init_whole_(Decoder(model), 3).tensors()
    parts = starmap(whole_part, tensors.items())
    beside = sorted(folder.glob("*.json"))
    write_run(folder / "out", model, parts, {"seq_len": 64}, beside, folder, {"merged": []}, False)
    return folder / "out"


@pytest.fixture(scope="module")
def exported(run: Path) -> Path:
    api.export(run, run.parent / "hf")
    return run.parent / "hf"


def test_a_pipeline_without_arguments_writes_what_generate_writes(run: Path, exported: Path) -> None:
    expected = api.generate(run, PROMPTS, max_new_tokens=12)
    pipeline = transformers.pipeline("text-generation", str(exported))
    rows = [pipeline(text, max_new_tokens=12, do_sample=False, return_full_text=False) for text in PROMPTS]
    assert [row[0]["generated_text"] for row in rows] == expected
    assert len(set(expected)) > 1
    assert api.generate(exported, PROMPTS, max_new_tokens=12) == expected


def test_texts_of_other_lengths_are_padded(run: Path, exported: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    assert tokenizer.pad_token == tokenizer.bos_token == END
    assert tokenizer("a")["input_ids"] == [256, ord("a")]
    for name in ("config.json", "generation_config.json"):
        assert json.loads((exported / name).read_text())["pad_token_id"] == 256
    batch = tokenizer(PROMPTS, padding=True, padding_side="left", return_tensors="pt")
    model = transformers.AutoModelForCausalLM.from_pretrained(exported)
    ids = model.generate(**batch, max_new_tokens=8, do_sample=False)
    texts = tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    alone = api.generate(run, PROMPTS, max_new_tokens=8)
    assert [text.rstrip("�") for text in texts] == [text.rstrip("�") for text in alone]


def test_an_export_that_is_imported_is_exported_as_it_was(exported: Path, tmp_path: Path) -> None:
    api.import_hf(exported, tmp_path / "run")
    api.export(tmp_path / "run", tmp_path / "again")
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "model.safetensors"):
        first, again = (folder / name for folder in (exported, tmp_path / "again"))
        same = load_file if name.endswith("safetensors") else Path.read_text
        a, b = same(first), same(again)
        assert a.keys() == b.keys() if isinstance(a, dict) else a == b


def test_every_preset_can_be_exported() -> None:
    remarks = {name: export_remark(ModelSpec.model_validate({"preset": name})) for name in PRESETS}
    assert not any(remarks.values()), remarks


def test_a_model_that_its_family_does_not_compute_is_told_all_keys_and_the_way_out() -> None:
    told = export_remark(ModelSpec.model_validate({"preset": "moe-small", "family": "mixtral"}))
    for word in ("shared_ffn = 384", "model.moe.router", "model.moe.bias", "set model.family to glm4_moe"):
        assert word in str(told)
    told = export_remark(ModelSpec.model_validate({"preset": "tiny", "sliding_window": 8, "out_bias": True}))
    assert "model.sliding_window" in str(told) and "model.out_bias" in str(told)


def test_shared_experts_are_filled_up_with_channels_of_zeros(tmp_path: Path) -> None:
    """A family that counts shared experts stores 40 channels as two experts of 32, and computes the same."""
    spec = ModelSpec.model_validate(SHARED)
    decoder = init_whole_(Decoder(spec), 0).eval()
    export_hf(tmp_path / "hf", spec, decoder.tensors())
    tokens = torch.arange(24).view(2, 12)
    with torch.no_grad():
        ours = decoder(tokens)
        assert torch.equal(load_hf(tmp_path / "hf")(tokens), ours)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    with torch.no_grad():
        torch.testing.assert_close(ours, model(tokens).logits, rtol=0, atol=1e-5)
    name = "model.layers.1.mlp.shared_experts.down_proj.weight"
    assert load_file(tmp_path / "hf" / "model.safetensors")[name].shape == (32, 64)


def test_the_format_is_that_of_the_folder_that_was_imported(tmp_path: Path) -> None:
    save_theirs(tmp_path / "theirs", "Llama", LLAMA).bfloat16().save_pretrained(tmp_path / "theirs")
    api.import_hf(tmp_path / "theirs", tmp_path / "run")
    api.export(tmp_path / "run", tmp_path / "ours")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert {tensor.dtype for tensor in ours.values()} == {torch.bfloat16}
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert torch.equal(their_logits(tmp_path / "ours"), their_logits(tmp_path / "theirs"))


class _Watched(HeldParameters):
    """A source that counts the bytes of what it gave away and is still in use."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder.tensors())
        self.alive = self.most = 0

    def __getitem__(self, name: str, /) -> Tensor:
        value = super().__getitem__(name).clone()
        self.alive += value.nbytes
        self.most = max(self.most, self.alive)
        weakref.finalize(value, self._gone, value.nbytes)
        return value

    def _gone(self, size: int) -> None:
        self.alive -= size


@pytest.mark.parametrize("dcp", [False, True], ids=["hf", "dcp"])
@pytest.mark.parametrize("preset", ["tiny", "moe-tiny"])
def test_one_parameter_is_in_memory_at_a_time(preset: str, dcp: bool, tmp_path: Path) -> None:
    spec = ModelSpec.model_validate({"preset": preset, "layers": 3})
    decoder = init_whole_(Decoder(spec), 0)
    source = _Watched(decoder)
    export_hf(tmp_path / "hf", spec, source, dtype=torch.bfloat16, max_shard_bytes=10**6, dcp=dcp)
    largest = max(4 * torch.Size(shape).numel() for shape in tensor_shapes(spec).values())
    assert source.most == largest
    assert dcp or len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 2


def test_tensors_of_a_stream_begin_at_multiples_of_their_numbers(tmp_path: Path) -> None:
    values = {"a": torch.ones(3, dtype=torch.int8), "b": torch.arange(3.0), "c": torch.ones(5).bfloat16()}
    values["none"] = torch.empty(0, 4)
    infos = [TensorInfo(name, tuple(value.shape), value.dtype) for name, value in values.items()]
    with SafetensorsStream(tmp_path / "x", infos) as stream:
        stream.write(reversed(values.items()))
    read = load_file(tmp_path / "x")
    assert all(torch.equal(read[name], value) for name, value in values.items())
    content = (tmp_path / "x").read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    assert size % 8 == 0
    assert header["b"]["data_offsets"][0] % 4 == header["c"]["data_offsets"][0] % 2 == 0


def test_the_card_has_the_numbers_of_the_run_and_how_it_was_made(tmp_path: Path) -> None:
    spec = RunSpec.model_validate({
        "model": {"preset": "moe-tiny", "weights": str(tmp_path / "models--org--name" / "snapshots" / "1")},
        "train": {"steps": 30, "lr_factors": {"blocks.0.*": 0.5}},
    })  # fmt: skip
    rows = [
        {"step": 20, "loss": 3.5, "tokens": 163840}, {"step": 20, "val_loss": 3.25, "val_bits_per_byte": 1.5},
        {"step": 30, "loss": 1.0, "tokens": 245760},
    ]  # fmt: skip
    card = model_card(spec, {}, rows, 20, "mit", "folder")
    _, front, text = card.split("---\n", 2)
    assert yaml.safe_load(front) == {
        "license": "mit", "library_name": "transformers", "base_model": "org/name",
        "pipeline_tag": "text-generation", "tags": ["meshwright"],
    }  # fmt: skip
    for word in (f"{spec.model.parameters:,}", "163.8k", "3.5000", "3.2500", "1.5000", "`stdlib`"):
        assert word in text
    assert "1.0000" not in text
    assert from_tree(tomllib.loads(text.split("```toml\n")[1].split("```")[0])) == spec
    assert hub_id("/models/name") is None


def test_a_license_is_an_identifier(run: Path, tmp_path: Path) -> None:
    api.export(run, tmp_path / "hf", license="apache-2.0")
    assert 'license: "apache-2.0"' in (tmp_path / "hf" / "README.md").read_text()
    with pytest.raises(UserError, match="license: 'My License' is not the identifier of a license"):
        api.export(run, tmp_path / "other", license="My License")
