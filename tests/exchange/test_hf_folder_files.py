"""Files of HF folders: the tokenizer's beside the weights, and what cannot be written or read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from hf_models import LLAMA, save_theirs
from meshwright.exchange.hf import export_hf, load_hf
from meshwright.model.decoder import Decoder
from meshwright.model.init import init_whole_
from meshwright.spec import ModelSpec, UserError, load

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


def train_tokenizer(path: Path) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the cat sat on the mat, naïvely " * 50], trainer)
    tokenizer.save(str(path))
    return tokenizer


def test_the_tokenizer_goes_along(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(tmp_path / "tokenizer.json")
    spec = ModelSpec(preset="tiny", layers=1, vocab_size=300)
    decoder = init_whole_(Decoder(spec), seed=0)
    parameters = dict(decoder.named_parameters())
    export_hf(tmp_path / "out", spec, parameters, tmp_path / "tokenizer.json", torch.bfloat16)
    opened = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "the naïve cat\n\n  sat"
    assert opened.encode(text, add_special_tokens=False) == tokenizer.encode(text).ids
    assert opened.decode(opened.encode(text)) == text
    end = tokenizer.token_to_id("<|endoftext|>")
    assert opened.eos_token_id == end
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.generation_config.eos_token_id == end
    assert model.dtype == torch.bfloat16
    assert load_hf(tmp_path / "out").embed.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("named", "eos", "bos"),
    [
        ({"eos_token": "<stop>", "bos_token": {"content": "<go>", "lstrip": False}}, "<stop>", "<go>"),
        ({"eos_token": {"content": "<stop>"}, "bos_token": None}, "<stop>", None),
        ({"eos_token": ["<stop>"], "bos_token": 3}, "</s>", None),
        ({"eos_token": "<stop>", "model_max_length": 7}, "<stop>", None),
        (None, "</s>", None),
    ],
    ids=["both", "no bos", "wrong types", "a length", "no config"],
)
def test_the_ends_are_those_of_the_tokenizer_config(
    named: dict[str, Any] | None, eos: str, bos: str | None, tmp_path: Path
) -> None:
    words = {"<unk>": 0, "<go>": 1, "<stop>": 2, "</s>": 3, "cat": 4}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.add_special_tokens(["<unk>", "<go>", "<stop>", "</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    beside = tmp_path / "tokenizer_config.json"
    if named is not None:
        beside.write_text(json.dumps({"chat_template": "{{ messages }}", **named}))
    spec = ModelSpec(preset="tiny", layers=1)
    parameters = dict(init_whole_(Decoder(spec), seed=0).named_parameters())
    export_hf(tmp_path / "out", spec, parameters, tmp_path / "tokenizer.json")
    for name in ("config.json", "generation_config.json"):
        written = json.loads((tmp_path / "out" / name).read_text())
        assert written["eos_token_id"] == words[eos]
        assert written["bos_token_id"] == (None if bos is None else words[bos])
    copied = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    if named is not None:
        assert copied == {"model_max_length": spec.max_seq_len} | json.loads(beside.read_text())
    else:
        assert (copied["eos_token"], copied["model_max_length"]) == (eos, spec.max_seq_len)


def test_the_beginning_may_be_what_the_post_processor_puts_first(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "<go>": 1, "</s>": 2}, unk_token="<unk>"))
    template = processors.TemplateProcessing("<go> $A </s>", special_tokens=[("<go>", 1), ("</s>", 2)])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(), template])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    spec = ModelSpec(preset="tiny", layers=1)
    parameters = dict(init_whole_(Decoder(spec), seed=0).named_parameters())
    export_hf(tmp_path / "out", spec, parameters, tmp_path / "tokenizer.json")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["bos_token_id"], written["eos_token_id"]) == (1, 2)


def test_an_end_beyond_the_model_is_named(tmp_path: Path) -> None:
    train_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<stop>"}')
    spec = ModelSpec(preset="tiny", layers=1, vocab_size=257)
    parameters = dict(init_whole_(Decoder(spec), seed=0).named_parameters())
    with pytest.raises(UserError, match=r"'<stop>', which ends documents .* model\.vocab_size is 257"):
        export_hf(tmp_path / "out", spec, parameters, tmp_path / "tokenizer.json")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    spec = ModelSpec(preset="tiny", layers=1)
    parameters = dict(init_whole_(Decoder(spec), seed=0).named_parameters())
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "out", tmp_path / ("x" * 300)):
        with pytest.raises(UserError, match="cannot be written"):
            export_hf(folder, spec, parameters)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    spec = ModelSpec(preset="tiny", layers=1)
    parameters = dict(init_whole_(Decoder(spec), seed=0).named_parameters())
    out = tmp_path / "out"
    out.mkdir()
    export_hf(out, spec, parameters)  # an empty one is taken
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(UserError, match="not an empty folder"):
        export_hf(out, spec, parameters)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_a_failed_export_leaves_nothing(tmp_path: Path) -> None:
    spec = ModelSpec(preset="tiny", layers=1)
    parameters = dict(init_whole_(Decoder(spec), seed=0).named_parameters())
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(UserError, match=r"broken\.json"):
        export_hf(tmp_path / "out", spec, parameters, tmp_path / "broken.json")
    for wrong, name in (
        (
            {k: v for k, v in parameters.items() if k != "head.norm.weight"},
            r"lacks the tensor head\.norm\.weight",
        ),
        (parameters | {"embed.weight": torch.zeros(3, 2)}, r"embed\.weight has shape \[3, 2\]"),
        (parameters | {"extra.weight": torch.zeros(1)}, r"extra\.weight"),
    ):
        with pytest.raises(UserError, match=name):
            export_hf(tmp_path / "out", spec, wrong)
    assert [path.name for path in tmp_path.iterdir()] == ["broken.json"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
            r"lacks the tensor model\.layers\.1\.mlp\.up_proj",
        ),
        (lambda t: t.update({"model.layers.9.x": torch.zeros(1)}), r"has a tensor model\.layers\.9\.x"),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(5)}),
            r"model\.norm\.weight has shape \[5\]",
        ),
    ],
)
def test_wrong_tensors_are_named(damage: Any, message: str, tmp_path: Path) -> None:
    save_theirs(tmp_path, "Llama", LLAMA)
    tensors = load_file(tmp_path / "model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=message):
        load_hf(tmp_path)


def test_unreadable_folders_are_named(tmp_path: Path) -> None:
    save_theirs(tmp_path, "Llama", LLAMA, max_shard_size="40KB")
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    first = next(iter(content["weight_map"]))
    for name, message in (("../x.safetensors", "outside of its folder"), ("gone.safetensors", "is not in")):
        index.write_text(json.dumps(content | {"weight_map": content["weight_map"] | {first: name}}))
        with pytest.raises(UserError, match=message):
            load_hf(tmp_path)
    index.write_text("[]")
    with pytest.raises(UserError, match="not a JSON object"):
        load_hf(tmp_path)
    index.write_text('{"weight_map": {"a": 3}}')
    with pytest.raises(UserError, match="has no weight_map"):
        load_hf(tmp_path)
    index.unlink()
    with pytest.raises(UserError, match="has neither"):
        load_hf(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(UserError, match=r"not a readable safetensors file .*; copy the file again$"):
        load_hf(tmp_path)
    with pytest.raises(UserError, match="there is no file"):
        load_hf(tmp_path / "nowhere")


def test_what_no_family_computes_is_not_exported(tmp_path: Path) -> None:
    spec = ModelSpec(preset="tiny", layers=1, qk_norm=True)
    parameters = dict(init_whole_(Decoder(spec), seed=0).named_parameters())
    with pytest.raises(UserError, match=r"model\.qk_norm"):
        export_hf(tmp_path / "out", spec, parameters)
    assert not any(tmp_path.iterdir())


def test_exported_weights_may_be_read_by_whoever_reads_the_rest(tmp_path: Path) -> None:
    decoder = init_whole_(Decoder(load().model), 0)
    export_hf(tmp_path / "hf", decoder.spec, dict(decoder.named_parameters()))
    modes = {path.stat().st_mode for path in (tmp_path / "hf").iterdir()}
    assert len(modes) == 1
