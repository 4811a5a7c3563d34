"""Dry runs: the step of a rank on fake tensors, on a processor or on a GPU that is faked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from meshwright.api.options import Option, choice, file_name, whole
from meshwright.api.ranks import Result
from meshwright.fake_cuda import library
from meshwright.fake_cuda.process import FakeCudaProcess
from meshwright.hardware.cluster import Cluster
from meshwright.hardware.find import cluster as hardware_of
from meshwright.hardware.hardware_file import check_writable
from meshwright.spec import RunSpec, UserError
from meshwright.spec.other_models import refuse_other_models

if TYPE_CHECKING:
    from meshwright.dryrun.timeline import RankTimeline


def dryrun(
    spec: RunSpec,
    *,
    world: Annotated[int | None, Option("ranks of the world; default the layout's", "N", whole(1))] = None,
    rank: Annotated[int, Option("the rank whose step is run", "N", whole(0))] = 0,
    all_stages: Annotated[
        bool, Option("run one rank of each pipeline stage, with a row for each")] = False,
    device: Annotated[str, Option(
        "cpu, or cuda, which needs no GPU", "NAME", choice("cpu", "cuda"))] = "cpu",
    capability: Annotated[str | None, Option(
        "compute capability of a GPU that is not there: 8.0 (A100), 9.0 (H100) or 10.0 (B200); default 9.0",
        "X.Y", choice("8.0", "9.0", "10.0"))] = None,
    reads: Annotated[
        bool, Option("also count what the rank reads of the weights that the run starts from")] = False,
    cluster: Annotated[str | Cluster | None, Option(
        "with --device cuda: also time the step with the planner's rates of this cluster, by name or a "
        "hardware file; default with --timeline by --capability", "NAME", str)] = None,
    timeline: Annotated[Path | None, Option(
        "with --device cuda: timeline of the host's and the streams' clocks to write, a page that opens "
        "offline", "FILE.html", file_name(".html"))] = None,
) -> Result:  # fmt: skip
    """Run one step of one rank of the layout's world on fake tensors, without other ranks or allocations.

    `world` is checked against the layout. `all_stages` runs one rank of each pipeline stage, at the position
    of `rank` otherwise. `device` is where the step would run: 'cpu', or 'cuda', which is faked in a
    process of its own where torch is a build for CPUs, as a GPU of `capability`. Returns `world_size`,
    `layout`, `microbatches`, `assumed` (sentences) and `ranks`: for each `rank`, its `pipeline_rank` and
    `units`, and in bytes `peak`, `components` and `modules` at the peak, `most` of each component at any
    time, `states`, and `wire` (rows of axis, operation, bytes, calls). With a faked GPU there is its
    name, `gpu`, and each rank has `device_work` (see `dryrun.trace_counts`). With `reads` each has
    `reads`, too, what it reads of the files of `model.weights`, whose headers have to be here: `bytes` in
    all, and the most that is in memory `at_a_time`. With `cluster` or `timeline`, the page to write, each has
    `timeline` (see `dryrun.timeline`): seconds of the step on the cluster, of what computes and what is
    waited for, beside the planner's. Raises `UserError`.
    """
    cluster = _cluster_of_clocks(spec, device, capability, cluster, timeline)
    check_writable(timeline, "--timeline")
    if device == "cuda" and library.is_needed():
        with FakeCudaProcess() as process:
            return process.call(
                dryrun, spec, world=world, rank=rank, all_stages=all_stages, device=device,
                capability=capability, reads=reads, cluster=cluster, timeline=timeline,
            )  # fmt: skip
    from meshwright.dryrun.report import rehearsals
    from meshwright.weights.initial_weights import open_weights

    refuse_other_models(spec, "dryrun")
    weights = open_weights(spec) if reads else None
    if reads and weights is None:
        raise UserError(
            "--reads: this run starts from random weights, of which nothing is read; give --from SOURCE"
        )
    result, clocks = rehearsals(
        spec, world=world, rank=rank, all_stages=all_stages, device=device, capability=capability,
        weights=weights, cluster=cluster,
    )  # fmt: skip
    if timeline is not None:
        _write_timeline(Path(timeline), result, clocks, all_stages)
    return result


def _write_timeline(file: Path, result: Result, clocks: Sequence[RankTimeline], all_stages: bool) -> None:
    """Write the page of the clocks of one rank, or of one of each stage."""
    from meshwright.report.timeline import ClockSpan, write_clocks

    rows = [row for each in clocks for row in each.rows(f"rank {each.rank}, " if all_stages else "")]
    write_clocks(file, result, [(name, [ClockSpan(*span) for span in spans]) for name, spans in rows])


_OF_CAPABILITY = {"8.0": "a100", "9.0": "h100", "10.0": "b200"}
"""Compute capability -> the cluster of the catalogue whose devices are timed by default."""


def _cluster_of_clocks(
    spec: RunSpec,
    device: str,
    capability: str | None,
    cluster: str | Cluster | None,
    timeline: Path | None,
) -> Cluster | None:
    """Return the cluster that clocks are of, with a device for each rank; None where no flag asks for clocks.

    Raises `UserError`.
    """
    given = {"--timeline": timeline, "--cluster": cluster}
    asked = [flag for flag, value in given.items() if value is not None]
    if not asked:
        return None
    if device != "cuda":
        raise UserError(
            f"{asked[0]}: the clocks are those of a GPU, but the step runs on a CPU; give --device cuda, or "
            f"leave out {' and '.join(asked)}"
        )
    ranks, named = spec.layout.world_size, cluster or _OF_CAPABILITY[capability or "9.0"]
    found = hardware_of(named, ranks) if isinstance(named, str) else named.resized(ranks)
    if found.device.kind == "cpu":
        raise UserError(
            f"--cluster: {found.name} is one of processors, and the clocks are those of a GPU; give one of "
            "GPUs, such as h100"
        )
    return found
