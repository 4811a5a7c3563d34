"""Predictions about runs: simulate, explain, goodput, validate, profile, dryrun."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from meshwright.api.ranks import Result, run_on_ranks
from meshwright.hardware.cluster import Cluster
from meshwright.hardware.find import cluster as hardware_of
from meshwright.hardware.hardware_file import check_writable
from meshwright.hardware.hardware_file import write as write_hardware
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.software import stack_named
from meshwright.planner.explain.explanation import Explanation
from meshwright.planner.plan import Finished, Plans
from meshwright.planner.plan import plan as best_plans
from meshwright.planner.search.request import PlanRequest
from meshwright.planner.search.results import Progress
from meshwright.planner.simulated_pipeline import Machine
from meshwright.planner.simulated_pipeline import step as pipeline_step
from meshwright.spec import RunSpec, UserError
from meshwright.spec.files import MAX_JSON, parse_json, read_text
from meshwright.spec.layout import WHOLE_SCHEDULE
from meshwright.spec.load import Overrides
from meshwright.spec.teacher import refuse_distillation


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
    """Simulate one step of the run's pipeline, without torch and without starting ranks.

    `durations` are the seconds of one microbatch's F, I and W in every stage; by default they follow from the
    stages' FLOPs at `flops` a second. A message between stages takes `latency` seconds plus its bytes /
    `bandwidth`. `out` is the timeline's page to write, `trace` the trace for Perfetto.
    Returns `step_seconds`, `bubble`, `bubbles`, `peak_activations` (in microbatches through all of a rank's
    stages) and `peak_activation_bytes` (of one device) by rank, `closed_form_bubble` (or None) and more.
    Raises `UserError`.
    """
    from meshwright.report.timeline import write_timeline, write_trace
    from meshwright.schedule import ScheduleError, StageCost

    refuse_distillation(spec, "simulate")
    check_writable(out)
    check_writable(trace, "--trace")
    try:
        machine = Machine(flops, latency, bandwidth)
        step = pipeline_step(spec, machine, StageCost(*durations) if durations else None)
    except ScheduleError as error:
        raise UserError(str(error)) from None
    if out is not None:
        write_timeline(step.simulation, Path(out))
    if trace is not None:
        write_trace(step.simulation, Path(trace))
    machine_json = {"flops": None if durations else flops, "latency": latency, "bandwidth": bandwidth}
    return step.to_json() | machine_json


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
    within: float | str | None = None,
    max_stages: int | None = None,
    islands: int | str | None = None,
    max_exposed: float = 5.0,
    progress: Progress | None = None,
    finished: Finished | None = None,
) -> Plans:
    """Return the `top` best layouts of a model on a cluster; `PlanRequest` describes the arguments.

    They differ in the size of an axis, the ZeRO stage or the recompute policy; the first is the simplest of
    those within 2% of the fastest, which is `faster` where that is another one.
    `progress` is called with each plan that is the best so far, and `finished`, if there are several numbers
    of devices, after the search for each: with the number, and the best plan or None. Raises `UserError`,
    also where nothing fits.
    """
    question = (gpus, seq_len, batch_tokens, top, objective, stack, price, tokens, max_memory, overrides)
    request = PlanRequest(model, cluster, *question, within, max_stages, islands, max_exposed)
    return best_plans(request, progress, finished)


def explain(
    spec: RunSpec, *, cluster: str | Cluster, stack: str = "meshwright", out: Path | None = None
) -> Explanation:
    """Explain the time and memory of a run's layout on a cluster, without torch.

    `cluster` is a name of the catalogue, a hardware file or a `Cluster`; it is resized to the layout's ranks.
    `stack` is the software that runs it (`meshwright.planner.cost.software.STACKS`). `out` is the page to
    write. The explanation has `time`, `memories`, `axes`, `neighbours`, `assumptions` and `to_json()`;
    `meshwright.report.plan_text.text` renders it as text. Raises `UserError`.
    """
    from meshwright.report.plan_page import write_explanation

    refuse_distillation(spec, "explain")
    check_writable(out)
    ranks = spec.layout.world_size
    hardware = hardware_of(cluster, ranks) if isinstance(cluster, str) else cluster.resized(ranks)
    software, layout = stack_named(stack), spec.layout
    if "schedule" not in layout.model_fields_set and layout.schedule not in software.schedules:
        layout = layout.model_copy(
            update={"schedule": WHOLE_SCHEDULE}
        )  # which every program with pipelines has
    result = Explanation(spec.model_copy(update={"layout": layout}), CostModel(hardware, software))
    if out is not None:
        write_explanation(Path(out), result)
    return result


def goodput(
    *,
    step_seconds: float,
    save_seconds: float | None = None,
    restart_seconds: float | None = None,
    chaos: Path | None = None,
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
    """Return the best checkpoint interval under failures, and the goodput with it, without torch.

    The system fails every `mtbf_hours` on average, or each of its `devices` every `device_mtbf_hours`; a save
    stops training for `save_seconds` and is complete `background_seconds` later; a restart takes
    `restart_seconds`. Where one of these two is not given, it is what a run under faults measured, whose
    report (`chaos.json`) is `chaos`. Returns `interval_steps`, the shares of the time `effective`, `saving`,
    `lost_work` and `restarting`, `tokens_per_day`, `days`, `cost` (of `tokens`, at `price` a device-hour) and
    more. `every` fixes the number of steps between saves instead; `runs` also simulates that many runs.
    Raises `UserError`.
    """
    from meshwright.reliability import goodput as model
    from meshwright.reliability.monte_carlo import simulate as simulate_failures

    mtbf = model.system_mtbf(mtbf_hours, device_mtbf_hours, devices)
    save = _measured(chaos, "save_seconds") if save_seconds is None else save_seconds
    restart = _measured(chaos, "restart_seconds") if restart_seconds is None else restart_seconds
    faults = model.Faults(mtbf, save, restart, background_seconds)
    best = model.goodput(
        step_seconds,
        faults,
        batch_tokens=batch_tokens,
        tokens=tokens,
        devices=devices,
        price=price,
        every=every,
    )
    if runs is None:
        return {**best.to_json(), "simulated": None}
    simulated = simulate_failures(faults, best.interval_seconds, best.saves or 1000, runs, seed)
    return {**best.to_json(), "simulated": simulated.to_json()}


def _measured(chaos: Path | None, name: str) -> float:
    """Return a figure that a run under faults measured. Raises `UserError` where there is none."""
    if chaos is None:
        raise UserError(f"{name}: is missing; give {name} S, or the chaos report of a run that measured it")
    try:
        value = parse_json(read_text(chaos, MAX_JSON))[name]
    except (OSError, ValueError) as error:
        raise UserError(
            f"chaos: {chaos} cannot be read ({error}); give the chaos.json of a run under faults"
        ) from None
    except (KeyError, TypeError):
        raise UserError(f"chaos: {chaos} has no {name}; give the chaos.json of a run under faults") from None
    if not isinstance(value, int | float):
        raise UserError(f"{name}: the run of {chaos} did not measure it; give {name} S")
    return float(value)


def validate(table: Path | None = None, *, rows: bool = False, by: str = "source") -> Result:
    """Compare the planner's predictions with measured runs: those of `table`, or the published ones.

    The result has `rows`, `predicted`, `skipped` (reason -> rows), `time` and `memory` (absolute errors in
    percent), `tau`, `regret_pct`, `oom` (`true_fit`, `false_fit`, `true_oom`, `false_oom`), and these figures
    `by_source` and by the column `by` (source, model or gpu). With `rows` it also has `each` row, and
    `skipped_rows` (row, source, reason) for those that are not predicted. Raises `UserError`.
    """
    from meshwright.planner.validation import left_out, metrics
    from meshwright.planner.validation.table import FRONTIER, PUBLISHED

    runs = metrics.validate(Path(table) if table else PUBLISHED)
    result = metrics.report(runs, by)
    if table is None:
        result["frontier"] = metrics.report(metrics.validate(FRONTIER), by)
        result["left_out"] = left_out.report(left_out.read())
    if not rows:
        return result
    each = [prediction.to_json() for prediction in runs.predictions]
    return {**result, "each": each, "skipped_rows": list(runs.skipped)}


def profile(*, nproc: int | None = None, seconds: float = 120.0, out: Path | None = None) -> Cluster:
    """Measure this machine with `nproc` processes (default: one for each GPU, or core) for about `seconds`.

    The returned cluster holds the measurements in `measured`; `out` is the hardware file to write. Raises
    `UserError`.
    """
    from meshwright.rank.env import count_devices

    check_writable(out)
    ranks = count_devices() if nproc is None else nproc
    measured = run_on_ranks(partial(profile_worker, seconds=seconds), ranks)
    assert measured is not None  # this process is not one of several ranks
    if out is not None:
        write_hardware(measured, out)
    return measured


def profile_worker(*, seconds: float = 120.0, out: Path | None = None) -> Cluster | None:
    """Run `profile` as one rank: the first returns the cluster and writes the file, others return None."""
    from meshwright.profile.profile import profile as profile_rank
    from meshwright.rank.world import device_of

    check_writable(out)
    with device_of() as device:
        measured = profile_rank(device, seconds)
    if measured is not None and out is not None:
        write_hardware(measured, out)
    return measured


def dryrun(
    spec: RunSpec, *, world: int | None = None, rank: int = 0, all_stages: bool = False, device: str = "cpu"
) -> Result:
    """Run one step of one rank of the layout's world on fake tensors, without other ranks or allocations.

    `world` is checked against the layout. `all_stages` runs one rank of each pipeline stage, at the position
    of `rank` otherwise. `device` is where the step would run: 'cpu', or 'cuda' if there is one. Returns
    `world_size`, `layout`, `microbatches`, `assumed` (sentences) and `ranks`: for each `rank`, its
    `pipeline_rank` and `units`, and in bytes `peak`, `components` and `modules` at the peak, `most` of each
    component at any time, `states`, and `wire` (rows of axis, operation, bytes, calls). Raises `UserError`.
    """
    from meshwright.dryrun.report import rehearsals

    refuse_distillation(spec, "dryrun")
    return rehearsals(spec, world=world, rank=rank, all_stages=all_stages, device=device)
