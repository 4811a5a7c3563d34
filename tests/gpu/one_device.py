"""Layouts of two ranks verified on one CUDA device over NCCL: a program that starts its own two ranks.

    python -m one_device --way WAY --out FOLDER [--device cuda|cpu] [--case NAME ...]

NCCL takes two ranks on one GPU for a mistake ("Duplicate GPU detected"). There are two ways around it:

- `multi-rank`: NCCL_MULTI_RANK_GPU_ENABLE=1, which NCCL 2.30 and later read;
- `hosts`: a NCCL_HOSTID of its own for each rank. NCCL looks for duplicates within a host only, and these two
  are then on different hosts, which talk through sockets on the loopback interface.

Each rank writes FOLDER/RANK.json: {"refused": NCCL's words} or {"found": {case: worst relative difference}}.
Times mean nothing here: the two processes take turns on the GPU. On a CPU the ranks talk through gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.comm.mesh import build_mesh
from meshwright.comm.process_groups import Groups
from meshwright.launch.supervisor import run_ranks
from meshwright.rank.env import worker
from meshwright.rank.process_group import process_group
from meshwright.verify.verify import verify
from small import spec_of

WAYS = ("multi-rank", "hosts")
BASE = {
    "model.layers": 4, "model.vocab_size": 61, "model.kv_heads": 2, "data.seq_len": 16, "train.steps": 2,
    "train.warmup_steps": 1, "layout.micro_batch": 1, "train.batch_tokens": 64,
}  # fmt: skip
EXPERTS: dict[str, object] = {
    "model__moe__experts": 8, "model__moe__top_k": 2, "model__moe__ffn": 12, "recompute__policy": "full",
}  # fmt: skip
CASES: dict[str, dict[str, object]] = {
    "pp2-1f1b": {"layout__pp": 2, "layout__schedule": "1f1b"},
    "pp2-zb-v": {"layout__pp": 2, "layout__schedule": "zb-v"},
    "tp2": {"layout__tp": 2},
    "tp2-whole-stream": {"layout__tp": 2, "layout__sequence_parallel": "false"},
    "dp2-zero1": {"layout__dp": 2, "layout__zero": 1},
    "dp2-zero2": {"layout__dp": 2, "layout__zero": 2},
    "dp2-zero3": {"layout__dp": 2, "layout__zero": 3},
    "cp2-ring": {"layout__cp": 2},
    "ep2": {"layout__dp": 2, "layout__ep": 2} | EXPERTS,
    "ep2-bounded": {"layout__dp": 2, "layout__ep": 2, "layout__expert_buffer_factor": 1.5} | EXPERTS,
}


def choose_way(way: str, rank: int) -> None:
    """Set what NCCL reads in this process, before it reads it."""
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "NCCL_IB_DISABLE": "1"}
    if way == "multi-rank":
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    else:
        os.environ["NCCL_HOSTID"] = f"meshwright-rank-{rank}"


def verify_cases(names: list[str], device: torch.device) -> dict[str, float]:
    """The worst relative difference of each case after two steps; on ranks other than the first none."""
    groups, found = Groups(device.type), {}
    for name in names:
        spec = spec_of(BASE, **CASES[name])
        mesh = build_mesh(
            spec.layout, device, spec.model.kv_heads, groups, experts=spec.model.moe is not None
        )
        assert mesh is not None
        result = verify(spec, mesh, 2)
        if result is not None:
            assert float(str(result["compared"])) > 20
            found[name] = float(str(result["worst_relative"]))
    return found


def run_rank(options: argparse.Namespace) -> None:
    place = worker()
    assert place is not None
    choose_way(options.way, place.rank)
    index = place.rank if options.device == "cpu" else 0
    device = torch.device("cpu") if options.device == "cpu" else torch.device("cuda", 0)
    try:
        with process_group(replace(place, local_rank=index), options.device):
            one = torch.ones(1, device=device)
            dist.all_reduce(one)
            assert float(one) == 2.0
            result: dict[str, object] = {"found": verify_cases(options.case, device)}
    except dist.DistBackendError as error:
        result = {"refused": str(error)}
    options.out.joinpath(f"{place.rank}.json").write_text(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=WAYS, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--case", nargs="*", choices=list(CASES), default=list(CASES))
    options = parser.parse_args()
    if worker() is not None:
        run_rank(options)
        return
    outcome = run_ranks(sys.argv[1:], 2, module="one_device")
    if outcome.code:
        sys.exit(f"{outcome.details}\n{outcome.sentence}")


if __name__ == "__main__":
    main()
