"""Options of `launch`: the size of a job, what it runs in, and what only one scheduler takes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, TypedDict

from meshwright.api.options import Option, choice, folder_name, whole


def _hosts(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (host.strip() for host in text.split(","))))


def _time(text: str) -> int:
    """Read a limit as minutes, HH:MM:SS or D-HH:MM:SS, in seconds."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)", text)
    if match is None and not re.fullmatch(r"[1-9]\d{0,8}", text):
        raise ValueError("minutes, HH:MM:SS or D-HH:MM:SS are needed, such as 24:00:00")
    days, hours, minutes, seconds = (
        (int(part or 0) for part in match.groups()) if match else (0, 0, int(text), 0)
    )
    return max(1, days * 86400 + hours * 3600 + minutes * 60 + seconds)


def _pair(separator: str, needed: str) -> Callable[[str], tuple[str, str]]:
    def read(text: str) -> tuple[str, str]:
        name, found, value = text.partition(separator)
        if not (name and found and value):
            raise ValueError(f"{needed} is needed")
        return name, value

    return read


def _values(text: str) -> tuple[str, tuple[str, ...]]:
    """Read a key of a sweep with its values, which have semicolons between them where one has a comma."""
    key, equals, values = text.partition("=")
    found = tuple(part.strip() for part in values.split(";" if ";" in values else ","))
    if not (key and equals) or not all(found):
        raise ValueError("a key with its values is needed, such as train.lr=1e-3,3e-4")
    return key, found


class LaunchOptions(TypedDict, total=False):
    """How a run becomes a job; see `launch`."""

    # fmt: off
    out: Annotated[Path | None, Option(
        "the run's folder, as all nodes see it; default a new one under runs/", "DIR", folder_name)]
    nodes: Annotated[str | None, Option(
        "nodes; with a range the run goes on as nodes are lost and come", "N|MIN:MAX", str)]
    gpus_per_node: Annotated[int | None, Option(
        "GPUs, and ranks, of a node; default those of --cluster, or 8", "N", whole(1))]
    cluster: Annotated[str | None, Option(
        "hardware to plan a missing layout for, and on Slurm the time", "NAME|FILE", str)]
    gpus: Annotated[int | None, Option(
        "GPUs in all, to plan a missing layout for; default one node", "N", whole(1))]
    cpu: Annotated[bool, Option("ask for no GPUs")]
    cpus_per_rank: Annotated[int, Option("cores of each rank", "N", whole(1), 8)]
    time: Annotated[int | None, Option(
        "most time of a start; default by --cluster, or 24:00:00 on Slurm", "HH:MM:SS", _time)]
    name: Annotated[str | None, Option("name of the job; default that of RUN", "NAME", str)]
    image: Annotated[str | None, Option(
        "container image: of pyxis on Slurm, of pods, of SkyPilot's nodes", "IMAGE", str)]
    volume: Annotated[Sequence[tuple[str, str]] | None, Option(
        "a folder, a claim or a volume, and where the run sees it; may be repeated", "NAME:PATH",
        _pair(":", "NAME:PATH"), repeated=True)]
    env: Annotated[Sequence[tuple[str, str]] | None, Option(
        "a variable of the run's environment; may be repeated", "NAME=VALUE", _pair("=", "NAME=VALUE"),
        repeated=True)]
    option: Annotated[Sequence[str] | None, Option(
        "a further option of the scheduler, such as partition=gpu; may be repeated", "NAME=VALUE", str,
        repeated=True)]
    no_doctor: Annotated[bool, Option("do not examine the nodes before the run starts on them")]
    restarts: Annotated[int, Option("most times that the job is started again", "N", whole(0), 20)]
    sweep: Annotated[Sequence[tuple[str, tuple[str, ...]]] | None, Option(
        "a run for each value; for all combinations where it is repeated", "KEY=A,B", _values,
        repeated=True)]
    at_once: Annotated[int | None, Option("most runs of a sweep at a time, on Slurm", "N", whole(1))]
    ranks_by: Annotated[str, Option(
        "what starts the ranks on Slurm: srun, torchrun", "NAME", choice("srun", "torchrun"), "srun")]
    kind: Annotated[str, Option(
        "object of Kubernetes: trainjob, jobset", "NAME", choice("trainjob", "jobset"), "trainjob")]
    namespace: Annotated[str | None, Option("namespace of Kubernetes", "NAME", str)]
    service_account: Annotated[str | None, Option("service account of pods", "NAME", str)]
    accelerator: Annotated[str | None, Option("GPU as SkyPilot calls it, such as H100", "NAME", str)]
    hosts: Annotated[tuple[str, ...] | None, Option("hosts for ssh", "A,B", _hosts)]
    address: Annotated[str | None, Option("address of Ray's dashboard", "URL", str)]
    dry_run: Annotated[bool, Option("print what would be submitted, and submit nothing")]
    # fmt: on
