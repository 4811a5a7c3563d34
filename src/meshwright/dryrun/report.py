"""Dry runs as a user asks for them: checked, of one rank or one of each stage, told as plain values."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from meshwright.checkpoint.weights import Weights
from meshwright.comm.mesh import rank_grid
from meshwright.dryrun.capturable import capturable
from meshwright.dryrun.rank_step import Rehearsal, assumed_backends, compiles, rehearse
from meshwright.dryrun.timeline import TIMED_ASSUMPTIONS, RankTimeline, capability_of, timelines
from meshwright.dryrun.trace import Trace
from meshwright.dryrun.trace_counts import device_work
from meshwright.fake_cuda import library
from meshwright.fake_cuda.library import NAMES
from meshwright.fake_cuda.runtime import set_capability
from meshwright.hardware.cluster import Cluster
from meshwright.planner.rank_view import place_of
from meshwright.spec import RunSpec, UserError
from meshwright.spec.rules import near_worlds

DEVICES = ("cpu", "cuda")


def rehearsals(
    spec: RunSpec,
    *,
    world: int | None,
    rank: int,
    all_stages: bool,
    device: str,
    capability: str | None = None,
    weights: Weights | None = None,
    cluster: Cluster | None = None,
) -> tuple[dict[str, Any], list[RankTimeline]]:
    """See `api.dryrun`; with `cluster`, the clocks of the ranks that are told, too."""
    _check(spec, world, rank, device, capability)
    _check_cluster(cluster)
    if cluster is not None:
        capability = _capability_of(cluster, capability)
    gpu = _fake_gpu(capability) if library.is_loaded() else None
    size, stages = spec.layout.world_size, spec.layout.pp
    grid = rank_grid(spec.layout).view(stages, -1)
    place = int((grid == rank).nonzero()[0, 1])
    stage_ranks = [int(each) for each in grid[:, place]]
    shown = stage_ranks if all_stages else [rank]
    rows, traces = [], []
    for each in shown if cluster is None else stage_ranks:  # ranks of a pipeline wait for each other
        trace = None if gpu is None else Trace(torch.device("cuda", 0))
        found = rehearse(spec, each, torch.device(device), trace)
        read = {} if weights is None else {"reads": weights.reading(found.held)._asdict()}
        work = {} if trace is None else _work(spec, trace)
        if each in shown:
            rows.append(_row(spec, each, found) | work | read)
        if trace is not None and cluster is not None:
            traces.append((each, stage_ranks.index(each), trace.events))
    attention = assumed_backends(spec, torch.device(device))
    assumed, followed = [*_assumed(spec), *_stand_in(cluster, gpu)], list[RankTimeline]()
    if cluster is not None:
        made, plan = timelines(spec, cluster, traces)
        followed = [each for each in made if each.rank in shown]
        for row, timed in zip(rows, followed, strict=True):
            row["timeline"] = timed.to_json(plan)
        assumed += TIMED_ASSUMPTIONS
    result = {
        "world_size": size,
        "layout": spec.layout.describe(),
        "microbatches": spec.microbatches,
        "micro_batch": spec.micro_batch,
        "device": device,
        **({} if gpu is None else {"gpu": gpu}),
        "attention": attention.to_json(),
        "assumed": assumed,
        "counts": {
            part: {key: max(row["counts"][part][key] for row in rows) for key in rows[0]["counts"][part]}
            for part in ("setup", "step")
        },
        "ranks": rows,
    }
    return result, followed


def _work(spec: RunSpec, trace: Trace) -> dict[str, Any]:
    """The work of the device in a step, and whether a CUDA graph can hold it."""
    graphs = capturable(trace.events, spec.layout.pp > 1)
    return {"device_work": device_work(trace.events, spec.microbatches), "capturable": graphs}


def _capability_of(cluster: Cluster, given: str | None) -> str:
    """The compute capability that is faked for a cluster. Raises `UserError` if another one is given."""
    own, device = "{}.{}".format(*capability_of(cluster)), cluster.device
    if given is not None and device.capability is not None and given != own:
        raise UserError(
            f"--capability: is {given}, but --cluster {cluster.name} has {device.name}, for which {own} is "
            "faked; leave out --capability, or give a cluster of such devices"
        )
    return given or own


def _stand_in(cluster: Cluster | None, gpu: str | None) -> list[str]:
    """A sentence where the GPU that is faked is not of the capability of the cluster's devices."""
    if cluster is None or gpu is None or cluster.device.capability in NAMES:
        return []
    return [f"kernels are chosen as on {gpu}, since no {cluster.device.name} can be faked"]


