"""A rank's place in the world, read once from what torchrun sets, and the layout of a number of ranks."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshwright.spec import RunSpec, UserError
from meshwright.spec.load import Overrides, from_tree

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

AXES = ("dp", "replicate", "cp", "tp", "pp")
"""The axes whose product is the world size."""

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
"""The interface that a world on one machine keeps to."""

_M_MXFAST, _M_TRIM_THRESHOLD, _M_MMAP_MAX = 1, -1, -4  # <malloc.h>

_TUNABLES = "GLIBC_TUNABLES"
_NO_SMALL_CACHE = "glibc.malloc.tcache_count=0"

ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"
"""Variables that set torch's allocator on GPUs, whichever of them is given."""

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
    faults: Sequence[Mapping[str, Any]] = ()
    """Faults to inject (`recover/faults.py`)."""
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
    """The place that torchrun gave this process; None in a process that it did not start.

    Raises `UserError` for an environment that says only half of it, and in one of several tasks of Slurm that
    no torchrun has made ranks of one world.
    """
    given = os.environ if environment is None else environment
    world = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in given]
    if not world:
        tasks = given.get("SLURM_STEP_NUM_TASKS", "1")
        if tasks != "1":
            raise UserError(
                f"SLURM_STEP_NUM_TASKS: this step of Slurm has {tasks} tasks and RANK is not set, so each "
                f"would run alone; start one torchrun on each node with srun --ntasks-per-node 1"
            )
        return None
    if missing := [name for name in ("RANK", "WORLD_SIZE") if name not in given]:
        raise UserError(
            f"{world[0]}: {given[world[0]]!r} is given without {' and '.join(missing)}; start the ranks with "
            f"torchrun, which sets all of them, or unset {' and '.join(world)} to run as one process"
        )
    rank, world_size = _whole(given, "RANK"), _whole(given, "WORLD_SIZE")
    if not 0 <= rank < world_size:
        raise UserError(f"RANK: {rank} is not below WORLD_SIZE {world_size}; start the ranks with torchrun")
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


def limit_threads(local_world_size: int) -> int:
    """Share this machine's cores among its ranks; returns the number of threads that torch now uses."""
    import torch

    from meshwright.host import cores

    threads = max(1, cores() // local_world_size)
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


def init_process_group(place: Worker | None, device_type: str) -> ProcessGroup:
    """Join the world: gloo on the CPU, NCCL on CUDA devices, where hosts talk over the store only.

    NCCL's streams have high priority, so that a matrix product that fills the device does not delay messages.
    A GPU's memory is allocated in segments that grow, so that buffers of other sizes leave no gaps, unless
    the user has set the allocator.
    Without a `place`, or as the only rank that `meshwright` launched, the world is this process alone: its
    store is in its memory, and gloo, which always listens, does so on the loopback interface.
    """
    import torch
    import torch.distributed as dist

    from meshwright.parallel.process_groups import TIMEOUT

    if device_type not in ("cpu", "cuda"):
        raise UserError(f"device: {device_type!r} is not run by this version; it runs 'cpu' and 'cuda'")
    backend, device, options = "gloo", None, None
    if device_type == "cuda":
        if not any(name in os.environ for name in ALLOCATOR):  # read when CUDA first allocates
            os.environ[ALLOCATOR[0]] = "expandable_segments:True"
        local_rank, found = (place.local_rank if place else 0), torch.cuda.device_count()
        if local_rank >= found:
            raise UserError(f"--nproc: rank {local_rank} of this machine has no GPU; it has {found}")
        backend, device = "nccl", torch.device("cuda", local_rank)
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        torch.cuda.set_device(device)
    if place is None or (place.launched and place.world_size == 1):
        place = None
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
        store = dist.HashStore()  # type: ignore[attr-defined]
        world: dict[str, Any] = {"store": store, "rank": 0, "world_size": 1}
    else:
        address = _address(os.environ)
        world = {"init_method": "env://", "rank": place.rank, "world_size": place.world_size}
    try:
        dist.init_process_group(backend, timeout=TIMEOUT, device_id=device, pg_options=options, **world)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        if place is None:
            raise
        raise UserError(
            f"MASTER_ADDR, MASTER_PORT: rank {place.rank} of {place.world_size} could not meet the others at "
            f"{address} ({str(error).splitlines()[0].rstrip('.')}); give the address of rank 0's host and a "
            f"free port there, and see that all ranks are started"
        ) from error
    group = dist.group.WORLD
    assert group is not None
    return group


def _address(given: Mapping[str, str]) -> str:
    """Return host:port of rank 0 from MASTER_ADDR and MASTER_PORT. Raises `UserError` where one is wrong."""
    host, port = given.get("MASTER_ADDR", ""), given.get("MASTER_PORT", "")
    if not host:
        raise UserError(
            "MASTER_ADDR: it is not set; give the address of rank 0's host, or start with torchrun"
        )
    if not (port.isdecimal() and 0 < int(port) < 1 << 16):
        raise UserError(
            f"MASTER_PORT: {port!r} is not a port; give a free one of {host}, from 1 to 65535, or start with "
            f"torchrun"
        )
    return f"{host}:{port}"


@contextmanager
def process_group(place: Worker | None, device_type: str = "cpu") -> Iterator[ProcessGroup]:
    """The world's group for the length of a block.

    An error inside is recorded before the group goes down, so that it is older than the errors that its end
    brings about in the other ranks.
    """
    import torch.distributed as dist

    from meshwright.launch.failure import record

    group = init_process_group(place, device_type)
    try:
        yield group
        dist.barrier()  # no rank hangs up on one that still listens
    except BaseException as error:
        record(error)
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def with_own_modules(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a Python that finds modules where this process does, and in the same order.

    `python -m` looks in the working directory first: a folder `meshwright` there would be run in the place of
    the package that started it.
    """
    places = os.pathsep.join(place or os.getcwd() for place in sys.path)
    return {**environment, "PYTHONSAFEPATH": "1", "PYTHONPATH": places}
