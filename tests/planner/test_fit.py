"""`fit`: which ways of training and serving fit, what still fits, and the commands."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from meshwright import api
from meshwright.cli.main import main
from meshwright.hardware.find import cluster
from meshwright.planner.cost.model import CostModel
from meshwright.planner.fit.bisection import doubled, most_that
from meshwright.planner.fit.fit import Fits
from meshwright.planner.fit.serving import served
from meshwright.planner.fit.training import TrainingFit
from meshwright.planner.fit.vllm import GRAPHS, prompt_tokens, working
from meshwright.planner.memory.exact import memory_model
from meshwright.planner.memory.host import with_host_room
from meshwright.planner.rank_view import place_of
from meshwright.planner.search.infeasible import shortfall
from meshwright.planner.search.problem import SearchProblem
from meshwright.planner.search.results import SearchResult
from meshwright.spec import RunSpec, UserError, load
from meshwright.units import gigabytes

GIB = 2**30
GPU = cluster("rtx-4090")
SMALL = replace(GPU, device=replace(GPU.device, memory=5 * GIB))
"""A GPU on which 135M parameters fit, and not with long sequences in large microbatches."""


@cache
def fits(model: str, gpu: str = "", count: int = 1, **how: Any) -> Fits:
    return api.fit(model, gpu=gpu or SMALL, count=count, **how)


def way(found: Fits, name: str) -> TrainingFit:
    return next(each for each in found.training if each.way.name == name)


@pytest.mark.parametrize("most", [0, 1, 2, 3, 63, 64, 65, 100])
def test_the_most_that_fits_is_found(most: int) -> None:
    assert doubled(lambda size: size <= most, 1, 100) == most
    assert doubled(lambda size: size <= most, 3, 100) == (most if most >= 3 else 0)
    assert most_that(lambda size: size <= most, 0, 100) == most


def test_8b_fits_a_3090_by_adapters_and_not_whole() -> None:
    found = fits("llama3-8b", "rtx-3090", seq_len=4096)
    assert [each.fits for each in found.training] == [False, False, False, False, True, True]
    qlora, full = way(found, "qlora"), way(found, "full")
    low, high = qlora.interval
    assert qlora.plan is not None and full.plan is not None
    assert 9e9 < low < qlora.plan.memory.device < high < 21e9
    assert qlora.probability > 0.99 and full.probability < 0.01
    assert 18 * 8.03e9 < full.plan.memory.device < 21 * 8.03e9  # its states, and as little as can be besides
    assert full.command is None and found.best is way(found, "lora")
    assert (
        "does not fit (needs 160 GB of 25.8 GB); LoRA fits at 4,096 tokens, 20.8 GB (16.7 to" in found.advice
    )


def test_a_probability_is_that_of_plans_and_high_where_the_interval_is_within_the_room() -> None:
    for each in fits("llama3-8b", "rtx-3090", seq_len=4096).training:
        assert each.plan is not None and each.probability == each.plan.fits_probability
        low, high = each.interval
        assert (each.probability >= 0.95) == (high <= each.plan.room)
        assert (each.probability <= 0.05) == (low >= each.plan.room)


@pytest.mark.parametrize("count", [1, 2])
def test_what_is_told_to_be_the_most_fits_and_more_does_not(count: int) -> None:
    for name in ("full", "lora"):
        each = way(fits("smollm2-135m", "", count, overrides=(("train.batch_tokens", "32768"),)), name)
        told, base = each.to_json(), each.problem
        assert each.fits and base is not None
        for key, name_of_key in (
            ("longest_seq_len", "data.seq_len"),
            ("largest_micro_batch", "layout.micro_batch"),
        ):
            most = told[key]
            assert most > 0
            assert any_layout(each, name_of_key, most)
            assert not any_layout(each, name_of_key, 2 * most) or 2 * most > 8192, name_of_key


def any_layout(each: TrainingFit, key: str, value: int) -> bool:
    """True if some layout with full recomputation fits with a key of such a value."""
    assert each.problem is not None
    base, fixed = each.problem.base, {**each.problem.fixed, "policy": "full"}
    length, sequences = base.data.seq_len, base.batch_sequences
    if key == "data.seq_len":
        run = each.problem.with_batch(value, value * sequences)
    else:
        run = each.problem.with_batch(length, 2 * each.problem.ranks * value * length)
        fixed["micro_batch"] = value
    return replace(run, fixed=fixed).fits()


def test_where_nothing_fits_it_is_told_what_needs_least() -> None:
    found = fits("llama3.1-70b", "rtx-3090", 1)
    qlora = way(found, "qlora").plan
    assert found.best is None and qlora is not None
    assert f"no way of training fits; QLoRA needs least, {gigabytes(qlora.memory.device)}" in found.advice


def test_few_searches_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """None for sizes that fit on the layout of the plan, or whose least bytes are too many on all."""
    asked: list[bool] = []
    known = SearchProblem.search

    def counted(problem: SearchProblem, *words: Any, **how: Any) -> SearchResult:
        asked.append("any_will_do" in how)
        return known(problem, *words, **how)

    monkeypatch.setattr(SearchProblem, "search", counted)
    told = api.fit("llama3-8b", gpu="rtx-4090", count=2, seq_len=4096).to_json()
    assert (
        asked.count(False) <= 3 * len(told["training"]) + 3
    )  # of three limits, with a bound host and without
    assert asked.count(True) <= 4


# Commands ------------------------------------------------------------------------------------------------


def checked(capsys: pytest.CaptureFixture[str], command: str) -> dict[str, Any]:
    """The spec of the run of a printed command, which `check` accepts."""
    words = shlex.split(command)
    assert words[:2] == ["meshwright", "train"]
    assert main(["check", *words[2:]]) == 0
    capsys.readouterr()
    assert main(["spec", "show", *words[2:], "--json"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return told


def hf_folder(folder: Path) -> Path:
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256,
        "num_hidden_layers": 4, "intermediate_size": 768, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 1024,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "hidden_act": "silu",
        "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


RUN_FILE = """
[model]
preset = "smollm2-135m"
[data]
seq_len = 1024
[train]
batch_tokens = 16384
[layout]
dp = 4
zero = 1
stages = "even"
[lora]
rank = 8
quantise = "int8"
[recompute]
policy = "selective"
save = ["attention"]
"""


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("model", ["smollm2-135m", "moe-tiny", "FOLDER", "FILE"])
def test_each_command_is_of_the_run_that_was_planned(
    model: str, count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if model == "FOLDER":
        model = str(hf_folder(tmp_path))
    if model == "FILE":
        (tmp_path / "run.toml").write_text(RUN_FILE)
        model = str(tmp_path / "run.toml")
    found = api.fit(model, gpu=GPU, count=count, overrides=(("data.corpus", "synthetic"),))
    assert [each.way.name for each in found.training if each.command] == [
        each.way.name for each in found.training
    ]
    for each in found.training:
        assert each.plan is not None and each.command is not None
        told, spec = checked(capsys, each.command), each.plan.spec.to_json()
        for table in ("model", "data", "lora", "recompute", "precision"):
            assert told[table] == spec[table], table
        idle = {} if spec["layout"]["pp"] > 1 else dict.fromkeys(("schedule", "virtual", "stages"))
        assert {**told["layout"], **idle} == {**spec["layout"], **idle}
        assert {**told["train"], "compile": None} == {**spec["train"], "compile": None}
        assert (told["lora"] is not None) == each.way.adapters


def test_a_folder_with_weights_is_started_from(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path)
    command = way(api.fit(str(folder), gpu=GPU), "lora").command
    assert command is not None and f"--model.hf {folder}" in command
    (folder / "model.safetensors").touch()
    found = api.fit(str(folder), gpu=GPU)
    command = way(found, "lora").command
    assert command is not None and f"--from {folder}" in command
    assert found.serving[0].commands[0].startswith(f"vllm serve {folder} --max-model-len 2048")
    assert found.serving[1].commands[0] == f"meshwright quantise {folder} {folder}-int8 --recipe int8"


def test_a_gpu_without_bf16_serves_in_fp16_what_its_programs_have_kernels_for(tmp_path: Path) -> None:
    found = api.fit("llama3-8b", gpu="v100")
    plain, *packed = found.serving
    assert plain.format == "fp16" and not any("bf" in command for command in plain.commands)
    assert "--dtype float16" in plain.commands[0] and plain.commands[-1].endswith("--dtype float16")
    assert not any("--quantization" in command for command in plain.commands)
    assert [each.format for each in packed] == ["int8", "int4"]
    assert all(each.reason and not each.commands for each in packed)
    told = api.fit(str(hf_folder(tmp_path)), gpu="v100").serving[0]
    assert all("--dtype float16" in command for command in told.commands[-1:])
    assert [each.format for each in api.fit("llama3-8b", gpu="h100").serving] == [
        "bf16",
        "int8",
        "fp8",
        "int4",
    ]


def test_flags_are_kept_and_adapters_have_theirs() -> None:
    keys = (("lora.rank", "64"), ("layout.tp", "2"), ("train.lr", "0.0002"))
    found = fits("llama3-8b", "rtx-4090", 2, overrides=keys, seq_len=4096)
    lora, full = way(found, "lora"), way(found, "full")
    assert lora.command is not None and lora.plan is not None and full.plan is not None
    assert "--lora.rank 64" in lora.command and "--train.lr 0.0002" in lora.command
    assert lora.plan.spec.layout.tp == full.plan.spec.layout.tp == 2
    assert full.plan.spec.lora is None


# The host's memory ---------------------------------------------------------------------------------------


def test_moments_on_the_host_are_bounded_by_its_memory() -> None:
    """Eight 4090s: 8 bytes a parameter, and as much again where data ranks do not share them."""
    keys = (("layout.pp", "1"), ("layout.tp", "1"), ("layout.cp", "1"))
    told = {
        size: way(
            fits("llama3-8b", "rtx-4090", 8, seq_len=4096, host_memory=size, overrides=keys), "full-offload"
        )
        for size in (None, 60.0, 70.0)
    }
    assert all(each.plan is not None and each.probability >= 0.8 for each in told.values())
    assert told[None].fits and told[70.0].fits and not told[60.0].fits
    assert told[70.0].host_bytes == pytest.approx(8 * 8.03e9, rel=0.01)
    assert told[60.0].command is None


def test_moments_of_all_ranks_are_counted_once_for_each_that_has_them() -> None:
    """Stages of a pipeline have theirs, uneven as they are; data ranks the same, unless they share them."""

    def host_bytes(*keys: tuple[str, str]) -> float:
        return way(api.fit("smollm2-135m", gpu=GPU, count=2, overrides=keys), "full-offload").host_bytes

    whole = 8 * 134_515_008
    assert host_bytes(("layout.dp", "2"), ("layout.zero", "1")) == pytest.approx(whole, rel=0.01)
    assert host_bytes(("layout.dp", "2"), ("layout.zero", "0")) == pytest.approx(2 * whole, rel=0.01)
    stages = host_bytes(("layout.pp", "2"))
    assert stages == pytest.approx(
        whole + 8 * 49152 * 576, rel=0.01
    )  # the last stage has the tied weights, too


def test_plans_and_fits_take_a_host_to_have_the_same_memory() -> None:
    """Two stages of a pipeline, of which the last has more, share the memory of their node."""
    keys = (("layout.pp", "2"), ("layout.schedule", "1f1b"))
    whole, known = 8 * (134_515_008 + 49152 * 576), cluster("rtx-4090", 2)
    for share, is_enough in ((1.01, True), (0.99, False)):
        host = with_host_room(known, share * whole)
        found = way(api.fit("smollm2-135m", gpu=host, count=2, seq_len=2048, overrides=keys), "full-offload")
        assert found.fits == is_enough and found.host_memory == pytest.approx(share * whole)
        offloaded = replace(found.request, overrides=[*keys, ("train.offload", "host")])
        (problem,), _ = offloaded.problems()
        assert problem.fits() == is_enough
        assert is_enough or "need more memory of their hosts" in shortfall(problem)


# Serving -------------------------------------------------------------------------------------------------


def test_serving_takes_the_fewest_gpus_for_a_replica() -> None:
    found = fits("llama3-8b", "rtx-4090", 2, seq_len=4096, batch=8)
    layouts = {each.format: each.spec.layout for each in found.serving if each.spec is not None}
    assert (layouts["bf16"].tp, layouts["bf16"].dp) == (2, 1)
    assert (layouts["int4"].tp, layouts["int4"].dp) == (1, 2)
    for each in found.serving:
        assert each.fits and each.largest_batch >= 8 and each.longest == 8192
        assert (
            each.memory(each.largest_batch, 4096).device
            < 25.77e9
            < each.memory(2 * each.largest_batch, 4096).device
        )


def test_more_sequences_take_more_and_a_cut_takes_less() -> None:
    (bf16, *_) = fits("llama3-8b", "rtx-4090", 2, seq_len=4096, batch=8).serving
    assert bf16.spec is not None
    one, two = (served(CostModel(cluster("rtx-4090", 2)), bf16.spec, "bf16", size, 4096) for size in (8, 16))
    assert two.activations - one.activations == 8 * 4096 * 32 * 2 * 4 * 128 * 2  # keys and values of 4 heads
    assert one.parameters == pytest.approx(8.03e9, rel=0.01)  # half of 2 bytes each


def test_no_serving_of_what_is_not_written() -> None:
    told = {each.format: each.reason for each in fits("gpt2", "rtx-4090").serving}
    assert told["bf16"] is None and "compressed-tensors" in (told["int8"] or "")
    told = {each.format: each.reason for each in fits("moe-small", "rtx-4090").serving}
    assert told["int4"] is None and "inputs of experts" in (told["fp8"] or "")
    assert "fp8" not in {each.format for each in fits("gpt2", "rtx-3090").serving}


def test_serving_commands_have_the_sizes_that_were_counted() -> None:
    """Tokens, sequences, prompts, format and share of a GPU."""
    found = fits("moe-small", "a100-40", 2, seq_len=512, batch=3)
    known = {each.format: each for each in found.serving}
    for form in ("bf16", "int4"):
        each = known[form]
        *_, serving = each.commands
        words = shlex.split(serving)
        flags = dict(pairwise(words))
        assert flags["--max-model-len"] == "512" and flags["--max-num-seqs"] == "3"
        assert flags["--max-num-batched-tokens"] == str(prompt_tokens(3))
        assert flags.get("--quantization") == (None if form == "bf16" else "compressed-tensors")
        assert each.spec is not None
        sizes = {"--tensor-parallel-size": each.spec.layout.tp, "--data-parallel-size": each.spec.layout.dp}
        assert all(flags.get(flag, "1") == str(size) for flag, size in sizes.items())
        share = float(flags["--gpu-memory-utilization"]) * found.room
        filled = each.memory(each.largest_batch, 512)
        assert filled.device - filled.context - filled.communicators < share


@pytest.mark.parametrize("tp", ["1", "2"])
def test_what_vllm_computes_with_is_what_its_log_has(tp: str) -> None:
    """1.26 GiB for 256 sequences of Llama 3 8B, on one GPU and on two (vllm-project/vllm pull request 10511),
    whose tokens are more than are counted here, and take less than the draw."""
    keys = [("model.preset", "llama3-8b"), ("data.seq_len", "512"), ("train.batch_tokens", "512")]
    spec = load(None, [*keys, ("layout.tp", tp), ("precision.compute", "bf16")])
    assert working(place_of(spec, 0), 256) - GRAPHS == pytest.approx(1.26 * GIB, rel=0.05)
    assert working(place_of(spec, 0), 1) - GRAPHS < 0.3 * GIB


# Mistakes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"gpu": "rtx-409"}, "--gpu: 'rtx-409' is neither .* did you mean 'rtx-4090'"),
        (
            {"gpu": "m3-max"},
            "--gpu: 'm3-max' is .* are a100-40-sxm, .*clusters rtx-4090 --json > gpu.json",
        ),
        ({"gpu": "cpu"}, "--gpu: cpu has no GPUs, .* or ask `meshwright plan --cluster cpu`"),
        ({"gpu": "tpu-v5e"}, "--gpu: tpu-v5e has no GPUs, .*`meshwright plan --cluster tpu-v5e`"),
        ({"count": 0}, "--count: 0 is not a number of GPUs of one node of rtx-4090; give 1 to 8"),
        ({"count": 9}, "--count: 9 .*meshwright plan --cluster rtx-4090"),
        ({"batch": 0}, "--batch: must be at least 1 sequence"),
        ({"model": "llama3-9b"}, "MODEL: 'llama3-9b' .* did you mean 'llama3-8b'"),
        ({"model": "lama-8b"}, "MODEL: 'lama-8b' .* did you mean 'llama3.1-8b', 'llama3-8b' or 'llama2-7b'"),
        ({"overrides": (("layout.tp", "3"),)}, "layout.tp: 3 does not divide model.heads = 32"),
        ({"overrides": (("layout.tp", "3"),), "count": 3}, "layout.tp: 3 does not divide model.heads = 32"),
        ({"model": "gpt2", "seq_len": 4096}, "data.seq_len: 4096 is more than .*1024"),
    ],
)
def test_a_mistake_gets_a_sentence(how: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        api.fit(**{"model": "llama3-8b", "gpu": "rtx-4090", **how})


def test_a_way_that_cannot_be_had_says_why() -> None:
    unlinked = replace(GPU, device=replace(GPU.device, host_link=None))
    found = api.fit("smollm2-135m", gpu=unlinked)
    offload = way(found, "full-offload")
    assert not offload.fits and "whose bandwidth to its host is not known" in (offload.reason or "")
    assert way(found, "full").fits


def test_a_spec_in_memory_is_taken_without_a_command() -> None:
    keys = [("model.preset", "smollm2-135m"), ("data.seq_len", "1024"), ("train.batch_tokens", "16384")]
    for adapters in ([], [("lora.rank", "4")]):
        found = api.fit(load(None, [*keys, *adapters]), gpu=GPU)
        assert found.seq_len == 1024 and found.best is way(found, "full")
        lora, full = way(found, "lora").plan, way(found, "full").plan
        assert lora is not None and lora.spec.lora is not None and full is not None and full.spec.lora is None
        assert lora.spec.lora.rank == (4 if adapters else 16) and way(found, "lora").command is None


def test_memory_is_that_of_the_plan() -> None:
    each = way(fits("smollm2-135m"), "full")
    assert each.plan is not None
    spec: RunSpec = each.plan.spec
    needs = memory_model(CostModel(SMALL.resized(1))).peak(spec)
    assert each.to_json()["bytes"]["expected"] == needs.device


def test_a_run_file_that_takes_tables_back_is_asked_about_too(tmp_path: Path) -> None:
    """As those that `plan --write` writes do."""
    file = tmp_path / "run.toml"
    file.write_text(
        'lora = "none"\nmodel = { preset = "tiny" }\ndata = { corpus = "synthetic", seq_len = 64 }\n'
        "train = { batch_tokens = 512, steps = 2 }\n"
    )
    found = api.fit(file, gpu=GPU)
    assert way(found, "lora").fits and way(found, "full").fits


def test_the_name_that_was_asked_for_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The preset is of a shape, and other models of it have other weights and positions."""
    name = "Qwen/Qwen3-30B-A3B-Instruct-2507"
    assert main(["fit", name, "--gpu", "b200", "--seq-len", "41k"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert f"than the 40,960 that the preset qwen3-30b-a3b is for, which {name} is taken as; vLLM" in told
    assert f"to fine-tune, give --from {name} in its place" in told
    found = api.fit("unsloth/Meta-Llama-3.1-8B-bnb-4bit", gpu="h100", seq_len=512)
    assert found.published == "meta-llama/Llama-3.1-8B"
    file = tmp_path / "mine.toml"
    file.write_text('[model]\npreset = "llama3-8b"\n[data]\ncorpus = "synthetic"\nseq_len = 512\n')
    found = api.fit(str(file), gpu="h100")
    assert not found.is_named and found.published == "meta-llama/Meta-Llama-3-8B"


def test_a_format_of_a_folder_that_no_row_is_in_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
              "num_attention_heads": 4, "vocab_size": 512, "max_position_embeddings": 512}  # fmt: skip
    for method, said in ((None, False), ("awq", True), ("mxfp4", True)):
        given = {} if method is None else {"quantization_config": {"quant_method": method}}
        (tmp_path / "config.json").write_text(json.dumps(config | given))
        assert main(["fit", str(tmp_path), "--gpu", "rtx-4090"]) == 0
        told = capsys.readouterr().out
        assert (f"weights are in {method}, and no row is in that" in " ".join(told.split())) is said
        assert "weights in mxfp4" not in told


def test_a_batch_of_sequences_that_fit_counts_is_taken() -> None:
    """Sequences have the 4,096 tokens of `fit`, and not the 8,192 of `plan`."""
    keys = [("train.batch_tokens", "4096")]
    assert way(api.fit("llama3-8b", gpu="h100", overrides=keys), "lora").plan is not None


def test_longer_sequences_than_a_model_knows_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "llama3-8b", "--gpu", "h100", "--seq-len", "16k"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "sequences of 16,384 tokens are longer than the 8,192 that the model is for" in told
    assert way(api.fit("llama3-8b", gpu="h100", seq_len=16384), "lora").to_json()["longest_seq_len"] >= 16384
