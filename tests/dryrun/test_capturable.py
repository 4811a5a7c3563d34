"""Microbatches that a CUDA graph can hold, and others: rules on traces by hand, and steps on a faked GPU,
with mistakes planted in some."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch

from covering import some
from faked_gpu import tiny
from meshwright import api
from meshwright.cli.main import main
from meshwright.dryrun.capturable import capturable, microbatches, obstacles
from meshwright.dryrun.events import ByteRange, Event, Kind
from meshwright.dryrun.memory_tracker import FakeMemory
from meshwright.dryrun.rank_step import rehearse
from meshwright.dryrun.trace import Trace
from meshwright.fake_cuda import library
from meshwright.fake_cuda.process import FakeCudaProcess
from meshwright.fake_cuda.runtime import set_capability
from meshwright.model.decoder import Embed
from meshwright.parallel.data_parallel import DataParallel
from meshwright.parallel.gradient_reduction import GradientReduction
from meshwright.parallel.stage import DecoderStage
from meshwright.spec import RunSpec, UserError
from meshwright.train import cuda_graphs

faked = pytest.mark.skipif(
    library.torch_build().toolkit is not None, reason="a GPU is faked for torch's build for CPUs only"
)
X, Y = ByteRange(0, 0, 100), ByteRange(1, 0, 100)


def event(kind: Kind, phase: str = "forward", stream: int = 0, **facts: Any) -> Event:
    return Event(kind, facts.pop("name", kind), "operator", stream, phase, "", **facts)


def kernel(phase: str = "forward", stream: int = 0, **facts: Any) -> Event:
    return event("kernel", phase, stream, **facts)


TWO = [kernel(), kernel("backward"), kernel(), kernel("backward"), kernel("reduce")]
FORK = [event("record", number=1), event("wait", stream=1, number=1)]
JOIN = [event("record", "backward", 1, number=2), event("wait", "backward", number=2)]
MESSAGE = event("collective", "backward", 3, number=9, after=0, axis="shard", name="reduce_scatter")


def test_a_microbatch_is_a_forward_with_its_backward() -> None:
    assert [(each.start, each.end) for each in microbatches([kernel("data"), *TWO])] == [(1, 3), (3, 5)]
    assert [(each.start, each.end) for each in microbatches(TWO[:2])] == [(0, 2)]
    replays = [event("graph", graph=1), kernel(graph=1), kernel("reduce"), event("graph", graph=2)]
    assert microbatches(replays) == [(0, 2, True), (3, 4, True)]


@pytest.mark.parametrize(
    ("events", "found"),
    [
        (TWO, []),
        ([kernel("data"), event("synchronize", "data"), *TWO], []),
        ([*TWO, event("synchronize", "reduce")], []),
        (
            [kernel(), event("synchronize", name="aten::item")],
            ["aten::item (forward) makes the host wait for the device"],
        ),
        ([event("copy", direction="host to device")], ["copy (forward) copies from the host's memory"]),
        ([event("copy", direction="device to host")], ["copy (forward) copies to the host's memory"]),
        ([event("copy", direction="device to device")], []),
        ([kernel(), *FORK, kernel(stream=1), *JOIN, kernel("backward")], []),
        (
            [kernel(), kernel(stream=1), *JOIN, kernel("backward")],
            ["kernel (forward) is on a stream that does not wait for the one that computes"],
        ),
        (
            [kernel(), *FORK, kernel(stream=1), kernel("backward")],
            ["kernel (forward) is not waited for by the stream that computes"],
        ),
        (
            [kernel(), MESSAGE],
            ["shard reduce_scatter (backward) is not waited for by the stream that computes"],
        ),
        ([kernel(), MESSAGE, kernel("reduce"), event("wait", "reduce", number=9)], []),
        (
            [event("graph", graph=0), kernel(graph=0), event("wait", number=9, graph=0)],
            ["wait (forward) waits for what was begun before the microbatch"],
        ),
        (
            [event("graph", graph=0, reads=(X,))],
            ["graph (forward) reads memory that was freed after it had been captured"],
        ),
    ],
)  # fmt: skip
def test_what_a_graph_cannot_hold_is_told(events: list[Event], found: list[str]) -> None:
    assert list(map(str, obstacles(events))) == found


def step(*between: Sequence[Event], captured: bool = True) -> list[Event]:
    """Three microbatches, each with the events given for it."""
    found = []
    for number, events in enumerate(between):
        begin = [event("graph")] if captured else [kernel()]
        both = [*begin, *events, kernel("backward")]
        found += [Event(**(_fields(each) | {"graph": number if captured else -1})) for each in both]
    return found


def _fields(each: Event) -> dict[str, Any]:
    return {name: getattr(each, name) for name in Event.__slots__}


MAKE, USE = event("allocate", writes=(X,)), kernel(reads=(X,))
FREE, EMPTY = event("free", name="", writes=(X,)), event("free", name="resized", writes=(X,))
AGAIN = "uses memory that the microbatch before has allocated, at another address each time"


@pytest.mark.parametrize(
    ("events", "found"),
    [
        (step([MAKE, USE], [USE], [USE]), []),  # of gradients, which are where the first has put them
        (step([MAKE, USE, FREE], [MAKE, USE, FREE], [MAKE, USE]), []),
        (step([MAKE], [USE, FREE, MAKE], [USE, FREE]), [AGAIN]),
        (step([], [MAKE], [USE]), [AGAIN]),
        (step([], [MAKE, EMPTY, MAKE], [USE]), [AGAIN]),
        (step([], [MAKE, event("collective", writes=(X,), stream=0)], [USE], captured=False), []),
        (step([], [MAKE, event("collective", writes=(X,), stream=0)], [USE, EMPTY], captured=False), [AGAIN]),
        (
            [*step([]), MAKE, *step([], [USE])[2:]],
            ["uses memory that no microbatch has allocated, at another address each time"],
        ),
    ],
)
def test_what_a_microbatch_leaves_has_to_stay_where_it_is(events: list[Event], found: list[str]) -> None:
    assert [each.why for each in obstacles(events)] == found


def test_microbatches_of_a_pipeline_are_under_way_together() -> None:
    assert capturable(TWO, overlapping=False) == {"microbatch": True, "obstacles": []}
    assert capturable(TWO, overlapping=True)["microbatch"] is False


# Steps --------------------------------------------------------------------------------------------------

WHOLE: dict[str, object] = {
    "data__document_mask": "false", "layout__dp": 1, "layout__zero": 0, "layout__micro_batch": 1,
}  # fmt: skip
"""Samples of one document, in four microbatches or in two."""
EXPERTS: dict[str, object] = {
    "model__preset": "moe-tiny", "layout__dp": 2, "layout__ep": 2, "layout__zero": 1,
}  # fmt: skip
BOUNDED = EXPERTS | {"layout__expert_buffer_factor": 2}
CAPTURABLE: dict[str, dict[str, object]] = {
    "one device": {},
    "one microbatch": {"layout__micro_batch": 4},
    "data, replicated": {"layout__dp": 2},
    "ZeRO-1": {"layout__dp": 2, "layout__zero": 1},
    "ZeRO-2": {"layout__dp": 2, "layout__zero": 2, "train__batch_tokens": 1024},
    "hybrid": {"layout__dp": 2, "layout__zero": 2, "layout__replicate": 2, "train__batch_tokens": 2048},
    "tensor": {"layout__tp": 2},
    "tensor, ZeRO-1": {"layout__tp": 2, "layout__dp": 2, "layout__zero": 1},
    "recomputed": {"recompute__policy": "full"},
    "experts on one device": {"model__preset": "moe-tiny"},
    "bounded experts": BOUNDED,
    "adapters": {"lora__rank": 4},
    "fp8": {"precision__compute": "fp8"},
    "compiled": {"train__compile": "true"},
    "learned positions": {"model__preset": "gpt3-175b", "model__layers": 2, "model__hidden": 128,
                          "model__ffn": 256, "model__heads": 4, "model__kv_heads": 4,
                          "model__vocab_size": 512},
}  # fmt: skip
QUICK = ("ZeRO-2", "tensor, ZeRO-1", "bounded experts", "compiled")
REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "experts": (EXPERTS, r"aten::_to_copy, device to host \(forward in blocks\.\d+.*\) makes the host wait"),
    "documents": (
        {"data__document_mask": "true"}, r"aten::_to_copy \(forward\) copies from the host's memory",
    ),
    "ZeRO-3": (
        {"layout__dp": 2, "layout__zero": 3, "train__batch_tokens": 2048},
        "uses memory that the microbatch before has allocated",
    ),
    "pipeline": ({"layout__pp": 2}, "microbatches of a pipeline are under way together"),
}  # fmt: skip


def run(name_or_flags: str | dict[str, object], **flags: object) -> RunSpec:
    given = CAPTURABLE[name_or_flags] if isinstance(name_or_flags, str) else name_or_flags
    return tiny(**(WHOLE | given | flags))


def row_of(process: FakeCudaProcess, spec: RunSpec, **options: object) -> dict[str, Any]:
    row: dict[str, Any] = process.call(api.dryrun, spec, device="cuda", **options)["ranks"][0]
    return row


@faked
@pytest.mark.parametrize("name", some(CAPTURABLE, QUICK))
def test_a_microbatch_can_be_captured_and_is_launched_once(process: FakeCudaProcess, name: str) -> None:
    spec = run(name)
    plain, graphs = (row_of(process, run(name, train__cuda_graphs=on)) for on in ("false", "true"))
    assert plain["capturable"] == graphs["capturable"] == {"microbatch": True, "obstacles": []}
    work, held = graphs["device_work"], graphs["device_work"]["graphs"]
    assert plain["device_work"]["graphs"]["launches"] == 0
    assert held["launches"] == spec.microbatches
    assert plain["wire"] == graphs["wire"]
    # Per microbatch the host copies the inputs to their place and the loss out of it, and launches one graph.
    around = work["launches"] - held["kernels"] - 2 * spec.microbatches
    assert 0 < around < 0.2 * work["launches"] and held["kernels"] > 50 * spec.microbatches
    assert abs(work["launches"] - 2 * spec.microbatches - plain["device_work"]["launches"]) <= 4
    assert work["races"] == [] and sum(each["count"] for each in work["host_waits"]) == 1


@faked
@pytest.mark.parametrize("name", REFUSED)
def test_a_microbatch_that_cannot_be_captured_is_told_with_its_operator(
    process: FakeCudaProcess, name: str
) -> None:
    flags, told = REFUSED[name]
    found = row_of(process, run(flags))["capturable"]
    assert found["microbatch"] is False
    assert any(re.search(told, each) for each in found["obstacles"]), found["obstacles"]
    with pytest.raises(UserError, match=r"train\.cuda_graphs: true does not go with") as raised:
        run(flags, train__cuda_graphs="true")
    assert "train.cuda_graphs = false" in str(raised.value) and "\n" not in str(raised.value)


# Planted mistakes ---------------------------------------------------------------------------------------


def _read_on_the_host(self: Embed, tokens: Any, *args: Any, _forward: Any = Embed.forward) -> Any:
    assert tokens.max().item() >= 0
    return _forward(self, tokens, *args)


def _upload(self: DecoderStage, micro: Any, x: Any, _call: Any = DecoderStage.__call__) -> Any:
    shift = torch.zeros(micro.tokens.shape, dtype=torch.int64).to(micro.tokens.device, non_blocking=True)
    micro.tokens.add_(shift)
    return _call(self, micro, x)


def _side_stream(self: DecoderStage, micro: Any, x: Any, _call: Any = DecoderStage.__call__) -> Any:
    with torch.cuda.stream(torch.cuda.Stream()):
        micro.tokens.clone()
    return _call(self, micro, x)


def _leave_under_way(self: GradientReduction) -> None:
    pass


def _keep_the_last(self: DataParallel, last: bool, _begin: Any = DataParallel.begin_microbatch) -> None:
    """Let the next microbatch read what this one has made."""
    kept = getattr(self, "kept", None)
    self.kept = torch.zeros(4, device=self.mesh.device)
    if kept is not None:
        self.kept.add_(kept)
    _begin(self, last)


ZERO_2 = CAPTURABLE["ZeRO-2"]
PLANTED: dict[str, tuple[dict[str, object], Any, str, Callable[..., Any], str]] = {
    "a number is read on the host": (
        {}, Embed, "forward", _read_on_the_host,
        r"aten::_local_scalar_dense.* \(forward in embed\) makes the host wait for the device",
    ),
    "the host's memory is read": (
        {}, DecoderStage, "__call__", _upload, r"aten::_to_copy \(forward\) copies from the host's memory",
    ),
    "a stream of its own": (
        {}, DecoderStage, "__call__", _side_stream,
        r"aten::clone \(forward\) is on a stream that does not wait for the one that computes",
    ),
    "a reduction outlives its microbatch": (
        ZERO_2 | {"train__cuda_graphs": "true"}, GradientReduction, "settle", _leave_under_way,
        r"shard reduce_scatter \(backward .* is not waited for by the stream that computes",
    ),
    "memory of the microbatch before": (
        {}, DataParallel, "begin_microbatch", _keep_the_last,
        r"aten::add_.* \(.*\) uses memory that the microbatch before has allocated",
    ),
}  # fmt: skip


def obstacles_of(name: str, planted: bool) -> list[str]:
    """The obstacles of a step, without or with a mistake, in a process that has the faked GPU."""
    flags, place, attribute, mistake, _ = PLANTED[name]
    set_capability((9, 0))
    trace = Trace(torch.device("cuda", 0))
    there: AbstractContextManager[Any] = patch.object(place, attribute, mistake) if planted else nullcontext()
    with there:
        rehearse(run(flags), 0, trace.device, trace)
    return [*map(str, obstacles(trace.events))]


@faked
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_is_named(process: FakeCudaProcess, name: str) -> None:
    assert process.call(obstacles_of, name, planted=False) == []
    found = process.call(obstacles_of, name, planted=True)
    assert any(re.search(PLANTED[name][4], each) for each in found), found


def lost(planted: bool) -> list[str]:
    """The obstacles of a step whose graphs read inputs that are freed once they are captured."""
    set_capability((9, 0))
    trace = Trace(torch.device("cuda", 0))
    record = cuda_graphs.GraphsOfMicrobatches._record

    def forget(self: Any, micro: Any, last: bool) -> Any:
        found = record(self, micro, last)
        return cuda_graphs.replace(found, inputs=micro)

    there = patch.object(cuda_graphs.GraphsOfMicrobatches, "_record", forget) if planted else nullcontext()
    with there:
        rehearse(run({"train__cuda_graphs": "true"}), 0, trace.device, trace)
    return [*map(str, obstacles(trace.events))]


@faked
def test_a_graph_that_reads_freed_memory_is_named(process: FakeCudaProcess) -> None:
    assert process.call(lost, planted=False) == []
    assert "reads memory that was freed" in process.call(lost, planted=True)[0]


# What it gains ------------------------------------------------------------------------------------------


@faked
@pytest.mark.parametrize("flags", [{}, {"layout__tp": 2}, {"layout__dp": 2, "layout__zero": 1}])
def test_the_device_waits_less_for_the_host(process: FakeCudaProcess, flags: dict[str, object]) -> None:
    plain, graphs = (
        row_of(process, run(flags, train__cuda_graphs=on), cluster="h100")["timeline"]
        for on in ("false", "true")
    )
    assert graphs["host_bound_seconds"] < plain["host_bound_seconds"] / 5
    assert graphs["step_seconds"] < plain["step_seconds"] / 2
    assert graphs["host"]["issuing"] < plain["host"]["issuing"] / 5


def held_by_captures(*captures: Sequence[int]) -> list[int]:
    """Bytes of the device that are taken after each capture, in which tensors of so many bytes are made and
    freed, but for the first."""
    memory, kept, found = FakeMemory(torch.device("cuda", 0)), [], []
    with memory:
        for sizes in captures:
            memory.begin_capture()
            made = [torch.empty(size, dtype=torch.uint8, device=memory.device) for size in sizes]
            kept.append(made[0])
            del made
            memory.end_capture("activations")
            found.append(memory.total)
    return found


@faked
def test_graphs_share_a_pool_that_nothing_else_uses(process: FakeCudaProcess) -> None:
    """The second capture takes its 300 bytes from the 500 that the first has left; the third needs more."""
    assert process.call(held_by_captures, (100, 500), (1, 299), (1, 600)) == [600, 600, 702]


@faked
def test_gradients_of_graphs_outlive_the_step(process: FakeCudaProcess) -> None:
    flags: dict[str, object] = {
        "layout__micro_batch": 2, "model__hidden": 256, "data__seq_len": 512, "train__batch_tokens": 2048,
    }  # fmt: skip
    plain, graphs = (row_of(process, run(flags, train__cuda_graphs=on)) for on in ("false", "true"))
    assert graphs["states"] == plain["states"]
    assert plain["peak"] <= graphs["peak"] <= 1.1 * plain["peak"]
    assert sum(graphs["components"].values()) == graphs["peak"]  # the pool of graphs, too


@pytest.mark.full  # its parts are above, and `test_dryrun_cuda.py` has a dry run by the command line
@faked
def test_the_command_line_tells_it(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model.preset", "tiny", "--model.layers", "2", "--data.corpus", "synthetic", "--data.seq_len",
             "128", "--train.batch_tokens", "512", "--precision.compute", "bf16", "--train.compile", "false",
             "--device", "cuda"]  # fmt: skip
    assert main(["dryrun", *flags]) == 0
    assert "cannot be captured in a CUDA graph: aten::_to_copy (forward)" in " ".join(
        capsys.readouterr().out.split()
    )
    assert main(["dryrun", *flags, "--data.document_mask", "false", "--train.cuda_graphs", "true"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "a microbatch can be captured in a CUDA graph" in shown and "of them by" in shown
