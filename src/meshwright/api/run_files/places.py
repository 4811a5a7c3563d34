"""Where a run is to be trained: this machine, or so many devices of a cluster."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.hardware.cluster import Cluster
from meshwright.hardware.find import cluster as hardware_of
from meshwright.rank.auto_layout import present
from meshwright.rank.env import count_devices
from meshwright.spec import UserError

HERE = "here"


@dataclass(frozen=True)
class Place:
    """Devices to train on. `name` is that of a cluster, a hardware file, or `HERE`."""

    name: str
    cluster: Cluster
    planned: bool
    """True if the layout is planned now, and not by `train` when it starts."""

    @property
    def devices(self) -> int:
        """Devices in all."""
        return self.cluster.count

    @property
    def is_cpu(self) -> bool:
        """True if the devices are processors."""
        return self.cluster.device.kind == "cpu"

    @property
    def flops(self) -> float:
        """Peak FLOP/s of all devices in that format; fp32's where they lack bf16."""
        peak = self.cluster.device.peak
        each = peak.get(self.cluster.device.default_format, peak.get("fp32", max(peak.values())))
        return each if self.is_cpu and self.cluster.sharing > 1 else each * self.devices

    @property
    def memory(self) -> int:
        """Bytes of memory of all devices; processes on a machine without GPUs share its own."""
        return self.cluster.device.memory * (1 if self.is_cpu else self.devices)

    @property
    def hosts(self) -> int:
        """Machines that the devices are in."""
        each = self.cluster.host or self.cluster.node
        return 1 if self.is_cpu else -(-self.devices // max(1, each))

    @property
    def told(self) -> str:
        """The devices in words."""
        if self.name == HERE and self.is_cpu:
            return f"this machine, {self.cluster.device.name}"
        return f"{self.devices:,} x {self.cluster.device.name}" + (
            " of this machine" if self.name == HERE else ""
        )


def place(on: str = HERE, gpus: int | None = None) -> Place:
    """Return the devices that `on` names: `HERE`, a cluster of the catalogue, or a hardware file.

    `gpus` are by default all of this machine, or those of one node. Raises `UserError`.
    """
    if on != HERE:
        try:
            return Place(on, hardware_of(on, gpus), planned=True)
        except UserError as error:
            raise UserError(str(error).replace("cluster:", "--on:", 1)) from None
    cluster, there = present(), count_devices()
    if cluster.device.kind == "cpu" and gpus is not None:
        raise UserError(
            f"--gpus: {gpus} are asked for, and this machine has none; name the cluster that has them, as "
            f"--on h100-sxm --gpus {gpus}; meshwright clusters lists those that are known"
        )
    if gpus is not None and gpus > there:
        raise UserError(
            f"--gpus: {gpus} are asked for, and this machine has {there}; give {there} or fewer, or name the "
            "cluster, as --on h100-sxm"
        )
    return Place(HERE, cluster.resized(gpus or there), planned=gpus is not None)
