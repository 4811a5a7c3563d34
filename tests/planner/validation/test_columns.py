"""Rows of measured runs: the columns that state what a program did, and rows that are refused."""

from __future__ import annotations

from math import log
from pathlib import Path

import pytest

from changed_rows import case
from meshwright.hardware.find import cluster
from meshwright.planner.cost.remat import POLICIES, Remat
from meshwright.planner.cost.software import STACKS
from meshwright.planner.validation.cases import case_of
from meshwright.planner.validation.metrics import predict
from meshwright.planner.validation.table import FRONTIER, PUBLISHED, PredictionError, read


@pytest.mark.parametrize(
    ("where", "policies"),
    [
        ("remat_policy: full", ["full"]),
        ("remat minimal_offloaded", ["selective"]),
        ("remat custom", ["none", "selective", "full"]),
    ],
)
def test_maxtext_names_recomputation_in_its_own_words(
    tmp_path: Path, where: str, policies: list[str]
) -> None:
    changed = {"precision": "bf16", "fp8_recipe": "", "gpu": "TPU v6e", "recompute": ""}
    found = case(tmp_path, program="MaxText", source="a blog", where=where, **changed)
    assert found.cluster.device.name == "tpu-v6e" and found.stack.hosting == "graphs"
    assert list(dict.fromkeys(spec.recompute.policy for spec in found.specs)) == policies
    assert (f"recompute = {policies[0]}" in found.derived) == (len(policies) == 1)


@pytest.mark.parametrize(
    ("where", "kept"),
    [
        ("remat custom", POLICIES["custom"]),
        ("remat_policy=minimal_with_context", POLICIES["minimal_with_context"]),
        ('"remat_policy": "qkv_proj_offloaded"', POLICIES["qkv_proj_offloaded"]),
        (
            "remat custom, decoder_layer_input=offload, qkv_proj=device, mlpwo: remat",
            Remat(("query_proj", "key_proj", "value_proj"), ("decoder_layer_input",)),
        ),
        ("v6e-8", STACKS["maxtext"].remat),
    ],
)
def test_what_maxtext_keeps_is_what_a_comment_names(tmp_path: Path, where: str, kept: Remat) -> None:
    changed = {"precision": "bf16", "fp8_recipe": "", "gpu": "TPU v6e", "recompute": ""}
    found = case(tmp_path, program="MaxText", source="a blog", where=where, **changed)
    assert found.stack.remat == kept
    other = case(tmp_path, program="torchtitan", source="a blog", where=where, **changed)
    assert other.stack.remat == STACKS["fsdp"].remat


def test_maxtexts_weights_in_bf16_have_moments_and_gradients_in_it(tmp_path: Path) -> None:
    changed = {"precision": "bf16", "fp8_recipe": "", "gpu": "TPU v6e", "recompute": "full"}
    need = {}
    for where in ("", "weight_dtype=bfloat16"):
        found = predict(case(tmp_path, program="MaxText", source="a blog", where=where, **changed))
        need[where] = found.memory.parameters + found.memory.optimiser
    assert need["weight_dtype=bfloat16"] == pytest.approx(need[""] / 2)


@pytest.mark.parametrize(
    ("gpu", "where", "stack", "told"),
    [
        ("H100", "", "fsdp-compiled", ""),
        ("H100", "benchmark of 2024-12", "fsdp-compiled", ""),
        ("H100", "benchmarks/llama3_202506.md", "fsdp-compiled-loss", "derived"),
        ("H100", "torch 2.9.0.dev20250811", "fsdp-compiled-loss", "derived"),
        ("MI300X", "", "fsdp-compiled-loss", "inferred"),
        ("B200", "", "fsdp-compiled-loss", "inferred"),
        ("B200", "benchmark of 2025-02", "fsdp-compiled", ""),
        ("B200", "FSDP2 eager", "fsdp", "derived"),
    ],
)
def test_torchtitan_compiles_its_loss_from_april_2025_on(
    tmp_path: Path, gpu: str, where: str, stack: str, told: str
) -> None:
    """By the row's date, or by a device that its releases before did not run on."""
    found = case(tmp_path, PUBLISHED, 57, gpu=gpu, program="torchtitan", source="a blog", where=where)
    assert found.stack.name == stack
    assert (f"stack = {stack}" in found.derived) == (told == "derived")
    assert (f"stack = {stack}" in found.inferred) == (told == "inferred")


