"""Checkpoints of other programs: their weights to the bit, and no code of theirs is run."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from foreign_files import WRITERS, megatron_arguments, merged, write_adapter
from hf_models import read_all
from meshwright import api
from meshwright.checkpoint.disk import Disk
from meshwright.cli.main import main
from meshwright.data.tokenizer import byte_tokenizer
from meshwright.exchange.foreign.source import open_source
from meshwright.exchange.hf import export_hf
from meshwright.model.decoder import Decoder
from meshwright.model.init import init_whole_
from meshwright.rank.failure import exit_code
from meshwright.spec import ModelSpec, UserError

SMALL = {
    "preset": None, "family": "llama", "layers": 2, "hidden": 32, "ffn": 40, "heads": 4, "kv_heads": 2,
    "head_dim": 8, "vocab_size": 301, "max_seq_len": 64,
}  # fmt: skip


class Given(NamedTuple):
    """A model as an HF folder with its config, its state dict there, and its tensors here."""

    folder: Path
    config: dict[str, Any]
    state: dict[str, Tensor]
    tensors: dict[str, Tensor]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Given:
    folder = tmp_path_factory.mktemp("given") / "hf"
    spec = ModelSpec.model_validate(SMALL)
    decoder = init_whole_(Decoder(spec), 0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    export_hf(folder, spec, decoder.tensors())
    byte_tokenizer().save(folder, spec.max_seq_len)
    config = json.loads((folder / "config.json").read_text())
    tensors = {name: tensor.detach() for name, tensor in decoder.tensors().items()}
    return Given(folder, config, load_file(folder / "model.safetensors"), tensors)


def read(path: Path, **how: Any) -> dict[str, Tensor]:
    source = open_source(path, **how)
    return read_all(source.weights, source.model)


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def refused(*words: str | Path) -> str:
    """The sentence with which the command ends, and with exit code 2."""
    with pytest.raises(UserError) as error:
        main([str(word) for word in words])
    assert exit_code(error.value) == 2
    text = str(error.value)
    assert "\n" not in text and len(text) < 500
    return text


@pytest.mark.parametrize("kind", WRITERS)
def test_weights_come_to_the_bit(kind: str, given: Given, tmp_path: Path) -> None:
    WRITERS[kind](given.state, given.config, tmp_path)
    source = tmp_path / "source"
    if kind.startswith("pytorch"):
        shutil.copyfile(given.folder / "config.json", source / "config.json")
        same(read(source), given.tensors)
    same(read(source, config=given.folder), given.tensors)


@pytest.mark.parametrize("kind", ["litgpt", "litgpt before 0.5"])
def test_litgpts_own_config_describes_the_model(kind: str, given: Given, tmp_path: Path) -> None:
    WRITERS[kind](given.state, given.config, tmp_path)
    source = open_source(tmp_path / "source")
    assert source.model == open_source(given.folder).model.model_copy(
        update={"hf": None, "weights": source.model.weights}
    )
    same(read(tmp_path / "source"), given.tensors)


@pytest.mark.parametrize("kind", ["torch dcp", "torchtitan", "megatron", "litgpt"])
def test_a_tied_head_is_the_embedding(kind: str, given: Given, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.mkdir()
    (config / "config.json").write_text(json.dumps(given.config | {"tie_word_embeddings": True}))
    tied = given.state | {"lm_head.weight": given.state["model.embed_tokens.weight"]}
    WRITERS[kind](tied, given.config, tmp_path / "tied")
    wanted = {name: value for name, value in given.tensors.items() if name != "head.weight"}
    same(read(tmp_path / "tied" / "source", config=config), wanted)
    WRITERS[kind](given.state, given.config, tmp_path / "own")
    with pytest.raises(UserError, match="has other values than"):
        read(tmp_path / "own" / "source", config=config)


def test_megatrons_arguments_describe_the_model(given: Given, tmp_path: Path) -> None:
    WRITERS["megatron"](given.state, given.config, tmp_path)
    rows = given.config["vocab_size"] + 27
    common = {"args": megatron_arguments(given.config, rows), "iteration": 12}
    torch.save(common, tmp_path / "source" / "iter_0000012" / "common.pt")
    source = open_source(tmp_path / "source")
    assert source.model.vocab_size == rows and source.model.family == "llama"
    found = read(tmp_path / "source")
    padded = ("embed.weight", "head.weight")
    same({name: value[:-27] if name in padded else value for name, value in found.items()}, given.tensors)


def test_a_run_is_made_of_a_checkpoint_with_the_tokenizer_beside_its_config(
    given: Given, tmp_path: Path
) -> None:
    WRITERS["torchtitan"](given.state, given.config, tmp_path)
    out = tmp_path / "run"
    assert main(["import", str(tmp_path / "source"), "--out", str(out), "--config", str(given.folder)]) == 0
    decoder = api.load_run(out)
    same({name: tensor.detach() for name, tensor in decoder.tensors().items()}, given.tensors)
    assert (out / "tokenizer.json").read_bytes() == (given.folder / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("how", ["lora", "rslora", "dora", "alpha of a module", "fan_in_fan_out"])
def test_an_adapter_is_merged_by_the_papers_formula(how: str, given: Given, tmp_path: Path) -> None:
    module, ours = "model.layers.1.mlp.up_proj", "blocks.1.mlp.up.weight"
    generator = torch.Generator().manual_seed(2)
    base, wanted, config = given.folder, dict(given.tensors), {"lora_alpha": 6}
    if how == "fan_in_fan_out":
        spec = ModelSpec.model_validate(
            {**SMALL, "family": "gpt2", "kv_heads": 4, "norm": "layernorm", "activation": "gelu",
             "position": "learned", "qkv_bias": True, "out_bias": True, "mlp_bias": True, "tied": True}
        )  # fmt: skip
        base, decoder = tmp_path / "gpt2", init_whole_(Decoder(spec), 0)
        export_hf(base, spec, decoder.tensors())
        wanted = {name: tensor.detach() for name, tensor in decoder.tensors().items()}
        module, config = "transformer.h.1.mlp.c_fc", {"lora_alpha": 6, "fan_in_fan_out": True}
    a = torch.randn(4, 32, generator=generator)
    b = torch.randn(40, 4, generator=generator)
    magnitude = 1 + torch.rand(40, generator=generator) if how == "dora" else None
    tensors = {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    if magnitude is not None:
        tensors[f"{module}.lora_magnitude_vector"] = magnitude
    alpha = 3 if how == "alpha of a module" else 6
    extra = {"alpha_pattern": {"layers.1.mlp.up_proj": 3}} if how == "alpha of a module" else {}
    write_adapter(tmp_path / "adapter", tensors, **config, **extra, use_rslora=how == "rslora",
                  base_model_name_or_path=str(base))  # fmt: skip
    found = read(tmp_path / "adapter")
    exact = merged(wanted.pop(ours), a, b, alpha, how == "rslora", magnitude)
    torch.testing.assert_close(found.pop(ours).double(), exact, rtol=1e-5, atol=1e-5)
    same(found, wanted)
    same(read(tmp_path / "adapter", base=base), found | {ours: read(tmp_path / "adapter")[ours]})


class Evil:
    """An object whose pickle makes a file when it is read."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.system, (f"touch {self.file}",)


