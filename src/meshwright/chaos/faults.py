"""Faults as data: their kinds, a schedule that follows from a seed, and the memory that says what has hit."""

from __future__ import annotations

import mmap
import os
import random
import struct
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.comm.heartbeat import PHASES, STEP_PHASES
from meshwright.rank.shared_memory import new_memory
from meshwright.spec import UserError
from meshwright.spec.errors import did_you_mean
from meshwright.spec.files import parse_json, shortened


@dataclass(frozen=True)
class FaultKind:
    """A kind of fault, and what a run must make of it.

    `failure` is the kind of the supervisor's event with which the ranks must be started again, with words of
    its sentence, which names the rank if `ranked`; None is for faults that must not end any rank. `event` is
    the kind of an event that the run must record, with words of it.
    """

    summary: str
    failure: tuple[str, str] | None = None
    ranked: bool = True
    event: tuple[str, str] | None = None
    damages: bool = False
    """The newest checkpoint is damaged, and snapshots in memory are lost, while no rank runs."""
    saves: bool = False
    """Needs checkpoints that are saved on the way."""
    alters: bool = False
    """Changes numbers, so that the run cannot end as one without faults does."""
    skips: bool = False
    """Costs the step, so that the run ends as one without faults in which that step is skipped. It hits a
    batch, so in the phase `data` only."""
    drawn: bool = True
    """Among the kinds of a schedule that names none."""


_KILLED, _LOST = ("failure", "SIGKILL"), ("failure", "process that forks ranks")
_DAMAGED = ("warning", "{target}")
KINDS: Mapping[str, FaultKind] = {
    "kill": FaultKind("the rank is killed as it enters a phase", _KILLED),
    "kill-anytime": FaultKind("the rank is killed up to a second later, wherever it is", _KILLED),
    "kill-zygote": FaultKind("the process that forks ranks is killed", _LOST, ranked=False),
    "stop": FaultKind("the rank is stopped (SIGSTOP)", ("hang", "stopped")),
    "stuck": FaultKind("the rank waits for ever, and takes no part in the next collective", ("hang", "")),
    "slow": FaultKind("the rank sleeps in each phase of some steps"),
    "error": FaultKind("the rank raises an error that nobody expects", ("failure", "RuntimeError")),
    "out-of-memory": FaultKind("an allocation of the rank fails", ("failure", "MemoryError"), drawn=False),
    "clock-jump": FaultKind("the rank's clock is set an hour on or back"),
    "io-error": FaultKind("a write of a save fails", event=("warning", "Input/output error"), saves=True),
    "disk-full": FaultKind("a write of a save finds no space", event=("warning", "no space"), saves=True),
    "flip-checkpoint": FaultKind(
        "the rank is killed, and a bit of the newest checkpoint is flipped",
        _KILLED, event=_DAMAGED, damages=True, saves=True,
    ),
    "cut-checkpoint": FaultKind(
        "the rank is killed, and a file of the newest checkpoint is cut to half",
        _KILLED, event=_DAMAGED, damages=True, saves=True,
    ),
    "cut-latest": FaultKind(
        "the rank is killed, and LATEST is emptied", _KILLED, event=_DAMAGED, damages=True, saves=True
    ),
    "nan": FaultKind(
        "an activation of the rank is not a number in one step",
        event=("skipped_step", ""), alters=True, drawn=False,
    ),
    "nan-batch": FaultKind(
        "an activation of the rank is not a number each time that the batch is computed",
        event=("skipped_step", ""), skips=True, drawn=False,
    ),
    "inf-batch": FaultKind(
        "an activation of the rank is infinite each time that the batch is computed",
        event=("skipped_step", ""), skips=True, drawn=False,
    ),
    "nan-loss": FaultKind(
        "the loss of the rank is not a number each time that the batch is computed",
        event=("skipped_step", ""), skips=True, drawn=False,
    ),
    "flip": FaultKind(
        "a bit of a parameter of the rank flips",
        failure=("failure", "differs between"), ranked=False, alters=True, drawn=False,
    ),
}  # fmt: skip
DEFAULT_KINDS = tuple(name for name, kind in KINDS.items() if kind.drawn)
"""Kinds after which a run must end as if there had been none."""
FIRST_SAVES = 3
"""Saves after which checkpoints may be damaged: two are on the disk, the newer of which is not needed."""
MOST_S = 1e9
"""Longest time of a fault."""