def test_a_device_that_no_run_was_timed_on_has_a_wider_interval(tmp_path: Path) -> None:
    changed = {"program": "torchtitan", "precision": "bf16", "fp8_recipe": "", "where": ""}
    spans = []
    for gpu in ("B200", "MI355X", "TPU v6e"):
        low, high = predict(case(tmp_path, gpu=gpu, **changed)).interval
        spans.append(log(high / low))
    assert min(spans[1:]) > 1.7 * spans[0]


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
        ({"precision": "MXFP4", "gpu": "MI355X", "mfu_pct": ""}, "mxfp4"),
        ({"precision": "", "fp8_recipe": "mxfp4", "gpu": "GB200", "mfu_pct": ""}, "mxfp4"),
        ({"precision": "NVFP4", "gpu": "GB200", "mfu_pct": ""}, "nvfp4"),
        ({"precision": "amp_bf16"}, "bf16"),
        ({"precision": "amp_bf16", "fp8_recipe": "none"}, "bf16"),
        ({"precision": "", "fp8_recipe": "tensor"}, "fp8"),
    ],
)
def test_precision_recipes(tmp_path: Path, changed: dict[str, str], recipe: str) -> None:
    assert case(tmp_path, **changed).format == recipe


def test_the_network_of_a_row_is_of_a_device_or_of_a_node(tmp_path: Path) -> None:
    each, node = (case(tmp_path, network_gbps=value).cluster for value in ("200", "1700"))
    assert each.levels[1].link.bandwidth == pytest.approx(200e9 / 8)
    assert node.levels[1].link.bandwidth == pytest.approx(1700e9 / 8 / 8)


