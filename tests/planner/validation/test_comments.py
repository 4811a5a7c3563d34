"""Words of `source`, `where` and `program`: which of them count, and that those are listed."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from meshwright.planner.cost.remat import POLICIES
from meshwright.planner.cost.software import STACKS
from meshwright.planner.validation.cases import case_of
from meshwright.planner.validation.metrics import predict
from meshwright.planner.validation.table import PUBLISHED, PredictionError, read

LLAMA = {
    "source": "ours",
    "model": "llama3-8b",
    "seq_len": "8192",
    "gpu": "H100",
    "gpus": "64",
    "dp": "64",
    "zero": "3",
    "global_batch_seqs": "128",
    "precision": "bf16",
    "program": "torchtitan",
    "step_seconds": "2.5",
}
"""Llama 3 8B on 64 H100, which is predicted at 1.87 s."""
FLOPS = {"recompute": "full", "step_seconds": "", "tflops_per_gpu": "400"}


def row(tmp_path: Path, **changed: str) -> dict[str, Any]:
    """The prediction of the row of `LLAMA` with some cells changed, as JSON."""
    with PUBLISHED.open(newline="") as file:
        names = list(csv.DictReader(file).fieldnames or [])
    cells = LLAMA | changed
    path = tmp_path / "runs.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*names, *(name for name in cells if name not in names)])
        writer.writeheader()
        writer.writerow(cells)
    rows = read(path)
    return predict(case_of(rows[0], rows)).to_json()


def refusal(tmp_path: Path, **changed: str) -> str:
    with pytest.raises(PredictionError) as caught:
        row(tmp_path, **changed)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "changed",
    [
        {"where": "8 x 80 GB H100 nodes"},
        {"where": "64x80GB H100"},
        {"where": "64 x 400 Gbit/s"},  # more than a node has
        {"where": "8 x 400 GB/s"},
        {"where": "not 4 x 100 Gb/s"},
        {"source": "lab cluster, 8x80GB"},
        {"source": "Bloomington university"},
        {"where": "not eager, compiled"},
        {"where": "eager as we were"},
        {"where": "cosine lr schedule = cosine"},
        {"where": "as in arXiv:2104.04473", "program": "torchtitan"},
    ],
)
def test_comments_change_nothing(tmp_path: Path, changed: dict[str, str]) -> None:
    plain, told = row(tmp_path), row(tmp_path, **changed)
    for name in ("predicted", "seconds", "stack", "inferred", "interval"):
        assert told[name] == plain[name], name


@pytest.mark.parametrize("words", ["Bloomington university", "nemotron", "Alan Turing Institute", "foxcore"])
def test_a_program_is_inferred_from_whole_words(tmp_path: Path, words: str) -> None:
    told = row(tmp_path, source=words, program="")
    assert told["stack"] == "fsdp"  # the usual one of ZeRO 3


@pytest.mark.parametrize(
    ("words", "network"),
    [
        ("4 x 100 Gb/s", "4 x 100"),
        ("4x100 Gbps", "4 x 100"),
        ("8 GPU/node, 4x200Gb IB", "4 x 200"),
        ("8 x 400G NDR", "8 x 400"),
        ("chronicles of tr11-176B", "4 x 100"),
    ],
)
def test_a_network_that_a_comment_tells_counts_and_is_listed(
    tmp_path: Path, words: str, network: str
) -> None:
    told, plain = row(tmp_path, where=words), row(tmp_path)
    assert f"network_gbps = {network} a node" in told["inferred"]
    assert told["predicted"] >= plain["predicted"]
    if not network.startswith("8"):
        assert told["predicted"] > 1.01 * plain["predicted"]


def test_memory_is_in_gb_where_the_comment_says_that_of_memory(tmp_path: Path) -> None:
    plain = row(tmp_path, peak_mem_gib="60")
    assert plain["memory_bytes"] == 60 * 2**30
    assert row(tmp_path, peak_mem_gib="60", where="H100 80 GB")["memory_bytes"] == 60 * 2**30
    told = row(tmp_path, peak_mem_gib="60", where="Table 3, memory printed as GB")
    assert told["memory_bytes"] == 60e9 and "peak_mem_gib = in GB, allocated" in told["inferred"]


def test_memory_is_of_the_kind_that_a_source_states(tmp_path: Path) -> None:
    """Torchtitan's own tables have what the allocator reserved."""
    found = {}
    for source, where in (("ours", ""), ("ours", "memory reserved"), ("torchtitan's benchmarks", "")):
        told = row(tmp_path, peak_mem_gib="60", source=source, where=where)
        found[source, where] = told["predicted_bytes"]
        assert ("peak_mem_gib = in GiB, reserved" in told["inferred"]) == (source != "ours" or bool(where))
    allocated, *reserved = found.values()
    assert reserved == pytest.approx([allocated * (1 + STACKS["fsdp"].numbers.fragmentation)] * 2)


