"""One pool of gloo ranks for a whole test session: a distributed test is a function that runs on it.

A case costs milliseconds instead of the seconds that starting processes takes. The function and its arguments
are pickled to the ranks, so it stands at the top of a test module. The ranks are forks of one process that
has imported what each of them needs: torch is imported once, and not once a rank.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import queue
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import distributed_c10d

from meshwright.comm.mesh import Mesh, build_mesh
from meshwright.profile import links
from meshwright.rank.child import tie_to_parent
from meshwright.schedule import schedule_of
from meshwright.spec import Layout, RunSpec
from meshwright.spec.other_models import other_models
from nccl_rules import InOrderGroups, PoolGroups, install
from small import measure_peak_quickly

RANKS = 8
WAIT = timedelta(seconds=90)
"""For another rank, in a collective."""
PATIENCE_SECONDS = 240.0
IMPORTED = ["meshwright.train.loop", "meshwright.verify.verify", "torch._inductor.compile_fx", "pytest"]
"""Modules that the ranks would import one by one, some of them at the first step or compilation."""


def forks() -> Any:
    """A context of multiprocessing whose processes are forks of one that has imported torch."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context


def _serve(rank: int, size: int, port: int, stacks: Path, inbox: Any, outbox: Any) -> None:
    # The server of forks ends once the session has, and with it its forks: these must not hold it open.
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    tie_to_parent(os.getppid())
    torch.set_num_threads(1)
    gc.freeze()  # what was imported lives as long as the rank: collections need not look through it
    _share_one_device()
    measure_peak_quickly()
    at = stacks.open("w")
    faulthandler.register(signal.SIGUSR1, file=at, all_threads=True)
    store = dist.TCPStore("localhost", port, timeout=WAIT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=WAIT)
    meshes: dict[tuple[object, ...], Mesh | None] = {}
    install()
    links.Groups = partial(PoolGroups, timeout=WAIT)  # type: ignore[misc, assignment]
    of_rules = {"gloo": PoolGroups("cpu", WAIT), "nccl": InOrderGroups("cpu")}
    while (job := inbox.get()) is not None:
        number, layout, function, arguments, rules = job
        try:
            heads = _kv_heads(arguments)
            experts = any(getattr(model, "moe", None) is not None for model in _models(arguments))

            def mesh_of(
                layout: Layout, heads: int, experts: bool, islands: bool = False, rules: str = rules
            ) -> Mesh | None:
                key = (layout.pp, layout.replicate, layout.dp, layout.cp, layout.tp)
                key += (
                    layout.kv_copies(heads),
                    layout.ulysses(heads),
                    layout.ep,
                    layout.etp,
                    experts,
                    islands,
                )
                key += (schedule_of(layout, 1).rank_of, rules)
                if key not in meshes:
                    kinds = of_rules[rules], experts, islands
                    meshes[key] = build_mesh(layout, torch.device("cpu"), heads, *kinds)
                return meshes[key]

            islands = any(getattr(argument, "step_groups", 1) > 1 for argument in arguments)
            mesh = mesh_of(layout, heads, experts, islands)
            runs = filter(_is_run, arguments)
            for name, other in (named for run in runs for named in other_models(run).items()):
                own = mesh_of(other.layout, other.model.kv_heads, other.model.moe is not None)
                if mesh is not None and own is not None:
                    mesh = replace(mesh, others={name: own.with_layout(other.layout)})
            result = None
            if mesh is not None:
                mesh.wire.clear()
                made = distributed_c10d._world.group_count
                result = function(mesh.with_layout(layout), *arguments)
                if layout.world_size < size and distributed_c10d._world.group_count != made:
                    raise AssertionError("groups are made by all ranks of the pool, or the next ones hang")
            outbox.put((number, rank, None, result))
        except Exception:
            outbox.put((number, rank, traceback.format_exc(), None))
    dist.destroy_process_group()


