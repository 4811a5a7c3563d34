"""Runs on one device, a CUDA device unless told."""

from __future__ import annotations

import torch

from meshwright.comm.mesh import Mesh, build_mesh
from meshwright.spec import RunSpec, load


def spec_of(**flags: object) -> RunSpec:
    base = {"data.corpus": "synthetic", "data.seq_len": 128, "train.batch_tokens": 2048, "train.steps": 30}
    given = base | {key.replace("__", "."): value for key, value in flags.items()}
    return load(None, [(key, str(value)) for key, value in given.items()])


def mesh_of(spec: RunSpec, device: str = "cuda") -> Mesh:
    mesh = build_mesh(spec.layout, torch.device(device, 0), experts=spec.model.moe is not None)
    assert mesh is not None
    return mesh