HOSTILE = {
    "torch dcp": "source/.metadata",
    "torchtitan": "source/step-10/.metadata",
    "megatron": "source/iter_0000012/.metadata",
    "zero 2": "source/global_step4/bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt",
    "zero 3": "source/global_step4/zero_pp_rank_4_mp_rank_00_model_states.pt",
    "universal": "source/global_step4_universal/zero/lm_head.weight/fp32.pt",
    "litgpt": "source/lit_model.pth",
    "pytorch_model.bin": "source/pytorch_model.bin",
    "adapter": "source/adapter_model.bin",
    "megatron arguments": "source/iter_0000012/common.pt",
    "a piece": "source/__0_0.distcp",
}


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("kind", HOSTILE)
def test_no_pickle_runs_code(kind: str, zipped: bool, given: Given, tmp_path: Path) -> None:
    made, file = tmp_path / "made by a pickle", tmp_path / HOSTILE[kind]
    config = ["--config", given.folder]
    if kind == "adapter":
        write_adapter(tmp_path / "source", {}, base_model_name_or_path=str(given.folder))
        (tmp_path / "source" / "adapter_model.safetensors").unlink()
        config = []
    else:
        name = {"megatron arguments": "megatron", "a piece": "torch dcp"}.get(kind, kind)
        WRITERS[name](given.state, given.config, tmp_path)
        config = [] if kind == "megatron arguments" else config
    evil = {"model": Evil(made), "args": Evil(made)}
    if zipped and file.name != ".metadata":
        torch.save(evil, file)
    else:
        file.write_bytes(pickle.dumps(evil))
    text = refused("import", tmp_path / "source", "--out", tmp_path / "run", *config)
    assert not made.exists() and not (tmp_path / "run").exists()
    assert "source" in text and ("nothing of it was run" in text or "again" in text)


