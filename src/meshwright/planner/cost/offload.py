"""Seconds that moments outside a device take over its link to the host (`optim/offload.py`), and which runs
that offload can be planned for a cluster."""

from __future__ import annotations

from meshwright.hardware.cluster import Cluster
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.software import SoftwareStack
from meshwright.planner.rank_view import widths
from meshwright.spec import RunSpec, UserError


def check_offload(spec: RunSpec, cluster: Cluster) -> None:
    """Raise `UserError` for a `train.offload` that has no effect on a cluster, or no known cost there."""
    kind, device = spec.train.offload, cluster.device
    if kind == "host" and device.kind == "cpu":
        raise UserError(
            f"train.offload: 'host' has no effect on {device.name}, whose moments are in the host's memory; "
            f"give 'disk' or 'none'"
        )
    if kind == "disk" and device.kind != "cpu":
        raise UserError(
            f"train.offload: 'disk' cannot be planned for {device.name}, whose nodes' disks have no known "
            f"bandwidth; give 'host' or 'none', or train with a layout of your own"
        )
    if kind == "host" and device.host_link is None:
        raise UserError(
            f"train.offload: 'host' cannot be planned for {device.name}, whose bandwidth to its host is not "
            f"known; give a hardware file with device.host_link in bytes per second, or 'none', or train "
            f"with a layout of your own"
        )


def check_activation_offload(spec: RunSpec, cluster: Cluster, stack: SoftwareStack) -> None:
    """Raise `UserError` for a `train.offload_activations` without effect or known cost on a cluster."""
    device = cluster.device
    if spec.train.offload_activations == "none":
        return
    if not stack.ours:
        raise UserError(
            f"train.offload_activations: 'host' is of this program, and the stack is {stack.name}; leave "
            f"--stack out, or give 'none'"
        )
    if device.kind == "cpu":
        raise UserError(
            f"train.offload_activations: 'host' has no effect on {device.name}, whose activations are in the "
            f"host's memory; give 'none'"
        )
    if device.host_link is None:
        raise UserError(
            f"train.offload_activations: 'host' cannot be planned for {device.name}, whose bandwidth to its "
            f"host is not known; give a hardware file with device.host_link in bytes per second, or 'none'"
        )


def copy_seconds(spec: RunSpec, costs: CostModel, elements: float) -> float:
    """Seconds in which the moments of so many parameters cross the link, both ways at once."""
    link = costs.cluster.device.host_link
    if spec.train.offload != "host" or link is None:
        return 0.0
    return elements * len(spec.train.optimiser_kind.matrix_moments) * widths(spec).exact / link
