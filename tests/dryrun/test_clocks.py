"""The clocks of the host and of streams: their rules on traces by hand, and steps on a faked GPU."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from covering import some
from faked_gpu import TINY, tiny
from meshwright import api
from meshwright.cli.main import main
from meshwright.dryrun.clocks import HOST, MESSAGES, OTHER_RANKS, OTHER_STREAMS, Mail, StepClocks, follow
from meshwright.dryrun.events import Event, Kind
from meshwright.dryrun.fake_world import DOCUMENTS
from meshwright.dryrun.kernel_seconds import START, EventSeconds
from meshwright.dryrun.timeline import KINDS, planned_terms
from meshwright.fake_cuda import library
from meshwright.fake_cuda.process import FakeCudaProcess
from meshwright.hardware.find import cluster
from meshwright.planner.cost.collectives import CollectiveCosts
from meshwright.planner.group_shapes import GroupShape
from meshwright.planner.plan import estimate
from meshwright.report.timeline import CLOCK_COLOURS
from meshwright.spec import RunSpec, UserError

faked = pytest.mark.skipif(
    library.torch_build().toolkit is not None, reason="a GPU is faked for torch's build for CPUs only"
)
GROUP = 7
"""The stream of a process group."""


def event(kind: Kind, seconds: float = 0.0, stream: int = 0, **facts: Any) -> Event:
    """An event whose seconds on the device are its bytes."""
    return Event(kind, facts.pop("name", kind), "operator", stream, "", "", bytes=seconds, **facts)


def kernel(seconds: float, stream: int = 0) -> Event:
    return event("kernel", seconds, stream)


def collective(seconds: float, number: int, after: int = 0, **facts: Any) -> Event:
    return event("collective", seconds, GROUP, number=number, after=after, axis="shard", **facts)


def wait(number: int, stream: int = 0) -> Event:
    return event("wait", stream=stream, number=number)


def clocks_of(events: Sequence[Event], call: float = 1.0, mail: Mail | None = None) -> StepClocks:
    """Clocks of events, each of whose calls takes the host `call` seconds."""
    return StepClocks(events, lambda each: each.bytes, lambda _: call, mail)


def followed(*events: Event, call: float = 1.0) -> StepClocks:
    clocks = clocks_of(events, call)
    follow([clocks])
    return clocks


def spans(clocks: StepClocks, stream: int = 0) -> list[tuple[float, float]]:
    return [(start, end) for start, end, _ in clocks.streams[stream].spans]


def idle(clocks: StepClocks, stream: int = 0) -> list[tuple[float, float, str]]:
    return [(start, end, reason) for start, end, reason, _ in clocks.streams[stream].idle]


# Rules --------------------------------------------------------------------------------------------------


def test_kernels_of_a_stream_run_one_after_the_other() -> None:
    clocks = followed(kernel(10), kernel(5))
    assert spans(clocks) == [(1, 11), (11, 16)]
    assert idle(clocks) == [(0, 1, HOST)]
    assert clocks.host.front == 2


def test_short_kernels_wait_for_the_host() -> None:
    clocks = followed(kernel(2), kernel(2), call=5.0)
    assert spans(clocks) == [(5, 7), (10, 12)]
    assert idle(clocks) == [(0, 5, HOST), (7, 10, HOST)]


def test_a_collective_overlaps_kernels_until_it_is_waited_for() -> None:
    clocks = followed(kernel(10), collective(20, 1), kernel(8), wait(1), kernel(3))
    assert spans(clocks, GROUP) == [(11, 31)]
    assert spans(clocks) == [(1, 11), (11, 19), (31, 34)]
    assert idle(clocks) == [(0, 1, HOST), (19, 31, MESSAGES)]
    assert clocks.streams[0].idle[-1].event == collective(20, 1)


def test_a_wait_for_what_has_ended_takes_no_time() -> None:
    clocks = followed(collective(2, 1), kernel(10), wait(1), kernel(3))
    assert spans(clocks) == [(2, 12), (12, 15)]
    assert idle(clocks) == [(0, 2, HOST)]


def test_an_idle_stream_waits_for_the_host_before_it_waits_for_a_collective() -> None:
    clocks = followed(collective(20, 1), wait(1), kernel(3), call=6.0)
    assert idle(clocks) == [(0, 12, HOST), (12, 26, MESSAGES)]
    assert spans(clocks) == [(26, 29)]


def test_collectives_of_a_group_queue_and_start_after_the_stream_that_they_were_called_on() -> None:
    clocks = followed(kernel(10), collective(20, 1), collective(5, 2, after=3), wait(2), kernel(1))
    assert spans(clocks, GROUP) == [(11, 31), (31, 36)]
    assert spans(clocks)[-1] == (36, 37)


def test_a_stream_waits_for_an_event_of_another() -> None:
    record = event("record", stream=0, number=4)
    clocks = followed(kernel(10), record, kernel(30), wait(4, stream=1), kernel(2, stream=1))
    assert spans(clocks, 1) == [(11, 13)]  # not after what comes after the event
    assert idle(clocks, 1)[:2] == [(0, 4, HOST), (4, 11, OTHER_STREAMS)]


def test_the_host_waits_for_an_event_and_issues_later() -> None:
    record = event("record", number=4)
    clocks = followed(kernel(10), record, event("synchronize", number=4, stream=-1), kernel(2))
    assert [(each.start, each.end) for each in clocks.host.idle] == [(3, 11)]
    assert spans(clocks) == [(1, 11), (12, 14)]
    assert idle(clocks) == [(0, 1, HOST), (11, 12, HOST)]


def test_a_step_ends_with_what_nothing_waits_for() -> None:
    clocks = followed(kernel(3), collective(20, 1))
    assert idle(clocks)[-1] == (4, 24, MESSAGES)
    assert clocks.seconds == 24


def test_ranks_of_a_pipeline_wait_for_messages_and_for_the_last_of_them() -> None:
    lane, mail = (0, 1, 5), Mail()
    sent = collective(4, 1, name="send", lane=lane)
    received = collective(4, 1, name="receive", lane=lane)
    first = clocks_of([kernel(10), sent, kernel(2)], mail=mail)
    last = clocks_of([received, wait(1), kernel(7)], mail=mail)
    follow([last, first])
    assert spans(last) == [(15, 22)]
    assert idle(last) == [(0, 2, HOST), (2, 15, MESSAGES)]
    assert spans(first) == [(1, 11), (11, 13)]
    assert idle(first)[1:] == [(13, 15, MESSAGES), (15, 22, OTHER_RANKS)]


def test_a_collective_of_all_ranks_starts_when_the_last_has_called_it() -> None:
    mail = Mail({"shard": 2})
    early, late = (clocks_of([kernel(s), collective(1, 1), wait(1)], mail=mail) for s in (1, 30))
    follow([early, late])
    assert spans(early, GROUP) == spans(late, GROUP) == [(31, 32)]


def test_collectives_of_other_stages_are_not_waited_for() -> None:
    mail = Mail({"world": 2})
    late, early = (clocks_of([kernel(s), collective(1, 1), wait(1)], mail=mail) for s in (30, 1))
    follow([late, early])
    assert (spans(early, GROUP), spans(late, GROUP)) == ([(2, 3)], [(31, 32)])


def test_messages_that_nobody_sends_are_told() -> None:
    received = collective(4, 1, name="receive", lane=(0, 1, 0))
    with pytest.raises(AssertionError, match="none of them sends"):
        follow([clocks_of([received, wait(1)])])


@pytest.mark.parametrize(
    ("operation", "planned", "sent_a_byte"),
    [
        ("all_gather", "all_gather", 7 / 8),
        ("reduce_scatter", "reduce_scatter", 7 / 8),
        ("scalars", "all_reduce", 2 * 7 / 8),
        ("all_to_all", "all_to_all", 7 / 8),
    ],
)
@pytest.mark.parametrize("stride", [1, 8])
def test_collectives_take_the_planners_time_over_their_links(
    operation: str, planned: str, sent_a_byte: float, stride: int
) -> None:
    known, size = cluster("h100", 64), 1e9
    call = collective(size * sent_a_byte, 1, name=operation, ranks=8, stride=stride)
    found = EventSeconds(known).device(call)
    expected = CollectiveCosts(known).collective(planned, size, GroupShape(8, stride))
    assert found == pytest.approx(expected)


def test_a_kernel_without_products_takes_its_bytes_time() -> None:
    known = cluster("h100", 8)
    found = EventSeconds(known).device(kernel(3.35e9))
    assert found == pytest.approx(1e-3 / known.device.rates.memory + START)


# Steps --------------------------------------------------------------------------------------------------


def timed(process: FakeCudaProcess, spec: RunSpec, **options: Any) -> list[dict[str, Any]]:
    hardware = cluster("h100", spec.layout.world_size)
    found = process.call(api.dryrun, spec, device="cuda", cluster=hardware, **options)
    return [row["timeline"] for row in found["ranks"]]


LAYOUTS: dict[str, dict[str, object]] = {
    "zero": {},
    "tensor": {"layout__dp": 1, "layout__zero": 0, "layout__tp": 2},
    "pipeline": {"layout__zero": 1, "layout__pp": 2},
    "interleaved": {"layout__dp": 1, "layout__zero": 0, "layout__pp": 2, "layout__schedule": "interleaved",
                    "layout__virtual": 2, "model__layers": 4},
    "offload": {"train__offload": "host"},
}  # fmt: skip


@faked
@pytest.mark.parametrize("name", some(LAYOUTS, ("zero", "interleaved")))
def test_times_add_up_to_the_step(name: str, process: FakeCudaProcess) -> None:
    spec = tiny(**LAYOUTS[name])
    rows = timed(process, spec, all_stages=True)
    assert len(rows) == spec.layout.pp
    assert len({row["step_seconds"] for row in rows}) == 1
    for place, row in enumerate(rows):
        step, times = row["step_seconds"], {each["kind"]: each["seconds"] for each in row["compute_stream"]}
        assert sum(times.values()) == pytest.approx(step, rel=1e-9)
        assert all(value >= 0 for value in times.values())
        assert times["products"] and times["attention"] and times["optimiser"]
        assert sum(each["seconds"] for each in row["exposed"]) == pytest.approx(times[MESSAGES], rel=1e-9)
        assert row["host_bound_seconds"] == times[HOST]
        assert times[HOST] > step / 4  # so small a model leaves the device idle
        busy = next(each["busy"] for each in row["streams"] if each["name"] == "compute")
        assert busy == pytest.approx(sum(times[kind] for kind in KINDS), rel=1e-9)
        plan = estimate(spec, cluster("h100", spec.layout.world_size), documents=DOCUMENTS)
        assert sum(planned_terms(plan, place).values()) == pytest.approx(plan.seconds, rel=1e-6)
        ours = {each["term"]: each["seconds"] for each in row["planner"]["terms"]}
        assert sum(ours.values()) == pytest.approx(step, rel=1e-9)
        tokens = spec.train.batch_tokens / spec.layout.world_size / step
        assert row["tokens_per_second_per_gpu"] == pytest.approx(tokens)
        assert row["mfu"] * step == pytest.approx(plan.mfu * plan.seconds)


@faked
def test_the_last_stage_of_a_pipeline_waits_for_the_first(process: FakeCudaProcess) -> None:
    first, last = timed(process, tiny(**LAYOUTS["pipeline"]), all_stages=True)
    exposed = {row["axis"]: row["seconds"] for row in last["exposed"] if row["operation"] == "receive"}
    forward = last["longest_waits"]
    assert exposed["pipeline"] > 0
    assert any(each["what"] == "pipeline receive" for each in forward)
    alone = timed(process, tiny(**LAYOUTS["pipeline"]), rank=0)
    assert [first] == alone  # other stages are followed, told or not


@faked
def test_messages_take_longer_over_slower_links_and_nothing_else_does(process: FakeCudaProcess) -> None:
    spec, known = tiny(), cluster("h100", 2)
    link = known.levels[0].link
    slower = replace(link, bandwidth=link.bandwidth / 1000)
    far = replace(known, levels=(replace(known.levels[0], link=slower),))
    rows = [
        process.call(api.dryrun, spec, device="cuda", cluster=each)["ranks"][0]["timeline"]
        for each in (known, far)
    ]
    (compute, *near), (same, *distant) = ([each["busy"] for each in row["streams"]] for row in rows)
    assert compute == pytest.approx(same)
    assert max(near) < max(distant) / 10
    assert rows[0]["step_seconds"] < rows[1]["step_seconds"]
    assert rows[0]["host"]["issuing"] == pytest.approx(rows[1]["host"]["issuing"])


@pytest.mark.full  # `test_times_add_up_to_the_step` has the times that the command shows
@faked
def test_a_step_is_timed_by_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [word for key, value in TINY.items() for word in (f"--{key}", str(value))]
    page = tmp_path / "step.html"
    assert main(["dryrun", *flags, "--device", "cuda", "--timeline", str(page), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (row,) = found["ranks"]
    assert row["timeline"]["device"] == "H100 SXM 80 GB"
    data = re.search(r'id="data">(.*?)</script>', page.read_text(encoding="utf-8"), re.DOTALL)
    assert data is not None
    drawn = json.loads(data[1])
    assert drawn["rows"][:2] == ["host", "compute"]
    assert {name.partition(",")[0] for name in drawn["rows"][2:]} == {"world", "shard"}
    assert drawn["counts"][1] == row["device_work"]["launches"]
    assert drawn["makespan"] == row["timeline"]["step_seconds"]
    assert [kind for kind, _ in drawn["kinds"]] == list(CLOCK_COLOURS)
    assert main(["dryrun", *flags, "--device", "cuda", "--cluster", "b200"]) == 0
    shown = capsys.readouterr().out
    assert "NVIDIA B200, faked" in shown
    assert "beside the planner" in shown
    assert "waiting: host" in shown


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--timeline", "step.html"], "--timeline: the clocks are those of a GPU"),
        (["--cluster", "h100"], "give --device cuda, or leave out --cluster"),
        (["--cluster", "h100", "--timeline", "step.html"], "or leave out --timeline and --cluster"),
        (["--device", "cuda", "--cluster", "h1000"], "did you mean 'h100'"),
        (["--device", "cuda", "--cluster", "cpu"], "one of processors"),
        (["--device", "cuda", "--timeline", "none/step.html"], "--timeline"),
        (["--device", "cuda", "--timeline", "step.txt"], ".html"),
    ],
)
def test_what_cannot_be_timed_is_one_sentence(
    flags: list[str], told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=re.escape(told)) as found:
        main(["dryrun", "--model.preset", "tiny", "--data.corpus", "synthetic", *flags])
    assert "\n" not in str(found.value)
