"""The GPU of a rank, and the processors near it, with properties and a folder /sys that the tests set."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.rank.gpu import bind_to_node, bound_node, device_index, numa_cpus, refuse_shared
from meshwright.spec import UserError

DEVICE = torch.device("cuda", 0)
PLACE = {"pci_domain_id": 0, "pci_bus_id": 0x4B, "pci_device_id": 0}


def see(monkeypatch: pytest.MonkeyPatch, *uuids: str, **properties: Any) -> None:
    """Let this process see these GPUs."""
    found = [SimpleNamespace(uuid=uuid, **properties) for uuid in uuids]
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(found))
    monkeypatch.setattr(
        "torch.cuda.get_device_properties", lambda device: found[getattr(device, "index", device)]
    )


@pytest.mark.parametrize(("visible", "local_rank", "index"), [(1, 0, 0), (1, 5, 0), (8, 5, 5), (2, 1, 1)])
def test_the_only_gpu_is_device_0_whatever_the_local_rank(
    monkeypatch: pytest.MonkeyPatch, visible: int, local_rank: int, index: int
) -> None:
    see(monkeypatch, *map(str, range(visible)))
    assert device_index(local_rank) == index


@pytest.mark.parametrize("visible", [0, 2])
def test_a_rank_beyond_several_gpus_is_refused(monkeypatch: pytest.MonkeyPatch, visible: int) -> None:
    see(monkeypatch, *map(str, range(visible)))
    with pytest.raises(UserError, match=f"rank 2 of this machine has no GPU; it has {visible}"):
        device_index(2)


def test_ranks_with_gpus_of_their_own_start(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    for rank in range(4):
        see(monkeypatch, f"GPU-{rank}")
        refuse_shared(store, rank, device_index(rank))
        refuse_shared(store, rank, 0)  # asked again


def test_two_ranks_with_one_gpu_are_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    see(monkeypatch, "GPU-0")
    refuse_shared(store, 0, device_index(0))
    with pytest.raises(UserError) as refused:
        refuse_shared(store, 1, device_index(1))
    assert re.match(
        r"LOCAL_RANK: rank 1 has GPU GPU-0 of .*, the only one that it sees, as rank 0 has; give each rank a "
        r"GPU of its own",
        str(refused.value),
    )


@pytest.mark.parametrize(
    ("name", "value"), [("NCCL_MULTI_RANK_GPU_ENABLE", "1"), ("NCCL_HOSTID", "a host for each rank")]
)
def test_ranks_may_share_a_gpu_where_nccl_is_told_to(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    see(monkeypatch, "GPU-0")
    store = dist.HashStore()
    for rank in range(2):
        refuse_shared(store, rank, device_index(rank))


# NUMA ---------------------------------------------------------------------------------------------------


def sysfs(folder: Path, node: str, cpus: str = "") -> Path:
    """A folder /sys of a host whose GPU is at a node of these processors."""
    place = folder / "bus/pci/devices/0000:4b:00.0"
    place.mkdir(parents=True)
    (place / "numa_node").write_text(f"{node}\n")
    if cpus:
        (folder / f"devices/system/node/node{node}").mkdir(parents=True)
        (folder / f"devices/system/node/node{node}/cpulist").write_text(f"{cpus}\n")
    return folder


class Affinity:
    """Stands for that of this thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, allowed: set[int]) -> None:
        self.cpus, self.set = allowed, list[set[int]]()
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(self.cpus))
        monkeypatch.setattr(os, "sched_setaffinity", self._set)

    def _set(self, _thread: int, cpus: set[int]) -> None:
        self.set.append(cpus)
        self.cpus = cpus


def test_a_rank_runs_on_the_processors_of_its_gpus_node(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    see(monkeypatch, "GPU-0", **PLACE)
    root, affinity = sysfs(tmp_path, "1", "4-7,12-15,20"), Affinity(monkeypatch, {0, 5, 6, 12, 20, 30})
    assert numa_cpus(DEVICE, root) == (1, {4, 5, 6, 7, 12, 13, 14, 15, 20})
    assert bound_node(DEVICE, root) is None
    bind_to_node(DEVICE, root)
    assert affinity.set == [{5, 6, 12, 20}]
    assert bound_node(DEVICE, root) == 1


@pytest.mark.parametrize(("node", "cpus"), [("-1", ""), ("0", "8-11"), ("2", "")])
def test_a_rank_stays_where_it_is_without_a_node_or_processors_of_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, node: str, cpus: str
) -> None:
    see(monkeypatch, "GPU-0", **PLACE)
    root, affinity = sysfs(tmp_path, node, cpus), Affinity(monkeypatch, {0, 1})
    bind_to_node(DEVICE, root)
    assert affinity.set == [] and bound_node(DEVICE, root) is None


def test_a_torch_that_does_not_tell_where_a_gpu_is_binds_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    see(monkeypatch, "GPU-0")
    affinity = Affinity(monkeypatch, {0, 1})
    bind_to_node(DEVICE, sysfs(tmp_path, "0", "0"))
    assert affinity.set == []
