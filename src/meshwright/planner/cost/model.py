"""A cluster's devices and links under a software stack, which remember what they were asked."""

from __future__ import annotations

from dataclasses import replace

from meshwright.hardware.cluster import Cluster, Device
from meshwright.planner.cost.collectives import CollectiveCosts
from meshwright.planner.cost.kernels import KernelCosts
from meshwright.planner.cost.layer import Dense, LayerCost
from meshwright.planner.cost.shared_cores import shared_cores
from meshwright.planner.cost.software import MESHWRIGHT, MESHWRIGHT_ON_CPU, SoftwareStack
from meshwright.spec import ModelSpec, RunSpec


class CostModel:
    """For estimates of many layouts of one run: what layouts share is computed once.

    `stack` is by default this program's, on the cluster's kind of device; `format` is the number format of
    matrix products where it is not the run's own: 'fp8'.
    """

    def __init__(
        self, cluster: Cluster, stack: SoftwareStack | None = None, format: str | None = None
    ) -> None:
        stack = stack or MESHWRIGHT
        if stack is MESHWRIGHT and cluster.device.kind == "cpu":
            stack = MESHWRIGHT_ON_CPU
        self.cluster, self.stack, self.format = cluster, stack, format
        device = _share(cluster)
        self.kernels = KernelCosts(device, stack.matmul, stack.native_attention, cluster.measured)
        self.links = CollectiveCosts(cluster, stack.network, stack.flat_rings)
        self.shared = shared_cores(cluster)
        self._models: dict[int, ModelSpec] = {}
        self._dense: dict[tuple[object, ...], Dense] = {}
        self._blocks: dict[tuple[object, ...], LayerCost] = {}
        self._sizes: dict[int, dict[bool, tuple[int, int, int]]] = {}

    def blocks(self, spec: RunSpec) -> LayerCost:
        """What a block of the run costs, which its data and pipeline ranks do not change."""
        layout = spec.layout
        dense = (
            id(spec.model),
            spec.data.seq_len,
            spec.micro_batch,
            spec.recompute,
            layout.tp,
            layout.sequence_parallel,
            layout.cp,
            layout.context_mode,
            layout.strides["dp"] if layout.cp > 1 else 1,
            layout.pp > 1,
        )
        key = (*dense, layout.ep, layout.etp, layout.expert_parts, layout.dp if layout.ep > 1 else 1)
        found = self._blocks.get(key)
        if found is None:
            known = self._dense.get(dense)
            if known is None:
                known = self._dense[dense] = self.dense(spec.model)
            found = self._blocks[key] = LayerCost(
                spec, self.format or spec.precision.compute, self.stack, self.kernels, self.links, known
            )
        return found

    def dense(self, model: ModelSpec) -> Dense:
        """Of a layout whose blocks nothing is known of yet, but how many parameters they have."""
        self._models[id(model)] = model  # hashing a model takes long; kept, its id is its own
        return Dense(sizes=self._sizes.setdefault(id(model), {}))


def _share(cluster: Cluster) -> Device:
    """What one rank has of its device: of a host that ranks share, and that was not measured so, a part."""
    device, ranks = cluster.device, cluster.sharing
    if device.kind != "cpu" or ranks == 1 or cluster.measured is not None:
        return device
    peak = {name: rate / ranks for name, rate in device.peak.items()}
    return replace(device, peak=peak, bandwidth=device.bandwidth / ranks, units=max(1, device.units // ranks))
