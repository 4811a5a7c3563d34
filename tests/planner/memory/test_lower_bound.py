"""The bytes by which the search drops layouts, beside the exact count of random layouts."""

from __future__ import annotations

import random
from math import inf
from typing import Any

import pytest

from covering import some
from meshwright.hardware.find import cluster
from meshwright.planner.cost.model import CostModel
from meshwright.planner.layout_space import LayoutSpace
from meshwright.planner.memory.exact import memory_model
from meshwright.planner.search.results import SearchCounts, SearchResult
from meshwright.planner.search.tree import MeshBranch, SearchTree
from meshwright.spec import RunSpec

LATENTS = {"q_rank": 48, "kv_rank": 32, "rope_dim": 8, "v_dim": 24}
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "dense": ({"preset": "tiny", "layers": 9, "kv_heads": 2, "vocab_size": 512}, 64),
    "tied": ({"preset": "tiny", "layers": 3, "vocab_size": 5120, "tied": True, "position": "learned"}, 64),
    "wide": ({"preset": "llama3-8b", "layers": 12}, 1024),
    "experts": ({"preset": "moe-tiny", "layers": 6, "moe": {"experts": 8, "ffn": 64}}, 128),
    "capacity": ({"preset": "mixtral-8x7b", "layers": 5, "moe": {"capacity_factor": 1.25}}, 512),
    "latents": ({"preset": "deepseek-v3", "layers": 7, "moe": {"experts": 16, "dense_first": 2}}, 512),
    "long context": ({"preset": "llama3-8b", "layers": 4}, 65536),
    "windows in some layers": (
        {
            "preset": "moe-tiny",
            "layers": 7,
            "sliding_window": 32,
            "vocab_size": 512,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
        128,
    ),
    "further tokens": ({"preset": "moe-tiny", "layers": 6, "mtp_num_layers": 1, "vocab_size": 512}, 128),
    "window": ({"preset": "tiny", "layers": 4, "sliding_window": 32, "vocab_size": 512}, 128),
}


def bounds(
    chosen: random.Random, model: dict[str, Any], seq_len: int, precision: str, offload: str
) -> tuple[RunSpec, float, float, float]:
    """A random layout, with bytes at least: of its mesh, of it as the search filters it, and exactly."""
    ranks = chosen.choice([1, 2, 4, 6, 8, 16])
    batch = ranks * chosen.choice([1, 2, 4, 16]) * seq_len
    base = RunSpec.model_validate(
        {
            "model": model,
            "data": {"seq_len": seq_len},
            "train": {"batch_tokens": batch, "offload_activations": offload},
            "precision": {"compute": precision, "reduce": chosen.choice(["fp32", "bf16"])},
        }
    )
    on = CostModel(cluster(chosen.choice(["h100", "cpu"]), ranks))
    fixed = {"tp": 1} if chosen.random() < 0.4 else {}
    space = LayoutSpace(base, ranks, fixed | ({"cp": 1} if chosen.random() < 0.4 else {}))
    memory = memory_model(on)
    tree = SearchTree(space, on, memory, inf, SearchResult(1, None, inf, None, 1.0, False, SearchCounts()))
    while True:
        inner = chosen.choice(list(space.inner()))
        meshes = [mesh for pair in space.experts(ranks) for mesh in space.meshes(inner, *pair)]
        if meshes:
            break
    mesh = chosen.choice(meshes)
    sharding = chosen.choice(list(space.shardings(inner, mesh)))
    cut = chosen.choice(tree.bounds.cuts(mesh.pp))
    spec = space.spec(inner, mesh, sharding, cut.split)
    blocks = on.blocks(spec)
    shared = space.spec(inner, mesh, sharding)
    least = memory.lower_bound(shared, blocks, tree.model).device
    assert memory.least_states(shared, blocks, tree.model).device <= least
    if mesh.pp == 1:
        return spec, least, memory.resident(spec, blocks, tree.model).device, memory.peak(spec).device
    fitting = MeshBranch(tree, inner, mesh, blocks).fitting(cut, [sharding])
    return spec, least, fitting[sharding], memory.peak(spec).device


BOUNDED = [
    (name, *kinds) for name in MODELS for kinds in (("bf16", "none"), ("fp32", "none"), ("bf16", "host"))
]


@pytest.mark.parametrize(("name", "precision", "offload"), some(BOUNDED, BOUNDED[::4]))
def test_no_layout_needs_less_than_the_bytes_by_which_it_is_dropped(
    name: str, precision: str, offload: str
) -> None:
    if offload != "none" and "mtp_num_layers" in MODELS[name][0]:
        pytest.skip("further tokens do not go with offloading")
    chosen, ratios = random.Random(f"{name} {precision}"), []
    for _ in range(150):
        spec, least, filtered, exact = bounds(chosen, *MODELS[name], precision, offload)
        told = f"{spec.layout.describe()} zero{spec.layout.zero} {spec.recompute.policy} {spec.microbatches}"
        assert least <= exact * (1 + 1e-9), told
        assert filtered <= exact * (1 + 1e-9), told
        ratios.append(filtered / exact)
    ratios.sort()
    assert ratios[len(ratios) // 2] > 0.85, "most bounds should be near"
