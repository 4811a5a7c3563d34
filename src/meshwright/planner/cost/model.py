"""All cost models of one cluster under one software stack, with what layouts share computed once."""

from __future__ import annotations

from dataclasses import replace

from meshwright.hardware.attention_backend import holds_documents
from meshwright.hardware.cluster import Cluster, Device
from meshwright.planner.cost.collectives import CollectiveCosts
from meshwright.planner.cost.kernels import KernelCosts
from meshwright.planner.cost.layer import Dense, LayerCost
from meshwright.planner.cost.shared_cores import shared_cores
from meshwright.planner.cost.software import MESHWRIGHT, MESHWRIGHT_ON_CPU, SoftwareStack
from meshwright.planner.rank_view import adds_gradients
from meshwright.spec import ModelSpec, RunSpec
from meshwright.spec.layers import LayerKind


class CostModel:
    """Costs of kernels, collectives and blocks on a cluster.

    `stack` defaults to this program, in its variant for the cluster's kind of device. `format` is the number
    format of matrix products where it differs from the run's: 'fp8', and `violation` how unequally popular
    its experts are (`planner/cost/expert_balance.py`). A packed sample is taken for `documents` of equal
    length, to which attention is confined if the run masks them: one, unless the data is known.
    """

    def __init__(
        self,
        cluster: Cluster,
        stack: SoftwareStack | None = None,
        format: str | None = None,
        violation: float = 0.0,
        documents: int = 1,
    ) -> None:
        stack = stack or MESHWRIGHT
        if stack is MESHWRIGHT and cluster.device.kind == "cpu":
            stack = MESHWRIGHT_ON_CPU
        self.cluster, self.stack, self.format = cluster, stack, format
        self.violation, self.documents = violation, documents
        self.counted = stack.ours and cluster.device.kind != "cpu"
        """True if memory-bound operators are counted one by one (`planner/cost/operator_bytes.py`)."""
        device = _device_of_rank(cluster)
        self.kernels = KernelCosts(device, stack.attention, cluster.measured)
        self.links = CollectiveCosts(cluster, stack.flat_rings)
        self.contention = max(stack.numbers.contention, device.rates.contention)
        """Seconds that compute loses per second of a collective that it overlaps, where none was measured."""
        self.shared = shared_cores(cluster)
        self._models: list[ModelSpec] = []
        self._sizes: list[dict[LayerKind, tuple[int, int, int]]] = []
        self._work: list[dict[tuple[object, ...], tuple[float, ...]]] = []
        self._dense: dict[tuple[object, ...], Dense] = {}
        self._blocks: dict[tuple[object, ...], LayerCost] = {}

    def blocks(self, spec: RunSpec) -> LayerCost:
        """Costs of the run's blocks; layouts that differ only in data and pipeline ranks share them."""
        layout = spec.layout
        policy = spec.recompute, spec.train.offload_activations, spec.lora, spec.preference is not None
        train = spec.train
        attention = holds_documents(spec), train.attention_backend, train.compile, train.cuda_graphs
        run = self._number(spec.model), spec.data.seq_len, spec.micro_batch, *policy, *attention
        context = layout.cp, layout.context_mode, layout.strides["dp"] if layout.cp > 1 else 1
        dense = (*run, layout.tp, layout.sequence_parallel, *context, layout.pp > 1, adds_gradients(spec))
        routed = layout.ep, layout.etp, layout.expert_parts, layout.expert_buffer_factor
        key = (*dense, *routed, layout.dp if layout.ep > 1 else 1)
        if key not in self._blocks:
            format = self.format or spec.precision.compute
            known = self._dense.setdefault(dense, self.dense(spec.model))
            self._blocks[key] = LayerCost(
                *(spec, format, self.stack, self.kernels, self.links, known),
                *(self.violation, self.documents),
            )
        return self._blocks[key]

    def dense(self, model: ModelSpec) -> Dense:
        """Parameter counts of the model's blocks and seconds of products, shared by all its layouts, and no
        seconds of parts yet."""
        number = self._number(model)
        return Dense(sizes=self._sizes[number], work=self._work[number])

    def _number(self, model: ModelSpec) -> int:
        """The place of a model among those seen: comparing a few is quicker than hashing one."""
        if model not in self._models:
            self._models.append(model)
            self._sizes.append({})
            self._work.append({})
        return self._models.index(model)


def _device_of_rank(cluster: Cluster) -> Device:
    """The device as one rank sees it: an equal part of a shared host, unless measured while shared."""
    device, ranks = cluster.device, cluster.sharing
    if device.kind != "cpu" or ranks == 1 or cluster.measured is not None:
        return device
    peak = {name: rate / ranks for name, rate in device.peak.items()}
    return replace(device, peak=peak, bandwidth=device.bandwidth / ranks, units=max(1, device.units // ranks))