def _check(spec: RunSpec, world: int | None, rank: int, device: str, capability: str | None) -> None:
    layout = spec.layout
    size = layout.world_size
    ranks = "1 rank" if size == 1 else f"{size} ranks"
    if world is not None and world != size:
        raise UserError(
            f"--world: is {world}, but the layout ({layout.describe()}) has {ranks}; "
            f"{near_worlds(spec, world, '--world')}"
        )
    if not 0 <= rank < size:
        raise UserError(
            f"--rank: is {rank}, but the world has {ranks}, counted from 0; give at most {size - 1}"
        )
    if device not in DEVICES:
        raise UserError(f"--device: '{device}' is not known; one of {' and '.join(DEVICES)} is")
    if device == "cuda" and not torch.cuda.is_available():
        library.check()
    if capability is not None and not library.is_loaded():
        where = "the step runs on this machine's GPU" if device == "cuda" else "the step runs on a CPU"
        raise UserError(f"--capability: is {capability}, but {where}, which has none to choose; leave it out")
    if dist.is_initialized():
        raise UserError("dryrun: this process is a rank of a world already; call it in one that is not")


def _check_cluster(cluster: Cluster | None) -> None:
    if cluster is not None and not library.is_loaded():
        raise UserError(
            "--cluster: clocks follow a GPU that is faked, which takes --device cuda and torch's build for "
            "CPUs; give them, or leave out --cluster and --timeline"
        )


def _fake_gpu(capability: str | None) -> str:
    """Fake a GPU of this compute capability and return its name; by default it is an H100."""
    major, minor = map(int, (capability or "9.0").split("."))
    return set_capability((major, minor))


def _assumed(spec: RunSpec) -> list[str]:
    """Assumptions behind the figures."""
    found = ["bytes are those of tensors: what an allocator, a library or a kernel adds is not in them"]
    if spec.model.moe is not None:
        found.append("routing is even: every expert gets equally many tokens from every rank")
    if remark := spec.layout.remark:
        found.append(remark)
    if spec.data.pack and spec.data.document_mask:
        found.append("each sample holds two documents")
    if spec.train.batch_warmup:
        found.append(f"the step is one of {spec.train.batch_tokens:,} tokens{spec.train.warmup_in_words}")
    if spec.step_groups > 1:
        found.append(f"the step is one of the {spec.exchange_period} of a period that begins an exchange")
    if spec.train.compile and not compiles(spec):
        found.append(
            "blocks are run as they are, not compiled, "
            + ("since Triton is not installed" if library.is_loaded() else "which takes --device cuda")
        )
    if spec.train.cuda_graphs and library.is_loaded():
        found.append("the step is one whose graphs have been recorded")
    elif spec.train.cuda_graphs:
        found.append("the step is one without graphs, which takes --device cuda")
    return found


def _row(spec: RunSpec, rank: int, found: Rehearsal) -> dict[str, Any]:
    place = int((rank_grid(spec.layout) == rank).nonzero()[0, 0])
    units = [unit for stage in place_of(spec, place).own for unit in stage.units]
    return {
        "rank": rank,
        "pipeline_rank": place,
        "units": units,
        "peak": found.peak,
        "components": found.by_component,
        "modules": found.by_module,
        "most": found.most,
        "states": found.states,
        "offloaded_activations": found.offloaded,
        "counts": found.counts,
        "wire": [
            {"axis": axis, "operation": operation, "bytes": sent, "calls": found.calls[axis, operation]}
            for (axis, operation), sent in sorted(found.wire.items())
        ],
    }
