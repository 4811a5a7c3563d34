"""Least seconds on the data axis and of the optimiser, however a model is cut into stages.

The ranks of a pipeline together take at least what one rank with the whole model would: messages and updates
are sums over parameters, and latencies are at least those of one rank. What compute hides of a rank's
messages is at most all that its own compute can, so that of the sum it is at most what all compute can.
"""

from __future__ import annotations

from typing import Any

from meshwright.planner.cost.data_parallel import DataAxis, DataMessages, StoredParameters, data_messages
from meshwright.planner.cost.lower_bounds import minimal
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.stages import Contents, stored
from meshwright.planner.layout_levels import DataMesh, LayerLayout, Sharding, StageSplit
from meshwright.planner.layout_space import LayoutSpace

_SPLIT = StageSplit("zb-h1", 1, "even", ())
"""A schedule that splits backwards: its products add gradients, which copies least."""


class DataFloor:
    """The data axes of the layouts of a space, as of one rank with the whole model.

    There are none where that is no bound: where collectives were measured, whose seconds are not in
    proportion to bytes, and where parameters are frozen.
    """

    def __init__(self, space: LayoutSpace, costs: CostModel, model: Contents) -> None:
        self._space, self._costs, self._model = space, costs, model
        slows = costs.contention > 1
        self._bounds = costs.cluster.measured is None and model.trained is None and not slows
        self._stored: dict[tuple[int, int, int], StoredParameters] = {}
        self._messages: dict[tuple[int, int, DataMesh, Sharding], DataMessages] = {}
        self._axes: dict[tuple[Any, ...], list[DataAxis]] = {}

    def of_pipeline(self, inner: LayerLayout, ep: int, etp: int, pipeline: tuple[int, int]) -> list[DataAxis]:
        """Those that may take least of all orders of the axes."""
        key = *self._key(inner, pipeline[0]), ep, etp, pipeline
        if key not in self._axes:
            meshes = self._space.meshes(inner, ep, etp, pipeline)
            self._axes[key] = minimal(axis for mesh in meshes for axis in self.of_mesh(inner, mesh))
        return self._axes[key]

    def of_mesh(self, inner: LayerLayout, mesh: DataMesh) -> list[DataAxis]:
        """Those that may take least of all shardings of a mesh."""
        key = *self._key(inner, mesh.pp), mesh
        if key not in self._axes:
            shardings = list(self._space.shardings(inner, mesh)) if self._bounds else []
            if mesh.pp > 1:  # gradients wait for the last microbatch, with ZeRO-2 as with ZeRO-1
                both = {each.replicate for each in shardings if each.zero == 2}
                shardings = [each for each in shardings if each.zero != 1 or each.replicate not in both]
            self._axes[key] = minimal(self._axis(inner, mesh, sharding) for sharding in shardings)
        return self._axes[key]

    def _key(self, inner: LayerLayout, pp: int) -> tuple[int, int, int]:
        """The choices that axes depend on; in a pipeline the size of a microbatch is not one of them."""
        return inner.tp, inner.cp, inner.micro_batch if pp == 1 else 1

    def _axis(self, inner: LayerLayout, mesh: DataMesh, sharding: Sharding) -> DataAxis:
        spec = self._space.spec(inner, mesh, sharding, _SPLIT)
        parts = inner.tp, mesh.ep, mesh.etp
        if parts not in self._stored:
            self._stored[parts] = stored(self._costs.blocks(spec), self._model)
        held, key = self._stored[parts], (inner.tp, inner.cp, mesh, sharding)
        if key not in self._messages:
            self._messages[key] = data_messages(spec, self._costs, held)
        return DataAxis(spec, self._costs, held, self._messages[key])
