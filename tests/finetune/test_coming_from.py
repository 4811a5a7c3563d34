"""Rows in memory as a corpus, and docs/coming-from.md, whose programs run as printed and whose keys exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import datasets
import pytest
from chat_models import chats, model_in, written
from safetensors.torch import load_file

from meshwright import api
from meshwright.cpp_library import cache_folder
from meshwright.data.corpus import open_corpus
from meshwright.data.given_rows import write_rows
from meshwright.spec import UserError
from meshwright.spec.axolotl_keys import KEYS as AXOLOTL
from meshwright.spec.foreign_run_files import COUNTERPARTS
from meshwright.spec.llama_factory_keys import KEYS as LLAMA_FACTORY
from meshwright.spec.schema import known_keys, optional_tables

PAGE = (Path(__file__).parents[2] / "docs" / "coming-from.md").read_text(encoding="utf-8")
TABLES = ("model", "data", "train", "layout", "precision", "recompute", "checkpoint", "lora")
OURS, TRLS, TRAINERS, LIGHTNINGS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
TORCHTITAN = {
    "training": "local_batch_size global_batch_size seq_len steps max_norm dataset dataset_path "
    "mixed_precision_param",
    "optimizer": "name lr weight_decay beta1 beta2 eps",
    "lr_scheduler": "warmup_steps decay_type decay_ratio min_lr_factor",
    "model": "flavor hf_assets_path",
    "parallelism": "data_parallel_shard_degree data_parallel_replicate_degree tensor_parallel_degree "
    "context_parallel_degree pipeline_parallel_degree expert_parallel_degree pipeline_parallel_schedule",
    "activation_checkpoint": "mode",
    "compile": "enable",
    "checkpoint": "interval folder keep_latest_k",
    "validation": "freq",
    "metrics": "log_freq enable_wandb enable_tensorboard",
    "debug": "seed",
}
"""Keys of torchtitan's JobConfig (torchtitan/config/job_config.py, v0.2.0) that most files have."""
MEGATRON = re.findall(
    r"--\S+",
    """
    --enable-cuda-graph --cuda-graph-impl
    --micro-batch-size --global-batch-size --seq-length --train-iters --train-samples
    --tensor-model-parallel-size --sequence-parallel --pipeline-model-parallel-size
    --num-virtual-stages-per-pipeline-rank --context-parallel-size --expert-model-parallel-size
    --use-distributed-optimizer --recompute-granularity --lr --min-lr --lr-decay-style --lr-warmup-iters
    --clip-grad --weight-decay --adam-beta1 --adam-beta2 --adam-eps --bf16 --fp16 --seed --save
    --save-interval --eval-interval --log-interval --load --pretrained-checkpoint --data-path
    --tokenizer-model --split --max-position-embeddings --rotary-base --norm-epsilon
    --untie-embeddings-and-output-weights --num-experts --moe-router-topk --moe-ffn-hidden-size
    --moe-aux-loss-coeff --num-layers --hidden-size --ffn-hidden-size --num-attention-heads
    --num-query-groups
    """,
)
"""Options of Megatron-LM (megatron/training/arguments.py, core_v0.15.0) that most scripts have."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a cache of its own, but for kernels, which take a minute to compile."""
    monkeypatch.chdir(tmp_path)
    kernels, own = cache_folder(), tmp_path / ".cache" / "meshwright"
    kernels.mkdir(parents=True, exist_ok=True)
    own.mkdir(parents=True)
    (own / "kernels").symlink_to(kernels)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_the_ten_lines_run_as_printed(folder: Path) -> None:
    model_in(folder / "model").float().save_pretrained(folder / "model")
    written(chats(1, 60), folder / "chats.jsonl")
    assert len([line for line in OURS.splitlines() if line.strip()]) <= 10
    exec(compile(OURS, "coming-from.md", "exec"), {})
    on_processors = TRLS.replace('"runs/trl",', '"runs/trl", use_cpu=True, bf16=False, report_to=[],')
    exec(compile(on_processors, "coming-from.md", "exec"), {})
    trainers = TRAINERS.replace('"runs/hf",', '"runs/hf", use_cpu=True, report_to=[],')
    exec(compile(trainers, "coming-from.md", "exec"), {})
    compile(LIGHTNINGS, "coming-from.md", "exec")
    folders = [folder / name for name in ("adapter", "adapter-trl", "adapter-hf")]
    adapters = [load_file(each / "adapter_model.safetensors") for each in folders]
    shapes = [{name: tuple(each.shape) for name, each in adapter.items()} for adapter in adapters]
    assert shapes[0] == shapes[1] == shapes[2] and len(shapes[0]) == 2 * 7 * 2
    config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (16, 32)
    assert all(each.any() for name, each in adapters[0].items() if "lora_B" in name)  # which are 0 at first
    result = json.loads((folder / "runs/tuned/result.json").read_text())
    assert result["steps"] == 8 and result["val_bits_per_byte"] > 0


