"""HF folders of strangers: nothing outside of them is copied, and no config.json takes all memory."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_models import read_whole
from meshwright import api
from meshwright.data.tokenizer import byte_tokenizer
from meshwright.exchange.hf import export_hf
from meshwright.model.decoder import Decoder
from meshwright.model.init import init_whole_
from meshwright.spec import ModelSpec, UserError, load

SMALL = {
    "preset": None, "layers": 2, "hidden": 16, "ffn": 24, "heads": 2, "kv_heads": 2, "head_dim": 8,
    "vocab_size": 300,
}  # fmt: skip
LINKED = [
    "vocab.txt", "merges.txt", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "tokenizer.model", "generation_config.json", "chat_template.jinja", "config.json",
    "additional_chat_templates/x.jinja",
]  # fmt: skip


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("theirs") / "hf"
    spec = ModelSpec.model_validate(SMALL)
    export_hf(folder, spec, init_whole_(Decoder(spec), 0).tensors())
    byte_tokenizer().save(folder, spec.max_seq_len)
    return folder


@pytest.fixture
def folder(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "hf"))


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as refusal:
        call()
    words = str(refusal.value)
    assert len(words.splitlines()) == 1 and len(words) < 500
    return words


def outside(folder: Path, name: str) -> None:
    """Replace a file of a folder by a link to one outside of it, which may have the file's content."""
    file, elsewhere = folder / name, folder.parent / f"secret-{Path(name).name}"
    elsewhere.write_bytes(file.read_bytes() if file.exists() else b"{}")
    file.unlink(missing_ok=True)
    file.parent.mkdir(exist_ok=True)
    file.symlink_to(elsewhere)


@pytest.mark.parametrize("name", LINKED)
def test_a_file_that_is_a_link_out_of_the_folder_is_not_imported(name: str, folder: Path) -> None:
    outside(folder, name)
    assert Path(name).name in refused(lambda: api.import_hf(folder, folder.parent / "run"))
    assert not (folder.parent / "run" / name).exists()


def test_a_folder_that_is_a_link_out_of_the_folder_is_not_imported(folder: Path) -> None:
    elsewhere = folder.parent / "secrets"
    elsewhere.mkdir()
    (elsewhere / "x.jinja").write_text("secret")
    (folder / "additional_chat_templates").symlink_to(elsewhere)
    assert "x.jinja" in refused(lambda: api.import_hf(folder, folder.parent / "run"))


@pytest.mark.parametrize("name", [name for name in LINKED if name != "config.json"])
def test_a_file_that_is_a_link_out_of_the_run_is_not_exported(name: str, folder: Path) -> None:
    run, out = folder.parent / "run", folder.parent / "out"
    api.import_hf(folder, run)
    outside(run, name)
    assert Path(name).name in refused(lambda: api.export(run, out))
    assert not out.exists()


def test_links_within_a_cache_of_the_hub_are_followed_and_no_others(folder: Path) -> None:
    """The hub's client keeps files in blobs/, and in snapshots/REVISION/ links to them."""
    model = folder.parent / "models--a--b"
    snapshot = model / "snapshots" / "0f"
    snapshot.mkdir(parents=True)
    (model / "blobs").mkdir()
    (folder / "merges.txt").write_text("#version: 0.2\n")
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(model / "blobs" / f"{number:02x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:02x}")
    api.import_hf(snapshot, folder.parent / "run")
    assert (folder.parent / "run" / "merges.txt").read_text() == "#version: 0.2\n"
    (model / "secret").write_text("secret")
    (snapshot / "vocab.txt").symlink_to("../../secret")
    assert "vocab.txt" in refused(lambda: api.import_hf(snapshot, folder.parent / "run2"))


def test_a_file_of_the_tokenizer_beyond_its_bound_is_not_copied(folder: Path) -> None:
    with (folder / "vocab.txt").open("wb") as file:
        file.truncate((64 << 20) + 1)
    assert "vocab.txt" in refused(lambda: api.import_hf(folder, folder.parent / "run"))
    assert not (folder.parent / "run" / "vocab.txt").exists()


