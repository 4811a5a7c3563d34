"""The health probe of a host, before its ranks are started again after a failure.

Processes of their own, one for each local rank, make the checks (`health_checks.py`) in the place of the
ranks: this side, the supervisor's, has no torch. A host that fails them would take the next start down, too,
or worse, train on with wrong numbers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.comm.store_server import StoreServer
from meshwright.launch.start import End, HostPlace, Job, Start
from meshwright.launch.zygote import Zygote
from meshwright.rank.failure import KINDS, Outcome
from meshwright.rank.shared_memory import SharedMemory
from meshwright.spec.errors import UnhealthyHostError

PROBE_S = 60.0
"""Longest time of all checks, in which CUDA and NCCL start; else they take a second or two."""
RECENT_S = 30.0
"""A host that has passed so lately is not probed again, as where another one fails its probe."""
CHECKS = "meshwright.launch.health_checks"
REMEDY = (
    "take it out of the run, and look at its memory, devices and disk (dmesg, nvidia-smi -q) before it comes "
    "back; recovery.health_probe = false leaves out the probe"
)


@dataclass(frozen=True)
class HealthVerdict:
    """The finding of a probe of so many seconds: none, or in a sentence why no rank may start on the host."""

    seconds: float
    sentence: str = ""

    @property
    def outcome(self) -> Outcome:
        """The outcome of a run that has no other host."""
        return Outcome(UnhealthyHostError.code, self.sentence, restart=True) if self.sentence else Outcome()


class HealthProbe:
    """Probes the host called `name`, for a run's supervisor on it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._passed, self._passed_at = HealthVerdict(0.0), float("-inf")

    @property
    def recent(self) -> HealthVerdict | None:
        """The verdict of a probe that the host has passed a moment ago."""
        return self._passed if time.monotonic() < self._passed_at + RECENT_S else None

    def run(
        self,
        job: Job,
        zygote: Zygote,
        memory: SharedMemory,
        folder: Path,
        asked: Sequence[int],
        interrupted: Callable[[], bool] = lambda: False,
    ) -> HealthVerdict | None:
        """Probe the host for a job, with files in the new `folder`; None where it was given up.

        It is when a signal has been `asked`, or `interrupted`, which is called many times a second, returns
        True. Raises `ZygoteLostError`.
        """
        assert job.health is not None
        began, given_up = time.monotonic(), False
        folder.mkdir(parents=True)

        def over() -> bool:
            nonlocal given_up
            given_up = given_up or bool(asked) or interrupted()
            return given_up or time.monotonic() > began + PROBE_S

        argv = [json.dumps(job.health.spec.to_json()), str(job.health.folder), str(folder)]
        checks = Job(argv, job.nproc, CHECKS)
        store = StoreServer(folder) if job.nproc > 1 else None
        try:
            place = HostPlace(None) if store is None else HostPlace(store.endpoint, store.secret)
            end = Start(0, checks, place, memory, began, folder / "ranks").run(zygote, asked, over)
        finally:
            if store is not None:
                store.close()
        seconds = time.monotonic() - began
        if given_up or end.outcome.stopped:
            return None
        if end.outcome.code:
            return HealthVerdict(seconds, self._unhealthy(end, folder, seconds))
        self._passed, self._passed_at = HealthVerdict(seconds), time.monotonic()
        return self._passed

    def lost(self, error: Exception) -> HealthVerdict:
        """The verdict where the process that makes the checks was lost."""
        return HealthVerdict(0.0, f"host {self.name} has failed its health probe: {error}; {REMEDY}")

    def _unhealthy(self, end: End, folder: Path, seconds: float) -> str:
        """The sentence of a failed probe: host, what failed, what to do."""
        found = end.outcome
        if seconds > PROBE_S and end.hang is None:
            doing = [f"rank {file.name} at: {file.read_text()}" for file in sorted(folder.glob("[0-9]*"))]
            why = f"its checks have not ended within {PROBE_S:g} s ({', '.join(doing) or 'none has begun'})"
        else:
            why = found.sentence
        known = found.code in KINDS and end.hang is None  # its sentence has its own remedy
        return f"host {self.name} has failed its health probe: {why}" + ("" if known else f"; {REMEDY}")
