"""Rows of measured runs: the columns that state what a program did, and rows that are refused."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from meshwright.planner.validation.cases import Case, case_of
from meshwright.planner.validation.table import FRONTIER, PUBLISHED, PredictionError, read


def case(tmp_path: Path, table: Path = FRONTIER, number: int = 20, **changed: str) -> Case:
    """The case of a row of a table with some cells changed; row 20 is Llama 3.1 70B, fp8, on 64 H100."""
    with table.open(newline="") as file:
        reader = csv.DictReader(file)
        row, names = list(reader)[number] | changed, list(reader.fieldnames or [])
    path = tmp_path / "runs.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*names, *(name for name in changed if name not in names)])
        writer.writeheader()
        writer.writerow(row)
    (read_row,) = read(path)
    return case_of(read_row, [read_row])


@pytest.mark.parametrize(
    ("program", "stack"),
    [
        ("Megatron-Bridge", "nemo"),
        ("NeMo 2.0", "nemo"),
        ("megatron-core 0.12", "megatron-core"),
        ("Megatron-LM", "megatron-lm"),
        ("Megatron-FSDP", "megatron-fsdp"),
        ("torchtitan", "fsdp-compiled"),
        ("DeepSpeed", "deepspeed-zero3"),
        ("PyTorch FSDP2", "fsdp"),
        ("HAI-LLM", "hai-llm"),
    ],
)
def test_the_program_is_the_one_that_is_stated(tmp_path: Path, program: str, stack: str) -> None:
    found = case(tmp_path, program=program, source="a blog", where="")
    assert found.stack.name == stack
    assert not any(told.startswith("program") for told in found.inferred)


def test_a_program_is_never_guessed_from_a_models_name(tmp_path: Path) -> None:
    found = case(tmp_path, program="", source="a blog", where="", model="DeepSeek-V3-like", params_b="70")
    assert found.stack.name == "megatron-core" and "program = megatron-core" in found.inferred
    nvidia = case(tmp_path, number=85)  # NVIDIA's run of a model of DeepSeek's
    assert nvidia.row.words["model"] == "DeepSeekV3" and nvidia.stack.name == "nemo"
    assert nvidia.specs[0].model.mla is not None  # its shape is that of the preset of the same name


def test_megatron_of_2021_had_no_flash_attention(tmp_path: Path) -> None:
    source = "Megatron-LM (arXiv:{})"
    old = case(tmp_path, program="Megatron-LM", source=source.format("2104.04473"), where="")
    new = case(tmp_path, program="Megatron-LM", source=source.format("2402.15627"), where="")
    assert not old.stack.fused_attention and new.stack.fused_attention
    told = case(
        tmp_path, program="Megatron-LM", source=source.format("2104.04473"), where="", attention="flash1"
    )
    assert told.stack.attention == "flash1"


def test_what_a_row_states_of_its_program_counts(tmp_path: Path) -> None:
    found = case(tmp_path, gradient_bytes="4", attention="unfused")
    assert (found.stack.gradient_bytes, found.stack.recipe.gradient) == (4, 4)
    assert found.stack.attention == "unfused"


@pytest.mark.parametrize(
    ("changed", "recipe"),
    [
        ({"precision": "fp8"}, "fp8"),
        ({"precision": "FP8-CS"}, "fp8"),
        ({"precision": "FP8-MX"}, "mxfp8"),
        ({"precision": "fp8", "fp8_recipe": "mxfp8"}, "mxfp8"),
        ({"precision": "fp8", "fp8_recipe": "rowwise"}, "fp8-rowwise"),
        ({"precision": "FP8-SC"}, "fp8-blockwise"),
        ({"precision": "NVFP4"}, "nvfp4"),
        ({"precision": "amp_bf16"}, "bf16"),
    ],
)
def test_precision_recipes(tmp_path: Path, changed: dict[str, str], recipe: str) -> None:
    assert case(tmp_path, **changed).format == recipe


def test_the_network_of_a_row_is_of_a_device_or_of_a_node(tmp_path: Path) -> None:
    each, node = (case(tmp_path, network_gbps=value).cluster for value in ("200", "1700"))
    assert each.levels[1].link.bandwidth == pytest.approx(200e9 / 8)
    assert node.levels[1].link.bandwidth == pytest.approx(1700e9 / 8 / 8)


def test_a_models_shape_takes_all_its_columns(tmp_path: Path) -> None:
    experts = {"experts": "64", "top_k": "4", "moe_ffn": "1024", "shared_ffn": "2048", "head_dim": "64"}
    (found, *_) = case(tmp_path, params_b="", **experts).specs
    assert found.model.moe is not None and found.model.head_dim == 64
    assert (found.model.moe.ffn, found.model.moe.shared_ffn, found.model.ffn) == (1024, 2048, 28672)


@pytest.mark.parametrize(
    ("cell", "value"), [("64 (8 nodes)", 64), ("~64", 64), ("64 GPUs", 64), ("6.4e1", 64), ("64%", 64)]
)
def test_a_cell_of_a_number_may_have_words_after_it(tmp_path: Path, cell: str, value: int) -> None:
    assert case(tmp_path, gpus=cell).row.whole("gpus") == value


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"seq_len": "8k"}, "the cell 'seq_len' is '8k', which does not begin with a number"),
        ({"gpus": "about 64"}, "the cell 'gpus' is 'about 64', which does not begin with a number"),
        ({"params_b": "100"}, "its 100 billion parameters are 29% off the 70.55 billion of its shape"),
        ({"gpu": "H100/A100"}, "the GPUs 'H100/A100' are of several kinds"),
        ({"gpu": "8x H100 + 8x H200"}, "are of several kinds"),
        ({"model": "Nemotron-H-56B"}, "the model 'Nemotron-H-56B' has state-space layers"),
        ({"model": "Jamba 1.5"}, "has state-space layers"),
        ({"model": "RWKV-7"}, "has linear attention"),
        ({"model": "T5-11B"}, "has an encoder"),
        ({"model": "BERT-large"}, "has no causal decoder"),
        ({"model": "Llama3 8B LoRA"}, "has adapters"),
        ({"program": "MyTrainer 3"}, "the program 'MyTrainer 3' is not known"),
        ({"attention": "magic"}, "the attention 'magic' is not one of unfused, flash1"),
        ({"dp": "4"}, "dp x tp x cp x pp = 128 are not its 64 GPUs"),
        ({"tokens_per_sec_per_gpu": "3000"}, "9.86 s a step are not its 3000 tokens per second and GPU"),
        ({"step_seconds": "1", "tokens_per_sec_per_gpu": ""}, "above the peak of its devices"),
        ({"precision": "int8"}, "the precision 'int8' is not one of"),
    ],
)
def test_rows_that_do_not_add_up_are_refused(tmp_path: Path, changed: dict[str, str], why: str) -> None:
    with pytest.raises(PredictionError) as caught:
        case(tmp_path, **changed)
    assert why in str(caught.value) and "\n" not in str(caught.value)


def test_all_runs_of_the_frontier_are_predicted() -> None:
    rows = read(FRONTIER)
    assert len([case_of(row, rows) for row in rows]) == 151
    assert PUBLISHED.parent == FRONTIER.parent
