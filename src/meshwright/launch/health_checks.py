"""The program of a health probe's processes: `python -m meshwright.launch.health_checks SPEC FOLDER NOTES`.

Each takes the place of a local rank: it looks at free memory and, as the first one, at the run's folder,
computes a product whose result is known on the rank's device, and joins one collective of all local ranks.
SPEC is the run as JSON, FOLDER the run's, and into NOTES each process writes what it is doing.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.doctor.shared_folder import files, nearest
from meshwright.kernels.half_precision_products import products_in_fp32
from meshwright.parallel.precision import formats
from meshwright.planner.memory.states import states
from meshwright.profile.machine import free_memory
from meshwright.rank.child import set_up_output
from meshwright.rank.env import Worker, worker
from meshwright.rank.world import device_of
from meshwright.runs.record import read_run
from meshwright.spec import RunSpec
from meshwright.spec.errors import UnhealthyHostError
from meshwright.spec.load import from_tree
from meshwright.units import gigabytes

SIZE = 1024
"""Rows and columns of the product."""
LARGEST = {torch.float16: 15}
"""Largest whole numbers of its operands by format; others have `LARGEST_OTHER`. Any sum of their products is
a whole number below 2^24, and in fp16 each that comes up is below the largest number of the format."""
LARGEST_OTHER = 127
TILES, ROUNDS = {"cpu": 1, "cuda": 8}, 4
"""Copies of the operands side by side, which keep all multiprocessors busy, and products in turn."""
GIVEN_BACK_S = 5.0
"""The memory of a device may take so long to come back from processes that have ended."""


def main() -> None:
    """Make the checks as one of the host's processes; the first that fails is raised."""
    set_up_output()
    spec, folder, notes = from_tree(json.loads(sys.argv[1])), Path(sys.argv[2]), Path(sys.argv[3])
    place = worker()
    assert place is not None  # the supervisor has started it as a rank
    note = notes / str(place.local_rank)
    for_products = torch.backends.cuda.matmul  # else a kernel on GPUs may round the sums that it adds up
    for_products.allow_bf16_reduced_precision_reduction = False
    for_products.allow_fp16_reduced_precision_reduction = False
    note.write_text("the run's folder")
    if place.local_rank == 0:
        check_folder(folder)
    note.write_text("the start of the device and of its process group")
    with device_of() as device:
        note.write_text("memory")
        check_device(device, folder, place)
        check_memory(spec, device, place)
        note.write_text("a product")
        check_product(formats(spec.precision).compute, device, place)
        note.write_text("a collective")
        check_collective(device, place)


def check_folder(folder: Path) -> None:
    """Raise `UnhealthyHostError` unless files of the run's folder can be written, synced and renamed."""
    for found in files(nearest(folder)):
        if found.fails:
            raise UnhealthyHostError(f"{found.sentence}; {found.remedy}")


def check_device(device: torch.device, folder: Path, place: Worker) -> None:
    """Raise `UnhealthyHostError` if the run had GPUs, and this process sees none."""
    if device.type != "cpu" or not (folder / "run.json").is_file():
        return
    before = read_run(folder).info.get("device", "cpu")
    if before != "cpu":
        raise UnhealthyHostError(
            f"rank {place.local_rank} of this host sees no GPU, and the run has trained on {before}; see "
            f"that the driver finds them (nvidia-smi, dmesg)"
        )


def check_memory(spec: RunSpec, device: torch.device, place: Worker) -> None:
    """Raise `UnhealthyHostError` if there is less memory than parameters, gradients and moments take.

    On processors it is that of the host, which all local ranks share.
    """
    needed = max(states(spec, stage).total for stage in range(spec.layout.pp))
    if device.type == "cpu":
        needed, free = needed * place.local_world_size, free_memory
        where, whose = "its memory", "its ranks"
        remedy = "end what else takes memory here, or give the run more hosts"
    else:
        where, whose = f"GPU {device.index}", f"rank {place.local_rank} of this host"
        remedy = "end the processes that nvidia-smi lists there"

        def free() -> int:
            return torch.cuda.mem_get_info(device)[0]

    if (left := _in_time(free, needed)) < needed:
        raise UnhealthyHostError(
            f"{gigabytes(left)} of {where} are free, and parameters, gradients and moments of {whose} take "
            f"{gigabytes(needed)}; {remedy}"
        )


def _in_time(free: Callable[[], int], needed: int) -> int:
    """Return the bytes that are free, as soon as they are enough, or after `GIVEN_BACK_S`."""
    until = time.monotonic() + GIVEN_BACK_S
    while (left := free()) < needed and time.monotonic() < until:
        time.sleep(0.2)
    return left


def check_product(dtype: torch.dtype, device: torch.device, place: Worker) -> None:
    """Raise `UnhealthyHostError` unless a product in `dtype` has the bits that it must have.

    The operands are whole numbers so small that no sum is rounded, in whatever order a kernel adds (cf. the
    sums of Huang & Abraham 1984, "Algorithm-based fault tolerance"); units for integers compute the result.
    """
    largest, tiles = LARGEST.get(dtype, LARGEST_OTHER), TILES[device.type]
    drawn = torch.Generator().manual_seed(place.local_rank)
    a, b = (torch.randint(-largest, largest + 1, (SIZE, SIZE), generator=drawn) for _ in range(2))
    expected = (a @ b).to(dtype).to(device).repeat(tiles, tiles)
    left, right = a.to(device, dtype).repeat(tiles, 1), b.to(device, dtype).repeat(1, tiles)
    with products_in_fp32(device, dtype):
        for _ in range(ROUNDS):
            if wrong := int((left @ right != expected).sum()):
                name, where = str(dtype).removeprefix("torch."), _name(device)
                raise UnhealthyHostError(
                    f"{wrong:,} of {expected.numel():,} numbers of a product in {name} on {where}, of rank "
                    f"{place.local_rank} of this host, are wrong; take it out of the run, and have it "
                    f"examined (dcgmi diag -r 3, a test of memory)"
                )


def _name(device: torch.device) -> str:
    return "the processor" if device.type == "cpu" else f"GPU {device.index}"


def check_collective(device: torch.device, place: Worker) -> None:
    """Raise `UnhealthyHostError` unless an all-reduce of all local ranks gives the sum."""
    numbers = torch.arange(SIZE, dtype=torch.float32, device=device) * (place.local_rank + 1)
    dist.all_reduce(numbers)
    ranks = place.local_world_size
    expected = torch.arange(SIZE, dtype=torch.float32, device=device) * (ranks * (ranks + 1) // 2)
    if wrong := int((numbers != expected).sum()):
        raise UnhealthyHostError(
            f"{wrong:,} of {SIZE:,} sums of an all-reduce of this host's {ranks} ranks are wrong on rank "
            f"{place.local_rank}; take it out of the run, and have its memory and links examined"
        )


if __name__ == "__main__":
    main()
