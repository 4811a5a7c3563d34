"""Dry runs on a faked GPU: every layout runs, kernels are a GPU's, and what a step launches may only fall."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from dataclasses import astuple
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from faked_gpu import TINY, tiny
from layout_cases import BASE, CASES
from layouts import draw
from meshwright import api
from meshwright.cli.main import main
from meshwright.dryrun.rank_step import STATES, rehearse
from meshwright.dryrun.trace import Trace
from meshwright.dryrun.trace_counts import LAUNCHED
from meshwright.fake_cuda import library
from meshwright.fake_cuda.library import TorchBuild
from meshwright.fake_cuda.process import FakeCudaProcess
from meshwright.planner.memory.states import states
from meshwright.planner.traffic.messages import traffic
from meshwright.spec import RunSpec, UserError, load
from small import spec_of

pytestmark = pytest.mark.skipif(
    library.torch_build().toolkit is not None, reason="a GPU is faked for torch's build for CPUs only"
)
RECORDED = tomllib.loads((Path(__file__).parent / "cuda_counts.toml").read_text())


def dryrun_on(process: FakeCudaProcess, spec: RunSpec, **options: Any) -> dict[str, Any]:
    return process.call(api.dryrun, spec, device="cuda", **options)


def work_of(process: FakeCudaProcess, spec: RunSpec, **options: object) -> dict[str, Any]:
    """The work of the device of rank 0 in a step."""
    (row,) = dryrun_on(process, spec, **options)["ranks"]
    work: dict[str, Any] = row["device_work"]
    return work


def kernels(work: dict[str, Any]) -> dict[str, int]:
    """The numbers of kernels by their names without namespace."""
    return {row["name"].partition("::")[2]: row["count"] for row in work["kernels"]}


# Every layout -------------------------------------------------------------------------------------------


def quick(name: str, number: int, some: int) -> list[Any]:
    """The numbers below `number` as parameters, `some` of which are not marked `full`."""
    chosen = sorted(range(number), key=lambda each: sha256(f"{name} {each}".encode()).digest())[:some]
    return [pytest.param(each, marks=() if each in chosen else pytest.mark.full) for each in range(number)]


def hold(process: FakeCudaProcess, spec: RunSpec, rank: int) -> None:
    """Assert that formulas hold on the faked GPU, and that its host waits where it has to."""
    place = rank * spec.layout.pp // spec.layout.world_size
    (row,) = dryrun_on(process, spec, rank=rank)["ranks"]
    planned = dict(zip(STATES, astuple(states(spec, place)), strict=True))
    assert {kind: row["most"][kind] for kind in STATES} == planned
    sent = {(each["axis"], each["operation"]): each["bytes"] for each in row["wire"]}
    assert sent == pytest.approx(traffic(spec, place), rel=1e-12)
    assert sum(each["count"] for each in row["device_work"]["messages"]) >= sum(
        each["calls"] for each in row["wire"]
    )
    assert row["device_work"]["races"] == []
    waits = {each["name"]: each["count"] for each in row["device_work"]["host_waits"]}
    assert waits.pop("event") == 1  # for the numbers of the step
    dispatches = waits.pop("aten::_to_copy, device to host", 0)
    assert not waits and (dispatches == 0 or spec.model.moe is not None)


@pytest.mark.parametrize("seed", quick("drawn", 64, 6))
def test_every_drawn_layout_runs(process: FakeCudaProcess, seed: int) -> None:
    hold(process, *draw(seed))


@pytest.mark.parametrize("number", quick("case", len(CASES), 2))
def test_every_layout_of_a_dense_model_runs(process: FakeCudaProcess, number: int) -> None:
    spec = spec_of(
        BASE, **CASES[number], data__corpus="synthetic", precision__compute=("bf16", "fp32")[number % 2]
    )
    hold(process, spec, spec.layout.world_size - 1)


@pytest.mark.parametrize(
    "flags",
    [
        {"train__offload": "host", "train__optimiser": "muon"},
        {"train__offload": "disk"},
        {"train__optimiser": "adamw8bit", "train__clip_parameter": 1.0},
        {"train__zclip": 2.5, "train__ema": 0.99},
        {"model__mtp_num_layers": 1, "model__attention_sinks": "true"},
        {"model__attention_softcap": 50.0, "model__logit_softcap": 30.0, "train__frozen": "embed.*"},
        {"precision__qat": "int4"},
        {"lora__rank": 4, "lora__dropout": 0.1},
        {"lora__rank": 4, "lora__dora": "true", "recompute__policy": "full", "lora__dropout": 0.1},
        {"lora__rank": 4, "preference__loss": "dpo"},
        {"lora__rank": 4, "preference__loss": "kto"},
        {"precision__compute": "nvfp4"},
    ],
    ids=lambda flags: ", ".join(f"{key}={value}" for key, value in flags.items()),
)
def test_every_part_of_a_step_runs(process: FakeCudaProcess, flags: dict[str, object]) -> None:
    spec = tiny(**flags)
    work = work_of(process, spec, capability="10.0")
    blocking = [row["name"] for row in work["host_waits"] if row["name"] != "event"]
    assert work["launches"] > 100 and not blocking and not work["races"]


def test_a_step_that_begins_an_exchange_of_islands_runs(process: FakeCudaProcess) -> None:
    islands = {"layout__replicate": 2, "train__batch_tokens": 1024, "outer__every": 4, "outer__fragments": 2}
    messages = work_of(process, tiny(**islands))["messages"]
    assert "replicate" in {row["axis"] for row in messages}


# Kernels of a GPU ---------------------------------------------------------------------------------------


SDPA = "_scaled_dot_product_{}_attention"
CUDNN, FLASH, EFFICIENT = map(SDPA.format, ("cudnn", "flash", "efficient"))


def attention_of(
    process: FakeCudaProcess, spec: RunSpec, **options: object
) -> tuple[dict[str, int], dict[str, Any]]:
    """The numbers of kernels of attention of rank 0, and what the dry run says of them."""
    result = dryrun_on(process, spec, **options)
    found = kernels(result["ranks"][0]["device_work"])
    named = {name: count for name, count in found.items() if "attention" in name or name == "_safe_softmax"}
    return named, result["attention"]


@pytest.mark.parametrize(
    ("capability", "flags", "expected"),
    [
        ("8.0", {}, FLASH),
        ("9.0", {}, CUDNN),
        ("10.0", {}, CUDNN),
        ("9.0", {"model__head_dim": 192}, CUDNN),
        ("10.0", {"model__head_dim": 192}, FLASH),
        ("9.0", {"train__attention_backend": "FA2"}, FLASH),
        ("9.0", {"train__attention_backend": "FA3"}, FLASH),
        ("10.0", {"train__attention_backend": "FA4"}, FLASH),
        ("8.0", {"train__attention_backend": "cudnn"}, CUDNN),
        ("10.0", {"train__attention_backend": "cudnn", "model__head_dim": 192}, FLASH),
        ("9.0", {"model__kv_heads": 4, "precision__compute": "fp32"}, EFFICIENT),
        ("9.0", {"precision__compute": "fp64"}, "_safe_softmax"),
        ("9.0", {"model__attention_sinks": "true"}, "varlen_attention"),
        ("9.0", {"model__sliding_window": 32}, "varlen_attention"),
    ],
)
def test_attention_of_whole_sequences_is_that_of_device_and_key(
    process: FakeCudaProcess, capability: str, flags: dict[str, object], expected: str
) -> None:
    """Torch's dispatcher takes what was chosen, and the dry run says it."""
    spec = tiny(data__document_mask="false", model__heads=4, **flags)
    attention, told = attention_of(process, spec, capability=capability)
    layers = spec.model.layers * spec.microbatches
    assert attention[expected] == layers, attention
    if expected != "_safe_softmax":
        assert attention[f"{expected}_backward"] == layers
    assert {name for name in attention if "dot_product" in name} <= {expected, f"{expected}_backward"}
    operators = {"cudnn": CUDNN, "efficient": EFFICIENT, "math": "_safe_softmax"}
    taken = told[told["path"]]
    assert operators.get(taken, FLASH if told["path"] == "plain" else "varlen_attention") == expected
    if (chosen := spec.train.attention_backend).startswith("FA"):
        assert taken == chosen


