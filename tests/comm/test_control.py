"""The hosts of all ranks agree over the store: in bounded work, without leftovers, and never by hanging."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from meshwright.checkpoint.errors import BadCheckpointError, CheckpointError
from meshwright.comm import control as control_module
from meshwright.comm.control import Connections, Control, MissingRanksError, new_scope
from meshwright.comm.mesh import Mesh
from meshwright.spec import Layout, UserError
from ranks import RANKS, Ranks

EIGHT = Layout(dp=RANKS)


class LocalStore:
    """A store in this process that counts its operations."""

    def __init__(self, store: dist.Store | None = None) -> None:
        self.store = store or dist.HashStore()
        self.operations = 0

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.operations += 1
            return getattr(self.store, name)(*arguments)

        return call


def threads(size: int, timeout: float = 20.0) -> tuple[dist.Store, list[LocalStore], list[Control]]:
    """Controls of many ranks in one process, to be used from a thread each."""
    store = dist.HashStore()
    clients = [LocalStore(store) for _ in range(size)]
    limit = timedelta(seconds=timeout)
    return (
        store,
        clients,
        [
            Control("test", rank, size, lambda client=client: client, limit)
            for rank, client in enumerate(clients)
        ],
    )


def on_each(controls: list[Control], work: Any) -> list[Any]:
    """Result of `work` on each rank's thread, or the exception that it raised."""
    found: list[Any] = [None] * len(controls)

    def run(rank: int) -> None:
        try:
            found[rank] = work(controls[rank])
        except Exception as error:
            found[rank] = error

    started = [threading.Thread(target=run, args=(rank,)) for rank in range(len(controls))]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    return found


def every_operation(mesh: Mesh) -> dict[str, Any]:
    control = mesh.control
    found = {
        "gathered": control.gather({"rank": control.rank}),
        "broadcast": control.broadcast(["from", control.rank]),
        "any": [control.any(False), control.any(control.rank == 5)],
        "sum": control.sum([control.rank, 0.5]),
        "first": control.on_first(lambda: control.rank),
        "together": control.together(lambda: control.rank),
    }
    control.barrier()
    return found


def test_every_operation(ranks: Ranks) -> None:
    for size in (1, 2, RANKS):
        found = ranks.run(Layout(dp=size), every_operation)
        for rank, row in enumerate(found):
            assert row["gathered"] == ([{"rank": each} for each in range(size)] if rank == 0 else [])
            assert row["broadcast"] == ["from", 0]
            assert row["any"] == [False, size > 5]
            assert row["sum"] == [sum(range(size)), size / 2]
            assert (row["first"], row["together"]) == (0, rank)


def long_messages(mesh: Mesh) -> list[int]:
    control, length = mesh.control, 2 * control_module.PART_BYTES + 12345
    text = "é" * length if control.rank in (0, 3) else "x"  # six bytes each in JSON
    gathered = control.gather(text)
    sent = control.broadcast(text)
    assert sent == "é" * length
    return [len(each) for each in gathered]


def test_messages_longer_than_the_server_takes(ranks: Ranks) -> None:
    length = 2 * control_module.PART_BYTES + 12345
    assert ranks.run(EIGHT, long_messages)[0] == [length, 1, 1, length, 1, 1, 1, 1]


def failures(mesh: Mesh) -> list[str]:
    control = mesh.control
    raised: list[dict[int, Exception]] = [
        {3: UserError("three")},
        {6: BadCheckpointError("six"), 2: CheckpointError("two"), 5: CheckpointError("five")},
        {1: BadCheckpointError("one"), 4: UserError("four"), 7: KeyError("seven")},
        {0: BadCheckpointError("zero"), 7: BadCheckpointError("seven")},
    ]
    told = []
    for errors in raised:

        def work(errors: dict[int, Exception] = errors) -> None:
            if control.rank in errors:
                raise errors[control.rank]

        try:
            control.together(work)
        except Exception as error:
            own = errors.get(control.rank)
            assert own is None or error is own or error.__cause__ is own
            name = RuntimeError if isinstance(error, KeyError) else type(error)
            told.append(f"{name.__name__}: {str(error).removeprefix('KeyError: ')}")
    return told


def test_the_gravest_error_of_the_lowest_rank_is_everyones(ranks: Ranks) -> None:
    told = ["UserError: three", "CheckpointError: two", "RuntimeError: 'seven'", "BadCheckpointError: zero"]
    assert ranks.run(EIGHT, failures) == [told] * RANKS