@pytest.mark.parametrize(
    ("gpu", "device"),
    [
        ("NVIDIA H100 SXM5 80GB", "H100 SXM 80 GB"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM 80 GB"),
        ("H100 / NVLink4, SXM5", "H100 SXM 80 GB"),
        ("H100 80GB PCIe", "H100 PCIe 80 GB"),
        ("NVIDIA H100 NVL", "H100 NVL 94 GB"),
        ("8x H100-94GB", "H100 NVL 94 GB"),
        ("H100 NVLink 80GB", "H100 SXM 80 GB"),
        ("h200 nvl", "H200 NVL 141 GB"),
        ("NVIDIA H200 NVL 141GB", "H200 NVL 141 GB"),
        ("H200 141GB, NVLink", "H200 SXM 141 GB"),
        ("A100-SXM4-40GB", "A100 SXM 40 GB"),
        ("MI300X-192GB", "MI300X"),
        ("AMD Instinct MI355X", "MI355X"),
        ("8xB200", "B200 180 GB"),
        ("GB200 NVL72", "GB200 186 GB"),
        ("TPU v5 lite", "tpu-v5e"),
        ("RTX 5090", "RTX 5090 32 GB"),
        ("NVIDIA RTX A6000", "RTX A6000 48 GB"),
        ("RTX PRO 6000", "RTX PRO 6000 96 GB"),
        ("L40S", "L40S 48 GB"),
        ("trn2", "Trainium2"),
    ],
)
def test_gpus_as_people_write_them(tmp_path: Path, gpu: str, device: str) -> None:
    changed = {"precision": "bf16", "fp8_recipe": "", "step_seconds": "1000", "mfu_pct": ""}
    found = case(tmp_path, gpu=gpu, tokens_per_sec_per_gpu="", tflops_per_gpu="", where="", **changed)
    assert found.cluster.device.name == device


def test_a_v100_computes_in_fp16(tmp_path: Path) -> None:
    slow = {"step_seconds": "1000", "mfu_pct": "", "tokens_per_sec_per_gpu": "", "tflops_per_gpu": ""}
    found = case(tmp_path, gpu="Tesla V100-SXM2-16GB", precision="", fp8_recipe="", **slow)
    assert found.format == "fp16" and "precision = fp16" in found.inferred
    assert found.cluster.device.name == "V100 SXM 16 GB"


def test_a_limit_of_power_lowers_what_products_attain(tmp_path: Path) -> None:
    rated, limited, as_rated = (
        case(tmp_path, power_w=watts).cluster.device for watts in ("", "350 W", "700 watts")
    )
    assert as_rated == rated and limited.peak == rated.peak
    assert limited.attained("bf16") == pytest.approx(rated.attained("bf16") * 0.5**0.5)
    card = cluster("rtx-4090").device  # whose generation has no device of reference
    assert card.at_power(450).clock("bf16") == pytest.approx(card.clock("bf16"))
    assert card.at_power(225).clock("bf16") == pytest.approx(card.clock("bf16") * 0.5**0.5)
    unknown = cluster("tpu-v6e").device
    assert unknown.at_power(100) == unknown
    assert predict(case(tmp_path, power_w="350")).seconds > 1.15 * predict(case(tmp_path)).seconds


def test_gpus_of_a_node_are_the_rows(tmp_path: Path) -> None:
    usual, four = (case(tmp_path, gpus_per_node=each).cluster for each in ("", "4"))
    assert (usual.node, four.node, four.count) == (8, 4, 64)
    assert four.levels[1].link == usual.levels[1].link  # a device keeps its part of the network
    told = case(tmp_path, gpus_per_node="4", network_gbps="100").cluster
    assert told.node == 4 and told.levels[1].link.bandwidth == pytest.approx(100e9 / 8)
    assert case(tmp_path, gpus_per_node="128").cluster.levels[0].devices == 64  # all of them in one node


def test_a_bridge_joins_two_cards_of_a_server(tmp_path: Path) -> None:
    shape = {"gpu": "H100 NVL", "gpus_per_node": "8", "step_seconds": "1000", "mfu_pct": ""}
    found = case(tmp_path, tokens_per_sec_per_gpu="", tflops_per_gpu="", where="", **shape).cluster
    assert found.level_of((0, 1)).link.bandwidth == 300e9 > 5 * found.level_of((1, 2)).link.bandwidth


def test_slices_of_experts_are_of_the_layout(tmp_path: Path) -> None:
    experts = {"experts": "64", "top_k": "4", "moe_ffn": "1024", "ep": "4", "params_b": "", "mfu_pct": ""}
    whole, sliced = (case(tmp_path, etp=each, **experts).specs[0].layout for each in ("", "2"))
    assert (whole.ep, whole.etp, sliced.ep, sliced.etp) == (4, 1, 4, 2)


def test_cuda_graphs_of_a_row_have_no_time_of_the_host(tmp_path: Path) -> None:
    plain, captured = (case(tmp_path, cuda_graphs=each) for each in ("no", "yes"))
    assert plain.stack == case(tmp_path).stack and plain.stack.launch > 0 == captured.stack.launch
    dated = {"where": "[26.06 NeMo Container]", "gpu": "B200", "program": "NeMo", "moe_ffn": "1024"}
    dated |= {"experts": "64", "top_k": "4", "params_b": "", "mfu_pct": ""}
    assert case(tmp_path, **dated).stack.launch > 0 == case(tmp_path, cuda_graphs="yes", **dated).stack.launch


EXPERTS = {
    "experts": "64", "top_k": "4", "moe_ffn": "1024", "ep": "4", "program": "NeMo", "params_b": "",
    "mfu_pct": "",
}  # fmt: skip


def test_a_capacity_of_experts_is_what_the_row_states(tmp_path: Path) -> None:
    free = case(tmp_path, **EXPERTS)
    found = {}
    for capacity, pads in (("0.5", "no"), ("2.0", "no"), ("2.0", "yes")):
        given = case(tmp_path, capacity_factor=capacity, moe_pad_to_capacity=pads, **EXPERTS)
        assert given.specs[0].model.moe is not None and given.inferred == free.inferred
        assert given.specs[0].model.moe.capacity_factor == float(capacity)
        assert given.stack.pads_experts == (pads == "yes")
        found[capacity, pads] = predict(given)
    assert free.specs[0].model.moe is not None and free.specs[0].model.moe.capacity_factor is None
    dropped, room, padded = (found[key] for key in (("0.5", "no"), ("2.0", "no"), ("2.0", "yes")))
    assert dropped.seconds < room.seconds < padded.seconds
    assert dropped.memory.activations < room.memory.activations < padded.memory.activations


def test_rows_that_dropped_tokens_say_so() -> None:
    rows = [row for row in read(FRONTIER) if "tokendrop" in row.words["model"]]
    assert len(rows) == 4
    assert all(
        row.numbers["capacity_factor"] == 1 and row.words["moe_pad_to_capacity"] == "yes" for row in rows
    )


def test_a_models_name_tells_nothing_of_its_machines(tmp_path: Path) -> None:
    usual = case(tmp_path).cluster
    assert case(tmp_path, model="Llama 3 of bloom, 4 x 100 GB").cluster == usual
    assert case(tmp_path, where="4 x 100 Gb/s").cluster.levels[1].link.bandwidth == pytest.approx(50e9 / 8)


def test_a_models_shape_takes_all_its_columns(tmp_path: Path) -> None:
    experts = {"experts": "64", "top_k": "4", "moe_ffn": "1024", "shared_ffn": "2048", "head_dim": "64"}
    (found, *_) = case(tmp_path, params_b="", mfu_pct="", **experts).specs
    assert found.model.moe is not None and found.model.head_dim == 64
    assert (found.model.moe.ffn, found.model.moe.shared_ffn, found.model.ffn) == (1024, 2048, 28672)


@pytest.mark.parametrize(
    ("cell", "value"),
    [("64 (8 nodes)", 64), ("~64", 64), ("64 GPUs", 64), ("6.4e1", 64), ("64 gpus [8 a node]", 64)],
)
def test_a_cell_of_a_number_may_have_words_after_it(tmp_path: Path, cell: str, value: int) -> None:
    assert case(tmp_path, gpus=cell).row.whole("gpus") == value


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"seq_len": "8k"}, "the cell 'seq_len' is '8k', which is not a number in the column's unit"),
        ({"gpus": "about 64"}, "the cell 'gpus' is 'about 64', which is not a number in the column's unit"),
        ({"params_b": "100"}, "its 100 billion parameters are 29% off the 70.55 billion of its shape"),
        ({"gpu": "H100/A100"}, "the GPUs 'H100/A100' are of several kinds"),
        ({"gpu": "8x H100 + 8x H200"}, "are of several kinds"),
        ({"gpu": "H100-80GB+Z100"}, "are of several kinds"),
        ({"gpu": "Z9000 with H100"}, "are of several kinds"),
        ({"gpu": "X100 and Y100"}, "are of several kinds"),
        ({"gpus_per_node": "5"}, "its 64 GPUs are not nodes of gpus_per_node = 5"),
        ({"power_w": "5 kW"}, "the cell 'power_w' is '5 kW', which is not a number in the column's unit"),
        ({"where": "power limited H100"}, "does not tell to how many watts; give power_w"),
        ({"etp": "2"}, "etp = 2 has no experts to slice"),
        (
            {"etp": "2", "experts": "64", "top_k": "4", "moe_ffn": "1023", "params_b": ""},
            "its experts' channels",
        ),
        ({"capacity_factor": "1.25"}, "its capacity_factor = 1.25 is of experts, of which it has none"),
        ({"moe_pad_to_capacity": "yes"}, "pads rows to a capacity, of which it has none"),
        ({"moe_pad_to_capacity": "2"}, "the moe_pad_to_capacity '2' is not one of yes, no"),
        ({"capacity_factor": "0"}, "the cell 'capacity_factor' is '0', which is not a measurement"),
        ({"cuda_graphs": "maybe"}, "the cuda_graphs 'maybe' is not one of yes, no"),
        ({"model": "Nemotron-H-56B"}, "the model 'Nemotron-H-56B' has state-space layers"),
        ({"model": "Jamba 1.5"}, "has state-space layers"),
        ({"model": "RWKV-7"}, "has linear attention"),
        ({"model": "T5-11B"}, "has an encoder"),
        ({"model": "BERT-large"}, "has no causal decoder"),
        ({"model": "Llama3 8B LoRA"}, "has adapters"),
        ({"program": "MyTrainer 3"}, "the program 'MyTrainer 3' is not known"),
        ({"attention": "magic"}, "the attention 'magic' is not one of unfused, flash1"),
        ({"precision": "bf16", "fp8_recipe": "tensor"}, "its precision 'bf16' has no fp8_recipe 'tensor'"),
        ({"gpus": "8 nodes x 8"}, "the cell 'gpus' is '8 nodes x 8', which is not a number in the column's"),
        ({"gpus": "8 x 8"}, "the cell 'gpus' is '8 x 8', which is not a number in the column's unit"),
        ({"params_b": "70.55 (million)"}, "the cell 'params_b' is '70.55 (million)', which is not a number"),
        ({"step_seconds": "9 or 10"}, "the cell 'step_seconds' is '9 or 10', which is not a number"),
        ({"gradient_bytes": "16"}, "the cell 'gradient_bytes' is '16', which is implausible; give at most 8"),
        ({"dp": "4"}, "dp x tp x cp x pp = 128 are not its 64 GPUs"),
        ({"tokens_per_sec_per_gpu": "3000"}, "step_seconds and its tokens_per_sec_per_gpu are of different"),
        ({"tflops_per_gpu": "90"}, "its step_seconds and its tflops_per_gpu are of different speeds"),
        ({"mfu_pct": "0.4"}, "its step_seconds and its mfu_pct are of different speeds"),
        ({"step_seconds": "9860 ms"}, "the cell 'step_seconds' is '9860 ms', which is not a number in the"),
        ({"params_b": "70550 M"}, "which is not a number in the column's unit"),
        ({"model": "Nemotron Nano 9B v2"}, "has state-space layers"),
        ({"model": "mT5-13B"}, "has an encoder"),
        ({"model": "Qwen2.5-VL-72B"}, "has an encoder of images"),
        ({"gpu": "H1000"}, "the GPU 'H1000' is not in the catalogue"),
        ({"gpu": "A100"}, "its A100 SXM 80 GB does not compute in fp8"),
        ({"gpu": "V100-32GB", "precision": "bf16", "fp8_recipe": ""}, "does not compute in bf16"),
        ({"gpu": "H100-80GB+V100"}, "are of several kinds"),
        ({"fp8_recipe": "banana"}, "the fp8_recipe 'banana' is not one of tensor, row, block"),
        ({"ep": "4"}, "ep = 4 has no experts to deal out"),
        ({"kv_heads": "7", "params_b": ""}, "its 7 kv_heads do not divide its 64 heads"),
        ({"micro_batch": "3"}, "micro_batch = 3 does not divide the 64 sequences of a data rank"),
        ({"step_seconds": "1", "tokens_per_sec_per_gpu": "", "mfu_pct": ""}, "above the peak of its devices"),
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


