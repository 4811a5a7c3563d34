"""Accesses that no event orders: by hand, and in steps with a mistake planted in them, on a faked GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch

from covering import some
from meshwright.comm.traffic_counter import TrafficCounter
from meshwright.dryrun.events import ByteRange, Event, Kind
from meshwright.dryrun.races import races, told
from meshwright.dryrun.rank_step import rehearse
from meshwright.dryrun.trace import Trace
from meshwright.fake_cuda import library
from meshwright.fake_cuda.process import FakeCudaProcess
from meshwright.fake_cuda.runtime import FakeEvent, set_capability
from meshwright.optim import offload
from meshwright.parallel import gradient_reduction
from meshwright.parallel.activation_offload import ActivationOffload
from meshwright.spec import load

faked = pytest.mark.skipif(
    library.torch_build().toolkit is not None, reason="a GPU is faked for torch's build for CPUs only"
)


def event(
    kind: Kind, stream: int, *written: ByteRange, reads: tuple[ByteRange, ...] = (), **facts: Any
) -> Event:
    return Event(kind, kind, "operator", stream, "", "", reads=reads, writes=written, **facts)


X, LEFT, RIGHT = ByteRange(0, 0, 100), ByteRange(0, 0, 60), ByteRange(0, 60, 100)
RECORD, WAIT = event("record", 0, number=7), event("wait", 1, number=7)


@pytest.mark.parametrize(
    ("events", "found"),
    [
        ([event("kernel", 0, X), event("kernel", 1, reads=(X,))], 1),
        ([event("kernel", 0, X), event("kernel", 0, reads=(X,))], 0),
        ([event("kernel", 0, reads=(X,)), event("kernel", 1, reads=(X,))], 0),
        ([event("kernel", 0, reads=(X,)), event("kernel", 1, X)], 1),
        ([event("kernel", 0, LEFT), event("kernel", 1, RIGHT)], 0),
        ([event("kernel", 0, LEFT), event("kernel", 1, RIGHT), event("kernel", 1, X)], 1),
        ([event("kernel", 0, X), RECORD, WAIT, event("kernel", 1, X)], 0),
        ([event("kernel", 0, X), RECORD, event("kernel", 0, X), WAIT, event("kernel", 1, X)], 1),
        ([event("kernel", 0, X), event("synchronize", 0), event("kernel", 1, X)], 0),
        ([event("kernel", 0, X), event("synchronize", 2), event("kernel", 1, X)], 1),
        ([event("kernel", 1, X), RECORD, event("synchronize", -1, number=7), event("kernel", 0, X)], 1),
        ([event("kernel", 1, X), event("synchronize", -1), event("kernel", 0, X)], 0),
        ([event("copy", 1, reads=(X,)), event("free", 0, X)], 1),
        ([event("copy", 0, reads=(X,)), event("free", 0, X), event("kernel", 1, X)], 0),
        ([event("collective", 3, X, number=9, after=0), event("free", 0, X)], 1),
        ([event("collective", 3, reads=(X,), number=9, after=0), event("free", 0, X)], 1),
        ([event("collective", 3, X, number=9, after=0), event("wait", 0, number=9), event("free", 0, X)], 0),
        ([event("collective", 3, X, number=9, after=0), event("kernel", 0, reads=(X,))], 1),
        (
            [
                event("kernel", 0, X),
                event("collective", 3, X, number=9, after=0),
                event("wait", 0, number=9),
                event("kernel", 0, reads=(X,)),
            ],
            0,
        ),
        ([event("kernel", 1, X), event("collective", 3, X, number=9, after=0)], 1),
    ],
)
def test_an_access_races_unless_something_orders_it(events: list[Event], found: int) -> None:
    assert len([*races(events)]) == found


# Planted mistakes ---------------------------------------------------------------------------------------

BASE: dict[str, object] = {
    "model.preset": "tiny", "model.layers": 3, "data.corpus": "synthetic", "data.seq_len": 512,
    "train.batch_tokens": 4096, "layout.dp": 2, "layout.zero": 3, "layout.micro_batch": 2,
    "precision.compute": "bf16",
}  # fmt: skip
ACTIVATIONS = {"model.hidden": 512, "train.offload_activations": "host", "recompute.policy": "none"}


def _run_on_without_waiting(reductions: Any) -> None:
    reductions.popleft()[1]()


def _use_before_it_came(self: ActivationOffload, now: Any) -> None:
    self._fetch(now)
    now.came = None


def _free_before_it_left(self: ActivationOffload) -> None:
    for each in self._leaving:
        each.here = None
    self._leaving, self._left = [], None


class _NoWait(FakeEvent):
    def wait(self, stream: Any = None) -> None:
        pass


def _slot(self: Any, *args: Any, _init: Any = offload._Slot.__init__, **kwargs: Any) -> None:
    _init(self, *args, **kwargs)
    self.came = _NoWait()


def _keep_nothing(self: Any, *args: Any, _watched: Any = TrafficCounter.watched, **kwargs: Any) -> Any:
    pending = _watched(self, *args, **kwargs)
    pending.tensors = ()
    return pending


GATHERED_IN_8_BITS = {"model.hidden": 512, "precision.compute": "fp8", "precision.fp8_gather": "true"}
RING = {"layout.dp": 1, "layout.zero": 0, "layout.cp": 2, "layout.context_mode": "ring"}
PIPELINE = {"layout.dp": 1, "layout.zero": 1, "layout.pp": 2, "layout.micro_batch": 1}
PLANTED: dict[str, tuple[dict[str, object], Any, str, Any, str]] = {
    "a reduce-scatter is not waited for": (
        {}, gradient_reduction, "_finish_first", _run_on_without_waiting,
        r"aten::add_\.Tensor on stream 0 .* does not wait for shard reduce_scatter",
    ),
    "a backward does not wait for its activations": (
        ACTIVATIONS, ActivationOffload, "_wait", _use_before_it_came,
        r"on stream 0 \(backward .* does not wait for aten::copy_ on stream 2",
    ),
    "an update does not wait for its moments": (
        {"train.offload": "host"}, offload._Slot, "__init__", _slot,
        r"aten::_fused_adamw_ on stream 0 .* does not wait for aten::copy_ on stream 1",
    ),
    "activations are freed before they have left": (
        ACTIVATIONS, ActivationOffload, "_settle", _free_before_it_left,
        r"freeing memory on stream 0 \(forward .* does not wait for aten::copy_ on stream 1",
    ),
    "parts are freed before they are gathered": (
        GATHERED_IN_8_BITS, TrafficCounter, "watched", _keep_nothing,
        r"freeing memory on stream 0 \(forward .* does not wait for shard all_gather on stream 2",
    ),
    "sums are freed before a ring has passed them on": (
        RING, TrafficCounter, "watched", _keep_nothing,
        r"freeing memory on stream 0 \(backward .* does not wait for context shift on stream 2",
    ),
    "activations are freed before a pipeline has sent them": (
        PIPELINE, TrafficCounter, "watched", _keep_nothing,
        r"freeing memory on stream 0 \(forward\) does not wait for pipeline send on stream 2",
    ),
}  # fmt: skip


def races_of(name: str, planted: bool) -> list[dict[str, str | int]]:
    """The races of a step, without or with a mistake, in a process that has the faked GPU."""
    keys, place, attribute, mistake, _ = PLANTED[name]
    set_capability((9, 0))
    trace = Trace(torch.device("cuda", 0))
    there: AbstractContextManager[Any] = patch.object(place, attribute, mistake) if planted else nullcontext()
    with there:
        spec = load(None, [(key, str(value)) for key, value in (BASE | keys).items()])
        rehearse(spec, 0, trace.device, trace)
    return told(races(trace.events))


@pytest.fixture(scope="module")
def process() -> Iterator[FakeCudaProcess]:
    with FakeCudaProcess() as started:
        yield started


QUICK = (
    "a reduce-scatter is not waited for",
    "an update does not wait for its moments",
    "activations are freed before they have left",
)


@faked
@pytest.mark.parametrize("name", some(PLANTED, QUICK))
def test_a_planted_mistake_is_named_and_nothing_else_is(process: FakeCudaProcess, name: str) -> None:
    assert process.call(races_of, name, planted=False) == []
    found = process.call(races_of, name, planted=True)
    assert any(re.search(PLANTED[name][4], str(row["race"])) for row in found), found