def test_rows_in_memory_are_those_of_a_file(folder: Path) -> None:
    model_in(folder / "model")
    rows = chats(1, 40)
    keys: dict[str, Any] = {"data__seq_len": 128, "data__cache": "cache"}
    of_file = api.run_from("model", **keys, data__corpus=str(written(rows, folder / "chats.jsonl")))
    wanted = open_corpus(of_file)
    for given in (datasets.Dataset.from_list(rows), rows, iter(rows)):
        found = open_corpus(api.run_from("model", dataset=given, **keys))
        assert found.digest == wanted.digest and found.train.samples == wanted.train.samples


def test_equal_rows_are_one_file(folder: Path) -> None:
    first = write_rows(chats(1, 3), "cache")
    assert write_rows(datasets.Dataset.from_list(chats(1, 3)), "cache") == first
    assert write_rows(chats(2, 3), "cache") != first
    assert sorted(path.suffix for path in first.parent.iterdir()) == [".jsonl", ".jsonl"]


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (datasets.DatasetDict({"train": datasets.Dataset.from_list([{"text": "a"}])}),
         "dataset: has the splits train; give one of them, as dataset['train']"),
        ([], "dataset: has no rows"),
        (["text"], 'dataset: row 0 is "text"; give objects'),
        ([{"text": "a"}, {"text": b"a"}], "dataset: row 1 is not JSON"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_written_are_told(rows: Any, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        write_rows(rows, "cache")
    assert sentence in str(caught.value), caught.value
    assert not list(Path("cache/rows").glob("*")) if Path("cache").exists() else True


def test_a_corpus_beside_a_dataset_is_refused(folder: Path) -> None:
    model_in(folder / "model")
    with pytest.raises(UserError, match=r"data.corpus: stdlib is given together with a dataset"):
        api.run_from("model", dataset=chats(1, 2), data__corpus="stdlib")
    with pytest.raises(UserError, match=r"run_from: .* is not there"):
        api.run_from("modell", dataset=chats(1, 2))


def test_the_keys_of_the_page_exist() -> None:
    rows = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| ")]
    known = {*known_keys(), *optional_tables(), "checkpoint"}
    named = {key for row in rows for key in re.findall(rf"`\[?((?:{'|'.join(TABLES)})\b[\w.]*)", row[-1])}
    assert len(named) > 50 and named <= known, named - known


def names_in(title: str) -> set[str]:
    """Names in the first column of the table under a title."""
    table = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    rows = [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def test_the_tables_have_the_keys_that_most_files_of_torchtitan_and_megatron_have() -> None:
    found = names_in("torchtitan")
    tables = {f"{table}.{name}" for table, names in TORCHTITAN.items() for name in names.split()}
    alone = {name for name in found if "." not in name}  # the table is that of the name before
    assert {name for name in found if "." in name} | {f"parallelism.{name}" for name in alone} == tables
    assert names_in("Megatron-LM") == set(MEGATRON)


def test_keys_with_a_hint_are_those_of_the_tables() -> None:
    """`spec check` of a file of torchtitan or Megatron names what its keys are here, as the page does."""
    rows = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| ")]
    named = [(set(re.findall(r"`(?:--)?([\w.-]+)`", row[0])), row[-1]) for row in rows if len(row) == 2]
    ours = {theirs.replace("-", "_"): cell for found, cell in named for theirs in found}
    checked = 0
    for key, theirs in COUNTERPARTS.items():
        for cell in (ours[each] for each in theirs if each in ours):
            checked += 1
            assert key in cell or key == "model.hf", (key, cell)
    assert checked > 30


def test_the_keys_of_other_programs_are_read() -> None:
    table = PAGE.partition("| axolotl |")[2].partition("\n\n")[0]
    for line in table.splitlines()[2:]:
        axolotl, llama_factory, _ = line.removeprefix("|").removesuffix("|").split("|")
        for cell, keys in ((axolotl, AXOLOTL), (llama_factory, LLAMA_FACTORY)):
            outside = re.sub(r"\([^)]*\)|with one `path` and `type`", "", cell)
            names = re.findall(r"`(\w+)(?:: \w+)?`", outside)
            assert {name for name in names if name not in keys} <= {"full"}, line