def test_the_bytes_of_a_run_are_those_of_the_recomputation_that_is_timed(tmp_path: Path) -> None:
    """LLaMA 3 70B under FSDP on GB300 keeps more than fits: some of its layers are recomputed."""
    found = case(tmp_path, number=64)
    prediction = predict(found)
    assert 0 < prediction.recomputed < 1 and prediction.fits
    assert prediction.memory.device == pytest.approx(found.cluster.device.memory)
    assert prediction.to_json()["recomputed_share"] == prediction.recomputed


@pytest.mark.parametrize(
    "where", ["power capped at 500W", "a 500 W power limit", "power limited to 500 watts"]
)
def test_watts_in_a_comment_are_read(tmp_path: Path, where: str) -> None:
    assert case(tmp_path, where=where).cluster == case(tmp_path, where="", power_w="500").cluster
    with pytest.raises(PredictionError, match="does not tell to how many watts"):
        case(tmp_path, where="power limited")


def test_hosts_of_a_pod_do_not_end_its_links(tmp_path: Path) -> None:
    shape = {
        "gpu": "TPU v5p",
        "gpus": "64",
        "program": "maxtext",
        "tp": "1",
        "pp": "1",
        "cp": "1",
        "dp": "64",
    }
    shape |= {"precision": "bf16", "fp8_recipe": "", "vp": "", "where": "", "tflops_per_gpu": "100"}
    shape |= {"step_seconds": "", "tokens_per_sec_per_gpu": "", "mfu_pct": ""}
    found = [predict(case(tmp_path, gpus_per_node=size, **shape)).seconds for size in ("", "4")]
    assert found[0] == found[1]
