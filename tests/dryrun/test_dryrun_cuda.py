"""Dry runs on a faked GPU: every layout and every part of a step runs, and what it does is recorded."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import astuple
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from covering import some
from faked_gpu import TINY, dryrun_on, kernels, tiny, work_of
from layout_cases import BASE, CASES
from layouts import draw
from meshwright import api
from meshwright.cli.main import main
from meshwright.dryrun.rank_step import STATES
from meshwright.fake_cuda import library
from meshwright.fake_cuda.library import TorchBuild
from meshwright.fake_cuda.process import FakeCudaProcess
from meshwright.planner.memory.states import states
from meshwright.planner.traffic.messages import traffic
from meshwright.spec import RunSpec, UserError
from small import spec_of

pytestmark = pytest.mark.skipif(
    library.torch_build().toolkit is not None, reason="a GPU is faked for torch's build for CPUs only"
)


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


@pytest.mark.parametrize("seed", quick("drawn", 64, 2))
def test_every_drawn_layout_runs(process: FakeCudaProcess, seed: int) -> None:
    hold(process, *draw(seed))


@pytest.mark.parametrize("number", quick("case", len(CASES), 2))
def test_every_layout_of_a_dense_model_runs(process: FakeCudaProcess, number: int) -> None:
    spec = spec_of(
        BASE, **CASES[number], data__corpus="synthetic", precision__compute=("bf16", "fp32")[number % 2]
    )
    hold(process, spec, spec.layout.world_size - 1)


BLOCKS, MATRICES, PARAMETERS, UNITS = 2, 2 * 7, 2 * 9 + 3, 4
"""Numbers of `tiny`, of one microbatch; beside blocks there are the embedding, a norm and the head."""
STEP_PARTS: list[tuple[dict[str, object], dict[str, int]]] = [
    # Five times three products for each matrix that Muon has dealt to this rank.
    ({"train__offload": "host", "train__optimiser": "muon"}, {"linalg_vector_norm": 8, "mm": 23 + 8 * 15}),
    # An update of matrices and one of vectors for each unit, but for the embedding's, which has no vectors.
    ({"train__offload": "disk"}, {"_fused_adamw_": 2 * UNITS - 1}),
    # Two moments in 8 bits for each update of some, and a norm for each parameter.
    (
        {"train__optimiser": "adamw8bit", "train__clip_parameter": 1.0},
        {"addcdiv_": 10, "lerp_.Scalar": 20, "__rshift__.Scalar": 20, "linalg_vector_norm": PARAMETERS},
    ),
    ({"train__zclip": 2.5, "train__ema": 0.99}, {"lerp_.Scalar": UNITS}),
    (
        {"model__mtp_num_layers": 1, "model__attention_sinks": "true"},
        {"cross_entropy_": 2, "varlen_attention": BLOCKS + 1, "exp_": BLOCKS + 1},
    ),
    (
        {"model__attention_softcap": 50.0, "model__logit_softcap": 30.0, "train__frozen": "embed.*"},
        {"blocked_attention": BLOCKS, "blocked_attention_backward": BLOCKS, "embedding_dense_backward": 0},
    ),
    ({"precision__qat": "int4"}, {"round": 2 * MATRICES, "amax": 2 * MATRICES}),  # weights and inputs
    ({"lora__rank": 4, "lora__dropout": 0.1}, {"bitwise_xor.Scalar": MATRICES, "mm.dtype_out": 2 * MATRICES}),
    (
        {"lora__rank": 4, "lora__dora": "true", "recompute__policy": "full", "lora__dropout": 0.1},
        {"linalg_vector_norm": 2 * MATRICES, "varlen_attention": 2 * BLOCKS},  # forward, and once more
    ),
    # The reference's forward and the model's; of KTO one more of each answer with another prompt.
    (
        {"lora__rank": 4, "preference__loss": "dpo"},
        {"softmax_statistics": 2, "varlen_attention": 2 * BLOCKS, "log_sigmoid_backward": 1},
    ),
    (
        {"lora__rank": 4, "preference__loss": "kto"},
        {"softmax_statistics": 3, "varlen_attention": 3 * BLOCKS, "sigmoid_backward": 1},
    ),
    (
        {"precision__compute": "nvfp4"},
        {
            "_scaled_mm_v2": 2 * MATRICES,
            "_scaled_mm_v2.out": MATRICES,
            "cast_nvfp4": BLOCKS * (4 + 3 * 7),
            "mm.dtype_out": 0,
        },
    ),
]


@pytest.mark.parametrize(
    ("flags", "expected"),
    some(STEP_PARTS, STEP_PARTS[1::3]),
    ids=[", ".join(f"{key}={value}" for key, value in flags.items()) for flags, _ in STEP_PARTS],
)
def test_every_part_of_a_step_runs(
    process: FakeCudaProcess, flags: dict[str, object], expected: dict[str, int]
) -> None:
    """Each launches its own kernels, as often as it has something to compute."""
    work = work_of(process, tiny(**flags), capability="10.0")
    blocking = [row["name"] for row in work["host_waits"] if row["name"] != "event"]
    assert not blocking and not work["races"]
    found = kernels(work)
    assert {name: found.get(name, 0) for name in expected} == expected


def test_a_step_without_these_parts_launches_none_of_their_kernels(process: FakeCudaProcess) -> None:
    found = kernels(work_of(process, tiny(), capability="10.0"))
    for flags, expected in STEP_PARTS:
        assert {name: found.get(name, 0) for name in expected} != expected, flags


@pytest.mark.parametrize(
    ("flags", "moments"),
    [({"train__offload": "disk"}, 8), ({"train__offload": "host", "train__optimiser": "muon"}, 4)],
    ids=["disk", "host"],
)
def test_moments_that_are_elsewhere_come_and_go_once(
    process: FakeCudaProcess, flags: dict[str, object], moments: int
) -> None:
    """At least so many bytes of each parameter of the rank's half, over the bus in each direction."""
    plain, found = (
        {row["direction"]: row["bytes"] for row in work_of(process, spec)["copies"]}
        for spec in (tiny(), tiny(**flags))
    )
    held = tiny().model.parameters / 2
    for way in ("host to device", "device to host"):
        assert moments * held <= found[way] - plain[way] <= 8.01 * held, way


