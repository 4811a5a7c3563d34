"""Ranks are numbered as `layout.order` says, and the planner's strides are the mesh's."""

from __future__ import annotations

import pytest

from meshwright.comm.mesh import rank_grid
from meshwright.planner.group_shapes import axes
from meshwright.spec import Layout, RunSpec, UserError
from meshwright.spec.layout import Order


@pytest.mark.parametrize("order", Order.__args__)  # type: ignore[attr-defined]
def test_strides_are_those_of_the_mesh(order: Order) -> None:
    layout = Layout(order=order, dp=2, cp=2, tp=2, pp=3, replicate=2, zero=1)
    grid, at = rank_grid(layout), axes(layout)
    assert sorted(grid.flatten().tolist()) == list(range(layout.world_size))
    for dim, group in enumerate((at.pipeline, at.replicate, at.shard, at.tensor)):
        first = grid.movedim(dim, -1).reshape(-1, grid.shape[dim])
        assert group.ranks == grid.shape[dim]
        assert ((first[:, 1:] - first[:, :-1]) == group.stride).all()
    context = grid.view(3, 2, 2, 2, 2).movedim(3, -1)
    assert ((context[..., 1] - context[..., 0]) == at.context.stride).all()


def test_experts_need_neighbours() -> None:
    with pytest.raises(UserError, match=r"layout\.order: .* try 'replicate-pp-dp-tp'"):
        RunSpec.model_validate(
            {
                "model": {"preset": "moe-tiny"},
                "layout": {"order": "replicate-dp-pp-tp", "dp": 2, "ep": 2, "pp": 2},
            }
        )
