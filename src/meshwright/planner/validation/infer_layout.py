"""The layout of a published run, from its row, and from its program's habits where the row does not state
it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from meshwright.planner.cost.software import SoftwareStack
from meshwright.planner.programs.table import PROGRAMS
from meshwright.planner.validation.infer_remat import policy_of
from meshwright.planner.validation.table import PredictionError, Row, short
from meshwright.spec import Layout, ModelSpec, RunSpec
from meshwright.spec.pipeline_schedules import SCHEDULES, virtual_problem
from meshwright.spec.sections import FullRecompute, NoRecompute, SelectiveRecompute

_SCHEDULES = {
    **{name: name for name in SCHEDULES},
    "zb-2p": "zb-h2",
    "zb-1p": "zb-h1",
    "1f1b-i": "interleaved",
    "dualpipe": "dualpipe-v",
}
"""Names of schedules in publications -> names of this program."""
_POLICIES = {"none": NoRecompute(), "selective": SelectiveRecompute(), "full": FullRecompute()}
"""The least recomputation first."""
DATA_ALONE = "data ranks alone"
"""The layout that a row without one is taken for."""
_MICRO_BATCHES = (1, 2, 4, 8, 16)
"""Microbatch sizes to try where a row does not state one. Source: assumed."""
_MOST_VIRTUAL = 4
"""Most stages per pipeline rank to try. Source: assumed."""


def layout_of(row: Row, gpus: int, program: SoftwareStack) -> Layout:
    """The layout, except for properties that `choices` tries. Raises `PredictionError`."""
    if gpus % row.model_ranks:
        raise PredictionError(f"tp x cp x pp = {row.model_ranks} does not divide its {gpus} GPUs")
    if (dp := row.whole("dp")) and dp * row.model_ranks != gpus:
        raise PredictionError(f"dp x tp x cp x pp = {dp * row.model_ranks} are not its {gpus} GPUs")
    if gpus > 1 and all(row.whole(name) is None for name in ("tp", "cp", "pp", "dp")):
        row.infer("layout", DATA_ALONE)
    sizes = {name: row.whole(name) or 1 for name in ("tp", "cp", "pp", "ep", "etp")}
    zero = row.whole_or("zero", program.habitual_zero)
    stated = row.words["sequence_parallel"]
    sequence_parallel = stated == "yes" if stated else program.habitual_sequence_parallel
    if not stated and sizes["tp"] > 1:
        row.infer("sequence_parallel", "yes" if sequence_parallel else "no")
    schedule, virtual = _schedule(row, sizes["pp"])
    return Layout.model_validate(
        {
            **sizes,
            "dp": gpus // row.model_ranks,
            "zero": zero,
            "sequence_parallel": sequence_parallel,
            "schedule": schedule,
            "stages": "even",
            "virtual": virtual if schedule in ("interleaved", "bfs") else None,
        }
    )


def _named_schedule(row: Row) -> str:
    """The schedule of the row's cell, or that its comment names, as 'schedule=ZB-1p', in small letters."""
    if stated := row.words["schedule"]:
        return stated.lower()
    named = row.says(r"(?<!lr )(?<!rate )schedule ?= ?([\w-]+)")
    return named[1].lower() if named else ""


def _schedule(row: Row, ranks: int) -> tuple[str, int]:
    """The pipeline schedule, and its stages on each of `ranks` ranks. Raises `PredictionError`."""
    named, virtual = _named_schedule(row), row.whole("vp") or 0
    if named not in ("", *_SCHEDULES):
        raise PredictionError(f"its schedule '{short(named)}' is not one of {', '.join(_SCHEDULES)}")
    schedule = _SCHEDULES.get(named, "1f1b")
    if ranks == 1 and (virtual > 1 or schedule != "1f1b"):
        raise PredictionError(
            f"its {f'vp = {virtual}' if virtual > 1 else schedule} has no pipeline: pp is 1"
        )
    if schedule == "1f1b" and virtual > 1:
        schedule = "interleaved"
    if SCHEDULES[schedule].stages != 1 and not virtual:
        virtual = SCHEDULES[schedule].stages or row.infer("vp", 2)
    if virtual_problem(schedule, virtual or 1) or (virtual == 1 and SCHEDULES[schedule].stages != 1):
        raise PredictionError(f"its schedule {schedule} does not have vp = {virtual} stages a rank")
    if named:
        row.derive("schedule", schedule)
    return schedule, virtual