@pytest.mark.parametrize(
    "flags", [{}, {"train__attention_backend": "cudnn"}, {"layout__cp": 2, "layout__dp": 1}]
)
@pytest.mark.parametrize("capability", ["8.0", "9.0", "10.0"])
def test_attention_of_packed_documents_is_flash(
    process: FakeCudaProcess, capability: str, flags: dict[str, object]
) -> None:
    attention, told = attention_of(process, tiny(**flags), capability=capability)
    assert set(attention) == {"varlen_attention", "varlen_attention_backward"}
    assert (told["path"], told["packed"]) == ("packed", "FA2")


@pytest.mark.parametrize(
    ("capability", "flags", "operator"),
    [
        ("8.0", {"data__document_mask": "false"}, FLASH),
        ("9.0", {"data__document_mask": "false"}, CUDNN),
        ("9.0", {"data__document_mask": "false", "model__heads": 4, "precision__compute": "fp32"}, EFFICIENT),
        ("9.0", {}, "varlen_attention"),
    ],
)
@pytest.mark.parametrize("saved", ["attention", "matmul"])
def test_selective_recomputation_saves_every_kernel_of_attention(
    process: FakeCudaProcess, capability: str, flags: dict[str, object], operator: str, saved: str
) -> None:
    spec = tiny(recompute__policy="selective", recompute__save=saved, **{"model__kv_heads": 4} | flags)
    attention, _ = attention_of(process, spec, capability=capability)
    forwards = spec.model.layers * spec.microbatches
    assert attention[operator] == (forwards if saved == "attention" else 2 * forwards)
    assert attention[f"{operator}_backward"] == forwards


