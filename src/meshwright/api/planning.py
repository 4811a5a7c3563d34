"""What a run will cost, before it runs: nothing here starts it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.hardware.cluster import Cluster
from meshwright.hardware.find import cluster as hardware_of
from meshwright.hardware.hardware_file import check_writable
from meshwright.hardware.hardware_file import write as write_hardware
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.software import stack_named
from meshwright.planner.explain.explanation import Explanation
from meshwright.planner.explain.explanation import explain as explain_on
from meshwright.planner.plan import Finished, Plans
from meshwright.planner.plan import plan as best_plans
from meshwright.planner.search.request import Overrides, PlanRequest
from meshwright.planner.search.results import Progress
from meshwright.planner.simulated_pipeline import Durations, Machine
from meshwright.planner.simulated_pipeline import step as pipeline_step
from meshwright.spec import RunSpec, UserError

if TYPE_CHECKING:
    pass

Result = dict[str, Any]


def simulate(
    spec: RunSpec,
    *,
    durations: tuple[float, float, float] | None = None,
    flops: float = Machine.flops,
    latency: float = Machine.latency,
    bandwidth: float = Machine.bandwidth,
    out: Path | None = None,
    trace: Path | None = None,
) -> Result:
    """Time one step of the run's pipeline, without torch and without its ranks.

    `durations` are the seconds of one microbatch's F, I and W in every stage; without them the stages' FLOPs
    are counted, and a device does `flops` of them a second. A message between stages takes `latency` seconds
    and its bytes / `bandwidth`. `out` is where the timeline's page goes, `trace` the trace for Perfetto.
    Returns `step_seconds`, `bubble`, `bubbles`, `peak_activations` (in microbatches through all of a rank's
    stages) and `peak_activation_bytes` (of one device) by rank, `closed_form_bubble` (or None) and more.
    Raises `UserError`.
    """
    from meshwright.report.timeline import write_timeline, write_trace
    from meshwright.schedule import ScheduleError

    try:
        machine = Machine(flops, latency, bandwidth)
        found = pipeline_step(spec, machine, Durations(*durations) if durations else None)
    except ScheduleError as error:
        raise UserError(str(error)) from None
    if out is not None:
        write_timeline(found.simulation, Path(out))
    if trace is not None:
        write_trace(found.simulation, Path(trace))
    return {
        **found.to_json(),
        "flops": None if durations else flops,
        "latency": latency,
        "bandwidth": bandwidth,
    }


def plan(
    model: str | Path | RunSpec,
    cluster: str | Cluster,
    *,
    gpus: int | str | None = None,
    seq_len: int | None = None,
    batch_tokens: int | str | None = None,
    top: int = 5,
    objective: str = "time",
    stack: str = "meshwright",
    price: float | None = None,
    tokens: float | str | None = None,
    max_memory: float | None = None,
    overrides: Overrides = (),
    progress: Progress | None = None,
    finished: Finished | None = None,
) -> Plans:
    """The `top` best layouts of a model on a cluster; for what is asked see `PlanRequest`.

    `progress` is called with each plan that is the best so far, and `finished`, if there are several numbers
    of devices, after the search for each: with the number, and the best plan or None. Raises `UserError`,
    also where nothing fits.
    """
    request = PlanRequest(
        model,
        cluster,
        gpus,
        seq_len,
        batch_tokens,
        top,
        objective,
        stack,
        price,
        tokens,
        max_memory,
        overrides,
    )
    return best_plans(request, progress, finished)


def explain(
    spec: RunSpec, *, cluster: str | Cluster, stack: str = "meshwright", out: Path | None = None
) -> Explanation:
    """Say why a run's layout takes what it takes on a cluster, without torch.

    `cluster` is a name of the catalogue, a hardware file or a `Cluster`; it is taken with as many devices as
    the layout has ranks. `stack` is the program that runs (`meshwright.planner.cost.software.STACKS`). `out`
    is the page to write. The explanation has `time`, `memories`, `axes`, `neighbours`, `assumptions`,
    `to_json()`, and is text by `meshwright.planner.explain.text.text`. Raises `UserError`.
    """
    from meshwright.report.plan_page import write_explanation

    ranks = spec.layout.world_size
    found = hardware_of(cluster, ranks) if isinstance(cluster, str) else cluster.resized(ranks)
    result = explain_on(spec, CostModel(found, stack_named(stack)))
    if out is not None:
        write_explanation(Path(out), result)
    return result


def goodput(
    *,
    step_seconds: float,
    save_seconds: float,
    restart_seconds: float,
    mtbf_hours: float | None = None,
    device_mtbf_hours: float | None = None,
    devices: int | None = None,
    background_seconds: float = 0.0,
    batch_tokens: int | None = None,
    tokens: float | None = None,
    price: float | None = None,
    every: int | None = None,
    runs: int | None = None,
    seed: int = 0,
) -> Result:
    """What failures leave of a run's time, without torch: the best checkpoint interval and what follows.

    The system fails every `mtbf_hours` on average, or each of its `devices` every `device_mtbf_hours`; a save
    stops training for `save_seconds` and is complete `background_seconds` later; a restart takes
    `restart_seconds`. Returns `interval_steps`, the time's shares `effective`, `saving`, `lost_work` and
    `restarting`, `tokens_per_day`, `days`, `cost` (of `tokens`, at `price` a device-hour) and more. `every`
    is a number of steps between saves to take instead; `runs` simulates so many runs too. Raises `UserError`.
    """
    from meshwright.reliability import goodput as planner
    from meshwright.reliability.monte_carlo import simulate as play

    mtbf = planner.system_mtbf(mtbf_hours, device_mtbf_hours, devices)
    faults = planner.Faults(mtbf, save_seconds, restart_seconds, background_seconds)
    found = planner.goodput(
        step_seconds,
        faults,
        batch_tokens=batch_tokens,
        tokens=tokens,
        devices=devices,
        price=price,
        every=every,
    )
    if runs is None:
        return {**found.to_json(), "simulated": None}
    played = play(faults, found.interval_seconds, found.saves or 1000, runs, seed)
    return {**found.to_json(), "simulated": played.to_json()}


def validate(table: Path | None = None, *, rows: bool = False, by: str = "source") -> Result:
    """Set the planner's predictions beside measured runs: `table`, or the published ones.

    The result has `rows`, `predicted`, `skipped` (reason -> rows), `time` and `memory` (absolute errors in
    percent), `tau`, `regret_pct`, `oom` (`true_fit`, `false_fit`, `true_oom`, `false_oom`), and the same
    `by_source`, and by what the column `by` says (source, model or gpu); with `rows`, `each` row too, and
    of those that are not predicted `skipped_rows` (row, source, reason). Raises `UserError`.
    """
    from meshwright.planner.validation import metrics as planner
    from meshwright.planner.validation.table import PUBLISHED

    found = planner.validate(Path(table) if table else PUBLISHED)
    result = planner.report(found, by)
    if not rows:
        return result
    return {**result, "each": planner.each_row(found), "skipped_rows": planner.skipped_rows(found)}


def profile(*, nproc: int | None = None, seconds: float = 120.0, out: Path | None = None) -> Cluster:
    """Measure this machine with `nproc` processes (default: one for each GPU, or core) for some `seconds`.

    The cluster has what was measured in `measured`; `out` is the hardware file that it is written to. Raises
    `UserError`.
    """
    from meshwright.launch import run_ranks
    from meshwright.launch.env import count_devices

    check_writable(out)
    ranks = count_devices() if nproc is None else nproc
    if ranks == 1:
        found = profile_worker(seconds=seconds, out=out)
        assert found is not None  # this process is the first rank
        return found
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        file = Path(folder) / "hardware.json"
        argv = ["profile", "--seconds", str(seconds), "--out", str(file)]
        run_ranks(argv, ranks, log_dir=Path(folder) / "logs").raise_for_failure()
        found = hardware_of(str(file))
    if out is not None:
        write_hardware(found, out)
    return found


def profile_worker(*, seconds: float = 120.0, out: Path | None = None) -> Cluster | None:
    """`profile` as one rank: the first returns the cluster and writes the file, others return None."""
    from meshwright.launch.world import device_of
    from meshwright.profile.profile import profile as profile_rank

    check_writable(out)
    with device_of() as device:
        found = profile_rank(device, seconds)
    if found is not None and out is not None:
        write_hardware(found, out)
    return found


def dryrun(
    spec: RunSpec,
    *,
    world: int | None = None,
    rank: int = 0,
    all_stages: bool = False,
    device: str = "cpu",
) -> Result:
    """Run one step of one rank of the layout's world on fake tensors; no rank is started, nothing allocated.

    `world` is checked against the layout. `all_stages` runs a rank of each place in the pipeline, with the
    place of `rank` otherwise. `device` is what the step would run on: 'cpu', or 'cuda' where there is one.
    Returns `world_size`, `layout`, `microbatches`, `assumed` (sentences) and `ranks`: of each `rank`, its
    `pipeline_rank` and `units`, and in bytes `peak`, `components` and `modules` at the peak, `most` of each
    component at any time, `states`, and `wire` (rows of axis, operation, bytes, calls). Raises `UserError`.
    """
    from meshwright.train.dryrun_report import rehearsals

    return rehearsals(spec, world=world, rank=rank, all_stages=all_stages, device=device)