@dataclass(frozen=True)
class Fault:
    """A fault, and when it hits: as `rank` first enters `phase` in, or after, a generation and step.

    `step` is the number of steps completed by then. `seconds` is how long the rank sleeps in each phase of
    `steps` steps (slow), how much later it is killed (kill-anytime), or how far its clock jumps. `number`
    decides on the bit, tensor, file or module that is hit.
    """

    kind: str
    rank: int
    phase: str = "forward"
    step: int = 0
    generation: int = 0
    seconds: float = 0.0
    steps: int = 1
    number: int = 0

    def __post_init__(self) -> None:
        for name, known in (("kind", tuple(KINDS)), ("phase", PHASES)):
            if (value := getattr(self, name)) not in known:
                raise UserError(
                    f"{name}: {_shown(value)} is not a {name} of {'fault' if name == 'kind' else 'a run'}; "
                    f"they are {', '.join(known)}"
                )
        if KINDS[self.kind].skips and self.phase != "data":
            raise UserError(
                f"phase: {self.kind} hits in 'data', before its batch is computed, not {self.phase!r}"
            )
        for name in ("rank", "step", "generation", "steps", "number"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise UserError(f"{name}: {_shown(value)} is not a whole number of 0 or more")
        if type(self.seconds) not in (int, float) or not abs(self.seconds) <= MOST_S:
            raise UserError(f"seconds: {_shown(self.seconds)} is not a time of at most {MOST_S:g} s")

    def to_json(self) -> dict[str, Any]:
        """Return the fault as plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Fault:
        """Return the fault that `to_json` gave; other keys are ignored. Raises `UserError`."""
        if missing := [name for name in ("kind", "rank") if name not in values]:
            raise UserError(f"{missing[0]}: is missing")
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in names})


def _shown(value: object) -> str:
    return shortened(repr(value))


def schedule(
    seed: int, count: int, mtbf: float, kinds: Sequence[str], ranks: int, every: int = 0
) -> list[tuple[float, Fault]]:
    """Return `count` faults, each with the seconds from the start of a run at which it is due.

    Gaps are exponential with mean `mtbf` seconds. Fault i is a function of (seed, i) and the other arguments.
    None hits the first step, where an error is taken for one of the program, and ends the run; those that
    damage checkpoints, of which a run saves one `every` so many steps, wait until it has some.
    """
    due, found = 0.0, []
    for number in range(count):
        draw = random.Random(f"{seed} {number}")
        due += draw.expovariate(1 / mtbf)
        kind, rank, phase = draw.choice(list(kinds)), draw.randrange(ranks), draw.choice(STEP_PHASES)
        step = FIRST_SAVES * every if KINDS[kind].damages else 1
        phase = "data" if KINDS[kind].skips else phase
        seconds, steps = 0.0, 1
        if kind == "slow":
            seconds, steps = draw.uniform(0.02, 0.2), 3
        elif kind == "kill-anytime":
            seconds = draw.random()
        elif kind == "clock-jump":
            seconds = draw.choice((-3600.0, 3600.0))
        fault = Fault(kind, rank, phase, step, 0, seconds, steps, draw.getrandbits(31))
        found.append((due, fault))
    return found


def read_log(path: Path, ranks: int) -> list[Fault]:
    """Return the faults of a log, each with the place where it hit, in their order.

    Raises `UserError`, also for a fault that is not of one of `ranks` ranks.
    """
    advice = "give the chaos.jsonl of a run under faults as it was written"
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise UserError(f"--replay: {path} cannot be read ({error.strerror}); {advice}") from None
    except UnicodeDecodeError:
        raise UserError(f"--replay: {path} is not UTF-8 text; {advice}") from None
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            row = parse_json(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise UserError(
                f"--replay: {path}: line {number} is not a JSON object; {advice}, or remove the line"
            )
        try:
            found += [Fault.from_json(row)] if row.get("event") == "fault" else []
        except UserError as error:
            raise UserError(f"--replay: {path}: line {number} is not a fault: {error}; {advice}") from None
    if not found:
        raise UserError(f"--replay: {path} holds no faults; {advice}")
    if (highest := max(fault.rank for fault in found)) >= ranks:
        raise UserError(
            f"--replay: {path} has a fault of rank {highest}, and the run has {ranks} ranks; give --nproc "
            f"{highest + 1} or more, or another log"
        )
    return found


def saves_enough(every: int, last_step: int) -> bool:
    """True if a run saves so many checkpoints on its way that all kinds of faults can hit them."""
    return 0 < FIRST_SAVES * every < last_step


def check(kinds: Collection[str], every: int, last_step: int) -> None:
    """Refuse kinds that are unknown, or need checkpoints of a run that saves too few of them."""
    for name in kinds:
        if name not in KINDS:
            raise UserError(
                f"--kinds: {name!r} is not a kind of fault{did_you_mean(name, KINDS)}; the kinds are "
                f"{', '.join(KINDS)}"
            )
        if KINDS[name].saves and not saves_enough(every, last_step):
            raise UserError(
                f"--kinds: {name} needs more than {FIRST_SAVES} checkpoints on the way; set checkpoint.every "
                f"to at most {(last_step - 1) // FIRST_SAVES} steps, or other kinds"
            )


class Hit(NamedTuple):
    """Notes about one fault; times are `time.monotonic_ns`, and 0 until it has happened."""

    armed: int
    """1 from when the fault may hit."""
    starts: int
    """Starts of the ranks when it hit: its generation + 1, and 0 before."""
    step: int
    """Completed steps of the rank that was hit."""
    acted: int
    """Time at which it did what it does, which may be later."""
    acted_step: int
    """Steps that the rank had completed by then, or that any had when all had ended for it."""
    resumed_step: int
    """Completed steps from which the ranks that were started again went on."""
    resumed: int
    """Time at which they began their first step."""
    back: int
    """Time at which a step was completed that was not before, and that it did not touch, or of the end."""


_ROW = struct.Struct("<8q")
_COUNTS = struct.Struct("<2q")
_HEAD = 64
_FIELD = struct.Struct("<q")


class HitTable:
    """`Hit` of each fault of a plan, in memory that ranks share with their supervisor and that outlives them.

    Each field has one writer: the supervisor, the rank that is hit, or rank 0.
    """

    def __init__(self, descriptor: int, faults: Sequence[Fault]) -> None:
        self.faults, self.descriptor = faults, descriptor
        self._memory = memoryview(mmap.mmap(descriptor, _HEAD + len(faults) * _ROW.size))

    def __getitem__(self, number: int) -> Hit:
        return Hit(*_ROW.unpack_from(self._memory, _HEAD + number * _ROW.size))

    def write(self, number: int, **values: int) -> None:
        """Write fields of the notes about a fault."""
        for name, value in values.items():
            offset = _HEAD + number * _ROW.size + Hit._fields.index(name) * _FIELD.size
            _FIELD.pack_into(self._memory, offset, value)

    def last(self) -> int | None:
        """Return the number of the fault that has hit last."""
        return next((n for n in reversed(range(len(self.faults))) if self[n].starts), None)

    @property
    def saves(self) -> tuple[int, int]:
        """Saves so far, and the nanoseconds for which they stopped training."""
        number, stopped = _COUNTS.unpack_from(self._memory)
        return number, stopped

    def note_save(self, stopped: int) -> None:
        """Count a save that stopped training for so many nanoseconds."""
        number, before = self.saves
        _COUNTS.pack_into(self._memory, 0, number + 1, before + stopped)


class FaultPlan(ExitStack):
    """Faults for a supervised run, with their memory; `given` is what a supervisor passes to ranks."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        super().__init__()
        descriptor = new_memory("faults")
        self.callback(os.close, descriptor)
        os.ftruncate(descriptor, _HEAD + max(1, len(faults)) * _ROW.size)
        self.hits = HitTable(descriptor, faults)
        self.given: dict[str, Any] = {"faults": [fault.to_json() for fault in faults], "hits": descriptor}