def two_threads(mesh: Mesh) -> tuple[list[int], list[int]]:
    behind: list[int] = []

    def work() -> None:
        behind.extend(mesh.background.broadcast(step) for step in range(50))

    thread = threading.Thread(target=work)
    if mesh.control.rank != 0:
        thread.start()  # waits for rank 0, which talks on the other control first
    ahead = [mesh.control.broadcast(step) for step in range(50)]
    mesh.control.barrier()
    if mesh.control.rank == 0:
        thread.start()
    thread.join()
    return ahead, behind


def test_a_thread_that_waits_holds_up_no_other(ranks: Ranks) -> None:
    assert ranks.run(EIGHT, two_threads) == [(list(range(50)), list(range(50)))] * RANKS


def missing(mesh: Mesh, operation: str) -> tuple[str, float]:
    scope, limit = new_scope(), timedelta(seconds=1)
    control = Connections().control("short", RANKS, scope, limit)
    control.barrier()
    begun = time.monotonic()
    told = ""
    if control.rank not in (2, 6) and (operation != "broadcast" or control.rank != 0):
        try:
            {"broadcast": control.broadcast, "gather": control.gather, "any": control.any}[operation](False)
        except MissingRanksError as error:
            told = str(error)
    seconds = time.monotonic() - begun
    mesh.control.barrier()
    return told, seconds


@pytest.mark.parametrize("operation", ["any", "broadcast", "gather"])
def test_ranks_that_do_not_come_are_named(ranks: Ranks, operation: str) -> None:
    found = ranks.run(EIGHT, missing, operation)
    absent = {2, 6} | ({0} if operation == "broadcast" else set())
    waiting = {0} if operation == "gather" else set(range(RANKS)) - absent
    named = ", ".join(str(rank) for rank in sorted(absent))
    for rank, (told, seconds) in enumerate(found):
        if rank in waiting:
            assert told == f"{operation} (round 2 of short, 8 ranks): rank {named} did not arrive within 1 s"
            assert 0.9 < seconds < 10
        else:
            assert told == ""


def keys_of_rounds(mesh: Mesh) -> list[int]:
    control, store, counts = mesh.control, _get_default_store(), []
    for _ in range(3):
        for number in range(20):
            control.gather([number] * 100)
            control.broadcast(number)
            control.together(lambda: None)
            with pytest.raises(UserError):
                control.on_first(lambda: _fail())
        control.barrier()
        counts.append(store.num_keys())
        control.barrier()
        control.barrier()
    return counts


def _fail() -> None:
    raise UserError("no")


def test_the_store_does_not_grow(ranks: Ranks) -> None:
    for counts in ranks.run(EIGHT, keys_of_rounds):
        assert max(counts) - min(counts) <= 6  # what the barrier at hand has made already


@pytest.mark.parametrize("size", [31, 32, 33, 200])
def test_operations_of_a_rank_do_not_grow_with_the_world(size: int) -> None:
    store, clients, controls = threads(size)

    def rounds(control: Control) -> list[Any]:
        return [control.gather(control.rank), control.broadcast("x"), control.any(control.rank == size - 1)]

    found = on_each(controls, rounds)
    assert found[0] == [list(range(size)), "x", True]
    assert found[1:] == [[[], "x", True]] * (size - 1)
    assert {control.rounds for control in controls} == {3}
    blocks = -(-size // control_module.BLOCK)
    counts = [client.operations for client in clients]
    # Three rounds take 3, 3 and 3; who completes a round announces it, and clears the one before.
    assert sorted(counts)[size // 2] <= 9
    assert sum(counts) <= 9 * size + 3 * 2 * (blocks + 4) + 12
    assert store.num_keys() <= blocks + 3


def test_a_missing_rank_of_another_block_is_named() -> None:
    _, _, controls = threads(70, timeout=0.5)
    here = [control for control in controls if control.rank not in (0, 33, 69)]
    found = on_each(here, lambda control: control.any(True))
    assert {str(error) for error in found} == {
        "any (round 1 of test, 70 ranks): rank 0, 33, 69 did not arrive within 0.5 s"
    }


def test_a_process_alone_has_no_store() -> None:
    control = Control()
    assert (control.gather(1), control.broadcast(2), control.any(True), control.sum([3])) == (
        [1],
        2,
        True,
        [3],
    )
    with pytest.raises(KeyError):
        control.together(lambda: {}["nothing"])
    assert control.rounds == 0