@pytest.mark.parametrize(
    ("changed", "hardware"),
    [
        ({}, False),
        ({"where": "hardware: DGX H100"}, False),
        ({"source": "Our hardware lab"}, False),
        ({"where": "model FLOPs, not hardware FLOPs"}, False),
        ({"where": "HFU 43.7%"}, False),  # a measurement of its own
        ({"where": "TFLOP/s are hardware TFLOP/s"}, True),
        ({"where": "tflops incl. recompute"}, True),
        ({"where": "as HFU", "recompute": "Full"}, True),
    ],
)
def test_flops_of_the_hardware_are_told_by_phrases(
    tmp_path: Path, changed: dict[str, str], hardware: bool
) -> None:
    told = row(tmp_path, **FLOPS | changed)
    assert told["seconds"] == pytest.approx(3.120 if hardware else 2.372, abs=1e-3)
    assert ("tflops_per_gpu = of the hardware, with recomputation" in told["inferred"]) == hardware


def test_a_program_that_is_not_compiled_is_listed(tmp_path: Path) -> None:
    for changed in ({"where": "FSDP2 eager"}, {"program": "torchtitan eager"}, {"where": "eager mode"}):
        told = row(tmp_path, **changed)
        assert told["stack"] == "fsdp" and "stack = fsdp" in told["inferred"]


def test_a_schedule_that_the_comment_names_is_listed_and_held_against_vp(tmp_path: Path) -> None:
    pipeline = {"pp": "4", "dp": "16"}
    told = row(tmp_path, **pipeline, where="schedule = ZB-V", vp="2")
    assert "schedule = zb-v" in told["inferred"] and "zb-v" in told["layout"]
    assert "vp = 2" in row(tmp_path, **pipeline, where="schedule=1F1B-I")["inferred"]
    for words, vp in (("zb-v", "4"), ("zb-v", "1"), ("zb-h1", "2"), ("1F1B-I", "1")):
        reason = refusal(tmp_path, **pipeline, where=f"schedule={words}", vp=vp)
        assert reason.endswith(f"does not have vp = {vp} stages a rank")
    assert "its schedule 'foo' is not one of gpipe, 1f1b" in refusal(
        tmp_path, **pipeline, where="schedule=foo"
    )
    assert "vp = 8 has no pipeline: pp is 1" in refusal(tmp_path, vp="8")
    assert "zb-h1 has no pipeline" in refusal(tmp_path, where="schedule=zb-h1")


def test_interleaved_stages_without_their_microbatches_are_refused(tmp_path: Path) -> None:
    batch = {"pp": "4", "dp": "16", "vp": "2", "micro_batch": "2", "global_batch_seqs": "160"}
    assert "vp = 2 needs microbatches in multiples of pp = 4" in refusal(tmp_path, **batch)