def test_a_pipe_among_the_files_of_the_tokenizer_is_not_read(folder: Path) -> None:
    os.mkfifo(folder / "vocab.txt")
    api.import_hf(folder, folder.parent / "run")
    assert not (folder.parent / "run" / "vocab.txt").exists()


MIXTRAL = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "num_hidden_layers": {"num_hidden_layers": 10**9},
    "layers": {"num_hidden_layers": 10_000},
    "hidden": {"hidden_size": 10**12},
    "vocab_size": {"vocab_size": 10**40},
    "max_seq_len": {"max_position_embeddings": 10**40},
    "experts": MIXTRAL | {"num_local_experts": 2**31},
    "block_sparse_moe": MIXTRAL | {"num_local_experts": 2**16, "num_hidden_layers": 10_000},
    "decoder_sparse_step": {
        "model_type": "qwen3_moe", "num_hidden_layers": 10**4, "decoder_sparse_step": 10**9,
        "head_dim": 8,
    },
    "mlp_only_layers": {"model_type": "qwen3_moe", "mlp_only_layers": list(range(10**5)), "head_dim": 8},
    "heads": {"num_attention_heads": 2**40, "num_key_value_heads": 2**40, "head_dim": 2**20},
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("verb", ["import", "generate"])
def test_no_number_of_config_json_takes_all_memory(name: str, verb: str, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | CONFIGS[name]))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if verb == "import":
        refused(lambda: api.import_hf(folder, folder.parent / "run"))
    else:
        refused(lambda: api.generate(folder, "a"))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024
    assert not (folder.parent / "run").exists()


NORM, EMBED = "model.norm.weight", "model.embed_tokens.weight"


def damaged(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = change(tensors[name])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn], ids=str
)
def test_weights_that_are_no_plain_floating_point_are_refused_by_name(
    dtype: torch.dtype, folder: Path
) -> None:
    damaged(folder, NORM, lambda tensor: tensor.to(dtype))
    for call in (lambda: api.import_hf(folder, folder.parent / "run"), lambda: api.generate(folder, "a")):
        assert NORM in refused(call)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", [NORM, EMBED])
def test_weights_that_are_not_finite_are_refused_by_name(name: str, value: float, folder: Path) -> None:
    damaged(folder, name, lambda tensor: tensor.index_fill(0, torch.tensor([3]), value))
    for call in (lambda: api.import_hf(folder, folder.parent / "run"), lambda: api.generate(folder, "a")):
        assert name in refused(call)
    assert not (folder.parent / "run").exists()


def sharded(folder: Path) -> list[Path]:
    """Replace the weights of a folder by several files with an index; return these files."""
    spec, tensors = read_whole(folder)
    export_hf(folder.parent / "parts", spec, tensors, max_shard_bytes=6000)
    (folder / "model.safetensors").unlink()
    moved = [path.rename(folder / path.name) for path in sorted((folder.parent / "parts").glob("model*"))]
    return [path for path in moved if path.suffix == ".safetensors"]


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "part", "config.json"])
def test_weights_that_are_links_out_of_the_folder_are_refused(name: str, folder: Path) -> None:
    if name != "model.safetensors" and name != "config.json":
        parts = sharded(folder)
        name = parts[0].name if name == "part" else name
    outside(folder, name)
    for call in (lambda: api.import_hf(folder, folder.parent / "run"), lambda: api.load_hf(folder)):
        words = refused(call)
        assert name in words and "is a link to a file outside of its folder" in words
    flags = [("model.hf", str(folder)), ("data.corpus", "synthetic"), ("data.seq_len", "16"),
             ("train.batch_tokens", "64"), ("train.steps", "1")]  # fmt: skip
    assert name in refused(lambda: api.train(load(None, flags), out=folder.parent / "run", quiet=True))
    assert not (folder.parent / "run").exists()


