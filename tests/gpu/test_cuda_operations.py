"""Beside training on a CUDA device: snapshots, checkpoints, the log of collectives, processors of a rank."""

from __future__ import annotations

import os
import time
from pathlib import Path

import cuda_runs
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.checkpoint import CheckpointStore
from meshwright.checkpoint.slots import Slot
from meshwright.checkpoint.snapshots import Snapshots
from meshwright.comm.collective_log import CollectiveLog
from meshwright.comm.collectives import start_all_reduce
from meshwright.comm.control import Control
from meshwright.comm.heartbeat import BYTES, Beat, Heartbeat
from meshwright.comm.mesh import Axis
from meshwright.comm.traffic_counter import TrafficCounter
from meshwright.rank.flight_recorder import first_uncompleted
from meshwright.rank.gpu import bind_to_node, bound_node, numa_cpus
from meshwright.train import state
from meshwright.train.step import Trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
DEVICE = torch.device("cuda", 0)
BUSY = 2_000_000_000
"""Cycles of a kernel that keeps the device busy for about a second."""


def test_a_snapshot_is_of_its_step_though_training_goes_on() -> None:
    """The copies are behind a kernel of a second; the update after them changes all that is copied."""
    spec = cuda_runs.spec_of(train__batch_tokens=512)
    trainer = Trainer(spec, cuda_runs.mesh_of(spec))
    trainer.initialise()
    slots, warnings = [os.memfd_create("slot") for _ in range(2)], list[str]()
    kept = Snapshots([slots], Control(), 1, lambda: 1 << 40, warnings)
    kept.save(0, state.tensors(trainer), lambda: {"step": 0})  # maps and pins the memory
    kept.settle()
    expected = {name: tensor.to_local().cpu().clone() for name, tensor in _local(trainer).items()}
    torch.cuda._sleep(BUSY)
    begun = time.perf_counter()
    kept.save(1, state.tensors(trainer), lambda: {"step": 1})
    issued = time.perf_counter() - begun
    kept.fence()
    for tensor in _local(trainer).values():
        tensor.to_local().add_(1)
    kept.settle()
    assert issued < 0.5 and not warnings and max(Slot(slot).head().step for slot in slots) == 1
    again = Snapshots([slots], Control(), 1, lambda: 1 << 40, warnings)
    again.load(1, state.tensors(trainer), lambda _: None)
    for name, tensor in _local(trainer).items():
        assert torch.equal(tensor.to_local().cpu(), expected[name])


def test_a_checkpoint_is_of_its_step_though_training_goes_on(tmp_path: Path) -> None:
    """As a snapshot: the copies are behind a kernel of a second, and the update comes after them."""
    spec = cuda_runs.spec_of(train__batch_tokens=512)
    trainer = Trainer(spec, cuda_runs.mesh_of(spec))
    trainer.initialise()
    store = CheckpointStore(tmp_path, keep=2)
    store.save(0, state.tensors(trainer), {"step": 0}, asynchronous=True)  # pins the memory
    store.wait()
    expected = {name: tensor.to_local().cpu().clone() for name, tensor in _local(trainer).items()}
    torch.cuda._sleep(BUSY)
    begun = time.perf_counter()
    store.save(1, state.tensors(trainer), {"step": 1}, asynchronous=True)
    issued = time.perf_counter() - begun
    store.fence()
    for tensor in _local(trainer).values():
        tensor.to_local().add_(1)
    store.wait()
    assert issued < 0.5 and store.published == 1
    store.load(1, state.tensors(trainer))
    store.close()
    for name, tensor in _local(trainer).items():
        assert torch.equal(tensor.to_local().cpu(), expected[name])


def _local(trainer: Trainer) -> dict[str, Tensor]:
    """The tensors of the state that are DTensors on the device."""
    return {name: x for name, x in state.tensors(trainer).items() if hasattr(x, "to_local")}


def test_what_has_ended_is_seen_while_the_host_goes_on(tmp_path: Path) -> None:
    """NCCL's wait returns at once; a kernel before the collective keeps the device from it."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=DEVICE)
    try:
        memory = memoryview(bytearray(BYTES))
        heartbeat = Heartbeat(memory)
        log: CollectiveLog = heartbeat.publish_collectives()
        axis = Axis("world", 2, 0, dist.group.WORLD, DEVICE, TrafficCounter(heartbeat))
        tensor = torch.ones(1024, device=DEVICE)
        start_all_reduce(tensor, axis).wait()
        torch.cuda.synchronize()
        log.publish()
        (group,) = Beat.of(memory, 0).groups
        assert (group.started, group.reached, group.finished) == (1, 1, 1)
        torch.cuda._sleep(BUSY)
        start_all_reduce(tensor, axis).wait()
        log.publish()
        (group,) = Beat.of(memory, 0).groups
        assert (group.started, group.reached, group.finished) == (2, 1, 1)
        torch.cuda.synchronize()
        log.publish()
        (group,) = Beat.of(memory, 0).groups
        assert (group.started, group.reached, group.finished) == (2, 2, 2)
        dump = tmp_path / "rank_0"
        dump.write_bytes(torch._C._distributed_c10d._dump_nccl_trace())  # type: ignore[attr-defined]
        time.sleep(2)  # NCCL's watchdog looks itself
        first_uncompleted(dump)
    finally:
        dist.destroy_process_group()


def test_a_rank_is_bound_to_the_node_of_its_gpu() -> None:
    before = os.sched_getaffinity(0)
    try:
        bind_to_node(DEVICE)
        near = numa_cpus(DEVICE)
        if near is not None and near[1] & before:
            assert os.sched_getaffinity(0) == near[1] & before and bound_node(DEVICE) == near[0]
        else:
            assert os.sched_getaffinity(0) == before
    finally:
        os.sched_setaffinity(0, before)
