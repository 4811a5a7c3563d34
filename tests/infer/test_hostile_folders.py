"""HF folders of strangers: nothing outside of them is copied, and no config.json takes all memory."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshwright import api
from meshwright.checkpoint.hf import export_hf
from meshwright.data.tokenizer import byte_tokenizer
from meshwright.model.decoder import Decoder
from meshwright.model.init import init_whole_
from meshwright.spec import ModelSpec, UserError

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