@pytest.mark.parametrize(
    ("changed", "cell"),
    [
        ({"params_b": "70", "layers": "80"}, "its layers = 80 is not the 32 of llama3-8b"),
        ({"params_b": "70"}, "its params_b = 70 is not the 8.03 of llama3-8b"),
        ({"model": "qwen3-30b-a3b", "params_b": "300"}, "its params_b = 300 is not the 30.53 of qwen3-30b"),
        ({"model": "qwen3-30b-a3b", "experts": "64"}, "its experts = 64 is not the 128 of qwen3-30b-a3b"),
        ({"ffn": "1"}, "its ffn = 1 is not the 14336 of llama3-8b"),
        ({"heads": "7"}, "its heads = 7 is not the 32"),
        ({"kv_heads": "3"}, "its kv_heads = 3 is not the 8"),
        ({"vocab": "17"}, "its vocab = 17 is not the 128256"),
        ({"experts": "99"}, "its experts = 99 is not the 1"),
        ({"moe_ffn": "100"}, "its moe_ffn = 100 is not the 14336"),
    ],
)
def test_a_cell_that_contradicts_the_preset_is_refused(
    tmp_path: Path, changed: dict[str, str], cell: str
) -> None:
    assert cell in refusal(tmp_path, **changed)


def test_the_shape_of_an_unknown_model_is_listed(tmp_path: Path) -> None:
    shape = {"model": "mine", "hidden": "4096", "layers": "32", "heads": "32", "vocab": "32000"}
    assert {"ffn = 16384", "kv_heads = 32", "head_dim = 128"} <= set(row(tmp_path, **shape)["inferred"])
    told = row(tmp_path, **shape, experts="8")["inferred"]
    assert {"top_k = 2", "moe_ffn = 16384"} <= set(told) and len(told) == len(set(told))
    assert "its top_k = 0 is of none of its 8 experts" in refusal(tmp_path, **shape, experts="8", top_k="0")
    for name in ("moe_ffn", "shared_ffn", "top_k"):
        assert f"its {name} is of experts, of which it has none" in refusal(
            tmp_path, **shape, **{name: "100"}
        )
    stated = row(tmp_path, **shape, ffn="16384", kv_heads="32", head_dim="128")
    assert not any(each.startswith(("ffn", "kv_heads", "head_dim")) for each in stated["inferred"])
    assert stated["interval"] == row(tmp_path, **shape)["interval"]  # conventions widen none


def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    for precision, recipe in (("fp8", "nvfp4"), ("mxfp8", "nvfp4"), ("nvfp4", "mxfp8"), ("fp8", "bf16")):
        reason = refusal(tmp_path, precision=precision, fp8_recipe=recipe, gpu="GB200")
        assert reason == f"its precision '{precision}' has no fp8_recipe '{recipe}'"
    assert "several formats: fp8, bf16; give one" in refusal(tmp_path, precision="bf16 or fp8")
    for width in ("3", "5", "7"):
        assert "give 1, 2, 4 or 8" in refusal(tmp_path, gradient_bytes=width)
    assert "cp = 64 does not divide sequences of 100" in refusal(tmp_path, cp="64", dp="", seq_len="100")


@pytest.mark.parametrize(
    ("name", "cells"),
    [
        ("network_gbps", ["400 GB/s", "400 GBps", "50 GB"]),
        ("tflops_per_gpu", ["0.4 PFLOP/s", "0.4 P", "40%"]),
        (
            "step_seconds",
            ["2.5 milliseconds", "2.5 msec", "2.5 microseconds", "2.5 hr", "2.5 hrs", "2.5 (in ms)", "2.5 m"],
        ),
        ("tokens_per_sec_per_gpu", ["6000 per node", "6000 (per node)", "6000 tokens/s"]),
        ("peak_mem_gib", ["60 GB", "75%"]),
        ("gpus", ["64%", "64 nodes"]),
    ],
)
def test_a_number_in_another_unit_is_refused(tmp_path: Path, name: str, cells: list[str]) -> None:
    for cell in cells:
        reason = refusal(tmp_path, **{name: cell})
        assert f"the cell '{name}' is '{cell}', which is not a number in the column's unit; give" in reason