@pytest.mark.parametrize("where", ["header", "index"])
def test_far_more_names_than_a_model_has_are_refused_at_once(where: str, folder: Path) -> None:
    names = {f"model.layers.{number}.self_attn.q_proj.weight": number for number in range(10**5)}
    if where == "index":
        sharded(folder)
        text = json.dumps({"weight_map": dict.fromkeys(names, "model-00001-of-00002.safetensors")})
        (folder / "model.safetensors.index.json").write_text(text)
    else:
        header = json.dumps(
            {name: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for name in names}
        ).encode()
        (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    assert "which no model of this config.json has" in refused(lambda: api.load_hf(folder))
    assert time.process_time() - started < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024


def test_more_tensors_than_a_model_has_are_refused_by_their_number(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"x{number}": torch.empty(0) for number in range(20_000)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert "lists more than" in refused(lambda: api.load_hf(folder))


def rename(folder: Path, new: Callable[[str], str | None]) -> None:
    """Give the tensors of a folder other names, or leave those out whose new name is None."""
    tensors = load_file(folder / "model.safetensors")
    named = {other: tensor for name, tensor in tensors.items() if (other := new(name)) is not None}
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})


READ: dict[str, Callable[[str], str | None]] = {
    "torch.compile": lambda name: f"_orig_mod.{name}",
    "data parallelism": lambda name: f"module.{name}",
    "both": lambda name: f"module._orig_mod.{name}",
    "compiled inside": lambda name: name.replace("model.", "model._orig_mod.", 1),
    "without the prefix": lambda name: name.removeprefix("model."),
}


@pytest.mark.parametrize("case", READ)
def test_names_with_wrappers_or_without_the_prefix_are_read(case: str, folder: Path) -> None:
    wanted = read_whole(folder)[1]
    rename(folder, READ[case])
    found = read_whole(folder)[1]
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "base model without its head": (
        lambda folder: rename(
            folder, lambda name: None if "lm_head" in name else name.removeprefix("model.")
        ),
        r"lacks the tensor lm_head\.weight.*saved without its head.* save the causal model",
    ),
    "unmerged adapter": (
        lambda folder: rename(
            folder, lambda name: f"base_model.model.{name.replace('.weight', '.base_layer.weight')}"
        ),
        r"PEFT model; merge the adapter",
    ),
    "another kind of model": (
        lambda folder: rename(folder, lambda name: f"language_model.{name}"),
        r"it has language_model\.model\.embed_tokens\.weight, which is named as in another kind of model",
    ),
    "adapter alone": (
        lambda folder: (folder / "model.safetensors").rename(folder / "adapter_model.safetensors"),
        r"neither model\.safetensors nor .* adapter of PEFT: merge it into its base model",
    ),
    "pickled": (
        lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
        r"pytorch_model\.bin is not a readable checkpoint .*; copy the file again",
    ),
    "a part without an index": (
        lambda folder: (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors"),
        r"model-00001-of-00002\.safetensors is a part of a model: copy all parts and the index",
    ),
    "a missing part": (
        lambda folder: sharded(folder)[0].unlink(),
        r"names the file model-00001.* which is not in .*; copy all \d+ files of the model there",
    ),
    "pointer": (
        lambda folder: (folder / "model.safetensors").write_text(
            "version https://git-lfs.github.com/spec/v1\n"
        ),
        r"is a pointer of Git LFS; fetch the file",
    ),
    "cut": (
        lambda folder: os.truncate(folder / "model.safetensors", 3000),
        r"is not a readable safetensors file",
    ),
    "no header": (
        lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 100),
        r"is not a readable safetensors file",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_weights_that_are_not_read_are_refused_with_cause_and_remedy(case: str, folder: Path) -> None:
    change, message = REFUSED[case]
    change(folder)
    for call in (lambda: api.import_hf(folder, folder.parent / "run"), lambda: api.load_hf(folder)):
        assert re.search(message, refused(call))
    flags = [("model.hf", str(folder)), ("data.corpus", "synthetic"), ("data.seq_len", "16"),
             ("train.batch_tokens", "64"), ("train.steps", "1")]  # fmt: skip
    words = refused(lambda: api.train(load(None, flags), out=folder.parent / "run", quiet=True))
    assert re.search(message, words)  # and not: random weights
    assert not (folder.parent / "run").exists()