def test_a_pickle_that_names_a_function_names_it_in_the_sentence(given: Given, tmp_path: Path) -> None:
    WRITERS["litgpt"](given.state, given.config, tmp_path)
    torch.save({"model": Evil(tmp_path / "made")}, tmp_path / "source" / "lit_model.pth")
    text = refused("import", tmp_path / "source", "--out", tmp_path / "run")
    assert f"names {os.system.__module__}.system" in text and not (tmp_path / "made").exists()


MISTAKES: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "no config": ("torchtitan", lambda source: None, "--config FOLDER"),
    "a piece is not there": (
        "torch dcp", lambda source: (source / "__0_0.distcp").unlink(), "which is not there"),
    "a save that did not end": (
        "torch dcp", lambda source: (source / ".metadata").unlink(), "its save did not end"),
    "a rank is not there": (
        "zero 2", lambda source: next(source.glob("*/*rank_1_*optim*")).unlink(), "2 ranks of 3"),
    "cut": ("litgpt", lambda source: os.truncate(source / "lit_model.pth", 5000), "copy the file again"),
    "a tag of no folder": (
        "zero 2", lambda source: (source / "latest").write_text("../../etc"), "names no folder of"),
    "nothing": ("torch dcp", lambda source: shutil.rmtree(source) or source.mkdir(), "holds no model"),
    "no folder": ("torch dcp", shutil.rmtree, "is not there"),
}  # fmt: skip


def test_a_full_disk_leaves_no_run_and_is_a_sentence(
    given: Given, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Disk.write

    def full(disk: Disk, descriptor: int, data: memoryview) -> int:
        if len(data) > 4096:  # there was room for what is small
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(disk, descriptor, data)

    monkeypatch.setattr(Disk, "write", full)
    text = refused("import", given.folder, "--out", tmp_path / "run")
    reason = "(No space left on device); give another --out"
    assert text == f"--out: {tmp_path / 'run'} cannot be written {reason}"
    assert not list(tmp_path.iterdir())


def test_a_pickle_that_torch_did_not_write_is_one_sentence(given: Given, tmp_path: Path) -> None:
    file = tmp_path / "weights.bin"
    file.write_bytes(pickle.dumps({"a": 1}, protocol=4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        refused("import", file, "--out", tmp_path / "run", "--config", given.folder)


@pytest.mark.parametrize("case", MISTAKES)
def test_what_cannot_be_read_is_a_sentence(case: str, given: Given, tmp_path: Path) -> None:
    kind, change, message = MISTAKES[case]
    WRITERS[kind](given.state, given.config, tmp_path)
    change(tmp_path / "source")
    config = [] if case == "no config" else ["--config", given.folder]
    assert message in refused("import", tmp_path / "source", "--out", tmp_path / "run", *config)


def test_an_adapter_that_is_not_merged_is_refused_with_the_reason(given: Given, tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", {}, peft_type="IA3", base_model_name_or_path=str(given.folder))
    write_adapter(tmp_path / "b", {}, base_model_name_or_path="meta-llama/Llama-3.2-1B")
    write_adapter(tmp_path / "c", {"model.layers.7.mlp.up_proj.lora_A.weight": torch.zeros(2, 32),
                                   "model.layers.7.mlp.up_proj.lora_B.weight": torch.zeros(40, 2)},
                  base_model_name_or_path=str(given.folder))  # fmt: skip
    for name, message in (("a", "peft_type 'IA3'"), ("b", "--base FOLDER"), ("c", "model.layers.7")):
        assert message in refused("import", tmp_path / name, "--out", tmp_path / "run")


def test_an_export_as_dcp_is_what_torch_loads(given: Given, tmp_path: Path) -> None:
    api.import_hf(given.folder, tmp_path / "run")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--format", "dcp"]) == 0
    loaded = {name: torch.empty_like(value) for name, value in given.state.items()}
    dcp.load(loaded, checkpoint_id=tmp_path / "out", no_dist=True)
    same(loaded, given.state)
    dcp_to_torch_save(tmp_path / "out", tmp_path / "whole.pt")
    same(torch.load(tmp_path / "whole.pt", weights_only=True), given.state)
    for name in ("config.json", "tokenizer.json"):
        assert (tmp_path / "out" / name).is_file()
    same(read(tmp_path / "out"), given.tensors)
    assert len(list((tmp_path / "out").glob("*.distcp"))) == len(given.state)  # whose writer holds a file's
    assert "does not fit" in refused("export", tmp_path / "run", tmp_path / "x.gguf", "--format", "dcp")
