"""Predictions about runs: simulate, explain, goodput, validate, profile."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

from meshwright.api.options import Option, choice, file_name, number, positive, whole
from meshwright.api.options import tokens as token_count
from meshwright.api.ranks import Result, run_on_ranks
from meshwright.hardware.cluster import Cluster
from meshwright.hardware.find import cluster as hardware_of
from meshwright.hardware.hardware_file import check_writable
from meshwright.hardware.hardware_file import write as write_hardware
from meshwright.planner import OBJECTIVES
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.software import PROGRAM_NAMES, STACKS, stack_named
from meshwright.planner.explain.explanation import Explanation
from meshwright.planner.plan import Finished, Plans
from meshwright.planner.plan import plan as best_plans
from meshwright.planner.preset_figures import SEQ_LEN, SEQUENCES, preset_figures
from meshwright.planner.programs.table import PROGRAMS, check_devices, check_program
from meshwright.planner.search.request import PlanRequest
from meshwright.planner.search.results import Progress
from meshwright.planner.simulated_pipeline import Machine
from meshwright.planner.simulated_pipeline import step as pipeline_step
from meshwright.spec import RunSpec, UserError
from meshwright.spec.errors import did_you_mean
from meshwright.spec.files import MAX_JSON, parse_json, read_text
from meshwright.spec.load import Overrides
from meshwright.spec.other_models import refuse_other_models
from meshwright.units import duration

_SECONDS, _HOURS = number(0, 1e12), number(1e-6, 1e8)
COLUMNS = ("source", "model", "gpu")
"""Columns that `validate` groups by."""
_TOP = (
    "layouts to show, at most 20: they differ in the size of axes (cp, tp, pp, ep, etp, and so of data "
    "ranks), in whether parameters are sharded (ZeRO-3 without a pipeline), or in the recompute policy; of "
    "those that differ in less (replicate, other stages of ZeRO, schedule, stages, microbatch, modes, order) "
    "the best one counts"
)


def _stacks() -> dict[str, str]:
    """Return the software stacks with what each is, and the names of programs with the stack of each."""
    stacks = {name: stack.describes for name, stack in STACKS.items()}
    return stacks | {name: f"stands for {stack}" for name, stack in PROGRAM_NAMES.items()}


def _stack(text: str) -> str:
    """Read the name of a software stack, or of a program that people know by it."""
    name = PROGRAM_NAMES.get(text.lower(), text.lower())
    if name not in STACKS:
        known = ", ".join(f"{each} ({words})" for each, words in _stacks().items())
        raise ValueError(f"it should be one of {known}{did_you_mean(text, _stacks())}")
    return name


ClusterName = Annotated[str | Cluster, Option("a cluster by name, or a hardware file", "NAME", str)]
Stack = Annotated[str, Option("the software that runs it", "NAME", _stack, values=_stacks)]
Page = Annotated[Path | None, Option("page to write, which opens offline", "FILE.html", file_name(".html"))]


def simulate(
    spec: RunSpec,
    *,
    durations: tuple[float, float, float] | None = None,
    flops: float = Machine.flops,
    latency: float = Machine.latency,
    bandwidth: float = Machine.bandwidth,
    out: Annotated[Path | None, Option(
        "timeline to write, a page that opens offline", "FILE.html", file_name(".html"))] = None,
    trace: Annotated[Path | None, Option(
        "trace to write, for Perfetto", "FILE.json", file_name(".json"))] = None,
) -> Result:  # fmt: skip
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

    refuse_other_models(spec, "simulate")
    if spec.forwards_ahead:
        raise UserError(
            "preference: simulate draws the passes of the schedule alone, and not the forward of a reference "
            "before them, which plan and explain count; give --preference none"
        )
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
    cluster: ClusterName,
    *,
    gpus: Annotated[
        int | str | None, Option("devices, or a range such as 64..1024; default one node", "N", str)] = None,
    seq_len: Annotated[int | None, Option(
        "tokens, such as 128k (k = 1,024); default the run's, up to 8192", "S", token_count(1024))] = None,
    batch_tokens: Annotated[int | str | None, Option(
        "tokens of an optimiser step, such as 16M; default the run's", "B", str)] = None,
    top: Annotated[int, Option(_TOP, "K", whole(1))] = 5,
    objective: Annotated[str, Option(", ".join(OBJECTIVES), "NAME", choice(*OBJECTIVES))] = "time",
    within: Annotated[float | str | None, Option(
        "the longest time for --tokens, such as 30d, failures included, with --objective cost and a range of "
        "--gpus", "TIME", duration)] = None,
    max_stages: Annotated[int | None, Option(
        "most stages of a pipeline: its ranks times the stages of each", "N", whole(1))] = None,
    islands: Annotated[int | str | None, Option(
        "islands that exchange parameters now and then (outer), or auto: as many as a slow link takes",
        "N", str)] = None,
    max_exposed: Annotated[float, Option(
        "largest share of the time, in percent, that --islands may wait to exchange",
        "PERCENT", number(0.01, 100))] = 5.0,
    stack: Stack = "meshwright",
    price: Annotated[float | None, Option(
        "USD for a device and hour; default the cluster's", "USD", number(1e-6, 1e6))] = None,
    tokens: Annotated[float | str | None, Option(
        "tokens to train on, such as 15T, for days and USD, failures included", "N", token_count())] = None,
    max_memory: float | None = None,
    overrides: Overrides = (),
    progress: Progress | None = None,
    finished: Finished | None = None,
) -> Plans:  # fmt: skip
    """Return the `top` best layouts of a model on a cluster; `PlanRequest` describes the arguments.

    They differ in the size of an axis, the ZeRO stage or the recompute policy; the first changes least
    of those within 5% of the fastest, which is `faster` where that is another one.
    `progress` is called with each plan that is the best so far, and `finished`, if there are several numbers
    of devices, after the search for each: with the number, and the best plan or None. Raises `UserError`,
    also where nothing fits.
    """
    question = (gpus, seq_len, batch_tokens, top, objective, stack, price, tokens, max_memory, overrides)
    request = PlanRequest(model, cluster, *question, within, max_stages, islands, max_exposed)
    return best_plans(request, progress, finished)


def presets(*, cluster: str | Cluster | None = None) -> Result:
    """The named models, with their sizes and what training takes of one device of `cluster`, by
    default of this machine.

    Returns `device` (its name), `cluster` (None for a GPU that the catalogue lacks), `measured` (true if
    `meshwright profile` measured it), `format`, `seq_len`, `batch_tokens`, `never_measured` (clauses about
    what the predictions rest on), and for each of the `presets` its sizes, `state_bytes`, and `step_bytes`
    and `tokens_per_second` as the planner predicts them, None where no step fits. Nothing is measured.
    Raises `UserError`.
    """
    from meshwright.rank.auto_layout import this_machine

    if cluster is None:
        name, known = this_machine()
    else:
        known = hardware_of(cluster) if isinstance(cluster, str) else cluster
        name = known.device.name
    rows = preset_figures(known)
    plan = next((row.plan for row in rows if row.plan is not None), None)
    return {
        "device": name,
        "cluster": known and known.name,
        "measured": known is not None and known.measured is not None,
        "format": plan and plan.spec.precision.compute,
        "seq_len": SEQ_LEN,
        "batch_tokens": SEQUENCES * SEQ_LEN,
        "never_measured": [] if plan is None else plan.never_measured,
        "presets": [row.to_json() for row in rows],
    }


def explain(
    spec: RunSpec, *, cluster: ClusterName, stack: Stack = "meshwright", out: Page = None
) -> Explanation:
    """Explain the time and memory of a run's layout on a cluster, without torch.

    `cluster` is a name of the catalogue, a hardware file or a `Cluster`; it is resized to the layout's ranks.
    `stack` is the software that runs it (`meshwright.planner.cost.software.STACKS`). `out` is the page to
    write. The explanation has `time`, `memories`, `axes`, `neighbours`, `assumptions` and `to_json()`;
    `meshwright.report.plan_text.text` renders it as text. Raises `UserError`.
    """
    from meshwright.report.plan_page import write_explanation

    refuse_other_models(spec, "explain")
    check_writable(out)
    ranks = spec.layout.world_size
    hardware = hardware_of(cluster, ranks) if isinstance(cluster, str) else cluster.resized(ranks)
    costs = CostModel(hardware, stack_named(stack))
    check_devices(costs.stack.name, hardware.device)
    spec = PROGRAMS[costs.stack.name].opened(spec)
    check_program(costs.stack.name, spec)
    result = Explanation(spec, costs)
    if out is not None:
        write_explanation(Path(out), result)
    return result


def goodput(
    *,
    step_seconds: Annotated[float, Option("seconds of a training step", "S", number(1e-6, 1e12))],
    save_seconds: Annotated[float | None, Option("seconds that a save stops training", "S", _SECONDS)] = None,
    restart_seconds: Annotated[
        float | None, Option("seconds from a failure to training", "S", _SECONDS)] = None,
    chaos: Annotated[Path | None, Option(
        "chaos.json of a run under faults, which measured these two", "FILE", Path)] = None,
    background_seconds: Annotated[
        float, Option("seconds of writing that training overlaps", "S", _SECONDS)] = 0.0,
    mtbf_hours: Annotated[
        float | None, Option("mean hours between failures of the whole system", "H", _HOURS)] = None,
    device_mtbf_hours: Annotated[
        float | None, Option("mean hours of one device, with --devices", "H", _HOURS)] = None,
    devices: Annotated[int | None, Option("number of devices", "N", whole(1))] = None,
    batch_tokens: Annotated[
        int | None, Option("tokens of a step, such as 16M, for tokens a day", "N", token_count())] = None,
    tokens: Annotated[float | None, Option(
        "tokens of the run, such as 15T; needs --batch-tokens", "N", token_count())] = None,
    price: Annotated[float | None, Option(
        "price of a device-hour; needs --tokens and --devices", "AMOUNT", positive)] = None,
    every: Annotated[
        int | None, Option("steps between saves, instead of the best number", "STEPS", whole(1))] = None,
    runs: Annotated[int | None, Option("also simulate N runs, event by event", "N", whole(2))] = None,
    seed: Annotated[int, Option("seed of the simulation", "N", whole(0))] = 0,
) -> Result:  # fmt: skip
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


def validate(
    table: Path | None = None,
    *,
    by: Annotated[str, Option("group by source, model or gpu", "COLUMN", choice(*COLUMNS))] = "source",
    rows: Annotated[bool, Option("also show every row, measured and predicted")] = False,
) -> Result:
    """Compare the planner's predictions with measured runs: those of `table`, or the published ones.

    The result has `rows`, `predicted`, `skipped` (reason -> number of rows), `skipped_rows` (row, source,
    reason), `notes` (row, source, note) on words of comments that are not known, `time` and `memory`
    (absolute errors in percent), `tau`, `regret_pct`, `regret_median_pct`, `fastest_shown` (of `groups`, how
    many have their fastest layout among the three that are predicted fastest), `oom` (`true_fit`,
    `false_fit`, `true_oom`, `false_oom`), and these figures `by_source` and by the column `by` (source, model
    or gpu); `cells` has the ranking by model, devices and batch. With `rows` it also has `each` row that is
    predicted. Raises `UserError`.
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
    return {**result, "each": each}


def profile(
    *,
    nproc: int | None = None,
    seconds: Annotated[float, Option("about how long to measure", "S", number(1.0, 3600))] = 120.0,
    out: Annotated[Path | None, Option("hardware file to write", "FILE.json", file_name(".json"))] = None,
) -> Cluster:
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