def test_a_step_that_begins_an_exchange_of_islands_runs(process: FakeCudaProcess) -> None:
    islands = {"layout__replicate": 2, "train__batch_tokens": 1024, "outer__every": 4, "outer__fragments": 2}
    messages = work_of(process, tiny(**islands))["messages"]
    assert "replicate" in {row["axis"] for row in messages}


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


# As a user asks -----------------------------------------------------------------------------------------


def test_the_command_shows_kernels_copies_and_waits(capsys: pytest.CaptureFixture[str]) -> None:
    keys = [word for key, value in TINY.items() for word in (f"--{key}", str(value))]
    main(["dryrun", *keys, "--device", "cuda", "--capability", "8.0"])
    shown = capsys.readouterr().out
    for part in ("A100-SXM4-80GB, faked", "aten::mm", "launched: ", "host to device", "waits of the host"):
        assert part in shown


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (
            {"precision.compute": "fp8", "precision.high": "fp32"},
            ["no kernel of 'fp8' for precision.high = 'fp32'"],
        ),
        pytest.param({"precision.compute": "fp32", "train.compile": "true"}, [], marks=pytest.mark.full),
    ],
    ids=("products without kernels", "compiled in fp32"),
)
def test_warnings_of_the_process_are_shown_as_the_commands_own(keys: dict[str, str], told: list[str]) -> None:
    words = [word for key, value in (TINY | keys).items() for word in (f"--{key}", str(value))]
    ran = subprocess.run(
        [sys.executable, "-m", "meshwright", "dryrun", *words, "--device", "cuda"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    lines = ran.stderr.splitlines()
    assert all(line.startswith("meshwright: warning: ") for line in lines), ran.stderr
    assert bool(lines) == bool(told) and all(any(each in line for each in told) for line in lines)


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