@pytest.mark.parametrize(
    ("name", "cell"),
    [
        ("network_gbps", "400 Gb/s"),
        ("network_gbps", "400 Gbps (NDR)"),
        ("tflops_per_gpu", "300 TFLOP/s"),
        ("step_seconds", "2.5 s"),
        ("step_seconds", "2.5s (median of 10 minutes)"),
        ("step_seconds", "2.5 seconds; third run"),
        ("tokens_per_sec_per_gpu", "6553.6 tokens/s/GPU"),
        ("peak_mem_gib", "60 GiB (of 80 GB)"),
        ("params_b", "8.03 B"),
    ],
)
def test_a_number_may_have_its_columns_unit_and_a_comment(tmp_path: Path, name: str, cell: str) -> None:
    assert row(tmp_path, **{name: cell})["predicted"] > 1.5


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"vocab": "1"}, "the cell 'vocab' is '1', which is not a whole number of at least 2"),
        ({"ffn": "1e8"}, "the cell 'ffn' is '1e8', which is implausible; give at most 1,048,576"),
        (
            {"experts": "1000000"},
            "the cell 'experts' is '1000000', which is implausible; give at most 65,536",
        ),
        ({"moe_ffn": "5000000"}, "the cell 'moe_ffn' is '5000000', which is implausible; give at most 1,04"),
        ({"step_seconds": "1e-300"}, "'step_seconds' is '1e-300', which is implausible; give at least 1e-06"),
        ({"peak_mem_gib": "1e9"}, "'peak_mem_gib' is '1e9', which is implausible; give at most 10,000"),
        (
            {"hidden": "1000000", "layers": "2", "heads": "32", "vocab": "2000", "model": "mine"},
            "its ffn = 4000000 should be less than or equal to 1048576",
        ),
    ],
)
def test_a_number_out_of_bounds_names_its_column(
    tmp_path: Path, changed: dict[str, str], reason: str
) -> None:
    assert reason in refusal(tmp_path, **changed)


KNOWN = ", ".join(POLICIES)


@pytest.mark.parametrize(
    ("where", "says"),
    [
        (
            "remat_policy=mine",
            f"remat policy 'mine' of its comment is not known and not counted; known are {KNOWN}",
        ),
        (
            "remat policy: minimal_plus",
            "'minimal_plus' of its comment is not known and taken for 'minimal'; known",
        ),
        (
            '"remat" = "everything"',
            "'everything' of its comment is not known and not counted; known are full,",
        ),
        (
            "remat custom, mlpwq=offload",
            "the output 'mlpwq' that its comment places (offload) is unknown and",
        ),
        (
            "remat custom, mlpwo=ofload",
            "the place 'ofload' of mlpwo in its comment is unknown and not counted;",
        ),
    ],
)
@pytest.mark.parametrize("program", ["MaxText", "torchtitan"])
def test_words_of_recomputation_that_are_not_known_are_told(
    tmp_path: Path, program: str, where: str, says: str
) -> None:
    told = row(tmp_path, where=where, program=program)
    assert [note for note in told["notes"] if says in note] and told["predicted"] > 0


@pytest.mark.parametrize(
    "where",
    [*(f"remat_policy={name}" for name in POLICIES), "no remat", "remat of attention", "context: long"],
)
def test_words_that_are_known_or_name_no_policy_are_not_remarked_on(tmp_path: Path, where: str) -> None:
    assert row(tmp_path, where=where, program="MaxText")["notes"] == []


def test_an_unknown_word_in_the_column_of_recomputation_is_refused_with_those_that_are_known(
    tmp_path: Path,
) -> None:
    says = "the recompute 'minimal' is not one of none, full, selective"
    assert refusal(tmp_path, program="MaxText", recompute="minimal") == says