def check_layout(row: Row, layout: Layout, model: ModelSpec, batch: int) -> None:
    """Raise `PredictionError` for a layout that cannot have run with the row's batch and model."""
    stages, folded = layout.pp * (layout.virtual or 1), layout.data_ranks * layout.cp * layout.tp
    per_rank, micro, length = batch // layout.data_ranks, row.whole("micro_batch") or 0, row.whole("seq_len")
    heads, groups, ep, etp = model.heads, model.kv_heads, layout.ep, layout.etp
    experts, top_k = (model.moe.experts, model.moe.top_k) if model.moe else (0, 0)
    counts = {name: row.whole(name) or 0 for name in ("moe_ffn", "shared_ffn", "top_k")}
    without = next((name for name, count in counts.items() if count > (name == "top_k")), "")
    problems = (
        (stages > model.layers + 2, f"pp x vp = {stages} stages are more than its {model.layers} layers"),
        (top_k > experts, f"top_k = {top_k} is more than its {experts} experts"),
        (experts % ep, f"ep = {ep} does not divide its {experts} experts"),
        (folded % (ep * etp), f"{_expert_axes(layout)} does not divide the {folded} GPUs of a stage"),
        (not experts and ep > 1, f"ep = {ep} has no experts to deal out"),
        (not experts and etp > 1, f"etp = {etp} has no experts to slice"),
        (experts and model.moe and model.moe.ffn % etp, f"etp = {etp} does not divide its experts' channels"),
        (
            not experts and without,
            f"its {without} is of experts, of which it has none; give their number, or an empty cell",
        ),
        (heads % layout.tp, f"tp = {layout.tp} does not divide its {heads} heads"),
        (heads % groups, f"its {groups} kv_heads do not divide its {heads} heads"),
        ((length or 0) % layout.cp, f"cp = {layout.cp} does not divide sequences of {length} tokens"),
        (
            batch % layout.data_ranks,
            f"{batch} sequences are not shared evenly by {layout.data_ranks} data ranks",
        ),
        (
            micro > per_rank,
            f"micro_batch = {micro} is more than the {per_rank} sequences of a data rank",
        ),
        (
            micro and per_rank % micro,
            f"micro_batch = {micro} does not divide the {per_rank} sequences of a data rank",
        ),
    )
    for wrong, reason in problems:
        if wrong:
            raise PredictionError(reason)


def _expert_axes(layout: Layout) -> str:
    product = layout.ep * layout.etp
    return f"ep x etp = {product}" if layout.etp > 1 else f"ep = {product}"


def batch_of(row: Row, table: Sequence[Row], layout: Layout) -> int:
    """Sequences per step: the row's, or as many per data rank as another row of its source and model has.

    Raises `PredictionError`.
    """
    if (batch := row.whole("global_batch_seqs")) is not None:
        return batch
    for other in table:
        sequences, gpus = other.whole("global_batch_seqs"), other.whole("gpus")
        related = all(other.words[name] == row.words[name] for name in ("source", "model"))
        if related and sequences is not None and gpus and "broken" not in other.words:
            batch = sequences * layout.data_ranks // max(1, gpus // other.model_ranks)
            row.infer("global_batch_seqs", f"{batch}, as in another row of its table")
            return batch
    raise PredictionError("its batch is not known")


def choices(row: Row, base: RunSpec, program: SoftwareStack) -> Sequence[RunSpec]:
    """All runs that the row may describe, by the properties that it does not state, that its program runs;
    of a row whose program runs none by our rules, which its owner knows better, all.

    These are microbatches, virtual stages and recomputation, the least recomputation first.
    """
    every = list(_choices(row, base, program))
    runs = PROGRAMS[program.name]
    return [spec for spec in every if runs.broken(spec) is None] or every


def _choices(row: Row, base: RunSpec, program: SoftwareStack) -> Iterator[RunSpec]:
    layout, micro, stated = base.layout, row.whole("micro_batch"), _recompute(row)
    per_rank = base.batch_sequences // layout.data_ranks
    if stated not in _POLICIES:
        row.infer("recompute", "the least that fits")
    policies = [_POLICIES[stated]] if stated in _POLICIES else list(_POLICIES.values())
    if micro:
        sizes = [micro]
    elif program.microbatches_are_stages and layout.pp > 1:
        sizes = [max(1, per_rank // layout.pp)]
        row.infer("micro_batch", f"{sizes[0]}, as many microbatches as pipeline ranks")
    else:
        sizes = [size for size in _MICRO_BATCHES if per_rank % size == 0]
        row.infer("micro_batch", "the fastest that fits")
    unstated = row.whole("vp") is None and not _named_schedule(row)
    tuned = unstated and (program.tuned == "always" or (program.tuned == "untold" and not micro))
    for policy, size in product(policies, sizes):
        for schedule, virtual in _interleavings(base, per_rank // size, tuned, program.tuned == "always"):
            changed = {"micro_batch": size, "schedule": schedule, "virtual": virtual}
            dealt = PROGRAMS[program.name].dealt(base.model, layout.model_copy(update=changed))
            yield base.model_copy(update={"layout": dealt, "recompute": policy})


def _recompute(row: Row) -> str:
    """The recomputation that the row states, or that its comment names as MaxText does; or an empty text."""
    if stated := row.words["recompute"]:
        return stated
    named = policy_of(row)
    return row.derive("recompute", named) if named else ""


def _interleavings(
    base: RunSpec, microbatches: int, tuned: bool, uneven: bool
) -> Iterator[tuple[str, int | None]]:
    """(schedule, stages per rank) of the row, and interleaved ones if its authors may have tuned them."""
    layout, layers = base.layout, base.model.layers
    if layout.schedule == "interleaved" and microbatches % layout.pp:
        return
    yield layout.schedule, layout.virtual
    if not tuned or layout.pp == 1 or microbatches % layout.pp:
        return
    for virtual in range(2, _MOST_VIRTUAL + 1):
        if layers % (layout.pp * virtual) == 0 or (uneven and layout.pp * virtual <= layers + 2):
            yield "interleaved", virtual