def test_operators_are_whole_as_a_gpu_has_kernels_for_them(process: FakeCudaProcess) -> None:
    spec = tiny()
    layers, norms = spec.model.layers * spec.microbatches, (2 * spec.model.layers + 1) * spec.microbatches
    found = kernels(work_of(process, spec))
    assert found["_fused_rms_norm"] == found["_fused_rms_norm_backward"] == norms
    assert found["silu_backward"] == found["varlen_attention"] == layers
    assert "sigmoid" not in found and "rsqrt" not in found
    fp8 = kernels(work_of(process, tiny(precision__compute="fp8", model__ffn=512)))
    assert fp8["_scaled_mm"] == 3 * 7 * layers
    experts = tiny(model__preset="moe-tiny", layout__ep=2)
    assert kernels(work_of(process, experts))["_grouped_mm"] > 0


@pytest.mark.parametrize("compiled", ["false", "true"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_blocks_copy_no_parameters_and_no_gradients(
    process: FakeCudaProcess, zero: int, compiled: str
) -> None:
    """Parameters are gathered where they are read; products write gradients where they are sent, in fp32."""
    flags: dict[str, object] = {
        "layout__zero": zero, "layout__micro_batch": 1, "model__tied": "false", "train__compile": compiled,
    }  # fmt: skip
    less, more = (work_of(process, tiny(**flags, model__layers=layers)) for layers in (2, 4))
    microbatches, found, before = tiny(**flags).microbatches, kernels(more), kernels(less)
    assert microbatches == 2
    casts = 0 if zero else 1  # of a unit that is not gathered
    norms = 2 if zero < 2 else 0  # of the second microbatch
    sums = 1 if zero >= 2 else 0  # of what the reduce-scatters of both microbatches found
    for name, each in (("copy_", casts), ("zero_", 0), ("add_.Tensor", norms + sums)):
        assert found.get(name, 0) - before.get(name, 0) == 2 * each, name
    alone = 1 if zero < 2 else microbatches  # others add to the first
    assert found["mm.dtype_out"] - before["mm.dtype_out"] == 7 * 2 * alone
    added = found.get("addmm.dtype_out", 0) - before.get("addmm.dtype_out", 0)
    assert added == 7 * 2 * (microbatches - alone)
    assert not [row for row in more["empty"] if row["name"] == "aten::zero_"]


def test_the_operators_that_stand_in_are_all_that_torch_lacks() -> None:
    """By torch's own list: those with a kernel for CUDA that decompose in a build without it."""
    import torchgen

    file = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    lacking = set()
    for function in yaml.load(file.read_text(), Loader=yaml.CSafeLoader):
        name = function["func"].partition("(")[0]
        keys = {key.strip() for keys in function.get("dispatch", {}) for key in keys.split(",")}
        structured = "structured_delegate" in function  # its kernels are those of the variant with `out`
        if "CompositeImplicitAutograd" in keys and ("CUDA" in keys or structured):
            lacking.add(name)
    source = Path(library.__file__).with_name("device.cpp").read_text()
    named = source.partition("for (const char* name : {")[2].partition("}")[0]
    assert lacking == {each.strip(' "') for each in named.split(",")}


def test_flops_are_those_of_the_operators_on_a_cpu(process: FakeCudaProcess) -> None:
    """Products of a dense model and of experts in one kernel: two for each weight and token, three times."""
    spec = tiny(
        model__preset="moe-tiny", model__layers=2, layout__dp=1, layout__zero=0, recompute__policy="none"
    )
    moe = spec.model.moe
    assert moe is not None
    work = work_of(process, spec)
    found = {row["name"].partition("::")[2]: row["flops"] for row in work["kernels"]}
    tokens = spec.data.seq_len * spec.micro_batch * spec.microbatches
    layers = spec.model.layers - moe.dense_first
    weights = 3 * spec.model.hidden * moe.ffn * moe.top_k
    assert found["_grouped_mm"] >= 6 * tokens * weights * layers  # padding rows come on top
    assert found["_grouped_mm"] < 1.5 * 6 * tokens * weights * layers


# What is recorded ---------------------------------------------------------------------------------------

_PROGRAM = """
from meshwright.fake_cuda import library
library.load()
import torch
from meshwright.fake_cuda.runtime import RUNTIME, install
install()
from meshwright.dryrun.memory_tracker import FakeMemory
from meshwright.dryrun.trace import Trace
from meshwright.dryrun.trace_counts import device_work
cuda = torch.device("cuda", 0)
trace = Trace(cuda)
with RUNTIME.observed(trace), FakeMemory(cuda, observer=trace):
    x = torch.zeros(4, 6, device=cuda)
    side, done = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(side):
        x[1:3].add_(1)
        done.record()
    done.wait()
    y = x[:2].clone()
    host = y.to("cpu", non_blocking=True)
    done.synchronize(), done.synchronize()
    x.copy_(torch.ones(4, 6))
    y.cpu()
    x[:0].zero_()
    del x
"""


def test_events_say_stream_bytes_order_and_waits() -> None:
    told = """
for e in trace.events:
    reads, writes = ([tuple(span) for span in spans] for spans in (e.reads, e.writes))
    print(e.kind, e.name, e.stream, reads, writes, e.bytes, e.number)
print(device_work(trace.events)["host_waits"])
"""
    ran = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{_PROGRAM}{told}"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    *lines, waits = ran.stdout.splitlines()
    assert [line for line in lines if not line.startswith("view")] == [
        "allocate  0 [] [(0, 0, 96)] 96 -1",
        "kernel aten::zeros 0 [] [(0, 0, 96)] 96 -1",
        "kernel aten::add_.Tensor 1 [(0, 24, 72)] [(0, 24, 72)] 96 -1",
        "record  1 [] [] 0 1",
        "wait  0 [] [] 0 1",
        "allocate  0 [] [(1, 0, 48)] 48 -1",
        "copy aten::clone 0 [(0, 0, 48)] [(1, 0, 48)] 96 -1",
        "copy aten::_to_copy 0 [(1, 0, 48)] [] 48 -1",
        "synchronize event -1 [] [] 0 1",
        "synchronize event -1 [] [] 0 1",
        "copy aten::copy_ 0 [] [(0, 0, 96)] 96 -1",
        "synchronize aten::copy_, host to device 0 [] [] 0 -1",
        "copy aten::_to_copy 0 [(1, 0, 48)] [] 48 -1",
        "synchronize aten::_to_copy, device to host 0 [] [] 0 -1",
        "empty aten::zero_ 0 [] [] 0 -1",
        "free  0 [] [(0, 0, 96)] 96 -1",
    ]
    assert waits.count("'count': 1") == 3  # nothing was launched between the first two


def test_messages_go_over_a_stream_of_their_group(process: FakeCudaProcess) -> None:
    spec = tiny(layout__tp=2, layout__pp=2, model__layers=2)
    messages = work_of(process, spec)["messages"]
    by_axis = {row["axis"]: (row["group"], row["stream"]) for row in messages}
    assert set(by_axis) == {"shard", "tensor", "pipeline", "world"}
    assert len(set(by_axis.values())) == 4 and all(stream > 0 for _, stream in by_axis.values())
    assert {row["axis"]: row["ranks"] for row in messages} == {
        "shard": 2, "tensor": 2, "pipeline": 2, "world": 8,
    }  # fmt: skip


# Budgets ------------------------------------------------------------------------------------------------

LARGE: dict[str, object] = {
    "model.layers": 4, "data.corpus": "synthetic", "data.seq_len": 4096, "train.batch_tokens": 65536,
    "layout.micro_batch": 1, "precision.compute": "bf16",
}  # fmt: skip
BUDGETS: dict[str, dict[str, object]] = {
    "llama3-8b, dp 8, ZeRO-3": {"model.preset": "llama3-8b", "layout.dp": 8, "layout.zero": 3},
    "llama3-8b in fp8-blockwise, dp 8, ZeRO-3": {
        "model.preset": "llama3-8b", "layout.dp": 8, "layout.zero": 3, "precision.compute": "fp8-blockwise",
    },
    "mixtral-8x7b in fp8-rowwise, ep 8": {
        "model.preset": "mixtral-8x7b", "layout.dp": 8, "layout.ep": 8, "layout.zero": 3,
        "recompute.policy": "full", "precision.compute": "fp8-rowwise",
    },
    "llama3-8b, dp 8, ZeRO-3, compiled": {
        "model.preset": "llama3-8b", "layout.dp": 8, "layout.zero": 3, "train.compile": "true",
    },
    "llama3-8b, tp 8": {"model.preset": "llama3-8b", "layout.tp": 8, "train.batch_tokens": 8192},
    "llama3-70b, tp 8, pp 4": {
        "model.preset": "llama3-70b", "layout.tp": 8, "layout.pp": 4, "train.batch_tokens": 16384,
    },
    "mixtral-8x7b, ep 8": {
        "model.preset": "mixtral-8x7b", "layout.dp": 8, "layout.ep": 8, "layout.zero": 3,
        "recompute.policy": "full",
    },
    "mixtral-8x7b, ep 8, bounded messages": {
        "model.preset": "mixtral-8x7b", "layout.dp": 8, "layout.ep": 8, "layout.zero": 3,
        "layout.expert_buffer_factor": 1.25, "recompute.policy": "full",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", BUDGETS)
def test_what_a_step_launches_only_falls(process: FakeCudaProcess, name: str) -> None:
    spec = load(None, [(key, str(value)) for key, value in (LARGE | BUDGETS[name]).items()])
    (row,) = dryrun_on(process, spec)["ranks"]
    work, step = row["device_work"], row["counts"]["step"]
    copied = {each["direction"]: each for each in work["copies"]}
    found = {
        "operators_a_block": step["kernels_a_block"],
        "launches": work["launches"],
        "host_waits": sum(each["count"] for each in work["host_waits"]),
        "collectives": step["collectives"],
        "copied_bytes": copied["device to device"]["bytes"],
        "copies": copied["device to device"]["count"],
        "host_copies": sum(copied[each]["count"] for each in ("host to device", "device to host")),
        "empty_zero": sum(each["count"] for each in work["empty"] if each["name"] == "aten::zero_"),
    }
    if spec.train.compile:
        found |= {"graphs": step["graphs"], "elementwise_a_block": work["elementwise_a_block"]}
    recorded = RECORDED.get(name, {})
    grown = {key: value for key, value in found.items() if value > recorded.get(key, -1)}
    assert not grown, f"more than cuda_counts.toml has for '{name}': {grown}"
    assert found == recorded, f"less than cuda_counts.toml has for '{name}': write the new numbers there"


HEAD: dict[str, object] = LARGE | {
    "model.preset": "llama3-8b", "model.layers": 1, "data.seq_len": 8192, "train.batch_tokens": 131072,
    "layout.dp": 8, "layout.zero": 3,
}  # fmt: skip
"""The head of llama3-8b, with two microbatches of 8,192 tokens."""


def work_of_head(spec: RunSpec) -> tuple[int, float, set[str]]:
    """Launches of a step in its head, but for products; bytes of those that compute; and their names."""
    trace = Trace(torch.device("cuda", 0))
    rehearse(spec, 0, torch.device("cuda"), trace)
    found = [e for e in trace.events if e.module == "head" and e.kind in LAUNCHED and e.work is None]
    computing = [e for e in found if not e.direction]  # others copy parameters and gradients of ZeRO
    return len(found), sum(e.bytes for e in computing), {e.name.partition("::")[2] for e in computing}


def test_a_head_reads_and_writes_its_logits_once(process: FakeCudaProcess) -> None:
    """With torch's operators, piece by piece: 1,294 launches, 91 GB."""
    spec = load(None, [(key, str(value)) for key, value in HEAD.items()])
    launches, moved, names = process.call(work_of_head, spec)
    logits = 2 * 2 * 8192 * spec.model.vocab_size
    assert launches < 60 and 2 * logits <= moved < 12e9 and "cross_entropy_" in names


PARTS = {"softmax_statistics", "softmax_gradient_"}


@pytest.mark.parametrize(
    ("flags", "launched", "times", "kernels"),
    [
        ({"layout.dp": 1, "layout.tp": 8, "train.batch_tokens": 16384}, 60, 3, PARTS),
        ({"model.logit_softcap": 30.0}, 60, 2, {"cross_entropy_"}),
        ({"precision.compute": "fp32"}, 60, 2, {"cross_entropy_"}),
        ({"preference.loss": "dpo", "lora.rank": 4}, 300, 4, PARTS),
    ],
    ids=("tensor ranks", "soft cap", "fp32", "answers"),
)
def test_other_heads_take_the_kernels(
    process: FakeCudaProcess, flags: dict[str, object], launched: int, times: int, kernels: set[str]
) -> None:
    """Parts of a vocabulary read their logits twice; so do answers, whose reference's are read once more."""
    spec = load(None, [(key, str(value)) for key, value in (HEAD | flags).items()])
    launches, moved, names = process.call(work_of_head, spec)
    width = 4 if spec.precision.compute == "fp32" else 2
    logits = width * 2 * 8192 * spec.model.vocab_size / spec.layout.tp
    norms = 24 * width * 2 * 8192 * spec.model.hidden
    assert launches < launched and kernels <= names
    assert times * logits <= moved <= times * logits + norms


# As a user asks -----------------------------------------------------------------------------------------


def test_the_command_shows_kernels_copies_and_waits(capsys: pytest.CaptureFixture[str]) -> None:
    keys = [word for key, value in TINY.items() for word in (f"--{key}", str(value))]
    main(["dryrun", *keys, "--device", "cuda", "--capability", "8.0"])
    shown = capsys.readouterr().out
    for part in ("A100-SXM4-80GB, faked", "aten::mm", "launched: ", "host to device", "waits of the host"):
        assert part in shown


def test_errors_come_back_from_the_process(process: FakeCudaProcess) -> None:
    with pytest.raises(UserError, match=r"--rank: is 7, but the world has 2 ranks"):
        dryrun_on(process, tiny(), rank=7)
    assert dryrun_on(process, tiny(model__layers=1))["gpu"] == "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        ("2.12.1+cpu None", r"one is faked for torch 2\.13 only, while 2\.12\.1\+cpu is installed"),
        ("2.13.0+cu130 13.0", r"torch 2\.13\.0\+cu130 is built for GPUs and finds none here"),
    ],
)
def test_another_torch_is_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, build: str, message: str
) -> None:
    version, toolkit = build.split()
    other = TorchBuild(Path(), version, None if toolkit == "None" else toolkit)
    monkeypatch.setattr(library, "torch_build", lambda: other)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=message):
        api.dryrun(tiny(), device="cuda")


def test_what_cannot_be_compiled_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match=r"cannot be compiled: .*no-such-compiler.*; install g\+\+"):
        api.dryrun(tiny(), device="cuda")
    monkeypatch.setenv("MESHWRIGHT_CPP_DISABLE", "1")
    with pytest.raises(UserError, match=r"MESHWRIGHT_CPP_DISABLE switches off; unset it"):
        api.dryrun(tiny(), device="cuda")
    with pytest.raises(UserError, match=r"--capability: is 9\.0, but the step runs on a CPU"):
        api.dryrun(tiny(), capability="9.0")
