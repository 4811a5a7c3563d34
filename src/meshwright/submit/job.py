"""A job as any scheduler may have it: what runs, on how many nodes, for how long, and how it is started."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from meshwright.rank.host_rendezvous import FOLDER_HOSTS, STORE_PORT
from meshwright.spec.base import FrozenModel

RanksBy = Literal["srun", "torchrun"]
"""The program that starts the ranks of a job of Slurm."""
Kind = Literal["trainjob", "jobset"]
"""The kind of object that a job of Kubernetes is."""

_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _one_line(text: str) -> str:
    if not text.isprintable() or not text.strip():
        raise ValueError("it should be one line of printable text")
    return text


def _name(text: str) -> str:
    if not _NAME.fullmatch(text) or len(text) > 40:
        raise ValueError("it should be at most 40 small letters, digits and dashes, and begin with a letter")
    return text


def _variable(text: str) -> str:
    if not _VARIABLE.fullmatch(text):
        raise ValueError(f"{text!r} is not the name of a variable")
    return text


Line = Annotated[str, AfterValidator(_one_line)]
Name = Annotated[str, AfterValidator(_name)]
Variable = Annotated[str, AfterValidator(_variable)]
Count = Annotated[int, Field(ge=1)]


class ClusterJob(FrozenModel):
    """A run, or the runs of a sweep, as a job.

    `run` and `out` are paths as the job's nodes see them, `run_text` the run file where they do not see one,
    and `folder` where commands run. `flags` are dotted flags as words, `members` the further ones of each run
    of a sweep, at most `at_once` of which run at a time. With `least_nodes` the run goes on with any number
    of nodes from that up to `nodes`. A node has `ranks` ranks, as many GPUs with `gpus`, and `cpus` cores a
    rank.
    `seconds` are what the job may take at a time, `grace` what it has to save after a signal, and `restarts`
    how often it is started again; with `doctor` the ranks examine their hosts before the first start.
    `mounts` are (source, target) of folders in a container, or of claims and volumes by their names;
    `options` are further ones of the scheduler's, as name=value. The rest is each of one scheduler: see
    `meshwright launch --help`.
    """

    name: Name
    run: Line
    out: Line
    flags: tuple[Line, ...] = ()
    nodes: Count = 1
    least_nodes: Count | None = None
    ranks: Count = 1
    gpus: bool = True
    cpus: Count = 8
    seconds: Count | None = None
    grace: Count = 300
    restarts: int = Field(20, ge=0)
    doctor: bool = True
    image: Line | None = None
    environment: tuple[tuple[Variable, Line], ...] = ()
    mounts: tuple[tuple[Line, Line], ...] = ()
    members: tuple[tuple[Line, ...], ...] = ()
    at_once: Count | None = None
    options: tuple[Line, ...] = ()
    folder: Line = "."
    ranks_by: RanksBy = "srun"
    kind: Kind = "trainjob"
    run_text: str | None = None
    namespace: Name | None = None
    service_account: Line | None = None
    accelerator: Line | None = None
    hosts: tuple[Line, ...] = ()
    address: Line | None = None

    @property
    def size(self) -> int:
        """The ranks of a run, on all its nodes."""
        return self.nodes * self.ranks

    def folders(self) -> list[str]:
        """The folder of each run."""
        return [f"{self.out}/{number}" for number in range(len(self.members))] or [self.out]

    def all_flags(self) -> list[tuple[str, ...]]:
        """The dotted flags of each run."""
        return [(*self.flags, *member) for member in self.members] or [self.flags]

    @property
    def train_flags(self) -> list[str]:
        """Flags of `meshwright train` in any job: it goes on from what was saved, and examines its hosts."""
        return ["--resume", "auto", *(["--doctor"] if self.doctor else [])]

    def train_words(self, member: int = 0) -> list[str]:
        """`meshwright train` of a run, on a node that starts its ranks itself, without its other nodes."""
        words = ["meshwright", "train", self.run, "--out", self.folders()[member], *self.train_flags]
        return [*words, "--nproc", str(self.ranks), *self.all_flags()[member]]

    @property
    def meets_in_a_store(self) -> bool:
        """True if the run's nodes are too many to meet in its folder."""
        return self.nodes > FOLDER_HOSTS

    def meeting_words(self, first: str) -> list[str]:
        """The words of `meshwright train` by which nodes meet, of which `first` is the first one's name."""
        if self.nodes == 1:
            return []
        store = ["--rendezvous", f"{first}:{STORE_PORT}"] if self.meets_in_a_store else []
        return ["--nodes", self.nodes_range, *store]

    @property
    def nodes_range(self) -> str:
        """The nodes of a run as `--nodes` takes them."""
        return f"{self.least_nodes or self.nodes}:{self.nodes}"


def name_of(run: Path) -> str:
    """A job's name after its run file."""
    stem = run.name if run.is_dir() else run.stem
    name = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")
    return ("mw-" + name if not name[:1].isalpha() else name)[:40].strip("-")