def _share_one_device() -> None:
    """Let all gloo groups of this process share a thread that listens.

    By default each has its own, which wakes a hundred times a second; a session makes a hundred groups.
    """
    gloo = distributed_c10d.ProcessGroupGloo
    device = gloo.create_default_device()

    class Kind(type):
        def __call__(cls, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
            options = gloo._Options()
            options._devices, options._timeout, options._threads = [device], timeout, 2
            return gloo(store, rank, size, options)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, gloo)

        def __getattr__(cls, name: str) -> Any:
            return getattr(gloo, name)

    class Shared(metaclass=Kind):
        pass

    distributed_c10d.ProcessGroupGloo = Shared  # type: ignore[misc, assignment]


def _kv_heads(arguments: tuple[Any, ...]) -> int:
    """Key-value heads of the spec, or the case, among a function's arguments; else enough for any layout."""
    return next((model.kv_heads for model in _models(arguments) if hasattr(model, "kv_heads")), RANKS)


def _models(arguments: tuple[Any, ...]) -> list[Any]:
    return [getattr(argument, "model", argument) for argument in arguments]


def _is_run(argument: Any) -> bool:
    return isinstance(argument, RunSpec)


class RanksFailedError(Exception):
    """A function failed on the pool; the message holds the rank's traceback."""


class Ranks:
    """Persistent gloo ranks; `run` calls a function on the mesh of a layout, on each of its ranks."""

    def __init__(self, size: int = RANKS) -> None:
        self._size = size
        self._processes: list[Any] = []
        self._number = 0

    def _start(self) -> None:
        context = forks()
        self._folder = tempfile.TemporaryDirectory()
        self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self._outbox = context.Queue()
        self._inboxes = [context.Queue() for _ in range(self._size)]
        self._processes = [
            context.Process(
                target=_serve,
                args=(rank, self._size, self._store.port, self._stacks(rank), inbox, self._outbox),
                daemon=True,
            )
            for rank, inbox in enumerate(self._inboxes)
        ]
        for process in self._processes:
            process.start()

    def run(
        self, layout: Layout, function: Callable[..., Any], *arguments: Any, rules: str = "gloo"
    ) -> list[Any]:
        """Results of `function(mesh, *arguments)` in the order of ranks. A failure restarts the pool.

        With `rules="nccl"` the mesh's device groups run under NCCL's rules (`nccl_rules.py`).
        """
        if not self._processes:
            self._start()
        self._number += 1
        for inbox in self._inboxes:
            inbox.put((self._number, layout, function, arguments, rules))
        results: dict[int, Any] = {}
        failed: str | None = None
        end = time.monotonic() + PATIENCE_SECONDS
        while len(results) < self._size and time.monotonic() < end:
            try:
                number, rank, error, result = self._outbox.get(timeout=1)
            except queue.Empty:
                if not all(process.is_alive() for process in self._processes):
                    failed = failed or "a rank has died"
                    break
                continue
            if number != self._number:
                continue
            results[rank] = result
            if error is not None and failed is None:
                failed = f"rank {rank}:\n{error}"
                # The others may wait for it in a collective; where operations keep their order they say on
                # what.
                end = min(end, time.monotonic() + 5)
        if failed is not None or len(results) < self._size:
            if len(results) < self._size:
                silent = [rank for rank in range(self._size) if rank not in results]
                failed = failed or f"no answer in {PATIENCE_SECONDS} s{self._where(silent)}"
            if len(results) < self._size or rules == "nccl":  # its groups may be stuck
                self.close()
            raise RanksFailedError(failed)
        return [results[rank] for rank in range(layout.world_size)]

    def _where(self, silent: list[int]) -> str:
        """Stacks of the threads of ranks that do not answer."""
        for rank in silent:
            if self._processes[rank].is_alive():
                os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(2)
        return "".join(f"\n\nrank {rank}:\n{self._stacks(rank).read_text()}" for rank in silent)

    def _stacks(self, rank: int) -> Path:
        """Where a rank writes what its threads are at when it gets SIGUSR1."""
        return Path(self._folder.name) / f"stacks.{rank}"

    def close(self) -> None:
        """End the ranks."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes = []
