"""A rank's place in the world, from whoever has started it, and the layout of a number of ranks."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from meshwright.cpp_library import cache_folder
from meshwright.rank.joined_group import joined_world, place_on_host
from meshwright.rank.launchers import RANK_VARIABLES, launcher_of, refuse_worlds_apart
from meshwright.spec import RunSpec, UserError
from meshwright.spec.load import Overrides, from_tree

AXES = ("dp", "replicate", "cp", "tp", "pp")
"""The axes whose product is the world size."""

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
"""The interface that a world on one machine keeps to."""

MOST_THREADS = 1024
"""More threads than any processor has cores, of which a system may not be able to make more."""

_M_MXFAST, _M_TRIM_THRESHOLD, _M_MMAP_MAX = 1, -1, -4  # <malloc.h>

_TUNABLES = "GLIBC_TUNABLES"
_NO_SMALL_CACHE = "glibc.malloc.tcache_count=0"

SUPERVISOR = "MESHWRIGHT_SUPERVISOR"
"""Set in ranks that have a supervisor, to a `Supervision` as JSON: they leave it to show their errors."""


@dataclass(frozen=True)
class Supervision:
    """Memory and facts that a supervisor shares with a rank of its host.

    `generation` counts the starts of the run's ranks from 0, `began` is when the supervisor began
    (`time.monotonic`). `heartbeats` is the descriptor of the memory in which the rank's heartbeat lies, at
    its local rank, and `snapshots` are those of two slots for snapshots of each rank of the host, and on one
    of several hosts of two more for those of a rank of another.
    """

    generation: int
    began: float
    heartbeats: int
    snapshots: Sequence[Sequence[int]] = ()
    lease_seconds: float = 60.0
    """Time after which a host that holds the run's lease and gives no sign of life has lost it."""
    flight_recorder: str = ""
    """The folder of files of NCCL's flight recorder (`rank/flight_recorder.py`)."""
    faults: Sequence[Mapping[str, Any]] = ()
    """Faults to inject (`chaos/faults.py`)."""
    hits: int | None = None
    """The descriptor of the memory that says which of them have hit; None without faults."""

    @classmethod
    def given(cls) -> Supervision | None:
        """Return this process's, or None if it has no supervisor."""
        text = os.environ.get(SUPERVISOR)
        return None if text is None else cls(**json.loads(text))


@dataclass(frozen=True)
class Worker:
    """This process's rank among `world_size`, and among the `local_world_size` of its machine.

    `launched` tells that `meshwright` itself is the parent, and not a torchrun of the user's.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    launched: bool = False


def worker(environment: Mapping[str, str] | None = None) -> Worker | None:
    """The place of this process among the ranks of a world; None where it is no rank, or a world alone.

    It is that of the process group which this process has joined, as in a worker of Ray Train, or else what
    the variables of torchrun or of a supervisor say (RANK, WORLD_SIZE), and without those what srun, mpirun
    and others do (`rank/launchers.py`). Raises `UserError` for an environment that says only half of it, and
    as `refuse_worlds_apart` does.
    """
    given = os.environ if environment is None else environment
    place = _placed_by_variables(given)
    joined = joined_world() if environment is None else None
    if joined is None or (place is not None and (place.rank, place.world_size) == joined):
        return place
    return Worker(*joined, *place_on_host(*joined)) if joined[1] > 1 else None


def _placed_by_variables(given: Mapping[str, str]) -> Worker | None:
    world = [name for name in RANK_VARIABLES if name in given]
    if not world:
        started = launcher_of(given)
        return None if started is None else Worker(*started[1])
    if missing := [name for name in ("RANK", "WORLD_SIZE") if name not in given]:
        raise UserError(
            f"{world[0]}: {given[world[0]]!r} is given without {' and '.join(missing)}; start the ranks with "
            f"torchrun, which sets all of them, or unset {' and '.join(world)} to run as one process"
        )
    rank, world_size = _whole(given, "RANK"), _whole(given, "WORLD_SIZE")
    if not 0 <= rank < world_size:
        raise UserError(f"RANK: {rank} is not below WORLD_SIZE {world_size}; start the ranks with torchrun")
    if SUPERVISOR not in given:  # hosts of `--nodes` may be tasks, of which some have not come
        refuse_worlds_apart(given)
    return Worker(
        rank=rank,
        world_size=world_size,
        local_rank=_whole(given, "LOCAL_RANK", rank),
        local_world_size=_whole(given, "LOCAL_WORLD_SIZE", world_size),
        launched=SUPERVISOR in given,
    )


def _whole(given: Mapping[str, str], name: str, default: int = 0) -> int:
    text = given.get(name, str(default))
    if not text.isdecimal():
        raise UserError(f"{name}: {text!r} is not a number; start the ranks with torchrun, which sets it")
    return int(text)


def count_devices() -> int:
    """CUDA devices that are visible here, or else the cores that this process may use."""
    from meshwright.host import cores
    from meshwright.profile.machine import gpus

    return gpus() or cores()


def sets_layout(tree: Mapping[str, Any], overrides: Overrides = ()) -> bool:
    """True if the run file or the flags give the size of any axis."""
    table = tree.get("layout")
    given = set(table) if isinstance(table, Mapping) else set()
    given |= {key.removeprefix("layout.") for key, _ in overrides if key.startswith("layout.")}
    return not given.isdisjoint(AXES)


def fit_layout(tree: Mapping[str, Any], overrides: Overrides, nproc: int) -> Overrides:
    """The flags, with `layout.dp = nproc` added where neither the run file nor a flag sizes any axis."""
    if sets_layout(tree, overrides):
        return overrides
    return [*overrides, ("layout.dp", str(nproc))]


def resolve(
    tree: dict[str, Any], overrides: Overrides = (), nproc: str | int | None = None, source: str = ""
) -> RunSpec:
    """The spec of a run on `nproc` ranks: a number, 'auto', or None for what its layout says.

    A number fills an unset layout's `dp`, and must else be its world size. 'auto' takes the layout's world
    size; where no axis is set, the most of this machine's devices that share the batch evenly.
    Raises `UserError` when spec and number disagree.
    """
    if nproc is None or (nproc == "auto" and sets_layout(tree, overrides)):
        return from_tree(tree, overrides, source)
    if nproc != "auto":
        ranks = nproc_of(nproc)
        return from_tree(tree, fit_layout(tree, overrides, ranks), source, ranks)
    alone = from_tree(tree, fit_layout(tree, overrides, 1), source)
    for ranks in range(count_devices(), 1, -1):
        share, rest = divmod(alone.shared_sequences, ranks)
        if rest == 0 and share % (alone.layout.micro_batch or 1) == 0:
            return from_tree(tree, fit_layout(tree, overrides, ranks), source)
    return alone


def resized(spec: RunSpec, ranks: int) -> RunSpec | None:
    """Return the run on another number of ranks, its data axes resized; None if its layout does not allow it.

    With `layout.replicate`, replicas come and go and `layout.dp` stays if it can, since its shards must fit
    into a device's memory; else `layout.dp` changes.
    """
    layout = spec.layout
    data, rest = divmod(ranks, layout.world_size // (layout.dp * layout.replicate))
    if rest or not data:
        return None
    replicate, rest = divmod(data, layout.dp)
    keeps_dp = layout.replicate > 1 and replicate and not rest
    sizes = {"replicate": replicate} if keeps_dp else {"dp": data, "replicate": 1}
    tree = spec.to_json()
    tree["layout"] |= sizes
    try:
        return from_tree(tree)
    except UserError:  # such as a batch that so many data ranks cannot share
        return None


def nproc_of(given: str | int) -> int:
    """Return a number of processes; 'auto' is one for each device of this machine. Raises `UserError`."""
    if given == "auto":
        return count_devices()
    text = str(given)
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"--nproc: {text!r} is not a number of processes; give 1 or more, or 'auto'")
    return int(text)


def limit_threads(local_world_size: int, environment: Mapping[str, str] | None = None) -> int:
    """Set the number of threads that torch uses on processors, and return it.

    It is OMP_NUM_THREADS where the user has set that, and else this machine's cores shared by its ranks.
    """
    import torch

    from meshwright.host import cores

    given = os.environ if environment is None else environment
    asked = given.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # a list has a number for each level
    by_torchrun = asked == "1" and "TORCHELASTIC_RUN_ID" in given  # its default, for ranks of GPUs
    own = int(asked) if asked.isdecimal() and not by_torchrun else 0
    threads = min(own, MOST_THREADS) or max(1, cores() // local_world_size)
    torch.set_num_threads(threads)
    return threads


def keep_freed_memory() -> None:
    """Let the C library keep what is freed for what is allocated next (glibc; others do as they do).

    Else it gives large buffers back to the kernel, which hands out zeroed pages anew in each microbatch: that
    took up to a third of a step on processors. A process that has made this call keeps the most that it ever
    held, for which `without_small_caches` matters.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)
        mallopt(_M_MXFAST, 0)


def keep_compiled_code(environment: MutableMapping[str, str] | None = None) -> None:
    """Let torch's compiler keep its code in `~/.cache/meshwright/compiled`, for ranks of this host and for
    later runs.

    Torch's own place is a temporary folder. A folder that TORCHINDUCTOR_CACHE_DIR names is left to it, and so
    is torch's own where a user has no home folder that can be written.
    """
    given = os.environ if environment is None else environment
    with suppress(OSError, RuntimeError):
        folder = cache_folder().with_name("compiled")
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            given.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))


def without_small_caches(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a process whose C library (glibc) is to join whatever is freed at once.

    Torch's buffers are aligned, for which glibc cuts a few bytes off both ends of a larger piece. It keeps
    those in caches of small pieces, from where they go to small objects: then the piece is too short for a
    buffer of the same size, and the memory of a rank grew with each step to twice what it held. A process can
    turn off one of two kinds of caches by itself, as `keep_freed_memory` does.
    """
    given = environment.get(_TUNABLES, "")
    tunables = given if "tcache_count" in given else ":".join(filter(None, (given, _NO_SMALL_CACHE)))
    return {**environment, _TUNABLES: tunables}


def with_own_modules(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a Python that finds modules where this process does, and in the same order.

    `python -m` looks in the working directory first: a folder `meshwright` there would be run in the place of
    the package that started it. Places of PYTHONPATH that this process did not start with come last.
    """
    places = [place or os.getcwd() for place in sys.path]
    places += filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    return {**environment, "PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(dict.fromkeys(places))}
